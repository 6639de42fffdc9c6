"""Every recipe passes `--dry-run`, with the shape of its published model and its memory and batches in figures."""

import json
import re
from pathlib import Path

import jax
import pyarrow
import pyarrow.parquet
import pytest

from grpo_roc_jax.config import Config
from grpo_roc_jax.data.pipeline import eval_problems, make_problem_stream
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


MESSAGES = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "<answer>2</answer>"}]


def write_data(folder):
    """Small files under the names of the published sets that the recipes read."""
    (folder / "words").mkdir()
    names = ("gsm8k_train", "gsm8k_test", "math_42k", "aime24", "kept", "words/train", "words/heldout", "words/svamp")
    for name in names:
        rows = [{"question": f"{name}: {i} + 1?", "answer": f"#### {i + 1}"} for i in range(64)]
        save(folder / f"{name}.jsonl", rows)
    for name in ("gsm8k_traces", "words/traces"):
        save(folder / f"{name}.jsonl", [{"messages": MESSAGES}])


@pytest.mark.parametrize("name", [path.stem for path in sorted(CONFIG_DIR.glob("*.yaml"))])
def test_recipes_pass_the_dry_run(name, tmp_path, capsys, monkeypatch):
    write_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    words = [name, "--dry-run", "full", f"--run_dir={tmp_path / 'run'}"]
    if name in ("cobalt", "smollm2_words"):
        words.append("--model.path=")  # the policy of the run that is cut; a model in a package
    if name in ("words", "smollm2_words"):
        words.append("--text.tokenizer=toy")  # their own one is trained on the data
    if name == "smollm2_words":  # its data are built like those of `words`
        (tmp_path / "words").rename(tmp_path / "words2")
        words += ["--data.eval_sources", "words2/heldout.jsonl"]
    if name in MODELS:
        shape, template = MODELS[name]
        folder = make_directory(write_config(shape, tmp_path / "model"), template)  # makes many tokens of a prompt
        words += [f"--model.path={folder}", "--rollout.max_prompt_tokens=4096", "--batch.row_length=65536"]
        if name.startswith(("rstar2", "qwen3_30b")):  # for a pod, whose mesh eight devices do not make
            words += ["--sharding.fsdp=8", "--sharding.tensor=1"]
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


def shaped(name, question, answer):
    """A row of a problem as the project has it that the file is named after."""
    solution = f"It is $\\boxed{{{answer}}}$."
    prompt, truth = [{"role": "user", "content": question}], {"style": "rule", "ground_truth": answer}
    return {
        "trl": {"prompt": prompt, "solution": solution},
        "verl": {"data_source": "sums", "prompt": prompt, "reward_model": truth, "extra_info": {"i": 1}},
        "verifiers": {"question": question, "answer": answer, "info": {"level": 3}, "task": "sums"},
        "gsm8k": {"question": question, "answer": f"so <<1+1=2>>2\n#### {answer}"},
        "math": {"problem": question, "solution": solution, "level": "Level 5"},
    }[name]


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
        for i, source in enumerate(config.sources + config.eval_sources):
            held = "held" * (source in config.eval_sources)
            save(tmp_path / source, [shaped(name, f"{held} {i} {n}+1?", str(n + 1)) for n in range(4)])
        batch = next(make_problem_stream(config, problems=4, seed=0))
        read = sorted((problem.prompt.split()[-1], problem.answer) for problem in batch)
        assert read == [("0+1?", "1"), ("1+1?", "2"), ("2+1?", "3"), ("3+1?", "4")]
        assert all(problem.prompt.startswith("held") for problem in eval_problems(config))
        if name == "verl":
            assert batch[0].source == "sums" and batch[0].extra["extra_info"] == {"i": 1}
    for source in config.trace_sources:
        save(tmp_path / source, [{"messages": MESSAGES}] * 4)
    assert main(["toy", f"data/{name}", "--dry-run", f"--run_dir={tmp_path / 'run'}"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"memory a device, [GM]B: masters", printed) and "trajectories a step" in printed


GIGABYTES = dict.fromkeys(("qwen3_0_6b_gsm8k", "qwen2_5_7b_lora_4bit", "qwen2_5_0_5b_lora_t4", "gemma4_e2b_lora"), 16)


@pytest.mark.parametrize("name", GIGABYTES)
def test_recipes_for_one_device_fit_it(name, tmp_path):
    folder = write_config(MODELS[name][0], tmp_path / "model")
    words = [f"--model.path={folder}", "--model.compute_dtype=bfloat16"]  # as the GPUs that they are for
    config = load_config(Config, [name, *words], prog="test")
    lines = memory_lines(config, resolve_config(config.model), make_mesh(ShardingConfig(), jax.devices()[:1]))
    assert float(re.search(r"together ([\d.]+) of 1 device", lines[-1])[1]) <= 0.9 * GIGABYTES[name], lines
