"""Knapsack RL: rollouts where they are expected to teach most, at equal total. Source: arXiv:2509.25849."""

import numpy as np

from grpo_roc_jax.method.planning import Budget, Wave, hand_out, problem_rates
from grpo_roc_jax.settings.options import AtLeast1, kind


@kind("knapsack")
class Knapsack(Budget):
    """More rollouts where their expected gain is larger, at equal total (Knapsack RL, arXiv:2509.25849)."""

    least: AtLeast1 = 2
    """Fewest rollouts of a problem."""
    most: AtLeast1 = 128
    """Most rollouts of a problem."""

    def __post_init__(self) -> None:
        if self.least > self.most:
            raise ValueError(f"plan.budget {self.kind}: least = {self.least} is above most = {self.most}; lower it")

    def rates(self, wave: Wave) -> np.ndarray:
        """float64[P]: the expected success of each problem, from its own visits."""
        rows = problem_rates(wave)
        # Never 0 or 1, and 1/2 for a problem that was not seen.
        return (rows["successes"] + 0.5) / (rows["visits"] + 1)

    def first(self, wave: Wave) -> np.ndarray:
        low, high = min(self.least, wave.count), max(self.most, wave.count)
        return knapsack_counts(self.rates(wave), wave.count * len(wave.problems), low, high)

    def largest(self, count: int, problems: int) -> int:
        return min(max(self.most, count), count * problems - min(self.least, count) * (problems - 1))


def knapsack_value(count: int | np.ndarray, rate: float | np.ndarray) -> np.ndarray:
    """(1 - p^N - (1 - p)^N) p (1 - p)^2: chance of a mixed group times what one is worth (arXiv:2509.25849)."""
    mixed = 1 - np.power(rate, count) - np.power(1 - np.asarray(rate), count)
    return mixed * rate * (1 - rate) ** 2


def knapsack_counts(rates: np.ndarray, budget: int, low: int, high: int) -> np.ndarray:
    """int64[P]: rollouts of each problem that maximize the summed value, low <= N <= high, sum N = budget.

    The value is concave in N, so handing out one rollout at a time by marginal gain is exact.

    Raises:
        ValueError: The budget cannot be met within low and high.
    """
    rates = np.clip(np.asarray(rates, np.float64), 1e-6, 1 - 1e-6)
    if not low * len(rates) <= budget <= high * len(rates):
        raise ValueError(
            f"{budget} rollouts for {len(rates)} problems with {low} to {high} each; between {low * len(rates)} and "
            f"{high * len(rates)} are possible"
        )

    def gain(i: int, n: int) -> float:
        return float(knapsack_value(n + 1, rates[i]) - knapsack_value(n, rates[i]))

    return hand_out(len(rates), budget - low * len(rates), low, high, gain)
