"""How the agent of a rollout ended, and the reward that it gave."""

import json
import re
from dataclasses import dataclass

from grpo_roc_jax.environments.failure import Failure, ending, one_line

MOST_REWARD_BYTES = 4096
MOST_REWARD = 1e6
"""Largest absolute value of a reward; beyond it a loss in float32 could overflow."""


@dataclass(frozen=True)
class ProgramEnd:
    """How a program ended."""

    status: int | None
    """None if it was killed after its time."""
    reward: float | None
    errors: str = ""
    """The end of its error output."""
    unread: str = ""
    """Why its reward could not be read; empty if it wrote none."""
    printed: str = ""
    """The last line of its output."""
    seconds: float = 0.0

    def failure(self, said: str, *, by_policy: bool = False) -> Failure:
        """The failure of a program that ended so."""
        last = one_line(self.errors.strip().rpartition("\n")[2])
        name = re.match(r"[\w.]+(?=: |$)", last)
        kind = name[0] if name else re.sub(r"\d+", "N", last)[:80]
        text = f"agent: {said}: {last}" if last else f"agent: {said}"
        return Failure(text, f"agent: {said}: {kind}" if kind else text, ending(self.errors), by_policy)


def read_reward(content: bytes) -> tuple[float | None, str]:
    """(the number that a program wrote as its reward, or the `reward` of the object; what is wrong with it). None and
    an empty text if it wrote nothing."""
    if len(content) > MOST_REWARD_BYTES:
        return None, f"more than {MOST_REWARD_BYTES} bytes; must be one number, or an object with reward"
    if not content.strip():
        return None, ""
    try:
        value = json.loads(content)
        value = value["reward"] if isinstance(value, dict) else value
        number = float(None if isinstance(value, str | bool) else value)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None, f"{content[:80]!r}; must be one number, or an object with reward"
    if not abs(number) <= MOST_REWARD:
        return None, f"{number}; must be between {-MOST_REWARD:g} and {MOST_REWARD:g}"
    return number, ""
