"""The device mesh, the table from logical axes to mesh axes, and the shardings of parameters and batches.

Axis types are Auto: XLA inserts the collectives, and `jit` gets the shardings of its inputs and outputs. The mesh is
passed as an argument rather than set as a context, which other threads would not see.
"""

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import jax
import numpy as np
from annotated_types import Ge
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.torus import torus_order
from grpo_roc_jax.model.transformer import Params, param_axes
from grpo_roc_jax.settings.options import AtLeast1, settings
from grpo_roc_jax.shapes import Array, Key

AXES = ("data", "fsdp", "sequence", "tensor")
"""Axes of the mesh, outermost first: the devices that communicate most often are closest together."""
ROWS = ("data", "fsdp")
"""Mesh axes that the rows of a batch are split over; the tokens of a row are split over `sequence`."""
SLOTS = (*ROWS, "sequence")
"""Mesh axes that the sampler's slots are split over. Decoding has one token a row, so `sequence` splits slots too."""

LOGICAL_TO_MESH: tuple[tuple[str, str | tuple[str, ...] | None], ...] = (
    # The vocabulary takes all of these axes, so that the width of the embedding stays whole: with the width split too
    # XLA gathers the whole table for the lookup.
    ("vocab", ("tensor", "fsdp", "sequence")),
    ("experts", "tensor"),
    ("heads", "tensor"),
    ("kv_heads", "tensor"),
    ("delta_heads", "tensor"),
    ("mlp", "tensor"),
    ("embed", ("fsdp", "sequence")),
    ("layers", None),
)
"""Logical axis -> mesh axes, in order of precedence: an array uses a mesh axis once, for the first entry here."""


@settings
class ShardingConfig:
    """How many devices each axis of the mesh spans; the product is the number of devices."""

    data: Annotated[int, Ge(-1)] = -1
    """Copies of the parameters, each with its own rows; -1 takes the devices that the other axes leave."""
    fsdp: AtLeast1 = 1
    """Devices that share one copy of parameters and optimizer state, each with its own rows: memory falls by this
    factor, at the price of gathering each layer before use."""
    tensor: AtLeast1 = 1
    """Devices that share the heads, the hidden width and the vocabulary of one row. Keep it inside one host if the
    sampler's weights fit there; beyond it, those hosts sample as one."""
    sequence: AtLeast1 = 1
    """Devices that share the tokens of one row in the update, for rows too long for one device: the memory of
    activations falls by this factor, at the price of gathering the keys and values of each layer. Parameters and
    optimizer state are shared among them too, as over `fsdp`, and the sampler gives each its own slots. Twice this
    number must divide `batch.row_length`."""

    def __post_init__(self) -> None:
        if self.data == 0:
            raise ValueError("sharding.data = 0; must be at least 1, or -1 for all devices that the other axes leave")

    def shape(self, devices: int) -> tuple[int, ...]:
        """Devices along each of `AXES`.

        Raises:
            ValueError: The product is not the number of devices.
        """
        inner = (self.fsdp, self.sequence, self.tensor)
        data = devices // math.prod(inner) if self.data == -1 else self.data
        if data * math.prod(inner) != devices:
            given = " x ".join(str(getattr(self, axis)) for axis in AXES)
            raise ValueError(
                f"sharding {' x '.join(AXES)} = {given} does not make {devices} devices; set sharding.data=-1 and "
                f"choose fsdp x sequence x tensor as a divisor of {devices}"
            )
        return data, *inner


def make_mesh(config: ShardingConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with the axes `AXES` over `devices` (default: all), all axes Auto.

    The devices of one process form a block of the mesh (`process_mesh`), and `tensor` stays within a process or takes
    whole ones. On TPU slices the processes follow the torus (`model.torus`), elsewhere their numbers. Of several slices
    each is a block along `data`, so that only the sum of gradients crosses the network between them.

    Raises:
        ValueError: the product of the axes is not the number of devices, `tensor` takes a part of a process, or
            `data` does not divide over the slices.
    """
    devices = jax.devices() if devices is None else list(devices)
    shape, types = config.shape(len(devices)), (AxisType.Auto,) * len(AXES)
    processes = {device.process_index for device in devices}
    if len(processes) == 1:
        return jax.make_mesh(shape, AXES, axis_types=types, devices=devices)
    check_processes(shape, len(processes))
    each = len(devices) // len(processes)
    slices: dict[int, list[jax.Device]] = {}
    for device in sorted(devices, key=lambda device: (device.process_index, device.id)):
        slices.setdefault(slice_of(device), []).append(device)
    check_slices(shape[0], len(slices))
    ordered: list[jax.Device] = []
    for _, part in sorted(slices.items()):
        # Processes that sample as one are consecutive by their numbers, so their order stays.
        ordered += (torus_order(part) if config.tensor <= each else None) or part
    return Mesh(np.array(ordered).reshape(shape), AXES, axis_types=types)


def slice_of(device: jax.Device) -> int:
    """The number of a TPU's slice; 0 for other devices, whose machines `fsdp` may cross."""
    return (getattr(device, "slice_index", 0) or 0) if device.platform == "tpu" else 0


def check_slices(data: int, slices: int) -> None:
    """Checks that the slices are blocks along `data`.

    Raises:
        ValueError: they are not.
    """
    if data % slices:
        raise ValueError(
            f"sharding.data = {data} over {slices} slices: must be a multiple of them, since only the sums of "
            "gradients may cross the network between slices; lower sharding.fsdp, sequence or tensor"
        )


def check_processes(shape: Sequence[int], processes: int) -> None:
    """Checks that the devices of each process, in the order of a mesh of this shape, form a block of it.

    Raises:
        ValueError: `tensor` takes a part of a process, or they form none.
    """
    tensor, each = shape[-1], math.prod(shape) // processes
    if each % tensor and tensor % each:
        raise ValueError(
            f"sharding.tensor = {tensor} does not divide the {each} devices of a process and is not a multiple of "
            f"them; take a divisor of {each} and raise sharding.fsdp instead"
        )
    inner, together = 1, max(each, tensor)
    for size in reversed(shape):
        if inner * size >= together:
            break
        inner *= size
    if together % inner or size % (together // inner):
        raise ValueError(
            f"the {together} devices of a process form no block of the mesh {' x '.join(map(str, shape))}; choose "
            "sharding.fsdp x sharding.sequence x sharding.tensor as a multiple or a divisor of the devices of a process"
        )


def process_count(mesh: Mesh) -> int:
    """Number of processes whose devices form the mesh."""
    return len({device.process_index for device in mesh.devices.flat})


def processes_together(mesh: Mesh | AbstractMesh, processes: int = 0) -> int:
    """Number of consecutive processes that sample as one: those that `tensor` extends over.

    Args:
        mesh: Mesh of all processes.
        processes: Their number; 0 counts them by the devices, which an abstract mesh does not have.
    """
    each = mesh.size // (processes or process_count(mesh))
    return max(1, mesh.shape["tensor"] // each)


def process_mesh(mesh: Mesh, process: int) -> Mesh:
    """The part of the mesh with the devices of one process, or of all processes that sample as one with it, with the
    same axes.

    Raises:
        ValueError: These devices do not form a block of the mesh.
    """
    together = processes_together(mesh)
    members = (device.process_index // together == process // together for device in mesh.devices.flat)
    member_mask = np.array([*members]).reshape(mesh.devices.shape)
    places = np.argwhere(member_mask)
    part = mesh.devices[tuple(slice(low, high + 1) for low, high in zip(places.min(0), places.max(0), strict=True))]
    if part.size != len(places):
        raise ValueError(
            f"the {len(places)} devices of process {process} form no block of the mesh {dict(mesh.shape)}; choose "
            "sharding.fsdp x sharding.sequence x sharding.tensor as a multiple or a divisor of the devices of a process"
        )
    return Mesh(part, mesh.axis_names, axis_types=mesh.axis_types)


def platform_of(mesh: Mesh | None) -> str:
    """Platform of the mesh's devices, which may belong to a topology to compile for; without a mesh, of
    this process."""
    return jax.default_backend() if mesh is None else mesh.devices.flat[0].platform


def axes_to_spec(logical: Sequence[str | None]) -> P:
    """The mesh axes of one array; no mesh axis is used twice."""
    used: set[str] = set()
    spec: list[str | tuple[str, ...] | None] = [None] * len(logical)
    for name, mapped in LOGICAL_TO_MESH:
        if name not in logical or mapped is None:
            continue
        axes = (mapped,) if isinstance(mapped, str) else mapped
        free = tuple(axis for axis in axes if axis not in used)
        used.update(free)
        spec[logical.index(name)] = free[0] if len(free) == 1 else free or None
    return P(*spec)


def head_copies(config: ModelConfig, tensor: int) -> int:
    """Number of copies of each key-value head. With more `tensor` devices than heads, each device gets one copy. The
    parameters hold a single copy, on all of these devices. The latent vector of a token stays one, which all read."""
    if config.extras.latent:
        return 1
    return tensor // config.kv_heads if tensor > config.kv_heads and tensor % config.kv_heads == 0 else 1


def check_divisible(config: ModelConfig, mesh: Mesh) -> None:
    """Checks that the mesh splits the model evenly.

    Raises:
        ValueError: it does not; the message gives the field, both numbers, and the nearest size that works.
    """
    tensor, shared = mesh.shape["tensor"], mesh.shape["fsdp"] * mesh.shape["sequence"]
    if config.delta and mesh.shape["sequence"] > 1:
        raise ValueError(
            f"sharding.sequence = {mesh.shape['sequence']} with model.windows {config.windows.kind}: a recurrent state "
            "passes through the tokens of a row in order; set sharding.sequence 1 and raise sharding.fsdp or tensor"
        )
    within = "sharding.fsdp" if mesh.shape["sequence"] == 1 else "sharding.fsdp x sharding.sequence"
    for name, value, parts, axes in (
        ("heads", config.heads, tensor, "sharding.tensor"),
        (
            "kv_heads",
            0 if config.extras.latent else config.kv_heads * head_copies(config, tensor),
            tensor,
            "sharding.tensor",
        ),
        (
            "windows.full_kv_heads",
            config.windows.full_kv_heads * head_copies(config, tensor),
            tensor,
            "sharding.tensor",
        ),
        ("windows.key_heads", config.windows.key_heads if config.delta else 0, tensor, "sharding.tensor"),
        ("d_ff", config.d_ff, tensor, "sharding.tensor"),
        ("windows.shared_ff", config.windows.shared_ff, tensor, "sharding.tensor"),
        ("experts", config.experts.count, tensor, "sharding.tensor"),
        ("experts.shared", config.experts.shared, tensor, "sharding.tensor"),
        ("experts.dense_ff", config.experts.dense_ff, tensor, "sharding.tensor"),
        ("d_model", config.d_model, shared, within),
        ("vocab_size", config.vocab_size, tensor * shared, f"sharding.tensor x {within}"),
    ):
        if value % parts:
            remedy = f"lower {axes} to {math.gcd(value, parts)} and give the rest to sharding.data"
            if name == "vocab_size":
                remedy += f", or train a model whose vocabulary is padded to {math.ceil(value / parts) * parts}"
            raise ValueError(f"model.{name} = {value} is not divisible by {axes} = {parts}; {remedy}")


def param_shardings(config: ModelConfig, mesh: Mesh) -> Params:
    """A `NamedSharding` for every leaf, in the structure of the parameters.

    Raises:
        ValueError: a dimension is not divisible by its mesh axes.
    """
    check_divisible(config, mesh)
    return axes_shardings(param_axes(config), mesh, "kv_heads" if head_copies(config, mesh.shape["tensor"]) > 1 else "")


def axes_shardings(axes: Params, mesh: Mesh, unsplit: str = "") -> Params:
    """A `NamedSharding` for every tuple of logical axis names in a tree; the axis `unsplit` is not split."""
    return jax.tree.map(
        lambda names: NamedSharding(mesh, axes_to_spec([None if name == unsplit else name for name in names])),
        axes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def place_shapes(shapes: object, shardings: object) -> object:
    """Shape, dtype and sharding of every leaf: what a program is compiled for before there are arrays."""
    return jax.tree.map(lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s), shapes, shardings)


def device_bytes(tree: Any) -> float:
    """Bytes of all leaves on one device, from shapes with shardings."""
    leaves = jax.tree.leaves(tree)
    return float(sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves))


def row_shards(mesh: Mesh) -> int:
    """Number of parts that the rows of a micro-batch are split into; it divides the rows of a micro-batch."""
    return math.prod(mesh.shape[axis] for axis in ROWS)


def slot_shards(mesh: Mesh) -> int:
    """Number of parts that the sampler's slots are split into."""
    return math.prod(mesh.shape[axis] for axis in SLOTS)


def replicated(mesh: Mesh) -> NamedSharding:
    """Sharding of a value that every device holds in full."""
    return NamedSharding(mesh, P())


def replicate_key(key: Key[Array, ""], mesh: Mesh) -> Key[Array, ""]:
    """A key, equal in all processes, on all devices of the mesh."""
    if not mesh.is_multi_process:
        return jax.device_put(key, replicated(mesh))
    return jax.random.wrap_key_data(place_host(np.asarray(jax.random.key_data(key)), replicated(mesh)))


def place_host(value: np.ndarray, sharding: Sharding) -> Array:
    """A value, equal in all processes, on the devices of the sharding; uses explicit transfers only."""
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    parts = sharding.addressable_devices_indices_map(np.shape(value)).items()
    shards = [jax.device_put(np.asarray(value)[index], device) for device, index in parts]
    return jax.make_array_from_single_device_arrays(np.shape(value), sharding, shards)


def batch_shardings(mesh: Mesh, batch: object) -> object:
    """Shardings in the structure of `batch`: leaves [M,R,T,...] with rows over data and fsdp and tokens over sequence;
    scalars are replicated."""
    rows = NamedSharding(mesh, P(None, ROWS, "sequence"))
    return jax.tree.map(lambda leaf: rows if np.ndim(leaf) >= 3 else replicated(mesh), batch)


def shard_batch(batch: object, mesh: Mesh) -> object:
    """A host batch, equal in all processes, on the mesh: one explicit transfer, in which each device gets its rows."""
    shardings = batch_shardings(mesh, batch)
    if not mesh.is_multi_process:
        return jax.device_put(batch, shardings)
    return jax.tree.map(place_host, batch, shardings)


def constrain(x: Array, mesh: Mesh | None, *spec: str | tuple[str, ...] | None) -> Array:
    """`with_sharding_constraint` for an intermediate; a no-op without a mesh. See `free_spec`."""
    if mesh is None:
        return x
    inside = jax.sharding.get_abstract_mesh()
    sharding = NamedSharding(mesh if inside.empty else inside, free_spec(*spec))
    return jax.lax.with_sharding_constraint(x, sharding)


def free_spec(*spec: str | tuple[str, ...] | None) -> P:
    """A spec without the axes over which an enclosing `shard_map` has already split."""
    split = jax.sharding.get_abstract_mesh().manual_axes
    parts = ((part,) if isinstance(part, str) else part or () for part in spec)
    return P(*(tuple(axis for axis in part if axis not in split) or None for part in parts))


def shard_map_free(function: Callable, mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable:
    """`jax.shard_map` over the axes that no enclosing one has split already; specs from `free_spec`. Replication is not
    checked."""
    inside = jax.sharding.get_abstract_mesh()
    return jax.shard_map(
        function,
        mesh=mesh if inside.empty else None,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(mesh.axis_names).difference(inside.manual_axes),
        check_vma=False,
    )
