"""The script for a new device runs whole on a CPU, and a part that fails is named and stops no other."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import on_device

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_all_parts_run_on_a_cpu(tmp_path):
    out = tmp_path / "cpu"
    command = [sys.executable, "-m", "benchmarks.on_device", "--tiny", "--out", str(out)]
    environ = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report, page = json.loads((tmp_path / "cpu.json").read_text()), (tmp_path / "cpu.md").read_text()
    assert list(report["parts"]) == ["train", "doctor", "kernels", "plan", "beside"]
    assert all(f"## {name} (" in page for name in report["parts"]) and "failed" not in page
    assert [row["step"] for row in report["parts"]["train"]["result"]] == [1, 2]
    means = report["parts"]["beside"]["result"]["means"]
    assert means["time/update_s"] > 0 and means["rollout/tokens_per_s"] > 0
    assert report["device"]["platform"] == "cpu" and report["versions"]["jax"]


def test_kernels_equal_the_reference():
    report = on_device.kernels(tiny=True)
    assert report["paths"] and all(path["equal"] for path in report["paths"].values())


def test_a_part_that_fails_is_named_and_stops_no_other(tmp_path, monkeypatch, capsys):
    def broken(*given):
        raise RuntimeError("no such device")

    monkeypatch.setattr(on_device, "trained", broken)
    monkeypatch.setattr(on_device, "kernels", lambda tiny: {"dtype": "float32", "length": 1, "paths": {}})
    assert on_device.main(["--tiny", "--out", str(tmp_path / "it")]) == 1
    assert "failed: train, beside" in capsys.readouterr().out
    report = json.loads((tmp_path / "it.json").read_text())
    assert "no such device" in report["parts"]["train"]["error"] and "result" in report["parts"]["doctor"]
    assert "no such device" in (tmp_path / "it.md").read_text()
