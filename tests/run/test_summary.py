"""The closing figures: means over what was finite, a gap that cannot hide, a file that is whole or not there."""

import json
import math
from dataclasses import replace

import pytest

from grpo_roc_jax.__main__ import COMMANDS
from grpo_roc_jax.config import Config
from grpo_roc_jax.process.points import injected
from grpo_roc_jax.record import live
from grpo_roc_jax.record.loggers import format_row
from grpo_roc_jax.record.trace import TraceRecord
from grpo_roc_jax.run.statistics import rollout_metrics
from grpo_roc_jax.run.summary import next_lines, one_of, summarize_rows, summary_lines, write_summary
from grpo_roc_jax.types import Problem, ToolCall, ToolResult, Turn
from grpo_roc_jax.view.curves import last_third
from tests.helpers.method_groups import make_group, make_trajectory, make_verdict

ROWS = [
    {"step": 0, "eval/accuracy": 0.1},
    {"step": 1, "rollout/reward": 0.5, "loss/logprob_gap_max": 1e-6, "rollout/tool_error_in_correct": 0.4},
    {"step": 2, "rollout/reward": None, "loss/logprob_gap_max": 3e-6, "rollout/tool_error_in_correct": 0.2},
    {"step": 3, "rollout/reward": 0.7, "loss/logprob_gap_max": 2e-6, "rollout/tool_error_in_correct": 0.1},
]


def test_means_and_extremes():
    """A gap that was not finite is not passed over."""
    summary = summarize_rows(ROWS)
    assert summary["reward_last_10"] == pytest.approx(0.6)
    assert summary["tool_error_in_correct"] == pytest.approx(0.1)  # the last third of three steps is one step
    assert summary["max_logprob_gap"] == 3e-6
    assert summarize_rows([*ROWS, {"step": 4, "loss/logprob_gap_max": None}])["max_logprob_gap"] is None


def test_a_step_without_a_right_rollout_is_in_no_mean_of_failing_calls():
    """It has no share of failing calls. As 0 it would look like a policy that never fails."""
    right, wrong = (rollout_metrics([make_group(rewards, errors=[1, 0])], {}) for rewards in ([1, 0], [0, 0]))
    rows = [{"step": i + 1, "time/step_s": 1.0} | row for i, row in enumerate([right] * 5 + [wrong])]
    errors = "rollout/tool_error_in_correct"
    assert summarize_rows(rows)["tool_error_in_correct"] == last_third(rows, errors) == right[errors] == 1.0
    assert "tool errors in correct -" in format_row(6, wrong)
    assert ("failing calls", "- in correct rollouts") in live.rows(live.after(live.Board(9), 6, rows[-1]))


def test_the_last_third_is_that_of_the_figures_whatever_steps_have_a_metric():
    errors, length = "rollout/tool_error_in_correct", "rollout/length"
    for steps in range(1, 12):
        bare = [{"step": i, length: 9.0 * i} for i in range(steps + 1)]
        rows = [row | ({errors: i / 99} if i % 3 or i == steps else {}) for i, row in enumerate(bare)]
        summary = summarize_rows(rows)
        assert summary["tool_error_in_correct"] == last_third(rows, errors)
        assert summary["mean_length"] == last_third(rows, length) == 9.0 * (steps - (max(1, round(steps / 3)) - 1) / 2)
        assert summary["steps"] == summarize_rows(bare)["steps"] == steps


def test_a_run_without_steps_has_a_summary(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    summary = write_summary(tmp_path, Config(), accuracy_before=None, accuracy_after=None, seconds=1.0, device="none")
    assert json.loads((tmp_path / "summary.json").read_text())["reward_last_10"] is None
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert "accuracy on held-out problems: - -> -" in summary_lines(tmp_path, summary)


def test_nothing_that_the_end_of_a_run_meets_fails_it(tmp_path, caplog):
    """An accuracy without a scored rollout, no metrics, and a disk that is full."""
    measured = {"accuracy_before": math.nan, "accuracy_after": math.inf, "seconds": 1.0, "device": "none"}
    assert write_summary(tmp_path, Config(), **measured)["accuracy_before"] is None
    assert json.loads((tmp_path / "summary.json").read_text())["accuracy_after"] is None

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
    assert offered(summary) == ["view", "chat", "evaluate"]
    assert offered(summary | {"accuracy_after": None}) == ["view", "chat", "plot"]
    assert "train" in next_lines(run, summary | {"steps": 0})[1]
    assert "--resume auto" in next_lines(run, None)[1] and offered(None) == ["view", "chat"]
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
        rest = [row for row in made if row.verdict.answer in ("wrong call", "plain", "in vain")]
        assert one_of(rest, step, str).verdict.answer in ("wrong call", "in vain")
        plain = [row for row in made if row.verdict.answer == "plain"]
        assert one_of(plain, step, str).verdict.answer == "plain"
    assert one_of([], 1, str) is None
    assert {one_of(made, step, str).trajectory.sample for step in range(40)} == {0, 3}  # not always the same


def trace_records():
    """Three groups: one that is solved without a call too, one that needs it, one that nobody solves."""
    call, fine, failed = ToolCall("python", {}, "{}"), ToolResult("ok"), ToolResult("exception")

    def record(group, sample, status, results, name):
        errors = sum(result.counts_as_error for result in results)
        turn = Turn(2, 4, "text", (call,) * len(results), results)
        rollout = replace(make_trajectory(2, sample=sample), turns=(turn,))
        verdict = make_verdict(status == "correct", calls=len(results), errors=errors)
        problem = Problem(f"p{group}", "q", "a", "s")
        return TraceRecord(1, group, problem, rollout, replace(verdict, answer=name), True, "kept")

    return [
        record(0, 0, "correct", (fine,), "guessable"),
        record(0, 1, "correct", (), "guessed"),
        record(0, 2, "correct", (failed, fine), "spared"),
        record(1, 0, "correct", (failed, fine), "needed"),
        record(1, 1, "wrong", (), "plain"),
        record(1, 2, "correct", (failed,), "in vain"),
        record(1, 3, "correct", (fine,), "needed"),
        record(2, 0, "wrong", (fine,), "wrong call"),
        record(2, 1, "wrong", (), "plain"),
    ]
