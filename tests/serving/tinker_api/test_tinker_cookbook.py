"""Recipes of `tinker-cookbook`, unmodified and offline, against `grpo-roc serve --tinker` as a process of its own.

`TINKER_PYTHON` names an interpreter with `tinker` and `tinker-cookbook`; by default it is this one.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean

import pytest

from tests.helpers.knobs_host import tokenizer_folder

PYTHON = os.environ.get("TINKER_PYTHON", sys.executable)
NAME = "Qwen/Qwen3-8B"
"""The recipes take their renderer from a table of names."""
if subprocess.run([PYTHON, "-c", "import tinker_cookbook"], capture_output=True, check=False).returncode:
    pytest.skip("tinker-cookbook is not installed", allow_module_level=True)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the recipes look for beside them: a model of random weights with its tokenizer, and two data sets."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    root = tmp_path_factory.mktemp("cookbook")
    model = root / NAME
    shutil.copytree(tokenizer_folder("chatml_tools"), model)
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (model / "tokenizer_config.json").write_text(json.dumps(named))
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 272, "max_position_embeddings": 4096}
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**sizes, tie_word_embeddings=False, eos_token_id=258, bos_token_id=None)
    transformers.Qwen3ForCausalLM(config).save_pretrained(model)
    robots, sums = root / "HuggingFaceH4/no_robots", root / "openai/gsm8k"
    for path in (robots, sums):
        path.mkdir(parents=True)
    talk = [("user", "Count to {n}."), ("assistant", "{n} is what you asked for, so I say {n}.")]
    rows = [{"messages": [{"role": r, "content": t.format(n=n)} for r, t in talk]} for n in range(160)]
    (robots / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    problems = [{"question": f"What is {n} + 1?", "answer": f"Easy. #### {n + 1}"} for n in range(16)]
    (sums / "train.jsonl").write_text("\n".join(map(json.dumps, problems)))
    (sums / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: train.jsonl\n---\n"
    )
    return root


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Server:
    """`grpo-roc serve --tinker` on a fixed port and store, which can be killed and started again."""

    def __init__(self, folder, store):
        self.folder, self.store, self.port = folder, store, free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.kill()

    def start(self):
        arguments = ["--tinker", f"{NAME}={self.folder / NAME}", "--port", str(self.port), "--store", str(self.store)]
        with open(self.store.with_suffix(".log"), "a") as log:
            command = [sys.executable, "-m", "grpo_roc_jax", "serve", *arguments, "--context", "1024"]
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self.process.stdout.readline().startswith("http://")

    def kill(self):
        self.process.kill()
        self.process.wait()


def begin(folder, module, server, log, **settings):
    """The process of a recipe."""
    offline = {"TINKER_API_KEY": "tml-x", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    offline |= {"HF_HOME": str(folder / ".hf"), "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    words = [f"{name}={value}" for name, value in {"base_url": server.url, "log_path": log, **settings}.items()]
    command = [PYTHON, "-m", f"tinker_cookbook.recipes.{module}", *words]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | offline
    with open(f"{log}.out", "a") as output:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)


def metrics(log):
    file = Path(log) / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")] if file.exists() else []


def wait_for(process, log, steps):
    """Until a recipe has logged so many steps."""
    while len(metrics(log)) < steps:
        assert process.poll() is None, Path(f"{log}.out").read_text()[-3000:]
        time.sleep(0.05)
    assert process.poll() is None  # it is in the middle


def finish(process, log):
    assert process.wait(1200) == 0, Path(f"{log}.out").read_text()[-3000:]
    return metrics(log)


def test_supervised_training_goes_on_after_kills_with_equal_numbers(folder, tmp_path):
    """Without a kill; with the server killed and started again; with both killed and both started again."""
    settings = {"model_name": NAME, "batch_size": 4, "save_every": 10, "learning_rate": 0.003, "lora_rank": 8}
    losses = []
    for killed in ((), ("server",), ("server", "client")):
        log = tmp_path / ("_".join(killed) or "plain")
        with Server(folder, tmp_path / f"store_{log.name}") as server:
            client = begin(folder, "sl_loop", server, log, **settings)
            if killed:
                wait_for(client, log, 15)
                server.kill()
                if "client" in killed:
                    client.kill()
                    client.wait()
                server.start()
                if "client" in killed:
                    client = begin(folder, "sl_loop", server, log, **settings)
            rows = {row["step"]: row["train_mean_nll"] for row in finish(client, log)}  # a resumed one logs steps again
        assert sorted(rows) == list(range(40))
        losses.append([rows[step] for step in range(40)])
    assert losses[0][-1] < 0.9 * losses[0][0]
    assert losses[1] == losses[0]
    assert losses[2] == losses[0]


def test_reinforcement_learning_raises_the_reward_and_outlives_the_server(folder, tmp_path):
    """Reward for the end of an answer within 16 tokens; the server is killed in the middle of a step."""
    log = tmp_path / "log"
    settings = {"env": "arithmetic", "model_name": NAME, "renderer_name": "qwen3", "loss_fn": "importance_sampling"}
    settings |= {"group_size": 8, "groups_per_batch": 8, "max_tokens": 16, "max_steps": 30, "eval_every": 0}
    settings |= {"save_every": 0, "learning_rate": 0.01, "lora_rank": 8}
    with Server(folder, tmp_path / "store") as server:
        client = begin(folder, "math_rl.train", server, log, **settings)
        wait_for(client, log, 5)
        server.kill()
        server.start()
        rows = [row for row in finish(client, log) if "env/all/reward/total" in row]  # without that of the end
    assert rows[0]["optim/kl_sample_train_v1"] < 1e-4
    assert [row["step"] for row in rows] == list(range(30))
    rewards = [row["env/all/reward/total"] for row in rows]
    # A step's mean of 64 rollouts is off by 0.004, so the difference of these means by 0.002; it was 0.013 in 40 steps.
    assert mean(rewards[-15:]) > mean(rewards[:3]) + 0.005
    assert not [row for row in rows if row.get("optim/update_skipped")]


def test_the_plain_loop_of_reinforcement_learning_runs(folder, tmp_path):
    log = tmp_path / "log"
    log.mkdir()
    settings = {"model_name": NAME, "batch_size": 4, "group_size": 4, "max_tokens": 16, "max_steps": 3}
    with Server(folder, tmp_path / "store") as server:
        for loss in ("importance_sampling", "stable_reinforce"):
            client = begin(folder, "rl_loop", server, log / loss, loss_fn=loss, **settings)
            if loss == "importance_sampling":
                assert len(finish(client, log / loss)) == 3
            else:
                assert client.wait(600) != 0
                assert "stable_reinforce, which is not served" in Path(f"{log / loss}.out").read_text()
