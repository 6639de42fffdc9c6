"""GroupRank: the scores that a policy gives a group of documents, rewarded by their order and by their distribution.

Source: arXiv:2511.11653, whose reward sums recall, a ranking metric and a match of the score distributions. Its
formulas were not available: the metrics at a cutoff, the equal weights and exp(-KL) are this project's reading.
"""

import re
from collections.abc import Sequence

import numpy as np

from grpo_roc_jax.reward.config import RewardConfig, RewardFunction
from grpo_roc_jax.reward.graded import GradedReward, final_answers
from grpo_roc_jax.settings.callables import resolve
from grpo_roc_jax.settings.options import AtLeast1, kind
from grpo_roc_jax.types import Problem, Trajectory

NUMBER = re.compile(r"\d{1,6}(?:\.\d{1,6})?")


@kind("ranking")
class Ranking(GradedReward):
    """Mean of recall, NDCG and the match of distributions of the scores in an answer, one for each document; 0 for
    another number of scores (GroupRank, arXiv:2511.11653)."""

    top: AtLeast1 = 10
    """Number of documents that count in recall and NDCG."""
    judge: str = ""
    """Function of a problem -> the relevance of each of its documents, such as a call of a language model. Empty: the
    numbers of the reference answer."""

    def function(self, config: RewardConfig) -> RewardFunction:
        judge = resolve("reward.functions.ranking.judge", self.judge) or reference_scores

        def pay(problem: Problem, trajectories: Sequence[Trajectory]) -> list[float]:
            gold, answers = np.asarray(judge(problem), np.float64), map(scores_in, final_answers(trajectories, config))
            return [ranking_reward(x, gold, self.top) if len(x) == len(gold) > 0 else 0.0 for x in answers]

        return pay


def scores_in(text: str) -> np.ndarray:
    """float64[n]: the numbers of a text in order, negative ones without their sign."""
    return np.array(NUMBER.findall(text), np.float64)


def reference_scores(problem: Problem) -> np.ndarray:
    """The numbers of the reference answer."""
    return scores_in(problem.answer)


def ranking_reward(given: np.ndarray, gold: np.ndarray, top: int) -> float:
    """(recall@top + NDCG@top + exp(-KL(softmax(gold) || softmax(given)))) / 3.

    Recall is the share of the `top` most relevant documents, without irrelevant ones, among the first `top`; NDCG has
    gains 2^gold - 1. Equal scores rank the less relevant document first, so that a constant earns nothing by chance.
    """
    order, best = np.lexsort((gold, -given))[:top], np.sort(gold)[::-1][:top]
    relevant = min(int(np.count_nonzero(gold > 0)), top)
    recall = np.count_nonzero(gold[order] > 0) / relevant if relevant else 1.0
    discounts = 1 / np.log2(np.arange(2, len(best) + 2))
    # All gains are divided by 2^highest, which leaves NDCG as it is and keeps large relevances from overflowing.
    highest = max(float(best[0]), 0.0)
    gains, best_gains = (2.0 ** (values - highest) - 2.0**-highest for values in (gold[order], best))
    ideal = float(best_gains @ discounts)
    ndcg = float(gains @ discounts) / ideal if ideal else 1.0
    target, guess = log_softmax(gold), log_softmax(given)
    return (recall + ndcg + float(np.exp(-(np.exp(target) @ (target - guess))))) / 3


def log_softmax(values: np.ndarray) -> np.ndarray:
    """values - log sum exp(values)."""
    shifted = values - values.max()
    return shifted - np.log(np.exp(shifted).sum())
