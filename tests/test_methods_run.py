"""Every method file runs: three optimiser steps by the command line, the same again when stopped, traces that tell."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from docs.methods_table import load_methods
from grpo_roc_jax.config import Config
from grpo_roc_jax.record.trace import read_trace
from grpo_roc_jax.settings import cli, options
from grpo_roc_jax.train import main
from tests.helpers.parts import part_of
from tests.test_train import TINY, even, numbers, params_hash
from tests.test_train import shared_programs as shared_programs  # a fixture

METHODS = {name: method for name, method in load_methods().items() if method.path.parent == cli.CONFIG_DIR / "methods"}


@dataclass(frozen=True)
class Size:
    """What a method needs on a model of no size: tokens of a prompt, which may hold drafts, and of a response; `helped`
    if it helps after failing; conditions of the log; and whether sampled tokens get advantages."""

    prompt: int = 72
    response: int = 16
    group: int = 4
    helped: bool = False
    words: tuple[str, ...] = ()
    conditions: tuple[str, ...] = ("",)
    trains: bool = True


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
    paid = zip(even(problem, trajectories), trajectories, strict=True)
    return [pay * float(plain or bool(t.condition)) for pay, t in paid]


def tiny(name: str, run_dir, *more: str, size: Size | None = None) -> list[str]:
    """The words of a command line: the method's own settings on a model and budgets of no size."""
    path, size = load_methods()[name].path, size or SIZES.get(name, Size())
    config = cli.load_config(Config, [str(path)], prog="test")
    paid = "tests.test_methods_run:stubborn" if size.helped else "tests.test_train:even"
    settings = {
        **{"rollout.max_prompt_tokens": size.prompt, "rollout.max_response_tokens": size.response},
        **{"batch.row_length": size.prompt + size.response, "group.problems": 4, "group.size": size.group},
        **{"data.world_problems": 3, "data.eval_problems": 0, "plan.warmup_steps": 0, "sft.steps": 0},
        **{"reward.truncated": "score", "log.traces": 1, "tools.workers": 1},
    }
    if config.batch.updates.total > 1:
        parts, epochs = min(config.batch.updates.parts, 4), config.batch.updates.epochs
        settings["batch.updates"] = f"{{kind: several, parts: {parts}, epochs: {epochs}}}"
    words = [word for word in TINY if not word.startswith(("--reward", "tests."))]
    words += [f"--{key}={value}" for key, value in settings.items()]
    words += ["--reward.functions", paid, *map(options.as_text, config.reward.functions[1:]), *size.words]
    return [str(path), *words, f"--run_dir={run_dir}", "--steps=3", *more]


@pytest.mark.parametrize("name", METHODS)
def test_dry_run(name, capsys, tmp_path, monkeypatch):
    if name == "opd":
        monkeypatch.chdir(tmp_path)
        Path("runs/toy").mkdir(parents=True)
        shutil.copy(METHODS[name].path.parent.parent / "toy.yaml", "runs/toy/config.yaml")
    assert main([str(load_methods()[name].path), "--dry-run", "full", "--data.eval_problems=4"]) == 0
    assert f"name: {name}" in capsys.readouterr().out


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
    shutil.copytree(full, again)  # as a stop right after a step leaves it, with what came later still in the logs
    for checkpoint in (again / "checkpoints").glob("step_*"):
        if int(checkpoint.name.removeprefix("step_")) > 1:
            shutil.rmtree(checkpoint)
    assert main(tiny(name, again, "--resume=auto", size=size)) == 0
    rows = numbers(full)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all("loss/value" in row for row in rows[1:]), "a step did not train"
    assert numbers(again) == rows
    assert params_hash(full) == params_hash(again)
    records = [record for step in (1, 2, 3) for record in read_trace(full, step)]
    assert {str(record.trajectory.condition) for record in records} >= set(size.conditions)
    trained = [record for record in records if record.advantages is not None]
    assert all(len(record.advantages) == record.trajectory.length for record in trained)
    assert all(np.isfinite(record.advantages).all() for record in trained)
    assert not size.trains or any(record.advantages.any() for record in trained)
