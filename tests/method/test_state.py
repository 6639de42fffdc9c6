"""The memory of a method: lookups, updates that do not change the past, exact round trip."""

import jax
import numpy as np
import pytest
from method_groups import method

from grpo_roc_jax.method.compose import initial_state
from grpo_roc_jax.method.state import AlgoState, ProblemTable, visited


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


def test_round_trip():
    memory = {"length_exponent": np.array([-0.3]), "constraints": np.array([0.1, 0.2])}
    state = AlgoState(3, ProblemTable().put(["a"], {"alpha": np.array([2.5])}), memory)
    tree = state.to_tree()
    back = AlgoState.from_tree(jax.tree.map(np.array, tree))
    assert (back.step, back.recall("length_exponent", 0.0), back.recall("diversity", -1.0)) == (3, -0.3, -1.0)
    assert back.memory["constraints"].tolist() == [0.1, 0.2]
    assert back.table.get(["a"])["alpha"].tolist() == [2.5]
    assert all(leaf.ndim >= 1 for leaf in jax.tree.leaves(tree))
    held = {"kind": "constraints", "channels": ["a", "b"], "targets": [0.5, 0.5]}
    fresh = initial_state(method(advantage={"adjust": [held]}))
    assert AlgoState.from_tree(fresh.to_tree()).memory["constraints"].tolist() == [0, 0]
    assert AlgoState.from_tree({name: tree[name] for name in ("step", "keys", "values")}).memory == {}


def test_tracker_vector():
    table = ProblemTable().put(["a"], {"alpha": np.array([4.0]), "beta": np.array([4.0])})
    rows = visited(AlgoState(table=table), ["a"], np.array([1.0]), np.array([1.0]), 0.875).table.get(["a"])
    assert (float(rows["alpha"][0]), float(rows["beta"][0])) == (4.5, 3.5)


@pytest.mark.parametrize(
    ("level", "accuracy", "expected"), [(0, 0, 1), (1, 0.05, 2), (2, 0.2, 2), (2, 0.5, 1), (3, 0, 3), (1, 0.9, 0)]
)
def test_hint_level_vector(level, accuracy, expected):
    table = ProblemTable().put(["a"], {"level": np.array([level]), "accuracy": np.array([accuracy])})
    moved = method(plan={"condition": "hint_level"}).plan.condition.next_table(["a", "a"], AlgoState(table=table))
    assert moved.table.get(["a"])["level"].tolist() == [expected]


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
