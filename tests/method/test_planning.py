"""Requests of each wave and what their results do to groups; exchanged trajectories; when stages end; the memory."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_roc_jax.method import edit
from grpo_roc_jax.method import planning as plans
from grpo_roc_jax.method.compose import train_rows
from grpo_roc_jax.method.planning import Wave
from grpo_roc_jax.method.state import AlgoState, ProblemTable, begun, visited
from grpo_roc_jax.method.switching import Plateau, Solved, Steady
from grpo_roc_jax.types import Condition, Problem, RolloutRequest, condition_kind
from tests.helpers.method_groups import make_group, make_trajectory, method, other, saying


def problems(*uids, **extra):
    return [Problem(uid, f"question {uid}", "1", "test", extra) for uid in uids]


def rng():
    return np.random.default_rng(0)


def planned(**sections):
    return method(plan=sections).plan


def first(batch, count, plan, state=None):
    """Requests of the first wave."""
    return plans.first_wave(Wave(batch, count, state or AlgoState(), rng()), plan)


def later(batch, groups, number, plan, state=None, *, count=4, **more):
    """Requests of a later wave."""
    return plans.next_wave(Wave(batch, count, state or AlgoState(), rng(), number, groups, **more), plan)


def asked(requests):
    """What requests say, but for their texts."""
    return [(r.place, r.count, str(r.condition)) for r in requests]


def failed(problem, n=4):
    return make_group([0] * n, problem=problem)


def test_plain_waves():
    batch = problems("a", "b")
    assert first(batch, 8, planned()) == [RolloutRequest(batch[0], 0, 8), RolloutRequest(batch[1], 1, 8)]
    assert later(batch[:1], [failed(batch[0])], 1, planned()) == []
    requests = [RolloutRequest(batch[index], index, count) for index, count in ((0, 1), (1, 1), (0, 2))]
    results = [make_group([1], uid="a"), make_group([0], uid="b"), make_group([0, 1], uid="a")]
    group_a, group_b = plans.gathered(batch, requests, results)
    assert group_a.rewards.tolist() == [1, 0, 1] and group_b.rewards.tolist() == [0]
    assert group_a.problem is batch[0]
    # A wrong rollout that earned more than the right one is not among them.
    paid = make_group([0, 0.5, 0.25, 0], status=["correct", "wrong", "correct", "wrong"])
    assert plans.best_text(saying(paid, "0", "1", "2", "3")) == "2"


def test_a_warm_up_of_two_steps_is_over_with_the_third():
    """Until then a step has one wave, and problems get equally many rollouts."""
    (problem,), request = problems("a"), RolloutRequest(problems("a")[0], 0, 3)
    second = SimpleNamespace(next=lambda wave: [request], first_count=lambda count: 1)
    plan = SimpleNamespace(**vars(planned(warmup_steps=2)) | {"second": second})
    for step, count, more in ((1, 8, []), (2, 1, [request])):
        state = AlgoState(step=step)
        assert first([problem], 8, plan, state) == [RolloutRequest(problem, 0, count)]
        assert later([problem], [failed(problem)], 1, plan, state) == more


def test_what_prompts_end_with():
    """From the first step, warm-up or not: the policy was fine-tuned on them."""
    plan = planned(condition={"kind": "reward_tokens", "draw": "fixed", "high_share": 0.25}, warmup_steps=2)
    requests = first(problems("a", "b"), 8, plan)
    each = [(2, "high_reward"), (6, "low_reward")]
    assert asked(requests) == [(index, *part) for index in (0, 1) for part in each]
    assert requests[0].suffix == "\n[Reward Goal: <|high_reward|>]"
    # The budget of `shaping budget` ends every prompt; a condition that was there stays.
    a, b = problems("a", "b")
    requests = [RolloutRequest(a, 0, 4), RolloutRequest(b, 1, 2, condition=Condition("high_reward"), suffix="\ngoal")]
    named = [(str(r.condition), r.suffix) for r in plans.with_suffix(requests, "\n256 tokens")]
    assert named == [("budget", "\n256 tokens"), ("high_reward", "\ngoal\n256 tokens")]


condition_kind("helped", helped=True, moves=True, optional=True)  # of this file, so that no method has to be there


def test_exchanged_trajectories_and_prompts():
    trajectory = make_trajectory(3, prompt=4, observation=2, condition="helped:1", logprobs=[-1, -2, -3])
    moved = edit.with_prompt(trajectory, np.array([7, 8], np.int32))
    assert moved.tokens.tolist() == [7, 8, 4, 5, 6, 7, 8] and moved.tokens.dtype == np.int32
    assert moved.policy_mask.tolist() == [False, False, True, True, True, False, False]
    assert moved.logprobs.tolist() == [0, 0, -1, -2, -3, 0, 0]
    assert (moved.prompt_length, moved.turns[0].start, moved.turns[0].end) == (2, 2, 5)
    several = edit.with_prompt(replace(trajectory, parts=(5, 4)), np.array([7, 8], np.int32))
    assert (several.parts, several.length) == ((3, 4), 7)
    group, hinted = make_group([0, 1, 0, 0]), make_group([0, 1, 1, 1], condition=["helped:1"] * 4)
    assert edit.replace_failures(group, hinted, 2).rewards.tolist() == [1, 1, 1, 0]
    assert edit.replace_failures(make_group([1, 1]), hinted, 1).rewards.tolist() == [1, 1]
    # With what the environment of a row appended. The record stays that of the hinted prompt (Guide-GRPO).
    group = make_group([1, 1, 0], lengths=[2] * 3, logprobs=[[-1.0, -0.9]] * 3, condition=["helped:1", "helped:1", ""])
    group = other(group, opening=[" It rains.", " It snows.", " It hails."])
    (moved,) = edit.with_plain_prompts([group], lambda problem: [*map(ord, problem.prompt)])
    prompts = ["".join(map(chr, t.tokens[: t.prompt_length])) for t in moved.trajectories[:2]]
    assert prompts == ["? It rains.", "? It snows."] and moved.trajectories[2] is group.trajectories[2]
    row, *_ = train_rows([moved], method(), AlgoState())
    assert row.policy_mask.tolist() == [False] * len(prompts[0]) + [True] * 2
    np.testing.assert_allclose(row.logprobs_old[row.policy_mask], [-1.0, -0.9])


def test_the_table_of_problems():
    """Columns replaced at random; unseen problems have the defaults, and earlier tables stay as they were."""
    generator, columns = rng(), {"level": 0.0, "visits": 0.0, "alpha": 0.5}
    everything, table, plain = [str(u) for u in range(50)], ProblemTable(), {name: {} for name in columns}
    for _ in range(30):
        uids, name = generator.choice(everything, 5, replace=False).tolist(), str(generator.choice(list(columns)))
        given, before, old = generator.random(5), table, table.get(everything)
        table = table.put(uids, {name: given})
        plain[name] |= dict(zip(uids, given, strict=True))
        np.testing.assert_equal(before.get(everything), old)
    for name, default in columns.items():
        assert table.get(everything)[name].tolist() == [plain[name].get(u, default) for u in everything]
    assert (np.diff(table.keys.astype(object)) > 0).all() and table.get([])["alpha"].size == 0
    # Groups of a problem add up; the tracker counts each step once, whatever the size of its groups.
    state = visited(AlgoState(), ["a", "b", "a"], np.array([1.0, 0, 3]), np.array([4.0, 4, 4]), 0.875)
    rows = state.table.get(["a", "b"])
    assert rows["visits"].tolist() == [8, 4] and rows["successes"].tolist() == [4, 0]
    assert rows["accuracy"].tolist() == [0.5, 0]
    np.testing.assert_allclose(rows["alpha"], [0.875 * 0.5 + 0.5, 0.875 * 0.5])
    tracked = state.table.put(["a"], {"alpha": np.array([4.0]), "beta": np.array([4.0])})
    rows = visited(AlgoState(table=tracked), ["a"], np.ones(1), np.ones(1), 0.875).table.get(["a"])
    assert (rows["alpha"].tolist(), rows["beta"].tolist()) == ([4.5], [3.5])
    rows = ({}, {"judged": None, "success_rate": None}, {"judged": 4})  # null where the file of a row lacks columns
    assert not begun(AlgoState(), [Problem("p", "?", "1", "t", extra) for extra in rows]).table.keys.size


@pytest.mark.parametrize(
    ("condition", "values", "met"),
    [
        (Solved(share=0.7, window=3), [0.0, 0.5, 0.7, 0.9], True),  # mean of the last three: 0.7
        (Solved(share=0.7, window=3), [0.9, 0.5, 0.7, 0.8], False),  # 0.667
        (Steady(window=2, tolerance=0.02, least=0.05), [0.05, 0.07, 0.10, 0.12], False),  # 0.06, then 0.11
        (Steady(window=2, tolerance=0.02, least=0.05), [0.0, 0.0, 0.0, 0.0], False),  # below `least`
        (Plateau(evaluations=2, gain=0.01), [0.50, 0.51, 0.505], True),  # 0.51 is no gain above 0.50 + 0.01
        (Plateau(evaluations=2, gain=0.01), [0.50, 0.505, 0.52], False),
        (Plateau(evaluations=2, gain=0.01), [0.50, 0.40], False),  # nothing before the last two
    ],
)
def test_conditions(condition, values, met):
    assert condition.met(values) is met
