"""Training: `python -m grpo_roc_jax.train [CONFIG.yaml] [--section.field value] [--dry-run [full] | --preflight]`.
`--dry-run full` prints every setting too; `--force` continues a run with settings that it would refuse; `--profile 3:5`
traces steps 3 to 5.

One step publishes the policy, rolls problems out, scores, selects, buffers, makes rows, updates and records. `train`
does the same from Python, with custom parts as arguments.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from grpo_roc_jax.config import DEFAULT_CONFIG, Config, derived
from grpo_roc_jax.engine.publish import NonFiniteWeightsError
from grpo_roc_jax.environments.config import EnvironmentByRow, EnvironmentClass, Hosted, OwnEnvironments
from grpo_roc_jax.learner.group_learner import GroupLearner
from grpo_roc_jax.learner.learner import UpdateBatch
from grpo_roc_jax.method.compose import next_state, resample_group, subset
from grpo_roc_jax.model.transformer import compute_dtype
from grpo_roc_jax.planner.measured import Rates, device_rates, measured_lines
from grpo_roc_jax.planner.preflight import host_lines, preflight, preflight_lines
from grpo_roc_jax.planner.prospects import hindrances, left_out, unequal_references
from grpo_roc_jax.planner.suggest import device_limit, room_lines
from grpo_roc_jax.pod.preemption import PREEMPTED_STATUS, Preempted
from grpo_roc_jax.pod.processes import ProcessFailed, ProcessLost
from grpo_roc_jax.pod.program_cache import keep_programs
from grpo_roc_jax.process.leaving import end_with
from grpo_roc_jax.process.points import injected, reach, spoiled
from grpo_roc_jax.process.progress import Phase, narrated, phase, show_log, to_stderr
from grpo_roc_jax.record.accuracy import ALL, SETUP, setup_number
from grpo_roc_jax.record.batches import keep_batch
from grpo_roc_jax.record.checkpoint import CheckpointFailed
from grpo_roc_jax.record.loggers import ConsoleWriter
from grpo_roc_jax.record.metrics import CompilationCounter, check_extras, recorded
from grpo_roc_jax.record.missing import missing_rows
from grpo_roc_jax.record.profiling import Profile, Tracer, profiled, tracing
from grpo_roc_jax.record.run_dir import describe_run
from grpo_roc_jax.record.storage import StorageFailed
from grpo_roc_jax.record.trace import eval_records, step_records
from grpo_roc_jax.reward.score import RewardError, make_scorer
from grpo_roc_jax.run.choices import with_update
from grpo_roc_jax.run.components import check_components, describe_device, make_registry
from grpo_roc_jax.run.durations import TRAINING, evaluation_phase
from grpo_roc_jax.run.evaluate import check_before_training, evaluate_policy
from grpo_roc_jax.run.learning import find_teacher, make_learner
from grpo_roc_jax.run.policy import PolicyModel, memory_lines
from grpo_roc_jax.run.run_state import RunState
from grpo_roc_jax.run.sample import GroupSampler, StepSamples, check_accounts, draw_problems, merge_rounds, run_round
from grpo_roc_jax.run.session import Claim, TrainingSession, announce, claimed, open_session, state_kept
from grpo_roc_jax.run.stages import OTHER_DATA, enter_stage, first_stage, next_claim, observe, stage_over, steps_left
from grpo_roc_jax.run.start import cold_start, data_lines, fresh_run
from grpo_roc_jax.run.statistics import why_nothing_kept
from grpo_roc_jax.run.summary import one_of, read_summary, summary_lines, write_summary
from grpo_roc_jax.run.watch import CONFIG_STATUS, INFRASTRUCTURE_STATUS, GapCheck, Stopped, Watch
from grpo_roc_jax.settings.callables import check_functions, given
from grpo_roc_jax.settings.cli import ConfigError, config_errors, dump_yaml, load_config
from grpo_roc_jax.settings.options import fields_of
from grpo_roc_jax.settings.secrets import hidden
from grpo_roc_jax.stream.open_groups import SamplerFailed
from grpo_roc_jax.stream.rollout_stream import RolloutStream
from grpo_roc_jax.stream.samplers import remote_samplers
from grpo_roc_jax.tools.registry import Registry
from grpo_roc_jax.types import Metrics

log = logging.getLogger(__name__)

FLAGS = ("--dry-run", "--preflight", "--force")
PROFILE = "--profile"
"""Followed by the first and the last step of a trace, as in 3:5."""


def train(
    config: Config,
    *,
    functions: Mapping[str, Callable] | None = None,
    tools: Registry | None = None,
    force: bool = False,
    environment: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None = None,
) -> dict[str, Any]:
    """Runs a configuration to its end and returns the summary that is also written to `summary.json`. A run that has
    already ended is left unchanged.

    Args:
        config: See `config.Config`.
        functions: Your functions, by the name that the configuration uses for them wherever it takes
            `package.module:function`: rewards, advantages, shaping, edits of groups and rows, judges.
        tools: Your tools, instead of the built-in ones.
        force: Continues a run with settings that change what is trained: moments are cast to another
            `optim.moment_dtype`, other data begin at their start.
        environment: Your class that answers the policy's turns, one object for each rollout. It replaces the one that
            `config.environment` names. With a mapping of several classes, a problem chooses one by its column
            `environment`.

    Raises:
        TypeError: An argument is of another type.
        ConfigError: The configuration cannot run; raised before anything is compiled.
        Stopped: No learning signal, divergence, failing infrastructure for longer than `limits` allow, or a state that
            could not be saved.
        Preempted: A signal to stop arrived; a note of the exception names the step that is saved.
        ProcessLost: One of several processes is gone.
        ProcessFailed: One of several processes failed while it sampled; raised in all of them.
        StorageFailed: The end of the run could not be copied to object storage.
        SamplerFailed: A sampler of `rollout.samplers` raised an exception, or none of them starts.
    """
    started = time.perf_counter()
    check_arguments(config, functions, tools, environment)
    config, functions = with_environment(config, environment, functions)
    with injected(), given(functions), claimed(config, force) as claim:
        if claim.start.kind == "finished":
            return show_finished(claim)
        stage, compiled, summary = first_stage(claim), 0, {}
        while stage is not None:
            stage, compiled, summary = train_stage(stage, tools, started, compiled)
        return summary


def check_arguments(config: Any, functions: Any, tools: Any, environment: Any) -> None:
    """Refuses arguments of other types than `train` takes.

    Raises:
        TypeError: The message says what to pass instead.
    """

    def refused(name: str, value: Any, must: str) -> TypeError:
        return TypeError(f"{name} is {value!r:.80} ({type(value).__name__}); must be {must}")

    if not isinstance(config, Config):
        raise refused("config", config, "a Config, such as read_config('toy.yaml', '--steps=5')")
    check_functions(functions)
    if not isinstance(tools, Registry | None):
        raise refused("tools", tools, "a Registry with your functions: tools = Registry(), then tools.add(function)")
    classes = environment.values() if isinstance(environment, Mapping) else [environment]
    for cls in () if environment is None else classes:
        if not (callable(cls) and hasattr(cls, "__qualname__")):
            must = "a class, not an object of it, or a mapping from names to classes"
            if isinstance(cls, str):
                must += "; a path is a setting: read_config(..., '--environment=FILE.py:CLASS')"
            raise refused("environment", cls, must)


def train_stage(
    claim: Claim, tools: Registry | None, started: float, compiled: int
) -> tuple[Claim | None, int, dict[str, Any]]:
    """Trains a stage of a run, or a run without stages. Returns (the next stage or None, number of programs compiled
    after the first step of a stage so far, the summary if the run has ended).

    Raises:
        Stopped: See `train`.
    """
    with open_session(claim, tools) as session:
        config = session.config
        with state_kept(session):
            with phase("start of the run", routine=True):
                run = begin(session)
            with open_loop(session, run) as loop:
                while run.step < config.steps and not stage_over(session, run):
                    loop.tracer.before(run.step + 1)
                    begun, counts = time.perf_counter(), run.buffer.counts
                    samples = sample_step(config, session.policy, session.sampling, run, loop.stream)
                    batches, metrics = update_step(session, run, loop, samples, counts, begun)
                    after_step(session, run, loop, samples, batches, metrics)
                compiled += loop.compiled_after_first
            following, summary = next_claim(claim, run), {}
            with phase("end of the run", routine=True):
                if following is None:
                    summary = finish(session, run, started, compiled)
                elif run.progress.index == claim.stage:
                    evaluate_once(session, run)
        with phase("saving the run", routine=True):
            saved, words = session.checkpointer.save_latest()
        if not saved:
            what = "run" if following is None else "stage"
            raise Stopped(INFRASTRUCTURE_STATUS, f"the {what} has ended, but {words}")
        return following, compiled, summary


def with_environment(
    config: Config,
    environment: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None,
    functions: Mapping[str, Callable] | None,
) -> tuple[Config, Mapping[str, Callable]]:
    """The configuration that names the user's classes, and the functions including these classes."""
    functions = functions or {}
    if environment is None:
        return config, functions
    several = isinstance(environment, Mapping)
    passed = environment if several else {"": environment}
    paths = {name: f"{cls.__module__}:{cls.__qualname__}" for name, cls in passed.items()}
    settings: dict[str, Any] = {"classes": tuple(map("=".join, paths.items()))} if several else {"path": paths[""]}
    if isinstance(config.environment, Hosted):
        shared = fields_of(OwnEnvironments).keys() & fields_of(type(config.environment)).keys()
        settings |= {name: getattr(config.environment, name) for name in shared}
    with config_errors():
        config = replace(config, environment=(EnvironmentByRow if several else EnvironmentClass)(**settings))
    return config, {**functions, **{paths[name]: cls for name, cls in passed.items()}}


@dataclass(eq=False)
class Loop:
    """What the steps of a stage use besides its session: made before the first of them, and ended after the last."""

    progress: Phase
    first_step: int
    """The step that the stage starts from here."""
    tracer: Tracer
    stream: RolloutStream | None
    learner: GroupLearner
    rates: Rates | None
    """How many FLOPs and bytes the devices do in a second, if that is known."""
    watch: Watch
    gap: GapCheck
    compilations: CompilationCounter
    compiled: int | None = None
    """Number of programs compiled up to the end of the first step."""

    @property
    def compiled_after_first(self) -> int:
        """Number of programs compiled after the first step; 0 is what is expected."""
        return 0 if self.compiled is None else self.compilations.count - self.compiled


@contextmanager
def open_loop(session: TrainingSession, run: RunState) -> Iterator[Loop]:
    """Compiles the programs of sampling and, if steps are left, of the update, and makes what the steps need. Saves the
    state after the last step if that is not saved yet."""
    config, checkpointer = session.config, session.checkpointer
    policy, sampling, sampler = session.policy, session.sampling, session.sampling.sampler
    left = steps_left(session, run)
    name = TRAINING if left else "a run without further steps"  # whose seconds are not those of a step
    with (
        phase(name, steps=left) as progress,
        tracing(session.run_dir) as tracer,
        remote_samplers(config, policy, sampling) as remote,
    ):
        reach("compile")
        if remote is None or session.held_out:
            sampler.engine.warmup(sampler.engine.publish(policy.full(run.train.params), run.step))
        stream = RolloutStream(config, sampling, policy.mesh, remote) if config.rollout.step_limit.streams else None
        learner = make_learner(config, policy, sampler.chat)
        if left:
            learner.warmup(run)
        if stream is not None:
            learner.learner.meanwhile = stream.meanwhile
        session.writer.say(describe_programs(session.compilations))
        checkpointer.latest = run.bundle()
        watch, rates = Watch(config.limits), device_rates(config, policy.model, policy.mesh)
        gap = GapCheck(session.events, exact=exact_sampling(config, policy))
        longest = max(config.limits.longest, session.alarms.longest if session.alarms else 0)
        for watcher in filter(None, (watch, session.alarms)):
            watcher.recall(sampling.processes.once(lambda: recorded(session.run_dir)[-longest:]))
        yield Loop(progress, run.step, tracer, stream, learner, rates, watch, gap, session.compilations)
        if not checkpointer.has(run.step):
            checkpointer.save(run.step, checkpointer.latest)


def update_step(
    session: TrainingSession,
    run: RunState,
    loop: Loop,
    samples: StepSamples,
    counts: tuple[int, int, int],
    begun: float,
) -> tuple[Sequence[UpdateBatch], Metrics]:
    """The second half of a step: updates the policy with the groups of the buffer, and records the step. From the
    update to the checkpoint this is one critical section.

    Args:
        session: The session of the stage.
        run: The state, which is updated.
        loop: What the steps use.
        samples: What `sample_step` returned.
        counts: `RolloutBuffer.counts` before the step.
        begun: When the step began, by `time.perf_counter`.

    Returns:
        (batches of the update, metrics of the step).
    """
    config, learner, stream, checkpointer = session.config, loop.learner, loop.stream, session.checkpointer
    groups = run.buffer.take(config.group.problems)
    batches = learner.batches(groups, samples.explanations, run)
    check_accounts(samples, groups, batches, counts, run.buffer.counts)
    drift = learner.drift(groups, run)
    with session.preemption.deferred():  # the update donates its input: a step that began must end
        reach("update")
        run.train, batches, measured = learner.update(run, batches)
        metrics = samples.metrics() | measured
        if stream is not None:
            aged, alarm = stream.after_update(run, groups, measured)
            metrics |= aged
            if alarm:
                session.events.note(run.step + 1, "stale_samples", alarm)
            for note in stream.take_notes():
                session.events.note(run.step + 1, "samplers", note)
        run.method = next_state(samples.groups, groups, config, run.method, drift)
        run.step += 1
        run.reference = learner.next_reference(run)
        metrics |= observe(session, run, metrics)
        if samples.unscored:
            session.events.note(run.step, "not_scored", samples.unscored)
        checkpointer.latest = run.bundle()
        metrics |= session.compilations.metrics() | {"data/left_out": run.stream.left_out}
        metrics["time/step_s"] = time.perf_counter() - begun
        metrics |= loop.rates.metrics(metrics) if loop.rates else {}
        reach("record")
        record(session, run, samples, groups, batches, metrics)
        if checkpointer.due(run.step):
            checkpointer.save(run.step, checkpointer.latest)
    return batches, metrics


def after_step(
    session: TrainingSession,
    run: RunState,
    loop: Loop,
    samples: StepSamples,
    batches: Sequence[UpdateBatch],
    metrics: Metrics,
) -> None:
    """Records failures of a finished step, checks its metrics, and evaluates if that is due."""
    config, watch = session.config, loop.watch
    if loop.compiled is None:
        loop.compiled = session.compilations.count
    if traced := loop.tracer.after(run.step):
        session.writer.say(traced)
    loop.progress.step(run.step - loop.first_step)
    loop.gap.look(run.step, metrics)
    for text in watch.new_failures(samples.failures):
        session.events.note(run.step, "environment", text)
    for text in session.watchdog.take_stalls():
        session.events.note(run.step, "stalled", text)
    watch.look_at_failures(samples.failures, samples.sampled)
    look(session, run, metrics, batches, watch)
    if config.eval.every and run.step % config.eval.every == 0 and run.step < config.steps:
        measured = evaluate(session, run)[1]
        observe(session, run, measured)
        session.writer.write(run.step, measured)


def sample_step(
    config: Config, policy: PolicyModel, sampling: GroupSampler, run: RunState, stream: RolloutStream | None = None
) -> StepSamples:
    """The sampling half of a step: publishes the policy, samples, scores and selects until the buffer has the groups of
    a step, or no dynamic sampling round is left. If there is a stream, the groups come from it."""
    reach("sample")
    if stream is None:
        weights = sampling.sampler.engine.publish(policy.full(run.train.params), run.step)
    else:
        weights = stream.publish(policy, run)
    rng, plan_rng = np.random.default_rng([config.seed, run.step]), np.random.default_rng([config.seed, run.step, 2])
    rounds = []
    for index in range(1 + config.group.dynamic_sampling_rounds):
        if stream is not None:
            samples = stream.next_round(run, weights)
        else:
            problems = draw_problems(config, run.stream, run.method, plan_rng)
            placed = {"step": run.step, "first_place": index * config.group.problems, "partial": run.partial}
            samples = run_round(config, sampling, weights, problems, run.method, plan_rng, **placed)
        begun = time.perf_counter()
        reach("select")
        selections = tuple(resample_group(group, config, rng) for group in samples.groups)
        selected = [subset(g, s) for g, s in zip(samples.groups, selections, strict=True) if s.kept]
        run.buffer.add(spoiled("selected", selected))
        rounds.append(replace(samples, selections=selections, select_s=time.perf_counter() - begun))
        run.sampled += samples.sampled
        run.partial = samples.partial
        if len(run.buffer) >= config.group.problems:
            break
    return merge_rounds(rounds)


def exact_sampling(config: Config, policy: PolicyModel) -> bool:
    """Whether sampler and trainer compute the same log-probabilities up to the rounding of float32: with that precision
    throughout, and rows that train under the prompts that they were sampled under."""
    rollout = config.rollout
    full = rollout.weight_dtype == rollout.cache_dtype == "full" and not config.plan.second.trains_plain
    return full and compute_dtype(policy.model) == "float32"


def look(
    session: TrainingSession, run: RunState, metrics: Metrics, batches: Sequence[UpdateBatch], watch: Watch
) -> None:
    """Checks a finished step. The batch of an update that was not finite or raised an alarm is saved for a replay.

    Raises:
        Stopped: A limit is reached, or an alarm ends the run.
    """
    skipped = bool(batches and metrics.get("update/skipped", 0.0))
    why = ["not finite"] if skipped else []
    try:
        if session.alarms is not None:
            why += session.alarms.look(run.step, metrics)
    except Stopped as error:
        why.append(str(error))
        raise
    finally:
        once, config = session.sampling.processes.once, session.config
        saved = why and once(lambda: keep_batch(session.run_dir, config, run.step, batches, why[0]))
        if saved:
            session.events.note(run.step, "batch", f"{why[0]}; grpo-roc replay runs {saved} again")
            if skipped and not session.checkpointer.has(run.step):  # with the parameters that it was computed with
                session.checkpointer.save(run.step, session.checkpointer.latest)
    watch.look(metrics)


def describe_programs(compiled: CompilationCounter) -> str:
    """Number and seconds of the programs compiled at the start, and how many came from the cache."""
    folder = keep_programs()
    where = f"{compiled.hits} of them from {folder}" if folder else "the compilation cache is off"
    return f"programs: {compiled.count} in {compiled.seconds:.1f} s, {where}"


def finish(session: TrainingSession, run: RunState, started: float, compiled_after_first: int) -> dict[str, Any]:
    """Runs the last evaluation, writes `summary.json` and shows the closing lines."""
    accuracy = evaluate_once(session, run)
    processes = session.sampling.processes
    same = run.setup_before in (None, evaluation_setup(session))
    measured = {
        "step": run.step,
        "device": describe_device(),
        "processes": processes.count,
        "isolation": session.sampling.sampler.executor.capabilities.level,
        "accuracy_before": run.accuracy_before if same else None,
        "accuracy_after": accuracy,
        "compilations_after_first_step": compiled_after_first,
        "seconds": time.perf_counter() - started,
        "left_out": {"problems": run.stream.left_out, "held_out": session.held_out_left_out},
    }
    summary = processes.once(lambda: write_summary(session.run_dir, session.config, **measured))
    lines = summary_lines(session.run_dir, summary, session.config.run_dir)
    for line in [*lines, *measured_lines(recorded(session.run_dir))]:
        session.writer.say(line)
    return summary


def show_finished(claim: Claim) -> dict[str, Any]:
    """Shows and returns the summary of a run that has ended; changes no file."""
    summary = claim.processes.once(lambda: read_summary(claim.run_dir))
    if claim.processes.first and claim.config.log.console != "off":
        console = ConsoleWriter(claim.config.steps, "plain")
        lines = summary_lines(claim.run_dir, summary, claim.config.run_dir)
        for line in (f"the run has ended after step {claim.start.step}", *lines):
            console.say(line)
    return summary


def say_what_does_not_fit(session: TrainingSession) -> None:
    """Writes what the device has too little memory for, by arithmetic, and what would help."""
    policy = session.policy
    for line in room_lines(session.config, policy.model, policy.mesh, device_limit(policy.mesh)):
        session.writer.say(line)


def begin(session: TrainingSession) -> RunState:
    """Announces the run and finds where it starts: at the newest checkpoint, or fresh, which the
    condition of the rollouts may refuse (`check_before_training`).

    Raises:
        ConfigError: a fresh policy that `plan.condition` refuses.
    """
    claim = session.claim
    config = session.config
    if claim.stages:  # the session has the steps of the run
        config = replace(config, steps=min(config.steps, claim.stages[claim.stage].steps))
    announce(session, config)
    say_what_does_not_fit(session)
    try:
        run = restored_or_fresh(session)
    except RewardError as error:
        raise ConfigError(str(error)) from error
    except NonFiniteWeightsError as error:
        raise ConfigError(f"{error}; check the weights at model.path, or lower sft.lr") from error
    if run.step == 0:
        parts = session.config, session.policy, session.sampling, session.held_out
        for line in check_before_training(*parts, run.train.params):
            session.writer.say(line)
    return run


def restored_or_fresh(session: TrainingSession) -> RunState:
    """The newest checkpoint with the evaluation that was due there, or a fresh run after its supervised stage and a
    first evaluation. Files of the run are written and truncated from here on."""
    config, writer, processes = session.config, session.writer, session.sampling.processes
    run = fresh_run(config, session.policy, session.sampling)
    for note in (*run.stream.notes, *hindrances(config, session.sampling.sampler.chat)):
        writer.say(note)
    if session.start.kind == "resume":
        forced = session.start.forced
        saved = session.checkpointer.restore_latest(run.bundle(), cast=forced)
        if saved is None:
            raise ConfigError(f"the checkpoints of {session.run_dir} vanished while the run started")
        other_data = forced and not session.claim.stages and not run.stream.owns(saved.host["data"])
        if other_data:
            writer.say(OTHER_DATA)
        with config_errors():
            run.load(saved, position=not session.claim.stages and not other_data)
        session.checkpointer.latest = run.bundle()
    processes.once(lambda: describe_run(session.run_dir, session.claim.all_stages))
    if session.start.kind == "resume":
        for note in (*session.start.notes, f"resumed after step {run.step}"):
            writer.say(note)
        writer.cut(run.step)
        session.events.cut(run.step)
        if processes.first:
            session.traces.cut(run.step)
            sft_steps = 0 if session.start.forced or session.claim.stages else config.sft.steps
            for lost in missing_rows(session.run_dir, run.step, config.log.traces, sft_steps, saved.logs):
                session.events.note(run.step, "missing_rows", f"{lost}, which had not reached the disk")
        if run.step == 0 and run.accuracy_before is None and session.held_out:
            evaluate_first(session, run)
        enter_stage(session, run, saved.host["data"])
        if config.eval.every and run.step % config.eval.every == 0 and 0 < run.step < config.steps:
            observe(session, run, evaluation_metrics(session, run))
        return run
    session.events.cut(-1)  # those of a start that was ended before its first checkpoint
    if processes.first:
        session.traces.cut(-1)
    cold_start(config, session.policy, session.sampling.sampler.chat, run, writer)
    session.checkpointer.latest = run.bundle()
    if config.sft.steps:  # so that a failing evaluation cannot lose it
        session.checkpointer.save(0, session.checkpointer.latest)
    evaluate_first(session, run)
    enter_stage(session, run, None)
    return run


def evaluate_first(session: TrainingSession, run: RunState) -> None:
    """Evaluates before the first step, and saves the state with the result."""
    run.accuracy_before, metrics = evaluate(session, run)
    run.setup_before = metrics.get(SETUP)
    session.writer.write(0, metrics)
    session.checkpointer.latest = run.bundle()
    session.checkpointer.save(0, session.checkpointer.latest)


def record(
    session: TrainingSession, run: RunState, samples: StepSamples, groups: Sequence, batches: Sequence, metrics: Metrics
) -> None:
    """Writes metrics and trajectories of a finished step, and shows a trajectory every `log.samples` steps."""
    traces, writer, every = session.traces, session.writer, session.config.log.samples
    shows = every > 0 and run.step % every == 0
    records = []
    if traces.due(run.step) or shows:
        of_first_epoch = sum(group.size for group in groups)
        trained = {"trained": groups, "rows": [row for batch in batches for row in batch.rows][:of_first_epoch]}
        left = {"removed": [pair for wave in samples.waves for pair in wave.removed], "outside": samples.outside}
        records = step_records(run.step, samples.groups, samples.selections, **trained, **left)
    if why := why_nothing_kept(metrics):
        writer.say(f"step {run.step} {why}")
    traces.write(run.step, records)
    shown = one_of(records, run.step, session.sampling.sampler.chat.tokenizer.decode) if shows else None
    if shown is not None:
        writer.sample(run.step, shown, records)
    writer.write(run.step, metrics)


def evaluate(session: TrainingSession, run: RunState) -> tuple[float | None, Metrics]:
    """Held-out accuracy (None without problems) and metrics of the current policy; its trajectories are saved."""
    config, sampling = session.config, session.sampling
    if not session.held_out:
        return None, {}
    reach("evaluate")
    weights = sampling.sampler.engine.publish(session.policy.full(run.train.params), run.step)
    extras = {"step": run.step, "temperature": config.eval.temperature, "weights": weights}
    with phase(evaluation_phase(len(session.held_out))):
        result = evaluate_policy(config, sampling, session.held_out, config.eval.samples, **extras)
    accuracy, metrics, sampled = result
    session.traces.write(run.step, eval_records(run.step, sampled.groups, sampled.removed), kind="eval")
    return accuracy, metrics | {SETUP: evaluation_setup(session)}


def evaluation_setup(session: TrainingSession) -> float:
    """What the evaluations of a session measure besides the policy, as a number."""
    return setup_number(session.held_out, session.config.eval.samples, session.config.eval.temperature)


def evaluate_once(session: TrainingSession, run: RunState) -> float | None:
    """Held-out accuracy at a step; None without problems. See `evaluation_metrics`."""
    return evaluation_metrics(session, run).get(f"eval/{ALL}/avg@{session.config.eval.samples}")


def evaluation_metrics(session: TrainingSession, run: RunState) -> Metrics:
    """Metrics of the evaluation at a step; empty without held-out problems. They are computed and written unless the
    record of the run has them already, of the same problems and settings, as for a run that has just ended."""
    name, setup = f"eval/{ALL}/avg@{session.config.eval.samples}", evaluation_setup(session)

    def find() -> Metrics:
        rows = [row for row in recorded(session.run_dir) if row["step"] == run.step and row.get(SETUP, setup) == setup]
        return {key: value for row in rows if name in row for key, value in row.items() if key.startswith("eval/")}

    known = session.sampling.processes.once(find)
    if known or not session.held_out:
        return known
    metrics = evaluate(session, run)[1]
    session.writer.write(run.step, metrics)
    return metrics


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    words = [part for word in words for part in (word.split("=") if word == "--dry-run=full" else [word])]
    full = "--dry-run" in words[:-1] and words[words.index("--dry-run") + 1] == "full"
    if full:
        words.pop(words.index("--dry-run") + 1)
    dry_run, ahead, force = (flag in words for flag in FLAGS)
    words = [word for word in words if word not in FLAGS]
    traced, words = split_option(words, PROFILE)
    show_log()
    try:
        with narrated(to_stderr), phase("train", routine=True):  # `python -m grpo_roc_jax.train` has no other narrator
            config = load_config(Config, words, prog="python -m grpo_roc_jax.train", default_file=DEFAULT_CONFIG)
            profile = Profile.parse(traced) if traced is not None else Profile()
            if dry_run:
                dry(config, full)
            elif ahead:
                for stage in config.staged():
                    print("\n".join([*preflight_lines(preflight(stage)), *host_lines(stage)]))
            else:
                with profiled(profile):
                    train(config, force=force)
    except ConfigError as error:
        return ended(CONFIG_STATUS, f"configuration: {error}")
    except RewardError as error:
        return ended(CONFIG_STATUS, f"reward: {error}", error)
    except Stopped as error:
        return ended(error.status, f"stopped: {error}", error)
    except (CheckpointFailed, StorageFailed, SamplerFailed, ProcessFailed) as error:
        return ended(INFRASTRUCTURE_STATUS, f"stopped: {error}", error)
    except ProcessLost as error:
        advice = "run the same command on all hosts with --resume auto to continue"
        ended(INFRASTRUCTURE_STATUS, f"stopped: {error}; {advice}")
        os._exit(INFRASTRUCTURE_STATUS)  # an orderly end would wait for the process that is gone
    except Preempted as error:
        return ended(PREEMPTED_STATUS, "interrupted", error)
    return 0


def split_option(words: Sequence[str], name: str) -> tuple[str | None, list[str]]:
    """(value of an option given as `NAME VALUE` or `NAME=VALUE`, or None, the other words)."""
    for i, word in enumerate(words):
        if word.startswith(f"{name}="):
            return word.removeprefix(f"{name}="), [*words[:i], *words[i + 1 :]]
        if word == name:
            return "".join(words[i + 1 : i + 2]), [*words[:i], *words[i + 2 :]]
    return None, list(words)


def ended(status: int, words: str, error: BaseException | None = None) -> int:
    """Prints why the run ends, with the notes of the exception; returns the exit status."""
    notes = getattr(error, "__notes__", ["before this start finished a step"] if isinstance(error, Preempted) else [])
    with suppress(OSError):  # the terminal may be gone
        print(hidden("; ".join([words, *notes])), file=sys.stderr, flush=True)
    return status


def dry(config: Config, full: bool = False) -> None:
    """Builds what needs no device work and reads the data. Then prints what was read, what follows from the settings,
    and last the problems that were seen.

    Args:
        config: Configuration of the run.
        full: Whether to print the resolved configuration first.

    Raises:
        ConfigError: The start of a run would refuse the configuration.
    """
    read: list[str] = []
    lines: list[str] = []
    for index, staged in enumerate(config.staged()):
        tokenizer, chat, model, mesh, _ = check_components(staged, make_registry(staged))
        find_teacher(staged, tokenizer)
        with config_errors(RewardError, ModuleNotFoundError), closing(make_scorer(staged.reward)) as scorer:
            check_extras(staged.log)
            lines_on_data = data_lines(staged, chat, scorer)
            of_data = [*left_out(lines_on_data), *unequal_references(staged, lines_on_data)]
            against = [*of_data, *hindrances(staged, chat, scorer)]
        stage = [f"stage {config.stages[index].name}:"] if config.stages else []
        read += [*stage, *lines_on_data]
        chosen = with_update(staged, model, mesh)
        lines += [*stage, *derived(staged), *memory_lines(chosen, model, mesh)]
        lines += room_lines(chosen, model, mesh, device_limit(mesh))
        lines += [f"problem: {line}" for line in against] or ["no problem was found"]
    if full:
        print(dump_yaml(config))
    print("\n".join([*read, "", *lines]))


if __name__ == "__main__":
    end_with(main)
