"""The index says what the log holds and is made again where it does not; trajectories as ATIF come back exactly."""

import json
from dataclasses import replace

import numpy as np
import pytest

import grpo_roc_jax as g
from grpo_roc_jax.commands import view
from grpo_roc_jax.record import index, trace
from grpo_roc_jax.view.answers import Runs
from grpo_roc_jax.view.atif import from_atif, read_atif
from tests.helpers.same import assert_same
from tests.helpers.samples import make_group, make_trajectory, make_verdict


@pytest.fixture
def log(tmp_path):
    records = trace.eval_records(1, [make_group(seed, 6) for seed in (1, 2)])
    records += trace.removed_records(1, [(records[0].problem, records[0].trajectory)])
    records[2] = replace(records[2], penalties={"total": 0.5, "error": 0.25, "format": 0.25}, kept=True)
    trace.TraceWriter(tmp_path).write(1, records)
    return trace.trace_files(tmp_path)[0][0]


def test_a_row_says_what_the_line_holds(tmp_path, log):
    content = index.index_file(log).read_bytes()
    rows, records = list(index.rows(content)), list(trace.read_trace(tmp_path))
    assert len(rows) == len(records) == 13
    for row, record, line in zip(rows, records, log.read_bytes().splitlines(True), strict=True):
        trajectory, verdict = record.trajectory, record.verdict
        assert log.read_bytes()[row["offset"] :].startswith(line)
        assert row["problem"] == [record.problem.uid, record.problem.source, record.problem.prompt, "7"]
        assert row["tokens"] == trajectory.length - trajectory.prompt_length
        assert row["sampled"] == trajectory.policy_mask.sum()
        assert (row["turns"], row["stop"], row["why"]) == (len(trajectory.turns), trajectory.stop, record.why)
        assert row["status"] == (verdict.status if verdict else "unscored")
        kinds = [index.OUTCOMES[ord(letter) - 97] for letter in row["calls"].replace(" ", "")]
        assert kinds == [result.kind for result in trajectory.results]
    assert [i for i, row in enumerate(rows) if row["kept"]] == [2] and rows[2]["penalties"] == [0.5, 0.25, 0.25]
    assert rows[0]["penalties"] is None and rows[0]["calls"].count(" ") == 1
    assert rows[12]["reward"] is None and rows[2]["reward"] == records[2].verdict.reward


def test_an_index_of_another_content_is_made_again_and_a_folder_that_cannot_be_written_is_read(tmp_path, log):
    written = index.index_file(log).read_bytes()
    index.index_file(log).unlink()
    assert index.load(log, "step", 1) == written == index.index_file(log).read_bytes()
    lines = log.read_bytes().splitlines(True)
    log.write_bytes(b"".join(lines[:4]))
    assert len(list(index.rows(index.load(log, "step", 1)))) == 4
    index.index_file(log).write_bytes(b"{")
    assert json.loads(index.load(log, "step", 1))["count"] == 4
    expected = index.load(log, "step", 1)
    index.index_file(log).unlink()
    index.folder_of(log).rmdir()
    index.folder_of(log).write_text("in the way")
    assert index.load(log, "step", 1) == expected
    assert trace.TraceWriter(tmp_path).write(2, trace.eval_records(2, [make_group(3, 2)]))
    assert Runs([str(tmp_path)]).trajectory(0, ("step", 2), 1)["sample"] == 1


@pytest.mark.parametrize("head", [b"\0" * 40, b"[1]"])
def test_a_line_that_cannot_be_read_costs_that_line(tmp_path, log, caplog, head):
    """As a full disk, a copy that was cut or a power loss leaves it. The rows after it keep their places."""
    lines = log.read_bytes().splitlines(True)
    written = list(index.rows(index.load(log, "step", 1)))
    log.write_bytes(b"".join([*lines[:4], head + b"\n", *lines[5:-1], lines[-1][:-200]]))
    assert not index.intact(log)
    content = index.load(log, "step", 1)
    rows = list(index.rows(content))
    assert [row | {"offset": 0} for row in rows] == [row | {"offset": 0} for row in written[:4] + written[5:12]]
    assert json.loads(content)["unreadable"] == [5, 13] and json.loads(content)["count"] == 11
    assert index.load(log, "step", 1) == content and not index.intact(log), "the log is damaged, with an index too"
    assert caplog.messages == [f"{log}, lines 5, 13: cannot be read and are left out"], "once"
    assert Runs([str(tmp_path)]).trajectory(0, ("step", 1), 4)["sample"] == rows[4]["sample"]
    assert Runs([str(tmp_path)]).search(0, "", [("step", 1)]) == {"step.1": list(range(11))}


def test_the_text_of_tokens_is_written_once_and_keeps_spaces(tmp_path):
    words, file = ["", "▁the", "▁cat", "▁sat"], tmp_path / "pieces.jsonl"
    pieces = index.Pieces(tmp_path, lambda ids: "".join(words[i] for i in ids).replace("▁", " ").lstrip())
    pieces.add([np.array([1, 2, 1], np.int32)])
    before = file.read_bytes()
    pieces.add([np.array([2], np.int32)])
    assert file.read_bytes() == before
    file.write_bytes(before + b'{"3": "half')
    assert index.read_pieces(tmp_path) == {1: " the", 2: " cat"} and index.read_pieces(tmp_path / "no") == {}
    pieces.add([np.array([3], np.int32)])  # a line that a kill has cut takes none of those after it along
    assert index.read_pieces(tmp_path) == {1: " the", 2: " cat", 3: " sat"}


PROBLEM = g.Problem("p:1", "37*58=?", "2146", "products", {"level": 1})


def records():
    rng = np.random.default_rng(0)
    for sample in range(4):
        trajectory = make_trajectory(rng, sample)
        advantages = trajectory.policy_mask * np.float32(0.5)
        yield trace.TraceRecord(3, 0, PROBLEM, trajectory, make_verdict(rng, trajectory), True, "kept", {}, advantages)
    begun = replace(trajectory, turns=(), policy_mask=trajectory.policy_mask & False, logprobs=trajectory.logprobs * 0)
    yield trace.TraceRecord(3, -1, PROBLEM, begun, None, False, "removed: infrastructure")
    first = trajectory.turns[0].start  # a turn that begins with tokens that were given
    mask = trajectory.policy_mask & (np.arange(trajectory.length) != first)
    given = replace(trajectory, policy_mask=mask, logprobs=mask * trajectory.logprobs)
    yield trace.TraceRecord(3, 0, PROBLEM, given, None, False, "given")


def test_a_document_of_another_program_is_read_or_refused():
    call = {"tool_call_id": "c1", "function_name": "add", "arguments": {"a": 2}}
    result = {"source_call_id": "c1", "content": [{"type": "text", "text": "5"}]}
    ids = {"prompt_token_ids": [1, 2], "completion_token_ids": [8], "logprobs": [-0.5]}
    more = {"prompt_token_ids": [1, 2, 8, 4], "completion_token_ids": [9, 7], "logprobs": [-1, -2]}
    asked = {"tool_calls": [call], "observation": {"results": [result]}, "metrics": ids}
    steps = [{"message": "2+3?"}, {"message": "", **asked}, {"message": "5", "metrics": more}]
    steps = [{"source": "agent" if i > 1 else "user", "step_id": i} | step for i, step in enumerate(steps, 1)]
    document = {"schema_version": "ATIF-v1.8", "trajectory_id": "3-7-0", "final_metrics": {"extra": {"reward": 1.0}}}
    record = from_atif(document := document | {"steps": steps})
    trajectory = record.trajectory
    assert trajectory.tokens.tolist() == [1, 2, 8, 4, 9, 7] and trajectory.prompt_length == 2
    assert trajectory.policy_mask.tolist() == [False, False, True, False, True, True]
    assert trajectory.logprobs.tolist() == [0, 0, -0.5, 0, -1, -2] and record.verdict.reward == 1.0
    assert record.problem.prompt == "2+3?" and trajectory.results[0].observation == "5"
    more["prompt_token_ids"][1] = 3
    with pytest.raises(ValueError, match="3-7-0, step 3: its prompt must continue"):
        from_atif(document)


def test_view_writes_a_file_from_which_trajectories_come_back_and_shows_one(tmp_path, capsys):
    run, file, written = tmp_path / "run", tmp_path / "out.jsonl", list(records())
    trace.TraceWriter(run).write(3, written)
    assert view.main([str(run), "--atif", str(file)]) == 0 and "6 of 6" in capsys.readouterr().out
    assert_same(list(read_atif(file)), written)
    documents = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [document["trajectory_id"] for document in documents[2:]] == ["3-p:1-2", "3-p:1-3", "3-p:1-3/2", "3-p:1-3/3"]
    steps, trajectory = documents[1]["steps"], written[1].trajectory
    assert [step["source"] for step in steps] == ["user", "agent", "agent", "agent", "user"]
    assert steps[1]["metrics"]["prompt_token_ids"] == trajectory.tokens[: trajectory.turns[0].start].tolist()
    assert view.main([str(file), "--atif", str(file)]) == 2
    assert f"--atif {file} would overwrite" in capsys.readouterr().err
    assert view.main([str(file), "--text", "--limit", "1"]) == 0
    assert "6 of 6" in (out := capsys.readouterr().out) and "p:1" in out
