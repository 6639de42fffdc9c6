"""`check-data`, `difficulty`, `cut-traces` and `check-reward`; no command writes its results over what it reads."""

import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import grpo_roc_jax as g
from grpo_roc_jax.__main__ import main as commands
from grpo_roc_jax.commands import cut_traces, difficulty
from grpo_roc_jax.commands.check_reward import check_reward, main
from grpo_roc_jax.data.config import DataConfig
from grpo_roc_jax.data.problems import load_problems
from grpo_roc_jax.process.outputs import output_file, write_output
from grpo_roc_jax.record.trace import TraceRecord, TraceWriter
from grpo_roc_jax.run.components import check_components, make_registry
from grpo_roc_jax.run.start import problem_stream
from grpo_roc_jax.types import Condition, Problem, ToolResult, Turn
from tests.helpers import demo
from tests.helpers.knobs import write_lines
from tests.helpers.method_groups import make_group, make_trajectory


def test_problems_are_shown_as_they_will_be_read_and_fit_the_limits_that_are_named(tmp_path, capsys, monkeypatch):
    """Conversations are rendered whole."""
    monkeypatch.chdir(tmp_path)

    def check(name, rows):
        write_lines(tmp_path / name, rows)
        assert commands(["check-data", name, "toy.yaml"]) == 0
        return capsys.readouterr().out

    rows = [{"question": f"How much is {i} + {i}? " + "Think. " * i, "answer": i, "info": {"a": 1}} for i in range(30)]
    printed = check("own.jsonl", [*rows, {"question": "no answer"}])
    assert "  answer: int, in 30 of 31 rows" in printed and "  info: dict, in 30 of 31 rows; info.a" in printed
    assert "30 problems of 31 rows; question from 'question', answer from 'answer'; 1 bad" in printed
    assert "own.jsonl:31: column 'answer' is missing" in printed
    assert printed.count("How much is") == printed.count("---- own:") == 3 and "<|im_start|>" in printed
    limits = re.search("^limits under which all of it fits: (.*)$", printed, re.M)[1].split()
    config = g.read_config("toy.yaml", "--data.sources=own.jsonl", "--data.eval_problems=0", *limits)
    stream = problem_stream(config, check_components(config, make_registry(config))[1])
    assert not any("over-long" in note for note in stream.notes)

    asked = {"role": "user", "content": "q"}
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    calls = [{"role": "assistant", "content": "", "tool_calls": [call, call]}, *[{"role": "tool", "content": "1"}] * 2]
    long, ok = ({"role": "assistant", "content": text} for text in ("because " * 2000, "ok"))
    printed = check("talk.jsonl", [{"messages": [asked, *said]} for said in ([ok], [long], [*calls, ok])])
    assert re.search(r"batch\.row_length = \d+: 1 of 3 do not fit \(data\.bad_rows\)\n  talk:2: \d+ tokens\n", printed)
    assert "3 problems of 3 rows; question from 'messages'" in printed and printed.count("---- talk:") == 3
    named = "text.max_calls_per_turn = 1: 1 of 3 do not fit (data.bad_rows)\n  talk:3: 2 calls in a turn\n"
    assert f"most calls in a turn: 2\n{named}" in printed and printed.endswith(" --text.max_calls_per_turn 2\n")
    for words in (["none.jsonl"], ["own.jsonl", "--data.promt_column", "text"]):
        assert commands(["check-data", *words]) == 2 and "Traceback" not in capsys.readouterr().err


def test_problems_within_the_bounds_are_kept_with_their_rates_and_can_be_read_again(tmp_path):
    rates = {"a": [True] * 4, "b": [False] * 4, "c": [True, False, False, False], "d": []}
    extra = {"level": 2}
    groups = [replace(make_group(y), problem=Problem(x, f"what is {x}?", x, "test", extra)) for x, y in rates.items()]
    rows, counts = difficulty.kept_rows(groups, 0.05, 0.95)
    assert counts == {"kept": 1, "too hard": 1, "too easy": 1, "not judged": 1}
    write_lines(tmp_path / "kept.jsonl", rows)
    (problem,), _ = load_problems(tmp_path / "kept.jsonl")
    assert (problem.prompt, problem.answer, problem.source) == ("what is c?", "c", "test")
    assert problem.extra["success_rate"] == 0.25 and problem.extra["level"] == 2
    extra = {"ground_truth": "3", "reward_model": {"ground_truth": "4"}}  # a column that would be taken for the answer
    one = replace(groups[2], problem=Problem("a", "1+1?", "2", "test", extra))
    columns = {"answer_column": "reward_model.ground_truth"}
    write_lines(tmp_path / "kept.jsonl", difficulty.kept_rows([one], 0.0, 1.0, DataConfig(**columns))[0])
    for settings in (columns, {}):
        (problem,), _ = load_problems(tmp_path / "kept.jsonl", **settings)
        assert (problem.prompt, problem.answer) == ("1+1?", "2")


PROBLEM = Problem("p", "6*7?", "42", "math", {"level": 2, "ground_truth": "43", "prompt": "other"})


def record(*turns: str | Turn, **changes) -> TraceRecord:
    """Of a trajectory with these turns; those given as text have a result."""
    results = (ToolResult("ok", observation="42"),)
    made = tuple(turn if isinstance(turn, Turn) else Turn(0, 1, turn, (), results) for turn in turns)
    return TraceRecord(1, 0, PROBLEM, replace(make_trajectory(), turns=made, **changes), None, True, "kept")


def test_states_become_a_file_that_can_be_trained_on(tmp_path, capsys, monkeypatch):
    """Each different state before a later turn, once; hinted trajectories had another prompt. A cut observation is as
    it was shown, and what an environment said belongs to it. What cannot be cut is named."""
    some = [record("run", "done"), record("run", "again", "done"), record("done")]
    shown = (ToolResult("ok", observation="x" * 100, shown="x" * 10 + " ..."),)
    some += [record(Turn(0, 1, "50", (), (), reply="lower"), Turn(1, 2, "look", (), shown), "42")]
    rows = cut_traces.states([*some, record("x", "y", condition=Condition("hint", 1))], "So far:\n")
    so_far = ["run\n42\n", "run\n42\nagain\n42\n", "50\nlower\n", "50\nlower\nlook\nxxxxxxxxxx ...\n"]
    assert [row["prompt"] for row in rows] == [f"6*7?\nSo far:\n{state}" for state in so_far]
    monkeypatch.chdir(tmp_path)
    TraceWriter(tmp_path / "long").write(1, [record("run", "done")])
    TraceWriter(tmp_path / "short").write(1, [record("done")])
    for words, message in (
        (["long", "--step", "9"], "long has no trajectories of step 9; it has steps 1 to 1"),
        (["short"], "short records no trajectory with two turns"),
    ):
        assert cut_traces.main([*words, "--out", "states.jsonl"]) == 2
        assert message in capsys.readouterr().err and not (tmp_path / "states.jsonl").exists()
    assert cut_traces.main(["long", "--out", "states.jsonl"]) == 0
    (problem,), _ = load_problems(tmp_path / "states.jsonl")
    assert (problem.answer, problem.source, problem.extra) == ("42", "math", {"level": 2})
    assert problem.prompt == "6*7?\nSo far:\nrun\n42"


def test_a_file_that_is_read_is_not_written(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = '{"question": "1+1?", "answer": "2", "code": "1"}\n'
    (tmp_path / "in.jsonl").write_text(before)
    os.link("in.jsonl", "out.jsonl")
    for words in ("run-tools in.jsonl", "difficulty policy --data own=in.jsonl"):
        assert commands([*words.split(), "--out", "out.jsonl"]) == 2
        assert "--out out.jsonl would overwrite in.jsonl, which is read" in capsys.readouterr().err
        assert (tmp_path / "in.jsonl").read_text() == before
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    out = output_file("--out", "~/out.jsonl", [tmp_path / "in.jsonl", "world:gcd:1", tmp_path, "-"])
    assert out == tmp_path / "home" / "out.jsonl" and not out.exists(), "other files are"
    with pytest.raises(ValueError, match="--out /dev/full could not be written: No space left"):
        write_output("--out", Path("/dev/full"), "text")


MINE = """
def level(problem, trajectories):
    return [problem.extra["level"] for _ in trajectories]
same, nan = (lambda problem, trajectories, x=x: [x] * len(trajectories) for x in (0.5, float("nan")))
judge = lambda problem, trajectories: [None] * len(trajectories)
trl_two = lambda prompts, completions, **kwargs: [1.0 for _ in completions]  # would score trajectories
"""


@pytest.fixture(autouse=True)
def folder(tmp_path_factory, monkeypatch):
    """The directory of a file of functions, which can also be imported by its name."""
    folder = tmp_path_factory.mktemp("mine")
    (folder / "mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return folder


def test_what_cannot_be_used_is_named_with_what_exists(folder, capsys):
    for name, message in (
        ("anwser", "did you mean 'answer'? the built-in ones are answer, "),
        ("mine:trl_two", "(problem, trajectories); completions, prompts is the signature of another project"),
        (f"{folder}/mine.py", "mine.py': name a function of the file, file.py:function; it has "),
        (f"{folder}/mine.py:Same", "has no 'Same'; did you mean 'same'? it has "),
        (f"{folder}/mine.py:judge", "every value is None: such a problem is left out of training"),
        ("mine:level", "KeyError: 'level' (mine.py, line 3)"),
    ):
        assert main([name]) == 2
        assert message in capsys.readouterr().out


def test_a_function_is_tried_on_made_up_trajectories_for_problems_of_a_file_or_a_generated_source(tmp_path, capsys):
    """Each problem has its own answer and columns; the right answer is right for each."""
    rewards = [line.split("reward ")[1] for line in check_reward("answer")]
    assert rewards == ["1 (correct)", "0 (wrong)", "0 (no_answer)", "1 (correct)", "0 (truncated)"]
    file = tmp_path / "problems.jsonl"
    write_lines(file, [{"prompt": f"{i} + 1", "answer": str(i + 1), "level": i} for i in range(41, 45)])
    assert main(["answer", str(file)]) == 0
    assert re.findall("^right answer +reward (.)", capsys.readouterr().out, re.M) == ["1"] * 3
    assert main(["mine:level", str(file)]) == 0
    assert "right answer       reward 41 (correct)" in capsys.readouterr().out
    assert main(["answer", "world:gcd:1"]) == 0
    made = capsys.readouterr().out
    assert made.startswith("world:gcd:1:") and made.count("right answer       reward 1 (correct)") == 3


def test_recorded_trajectories_are_scored_again(tmp_path, capsys):
    """The recorded reward scored again is itself; a constant one and those without a score are named as such."""
    run = str(demo.write_run(tmp_path / "run", steps=2, groups=3, size=4))

    def said(name, *words, status=0):
        assert main([name, "--trajectories", *words]) == status
        return capsys.readouterr().out

    first, *lines = said("answer", run).splitlines()
    assert first == "12 of 12 recorded trajectories of 3 problems are scored" and "->" not in "".join(lines)
    assert "no group has rewards that differ" in said("mine:same", run, "--step", "1")
    assert "no trajectories of step 9; it has steps 1 to 2" in said("answer", run, "--step", "9", status=2)
    first, second, *lines = said("mine:nan", run, status=2).splitlines()
    assert first == "0 of 12 recorded trajectories of 3 problems are scored"
    assert second == "12 are not scored and leave their groups" and any(line.startswith("fault: ") for line in lines)
