"""Rewards of several answers and of criteria: their formulas against vectors."""

import subprocess
import sys
from dataclasses import replace

import pytest

from grpo_roc_jax.reward.config import RewardConfig
from grpo_roc_jax.reward.graded import Criteria, SeveralAnswers, rubric_reward
from grpo_roc_jax.reward.score import make_scorer
from grpo_roc_jax.settings.callables import given
from grpo_roc_jax.types import Problem
from tests.helpers.method_groups import close, make_group, saying


def test_several_answers():
    """Some of the right answers pay in part, a wrong one among them pays nothing (TW-GRPO)."""
    pay = SeveralAnswers().function(RewardConfig())
    answers = ["b,a , C", "a", "a,d", "", "none"]
    replies = [f"</reason><answer>\\boxed{{{text}}}</answer>" for text in answers]
    group = saying(make_group([0] * 5), *replies)
    close(pay(Problem("p", "?", "A,B,C", "t"), group.trajectories), [1, 1 / 3, 0, 0, 0])


def test_names_of_rewards_are_known_without_the_configuration_of_a_run():
    code = "import grpo_roc_jax as g; print(*map(type, g.RewardConfig(functions=['criteria', 'mine']).functions))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Criteria" in done.stdout and "FunctionReward" in done.stdout


def test_criteria():
    """The vector of RGR-GRPO's rubric, rules of weight 1, and a judge of the user's."""
    close(rubric_reward([3, 2, 1], [1, 0, 1]), 0.666667)
    items = [{"text": "short", "weight": 3}, {"text": "polite", "weight": 2}, "Sums"]
    problem = Problem("p", "?", "1", "t", {"rubric": items})
    group = saying(make_group([0, 0]), "a SHORT one with sums", "no")
    close(Criteria().function(RewardConfig())(problem, group.trajectories), [0.666667, 0])
    both = Criteria(rules=("one",)).function(RewardConfig())
    close(both(problem, group.trajectories), [5 / 7, 0])
    for extra, paid in (({}, [0, 0]), ({"rubric": None}, [0, 0]), ({"rubric": "short"}, [1, 0])):
        assert Criteria().function(RewardConfig())(replace(problem, extra=extra), group.trajectories) == paid
    nulls = [{"text": "short", "weight": None}, None, {"text": "polite", "weight": 1}]  # as parquet fills them in
    assert Criteria().criteria(replace(problem, extra={"rubric": nulls})) == (["short", "polite"], [1.0, 1.0])
    for wrong, message in (
        ([{"weight": 1}], "criterion 0 of 'p' is .*must have a `text`"),
        ([{"text": "a", "weight": 1}, {"text": "b", "weight": -1}], "sum must be above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            Criteria().criteria(replace(problem, extra={"rubric": wrong}))
    with given({"long": lambda criterion, problem, reply: float(len(reply) > 3)}):
        assert Criteria(judge="long").function(RewardConfig())(problem, group.trajectories) == [1, 0]
    with pytest.raises(ValueError, match=r"judge = 'nowhere' is not a function"):
        make_scorer(RewardConfig(functions=(Criteria(judge="nowhere"),)))
