"""Advantages, reward maps and score-based objectives against the vectors of the family's specification."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_roc_jax.contrib.methods.constraints import Constraints
from grpo_roc_jax.contrib.methods.score_based import live_rows
from grpo_roc_jax.contrib.methods.spo import tracked
from grpo_roc_jax.contrib.methods.tempo import tree_differences
from grpo_roc_jax.contrib.methods.xrpo import Novelty
from grpo_roc_jax.method.compose import Scores, initial_state, next_state, train_rows
from grpo_roc_jax.method.features import features
from grpo_roc_jax.method.shaping import check_steps, prompt_suffix
from grpo_roc_jax.method.state import AlgoState, ProblemTable, begun
from grpo_roc_jax.settings.callables import given
from grpo_roc_jax.settings.cli import ConfigError
from grpo_roc_jax.types import Problem
from tests.helpers.loss_batch import packed_loss
from tests.helpers.method_groups import close, make_group, method, shaped, trajectories
from tests.method import test_advantage as core
from tests.method.test_advantage import values
from tests.method.test_compose import batch

VIRTUAL = {"baseline": "virtual_max", "scale": "virtual_std"}
PIVOTED = {"baseline": "median", "adjust": ["rescale_nonzero"]}
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
        ([[1, 0, 0, 0]], VIRTUAL, [1.095443, -0.730295, -0.730295, -0.730295]),
        ([[1] * 4], VIRTUAL, [0] * 4),
        ([GRADED], PIVOTED | {"scale": "mad"}, [1.558603, -1.558603, 0, -0.935162, 1.246883]),
        ([GRADED], PIVOTED | {"scale": "mad_or_std"}, [1.558603, -1.558603, 0, -0.935162, 1.246883]),
        ([[1, 0, 0, 0, 1]], PIVOTED | {"scale": "mad"}, [2500, 0, 0, 0, 2500]),
        ([[1, 0, 0, 0, 1]], PIVOTED | {"scale": "mad_or_std"}, [4.564355, 0, 0, 0, 4.564355]),
        ([[1, 0, 0, 0]], {"scale": "beta"}, [0.75, -0.25, -0.25, -0.25]),
        (SHARES, {"scale": "beta"}, BETA),
        ([[4 * r - 1 for r in row] for row in SHARES], {"scale": {"kind": "beta", "low": -1, "high": 3}}, BETA),
        ([[1, 1, 1, 0]], adjusted("focal", exponent=2.0), [0.03125, 0.03125, 0.03125, -0.09375]),
        ([CALLS], adjusted("strata"), [0.707106, -0.707106, 0.577349, 0.577349, -1.154699, 0]),
        ([CALLS], adjusted("strata", blend=0.5), [0.809988, -0.809988, 0.745109, 0.745109, -1.033784, -0.456435]),
        ([CALLS], adjusted("strata", cap=1), [0.707106, -0.707106, 0.866024, 0.866024, -0.866024, -0.866024]),
        ([UNLIKELY], adjusted("novelty"), [0.866024, 1.259493, -0.866024, -0.866024]),
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
    with pytest.raises(ValueError, match="1 channels but 0 targets"):
        Constraints(channels=("clean",))
    for dual, channel, target, expected in (
        (0.5, [1, 1, 1, 0], 0.95, 0.52),
        (0.0, [1, 1, 1, 1], 0.5, 0.0),
        (5.0, [0, 0, 0, 0], 1.0, 5.0),
    ):
        step, groups = (
            Constraints(channels=("clean",), targets=(target,)),
            [make_group([1] * 4, channels={"clean": channel})],
        )
        moved = step.next_memory(groups, groups, None, AlgoState(memory={"constraints": np.array([dual])}))
        close(moved["constraints"], [expected], 1e-9)
    # Rewards are mapped to the bounds of the distribution, and those that reach outside are refused.
    all_right, all_wrong, mixed = values([[1, 1], [0, 0], [1, 0]], scale="beta")
    assert not all_right.any() and not all_wrong.any() and np.isfinite(mixed).all()
    with pytest.raises(ConfigError, match=r"reach from -1 to 3, .* set advantage\.scale\.low and"):
        values([[3, -1]], scale="beta")


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
    # A collapsed policy's responses: thousands of shared tokens, then one that differs, then one that ends early.
    shared = np.arange(8000)
    tokens = [np.append(shared, 1), np.append(shared, 2), np.append(shared, 1), shared]
    differences = tree_differences(np.array([1.0, 0, 0, 1]), tokens)
    assert not np.concatenate([row[:8000] for row in differences]).any()
    close([row[8000] for row in differences[:3]], [0, -0.5, 0])


def test_trackers():
    """S = 4 of 8 gives alpha = beta = 4, for problems that were not seen."""
    problem = Problem("p0", "?", "1", "t", {"success_rate": 0.5, "judged": 8})
    state = begun(AlgoState(), [problem, Problem("q", "?", "1", "t")])
    assert [state.table.get([uid])["alpha"].tolist() for uid in ("p0", "q")] == [[4.0], [0.5]]
    rarely = replace(problem, extra={"success_rate": 0.125, "judged": 8})
    assert tracked(AlgoState(), [rarely]) == pytest.approx(1.5 / 9)
    group = make_group([1], problem=problem)
    config = method(1, advantage={"baseline": {"kind": "tracker", "forget": "constant"}})
    after = next_state([group], [group], config, AlgoState())
    rows = after.table.get(["p0"])
    assert (rows["alpha"].tolist(), rows["beta"].tolist()) == ([4.5], [3.5])
    assert begun(after, [problem]).table is after.table and not after.memory
    counts = {"alpha": np.array([5.0, 5, 9, 2]), "beta": np.array([5.0, 5, 1, 8])}
    state = AlgoState(table=ProblemTable().put(["p0", "p1", "p2", "p3"], counts))
    result = values([[1], [0], [1], [1]], state, baseline="tracker", scale="none", **adjusted("whiten", over="row"))
    close(np.concatenate(result), [0.489332, -1.290057, -0.222424, 1.023149])
    # Factors 2^(-D / 0.06) within 0.875 .. 0.96; the last sample of each problem is remembered and scored.
    config = method(1, advantage={"baseline": "tracker", "scale": "none"})
    tracker = config.advantage.baseline
    close(tracker.forgetting(0.5, ["a", "b", "c"], {"a": 0.06, "b": 0.006}), [0.875, 0.933033, 0.96])
    first, second = make_group([1], uid="a", lengths=[2]), make_group([0], uid="b", lengths=[4])
    assert tracker.earlier([first], AlgoState()) == []
    state = next_state([first, second], [first, second], config, initial_state(config))
    state = AlgoState.from_tree(state.to_tree())
    (remembered,) = tracker.earlier([second, make_group([1], uid="c")], state)
    (then,), (now,) = remembered.trajectories, second.trajectories
    for name in ("tokens", "policy_mask", "logprobs", "temperature"):
        np.testing.assert_array_equal(getattr(then, name), getattr(now, name))
    moved = next_state([first], [first], config, state, {"a": 0.006}).table.get(["a"])
    close(moved["alpha"], 0.933033 * state.table.get(["a"])["alpha"] + 1)
    longer = [make_group([1], uid="b", lengths=[6])]
    again = next_state(longer, longer, config, state)
    assert [tracker.earlier([group], again)[0].trajectories[0].length for group in (first, second)] == [4, 8]


def test_adjustments_of_successes():
    """A truncated success loses its advantage where it draws below the probability; failures and loops keep it."""
    pair, drawn = make_group([1, 1], stop=["length"] * 2), SimpleNamespace(random=lambda n: np.array([0.1, 0.9]))
    advantages = values([pair], rng=drawn, baseline="none", scale="none", adjust=["truncation_mask"])[0]
    assert advantages.tolist() == [0, 1]
    always = {"rng": np.random.default_rng(0)} | adjusted("truncation_mask", probability=1.0)
    masked = values([make_group([1, 1, 0], stop=["length", "answer", "length"])], **always)[0]
    assert masked[0] == 0 and masked[1] > 0 > masked[2]
    with pytest.raises(ValueError, match="rng"):
        values([[1, 0]], adjust=["truncation_mask"])
    for tokens, loops in ((np.arange(512) % 4, True), (np.arange(512), False), ([1] * 100, False)):
        group = make_group([1, 0], stop=["length"] * 2, lengths=[len(tokens), 3], tokens=[tokens, range(3)])
        assert (values([group], **always)[0][0] > 0) == loops, "a loop keeps its advantage"
    # The cap of its bonus is 0 then, not a negative bonus.
    group = SimpleNamespace(correct=np.array([True, True]), mean_logprobs=np.array([-1.5, -0.5]))
    close(Novelty().group(np.array([-0.5, 0.5]), np.ones(2), group), [-0.5, 0.5])


@pytest.mark.parametrize(
    "advantage",
    [
        *({"kind": "group", "baseline": "median", "scale": scale} for scale in ("mad", "mad_or_std")),
        *(adjusted(step) for step in ("strata", "novelty", "rescale_nonzero", "tree")),
        *("grao", "anchored", "by_role", "positions"),
    ],
    ids=str,
)
def test_rounding_gives_no_advantage(advantage):
    core.test_rounding_gives_no_advantage(advantage)


# ---- reward maps ---------------------------------------------------------------------------------------------------

CHANNELS = {"format": [1, 1, 0, 0], "quality": [0.8, 0.4, 0.2, 0.1]}
FAILING = {"calls": [1, 2, 1, 0], "errors": [0, 1, 1, 0]}
LENGTHS = {
    "lengths": [0, 25, 50, 75, 100, 50, 100],
    "answers": [1] * 5 + [0] * 2,
    "channels": {"format": [0, 0, 0.5, 0, 0, 0, 0]},
}
RISING, PAID = [0, 100, 200, 300, 400, 500], {"lengths": [3, 6, 3, 3], "channels": CHANNELS}


@pytest.mark.parametrize(
    ("step", "rewards", "group", "expected"),
    [
        ("dynamic_length", [1] * 4, {"lengths": [100, 200, 300, 400]}, [0.875656, 0.765986, 0.634014, 0.524344]),
        ("dynamic_length", [1, 0], {"lengths": [5, 9]}, [0.7, 0]),
        ("serial", [0, 1, 1, 0, 1], {}, [0, 1, 0.5, 0, 0.25]),
        ("unlikeliness", [1, 1, 1, 0], {"logprobs": [-0.5, -1, -2, -0.3]}, [0.875, 0.9375, 1, 0]),
        ("posterior", [1, 1, 0, 0], {"channels": CHANNELS}, [2.8, 2.4, 0, 0]),
        ("posterior", [1, 0, 0], {"channels": {"format": [1] * 3, "quality": [0.2, 0.9, 0.9]}}, [2.2, 1, 1]),
        ("quality", [1, 1, 0, 1], {"channels": {"quality": [0.8, 0.4, 0.8, 0]}}, [1, 0.85, 0, 0.7]),
        ("quality", [1, 1, 0, 1], {"channels": {"quality": [0] * 4}}, [0.7, 0.7, 0, 0.7]),
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
    close(shaped(group, "outcome", "tool_errors"), [0.5, -1])
    close(shaped(group, "tool_errors", soft), [0.5, 0.5 - np.expm1(0.5) / np.expm1(1.0)])
    close(shaped(group, soft, "tool_errors")[0], 0.5 + 2.0 * np.log(1.5) - 0.5)
    # The better-solved half of the groups pays by length, the other keeps its rewards.
    groups = [make_group(rewards, lengths=[100, 200, 300, 400]) for rewards in ([1, 0, 0, 0], [1, 1, 0, 1])]
    hard, easy = shaped(groups, {"kind": "dynamic_length", "fraction": 0.5})
    close(hard, [1, 0, 0, 0])
    assert easy[2] == 0 and 1 > easy[0] > easy[1] > easy[3] > 0
    # Train Long, Think Short: the prompt names the budget that the reward is about to use.
    step = method(shaping=["budget"]).shaping[0]
    assert [int(step.tokens(s)) for s in (0, 49, 50, 100, 400)] == [256, 256, 217, 184, 69]
    assert step.tokens(10**6) == 1.0 and prompt_suffix([step], 0) == ""
    steps = method(shaping=["overlong", {"kind": "budget", "tell": "{budget} tokens"}]).shaping
    assert [prompt_suffix(steps, step) for step in (0, 50)] == ["\n256 tokens", "\n217 tokens"]
    group, budget = make_group([1, 0], lengths=[4, 4]), {"kind": "budget", "start": 4, "decay": 0.5, "every": 1}
    close([shaped(group, budget, state=AlgoState(step=step)) for step in (0, 1)], [[1.0, 0.4], [0.7, 0.1]])


@pytest.mark.parametrize("kind", ["serial", "outcome", "budget", "surrogate", "posterior", "staged", "win_rate"])
def test_a_step_that_would_undo_those_before_it_is_refused(kind):
    check_steps(method(shaping=[kind, "overlong"]).shaping)
    with pytest.raises(ValueError, match=f"list {kind} first"):
        check_steps(method(shaping=["overlong", kind]).shaping)


def test_pay_beside_the_answer_makes_nobody_correct():
    """Wrong but tidy: the reward is above 0 for its format, the outcome stays 0."""
    channels = {"answer": [1, 0], "format": [1, 1], "quality": [0.5, 0.5]}
    group = make_group([1.25, 0.25], channels=channels, status=["correct", "wrong"])
    close(shaped(group, "posterior"), [2.5, 1])
    close(shaped(group, "outcome"), [1, -1])
    with pytest.raises(ValueError, match=r"'quality'.*none"):
        shaped(make_group([1, 0]), "quality")
    # Any matrix in which a pair shares one point; Pref-GRPO's own vector through the chain.
    wins = np.array([[0, 0.5, 1, 1], [0.5, 0, 0.5, 1], [0, 0.5, 0, 0.5], [0, 0, 0.5, 0]])
    group, step = make_group([0, 0, 0, 1]), {"kind": "win_rate", "judge": "mine"}
    with given({"mine": lambda features: wins}):
        close(shaped(group, step), [0.833333, 0.666667, 0.333333, 0.166667])
    refused = pytest.raises(ValueError, match=r"shaping\.judge returned shape \(4, 4\)")
    with given({"mine": lambda features: np.ones((4, 4))}), refused:
        shaped(group, step)


# ---- score-based objectives: every coefficient and loss against finite differences of its objective ------------------


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
FOUR = ([-0.5, -0.7, -0.4, -0.9], [1, 1, 0, 0], [2000, 6000, 3000, 3000])


def test_objectives():
    """The vectors of the specification."""
    for kind, settings, group, expected in (
        ("disco", {"tau": 10.0}, FOUR, 0.046875),
        ("disco", {"tau": 1.0}, FOUR, 0.019070),
        ("disco", {"tau": np.inf}, FOUR, 0.05),
        ("drpo", {}, FOUR, 0.145372),
        ("rebel", {}, ([0.3, -0.1], [1, 0], [3, 3]), -0.36),
        ("reg", {"floor": 0.01}, ([0.2, -0.1, 0, -0.1], [1, 0, 0, 0], [1] * 4), -0.085786),
    ):
        assert OBJECTIVES[kind](*map(np.array, group), **settings) == pytest.approx(expected, abs=1e-5)
    for masks, rows in (([[0, 1], [0, 0], [1, 1]], 2), ([[0, 0], [1, 0]], 1), ([[0, 0]], 1)):
        assert live_rows(SimpleNamespace(masks=[np.array(mask, bool) for mask in masks])) == rows


@pytest.mark.parametrize(
    ("kind", "settings", "spread"),
    [
        *(("disco", {"tau": tau}, 1.0) for tau in (0.5, 10.0, np.inf)),
        *(("drpo", {"tau": tau, "max_length": 1000}, 1.0) for tau in (0.5, 10.0)),
        *((kind, {}, 1.0) for kind in OBJECTIVES),
        ("rebel", {"eta": 0.7}, 1.0),
        ("reg", {"floor": 0.01}, 1.0),
        ("reg", {}, 0.1),  # under the floor of its deviation, through which no gradient goes
        *(("reg", {"floor": floor}, 0.0) for floor in (0.5, 1.0)),  # right after sampling
    ],
)
def test_coefficients_are_gradients(kind, settings, spread):
    generator, rewards = np.random.default_rng(0), np.array([1.0, 1, 0, 0, 1, 0])
    for _ in range(3):
        scores, lengths = spread * generator.normal(size=6), generator.integers(100, 900, 6)
        ends, starts = (
            np.array(
                [OBJECTIVES[kind](scores + nudge, rewards, lengths, **settings) for nudge in sign * 1e-5 * np.eye(6)]
            )
            for sign in (1, -1)
        )
        part = method(advantage={"kind": kind, **settings}).advantage
        coefficients = part.coefficients(scores, rewards, features(make_group(rewards, lengths=lengths)))
        close(coefficients, (ends - starts) / 2e-5, 1e-6)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("disco", {"tau": 0.8}), ("drpo", {"tau": 0.8, "max_length": 10}), ("rebel", {}), ("reg", {})],
)
@pytest.mark.parametrize("push", [0.0, 1.0])
def test_the_gradient_of_the_loss_is_that_of_the_objective(kind, settings, push):
    """d loss / d log-probabilities equals finite differences of the published objective over the whole batch, for DisCO
    and DRPO of mean log-probabilities with a bound on the divergence, else of summed log-ratios."""
    groups, generator, bounded = batch(), np.random.default_rng(2), kind in ("disco", "drpo")
    members = trajectories(groups)
    now = [(t.logprobs - 0.3 * push * generator.random(t.length)).astype(np.float64) for t in members]
    advantage = {"kind": kind, **settings, **({"kl_delta": 0.01, "kl_beta": 2.0} if bounded else {})}
    weights = {"normalizer": "sequence_mean" if bounded else "sequence_sum"}
    config = method(advantage=advantage, weights=weights, surrogate="logp")
    rows = train_rows(groups, config, AlgoState(), scores=Scores(now))
    slopes = packed_loss(rows, config.surrogate, now).slopes

    def kl(values):
        gaps = [(t.logprobs - v)[t.policy_mask] for v, t in zip(values, members, strict=True)]
        return np.concatenate(gaps).mean()

    factor = max(0.0, 2.0 * (kl(now) - 0.01))
    assert (factor > 0) == (push > 0)

    def objective(values):
        total, rest = 0.0, iter(values)
        for group in groups:
            part = [(next(rest), t) for t in group.trajectories]
            means = [v[t.policy_mask].mean() for v, t in part]
            sums = [(v - t.logprobs)[t.policy_mask].sum() for v, t in part]
            lengths = np.array([t.policy_mask.sum() for _, t in part])
            total -= OBJECTIVES[kind](np.array(means if bounded else sums), group.rewards, lengths, **settings)
        return total / len(groups) + (factor * kl(values) if bounded else 0.0)

    for i, member in enumerate(members):
        numeric = np.zeros(member.length)
        for t in np.flatnonzero(member.policy_mask):
            ends = [
                [v + sign * 1e-5 * (j == i) * (np.arange(len(v)) == t) for j, v in enumerate(now)] for sign in (1, -1)
            ]
            numeric[t] = (objective(ends[0]) - objective(ends[1])) / 2e-5
        close(slopes[i], numeric, 2e-4)
        assert not slopes[i][~member.policy_mask].any()
