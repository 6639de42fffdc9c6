"""Every attention path against the reference, and the reference against loops in NumPy; TPU kernels are interpreted."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax.model import attention
from grpo_roc_jax.model.attention import AttentionBlocks, make_attention
from grpo_roc_jax.model.attention_mask import first_key_blocks
from grpo_roc_jax.model.attention_tpu import make_splash
from grpo_roc_jax.model.config import ModelConfig, SlidingWindows
from grpo_roc_jax.model.parallel import columns_of
from grpo_roc_jax.model.rope_scaling import LinearRopeScaling
from grpo_roc_jax.model.rotary import rotary_frequencies, rotary_tables
from tests.helpers import reference

attend_reference = jax.jit(attention.attend_reference, static_argnames="cap")
attend_blocked = jax.jit(attention.attend_blocked, static_argnums=0)

SLOW = pytest.mark.slow
SHAPES = [(1, 7, 2, 2, 4), (2, 33, 4, 2, 8), (3, 64, 6, 1, 4)]


def inputs(B, T, N, K, H, seed=0):
    rng = np.random.default_rng(seed)
    q, k, v, d_out = (rng.normal(size=(B, T, heads, H)).astype(np.float32) for heads in (N, K, K, N))
    # Segments of random lengths, the last of each row padding.
    segment_ids = np.zeros((B, T), np.int32)
    for row in segment_ids:
        cuts = np.sort(rng.choice(np.arange(1, T), size=3, replace=False))
        row[:] = np.searchsorted(cuts, np.arange(T), side="right") + 1
        row[cuts[-1] :] = 0
    return q, k, v, segment_ids, d_out


@pytest.mark.parametrize(("shape", "cap"), [*((shape, 0.0) for shape in SHAPES), (SHAPES[1], 1.5)])
def test_reference_equals_loops(shape, cap):
    q, k, v, segment_ids, _ = inputs(*shape)
    got = attend_reference(q, k, v, segment_ids, cap=cap)
    for b in range(shape[0]):
        heads = (x[b].astype(np.float64) for x in (q, k, v))
        wanted = reference.attention(*heads, segment_ids[b], shape[2] // shape[3], cap)
        np.testing.assert_allclose(got[b], wanted, atol=1e-5)


@partial(jax.jit, static_argnums=0)
def pulled(attend, q, k, v, d_out, segment_ids, window=None, *columns):
    """(context of queries in those columns, gradients of q, k, v), padding left out."""
    real = (segment_ids > 0)[:, columns[0] if columns else slice(None), None, None]
    out, pull = jax.vjp(lambda *qkv: jnp.where(real, attend(*qkv, segment_ids, window, *columns), 0), q, k, v)
    return out, *pull(d_out)


WINDOWS = range(1, 10)
"""They end inside a block of 4, at its border and one token after it; up to twice the block."""


@pytest.mark.parametrize(
    ("shape", "blocks", "windows"),
    [
        *((shape, blocks, [None]) for shape in SHAPES for blocks in (AttentionBlocks(5, cap=1.5), AttentionBlocks(16))),
        pytest.param(SHAPES[1], AttentionBlocks(128), [None], marks=SLOW),
        ((1, 20, 2, 2, 4), AttentionBlocks(4), [0, *WINDOWS]),
    ],
    ids=str,
)
def test_blocked_equals_reference_forward_and_backward(shape, blocks, windows):
    *qkv, segment_ids, d_out = inputs(*shape)
    paths = partial(attend_blocked, blocks), partial(attend_reference, cap=blocks.cap)
    for window in (window if window is None else jnp.int32(window) for window in windows):
        both = (pulled(attend, *qkv, d_out, segment_ids, window) for attend in paths)
        for got, wanted in zip(*both, strict=True):
            scale = float(np.abs(wanted).max()) if window is None else 1.0  # a window of 1 has no gradient of queries
            np.testing.assert_allclose(got, wanted, atol=1e-5 * scale, err_msg=f"window {window}")


def test_what_cudnn_is_asked_for_is_the_reference(monkeypatch):
    """The same call of the public interface, computed by plain XLA: cuDNN itself needs a GPU."""
    calls, plain = [], jax.nn.dot_product_attention

    def without_device(*args, implementation, **settings):
        calls.append((implementation, settings["is_causal"]))
        return plain(*args, implementation="xla", **settings)

    monkeypatch.setattr(jax.nn, "dot_product_attention", without_device)
    q, k, v, segment_ids = map(jnp.asarray, inputs(2, 33, 4, 2, 8)[:4])
    real = np.asarray(segment_ids) > 0
    for window in (None, jnp.int32(5)):
        paths = jax.jit(attention.attend_cudnn), attend_reference
        got, wanted = (np.asarray(path(q, k, v, segment_ids, window)) for path in paths)
        np.testing.assert_allclose(got[real], wanted[real], atol=1e-5)
    assert calls == [("cudnn", True)] * 2, "the half above the diagonal is left out"


def test_blocked_bfloat16_is_as_close_as_the_reference():
    q, k, v, segment_ids, _ = inputs(2, 64, 4, 2, 8)
    truth, real = np.asarray(attend_reference(q, k, v, segment_ids)), segment_ids > 0
    low = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    paths = attend_reference, partial(attend_blocked, AttentionBlocks(16))
    errors = [float(np.abs(np.float32(attend(*low, segment_ids)) - truth)[real].max()) for attend in paths]
    assert errors[1] < 1.5 * errors[0] < 0.1


def test_blocked_never_holds_the_score_matrix():
    """Temporary bytes of forward and backward are a twentieth of the reference's, and grow no faster than T."""

    def temp_bytes(attend, T):
        args = [jax.ShapeDtypeStruct((1, T, heads, 16), jnp.float32) for heads in (4, 2, 2)]
        segment_ids = jax.ShapeDtypeStruct((1, T), jnp.int32)
        grad = jax.grad(lambda q, k, v, s: attend(q, k, v, s).sum(), argnums=(0, 1, 2))
        return jax.jit(grad).lower(*args, segment_ids).compile().memory_analysis().temp_size_in_bytes

    blocked = [temp_bytes(partial(attend_blocked, AttentionBlocks(128)), T) for T in (1024, 2048)]
    assert blocked[0] < 0.05 * temp_bytes(attend_reference, 1024)
    assert blocked[1] < 2.1 * blocked[0]


def test_first_key_blocks_by_hand():
    """Each block looks back to the start of its earliest segment in any row that is not empty, or to its window's."""
    rows = np.array([[1, 1, 1, 2, 2, 2, 3, 3, 4, 4, 4, 4], [1, 1, 1, 1, 2, 0, 0, 0, 0, 0, 0, 0], [0] * 12], np.int32)
    assert first_key_blocks(jnp.asarray(rows), 4).tolist() == [0, 0, 2]
    assert first_key_blocks(jnp.asarray(rows[1:]), 4).tolist() == [0, 1, 2]
    for window in WINDOWS:
        expected = [max(0, first - window + 1) // 4 for first in range(0, 20, 4)]
        assert first_key_blocks(jnp.ones((1, 20), jnp.int32), 4, jnp.int32(window)).tolist() == expected, window


def test_paths_by_name():
    for name, length, platform, cap, parts, message in (
        ("flash", 64, "cpu", 0.0, 1, r"'flash'.*auto, blocked, splash, reference, cudnn"),
        ("cudnn", 64, "gpu", 50.0, 1, r"attention_cap = 50.0: the kernel caps no scores; take auto, blocked or ref"),
        ("splash", 1024, "cpu", 0.0, 1, "'splash' on cpu"),
        ("splash", 1000, "tpu", 0.0, 1, r"row_length = 1000: must be a multiple of 128, such as 1024"),
        ("splash", 1280, "tpu", 0.0, 4, r"of 1024 of 2 x sharding.sequence = 8 runs of 128 tokens, such as 2048"),
    ):
        with pytest.raises(ValueError, match=message):
            make_attention(name, length, platform, cap=cap, parts=parts)
    make_attention("splash", 1024, "tpu")
    q, k, v, segment_ids, _ = inputs(1, 300, 2, 2, 4)
    for name in ("auto", "blocked", "reference"):
        got = jax.jit(make_attention(name, 300, "cpu"))(q, k, v, segment_ids)
        wanted = np.asarray(attend_reference(q, k, v, segment_ids))
        np.testing.assert_allclose(np.asarray(got)[segment_ids > 0], wanted[segment_ids > 0], atol=1e-5)


def test_layers_with_a_window_keep_their_frequencies_where_the_others_are_rescaled():
    windows = SlidingWindows((8, 0), local_theta=100.0)
    model = ModelConfig(head_dim=4, rope_theta=10_000.0, windows=windows, rope_scaling=LinearRopeScaling(8.0))
    np.testing.assert_allclose(rotary_frequencies(model, "local"), [1.0, 0.1], rtol=1e-6)
    np.testing.assert_allclose(rotary_frequencies(model, "plain"), [1 / 8, 0.01 / 8], rtol=1e-6)
    tables = rotary_tables(jnp.arange(3), model)
    np.testing.assert_allclose(tables["local"][1][2], np.sin([2.0, 0.2]), rtol=1e-6)
    np.testing.assert_allclose(tables["plain"][1][2], np.sin([2 / 8, 0.02 / 8]), rtol=1e-5)


T = 512


def splash_inputs():
    """Two packed rows; segments begin and end inside blocks of 128, and some blocks see none before them."""
    q, k, v, segment_ids, d_out = inputs(2, T, 4, 2, 8)
    segment_ids[0] = np.repeat([1, 2, 3, 0], [150, 150, 190, 22])
    segment_ids[1] = np.repeat([1, 2], [150, 362])
    return map(jnp.asarray, (q, k, v, d_out, segment_ids))


@pytest.mark.parametrize(
    ("made", "given"),
    [
        ({"largest": 256, "cap": 1.5}, {"cap": 1.5}),
        pytest.param({"largest": 256}, {}, marks=SLOW),
        pytest.param({"largest": 128, "windows": (40,)}, {"window": 40}, marks=SLOW),
        pytest.param({"largest": 128, "windows": (200, 0)}, {"window": 200}, marks=SLOW),
        pytest.param({"largest": 128, "windows": (200, 0)}, {"window": 0}, marks=SLOW),
        pytest.param({"parts": 2}, {"device": 0}, marks=SLOW),
        pytest.param({"parts": 2}, {"device": 1}, marks=SLOW),
    ],
    ids=str,
)
def test_splash_equals_the_reference_forward_and_backward(made, given):
    """Of all layers, of one with its window, and on the share of a device."""
    q, k, v, d_out, segment_ids = splash_inputs()
    columns = columns_of(given["device"], T, 2) if "device" in given else jnp.arange(T)
    window = jnp.int32(given["window"]) if "window" in given else None
    rows = (q[:, columns], k, v, d_out[:, columns], segment_ids, window, columns)
    slow = partial(attend_reference, cap=given.get("cap", 0.0))
    splash = make_splash(T, "cpu", **made, interpret=True)
    for got, wanted in zip(pulled(splash, *rows), pulled(slow, *rows), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-5 * float(jnp.abs(wanted).max()))
