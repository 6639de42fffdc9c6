"""Divergence from the reference: in the loss, in the reward per trajectory and per token; whose reference it is."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax.config import read_config
from grpo_roc_jax.learner.group_learner import GroupLearner, mixture
from grpo_roc_jax.learner.loss import batch_loss
from grpo_roc_jax.method.advantage import later_sums
from grpo_roc_jax.method.compose import Scores, needs_reference, reference_sync, train_rows
from grpo_roc_jax.method.divergence import kl_estimate
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.cli import ConfigError
from tests.helpers.loss_batch import loss_batch
from tests.helpers.method_groups import make_group, method

GAPS = [[0.5, -1.0], [0.2, 0.0, 0.4]]
"""log p - log p_ref of the policy tokens; the first two are the specification's."""


def group(rewards=(1, 0)):
    return make_group(rewards, lengths=[2, 3], observation=[1, 0], logprobs=[[-1.0, -2.0], [-0.4, -1.0, -0.8]])


def passes(some):
    """Reference log-probabilities with these gaps, and noise off the mask."""
    out = []
    for trajectory, gaps in zip(some.trajectories, GAPS, strict=True):
        now = np.full(trajectory.length, 7.0, np.float32)
        now[trajectory.policy_mask] = trajectory.logprobs[trajectory.policy_mask] - np.float32(gaps)
        out.append(now)
    return Scores(reference=out)


def advantages(some=None, **sections):
    some = some or group()
    rows = train_rows([some], method(2, **sections), AlgoState(), scores=passes(some))
    return [row.advantages[row.policy_mask] for row in rows]


PLAIN = {"baseline": "none", "scale": "none"}


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


@pytest.mark.parametrize(
    ("estimator", "costs"), [("k1", [-0.5, 0.6]), ("k2", [0.625, 0.1]), ("k3", [0.824813, 0.089051])]
)
def test_reward_less_the_divergence_of_the_trajectory(estimator, costs):
    """R_i - beta sum_t KL_t, then leave-one-out: RLOO with KL in the reward."""
    values = advantages(
        shaping=[{"kind": "kl", "coef": 0.1, "estimator": estimator}],
        advantage={"baseline": "leave_one_out", "scale": "none"},
    )
    first, second = 1 - 0.1 * costs[0], -0.1 * costs[1]
    np.testing.assert_allclose(values[0], [first - second] * 2, atol=1e-6)
    np.testing.assert_allclose(values[1], [second - first] * 3, atol=1e-6)


@pytest.mark.parametrize(
    ("discount", "costs"),
    [(1.0, [[-0.5, -1.0], [0.6, 0.4, 0.4]]), (0.0, GAPS), (0.5, [[0.0, -1.0], [0.3, 0.2, 0.4]])],
)
def test_every_token_pays_for_what_follows(discount, costs):
    step = {"kind": "kl", "coef": 0.1, "discount": discount}
    values = advantages(advantage=PLAIN | {"adjust": [step]})
    for reward, row, cost in zip((1, 0), values, costs, strict=True):
        np.testing.assert_allclose(row, reward - 0.1 * np.array(cost), atol=1e-6)


def test_later_sums_against_a_loop():
    values = np.random.default_rng(0).normal(size=37)
    for discount in (0.0, 0.3, 0.95, 1.0):
        expected = [sum(discount ** (i - t) * values[i] for i in range(t, 37)) for t in range(37)]
        np.testing.assert_allclose(later_sums(values, discount), expected, atol=1e-12)
    assert later_sums(np.zeros(0), 1.0).shape == (0,)


def test_whitening_follows_the_tokens():
    """REINFORCE++: the returns of tokens are standardized over all tokens of the batch."""
    values = np.concatenate(advantages(advantage=PLAIN | {"adjust": [{"kind": "kl", "coef": 0.1}, "whiten"]}))
    returns = np.array([1.05, 1.1, -0.06, -0.04, -0.04])
    np.testing.assert_allclose(values, (returns - returns.mean()) / returns.std(ddof=1), atol=1e-5)
    rows = np.concatenate(
        advantages(advantage=PLAIN | {"adjust": [{"kind": "kl", "coef": 0.1}, {"kind": "whiten", "over": "row"}]})
    )
    weights = np.array([1 / 2] * 2 + [1 / 3] * 3)
    mean = weights @ returns / 2
    np.testing.assert_allclose(rows, (returns - mean) / np.sqrt(weights @ (returns - mean) ** 2), atol=1e-5)


def test_a_divergence_that_costs_nothing_changes_nothing():
    for over in ("token", "row"):
        whiten = {"kind": "whiten", "over": over}
        plain = advantages(advantage=PLAIN | {"adjust": [whiten]})
        costless = [{"kind": "kl", "coef": 0.0}, whiten]
        for before, after in zip(plain, advantages(advantage=PLAIN | {"adjust": costless}), strict=True):
            np.testing.assert_allclose(after, before, rtol=1e-6)
    assert not needs_reference(method(advantage={"adjust": [{"kind": "kl", "coef": 0.0}]}))


def check_order(first):
    with pytest.raises(ConfigError, match=rf"sign_weights acts on whole .* but {first} before it"):
        method(advantage={"adjust": [first, "sign_weights"]})


def test_a_step_of_trajectories_cannot_follow_one_of_tokens():
    check_order("kl")
    assert method(advantage={"adjust": ["sign_weights", "kl"]}).advantage.adjust


def test_the_divergence_is_that_of_the_policy_in_the_ratio():
    """With `old_logprobs` scored, the pass under the current policy replaces the record."""
    some = group()
    scores = passes(some)
    now = [t.logprobs - np.float32(1) for t in some.trajectories]
    config = method(2, surrogate={"old_logprobs": "scored"}, advantage=PLAIN | {"adjust": [{"kind": "kl", "coef": 1}]})
    rows = train_rows([some], config, AlgoState(), scores=Scores(now, reference=scores.reference))
    np.testing.assert_allclose(rows[0].advantages[rows[0].policy_mask], [1 + 2.5, 1 + 2.0], atol=1e-5)


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


def test_corrected_gradient_is_that_of_the_divergence():
    """Expectation over the policy that sampled: d KL(p || ref) / d theta, which detaching the ratio would miss."""
    old, ref = jnp.array([0.5, 0.3, 0.2]), jnp.log(jnp.array([0.2, 0.5, 0.3]))

    def exact(theta):
        p = jax.nn.softmax(theta)
        return jnp.sum(p * (jnp.log(p) - ref))

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
    config = read_config("--surrogate.kl={kind: k3, sync_every: 5, sync_mix: 0.6}")
    learner = GroupLearner(config, None, None)
    for step, expected in [(1, trees[1]["w"]), (4, trees[1]["w"]), (5, [1.6, -0.14]), (10, [1.6, -0.14])]:
        run = SimpleNamespace(train=SimpleNamespace(params=trees[0]), reference=trees[1], step=step)
        np.testing.assert_allclose(learner.next_reference(run)["w"], expected, rtol=1e-6)


def test_one_reference_for_all_parts():
    moving = {"kind": "k3", "sync_every": 5}
    assert reference_sync(method()) == (0, 1.0)
    assert reference_sync(method(surrogate={"kl": moving | {"sync_mix": 0.6}})) == (5, 0.6)
    assert reference_sync(method(surrogate={"kl": moving}, shaping=[{"kind": "kl", "sync_every": 5}])) == (5, 1.0)
    for words, message in [
        (["--surrogate.kl={kind: k3, sync_every: 5}", "--shaping=kl"], "there is one reference"),
        (["--surrogate.kl={kind: k3, sync_every: 5, sync_mix: 0.5}", "--lora=low_rank"], "set sync_mix 1"),
    ]:
        with pytest.raises(ConfigError, match=message):
            read_config(*words)
