"""Divergence from another policy: of the reference in loss, reward and tokens, and of a teacher; who may be one."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax import text
from grpo_roc_jax.commands.export import export_model
from grpo_roc_jax.config import read_config
from grpo_roc_jax.engine.publish import unstack
from grpo_roc_jax.learner.group_learner import GroupLearner, mixture, rows_shown_more
from grpo_roc_jax.learner.loss import batch_loss
from grpo_roc_jax.method.advantage import later_sums
from grpo_roc_jax.method.compose import Scores, needs_reference, reference_sync, train_rows
from grpo_roc_jax.method.distillation import SelfTeacher
from grpo_roc_jax.method.divergence import kl_estimate
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh
from grpo_roc_jax.model.transformer import init_params
from grpo_roc_jax.run.components import resolve_model
from grpo_roc_jax.run.learning import check_vocabulary, find_teacher, load_teacher
from grpo_roc_jax.run.policy import PolicyModel
from grpo_roc_jax.settings.cli import ConfigError
from grpo_roc_jax.text.config import TextConfig
from grpo_roc_jax.text.tokenizer import OWN_SPECIALS, ByteTokenizer, load_tokenizer
from grpo_roc_jax.train import main
from grpo_roc_jax.types import Problem
from tests.helpers.loss_batch import loss_batch
from tests.helpers.method_groups import make_group, method, other, saying, trajectories

GAPS = [[0.5, -1.0], [0.2, 0.0, 0.4]]
"""log p - log p_ref of the policy tokens; the first two are the specification's."""
PLAIN = {"baseline": "none", "scale": "none"}


def group(rewards=(1, 0)):
    return make_group(rewards, lengths=[2, 3], observation=[1, 0], logprobs=[[-1.0, -2.0], [-0.4, -1.0, -0.8]])


def passes(some, gaps=GAPS):
    """Log-probabilities of another policy with these gaps, and noise off the mask."""
    out = [np.full(t.length, 7.0, np.float32) for t in some.trajectories]
    for now, t, values in zip(out, some.trajectories, gaps, strict=True):
        now[t.policy_mask] = t.logprobs[t.policy_mask] - np.float32(values)
    return out


def advantages(some=None, scores=None, **sections):
    some = some or group()
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
    assert kl_estimate("k3", np.array([-3.0]))[0] == 10.0  # 16.085537 unclamped
    with pytest.raises(ValueError, match="k4"):
        kl_estimate("k4", u)
    values = np.random.default_rng(0).normal(size=37)
    for discount in (0.0, 0.3, 0.95, 1.0):
        expected = [sum(discount ** (i - t) * values[i] for i in range(t, 37)) for t in range(37)]
        np.testing.assert_allclose(later_sums(values, discount), expected, atol=1e-12)
    assert later_sums(np.zeros(0), 1.0).shape == (0,)


def test_divergences_that_are_paid_for():
    """R_i - beta sum_t KL_t, then leave-one-out: RLOO with KL in the reward."""
    for estimator, costs in (("k1", [-0.5, 0.6]), ("k2", [0.625, 0.1]), ("k3", [0.824813, 0.089051])):
        shaping, rloo = (
            [{"kind": "kl", "coef": 0.1, "estimator": estimator}],
            {"baseline": "leave_one_out", "scale": "none"},
        )
        values = advantages(shaping=shaping, advantage=rloo)
        gap = 1 - 0.1 * costs[0] + 0.1 * costs[1]
        np.testing.assert_allclose(np.concatenate(values), [gap] * 2 + [-gap] * 3, atol=1e-6)
    for discount, costs in ((1.0, [[-0.5, -1.0], [0.6, 0.4, 0.4]]), (0.0, GAPS), (0.5, [[0.0, -1.0], [0.3, 0.2, 0.4]])):
        step = {"kind": "kl", "coef": 0.1, "discount": discount}
        values = advantages(advantage=PLAIN | {"adjust": [step]})
        for reward, row, cost in zip((1, 0), values, costs, strict=True):
            np.testing.assert_allclose(row, reward - 0.1 * np.array(cost), atol=1e-6)
    # With `old_logprobs` scored, the pass under the current policy replaces the record.
    some = group()
    scores = Scores([t.logprobs - np.float32(1) for t in some.trajectories], reference=passes(some))
    sections = {"surrogate": {"old_logprobs": "scored"}, "advantage": PLAIN | {"adjust": [{"kind": "kl", "coef": 1}]}}
    np.testing.assert_allclose(advantages(some, scores, **sections)[0], [1 + 2.5, 1 + 2.0], atol=1e-5)


def test_whitening_follows_the_tokens():
    """REINFORCE++: the returns of tokens are standardized over all tokens of the batch, or a row counts as one."""
    returns = np.array([1.05, 1.1, -0.06, -0.04, -0.04])
    for over, weights, lost in (("token", np.ones(5), 1), ("row", np.array([1 / 2] * 2 + [1 / 3] * 3), 1)):
        whiten = {"kind": "whiten", "over": over}
        values = np.concatenate(advantages(advantage=PLAIN | {"adjust": [{"kind": "kl", "coef": 0.1}, whiten]}))
        mean, total = weights @ returns / weights.sum(), weights.sum() - lost
        expected = (returns - mean) / np.sqrt(weights @ (returns - mean) ** 2 / total)
        np.testing.assert_allclose(values, expected, atol=1e-5)
        plain, costless = (
            np.concatenate(advantages(advantage=PLAIN | {"adjust": [*steps, whiten]}))
            for steps in ([], [{"kind": "kl", "coef": 0.0}])
        )
        np.testing.assert_allclose(costless, plain, rtol=1e-6)
    assert not needs_reference(method(advantage={"adjust": [{"kind": "kl", "coef": 0.0}]}))


def corrected_loss(now):
    """Of two tokens, with `now` as the log-probabilities under the policy; the first token of the row is masked out."""
    surrogate = method(surrogate={"level": "sequence", "kl": {"kind": "corrected", "coef": 2.0}}).surrogate
    old, ref = np.float32([[np.nan, -1.2, -1.0]]), np.float32([[np.nan, -1.5, -1.0]])
    segments = np.zeros((1, 3), np.int32)
    batch = loss_batch(np.array([[False, True, True]]), logprobs_old=old, logprobs_ref=ref, ratio_segments=segments)
    return batch_loss(now, jnp.zeros((1, 3)), batch, surrogate)


def test_corrected_term_of_the_loss():
    """r k3 = 0.130117 with gradient r (l - l_ref) = 0.610701, by the token's own ratio also where the surrogate shares
    one; clamped terms have no gradient and are counted."""
    grad = jax.jit(jax.value_and_grad(corrected_loss, has_aux=True))
    (value, sums), slope = grad(jnp.array([[np.nan, -1.0, -1.0]], jnp.float32))
    assert float(value) == pytest.approx(2 * 0.130117, abs=1e-5)
    np.testing.assert_allclose(slope, [[0, 2 * 0.610701, 0]], atol=1e-5)
    assert float(sums["kl_clamped"]) == 0
    (value, sums), slope = grad(jnp.array([[np.nan, 2.0, -60.0]], jnp.float32))  # r k3 = 61; r = e^-20, k3 = e^20
    assert float(value) == pytest.approx(2 * 10.0 + 2 * np.exp(-20.0) * (np.exp(20.0) - 21), rel=1e-4)
    assert float(sums["kl_clamped"]) == 1 and not np.asarray(slope).any()
    # Expectation over the policy that sampled: d KL(p || ref) / d theta, which detaching the ratio would miss.
    old, ref = jnp.array([0.5, 0.3, 0.2]), jnp.log(jnp.array([0.2, 0.5, 0.3]))

    def exact(theta):
        return jnp.sum(jax.nn.softmax(theta) * (jax.nn.log_softmax(theta) - ref))

    def estimated(theta):
        now = jax.nn.log_softmax(theta)
        return jnp.sum(old * kl_estimate("corrected", now - ref, now - jnp.log(old), xp=jnp))

    theta = jnp.array([0.3, -0.2, 0.1])
    (value, slope), (divergence, exact_slope) = (jax.jit(jax.value_and_grad(f))(theta) for f in (estimated, exact))
    assert float(value) == pytest.approx(float(divergence), abs=1e-6)
    np.testing.assert_allclose(slope, exact_slope, atol=1e-6)


def test_reference_moves_toward_the_policy_every_so_many_steps():
    """From 1 toward 2 with alpha 0.6 gives 1.6 (TRL); alpha 1 copies the policy to the bit, 0 leaves the reference."""
    trees = {"w": np.float32([2.0, -0.3])}, {"w": np.float32([1.0, 0.1])}
    for alpha, tree in ((1.0, trees[0]), (0.0, trees[1])):
        np.testing.assert_array_equal(mixture(*trees, np.float32(alpha))["w"], tree["w"])
    learner = GroupLearner(read_config("--surrogate.kl={kind: k3, sync_every: 5, sync_mix: 0.6}"), None, None)
    for step, expected in [(1, trees[1]["w"]), (4, trees[1]["w"]), (5, [1.6, -0.14]), (10, [1.6, -0.14])]:
        run = SimpleNamespace(train=SimpleNamespace(params=trees[0]), reference=trees[1], step=step)
        np.testing.assert_allclose(learner.next_reference(run)["w"], expected, rtol=1e-6)
    moving = {"kind": "k3", "sync_every": 5}
    assert reference_sync(method()) == (0, 1.0)
    assert reference_sync(method(surrogate={"kl": moving | {"sync_mix": 0.6}})) == (5, 0.6)
    assert reference_sync(method(surrogate={"kl": moving}, shaping=[{"kind": "kl", "sync_every": 5}])) == (5, 1.0)
    for words, message in [
        (["--surrogate.kl={kind: k3, sync_every: 5}", "--shaping=kl"], "there is one reference"),
        (["--surrogate.kl={kind: k3, sync_every: 5, sync_mix: 0.5}", "--lora=low_rank"], "set sync_mix 1"),
        (["--advantage.adjust=kl,sign_weights"], r"sign_weights acts on whole .* but kl before it"),
    ]:
        with pytest.raises(ConfigError, match=message):
            read_config(*words)


# ---- a teacher -----------------------------------------------------------------------------------------------------

TEACHER = {"kind": "teacher", "path": "x"}
OLD, NOW = np.float32([-1, -0.5, -2]), np.float32([-0.8, -1.5, -2])


def test_a_teacher_adds_to_the_advantage_of_the_reward():
    """The specification's vector: A_t = log p_teacher - log p, discounted sums; nothing was shown for the other row."""
    for settings, estimator, expected in (
        ({}, "none", [[0.2, -1, 0], [0] * 3]),
        ({"discount": 0.5}, "none", [[-0.3, -1, 0], [0] * 3]),
        ({"coef": 2.0}, "none", [[0.4, -2, 0], [0] * 3]),
        ({"coef": 0.0}, "none", np.zeros((2, 3))),
        ({}, {"scale": "none"}, [[0.7, -0.5, 0.5], [-0.5] * 3]),
    ):
        some = make_group([1, 0], lengths=[3, 3], observation=[2, 0], logprobs=[OLD, OLD])
        teacher = [passes(some, [OLD - NOW] * 2)[0], None]
        base = {"kind": "none"} if estimator == "none" else estimator
        values = advantages(some, Scores(teacher=teacher), advantage=base | {"adjust": [TEACHER | settings]})
        np.testing.assert_allclose(values, expected, atol=1e-6)
    sections = {"advantage": {"kind": "none", "adjust": [TEACHER]}}
    with pytest.raises(ValueError, match=r"advantage.adjust teacher needs .* pass Scores\(teacher=...\)"):
        advantages(scores=Scores(), **sections)
    with pytest.raises(ValueError, match=r"scores\.teacher has 1 arrays for 2 trajectories"):
        advantages(scores=Scores(teacher=[None]), **sections)
    with pytest.raises(ConfigError, match="a method has one teacher"):
        read_config("--advantage.adjust=teacher,self_teacher")
    moving = {"kind": "self_teacher", "weights": "reference"}
    assert needs_reference(method(advantage={"adjust": [moving]}))
    assert not needs_reference(method(advantage={"adjust": ["self_teacher"]}))
    problem = Problem("p", "?", "1", "test", {"solution": "think", "null": None})
    group = saying(make_group([0, 1, 1], problem=problem), "way 0", "way 1", "way 2")
    assert shown(group, 0) == "\nSolution: 1"
    assert shown(group, 0, column="solution", intro="See: ") == "\nSee: think"
    assert shown(group, 0, column="nothing") == shown(group, 0, column="null") == ""
    assert [shown(group, i, shows="success") for i in range(3)] == [f"\nSolution: way {i}" for i in (1, 2, 1)]
    single = make_group([1, 0, 0])
    assert [bool(shown(single, i, shows="success")) for i in range(3)] == [False, True, True]


def shown(group, index, **settings):
    step = method(advantage={"adjust": [{"kind": "self_teacher", **settings}]}).advantage.adjust[0]
    return step.suffix(group, index)


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
        config = read_config(
            f"--advantage.adjust=[{{kind: self_teacher, {step}}}]", f"--rollout.max_prompt_tokens={limit}"
        )
        learner = Reading(config, seen, lambda problem, suffix: [99, *map(ord, suffix)])
        return learner.with_teacher(Scores(), groups, run).teacher

    for t, values in zip(rows, teacher("intro: ab"), strict=True):
        np.testing.assert_array_equal(values, np.where(np.arange(t.length) < t.prompt_length, 0, 2 * t.tokens))
    assert seen == [[99, 10, *b"ab1", *t.tokens[t.prompt_length :]] for t in rows]
    moving = teacher("weights: reference, shows: success, intro: ''", 64)
    assert [values is None for values in moving] == [True, False, True] and moving[1][-1] == 3 * rows[1].tokens[-1]
    assert teacher("intro: ab", 4) == [None] * 3, "prompts are never cut"
    # A row of several conversations keeps the lengths of the others; one that becomes too long is left out.
    group = other(make_group([1, 0], lengths=[2, 3]), opening=[" 7 doors.", "!"], parts=[(3, 1), ()])
    for longest, left in ((16, [True, True]), (15, [False, True]), (8, [False, False])):
        shown = rows_shown_more(
            SelfTeacher(intro="ab"), [group], lambda problem, end: [*map(ord, problem.prompt + end)], 14, longest
        )
        assert [row is not None for row in shown] == left
        for row, prompt in zip(shown, ("? 7 doors.\nab1", "?!\nab1"), strict=True):
            assert row is None or "".join(map(chr, row.tokens[: row.prompt_length])) == prompt
        assert shown[0] is None or (shown[0].parts, shown[0].length) == ((15, 1), 16)


def words(path):
    return [f"--advantage.adjust=[{{kind: teacher, path: {path!s}}}]", "--model.d_model=16", "--model.layers=1"]


def test_a_published_model_of_another_size_is_loaded(tmp_path, capsys):
    """As it scores, layers apart. A teacher must share the vocabulary, and be made for texts of the length."""
    folder, tokenizer = tmp_path / "model", load_tokenizer(TextConfig())
    shape = ModelConfig(d_model=24, layers=2, heads=2, kv_heads=1, head_dim=12, d_ff=32, max_positions=256)
    model = resolve_model(replace(shape, qk_norm=True), tokenizer)
    params = jax.jit(partial(init_params, config=model))(jax.random.key(7))
    export_model(params, model, folder, dtype="float32")
    shutil.copy(Path(text.__file__).parent / "toy.model", folder / "tokenizer.model")
    config = read_config(*words(folder))
    assert find_teacher(config, tokenizer)[1].d_model == 24
    mesh = make_mesh(ShardingConfig(data=1), jax.devices()[:1])
    teacher = load_teacher(config, PolicyModel(resolve_model(config.model, tokenizer), mesh), tokenizer)
    expected = jax.jit(partial(unstack, config=model))(params)
    jax.tree.map(np.testing.assert_array_equal, teacher.params, expected)

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("text: {tokenizer: bytes}\n")
    for refused, message in [
        (words(tmp_path / "nothing"), "cannot be the teacher: .* no such directory"),
        (words(tmp_path / "run"), "cannot be the teacher: .* share the vocabulary"),
        ([*words(folder), "--rollout.max_response_tokens=300", "--batch.row_length=400"], "for texts of 256 tokens"),
        (["--advantage.adjust=teacher"], "path = ''; must be a run"),
    ]:
        with pytest.raises(ConfigError, match=message):
            find_teacher(read_config(*refused), tokenizer)
    assert main([*words(tmp_path / "run"), "--dry-run"]) == 2
    assert "share the vocabulary" in capsys.readouterr().err
    assert find_teacher(read_config("--advantage.adjust=self_teacher"), tokenizer) is None
    for same in (OWN_SPECIALS, (*OWN_SPECIALS, "<more>")):
        check_vocabulary(ByteTokenizer(), ByteTokenizer(same))
    with pytest.raises(ValueError, match=r"it has 2\d\d ids, .* share the vocabulary"):
        check_vocabulary(ByteTokenizer(), ByteTokenizer(OWN_SPECIALS[:-1]))
    with pytest.raises(ValueError, match=r"id 256 is '<\|im_end\|>' there and '<.pad.>' in this run"):
        check_vocabulary(ByteTokenizer(), ByteTokenizer((OWN_SPECIALS[1], OWN_SPECIALS[0], *OWN_SPECIALS[2:])))
