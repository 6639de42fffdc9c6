"""Groups with trajectories replaced, joined, or put under another prompt."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from grpo_roc_jax.types import Group, Problem, Trajectory, Verdict, traits_of


def take_trajectories(group: Group, indices: Iterable[int]) -> Group:
    """The group of the trajectories with these indices, in the order of `indices`."""
    pairs = [(group.trajectories[i], group.verdicts[i]) for i in indices]
    return Group(group.problem, tuple(t for t, _ in pairs), tuple(v for _, v in pairs))


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
    """The same response after another prompt, which takes the place of the first part's where a trajectory has several.
    Log-probabilities remain those under the prompt it was sampled with.

    The ratio of Guide-GRPO (arXiv:2506.13923) is that of the policy without the hint to the policy with it.
    """
    old, new = trajectory.prompt_length, len(prompt)
    shift = new - old

    def moved(values: np.ndarray, fill: float) -> np.ndarray:
        return np.concatenate([np.full((new, *values.shape[1:]), fill, values.dtype), values[old:]])

    first, *others = trajectory.parts or (0,)
    return dataclasses.replace(
        trajectory,
        tokens=np.concatenate([np.asarray(prompt, trajectory.tokens.dtype), trajectory.tokens[old:]]),
        policy_mask=moved(trajectory.policy_mask, False),
        logprobs=moved(trajectory.logprobs, 0.0),
        versions=moved(trajectory.versions, -1),
        routes=None if trajectory.routes is None else moved(trajectory.routes, -1),
        prompt_length=new,
        parts=(first + shift, *others) if trajectory.parts else (),
        turns=tuple(dataclasses.replace(t, start=t.start + shift, end=t.end + shift) for t in trajectory.turns),
    )


def as_opened(problem: Problem, opening: str) -> Problem:
    """The problem with the text of its prompt as an environment extended it, see `Trajectory.opening`."""
    return dataclasses.replace(problem, prompt=problem.prompt + opening) if opening else problem


def with_plain_prompts(groups: Sequence[Group], prompt_ids: Callable[[Problem], Sequence[int]]) -> list[Group]:
    """The groups with hinted, guided and explaining trajectories under the plain prompt of their problem, as their
    environments extended it.

    Args:
        groups: After selection.
        prompt_ids: Returns the token ids of a problem's prompt.
    """

    plain: dict[tuple[str, str], np.ndarray] = {}

    def moved(trajectory: Trajectory, problem: Problem) -> Trajectory:
        if not traits_of(trajectory.condition.kind).moves:
            return trajectory
        key = problem.uid, trajectory.opening
        if key not in plain:
            plain[key] = np.asarray(prompt_ids(as_opened(problem, trajectory.opening)), np.int32)
        return with_prompt(trajectory, plain[key])

    return [dataclasses.replace(g, trajectories=tuple(moved(t, g.problem) for t in g.trajectories)) for g in groups]
