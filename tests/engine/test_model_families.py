"""The engine with the options of other families: recurrent layers, experts, layers that share an executable."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax import SamplingConfig, make_engine
from grpo_roc_jax.engine.by_layer import layer_kinds
from grpo_roc_jax.model.config import Mixture, SlidingWindows
from grpo_roc_jax.model.experts import mix_experts, recorded
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh
from grpo_roc_jax.model.transformer import Execution, forward
from tests.helpers import rollout_fakes
from tests.helpers.engine_checks import assert_same, reference_gap
from tests.helpers.reference import random_params
from tests.helpers.rollout_fakes import MODEL, ROLLOUT, STOPS, FakeTools, StopPairs, make_requests, one_rollout
from tests.helpers.whole_rows import layers_apart
from tests.model import test_convert


def slow(*names):
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


def two_layers(name, norm_eps=1e-3):
    return replace(test_convert.MODELS[name], vocab_size=97, norm_eps=norm_eps, layers=2)


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3", *slow("qwen3_5_moe_text", "granitemoehybrid")])
def test_rows_of_several_turns_equal_the_training_forward(name):
    model = two_layers(name)
    params = random_params(model, seed=1, spread=0.05)
    params = jax.device_put(params | {"embed": 6.0 * params["embed"]})
    engine = make_engine(model, replace(ROLLOUT, narrow=(), slots=6), SamplingConfig(), STOPS, seed=11)
    requests = make_requests(3, 3)
    rollouts, _ = engine.run(engine.publish(params, 5), requests, FakeTools(requests))
    assert sum(len(rollout.turns) for rollout in rollouts) > len(rollouts)
    assert reference_gap(params, rollouts, model) < 2e-5


RECURRENT = two_layers("qwen3_5_text", 1e-4)


def test_rows_that_wait_share_prompts_and_take_observations_equal_the_training_forward():
    """Recurrent memory belongs to one position: of prompts copied or of one token, of observations, and of rows cut."""
    drawn = random_params(RECURRENT, seed=1)
    weights = jax.device_put(drawn | {"embed": 6.0 * drawn["embed"]})
    engine = make_engine(RECURRENT, replace(ROLLOUT, narrow=(), slots=6), SamplingConfig(), STOPS, seed=11)
    short = [one_rollout(4 + i, np.array([9 + i], np.int32), 40, s, step=2) for i in range(2) for s in range(9)]
    requests, few, runs = make_requests() + short, make_requests(3, 3), []
    for pipeline in ("off", "on"):
        other, tools = rollout_fakes.changed(engine, pipeline=pipeline), StopPairs(few)
        rollouts, stats = other.run(other.publish(weights, 5), requests, FakeTools(requests))
        assert sum(len(rollout.turns) for rollout in rollouts) > 1.5 * len(rollouts)
        assert stats.forks > 0 and stats.reused == 0 and stats.prompts > 4
        runs.append(rollouts)
        cut, _ = other.run(other.publish(weights, 5), few, tools)
        assert tools.cut >= 10 and max(len(rollout.turns) for rollout in cut) >= 3
        assert reference_gap(weights, [*rollouts, *cut], RECURRENT) < 2e-5
    assert_same(*runs, atol=2e-5)


MIXED = replace(MODEL, experts=Mixture(8, 2, replay=True))
CASES = {"plain": MODEL, "experts": MIXED, "recurrent": RECURRENT}


@pytest.mark.parametrize("case", ["plain", *slow("experts", "recurrent")])
def test_trajectories_are_those_of_unrolled_layers(case):
    """Also on a mesh of one device, as runs have it; nothing is compiled after the warmup."""
    model, requests, runs = CASES[case], make_requests(3, 4), []
    params, rollout = jax.device_put(random_params(model, seed=1)), replace(ROLLOUT, slots=16, narrow=(4,))
    for shared, mesh in ((False, None), (True, make_mesh(ShardingConfig(data=1), jax.devices()[:1]))):
        engine = make_engine(model, rollout, SamplingConfig(), STOPS, mesh, seed=11, shares_layers=shared)
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


def test_a_layer_is_of_the_kind_of_the_first_that_computes_the_same():
    windows = SlidingWindows((5, 5, 0), local_theta=100.0)
    assert layer_kinds(replace(RECURRENT, layers=4)) == (0, 1, 0, 1)
    assert layer_kinds(replace(MODEL, layers=7, windows=replace(windows, shared_layers=3))) == (0, 0, 2, 0, 4, 5, 4)


def test_the_sampler_returns_the_experts_of_the_tokens_that_it_decoded():
    """Those that the training forward chooses; a drawn token has those of the token before it, others have none."""

    @jax.jit
    def own_choices(params, tokens):
        chosen, positions = [], jnp.arange(tokens.shape[1])[None]
        execution = Execution(experts=recorded(mix_experts, chosen))
        forward(params, tokens, positions, jnp.ones_like(tokens), MIXED, execution)
        return jnp.stack([layer[0] for layer in chosen], axis=1)

    mixed, requests = jax.device_put(random_params(MIXED, seed=1)), make_requests(3, 3)
    engine = make_engine(MIXED, ROLLOUT, SamplingConfig(), STOPS, None, seed=11)
    trajectories, _ = engine.run(engine.publish(mixed, 5), requests, FakeTools(requests))
    assert any(len(trajectory.turns) > 1 for trajectory in trajectories)
    for trajectory in trajectories[::4]:
        known = (trajectory.routes >= 0).all(axis=(1, 2))
        np.testing.assert_array_equal(known[:-1], trajectory.policy_mask[1:])
        assert not known[-1] and (trajectory.routes[~known] == -1).all()
        padded = np.pad(trajectory.tokens, (0, 128 - trajectory.length))[None]
        own = np.asarray(own_choices(layers_apart(mixed, MIXED), padded))[: trajectory.length]
        np.testing.assert_array_equal(trajectory.routes[known], own[known])
