"""Training: `python -m grpo_roc_jax.train [CONFIG.yaml] [--section.field value] [--dry-run | --preflight]`.

One step publishes the policy, rolls problems out, scores, selects, buffers, makes rows, updates and records. `train`
does the same from Python, with custom parts as arguments.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_roc_jax.cli import ConfigError, config_errors, dump_yaml, load_config
from grpo_roc_jax.config import DEFAULT_CONFIG, Config, LimitsConfig, derived
from grpo_roc_jax.evaluate import check_reward_tokens, evaluate_policy
from grpo_roc_jax.method.compose import next_state
from grpo_roc_jax.pod.preemption import PREEMPTED_STATUS, Preempted, Preemption
from grpo_roc_jax.pod.processes import ProcessLost, joined
from grpo_roc_jax.pod.program_cache import keep_programs
from grpo_roc_jax.record.checkpoint import Checkpointer
from grpo_roc_jax.record.metrics import CompilationCounter, Writer, check_extras, make_writer
from grpo_roc_jax.record.run_dir import choose_run_dir, opened
from grpo_roc_jax.record.trace import TraceWriter, eval_records, step_records
from grpo_roc_jax.reward.score import RewardError, make_scorer
from grpo_roc_jax.rollout.progress import RolloutProgress
from grpo_roc_jax.run.components import (
    Components,
    check_components,
    describe_device,
    make_components,
    make_registry,
    run_date,
    with_date,
)
from grpo_roc_jax.run.learner import make_learner
from grpo_roc_jax.run.policy import memory_lines
from grpo_roc_jax.run.preflight import preflight, preflight_lines
from grpo_roc_jax.run.rounds import StepSamples
from grpo_roc_jax.run.run_state import RunState
from grpo_roc_jax.run.start import cold_start, data_lines, fresh_run, held_out
from grpo_roc_jax.run.step import sample_step
from grpo_roc_jax.run.summary import show_trajectory, summary_lines, write_summary
from grpo_roc_jax.run.teacher import find_teacher
from grpo_roc_jax.settings.callables import given
from grpo_roc_jax.tools.registry import Registry
from grpo_roc_jax.types import Metrics, Problem

log = logging.getLogger(__name__)

CONFIG_STATUS, NO_SIGNAL_STATUS, DIVERGED_STATUS, INFRASTRUCTURE_STATUS = 2, 3, 4, 5


class Stopped(Exception):
    """The run ends early for a reason that has an exit status of its own."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status = status


def train(
    config: Config,
    *,
    functions: Mapping[str, Callable] | None = None,
    tools: Registry | None = None,
) -> dict[str, Any]:
    """Runs a configuration to its end and returns the summary that is also written to `summary.json`.

    Args:
        config: See `config.Config`.
        functions: Functions of yours, by the name that the configuration gives them wherever it takes
            `package.module:function`: rewards, advantages, shaping, edits of groups and rows, judges.
        tools: Tools of yours instead of the built-in ones.

    Raises:
        ConfigError: What cannot run, before anything is compiled.
        Stopped: No learning signal, divergence, or failing infrastructure for longer than `limits` allow.
        Preempted: SIGTERM or SIGINT; the state is saved.
        ProcessLost: One of several processes is gone.
    """
    started = time.perf_counter()
    with given(functions), open_session(config, tools) as session:
        run = begin(session)
        after_first = train_steps(session, run)
        return finish(session, run, started, after_first)


@dataclass(frozen=True, eq=False)
class TrainingSession:
    """What a run holds open from its first line to its last."""

    config: Config
    run_dir: Path
    components: Components
    held_out: Sequence[Problem]
    checkpointer: Checkpointer
    writer: Writer
    traces: TraceWriter
    preemption: Preemption
    compilations: CompilationCounter


@contextmanager
def open_session(config: Config, tools: Registry | None) -> Iterator[TrainingSession]:
    """Joins the other processes, takes the run directory, builds the components; all are closed in turn at the end."""
    with ExitStack() as held:
        processes = held.enter_context(joined(config.distributed))
        run_dir = processes.once(lambda: choose_run_dir(config.name, config.run_dir, config.resume))
        config = with_date(config, processes.once(lambda: run_date(config, run_dir)))
        if processes.first:
            held.enter_context(opened(run_dir, config))
        preemption = held.enter_context(Preemption(raises=processes.count == 1).installed())
        processes.preemption = preemption
        compilations = held.enter_context(CompilationCounter())
        components = held.enter_context(make_components(config, registry=tools, processes=processes))
        find_teacher(config, components.tokenizer)
        problems, notes = held_out(config, components.chat)
        checkpointer = held.enter_context(Checkpointer(run_dir / "checkpoints", config.checkpoint))
        with config_errors(ModuleNotFoundError):
            writer = held.enter_context(make_writer(run_dir, config) if processes.first else Writer([]))
        for note in notes:
            writer.say(note)
        if writer.bars is not None:
            components = replace(components, progress=RolloutProgress(writer.bars))
        every = config.log.traces if processes.first else 0
        traces = TraceWriter(run_dir, every, components.tokenizer.decode)
        yield TrainingSession(
            config, run_dir, components, problems, checkpointer, writer, traces, preemption, compilations
        )


def train_steps(session: TrainingSession, run: RunState) -> int:
    """Steps to the last one, checkpoints between them; returns how many programs were compiled after the first step.

    Raises:
        Stopped, Preempted: With the state of the last finished step saved.
    """
    config, components, checkpointer = session.config, session.components, session.checkpointer
    components.engine.warmup(components.engine.publish(components.full(run.train.params), run.step))
    learner = make_learner(components)
    learner.warmup(run)
    session.writer.say(describe_programs(session.compilations))
    watch, compiled, safe = Watch(config.limits), None, run.bundle()
    try:
        while run.step < config.steps:
            begun = time.perf_counter()
            samples = sample_step(config, components, run)
            groups = run.buffer.take(config.group.problems)
            batches = learner.batches(groups, samples.explanations, run)
            drift = learner.drift(groups, run)
            with session.preemption.deferred():  # the update donates its input, so the step is completed from here on
                run.train, batches, measured = learner.update(run, batches)
                metrics = samples.metrics() | measured
                run.method = next_state(samples.groups, groups, config, run.method, drift)
                run.step += 1
                run.reference = learner.next_reference(run)
                metrics |= session.compilations.metrics() | {"time/step_s": time.perf_counter() - begun}
                record(session, run, samples, groups, batches, metrics)
                safe = run.bundle()
                if checkpointer.due(run.step):
                    checkpointer.save(run.step, safe)
            compiled = session.compilations.count if compiled is None else compiled
            watch.look(metrics)
            if config.eval.every and run.step % config.eval.every == 0 and run.step < config.steps:
                session.writer.write(run.step, evaluate(session, run)[1])
    except (Preempted, Stopped):  # all processes are here together, or none is
        checkpointer.save(safe.step, safe)
        raise
    after_first = 0 if compiled is None else session.compilations.count - compiled
    checkpointer.save(run.step, safe)
    return after_first


def describe_programs(compiled: CompilationCounter) -> str:
    """Programs and seconds of the start, and how many came from the cache."""
    kept = keep_programs()
    where = f"{compiled.hits} of them from {kept}" if kept else "the compilation cache is off"
    return f"programs: {compiled.count} in {compiled.seconds:.1f} s, {where}"


def finish(session: TrainingSession, run: RunState, started: float, compiled_after_first: int) -> dict[str, Any]:
    """The last evaluation, `summary.json` and the last lines."""
    accuracy, metrics = evaluate(session, run)
    session.writer.write(run.step, metrics)
    processes = session.components.processes
    measured = {
        "device": describe_device(),
        "processes": processes.count,
        "isolation": session.components.executor.capabilities.level,
        "accuracy_before": run.accuracy_before,
        "accuracy_after": accuracy,
        "compilations_after_first_step": compiled_after_first,
        "seconds": time.perf_counter() - started,
    }
    summary = processes.once(lambda: write_summary(session.run_dir, session.config, **measured))
    for line in summary_lines(session.run_dir, summary):
        session.writer.say(line)
    return summary


def announce(config: Config, components: Components, run_dir: Path, writer: Writer) -> None:
    """The first lines of a run: derived settings, devices, isolation of tools."""
    reached = components.executor.capabilities
    missing = f", missing {', '.join(reached.missing)}" if reached.missing else ""
    writer.say(f"run directory: {run_dir}")
    writer.say(f"tools: isolation {reached.level}{missing}")
    writer.say(f"device: {describe_device()}, compute in {components.model.compute_dtype}")
    writer.say(components.engine.describe_attention())
    writer.say(components.describe_attention())
    for line in derived(config):
        writer.say(line)


def begin(session: TrainingSession) -> RunState:
    """Announces the run and finds where it starts: at the newest checkpoint, or fresh, which a policy that trains under
    reward tokens must be fit for.

    Raises:
        ConfigError: a fresh policy whose reward tokens change nothing.
    """
    announce(session.config, session.components, session.run_dir, session.writer)
    run = restored_or_fresh(session)
    if run.step == 0:
        for line in check_reward_tokens(session.components, run.train.params):
            session.writer.say(line)
    return run


def restored_or_fresh(session: TrainingSession) -> RunState:
    """The newest checkpoint, or a fresh run after its supervised stage and a first evaluation."""
    config, components, writer = session.config, session.components, session.writer
    run = fresh_run(components)
    for note in run.stream.notes:
        writer.say(note)
    saved = session.checkpointer.restore_latest(run.bundle()) if config.resume == "auto" else None
    if saved is not None:
        with config_errors():
            run.load(saved)
        writer.say(f"resumed after step {run.step}")
        writer.cut(run.step)
        return run
    cold_start(components, run, writer)
    run.accuracy_before, metrics = evaluate(session, run)
    writer.write(0, metrics)
    session.checkpointer.save(0, run.bundle())
    return run


def record(
    session: TrainingSession, run: RunState, samples: StepSamples, groups: Sequence, batches: Sequence, metrics: Metrics
) -> None:
    """Writes metrics and trajectories of a finished step, and shows a trajectory every `log.samples` steps."""
    traces, writer = session.traces, session.writer
    if traces.due(run.step):
        rows = [row for batch in batches for row in batch.rows][: sum(group.size for group in groups)]  # of one epoch
        removed = [pair for wave in samples.waves for pair in wave.removed]
        records = step_records(
            run.step,
            samples.groups,
            samples.selections,
            removed=removed,
            trained=groups,
            rows=rows,
            outside=samples.outside,
        )
        traces.write(run.step, records)
    writer.write(run.step, metrics)
    every = session.config.log.samples
    if every and run.step % every == 0:
        for line in show_trajectory(samples.groups, session.components.tokenizer.decode, run.step):
            writer.say(line)


def evaluate(session: TrainingSession, run: RunState) -> tuple[float | None, Metrics]:
    """Held-out accuracy (None without problems) and metrics of the current policy; its trajectories are kept."""
    config, components = session.config, session.components
    if not session.held_out:
        return None, {}
    sampler = components.engine.publish(components.full(run.train.params), run.step)
    accuracy, metrics, sampled = evaluate_policy(
        components, sampler, session.held_out, config.eval.samples, step=run.step, temperature=config.eval.temperature
    )
    session.traces.write(run.step, eval_records(run.step, sampled.groups), kind="eval")
    return accuracy, metrics


class Watch:
    """Counts bad steps in a row and ends a run that makes no progress."""

    def __init__(self, limits: LimitsConfig):
        self._limits = limits
        self._empty = self._skipped = self._broken = 0

    def look(self, metrics: Metrics) -> None:
        """Raises `Stopped` when a limit is reached; takes the metrics of each step in turn."""
        limits = self._limits
        empty = "loss/value" not in metrics or metrics["update/signal"] == 0
        self._empty = self._empty + 1 if empty else 0
        self._skipped = self._skipped + 1 if metrics.get("update/skipped", 0.0) and "loss/value" in metrics else 0
        lost = metrics.get("verdict/infrastructure", 0.0)
        self._broken = self._broken + 1 if lost > limits.infrastructure_share else 0
        if self._empty >= limits.empty_steps:
            raise Stopped(
                NO_SIGNAL_STATUS,
                f"no learning signal: {self._empty} steps in a row without a group of unequal rewards (in the last: "
                f"{metrics['roc/all_correct']:.0f} all correct, {metrics['roc/all_wrong']:.0f} all wrong); "
                "change the difficulty of data.sources, or raise group.dynamic_sampling_rounds",
            )
        if self._skipped >= limits.skipped_updates:
            raise Stopped(
                DIVERGED_STATUS,
                f"diverged: {self._skipped} updates in a row were not finite and left the policy as it was; "
                "lower optim.lr, or resume from an earlier checkpoint",
            )
        if self._broken >= limits.infrastructure_steps:
            raise Stopped(
                INFRASTRUCTURE_STATUS,
                f"infrastructure: {lost:.0%} of the trajectories were lost to infrastructure failures in each "
                f"of {self._broken} steps; see tools/ metrics and the trajectory log",
            )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    dry_run, ahead = "--dry-run" in words, "--preflight" in words
    words = [word for word in words if word not in ("--dry-run", "--preflight")]
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    try:
        config = load_config(Config, words, prog="python -m grpo_roc_jax.train", default_file=DEFAULT_CONFIG)
        if dry_run:
            dry(config)
        elif ahead:
            print("\n".join(preflight_lines(preflight(config))))
        else:
            train(config)
    except ConfigError as error:
        print(f"configuration: {error}", file=sys.stderr)
        return CONFIG_STATUS
    except Stopped as error:
        print(f"stopped: {error}", file=sys.stderr)
        return error.status
    except ProcessLost as error:
        print(
            f"stopped: {error}; the same command on all hosts with --resume auto goes on", file=sys.stderr, flush=True
        )
        os._exit(INFRASTRUCTURE_STATUS)  # an orderly end would wait for the one that is gone
    except Preempted:
        print("interrupted: the state is saved; the same command with --resume auto goes on", file=sys.stderr)
        return PREEMPTED_STATUS
    return 0


def dry(config: Config) -> None:
    """Builds what needs no device work and reads the data, then prints the resolved configuration and what it comes to.

    Raises:
        ConfigError: What a run would refuse at its start.
    """
    tokenizer, chat, model, mesh, _ = check_components(config, make_registry(config))
    find_teacher(config, tokenizer)
    with config_errors(RewardError, ModuleNotFoundError):
        make_scorer(config.reward).close()
        check_extras(config.log)
    print(dump_yaml(config))
    for line in (*derived(config), *memory_lines(config, model, mesh)):
        print(line)
    for line in data_lines(config, chat):
        print(line)


if __name__ == "__main__":
    sys.exit(main())
