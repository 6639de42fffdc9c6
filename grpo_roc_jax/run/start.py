"""Where a run starts: its data, fresh parameters and an empty memory, then the supervised stage."""

from collections.abc import Collection

import jax
import jax.numpy as jnp

from grpo_roc_jax.config import Config
from grpo_roc_jax.data.pipeline import Notes, Stream, eval_problems, fitting_problems, make_problem_stream
from grpo_roc_jax.learner.update import start_train_state
from grpo_roc_jax.method import compose
from grpo_roc_jax.record.metrics import Writer
from grpo_roc_jax.run.components import Components, prompt_length
from grpo_roc_jax.run.policy import at_rest, initial_state
from grpo_roc_jax.run.run_state import RunState
from grpo_roc_jax.run.supervised import supervise, trace_stream
from grpo_roc_jax.settings.cli import config_errors
from grpo_roc_jax.text.chat_format import ChatFormat
from grpo_roc_jax.types import Problem


@config_errors()
def problem_stream(config: Config, chat: ChatFormat, left_out: Collection[str] = ()) -> Stream[Problem]:
    """The training problems of a run, without those of the uids `left_out`."""
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
    """(held-out problems whose prompts fit, findings of reading them)."""
    notes = Notes()
    problems = eval_problems(config.data, notes)
    length, longest = prompt_length(config, chat), config.rollout.max_prompt_tokens
    kept = fitting_problems(problems, length, longest, config.data, notes, "held out: ")
    if problems and not kept:
        raise ValueError("\n".join(["no held-out problem is left", *notes]))
    return kept, notes


def data_lines(config: Config, chat: ChatFormat) -> list[str]:
    """Reads all data of a run as its start does; what is found, file by file.

    Raises:
        ConfigError: A source cannot be used.
    """
    lines = [*problem_stream(config, chat).notes, *held_out(config, chat)[1]]
    return [*lines, *trace_stream(config, chat).notes] if config.sft.steps else lines


def fresh_run(components: Components) -> RunState:
    """The state of a run before anything was trained: parameters, optimizer, data stream, the method's memory.

    Raises:
        ConfigError: Problems or published parameters that cannot be used.
    """
    config = components.config
    stream = problem_stream(config, components.chat)
    train = initial_state(config, components.model, components.mesh)
    reference = train.params if compose.needs_reference(config) else ()
    return RunState(train, reference, stream, compose.initial_state(config))


def cold_start(components: Components, run: RunState, writer: Writer | None = None) -> None:
    """Trains a fresh run on demonstrations for `sft.steps`, and makes the result its reference policy.

    Args:
        components: Of the run.
        run: From `fresh_run`; its parameters, optimizer state and reference are replaced.
        writer: Takes metrics and notes; None drops them.
    """
    config, model, mesh = components.config, components.model, components.mesh
    if config.sft.steps:
        run.train = run.train.replace(opt_state=())  # the stage has moments of its own, and new ones follow it
        params = supervise(config, components, run.train.params, writer or Writer([]))
        run.train = at_rest(config, start_train_state(params, model, config.optim, mesh, config.lora))
    if compose.needs_reference(config):
        run.reference = jax.tree.map(jnp.copy, run.train.params)  # the update donates the policy's own buffers
