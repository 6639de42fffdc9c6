"""Requests -> scored groups under one policy: the part of the line that training and evaluation share."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from grpo_roc_jax.method.waves import RolloutRequest
from grpo_roc_jax.rollout.collect import Ask, collect
from grpo_roc_jax.rollout.engine import RolloutStats, SamplerParams
from grpo_roc_jax.stages import Stages
from grpo_roc_jax.text.chat import ChatFormat
from grpo_roc_jax.types import Group, Problem, Trajectory


@dataclass(frozen=True, eq=False)
class Sampled:
    """Scored rollouts of a list of requests."""

    groups: tuple[Group, ...]
    """One a request, without what could not be judged."""
    removed: tuple[tuple[Problem, Trajectory], ...]
    """Trajectories that left their group: faults of ours, cancelled, or not scored."""
    counts: dict[str, int]
    """Trajectories by verdict status, removed ones included."""
    faults: tuple[str, ...]
    """What custom reward functions did wrong, in words."""
    stats: RolloutStats


def sample_requests(
    stages: Stages,
    sampler: SamplerParams,
    problems: Sequence[Problem],
    requests: Sequence[RolloutRequest],
    *,
    step: int,
    first_index: int = 0,
    taken: Sequence[int] = (),
    progress: Any = None,
) -> Sampled:
    """Rolls the requests out and scores them.

    Args:
        stages: Engine, executor, chat, scorer.
        sampler: From `engine.publish`.
        problems: What the requests number; problem i has the random keys (step, first_index + i, sample).
        requests: At least one rollout in all.
        step: Training step, or `collect.EVALUATION_STEP` + step.
        first_index: Number of problems already sampled in this step.
        taken: Rollouts of each problem already sampled in this step, by number; empty for none.
        progress: Display handed to the engine.
    """
    next_sample = list(taken) or [0] * len(problems)
    asks = []
    for request in requests:
        prefix = (*request.prefix, *opening_ids(stages.chat, request.prefix_text))
        for _ in range(request.count):
            asks.append(
                Ask(
                    problems[request.problem],
                    first_index + request.problem,
                    next_sample[request.problem],
                    request.suffix,
                    request.condition,
                    request.temperature,
                    prefix,
                )
            )
            next_sample[request.problem] += 1
    config = stages.config.rollout
    trajectories, stats = collect(
        stages.engine,
        sampler,
        stages.chat,
        stages.executor,
        asks,
        step=step,
        seed=stages.config.seed,
        max_turns=config.max_turns,
        budget=config.max_response_tokens,
        progress=progress,
    )
    edges = accumulate((request.count for request in requests), initial=0)
    rollouts = [trajectories[low:high] for low, high in pairwise(edges)]
    scored = stages.scorer.score_all([problems[request.problem] for request in requests], rollouts)
    kept = {id(trajectory) for group in scored.groups for trajectory in group.trajectories}
    removed = [(ask.problem, t) for ask, t in zip(asks, trajectories, strict=True) if id(t) not in kept]
    return Sampled(scored.groups, tuple(removed), dict(scored.counts), scored.faults, stats)


def sample_groups(
    stages: Stages,
    sampler: SamplerParams,
    problems: Sequence[Problem],
    samples: int,
    *,
    step: int,
    first_index: int = 0,
    temperature: float | None = None,
    condition: str = "",
    suffix: str = "",
    progress: Any = None,
) -> Sampled:
    """`samples` rollouts of each problem, all alike: one group a problem.

    Args:
        stages: As in `sample_requests`, and so `sampler`, `problems`, `step`, `first_index` and `progress`.
        sampler: From `engine.publish`.
        problems: In order.
        samples: Rollouts a problem.
        step: Training step, or `collect.EVALUATION_STEP` + step.
        first_index: Number of problems already sampled in this step.
        temperature: Instead of `sampling.temperature`.
        condition: Name of the suffix in the trajectories.
        suffix: Appended to every prompt.
        progress: Display handed to the engine.
    """
    requests = [RolloutRequest(i, samples, condition, suffix, temperature) for i in range(len(problems))]
    return sample_requests(stages, sampler, problems, requests, step=step, first_index=first_index, progress=progress)


def opening_ids(chat: ChatFormat, text: str) -> tuple[int, ...]:
    """Ids of a text that the policy goes on behind, tags included; a turn's end token stays away."""
    ids = chat.turn_ids(text) if text else []
    return tuple(ids[:-1] if ids and ids[-1] == chat.end_id else ids)
