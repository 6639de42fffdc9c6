"""Advantages against vectors, also of turns; equal rewards whatever their unit; rewards and weights of the core."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from examples.plugins.turn_rewards import clean
from grpo_roc_jax import Group, Problem, RewardConfig, Turn, make_scorer, train_rows
from grpo_roc_jax.method.advantage import flat, same_state, turn_pay
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.method.weights import ratio_segments
from grpo_roc_jax.record.codec import groups_from_tree, groups_to_tree
from grpo_roc_jax.reward.config import FunctionReward
from grpo_roc_jax.reward.score import RewardError
from grpo_roc_jax.settings.callables import given
from grpo_roc_jax.types import Condition, ToolCall, ToolResult
from tests.helpers import method_groups
from tests.helpers.method_groups import batch_of, close, make_group, make_trajectory, method, other, shaped


def values(groups, state=None, *, rng=None, **settings):
    """Advantages of a batch of groups; rewards, or arguments of `make_group`, stand for a group."""
    arguments = [group if isinstance(group, Group | dict) else {"rewards": group} for group in groups]
    made = [g if isinstance(g, Group) else make_group(**{"uid": f"p{i}"} | g) for i, g in enumerate(arguments)]
    return method(advantage=settings).advantage.trajectories(batch_of(made, state=state, rng=rng))


NONE, ALONE = {"scale": "none"}, {"baseline": "leave_one_out", "scale": "none"}
FIRST, CHANNELS = {"rewards": [1, 0, 0, 0]}, {"kind": "channels", "of": {"scale": {"kind": "std", "eps": 1e-4}}}
PLUS_PLUS = [{"rewards": rewards, "lengths": [1, 1]} for rewards in ([1, 0], [1, 1], [0, 0])]
SEVERAL = [
    {"rewards": np.add(a, b), "channels": {"a": a, "b": b}}
    for a, b in (([0, 0], [0, 1]), ([0, 1], [0, 1]), ([1, 0], [0, 1]))
]


GOLDEN = {1: (3.75, -0.25), 2: (2.562, -0.366), 8: (0.968, -0.968), 14: (0.366, -2.562), 15: (0.25, -3.75)}
"""Successes among 16 that are kept -> advantages of a success and of a failure (spec of GRPO-RoC, 1.6)."""


def whiten(**settings):
    return {"adjust": [{"kind": "whiten", **settings}]}


@pytest.mark.parametrize(
    ("groups", "settings", "expected"),
    [
        ([FIRST], {}, [1.499997, -0.499999, -0.499999, -0.499999]),
        ([FIRST], {"scale": {"kind": "std", "ddof": 0}}, [1.732047, -0.577349, -0.577349, -0.577349]),
        ([[1, 1, 0, 0]], {}, [0.866024, 0.866024, -0.866024, -0.866024]),  # RC-GRPO
        ([[1]], {}, [0]),
        ([FIRST], NONE, [0.75, -0.25, -0.25, -0.25]),  # Dr. GRPO
        ([FIRST], ALONE, [1, -1 / 3, -1 / 3, -1 / 3]),
        ([[1, 0, 0]], ALONE, [1, -0.5, -0.5]),
        ([[1]], ALONE, [0]),
        ([{"rewards": [1, 0], "lengths": [3, 1]}], {"baseline": "length_weighted", "scale": "none"}, [0.25, -0.75]),
        ([[1, 0], [1, 1]], {"scale": "batch_std"}, [1, -1, 0, 0]),  # Lite-PPO: the deviation of the batch is 1/2
        *(
            (PLUS_PLUS, more | NONE | whiten(over=over), expected)
            for over in ("token", "row")
            for more, expected in (
                ({"baseline": "none"}, [0.912871, -0.912871, 0.912871, 0.912871, -0.912871, -0.912871]),
                ({}, [1.581139, -1.581139, 0, 0, 0, 0]),
            )
        ),
        (  # of one token with 1 and three with 0
            [{"rewards": [1, 0], "lengths": [1, 3]}],
            {"baseline": "none", "scale": "none"} | whiten(over="token", ddof=0),
            [1.732051, -0.577350],
        ),
        (SEVERAL[:2], {}, [-0.707106, 0.707106] * 2),
        (SEVERAL, CHANNELS, [-0.707007, 0.707007, -1.414014, 1.414014, 0, 0]),
        (SEVERAL, CHANNELS | {"standardize": True, "eps": 1e-4}, [-0.707036, 0.707036, -1.414072, 1.414072, 0, 0]),
    ],
)
def test_by_hand(groups, settings, expected):
    close(np.concatenate(values(groups, **settings)), expected)


@pytest.mark.parametrize(("right", "expected"), GOLDEN.items())
def test_the_advantages_of_sixteen(right, expected):
    close(values([[1] * right + [0] * (16 - right)])[0][[0, -1]], expected, 5e-4)


def test_missing_channels_and_pass_at_k():
    nan = float("nan")
    group = {"rewards": [1, 0, 0, 0], "channels": {"a": [1, 0, nan, nan], "b": [nan, nan, 1, nan]}}
    close(values([group], kind="channels", weights=[2.0, 1.0])[0], [2 * 0.707106, -2 * 0.707106, 0, 0])
    with pytest.raises(ValueError, match=r"\['a', 'b'\] and 1 weights; .* give a weight each"):
        values([group], kind="channels", weights=[1.0])
    with pytest.raises(ValueError, match="reward channels none"):
        values([[1, 0]], kind="channels")
    # Against all k-subsets by hand: a subset is worth its best member, a trajectory the mean over its subsets.
    right, k = np.array([1.0, 0, 0, 0, 1]), 2
    group = make_group(1 - right, status=np.where(right, "correct", "wrong").tolist())
    worth = {s: max(right[list(s)]) for s in combinations(range(5), k)}
    mean, spread = np.mean(list(worth.values())), np.std(list(worth.values()))
    expected = [np.mean([(w - mean) / spread for s, w in worth.items() if i in s]) for i in range(5)]
    close(values([group], kind="pass_at_k", k=k)[0], expected)
    assert not values([[1, 1, 1, 0]], kind="pass_at_k", k=2, eps=0)[0].any(), "every subset has a success"


def test_functions_of_the_users():
    """They get the features, may work in place, and their faults name the setting; of rewards as of advantages."""

    def in_place(rewards, features, state):
        rewards -= rewards.mean()
        return rewards

    batch, custom = batch_of([make_group([1, 0, 0, 3])]), {"kind": "custom", "function": "mine"}
    with given({"mine": in_place}):
        close(method(advantage=custom).advantage.trajectories(batch)[0], [0, -1, -1, 2])
        close(batch.rewards[0], [1, 0, 0, 3])
    with given({"mine": lambda rewards, features, state: rewards + features.lengths}):
        close(values([[1, 0.5]], **custom)[0], [4, 3.5])
        close(shaped(make_group([1, 0.5]), custom), [4, 3.5])
    for function, message in (
        (lambda rewards, features, state: rewards[:2], r"custom returned shape \(2,\)"),
        (lambda rewards, features, state: 1.0, r"custom returned shape \(\)"),
        (lambda rewards, features, state: rewards * np.nan, "3 non-finite"),
        (lambda rewards, features, state: ["a"] * 3, "custom.*could not"),
    ):
        with given({"mine": function}):
            with pytest.raises(ValueError, match=f"advantage.*{message}"):
                values([[1, 0, 0]], **custom)
            with pytest.raises(ValueError, match=f"shaping.*{message}"):
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


# ---- equal rewards -------------------------------------------------------------------------------------------------

PARTS = np.array([81.3, 0.013, 17.77, 0.5, 9.01, 3.1, 0.7, 8.397], np.float32)
"""They sum to 120.79 in float32, up to the order in which they are added."""


def sums(orders=32):
    """float64[orders]: the parts added in float32, each time in another order."""
    rng = np.random.default_rng(0)
    return np.array([np.add.accumulate(rng.permutation(PARTS), dtype=np.float32)[-1] for _ in range(orders)], float)


def brevity(*lengths):
    return 1.0 / np.array(lengths, np.float64)


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 120.79, 1e6])
def test_equality_does_not_depend_on_the_unit(scale):
    assert np.ptp(sums()) > 1e-6, "otherwise this shows nothing"
    assert flat(scale * sums()) and flat(-scale * sums())
    assert not flat(scale * brevity(8000, 8001))
    rng = np.random.default_rng(1)
    for _ in range(50):
        rewards = rng.normal(size=6) * rng.choice([1e-7, 1e-5, 1.0]) * rng.choice([1e-2, 1.0], 6)
        rewards += rng.choice([0.0, 1.0, -3.0])
        assert flat(scale * rewards) == flat(rewards)
    assert flat(np.array([0.1 + 0.2 - 0.3, 0.0, 0.3 - 0.2 - 0.1])) and flat(np.zeros(0)), "what cancels is nothing"


def advantages(rewards, advantage):
    groups = [make_group(rewards, uid="a"), make_group(rewards, uid="b")]
    return np.array(method_groups.advantages(groups, size=len(rewards), advantage=advantage))


@pytest.mark.parametrize(
    "advantage",
    [
        {},
        NONE,
        ALONE,
        {"baseline": "length_weighted"},
        *({"scale": {"kind": kind, "eps": eps}} for kind in ("std", "batch_std") for eps in (0.0, 1e-6)),
        *(whiten(over=over) for over in ("row", "token")),
        {"adjust": [{"kind": "sign_weights", "negative": 0.5}]},
        *({"adjust": [{"kind": "turns", "standardize": standardize}]} for standardize in (False, True)),
    ],
    ids=str,
)
def test_rounding_gives_no_advantage(advantage):
    rewards = sums(8)
    assert not advantages(rewards, advantage).any() and not advantages([0.1] * 8, advantage).any()
    assert advantages(np.append(rewards[1:], rewards[0] + 0.1), advantage).any()


# ---- credit by turn -------------------------------------------------------------------------------------------------


def acted(*talks, rewards, pay=(), **change):
    """A group whose trajectories make these (call, answer) pairs, one a turn of two tokens; the last turn has none."""
    group, each = make_group(rewards, lengths=[2 * len(talk) + 2 for talk in talks]), []
    for talk in talks:
        calls = [((ToolCall("python", {"code": c}, "{}"),), (ToolResult(kind, observation=o),)) for c, kind, o in talk]
        each.append(tuple(Turn(2 + 2 * k, 4 + 2 * k, "x", *made) for k, made in enumerate([*calls, ()])))
    paid = [tuple(values) for values in pay] or [()] * len(talks)
    return other(group, verdicts={"turn_rewards": paid}, **{"turns": each} | change)


def ok(code, answer):
    return code, "ok", answer


def credit(group, **settings):
    """Advantage of each turn, which all its tokens share."""
    step = {"kind": "turns", **settings}
    rows = train_rows([group], method(group.size, advantage={"scale": "none", "adjust": [step]}), AlgoState())
    out = []
    for row, trajectory in zip(rows, group.trajectories, strict=True):
        spans = [row.advantages[turn.start : turn.end] for turn in trajectory.turns]
        assert all(np.ptp(span) == 0 for span in spans)
        out.append([float(span[0]) for span in spans])
    return out


def paper_group(*pay):
    """Observations a, b, c against a, b: the first two states are shared, the third is one trajectory's own."""
    return acted([ok("1", "b"), ok("2", "c")], [ok("1", "b")], rewards=[1, 0], pay=pay)


def test_the_specifications_vector():
    """G = [.9025, .95, 1] and [0, 0]; a turn whose state is unique has the advantage of its trajectory."""
    for settings, expected in [
        ({}, [0.95125, 0.975, 0.5]),
        ({"omega": 2.0}, [1.4025, 1.45, 0.5]),
        ({"omega": 0.0}, [0.5, 0.5, 0.5]),
        ({"gamma": 1.0}, [1.0, 1.0, 0.5]),
    ]:
        first, second = credit(paper_group(), **settings)
        np.testing.assert_allclose(first, expected, atol=1e-6)
        np.testing.assert_allclose(second, [-value for value in expected[:2]], atol=1e-6)
    standardized = 0.5 + 1 / np.sqrt(2)  # of two different values, whatever they are
    np.testing.assert_allclose(credit(paper_group(), standardize=True)[0], [standardized] * 2 + [0.5], atol=1e-5)
    # r = [.2, 0, 1 - .2] and [0, .5 - .5]: what no turn was paid for itself is the last one's.
    group = paper_group([0.2, 0.0, 0.0], [0.0, 0.0])
    assert [turn_pay(t, v, 1.0).tolist() for t, v in group.pairs] == [[0.2, 0.0, 0.8], [0.0, 1.0]]
    shared = [0.5 + (0.2 + 0.95**2 * 0.8) / 2, 0.5 + 0.95 * 0.8 / 2]
    np.testing.assert_allclose(np.concatenate(credit(group)), [*shared, 0.5, *np.negative(shared)], atol=1e-6)


def sizes(state, *talks, **change):
    group = acted(*talks, rewards=[1] * len(talks), **change)
    return sorted(len(places) for places in same_state(group, state).values())


def test_what_makes_states_equal():
    for second, calls, observations, turn in (
        ([ok("x = 1", "[no output]")], [2, 2], [2, 2], [2, 2]),
        ([ok("y = 2", "[no output]")], [1, 1, 2], [2, 2], [2, 2]),  # the interpreters differ, which nothing shows
        ([ok("x = 1", "7")], [1, 1, 2], [1, 1, 2], [2, 2]),
        ([], [1, 2], [1, 2], [1, 2]),
    ):
        talk = [ok("x = 1", "[no output]")]
        assert [sizes(state, talk, second) for state in ("calls", "observations", "turn")] == [
            calls,
            observations,
            turn,
        ]
    # Under a hint, or with another answer of a user, it is another state too. Problems do not share states.
    long, short, talk = [ok("a", "1"), ok("b", "2")], [ok("b", "2")], [ok("a", "1")]
    assert sizes("observations", long, short) == [1, 1, 1, 2]
    assert sizes("calls", talk, talk, condition=[Condition("hint", 1), Condition()]) == [1, 1, 1, 1]
    for replies, states in ((("up", "up"), [2, 2]), (("up", "low"), [1, 1, 2])):
        turns = [(Turn(2, 3, "x", reply=reply), Turn(3, 4, "x")) for reply in replies]
        assert [sizes(state, [], [], turns=turns) for state in ("calls", "observations")] == [states] * 2
    groups = [paper_group(), replace(paper_group(), problem=Problem("q", "?", "1", "test"))]
    step = method(2, advantage={"scale": "none", "adjust": ["turns"]}).advantage.adjust[0]
    for some, expected in ((groups, 5 / 3), ([acted([ok("1", "2")], rewards=[1])], 1.0), ([], 0.0)):
        assert step.metrics(batch_of(some)) == {"method/turns_per_state": expected}


def paid(function, *talks, weight=1.0, more=(), **change):
    """The group of trajectories with these talks, and with the change, under a function of rewards."""
    group = acted(*talks, rewards=[0] * len(talks), **change)
    with given({"mine:pay": function}):
        scorer = make_scorer(RewardConfig(functions=(FunctionReward(path="mine:pay", weight=weight), *more)))
    return scorer(group.problem, group.trajectories)


def test_a_reward_function_may_pay_by_turn():
    talks = [[ok("1", "1"), ("2", "exception", "no")], []]
    group = paid(clean, *talks, weight=2.0)
    assert [v.reward for v in group.verdicts] == pytest.approx([0.2, 0.0])
    assert group.verdicts[0].turn_rewards == pytest.approx((0.2, 0.0, 0.0))
    assert group.verdicts[1].turn_rewards == (0.0,)
    mixed = paid(lambda p, ts: [np.array([1.0, 2.0, 3.0]), 4], *talks, more=("clean_tools",))
    assert [v.reward for v in mixed.verdicts] == [6.0, 5.0]
    assert mixed.verdicts[0].channels == {"mine:pay": 6.0, "clean_tools": 0.0}
    assert [v.turn_rewards for v in mixed.verdicts] == [(1.0, 2.0, 3.0), ()]
    assert groups_from_tree(groups_to_tree([mixed]))[0].verdicts == mixed.verdicts, "a checkpoint keeps them"
    talks = [[ok("1", "1")], []]
    assert [v.reward for v in paid(lambda p, ts: [[1.0, None], [2.0]], *talks).verdicts] == [2.0]
    assert [v.reward for v in paid(lambda p, ts: [[1.0, 0.5], [float("nan")]], *talks).verdicts] == [1.5]
    for values, message in [([[1.0], [2.0]], "value 0 is 1 numbers for 2 turns"), ([[1.0, "2"], 0], "value 0 is '2'")]:
        with pytest.raises(RewardError, match=message):
            paid(lambda p, ts, values=values: values, *talks)
    (verdict,) = paid(lambda p, ts: [[1.0, 1.0]], [ok("1", "1")], stop=["length"]).verdicts
    assert (verdict.reward, verdict.turn_rewards) == (0.0, ()), "what truncation pays"
