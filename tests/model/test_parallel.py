"""Attention shared over devices: every path gives the result of one device, and the work is balanced."""

import math
import time
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import NamedSharding, P

from grpo_roc_jax.config import Config
from grpo_roc_jax.learner.loss import make_remat, splits_on, token_axes
from grpo_roc_jax.learner.pack import BatchConfig
from grpo_roc_jax.model import choose, parallel
from grpo_roc_jax.model.attention import attend_reference, block_size, make_attention
from grpo_roc_jax.model.config import GatedDelta, ModelConfig
from grpo_roc_jax.model.delta import Signals
from grpo_roc_jax.model.sharding import ROWS, ShardingConfig, make_mesh, param_shardings
from grpo_roc_jax.model.transformer import Execution, forward, init_params, take_rows
from grpo_roc_jax.planner.hlo import parse_hlo
from grpo_roc_jax.planner.hlo_cost import largest_gather, read_cost
from tests.model.test_attention import SLOW, pulled
from tests.model.test_attention import inputs as random_inputs

B, T, N, K, H = 4, 64, 4, 2, 8


@cache
def inputs():
    """Packed rows whose segments cross every boundary of the runs; one row is a single segment, one mostly padding."""
    q, k, v, segment_ids, d_out = random_inputs(B, T, N, K, H)
    segment_ids[:] = 0
    segment_ids[0] = 1
    segment_ids[1, : T // 5] = 1
    segment_ids[2] = np.arange(T) // 11 + 1
    segment_ids[3, : T - 9] = 1 + (np.arange(T - 9) > T // 3)
    return q, k, v, d_out, segment_ids


@cache
def wanted(window):
    q, k, v, d_out, segment_ids = inputs()
    window = None if window is None else jnp.int32(window)
    return pulled(attend_reference, q, k, v, d_out, segment_ids, window)


@cache
def mesh_of(data=1, fsdp=1, sequence=1, tensor=1):
    devices = jax.devices()[: data * fsdp * sequence * tensor]
    return make_mesh(ShardingConfig(data=data, fsdp=fsdp, sequence=sequence, tensor=tensor), devices)


def on_mesh(attend, mesh, window):
    """`pulled` of attention shared over the mesh, rows laid out as in the update, results back in order."""
    *heads, segment_ids = inputs()
    parts, sharding_of = mesh.shape["sequence"], lambda *spec: NamedSharding(mesh, P(ROWS, "sequence", *spec))

    def put(x, *spec):
        return jax.device_put(parallel.to_zigzag(jnp.asarray(x), parts), sharding_of(*spec))

    q, k, v, d_out = (put(x, "tensor", None) for x in heads)
    window = None if window is None else jnp.int32(window)
    results = pulled(parallel.attend_on(attend, mesh), q, k, v, d_out, put(segment_ids), window)
    return [parallel.from_zigzag(np.asarray(x), parts) for x in results]


def place_on(mesh, arrays, specs):
    return [jax.device_put(x, NamedSharding(mesh, P(*spec))) for x, spec in zip(arrays, specs, strict=True)]


def assert_close(got, expected, tolerance=1e-5):
    for array, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(array, other, rtol=0, atol=tolerance * float(jnp.abs(other).max()))


def test_the_order_of_tokens_by_hand():
    row = jnp.arange(8)[None]
    assert parallel.to_zigzag(row, 2)[0].tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert parallel.to_zigzag(row, 4)[0].tolist() == [0, 7, 1, 6, 2, 5, 3, 4]
    for parts in (1, 2, 4):
        wide = jnp.arange(48).reshape(2, 8, 3)
        np.testing.assert_array_equal(parallel.from_zigzag(parallel.to_zigzag(wide, parts), parts), wide)
        by_device = parallel.to_zigzag(row, parts).reshape(parts, -1)
        for device in range(parts):
            assert parallel.columns_of(device, 8, parts).tolist() == by_device[device].tolist()


def test_rows_that_do_not_divide_are_refused_with_the_next_length():
    with pytest.raises(ValueError, match=r"row_length = 20 .* 2 x sharding.sequence = 8, .* batch.row_length 24"):
        parallel.check_row_length(20, 4)
    with pytest.raises(ValueError, match=r"row_length = 1030 .* batch.row_length 1032"):
        Config(batch=BatchConfig(row_length=1030), sharding=ShardingConfig(sequence=4))
    with pytest.raises(ValueError, match="row_length = 6 "):
        parallel.to_zigzag(jnp.zeros((1, 6)), 2)
    parallel.check_row_length(1031, 1)
    # Blocks divide the runs.
    sizes = (300, 1, 128), (64, 1, 128), (16_384, 4, 512), (20_480, 8, 512), (32, 8, 128)
    assert [block_size(*each) for each in sizes] == [128, 64, 512, 320, 2]


MESHES = [{"sequence": 4}, {"fsdp": 2, "sequence": 2, "tensor": 2}]
MESHES += [pytest.param(axes, marks=SLOW) for axes in ({"sequence": 8}, {"data": 2, "sequence": 4})]


@pytest.mark.parametrize("name", ["reference", "blocked"])
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_shared_attention_equals_that_of_one_device(name, axes, window=None):
    mesh = mesh_of(**axes)
    attend = make_attention(name, T, "cpu", parts=mesh.shape["sequence"])
    assert_close(on_mesh(attend, mesh, window), wanted(window))


@pytest.mark.parametrize("window", [5, pytest.param(30, marks=SLOW)])
def test_windows_reach_across_the_borders_of_runs(window):
    test_shared_attention_equals_that_of_one_device("blocked", {"sequence": 4}, window)


def test_shared_attention_gathers_keys_once_a_pass_and_never_queries():
    """Two gathers of keys and values, a scatter of their gradients, segment ids; no communication inside the loops."""
    mesh = mesh_of(sequence=4)
    sharding = NamedSharding(mesh, P(ROWS, "sequence", "tensor", None))
    like = [jax.ShapeDtypeStruct((B, T, n, H), jnp.float32, sharding=sharding) for n in (N, K, K)]
    ids = jax.ShapeDtypeStruct((B, T), jnp.int32, sharding=NamedSharding(mesh, P(ROWS, "sequence")))
    attend = parallel.attend_on(make_attention("blocked", T, "cpu", parts=4), mesh)
    gradient = jax.grad(lambda q, k, v, ids: jnp.sum(attend(q, k, v, ids) ** 2), argnums=(0, 1, 2))
    program = parse_hlo(jax.jit(gradient).lower(*like, ids).compile().as_text())
    costs, keys = read_cost(program).by_kind(), 4 * B * T * K * H
    assert largest_gather(program).bytes <= keys and costs["all-gather"]["bytes"] <= 2 * keys + 4 * B * T
    assert set(costs) <= {"all-gather", "reduce-scatter", "all-reduce"}


@pytest.mark.parametrize("form", ["delta", "mamba2"])
def test_recurrence_over_tensor_has_the_gradients_of_one_device_and_sends_nothing(form):
    """Signals, weights and context are split by heads, and no other head is read in either pass."""
    rng, rows = np.random.default_rng(3), inputs()[-1]
    delta = GatedDelta(key_heads=2, value_heads=4, key_dim=4, value_dim=6, form=form)
    sizes = ((B, T, 2, 2 * 4 + 2 * 6), (B, T, 4), (B, T, 4), (2, 20, 4), (2, 20), (4,))
    qkv, decay, rate, conv, *space = (rng.normal(size=size).astype(np.float32) for size in sizes)
    weights = rng.normal(size=(B, T, 4, 6)).astype(np.float32)
    signals = Signals(qkv, -np.exp(decay), 1 / (1 + np.exp(-rate)))
    space = tuple(space) if form == "mamba2" else None
    mesh = mesh_of(tensor=2)
    places = tuple(NamedSharding(mesh, P(*spec)) for spec in ((None, None, "tensor"), ("tensor",)))

    def gradient(mesh, places=None):
        slope = jax.grad(lambda *of: jnp.sum(parallel.recur_on(mesh)(delta, rows, *of) * weights), argnums=(0, 1))
        return jax.jit(slope, out_shardings=places)

    placed = jax.device_put((signals, conv), places)
    program = gradient(mesh, places).lower(*placed, space).compile()
    assert read_cost(parse_hlo(program.as_text())).moved == 0
    assert_close(*map(jax.tree.leaves, (program(*placed, space), gradient(None)(signals, conv, space))))


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


@pytest.mark.parametrize("inputs", [1, 2])
@pytest.mark.parametrize(("sequence", "tensor", "fsdp"), [(1, 4, 2), (2, 2, 2), (1, 2, 4)])
def test_sums_over_tensor_are_scattered(sequence, tensor, fsdp, inputs):
    """Each device gets the sums of its tokens; numbers and gradients are those of a plain product."""
    mesh, tokens = mesh_of(sequence=sequence, tensor=tensor, fsdp=fsdp), ("sequence", "tensor")
    rng, summed = np.random.default_rng(4), (8, 6)[:inputs]
    sizes = (B, T, *summed), (*summed, 16), (B, T, 16)
    arrays = [rng.normal(size=size).astype(np.float32) for size in sizes]
    matrix_place = ("tensor", *[None] * (inputs - 1), ("fsdp", "sequence"))
    placed = place_on(mesh, arrays, ((ROWS, "sequence", "tensor"), matrix_place, (ROWS, tokens)))

    def outputs(product):
        def loss(x, matrix, weights):
            y = product(x, matrix, inputs)
            return jnp.sum(y * weights), y

        return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))

    product = parallel.output_product_on(mesh, tokens)
    assert_close(*(jax.tree.leaves(outputs(f)(*of)) for f, of in ((product, placed), (jnp.tensordot, arrays))))
    program = jax.jit(lambda x, matrix: product(x, matrix, inputs)).lower(*placed[:2]).compile()
    kinds = read_cost(parse_hlo(program.as_text())).by_kind()
    assert kinds["reduce-scatter"]["bytes"] == 4 * B // fsdp * T // sequence * 16 and "all-reduce" not in kinds
    for plain in ((mesh, ("sequence",)), (mesh_of(fsdp=2), tokens)):
        assert parallel.output_product_on(*plain) is None


@pytest.mark.parametrize(("policy", "passes"), [("attention", 2), ("full", 3)])
def test_what_the_remat_policy_keeps_it_keeps_on_a_mesh(policy, passes):
    """Loops over keys in the program: forward, backward, and forward again only if nothing is saved."""
    mesh = mesh_of(sequence=2, tensor=2)
    attend = parallel.attend_on(make_attention("blocked", T, "cpu", parts=2), mesh)
    *heads, segment_ids = (jnp.asarray(x) for x in inputs())
    layer = make_remat(policy, scanned=False)(lambda q, k, v: jnp.sin(attend(jnp.sin(q), k, v, segment_ids)))
    program = str(jax.make_jaxpr(jax.grad(lambda *qkv: layer(*qkv).sum()))(*heads[:3]))
    assert program.count("while[") == passes


MODEL = ModelConfig(heads=N, kv_heads=K, head_dim=H, layers=2, vocab_size=8)


def test_the_faster_path_is_taken_by_measurement(monkeypatch):
    """Two candidates with a known difference, on a mesh; the one named first does the work twenty times more."""

    def slow(q, *rest):
        again = jax.lax.fori_loop(0, 20, lambda _, x: attend_reference(x, *rest), q)
        return attend_reference(q, *rest) + 0.0 * again

    made = {"reference": slow, "blocked": attend_reference}
    monkeypatch.setattr(parallel, "make_attention", lambda name, *_, **__: made[name])
    mesh = mesh_of(sequence=2, tensor=2)
    name, seconds = parallel.choose_attention(("reference", "blocked"), MODEL, 128, B, 50, mesh)
    assert name == "blocked" and 2 * seconds["blocked"] < seconds["reference"] < np.inf


@pytest.mark.parametrize(
    ("platform", "dtype", "length", "expected"),
    [
        *(("cpu", "float32", 128, ("reference",)), ("cpu", "float32", 256, ("blocked",))),
        *(("tpu", "float32", 2048, ("blocked", "splash")), ("tpu", "float32", 2000, ("blocked",))),
        *(("gpu", "bfloat16", 2048, ("blocked", "cudnn")), ("gpu", "float32", 2048, ("blocked",))),
    ],
)
def test_paths_that_come_into_question(monkeypatch, platform, dtype, length, expected):
    """One path is not timed."""
    monkeypatch.setattr(parallel, "platform_of", lambda mesh: platform)
    mesh = mesh_of(sequence=2)
    assert parallel.paths(replace(MODEL, compute_dtype=dtype), length, mesh) == expected
    assert len(expected) > 1 or parallel.choose_attention(expected, MODEL, length, B, 50, mesh) == (expected[0], {})


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("length", [8, 6])  # tokens split over tensor too, and not
@pytest.mark.parametrize("axes", [{"fsdp": 2, "tensor": 2, "sequence": 2}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_a_lookup_on_a_mesh_and_its_gradient_equal_those_of_one_device(axes, length, wide):
    """Wide rows are exchanged, and no table is gathered."""
    mesh = make_mesh(ShardingConfig(**axes))
    vocabulary, width = (1024, 48) if wide else (16, 4)
    table = jnp.sin(jnp.arange(vocabulary * width)).reshape(vocabulary, width)
    ids = jnp.arange(4 * length).reshape(4, length) * 7 % 11  # some often, some never
    weights = jnp.sin(jnp.arange(4.0 * length * width)).reshape(4, length, width)

    def total(table, ids, weights, look_up):
        rows = look_up(table, ids)
        return jnp.sum(rows * weights), rows

    axes = token_axes(mesh, length)
    places = (("tensor", "fsdp", "sequence"),), (ROWS, "sequence"), (ROWS, axes, None)
    placed = place_on(mesh, (table, ids, weights), places)
    look_up = (parallel.look_up_wide_on if wide else parallel.look_up_on)(mesh, axes)
    gradient = jax.jit(jax.grad(partial(total, look_up=look_up), has_aux=True)).lower(*placed).compile()
    expected, plain = jax.grad(total, has_aux=True)(table, ids, weights, take_rows)
    got, rows = gradient(*placed)
    np.testing.assert_array_equal(rows, plain)
    np.testing.assert_allclose(got, expected, atol=1e-6)
    share, own_rows = table.nbytes / 2, plain.nbytes / 4  # of `tensor`; of the devices that split rows and tokens
    largest = largest_gather(parse_hlo(gradient.as_text())).bytes
    assert largest < share if wide else largest <= max(share, own_rows)


def test_the_quicker_one_wins_and_both_times_come_back():
    calls = []

    def take(name: str, seconds: float):
        calls.append(name)
        # The first call stands for compiling: it is long for the quick one and must not count.
        time.sleep(0.05 if calls.count(name) == 1 and name == "quick" else seconds)

    name, seconds = choose.fastest({"slow": partial(take, "slow", 0.02), "quick": partial(take, "quick", 0.001)})
    assert name == "quick"
    assert calls == ["slow", "quick"] * (1 + choose.REPEATS)
    assert 0.001 <= seconds["quick"] < 0.02 <= seconds["slow"]


@pytest.mark.parametrize("error", [jax.errors.JaxRuntimeError("no room"), NotImplementedError(), ValueError("shape")])
def test_what_does_not_run_loses_unless_nothing_runs(error):
    def refused():
        raise error

    name, seconds = choose.fastest({"kernel": refused, "reference": lambda: None})
    assert name == "reference"
    assert math.isinf(seconds["kernel"]) and math.isfinite(seconds["reference"])
    with pytest.raises(type(error)) as raised:
        choose.fastest({"kernel": refused})
    assert raised.value is error
    with pytest.raises(ZeroDivisionError):  # no refusal of the device, but a fault of ours
        choose.fastest({"broken": lambda: 1 // 0, "reference": lambda: None})
