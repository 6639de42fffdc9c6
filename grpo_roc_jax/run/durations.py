"""How long the parts of a run take: as in an earlier run of the same settings on this machine, else by arithmetic.

A run writes the seconds of its phases to a file of the user's cache, by the settings that decide them and the devices.
Before there is such a file, `estimated` multiplies the operations of a step by what a matrix product takes here.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import jax
import numpy as np

from grpo_roc_jax.config import Config
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.process.progress import Narrator
from grpo_roc_jax.run.policy import parameter_count
from grpo_roc_jax.settings.cli import flatten
from grpo_roc_jax.settings.files import read_json_object

SUPERVISED, TRAINING, EVALUATION = "supervised stage", "training", "evaluation"
"""Phases of a run that the plan names."""
IRRELEVANT = ("name", "run_dir", "resume", "seed", "steps", "checkpoint", "log", "limits", "watch", "stages")
"""Sections that do not change the seconds of a step."""
MOST_PHASES = 200
"""Phases of a file; a run with more has names that never come again."""

SHARE, WIDE = 0.4, 400
"""Share of the speed of a matrix product that an update reaches, and the width below which it falls: the toy (width 96)
and SmolLM2-135M (576) on two cores are then within a factor of two and a half of what was measured."""
CALL_S = 0.0015
"""Seconds of a decoding step in which nothing is multiplied."""
FILL = 0.6
"""Share of the slots that hold a live row."""


def timings_file(config: Config) -> Path:
    """Where the seconds of runs with these settings on these devices are written."""
    values = [(name, str(value)) for name, value in flatten(config) if name.partition(".")[0] not in IRRELEVANT]
    sections = [(name, value) for name, value in values if name != "sft.steps"]
    devices = [(device.platform, device.device_kind) for device in jax.devices()]
    text = repr((sections, devices, os.cpu_count(), jax.process_count()))
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "grpo_roc_jax" / "timings" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def read_timings(file: Path) -> dict[str, float]:
    """Seconds by phase; none if there is no such file, or it holds something else."""
    with suppress(OSError, ValueError, OverflowError):
        values = read_json_object(file)
        return {name: float(s) for name, s in values.items() if isinstance(s, int | float) and 0 <= s < float("inf")}
    return {}


@contextmanager
def remembered(config: Config, narrator: Narrator) -> Iterator[None]:
    """Lines on the phases of the block say how long they took in an earlier run; how long they take now is written for
    later ones. A cache that cannot be written is left."""
    file = timings_file(config)
    narrator.usual, narrator.measured = read_timings(file), {}
    try:
        yield
    finally:
        values = narrator.usual | narrator.measured
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            written = file.with_suffix(f".{os.getpid()}")
            written.write_text(json.dumps(dict(list(values.items())[-MOST_PHASES:])), encoding="utf-8")
            written.replace(file)


def matrix_speed(size: int = 512, repeats: int = 5) -> float:
    """Operations a second of a float32 matrix product on the host, the best of some: a few milliseconds."""
    matrix, best = np.full((size, size), 0.5, np.float32), float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        np.dot(matrix, matrix)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def estimated(config: Config, model: ModelConfig, held_out: int, speed: float) -> dict[str, float]:
    """Seconds of a supervised step, of a step and of an evaluation, by arithmetic, for a CPU.

    Args:
        config: Configuration of the run. Rows are taken to be half as long as prompt and response may be.
        model: Its shapes.
        held_out: Problems of an evaluation.
        speed: See `matrix_speed`.
    """
    parameters, rollout = parameter_count(model), config.rollout
    length = (rollout.max_prompt_tokens + rollout.max_response_tokens) / 2
    usable = SHARE * min(1.0, model.d_model / WIDE) * speed

    def decoding(rows: float) -> float:
        at_once = min(rows, rollout.slots)
        steps = rows / at_once * rollout.max_response_tokens / 2 / (FILL if rows > at_once else 1.0)
        return steps * (CALL_S + 2 * parameters * at_once / usable)

    sampled = config.group.problems * config.resample.sampled(config.group.size)
    trained = config.group.problems * config.group.size * length
    return {
        SUPERVISED: 6 * parameters * config.sft.traces * length / usable,
        TRAINING: decoding(sampled) + 6 * parameters * trained / usable,
        EVALUATION: decoding(held_out * config.eval.samples) if held_out else 0.0,
    }


def evaluation_phase(problems: int) -> str:
    """The name of the phase that evaluates so many problems."""
    return f"{EVALUATION} on {problems} problems"


def expected(
    config: Config, model: ModelConfig, held_out: int, usual: Mapping[str, float]
) -> tuple[dict[str, float], str]:
    """(seconds of a supervised step, of a step and of an evaluation, where they are from).

    There are none on an accelerator that has not run these settings before.

    Args:
        config: Configuration of the run.
        model: Its shapes.
        held_out: Problems of an evaluation.
        usual: Seconds of phases in an earlier run, see `remembered`.
    """
    if TRAINING in usual:
        known = {SUPERVISED: SUPERVISED, TRAINING: TRAINING, EVALUATION: evaluation_phase(held_out)}
        seconds = {name: usual[phase] for name, phase in known.items() if phase in usual}
        return seconds, "as in an earlier run with these settings on this machine"
    if jax.default_backend() != "cpu":
        return {}, ""
    seconds = estimated(config, model, held_out, matrix_speed())
    return seconds, "a rough estimate from the size of the model and the speed of this CPU"
