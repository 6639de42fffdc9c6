"""`check-data`: what a file holds, how it is read, and the settings under which it fits."""

import json
import re

import pytest

from grpo_roc_jax.__main__ import main
from grpo_roc_jax.config import Config
from grpo_roc_jax.run.components import check_components, make_registry
from grpo_roc_jax.run.start import problem_stream
from grpo_roc_jax.settings.cli import load_config


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def limits_of(printed):
    (line,) = [line for line in printed.splitlines() if line.startswith("limits under which all of it fits: ")]
    return line.split(": ")[1].split()


def test_problems_are_shown_as_they_will_be_read(tmp_path, capsys):
    rows = [
        {"question": f"How much is {i} + {i}? " + "Think. " * i, "answer": i, "info": {"level": 1}} for i in range(9)
    ]
    file = write(tmp_path / "own.jsonl", [*rows, {"question": "no answer"}])
    assert main(["check-data", file, "toy.yaml"]) == 0
    printed = capsys.readouterr().out
    assert "  answer: int, in 9 of 10 rows" in printed and "  info: dict, in 9 of 10 rows; info.level" in printed
    assert "9 problems of 10 rows; question from 'question', answer from 'answer'; 1 bad" in printed
    assert "own.jsonl:10: column 'answer' is missing" in printed
    assert printed.count("How much is") == printed.count("---- own:") == 3 and "<|im_start|>" in printed


def test_the_limits_that_it_names_keep_every_problem(tmp_path, capsys):
    file = write(tmp_path / "own.jsonl", [{"question": "Think. " * i, "answer": i} for i in range(1, 30)])
    assert main(["check-data", file, "toy.yaml"]) == 0
    words = [f"--data.sources={file}", "--data.eval_problems=0", *limits_of(capsys.readouterr().out)]
    config = load_config(Config, ["toy.yaml", *words], prog="test")
    stream = problem_stream(config, check_components(config, make_registry(config))[1])
    assert not any("over-long" in note for note in stream.notes)


def test_conversations_are_rendered_whole(tmp_path, capsys):
    talk = [{"role": "user", "content": "How much is 6 x 7?"}, {"role": "assistant", "content": "It is 42. " * 30}]
    file = write(tmp_path / "talk.jsonl", [{"messages": talk}] * 4)
    assert main(["check-data", file]) == 0
    printed = capsys.readouterr().out
    assert "4 problems of 4 rows; question from 'messages'" in printed and printed.count("---- talk:") == 3
    assert "conversations of" in printed and "--batch.row_length" in printed


@pytest.mark.parametrize("words", [["none.jsonl"], ["odd.jsonl"], ["odd.jsonl", "--data.promt_column", "text"], []])
def test_what_cannot_be_read_is_a_message_and_a_status(words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "odd.jsonl", [{"text": "no question"}])
    assert main(["check-data", *words]) == 2
    caught = capsys.readouterr()
    assert "Traceback" not in caught.err and (caught.err or not words)


def test_what_does_not_fit_the_settings_is_named(tmp_path, capsys):
    talk = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "because " * count}]}
        for count in (1, 2000, 3)
    ]
    assert main(["check-data", write(tmp_path / "talk.jsonl", talk), "toy.yaml"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"batch\.row_length = \d+: 1 of 3 do not fit \(data\.bad_rows\)\n  talk:2: \d+ tokens\n", printed)
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    turns = [
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        *[{"role": "tool", "content": "1"}] * 2,
        {"role": "assistant", "content": "ok"},
    ]
    file = write(tmp_path / "calls.jsonl", [talk[0], {"messages": [talk[0]["messages"][0], *turns]}])
    assert main(["check-data", file, "toy.yaml"]) == 0
    printed = capsys.readouterr().out
    named = "text.max_calls_per_turn = 1: 1 of 2 do not fit (data.bad_rows)\n  calls:2: 2 calls in a turn\n"
    assert f"most calls in a turn: 2\n{named}" in printed and printed.endswith(" --text.max_calls_per_turn 2\n")
    problems = [{"question": "Think. " * count, "answer": 1} for count in (1, 400, 3, 500)]
    assert main(["check-data", write(tmp_path / "own.jsonl", problems), "toy.yaml"]) == 0
    printed = capsys.readouterr().out
    assert ": 2 of 4 do not fit (data.bad_rows)\n  own:" in printed and "rollout.max_prompt_tokens = " in printed
