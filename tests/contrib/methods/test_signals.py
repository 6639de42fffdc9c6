"""Signals that need no reference answer."""

from types import SimpleNamespace

import numpy as np

from grpo_roc_jax.contrib.methods.surrogate_signals import SurrogateSignals


def test_length_rises_to_the_half_and_falls_after_it():
    lengths = np.array([0, 250, 500, 750, 1000])
    length_term = [0.0, 0.75, 1.0, 0.5, -1.0]  # 1 - (1 - 2x)^2, then 1 - 2 (2x - 1)^2
    found = SimpleNamespace(lengths=lengths, answers=np.ones(5), channels={"format": np.full(5, 0.5)})
    signal = SurrogateSignals(length=1000)
    np.testing.assert_allclose(signal.group(np.zeros(5), found), 0.5 + np.array(length_term))
    found.answers = np.zeros(5)
    np.testing.assert_allclose(signal.group(np.zeros(5), found), [0, 0, 0, 0, -1.0])
