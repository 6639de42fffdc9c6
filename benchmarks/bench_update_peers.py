"""An optimizer step against torch, a step written by hand, and google-tunix, on the shape of a small published model.

Each case runs its variants by turns in one process, three steps each, in one order and then in the other, so that the
ratios survive a busy machine; rows of one length, or of unequal ones (`packed`). Full weights, float32, AdamW with the
fused kernel of torch. The loss is the clipped one of GRPO; where the weights can be made equal, so are loss and
gradient norm, which is checked before anything is timed.

    python benchmarks/bench_update_peers.py full        # torch + transformers, the step of plain_step.py
    python benchmarks/bench_update_peers.py packed      # unequal lengths: torch pads them
    python benchmarks/bench_update_peers.py low_rank    # torch + peft
    python benchmarks/bench_update_peers.py tunix       # google-tunix, a GRPO step with a KL term; equal lengths

One JSON line: tokens a second, share of the machine's peak, and factors of time over the first variant. `--out FILE`
appends it.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_update import BETA, Timed, Tunix, lengths_of, matmul_peak, rows_of, useful_flops
from plain_step import fused, make_plain_step, plain_rows

from grpo_roc_jax.learner.loss import UpdateConfig
from grpo_roc_jax.learner.pack import BatchConfig, pack
from grpo_roc_jax.learner.update import OptimConfig, bind_base, init_train_state, make_update_step, start_train_state
from grpo_roc_jax.method.divergence import K3
from grpo_roc_jax.method.surrogate import Clip
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.lora import AllWeights, LowRank
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh, shard_batch
from grpo_roc_jax.model.transformer import init_params, take_layer
from grpo_roc_jax.types import TrainRow

SMOLLM2 = ModelConfig(
    d_model=576, layers=30, heads=9, kv_heads=3, head_dim=64, d_ff=1536, vocab_size=49152, rope_theta=1e5
)
OPTIM, CLIP, LORA = OptimConfig(lr=1e-6, warmup_steps=0), Clip(), LowRank()
COUNT, LENGTH = 4, 158
STEPS = 2
"""Steps of a variant that are timed in its turn, after one that is not."""
UNEQUAL = 16
"""Trajectories of unequal lengths, of the same mean."""
ROW = 512
"""Tokens of a packed row."""


class Ours(Timed):
    """The update of this library, with what a run on a CPU with memory to spare chooses."""

    def __init__(self, model: ModelConfig, rows: list[TrainRow], batch: BatchConfig, lora: Any, clip: Clip) -> None:
        super().__init__()
        mesh = make_mesh(ShardingConfig(), jax.devices()[:1])
        self.batch = shard_batch(pack(rows, batch, calls_of(rows, batch))[0], mesh)
        update = UpdateConfig(remat="none", vocab_chunk=model.vocab_size)
        step, key = make_update_step(model, clip, OPTIM, update, mesh, lora=lora), jax.random.key(0)
        weights = jax.jit(partial(init_params, config=model))(key)
        layers = tuple(take_layer(weights["layers"], i, model) for i in range(model.layers))
        base = {**weights, "layers": layers} if lora.rank else None
        self.state = init_train_state(key, model, OPTIM, mesh, lora) if lora.rank else None
        if not lora.rank:
            self.state = start_train_state(weights, model, OPTIM, mesh, donate=True)
        self.step = bind_base(step, base)

    def run(self) -> tuple[float, float]:
        with self.step_timed():
            self.state, metrics = self.step(self.state, self.batch)
            jax.block_until_ready((self.state, metrics))
        return float(metrics["loss/value"]), float(metrics["update/grad_norm"])


def calls_of(rows: list[TrainRow], batch: BatchConfig) -> int:
    """Micro-batches that the rows fill."""
    return -(-pack(rows, replace(batch, rows=1), len(rows))[1].rows_used // batch.rows)


class Plain(Timed):
    """`plain_step.py`."""

    def __init__(self, model: ModelConfig, rows: list[TrainRow]) -> None:
        super().__init__()
        self.rows = plain_rows(rows)
        start, self.step = make_plain_step(model, self.rows["tokens"].shape, OPTIM, CLIP)
        self.state = start(fused(jax.jit(partial(init_params, config=model))(jax.random.key(0))))

    def run(self) -> tuple[float, float]:
        with self.step_timed():
            self.state, (value, norm) = self.step(self.state, self.rows)
            jax.block_until_ready((self.state, value, norm))
        return float(value), float(norm)


class Torch(Timed):
    """transformers' Llama of this shape with the same weights, and torch's fused AdamW; rows padded to the longest of
    those in a call, of which there are `at_once` or, for 0, all."""

    def __init__(self, model: ModelConfig, rows: list[TrainRow], lora: Any = None, at_once: int = 0) -> None:
        super().__init__()
        self.at_once = at_once or len(rows)
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self.torch = torch
        config = LlamaConfig(
            vocab_size=model.vocab_size,
            hidden_size=model.d_model,
            intermediate_size=model.d_ff,
            num_hidden_layers=model.layers,
            num_attention_heads=model.heads,
            num_key_value_heads=model.kv_heads,
            head_dim=model.head_dim,
            rms_norm_eps=model.norm_eps,
            rope_theta=model.rope_theta,
            tie_word_embeddings=True,
            attn_implementation="sdpa",
        )
        self.model = LlamaForCausalLM(config).float().train()
        self.model.load_state_dict(self._weights(model), strict=False)
        if lora is not None:
            from peft import LoraConfig, get_peft_model

            targets = list(lora.targets)
            self.model = get_peft_model(
                self.model, LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets)
            )
        self.trained = [part for part in self.model.parameters() if part.requires_grad]
        matrices = [part for part in self.trained if part.ndim > 1]
        vectors = [part for part in self.trained if part.ndim < 2]
        groups = [{"params": matrices, "weight_decay": OPTIM.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=OPTIM.lr, fused=True)
        longest = max(row.length for row in rows)

        def padded(parts: list[np.ndarray]) -> Any:
            return torch.from_numpy(np.stack([np.pad(part, (0, longest - len(part))) for part in parts]))

        self.tokens = padded([row.tokens.astype(np.int64) for row in rows])
        self.present = padded([np.ones(row.length, np.int64) for row in rows])
        self.old = padded([row.logprobs_old for row in rows])[:, 1:]
        self.advantages = padded([row.advantages for row in rows])[:, 1:]
        self.weights = padded([np.where(row.policy_mask, row.weights, 0.0).astype(np.float32) for row in rows])[:, 1:]

    def _weights(self, model: ModelConfig) -> dict[str, Any]:
        params = jax.device_get(jax.jit(partial(init_params, config=model))(jax.random.key(0)))
        names = {
            "self_attn.q_proj": ("wq", 1),
            "self_attn.k_proj": ("wk", 1),
            "self_attn.v_proj": ("wv", 1),
            "self_attn.o_proj": ("wo", 2),
            "mlp.gate_proj": ("w_gate", 1),
            "mlp.up_proj": ("w_up", 1),
            "mlp.down_proj": ("w_down", 1),
        }
        tensors = {"model.embed_tokens.weight": params["embed"], "lm_head.weight": params["embed"]}
        for i in range(model.layers):
            for name, (key, inputs) in names.items():
                matrix = params["layers"][key][i]
                tensors[f"model.layers.{i}.{name}.weight"] = matrix.reshape(int(np.prod(matrix.shape[:inputs])), -1).T
        return {name: self.torch.from_numpy(np.array(leaf)) for name, leaf in tensors.items()}

    def run(self) -> tuple[float, float]:
        torch, total = self.torch, 0.0
        with self.step_timed():
            for first in range(0, len(self.tokens), self.at_once):
                loss = self._loss(slice(first, first + self.at_once))
                loss.backward()
                total += loss.item()
            norm = torch.nn.utils.clip_grad_norm_(self.trained, OPTIM.max_grad_norm)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return total, norm.item()

    def _loss(self, rows: slice) -> Any:
        """The loss of some rows, cut to the longest of them."""
        torch, present = self.torch, self.present[rows]
        longest = int(present.sum(1).max())
        tokens, present = self.tokens[rows, :longest], present[:, :longest]
        old, advantages, weights = (part[rows, : longest - 1] for part in (self.old, self.advantages, self.weights))
        mask = None if bool(present.all()) else present
        logits = self.model(input_ids=tokens, attention_mask=mask, use_cache=False).logits[:, :-1]
        targets = tokens[:, 1:]
        logprobs = -torch.nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), reduction="none"
        ).view(targets.shape)
        ratio = torch.exp(logprobs - old)
        clipped = ratio.clamp(1 - CLIP.clip_low, 1 + CLIP.clip_high)
        return -(weights * torch.minimum(ratio * advantages, clipped * advantages)).sum()


class Peer(Tunix):
    """`bench_update.Tunix`, which has no state to hand on."""

    def run(self, state: object = None) -> None:
        super().run(state)


def variants_of(case: str, model: ModelConfig) -> tuple[list[int], dict[str, Any]]:
    """(lengths of the trajectories, what makes each variant)."""
    lengths = [LENGTH] * COUNT
    if case == "packed":
        drawn = lengths_of(UNEQUAL, LENGTH, 512, 0.6)
        lengths = [int(n) for n in drawn]
    rows = rows_of(np.asarray(lengths), model.vocab_size)
    batch = BatchConfig(row_length=160, rows=COUNT)
    if case == "full":
        return lengths, {
            "ours": lambda: Ours(model, rows, batch, AllWeights(), CLIP),
            "plain": lambda: Plain(model, rows),
            "torch": lambda: Torch(model, rows),
        }
    if case == "packed":  # rows of several trajectories, some a call, as in configs/smollm2_words.yaml
        packed = {count: BatchConfig(row_length=ROW, rows=count) for count in (2, 1)}
        return lengths, {
            "ours": lambda: Ours(model, rows, packed[2], AllWeights(), CLIP),
            "ours, a row a call": lambda: Ours(model, rows, packed[1], AllWeights(), CLIP),
            "torch, padded": lambda: Torch(model, rows),
            "torch, padded, four a call": lambda: Torch(model, rows, at_once=COUNT),
        }
    if case == "low_rank":
        return lengths, {
            "ours": lambda: Ours(model, rows, batch, LORA, CLIP),
            "torch + peft": lambda: Torch(model, rows, LORA),
        }
    return lengths, {
        "ours": lambda: Ours(model, rows, batch, AllWeights(), Clip(kl=K3(coef=BETA))),
        "tunix": lambda: Peer(model, rows, COUNT),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=("full", "packed", "low_rank", "tunix"))
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--layers", type=int, default=SMOLLM2.layers, help="fewer for a trial")
    parser.add_argument("--beside", default="nothing", help="what else ran on the machine, for the record")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    model = ModelConfig(**{**vars(SMOLLM2), "layers": arguments.layers})
    load = [round(load, 1) for load in os.getloadavg()]
    lengths, makers = variants_of(arguments.case, model)
    variants = {name: make() for name, make in makers.items()}
    first = {name: variant.run() for name, variant in variants.items()}
    if arguments.case in ("full", "packed"):
        for name, figures in first.items():
            np.testing.assert_allclose(figures, first["ours"], rtol=2e-3, atol=1e-5, err_msg=name)
    for turn in range(arguments.repeats):
        for variant in list(variants.values())[:: -1 if turn % 2 else 1]:
            for _ in range(1 + STEPS):
                variant.run()
            # The first step after another variant gets memory from the system anew, which no training does.
            del variant.seconds[-1 - STEPS], variant.cpu_s[-1 - STEPS]
    tokens, peak = sum(lengths), matmul_peak(jnp.float32)
    lora = LORA if arguments.case == "low_rank" else AllWeights()
    best, ours = useful_flops(model, np.asarray(lengths), lora) / peak, variants["ours"]
    report = {}
    for name, variant in variants.items():
        wall, cpu = (statistics.median(times[1:]) for times in (variant.seconds, variant.cpu_s))
        pairs = [a / b for a, b in zip(variant.seconds[1:], ours.seconds[1:], strict=True)]
        report[name] = {
            "tokens_per_s": tokens / wall,
            "tokens_per_cpu_s": tokens / cpu,
            "share_of_peak": best / wall,
            "speed_of_ours": statistics.median(pairs),
            "range": [min(pairs), max(pairs)],
            "speed_of_ours_cpu": cpu / statistics.median(ours.cpu_s[1:]),
        }
    packages = ("jax", "torch", "transformers", "peft", "google-tunix")
    versions = {}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    line = {
        "benchmark": "update_peers",
        "case": arguments.case,
        "layers": model.layers,
        "lengths": lengths,
        "peak_gflops": peak / 1e9,
        "useful_s_at_peak": best,
        "variants": report,
        "first step (loss, gradient norm)": {name: figures for name, figures in first.items() if figures},
        "repeats": arguments.repeats,
        "load": load,
        "beside": arguments.beside,
        "device": platform.machine(),
        "commit": commit,
        "versions": versions,
    }
    print(json.dumps(line))
    if arguments.out:
        with arguments.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
