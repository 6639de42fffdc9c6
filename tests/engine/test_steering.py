"""What single rows ask of their draws: against NumPy, against engines with the same settings, and beside other rows."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax.engine.config import SamplingConfig
from grpo_roc_jax.engine.decode import sample
from grpo_roc_jax.engine.engine import make_engine
from grpo_roc_jax.engine.steering import DrawSettings, RowSteering, Steering, steer, steering_arrays
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh
from tests.engine.test_sampling import kept_by_sorting, numbers, softmax
from tests.helpers.engine_checks import assert_same, reference_gap, reference_logprobs
from tests.helpers.rollout_fakes import MODEL, ROLLOUT, STOPS, FakeTools, make_requests, run

V, PLAIN = MODEL.vocab_size, SamplingConfig()
WHOLE = replace(ROLLOUT, max_turn_tokens=0)


def bits_of(tokens):
    bits = np.zeros(128, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


class Alternating:
    """Lets even and odd tokens follow each other, and a stop after `length` tokens only."""

    def __init__(self, length):
        self.length, self.ids = length, []

    def allowed(self):
        if len(self.ids) == self.length:
            return bits_of(STOPS)
        return bits_of(range(8 + len(self.ids) % 2, V, 2))

    def take(self, ids):
        assert len(ids) == 1, "what may follow was not asked for each token"
        self.ids += ids


class Steered(FakeTools):
    """Rows of these numbers are steered."""

    def __init__(self, requests, rows):
        super().__init__(requests, max_turns=1)
        self.rows = rows

    def steering(self, row):
        return self.rows.get(row)


def arrays(rows, slots, sampling=PLAIN, vocabulary=V):
    return Steering(*map(jnp.asarray, steering_arrays(rows, slots, vocabulary, sampling, 4)))


def test_edits_and_masks_of_logits_are_those_of_a_loop():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4, V)).astype(np.float32)
    settings = [
        DrawSettings(bias={3: 2.5, 96: -100.0}),
        DrawSettings(presence=0.5, frequency=0.25, repetition=1.5, bias={9: 1.0}),
        DrawSettings(),
    ]
    rows = {i: RowSteering(setting, Alternating(3) if i == 2 else None, [9, 20]) for i, setting in enumerate(settings)}
    for row in rows.values():
        for token in (9, 30, 9):
            row.take([token])
    wanted = logits.copy()
    wanted[0, 3] += 2.5
    wanted[0, 96] -= 100
    wanted[1, 9] += 1.0
    for token in (9, 20, 30):
        wanted[1, token] = wanted[1, token] / 1.5 if wanted[1, token] > 0 else wanted[1, token] * 1.5
    wanted[1, 9] -= 0.5 + 2 * 0.25
    wanted[1, 30] -= 0.75
    wanted[2, [i for i in range(V) if i not in STOPS]] = -np.inf
    steered = steer(jnp.asarray(logits), arrays(rows, 4))
    np.testing.assert_allclose(steered, wanted, rtol=1e-6)
    assert [rows[i].most_steps for i in range(3)] == [None, 1, 1]


def test_tokens_that_may_not_follow_are_those_of_a_loop_over_the_tokens_before():
    banned = ((12,), (9, 30), (9, 9, 31))
    row = RowSteering(DrawSettings(min_tokens=3, ends=frozenset(STOPS), banned=banned))
    plain = RowSteering(DrawSettings(min_tokens=3, ends=frozenset(STOPS), banned=((12,),)))
    drawn, steps = [], []
    for token in (9, 30, 9, 9, 8):
        ends = set(STOPS) if len(drawn) < 3 else set()
        wanted = ends | {last for *before, last in banned if drawn[len(drawn) - len(before) :] == before}
        assert row.forbidden() == wanted and row.most_steps == 1
        steered = steer(jnp.zeros((2, V)), arrays({1: row}, 2))
        assert set(np.flatnonzero(np.isinf(steered[1])).tolist()) == wanted and np.isfinite(steered[0]).all()
        steps.append(int(steering_arrays({0: plain}, 2, V, PLAIN, 2)[-1]))
        for steering in (row, plain):
            steering.take([token])
        drawn.append(token)
    assert steps == [2, 2, 1, 2, 2], "a chunk ends where a row may end for the first time"
    only = RowSteering(DrawSettings(banned=tuple((stop,) for stop in STOPS)), Alternating(0))
    assert np.isfinite(np.asarray(steer(jnp.zeros((1, V)), arrays({0: only}, 1)))).sum() == len(STOPS), "not nothing"


CUTS = [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.3}, {}, {"top_k": 30, "top_p": 0.8, "min_p": 0.05}, {"top_k": 1}]
BIAS = {10: 3.0, 11: 2.0}


@pytest.mark.parametrize("bias", [{}, BIAS])
def test_each_row_is_cut_as_if_all_were_cut_so(bias):
    """With a bias from edited logits; recorded under the policy in any case."""
    logits = np.float32(2 * np.random.default_rng(1).normal(size=(1, V)))
    edited = logits.copy()
    edited[0, [*bias]] += np.float32([*bias.values()])
    policy, p, n = softmax(logits[0] / 0.9), softmax(edited[0] / 0.9), 600
    rows = {i: RowSteering(DrawSettings(**CUTS[i % len(CUTS)], bias=bias)) for i in range(n)}
    uniform, heat, many = jnp.asarray(numbers(3, n)), jnp.full(n, 0.9), np.ones((n, 1), np.float32)
    draw = jax.jit(sample, static_argnums=(3, 4))
    mixed = draw(jnp.asarray(many * logits), uniform, heat, PLAIN, None, arrays(rows, n))
    np.testing.assert_allclose(mixed.logprob, np.log(policy)[np.asarray(mixed.token)], atol=2e-6)
    for number, cut in enumerate(CUTS):
        mine = np.arange(n) % len(CUTS) == number
        alone = draw(jnp.asarray(many * edited), uniform, heat, SamplingConfig(**cut), None)
        np.testing.assert_array_equal(mixed.token[mine], alone.token[mine])
        assert set(np.asarray(mixed.token[mine]).tolist()) <= kept_by_sorting(p, **cut)


def test_settings_of_the_engine_hold_for_a_row_that_asks_for_something_else():
    cold = arrays({0: RowSteering(DrawSettings(min_p=0.0))}, 2, SamplingConfig(top_k=7, top_p=0.5))
    np.testing.assert_allclose(cold.limits, [[7, 0.5, 0], [7, 0.5, 0]])


def steered_rows():
    return {
        1: RowSteering(DrawSettings(), Alternating(7)),
        4: RowSteering(DrawSettings(top_k=1)),
        5: RowSteering(DrawSettings(bias={50: 100.0})),
        8: RowSteering(DrawSettings(top_p=0.7, frequency=1.0)),
    }


def test_a_batch_mixes_steered_rows_with_others(params):
    """The others are drawn as without them; a masked row holds its grammar and stops only where that allows it."""
    requests = make_requests(2, 5, budget=20)
    free, _, _ = run(params, requests, rollout=WHOLE, environment=Steered(requests, {}))
    rows = steered_rows()
    mixed, _, _ = run(params, requests, rollout=WHOLE, environment=Steered(requests, rows))
    others = [i for i in range(10) if i not in rows]
    assert_same([free[i] for i in others], [mixed[i] for i in others])
    drawn = {i: mixed[i].tokens[mixed[i].policy_mask].tolist() for i in (1, 4, 5)}
    assert len(drawn[1]) == 8 and drawn[1][-1] in STOPS and mixed[1].stop in ("eos", "turns")
    assert [token % 2 for token in drawn[1][:-1]] == [0, 1, 0, 1, 0, 1, 0]
    assert drawn[5] == [50] * 20 and mixed[5].stop == "length"
    greedy = reference_logprobs(params, mixed[4].tokens).argmax(axis=1)[mixed[4].prompt_length - 1 :]
    assert drawn[4] == greedy[: len(drawn[4])].tolist()
    assert reference_gap(params, mixed) < 2e-5, "of the policy, whatever was asked"


SLOTS = replace(WHOLE, slots=16)


@pytest.mark.parametrize(
    ("rollout", "more"),
    [
        (replace(WHOLE, pipeline="on"), {}),
        (replace(SLOTS, narrow=(4,)), {}),
        pytest.param(SLOTS, {"shares_layers": True}, marks=pytest.mark.slow),
        pytest.param(WHOLE, {"mesh": ShardingConfig(data=2, tensor=2)}, marks=pytest.mark.slow),
    ],
    ids=["pipelined", "narrow", "layers", "split"],
)
def test_steered_rows_do_not_depend_on_how_programs_run(params, rollout, more):
    requests = make_requests(2, 5, budget=20)
    wanted, _, _ = run(params, requests, rollout=WHOLE, environment=Steered(requests, steered_rows()))
    more |= {"mesh": make_mesh(more["mesh"], jax.devices()[:4])} if "mesh" in more else {}
    engine = make_engine(MODEL, rollout, PLAIN, STOPS, seed=11, **more)
    trajectories, _ = engine.run(engine.publish(params, 5), requests, Steered(requests, steered_rows()))
    assert_same(wanted, trajectories)


def test_the_programs_are_compiled_once(params):
    requests = make_requests(1, 3, budget=20)
    engine = make_engine(MODEL, WHOLE, SamplingConfig(), STOPS, None, seed=11)
    sampler = engine.publish(params, 5)
    engine.warmup(sampler)
    compiled = [
        engine.run(sampler, requests, Steered(requests, {0: RowSteering(DrawSettings(**settings))}))[1].compilations
        for settings in ({"top_k": 2}, {"bias": {9: 1.0}}, {"presence": 1.0}, {"top_p": 0.5})
    ]
    assert compiled == [1, 0, 0, 0]
