"""MASA's self-prediction score: before solving, the policy predicts notions, pass count and length (arXiv:2510.03259).
The predictions form a group of their own, trained on these rewards."""

from collections.abc import Mapping, Sequence

import numpy as np


def notion_share(predicted: Sequence[str], in_correct: Mapping[str, int], in_wrong: Mapping[str, int]) -> float:
    """Share of the predicted notions that occur more often in correct than in wrong responses."""
    wins = [in_correct.get(n, 0) > in_wrong.get(n, 0) for n in predicted]
    return float(np.mean(wins)) if wins else 0.0


def pass_score(predicted: float, actual: float) -> float:
    """0.01^|predicted - actual| for two success rates."""
    return 0.01 ** abs(predicted - actual)


def length_score(predicted: float, correct_lengths: Sequence[int]) -> float:
    """1 strictly between the shortest and the longest correct response, else 0."""
    return float(bool(len(correct_lengths)) and min(correct_lengths) < predicted < max(correct_lengths))


def meta_reward(notions: float, passes: float, length: float) -> float:
    """Mean of the three scores."""
    return (notions + passes + length) / 3
