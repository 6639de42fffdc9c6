"""What a run keeps open: its locked directory, its policy, sampler and writers; and what is saved when a step fails."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from grpo_roc_jax import __version__
from grpo_roc_jax.config import Config, WatchConfig, derived
from grpo_roc_jax.engine.protocol import RolloutLines, RolloutProgress
from grpo_roc_jax.engine.publish import NonFiniteWeightsError
from grpo_roc_jax.learner.update import TrainState, init_trained, make_optimizer
from grpo_roc_jax.method.compose import needs_reference
from grpo_roc_jax.method.switching import Stage, StageProgress
from grpo_roc_jax.pod.notice import noticed
from grpo_roc_jax.pod.preemption import Preempted, Preemption
from grpo_roc_jax.pod.processes import Processes, ProcessFailed, joined
from grpo_roc_jax.process.progress import Narrator, describe_seconds, narrated, phase
from grpo_roc_jax.record.checkpoint import Checkpointer, describe_leaves
from grpo_roc_jax.record.events import Events
from grpo_roc_jax.record.loggers import ConsoleWriter
from grpo_roc_jax.record.metrics import CompilationCounter, Writer, make_writer
from grpo_roc_jax.record.run_dir import PACKAGES, Start, choose_run_dir, decide, locked, versions
from grpo_roc_jax.record.storage import copied, is_address
from grpo_roc_jax.record.trace import TraceWriter
from grpo_roc_jax.run.choices import about, choose, free_bytes, left_open, record, recorded, with_choices
from grpo_roc_jax.run.components import describe_device, make_parts, read_text_and_shape, run_date, with_date
from grpo_roc_jax.run.durations import EVALUATION, SUPERVISED, TRAINING, expected, remembered
from grpo_roc_jax.run.learning import find_teacher, most_rows
from grpo_roc_jax.run.policy import PolicyModel, attention_of, describe_attention, few_arenas
from grpo_roc_jax.run.sample import GroupSampler
from grpo_roc_jax.run.start import held_out
from grpo_roc_jax.run.summary import next_lines
from grpo_roc_jax.run.watch import DIVERGED_STATUS, INFRASTRUCTURE_STATUS, Alarms, Stopped, Watchdog
from grpo_roc_jax.settings.cli import ConfigError, config_errors, flatten
from grpo_roc_jax.settings.secrets import hidden
from grpo_roc_jax.tools.memory_bound import describe_call
from grpo_roc_jax.tools.registry import Registry
from grpo_roc_jax.types import Problem

SEEN_S = 10
"""Seconds that other processes wait for a file of the first process to become visible."""


@dataclass(frozen=True, eq=False)
class Claim:
    """A run directory that this process has locked, and how the run starts in it."""

    config: Config
    """Configuration, in a run with stages that of the current stage."""
    run_dir: Path
    start: Start
    processes: Processes
    all_stages: Config
    """Configuration with all stages; the content of `config.yaml`."""
    stage: int = 0
    progress: StageProgress | None = None
    """Progress at the end of the previous session in this process."""

    @property
    def stages(self) -> Sequence[Stage]:
        """The stages of the run; empty for a plain run."""
        return self.all_stages.stages or ()


@contextmanager
def claimed(config: Config, force: bool = False) -> Iterator[Claim]:
    """Joins the other processes, locks the run directory, and decides what happens to a run that is already there."""
    with joined(config.distributed) as processes, ExitStack() as resources:
        run_dir = processes.once(lambda: choose_run_dir(config.name, config.run_dir, config.resume))
        processes.once(lambda: resources.enter_context(locked(run_dir)))
        processes.once(lambda: resources.enter_context(copied(config.run_dir, run_dir, config.resume == "auto")))
        check_alike(processes, config, run_dir)
        config = with_date(config, processes.once(lambda: run_date(config, run_dir)))
        fresh = config.resume == "never"
        leaves = partial(state_leaves, config)
        start = Start("fresh") if fresh else processes.once(lambda: decide(run_dir, config, force=force, leaves=leaves))
        yield Claim(config, run_dir, start, processes, config)


def state_leaves(config: Config) -> dict[str, list]:
    """Name -> [shape, dtype] of the arrays of a run's training state, without allocating them.

    Raises:
        ConfigError: The tokenizer or the model cannot be read.
    """
    with config_errors():
        model = read_text_and_shape(config)[2]

    def make() -> dict[str, Any]:
        params = init_trained(jax.random.key(0), model, config.lora)
        opt_state = make_optimizer(config.optim).init(params)
        state = TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=opt_state)
        return {"state": state, "reference": params if needs_reference(config) else ()}

    return describe_leaves(jax.eval_shape(make))


def check_alike(processes: Processes, config: Config, run_dir: Path, *, seen_s: int = SEEN_S) -> None:
    """Refuses processes that were started with other settings or versions than the first, or that see another
    directory within `seen_s` seconds.

    Raises:
        ConfigError: Raised in all processes; the message names the process and the difference.
    """
    if processes.count == 1:
        return
    settings = {name: str(value) for name, value in flatten(config) if not name.startswith("distributed.")}
    sees = str(appears(run_dir / "lock", seen_s))
    settings |= {"version": __version__, **versions(PACKAGES), "sees the run directory": sees}
    first, *others = processes.gather(settings)
    for index, other in enumerate(others, 1):
        names = [name for name in first | other if first.get(name) != other.get(name)]
        if names:
            lines = [
                f"  {name}: {first.get(name)} in process 0, {other.get(name)} in process {index}" for name in names
            ]
            raise ConfigError("\n".join(["the processes of a run must be started alike, on a shared disk:", *lines]))


def appears(path: Path, seconds: int) -> bool:
    """Whether a file that another process has made becomes visible here. Network file systems can take seconds."""
    for _ in range(seconds):
        if path.exists():
            return True
        time.sleep(1)
    return False


@dataclass(frozen=True, eq=False)
class TrainingSession:
    """What a run keeps open from its start to its end."""

    config: Config
    run_dir: Path
    start: Start
    policy: PolicyModel
    sampling: GroupSampler
    held_out: Sequence[Problem]
    checkpointer: Checkpointer
    writer: Writer
    traces: TraceWriter
    preemption: Preemption
    compilations: CompilationCounter
    watchdog: Watchdog
    events: Events
    alarms: Alarms | None
    """None if the configuration has no section `watch`."""
    claim: Claim
    held_out_left_out: int
    """Number of held-out problems whose prompts are too long."""
    narrator: Narrator


@contextmanager
def telling(say: Callable[[str], None]) -> Iterator[Narrator]:
    """Makes `say` the output of the narrator within the block and restores the previous output at its end."""
    with narrated(say) as narrator:
        before, narrator.say = (narrator.say, narrator.drawn), say
        try:
            yield narrator
        finally:
            narrator.say, narrator.drawn = before


def early_lines(config: Config, processes: Processes) -> Callable[[str], None]:
    """Where lines go before the displays of a run are made."""
    if not processes.first or config.log.console == "off":
        return lambda line: None
    return ConsoleWriter(config.steps, "plain").say


@contextmanager
def open_session(claim: Claim, tools: Registry | None) -> Iterator[TrainingSession]:
    """Builds the parts of a run in a claimed directory. All of them are closed, in reverse order, at the end."""
    config, run_dir, processes = claim.config, claim.run_dir, claim.processes
    few_arenas()
    with ExitStack() as resources:
        narrator = resources.enter_context(telling(early_lines(config, processes)))
        if processes.first:
            resources.enter_context(remembered(config, narrator))
        resources.enter_context(phase("run", routine=True))  # for time that no other phase covers, closing included
        preemption = resources.enter_context(Preemption(raises=processes.count == 1).installed())
        processes.preemption = preemption
        compilations = resources.enter_context(CompilationCounter())
        policy, sampling = resources.enter_context(make_parts(config, registry=tools, processes=processes))
        config, chosen = choose_open(config, policy, processes, run_dir)
        chat, executor = sampling.sampler.chat, sampling.sampler.executor
        find_teacher(config, chat.tokenizer)
        problems, notes = held_out(config, chat)
        checkpointer = resources.enter_context(
            Checkpointer(run_dir / "checkpoints", config.checkpoint, logs=run_dir if processes.first else None)
        )
        with config_errors(ModuleNotFoundError):
            writer = resources.enter_context(make_writer(run_dir, config) if processes.first else Writer([]))
        narrator.say = writer.say
        for note in [*chosen, *notes]:
            writer.say(note)
        shown = RolloutLines() if writer.bars is None else RolloutProgress(writer.bars)
        narrator.drawn = lambda: writer.bars is not None and writer.bars.live.is_started
        sampling = replace(sampling, progress=shown)
        every = config.log.traces if processes.first else 0
        traces = TraceWriter(run_dir, every, chat.tokenizer.decode)
        watch = config.watch or WatchConfig()
        events = Events(run_dir if processes.first else None, partial(writer.say, event=True))
        watchdog = Watchdog(run_dir, watch, lambda: [f"call {name}" for name in getattr(executor, "in_flight", ())])
        resources.enter_context(noticed(watch.notice_url))
        resources.enter_context(watchdog.watching())
        yield TrainingSession(
            config,
            run_dir,
            claim.start,
            policy,
            sampling,
            problems,
            checkpointer,
            writer,
            traces,
            preemption,
            compilations,
            watchdog,
            events,
            Alarms(watch, events) if config.watch else None,
            claim,
            notes.left_out,
            narrator,
        )


def choose_open(
    config: Config,
    policy: PolicyModel,
    processes: Processes,
    run_dir: Path,
    *,
    free: Callable[[Any], float] = free_bytes,
) -> tuple[Config, list[str]]:
    """(the configuration with the values that `run.choices` chooses for open settings, lines for the log). A resumed
    run takes its recorded choices: each choice changes the order of floating-point sums, and with it the last
    digits. `free`: bytes of memory that are free on a device of this process."""
    names = left_open(config)
    if not names:
        return config, []
    mesh, model = policy.mesh, policy.model
    shapes = about(config, mesh)
    before = processes.once(lambda: recorded(run_dir, shapes, names))
    lines: list[str] = []
    if before is not None:
        try:
            return with_choices(config, before), []
        except (ValueError, TypeError) as error:
            lines = [f"the choices recorded in the run directory cannot be used ({error}); they are made again"]
    chosen: dict[str, Any] = {}
    if "update.attention" in names:
        chosen["update.attention"] = attention_of(config, policy)[0]
        lines += [describe_attention(config, policy)] if attention_of(config, policy)[1] else []
    room = min(float(of) for of in processes.gather(free(mesh)))
    more, more_lines = choose(with_choices(config, chosen), model, mesh, most_rows(config), room)
    chosen |= more
    processes.once(lambda: record(run_dir, shapes, chosen))
    return with_choices(config, chosen), lines + more_lines


@contextmanager
def state_kept(session: TrainingSession) -> Iterator[None]:
    """Saves the state after the last finished step if the block fails, and adds a note on what is saved to the
    exception.

    Raises:
        Stopped: The run was asked to stop, and its state could not be saved.
    """
    try:
        try:
            yield
        except NonFiniteWeightsError as error:
            raise Stopped(DIVERGED_STATUS, f"diverged: {error}; lower optim.lr") from error
    except (Preempted, Exception) as error:
        processes = session.sampling.processes
        for text in session.watchdog.take_stalls():
            session.events.note(session.checkpointer.latest.step if session.checkpointer.latest else 0, "stalled", text)
        if not isinstance(error, ConfigError) and (lost := processes.lost(error)):
            raise lost from error
        # Either all processes get here after these errors or none does; after an error of one process, it must not
        # wait for the others.
        together = isinstance(error, Preempted | Stopped | ProcessFailed) or processes.count == 1
        if together and session.checkpointer.latest is not None:
            saved, words = session.checkpointer.save_latest()
            if isinstance(error, Preempted) and session.watchdog.ending:
                raise Stopped(INFRASTRUCTURE_STATUS, f"{session.watchdog.ending}; {words}") from error
            if isinstance(error, Preempted) and not saved:
                raise Stopped(INFRASTRUCTURE_STATUS, f"interrupted, and {words}") from error
            error.add_note(f"{words}; run the same command with --resume auto to continue")
            status, named = getattr(error, "status", None), session.config.run_dir
            for line in next_lines(session.run_dir, None, status, named) if saved else ():
                session.writer.say(line)
        raise


def announce(session: TrainingSession, config: Config) -> None:
    """Writes the first lines of a run: what it will do, derived settings, devices, isolation of tools.

    Args:
        session: Session of the run.
        config: Configuration of its stage.
    """
    policy, sampler, writer = session.policy, session.sampling.sampler, session.writer
    reached = sampler.executor.capabilities
    missing = f", missing {', '.join(reached.missing)}" if reached.missing else ""
    seconds, source = expected(config, policy.model, len(session.held_out), session.narrator.usual)
    start = session.start
    left = min(config.steps - (start.step - start.began), session.config.steps - start.step)
    writer.say(plan_line(config, start, left, len(session.held_out), session.run_dir, seconds))
    if seconds:
        writer.say(f"minutes of the plan: {source}; what is left is measured as the phases go on")
    if is_address(config.run_dir):
        writer.say(f"run directory: {session.run_dir}, copied to {hidden(config.run_dir)}")
    writer.say(f"tools: isolation {reached.level}{missing}")
    if memory := describe_call(config.tools):
        writer.say(f"tools: {memory}")
    writer.say(f"device: {describe_device()}, compute in {policy.model.compute_dtype}")
    writer.say(sampler.engine.describe_attention())
    writer.say(describe_attention(config, policy))
    for line in derived(config):
        writer.say(line)


def plan_line(
    config: Config,
    start: Start,
    left: int,
    held_out: int,
    run_dir: Path,
    seconds: Mapping[str, float] = MappingProxyType({}),
) -> str:
    """What a run is about to do: "plan: supervised stage, 400 steps, about 2 min; then 30 steps ...; written to
    runs/toy".

    Args:
        config: Configuration of the stage.
        start: Whether the run is fresh or resumes at a step.
        left: Steps that the stage has left; none for 0 and less.
        held_out: Number of problems of an evaluation.
        run_dir: Directory of the run.
        seconds: Durations of a supervised step, a step and an evaluation, by the names of their phases. Those that
            are missing are not mentioned.
    """

    def about(phase: str, count: int = 1) -> str:
        return f", about {describe_seconds(seconds[phase] * count)}" if phase in seconds else ""

    parts, fresh = [], start.kind == "fresh"
    if config.sft.steps and fresh:
        parts.append(f"supervised stage, {config.sft.steps} steps{about(SUPERVISED, config.sft.steps)}")
    if held_out and fresh:
        parts.append(f"evaluation on {held_out} problems{about(EVALUATION)}")
    if left > 0:
        sampled = config.group.problems * config.resample.sampled(config.group.size)
        parts.append(f"{left} step{'s' * (left > 1)} of {sampled} rollouts{about(TRAINING, left)}")
        if held_out:
            every = f" every {config.eval.every} steps and" if 0 < config.eval.every < left else ""
            parts.append(f"evaluation{every} at the end")
    return f"plan: {'; then '.join(parts) or 'nothing is left to do'}; written to {run_dir}"
