"""`surrogate.old_logprobs current`: the ratio of the first update is 1 however far the sampler's numbers are off."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax.config import read_config
from grpo_roc_jax.learner.loss import batch_loss
from grpo_roc_jax.learner.pack import TrainBatch
from grpo_roc_jax.method.surrogate import Clip
from grpo_roc_jax.settings.cli import ConfigError

NOW = jnp.array([[-0.5, -1.0, -2.0, -3.0]])


def loss(old, choice):
    """((loss, sums), gradient) of one row; its first token is masked out."""
    row = jnp.ones((1, 4), jnp.float32)
    batch = TrainBatch(
        tokens=jnp.zeros((1, 4), jnp.int32),
        segment_ids=jnp.ones((1, 4), jnp.int32),
        positions=jnp.arange(4)[None],
        policy_mask=jnp.array([[False, True, True, True]]),
        ratio_segments=jnp.arange(4)[None],
        advantages=jnp.array([[1.0, 1.0, -2.0, 0.5]]),
        weights=0.25 * row,
        logprobs_old=old,
        logprobs_ref=jnp.zeros((1, 4)),
        count=jnp.int32(1),
    )
    surrogate = Clip(old_logprobs=choice)
    return jax.value_and_grad(lambda p: batch_loss(p, jnp.zeros_like(p), batch, surrogate), has_aux=True)(NOW)


def test_the_ratio_is_one_and_the_gap_is_still_measured():
    """Minus weight times advantage: a sampler that is off by half a nat would have clipped two of the tokens."""
    old = NOW + jnp.array([[0.0, -0.5, 0.5, 0.1]])
    (value, sums), gradient = loss(old, "current")
    np.testing.assert_allclose(value, -0.25 * (1.0 - 2.0 + 0.5), rtol=1e-6)
    np.testing.assert_array_equal(gradient, [[0.0, -0.25, 0.5, -0.125]])
    assert sums["ratio_max"] == 1 and sums["clip_low"] == sums["clip_high"] == 0
    np.testing.assert_allclose(sums["gap_max"], 0.5, rtol=1e-6)
    assert not np.array_equal(loss(old, "recorded")[1], gradient)


def test_equal_numbers_give_the_same_update():
    for one, other in zip(*(jax.tree.leaves(loss(NOW, choice)) for choice in ("current", "recorded")), strict=True):
        np.testing.assert_array_equal(one, other)


def test_several_steps_and_earlier_policies_are_refused():
    assert read_config("--surrogate.old_logprobs=current").surrogate.own_ratio
    with pytest.raises(ConfigError, match=r"old_logprobs = current with batch.updates several"):
        read_config("--surrogate.old_logprobs=current", "--batch.updates=several", "--batch.updates.epochs=2")
    with pytest.raises(ConfigError, match="recorded with scored"):
        read_config("--surrogate.old_logprobs=current", "--rollout.step_limit=stream")
