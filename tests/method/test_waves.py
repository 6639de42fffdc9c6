"""Requests of each wave and what their results do to the groups."""

from dataclasses import replace

import numpy as np
import pytest
from method_groups import make_group, make_trajectory, method

from grpo_roc_jax.method import edit, waves
from grpo_roc_jax.method.config import ShapingConfig
from grpo_roc_jax.method.methods import next_state, scoring_rows, supervised_rows, train_rows
from grpo_roc_jax.method.plan_config import PlanConfig
from grpo_roc_jax.method.state import AlgoState, ProblemTable
from grpo_roc_jax.types import Problem


def problems(*uids, **extra):
    return [Problem(uid, f"question {uid}", "1", "test", extra) for uid in uids]


def rng():
    return np.random.default_rng(0)


def failed(problem, n=4):
    return replace(make_group([0] * n, uid=problem.uid), problem=problem)


HINTS = {"hints": ["know this", "plan that", "do so"]}


def test_plain_first_wave():
    requests = waves.first_wave(problems("a", "b"), 8, PlanConfig(), AlgoState(), rng())
    assert [(r.problem, r.count, r.condition, r.suffix, r.temperature) for r in requests] == [
        (0, 8, "", "", None),
        (1, 8, "", "", None),
    ]
    assert waves.next_wave(problems("a"), [failed(problems("a")[0])], 1, PlanConfig(), AlgoState(), rng()) == []


def test_reward_tokens():
    config = PlanConfig(reward_tokens="fixed", high_share=0.25)
    requests = waves.first_wave(problems("a", "b"), 8, config, AlgoState(), rng())
    assert [(r.problem, r.count, r.condition) for r in requests] == [
        (0, 2, "high_reward"),
        (0, 6, "low_reward"),
        (1, 2, "high_reward"),
        (1, 6, "low_reward"),
    ]
    assert requests[0].suffix == "\n[Reward Goal: <|high_reward|>]"


def test_knapsack_budget():
    table = ProblemTable().put(["a", "b", "c"], {"successes": np.array([4.0, 0, 8]), "visits": np.array([8.0, 8, 8])})
    config = PlanConfig(budget="knapsack", warmup_steps=2)
    count = lambda step: [  # noqa: E731
        r.count for r in waves.first_wave(problems("a", "b", "c"), 8, config, AlgoState(step, table), rng())
    ]
    assert count(0) == [8, 8, 8]
    later = count(2)
    assert sum(later) == 24
    assert later[1] > later[0] > later[2]


@pytest.mark.parametrize(
    "plan", [PlanConfig(hints="level", warmup_steps=2), PlanConfig(second="serial", serial_cuts=7, warmup_steps=2)]
)
def test_waves_are_plain_while_the_method_warms_up(plan):
    """Hint levels and single rollouts to be cut wait for the end of it too."""
    batch = problems("a", "b", **HINTS)
    table = ProblemTable().put(["a", "b"], {"level": np.array([1.0, 2])})
    asked = lambda step: [  # noqa: E731
        (r.count, r.condition) for r in waves.first_wave(batch, 8, plan, AlgoState(step, table), rng())
    ]
    assert asked(1) == [(8, ""), (8, "")]
    assert asked(2) == ([(8, "hint:1"), (8, "hint:2")] if plan.hints == "level" else [(1, ""), (1, "")])


def test_half_width_budget():
    """A pilot, then the rest of the budget where the rewards spread; groups grow by what comes back."""
    batch = problems("a", "b", **HINTS)
    config = PlanConfig(budget="half_width", pilot=4, hints="retry")
    requests = waves.first_wave(batch, 6, config, AlgoState(), rng())
    assert [r.count for r in requests] == [4, 4]
    groups = [failed(batch[0]), make_group([1, 0, 0, 1], uid="b")]
    more = waves.next_wave(batch, groups, 1, config, AlgoState(), rng(), count=6)
    assert [(r.problem, r.count, r.condition) for r in more] == [(1, 4, "")]
    merged = waves.merge(groups, more, [make_group([0, 0, 1, 1], uid="b")], config)
    assert merged[1].rewards.tolist() == [1, 0, 0, 1, 0, 0, 1, 1]
    rescue = waves.next_wave(batch, merged, 2, config, AlgoState(), rng(), count=6)
    assert [(r.problem, r.condition) for r in rescue] == [(0, "hint:1")]


def test_later_waves_keep_the_temperature():
    config = PlanConfig(second="draft", temperatures=(0.8, 1.2))
    group = make_group([0, 1], uid="a")
    (request,) = waves.next_wave(problems("a"), [group], 1, config, AlgoState(temperature_stage=1), rng())
    assert request.temperature == 1.2


def test_explanations_fade_out():
    batch, config = problems("a"), PlanConfig(hints="explain", explain_steps=10)
    weights = [waves.explanation_weight(config, step) for step in (0, 5, 10, 20)]
    assert weights == pytest.approx([0.1, 0.05, 0, 0])
    assert waves.next_wave(batch, [failed(batch[0])], 1, config, AlgoState(step=9), rng())
    assert waves.next_wave(batch, [failed(batch[0])], 1, config, AlgoState(step=10), rng()) == []


def test_hinted_successes_leave_the_success_table_alone():
    """They stand for failures of the plain prompt, as they were asked for because all of those failed."""
    group = make_group([1, 0, 0, 1], uid="a", condition=["hint:1", "", "", "hint:1"])
    counts = lambda hints: next_state([group], [], method(plan={"hints": hints}), AlgoState()).table.get(["a"])  # noqa: E731
    assert (counts("scaffold")["successes"], counts("scaffold")["visits"]) == (0, 4)
    assert (counts("level")["successes"], counts("level")["visits"]) == (2, 4)


def test_told_budget():
    """Train Long, Think Short: the prompt names the budget that the reward is about to use."""
    plan, shaping = PlanConfig(tell_budget="{budget} tokens"), ShapingConfig(budget_start=256, budget_every=50)
    assert [waves.told_budget(plan, shaping, step) for step in (0, 50)] == ["\n256 tokens", "\n217 tokens"]
    assert waves.told_budget(PlanConfig(), shaping, 0) == ""
    requests = [waves.RolloutRequest(0, 4), waves.RolloutRequest(1, 2, "high_reward", "\ngoal")]
    told = waves.with_budget(requests, "\n256 tokens")
    assert [(r.condition, r.suffix) for r in told] == [
        ("budget", "\n256 tokens"),
        ("high_reward", "\ngoal\n256 tokens"),
    ]
    assert waves.with_budget(requests, "") == requests


def test_temperatures():
    config = PlanConfig(temperatures=(0.8, 1.2))
    assert waves.first_wave(problems("a"), 2, config, AlgoState(temperature_stage=1), rng())[0].temperature == 1.2


@pytest.mark.parametrize("mode", ["scaffold", "guide", "retry"])
def test_rising_hints(mode):
    batch = problems("a", "b", **HINTS)
    config = PlanConfig(hints=mode, hint_levels=2)
    groups = [failed(batch[0]), make_group([1, 0, 0, 0], uid="b")]
    first = waves.next_wave(batch, groups, 1, config, AlgoState(), rng())
    assert [(r.problem, r.count, r.condition, r.suffix) for r in first] == [(0, 4, "hint:1", "\nHint: know this")]
    still = waves.merge(groups, first, [failed(batch[0])], config)
    second = waves.next_wave(batch, still, 2, config, AlgoState(), rng())
    assert second[0].suffix == "\nHint: know this\nplan that"
    assert waves.next_wave(batch, still, 3, config, AlgoState(), rng()) == []
    solved = make_group([0, 1, 1, 0], uid="a", condition=["hint:2"] * 4)
    done = waves.merge(still, second, [solved], config)
    assert waves.next_wave(batch, done, 3, config, AlgoState(), rng()) == []
    if mode == "retry":
        assert done[0] is solved
    else:
        assert done[0].rewards.tolist() == [1, 0, 0, 0]
        assert [t.condition for t in done[0].trajectories] == ["hint:2", "", "", ""]
    assert done[1] is groups[1]


def test_hints_wait_for_the_warm_up():
    batch = problems("a", **HINTS)
    config = PlanConfig(hints="scaffold", warmup_steps=5)
    assert waves.next_wave(batch, [failed(batch[0])], 1, config, AlgoState(step=4), rng()) == []
    assert waves.next_wave(batch, [failed(batch[0])], 1, config, AlgoState(step=5), rng())


def test_problems_without_hints_are_left_alone():
    batch = problems("a")
    assert waves.next_wave(batch, [failed(batch[0])], 1, PlanConfig(hints="scaffold"), AlgoState(), rng()) == []


def test_hint_levels_by_problem():
    """SAGE light: failing raises a problem's level, solving lowers it, and the next visit starts there."""
    batch = problems("a", "b", **HINTS)
    config = method(plan={"hints": "level"})
    state = next_state([failed(batch[0]), make_group([1, 1, 0, 1], uid="b")], [], config, AlgoState())
    requests = waves.first_wave(batch, 4, config.plan, state, rng())
    assert [r.condition for r in requests] == ["hint:1", ""]
    assert requests[0].suffix == "\nHint: know this"
    state = next_state([make_group([1, 1, 1, 0], uid="a")], [], config, state)
    assert waves.first_wave(batch, 4, config.plan, state, rng())[0].condition == ""


def test_draft_wave():
    batch = problems("a")
    drafts = make_group([0, 1, 1, 0], uid="a")
    config = PlanConfig(second="draft")
    (request,) = waves.next_wave(batch, [drafts], 1, config, AlgoState(), rng())
    assert (request.count, request.condition) == (4, "draft")
    assert request.suffix == "\nAn earlier attempt:\ntext"
    second = make_group([1, 1, 0, 1], uid="a", condition=["draft"] * 4)
    (merged,) = waves.merge([drafts], [request], [second], config)
    assert merged is second
    assert waves.next_wave(batch, [merged], 2, config, AlgoState(), rng()) == []


def test_serial_cuts():
    """S-GRPO: cuts of one thought, continued once each, before the full one."""
    batch = problems("a")
    config = PlanConfig(second="serial", serial_cuts=2, serial_stop="stop")
    assert [r.count for r in waves.first_wave(batch, 9, config, AlgoState(), rng())] == [1]
    full = make_group([1], uid="a", lengths=[9])
    requests = waves.next_wave(batch, [full], 1, config, AlgoState(), rng())
    assert [len(r.prefix) for r in requests] == sorted(len(r.prefix) for r in requests)
    assert len(requests) == 2
    thought = full.trajectories[0].tokens[2:11].tolist()
    assert all(list(r.prefix) == thought[: len(r.prefix)] and r.prefix_text == "stop" for r in requests)
    short = waves.next_wave(batch, [full], 1, config, AlgoState(), rng(), thought=lambda trajectory: 3)
    assert [len(r.prefix) for r in short] == [1, 2]
    results = [make_group([0], uid="a", condition=["cut"]), make_group([1], uid="a", condition=["cut"])]
    (merged,) = waves.merge([full], requests, results, config)
    assert merged.rewards.tolist() == [0, 1, 1]
    assert merged.trajectories[2] is full.trajectories[0]
    assert waves.next_wave(batch, [merged], 2, config, AlgoState(), rng()) == []


def test_hints_that_the_policy_writes():
    """SAGE: a writer sees the solution, then the group runs again under what it wrote, level by level."""
    batch = problems("a", solution="6 * 7 = 42")
    config = PlanConfig(hints="write", hint_levels=2)
    groups = [failed(batch[0])]
    (writer,) = waves.next_wave(batch, groups, 1, config, AlgoState(), rng())
    assert (writer.count, writer.condition) == (1, "hint_writer")
    assert "strength 1 of 2" in writer.suffix
    assert writer.suffix.endswith("6 * 7 = 42")
    written = make_group([0], uid="a")
    notes = waves.written_hints([writer], [written])
    assert notes == {0: "text"}
    assert waves.merge(groups, [writer], [written], config) == groups
    (again,) = waves.next_wave(batch, groups, 2, config, AlgoState(), rng(), notes)
    assert (again.count, again.condition, again.suffix) == (4, "hint:1", "\nHint: text")
    assert waves.next_wave(batch, groups, 2, config, AlgoState(), rng(), {}) == []
    assert "strength 2 of 2" in waves.next_wave(batch, groups, 3, config, AlgoState(), rng())[0].suffix
    assert waves.next_wave(batch, groups, 5, config, AlgoState(), rng()) == []
    solved = make_group([0, 1, 0, 0], uid="a")
    assert waves.merge(groups, [again], [solved], config) == [solved]


def test_gathered():
    batch = problems("a", "b")
    requests = [waves.RolloutRequest(0, 1), waves.RolloutRequest(1, 1), waves.RolloutRequest(0, 2)]
    results = [make_group([1], uid="a"), make_group([0], uid="b"), make_group([0, 1], uid="a")]
    first, second = waves.gathered(batch, requests, results)
    assert first.rewards.tolist() == [1, 0, 1]
    assert second.rewards.tolist() == [0]
    assert first.problem is batch[0]


def test_best_draft():
    assert waves.best_draft(np.array([0, 1, 1, 0])) == 1
    assert waves.expected_best(0.25, 8) == pytest.approx(0.899887, abs=1e-5)


def test_examples():
    batch = [
        Problem("a", "3 * 4 = ?", "12", "t"),
        Problem("b", "3 * 5 = ?", "15", "t"),
        Problem("c", "gcd 4 6", "2", "t"),
    ]
    groups = [
        failed(batch[0]),
        replace(make_group([0, 1], uid="b"), problem=batch[1]),
        replace(make_group([1, 1], uid="c"), problem=batch[2]),
    ]
    config = PlanConfig(hints="examples", examples=1)
    (request,) = waves.next_wave(batch, groups, 1, config, AlgoState(), rng())
    assert request.suffix == "\n3 * 5 = ?\ntext"
    assert waves.next_wave(batch, groups, 2, config, AlgoState(), rng()) == []
    assert waves.merge(groups, [request], [failed(batch[0])], config)[0] is groups[0]
    solved = {"b x": "1", "b c": "2", "q": "3"}
    assert waves.similar_examples("b c d", solved, 2) == [("b c", "2"), ("b x", "1")]


def test_explanations():
    batch = problems("a")
    config = PlanConfig(hints="explain", replace=2)
    groups = [failed(batch[0])]
    (request,) = waves.next_wave(batch, groups, 1, config, AlgoState(), rng())
    assert (request.count, request.condition) == (2, "explanation")
    assert request.suffix == "\nExplain how to arrive at the answer 1"
    result = make_group([0, 1], uid="a", condition=["explanation"] * 2)
    assert waves.merge(groups, [request], [result], config) == groups
    (kept,) = waves.explanations([request], [result])
    assert kept.rewards.tolist() == [1]


def test_supervised_rows():
    """Mean negative log-likelihood 1.5, weight 0.1: the term is 0.15, and its gradient -weight / n a token."""
    groups = [make_group([1, 1], lengths=[2, 4], logprobs=[-9.0, -9.0])]
    scores = [row.policy_mask * np.float32(-1.5) for row in scoring_rows(groups)]
    rows = supervised_rows(groups, scores, 0.1, "token")
    value = sum(float(-(row.weights * row.advantages * now).sum()) for row, now in zip(rows, scores, strict=True))
    assert value == pytest.approx(0.15, abs=1e-6)
    np.testing.assert_allclose(rows[1].weights[rows[1].policy_mask], 0.1 / (2 * 4), rtol=1e-6)
    np.testing.assert_allclose(rows[0].logprobs_old, scores[0])  # ratio 1: every surrogate has the gradient of -log p


def test_choose_problems():
    pool = problems(*"abcdef")
    assert waves.choose_problems(pool, 3, PlanConfig(), AlgoState(), rng()) == [0, 1, 2]
    table = ProblemTable().put(
        list("abcdef"),
        {
            "alpha": np.array([9.0, 5, 9, 5, 9, 5]) * 1e6,
            "beta": np.array([0.0, 5, 0, 5, 0, 5]) * 1e6,
            "successes": np.array([1.0, 7, 4, 0, 8, 4]),
            "visits": np.full(6, 8.0),
        },
    )
    state = AlgoState(table=table)
    drawn = np.zeros(6)
    generator = rng()
    for _ in range(2000):
        drawn[waves.choose_problems(pool, 1, PlanConfig(sampler="uncertainty", pool=2), state, generator)[0]] += 1
    np.testing.assert_allclose(drawn / 2000, np.array([0.05, 0.55] * 3) / 1.8, atol=0.03)
    pairs = waves.choose_problems(pool, 2, PlanConfig(sampler="pairs", pool=2), state, rng())
    assert pairs == [0, 1]  # solved once in eight, and seven times
    assert len(waves.choose_problems(pool, 5, PlanConfig(sampler="pairs", pool=2), state, rng())) == 5


def test_temperature_rises_with_falling_diversity():
    config = method(plan={"temperatures": (0.8, 1.0, 1.2)})
    same = make_group([1, 0, 0, 1], lengths=[8] * 4)  # equal tokens: diversity 1/4
    state = next_state([same], [], config, AlgoState())
    assert state.temperature_stage == 1
    assert state.diversity == -1
    varied = make_group([1, 0], lengths=[8, 8], tokens=[np.arange(8), np.arange(8) + 50])
    state = next_state([varied], [], config, state)
    assert (state.temperature_stage, state.diversity) == (1, 1.0)


# --- edits -----------------------------------------------------------------------------------------------------------


def test_replace_failures():
    group, hinted = make_group([0, 1, 0, 0]), make_group([0, 1, 1, 1], condition=["hint:1"] * 4)
    merged = edit.replace_failures(group, hinted, 2)
    assert merged.rewards.tolist() == [1, 1, 1, 0]
    assert merged.size == 4
    assert edit.replace_failures(make_group([1, 1]), hinted, 1).rewards.tolist() == [1, 1]
    assert edit.replace_failures(group, make_group([0, 0]), 1).rewards.tolist() == group.rewards.tolist()


def test_with_prompt():
    trajectory = make_trajectory(3, prompt=4, observation=2, condition="hint:1")
    moved = edit.with_prompt(trajectory, np.array([7, 8], np.int32))
    assert moved.tokens.tolist() == [7, 8, 4, 5, 6, 7, 8]
    assert moved.policy_mask.tolist() == [False, False, True, True, True, False, False]
    assert moved.logprobs[moved.policy_mask].tolist() == trajectory.logprobs[trajectory.policy_mask].tolist()
    assert (moved.prompt_length, moved.turns[0].start, moved.turns[0].end) == (2, 2, 5)
    assert moved.tokens.dtype == np.int32
    longer = edit.with_prompt(moved, np.arange(4, dtype=np.int32))
    assert longer.length == trajectory.length


def test_guide_ratio_vector():
    """Behind the plain prompt the record stays that of the hinted one: the ratio is between contexts (Guide-GRPO)."""
    hinted = make_group([1, 0], uid="a", lengths=[2, 2], logprobs=[[-1.0, -0.9]] * 2, condition=["hint:1", ""])
    (moved,) = edit.behind_plain_prompts([hinted], {"a": np.array([9], np.int32)})
    row, _ = train_rows([moved], method(), AlgoState())
    assert row.tokens[:1].tolist() == [9]
    now = np.where(row.policy_mask, np.concatenate([[0.0], [-1.2, -0.8]]), 0.0)
    np.testing.assert_allclose(np.exp(now - row.logprobs_old)[row.policy_mask], [0.818731, 1.105171], atol=1e-5)


def test_behind_plain_prompts():
    group = make_group([1, 0], uid="a", condition=["hint:2", ""])
    (moved,) = edit.behind_plain_prompts([group], {"a": np.array([9], np.int32)})
    assert moved.trajectories[0].tokens[0] == 9
    assert moved.trajectories[1] is group.trajectories[1]


def test_cut_points():
    points = waves.cut_points(10, 8, rng())
    assert len(points) == len(set(points.tolist())) == 8
    assert points.min() >= 1
    assert points.max() <= 9
    assert waves.cut_points(3, 8, rng()).tolist() == [1, 2]
    assert waves.cut_points(1, 8, rng()).size == 0
