"""`check-data`, `difficulty`, `cut-traces` and `check-reward`; no command writes its results over what it reads."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import grpo_roc_jax as g
from grpo_roc_jax.__main__ import main as commands
from grpo_roc_jax.commands import chat, cut_traces, difficulty, evaluate, run_tools, view
from grpo_roc_jax.commands.check_reward import check_reward, main
from grpo_roc_jax.data import gsm8k_traces
from grpo_roc_jax.data.config import DataConfig
from grpo_roc_jax.data.problems import load_problems
from grpo_roc_jax.process.outputs import output_file, write_output
from grpo_roc_jax.record.run_dir import choose_run_dir
from grpo_roc_jax.record.trace import TraceRecord, TraceWriter
from grpo_roc_jax.run.components import check_components, make_registry
from grpo_roc_jax.run.start import problem_stream
from grpo_roc_jax.types import Condition, Problem, ToolResult, Turn
from grpo_roc_jax.view.curves import load_runs
from tests.helpers import demo
from tests.helpers.knobs import write_lines
from tests.helpers.method_groups import make_group, make_trajectory


@pytest.fixture
def check(tmp_path, capsys):
    """What the command says of a file with these rows."""

    def made(name, rows, *words):
        write_lines(tmp_path / name, rows)
        assert commands(["check-data", str(tmp_path / name), *words]) == 0
        return capsys.readouterr().out

    return made


def talk(*messages):
    return {"messages": [{"role": "user", "content": "q"}, *messages]}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


def test_problems_are_shown_as_they_will_be_read_and_fit_the_limits_that_are_named(check, tmp_path):
    """Conversations are rendered whole."""
    question = "How much is {0} + {0}? "
    rows = [{"question": question.format(i) + "Think. " * i, "answer": i, "info": {"level": 1}} for i in range(9)]
    printed = check("own.jsonl", [*rows, {"question": "no answer"}], "toy.yaml")
    assert "  answer: int, in 9 of 10 rows" in printed and "  info: dict, in 9 of 10 rows; info.level" in printed
    assert "9 problems of 10 rows; question from 'question', answer from 'answer'; 1 bad" in printed
    assert "own.jsonl:10: column 'answer' is missing" in printed
    assert printed.count("How much is") == printed.count("---- own:") == 3 and "<|im_start|>" in printed
    printed = check("own.jsonl", [{"question": "Think. " * i, "answer": i} for i in range(1, 30)], "toy.yaml")
    (limits,) = re.findall("^limits under which all of it fits: (.*)$", printed, re.M)
    words = [f"--data.sources={tmp_path / 'own.jsonl'}", "--data.eval_problems=0", *limits.split()]
    config = g.read_config("toy.yaml", *words)
    stream = problem_stream(config, check_components(config, make_registry(config))[1])
    assert not any("over-long" in note for note in stream.notes)
    printed = check("talk.jsonl", [talk(said("because " * count)) for count in (1, 2000, 3)], "toy.yaml")
    assert re.search(r"batch\.row_length = \d+: 1 of 3 do not fit \(data\.bad_rows\)\n  talk:2: \d+ tokens\n", printed)
    assert "3 problems of 3 rows; question from 'messages'" in printed and printed.count("---- talk:") == 3
    assert "conversations of" in printed and "--batch.row_length" in printed
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    turns = [said("", tool_calls=[call, call]), *[{"role": "tool", "content": "1"}] * 2, said("ok")]
    printed = check("calls.jsonl", [talk(said("because ")), talk(*turns)], "toy.yaml")
    named = "text.max_calls_per_turn = 1: 1 of 2 do not fit (data.bad_rows)\n  calls:2: 2 calls in a turn\n"
    assert f"most calls in a turn: 2\n{named}" in printed and printed.endswith(" --text.max_calls_per_turn 2\n")
    problems = [{"question": "Think. " * count, "answer": 1} for count in (1, 400, 3, 500)]
    printed = check("own.jsonl", problems, "toy.yaml")
    assert ": 2 of 4 do not fit (data.bad_rows)\n  own:" in printed and "rollout.max_prompt_tokens = " in printed


def test_what_cannot_be_read_is_a_message_and_a_status(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "odd.jsonl", [{"text": "no question"}])
    for words in ("none.jsonl", "odd.jsonl", "odd.jsonl --data.promt_column text", ""):
        assert commands(["check-data", *words.split()]) == 2
        caught = capsys.readouterr()
        assert "Traceback" not in caught.err and (caught.err or not words)


def group(name, correct):
    return replace(make_group(correct), problem=Problem(name, f"what is {name}?", name, "test", {"level": 2}))


def test_problems_within_the_bounds_are_kept_with_their_rates_and_can_be_read_again(tmp_path):
    groups = [group("a", [True] * 4), group("b", [False] * 4), group("c", [True, False, False, False]), group("d", [])]
    rows, counts = difficulty.kept_rows(groups, 0.05, 0.95)
    assert counts == {"kept": 1, "too hard": 1, "too easy": 1, "not judged": 1}
    write_lines(tmp_path / "kept.jsonl", rows)
    (problem,), _ = load_problems(tmp_path / "kept.jsonl")
    assert (problem.prompt, problem.answer, problem.source) == ("what is c?", "c", "test")
    assert problem.extra["success_rate"] == 0.25 and problem.extra["level"] == 2
    assert difficulty.kept_rows(groups, 0.0, 1.0)[1]["kept"] == 3
    assert [row["answer"] for row in difficulty.kept_rows(groups, 0.0, 0.0)[0]] == ["b"]


@pytest.mark.parametrize("columns", [{}, {"prompt_column": "question"}, {"answer_column": "reward_model.ground_truth"}])
def test_rows_are_the_same_problem_under_the_settings_that_read_them(tmp_path, columns):
    """And without them; also where the row has a further column that would be taken for the answer, and text that is
    no Unicode."""
    extra = {"ground_truth": "the sum is 3", "reward_model": {"ground_truth": "4", "style": "rule"}, "note": "\ud800"}
    one = replace(group("a", [True, False]), problem=Problem("a", "1+1?", "2", "test", extra))
    write_lines(tmp_path / "kept.jsonl", difficulty.kept_rows([one], 0.0, 1.0, DataConfig(**columns))[0])
    for settings in (columns, {}):
        (problem,), _ = load_problems(tmp_path / "kept.jsonl", **settings)
        assert (problem.prompt, problem.answer) == ("1+1?", "2")
        assert problem.extra["reward_model"] == {"style": "rule"} and problem.extra["note"] == "\ud800"


def test_what_cannot_be_filtered_is_a_message_and_a_status(tmp_path, capsys):
    words = ["--data", "world:gcd:1", "--out", str(tmp_path / "x")]
    with pytest.raises(SystemExit):
        difficulty.main([str(tmp_path), *words, "--lowest", "0.9", "--highest", "0.1"])
    assert "rising" in capsys.readouterr().err
    for command in (difficulty, evaluate, chat):
        for wrong in ("nan", "-1", "inf"):
            with pytest.raises(SystemExit):
                command.main([str(tmp_path), *(words if command is not chat else ()), "--temperature", wrong])
            assert "must be at least 0 and finite" in " ".join(capsys.readouterr().err.split())
    for command in (difficulty, evaluate):  # before anything is rolled out
        assert command.main([str(tmp_path), *words]) == 2
        assert "holds neither config.yaml, as a run does, nor config.json" in capsys.readouterr().err
        assert command.main([str(tmp_path), *words[:2], "--out", f"{__file__}/kept"]) == 2
        assert f"--out {__file__}/kept: " in capsys.readouterr().err


PROBLEM = Problem("p", "6*7?", "42", "math", {"level": 2, "ground_truth": "43", "prompt": "other"})


def record(*texts: str | Turn, **changes) -> TraceRecord:
    """Of a trajectory with these turns, each but the last with a result."""
    results = (ToolResult("ok", observation="42"),)
    made = [Turn(0, 1, text, (), results if i + 1 < len(texts) else ()) for i, text in enumerate(texts)]
    turns = tuple(text if isinstance(text, Turn) else turn for text, turn in zip(texts, made, strict=True))
    return TraceRecord(1, 0, PROBLEM, replace(make_trajectory(), turns=turns, **changes), None, True, "kept")


def test_states_become_a_file_that_can_be_trained_on(tmp_path, capsys, monkeypatch):
    """Each different state before a later turn, once; hinted trajectories had another prompt. A cut observation is as
    it was shown, and what an environment said belongs to it. What cannot be cut is named."""
    some = [record("run", "done"), record("run", "again", "done"), record("done")]
    shown = (ToolResult("ok", observation="x" * 100, shown="x" * 10 + " ..."),)
    some += [record(Turn(0, 1, "50", (), (), reply="lower"), Turn(1, 2, "look", (), shown), "42")]
    rows = cut_traces.states([*some, record("x", "y", condition=Condition("hint", 1))], "So far:\n")
    so_far = ["run\n42\n", "run\n42\nagain\n42\n", "50\nlower\n", "50\nlower\nlook\nxxxxxxxxxx ...\n"]
    assert [row["prompt"] for row in rows] == [f"6*7?\nSo far:\n{state}" for state in so_far]
    assert {row["answer"] for row in rows} == {"42"}
    monkeypatch.chdir(tmp_path)
    TraceWriter(tmp_path / "long").write(1, [record("run", "done")])
    TraceWriter(tmp_path / "short").write(1, [record("done")])
    for words, message in (
        (["long", "--step", "9"], "long has no trajectories of step 9; it has steps 1 to 1"),
        (["missing"], "missing: no such directory"),
        (["."], "has no trajectories of steps"),
        (["short"], "short records no trajectory with two turns"),
    ):
        assert cut_traces.main([*words, "--out", "states.jsonl"]) == 2
        assert message in capsys.readouterr().err and not (tmp_path / "states.jsonl").exists()
    assert cut_traces.main(["long", "--out", "states.jsonl"]) == 0
    assert "1 states in" in capsys.readouterr().out
    (problem,), _ = load_problems(tmp_path / "states.jsonl")
    assert (problem.answer, problem.source, problem.extra) == ("42", "math", {"level": 2})
    assert problem.prompt == "6*7?\nSo far:\nrun\n42"
    with pytest.raises(SystemExit):
        cut_traces.main(["--out", "states.jsonl"])


COMMANDS = {
    "run-tools": (run_tools.main, ["in.jsonl"]),
    "difficulty": (difficulty.main, ["policy", "--data", "world:gcd:1", "own=in.jsonl"]),
    "gsm8k_traces": (gsm8k_traces.main, ["in.jsonl"]),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("link", [None, os.symlink, os.link], ids=["the file", "a link to it", "its other name"])
def test_a_file_that_is_read_is_not_written(command, link, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = '{"question": "1+1?", "answer": "#### 2", "code": "1"}\n'
    (tmp_path / "in.jsonl").write_text(before)
    if link:
        link("in.jsonl", "out.jsonl")
    out = "out.jsonl" if link else "./in.jsonl"
    main, words = COMMANDS[command]
    assert main([*words, "--out", out]) == 2
    assert f"--out {Path(out)} would overwrite in.jsonl, which is read" in capsys.readouterr().err
    assert (tmp_path / "in.jsonl").read_text() == before
    out = output_file("--out", tmp_path / "new" / "out.jsonl", [tmp_path / "in.jsonl", "world:gcd:1", tmp_path, "-"])
    assert out == tmp_path / "new" / "out.jsonl" and not out.exists(), "other files are"
    assert output_file("--out", os.devnull, [os.devnull]), "no regular file"
    for name, reason in (("/dev/full", "No space left"), (tmp_path / "none" / "x", "No such file")):
        with pytest.raises(ValueError, match=f"--out {name} could not be written: {reason}"):
            write_output("--out", Path(name), "text")


def test_the_home_directory_may_be_written_as_a_tilde(tmp_path, monkeypatch):
    """The shell expands none in `--out=~/x`. No folder of that name is made."""
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    for folder in ("runs/toy/trajectories", "configs"):
        (home / folder).mkdir(parents=True)
    (home / "runs/toy/metrics.jsonl").write_text('{"step": 1}\n')
    (home / "configs/low.yaml").write_text("seed: 7\n")
    (home / "configs/high.yaml").write_text("base: ~/configs/low.yaml\n")
    assert output_file("--out", "~/new/x.json") == home / "new/x.json"
    assert choose_run_dir("n", "~/runs/new", "never") == home / "runs/new"
    assert evaluate.folder_of(evaluate.EvaluateConfig("p", keep="~/kept")) == home / "kept"
    assert g.read_config("~/configs/high.yaml").seed == 7
    assert [run.path for run in load_runs(["~/runs/toy", "~/runs/t*", "a=~/runs/toy"])] == [home / "runs/toy"]
    assert view.opened("~/runs/toy") == str(home / "runs/toy") and not (tmp_path / "~").exists()


MINE = """
def level(problem, trajectories):
    return [problem.extra["level"] for _ in trajectories]
RATE, Judge = 2, type("Judge", (), {})
text = lambda problem, trajectories: [t.text for t in trajectories]
lengths = lambda problem, trajectories: [float(t.length) for t in trajectories]
same = lambda problem, trajectories: [0.5] * len(trajectories)
partial, short = lambda problem, trajectories: [None, 1, 1, 1, 1], lambda problem, trajectories: [1.0]
nan = lambda problem, trajectories: [float("nan")] * len(trajectories)
judge = lambda problem, trajectories: [None] * len(trajectories)
trl_two = lambda prompts, completions, **kwargs: [1.0 for _ in completions]  # would score trajectories
verl = lambda data_source, solution_str, ground_truth, extra_info=None: 1.0
"""


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """The directory of a file of functions, which can also be imported by its name."""
    folder = tmp_path_factory.mktemp("mine")
    (folder / "mine.py").write_text(MINE, encoding="utf-8")
    (folder / "empty.py").write_text("X = 3\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder
    sys.modules.pop("mine", None)


def test_made_up_trajectories_are_scored(folder, capsys):
    assert check_reward("answer") == [
        "right answer       reward 1 (correct)",
        "wrong answer       reward 0 (wrong)",
        "no answer          reward 0 (no_answer)",
        "failing tool call  reward 1 (correct)",
        "truncated          reward 0 (truncated)",
    ]
    assert check_reward("mine:lengths")[3] == "failing tool call  reward 9 (correct)"
    assert main(["mine:lengths"]) == 0 and "the same reward" not in capsys.readouterr().out
    assert main([f"{folder}/mine.py:same"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("all that were not cut get the same reward: ")
    with pytest.raises(SystemExit, match="2"):
        main([])


REFUSED = [
    ("mine:partial", "not scored"),
    ("mine:short", "returned 1 values for 5"),
    ("anwser", "did you mean 'answer'? the built-in ones are answer, "),
    ("mine:trl_two", "(problem, trajectories); completions, prompts is the signature of another project"),
    ("mine:verl", "data_source, ground_truth, solution_str is the signature of another project"),
    ("", "FUNCTION is empty; write file.py:function"),
    ("function", "FUNCTION is only the kind of functions of your own; write file.py:function"),
    ("environment", "these rewards are those of an environment, which these trajectories had none of"),
    ("{}/empty.py:pay", "it defines no function; write package.module:function"),
    ("{}/mine.py", "mine.py': name a function of the file, file.py:function; it has "),
    ("{}/mine.py:RATE", "'RATE' of {}/mine.py is not a function; it has "),
    ("{}/mine.py:Lengths", "has no 'Lengths'; did you mean 'lengths'? it has "),
    ("{}/mine.py:Judge", "is a class; must be a function (problem, trajectories), or an instance with __call__"),
    ("{}/mine.py:judge", "every value is None: such a problem is left out of training"),
    ("{}/mine.py:text", "AttributeError: 'Trajectory' object has no attribute 'text'; it has tokens, "),
    ("mine:level", "KeyError: 'level' (mine.py, line 3)"),
    ("answer world:gdc:1", "did you mean 'gcd'?"),
    ("answer {}/absent.jsonl", "absent.jsonl"),
    ("answer --step 3", "name the run with --trajectories RUN"),
    ("answer --trajectories runs/nope", "runs/nope: no such directory; name that of a run"),
    ("answer --trajectories {}", "name the directory of a run with log.traces above 0"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_what_cannot_be_used_is_named_with_what_exists(words, message, folder, capsys):
    assert main(words.format(folder).split(" ")) == 2
    assert message.format(folder) in capsys.readouterr().out


def test_a_function_is_tried_on_problems_of_a_file_or_a_generated_source(tmp_path, capsys):
    """Each problem has its own answer and columns; the right answer is right for each. The source is known to a process
    in which no test has imported it."""
    file = tmp_path / "problems.jsonl"
    write_lines(file, [{"prompt": f"{i} + 1", "answer": str(i + 1), "level": i} for i in range(41, 45)])
    assert main(["answer", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    for kind, reward in (("right answer", "1"), ("wrong answer", "0")):
        assert [line.split()[3] for line in lines if line.startswith(kind)] == [reward] * 3
    assert "answer '42'; problem.extra: level" in lines[0]
    assert main(["mine:level", str(file)]) == 0
    assert "right answer       reward 41 (correct)" in capsys.readouterr().out
    words = [sys.executable, "-m", "grpo_roc_jax", "check-reward", "answer", "world:gcd:1"]
    made = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert made.returncode == 0 and made.stdout.startswith("world:gcd:1:")
    assert made.stdout.count("right answer       reward 1 (correct)") == 3


def test_recorded_trajectories_are_scored_again(tmp_path, capsys):
    """The recorded reward scored again is itself; a constant one and those without a score are named as such."""
    run = str(demo.write_run(tmp_path / "run", steps=2, groups=3, size=4))
    damaged = demo.write_run(tmp_path / "damaged", steps=1, groups=1, size=2)
    (damaged / "trajectories" / "step_00000001.jsonl").write_bytes(b"abc\n")

    def said(name, *words, status=0):
        assert main([name, "--trajectories", *words]) == status
        return capsys.readouterr().out

    first, *lines = said("answer", run).splitlines()
    assert first == "12 of 12 recorded trajectories of 3 problems are scored"
    for line in lines:
        words = line.split()
        assert line.startswith("groups") or (words[3] == words[5] and "->" not in line)
    constant = said("mine:same", run, "--step", "1")
    assert "no group has rewards that differ" in constant and "-> 0.5" in constant
    assert "no trajectories of step 9; it has steps 1 to 2" in said("answer", run, "--step", "9", status=2)
    assert f"no trajectory of step 1 of {damaged} can be read" in said("answer", str(damaged), status=2)
    for name in ("nan", "judge"):
        first, second, *lines = said(f"mine:{name}", run, status=2).splitlines()
        assert first == "0 of 12 recorded trajectories of 3 problems are scored"
        assert second == "12 are not scored and leave their groups"
        assert any(line.startswith("groups whose rewards differ: ") and line.endswith(" 0 now, of 3") for line in lines)
        assert any(line.startswith("fault: ") for line in lines) == (name == "nan")
