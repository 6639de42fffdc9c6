"""Token weights: normalizers, masks, length preference, sampler mismatch."""

from dataclasses import replace

import numpy as np

from grpo_roc_jax.method.weights import ratio_segments
from grpo_roc_jax.types import Turn
from tests.helpers.method_groups import make_trajectory, method


def close(actual, expected, atol=1e-6):
    np.testing.assert_allclose(actual, expected, atol=atol)


def test_bounds_belong_to_what_is_kept():
    (part,) = method(weights={"factors": ["masked_is"]}, surrogate={"old_logprobs": "scored"}).weights.factors
    close(part.weight(np.array([0.49, 0.5, 2.0, 2.01])), [0, 0.5, 2, 0])


def test_ratio_segments():
    trajectory = replace(make_trajectory(7, prompt=2), turns=(Turn(2, 4, "a"), Turn(6, 9, "b")))
    segments = {level: ratio_segments(trajectory, level).tolist() for level in ("token", "sequence", "turn")}
    assert segments["token"] == list(range(9)) and segments["sequence"] == [0] * 9
    assert segments["turn"][2:4] == [0, 0] and segments["turn"][6:] == [1, 1, 1]
