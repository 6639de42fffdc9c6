"""Which links of a slice a collective uses: those along the sides of the torus that its devices extend over.

A collective over a block of chips sends along all sides of the block at once. Over devices that are no block, it sends
around a ring of them, and each step of the ring takes as many links as lie between two neighbors.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from grpo_roc_jax.model.sharding import slice_of
from grpo_roc_jax.model.torus import Point, distance, torus_order
from grpo_roc_jax.planner.topology import Topology, TopologyError

AXIS_GROUPS = {"": ("fsdp", "sequence"), "data": ("data",), "tensor": ("tensor",), "sequence": ("sequence",)}
"""Mesh axes that the devices of a collective differ in, by the axis that a plan by arithmetic names."""


@dataclass(frozen=True)
class Torus:
    """The chips of the devices of a mesh."""

    places: tuple[Point, ...]
    """Coordinates of each device, in the order of the mesh."""
    slices: tuple[int, ...]
    """The slice of each device."""
    ring_side: int
    """See `Chip.ring_side`."""

    @property
    def grid(self) -> Point:
        return tuple(1 + max(side) for side in zip(*self.places, strict=True))

    def _rings(self) -> list[int]:
        return [side if self.ring_side and side % self.ring_side == 0 else 0 for side in self.grid]

    def _links(self, covered: Sequence[int]) -> float:
        """Links of a chip, on average, along sides of which a group covers so many chips."""
        pairs = zip(covered, self._rings(), strict=True)
        return sum(2.0 if n == ring else 2.0 * (n - 1) / n for n, ring in pairs)

    def share(self, devices: Sequence[int]) -> float:
        """The part of a chip's links that a collective of these devices keeps busy; 1 within a chip."""
        here = [device for device in devices if self.slices[device] == self.slices[devices[0]]]
        points = list(dict.fromkeys(self.places[device] for device in here))
        values = [sorted(set(side)) for side in zip(*points, strict=True)]
        contiguous = [side[-1] - side[0] + 1 == len(side) for side in values]
        covered = [len(side) if run else n for side, run, n in zip(values, contiguous, self.grid, strict=True)]
        hops = 1.0
        if not all(contiguous) or math.prod(map(len, values)) != len(points):
            ring = zip(points, [*points[1:], points[0]], strict=True)
            hops = max(1.0, sum(distance(a, b, self._rings()) for a, b in ring) / len(points))
        links = self._links(covered)
        return min(1.0, links / hops / self._links(self.grid)) if links else 1.0


class _Planned(NamedTuple):
    coords: Point
    process_index: int
    id: int


def torus_of(mesh: Mesh | AbstractMesh, topology: Topology) -> Torus | None:
    """The torus of a mesh; None for GPUs, for a single chip, and where machines are no blocks of the slice."""
    if not topology.chip.tpu or math.prod(topology.grid) == 1:
        return None
    if isinstance(mesh, AbstractMesh):
        try:
            devices: list[Any] = _planned_devices(topology, mesh.shape["tensor"])
        except TopologyError:
            return None
        slices = tuple(np.arange(mesh.size) // (mesh.size // topology.slices))
    else:
        devices, slices = list(mesh.devices.flat), tuple(map(slice_of, mesh.devices.flat))
    places = tuple(tuple(getattr(device, "coords", None) or ()) for device in devices)
    return Torus(places, slices, topology.chip.ring_side) if all(places) else None


def _planned_devices(topology: Topology, tensor: int) -> list[_Planned]:
    """Devices of all slices in the order of `sharding.make_mesh`."""
    grid = (*topology.grid, 1, 1)[:3]
    host, cores = topology.host_bounds(), topology.chip.cores
    counts = [side // width for side, width in zip(grid, host, strict=True)]
    devices = []
    for point in np.ndindex(*reversed(grid)):
        coords = tuple(int(value) for value in reversed(point))
        x, y, z = (value // width for value, width in zip(coords, host, strict=True))
        process = x + counts[0] * (y + counts[1] * z)
        devices += [_Planned(coords, process, len(devices) + core) for core in range(cores)]
    devices.sort(key=lambda device: (device.process_index, device.id))
    return ((torus_order(devices) if tensor <= topology.per_process else None) or devices) * topology.slices


def axis_shares(mesh: Mesh | AbstractMesh, topology: Topology) -> dict[str, float]:
    """The part of a chip's links that a collective over each of `AXIS_GROUPS` uses."""
    torus = torus_of(mesh, topology)
    if torus is None:
        return dict.fromkeys(AXIS_GROUPS, 1.0)
    order, names = np.arange(mesh.size).reshape(tuple(mesh.shape.values())), list(mesh.shape)
    shares = {}
    for name, axes in AXIS_GROUPS.items():
        group = order[tuple(slice(None) if axis in axes else 0 for axis in names)]
        shares[name] = torus.share(group.ravel().tolist())
    return shares
