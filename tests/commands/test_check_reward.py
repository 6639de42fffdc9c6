"""The command that tries a reward function before training."""

import json
import subprocess
import sys

import pytest

from grpo_roc_jax.commands.check_reward import check_reward, main
from tests.helpers.demo import write_run

MINE = """RATE = 2


def lengths(problem, trajectories):
    return [float(t.length) for t in trajectories]


def same(problem, trajectories):
    return [0.5 for _ in trajectories]


def level(problem, trajectories):
    return [problem.extra["level"] for _ in trajectories]


def partial(problem, trajectories):
    return [None, 1, 1, 1, 1]


def short(problem, trajectories):
    return [1.0]


def text(problem, trajectories):
    return [len(t.text) for t in trajectories]


def nan(problem, trajectories):
    return [float("nan") for _ in trajectories]


class Judge:
    def __call__(self, problem, trajectories):
        return [None] * len(trajectories)


judge = Judge()


def trl_columns(prompts, completions, solution):
    return 0


def trl_two(prompts, completions, **kwargs):
    return [1.0 for _ in completions]  # would score trajectories


def trl_answer(completions, ground_truth, **kwargs):
    return [1.0 for _ in completions]


def verl(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0
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


def test_builtin():
    assert main(["answer"]) == 0
    assert check_reward("answer") == [
        "right answer       reward 1 (correct)",
        "wrong answer       reward 0 (wrong)",
        "no answer          reward 0 (no_answer)",
        "failing tool call  reward 1 (correct)",
        "truncated          reward 0 (truncated)",
    ]


def test_custom(folder, capsys):
    assert check_reward("mine:lengths")[3] == "failing tool call  reward 9 (correct)"
    assert main(["mine:lengths"]) == 0 and "the same reward" not in capsys.readouterr().out
    assert main([f"{folder}/mine.py:same"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("all that were not cut get the same reward: ")
    with pytest.raises(SystemExit, match="2"):
        main([])


REFUSED = [
    ("mine:partial", "not scored"),
    ("mine:short", "returned 1 values for 5"),
    ("mine:lenghts", "mine has no 'lenghts'; did you mean 'lengths'? it has lengths, same, "),
    ("mine:zebra", "mine has no 'zebra'; it has lengths, same, "),
    ("anwser", "did you mean 'answer'? the built-in ones are answer, "),
    ("mine:trl_columns", "completions, prompts is the signature of another project: see docs/coming_from.md"),
    ("mine:trl_two", "(problem, trajectories); completions, prompts is the signature of another project"),
    ("mine:trl_answer", "(problem, trajectories); completions, ground_truth is the signature of another project"),
    ("mine:verl", "data_source, ground_truth, solution_str is the signature of another project"),
    ("", "FUNCTION is empty; write file.py:function"),
    ("function", "FUNCTION is only the kind of functions of your own; write file.py:function"),
    ("environment", "these rewards are those of an environment, which these trajectories had none of"),
    ("{}/empty.py:pay", "it defines no function; write package.module:function"),
    ("{}/mine.py", "mine.py': name a function of the file, file.py:function; it has lengths, same, "),
    ("{}/mine.py:", "mine.py:': name a function of the file, file.py:function; it has lengths, same, "),
    ("{}/mine.py:RATE", "'RATE' of {}/mine.py is not a function; it has lengths, same, "),
    ("{}/mine.py:Lengths", "has no 'Lengths'; did you mean 'lengths'? it has lengths, same, "),
    ("{}/mine.py:Judge", "is a class; must be a function (problem, trajectories), or an instance with __call__"),
    ("{}/mine.py:judge", "every value is None: such a problem is left out of training"),
    ("{}/mine.py:text", "AttributeError: 'Trajectory' object has no attribute 'text'; it has tokens, "),
    ("{}/mine.py:text", "(mine.py, line 25)"),
    ("mine:level", "KeyError: 'level' (mine.py, line 13)"),
    ("answer world:gdc:1", "unknown world family 'gdc'"),
    ("answer world:gdc:1", "did you mean 'gcd'?"),
    ("answer {}/absent.jsonl", "absent.jsonl"),
    ("answer --step 3", "name the run with --trajectories RUN"),
    ("answer --trajectories runs/nope", "runs/nope: no such directory; name that of a run"),
    ("answer --trajectories {}", "name the directory of a run with log.traces above 0"),
]
"""Words of the command, and what it says of them."""


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_what_cannot_be_used_is_named_with_what_exists(words, message, folder, capsys):
    assert main(words.format(folder).split(" ")) == 2
    assert message.format(folder) in capsys.readouterr().out


def test_a_generated_source_is_known_to_the_command_alone():
    """In a process of its own, where no test has imported what registers generated sources."""
    words = [sys.executable, "-m", "grpo_roc_jax", "check-reward", "answer"]
    made = subprocess.run([*words, "world:gcd:1"], capture_output=True, text=True, timeout=120)
    assert made.returncode == 0 and made.stdout.startswith("world:gcd:1:")
    assert made.stdout.count("right answer       reward 1 (correct)") == 3


def test_a_function_is_tried_on_problems_of_a_file(tmp_path, capsys):
    """Each problem has its own answer and columns; the right answer is right for each."""
    rows = [{"prompt": f"{i} + 1", "answer": str(i + 1), "level": i} for i in range(41, 45)]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["answer", f"{tmp_path}/problems.jsonl"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[3] for line in lines if line.startswith("right answer")] == ["1", "1", "1"]
    assert [line.split()[3] for line in lines if line.startswith("wrong answer")] == ["0", "0", "0"]
    assert "answer '42'; problem.extra: level" in lines[0]
    assert main(["mine:level", f"{tmp_path}/problems.jsonl"]) == 0
    assert "right answer       reward 41 (correct)" in capsys.readouterr().out


def test_recorded_trajectories_are_scored_again(tmp_path, capsys):
    """The recorded reward scored again is itself; a constant one and those without a score are named as such."""
    run = str(write_run(tmp_path / "run", steps=2, groups=3, size=4))
    assert main(["answer", "--trajectories", run]) == 0
    out = capsys.readouterr().out
    assert "12 of 12 recorded trajectories of 3 problems are scored" in out and "->" not in out
    for line in out.splitlines()[1:]:
        words = line.split()
        assert line.startswith("groups") or words[3] == words[5]
    assert main(["mine:same", "--trajectories", run, "--step", "1"]) == 0
    out = capsys.readouterr().out
    assert "no group has rewards that differ" in out and "-> 0.5" in out
    assert main(["answer", "--trajectories", run, "--step", "9"]) == 2
    assert "no trajectories of step 9; it has steps 1 to 2" in capsys.readouterr().out
    damaged = write_run(tmp_path / "damaged", steps=1, groups=1, size=2)
    (damaged / "trajectories" / "step_00000001.jsonl").write_bytes(b"abc\n")
    assert main(["answer", "--trajectories", str(damaged)]) == 2
    assert f"no trajectory of step 1 of {damaged} can be read" in capsys.readouterr().out
    for name in ("nan", "judge"):
        assert main([f"mine:{name}", "--trajectories", run]) == 2
        out = capsys.readouterr().out.splitlines()
        assert out[:2] == [
            "0 of 12 recorded trajectories of 3 problems are scored",
            "12 are not scored and leave their groups",
        ]
        assert any(line.startswith("groups whose rewards differ: ") and line.endswith(" 0 now, of 3") for line in out)
        assert any(line.startswith("fault: ") for line in out) == (name == "nan")
