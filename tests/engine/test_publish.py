"""The sampler gets the parameters of the trainer, which the weight check compares; programs, and calls repeated."""

import math
import pickle
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import NamedSharding, P

from grpo_roc_jax import RolloutConfig, SamplingConfig, make_engine
from grpo_roc_jax.engine import decode
from grpo_roc_jax.engine.programs import COPIES, SamplerPrograms, SharedPrograms
from grpo_roc_jax.engine.publish import Publisher, StaleWeightsError, localize, unstack
from grpo_roc_jax.engine.steering import DrawSettings, RowSteering, steering_arrays
from grpo_roc_jax.model.config import SlidingWindows
from grpo_roc_jax.model.low_precision import MATRICES
from grpo_roc_jax.model.outputs_first import OutputsFirst
from grpo_roc_jax.model.pool import PAGED
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh, param_shardings
from tests.helpers.engine_checks import assert_same, interpreted  # noqa: F401
from tests.helpers.reference import random_params
from tests.helpers.rollout_fakes import MODEL, ROLLOUT, STOPS, sharp_params
from tests.model import test_convert


@pytest.fixture(scope="module")
def publisher():
    return Publisher(MODEL, None, 1e-3)


def test_parameters_that_other_processes_hold_too_become_arrays_of_the_samplers_here():
    mesh = make_mesh(ShardingConfig(fsdp=2))
    leaf = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("fsdp")))
    assert localize(leaf, mesh) is leaf
    shards, names = leaf.addressable_shards, {"shape": leaf.shape, "sharding": leaf.sharding}
    local = localize(SimpleNamespace(is_fully_addressable=False, addressable_shards=shards, **names), mesh)
    assert local.sharding == leaf.sharding and local.tolist() == leaf.tolist()


FAULTS = {
    "swapped layers": lambda params: params | {"layers": params["layers"][::-1]},
    "swapped matrices": lambda p: p | {"layers": tuple(a | {"wk": a["wv"], "wv": a["wk"]} for a in p["layers"])},
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
    with pytest.raises(StaleWeightsError, match="stale"):
        publisher.publish(jax.tree.map(lambda leaf: leaf * 1.01, sharp_params()), 10)


def test_publishing_from_a_sharded_trainer_to_its_mesh():
    mesh, config = make_mesh(ShardingConfig(data=2, fsdp=2, tensor=2)), replace(MODEL, vocab_size=100)
    params = random_params(config)
    placed = jax.device_put(params, param_shardings(config, mesh))
    published = Publisher(config, mesh, 1e-3).publish(placed, 1)
    assert published.params["layers"][0]["wq"].sharding.spec == P(None, "tensor", None)
    jax.tree.map(np.testing.assert_array_equal, published.params, unstack(params, config))
    publisher = Publisher(config, mesh, 1e-3, "int8")
    layer = publisher.publish(placed, 1).params["layers"][0]
    assert layer["w_up"].scales.sharding.spec[1] == "tensor" and not any(layer["wo"].scales.sharding.spec)
    like = publisher.published_like(placed)["layers"][0]
    assert jax.tree.map(jnp.shape, like) == jax.tree.map(jnp.shape, layer)


def test_published_matrices_are_int8_and_the_check_reads_them(monkeypatch):
    publisher = Publisher(MODEL, None, 1e-3, "int8")
    published = publisher.publish(sharp_params(), 1)
    assert published.params["layers"][0]["w_up"].codes.dtype == jnp.int8 and published.check_gap < 1e-4
    honest = publisher.convert

    def scaled(params):
        first, *others = honest(params)["layers"]
        wrong = first | {"wo": first["wo"].replace(scales=first["wo"].scales * 1.1)}
        return honest(params) | {"layers": (wrong, *others)}

    monkeypatch.setattr(publisher, "convert", scaled)
    with pytest.raises(StaleWeightsError, match="version 2"):
        publisher.publish(sharp_params(), 2)


@pytest.mark.parametrize("name", ["qwen3_5_moe_text", "deepseek_v3"])
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


def engine_on(mesh, attention, platform=None):
    model = replace(MODEL, d_model=8, heads=2, kv_heads=1, head_dim=128, vocab_size=16, windows=SlidingWindows((4, 0)))
    lengths = {"max_prompt_tokens": 24, "max_response_tokens": 8, "append_lengths": (16,)}
    rollout = RolloutConfig(slots=2, attention=attention, chunk=3, append_rows=2, **lengths)
    return make_engine(model, rollout, SamplingConfig(), [0], mesh, platform=platform)


def test_auto_times_both_and_says_so(monkeypatch):
    def measured(candidates):
        # Called twice: the cache of the first call is given away.
        for _ in range(2):
            appended, out = candidates["xla"]()
        assert out.shape == (2, 1, 2, 128) and np.isfinite(out).all()
        assert appended.shape == (4, 16, 2, 128) and np.isfinite(appended).all(), "two rows of 16 on each shard"
        assert list(candidates) == ["xla", "paged"]
        return "paged", {"xla": 6e-5, "paged": 3e-5}

    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    engine = engine_on(make_mesh(ShardingConfig(data=2), jax.devices()[:2]), "auto", "tpu")
    engine.programs.measure = measured
    name, seconds = engine.programs.attention
    assert name == "paged" and engine.programs.orders == PAGED
    assert math.isclose(seconds["xla"], 2e-5) and math.isclose(seconds["paged"], 1e-5), "a token of a chunk of 3"
    assert "paged (microseconds a layer and token of all slots: xla 20.0, paged 10.0)" in engine.describe_attention()


def test_logits_are_gathered_on_a_mesh_without_tensor():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    logits = jnp.ones((2, 4))
    assert decode.gathered(logits, mesh).sharding.is_fully_replicated and decode.gathered(logits, None) is logits


def test_the_cost_of_a_program_has_the_cache_of_one_shard():
    programs = engine_on(make_mesh(ShardingConfig(data=2), jax.devices()[:2]), "xla").programs
    pool, none = programs.new_pool(), np.full((2, programs.shards * COPIES), 10**6, np.int32)
    cache_bytes, none = pool.nbytes, programs.place(none, None, programs.row_axes)
    programs.copy(pool, none, none)
    assert programs.costs[-1].name == "copy" and programs.costs[-1].cache_bytes == cache_bytes // 2


def test_the_others_make_the_leaders_calls_on_the_same_devices():
    """Instead of running, a program returns what it was called with, so that its results say how they came about."""
    mesh, made, sent = make_mesh(ShardingConfig(data=1, tensor=2), jax.devices()[:2]), {}, []

    class Echo(SamplerPrograms):
        def run(self, call):
            arrays = [a for a in call.arguments if isinstance(a, jax.Array)]
            placed = [(a.sharding.spec, a.sharding.device_set, np.asarray(a).tolist()) for a in arrays]
            result = (call.key, *placed, *(a for a in call.arguments if not isinstance(a, jax.Array)))
            made.setdefault(self, []).append(result)
            return (result, call.key, "report") if call.key[0] in ("decode", "steered") else result

    class SharedEcho(SharedPrograms, Echo):
        pass

    leader, follower = (SharedEcho(MODEL, ROLLOUT, SamplingConfig(), STOPS, None, mesh) for _ in range(2))

    def send(call):
        assert len(sent) == len(made.get(leader, ())), "sent before it runs"
        sent.append(pickle.dumps(call))

    leader.send = send
    rows = {2: RowSteering(DrawSettings(top_k=1)), 3: RowSteering(DrawSettings(bias={50: 100.0}, frequency=1.0))}
    steering = steering_arrays(rows, ROLLOUT.slots, MODEL.vocab_size, SamplingConfig(), 4)
    for _ in range(2):  # the second pool replaces the first
        pool, slots = leader.new_pool(), leader.new_slots()
        for seed in range(2):
            tokens, table, where, pairs, patch = np.random.default_rng(seed).integers(0, 9, (5, 3, 6), np.int32)
            axes = leader.row_axes
            pool = leader.append("weights", pool, leader.place(tokens, axes), leader.place(table, axes), where)
            pool = leader.copy(pool, leader.place(pairs[:2], None, axes), pairs[:2])
            pool, slots, _ = leader.decode("weights", pool, slots, leader.place(patch, None, axes), table, 6)
            pool, slots, _ = leader.decode_steered("weights", pool, slots, patch, table, *steering, width=6)
    follower.repeat("weights", map(pickle.loads, sent))
    np.testing.assert_equal(made[follower], made[leader])
    assert len(made[leader]) == 2 * (2 + 2 * 4)
