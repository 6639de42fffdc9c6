"""Recipes of further methods run."""

import numpy as np
import pytest

from docs.methods_table import load_methods
from grpo_roc_jax.config import Config
from grpo_roc_jax.record.trace import read_trace
from grpo_roc_jax.settings.cli import load_config
from grpo_roc_jax.train import main
from grpo_roc_jax.types import PLAIN
from tests import test_methods_run as core
from tests.helpers.parts import part_of
from tests.run import test_own_loop as own_loop
from tests.test_methods_run import Size, tiny

parts, shared_programs = own_loop.parts, core.shared_programs
"""Fixtures."""
FURTHER = sorted(set(load_methods()) - set(core.METHODS))


def alike(first, second):
    """Whether two texts begin with the same character."""
    return float(first[:1] == second[:1])


WORDINGS = ("", "paraphrase:1", "paraphrase:2")
SIZES = {
    "arise": Size(conditions=("skill:1",)),
    "consistency_grpo": Size(conditions=WORDINGS),
    "expo": Size(160, helped=True, conditions=("", "explanation"), trains=False),
    "grao": Size(response=64, conditions=("", "demonstration")),
    "guide_grpo": Size(helped=True, conditions=("", "hint:1")),
    "hill": Size(160, helped=True, conditions=("", "hint_writer:1", "hint:1")),
    "igrpo": Size(160, conditions=("", "draft")),
    "masa": Size(160, words=("--plan.second.count=4",), conditions=("", "prediction")),
    "mc_grpo": Size(group=5),
    "ps_grpo": Size(words=(f"--shaping.agreement.similarity={__name__}:alike",), conditions=WORDINGS),
    "rc_roc": Size(words=("--plan.condition.separation=0",), conditions=("high_reward", "low_reward")),
    "rgr_grpo": Size(160, conditions=("", "refinement")),
    "s_grpo": Size(response=64, group=9, conditions=("", "cut")),
    "sage": Size(160, helped=True, conditions=("", "hint_writer", "hint:1")),
    "sage_light": Size(helped=True, conditions=("", "hint:1")),
    "scaf_grpo": Size(helped=True, conditions=("", "hint:1")),
    "spo": Size(group=1),
    "surrogate_signals": Size(response=64, words=("--shaping.surrogate.length=24",)),
    "tempsamp_r1": Size(response=64, conditions=("", "demonstration")),
    "think_tuning": Size(response=64, conditions=("", "feedback")),
    "train_long": Size(conditions=("budget",)),
    "xrpo": Size(160, helped=True, words=("--plan.budget.pilot=2",), conditions=("", "examples")),
}
"""Methods that need more than the least."""
assert set(SIZES) <= set(FURTHER)


@pytest.mark.parametrize("name", FURTHER)
def test_dry_run(name, capsys, tmp_path, monkeypatch):
    core.test_dry_run(name, capsys, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", part_of(FURTHER))
def test_three_steps_and_an_exact_resume(name, tmp_path):
    core.check_three_steps(name, SIZES.get(name, Size()), tmp_path)


@pytest.mark.slow
def test_a_second_update_scores_anew(tmp_path):
    """REBEL's coefficients at ratio 1 sum to 0 in a group; with the first update's changes in the ratio they move."""
    assert main(tiny("rebel", tmp_path / "run", "--batch.updates=2", "--steps=1", "--optim.lr=0.1")) == 0
    records = [r for r in read_trace(tmp_path / "run", 1) if r.advantages is not None]
    values = [round(float(r.advantages[r.trajectory.policy_mask][0]), 4) for r in records]
    plain, moved = set(values[: len(values) // 2]), set(values[len(values) // 2 :])
    assert len(plain) <= 4 < len(moved), "before the policy moves, a group has one value for each reward"


@pytest.mark.slow
def test_cuts_go_on_from_the_first_rollout(tmp_path):
    """S-GRPO: a cut holds the first rollout up to its place, then the stop text; none of that is trained."""
    words = tiny("s_grpo", tmp_path / "run", "--steps=1", size=SIZES["s_grpo"])
    config = load_config(Config, words, prog="test")
    assert main(words) == 0
    records = list(read_trace(tmp_path / "run", 1))
    groups = [[r.trajectory for r in records if r.group == group] for group in {r.group for r in records}]
    assert any(len(members) > 1 for members in groups)
    for *cuts, full in groups:
        assert full.condition == PLAIN and all(str(cut.condition) == "cut" for cut in cuts)
        firsts = [int(np.flatnonzero(cut.policy_mask)[0]) for cut in cuts]
        assert firsts == sorted(firsts)
        for cut, first in zip(cuts, firsts, strict=True):
            assert cut.turns[0].start == cut.prompt_length == full.prompt_length
            assert config.plan.second.stop in cut.turns[0].text
            shared = int(np.argmin(np.append(cut.tokens[:first] == np.resize(full.tokens, first), False)))
            assert full.prompt_length < shared < first
            assert cut.length <= full.prompt_length + config.rollout.max_response_tokens


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize(
    "parts",
    [
        ["--weights.masks=[top_entropy]", "--surrogate.old_logprobs=scored", "--weights.factors=[truncated_is]"],
        ["--advantage=disco", "--surrogate=logp", "--weights.normalizer=sequence_mean"],
    ],
    ids=["passes", "disco"],
    indirect=True,
)
def test_a_step_without_groups_has_no_rows(parts):
    own_loop.test_a_step_without_groups_has_no_rows(parts)
