"""Files that nobody should have written, at every reader of files: one message, no traceback, in bounded time."""

import json
import os
import resource
import time
from itertools import pairwise

import numpy as np
import pytest

import grpo_roc_jax as g
from grpo_roc_jax.__main__ import main
from grpo_roc_jax.gguf_files.folder import gguf_tensors
from grpo_roc_jax.model import convert, lora, published, safetensors_io
from grpo_roc_jax.record import batches, checkpoint_files
from grpo_roc_jax.run.summary import read_summary
from grpo_roc_jax.settings import files
from grpo_roc_jax.settings.cli import load_config
from grpo_roc_jax.text.templates import load_template
from grpo_roc_jax.view.atif import read_atif

DEEP = "[" * 100_000 + "]" * 100_000
YAML = {
    "aliases": "a: &a [x, x]\n" + "".join(f"{n}: &{n} [{f'*{b}, ' * 9}]\n" for b, n in pairwise("abcdefghi")),
    "itself": "a: &a [*a]\n",
    "deep lists": f"steps: {DEEP}\n",
    "digits of base 16": f"steps: 0x{'f' * 200_000}\n",
    "parts of 60": f"optim: {{lr: {':'.join(['59'] * 100_000)}.5}}\n",
    "a day": "steps: 2024-99-99\n",
    "a tag": "name: !!python/object/apply:os.system [echo]\n",
    "long": "# " + "x" * (1 << 20),
}
JSON = {"deep": DEEP, "nested": '{"a": ' * 500 + "1" + "}" * 500, "digits": '{"a": ' + "9" * 5000 + "}"}
JSON |= {"cut": '{"a": [', "list": "[1, 2]", "not UTF-8": b"\xff\xfe{}"}


@pytest.fixture(autouse=True)
def bounded_time():
    """Ten processor seconds and no growth by gigabytes."""
    before, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.process_time() - before < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 1 << 20


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize("name", YAML)
def test_a_configuration(tmp_path, name, capsys):
    path = write(tmp_path / "it.yaml", YAML[name])
    with pytest.raises(g.ConfigError) as caught:
        load_config(g.Config, [str(path)], prog="x")
    assert "it.yaml" in str(caught.value) or "unknown key" in str(caught.value)
    assert main(["train", str(path)]) == 2
    printed = capsys.readouterr().err
    assert "configuration: " in printed and "Traceback" not in printed and len(printed) < 2000


READERS = {
    "config.json": lambda folder: convert.resolve_config(g.ModelConfig(path=str(folder))),
    "tokenizer.json": lambda folder: g.load_tokenizer(g.read_config("toy.yaml", f"--text.tokenizer={folder}").text),
    "tokenizer_config.json": load_template,
    "chat_template.json": load_template,
    "adapter_config.json": lora.read_lora,
    "model.safetensors.index.json": safetensors_io.read_directory,
    "host_0.json": lambda folder: [checkpoint_files.saved_stage(folder), checkpoint_files.read_host(folder, 0)],
    "summary.json": read_summary,
    "document.json": lambda folder: list(read_atif(folder / "document.json")),
    "gguf.json": gguf_tensors,
}


@pytest.mark.parametrize("content", JSON)
@pytest.mark.parametrize("file", READERS)
def test_a_file_of_json(tmp_path, file, content):
    write(tmp_path / file, JSON[content])
    with pytest.raises((ValueError, OSError, checkpoint_files.InvalidCheckpoint)) as caught:
        READERS[file](tmp_path)
    assert len(str(caught.value)) < 1000


SHAPE = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 256,
    "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu", "max_position_embeddings": 512,
}  # fmt: skip
ABSURD = [
    ("num_hidden_layers", 10**9), ("hidden_size", 10**30), ("num_attention_heads", 0), ("num_key_value_heads", 10**9),
    ("head_dim", 10**9), ("hidden_size", "64"), ("num_hidden_layers", 2.5), ("vocab_size", {"a": 1}),
    ("rope_scaling", "x"), ("rope_parameters", 3), ("architectures", 7), ("layer_types", 5), ("text_config", [1]),
    ("rms_norm_eps", "small"), ("hidden_act", ["silu"]), ("vision_config", {"a": 1}),
]  # fmt: skip


def test_absurd_shapes(tmp_path):
    assert published.read_config(SHAPE).layers == 2
    for key, value in ABSURD:
        write(tmp_path / "config.json", json.dumps(SHAPE | {key: value}))
        try:
            config = published.read_config(convert.read_published(tmp_path))
        except ValueError as error:
            assert "Traceback" not in str(error)
        else:
            assert key in ("text_config", "layer_types", "rope_parameters", "vision_config", "hidden_act"), config
    with pytest.raises(ValueError, match=r"come to .*e\+1\d parameters; must be at most 1e\+14"):
        g.ModelConfig(layers=10_000, d_model=1 << 20, d_ff=1 << 20)
    with pytest.raises(g.ConfigError, match="must be at most"):
        g.read_config("toy.yaml", "--model.layers=1000000000")


def test_a_batch_of_a_replay_files_that_are_none_and_depth_by_hand(tmp_path):
    for about in (DEEP, "[]", "{}"):
        np.savez(tmp_path / "a.npz", about=np.array(about))
        with pytest.raises(g.ConfigError, match=r"npz is no batch of a run, or is damaged; name a file batches/step_N"):
            batches.read_batch(tmp_path / "a.npz")
    with pytest.raises(g.ConfigError, match="is no batch of a run"):
        batches.read_batch(write(tmp_path / "no.npz", "PK\3\4"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is not a regular file"):
        files.read_text(tmp_path / "pipe")
    assert files.depth_over([[1]], 1) and files.depth_over({"a": {"b": {}}}, 2) and not files.depth_over({}, 1)
    assert files.parse_json("[" * 100 + "]" * 100, "x") and not files.depth_over([{"a": 1}, 2], 2)
