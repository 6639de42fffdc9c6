"""Evaluation of a policy on held-out problems, by the same engine, executor and verifier as training."""

from collections.abc import Sequence
from typing import Any

from grpo_roc_jax.accuracy import eval_metrics, summarise
from grpo_roc_jax.rollout.collect import EVALUATION_STEP
from grpo_roc_jax.rollout.engine import SamplerParams
from grpo_roc_jax.sample import Sampled, sample_groups
from grpo_roc_jax.stages import Stages
from grpo_roc_jax.types import Metrics, Problem


def evaluate_policy(
    stages: Stages,
    sampler: SamplerParams,
    problems: Sequence[Problem],
    samples: int,
    *,
    step: int = 0,
    temperature: float | None = None,
    progress: Any = None,
) -> tuple[float, Metrics, Sampled]:
    """(avg@samples over all problems, metrics by source, what was sampled).

    Args:
        stages: Engine, executor, chat, scorer.
        sampler: From `engine.publish`.
        problems: Held out from training.
        samples: Rollouts a problem.
        step: Of training; evaluation draws from random keys of its own.
        temperature: Instead of `sampling.temperature`; 0 is greedy.
        progress: Display handed to the engine.
    """
    sampled = sample_groups(
        stages,
        sampler,
        problems,
        samples,
        step=EVALUATION_STEP + step,
        temperature=temperature,
        progress=progress,
    )
    table = summarise(sampled.groups, samples, sampled.removed)
    return table["all"][f"avg@{samples}"], eval_metrics(table), sampled
