"""Meshes, the table of logical axes, copies of heads, and the order of devices in a slice."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType

from grpo_roc_jax.engine.publish import Publisher, repeat_heads, sampler_config
from grpo_roc_jax.model import sharding as meshes
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh, param_shardings
from grpo_roc_jax.model.torus import closed_path, distance, mean_hops, torus_order
from tests.helpers.reference import random_params, random_rows
from tests.learner import test_update

MODEL = ModelConfig(d_model=16, heads=4, kv_heads=2, head_dim=4, d_ff=32, vocab_size=24, tie_embeddings=False)
CUBE = {"data": 2, "fsdp": 2, "tensor": 2}
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


@pytest.mark.parametrize(
    ("sharding", "model", "message"),
    [
        ({"data": 3}, MODEL, "3 x 1 x 1 x 1 does not make 8 devices"),
        ({"fsdp": 3}, MODEL, "-1 x 3 x 1 x 1 does not make 8 devices"),
        ({"fsdp": 16}, MODEL, "-1 x 16 x 1 x 1 does not make 8 devices"),
        ({"data": 0}, MODEL, r"sharding\.data = 0"),
        ({"fsdp": -1}, MODEL, r"fsdp\n.*greater than or equal to 1"),
        ({"sequence": 0}, MODEL, r"sequence\n.*greater than or equal to 1"),
        ({"tensor": 8}, MODEL, r"heads = 4 is not divisible by sharding.tensor = 8; lower sharding.tensor to 4"),
        (CUBE, ModelConfig(vocab_size=25), r"size = 25 is not divisible by .* = 4; lower .* to 1 .* padded to 28"),
        ({"tensor": 4}, replace(FEW, heads=12, kv_heads=3), r"kv_heads = 3 is not divisible by sharding\.tensor = 4"),
    ],
)
def test_meshes_and_models_that_do_not_divide_are_refused_with_numbers(sharding, model, message):
    with pytest.raises(ValueError, match=message):
        param_shardings(model, make_mesh(ShardingConfig(**sharding)))


def test_a_mesh_axis_is_used_once_per_array():
    shared = ("fsdp", "sequence")
    assert meshes.axes_to_spec(("vocab", "embed")) == P(("tensor", *shared), None)
    assert meshes.axes_to_spec(("embed", "vocab")) == P(None, ("tensor", *shared))
    assert meshes.axes_to_spec(("layers", "embed", "heads", None)) == P(None, shared, "tensor", None)
    assert meshes.axes_to_spec(("layers", "mlp", "embed")) == P(None, "tensor", shared)
    assert meshes.axes_to_spec(("layers", "embed")) == P(None, shared)


@pytest.mark.parametrize("axes", [(2, 2, 2), (2, 1, 2, 2), (2, 2, 1, 2), (1, 8, 1), (1, 1, 1, 8)], ids=str)
def test_each_device_holds_its_share(axes):
    placed = jax.device_put(random_params(MODEL), param_shardings(MODEL, make_mesh(ShardingConfig(*axes))))
    for leaf in (placed["embed"], placed["unembed"], placed["layers"]["wq"], placed["layers"]["w_down"]):
        assert leaf.addressable_shards[0].data.size == leaf.size // (8 // axes[0])


def test_rows_are_split_and_scalars_are_everywhere():
    mesh = make_mesh(ShardingConfig(data=2, sequence=2, tensor=2))
    batch = meshes.shard_batch({"tokens": np.zeros((3, 8, 6), np.int32), "count": np.int32(2)}, mesh)
    assert batch["tokens"].addressable_shards[0].data.shape == (3, 4, 3)
    assert batch["count"].sharding.is_fully_replicated and jnp.ndim(batch["count"]) == 0


def test_parameters_hold_a_head_once_and_the_sampler_a_copy_for_each_device():
    """Where `tensor` has more devices than there are key-value heads."""
    few = replace(FEW, heads=12, kv_heads=3)
    assert [meshes.head_copies(few, tensor) for tensor in (1, 2, 3, 4, 6, 12)] == [1, 1, 1, 1, 2, 4]
    mesh = make_mesh(ShardingConfig(fsdp=2, tensor=4))
    places = param_shardings(FEW, mesh)["layers"]
    assert places["wk"].spec == P(None, ("fsdp", "sequence"), None, None)
    assert places["wq"].spec == P(None, ("fsdp", "sequence"), "tensor", None)
    params = jax.device_put(random_params(FEW, seed=3), param_shardings(FEW, mesh))
    published = Publisher(FEW, mesh, 1e-5).publish(params, 1)  # compares log-probabilities with the trainer's
    layer = published.params["layers"][0]
    assert sampler_config(FEW, mesh).kv_heads == 4
    for name, axis in (("wk", 1), ("wv", 1), ("bk", 0), ("bv", 0), ("k_norm", 0)):
        leaf = np.asarray(params["layers"][name][0])
        np.testing.assert_array_equal(layer[name], np.repeat(leaf, 2, axis))
        assert layer[name].sharding.shard_shape(layer[name].shape)[axis] == 1
    assert repeat_heads({"wq": 1}, FEW, 2) == {"wq": 1}


@pytest.mark.slow
@pytest.mark.parametrize("axes", [(1, 1, 4), (1, 1, 4, 2)], ids=str)
def test_gradients_are_those_of_one_device(axes):
    model, rows = replace(FEW, heads=4), random_rows(test_update.LENGTHS, 40)
    wanted = test_update.gradients(rows, model=model)
    test_update.assert_close(test_update.gradients(rows, axes, model=model), wanted)


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
    mesh = make_mesh(ShardingConfig(tensor=8), slice_of((4, 4, 2)))
    assert [d.process_index for d in mesh.devices.flat] == [n // 4 for n in range(32)], "processes that sample as one"


def test_devices_without_a_torus_have_no_order_of_their_own():
    cores, blocks, apart = (slice_of((4, 4, 1)) for _ in range(3))
    cores[3].coords, cores[3].process_index = cores[2].coords, cores[2].process_index
    blocks[0].process_index, blocks[-1].process_index = blocks[-1].process_index, blocks[0].process_index
    del apart[3].coords
    assert torus_order(cores) is torus_order(blocks) is torus_order(apart) is None
