"""Problems -> scored groups under one policy: the part of the line that training and evaluation share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo_roc_jax.rollout.collect import Ask, collect
from grpo_roc_jax.rollout.engine import RolloutStats, SamplerParams
from grpo_roc_jax.stages import Stages
from grpo_roc_jax.types import Group, Problem, Trajectory


@dataclass(frozen=True, eq=False)
class Sampled:
    """Scored rollouts of a list of problems."""

    groups: tuple[Group, ...]
    """One a problem, without what could not be judged."""
    removed: tuple[tuple[Problem, Trajectory], ...]
    """Trajectories that left their group: faults of ours, cancelled, or not scored."""
    counts: dict[str, int]
    """Trajectories by verdict status, removed ones included."""
    faults: tuple[str, ...]
    """What custom reward functions did wrong, in words."""
    stats: RolloutStats


def sample_groups(
    stages: Stages,
    sampler: SamplerParams,
    problems: Sequence[Problem],
    samples: int,
    *,
    step: int,
    first_index: int = 0,
    temperature: float | None = None,
    suffix: str = "",
    progress: Any = None,
) -> Sampled:
    """Rolls out `samples` trajectories of each problem and scores them.

    Args:
        stages: Engine, executor, chat, scorer.
        sampler: From `engine.publish`.
        problems: In order; problem i has the random key (step, first_index + i, sample).
        samples: Rollouts a problem.
        step: Training step, or `collect.EVALUATION_STEP` + step.
        first_index: Number of problems already sampled in this step.
        temperature: Instead of `sampling.temperature`.
        suffix: Appended to every prompt.
        progress: Display handed to the engine.
    """
    asks = [
        Ask(problem, first_index + i, sample, suffix, temperature=temperature)
        for i, problem in enumerate(problems)
        for sample in range(samples)
    ]
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
    rollouts = [trajectories[i * samples : (i + 1) * samples] for i in range(len(problems))]
    scored = stages.scorer.score_all(problems, rollouts)
    kept = {id(trajectory) for group in scored.groups for trajectory in group.trajectories}
    removed = [(ask.problem, t) for ask, t in zip(asks, trajectories, strict=True) if id(t) not in kept]
    return Sampled(scored.groups, tuple(removed), dict(scored.counts), scored.faults, stats)
