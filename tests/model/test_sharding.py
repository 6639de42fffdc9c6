"""Meshes, the table of logical axes, and errors. test_update.py checks equal numbers on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.sharding import (
    ShardingConfig,
    axes_to_spec,
    make_mesh,
    param_shardings,
    row_shards,
    shard_batch,
    slot_shards,
)
from tests.helpers.reference import random_params

MODEL = ModelConfig(d_model=16, heads=4, kv_heads=2, head_dim=4, d_ff=32, vocab_size=24, tie_embeddings=False)


@pytest.mark.parametrize(
    ("sharding", "shape", "rows", "slots"),
    [
        (ShardingConfig(data=-1, fsdp=2, tensor=2), (2, 2, 1, 2), 4, 4),
        (ShardingConfig(fsdp=2, sequence=2), (2, 2, 2, 1), 4, 8),
    ],
)
def test_a_mesh_takes_what_is_left_and_is_auto(sharding, shape, rows, slots):
    """Rows go over data and fsdp, slots over sequence too."""
    mesh = make_mesh(sharding)
    assert dict(mesh.shape) == dict(zip(("data", "fsdp", "sequence", "tensor"), shape, strict=True))
    assert mesh.axis_types == (AxisType.Auto,) * 4
    assert (row_shards(mesh), slot_shards(mesh)) == (rows, slots)


@pytest.mark.parametrize(
    ("sharding", "message"),
    [
        ({"data": 3}, "3 x 1 x 1 x 1 does not make 8 devices"),
        ({"fsdp": 3}, "-1 x 3 x 1 x 1 does not make 8 devices"),
        ({"fsdp": 16}, "-1 x 16 x 1 x 1 does not make 8 devices"),
        ({"data": 0}, r"sharding\.data = 0"),
        ({"fsdp": -1}, r"fsdp\n.*greater than or equal to 1"),
        ({"sequence": 0}, r"sequence\n.*greater than or equal to 1"),
    ],
)
def test_impossible_meshes_are_refused_with_numbers(sharding, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(ShardingConfig(**sharding))


def test_a_mesh_axis_is_used_once_per_array():
    shared = ("fsdp", "sequence")
    assert axes_to_spec(("vocab", "embed")) == P(("tensor", *shared), None)
    assert axes_to_spec(("embed", "vocab")) == P(None, ("tensor", *shared))
    assert axes_to_spec(("layers", "embed", "heads", None)) == P(None, shared, "tensor", None)
    assert axes_to_spec(("layers", "mlp", "embed")) == P(None, "tensor", shared)
    assert axes_to_spec(("layers", "embed")) == P(None, shared)


@pytest.mark.parametrize(
    ("model", "axes", "message"),
    [
        (MODEL, (1, 1, 8), r"heads = 4 is not divisible by sharding.tensor = 8; lower sharding.tensor to 4"),
        (
            ModelConfig(vocab_size=25),
            (2, 2, 2),
            r"vocab_size = 25 is not divisible by .* = 4; lower .* to 1 .* padded to 28",
        ),
    ],
)
def test_models_that_do_not_divide_are_refused(model, axes, message):
    with pytest.raises(ValueError, match=message):
        param_shardings(model, make_mesh(ShardingConfig(*axes)))


@pytest.mark.parametrize("axes", [(2, 2, 2), (2, 1, 2, 2), (2, 2, 1, 2), (1, 8, 1), (1, 1, 1, 8)], ids=str)
def test_each_device_holds_its_share(axes):
    placed = jax.device_put(random_params(MODEL), param_shardings(MODEL, make_mesh(ShardingConfig(*axes))))
    for leaf in (placed["embed"], placed["unembed"], placed["layers"]["wq"], placed["layers"]["w_down"]):
        assert leaf.addressable_shards[0].data.size == leaf.size // (8 // axes[0])


def test_rows_are_split_and_scalars_are_everywhere():
    mesh = make_mesh(ShardingConfig(data=2, sequence=2, tensor=2))
    batch = shard_batch({"tokens": np.zeros((3, 8, 6), np.int32), "count": np.int32(2)}, mesh)
    assert batch["tokens"].addressable_shards[0].data.shape == (3, 4, 3)
    assert batch["count"].sharding.is_fully_replicated and jnp.ndim(batch["count"]) == 0
