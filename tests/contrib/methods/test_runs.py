"""Recipes of further methods run."""

import pytest

from docs.methods_table import load_methods
from tests import test_methods_run as core
from tests.helpers.parts import part_of
from tests.test_methods_run import Size

shared_programs = core.shared_programs  # a fixture
FURTHER = sorted(set(load_methods()) - set(core.METHODS))


def alike(first, second):
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
