"""A judge that hangs keeps no process alive."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.test_train import TINY

ROOT = Path(__file__).resolve().parents[2]
JUDGES = '''
import time
from concurrent.futures import ThreadPoolExecutor

POOL = ThreadPoolExecutor(2)


def waited(problem, trajectories):
    """Waits for a pool whose work never ends, and is given up."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda t: time.sleep(10**6), trajectories))


def given_up(problem, trajectories):
    """Gives its own work up in time; the thread stays."""
    try:
        POOL.submit(time.sleep, 10**6).result(timeout=0.05)
    except TimeoutError:
        return [0.0] * len(trajectories)


def fine(problem, trajectories):
    """A pool that is idle at the end, as Python itself ends it."""
    return list(POOL.map(lambda t: float(t.sample % 2), trajectories))
'''


def ended(words, folder):
    """(status, errors, seconds) of a process that must end by itself."""
    (folder / "judges.py").write_text(JUDGES)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]), "JAX_PLATFORMS": "cpu"}
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    return done.returncode, done.stderr, time.monotonic() - begun


@pytest.mark.parametrize(
    ("judge", "left"),
    [
        pytest.param("waited", True, marks=pytest.mark.slow),
        ("given_up", True),
        pytest.param("fine", False, marks=pytest.mark.slow),
    ],
    ids=["abandoned", "of its own", "idle"],
)
def test_a_command_ends_whatever_a_judge_does(judge, left, tmp_path):
    _, errors, seconds = ended(["grpo_roc_jax", "check-reward", f"judges:{judge}"], tmp_path)
    assert ("left without threads that do not end" in errors) == left
    assert seconds < 60


@pytest.mark.slow
def test_a_run_ends_after_a_judge_that_was_given_up(tmp_path):
    run = tmp_path / "run"
    words = [*TINY, f"--run_dir={run}", "--steps=1", "--data.eval_problems=0", "--sharding.data=1"]
    words += ["--reward.functions=[{kind: function, path: 'judges:waited', timeout_s: 0.2}]"]
    status, errors, _ = ended(["grpo_roc_jax.train", *words], tmp_path)
    assert status == 0 and "left without threads" in errors
    assert (run / "summary.json").is_file() and (run / "checkpoints" / "step_00000001").is_dir()
