"""Whole systems of single papers: their formulas against the vectors of the specification, and what they request."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_roc_jax.config import read_config
from grpo_roc_jax.learner.group_learner import GroupLearner
from grpo_roc_jax.learner.learner import Learner
from grpo_roc_jax.method.advantage import z_score
from grpo_roc_jax.method.compose import Scores, initial_state, next_state, train_rows
from grpo_roc_jax.method.edit import with_plain_prompts
from grpo_roc_jax.method.planning import Wave, first_wave, next_wave
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.reward.config import RewardConfig
from grpo_roc_jax.reward.graded import Criteria, SeveralAnswers, rubric_reward
from grpo_roc_jax.reward.score import make_scorer
from grpo_roc_jax.run.demonstrate import with_demonstration
from grpo_roc_jax.run.run_state import RunState
from grpo_roc_jax.settings.callables import given
from grpo_roc_jax.settings.cli import ConfigError
from grpo_roc_jax.text.chat_format import make_chat
from grpo_roc_jax.text.config import TextConfig
from grpo_roc_jax.text.tokenizer import load_tokenizer
from grpo_roc_jax.types import Problem, Turn
from grpo_roc_jax.worlds.worlds import world_problem
from tests.helpers.method_groups import make_group, method, shaped


def close(actual, expected, atol=1e-5):
    np.testing.assert_allclose(actual, expected, atol=atol)


def advantages(groups, state=None, size=4, **sections):
    """The advantage of each trajectory, from its last token."""
    rows = train_rows(groups, method(size, **sections), state or AlgoState(), rng=np.random.default_rng(0))
    return [float(row.advantages[-1]) for row in rows]


def waved(groups, number, plan, **more):
    """A wave over ready groups."""
    problems = [group.problem for group in groups]
    return Wave(problems, 4, AlgoState(), np.random.default_rng(0), number, groups, **more)


def saying(group, *texts):
    """The group with these texts as the last turns of its trajectories."""
    turned = [
        replace(t, turns=(replace(t.turns[0], text=text),)) for t, text in zip(group.trajectories, texts, strict=True)
    ]
    return replace(group, trajectories=tuple(turned))


def test_grao():
    """Against the three terms written out: the coefficient of each log-probability, times the number of rollouts."""
    group = make_group([1, 0, 0, 1], condition=["", "", "", "demonstration"])
    a, b, c = z_score(group.rewards), 0.3, 0.7
    gap = a[:3] - a[3]
    expected = [*(a[:3] + c * gap), 3 * b * a[3] - c * gap.sum()]
    close(advantages([group], advantage={"kind": "grao", "imitation": b, "alignment": c}), expected)
    plain = make_group([1, 0, 0, 1])
    close(advantages([plain], advantage="grao"), z_score(plain.rewards))


def test_tempsamp_r1():
    """On-policy rewards by themselves; the demonstration at 1.2 times the best of their advantages."""
    group = make_group([0.2, 0.5, 0.4, 1], condition=["", "", "", "demonstration"])
    close(advantages([group], advantage="anchored"), [-1.091082, 0.872866, 0.218216, 1.047439])
    with pytest.raises(ConfigError, match=r"set surrogate\.old_logprobs scored, or surrogate logp"):
        read_config("methods/tempsamp_r1.yaml", "--surrogate.old_logprobs=recorded")


@pytest.mark.parametrize("solution", [None, "count them"])
def test_a_demonstration_joins_the_group(solution):
    """The world's own way to the answer, or the data's, scored like a rollout; none that is too long."""
    problem = world_problem("products", 1, 0, 3)
    if solution is not None:
        problem = replace(problem, extra={"solution": solution})
    chat = make_chat(TextConfig(), load_tokenizer(TextConfig()))
    scorer = make_scorer(RewardConfig())
    group = replace(make_group([1, 0]), problem=problem)
    shown = with_demonstration(scorer, chat, 256, group)
    scorer.close()
    last = shown.trajectories[2]
    assert shown.correct.tolist() == [True, False, True]
    assert str(last.condition) == "demonstration" and last.prompt_length == len(chat.prompt_ids(problem))
    assert [chat.parse_turn(last.tokens[t.start : t.end]).text for t in last.turns] == [t.text for t in last.turns]
    assert all(last.policy_mask[t.start : t.end].all() for t in last.turns)
    assert with_demonstration(scorer, chat, 16, group) is group
    unknown = replace(group, problem=replace(problem, extra={}))
    assert with_demonstration(scorer, chat, 256, unknown) is unknown


def test_ps_grpo():
    """Each answer against those under other wordings: 12 agrees with one of two, 7 with none."""
    plan = method(plan={"condition": "paraphrases"}).plan
    problem = Problem("p", "2*6?", "12", "t", {"paraphrases": ["6*2?", "two by six?"]})
    requests = first_wave(Wave([problem], 4, AlgoState(), np.random.default_rng(0)), plan)
    assert [(r.problem.prompt, r.count, str(r.condition)) for r in requests] == [
        ("2*6?", 2, ""),
        ("6*2?", 1, "paraphrase:1"),
        ("two by six?", 1, "paraphrase:2"),
    ]
    plain = first_wave(Wave([replace(problem, extra={})], 1, AlgoState(), np.random.default_rng(0)), plan)
    assert [r.problem.prompt for r in plain] == ["2*6?"]
    assert [p.prompt for p in plan.condition.wordings(replace(problem, extra={}))][1:] == ["Q: 2*6?", "2*6? Answer!"]
    group = make_group([1, 0, 1, 0], condition=["", "", "paraphrase:1", "paraphrase:2"])
    answers = ["12", "so 12", "12", None]
    verdicts = tuple(replace(v, answer=a) for v, a in zip(group.verdicts, answers, strict=True))
    group = replace(group, verdicts=verdicts)
    close(shaped(group, "agreement"), [0.5, 0.25, (1 + 0.5 + 0) / 3, 0])  # the last has no answer: its turn says text
    with given({"same": lambda a, b: float(a == b)}):
        close(shaped(group, "agreement", similarity="same"), [0.5, 0, 1 / 3, 0])
    assert not shaped(make_group([1, 1]), "agreement").any(), "one wording alone has nothing to agree with"


def test_several_answers():
    """Some of the right answers pay in part, a wrong one among them pays nothing (TW-GRPO)."""
    pay = SeveralAnswers().function(RewardConfig())
    said = ["b,a , C", "a", "a,d", "", "none"]
    replies = [f"</reason><answer>\\boxed{{{text}}}</answer>" for text in said]
    group = saying(make_group([0] * 5), *replies)
    close(pay(Problem("p", "?", "A,B,C", "t"), group.trajectories), [1, 1 / 3, 0, 0, 0])


def test_criteria():
    """The vector of RGR-GRPO's rubric, rules of weight 1, and a judge of the user's."""
    close(rubric_reward([3, 2, 1], [1, 0, 1]), 0.666667)
    items = [{"text": "short", "weight": 3}, {"text": "polite", "weight": 2}, "Sums"]
    problem = Problem("p", "?", "1", "t", {"rubric": items})
    group = saying(make_group([0, 0]), "a SHORT one with sums", "no")
    close(Criteria().function(RewardConfig())(problem, group.trajectories), [0.666667, 0])
    both = Criteria(rules=("one",)).function(RewardConfig())
    close(both(problem, group.trajectories), [5 / 7, 0])
    assert Criteria().function(RewardConfig())(replace(problem, extra={}), group.trajectories) == [0, 0]
    with given({"long": lambda criterion, problem, reply: float(len(reply) > 3)}):
        assert Criteria(judge="long").function(RewardConfig())(problem, group.trajectories) == [1, 0]
    with pytest.raises(ValueError, match=r"judge = 'nowhere' is not a function"):
        make_scorer(RewardConfig(functions=(Criteria(judge="nowhere"),)))


def test_rgr_grpo():
    """A poor group's best rollout again, with the rubric; a better one replaces the worst and trains without it."""
    plan = method(plan={"second": "refine"}).plan
    rubric = {"rubric": ["be short", {"text": "be right", "weight": 2}]}
    poor = saying(make_group([0.2, 0.5, 0.1], uid="a"), "x", "best", "z")
    poor = replace(poor, problem=Problem("a", "?", "1", "t", rubric))
    (request,) = next_wave(waved([poor, make_group([1, 0], uid="b")], 1, plan), plan)
    assert (request.place, request.count, str(request.condition)) == (0, 1, "refinement")
    assert request.suffix == "\nImprove this:\nbest\n- be short\n- be right"
    better = make_group([0.9], uid="a", condition=["refinement"], prompt=[9])
    (merged,) = plan.second.merge([poor], [request], [better])
    assert merged.rewards.tolist() == [0.2, 0.5, 0.9]
    assert plan.second.merge([poor], [request], [make_group([0.5], uid="a")]) == [poor]
    (plain,) = with_plain_prompts([merged], {"a": np.arange(4)})
    assert [t.prompt_length for t in plain.trajectories] == [2, 2, 4] and plan.second.trains_plain
    assert next_wave(waved([poor], 2, plan), plan) == []


def test_rank_grpo():
    """Positions against positions: two items and three, the third beyond what was asked for."""
    advantage = method(advantage={"kind": "positions", "items": 2, "overflow": 0.5}).advantage
    found = advantage.by_position([np.array([1.0, 0]), np.array([0.0, 0, 1]), np.array([0.5])])
    close(found[0], [1, 0])
    close(found[1], [-1, 0, -0.5])
    close(found[2], [0])
    group = make_group([1, 0], lengths=[4, 4])
    turns = (Turn(2, 4, "a"), Turn(5, 6, "b"))
    group = replace(
        group,
        trajectories=tuple(replace(t, turns=turns) for t in group.trajectories),
        verdicts=tuple(replace(v, turn_rewards=pay) for v, pay in zip(group.verdicts, [(0, 1), (0, 0)], strict=True)),
    )
    (first, second) = train_rows([group], method(advantage="positions"), AlgoState())
    close(first.advantages, [0, 0, 0, 0, 0, 0.707106])
    close(second.advantages, -first.advantages)


def test_think_tuning():
    """Half of a group's failures continue after feedback, which trains with a weight of its own."""
    plan = method(plan={"second": {"kind": "feedback", "share": 0.5}}).plan
    problem = Problem("p", "?", "1", "t", {"hints": ["look again", "so"]})
    group = replace(saying(make_group([0, 1, 0, 0], tokens=[[7, 8, 9]] * 4), "a", "b", "c", "d"), problem=problem)
    requests = next_wave(waved([group], 1, plan, thought=lambda t: 2), plan)
    assert [(r.prefix, r.prefix_text, str(r.condition)) for r in requests] == [
        ((7, 8), "\nWait: look again\n", "feedback")
    ] * 2
    with given({"tutor": lambda problem, attempt: f"why {attempt}?"}):
        taught = method(plan={"second": {"kind": "feedback", "teacher": "tutor", "share": 0.3}}).plan
        (request,) = next_wave(waved([group], 1, taught), taught)
        assert request.prefix_text == "\nWait: why a?\n"
    assert next_wave(waved([replace(group, problem=replace(problem, extra={}))], 1, plan), plan) == []
    made = make_group([1], lengths=[6], condition=["feedback"])
    masked = np.array([0, 0, 0, 0, 0, 0, 1, 1], bool)  # prompt 2, prefix 2, feedback 2, continued 2
    (whole,) = made.trajectories
    result = replace(made, trajectories=(replace(whole, policy_mask=masked, versions=np.where(masked, 0, -1)),))
    (merged,) = plan.second.merge([group], requests[:1], [result])
    assert [str(t.condition) for t in merged.trajectories] == ["", "", "", "feedback"]
    assert merged.rewards.tolist() == [1, 0, 0, 1]
    last = merged.trajectories[-1]
    assert last.policy_mask.tolist() == [False] * 4 + [True] * 4
    config = method(4, weights={"factors": [{"kind": "feedback", "weight": 0.25}]})
    row = train_rows([merged], config, AlgoState())[-1]
    close(row.weights / row.weights.max(), [0, 0, 0, 0, 0.25, 0.25, 1, 1])
    with pytest.raises(ConfigError, match=r"feedback trains tokens that were not sampled"):
        read_config("methods/think_tuning.yaml", "--surrogate.old_logprobs=recorded")


def test_the_drift_of_a_tracker_is_that_of_its_remembered_samples():
    """Mean |change| of the log-probabilities of a problem's last sample, under the parameters before the update."""
    config, ran = read_config("methods/spo.yaml"), []

    class Scored(GroupLearner):
        def on_mesh(self, rows, temperature, extra=()):
            return SimpleNamespace(packed=list(rows))

        def score(self, params, groups, temperature):
            trajectories = [t for group in groups for t in group.trajectories]
            return Scores([t.logprobs + np.float32(params) * t.policy_mask for t in trajectories])

    learner = Scored(config, Learner(ModelConfig()), None)
    learner.learner.score_batch = lambda policy, batch: ran.append(batch)
    group, run = make_group([1], uid="a"), RunState(SimpleNamespace(params=-0.02), 0.0, None, initial_state(config))
    assert learner.drift([group], run) == {} and ran == [[]], "compiled in the first step, on nothing"
    run.method = next_state([group], [group], config, run.method)
    assert learner.drift([group, make_group([1], uid="b")], run) == {"a": pytest.approx(0.02, abs=1e-6)}
    plain = Scored(read_config("methods/grpo.yaml"), Learner(ModelConfig()), None)
    assert plain.drift([group], run) == {}


def trajectories(groups):
    return [t for group in groups for t in group.trajectories]
