"""What does this accelerator do, beside what was planned for it? One script for a new device, about ten minutes.

    python -m benchmarks.on_device --out on_device            # writes on_device.json and on_device.md
    python -m benchmarks.on_device --out on_device --tiny     # the same in small, to try it on a CPU

Five parts, each of which may fail without stopping the others: `doctor` (what JAX finds here), `kernels` (every path of
attention in the update against the reference, in values and gradients; the ceiling is the rounding of the compute
dtype), `plan` (the programs of the recipe by arithmetic for this device), `train` (steps of GRPO-RoC from a published
model, with the first one left out of the times), and `beside` (what decoding and the update reached beside their
bounds). Where the peak figures of a device are not known, as on a CPU, there are no bounds.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_roc_jax.commands.doctor import examine
from grpo_roc_jax.commands.doctor import lines as doctor_lines
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.parallel import attention_for, paths
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh
from grpo_roc_jax.planner.measured import chip_of, measured_lines
from grpo_roc_jax.record.metrics import recorded
from grpo_roc_jax.record.run_dir import versions

ROOT = Path(__file__).resolve().parents[1]
RECIPE, TINY = "configs/smollm2_words.yaml", "configs/toy.yaml"
"""A published model that a Python package brings, and a model from random numbers."""
SMALL = {"--steps": "2", "--group.problems": "2", "--group.size": "2", "--rollout.slots": "8"}
SMALL |= {"--data.eval_problems": "2", "--eval.every": "0", "--rollout.max_response_tokens": "64"}


def kernels(tiny: bool) -> dict[str, Any]:
    """Path of attention -> largest difference from the reference in values and gradients, and seconds a run."""
    heads = {"heads": 4, "kv_heads": 2, "head_dim": 64 if tiny else 128}
    length, on_cpu = (256, True) if tiny else (4096, jax.default_backend() == "cpu")
    dtype = "float32" if on_cpu else "bfloat16"
    model = ModelConfig(d_model=256, layers=1, d_ff=256, vocab_size=256, compute_dtype=dtype, **heads)
    mesh = make_mesh(ShardingConfig(data=1), jax.devices()[:1])
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(1, length, n, model.head_dim) for n in (model.heads, model.kv_heads, model.kv_heads)]
    q, k, v = (jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True))
    segments = jnp.asarray(np.repeat([[1, 2]], length // 2, axis=1), jnp.int32)

    def run(name: str) -> tuple[Callable, Any]:
        attend = attention_for(name, model, length, mesh)

        def value(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
            out = attend(q, k, v, segments)
            return jnp.sum(jnp.square(out.astype(jnp.float32))), out

        program = jax.jit(jax.value_and_grad(value, (0, 1, 2), has_aux=True))
        return program, jax.block_until_ready(program(q, k, v))

    ((_, exact), slopes) = run("reference")[1]
    report = {}
    for name in paths(model, length, mesh):
        program, ((_, out), grads) = run(name)
        begun = time.perf_counter()
        for _ in range(3):
            jax.block_until_ready(program(q, k, v))
        gaps = [_gap(out, exact), *map(_gap, grads, slopes)]
        report[name] = {
            "value_gap": gaps[0],
            "gradient_gap": max(gaps[1:]),
            "seconds": (time.perf_counter() - begun) / 3,
        }
        limit = 1e-4 if dtype == "float32" else 5e-2
        report[name]["equal"] = max(gaps) < limit
    return {"dtype": dtype, "length": length, "paths": report}


def _gap(first: jax.Array, other: jax.Array) -> float:
    """Largest difference over the largest value."""
    first, other = (np.asarray(x, np.float32) for x in (first, other))
    return float(np.abs(first - other).max() / max(np.abs(other).max(), 1e-9))


def planned(recipe: str, words: list[str]) -> dict[str, Any]:
    """The plan by arithmetic for the kind and number of the devices that are here."""
    chip = chip_of(jax.devices()[0].device_kind)
    if chip is None:
        return {"skipped": f"the peak figures of {jax.devices()[0].device_kind} are not known"}
    topology = f"{chip.name}:{max(1, jax.device_count() // chip.cores)}"
    command = [sys.executable, "-m", "grpo_roc_jax", "plan", recipe, "--topology", topology, "--arithmetic", "--json"]
    done = subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if not done.stdout:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def trained(recipe: str, words: list[str], folder: Path, steps: int) -> list[Mapping[str, float]]:
    """Metrics of the steps of a run in a process of its own, which has the device alone.

    Raises:
        RuntimeError: the run failed; with the end of what it said.
    """
    command = [sys.executable, "-m", "grpo_roc_jax", "train", recipe, "--run_dir", str(folder), "--steps", str(steps)]
    done = subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"status {done.returncode}: {(done.stderr or done.stdout)[-2000:]}")
    return [row for row in recorded(folder) if "time/step_s" in row]


def beside(rows: list[Mapping[str, float]]) -> dict[str, Any]:
    """Means over the steps after the first."""
    later = rows[1:] or rows
    names = ("time/step_s", "time/decode_s", "plan/decode_s", "time/update_s", "plan/update_s", "update/mfu")
    names += ("rollout/decode_bytes_per_s", "rollout/tokens_per_s", "rollout/sampled_tokens", "update/micro_batches")
    means = {name: float(np.mean([row[name] for row in later if name in row])) for name in names if name in later[0]}
    return {"means": means, "lines": measured_lines(later)}


def page(report: Mapping[str, Any]) -> str:
    """The report in Markdown."""
    lines = [f"# {report['device']['kind']} x {report['device']['count']}", ""]
    lines += [", ".join(f"{name} {version}" for name, version in report["versions"].items()), ""]
    for name, part in report["parts"].items():
        lines += [f"## {name} ({part['seconds']:.0f} s)", ""]
        if "error" in part:
            lines += ["failed:", "", "```", part["error"].strip(), "```", ""]
            continue
        result = part["result"]
        if name == "kernels":
            lines += ["| path | value | gradient | equal | seconds |", "|---|---|---|---|---|"]
            lines += [
                f"| {path} | {of['value_gap']:.1e} | {of['gradient_gap']:.1e} | {of['equal']} | {of['seconds']:.4f} |"
                for path, of in result["paths"].items()
            ]
        elif name == "beside":
            lines += ["| figure | mean of a step |", "|---|---|"]
            lines += [f"| {figure} | {value:.5g} |" for figure, value in result["means"].items()]
            lines += ["", *result["lines"]]
        elif name == "train":
            lines += [f"{len(result)} steps"]
        else:
            lines += ["```", *result.get("lines", [json.dumps(result)]), "```"]
        lines.append("")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Runs the parts; returns 0 if none failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="name of the two files, without their endings")
    parser.add_argument("--recipe", default="", help=f"default: {RECIPE}, or {TINY} with --tiny")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script")
    args, words = parser.parse_known_args(argv)
    recipe, steps = args.recipe or (TINY if args.tiny else RECIPE), 2 if args.tiny else args.steps
    words = [*(part for pair in SMALL.items() if args.tiny for part in pair if pair[0] != "--steps"), *words]
    with tempfile.TemporaryDirectory() as folder:
        rows: list[Mapping[str, float]] = []

        def train() -> list[Mapping[str, float]]:
            rows.extend(trained(recipe, words, Path(folder) / "run", steps))
            return rows

        def doctor() -> dict[str, Any]:
            examined = examine()
            return examined | {"lines": [*doctor_lines(examined)]}

        # The run first: afterwards this process holds the device.
        parts = {"train": train, "doctor": doctor, "kernels": lambda: kernels(args.tiny)}
        parts |= {"plan": lambda: planned(recipe, words), "beside": lambda: beside(rows)}
        report: dict[str, Any] = {"parts": {name: _timed(name, part) for name, part in parts.items()}}
    kind = jax.devices()[0].device_kind
    report |= {"device": {"kind": kind, "count": jax.device_count(), "platform": jax.default_backend()}}
    report |= {"versions": versions(("jax", "jaxlib", "grpo_roc_jax")), "recipe": recipe, "words": words}
    report |= {"xla_flags": os.environ.get("XLA_FLAGS", "")}
    Path(f"{args.out}.json").write_text(json.dumps(report, indent=1, default=str) + "\n", encoding="utf-8")
    Path(f"{args.out}.md").write_text(page(report), encoding="utf-8")
    failed = [name for name, part in report["parts"].items() if "error" in part]
    print(f"{args.out}.json and {args.out}.md: " + (f"failed: {', '.join(failed)}" if failed else "all parts ran"))
    return 1 if failed else 0


def _timed(name: str, part: Callable[[], Any]) -> dict[str, Any]:
    begun = time.perf_counter()
    print(f"{name} ...", flush=True)
    try:
        outcome = {"result": part()}
    except Exception:  # the other parts go on
        outcome = {"error": traceback.format_exc()}
    return outcome | {"seconds": time.perf_counter() - begun}


if __name__ == "__main__":
    sys.exit(main())
