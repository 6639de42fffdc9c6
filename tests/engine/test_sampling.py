"""Sampling against sorting and softmax in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax.engine.config import SamplingConfig
from grpo_roc_jax.engine.decode import largest_threshold, sample, trajectory_keys, uniforms

V = 300


def softmax(logits):
    e = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


compiled = jax.jit(sample, static_argnums=(3, 4))


def draw(logits, uniform, temperature=1.0, **config):
    B = logits.shape[0]
    vocab_size = config.pop("vocab_size", None)
    return compiled(
        jnp.asarray(logits, jnp.float32),
        jnp.asarray(uniform, jnp.float32),
        jnp.asarray(np.broadcast_to(temperature, B), jnp.float32),
        SamplingConfig(**config),
        vocab_size,
    )


def many(logits, n=10_000, seed=0, **config):
    """n draws from one row of logits, with uniforms as in the engine."""
    return draw(np.tile(logits, (n, 1)), numbers(seed, n), **config)


@functools.cache
def numbers(seed, n):
    keys = jnp.tile(trajectory_keys(jnp.full(1, seed), jnp.zeros((3, 1), jnp.int32)), (n, 1))
    return np.asarray(jax.jit(uniforms)(keys, jnp.arange(n)))


def kept_by_sorting(p, top_k=0, top_p=1.0, min_p=0.0):
    """The tokens that may be drawn, by sorting: the top k, of those the fewest that reach top_p, of those min_p."""
    order = np.argsort(-p, kind="stable")
    allowed = order[: top_k or len(p)]
    if top_p < 1:
        mass = np.cumsum(p[allowed])
        allowed = allowed[: int(np.searchsorted(mass, top_p * mass[-1])) + 1]
    return {int(i) for i in allowed if p[i] >= min_p * p.max()}


def test_frequencies_follow_the_softmax():
    logits = np.random.default_rng(0).normal(size=V)
    n, temperature = 40_000, 0.7
    drawn = many(logits, n, temperature=temperature)
    p = softmax(logits / temperature)
    counts = np.bincount(np.asarray(drawn.token), minlength=V)
    chi = ((counts - n * p) ** 2 / (n * p)).sum() / (V - 1)
    assert 0.75 < chi < 1.3
    expected = np.log(p)[np.asarray(drawn.token)]
    np.testing.assert_allclose(drawn.logprob, expected, atol=2e-6)
    np.testing.assert_array_equal(drawn.mass, np.ones(n, np.float32))


@pytest.mark.parametrize(
    "cut", [{"top_k": 1}, {"top_p": 0.3}, {"min_p": 0.2}, {"top_k": 50, "top_p": 0.95, "min_p": 0.1}, {"top_k": 10_000}]
)
def test_cuts_keep_what_sorting_keeps(cut):
    logits = 2 * np.random.default_rng(1).normal(size=V)
    p = softmax(logits)
    allowed = kept_by_sorting(p, **cut)
    drawn = many(logits, **cut)
    assert set(np.asarray(drawn.token).tolist()) <= allowed
    likely = {i for i in allowed if p[i] > 2e-3}
    assert likely <= set(np.asarray(drawn.token).tolist())
    mass = p[list(allowed)].sum()
    np.testing.assert_allclose(drawn.mass, mass, atol=1e-5)
    np.testing.assert_allclose(drawn.logprob, np.log(p)[np.asarray(drawn.token)], atol=2e-6)


def test_greedy_takes_the_first_of_equals_and_ignores_the_uniforms():
    logits = np.zeros((2, V))
    logits[0, [17, 200]] = 3.0
    logits[1, 299] = 1.0
    for uniform in (0.0, 0.5, 1 - 2**-24):
        drawn = draw(logits, np.full((2, 2), uniform), temperature=0.0)
        np.testing.assert_array_equal(drawn.token, [17, 299])
        np.testing.assert_allclose(drawn.logprob, np.log(softmax(logits))[[0, 1], [17, 299]], atol=1e-6)
        np.testing.assert_array_equal(drawn.mass, [1.0, 1.0])


@pytest.mark.parametrize("uniform", [0.0, 0.3, 1 - 2**-24])
def test_impossible_tokens_are_never_drawn(uniform):
    """Extreme logits: all mass on one token, the rest underflows to 0, in every place of the block structure."""
    tokens = [0, 127, 128, 255, 256, 299]
    logits = np.full((len(tokens), V), -1e4)
    logits[np.arange(len(tokens)), tokens] = 1e4
    drawn = draw(logits, np.full((len(tokens), 2), uniform))
    np.testing.assert_array_equal(drawn.token, tokens)
    np.testing.assert_array_equal(drawn.logprob, np.zeros(len(tokens)))


def test_padding_of_the_embedding_is_never_drawn():
    logits = np.zeros(V)
    logits[290:] = 5.0
    for config in ({}, {"top_k": 3}, {"temperature": 0.0}):
        drawn = many(logits, 4000, vocab_size=290, **config)
        assert np.asarray(drawn.token).max() < 290
    expected = np.log(softmax(logits))[0]
    np.testing.assert_allclose(many(logits, 10, vocab_size=290).logprob, expected, atol=1e-5)


def test_keys_depend_on_every_part_of_the_path_and_on_nothing_else():
    paths = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0]], np.int32)
    seeds = np.array([0, 0, 0, 0, 0], np.int32)
    keys = np.asarray(trajectory_keys(jnp.asarray(seeds), jnp.asarray(paths.T)))
    other = np.asarray(trajectory_keys(jnp.asarray(seeds + 1), jnp.asarray(paths.T)))
    assert len({tuple(key) for key in np.concatenate([keys, other]).tolist()}) == 10
    order = np.array([4, 2, 0, 3, 1])
    np.testing.assert_array_equal(trajectory_keys(jnp.asarray(seeds), jnp.asarray(paths[order].T)), keys[order])
    drawn = np.asarray(uniforms(jnp.asarray(keys), jnp.arange(5)))
    assert ((drawn >= 0) & (drawn < 1)).all() and len(np.unique(drawn)) == 10


def test_uniforms_are_uniform():
    keys = trajectory_keys(jnp.zeros(1, jnp.int32), jnp.zeros((3, 1), jnp.int32))
    drawn = np.asarray(jax.jit(uniforms)(jnp.tile(keys, (20_000, 1)), jnp.arange(20_000)))
    for column in drawn.T:
        counts = np.histogram(column, bins=50, range=(0, 1))[0]
        assert 0.6 < ((counts - 400) ** 2 / 400).mean() < 1.5
    assert abs(np.corrcoef(drawn.T)[0, 1]) < 0.02


def test_thresholds_are_found_to_the_last_bit():
    edges = jnp.concatenate([jnp.array([1e-30, 1.0]), jax.random.uniform(jax.random.key(0), (30,))])
    thresholds = jax.jit(
        lambda edges: largest_threshold(lambda t: (t <= edges).astype(jnp.float32), jnp.ones_like(edges))
    )(edges)
    np.testing.assert_array_equal(thresholds, edges)
