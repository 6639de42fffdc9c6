"""The memory of a method: lookups, updates that do not change the past, exact round trip."""

import numpy as np

from grpo_roc_jax.method.state import AlgoState, ProblemTable, begun, visited
from grpo_roc_jax.types import Problem


def test_table_against_a_dictionary():
    """Columns replaced at random; unseen problems have the defaults, and earlier tables stay as they were."""
    generator, columns = np.random.default_rng(0), {"level": 0.0, "visits": 0.0, "alpha": 0.5}
    everything = [str(u) for u in range(50)]
    table, plain = ProblemTable(), {name: {} for name in columns}
    for _ in range(30):
        uids, name = generator.choice(everything, 5, replace=False).tolist(), str(generator.choice(list(columns)))
        given, before, old = generator.random(5), table, table.get(everything)
        table = table.put(uids, {name: given})
        plain[name] |= dict(zip(uids, given, strict=True))
        np.testing.assert_equal(before.get(everything), old)
    for name, default in columns.items():
        assert table.get(everything)[name].tolist() == [plain[name].get(u, default) for u in everything]
    assert (np.diff(table.keys.astype(object)) > 0).all() and table.get([])["alpha"].size == 0


def test_a_problem_without_judged_rollouts_begins_as_an_unseen_one():
    """In a table with rows of several files, columns that a file lacks are null."""
    rows = ({}, {"judged": None, "success_rate": None}, {"judged": 4})
    assert not begun(AlgoState(), [Problem("p", "?", "1", "t", extra) for extra in rows]).table.keys.size


def test_visited():
    """Groups of a problem add up; the tracker counts each step once, whatever the size of its groups."""
    state = visited(AlgoState(), ["a", "b", "a"], np.array([1.0, 0, 3]), np.array([4.0, 4, 4]), 0.875)
    rows = state.table.get(["a", "b"])
    assert rows["visits"].tolist() == [8, 4]
    assert rows["successes"].tolist() == [4, 0]
    assert rows["accuracy"].tolist() == [0.5, 0]
    np.testing.assert_allclose(rows["alpha"], [0.875 * 0.5 + 0.5, 0.875 * 0.5])
    tracked = state.table.put(["a"], {"alpha": np.array([4.0]), "beta": np.array([4.0])})
    rows = visited(AlgoState(table=tracked), ["a"], np.ones(1), np.ones(1), 0.875).table.get(["a"])
    assert (rows["alpha"].tolist(), rows["beta"].tolist()) == ([4.5], [3.5])
    nothing = visited(AlgoState(), ["a"], np.zeros(1), np.zeros(1), 0.875).table.get(["a"])
    assert nothing["alpha"].tolist() == nothing["accuracy"].tolist() == [0.5]
