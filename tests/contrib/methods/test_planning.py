"""Requests of each wave, samplers, budgets and schedules, RC-RoC; systems of single papers against their vectors."""

import itertools
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from grpo_roc_jax import ModelConfig, Problem, RewardConfig, Turn, initial_state, next_state, train_rows
from grpo_roc_jax.contrib.methods import (
    arise,
    consistency_grpo,
    group_rank,
    hill,
    m_grpo,
    masa,
    resume_screening,
    v_0,
    vspo,
    xrpo,
)
from grpo_roc_jax.contrib.methods import tw_grpo as tw
from grpo_roc_jax.contrib.methods.expo import Explain
from grpo_roc_jax.contrib.methods.knapsack import knapsack_counts, knapsack_value
from grpo_roc_jax.contrib.methods.microcoder import AVERAGE, STAGE, Rising, diversity
from grpo_roc_jax.contrib.methods.s_grpo import cut_points
from grpo_roc_jax.contrib.methods.sage import WrittenHints
from grpo_roc_jax.contrib.methods.spo import tracked
from grpo_roc_jax.contrib.methods.v_05 import shrunk_baseline
from grpo_roc_jax.method.advantage import z_score
from grpo_roc_jax.method.edit import with_plain_prompts
from grpo_roc_jax.method.planning import Wave, choose_problems, first_wave, next_wave
from grpo_roc_jax.method.state import AlgoState, ProblemTable
from grpo_roc_jax.model.config import SomeExtras
from grpo_roc_jax.model.transformer import init_params, unembed
from grpo_roc_jax.settings.callables import given
from grpo_roc_jax.types import ToolCall, ToolResult
from tests.helpers.method_groups import (
    advantages,
    close,
    make_group,
    method,
    other,
    saying,
    shaped,
    trajectories,
    waved,
)
from tests.method import test_roc as core
from tests.method.test_planning import asked, failed, first, later, planned, problems, rng
from tests.method.test_roc import run, selector

HINTS = {"hints": ["know this", "plan that", "do so"]}


def known(**columns):
    """A state that knows so much of the problems a, b, c and so on."""
    uids = "abcdefghi"[: len(next(iter(columns.values())))]
    return AlgoState(table=ProblemTable().put(list(uids), {name: np.array(each) for name, each in columns.items()}))


def test_hint_levels_by_problem():
    """SAGE light: failing raises a problem's level, solving lowers it, and the next visit starts there."""
    batch, config = problems("a", "b", **HINTS), method(plan={"condition": "hint_level"})
    state = next_state([failed(batch[0]), make_group([1, 1, 0, 1], uid="b")], [], config, AlgoState())
    requests = first(batch, 4, config.plan, state)
    assert [str(r.condition) for r in requests] == ["hint:1", ""] and requests[0].suffix == "\nHint: know this"
    for level, accuracy, moved in ((0, 0, 1), (1, 0.05, 2), (2, 0.2, 2), (2, 0.5, 1), (3, 0, 3)):
        after = config.plan.condition.next_table(["a", "a"], known(level=[level], accuracy=[accuracy]))
        assert after.table.get(["a"])["level"].tolist() == [moved]
    # They count as failures of the plain prompt: hints are requested where every plain rollout failed.
    group = make_group([1, 0, 0, 1], uid="a", condition=["hint:1", "", "", "hint:1"])
    assert next_state([group], [], method(plan={"second": "scaffold"}), AlgoState()).table.get(["a"])["successes"] == 0
    # Waves are plain while the method warms up; single rollouts to be cut wait for the end of it too.
    state = known(level=[1.0, 2])
    for sections, waves in (
        ({"condition": "hint_level"}, [(0, 8, "hint:1"), (1, 8, "hint:2")]),
        ({"second": {"kind": "serial", "cuts": 7}}, [(0, 1, ""), (1, 1, "")]),
    ):
        plan = planned(**sections, warmup_steps=2)
        early, late = (asked(first(problems("a", "b", **HINTS), 8, plan, replace(state, step=step))) for step in (1, 2))
        assert early == [(0, 8, ""), (1, 8, "")] and late == waves


@pytest.mark.parametrize("kind", ["scaffold", "guide", "retry"])
def test_rising_hints(kind):
    batch = problems("a", "b", **HINTS)
    plan = planned(second={"kind": kind, "levels": 2}, warmup_steps=5)
    groups, state = [failed(batch[0]), make_group([1, 0, 0, 0], uid="b")], AlgoState(step=5)
    weakest = later(batch, groups, 1, plan, state)
    assert asked(weakest) == [(0, 4, "hint:1")] and weakest[0].suffix == "\nHint: know this"
    assert later(problems("a", "b"), groups, 1, plan, state) == later(batch, groups, 1, plan, AlgoState(step=4)) == []
    second = later(batch, plan.second.merge(groups, weakest, [failed(batch[0])]), 2, plan, state)
    assert second[0].suffix == "\nHint: know this\nplan that" and later(batch, groups, 3, plan, state) == []
    solved = make_group([0, 1, 1, 0], uid="a", condition=["hint:2"] * 4)
    done = plan.second.merge(groups, second, [solved])
    assert later(batch, done, 2, plan, state) == [] and plan.second.trains_plain == (kind == "guide")
    assert done[0] is solved if kind == "retry" else done[0].rewards.tolist() == [1, 0, 0, 0]


def test_hints_that_the_policy_writes():
    """SAGE: a writer sees the solution, then the group runs again under what it wrote, level by level."""
    batch, plan = problems("a", solution="6 * 7 = 42"), planned(second={"kind": "write", "levels": 2})
    groups = [failed(batch[0])]
    (writer,) = later(batch, groups, 1, plan)
    assert asked([writer]) == [(0, 1, "hint_writer")]
    assert "strength 1 of 2" in writer.suffix and writer.suffix.endswith("6 * 7 = 42")
    written, solved = make_group([0], uid="a"), make_group([0, 1, 0, 0], uid="a")
    notes = WrittenHints().notes([writer], [written])
    assert notes == {0: "text"} and plan.second.merge(groups, [writer], [written]) == groups
    (again,) = later(batch, groups, 2, plan, notes=notes)
    assert (asked([again]), again.suffix) == ([(0, 4, "hint:1")], "\nHint: text")
    assert later(batch, groups, 2, plan, notes={}) == later(batch, groups, 5, plan) == []
    assert plan.second.merge(groups, [again], [solved]) == [solved]


def test_examples():
    prompts = zip("abc", ("3 * 4 = ?", "3 * 5 = ?", "gcd 4 6"), strict=True)
    batch = [Problem(uid, prompt, "1", "t") for uid, prompt in prompts]
    groups = [make_group(r, problem=p) for r, p in zip(([0] * 4, [0, 1], [1, 1]), batch, strict=True)]
    plan = planned(second={"kind": "examples", "count": 1})
    (request,) = later(batch, groups, 1, plan)
    assert request.suffix == "\n3 * 5 = ?\ntext" and later(batch, groups, 2, plan) == []
    state = next_state(groups, groups, replace(method(), plan=plan), AlgoState())
    restored = AlgoState.from_tree(state.to_tree())
    (request,) = later(batch[:1], groups[:1], 1, plan, restored)
    assert request.suffix == "\n3 * 5 = ?\ntext", "a solution of an earlier step"
    assert list(xrpo.recalled(restored)) == ["3 * 5 = ?", "gcd 4 6"]


def test_explanations_fade_out():
    batch, plan = problems("a"), planned(second={"kind": "explain", "count": 2, "steps": 10})
    groups = [failed(batch[0])]
    (request,) = later(batch, groups, 1, plan, AlgoState(step=9))
    assert (asked([request]), plan.second.extra_rows) == ([(0, 2, "explanation")], 2)
    assert request.suffix == "\nExplain how to arrive at the answer 1"
    assert later(batch, groups, 1, plan, AlgoState(step=10)) == []
    result = make_group([0, 1], uid="a", condition=["explanation"] * 2)
    (supervised,) = Explain().supervised([request], [result])
    assert plan.second.merge(groups, [request], [result]) == groups and supervised.rewards.tolist() == [1]
    assert [plan.second.supervised_weight(step) for step in (0, 5, 10, 20)] == pytest.approx([0.1, 0.05, 0, 0])
    # Drafts are shown at the temperature of the first wave.
    batch, drafts = problems("a"), make_group([0, 1, 1, 0], uid="a")
    plan = planned(second="draft", temperature={"kind": "rising", "temperatures": [0.8, 1.2]})
    state = AlgoState(memory={"temperature_stage": np.array([1.0])})
    assert [first(batch, 2, plan, some)[0].temperature for some in (None, state)] == [0.8, 1.2]
    (request,) = later(batch, [drafts], 1, plan, state)
    assert (asked([request]), request.temperature) == ([(0, 4, "draft")], 1.2)
    second = make_group([1, 1, 0, 1], uid="a", condition=["draft"] * 4)
    assert request.suffix == "\nAn earlier attempt:\ntext"
    assert plan.second.merge([drafts], [request], [second]) == [second]


def test_serial_cuts():
    """S-GRPO: cuts of one thought, continued once each, before the full one."""
    batch, full = problems("a"), make_group([1], uid="a", lengths=[9])
    plan = planned(second={"kind": "serial", "cuts": 2, "stop": "stop"})
    requests = later(batch, [full], 1, plan)
    thought, lengths = full.trajectories[0].tokens[2:11].tolist(), [len(r.prefix) for r in requests]
    assert len(lengths) == 2 and lengths == sorted(lengths)
    assert all(list(r.prefix) == thought[: len(r.prefix)] and r.prefix_text == "stop" for r in requests)
    results = [make_group([reward], uid="a", condition=["cut"]) for reward in (0, 1)]
    (merged,) = plan.second.merge([full], requests, results)
    assert merged.rewards.tolist() == [0, 1, 1] and merged.trajectories[2] is full.trajectories[0]
    assert later(batch, [merged], 2, plan) == [] and len(set(cut_points(10, 8, rng()).tolist())) == 8


def test_problems_of_middling_success_are_drawn_more_often():
    state, generator = known(alpha=[9e6, 5e6] * 3, beta=[0.0, 5e6] * 3), rng()
    plan = planned(problems="uncertainty")
    drawn = [choose_problems(problems(*"abcdef"), 1, plan, state, generator)[0] for _ in range(2000)]
    np.testing.assert_allclose(np.bincount(drawn) / 2000, np.array([0.05, 0.55] * 3) / 1.8, atol=0.03)
    # What is known of a problem follows it as it becomes solved always, and again once it fails.
    state, config = AlgoState(), method(plan={"problems": "uncertainty"})
    for successes, value in (([1, 1, 1, 1], 1.0), ([1, 0, 1, 0], 0.5)):
        groups = [make_group(successes, uid="a")]
        for _ in range(30):
            state = next_state(groups, groups, config, state)
        assert tracked(state, problems("a")) == pytest.approx(value, abs=0.03)
    # Solved at most half of the time, lowest first, by turns with those failed once or twice in eight.
    state = known(successes=[0, 4, 35, 40, 20, 12, 32, 31, 0], visits=[40] * 8 + [0])
    pool, sampler = problems(*"abcdefghi"), method(plan={"problems": "pairs"}).plan.problems
    for count, chosen in ((2, [1, 2]), (4, [1, 2, 5, 6]), (7, [0, 1, 2, 4, 5, 6, 7])):
        assert sampler.choose(pool, count, state, None) == chosen
    # Of groups up to four a rate of 1/2 meets both bounds; of others two failures meet theirs in any rounding.
    for group in (4, 6, 38):
        state = known(successes=[group // 2, group - 2, group - 1, 1], visits=[group] * 4)
        sampler = method(plan={"problems": {"kind": "pairs", "group": group}}).plan.problems
        chosen = [sampler.choose(pool[:4], count, state, None) for count in (2, 4)]
        assert [len(set(each)) for each in chosen] == [2, 4] and (group == 4 or chosen[1] == [0, 1, 2, 3])


def test_budgets_and_temperatures_by_hand():
    """Gains by hand; counts against every allocation of small budgets; their limits."""
    close(knapsack_value(8, 0.05), 0.336580 * 0.05 * 0.95**2)
    plans = [c for c in itertools.product(range(2, 9), repeat=3) if sum(c) == 13]
    for rates in np.random.default_rng(0).random((10, 3)):
        counts = knapsack_counts(rates, 13, 2, 8)
        best = max(knapsack_value(np.array(c), rates).sum() for c in plans)
        assert counts.sum() == 13 and knapsack_value(counts, rates).sum() == pytest.approx(best)
    with pytest.raises(ValueError, match="between 4 and 8 are possible"):
        knapsack_counts(np.array([0.5, 0.5]), 9, 2, 4)
    close([xrpo.half_width(n, 0.5) for n in (4, 5)], [0.795612, 0.620832])
    counts = xrpo.half_width_counts(np.array([0.5, 0.0, 0.5]), pilot=4, budget=20)
    assert counts.sum() == 20 and counts[1] == 4, "nothing to learn about a problem without spread"
    assert xrpo.half_width_counts(np.array([0.5, 0.0, 0.5]), pilot=4, budget=20, bonus=1.0)[1] > 4
    # Three equal responses have a diversity of a third, which is a tenth of the average: the target is a half.
    rows = [np.random.default_rng(i).integers(0, 3, 30) for i in range(5)]
    assert diversity(rows) == len({tuple(row[i : i + 4]) for row in rows for i in range(27)}) / (5 * 27)
    # In the first step; within a stage; a new stage starts its own average.
    for before, stage, average, after in ((-1.0, 0, -1.0, 1), (0.6, 1, 0.54 + 0.1 / 3, 1), (0.5, 1, -1.0, 2)):
        state = AlgoState(memory={AVERAGE: np.array([before]), STAGE: np.array([float(stage)])})
        moved = Rising().next_memory([make_group([1, 0, 0], lengths=[6] * 3)], [], None, state)
        assert (moved[AVERAGE][0], moved[STAGE][0]) == (pytest.approx(average), after)
        assert Rising().now(state) == (0.9, 1.0, 1.1)[stage] and Rising().all == (0.9, 1.0, 1.1)


def test_success_is_predicted_from_similar_problems():
    """By hand: cosines of 1 and 2/7 to the two entries, (2/7)^4 = 0.006664."""
    texts = ["gcd of 12 and 18", "product of 3 and 4"]
    record = [v_0.RecordEntry(text, reward, 0.0) for text, reward in zip(texts, (1.0, 0.0), strict=True)]
    close(v_0.similarities(["GCD of 45 and 10"], texts), [[1.0, 2 / 7]])
    old = [replace(record[0], age=20.0), record[1]]  # of a policy 20 steps ago: counts half
    new = [Problem("a", "gcd of 45 and 10", "1", "t")]
    for known, success in ((record, 1.5 / 2.006664), (old, 0.9 / 1.506664)):
        close(v_0.predicted([new[0].prompt], known, 20.0, 4.0, 1.0), [success])
    # The record moves with the policy and outlives a checkpoint.
    config = method(8, plan={"budget": {"kind": "predicted", "remembered": 2}}, resample="none")
    groups = [make_group([1.0] * 4, problem=Problem(text, text, "1", "t")) for text in ("lost entry", *texts)]
    state = next_state(groups[:1], [], config, AlgoState())
    state = AlgoState.from_tree(next_state(groups[1:], [], config, state).to_tree())
    assert [(o.prompt, o.success) for o in v_0.recalled_record(state)] == [(text, 1.0) for text in texts]
    # It decides about new problems, as the settings say; and a predictor of the user's is asked.
    state = AlgoState(memory=v_0.remembered_record(old, 0))
    for values in ((20.0, 4.0, 1.0), (5.0, 4.0, 1.0), (20.0, 1.0, 1.0), (20.0, 4.0, 0.25)):
        settings = dict(zip(("half_life", "sharpness", "prior"), values, strict=True))
        budget = method(8, plan={"budget": {"kind": "predicted", **settings}}, resample="none").plan.budget
        assert budget.rates(Wave(new, 8, state, None)) == v_0.predicted([new[0].prompt], old, *values)
    with given({"asked": lambda problems, record: [0.5, 0.1, 0.9]}):
        budget = method(8, plan={"budget": {"kind": "predicted", "predictor": "asked"}}, resample="none").plan.budget
        assert budget.first(Wave(problems(*"abc"), 8, AlgoState(), rng())).tolist() == [7, 15, 2]


def test_selection_under_reward_tokens():
    """Successes under the low reward token: ranked with the others, after them, or with places of their own."""
    low, high = "low_reward", "high_reward"
    group = make_group([1] * 4 + [0] * 4, errors=[0, 0, 1, 1, 0, 0, 0, 0], condition=[low, low, high, high] * 2)
    for settings, expected in (({}, {2, 3}), ({"conditions": "stratify"}, {0, 2})):
        assert set(run(group, 4, kind="rc_roc", **settings).indices.tolist()) & {0, 1, 2, 3} == expected
    # Two places for five and one: shares of 1.67 and 0.33, and the larger remainder gets the second place.
    group = make_group([1] * 6 + [0] * 2, condition=[low] * 5 + [high] + [low] * 2)
    assert run(group, 4, kind="rc_roc", conditions="stratify").indices.tolist() == [0, 1, 6, 7]
    core.test_short_and_full_groups("rc_roc")
    assert not selector(kind="rc_roc", conditions="stratify").quota_decided(16, 16, 1, 16)


def test_vspo():
    """Two groups without signal make room for groups of the mixed problems, one of each at most."""
    close(vspo.task_value(0.25), 0.140625)
    groups = [make_group(r, uid=str(i)) for i, r in enumerate(([0, 0], [0, 1], [1, 1], [1, 0], [0, 0]))]
    plan = planned(second={"kind": "value", "most": 1})
    requests = next_wave(waved(groups, 1, plan), plan)
    assert sorted((r.place, r.count) for r in requests) == [(1, 2), (3, 2)]
    results = [make_group([1, 1], uid=str(r.place)) for r in requests]
    assert plan.second.merge(groups, requests, results) == [results[0], groups[1], results[1], groups[3], groups[4]]
    drawn = [vspo.capped_draw(np.array([0.1, 0, 0.3]), 2, 2, np.random.default_rng(i))[0] for i in range(2000)]
    assert (np.array(drawn) == 2).mean() == pytest.approx(0.75, abs=0.03)
    assert len(vspo.capped_draw(np.zeros(3), 2, 2, np.random.default_rng(0))) == 0
    close(shrunk_baseline(np.array([1.0, 0, 0, 1]), 0.6), [0.6, 1.0])
    state = AlgoState(table=ProblemTable().put(["p"], {"alpha": np.array([0.95]), "beta": np.array([0.05])}))
    values = advantages([make_group([0, 0, 0, 1])], state, advantage={"baseline": "shrunk", "scale": "none"})
    close(values, np.array([0, 0, 0, 1]) - 0.339286)


def test_masa():
    """The first prediction names a notion, a length and a rate; the second says nothing."""
    close(masa.pass_score(6 / 8, 0.5), 0.316228)
    assert [masa.length_score(n, [10, 50]) for n in (30, 50)] == [1, 0]
    solved = saying(make_group([1, 0, 1, 0], lengths=[2, 3, 8, 3]), "use gcd", "the sum", "gcd", "sum")
    assert masa.notion_share(masa.notions("gcd SUM"), Counter(gcd=2, use=1), Counter(the=1, sum=2)) == 0.5
    plan = planned(second={"kind": "predict", "count": 2})
    (request,) = next_wave(waved([solved], 1, plan), plan)
    assert asked([request]) == [(0, 2, "prediction")]
    scored = saying(make_group([1, 1], condition=["prediction"] * 2), "gcd sum 6 4", "")
    (merged,) = plan.second.merge([solved], [request], [scored])
    close(merged.rewards[4:], [(0.5 + 0.316228 + 1) / 3, 0])
    assert merged.correct.tolist() == [True, False, True, False, False, False]
    values = advantages([merged], advantage="by_role")
    close(values, [*z_score(np.array([1.0, 0, 1, 0])), *z_score(merged.rewards[4:])])
    after = next_state([merged], [merged], method(4), AlgoState()).table.get(["p"])
    assert (after["visits"].tolist(), after["successes"].tolist()) == ([4], [2]), "predictions are no attempts"


def test_token_weights():
    """Two responses that part at the second position, under a model whose predictions are known."""
    first, second = np.log([[[0.5, 0.5]], [[0.5, 0.5]]]), np.log([[[0.9, 0.1]], [[0.1, 0.9]]])
    np.testing.assert_allclose([tw.divergence(first)[0], tw.divergence(second)[0]], [0, 1.333333], atol=1e-5)
    for parts in ([first, second], [np.concatenate([first, second], 1)]):
        np.testing.assert_allclose(tw.token_weights(parts, alpha=1.7), [1, 1.7])
    group = make_group([1, 0], lengths=[2, 2])
    for row in tw.weighted(train_rows([group], method(), AlgoState()), [group], None, lambda *_: iter([first, second])):
        np.testing.assert_allclose(row.weights, [0, 0, 0.25, 0.25 * 1.4], rtol=1e-6)
    # Of the logits of a model with a cap on them, as the sampler and the update have it.
    shape = {"d_model": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "d_ff": 32, "vocab_size": 16}
    config = ModelConfig(**shape, extras=SomeExtras(logit_cap=0.5))
    params = jax.tree.map(lambda leaf: 9 * leaf, init_params(jax.random.key(0), config))
    rows = [SimpleNamespace(length=4, tokens=np.arange(i, i + 4, dtype=np.int32)) for i in range(2)]
    learner = SimpleNamespace(full=lambda given: given, longest=4, model=config)
    (seen,) = tw.log_vectors(rows, [1, 1], SimpleNamespace(trained=params, learner=learner))
    places = np.tile(np.arange(4, dtype=np.int32), (2, 1))
    tokens = np.stack([row.tokens for row in rows])
    hidden = tw.hidden_states(config)(params, tokens, places, np.ones((2, 4), np.int32))
    np.testing.assert_allclose(seen, jax.nn.log_softmax(unembed(params, hidden, config))[:, :-1], atol=1e-5)


def answering(*answers):
    """A group with these boxed answers."""
    return saying(make_group([0] * len(answers)), *(f"</reason><answer>\\boxed{{{a}}}</answer>" for a in answers))


def test_group_rank():
    """Recall, NDCG and exp(-KL) by hand: three documents of relevance 2, 0 and 1, of which two count."""
    gold = np.array([2.0, 0, 1])
    close(group_rank.ranking_reward(gold, gold, 2), 1)
    ideal = 3 + 1 / np.log2(3)
    p, q = (np.exp(x) / np.exp(x).sum() for x in (gold, np.array([0.0, 2, 1])))
    expected = (1 / 2 + (1 / np.log2(3)) / ideal + np.exp(-(p * np.log(p / q)).sum())) / 3
    close(group_rank.ranking_reward(np.array([0.0, 2, 1]), gold, 2), expected)
    problem = Problem("p", "?", "2,0,1", "t")
    pay = group_rank.Ranking(top=2).function(RewardConfig())
    close(pay(problem, answering("2,0,1", "[2] > 0 > 1", "2,0", "none").trajectories), [1, 1, 0, 0])
    # The released code's table of decisions, distance of scores, and bands of years.
    said = {"SELECTED 75": (True, 75), '{"status": "consider", "score": 80}': (True, 80), "REJECTED 9": (False, 9)}
    assert [resume_screening.verdict_in(text) for text in (*said, "so")] == [*said.values(), (False, 0)]
    bands = {(75, 7): 1, (49, 2): 1, (86, 2): -1, (39, 5): -1, (60, 2): 0, (80, 6.5): 0, (50, 3): 1, (80, 6): 0}
    assert [resume_screening.experience(*pair) for pair in bands] == [*bands.values()]
    selected = Problem("p", "?", "SELECTED 75", "t", {"years": 7})
    group = answering("SELECTED 75", "SELECTED 50", "REJECTED 75", "none")
    pay = resume_screening.Screening().function(RewardConfig())
    close(pay(selected, group.trajectories), [0.8 + 0.2 + 0.2, 0.8 + 0.1, -0.8 + 0.2 + 0.2, -0.8 - 0.1 - 0.2])
    rejected = Problem("p", "?", "REJECTED 25", "t")
    close(pay(rejected, group.trajectories), [-0.4, -0.4 + 0.1, 0, 0.1])


def test_consistency_grpo():
    """Entropies 1, 2 and 4 nats under wordings 0, 0 and 1: gaps of 3, 2 and their mean, the largest is 3."""
    close(consistency_grpo.word_entropy("a b a b"), np.log(2))
    close(consistency_grpo.stability_rewards(np.array([1.0, 2, 4]), np.array([0, 0, 1]), 1, 0), [0, 1 / 3, 1])
    close(consistency_grpo.stability_rewards(np.array([1.0, 2, 4]), np.array([0, 0, 1]), 0, 1), [0, 1 / 3, 1 - 2.5 / 3])
    group = saying(make_group([1, 0], condition=["", "paraphrase:1"]), "a b", "a")
    close(shaped(group, "stability"), [0.5, 0])
    # Each answer against those under other wordings: 12 agrees with one of two, 7 with none.
    plan = planned(condition="paraphrases")
    problem = Problem("p", "2*6?", "12", "t", {"paraphrases": ["6*2?", "two by six?"]})
    requests = first([problem], 4, plan)
    assert asked(requests) == [(0, 2, ""), (0, 1, "paraphrase:1"), (0, 1, "paraphrase:2")]
    assert [p.prompt for p in plan.condition.wordings(replace(problem, extra={}))][1:] == ["Q: 2*6?", "2*6? Answer!"]
    conditions, answers = ["", "", "paraphrase:1", "paraphrase:2"], ["12", "so 12", "12", None]
    group = make_group([1, 0, 1, 0], condition=conditions, answer=answers)
    close(shaped(group, "agreement"), [0.5, 0.25, (1 + 0.5 + 0) / 3, 0])  # the last has no answer: its turn says text


def test_arise():
    generator = np.random.default_rng(0)
    assert arise.choose_skill(np.array([-1.0, -5.0]), 1.0, generator, explore=0.0) == 0
    assert arise.choose_skill(np.zeros(4), 1.0, generator, explore=0.0) == -1
    skills = {"kind": "skills", "library": ["run code", "sum the digits", "guess"], "explore": 0.0}
    config = method(2, plan={"condition": skills}, shaping=["skill_bonus"])
    problem = Problem("p", "the sum of digits", "1", "t")
    wave = Wave([problem], 2, initial_state(config), generator)
    (request,) = first_wave(wave, config.plan)
    assert (str(request.condition), request.suffix) == ("skill:2", "\nSkill: sum the digits")
    group = make_group([1, 1], condition=["skill:2"] * 2, problem=problem)
    after = AlgoState.from_tree(next_state([group], [group], config, wave.state).to_tree())
    close(after.memory["skill_utility"], [0.5, 0.65, 0.5])  # 0.9 * 0.5 + 0.1 * (1 + 1)
    close(shaped(make_group([1, 0, 1], condition=["skill:1", "skill:1", ""]), "skill_bonus"), [2, 0, 1])


def test_hill():
    """The specification's vector; a hint that is not needed later, one that helps no more than none, one that leaks."""
    close(hill.mixed_probability(0.25, 8), 0.899872)
    close([hill.hint_reward(0.25, 8, gap) for gap in (-0.15, 0.3)], [0.545800, 0.899872])
    assert hill.hint_reward(1.0, 8, 0.0) == hill.hint_reward(0.25, 8, 0.0, unhinted=0.25) == 0
    problem = Problem("p", "?", "12", "t")
    assert [hill.gives_away(problem, text) for text in ("it is 12!", " ", "try 120")] == [True, True, False]
    # A failed problem gets two hints and two rollouts under each; the third hint gives the answer away.
    plan = planned(second={"kind": "rival_hints", "count": 3, "rollouts": 2})
    failed, solved = make_group([0, 0], uid="a"), make_group([1, 0], uid="b")
    requests = next_wave(waved([failed, solved], 1, plan), plan)
    assert asked(requests) == [(0, 1, f"hint_writer:{k}") for k in (1, 2, 3)] and plan.second.extra_rows == 9
    wrote = [make_group([1], uid="a", condition=[str(r.condition)]) for r in requests]
    wrote = [saying(group, text) for group, text in zip(wrote, ("add", "halve", "so 1"), strict=True)]
    hinted = plan.second.merge([failed, solved], requests, wrote)
    requests = next_wave(waved(hinted, 2, plan), plan)
    assert asked(requests) == [(0, 2, "hint:1"), (0, 2, "hint:2")] and requests[1].suffix == "\nHint: halve"
    results = [make_group([1, 0], uid="a", condition=[str(r.condition)] * 2, prompt=[5, 5]) for r in requests]
    groups = plan.second.merge(hinted, requests, results)
    # The pass under the plain prompt finds the first hint's success 0.3 nats a token less likely: 0.5 / e against 0.5
    # and -1.
    expected = [0, 0, *z_score(np.array([0.5 / np.e, 0.5, -1])), 0, 0, *z_score(np.array([1.0, 0]))]
    seen = []

    def score(params, groups):
        members = trajectories(groups)
        seen.extend(t.prompt_length for t in members)
        return [t.logprobs - np.float32(0.3 * (i == 5)) * t.policy_mask for i, t in enumerate(members)]

    policy = SimpleNamespace(prompt_ids=lambda problem: [1, 2, 3], trained=None, score=score)
    rows = train_rows(groups, method(), AlgoState())
    after = [row.advantages[-1] for row in hill.rewarded(rows, groups, policy)]
    close(after, [*expected, *[row.advantages[-1] for row in rows[9:]]])
    assert seen[5:9] == [3] * 4, "hinted responses under the plain prompt"


def test_m_grpo():
    """The specification's vector: one call repeated, two of three drawn; then the same on the turns of a group."""
    rng = np.random.default_rng(0)
    assert m_grpo.aligned(1, 2, rng).tolist() == [0, 0] and len(set(m_grpo.aligned(3, 2, rng).tolist())) == 2
    close(m_grpo.second_reward(True, False, 0.5), 0.35)
    group = make_group([1, 0], lengths=[6, 6])
    call, bad = ToolCall("python", {}, "1"), ToolCall("python", {}, "1", "malformed_call")
    calls = [((call,), (ToolResult("ok"),)), ((bad,), (ToolResult("malformed_call"),))]
    group = other(group, turns=[(Turn(2, 5, "a", *made), Turn(6, 8, "b")) for made in calls])
    first, second = train_rows([group], method(2, advantage={"kind": "m_grpo", "calls": 2}), AlgoState())
    close(first.advantages[2:], [2, 2, 2, 1, 1, 1])  # rewards 1 and 0, each call twice
    close(second.advantages, -first.advantages)
    # Against the three terms written out: the coefficient of each log-probability, times the number of rollouts.
    group = make_group([1, 0, 0, 1], condition=["", "", "", "demonstration"])
    a, b, c = z_score(group.rewards), 0.3, 0.7
    gap = a[:3] - a[3]
    expected = [*(a[:3] + c * gap), 3 * b * a[3] - c * gap.sum()]
    close(advantages([group], advantage={"kind": "grao", "imitation": b, "alignment": c}), expected)


def test_rgr_grpo():
    """A poor group's best rollout again, with the rubric; a better one replaces the worst and trains without it."""
    plan = planned(second="refine")
    rubric = {"rubric": ["be short", {"text": "be right", "weight": 2}]}
    poor = saying(make_group([0.2, 0.5, 0.1], problem=Problem("a", "?", "1", "t", rubric)), "x", "best", "z")
    (request,) = next_wave(waved([poor, make_group([1, 0], uid="b")], 1, plan), plan)
    assert (
        asked([request]) == [(0, 1, "refinement")] and request.suffix == "\nImprove this:\nbest\n- be short\n- be right"
    )
    better = make_group([0.9], uid="a", condition=["refinement"], prompt=[9])
    (merged,) = plan.second.merge([poor], [request], [better])
    assert merged.rewards.tolist() == [0.2, 0.5, 0.9]
    (plain,) = with_plain_prompts([merged], lambda problem: np.arange(4))
    assert [t.prompt_length for t in plain.trajectories] == [2, 2, 4] and plan.second.trains_plain
    # Positions against positions: two items and three, the third beyond what was asked for.
    advantage = method(advantage={"kind": "positions", "items": 2, "overflow": 0.5}).advantage
    values = advantage.by_position([np.array([1.0, 0]), np.array([0.0, 0, 1]), np.array([0.5])])
    close(np.concatenate(values), [1, 0, -1, 0, -0.5, 0])
    group, pay = make_group([1, 0], lengths=[4, 4]), {"turn_rewards": [(0, 1), (0, 0)]}
    group = other(group, turns=[(Turn(2, 4, "a"), Turn(5, 6, "b"))] * 2, verdicts=pay)
    (won, lost) = train_rows([group], method(advantage="positions"), AlgoState())
    close(won.advantages, [0, 0, 0, 0, 0, 0.707106])
    close(lost.advantages, -won.advantages)


def test_think_tuning():
    """Half of a group's failures continue after feedback, which trains with a weight of its own."""
    plan = planned(second={"kind": "feedback", "share": 0.5})
    problem = Problem("p", "?", "1", "t", {"hints": ["look again", "so"]})
    group = saying(make_group([0, 1, 0, 0], tokens=[[7, 8, 9]] * 4, problem=problem), "a", "b", "c", "d")
    requests = next_wave(waved([group], 1, plan, thought=lambda t: 2), plan)
    continued = ((7, 8), "\nWait: look again\n", "feedback")
    assert [(r.prefix, r.prefix_text, str(r.condition)) for r in requests] == [continued] * 2
    masked = np.array([0, 0, 0, 0, 0, 0, 1, 1], bool)  # prompt 2, prefix 2, feedback 2, continued 2
    result = make_group([1], lengths=[6], condition=["feedback"])
    result = other(result, policy_mask=[masked], versions=[np.where(masked, 0, -1)])
    (merged,) = plan.second.merge([group], requests[:1], [result])
    assert merged.rewards.tolist() == [1, 0, 0, 1]
    assert merged.trajectories[-1].policy_mask.tolist() == [False] * 4 + [True] * 4
    config = method(4, weights={"factors": [{"kind": "feedback", "weight": 0.25}]})
    row = train_rows([merged], config, AlgoState())[-1]
    close(row.weights / row.weights.max(), [0, 0, 0, 0, 0.25, 0.25, 1, 1])
