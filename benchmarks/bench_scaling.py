"""What does a chip do, move and send as the pod grows, by the compiler? Weak scaling from 8 to 256 chips.

Work grows with the pod: every chip has the same rows of a micro-batch and every process the same slots. The update of
one micro-batch and one decode chunk are compiled for each size; FLOPs and bytes of a chip should stay, and what it
sends should approach a constant, since a ring sends (n - 1)/n of the whole. Nothing runs, so no times are measured.

    python benchmarks/bench_scaling.py              # Qwen3-4B on v5p, 20 min; its vocabulary splits in 128 at most
    python benchmarks/bench_scaling.py --fsdp 8 --out scaling_hybrid     # copies of the weights beyond 8 chips
"""

import argparse
import json
import subprocess
from pathlib import Path

import jax
import matplotlib

from grpo_roc_jax.config import Config
from grpo_roc_jax.engine.engine import make_engine
from grpo_roc_jax.learner.update import make_update_step, state_like
from grpo_roc_jax.model.sharding import row_shards
from grpo_roc_jax.planner.plan import (
    attention_trip_count,
    batch_like,
    device_bytes,
    model_of,
    planned_mesh,
    read_needs,
    resident_bytes,
    work_of,
)
from grpo_roc_jax.planner.topology import parse_topology
from grpo_roc_jax.record.run_dir import versions
from grpo_roc_jax.settings.cli import load_config

matplotlib.use("Agg")
import matplotlib.pyplot as plt

GRIDS = {8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8"}
PACKAGES = ("jax", "jaxlib", "libtpu")
RESULTS = Path(__file__).parent / "results"
SERIES = (("flops", "TFLOP", 1e12), ("traffic", "GB to and from memory", 1e9), ("sent", "GB sent", 1e9))


def measure(chips: int, args: argparse.Namespace) -> list[dict]:
    """One row a program: what one chip needs at that size."""
    topology = parse_topology(f"v5p:{GRIDS[chips]}")
    fsdp = min(args.fsdp, chips)
    words = ["qwen3_0_6b_gsm8k", f"--sharding.fsdp={fsdp}", "--sharding.data=-1", f"--batch.row_length={args.length}"]
    words += [f"--rollout.slots={args.slots}", f"--batch.rows={chips}", f"--group.problems={chips}"]
    config = load_config(Config, words, prog="bench_scaling")
    model = model_of(config, args.model_shape)
    mesh = planned_mesh(config, topology, False)
    work = work_of(config, mesh, topology, 0.0)
    state = state_like(model, config.optim, mesh)
    engine = make_engine(model, config.rollout, config.sampling, [0], mesh)
    sampled = device_bytes(engine.published_like(state.params))
    resident = resident_bytes(config, state, state.params, (sampled, sampled))
    step = make_update_step(model, config.surrogate, config.optim, config.update, mesh)
    trip_counts = [1.0, attention_trip_count(work)]

    def say(line: str) -> None:
        print(f"{chips} chips: {line}", flush=True)

    programs = [read_needs("update", step.lower(state, batch_like(config, mesh)), resident["update"], trip_counts, say)]
    *_, decode = (lowered for name, lowered in engine.lower(state.params) if name.startswith("decode"))
    programs.append(read_needs("decode", decode, resident["decode"], [float(work.chunk)], say))
    return [
        {
            "chips": chips,
            "grid": topology.name,
            "mesh": dict(mesh.shape),
            "rows": row_shards(mesh),
            "program": needs.name,
            "flops": needs.flops,
            "traffic": needs.traffic,
            "sent": needs.moved,
            "memory": needs.total,
            "collectives": needs.collectives,
            "compile_s": needs.compile_s,
            "refused": needs.refused,
        }
        for needs in programs
    ]


def table(rows: list[dict]) -> list[str]:
    lines = [f"{'program':8}{'chips':>6}{'TFLOP':>10}{'GB moved':>10}{'GB sent':>10}{'GB held':>10}"]
    for row in sorted(rows, key=lambda row: (row["program"], row["chips"])):
        lines.append(
            f"{row['program']:8}{row['chips']:6}{row['flops'] / 1e12:10.3f}{row['traffic'] / 1e9:10.2f}"
            f"{row['sent'] / 1e9:10.3f}{row['memory'] / 1e9:10.2f}"
        )
    return lines


def draw(rows: list[dict], path: Path, title: str) -> None:
    """Three panels, one line a program."""
    figure, panels = plt.subplots(1, 3, figsize=(11, 3.4), constrained_layout=True)
    for panel, (key, name, unit) in zip(panels, SERIES, strict=True):
        for program in ("update", "decode"):
            mine = sorted((row for row in rows if row["program"] == program), key=lambda row: row["chips"])
            panel.plot([r["chips"] for r in mine], [r[key] / unit for r in mine], marker="o", label=program)
        panel.set_xscale("log", base=2)
        panel.set_ylim(bottom=0)
        panel.set_xlabel("chips")
        panel.set_title(f"{name}, per chip")
    panels[0].legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_shape", default="Qwen/Qwen3-4B")
    parser.add_argument("--chips", type=int, nargs="*", default=list(GRIDS), choices=list(GRIDS))
    parser.add_argument("--fsdp", type=int, default=128, help="devices at most that share one copy of the weights")
    parser.add_argument("--length", type=int, default=8192, help="tokens of a packed row")
    parser.add_argument("--slots", type=int, default=64, help="rows that a process decodes")
    parser.add_argument("--out", default="scaling", help="name of the files under benchmarks/results")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    RESULTS.mkdir(exist_ok=True)
    path, rows = RESULTS / f"{args.out}.json", []
    if path.exists():  # sizes that are not asked for again are kept
        rows = [row for row in json.loads(path.read_text())["rows"] if row["chips"] not in args.chips]
    for chips in args.chips:
        rows += measure(chips, args)
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        summary = {"benchmark": "scaling", "settings": vars(args), "versions": versions(PACKAGES), "commit": commit}
        path.write_text(json.dumps(summary | {"rows": rows}, indent=1) + "\n")
    print("\n".join(table(rows)))
    draw(rows, path.with_suffix(".png"), f"{args.model_shape} on v5p: a chip's share as the pod grows")
    print(json.dumps(summary | {"rows": len(rows), "file": path.name}))


if __name__ == "__main__":
    main()
