"""From groups to rows, held to the formulas and the loss on one page; divergence from the reference and teachers."""

import re
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import grpo_roc_jax as g
from grpo_roc_jax.commands.export import export_model
from grpo_roc_jax.engine.publish import unstack
from grpo_roc_jax.learner.group_learner import GroupLearner, mixture
from grpo_roc_jax.learner.loss import batch_loss
from grpo_roc_jax.method.compose import Scores, reference_sync, resample_group, subset, supervised_rows, train_rows
from grpo_roc_jax.method.divergence import kl_estimate
from grpo_roc_jax.method.reference import grpo_roc_loss
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh
from grpo_roc_jax.run.components import resolve_model
from grpo_roc_jax.run.learning import check_vocabulary, find_teacher, load_teacher
from grpo_roc_jax.run.policy import PolicyModel
from grpo_roc_jax.settings.callables import given
from grpo_roc_jax.text.tokenizer import OWN_SPECIALS, ByteTokenizer, load_tokenizer
from tests.helpers.loss_batch import loss_batch, packed_loss
from tests.helpers.method_groups import make_group, method, saying, trajectories


def batch():
    """Two problems, ragged, with observation tokens after the policy tokens."""
    first = {"lengths": [3, 2, 5, 1], "logprobs": [-0.5, -1, -1.5, -2], "observation": [2, 0, 1, 0]}
    second = {"lengths": [1, 2, 3, 4], "logprobs": [-1, -0.2, -0.4, -3], "observation": [2, 0, 1, 0]}
    return [make_group([1, 0, 0, 1], uid="a", **first), make_group([1, 1, 0, 1], uid="b", **second)]


def test_rows_follow_the_trajectories():
    groups = batch()
    reference = [np.full(t.length, -3.0, np.float32) for t in trajectories(groups)]
    rows = train_rows(groups, method(surrogate={"kl": "k3"}), AlgoState(), scores=Scores(reference=reference))
    for row, before, trajectory in zip(rows, g.scoring_rows(groups), trajectories(groups), strict=True):
        assert row.tokens is before.tokens is trajectory.tokens
        assert (row.policy_mask == trajectory.policy_mask).all() and (before.policy_mask == row.policy_mask).all()
        np.testing.assert_allclose(row.logprobs_old, trajectory.logprobs)
        assert (row.logprobs_ref == -3).all()
        assert not row.weights[~row.policy_mask].any() and not before.weights.any()
        assert row.weights.dtype == row.advantages.dtype == np.float32
    assert sum(row.policy_mask.sum() for row in rows) == 21
    np.testing.assert_allclose(sum(row.weights.sum() for row in rows), 1, atol=1e-6)
    np.testing.assert_allclose(rows[0].weights.max(), 1 / 21, atol=1e-7)


def test_refused_arguments_and_the_message_on_a_missing_pass_says_how_to_make_it():
    group, config, state = batch()[0], method(surrogate={"old_logprobs": "scored"}), AlgoState()
    with pytest.raises(TypeError, match=r"rng is 0 \(int\); must be a generator: np.random.default_rng"):
        resample_group(group, config, 0)
    with pytest.raises(TypeError, match=r"groups is of type Group; must be a list of Groups, such as \[group\]"):
        g.scoring_rows(group)
    with pytest.raises(ValueError, match=r"shaping kl, advantage.adjust kl needs .* reference"):
        train_rows([group], method(shaping=["kl"], advantage={"adjust": ["kl"]}), state)
    with pytest.raises(ValueError, match=re.escape("pass scores=Scores(*learner.score(scoring_rows(groups)))")):
        train_rows([group], config, state)
    passes = [row.logprobs_old - 1 for row in g.scoring_rows([group])]
    rows = train_rows([group], config, state, scores=Scores(passes))
    np.testing.assert_array_equal(rows[0].logprobs_old, group.trajectories[0].logprobs - 1)
    with pytest.raises(ValueError, match=r"scores.logprobs of trajectory 1 is of shape \(2,\); must be \(4,\)"):
        train_rows([group], method(), state, scores=Scores([np.zeros(n) for n in (7, 2, 8, 3)]))


@pytest.mark.parametrize(
    ("surrogate", "normalizer", "expected"),
    [
        ({"clip_high": 0.2}, "sequence_mean", 0.099390),
        ({"clip_high": 0.2}, "token_mean", -0.127477),
        ({"clip_high": 0.2}, {"kind": "constant", "length": 3}, -0.106231),
        ({"level": "sequence", "clip_low": 3e-4, "clip_high": 4e-4}, "sequence_mean", 0.080717),
        ("cispo", "token_mean", 0.407645),
        ({"kind": "cispo", "low": 0.8, "high": 1.28}, "token_mean", 0.434736),
        # Half of the clipped loss, as advantages are, and the k3 divergence, whose token mean is 0.022610.
        ({"clip_high": 0.2, "kl": {"kind": "k3", "coef": 0.25}}, "token_mean", -0.127477 + 0.5 * 0.022610),
    ],
)
def test_grpo_loss_by_hand(surrogate, normalizer, expected):
    """Fixture F of the family's specification, whose advantages are twice those without a scale."""
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
    scores = [row.policy_mask * np.float32(-1.5) for row in g.scoring_rows(groups)]
    rows = supervised_rows(groups, Scores(scores), 0.1, method().surrogate)
    value = sum(float(-(row.weights * row.advantages * now).sum()) for row, now in zip(rows, scores, strict=True))
    assert value == pytest.approx(0.15, abs=1e-6)
    np.testing.assert_allclose(rows[0].logprobs_old, scores[0])  # ratio 1: every surrogate has the gradient of -log p


def test_importance_weights_scale_the_surrogate_alone():
    """The weights of tokens, or the advantages where the loss has a divergence, which the weights multiply too."""
    passes = [(t.logprobs - np.float32(0.5) * t.policy_mask).astype(np.float32) for t in trajectories(batch())]
    scores = Scores(passes, reference=[values + 1 for values in passes])
    for loss, scaled, other in (
        ({}, "weights", "advantages"),
        ({"kl": {"kind": "k3", "coef": 0.3}}, "advantages", "weights"),
    ):
        surrogate = {"old_logprobs": "scored"} | loss
        configs = method(surrogate=surrogate), method(surrogate=surrogate, weights={"factors": ["truncated_is"]})
        plain, rows = (train_rows(batch(), config, AlgoState(), scores=scores) for config in configs)
        for row, before, now in zip(rows, plain, passes, strict=True):
            on = row.policy_mask
            np.testing.assert_allclose(row.logprobs_old, now)
            np.testing.assert_array_equal(getattr(row, other), getattr(before, other))
            np.testing.assert_allclose(getattr(row, scaled)[on], np.exp(-0.5) * getattr(before, scaled)[on], rtol=1e-6)


SAMPLED = 8


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
    names, rollouts = {"calls": "tool_calls", "errors": "tool_errors", "answers": "answers", "turns": "turns"}, []
    for group in groups:
        counts = {name: np.array([getattr(v, field) for v in group.verdicts]) for name, field in names.items()}
        rollouts.append(counts | {"rewards": group.rewards, "correct": group.correct})
    old, mask = ([[getattr(t, name) for t in g.trajectories] for g in groups] for name in ("logprobs", "policy_mask"))
    width = max(len(array) for group in mask for array in group)
    padded = (np.stack([[np.pad(a, (0, width - len(a))) for a in group] for group in f]) for f in (now, old, mask))
    logprobs, old, mask = padded
    return grpo_roc_loss(jnp.asarray(logprobs), jnp.asarray(old), mask, rollouts, rng, keep=keep)


@pytest.mark.parametrize(("seed", "keep"), [*((seed, 4) for seed in range(6)), (12, 1), (14, SAMPLED)])
def test_the_composed_loss_is_that_of_the_page(seed, keep):
    """At log-probabilities at random, on both sides of the clip; of one trajectory the advantage is 0."""
    rng = np.random.default_rng(seed)
    groups = [drawn_group(rng, f"p{i}") for i in range(5)]
    now = [[t.logprobs + rng.normal(0, 0.4, t.length).astype(np.float32) for t in g.trajectories] for g in groups]
    expected = on_one_page(groups, now, np.random.default_rng(99), keep)
    np.testing.assert_allclose(composed(groups, now, np.random.default_rng(99), keep), expected, rtol=1e-5, atol=1e-6)


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
    seven, eight = (lambda rewards, *_, value=value: np.full(len(rewards), value) for value in (7.0, 8.0))
    with given({"mine": seven}):
        for inner, expected in ({"others": len}, 7), ({"mine": eight}, 8):
            with given(inner):
                assert advantage("mine") == expected
        assert advantage("mine") == 7
    with pytest.raises(ValueError, match=r"advantage\.function = 'mine' .* pass the function"):
        advantage("mine")


GAPS = [[0.5, -1.0], [0.2, 0.0, 0.4]]
"""log p - log p_ref of the policy tokens; the first two are the specification's."""


def passes(some, gaps=GAPS):
    """Log-probabilities of another policy with these gaps, and noise off the mask."""
    out = [np.full(t.length, 7.0, np.float32) for t in some.trajectories]
    for now, t, values in zip(out, some.trajectories, gaps, strict=True):
        now[t.policy_mask] = t.logprobs[t.policy_mask] - np.float32(values)
    return out


def advantages(some=None, scores=None, **sections):
    some = some or make_group([1, 0], lengths=[2, 3], observation=[1, 0], logprobs=[[-1, -2], [-0.4, -1, -0.8]])
    scores = scores or Scores(reference=passes(some))
    rows = train_rows([some], method(some.size, **sections), AlgoState(), scores=scores)
    return [row.advantages[row.policy_mask] for row in rows]


def test_estimates_of_a_token():
    """The specification's vector, on the host as on the device."""
    u = np.array([0.5, -1.0])
    for kind, expected in [("k1", [0.5, -1]), ("k2", [0.125, 0.5]), ("k3", [0.106531, 0.718282])]:
        np.testing.assert_allclose(kl_estimate(kind, u), expected, atol=1e-5)
        far = np.array([-30.0, -2.0, 0.3, 30.0], np.float32)
        np.testing.assert_allclose(kl_estimate(kind, far), kl_estimate(kind, jnp.asarray(far), xp=jnp), rtol=1e-6)


def test_divergences_that_are_paid_for():
    """R_i - beta sum_t KL_t, then leave-one-out: RLOO with KL in the reward."""
    for estimator, costs in (("k1", [-0.5, 0.6]), ("k3", [0.824813, 0.089051])):
        shaping = [{"kind": "kl", "coef": 0.1, "estimator": estimator}]
        values = advantages(shaping=shaping, advantage={"baseline": "leave_one_out", "scale": "none"})
        gap = 1 - 0.1 * costs[0] + 0.1 * costs[1]
        np.testing.assert_allclose(np.concatenate(values), [gap] * 2 + [-gap] * 3, atol=1e-6)
    for discount, costs in ((1.0, [[-0.5, -1.0], [0.6, 0.4, 0.4]]), (0.5, [[0.0, -1.0], [0.3, 0.2, 0.4]])):
        step = {"kind": "kl", "coef": 0.1, "discount": discount}
        values = advantages(advantage={"baseline": "none", "scale": "none", "adjust": [step]})
        for reward, row, cost in zip((1, 0), values, costs, strict=True):
            np.testing.assert_allclose(row, reward - 0.1 * np.array(cost), atol=1e-6)


def test_corrected_term_of_the_loss():
    """r k3 = 0.130117 with gradient r (l - l_ref) = 0.610701; clamped terms have no gradient and are counted. The first
    of three tokens is masked out."""
    surrogate = method(surrogate={"level": "sequence", "kl": {"kind": "corrected", "coef": 2.0}}).surrogate
    passes = {"logprobs_old": np.float32([[np.nan, -1.2, -1]]), "logprobs_ref": np.float32([[np.nan, -1.5, -1]])}
    batch = loss_batch(np.array([[False, True, True]]), ratio_segments=np.zeros((1, 3), np.int32), **passes)
    loss = partial(batch_loss, entropy=jnp.zeros((1, 3)), batch=batch, surrogate=surrogate)
    grad = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (value, sums), slope = grad(jnp.array([[np.nan, -1.0, -1.0]], jnp.float32))
    assert float(value) == pytest.approx(2 * 0.130117, abs=1e-5)
    np.testing.assert_allclose(slope, [[0, 2 * 0.610701, 0]], atol=1e-5)
    assert float(sums["kl_clamped"]) == 0
    (value, sums), slope = grad(jnp.array([[np.nan, 2.0, -60.0]], jnp.float32))  # r k3 = 61; r = e^-20, k3 = e^20
    assert float(value) == pytest.approx(2 * 10.0 + 2 * np.exp(-20.0) * (np.exp(20.0) - 21), rel=1e-4)
    assert float(sums["kl_clamped"]) == 1 and not np.asarray(slope).any()


def test_reference_moves_toward_the_policy_every_so_many_steps():
    """From 1 toward 2 with alpha 0.6 gives 1.6 (TRL); alpha 1 copies the policy to the bit, 0 leaves the reference."""
    trees = {"w": np.float32([2.0, -0.3])}, {"w": np.float32([1.0, 0.1])}
    for alpha, tree in ((1.0, trees[0]), (0.0, trees[1])):
        np.testing.assert_array_equal(mixture(*trees, np.float32(alpha))["w"], tree["w"])
    learner = GroupLearner(g.read_config("--surrogate.kl={kind: k3, sync_every: 5, sync_mix: 0.6}"), None, None)
    for step, expected in [(1, trees[1]["w"]), (4, trees[1]["w"]), (5, [1.6, -0.14]), (10, [1.6, -0.14])]:
        run = SimpleNamespace(train=SimpleNamespace(params=trees[0]), reference=trees[1], step=step)
        np.testing.assert_allclose(learner.next_reference(run)["w"], expected, rtol=1e-6)
    assert reference_sync(method(surrogate={"kl": {"kind": "k3", "sync_every": 5, "sync_mix": 0.6}})) == (5, 0.6)
    with pytest.raises(g.ConfigError, match="there is one reference"):
        g.read_config("--surrogate.kl={kind: k3, sync_every: 5}", "--shaping=kl")


OLD, NOW = np.float32([-1, -0.5, -2]), np.float32([-0.8, -1.5, -2])


def test_a_teacher_adds_to_the_advantage_of_the_reward():
    """The specification's vector: A_t = log p_teacher - log p, discounted sums; nothing was shown for the other row."""
    for settings, estimator, expected in (
        ({}, {"kind": "none"}, [[0.2, -1, 0], [0] * 3]),
        ({"discount": 0.5, "coef": 2.0}, {"kind": "none"}, [[-0.6, -2, 0], [0] * 3]),
        ({}, {"scale": "none"}, [[0.7, -0.5, 0.5], [-0.5] * 3]),
    ):
        some = make_group([1, 0], lengths=[3, 3], observation=[2, 0], logprobs=[OLD, OLD])
        teacher = [passes(some, [OLD - NOW] * 2)[0], None]
        adjust = [{"kind": "teacher", "path": "x"} | settings]
        values = advantages(some, Scores(teacher=teacher), advantage=estimator | {"adjust": adjust})
        np.testing.assert_allclose(values, expected, atol=1e-6)

    def shown(group, index, **settings):
        step = method(advantage={"adjust": [{"kind": "self_teacher", **settings}]}).advantage.adjust[0]
        return step.suffix(group, index)

    problem = g.Problem("p", "?", "1", "test", {"solution": "think", "null": None})
    group = saying(make_group([0, 1, 1], problem=problem), "way 0", "way 1", "way 2")
    assert shown(group, 0) == "\nSolution: 1"
    assert shown(group, 0, column="solution", intro="See: ") == "\nSee: think"
    assert shown(group, 0, column="nothing") == shown(group, 0, column="null") == ""
    assert [shown(group, i, shows="success") for i in range(3)] == [f"\nSolution: way {i}" for i in (1, 2, 1)]
    assert not shown(make_group([1, 0, 0]), 0, shows="success"), "its own"


class Reading(GroupLearner):
    """Scores a token with its value under the given factor, and remembers the rows."""

    def score(self, params, groups, temperature):
        rows = trajectories(groups)
        self.learner[:] = [t.tokens.tolist() for t in rows]
        return Scores([params * t.tokens.astype(np.float32) for t in rows])


def test_the_response_is_scored_after_the_teachers_prompt():
    """Index t of the result is about token t of the row that trains; a prompt is 99, then an id a letter here."""
    groups = [make_group([1, 0], lengths=[2, 3], observation=[1, 0]), make_group([0], lengths=[1])]
    run = SimpleNamespace(train=SimpleNamespace(params=2.0), reference=3.0, method=AlgoState())
    rows, seen = trajectories(groups), []

    def teacher(step, limit=9):
        words = f"--advantage.adjust=[{{kind: self_teacher, {step}}}]", f"--rollout.max_prompt_tokens={limit}"
        learner = Reading(g.read_config(*words), seen, lambda problem, suffix: [99, *map(ord, suffix)])
        return learner.with_teacher(Scores(), groups, run).teacher

    for t, values in zip(rows, teacher("intro: ab"), strict=True):
        np.testing.assert_array_equal(values, np.where(np.arange(t.length) < t.prompt_length, 0, 2 * t.tokens))
    assert seen == [[99, 10, *b"ab1", *t.tokens[t.prompt_length :]] for t in rows]
    moving = teacher("weights: reference, shows: success, intro: ''", 64)
    assert [values is None for values in moving] == [True, False, True] and moving[1][-1] == 3 * rows[1].tokens[-1]
    assert teacher("intro: ab", 4) == [None] * 3, "prompts are never cut"


def words(path):
    return [f"--advantage.adjust=[{{kind: teacher, path: {path!s}}}]", "--model.d_model=16", "--model.layers=1"]


def test_a_published_model_of_another_size_is_loaded(tmp_path):
    """As it scores, layers apart. A teacher must share the vocabulary, and be made for texts of the length."""
    folder, tokenizer = tmp_path / "model", load_tokenizer(g.TextConfig())
    shape = g.ModelConfig(d_model=24, layers=2, heads=2, kv_heads=1, head_dim=12, d_ff=32, max_positions=256)
    model = resolve_model(replace(shape, qk_norm=True), tokenizer)
    params = jax.jit(partial(g.init_params, config=model))(jax.random.key(7))
    export_model(params, model, folder, dtype="float32")
    shutil.copy(Path(g.text.__file__).parent / "toy.model", folder / "tokenizer.model")
    config = g.read_config(*words(folder))
    assert find_teacher(config, tokenizer)[1].d_model == 24
    mesh = make_mesh(ShardingConfig(data=1), jax.devices()[:1])
    teacher = load_teacher(config, PolicyModel(resolve_model(config.model, tokenizer), mesh), tokenizer)
    expected = jax.jit(partial(unstack, config=model))(params)
    jax.tree.map(np.testing.assert_array_equal, teacher.params, expected)

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("text: {tokenizer: bytes}\n")
    for refused, message in [
        (words(tmp_path / "run"), "cannot be the teacher: .* share the vocabulary"),
        ([*words(folder), "--rollout.max_response_tokens=300", "--batch.row_length=400"], "for texts of 256 tokens"),
    ]:
        with pytest.raises(g.ConfigError, match=message):
            find_teacher(g.read_config(*refused), tokenizer)
    with pytest.raises(ValueError, match=r"id 256 is '<\|im_end\|>' there and '<.pad.>' in this run"):
        check_vocabulary(ByteTokenizer(), ByteTokenizer((OWN_SPECIALS[1], OWN_SPECIALS[0], *OWN_SPECIALS[2:])))
