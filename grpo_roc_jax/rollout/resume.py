"""Rollouts that do not begin at their prompt: with a prefix that stands already, or where an earlier step cut them."""

from collections.abc import Sequence

import numpy as np

from grpo_roc_jax.rollout.records import Rollout
from grpo_roc_jax.types import Trajectory, Turn


def prefixed(prompt: np.ndarray, prefix: Sequence[int]) -> Rollout | None:
    """A first turn whose beginning stands already, which nobody sampled; None without a prefix."""
    if not prefix:
        return None
    tokens = np.concatenate([prompt, np.asarray(prefix, np.int32)])
    n = len(tokens)
    return Rollout(
        tokens=tokens,
        policy_mask=np.zeros(n, bool),
        logprobs=np.zeros(n, np.float32),
        versions=np.full(n, -1, np.int32),
        mass=None,
        prompt_length=len(prompt),
        turns=((len(prompt), n),),
        stop="cancelled",
        seconds=0.0,
    )


def turns_behind(past: Trajectory | None) -> list[Turn]:
    """The turns that a cut rollout has behind it; the engine hands one that waits for its observation over again."""
    if past is None:
        return []
    return list(past.turns[:-1] if _waits(past) else past.turns)


def _waits(past: Trajectory) -> bool:
    """Whether the rollout was cut between a turn's calls and their observation."""
    return bool(past.turns) and past.turns[-1].end == past.length


def cut_short(past: Trajectory) -> Rollout:
    """What the engine goes on from; the turn that was open, which no turn of the trajectory tells, is its last one."""
    spans = [(turn.start, turn.end) for turn in past.turns]
    waits = _waits(past)
    if not waits:
        behind = spans[-1][1] if spans else past.prompt_length
        drawn = np.flatnonzero(past.policy_mask[behind:])
        # Before the first turn's own tokens only a prefix can stand, which belongs to the turn.
        start = behind if not spans else behind + (int(drawn[0]) if len(drawn) else past.length - behind)
        if start < past.length:
            spans.append((start, past.length))
    return Rollout(
        tokens=past.tokens,
        policy_mask=past.policy_mask,
        logprobs=past.logprobs,
        versions=past.versions,
        mass=None,
        prompt_length=past.prompt_length,
        turns=tuple(spans),
        stop="cancelled",
        seconds=past.seconds,
        waiting=waits,
    )
