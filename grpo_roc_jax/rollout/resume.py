"""Where a row begins: at its prompt, after a prefix, or where an earlier step cut it."""

from dataclasses import replace

import numpy as np

from grpo_roc_jax.types import RolloutRequest, Trajectory


def starting_point(row: RolloutRequest) -> Trajectory:
    """The trajectory before anything is sampled; `row` requests one rollout."""
    if row.resume is not None:
        return row.resume
    tokens = np.concatenate([row.prompt, np.asarray(row.prefix, np.int32)])
    return Trajectory(
        tokens=tokens.astype(np.int32),
        policy_mask=np.zeros(len(tokens), bool),
        logprobs=np.zeros(len(tokens), np.float32),
        versions=np.full(len(tokens), -1, np.int32),
        prompt_length=len(row.prompt),
        turns=(),
        stop="cancelled",
        sample=row.first_sample,
        condition=row.condition,
        temperature=row.temperature,
    )


def from_prompt(cut: Trajectory) -> Trajectory:
    """A cut rollout as it was before anything was sampled."""
    per_token = {name: getattr(cut, name) for name in ("tokens", "policy_mask", "logprobs", "versions", "routes")}
    kept = {name: values[: cut.prompt_length] for name, values in per_token.items() if values is not None}
    return replace(cut, **kept, turns=(), seconds=0.0)


def awaits_observation(cut: Trajectory) -> bool:
    """Whether a rollout was cut between a turn's calls and their observation."""
    return bool(cut.turns) and cut.turns[-1].end == cut.length


def open_turn_start(cut: Trajectory) -> int:
    """Where the unfinished turn of a cut rollout begins; its length where no token of that turn was sampled.

    `turns` holds finished turns alone. An observation separates the last one from the unfinished turn. Without any,
    only a prefix can precede the sampled tokens, and it belongs to the turn.
    """
    if not cut.turns:
        return cut.prompt_length
    last = cut.turns[-1].end
    sampled = np.flatnonzero(cut.policy_mask[last:])
    return last + int(sampled[0]) if len(sampled) else cut.length
