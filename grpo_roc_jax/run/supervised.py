"""The supervised stage: demonstration traces go through the rows, packing and update of RL, with a likelihood loss."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from grpo_roc_jax.config import Config
from grpo_roc_jax.data.pipeline import Stream, make_trace_stream
from grpo_roc_jax.learner.learner import Halvings
from grpo_roc_jax.learner.pack import pack, worst_case_micro_batches
from grpo_roc_jax.learner.update import (
    ConstantRate,
    CosineDecay,
    OptimConfig,
    TrainState,
    UpdateStep,
    bind_base,
    make_update_step,
    start_train_state,
)
from grpo_roc_jax.method.planning import Conditioning, PlainPrompts
from grpo_roc_jax.method.surrogate import NegativeLogLikelihood
from grpo_roc_jax.model.sharding import row_shards, shard_batch
from grpo_roc_jax.process.points import reach
from grpo_roc_jax.process.progress import Phase, narrated, phase
from grpo_roc_jax.record.metrics import Writer
from grpo_roc_jax.reward.answer import find_answer
from grpo_roc_jax.reward.notation import decide
from grpo_roc_jax.run.policy import PolicyModel, update_settings
from grpo_roc_jax.settings.cli import config_errors
from grpo_roc_jax.text.chat_format import ChatFormat, Trace
from grpo_roc_jax.types import TrainRow


def trace_rows(traces: Sequence[Trace], chat: ChatFormat, condition: Conditioning | None = None) -> list[TrainRow]:
    """Rows whose loss is the mean negative log-likelihood of the batch's policy tokens, in nats.

    Args:
        traces: Demonstrations.
        chat: Prompt, turns and observations as ids.
        condition: Extends the prompt of each demonstration by its outcome; None adds nothing.
    """
    condition = condition or PlainPrompts()
    encoded = [encoded_trace(trace, chat, condition) for trace in traces]
    total = max(sum(int(mask.sum()) for _, mask in encoded), 1)
    return [supervised_row(tokens, mask, 1.0 / total) for tokens, mask in encoded]


def encoded_trace(trace: Trace, chat: ChatFormat, condition: Conditioning) -> tuple[np.ndarray, np.ndarray]:
    """(token ids, mask of those that the policy writes) of a demonstration under a condition."""
    return chat.trace_row(trace, condition.demonstrated(trace.problem, lambda: succeeded(trace)))


def succeeded(trace: Trace) -> bool | None:
    """Whether a demonstration reaches its goal: as its source says, or else by its final answer. None where neither an
    outcome nor a reference answer is there."""
    if (outcome := trace.problem.column("success")) is not None:
        return bool(outcome)
    if not trace.problem.answer:
        return None
    answer = find_answer(trace.turns).answer
    return answer is not None and decide(answer, trace.problem.answer) is True


def supervised_row(tokens: np.ndarray, mask: np.ndarray, weight: float) -> TrainRow:
    """A row with advantage 1 on the mask. Under loss kind `nll` its loss is -weight * log p."""
    zeros = np.zeros(len(tokens), np.float32)
    return TrainRow(
        tokens=tokens,
        policy_mask=mask,
        logprobs_old=zeros,
        advantages=mask.astype(np.float32),
        weights=np.where(mask, weight, 0.0).astype(np.float32),
        ratio_segments=np.zeros(len(tokens), np.int32),
        logprobs_ref=zeros,
    )


def supervised_optim(config: Config) -> OptimConfig:
    """AdamW of the run with the stage's own learning rate: warm-up, then cosine decay to a tenth at its last step."""
    steps = config.sft.steps
    return replace(
        config.optim,
        lr=config.sft.lr,
        warmup_steps=min(config.sft.warmup_steps, steps - 1),
        schedule=CosineDecay(steps) if steps > 1 else ConstantRate(),
        offload=False,
    )


@config_errors()
def trace_stream(config: Config, chat: ChatFormat) -> Stream[Trace]:
    """The demonstrations of a run that fit into a row."""
    return make_trace_stream(
        config.data,
        traces=config.sft.traces,
        seed=config.seed,
        row_length=lambda trace: len(encoded_trace(trace, chat, config.sft.condition)[0]),
        max_row_tokens=config.batch.row_length,
    )


FIRST_ROWS, ROWS_EVERY = (1, 2, 5, 10), 20
"""Steps that write a row of metrics, and the interval of further ones; the last step writes one too."""


def supervise(config: Config, policy: PolicyModel, chat: ChatFormat, params: Any, writer: Writer) -> Any:
    """Trains for `sft.steps` steps on traces of `data.trace_sources` and returns the parameters.

    Raises:
        ConfigError: Traces cannot be used, or none fits into a row; traces are never cut.
    """
    optim, model, mesh = supervised_optim(config), policy.model, policy.mesh
    update = update_settings(config, policy)
    step_fn = make_update_step(model, NegativeLogLikelihood(), optim, update, mesh, lora=config.lora)
    step_fn = bind_base(step_fn, policy.base)
    state = start_train_state(params, model, optim, mesh, config.lora)
    stream = trace_stream(config, chat)
    for note in stream.notes:
        writer.say(note)
    bound = worst_case_micro_batches(config.sft.traces, stream.longest, config.batch, row_shards(mesh))
    writer.say(
        f"supervised stage: {config.sft.steps} steps of {config.sft.traces} demonstrations; the first one compiles"
    )
    with narrated(writer.say), phase("supervised stage", steps=config.sft.steps) as stage:
        state = supervised_steps(config, chat, mesh, writer, stage, stream, step_fn, state, bound)
    return state.params


def supervised_steps(
    config: Config,
    chat: ChatFormat,
    mesh: Mesh,
    writer: Writer,
    stage: Phase,
    stream: Stream[Trace],
    step_fn: UpdateStep,
    state: TrainState,
    bound: int,
) -> TrainState:
    """The training state after all steps. `bound` is the largest number of micro-batches of a step."""
    started, memory, shards = time.perf_counter(), Halvings(mesh), row_shards(mesh)
    under_way: Any = None
    stage.at(0, "compiling the update")
    for step in range(1, config.sft.steps + 1):
        reach("sft")
        with config_errors():
            rows = trace_rows(next(stream), chat, config.sft.condition)
            batch, placement = pack(rows, config.batch, bound, shards)
        state, metrics = memory.run("sft", partial(step_fn, state), shard_batch(batch, mesh), donated=state)
        # One step ahead keeps the device busy; with more, a signal would have to wait for all of them.
        jax.block_until_ready(under_way)
        under_way = metrics
        if step in FIRST_ROWS or step % ROWS_EVERY == 0 or step == config.sft.steps:
            numbers = {name: float(value) for name, value in jax.device_get(metrics).items()}
            elapsed = time.perf_counter() - started
            counts = {"sft/fill": placement.fill, "data/left_out": stream.left_out}
            writer.write_sft(step, numbers | counts | {"time/sft_s": elapsed})
        stage.step(step)
    return state
