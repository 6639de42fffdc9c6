"""The path of attention to the cache: configured, refused, or measured on a TPU; and equal rollouts by both."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax.engine import decode
from grpo_roc_jax.engine import programs as programs_module
from grpo_roc_jax.engine.config import RolloutConfig, SamplingConfig
from grpo_roc_jax.engine.engine import make_engine
from grpo_roc_jax.engine.protocol import SingleTurn
from grpo_roc_jax.model.config import ModelConfig, SlidingWindows
from grpo_roc_jax.model.pool import IN_PLACE, PAGED
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh
from grpo_roc_jax.model.transformer import init_params
from tests.helpers.engine_checks import assert_same
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


def engine_of(attention, mesh=None, model=MODEL, **settings):
    """On a backend that calls itself TPU, with devices of one."""
    rollout = RolloutConfig(**ROLLOUT | settings, attention=attention)
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
    engine = engine_of("auto", model=replace(MODEL, head_dim=64))
    engine.programs.measure = None
    assert engine.programs.attention == ("xla", {}), "the kernel does not take it"
    with pytest.raises(ValueError, match="head_dim = 64"):
        engine_of("paged", model=replace(MODEL, head_dim=64))


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
    engine = engine_of("auto", mesh, replace(MODEL, layers=2, windows=SlidingWindows((4, 0))))
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
    """Prompts in two pieces, so that an append reads the cache; forks; few rows left, in slots that are not the first
    ones, which a program of half of the rows decodes in their place."""
    params = init_params(jax.random.key(0), MODEL)
    rng = np.random.default_rng(0)
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
    """Short appends have one row or all; from `READ_TOKENS` tokens on the numbers in between have programs of their
    own."""
    lengths = {"append_lengths": (32, 128, 512), "max_prompt_tokens": 512, "append_rows": 8}
    rollout = RolloutConfig(**ROLLOUT | lengths)
    programs = make_engine(MODEL, rollout, SamplingConfig(), [0], None).programs
    wanted = {32: (1, 8, 8, 8), 128: (1, 4, 4, 8), 512: (1, 2, 4, 8)}
    assert {T: tuple(programs.append_width(n, T) for n in (1, 2, 4, 5)) for T in wanted} == wanted
