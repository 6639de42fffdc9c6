"""Groups with trajectories exchanged, joined, or behind another prompt: what waves need besides requests."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from grpo_roc_jax.types import Group, Trajectory

HINT = "hint:"
"""Conditions of hinted rollouts are `hint:LEVEL`."""
EXAMPLES = "examples"
"""Rollouts behind solved problems of the batch (XRPO)."""
EXPLANATION = "explanation"
"""Rollouts that saw the answer; they train as supervised rows under the plain prompt (ExPO)."""


def joined(*parts: Group) -> Group:
    """All trajectories of these groups of one problem, in order."""
    trajectories, verdicts = (sum((getattr(part, n) for part in parts), ()) for n in ("trajectories", "verdicts"))
    return Group(parts[0].problem, trajectories, verdicts)


def replace_failures(group: Group, hinted: Group, count: int) -> Group:
    """The first `count` failures replaced by the first successes of `hinted`; fewer when there are not so many.

    Source: Scaf-GRPO, arXiv:2510.19807.
    """
    wins = np.flatnonzero(hinted.correct)[:count]
    places = np.flatnonzero(~group.correct)[: len(wins)]
    trajectories, verdicts = list(group.trajectories), list(group.verdicts)
    for place, win in zip(places, wins, strict=False):
        trajectories[place], verdicts[place] = hinted.trajectories[win], hinted.verdicts[win]
    return Group(group.problem, tuple(trajectories), tuple(verdicts))


def with_prompt(trajectory: Trajectory, prompt: np.ndarray) -> Trajectory:
    """The same response behind another prompt: log-probabilities stay those of the prompt it was sampled under.

    The ratio of Guide-GRPO (arXiv:2506.13923) is between contexts: the policy without the hint over the policy with it.
    """
    old, new = trajectory.prompt_length, len(prompt)
    shift = new - old

    def moved(values: np.ndarray, fill: float) -> np.ndarray:
        return np.concatenate([np.full(new, fill, values.dtype), values[old:]])

    return dataclasses.replace(
        trajectory,
        tokens=np.concatenate([np.asarray(prompt, trajectory.tokens.dtype), trajectory.tokens[old:]]),
        policy_mask=moved(trajectory.policy_mask, False),
        logprobs=moved(trajectory.logprobs, 0.0),
        versions=moved(trajectory.versions, -1),
        prompt_length=new,
        turns=tuple(dataclasses.replace(t, start=t.start + shift, end=t.end + shift) for t in trajectory.turns),
    )


def behind_plain_prompts(groups: Sequence[Group], prompts: Mapping[str, np.ndarray]) -> list[Group]:
    """Groups whose hinted and explaining trajectories stand behind the plain prompt of their problem.

    Args:
        groups: After selection.
        prompts: Plain prompt ids by uid; wanted for every problem with such a trajectory.
    """
    out = []
    for group in groups:
        moved = tuple(
            with_prompt(t, prompts[group.problem.uid]) if t.condition.startswith((HINT, EXPLANATION)) else t
            for t in group.trajectories
        )
        out.append(dataclasses.replace(group, trajectories=moved))
    return out
