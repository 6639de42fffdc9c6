"""Score-based objectives: vectors, and every coefficient against finite differences of its objective."""

from types import SimpleNamespace

import numpy as np
import pytest

from grpo_roc_jax.contrib.methods.score_based import live_rows


@pytest.mark.parametrize(("masks", "rows"), [([[0, 1], [0, 0], [1, 1]], 2), ([[0, 0], [1, 0]], 1), ([[0, 0]], 1)])
def test_rows_with_a_token_that_trains(masks, rows):
    assert live_rows(SimpleNamespace(masks=[np.array(mask, bool) for mask in masks])) == rows
