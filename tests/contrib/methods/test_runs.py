"""Recipes of further methods run."""

import numpy as np
import pytest

from grpo_roc_jax.config import Config
from grpo_roc_jax.record.trace import read_trace
from grpo_roc_jax.settings.cli import load_config
from grpo_roc_jax.train import main
from grpo_roc_jax.types import PLAIN
from tests.test_methods_run import tiny


@pytest.mark.slow
def test_a_second_update_scores_anew(tmp_path, shared):
    """REBEL's coefficients at ratio 1 sum to 0 in a group; with the first update's changes in the ratio they move."""
    assert main(tiny("rebel", tmp_path / "run", "--batch.updates=2", "--steps=1", "--optim.lr=0.1")) == 0
    records = [r for r in read_trace(tmp_path / "run", 1) if r.advantages is not None]
    plain = {round(float(r.advantages[r.trajectory.policy_mask][0]), 4) for r in records[: len(records) // 2]}
    moved = {round(float(r.advantages[r.trajectory.policy_mask][0]), 4) for r in records[len(records) // 2 :]}
    assert len(plain) <= 4 < len(moved), "before the policy moves, a group has one value for each reward"


@pytest.mark.slow
def test_cuts_go_on_from_the_first_rollout(tmp_path, shared):
    """S-GRPO: a cut holds the first rollout up to its place, then the stop text; none of that is trained."""
    words = tiny("s_grpo", tmp_path / "run", "--steps=1")
    config = load_config(Config, words, prog="test")
    assert main(words) == 0
    groups: dict[int, list] = {}
    for record in read_trace(tmp_path / "run", 1):
        groups.setdefault(record.group, []).append(record.trajectory)
    seen = 0
    for members in groups.values():
        *cuts, full = members
        assert full.condition == PLAIN
        assert [str(cut.condition) for cut in cuts] == ["cut"] * len(cuts)
        firsts = [int(np.flatnonzero(cut.policy_mask)[0]) for cut in cuts]
        assert firsts == sorted(firsts)
        for cut, first in zip(cuts, firsts, strict=True):
            assert cut.turns[0].start == cut.prompt_length == full.prompt_length
            assert config.plan.second.stop in cut.turns[0].text
            shared = int(np.argmin(np.append(cut.tokens[:first] == np.resize(full.tokens, first), False)))
            assert full.prompt_length < shared < first
            assert cut.length <= full.prompt_length + config.rollout.max_response_tokens
            seen += 1
    assert seen
