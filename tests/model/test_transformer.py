"""The forward pass against a float64 loop, for every option that changes it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax.learner.loss import make_remat
from grpo_roc_jax.model import transformer
from grpo_roc_jax.model.config import GatedDelta, Mixture, ModelConfig
from grpo_roc_jax.model.transformer import param_axes, unembed
from tests.helpers import reference


@partial(jax.jit, static_argnums=4)
def logits(params, *inputs):
    return unembed(params, transformer.forward(params, *inputs), inputs[-1])


BASE = {"d_model": 24, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 6, "d_ff": 40, "vocab_size": 31}
OPTIONS = [{}, {"qkv_bias": True}, {"qk_norm": True}, {"tie_embeddings": False}, {"kv_heads": 4}, {"rope_theta": 100.0}]


def model(**options):
    config = ModelConfig(**BASE | options)
    # Larger than at the start of training, biases and norms included, so that every term shows.
    return config, reference.random_params(config, seed=1, spread=0.2)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_packed_forward_equals_loops(options):
    config, params = model(**options)
    lengths = [5, 9, 3]
    tokens = [np.random.default_rng(n).integers(0, 31, n) for n in lengths]
    row = np.concatenate([*tokens, np.zeros(3, int)])[None].astype(np.int32)
    segment_ids = np.repeat([1, 2, 3, 0], [*lengths, 3])[None].astype(np.int32)
    positions = np.concatenate([np.arange(n) for n in [*lengths, 3]])[None].astype(np.int32)
    got = np.asarray(logits(params, row, positions, segment_ids, config))[0]
    start = 0
    for ids in tokens:
        wanted = reference.logits(params, ids, config)
        np.testing.assert_allclose(got[start : start + len(ids)], wanted, atol=2e-5 * np.abs(wanted).max())
        start += len(ids)


def test_axes_have_the_structure_and_ranks_of_the_parameters():
    for options in OPTIONS:
        config, params = model(**options)
        ranks = jax.tree.map(len, param_axes(config), is_leaf=lambda node: isinstance(node, tuple))
        assert ranks == jax.tree.map(jnp.ndim, params)


def test_bfloat16_gradient_of_a_frequent_token_adds_up_in_float32():
    """A frequent token gets the sum of the gradients of its rows, which a bfloat16 sum would round away."""
    config, params = model(compute_dtype="bfloat16")
    tokens = np.zeros((1, 600), np.int32)
    positions, segment_ids = np.arange(600, dtype=np.int32)[None], np.ones((1, 600), np.int32)

    @jax.jit
    @jax.grad
    def slope(rows, tokens, params, positions, segment_ids):
        x = transformer.forward({**params, "embed": rows}, tokens, positions, segment_ids, config)
        return x.astype(jnp.float32).sum()

    rest = params, positions, segment_ids
    grad = np.asarray(slope(params["embed"], tokens, *rest))
    # Six hundred rows of their own, one per position: the same gradients, added up here in float64.
    spread = np.tile(params["embed"][:1], (600, 1))
    apart = np.asarray(slope(spread, positions, *rest), np.float64).sum(0)
    np.testing.assert_allclose(grad[0], apart, rtol=1e-4, atol=1e-4 * np.abs(apart).max())


PERIODIC = {
    "recurrent layers": {"windows": GatedDelta(key_heads=2, value_heads=4, key_dim=8, value_dim=10, every=2)},
    "experts in every second layer": {"experts": Mixture(5, 2, every=2, dense_ff=44)},
}


@pytest.mark.parametrize("remat", [None, make_remat("attention")], ids=["none", "attention"])
@pytest.mark.parametrize("kind", PERIODIC)
def test_the_backward_pass_keeps_no_copy_of_the_weights_of_periods(kind, remat):
    config = ModelConfig(**BASE | {"layers": 4} | PERIODIC[kind])
    params, tokens = reference.random_params(config), jnp.ones((3, 7), jnp.int32)
    run = partial(transformer.forward, config=config, execution=transformer.Execution(remat=remat))

    def residuals(params):
        return jax.tree.leaves(jax.vjp(lambda params: run(params, tokens, tokens, tokens), params)[1])

    saved, seen = jax.eval_shape(residuals, params), set()
    for name, leaf in params["layers"].items():
        if leaf.ndim > 2:
            same = [other for other in saved if other.shape[1 - leaf.ndim :] == leaf.shape[1:]]
            assert all(other.size == leaf.size for other in same), name
            seen |= {name} if same else set()
    assert {"wq", "wo", "w_up", "w_down"} <= seen
