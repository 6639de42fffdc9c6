"""Progress lines, so that no phase of a command is silent: what is being done, how far it is, how much is left.

    with narrated(print):
        with phase("loading the model"):            # "loading the model ...", then "loading the model: 12.3 s"
            ...
        with phase("supervised stage", steps=400) as stage:
            stage.step(1)                           # "supervised stage: step 1 of 400 after 20.0 s, ..."

A phase may begin anywhere in the library, in any thread. Without a listener it costs almost nothing. A thread of the
narrator writes lines while a phase is busy; only the innermost phase, which began last, has lines.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

FIRST_STEPS = (1, 2, 5, 10)
STEPS_S = 30.0
"""Longest time in seconds without a line on steps, for steps that take less."""
BEGUN_S = 2.0
"""A phase that takes this many seconds gets a line that it has begun, and at its end one with its duration."""
QUIET_S = 8.0
"""Longest time in seconds without any line during a phase."""
FEW = 0.1
"""Share of the steps of a phase whose steps run together that must have ended before the time left is said. In recorded
runs the rate of the first ended rollouts gave 7 to 100 times the time that was left, later 0.2 to 2 times."""
POLL_S = 0.25

Clock = Callable[[], float]


@dataclass(eq=False)
class Phase:
    """Something that takes long, and its progress."""

    name: str
    steps: int = 0
    """Number of steps in all; 0 if it has none."""
    routine: bool = False
    """Whether it recurs many times, so that it has lines only if nothing else was written for long."""
    unit: str = "step"
    once: bool = False
    """Whether it comes once, as a compilation does: its seconds say nothing of the steps that are left around it."""
    together: bool = False
    """Whether its steps run at the same time, as rollouts do: the first ones to end say little of the others."""
    say: Callable[[str], None] = lambda line: None
    clock: Clock = time.monotonic
    status: str = ""
    """A description of its progress; see `at`."""
    done: int = 0
    usual: float = 0.0
    """Seconds of a step in an earlier run, or of all of it if it has none; 0 if unknown."""
    started: float = 0.0
    announced: bool = False
    _first_s: float = 0.0
    """Seconds of the first step, which includes compilation."""
    _aside: float = 0.0
    """Seconds of the phases inside it that come once."""
    _grew: float = 0.0
    """Time at which `done` grew last."""
    _stepped: float = field(default=0.0)
    """Time of the last line on a step."""

    def __post_init__(self) -> None:
        self.started = self._stepped = self._grew = self.clock()

    def at(self, done: int, status: str = "") -> None:
        """Records how many steps are done; the narrator writes a line if one is due."""
        if done > self.done:
            self._grew = self.clock()
        self.done, self.status = done, status

    def set_aside(self, seconds: float) -> None:
        """Leaves seconds out of those of a step; see `once`."""
        self._aside += seconds

    def step(self, done: int) -> None:
        """Records that step number `done`, counted from 1, has ended. The first steps have a line, later ones one per
        `STEPS_S`. Several steps at once always have one."""
        now, several = self.clock(), done - self.done > 1
        self.done, self.status, self._grew = done, "", now
        if done == 1:
            self._first_s = now - self.started
        if several or done in FIRST_STEPS or done == self.steps or now - self._stepped >= STEPS_S:
            self._stepped = now
            self.say(self._after_step(now))

    def _after_step(self, now: float) -> str:
        at = f"{self.name}: {self.unit} {self.done} of {self.steps}"
        if self.done == 1:
            return f"{at} after {self._first_s:.1f} s, compilation included{self.left(now)}"
        return f"{at}, {self._each():.2f} s a {self.unit}{self.left(now)}"

    def _each(self) -> float:
        """Seconds per step up to the last one that ended, without compilation: the first one, or what was set aside."""
        left_out = self._first_s or min(self._aside, self._grew - self.started)
        return (self._grew - self.started - left_out) / max(self.done - (self._first_s > 0), 1)

    def left(self, now: float) -> str:
        """How long it still takes, in words after a comma; empty if nothing says so."""
        few = self.done < 2 or (self.together and self.done < FEW * self.steps)
        left, each = self.steps - self.done, self.usual if few else self._each()
        if self.steps:
            more = max(each * left - (now - self._grew), each * (left - 1))  # the step that runs may take longer
            return f", {describe_seconds(more)} left" if more > 0 else ""
        more = self.usual - (now - self.started)
        return f", about {describe_seconds(more)} left" if more > 0 else ""

    def seconds(self) -> float:
        """Seconds of a step, or of the whole phase if it has no steps; 0 if too few steps were done to estimate it."""
        if self.steps:
            return self._each() if self.done > 1 else 0.0
        return self.clock() - self.started

    def going_on(self) -> str:
        """The line for a phase that has had none for long."""
        now = self.clock()
        line = f"{self.name}: {describe_seconds(now - self.started)} so far"
        if self.steps:
            line = f"{self.name}: {self.done} of {self.steps} done after {describe_seconds(now - self.started)}"
        return line + (f", {self.status}" if self.status else "") + self.left(now)


class Narrator:
    """Writes the progress of the open phases. `narrated` makes one.

    Args:
        say: Takes each line; may be replaced while phases are open.
        clock: Returns seconds.
        poll_s: Seconds between two checks of the phases.
    """

    def __init__(self, say: Callable[[str], None], clock: Clock = time.monotonic, poll_s: float = POLL_S):
        self.say, self.clock, self._poll_s = say, clock, poll_s
        self.drawn: Callable[[], bool] = lambda: False
        """Whether a display is redrawn continuously, so that a phase in progress needs no further lines."""
        self.usual: Mapping[str, float] = {}
        """Seconds of a step of a phase, or of all of it, in an earlier run; see `Phase.seconds`."""
        self.measured: dict[str, float] = {}
        """Seconds of the phases that have ended; see `Phase.seconds`."""
        self._open: list[Phase] = []
        self._lock = threading.Lock()
        self._spoke = clock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)

    def tell(self, line: str) -> None:
        """Writes a line."""
        self._spoke = self.clock()
        self.say(line)

    def begin(self, phase: Phase) -> None:
        with self._lock:
            if not self._open:
                self._spoke = max(self._spoke, self.clock())
            self._open.append(phase)

    def end(self, phase: Phase, *, failed: bool) -> None:
        with self._lock:
            self._open.remove(phase)
            if phase.once and not any(other.once for other in self._open):  # else that one counts it
                for around in self._open:
                    around.set_aside(self.clock() - phase.started)
        if not failed and (seconds := phase.seconds()) > 0:
            self.measured[phase.name] = seconds
        if phase.announced and not failed:
            self.tell(f"{phase.name}: {self.clock() - phase.started:.1f} s")

    def look(self) -> None:
        """Writes the lines that are due now."""
        with self._lock:
            phase = self._open[-1] if self._open else None
            if phase is None:
                return
            now = self.clock()
            begins = not (phase.routine or phase.steps or phase.announced) and now - phase.started >= BEGUN_S
            phase.announced |= begins
        if begins:
            self.tell(f"{phase.name} ...{phase.left(now)}".replace("..., ", "... "))
        elif now - self._spoke >= QUIET_S and not self.drawn():
            self.tell(phase.going_on())

    def _watch(self) -> None:
        while not self._ended.wait(self._poll_s):
            with suppress(Exception):  # a closed output must not end the run
                self.look()

    @contextmanager
    def listening(self) -> Iterator["Narrator"]:
        self._thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            self._thread.join()


_narrator: Narrator | None = None


@contextmanager
def narrated(say: Callable[[str], None], clock: Clock = time.monotonic, poll_s: float = POLL_S) -> Iterator[Narrator]:
    """Passes lines on the phases within the block to `say`, which several threads may call. If a narrator is already
    active, that one is used. See `Narrator` for the arguments."""
    global _narrator
    if _narrator is not None:
        yield _narrator
        return
    with Narrator(say, clock, poll_s).listening() as _narrator:
        try:
            yield _narrator
        finally:
            _narrator = None


@contextmanager
def phase(
    name: str,
    *,
    steps: int = 0,
    routine: bool = False,
    unit: str = "step",
    once: bool = False,
    together: bool = False,
) -> Iterator[Phase]:
    """A phase that lasts as long as the block.

    Args:
        name: What is done: "compiling decode/8".
        steps: Number of steps that `Phase.step` or `Phase.at` counts; 0 for none.
        routine: Whether it recurs many times, so that it has lines only if nothing else was written for long.
        unit: What a step is called.
        once: Whether it comes once, as a compilation does, so that the time left around it is reckoned without it.
        together: Whether its steps run at the same time.
    """
    narrator = _narrator
    if narrator is None:
        yield Phase(name, steps, routine, unit, once, together)
        return
    usual = narrator.usual.get(name, 0.0)
    opened_phase = Phase(name, steps, routine, unit, once, together, narrator.tell, narrator.clock, usual=usual)
    narrator.begin(opened_phase)
    failed = True
    try:
        yield opened_phase
        failed = False
    finally:
        narrator.end(opened_phase, failed=failed)


def to_stderr(line: str) -> None:
    """Writes a line of a command whose output other programs may read."""
    with suppress(OSError, ValueError):  # nobody reads the output any more
        print(line, file=sys.stderr, flush=True)


class AboveDisplays(logging.StreamHandler):
    """Writes warnings to standard error. In a terminal it follows `sys.stderr`, which a display that is being redrawn
    replaces: a line written past the display would be overwritten."""

    def __init__(self) -> None:
        super().__init__()
        self._terminal = self.stream.isatty()

    def emit(self, record: logging.LogRecord) -> None:
        if self._terminal and self.stream is not sys.stderr:
            self.setStream(sys.stderr)
        super().emit(record)


def show_log(form: str = "%(name)s: %(message)s", *, info: Sequence[str] = ()) -> None:
    """Writes warnings to standard error, see `AboveDisplays`. It replaces the handler that absl sets up there when a
    library is imported; if there are other handlers, they are left as they are.

    Args:
        form: Format of a line.
        info: Loggers whose notes are written too.
    """
    root = logging.getLogger()
    for handler in list(root.handlers):
        if type(handler) is logging.StreamHandler and handler.stream is sys.stderr:
            root.removeHandler(handler)
    if not root.handlers:
        logging.basicConfig(level=logging.WARNING, format=form, handlers=[AboveDisplays()])
    for name in info:
        logging.getLogger(name).setLevel(logging.INFO)


def describe_seconds(seconds: float) -> str:
    """A duration in words: `40 s`, `12 min`, `3.5 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
