"""Moves arrays to host memory while device memory is needed for something else, and back.

Every process moves the slices of its own devices by explicit transfers, without compiling. Shardings and values stay
the same. The source is deleted after the transfer, since a transfer between memories cannot donate.
"""

from typing import Any

import jax
from jax.sharding import Mesh, SingleDeviceSharding

from grpo_roc_jax.shapes import Array

HOST, DEVICE = "pinned_host", "device"
"""JAX memory kinds: pinned host memory that devices reach by DMA, and device memory."""


def check_host_memory(mesh: Mesh) -> None:
    """Checks that the devices support arrays in host memory.

    Raises:
        ValueError: They do not; the message lists the kinds of memory they have.
    """
    device = mesh.local_devices[0]
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    if HOST not in kinds:
        raise ValueError(
            f"optim.offload needs memory of kind {HOST}, but {device.device_kind} ({device.platform}) has "
            f"{', '.join(kinds)}; turn it off, or raise sharding.fsdp to spread the moments over more devices"
        )


def to_host(tree: Any) -> Any:
    """Moves the arrays to pinned host memory, slice by slice, and deletes the device arrays. Scalars stay on the
    devices."""
    return _move(tree, HOST)


def to_device(tree: Any) -> Any:
    """Moves the arrays back to device memory and deletes the host arrays."""
    return _move(tree, DEVICE)


def device_copy(leaf: Array) -> Array:
    """A copy of the array in device memory."""
    return _copy(leaf, DEVICE)


def is_on_host(leaf: Array) -> bool:
    """Whether an array is in pinned host memory."""
    return leaf.sharding.memory_kind == HOST


def held_bytes(tree: Any) -> int:
    """Bytes of a tree on the devices of this process, including replicas, without scalars."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.ndim]
    return sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)


def _move(tree: Any, kind: str) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    moved = [_copy(leaf, kind) if leaf.ndim and is_on_host(leaf) != (kind == HOST) else leaf for leaf in leaves]
    jax.block_until_ready(moved)
    for old, new in zip(leaves, moved, strict=True):
        if old is not new:
            old.delete()
    return structure.unflatten(moved)


def _copy(leaf: Array, kind: str) -> Array:
    """A copy in memory of this kind, made slice by slice, so that no process needs slices of another process."""
    parts = [
        jax.device_put(shard.data, SingleDeviceSharding(shard.device, memory_kind=kind), may_alias=False)
        for shard in leaf.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding.with_memory_kind(kind), parts)
