"""The sampling half of a training step: publish, roll out, score, select. `learner.group_learner` is the other half."""

import time
from dataclasses import replace

import numpy as np

from grpo_roc_jax.config import Config
from grpo_roc_jax.method.compose import resample_group, subset
from grpo_roc_jax.run.policy import PolicyModel
from grpo_roc_jax.run.rollout_stream import RolloutStream
from grpo_roc_jax.run.rounds import StepSamples, WaveSampler, draw_problems, merge_rounds, run_round
from grpo_roc_jax.run.run_state import RunState
from grpo_roc_jax.run.sample import GroupSampler
from grpo_roc_jax.settings.points import reach, spoiled


def sample_step(
    config: Config, policy: PolicyModel, sampling: GroupSampler, run: RunState, stream: RolloutStream | None = None
) -> StepSamples:
    """Samples, scores and selects until the buffer holds a step's groups, or no dynamic sampling round is left. The
    groups come from the stream if there is one."""
    reach("sample")
    weights = sampling.sampler.engine.publish(policy.full(run.train.params), run.step)
    rng, plan_rng = np.random.default_rng([config.seed, run.step]), np.random.default_rng([config.seed, run.step, 2])
    rounds = []
    for index in range(1 + config.group.dynamic_sampling_rounds):
        if stream is not None:
            found = stream.next_round(run, weights)
        else:
            problems = draw_problems(config, run.stream, run.method, plan_rng)
            first = index * config.group.problems
            waves = WaveSampler(sampling, weights, step=run.step, first_place=first, partial=run.partial)
            found = run_round(config, sampling, problems, run.method, plan_rng, waves)
        begun = time.perf_counter()
        reach("select")
        selections = tuple(resample_group(group, config, rng) for group in found.groups)
        kept = [subset(g, s) for g, s in zip(found.groups, selections, strict=True) if s.kept]
        run.buffer.add(spoiled("selected", kept))
        rounds.append(replace(found, selections=selections, select_s=time.perf_counter() - begun))
        run.sampled += found.sampled
        run.partial = found.partial
        if len(run.buffer) >= config.group.problems:
            break
    return merge_rounds(rounds)
