"""Mixture of experts: each token passes through a few of many feed-forward networks, by grouped matrix products.

Tokens are sorted by expert, and `jax.lax.ragged_dot` multiplies each contiguous run with the matrix of its expert. The
cost is that of the chosen experts, not of all of them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from grpo_roc_jax.model.config import Experts, ModelConfig
from grpo_roc_jax.model.fusion import unfused
from grpo_roc_jax.model.low_precision import grouped_product
from grpo_roc_jax.shapes import Array, Float, Int, checked

GROUPED_FLAG = "xla_gpu_experimental_use_ragged_dot_fusion"
"""XLA's flag for the grouped products of cuDNN (openxla/xla pull requests 40189, 42313)."""


def check_grouped(config: ModelConfig, platform: str, flags: str) -> None:
    """Checks that a run on GPUs has chosen how experts are multiplied.

    Without the flag XLA turns `ragged_dot` into a product with all experts there (jaxlib 0.10.2). JAX's own lowering by
    Triton is not in its wheels (jax issue 40888). The kernel of `jax.experimental.pallas.ops.gpu.ragged_dot_mgpu` (jax
    0.10.2, 0.11.2) is for Hopper only, has no gradient, and compares every block of rows with all experts in turn.

    Args:
        config: Configuration of the model.
        platform: Platform of the devices.
        flags: Value of the variable XLA_FLAGS.

    Raises:
        ValueError: The flag is missing; the message says what to set.
    """
    experts = config.experts
    if experts.count and platform == "gpu" and f"--{GROUPED_FLAG}=" not in flags:
        raise ValueError(
            f"model with {experts.count} experts on a GPU: XLA multiplies each token by all of them instead of "
            f"{experts.per_token}, {experts.count // experts.per_token} times the work; set "
            f"XLA_FLAGS=--{GROUPED_FLAG}=true (grouped kernels of cuDNN 9.22 or later on Ampere and Hopper; the "
            "gradients of the experts' weights remain dense), or =false to accept all of it, or use TPUs"
        )


CLAMP, SHARPNESS = 7.0, 1.702
"""Constants of `clamped_swiglu` (`swiglu_limit`, `swiglu_alpha`)."""


def activate(gate: Array, up: Array, config: ModelConfig) -> Array:
    """act(gate) * up, with SiLU or GELU with the tanh approximation; `clamped_swiglu` as in `ModelConfig`."""
    if config.activation == "clamped_swiglu":
        gate, up = jnp.minimum(gate, CLAMP), jnp.clip(up, -CLAMP, CLAMP)
        return gate * jax.nn.sigmoid(SHARPNESS * gate) * (up + 1)
    return (jax.nn.silu(gate) if config.activation == "silu" else jax.nn.gelu(gate, approximate=True)) * up


def gated(gate: Array, up: Array, config: ModelConfig) -> Array:
    """`activate`, any shape. Its gradients are not fused into the products that read them."""
    return _gated(partial(activate, config=config), gate, up)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated(act: Callable[[Array, Array], Array], gate: Array, up: Array) -> Array:
    return act(gate, up)


def _gated_fwd(act: Callable[[Array, Array], Array], gate: Array, up: Array) -> tuple[Array, tuple[Array, Array]]:
    return _gated(act, gate, up), (gate, up)


def _gated_bwd(
    act: Callable[[Array, Array], Array], residuals: tuple[Array, Array], d_out: Array
) -> tuple[Array, Array]:
    _, pull = jax.vjp(act, *residuals)
    return unfused(pull(d_out))


_gated.defvjp(_gated_fwd, _gated_bwd)


@checked
def route(
    h: Float[Array, "M D"],
    router: Float[Array, "D E"],
    config: ModelConfig,
    replayed: Int[Array, "M X"] | None = None,
    bias: Float[Array, " E"] | None = None,
) -> tuple[Int[Array, "M X"], Float[Array, "M X"]]:
    """(experts, weights) of each token: the `per_token` largest of softmax(h router), float32; for tokens with
    `replayed` experts (not negative) those instead.

    With `norm_weights` the weights are divided by their sum. With `scores: sigmoid` the weights are sigmoids, to which
    `bias` is added for the choice alone (arXiv:2412.19437, eq. 16); else it is added to the router's numbers.
    `sigmoid_input` has the weights of `sigmoid` without a bias.
    """
    options = config.experts
    logits = jnp.einsum("md,de->me", h, router, preferred_element_type=jnp.float32)
    if options.scores.startswith("sigmoid"):
        shares = jax.nn.sigmoid(logits)
        worth = jax.lax.stop_gradient(shares if bias is None else shares + bias[None].astype(jnp.float32))
        experts = jax.lax.top_k(_in_top_groups(worth, options), options.per_token)[1]
    else:
        logits = logits if bias is None else logits + bias[None].astype(jnp.float32)
        shares = jax.nn.softmax(logits, axis=-1)
        experts = jax.lax.top_k(jax.lax.stop_gradient(shares), options.per_token)[1]
    if replayed is not None:
        experts = jnp.where(replayed < 0, experts, replayed.astype(experts.dtype))
    weights = jnp.take_along_axis(shares, experts, axis=-1)
    if options.norm_weights:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return experts, weights * options.scale


def _in_top_groups(worth: Float[Array, "M E"], options: Experts) -> Float[Array, "M E"]:
    """The worth of the experts, -inf outside of the groups whose two best experts have the largest sums."""
    if options.groups == options.top_groups:
        return worth
    by_group = worth.reshape(worth.shape[0], options.groups, -1)
    sums = jax.lax.top_k(by_group, 2)[0].sum(axis=-1)
    groups = jax.lax.top_k(sums, options.top_groups)[1]
    chosen = jnp.any(groups[:, :, None] == jnp.arange(options.groups)[None, None], axis=1)
    return jnp.where(chosen[:, :, None], by_group, -jnp.inf).reshape(worth.shape)


BY_EXPERT = ("w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down")
"""Leaves of a layer that begin with an axis of experts."""
WEIGHTS = ("router", "b_router", "router_scale", "expert_scale", "e_norm", *BY_EXPERT)
"""Leaves that a mixture reads."""


def save_all_but_weights(function: Callable) -> Callable:
    """A function whose backward pass keeps every intermediate but slices, and inputs that were only marked as varying
    over devices: those of weights would be a copy of all layers, whole on each device where they were gathered."""

    def kept(primitive: Any, *_: Any, **__: Any) -> bool:
        return primitive.name not in ("slice", "dynamic_slice", "squeeze", "pvary", "pcast")

    return jax.checkpoint(function, policy=kept, prevent_cse=False)


def mix_experts(
    layer: dict[str, Any],
    h: Float[Array, "B T D"],
    config: ModelConfig,
    mesh: Mesh | None = None,
    rows: tuple[str, ...] = ("data", "fsdp"),
) -> Float[Array, "B T D"]:
    """sum over a token's experts of weight * (act(h W_gate) * (h W_up)) W_down, float32; with `scores: sigmoid_input`
    the weight multiplies h instead.

    On a mesh each device sends the tokens of its rows through the experts that it holds, and the partial results are
    summed over `tensor`. Without this XLA sorts the tokens of all rows on every device, or gathers all experts.

    Args:
        layer: Weights of the layer, and in `routes` [B,T,X] the experts to replay, if any.
        h: Normalized input of the feed-forward.
        mesh: Mesh of weights and rows; None or one device for plain XLA.
        rows: Mesh axes that split the rows; `sequence` then splits their tokens. Empty if rows are whole, or already
            split by an enclosing `shard_map`.
    """
    weights, routes = {name: layer[name] for name in WEIGHTS if name in layer}, layer.get("routes")
    if mesh is None or mesh.size == 1 or not (rows or mesh.shape.get("tensor", 1) > 1):
        return _mix(weights, h, config, 0, routes)
    specs = {name: P("tensor") if name in BY_EXPERT else P() for name in weights}
    around = jax.sharding.get_abstract_mesh()
    rows = tuple(axis for axis in rows if axis not in around.manual_axes)
    split = tuple(axis for axis in (*rows, "sequence") if rows and axis in mesh.shape)
    by_row = P(rows or None, "sequence" if "sequence" in split else None, None)

    def own_share(weights: dict[str, Array], h: Array, routes: Array | None) -> Array:
        # The cast must be explicit: a lookup by an index that varies over devices does not make its operand varying,
        # and the gradient would miss the parts of the other devices.
        common = {name: leaf for name, leaf in weights.items() if name not in BY_EXPERT}
        h, common = jax.lax.pcast((h, common), "tensor", to="varying")
        weights = weights | common
        first = jax.lax.axis_index("tensor") * weights["w_up"].shape[0]
        return jax.lax.psum(_mix(weights, h, config, first, routes), "tensor")

    mix = jax.shard_map(
        own_share,
        mesh=mesh if around.empty else None,
        in_specs=(specs, by_row, by_row),
        out_specs=by_row,
        axis_names={*split, "tensor"},
        check_vma=bool(rows),
    )
    return save_all_but_weights(mix)(weights, h, routes)


def recorded(experts: Callable[..., Array], chosen: list[Array]) -> Callable[..., Array]:
    """Wraps `experts` so that it also appends the choice of each layer, int16[B,T,X], to `chosen` during tracing."""

    def run(layer: dict[str, Any], h: Array, config: ModelConfig) -> Array:
        tokens = _routed(layer, h.reshape(-1, h.shape[-1]))
        choice, _ = route(tokens, layer["router"], config, bias=layer.get("b_router"))
        choice = choice.reshape(*h.shape[:2], -1)
        chosen.append(choice.astype(jnp.int16))
        return experts(layer | {"routes": choice}, h, config)

    return run


def _routed(weights: dict[str, Array], tokens: Float[Array, "M D"]) -> Float[Array, "M D"]:
    """What the router reads of tokens."""
    if "router_scale" not in weights:
        return tokens
    return tokens * (weights["router_scale"] * tokens.shape[-1] ** -0.5).astype(tokens.dtype)[None]


def _mix(weights: dict[str, Array], h: Array, config: ModelConfig, first: Array | int, routes: Array | None) -> Array:
    """The contribution of the experts from `first` on, whose matrices this device holds."""
    B, T, D = h.shape
    tokens = h.reshape(B * T, D)
    replayed = None if routes is None else routes.reshape(B * T, -1)
    experts, shares = route(_routed(weights, tokens), weights["router"], config, replayed, weights.get("b_router"))
    if "expert_scale" in weights:
        shares = shares * weights["expert_scale"][experts]
    if "e_norm" in weights:
        tokens = tokens * weights["e_norm"].astype(tokens.dtype)[None]
    here = weights["w_up"].shape[0]
    chosen = experts.reshape(-1) - first
    chosen = jnp.where((chosen >= 0) & (chosen < here), chosen, here)
    # Copies of the tokens, sorted by expert; those for experts of other devices come last.
    order = jnp.argsort(chosen)
    sizes = jnp.bincount(chosen, length=here + 1)[:here].astype(jnp.int32)
    source = order // config.experts.per_token
    copies, weight = tokens[source], shares.reshape(-1)[order][:, None]
    if config.experts.scores == "sigmoid_input":
        copies, weight = (copies * weight).astype(copies.dtype), jnp.ones_like(weight)
    expert = jnp.minimum(chosen[order], here - 1)

    def product(x: Array, name: str, dtype: jnp.dtype | None = None) -> Array:
        y = grouped_product(x, weights[f"w_{name}"], sizes, dtype)
        return y + weights[f"b_{name}"][expert].astype(y.dtype) if f"b_{name}" in weights else y

    hidden = activate(product(copies, "gate"), product(copies, "up"), config)
    out = product(hidden, "down", jnp.float32)
    out = jnp.where((jnp.arange(out.shape[0]) < jnp.sum(sizes))[:, None], out, 0.0)
    mixed = jnp.zeros((B * T, D), jnp.float32).at[source].add(out * weight)
    return mixed.reshape(B, T, D)
