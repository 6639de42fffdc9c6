"""PS-GRPO: rollouts of several wordings of a problem, rewarded for agreeing. Source: arXiv:2510.04392 (Con-RAG).

Paraphrases come from a column of the data; `templates` stand in for them where it is missing. The paper compares texts
by BLEU or a judge; `similarity` names such a function, and the share of common words stands in for it.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.planning import Conditioning, Wave
from grpo_roc_jax.method.shaping import Shaping
from grpo_roc_jax.settings.callables import resolve
from grpo_roc_jax.settings.options import kind
from grpo_roc_jax.types import PLAIN, Condition, Problem, RolloutRequest, condition_kind

PARAPHRASE = condition_kind("paraphrase", optional=True)
"""Condition of rollouts under another wording; the level is its number."""


@kind("paraphrases")
class Paraphrases(Conditioning):
    """The rollouts of a group are shared among wordings of its problem (PS-GRPO, arXiv:2510.04392)."""

    column: str = "paraphrases"
    """Column of the data with further wordings, as a list of strings."""
    templates: tuple[str, ...] = ("Q: {prompt}", "{prompt} Answer!")
    """Wordings of problems without that column, with {prompt} for the first one."""

    resumable = False

    def requests(self, index: int, count: int, wave: Wave) -> list[RolloutRequest]:
        wordings = self.wordings(wave.problems[index])
        shares = [len(range(i, count, len(wordings))) for i in range(len(wordings))]
        return [
            RolloutRequest(problem, index, share, 0, Condition(PARAPHRASE, i) if i else PLAIN)
            for i, (problem, share) in enumerate(zip(wordings, shares, strict=True))
            if share
        ]

    def wordings(self, problem: Problem) -> list[Problem]:
        """The wordings of a problem, the problem itself first."""
        texts = problem.listed(self.column) or [t.replace("{prompt}", problem.prompt) for t in self.templates]
        return [problem, *(replace(problem, prompt=str(text)) for text in texts)]


@kind("agreement")
class Agreement(Shaping):
    """The mean similarity of an answer to those under other wordings, 0 without any (PS-GRPO, arXiv:2510.04392)."""

    similarity: str = ""
    """Function of two answers -> 0..1. Empty: the share of common words."""

    overwrites = True

    def group(self, rewards: np.ndarray, features: Features) -> np.ndarray:
        similar: Callable[[str, str], float] = resolve("shaping.similarity", self.similarity) or common_words
        out = np.zeros(features.size)
        for i in range(features.size):
            others = np.flatnonzero(features.levels != features.levels[i])
            if len(others):
                out[i] = np.mean([similar(features.replies[i], features.replies[j]) for j in others])
        return out


def common_words(first: str, second: str) -> float:
    """Words in both over words in either; 0 for two empty texts. A stand-in for BLEU or a judge."""
    first_words, second_words = set(first.split()), set(second.split())
    return len(first_words & second_words) / max(len(first_words | second_words), 1)
