"""The loss on one page and the composed one are the same number."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax.learner.loss import batch_loss
from grpo_roc_jax.learner.pack import BatchConfig, pack
from grpo_roc_jax.method.compose import resample_group, subset, train_rows
from grpo_roc_jax.method.reference import grpo_roc_loss
from grpo_roc_jax.method.state import AlgoState
from tests.helpers.loss_batch import micro_batches
from tests.helpers.method_groups import make_group, method

KEEP, SAMPLED = 4, 8


def drawn_group(rng, uid):
    """A group with rewards, calls, answers and lengths at random; every fifth one has equal rewards."""
    rewards = rng.integers(0, 2, SAMPLED).astype(float) if rng.random() < 0.8 else np.ones(SAMPLED)
    calls = rng.integers(0, 4, SAMPLED)
    lengths = rng.integers(1, 6, SAMPLED)
    return make_group(
        rewards,
        uid=uid,
        lengths=lengths,
        calls=calls,
        errors=rng.binomial(calls, 0.4),
        answers=rng.integers(0, 3, SAMPLED),
        turns=rng.integers(1, 4, SAMPLED),
        observation=rng.integers(0, 3, SAMPLED),
        logprobs=[rng.normal(-1.0, 0.3, n).astype(np.float32) for n in lengths],
    )


def composed(groups, now, rng, keep):
    """The loss through selection, rows, packing and `batch_loss`; `now[p][n]` are its log-probabilities."""
    config = method(keep)
    selections = [resample_group(group, config, rng) for group in groups]
    selected = [subset(group, chosen) for group, chosen in zip(groups, selections, strict=True) if chosen.kept]
    rows = train_rows(selected, config, AlgoState())
    chosen = [now[p][n] for p, selection in enumerate(selections) for n in selection.indices]
    # Packing carries the policy's log-probabilities to their places in the field of the reference, which is unused.
    rows = [dataclasses.replace(row, logprobs_ref=values) for row, values in zip(rows, chosen, strict=True)]
    packed, _ = pack(rows, BatchConfig(row_length=16, rows=2), len(rows))
    zeros, parts = jnp.zeros(packed.tokens.shape[1:]), micro_batches(packed)[: packed.count]
    return sum(batch_loss(jnp.asarray(part.logprobs_ref), zeros, part, config.surrogate)[0] for part in parts)


def on_one_page(groups, now, rng, keep):
    names = {"calls": "tool_calls", "errors": "tool_errors", "answers": "answers", "turns": "turns"}
    rollouts = [
        {name: np.array([getattr(v, field) for v in group.verdicts]) for name, field in names.items()}
        | {"rewards": group.rewards, "correct": group.correct}
        for group in groups
    ]
    old, mask = ([[getattr(t, name) for t in g.trajectories] for g in groups] for name in ("logprobs", "policy_mask"))
    width = max(len(array) for group in mask for array in group)

    def padded(field):
        return np.stack([[np.pad(array, (0, width - len(array))) for array in group] for group in field])

    logprobs, old, mask = map(padded, (now, old, mask))
    return grpo_roc_loss(jnp.asarray(logprobs), jnp.asarray(old), mask, rollouts, rng, keep=keep)


@pytest.mark.parametrize(("seed", "keep"), [*((seed, KEEP) for seed in range(12)), (12, 1), (13, 3), (14, SAMPLED)])
def test_the_composed_loss_is_that_of_the_page(seed, keep):
    """At log-probabilities at random, so that the gradients are the same too; ratios leave the clip on both sides. Of
    one trajectory no deviation is known, and its advantage is 0."""
    rng = np.random.default_rng(seed)
    groups = [drawn_group(rng, f"p{i}") for i in range(5)]
    now = [[t.logprobs + rng.normal(0, 0.4, t.length).astype(np.float32) for t in g.trajectories] for g in groups]
    expected = on_one_page(groups, now, np.random.default_rng(99), keep)
    np.testing.assert_allclose(composed(groups, now, np.random.default_rng(99), keep), expected, rtol=1e-5, atol=1e-6)


def test_by_hand():
    """Two successes and two failures of one token each, one ratio of 2: -(min(2 a, 1.28 a) + a - a - a) / 4."""
    rollout = {name: np.array([1, 1, 1, 1]) for name in ("calls", "answers", "turns")} | {"errors": np.zeros(4)}
    rollout |= {"rewards": np.array([1.0, 1, 0, 0]), "correct": np.array([True, True, False, False])}
    old = np.zeros((1, 4, 1))
    now = old.copy()
    now[0, 0] = np.log(2)
    a = 0.5 / np.sqrt(1 / 3)
    arrays, rng = (jnp.asarray(now), old, np.ones((1, 4, 1), bool)), np.random.default_rng(0)
    loss = grpo_roc_loss(*arrays, [rollout], rng, keep=4)
    np.testing.assert_allclose(loss, -(1.28 * a + a - a - a) / 4, rtol=1e-4)
    as_lists = {name: values.tolist() for name, values in rollout.items()}
    assert grpo_roc_loss(*(np.asarray(array).tolist() for array in arrays), [as_lists], rng, keep=4) == loss
    assert grpo_roc_loss(*arrays, [rollout | {"rewards": rollout["rewards"] > 0}], rng, keep=4) == loss
    with pytest.raises(ValueError, match="keep = 5; must be a whole number from 1 to 4"):
        grpo_roc_loss(*arrays, [rollout], rng, keep=5)
    for wrong, message in (
        ((*arrays, [rollout], 0), "rng is 0 .*; must be a generator"),
        ((*arrays, [rollout] * 2, rng), r"rollouts is of shape \(2,\); must be \(1,\)"),
        ((*arrays, [rollout | {"calls": np.ones(3)}], rng), r"calls is of shape \(3,\); must be \(4,\)"),
        ((*arrays[:2], arrays[2][0], [rollout], rng), r"policy_mask is of shape \(4, 1\); must be \(1, 4, 1\)"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            grpo_roc_loss(*wrong, keep=4)
