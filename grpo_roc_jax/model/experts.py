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

from grpo_roc_jax.model.config import ModelConfig
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


def activate(gate: Array, config: ModelConfig) -> Array:
    """The nonlinearity of the gate: SiLU, or GELU with the tanh approximation."""
    return jax.nn.silu(gate) if config.activation == "silu" else jax.nn.gelu(gate, approximate=True)


def gated(gate: Array, up: Array, config: ModelConfig) -> Array:
    """act(gate) * up, any shape. Its gradients are not fused into the products that read them."""
    return _gated(partial(activate, config=config), gate, up)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated(act: Callable[[Array], Array], gate: Array, up: Array) -> Array:
    return act(gate) * up


def _gated_fwd(act: Callable[[Array], Array], gate: Array, up: Array) -> tuple[Array, tuple[Array, Array]]:
    return _gated(act, gate, up), (gate, up)


def _gated_bwd(act: Callable[[Array], Array], residuals: tuple[Array, Array], d_out: Array) -> tuple[Array, Array]:
    _, pull = jax.vjp(lambda gate, up: act(gate) * up, *residuals)
    return unfused(pull(d_out))


_gated.defvjp(_gated_fwd, _gated_bwd)


@checked
def route(
    h: Float[Array, "M D"],
    router: Float[Array, "D E"],
    config: ModelConfig,
    replayed: Int[Array, "M X"] | None = None,
) -> tuple[Int[Array, "M X"], Float[Array, "M X"]]:
    """(experts, weights) of each token: the `per_token` largest of softmax(h router), float32; for tokens with
    `replayed` experts (not negative) those instead.

    With `norm_weights` the weights are divided by their sum.
    """
    logits = jnp.einsum("md,de->me", h, router, preferred_element_type=jnp.float32)
    shares = jax.nn.softmax(logits, axis=-1)
    weights, experts = jax.lax.top_k(shares, config.experts.per_token)
    if replayed is not None:
        experts = jnp.where(replayed < 0, experts, replayed.astype(experts.dtype))
        weights = jnp.take_along_axis(shares, experts, axis=-1)
    if config.experts.norm_weights:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return experts, weights


def mix_experts(
    layer: dict[str, Any],
    h: Float[Array, "B T D"],
    config: ModelConfig,
    mesh: Mesh | None = None,
    rows: tuple[str, ...] = ("data", "fsdp"),
) -> Float[Array, "B T D"]:
    """sum over a token's experts of weight * (act(h W_gate) * (h W_up)) W_down, float32.

    On a mesh each device sends the tokens of its rows through the experts that it holds, and the partial results are
    summed over `tensor`. Without this XLA sorts the tokens of all rows on every device, or gathers all experts.

    Args:
        layer: Weights of the layer, and in `routes` [B,T,X] the experts to replay, if any.
        h: Normalized input of the feed-forward.
        mesh: Mesh of weights and rows; None or one device for plain XLA.
        rows: Mesh axes that split the rows; `sequence` then splits their tokens. Empty if rows are whole, or already
            split by an enclosing `shard_map`.
    """
    names = ("router", "w_gate", "w_up", "w_down")
    weights, routes = {name: layer[name] for name in names}, layer.get("routes")
    if mesh is None or mesh.size == 1 or not (rows or mesh.shape.get("tensor", 1) > 1):
        return _mix(weights, h, config, 0, routes)
    by_expert = P("tensor", None, None)
    specs = {"router": P(None, None), "w_gate": by_expert, "w_up": by_expert, "w_down": by_expert}
    around = jax.sharding.get_abstract_mesh()
    rows = tuple(axis for axis in rows if axis not in around.manual_axes)
    split = tuple(axis for axis in (*rows, "sequence") if rows and axis in mesh.shape)
    by_row = P(rows or None, "sequence" if "sequence" in split else None, None)

    def own_share(weights: dict[str, Array], h: Array, routes: Array | None) -> Array:
        # The cast must be explicit: a lookup by an index that varies over devices does not make its operand varying,
        # and the gradient would miss the parts of the other devices.
        h, router = jax.lax.pcast((h, weights["router"]), "tensor", to="varying")
        weights = weights | {"router": router}
        first = jax.lax.axis_index("tensor") * weights["w_up"].shape[0]
        return jax.lax.psum(_mix(weights, h, config, first, routes), "tensor")

    return jax.shard_map(
        own_share,
        mesh=mesh if around.empty else None,
        in_specs=(specs, by_row, by_row),
        out_specs=by_row,
        axis_names={*split, "tensor"},
        check_vma=bool(rows),
    )(weights, h, routes)


def recorded(experts: Callable[..., Array], chosen: list[Array]) -> Callable[..., Array]:
    """Wraps `experts` so that it also appends the choice of each layer, int16[B,T,X], to `chosen` during tracing."""

    def run(layer: dict[str, Any], h: Array, config: ModelConfig) -> Array:
        choice, _ = route(h.reshape(-1, h.shape[-1]), layer["router"], config)
        choice = choice.reshape(*h.shape[:2], -1)
        chosen.append(choice.astype(jnp.int16))
        return experts(layer | {"routes": choice}, h, config)

    return run


def _mix(weights: dict[str, Array], h: Array, config: ModelConfig, first: Array | int, routes: Array | None) -> Array:
    """The contribution of the experts from `first` on, whose matrices this device holds."""
    B, T, D = h.shape
    tokens = h.reshape(B * T, D)
    replayed = None if routes is None else routes.reshape(B * T, -1)
    experts, shares = route(tokens, weights["router"], config, replayed)
    here = weights["w_up"].shape[0]
    chosen = experts.reshape(-1) - first
    chosen = jnp.where((chosen >= 0) & (chosen < here), chosen, here)
    # Copies of the tokens, sorted by expert; those for experts of other devices come last.
    order = jnp.argsort(chosen)
    sizes = jnp.bincount(chosen, length=here + 1)[:here].astype(jnp.int32)
    source = order // config.experts.per_token
    copies = tokens[source]
    gate = grouped_product(copies, weights["w_gate"], sizes)
    up = grouped_product(copies, weights["w_up"], sizes)
    out = grouped_product(activate(gate, config) * up, weights["w_down"], sizes, jnp.float32)
    out = jnp.where((jnp.arange(out.shape[0]) < jnp.sum(sizes))[:, None], out, 0.0)
    mixed = jnp.zeros((B * T, D), jnp.float32).at[source].add(out * shares.reshape(-1)[order][:, None])
    return mixed.reshape(B, T, D)
