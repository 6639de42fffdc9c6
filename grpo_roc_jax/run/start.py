"""The start of a run: its data, fresh parameters and an empty method memory, then the supervised stage."""

import logging
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp

from grpo_roc_jax.config import Config
from grpo_roc_jax.data.pipeline import Notes, Stream, eval_problems, fitting_problems, make_problem_stream
from grpo_roc_jax.learner.update import start_train_state
from grpo_roc_jax.method import compose
from grpo_roc_jax.record.metrics import Writer
from grpo_roc_jax.reward.score import Scorer
from grpo_roc_jax.reward.trial import made_up
from grpo_roc_jax.run.components import prompt_length
from grpo_roc_jax.run.evaluate import prompt_end
from grpo_roc_jax.run.policy import PolicyModel, at_rest, initial_state
from grpo_roc_jax.run.run_state import RunState
from grpo_roc_jax.run.sample import GroupSampler
from grpo_roc_jax.run.supervised import supervise, trace_stream
from grpo_roc_jax.settings.cli import config_errors
from grpo_roc_jax.text.chat_format import ChatFormat
from grpo_roc_jax.types import Problem

log = logging.getLogger(__name__)


@config_errors()
def problem_stream(config: Config, chat: ChatFormat, left_out: Collection[str] = ()) -> Stream[Problem]:
    """The training problems of a run, without those whose uids are in `left_out`."""
    return make_problem_stream(
        config.data,
        problems=config.group.problems,
        seed=config.seed,
        prompt_length=prompt_length(config, chat),
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        left_out=left_out,
    )


@config_errors()
def held_out(config: Config, chat: ChatFormat) -> tuple[list[Problem], Notes]:
    """(held-out problems whose prompts fit, notes on reading them)."""
    notes = Notes()
    problems = eval_problems(config.data, notes)
    ends = [text for _, text in (prompt_end(config, 0), *config.plan.condition.compared())]
    length, longest = prompt_length(config, chat, ends), config.rollout.max_prompt_tokens
    fitting = fitting_problems(problems, length, longest, config.data, notes, "held out: ")
    if problems and not fitting:
        raise ValueError("\n".join(["no held-out problem is left", *notes]))
    return fitting, notes


def data_lines(config: Config, chat: ChatFormat, scorer: Scorer | None = None) -> list[str]:
    """Reads all data of a run as its start does. Returns lines on each file. With a scorer, reward functions are tried
    too.

    Raises:
        ConfigError: A source cannot be used.
        RewardError: A reward function returns something else than it should.
    """
    stream = problem_stream(config, chat)
    lines = [*stream.notes, *held_out(config, chat)[1]]
    lines += try_rewards(scorer, chat, stream) if scorer is not None else []
    return [*lines, *trace_stream(config, chat).notes] if config.sft.steps else lines


def try_rewards(scorer: Scorer, chat: ChatFormat, stream: Stream[Problem]) -> list[str]:
    """Calls each reward function once, on two made-up trajectories of the first problem, so that errors in it show up
    before hours of training. The position of the stream does not change.

    Raises:
        RewardError: A function returns something else than it should.
    """
    if not scorer.functions:
        return []
    position = stream.get_state()
    problem = next(stream)[0]
    stream.set_state(position)
    rows = made_up(problem, chat.prompt_ids(problem), chat.raw_ids, scorer.config.answer_tag)
    return scorer.try_functions(problem, rows)


def fresh_run(config: Config, policy: PolicyModel, sampling: GroupSampler) -> RunState:
    """The state of a run before training: parameters, optimizer, data stream, the method's memory. Reward functions are
    tried first, on two made-up trajectories.

    Args:
        config: Configuration of the run.
        policy: From `make_parts`.
        sampling: From `make_parts`.

    Raises:
        ConfigError: Problems or published parameters cannot be used.
        RewardError: A reward function returns something else than it should.
    """
    chat = sampling.sampler.chat
    stream = problem_stream(config, chat)
    for line in try_rewards(sampling.scorer, chat, stream):
        log.warning("%s", line)
    run = RunState(initial_state(config, policy.model, policy.mesh), (), stream, compose.initial_state(config))
    run.reference = reference_copy(config, run)
    return run


def reference_copy(config: Config, run: RunState) -> Any:
    """A copy of the policy as its reference, if the method needs one. It must be a copy, since the update donates the
    buffers of the policy, and an update of the reference donates its own."""
    return jax.tree.map(jnp.copy, run.train.params) if compose.needs_reference(config) else ()


def cold_start(
    config: Config, policy: PolicyModel, chat: ChatFormat, run: RunState, writer: Writer | None = None
) -> None:
    """Trains a fresh run on demonstrations for `sft.steps` steps and makes the result its reference policy.

    Args:
        config: Configuration of the run.
        policy: From `make_parts`.
        chat: Chat format of its sampler.
        run: From `fresh_run`; its parameters, optimizer state and reference are replaced.
        writer: Receives metrics and notes; None discards them.
    """
    if config.sft.steps:
        run.reference = ()  # frees its memory for the supervised stage
        # The stage has moments of its own, and reinforcement learning starts with new ones.
        run.train = run.train.replace(opt_state=())
        params = supervise(config, policy, chat, run.train.params, writer or Writer([]))
        run.train = at_rest(config, start_train_state(params, policy.model, config.optim, policy.mesh, config.lora))
        run.reference = reference_copy(config, run)
