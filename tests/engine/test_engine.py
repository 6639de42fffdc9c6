"""The engine against the training forward pass, settings that must not change a trajectory, and rules of sampling."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax import SamplingConfig, make_engine
from grpo_roc_jax.engine import decode
from grpo_roc_jax.engine.decode import trajectory_keys, uniforms
from grpo_roc_jax.engine.protocol import SingleTurn
from grpo_roc_jax.engine.steering import DrawSettings, RowSteering, Steering, steer, steering_arrays
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
    rollouts = baseline[1]
    assert sum(len(rollout.turns) for rollout in rollouts) > 1.5 * len(rollouts)
    assert reference_gap(params, rollouts) < 1e-5


FEW_SLOTS = replace(ROLLOUT, slots=3, chunk=13, block=16, append_lengths=(7, 128), pipeline="on")


@pytest.mark.parametrize(("rollout", "temperature"), [(ROLLOUT, 1.0), (FEW_SLOTS, 0.7)])
def test_the_gap_between_sampler_and_trainer_is_rounding_and_an_error_is_not(params, rollout, temperature):
    """Against what training runs, several trajectories to a row: wrong positions and temperatures are seen."""
    requests = make_requests(temperature=temperature)
    rollouts, _, _ = run(params, requests, rollout=rollout)
    length = 2 * WIDTH - 16
    tokens, positions, segments, recorded, mask = (np.zeros((len(rollouts) // 2, length), t) for t in "iiif?")
    for row, pair in enumerate(zip(rollouts[::2], rollouts[1::2], strict=True)):
        start = row  # no two rows alike
        for segment, part in enumerate(pair, start=1):
            at = slice(start, start + len(part.tokens))
            tokens[row, at], positions[row, at] = part.tokens, np.arange(len(part.tokens))
            segments[row, at], recorded[row, at], mask[row, at] = segment, part.logprobs, part.policy_mask
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


@pytest.mark.parametrize("changes", [{}, {"slots": 16, "narrow": (2, 4)}, {"append_lengths": (7,)}])
def test_same_trajectories_whatever_the_shapes(params, baseline, changes):
    requests, rollouts, _, _ = baseline
    engine = changed(engine_for(replace(ROLLOUT, **changes) if changes else FEW_SLOTS, SamplingConfig(), None))
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
    again, _, _ = run(params, [requests[i] for i in order], tools={"latency_polls": 7})
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
    assert all(row.length - row.prompt_length <= r.budget for r, row in zip(requests, rollouts, strict=True))
    assert stats.sampled_tokens == sum(int(rollout.policy_mask.sum()) for rollout in rollouts)


def test_nothing_is_compiled_after_warmup(params):
    engine = engine_for(ROLLOUT, SamplingConfig(), None)
    sampler = engine.publish(params, 0)
    engine.warmup(sampler)
    with CompilationCounter() as counted:
        for seed in range(3):
            requests = make_requests(3, 4, seed=seed)
            with jax.transfer_guard("disallow"):
                _, stats = engine.run(engine.publish(params, seed), requests, FakeTools(requests))
            assert stats.compilations == 0
    assert counted.count == 0
    names = [cost.name for cost in engine.programs.costs]
    assert names == ["allocate", "slots", "append/16", "copy", "decode/6"] and engine.warmup(sampler) == []


def test_an_observation_that_would_overflow_ends_the_row_without_it(params):
    requests = make_requests(2, 3, budget=30)
    rollouts, stats, tools = run(params, requests, tools={"observation": (29, 30)})
    for index, r in enumerate(rollouts):
        assert r.stop != "length" or (r.turns[-1].end == len(r.tokens) and index in tools.cancels)
    assert stats.stops["length"] >= 5 and stats.observation_tokens == 0


SPLIT = replace(MODEL, layers=1, vocab_size=96)  # which divides over 2 and 4 devices
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
    return [c for p in programs for c in hanging(parse_hlo(p.as_text()), jax.tree.leaves(p.input_shardings))]


def test_logits_that_stay_split_are_refused_before_they_hang(monkeypatch):
    monkeypatch.setattr(decode, "gathered", lambda logits, mesh: logits)
    mesh = make_mesh(ShardingConfig(fsdp=2, tensor=2), jax.devices()[:4])
    engine = make_engine(SPLIT, replace(ROLLOUT, slots=8), SamplingConfig(), STOPS, mesh)
    collectives = hanging_chunks(engine, state_like(SPLIT, OptimConfig(), mesh).params)
    assert collectives and all("collective-permute" in collective for collective in collectives)


MESHES = [(2, 2, 2), *(pytest.param(axes, marks=pytest.mark.slow) for axes in [(1, 2, 2), (1, 1, 4), (4, 1, 2)])]


@pytest.mark.parametrize("axes", MESHES)
def test_a_vocabulary_that_is_really_split_gives_the_same_tokens(unsplit, axes):
    """Shards leave a chunk by themselves; a collective permute is one of all devices, and hangs where one has left."""
    params, rollouts = unsplit
    data, fsdp, tensor = axes
    mesh = make_mesh(ShardingConfig(data=data, fsdp=fsdp, tensor=tensor), jax.devices()[: data * fsdp * tensor])
    engine, sampler, split_rollouts, stats = rollouts_of_split(params, mesh)
    assert stats.compilations == 0
    assert len(stats.shard_tokens) == data * fsdp and min(stats.shard_tokens) > 0
    assert hanging_chunks(engine, sampler.params) == []
    assert sampler.params["embed"].sharding.shard_shape((96, 32))[0] < 96
    assert_same(rollouts, split_rollouts)


V = 300


def many(logits, n=10_000, temperature=1.0, **config):
    """n draws from one row of logits, by uniforms as in the engine."""

    @jax.jit
    def draw(logits):
        keys = jnp.tile(trajectory_keys(jnp.full(1, 0), jnp.zeros((3, 1), jnp.int32)), (n, 1))
        rows, temperatures = jnp.tile(logits, (n, 1)), jnp.full(n, temperature, jnp.float32)
        return decode.sample(rows, uniforms(keys, jnp.arange(n)), temperatures, SamplingConfig(**config), None, None)

    return draw(jnp.float32(logits))


def test_frequencies_follow_the_softmax():
    logits = np.random.default_rng(0).normal(size=V)
    n, temperature = 40_000, 0.7
    drawn = many(logits, n, temperature=temperature)
    p = np.asarray(jax.nn.softmax(logits / temperature))
    counts = np.bincount(np.asarray(drawn.token), minlength=V)
    assert 0.75 < ((counts - n * p) ** 2 / (n * p)).sum() / (V - 1) < 1.3
    np.testing.assert_allclose(drawn.logprob, np.log(p)[np.asarray(drawn.token)], atol=2e-6)


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(5, 1.0, 0.0), (0, 0.6, 0.0), (30, 0.8, 0.05)])
def test_cuts_keep_what_sorting_keeps(top_k, top_p, min_p):
    """The top k, of those the fewest that reach top_p, of those the tokens with so much of the largest."""
    logits = 2 * np.random.default_rng(1).normal(size=V)
    p = np.asarray(jax.nn.softmax(logits))
    allowed = np.argsort(-p, kind="stable")[: top_k or V]
    mass = np.cumsum(p[allowed])
    within = allowed[: int(np.searchsorted(mass, top_p * mass[-1])) + 1]
    allowed = {int(i) for i in within if p[i] >= min_p * p.max()}
    drawn = many(logits, top_k=top_k, top_p=top_p, min_p=min_p)
    assert {i for i in allowed if p[i] > 2e-3} <= set(np.asarray(drawn.token).tolist()) <= allowed
    np.testing.assert_allclose(drawn.mass, p[list(allowed)].sum(), atol=1e-5)
    np.testing.assert_allclose(drawn.logprob, np.log(p)[np.asarray(drawn.token)], atol=2e-6)


def test_keys_depend_on_every_part_of_the_path_and_on_nothing_else():
    paths = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0]], np.int32)
    keys, other = (np.asarray(trajectory_keys(jnp.full(5, seed), jnp.asarray(paths.T))) for seed in (0, 1))
    assert len({tuple(key) for key in np.concatenate([keys, other]).tolist()}) == 10
    order = np.array([4, 2, 0, 3, 1])
    np.testing.assert_array_equal(trajectory_keys(jnp.zeros(5, jnp.int32), jnp.asarray(paths[order].T)), keys[order])
    drawn = np.asarray(uniforms(jnp.asarray(keys), jnp.arange(5)))
    assert ((drawn >= 0) & (drawn < 1)).all() and len(np.unique(drawn)) == 10


def test_thresholds_are_found_to_the_last_bit():
    edges = jnp.concatenate([jnp.array([1e-30, 1.0]), jax.random.uniform(jax.random.key(0), (30,))])
    find = jax.jit(
        lambda edges: decode.largest_threshold(lambda t: (t <= edges).astype(jnp.float32), jnp.ones_like(edges))
    )
    np.testing.assert_array_equal(find(edges), edges)


def test_edits_and_masks_of_logits_are_those_of_a_loop():
    logits = np.random.default_rng(0).normal(size=(4, MODEL.vocab_size)).astype(np.float32)
    bits = np.zeros(128, np.uint8)
    bits[list(STOPS)] = 1
    words = np.packbits(bits, bitorder="little").view(np.uint32)
    grammar = SimpleNamespace(allowed=lambda: words, take=lambda ids: None)
    penalties = DrawSettings(presence=0.5, frequency=0.25, repetition=1.5, bias={9: 1.0})
    settings = DrawSettings(bias={3: 2.5, 96: -100.0}), penalties, DrawSettings()
    rows = {i: RowSteering(setting, grammar if i == 2 else None, [9, 20]) for i, setting in enumerate(settings)}
    for row in rows.values():
        for token in (9, 30, 9):
            row.take([token])
    wanted = logits.copy()
    wanted[[0, 0, 1], [3, 96, 9]] += 2.5, -100, 1.0
    for token in (9, 20, 30):
        wanted[1, token] = wanted[1, token] / 1.5 if wanted[1, token] > 0 else wanted[1, token] * 1.5
    wanted[1, 9] -= 0.5 + 2 * 0.25
    wanted[1, 30] -= 0.75
    wanted[2, [i for i in range(MODEL.vocab_size) if i not in STOPS]] = -np.inf
    arrays = steering_arrays(rows, 4, MODEL.vocab_size, SamplingConfig(), 4)
    steered = steer(jnp.asarray(logits), Steering(*map(jnp.asarray, arrays)))
    np.testing.assert_allclose(steered, wanted, rtol=1e-6)
    assert [rows[i].most_steps for i in range(3)] == [None, 1, 1]
