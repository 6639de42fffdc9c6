"""Advantages, reward maps, score-based objectives and weights against the vectors of the family's specification."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax.contrib.methods.constraints import Constraints
from grpo_roc_jax.contrib.methods.drift_mask import Drift
from grpo_roc_jax.contrib.methods.lambda_grpo import exponent_gradient, length_bases, length_preference
from grpo_roc_jax.contrib.methods.mc_grpo import Pivot
from grpo_roc_jax.contrib.methods.repetition import Repetition
from grpo_roc_jax.contrib.methods.scalerl import PromptMean
from grpo_roc_jax.contrib.methods.simple_tir import VoidTurns
from grpo_roc_jax.contrib.methods.tempo import tree_differences
from grpo_roc_jax.contrib.methods.top_entropy import TopEntropy
from grpo_roc_jax.method.compose import Scores, initial_state, next_state, renormalized, train_rows
from grpo_roc_jax.method.features import features
from grpo_roc_jax.method.shaping import check_steps, prompt_suffix
from grpo_roc_jax.method.state import AlgoState, ProblemTable, begun
from grpo_roc_jax.method.weights import trained_tokens
from grpo_roc_jax.settings.callables import given
from grpo_roc_jax.settings.cli import ConfigError
from grpo_roc_jax.types import Group, Problem, Turn
from tests.helpers.method_groups import (
    batch_of,
    call,
    close,
    make_group,
    make_trajectory,
    make_verdict,
    method,
    shaped,
    trajectories,
)
from tests.method import test_advantage as core
from tests.method import test_surrogate as surrogates
from tests.method.test_advantage import values
from tests.method.test_compose import batch
from tests.method.test_surrogate import MASK, NOW, OLD, A, made, shared_logratio

VIRTUAL = {"baseline": "virtual_max", "scale": "virtual_std"}
PIVOTED = {"baseline": "median", "scale": "mad", "adjust": ["rescale_nonzero"]}
GRADED = {"rewards": [1, 0, 0.5, 0.2, 0.9]}
CALLS = {"rewards": [1, 0, 1, 1, 0, 0], "calls": [0, 0, 1, 1, 1, 2]}
UNLIKELY = {"rewards": [1, 1, 0, 0], "logprobs": [-0.5, -1.5, -1, -1]}
SHOWN = {"rewards": [0.2, 0.5, 0.4, 1.0], "condition": ["", "", "", "demonstration"]}
SHARES = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]]
BETA = [0.680175] + [-0.226725] * 3 + [0.392699] * 2 + [-0.392699] * 2 + [0.226725] * 3 + [-0.680175]


def adjusted(kind, **settings):
    return {"adjust": [{"kind": kind, **settings}]}


@pytest.mark.parametrize(
    ("groups", "settings", "expected"),
    [
        ([[0] * 4], VIRTUAL, [-0.447213] * 4),
        ([GRADED], PIVOTED, [1.558603, -1.558603, 0, -0.935162, 1.246883]),
        ([[1, 0, 0, 0, 1]], PIVOTED | {"scale": "mad_or_std"}, [4.564355, 0, 0, 0, 4.564355]),
        ([[1, 0, 0, 0]], {"scale": "beta"}, [0.75, -0.25, -0.25, -0.25]),
        ([[4 * r - 1 for r in row] for row in SHARES], {"scale": {"kind": "beta", "low": -1, "high": 3}}, BETA),
        ([[1, 1, 1, 0]], adjusted("focal", exponent=2.0), [0.03125, 0.03125, 0.03125, -0.09375]),
        ([CALLS], adjusted("strata", blend=0.5), [0.809988, -0.809988, 0.745109, 0.745109, -1.033784, -0.456435]),
        ([UNLIKELY], adjusted("novelty", cap=0.1), [0.866024, 0.952626, -0.866024, -0.866024]),
        ([SHOWN], {"kind": "anchored"}, [-1.091082, 0.872866, 0.218216, 1.047439]),
        ([[1, 0, 0, 0]], adjusted("sign_weights", negative=2.0), [1.499997] + [-0.999999] * 3),
    ],
)
def test_vectors(groups, settings, expected):
    close(np.concatenate(values(groups, **settings)), expected)


def test_constraints():
    """The dual rises by what a channel lacks, within 0 and its largest value."""
    group, state = make_group([1, 1, 0, 0], channels={"clean": [1, 0, 1, 1]}), {"constraints": np.array([0.5])}

    def run(channel):
        return values([group], AlgoState(memory=state), **adjusted("constraints", channels=[channel], targets=[0.95]))

    close(run("clean")[0], [1.116023, 0.116025, -0.616024, -0.616024])
    with pytest.raises(ValueError, match="'tidy'"):
        run("tidy")
    for dual, channel, expected in ((0.5, [1, 1, 1, 0], 0.52), (5.0, [0, 0, 0, 0], 5.0)):
        step = Constraints(channels=("clean",), targets=(0.95,))
        groups, state = [make_group([1] * 4, channels={"clean": channel})], {"constraints": np.array([dual])}
        close(step.next_memory(groups, groups, None, AlgoState(memory=state))["constraints"], [expected], 1e-9)
    with pytest.raises(ConfigError, match=r"reach from -1 to 3, .* set advantage\.scale\.low and"):
        values([[3, -1]], scale="beta")
    # A truncated success loses its advantage where it draws below the probability; failures and loops keep it.
    pair, drawn = make_group([1, 1], stop=["length"] * 2), SimpleNamespace(random=lambda n: np.array([0.1, 0.9]))
    advantages = values([pair], rng=drawn, baseline="none", scale="none", adjust=["truncation_mask"])[0]
    assert advantages.tolist() == [0, 1]
    always = {"rng": np.random.default_rng(0)} | adjusted("truncation_mask", probability=1.0)
    for tokens, loops in ((np.arange(512) % 4, True), (np.arange(512), False)):
        group = make_group([1, 0], stop=["length"] * 2, lengths=[len(tokens), 3], tokens=[tokens, range(3)])
        assert (values([group], **always)[0][0] > 0) == loops, "a loop keeps its advantage"


def test_tree_against_the_definition():
    """V(prefix) by direct comparison of prefixes, over random responses of unequal length."""
    generator = np.random.default_rng(4)
    for _ in range(20):
        tokens = [generator.integers(0, 2, generator.integers(1, 6)) for _ in range(6)]
        rewards = generator.integers(0, 2, 6).astype(float)

        def value(prefix, tokens=tokens, rewards=rewards):
            return np.mean([r for r, row in zip(rewards, tokens, strict=True) if row[: len(prefix)].tolist() == prefix])

        for row, differences in zip(tokens, tree_differences(rewards, tokens), strict=True):
            expected = [value(row[: t + 1].tolist()) - value(row[:t].tolist()) for t in range(len(row))]
            close(differences, expected, 1e-9)
    # The vector of the specification reaches the tokens.
    group = make_group([1, 0, 0], lengths=[2, 2, 2], tokens=[[1, 2], [1, 3], [4, 5]])
    exact = {"scale": {"kind": "std", "eps": 0.0}, "adjust": [{"kind": "tree", "eps": 0.0}]}
    rows = train_rows([group], method(advantage=exact), AlgoState())
    expected = [[1.443376, 2.020726], [-0.288675, -1.443376], [-1.154701, -0.577350]]
    close([row.advantages[row.policy_mask] for row in rows], expected)


def test_trackers():
    """S = 4 of 8 gives alpha = beta = 4, for problems that were not seen."""
    problem = Problem("p0", "?", "1", "t", {"success_rate": 0.5, "judged": 8})
    state = begun(AlgoState(), [problem, Problem("q", "?", "1", "t")])
    assert [state.table.get([uid])["alpha"].tolist() for uid in ("p0", "q")] == [[4.0], [0.5]]
    group = make_group([1], problem=problem)
    config = method(1, advantage={"baseline": {"kind": "tracker", "forget": "constant"}})
    rows = next_state([group], [group], config, AlgoState()).table.get(["p0"])
    assert (rows["alpha"].tolist(), rows["beta"].tolist()) == ([4.5], [3.5])
    counts = {"alpha": np.array([5.0, 5, 9, 2]), "beta": np.array([5.0, 5, 1, 8])}
    state = AlgoState(table=ProblemTable().put(["p0", "p1", "p2", "p3"], counts))
    result = values([[1], [0], [1], [1]], state, baseline="tracker", scale="none", **adjusted("whiten", over="row"))
    close(np.concatenate(result), [0.489332, -1.290057, -0.222424, 1.023149])
    # Factors 2^(-D / 0.06) within 0.875 .. 0.96; the last sample of each problem is remembered and scored.
    config = method(1, advantage={"baseline": "tracker", "scale": "none"})
    tracker = config.advantage.baseline
    close(tracker.forgetting(0.5, ["a", "b", "c"], {"a": 0.06, "b": 0.006}), [0.875, 0.933033, 0.96])
    first, second = make_group([1], uid="a", lengths=[2]), make_group([0], uid="b", lengths=[4])
    state = next_state([first, second], [first, second], config, initial_state(config)).to_tree()
    state = AlgoState.from_tree(state)
    (remembered,) = tracker.earlier([second, make_group([1], uid="c")], state)
    (then,), (now,) = remembered.trajectories, second.trajectories
    for name in ("tokens", "policy_mask", "logprobs", "temperature"):
        np.testing.assert_array_equal(getattr(then, name), getattr(now, name))
    moved = next_state([first], [first], config, state, {"a": 0.006}).table.get(["a"])
    close(moved["alpha"], 0.933033 * state.table.get(["a"])["alpha"] + 1)


STEPS = [adjusted(step) for step in ("strata", "rescale_nonzero", "tree")]


@pytest.mark.parametrize("advantage", [*STEPS, PIVOTED, "grao", "anchored", "by_role", "positions"], ids=str)
def test_rounding_gives_no_advantage(advantage):
    core.test_rounding_gives_no_advantage(advantage)


CHANNELS = {"format": [1, 1, 0, 0], "quality": [0.8, 0.4, 0.2, 0.1]}
FAILING = {"calls": [1, 2, 1, 0], "errors": [0, 1, 1, 0]}
FORMATTED = {"lengths": [0, 25, 50, 75, 100, 50, 100], "channels": {"format": [0, 0, 0.5, 0, 0, 0, 0]}}
LENGTHS = FORMATTED | {"answers": [1] * 5 + [0] * 2}
RISING, PAID = [0, 100, 200, 300, 400, 500], {"lengths": [3, 6, 3, 3], "channels": CHANNELS}


@pytest.mark.parametrize(
    ("step", "rewards", "group", "expected"),
    [
        ("dynamic_length", [1] * 4, {"lengths": [100, 200, 300, 400]}, [0.875656, 0.765986, 0.634014, 0.524344]),
        ("serial", [0, 1, 1, 0, 1], {}, [0, 1, 0.5, 0, 0.25]),
        ("unlikeliness", [1, 1, 1, 0], {"logprobs": [-0.5, -1, -2, -0.3]}, [0.875, 0.9375, 1, 0]),
        ("posterior", [1, 1, 0, 0], {"channels": CHANNELS}, [2.8, 2.4, 0, 0]),
        ("quality", [1, 1, 0, 1], {"channels": {"quality": [0.8, 0.4, 0.8, 0]}}, [1, 0.85, 0, 0.7]),
        ("soft", [0, 0.2, 0.5, 0.8, 1], {}, [0.086764, 0.321546, 0.596390, 0.8, 0.801823]),
        ("staged", [1, 0, 1, 1], {"errors": [1, 0, 0, 0], "answers": [1, 1, 2, 1]}, [0, 0.3, 0.1, 1]),
        ("tool_errors", [1, 1, 0, 0], FAILING, [1, 0.75, -0.5, 0]),
        ("win_rate", [1, 1, 0, 0], FAILING, [1.0, 2 / 3, 0.0, 1 / 3]),
        ({"kind": "outcome", "negative": 2.0}, [1, 0], {}, [1, -2]),
        ({"kind": "surrogate", "length": 100}, [0] * 7, LENGTHS, [0, 0.75, 1.5, 0.5, -1, 0, -1]),
        ({"kind": "budget", "start": 200, "weights": [0, 1, 0]}, [0] * 6, {"lengths": RISING}, [0, 0.5, 1, 0.5, 0, 0]),
        ({"kind": "budget", "start": 3}, [1, 1, 0, 0], PAID, [1.0, 0.7, 0.4, 0.4]),
    ],
)
def test_rewards(step, rewards, group, expected):
    close(shaped(make_group(rewards, **group), step), expected)


def test_steps_run_in_order():
    group, soft = make_group([1, 0], calls=[1, 1], errors=[1, 0]), {"kind": "soft", "tau": 0.5, "above": 2.0}
    close(shaped(group, "tool_errors", soft), [0.5, 0.5 - np.expm1(0.5) / np.expm1(1.0)])
    # The better-solved half of the groups pays by length, the other keeps its rewards.
    groups = [make_group(rewards, lengths=[100, 200, 300, 400]) for rewards in ([1, 0, 0, 0], [1, 1, 0, 1])]
    hard, easy = shaped(groups, {"kind": "dynamic_length", "fraction": 0.5})
    close(hard, [1, 0, 0, 0])
    assert easy[2] == 0 and 1 > easy[0] > easy[1] > easy[3] > 0
    # Train Long, Think Short: the prompt names the budget that the reward is about to use.
    steps = method(shaping=["overlong", {"kind": "budget", "tell": "{budget} tokens"}]).shaping
    assert [prompt_suffix(steps, step) for step in (49, 50, 400)] == ["\n256 tokens", "\n217 tokens", "\n69 tokens"]
    group, budget = make_group([1, 0], lengths=[4, 4]), {"kind": "budget", "start": 4, "decay": 0.5, "every": 1}
    close([shaped(group, budget, state=AlgoState(step=step)) for step in (0, 1)], [[1.0, 0.4], [0.7, 0.1]])
    for kind in ("serial", "outcome", "budget", "surrogate", "posterior", "staged", "win_rate"):
        with pytest.raises(ValueError, match=f"list {kind} first"):
            check_steps(method(shaping=["overlong", kind]).shaping)
    # Wrong but tidy: the reward is above 0 for its format, the outcome stays 0.
    channels = {"answer": [1, 0], "format": [1, 1], "quality": [0.5, 0.5]}
    group = make_group([1.25, 0.25], channels=channels, status=["correct", "wrong"])
    close([shaped(group, "posterior"), shaped(group, "outcome")], [[2.5, 1], [1, -1]])
    # Any matrix in which a pair shares one point; Pref-GRPO's own vector through the chain.
    wins = np.array([[0, 0.5, 1, 1], [0.5, 0, 0.5, 1], [0, 0.5, 0, 0.5], [0, 0, 0.5, 0]])
    group, step = make_group([0, 0, 0, 1]), {"kind": "win_rate", "judge": "mine"}
    with given({"mine": lambda features: wins}):
        close(shaped(group, step), [0.833333, 0.666667, 0.333333, 0.166667])
    with given({"mine": lambda features: np.ones((4, 4))}), pytest.raises(ValueError, match=r"judge returned shape"):
        shaped(group, step)


def soft_maximum(scores, tau):
    return scores.mean() if np.isinf(tau) else tau * np.log(np.mean(np.exp(scores / tau)))


def disco(scores, rewards, lengths, tau=10.0):
    """mean_pos s - tau log mean_neg exp(s / tau) (arXiv:2505.12366)."""
    return scores[rewards > 0].mean() - soft_maximum(scores[rewards <= 0], tau)


def drpo(scores, rewards, lengths, tau=10.0, max_length=8192, length_temperature=0.1):
    """sum_pos w s - tau log mean_neg exp(s / tau), w = softmax of 1 - n / L over the successes (arXiv:2510.04474)."""
    shares = np.exp((1 - lengths[rewards > 0] / max_length) / length_temperature)
    return shares @ scores[rewards > 0] / shares.sum() - soft_maximum(scores[rewards <= 0], tau)


def rebel(scores, rewards, lengths, eta=1.0):
    """Minus the mean over all pairs of ((s_i - s_j) - eta (R_i - R_j))^2 (arXiv:2404.16767)."""
    first, second = np.triu_indices(len(scores), 1)
    gaps = (scores[first] - scores[second]) - eta * (rewards[first] - rewards[second])
    return -np.mean(gaps**2)


def reg(scores, rewards, lengths, floor=1.0):
    """Minus mean (A - z)^2 with z = (s - mean) / (max(std, floor) + 1e-6) (arXiv:2506.07464)."""
    advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    predicted = (scores - scores.mean()) / (max(scores.std(ddof=1), floor) + 1e-6)
    return -np.mean((advantages - predicted) ** 2)


OBJECTIVES = {"disco": disco, "drpo": drpo, "rebel": rebel, "reg": reg}
"""J(scores, rewards, lengths, **settings) of a group, to be maximized, by the kind of `advantage`."""


@pytest.mark.parametrize(
    ("kind", "settings", "spread"),
    [
        *(("disco", {"tau": tau}, 1.0) for tau in (0.5, np.inf)),
        ("drpo", {"tau": 0.5, "max_length": 1000}, 1.0),
        ("rebel", {"eta": 0.7}, 1.0),
        ("reg", {"floor": 0.01}, 1.0),
        ("reg", {}, 0.1),  # under the floor of its deviation, through which no gradient goes
        ("reg", {}, 0.0),  # right after sampling
    ],
)
def test_coefficients_are_gradients(kind, settings, spread):
    generator, rewards = np.random.default_rng(0), np.array([1.0, 1, 0, 0, 1, 0])
    for _ in range(3):
        scores, lengths = spread * generator.normal(size=6), generator.integers(100, 900, 6)

        def objective(scores, lengths=lengths):
            return OBJECTIVES[kind](scores, rewards, lengths, **settings)

        slopes = [(objective(scores + nudge) - objective(scores - nudge)) / 2e-5 for nudge in 1e-5 * np.eye(6)]
        part = method(advantage={"kind": kind, **settings}).advantage
        coefficients = part.coefficients(scores, rewards, features(make_group(rewards, lengths=lengths)))
        close(coefficients, slopes, 1e-6)


@pytest.mark.parametrize("push", [0.0, 1.0])
def test_rows_carry_the_gradient_of_the_objective(push):
    """c_i / P for each token of REBEL's summed log-ratios; c_i / (P n_i) for DRPO's means, and where the policy has
    moved beyond the bound on the divergence its factor over all tokens."""
    groups, generator = batch(), np.random.default_rng(2)
    now = [t.logprobs - np.float32(0.3 * push) * generator.random(t.length) for t in trajectories(groups)]
    gaps = [(t.logprobs - v)[t.policy_mask] for v, t in zip(now, trajectories(groups), strict=True)]
    factor = max(0.0, 2.0 * (np.concatenate(gaps).mean() - 0.01)) / len(np.concatenate(gaps))
    assert (factor > 0) == (push > 0)
    bound = {"max_length": 10, "kl_delta": 0.01, "kl_beta": 2.0}
    for advantage, normalizer in (({"kind": "drpo"} | bound, "sequence_mean"), ({"kind": "rebel"}, "sequence_sum")):
        config = method(advantage=advantage, weights={"normalizer": normalizer}, surrogate="logp")
        rows = iter(train_rows(groups, config, AlgoState(), scores=Scores(now)))
        for group, places in zip(groups, (now[:4], now[4:]), strict=True):
            bounded, pairs = normalizer == "sequence_mean", zip(places, group.trajectories, strict=True)
            trained = [(v - (not bounded) * t.logprobs)[t.policy_mask] for v, t in pairs]
            scores = np.array([v.mean() if bounded else v.sum() for v in trained])
            for c in config.advantage.coefficients(scores, group.rewards, features(group)):
                row = next(rows)
                product = (row.advantages * row.weights)[row.policy_mask]
                close(product, c / 2 / len(product) + factor if bounded else c / 2)


UNEVEN = np.array([2, 4, 6])


def preferring(exponent, **settings):
    """A method of groups of three, and a state with this exponent."""
    weights = {"factors": [{"kind": "learned_length", **settings}]}
    return method(3, weights=weights), AlgoState(memory={"length_exponent": np.array([exponent])})


def test_length_preference():
    close(length_bases(UNEVEN, 1 / 9), [0.863917, 1, 1.136083])
    rows = train_rows([make_group([1, 0, 1], lengths=UNEVEN)], *preferring(1.0))
    close([row.weights.max() * 12 for row in rows], [0.867408, 0.993856, 1.138737])
    # Long successes push the exponent up, by the slope of the objective; it stays within its bound.
    advantages = np.array([-1.0, 0, 1])

    def objective(e):
        return length_preference(UNEVEN, e) @ (advantages * UNEVEN) / UNEVEN.sum()

    for at in (-1.0, 0.0, 0.7):
        numeric = (objective(at + 1e-6) - objective(at - 1e-6)) / 2e-6
        assert numeric > 0 and exponent_gradient([UNEVEN], [advantages], at) == pytest.approx(numeric, abs=1e-6)
    group = make_group([0, 0, 1], lengths=[2, 4, 600])
    assert next_state([group], [group], *preferring(1.999, lr=100.0)).recall("length_exponent", 0.0) == 2.0


def test_masks_of_trajectories():
    """Of one trajectory with so many calls in its turns."""
    trained = {((1, 0), "1"): True, ((1, 0), None): False, ((1, 1), None): True, ((0, 1, 0), "1"): False}
    for (calls, answer), trains in trained.items():
        turns = tuple(Turn(i, i + 1, "t", (call(),) * n) for i, n in enumerate(calls))
        trajectory = replace(make_trajectory(len(turns), prompt=0, stop="eos"), turns=turns)
        group = Group(Problem("p", "?", "1", "test"), (trajectory,), (replace(make_verdict(0), answer=answer),))
        assert trained_tokens([group], [group.rewards], [VoidTurns()])[0].any() == trains
    for rewards, pivot in (([1, 0, 0.5, 0.2, 0.9], [2]), ([1, 0], [])):
        group = make_group([1] + [0] * (len(rewards) - 1))
        assert np.flatnonzero(~Pivot().trains(group, np.array(rewards))).tolist() == pivot
    # Bigrams of 1 2 1 2 1 2: five, two of them distinct.
    tokens = np.array([1, 2, 1, 2, 1, 2, 9])
    for n, ends, share in ((2, [(0, 6)], 0.6), (2, [(0, 3), (3, 6)], 0.5), (9, [(0, 6)], 0)):
        assert Repetition(n=n).share(tokens, [Turn(*pair, "") for pair in ends]) == pytest.approx(share)
    batch = batch_of([make_group([1.0, 0.0], lengths=[4, 4], tokens=[[1, 2, 1, 2]] * 2)])
    close(Repetition(n=1).trajectories(batch), [0.5, 1.0])  # the failure keeps its weight
    close(Repetition(n=1, limit=0.5).trajectories(batch), [1.0, 1.0])


def seen(trajectories, **passes):
    """A batch of one group of these trajectories."""
    problem = Problem("p", "?", "1", "test")
    return batch_of([Group(problem, tuple(trajectories), (make_verdict(0),) * len(trajectories))], **passes)


def test_masks_of_tokens():
    first, second = make_trajectory(4, prompt=1, logprobs=-1.0), make_trajectory(4, prompt=1)
    for shift, advantage, kept in ((0.3, -1.0, False), (0.1, -1.0, True), (0.3, 1.0, True), (-0.3, -1.0, True)):
        batch = seen([first], scores=[first.logprobs - np.float32(shift) * first.policy_mask])
        (mask,) = Drift(threshold=0.2).tokens([first.policy_mask], [np.full(first.length, advantage)], batch)
        assert mask.tolist() == (first.policy_mask & kept).tolist()
    now = first.logprobs - np.float32(0.3) * first.policy_mask
    entropies = [np.array([9, 0.1, 0.2, 0.3, 2.0]), np.array([9, 0.1, 1.0, 0.2, 0.3])]
    batch = seen([first, second], scores=[now, second.logprobs], entropies=entropies)
    masks, advantages, top = [first.policy_mask, second.policy_mask], [np.full(5, -1.0)] * 2, TopEntropy(share=0.25)
    top_masks = top.tokens(masks, advantages, batch)
    assert [mask.tolist() for mask in top_masks] == [[False] * 4 + [True], [False, False, True, False, False]]


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
        ("truncated_is", {"low": 0.5}, [[2, *FIRST[1:]], [0.5, SECOND[1]]], {"token_below": 0.2, "token_above": 0.2}),
        ("truncated_is", {"normalize": True}, [[1.793737, 0.734294, 0.991193], [0.270131, 1.210644]], {}),
        ("masked_is", {"high": 5}, [FIRST, [0, SECOND[1]]], {"token_below": 0.2}),
        ("rejection", {"level": "product"}, [0, 0], {"product_ratio_below": 0.5}),
        ("rejection", {"high": 1.3}, [0, 1], {"geometric_ratio_above": 0.5}),
        ("rejection", {"measure": "k3", "low": 0, "high": 0.2755}, [1, 0], {}),
        ("rejection", {"measure": "k2", "level": "max", "low": 0, "high": 0.7}, [1, 0], {}),
        ("rejection", {"measure": "k2", "level": "token", "low": 0, "high": 0.05}, [[0, 1, 1], [0, 1]], {}),
        ("rejection", {"measure": "error", "high": 1.5954}, [1, 0], {}),
        ("veto", {"low": 0.302}, [1, 0], {"vetoed": 0.5}),
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
    for level, logs in [("token", [*GAPS[0], *GAPS[1]]), ("product", [0.8, -0.9]), ("geometric", [0.8 / 3, -0.45])]:
        x = np.exp(logs)
        close(metrics[f"mismatch/{level}_ratio"], x.mean())
        close(metrics[f"mismatch/{level}_effective_sample_size"], x.sum() ** 2 / (len(x) * (x**2).sum()))
        close(metrics[f"mismatch/{level}_kl_k1"], -np.mean(logs))
        close(metrics[f"mismatch/{level}_kl_k3"], np.mean(x - 1 - logs))
    assert all(value == 0 for value in importance("veto", ([], []))[1].values())


def test_renormalized_parts():
    """Each part of the rows carries the normalizer that it would have had alone."""
    groups = batch()
    for normalizer in ("token_mean", "sequence_mean", "prompt_mean"):
        config = method(weights={"normalizer": normalizer}, advantage={"scale": "none"})
        rows = train_rows(groups, config, AlgoState())
        parts = renormalized([rows[:4], rows[4:]], config.weights.normalizer, [[4], [4]])
        for group, part in zip(groups, parts, strict=True):
            for row, alone in zip(part, train_rows([group], config, AlgoState()), strict=True):
                np.testing.assert_allclose(row.weights, alone.weights, rtol=1e-6)
    # Prompts count equally.
    weights = PromptMean()(np.array([1, 0, 0, 0, 2, 6]), [2, 1, 3])
    close(weights, [1 / 2, 0, 0, 0, 1 / 16, 1 / 16])
    assert weights @ [1, 0, 0, 0, 2, 6] == 1, "groups without a trained token count nowhere"
    assert PromptMean()(np.zeros(3), [1, 2]).tolist() == [0, 0, 0]


def vespo_loss(now):
    surrogate = made("vespo")
    d = shared_logratio(now - jnp.asarray(OLD), A, MASK, jnp.zeros(MASK.shape, jnp.int32), surrogate)
    return surrogate.loss(d, jnp.asarray(A), now)


def test_vespo():
    """W = e^0.2 and e^0.3: factors e^(2 * 0.2 + 3 (1 - W)) = 0.767814 and e^(3 * 0.3 + 2 (1 - W)) = 1.221747."""
    close(vespo_loss(jnp.asarray(NOW))[MASK], [0.537470, 1.612409, 0.767814, -1.466096, -0.610874])
    gradient = jax.grad(lambda now: jnp.sum(jnp.where(MASK, vespo_loss(now), 0.0)))(jnp.asarray(NOW))
    close(gradient, [[-0.767814] * 3, [1.221747, 1.221747, 0]])  # the factor is held fixed
    assert np.isfinite(np.asarray(vespo_loss(jnp.asarray(OLD) - 100.0))).all()
    assert np.abs(np.asarray(vespo_loss(jnp.asarray(OLD) + 100.0))).max() < 1e-6
    surrogates.test_what_holds_for_every_surrogate("vespo", "sequence")
