"""What the programs of an H200 move and compute, from its compiler alone: bounds to design by, no measurement.

    python benchmarks/h200_compiled.py --out benchmarks/results/h200_compiled.json     # about ten minutes, two cores

Needs the extra `gpu`, no GPU. Two tables of Qwen3 shapes in bfloat16. `decode`: bytes of one step beside those that it
cannot do without, one read of the weights and of the live keys and values; their quotient is the share of the memory's
rate that a step could reach at most. `update`: FLOPs and bytes of a micro-batch of full 8K-token rows, with those of
cuDNN's causal attention by formula, and the useful share of the peak if nothing but the longer of both took time. Where
an H200 would time matrix kernels and take the fastest, the compiler has to guess here, and bytes that stay in its cache
are counted.
`gpu_rollout.py` and `bench_update.py --shape qwen3-4b` measure the same programs where there is one.
"""

import argparse
import json
import platform
from collections.abc import Iterator
from dataclasses import asdict

import jax
import numpy as np
from bench_update import SHAPES, useful_flops

from grpo_roc_jax.engine.config import RolloutConfig, SamplingConfig
from grpo_roc_jax.engine.engine import make_engine
from grpo_roc_jax.learner.loss import UpdateConfig
from grpo_roc_jax.learner.update import OptimConfig, make_update_step, state_like
from grpo_roc_jax.method.surrogate import Clip
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh
from grpo_roc_jax.planner.arguments import batch_of
from grpo_roc_jax.planner.known_shapes import KNOWN_SHAPES
from grpo_roc_jax.planner.plan import device_bytes, read_needs
from grpo_roc_jax.planner.topology import CHIPS, parse_topology, topology_devices
from grpo_roc_jax.record.run_dir import versions

CHIP, CHUNK = CHIPS["h200"], 16
CASES = [("0.6B", 32, 1024), ("0.6B", 32, 8192), ("0.6B", 32, 16384), ("0.6B", 256, 1024), ("4B", 32, 8192)]
CASES += [("4B", 32, 16384), ("4B", 256, 1024), ("8B", 32, 8192)]
FORWARD, FORWARD_AND_BACKWARD = 4.0, 14.0
"""FLOPs of attention for a query, a key it may see and a channel: two products, and five more in the backward pass."""


def shape_of(name: str) -> ModelConfig:
    return ModelConfig(**(asdict(KNOWN_SHAPES[f"Qwen/Qwen3-{name}"]) | {"compute_dtype": "bfloat16"}))


def decode(mesh: jax.sharding.Mesh) -> Iterator[dict]:
    """A row per shape, batch and context; the rows are `context` tokens long and decode from there on."""
    for name, batch, context in CASES:
        model = shape_of(name)
        rollout = RolloutConfig(slots=batch, chunk=CHUNK, max_prompt_tokens=context, max_response_tokens=112)
        engine = make_engine(model, rollout, SamplingConfig(), [0], mesh)
        params = state_like(model, OptimConfig(), mesh).params
        lowered = dict(engine.lower(params))[f"decode/{batch}"]
        needs = read_needs(name, lowered, 0.0, [float(CHUNK)], lambda _: None)
        published = engine.published_like(params)
        unread = 0 if model.tie_embeddings else device_bytes(published["embed"])
        cache = 2 * model.layers * model.kv_heads * model.head_dim * 2 * batch * context
        needed, moved = device_bytes(published) - unread + cache, needs.traffic / CHUNK
        yield {
            "model": name,
            "batch": batch,
            "context": context,
            "needed_gb": round(needed / 1e9, 3),
            "moved_gb": round(moved / 1e9, 3),
            "share_at_most": round(needed / moved, 3),
            "memory_gb": round(needs.total / 1e9, 2),
            "temporaries_gb": round(needs.temporaries / 1e9, 3),
            "fits": needs.fits(CHIP),
            "compile_s": round(needs.compile_s, 1),
        }


def update(mesh: jax.sharding.Mesh) -> Iterator[dict]:
    """A row per shape of `bench_update.py` for large accelerators."""
    for name, (model, length, rows, _, _) in SHAPES.items():
        if not name.startswith("qwen3"):
            continue
        model = ModelConfig(**(asdict(model) | {"compute_dtype": "bfloat16"}))
        optim = OptimConfig(moment_dtype="bfloat16")
        batch = batch_of((1, rows, length), mesh)
        step = make_update_step(model, Clip(), optim, UpdateConfig(attention="cudnn"), mesh)
        needs = read_needs(name, step.lower(state_like(model, optim, mesh), batch), 0.0, [1.0], lambda _: None)
        lengths = np.full(rows, length)
        seen = rows * length * (length + 1) / 2 * model.layers * model.heads * model.head_dim
        runs = sum(count for target, count in needs.kernels.items() if "Backward" not in target) / model.layers
        attention = seen * (FORWARD * runs + FORWARD_AND_BACKWARD - FORWARD)
        useful = float(useful_flops(model, lengths))
        bound = max((needs.flops + attention) / CHIP.flops, needs.traffic / CHIP.memory_rate)
        yield {
            "model": name,
            "rows": f"{rows} x {length}",
            "tflop": round((needs.flops + attention) / 1e12, 1),
            "useful_tflop": round(useful / 1e12, 1),
            "attention_forward_runs": runs,
            "moved_gb": round(needs.traffic / 1e9, 1),
            "compute_ms": round(1e3 * (needs.flops + attention) / CHIP.flops, 1),
            "memory_ms": round(1e3 * needs.traffic / CHIP.memory_rate, 1),
            "utilisation_at_most": round(useful / CHIP.flops / bound, 3),
            "memory_gb": round(needs.total / 1e9, 2),
            "fits": needs.fits(CHIP),
            "compile_s": round(needs.compile_s, 1),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="decode,update")
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    mesh = make_mesh(ShardingConfig(), topology_devices(parse_topology("h200:1")))
    report: dict[str, object] = {"what": "compiled for an H200 that was not there; bounds, nothing was measured"}
    for part in options.parts.split(","):
        report[part] = []
        for row in {"decode": decode, "update": update}[part](mesh):
            print(part, row, flush=True)
            report[part].append(row)
    report |= {"python": platform.python_version(), "versions": versions(("jax", "jaxlib", "jax-cuda12-pjrt"))}
    print(json.dumps(report))
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            file.write(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
