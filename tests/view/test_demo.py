"""The runs that the page is shown with obey the method: selection, penalties and advantages are its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_roc_jax.config import read_config
from tests.helpers.demo import method, write_run
from tests.helpers.selection import check_selection

RECORDED = os.environ.get("GRPO_ROC_RUNS", "")
"""Directory of the runs of which docs/ has pictures; see docs/view.md."""


@pytest.mark.parametrize(("resample", "reasons"), [("roc", {"kept", "penalty", "quota"}), ("none", {"kept"})])
def test_every_record_of_the_tests_obeys_the_selection(tmp_path, resample, reasons):
    run = write_run(tmp_path / "run", steps=4, groups=6, size=16, resample=resample)
    assert check_selection(run, method(resample, 16)) - {"equal_rewards"} == reasons


@pytest.mark.slow
def test_every_record_of_a_real_run_obeys_the_selection(tmp_path):
    words = ["toy.yaml", "--sft.steps=80", "--steps=2", "--data.eval_problems=8", "--log.traces=1", "--run_dir=run"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-m", "grpo_roc_jax", "train", *words], cwd=tmp_path, check=True, env=environment)
    assert "kept" in check_selection(tmp_path / "run", read_config(str(tmp_path / "run/config.yaml")))


@pytest.mark.skipif(not RECORDED, reason="GRPO_ROC_RUNS names no recorded runs")
@pytest.mark.parametrize("name", ["toy", "words"])
def test_every_record_of_the_pictures_obeys_the_selection(name):
    run = Path(RECORDED) / name
    assert "kept" in check_selection(run, read_config(str(run / "config.yaml")))
