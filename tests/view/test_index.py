"""The index says what the log holds, is made again where it does not, and costs a run nothing."""

import dataclasses
import json

import numpy as np
import pytest

from grpo_roc_jax.record import index, trace
from grpo_roc_jax.view.answers import Runs
from tests.helpers.samples import make_group


@pytest.fixture
def log(tmp_path):
    """The log of a run's only step."""
    records = trace.eval_records(1, [make_group(seed, 6) for seed in (1, 2)])
    records += trace.removed_records(1, [(records[0].problem, records[0].trajectory)])
    records[2] = dataclasses.replace(records[2], penalties={"total": 0.5, "error": 0.25, "format": 0.25}, kept=True)
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
    line = json.loads(log.read_bytes().splitlines()[2])
    assert index.row(line | {"verdict": line["verdict"] | {"reward": float("nan")}})["reward"] is None


def test_the_writer_and_a_reader_make_the_same_index(log):
    written = index.index_file(log).read_bytes()
    index.index_file(log).unlink()
    assert index.load(log, "step", 1) == written == index.index_file(log).read_bytes()


@pytest.mark.parametrize("head", [b"", b"\0" * 40, b'{"step": 1', b"[1]", b"\xff"])
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
    text = log.read_bytes()
    assert all(text[row["offset"] :].startswith(line) for row, line in zip(rows, lines[:4] + lines[5:-1], strict=True))
    assert index.load(log, "step", 1) == content and not index.intact(log), "the log is damaged, with an index too"
    assert caplog.messages == [f"{log}, lines 5, 13: cannot be read and are left out"], "once"
    assert Runs([str(tmp_path)]).trajectory(0, ("step", 1), 4)["sample"] == rows[4]["sample"]
    assert Runs([str(tmp_path)]).search(0, "", [("step", 1)]) == {"step.1": list(range(11))}


def test_an_index_of_another_content_is_made_again(log):
    lines = log.read_bytes().splitlines(True)
    log.write_bytes(b"".join(lines[:4]))
    assert len(list(index.rows(index.load(log, "step", 1)))) == 4
    log.write_bytes(b"".join(lines[:4]).replace(b'"kept": false', b'"kept": true ', 1))  # of the same size
    assert len(list(index.rows(index.load(log, "step", 1)))) == 4
    index.index_file(log).write_bytes(b"{")
    assert json.loads(index.load(log, "step", 1))["count"] == 4


def test_a_folder_that_cannot_be_written_is_read(tmp_path, log):
    expected = index.load(log, "step", 1)
    index.index_file(log).unlink()
    index.folder_of(log).rmdir()
    index.folder_of(log).write_text("in the way")
    assert index.load(log, "step", 1) == expected
    assert trace.TraceWriter(tmp_path).write(2, trace.eval_records(2, [make_group(3, 2)]))
    assert Runs([str(tmp_path)]).trajectory(0, ("step", 2), 1)["sample"] == 1


def test_removed_steps_lose_their_index(tmp_path, log):
    records = trace.eval_records(1, [make_group(3, 2)])
    trace.TraceWriter(tmp_path).write(5, records)
    trace.TraceWriter(tmp_path).write(1, records)
    assert [path.name for path in index.folder_of(log).iterdir()] == ["step_00000001.json"]


def test_the_text_of_tokens_is_written_once_and_keeps_spaces(tmp_path):
    words = ["", "▁the", "▁cat"]
    pieces = index.Pieces(tmp_path, lambda ids: "".join(words[i] for i in ids).replace("▁", " ").lstrip())
    pieces.add([np.array([1, 2, 1], np.int32)])
    size = (tmp_path / "pieces.jsonl").stat().st_size
    pieces.add([np.array([2], np.int32)])
    assert (tmp_path / "pieces.jsonl").stat().st_size == size
    assert index.read_pieces(tmp_path) == {1: " the", 2: " cat"}
    with open(tmp_path / "pieces.jsonl", "a") as file:
        file.write('{"3": "half')
    assert index.read_pieces(tmp_path) == {1: " the", 2: " cat"} and index.read_pieces(tmp_path / "no") == {}
    words.append("▁sat")
    pieces.add([np.array([3], np.int32)])  # a line that a kill has cut takes none of those after it along
    assert index.read_pieces(tmp_path) == {1: " the", 2: " cat", 3: " sat"}
