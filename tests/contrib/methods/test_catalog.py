"""Every method file: a complete header, settings that parse, and the invariants of the family on its composition."""

import dataclasses

import numpy as np
import pytest

from grpo_roc_jax.contrib.methods.microcoder import TruncationMask
from grpo_roc_jax.contrib.methods.tempsamp_r1 import Anchored
from grpo_roc_jax.method.advantage import Estimator, GroupRelative, Whiten
from grpo_roc_jax.method.compose import (
    initial_state,
    next_state,
    resample_group,
    subset,
)
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.types import Group
from tests.method.test_catalog import METHODS, groups, kept_groups, load, products, rows_of


@pytest.mark.parametrize("name", METHODS)
def test_composition(name):
    """The invariants of the family's interface section, on the line from sampled groups to rows."""
    config = load(name)
    state = initial_state(config)
    sampled = groups(config)
    generator = np.random.default_rng(1)
    kept = []
    for group in sampled:
        selection = resample_group(group, config, generator)
        assert selection.kept
        assert len(selection.indices) == min(config.group.size, group.size)
        kept.append(subset(group, selection))
    rows = rows_of(kept, config)
    base = products(rows)
    assert any(p.any() for p in base), "no trajectory has a gradient"
    for row, trajectory in zip(rows, [t for g in kept for t in g.trajectories], strict=True):
        assert np.isfinite(row.advantages).all()
        assert np.isfinite(row.weights).all()
        assert (row.weights >= 0).all()
        assert not row.weights[~trajectory.policy_mask].any(), "an observation or prompt token has weight"
    # The order of groups changes nothing.
    moved = products(rows_of(kept[::-1], config))
    sizes = [g.size for g in kept]
    back = [moved[sum(sizes[g + 1 :]) : sum(sizes[g:])] for g in range(len(sizes))]
    if not any(isinstance(step, TruncationMask) for step in adjustments(config)):
        for before, after in zip(base, [p for part in back for p in part], strict=True):
            np.testing.assert_allclose(before, after, atol=1e-6)
    after = next_state(sampled, kept, config, state)
    assert after.step == 1
    again = AlgoState.from_tree(after.to_tree())
    np.testing.assert_array_equal(again.table.values, after.table.values)


def rewarded(some, change):
    """The groups with other rewards; what was reached, and the channels, stay."""
    return [
        Group(g.problem, g.trajectories, tuple(dataclasses.replace(v, reward=change(v.reward)) for v in g.verdicts))
        for g in some
    ]


def shiftable(name):
    """Whether rewards pass through a centered estimator and nothing else: no map, no channel, no score, no prior."""
    config = load(name)
    if config.shaping or not isinstance(found := estimator(config), GroupRelative):
        return False
    centered = found.baseline.kind in ("mean", "leave_one_out", "median", "length_weighted") or whitened(config)
    return centered and found.baseline.kind != "tracker" and found.scale.kind not in ("beta", "virtual_std")


def scalable(name):
    """Whether the estimator also divides by a spread of the rewards."""
    config = load(name)
    return shiftable(name) and (estimator(config).scale.kind in ("std", "batch_std") or whitened(config))


def estimator(config):
    """The estimate per group; for an anchored one, that of the trajectories of the policy."""
    return config.advantage.of if isinstance(config.advantage, Anchored) else config.advantage


def adjustments(config):
    return config.advantage.adjust if isinstance(config.advantage, Estimator) else ()


def whitened(config):
    return any(isinstance(step, Whiten) for step in adjustments(config))


@pytest.mark.parametrize("name", METHODS)
def test_a_constant_or_a_factor_on_all_rewards_changes_nothing(name):
    if not shiftable(name):
        pytest.skip("reads more of rewards than their differences")
    config = load(name)
    kept = kept_groups(config)
    base = products(rows_of(kept, config))
    changes = [lambda r: r + 5, lambda r: 3 * r] if scalable(name) else [lambda r: r + 5]
    for change in changes:
        for left, right in zip(base, products(rows_of(rewarded(kept, change), config)), strict=True):
            np.testing.assert_allclose(left, right, atol=1e-5)


def test_most_methods_are_held_to_that():
    held = {name for name in METHODS if shiftable(name)}
    assert {"grpo", "grpo_roc", "rc_grpo", "san", "xrpo"} <= {name for name in held if scalable(name)} < held
    assert len(held) > 35
