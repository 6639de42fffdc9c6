"""Training: `python -m grpo_roc_jax.train [CONFIG.yaml] [--section.field value] [--dry-run | --preflight]`.

One step reads: publish the policy, roll problems out, score, select, wait in the buffer, turn into rows, update,
record. `train` is the same from Python, with custom parts as arguments.
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

import jax
import jax.numpy as jnp

from grpo_roc_jax.checkpoint import Checkpointer, make_checkpointer
from grpo_roc_jax.cli import ConfigError, dump_yaml, load_config
from grpo_roc_jax.config import DEFAULT_CONFIG, Config, LimitsConfig, derived
from grpo_roc_jax.data.pipeline import eval_problems, make_problem_stream
from grpo_roc_jax.evaluate import check_reward_tokens, evaluate_policy
from grpo_roc_jax.method.config import needs_reference
from grpo_roc_jax.method.methods import next_state
from grpo_roc_jax.method.state import init_state
from grpo_roc_jax.metrics import CompilationCounter, Writer, make_writer
from grpo_roc_jax.policy import at_rest, initial_state, memory_lines
from grpo_roc_jax.preemption import PREEMPTED_STATUS, Preempted, Preemption
from grpo_roc_jax.preflight import preflight, preflight_lines
from grpo_roc_jax.processes import ProcessLost, joined
from grpo_roc_jax.rollout.progress import RolloutProgress
from grpo_roc_jax.run_dir import choose_run_dir, opened
from grpo_roc_jax.run_state import Run
from grpo_roc_jax.stages import Stages, check_stages, describe_device, make_registry, make_stages
from grpo_roc_jax.step import Selected, make_batches, make_programs, on_mesh, roll_out, take_update
from grpo_roc_jax.summary import show_trajectory, summary_lines, write_summary
from grpo_roc_jax.supervised import supervise
from grpo_roc_jax.tools.registry import Registry
from grpo_roc_jax.trace import TraceWriter, eval_records, step_records
from grpo_roc_jax.types import Metrics
from grpo_roc_jax.update import start_train_state

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
    advantage: Callable | None = None,
    shaping: Callable | None = None,
    rows: Callable | None = None,
    rewards: Mapping[str, Callable] | None = None,
    tools: Registry | None = None,
) -> dict[str, Any]:
    """Runs a configuration to its end and returns the summary that is also written to `summary.json`.

    Args:
        config: See `config.Config`.
        advantage: (rewards, features, state) -> advantages of one group, instead of the configured one.
        shaping: (rewards, features, state) -> rewards of one group, applied last.
        rows: (rows, groups, policy) -> rows of an optimiser step, instead of `loss.custom`.
        rewards: Own reward functions of (problem, trajectories), by the name they have in `reward.functions`.
        tools: Own tools instead of the built-in ones.

    Raises:
        ConfigError: What cannot run, before anything is compiled.
        Stopped: No learning signal, divergence, or failing infrastructure for longer than `limits` allow.
        Preempted: SIGTERM or SIGINT; the state is saved.
        ProcessLost: One of several processes is gone.
    """
    started = time.perf_counter()
    custom = {"advantage": advantage, "shaping": shaping, "rows": rows}
    with open_session(config, custom, rewards, tools) as session:
        run = begin(session)
        after_first = train_steps(session, run)
        return finish(session, run, started, after_first)


@dataclass(frozen=True, eq=False)
class Session:
    """What a run holds open from its first line to its last."""

    config: Config
    run_dir: Path
    custom: dict[str, Callable | None]
    """Parts given to `train` in place of configured ones."""
    stages: Stages
    checkpointer: Checkpointer
    writer: Writer
    traces: TraceWriter
    preemption: Preemption
    compilations: CompilationCounter


@contextmanager
def open_session(
    config: Config,
    custom: dict[str, Callable | None],
    rewards: Mapping[str, Callable] | None,
    tools: Registry | None,
) -> Iterator[Session]:
    """Joins the other processes, takes the run directory, builds the stages; all is closed in turn at the end."""
    with ExitStack() as held:
        processes = held.enter_context(joined(config.distributed))
        run_dir = processes.once(lambda: choose_run_dir(config.name, config.run_dir, config.resume))
        if processes.first:
            held.enter_context(opened(run_dir, config))
        preemption = held.enter_context(Preemption(raises=processes.count == 1).installed())
        processes.stopping = lambda: preemption.asked
        compilations = held.enter_context(CompilationCounter())
        stages = held.enter_context(make_stages(config, rewards=rewards, registry=tools, processes=processes))
        checkpointer = held.enter_context(make_checkpointer(run_dir / "checkpoints", config.checkpoint))
        writer = held.enter_context(make_writer(run_dir, config) if processes.first else Writer([]))
        if writer.bars is not None:
            stages = replace(stages, progress=RolloutProgress(writer.bars))
        log_config = config.log if processes.first else replace(config.log, traces=0)
        traces = held.enter_context(TraceWriter(run_dir, log_config, stages.tokenizer.decode))
        yield Session(config, run_dir, custom, stages, checkpointer, writer, traces, preemption, compilations)


def train_steps(session: Session, run: Run) -> int:
    """Steps to the last one, checkpoints between them; returns how many programs were compiled after the first step.

    Raises:
        Stopped, Preempted: With the state of the last finished step saved.
    """
    config, stages, checkpointer = session.config, session.stages, session.checkpointer
    stages.engine.warmup(stages.engine.publish(stages.full(run.train.params), run.step))
    programs = make_programs(config, stages)
    take_update(run, programs, [on_mesh(config, stages, programs, run, [])])  # compiles; no row, so nothing changes
    watch, compiled, safe = Watch(config.limits), None, run.bundle()
    try:
        while run.step < config.steps:
            begun = time.perf_counter()
            selected = roll_out(config, stages, run)
            groups = run.buffer.take(config.group.problems)
            batches = make_batches(config, stages, programs, run, groups, session.custom)
            with session.preemption.deferred():  # the update gives its input away: from here the step gets finished
                metrics = selected.metrics() | take_update(run, programs, batches)
                run.method = next_state(
                    selected.groups,
                    groups,
                    config,
                    run.method,
                    custom_advantage=session.custom["advantage"],
                    custom_shaping=session.custom["shaping"],
                )
                run.step += 1
                metrics |= {"compile/count": session.compilations.count, "time/step_s": time.perf_counter() - begun}
                record(session, run, selected, groups, batches, metrics)
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


def finish(session: Session, run: Run, started: float, compiled_after_first: int) -> dict[str, Any]:
    """The last evaluation, `summary.json` and the last lines."""
    accuracy, metrics = evaluate(session, run)
    session.writer.write(run.step, metrics)
    processes = session.stages.processes
    measured = {
        "device": describe_device(),
        "processes": processes.count,
        "isolation": session.stages.executor.capabilities.level,
        "accuracy_before": run.accuracy_before,
        "accuracy_after": accuracy,
        "compilations_after_first_step": compiled_after_first,
        "seconds": time.perf_counter() - started,
    }
    summary = processes.once(lambda: write_summary(session.run_dir, session.config, **measured))
    for line in summary_lines(session.run_dir, summary):
        session.writer.say(line)
    return summary


def announce(config: Config, stages: Stages, run_dir: Path, writer: Writer) -> None:
    """The first lines of a run: what the settings come to, where it runs, how well tools are isolated."""
    reached = stages.executor.capabilities
    missing = f", missing {', '.join(reached.missing)}" if reached.missing else ""
    writer.say(f"run directory: {run_dir}")
    writer.say(f"tools: isolation {reached.level}{missing}")
    writer.say(f"device: {describe_device()}, compute in {stages.model.compute_dtype}")
    writer.say(stages.engine.describe_attention())
    writer.say(stages.describe_attention())
    for line in derived(config):
        writer.say(line)


def begin(session: Session) -> Run:
    """Announces the run and finds where it starts: at the newest checkpoint, or fresh, which a policy that trains under
    reward tokens must be fit for.

    Raises:
        ConfigError: a fresh policy whose reward tokens change nothing.
    """
    announce(session.config, session.stages, session.run_dir, session.writer)
    run = restored_or_fresh(session)
    if run.step == 0:
        for line in check_reward_tokens(session.stages, run.train.params):
            session.writer.say(line)
    return run


def restored_or_fresh(session: Session) -> Run:
    """The newest checkpoint, or a fresh run behind its supervised stage and a first evaluation."""
    config, stages, writer = session.config, session.stages, session.writer
    stream = make_problem_stream(
        config.data,
        problems=config.group.problems,
        seed=config.seed,
        prompt_length=lambda problem: len(stages.chat.prompt_ids(problem)),
        max_prompt_tokens=config.rollout.max_prompt_tokens,
    )
    for note in stream.notes:
        writer.say(note)
    fresh = initial_state(config, stages.model, stages.mesh)
    run = Run(
        fresh,
        fresh.params if needs_reference(config.loss) else (),
        stream,
        init_state(len(config.advantage.constraints)),
    )
    saved = session.checkpointer.restore_latest(run.bundle()) if config.resume == "auto" else None
    if saved is not None:
        run.load(saved)
        writer.say(f"resumed after step {run.step}")
        writer.cut(run.step)
        return run
    if config.sft.steps:
        params = supervise(config, stages, fresh.params, writer)
        run.train = at_rest(config, start_train_state(params, stages.model, config.optim, stages.mesh, config.lora))
    if needs_reference(config.loss):
        run.reference = jax.tree.map(jnp.copy, run.train.params)  # the update gives the policy's own buffers away
    run.accuracy_before, metrics = evaluate(session, run)
    writer.write(0, metrics)
    session.checkpointer.save(0, run.bundle())
    return run


def record(
    session: Session, run: Run, selected: Selected, groups: Sequence, batches: Sequence, metrics: Metrics
) -> None:
    """Metrics and trajectories of a finished step, and now and then a trajectory to look at."""
    traces, writer = session.traces, session.writer
    if traces.wanted(run.step):
        rows = [row for batch in batches for row in batch.rows]
        removed = [pair for sampled in selected.sampled for pair in sampled.removed]
        records = step_records(
            run.step,
            selected.groups,
            selected.selections,
            removed=removed,
            trained=groups,
            rows=rows,
            outside=selected.outside,
        )
        traces.write(run.step, records)
    writer.write(run.step, metrics)
    every = session.config.log.samples
    if every and run.step % every == 0:
        for line in show_trajectory(selected.groups, session.stages.tokenizer.decode, run.step):
            writer.say(line)


def evaluate(session: Session, run: Run) -> tuple[float | None, Metrics]:
    """Held-out accuracy (None without problems) and metrics of the current policy; its trajectories are kept."""
    config, stages = session.config, session.stages
    problems = eval_problems(config.data)
    if not problems:
        return None, {}
    sampler = stages.engine.publish(stages.full(run.train.params), run.step)
    accuracy, metrics, sampled = evaluate_policy(
        stages, sampler, problems, config.eval.samples, step=run.step, temperature=config.eval.temperature
    )
    session.traces.write(run.step, eval_records(run.step, sampled.groups), kind="eval")
    return accuracy, metrics


class Watch:
    """Counts bad steps in a row and ends a run that goes nowhere."""

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
                "change the difficulty of data.sources, or raise group.refills",
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
                f"infrastructure: {lost:.0%} of the trajectories were lost to faults of ours in each of "
                f"{self._broken} steps; see tools/ metrics and the trajectory log",
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
    """Builds everything that needs no device work, then prints the resolved configuration and what it comes to."""
    _, _, model, mesh, _ = check_stages(config, make_registry(config))
    print(dump_yaml(config))
    for line in (*derived(config), *memory_lines(config, model, mesh)):
        print(line)


if __name__ == "__main__":
    sys.exit(main())
