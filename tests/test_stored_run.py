"""A run whose directory is in a bucket goes on after kills, each time on another machine."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grpo_roc_jax.process.points import VARIABLE
from tests.helpers.bucket import served
from tests.test_train import TINY, numbers, params_hash

ROOT = Path(__file__).resolve().parent.parent
DRIVER = """
import sys
from grpo_roc_jax.record import storage
storage.PAUSE_S = 0.1
from grpo_roc_jax.train import main
sys.exit(main(sys.argv[1:]))
"""


def begin(folder, run_dir, environ, fault=""):
    folder.mkdir(exist_ok=True)
    words = [*TINY, "--eval.every=2", "--resume=auto", "--log.console=plain", f"--run_dir={run_dir}"]
    environment = {**os.environ, **environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), VARIABLE: fault}
    command = [sys.executable, "-c", DRIVER, *words]
    with open(folder / "said.txt", "ab") as log:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)


def ended(process, folder):
    try:
        return process.wait(900)
    except subprocess.TimeoutExpired:
        raise AssertionError((folder / "said.txt").read_text()[-3000:]) from None
    finally:
        process.kill()


@pytest.mark.slow
def test_a_run_in_a_bucket_goes_on_on_other_machines(tmp_path):
    full = tmp_path / "whole"
    assert ended(begin(tmp_path / "w", full, {}), tmp_path / "w") == 0
    address, manifest = "gs://bucket/runs/a", "runs/a/checkpoints/step_00000001/manifest.json"
    with served() as bucket:
        folder = tmp_path / "first"
        process = begin(folder, address, bucket.environ, "update=sleep:2@2+")
        while manifest not in bucket.objects:
            assert process.poll() is None, (folder / "said.txt").read_text()[-3000:]
            time.sleep(0.05)
        process.kill()
        process.wait()
        folder = tmp_path / "second"  # where a copy is cut short
        assert ended(begin(folder, address, bucket.environ, "storage.write=kill@40"), folder) == -signal.SIGKILL
        folder = tmp_path / "third"
        assert ended(begin(folder, address, bucket.environ, "update=term@1"), folder) == 143
        shutil.rmtree(folder / "runs")
        bucket.refuse = 3
        assert ended(begin(folder, address, bucket.environ), folder) == 0
        printed = (folder / "said.txt").read_text()
        assert "resumed after step" in (tmp_path / "second/said.txt").read_text() and "resumed after step" in printed
        here = folder / "runs/bucket/runs/a"
        stored = {name.removeprefix("runs/a/"): content for name, (content, _) in bucket.objects.items()}
    files = {path.relative_to(here).as_posix(): path.read_bytes() for path in here.rglob("*") if path.is_file()}
    del files["lock"], files[".copied"], stored["owner"]
    assert stored == files
    assert numbers(here) == numbers(full) and params_hash(here) == params_hash(full)
    names = [sorted(path.name for path in run.glob("trajectories/*")) for run in (here, full)]
    assert names[0] == names[1]
