"""Every method file runs: three optimiser steps by the command line, the same again when stopped, traces that tell."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from docs.methods_table import load_methods
from grpo_roc_jax.config import Config
from grpo_roc_jax.record.trace import read_trace
from grpo_roc_jax.settings.cli import CONFIG_DIR, load_config
from grpo_roc_jax.settings.options import as_text
from grpo_roc_jax.train import main
from tests.helpers.parts import part_of
from tests.test_train import TINY, even, numbers, params_hash, without_evaluation
from tests.test_train import shared_programs as shared_programs  # a fixture

METHODS = {name: method for name, method in load_methods().items() if method.path.parent == CONFIG_DIR / "methods"}


@dataclass(frozen=True)
class Size:
    """What a method needs on a model and budgets of no size, and what its trajectory log tells."""

    prompt: int = 72
    """Tokens. A random policy writes drafts and solutions of many tokens, which come into a prompt."""
    response: int = 16
    """Tokens; more where responses are cut, or where lengths that differ are the signal."""
    group: int = 4
    helped: bool = False
    """Whether the method helps after failing; half of the problems are then beyond the plain prompt."""
    words: tuple[str, ...] = ()
    """Further settings."""
    conditions: tuple[str, ...] = ("",)
    """Conditions that the log holds at least; the plain prompt alone by default."""
    trains: bool = True
    """Whether sampled tokens get advantages at this size."""


SIZES = {
    "pass_at_k": Size(group=6),
    "sdpo": Size(prompt=160),
    "reference_sync": Size(words=("--surrogate.kl.sync_every=2",)),
    "rc_grpo": Size(words=("--plan.condition.separation=0",), conditions=("high_reward", "low_reward")),
    "entropy_target": Size(words=("--advantage.adjust.entropy_bonus.target=9",)),
}
"""Methods of the core that need more than the least."""


def stubborn(problem, trajectories):
    """Pays for an even first token, but every other problem pays under help only."""
    plain = int(problem.uid.rsplit(":", 1)[1]) % 2
    return [
        paid * float(plain or bool(t.condition))
        for paid, t in zip(even(problem, trajectories), trajectories, strict=True)
    ]


def tiny(name: str, run_dir, *more: str, size: Size | None = None) -> list[str]:
    """The words of a command line: the method's own settings on a model and budgets of no size."""
    path, size = load_methods()[name].path, size or SIZES.get(name, Size())
    config = load_config(Config, [str(path)], prog="test")
    paid = "tests.test_methods_run:stubborn" if size.helped else "tests.test_train:even"
    settings = {
        "rollout.max_prompt_tokens": size.prompt,
        "rollout.max_response_tokens": size.response,
        "batch.row_length": size.prompt + size.response,
        "group.problems": 4,
        "group.size": size.group,
        "data.world_problems": 3,
        "plan.warmup_steps": 0,
        "reward.truncated": "score",
        "sft.steps": 0,
        "log.traces": 1,
        "data.eval_problems": 0,
        "tools.workers": 1,
    }
    if config.batch.updates.total > 1:
        parts, epochs = min(config.batch.updates.parts, 4), config.batch.updates.epochs
        settings["batch.updates"] = f"{{kind: several, parts: {parts}, epochs: {epochs}}}"
    words = [word for word in TINY if not word.startswith(("--reward", "tests."))]
    words += [f"--{key}={value}" for key, value in settings.items()]
    more_rewards = [as_text(part) for part in config.reward.functions[1:]]
    words += ["--reward.functions", paid, *more_rewards, *size.words]
    return [str(path), *words, f"--run_dir={run_dir}", "--steps=3", *more]


@pytest.mark.parametrize("name", METHODS)
def test_dry_run(name, capsys, tmp_path, monkeypatch):
    if name == "opd":
        monkeypatch.chdir(tmp_path)
        Path("runs/toy").mkdir(parents=True)
        shutil.copy(METHODS[name].path.parent.parent / "toy.yaml", "runs/toy/config.yaml")
    assert main([str(load_methods()[name].path), "--dry-run", "full", "--data.eval_problems=4"]) == 0
    assert f"name: {name}" in capsys.readouterr().out


def cut_after(run_dir: Path, copy: Path, step: int) -> None:
    """A run directory as a stop right after that checkpoint leaves it, with what came later still in the logs."""
    shutil.copytree(run_dir, copy)
    for checkpoint in (copy / "checkpoints").iterdir():
        if checkpoint.name.startswith("step_") and int(checkpoint.name.removeprefix("step_")) > step:
            shutil.rmtree(checkpoint)


@pytest.mark.slow
@pytest.mark.parametrize("name", part_of(list(METHODS)))
def test_three_steps_and_an_exact_resume(name, tmp_path, monkeypatch):
    if name == "opd":  # its teacher: another policy, with twice the layers
        monkeypatch.chdir(tmp_path)
        assert main([*TINY, "--run_dir=runs/toy", "--steps=0", "--seed=5", "--model.layers=2"]) == 0
    check_three_steps(name, SIZES.get(name, Size()), tmp_path)


def check_three_steps(name, size, tmp_path):
    """Three steps train; stopped after the first and resumed, they give the same; the log tells the conditions."""
    full, again = tmp_path / "whole", tmp_path / "again"
    assert main(tiny(name, full, size=size)) == 0
    cut_after(full, again, 1)
    assert main(tiny(name, again, "--resume=auto", size=size)) == 0
    rows = numbers(full)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all("loss/value" in row for row in rows[1:]), "a step did not train"
    assert numbers(again) == rows
    assert params_hash(full) == params_hash(again)
    records = [record for step in (1, 2, 3) for record in read_trace(full, step)]
    assert {str(record.trajectory.condition) for record in records} >= set(size.conditions)
    trained = [record for record in records if record.advantages is not None]
    for record in trained:
        assert len(record.advantages) == record.trajectory.length
        assert np.isfinite(record.advantages).all()
    assert not size.trains or any(record.advantages.any() for record in trained)


@pytest.mark.slow
def test_in_processes_of_its_own(tmp_path):
    check_processes("grpo_roc", SIZES.get("grpo_roc", Size()), tmp_path)


def check_processes(name, size, tmp_path):
    """The real command, stopped after a step and called again, gives what one call inside this process gives."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), "JAX_NUM_CPU_DEVICES": "8"}
    for steps in (1, 3):
        words = tiny(name, tmp_path / "run", f"--steps={steps}", "--resume=auto", size=size)
        subprocess.run([sys.executable, "-m", "grpo_roc_jax.train", *words], check=True, env=environment, timeout=300)
    assert main(tiny(name, tmp_path / "whole", size=size)) == 0
    assert without_evaluation(numbers(tmp_path / "run")) == without_evaluation(numbers(tmp_path / "whole"))
    assert params_hash(tmp_path / "run") == params_hash(tmp_path / "whole")
