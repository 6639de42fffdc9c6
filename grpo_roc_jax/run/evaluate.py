"""Evaluation of a policy on held-out problems, by the same engine, executor and verifier as training."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from grpo_roc_jax.config import Config
from grpo_roc_jax.data.pipeline import eval_problems
from grpo_roc_jax.method.planning import HIGH, LOW, RewardTokens, check_separation, reward_goal
from grpo_roc_jax.method.shaping import prompt_suffix
from grpo_roc_jax.record.accuracy import eval_metrics, summarize
from grpo_roc_jax.rollout.publish import SamplerParams
from grpo_roc_jax.rollout.records import RunOptions
from grpo_roc_jax.run.components import Components
from grpo_roc_jax.run.sample import ScoredRollouts, sample_groups
from grpo_roc_jax.settings.cli import ConfigError
from grpo_roc_jax.types import PLAIN, Condition, Metrics, Problem


def evaluate_policy(
    components: Components,
    sampler: SamplerParams,
    problems: Sequence[Problem],
    samples: int,
    *,
    step: int = 0,
    temperature: float | None = None,
) -> tuple[float, Metrics, ScoredRollouts]:
    """(avg@samples over all problems, metrics by source, the scored rollouts).

    Args:
        components: Of the run.
        sampler: From `engine.publish`.
        problems: Held out from training.
        samples: Rollouts for each problem.
        step: Of training; evaluation draws from random streams of its own.
        temperature: Instead of `sampling.temperature`; 0 is greedy.
    """
    condition, suffix = prompt_end(components.config, step)
    extras = {"temperature": temperature, "condition": condition, "suffix": suffix}
    sampled = sample_groups(components, sampler, problems, samples, RunOptions(step, "evaluate"), **extras)
    table = summarize(sampled.groups, samples, sampled.removed)
    return table["all"][f"avg@{samples}"], eval_metrics(table), sampled


def reward_token(config: Config) -> tuple[Condition, str]:
    """(condition, end of the prompt) of evaluation: by default the high reward token, for policies trained with one."""
    tokens = config.plan.condition
    if isinstance(tokens, RewardTokens):
        condition, form = {"high": HIGH, "low": LOW, "none": PLAIN}[tokens.evaluate], tokens.form
    else:
        form = config.sft.reward_tokens
        condition = PLAIN if form == "none" else HIGH
    return condition, reward_goal(condition, form)


def prompt_end(config: Config, step: int) -> tuple[Condition, str]:
    """(condition, end of the prompt) of evaluation after `step` training steps: reward token and token budget."""
    condition, goal = reward_token(config)
    return condition, goal + prompt_suffix(config.shaping, step)


def check_reward_tokens(components: Components, trained: Any) -> list[str]:
    """Lines on how the reward tokens change held-out success before training; none for methods without them.

    Args:
        components: Engine, executor, chat, scorer, configuration.
        trained: Parameters of the training state after the supervised stage.

    Raises:
        ConfigError: Success under the two differs by less than `plan.condition.separation`.
    """
    config, tokens = components.config, components.config.plan.condition
    if not isinstance(tokens, RewardTokens) or not tokens.separation or not config.steps:
        return []
    sampler, problems = components.engine.publish(components.full(trained), 0), eval_problems(config.data)
    rates = []
    for condition in (HIGH, LOW):
        extras = {"condition": condition, "suffix": reward_goal(condition, tokens.form)}
        options = RunOptions(0, "evaluate")
        sampled = sample_groups(components, sampler, problems, config.eval.samples, options, **extras)
        correct = [group.correct for group in sampled.groups if group.size]
        rates.append(float(np.mean(np.concatenate(correct))) if correct else 0.0)
    try:
        check_separation(*rates, tokens.separation)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return [f"held-out success {rates[0]:.3f} under the high reward token, {rates[1]:.3f} under the low one"]
