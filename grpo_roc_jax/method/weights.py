"""Token weights: the C of loss = sum C[b,t] phi(d, A).

Masks take tokens out of the loss and of every count. The normalizer divides by what is left, over the whole optimizer
batch, so that micro-batches, packing and devices cannot change the loss. Factors scale without changing the counts.
Importance weights scale the surrogate but not the divergence from the reference.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any, Literal

import numpy as np

from grpo_roc_jax.method.divergence import k3
from grpo_roc_jax.method.part import MethodBatch, Part
from grpo_roc_jax.settings.options import AtLeast1, NotNegative, kind, settings
from grpo_roc_jax.types import Group, Trajectory


class Normalizer(Part, axis="weights.normalizer"):
    """What a token is divided by."""

    def values(self, counts: np.ndarray, rows: int, tokens: float) -> np.ndarray:
        """float64[B] for trajectories with `counts` trained tokens; `rows` trajectories have any, and `tokens` is the
        sum."""
        raise NotImplementedError

    def grouped(self, counts: np.ndarray, groups: np.ndarray) -> np.ndarray:
        """float64[B], with `groups` the group index of each trajectory. Override it if the weights depend on the
        groups."""
        rows, tokens = max(np.count_nonzero(counts), 1), max(counts.sum(), 1.0)
        return self.values(counts, rows, tokens)

    def __call__(self, counts: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
        """float64[B]: the weight of each token of a trajectory; 0 for a trajectory without trained tokens."""
        counts = np.asarray(counts, np.float64)
        return np.where(counts > 0, self.grouped(counts, np.repeat(np.arange(len(sizes)), sizes)), 0.0)


@kind("token_mean")
class TokenMean(Normalizer):
    """1 / sum n: tokens of the optimizer batch count equally (DAPO, arXiv:2503.14476; GRPO-RoC)."""

    def values(self, counts: np.ndarray, rows: int, tokens: float) -> np.ndarray:
        return np.full(len(counts), 1.0 / tokens)


@kind("sequence_mean")
class SequenceMean(Normalizer):
    """1 / (B n_i): trajectories count equally (GRPO, arXiv:2402.03300)."""

    def values(self, counts: np.ndarray, rows: int, tokens: float) -> np.ndarray:
        return 1.0 / (rows * np.maximum(counts, 1.0))


@kind("sequence_sum")
class SequenceSum(Normalizer):
    """1 / B: a sum per trajectory (LUSPO); a variant of GSPO (arXiv:2507.18071)."""

    def values(self, counts: np.ndarray, rows: int, tokens: float) -> np.ndarray:
        return np.full(len(counts), 1.0 / rows)


@kind("constant")
class Constant(Normalizer):
    """1 / (B L): a sum over a constant length (Dr. GRPO, arXiv:2503.20783). B counts every trajectory, also those that
    train no token, so that masks do not change the weight of the others."""

    length: AtLeast1 = 3000
    """L, in tokens."""

    def values(self, counts: np.ndarray, rows: int, tokens: float) -> np.ndarray:
        return np.full(len(counts), 1.0 / (len(counts) * self.length))


class Mask(Part, axis="weights.masks"):
    """Takes trajectories or tokens out of the loss and of its counts."""

    def trains(self, group: Group, rewards: np.ndarray) -> np.ndarray:
        """bool[G]: the trajectories of a group that stay in the loss; `rewards` after shaping."""
        return np.ones(group.size, bool)

    def tokens(self, masks: list[np.ndarray], advantages: list[np.ndarray], batch: MethodBatch) -> list[np.ndarray]:
        """bool[T] of each trajectory; called once the advantages are known."""
        return masks


@kind("truncated")
class Truncated(Mask):
    """Leaves truncated trajectories out; it raised truncation in arXiv:2508.20722, sec. 4.3.1."""

    def trains(self, group: Group, rewards: np.ndarray) -> np.ndarray:
        return np.array([not trajectory.truncated for trajectory in group.trajectories], bool)


class Factor(Part, axis="weights.factors"):
    """Scales token weights without changing what they are divided by."""

    def trajectories(self, batch: MethodBatch) -> np.ndarray | None:
        """float64[B]: a factor per trajectory; None for 1."""
        return None

    def tokens(self, trajectory: Trajectory, mask: np.ndarray, scores: np.ndarray | None) -> np.ndarray | None:
        """[T]: an importance weight per token of a trajectory; None for 1. A token with weight 0 is removed from the
        loss and its counts, as under a mask. `scores` are those before the first update."""
        return None

    def importance(self, batch: MethodBatch) -> list[np.ndarray | None]:
        """The importance weights of all trajectories; override it for weights that depend on the batch."""
        scores = batch.first_scores if batch.first_scores is not None else [None] * len(batch.masks)
        return [self.tokens(*parts) for parts in zip(batch.trajectories, batch.masks, scores, strict=True)]


@settings
class WeightsConfig:
    """The weight of each token in the loss."""

    normalizer: Normalizer = field(default_factory=TokenMean)
    """What a token is divided by."""
    masks: tuple[Mask, ...] = ()
    """What is left out of the loss and of its counts, in the order in which it is applied."""
    factors: tuple[Factor, ...] = ()
    """Factors that the weights are multiplied with."""


def trained_tokens(groups: Sequence[Group], rewards: Sequence[np.ndarray], masks: Sequence[Mask]) -> list[np.ndarray]:
    """bool[T] of each trajectory: the policy's tokens, or none for trajectories that a mask leaves out."""
    out = []
    for group, shaped in zip(groups, rewards, strict=True):
        stays = np.ones(group.size, bool)
        for mask in masks:
            stays &= mask.trains(group, shaped)
        for trajectory, train in zip(group.trajectories, stays, strict=True):
            out.append(trajectory.policy_mask if train else np.zeros_like(trajectory.policy_mask))
    return out


def token_weights(batch: MethodBatch, config: WeightsConfig) -> list[np.ndarray]:
    """float32[T] of each trajectory: factors per trajectory times the normalizer of the batch, 0 off the mask."""
    counts = np.array([np.count_nonzero(mask) for mask in batch.masks], np.int64)
    each = config.normalizer(counts, [group.size for group in batch.groups])
    for factor in config.factors:
        factors = factor.trajectories(batch)
        each = each if factors is None else each * factors
    return [np.multiply(mask, f, dtype=np.float32) for mask, f in zip(batch.masks, each.tolist(), strict=True)]


def importance_weights(batch: MethodBatch, factors: Sequence[Factor]) -> list[np.ndarray]:
    """float32[T] of each trajectory: the product of the importance weights of its tokens; the scalar 1 if there are
    none."""
    each = [factor.importance(batch) for factor in factors]
    token_factors = [[values[i] for values in each if values[i] is not None] for i in range(len(batch.masks))]
    return [np.prod(weights, axis=0, dtype=np.float32) for weights in token_factors]


def ratio_segments(trajectory: Trajectory, level: str) -> np.ndarray:
    """int32[T]: which tokens share an importance ratio: none, those of a turn, or all."""
    if level == "token":
        return np.arange(trajectory.length, dtype=np.int32)
    segments = np.zeros(trajectory.length, np.int32)
    if level == "turn":
        for index, turn in enumerate(trajectory.turns):
            segments[turn.start : turn.end] = index
    return segments


# ---- the gap between sampler and trainer: ratios at three levels, and their figures in the metrics -------------------
# With m = scored - recorded log-probability of a token, the ratio x is e^m (`token`), e^(sum m) of a trajectory
# (`product`) or e^(mean m) (`geometric`). The kinds of `mismatch` and `rejection` turn it into weights.


MAX_GAP = 20.0
"""Differences of log-probabilities are clamped to +-20 before exp, also summed ones, as in verl."""
LEVELS: Mapping[str, Callable[[np.ndarray], Any]] = {"token": np.asarray, "product": np.sum, "geometric": np.mean}
"""How the log-ratios of a trajectory's tokens are combined."""


def clamped(gap: np.ndarray) -> np.ndarray:
    """Log-ratios within +-20, in float64."""
    return np.clip(np.asarray(gap, np.float64), -MAX_GAP, MAX_GAP)


def ratios(gap: np.ndarray, level: str) -> np.ndarray:
    """float64[n] at level token, else [1]: the ratios of a trajectory, `gap` being m of its trained tokens."""
    return np.exp(clamped(np.atleast_1d(LEVELS[level](clamped(gap)))))


def gap_of(trajectory: Trajectory, mask: np.ndarray, scores: np.ndarray | None) -> np.ndarray:
    """float64[n]: scored minus recorded log-probability of each masked token."""
    return np.asarray(scores, np.float64)[mask] - trajectory.logprobs[mask]


def gaps_of(batch: MethodBatch) -> Iterator[np.ndarray]:
    """`gap_of` each trajectory that has a masked token."""
    parts = zip(batch.trajectories, batch.masks, batch.first_scores, strict=True)
    return (gap_of(*part) for part in parts if part[1].any())


def averages(batch: MethodBatch, measure: Callable[[np.ndarray], Mapping[str, np.ndarray]]) -> dict[str, float]:
    """Means by name over all entries that `measure` returns for the gaps of the trajectories; 0 if there are none."""
    totals = {name: np.zeros(2) for name in measure(np.zeros(1))}
    for gap in gaps_of(batch):
        for name, values in measure(gap).items():
            totals[name] += values.sum(), len(values)
    return {name: float(total / max(count, 1)) for name, (total, count) in totals.items()}


def gap_metrics(batch: MethodBatch) -> dict[str, float]:
    """Metrics of the ratios x at each level: the mean, (sum x)^2 / (n sum x^2), and the estimates k1 = -log x and k3 =
    x - 1 - log x of the divergence of the sampler from the trainer, in nats."""
    out = {}
    for level in LEVELS:

        def measure(gap: np.ndarray, level: str = level) -> dict[str, np.ndarray]:
            x = ratios(gap, level)
            return {"ratio": x, "squares": x * x, "kl_k1": -np.log(x), "kl_k3": k3(np.log(x))}

        means = averages(batch, measure)
        means["effective_sample_size"] = means["ratio"] ** 2 / (means.pop("squares") or 1.0)
        out |= {f"mismatch/{level}_{name}": value for name, value in means.items()}
    return out


@settings
class SamplerGap(Factor):
    """A weight computed from the differences between scored and recorded log-probabilities."""

    needs_scores = True
    common_metrics = staticmethod(gap_metrics)

    @property
    def label(self) -> str:
        """Name of the part in the metrics."""
        return self.kind

    def values(self, gap: np.ndarray) -> np.ndarray:
        """float64[n]: the values that the bounds apply to, one per trained token or one for the trajectory."""
        raise NotImplementedError

    def outside(self, values: np.ndarray) -> Mapping[str, np.ndarray]:
        """bool[n] by name: which values are out of bounds."""
        raise NotImplementedError

    def weight(self, values: np.ndarray) -> np.ndarray:
        """float64[n]: 0 out of bounds, else 1."""
        return np.where(np.any(list(self.outside(values).values()), axis=0), 0.0, 1.0)

    def tokens(self, trajectory: Trajectory, mask: np.ndarray, scores: np.ndarray | None) -> np.ndarray | None:
        out = np.ones(len(mask))
        if mask.any():
            out[mask] = self.weight(self.values(gap_of(trajectory, mask, scores)))
        return out

    def metrics(self, batch: MethodBatch) -> Mapping[str, float]:
        shares = averages(batch, lambda gap: self.outside(self.values(gap)))
        return {f"mismatch/{self.label}_{name}": value for name, value in shares.items()}


# ---- truncated and masked importance weights ------------------------------------------------------------------------
# TIS and MIS are as in verl (`rollout_corr_helper`), TRL and NeMo-RL; `sampler_gap` says what the ratio is at each
# level. Products decay with length, and geometric means lie close to 1, so each level needs bounds of its own.


@settings
class Bounded(SamplerGap):
    """A weight from ratios with bounds."""

    level: Literal["token", "product", "geometric"] = "token"
    """Whether the ratio is a token's, or the product or geometric mean over a trajectory."""
    low: NotNegative = 0.5
    """Lower bound, at most 1."""
    high: NotNegative = 2.0
    """Upper bound, at least 1."""

    def __post_init__(self) -> None:
        if not self.low <= self.agreement <= self.high:
            raise ValueError(
                f"weights.factors {self.kind}: low = {self.low:g}, high = {self.high:g}; must be bounds around "
                f"{self.agreement:g}, where sampler and trainer agree"
            )

    @property
    def agreement(self) -> float:
        """The value that `values` returns where sampler and trainer agree."""
        return 1.0

    @property
    def label(self) -> str:
        return f"{self.kind}_{self.level}"

    def values(self, gap: np.ndarray) -> np.ndarray:
        return ratios(gap, self.level)

    def outside(self, values: np.ndarray) -> Mapping[str, np.ndarray]:
        return {"below": values < self.low, "above": values > self.high}


@kind("truncated_is")
class TruncatedImportance(Bounded):
    """The ratio, clipped to [low, high]: truncated importance sampling (TIS)."""

    low: NotNegative = 0.0
    """Lower bound, at most 1; 0 leaves small ratios as they are."""
    normalize: bool = False
    """Divides by the mean weight of the batch: of its tokens at level token, else of its trajectories."""

    def weight(self, values: np.ndarray) -> np.ndarray:
        return np.clip(values, self.low, self.high)

    def importance(self, batch: MethodBatch) -> list[np.ndarray | None]:
        weights = super().importance(batch)
        if not self.normalize:
            return weights
        average = averages(batch, lambda gap: {"weight": self.weight(self.values(gap))})["weight"]
        return [weight / (average or 1.0) for weight in weights]


@kind("masked_is")
class MaskedImportance(Bounded):
    """The ratio within [low, high]; outside, token or trajectory leaves the loss and its counts: masked importance
    sampling (MIS); with bounds 0.5 and 5 IcePop (arXiv:2510.18855)."""

    def weight(self, values: np.ndarray) -> np.ndarray:
        return super().weight(values) * values
