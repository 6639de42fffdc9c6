"""Whole systems of single papers: their formulas against the vectors of the specification, and what they request."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from grpo_roc_jax import Group, ModelConfig, Problem, RewardConfig, Turn, initial_state, next_state, train_rows
from grpo_roc_jax.contrib.methods import hill, masa
from grpo_roc_jax.contrib.methods import tw_grpo as tw
from grpo_roc_jax.contrib.methods.arise import choose_skill
from grpo_roc_jax.contrib.methods.consistency_grpo import stability_rewards, word_entropy
from grpo_roc_jax.contrib.methods.group_rank import Ranking, ranking_reward
from grpo_roc_jax.contrib.methods.m_grpo import aligned, second_reward
from grpo_roc_jax.contrib.methods.resume_screening import Screening, experience, verdict_in
from grpo_roc_jax.contrib.methods.v_05 import shrunk_baseline
from grpo_roc_jax.contrib.methods.vspo import capped_draw, task_value
from grpo_roc_jax.method.advantage import z_score
from grpo_roc_jax.method.edit import with_plain_prompts
from grpo_roc_jax.method.planning import Wave, first_wave, next_wave
from grpo_roc_jax.method.state import AlgoState, ProblemTable
from grpo_roc_jax.model.config import SomeExtras
from grpo_roc_jax.model.transformer import init_params, unembed
from grpo_roc_jax.settings.callables import given
from grpo_roc_jax.types import ToolCall, ToolResult
from tests.helpers import method_groups
from tests.helpers.method_groups import advantages, close, make_group, method, other, saying, shaped, waved
from tests.method.test_planning import asked, first, planned


def test_v_05():
    close(shrunk_baseline(np.array([1.0, 0, 0, 1]), 0.6), [0.6, 1.0])
    close(shrunk_baseline(np.array([0.0, 0, 0, 1]), 0.95), [0.339286, 0.127551])
    state = AlgoState(table=ProblemTable().put(["p"], {"alpha": np.array([0.95]), "beta": np.array([0.05])}))
    values = advantages([make_group([0, 0, 0, 1])], state, advantage={"baseline": "shrunk", "scale": "none"})
    close(values, np.array([0, 0, 0, 1]) - 0.339286)


def test_vspo():
    """Two groups without signal make room for groups of the mixed problems, one of each at most."""
    close(task_value(0.25), 0.140625)
    groups = [make_group(r, uid=str(i)) for i, r in enumerate(([0, 0], [0, 1], [1, 1], [1, 0], [0, 0]))]
    plan = planned(second={"kind": "value", "most": 1})
    requests = next_wave(waved(groups, 1, plan), plan)
    assert sorted((r.place, r.count) for r in requests) == [(1, 2), (3, 2)]
    results = [make_group([1, 1], uid=str(r.place)) for r in requests]
    merged = plan.second.merge(groups, requests, results)
    assert merged == [results[0], groups[1], results[1], groups[3], groups[4]]
    assert next_wave(waved(groups, 2, plan), plan) == []
    drawn = [capped_draw(np.array([0.1, 0, 0.3]), 2, 2, np.random.default_rng(i)) for i in range(2000)]
    firsts = np.array([d[0] for d in drawn])
    assert (firsts == 2).mean() == pytest.approx(0.75, abs=0.03)
    assert len(capped_draw(np.zeros(3), 2, 2, np.random.default_rng(0))) == 0


def test_masa():
    """The first prediction names a notion, a length and a rate; the second says nothing."""
    close(masa.pass_score(6 / 8, 0.5), 0.316228)
    assert [masa.length_score(n, [10, 50]) for n in (30, 50)] == [1, 0]
    solved = saying(make_group([1, 0, 1, 0], lengths=[2, 3, 8, 3]), "use gcd", "the sum", "gcd", "sum")
    assert masa.notion_share(masa.notions("gcd SUM"), Counter(gcd=2, use=1), Counter(the=1, sum=2)) == 0.5
    plan = planned(second={"kind": "predict", "count": 2})
    (request,) = next_wave(waved([solved], 1, plan), plan)
    assert asked([request]) == [(0, 2, "prediction")] and next_wave(waved([solved], 2, plan), plan) == []
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
    first = np.log([[[0.5, 0.5]], [[0.5, 0.5]]])
    second = np.log([[[0.9, 0.1]], [[0.1, 0.9]]])
    np.testing.assert_allclose([tw.divergence(first)[0], tw.divergence(second)[0]], [0, 1.333333], atol=1e-5)
    for parts in ([first, second], [np.concatenate([first, second], 1)]):
        np.testing.assert_allclose(tw.token_weights(parts, alpha=1.7), [1, 1.7])
    assert tw.token_weights([first]).tolist() == [1]
    group = make_group([1, 0], lengths=[2, 2])
    for row in tw.weighted(train_rows([group], method(), AlgoState()), [group], None, lambda *_: iter([first, second])):
        np.testing.assert_allclose(row.weights, [0, 0, 0.25, 0.25 * 1.4], rtol=1e-6)
    assert tw.weighted([], [Group(group.problem, (), ())], None) == [] and tw.token_weights([]).tolist() == []
    # Positions that differ by rounding weigh the same.
    logprobs = np.log(np.full((3, 4, 5), 0.2)) + np.random.default_rng(0).normal(0, 1e-12, (3, 4, 5))
    far = np.log(np.array([[0.9, 0.1], [0.1, 0.9]]))[:, None]
    assert tw.token_weights([np.repeat(far, 3, axis=1) + np.arange(3)[:, None] * 1e-12]).tolist() == [1, 1, 1]
    assert tw.token_weights([logprobs]).tolist() == [1, 1, 1, 1]


def test_token_weights_follow_the_logits_of_the_model():
    """With a cap on them, as the sampler and the update have it."""
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
    close(ranking_reward(gold, gold, 2), 1)
    ideal = 3 + 1 / np.log2(3)
    p, q = (np.exp(x) / np.exp(x).sum() for x in (gold, np.array([0.0, 2, 1])))
    match = np.exp(-(p * np.log(p / q)).sum())
    close(ranking_reward(np.array([0.0, 2, 1]), gold, 2), (1 / 2 + (1 / np.log2(3)) / ideal + match) / 3)
    tied = (1 / 2 + (1 / np.log2(3)) / ideal + np.exp(-(p * np.log(3 * p)).sum())) / 3
    close(ranking_reward(np.ones(3), gold, 2), tied)  # the less relevant first: 0, then 1
    close(ranking_reward(np.zeros(2), np.zeros(2), 9), 1)
    huge = np.array([2000.0, 0, 1000])
    close(ranking_reward(huge, huge, 2), 1)
    close(ranking_reward(np.array([0.0, 2, 1]), huge, 2), (1 / 2 + 0 + q[0]) / 3)
    problem = Problem("p", "?", "2,0,1", "t")
    pay = Ranking(top=2).function(RewardConfig())
    close(pay(problem, answering("2,0,1", "[2] > 0 > 1", "2,0", "none").trajectories), [1, 1, 0, 0])
    with given({"labels": lambda problem: [0, 1]}):
        judged = Ranking(judge="labels").function(RewardConfig())
        close(judged(problem, answering("0,1", "2,0,1").trajectories), [1, 0])


def test_resume_screening():
    """The released code's table of decisions, distance of scores, and bands of years."""
    assert [verdict_in(t) for t in ("SELECTED 75", '{"status": "consider", "score": 80}', "REJECTED 9", "so", "")] == [
        (True, 75), (True, 80), (False, 9), (False, 0), (False, 0)
    ]  # fmt: skip
    years = [
        (75, 7),
        (75, 6),
        (49, 2),
        (86, 2),
        (39, 5),
        (60, 2),
        (80, 6.5),
        (50, 3),
        (80, 6),
        (50, 2),
        (85, 2),
        (40, 5),
    ]
    assert [experience(*pair) for pair in years] == [1, 1, 1, -1, -1, 0, 0, 1, 0, 0, 0, 0]
    selected = Problem("p", "?", "SELECTED 75", "t", {"years": 7})
    group = answering("SELECTED 75", "SELECTED 50", "REJECTED 75", "none")
    pay = Screening().function(RewardConfig())
    close(pay(selected, group.trajectories), [0.8 + 0.2 + 0.2, 0.8 + 0.1, -0.8 + 0.2 + 0.2, -0.8 - 0.1 - 0.2])
    rejected = Problem("p", "?", "REJECTED 25", "t")
    close(pay(rejected, group.trajectories), [-0.4, -0.4 + 0.1, 0, 0.1])
    with given({"fits": lambda problem, score: score / 100}):
        judged = Screening(judge="fits").function(RewardConfig())
        close(judged(rejected, group.trajectories[:1]), [-0.4 + 0.15])


def test_consistency_grpo():
    """Entropies 1, 2 and 4 nats under wordings 0, 0 and 1: gaps of 3, 2 and their mean, the largest is 3."""
    close(word_entropy("a b a b"), np.log(2))
    assert word_entropy("") == word_entropy("a a") == 0
    close(stability_rewards(np.array([1.0, 2, 4]), np.array([0, 0, 1]), 1, 0), [0, 1 / 3, 1])
    close(stability_rewards(np.array([1.0, 2, 4]), np.array([0, 0, 1]), 0, 1), [0, 1 / 3, 1 - 2.5 / 3])
    close(stability_rewards(np.ones(2), np.arange(2), 1, 2), [2, 2])
    group = saying(make_group([1, 0], condition=["", "paraphrase:1"]), "a b", "a")
    close(shaped(group, "stability"), [0.5, 0])
    with given({"size": len}):
        close(shaped(group, "stability", entropy="size", helpfulness=0.2, stability=0.3), [0.2, 0])
    assert not shaped(saying(make_group([1, 0]), "a b", "a"), "stability").any(), "one wording has no other"
    # Texts of the same words are equally informative.
    words, rng = [f"w{i}" for i in range(7) for _ in range(i + 1)], np.random.default_rng(0)
    values = np.array([word_entropy(" ".join(rng.permutation(words))) for _ in range(12)])
    assert np.ptp(values) > 0, "otherwise this shows nothing"
    assert stability_rewards(values, np.arange(12) % 3, 0.5, 0.5).tolist() == [0.5] * 12


def test_arise():
    generator = np.random.default_rng(0)
    assert choose_skill(np.array([-1.0, -5.0]), 1.0, generator, explore=0.0) == 0
    assert choose_skill(np.zeros(4), 1.0, generator, explore=0.0) == -1
    assert {choose_skill(np.array([0.0, -50.0]), 1.0, generator, explore=1.0) for _ in range(30)} == {0, 1}
    library = ["run code", "sum the digits", "guess"]
    skills = {"kind": "skills", "library": library, "explore": 0.0}
    config = method(2, plan={"condition": skills}, shaping=["skill_bonus"])
    problem = Problem("p", "the sum of digits", "1", "t")
    wave = Wave([problem], 2, initial_state(config), generator)
    (request,) = first_wave(wave, config.plan)
    assert (str(request.condition), request.suffix) == ("skill:2", "\nSkill: sum the digits")
    group = make_group([1, 1], condition=["skill:2"] * 2, problem=problem)
    after = AlgoState.from_tree(next_state([group], [group], config, wave.state).to_tree())
    close(after.memory["skill_utility"], [0.5, 0.65, 0.5])  # 0.9 * 0.5 + 0.1 * (1 + 1)
    close(shaped(make_group([1, 0, 1], condition=["skill:1", "skill:1", ""]), "skill_bonus"), [2, 0, 1])
    strict = method(2, plan={"condition": skills | {"least": 0.9}}).plan
    assert str(first_wave(wave, strict)[0].condition) == ""
    only = method(2, plan={"condition": skills | {"cache": 1}}).plan
    assert str(first_wave(replace(wave, state=after), only)[0].condition) == "skill:2", "the most useful one"


def test_hill():
    """The specification's vector; a hint that is not needed later, one that helps no more than none, one that leaks."""
    close(hill.mixed_probability(0.25, 8), 0.899872)
    close([hill.hint_reward(0.25, 8, gap) for gap in (-0.15, 0.3)], [0.545800, 0.899872])
    assert hill.hint_reward(1.0, 8, 0.0) == hill.hint_reward(0.25, 8, 0.0, unhinted=0.25) == 0
    problem = Problem("p", "?", "12", "t")
    assert [hill.gives_away(problem, text) for text in ("it is 12!", " ", "try 120", "3*4")] == [
        True,
        True,
        False,
        False,
    ]
    assert [hill.gives_away(replace(problem, answer=""), text) for text in ("walk east first.", "")] == [False, True]
    # A failed problem gets two hints and two rollouts under each; the third hint gives the answer away.
    plan = planned(second={"kind": "rival_hints", "count": 3, "rollouts": 2})
    failed, solved = make_group([0, 0], uid="a"), make_group([1, 0], uid="b")
    requests = next_wave(waved([failed, solved], 1, plan), plan)
    assert asked(requests) == [(0, 1, f"hint_writer:{k}") for k in (1, 2, 3)]
    assert requests[0].suffix == "\nWrite a hint without the result for: 1" and plan.second.extra_rows == 9
    texts = zip(requests, ("add", "halve", "so 1"), strict=True)
    wrote = [saying(make_group([1], uid="a", condition=[str(r.condition)]), text) for r, text in texts]
    hinted = plan.second.merge([failed, solved], requests, wrote)
    assert not hinted[0].correct.any() and hinted[1] is solved
    requests = next_wave(waved(hinted, 2, plan), plan)
    requested = [(r.count, str(r.condition), r.suffix) for r in requests]
    assert requested == [(2, "hint:1", "\nHint: add"), (2, "hint:2", "\nHint: halve")]
    results = [make_group([1, 0], uid="a", condition=[str(r.condition)] * 2, prompt=[5, 5]) for r in requests]
    groups = plan.second.merge(hinted, requests, results)
    assert next_wave(waved(groups, 3, plan), plan) == [] and hill.hint_advantages(solved, np.zeros(2)) is None
    lost, _ = plan.second.merge(hinted, requests[:1], results[:1])  # without the rollouts of the second hint
    close(hill.hint_advantages(lost, np.zeros(lost.size))[2:5], z_score(np.array([0.5, 0, -1])))
    # The pass under the plain prompt finds the first hint's success 0.3 nats a token less likely: 0.5 / e against 0.5
    # and -1.
    expected = [0, 0, *z_score(np.array([0.5 / np.e, 0.5, -1])), 0, 0, *z_score(np.array([1.0, 0]))]
    seen = []

    def score(params, groups):
        members = method_groups.trajectories(groups)
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
    assert aligned(1, 2, rng).tolist() == [0, 0] and len(set(aligned(3, 2, rng).tolist())) == 2
    assert len(aligned(0, 2, rng)) == 0
    close(second_reward(True, False, 0.5), 0.35)
    group = make_group([1, 0], lengths=[6, 6])
    call, bad = ToolCall("python", {}, "1"), ToolCall("python", {}, "1", "malformed_call")
    calls = [((call,), (ToolResult("ok"),)), ((bad,), (ToolResult("malformed_call"),))]
    group = other(group, turns=[(Turn(2, 5, "a", *made), Turn(6, 8, "b")) for made in calls])
    first, second = train_rows([group], method(2, advantage={"kind": "m_grpo", "calls": 2}), AlgoState())
    close(first.advantages[2:], [2, 2, 2, 1, 1, 1])  # rewards 1 and 0, each call twice
    close(second.advantages, -first.advantages)
    with given({"judge": lambda problem, turn: 0.5}):
        judged = method(2, advantage={"kind": "m_grpo", "calls": 1, "expert": "judge"}).advantage
        assert [len(v) for v in judged.of_calls(group, SimpleNamespace(state=AlgoState()))] == [1, 1]
    broken = other(group, verdicts={"well_formed": [False] * 2})
    rows = train_rows([broken], method(2, advantage="m_grpo"), AlgoState())
    assert not any(row.advantages[5:].any() for row in rows), "no reward without the format"


def test_grao():
    """Against the three terms written out: the coefficient of each log-probability, times the number of rollouts."""
    group = make_group([1, 0, 0, 1], condition=["", "", "", "demonstration"])
    a, b, c = z_score(group.rewards), 0.3, 0.7
    gap = a[:3] - a[3]
    expected = [*(a[:3] + c * gap), 3 * b * a[3] - c * gap.sum()]
    close(advantages([group], advantage={"kind": "grao", "imitation": b, "alignment": c}), expected)
    plain = make_group([1, 0, 0, 1])
    close(advantages([plain], advantage="grao"), z_score(plain.rewards))


def test_ps_grpo():
    """Each answer against those under other wordings: 12 agrees with one of two, 7 with none."""
    plan = planned(condition="paraphrases")
    problem = Problem("p", "2*6?", "12", "t", {"paraphrases": ["6*2?", "two by six?"]})
    requests = first([problem], 4, plan)
    assert asked(requests) == [(0, 2, ""), (0, 1, "paraphrase:1"), (0, 1, "paraphrase:2")]
    assert [r.problem.prompt for r in requests] == ["2*6?", "6*2?", "two by six?"]
    assert [r.problem.prompt for r in first([replace(problem, extra={})], 1, plan)] == ["2*6?"]
    templates = ["Q: 2*6?", "2*6? Answer!"]
    for extra, others in (({}, templates), ({"paraphrases": None}, templates), ({"paraphrases": "6*2?"}, ["6*2?"])):
        assert [p.prompt for p in plan.condition.wordings(replace(problem, extra=extra))][1:] == others
    conditions, answers = ["", "", "paraphrase:1", "paraphrase:2"], ["12", "so 12", "12", None]
    group = make_group([1, 0, 1, 0], condition=conditions, answer=answers)
    close(shaped(group, "agreement"), [0.5, 0.25, (1 + 0.5 + 0) / 3, 0])  # the last has no answer: its turn says text
    with given({"same": lambda a, b: float(a == b)}):
        close(shaped(group, "agreement", similarity="same"), [0.5, 0, 1 / 3, 0])
    assert not shaped(make_group([1, 1]), "agreement").any(), "one wording alone has nothing to agree with"


def test_rgr_grpo():
    """A poor group's best rollout again, with the rubric; a better one replaces the worst and trains without it."""
    plan = planned(second="refine")
    rubric = {"rubric": ["be short", {"text": "be right", "weight": 2}]}
    poor = saying(make_group([0.2, 0.5, 0.1], problem=Problem("a", "?", "1", "t", rubric)), "x", "best", "z")
    (request,) = next_wave(waved([poor, make_group([1, 0], uid="b")], 1, plan), plan)
    assert asked([request]) == [(0, 1, "refinement")]
    assert request.suffix == "\nImprove this:\nbest\n- be short\n- be right"
    better = make_group([0.9], uid="a", condition=["refinement"], prompt=[9])
    (merged,) = plan.second.merge([poor], [request], [better])
    assert merged.rewards.tolist() == [0.2, 0.5, 0.9]
    assert plan.second.merge([poor], [request], [make_group([0.5], uid="a")]) == [poor]
    (plain,) = with_plain_prompts([merged], lambda problem: np.arange(4))
    assert [t.prompt_length for t in plain.trajectories] == [2, 2, 4] and plan.second.trains_plain
    assert next_wave(waved([poor], 2, plan), plan) == []


def test_rank_grpo():
    """Positions against positions: two items and three, the third beyond what was asked for."""
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
    with given({"tutor": lambda problem, attempt: f"why {attempt}?"}):
        taught = planned(second={"kind": "feedback", "teacher": "tutor", "share": 0.3})
        (request,) = next_wave(waved([group], 1, taught), taught)
        assert request.prefix_text == "\nWait: why a?\n"
    for extra in ({}, {"hints": None}):
        assert next_wave(waved([replace(group, problem=replace(problem, extra=extra))], 1, plan), plan) == []
    made = make_group([1], lengths=[6], condition=["feedback"])
    masked = np.array([0, 0, 0, 0, 0, 0, 1, 1], bool)  # prompt 2, prefix 2, feedback 2, continued 2
    result = other(made, policy_mask=[masked], versions=[np.where(masked, 0, -1)])
    (merged,) = plan.second.merge([group], requests[:1], [result])
    assert [str(t.condition) for t in merged.trajectories] == ["", "", "", "feedback"]
    assert merged.rewards.tolist() == [1, 0, 0, 1]
    last = merged.trajectories[-1]
    assert last.policy_mask.tolist() == [False] * 4 + [True] * 4
    config = method(4, weights={"factors": [{"kind": "feedback", "weight": 0.25}]})
    row = train_rows([merged], config, AlgoState())[-1]
    close(row.weights / row.weights.max(), [0, 0, 0, 0, 0.25, 0.25, 1, 1])
