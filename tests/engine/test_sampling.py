"""Sampling against sorting and softmax in NumPy; what single rows ask of their draws."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax.engine.config import SamplingConfig
from grpo_roc_jax.engine.decode import largest_threshold, sample, trajectory_keys, uniforms
from grpo_roc_jax.engine.engine import make_engine
from grpo_roc_jax.engine.steering import DrawSettings, RowSteering, Steering, steer, steering_arrays
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh
from tests.helpers.engine_checks import assert_same, reference_gap, reference_logprobs
from tests.helpers.rollout_fakes import MODEL, ROLLOUT, STOPS, FakeTools, make_requests, run

V, PLAIN = 300, SamplingConfig()


def softmax(logits):
    e = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


@partial(jax.jit, static_argnums=3, static_argnames="vocab_size")
def draw(logits, uniform, temperature, config, steering=None, vocab_size=None):
    logits, temperature = jnp.float32(logits), jnp.broadcast_to(jnp.float32(temperature), len(logits))
    return sample(logits, jnp.float32(uniform), temperature, config, vocab_size, steering)


@cache
def numbers(n, seed=0):
    """Uniforms as in the engine."""
    keys = jnp.tile(trajectory_keys(jnp.full(1, seed), jnp.zeros((3, 1), jnp.int32)), (n, 1))
    return np.asarray(jax.jit(uniforms)(keys, jnp.arange(n)))


def many(logits, n=10_000, temperature=1.0, vocab_size=None, **config):
    """n draws from one row of logits."""
    return draw(np.tile(logits, (n, 1)), numbers(n), temperature, SamplingConfig(**config), vocab_size=vocab_size)


def kept_by_sorting(p, top_k=0, top_p=1.0, min_p=0.0):
    """The tokens that may be drawn, by sorting: the top k, of those the fewest that reach top_p, of those min_p."""
    order = np.argsort(-p, kind="stable")
    allowed = order[: top_k or len(p)]
    if top_p < 1:
        mass = np.cumsum(p[allowed])
        allowed = allowed[: int(np.searchsorted(mass, top_p * mass[-1])) + 1]
    return {int(i) for i in allowed if p[i] >= min_p * p.max()}


def test_frequencies_follow_the_softmax():
    logits = np.random.default_rng(0).normal(size=V)
    n, temperature = 40_000, 0.7
    drawn = many(logits, n, temperature=temperature)
    p = softmax(logits / temperature)
    counts = np.bincount(np.asarray(drawn.token), minlength=V)
    chi = ((counts - n * p) ** 2 / (n * p)).sum() / (V - 1)
    assert 0.75 < chi < 1.3
    expected = np.log(p)[np.asarray(drawn.token)]
    np.testing.assert_allclose(drawn.logprob, expected, atol=2e-6)
    np.testing.assert_array_equal(drawn.mass, np.ones(n, np.float32))


CUTS = [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.3}, {}, {"top_k": 30, "top_p": 0.8, "min_p": 0.05}, {"top_k": 1}]


@pytest.mark.parametrize("cut", [*CUTS, {"top_k": 10_000}])
def test_cuts_keep_what_sorting_keeps(cut):
    logits = 2 * np.random.default_rng(1).normal(size=V)
    p = softmax(logits)
    allowed = kept_by_sorting(p, **cut)
    drawn = many(logits, **cut)
    assert set(np.asarray(drawn.token).tolist()) <= allowed
    likely = {i for i in allowed if p[i] > 2e-3}
    assert likely <= set(np.asarray(drawn.token).tolist())
    mass = p[list(allowed)].sum()
    np.testing.assert_allclose(drawn.mass, mass, atol=1e-5)
    np.testing.assert_allclose(drawn.logprob, np.log(p)[np.asarray(drawn.token)], atol=2e-6)


def test_greedy_takes_the_first_of_equals_and_ignores_the_uniforms():
    logits = np.zeros((2, V))
    logits[0, [17, 200]] = 3.0
    logits[1, 299] = 1.0
    for uniform in (0.0, 0.5, 1 - 2**-24):
        drawn = draw(logits, np.full((2, 2), uniform), 0.0, PLAIN)
        np.testing.assert_array_equal(drawn.token, [17, 299])
        np.testing.assert_allclose(drawn.logprob, np.log(softmax(logits))[[0, 1], [17, 299]], atol=1e-6)
        np.testing.assert_array_equal(drawn.mass, [1.0, 1.0])


@pytest.mark.parametrize("uniform", [0.0, 0.3, 1 - 2**-24])
def test_impossible_tokens_are_never_drawn(uniform):
    """Extreme logits: all mass on one token, the rest underflows to 0, in every place of the block structure."""
    tokens = [0, 127, 128, 255, 256, 299]
    logits = np.full((len(tokens), V), -1e4)
    logits[np.arange(len(tokens)), tokens] = 1e4
    drawn = draw(logits, np.full((len(tokens), 2), uniform), 1.0, PLAIN)
    np.testing.assert_array_equal(drawn.token, tokens)
    np.testing.assert_array_equal(drawn.logprob, np.zeros(len(tokens)))


def test_padding_of_the_embedding_is_never_drawn():
    logits = np.zeros(V)
    logits[290:] = 5.0
    for config in ({}, {"top_k": 3}, {"temperature": 0.0}):
        drawn = many(logits, 4000, vocab_size=290, **config)
        assert np.asarray(drawn.token).max() < 290
    expected = np.log(softmax(logits))[0]
    np.testing.assert_allclose(many(logits, 10, vocab_size=290).logprob, expected, atol=1e-5)


def test_keys_depend_on_every_part_of_the_path_and_on_nothing_else():
    paths = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0]], np.int32)
    keys, other = (np.asarray(trajectory_keys(jnp.full(5, seed), jnp.asarray(paths.T))) for seed in (0, 1))
    assert len({tuple(key) for key in np.concatenate([keys, other]).tolist()}) == 10
    order = np.array([4, 2, 0, 3, 1])
    np.testing.assert_array_equal(trajectory_keys(jnp.zeros(5, jnp.int32), jnp.asarray(paths[order].T)), keys[order])
    drawn = np.asarray(uniforms(jnp.asarray(keys), jnp.arange(5)))
    assert ((drawn >= 0) & (drawn < 1)).all() and len(np.unique(drawn)) == 10


def test_uniforms_are_uniform():
    drawn = numbers(20_000)
    for column in drawn.T:
        counts = np.histogram(column, bins=50, range=(0, 1))[0]
        assert 0.6 < ((counts - 400) ** 2 / 400).mean() < 1.5
    assert abs(np.corrcoef(drawn.T)[0, 1]) < 0.02


def test_thresholds_are_found_to_the_last_bit():
    edges = jnp.concatenate([jnp.array([1e-30, 1.0]), jax.random.uniform(jax.random.key(0), (30,))])
    find = jax.jit(lambda edges: largest_threshold(lambda t: (t <= edges).astype(jnp.float32), jnp.ones_like(edges)))
    np.testing.assert_array_equal(find(edges), edges)


VOCAB = MODEL.vocab_size
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
        return bits_of(range(8 + len(self.ids) % 2, VOCAB, 2))

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


def arrays(rows, slots, sampling=PLAIN, vocabulary=VOCAB):
    return Steering(*map(jnp.asarray, steering_arrays(rows, slots, vocabulary, sampling, 4)))


def test_edits_and_masks_of_logits_are_those_of_a_loop():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4, VOCAB)).astype(np.float32)
    penalties = DrawSettings(presence=0.5, frequency=0.25, repetition=1.5, bias={9: 1.0})
    settings = DrawSettings(bias={3: 2.5, 96: -100.0}), penalties, DrawSettings()
    rows = {i: RowSteering(setting, Alternating(3) if i == 2 else None, [9, 20]) for i, setting in enumerate(settings)}
    for row in rows.values():
        for token in (9, 30, 9):
            row.take([token])
    wanted = logits.copy()
    wanted[[0, 0, 1], [3, 96, 9]] += 2.5, -100, 1.0
    for token in (9, 20, 30):
        wanted[1, token] = wanted[1, token] / 1.5 if wanted[1, token] > 0 else wanted[1, token] * 1.5
    wanted[1, 9] -= 0.5 + 2 * 0.25
    wanted[1, 30] -= 0.75
    wanted[2, [i for i in range(VOCAB) if i not in STOPS]] = -np.inf
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
        steered = steer(jnp.zeros((2, VOCAB)), arrays({1: row}, 2))
        assert set(np.flatnonzero(np.isinf(steered[1])).tolist()) == wanted and np.isfinite(steered[0]).all()
        steps.append(int(steering_arrays({0: plain}, 2, VOCAB, PLAIN, 2)[-1]))
        for steering in (row, plain):
            steering.take([token])
        drawn.append(token)
    assert steps == [2, 2, 1, 2, 2], "a chunk ends where a row may end for the first time"
    only = RowSteering(DrawSettings(banned=tuple((stop,) for stop in STOPS)), Alternating(0))
    kept = np.isfinite(np.asarray(steer(jnp.zeros((1, VOCAB)), arrays({0: only}, 1))))
    assert kept.sum() == len(STOPS), "not nothing"


BIAS = {10: 3.0, 11: 2.0}


@pytest.mark.parametrize("bias", [{}, BIAS])
def test_each_row_is_cut_as_if_all_were_cut_so(bias):
    """With a bias from edited logits; recorded under the policy in any case."""
    logits = np.float32(2 * np.random.default_rng(1).normal(size=(1, VOCAB)))
    edited = logits.copy()
    edited[0, [*bias]] += np.float32([*bias.values()])
    policy, p, n = softmax(logits[0] / 0.9), softmax(edited[0] / 0.9), 600
    rows = {i: RowSteering(DrawSettings(**CUTS[i % len(CUTS)], bias=bias)) for i in range(n)}
    uniform = numbers(n, 3)
    mixed = draw(np.repeat(logits, n, 0), uniform, 0.9, PLAIN, arrays(rows, n))
    np.testing.assert_allclose(mixed.logprob, np.log(policy)[np.asarray(mixed.token)], atol=2e-6)
    for number, cut in enumerate(CUTS):
        mine = np.arange(n) % len(CUTS) == number
        alone = draw(np.repeat(edited, n, 0), uniform, 0.9, SamplingConfig(**cut))
        np.testing.assert_array_equal(mixed.token[mine], alone.token[mine])
        assert set(np.asarray(mixed.token[mine]).tolist()) <= kept_by_sorting(p, **cut)
    cold = arrays({0: RowSteering(DrawSettings(min_p=0.0))}, 2, SamplingConfig(top_k=7, top_p=0.5))
    np.testing.assert_allclose(cold.limits, [[7, 0.5, 0], [7, 0.5, 0]], err_msg="the engine's hold where none is asked")


def steered_rows():
    settings = {4: {"top_k": 1}, 5: {"bias": {50: 100.0}}, 8: {"top_p": 0.7, "frequency": 1.0}}
    rows = {row: RowSteering(DrawSettings(**given)) for row, given in settings.items()}
    return rows | {1: RowSteering(DrawSettings(), Alternating(7))}


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
    for count, settings in ((1, {"top_k": 2}), (0, {"bias": {9: 1.0}}), (0, {"presence": 1.0}), (0, {"top_p": 0.5})):
        _, stats = engine.run(sampler, requests, Steered(requests, {0: RowSteering(DrawSettings(**settings))}))
        assert stats.compilations == count
