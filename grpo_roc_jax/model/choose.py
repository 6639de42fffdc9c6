"""Measures which of several implementations of a function is the fastest on this machine."""

import logging
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

log = logging.getLogger(__name__)


REPEATS = 3
"""Timed calls of each candidate."""


def fastest(candidates: dict[str, Callable[[], Any]]) -> tuple[str, dict[str, float]]:
    """(name of the fastest, seconds of one call of each); ties go to the first, so put the reference first.

    Each candidate is called once to compile. Then all are called in turn, `REPEATS` times, so that a machine that slows
    down does so for all of them; the shortest time of each counts. A candidate that the compiler or the device rejects
    gets an infinite time. In a run of several processes all must call this together; the times of the first process
    decide, so that all of them run the same program.

    Args:
        candidates: Functions without arguments, on the run's shapes. Their results are awaited and dropped.

    Raises:
        RuntimeError, ValueError: no candidate runs; the error of the last one.
    """
    seconds = dict.fromkeys(candidates, math.inf)
    refusal: Exception | None = None
    running = {}
    for name, call in candidates.items():
        try:
            jax.block_until_ready(call())
            running[name] = call
        except (RuntimeError, ValueError) as error:  # from the device, or a kernel without such a shape or dtype
            refusal = error
            log.warning("%s does not run here: %s", name, str(error).partition("\n")[0] or type(error).__name__)
    for _ in range(REPEATS):
        for name, call in running.items():
            begun = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name] = min(seconds[name], time.perf_counter() - begun)
    if jax.process_count() > 1:
        agreed = multihost_utils.broadcast_one_to_all(np.array(list(seconds.values())))
        seconds = dict(zip(seconds, map(float, agreed), strict=True))
    if refusal is not None and not any(map(math.isfinite, seconds.values())):
        raise refusal
    return min(seconds, key=lambda name: seconds[name]), seconds


def describe_choice(choice: tuple[str, dict[str, float]], unit: str, per_second: float, digits: int) -> str:
    """The result of `fastest` as text, times with `digits` decimals; the name alone if nothing was measured."""
    name, seconds = choice
    times = ", ".join(f"{path} {per_second * took:.{digits}f}" for path, took in seconds.items())
    return f"{name} ({unit}: {times})" if seconds else name
