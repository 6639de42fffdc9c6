"""Code shared by the objectives that depend on current scores: DisCO, DRPO, REBEL, Reg-GRPO.

They maximize J(s) of a group's scores s. Their gradient is that of sum_i c_i s_i with c = dJ/ds held fixed, so a
scoring pass right before the update turns them into advantages of a loss that is linear in the score, and the loss
keeps its one form. `tests/contrib/methods/test_advantage.py` compares every c with finite differences.
"""

from typing import ClassVar

import numpy as np

from grpo_roc_jax.method.advantage import Advantage
from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.part import MethodBatch
from grpo_roc_jax.settings.options import NotNegative, settings


@settings
class ScoreBased(Advantage):
    """Coefficients of an objective of current scores, so that the loss is -(1/P) sum over problems of J."""

    needs_scores = True
    follows_policy = True

    average: ClassVar[bool] = False
    """Whether a score is the mean log-probability of a trajectory; else it is the sum of its log-ratios."""

    def coefficients(self, scores: np.ndarray, rewards: np.ndarray, features: Features) -> np.ndarray:
        """float64[G]: dJ/ds of one group; rewards after shaping."""
        raise NotImplementedError

    def tokens(self, batch: MethodBatch) -> list[np.ndarray]:
        """With mean scores, `weights.normalizer` sequence_mean gives the 1/n_i; with summed ones, sequence_sum does.
        Both divide by B trajectories, hence the factor B / P."""
        scores = iter(self._scores(batch)[0])
        scale = live_rows(batch) / len(batch.groups)
        out: list[np.ndarray] = []
        for group, features, rewards in zip(batch.groups, batch.features, batch.rewards, strict=True):
            group_scores = np.array([next(scores) for _ in group.trajectories])
            c = self.coefficients(group_scores, rewards, features)
            out += [np.full(t.length, a * scale, np.float32) for t, a in zip(group.trajectories, c, strict=True)]
        return out

    def _scores(self, batch: MethodBatch) -> tuple[list[float], float]:
        """(score of each trajectory, summed drift of log-probabilities since sampling, in nats)."""
        values, drift = [], 0.0
        for trajectory, mask, now in zip(batch.trajectories, batch.masks, batch.scores, strict=True):
            summed = float(np.sum(now, where=mask, dtype=np.float64))
            change = summed - float(np.sum(trajectory.logprobs, where=mask, dtype=np.float64))
            drift -= change
            values.append(summed / max(np.count_nonzero(mask), 1) if self.average else change)
        return values, drift


@settings
class Constrained(ScoreBased):
    """Mean scores under a constraint on the divergence from the sampling policy (DisCO, arXiv:2505.12366)."""

    average = True

    kl_delta: NotNegative = 1e-4
    """Divergence, in nats, from which the constraint acts."""
    kl_beta: NotNegative = 1e3
    """Strength of the constraint."""

    def tokens(self, batch: MethodBatch) -> list[np.ndarray]:
        """The coefficients with the penalty f KL added, where f = max(0, kl_beta (KL - kl_delta)) is held fixed and KL
        = mean_t (log p_old - log p).

        The penalty adds f / N to each of N tokens, divided by the token's weight 1 / (B n_i), since the loss multiplies
        by it.
        """
        counts = [np.count_nonzero(mask) for mask in batch.masks]
        tokens = max(sum(counts), 1)
        push = max(0.0, self.kl_beta * (self._scores(batch)[1] / tokens - self.kl_delta)) * live_rows(batch)
        return [a + np.float32(push * n / tokens) for a, n in zip(super().tokens(batch), counts, strict=True)]


def live_rows(batch: MethodBatch) -> int:
    """Trajectories with a token that trains; at least 1."""
    return max(sum(bool(mask.any()) for mask in batch.masks), 1)


def contrast(scores: np.ndarray, correct: np.ndarray, positive: np.ndarray | float, tau: float) -> np.ndarray:
    """`positive` for successes, -softmax(s / tau) over the failures; zeros for a group of one kind."""
    out = np.zeros(len(scores))
    if not correct.any() or correct.all():
        return out
    out[correct] = positive
    shares = np.exp((scores[~correct] - scores[~correct].max()) / tau)
    out[~correct] = -shares / shares.sum()
    return out
