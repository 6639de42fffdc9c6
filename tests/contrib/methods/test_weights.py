"""Token weights: normalizers, masks, length preference, sampler mismatch; passes and state of whole methods; VESPO."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax import Group, Problem, Turn, initial_state, next_state, train_rows
from grpo_roc_jax.contrib.methods.drift_mask import Drift
from grpo_roc_jax.contrib.methods.lambda_grpo import exponent_gradient, length_bases, length_preference
from grpo_roc_jax.contrib.methods.mc_grpo import Pivot
from grpo_roc_jax.contrib.methods.repetition import Repetition
from grpo_roc_jax.contrib.methods.scalerl import PromptMean
from grpo_roc_jax.contrib.methods.simple_tir import VoidTurns
from grpo_roc_jax.contrib.methods.top_entropy import TopEntropy
from grpo_roc_jax.method.compose import needs_reference, needs_scores, renormalized
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.method.weights import TokenMean, Truncated, trained_tokens
from grpo_roc_jax.settings.callables import given
from tests.helpers.method_groups import batch_of, call, close, make_group, make_trajectory, make_verdict, method
from tests.method import test_surrogate as core
from tests.method.test_compose import batch
from tests.method.test_surrogate import MASK, NOW, OLD, A, made, shared_logratio


def test_normalizers():
    for normalizer, expected in (
        ("token_mean", [1 / 5, 1 / 5, 0]),
        ("sequence_mean", [1 / 6, 1 / 4, 0]),
        ("sequence_sum", [1 / 2, 1 / 2, 0]),
        ({"kind": "constant", "length": 100}, [1 / 300, 1 / 300, 0]),
        ("prompt_mean", [1 / 5, 1 / 5, 0]),
    ):
        close(method(weights={"normalizer": normalizer}).weights.normalizer(np.array([3, 2, 0]), [2, 1]), expected)
    weights = PromptMean()(np.array([1, 0, 0, 0, 2, 6]), [2, 1, 3])
    close(weights, [1 / 2, 0, 0, 0, 1 / 16, 1 / 16])
    assert weights @ [1, 0, 0, 0, 2, 6] == 1, "groups without a trained token count nowhere"
    for normalizer in (TokenMean(), PromptMean()):
        assert normalizer(np.zeros(3), [1, 2]).tolist() == [0, 0, 0] and normalizer(np.zeros(0), []).size == 0


LENGTHS = np.array([2, 4, 6])


def preferring(exponent, **settings):
    """A method of groups of three, and a state with this exponent."""
    weights = {"factors": [{"kind": "learned_length", **settings}]}
    return method(3, weights=weights), AlgoState(memory={"length_exponent": np.array([exponent])})


def test_length_preference():
    close(length_bases(LENGTHS, 1 / 9), [0.863917, 1, 1.136083])
    close(length_preference(np.array([5, 5]), 2.0), [1, 1])
    for exponent, expected in (
        (0.0, [1, 1, 1]),
        (1.0, [0.867408, 0.993856, 1.138737]),
        (-1.0, [1.148507, 0.981125, 0.870369]),
    ):
        rows = train_rows([make_group([1, 0, 1], lengths=LENGTHS)], *preferring(exponent))
        close([row.weights.max() * 12 for row in rows], expected)
    # Long successes push the exponent up, by the slope of the objective; it stays within its bound.
    advantages = np.array([-1.0, 0, 1])

    def objective(e):
        return length_preference(LENGTHS, e) @ (advantages * LENGTHS) / LENGTHS.sum()

    for at in (-1.0, 0.0, 0.7):
        numeric = (objective(at + 1e-6) - objective(at - 1e-6)) / 2e-6
        assert numeric > 0 and exponent_gradient([LENGTHS], [advantages], at) == pytest.approx(numeric, abs=1e-6)
    assert exponent_gradient([], [], 0.0) == 0.0
    for lr, rewards, expected in [(100.0, [0, 0, 1], 2.0), (1e4, [1, 0, 0], -2.0)]:
        group = make_group(rewards, lengths=[2, 4, 600])
        assert next_state([group], [group], *preferring(1.999, lr=lr)).recall("length_exponent", 0.0) == expected


def test_masks_of_trajectories():
    """Of one trajectory with so many calls in its turns."""
    for calls, stop, answer, masks, trains in (
        ((1, 0), "eos", "1", [VoidTurns()], True),
        ((1, 0), "eos", None, [VoidTurns()], False),
        ((1, 1), "eos", None, [VoidTurns()], True),
        ((0, 1, 0), "eos", "1", [VoidTurns()], False),
        ((1, 0), "eos", None, [], True),
        ((1, 0), "length", "1", [], True),
        ((1, 0), "length", "1", [Truncated()], False),
        ((1, 0), "length", "1", [VoidTurns(), Truncated()], False),  # each mask takes out what it takes out
    ):
        turns = tuple(Turn(i, i + 1, "t", (call(),) * n) for i, n in enumerate(calls))
        trajectory = replace(make_trajectory(len(turns), prompt=0, stop=stop), turns=turns)
        group = Group(Problem("p", "?", "1", "test"), (trajectory,), (replace(make_verdict(0), answer=answer),))
        assert trained_tokens([group], [group.rewards], masks)[0].any() == trains
    for rewards, pivot in (([1, 0, 0], [1]), ([0.5, 1.0, 0.0], [0]), ([1, 0, 0.5, 0.2, 0.9], [2]), ([1, 0], [])):
        group = make_group([1] + [0] * (len(rewards) - 1))
        assert np.flatnonzero(~Pivot().trains(group, np.array(rewards))).tolist() == pivot


def seen(trajectories, **passes):
    """A batch of one group of these trajectories."""
    problem = Problem("p", "?", "1", "test")
    return batch_of([Group(problem, tuple(trajectories), (make_verdict(0),) * len(trajectories))], **passes)


def drifted(shift):
    trajectory = make_trajectory(4, prompt=1, logprobs=-1.0)
    return trajectory, np.where(trajectory.policy_mask, trajectory.logprobs - shift, 0.0)


def test_masks_of_tokens():
    for shift, advantage, kept in ((0.3, -1.0, False), (0.1, -1.0, True), (0.3, 1.0, True), (-0.3, -1.0, True)):
        trajectory, now = drifted(shift)
        advantages = [np.full(trajectory.length, advantage, np.float32)]
        (mask,) = Drift(threshold=0.2).tokens([trajectory.policy_mask], advantages, seen([trajectory], scores=[now]))
        assert mask.tolist() == (trajectory.policy_mask & kept).tolist()
    # Of those that earlier masks left: a second time without the first trajectory, which the policy left behind.
    first, now = drifted(0.3)
    second = make_trajectory(4, prompt=1)
    entropies = [np.array([9, 0.1, 0.2, 0.3, 2.0]), np.array([9, 0.1, 1.0, 0.2, 0.3])]
    batch = seen([first, second], scores=[now, second.logprobs], entropies=entropies)
    masks, advantages, top = [first.policy_mask, second.policy_mask], [np.full(5, -1.0)] * 2, TopEntropy(share=0.25)
    top_masks = top.tokens(masks, advantages, batch)
    assert [mask.tolist() for mask in top_masks] == [[False] * 4 + [True], [False, False, True, False, False]]
    left = top.tokens(Drift(threshold=0.2).tokens(masks, advantages, batch), advantages, batch)
    assert [mask.tolist() for mask in left] == [[False] * 5, [False, False, True, False, False]]


def test_repetitive_successes_count_less():
    """Bigrams of 1 2 1 2 1 2: five, two of them distinct."""
    tokens = np.array([1, 2, 1, 2, 1, 2, 9])
    for n, ends, share in (
        (2, [(0, 6)], 0.6),
        (2, [(0, 3), (3, 6)], 0.5),  # 12 21, 21 12
        (2, [(5, 7), (6, 7)], 0),
        (9, [(0, 6)], 0),
    ):
        assert Repetition(n=n).share(tokens, [Turn(*pair, "") for pair in ends]) == pytest.approx(share)
    batch = batch_of([make_group([1.0, 0.0], lengths=[4, 4], tokens=[[1, 2, 1, 2]] * 2)])
    close(Repetition(n=1).trajectories(batch), [0.5, 1.0])  # the failure keeps its weight
    close(Repetition(n=1, limit=0.5).trajectories(batch), [1.0, 1.0])


GAPS = ([0.9, -0.2, 0.1], [-1.2, 0.3])
"""Scored minus recorded log-probabilities of two trajectories: the vector of the specification."""
FIRST, SECOND = [2.459603, 0.818731, 1.105171], [0.301194, 1.349859]
"""The ratios of their tokens."""


def importance(factor, gaps=GAPS):
    """(weights of the trained tokens, metrics) of a batch; the entries of prompts differ too, and must not count."""
    trajectories = [make_trajectory(len(gap), prompt=1) for gap in gaps]
    scores = [t.logprobs + np.array([9.0, *gap]) for t, gap in zip(trajectories, gaps, strict=True)]
    batch = seen(trajectories, masks=[t.policy_mask for t in trajectories], first_scores=scores)
    (part,) = method(weights={"factors": [factor]}, surrogate={"old_logprobs": "scored"}).weights.factors
    weights = [w[m].tolist() for w, m in zip(part.importance(batch), batch.masks, strict=True)]
    return weights, {**part.common_metrics(batch), **part.metrics(batch)}


@pytest.mark.parametrize(
    ("kind", "settings", "expected", "metrics"),
    [
        ("truncated_is", {}, [[2, *FIRST[1:]], SECOND], {"token_above": 0.2}),
        ("truncated_is", {"low": 0.5}, [[2, *FIRST[1:]], [0.5, SECOND[1]]], {"token_below": 0.2}),
        ("truncated_is", {"level": "product"}, [2, 0.406570], {"product_above": 0.5}),
        ("truncated_is", {"level": "geometric"}, [1.305605, 0.637628], {"geometric_above": 0}),
        ("truncated_is", {"normalize": True}, [[1.793737, 0.734294, 0.991193], [0.270131, 1.210644]], {}),
        ("truncated_is", {"level": "product", "normalize": True}, [2 / 1.203285, 0.406570 / 1.203285], {}),
        ("masked_is", {"high": 5}, [FIRST, [0, SECOND[1]]], {"token_below": 0.2}),
        ("masked_is", {}, [[0, *FIRST[1:]], [0, SECOND[1]]], {"token_above": 0.2}),
        ("masked_is", {"level": "product", "low": 0, "high": 3}, [2.225541, 0.406570], {}),
        ("rejection", {"level": "product"}, [0, 0], {"product_ratio_below": 0.5}),
        ("rejection", {"high": 1.3}, [0, 1], {"geometric_ratio_above": 0.5}),
        ("rejection", {"measure": "k3", "low": 0, "high": 0.2755}, [1, 0], {}),
        ("rejection", {"measure": "k3", "low": 0, "high": 0.2756}, [1, 1], {}),
        ("rejection", {"measure": "k2", "level": "max", "low": 0, "high": 0.7}, [1, 0], {}),
        ("rejection", {"measure": "k2", "level": "max", "low": 0, "high": 0.404}, [0, 0], {}),
        ("rejection", {"measure": "k2", "level": "token", "low": 0, "high": 0.05}, [[0, 1, 1], [0, 1]], {}),
        ("rejection", {"measure": "k2", "level": "product", "low": 0, "high": 0.44}, [1, 0], {}),
        ("rejection", {"measure": "error", "high": 1.5954}, [1, 0], {}),
        ("rejection", {"measure": "error", "high": 1.5953}, [0, 0], {}),
        ("rejection", {"level": "max", "low": 0, "high": 1.4}, [0, 1], {}),
        ("veto", {}, [1, 1], {"vetoed": 0}),
        ("veto", {"low": 0.302}, [1, 0], {"vetoed": 0.5}),
        ("veto", {"low": 0.301}, [1, 1], {}),
    ],
)
def test_mismatch(kind, settings, expected, metrics):
    """A number stands for all tokens of a trajectory."""
    weights, measured = importance({"kind": kind, **settings})
    for left, right in zip(weights, expected, strict=True):
        close(left, np.full(len(left), right))
    for name, share in metrics.items():
        assert measured[f"mismatch/{kind}_{name}"] == pytest.approx(share), measured


def test_mismatch_is_measured_at_every_level():
    """Against numbers by hand: the ratios of the specification, and k1 and k3 of their logarithms."""
    metrics = importance("veto")[1]
    for level, logs in [
        ("token", [0.9, -0.2, 0.1, -1.2, 0.3]),
        ("product", [0.8, -0.9]),
        ("geometric", [0.8 / 3, -0.45]),
    ]:
        x = np.exp(logs)
        close(metrics[f"mismatch/{level}_ratio"], x.mean())
        close(metrics[f"mismatch/{level}_effective_sample_size"], x.sum() ** 2 / (len(x) * (x**2).sum()))
        close(metrics[f"mismatch/{level}_kl_k1"], -np.mean(logs))
        close(metrics[f"mismatch/{level}_kl_k3"], np.mean(x - 1 - logs))
    # Sums are clamped too; a trajectory without trained tokens counts nowhere.
    for level in ("token", "product", "geometric"):
        factor = {"kind": "masked_is", "level": level, "high": 1e12}
        weights, metrics = importance(factor, ([-900.0, 30], [500.0, 500], []))
        assert np.isfinite([*metrics.values(), *weights[0], *weights[1]]).all() and weights[2] == []
        close(weights[1], np.exp([20.0, 20.0]), 1)
    assert all(value == 0 for value in importance("veto", ([], []))[1].values())


# ---- whole methods --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalizer", ["token_mean", "sequence_mean", "sequence_sum", "constant", "prompt_mean"])
def test_renormalized_parts(normalizer):
    """Each part of the rows carries the normalizer that it would have had alone."""
    groups = batch()
    config = method(weights={"normalizer": normalizer}, advantage={"scale": "none"})
    rows = train_rows(groups, config, AlgoState())
    parts = renormalized([rows[:4], rows[4:]], config.weights.normalizer, [[4], [4]])
    for group, part in zip(groups, parts, strict=True):
        for row, alone in zip(part, train_rows([group], config, AlgoState()), strict=True):
            np.testing.assert_allclose(row.weights, alone.weights, rtol=1e-6)


def test_tree_advantages_reach_the_tokens():
    group = make_group([1, 0, 0], lengths=[2, 2, 2], tokens=[[1, 2], [1, 3], [4, 5]])
    exact = {"scale": {"kind": "std", "eps": 0.0}, "adjust": [{"kind": "tree", "eps": 0.0}]}
    rows = train_rows([group], method(advantage=exact), AlgoState())
    expected = [[1.443376, 2.020726], [-0.288675, -1.443376], [-1.154701, -0.577350]]
    close([row.advantages[row.policy_mask] for row in rows], expected)
    flat = replace(group, verdicts=(group.verdicts[1],) * 3)
    for row in train_rows([flat], method(advantage={"adjust": ["tree"]}), AlgoState()):
        assert not row.advantages.any()


def test_passes_that_a_method_needs():
    for sections, passes in (
        ({"advantage": "rebel"}, (True, False)),
        ({"weights": {"masks": ["top_entropy"]}}, (True, False)),
        ({"weights": {"factors": ["masked_is"]}}, (True, False)),
        ({"surrogate": {"kl": {"kind": "k2", "coef": 0.0}}}, (False, False)),
        ({"surrogate": {"old_logprobs": "scored", "kl": "k1"}}, (True, True)),
    ):
        assert (needs_scores(method(**sections)), needs_reference(method(**sections))) == passes


def test_next_state():
    groups = batch()
    constraint = {"kind": "constraints", "channels": ["clean"], "targets": [0.95]}
    weights = {"factors": ["learned_length"]}
    config = method(advantage={"adjust": [constraint]}, weights=weights)
    kept_groups = [make_group([1, 1, 0, 0], uid="a", lengths=[9, 9, 1, 1], channels={"clean": [1, 0, 1, 1]})]
    start = initial_state(config)
    assert start.memory["constraints"].tolist() == [0.0]
    state = next_state(groups, kept_groups, config, start)
    assert state.step == 1 and state.table.get(["a", "b"])["accuracy"].tolist() == [0.5, 0.75]
    close(state.memory["constraints"], [0.02])
    assert state.recall("length_exponent", 0.0) > 0  # the long ones succeeded
    mine = method(advantage={"kind": "custom", "function": "mine", "adjust": [constraint]}, weights=weights)
    with given({"mine": lambda r, f, s: r.mean() - r}):
        backwards = next_state(groups, kept_groups, mine, start)
    assert backwards.recall("length_exponent", 0.0) < 0  # the advantage that trained counts, also a function
    idle, tree = next_state(groups, [], config, state), state.to_tree()
    for same in (idle.memory, AlgoState.from_tree(tree).memory):
        assert {name: same[name].tolist() for name in same} == {n: state.memory[n].tolist() for n in state.memory}
    assert AlgoState.from_tree({name: tree[name] for name in ("step", "keys", "values")}).memory == {}


# ---- VESPO ----------------------------------------------------------------------------------------------------------


def vespo_loss(now):
    surrogate = made("vespo")
    d = shared_logratio(now - jnp.asarray(OLD), A, MASK, jnp.zeros(MASK.shape, jnp.int32), surrogate)
    return surrogate.loss(d, jnp.asarray(A), now)


def test_vespo():
    """W = e^0.2 and e^0.3: factors e^(2 * 0.2 + 3 (1 - W)) = 0.767814 and e^(3 * 0.3 + 2 (1 - W)) = 1.221747."""
    close(vespo_loss(jnp.asarray(NOW))[MASK], [0.537470, 1.612409, 0.767814, -1.466096, -0.610874])
    gradient = jax.grad(lambda now: jnp.sum(jnp.where(MASK, vespo_loss(now), 0.0)))(jnp.asarray(NOW))
    close(gradient, [[-0.767814] * 3, [1.221747, 1.221747, 0]])  # the factor is held fixed
    gradient = jax.grad(lambda now: jnp.sum(vespo_loss(now)))(jnp.asarray(OLD))
    np.testing.assert_allclose(gradient[:, :2], -A[:, :2], atol=1e-6)
    for shift in (-100.0, 100.0):
        assert np.isfinite(np.asarray(vespo_loss(jnp.asarray(OLD) + shift))).all()
    assert np.abs(np.asarray(vespo_loss(jnp.asarray(OLD) + 100.0))).max() < 1e-6
    core.test_what_holds_for_every_surrogate("vespo", "sequence")
