"""The policy: `init_params`, `param_axes`, `forward`, `unembed`.

One `block` serves training, scoring and decoding: the caller passes `attend(q, k, v)`, which is packed attention here
and attention to the cache in `model.kv_cache`. So sampler and trainer share every operation but one, and their
log-probabilities agree to rounding. The residual stream is float32 whatever the compute dtype.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from grpo_roc_jax.model.attention import attend_reference
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.experts import activate, mix_experts
from grpo_roc_jax.model.rotary import Rope, apply_rotary, rotary_tables
from grpo_roc_jax.model.sums import NARROW, Sums
from grpo_roc_jax.shapes import Array, Float, Int, Key, checked

Params = dict[str, Any]
"""`embed [V,D]`, `layers` (every leaf leads with L), `final_norm [D]`, and `unembed [D,V]` unless tied.

`layers` may also be a tuple with one dict per layer, as the sampler has them. A layer's matrix `w` may be accompanied
by `w_lora_a` and `w_lora_b` of low rank, whose product is added to it (`model.lora`).
"""

Attend = Callable[[Array, Array, Array], Array]
"""(q [B,T,N,H], k [B,T,K,H], v [B,T,K,H]) -> context [B,T,N,H]; keys and queries come rotated."""


def as_it_is(x: Array) -> Array:
    return x


@dataclass(frozen=True)
class Splits:
    """How devices share what flows through a layer, where XLA is not left to choose; nothing is said by default."""

    residual: Callable[[Array], Array] = as_it_is
    """Of the residual stream [B,T,D], before the first and after every layer."""
    entering: Callable[[Array], Array] = as_it_is
    """Of what enters the products of attention and feed-forward, [B,T,D]."""
    between: Callable[[Array], Array] = as_it_is
    """Of what lies between the two products of the feed-forward, [B,T,F]."""
    leaving: Callable[[Array], Array] = as_it_is
    """Of what leaves the last products, [B,T,D]."""


FREE = Splits()


def compute_dtype(config: ModelConfig) -> jnp.dtype:
    """The dtype of matrix products; `auto` asks which backend runs."""
    if config.compute_dtype == "auto":
        return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
    return jnp.dtype(config.compute_dtype)


def sums_of(config: ModelConfig) -> Sums:
    """Wide ones where asked for and computing in float32."""
    return Sums(wide=config.sums == "float64" and compute_dtype(config) == jnp.float32)


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
    if config.post_norms:
        shapes |= {"attn_post_norm": ((D,), ("embed",)), "mlp_post_norm": ((D,), ("embed",))}
    if config.experts:
        E = config.experts
        shapes |= {
            "router": ((D, E), ("embed", None)),
            "w_gate": ((E, D, F), ("experts", "embed", "mlp")),
            "w_up": ((E, D, F), ("experts", "embed", "mlp")),
            "w_down": ((E, F, D), ("experts", "mlp", "embed")),
        }
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
    """Float32 parameters: normal of scale D^-0.5 (outputs of a block by 1/sqrt(2L) of it), norms 1, biases 0.

    The common 0.02 is this scale at D = 2500; narrow models start far too flat with it and learn to copy late.

    Raises:
        ValueError: the vocabulary is not known yet.
    """
    V, D, L = config.vocab_size, config.d_model, config.layers
    if V < 1:
        raise ValueError("model.vocab_size is 0; resolve it from the tokenizer before init_params")

    def leaf(name: str, shape: tuple[int, ...]) -> Array:
        if name.endswith("norm"):
            return jnp.zeros(shape, jnp.float32) if config.norm_offset else jnp.ones(shape, jnp.float32)
        if name in ("bq", "bk", "bv"):
            return jnp.zeros(shape, jnp.float32)
        scale = D**-0.5 / (2 * L) ** 0.5 if name in ("wo", "w_down") else D**-0.5
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
def rms_norm(
    x: Float[Array, "*B D"], scale: Float[Array, " D"], eps: float, sums: Sums = NARROW
) -> Float[Array, "*B D"]:
    """x / rms(x) * scale, in float32, whatever comes in (arXiv:1910.07467)."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(sums.mean(x * x) + eps) * _like(scale.astype(jnp.float32), x)


def _like(leaf: Array, x: Array) -> Array:
    """Leading axes of 1 up to the rank of `x`; broadcasting over them is spelled out, never implied."""
    return leaf.reshape((1,) * (x.ndim - leaf.ndim) + leaf.shape)


def norm(x: Float[Array, "*B D"], scale: Float[Array, " D"], config: ModelConfig) -> Float[Array, "*B D"]:
    """`rms_norm` under the model's convention for the stored scale."""
    scale = 1.0 + scale.astype(jnp.float32) if config.norm_offset else scale
    return rms_norm(x, scale, config.norm_eps, sums_of(config))


def linear(
    layer: Params, name: str, x: Array, equation: str, dtype: jnp.dtype | None = None, sums: Sums = NARROW
) -> Array:
    """einsum of `x` with the matrix of that name, plus (x A) B where the layer holds a low-rank pair for it."""
    y = sums.einsum(equation, x, layer[name], dtype)
    if f"{name}_lora_a" not in layer:
        return y
    a, b = layer[f"{name}_lora_a"], layer[f"{name}_lora_b"]
    low = sums.product(partial(jnp.tensordot, axes=a.ndim - 1), x, a.astype(x.dtype))
    return y + sums.product(partial(jnp.tensordot, axes=1), low, b.astype(x.dtype), dtype)


def block(
    layer: Params,
    x: Float[Array, "B T D"],
    rope: Rope,
    attend: Attend,
    config: ModelConfig,
    experts: Callable[..., Array] = mix_experts,
    splits: Splits = FREE,
) -> Array:
    """One layer: x + attention(norm(x)), then + gated feed-forward; `layer` has no layer axis, any float dtype."""
    dtype, sums = layer["wq"].dtype, sums_of(config)
    h = splits.entering(norm(x, layer["attn_norm"], config).astype(dtype))
    q = linear(layer, "wq", h, "btd,dnh->btnh", sums=sums)
    k = linear(layer, "wk", h, "btd,dkh->btkh", sums=sums)
    v = linear(layer, "wv", h, "btd,dkh->btkh", sums=sums)
    if config.qkv_bias:
        q, k, v = q + _like(layer["bq"], q), k + _like(layer["bk"], k), v + _like(layer["bv"], v)
    if config.qk_norm:
        q = norm(q, layer["q_norm"], config).astype(dtype)
        k = norm(k, layer["k_norm"], config).astype(dtype)
    if config.query_scale:  # attention divides by sqrt(head_dim)
        q = q * (config.head_dim / config.query_scale) ** 0.5
    context = attend(apply_rotary(q, *rope), apply_rotary(k, *rope), v)
    added = splits.leaving(linear(layer, "wo", context, "btnh,nhd->btd", jnp.float32, sums))
    x = x + (norm(added, layer["attn_post_norm"], config) if config.post_norms else added)
    h = splits.entering(norm(x, layer["mlp_norm"], config).astype(dtype))
    added = splits.leaving(experts(layer, h, config) if config.experts else _feed_forward(layer, h, config, splits))
    return x + (norm(added, layer["mlp_post_norm"], config) if config.post_norms else added)


def _feed_forward(
    layer: Params, h: Float[Array, "B T D"], config: ModelConfig, splits: Splits
) -> Float[Array, "B T D"]:
    sums = sums_of(config)
    gate = splits.between(linear(layer, "w_gate", h, "btd,df->btf", sums=sums))
    up = splits.between(linear(layer, "w_up", h, "btd,df->btf", sums=sums))
    return linear(layer, "w_down", activate(gate, config) * up, "btf,fd->btd", jnp.float32, sums)


def embed(params: Params, tokens: Int[Array, "B T"], config: ModelConfig) -> Float[Array, "B T D"]:
    """Rows of the embedding, in the compute dtype, as the float32 start of the residual stream.

    The rows of masters are cast after the lookup: the same numbers, while the gradient of a frequent token adds up in
    float32.
    """
    dtype = compute_dtype(config)
    x = params["embed"][tokens].astype(dtype)
    if config.scale_embed:  # the factor in the compute dtype too, as the published models were trained
        x = x * jnp.asarray(config.d_model**0.5, dtype)
    return x.astype(jnp.float32)


def final_hidden(params: Params, x: Float[Array, "B T D"], config: ModelConfig) -> Float[Array, "B T D"]:
    """The normalised last residual, in the compute dtype, ready for the unembedding."""
    return norm(x, params["final_norm"], config).astype(params["embed"].dtype)


def unembedding(params: Params) -> Float[Array, "V D"]:
    """The unembedding with the vocabulary leading, tied or not."""
    return params["unembed"].T if "unembed" in params else params["embed"]


def unembed(params: Params, hidden: Float[Array, "*B D"], sums: Sums = NARROW) -> Float[Array, "*B V"]:
    """Float32 logits. Training computes log-probabilities in chunks (`loss.token_logprobs`) instead."""
    return sums.einsum("...d,vd->...v", hidden, unembedding(params), jnp.float32)


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
    attend: Callable[..., Array] | None = None,
    experts: Callable[..., Array] = mix_experts,
    remat: Callable[[Callable], Callable] | None = None,
    splits: Splits = FREE,
) -> Float[Array, "B T D"]:
    """Final hidden states of packed rows, in the compute dtype.

    Args:
        params: Masters or published parameters; cast to the compute dtype here.
        tokens: Token ids; any id on padding.
        positions: Position of each token within its segment, restarting at 0.
        segment_ids: 1, 2, ... for the trajectories packed into a row, 0 for padding; no attention across segments.
        config: Static.
        attend: (q, k, v, segment_ids[, window]) -> context; a faster equal of the reference, which it is by default.
        experts: The feed-forward of a model with experts; `mix_experts` bound to the mesh of the rows.
        remat: Wraps the body of the layer scan, e.g. `jax.checkpoint` with a policy.
        splits: Over the devices of a mesh.
    """
    x = embed(params, tokens, config)
    params = cast_params(params, compute_dtype(config))
    tables = rotary_tables(positions, config)
    attend = attend or partial(attend_reference, sums=sums_of(config))

    def body(x: Array, inputs: tuple[Params, Array | None]) -> tuple[Array, None]:
        layer, window = inputs
        rows = partial(_attend_rows, attend, segment_ids, window)
        return splits.residual(block(layer, x, _choose_rope(tables, window), rows, config, experts, splits)), None

    body = remat(body) if remat else body
    windows = jnp.asarray(config.layer_windows, jnp.int32) if config.layer_windows else None
    if isinstance(params["layers"], tuple):
        x = splits.residual(x)
        for i, layer in enumerate(params["layers"]):
            x, _ = body(x, (layer, None if windows is None else windows[i]))
    else:
        x, _ = jax.lax.scan(body, splits.residual(x), (params["layers"], windows))
    return final_hidden(params, x, config)


def _choose_rope(tables: dict[bool, Rope], window: Array | None) -> Rope:
    if window is None or tables[True] is tables[False]:
        return tables[False]
    choose = lambda windowed, plain: jnp.where(window > 0, windowed, plain)  # noqa: E731
    return jax.tree.map(choose, tables[True], tables[False])


def _attend_rows(attend: Callable, segment_ids: Array, window: Array | None, q: Array, k: Array, v: Array) -> Array:
    return attend(q, k, v, segment_ids) if window is None else attend(q, k, v, segment_ids, window)
