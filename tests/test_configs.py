"""Every recipe passes `--dry-run`, with the shape of its published model and its memory and batches in figures."""

import json
import re

import jax
import pytest

from grpo_roc_jax.config import Config
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
GIGABYTES = {
    "qwen3_0_6b_gsm8k": 16,
    "qwen2_5_7b_lora": 24,
    "qwen2_5_7b_lora_4bit": 16,
    "qwen2_5_0_5b_lora_t4": 16,
    "gemma3_1b_gsm8k": 24,
    "gemma4_e2b_lora": 16,
    "llama3_2_1b_gsm8k": 24,
}
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
