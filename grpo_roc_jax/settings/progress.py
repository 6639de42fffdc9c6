"""Lines on what a command does, so that none of its phases is silent: what is under way, how far it is, what is left.

    with narrated(print):
        with phase("loading the model"):            # "loading the model ...", then "loading the model: 12.3 s"
            ...
        with phase("supervised stage", steps=400) as stage:
            stage.step(1)                           # "supervised stage: step 1 of 400 after 20.0 s, ..."

A phase may begin anywhere in the library, in any thread. While nobody listens it costs next to nothing. A thread of the
narrator says something where a phase itself is busy; the phase that began last speaks for those around it.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

FIRST_STEPS = (1, 2, 5, 10)
STEPS_S = 30.0
"""Longest time without a line on steps, if a step takes less."""
BEGUN_S = 2.0
"""A phase that takes this long says that it has begun, and at its end how long it took."""
QUIET_S = 8.0
"""Longest time without any line while a phase goes on."""
POLL_S = 0.25

Clock = Callable[[], float]


@dataclass(eq=False)
class Phase:
    """Something that takes long, and how far it is."""

    name: str
    steps: int = 0
    """In all; 0 if it has none."""
    routine: bool = False
    """Comes again and again: has lines only where it is long without any."""
    unit: str = "step"
    say: Callable[[str], None] = lambda line: None
    clock: Clock = time.monotonic
    status: str = ""
    """How it goes, in words; see `at`."""
    done: int = 0
    usual: float = 0.0
    """Seconds of a step in an earlier run, or of all of it if it has none; 0 if unknown."""
    started: float = 0.0
    announced: bool = False
    _first_s: float = 0.0
    """Seconds of the first step, which compiles."""
    _stepped: float = field(default=0.0)
    """When a step had a line."""

    def __post_init__(self) -> None:
        self.started = self._stepped = self.clock()

    def at(self, done: int, status: str = "") -> None:
        """Notes how many steps are done; a line of the narrator says so if one is due."""
        self.done, self.status = done, status

    def step(self, done: int) -> None:
        """Notes that a step has ended, from 1; the first steps have a line, then there is one in `STEPS_S`. Several
        steps at once always have one."""
        now, several = self.clock(), done - self.done > 1
        self.done, self.status = done, ""
        if done == 1:
            self._first_s = now - self.started
        if several or done in FIRST_STEPS or done == self.steps or now - self._stepped >= STEPS_S:
            self._stepped = now
            self.say(self._after_step(now))

    def _after_step(self, now: float) -> str:
        at = f"{self.name}: {self.unit} {self.done} of {self.steps}"
        if self.done == 1:
            return f"{at} after {self._first_s:.1f} s, compilation included{self.left(now)}"
        return f"{at}, {self._each(now):.2f} s a {self.unit}{self.left(now)}"

    def _each(self, now: float) -> float:
        """Seconds a step, without the first one, which compiles."""
        return (now - self.started - self._first_s) / max(self.done - (self._first_s > 0), 1)

    def left(self, now: float) -> str:
        """How long it still takes, in words after a comma; empty if nothing says so."""
        left, each = self.steps - self.done, self._each(now) if self.done > 1 else self.usual
        if self.steps:
            return f", {describe_seconds(each * left)} left" if left > 0 and each else ""
        more = self.usual - (now - self.started)
        return f", about {describe_seconds(more)} left" if more > 0 else ""

    def seconds(self) -> float:
        """Of a step, or of all of it if it has none; 0 if it had too few steps to say."""
        now = self.clock()
        if self.steps:
            return self._each(now) if self.done > 1 else 0.0
        return now - self.started

    def going_on(self) -> str:
        """The line for a phase that has had none for long."""
        now = self.clock()
        line = f"{self.name}: {describe_seconds(now - self.started)} so far"
        if self.steps:
            line = f"{self.name}: {self.done} of {self.steps} done after {describe_seconds(now - self.started)}"
        return line + (f", {self.status}" if self.status else "") + self.left(now)


class Narrator:
    """Says what the open phases are at. `narrated` makes one.

    Args:
        say: Takes each line; may be replaced while phases are open.
        clock: Seconds.
        poll_s: Time between two looks at the phases.
    """

    def __init__(self, say: Callable[[str], None], clock: Clock = time.monotonic, poll_s: float = POLL_S):
        self.say, self.clock, self._poll_s = say, clock, poll_s
        self.drawn: Callable[[], bool] = lambda: False
        """Whether a display is drawn again and again, so that a phase that goes on needs no further lines."""
        self.usual: Mapping[str, float] = {}
        """Seconds of a step of a phase, or of all of it, in an earlier run; see `Phase.seconds`."""
        self.measured: dict[str, float] = {}
        """The same of phases that have ended."""
        self._open: list[Phase] = []
        self._lock = threading.Lock()
        self._spoke = clock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)

    def tell(self, line: str) -> None:
        """Says a line."""
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
        if not failed and (seconds := phase.seconds()) > 0:
            self.measured[phase.name] = seconds
        if phase.announced and not failed:
            self.tell(f"{phase.name}: {self.clock() - phase.started:.1f} s")

    def look(self) -> None:
        """Says what is due now."""
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
    """Phases within the block are told to `say`, which threads may call; to the narrator that listens already, if there
    is one. For the arguments see `Narrator`."""
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
def phase(name: str, *, steps: int = 0, routine: bool = False, unit: str = "step") -> Iterator[Phase]:
    """A phase that goes on for the length of the block.

    Args:
        name: What is done: "compiling decode/8".
        steps: Of `Phase.step` or `Phase.at`, if it has some.
        routine: It comes again and again, so it has a line only where it is long without any.
        unit: What a step is.
    """
    narrator = _narrator
    if narrator is None:
        yield Phase(name, steps, routine, unit)
        return
    found = Phase(name, steps, routine, unit, narrator.tell, narrator.clock, usual=narrator.usual.get(name, 0.0))
    narrator.begin(found)
    failed = True
    try:
        yield found
        failed = False
    finally:
        narrator.end(found, failed=failed)


def to_stderr(line: str) -> None:
    """Says a line of a command whose output other programs may read."""
    with suppress(OSError, ValueError):  # nobody reads it any more
        print(line, file=sys.stderr, flush=True)


def describe_seconds(seconds: float) -> str:
    """A duration in words: `40 s`, `12 min`, `3.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
