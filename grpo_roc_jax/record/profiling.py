"""A trace of some steps for `xprof` or TensorBoard: `grpo-roc train CONFIG.yaml --profile 3:5`."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import jax

from grpo_roc_jax.settings.cli import ConfigError

FOLDER = "profile"
"""Folder of the traces in the run directory."""


@dataclass(frozen=True)
class Profile:
    """The steps that are traced, from 1; none if `last` is 0."""

    first: int = 1
    last: int = 0

    @classmethod
    def parse(cls, words: str) -> "Profile":
        """The range of steps in `3:5`, or in `3` for a single step.

        Raises:
            ConfigError: The text is not a range of steps.
        """
        match = re.fullmatch(r"(\d+)(?::(\d+))?", words)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last:
            raise ConfigError(f"--profile {words}; must be the first and the last step to trace, from 1, as in 3:5")
        return cls(first, last)


_CHOSEN: ContextVar[Profile | None] = ContextVar("profile", default=None)


@contextmanager
def profiled(profile: Profile) -> Iterator[None]:
    """Runs inside trace these steps."""
    token = _CHOSEN.set(profile)
    try:
        yield
    finally:
        _CHOSEN.reset(token)


@contextmanager
def tracing(run_dir: Path) -> Iterator["Tracer"]:
    """Traces the steps of `profiled` into the run directory; what is under way at the end is written too."""
    tracer = Tracer(_CHOSEN.get() or Profile(), run_dir / FOLDER)
    try:
        yield tracer
    finally:
        tracer.stop()


class Tracer:
    """Starts and stops the trace of a `Profile`."""

    def __init__(self, profile: Profile, folder: Path):
        self._profile, self._folder, self._under_way = profile, folder, False

    def before(self, step: int) -> None:
        """Called before a step. A run that resumes within the range traces the steps that are left."""
        if not self._under_way and self._profile.first <= step <= self._profile.last:
            self._under_way = True
            jax.profiler.start_trace(str(self._folder))

    def after(self, step: int) -> str:
        """Called after a step; a line that says where the trace is, once it is written."""
        if not self._under_way or step < self._profile.last:
            return ""
        self.stop()
        return (
            f"the trace of steps {self._profile.first} to {step} is in {self._folder}: `xprof {self._folder}` shows it"
        )

    def stop(self) -> None:
        """Writes what is under way."""
        if self._under_way:
            self._under_way = False
            jax.profiler.stop_trace()
