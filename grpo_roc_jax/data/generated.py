"""Sources whose problems are generated instead of read. Other rooms register their generators in `GENERATORS`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_roc_jax.text.chat_format import Trace
from grpo_roc_jax.text.forms import PYTHON_TOOL
from grpo_roc_jax.types import Problem

TRACE_START = 1 << 39
"""First index of training problems that are used for demonstrations. Lower ones are rolled out, so the two stages share
no problem."""
HELD_OUT_START = 1 << 40
"""First index of problems that are held out from training."""
TOOL_NAME = PYTHON_TOOL
"""The tool that demonstrations call (named as in the published run)."""


@dataclass(frozen=True)
class Generator:
    """An endless source: problem number `index` is a pure function of the source, a seed and the index."""

    check: Callable[[str], object]
    """Raises ValueError for a source that does not exist."""
    problem: Callable[[str, int, int], Problem]
    """(source, seed, index) -> problem; indices from `HELD_OUT_START` on are held out from training."""
    trace: Callable[[Problem, Any, int], Trace]
    """(problem, `data.demonstrations`, seed) -> a demonstration of it."""
    with_hints: Callable[[Problem], Problem]
    """The problem with the columns that methods with hints read."""


GENERATORS: dict[str, Generator] = {}
"""Prefix of the name of a source -> its generator."""


def generator_of(source: str) -> Generator | None:
    """The generator of a source; None for a source that is read from files."""
    return next((generator for prefix, generator in GENERATORS.items() if source.startswith(prefix)), None)


def guessed_answer(answer: str, rng: np.random.Generator) -> str:
    """A random number with as many digits as the answer."""
    digits = len(answer.lstrip("-"))
    return str(rng.integers(10 ** (digits - 1) if digits > 1 else 0, 10**digits))
