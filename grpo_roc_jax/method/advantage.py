"""Rewards of the kept groups -> advantages: the estimate of `advantage`, then its adjustments in order.

The core kind is `group`: what a baseline subtracts and a scale divides by, per group, with z-scores (GRPO) by default.
A group whose rewards are equal gets exactly 0 from every centered estimator. Other estimators, baselines, scales and
adjustments are kinds in files of `method/family/`.
"""

from collections.abc import Sequence
from dataclasses import field
from typing import ClassVar, Literal

import numpy as np

from grpo_roc_jax.method.features import Features, flat
from grpo_roc_jax.method.part import MethodBatch, Part
from grpo_roc_jax.method.shaping import custom_maps
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.callables import resolve
from grpo_roc_jax.settings.options import NotNegative, kind, settings
from grpo_roc_jax.types import Group


def deviation(values: np.ndarray, ddof: int = 1) -> float:
    """Standard deviation with n - ddof; 0 when that leaves nothing to divide by."""
    return float(np.std(values, ddof=ddof)) if len(values) > ddof else 0.0


def z_score(rewards: np.ndarray, ddof: int = 1, eps: float = 1e-6) -> np.ndarray:
    """(R - mean) / (std + eps); zeros for a flat group. Source: arXiv:2402.03300, sec. 4.1.2."""
    if flat(rewards):
        return np.zeros(len(rewards))
    return (rewards - rewards.mean()) / (deviation(rewards, ddof) + eps)


# ---- axes ----------------------------------------------------------------------------------------------------------


class Baseline(Part, axis="advantage.baseline"):
    """What is subtracted from the rewards of a group."""

    def values(self, rewards: np.ndarray, found: Features) -> np.ndarray | float:
        """The baseline of one group, which is not empty."""
        raise NotImplementedError

    def batch(self, batch: MethodBatch) -> list[np.ndarray | float]:
        """The same for all groups; override it for a baseline that reads the method's state."""
        pairs = zip(batch.rewards, batch.features, strict=True)
        return [self.values(r, found) if len(r) else 0.0 for r, found in pairs]


class Scale(Part, axis="advantage.scale"):
    """What centered rewards are divided by."""

    def group(self, rewards: np.ndarray) -> float:
        """The divisor of one group."""
        raise NotImplementedError

    def batch(self, centered: Sequence[np.ndarray], rewards: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Scaled advantages of all groups; override it for a scale over the batch."""
        return [c / self.group(r) for r, c in zip(rewards, centered, strict=True)]


class Adjustment(Part, axis="advantage.adjust"):
    """A step from advantages to advantages."""

    draws: ClassVar[bool] = False
    """Whether it draws at random."""

    def group(self, advantages: np.ndarray, rewards: np.ndarray, found: Features) -> np.ndarray:
        """float64[G] -> float64[G] for one group."""
        raise NotImplementedError

    def batch(self, advantages: Sequence[np.ndarray], batch: MethodBatch) -> list[np.ndarray]:
        """The same for all groups; override it for a step that spans the batch or reads the method's state."""
        parts = zip(advantages, batch.rewards, batch.features, strict=True)
        return [self.group(a, r, found) for a, r, found in parts]

    def tokens(self, advantages: list[np.ndarray], batch: MethodBatch) -> list[np.ndarray]:
        """float32[T] of each trajectory -> the same, for a step that tells tokens apart or can follow one that does."""
        raise NotImplementedError

    @property
    def per_token(self) -> bool:
        """Whether it has `tokens` alone, so that the advantages of a trajectory differ after it."""
        return self._overrides("tokens") and not (self._overrides("batch") or self._overrides("group"))

    def _overrides(self, name: str) -> bool:
        return getattr(type(self), name) is not getattr(Adjustment, name)

    def entropy_coefficient(self, groups: Sequence[Group], state: AlgoState) -> float | None:
        """Weight in the loss of a bonus for the policy's entropy; None if there never is one."""
        return None


class Advantage(Part, axis="advantage"):
    """Rewards of the kept groups -> advantages of their tokens."""

    def tokens(self, batch: MethodBatch) -> list[np.ndarray]:
        """float32[T] of each trajectory, groups in order."""
        raise NotImplementedError


@settings
class Estimator(Advantage):
    """An advantage per trajectory from the rewards of its group, then adjustments."""

    adjust: tuple[Adjustment, ...] = ()
    """Adjustments, in the order in which they are applied."""

    def estimate(self, batch: MethodBatch) -> list[np.ndarray]:
        """float64[G] of each group, before adjustments; reads features, rewards and state."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        late = [step.kind for step in self._divided[1] if not step._overrides("tokens")]
        if late:
            raise ValueError(
                f"advantage.adjust {late[0]} acts on whole trajectories, but {self._divided[1][0].kind} before it "
                f"tells tokens apart; list {late[0]} first"
            )

    @property
    def _divided(self) -> tuple[tuple[Adjustment, ...], tuple[Adjustment, ...]]:
        """The adjustments of trajectories, and those from the first one that tells tokens apart."""
        first = next((i for i, step in enumerate(self.adjust) if step.per_token), len(self.adjust))
        return self.adjust[:first], self.adjust[first:]

    def trajectories(self, batch: MethodBatch) -> list[np.ndarray]:
        """float64[G] of each group: one advantage per trajectory, before adjustments tell its tokens apart."""
        values = self.estimate(batch)
        for step in self._divided[0]:
            values = step.batch(values, batch)
        return values

    def tokens(self, batch: MethodBatch) -> list[np.ndarray]:
        values = [a for row in self.trajectories(batch) for a in row]
        spread = [np.full(t.length, a, np.float32) for t, a in zip(batch.trajectories, values, strict=True)]
        for step in self._divided[1]:
            spread = step.tokens(spread, batch)
        return spread


# ---- baselines and scales ------------------------------------------------------------------------------------------


@kind("mean")
class Mean(Baseline):
    """The mean of the group (GRPO, arXiv:2402.03300)."""

    def values(self, rewards: np.ndarray, found: Features) -> np.ndarray | float:
        # For equal rewards the difference is exactly 0, whatever the last bits of a mean.
        return rewards if flat(rewards) else float(rewards.mean())


@kind("leave_one_out")
class LeaveOneOut(Baseline):
    """The mean of the other trajectories of the group; a trajectory alone gets 0 (RLOO, arXiv:2402.14740)."""

    def values(self, rewards: np.ndarray, found: Features) -> np.ndarray | float:
        return rewards if flat(rewards) else (rewards.sum() - rewards) / (len(rewards) - 1)


@kind("none")
class NoBaseline(Baseline):
    """Nothing is subtracted."""

    def values(self, rewards: np.ndarray, found: Features) -> np.ndarray | float:
        return 0.0


@settings
class Deviation:
    """Settings of the kinds that divide by a standard deviation."""

    ddof: Literal[0, 1] = 1
    """1 divides by n - 1 (what TRL, verl and Tunix do), 0 by n."""
    eps: NotNegative = 1e-6
    """Added to the deviation."""

    def divisor(self, values: np.ndarray) -> float:
        """The deviation of these values plus `eps`."""
        return deviation(values, self.ddof) + self.eps


@kind("std")
class Std(Deviation, Scale):
    """The standard deviation of the group (GRPO, arXiv:2402.03300)."""

    def group(self, rewards: np.ndarray) -> float:
        return self.divisor(rewards)


@kind("batch_std")
class BatchStd(Deviation, Scale):
    """The standard deviation of all rewards of the batch (Lite PPO, arXiv:2508.08221)."""

    def batch(self, centered: Sequence[np.ndarray], rewards: Sequence[np.ndarray]) -> list[np.ndarray]:
        divisor = self.divisor(np.concatenate(list(rewards)) if rewards else np.zeros(0))
        return [c / divisor for c in centered]


@kind("none")
class NoScale(Scale):
    """Advantages keep the unit of the reward (Dr. GRPO, arXiv:2503.20783)."""

    def group(self, rewards: np.ndarray) -> float:
        return 1.0


# ---- estimators ----------------------------------------------------------------------------------------------------


@kind("group")
class GroupRelative(Estimator):
    """Reward minus baseline over scale, per group; by default the z-score of GRPO (arXiv:2402.03300)."""

    baseline: Baseline = field(default_factory=Mean)
    """What is subtracted."""
    scale: Scale = field(default_factory=Std)
    """What it is divided by."""

    def estimate(self, batch: MethodBatch) -> list[np.ndarray]:
        centered = [r - b for r, b in zip(batch.rewards, self.baseline.batch(batch), strict=True)]
        return self.scale.batch(centered, batch.rewards)


@kind("custom")
class CustomAdvantage(Estimator):
    """A function of the user's."""

    function: str = ""
    """`package.module:function`, or a name passed to `train(functions=...)`: (rewards, features, state) -> advantages
    of one group."""

    def estimate(self, batch: MethodBatch) -> list[np.ndarray]:
        function = resolve("advantage.function", self.function)
        return custom_maps(self.prefix, function, batch.rewards, batch.features, batch.state)


# ---- adjustments ---------------------------------------------------------------------------------------------------


@kind("sign_weights")
class SignWeights(Adjustment):
    """Factors on positive and negative advantages, after scaling (arXiv:2602.03452: before scaling they cancel)."""

    positive: NotNegative = 1.0
    """Factor on positive advantages."""
    negative: NotNegative = 1.0
    """Factor on the others."""

    def group(self, advantages: np.ndarray, rewards: np.ndarray, found: Features) -> np.ndarray:
        return np.where(advantages > 0, self.positive, self.negative) * advantages


@kind("whiten")
class Whiten(Adjustment):
    """Standardizes over the batch (tokens: REINFORCE++, arXiv:2501.03262; trajectories: SPO, arXiv:2509.13232)."""

    over: Literal["token", "row"] = "token"
    """Whether tokens or trajectories count equally."""
    ddof: Literal[0, 1] = 1
    """1 divides by n - 1, 0 by n."""

    def batch(self, advantages: Sequence[np.ndarray], batch: MethodBatch) -> list[np.ndarray]:
        """(A - mean) / sqrt(var + 1e-8); a batch of equal advantages gets 0."""
        values = np.concatenate([np.asarray(a, np.float64) for a in advantages]) if advantages else np.zeros(0)
        weights = np.ones(len(values))
        if self.over == "token" and len(values):
            weights = np.concatenate([found.lengths for found in batch.features]).astype(np.float64)
        return self._standardized(advantages, values, weights)

    def tokens(self, advantages: list[np.ndarray], batch: MethodBatch) -> list[np.ndarray]:
        masks = [trajectory.policy_mask for trajectory in batch.trajectories]
        own = [a[mask].astype(np.float64) for a, mask in zip(advantages, masks, strict=True)]
        each = [np.full(len(a), 1.0 if self.over == "token" else 1.0 / len(a)) for a in own if len(a)]
        return self._standardized(advantages, np.concatenate([*own, []]), np.concatenate([*each, []]))

    def _standardized(
        self, advantages: Sequence[np.ndarray], values: np.ndarray, weights: np.ndarray
    ) -> list[np.ndarray]:
        """The advantages under the statistics of these values, which count with their weights."""
        total = weights.sum()
        if total <= self.ddof or flat(values):
            return [np.zeros_like(a) for a in advantages]
        mean = weights @ values / total
        variance = weights @ (values - mean) ** 2 / (total - self.ddof)
        return [(a - mean) / np.sqrt(variance + 1e-8) for a in advantages]
