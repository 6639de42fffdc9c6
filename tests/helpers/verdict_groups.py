"""What a method makes of groups whose rewards contradict their verdicts: wrong rollouts that were paid, and right ones
that were not.

Observed over two steps on fixed groups, as in `kind_cases`, but for the table of success rates, which every method
keeps.
"""

import dataclasses

import numpy as np

from grpo_roc_jax.method.compose import initial_state, next_state
from grpo_roc_jax.method.planning import choose_problems
from tests.helpers.kind_cases import failures
from tests.helpers.method_groups import make_group

RIGHT = np.array([[0, 0, 0, 1, 0, 0, 1, 0], [1, 0, 0, 0, 1, 0, 1, 0], [0] * 8, [0, 1, 1, 0, 1, 0, 1, 1]], bool)
OTHER = np.array([[1] * 8, [0] * 8, [1, 0, 1, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 1, 0, 0]], bool)
"""Two sets of verdicts on the rollouts of four groups."""
PAID = np.array([0.0, 0.6, 1.4, 0.25, 1e-5, 0.9, 1e-5, 0.35])
"""What the rollouts of each group earn: right ones nothing, and wrong ones up to 1.4."""


def judged(group, right, paid):
    """The group with these verdicts and rewards, whose rollouts say something."""
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


def observed(cases, config, right=RIGHT, paid=PAID):
    """What the method makes of these groups, as a flat list."""
    rng, state, seen = np.random.default_rng(11), initial_state(config), []
    with cases.given():
        for _ in range(3):
            every = [judged(cases.group(i), right[i], paid) for i in range(4)]
            seen += cases.one_step(config, state, rng, every)
            groups, trained = seen.pop()
            sampled, drift = [*groups[:3], failures(groups[3])], {g.problem.uid: 0.01 for g in groups}
            state = next_state(sampled, trained, config, state, drift)
            seen.append(dict(state.memory))
    problems = [group.problem for group in groups]
    draws = [(count, np.random.default_rng(seed)) for count in (1, 2, 3) for seed in range(8)]
    seen += [choose_problems(problems, count, config.plan, state, rng) for count, rng in draws]
    return pieces(seen)


def near(first, second, atol):
    """Whether two observations agree, in numbers up to `atol`."""
    if len(first) != len(second):
        return False
    return all(
        (a.shape == b.shape and np.allclose(a.astype(float), b.astype(float), rtol=1e-2, atol=atol, equal_nan=True))
        if isinstance(a, np.ndarray) and a.dtype.kind in "biuf"
        else np.array_equal(a, b)
        for a, b in zip(first, second, strict=True)
    )


def knows_success(cases, config):
    """Whether other verdicts with the same rewards change what the method makes."""
    return not near(observed(cases, config), observed(cases, config, OTHER), 1e-9)


def changes_with_the_sign(cases, config):
    """Whether a reward just above zero, or just below it, makes a difference. Some of these rollouts are right."""
    less = np.where(PAID == 1e-5, -1e-5, PAID)
    return not near(observed(cases, config), observed(cases, config, paid=less), 1e-2)


def wrongly_paid(**more):
    """Right and unpaid, wrong and paid, right and paid, wrong and unpaid."""
    group = make_group([0, 0.25, 1, 0], **more)
    statuses = ("correct", "wrong", "correct", "wrong")
    pairs = zip(group.verdicts, statuses, strict=True)
    return dataclasses.replace(group, verdicts=tuple(dataclasses.replace(v, status=s) for v, s in pairs))
