"""Token weights: normalizers, masks, length preference, sampler mismatch."""

import numpy as np

from grpo_roc_jax.method.weights import ratio_segments
from grpo_roc_jax.types import Trajectory, Turn
from tests.helpers.method_groups import method


def close(actual, expected, atol=1e-6):
    np.testing.assert_allclose(actual, expected, atol=atol)


RECORDED = np.array([0.0, -1.0, -1.0, -1.0])
MASK = np.array([False, True, True, True])


def test_bounds_belong_to_what_is_kept():
    (part,) = method(weights={"factors": ["masked_is"]}, surrogate={"old_logprobs": "scored"}).weights.factors
    close(part.weight(np.array([0.49, 0.5, 2.0, 2.01])), [0, 0.5, 2, 0])


def test_ratio_segments():
    turns = (Turn(2, 4, "a"), Turn(6, 9, "b"))
    trajectory = Trajectory(
        np.zeros(9, np.int32), np.ones(9, bool), np.zeros(9, np.float32), np.zeros(9, np.int32), 2, turns, "eos", 0
    )
    assert ratio_segments(trajectory, "token").tolist() == list(range(9))
    assert ratio_segments(trajectory, "sequence").tolist() == [0] * 9
    assert ratio_segments(trajectory, "turn")[2:4].tolist() == [0, 0]
    assert ratio_segments(trajectory, "turn")[6:].tolist() == [1, 1, 1]
