"""The command that tries a reward function before training."""

import json
import subprocess
import sys
import types

import pytest

from grpo_roc_jax.commands.check_reward import check_reward, main
from tests.helpers.demo import write_run


@pytest.fixture
def mine(monkeypatch):
    module = types.ModuleType("mine")
    module.lengths = lambda problem, trajectories: [float(t.length) for t in trajectories]
    module.partial = lambda problem, trajectories: [None, 1, 1, 1, 1]
    module.short = lambda problem, trajectories: [1.0]
    monkeypatch.setitem(sys.modules, "mine", module)


def test_builtin():
    assert main(["answer"]) == 0
    assert check_reward("answer") == [
        "right answer       reward 1 (correct)",
        "wrong answer       reward 0 (wrong)",
        "no answer          reward 0 (no_answer)",
        "failing tool call  reward 1 (correct)",
        "truncated          reward 0 (truncated)",
    ]


def test_custom(mine, capsys):
    assert check_reward("mine:lengths")[3] == "failing tool call  reward 8 (correct)"
    assert main(["mine:lengths"]) == 0
    assert main(["mine:partial"]) == 2
    assert "not scored" in capsys.readouterr().out
    assert main(["mine:short"]) == 2
    assert "returned 1 values for 5" in capsys.readouterr().out
    assert main(["mine:absent"]) == 2
    with pytest.raises(SystemExit, match="2"):
        main([])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mine:lenghts", "mine has no 'lenghts'; did you mean 'lengths'? it has lengths, partial, short"),
        ("mine:zebra", "mine has no 'zebra'; it has lengths, partial, short"),
        ("anwser", "did you mean 'answer'? the built-in ones are answer, "),
        ("mine:trl_columns", "completions, prompts is the signature of another project: see docs/coming_from.md"),
        ("mine:trl_two", "(problem, trajectories); completions, prompts is the signature of another project"),
        ("mine:trl_answer", "(problem, trajectories); completions, ground_truth is the signature of another project"),
        ("mine:verl", "data_source, ground_truth, solution_str is the signature of another project"),
        ("", "FUNCTION is empty; write file.py:function"),
        ("function", "FUNCTION is only the kind of functions of your own; write file.py:function"),
        ("environment", "these rewards are those of an environment, which these trajectories had none of"),
    ],
)
def test_a_wrong_name_answers_with_those_that_exist(name, said, mine, capsys):
    there = {
        "trl_columns": lambda prompts, completions, solution: 0,
        "trl_two": lambda prompts, completions, **kwargs: [1.0 for _ in completions],  # would score trajectories
        "trl_answer": lambda completions, ground_truth, **kwargs: [1.0 for _ in completions],
        "verl": lambda data_source, solution_str, ground_truth, extra_info=None: 1.0,
    }
    if name.removeprefix("mine:") in there:
        vars(sys.modules["mine"]).update(there)
    assert main([name]) == 2
    assert said in capsys.readouterr().out


def test_a_file_without_functions_says_what_to_write(tmp_path, capsys):
    (tmp_path / "empty.py").write_text("X = 3\n")
    assert main([f"{tmp_path}/empty.py:pay"]) == 2
    assert "it defines no function; write package.module:function" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("own.py", "own.py': name a function of the file, file.py:function; it has pay, same; the built-in ones are"),
        ("own.py:", "own.py:': name a function of the file, file.py:function; it has pay, same"),
        ("own.py:RATE", "'RATE' of {}/own.py is not a function; it has pay, same"),
        ("own.py:Pay", "has no 'Pay'; did you mean 'pay'? it has pay, same"),
    ],
)
def test_a_file_alone_or_something_else_in_it_answers_with_its_functions(named, said, tmp_path, capsys):
    text = "RATE = 2\ndef pay(problem, ts):\n    return [t.length for t in ts]\n"
    text += "def same(problem, ts):\n    return [1 for t in ts]\n"
    (tmp_path / "own.py").write_text(text, encoding="utf-8")
    assert main([f"{tmp_path}/{named}"]) == 2
    assert said.format(tmp_path) in capsys.readouterr().out


BROKEN = """
class Judge:
    def __call__(self, problem, trajectories):
        return [None] * len(trajectories)


judge = Judge()


def text(problem, trajectories):
    return [len(t.text) for t in trajectories]


def column(problem, trajectories):
    return [problem.extra["level"] for _ in trajectories]
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Judge", "is a class; must be a function (problem, trajectories), or an instance with __call__"),
        ("judge", "every value is None: such a problem is left out of training"),
        ("text", "AttributeError: 'Trajectory' object has no attribute 'text'; it has tokens, "),
        ("text", "(broken.py, line 11)"),
        ("column", "KeyError: 'level' (broken.py, line 15)"),
    ],
)
def test_a_function_that_fails_names_the_line_and_what_exists(name, said, tmp_path, capsys):
    (tmp_path / "broken.py").write_text(BROKEN, encoding="utf-8")
    assert main([f"{tmp_path / 'broken.py'}:{name}"]) == 2
    assert said in capsys.readouterr().out


def test_equal_rewards_are_said(mine, tmp_path, capsys):
    (tmp_path / "own.py").write_text("def same(problem, ts):\n    return [1 for t in ts]\n", encoding="utf-8")
    assert main([f"{tmp_path}/own.py:same"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("all that were not cut get the same reward: ")
    assert main(["mine:lengths"]) == 0
    assert "the same reward" not in capsys.readouterr().out


def test_a_run_that_does_not_exist_is_named(capsys):
    assert main(["answer", "--trajectories", "runs/nope"]) == 2
    assert capsys.readouterr().out == "--trajectories runs/nope: no such directory; name that of a run\n"


def test_a_generated_source_is_known_to_the_command_alone():
    """In a process of its own, where no test has imported what registers generated sources."""
    words = [sys.executable, "-m", "grpo_roc_jax", "check-reward", "answer"]
    made = subprocess.run([*words, "world:gcd:1"], capture_output=True, text=True, timeout=120)
    assert made.returncode == 0 and made.stdout.startswith("world:gcd:1:")
    assert made.stdout.count("right answer       reward 1 (correct)") == 3


def test_a_world_that_does_not_exist_is_refused(capsys):
    assert main(["answer", "world:gdc:1"]) == 2
    said = capsys.readouterr().out
    assert "unknown world family 'gdc'" in said and "did you mean 'gcd'?" in said


def test_a_step_without_a_run_is_refused(capsys):
    assert main(["answer", "--step", "3"]) == 2
    assert "name the run with --trajectories RUN" in capsys.readouterr().out


def test_a_function_is_tried_on_problems_of_a_file(tmp_path, capsys):
    """Each problem has its own answer and columns; the right answer is right for each."""
    rows = [{"prompt": f"{i} + 1", "answer": str(i + 1), "level": i} for i in range(41, 45)]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own.py").write_text("def level(problem, ts):\n    return [problem.extra['level'] for t in ts]\n")
    assert main(["answer", f"{tmp_path}/problems.jsonl"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[3] for line in said if line.startswith("right answer")] == ["1", "1", "1"]
    assert [line.split()[3] for line in said if line.startswith("wrong answer")] == ["0", "0", "0"]
    assert "answer '42'; problem.extra: level" in said[0]
    assert main([f"{tmp_path}/own.py:level", f"{tmp_path}/problems.jsonl"]) == 0
    assert "right answer       reward 41 (correct)" in capsys.readouterr().out
    assert main(["answer", "world:gcd:1"]) == 0
    assert main(["answer", f"{tmp_path}/absent.jsonl"]) == 2


def test_recorded_trajectories_are_scored_again(tmp_path, capsys):
    """The recorded reward scored again is itself; a constant one is named as such."""
    run = write_run(tmp_path / "run", steps=2, groups=3, size=4)
    (tmp_path / "own.py").write_text("def same(problem, ts):\n    return [0.5 for t in ts]\n")
    assert main(["answer", "--trajectories", str(run)]) == 0
    said = capsys.readouterr().out
    assert "12 of 12 recorded trajectories of 3 problems are scored" in said and "->" not in said
    for line in said.splitlines()[1:]:
        words = line.split()
        assert line.startswith("groups") or words[3] == words[5]
    assert main([f"{tmp_path}/own.py:same", "--trajectories", str(run), "--step", "1"]) == 0
    said = capsys.readouterr().out
    assert "no group has rewards that differ" in said and "-> 0.5" in said
    assert main(["answer", "--trajectories", str(run), "--step", "9"]) == 2
    assert "no trajectories of step 9; it has steps 1 to 2" in capsys.readouterr().out
    assert main(["answer", "--trajectories", str(tmp_path)]) == 2


@pytest.mark.parametrize(("pay", "fault"), [("float('nan')", True), ("None", False)])
def test_recorded_trajectories_that_a_function_does_not_score_are_counted(pay, fault, tmp_path, capsys):
    run = write_run(tmp_path / "run", steps=1, groups=3, size=4)
    (tmp_path / "own.py").write_text(f"def pay(problem, ts):\n    return [{pay} for t in ts]\n")
    assert main([f"{tmp_path}/own.py:pay", "--trajectories", str(run)]) == 2
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == [
        "0 of 12 recorded trajectories of 3 problems are scored",
        "12 are not scored and leave their groups",
    ]
    assert any(line.startswith("groups whose rewards differ: ") and line.endswith(" 0 now, of 3") for line in said)
    assert any(line.startswith("fault: ") for line in said) == fault
