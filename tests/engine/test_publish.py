"""Publishing: the sampler gets the trainer's parameters, and the weight check notices if it does not."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from grpo_roc_jax.engine.publish import Publisher, StaleWeightsError, localize, unstack
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh, param_shardings
from tests.helpers.reference import random_params
from tests.helpers.rollout_fakes import MODEL, sharp_params


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
    found = localize(SimpleNamespace(is_fully_addressable=False, addressable_shards=shards, **names), mesh)
    assert found.sharding == leaf.sharding and found.tolist() == leaf.tolist()


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
