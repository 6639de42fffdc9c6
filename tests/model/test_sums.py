"""Sums in float64, rounded once: the same whatever the order, gradients as before, refused where useless."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax.loss import token_logprobs
from grpo_roc_jax.model.attention import attend_reference, make_attention
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.lora import LoraConfig, attach, init_adapter
from grpo_roc_jax.model.sums import NARROW, Sums
from grpo_roc_jax.model.transformer import forward, init_params, sums_of

WIDE = Sums(wide=True)
MODEL = ModelConfig(d_model=32, layers=2, heads=4, kv_heads=2, head_dim=8, d_ff=64, vocab_size=97, qk_norm=True)


def drawn(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape) * jnp.exp2(
        jax.random.randint(jax.random.key(9), shape, -9, 9)
    )


@pytest.mark.parametrize(
    ("of", "exactly"),
    [
        (lambda sums, x, y: sums.einsum("mk,kn->mn", x, y), lambda x, y: x @ y),
        (lambda sums, x, y: sums.product(partial(jnp.tensordot, axes=1), x, y), lambda x, y: x @ y),
        (lambda sums, x, y: sums.total(x, -1), lambda x, y: x.sum(-1)),
        (lambda sums, x, y: sums.total(y, (0, 1), keepdims=True), lambda x, y: y.sum(keepdims=True)),
        (lambda sums, x, y: sums.mean(x), lambda x, y: x.mean(-1, keepdims=True)),
    ],
)
def test_wide_sums_are_the_exact_ones_rounded_once(of, exactly):
    x, y = drawn(40, 999), drawn(999, 30, seed=1)
    found, narrow = (np.asarray(jax.jit(partial(of, sums))(x, y)) for sums in (WIDE, NARROW))
    expected = exactly(np.asarray(x, np.float64), np.asarray(y, np.float64)).astype(np.float32)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1.2e-7)
    assert found.size < 9 or (np.abs(found - expected) > 0).sum() < (np.abs(narrow - expected) > 0).sum()


def test_the_order_of_the_operands_is_not_seen():
    x, y = drawn(4, 999), drawn(999, 30, seed=1)
    order = jax.random.permutation(jax.random.key(3), 999)
    permuted = lambda sums: (sums.einsum("mk,kn->mn", x, y), sums.einsum("mk,kn->mn", x[:, order], y[order]))  # noqa: E731
    np.testing.assert_array_equal(*permuted(WIDE))
    assert np.any(np.not_equal(*permuted(NARROW)))
    np.testing.assert_array_equal(WIDE.softmax(x)[:, order], WIDE.softmax(x[:, order]))


@pytest.mark.parametrize("remat", [None, jax.checkpoint], ids=["kept", "recomputed"])
@pytest.mark.parametrize("lora", [False, True], ids=["whole", "adapter"])
def test_values_and_gradients_are_those_of_plain_sums(lora, remat):
    params = init_params(jax.random.key(0), MODEL)
    if lora:
        lora_config = LoraConfig(rank=2)
        adapter = init_adapter(jax.random.key(1), lora_config, MODEL)
        noise = lambda leaf: leaf + 0.02 * jax.random.normal(jax.random.key(leaf.size), leaf.shape)  # noqa: E731
        params = attach(params, jax.tree.map(noise, adapter), lora_config)
    tokens = jax.random.randint(jax.random.key(2), (2, 24), 0, 97)
    segments = jnp.where(jnp.arange(24) < 9, 1, 2)[None] * jnp.ones((2, 1), jnp.int32)
    positions = jnp.broadcast_to(jnp.where(jnp.arange(24) < 9, jnp.arange(24), jnp.arange(24) - 9), (2, 24))

    @partial(jax.value_and_grad, has_aux=True)
    def loss(params, model):
        sums = sums_of(model)
        attend = make_attention("auto", 24, sums=sums)
        hidden = forward(params, tokens, positions, segments, model, attend=attend, remat=remat)
        logprobs, entropy = token_logprobs(params, hidden, tokens, segments, vocab_chunk=40, sums=sums)
        return jnp.sum(jnp.cos(logprobs) + entropy), logprobs

    (_, narrow), plain = jax.jit(loss, static_argnums=1)(params, MODEL)
    (_, wide), found = jax.jit(loss, static_argnums=1)(params, replace(MODEL, sums="float64"))
    np.testing.assert_allclose(wide, narrow, atol=1e-5)
    assert np.any(np.not_equal(wide, narrow))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
        assert a.dtype == b.dtype == jnp.float32
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1.0, float(jnp.abs(b).max())))


def test_the_forward_pass_attends_with_the_sums_of_its_model():
    wide, params = replace(MODEL, sums="float64"), init_params(jax.random.key(0), MODEL)
    tokens = jax.random.randint(jax.random.key(2), (2, 24), 0, 97)
    rows = (params, tokens, jnp.broadcast_to(jnp.arange(24), (2, 24)), jnp.ones_like(tokens), wide)
    found, expected, narrow = (
        forward(*rows, **given)
        for given in ({}, {"attend": make_attention("reference", 24, sums=WIDE)}, {"attend": attend_reference})
    )
    np.testing.assert_array_equal(found, expected)
    assert np.any(np.not_equal(found, narrow))


@pytest.mark.parametrize("fields", [{"compute_dtype": "bfloat16"}, {"experts": 4, "experts_per_token": 2}])
def test_what_does_not_compute_in_dense_float32_is_refused(fields):
    with pytest.raises(ValueError, match=r"take model\.sums float32"):
        ModelConfig(sums="float64", **fields)


@pytest.mark.parametrize("path", ["blocked", "splash", "cudnn"])
def test_attention_that_adds_up_by_blocks_is_refused_and_never_chosen(path):
    with pytest.raises(ValueError, match=r"auto or reference, or model\.sums float32"):
        make_attention(path, 1024, "cpu", sums=WIDE)
    make_attention("auto", 1024, "cpu", sums=WIDE)


def test_where_auto_computes_in_bfloat16_sums_stay_those_of_the_hardware(monkeypatch):
    wide = replace(MODEL, sums="float64")
    assert sums_of(wide) == WIDE and sums_of(MODEL) == NARROW
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert sums_of(wide) == NARROW
