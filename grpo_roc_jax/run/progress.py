"""Lines on a phase that takes long: its first steps, then at least one line in half a minute."""

from dataclasses import dataclass, field

FIRST_STEPS = (1, 2, 5, 10)
QUIET_S = 30.0
"""Longest time without a line, if a step takes less."""


@dataclass
class Progress:
    """Which steps of a phase say something, and what: rate and time left."""

    name: str
    steps: int
    started: float
    """On the clock of `line`."""
    _first: float = 0.0
    """Seconds of the first step, which compiles."""
    _said: float = field(default=0.0)

    def line(self, step: int, now: float) -> str:
        """What to print after a step, from 1; empty for nothing."""
        if step == 1:
            self._first = now - self.started
        if step not in FIRST_STEPS and step != self.steps and now - self._said < QUIET_S:
            return ""
        self._said = now
        if step == 1:
            return f"{self.name}: step 1 of {self.steps} after {self._first:.1f} s, compilation included"
        each = (now - self.started - self._first) / (step - 1)
        left = f", {describe_seconds(each * (self.steps - step))} left" if step < self.steps else ""
        return f"{self.name}: step {step} of {self.steps}, {each:.2f} s a step{left}"


def describe_seconds(seconds: float) -> str:
    """A duration in words: `40 s`, `12 min`, `3.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
