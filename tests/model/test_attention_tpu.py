"""The TPU kernels in Pallas' interpret mode against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax.model.attention import attend_reference
from grpo_roc_jax.model.attention_tpu import make_splash
from grpo_roc_jax.model.parallel import columns_of

B, T, N, K, H = 2, 512, 4, 2, 8


@functools.cache
def inputs():
    """Two packed rows; segments begin and end inside blocks of 128, and some blocks see none before them."""
    rng = np.random.default_rng(0)
    heads = [jnp.asarray(rng.normal(size=(B, T, n, H)), jnp.float32) for n in (N, K, K, N)]
    segment_ids = np.zeros((B, T), np.int32)
    segment_ids[:, :150], segment_ids[0, 150:300], segment_ids[0, 300:490], segment_ids[1, 150:] = 1, 2, 3, 2
    return *heads, jnp.asarray(segment_ids)


@functools.partial(jax.jit, static_argnums=0)
def pulled(attend, q, k, v, d_out, segment_ids, window, columns):
    """(context, gradients) of queries in those columns, padding left out."""
    real = (segment_ids > 0)[:, columns, None, None]
    out, pull = jax.vjp(lambda *qkv: jnp.where(real, attend(*qkv, segment_ids, window, columns), 0), q, k, v)
    return out, *pull(d_out)


@pytest.mark.parametrize(
    ("made", "given"),
    [
        ({"largest": 256, "cap": 1.5}, {"cap": 1.5}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ({"largest": 256}, {}),
                ({"largest": 128, "windows": (40,)}, {"window": 40}),
                ({"largest": 128, "windows": (200, 0)}, {"window": 200}),
                ({"largest": 128, "windows": (200, 0)}, {"window": 0}),
                ({"parts": 2}, {"device": 0}),
                ({"parts": 2}, {"device": 1}),
            ]
        ),
    ],
    ids=str,
)
def test_splash_equals_the_reference_forward_and_backward(made, given):
    """Of all layers, of one with its window, and on the share of a device."""
    q, k, v, d_out, segment_ids = inputs()
    columns = columns_of(given["device"], T, 2) if "device" in given else jnp.arange(T)
    window = jnp.int32(given["window"]) if "window" in given else None
    rows = (q[:, columns], k, v, d_out[:, columns], segment_ids, window, columns)
    slow = functools.partial(attend_reference, cap=given.get("cap", 0.0))
    splash = make_splash(T, "cpu", **made, interpret=True)
    for got, wanted in zip(pulled(splash, *rows), pulled(slow, *rows), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-5 * float(jnp.abs(wanted).max()))


@pytest.mark.parametrize(
    ("length", "parts", "message"),
    [
        (1000, 1, r"row_length = 1000: must be a multiple of 128, such as 1024"),
        (1280, 4, r"must be a multiple of 1024 of 2 x sharding.sequence = 8 runs of 128 tokens, such as 2048"),
    ],
)
def test_rows_that_the_kernels_cannot_take_are_refused(length, parts, message):
    with pytest.raises(ValueError, match=message):
        make_splash(length, "tpu", parts=parts)
