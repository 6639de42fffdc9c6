"""The memory of a method: lookups, updates that do not change the past, exact round trip."""

import jax
import numpy as np
import pytest

from grpo_roc_jax.method.compose import initial_state
from grpo_roc_jax.method.state import AlgoState, ProblemTable
from tests.helpers.method_groups import method


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


@pytest.mark.parametrize(
    ("level", "accuracy", "expected"), [(0, 0, 1), (1, 0.05, 2), (2, 0.2, 2), (2, 0.5, 1), (3, 0, 3), (1, 0.9, 0)]
)
def test_hint_level_vector(level, accuracy, expected):
    table = ProblemTable().put(["a"], {"level": np.array([level]), "accuracy": np.array([accuracy])})
    moved = method(plan={"condition": "hint_level"}).plan.condition.next_table(["a", "a"], AlgoState(table=table))
    assert moved.table.get(["a"])["level"].tolist() == [expected]
