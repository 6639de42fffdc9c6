"""TEMPO: credit at the tokens where responses of a group diverge. Source: arXiv:2509.18314."""

from collections.abc import Sequence

import numpy as np

from grpo_roc_jax.method.advantage import Adjustment, Deviation, flat
from grpo_roc_jax.method.part import MethodBatch
from grpo_roc_jax.settings.options import kind


@kind("tree")
class Tree(Deviation, Adjustment):
    """Adds the change of value along shared prefixes, token by token (TEMPO, arXiv:2509.18314)."""

    def tokens(self, advantages: list[np.ndarray], batch: MethodBatch) -> list[np.ndarray]:
        rest = iter(advantages)
        for group, rewards in zip(batch.groups, batch.rewards, strict=True):
            group_values = [next(rest) for _ in group.trajectories]
            if flat(rewards):
                continue
            responses = [t.tokens[t.prompt_length :] for t in group.trajectories]
            changes = tree_differences(rewards, responses)
            for trajectory, values, change in zip(group.trajectories, group_values, changes, strict=True):
                values[trajectory.prompt_length :] += change / self.divisor(rewards)
        return advantages


def tree_differences(rewards: np.ndarray, tokens: Sequence[np.ndarray]) -> list[np.ndarray]:
    """V(prefix with token t) - V(prefix before t) for each response token, V the mean reward over the group's
    responses that start with the prefix.

    Differs from 0 only where responses part. A response that ends inside another's is a branch of its own.
    Source: TEMPO, arXiv:2509.18314. Cost O(T) for each pair of a branch and a row in it, by splitting the set of rows
    where they part.
    """
    out = [np.zeros(len(row)) for row in tokens]
    stack = [(np.arange(len(rewards)), 0)]
    while stack:
        rows, depth = stack.pop()
        depth = _parting(tokens, rows, depth)
        parent = rewards[rows].mean()
        heads: dict[int, list[int]] = {}
        for row in rows:
            if depth < len(tokens[row]):
                heads.setdefault(int(tokens[row][depth]), []).append(int(row))
        for members in heads.values():
            value = rewards[members].mean()
            for row in members:
                out[row][depth] = value - parent
            # A branch of one has the same value to its end.
            if len(members) > 1:
                stack.append((np.array(members), depth + 1))
    return out


def _parting(tokens: Sequence[np.ndarray], rows: np.ndarray, depth: int) -> int:
    """First position from `depth` on at which these rows are no longer all alike, or one of them ends."""
    first = tokens[rows[0]]
    end = len(first)
    for row in rows[1:]:
        end = min(end, len(tokens[row]))
        differ = first[depth:end] != tokens[row][depth:end]
        end = depth + int(differ.argmax()) if differ.any() else end
    return end
