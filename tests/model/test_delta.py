"""The gated delta rule in chunks, and its gradients, against a scan over tokens in float64.

`test_families.py` compares both with torch.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax.learner.loss import UpdateConfig
from grpo_roc_jax.learner.pack import BatchConfig
from grpo_roc_jax.model.config import GatedDelta, ModelConfig, SomeExtras
from grpo_roc_jax.model.delta import Memory, Signals, empty_memory, invert, recur_cached, recur_packed, token_flops
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh, param_shardings
from grpo_roc_jax.model.transformer import forward, init_params, take_layer
from tests.helpers import reference
from tests.helpers.published_models import random_tokens
from tests.learner import test_update

DELTA = GatedDelta(key_heads=2, value_heads=6, key_dim=4, value_dim=5, conv=3)
B, T = 2, 150


def signals_of(seed=0, rows=B, length=T):
    rng = np.random.default_rng(seed)
    qkv = rng.normal(size=(rows, length, 2, 2 * 4 + 3 * 5))
    decay = -np.exp(rng.normal(size=(rows, length, 6)) * 1.5 - 2)
    rate = rng.uniform(size=(rows, length, 6))
    return Signals(*(jnp.asarray(x, jnp.float32) for x in (qkv, decay, rate)))


CONV = jnp.asarray(np.random.default_rng(9).normal(size=(2, 23, 3)), jnp.float32)


def by_token(segments, signals, conv):
    """The rule as a scan over tokens, with a new state and no past inputs in each segment."""
    position = jnp.arange(T)[None]
    first = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    since = position - jax.lax.cummax(jnp.where(first, position, 0), axis=1)
    past = [jnp.pad(signals.qkv, ((0, 0), (j, 0), (0, 0), (0, 0)))[:, :T] for j in range(3)]
    weights = [conv[None, None, :, :, 2 - j] for j in range(3)]
    x = jax.nn.silu(sum(jnp.where((since >= j)[..., None, None], past[j], 0.0) * weights[j] for j in range(3)))
    unit = [y / jnp.sqrt(jnp.sum(y * y, -1, keepdims=True) + 1e-6) for y in (x[..., :4], x[..., 4:8])]
    q, k = (jnp.repeat(y, 3, axis=2) for y in unit)

    def step(state, token):
        q, k, v, decay, rate, first = token
        state = jnp.where(first[:, None, None, None], 0.0, jnp.exp(decay)[..., None, None] * state)
        error = rate[..., None] * (v - jnp.einsum("bnpu,bnp->bnu", state, k))
        state += k[..., None] * error[:, :, None]
        return state, jnp.einsum("bnpu,bnp->bnu", state, q / 2)

    tokens = q, k, x[..., 8:].reshape(-1, T, 6, 5), signals.decay, signals.rate, first
    tokens = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 1, 0), tokens)
    return jnp.moveaxis(jax.lax.scan(step, jnp.zeros((len(x), 6, 4, 5), x.dtype), tokens)[1], 0, 1)


def in_float64(run, *inputs):
    with jax.enable_x64(True):
        return jax.device_get(jax.jit(run)(*jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), inputs)))


def test_packed_rows_and_their_gradients_equal_the_rule_token_by_token():
    """Segments begin within chunks, at their borders, and span several; padding comes last."""
    segments = np.stack([np.repeat([1, 2, 3, 0], [1, 63, 80, 6]), np.repeat([1, 2, 0], [130, 2, 18])]).astype(np.int32)
    weight = np.random.default_rng(2).normal(size=(B, T, 6, 5))

    def pulled(run):
        def both(signals, conv):
            out, pull = jax.vjp(run, signals, conv)
            return out, *jax.tree.leaves(pull(jnp.asarray(weight, out.dtype)))

        return both

    got = jax.jit(pulled(partial(recur_packed, DELTA, jnp.asarray(segments))))(signals_of(), CONV)
    expected = in_float64(pulled(partial(by_token, segments)), signals_of(), CONV)
    np.testing.assert_allclose(got[0], expected[0], atol=2e-6)
    for leaf, other in zip(got[1:], expected[1:], strict=True):
        np.testing.assert_allclose(leaf, other, atol=3e-5 * float(np.abs(other).max()))


def test_a_cached_row_in_padded_pieces_equals_the_whole_row():
    """Pieces of any length, one of none, padding of random numbers; a new row in the place of the old one."""
    signals = signals_of(1)
    expected = in_float64(partial(by_token, np.ones((B, T))), signals, CONV)
    step = jax.jit(recur_cached)
    memory = Memory(*(leaf + 7.0 for leaf in empty_memory(DELTA, B, jnp.float32)))  # what another row left
    at = np.zeros(B, int)
    for piece in ([1, 9], [0, 0], [16, 2], [3, 16], [1, 1], [16, 0]):
        length, (noise_qkv, noise_decay, noise_rate) = np.array(piece), signals_of(2, length=16)
        padded = [np.array(x) for x in (noise_qkv, noise_decay, noise_rate)]
        for b in range(B):
            for x, new in zip(padded, signals, strict=True):
                x[b, : length[b]] = new[b, at[b] : at[b] + length[b]]
        before = memory
        padded = Signals(*map(jnp.asarray, padded))
        out, memory = step(memory, jnp.asarray(at == 0), jnp.asarray(length), padded, CONV)
        for b in range(B):
            np.testing.assert_allclose(out[b, : length[b]], expected[b, at[b] : at[b] + length[b]], atol=2e-6)
            if length[b] == 0:
                jax.tree.map(lambda new, old, b=b: np.testing.assert_array_equal(new[b], old[b]), memory, before)
        at += length


def test_the_inverse_is_exact_where_powers_would_overflow():
    """All keys equal and all rates 1: powers of the matrix reach 10^17 and would cancel."""
    lower = np.tril(np.ones((64, 64), np.float32), -1)
    wanted = np.eye(64) - np.eye(64, k=-1)
    np.testing.assert_allclose(jax.jit(invert)(lower[None])[0], wanted, atol=1e-5)
    drawn, weight = np.random.default_rng(0).normal(size=(2, 8, 8)).astype(np.float32)
    drawn = 0.3 * np.tril(drawn, -1)
    got = jax.jit(jax.grad(lambda lower: jnp.sum(weight * invert(jnp.tril(lower, -1)))))(drawn)
    inverse = np.linalg.inv(np.eye(8) + drawn)  # d sum(W * X^-1) = -X^-T W X^-T
    np.testing.assert_allclose(got, np.tril(-inverse.T @ weight @ inverse.T, -1), atol=1e-5)


MODEL = ModelConfig(
    d_model=16, layers=2, heads=2, kv_heads=2, head_dim=8, d_ff=24, vocab_size=64, extras=SomeExtras(rotary_share=0.5)
)
SPLIT = GatedDelta(key_heads=2, value_heads=4, key_dim=4, value_dim=6, every=2)


@pytest.mark.slow
def test_gradients_on_a_mesh_are_those_of_one_device(monkeypatch):
    """Heads over `tensor`, rows of two chunks over `data` and `fsdp`, under rematerialization. In float64: the gradient
    of a decay is a small sum of large terms, which float32 rounds by up to 1e-4 of it."""
    rows, model = reference.random_rows(test_update.LENGTHS, 64), replace(MODEL, windows=SPLIT, layers=4)
    options = {"config": BatchConfig(96, 1), "model": model, "update": UpdateConfig(remat="full")}
    monkeypatch.setattr(jnp, "float32", jnp.float64)
    with jax.enable_x64(True):
        params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), test_update.params_of(model))
        got, expected = (
            test_update.gradients(rows, axes, params=params, **options) for axes in ((2, 2, 2), test_update.ONE)
        )
    test_update.assert_close(got, expected, 1e-11)


def test_what_the_layers_cannot_be_is_refused():
    hybrid = replace(MODEL, windows=SPLIT)
    with pytest.raises(ValueError, match=r"sharding\.sequence = 2 with model\.windows gated_delta.*set sharding\.seq"):
        param_shardings(hybrid, make_mesh(ShardingConfig(data=4, sequence=2)))
    with pytest.raises(ValueError, match=r"model\.windows\.key_heads = 2 is not divisible by sharding\.tensor = 4"):
        param_shardings(replace(hybrid, heads=4, kv_heads=4), make_mesh(ShardingConfig(data=2, tensor=4)))
    with pytest.raises(ValueError, match=r"value_heads = 3 is not a multiple of model\.windows\.key_heads = 2"):
        GatedDelta(key_heads=2, value_heads=3, key_dim=4, value_dim=4)
    with pytest.raises(ValueError, match=r"model\.windows\.every = 4; must be at most model\.layers = 2"):
        ModelConfig(layers=2, windows=GatedDelta(key_heads=2, value_heads=2, key_dim=4, value_dim=4))
    with pytest.raises(ValueError, match=r"rotary_share = 0\.25 of model\.head_dim = 12 rotates 3 columns"):
        ModelConfig(head_dim=12, extras=SomeExtras(rotary_share=0.25))


def test_the_scan_gives_every_layer_its_own_options():
    """A scan over two periods equals one layer after the other; the pattern of rotations is longer than a period."""
    extras = SomeExtras(rotary_share=0.5, rotary_layers=(True, True, True, False))
    model = replace(MODEL, layers=8, windows=SPLIT, extras=extras)
    params = jax.jit(init_params, static_argnums=1)(jax.random.key(3), model)
    params = jax.tree.map(lambda leaf: leaf + 0.2 * jax.random.normal(jax.random.key(leaf.size), leaf.shape), params)
    tokens, positions = jnp.asarray(random_tokens(2, 24) % model.vocab_size), jnp.broadcast_to(jnp.arange(24), (2, 24))

    @partial(jax.jit, static_argnums=1)
    def hidden(params, model):
        return forward(params, tokens, positions, jnp.ones_like(tokens), model)

    layers = tuple(take_layer(params["layers"], i, model) for i in range(model.layers))
    scanned, unrolled = hidden(params, model), hidden(params | {"layers": layers}, model)
    np.testing.assert_allclose(scanned, unrolled, rtol=0, atol=2e-5)
    other = replace(model, extras=replace(extras, rotary_layers=(True, True, False, True)))
    assert np.abs(scanned - hidden(params, other)).max() > 1e-2


def test_fresh_states_forget_slowly_and_their_norm_has_no_offset():
    model = replace(MODEL, windows=SPLIT, norm_offset=True)
    layers = jax.device_get(jax.jit(init_params, static_argnums=1)(jax.random.key(0), model)["layers"])
    assert layers["wq"].shape[0] == layers["w_qkv"].shape[0] == 1 and layers["w_down"].shape[0] == 2
    assert (layers["delta_norm"] == 1).all() and not layers["attn_norm"].any()
    decay = np.exp(-np.exp(layers["a_log"]) * np.logaddexp(0, layers["dt_bias"]))
    assert (decay > 0.19).all() and (decay < 1).all()


def test_flops_of_a_token_by_hand():
    """Two key heads of 8 and four value heads of 16; spans of 1 and chunks of 64, whose inverse has six levels."""
    rule = GatedDelta(key_heads=2, value_heads=4, key_dim=8, value_dim=16)
    assert token_flops(rule, 1) == 4 * 2 * 8 + 4 * (2 * 40 + 6 * 128)
    assert token_flops(rule, 64) == token_flops(rule, 640) == 4 * 2 * 64 * 8 + 4 * (4 * 6 * 64**2 + 128 * 40 + 6 * 128)
