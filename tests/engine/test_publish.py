"""Publishing: the sampler gets the trainer's parameters, in fewer bits where that is asked for, and the weight check
notices if it does not."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from grpo_roc_jax.config import read_config
from grpo_roc_jax.engine.config import LowPrecision, RolloutConfig, SamplingConfig
from grpo_roc_jax.engine.engine import make_engine
from grpo_roc_jax.engine.publish import Publisher, StaleWeightsError, localize, unstack
from grpo_roc_jax.model.config import Mixture
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh, param_shardings
from grpo_roc_jax.model.transformer import init_params
from grpo_roc_jax.run.policy import cache_bytes
from grpo_roc_jax.settings.cli import ConfigError
from tests.helpers.reference import random_params
from tests.helpers.rollout_fakes import MODEL, ROLLOUT, STOPS, FakeTools, make_requests, sharp_params


@pytest.fixture(scope="module")
def publisher():
    return Publisher(MODEL, None, 1e-3)


def test_layers_are_unstacked_copies_in_the_compute_dtype():
    config = replace(MODEL, compute_dtype="bfloat16")
    params = sharp_params()
    published = Publisher(config, None, 1e-3).publish(params, 4)
    assert published.version == 4 and published.check_gap < 1e-4
    for i, layer in enumerate(published.params["layers"]):
        for name, leaf in layer.items():
            expected = params["layers"][name][i]
            assert leaf.dtype == (jnp.float32 if name.endswith("norm") else jnp.bfloat16)
            np.testing.assert_array_equal(leaf, expected.astype(leaf.dtype))


def test_parameters_that_other_processes_hold_too_become_arrays_of_the_samplers_here():
    mesh = make_mesh(ShardingConfig(fsdp=2))
    leaf = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("fsdp")))
    assert localize(leaf, mesh) is leaf
    shards, names = leaf.addressable_shards, {"shape": leaf.shape, "sharding": leaf.sharding}
    local = localize(SimpleNamespace(is_fully_addressable=False, addressable_shards=shards, **names), mesh)
    assert local.sharding == leaf.sharding and local.tolist() == leaf.tolist()


def test_published_parameters_outlive_a_donation_of_the_masters(publisher):
    params = sharp_params()
    published = publisher.publish(params, 0)
    expected = np.asarray(published.params["final_norm"]).copy()
    jax.tree.map(lambda leaf: leaf.delete(), params)
    np.testing.assert_array_equal(published.params["final_norm"], expected)


def swap_layers(params):
    return params | {"layers": params["layers"][::-1]}


def swap_key_and_value(params):
    layers = [layer | {"wk": layer["wv"], "wv": layer["wk"]} for layer in params["layers"]]
    return params | {"layers": tuple(layers)}


def cast_down(params):
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float8_e4m3fn).astype(leaf.dtype), params)


def not_finite(params):
    return params | {"final_norm": params["final_norm"] * jnp.nan}


@pytest.mark.parametrize("fault", [swap_layers, swap_key_and_value, cast_down, not_finite])
def test_the_check_notices_corrupted_weights(monkeypatch, publisher, fault):
    honest = publisher.convert
    monkeypatch.setattr(publisher, "convert", lambda params: fault(honest(params)))
    with pytest.raises(StaleWeightsError, match="version 9"):
        publisher.publish(sharp_params(), 9)


def test_the_check_notices_weights_of_an_earlier_step(monkeypatch, publisher):
    old = publisher.convert(sharp_params())
    monkeypatch.setattr(publisher, "convert", lambda params: old)
    new = jax.tree.map(lambda leaf: leaf * 1.01, sharp_params())
    with pytest.raises(StaleWeightsError, match="stale"):
        publisher.publish(new, 10)


def test_publishing_from_a_sharded_trainer_to_its_mesh():
    mesh = make_mesh(ShardingConfig(data=2, fsdp=2, tensor=2))
    config = replace(MODEL, vocab_size=100)
    params = random_params(config)
    published = Publisher(config, mesh, 1e-3).publish(jax.device_put(params, param_shardings(config, mesh)), 1)
    wq = published.params["layers"][0]["wq"]
    assert wq.sharding.spec == jax.sharding.PartitionSpec(None, "tensor", None)
    expected = unstack(params, config)
    jax.tree.map(np.testing.assert_array_equal, published.params, expected)


def test_a_sync_runs_one_program_for_the_layers_of_a_kind():
    layers = [name for name, _ in Publisher(MODEL, None, 1e-3).lower(sharp_params()) if name.startswith("weight_sync")]
    assert layers == ["weight_sync/1", f"weight_sync/{MODEL.layers}"]


# Fewer bits.

SMALL = replace(MODEL, layers=1, vocab_size=100)


def small_params():
    return jax.tree.map(lambda leaf: 3.0 * leaf if leaf.ndim > 1 else leaf, init_params(jax.random.key(1), SMALL))


@pytest.fixture(scope="module")
def low():
    """An engine with room for one long row."""
    few = {"kv_tokens": 128, "block": 16, "narrow": (), "low_precision": LowPrecision("int8", "int8")}
    return make_engine(SMALL, replace(ROLLOUT, **few), SamplingConfig(), STOPS, None, seed=11)


@pytest.mark.slow
def test_evicted_rows_come_back_as_they_were(low):
    """Rows that are written again draw the tokens that they draw alone."""
    sampler, requests = low.publish(small_params(), 5), make_requests(groups=2, siblings=2)
    together, stats = low.run(sampler, requests, FakeTools(requests))
    assert stats.evictions
    for request, rollout in zip(requests, together, strict=True):
        (alone,), stats = low.run(sampler, [request], FakeTools([request]))
        assert not stats.evictions
        np.testing.assert_array_equal(rollout.tokens, alone.tokens)
        np.testing.assert_allclose(rollout.logprobs, alone.logprobs, atol=1e-4)


def test_published_matrices_are_int8_and_the_check_reads_them(low, monkeypatch):
    publisher = low.publisher
    published = publisher.publish(small_params(), 1)
    layer = published.params["layers"][0]
    assert layer["w_up"].codes.dtype == jnp.int8 and layer["w_up"].scales.shape == (1, MODEL.d_ff)
    assert published.params["embed"].dtype == jnp.float32 and published.check_gap < 1e-4
    honest = publisher.convert

    def scaled(params):
        converted = honest(params)
        more = [tree | {"wo": tree["wo"].replace(scales=tree["wo"].scales * 1.1)} for tree in converted["layers"]]
        return converted | {"layers": tuple(more)}

    monkeypatch.setattr(publisher, "convert", scaled)
    with pytest.raises(StaleWeightsError, match="version 2"):
        publisher.publish(small_params(), 2)


def test_a_split_model_publishes_scales_with_their_matrices():
    mesh = make_mesh(ShardingConfig(data=2, fsdp=2, tensor=2))
    publisher = Publisher(SMALL, mesh, 1e-3, "int8")
    placed = jax.device_put(small_params(), param_shardings(SMALL, mesh))
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
