"""Consistency GRPO: rollouts of several wordings of a problem, rewarded for saying much and for saying equally much.

Source: arXiv:2512.12858, known here by a summary of its formulas; the weights are this project's. The wordings are
those of `plan.condition paraphrases`: a column of the data, or templates as a stand-in for a paraphraser.
"""

from collections import Counter
from collections.abc import Callable

import numpy as np

from grpo_roc_jax.method.features import Features, flat
from grpo_roc_jax.method.shaping import Shaping
from grpo_roc_jax.settings.callables import resolve
from grpo_roc_jax.settings.options import NotNegative, kind


@kind("stability")
class Stability(Shaping):
    """a (H - min H) / (max H - min H) + b (1 - mean |H - H_j| / largest gap) for the entropy H of a text, over the
    rollouts j of other wordings (consistency GRPO, arXiv:2512.12858). Without other wordings 0."""

    helpfulness: NotNegative = 0.5
    """a: weight of saying much."""
    stability: NotNegative = 0.5
    """b: weight of saying as much as under other wordings."""
    entropy: str = ""
    """Function of a text -> its information, such as a measure by a language model. Empty: the Shannon entropy of the
    frequencies of its words, in nats."""

    overwrites = True

    def group(self, rewards: np.ndarray, features: Features) -> np.ndarray:
        measure: Callable[[str], float] = resolve("shaping.entropy", self.entropy) or word_entropy
        values = np.array([measure("\n".join(texts)) for texts in features.texts], np.float64)
        return stability_rewards(values, features.levels, self.helpfulness, self.stability)


def stability_rewards(entropies: np.ndarray, wordings: np.ndarray, helpfulness: float, stability: float) -> np.ndarray:
    """float64[G] from the entropies of the texts and the numbers of the wordings that they answer.

    The largest gap is that between texts of different wordings. If all entropies are equal, no text says more than
    others and all are stable.
    """
    other = wordings[:, None] != wordings
    if not other.any():
        return np.zeros(len(entropies))
    if flat(entropies):
        return np.full(len(entropies), float(stability))
    gaps = np.where(other, np.abs(entropies[:, None] - entropies), 0.0)
    unstable = gaps.sum(1) / other.sum(1) / (gaps.max() or 1.0)
    helpful = (entropies - entropies.min()) / np.ptp(entropies)
    return helpfulness * helpful + stability * (1 - unstable)


def word_entropy(text: str) -> float:
    """-sum p log p over the words of a text, p a word's share of them; 0 for an empty text."""
    counts = np.array(list(Counter(text.split()).values()), np.float64)
    shares = counts / counts.sum()
    return float(-(shares * np.log(shares)).sum())
