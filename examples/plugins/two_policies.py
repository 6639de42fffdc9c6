"""M-GRPO's alignment: a main policy calls a second one a varying number of times, and both learn from one group
(arXiv:2511.13288). Rows of the second policy are duplicated or dropped to d per rollout before standardising."""

from collections.abc import Sequence

import numpy as np


def main_reward(well_formed: bool, correct: bool) -> float:
    """0.1 format + 0.9 correctness; 0 for an invalid format."""
    return 0.1 + 0.9 * correct if well_formed else 0.0


def second_reward(well_formed: bool, main_correct: bool, expert: float) -> float:
    """0.1 format + 0.4 correctness of the main policy + 0.5 expert judgement."""
    return 0.1 * well_formed + 0.4 * main_correct + 0.5 * expert


def aligned(rows: Sequence[np.ndarray], count: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Indices into each rollout's calls, `count` each: all of them and random repeats, or a random subset in order."""
    out = []
    for calls in rows:
        n = len(calls)
        if n >= count:
            out.append(np.sort(rng.permutation(n)[:count]))
        else:
            out.append(np.concatenate([np.arange(n), rng.integers(0, n, count - n)]))
    return out


def second_advantages(rewards: Sequence[np.ndarray], eps: float = 1e-6) -> list[np.ndarray]:
    """(r - mean) / (std + eps) over all aligned calls of the group, std with n."""
    pooled = np.concatenate(list(rewards))
    return [(r - pooled.mean()) / (pooled.std() + eps) for r in rewards]
