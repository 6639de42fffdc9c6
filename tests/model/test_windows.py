"""Attention windows that end inside a block, at its border and one token after it; frequencies of their layers."""

import jax
import jax.numpy as jnp
import numpy as np

from grpo_roc_jax.model.attention import AttentionBlocks, attend_blocked, attend_reference
from grpo_roc_jax.model.attention_mask import first_key_blocks
from grpo_roc_jax.model.config import ModelConfig, SlidingWindows
from grpo_roc_jax.model.rope_scaling import LinearRopeScaling
from grpo_roc_jax.model.rotary import rotary_frequencies, rotary_tables

BLOCK, T = 4, 20


def test_windows_up_to_twice_the_block_equal_the_reference():
    rng = np.random.default_rng(0)
    q, k, v, d_out = (rng.normal(size=(1, T, 2, 4)).astype(np.float32) for _ in range(4))
    segment_ids = jnp.asarray(np.repeat([1, 2], (14, 6))[None], jnp.int32)

    def both(attend):
        def run(window):
            out, pull = jax.vjp(lambda *qkv: attend(*qkv, segment_ids, window), q, k, v)
            return out, *pull(d_out)

        return jax.jit(run)

    blocked = both(lambda *given: attend_blocked(AttentionBlocks(BLOCK), *given))
    plain = both(attend_reference)
    for window in range(1, 2 * BLOCK + 2):
        for got, expected in zip(blocked(jnp.int32(window)), plain(jnp.int32(window)), strict=True):
            np.testing.assert_allclose(got, expected, atol=1e-5, err_msg=f"window {window}")


def test_the_first_block_that_a_window_reaches():
    segment_ids = jnp.ones((1, T), jnp.int32)
    for window in range(1, 2 * BLOCK + 2):
        expected = [max(0, first - window + 1) // BLOCK for first in range(0, T, BLOCK)]
        assert first_key_blocks(segment_ids, BLOCK, jnp.int32(window)).tolist() == expected, window


def test_layers_with_a_window_keep_their_frequencies_where_the_others_are_rescaled():
    windows = SlidingWindows((8, 0), local_theta=100.0)
    shape = {"d_model": 8, "layers": 2, "heads": 1, "kv_heads": 1, "head_dim": 4, "d_ff": 8, "vocab_size": 8}
    model = ModelConfig(**shape, rope_theta=10_000.0, windows=windows, rope_scaling=LinearRopeScaling(8.0))
    np.testing.assert_allclose(rotary_frequencies(model, "local"), [1.0, 0.1], rtol=1e-6)
    np.testing.assert_allclose(rotary_frequencies(model, "plain"), [1 / 8, 0.01 / 8], rtol=1e-6)
    tables = rotary_tables(jnp.arange(3), model)
    np.testing.assert_allclose(tables["local"][1][2], np.sin([2.0, 0.2]), rtol=1e-6)
    np.testing.assert_allclose(tables["plain"][1][2], np.sin([2 / 8, 0.02 / 8]), rtol=1e-5)
