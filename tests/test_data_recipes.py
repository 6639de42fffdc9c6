"""Each file of `configs/data` reads rows of the format that it is named after."""

import json
import re
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from grpo_roc_jax.config import Config
from grpo_roc_jax.data.pipeline import eval_problems, make_problem_stream, make_trace_stream
from grpo_roc_jax.settings.cli import CONFIG_DIR, load_config
from grpo_roc_jax.train import main

QUESTIONS = [(f"{i}+1?", str(i + 1)) for i in range(4)]
CALL = {"id": "a", "type": "function", "function": {"name": "python", "arguments": '{"code": "print(2)"}'}}
TOOL = {
    "type": "function",
    "function": {"name": "python", "description": "runs code", "parameters": {"type": "object"}},
}


def trl(question, answer):
    return {"prompt": [{"role": "user", "content": question}], "solution": f"It is $\\boxed{{{answer}}}$."}


def verl(question, answer):
    truth = {"style": "rule", "ground_truth": answer}
    return {"data_source": "sums", "prompt": trl(question, "")["prompt"], "reward_model": truth, "extra_info": {"i": 1}}


def verifiers(question, answer):
    return {"question": question, "answer": answer, "info": {"level": 3}, "task": "sums"}


def gsm8k(question, answer):
    return {"question": question, "answer": f"so <<1+1=2>>2\n#### {answer}"}


def mathematics(question, answer):
    return {"problem": question, "solution": f"It is $\\boxed{{{answer}}}$.", "level": "Level 5"}


def conversation(question, answer):
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "<think>so</think>", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "a", "content": "2"},
        {"role": "assistant", "content": f"<answer>\\boxed{{{answer}}}</answer>"},
    ]
    return {"messages": messages, "tools": [TOOL]}


SHAPES = {
    "trl": trl,
    "verl": verl,
    "verifiers": verifiers,
    "gsm8k": gsm8k,
    "math": mathematics,
    "messages": conversation,
}


def save(path: Path, rows: list[dict]) -> None:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_every_recipe_has_its_shape_here():
    assert {path.stem for path in (CONFIG_DIR / "data").glob("*.yaml")} == set(SHAPES)


@pytest.mark.parametrize("name", SHAPES)
def test_a_recipe_reads_its_rows(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    config = load_config(Config, ["toy", f"data/{name}"], prog="test").data
    if name != "messages":
        for i, (source, test) in enumerate((s, s in config.eval_sources) for s in config.sources + config.eval_sources):
            pairs = [(f"{'held' * test} {i} {question}", answer) for question, answer in QUESTIONS]
            save(tmp_path / source, [SHAPES[name](*pair) for pair in pairs])
        batch = next(make_problem_stream(config, problems=4, seed=0))
        assert sorted(problem.prompt.split()[-1] for problem in batch) == [question for question, _ in QUESTIONS]
        assert sorted(problem.answer for problem in batch) == ["1", "2", "3", "4"]
        assert all(problem.prompt.startswith("held") for problem in eval_problems(config))
        if name == "verifiers":
            assert batch[0].extra["info"] == {"level": 3}
        if name == "verl":
            assert batch[0].source == "sums" and batch[0].extra["extra_info"] == {"i": 1}
    for source in config.trace_sources:
        save(tmp_path / source, [conversation(*pair) for pair in QUESTIONS])
        stream = make_trace_stream(config, traces=4, seed=0)
        assert {trace.problem.prompt for trace in next(stream)} == {question for question, _ in QUESTIONS}
        assert "4 rows have their own tools" in stream.notes[0]
    assert main(["toy", f"data/{name}", "--dry-run", f"--run_dir={tmp_path / 'run'}"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"memory a device, [GM]B: masters", printed) and "trajectories a step" in printed


def test_conversations_load_from_parquet_too(tmp_path):
    """Parquet fills structs with nulls: for arguments of other calls and for keys of other schemas."""
    rows = [conversation(*pair) for pair in QUESTIONS]
    rows[0]["messages"][1]["tool_calls"] = [{"id": "a", "function": {"name": "python", "arguments": {"x": 1}}}]
    for row in rows[1:]:
        row["messages"][1]["tool_calls"] = [
            {"id": "a", "function": {"name": "python", "arguments": {"code": "print(2)"}}}
        ]
    rows[1]["tools"] = [{"type": "function", "function": TOOL["function"] | {"strict": True}}]
    save(tmp_path / "sft.parquet", rows)
    config = load_config(Config, ["toy", "data/messages", f"--data.trace_sources={tmp_path / 'sft.parquet'}"], prog="t")
    traces = next(make_trace_stream(config.data, traces=4, seed=0))
    by_question = {trace.problem.prompt: trace for trace in traces}
    assert '"arguments": {"x": 1}}' in by_question["0+1?"].turns[0]
    assert '"arguments": {"code": "print(2)"}}' in by_question["3+1?"].turns[0]
    assert [json.loads(by_question[q].tools) for q in ("0+1?", "1+1?")] == [rows[0]["tools"], rows[1]["tools"]]
