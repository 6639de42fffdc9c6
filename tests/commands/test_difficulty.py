"""The difficulty filter: problems by their success rate, written so that training reads them again."""

import itertools
import json
from dataclasses import replace

import pytest

from grpo_roc_jax.commands import chat, evaluate
from grpo_roc_jax.commands.difficulty import kept_rows, main
from grpo_roc_jax.data.config import DataConfig
from grpo_roc_jax.data.problems import load_problems
from grpo_roc_jax.process.points import listening
from grpo_roc_jax.types import Problem
from tests.commands.test_evaluate import gold, write_run
from tests.helpers.method_groups import make_group


def group(name, correct):
    problem = Problem(name, f"what is {name}?", name, "test", {"level": 2})
    return replace(make_group(correct), problem=problem)


def test_problems_within_the_bounds_are_kept_with_their_rates_and_can_be_read_again(tmp_path):
    groups = [group("a", [True] * 4), group("b", [False] * 4), group("c", [True, False, False, False]), group("d", [])]
    rows, counts = kept_rows(groups, 0.05, 0.95)
    assert counts == {"kept": 1, "too hard": 1, "too easy": 1, "not judged": 1}
    path = tmp_path / "kept.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (problem,), _ = load_problems(path)
    assert (problem.prompt, problem.answer, problem.source) == ("what is c?", "c", "test")
    assert problem.extra["success_rate"] == 0.25 and problem.extra["level"] == 2
    assert kept_rows(groups, 0.0, 1.0)[1]["kept"] == 3
    assert [row["answer"] for row in kept_rows(groups, 0.0, 0.0)[0]] == ["b"]


@pytest.mark.parametrize("columns", [{}, {"prompt_column": "question"}, {"answer_column": "reward_model.ground_truth"}])
@pytest.mark.parametrize("read_by", ["its settings", "none"])
def test_rows_are_the_same_problem_under_the_settings_that_read_them(tmp_path, columns, read_by):
    """Also where the row has a further column that would be taken for the answer, and text that is no Unicode."""
    extra = {"ground_truth": "the sum is 3", "reward_model": {"ground_truth": "4", "style": "rule"}, "note": "\ud800"}
    one = replace(group("a", [True, False]), problem=Problem("a", "1+1?", "2", "test", extra))
    rows, _ = kept_rows([one], 0.0, 1.0, DataConfig(**columns))
    path = tmp_path / "kept.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (problem,), _ = load_problems(path, **(columns if read_by == "its settings" else {}))
    assert (problem.prompt, problem.answer) == ("1+1?", "2")
    assert problem.extra["reward_model"] == {"style": "rule"} and problem.extra["note"] == "\ud800"


def test_what_cannot_be_filtered_is_a_message_and_a_status(tmp_path, capsys):
    words = ["--data", "world:gcd:1", "--out", str(tmp_path / "x")]
    assert main([str(tmp_path), *words]) == 2
    assert "holds neither config.yaml, as a run does, nor config.json" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(tmp_path), *words, "--lowest", "0.9", "--highest", "0.1"])
    assert "rising" in capsys.readouterr().err
    for command, wrong in itertools.product((main, evaluate.main, chat.main), ("nan", "-1", "inf")):
        with pytest.raises(SystemExit):
            command([str(tmp_path), *(words if command is not chat.main else ()), "--temperature", wrong])
        assert "must be at least 0 and finite" in " ".join(capsys.readouterr().err.split())
    for command in (main, evaluate.main):  # before anything is rolled out
        assert command([str(tmp_path), *words[:2], "--out", f"{__file__}/kept"]) == 2
        assert f"--out {__file__}/kept: " in capsys.readouterr().err


@pytest.mark.slow
def test_the_filter_rolls_out_by_the_policy_of_a_run(tmp_path, capsys):
    write_run(tmp_path, 3)
    out, source = tmp_path / "kept.jsonl", str(gold(tmp_path))
    words = [str(tmp_path), "--data", source, "--out", str(out), "--samples", "2", "--lowest", "0"]
    words += ["--keep", str(tmp_path / "rolled")]
    assert main([*words, "--highest", "0"]) == 0
    printed = capsys.readouterr().out
    assert "policy after 3 training steps" in printed and "3 kept" in printed, "a random policy solves nothing"
    assert {problem.answer for problem in load_problems(out)[0]} == {"0", "2", "4"}
    reached = []
    with listening(reached.append):
        assert main([*words, "--highest", "1", "--resume"]) == 0 and "3 kept" in capsys.readouterr().out
    assert "reward" not in reached, "nothing is rolled out again"
