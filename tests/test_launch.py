"""The launch recipes parse, start the command that exists, and give no key that a configuration lacks."""

import re
import subprocess
from pathlib import Path

import pytest

from grpo_roc_jax.config import Config
from grpo_roc_jax.settings.layers import known_keys

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "launch"


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_recipes_parse_start_training_that_resumes_and_name_known_files_and_keys(path):
    text = path.read_text()
    if path.suffix in (".sh", ".sbatch"):  # they stop at the first error
        checked = subprocess.run(["bash", "-n", path], capture_output=True, text=True)
        assert checked.returncode == 0 and "set -euo pipefail" in text, checked.stderr
    assert "grpo_roc_jax.train" in text and f"launch/{path.name}" in (FOLDER.parent / "launch.md").read_text()
    assert re.search(r"--resume[ =]auto", text)
    for name in re.findall(r"configs/[\w/]+\.yaml", text):
        assert name == "configs/x.yaml" or (FOLDER.parent.parent / name).is_file(), name
    commands = re.findall(r"grpo_roc_jax\.train(.*)", text)
    used = {key for command in commands for key in re.findall(r"--([a-z_.]+)", command)}
    assert used <= set(known_keys(Config))
