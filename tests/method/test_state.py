"""The memory of a method: lookups, updates that do not change the past, exact round trip."""

import numpy as np

from grpo_roc_jax.method.state import AlgoState, ProblemTable, begun, visited
from grpo_roc_jax.types import Problem


def test_table_defaults_and_put():
    empty = ProblemTable()
    assert empty.get(["a"])["alpha"].tolist() == [0.5]
    one = empty.put(["b", "a"], {"level": np.array([2.0, 1.0])})
    assert one.get(["a", "b", "c"])["level"].tolist() == [1, 2, 0]
    two = one.put(["a", "c"], {"visits": np.array([5.0, 6.0])})
    assert two.get(["a", "b", "c"])["visits"].tolist() == [5, 0, 6]
    assert two.get(["a", "b", "c"])["level"].tolist() == [1, 2, 0]
    assert one.get(["a"])["visits"].tolist() == [0]  # the old table is as it was
    assert empty.keys.size == 0
    assert two.get([])["alpha"].size == 0


def test_table_against_a_dictionary():
    generator = np.random.default_rng(0)
    table, plain = ProblemTable(), {}
    for _ in range(30):
        uids = [str(u) for u in generator.choice(50, 5, replace=False)]
        levels = generator.random(5)
        table = table.put(uids, {"level": levels})
        plain |= dict(zip(uids, levels, strict=True))
    everything = [str(u) for u in range(50)]
    assert table.get(everything)["level"].tolist() == [plain.get(u, 0.0) for u in everything]
    assert (np.diff(table.keys.astype(object)) > 0).all()


def test_tracker_vector():
    table = ProblemTable().put(["a"], {"alpha": np.array([4.0]), "beta": np.array([4.0])})
    rows = visited(AlgoState(table=table), ["a"], np.array([1.0]), np.array([1.0]), 0.875).table.get(["a"])
    assert (float(rows["alpha"][0]), float(rows["beta"][0])) == (4.5, 3.5)


def test_a_problem_without_judged_rollouts_begins_as_an_unseen_one():
    """In a table with rows of several files, columns that a file lacks are null."""
    rows = ({}, {"judged": None, "success_rate": None}, {"judged": 4})
    assert not begun(AlgoState(), [Problem("p", "?", "1", "t", extra) for extra in rows]).table.keys.size


def test_visited():
    state = visited(AlgoState(), ["a", "b", "a"], np.array([1.0, 0, 3]), np.array([4.0, 4, 4]), 0.875)
    rows = state.table.get(["a", "b"])
    assert rows["visits"].tolist() == [8, 4]
    assert rows["successes"].tolist() == [4, 0]
    assert rows["accuracy"].tolist() == [0.5, 0]
    np.testing.assert_allclose(rows["alpha"], [0.875 * 0.5 + 0.5, 0.875 * 0.5])
    nothing = visited(AlgoState(), ["a"], np.zeros(1), np.zeros(1), 0.875).table.get(["a"])
    assert nothing["alpha"].tolist() == [0.5]
    assert nothing["accuracy"].tolist() == [0.5]
