"""VSPO: further groups of valuable problems in place of groups without signal. Source: arXiv:2512.07478.

The paper's value metric balances difficulty and uncertainty; its formula and constants were not available. Taken here:
(1 - p) p (1 - p) for a success rate p. The paper's smoothing clip is the largest number of groups of one problem.
"""

from collections.abc import Sequence

import numpy as np

from grpo_roc_jax.method.advantage import flat
from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.planning import SecondWave, Wave
from grpo_roc_jax.method.shaping import Shaping
from grpo_roc_jax.settings.options import AtLeast1, kind
from grpo_roc_jax.types import Group, RolloutRequest


@kind("value")
class ValueSampling(SecondWave):
    """Groups of equal rewards are replaced by further groups of mixed problems, drawn by value (VSPO,
    arXiv:2512.07478)."""

    most: AtLeast1 = 2
    """Further groups of a problem at most."""

    def next(self, wave: Wave) -> list[RolloutRequest]:
        if wave.number > 1:
            return []
        values = np.array([task_value(float(g.correct.mean()) if g.size else 0.0) for g in wave.groups])
        drawn = capped_draw(values, len(_without_signal(wave.groups)), self.most, wave.rng)
        counts = [(int(index), wave.groups[index].size) for index in drawn]
        return [RolloutRequest(wave.problems[index], index, count) for index, count in counts]

    def merge(
        self, groups: Sequence[Group], requests: Sequence[RolloutRequest], results: Sequence[Group]
    ) -> list[Group]:
        out = list(groups)
        for index, result in zip(_without_signal(groups), results, strict=False):
            out[index] = result if result.size else out[index]
        return out


def task_value(rate: float) -> float:
    """(1 - p) p (1 - p): difficulty times the variance of an outcome."""
    return (1 - rate) * rate * (1 - rate)


def capped_draw(values: np.ndarray, count: int, most: int, rng: np.random.Generator) -> np.ndarray:
    """int64[<= count]: places drawn with probability proportional to their value, each at most `most` times."""
    if not values.any():
        return np.zeros(0, np.int64)
    places = np.repeat(np.flatnonzero(values), most)
    weights = values[places] / values[places].sum()
    return rng.choice(places, min(count, len(places)), replace=False, p=weights)


def _without_signal(groups: Sequence[Group]) -> list[int]:
    return [index for index, group in enumerate(groups) if group.size and flat(group.rewards)]


# ---- progressive rewards --------------------------------------------------------------------------------------------
# Pay by stages, each worth something only after the ones before it. Source: arXiv:2512.07478.


@kind("staged")
class Staged(Shaping):
    """sum_s w_s prod_{u <= s} pass_u: clean calls, then a well-formed answer, then a correct one; a stage pays only
    when those before it did (arXiv:2512.07478)."""

    weights: tuple[float, float, float] = (0.1, 0.2, 0.7)
    """Reward of each passed stage: clean calls, well-formed answer, correct answer."""

    overwrites = True

    def group(self, rewards: np.ndarray, features: Features) -> np.ndarray:
        passes = [features.tool_errors == 0, features.well_formed & (features.answers == 1), features.correct]
        return np.cumprod(np.stack(passes, axis=1).astype(np.float64), axis=-1) @ np.asarray(self.weights, np.float64)
