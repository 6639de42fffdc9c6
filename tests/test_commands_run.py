"""The commands of the pages run, with their placeholders filled by a small run, its model and files.

`test_readme.py` parses every command; here those that need neither a hub, a pod nor an accelerator end with status 0.
Sessions (blocks marked `console`) run in `test_pages_run.py`.
"""

import json
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest

from grpo_roc_jax import __main__ as commands
from tests.helpers.parts import part_of
from tests.test_readme import LINES, TINY

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
    r"gsm8k_traces|catalog|shows them|docs/roc_vs|roc=|data/trl|runs/two|runs/my-model|"
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two small runs, an exported model, problems, rewards and configurations under the names that pages use."""
    root, before = tmp_path_factory.mktemp("reader"), Path.cwd()
    os.chdir(root)
    try:
        assert commands.main(["train", "toy.yaml", *TINY, "--log.traces=1", "--run_dir=runs/a"]) == 0
        for name in ("b", "first", "plain", "toy"):
            shutil.copytree("runs/a", f"runs/{name}")
        shutil.copytree("runs/a", "run")
        assert commands.main(["export", "runs/a", "model"]) == 0
        rows = [{"prompt": f"gcd({n},6)=?", "answer": "6", "level": 1} for n in (12, 18, 24, 30)]
        Path("data").mkdir()
        for name, part in (("problems.jsonl", rows), ("data/problems.jsonl", rows), ("heldout.jsonl", rows[:2])):
            Path(name).write_text("".join(json.dumps(row) + "\n" for row in part))
        Path("rewards.py").write_text(REWARDS)
        for name in ("mine.yaml", "my.yaml", "config.yaml"):
            Path(name).write_text("base: toy.yaml\nsteps: 2\n")
        Path("programs.jsonl").write_text('{"code": "print(1 + 1)"}\n')
    finally:
        os.chdir(before)
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
@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("line", part_of(RUNNABLE))
def test_a_command_of_the_pages_runs(line, folder, tmp_path, monkeypatch, capsys):
    shutil.copytree(folder, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    words = filled(line)
    made = re.search(r"(?:--run_dir|--html|--out|--atif)[ =](\S+)", " ".join(words))
    target = made[1] if made else words[2] if words[0] == "export" else words[1] if words[0] == "new" else ""
    shutil.rmtree(target or "nothing", ignore_errors=True)  # what the command makes must not be there before it
    try:
        status = commands.main(words)
    except SystemExit as ended:  # --help
        status = ended.code
    said = capsys.readouterr()
    assert status == 0, said.out[-2000:] + said.err[-2000:]
    assert not target or Path(target).exists()
