"""Advantages against vectors, also of turns; equal rewards whatever their unit; rewards and weights of the core."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from grpo_roc_jax import Group, Problem, Turn, train_rows
from grpo_roc_jax.method.advantage import same_state, turn_pay
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.method.weights import ratio_segments
from grpo_roc_jax.settings.callables import given
from grpo_roc_jax.types import ToolCall, ToolResult
from tests.helpers import method_groups
from tests.helpers.method_groups import batch_of, close, make_group, make_trajectory, method, other, shaped


def values(groups, state=None, *, rng=None, **settings):
    """Advantages of a batch of groups; rewards, or arguments of `make_group`, stand for a group."""
    arguments = [group if isinstance(group, Group | dict) else {"rewards": group} for group in groups]
    made = [g if isinstance(g, Group) else make_group(**{"uid": f"p{i}"} | g) for i, g in enumerate(arguments)]
    return method(advantage=settings).advantage.trajectories(batch_of(made, state=state, rng=rng))


FIRST, CHANNELS = {"rewards": [1, 0, 0, 0]}, {"kind": "channels", "of": {"scale": {"kind": "std", "eps": 1e-4}}}
BARE, PLUS_PLUS = (
    {"baseline": "none", "scale": "none"},
    [{"rewards": rewards, "lengths": [1, 1]} for rewards in ([1, 0], [1, 1], [0, 0])],
)
SEVERAL = [
    {"rewards": np.add(a, b), "channels": {"a": a, "b": b}}
    for a, b in (([0, 0], [0, 1]), ([0, 1], [0, 1]), ([1, 0], [0, 1]))
]


def whiten(**settings):
    return {"adjust": [{"kind": "whiten", **settings}]}


@pytest.mark.parametrize(
    ("groups", "settings", "expected"),
    [
        ([FIRST], {}, [1.499997, -0.499999, -0.499999, -0.499999]),
        ([FIRST], {"scale": {"kind": "std", "ddof": 0}}, [1.732047, -0.577349, -0.577349, -0.577349]),
        ([[1, 0, 0]], {"baseline": "leave_one_out", "scale": "none"}, [1, -0.5, -0.5]),
        ([{"rewards": [1, 0], "lengths": [3, 1]}], {"baseline": "length_weighted", "scale": "none"}, [0.25, -0.75]),
        ([[1, 0], [1, 1]], {"scale": "batch_std"}, [1, -1, 0, 0]),  # Lite-PPO: the deviation of the batch is 1/2
        (PLUS_PLUS, {"scale": "none"} | whiten(over="row"), [1.581139, -1.581139, 0, 0, 0, 0]),
        ([{"rewards": [1, 0], "lengths": [1, 3]}], BARE | whiten(over="token", ddof=0), [1.732051, -0.577350]),
        (SEVERAL, CHANNELS, [-0.707007, 0.707007, -1.414014, 1.414014, 0, 0]),
        (SEVERAL, CHANNELS | {"standardize": True, "eps": 1e-4}, [-0.707036, 0.707036, -1.414072, 1.414072, 0, 0]),
    ],
)
def test_by_hand(groups, settings, expected):
    close(np.concatenate(values(groups, **settings)), expected)


def test_the_advantages_of_sixteen():
    """Successes among 16 that are kept -> advantages of a success and of a failure (spec of GRPO-RoC, 1.6)."""
    for right, expected in {1: (3.75, -0.25), 2: (2.562, -0.366), 8: (0.968, -0.968), 15: (0.25, -3.75)}.items():
        close(values([[1] * right + [0] * (16 - right)])[0][[0, -1]], expected, 5e-4)


def test_missing_channels_and_pass_at_k():
    nan = float("nan")
    group = {"rewards": [1, 0, 0, 0], "channels": {"a": [1, 0, nan, nan], "b": [nan, nan, 1, nan]}}
    close(values([group], kind="channels", weights=[2.0, 1.0])[0], [2 * 0.707106, -2 * 0.707106, 0, 0])
    # Against all k-subsets by hand: a subset is worth its best member, a trajectory the mean over its subsets.
    right, k = np.array([1.0, 0, 0, 0, 1]), 2
    group = make_group(1 - right, status=np.where(right, "correct", "wrong").tolist())
    worth = {s: max(right[list(s)]) for s in combinations(range(5), k)}
    mean, spread = np.mean(list(worth.values())), np.std(list(worth.values()))
    expected = [np.mean([(w - mean) / spread for s, w in worth.items() if i in s]) for i in range(5)]
    close(values([group], kind="pass_at_k", k=k)[0], expected)
    assert not values([[1, 1, 1, 0]], kind="pass_at_k", k=2, eps=0)[0].any(), "every subset has a success"


def test_functions_of_the_users():
    custom = {"kind": "custom", "function": "mine"}
    with given({"mine": lambda rewards, features, state: rewards + features.lengths}):
        close(values([[1, 0.5]], **custom)[0], [4, 3.5])
        close(shaped(make_group([1, 0.5]), custom), [4, 3.5])
    with given({"mine": lambda *_: np.ones(1)}), pytest.raises(ValueError, match=r"custom returned shape \(1,\)"):
        shaped(make_group([1, 0, 0]), custom)


def test_single_parts_by_hand():
    (part,) = method(weights={"factors": ["masked_is"]}, surrogate={"old_logprobs": "scored"}).weights.factors
    close(part.weight(np.array([0.49, 0.5, 2.0, 2.01])), [0, 0.5, 2, 0])
    trajectory = replace(make_trajectory(7, prompt=2), turns=(Turn(2, 4, "a"), Turn(6, 9, "b")))
    segments = {level: ratio_segments(trajectory, level).tolist() for level in ("token", "sequence", "turn")}
    assert segments["token"] == list(range(9)) and segments["sequence"] == [0] * 9
    assert segments["turn"][2:4] == [0, 0] and segments["turn"][6:] == [1, 1, 1]
    rewards = shaped(make_group([0] * 5, lengths=[1000, 16384, 18432, 20480, 20481]), "overlong")
    close(rewards, [0, 0, -0.5, -1, -1])


def advantages(rewards, advantage):
    groups = [make_group(rewards, uid="a"), make_group(rewards, uid="b")]
    return np.array(method_groups.advantages(groups, size=len(rewards), advantage=advantage))


@pytest.mark.parametrize(
    "advantage",
    [
        *({}, {"baseline": "length_weighted"}, {"scale": {"kind": "batch_std", "eps": 0.0}}),
        *(whiten(over="row"), whiten(over="token"), {"adjust": [{"kind": "turns", "standardize": True}]}),
    ],
    ids=str,
)
def test_rounding_gives_no_advantage(advantage):
    """Rewards are the same numbers, added in float32 in another order each time."""
    rng, parts = np.random.default_rng(0), [81.3, 0.013, 17.77, 0.5, 9.01, 3.1, 0.7, 8.397]
    orders = [rng.permutation(np.float32(parts)) for _ in range(8)]
    rewards = np.array([np.add.accumulate(order, dtype=np.float32)[-1] for order in orders], float)
    assert not advantages(rewards, advantage).any() and not advantages([0.1] * 8, advantage).any()
    assert advantages(np.append(rewards[1:], rewards[0] + 0.1), advantage).any()


def acted(*talks, rewards, pay=()):
    """A group whose trajectories make these (call, answer) pairs, one a turn of two tokens; the last turn has none."""
    group, each = make_group(rewards, lengths=[2 * len(talk) + 2 for talk in talks]), []
    for talk in talks:
        calls = [((ToolCall("python", {"code": c}, "{}"),), (ToolResult("ok", observation=o),)) for c, o in talk]
        each.append(tuple(Turn(2 + 2 * k, 4 + 2 * k, "x", *made) for k, made in enumerate([*calls, ()])))
    paid = [tuple(values) for values in pay] or [()] * len(talks)
    return other(group, verdicts={"turn_rewards": paid}, turns=each)


def credit(group, **settings):
    """Advantage of each turn, which all its tokens share."""
    step = {"kind": "turns", **settings}
    rows = train_rows([group], method(group.size, advantage={"scale": "none", "adjust": [step]}), AlgoState())
    pairs = zip(rows, group.trajectories, strict=True)
    spans = [[row.advantages[turn.start : turn.end] for turn in trajectory.turns] for row, trajectory in pairs]
    assert all(np.ptp(span) == 0 for each in spans for span in each)
    return [[float(span[0]) for span in each] for each in spans]


def paper_group(*pay):
    """Observations a, b, c against a, b: the first two states are shared, the third is one trajectory's own."""
    return acted([("1", "b"), ("2", "c")], [("1", "b")], rewards=[1, 0], pay=pay)


def test_the_specifications_vector():
    """G = [.9025, .95, 1] and [0, 0]; a turn whose state is unique has the advantage of its trajectory."""
    for settings, expected in [
        ({}, [0.95125, 0.975, 0.5]),
        ({"omega": 2.0}, [1.4025, 1.45, 0.5]),
        ({"gamma": 1.0}, [1.0, 1.0, 0.5]),
        ({"standardize": True}, [0.5 + 1 / np.sqrt(2)] * 2 + [0.5]),  # of two different values, whatever they are
    ]:
        first, second = credit(paper_group(), **settings)
        close(first, expected)
        close(second, np.negative(expected[:2]))
    # r = [.2, 0, 1 - .2] and [0, .5 - .5]: what no turn was paid for itself is the last one's.
    group = paper_group([0.2, 0.0, 0.0], [0.0, 0.0])
    assert [turn_pay(t, v, 1.0).tolist() for t, v in group.pairs] == [[0.2, 0.0, 0.8], [0.0, 1.0]]
    shared = [0.5 + (0.2 + 0.95**2 * 0.8) / 2, 0.5 + 0.95 * 0.8 / 2]
    np.testing.assert_allclose(np.concatenate(credit(group)), [*shared, 0.5, *np.negative(shared)], atol=1e-6)


def test_what_makes_states_equal():
    def sizes(state, *talks):
        return sorted(map(len, same_state(acted(*talks, rewards=[1, 1]), state).values()))

    talk = [("x = 1", "[no output]")]
    for second, calls, observations in (
        (("x = 1", "[no output]"), [2, 2], [2, 2]),
        (("y = 2", "[no output]"), [1, 1, 2], [2, 2]),  # the interpreters differ, which nothing shows
        (("x = 1", "7"), [1, 1, 2], [1, 1, 2]),
    ):
        found = [sizes(state, talk, [second]) for state in ("calls", "observations", "turn")]
        assert found == [calls, observations, [2, 2]]
    groups = [paper_group(), replace(paper_group(), problem=Problem("q", "?", "1", "test"))]
    step = method(2, advantage={"scale": "none", "adjust": ["turns"]}).advantage.adjust[0]
    assert step.metrics(batch_of(groups)) == {"method/turns_per_state": 5 / 3}
