"""A start that fails: one message, status 2, and the disk as it was; a dry run finds the same faults. An end: a judge
that hangs keeps no process alive."""

import importlib.util
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
from grpo_roc_jax.record.events import read_events
from grpo_roc_jax.record.metrics import CompilationCounter, read_metrics
from grpo_roc_jax.train import main, train
from tests.helpers.contrib import with_contrib
from tests.test_train import TINY, config_in
from tests.test_train import shared_programs as shared_programs  # a fixture


def one_argument(problem):
    return []


def of_another_length(problem, trajectories):
    return [0.0] * (len(trajectories) + 1)


def of_another_type(problem, trajectories):
    return ["good"] * len(trajectories)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def talk(count):
    words = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "because " * count}]
    return {"messages": words}


SUMS = [{"question": f"{i} + {i} = ?", "answer": str(2 * i)} for i in range(4)]
LONG = {"question": "why? " * 40, "answer": "1"}


@pytest.fixture
def files(tmp_path):
    """Files of problems and conversations, and modules that cannot be imported."""
    write_rows(tmp_path / "good.jsonl", SUMS)
    write_rows(tmp_path / "long.jsonl", [LONG])
    write_rows(tmp_path / "talk.jsonl", [talk(60)])
    (tmp_path / "broken.py").write_text("def reward(problem, trajectories:\n")
    (tmp_path / "broken_reward_module.py").write_text("1 / 0\n")
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(3)\n")
    (tmp_path / "cut.json").write_text("{")
    return tmp_path


OWN = "--data.sources={files}/good.jsonl --data.eval_problems=0"
REWARD = "--reward.functions tests.run.test_start"
FAULTS = {
    "own problems, supervised stage": (f"{OWN} --sft.steps=1", "Set sft.steps 0 to train without that stage"),
    "nothing held out": ("--data.sources={files}/good.jsonl", "nothing is held out"),
    "long prompts": ("--data.sources={files}/long.jsonl --data.eval_problems=0", "no problem is left to train on"),
    "long held-out prompts": ("--data.eval_sources={files}/long.jsonl", "no held-out problem is left"),
    "prompts without room for a reward token": (
        f"{OWN} --plan.condition=reward_tokens --plan.condition.separation=0",
        "no problem is left to train on",
    ),
    "held-out prompts without room for one": (
        "--data.eval_sources={files}/good.jsonl --sft.reward_tokens=token",
        "no held-out problem is left",
    ),
    "long demonstrations": ("--sft.steps=1 --data.trace_sources={files}/talk.jsonl", "length = 40: 1 of 1 do not fit"),
    "reward of one argument": (f"{REWARD}:one_argument", "must accept (problem, trajectories)"),
    "reward of another length": (f"{REWARD}:of_another_length --sft.steps=1", "returned 3 values for 2 trajectories"),
    "reward of another type": (f"{REWARD}:of_another_type", "value 0 is 'good' (str)"),
    "reward in a broken file": ("--reward.functions {files}/broken.py:reward", "broken.py"),
    "no such teacher": (
        "--advantage.adjust=teacher --advantage.adjust.teacher.path={files}",
        "neither config.yaml, as",
    ),
    "reward in a broken module": ("--reward.functions broken_reward_module:reward", "ZeroDivisionError"),
    "reward in a file that exits": ("--reward.functions {files}/exits.py:reward", "SystemExit: 3"),
    "no such core": ("--tools.cpus=99999", "tools.cpus (99999,): no such cores"),
    "no place for scratch files": ("--tools.scratch_dir={files}/none", "No such file or directory"),
    "a tokenizer that is cut": ("--text.tokenizer={files}/cut.json", "cut.json is not JSON"),
    "no such part of a method": ("--method.edit_groups=nowhere:nothing", "method.edit_groups = 'nowhere:nothing'"),
    "no package for the logger": ("--log.tensorboard=True", "pip install 'tensorboard"),
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
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorboardX" else find(name))
    words, message = FAULTS[fault]
    words = [*TINY, *words.format(files=files).split(), f"--run_dir={files}/runs/a"]
    before = sorted(files.iterdir())
    assert message in said_by(words, capsys)
    assert sorted(files.iterdir()) == before
    if not words[-2].startswith(("--tools.cpus", "--tools.scratch_dir")):  # a dry run starts no executor
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
    seen, compiled = {}, CompilationCounter()

    def noted(name, pay):
        def function(problem, trajectories):
            seen.setdefault(name, (compiled.count, problem, trajectories))
            return pay(trajectories)

        return function

    def fails_at_first(trajectories):
        if trajectories is seen["second"][2]:
            raise KeyError("tests")
        return [1.0] * len(trajectories)

    functions = {"first": noted("first", lambda ts: [0.0] * len(ts)), "second": noted("second", fails_at_first)}
    with compiled:
        train(
            config_in(tmp_path, "--steps=1", "--data.eval_problems=0", "--reward.functions", *functions),
            functions=functions,
        )
    for count, problem, (full, cut) in seen.values():
        assert count == 0 and problem.source.startswith("world:")
        assert [result.kind for result in full.results] == ["ok"] and problem.answer in full.turns[-1].text
        assert cut.stop == "length" and full.prompt_length == cut.prompt_length > 0
        for trajectory in (full, cut):
            spans = np.zeros(trajectory.length, bool)
            for turn in trajectory.turns:
                spans[turn.start : turn.end] = True
            assert np.array_equal(spans, trajectory.policy_mask)
    pattern = re.compile(r"second raised KeyError: 'tests' \(test_start\.py, line \d+\) on made-up")
    assert sum(bool(pattern.search(record.message)) for record in caplog.records) == 1
    assert read_metrics(tmp_path)[-1]["rollout/reward"] == 1


@pytest.mark.usefixtures("one_device")
def test_the_supervised_stage_is_saved_before_the_first_evaluation(tmp_path):
    """An evaluation that fails costs no supervised training; the same command makes it up."""
    config = config_in(
        tmp_path, "--steps=1", "--sft.steps=2", "--resume=auto", "--sft.traces=2", "--batch.row_length=120"
    )
    with injected("evaluate=raise"), pytest.raises(InjectedFault):
        train(config)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000000"]
    supervised = (tmp_path / "sft.jsonl").read_bytes()
    summary = train(config)
    assert (tmp_path / "sft.jsonl").read_bytes() == supervised, "it is not trained again"
    assert summary["accuracy_before"] is not None and [row["step"] for row in read_metrics(tmp_path)] == [0, 1]


@pytest.mark.usefixtures("one_device")
def test_a_step_without_a_score_says_so(tmp_path):
    """Its reward is null, and an event names the functions."""
    functions = {"absent": lambda p, ts: [None] * len(ts), "broken": lambda p, ts: 1 / 0}
    for name, reason in (("absent", "which gave None for all"), ("broken", "raised ZeroDivisionError")):
        run = tmp_path / name
        train(config_in(run, "--steps=1", "--data.eval_problems=0", f"--reward.functions={name}"), functions=functions)
        row = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
        assert row["rollout/reward"] is None and row["rollout/reward_std"] is None and row["roc/reward_kept"] is None
        (event,) = [event for event in read_events(run) if event["event"] == "not_scored"]
        assert event["step"] == 1 and f"not scored by {name} (" in event["text"] and reason in event["text"]


LONG_ONES = {
    "problems": [*SUMS, LONG],
    "held_out": [{"question": "1 + 2 = ?", "answer": "3"}, LONG | {"question": "when? " * 40}],
    "talks": [talk(count) for count in (1, 2, 600, 5, 900, 700)],
}


def with_long_ones(files) -> list[str]:
    for name, rows in LONG_ONES.items():
        write_rows(files / f"{name}.jsonl", rows)
    keys = ("sources", "eval_sources", "trace_sources")
    sources = [f"--data.{key}={files}/{name}.jsonl" for key, name in zip(keys, LONG_ONES, strict=True)]
    words = "--data.eval_problems=2 --sft.steps=1 --sft.traces=8 --batch.row_length=96 --batch.rows=2"
    return [*TINY, *sources, *words.split(), f"--run_dir={files}/run"]


def test_a_dry_run_reads_the_data_and_names_what_is_left_out(files, capsys):
    words = [*with_long_ones(files), "--dry-run"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "5 problems of 5 rows; question from 'question', answer from 'answer'" in printed
    assert "problems.jsonl: prompts of " in printed and "1 over-long prompts dropped, 4 problems left" in printed
    assert "held out: prompts of" in printed and "1 over-long prompts dropped, 1 problems left" in printed
    assert "batch.row_length = 96: 3 of 6 do not fit and are left out, 3 are left" in printed
    assert "talks:3: conversation of" in printed
    message = said_by([*words, "--data.bad_rows=fail"], capsys)
    assert "prompt of" in message and "set data.bad_rows to drop" in message


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_run_counts_what_it_leaves_out(files, capsys):
    """In its metrics, its summary and its last lines; demonstrations may be longer than any rollout."""
    assert main([*with_long_ones(files), "--steps=1", "--log.console=plain"]) == 0
    printed = capsys.readouterr().out
    summary = json.loads((files / "run" / "summary.json").read_text())
    assert summary["left_out"] == {"problems": 1, "held_out": 1, "traces": 3}
    assert "left out, since they are too long: 1 problems, 1 held out, 3 traces" in printed
    counted = {"sft.jsonl": 3.0, "metrics.jsonl": 1.0}
    assert all(read_metrics(files / "run" / name)[-1]["data/left_out"] == count for name, count in counted.items())


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


def fine(problem, trajectories):
    """A pool that is idle at the end, as Python itself ends it."""
    return list(POOL.map(lambda t: float(t.sample % 2), trajectories))
'''


def ended(words, folder):
    """(status, errors, seconds) of a process that must end by itself."""
    (folder / "judges.py").write_text(JUDGES)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]), "JAX_PLATFORMS": "cpu"}
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    return done.returncode, done.stderr, time.monotonic() - begun


@pytest.mark.parametrize(
    ("judge", "left"),
    [
        pytest.param("waited", True, marks=pytest.mark.slow),
        ("given_up", True),
        pytest.param("fine", False, marks=pytest.mark.slow),
    ],
    ids=["abandoned", "of its own", "idle"],
)
def test_a_command_ends_whatever_a_judge_does(judge, left, tmp_path):
    _, errors, seconds = ended(["grpo_roc_jax", "check-reward", f"judges:{judge}"], tmp_path)
    assert ("left without threads that do not end" in errors) == left
    assert seconds < 60


@pytest.mark.slow
def test_a_run_ends_after_a_judge_that_was_given_up(tmp_path):
    run = tmp_path / "run"
    words = [*TINY, f"--run_dir={run}", "--steps=1", "--data.eval_problems=0", "--sharding.data=1"]
    words += ["--reward.functions=[{kind: function, path: 'judges:waited', timeout_s: 0.2}]"]
    status, errors, _ = ended(["grpo_roc_jax.train", *words], tmp_path)
    assert status == 0 and "left without threads" in errors
    assert (run / "summary.json").is_file() and (run / "checkpoints" / "step_00000001").is_dir()
