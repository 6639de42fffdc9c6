"""Where a run starts: fresh parameters, a data stream and an empty memory, then the supervised stage."""

import jax
import jax.numpy as jnp

from grpo_roc_jax.data.pipeline import make_problem_stream
from grpo_roc_jax.learner.update import start_train_state
from grpo_roc_jax.method import compose
from grpo_roc_jax.record.metrics import Writer
from grpo_roc_jax.run.components import Components
from grpo_roc_jax.run.policy import at_rest, initial_state
from grpo_roc_jax.run.run_state import RunState
from grpo_roc_jax.run.supervised import supervise


def fresh_run(components: Components) -> RunState:
    """The state of a run before anything was trained: parameters, optimizer, data stream, the method's memory."""
    config = components.config
    stream = make_problem_stream(
        config.data,
        problems=config.group.problems,
        seed=config.seed,
        prompt_length=lambda problem: len(components.chat.prompt_ids(problem)),
        max_prompt_tokens=config.rollout.max_prompt_tokens,
    )
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
        params = supervise(config, components, run.train.params, writer or Writer([]))
        run.train = at_rest(config, start_train_state(params, model, config.optim, mesh, config.lora))
    if compose.needs_reference(config):
        run.reference = jax.tree.map(jnp.copy, run.train.params)  # the update donates the policy's own buffers
