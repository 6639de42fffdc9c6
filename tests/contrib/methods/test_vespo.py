"""VESPO: its loss against the definition, and its bounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.method import test_surrogate as core
from tests.method.test_surrogate import MASK, NOW, OLD, A, made, shared_logratio


def vespo_loss(now):
    surrogate = made("vespo")
    d = shared_logratio(now - jnp.asarray(OLD), A, MASK, jnp.zeros(MASK.shape, jnp.int32), surrogate)
    return surrogate.loss(d, jnp.asarray(A), now)


def test_vespo():
    """W = e^0.2 and e^0.3: factors e^(2 * 0.2 + 3 (1 - W)) = 0.767814 and e^(3 * 0.3 + 2 (1 - W)) = 1.221747."""
    loss = np.asarray(vespo_loss(jnp.asarray(NOW)))
    np.testing.assert_allclose(loss[0], [0.537470, 1.612409, 0.767814], atol=1e-5)
    np.testing.assert_allclose(loss[1, :2], [-1.466096, -0.610874], atol=1e-5)
    gradient = jax.grad(lambda now: jnp.sum(jnp.where(MASK, vespo_loss(now), 0.0)))(jnp.asarray(NOW))
    np.testing.assert_allclose(gradient[0], [-0.767814] * 3, atol=1e-5)  # the factor is held fixed
    np.testing.assert_allclose(gradient[1], [1.221747, 1.221747, 0], atol=1e-5)


def test_vespo_is_reinforce_on_policy_and_bounded_far_from_it():
    gradient = jax.grad(lambda now: jnp.sum(vespo_loss(now)))(jnp.asarray(OLD))
    np.testing.assert_allclose(gradient[:, :2], -A[:, :2], atol=1e-6)
    for shift in (-100.0, 100.0):
        assert np.isfinite(np.asarray(vespo_loss(jnp.asarray(OLD) + shift))).all()
    assert np.abs(np.asarray(vespo_loss(jnp.asarray(OLD) + 100.0))).max() < 1e-6


@pytest.mark.parametrize(
    "holds",
    [
        core.test_on_policy_gradient_is_the_policy_gradient,
        core.test_zero_advantage_is_zero_gradient,
        core.test_a_positive_factor_of_the_advantage_is_one_of_the_loss,
    ],
)
def test_what_holds_for_every_surrogate(holds):
    holds("vespo", "sequence")
