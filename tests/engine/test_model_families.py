"""The engine with the options of other families: recurrent layers, experts, layers that share an executable."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax.engine.by_layer import layer_kinds
from grpo_roc_jax.engine.config import LowPrecision, SamplingConfig
from grpo_roc_jax.engine.engine import make_engine
from grpo_roc_jax.engine.publish import ProbeByLayer, probe_tokens, sampling_probe, unstack
from grpo_roc_jax.learner.loss import UpdateConfig, policy_logprobs
from grpo_roc_jax.learner.pack import BatchConfig, pack
from grpo_roc_jax.method.compose import train_row
from grpo_roc_jax.model.config import Mixture, ModelConfig, SlidingWindows, SomeExtras
from grpo_roc_jax.model.experts import mix_experts, recorded
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh, param_shardings
from grpo_roc_jax.model.transformer import Execution, forward, layer_weights
from grpo_roc_jax.record.codec import groups_from_tree, groups_to_tree
from grpo_roc_jax.record.metrics import CompilationCounter
from grpo_roc_jax.types import Group, Verdict
from tests.helpers.engine_checks import assert_same, reference_gap
from tests.helpers.reference import random_params
from tests.helpers.rollout_fakes import (
    MODEL,
    PROBLEM,
    ROLLOUT,
    STOPS,
    FakeTools,
    StopPairs,
    changed,
    make_requests,
    one_rollout,
)
from tests.helpers.whole_rows import layers_apart
from tests.model import test_convert

PUBLISHED = {name: replace(model, vocab_size=97, norm_eps=1e-3) for name, model in test_convert.MODELS.items()}
TWO = {name: replace(model, layers=2) for name, model in PUBLISHED.items() if name not in ("gemma4_text", "olmo3")}
SHARED = replace(PUBLISHED["gemma4_text"].windows, shared_layers=2)
SMOOTH = replace(PUBLISHED["gemma4_text"].extras, query_scale=16.0)  # sharp attention would enlarge the rounding
BY_LAYER = replace(PUBLISHED["gemma4_text"], layers=4, windows=SHARED, extras=SMOOTH)
ONE_KEY = replace(SHARED, shared_layers=0, shared_ff=0, full_keys_as_values=True, full_kv_heads=1)
PAIRS = {"rotary_share": 0.5, "rotary_pairs": True}
QUERIES = SomeExtras(rotary_pairs=True, rotary_layers=(True, False), rotated_norm=True, query_unrotated=True)
QUERIES = replace(QUERIES, query_growth=0.3, query_length=9)
FOUR = Mixture(4, 2, norm_weights=False, scores="sigmoid_input", shared=12, every=2, dense_ff=40)
MODELS = {name: TWO[name] for name in ("gpt_oss", "deepseek_v3", "qwen3_5_moe_text", "granitemoehybrid", "glm4_moe")}
MODELS |= {
    "glm4, granite": replace(TWO["glm4"], extras=replace(TWO["granite"].extras, **PAIRS)),
    "ministral3": replace(TWO["ministral3"], extras=SomeExtras(query_growth=0.3, query_length=9)),
    "gemma4": replace(BY_LAYER, windows=ONE_KEY, extras=replace(SMOOTH, layer_embed=0, logit_cap=3.0)),
    "gemma4_small": BY_LAYER,
    "llama4": replace(TWO["llama"], windows=SlidingWindows((16, 0), chunked=True), extras=QUERIES, experts=FOUR),
}
SLOW = pytest.mark.slow
QUICK = ("deepseek_v3", "gpt_oss")


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=SLOW) for name in MODELS])
def test_rows_of_several_turns_equal_the_training_forward(name):
    model = MODELS[name]
    if model.experts.dense_ff:
        model = replace(model, experts=replace(model.experts, replay=True))
    params = random_params(model, seed=1, spread=0.05)
    params = jax.device_put(params | {"embed": 6.0 * params["embed"]})
    engine = make_engine(model, replace(ROLLOUT, narrow=(), slots=6), SamplingConfig(), STOPS, seed=11)
    requests = make_requests(3, 3)
    rollouts, _ = engine.run(engine.publish(params, 5), requests, FakeTools(requests))
    assert sum(len(rollout.turns) for rollout in rollouts) > len(rollouts)

    assert reference_gap(params, rollouts, model) < 2e-5
    if model.experts.replay:
        for rollout in rollouts:
            dense, known = rollout.routes[:, 0], rollout.routes[np.flatnonzero(rollout.policy_mask) - 1, 1]
            assert (dense == -1).all() and (known >= 0).all() and (known < model.experts.count).all()


RECURRENT = replace(TWO["qwen3_5_text"], norm_eps=1e-4)
SETTINGS = replace(ROLLOUT, narrow=(), slots=6)


@pytest.fixture(scope="module")
def weights():
    drawn = random_params(RECURRENT, seed=1)
    return jax.device_put(drawn | {"embed": 6.0 * drawn["embed"]})


@pytest.fixture(scope="module")
def run_recurrent(weights):
    """Runs requests on one engine with other options."""
    engine = make_engine(RECURRENT, SETTINGS, SamplingConfig(), STOPS, seed=11)

    def run(requests, tools, pipeline="off"):
        return changed(engine, pipeline=pipeline).run(engine.publish(weights, 5), requests, tools)

    return run


def test_rows_that_wait_share_prompts_and_take_observations_equal_the_training_forward(weights, run_recurrent):
    """Recurrent memory belongs to one position, so every way to a row must end there. 38 rows in 6 slots:
    prompts are copied in a round and written again; observations are padded; prompts of one token begin empty."""
    short = [one_rollout(4 + i, np.array([9 + i], np.int32), 40, s, step=2) for i in range(2) for s in range(9)]
    requests = make_requests() + short
    rollouts, stats = run_recurrent(requests, FakeTools(requests))
    assert sum(len(rollout.turns) for rollout in rollouts) > 1.5 * len(rollouts)
    assert stats.forks > 0 and stats.reused == 0 and stats.prompts > 4
    assert reference_gap(weights, rollouts, RECURRENT) < 2e-5
    assert_same(rollouts, run_recurrent(requests, FakeTools(requests), "on")[0], atol=2e-5)


@pytest.mark.parametrize("pipeline", ["off", "on"])
def test_a_row_cut_within_a_chunk_forgets_what_was_cut(weights, run_recurrent, pipeline):
    requests = make_requests(3, 3)
    tools = StopPairs(requests)
    rollouts, _ = run_recurrent(requests, tools, pipeline)
    assert tools.cut >= 10 and max(len(rollout.turns) for rollout in rollouts) >= 3
    assert reference_gap(weights, rollouts, RECURRENT) < 2e-5


@SLOW
@pytest.mark.parametrize("case", ["tensor", "heads", "int8", "experts"])
def test_samplers_on_meshes_and_in_int8_draw_what_the_trainer_computes(case):
    """Their log-probabilities are those of the weight check; on a mesh the tokens are those of one device."""
    model = replace(BY_LAYER, vocab_size=98)
    if case == "heads":
        model = replace(model, kv_heads=1, windows=replace(SHARED, full_kv_heads=1))
    elif case == "experts":
        model = replace(TWO["qwen3_moe"], vocab_size=100, experts=Mixture(4, 2, replay=True))
    rollout = replace(ROLLOUT, narrow=(), slots=8)
    if case == "int8":
        rollout = replace(rollout, low_precision=LowPrecision("int8", "int8"))
    devices = 8 if case == "experts" else 2
    mesh = make_mesh(ShardingConfig(data=devices // 4 or 1, fsdp=devices // 4 or 1, tensor=2), jax.devices()[:devices])
    params, requests, runs = random_params(model, seed=1), make_requests(3, 3), []
    for on in (None, mesh):
        engine = make_engine(model, rollout, SamplingConfig(), STOPS, on, seed=11)
        sampler = engine.publish(jax.device_put(params, on and param_shardings(model, on)), 5)
        assert sampler.check_gap < 2e-5
        runs.append(engine.run(sampler, requests, FakeTools(requests))[0])
    assert case != "experts" or sampler.params["layers"][0]["w_up"].sharding.spec[0] == "tensor"
    for alone, shared in zip(*runs, strict=True):
        np.testing.assert_array_equal(alone.tokens, shared.tokens)
        np.testing.assert_array_equal(alone.routes, shared.routes)


FEWER = replace(SETTINGS, slots=16, narrow=(2, 4), append_rows=3)
TIGHT = replace(SETTINGS, kv_tokens=192, block=16)  # room for a row and a half of the longest


@SLOW
@pytest.mark.parametrize(("settings", "split"), [(FEWER, False), (FEWER, True), (TIGHT, False)])
def test_rows_in_other_programs_and_rows_written_again_equal_the_training_forward(weights, settings, split):
    requests, mesh = make_requests(3, 4), make_mesh(ShardingConfig(data=2, fsdp=2, tensor=2)) if split else None
    engine = make_engine(RECURRENT, settings, SamplingConfig(), STOPS, mesh, seed=11)
    sampler = engine.publish(weights, 5)
    engine.warmup(sampler)
    for tools in (FakeTools(requests), StopPairs(requests)):
        rollouts, stats = engine.run(sampler, requests, tools)
        assert stats.compilations == 0 and (stats.evictions >= 3) is (settings is TIGHT)
        assert reference_gap(weights, rollouts, RECURRENT) < 2e-5
    assert tools.cut > 10


NARROW = replace(ROLLOUT, slots=16, narrow=(4,))


def engine_of(shared, model, rollout=NARROW, sampling=None, mesh=None):
    return make_engine(model, rollout, sampling or SamplingConfig(), STOPS, mesh, seed=11, shares_layers=shared)


CASES = {
    "plain": {"model": MODEL},
    "truncated": {"model": MODEL, "sampling": SamplingConfig(top_k=7, temperature=0.8)},
    "windows": {"model": replace(MODEL, layers=3, windows=SlidingWindows((5, 0), local_theta=100.0))},
    "experts": {"model": replace(MODEL, experts=Mixture(8, 2, replay=True))},
    "int8": {"model": MODEL, "rollout": replace(NARROW, low_precision=LowPrecision("int8", "int8"))},
    "recurrent": {"model": RECURRENT},
    "shared keys": {"model": BY_LAYER},
}


@pytest.mark.parametrize("case", ["plain", *(pytest.param(case, marks=SLOW) for case in [*CASES][1:])])
def test_trajectories_are_those_of_unrolled_layers(case):
    """Also on a mesh of one device, as runs have it; nothing is compiled after the warmup."""
    params = jax.device_put(random_params(CASES[case]["model"], seed=1))
    requests, runs = make_requests(3, 4), []
    for shared, mesh in ((False, None), (True, make_mesh(ShardingConfig(data=1), jax.devices()[:1]))):
        engine = engine_of(shared, **CASES[case], mesh=mesh)
        sampler = engine.publish(params, 5)
        assert sampler.check_gap < 2e-5
        if shared:
            engine.warmup(sampler)
        rollouts, stats = engine.run(sampler, requests, FakeTools(requests))
        assert stats.compilations == 0 or not shared
        runs.append((rollouts, stats))
    (wanted, before), (rollouts, stats) = runs
    assert_same(wanted, rollouts)
    assert (stats.steps, stats.chunks, stats.slot_steps) == (before.steps, before.chunks, before.slot_steps)
    if case == "experts":
        for trajectory, other in zip(wanted, rollouts, strict=True):
            np.testing.assert_array_equal(trajectory.routes, other.routes)


def test_a_deeper_model_compiles_nothing_more():
    """Ten layers have the programs of two and none besides."""
    counts = []
    for model in (replace(MODEL, layers=2), replace(MODEL, layers=10)):
        engine = engine_of(True, model, replace(NARROW, narrow=()))
        sampler = engine.publish(jax.device_put(random_params(model)), 0)
        with CompilationCounter() as compiled:
            engine.warmup(sampler)
        counts.append((compiled.count, [cost.name for cost in engine.programs.costs]))
    (few, names), (many, others) = counts
    assert names == others and 10 < many <= few


def test_the_weight_check_finds_a_wrong_layer_whoever_computes_it():
    """By layer and whole: equal log-probabilities, which change with a layer far from the first of its kind."""
    model = replace(MODEL, layers=5)
    params = unstack(jax.device_put(random_params(model)), model)
    tokens = probe_tokens(model)
    by_layer = ProbeByLayer(model, None)
    plain, full = by_layer(params, tokens), jax.jit(sampling_probe, static_argnames="config")(params, tokens, model)
    np.testing.assert_allclose(plain, full, atol=1e-5)
    *others, last = params["layers"]
    wrong = params | {"layers": (*others, last | {"wo": 1.5 * last["wo"]})}
    assert np.abs(by_layer(wrong, tokens) - plain).max() > 1e-3


def test_a_layer_is_of_the_kind_of_the_first_that_computes_the_same():
    windows = SlidingWindows((5, 5, 0), local_theta=100.0)
    assert layer_kinds(ModelConfig(layers=6, windows=windows)) == (0, 0, 2, 0, 0, 2)
    assert layer_kinds(replace(RECURRENT, layers=4)) == (0, 1, 0, 1)
    shared = replace(windows, shared_layers=3)
    assert layer_kinds(ModelConfig(layers=7, windows=shared)) == (0, 0, 2, 0, 4, 5, 4)


def test_who_shares_layers():
    """One rule: a CPU, one device, and layers that take much longer than a call from the host."""
    small = ModelConfig(d_model=256, layers=4, heads=4, kv_heads=2, head_dim=64, d_ff=1024, vocab_size=97)
    large = replace(small, d_model=576, heads=9, kv_heads=3, d_ff=1536)
    mesh = make_mesh(ShardingConfig(data=2), jax.devices()[:2])
    for model, on, shares in ((small, None, False), (large, None, True), (large, mesh, False)):
        assert make_engine(model, NARROW, SamplingConfig(), STOPS, on).programs.shares_layers is shares
    assert layer_weights(large) == pytest.approx(3.54e6, rel=0.01)
    mixed = replace(large, experts=Mixture(8, 2))
    attention = layer_weights(large) - 3 * 576 * 1536
    assert layer_weights(mixed) == pytest.approx(attention + 2 * 3 * 576 * 1536 + 8 * 576, rel=0.01)


MIXED = CASES["experts"]["model"]
LENGTH = 128


@pytest.fixture(scope="module")
def mixed():
    return jax.device_put(random_params(MIXED, seed=1))


def sampled(mixed, dtype="float32", rollout=ROLLOUT, **fields):
    """(multi-turn trajectories of a sampler that computes in `dtype`, statistics)."""
    engine = make_engine(replace(MIXED, compute_dtype=dtype), rollout, SamplingConfig(), STOPS, None, seed=11)
    requests = make_requests(**fields)
    return engine.run(engine.publish(mixed, 5), requests, FakeTools(requests))


@pytest.fixture(scope="module")
def trajectories(mixed):
    return sampled(mixed, groups=3, siblings=3)[0]


@jax.jit
def _choices(mixed, tokens):
    chosen, positions = [], jnp.arange(LENGTH)[None]
    execution = Execution(experts=recorded(mix_experts, chosen))
    forward(mixed, tokens, positions, jnp.ones_like(tokens), MIXED, execution)
    return jnp.stack([layer[0] for layer in chosen], axis=1)


def own_choices(mixed, trajectory):
    """int[T,L,X]: what the training forward chooses by itself, in float32."""
    padded = np.zeros((1, LENGTH), np.int32)
    padded[0, : trajectory.length] = trajectory.tokens
    return np.asarray(_choices(layers_apart(mixed, MIXED), padded))[: trajectory.length]


def test_the_sampler_returns_the_experts_of_the_tokens_that_it_decoded(mixed, trajectories):
    """A drawn token has those of the token before it; prompts, observations and the last token have none."""
    assert any(len(trajectory.turns) > 1 for trajectory in trajectories)
    for trajectory in trajectories[::4]:
        known = (trajectory.routes >= 0).all(axis=(1, 2))
        np.testing.assert_array_equal(known[:-1], trajectory.policy_mask[1:])
        assert not known[-1] and (trajectory.routes[~known] == -1).all()
        np.testing.assert_array_equal(trajectory.routes[known], own_choices(mixed, trajectory)[known])


@pytest.mark.slow
def test_rows_that_are_written_again_keep_their_experts(mixed, trajectories):
    tight = replace(ROLLOUT, kv_tokens=192, block=16, narrow=())
    again, stats = sampled(mixed, rollout=tight, groups=3, siblings=3)
    assert stats.evictions
    for trajectory, other in zip(trajectories, again, strict=True):
        np.testing.assert_array_equal(trajectory.tokens, other.tokens)
        np.testing.assert_array_equal(trajectory.routes, other.routes)


def logprobs_of(mixed, trajectories, *, replay):
    """(log-probabilities by the update's forward in float32, recorded ones, policy mask) of packed rows."""
    rows = []
    for t in trajectories:
        zeros = np.zeros(t.length, np.float32)
        row = train_row(t, t.policy_mask, t.logprobs, zeros, zeros, "token", None)
        rows.append(row if replay else replace(row, routes=None))
    batch, _ = pack(rows, BatchConfig(row_length=LENGTH, rows=len(rows)), 1)
    micro = jax.tree.map(lambda leaf: leaf[0] if np.ndim(leaf) else leaf, batch)
    run = jax.jit(partial(policy_logprobs, model=replace(MIXED, compute_dtype="float32"), update=UpdateConfig()))
    return np.asarray(run(mixed, micro)[0]), micro.logprobs_old, micro.policy_mask


@pytest.mark.slow
def test_replay_narrows_the_gap_between_a_bfloat16_sampler_and_a_float32_trainer(mixed):
    rollouts, _ = sampled(mixed, "bfloat16")
    gaps = {}
    for replay in (False, True):
        ours, old, mask = logprobs_of(mixed, rollouts, replay=replay)
        gaps[replay] = np.abs(ours - old)[mask]
    changed = np.mean([(own_choices(mixed, t) != t.routes)[t.routes[:, 0, 0] >= 0].any() for t in rollouts[::5]])
    figures = {replay: (gap.mean(), gap.max(), np.mean(gap > 0.1)) for replay, gap in gaps.items()}
    print(f"gap without {figures[False]}, with {figures[True]}; rows with another choice {changed}")
    assert changed > 0
    assert gaps[True].mean() < 0.7 * gaps[False].mean()


def test_replayed_choices_that_are_the_own_ones_change_nothing(mixed, trajectories):
    native, replayed = (logprobs_of(mixed, trajectories, replay=replay)[0] for replay in (False, True))
    np.testing.assert_allclose(native, replayed, atol=1e-5)


def test_a_checkpoint_keeps_the_experts(trajectories):
    some, verdict = tuple(trajectories[:2]), Verdict(0.0, "wrong", None, 0, 0, 0, True, 1)
    (restored,) = groups_from_tree(groups_to_tree([Group(PROBLEM, some, (verdict, verdict))]))
    for trajectory, other in zip(some, restored.trajectories, strict=True):
        assert other.routes.dtype == np.int16
        np.testing.assert_array_equal(trajectory.routes, other.routes)
