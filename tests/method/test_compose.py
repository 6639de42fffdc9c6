"""From groups to training rows, held to the formulas and to the loss on one page; the example plug-ins."""

import re
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from examples.plugins import clean_calls, consistency
from grpo_roc_jax import Scores, initial_state, next_state, scoring_rows, subset, train_rows
from grpo_roc_jax.method.advantage import z_score
from grpo_roc_jax.method.compose import resample_group, supervised_rows
from grpo_roc_jax.method.reference import grpo_roc_loss
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.callables import given
from grpo_roc_jax.types import Group, Problem, ToolCall, ToolResult, Trajectory, Turn, Verdict
from tests.helpers.loss_batch import packed_loss
from tests.helpers.method_groups import make_group, method, trajectories

OBSERVED = {"observation": [2, 0, 1, 0]}


def batch():
    """Two problems, ragged, with observation tokens after the policy tokens."""
    return [
        make_group([1, 0, 0, 1], uid="a", lengths=[3, 2, 5, 1], logprobs=[-0.5, -1, -1.5, -2], **OBSERVED),
        make_group([1, 1, 0, 1], uid="b", lengths=[1, 2, 3, 4], logprobs=[-1, -0.2, -0.4, -3], **OBSERVED),
    ]


def test_rows_follow_the_trajectories():
    groups = batch()
    reference = [np.full(t.length, -3.0, np.float32) for t in trajectories(groups)]
    rows = train_rows(groups, method(surrogate={"kl": "k3"}), AlgoState(), scores=Scores(reference=reference))
    for row, before, trajectory in zip(rows, scoring_rows(groups), trajectories(groups), strict=True):
        assert row.tokens is before.tokens is trajectory.tokens
        assert (row.policy_mask == trajectory.policy_mask).all() and (before.policy_mask == row.policy_mask).all()
        np.testing.assert_allclose(row.logprobs_old, trajectory.logprobs)
        assert (row.logprobs_ref == -3).all()
        assert not row.weights[~row.policy_mask].any() and not before.weights.any()
        assert row.weights.dtype == row.advantages.dtype == np.float32
    assert sum(row.policy_mask.sum() for row in rows) == 21
    np.testing.assert_allclose(sum(row.weights.sum() for row in rows), 1, atol=1e-6)
    np.testing.assert_allclose(rows[0].weights.max(), 1 / 21, atol=1e-7)
    groups, config, state = batch(), method(), AlgoState()
    rows, expected_rows = train_rows(iter(groups), config, state), train_rows(groups, config, state)
    np.testing.assert_array_equal([row.advantages[-1] for row in rows], [row.advantages[-1] for row in expected_rows])
    after, expected = next_state(iter(groups), iter(groups), config, state), next_state(groups, groups, config, state)
    np.testing.assert_array_equal(after.table.values, expected.table.values)


GROUP, METHOD, STATE, RNG = batch()[0], method(), AlgoState(), np.random.default_rng(0)


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda: resample_group(GROUP, METHOD, 0), r"rng is 0 \(int\); must be a generator: np.random.default_rng"),
        (lambda: resample_group([GROUP], METHOD, RNG), "group is of type list; must be a Group"),
        (lambda: resample_group(GROUP, METHOD.resample, RNG), "without group, resample; must be a configuration"),
        (lambda: initial_state(METHOD.method), "of type MethodConfig without plan, .*; must be a configuration"),
        (lambda: subset(GROUP, [0, 1]), "selection is of type list; must be what resample"),
        (lambda: scoring_rows(GROUP), r"groups is of type Group; must be a list of Groups, such as \[group\]"),
        (lambda: train_rows([GROUP, None], METHOD, STATE), "groups has None .*; must be a list"),
        (lambda: train_rows([GROUP], METHOD.surrogate, STATE), "of type Clip without plan"),
        (lambda: train_rows([GROUP], METHOD, None), r"state is None .*; must be an AlgoState: initial_state\(config\)"),
        (lambda: train_rows([GROUP], METHOD, STATE, scores=[]), "scores is of type list; must be Scores"),
        (lambda: next_state([GROUP], GROUP, METHOD, STATE), "groups is of type Group; must be a list"),
        (lambda: next_state([GROUP], [GROUP], METHOD, STATE.table), "must be an AlgoState"),
    ],
)
def test_arguments_of_another_type_are_refused(refused, message):
    with pytest.raises(TypeError, match=message):
        refused()


@pytest.mark.parametrize("sections", [{"weights": {"normalizer": "constant"}}, {"surrogate": "kl_cov"}, {}])
def test_groups_without_trajectories_have_no_rows(sections):
    groups, config = [make_group([]), make_group([], uid="q")], method(**sections)
    assert train_rows(groups, config, STATE, rng=RNG, scores=Scores([], [])) == []
    scored = Scores(*([t.logprobs for t in GROUP.trajectories] for _ in range(2)))
    rows, alone = (train_rows(some, config, STATE, rng=RNG, scores=scored) for some in ([*groups, GROUP], [GROUP]))
    for row, other in zip(rows, alone, strict=True):
        np.testing.assert_array_equal(row.weights, other.weights)


def test_the_message_on_a_missing_pass_says_how_to_make_it():
    config = method(surrogate={"old_logprobs": "scored"})
    for sections, message in (
        ({"surrogate": {"kl": "k3"}}, "surrogate.kl k3 needs .* reference"),
        ({"shaping": ["kl"], "advantage": {"adjust": ["kl"]}}, "shaping kl, advantage.adjust kl needs .* reference"),
    ):
        with pytest.raises(ValueError, match=message):
            train_rows([GROUP], method(**sections), STATE)
    with pytest.raises(ValueError, match=re.escape("pass scores=Scores(*learner.score(scoring_rows(groups)))")):
        train_rows([GROUP], config, STATE)

    def score(rows):
        return [row.logprobs_old - 1 for row in rows], [np.zeros(row.length) for row in rows]

    rows = train_rows([GROUP], config, STATE, scores=Scores(*score(scoring_rows([GROUP]))))
    np.testing.assert_array_equal(rows[0].logprobs_old, GROUP.trajectories[0].logprobs - 1)
    for name in ("logprobs", "entropies", "reference", "first"):
        for arrays, message in (
            ([np.zeros(n) for n in (7, 2, 8, 3)], r"of trajectory 1 is of shape \(2,\); must be \(4,\)"),
            ([np.zeros(7)], "has 1 arrays for 4 trajectories"),
            ([None] * 4, r"of trajectory 0 is of shape \(\); must be \(7,\)"),
        ):
            with pytest.raises(ValueError, match=f"scores.{name} {message}"):
                train_rows([GROUP], METHOD, STATE, scores=Scores(**{name: arrays}))
    config = method(surrogate={"old_logprobs": "scored"}, weights={"factors": ["truncated_is"]})
    group = make_group([1, 0, 1, 0], lengths=[4] * 4)
    passes = np.full((4, group.trajectories[0].length), np.nan, np.float32)  # an array is as good as a list of arrays
    for scores in (Scores(passes), Scores(jnp.asarray(passes), first=passes)):
        rows = train_rows([group], config, STATE, scores=scores)
        assert all(np.isnan(row.weights[row.policy_mask]).all() for row in rows)


@pytest.mark.parametrize(
    ("surrogate", "normalizer", "expected"),
    [
        ({"clip_high": 0.2}, "sequence_mean", 0.099390),
        ({"clip_high": 0.2}, "token_mean", -0.127477),
        ({"clip_high": 0.2}, "sequence_sum", -0.318693),
        ({"clip_high": 0.2}, {"kind": "constant", "length": 3}, -0.106231),
        ({}, "token_mean", -0.143477),
        ({"level": "sequence", "clip_low": 3e-4, "clip_high": 4e-4}, "sequence_mean", 0.080717),
        ("cispo", "token_mean", 0.407645),
        ({"kind": "cispo", "low": 0.8, "high": 1.28}, "token_mean", 0.434736),
        # Half of the clipped loss, as advantages are, and the k3 divergence, whose token mean is 0.022610.
        ({"clip_high": 0.2, "kl": {"kind": "k3", "coef": 0.25}}, "token_mean", -0.127477 + 0.5 * 0.022610),
    ],
)
def test_grpo_loss_by_hand(surrogate, normalizer, expected):
    """Fixture F of the family's specification: one success, one failure, three and two tokens after one of a prompt.
    Without a scale the advantages are +-0.5, half of the fixture's."""
    group = make_group([1, 0], lengths=[3, 2], prompt=[1, 1], logprobs=[[-1, -2, -1], [-1, -1]])
    now = [np.float32(values) for values in ([0, -0.7, -2.1, -1], [0, -1.2, -0.5])]
    scores = Scores(reference=[np.float32(values) for values in ([0, -1, -2, -1.1], [0, -1, -0.8])])
    config = method(2, advantage={"scale": "none"}, weights={"normalizer": normalizer}, surrogate=surrogate)
    rows = train_rows([group], config, AlgoState(), scores=scores)
    assert 2 * packed_loss(rows, config.surrogate, now).loss == pytest.approx(expected, abs=4e-6)


def test_weights_by_hand():
    groups = [make_group([1, 0, 0], lengths=[3, 2, 5], stop=["answer", "length", "eos"])]
    rows = train_rows(groups, method(weights={"masks": ["truncated"]}), AlgoState())
    assert not rows[1].policy_mask.any() and not rows[1].weights.any()
    np.testing.assert_allclose(rows[0].weights.max(), 1 / 8)
    groups = [make_group([1, 0], lengths=[3, 5])]
    passes = [t.logprobs.copy() for t in trajectories(groups)]
    passes[0][2:4] += np.log(3)

    def rows(**weights):
        config = method(2, surrogate={"old_logprobs": "scored"}, weights=weights)
        return train_rows(groups, config, AlgoState(), scores=Scores(passes))

    short, long = rows(factors=["masked_is"])
    assert np.flatnonzero(short.policy_mask).tolist() == [4]
    np.testing.assert_allclose(np.append(short.weights[4], long.weights[long.policy_mask]), 1 / 6, rtol=1e-6)
    short, long = rows(factors=[{"kind": "masked_is", "level": "geometric"}], normalizer="sequence_mean")
    assert not short.policy_mask.any() and long.weights.max() == pytest.approx(1 / 5)
    # Mean negative log-likelihood 1.5, weight 0.1: the term is 0.15, and its gradient -weight / n a token.
    groups = [make_group([1, 1], lengths=[2, 4], logprobs=[-9.0, -9.0])]
    scores = [row.policy_mask * np.float32(-1.5) for row in scoring_rows(groups)]
    rows = supervised_rows(groups, Scores(scores), 0.1, method().surrogate)
    value = sum(float(-(row.weights * row.advantages * now).sum()) for row, now in zip(rows, scores, strict=True))
    assert value == pytest.approx(0.15, abs=1e-6)
    np.testing.assert_allclose(rows[1].weights[rows[1].policy_mask], 0.1 / (2 * 4), rtol=1e-6)
    np.testing.assert_allclose(rows[0].logprobs_old, scores[0])  # ratio 1: every surrogate has the gradient of -log p


def test_importance_weights_scale_the_surrogate_alone():
    """The weights of tokens, or the advantages where the loss has a divergence, which the weights multiply too."""
    for sections, scaled in (
        ({}, "weights"),
        ({"surrogate": {"kl": {"kind": "k3", "coef": 0.3}}}, "advantages"),
        ({"shaping": ["kl"]}, "weights"),
    ):
        passes = [(t.logprobs - np.float32(0.5) * t.policy_mask).astype(np.float32) for t in trajectories(batch())]
        scores = Scores(passes, reference=[values + 1 for values in passes])
        sections = sections | {"surrogate": {"old_logprobs": "scored"} | sections.get("surrogate", {})}
        plain = train_rows(batch(), method(**sections), AlgoState(), scores=scores)
        config = method(**sections, weights={"factors": ["truncated_is"]})
        (other,) = {"weights", "advantages"} - {scaled}
        for row, before, now in zip(
            train_rows(batch(), config, AlgoState(), scores=scores), plain, passes, strict=True
        ):
            on = row.policy_mask
            np.testing.assert_allclose(row.logprobs_old, now)
            np.testing.assert_array_equal(getattr(row, other), getattr(before, other))
            np.testing.assert_allclose(getattr(row, scaled)[on], np.exp(-0.5) * getattr(before, scaled)[on], rtol=1e-6)


def test_functions_by_path_or_handed_over(monkeypatch):
    """Names that are known within a block come before paths; an inner block adds to an outer one."""
    module = ModuleType("my_parts")
    module.ones, module.number = lambda rewards, features, state: np.ones(len(rewards)), 3
    monkeypatch.setitem(sys.modules, "my_parts", module)

    def advantage(function):
        config = method(advantage={"kind": "custom", "function": function})
        return train_rows(batch(), config, AlgoState())[0].advantages[0]

    assert advantage("my_parts:ones") == 1
    for path in ("my_parts:missing", "no_such_module:f", "my_parts", "my_parts:number"):
        with pytest.raises(ValueError, match=r"advantage\.function"):
            advantage(path)
    with given({"mine": lambda rewards, features, state: np.full(len(rewards), 7.0)}):
        with given({"others": len}):
            assert advantage("mine") == 7
        with given({"mine": lambda rewards, features, state: np.full(len(rewards), 8.0)}):
            assert advantage("mine") == 8
        assert advantage("mine") == 7
    with pytest.raises(ValueError, match=r"advantage\.function = 'mine' .* pass the function"):
        advantage("mine")


# ---- the loss on one page and the composed one are the same number --------------------------------------------------

KEEP, SAMPLED = 4, 8


def drawn_group(rng, uid):
    """A group with rewards, calls, answers and lengths at random; every fifth one has equal rewards."""
    rewards = rng.integers(0, 2, SAMPLED).astype(float) if rng.random() < 0.8 else np.ones(SAMPLED)
    calls, lengths = rng.integers(0, 4, SAMPLED), rng.integers(1, 6, SAMPLED)
    drawn = {name: rng.integers(*limits, SAMPLED) for name, limits in (("answers", (0, 3)), ("turns", (1, 4)))}
    drawn |= {"errors": rng.binomial(calls, 0.4), "observation": rng.integers(0, 3, SAMPLED)}
    logprobs = [rng.normal(-1.0, 0.3, n).astype(np.float32) for n in lengths]
    return make_group(rewards, uid=uid, lengths=lengths, calls=calls, logprobs=logprobs, **drawn)


def composed(groups, now, rng, keep):
    """The loss through selection, rows, packing and `batch_loss`; `now[p][n]` are its log-probabilities."""
    config = method(keep)
    selections = [resample_group(group, config, rng) for group in groups]
    selected = [subset(group, chosen) for group, chosen in zip(groups, selections, strict=True) if chosen.kept]
    rows = train_rows(selected, config, AlgoState())
    chosen = [now[p][n] for p, selection in enumerate(selections) for n in selection.indices]
    return packed_loss(rows, config.surrogate, chosen, row_length=16).loss


def on_one_page(groups, now, rng, keep):
    names = {"calls": "tool_calls", "errors": "tool_errors", "answers": "answers", "turns": "turns"}
    rollouts = [
        {name: np.array([getattr(v, field) for v in group.verdicts]) for name, field in names.items()}
        | {"rewards": group.rewards, "correct": group.correct}
        for group in groups
    ]
    old, mask = ([[getattr(t, name) for t in g.trajectories] for g in groups] for name in ("logprobs", "policy_mask"))
    width = max(len(array) for group in mask for array in group)

    def padded(field):
        return np.stack([[np.pad(array, (0, width - len(array))) for array in group] for group in field])

    logprobs, old, mask = map(padded, (now, old, mask))
    return grpo_roc_loss(jnp.asarray(logprobs), jnp.asarray(old), mask, rollouts, rng, keep=keep)


@pytest.mark.parametrize(("seed", "keep"), [*((seed, KEEP) for seed in range(12)), (12, 1), (13, 3), (14, SAMPLED)])
def test_the_composed_loss_is_that_of_the_page(seed, keep):
    """At log-probabilities at random, so that the gradients are the same too; ratios leave the clip on both sides. Of
    one trajectory no deviation is known, and its advantage is 0."""
    rng = np.random.default_rng(seed)
    groups = [drawn_group(rng, f"p{i}") for i in range(5)]
    now = [[t.logprobs + rng.normal(0, 0.4, t.length).astype(np.float32) for t in g.trajectories] for g in groups]
    expected = on_one_page(groups, now, np.random.default_rng(99), keep)
    np.testing.assert_allclose(composed(groups, now, np.random.default_rng(99), keep), expected, rtol=1e-5, atol=1e-6)


def test_the_page_by_hand():
    """Two successes and two failures of one token each, one ratio of 2: -(min(2 a, 1.28 a) + a - a - a) / 4."""
    rollout = {name: np.array([1, 1, 1, 1]) for name in ("calls", "answers", "turns")} | {"errors": np.zeros(4)}
    rollout |= {"rewards": np.array([1.0, 1, 0, 0]), "correct": np.array([True, True, False, False])}
    old, a = np.zeros((1, 4, 1)), 0.5 / np.sqrt(1 / 3)
    now = old.copy()
    now[0, 0] = np.log(2)
    arrays, rng = (jnp.asarray(now), old, np.ones((1, 4, 1), bool)), np.random.default_rng(0)
    loss = grpo_roc_loss(*arrays, [rollout], rng, keep=4)
    np.testing.assert_allclose(loss, -(1.28 * a + a - a - a) / 4, rtol=1e-4)
    as_lists = {name: values.tolist() for name, values in rollout.items()}
    assert grpo_roc_loss(*(np.asarray(array).tolist() for array in arrays), [as_lists], rng, keep=4) == loss
    assert grpo_roc_loss(*arrays, [rollout | {"rewards": rollout["rewards"] > 0}], rng, keep=4) == loss
    with pytest.raises(ValueError, match="keep = 5; must be a whole number from 1 to 4"):
        grpo_roc_loss(*arrays, [rollout], rng, keep=5)
    for wrong, message in (
        ((*arrays, [rollout], 0), "rng is 0 .*; must be a generator"),
        ((*arrays, [rollout] * 2, rng), r"rollouts is of shape \(2,\); must be \(1,\)"),
        ((*arrays, [rollout | {"calls": np.ones(3)}], rng), r"calls is of shape \(3,\); must be \(4,\)"),
        ((*arrays[:2], arrays[2][0], [rollout], rng), r"policy_mask is of shape \(4, 1\); must be \(1, 4, 1\)"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            grpo_roc_loss(*wrong, keep=4)


# ---- plug-ins: vectors of the family's specification ----------------------------------------------------------------


def test_plug_ins_by_hand():
    rewards = consistency.consistency_rewards(np.array([1.0, 1, 0, 1]), np.array([0.9, 0.5, 0.95, 0.7]))
    assert rewards.tolist() == [1.5, 1, 0, 1.5]
    assert consistency.consistency_rewards(np.zeros(2), np.ones(2)).tolist() == [0, 0]
    masks = [np.array([0, 1, 1], bool), np.zeros(3, bool)]
    np.testing.assert_allclose(consistency.answer_likelihoods([np.log([0.5, 0.9, 0.9])] * 2, masks), [0.9, 0])
    group = make_group([1, 1, 0, 1], lengths=[1] * 4)
    scores = [np.log([0.5, 0.5, q]).astype(np.float32) for q in (0.9, 0.5, 0.95, 0.7)]
    policy = SimpleNamespace(trained={"w": jnp.zeros(1)}, score=lambda params, groups: scores)
    rows = consistency.Consistency()(train_rows([group], METHOD, STATE), [group], policy)
    expected = z_score(np.array([1.5, 1, 0, 1.5]))
    np.testing.assert_allclose([row.advantages[-1] for row in rows], expected, atol=1e-6)
    np.testing.assert_allclose(consistency.averaged({"w": jnp.ones(2)}, {"w": jnp.zeros(2)})["w"], 0.995)
    # The thought stays between calls alike, or the turn is replaced; several tries are mended, and nothing else.
    tag, call = clean_calls.CALL_ID, clean_calls.CALL
    for settings, thought in [({}, 0), ({"alike": 1.1}, 1)]:
        clean, after = clean_calls.repaired(*attempts("exception", "ok"), **settings)
        assert clean.tokens[20:].tolist() == [100 + thought, tag, 201, *[301] * 4, 102, tag, 202]
        assert clean.policy_mask[20:].tolist() == [True] * 3 + [False] * 4 + [True] * 3
        turns = [(t.start, t.end, t.text) for t in clean.turns]
        assert turns == [(20, 23, f"t{thought}{call}c1"), (27, 30, f"t2{call}c2")]
        assert (after.tool_calls, after.tool_errors, after.turns) == (1, 0, 2)
    clean, after = clean_calls.repaired(*attempts("exception", "timeout", "ok"))
    assert len(clean.turns) == 2 and clean.tokens[20:23].tolist() == [100, tag, 202]
    assert (after.tool_calls, after.tool_errors) == (1, 0)
    trajectory, verdict = attempts("ok", "exception")
    assert clean_calls.repaired(trajectory, verdict) == (trajectory, verdict), "a failure without a retry stays"
    trajectory, verdict = attempts("exception", "ok")
    lost = Group(Problem("p", "?", "1", "t"), (trajectory,), (replace(verdict, status="wrong"),))
    assert clean_calls.purify(lost).trajectories[0] is trajectory, "failures train as they were"


def attempts(*kinds):
    """A trajectory of 20 prompt tokens and one turn a kind (thought, tag, call; then 4 observed), then an answer."""
    tokens, mask, turns = list(range(20)), [False] * 20, []
    for index, kind in enumerate((*kinds, None)):
        start, called = len(tokens), kind is not None
        made = (ToolCall("python", {}, f"print({index})"),) * called, (ToolResult(kind or "ok"),) * called
        turns.append(Turn(start, start + 3, f"t{index}{clean_calls.CALL}c{index}", *made))
        tokens += [100 + index, clean_calls.CALL_ID, 200 + index, *[300 + index] * 4 * called]
        mask += [True] * 3 + [False] * 4 * called
    mask = np.array(mask)
    values, versions = np.where(mask, -1.0, 0.0).astype(np.float32), np.where(mask, 0, -1).astype(np.int32)
    trajectory = Trajectory(np.array(tokens, np.int32), mask, values, versions, 20, tuple(turns), "answer", 0)
    errors = sum(kind != "ok" for kind in kinds)
    return trajectory, Verdict(1.0, "correct", "1", len(kinds), errors, 1, True, len(turns))
