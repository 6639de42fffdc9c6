"""How fast is an optimizer step, and what does each of its parts buy?

The ceiling is the rate of a large matrix product in the same dtype, measured in the same process. Useful work is
6 FLOPs per parameter of a matrix product and token, plus attention over the pairs that trajectories really have;
recomputation and padding do not count. Variants run in alternation, so that the ratios survive a busy machine.

    python benchmarks/bench_update.py                              # two CPU cores, about two minutes
    python benchmarks/bench_update.py --shape qwen3-4b --rows 8    # one large accelerator
"""

import argparse
import dataclasses
import json
import platform
import statistics
import subprocess
import time

import jax
import jax.numpy as jnp
import numpy as np

from grpo_roc_jax.learner.loss import UpdateConfig
from grpo_roc_jax.learner.pack import BatchConfig, pack, worst_case_micro_batches
from grpo_roc_jax.learner.update import OptimConfig, init_train_state, make_update_step
from grpo_roc_jax.method.surrogate import Clip
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh, shard_batch
from grpo_roc_jax.model.transformer import compute_dtype, init_params
from grpo_roc_jax.types import TrainRow

QWEN3 = {"head_dim": 128, "kv_heads": 8, "qk_norm": True, "vocab_size": 151936, "rope_theta": 1e6}
SHAPES: dict[str, tuple[ModelConfig, int, int, int, int]] = {
    # name: (model, row length, rows of a micro-batch, trajectories, mean length)
    "small": (
        ModelConfig(d_model=128, layers=4, heads=4, kv_heads=2, head_dim=32, d_ff=384, vocab_size=8192),
        512,
        4,
        48,
        110,
    ),
    "medium": (
        ModelConfig(d_model=512, layers=8, heads=8, kv_heads=4, head_dim=64, d_ff=1536, vocab_size=32768),
        512,
        2,
        16,
        110,
    ),
    "qwen3-0.6b": (ModelConfig(d_model=1024, layers=28, heads=16, d_ff=3072, **QWEN3), 8192, 8, 96, 2000),
    "qwen3-1.7b": (ModelConfig(d_model=2048, layers=28, heads=16, d_ff=6144, **QWEN3), 8192, 4, 48, 2000),
    "qwen3-4b": (ModelConfig(d_model=2560, layers=36, heads=32, d_ff=9728, **QWEN3), 8192, 2, 24, 2000),
}
OPTIM = OptimConfig(lr=1e-6, moment_dtype="bfloat16")


def lengths_of(count: int, mean: int, longest: int) -> np.ndarray:
    """Lognormal with a long tail, as rollouts are."""
    drawn = np.random.default_rng(0).lognormal(np.log(mean), 0.6, count)
    return np.clip(drawn, 8, longest).astype(int)


def rows_of(lengths: np.ndarray, vocab: int) -> list[TrainRow]:
    rng = np.random.default_rng(1)
    return [
        TrainRow(
            tokens=rng.integers(0, vocab, n).astype(np.int32),
            policy_mask=np.arange(n) >= n // 4,
            logprobs_old=np.full(n, -np.log(vocab), np.float32),
            advantages=np.full(n, rng.normal(), np.float32),
            weights=np.full(n, 1 / lengths.sum(), np.float32),
            ratio_segments=np.arange(n, dtype=np.int32),
            logprobs_ref=np.zeros(n, np.float32),
        )
        for n in lengths
    ]


def useful_flops(model: ModelConfig, lengths: np.ndarray) -> float:
    """Forward and backward: three times the forward."""
    params = jax.eval_shape(lambda key: init_params(key, model), jax.random.key(0))
    matrices = sum(leaf.size for leaf in jax.tree.leaves(params["layers"]) if leaf.ndim > 2)
    matrices += model.vocab_size * model.d_model
    pairs = float((lengths.astype(np.float64) * (lengths + 1) / 2).sum())
    return 6.0 * matrices * lengths.sum() + 12.0 * model.layers * model.heads * model.head_dim * pairs


def matmul_peak(dtype: jnp.dtype) -> float:
    """FLOP/s of the best of several large products."""
    size = 1024 if jax.default_backend() == "cpu" else 8192
    a = jnp.ones((size, size), dtype)
    product = jax.jit(lambda a: a @ a)
    jax.block_until_ready(product(a))
    times = []
    for _ in range(10):
        start = time.perf_counter()
        jax.block_until_ready(product(a))
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times)


class Variant:
    """One way to run the same update: compiled program, its batch, and the seconds of each run."""

    def __init__(self, model: ModelConfig, rows: list[TrainRow], batch: BatchConfig, update: UpdateConfig) -> None:
        mesh = make_mesh(ShardingConfig(), jax.devices()[:1])
        bound = worst_case_micro_batches(len(rows), max(row.length for row in rows), batch)
        packed, self.placement = pack(rows, batch, bound)
        # Allocating the micro-batches in use only: the worst case would count as arguments, not as work.
        packed = jax.tree.map(lambda leaf: leaf[: self.placement.count] if leaf.ndim else leaf, packed)
        self.batch = shard_batch(packed, mesh)
        self.init = lambda: init_train_state(jax.random.key(0), model, OPTIM, mesh)
        step = make_update_step(model, Clip(), OPTIM, update, mesh)
        start = time.perf_counter()
        self.step = step.lower(jax.eval_shape(self.init), self.batch).compile()
        self.compile_s = time.perf_counter() - start
        self.temp_bytes = self.step.memory_analysis().temp_size_in_bytes
        self.seconds: list[float] = []

    def run(self, state: object) -> object:
        """One timed step; the state is handed on, as only one of its size may exist."""
        start = time.perf_counter()
        state, metrics = self.step(state, self.batch)
        jax.block_until_ready((state, metrics))
        self.seconds.append(time.perf_counter() - start)
        return state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--rows", type=int, default=0, help="rows of a micro-batch; 0 takes the shape's")
    parser.add_argument("--row-length", type=int, default=0, help="tokens of a packed row; 0 takes the shape's")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--variants", default="", help="comma-separated; empty runs all")
    arguments = parser.parse_args()
    model, row_length, rows_per_batch, count, mean = SHAPES[arguments.shape]
    batch = BatchConfig(arguments.row_length or row_length, arguments.rows or rows_per_batch)
    lengths = lengths_of(count, mean, batch.row_length)
    rows = rows_of(lengths, model.vocab_size)

    base = UpdateConfig(vocab_chunk=2048 if jax.default_backend() == "cpu" else 8192)
    # Padded: one trajectory a row. A row over half full takes no second one, so every row is that of its trajectory.
    padded = [dataclasses.replace(row, **lengthened(row, batch.row_length // 2 + 1)) for row in rows]
    plans = {
        "packed": (rows, base),
        "padded": (padded, base),
        "full logits": (rows, dataclasses.replace(base, vocab_chunk=model.vocab_size)),
        "reference attention": (rows, dataclasses.replace(base, attention="reference")),
        "remat none": (rows, dataclasses.replace(base, remat="none")),
        "remat full": (rows, dataclasses.replace(base, remat="full")),
    }
    wanted = arguments.variants.split(",") if arguments.variants else list(plans)
    variants = {name: Variant(model, plans[name][0], batch, plans[name][1]) for name in wanted}
    state = variants[wanted[0]].init()
    for _ in range(arguments.repeats + 1):
        for variant in variants.values():
            state = variant.run(state)

    flops, peak = useful_flops(model, lengths), matmul_peak(compute_dtype(model))
    report = {}
    print(
        f"{'variant':22}{'tokens/s':>10}{'of peak':>9}{'time':>8}{'spread':>8}{'temp MB':>9}{'fill':>6}{'compile':>9}"
    )
    for name, variant in variants.items():
        seconds = variant.seconds[1:]
        median = statistics.median(seconds)
        ratio = statistics.median(a / b for a, b in zip(seconds, variants[wanted[0]].seconds[1:], strict=True))
        fill = lengths.sum() / (variant.placement.rows_used * batch.row_length)
        report[name] = {
            "tokens_per_s": lengths.sum() / median,
            "share_of_peak": flops / median / peak,
            "time_ratio": ratio,
            "spread": (max(seconds) - min(seconds)) / median,
            "temp_bytes": variant.temp_bytes,
            "fill": float(fill),
            "compile_s": variant.compile_s,
        }
        line = report[name]
        print(
            f"{name:22}{line['tokens_per_s']:10.0f}{line['share_of_peak']:9.1%}{ratio:7.2f}x{line['spread']:8.0%}"
            f"{variant.temp_bytes / 1e6:9.1f}{fill:6.2f}{variant.compile_s:8.1f}s"
        )
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    device = jax.devices()[0]
    summary = {
        "benchmark": "update",
        "shape": arguments.shape,
        "device": f"{device.platform} {device.device_kind} {platform.machine()}",
        "jax": jax.__version__,
        "python": platform.python_version(),
        "commit": commit,
        "batch": dataclasses.asdict(batch),
        "trajectories": count,
        "tokens": int(lengths.sum()),
        "matmul_peak_gflops": peak / 1e9,
        "variants": report,
    }
    print(json.dumps(summary))


def lengthened(row: TrainRow, length: int) -> dict[str, np.ndarray]:
    """Fields padded to `length` with masked tokens; longer rows are unchanged."""
    extra = max(length - row.length, 0)
    fields = {field.name: np.pad(getattr(row, field.name), (0, extra)) for field in dataclasses.fields(row)}
    fields["ratio_segments"] = np.arange(row.length + extra, dtype=np.int32)
    return fields


if __name__ == "__main__":
    main()
