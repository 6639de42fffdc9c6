"""Whole systems of single papers: their formulas against the vectors of the specification, and what they request."""

import numpy as np
import pytest
from method_groups import make_group, method

from grpo_roc_jax.method.compose import train_rows
from grpo_roc_jax.method.family.v_05 import shrunk_baseline
from grpo_roc_jax.method.family.vspo import capped_draw, task_value
from grpo_roc_jax.method.planning import Wave, next_wave
from grpo_roc_jax.method.state import AlgoState, ProblemTable


def close(actual, expected, atol=1e-5):
    np.testing.assert_allclose(actual, expected, atol=atol)


def advantages(groups, state=None, size=4, **sections):
    """The advantage of each trajectory, from its last token."""
    rows = train_rows(groups, method(size, **sections), state or AlgoState(), rng=np.random.default_rng(0))
    return [float(row.advantages[-1]) for row in rows]


def waved(groups, number, plan, **more):
    """A wave over ready groups."""
    problems = [group.problem for group in groups]
    return Wave(problems, 4, AlgoState(), np.random.default_rng(0), number, groups, **more)


def test_v_05():
    close(shrunk_baseline(np.array([1.0, 0, 0, 1]), 0.6), [0.6, 1.0])
    close(shrunk_baseline(np.array([0.0, 0, 0, 1]), 0.95), [0.339286, 0.127551])
    table = ProblemTable().put(["p"], {"alpha": np.array([0.95]), "beta": np.array([0.05])})
    shrunk = {"baseline": "shrunk", "scale": "none"}
    found = advantages([make_group([0, 0, 0, 1])], AlgoState(table=table), advantage=shrunk)
    close(found, np.array([0, 0, 0, 1]) - 0.339286)


def test_vspo():
    """Two groups without signal make room for groups of the mixed problems, one of each at most."""
    close(task_value(0.25), 0.140625)
    groups = [make_group(r, uid=str(i)) for i, r in enumerate(([0, 0], [0, 1], [1, 1], [1, 0], [0, 0]))]
    plan = method(plan={"second": {"kind": "value", "most": 1}}).plan
    requests = next_wave(waved(groups, 1, plan), plan)
    assert sorted((r.place, r.count) for r in requests) == [(1, 2), (3, 2)]
    results = [make_group([1, 1], uid=str(r.place)) for r in requests]
    merged = plan.second.merge(groups, requests, results)
    assert merged == [results[0], groups[1], results[1], groups[3], groups[4]]
    assert next_wave(waved(groups, 2, plan), plan) == []
    drawn = [capped_draw(np.array([0.1, 0, 0.3]), 2, 2, np.random.default_rng(i)) for i in range(2000)]
    firsts = np.array([d[0] for d in drawn])
    assert (firsts == 2).mean() == pytest.approx(0.75, abs=0.03)
    assert len(capped_draw(np.zeros(3), 2, 2, np.random.default_rng(0))) == 0
    staged = method(shaping=["staged"]).shaping[0]
    assert staged.weights == (0.1, 0.2, 0.7)
