"""How the agent of a rollout ended, and the reward that it gave."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from grpo_roc_jax.environments.failure import Failure, ending, one_line

MOST_PAY_BYTES = 1 << 16
MOST_REWARD = 1e6
"""Largest absolute value of a reward; beyond it a loss in float32 could overflow."""
PAY_FORM = "must be one number, or an object with reward, calls, or numbers by name"
PAY_RANGE = f"must be between {-MOST_REWARD:g} and {MOST_REWARD:g}"

MOST_PARTS = 32
"""Named numbers of a rollout."""
PART_NAME = re.compile(r"[A-Za-z_][\w.-]{0,63}")


@dataclass(frozen=True)
class AgentCall:
    """What an agent is called with."""

    row: Mapping[str, Any]
    """Columns of the problem."""
    prompt: str
    base_url: str
    api_key: str


@dataclass(frozen=True)
class Pay:
    """The numbers that an agent gave for its rollout."""

    reward: float | None = None
    """At the end, in addition to `calls`; None if it gave none."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Further numbers, by name."""
    calls: Mapping[str, float] | tuple[float | None, ...] = ()
    """For single calls: by the id of the answer, or for each call in the order of the answers."""


@dataclass(frozen=True)
class ProgramEnd:
    """How a program ended."""

    status: int | None
    """None if it was killed after its time."""
    pay: Pay = Pay()
    errors: str = ""
    """The end of its error output."""
    unread: str = ""
    """Why its reward could not be read; empty if it wrote none."""
    printed: str = ""
    """The last line of its output."""
    seconds: float = 0.0

    def after(self, seconds: float) -> "ProgramEnd":
        """The end after so many seconds."""
        return replace(self, seconds=seconds)

    def failure(self, reason: str, *, by_policy: bool = False) -> Failure:
        """The failure of a program that ended so."""
        last = one_line(self.errors.strip().rpartition("\n")[2])
        name = re.match(r"[\w.]+(?=: |$)", last)
        kind = name[0] if name else re.sub(r"\d+", "N", last)[:80]
        text = f"agent: {reason}: {last}" if last else f"agent: {reason}"
        return Failure(text, f"agent: {reason}: {kind}" if kind else text, ending(self.errors), by_policy)


def read_pay(content: bytes) -> tuple[Pay, str]:
    """(the numbers that a program wrote: one number, or an object; what is wrong with them).

    Of an object, `reward` is the reward of the rollout, `calls` holds rewards of single calls, and every other number
    is kept by its name. No numbers and an empty text if it wrote nothing.
    """
    if len(content) > MOST_PAY_BYTES:
        return Pay(), f"more than {MOST_PAY_BYTES} bytes; {PAY_FORM}"
    if not content.strip():
        return Pay(), ""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return Pay(), f"{content[:80]!r}; {PAY_FORM}"
    try:
        if not isinstance(value, dict):
            return Pay(_number("reward", value)), ""
        reward = _number("reward", value["reward"]) if "reward" in value else None
        calls = _read_calls(value.get("calls", []))
        named = {name: item for name, item in value.items() if name not in ("reward", "calls")}
        parts = {name: _number(name, item) for name, item in named.items() if isinstance(item, int | float)}
    except (ValueError, OverflowError) as error:
        return Pay(), str(error)
    if reward is None and not parts and not calls:
        return Pay(), f"{content[:80]!r}; {PAY_FORM}"
    wrong = [name for name in parts if not PART_NAME.fullmatch(name)]
    if wrong or len(parts) > MOST_PARTS:
        shown = f"the name {wrong[0][:80]!r}" if wrong else f"{len(parts)} names"
        return Pay(), f"{shown}; must be up to {MOST_PARTS} names of letters, digits and _ . -, no digit first"
    return Pay(reward, parts, calls), ""


def _number(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or (isinstance(value, bool) and name == "reward"):
        raise ValueError(f"{name} is {str(value)[:80]!r}; {PAY_FORM}")
    if not abs(value) <= MOST_REWARD:
        raise ValueError(f"{name} is {str(value)[:80]}; {PAY_RANGE}")
    return float(value)


def _read_calls(value: Any) -> Mapping[str, float] | tuple[float | None, ...]:
    if isinstance(value, dict):
        return {name: _number(f"calls[{name!r:.80}]", item) for name, item in value.items()}
    if isinstance(value, list):
        return tuple(None if item is None else _number(f"calls[{i}]", item) for i, item in enumerate(value))
    raise ValueError(f"calls is {type(value).__name__}; must be a list in the order of the answers, or by their ids")
