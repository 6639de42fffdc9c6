"""The one mutable container: order, counts, exact state."""

import pytest

from grpo_roc_jax.run.buffer import RolloutBuffer
from grpo_roc_jax.types import Group
from tests.helpers.method_groups import make_group


def groups(*uids):
    return [make_group([1, 0], uid=uid) for uid in uids]


def uids(some):
    return [group.problem.uid for group in some]


def test_oldest_first():
    buffer = RolloutBuffer()
    buffer.add(groups("a", "b"))
    buffer.add(iter(groups("c")))
    assert len(buffer) == 3
    assert uids(buffer.take(2)) == ["a", "b"]
    buffer.add(groups("d"))
    assert uids(buffer.take(9)) == ["c", "d"]
    assert buffer.take(1) == []
    assert (buffer.added, buffer.removed, len(buffer)) == (4, 4, 0)


def test_state_round_trip():
    buffer, other = RolloutBuffer(), RolloutBuffer()
    buffer.add(groups("a", "b", "c"))
    other.add(groups("x"))
    buffer.take(1)
    other.load(buffer.state())
    buffer.take(2)  # the state is a copy
    assert uids(other.take(5)) == ["b", "c"]
    assert (other.added, other.removed) == (3, 3)


def test_refusals():
    buffer = RolloutBuffer()
    empty = Group(groups("a")[0].problem, (), ())
    with pytest.raises(ValueError, match="'a' is empty"):
        buffer.add([empty])
    with pytest.raises(ValueError, match="cannot take -1 groups"):
        buffer.take(-1)
