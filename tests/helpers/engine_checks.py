"""What trajectories are compared with: the forward pass of training, and other trajectories. Pallas on a CPU."""

from functools import partial
from unittest import mock

import jax
import numpy as np
import pytest
from jax._src import literals
from jax.experimental import pallas

from tests.helpers.rollout_fakes import MODEL
from tests.helpers.whole_rows import row_logits

WIDTH = 128  # columns of the rows that the forward pass of training gets


@pytest.fixture
def interpreted():
    """Kernels run in Pallas' interpreter, which asks integers for a shape that they lack in the releases supported."""
    run = partial(pallas.pallas_call, interpret=True)
    with mock.patch.object(pallas, "pallas_call", run), mock.patch.object(literals.TypedInt, "shape", (), create=True):
        yield


def reference_logprobs(params, tokens, temperature=1.0, model=MODEL):
    """float32[T,V] by the training forward pass: row t is about the token after t."""
    padded = np.zeros((1, WIDTH), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(jax.nn.log_softmax(row_logits(params, padded, model) / temperature))[0, : len(tokens)]


def reference_gap(params, trajectories, model=MODEL, temperatures=None):
    """Largest difference of recorded log-probabilities from those of the training forward at these temperatures."""
    largest = 0.0
    for row, temperature in zip(trajectories, temperatures or [1.0] * len(trajectories), strict=True):
        table, at = reference_logprobs(params, row.tokens, temperature, model), np.flatnonzero(row.policy_mask)
        largest = max(largest, np.abs(table[at - 1, row.tokens[at]] - row.logprobs[at]).max(initial=0.0))
    return largest


def assert_same(left, right, atol=None, versions=True):
    """Tokens to the bit; log-probabilities to rounding, since a matrix kernel may treat its last rows differently."""
    tolerance = {"atol": 5e-6, "rtol": 1e-6} if atol is None else {"atol": atol}  # of -23 a float32 keeps 2e-6
    for a, b in zip(left, right, strict=True):
        for name in ("tokens", "policy_mask", "versions") if versions else ("tokens", "policy_mask"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
        np.testing.assert_allclose(a.logprobs, b.logprobs, **tolerance)
        assert (a.stop, a.turns, a.prompt_length) == (b.stop, b.turns, b.prompt_length)


def assert_versions(rows, cuts, before, after):
    """What was drawn up to the end of the cut is of the version `before`, and the rest of the version `after`."""
    for row, cut in zip(rows, cuts, strict=True):
        wanted = np.where(np.arange(row.length) < cut.length, before, after)
        np.testing.assert_array_equal(row.versions[row.policy_mask], wanted[row.policy_mask])
