"""Chooses what the update keeps in memory and how many rows a call of it takes, where the settings leave this open.

The choice is written to the run directory, and a resumed run reads it from there. A new choice could change the order
of floating-point sums, and with it the last digits of the results.
"""

import dataclasses
import json
import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_roc_jax.config import Config
from grpo_roc_jax.learner.loss import USUAL_CHUNK, UpdateConfig, policy_logprobs
from grpo_roc_jax.learner.pack import USUAL_ROWS, TrainBatch
from grpo_roc_jax.learner.update import micro_batch
from grpo_roc_jax.model.choose import describe_choice, fastest
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.sharding import Mesh, param_shardings, platform_of, row_shards, shard_batch
from grpo_roc_jax.model.transformer import compute_dtype, init_params
from grpo_roc_jax.record.run_dir import write_whole
from grpo_roc_jax.run.policy import COMPILING, COMPILING_LAYER, memory_parts, resident_bytes
from grpo_roc_jax.settings.files import read_json_object

log = logging.getLogger(__name__)

FILE = "choices.json"

SPARE = 0.7
"""Share of the available memory (free, or already taken by this process) that an update may be chosen to fill. The
estimate was within a quarter of what was measured."""

NARROW = 256
"""Model width below which storing activations costs a CPU more time than recomputing them: storing took 1.16 times as
long at width 128 and 0.83 times at 576. Widths in between were not measured."""

NEARLY = 1.03
"""Two numbers of rows whose times differ by less than this factor count as equal; the smaller one is taken."""

STEP = 4
"""Factor between the numbers of rows that are tried. Each of them is a program to compile."""

MOST_TOKENS = {"cpu": 4096}
"""Most tokens per device in the largest call that is tried, by platform."""
ELSEWHERE = 65536

FREED = ("sampler", "cache")
"""Parts of `memory_parts` that are freed for the update on accelerators."""


def free_bytes(mesh: Mesh) -> float:
    """Bytes that the parts of an update may take on a device of the mesh; 0 if the amount of memory is unknown."""
    if platform_of(mesh) != "cpu":
        return SPARE * (mesh.local_devices[0].memory_stats() or {}).get("bytes_limit", 0)
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return 0.0
    fields = (line.split() for line in meminfo.read_text(encoding="utf-8").splitlines())
    free = next((1024.0 * int(words[1]) for words in fields if words[0] == "MemAvailable:"), 0.0)
    return SPARE * (min(free, _cgroup_bytes()) + resident_bytes()) / len(mesh.local_devices)


def _cgroup_bytes() -> float:
    """Bytes left under the memory limit of this process's container; infinite without a limit."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit, now = ((folder / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return math.inf
    return math.inf if limit == "max" else max(0.0, float(limit) - float(now))


def update_bytes(config: Config, model: ModelConfig, mesh: Mesh) -> float:
    """Estimated bytes of a device during the update: what stays resident, plus the gradients of a micro-batch in
    addition to their sum. On a CPU, freed memory stays with the process, and so does the memory that compilation
    took."""
    on_cpu = platform_of(mesh) == "cpu"
    parts = memory_parts(config, dataclasses.replace(model, compute_dtype=compute_dtype(model).name), mesh)
    freed = () if on_cpu or config.rollout.step_limit.lag else FREED
    compiling = (COMPILING + COMPILING_LAYER * model.layers) / len(mesh.local_devices) if on_cpu else 0.0
    return sum(size for name, size in parts.items() if name not in freed) + parts["gradients"] + compiling


def named_update(config: Config, model: ModelConfig, mesh: Mesh, room: float) -> UpdateConfig:
    """The update settings with a number for `vocab_chunk` and a definite value for `remat`. On a CPU these are the
    fastest settings that fit into `room` bytes. On accelerators, where nothing was timed, `remat` is `attention` if
    that fits or if the memory is unknown, else `full`."""
    update, on_cpu = config.update, platform_of(mesh) == "cpu"
    remats = (("none",) if on_cpu and room and model.d_model >= NARROW else ()) + (
        ("attention", "full") if room else ("attention",)
    )
    chunks = ((max(model.vocab_size, 1),) if on_cpu and room else ()) + (USUAL_CHUNK,)
    remats = remats if update.remat == "auto" else (update.remat,)
    chunks = (update.vocab_chunk,) if update.vocab_chunk else chunks
    tried = [dataclasses.replace(update, remat=remat, vocab_chunk=chunk) for remat in remats for chunk in chunks]
    fits = (
        candidate
        for candidate in tried
        if update_bytes(dataclasses.replace(config, update=candidate), model, mesh) <= room
    )
    return next(fits, tried[-1])


def with_update(config: Config, model: ModelConfig, mesh: Mesh) -> Config:
    """The configuration with the update settings that `named_update` would choose now, for an estimate."""
    return dataclasses.replace(config, update=named_update(config, model, mesh, free_bytes(mesh)))


# ---- rows of a call ------------------------------------------------------------------------------------------------


def rows_of_a_step(config: Config, trajectories: int) -> int:
    """Expected number of packed rows of an optimizer step, for trajectories of half the allowed length in rows that are
    90 % full."""
    tokens = trajectories * config.rollout.max_row_tokens / 2
    return max(1, math.ceil(tokens / (0.9 * config.batch.row_length)))


def row_counts(config: Config, model: ModelConfig, mesh: Mesh, room: float, wanted: int) -> tuple[int, ...]:
    """Numbers of rows to try, in ascending order: powers of `STEP` for each device, up to the first that holds `wanted`
    rows, as far as they fit into `room` bytes. If the memory is unknown, only the usual number."""
    shards = row_shards(mesh)
    if not room:
        return (math.ceil(USUAL_ROWS / shards) * shards,)
    counts: list[int] = []
    each = 1
    most = MOST_TOKENS.get(platform_of(mesh), ELSEWHERE)
    while not counts or each * config.batch.row_length <= most:
        tried = dataclasses.replace(config, batch=dataclasses.replace(config.batch, rows=each * shards))
        tried = dataclasses.replace(tried, update=named_update(tried, model, mesh, room))
        if counts and update_bytes(tried, model, mesh) > room:
            break
        counts.append(each * shards)
        if each * shards >= wanted:
            break
        each *= STEP
    return tuple(counts)


def best_rows(seconds: dict[int, float], wanted: int) -> int:
    """The number of rows per call that processes `wanted` rows in the least time. A partly filled call takes as long as
    a full one."""
    seconds_in_all = {rows: math.ceil(wanted / rows) * took for rows, took in seconds.items()}
    least = min(seconds_in_all.values())
    return min(rows for rows, took in seconds_in_all.items() if took <= NEARLY * least)


def timed_rows(
    counts: tuple[int, ...],
    config: Config,
    model: ModelConfig,
    update: Callable[[int], UpdateConfig],
    mesh: Mesh,
    *,
    measure: Callable[[dict[str, Callable[[], Any]]], tuple[str, dict[str, float]]] = fastest,
) -> dict[int, float]:
    """Seconds of forward and backward passes through a few layers, for each number of rows; infinite where a call
    fails. All processes must call this together. `measure` returns the seconds of calls by name.

    The layers are those of one period of the model, under a small vocabulary. Their matrix products are most of an
    update, and the remaining layers gain from more rows in the same way.
    """
    kinds = (model.period, len(model.windows.sizes), len(model.extras.rotary_layers))
    period = math.lcm(*(max(1, count) for count in kinds))
    spread = math.prod(mesh.shape[axis] for axis in ("tensor", "fsdp", "sequence"))
    shares = {"shared_layers": 0, "shared_ff": 0} if model.windows.shared_layers else {}
    own_keys = dataclasses.replace(model.windows, **shares)
    small = dataclasses.replace(model, layers=min(model.layers, period), vocab_size=256 * spread, windows=own_keys)
    places = param_shardings(small, mesh)
    params = jax.jit(partial(init_params, config=small), out_shardings=places)(jax.random.key(0))
    length, segment = config.batch.row_length, max(1, config.rollout.max_row_tokens // 2)

    def call(rows: int) -> Callable[[], Any]:
        batch = _drawn(rows, length, min(segment, length), mesh)

        def value(params: Any, batch: TrainBatch) -> Any:
            return jnp.sum(policy_logprobs(params, micro_batch(batch, 0, mesh), small, update(rows), 1.0, mesh)[0])

        return partial(jax.jit(jax.grad(value), out_shardings=places), params, batch)

    _, seconds = measure({str(rows): call(rows) for rows in counts})
    return {rows: seconds[str(rows)] for rows in counts}


def _drawn(rows: int, length: int, segment: int, mesh: Mesh) -> TrainBatch:
    """One micro-batch of trajectories of one length, placed on the mesh."""
    shape = (rows, length)
    at = np.broadcast_to(np.arange(length, dtype=np.int32), shape)
    numbers = np.zeros(shape, np.float32)
    host = TrainBatch(
        tokens=at % 251,
        segment_ids=at // segment + 1,
        positions=at % segment,
        policy_mask=np.ones(shape, bool),
        logprobs_old=numbers,
        advantages=numbers,
        weights=numbers,
        ratio_segments=np.zeros(shape, np.int32),
        logprobs_ref=numbers,
        count=np.ones((), np.int32),
    )
    return shard_batch(jax.tree.map(lambda leaf: leaf[None] if leaf.ndim else leaf, host), mesh)


# ---- the choice of a run -------------------------------------------------------------------------------------------


def choose(
    config: Config, model: ModelConfig, mesh: Mesh, trajectories: int, room: float
) -> tuple[dict[str, Any], list[str]]:
    """Chooses the settings that `left_open` names, except attention. All processes must call this together.

    Args:
        config: Configuration of the run, with a definite attention path.
        model: Model configuration with its vocabulary size resolved.
        mesh: Mesh of the update.
        trajectories: Largest number of trajectories of an optimizer step.
        room: Bytes available, see `free_bytes`; the smallest value of all processes.

    Returns:
        (value of each chosen setting, lines for the log).
    """
    lines, chosen = [], {}
    if not config.batch.rows:
        wanted = rows_of_a_step(config, trajectories)
        counts = row_counts(config, model, mesh, room, wanted)
        with_rows = {rows: with_choices(config, {"batch.rows": rows}) for rows in counts}

        def update_of(rows: int) -> UpdateConfig:
            return named_update(with_rows[rows], model, mesh, room)

        seconds = timed_rows(counts, config, model, update_of, mesh) if len(counts) > 1 else {}
        rows = best_rows(seconds, wanted) if seconds else counts[0]
        chosen["batch.rows"], config = rows, with_rows[rows]
        times = {str(rows): took / rows for rows, took in seconds.items()}
        words = describe_choice((str(rows), times), "milliseconds of some layers for each row", 1e3, 1)
        lines.append(f"rows in a call of the update: {words}")
    named = named_update(config, model, mesh, room)
    for name in ("remat", "vocab_chunk"):
        if f"update.{name}" in left_open(config):
            chosen[f"update.{name}"] = getattr(named, name)
    if chosen.keys() - {"batch.rows"}:
        logits = "kept" if named.vocab_chunk >= model.vocab_size else f"in chunks of {named.vocab_chunk}"
        within = f" (room for {room / 1e9:.1f} GB)" if room else ""
        lines.append(f"update: remat {named.remat}, logits {logits}{within}")
    return chosen, lines


def with_choices(config: Config, chosen: dict[str, Any]) -> Config:
    """The configuration with the chosen values filled in."""
    for name, value in chosen.items():
        section, item = name.split(".")
        part = dataclasses.replace(getattr(config, section), **{item: value})
        config = dataclasses.replace(config, **{section: part})
    return config


def recorded(run_dir: Path, about: str, names: set[str]) -> dict[str, Any] | None:
    """The choice recorded in this directory for the same shapes; None unless it has all of the settings `names`."""
    try:
        before = read_json_object(run_dir / FILE)[about]
        return {name: before[name] for name in sorted(names)}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def record(run_dir: Path, about: str, chosen: dict[str, Any]) -> None:
    """Records a choice in the run directory. Choices for other shapes stay, so that a run with stages keeps one for
    each."""
    path = run_dir / FILE
    try:
        before = read_json_object(path)
    except (OSError, ValueError):
        before = {}
    earlier = before.get(about)
    before[about] = (earlier if isinstance(earlier, dict) else {}) | chosen
    write_whole(path, json.dumps(before, indent=1) + "\n")


def left_open(config: Config) -> set[str]:
    """Names of the settings whose values a run chooses at its first start."""
    auto = {"update.attention", "update.remat"} & {
        f"update.{name}" for name, value in vars(config.update).items() if value == "auto"
    }
    numbers = {"update.vocab_chunk": config.update.vocab_chunk, "batch.rows": config.batch.rows}
    return auto | {name for name, value in numbers.items() if not value}


def about(config: Config, mesh: Mesh) -> str:
    """A description of the shapes that a choice is made for."""
    mesh_shape = " x ".join(str(mesh.shape[axis]) for axis in mesh.axis_names)
    rows = f"{config.batch.rows} rows" if config.batch.rows else "rows"
    length, rank = config.batch.row_length, config.lora.rank
    return f"{rows} of {length} tokens, {platform_of(mesh)} {mesh_shape}, lora rank {rank}"
