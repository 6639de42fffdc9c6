"""A recipe of `tinker-cookbook`, unmodified and offline, against `grpo-roc serve --tinker` as a process of its own.

`TINKER_PYTHON` names an interpreter with `tinker` and `tinker-cookbook`; by default it is this one.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.helpers.knobs_host import tokenizer_folder

PYTHON = os.environ.get("TINKER_PYTHON", sys.executable)
NAME = "Qwen/Qwen3-8B"
"""The recipe takes its renderer from a table of names."""
if subprocess.run([PYTHON, "-c", "import tinker_cookbook"], capture_output=True, check=False).returncode:
    pytest.skip("tinker-cookbook is not installed", allow_module_level=True)
pytestmark = pytest.mark.slow


def test_supervised_training_runs(tmp_path):
    """On a model of random weights with its tokenizer and a data set, which the recipe looks for beside it."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    model, log, robots = tmp_path / NAME, tmp_path / "log", tmp_path / "HuggingFaceH4/no_robots"
    shutil.copytree(tokenizer_folder("chatml_tools"), model)
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (model / "tokenizer_config.json").write_text(json.dumps(named))
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 272, "max_position_embeddings": 4096}
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**sizes, tie_word_embeddings=False, eos_token_id=258, bos_token_id=None)
    transformers.Qwen3ForCausalLM(config).save_pretrained(model)
    robots.mkdir(parents=True)
    talk = [("user", "Count to {n}."), ("assistant", "{n} is what you asked for, so I say {n}.")]
    rows = [{"messages": [{"role": r, "content": t.format(n=n)} for r, t in talk]} for n in range(160)]
    (robots / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    offline = {"TINKER_API_KEY": "tml-x", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    offline |= {"HF_HOME": str(tmp_path / ".hf"), "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | offline
    arguments = ["--tinker", f"{NAME}={model}", "--port", "0", "--store", str(tmp_path / "store"), "--context", "1024"]
    command = [sys.executable, "-m", "grpo_roc_jax", "serve", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            settings = {"base_url": server.stdout.readline().strip(), "log_path": log, "model_name": NAME}
            settings |= {"batch_size": 4, "save_every": 10, "learning_rate": 0.003, "lora_rank": 8}
            words = [f"{name}={value}" for name, value in settings.items()]
            command = [PYTHON, "-m", "tinker_cookbook.recipes.sl_loop", *words]
            options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": 1200}
            done = subprocess.run(command, check=False, **options)
        finally:
            server.kill()
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [json.loads(line)["train_mean_nll"] for line in (log / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 40 and losses[-1] < 0.9 * losses[0]
