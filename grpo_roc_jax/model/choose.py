"""Which of several implementations of one function is the fastest here, by measurement."""

import logging
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

log = logging.getLogger(__name__)


def fastest(candidates: dict[str, Callable[[], Any]], repeats: int = 3) -> tuple[str, dict[str, float]]:
    """(name of the fastest, seconds of one call of each); the first of equals wins, so put the reference first.

    Each is called once to compile, then all in turn `repeats` times, so that a machine that slows down does so for all
    of them; the least time of each counts. What the compiler or the device refuses takes infinitely long. Several
    processes must call it together and go by the times of the first, so that all of them run one program.

    Args:
        candidates: Calls without arguments on the run's shapes; what they return is waited for, then dropped.
        repeats: Timed calls of each.

    Raises:
        ValueError: There is no candidate, or no repeat.
        RuntimeError, ValueError: None of them runs; what the last one said.
    """
    if not candidates or repeats < 1:
        raise ValueError(f"{len(candidates)} candidates, {repeats} repeats; at least 1 each is wanted")
    seconds = dict.fromkeys(candidates, math.inf)
    refusal: Exception | None = None
    running = {}
    for name, call in candidates.items():
        try:
            jax.block_until_ready(call())
            running[name] = call
        except (RuntimeError, ValueError) as error:  # of the device, or of a kernel that has no such shape or dtype
            refusal = error
            log.warning("%s does not run here: %s", name, str(error).partition("\n")[0] or type(error).__name__)
    for _ in range(repeats):
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


def told(choice: tuple[str, dict[str, float]], unit: str, per_second: float, digits: int) -> str:
    """What `fastest` returned in words, times to `digits` decimals; the name alone where nothing was measured."""
    name, seconds = choice
    times = ", ".join(f"{path} {per_second * took:.{digits}f}" for path, took in seconds.items())
    return f"{name} ({unit}: {times})" if seconds else name
