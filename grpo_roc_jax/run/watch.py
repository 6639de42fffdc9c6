"""Watches a run: the limits that end it, with an exit status for each; the alarms of section `watch`; and the watchdog,
a thread that reports where the run is when a part of a step takes too long."""

import faulthandler
import logging
import math
import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from grpo_roc_jax.config import LimitsConfig, WatchConfig
from grpo_roc_jax.engine.protocol import FailureCount
from grpo_roc_jax.process.points import listening
from grpo_roc_jax.record.events import Events
from grpo_roc_jax.settings.secrets import hidden
from grpo_roc_jax.types import Metrics

CONFIG_STATUS, NO_SIGNAL_STATUS, DIVERGED_STATUS, INFRASTRUCTURE_STATUS = 2, 3, 4, 5


class Stopped(Exception):
    """The run ends early for a reason that has an exit status of its own."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status = status


class Watch:
    """Counts bad steps in a row and ends a run that makes no progress."""

    def __init__(self, limits: LimitsConfig):
        self._limits = limits
        self._empty = self._skipped = self._broken = 0
        self._passed = False
        """Whether some rollout has ended without a failure."""
        self._named = ""
        """The most frequent failure of an environment or agent in the last step that had one, for messages."""
        self._kinds: set[str] = set()

    def recall(self, rows: Sequence[Metrics]) -> None:
        """Counts the steps before a resume. `rows` are their metrics."""
        for row in rows:
            if "rollout/stop_failed" in row:  # a row may hold an evaluation alone
                lost = row["rollout/stop_failed"] + row.get("rollout/stop_infrastructure", 0.0)
                self._passed = self._passed or lost < 1
            if "time/step_s" in row:
                with suppress(Stopped, KeyError):  # metrics may be missing in rows of other versions
                    self.look(row)

    def new_failures(self, failures: Mapping[str, FailureCount]) -> list[str]:
        """The texts of failures of kinds that no earlier step of this process had."""
        new = failures.keys() - self._kinds
        self._kinds |= new
        return [failures[kind].text for kind in sorted(new)]

    def look_at_failures(self, failures: Mapping[str, FailureCount], rollouts: int) -> None:
        """Checks the failures of environments and agents of a step. Must be called for each step in turn.

        Args:
            failures: Failures of the step, by kind.
            rollouts: Number of rollouts of the step.

        Raises:
            Stopped: All rollouts of the step ended by one failure. A failure that the policy caused ends a run only if
                no rollout has ended without failure so far.
        """
        before, failed = self._passed, sum(failure.count for failure in failures.values())
        self._passed = before or failed < rollouts
        if not failures:
            return
        worst = max(failures.values(), key=lambda failure: failure.count)
        self._named = f"; {worst.count} of {rollouts} rollouts of the last such step: {worst.text}"
        alike = worst.count >= rollouts > 0
        if alike and (not worst.by_policy or (worst.same and not before)):
            remedy = "mend it" + (", or show the policy what it must say" if worst.by_policy else "")
            raise Stopped(
                INFRASTRUCTURE_STATUS,
                f"infrastructure: all {rollouts} rollouts of a step ended alike: {worst.text}; {remedy}. The log and "
                "the first such trajectory have the traceback",
            )

    def look(self, metrics: Metrics) -> None:
        """Checks the metrics of a step against the limits. Must be called for each step in turn.

        Raises:
            Stopped: A limit is reached.
        """
        limits = self._limits
        lost = metrics.get("verdict/infrastructure", 0.0) + metrics.get("verdict/not_scored", 0.0)
        self._broken = self._broken + 1 if lost > limits.infrastructure_share or lost >= 1 else 0
        empty = "loss/value" not in metrics or metrics["update/signal"] == 0
        if not self._broken:  # a step without its trajectories says nothing about the problems
            self._empty = self._empty + 1 if empty else 0
        self._skipped = self._skipped + 1 if metrics.get("update/skipped", 0.0) and "loss/value" in metrics else 0
        if self._empty >= limits.empty_steps:
            raise Stopped(
                NO_SIGNAL_STATUS,
                f"no learning signal: {self._empty} steps in a row without a group of unequal rewards (in the last: "
                f"{metrics['roc/all_correct']:.0f} all correct, {metrics['roc/all_wrong']:.0f} all wrong); "
                f"change the difficulty of data.sources, or raise group.dynamic_sampling_rounds{self._named}",
            )
        if self._skipped >= limits.skipped_updates:
            raise Stopped(
                DIVERGED_STATUS,
                f"diverged: {self._skipped} updates in a row were not finite and left the policy as it was; "
                "lower optim.lr, or resume from an earlier checkpoint",
            )
        if self._broken >= limits.infrastructure_steps:
            share = limits.infrastructure_share
            many = f"more than {share:.0%}" if share < 1 else "all"
            raise Stopped(
                INFRASTRUCTURE_STATUS,
                f"infrastructure: {many} of the trajectories were lost in each of {self._broken} steps, {lost:.0%} in "
                f"the last ({metrics.get('verdict/not_scored', 0.0):.0%} that a reward function did not score); see "
                f"the warnings, tools/ metrics and the trajectory log{self._named}",
            )


RULES = (
    ("reward_spread", "rollout/reward_std", "below"),
    ("tool_calls", "rollout/tool_calls", "times"),
    ("entropy_low", "loss/entropy", "below"),
    ("entropy_high", "loss/entropy", "above"),
    ("truncated", "rollout/truncated", "above"),
    ("grad_norm", "update/grad_norm", "times"),
    ("logprob_gap", "loss/logprob_gap_mean", "above"),
    ("sample_size", "loss/effective_sample_size", "below"),
    ("answers", "rollout/answers", "above"),
)
"""Alarm (a setting of `watch`), its metric, and on which side of the threshold it is raised. `times` means above so
many times the median of the last steps."""
LEAST_HISTORY = 5
"""Number of steps before a jump can be detected, unless `watch.history` has fewer."""
LARGE_GAP = 1.0
"""Difference in nats between the log-probabilities of a token in sampling and in training that rounding in float32
cannot explain."""


class GapCheck:
    """Reports a step whose sampler and trainer disagree about a token by more than rounding can explain; in every run,
    with or without a section `watch`. The event is not repeated until the gap has become small again."""

    def __init__(self, events: Events, *, exact: bool):
        """`exact`: whether sampler and trainer compute the same numbers except for rounding in float32."""
        self._events, self._exact, self._large = events, exact, False

    def look(self, step: int, metrics: Metrics) -> bool:
        """Whether this step raises the event."""
        value = metrics.get("loss/logprob_gap_max", math.nan)
        before, self._large = self._large, self._exact and value > LARGE_GAP
        if not self._large or before:
            return False
        text = (
            f"loss/logprob_gap_max {value:.4g} nats in float32: a token has another log-probability in training than "
            "when it was sampled; the tokens or the weights are not those of the sampler"
        )
        more = {"metric": "loss/logprob_gap_max", "value": value, "threshold": LARGE_GAP, "action": "note"}
        self._events.note(step, "logprob_gap_max", text, **more)
        return True


class Alarms:
    """Checks the metrics of each step in turn.

    A level must be crossed in `watch.steps` steps in a row, a jump in one. An alarm is not repeated until its metric is
    back within the threshold.
    """

    def __init__(self, config: WatchConfig, events: Events | None = None):
        self._config, self._events = config, events or Events(None)
        self._past: deque[Metrics] = deque(maxlen=config.history)
        self._needed = min(LEAST_HISTORY, config.history)
        self._crossed: Counter[str] = Counter()

    @property
    def longest(self) -> int:
        """Number of steps before a resume that the alarms need."""
        return self._config.history + self._config.steps

    def recall(self, rows: Sequence[Metrics]) -> None:
        """Takes the metrics of the steps before a resume without raising alarms."""
        for row in rows:
            if "time/step_s" in row:
                list(self._raised(row))

    def look(self, step: int, metrics: Metrics) -> list[str]:
        """The names of the alarms that this step raises.

        Raises:
            Stopped: One of them is listed in `watch.stop`.
        """
        raised, last = [], ""
        for name, metric, value, threshold in self._raised(metrics):
            action = "stop" if name in self._config.stop else "note"
            text = f"{metric} {value:.4g} is {'below' if value < threshold else 'above'} {threshold:.4g}"
            self._events.note(step, name, text, metric=metric, value=value, threshold=threshold, action=action)
            raised.append(name)
            last = f"alarm {name}: {text}; watch.stop lists it" if action == "stop" else last
        if last:
            raise Stopped(DIVERGED_STATUS, last)
        return raised

    def _raised(self, metrics: Metrics) -> Iterator[tuple[str, str, float, float]]:
        """(alarm, metric, value, threshold) of each alarm that a step raises."""
        for name, metric, side in RULES:
            value, threshold = metrics.get(metric, math.nan), getattr(self._config, name)
            if side == "times":
                before = [row[metric] for row in self._past if math.isfinite(row.get(metric, math.nan))]
                median = float(np.median(before)) if len(before) >= self._needed else math.inf
                threshold *= median if median > 0 else math.inf
            crossed = value < threshold if side == "below" else value > threshold
            self._crossed[name] = self._crossed[name] + 1 if crossed else 0
            if self._crossed[name] == (1 if side == "times" else self._config.steps):
                yield name, metric, value, threshold
        self._past.append(metrics)


log = logging.getLogger(__name__)

SHOWN = 20
"""Number of points in a report."""


class Watchdog:
    """Watches the points of execution that its creating thread passes (`process.points`).

    The time from one point to the next may be `watch.stall_factor` times the longest such time so far, and at least
    `watch.stall_floor_s`. Time in which the whole process was suspended does not count.

    Args:
        run_dir: Directory that reports are written to.
        config: Factor, floor, and whether `stalled` ends the run.
        in_flight: Returns lines on what the run is waiting for.
        grace_s: Seconds that an orderly end may take. After that the process is ended at once; its newest checkpoint
            remains.
        clock: Seconds that pass.
        end_process: Ends the process with a status.
    """

    def __init__(
        self,
        run_dir: Path,
        config: WatchConfig,
        in_flight: Callable[[], Sequence[str]] = lambda: (),
        *,
        grace_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        end_process: Callable[[int], object] = os._exit,
    ):
        self._run_dir, self._config, self._in_flight = run_dir, config, in_flight
        self._grace_s, self._clock, self._end_process = grace_s, clock, end_process
        self._thread = threading.get_ident()
        self._at = ("start", clock())
        self._longest: dict[str, float] = {}
        self._last: deque[tuple[str, float]] = deque(maxlen=SHOWN)
        self._poll_s = min(5.0, config.stall_floor_s / 4)
        self._ended = threading.Event()
        self.ending = ""
        """Why the run was asked to end; empty if it was not."""
        self._stalls: deque[str] = deque(maxlen=SHOWN)

    def take_stalls(self) -> list[str]:
        """What was reported since the last call, for the events of the run; its own thread asks."""
        return [self._stalls.popleft() for _ in range(len(self._stalls))]

    @contextmanager
    def watching(self) -> Iterator["Watchdog"]:
        """Watches within the block."""
        thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        thread.start()
        try:
            with listening(self._reach):
                yield self
        finally:
            self._ended.set()
            thread.join()

    def limit_s(self, point: str) -> float:
        """Seconds that may pass after a point."""
        return max(self._config.stall_floor_s, self._config.stall_factor * self._longest.get(point, 0.0))

    def _reach(self, name: str) -> None:
        if threading.get_ident() == self._thread:
            (before, since), now = self._at, self._clock()
            self._longest[before] = max(self._longest.get(before, 0.0), now - since)
            self._last.append((name, now))
            self._at = (name, now)

    def _watch(self) -> None:
        reported, looked = None, self._clock()
        while not self._ended.wait(self._poll_s):
            now, at = self._clock(), self._at
            if (late := now - looked - self._poll_s) > self._poll_s:
                self._at = at = (at[0], at[1] + late)  # the whole process was suspended
            looked = now
            if at == reported or now - at[1] <= self.limit_s(at[0]):
                continue
            reported = at
            text = f"no progress for {now - at[1]:.0f} s after {at[0]}, where {self.limit_s(at[0]):.0f} s may pass"
            log.error("%s; see %s", text, self._report(text))
            self._stalls.append(text)
            if "stalled" in self._config.stop:
                self._end(text)

    def _report(self, text: str) -> Path:
        """Writes a report on what is in flight and the stacks of all threads."""
        path = self._run_dir / f"stalled_{int(time.time())}.txt"
        with suppress(OSError), open(path, "w", encoding="utf-8") as file:
            now = self._clock()
            points = [f"  {name}, {now - when:.1f} s ago" for name, when in self._last]
            print(text, "last points:", *points, "in flight:", sep="\n", file=file)
            with suppress(Exception):  # must not fail in any state of the run
                print(*(f"  {hidden(line)}" for line in self._in_flight()), sep="\n", file=file)
            print("stacks:", file=file, flush=True)
            faulthandler.dump_traceback(file, all_threads=True)
        return path

    def _end(self, text: str) -> None:
        self.ending = text
        os.kill(os.getpid(), signal.SIGTERM)
        if not self._ended.wait(self._grace_s):
            log.error("the run does not end by itself; its newest checkpoint remains")
            self._end_process(INFRASTRUCTURE_STATUS)
