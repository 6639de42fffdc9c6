"""Meshes, the table of logical axes, copies of heads, and the order of devices in a slice."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from grpo_roc_jax.engine.publish import Publisher, sampler_config
from grpo_roc_jax.model import sharding as meshes
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh, param_shardings
from grpo_roc_jax.model.torus import closed_path, distance, mean_hops, torus_order
from tests.helpers.reference import random_params

MODEL = ModelConfig(d_model=16, heads=4, kv_heads=2, head_dim=4, d_ff=32, vocab_size=24, tie_embeddings=False)
FEW = replace(MODEL, layers=1, heads=8, vocab_size=40, tie_embeddings=True, qkv_bias=True, qk_norm="whole")


def test_a_mesh_takes_what_is_left_and_is_auto():
    """Rows go over data and fsdp, slots over sequence too."""
    for sharding, shape, rows, slots in (
        ({"data": -1, "fsdp": 2, "tensor": 2}, (2, 2, 1, 2), 4, 4),
        ({"fsdp": 2, "sequence": 2}, (2, 2, 2, 1), 4, 8),
    ):
        mesh = make_mesh(ShardingConfig(**sharding))
        assert dict(mesh.shape) == dict(zip(("data", "fsdp", "sequence", "tensor"), shape, strict=True))
        assert mesh.axis_types == (AxisType.Auto,) * 4
        assert (meshes.row_shards(mesh), meshes.slot_shards(mesh)) == (rows, slots)
        batch = meshes.shard_batch({"tokens": np.zeros((3, 8, 6), np.int32), "count": np.int32(2)}, mesh)
        assert batch["tokens"].addressable_shards[0].data.shape == (3, 8 // rows, 6 // shape[2])
        assert batch["count"].sharding.is_fully_replicated and jnp.ndim(batch["count"]) == 0


def test_meshes_and_models_that_do_not_divide_are_refused_with_numbers():
    odd = replace(MODEL, vocab_size=25)
    for sharding, model, message in (
        ({"data": 3}, MODEL, "3 x 1 x 1 x 1 does not make 8 devices"),
        ({"tensor": 8}, MODEL, r"heads = 4 is not divisible by sharding.tensor = 8; lower sharding.tensor to 4"),
        ({"fsdp": 4}, odd, r"size = 25 is not divisible by .* = 4; lower .* to 1 .* padded to 28"),
    ):
        with pytest.raises(ValueError, match=message):
            param_shardings(model, make_mesh(ShardingConfig(**sharding)))


def test_parameters_hold_a_head_once_and_the_sampler_a_copy_for_each_device():
    """Where `tensor` has more devices than there are key-value heads."""
    mesh = make_mesh(ShardingConfig(fsdp=2, tensor=4))
    params = jax.device_put(random_params(FEW, seed=3), param_shardings(FEW, mesh))
    published = Publisher(FEW, mesh, 1e-5).publish(params, 1)  # compares log-probabilities with the trainer's
    layer = published.params["layers"][0]
    assert sampler_config(FEW, mesh).kv_heads == 4
    for name, axis in (("wk", 1), ("bv", 0), ("k_norm", 0)):
        leaf = np.asarray(params["layers"][name][0])
        np.testing.assert_array_equal(layer[name], np.repeat(leaf, 2, axis))
        assert layer[name].sharding.shard_shape(layer[name].shape)[axis] == 1


class Device(SimpleNamespace):  # what the order reads of a device
    __hash__ = object.__hash__


def slice_of(grid):
    """Devices of a slice as JAX lists them: hosts of 2 x 2 x 1 are numbered along x, then y, then z."""
    devices = []
    for id, (z, y, x) in enumerate(itertools.product(*map(range, reversed(grid)))):
        process = x // 2 + grid[0] // 2 * (y // 2 + grid[1] // 2 * z)
        devices.append(Device(coords=(x, y, z), process_index=process, id=id, platform="tpu", device_kind="tpu"))
    return devices


def test_neighbors_of_the_mesh_are_neighbors_of_the_torus():
    """Mean links between neighbors on `fsdp` and on `tensor`, without links around the torus."""

    def hops(ordered):
        mesh = np.array(ordered, object).reshape(-1, 4)
        return mean_hops(mesh.T.tolist()), mean_hops(mesh.tolist())

    v5p = ((4, 4, 4), 3.375, 1.25), ((4, 4, 8), 3.4375, 1.125), ((4, 8, 8), 3.71875, 1.125)
    flat = ((8, 8, 1), 3.75, 2.0), ((4, 4, 1), 3.0, 2.0), ((8, 16, 1), 3.875, 2.0)
    for grid, by_number, fsdp in v5p + flat:
        devices = slice_of(grid)
        assert hops(sorted(devices, key=lambda device: (device.process_index, device.id))) == (by_number, 1.5)
        assert hops(torus_order(devices[::-1])) == (fsdp, 1.0)


def test_a_path_visits_every_place_and_closes_where_the_grid_allows_it():
    for grid in [*itertools.product(range(1, 6), repeat=3), (3,), (2, 5), (4, 4)]:
        path = closed_path(grid)
        assert sorted(path) == list(itertools.product(*map(range, grid))), grid
        assert all(distance(a, b) == 1 for a, b in itertools.pairwise(path)), grid
        if len(path) % 2 == 0 and sum(side > 1 for side in grid) > 1:  # no closed path has an odd number of places
            assert distance(path[0], path[-1]) == 1, grid


def test_devices_of_a_process_stay_a_block_of_the_mesh():
    mesh = make_mesh(ShardingConfig(fsdp=8, tensor=2), slice_of((4, 4, 2)))
    for process in range(8):
        assert {d.process_index for d in meshes.process_mesh(mesh, process).devices.flat} == {process}
