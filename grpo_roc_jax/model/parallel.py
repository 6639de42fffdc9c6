"""Attention and recurrence on a mesh whose devices share rows, heads and the tokens of a row.

With `sharding.sequence` = n the tokens of a row are split over n devices. Each device keeps its queries and gathers all
keys and values, which are few under grouped-query attention, before it attends (arXiv:2407.21783, sec. 3.3.2); the
backward pass reduces and scatters their gradients. A causal row cut into n pieces would give the last device twice the
mean work. The row is therefore cut into 2n runs, and device i holds runs i and 2n-1-i (the zigzag order). `to_zigzag`
reorders the token ids once and `from_zigzag` restores the log-probabilities, so no layer pays for it; gathered keys are
copied back into the original order.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from grpo_roc_jax.model.attention import make_attention, usual_path
from grpo_roc_jax.model.choose import fastest
from grpo_roc_jax.model.config import GatedDelta, ModelConfig
from grpo_roc_jax.model.delta import Signals, Space, recur_packed
from grpo_roc_jax.model.sharding import LOGICAL_TO_MESH, ROWS, constrain, free_spec, platform_of, shard_map_free
from grpo_roc_jax.model.transformer import compute_dtype, take_rows
from grpo_roc_jax.shapes import Array, Float, Int

log = logging.getLogger(__name__)


def sequence_parts(mesh: Mesh | None) -> int:
    """Number of devices that share the tokens of a row."""
    return 1 if mesh is None else mesh.shape["sequence"]


def check_row_length(length: int, parts: int) -> None:
    """Checks that rows divide into the runs of `to_zigzag`.

    Raises:
        ValueError: they do not; the message gives the next length that does.
    """
    if parts > 1 and length % (2 * parts):
        fitting = -(-length // (2 * parts)) * 2 * parts
        raise ValueError(
            f"batch.row_length = {length} is not divisible by 2 x sharding.sequence = {2 * parts}, as each device "
            f"holds two runs of every row; take batch.row_length {fitting}, or another sharding.sequence"
        )


def to_zigzag(x: Array, parts: int) -> Array:
    """[B,T,...] in the order in which n = `parts` devices hold the tokens: runs 0, 2n-1, 1, 2n-2, ... of 2n.

    Raises:
        ValueError: See `check_row_length`.
    """
    if parts == 1:
        return x
    B, T = x.shape[:2]
    check_row_length(T, parts)
    runs = x.reshape(B, 2 * parts, T // (2 * parts), *x.shape[2:])
    return jnp.stack([runs[:, :parts], runs[:, : parts - 1 : -1]], axis=2).reshape(x.shape)


def from_zigzag(x: Array, parts: int) -> Array:
    """The inverse of `to_zigzag`."""
    if parts == 1:
        return x
    B, T = x.shape[:2]
    runs = x.reshape(B, parts, 2, T // (2 * parts), *x.shape[2:])
    return jnp.concatenate([runs[:, :, 0], runs[:, ::-1, 1]], axis=1).reshape(x.shape)


def columns_of(device: Array | int, length: int, parts: int) -> Int[Array, " T"]:
    """Columns of a row whose tokens device `device` of `parts` holds, ascending."""
    run = length // (2 * parts)
    return jnp.concatenate([first * run + jnp.arange(run) for first in (device, 2 * parts - 1 - device)])


def attend_on(attend: Callable[..., Array], mesh: Mesh | None) -> Callable[..., Array]:
    """`attend` of `attention.make_attention` on the mesh: q, k, v [B,T,heads,H] and segment ids [B,T] with tokens in
    zigzag order, rows over data and fsdp, tokens over sequence, heads over tensor.

    Each device loops over its own rows only, so its loops may end earlier than those of other devices. Kernels that XLA
    cannot partition run unchanged.
    """
    if mesh is None or mesh.size == 1:
        return attend
    parts = sequence_parts(mesh)

    def gathered(x: Array) -> Array:
        return from_zigzag(jax.lax.all_gather(x, "sequence", axis=1, tiled=True), parts)

    def own_share(q: Array, k: Array, v: Array, segment_ids: Array, window: Array | None, sinks: Array | None) -> Array:
        more = {} if sinks is None else {"sinks": sinks}
        if parts == 1:
            return attend(q, k, v, segment_ids, window, **more)
        columns = columns_of(jax.lax.axis_index("sequence"), parts * q.shape[1], parts)
        return attend(q, gathered(k), gathered(v), gathered(segment_ids), window, columns, **more)

    def shared(
        q: Array,
        k: Array,
        v: Array,
        segment_ids: Array,
        window: Array | None = None,
        *,
        sinks: Array | None = None,
    ) -> Array:
        heads, tensor = free_spec(ROWS, "sequence", "tensor", None), mesh.shape["tensor"]
        if k.shape[2] % tensor:  # see `sharding.head_copies`
            k, v = (jnp.repeat(x, tensor // x.shape[2], axis=2) for x in (k, v))
        specs = (heads, heads, heads, free_spec(ROWS, "sequence"), P(), free_spec("tensor"))
        # The outputs differ on all devices, so there is no replication to check; the loops of attention and the kernels
        # do not support the check.
        return shard_map_free(own_share, mesh, specs, heads)(q, k, v, segment_ids, window, sinks)

    return shared


def recur_on(mesh: Mesh | None) -> Callable[..., Array]:
    """`delta.recur_packed` on the mesh: rows over data and fsdp, heads over tensor.

    A head's recurrence reads nothing of other heads. XLA by itself does not keep their signals apart and moves them
    between devices in both passes.
    """
    if mesh is None or mesh.shape["tensor"] == 1:
        return recur_packed
    tensor = mesh.shape["tensor"]

    def shared(
        delta: GatedDelta, segment_ids: Array, signals: Signals, conv: Array, space: Space | None = None
    ) -> Array:
        own_heads = replace(delta, key_heads=delta.key_heads // tensor, value_heads=delta.value_heads // tensor)
        heads, weights = free_spec(ROWS, None, "tensor"), free_spec("tensor")
        specs = (free_spec(ROWS), heads, weights, weights)
        return shard_map_free(partial(recur_packed, own_heads), mesh, specs, heads)(segment_ids, signals, conv, space)

    return shared


def scattered_over_tensor(y: Array, parts: int) -> Array:
    """[B,T,D] on each of the devices of `tensor` -> sums [B,T/parts,D] of a device's own tokens, inside `shard_map`.

    XLA for TPUs makes of `psum_scatter` along the tokens a sum of all tokens on every device, which sends twice as
    much, and takes a part of it. It scatters where the parts have an axis of their own (docs/compilers.md).
    """
    y = y.reshape(len(y), parts, -1, y.shape[-1]).swapaxes(0, 1)
    return jax.lax.psum_scatter(y, "tensor", scatter_dimension=0)


def output_product_on(mesh: Mesh | None, token_axes: tuple[str, ...]) -> Callable[[Array, Array, int], Array] | None:
    """A product [B,T,...] x [...,D] -> [B,T,D] in float32 whose first summed axis is split over `tensor`, and whose
    tokens are split over `token_axes`; None where `tensor` is not among these.

    Every device sums a part of the axis, and gets the sums over all devices for its tokens. XLA by itself computes the
    sums of all tokens on every device, and takes a part of them.
    """
    if mesh is None or mesh.shape["tensor"] == 1 or "tensor" not in token_axes:
        return None
    parts = mesh.shape["tensor"]

    def own_tokens(x: Array, matrix: Array, inputs: int) -> Array:
        return scattered_over_tensor(jnp.tensordot(x, matrix, inputs, preferred_element_type=jnp.float32), parts)

    @partial(jax.custom_vjp, nondiff_argnums=(2,))
    def shared(x: Array, matrix: Array, inputs: int) -> Array:
        specs, scattered = (free_spec(ROWS, "sequence", "tensor"), free_spec("tensor")), free_spec(ROWS, token_axes)
        return shard_map_free(partial(own_tokens, inputs=inputs), mesh, specs, scattered)(x, matrix)

    def forward(x: Array, matrix: Array, inputs: int) -> tuple[Array, tuple[Array, Array]]:
        return shared(x, matrix, inputs), (x, matrix)

    def backward(inputs: int, residuals: tuple[Array, Array], d_y: Array) -> tuple[Array, Array]:
        x, matrix = residuals
        d_y = constrain(d_y.astype(x.dtype), mesh, ROWS, "sequence", None)  # gathered once for both products
        d_x = constrain(jnp.tensordot(d_y, matrix, ((2,), (inputs,))), mesh, ROWS, "sequence", "tensor")
        d_matrix = jnp.tensordot(x, d_y, ((0, 1), (0, 1)), preferred_element_type=jnp.float32)
        return d_x, d_matrix.astype(matrix.dtype)

    shared.defvjp(forward, backward)
    return shared


def look_up_on(mesh: Mesh | None, token_axes: tuple[str, ...]) -> Callable[[Array, Array], Array]:
    """`transformer.take_rows` on the mesh: tokens over `token_axes`, the table's rows over all axes but `data`.

    Each part of `tensor` gathers its share of the table and looks up the tokens that it has. The gradient is added up
    in that share and then split again. XLA by itself would gather the gradients of all tokens, or the whole table.
    """
    if mesh is None or mesh.size == mesh.shape["data"]:
        return take_rows

    def own_share(table: Array, ids: Array) -> Array:
        table = jax.lax.all_gather(table, ("fsdp", "sequence"), axis=0, tiled=True)
        local_ids = ids - jax.lax.axis_index("tensor") * table.shape[0]
        here = (local_ids >= 0) & (local_ids < table.shape[0])
        rows = jnp.where(here[..., None], jnp.take(table, local_ids, axis=0, mode="clip"), 0)
        if "tensor" in token_axes:
            return scattered_over_tensor(rows, mesh.shape["tensor"])
        return jax.lax.psum(rows, "tensor")

    def shared(table: Array, ids: Array) -> Array:
        vocabulary = free_spec(dict(LOGICAL_TO_MESH)["vocab"], None)
        specs = (vocabulary, free_spec(ROWS, "sequence"))
        return shard_map_free(own_share, mesh, specs, free_spec(ROWS, token_axes, None))(table, ids)

    return shared


def look_up_wide_on(mesh: Mesh | None, token_axes: tuple[str, ...]) -> Callable[[Array, Array], Array]:
    """`look_up_on` for a table whose rows are wide: devices exchange the ids and the rows of their tokens, and not the
    table. Of Gemma 4 E2B it has 262,144 rows of 8,960 numbers, 9.4 GB in float32."""
    if mesh is None or mesh.size == mesh.shape["data"]:
        return take_rows
    shared_axes, vocabulary = ("fsdp", "sequence"), dict(LOGICAL_TO_MESH)["vocab"]

    def own_share(table: Array, ids: Array) -> Array:
        ids = jax.lax.all_gather(ids, shared_axes)
        local_ids = ids - jax.lax.axis_index(vocabulary) * table.shape[0]
        here = (local_ids >= 0) & (local_ids < table.shape[0])
        rows = jnp.where(here[..., None], jnp.take(table, local_ids, axis=0, mode="clip"), 0)
        rows = jax.lax.psum_scatter(rows, shared_axes, scatter_dimension=0)
        if "tensor" in token_axes:
            return scattered_over_tensor(rows, mesh.shape["tensor"])
        return jax.lax.psum(rows, "tensor")

    def shared(table: Array, ids: Array) -> Array:
        specs = (free_spec(vocabulary, None), free_spec(ROWS, "sequence"))
        return shard_map_free(own_share, mesh, specs, free_spec(ROWS, token_axes, None))(table, ids)

    return shared


def attention_for(
    name: str, model: ModelConfig, length: int, mesh: Mesh | AbstractMesh | None, platform: str = ""
) -> Callable[..., Array]:
    """The attention path `name` for rows of `length` tokens on the mesh; see `attend_on`. An abstract mesh needs the
    name of its platform.

    Raises:
        ValueError: See `make_attention`.
    """
    # Chunks are segments of their own, see `transformer.forward`.
    windows = [] if model.windows.chunked else sorted(set(model.layer_windows))
    cap = model.extras.attention_cap
    if model.extras.sinks and name in FUSED.values():
        raise ValueError(
            f"update.attention = {name!r} with model.extras.sinks: the kernel has no scores without keys; take auto, "
            "blocked or reference"
        )
    platform = platform or platform_of(mesh)
    path = make_attention(name, length, platform, parts=sequence_parts(mesh), windows=windows, cap=cap)
    return attend_on(path, mesh)


# ---- the fastest path, by measurement ------------------------------------------------------------------------------

FUSED = {"tpu": "splash", "gpu": "cudnn"}
"""The fused path of a platform, in addition to plain XLA."""


def paths(model: ModelConfig, length: int, mesh: Mesh) -> tuple[str, ...]:
    """The paths that may be fastest for such rows, plain XLA first."""
    platform = platform_of(mesh)
    usual, fused = usual_path(length, platform), FUSED.get(platform)
    if fused is None or (fused == "cudnn" and compute_dtype(model) == jnp.float32):
        return (usual,)
    try:
        attention_for(fused, model, length, mesh)
    except ValueError as error:
        log.info("not measured: %s", error)
        return (usual,)
    return usual, fused


def choose_attention(
    names: tuple[str, ...], model: ModelConfig, length: int, rows: int, segment: int, mesh: Mesh
) -> tuple[str, dict[str, float]]:
    """(fastest path, seconds of forward and backward of each for one layer of a micro-batch); a single path is not
    timed. All processes of the mesh must call this together.

    Args:
        names: See `paths`.
        model: Gives heads, dtype and the window of the first layer.
        length: Tokens of a row.
        rows: Rows of a micro-batch.
        segment: Tokens of each trajectory in the rows.
        mesh: Mesh of the update.
    """
    if len(names) == 1:
        return names[0], {}
    inputs = _drawn_rows(model, length, rows, segment, mesh)
    window = np.int32(model.layer_windows[0]) if model.layer_windows and not model.windows.chunked else None

    def timed(name: str) -> Callable[[], tuple[Array, ...]]:
        attend = attention_for(name, model, length, mesh)

        def value(heads: tuple[Array, ...], segment_ids: Array, window: Array | None) -> Float[Array, ""]:
            return jnp.sum(attend(*heads, segment_ids, window).astype(jnp.float32) ** 2)

        return partial(jax.jit(jax.grad(value)), *inputs, window)

    return fastest({name: timed(name) for name in names})


def _drawn_rows(model: ModelConfig, length: int, rows: int, segment: int, mesh: Mesh) -> tuple:
    """((q, k, v), segment ids) of random packed rows, laid out as in the update."""
    tensor = mesh.shape["tensor"]
    head_counts = [model.heads, model.kv_heads, model.kv_heads]
    heads = (NamedSharding(mesh, P(ROWS, "sequence", None if n % tensor else "tensor", None)) for n in head_counts)

    def draw() -> tuple:
        shapes = [(rows, length, n, model.head_dim) for n in head_counts]
        drawn = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes))
        segment_ids = jnp.broadcast_to(jnp.arange(length) // segment + 1, (rows, length))
        return tuple(x.astype(compute_dtype(model)) for x in drawn), to_zigzag(segment_ids, sequence_parts(mesh))

    return jax.jit(draw, out_shardings=((*heads,), NamedSharding(mesh, P(ROWS, "sequence"))))()
