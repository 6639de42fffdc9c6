"""The engine against the training forward pass, and settings that must not change a trajectory."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from grpo_roc_jax.engine import decode
from grpo_roc_jax.engine.config import SamplingConfig
from grpo_roc_jax.engine.engine import make_engine
from grpo_roc_jax.engine.protocol import SingleTurn
from grpo_roc_jax.learner.loss import UpdateConfig, policy_logprobs
from grpo_roc_jax.learner.update import OptimConfig, state_like
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh
from grpo_roc_jax.planner.hlo import parse_hlo
from grpo_roc_jax.planner.hlo_loops import hanging
from grpo_roc_jax.planner.simulate import Costs, Machine, RowLife, RowTurn, StepSchedule, simulate
from grpo_roc_jax.record.metrics import CompilationCounter
from tests.helpers.engine_checks import WIDTH, assert_same, reference_gap, reference_logprobs
from tests.helpers.reference import random_params
from tests.helpers.rollout_fakes import MODEL, ROLLOUT, STOPS, FakeTools, changed, engine_for, make_requests, run


@jax.jit
def recompute(params, rows, temperatures):
    """The log-probabilities that training computes, with a temperature for each token."""
    batch = SimpleNamespace(**rows, temperatures=temperatures, routes=None)
    return policy_logprobs(params, batch, MODEL, UpdateConfig())[0]


def test_logprobs_equal_the_training_forward(params, baseline):
    _, rollouts, _, _ = baseline
    assert sum(len(rollout.turns) for rollout in rollouts) > 1.5 * len(rollouts)
    assert reference_gap(params, rollouts) < 1e-5


SLOW = pytest.mark.slow
NARROW = replace(ROLLOUT, slots=16, narrow=(2, 4))
FEW_SLOTS = replace(ROLLOUT, slots=3, chunk=13, block=16, append_lengths=(7, 128), pipeline="on")


@pytest.mark.parametrize(("rollout", "temperature"), [(ROLLOUT, 1.0), (FEW_SLOTS, 1.0), (FEW_SLOTS, 0.7)])
def test_the_gap_between_sampler_and_trainer_is_rounding_and_an_error_is_not(params, rollout, temperature):
    """Against what training runs: several trajectories to a row, at columns of their own. Both sides compute in float32
    and add up in other orders; positions off by one, or another temperature, are seen at once."""
    requests = make_requests(temperature=temperature)
    rollouts, _, _ = run(params, requests, rollout=rollout)
    length = 2 * WIDTH - 16
    tokens, positions, segments, recorded, mask = (np.zeros((len(rollouts) // 2, length), t) for t in "iiif?")
    for row, pair in enumerate(zip(rollouts[::2], rollouts[1::2], strict=True)):
        start = row  # no two rows alike
        for segment, sample in enumerate(pair, start=1):
            at = slice(start, start + len(sample.tokens))
            tokens[row, at], positions[row, at] = sample.tokens, np.arange(len(sample.tokens))
            segments[row, at], recorded[row, at], mask[row, at] = segment, sample.logprobs, sample.policy_mask
            start = at.stop
    rows = {"tokens": tokens, "positions": positions, "segment_ids": segments}

    def gap(rows, temperature):
        computed = recompute(params, rows, np.full(tokens.shape, temperature, np.float32))
        return np.abs(np.asarray(computed) - recorded)[mask]

    rounding = gap(rows, temperature)
    assert rounding.max() < 1e-4 and rounding.mean() < 1e-6
    # Rotary attention depends on distances alone, so the positions of a part of each trajectory are moved.
    late = rows | {"positions": np.where(positions > 20, positions + 1, positions)}
    for error in (gap(late, temperature), gap(rows, 1.1 * temperature)):
        assert error.max() > 1e-2 and error.mean() > 1e-4, "both a hundred times what rounding may make"


def test_rows_are_drawn_at_the_temperatures_of_their_requests(params):
    """Greedy rows take the best token at every position, with its log-probability at temperature 1."""
    temperatures = [0.0, 0.5, 1.7] * 4
    requests = [replace(r, temperature=t) for r, t in zip(make_requests(4, 3), temperatures, strict=True)]
    rollouts, _, _ = run(params, requests)
    assert [rollout.temperature for rollout in rollouts] == temperatures
    assert reference_gap(params, rollouts, temperatures=[t or 1.0 for t in temperatures]) < 1e-5
    assert max(len(rollout.turns) for rollout in rollouts[::3]) >= 3
    for rollout in rollouts[::3]:
        best, at = reference_logprobs(params, rollout.tokens).argmax(axis=1), np.flatnonzero(rollout.policy_mask)
        np.testing.assert_array_equal(rollout.tokens[at], best[at - 1])


def test_tokens_are_prompt_turns_and_observations(baseline):
    """Prompts are written once for each group, and observations once."""
    requests, rollouts, stats, tools = baseline
    observations = sum(len(r.tokens) - r.prompt_length - int(r.policy_mask.sum()) for r in rollouts)
    prompts = {request.place: len(request.prompt) - 1 for request in requests}
    assert (stats.prompts, stats.observation_tokens) == (len(prompts), observations)
    assert stats.prefilled_tokens == sum(prompts.values()) + observations
    assert stats.prompts + stats.forks + stats.reused == len(requests)
    for index, (request, rollout) in enumerate(zip(requests, rollouts, strict=True)):
        ended = [turn for turn in tools.ended if turn.row == index]
        spans = [(turn.start, turn.end) for turn in rollout.turns]
        assert [(turn.start, turn.start + len(turn.tokens)) for turn in ended] == spans
        parts = [request.prompt]
        for number, turn in enumerate(ended, 1):
            parts.append(turn.tokens)
            if number < len(ended):
                parts.append(tools.observation_ids(index, number))
        np.testing.assert_array_equal(rollout.tokens, np.concatenate(parts))
        mask = np.isin(np.arange(rollout.length), [at for span in spans for at in range(*span)])
        np.testing.assert_array_equal(rollout.policy_mask, mask)
        np.testing.assert_array_equal(rollout.versions, np.where(mask, 5, -1))
        assert not rollout.logprobs[~mask].any()


MANY_SLOTS = replace(ROLLOUT, slots=20, chunk=1, append_rows=6, kv_tokens=300, admission="longest")
SHORT_APPENDS = replace(ROLLOUT, append_lengths=(7,))


@pytest.mark.parametrize("rollout", [FEW_SLOTS, NARROW, SHORT_APPENDS, pytest.param(MANY_SLOTS, marks=SLOW)])
def test_same_trajectories_whatever_the_shapes(params, baseline, rollout):
    requests, rollouts, _, _ = baseline
    engine = changed(engine_for(rollout, SamplingConfig(), None))
    engine.programs.read_tokens = 32  # appends of 1, 2, 4 and 6 rows
    again, _ = engine.run(engine.publish(params, 5), requests, FakeTools(requests))
    assert_same(rollouts, again)


def test_same_trajectories_however_they_are_requested_and_answered(params, baseline):
    """Siblings differ from each other, and those of one step from those of another."""
    requests, rollouts, _, _ = baseline
    assert len({tuple(rollout.tokens) for rollout in rollouts}) == len(rollouts)
    later, _, _ = run(params, [replace(request, step=3) for request in requests])
    assert all(tuple(a.tokens) != tuple(b.tokens) for a, b in zip(rollouts, later, strict=True))
    order = np.random.default_rng(3).permutation(len(requests))
    for latency in (0, 7):
        again, _, _ = run(params, [requests[i] for i in order], tools={"latency_polls": latency})
        assert_same([rollouts[i] for i in order], again)
    grouped = [replace(request, count=5) for request in requests if request.first_sample == 0]
    again, stats, _ = run(params, grouped, environment=FakeTools(requests))
    assert stats.rollouts == len(requests)
    assert_same(rollouts, again)
    assert [t.sample for t in again] == [request.first_sample for request in requests]


def test_stops_are_exhaustive(baseline):
    requests, rollouts, stats, _ = baseline
    assert sum(stats.stops.values()) == len(requests)
    shares = [value for name, value in stats.metrics().items() if name.startswith("rollout/stop_")]
    assert sum(shares) == pytest.approx(1.0)
    for request, rollout in zip(requests, rollouts, strict=True):
        assert rollout.length - rollout.prompt_length <= request.budget
    assert stats.sampled_tokens == sum(int(rollout.policy_mask.sum()) for rollout in rollouts)


def test_nothing_is_compiled_after_warmup(params):
    engine = engine_for(ROLLOUT, SamplingConfig(), None)
    sampler = engine.publish(params, 0)
    engine.warmup(sampler)
    costs = engine.programs.costs
    assert len(costs) == engine.programs.compilations == len({cost.name for cost in costs})
    engine.publish(params, 1)
    with CompilationCounter() as counted:
        for seed in range(3):
            requests = make_requests(3, 4, seed=seed)
            with jax.transfer_guard("disallow"):
                _, stats = engine.run(engine.publish(params, seed), requests, FakeTools(requests))
            assert stats.compilations == 0
    assert counted.count == 0
    assert [cost.name for cost in costs] == ["allocate", "slots", "append/16", "copy", "decode/6"]
    assert engine.warmup(sampler) == []


def test_scratch_memory_is_small_and_caches_are_updated_in_place(params):
    model = replace(MODEL, layers=1, kv_heads=4, head_dim=32)
    engine = make_engine(model, replace(ROLLOUT, slots=64, max_response_tokens=200), SamplingConfig(), STOPS)
    costs = engine.warmup(engine.publish(jax.device_put(random_params(model)), 0))
    checked = [cost for cost in costs if cost.name.split("/")[0] in ("append", "copy", "decode")]
    assert [cost.name for cost in checked] == ["append/16", "append/256", "copy", "decode/16", "decode/64"]
    for cost in checked:
        assert cost.temp_bytes < 0.1 * cost.cache_bytes, cost


def test_few_live_rows_are_decoded_by_a_narrow_program(params):
    requests = [request for request in make_requests(4, 4) if request.first_sample < 4]
    engine = engine_for(NARROW, SamplingConfig(), None)
    without = changed(engine)
    without.programs.widths = (16,)
    wide, narrow = (e.run(e.publish(params, 5), requests, FakeTools(requests))[1] for e in (without, engine))
    assert wide.slot_steps == 16 * wide.steps
    assert narrow.slot_steps < 16 * narrow.steps and narrow.slot_use > wide.slot_use
    assert narrow.sampled_tokens == wide.sampled_tokens
    lowered = dict(engine.lower(params))
    assert {"weight_sync", "append", "copy"} <= {name.split("/")[0] for name in lowered}
    operations = [lowered[f"decode/{rows}"].cost_analysis()["flops"] for rows in (4, 8, 16)]
    assert operations[0] < 0.9 * operations[1] < 0.81 * operations[2], "attention to the cache costs the same"


def test_an_observation_that_would_overflow_ends_the_row_without_it(params):
    requests = make_requests(2, 3, budget=30)
    rollouts, stats, tools = run(params, requests, tools={"observation": (29, 30)})
    for index, r in enumerate(rollouts):
        assert r.stop != "length" or (r.turns[-1].end == len(r.tokens) and index in tools.cancels)
    assert stats.stops["length"] >= 5 and stats.observation_tokens == 0


SPLIT = replace(MODEL, layers=1, vocab_size=96)
"""Its vocabulary divides over 2 and 4 devices; stop ids and results of tools lie below it."""
CUT = SamplingConfig(top_k=7, temperature=0.8)


def test_the_simulator_has_the_rounds_of_the_engine(params):
    """Chunks, decode steps and computed rows to the last one; only times are predicted."""
    budgets = np.random.default_rng(0).integers(1, 15, 20)
    requests = [replace(request, budget=int(n)) for request, n in zip(make_requests(), budgets, strict=True)]
    rows, stats, _ = run(params, requests, environment=SingleTurn())
    lives = [RowLife(row.prompt_length, (RowTurn(row.length - row.prompt_length),)) for row in rows]
    groups = [tuple(lives[start : start + 5]) for start in range(0, 20, 5)]
    size = engine_for(ROLLOUT, SamplingConfig(), None).programs.size
    machine = Machine(1, ROLLOUT.slots, ROLLOUT.chunk, size.blocks + 1, size.columns, ROLLOUT.max_row_tokens)

    def total(**cost):
        costs = Costs(**(dict.fromkeys(("step", "row", "column", "append", "token"), 0.0) | cost))
        return simulate(lambda step: groups, machine, costs, StepSchedule(), 1).seconds[0]

    assert len({life.sampled for life in lives}) > 5 and 1 in budgets
    assert all(life.sampled <= n for life, n in zip(lives, budgets, strict=True)) and stats.stops["length"] > 5
    assert [total(round=1.0), total(step=1.0), total(row=1.0)] == [stats.chunks, stats.steps, stats.slot_steps]


def rollouts_of_split(params, mesh=None):
    """(engine, sampler, rollouts, statistics) of the model SPLIT."""
    requests = [replace(r, prompt=np.minimum(r.prompt, 95)) for r in make_requests()]
    engine = make_engine(SPLIT, replace(ROLLOUT, slots=8), CUT, STOPS, mesh, seed=11)
    sampler = engine.publish(params, 5)
    if mesh is not None:
        engine.warmup(sampler)
    return engine, sampler, *engine.run(sampler, requests, FakeTools(requests, vocab=96))


@pytest.fixture(scope="module")
def unsplit():
    """(parameters, rollouts) on one device."""
    params = jax.device_put(random_params(SPLIT, seed=4))
    return params, rollouts_of_split(params)[2]


def test_truncated_sampling_records_the_full_softmax(unsplit):
    params, rollouts = unsplit
    assert reference_gap(params, rollouts, SPLIT, [CUT.temperature] * len(rollouts)) < 1e-5
    for rollout in rollouts:
        at = np.flatnonzero(rollout.policy_mask)
        best = reference_logprobs(params, rollout.tokens, CUT.temperature, SPLIT)[at - 1].argsort()[:, -CUT.top_k :]
        assert (best == rollout.tokens[at, None]).any(axis=1).all()


def hanging_chunks(engine, params):
    """What `check_loops` refuses in the programs that decode."""
    programs = [low.compile() for name, low in engine.lower(params) if "decode" in name]
    assert programs
    return [c for p in programs for c in hanging(parse_hlo(p.as_text()), jax.tree.leaves(p.input_shardings))]


def test_logits_that_stay_split_are_refused_before_they_hang(monkeypatch):
    monkeypatch.setattr(decode, "gathered", lambda logits, mesh: logits)
    mesh = make_mesh(ShardingConfig(fsdp=2, tensor=2), jax.devices()[:4])
    engine = make_engine(SPLIT, replace(ROLLOUT, slots=8), SamplingConfig(), STOPS, mesh)
    collectives = hanging_chunks(engine, state_like(SPLIT, OptimConfig(), mesh).params)
    assert collectives and all("collective-permute" in collective for collective in collectives)


MESHES = [(2, 2, 2), (1, 2, 2), (2, 1, 4), (1, 1, 2), (2, 1, 2), (1, 1, 4), (1, 2, 4), (1, 4, 2), (4, 1, 2)]
"""Devices along the axes data, fsdp and tensor; all but the first mesh are slow."""


@pytest.mark.parametrize("axes", [MESHES[0], *(pytest.param(axes, marks=SLOW) for axes in MESHES[1:])])
def test_a_vocabulary_that_is_really_split_gives_the_same_tokens(unsplit, axes):
    """Shards leave a chunk by themselves, so its loop may exchange data within a shard only. A collective permute is
    one of all devices, and hangs where one shard has left."""
    params, rollouts = unsplit
    data, fsdp, tensor = axes
    mesh = make_mesh(ShardingConfig(data=data, fsdp=fsdp, tensor=tensor), jax.devices()[: data * fsdp * tensor])
    engine, sampler, split_rollouts, stats = rollouts_of_split(params, mesh)
    assert stats.compilations == 0
    assert len(stats.shard_tokens) == data * fsdp and min(stats.shard_tokens) > 0
    assert hanging_chunks(engine, sampler.params) == []
    assert sampler.params["embed"].sharding.shard_shape((96, 32))[0] < 96
    assert_same(rollouts, split_rollouts)
