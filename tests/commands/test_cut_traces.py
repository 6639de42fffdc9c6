"""States of recorded trajectories become problems that a run can train on."""

import json
from dataclasses import replace

import pytest

from grpo_roc_jax.commands import cut_traces
from grpo_roc_jax.data.problems import load_problems
from grpo_roc_jax.record.trace import TraceRecord, TraceWriter
from grpo_roc_jax.types import Condition, Problem, ToolResult, Turn
from tests.helpers.method_groups import make_trajectory

PROBLEM = Problem("p", "6*7?", "42", "math", {"level": 2, "ground_truth": "43", "prompt": "other"})


def record(*texts: str, **changes) -> TraceRecord:
    results = (ToolResult("ok", observation="42"),)
    turns = tuple(Turn(0, 1, text, (), results if i + 1 < len(texts) else ()) for i, text in enumerate(texts))
    return TraceRecord(1, 0, PROBLEM, replace(make_trajectory(), turns=turns, **changes), None, True, "kept")


def test_states():
    """Each different state before a later turn, once; hinted trajectories had another prompt."""
    some = [record("run", "done"), record("run", "again", "done"), record("done")]
    hinted = record("x", "y", condition=Condition("hint", 1))
    rows = cut_traces.states([*some, hinted], "So far:\n")
    assert [row["prompt"] for row in rows] == ["6*7?\nSo far:\nrun\n42\n", "6*7?\nSo far:\nrun\n42\nagain\n42\n"]
    assert {row["answer"] for row in rows} == {"42"}


def test_a_state_is_what_the_policy_saw():
    """A cut observation as it was shown, and what an environment said."""
    shown = (ToolResult("ok", observation="x" * 100, shown="x" * 10 + " ..."),)
    turns = (Turn(0, 1, "50", (), (), reply="lower"), Turn(1, 2, "look", (), shown), Turn(2, 3, "42"))
    (first, second) = cut_traces.states(
        [replace(record("a"), trajectory=replace(make_trajectory(), turns=turns))], "So far:\n"
    )
    assert first["prompt"] == "6*7?\nSo far:\n50\nlower\n"
    assert second["prompt"] == "6*7?\nSo far:\n50\nlower\nlook\nxxxxxxxxxx ...\n"


def test_the_file_can_be_trained_on(tmp_path, capsys):
    for name, texts in (("long", ("run", "done")), ("short", ("done",))):
        TraceWriter(tmp_path / name).write(1, [record(*texts)])
    out = tmp_path / "states.jsonl"
    assert cut_traces.main([str(tmp_path / "long"), "--out", str(out)]) == 0
    assert "1 states in" in capsys.readouterr().out
    assert json.loads(out.read_text())["answer"] == "42"
    (problem,), _ = load_problems(out)
    assert (problem.answer, problem.source, problem.extra) == ("42", "math", {"level": 2})
    assert problem.prompt == "6*7?\nSo far:\nrun\n42"
    assert cut_traces.main([str(tmp_path / "short"), "--out", str(out)]) == 2
    assert "short records no trajectory with two turns" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cut_traces.main(["--out", str(out)])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "--step", "9"], "run has no trajectories of step 9; it has steps 1 to 1"),
        (["missing"], "missing: no such directory"),
        (["."], "has no trajectories of steps"),
    ],
)
def test_what_cannot_be_cut_is_named(words, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    TraceWriter(tmp_path / "run").write(1, [record("run", "done")])
    assert cut_traces.main([*words, "--out", "states.jsonl"]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "states.jsonl").exists()
