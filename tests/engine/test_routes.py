"""Router replay: the experts that the sampler chose return with the trajectories, and training takes them."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax.engine.config import SamplingConfig
from grpo_roc_jax.engine.engine import make_engine
from grpo_roc_jax.learner.loss import UpdateConfig, policy_logprobs
from grpo_roc_jax.learner.pack import BatchConfig, pack
from grpo_roc_jax.method.compose import train_row
from grpo_roc_jax.model.config import Mixture
from grpo_roc_jax.model.experts import mix_experts, recorded
from grpo_roc_jax.model.transformer import Execution, forward
from grpo_roc_jax.record.codec import groups_from_tree, groups_to_tree
from grpo_roc_jax.types import Group, Verdict
from tests.helpers.reference import random_params
from tests.helpers.rollout_fakes import MODEL, PROBLEM, ROLLOUT, STOPS, FakeTools, make_requests

MIXED = replace(MODEL, layers=2, experts=Mixture(8, 2, replay=True))
LENGTH = 128


@pytest.fixture(scope="module")
def params():
    return jax.device_put(random_params(MIXED, seed=1))


def sampled(params, dtype="float32", rollout=ROLLOUT, **fields):
    """(multi-turn trajectories of a sampler that computes in `dtype`, statistics)."""
    engine = make_engine(replace(MIXED, compute_dtype=dtype), rollout, SamplingConfig(), STOPS, None, seed=11)
    requests = make_requests(**fields)
    return engine.run(engine.publish(params, 5), requests, FakeTools(requests))


@pytest.fixture(scope="module")
def trajectories(params):
    return sampled(params, groups=3, siblings=3)[0]


@jax.jit
def _choices(params, tokens):
    chosen = []
    layers = tuple({name: leaf[i] for name, leaf in params["layers"].items()} for i in range(MIXED.layers))
    execution = Execution(experts=recorded(mix_experts, chosen))
    positions = jnp.arange(LENGTH)[None]
    forward(params | {"layers": layers}, tokens, positions, jnp.ones_like(tokens), MIXED, execution)
    return jnp.stack([layer[0] for layer in chosen], axis=1)


def own_choices(params, trajectory):
    """int[T,L,X]: what the training forward chooses by itself, in float32."""
    padded = np.zeros((1, LENGTH), np.int32)
    padded[0, : trajectory.length] = trajectory.tokens
    return np.asarray(_choices(params, padded))[: trajectory.length]


def test_the_sampler_returns_the_experts_of_the_tokens_that_it_decoded(params, trajectories):
    """A drawn token has those of the token before it; prompts, observations and the last token have none."""
    assert any(len(trajectory.turns) > 1 for trajectory in trajectories)
    for trajectory in trajectories[::4]:
        known = (trajectory.routes >= 0).all(axis=(1, 2))
        np.testing.assert_array_equal(known[:-1], trajectory.policy_mask[1:])
        assert not known[-1] and (trajectory.routes[~known] == -1).all()
        np.testing.assert_array_equal(trajectory.routes[known], own_choices(params, trajectory)[known])


@pytest.mark.slow
def test_rows_that_are_written_again_keep_their_experts(params, trajectories):
    tight = replace(ROLLOUT, kv_tokens=192, block=16, narrow=())
    again, stats = sampled(params, rollout=tight, groups=3, siblings=3)
    assert stats.evictions
    for trajectory, other in zip(trajectories, again, strict=True):
        np.testing.assert_array_equal(trajectory.tokens, other.tokens)
        np.testing.assert_array_equal(trajectory.routes, other.routes)


def logprobs_of(params, trajectories, *, replay):
    """(log-probabilities by the update's forward in float32, recorded ones, policy mask) of packed rows."""
    rows = []
    for t in trajectories:
        zeros = np.zeros(t.length, np.float32)
        row = train_row(t, t.policy_mask, t.logprobs, zeros, zeros, "token", None)
        rows.append(row if replay else replace(row, routes=None))
    batch, _ = pack(rows, BatchConfig(row_length=LENGTH, rows=len(rows)), 1)
    micro = jax.tree.map(lambda leaf: leaf[0] if np.ndim(leaf) else leaf, batch)
    run = jax.jit(partial(policy_logprobs, model=replace(MIXED, compute_dtype="float32"), update=UpdateConfig()))
    return np.asarray(run(params, micro)[0]), micro.logprobs_old, micro.policy_mask


@pytest.mark.slow
def test_replay_narrows_the_gap_between_a_bfloat16_sampler_and_a_float32_trainer(params):
    rollouts, _ = sampled(params, "bfloat16")
    gaps = {}
    for replay in (False, True):
        ours, recorded_, mask = logprobs_of(params, rollouts, replay=replay)
        gaps[replay] = np.abs(ours - recorded_)[mask]
    changed = np.mean([(own_choices(params, t) != t.routes)[t.routes[:, 0, 0] >= 0].any() for t in rollouts[::5]])
    figures = {replay: (gap.mean(), gap.max(), np.mean(gap > 0.1)) for replay, gap in gaps.items()}
    print(f"gap without {figures[False]}, with {figures[True]}; rows with another choice {changed}")
    assert changed > 0
    assert gaps[True].mean() < 0.7 * gaps[False].mean()


def test_replayed_choices_that_are_the_own_ones_change_nothing(params, trajectories):
    native, replayed = (logprobs_of(params, trajectories, replay=replay)[0] for replay in (False, True))
    np.testing.assert_allclose(native, replayed, atol=1e-5)


def test_a_checkpoint_keeps_the_experts(trajectories):
    some = tuple(trajectories[:2])
    verdict = Verdict(0.0, "wrong", None, 0, 0, 0, True, 1)
    group = Group(PROBLEM, some, (verdict, verdict))
    (restored,) = groups_from_tree(groups_to_tree([group]))
    for trajectory, other in zip(some, restored.trajectories, strict=True):
        assert other.routes.dtype == np.int16
        np.testing.assert_array_equal(trajectory.routes, other.routes)
