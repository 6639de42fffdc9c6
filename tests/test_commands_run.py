"""The commands of the pages run, with their placeholders filled by a small run, its model and files.

`test_readme.py` parses every command; here those that need neither a hub, a pod nor an accelerator end with status 0.
Recipes of published models train a small exported one, and plans are made by arithmetic. Sessions (blocks marked
`console`) run in `test_pages_run.py`. CI runs a few of both with each commit.
"""

import contextlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from grpo_roc_jax.config import read_config
from tests.helpers.parts import part_of
from tests.test_readme import LINES, TINY

ROOT = Path(__file__).resolve().parent.parent
REWARDS = """
def score(problem, trajectories):
    return [float(problem.answer in t.turns[-1].text) if t.turns else 0.0 for t in trajectories]

short_and_right = asked = from_trl = few_turns = score
"""
VALUES = """
RUN=runs/a OTHER=runs/b TARGET=written MODEL=model DIR=a_project FILE=problems.jsonl DATA=problems.jsonl
FUNCTION=answer NAME=grpo SECTION=optim CONFIG.yaml=mine.yaml KIND=h100:1
"""
PLACEHOLDERS = dict(pair.split("=") for pair in VALUES.split())
"""What a page leaves to its reader -> a value that exists in the folder of the test."""
ELSEWHERE = re.compile(
    r"rstar2_qwen3_14b.yaml --run_dir|aime|configs/(?:words|world)|environments/|cobalt|ranks|states|"
    r"replay|learning_rate|COMMAND|\.\.\.|gsm8k_traces|shows them|address=auto|"
    r"data/(?:messages|math|gsm8k)|rc_grpo|^grpo-roc (?:check-data|train|view|replay)$"
)
"""Commands that need what a test has not: models and data of a hub, a pod or Ray cluster, hours, what stands before."""
COPIES = """
runs/b runs/first runs/plain runs/toy runs/qwen runs/two runs/mine runs/roc runs/grpo runs/roc/0 runs/grpo/0
runs/my-model run cold words2/cold
""".split()  # noqa: SIM905
"""Names under which pages know a run."""
PUBLISHED = re.compile(r"qwen|smollm|gemma|llama")
"""Recipes of published models; here they train the exported model of the small run."""
SMALL_MODEL = """
--model.path=model --model.compute_dtype=float32 --data.sources=problems.jsonl --data.eval_sources=heldout.jsonl
--data.trace_sources=[world:gcd:1] --data.prompt_column= --data.answer_column= --stages=[] --rollout.narrow=[]
--text.system= --text.tools_section=false --text.instruction=
""".split()  # noqa: SIM905 (a command line reads better as one)
SHAPES = {"qwen2_5_7b_lora_4bit": "Qwen2.5-7B-Instruct", "qwen3_30b_a3b": "Qwen3-30B-A3B", "rstar2": "Qwen3-14B"}
"""Recipe -> the shape that a plan takes where no hub can be asked."""
RUNNABLE = {line for path, line in LINES if "examples" not in path.parts and not ELSEWHERE.search(line)}
RUNNABLE = sorted(line for line in RUNNABLE if len(shlex.split(line)) > 1)
ADAPTERS = sorted(set(re.findall(r"^grpo-roc export (runs/\S+) \S+ --adapter", "\n".join(RUNNABLE), re.M)))
"""Runs that the pages export an adapter of: each has the name of its recipe."""


BASE = [sys.executable, "-m", "grpo_roc_jax"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
PROCESS = {"env": ENVIRONMENT, "stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}


def run(words: list[str], folder: Path) -> None:
    """A command in a process of its own; it must end with status 0, or 1 if it is a plan of what does not fit.

    One that asks for an extra that is not installed here has said so in a line: the test is skipped.
    """
    done = subprocess.run(BASE + words, cwd=folder, stderr=subprocess.PIPE, **PROCESS)
    missing = re.search(r"^configuration: .* needs the package.*pip install '?(\w+)'?$", done.stderr, re.M)
    if done.returncode == 2 and missing and importlib.util.find_spec(missing[1]) is None:
        pytest.skip(missing[0])
    assert done.returncode in ((0, 1) if words[0] == "plan" else (0,)), done.stdout[-2000:] + done.stderr[-2000:]


def serve(words: list[str], folder: Path) -> None:
    """A server in a process of its own: it says where it listens, answers, and ends when it is told to."""
    process = subprocess.Popen(BASE + words, cwd=folder, stderr=subprocess.STDOUT, **PROCESS)
    try:
        text = ""
        while not (match := re.search(r"http://127\.0\.0\.1:\d+\D", text)):
            line = process.stdout.readline()
            assert line, text[-2000:]
            text += line
        with contextlib.suppress(urllib.error.HTTPError):  # which is an answer
            urllib.request.urlopen(match[0][:-1], timeout=60).read()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode in (0, 143, -signal.SIGTERM)


def write_configs(folder: Path) -> None:
    for name in ("mine.yaml", "my.yaml", "config.yaml"):
        (folder / name).write_text("base: toy.yaml\nsteps: 2\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small run under several names, an exported model, problems, rewards and configurations as pages name them."""
    root = tmp_path_factory.mktemp("reader")
    run(["train", "toy.yaml", *TINY, "--log.traces=1", "--run_dir=runs/a"], root)
    for name in COPIES:
        shutil.copytree(root / "runs/a", root / name)
    run(["export", "runs/a", "model"], root)
    shutil.copytree(root / "model", root / "cold_model")
    rows = [{"prompt": f"gcd({n},6)=?", "answer": "6", "level": 1} for n in (12, 18, 24, 30)]
    (root / "data").mkdir()
    for name in ("problems", "data/problems", "heldout", "words2/train", "gsm8k_test"):
        some = rows[:2] if name == "heldout" else rows
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    for name in ADAPTERS:
        run(filled(f"grpo-roc train {name.removeprefix('runs/')}.yaml --run_dir {name}"), root)
    (root / "rewards.py").write_text(REWARDS)
    write_configs(root)
    (root / "programs.jsonl").write_text('{"code": "print(1 + 1)"}\n')
    return root


def filled(line: str) -> list[str]:
    """The words of a command, with placeholders filled, and small enough for a test."""
    words = [
        PLACEHOLDERS.get(word) or re.sub(r"\b(RUN|NAME|TARGET)\b", lambda match: PLACEHOLDERS[match[0]], word)
        for word in shlex.split(re.sub(r"\$\w+", "0", line))
    ]
    words = words[3:] if words[:3] == ["python", "-m", "grpo_roc_jax"] else words
    if words[:2] == ["python", "-m"]:
        words = [words[2].removeprefix("grpo_roc_jax."), *words[3:]]
    name, *rest = words[1:] if words[0] == "grpo-roc" else words
    if name in ("train", "sft") and "--help" not in rest:
        published = bool(PUBLISHED.search(line))
        if published or "--dry-run" not in rest:
            other = [word for word in rest if re.search("methods/(?!grpo_roc)", word)] or "--resample none" in line
            left = ("--model.",) * published + ("--resample.min_",) * bool(other)
            rest += [word for word in TINY if not word.startswith(left)]
        rest += SMALL_MODEL if published else []
    if name == "plan":
        rest += [] if "--arithmetic" in rest else ["--arithmetic"]
        shapes = [f"--model_shape=Qwen/{shape}" for recipe, shape in SHAPES.items() if recipe in line]
        rest += [] if "--model_shape" in rest else shapes
    if name in ("serve", "chat", "evaluate"):  # what they are given is there; what others write is not
        rest = ["model" if word in (PLACEHOLDERS["DIR"], PLACEHOLDERS["TARGET"]) else word for word in rest]
    if name == "serve" and "--port" in rest:
        rest[rest.index("--port") + 1] = "0"
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
    assert len([line for path, line in LINES if path.name == "README.md"]) > 20
    assert {path.name for path, _ in LINES} >= {"launch.md", "models.md", "plan.md", "toy.yaml"}
    names = "train sft evaluate difficulty view plot export chat check-data check-reward doctor probe new run-tools"
    assert {filled(line)[0] for line in RUNNABLE} >= {*names.split()} and len(RUNNABLE) > 95
    reading = [re.sub(r"--(run_dir|store)[ =]\S+", "", line) for line in RUNNABLE]  # without what is written
    read = {word.rstrip("/") for line in reading for word in re.findall(r"\bruns/[\w/-]+", line)}
    assert sorted(read - {*COPIES, *ADAPTERS, "runs/a"}) == []


def test_what_is_filled_in_is_a_configuration(tmp_path, monkeypatch):
    """A quick look at the trainings that the slow test runs."""
    monkeypatch.chdir(tmp_path)
    write_configs(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for name, *words in map(filled, RUNNABLE):
        if name in ("train", "sft") and "--help" not in words:
            read_config(*[word for word in words if word not in ("--preflight", "--dry-run", "full", "--force")])


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
    (serve if words[0].startswith("serve") else run)(words, here)
    assert not target or (here / target).exists()
