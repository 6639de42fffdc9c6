"""Arrays that rest in the host's memory while the devices' is wanted for something else.

Every process moves the slices that its own devices hold, by explicit transfers that compile nothing; sharding and
values stay as they are, and what was moved is deleted where it was. Between memories a transfer cannot donate.
"""

from typing import Any

import jax
from jax.sharding import Mesh, SingleDeviceSharding

from grpo_roc_jax.shapes import Array

HOST, DEVICE = "pinned_host", "device"
"""Memory kinds: pages of the host that devices reach by DMA, and where programs compute."""


def check_host_memory(mesh: Mesh) -> None:
    """Refuses devices that cannot keep arrays with the host.

    Raises:
        ValueError: naming the kinds of memory there are.
    """
    device = mesh.local_devices[0]
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    if HOST not in kinds:
        raise ValueError(
            f"optim.offload wants memory of kind {HOST}, but {device.device_kind} ({device.platform}) has "
            f"{', '.join(kinds)}; turn it off, or raise sharding.fsdp to spread the moments over more devices"
        )


def to_host(tree: Any) -> Any:
    """The arrays in the host's pinned memory, each device's slice its own; those of the devices are deleted. Scalars
    stay."""
    return _move(tree, HOST)


def to_device(tree: Any) -> Any:
    """The arrays in the devices' memory again; those of the host are deleted."""
    return _move(tree, DEVICE)


def device_copy(leaf: Array) -> Array:
    """The array in the devices' memory too."""
    return _copy(leaf, DEVICE)


def is_on_host(leaf: Array) -> bool:
    """Whether an array lies in the host's pinned memory."""
    return leaf.sharding.memory_kind == HOST


def held_bytes(tree: Any) -> int:
    """Bytes of what this process's devices hold of a tree, copies on several of them included; scalars left out."""
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
    """A copy in memory of this kind; each slice goes by itself, so no process needs another one's."""
    parts = [
        jax.device_put(shard.data, SingleDeviceSharding(shard.device, memory_kind=kind), may_alias=False)
        for shard in leaf.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding.with_memory_kind(kind), parts)
