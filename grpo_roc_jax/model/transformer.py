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
from grpo_roc_jax.model.config import FULL, ModelConfig
from grpo_roc_jax.model.delta import Signals, delta_shapes, init_decay, recur_packed
from grpo_roc_jax.model.experts import WEIGHTS, gated, mix_experts, save_all_but_weights
from grpo_roc_jax.model.low_precision import QuantizedWeight, is_quantized, product
from grpo_roc_jax.model.outputs_first import OutputsFirst, multiply
from grpo_roc_jax.model.rotary import Rope, apply_rotary, paired_halves, rope_names, rotary_tables
from grpo_roc_jax.shapes import Array, Float, Int, Key, checked

Params = dict[str, Any]
"""`embed [V,D]`, `layers` (every leaf leads with the layers that have it, see `layers_with`), `final_norm [D]`, and
`unembed [D,V]` unless tied. With `extras.layer_embed` also those of `layer_inputs`.

`layers` may also be a tuple with one dict per layer, as in the sampler. A layer's matrix `w` may come with low-rank
matrices `w_lora_a` and `w_lora_b`, whose product is added to it (`model.lora`), and may be a `QuantizedWeight`.
"""

Attend = Callable[..., Array]
"""(q [B,T,N,H], k [B,T,K,H], v [B,T,K,H][, sinks [N]]) -> context [B,T,N,H]; queries and keys are already rotated. In a
layer that shares keys, k and v are None, and the function has those of the earlier layer. In a recurrent layer
(`delta.Signals`, weights of the convolution) -> context [B,T,N,U]."""


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
    output_product: Callable[[Array, Array, int], Array] | None = None
    """(x [B,T,...], matrix [...,D], number of axes that are summed over) -> [B,T,D] in float32: how the last product of
    attention and of the feed-forward is computed, e.g. by `parallel.output_product_on`; None for a plain product."""
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
    look_up_wide: Callable[[Array, Array], Array] = take_rows
    """The same for a table whose rows are those of all layers, e.g. `parallel.look_up_wide_on`."""
    recur: Callable[..., Array] = recur_packed
    """The mixer of a recurrent layer, e.g. `parallel.recur_on`."""
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
    if P := config.extras.layer_embed:
        shapes |= {"p_gate": ((D, P), ("embed", None)), "p_out": ((P, D), (None, "embed"))}
        shapes["p_post_norm"] = ((D,), ("embed",))
    if shared_ff := config.windows.shared_ff:
        shapes |= _feed_forward_shapes("d", D, shared_ff)
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
    `d_` of the first layers where those are dense, or of those that share keys where theirs is wider."""
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
_OF_KEYS = ("wk", "wv", "k_norm")
_DENSE = ("d_gate", "d_up", "d_down")
_OF_EXPERTS = ("s_gate", "s_up", "s_down", "s_share", *WEIGHTS)


_OUTPUTS = ("wo", "w_down", "w_out", "s_down", "d_down", "p_out")


def layers_with(name: str, config: ModelConfig) -> tuple[int, ...]:
    """The layers that have a leaf, or its low-rank pair, in the order of its leading axis."""
    name, attends, full = name.partition("_lora_")[0], config.attends, config.full_layers
    first_shared = config.layers - config.windows.shared_layers
    if name.removeprefix(FULL) in _OF_ATTENTION:
        last = first_shared if name.removeprefix(FULL) in _OF_KEYS else config.layers
        layers = full if name.startswith(FULL) else [i for i in range(config.layers) if attends[i] and i not in full]
        return tuple(i for i in layers if i < last)
    if config.windows.shared_ff and name in (*_DENSE, "w_gate", "w_up", "w_down"):
        return tuple(range(first_shared, config.layers) if name in _DENSE else range(first_shared))
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
    return axes | {name: logical for name, (_, logical) in _layer_input_shapes(config).items()}


def _layer_input_shapes(config: ModelConfig) -> dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]]:
    """The leaves of `layer_inputs`, which are outside of the layers."""
    V, D, L, P = config.vocab_size, config.d_model, config.layers, config.extras.layer_embed
    if not P:
        return {}
    return {
        "layer_embed": ((V, L, P), ("vocab", None, None)),
        "layer_proj": ((D, L, P), ("embed", None, None)),
        "layer_proj_norm": ((P,), (None,)),
    }


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
        scale = shape[-1] ** -0.5 if name in ("conv", "layer_embed") else scale
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
    return params | {name: leaf(name, shape) for name, (shape, _) in _layer_input_shapes(config).items()}


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
    layer: Params,
    name: str,
    x: Array,
    inputs: int = 1,
    dtype: jnp.dtype | None = None,
    *,
    flat: bool = True,
    plain: Callable[[Array, Array, int], Array] | None = None,
) -> Array:
    """`x` times the matrix of that name, plus (x A) B if the layer has a low-rank pair for it.

    Args:
        layer: Has the matrix, whose first `inputs` axes are summed over.
        name: Name of the matrix.
        x: [B,T,...], ends with these axes.
        inputs: Number of axes that are summed over.
        dtype: Dtype of the result and of its sums; that of `x` by default.
        flat: See `Splits`.
        plain: Multiplies by a matrix that is not quantized, see `Splits.output_product`; `tensordot` by default.
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
    if isinstance(matrix, OutputsFirst):
        y = multiply(x, matrix, dtype)  # only the sampler has these, whose products are not flat
    elif isinstance(matrix, QuantizedWeight):
        y = product(x, matrix, inputs, dtype, flat)
    else:
        y = plain(x, matrix, inputs) if plain else times(x, matrix, inputs, dtype)
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
    dense = "d" if "d_down" in layer else "" if config.experts.count else "w"
    down = layer[f"{dense or 'w'}_down"]
    dtype = compute_dtype(config) if is_quantized(down) else down.dtype

    def normed(name: str, x: Array) -> Array:
        """`x` itself if the layer has no norm of that name."""
        return norm(x, layer[name], config) if name in layer else x

    h = splits.block_input(normed("attn_norm", x).astype(dtype))
    mix = _latent_attention if "kv_up" in layer else _attention if "wq" in layer else _delta_net
    added = splits.block_output(mix(layer, h, rope, attend, config, splits))
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
    if "p_gate" in layer:
        gate = linear(layer, "p_gate", x.astype(dtype), flat=splits.flat)
        added = linear(layer, "p_out", gated(gate, layer["input"], config), 1, jnp.float32, flat=splits.flat)
        x = x + normed("p_post_norm", added)
    return x * _like(jax.lax.stop_gradient(layer["factor"]), x) if "factor" in layer else x


def _output(layer: Params, name: str, x: Array, inputs: int, splits: Splits) -> Float[Array, "B T D"]:
    """The last product of attention or of a feed-forward."""
    return linear(layer, name, x, inputs, jnp.float32, flat=splits.flat, plain=splits.output_product)


def _attention(
    layer: Params, h: Float[Array, "B T D"], rope: Rope, attend: Attend, config: ModelConfig, splits: Splits
) -> Array:
    dtype = h.dtype
    q, gate = linear(layer, "wq", h, flat=splits.flat), None
    if config.gated_attention:
        q, gate = jnp.split(q, 2, axis=-1)
    k, v = _keys_and_values(layer, h, rope, config, splits) if "wk" in layer else (None, None)
    if config.qkv_bias:
        q = q + _like(layer["bq"], q)
    if config.qk_norm:
        q = _head_norm(q, layer["q_norm"], config)
    if config.extras.query_scale:  # attention divides by the root of a head's width
        q = q * (q.shape[-1] / config.extras.query_scale) ** 0.5
    q = _rotated(q, rope, config)
    if len(rope) > 2:
        q = (q * rope[2][..., None, None]).astype(dtype)
    context = attend(q, k, v, layer["sinks"]) if "sinks" in layer else attend(q, k, v)
    if gate is not None:
        context = context * jax.nn.sigmoid(gate.astype(jnp.float32)).astype(dtype)
    out = _output(layer, "wo", context, 2, splits)
    return out + _like(layer["bo"], out) if "bo" in layer else out


def _keys_and_values(
    layer: Params, h: Float[Array, "B T D"], rope: Rope, config: ModelConfig, splits: Splits
) -> tuple[Array, Array]:
    k = linear(layer, "wk", h, flat=splits.flat)
    v = linear(layer, "wv", h, flat=splits.flat) if "wv" in layer else k
    if config.qkv_bias:
        k, v = k + _like(layer["bk"], k), v + _like(layer["bv"], v)
    if config.qk_norm:
        k = _head_norm(k, layer["k_norm"], config)
    if config.extras.value_norm:
        v = _unscaled_norm(v, config)
    return _rotated(k, rope, config), v


def _head_norm(x: Float[Array, "B T N H"], scale: Array, config: ModelConfig) -> Array:
    """`norm` of each head, or of all heads of a token as one vector, in the dtype of `x`."""
    return (_flat_norm if config.qk_norm == "whole" else norm)(x, scale, config).astype(x.dtype)


def _rotated(x: Float[Array, "B T N H"], rope: Rope, config: ModelConfig) -> Array:
    """Queries or keys after the rotation, and the norm that follows it in Llama 4."""
    if config.extras.rotary_pairs:
        x = paired_halves(x, config.rotary_dim)
    x = apply_rotary(x, *rope[:2])
    return jnp.where(rope[3], _unscaled_norm(x, config), x) if config.extras.rotated_norm else x


LATENT_EPS = 1e-6
"""Added to the mean square in the norms of latent vectors, whatever `norm_eps` is, as in the published models."""


def _latent_attention(
    layer: Params, h: Float[Array, "B T D"], rope: Rope, attend: Attend, config: ModelConfig, splits: Splits
) -> Array:
    """Multi-head latent attention (arXiv:2405.04434, sec. 2.1) with one key and value for all heads: the latent vector
    c of a token. A head's key is W_k c, and q (W_k c) = (q W_k) c; its context is W_v sum(p c) (the absorbed form)."""
    extras, dtype = config.extras, h.dtype
    L, P, R = extras.latent, extras.latent_key, config.rotary_dim

    def latent_norm(x: Array, name: str) -> Array:
        return norm(x, layer[name], replace(config, norm_eps=LATENT_EPS)).astype(dtype)

    inputs = latent_norm(linear(layer, "q_down", h, flat=splits.flat), "q_latent_norm") if "q_down" in layer else h
    q, turned = jnp.split(linear(layer, "wq", inputs, flat=splits.flat), [P], axis=-1)
    c, k = jnp.split(linear(layer, "kv_down", h, flat=splits.flat)[:, :, None], [L], axis=-1)
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
    return _output(layer, "wo", context, 2, splits)


def _unscaled_norm(x: Float[Array, "*B D"], config: ModelConfig) -> Array:
    """`norm` with the scale 1, in the dtype of `x`."""
    return norm(x, jnp.ones(x.shape[-1]), replace(config, norm_offset=False)).astype(x.dtype)


def _flat_norm(x: Float[Array, "B T N H"], scale: Float[Array, "N H"], config: ModelConfig) -> Array:
    """`norm` over all heads of a token."""
    return norm(x.reshape(*x.shape[:2], -1), scale.reshape(-1), config).reshape(x.shape)


def _delta_net(
    layer: Params, h: Float[Array, "B T D"], rope: Rope, recur: Attend, config: ModelConfig, splits: Splits
) -> Array:
    """A recurrent layer; see `model.delta`. The norm of its context has no offset from 1, and a gate of its own; in
    Mamba 2 the gate comes before the norm, which is one for all value heads of a key head."""
    decay = linear(layer, "w_decay", h, 1, jnp.float32, flat=splits.flat)
    step = jax.nn.softplus(decay + _like(layer["dt_bias"], decay))
    decay = -_like(jnp.exp(layer["a_log"]), decay) * step
    if config.windows.form == "mamba2":
        space = (layer["conv_bias"], layer["skip"])
        context = recur(Signals(linear(layer, "w_qkv", h, flat=splits.flat), decay, step), layer["conv"], space)
        context = context * jax.nn.silu(linear(layer, "w_z", h, flat=splits.flat).astype(jnp.float32))
        grouped = context.reshape(*context.shape[:2], config.windows.key_heads, -1)
        context = (grouped * jax.lax.rsqrt(jnp.mean(grouped**2, -1, keepdims=True) + config.norm_eps)).reshape(
            context.shape
        ) * _like(layer["delta_norm"], context)
        return _output(layer, "w_out", context.astype(h.dtype), 2, splits)
    rate = jax.nn.sigmoid(linear(layer, "w_beta", h, 1, jnp.float32, flat=splits.flat))
    context = recur(Signals(linear(layer, "w_qkv", h, flat=splits.flat), decay, rate), layer["conv"])
    gate = jax.nn.silu(linear(layer, "w_z", h, flat=splits.flat).astype(jnp.float32))
    context = norm(context, layer["delta_norm"], replace(config, norm_offset=False)) * gate
    return _output(layer, "w_out", context.astype(h.dtype), 2, splits)


def _feed_forward(
    layer: Params, h: Float[Array, "B T D"], config: ModelConfig, splits: Splits, prefix: str = "w"
) -> Float[Array, "B T D"]:
    gate = splits.ffn_hidden(linear(layer, f"{prefix}_gate", h, flat=splits.flat))
    up = splits.ffn_hidden(linear(layer, f"{prefix}_up", h, flat=splits.flat))
    return _output(layer, f"{prefix}_down", gated(gate, up, config), 1, splits)


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


def layer_inputs(
    params: Params,
    tokens: Int[Array, "B T"],
    x: Float[Array, "B T D"],
    config: ModelConfig,
    look_up: Callable[[Array, Array], Array] = take_rows,
) -> Float[Array, "L B T P"] | None:
    """What each layer reads of the second embedding, in the compute dtype; None if there is none.

    With E the rows of `layer_embed` and x the result of `embed`: (norm(x W / sqrt(D)) + sqrt(P) E) / sqrt(2). As in
    `embed`, rows are cast after the lookup.
    """
    L, P = config.layers, config.extras.layer_embed
    if not P:
        return None
    dtype, table, weights = compute_dtype(config), params["layer_embed"], params["layer_proj"]
    rows = look_up(table.reshape(table.shape[0], L * P), tokens).astype(dtype) * jnp.asarray(P**0.5, dtype)
    projected = jnp.tensordot(x.astype(dtype), weights.reshape(-1, L * P).astype(dtype), 1)
    projected = projected * jnp.asarray(config.d_model**-0.5, dtype)
    rows, projected = (part.reshape(*tokens.shape, L, P) for part in (rows, projected))
    mixed = (norm(projected, params["layer_proj_norm"], config) + rows.astype(jnp.float32)) * 2**-0.5
    return jnp.moveaxis(mixed.astype(dtype), 2, 0)


def final_hidden(params: Params, x: Float[Array, "B T D"], config: ModelConfig) -> Float[Array, "B T D"]:
    """The normalized residual stream after the last layer, in the compute dtype; the input of the unembedding. Here it
    is divided by the divisor of the logits."""
    hidden = norm(x, params["final_norm"], config)
    divisor = config.extras.logit_divisor
    return (hidden if divisor == 1 else hidden / divisor).astype(params["embed"].dtype)


def unembedding(params: Params) -> Float[Array, "V D"]:
    """The unembedding as [V,D], tied or not."""
    head = params.get("unembed")
    if isinstance(head, OutputsFirst):
        return head.values
    return params["embed"] if head is None else head.T


def unembed(
    params: Params, hidden: Float[Array, "*B D"], config: ModelConfig, *, outputs_first: bool = False
) -> Float[Array, "*B V"]:
    """Float32 logits. Training computes log-probabilities in chunks instead (`loss.token_logprobs`).

    Args:
        params: The parameters.
        hidden: See `final_hidden`.
        config: The model.
        outputs_first: Compute the product as `outputs_first.multiply` does, if the unembedding is stored as [V,D].
    """
    table, head = unembedding(params), params.get("unembed")
    if outputs_first and (head is None or isinstance(head, OutputsFirst)):
        logits = multiply(hidden, OutputsFirst(table, 1), jnp.float32)
    else:
        logits = jnp.einsum("...d,vd->...v", hidden, table, preferred_element_type=jnp.float32)
    return soft_cap(logits, config.extras.logit_cap)


def stays_exact(name: str) -> bool:
    """Whether a leaf stays float32 in every compute dtype: the scales of norms, and those in `EXACT`."""
    return name.endswith("norm") or name in EXACT


def cast_params(params: Params, dtype: jnp.dtype) -> Params:
    """Casts matrices to the compute dtype. Leaves that stay exact (`stays_exact`) and quantized matrices are returned
    as they are."""

    def cast(path: tuple[Any, ...], leaf: Array | QuantizedWeight) -> Array | QuantizedWeight:
        return leaf if stays_exact(path[-1].key) or is_quantized(leaf) else leaf.astype(dtype)

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
    given = layer_inputs(params, tokens, x, config, execution.look_up_wide)
    params = cast_params(params, compute_dtype(config))
    tables = rotary_tables(positions, config)
    splits = execution.splits
    attend_all = execution.attend or partial(attend_reference, cap=config.extras.attention_cap)

    def run_layer(x: Array, inputs: LayerInputs, keys: Keys | None = None) -> tuple[Array, Keys | None]:
        layer, window, rope, replayed, given = inputs
        layer = layer if replayed is None else layer | {"routes": replayed}
        layer = layer if given is None else layer | {"input": given}
        segments, window = _in_chunks(segment_ids, positions, window, config)
        attend, new_keys = partial(_attend_rows, attend_all, segments, window), []
        attend = partial(_attend_shared, attend, keys, new_keys) if config.windows.shared_layers else attend
        mix = partial(execution.recur, config.delta, segment_ids) if "w_qkv" in layer else attend
        x = block(layer, x, _choose_rope([*tables.values()], rope), mix, config, execution.experts, splits)
        return splits.residual(x), new_keys[0] if new_keys else None

    body = execution.remat(run_layer) if execution.remat else run_layer
    windows = jnp.asarray(config.layer_windows, jnp.int32) if config.layer_windows else None
    names = [[*tables].index(name) for name in rope_names(config)]
    ropes = jnp.asarray(names, jnp.int32) if len(tables) > 1 else None
    by_layer = (windows, ropes, None if routes is None else jnp.moveaxis(routes, 2, 0), given)
    if isinstance(params["layers"], tuple):
        x, sources, keys = splits.residual(x), config.key_layers, {}
        for i, (layer, name) in enumerate(zip(params["layers"], rope_names(config), strict=True)):
            window, _, replayed, given = (None if of is None else of[i] for of in by_layer)
            x, new = body(x, (layer, window, tables[name], replayed, given), keys.get(sources[i]))
            keys |= {i: new} if i in sources[config.layers - config.windows.shared_layers :] else {}
    elif config.period > 1 or config.windows.shared_layers:
        remat = execution.remat or save_all_but_weights
        x = _scan_periods(run_layer, remat, splits.residual(x), params["layers"], by_layer, [*tables.values()], config)
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


Keys = tuple[Array, Array]
"""Keys and values [B,T,K,H] of a layer that layers after it share."""
LayerInputs = tuple[Params, Array | None, Array | Rope | None, Array | None, Array | None]
"""What a layer reads besides the residual stream: its leaves, its window, its rotation or the index of that, experts to
replay, and its part of `layer_inputs`."""


PeriodInputs = tuple[Params, tuple[Array | None, ...]]
"""The same of the layers of a period: stacked leaves, and windows, experts to replay and parts of `layer_inputs`."""


def _attend_shared(
    attend: Callable, shared: Keys | None, fresh: list[Keys], q: Array, k: Array | None, v: Array | None, *sinks: Array
) -> Array:
    """`attend` with the shared keys and values in a layer without its own; otherwise its own are put into `fresh`."""
    if k is None:
        k, v = shared
    else:
        fresh.append((k, v))
    return attend(q, k, v, *sinks)


def _scan_periods(
    body: Callable,
    remat: Callable[[Callable], Callable],
    x: Array,
    layers: Params,
    by_layer: tuple[Array | None, ...],
    tables: list[Rope],
    config: ModelConfig,
) -> Array:
    """A scan over the periods of layers of different kinds; the layers of a period are unrolled. Layers that share keys
    have a scan of their own, which reads the keys that the last layers of the first scan return.

    `remat` wraps each layer, and the slices of its leaves too: otherwise the backward pass would keep a copy of all
    weights, gathered where experts are.
    """
    with_keys = config.layers - config.windows.shared_layers
    scan = partial(_scan_part, body, remat, layers=layers, by_layer=by_layer, tables=tables, config=config)
    x, keys = scan(x, first=0, last=with_keys, keys={})
    return scan(x, first=with_keys, last=config.layers, keys=keys)[0] if with_keys < config.layers else x


def _scan_part(
    body: Callable,
    remat: Callable[[Callable], Callable],
    x: Array,
    *,
    layers: Params,
    by_layer: tuple[Array | None, ...],
    tables: list[Rope],
    config: ModelConfig,
    first: int,
    last: int,
    keys: dict[bool, Keys],
) -> tuple[Array, dict[bool, Keys]]:
    """(residual stream after the layers from `first` to `last`, keys of the last of them with and without a window,
    where layers share keys). Layers without keys of their own read those of `keys`."""
    period = config.period
    if first % period or (last - first) % period:
        period = last - first
    names, windowed = rope_names(config), [size > 0 for size in config.layer_windows] or [False] * config.layers
    ropes = [tables[list(dict.fromkeys(names)).index(name)] for name in names[first : first + period]]
    leaves: Params = {}
    places: dict[str, list[int]] = {}
    for name, leaf in layers.items():
        having = layers_with(name, config)
        here = [i for i in having if first <= i < last]
        if here:
            start = having.index(here[0])
            leaves[name] = leaf if len(here) == len(having) else leaf[start : start + len(here)]
            places[name] = [i - first for i in here if i < first + period]
    windows, _, routes, given = (None if of is None else of[first:last] for of in by_layer)

    def layer_of(i: int, x: Array, inputs: PeriodInputs, rope: Rope, keys: Keys | None) -> tuple[Array, Keys | None]:
        stacked, of_layers = inputs
        window, replayed, part = jax.tree.map(lambda of: of[i], of_layers)
        layer = {name: leaf[places[name].index(i)] for name, leaf in stacked.items() if i in places[name]}
        return body(x, (layer, window, rope, replayed, part), keys)

    def visit(x: Array, inputs: PeriodInputs) -> tuple[Array, dict[bool, Keys]]:
        new_keys = {}
        for i, rope in enumerate(ropes):
            x, new = remat(partial(layer_of, i))(x, inputs, rope, keys.get(windowed[first + i]))
            new_keys |= {windowed[first + i]: new} if new is not None else {}
        return x, new_keys

    periods = (last - first) // period
    grouped = jax.tree.map(lambda leaf: leaf.reshape(periods, -1, *leaf.shape[1:]), (leaves, (windows, routes, given)))
    x, new_keys = jax.lax.scan(visit, x, grouped)
    return x, jax.tree.map(lambda of: of[-1], new_keys)


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
