"""What the devices of a run reached, beside the bounds of a plan by arithmetic; where their peak figures are known."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax
from jax.sharding import Mesh

from grpo_roc_jax.config import Config
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.sharding import process_count
from grpo_roc_jax.model.transformer import compute_dtype
from grpo_roc_jax.planner.estimate import Deployment, estimate, update_flops, work_of
from grpo_roc_jax.planner.roofline import Needs, kind_of
from grpo_roc_jax.planner.topology import CHIPS, Chip, Topology
from grpo_roc_jax.types import Metrics

KINDS = {
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5p": "v5p",
    "TPU v5": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "v7x",
    "Tesla T4": "t4",
    "NVIDIA L4": "l4",
    "NVIDIA A10": "a10",
    "NVIDIA GeForce RTX 4090": "4090",
    "NVIDIA A100": "a100",
    "NVIDIA H100": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
}
"""`jax.Device.device_kind`, or the words that it begins with -> name in `CHIPS`."""


def chip_of(kind: str) -> Chip | None:
    """The peak figures of a device by its kind; None if they are not known."""
    words = kind.split()
    names = (name for name in sorted(KINDS, key=len, reverse=True) if words[: len(name.split())] == name.split())
    exact = next(names, None)
    if exact is None:  # NVIDIA A100-SXM4-80GB
        exact = next((name for name in KINDS if kind.startswith(f"{name}-")), None)
    return CHIPS[KINDS[exact]] if exact else None


@dataclass(frozen=True)
class Rates:
    """What a micro-batch and a decode step take on one device at least."""

    chip: Chip
    update: Needs
    micro_batches: float
    """Number of micro-batches that `update` was counted for."""
    model_flops: float
    """FLOPs of a micro-batch on one device, without recomputation."""
    decode: Needs
    steps: int
    """Decode steps that `decode` was counted for."""
    slots: int
    read: float
    """Share of the largest cache that a row of mean length reads."""

    def metrics(self, row: Mapping[str, float]) -> Metrics:
        """Bounds and rates of a step with these metrics: `plan/update_s`, `plan/decode_s`, `update/mfu` (FLOPs of the
        model without recomputation, over all tokens of the micro-batches, padding included, and the peak) and
        `rollout/decode_bytes_per_s` of a device (weights in every step, the cache as far as rows of mean length read
        it)."""
        metrics: Metrics = {}
        micro, spent = row.get("update/micro_batches", 0.0), row.get("time/update_s", 0.0)
        if micro and spent:
            metrics["plan/update_s"] = micro / self.micro_batches * self.update.seconds(self.chip)
            metrics["update/mfu"] = micro * self.model_flops / self.chip.flops / spent
        sampled, spent = row.get("rollout/sampled_tokens", 0.0), row.get("time/decode_s", 0.0)
        use = row.get("rollout/slot_use", 0.0)
        if sampled and spent and use:
            rows = use * self.slots
            runs = sampled / rows / self.steps
            fixed = min(self.decode.fixed_traffic, self.decode.traffic)
            cached = (self.decode.traffic - fixed) * min(1.0, rows / self.slots) * self.read
            metrics["plan/decode_s"] = runs * self.decode.seconds_at(self.chip, self.read, min(1.0, rows / self.slots))
            metrics["rollout/decode_bytes_per_s"] = runs * (fixed + cached) / spent
        return metrics


def rates_of(config: Config, model: ModelConfig, mesh: Mesh, chip: Chip | None) -> Rates | None:
    """The rates of a run on devices of that kind; None if their figures are not known."""
    if chip is None:
        return None
    model = replace(model, compute_dtype=compute_dtype(model).name)
    topology = Topology(replace(chip, cores=1), (mesh.size,), machine=mesh.size // process_count(mesh))
    work = work_of(config, mesh, topology, 0.0)
    programs = {kind_of(needs.name): needs for needs in estimate(Deployment(config, model, mesh, topology, work))}
    plain = replace(config, update=replace(config.update, remat="none", vocab_chunk=model.vocab_size))
    tokens = work.micro_rows * work.row_length / mesh.size
    return Rates(
        chip,
        programs["update"],
        work.micro_batches / work.updates,
        update_flops(plain, model, tokens, work.prompt + work.response),
        programs["decode"],
        work.chunk,
        work.slots * work.samplers,
        min(1.0, (work.prompt + work.response / 2) / work.columns),
    )


def device_rates(config: Config, model: ModelConfig, mesh: Mesh) -> Rates | None:
    """`rates_of` for the devices of the mesh."""
    return rates_of(config, model, mesh, chip_of(mesh.devices.flat[0].device_kind))


def measured_lines(rows: Sequence[Mapping[str, float]]) -> list[str]:
    """One line with what the steps of these metrics were planned to take at least and took; none without plans."""
    parts = []
    for name in ("decode", "update"):
        pairs = [
            (row[f"plan/{name}_s"], row[f"time/{name}_s"])
            for row in rows
            if row.get(f"plan/{name}_s") and row.get(f"time/{name}_s")
        ]
        if pairs:
            planned, spent = (sum(side) / len(pairs) for side in zip(*pairs, strict=True))
            parts.append(f"{name} {planned:.3g}, {spent:.3g} ({spent / planned:.1f} times)")
    shares = [row["update/mfu"] for row in rows if "update/mfu" in row]
    if shares:
        parts.append(f"the update at {sum(shares) / len(shares):.1%} of the peak")
    kind = jax.devices()[0].device_kind
    return [f"seconds a step on {kind}, planned at least, measured: {'; '.join(parts)}"] if parts else []
