"""Benchmarks the rollout engine on an accelerator; the results go to one JSON file, row by row.

    python benchmarks/gpu_rollout.py --out benchmarks/results/rollout_gpu.json

Four parts. `check`: on this device greedy tokens equal a re-forward and log-probabilities those of training. `decode`:
tokens/s of Qwen3 shapes (random bfloat16 weights) by batch and context, and the share of the bandwidth that a large
copy reaches here; the bound is one read of the weights and of the live keys and values per step, the target 0.7 at
batch 32 and 256. `multi_turn`: rows whose turns call the real executor, against a turn barrier on the same engine.
`transformers`: `generate` of the same shapes on the same device, in a process of its own, where torch sees one.

`--toy` shrinks every shape, to try the script where there is no accelerator.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

# Memory is taken as it is needed, so that the peer's process finds some; set before JAX starts.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
from bench_rollout import Script, against_forward, environment, lognormal, one_rollout

from grpo_roc_jax.engine.config import RolloutConfig, SamplingConfig
from grpo_roc_jax.engine.decode import empty_patch
from grpo_roc_jax.engine.engine import Engine, make_engine
from grpo_roc_jax.engine.protocol import Finish, Observe, Wait
from grpo_roc_jax.engine.publish import SamplerParams
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.transformer import compute_dtype, forward, init_params, unembed
from grpo_roc_jax.tools.config import ToolsConfig
from grpo_roc_jax.tools.executor import make_executor
from grpo_roc_jax.tools.interface import CodeCall

QWEN3 = {
    # Hidden width, layers, query heads, feed-forward, tied embedding: the published configurations.
    "0.6B": (1024, 28, 16, 3072, True),
    "1.7B": (2048, 28, 16, 6144, True),
    "4B": (2560, 36, 32, 9728, True),
    "8B": (4096, 36, 32, 12288, False),
}
TARGET_SHARE, TARGET_BATCHES = 0.7, (32, 256)
CHUNK = 16
TOOL = "python_code_with_standard_io"


@dataclass(frozen=True)
class Sizes:
    """What is run; the toy sizes try the script."""

    batches: tuple[int, ...] = (1, 32, 256)
    contexts: tuple[int, ...] = (1024, 8192, 16384)
    repeats: int = 5
    rows: int = 128
    """Of the multi-turn part."""
    slots: int = 64
    prompt: int = 512
    turn_median: float = 200.0
    turn_cap: int = 800
    new: int = 64
    """Tokens that the peer generates between its two measurements."""


TOY = Sizes((1, 2), (64, 128), 2, 8, 4, 24, 12.0, 24, 8)


def shape(name: str, toy: bool) -> ModelConfig:
    D, L, N, F, tied = QWEN3[name]
    if toy:
        D, L, F = 64, 2, 128
    return ModelConfig(
        d_model=D,
        layers=L,
        heads=N,
        kv_heads=8,
        head_dim=8 if toy else 128,
        d_ff=F,
        vocab_size=512 if toy else 151936,
        rope_theta=1e6,
        qk_norm=True,
        tie_embeddings=tied,
        compute_dtype="auto" if toy else "bfloat16",
    )


def random_weights(config: ModelConfig, dtype: jnp.dtype, seed: int = 0) -> dict:
    """Drawn in the sampler's layout and dtype: float32 masters of the largest shapes would not fit beside the cache."""
    shapes = jax.eval_shape(partial(init_params, config=config), jax.random.key(0))

    @partial(jax.jit, static_argnames="shape")
    def leaf(key, shape):
        return (jax.random.normal(key, shape, dtype) * config.d_model**-0.5).astype(dtype)

    keys = iter(jax.random.split(jax.random.key(seed), 64 * (config.layers + 1)))

    def make(name, shape):
        return jnp.ones(shape, dtype) if name.endswith("norm") else leaf(next(keys), shape)

    layers = tuple(
        {name: make(name, value.shape[1:]) for name, value in shapes["layers"].items()} for _ in range(config.layers)
    )
    return {name: make(name, value.shape) for name, value in shapes.items() if name != "layers"} | {"layers": layers}


def copy_bandwidth(size: int) -> float:
    """Bytes per second of a large copy, read plus written; the best of ten."""
    source = jnp.zeros(size // 4, jnp.float32)
    run = jax.jit(lambda x: x + 1)
    run(source).block_until_ready()
    best = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        run(source).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2 * size / best


# Decode.


def decode(models: tuple[str, ...], sizes: Sizes, toy: bool, bandwidth: float) -> Iterator[dict]:
    """A row per shape, batch and context."""
    for name in models:
        config = shape(name, toy)
        weights = random_weights(config, compute_dtype(config))
        for batch in sizes.batches:
            for context in sizes.contexts:
                row = {"model": name, "batch": batch, "context": context}
                yield row | decode_rate(config, weights, batch, context, bandwidth, sizes.repeats)


def decode_rate(
    config: ModelConfig, weights: dict, batch: int, context: int, bandwidth: float, repeats: int
) -> dict[str, object]:
    """Figures of full chunks at `context` live tokens a row; rows decode from there on."""
    capacity = context + (repeats + 2) * CHUNK + 16
    rollout = RolloutConfig(slots=batch, chunk=CHUNK, max_prompt_tokens=context, max_response_tokens=capacity - context)
    dtype = compute_dtype(config)
    per_token = 2 * config.layers * config.kv_heads * config.head_dim * dtype.itemsize
    unread = 0 if config.tie_embeddings else weights["embed"].nbytes
    weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(weights)) - unread
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", float("inf"))
    needed = weight_bytes + unread + batch * capacity * per_token
    if needed > 0.92 * limit:
        return {"skipped": f"{needed / 2**30:.0f} GiB of weights and cache, {limit / 2**30:.0f} on the device"}
    programs = make_engine(config, rollout, SamplingConfig(), ()).programs
    try:
        pool, slots = programs.new_pool(), programs.new_slots()
        table = np.full((batch, rollout.table_width), programs.size.blocks, np.int32)
        row_blocks = programs.size.blocks // batch
        table[:, :row_blocks] = np.arange(batch * row_blocks).reshape(batch, row_blocks)
        table = programs.place(table)
        patch = empty_patch(batch)
        temperature = int(np.float32(1.0).view(np.int32))
        patch[:] = np.array([1, context, 5, 1, 2**30, 0, 0, 0, 0, temperature])[:, None]
        patch[8] = np.arange(batch)
        idle = programs.place(empty_patch(batch))
        pool, slots, report = programs.decode(weights, pool, slots, programs.place(patch), table, batch)
        jax.block_until_ready(report)
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            pool, slots, report = programs.decode(weights, pool, slots, idle, table, batch)
            jax.block_until_ready(report)
            times.append((time.perf_counter() - start) / CHUNK)
    except Exception as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"skipped": "out of memory"}
    step = statistics.median(times)
    live = context + CHUNK * (1 + repeats / 2)
    share = (weight_bytes + batch * live * per_token) / bandwidth / step
    cost = next(cost for cost in programs.costs if cost.name.startswith("decode"))
    figures = {
        "step_ms": round(1e3 * step, 3),
        "step_spread_ms": [round(1e3 * min(times), 3), round(1e3 * max(times), 3)],
        "tokens_per_s": round(batch / step),
        "share_of_copy_bandwidth": round(share, 3),
        "scratch_share_of_cache": round(cost.temp_bytes / cost.cache_bytes, 4),
        "compile_s": round(cost.seconds, 1),
    }
    return figures | ({"met": bool(share >= TARGET_SHARE)} if batch in TARGET_BATCHES else {})


# Turns that call the executor.


class RealTools(Script):
    """Turn lengths by script, calls by the executor: a program each, whose output the observation is made of."""

    def __init__(self, turns: list[list[int]], executor, vocab: int):
        super().__init__(turns, [[] for _ in turns], [[] for _ in turns])
        self.executor, self.vocab, self.kinds = executor, vocab, {}

    def turn_ended(self, index: int, turn) -> Finish | Wait:
        i = self.at[index]
        if i + 1 == len(self.turns[index]):
            return Finish("eos")
        code = f"total = 0\nfor k in range({200_000 + 1000 * (index % 7)}):\n    total += k * k % 7\nprint({i}, total)"
        self.executor.submit(CodeCall(f"{id(self)}/{index}/{i}", TOOL, {"code": code}, None))
        return Wait()

    def poll(self, timeout_s: float) -> list[tuple[int, Observe]]:
        return [self._observed(*answer) for answer in self.executor.poll(timeout_s)]

    def _observed(self, call_id: str, result) -> tuple[int, Observe]:
        index = int(call_id.split("/")[1])
        self.kinds[result.kind] = self.kinds.get(result.kind, 0) + 1
        i = self.at[index] = self.at[index] + 1
        self.left[index] = self.turns[index][i]
        ids = np.frombuffer(f"[{result.observation.strip():<24}]".encode(), np.uint8)
        return index, Observe(ids.astype(np.int32) % self.vocab)


class RealBarrier(RealTools):
    """No row goes on before all rows have ended their turn and every call is answered."""

    def poll(self, timeout_s: float) -> list[tuple[int, Observe]]:
        if not timeout_s:
            return []
        answers, wanted = [], sum(1 for i, turns in enumerate(self.turns) if self.at[i] + 1 < len(turns))
        while len(answers) < wanted:
            answers += self.executor.poll(timeout_s)
        return [self._observed(*answer) for answer in answers]


def multi_turn(name: str, sizes: Sizes, toy: bool) -> dict:
    """Wall-clock of the same rows with overlapped tools and with a turn barrier that keeps the cache."""
    config = shape(name, toy)
    rng = np.random.default_rng(0)
    number = rng.choice([1, 2, 3, 4, 5], size=sizes.rows, p=[0.25, 0.3, 0.25, 0.1, 0.1])
    turns = [lognormal(rng, n, sizes.turn_median, 0.8, sizes.turn_cap).tolist() for n in number]
    budget = max(map(sum, turns)) + 64 * 5
    rollout = RolloutConfig(
        slots=sizes.slots,
        max_prompt_tokens=sizes.prompt,
        max_response_tokens=budget,
        append_lengths=(32, 128) if toy else (64, 512),
    )
    engine = make_engine(config, rollout, SamplingConfig(), ())
    sampler = SamplerParams(random_weights(config, compute_dtype(config)), 0, 0.0)
    started = time.perf_counter()
    engine.warmup(sampler)
    compiled = time.perf_counter() - started
    groups = [rng.integers(0, config.vocab_size, sizes.prompt).astype(np.int32) for _ in range(-(-sizes.rows // 8))]
    requests = [one_rollout(i // 8, groups[i // 8], budget, i % 8) for i in range(sizes.rows)]
    executor = make_executor(ToolsConfig(min_level="L0"))
    executor.start()
    try:
        runs = {"overlapped": [], "barrier": []}
        for _ in range(2):
            runs["overlapped"].append(_overlapped(engine, sampler, requests, turns, executor))
            runs["barrier"].append(_barrier(engine, sampler, requests, turns, executor))
        level = executor.capabilities.level
    finally:
        executor.close()
    best = {kind: min(repeats, key=lambda run: run["seconds"]) for kind, repeats in runs.items()}
    ratio = best["barrier"]["seconds"] / best["overlapped"]["seconds"]
    return {
        "model": name,
        "programs": engine.programs.compilations,
        "warmup_s": round(compiled, 1),
        "isolation": level,
        **best,
        "barrier_slower": round(ratio, 2),
    }


def _overlapped(engine: Engine, sampler: SamplerParams, requests, turns, executor) -> dict:
    tools = RealTools(turns, executor, engine.programs.model.vocab_size)
    _, stats = engine.run(sampler, requests, tools)
    busy = stats.decode_s + stats.append_s + stats.tool_wait_s
    return {
        "seconds": round(stats.seconds, 3),
        "tokens_per_s": round(stats.tokens_per_s),
        "slot_use": round(stats.slot_use, 3),
        "blocked_on_tools_s": round(stats.tool_wait_s, 3),
        "host_share": round(1 - busy / stats.seconds, 3),
        "compilations": stats.compilations,
        "calls": tools.kinds,
    }


def _barrier(engine: Engine, sampler: SamplerParams, requests, turns, executor) -> dict:
    seconds = tokens = 0
    for first in range(0, len(requests), engine.config.slots):
        batch = slice(first, first + engine.config.slots)
        tools = RealBarrier(turns[batch], executor, engine.programs.model.vocab_size)
        _, stats = engine.run(sampler, requests[batch], tools)
        seconds, tokens = seconds + stats.seconds, tokens + stats.sampled_tokens
    return {"seconds": round(seconds, 3), "tokens_per_s": round(tokens / seconds)}


# Correctness on this device.


def check() -> dict:
    """Multi-turn rows of a small float32 model against the training forward, products in full precision."""
    config = ModelConfig(d_model=128, layers=4, heads=4, kv_heads=2, head_dim=32, d_ff=384, vocab_size=512)
    config = replace(config, compute_dtype="float32")
    rollout = RolloutConfig(slots=8, max_prompt_tokens=32, max_response_tokens=224, append_lengths=(16, 64))
    rng = np.random.default_rng(0)
    params = init_params(jax.random.key(0), config)
    prompts = [rng.integers(0, 512, 24).astype(np.int32) for _ in range(4)]
    turns = [rng.integers(4, 40, 3).tolist() for _ in range(16)]
    observations = [[rng.integers(0, 512, 20).astype(np.int32) for _ in range(2)] for _ in turns]
    worst, wrong, total = 0.0, 0, 0
    with jax.default_matmul_precision("highest"):
        engine = make_engine(config, rollout, SamplingConfig(), ())
        sampler = engine.publish(params, 0)

        @jax.jit
        def logprobs(tokens):
            hidden = forward(params, tokens, jnp.arange(tokens.shape[1])[None], jnp.ones_like(tokens), config)
            return jax.nn.log_softmax(unembed(params, hidden, config), axis=-1)

        for temperature in (0.0, 1.0):
            requests = [one_rollout(i // 4, prompts[i // 4], 224, i % 4, temperature=temperature) for i in range(16)]
            script = Script(turns, observations, [[0.0, 0.0] for _ in turns])
            rollouts, _ = engine.run(sampler, requests, script)
            for trajectory in rollouts:
                difference, misses = against_forward(trajectory, logprobs, 256)
                worst = max(worst, difference)
                if temperature == 0.0:
                    wrong += misses
                    total += int(trajectory.policy_mask[1:].sum())
    return {
        "weight_check_gap": sampler.check_gap,
        "max_logprob_difference": worst,
        "greedy_tokens": total,
        "greedy_tokens_wrong": wrong,
    }


# The peer, in a process of its own.


def torch_rows(models: tuple[str, ...], sizes: Sizes, toy: bool) -> Iterator[dict]:
    """`generate` with sampling: seconds per step from two lengths, so that its prefill falls out."""
    import torch
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    name_of = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    about = {"torch": torch.__version__, "transformers": transformers.__version__, "torch_device": name_of}
    for name in models:
        config = shape(name, toy)
        model = transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(
                vocab_size=config.vocab_size,
                hidden_size=config.d_model,
                intermediate_size=config.d_ff,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                num_key_value_heads=config.kv_heads,
                head_dim=config.head_dim,
                tie_word_embeddings=config.tie_embeddings,
                max_position_embeddings=40960,
                eos_token_id=None,
                pad_token_id=0,
            )
        )
        model = model.to(device, torch.float32 if toy else torch.bfloat16).eval()
        for batch in sizes.batches:
            for context in sizes.contexts:
                row = {"model": name, "batch": batch, "context": context, **about}
                try:
                    yield row | _torch_rate(model, batch, context, sizes)
                except torch.OutOfMemoryError:
                    torch.cuda.empty_cache()
                    yield row | {"skipped": "out of memory"}
        del model


def _torch_rate(model, batch: int, context: int, sizes: Sizes) -> dict:
    import torch

    tokens = torch.randint(0, model.config.vocab_size, (batch, context), device=model.device)

    def seconds(new: int) -> float:
        begun = time.perf_counter()
        with torch.inference_mode():
            model.generate(tokens, max_new_tokens=new, min_new_tokens=new, do_sample=True, top_k=0, top_p=1.0)
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    seconds(2)
    step = (seconds(2 + sizes.new) - seconds(2)) / sizes.new
    return {"step_ms": round(1e3 * step, 3), "tokens_per_s": round(batch / step)}


def torch_process(arguments: argparse.Namespace) -> list[dict]:
    """The rows of the peer, from a process that ends before JAX takes memory; empty where torch is missing."""
    if not (importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")):
        return [{"skipped": "torch and transformers are not installed"}]
    words = [sys.executable, __file__, "--torch", "--models", *arguments.models]
    words += ["--toy"] if arguments.toy else []
    environ = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, env=environ, timeout=arguments.peer_timeout_s)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return rows if done.returncode == 0 else [*rows, {"failed": done.returncode}]


def main() -> None:
    """Runs the parts named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = ("transformers", "check", "multi_turn", "decode")
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--models", nargs="+", choices=QWEN3, default=list(QWEN3))
    parser.add_argument("--turn-models", nargs="+", choices=QWEN3, default=["0.6B", "4B"], help="of multi_turn")
    parser.add_argument("--toy", action="store_true", help="tiny shapes, to try the script on a CPU")
    parser.add_argument("--out", type=Path, default=None, help="JSON file; written again after every row")
    parser.add_argument("--peer-timeout-s", type=float, default=240.0)
    parser.add_argument("--torch", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sizes, models = TOY if arguments.toy else Sizes(), tuple(arguments.models)
    if arguments.torch:
        for row in torch_rows(models, sizes, arguments.toy):
            print(json.dumps(row), flush=True)
        return
    report: dict = {}

    def save() -> None:
        if arguments.out:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")

    def add(part: str, rows: Callable[[], object]) -> None:
        """Takes a part's rows as they come; a part that fails leaves its error and the other parts."""
        report[part] = []
        try:
            for row in rows():
                report[part].append(row)
                print(json.dumps({"part": part, **row}), flush=True)
                save()
        except Exception as error:  # whatever it is: device time is short and the other parts still count
            report[part].append({"failed": f"{type(error).__name__}: {str(error)[:500]}"})
            print(json.dumps({"part": part, **report[part][-1]}), flush=True)
        finally:
            save()

    if "transformers" in arguments.parts:
        add("transformers", lambda: torch_process(arguments))
    report["about"] = environment(with_peers=False)
    bandwidth = copy_bandwidth(2**22 if arguments.toy else 2**32)
    report["about"]["copy_GBs"] = round(bandwidth / 1e9, 1)
    print(json.dumps(report["about"]), flush=True)
    if "check" in arguments.parts:
        add("check", lambda: [check()])
    if "decode" in arguments.parts:
        add("decode", lambda: decode(models, sizes, arguments.toy, bandwidth))
    if "multi_turn" in arguments.parts:
        add("multi_turn", lambda: (multi_turn(name, sizes, arguments.toy) for name in arguments.turn_models))
    save()
    sys.exit(any("failed" in row for part in report.values() if isinstance(part, list) for row in part))


if __name__ == "__main__":
    main()
