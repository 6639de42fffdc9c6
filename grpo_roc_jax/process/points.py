"""Named points of execution that a run passes. Faults can be injected at them, and the watchdog sees progress there.

If nothing listens, a point costs one check of an empty tuple. Faults come from the variable `GRPO_ROC_FAULTS` or from
`injected`, as a list of `POINT=ACTION[@WHEN]`, and are drawn from a seed:

    GRPO_ROC_FAULTS="checkpoint.commit=kill@2,reward.function=raise@p0.1,seed=7"

WHEN is a count (`@2` the second time, `@2+` from then on) or a probability (`@p0.1`); without it, every time. Most
points take `ACTIONS`; those of `VALUES` pass a value, and have actions that change it.
"""

import errno
import math
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from grpo_roc_jax.hints.other_names import close_to
from grpo_roc_jax.settings.layers import ConfigError

T = TypeVar("T")

VARIABLE = "GRPO_ROC_FAULTS"
POINTS = {
    "compile": "before the programs of training are compiled",
    "sft": "before each step of the supervised stage",
    "sample": "before the rollouts of a step",
    "rollout.chunk": "between two chunks of decoding",
    "rollout.turn": "when a turn of a row has ended",
    "tool.submit": "before a call is passed to the executor",
    "tool.restart": "before the executor's process is started",
    "reward": "before the trajectories of a wave are scored",
    "reward.function": "before a reward function of the user's is called",
    "reward.values": "what it returned",
    "select": "before a group is selected from",
    "selected": "the groups of a step that selection kept",
    "score.memory": "before a scoring pass",
    "sft.memory": "before the update of a supervised step",
    "update": "before the update of a step",
    "update.weights": "the weights of the packed rows of an update",
    "update.memory": "before an optimizer step",
    "record": "before a finished step is recorded",
    "metrics.write": "before a row of metrics is written",
    "traces.write": "before trajectories are written",
    "logger.write": "before a service gets a row",
    "evaluate": "before an evaluation",
    "checkpoint.write": "before the files of a checkpoint are written",
    "checkpoint.commit": "before its manifest is written",
    "checkpoint.promote": "before it gets its name",
    "checkpoint.discard": "before an old one is deleted",
    "checkpoint.read": "before one is read",
    "storage.write": "before an object is written or deleted",
    "exchange": "before processes exchange values",
    "summary": "before `summary.json` is written",
    "export.write": "before an exported model gets its name",
}
ERRNOS = {"eio": errno.EIO, "enospc": errno.ENOSPC, "eagain": errno.EAGAIN}
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT, "stop": signal.SIGSTOP}
SPOILS: dict[str, Callable[[Any], Any]] = {
    "nan": lambda value: [math.nan] * len(value) if isinstance(value, list | tuple) else value * math.nan,
    "drop": lambda value: value[1:],
    "none": lambda value: [None] * len(value),
}
VALUES = {"reward.values": ("nan", "drop", "none"), "selected": ("drop",), "update.weights": ("nan",)}
"""Points that pass a value, and the actions at each."""
ACTIONS = (*ERRNOS, *SIGNALS, "raise", "oom", "sleep:SECONDS")
"""Actions at all other points."""
NUMBER = r"[0-9]{1,9}(?:\.[0-9]*)?"
FAULT = re.compile(rf"([a-z.]+)=([a-z]+)(?::({NUMBER}))?(?:@(?:p({NUMBER})|([0-9]{{1,9}})(\+?)))?")

_listeners: tuple[Callable[[str], None], ...] = ()
_faults: "Faults | None" = None


class InjectedFault(RuntimeError):
    """Raised by the action `raise`."""


def reach(name: str) -> None:
    """Marks that the run has reached a point. Listeners are called; an injected fault is raised from here."""
    for listener in _listeners:
        listener(name)


def spoiled(name: str, value: T) -> T:
    """Returns the value, or the value changed by an injected fault."""
    return value if _faults is None else _faults.spoil(name, value)


@contextmanager
def listening(listener: Callable[[str], None]) -> Iterator[None]:
    """Calls `listener` with the name of each point that any thread reaches within the block."""
    global _listeners
    _listeners = (*_listeners, listener)
    try:
        yield
    finally:
        _listeners = tuple(other for other in _listeners if other is not listener)


@contextmanager
def injected(text: str | None = None) -> Iterator[Counter[str]]:
    """Injects faults within the block; yields how often each one happened.

    Args:
        text: Faults in the form described in the module; None takes the environment variable.

    Raises:
        ConfigError: A word that `read_fault` refuses.
    """
    global _faults
    text = os.environ.get(VARIABLE, "") if text is None else text
    if not text:
        yield Counter()
        return
    before, _faults = _faults, Faults(text)
    made = _faults
    try:
        with listening(made.reach):
            yield made.happened
    finally:
        _faults = before


@dataclass(frozen=True, eq=False)
class Fault:
    """What happens at a point, and when."""

    point: str
    action: str
    seconds: float = 0.0
    first: int = 1
    last: float = math.inf
    share: float = 1.0


class Faults:
    """The faults of a text, each with its count and its random numbers."""

    def __init__(self, text: str):
        words = [word.strip() for word in text.split(",") if word.strip()]
        seed = next((word[5:] for word in words if word.startswith("seed=")), "0")
        self._faults = [read_fault(word) for word in words if not word.startswith("seed=")]
        self._draws = {fault: random.Random(f"{seed} {fault}") for fault in self._faults}
        self._seen: Counter[Fault] = Counter()
        self.happened: Counter[str] = Counter()
        """Number of times that each fault happened, by `point=action`."""

    def reach(self, name: str) -> None:
        for fault in self._due(name):
            act(fault)

    def spoil(self, name: str, value: Any) -> Any:
        for fault in self._due(name):
            value = SPOILS[fault.action](value)
        return value

    def _due(self, name: str) -> list[Fault]:
        due = []
        for fault in self._faults:
            if fault.point == name:
                self._seen[fault] += 1
                timely = fault.first <= self._seen[fault] <= fault.last
                if timely and self._draws[fault].random() < fault.share:
                    due.append(fault)
        self.happened.update(f"{name}={fault.action}" for fault in due)
        return due


def read_fault(word: str) -> Fault:
    """The fault of `POINT=ACTION[@WHEN]`.

    Raises:
        ConfigError: The word has another form, or the fault can never happen.
    """
    match = FAULT.fullmatch(word)
    if match is None:
        raise ConfigError(
            f"{VARIABLE}: {word!r}; must be POINT=ACTION[@WHEN], such as update=term@2, update=term@2+, "
            "update=term@p0.1 or update=sleep:0.5"
        )
    point, action, seconds, chance, when, on = match.groups()
    if point not in POINTS:
        near = close_to(point, POINTS)
        raise ConfigError(f"{VARIABLE}: no point {point!r}" + (f"; did you mean {near!r}?" if near else ""))
    actions = VALUES.get(point, ACTIONS)
    if action not in (named.partition(":")[0] for named in actions):
        raise ConfigError(f"{VARIABLE}: {word!r}: no action {action!r} at {point}; must be one of {', '.join(actions)}")
    if (action == "sleep") != bool(seconds):
        raise ConfigError(f"{VARIABLE}: {word!r}: sleep, and nothing else, has seconds, such as {point}=sleep:0.5")
    if when and not int(when):
        raise ConfigError(f"{VARIABLE}: {word!r}: the count must be at least 1, which is the first time")
    if chance and not 0 < float(chance) <= 1:
        raise ConfigError(f"{VARIABLE}: {word!r}: the probability must be above 0 and at most 1")
    first = int(when or 1)
    last = first if when and not on else math.inf
    return Fault(point, action, float(seconds or 0), first, last, float(chance or 1))


def act(fault: Fault) -> None:
    """Performs the action of a fault."""
    if fault.action in ERRNOS:
        number = ERRNOS[fault.action]
        raise OSError(number, f"{os.strerror(number)} (injected at {fault.point})")
    if fault.action in SIGNALS:
        os.kill(os.getpid(), SIGNALS[fault.action])
    elif fault.action == "sleep":
        time.sleep(fault.seconds)
    elif fault.action == "oom":
        from jax.errors import JaxRuntimeError

        raise JaxRuntimeError(f"RESOURCE_EXHAUSTED: Out of memory (injected at {fault.point})")
    elif fault.action == "raise":
        raise InjectedFault(f"injected at {fault.point}")
