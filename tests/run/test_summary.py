"""How long a run takes, and its closing figures: means over what was finite, a gap that cannot hide."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_roc_jax.__main__ import COMMANDS
from grpo_roc_jax.config import Config, read_config
from grpo_roc_jax.process.points import injected
from grpo_roc_jax.process.progress import narrated, phase
from grpo_roc_jax.record import live
from grpo_roc_jax.record.loggers import format_row
from grpo_roc_jax.record.run_dir import Start
from grpo_roc_jax.record.trace import TraceRecord
from grpo_roc_jax.run import durations
from grpo_roc_jax.run.policy import parameter_count
from grpo_roc_jax.run.session import plan_line
from grpo_roc_jax.run.statistics import rollout_metrics
from grpo_roc_jax.run.summary import next_lines, one_of, summarize_rows, summary_lines, write_summary
from grpo_roc_jax.types import Problem, ToolCall, ToolResult, Turn
from grpo_roc_jax.view.curves import last_third
from tests.helpers.method_groups import make_group, make_trajectory, make_verdict

ERRORS, LENGTH, GAP = "rollout/tool_error_in_correct", "rollout/length", "loss/logprob_gap_max"


def test_means_and_extremes():
    """A gap that was not finite is not passed over."""
    rewards, gaps = [0.5, None, 0.7], [1e-6, 3e-6, 2e-6]
    rows = [{"step": i, "rollout/reward": r, GAP: gap} for i, (r, gap) in enumerate(zip(rewards, gaps, strict=True), 1)]
    summary = summarize_rows([{"step": 0, "eval/accuracy": 0.1}, *rows])
    assert summary["reward_last_10"] == pytest.approx(0.6) and summary["max_logprob_gap"] == 3e-6
    assert summarize_rows([*rows, {"step": 4, GAP: None}])["max_logprob_gap"] is None


def test_a_step_without_a_right_rollout_is_in_no_mean_of_failing_calls():
    """It has no share of failing calls. As 0 it would look like a policy that never fails."""
    right, wrong = (rollout_metrics([make_group(rewards, errors=[1, 0])], {}) for rewards in ([1, 0], [0, 0]))
    rows = [{"step": i + 1, "time/step_s": 1.0} | row for i, row in enumerate([right] * 5 + [wrong])]
    assert summarize_rows(rows)["tool_error_in_correct"] == last_third(rows, ERRORS) == right[ERRORS] == 1.0
    assert "tool errors in correct -" in format_row(6, wrong)
    assert ("failing calls", "- in correct rollouts") in live.rows(live.after(live.Board(9), 6, rows[-1]))


def test_the_last_third_is_that_of_the_figures_whatever_steps_have_a_metric():
    for steps in range(1, 12):
        bare = [{"step": i, LENGTH: 9.0 * i} for i in range(steps + 1)]
        rows = [row | ({ERRORS: i / 99} if i % 3 or i == steps else {}) for i, row in enumerate(bare)]
        summary = summarize_rows(rows)
        assert summary["tool_error_in_correct"] == last_third(rows, ERRORS)
        assert summary["mean_length"] == last_third(rows, LENGTH) == 9.0 * (steps - (max(1, round(steps / 3)) - 1) / 2)
        assert summary["steps"] == summarize_rows(bare)["steps"] == steps


def test_nothing_that_the_end_of_a_run_meets_fails_it(tmp_path, caplog):
    """No step, an accuracy without a scored rollout, no metrics, and a disk that is full."""
    (tmp_path / "metrics.jsonl").write_text("")
    measured = {"accuracy_before": math.nan, "accuracy_after": math.inf, "seconds": 1.0, "device": "none"}
    summary = write_summary(tmp_path, Config(), **measured)
    written = json.loads((tmp_path / "summary.json").read_text())
    for name in ("accuracy_before", "accuracy_after", "reward_last_10"):
        assert summary[name] is None and written[name] is None
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert "accuracy on held-out problems: - -> -" in summary_lines(tmp_path, summary)
    (tmp_path / "metrics.jsonl").unlink()
    with injected("summary=enospc"):
        summary = write_summary(tmp_path, Config(), **measured)
    assert "No space left" in caplog.text and summary_lines(tmp_path, summary)


def test_the_end_of_a_run_names_three_things_to_do_next(tmp_path):
    run = tmp_path / "a run"
    (run / "batches").mkdir(parents=True)

    def offered(*arguments):
        head, *lines = next_lines(run, *arguments)
        assert head == "next:" and len(lines) == 3
        assert all("/a run'" in line or "/a run/" in line or " doctor " in line for line in lines)  # quoted
        commands = [line.split()[:4] for line in lines if not line.strip().startswith("the same command")]
        assert all(words[:3] == ["python", "-m", "grpo_roc_jax"] and words[3] in COMMANDS for words in commands)
        return [words[3] for words in commands]

    summary = {"steps": 3, "accuracy_after": 0.5}
    assert offered(summary) == ["view", "chat", "evaluate"] and offered(None) == ["view", "chat"]
    assert offered(summary | {"accuracy_after": None}) == ["view", "chat", "plot"]
    assert "train" in next_lines(run, summary | {"steps": 0})[1] and "--resume auto" in next_lines(run, None)[1]
    assert f"--run_dir '{run}' --resume auto" in next_lines(run, None, named=str(run))[1]
    for stopped in (None, summary | {"steps": 0}):  # which a start elsewhere continues too
        assert "--run_dir gs://bucket/run --resume auto" in next_lines(run, stopped, named="gs://bucket/run")[1]
    assert offered(None, 3) == ["view", "view"] and offered(None, 5)[0] == "view" and offered(None, 4)[1] == "plot"
    (run / "batches" / "step_00000004.npz").touch()
    assert "replay" in next_lines(run, None, 4)[3] and "step_00000004.npz" in next_lines(run, None, 4)[3]
    note = {"event": "entropy_low", "action": "note", "text": "low"}
    (run / "events.jsonl").write_text("".join(json.dumps({"step": step, **note}) + "\n" for step in (4, 9)))
    assert "the last of 2 alarms is entropy_low at step 9" in next_lines(run, summary)[1]


def test_the_trajectory_shown_is_one_in_which_the_tool_was_needed():
    """A success with a working call, of a problem that nobody solved without one; only without any, another one."""
    made = trace_records()
    for step in range(40):
        assert one_of(made, step, str).verdict.answer == "needed"
        assert one_of([row for row in made if row.group != 1], step, str).verdict.answer in ("guessable", "spared")
        for names, shown in ((("wrong call", "plain", "in vain"), ("wrong call", "in vain")), (("plain",), ("plain",))):
            rest = [row for row in made if row.verdict.answer in names]
            assert one_of(rest, step, str).verdict.answer in shown
    assert one_of([], 1, str) is None
    assert {one_of(made, step, str).trajectory.sample for step in range(40)} == {0, 3}, "not always the same"


def trace_records():
    """Three groups: one that is solved without a call too, one that needs it, one that nobody solves."""
    call, failing = ToolCall("python", {}, "{}"), {"+": ToolResult("ok"), "-": ToolResult("exception")}
    rows = [[(1, "+", "guessable"), (1, "", "guessed"), (1, "-+", "spared")]]
    rows += [[(1, "-+", "needed"), (0, "", "plain"), (1, "-", "in vain"), (1, "+", "needed")]]
    rows += [[(0, "+", "wrong call"), (0, "", "plain")]]

    def record(group, sample, right, calls, name):
        results = tuple(failing[each] for each in calls)
        turn = Turn(2, 4, "text", (call,) * len(results), results)
        rollout = replace(make_trajectory(2, sample=sample), turns=(turn,))
        verdict = replace(make_verdict(right, calls=len(calls), errors=calls.count("-")), answer=name)
        return TraceRecord(1, group, Problem(f"p{group}", "q", "a", "s"), rollout, verdict, True, "kept")

    return [record(group, sample, *row) for group, some in enumerate(rows) for sample, row in enumerate(some)]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def toy(*words):
    return read_config("toy.yaml", "--model.vocab_size=64", *words)


def test_the_arithmetic_by_hand():
    config = toy("--group.problems=2", "--group.size=8", "--rollout.slots=64", "--sft.traces=10", "--eval.samples=2")
    n, usable = parameter_count(config.model), 0.4 * 96 / 400 * 1e9
    seconds = durations.estimated(config, config.model, 16, 1e9)  # prompt and response: 24 + 120 tokens, half is 72
    assert seconds["supervised stage"] == pytest.approx(6 * n * 10 * 72 / usable)
    decoding = 60 * (0.0015 + 2 * n * 32 / usable)  # 32 rollouts at once, and 32 of an evaluation
    assert seconds["training"] == pytest.approx(decoding + 6 * n * 16 * 72 / usable)
    assert seconds["evaluation"] == pytest.approx(decoding)
    assert durations.estimated(config, config.model, 0, 1e9)["evaluation"] == 0
    many = durations.estimated(toy("--rollout.slots=64"), config.model, 0, 1e12)  # 256 rollouts take turns
    assert many["training"] > 4 * durations.estimated(config, config.model, 0, 1e12)["training"]


@pytest.mark.usefixtures("cache")
def test_a_run_leaves_its_seconds_for_the_next_one_with_the_same_settings():
    lines = []
    for config in (toy(), toy("--seed=3", "--steps=5", "--sft.steps=7", "--run_dir=other")):
        with narrated(lines.append) as narrator, durations.remembered(config, narrator):
            usual = dict(narrator.usual)
            with phase("training", steps=3) as training:
                training.step(3)
    assert usual.keys() == {"training"} and usual["training"] > 0
    with narrated(lines.append) as narrator:  # a stage after another, in one process
        narrator.measured["training"] = 12.5
        with durations.remembered(toy("--group.size=5"), narrator):
            pass
    assert durations.read_timings(durations.timings_file(toy("--group.size=5"))) == {}
    assert durations.read_timings(durations.timings_file(toy("--group.size=4"))) == {}
    config = toy()
    seconds, source = durations.expected(config, config.model, 12, {"training": 2.0, "evaluation on 12 problems": 90.0})
    assert seconds == {"training": 2.0, "evaluation": 90.0} and "earlier run" in source
    assert plan_line(config, Start("fresh"), config.steps, 12, Path("runs/a"), seconds) == (
        "plan: supervised stage, 400 steps; then evaluation on 12 problems, about 90 s; then 30 steps of 256 "
        "rollouts, about 60 s; then evaluation at the end; written to runs/a"
    )
    assert plan_line(config, Start("fresh"), 0, 0, Path("a"), {}) == "plan: supervised stage, 400 steps; written to a"
    assert "plan: nothing is left" in plan_line(config, Start("resume", 32), -2, 12, Path("runs/a"), seconds)


def test_a_cache_that_holds_something_else_or_cannot_be_written_is_left(tmp_path, monkeypatch):
    (tmp_path / "file").write_text('{"training": "x", "sampling": -1, "update": 2}')
    assert durations.read_timings(tmp_path / "file") == {"update": 2.0}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with narrated(lambda line: None) as narrator, durations.remembered(toy(), narrator):
        pass
