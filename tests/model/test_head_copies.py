"""More devices over `tensor` than key-value heads: parameters hold a head once, the sampler a copy for each device."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from grpo_roc_jax.engine.publish import Publisher, repeat_heads, sampler_config
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.sharding import ShardingConfig, head_copies, make_mesh, param_shardings
from tests.helpers import reference
from tests.learner import test_update

FEW = ModelConfig(
    d_model=16, layers=1, heads=8, kv_heads=2, head_dim=4, d_ff=24, vocab_size=40, qkv_bias=True, qk_norm="whole"
)


def test_how_often_a_head_is_repeated():
    few = dataclasses.replace(FEW, heads=12, kv_heads=3)
    assert [head_copies(few, tensor) for tensor in (1, 2, 3, 4, 6, 12)] == [1, 1, 1, 1, 2, 4]
    with pytest.raises(ValueError, match=r"kv_heads = 3 is not divisible by sharding\.tensor = 4"):
        param_shardings(few, make_mesh(ShardingConfig(tensor=4)))


def test_parameters_hold_a_head_once_and_the_sampler_a_copy_for_each_device():
    mesh = make_mesh(ShardingConfig(fsdp=2, tensor=4))
    places = param_shardings(FEW, mesh)["layers"]
    assert places["wk"].spec == P(None, ("fsdp", "sequence"), None, None)
    assert places["wq"].spec == P(None, ("fsdp", "sequence"), "tensor", None)
    params = jax.device_put(reference.random_params(FEW, seed=3), param_shardings(FEW, mesh))
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
    model, rows = dataclasses.replace(FEW, heads=4), reference.random_rows(test_update.LENGTHS, 40)
    wanted = test_update.gradients(rows, model=model)
    test_update.assert_close(test_update.gradients(rows, axes, model=model), wanted)
