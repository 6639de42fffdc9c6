"""Success is what the verdict says: every kind of a method gets wrong rollouts that were paid and right ones that were
not, and must treat them by their verdicts.

What a method makes is observed over two steps on fixed groups, as in `test_kind_settings`, but for the table of success
rates, which every method keeps.
"""

import dataclasses
import functools

import numpy as np
import pytest

from grpo_roc_jax.method.compose import initial_state, next_state, train_rows
from grpo_roc_jax.method.planning import choose_problems
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.callables import given
from tests.helpers.method_groups import make_group, method, shaped
from tests.method.test_kind_settings import (
    AXES,
    alike,
    doubled,
    earlier,
    expert,
    failures,
    halved,
    made,
    one_step,
    ranked,
    says,
    some_group,
)

KINDS = [(name, kind) for name, axis in AXES.items() for kind in axis.kinds]
RIGHT = np.array([[0, 0, 0, 1, 0, 0, 1, 0], [1, 0, 0, 0, 1, 0, 1, 0], [0] * 8, [0, 1, 1, 0, 1, 0, 1, 1]], bool)
OTHER = np.array([[1] * 8, [0] * 8, [1, 0, 1, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 1, 0, 0]], bool)
"""Two sets of verdicts on the rollouts of four groups."""
PAID = np.array([0.0, 0.6, 1.4, 0.25, 1e-5, 0.9, 1e-5, 0.35])
"""What the rollouts of each group earn: right ones nothing, and wrong ones up to 1.4."""

BY_VERDICT = {
    "plan.problems": {"pairs", "uncertainty", "no_positive_resampling"},
    "plan.budget": {"knapsack", "predicted"},
    "plan.condition": {"hint_level"},
    "plan.second": {"retry", "scaffold", "guide", "explain", "draft", "examples", "feedback", "value", "refine"}
    | {"write", "rival_hints", "predict"},
    "resample": {"roc", "rc_roc"},
    "shaping": {"dynamic_length", "outcome", "posterior", "quality", "serial", "skill_bonus", "staged", "budget"}
    | {"unlikeliness", "win_rate"},
    "advantage": {"pass_at_k", "disco", "drpo", "m_grpo"},
    "advantage.baseline": {"tracker", "shrunk"},
    "advantage.adjust": {"focal", "novelty", "truncation_mask", "self_teacher"},
    "weights.factors": {"repetition"},
}
"""Kinds that tell successes from failures. The others know rewards only."""


def judged(seed, right, paid):
    """A group whose rollouts have these verdicts and rewards, and say something."""
    group = some_group(seed)
    says = ("alpha 6 20", "beta 1 9")
    turned = [
        dataclasses.replace(t, turns=tuple(dataclasses.replace(turn, text=says[t.sample % 2]) for turn in t.turns))
        for t in group.trajectories
    ]
    group = dataclasses.replace(group, trajectories=tuple(turned))
    pairs = zip(group.verdicts, right.tolist(), paid.tolist(), strict=True)
    verdicts = [dataclasses.replace(v, status="correct" if r else "wrong", reward=p) for v, r, p in pairs]
    return dataclasses.replace(group, verdicts=tuple(verdicts))


def pieces(value):
    """The arrays and the other values of a nested structure."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [piece for item in value for piece in pieces(item)]
    return [np.asarray(value) if isinstance(value, np.ndarray | float | int | np.generic) else value]


@functools.cache
def context(axis, kind):
    """The method; a few kinds show what they know only beside another."""
    beside = {
        ("advantage.adjust", "self_teacher"): {"shows": "success"},
        ("advantage.scale", "beta"): {"low": -1.0, "high": 2.0},
        ("plan.problems", "no_positive_resampling"): {"solved": 0.8},
    }
    return made(axis, kind, **beside.get((axis, kind), {}))


def observed(config, right=RIGHT, paid=PAID):
    """What the method makes of these groups, as a flat list."""
    rng, state, seen = np.random.default_rng(11), initial_state(config), []
    own = (halved, doubled, earlier, alike, ranked, says, expert)
    with given({function.__name__: function for function in own} | {"size": len}):
        for _ in range(3):
            every = [judged(i, right[i], paid) for i in range(4)]
            seen += one_step(config, state, rng, every)
            groups, kept = seen.pop()
            sampled, drift = [*groups[:3], failures(groups[3])], {g.problem.uid: 0.01 for g in groups}
            state = next_state(sampled, kept, config, state, drift)
            seen.append(dict(state.memory))
    problems = [group.problem for group in groups]
    draws = [(count, np.random.default_rng(seed)) for count in (1, 2, 3) for seed in range(8)]
    seen += [choose_problems(problems, count, config.plan, state, rng) for count, rng in draws]
    return pieces(seen)


def near(one, other, atol):
    """Whether two observations agree, in numbers up to `atol`."""
    if len(one) != len(other):
        return False
    return all(
        (a.shape == b.shape and np.allclose(a.astype(float), b.astype(float), rtol=1e-2, atol=atol, equal_nan=True))
        if isinstance(a, np.ndarray) and a.dtype.kind in "biuf"
        else np.array_equal(a, b)
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize(("axis", "kind"), KINDS)
def test_a_success_is_what_the_verdict_says(axis, kind):
    """With the same pay, other verdicts change what the kinds do that know of success, and nothing that others do."""
    config = context(axis, kind)
    same = near(observed(config), observed(config, OTHER), 1e-9)
    assert same != (kind in BY_VERDICT.get(axis, ()))


@pytest.mark.parametrize(("axis", "kind"), KINDS)
def test_no_kind_goes_by_the_sign_of_a_reward(axis, kind):
    """Next to 0 a little more or less pay changes little: no threshold lies there. Some of these rollouts are right."""
    config = context(axis, kind)
    less = np.where(PAID == 1e-5, -1e-5, PAID)
    assert near(observed(config), observed(config, paid=less), 1e-2)


def test_what_is_listed_exists():
    assert all(kinds <= set(AXES[axis].kinds) for axis, kinds in BY_VERDICT.items())


def wrongly_paid(**more):
    """Right and unpaid, wrong and paid, right and paid, wrong and unpaid."""
    group = make_group([0, 0.25, 1, 0], **more)
    statuses = ("correct", "wrong", "correct", "wrong")
    pairs = zip(group.verdicts, statuses, strict=True)
    return dataclasses.replace(group, verdicts=tuple(dataclasses.replace(v, status=s) for v, s in pairs))


def test_pass_at_k_counts_verdicts():
    found = train_rows([wrongly_paid()], method(advantage={"kind": "pass_at_k", "k": 2}), AlgoState())
    # n = 4, c = 2: mean 1 - 1/6; a success gets (1/6) / s, a failure (1/6 - 1/3) / s with s = sqrt(5/36).
    expected = np.array([1, -1, 1, -1]) / 5**0.5
    np.testing.assert_allclose([row.advantages[-1] for row in found], expected, atol=1e-5)


def test_quality_and_likelihood_pay_for_successes_only():
    quality = wrongly_paid(channels={"quality": [0.5, 1.0, 1.0, 1.0]})
    np.testing.assert_allclose(shaped(quality, "quality", weight=0.3), [0.15, 0.25, 1.0, 0.0])
    likely = wrongly_paid(logprobs=[-3.0, -1.0, -2.0, -4.0])
    np.testing.assert_allclose(shaped(likely, "unlikeliness", beta=0.25), [0, 0.25, 1 - 0.25 * 2 / 4, 0])
