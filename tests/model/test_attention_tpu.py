"""The TPU kernels in Pallas' interpret mode against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax.model.attention import attend_reference, make_attention
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


def assert_equal_to_reference(attend, window=None, columns=None, cap=0.0):
    q, k, v, d_out, segment_ids = inputs()
    columns = jnp.arange(T) if columns is None else columns
    window = None if window is None else jnp.int32(window)
    given = (q[:, columns], k, v, d_out[:, columns], segment_ids, window, columns)
    slow = functools.partial(attend_reference, cap=cap)
    for got, wanted in zip(pulled(attend, *given), pulled(slow, *given), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-5 * float(jnp.abs(wanted).max()))


@pytest.mark.parametrize("cap", [pytest.param(0.0, marks=pytest.mark.slow), 1.5])
def test_splash_equals_the_reference_forward_and_backward(cap):
    assert_equal_to_reference(make_splash(T, "cpu", largest=256, cap=cap, interpret=True), cap=cap)


@pytest.mark.slow
@pytest.mark.parametrize(("windows", "window"), [((40,), 40), ((200, 0), 200), ((200, 0), 0)])
def test_splash_takes_the_window_of_the_layer(windows, window):
    assert_equal_to_reference(make_splash(T, "cpu", windows=windows, largest=128, interpret=True), window)


@pytest.mark.slow
@pytest.mark.parametrize("device", [0, 1])
def test_splash_on_the_share_of_a_device(device):
    attend = make_splash(T, "cpu", parts=2, interpret=True)
    assert_equal_to_reference(attend, columns=columns_of(device, T, 2))


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


def test_splash_is_for_tpus():
    with pytest.raises(ValueError, match="'splash' on cpu"):
        make_attention("splash", 1024, "cpu")
    make_attention("splash", 1024, "tpu")
