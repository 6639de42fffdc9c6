"""What to change: the settings that make a run fit, and the fastest of those that fit, both tried by arithmetic.

No setting here but adapters and fewer bits changes what is learned.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_roc_jax.config import Config
from grpo_roc_jax.engine.config import LowPrecision
from grpo_roc_jax.learner.pack import rows_per_micro_batch
from grpo_roc_jax.method.weights import TruncatedImportance
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.lora import LowRank, Target
from grpo_roc_jax.model.sharding import Mesh, process_count, row_shards, slot_shards
from grpo_roc_jax.model.transformer import compute_dtype
from grpo_roc_jax.planner.estimate import Deployment, abstract_mesh, estimate, processes_of, work_of
from grpo_roc_jax.planner.roofline import GB, Needs, Work, kind_of, step_times
from grpo_roc_jax.planner.topology import FRACTION, MOST_OF_A_GPU, Chip, Topology
from grpo_roc_jax.run.components import check_layout

Settings = dict[str, Any]
"""Dotted names of settings -> values."""


def with_settings(config: Config, settings: Settings) -> Config:
    """The configuration with other values.

    Raises:
        ValueError: they do not fit each other.
    """
    sections: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        section, _, field = name.partition(".")
        sections.setdefault(section, {})[field] = value
    changed = {
        name: fields[""] if "" in fields else replace(getattr(config, name), **fields)
        for name, fields in sections.items()
    }
    return replace(config, **changed)


def deploy(deployment: Deployment, settings: Settings) -> Deployment:
    """The run with other settings, by arithmetic on the same pod, with the same mean response.

    Raises:
        ValueError: they do not fit each other, the model or the pod.
    """
    config = with_settings(deployment.config, {name: value for name, value in settings.items() if name != FRACTION})
    topology = deployment.topology
    if FRACTION in settings:
        topology = replace(topology, chip=replace(topology.chip, share=settings[FRACTION]))
    mesh = abstract_mesh(config, topology)
    platform = "tpu" if topology.chip.tpu else "gpu"
    check_layout(config, deployment.model, mesh, platform, processes_of(mesh, topology))
    work = work_of(config, mesh, topology, deployment.work.response)
    return replace(deployment, config=config, mesh=mesh, topology=topology, work=work)


def slot_lines(config: Config, work: Work) -> list[str]:
    """A line if there are slots that no rollout of a step can fill."""
    usable = math.ceil(work.rollouts / work.shards) * work.shards
    if work.slots <= usable:
        return []
    return [
        f"rollout.slots {work.slots}: a process has at most {work.rollouts:.0f} rollouts at a time, so "
        f"{work.slots - usable} slots stay empty; set rollout.slots {usable}, or raise group.problems"
    ]


def device_limit(mesh: Mesh) -> float:
    """Bytes that JAX may take on a device of the mesh; 0 where nothing says so, as on a CPU."""
    return float((mesh.local_devices[0].memory_stats() or {}).get("bytes_limit", 0))


def room_lines(config: Config, model: ModelConfig, mesh: Mesh, limit: float) -> list[str]:
    """`advice` for the devices that are here, by arithmetic; nothing if all programs fit or the limit is unknown.

    Args:
        config: Configuration of the run.
        model: With its shape resolved.
        mesh: Mesh of the trainer.
        limit: Bytes of a device, see `device_limit`.
    """
    if not limit:
        return []
    model = replace(model, compute_dtype=compute_dtype(model).name)
    rates = {"flops": 1.0, "memory_rate": 1.0, "link_rate": 1.0}  # no times are shown
    chip = Chip("this", limit, **rates, chips_per_process=mesh.size // process_count(mesh), source="the device")
    topology = Topology(chip, (mesh.size,))
    deployment = Deployment(config, model, mesh, topology, work_of(config, mesh, topology, 0.0))
    lines = advice(deployment, estimate(deployment))
    return lines and ["this device has too little memory for the run, by arithmetic:", *lines]


# ---- what makes it fit ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Remedy:
    """Settings that make room, and what they cost."""

    settings: Settings
    why: str


def advice(deployment: Deployment, programs: Sequence[Needs]) -> list[str]:
    """A line for each program that does not fit; then settings, the cheapest first, that together make all of them fit,
    each with the memory that the largest program then takes; at last whether it fits with all of them.

    Programs that were compiled take as much more than by arithmetic with other settings as they do now.
    """
    chip = deployment.topology.chip
    excesses = [_too_much(needs, deployment) for needs in programs if not needs.fits(chip)]
    if not excesses:
        return []
    more = _beyond_arithmetic(deployment, programs)
    chosen: list[tuple[Remedy, float]] = []
    settings: Settings = {}
    current, excess = deployment, _excess(deployment, more)
    for remedy in _remedies(deployment):
        if excess <= 0:
            break
        try:
            tried = deploy(deployment, settings | remedy.settings)
            left = _excess(tried, more)
        except ValueError:
            continue
        if left < excess - 0.005 * chip.usable_bytes:
            settings |= remedy.settings
            chosen.append((remedy, left))
            current, excess = tried, left
    if excess <= 0:
        settings = _needed(deployment, [remedy for remedy, _ in chosen], more)
    for remedy, left in chosen:
        words = _options(remedy.settings) or f"{FRACTION}={MOST_OF_A_GPU}"
        room = current.topology.chip.room_bytes if FRACTION in remedy.settings else chip.room_bytes
        short = f"{left / GB:.1f} GB too much" if left > 0 else "fits"
        excesses.append(
            f"  {words} ({remedy.why}): {short}" + ("" if room == chip.room_bytes else f" of {room / GB:.1f}")
        )
    together = _options(settings)
    if excess <= 0:
        shown = f"{FRACTION}={settings[FRACTION]} " if FRACTION in settings else ""
        return [*excesses, f"together, by arithmetic, it fits: {shown}{together}".rstrip()]
    return [
        *excesses,
        f"with all of these {excess / GB:.1f} GB are still too much: more chips, or chips with more memory",
    ]


def _needed(deployment: Deployment, chosen: Sequence[Remedy], more: dict[str, float]) -> Settings:
    """The settings without those of the remedies that what follows them made needless."""
    needed = list(chosen)
    for candidate in chosen[:-1]:
        without = [remedy for remedy in needed if remedy is not candidate]
        settings: Settings = {}
        for remedy in without:
            settings |= remedy.settings
        try:
            if _excess(deploy(deployment, settings), more) <= 0:
                needed = without
        except ValueError:
            continue
    settings_needed: Settings = {}
    for remedy in needed:
        settings_needed |= remedy.settings
    return settings_needed


def _too_much(needs: Needs, deployment: Deployment) -> str:
    chip = deployment.topology.chip
    over = f"{needs.total / GB:.1f} GB, {(needs.total - chip.room_bytes) / GB:.1f} too much"
    over = "refused by the compiler" if needs.refused else over
    return f"{needs.name}: {over} ({chip.usable_bytes / GB:.1f} GB usable, of which a tenth stays free)"


def _beyond_arithmetic(deployment: Deployment, programs: Sequence[Needs]) -> dict[str, float]:
    """Kind of program -> bytes that a compiled one takes beyond the estimate; one that is refused takes too much."""
    estimated = {needs.name: needs.total for needs in estimate(deployment)}
    usable, more = deployment.topology.chip.usable_bytes, dict.fromkeys(estimated, 0.0)
    for needs in programs:
        kind = "decode" if kind_of(needs.name) == "copy" else kind_of(needs.name)
        kind = "weight_sync" if kind.startswith("weight_") else kind
        total = usable if needs.refused else needs.total
        more[kind] = max(more[kind], total - estimated[kind])
    return more


def _excess(deployment: Deployment, more: dict[str, float]) -> float:
    """Bytes that the largest program takes too much; at most 0 if all fit."""
    room = deployment.topology.chip.room_bytes
    return max(needs.total + more[needs.name] for needs in estimate(deployment)) - room


def _options(settings: Settings) -> str:
    """Settings as on the command line. What fewer bits need besides is the default there."""
    words = []
    for name, value in settings.items():
        if isinstance(value, LowRank):
            targets = "" if value.targets == LowRank().targets else f" --lora.targets [{','.join(value.targets)}]"
            bits = "" if value.base_bits == 16 else f" --lora.base_bits {value.base_bits}"
            words.append(f"--lora.kind low_rank --lora.rank {value.rank}{targets}{bits}")
        elif isinstance(value, LowPrecision):
            words.append(f"--{name}.cache {value.cache}")
        elif name not in (FRACTION, "weights.factors", "surrogate.old_logprobs"):
            words.append(f"--{name} {value}")
    return " ".join(words)


def _remedies(deployment: Deployment) -> Iterator[Remedy]:
    config, mesh, topology = deployment.config, deployment.mesh, deployment.topology
    shards, chips = row_shards(mesh), topology.chips // topology.slices
    if not topology.chip.tpu and topology.chip.share < MOST_OF_A_GPU:
        yield Remedy({FRACTION: MOST_OF_A_GPU}, f"JAX takes {topology.chip.share:.0%} of a GPU")
    rows = rows_per_micro_batch(config.batch, shards)
    while rows > shards:
        rows = max(shards, math.ceil(rows / 2 / shards) * shards)
        yield Remedy({"batch.rows": rows}, "fewer rows a micro-batch, more micro-batches")
    if config.batch.row_length > config.longest_trajectory:
        yield Remedy({"batch.row_length": config.longest_trajectory}, "the longest trajectory")
    if config.update.remat != "full":
        yield Remedy({"update.remat": "full"}, "layers are computed again in the backward pass")
    if not config.optim.offload:
        yield Remedy({"optim.offload": True}, "moments in host memory while sampling")
    width = max(1, slot_shards(mesh) // max(1, deployment.work.samplers))
    slots, row, tokens = config.rollout.slots, config.rollout.max_row_tokens, config.rollout.kv_tokens
    while tokens > width * row:
        tokens = max(width * row, min(slots * row, tokens * 3 // 4))
        yield Remedy({"rollout.kv_tokens": tokens}, "a cache of fewer tokens, for fewer rows at a time")
    while slots > width:
        slots = max(width, math.floor(slots * 0.75 / width) * width)
        yield Remedy({"rollout.slots": slots}, "fewer rows at a time")
    fsdp, sequence, tensor = (mesh.shape[axis] for axis in ("fsdp", "sequence", "tensor"))
    wider = fsdp
    while wider * sequence * tensor * 2 <= chips:
        wider *= 2
        yield Remedy({"sharding.fsdp": wider, "sharding.data": -1}, "masters and moments over more devices")
    if config.optim.moment_dtype == "float32":
        yield Remedy({"optim.moment_dtype": "bfloat16"}, "first moments rounded")
    for parts in (2, 4, 8):
        if parts > tensor and parts <= topology.per_process and not topology.per_process % parts:
            split = {"sharding.tensor": parts, "sharding.data": -1, "sharding.fsdp": max(1, chips // parts // sequence)}
            yield Remedy(split, "the sampler's weights and the cache over more devices")
        if parts > sequence and parts * tensor <= chips:
            split = {"sharding.sequence": parts, "sharding.data": -1}
            split["sharding.fsdp"] = max(1, chips // parts // tensor)
            yield Remedy(split, f"each row over {parts} devices")
    if config.rollout.cache_dtype == "full" and config.rollout.attention != "paged":
        few = {"rollout.low_precision": LowPrecision(cache="int8"), "weights.factors": (TruncatedImportance(),)}
        yield Remedy(few | {"surrogate.old_logprobs": "scored"}, "the cache in 8 bits, with importance weights")
    if not config.lora.rank:
        targets: tuple[Target, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
        adapter = LowRank(targets=targets) if deployment.model.experts.count else LowRank()
        yield Remedy({"lora.": adapter}, "an adapter is trained instead of the weights")
        for bits in (8, 4):
            yield Remedy({"lora.": replace(adapter, base_bits=bits)}, f"its frozen weights in {bits} bits")
    for bits in (8, 4) if config.lora.rank else ():
        if bits < config.lora.base_bits:
            yield Remedy({"lora.base_bits": bits}, f"the frozen weights in {bits} bits")


# ---- what is fastest -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Suggestion:
    """Settings that fit a pod, with what a step takes at least."""

    settings: Settings
    deployment: Deployment
    programs: Sequence[Needs]

    @property
    def seconds(self) -> float:
        times = step_times(self.programs, self.deployment.work, self.deployment.topology.chip)
        return times.total if times else math.inf

    @property
    def fits(self) -> bool:
        return all(needs.fits(self.deployment.topology.chip) for needs in self.programs)

    def lines(self) -> list[str]:
        """The reason, and YAML to paste over that of the recipe."""
        chip, work = self.deployment.topology.chip, self.deployment.work
        times = step_times(self.programs, work, chip)
        largest = max(self.programs, key=lambda needs: needs.total)
        bounds = []
        for kind in ("decode", "update"):
            needs = next(program for program in self.programs if kind_of(program.name) == kind)
            each = needs.times(chip)
            bounds.append(f"{kind} bound by {max(each, key=lambda name: each[name])}")
        sections: dict[str, list[str]] = {}
        for name, value in self.settings.items():
            section, _, field = name.partition(".")
            sections.setdefault(section, []).append(f"{field}: {value}")
        return [
            f"step of at least {self.seconds:.1f} s (decoding {times.decode:.1f}, update {times.update:.1f}; "
            f"{', '.join(bounds)}); {largest.name} is largest with {largest.total / GB:.1f} of "
            f"{chip.usable_bytes / GB:.1f} GB",
            *(f"  {section}: {{{', '.join(fields)}}}" for section, fields in sections.items()),
        ]


def suggest(deployment: Deployment, count: int = 3) -> list[Suggestion]:
    """The fastest settings by arithmetic that fit, at most one for each mesh, fastest first: mesh, slots, rows of a
    micro-batch and rematerialization are searched."""
    best: list[Suggestion] = []
    for mesh in _meshes(deployment):
        fitting = [suggestion for suggestion in _on_mesh(deployment, mesh) if suggestion.fits]
        best += sorted(fitting, key=_order)[:1]
    return sorted(best, key=_order)[:count]


def _order(suggestion: Suggestion) -> tuple[float, float]:
    """Seconds to three digits; of equal ones the smaller memory is better."""
    return float(f"{suggestion.seconds:.3g}"), max(needs.total for needs in suggestion.programs)


def _meshes(deployment: Deployment) -> Iterator[Settings]:
    topology, sequence = deployment.topology, deployment.config.sharding.sequence
    within = topology.chips // topology.slices // sequence
    for tensor in (1, 2, 4, 8):
        if within % tensor or topology.per_process % tensor:
            continue
        for fsdp in (n for n in range(1, within // tensor + 1) if within // tensor % n == 0):
            yield {
                "sharding.data": topology.chips // (fsdp * tensor * sequence),
                "sharding.fsdp": fsdp,
                "sharding.tensor": tensor,
            }


def _on_mesh(deployment: Deployment, mesh: Settings) -> Iterator[Suggestion]:
    """What there is on a mesh. The parts of a step depend on settings of their own, so these are not all combined:
    first the slots with the smallest update, then rows and rematerialization with the best slots."""
    try:
        plain = deploy(deployment, mesh | _even(deployment))
    except ValueError:
        return
    shards, width = row_shards(plain.mesh), plain.work.shards
    small = mesh | {"batch.rows": shards, "update.remat": "full"}
    most = math.ceil(plain.work.rollouts / width)
    counts = sorted({min(most, 2**n) for n in range(13)})
    best: Suggestion | None = None
    for count in counts:
        suggestion = _tried(deployment, small | {"rollout.slots": count * width})
        if suggestion and suggestion.fits and (best is None or _order(suggestion) < _order(best)):
            best = suggestion
    if best is None:
        return
    yield best
    for rows in (1, 2, 4, 8, 16):
        for remat in ("none", "attention", "full"):
            suggestion = _tried(deployment, best.settings | {"batch.rows": rows * shards, "update.remat": remat})
            if suggestion:
                yield suggestion


def _even(deployment: Deployment) -> Settings:
    """Slots that divide over the shards of any mesh."""
    return {"rollout.slots": deployment.topology.chips * 8}


def _tried(deployment: Deployment, settings: Settings) -> Suggestion | None:
    try:
        tried = deploy(deployment, settings)
        return Suggestion(settings, tried, estimate(tried))
    except ValueError:
        return None
