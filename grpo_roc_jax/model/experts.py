"""Routed experts: each token goes through a few of many feed-forwards, by grouped matrix products.

Tokens are sorted by expert, so that `jax.lax.ragged_dot` multiplies each contiguous run with its expert's matrix: the
products cost what the chosen experts cost, not what all of them would.
"""

from typing import Any

import jax
import jax.numpy as jnp

from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.shapes import Array, Float, Int, checked


def activate(gate: Array, config: ModelConfig) -> Array:
    """The nonlinearity of the gate."""
    return jax.nn.silu(gate) if config.activation == "silu" else jax.nn.gelu(gate, approximate=True)


@checked
def route(
    h: Float[Array, "M D"], router: Float[Array, "D E"], config: ModelConfig
) -> tuple[Int[Array, "M X"], Float[Array, "M X"]]:
    """(experts, weights) of each token: the `experts_per_token` largest of softmax(h router), float32.

    The weights are divided by their sum where `norm_expert_weights` says so.
    """
    logits = jnp.einsum("md,de->me", h, router, preferred_element_type=jnp.float32)
    weights, experts = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), config.experts_per_token)
    if config.norm_expert_weights:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return experts, weights


def mix_experts(layer: dict[str, Any], h: Float[Array, "B T D"], config: ModelConfig) -> Float[Array, "B T D"]:
    """sum over a token's experts of weight * (act(h W_gate) * (h W_up)) W_down, float32."""
    B, T, D = h.shape
    tokens = h.reshape(B * T, D)
    experts, weights = route(tokens, layer["router"], config)
    mixed = _run_sorted(layer, tokens, experts, weights, config)
    return mixed.reshape(B, T, D)


def _run_sorted(layer: dict[str, Any], tokens: Array, experts: Array, weights: Array, config: ModelConfig) -> Array:
    """Copies of the tokens in the order of their experts, through these, and back."""
    M, X = experts.shape
    chosen = experts.reshape(-1)
    order = jnp.argsort(chosen)
    sizes = jnp.bincount(chosen, length=config.experts).astype(jnp.int32)
    copies = tokens[order // X]
    gate = jax.lax.ragged_dot(copies, layer["w_gate"], sizes)
    up = jax.lax.ragged_dot(copies, layer["w_up"], sizes)
    hidden = activate(gate, config) * up
    out = jax.lax.ragged_dot(hidden, layer["w_down"], sizes, preferred_element_type=jnp.float32)
    out = out * weights.reshape(-1)[order][:, None]
    return jnp.zeros((M, tokens.shape[1]), jnp.float32).at[order // X].add(out)
