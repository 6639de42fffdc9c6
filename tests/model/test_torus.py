"""The order of devices in a slice: rings of single links within a host, a closed path of hosts."""

import itertools

import numpy as np
import pytest

from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh, process_mesh
from grpo_roc_jax.model.torus import closed_path, distance, mean_hops, torus_order


class Device:
    """What the order reads of a device."""

    platform = device_kind = "tpu"

    def __init__(self, coords, process_index, id):
        self.coords, self.process_index, self.id = coords, process_index, id


def slice_of(grid, host=(2, 2, 1)):
    """Devices of a slice as JAX lists them: hosts are numbered along x, then y, then z."""
    counts = [side // size for side, size in zip(grid, host, strict=True)]
    devices = []
    for z, y, x in itertools.product(*map(range, reversed(grid))):
        at = [value // size for value, size in zip((x, y, z), host, strict=True)]
        process = at[0] + counts[0] * (at[1] + counts[1] * at[2])
        devices.append(Device((x, y, z), process, len(devices)))
    return devices


def hops(ordered, tensor=4):
    """(mean links between neighbors on `fsdp`, on `tensor`), without links around the torus."""
    mesh = np.empty(len(ordered), object)
    mesh[:] = ordered
    mesh = mesh.reshape(-1, tensor)
    return mean_hops(mesh.T.tolist()), mean_hops(mesh.tolist())


@pytest.mark.parametrize(
    ("grid", "by_number", "fsdp"),
    [
        ((4, 4, 4), 3.375, 1.25),  # v5p:4x4x4
        ((4, 4, 8), 3.4375, 1.125),
        ((4, 8, 8), 3.71875, 1.125),
        ((8, 8, 1), 3.75, 2.0),  # v6e:8x8
        ((4, 4, 1), 3.0, 2.0),  # v5e:4x4
        ((8, 16, 1), 3.875, 2.0),
    ],
)
def test_neighbors_of_the_mesh_are_neighbors_of_the_torus(grid, by_number, fsdp):
    devices = slice_of(grid)
    assert hops(sorted(devices, key=lambda device: (device.process_index, device.id))) == (by_number, 1.5)
    assert hops(torus_order(devices[::-1])) == (fsdp, 1.0)


@pytest.mark.parametrize("grid", [g for g in itertools.product(range(1, 6), repeat=3)] + [(3,), (2, 5), (4, 4)])
def test_a_path_visits_every_place_and_closes_where_the_grid_allows_it(grid):
    path = closed_path(grid)
    assert sorted(path) == list(itertools.product(*map(range, grid)))
    assert all(distance(a, b) == 1 for a, b in itertools.pairwise(path))
    sides = [side for side in grid if side > 1]
    if len(path) % 2 == 0 and len(sides) > 1:  # no closed path has an odd number of places
        assert distance(path[0], path[-1]) == 1


def test_devices_of_a_process_stay_a_block_of_the_mesh():
    mesh = make_mesh(ShardingConfig(fsdp=8, tensor=2), slice_of((4, 4, 2)))
    for process in range(8):
        assert {d.process_index for d in process_mesh(mesh, process).devices.flat} == {process}


def test_processes_that_sample_as_one_keep_their_order():
    mesh = make_mesh(ShardingConfig(tensor=8), slice_of((4, 4, 2)))
    assert [d.process_index for d in mesh.devices.flat] == [n // 4 for n in range(32)]


@pytest.mark.parametrize("change", ["coords", "cores", "block"])
def test_devices_without_a_torus_have_no_order_of_their_own(change):
    devices = slice_of((4, 4, 1))
    if change == "coords":
        del devices[3].coords
    elif change == "cores":
        devices[3].coords, devices[3].process_index = devices[2].coords, devices[2].process_index
    else:
        devices[0].process_index, devices[-1].process_index = devices[-1].process_index, devices[0].process_index
    assert torus_order(devices) is None
