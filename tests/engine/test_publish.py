"""Publishing: the sampler gets the trainer's parameters, in fewer bits or with outputs first where that is asked for,
and the weight check notices if it does not."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import NamedSharding, P

from grpo_roc_jax.config import read_config
from grpo_roc_jax.engine.config import LowPrecision, RolloutConfig, SamplingConfig
from grpo_roc_jax.engine.engine import make_engine
from grpo_roc_jax.engine.protocol import SingleTurn
from grpo_roc_jax.engine.publish import Publisher, StaleWeightsError, localize, unstack
from grpo_roc_jax.model.config import Mixture
from grpo_roc_jax.model.low_precision import MATRICES
from grpo_roc_jax.model.outputs_first import FEW_ROWS, OutputsFirst, multiply, turned
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh, param_shardings
from grpo_roc_jax.model.transformer import init_params
from grpo_roc_jax.run.policy import cache_bytes
from grpo_roc_jax.settings.cli import ConfigError
from tests.helpers.engine_checks import assert_same
from tests.helpers.reference import random_params
from tests.helpers.rollout_fakes import MODEL, ROLLOUT, make_requests, sharp_params
from tests.model import test_convert


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
    layers = [name for name, _ in publisher.lower(sharp_params()) if name.startswith("weight_sync")]
    assert layers == ["weight_sync/1", f"weight_sync/{MODEL.layers}"], "one program for the layers of a kind"
    params = sharp_params()
    published = publisher.publish(params, 0)
    expected = np.asarray(published.params["final_norm"]).copy()
    jax.tree.map(lambda leaf: leaf.delete(), params)
    np.testing.assert_array_equal(published.params["final_norm"], expected)


FAULTS = {
    "swapped layers": lambda params: params | {"layers": params["layers"][::-1]},
    "swapped keys and values": lambda params: (
        params | {"layers": tuple(layer | {"wk": layer["wv"], "wv": layer["wk"]} for layer in params["layers"])}
    ),
    "cast down": partial(jax.tree.map, lambda leaf: leaf.astype(jnp.float8_e4m3fn).astype(leaf.dtype)),
    "not finite": lambda params: params | {"final_norm": params["final_norm"] * jnp.nan},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_notices_corrupted_weights(monkeypatch, publisher, fault):
    honest = publisher.convert
    monkeypatch.setattr(publisher, "convert", lambda params: FAULTS[fault](honest(params)))
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
    jax.tree.map(np.testing.assert_array_equal, published.params, unstack(params, config))
    publisher, placed = Publisher(config, mesh, 1e-3, "int8"), jax.device_put(params, param_shardings(config, mesh))
    layer = publisher.publish(placed, 1).params["layers"][0]
    assert layer["w_up"].scales.sharding.spec[1] == "tensor" and not any(layer["wo"].scales.sharding.spec)
    like = publisher.published_like(placed)["layers"][0]
    assert jax.tree.map(jnp.shape, like) == jax.tree.map(jnp.shape, layer)


SMALL = replace(MODEL, layers=1, vocab_size=100)


def small_params():
    return jax.tree.map(lambda leaf: 3.0 * leaf if leaf.ndim > 1 else leaf, init_params(jax.random.key(1), SMALL))


def test_published_matrices_are_int8_and_the_check_reads_them(monkeypatch):
    publisher = Publisher(SMALL, None, 1e-3, "int8")
    published = publisher.publish(small_params(), 1)
    layer = published.params["layers"][0]
    assert layer["w_up"].codes.dtype == jnp.int8 and layer["w_up"].scales.shape == (1, MODEL.d_ff)
    assert published.params["embed"].dtype == jnp.float32 and published.check_gap < 1e-4
    honest = publisher.convert

    def scaled(params):
        (layer,) = honest(params)["layers"]
        return honest(params) | {"layers": (layer | {"wo": layer["wo"].replace(scales=layer["wo"].scales * 1.1)},)}

    monkeypatch.setattr(publisher, "convert", scaled)
    with pytest.raises(StaleWeightsError, match="version 2"):
        publisher.publish(small_params(), 2)


def test_what_is_refused_and_what_follows():
    with pytest.raises(ValueError, match=r"reads no scales of single tokens; set rollout.attention xla"):
        RolloutConfig(attention="paged", low_precision=LowPrecision(cache="int8"))
    with pytest.raises(ValueError, match="int8 with experts"):
        Publisher(replace(MODEL, experts=Mixture(4, 2)), None, 1e-3, "int8")
    config = read_config("--rollout.low_precision.cache=int8")
    assert [part.kind for part in config.weights.factors] == ["truncated_is"] and config.surrogate.scored_ratio
    assert config.rollout.weight_dtype == "full" and config.rollout.cache_dtype == "int8"
    recorded, another = ["--surrogate.old_logprobs=recorded"], "low_precision trains on tokens of another policy"
    for words, message in (
        *(([*more, "--weights.factors=[]"], another) for more in ([], recorded)),
        (["--lora=low_rank"], "share the frozen weights"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_config("--rollout.low_precision.weights=int8", *words)
    # Two layers of two heads of width 8, keys and values: a byte a number and four for each scale.
    assert cache_bytes(MODEL, 2)[0] == 2 * 2 * 2 * 16
    assert cache_bytes(MODEL, 2, "int8")[0] == 2 * 2 * 2 * (8 + 4)


WIDE = replace(MODEL, d_model=512, head_dim=64, d_ff=1152, tie_embeddings=False, compute_dtype="float32")
"""Layers of 2.2 million weights, which an engine on a CPU has with their outputs first."""


@pytest.mark.parametrize(("rows", "inputs"), [(3, 1), (3, 2), (FEW_ROWS, 1)])
def test_the_product_is_that_of_the_matrix(rows, inputs):
    rng = np.random.default_rng(0)
    x, matrix = (rng.normal(size=size).astype(np.float32) for size in ((rows, 4, 5), (5, 4, 6)))
    matrix = matrix.swapaxes(0, 1) if inputs == 2 else matrix
    there = turned(matrix, inputs)
    assert there.shape == matrix.shape and there.dtype == matrix.dtype
    np.testing.assert_allclose(multiply(x, there, None), np.tensordot(x, matrix, inputs), atol=1e-5)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen3_5_moe_text", "glm4_moe", "deepseek_v3"])
def test_the_sampler_computes_what_the_trainer_does(name):
    """The check of the weights compares their log-probabilities; all matrices but those of experts are turned."""
    model, mesh = test_convert.MODELS[name], make_mesh(ShardingConfig(), jax.devices()[:1])
    publisher = Publisher(model, mesh, 1e-4, outputs_first=True)
    published = publisher.publish(random_params(model), 1)
    assert published.check_gap < 1e-4
    for layer in published.params["layers"]:
        experts = {"w_gate", "w_up", "w_down"} if "router" in layer else set()
        names = {name for name, leaf in layer.items() if isinstance(leaf, OutputsFirst)}
        assert names == (set(MATRICES) & set(layer)) - experts and len(names) > 2
    like = publisher.published_like(random_params(model))
    assert jax.tree.map(np.shape, like) == jax.tree.map(np.shape, published.params)


def test_rollouts_are_those_of_a_small_engine():
    """Two engines on one device and on the first two, of which only the first one has large layers on one CPU."""
    rollout, requests = replace(ROLLOUT, slots=4), make_requests(2, 2, budget=12)
    rollouts = []
    for devices in (1, 2):
        mesh = make_mesh(ShardingConfig(data=devices), jax.devices()[:devices])
        engine = make_engine(WIDE, rollout, SamplingConfig(), (3,), mesh)
        weights = engine.publish(random_params(WIDE), 0)
        assert isinstance(weights.params["layers"][0]["wq"], OutputsFirst) == (devices == 1)
        rollouts.append(engine.run(weights, requests, SingleTurn())[0])
    assert_same(*rollouts, atol=1e-4)
