"""How fast is an optimizer step, and what does each of its parts buy?

The ceiling is the rate of a large matrix product in the same dtype, measured in the same process. Useful work is
6 FLOPs per parameter of a matrix product and token (4 where the matrix is frozen), plus attention over the pairs that
trajectories really have; recomputation and padding do not count. Variants run in alternation, so that the ratios
survive a busy machine.

    python benchmarks/bench_update.py                              # two CPU cores, about two minutes
    python benchmarks/bench_update.py --shape qwen3-4b --rows 8    # one large accelerator
    python benchmarks/bench_update.py --peer --spread 0            # against tunix, rows of equal length

`--peer` compares one GRPO step with a KL term against the learner of google-tunix, where it is installed (`Tunix`).
"""

import argparse
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from bench_rollout import tunix_model

from grpo_roc_jax.learner.loss import UpdateConfig
from grpo_roc_jax.learner.pack import BatchConfig, pack, worst_case_micro_batches
from grpo_roc_jax.learner.update import OptimConfig, init_train_state, make_score, make_update_step
from grpo_roc_jax.method.divergence import K3
from grpo_roc_jax.method.surrogate import Clip, Surrogate
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.lora import AllWeights, Lora, init_adapter
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


CLIP, ALL_WEIGHTS = Clip(), AllWeights()
BETA = 0.04
"""Weight of the KL term of the steps that are compared with the peer's; its default."""


def lengths_of(count: int, mean: int, longest: int, spread: float = 0.6) -> np.ndarray:
    """Lognormal with a long tail, as rollouts are."""
    drawn = np.random.default_rng(0).lognormal(np.log(mean), spread, count)
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


def useful_flops(model: ModelConfig, lengths: np.ndarray, lora: Lora = ALL_WEIGHTS) -> float:
    """Forward and backward: three times the forward; twice for frozen matrices, which have no gradient."""
    params = jax.eval_shape(lambda key: init_params(key, model), jax.random.key(0))
    matrices = sum(leaf.size for leaf in jax.tree.leaves(params["layers"]) if leaf.ndim > 2)
    matrices += model.vocab_size * model.d_model
    work = 6.0 * matrices
    if lora.rank:
        adapter = jax.eval_shape(lambda key: init_adapter(key, lora, model), jax.random.key(0))
        work = 4.0 * matrices + 6.0 * sum(leaf.size for leaf in jax.tree.leaves(adapter))
    pairs = float((lengths.astype(np.float64) * (lengths + 1) / 2).sum())
    return work * lengths.sum() + 12.0 * model.layers * model.heads * model.head_dim * pairs


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


class Timed:
    """Seconds of steps and of passes for the log-probabilities of a reference policy, by the wall and of this process's
    processors."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.cpu_s: list[float] = []
        self.reference_s: list[float] = []

    @contextmanager
    def step_timed(self) -> Iterator[None]:
        start, cpu = time.perf_counter(), time.process_time()
        yield
        self.seconds.append(time.perf_counter() - start)
        self.cpu_s.append(time.process_time() - cpu)

    @contextmanager
    def reference_timed(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.reference_s.append(time.perf_counter() - start)


class Variant(Timed):
    """One way to run the same update: compiled program, its batch, and the seconds of each run."""

    def __init__(
        self,
        model: ModelConfig,
        rows: list[TrainRow],
        batch: BatchConfig,
        update: UpdateConfig,
        surrogate: Surrogate = CLIP,
    ) -> None:
        super().__init__()
        mesh = make_mesh(ShardingConfig(), jax.devices()[:1])
        bound = worst_case_micro_batches(len(rows), max(row.length for row in rows), batch)
        packed, self.placement = pack(rows, batch, bound)
        # Allocating the micro-batches in use only: the worst case would count as arguments, not as work.
        packed = jax.tree.map(lambda leaf: leaf[: self.placement.count] if leaf.ndim else leaf, packed)
        self.batch = shard_batch(packed, mesh)
        self.init = lambda: init_train_state(jax.random.key(0), model, OPTIM, mesh)
        step = make_update_step(model, surrogate, OPTIM, update, mesh)
        self.score = make_score(model, update, mesh)
        start = time.perf_counter()
        self.step = step.lower(jax.eval_shape(self.init), self.batch).compile()
        self.compile_s = time.perf_counter() - start
        self.temp_bytes = self.step.memory_analysis().temp_size_in_bytes
        self.computed = self.placement.rows_used * batch.row_length

    def run(self, state: object) -> object:
        """One timed step; the state is handed on, as only one of its size may exist."""
        with self.step_timed():
            state, metrics = self.step(state, self.batch)
            jax.block_until_ready((state, metrics))
        return state

    def reference(self, state: object) -> None:
        """A timed reference pass."""
        with self.reference_timed():
            jax.block_until_ready(self.score(state.params, self.batch))


class Tunix(Timed):
    """The same step by the learner of google-tunix: what `GRPOLearner` has its trainer run, compiled.

    That is `Trainer.jit_train_and_eval_step` with the registered loss `grpo`: forward and backward of rows padded to
    the longest prompt on the left and the longest answer on the right, then AdamW. `GRPOLearner` takes rows of the
    settings' lengths, which are longer. Model, masters and activations are float32 as here, and nothing is recomputed,
    which is its default. Its own packing needs the Pallas kernels for TPUs: elsewhere its attention reads no segment
    ids, so that packed rows would see each other. Left out in its favour are clipping of the gradient norm, its
    metrics and its logging. The old log-probabilities are those of the step itself, as with one iteration a batch, so
    neither side computes them. Those of the reference policy are timed apart for both (`reference_s`).
    """

    temp_bytes = 0

    def __init__(self, model: ModelConfig, rows: list[TrainRow], micro_batch: int) -> None:
        super().__init__()
        import optax
        from flax import nnx
        from tunix.rl import common, function_registry
        from tunix.rl.grpo.grpo_learner import GRPOConfig, TrainExample
        from tunix.rl.trainer import Trainer
        from tunix.sft.peft_trainer import TrainingConfig

        algorithm, pad, eos = GRPOConfig(beta=BETA, kl_loss_mode="low_var_kl"), 0, 1
        algorithm.temperature = 1.0
        grpo = function_registry.get_policy_loss_fn(algorithm.policy_loss_fn)
        calls = len(rows) // micro_batch
        self.trainer = Trainer(
            tunix_model(model),
            optax.adamw(OPTIM.lr),
            TrainingConfig(eval_every_n_steps=1, gradient_accumulation_steps=calls if calls > 1 else None),
            custom_checkpoint_metadata_fn=dict,
        )
        self.trainer.with_loss_fn(
            lambda model, train_example, algo_config: grpo(
                model, train_example, algo_config=algorithm, pad_id=pad, eos_id=eos
            ),
            has_aux=True,
        ).with_gen_model_input_fn(lambda example: {"train_example": example, "algo_config": algorithm})

        prompts = [int((~row.policy_mask).sum()) for row in rows]
        left, right = max(prompts), max(row.length - n for row, n in zip(rows, prompts, strict=True))
        prompt_ids, answer_ids = (np.full((len(rows), n), pad, np.int32) for n in (left, right))
        for i, (row, n) in enumerate(zip(rows, prompts, strict=True)):
            prompt_ids[i, left - n :], answer_ids[i, : row.length - n] = np.split(np.maximum(row.tokens, 1), [n])
        full = TrainExample(
            prompt_ids=jnp.asarray(prompt_ids),
            prompt_mask=jnp.asarray(prompt_ids != pad),
            completion_ids=jnp.asarray(answer_ids),
            completion_mask=jnp.asarray(answer_ids != pad),
            advantages=jnp.asarray([row.advantages[0] for row in rows]),
            ref_per_token_logps=jnp.zeros(answer_ids.shape),
            old_per_token_logps=None,
        )
        self.examples = [
            jax.tree.map(lambda leaf, i=i: leaf[i * micro_batch : (i + 1) * micro_batch], full) for i in range(calls)
        ]
        self.computed = len(rows) * (left + right)
        self.step, _ = self.trainer.jit_train_and_eval_step(cache_nnx_graph=True)
        self.params = lambda: nnx.state(self.trainer.model, nnx.Param)
        graph, weights = nnx.split(self.trainer.model)
        self.score = partial(common.compute_per_token_logps, graph, weights, pad_id=pad, eos_id=eos)
        start = time.perf_counter()
        self.run(None)
        self.compile_s = time.perf_counter() - start
        super().__init__()

    def run(self, state: object) -> object:
        """One timed step; the state of the other variants is handed on."""
        with self.step_timed():
            for example in self.examples:
                loss, _, _ = self.step(example)
            jax.block_until_ready((loss, self.params()))
        return state

    def reference(self, state: object) -> None:
        """A timed reference pass."""
        with self.reference_timed():
            jax.block_until_ready([self.score(part.prompt_ids, part.completion_ids) for part in self.examples])


def plans_of(
    rows: list[TrainRow], batch: BatchConfig, base: UpdateConfig, vocab: int
) -> dict[str, tuple[list[TrainRow], UpdateConfig]]:
    """The variants of the update: rows and settings."""
    # Padded: one trajectory a row. A row over half full takes no second one, so every row is that of its trajectory.
    padded = [dataclasses.replace(row, **lengthened(row, batch.row_length // 2 + 1)) for row in rows]
    return {
        "packed": (rows, base),
        "padded": (padded, base),
        "full logits": (rows, dataclasses.replace(base, vocab_chunk=vocab)),
        "reference attention": (rows, dataclasses.replace(base, attention="reference")),
        "remat none": (rows, dataclasses.replace(base, remat="none")),
        "remat full": (rows, dataclasses.replace(base, remat="full")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--rows", type=int, default=0, help="rows of a micro-batch; 0 takes the shape's")
    parser.add_argument("--row-length", type=int, default=0, help="tokens of a packed row; 0 takes the shape's")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--variants", default="", help="comma-separated; empty runs all")
    parser.add_argument("--spread", type=float, default=0.6, help="sigma of the log-normal lengths; 0: equal lengths")
    parser.add_argument("--peer", action="store_true", help="GRPO steps with a KL term, here and by google-tunix")
    parser.add_argument("--out", type=Path, help="JSON file to write; with --peer the results join those of the file")
    arguments = parser.parse_args()
    model, row_length, rows_per_batch, count, mean = SHAPES[arguments.shape]
    batch = BatchConfig(arguments.row_length or row_length, arguments.rows or rows_per_batch)
    lengths = lengths_of(count, mean, batch.row_length, arguments.spread)
    rows, load = rows_of(lengths, model.vocab_size), [round(load, 1) for load in os.getloadavg()]

    base = UpdateConfig(remat="attention", vocab_chunk=2048 if jax.default_backend() == "cpu" else 8192)
    if arguments.peer:
        model = dataclasses.replace(model, qk_norm=True, rope_theta=1e6)  # the peer's Qwen3 has no others
        shape = partial(dataclasses.replace, batch)
        no_remat = UpdateConfig(remat="none", vocab_chunk=model.vocab_size)  # as a run on a CPU with memory to spare
        row_by_row = Variant(model, rows, shape(rows=1), no_remat, Clip(kl=K3(coef=BETA)))
        at_once = Variant(model, rows, shape(rows=row_by_row.placement.count), no_remat, Clip(kl=K3(coef=BETA)))
        # Both sides with all trajectories in a call, and with four or so.
        variants = {"packed": at_once, "packed, a row a call": row_by_row}
        variants |= {f"tunix, {n} rows a call": Tunix(model, rows, n) for n in (count, count // 12)}
    else:
        plans = plans_of(rows, batch, base, model.vocab_size)
        wanted = arguments.variants.split(",") if arguments.variants else list(plans)
        variants = {name: Variant(model, plans[name][0], batch, plans[name][1]) for name in wanted}
    state = next(iter(variants.values())).init()
    for _ in range(arguments.repeats + 1):
        for variant in variants.values():
            state = variant.run(state)
            if arguments.peer:
                variant.reference(state)

    peak = matmul_peak(compute_dtype(model))
    report = report_of(variants, int(lengths.sum()), useful_flops(model, lengths) / peak)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    device = jax.devices()[0]
    summary = {
        "benchmark": "update",
        "shape": arguments.shape,
        "device": f"{device.platform} {device.device_kind} {platform.machine()}",
        "jax": jax.__version__,
        "python": platform.python_version(),
        "commit": commit,
        "load": load,
        "batch": dataclasses.asdict(batch),
        "trajectories": count,
        "tokens": int(lengths.sum()),
        "matmul_peak_gflops": peak / 1e9,
        "variants": report,
    }
    if arguments.peer:
        summary |= {"google-tunix": metadata.version("google-tunix"), "repeats": arguments.repeats}
    print(json.dumps(summary))
    if arguments.out:
        if arguments.peer:
            before = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.exists() else {}
            case = "unequal lengths" if arguments.spread else "equal lengths"
            summary = before | {"peer": before.get("peer", {}) | {case: summary}}
        arguments.out.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


def report_of(variants: dict[str, "Variant | Tunix"], tokens: int, best_s: float) -> dict[str, dict]:
    """Figures of each variant against the first, printed as a table; `best_s`: the useful work at the peak."""
    report, first = {}, next(iter(variants.values()))
    print(
        f"{'variant':22}{'tokens/s':>10}{'of peak':>9}{'time':>8}{'spread':>8}{'temp MB':>9}{'fill':>6}{'compile':>9}"
    )
    for name, variant in variants.items():
        seconds = variant.seconds[1:]
        median = statistics.median(seconds)
        ratios = [a / b for a, b in zip(seconds, first.seconds[1:], strict=True)]
        line = report[name] = {
            "tokens_per_s": tokens / median,
            "share_of_peak": best_s / median,
            "time_ratio": statistics.median(ratios),
            "ratio_range": [min(ratios), max(ratios)],
            "cpu_ratio": statistics.median(variant.cpu_s[1:]) / statistics.median(first.cpu_s[1:]),
            "spread": (max(seconds) - min(seconds)) / median,
            "temp_bytes": variant.temp_bytes,
            "fill": tokens / variant.computed,
            "compile_s": variant.compile_s,
        }
        print(
            f"{name:22}{line['tokens_per_s']:10.0f}{line['share_of_peak']:9.1%}{line['time_ratio']:7.2f}x"
            f"{line['spread']:8.0%}{variant.temp_bytes / 1e6:9.1f}{line['fill']:6.2f}{variant.compile_s:8.1f}s"
        )
        if variant.reference_s:
            both = [np.add(timed.seconds, timed.reference_s)[1:] for timed in (variant, first)]
            line["reference_s"] = statistics.median(variant.reference_s[1:])
            line["with_reference"] = float(np.median(both[0] / both[1]))
            print(
                f"{'':22}processor time {line['cpu_ratio']:.2f}x, wall {min(ratios):.2f} to {max(ratios):.2f}; with a "
                f"reference pass of {line['reference_s']:.2f} s: {line['with_reference']:.2f}x"
            )
    return report


def lengthened(row: TrainRow, length: int) -> dict[str, np.ndarray]:
    """Fields padded to `length` with masked tokens; longer rows are unchanged."""
    extra = max(length - row.length, 0)
    given = {name: values for name, values in vars(row).items() if isinstance(values, np.ndarray)}
    fields = {name: np.pad(values, (0, extra)) for name, values in given.items()}
    fields["ratio_segments"] = np.arange(row.length + extra, dtype=np.int32)
    return fields


if __name__ == "__main__":
    main()
