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


def test_mesh_takes_what_is_left_and_is_auto():
    mesh = make_mesh(ShardingConfig(data=-1, fsdp=2, tensor=2))
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "sequence": 1, "tensor": 2}
    assert mesh.axis_types == (AxisType.Auto,) * 4
    assert set(dict(make_mesh(ShardingConfig(), jax.devices()[:1]).shape).values()) == {1}


def test_rows_go_over_data_and_fsdp_and_slots_over_sequence_too():
    mesh = make_mesh(ShardingConfig(fsdp=2, sequence=2))
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "sequence": 2, "tensor": 1}
    assert row_shards(mesh) == 4 and slot_shards(mesh) == 8


@pytest.mark.parametrize("axes", [(3, 1, 1), (-1, 3, 1), (4, 4, 1), (-1, 16, 1)])
def test_impossible_meshes_are_refused_with_numbers(axes):
    with pytest.raises(ValueError, match=rf"{axes[0]} x {axes[1]} x 1 x {axes[2]} does not make 8 devices"):
        make_mesh(ShardingConfig(*axes))


def test_config_refuses_zero():
    with pytest.raises(ValueError, match=r"sharding\.data = 0"):
        ShardingConfig(data=0)
    with pytest.raises(ValueError, match=r"fsdp\n.*greater than or equal to 1"):
        ShardingConfig(fsdp=-1)
    with pytest.raises(ValueError, match=r"sequence\n.*greater than or equal to 1"):
        ShardingConfig(sequence=0)


def test_a_mesh_axis_is_used_once_per_array():
    shared = ("fsdp", "sequence")
    assert axes_to_spec(("vocab", "embed")) == P(("tensor", *shared), None)
    assert axes_to_spec(("embed", "vocab")) == P(None, ("tensor", *shared))
    assert axes_to_spec(("layers", "embed", "heads", None)) == P(None, shared, "tensor", None)
    assert axes_to_spec(("layers", "mlp", "embed")) == P(None, "tensor", shared)
    assert axes_to_spec(("layers", "embed")) == P(None, shared)


@pytest.mark.parametrize(
    ("axes", "name", "remedy"),
    [
        ((1, 1, 8), "heads = 4 is not divisible by sharding.tensor = 8", "lower sharding.tensor to 4"),
        ((1, 1, 1, 8), None, None),
        ((1, 8, 1), None, None),
    ],
)
def test_models_that_do_not_divide_are_refused(axes, name, remedy):
    mesh = make_mesh(ShardingConfig(*axes))
    if name is None:
        param_shardings(MODEL, mesh)
        return
    with pytest.raises(ValueError, match=f"{name}; {remedy}"):
        param_shardings(MODEL, mesh)


def test_the_refusal_of_an_odd_vocabulary_names_the_padded_size():
    mesh = make_mesh(ShardingConfig(data=2, fsdp=2, tensor=2))
    with pytest.raises(ValueError, match=r"vocab_size = 25 is not divisible by .* = 4; lower .* to 1 .* padded to 28"):
        param_shardings(ModelConfig(vocab_size=25), mesh)


def test_each_device_holds_its_share():
    params = random_params(MODEL)
    for axes in ((2, 2, 2), (2, 1, 2, 2), (2, 2, 1, 2)):
        placed = jax.device_put(params, param_shardings(MODEL, make_mesh(ShardingConfig(*axes))))
        for leaf in (placed["embed"], placed["unembed"], placed["layers"]["wq"], placed["layers"]["w_down"]):
            assert leaf.addressable_shards[0].data.size == leaf.size // 4


def test_rows_are_split_and_scalars_are_everywhere():
    mesh = make_mesh(ShardingConfig(data=2, sequence=2, tensor=2))
    batch = shard_batch({"tokens": np.zeros((3, 8, 6), np.int32), "count": np.int32(2)}, mesh)
    assert batch["tokens"].addressable_shards[0].data.shape == (3, 4, 3)
    assert batch["count"].sharding.is_fully_replicated and jnp.ndim(batch["count"]) == 0
