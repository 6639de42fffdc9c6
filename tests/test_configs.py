"""Every recipe passes `--dry-run`, with the shape of its published model and its memory and batches in figures."""

import json
import re
from pathlib import Path

import jax
import pyarrow
import pyarrow.parquet
import pytest

from grpo_roc_jax.config import Config
from grpo_roc_jax.data.pipeline import eval_problems, make_problem_stream, make_trace_stream
from grpo_roc_jax.model.convert import resolve_config
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh
from grpo_roc_jax.run.policy import memory_lines
from grpo_roc_jax.settings.cli import CONFIG_DIR, load_config
from grpo_roc_jax.train import main
from tests.helpers.published_configs import CONFIGS, write_config
from tests.text.test_templates import make_directory

MODELS = {
    "qwen3_0_6b_gsm8k": ("qwen3_0_6b", "thinking"),
    "qwen2_5_7b_lora": ("qwen2_5_7b", "chatml_tools"),
    "qwen2_5_7b_lora_4bit": ("qwen2_5_7b", "chatml_tools"),
    "qwen2_5_0_5b_lora_t4": ("qwen2_5_0_5b", "chatml_tools"),
    "gemma3_1b_gsm8k": ("gemma3_1b", "gemma"),
    "gemma4_e2b_lora": ("gemma4_e2b", "gemma4"),
    "llama3_2_1b_gsm8k": ("llama3_2_1b", "llama3"),
    "rstar2_qwen3_14b": ("qwen3_14b", "thinking"),
    "qwen3_30b_a3b": ("qwen3_30b_a3b", "thinking"),
}
ON_EIGHT = ["--sharding.fsdp=8", "--sharding.tensor=1"]
"""In place of the mesh of a recipe for a pod, which eight devices do not make; `plan` compiles for the pod itself."""
GIGABYTES = dict.fromkeys(("qwen3_0_6b_gsm8k", "qwen2_5_7b_lora_4bit", "qwen2_5_0_5b_lora_t4", "gemma4_e2b_lora"), 16)
GIGABYTES |= dict.fromkeys(("qwen2_5_7b_lora", "gemma3_1b_gsm8k", "llama3_2_1b_gsm8k"), 24)
"""Of the one device that the recipe names; a tenth is left for XLA's scratch."""


ROOM = ("--rollout.max_prompt_tokens=4096", "--batch.row_length=65536")
"""The tokenizer of these directories makes many tokens of a prompt."""


def write_data(folder):
    """Small files under the names of the published sets that the recipes read."""
    for start, name in enumerate(("gsm8k_train", "gsm8k_test", "math_42k", "aime24", "kept")):
        rows = [{"question": f"What is {100 * start + i} + 1?", "answer": str(100 * start + i + 1)} for i in range(64)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    messages = [{"role": "user", "content": "What is 1 + 1?"}, {"role": "assistant", "content": "It is 2."}]
    (folder / "words").mkdir()
    for start, name in enumerate(("train", "heldout", "svamp")):
        rows = [{"question": f"Tom has {start} and {i}.", "answer": f"#### {start + i}"} for i in range(64)]
        (folder / f"words/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for name in ("gsm8k_traces", "words/traces"):
        (folder / f"{name}.jsonl").write_text(json.dumps({"messages": messages}) + "\n", encoding="utf-8")


@pytest.mark.parametrize("name", [path.stem for path in sorted(CONFIG_DIR.glob("*.yaml"))])
def test_recipes_pass_the_dry_run(name, tmp_path, capsys, monkeypatch):
    write_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    words = [name, "--dry-run", "full", f"--run_dir={tmp_path / 'run'}"]
    if name == "cobalt":
        words.append("--model.path=")  # it starts from the policy of the run that is cut
    if name == "words":
        words.append("--text.tokenizer=toy")  # its own one is trained on the data
    if name == "smollm2_words":  # its model is in a package, its data are built like those of `words`
        (tmp_path / "words").rename(tmp_path / "words2")
        words += ["--model.path=", "--text.tokenizer=toy", "--data.eval_sources", "words2/heldout.jsonl"]
    if name in MODELS:
        shape, template = MODELS[name]
        folder = make_directory(write_config(shape, tmp_path / "model"), template)
        words += [f"--model.path={folder}", *ROOM]
        words += ON_EIGHT if name.startswith(("rstar2", "qwen3_30b")) else []
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert re.search(r"\d+ problems x \d+ sampled -> \d+ kept = \d+ trajectories a step", printed)
    assert re.search(r"memory a device, [GM]B: masters [\d.]+, moments", printed)
    if name in MODELS:
        counted = float(re.search(r"model: ([\d.]+) billion parameters", printed)[1])
        assert counted == pytest.approx(CONFIGS[MODELS[name][0]][1], abs=0.0015)


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONFIG_DIR / "environments").glob("*.yaml")))
def test_recipes_of_games_pass_the_dry_run(name, tmp_path, capsys):
    if name == "corridor":
        pytest.importorskip("grpo_roc_jax.contrib.environments")
        pytest.importorskip("gymnasium")
    assert main([f"environments/{name}.yaml", "--dry-run", "full", f"--run_dir={tmp_path / 'run'}"]) == 0
    assert "environment:" in capsys.readouterr().out


@pytest.mark.parametrize("name", GIGABYTES)
def test_recipes_for_one_device_fit_it(name, tmp_path):
    folder = write_config(MODELS[name][0], tmp_path / "model")
    words = [f"--model.path={folder}", "--model.compute_dtype=bfloat16"]  # as the GPUs that they are for
    config = load_config(Config, [name, *words], prog="test")
    lines = memory_lines(config, resolve_config(config.model), make_mesh(ShardingConfig(), jax.devices()[:1]))
    print(name, *lines, sep="\n")
    assert float(re.search(r"together ([\d.]+) of 1 device", lines[-1])[1]) <= 0.9 * GIGABYTES[name]


# ---- each file of configs/data reads rows of the format that it is named after -------------------------------------

QUESTIONS = [(f"{i}+1?", str(i + 1)) for i in range(4)]
CALL = {"id": "a", "type": "function", "function": {"name": "python", "arguments": '{"code": "print(2)"}'}}
PYTHON = {"name": "python", "description": "runs code", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": PYTHON}


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


SHAPES = {shape.__name__: shape for shape in (trl, verl, verifiers, gsm8k)}
SHAPES |= {"math": mathematics, "messages": conversation}


def save(path: Path, rows: list[dict]) -> None:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONFIG_DIR / "data").glob("*.yaml")))
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
