"""The commands of the pages run, with their placeholders filled by a small run, its model and files.

`test_readme.py` parses every command; here those that need neither a hub, a pod nor an accelerator end with status 0.
Sessions (blocks marked `console`) run in `test_pages_run.py`. Both are run by `pytest -m slow`, not by CI.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.parts import part_of
from tests.test_readme import LINES, TINY

ROOT = Path(__file__).resolve().parent.parent
REWARDS = """
def score(problem, trajectories):
    return [float(problem.answer in t.turns[-1].text) if t.turns else 0.0 for t in trajectories]

short_and_right = asked = from_trl = few_turns = score
"""
PLACEHOLDERS = {
    "RUN": "runs/a",
    "OTHER": "runs/b",
    "TARGET": "written",
    "MODEL": "model",
    "DIR": "a_project",
    "FILE": "problems.jsonl",
    "DATA": "problems.jsonl",
    "FUNCTION": "answer",
    "NAME": "grpo",
    "SECTION": "optim",
    "CONFIG.yaml": "mine.yaml",
}
"""What a page leaves to its reader -> a value that exists in the folder of the test."""
ELSEWHERE = re.compile(
    r"qwen|llama|rstar|smollm|package:|aime|gsm8k|words|world\b|world\.yaml|environments/|cold|cobalt|ranks|states|hub:|"
    r"\.npz|--preflight|--topology|--tinker|\bserve|serve-tools|replay|cut-traces|learning_rate|--watch|COMMAND|\$|"
    r"gsm8k_traces|catalog|shows them|roc=|data/trl|runs/two|runs/my-model|"
    r"runs/(roc|grpo)/|runs/mine|runs/guess|\.\.\.|rc_grpo|^grpo-roc (check-data|train|view|replay)$"
)
"""Commands that need what a test has not: a model of a hub, an accelerator, a server's end, others' files."""
RUNNABLE = sorted(
    {
        line
        for _, line in LINES
        if not ELSEWHERE.search(line) and len(shlex.split(line)) > 1 and line != "grpo-roc train"
    }
)


def run(words: list[str], folder: Path) -> None:
    """A command in a process of its own; it must end with status 0."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", "grpo_roc_jax", *words],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small run under several names, an exported model, problems, rewards and configurations as pages name them."""
    root = tmp_path_factory.mktemp("reader")
    run(["train", "toy.yaml", *TINY, "--log.traces=1", "--run_dir=runs/a"], root)
    for name in ("runs/b", "runs/first", "runs/plain", "runs/toy", "run"):
        shutil.copytree(root / "runs/a", root / name)
    run(["export", "runs/a", "model"], root)
    rows = [{"prompt": f"gcd({n},6)=?", "answer": "6", "level": 1} for n in (12, 18, 24, 30)]
    (root / "data").mkdir()
    for name, part in (("problems.jsonl", rows), ("data/problems.jsonl", rows), ("heldout.jsonl", rows[:2])):
        (root / name).write_text("".join(json.dumps(row) + "\n" for row in part))
    (root / "rewards.py").write_text(REWARDS)
    for name in ("mine.yaml", "my.yaml", "config.yaml"):
        (root / name).write_text("base: toy.yaml\nsteps: 2\n")
    (root / "programs.jsonl").write_text('{"code": "print(1 + 1)"}\n')
    return root


def filled(line: str) -> list[str]:
    """The words of a command, with placeholders filled, and small enough for a test."""
    words = [
        PLACEHOLDERS.get(word) or re.sub(r"\b(RUN|NAME|TARGET)\b", lambda found: PLACEHOLDERS[found[0]], word)
        for word in shlex.split(line)
    ]
    words = words[3:] if words[:3] == ["python", "-m", "grpo_roc_jax"] else words
    if words[:2] == ["python", "-m"]:
        words = [words[2].removeprefix("grpo_roc_jax."), *words[3:]]
    name, *rest = words[1:] if words[0] == "grpo-roc" else words
    if name in ("train", "sft") and "--help" not in rest and "--dry-run" not in rest:
        rest += TINY
    if name == "view" and not {"--text", "--html", "--atif"} & set(rest):
        rest.append("--text")
    if "--step" in rest:  # of a run of two
        rest[rest.index("--step") + 1] = "1"
    if name in ("evaluate", "difficulty"):
        rest += ["--problems", "2"]
    if name == "chat" and "--prompt" not in rest:
        rest += ["--prompt", "gcd(12,6)=?"]
    return [name, *rest]


def test_the_pages_leave_enough_to_run():
    names = {filled(line)[0] for line in RUNNABLE}
    assert names >= {"train", "sft", "evaluate", "difficulty", "view", "plot", "export", "chat", "check-data"}
    assert names >= {"check-reward", "doctor", "probe", "new", "run-tools"} and len(RUNNABLE) > 40


@pytest.mark.slow
@pytest.mark.parametrize("line", part_of(RUNNABLE))
def test_a_command_of_the_pages_runs(line, folder, tmp_path):
    here, words = tmp_path / "here", filled(line)
    shutil.copytree(folder, here)
    (here / "configs").symlink_to(ROOT / "configs")
    made = re.search(r"(?:--run_dir|--html|--out|--atif)[ =](\S+)", " ".join(words))
    target = made[1] if made else words[2] if words[0] == "export" else words[1] if words[0] == "new" else ""
    if target:  # what the command makes must not be there before it
        shutil.rmtree(here / target, ignore_errors=True)
    run(words, here)
    assert not target or (here / target).exists()
