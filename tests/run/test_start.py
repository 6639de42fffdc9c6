"""A start that fails: one message, status 2, and the disk as it was; a dry run finds the same faults. An end: a judge
that hangs keeps no process alive."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from grpo_roc_jax.process.points import InjectedFault, injected
from grpo_roc_jax.record import events, metrics
from grpo_roc_jax.train import main, train
from tests.helpers.contrib import with_contrib
from tests.test_train import TINY, config_in
from tests.test_train import shared_programs as shared_programs  # a fixture


def one_argument(problem):
    return []


def of_another_length(problem, trajectories):
    return [0.0] * (len(trajectories) + 1)


@pytest.fixture
def files(tmp_path):
    """Files of problems and conversations, and a module that cannot be imported."""
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "because " * 60}]
    contents = {"good": [{"question": f"{i} + {i} = ?", "answer": str(2 * i)} for i in range(4)]}
    contents |= {"long": [{"question": "why? " * 40, "answer": "1"}], "talk": [{"messages": talk}]}
    for name, rows in contents.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "broken_reward_module.py").write_text("1 / 0\n")
    (tmp_path / "cut.json").write_text("{")
    return tmp_path


OWN = "--data.sources={files}/good.jsonl --data.eval_problems=0"
REWARD = "--reward.functions tests.run.test_start"
FAULTS = {
    "own problems, supervised stage": (f"{OWN} --sft.steps=1", "Set sft.steps 0 to train without that stage"),
    "nothing held out": ("--data.sources={files}/good.jsonl", "nothing is held out"),
    "long prompts": ("--data.sources={files}/long.jsonl --data.eval_problems=0", "no problem is left to train on"),
    "long held-out prompts": ("--data.eval_sources={files}/long.jsonl", "no held-out problem is left"),
    "long demonstrations": ("--sft.steps=1 --data.trace_sources={files}/talk.jsonl", "length = 40: 1 of 1 do not fit"),
    "reward of one argument": (f"{REWARD}:one_argument", "must accept (problem, trajectories)"),
    "reward of another length": (f"{REWARD}:of_another_length --sft.steps=1", "returned 3 values for 2 trajectories"),
    "no teacher": ("--advantage.adjust=teacher --advantage.adjust.teacher.path={files}", "neither config.yaml, as"),
    "reward in a broken module": ("--reward.functions broken_reward_module:reward", "ZeroDivisionError"),
    "no such core": ("--tools.cpus=99999", "tools.cpus (99999,): no such cores"),
    "a tokenizer that is cut": ("--text.tokenizer={files}/cut.json", "cut.json is not JSON"),
}


def said_by(words, capsys):
    assert main(words) == 2
    message = capsys.readouterr().err
    assert message.startswith("configuration: ") and "Traceback" not in message
    return message


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_start_is_one_message_and_leaves_nothing(fault, files, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(files))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # that of the user's modules
    words, message = FAULTS[fault]
    words = [*TINY, *words.format(files=files).split(), f"--run_dir={files}/runs/a"]
    before = sorted(files.iterdir())
    assert message in said_by(words, capsys)
    assert sorted(files.iterdir()) == before
    if not words[-2].startswith("--tools.cpus"):  # a dry run starts no executor
        assert message in said_by([*words, "--dry-run"], capsys)


@with_contrib
def test_a_service_that_does_not_answer_is_a_message(files, capsys):
    words = [word for word in TINY if not word.startswith("--tools.")]
    words += ["--tools.executor", "sandbox_fusion", "--tools.executor.url", "http://127.0.0.1:9"]
    assert "no service answers" in said_by([*words, f"--run_dir={files}/runs/a"], capsys)
    assert not (files / "runs").exists()


@pytest.mark.usefixtures("one_device")
def test_each_reward_function_is_tried_on_made_up_trajectories_before_anything_compiles(tmp_path, caplog):
    """One that raises may be right on sampled trajectories, so it is named and the run goes on."""
    seen, compiled = [], metrics.CompilationCounter()

    def fails_at_first(problem, trajectories):
        seen.append((compiled.count, problem, trajectories))
        if len(seen) == 1:
            raise KeyError("tests")
        return [1.0] * len(trajectories)

    config = config_in(tmp_path, "--steps=1", "--data.eval_problems=0", "--reward.functions", "fails_at_first")
    with compiled:
        train(config, functions={"fails_at_first": fails_at_first})
    count, problem, (full, cut) = seen[0]
    assert count == 0 and problem.source.startswith("world:")
    assert [result.kind for result in full.results] == ["ok"] and problem.answer in full.turns[-1].text
    assert cut.stop == "length" and full.prompt_length == cut.prompt_length > 0
    for trajectory in (full, cut):
        spans = np.zeros(trajectory.length, bool)
        for turn in trajectory.turns:
            spans[turn.start : turn.end] = True
        assert np.array_equal(spans, trajectory.policy_mask)
    pattern = re.compile(r"fails_at_first raised KeyError: 'tests' \(test_start\.py, line \d+\) on made-up")
    assert sum(bool(pattern.search(record.message)) for record in caplog.records) == 1
    assert metrics.read_metrics(tmp_path)[-1]["rollout/reward"] == 1


@pytest.mark.usefixtures("one_device")
def test_the_supervised_stage_is_saved_before_the_first_evaluation(tmp_path):
    """An evaluation that fails costs no supervised training; the same command makes it up."""
    words = ["--steps=1", "--sft.steps=2", "--resume=auto", "--sft.traces=2", "--batch.row_length=120"]
    config = config_in(tmp_path, *words)
    with injected("evaluate=raise"), pytest.raises(InjectedFault):
        train(config)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000000"]
    supervised = (tmp_path / "sft.jsonl").read_bytes()
    summary = train(config)
    assert (tmp_path / "sft.jsonl").read_bytes() == supervised, "it is not trained again"
    assert summary["accuracy_before"] is not None and [row["step"] for row in metrics.read_metrics(tmp_path)] == [0, 1]


@pytest.mark.usefixtures("one_device")
def test_a_step_without_a_score_says_so(tmp_path):
    """Its reward is null, and an event names the functions."""
    functions = {"absent": lambda p, ts: [None] * len(ts), "broken": lambda p, ts: 1 / 0}
    for name, reason in (("absent", "which gave None for all"), ("broken", "raised ZeroDivisionError")):
        run = tmp_path / name
        train(config_in(run, "--steps=1", "--data.eval_problems=0", f"--reward.functions={name}"), functions=functions)
        row = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
        assert row["rollout/reward"] is None and row["roc/reward_kept"] is None
        (event,) = [event for event in events.read_events(run) if event["event"] == "not_scored"]
        assert event["step"] == 1 and f"not scored by {name} (" in event["text"] and reason in event["text"]


ROOT = Path(__file__).resolve().parents[2]
JUDGES = '''
import time
from concurrent.futures import ThreadPoolExecutor

POOL = ThreadPoolExecutor(2)


def waited(problem, trajectories):
    """Waits for a pool whose work never ends, and is given up."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda t: time.sleep(10**6), trajectories))


def given_up(problem, trajectories):
    """Gives its own work up in time; the thread stays."""
    try:
        POOL.submit(time.sleep, 10**6).result(timeout=0.05)
    except TimeoutError:
        return [0.0] * len(trajectories)

'''


def ended(words, folder):
    """(status, errors, seconds) of a process that must end by itself."""
    (folder / "judges.py").write_text(JUDGES)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]), "JAX_PLATFORMS": "cpu"}
    begun, limits = time.monotonic(), {"capture_output": True, "text": True, "timeout": 240}
    done = subprocess.run([sys.executable, "-m", *words], cwd=folder, env=environment, **limits)
    return done.returncode, done.stderr, time.monotonic() - begun


def test_a_command_ends_whatever_a_judge_does(tmp_path):
    _, errors, seconds = ended(["grpo_roc_jax", "check-reward", "judges:given_up"], tmp_path)
    assert "left without threads that do not end" in errors and seconds < 60


@pytest.mark.slow
def test_a_run_ends_after_a_judge_that_was_given_up(tmp_path):
    run = tmp_path / "run"
    words = [*TINY, f"--run_dir={run}", "--steps=1", "--data.eval_problems=0", "--sharding.data=1"]
    words += ["--reward.functions=[{kind: function, path: 'judges:waited', timeout_s: 0.2}]"]
    status, errors, _ = ended(["grpo_roc_jax.train", *words], tmp_path)
    assert status == 0 and "left without threads" in errors
    assert (run / "summary.json").is_file() and (run / "checkpoints" / "step_00000001").is_dir()
