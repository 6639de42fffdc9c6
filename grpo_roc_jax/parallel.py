"""Attention over the mesh: rows, heads and the tokens of a row, each device with its own share.

Under `sharding.sequence` = n the tokens of a row are split over n devices. Each keeps its queries and gathers keys and
values, which are few under grouped queries, before it attends (arXiv:2407.21783, sec. 3.3.2); in the backward pass
their gradients are added up and scattered. A causal row cut into n pieces would leave the last device twice the mean
work: instead it is cut into 2n runs, and device i holds runs i and 2n-1-i. That order is given to the tokens once, as
ids (`spread`), and taken back from the log-probabilities (`restore`), so it costs nothing a layer; keys are put in
order after their gather, as a copy.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from grpo_roc_jax.shapes import Array, Int
from grpo_roc_jax.sharding import ROWS


def sequence_parts(mesh: Mesh | None) -> int:
    """Devices that share the tokens of a row."""
    return 1 if mesh is None else mesh.shape["sequence"]


def check_row_length(length: int, parts: int) -> None:
    """Refuses rows that do not divide into the runs of `spread`.

    Raises:
        ValueError: With the next length that does.
    """
    if parts > 1 and length % (2 * parts):
        wanted = -(-length // (2 * parts)) * 2 * parts
        raise ValueError(
            f"batch.row_length = {length} does not divide by 2 x sharding.sequence = {2 * parts}, as each device takes "
            f"an early and a late run of every row; take batch.row_length {wanted}, or another sharding.sequence"
        )


def spread(x: Array, parts: int) -> Array:
    """[B,T,...] in the order in which devices hold the tokens: runs 0, 2n-1, 1, 2n-2, ... of 2n.

    Raises:
        ValueError: See `check_row_length`.
    """
    if parts == 1:
        return x
    B, T = x.shape[:2]
    check_row_length(T, parts)
    runs = x.reshape(B, 2 * parts, T // (2 * parts), *x.shape[2:])
    return jnp.stack([runs[:, :parts], runs[:, : parts - 1 : -1]], axis=2).reshape(x.shape)


def restore(x: Array, parts: int) -> Array:
    """The inverse of `spread`."""
    if parts == 1:
        return x
    B, T = x.shape[:2]
    runs = x.reshape(B, parts, 2, T // (2 * parts), *x.shape[2:])
    return jnp.concatenate([runs[:, :, 0], runs[:, ::-1, 1]], axis=1).reshape(x.shape)


def columns_of(device: Array | int, length: int, parts: int) -> Int[Array, " T"]:
    """Columns of a row of that length whose tokens device `device` of `parts` holds, ascending."""
    run = length // (2 * parts)
    return jnp.concatenate([first * run + jnp.arange(run) for first in (device, 2 * parts - 1 - device)])


def attend_on(attend: Callable[..., Array], mesh: Mesh | None) -> Callable[..., Array]:
    """`attend` of `model.attention.make_attention` on the mesh: q, k, v [B,T,heads,H] and segment ids [B,T] with tokens
    in the order of `spread`, rows over data and fsdp, tokens over sequence, heads over tensor.

    Each device runs its own loops over its own rows, which may then end earlier than those of others; and kernels that
    XLA cannot partition run as they are.
    """
    if mesh is None or mesh.size == 1:
        return attend
    parts = sequence_parts(mesh)

    def gathered(x: Array) -> Array:
        return restore(jax.lax.all_gather(x, "sequence", axis=1, tiled=True), parts)

    def own_share(q: Array, k: Array, v: Array, segment_ids: Array, window: Array | None) -> Array:
        if parts == 1:
            return attend(q, k, v, segment_ids, window)
        columns = columns_of(jax.lax.axis_index("sequence"), parts * q.shape[1], parts)
        return attend(q, gathered(k), gathered(v), gathered(segment_ids), window, columns)

    heads = P(ROWS, "sequence", "tensor", None)
    # What is computed differs between all devices, so there is nothing for the check of replication to find; the loops
    # of attention and the kernels could not say so.
    shared = jax.shard_map(
        own_share, mesh=mesh, in_specs=(heads, heads, heads, P(ROWS, "sequence"), P()), out_specs=heads, check_vma=False
    )
    return lambda q, k, v, segment_ids, window=None: shared(q, k, v, segment_ids, window)
