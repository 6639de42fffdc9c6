"""From the rewards of the kept groups to advantages: the estimate of `advantage`, then its adjustments in order.

The core kind is `group`: the reward minus a baseline, divided by a scale, per group; by default the z-score of GRPO. A
group whose rewards are equal gets exactly 0 from every centered estimator. Other estimators, baselines, scales and
adjustments are below, or in `contrib/methods/`.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from math import comb
from typing import Any, ClassVar, Literal

import numpy as np

from grpo_roc_jax.method.features import Features, flat
from grpo_roc_jax.method.part import MethodBatch, Part
from grpo_roc_jax.method.shaping import custom_maps
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.callables import resolve
from grpo_roc_jax.settings.options import AtLeast1, NotNegative, Share, kind, settings
from grpo_roc_jax.types import Group, Trajectory, Turn, Verdict


def deviation(values: np.ndarray, ddof: int = 1) -> float:
    """Standard deviation with divisor n - ddof; 0 if that divisor is not positive."""
    return float(np.std(values, ddof=ddof)) if len(values) > ddof else 0.0


def z_score(rewards: np.ndarray, ddof: int = 1, eps: float = 1e-6) -> np.ndarray:
    """(R - mean) / (std + eps); zeros for a flat group. Source: arXiv:2402.03300, sec. 4.1.2."""
    if flat(rewards):
        return np.zeros(len(rewards))
    rewards = np.asarray(rewards)
    return (rewards - rewards.mean()) / (deviation(rewards, ddof) + eps)


def later_sums(values: np.ndarray, discount: float) -> np.ndarray:
    """float64[n]: sum over i >= t of discount^(i - t) values[i], by repeated doubling of the summed span."""
    out, span = values.astype(np.float64), 1
    while span < len(out):
        out[:-span] += discount**span * out[span:]
        span *= 2
    return out


# ---- axes ----------------------------------------------------------------------------------------------------------


class Baseline(Part, axis="advantage.baseline"):
    """What is subtracted from the rewards of a group."""

    def values(self, rewards: np.ndarray, features: Features) -> np.ndarray | float:
        """The baseline of one nonempty group."""
        raise NotImplementedError

    def batch(self, batch: MethodBatch) -> list[np.ndarray | float]:
        """The baselines of all groups; override it for a baseline that reads the method's state."""
        pairs = zip(batch.rewards, batch.features, strict=True)
        return [self.values(r, group_features) if len(r) else 0.0 for r, group_features in pairs]


class Scale(Part, axis="advantage.scale"):
    """What centered rewards are divided by."""

    def group(self, rewards: np.ndarray) -> float:
        """The divisor of one group."""
        raise NotImplementedError

    def batch(self, centered: Sequence[np.ndarray], rewards: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Scaled advantages of all groups; override it for a scale over the batch."""
        return [c / self.group(r) for r, c in zip(rewards, centered, strict=True)]


class Adjustment(Part, axis="advantage.adjust"):
    """Maps advantages to advantages."""

    draws: ClassVar[bool] = False
    """Whether it draws at random."""
    reads_rewards: ClassVar[bool] = True
    """Whether it reads rewards, which `shaping` makes."""

    def group(self, advantages: np.ndarray, rewards: np.ndarray, features: Features) -> np.ndarray:
        """float64[G] -> float64[G] for one group."""
        raise NotImplementedError

    def batch(self, advantages: Sequence[np.ndarray], batch: MethodBatch) -> list[np.ndarray]:
        """The adjusted advantages of all groups; override it for a step over the batch or one that reads the method's
        state."""
        parts = zip(advantages, batch.rewards, batch.features, strict=True)
        return [self.group(a, r, group_features) for a, r, group_features in parts]

    def tokens(self, advantages: list[np.ndarray], batch: MethodBatch) -> list[np.ndarray]:
        """float32[T] of each trajectory -> float32[T], for a step that distinguishes tokens or can follow one that
        does."""
        raise NotImplementedError

    @property
    def per_token(self) -> bool:
        """Whether only `tokens` is overridden, so that the tokens of a trajectory can differ after this step."""
        return self._overrides("tokens") and not (self._overrides("batch") or self._overrides("group"))

    def _overrides(self, name: str) -> bool:
        return getattr(type(self), name) is not getattr(Adjustment, name)

    def entropy_coefficient(self, groups: Sequence[Group], state: AlgoState) -> float | None:
        """Weight in the loss of a bonus for the policy's entropy; None for adjustments without such a bonus."""
        return None


class Advantage(Part, axis="advantage"):
    """Maps the rewards of the kept groups to advantages of their tokens."""

    reads_rewards: ClassVar[bool] = True
    """Whether it reads the rewards that `shaping` makes. Its adjustments may read them too."""

    def check(self, config: Any) -> None:
        readers = (self, *getattr(self, "adjust", ()))
        if config.shaping and not any(part.reads_rewards for part in readers):
            raise ValueError(
                f"advantage {self.kind} does not read the reward, so shaping {config.shaping[0].kind} would not change "
                "it; leave shaping out, or choose another advantage"
            )

    def tokens(self, batch: MethodBatch) -> list[np.ndarray]:
        """float32[T] of each trajectory, groups in order."""
        raise NotImplementedError


@settings
class Estimator(Advantage):
    """An advantage per trajectory from the rewards of its group, then adjustments."""

    adjust: tuple[Adjustment, ...] = ()
    """Adjustments, in the order in which they are applied."""

    def estimate(self, batch: MethodBatch) -> list[np.ndarray]:
        """float64[G] of each group, before adjustments. Reads features, rewards and state."""
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
        """The adjustments of whole trajectories, and those from the first one on that distinguishes tokens."""
        first = next((i for i, step in enumerate(self.adjust) if step.per_token), len(self.adjust))
        return self.adjust[:first], self.adjust[first:]

    def trajectories(self, batch: MethodBatch) -> list[np.ndarray]:
        """float64[G] of each group: one advantage per trajectory, before any adjustment distinguishes tokens."""
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

    def values(self, rewards: np.ndarray, features: Features) -> np.ndarray | float:
        # If the rewards are equal the difference is exactly 0, whatever the last bits of a mean.
        return rewards if flat(rewards) else float(rewards.mean())


@kind("leave_one_out")
class LeaveOneOut(Baseline):
    """The mean of the other trajectories of the group (RLOO, arXiv:2402.14740). A group of one gets advantage 0."""

    def values(self, rewards: np.ndarray, features: Features) -> np.ndarray | float:
        return rewards if flat(rewards) else (rewards.sum() - rewards) / (len(rewards) - 1)


@kind("none")
class NoBaseline(Baseline):
    """Nothing is subtracted."""

    def values(self, rewards: np.ndarray, features: Features) -> np.ndarray | float:
        return 0.0


@settings
class Deviation:
    """Settings of the kinds that divide by a standard deviation."""

    ddof: Literal[0, 1] = 1
    """1 divides by n - 1 (what TRL, verl and Tunix do), 0 by n."""
    eps: NotNegative = 1e-6
    """Added to the deviation."""

    def divisor(self, values: np.ndarray) -> float:
        """The deviation of these values plus `eps`; 1 where both are 0, so that equal rewards stay what they are."""
        return deviation(values, self.ddof) + self.eps or 1.0


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
    """A user function."""

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

    def group(self, advantages: np.ndarray, rewards: np.ndarray, features: Features) -> np.ndarray:
        return np.where(advantages > 0, self.positive, self.negative) * advantages


@kind("whiten")
class Whiten(Adjustment):
    """Standardizes over the batch (tokens: REINFORCE++, arXiv:2501.03262; trajectories: SPO, arXiv:2509.13232)."""

    over: Literal["token", "row"] = "token"
    """Whether tokens or trajectories count equally."""
    ddof: Literal[0, 1] = 1
    """1 divides by n - 1, 0 by n."""

    def batch(self, advantages: Sequence[np.ndarray], batch: MethodBatch) -> list[np.ndarray]:
        """(A - mean) / sqrt(var + 1e-8); zeros for a batch of equal advantages."""
        values = np.concatenate([np.asarray(a, np.float64) for a in advantages]) if advantages else np.zeros(0)
        weights = np.ones(len(values))
        if self.over == "token" and len(values):
            weights = np.concatenate([f.lengths for f in batch.features]).astype(np.float64)
        return self._standardized(advantages, values, weights)

    def tokens(self, advantages: list[np.ndarray], batch: MethodBatch) -> list[np.ndarray]:
        masks = [trajectory.policy_mask for trajectory in batch.trajectories]
        masked_values = [a[mask].astype(np.float64) for a, mask in zip(advantages, masks, strict=True)]
        each = [np.full(len(a), 1.0 if self.over == "token" else 1.0 / len(a)) for a in masked_values if len(a)]
        return self._standardized(advantages, np.concatenate([*masked_values, []]), np.concatenate([*each, []]))

    def _standardized(
        self, advantages: Sequence[np.ndarray], values: np.ndarray, weights: np.ndarray
    ) -> list[np.ndarray]:
        """Standardizes the advantages by the weighted mean and variance of these values."""
        total = weights.sum()
        if total <= self.ddof or flat(values):
            return [np.zeros_like(a) for a in advantages]
        mean = weights @ values / total
        variance = weights @ (values - mean) ** 2 / (total - self.ddof)
        return [(a - mean) / np.sqrt(variance + 1e-8) for a in advantages]


# ---- OPO: the length-weighted mean, the baseline of least variance (arXiv:2505.23585) -------------------------------


@kind("length_weighted")
class LengthWeighted(Baseline):
    """sum n R / sum n: the baseline of least variance when gradient norms grow with length (OPO, arXiv:2505.23585)."""

    def values(self, rewards: np.ndarray, features: Features) -> np.ndarray | float:
        return rewards if flat(rewards) else float(features.lengths @ rewards / max(features.lengths.sum(), 1))


# ---- pass@k (arXiv:2508.10751) --------------------------------------------------------------------------------------


@kind("pass_at_k")
class PassAtK(Estimator):
    """The advantage of pass@k: a trajectory is worth the mean over the k-subsets that contain it, where a subset counts
    1 if it has a success (arXiv:2508.10751). Rewards are not read.

    With n trajectories and c failures, p = 1 - C(c, k) / C(n, k) is the mean and s = sqrt(p (1 - p)) the deviation. A
    success gets (1 - p) / s, a failure (1 - p - C(c - 1, k - 1) / C(n - 1, k - 1)) / s.
    """

    k: AtLeast1 = 2
    """k of pass@k."""
    eps: NotNegative = 1e-6
    """Added to the deviation."""

    reads_rewards = False

    def estimate(self, batch: MethodBatch) -> list[np.ndarray]:
        return [self._group(group_features.correct) for group_features in batch.features]

    def _group(self, correct: np.ndarray) -> np.ndarray:
        n, c, k = len(correct), int((~correct).sum()), self.k
        if c in (0, n) or n < k:
            return np.zeros(n)
        mean = 1 - comb(c, k) / comb(n, k)
        scale = (mean * (1 - mean)) ** 0.5 + self.eps or 1.0  # both 0: every k-subset has a success
        failure = 1 - mean - (comb(c - 1, k - 1) / comb(n - 1, k - 1) if c else 0.0)
        return np.where(correct, (1 - mean) / scale, failure / scale)


# ---- several reward channels, each through its own baseline and scale: MO-GRPO, GDPO --------------------------------
# Sources: arXiv:2509.22047 (MO-GRPO), arXiv:2601.05242 (GDPO, which standardizes the sum over the batch).


@kind("channels")
class Channels(Estimator):
    """The weighted sum of an estimate per reward channel, over the trajectories that have it (MO-GRPO,
    arXiv:2509.22047); `standardize` makes it GDPO (arXiv:2601.05242).

    It reads the channels as they come, so `shaping` must be empty.
    """

    weights: tuple[float, ...] = ()
    """Weight of each channel, in the order of `reward.functions`; empty takes the weights of the functions."""
    of: GroupRelative = field(default_factory=GroupRelative)
    """The estimate of one channel."""
    standardize: bool = False
    """Standardizes the sum over the batch (GDPO)."""
    eps: NotNegative = 1e-6
    """Added to the deviation over the batch."""

    def check(self, config: Any) -> None:
        if config.shaping:
            raise ValueError(
                "advantage channels reads reward channels as they come, but shaping changes the summed reward only: "
                "leave it out, or choose another advantage"
            )
        for weight, part in zip(self.weights, config.reward.functions, strict=False):
            if weight * part.weight < 0:
                raise ValueError(
                    f"advantage.weights has {weight:g} for {part.name}, whose weight in reward.functions is "
                    f"{part.weight:g}; must have the same sign, which says what a truncated rollout gets: a rollout "
                    "that a limit cut would gain by it"
                )

    def estimate(self, batch: MethodBatch) -> list[np.ndarray]:
        """The weighted estimate of each channel over the trajectories that have it; 0 for a trajectory without any
        channel."""
        names = list(dict.fromkeys(name for group_features in batch.features for name in group_features.channels))
        weights = self.weights or [batch.weights.get(name, 1.0) for name in names]
        if not names or len(weights) != len(names):
            raise ValueError(
                f"advantage channels found reward channels {names or 'none'} and {len(self.weights)} weights; name two "
                "or more reward.functions and give a weight each"
            )
        out = [np.zeros(group_features.size) for group_features in batch.features]
        for name, weight in zip(names, weights, strict=True):
            channel_values = [
                group_features.channels.get(name, np.full(group_features.size, np.nan))
                for group_features in batch.features
            ]
            present = [np.flatnonzero(np.isfinite(values)) for values in channel_values]
            parts = self.of.estimate(replace(batch, rewards=channel_values).only(present))
            for total, rows, part in zip(out, present, parts, strict=True):
                total[rows] += weight * part
        return self._standardized(out) if self.standardize else out

    def _standardized(self, advantages: list[np.ndarray]) -> list[np.ndarray]:
        values = np.concatenate(advantages) if advantages else np.zeros(0)
        if flat(values):
            return [np.zeros(len(a)) for a in advantages]
        return [(a - values.mean()) / (deviation(values) + self.eps) for a in advantages]


# ---- GiGPO: turns compared with those of the same problem that were taken in the same state -------------------------
# Source: arXiv:2505.10978, which groups by the observation before an action. The output of a Python tool does not show
# the variables of the interpreter, so here the state before a turn is all calls and observations so far. Interpreters
# in the same state agree in everything but values that no call has printed, such as random numbers.


State = Literal["calls", "observations", "turn"]


@kind("turns")
class TurnCredit(Adjustment):
    """A_t + omega F(G_k) for the tokens of turn k, with G_k = r_k + gamma G_(k+1) and F relative to the turns of the
    problem that were taken in the same state (GiGPO, arXiv:2505.10978). A turn whose state is unique gets nothing."""

    omega: NotNegative = 1.0
    """Weight of the advantage within a state."""
    gamma: Share = 0.95
    """Discount of the rewards of later turns."""
    state: State = "calls"
    """What makes two states equal: calls and observations so far, observations alone, or the number of the turn."""
    standardize: bool = False
    """Whether F also divides by the standard deviation."""

    def tokens(self, advantages: list[np.ndarray], batch: MethodBatch) -> list[np.ndarray]:
        rest, out = iter(advantages), []
        for group, rewards in zip(batch.groups, batch.rewards, strict=True):
            pairs = zip(group.pairs, rewards, strict=True)
            returns = [later_sums(turn_pay(t, v, reward), self.gamma) for (t, v), reward in pairs]
            for trajectory, credit in zip(group.trajectories, self.credits(group, returns), strict=True):
                values = next(rest).copy()
                for turn, turn_credit in zip(trajectory.turns, credit, strict=True):
                    values[turn.start : turn.end] += np.float32(self.omega * turn_credit)
                out.append(values)
        return out

    def credits(self, group: Group, returns: Sequence[np.ndarray]) -> list[np.ndarray]:
        """float64[turns] of each trajectory: F of its returns."""
        out = [np.zeros(len(row)) for row in returns]
        for places in same_state(group, self.state).values():
            values = np.array([returns[i][k] for i, k in places])
            if flat(values):
                continue
            relative = z_score(values) if self.standardize else values - values.mean()
            for (i, k), value in zip(places, relative, strict=True):
                out[i][k] = value
        return out

    def metrics(self, batch: MethodBatch) -> Mapping[str, float]:
        """The mean number of turns per state; at 1 states give no signal."""
        sizes = [len(places) for group in batch.groups for places in same_state(group, self.state).values()]
        return {"method/turns_per_state": float(np.mean(sizes)) if sizes else 0.0}


def turn_pay(trajectory: Trajectory, verdict: Verdict, reward: float) -> np.ndarray:
    """float64[turns]: the reward of each turn. The part of the trajectory's reward that no turn was given goes to the
    last turn."""
    pay = np.zeros(len(trajectory.turns))
    if len(pay):
        pay += verdict.turn_rewards or 0.0
        pay[-1] += reward - pay.sum()
    return pay


def same_state(group: Group, state: State) -> dict[bytes, list[tuple[int, int]]]:
    """The turns of a problem as (trajectory, turn), by the state before them."""
    turns_by_state: dict[bytes, list[tuple[int, int]]] = {}
    for i, trajectory in enumerate(group.trajectories):
        seen = hashlib.blake2b(str(trajectory.condition).encode(), digest_size=16)
        for k, turn in enumerate(trajectory.turns):
            turns_by_state.setdefault(seen.digest(), []).append((i, k))
            seen.update(json.dumps(_state_items(turn, state), sort_keys=True, default=repr).encode())
    return turns_by_state


def _state_items(turn: Turn, state: State) -> list:
    """What a turn adds to the state."""
    if state == "turn":
        return []
    calls = [[call.name, call.raw if call.fault else dict(call.arguments)] for call in turn.calls]
    return [calls if state == "calls" else [], [*(result.observation for result in turn.results), turn.reply]]


# ---- a bonus for the policy's entropy, with a coefficient that holds it near a target -------------------------------
# Source: Skywork-OR1, arXiv:2505.22312. The entropy in the loss is that of the full vocabulary under the current
# parameters, with the normalizer of the loss. The controller sees the mean of -log p over the tokens that the policy
# sampled for the step.


COEFFICIENT, ENTROPY = "entropy_coefficient", "entropy"
"""Names in the method's memory: the coefficient after the last step, and the entropy measured then."""


@kind("entropy_bonus")
class EntropyBonus(Adjustment):
    """Adds -a H to the loss where the entropy H is below its target; a rises by `step` there and falls otherwise
    (Skywork-OR1, arXiv:2505.22312). Advantages are not changed."""

    target: NotNegative = 0.2
    """Entropy in nats per token at and above which there is no bonus."""
    step: NotNegative = 1e-4
    """Change of the coefficient in a training step; 0 keeps it constant."""
    start: NotNegative = 0.0
    """Coefficient before the first step."""
    most: NotNegative = 5e-3
    """Largest coefficient."""

    def batch(self, advantages: Sequence[np.ndarray], batch: MethodBatch) -> list[np.ndarray]:
        return list(advantages)

    def entropy_coefficient(self, groups: Sequence[Group], state: AlgoState) -> float:
        coefficient, entropy = self.moved(groups, state)
        return coefficient if entropy < self.target else 0.0

    def moved(self, groups: Sequence[Group], state: AlgoState) -> tuple[float, float]:
        """(coefficient for this step, entropy of its trajectories in nats)."""
        entropy = sampled_entropy(groups)
        change = self.step if entropy < self.target else -self.step
        return float(np.clip(state.recall(COEFFICIENT, self.start) + change, 0.0, self.most)), entropy

    def next_memory(
        self, sampled: Sequence[Group], trained: Sequence[Group], method: Any, state: AlgoState
    ) -> Mapping[str, np.ndarray]:
        if not trained:
            return {}
        return {name: np.array([v]) for name, v in zip((COEFFICIENT, ENTROPY), self.moved(trained, state), strict=True)}

    def metrics(self, batch: MethodBatch) -> Mapping[str, float]:
        coefficient, entropy = self.moved(batch.groups, batch.state)
        return {"entropy/coefficient": coefficient if entropy < self.target else 0.0, "entropy/sampled": entropy}


def sampled_entropy(groups: Sequence[Group]) -> float:
    """Mean of -log p over the policy's tokens, in nats; 0 without policy tokens."""
    drawn = [t.logprobs[t.policy_mask] for group in groups for t in group.trajectories]
    values = np.concatenate([np.zeros(0), *drawn])
    return -float(values.mean()) if len(values) else 0.0
