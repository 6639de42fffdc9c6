"""XRPO: rollouts where the interval of the mean reward shrinks most, solved problems as examples for failed ones, extra
advantage for unlikely successes. Source: arXiv:2510.06672.

Not from the paper, whose values were not available: the weight of the bonus, the measure of similarity, the number of
remembered solutions.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.special import stdtrit

from grpo_roc_jax.method.advantage import Adjustment
from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.planning import Budget, SecondWave, Wave, best_text, failed_places, hand_out
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.options import AtLeast1, AtLeast2, Count, InnerShare, NotNegative, kind
from grpo_roc_jax.types import Condition, Group, RolloutRequest, condition_kind

EXAMPLES = condition_kind("examples", helped=True)
"""Condition of rollouts after solved problems."""


@kind("half_width")
class HalfWidth(Budget):
    """A pilot, then where the interval of the mean reward shrinks most, at equal total (XRPO, arXiv:2510.06672)."""

    pilot: AtLeast2 = 4
    """Rollouts per problem in the pilot; one would have no spread."""
    alpha: InnerShare = 0.05
    """1 - alpha is the level of the interval."""
    bonus: NotNegative = 0.1
    """Factor on an extra gain sqrt(log total / n) for little sampled problems; 0 is off."""
    most: AtLeast1 = 128
    """Most rollouts of a problem."""

    waves = 1

    def check(self, config: Any) -> None:
        sampled = config.resample.sampled(config.group.size)
        if not self.pilot < sampled:
            raise ValueError(
                f"plan.budget half_width: pilot = {self.pilot} of {sampled} rollouts per problem leaves nothing to "
                "allocate; lower the pilot, or choose plan.budget uniform"
            )

    def first(self, wave: Wave) -> np.ndarray:
        return np.full(len(wave.problems), self.pilot)

    def later(self, wave: Wave) -> list[RolloutRequest]:
        """What the pilot leaves of count * P rollouts."""
        spreads = np.array([g.rewards.std(ddof=1) if g.size > 1 else 0.0 for g in wave.groups])
        total, high = wave.count * len(wave.groups), max(self.most, wave.count)
        counts = half_width_counts(spreads, self.pilot, total, high, self.alpha, self.bonus)
        return [
            RolloutRequest(wave.problems[i], i, int(n) - self.pilot) for i, n in enumerate(counts) if n > self.pilot
        ]

    def largest(self, count: int, problems: int) -> int:
        return min(max(self.most, count), count * problems - min(2, count) * (problems - 1))


@kind("examples")
class Examples(SecondWave):
    """Problems failed by every rollout again, after solved problems of the batch and of earlier steps (XRPO,
    arXiv:2510.06672)."""

    count: AtLeast1 = 2
    """Solved problems shown."""
    remembered: Count = 64
    """Solved problems of earlier steps to choose from, newest first; 0 takes those of the batch only."""

    def next(self, wave: Wave) -> list[RolloutRequest]:
        if wave.number > 1:
            return []
        solved = {**recalled(wave.state), **solutions(wave.groups)}
        requests = []
        for index in failed_places(wave):
            chosen = similar_examples(wave.problems[index].prompt, solved, self.count)
            text = "\n\n".join(f"{p}\n{s}" for p, s in chosen)
            if chosen:
                size, condition = wave.groups[index].size, Condition(EXAMPLES)
                requests.append(RolloutRequest(wave.problems[index], index, size, 0, condition, f"\n{text}"))
        return requests

    def merged(self, group: Group, request: RolloutRequest, result: Group) -> Group:
        return result if result.correct.any() else group

    def initial_memory(self) -> Mapping[str, np.ndarray]:
        return remembered({})

    def next_memory(
        self, sampled: Sequence[Group], trained: Sequence[Group], method: Any, state: AlgoState
    ) -> Mapping[str, np.ndarray]:
        both = solutions(sampled)
        both |= {prompt: text for prompt, text in recalled(state).items() if prompt not in both}
        return remembered(dict(list(both.items())[: self.remembered]))


@kind("novelty")
class Novelty(Adjustment):
    """A + min(max(strength (1 - eta), 0), cap A) for successes, eta = exp(s - mean s), s the mean log-probability
    (XRPO, arXiv:2510.06672); failures keep their advantage."""

    strength: NotNegative = 1.0
    """Size of the extra advantage."""
    cap: NotNegative = 1.0
    """Largest extra advantage, as a multiple of the advantage."""

    def group(self, advantages: np.ndarray, rewards: np.ndarray, features: Features) -> np.ndarray:
        eta = np.exp(features.mean_logprobs - features.mean_logprobs.mean())
        bonus = np.minimum(np.maximum(self.strength * (1 - eta), 0.0), self.cap * np.maximum(advantages, 0.0))
        return np.where(features.correct, advantages + bonus, advantages)


def half_width(count: int, spread: float, alpha: float = 0.05) -> float:
    """t(1 - alpha/2, n - 1) s / sqrt(n): half the confidence interval of a mean reward (XRPO, arXiv:2510.06672)."""
    return float(stdtrit(count - 1, 1 - alpha / 2)) * spread / count**0.5


def half_width_counts(
    spreads: np.ndarray, pilot: int, budget: int, high: int = 128, alpha: float = 0.05, bonus: float = 0.0
) -> np.ndarray:
    """int64[P]: rollouts a problem, the pilot included: the next one goes where the interval shrinks most.

    Gain h(n) - h(n + 1) + bonus sqrt(log total / n), at the spread the pilot measured (XRPO, arXiv:2510.06672).
    """
    total = max(pilot * len(spreads), 2)

    def gain(i: int, n: int) -> float:
        shrink = half_width(n, spreads[i], alpha) - half_width(n + 1, spreads[i], alpha)
        return shrink + bonus * (np.log(total) / n) ** 0.5

    return hand_out(len(spreads), budget - pilot * len(spreads), pilot, high, gain)


def solutions(groups: Sequence[Group]) -> dict[str, str]:
    """Prompt -> the policy's own text of its best rollout, for solved problems."""
    return {g.problem.prompt: best_text(g) for g in groups if g.correct.any()}


def remembered(solved: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Prompts and solutions as arrays for the method's memory."""
    texts = [text.encode() for pair in solved.items() for text in pair]
    return {
        "solved_text": np.frombuffer(b"".join(texts), np.uint8),
        "solved_ends": np.cumsum([0, *map(len, texts)], dtype=np.int64),
    }


def recalled(state: AlgoState) -> dict[str, str]:
    """Inverse of `remembered`."""
    if "solved_ends" not in state.memory:
        return {}
    text, ends = state.memory["solved_text"].tobytes(), state.memory["solved_ends"]
    texts = [text[low:high].decode() for low, high in pairwise(ends.tolist())]
    return dict(zip(texts[::2], texts[1::2], strict=True))


def similar_examples(prompt: str, solved: Mapping[str, str], count: int) -> list[tuple[str, str]]:
    """The `count` (prompt, solution) whose prompts share most words with `prompt` (Jaccard), best first; ties by text.

    The seeding of XRPO, arXiv:2510.06672; the measure of similarity is not from the paper.
    """
    words = set(prompt.split())

    def likeness(other: str) -> float:
        theirs = set(other.split())
        return len(words & theirs) / max(len(words | theirs), 1)

    ranked = sorted((p for p in solved if p != prompt), key=lambda p: (-likeness(p), p))
    return [(p, solved[p]) for p in ranked[:count]]
