"""Programs of the engine: the path of attention to the cache, costs, widths, and calls repeated by other processes."""

import math
import pickle
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax.engine import decode
from grpo_roc_jax.engine import programs as programs_module
from grpo_roc_jax.engine.config import RolloutConfig, SamplingConfig
from grpo_roc_jax.engine.engine import make_engine
from grpo_roc_jax.engine.programs import SamplerPrograms, SharedPrograms
from grpo_roc_jax.engine.protocol import SingleTurn
from grpo_roc_jax.engine.steering import DrawSettings, RowSteering, steering_arrays
from grpo_roc_jax.learner.update import OptimConfig, state_like
from grpo_roc_jax.model.config import SlidingWindows
from grpo_roc_jax.model.pool import IN_PLACE, PAGED
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh
from grpo_roc_jax.model.transformer import init_params
from grpo_roc_jax.planner.hlo import parse_hlo
from grpo_roc_jax.planner.hlo_cost import largest_gather
from grpo_roc_jax.planner.topology import parse_topology, topology_devices
from tests.helpers.engine_checks import assert_same, interpreted  # noqa: F401
from tests.helpers.rollout_fakes import MODEL, ROLLOUT, STOPS, one_rollout

KERNEL = replace(MODEL, d_model=8, layers=1, heads=2, kv_heads=1, head_dim=128, vocab_size=16, compute_dtype="float32")
SHORT = {"slots": 2, "chunk": 3, "max_prompt_tokens": 24, "max_response_tokens": 8, "append_rows": 2}
SHORT |= {"append_lengths": (16,)}


@pytest.fixture
def on_tpu(monkeypatch):
    """A backend that calls itself TPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")


def engine_of(attention, mesh=None, model=KERNEL, **settings):
    """On a backend that calls itself TPU, with devices of one."""
    rollout = RolloutConfig(**SHORT | settings, attention=attention)
    platform = "tpu" if jax.default_backend() == "tpu" else None
    return make_engine(model, rollout, SamplingConfig(), [0], mesh, platform=platform)


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
    engine = engine_of("auto", model=replace(KERNEL, head_dim=64))
    engine.programs.measure = None
    assert engine.programs.attention == ("xla", {}), "the kernel does not take it"
    with pytest.raises(ValueError, match="head_dim = 64"):
        engine_of("paged", model=replace(KERNEL, head_dim=64))


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
    engine = engine_of("auto", mesh, replace(KERNEL, layers=2, windows=SlidingWindows((4, 0))))
    engine.programs.measure = measured
    name, seconds = engine.programs.attention
    assert name == "paged" and engine.programs.orders == PAGED
    assert math.isclose(seconds["xla"], 2e-5) and math.isclose(seconds["paged"], 1e-5), "a token of a chunk of 3"
    assert "paged (microseconds a layer and token of all slots: xla 20.0, paged 10.0)" in engine.describe_attention()


@pytest.mark.slow
@pytest.mark.usefixtures("on_tpu", "interpreted")
def test_rollouts_are_those_of_xla():
    """Prompts in two pieces, so that an append reads the cache; forks; few rows left, in slots that are not the first
    ones, which a program of half of the rows decodes in their place."""
    params, rng = init_params(jax.random.key(0), KERNEL), np.random.default_rng(0)
    prompts = [rng.integers(1, 16, n).astype(np.int32) for n in (21, 5)]
    budgets = (2, 8, 3, 8, 2, 6, 8, 3)
    requests = [one_rollout(sample % 2, prompts[sample % 2], n, sample // 2) for sample, n in enumerate(budgets)]
    rollouts, used = {}, {}
    for attention in ("xla", "paged"):
        engine = engine_of(attention, slots=8, narrow=(2,))
        rollouts[attention], used[attention] = engine.run(engine.publish(params, 0), requests, SingleTurn())
    assert used["paged"].slot_steps == used["xla"].slot_steps < 8 * used["xla"].steps
    assert_same(rollouts["xla"], rollouts["paged"], atol=1e-5)


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
    """Short appends have one row or all; from `READ_TOKENS` tokens on there are programs for numbers in between."""
    lengths = {"append_lengths": (32, 128, 512), "max_prompt_tokens": 512, "append_rows": 8}
    programs = engine_of("auto", **lengths).programs
    wanted = {32: (1, 8, 8, 8), 128: (1, 4, 4, 8), 512: (1, 2, 4, 8)}
    assert {T: tuple(programs.append_width(n, T) for n in (1, 2, 4, 5)) for T in wanted} == wanted


def values(argument):
    """Arrays as NumPy with their sharding; the rest unchanged."""
    if not isinstance(argument, jax.Array):
        return argument
    return argument.sharding.spec, argument.sharding.device_set, np.asarray(argument).tolist()


def test_the_others_make_the_leaders_calls_on_the_same_devices():
    """Instead of running, a program returns what it was called with, so that its results say how they came about."""
    mesh, made, sent = make_mesh(ShardingConfig(data=1, tensor=2), jax.devices()[:2]), {}, []

    class Echo(SamplerPrograms):
        def run(self, call):
            result = (call.key, *map(values, call.arguments))
            made.setdefault(self, []).append(result)
            return (result, call.key, "report") if call.key[0] in ("decode", "steered") else result

    class SharedEcho(SharedPrograms, Echo):
        pass

    leader, follower = (SharedEcho(MODEL, ROLLOUT, SamplingConfig(), STOPS, None, mesh) for _ in range(2))

    def send(call):
        assert len(sent) == len(made.get(leader, ())), "sent before it runs"
        sent.append(pickle.dumps(call))

    leader.send = send
    rows = {2: RowSteering(DrawSettings(top_k=1)), 3: RowSteering(DrawSettings(bias={50: 100.0}, frequency=1.0))}
    steering = steering_arrays(rows, ROLLOUT.slots, MODEL.vocab_size, SamplingConfig(), 4)
    for _ in range(2):  # the second pool replaces the first
        pool, slots = leader.new_pool(), leader.new_slots()
        for seed in range(2):
            tokens, table, where, pairs, patch = np.random.default_rng(seed).integers(0, 9, (5, 3, 6), np.int32)
            axes = leader.row_axes
            pool = leader.append("weights", pool, leader.place(tokens, axes), leader.place(table, axes), where)
            pool = leader.copy(pool, leader.place(pairs[:2], None, axes), pairs[:2])
            pool, slots, _ = leader.decode("weights", pool, slots, leader.place(patch, None, axes), table, 6)
            pool, slots, _ = leader.decode_steered("weights", pool, slots, patch, table, *steering, width=6)
    follower.repeat("weights", map(pickle.loads, sent))
    np.testing.assert_equal(made[follower], made[leader])
    assert len(made[leader]) == 2 * (2 + 2 * 4)


@pytest.mark.slow
def test_a_step_on_two_hosts_of_tpus_gathers_logits_and_no_weights():
    pytest.importorskip("libtpu", reason="libtpu, the compiler for TPUs, is not installed (the extra `tpu`)")
    mesh = make_mesh(ShardingConfig(tensor=8), topology_devices(parse_topology("v5p:2x2x2")))
    model = replace(MODEL, d_model=1024, layers=1, heads=16, kv_heads=4, head_dim=128, d_ff=1024, vocab_size=151_936)
    model = replace(model, compute_dtype="bfloat16")
    rollout = RolloutConfig(slots=32, max_prompt_tokens=256, max_response_tokens=1700, narrow=())
    engine = make_engine(model, rollout, SamplingConfig(), [0], mesh)
    assert isinstance(engine.programs, SharedPrograms) and engine.programs.model.kv_heads == 8
    params = state_like(model, OptimConfig(), mesh).params
    (lowered,) = (program for name, program in engine.lower(params) if name.startswith("decode"))
    assert largest_gather(parse_hlo(lowered.compile().as_text())).bytes == 4 * 32 * 151_936
