"""Fewer bits in the sampler: what is stored, what reads it, how far log-probabilities move, and what is refused."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax.config import read_config
from grpo_roc_jax.engine.config import LowPrecision, RolloutConfig, SamplingConfig
from grpo_roc_jax.engine.engine import make_engine
from grpo_roc_jax.engine.publish import Publisher, StaleWeightsError
from grpo_roc_jax.model.config import Mixture
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh, param_shardings
from grpo_roc_jax.model.transformer import init_params
from grpo_roc_jax.run.policy import cache_bytes
from grpo_roc_jax.settings.cli import ConfigError
from tests.helpers.rollout_fakes import MODEL, ROLLOUT, STOPS, FakeTools, make_requests

SMALL = replace(MODEL, layers=1, vocab_size=100)


def sharp_params():
    """Weights sharp enough that greedy choices differ from position to position."""
    return jax.tree.map(lambda leaf: 3.0 * leaf if leaf.ndim > 1 else leaf, init_params(jax.random.key(1), SMALL))


@pytest.fixture(scope="module")
def low():
    """An engine with room for one long row."""
    few = {"kv_tokens": 128, "block": 16, "narrow": (), "low_precision": LowPrecision("int8", "int8")}
    return make_engine(SMALL, replace(ROLLOUT, **few), SamplingConfig(), STOPS, None, seed=11)


@pytest.mark.slow
def test_evicted_rows_come_back_as_they_were(low):
    """Rows that are written again draw the tokens that they draw alone."""
    sampler, requests = low.publish(sharp_params(), 5), make_requests(groups=2, siblings=2)
    together, stats = low.run(sampler, requests, FakeTools(requests))
    assert stats.evictions
    for request, one in zip(requests, together, strict=True):
        (alone,), stats = low.run(sampler, [request], FakeTools([request]))
        assert not stats.evictions
        np.testing.assert_array_equal(one.tokens, alone.tokens)
        np.testing.assert_allclose(one.logprobs, alone.logprobs, atol=1e-4)


def test_published_matrices_are_int8_and_the_check_reads_them(low, monkeypatch):
    publisher = low.publisher
    published = publisher.publish(sharp_params(), 1)
    layer = published.params["layers"][0]
    assert layer["w_up"].codes.dtype == jnp.int8 and layer["w_up"].scales.shape == (1, MODEL.d_ff)
    assert published.params["embed"].dtype == jnp.float32 and published.check_gap < 1e-4
    honest = publisher.convert

    def scaled(params):
        found = honest(params)
        more = [one | {"wo": one["wo"].replace(scales=one["wo"].scales * 1.1)} for one in found["layers"]]
        return found | {"layers": tuple(more)}

    monkeypatch.setattr(publisher, "convert", scaled)
    with pytest.raises(StaleWeightsError, match="version 2"):
        publisher.publish(sharp_params(), 2)


def test_a_split_model_publishes_scales_with_their_matrices():
    mesh = make_mesh(ShardingConfig(data=2, fsdp=2, tensor=2))
    publisher = Publisher(SMALL, mesh, 1e-3, "int8")
    placed = jax.device_put(sharp_params(), param_shardings(SMALL, mesh))
    layer = publisher.publish(placed, 1).params["layers"][0]
    assert layer["w_up"].scales.sharding.spec[1] == "tensor" and not any(layer["wo"].scales.sharding.spec)
    like = publisher.published_like(placed)["layers"][0]
    assert jax.tree.map(jnp.shape, like) == jax.tree.map(jnp.shape, layer)


def test_what_is_refused_and_what_follows():
    with pytest.raises(ValueError, match=r"reads no scales of single tokens; set rollout.attention xla"):
        RolloutConfig(attention="paged", low_precision=LowPrecision(cache="int8"))
    with pytest.raises(ValueError, match="int8 with experts"):
        Publisher(replace(MODEL, experts=Mixture(4, 2)), None, 1e-3, "int8")
    config = read_config("--rollout.low_precision.cache=int8")
    assert [part.kind for part in config.weights.factors] == ["truncated_is"] and config.surrogate.scored_ratio
    assert config.rollout.weight_dtype == "full" and config.rollout.cache_dtype == "int8"
    for words in (["--weights.factors=[]"], ["--surrogate.old_logprobs=recorded", "--weights.factors=[]"]):
        with pytest.raises(ConfigError, match="low_precision trains on tokens of another policy"):
            read_config("--rollout.low_precision.weights=int8", *words)
    with pytest.raises(ConfigError, match="share the frozen weights"):
        read_config("--rollout.low_precision.weights=int8", "--lora=low_rank")


def test_the_estimate_counts_scales():
    """Two layers of two heads of width 8, keys and values: a byte a number and four for each scale."""
    assert cache_bytes(MODEL, 2)[0] == 2 * 2 * 2 * 16
    assert cache_bytes(MODEL, 2, "int8")[0] == 2 * 2 * 2 * (8 + 4)
