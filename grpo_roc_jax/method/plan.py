"""Which problems to draw and how many rollouts to spend on each: samplers, budgets, reward tokens, schedules.

Pure functions of success rates and a generator. `waves.py` turns them into requests; the loop executes those.
"""

import heapq
from collections.abc import Callable, Sequence

import numpy as np
from scipy.special import stdtrit

from grpo_roc_jax.method.resample import LOW_CONDITION

HIGH_CONDITION = "high_reward"
"""Condition of a rollout under the high reward token (RC-GRPO); evaluation always uses it."""


MIX = np.uint64(0x9E3779B97F4A7C15)
"""An odd constant whose products spread over 64 bits (Knuth's multiplicative hash, 2^64 over the golden ratio)."""


# Which problems.


def success_posterior(successes: np.ndarray, trials: np.ndarray) -> np.ndarray:
    """(S + 1/2) / (n + 1): a success rate that is never 0 or 1, and 1/2 for an unseen problem."""
    return (np.asarray(successes, np.float64) + 0.5) / (np.asarray(trials, np.float64) + 1)


def uncertainty_weights(values: np.ndarray, floor: float = 0.05) -> np.ndarray:
    """sqrt(v (1 - v)) + floor: problems of middling value are drawn more often (SPO, arXiv:2509.13232)."""
    return np.sqrt(np.clip(values * (1 - values), 0, None)) + floor


def hard_and_easy(rates: np.ndarray, size: int, easy_failures: float = 2.0) -> tuple[np.ndarray, np.ndarray]:
    """(indices of rarely solved problems, indices of nearly always solved ones), for positive-negative pairing.

    Rarely: 0 < p <= 1/2, lowest first. Nearly always: 1 - easy_failures / G <= p <= 1 - 1/G, highest first, so that a
    group of G holds a failure or two. Source: arXiv:2602.03452.
    """
    hard = np.flatnonzero((rates > 0) & (rates <= 0.5))
    easy = np.flatnonzero((rates >= 1 - easy_failures / size) & (rates <= 1 - 1 / size))
    return hard[np.argsort(rates[hard], kind="stable")], easy[np.argsort(-rates[easy], kind="stable")]


# How many rollouts.


def knapsack_value(count: int | np.ndarray, rate: float | np.ndarray) -> np.ndarray:
    """(1 - p^N - (1 - p)^N) p (1 - p)^2: chance of a mixed group times what one is worth (arXiv:2509.25849)."""
    return mixed_probability(count, rate) * rate * (1 - rate) ** 2


def mixed_probability(count: int | np.ndarray, rate: float | np.ndarray) -> np.ndarray:
    """1 - p^N - (1 - p)^N: the chance that N rollouts hold both a success and a failure."""
    return 1 - np.power(rate, count) - np.power(1 - np.asarray(rate), count)


def knapsack_counts(rates: np.ndarray, budget: int, low: int = 2, high: int = 128) -> np.ndarray:
    """int64[P]: rollouts a problem that maximise the summed value, low <= N <= high, sum N = budget.

    The value is concave in N, so handing out one rollout at a time by marginal gain is exact. Ties go to the problem
    with fewer rollouts, then to the one that comes first.

    Raises:
        ValueError: The budget cannot be met within low and high.
    """
    rates = np.clip(np.asarray(rates, np.float64), 1e-6, 1 - 1e-6)
    if not low * len(rates) <= budget <= high * len(rates):
        raise ValueError(
            f"{budget} rollouts for {len(rates)} problems with {low} to {high} each; between {low * len(rates)} and "
            f"{high * len(rates)} are possible"
        )
    gain = lambda i, n: float(knapsack_value(n + 1, rates[i]) - knapsack_value(n, rates[i]))  # noqa: E731
    return _greedy(len(rates), budget - low * len(rates), low, high, gain)


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

    return _greedy(len(spreads), budget - pilot * len(spreads), pilot, high, gain)


def _greedy(problems: int, extra: int, low: int, high: int, gain: Callable[[int, int], float]) -> np.ndarray:
    """Counts from `low` with `extra` more, one at a time to the largest gain."""
    counts = np.full(problems, low, np.int64)
    heap = [(-gain(i, low), low, i) for i in range(problems) if low < high]
    heapq.heapify(heap)
    for _ in range(max(extra, 0)):
        if not heap:
            break
        *_, i = heapq.heappop(heap)
        counts[i] += 1
        if counts[i] < high:
            heapq.heappush(heap, (-gain(i, int(counts[i])), int(counts[i]), i))
    return counts


# Reward tokens (RC-GRPO, arXiv:2602.03025).


def reward_conditions(count: int, high_share: float, mode: str, rng: np.random.Generator) -> tuple[str, ...]:
    """The reward token of each rollout of a group.

    `iid` draws each independently, as in the paper; `fixed` takes round(count high_share) high ones, at least one of
    each kind, shuffled.
    """
    if mode == "iid":
        high = rng.random(count) < high_share
    else:
        number = min(max(round(count * high_share), 1), count - 1)
        high = rng.permutation(count) < number
    return tuple(HIGH_CONDITION if h else LOW_CONDITION for h in high)


def reward_goal(condition: str, form: str = "token") -> str:
    """The line that a first user message ends with under a reward token; empty for the plain prompt."""
    if condition not in (HIGH_CONDITION, LOW_CONDITION):
        return ""
    return f"\n[Reward Goal: {f'<|{condition}|>' if form == 'token' else condition.replace('_', ' ')}]"


def check_separation(success_high: float, success_low: float, least: float = 0.05) -> None:
    """Refuses to begin the second stage of RC-GRPO with a policy that ignores the reward token.

    The variance that conditioning adds to a group is bounded by the gap between the two success rates
    (arXiv:2602.03025, prop. 4.3); without one the method is plain GRPO at a higher price.

    Raises:
        ValueError: With both rates, and what to do.
    """
    if success_high - success_low < least:
        raise ValueError(
            f"success is {success_high:.3f} under the high reward token and {success_low:.3f} under the low one; a gap "
            f"of at least {least} is wanted: run the reward-conditioned fine-tuning on mixed-quality traces first"
        )


# Schedules.


def linear_decay(step: int, start: float, steps: int) -> float:
    """start, falling to 0 at `steps` (the weight of ExPO's self-explanations, arXiv:2507.02834)."""
    return start * max(0.0, 1 - step / max(steps, 1))


def sampling_temperature(temperatures: Sequence[float], stage: int) -> float | None:
    """The temperature of this stage; None where none are planned."""
    return temperatures[stage] if temperatures else None


def temperature_stage(diversity: float, temperatures: Sequence[float], stage: int, target: float) -> int:
    """The next stage of a rising temperature: one up when diversity fell below its target, never down.

    Staged from low to high, since a temperature that drifts moves the ratio's reference (arXiv:2603.07777).
    """
    return min(stage + 1, len(temperatures) - 1) if diversity < target else stage


def diversity(token_rows: Sequence[np.ndarray]) -> float:
    """Share of distinct 4-grams among all 4-grams of a group's responses; 1 when no two are alike.

    Told apart by 64 bits of a hash of two exact pairs, so that responses of thousands of tokens cost milliseconds.
    """
    grams = [np.zeros(0, np.uint64)]
    for row in token_rows:
        ids = np.asarray(row).astype(np.uint64)
        pairs = (ids[:-1] << np.uint64(32)) | ids[1:]
        grams.append(pairs[:-2] * MIX + pairs[2:])
    whole = np.sort(np.concatenate(grams))  # ten times as fast as np.unique, which hashes
    return (1 + np.count_nonzero(whole[1:] != whole[:-1])) / len(whole) if len(whole) else 1.0
