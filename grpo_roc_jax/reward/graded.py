"""Rewards that read the policy's text: partial credit for several answers, and criteria under a judge."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from grpo_roc_jax.reward.answer import find_answer
from grpo_roc_jax.reward.config import Reward, RewardConfig, RewardFunction
from grpo_roc_jax.settings.callables import resolve
from grpo_roc_jax.settings.options import Positive, kind, settings
from grpo_roc_jax.types import Problem, Trajectory


@settings
class GradedReward(Reward):
    """A reward function with settings."""

    timeout_s: ClassVar[float] = 60.0

    def function(self, config: RewardConfig) -> RewardFunction:
        """(problem, trajectories) -> a number for each trajectory."""
        raise NotImplementedError


def final_answers(trajectories: Sequence[Trajectory], config: RewardConfig) -> list[str]:
    """The final answer of each trajectory; empty without one."""
    texts = [[turn.text for turn in trajectory.turns] for trajectory in trajectories]
    lenient = config.extraction == "lenient"
    return [find_answer(turns, tag=config.answer_tag, lenient=lenient).answer or "" for turns in texts]


@kind("several_answers")
class SeveralAnswers(GradedReward):
    """The share of the right answers that are given, 0 with a wrong one among them (TW-GRPO, arXiv:2505.24718)."""

    separator: str = ","
    """Text between the answers, in the reference and in the reply."""

    def function(self, config: RewardConfig) -> RewardFunction:
        def pay(problem: Problem, trajectories: Sequence[Trajectory]) -> list[float]:
            right, given = self.choices(problem.answer), map(self.choices, final_answers(trajectories, config))
            return [len(some) / len(right) if some and some <= right else 0.0 for some in given]

        return pay

    def choices(self, text: str) -> set[str]:
        """The answers in a text, without case and spaces around them."""
        return {part.strip().casefold() for part in text.split(self.separator)} - {""}


@kind("criteria")
class Criteria(GradedReward):
    """sum w c / sum w over criteria c that a judge finds met: rules for all problems (AutoRule, arXiv:2506.15651), or
    the rubric of each problem (RGR-GRPO, arXiv:2511.12344)."""

    rules: tuple[str, ...] = ()
    """Criteria of every problem, each of weight 1."""
    column: str = "rubric"
    """Column of the data with further criteria of a problem: a list of texts, or of mappings with `text` and
    `weight`."""
    timeout_s: Positive = 60.0
    """Wall-clock seconds to judge a group; if it takes longer, its trajectories leave the group."""
    judge: str = ""
    """Function of (criterion, problem, reply) -> 0..1, such as a call of a language model. Empty: whether the reply
    contains the criterion, a stand-in without judgement."""

    def function(self, config: RewardConfig) -> RewardFunction:
        judge = resolve("reward.functions.criteria.judge", self.judge) or contains

        def pay(problem: Problem, trajectories: Sequence[Trajectory]) -> list[float]:
            replies = ["\n".join(turn.text for turn in trajectory.turns) for trajectory in trajectories]
            texts, weights = self.criteria(problem)
            return [rubric_reward(weights, [judge(text, problem, reply) for text in texts]) for reply in replies]

        return pay

    def criteria(self, problem: Problem) -> tuple[list[str], list[float]]:
        """(texts, weights) for a problem."""
        every = [item for item in (*self.rules, *problem.listed(self.column)) if item is not None]
        items = [item if isinstance(item, Mapping) else {"text": item} for item in every]
        for index, item in enumerate(items):
            if item.get("text") is None:
                raise ValueError(f"criterion {index} of {problem.uid!r} is {dict(item)!r:.80}; must have a `text`")
        weights = [1.0 if item.get("weight") is None else float(item["weight"]) for item in items]
        if items and not sum(weights) > 0:
            raise ValueError(f"the weights of the criteria of {problem.uid!r} are {weights}; their sum must be above 0")
        return [str(item["text"]) for item in items], weights


def rubric_reward(weights: Sequence[float], passed: Sequence[float]) -> float:
    """sum w c / sum w; 0 without criteria."""
    return float(np.dot(weights, passed) / np.sum(weights)) if len(weights) else 0.0


def contains(criterion: str, problem: Problem, reply: str) -> float:
    """A stand-in for a judge: 1 where the criterion is a part of the reply, whatever the case of its letters."""
    return float(criterion.casefold() in reply.casefold())
