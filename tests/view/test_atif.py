"""Trajectories as ATIF: they come back exactly, the documents are valid, and those of other programs are read."""

import json
from dataclasses import replace

import numpy as np
import pytest

from grpo_roc_jax.commands import view
from grpo_roc_jax.record.trace import TraceRecord, TraceWriter
from grpo_roc_jax.types import Problem
from grpo_roc_jax.view.atif import from_atif, read_atif, to_atif
from tests.helpers.same import assert_same
from tests.helpers.samples import make_trajectory, make_verdict

PROBLEM = Problem("p:1", "37*58=?", "2146", "products", {"level": 1})
FOREIGN = {
    "schema_version": "ATIF-v1.8",
    "trajectory_id": "3-7-0",
    "agent": {"name": "x", "version": "1"},
    "steps": [
        {"step_id": 1, "source": "user", "message": "2+3?"},
        {
            "step_id": 2,
            "source": "agent",
            "message": "",
            "tool_calls": [{"tool_call_id": "c1", "function_name": "add", "arguments": {"a": 2}}],
            "observation": {"results": [{"source_call_id": "c1", "content": [{"type": "text", "text": "5"}]}]},
            "metrics": {"prompt_token_ids": [1, 2], "completion_token_ids": [8], "logprobs": [-0.5]},
            "llm_call_count": 1,
        },
        {
            "step_id": 3,
            "source": "agent",
            "message": "5",
            "metrics": {"prompt_token_ids": [1, 2, 8, 4], "completion_token_ids": [9, 7], "logprobs": [-1, -2]},
        },
    ],
    "final_metrics": {"extra": {"reward": 1.0}},
}


def records():
    rng = np.random.default_rng(0)
    for sample in range(4):
        trajectory = make_trajectory(rng, sample)
        advantages = np.where(trajectory.policy_mask, np.float32(0.5), np.float32(0))
        yield TraceRecord(3, 0, PROBLEM, trajectory, make_verdict(rng, trajectory), True, "kept", {}, advantages)
    begun = replace(trajectory, turns=(), policy_mask=trajectory.policy_mask & False, logprobs=trajectory.logprobs * 0)
    yield TraceRecord(3, -1, PROBLEM, begun, None, False, "removed: infrastructure")
    first = trajectory.turns[0].start  # a turn that begins with tokens that were given
    mask = trajectory.policy_mask & (np.arange(trajectory.length) != first)
    given = replace(trajectory, policy_mask=mask, logprobs=np.where(mask, trajectory.logprobs, np.float32(0)))
    yield TraceRecord(3, 0, PROBLEM, given, None, False, "given")


def test_steps_say_who_spoke_and_hold_ids_and_logprobs():
    record = list(records())[1]
    steps = to_atif(record)["steps"]
    assert [step["source"] for step in steps] == ["user", "agent", "agent", "agent", "user"]
    assert [step["step_id"] for step in steps] == [1, 2, 3, 4, 5] and steps[4]["message"] == "no"
    assert steps[0]["message"] == PROBLEM.prompt + " It rains."
    turn, entry = record.trajectory.turns[0], steps[1]
    assert entry["metrics"]["prompt_token_ids"] == record.trajectory.tokens[: turn.start].tolist()
    assert len(entry["metrics"]["logprobs"]) == turn.end - turn.start
    (result,) = entry["observation"]["results"]
    assert result["source_call_id"] == entry["tool_calls"][0]["tool_call_id"] and "tool_response" in result["content"]


def test_documents_are_valid_for_harbor():
    models = pytest.importorskip("harbor.models.trajectories", reason="needs the package harbor")
    for record in records():
        models.Trajectory.model_validate(to_atif(record))


def test_a_document_of_another_program_is_read_or_refused():
    record = from_atif(FOREIGN)
    trajectory = record.trajectory
    assert trajectory.tokens.tolist() == [1, 2, 8, 4, 9, 7] and trajectory.prompt_length == 2
    assert trajectory.policy_mask.tolist() == [False, False, True, False, True, True]
    assert trajectory.logprobs.tolist() == [0, 0, -0.5, 0, -1, -2] and record.verdict.reward == 1.0
    assert record.problem.prompt == "2+3?" and trajectory.results[0].observation == "5"
    other = json.loads(json.dumps(FOREIGN))
    other["steps"][1]["tool_calls"].insert(0, {"tool_call_id": "c0", "function_name": "look", "arguments": {}})
    (turn, _) = from_atif(other).trajectory.turns
    assert len(turn.calls) == 2 and not turn.results, "the result is not that of the first call"
    other["steps"][2]["metrics"]["prompt_token_ids"] = [1, 3, 8, 4]
    with pytest.raises(ValueError, match="3-7-0, step 3: its prompt must continue"):
        from_atif(other)
    with pytest.raises(ValueError, match=r"no step has metrics\.completion_token_ids"):
        from_atif({**FOREIGN, "steps": FOREIGN["steps"][:1]})


def test_view_writes_a_file_from_which_trajectories_come_back_and_shows_one(tmp_path, capsys):
    run, file = tmp_path / "run", tmp_path / "out.jsonl"
    written = list(records())
    TraceWriter(run).write(3, written)
    assert view.main([str(run), "--atif", str(file)]) == 0 and "6 of 6" in capsys.readouterr().out
    assert_same(list(read_atif(file)), written)
    ids = [json.loads(line)["trajectory_id"] for line in file.read_text(encoding="utf-8").splitlines()]
    assert ids == ["3-p:1-0", "3-p:1-1", "3-p:1-2", "3-p:1-3", "3-p:1-3/2", "3-p:1-3/3"]
    before = file.read_bytes()
    assert view.main([str(file), "--atif", str(file)]) == 2
    assert f"--atif {file} would overwrite" in capsys.readouterr().err and file.read_bytes() == before
    assert view.main([str(file), "--text", "--limit", "1"]) == 0
    assert "6 of 6" in (out := capsys.readouterr().out) and "p:1" in out
    file.write_text(json.dumps(FOREIGN), encoding="utf-8")
    assert view.main([str(file), "--text"]) == 0 and "3-7-0" in capsys.readouterr().out
    file.write_text("{}", encoding="utf-8")
    assert view.main([str(file), "--text"]) == 2
