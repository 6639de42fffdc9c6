"""The policy: `init_params`, `param_axes`, `forward`, `unembed`.

One `block` serves training, scoring and decoding: the caller passes `attend(q, k, v)`, which is packed attention here
and attention to the cache in `model.kv_cache`. So sampler and trainer share every operation but one, and their
log-probabilities agree to rounding. The residual stream is float32 whatever the compute dtype.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from grpo_roc_jax.model.attention import apply_rotary, attend_reference, rotary_angles
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.shapes import Array, Float, Int, Key, checked

Params = dict[str, Any]
"""`embed [V,D]`, `layers` (every leaf leads with L), `final_norm [D]`, and `unembed [D,V]` unless tied."""

Attend = Callable[[Array, Array, Array], Array]
"""(q [B,T,N,H], k [B,T,K,H], v [B,T,K,H]) -> context [B,T,N,H]; keys and queries come rotated."""


def compute_dtype(config: ModelConfig) -> jnp.dtype:
    """The dtype of matrix products; `auto` asks which backend runs."""
    if config.compute_dtype == "auto":
        return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
    return jnp.dtype(config.compute_dtype)


def layer_shapes(config: ModelConfig) -> dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]]:
    """Name -> (shape, logical axes) of one layer's leaves, without the leading layer axis."""
    D, F, N, K, H = config.d_model, config.d_ff, config.heads, config.kv_heads, config.head_dim
    shapes: dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]] = {
        "attn_norm": ((D,), ("embed",)),
        "wq": ((D, N, H), ("embed", "heads", None)),
        "wk": ((D, K, H), ("embed", "kv_heads", None)),
        "wv": ((D, K, H), ("embed", "kv_heads", None)),
        "wo": ((N, H, D), ("heads", None, "embed")),
        "mlp_norm": ((D,), ("embed",)),
        "w_gate": ((D, F), ("embed", "mlp")),
        "w_up": ((D, F), ("embed", "mlp")),
        "w_down": ((F, D), ("mlp", "embed")),
    }
    if config.qkv_bias:
        shapes |= {
            "bq": ((N, H), ("heads", None)),
            "bk": ((K, H), ("kv_heads", None)),
            "bv": ((K, H), ("kv_heads", None)),
        }
    if config.qk_norm:
        shapes |= {"q_norm": ((H,), (None,)), "k_norm": ((H,), (None,))}
    return shapes


def param_axes(config: ModelConfig) -> Params:
    """Logical axis names of every leaf, in the structure of the parameters; `sharding` maps them to the mesh."""
    axes: Params = {
        "embed": ("vocab", "embed"),
        "layers": {name: ("layers", *logical) for name, (_, logical) in layer_shapes(config).items()},
        "final_norm": ("embed",),
    }
    if not config.tie_embeddings:
        axes["unembed"] = ("embed", "vocab")
    return axes


def init_params(key: Key[Array, ""], config: ModelConfig) -> Params:
    """Float32 parameters: normal of scale 0.02 (outputs of a block by 0.02/sqrt(2L)), norms 1, biases 0."""
    V, D, L = config.vocab_size, config.d_model, config.layers
    if V < 1:
        raise ValueError("model.vocab_size is 0; resolve it from the tokenizer before init_params")

    def leaf(name: str, shape: tuple[int, ...]) -> Array:
        if name.endswith("norm"):
            return jnp.ones(shape, jnp.float32)
        if name in ("bq", "bk", "bv"):
            return jnp.zeros(shape, jnp.float32)
        scale = 0.02 / (2 * L) ** 0.5 if name in ("wo", "w_down") else 0.02
        return scale * jax.random.normal(jax.random.fold_in(key, _stable_id(name)), shape, jnp.float32)

    params: Params = {
        "embed": leaf("embed", (V, D)),
        "layers": {name: leaf(name, (L, *shape)) for name, (shape, _) in layer_shapes(config).items()},
        "final_norm": leaf("final_norm", (D,)),
    }
    if not config.tie_embeddings:
        params["unembed"] = leaf("unembed", (D, V))
    return params


def _stable_id(name: str) -> int:
    """A number that depends on the name alone, so that adding a leaf leaves the others' values as they were."""
    return int.from_bytes(name.encode()[:4].ljust(4, b"\0"), "little") ^ (len(name) << 24)


@checked
def rms_norm(x: Float[Array, "*B D"], scale: Float[Array, " D"], eps: float) -> Float[Array, "*B D"]:
    """x / rms(x) * scale, in float32, whatever comes in (arXiv:1910.07467)."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * _like(scale.astype(jnp.float32), x)


def _like(leaf: Array, x: Array) -> Array:
    """Leading axes of 1 up to the rank of `x`; broadcasting over them is spelled out, never implied."""
    return leaf.reshape((1,) * (x.ndim - leaf.ndim) + leaf.shape)


def block(
    layer: Params, x: Float[Array, "B T D"], rope: tuple[Array, Array], attend: Attend, config: ModelConfig
) -> Array:
    """One layer: x + attention(norm(x)), then + gated feed-forward; `layer` has no layer axis, any float dtype."""
    dtype = layer["wq"].dtype
    h = rms_norm(x, layer["attn_norm"], config.norm_eps).astype(dtype)
    q = jnp.einsum("btd,dnh->btnh", h, layer["wq"])
    k = jnp.einsum("btd,dkh->btkh", h, layer["wk"])
    v = jnp.einsum("btd,dkh->btkh", h, layer["wv"])
    if config.qkv_bias:
        q, k, v = q + _like(layer["bq"], q), k + _like(layer["bk"], k), v + _like(layer["bv"], v)
    if config.qk_norm:
        q = rms_norm(q, layer["q_norm"], config.norm_eps).astype(dtype)
        k = rms_norm(k, layer["k_norm"], config.norm_eps).astype(dtype)
    context = attend(apply_rotary(q, *rope), apply_rotary(k, *rope), v)
    x = x + jnp.einsum("btnh,nhd->btd", context, layer["wo"], preferred_element_type=jnp.float32)
    h = rms_norm(x, layer["mlp_norm"], config.norm_eps).astype(dtype)
    gate = jnp.einsum("btd,df->btf", h, layer["w_gate"])
    up = jnp.einsum("btd,df->btf", h, layer["w_up"])
    return x + jnp.einsum("btf,fd->btd", jax.nn.silu(gate) * up, layer["w_down"], preferred_element_type=jnp.float32)


def embed(params: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Rows of the embedding as the float32 start of the residual stream."""
    return params["embed"][tokens].astype(jnp.float32)


def final_hidden(params: Params, x: Float[Array, "B T D"], config: ModelConfig) -> Float[Array, "B T D"]:
    """The normalised last residual, in the compute dtype, ready for the unembedding."""
    return rms_norm(x, params["final_norm"], config.norm_eps).astype(params["embed"].dtype)


def unembedding(params: Params) -> Float[Array, "V D"]:
    """The unembedding with the vocabulary leading, tied or not."""
    return params["unembed"].T if "unembed" in params else params["embed"]


def unembed(params: Params, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
    """Float32 logits. Training computes log-probabilities in chunks (`loss.token_logprobs`) instead."""
    return jnp.einsum("...d,vd->...v", hidden, unembedding(params), preferred_element_type=jnp.float32)


def cast_params(params: Params, dtype: jnp.dtype) -> Params:
    """Matrices in the compute dtype; norm scales stay float32, as they enter float32 arithmetic only."""

    def cast(path: tuple[Any, ...], leaf: Array) -> Array:
        return leaf if path[-1].key.endswith("norm") else leaf.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, params)


def forward(
    params: Params,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    config: ModelConfig,
    *,
    attend: Callable[[Array, Array, Array, Array], Array] = attend_reference,
    remat: Callable[[Callable], Callable] | None = None,
    constrain: Callable[[Array], Array] = lambda x: x,
) -> Float[Array, "B T D"]:
    """Final hidden states of packed rows, in the compute dtype.

    Args:
        params: Masters or published parameters; cast to the compute dtype here.
        tokens: Token ids; any id on padding.
        positions: Position of each token within its segment, restarting at 0.
        segment_ids: 1, 2, ... for the trajectories packed into a row, 0 for padding; no attention across segments.
        config: Static.
        attend: (q, k, v, segment_ids) -> context; the reference or a faster equal.
        remat: Wraps the body of the layer scan, e.g. `jax.checkpoint` with a policy.
        constrain: Says how the residual [B,T,D] is split over devices, before the first and after every layer.
    """
    # Rows of the masters, then the cast: the same numbers, while the gradient of a frequent token adds up in float32.
    x = embed(params, tokens).astype(compute_dtype(config)).astype(jnp.float32)
    params = cast_params(params, compute_dtype(config))
    rope = rotary_angles(positions, config.head_dim, config.rope_theta)

    def body(x: Array, layer: Params) -> tuple[Array, None]:
        return constrain(block(layer, x, rope, partial(_attend_rows, attend, segment_ids), config)), None

    x, _ = jax.lax.scan(remat(body) if remat else body, constrain(x), params["layers"])
    return final_hidden(params, x, config)


def _attend_rows(attend: Callable, segment_ids: Array, q: Array, k: Array, v: Array) -> Array:
    return attend(q, k, v, segment_ids)
