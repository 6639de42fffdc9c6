"""The path of attention to the cache: configured, refused, or measured on a TPU; and equal rollouts by both."""

import math
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax.engine import decode
from grpo_roc_jax.engine import programs as programs_module
from grpo_roc_jax.engine.config import RolloutConfig, SamplingConfig
from grpo_roc_jax.engine.decode import (
    PATCH_FIELDS,
    ChunkReport,
    ChunkSettings,
    SamplerModel,
    decode_chunk,
    empty_patch,
    init_slots,
)
from grpo_roc_jax.engine.engine import make_engine
from grpo_roc_jax.engine.publish import unstack
from grpo_roc_jax.engine.records import SingleTurn
from grpo_roc_jax.model.config import ModelConfig, SlidingWindows
from grpo_roc_jax.model.pool import IN_PLACE, PAGED, PoolSize, allocate
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh
from grpo_roc_jax.model.transformer import init_params
from tests.helpers.interpreted import interpreted  # noqa: F401
from tests.helpers.rollout_fakes import one_rollout

MODEL = ModelConfig(
    d_model=8, layers=1, heads=2, kv_heads=1, head_dim=128, d_ff=8, vocab_size=16, compute_dtype="float32"
)
ROLLOUT = {
    "slots": 2,
    "chunk": 3,
    "max_prompt_tokens": 24,
    "max_response_tokens": 8,
    "append_lengths": (16,),
    "append_rows": 2,
}


def engine_of(attention, mesh=None, **model):
    """On a backend that calls itself TPU, with devices of one."""
    model, rollout = ModelConfig(**vars(MODEL) | model), RolloutConfig(**ROLLOUT, attention=attention)
    platform = "tpu" if jax.default_backend() == "tpu" else None
    return make_engine(model, rollout, SamplingConfig(), [0], mesh, platform=platform)


@pytest.fixture
def on_tpu(monkeypatch):
    """A backend that calls itself TPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")


def test_what_a_cpu_takes():
    engine = engine_of("auto")
    assert engine.programs.attention == ("xla", {}) and engine.programs.orders == IN_PLACE
    assert engine.describe_attention() == "attention to the cache: xla"
    with pytest.raises(ValueError, match=r"rollout.attention = 'paged' on cpu.*set rollout.attention xla"):
        engine_of("paged")


@pytest.mark.usefixtures("on_tpu")
def test_settings_leave_nothing_to_measure():
    for engine, orders in ((engine_of("xla"), ("skh", "skh")), (engine_of("paged"), PAGED)):
        engine.programs.measure = None
        assert engine.programs.orders == orders
    engine = engine_of("auto", head_dim=64)
    engine.programs.measure = None
    assert engine.programs.attention == ("xla", {}), "the kernel does not take it"
    with pytest.raises(ValueError, match="head_dim = 64"):
        engine_of("paged", head_dim=64)


@pytest.mark.usefixtures("on_tpu")
def test_auto_times_both_and_says_so():
    def measured(candidates):
        # Called twice: the cache of the first call is given away.
        for _ in range(2):
            appended, out = candidates["xla"]()
        assert out.shape == (2, 1, 2, 128) and np.isfinite(out).all()
        assert appended.shape == (4, 16, 2, 128) and np.isfinite(appended).all(), "two rows of 16 on each shard"
        assert list(candidates) == ["xla", "paged"]
        return "paged", {"xla": 6e-5, "paged": 3e-5}

    mesh = make_mesh(ShardingConfig(data=2), jax.devices()[:2])
    engine = engine_of("auto", mesh, layers=2, windows=SlidingWindows((4, 0)))
    engine.programs.measure = measured
    name, seconds = engine.programs.attention
    assert name == "paged" and engine.programs.orders == PAGED
    assert math.isclose(seconds["xla"], 2e-5) and math.isclose(seconds["paged"], 1e-5), "a token of a chunk of 3"
    assert engine.describe_attention().endswith(
        "paged (microseconds a layer and token of all slots: xla 20.0, paged 10.0)"
    )


@pytest.mark.slow
@pytest.mark.usefixtures("on_tpu", "interpreted")
def test_rollouts_are_those_of_xla():
    """Prompts in two pieces, so that an append reads the cache; a fork; decoding with an idle row."""
    params = init_params(jax.random.key(0), MODEL)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 16, n).astype(np.int32) for n in (21, 5)]
    requests = [one_rollout(g, prompts[g], budget, s) for g, s, budget in ((0, 0, 8), (0, 1, 3), (1, 0, 6))]
    found = {}
    for attention in ("xla", "paged"):
        engine = engine_of(attention)
        found[attention], _ = engine.run(engine.publish(params, 0), requests, SingleTurn())
    for one, other in zip(found["xla"], found["paged"], strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_few_active_rows_are_decoded_in_their_place():
    """Five of ten slots active, in a program of six rows: draws and writes equal those of a program of all rows."""
    params = unstack(init_params(jax.random.key(0), MODEL), MODEL)
    rng = np.random.default_rng(0)
    patch = empty_patch(10)
    rows = dict(zip(PATCH_FIELDS, patch, strict=True))
    active = [1, 2, 5, 8, 9]
    rows["touched"][:] = rows["sample"][:] = np.arange(10) + 1
    rows["position"][:] = rng.integers(3, 20, 10)
    rows["token"][:] = rng.integers(1, 16, 10)
    rows["active"][active] = 1
    rows["limit"][:] = 40
    rows["limit"][5] = rows["position"][5] + 3  # ends within the chunk
    rows["temperature"][:] = np.ones(10, np.float32).view(np.int32)
    table = rng.permutation(30).reshape(10, 3).astype(np.int32)
    leaf = jnp.asarray(rng.normal(size=(30, 16, 2, 128)), jnp.float32)
    pool = allocate(MODEL, PoolSize(30, 16, 10), jnp.float32, PAGED).replace(layers=(((leaf,),),))
    model, settings = SamplerModel(MODEL), ChunkSettings(SamplingConfig(), chunk=4)
    arguments = params, pool, init_slots(10), patch, jnp.asarray(table), model
    found = [decode_chunk(*arguments, replace(settings, rows=width)) for width in (6, 10)]
    (few, few_slots, few_report), (whole, slots, report) = found
    np.testing.assert_array_equal(few_report.count, report.count)
    assert report.count.tolist() == [0, 4, 4, 0, 0, 2, 0, 0, 4, 4]
    (few,), (whole,) = few.layers[0][0], whole.layers[0][0]
    for row in active:
        drawn = int(report.count[row])
        at = np.arange(int(rows["position"][row]), int(slots.position[row]))
        written = table[row, at // 16], at % 16
        np.testing.assert_array_equal(few_report.tokens[:drawn, row], report.tokens[:drawn, row])
        np.testing.assert_allclose(few_report.logprobs[:drawn, row], report.logprobs[:drawn, row], atol=1e-5)
        np.testing.assert_allclose(few[written], whole[written], atol=1e-5)
    idle = [row for row in range(10) if row not in active]
    np.testing.assert_array_equal(few[table[idle]], leaf[table[idle]])
    jax.tree.map(np.testing.assert_array_equal, few_slots, slots)


def test_a_chunk_computes_all_rows_unless_told_fewer(monkeypatch):
    """Three of four slots active; what three rows draw and keep comes back in the places of their slots."""
    computed = []

    def draw(params, pool, slots, table, model, settings, steering):
        computed.append(len(slots.token))
        count = jnp.where(slots.active, 2, 0)
        report = ChunkReport(slots.token[None], slots.token[None] / 8, jnp.zeros((0, len(count))), count, jnp.ones(1))
        return pool, slots.replace(position=slots.position + count), report

    monkeypatch.setattr(decode, "draw_chunk", draw)
    monkeypatch.setattr(decode, "apply_patch", lambda slots, patch: slots)
    slots = init_slots(4).replace(token=jnp.array([5, 6, 7, 8]), active=jnp.array([True, False, True, True]))
    pool, settings = SimpleNamespace(map_memory=lambda *_: pool), ChunkSettings(SamplingConfig(), 2)
    for chosen in (settings, replace(settings, rows=3)):
        run = jax.jit(lambda slots: decode_chunk({}, pool, slots, None, slots.token[:, None], None, chosen)[1:])  # noqa: B023
        found, report = run(slots)
        assert report.count.tolist() == found.position.tolist() == [2, 0, 2, 2]
        np.testing.assert_array_equal(report.tokens[0, [0, 2, 3]], [5, 7, 8])
    assert computed == [4, 3]


def test_logits_are_gathered_on_a_mesh_without_tensor():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    logits = jnp.ones((2, 4))
    assert decode.gathered(logits, mesh).sharding.is_fully_replicated and decode.gathered(logits, None) is logits


def test_the_cost_of_a_program_has_the_cache_of_one_shard():
    programs = engine_of("xla", make_mesh(ShardingConfig(data=2), jax.devices()[:2])).programs
    pool, none = programs.new_pool(), np.full((2, programs.shards * programs_module.COPIES), 10**6, np.int32)
    cache_bytes, none = pool.nbytes, programs.place(none, None, programs.row_axes)
    programs.copy(pool, none, none)
    assert programs.costs[-1].name == "copy" and programs.costs[-1].cache_bytes == cache_bytes // 2


def test_rows_of_appends():
    """Short appends have one row or all; from `READ_TOKENS` tokens on the numbers in between have programs of their
    own."""
    lengths = {"append_lengths": (32, 128, 512), "max_prompt_tokens": 512, "append_rows": 8}
    rollout = RolloutConfig(**ROLLOUT | lengths)
    programs = make_engine(MODEL, rollout, SamplingConfig(), [0], None).programs
    wanted = {32: (1, 8, 8, 8), 128: (1, 4, 4, 8), 512: (1, 2, 4, 8)}
    assert {T: tuple(programs.append_width(n, T) for n in (1, 2, 4, 5)) for T in wanted} == wanted
