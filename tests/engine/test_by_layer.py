"""Layers that share an executable: the same trajectories as unrolled, and compile time that does not grow with them."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from grpo_roc_jax.engine.by_layer import layer_kinds
from grpo_roc_jax.engine.config import LowPrecision, SamplingConfig
from grpo_roc_jax.engine.engine import make_engine
from grpo_roc_jax.engine.publish import ProbeByLayer, probe_tokens, sampling_probe, unstack
from grpo_roc_jax.model.config import Mixture, ModelConfig, SlidingWindows
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh
from grpo_roc_jax.model.transformer import layer_weights
from grpo_roc_jax.record.metrics import CompilationCounter
from tests.engine.test_model_families import MODELS
from tests.engine.test_recurrent import MODEL as RECURRENT
from tests.helpers.engine_checks import assert_same
from tests.helpers.reference import random_params
from tests.helpers.rollout_fakes import MODEL, ROLLOUT, STOPS, FakeTools, make_requests

NARROW = replace(ROLLOUT, slots=16, narrow=(4,))


def engine_of(shared, model, rollout=NARROW, sampling=None, mesh=None):
    return make_engine(model, rollout, sampling or SamplingConfig(), STOPS, mesh, seed=11, shares_layers=shared)


SHARED = MODELS["gemma4_small"]
CASES = {
    "plain": {"model": MODEL},
    "truncated": {"model": MODEL, "sampling": SamplingConfig(top_k=7, temperature=0.8)},
    "windows": {"model": replace(MODEL, layers=3, windows=SlidingWindows((5, 0), local_theta=100.0))},
    "experts": {"model": replace(MODEL, experts=Mixture(8, 2, replay=True))},
    "int8": {"model": MODEL, "rollout": replace(NARROW, low_precision=LowPrecision("int8", "int8"))},
    "recurrent": {"model": RECURRENT},
    "shared keys": {"model": replace(SHARED, extras=replace(SHARED.extras, query_scale=16.0))},
}


@pytest.mark.parametrize("case", ["plain", *(pytest.param(case, marks=pytest.mark.slow) for case in [*CASES][1:])])
def test_trajectories_are_those_of_unrolled_layers(case):
    """Also on a mesh of one device, as runs have it; nothing is compiled after the warmup."""
    params = jax.device_put(random_params(CASES[case]["model"], seed=1))
    requests, runs = make_requests(3, 4), []
    for shared, mesh in ((False, None), (True, make_mesh(ShardingConfig(data=1), jax.devices()[:1]))):
        engine = engine_of(shared, **CASES[case], mesh=mesh)
        sampler = engine.publish(params, 5)
        assert sampler.check_gap < 2e-5
        if shared:
            engine.warmup(sampler)
        rollouts, stats = engine.run(sampler, requests, FakeTools(requests))
        assert stats.compilations == 0 or not shared
        runs.append((rollouts, stats))
    (wanted, before), (rollouts, stats) = runs
    assert_same(wanted, rollouts)
    assert (stats.steps, stats.chunks, stats.slot_steps) == (before.steps, before.chunks, before.slot_steps)
    if case == "experts":
        for trajectory, other in zip(wanted, rollouts, strict=True):
            np.testing.assert_array_equal(trajectory.routes, other.routes)


def test_a_deeper_model_compiles_nothing_more():
    """Ten layers have the programs of two and none besides."""
    counts = []
    for layers in (2, 10):
        engine = engine_of(True, replace(MODEL, layers=layers), replace(NARROW, narrow=()))
        sampler = engine.publish(jax.device_put(random_params(replace(MODEL, layers=layers))), 0)
        with CompilationCounter() as compiled:
            engine.warmup(sampler)
        counts.append((compiled.count, [cost.name for cost in engine.programs.costs]))
    (few, names), (many, others) = counts
    assert names == others and 10 < many <= few


def test_the_weight_check_finds_a_wrong_layer_whoever_computes_it():
    """By layer and whole: equal log-probabilities, which change with a layer far from the first of its kind."""
    model = replace(MODEL, layers=5)
    params = unstack(jax.device_put(random_params(model)), model)
    tokens = probe_tokens(model)
    by_layer = ProbeByLayer(model, None)
    plain, full = by_layer(params, tokens), jax.jit(sampling_probe, static_argnames="config")(params, tokens, model)
    np.testing.assert_allclose(plain, full, atol=1e-5)
    *others, last = params["layers"]
    wrong = params | {"layers": (*others, last | {"wo": 1.5 * last["wo"]})}
    assert np.abs(by_layer(wrong, tokens) - plain).max() > 1e-3


def test_a_layer_is_of_the_kind_of_the_first_that_computes_the_same():
    windows = SlidingWindows((5, 5, 0), local_theta=100.0)
    assert layer_kinds(ModelConfig(layers=6, windows=windows)) == (0, 0, 2, 0, 0, 2)
    assert layer_kinds(replace(RECURRENT, layers=4)) == (0, 1, 0, 1)
    shared = replace(windows, shared_layers=3)
    assert layer_kinds(ModelConfig(layers=7, windows=shared)) == (0, 0, 2, 0, 4, 5, 4)


def test_who_shares_layers():
    """One rule: a CPU, one device, and layers that take much longer than a call from the host."""
    small = ModelConfig(d_model=256, layers=4, heads=4, kv_heads=2, head_dim=64, d_ff=1024, vocab_size=97)
    large = replace(small, d_model=576, heads=9, kv_heads=3, d_ff=1536)
    mesh = make_mesh(ShardingConfig(data=2), jax.devices()[:2])
    shares = [
        make_engine(model, NARROW, SamplingConfig(), STOPS, on).programs.shares_layers
        for model, on in ((small, None), (large, None), (large, mesh))
    ]
    assert shares == [False, True, False]
    assert layer_weights(large) == pytest.approx(3.54e6, rel=0.01)
    mixed = replace(large, experts=Mixture(8, 2))
    attention = layer_weights(large) - 3 * 576 * 1536
    assert layer_weights(mixed) == pytest.approx(attention + 2 * 3 * 576 * 1536 + 8 * 576, rel=0.01)
