"""Groups with trajectories replaced, joined, or put under another prompt."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from grpo_roc_jax.types import Group, Trajectory, Verdict, traits_of


def take_trajectories(group: Group, indices: Iterable[int]) -> Group:
    """The group of the trajectories with these indices, in the order of `indices`."""
    indices = list(indices)
    return Group(
        group.problem, tuple(group.trajectories[i] for i in indices), tuple(group.verdicts[i] for i in indices)
    )


def revalued(verdict: Verdict, reward: float) -> Verdict:
    """The verdict of a trajectory that is no attempt at the problem, such as a hint. It has the given reward, and the
    rewards of the single functions are removed."""
    return dataclasses.replace(verdict, reward=reward, status="wrong", channels={}, turn_rewards=())


def joined(*parts: Group) -> Group:
    """All trajectories of these groups of one problem, in order."""
    trajectories, verdicts = (sum((getattr(part, n) for part in parts), ()) for n in ("trajectories", "verdicts"))
    return Group(parts[0].problem, trajectories, verdicts)


def replace_failures(group: Group, hinted: Group, count: int) -> Group:
    """The group with its first `count` failures replaced by the first successes of `hinted`; fewer if there are fewer.

    Source: Scaf-GRPO, arXiv:2510.19807.
    """
    wins = np.flatnonzero(hinted.correct)[:count]
    places = np.flatnonzero(~group.correct)[: len(wins)]
    trajectories, verdicts = list(group.trajectories), list(group.verdicts)
    for index, win in zip(places, wins, strict=False):
        trajectories[index], verdicts[index] = hinted.trajectories[win], hinted.verdicts[win]
    return Group(group.problem, tuple(trajectories), tuple(verdicts))


def with_prompt(trajectory: Trajectory, prompt: np.ndarray) -> Trajectory:
    """The same response after another prompt. Log-probabilities remain those under the prompt it was sampled with.

    The ratio of Guide-GRPO (arXiv:2506.13923) is that of the policy without the hint to the policy with it.
    """
    old, new = trajectory.prompt_length, len(prompt)
    shift = new - old

    def moved(values: np.ndarray, fill: float) -> np.ndarray:
        return np.concatenate([np.full((new, *values.shape[1:]), fill, values.dtype), values[old:]])

    return dataclasses.replace(
        trajectory,
        tokens=np.concatenate([np.asarray(prompt, trajectory.tokens.dtype), trajectory.tokens[old:]]),
        policy_mask=moved(trajectory.policy_mask, False),
        logprobs=moved(trajectory.logprobs, 0.0),
        versions=moved(trajectory.versions, -1),
        routes=None if trajectory.routes is None else moved(trajectory.routes, -1),
        prompt_length=new,
        turns=tuple(dataclasses.replace(t, start=t.start + shift, end=t.end + shift) for t in trajectory.turns),
    )


def with_plain_prompts(groups: Sequence[Group], prompts: Mapping[str, np.ndarray]) -> list[Group]:
    """The groups with hinted, guided and explaining trajectories under the plain prompt of their problem.

    Args:
        groups: After selection.
        prompts: Plain prompt ids by uid, of every problem with such a trajectory.
    """

    def moved(trajectory: Trajectory, uid: str) -> Trajectory:
        moves = traits_of(trajectory.condition.kind).moves
        return with_prompt(trajectory, prompts[uid]) if moves else trajectory

    return [dataclasses.replace(g, trajectories=tuple(moved(t, g.problem.uid) for t in g.trajectories)) for g in groups]
