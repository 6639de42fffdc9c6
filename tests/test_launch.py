"""The launch recipes parse, start the command that exists, and give no key that a configuration lacks."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from grpo_roc_jax.config import Config
from grpo_roc_jax.planner.topology import FRACTION, MOST_OF_A_GPU
from grpo_roc_jax.settings.layers import known_keys

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "launch"
SCRIPTS = [path for path in sorted(FOLDER.iterdir()) if path.suffix in (".sh", ".sbatch")]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse_and_stop_at_the_first_error(path):
    checked = subprocess.run(["bash", "-n", path], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert "set -euo pipefail" in path.read_text()


def test_manifest_is_a_jobset_with_the_command():
    manifest = yaml.safe_load((FOLDER / "gke_jobset.yaml").read_text())
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (manifest["kind"], job["parallelism"]) == ("JobSet", job["completions"])
    assert job["template"]["spec"]["containers"][0]["command"][:3] == ["python", "-m", "grpo_roc_jax.train"]


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_recipes_start_training_that_resumes_and_name_known_files_and_keys(path):
    text = path.read_text()
    assert "grpo_roc_jax.train" in text and f"launch/{path.name}" in (FOLDER.parent / "launch.md").read_text()
    assert re.search(r"--resume[ =]auto", text)
    for name in re.findall(r"configs/[\w/]+\.yaml", text):
        assert name == "configs/x.yaml" or (FOLDER.parent.parent / name).is_file(), name
    commands = re.findall(r"grpo_roc_jax\.train(.*)", text)
    used = {key for command in commands for key in re.findall(r"--([a-z_.]+)", command)}
    assert used <= set(known_keys(Config))


@pytest.mark.parametrize("name", ["slurm.sbatch", "ssh.sh"])
def test_every_setting_for_gpus_has_its_reason(name):
    text, table = (FOLDER / name).read_text(), (FOLDER.parent / "launch.md").read_text()
    reasons = re.findall(r"^\| `(\w+)=(\S+)` \| .{20,} \|$", table, re.M)
    assert len(reasons) == 5 and (FRACTION, str(MOST_OF_A_GPU)) in reasons
    for variable, value in reasons:
        assert re.search(rf"\b{variable}=\S*{re.escape(value)}", text.replace('"', "")), variable
