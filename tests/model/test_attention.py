"""Every attention path against the reference, also shared over devices, and the reference against loops in NumPy."""

import time
from dataclasses import replace
from functools import cache, partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import NamedSharding, P

from grpo_roc_jax import ModelConfig, init_params
from grpo_roc_jax.learner.loss import make_remat, splits_on, token_axes
from grpo_roc_jax.model import attention, attention_tpu, choose, delta, parallel, rope_scaling, rotary
from grpo_roc_jax.model.attention import AttentionBlocks, make_attention
from grpo_roc_jax.model.config import GatedDelta, SlidingWindows
from grpo_roc_jax.model.sharding import ROWS, ShardingConfig, make_mesh, param_shardings
from grpo_roc_jax.model.transformer import Execution, forward, take_rows
from grpo_roc_jax.planner.hlo import parse_hlo
from grpo_roc_jax.planner.hlo_cost import largest_gather, read_cost
from tests.helpers import reference

attend_reference = jax.jit(attention.attend_reference, static_argnames="cap")
attend_blocked = jax.jit(attention.attend_blocked, static_argnums=0)

SHAPES = [(1, 7, 2, 2, 4), (2, 33, 4, 2, 8), (3, 64, 6, 1, 4)]
WHOLE = product(SHAPES, (AttentionBlocks(5, cap=1.5), AttentionBlocks(16)), [[None]])


def inputs(B, T, N, K, H):
    rng = np.random.default_rng(0)
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


@pytest.mark.parametrize("shape, blocks, windows", [*WHOLE, ((1, 20, 2, 2, 4), AttentionBlocks(4), range(10))], ids=str)
def test_blocked_equals_reference_forward_and_backward(shape, blocks, windows):
    """Windows end inside a block of 4, at its border and one token after it; up to twice the block."""
    *qkv, segment_ids, d_out = inputs(*shape)
    paths = partial(attend_blocked, blocks), partial(attend_reference, cap=blocks.cap)
    for window in (window if window is None else jnp.int32(window) for window in windows):
        both = (pulled(attend, *qkv, d_out, segment_ids, window) for attend in paths)
        for got, wanted in zip(*both, strict=True):
            scale = float(np.abs(wanted).max()) if window is None else 1.0  # a window of 1 has no gradient of queries
            np.testing.assert_allclose(got, wanted, atol=1e-5 * scale, err_msg=f"window {window}")


def test_what_cudnn_is_asked_for_is_the_reference(monkeypatch):
    """The same call of the public interface, computed by plain XLA: cuDNN itself needs a GPU."""
    plain = jax.nn.dot_product_attention

    def without_device(*args, implementation, **settings):
        assert implementation == "cudnn" and settings["is_causal"], "the half above the diagonal is left out"
        return plain(*args, implementation="xla", **settings)

    monkeypatch.setattr(jax.nn, "dot_product_attention", without_device)
    q, k, v, segment_ids = map(jnp.asarray, inputs(2, 33, 4, 2, 8)[:4])
    real = np.asarray(segment_ids) > 0
    for window in (None, jnp.int32(5)):
        paths = jax.jit(attention.attend_cudnn), attend_reference
        got, wanted = (np.asarray(path(q, k, v, segment_ids, window)) for path in paths)
        np.testing.assert_allclose(got[real], wanted[real], atol=1e-5)


def test_layers_with_a_window_keep_their_frequencies_where_the_others_are_rescaled():
    windows, scaling = SlidingWindows((8, 0), local_theta=100.0), rope_scaling.LinearRopeScaling(8.0)
    model = ModelConfig(head_dim=4, rope_theta=10_000.0, windows=windows, rope_scaling=scaling)
    tables = rotary.rotary_tables(jnp.arange(3), model)
    np.testing.assert_allclose(tables["local"][1][2], np.sin([2.0, 0.2]), rtol=1e-6)
    np.testing.assert_allclose(tables["plain"][1][2], np.sin([2 / 8, 0.02 / 8]), rtol=1e-5)


@pytest.mark.parametrize(
    ("made", "given"),
    [
        ({"largest": 256, "cap": 1.5}, {"cap": 1.5}),
        pytest.param({"largest": 128, "windows": (200, 0)}, {"window": 200}, marks=pytest.mark.slow),
        pytest.param({"parts": 2}, {"device": 1}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_splash_equals_the_reference_forward_and_backward(made, given):
    """Of all layers, of one with its window, and on the share of a device. Two packed rows; segments begin and end
    inside blocks of 128, and some blocks see none before them."""
    q, k, v, _, d_out = map(jnp.asarray, inputs(2, 512, 4, 2, 8))
    segment_ids = jnp.array([np.repeat([1, 2, 3, 0], [150, 150, 190, 22]), np.repeat([1, 2], [150, 362])], jnp.int32)
    columns = parallel.columns_of(given["device"], 512, 2) if "device" in given else jnp.arange(512)
    window = jnp.int32(given["window"]) if "window" in given else None
    rows = (q[:, columns], k, v, d_out[:, columns], segment_ids, window, columns)
    slow = partial(attend_reference, cap=given.get("cap", 0.0))
    splash = attention_tpu.make_splash(512, "cpu", **made, interpret=True)
    assert_close(pulled(splash, *rows), pulled(slow, *rows))


B, T, N, K, H = 4, 64, 4, 2, 8
SHARES = product(["reference", "blocked"], [{"sequence": 4}, {"fsdp": 2, "sequence": 2, "tensor": 2}], [None])


@cache
def shared_inputs():
    """Packed rows whose segments cross every boundary of the runs; one row is a single segment, one mostly padding."""
    q, k, v, segment_ids, d_out = inputs(B, T, N, K, H)
    segment_ids[:] = 0
    segment_ids[0] = 1
    segment_ids[1, : T // 5] = 1
    segment_ids[2] = np.arange(T) // 11 + 1
    segment_ids[3, : T - 9] = 1 + (np.arange(T - 9) > T // 3)
    return q, k, v, d_out, segment_ids


@cache
def mesh_of(**axes):
    return make_mesh(ShardingConfig(**axes), jax.devices()[: np.prod([*axes.values()])])


def assert_close(got, expected):
    for array, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(array, other, rtol=0, atol=1e-5 * float(jnp.abs(other).max()))


def test_the_order_of_tokens_by_hand():
    row, wide = jnp.arange(8)[None], jnp.arange(48).reshape(2, 8, 3)
    for parts, expected in ((1, [*range(8)]), (2, [0, 1, 6, 7, 2, 3, 4, 5]), (4, [0, 7, 1, 6, 2, 5, 3, 4])):
        assert parallel.to_zigzag(row, parts)[0].tolist() == expected
        np.testing.assert_array_equal(parallel.from_zigzag(parallel.to_zigzag(wide, parts), parts), wide)
        assert [n for device in range(parts) for n in parallel.columns_of(device, 8, parts).tolist()] == expected
    with pytest.raises(ValueError, match=r"row_length = 20 .* 2 x sharding.sequence = 8, .* batch.row_length 24"):
        parallel.check_row_length(20, 4)
    parallel.check_row_length(1031, 1)
    # Blocks divide the runs.
    sizes = (300, 1, 128), (64, 1, 128), (16_384, 4, 512), (20_480, 8, 512), (32, 8, 128)
    assert [attention.block_size(*each) for each in sizes] == [128, 64, 512, 320, 2]


@pytest.mark.parametrize("name, axes, window", [*SHARES, ("blocked", {"sequence": 4}, 5)], ids=str)
def test_shared_attention_equals_that_of_one_device(name, axes, window):
    """Rows are laid out as in the update, and results are put back in order. A window reaches across runs."""
    mesh, (*heads, segment_ids) = mesh_of(**axes), shared_inputs()
    parts, window = mesh.shape["sequence"], None if window is None else jnp.int32(window)

    def put(x, *spec):
        x = parallel.to_zigzag(jnp.asarray(x), parts)
        return jax.device_put(x, NamedSharding(mesh, P(ROWS, "sequence", *spec)))

    attend = parallel.attend_on(make_attention(name, T, "cpu", parts=parts), mesh)
    got = pulled(attend, *(put(x, "tensor", None) for x in heads), put(segment_ids), window)
    wanted = pulled(attend_reference, *heads, segment_ids, window)
    assert_close([parallel.from_zigzag(np.asarray(x), parts) for x in got], wanted)


@pytest.mark.parametrize("form", ["delta", "mamba2"])
def test_recurrence_over_tensor_has_the_gradients_of_one_device_and_sends_nothing(form):
    """Signals, weights and context are split by heads, and no other head is read in either pass."""
    rng, rows = np.random.default_rng(3), shared_inputs()[-1]
    rule = GatedDelta(key_heads=2, value_heads=4, key_dim=4, value_dim=6, form=form)
    sizes = ((B, T, 2, 2 * 4 + 2 * 6), (B, T, 4), (B, T, 4), (2, 20, 4), (2, 20), (4,))
    qkv, decay, rate, conv, *space = (rng.normal(size=size).astype(np.float32) for size in sizes)
    weights = rng.normal(size=(B, T, 4, 6)).astype(np.float32)
    signals = delta.Signals(qkv, -np.exp(decay), 1 / (1 + np.exp(-rate)))
    space = tuple(space) if form == "mamba2" else None
    mesh = mesh_of(tensor=2)
    places = tuple(NamedSharding(mesh, P(*spec)) for spec in ((None, None, "tensor"), ("tensor",)))

    def gradient(mesh, places=None):
        slope = jax.grad(lambda *of: jnp.sum(parallel.recur_on(mesh)(rule, rows, *of) * weights), argnums=(0, 1))
        return jax.jit(slope, out_shardings=places)

    placed = jax.device_put((signals, conv), places)
    program = gradient(mesh, places).lower(*placed, space).compile()
    assert read_cost(parse_hlo(program.as_text())).moved == 0
    assert_close(*map(jax.tree.leaves, (program(*placed, space), gradient(None)(signals, conv, space))))


def test_the_paths_of_a_platform_and_the_quicker_one_wins(monkeypatch):
    """What does not run loses."""
    mesh, model = mesh_of(sequence=2), ModelConfig(heads=N, kv_heads=K, head_dim=H, layers=2, vocab_size=8)
    for platform, dtype, length, expected in (
        *(("tpu", "float32", 2048, ("blocked", "splash")), ("tpu", "float32", 2000, ("blocked",))),
        *(("gpu", "bfloat16", 2048, ("blocked", "cudnn")), ("gpu", "float32", 2048, ("blocked",))),
        *(("cpu", "float32", 256, ("blocked",)), ("cpu", "float32", 128, ("reference",))),
    ):
        monkeypatch.setattr(parallel, "platform_of", lambda mesh, platform=platform: platform)
        assert parallel.paths(replace(model, compute_dtype=dtype), length, mesh) == expected
    name, seconds = parallel.choose_attention(("reference", "blocked"), model, 128, B, 50, mesh)
    assert name == min(seconds, key=seconds.get) and set(seconds) == {"reference", "blocked"}
    with pytest.raises(ValueError, match=r"attention_cap = 50.0: the kernel caps no scores; take auto, blocked or ref"):
        make_attention("cudnn", 64, "gpu", cap=50.0)
    calls = []

    def take(name: str, seconds: float):
        calls.append(name)
        # The first call stands for compiling: it is long for the quick one and must not count.
        time.sleep(0.05 if calls.count(name) == 1 and name == "quick" else seconds)

    def refused():
        raise NotImplementedError

    programs = {"slow": partial(take, "slow", 0.02), "quick": partial(take, "quick", 0.001)}
    name, seconds = choose.fastest(programs | {"kernel": refused})
    assert name == "quick" and calls == ["slow", "quick"] * (1 + choose.REPEATS)
    assert 0.001 <= seconds["quick"] < 0.02 <= seconds["slow"] < seconds["kernel"] == np.inf
    with pytest.raises(NotImplementedError):
        choose.fastest({"kernel": refused})
    with pytest.raises(ZeroDivisionError):  # no refusal of the device, but a fault of ours
        choose.fastest({"broken": lambda: 1 // 0, "reference": lambda: None})


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("length", [8, 6])  # tokens split over tensor too, and not
def test_a_lookup_on_a_mesh_and_its_gradient_equal_those_of_one_device(length, wide):
    """Wide rows are exchanged, and no table is gathered."""
    mesh = mesh_of(fsdp=2, tensor=2, sequence=2)
    vocabulary, width = (1024, 48) if wide else (16, 4)
    table = jnp.sin(jnp.arange(vocabulary * width)).reshape(vocabulary, width)
    ids = jnp.arange(4 * length).reshape(4, length) * 7 % 11  # some often, some never
    weights = jnp.sin(jnp.arange(4.0 * length * width)).reshape(4, length, width)

    def total(table, ids, weights, look_up):
        rows = look_up(table, ids)
        return jnp.sum(rows * weights), rows

    axes = token_axes(mesh, length)
    places = (("tensor", "fsdp", "sequence"),), (ROWS, "sequence"), (ROWS, axes, None)
    placed = jax.device_put((table, ids, weights), tuple(NamedSharding(mesh, P(*spec)) for spec in places))
    look_up = (parallel.look_up_wide_on if wide else parallel.look_up_on)(mesh, axes)
    gradient = jax.jit(jax.grad(partial(total, look_up=look_up), has_aux=True)).lower(*placed).compile()
    expected, plain = jax.grad(total, has_aux=True)(table, ids, weights, take_rows)
    got, rows = gradient(*placed)
    np.testing.assert_array_equal(rows, plain)
    np.testing.assert_allclose(got, expected, atol=1e-6)
    share, own_rows = table.nbytes / 2, plain.nbytes / 4  # of `tensor`; of the devices that split rows and tokens
    largest = largest_gather(parse_hlo(gradient.as_text())).bytes
    assert largest < share if wide else largest <= max(share, own_rows)


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


def test_no_matrix_of_the_feed_forward_is_gathered_over_tensor():
    """Without a constraint on the hidden activations XLA gathers these matrices in the backward pass."""
    model = ModelConfig(d_model=32, layers=3, heads=8, kv_heads=8, head_dim=4, d_ff=128, vocab_size=64)
    mesh = make_mesh(ShardingConfig(fsdp=2, tensor=4))
    places = param_shardings(model, mesh)
    shapes = jax.eval_shape(lambda: init_params(jax.random.key(0), model))
    like = jax.tree.map(lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s), shapes, places)
    ids = jax.ShapeDtypeStruct((2, 64), jnp.int32, sharding=NamedSharding(mesh, P(ROWS)))
    execution = Execution(splits=splits_on(mesh, 64), remat=make_remat("attention"))
    slope = jax.grad(lambda *batch: jnp.sum(forward(*batch, model, execution) ** 2))
    step = jax.jit(slope, out_shardings=places).lower(like, ids, ids, ids).compile()
    assert largest_gather(parse_hlo(step.as_text())).bytes < 4 * model.d_model * model.d_ff


@pytest.mark.parametrize(("policy", "passes"), [("attention", 2), ("full", 3)])
def test_what_the_remat_policy_keeps_it_keeps_on_a_mesh(policy, passes):
    """Loops over keys in the program: forward, backward, and forward again only if nothing is saved."""
    mesh = mesh_of(sequence=2, tensor=2)
    attend = parallel.attend_on(make_attention("blocked", T, "cpu", parts=2), mesh)
    *heads, segment_ids = (jnp.asarray(x) for x in shared_inputs())
    layer = make_remat(policy, scanned=False)(lambda q, k, v: jnp.sin(attend(jnp.sin(q), k, v, segment_ids)))
    program = str(jax.make_jaxpr(jax.grad(lambda *qkv: layer(*qkv).sum()))(*heads[:3]))
    assert program.count("while[") == passes
