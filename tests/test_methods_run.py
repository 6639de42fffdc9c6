"""Every method file runs: three optimiser steps by the command line, the same again when stopped, traces that tell."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from examples.plugins.consistency import Consistency
from grpo_roc_jax.config import Config
from grpo_roc_jax.learner import learner as learner_module
from grpo_roc_jax.method.catalog import load_methods
from grpo_roc_jax.record.trace import read_trace
from grpo_roc_jax.run import components as components_module
from grpo_roc_jax.settings.cli import load_config
from grpo_roc_jax.settings.options import as_text
from grpo_roc_jax.train import main, train
from tests.helpers.parts import part_of
from tests.test_train import TINY, numbers, params_hash

METHODS = load_methods()
HELPED = {"scaf_grpo", "guide_grpo", "sage", "sage_light", "xrpo", "expo", "hill"}
"""Methods that help after failing; half of the problems are then beyond the plain prompt."""
LONG = {"igrpo", "xrpo", "sage", "expo", "masa", "rgr_grpo", "sdpo", "hill"}
"""Methods with drafts, solutions or questions in the prompt: a random policy writes what takes many tokens."""
ROOMY = {"s_grpo", "surrogate_signals", "grao", "tempsamp_r1", "think_tuning"}
"""Methods that want responses of many tokens: to cut them, or because lengths that differ are the signal."""
SIZES = {"spo": 1, "s_grpo": 9, "mc_grpo": 5, "pass_at_k": 6}
OWN = {
    "surrogate_signals": ("--shaping.surrogate.length=24",),
    "xrpo": ("--plan.budget.pilot=2",),
    "reference_sync": ("--surrogate.kl.sync_every=2",),
    "rc_grpo": ("--plan.condition.separation=0",),
    "masa": ("--plan.second.count=4",),
    "ps_grpo": ("--shaping.agreement.similarity=tests.test_methods_run:alike",),
    "rc_roc": ("--plan.condition.separation=0",),
    "entropy_target": ("--advantage.adjust.entropy_bonus.target=9",),
}
"""Settings of single methods at this size."""
CONDITIONS = {
    "rc_grpo": {"high_reward", "low_reward"},
    "rc_roc": {"high_reward", "low_reward"},
    "scaf_grpo": {"", "hint:1"},
    "guide_grpo": {"", "hint:1"},
    "sage": {"", "hint_writer", "hint:1"},
    "sage_light": {"", "hint:1"},
    "igrpo": {"", "draft"},
    "xrpo": {"", "examples"},
    "expo": {"", "explanation"},
    "s_grpo": {"", "cut"},
    "train_long": {"budget"},
    "masa": {"", "prediction"},
    "consistency_grpo": {"", "paraphrase:1", "paraphrase:2"},
    "hill": {"", "hint_writer:1", "hint:1"},
    "grao": {"", "demonstration"},
    "ps_grpo": {"", "paraphrase:1", "paraphrase:2"},
    "rgr_grpo": {"", "refinement"},
    "think_tuning": {"", "feedback"},
    "arise": {"skill:1"},
    "tempsamp_r1": {"", "demonstration"},
}
"""What the trajectory log of these methods tells at least; of all others the plain prompt alone."""


def half(problem, trajectories):
    """Pays for an even first token: a signal that a random policy meets about half of the time."""
    return [float(t.tokens[t.prompt_length] % 2 == 0) for t in trajectories]


def alike(first, second):
    """Whether two texts begin with the same character."""
    return float(first[:1] == second[:1])


def stubborn(problem, trajectories):
    """The same, but every other problem pays under help only."""
    plain = int(problem.uid.rsplit(":", 1)[1]) % 2
    return [
        paid * float(plain or bool(t.condition))
        for paid, t in zip(half(problem, trajectories), trajectories, strict=True)
    ]


def tiny(name: str, run_dir, *more: str) -> list[str]:
    """The words of a command line: the method's own settings on a model and budgets of no size."""
    whole = load_config(Config, [str(METHODS[name].path)], prog="test")
    paid = f"tests.test_methods_run:{'stubborn' if name in HELPED else 'half'}"
    prompt, response = 160 if name in LONG else 72, 64 if name in ROOMY else 16
    own = {
        "rollout.max_prompt_tokens": prompt,
        "rollout.max_response_tokens": response,
        "batch.row_length": prompt + response,
        "group.problems": 4,
        "group.size": SIZES.get(name, 4),
        "data.world_problems": 3,
        "plan.warmup_steps": 0,
        "reward.truncated": "score",
        "sft.steps": 0,
        "log.traces": 1,
        "data.eval_problems": 0,
        "tools.workers": 1,
    }
    if whole.batch.updates.total > 1:
        parts, epochs = min(whole.batch.updates.parts, 4), whole.batch.updates.epochs
        own["batch.updates"] = f"{{kind: several, parts: {parts}, epochs: {epochs}}}"
    words = [word for word in TINY if not word.startswith(("--reward", "tests."))]
    words += [f"--{key}={value}" for key, value in own.items()]
    more_rewards = [as_text(part) for part in whole.reward.functions[1:]]
    words += ["--reward.functions", paid, *more_rewards, *OWN.get(name, ())]
    return [str(METHODS[name].path), *words, f"--run_dir={run_dir}", "--steps=3", *more]


@pytest.mark.parametrize("name", METHODS)
def test_dry_run(name, capsys, tmp_path, monkeypatch):
    if name == "opd":
        monkeypatch.chdir(tmp_path)
        Path("runs/toy").mkdir(parents=True)
        shutil.copy(METHODS[name].path.parent.parent / "toy.yaml", "runs/toy/config.yaml")
    assert main([str(METHODS[name].path), "--dry-run", "full", "--data.eval_problems=4"]) == 0
    assert f"name: {name}" in capsys.readouterr().out


class Unclosed:
    """An executor that outlives the runs that use it."""

    def __init__(self, executor):
        self._executor = executor

    def __getattr__(self, name):
        return getattr(self._executor, name)

    def close(self):
        pass


@pytest.fixture(scope="module")
def kept():
    """Parts that hold no state of a run, by what they were made of: programs, engines, the executor."""
    parts = {}
    yield parts
    for executor in parts.pop("executors", {}).values():
        executor.close()


@pytest.fixture
def shared(monkeypatch, kept):
    """Runs of this process share compiled programs and tool workers, which take most of a small run's time."""

    def remembered(place, make, key):
        def made(*given, **named):
            some = kept.setdefault(place, {})
            words = repr(key(*given, **named))
            return some[words] if words in some else some.setdefault(words, make(*given, **named))

        return made

    def everything(*given, **named):
        return given, named

    def tools_and_names(tools, registry):
        return tools, registry.names

    for name in ("make_update_step", "make_score"):
        monkeypatch.setattr(learner_module, name, remembered(name, getattr(learner_module, name), everything))
    engine = remembered("engines", components_module.make_engine, everything)
    monkeypatch.setattr(components_module, "make_engine", engine)
    executor = remembered("executors", components_module.make_executor, tools_and_names)
    monkeypatch.setattr(components_module, "make_executor", lambda *given: Unclosed(executor(*given)))


def cut_after(run_dir: Path, copy: Path, step: int) -> None:
    """A run directory as a stop right after that checkpoint leaves it, with what came later still in the logs."""
    shutil.copytree(run_dir, copy)
    for checkpoint in (copy / "checkpoints").iterdir():
        if checkpoint.name.startswith("step_") and int(checkpoint.name.removeprefix("step_")) > step:
            shutil.rmtree(checkpoint)


def without_evaluations(rows: list[dict]) -> list[dict]:
    return [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("name", part_of(list(METHODS)))
def test_three_steps_and_an_exact_resume(name, tmp_path, shared, monkeypatch):
    whole, again = tmp_path / "whole", tmp_path / "again"
    if name == "opd":  # its teacher: another policy, with twice the layers
        monkeypatch.chdir(tmp_path)
        assert main([*TINY, "--run_dir=runs/toy", "--steps=0", "--seed=5", "--model.layers=2"]) == 0
    assert main(tiny(name, whole)) == 0
    cut_after(whole, again, 1)
    assert main(tiny(name, again, "--resume=auto")) == 0
    rows = numbers(whole)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all("loss/value" in row for row in rows[1:]), "a step did not train"
    assert numbers(again) == rows
    assert params_hash(whole) == params_hash(again)
    records = [record for step in (1, 2, 3) for record in read_trace(whole, step)]
    assert {str(record.trajectory.condition) for record in records} >= CONDITIONS.get(name, {""})
    trained = [record for record in records if record.advantages is not None]
    for record in trained:
        assert len(record.advantages) == record.trajectory.length
        assert np.isfinite(record.advantages).all()
    if name != "expo":
        assert any(record.advantages.any() for record in trained)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo_roc", "constraints", "spo", "igrpo"])
def test_in_processes_of_its_own(name, tmp_path, shared):
    """The real command, stopped after a step and called again, gives what one call inside this process gives."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), "JAX_NUM_CPU_DEVICES": "8"}
    for steps in (1, 3):
        words = tiny(name, tmp_path / "run", f"--steps={steps}", "--resume=auto")
        subprocess.run([sys.executable, "-m", "grpo_roc_jax.train", *words], check=True, env=environment, timeout=300)
    assert main(tiny(name, tmp_path / "whole")) == 0
    assert without_evaluations(numbers(tmp_path / "run")) == without_evaluations(numbers(tmp_path / "whole"))
    assert params_hash(tmp_path / "run") == params_hash(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["--method.edit_groups=examples.plugins.clean_calls:purify", "--surrogate.old_logprobs=scored"],
    ],
    ids=lambda words: words[0].rpartition(".")[2],
)
def test_plug_ins_train(words, tmp_path, shared):
    roomy = ["--rollout.max_response_tokens=64", "--batch.row_length=136"]
    assert main(tiny("grpo", tmp_path / "run", *roomy, *words, "--steps=2")) == 0
    rows = numbers(tmp_path / "run")
    assert all(np.isfinite(row["loss/value"]) and row["update/grad_norm"] > 0 for row in rows[1:])


@pytest.mark.slow
def test_a_plug_in_by_argument_trains(tmp_path, shared):
    config = load_config(
        Config, tiny("grpo", tmp_path / "run", "--steps=2", "--method.edit_rows=consistency"), prog="test"
    )
    train(config, functions={"consistency": Consistency(decay=0.5, every=1)})
    assert all(row["update/grad_norm"] > 0 for row in numbers(tmp_path / "run")[1:])
