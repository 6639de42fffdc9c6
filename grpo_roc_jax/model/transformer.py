"""The policy model: `init_params`, `param_axes`, `forward`, `unembed`.

One `block` serves training, scoring and decoding. The caller passes `attend(q, k, v)`: attention over packed rows here,
attention to the cache in `model.pool`. Sampler and trainer share every other operation, so their log-probabilities
agree to rounding. The residual stream is float32 for every compute dtype.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from grpo_roc_jax.model.attention import attend_reference
from grpo_roc_jax.model.attention_mask import soft_cap
from grpo_roc_jax.model.config import FULL, ModelConfig, NoExtras
from grpo_roc_jax.model.delta import Signals, delta_shapes, init_decay, recur_packed
from grpo_roc_jax.model.experts import WEIGHTS, gated, mix_experts
from grpo_roc_jax.model.low_precision import QuantizedWeight, is_quantized, product
from grpo_roc_jax.model.rotary import Rope, apply_rotary, paired_halves, rope_names, rotary_tables
from grpo_roc_jax.shapes import Array, Float, Int, Key, checked

Params = dict[str, Any]
"""`embed [V,D]`, `layers` (every leaf leads with the layers that have it, see `layers_with`), `final_norm [D]`, and
`unembed [D,V]` unless tied.

`layers` may also be a tuple with one dict per layer, as in the sampler. A layer's matrix `w` may come with low-rank
matrices `w_lora_a` and `w_lora_b`, whose product is added to it (`model.lora`), and may be a `QuantizedWeight`.
"""

Attend = Callable[..., Array]
"""(q [B,T,N,H], k [B,T,K,H], v [B,T,K,H][, sinks [N]]) -> context [B,T,N,H]; queries and keys are already rotated. In a
recurrent layer (`delta.Signals`, weights of the convolution) -> context [B,T,N,U]."""


def identity(x: Array) -> Array:
    return x


def take_rows(table: Array, ids: Array) -> Array:
    return table[ids]


@dataclass(frozen=True)
class Splits:
    """Sharding constraints on the activations of a layer, where XLA should not choose; by default there are none."""

    residual: Callable[[Array], Array] = identity
    """On the residual stream [B,T,D], before the first layer and after every layer."""
    block_input: Callable[[Array], Array] = identity
    """On the input of attention and of the feed-forward, [B,T,D]."""
    ffn_hidden: Callable[[Array], Array] = identity
    """On the hidden activations of the feed-forward, [B,T,F]."""
    block_output: Callable[[Array], Array] = identity
    """On the output of attention and of the feed-forward, [B,T,D]."""
    flat: bool = False
    """Whether products take rows and tokens as one axis: in training on a CPU, where no mesh splits them apart.
    Compiled for a TPU it costs memory traffic (Qwen3-0.6B, v5e:2x2: 299.6 instead of 295.0 GB)."""


FREE = Splits()


@dataclass(frozen=True)
class Execution:
    """How a forward pass is executed; it changes results by rounding only."""

    attend: Callable[..., Array] | None = None
    """(q, k, v, segment_ids[, window]) -> context, from `attention.make_attention` or `parallel.attention_for`, which
    know the model's soft cap; None for `attend_reference`."""
    look_up: Callable[[Array, Array], Array] = take_rows
    """(table [V,D], ids [B,T]) -> rows [B,T,D], e.g. `parallel.look_up_on`."""
    experts: Callable[..., Array] = mix_experts
    """The feed-forward of a model with experts: `mix_experts` bound to the mesh of the rows."""
    remat: Callable[[Callable], Callable] | None = None
    """Wraps the body of the layer scan, e.g. `jax.checkpoint` with a policy."""
    splits: Splits = FREE
    """Sharding of the activations over the devices of a mesh."""
    unroll: bool = False
    """Whether stacked layers are compiled one after the other, and not as a scan, whose backward pass copies what each
    layer saved into arrays of all layers and out of them. The program is longer to compile."""


SIMPLE = Execution()
"""Reference attention on one device, every intermediate kept."""


def compute_dtype(config: ModelConfig) -> jnp.dtype:
    """The dtype of matrix products; `auto` depends on the backend."""
    if config.compute_dtype == "auto":
        return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
    return jnp.dtype(config.compute_dtype)


def _expert_shapes(config: ModelConfig) -> dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]]:
    """Leaves of the experts that a router chooses among, and of the dense feed-forward of the layers before them."""
    D, F, E, experts = config.d_model, config.d_ff, config.experts.count, config.experts
    shapes: dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]] = {
        "router": ((D, E), ("embed", None)),
        "w_gate": ((E, D, F), ("experts", "embed", "mlp")),
        "w_up": ((E, D, F), ("experts", "embed", "mlp")),
        "w_down": ((E, F, D), ("experts", "mlp", "embed")),
    }
    if experts.biases:
        shapes |= {
            "b_gate": ((E, F), ("experts", "mlp")),
            "b_up": ((E, F), ("experts", "mlp")),
            "b_down": ((E, D), ("experts", "embed")),
        }
    if experts.biases or experts.scores == "sigmoid":
        shapes["b_router"] = ((E,), (None,))
    if experts.own_norms:
        shapes |= {name: ((D,), ("embed",)) for name in ("e_norm", "e_post_norm", "s_post_norm", "router_scale")}
        shapes["expert_scale"] = ((E,), (None,))
    if experts.dense_ff:
        shapes |= _feed_forward_shapes("d", D, experts.dense_ff)
    return shapes


def layer_shapes(config: ModelConfig) -> dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]]:
    """Name -> (shape, logical axes) of one layer's leaves, without the leading layer axis. Where there are recurrent
    layers, a layer has a part of them (`layers_with`)."""
    D, F, N, K, H = config.d_model, config.d_ff, config.heads, config.kv_heads, config.head_dim
    shapes: dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]] = {
        "attn_norm": ((D,), ("embed",)),
        "wq": ((D, N, 2 * H if config.gated_attention else H), ("embed", "heads", None)),
        "wk": ((D, K, H), ("embed", "kv_heads", None)),
        "wv": ((D, K, H), ("embed", "kv_heads", None)),
        "wo": ((N, H, D), ("heads", None, "embed")),
        "mlp_norm": ((D,), ("embed",)),
        **_feed_forward_shapes("w", D, F),
    }
    if config.extras.latent:
        shapes = latent_shapes(config) | {name: shapes[name] for name in shapes if name not in ("wq", "wk", "wv", "wo")}
    if config.extras.sinks:
        shapes["sinks"] = ((N,), ("heads",))
    if config.extras.output_bias:
        shapes["bo"] = ((D,), ("embed",))
    if config.qkv_bias:
        shapes |= {
            "bq": ((N, H), ("heads", None)),
            "bk": ((K, H), ("kv_heads", None)),
            "bv": ((K, H), ("kv_heads", None)),
        }
    if config.qk_norm == "whole":
        shapes |= {"q_norm": ((N, H), ("heads", None)), "k_norm": ((K, H), ("kv_heads", None))}
    elif config.qk_norm:
        shapes |= {"q_norm": ((H,), (None,)), "k_norm": ((H,), (None,))}
    if config.windows.full_head_dim:
        shapes |= _full_shapes(config)
    if config.extras.layer_factors:
        shapes["factor"] = ((1,), (None,))
    if config.post_norms:
        shapes |= {"attn_post_norm": ((D,), ("embed",)), "mlp_post_norm": ((D,), ("embed",))}
    if config.post_norms == "only":
        del shapes["attn_norm"], shapes["mlp_norm"]
    if config.experts.count:
        shapes |= _expert_shapes(config)
    if G := config.experts.shared:
        shapes |= _feed_forward_shapes("s", D, G)
    if config.experts.shared_gate:
        shapes["s_share"] = ((D, 1), ("embed", None))
    return shapes | (delta_shapes(config) if config.delta else {})


def _full_shapes(config: ModelConfig) -> dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]]:
    D, N, K, H = config.d_model, config.heads, config.windows.full_kv_heads, config.windows.full_head_dim
    shapes: dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]] = {
        "wq": ((D, N, H), ("embed", "heads", None)),
        "wk": ((D, K, H), ("embed", "kv_heads", None)),
        "wv": ((D, K, H), ("embed", "kv_heads", None)),
        "wo": ((N, H, D), ("heads", None, "embed")),
    }
    if config.windows.full_keys_as_values:
        del shapes["wv"]
    if config.qk_norm:
        shapes |= {"q_norm": ((H,), (None,)), "k_norm": ((H,), (None,))}
    return {f"{FULL}{name}": shape for name, shape in shapes.items()}


def latent_shapes(config: ModelConfig) -> dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]]:
    """The leaves of multi-head latent attention in place of those of the usual kind."""
    D, N, H, extras = config.d_model, config.heads, config.head_dim, config.extras
    L, Z, P, O = extras.latent, extras.latent_query, extras.latent_key, extras.latent_value
    shapes: dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]] = {
        "wq": ((Z or D, N, P + H - L), (None if Z else "embed", "heads", None)),
        "kv_down": ((D, H), ("embed", None)),
        "kv_latent_norm": ((L,), (None,)),
        "kv_up": ((L, N, P + O), (None, "heads", None)),
        "wo": ((N, O, D), ("heads", None, "embed")),
    }
    return shapes | ({"q_down": ((D, Z), ("embed", None)), "q_latent_norm": ((Z,), (None,))} if Z else {})


def _feed_forward_shapes(prefix: str, D: int, F: int) -> dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]]:
    """The leaves of a gated feed-forward: `w_` of a dense layer or its experts, `s_` of the one beside the experts,
    `d_` of the first layers where those are dense."""
    return {
        f"{prefix}_gate": ((D, F), ("embed", "mlp")),
        f"{prefix}_up": ((D, F), ("embed", "mlp")),
        f"{prefix}_down": ((F, D), ("mlp", "embed")),
    }


BIASES = ("bq", "bk", "bv", "bo", "sinks", "b_gate", "b_up", "b_down", "b_router", "conv_bias", "skip")
"""Leaves that begin as zeros and do not decay."""
EXACT = ("a_log", "dt_bias", "sinks", "b_router", "conv_bias", "skip", "factor", "router_scale", "expert_scale")
"""Leaves that stay float32, since they are used in float32 arithmetic only; so do those of norms."""
_OF_ATTENTION = ("wq", "wk", "wv", "wo", "bq", "bk", "bv", "bo", "sinks", "q_norm", "k_norm")
_OF_ATTENTION += ("q_down", "q_latent_norm", "kv_down", "kv_latent_norm", "kv_up")
_DENSE = ("d_gate", "d_up", "d_down")
_OF_EXPERTS = ("s_gate", "s_up", "s_down", "s_share", *WEIGHTS)


_OUTPUTS = ("wo", "w_down", "w_out", "s_down", "d_down")


def layers_with(name: str, config: ModelConfig) -> tuple[int, ...]:
    """The layers that have a leaf, or its low-rank pair, in the order of its leading axis."""
    name, attends, full = name.partition("_lora_")[0], config.attends, config.full_layers
    if name.startswith(FULL):
        return full
    if name in _OF_ATTENTION:
        return tuple(i for i, attention in enumerate(attends) if attention and i not in full)
    if config.delta and name in delta_shapes(config):
        return tuple(i for i, attention in enumerate(attends) if not attention)
    if name in _DENSE or name in _OF_EXPERTS:
        dense, every = config.experts.dense_layers, config.experts.every
        sparse = [i >= dense and (i + 1) % every == 0 for i in range(config.layers)]
        return tuple(i for i in range(config.layers) if sparse[i] == (name in _OF_EXPERTS))
    return tuple(range(config.layers))


def layer_weights(config: ModelConfig) -> float:
    """Weights of a layer that a token is multiplied with, on average."""
    shapes, experts = layer_shapes(config), config.experts
    share = experts.per_token / experts.count if experts.count else 1.0
    weights = {name: math.prod(shape) * (share if "experts" in axes else 1) for name, (shape, axes) in shapes.items()}
    return sum(len(layers_with(name, config)) * size for name, size in weights.items()) / config.layers


def take_layer(stacked: Params, layer: int, config: ModelConfig) -> Params:
    """The leaves of one layer, of leaves that are stacked over the layers that have them."""
    places = {name: layers_with(name, config) for name in stacked}
    return {name: leaf[places[name].index(layer)] for name, leaf in stacked.items() if layer in places[name]}


def param_axes(config: ModelConfig) -> Params:
    """Logical axis names of every leaf, in the structure of the parameters; `model.sharding` maps them to the mesh."""
    axes: Params = {
        "embed": ("vocab", "embed"),
        "layers": {name: ("layers", *logical) for name, (_, logical) in layer_shapes(config).items()},
        "final_norm": ("embed",),
    }
    if not config.tie_embeddings:
        axes["unembed"] = ("embed", "vocab")
    return axes


def init_params(key: Key[Array, ""], config: ModelConfig) -> Params:
    """Float32 parameters: normal with standard deviation D^-0.5 (the output matrices of a block with 1/sqrt(2L) of
    it), norm scales 1, biases 0.

    The common 0.02 equals this at D = 2500. In narrow models it makes the initial logits far too flat, and they learn
    to copy late.

    Raises:
        ValueError: the vocabulary size is not known yet.
    """
    V, D, L = config.vocab_size, config.d_model, config.layers
    if V < 1:
        raise ValueError("model.vocab_size is 0; resolve it from the tokenizer before init_params")

    def leaf(name: str, shape: tuple[int, ...]) -> Array:
        leaf_key = jax.random.fold_in(key, _stable_id(name))
        if name in ("a_log", "dt_bias"):
            return init_decay(leaf_key, name, shape)
        if name.endswith("norm") or name in ("factor", "router_scale", "expert_scale"):
            offset = config.norm_offset and name != "delta_norm"
            return jnp.zeros(shape, jnp.float32) if offset else jnp.ones(shape, jnp.float32)
        if name in BIASES:
            return jnp.zeros(shape, jnp.float32)
        scale = D**-0.5 / (2 * L) ** 0.5 if name.removeprefix(FULL) in _OUTPUTS else D**-0.5
        scale = shape[-1] ** -0.5 if name == "conv" else scale
        return scale * jax.random.normal(leaf_key, shape, jnp.float32)

    params: Params = {
        "embed": leaf("embed", (V, D)),
        "layers": {
            name: leaf(name, (len(layers_with(name, config)), *shape))
            for name, (shape, _) in layer_shapes(config).items()
        },
        "final_norm": leaf("final_norm", (D,)),
    }
    if not config.tie_embeddings:
        params["unembed"] = leaf("unembed", (D, V))
    return params


def _stable_id(name: str) -> int:
    """A number that depends on the name alone, so that adding a leaf does not change the values of the others."""
    return int.from_bytes(name.encode()[:4].ljust(4, b"\0"), "little") ^ (len(name) << 24)


def _like(leaf: Array, x: Array) -> Array:
    """Adds leading axes of size 1 up to the rank of `x`; rank promotion is always explicit in this package."""
    return leaf.reshape((1,) * (x.ndim - leaf.ndim) + leaf.shape)


@checked
def norm(x: Float[Array, "*B D"], scale: Float[Array, " D"], config: ModelConfig) -> Float[Array, "*B D"]:
    """x / rms(x) * scale in float32, for any dtype of `x` (arXiv:1910.07467). The stored scale may be its distance from
    1."""
    x, scale = x.astype(jnp.float32), scale.astype(jnp.float32)
    scale = 1.0 + scale if config.norm_offset else scale
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + config.norm_eps) * _like(scale, x)


def linear(
    layer: Params, name: str, x: Array, inputs: int = 1, dtype: jnp.dtype | None = None, *, flat: bool = True
) -> Array:
    """`x` times the matrix of that name, plus (x A) B if the layer has a low-rank pair for it.

    Args:
        layer: Has the matrix, whose first `inputs` axes are summed over.
        name: Name of the matrix.
        x: [B,T,...], ends with these axes.
        inputs: Number of axes that are summed over.
        dtype: Dtype of the result and of its sums; that of `x` by default.
        flat: See `Splits`.
    """
    rows = x.shape[: x.ndim - inputs]
    if flat:
        # With two axes of rows XLA:CPU writes the gradients of an activation transposed, and computes what comes
        # before them again, element by element, for each of their uses.
        x = x.reshape(math.prod(rows), -1)

    def times(x: Array, matrix: Array, inputs: int, dtype: jnp.dtype | None) -> Array:
        if flat:
            matrix, inputs = matrix.reshape(x.shape[1], -1), 1
        return jnp.tensordot(x, matrix, inputs, preferred_element_type=dtype)

    matrix = layer[name]
    outputs = matrix.shape[inputs:]
    if isinstance(matrix, QuantizedWeight):
        y = product(x, matrix, inputs, dtype, flat)
    else:
        y = times(x, matrix, inputs, dtype)
    if f"{name}_lora_a" in layer:
        a, b = (layer[f"{name}_lora_{part}"].astype(x.dtype) for part in "ab")
        low = times(x, a, inputs, None)
        if "lora_mask" in layer:  # pairs of several adapters side by side, see `engine.decode.split_adapters`
            low = jnp.where(layer["lora_mask"].reshape(low.shape), low, 0)
        y = y + times(low, b, 1, dtype)
    return y.reshape(*rows, *outputs) if flat else y


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
    layer = {name.removeprefix(FULL): leaf for name, leaf in layer.items()}
    dense = "w" if not config.experts.count else "d" if "d_down" in layer else ""
    down = layer[f"{dense or 'w'}_down"]
    dtype = compute_dtype(config) if is_quantized(down) else down.dtype

    def normed(name: str, x: Array) -> Array:
        """`x` itself if the layer has no norm of that name."""
        return norm(x, layer[name], config) if name in layer else x

    h = splits.block_input(normed("attn_norm", x).astype(dtype))
    mix = _latent_attention if "kv_up" in layer else _attention if "wq" in layer else _delta_net
    added = splits.block_output(mix(layer, h, rope, attend, config, splits.flat))
    x = x + config.extras.residual_factor * normed("attn_post_norm", added)
    h = splits.block_input(normed("mlp_norm", x).astype(dtype))
    if config.experts.own_norms:
        mixed = normed("s_post_norm", _shared_expert(layer, h, config, splits))
        h = splits.block_input(_unscaled_norm(x, config).astype(dtype))
        mixed = mixed + normed("e_post_norm", experts(layer, h, config))
    else:
        mixed = _feed_forward(layer, h, config, splits, dense) if dense else experts(layer, h, config)
    if "s_down" in layer and not config.experts.own_norms:
        mixed = mixed + _shared_expert(layer, h, config, splits)
    added = splits.block_output(mixed)
    x = x + config.extras.residual_factor * normed("mlp_post_norm", added)
    return x * _like(jax.lax.stop_gradient(layer["factor"]), x) if "factor" in layer else x


def _attention(
    layer: Params, h: Float[Array, "B T D"], rope: Rope, attend: Attend, config: ModelConfig, flat: bool
) -> Array:
    dtype = h.dtype
    q, gate = linear(layer, "wq", h, flat=flat), None
    if config.gated_attention:
        q, gate = jnp.split(q, 2, axis=-1)
    k = linear(layer, "wk", h, flat=flat)
    v = linear(layer, "wv", h, flat=flat) if "wv" in layer else k
    if config.qkv_bias:
        q, k, v = q + _like(layer["bq"], q), k + _like(layer["bk"], k), v + _like(layer["bv"], v)
    if config.qk_norm == "whole":
        q, k = (_flat_norm(*part, config).astype(dtype) for part in ((q, layer["q_norm"]), (k, layer["k_norm"])))
    elif config.qk_norm:
        q = norm(q, layer["q_norm"], config).astype(dtype)
        k = norm(k, layer["k_norm"], config).astype(dtype)
    if config.extras.value_norm:
        v = _unscaled_norm(v, config)
    if config.extras.query_scale:  # attention divides by the root of a head's width
        q = q * (q.shape[-1] / config.extras.query_scale) ** 0.5
    if config.extras.rotary_pairs:
        q, k = (paired_halves(x, config.rotary_dim) for x in (q, k))
    q, k = apply_rotary(q, *rope[:2]), apply_rotary(k, *rope[:2])
    if config.extras.rotated_norm:
        q, k = (jnp.where(rope[3], _unscaled_norm(x, config), x) for x in (q, k))
    if len(rope) > 2:
        q = (q * rope[2][..., None, None]).astype(dtype)
    context = attend(q, k, v, layer["sinks"]) if "sinks" in layer else attend(q, k, v)
    if gate is not None:
        context = context * jax.nn.sigmoid(gate.astype(jnp.float32)).astype(dtype)
    out = linear(layer, "wo", context, 2, jnp.float32, flat=flat)
    return out + _like(layer["bo"], out) if "bo" in layer else out


LATENT_EPS = 1e-6
"""Added to the mean square in the norms of latent vectors, whatever `norm_eps` is, as in the published models."""


def _latent_attention(
    layer: Params, h: Float[Array, "B T D"], rope: Rope, attend: Attend, config: ModelConfig, flat: bool
) -> Array:
    """Multi-head latent attention (arXiv:2405.04434, sec. 2.1) with one key and value for all heads: the latent vector
    c of a token. A head's key is W_k c, and q (W_k c) = (q W_k) c; its context is W_v sum(p c) (the absorbed form)."""
    extras, dtype = config.extras, h.dtype
    L, P, R = extras.latent, extras.latent_key, config.rotary_dim

    def latent_norm(x: Array, name: str) -> Array:
        return norm(x, layer[name], replace(config, norm_eps=LATENT_EPS)).astype(dtype)

    inputs = latent_norm(linear(layer, "q_down", h, flat=flat), "q_latent_norm") if "q_down" in layer else h
    q, turned = jnp.split(linear(layer, "wq", inputs, flat=flat), [P], axis=-1)
    c, k = jnp.split(linear(layer, "kv_down", h, flat=flat)[:, :, None], [L], axis=-1)
    c = latent_norm(c, "kv_latent_norm")
    if extras.rotary_pairs:
        turned, k = paired_halves(turned, R), paired_halves(k, R)
    to_key, to_value = jnp.split(layer["kv_up"].astype(dtype), [P], axis=-1)
    q = jnp.einsum("btnp,lnp->btnl", q, to_key)
    q = jnp.concatenate([q, apply_rotary(turned, *rope[:2])], axis=-1)
    q = q * (config.head_dim / (extras.query_scale or P + R)) ** 0.5  # attention divides by sqrt(head_dim)
    k = jnp.concatenate([c, apply_rotary(k, *rope[:2])], axis=-1)
    context = attend(q, k, jnp.pad(c, ((0, 0),) * 3 + ((0, R),)))[..., :L]
    context = jnp.einsum("btnl,lno->btno", context, to_value)
    return linear(layer, "wo", context, 2, jnp.float32, flat=flat)


def _unscaled_norm(x: Float[Array, "*B D"], config: ModelConfig) -> Array:
    """`norm` with the scale 1, in the dtype of `x`."""
    return norm(x, jnp.ones(x.shape[-1]), replace(config, norm_offset=False)).astype(x.dtype)


def _flat_norm(x: Float[Array, "B T N H"], scale: Float[Array, "N H"], config: ModelConfig) -> Array:
    """`norm` over all heads of a token."""
    return norm(x.reshape(*x.shape[:2], -1), scale.reshape(-1), config).reshape(x.shape)


def _delta_net(
    layer: Params, h: Float[Array, "B T D"], rope: Rope, recur: Attend, config: ModelConfig, flat: bool
) -> Array:
    """A recurrent layer; see `model.delta`. The norm of its context has no offset from 1, and a gate of its own; in
    Mamba 2 the gate comes before the norm, which is one for all value heads of a key head."""
    decay = linear(layer, "w_decay", h, 1, jnp.float32, flat=flat)
    step = jax.nn.softplus(decay + _like(layer["dt_bias"], decay))
    decay = -_like(jnp.exp(layer["a_log"]), decay) * step
    if config.windows.form == "mamba2":
        space = (layer["conv_bias"], layer["skip"])
        context = recur(Signals(linear(layer, "w_qkv", h, flat=flat), decay, step), layer["conv"], space)
        context = context * jax.nn.silu(linear(layer, "w_z", h, flat=flat).astype(jnp.float32))
        grouped = context.reshape(*context.shape[:2], config.windows.key_heads, -1)
        context = (grouped * jax.lax.rsqrt(jnp.mean(grouped**2, -1, keepdims=True) + config.norm_eps)).reshape(
            context.shape
        ) * _like(layer["delta_norm"], context)
        return linear(layer, "w_out", context.astype(h.dtype), 2, jnp.float32, flat=flat)
    rate = jax.nn.sigmoid(linear(layer, "w_beta", h, 1, jnp.float32, flat=flat))
    context = recur(Signals(linear(layer, "w_qkv", h, flat=flat), decay, rate), layer["conv"])
    gate = jax.nn.silu(linear(layer, "w_z", h, flat=flat).astype(jnp.float32))
    context = norm(context, layer["delta_norm"], replace(config, norm_offset=False)) * gate
    return linear(layer, "w_out", context.astype(h.dtype), 2, jnp.float32, flat=flat)


def _feed_forward(
    layer: Params, h: Float[Array, "B T D"], config: ModelConfig, splits: Splits, prefix: str = "w"
) -> Float[Array, "B T D"]:
    gate = splits.ffn_hidden(linear(layer, f"{prefix}_gate", h, flat=splits.flat))
    up = splits.ffn_hidden(linear(layer, f"{prefix}_up", h, flat=splits.flat))
    return linear(layer, f"{prefix}_down", gated(gate, up, config), 1, jnp.float32, flat=splits.flat)


def _shared_expert(
    layer: Params, h: Float[Array, "B T D"], config: ModelConfig, splits: Splits
) -> Float[Array, "B T D"]:
    """What the feed-forward beside the experts adds for every token."""
    out = _feed_forward(layer, h, config, splits, "s")
    if "s_share" in layer:
        out = out * jax.nn.sigmoid(linear(layer, "s_share", h, 1, jnp.float32, flat=splits.flat))
    return out


def embed(
    params: Params, tokens: Int[Array, "B T"], config: ModelConfig, look_up: Callable[[Array, Array], Array] = take_rows
) -> Float[Array, "B T D"]:
    """Rows of the embedding, in the compute dtype, as the float32 start of the residual stream.

    Master rows are cast after the lookup. The numbers are the same, and the gradient of a frequent token accumulates in
    float32.
    """
    dtype = compute_dtype(config)
    x = look_up(params["embed"], tokens).astype(dtype)
    if config.extras.scale_embed:  # the factor is rounded to the compute dtype, as in training of the published models
        x = x * jnp.asarray(config.d_model**0.5, dtype)
    if config.extras.embed_factor != 1:
        x = x * jnp.asarray(config.extras.embed_factor, dtype)
    return x.astype(jnp.float32)


def final_hidden(params: Params, x: Float[Array, "B T D"], config: ModelConfig) -> Float[Array, "B T D"]:
    """The normalized residual stream after the last layer, in the compute dtype; the input of the unembedding. Here it
    is divided by the divisor of the logits."""
    hidden = norm(x, params["final_norm"], config)
    divisor = config.extras.logit_divisor
    return (hidden if divisor == 1 else hidden / divisor).astype(params["embed"].dtype)


def unembedding(params: Params) -> Float[Array, "V D"]:
    """The unembedding as [V,D], tied or not."""
    return params["unembed"].T if "unembed" in params else params["embed"]


def unembed(params: Params, hidden: Float[Array, "*B D"], config: ModelConfig) -> Float[Array, "*B V"]:
    """Float32 logits. Training computes log-probabilities in chunks instead (`loss.token_logprobs`)."""
    logits = jnp.einsum("...d,vd->...v", hidden, unembedding(params), preferred_element_type=jnp.float32)
    return soft_cap(logits, config.extras.logit_cap)


def cast_params(params: Params, dtype: jnp.dtype) -> Params:
    """Casts matrices to the compute dtype. Norm scales and the leaves in `EXACT` stay float32; quantized matrices stay
    as they are."""

    def cast(path: tuple[Any, ...], leaf: Array | QuantizedWeight) -> Array | QuantizedWeight:
        name = path[-1].key
        unchanged = name.endswith("norm") or name in EXACT or is_quantized(leaf)
        return leaf if unchanged else leaf.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, params, is_leaf=is_quantized)


def forward(
    params: Params,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    config: ModelConfig,
    execution: Execution = SIMPLE,
    routes: Int[Array, "B T L X"] | None = None,
) -> Float[Array, "B T D"]:
    """Final hidden states of packed rows, in the compute dtype.

    Args:
        params: Masters or published parameters; they are cast to the compute dtype here.
        tokens: Token ids; padding may hold any id.
        positions: Position of each token within its segment, restarting at 0.
        segment_ids: 1, 2, ... for the trajectories packed into a row, 0 for padding; no attention across segments.
        config: Configuration of the model.
        execution: How it runs.
        routes: Experts to replay in each layer; negative where the layer's router chooses.
    """
    x = embed(params, tokens, config, execution.look_up)
    params = cast_params(params, compute_dtype(config))
    tables = rotary_tables(positions, config)
    splits = execution.splits
    attend_all = execution.attend or partial(attend_reference, cap=config.extras.attention_cap)

    def body(x: Array, inputs: tuple[Params, Array | None, Array | None, Array | None]) -> tuple[Array, None]:
        layer, window, rope, replayed = inputs
        layer = layer if replayed is None else layer | {"routes": replayed}
        segments, window = _in_chunks(segment_ids, positions, window, config)
        attend = partial(_attend_rows, attend_all, segments, window)
        mix = partial(recur_packed, config.delta, segment_ids) if "w_qkv" in layer else attend
        x = block(layer, x, _choose_rope([*tables.values()], rope), mix, config, execution.experts, splits)
        return splits.residual(x), None

    body = execution.remat(body) if execution.remat else body
    windows = jnp.asarray(config.layer_windows, jnp.int32) if config.layer_windows else None
    names = [[*tables].index(name) for name in rope_names(config)]
    ropes = jnp.asarray(names, jnp.int32) if len(tables) > 1 else None
    by_layer = (windows, ropes, None if routes is None else jnp.moveaxis(routes, 2, 0))
    if isinstance(params["layers"], tuple):
        x = splits.residual(x)
        for i, (layer, name) in enumerate(zip(params["layers"], rope_names(config), strict=True)):
            window, _, replayed = (None if of is None else of[i] for of in by_layer)
            x, _ = body(x, (layer, window, tables[name], replayed))
    elif config.period > 1:
        x = _scan_periods(body, splits.residual(x), params["layers"], by_layer, [*tables.values()], config)
    else:
        x, layers, by_layer = _first_layers(body, splits.residual(x), params["layers"], by_layer, config)
        unroll = config.layers if execution.unroll else 1
        x, _ = jax.lax.scan(body, x, (layers, *by_layer), unroll=unroll)
    return final_hidden(params, x, config)


def _first_layers(
    body: Callable, x: Array, layers: Params, by_layer: tuple[Array | None, ...], config: ModelConfig
) -> tuple[Array, Params, tuple[Array | None, ...]]:
    """(residual stream after the dense layers before those with experts, the leaves and inputs of the other layers)."""
    dense = config.experts.dense_layers
    if not dense:
        return x, layers, by_layer
    for i in range(dense):
        x, _ = body(x, (take_layer(layers, i, config), *jax.tree.map(lambda of, i=i: of[i], by_layer)))
    places = {name: layers_with(name, config) for name in layers}
    rest = {name: leaf[dense - places[name][0] :] for name, leaf in layers.items() if places[name][-1] >= dense}
    return x, rest, jax.tree.map(lambda of: of[dense:], by_layer)


def _scan_periods(
    body: Callable,
    x: Array,
    layers: Params,
    by_layer: tuple[Array | None, ...],
    tables: list[Rope],
    config: ModelConfig,
) -> Array:
    """A scan over the periods of layers of different kinds; the layers of a period are unrolled."""
    period = config.period if config.layers % config.period == 0 else config.layers
    one_period = replace(config, layers=period, extras=NoExtras())
    names = rope_names(config)
    ropes = [tables[list(dict.fromkeys(names)).index(name)] for name in names[:period]]
    windows, _, routes = by_layer

    def visit(x: Array, inputs: tuple[Params, tuple[Array | None, ...]]) -> tuple[Array, None]:
        layers, layer_inputs = inputs
        for i, rope in enumerate(ropes):
            window, replayed = jax.tree.map(lambda of, i=i: of[i], layer_inputs)
            x, _ = body(x, (take_layer(layers, i, one_period), window, rope, replayed))
        return x, None

    periods = config.layers // period
    grouped = jax.tree.map(lambda leaf: leaf.reshape(periods, -1, *leaf.shape[1:]), (layers, (windows, routes)))
    return jax.lax.scan(visit, x, grouped)[0]


def _in_chunks(
    segment_ids: Array, positions: Array, window: Array | None, config: ModelConfig
) -> tuple[Array, Array | None]:
    """(segments, window) of a layer. Where windows are chunks, each chunk of a segment is a segment of its own."""
    if not config.windows.chunked or window is None:
        return segment_ids, window
    most = -(-segment_ids.shape[1] // min(size for size in config.windows.sizes if size))
    chunk = positions // jnp.maximum(window, 1)
    chunks = jnp.where(segment_ids > 0, segment_ids * (most + 1) + chunk, 0)
    return jnp.where(window > 0, chunks, segment_ids), None


def _choose_rope(tables: list[Rope], index: Array | Rope | None) -> Rope:
    """The table with that index; the only table if `index` is None, and `index` itself if it is a table."""
    if isinstance(index, tuple):
        return index
    chosen = tables[0]
    for i, table in enumerate(tables[1:], start=1):
        chosen = jax.tree.map(lambda values, others, i=i: jnp.where(index == i, values, others), table, chosen)
    return chosen


def _attend_rows(
    attend: Callable, segment_ids: Array, window: Array | None, q: Array, k: Array, v: Array, *sinks: Array
) -> Array:
    if sinks:
        return attend(q, k, v, segment_ids, window, sinks=sinks[0])
    return attend(q, k, v, segment_ids) if window is None else attend(q, k, v, segment_ids, window)
