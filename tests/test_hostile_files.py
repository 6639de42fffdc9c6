"""Files that nobody should have written, at every reader of files: one message, no traceback, in bounded time."""

import json
import os
import resource
import time

import numpy as np
import pytest

import grpo_roc_jax as g
from grpo_roc_jax.__main__ import main
from grpo_roc_jax.config import Config
from grpo_roc_jax.data.problems import load_problems
from grpo_roc_jax.gguf_files.folder import gguf_tensors
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.convert import read_published, resolve_config
from grpo_roc_jax.model.lora import read_lora
from grpo_roc_jax.model.published import read_config
from grpo_roc_jax.model.safetensors_io import read_directory
from grpo_roc_jax.record.batches import read_batch
from grpo_roc_jax.record.checkpoint_files import InvalidCheckpoint, read_host, saved_stage
from grpo_roc_jax.record.events import read_events
from grpo_roc_jax.record.metrics import read_metrics
from grpo_roc_jax.record.run_dir import saved_settings
from grpo_roc_jax.record.trace import read_trace
from grpo_roc_jax.run import choices
from grpo_roc_jax.run.durations import read_timings
from grpo_roc_jax.run.summary import read_summary
from grpo_roc_jax.settings import files
from grpo_roc_jax.settings.cli import ConfigError, load_config
from grpo_roc_jax.text.config import PublishedTemplate
from grpo_roc_jax.text.templates import load_template
from grpo_roc_jax.text.tokenizer import load_tokenizer
from grpo_roc_jax.view.answers import Runs
from grpo_roc_jax.view.atif import read_atif
from grpo_roc_jax.view.curves import load_runs
from tests.helpers.demo import write_run

DEEP = "[" * 100_000 + "]" * 100_000
NESTED = '{"a": ' * 500 + "1" + "}" * 500
ALIASES = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
YAML = {
    "aliases": ALIASES,
    "merges": "a: &a {k: v}\n" + "".join(
        f"{n}: &{n} {{p: *{b}, q: *{b}, r: *{b}, s: *{b}}}\n" for b, n in zip("abcdefghijk", "bcdefghijkl", strict=True)
    ),
    "itself": "a: &a [*a]\n",
    "deep lists": f"steps: {DEEP}\n",
    "deep mappings": "".join(" " * i + "a:\n" for i in range(1500)),
    "digits": f"steps: {'9' * 5000}\n",
    "digits of base 16": f"steps: 0x{'f' * 200_000}\n",
    "parts of 60": f"steps: {':'.join(['59'] * 100_000)}\n",
    "parts of 60 with a point": f"optim: {{lr: {':'.join(['59'] * 100_000)}.5}}\n",
    "a day": "steps: 2024-99-99\n",
    "a tag": "name: !!python/object/apply:os.system [echo]\n",
    "a key": "? [a, b]\n: 1\n",
    "zero": "a: \0\n",
    "long": "# " + "x" * (1 << 20),
}  # fmt: skip
JSON = {
    "deep": DEEP,
    "deep in an object": f'{{"a": {DEEP}}}',
    "nested": NESTED,
    "digits": '{"a": ' + "9" * 5000 + "}",
    "cut": '{"a": [',
    "list": "[1, 2]",
    "number": "3",
    "text": "\0\1 not JSON",
    "not UTF-8": b"\xff\xfe{}",
}


@pytest.fixture(autouse=True)
def bounded_time():
    """Ten processor seconds and no growth by gigabytes."""
    before, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.process_time() - before < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 1 << 20


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize("name", YAML)
def test_a_configuration(tmp_path, name, capsys):
    path = write(tmp_path / "it.yaml", YAML[name])
    with pytest.raises(ConfigError) as caught:
        load_config(Config, [str(path)], prog="x")
    assert "it.yaml" in str(caught.value) or "unknown key" in str(caught.value)
    assert main(["train", str(path)]) == 2
    printed = capsys.readouterr().err
    assert "configuration: " in printed and "Traceback" not in printed and len(printed) < 2000


def test_a_configuration_on_the_command_line():
    for value in ("{a: " + DEEP[:20_000] + "}", "{a: &a [*a]}", "{k: " + "9" * 5000 + "}"):
        with pytest.raises(ConfigError):
            g.read_config("toy.yaml", "--advantage", value)


def test_the_configuration_of_a_run(tmp_path):
    run = write_run(tmp_path / "run", 0, steps=1, groups=1, size=2)
    for name, content in YAML.items():
        write(run / "config.yaml", content)
        assert isinstance(saved_settings(run), dict | None), name
        try:
            load_runs([str(run)])
        except ValueError as error:
            assert "config.yaml" in str(error), name


READERS = {
    "config.json": lambda folder: resolve_config(ModelConfig(path=str(folder))),
    "tokenizer.json": lambda folder: load_tokenizer(g.read_config("toy.yaml", f"--text.tokenizer={folder}").text),
    "tokenizer_config.json": load_template,
    "chat_template.json": load_template,
    "adapter_config.json": read_lora,
    "model.safetensors.index.json": read_directory,
    "host_0.json": lambda folder: [saved_stage(folder), read_host(folder, 0)],
    "summary.json": read_summary,
    "document.json": lambda folder: list(read_atif(folder / "document.json")),
    "gguf.json": gguf_tensors,
}
LEFT = {
    "choices.json": lambda folder: choices.recorded(folder, "a", {"update.remat"}),
    "timings.json": lambda folder: read_timings(folder / "timings.json") or None,
}
"""Files that are written anew where they cannot be read."""


@pytest.mark.parametrize("content", [*JSON, "values"])
@pytest.mark.parametrize("file", LEFT)
def test_a_file_that_is_left_out_if_it_cannot_be_read(tmp_path, file, content):
    values = {"values": '{"a": [1], "b": ' + "1" + "0" * 400 + ', "c": Infinity}'}
    write(tmp_path / file, (JSON | values)[content])
    assert LEFT[file](tmp_path) is None
    choices.record(tmp_path, "a", {"update.remat": "all"})
    assert choices.recorded(tmp_path, "a", {"update.remat"}) == {"update.remat": "all"}


def test_choices_that_are_none_are_made_again():
    config = g.read_config("toy.yaml")
    for chosen in ({"update.remat": "everything"}, {"batch.rows": [1]}):
        with pytest.raises((ValueError, TypeError)):
            choices.with_choices(config, chosen)


def test_a_chat_template_in_a_file(tmp_path):
    write(tmp_path / "tokenizer_config.json", '{"chat_template": [3, {"a": 1}, {"name": [], "template": 2}]}')
    with pytest.raises(ValueError, match="has no chat template"):
        load_template(tmp_path)
    for content in (b"\xff", b"{{ x"):
        write(tmp_path / "chat_template.jinja", content)
        with pytest.raises(ValueError):
            load_template(tmp_path).render([{"role": "user", "content": "1"}])
    with open(tmp_path / "chat_template.jinja", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match="must be at most"):
        load_template(tmp_path)


def test_variables_of_a_template():
    deep = "[" * 100_000
    assert PublishedTemplate(variables=(f"a={deep}", "b=[1]")).given == {"a": deep, "b": [1]}


@pytest.mark.parametrize("content", JSON)
@pytest.mark.parametrize("file", READERS)
def test_a_file_of_json(tmp_path, file, content):
    write(tmp_path / file, JSON[content])
    with pytest.raises((ValueError, OSError, InvalidCheckpoint)) as caught:
        READERS[file](tmp_path)
    assert len(str(caught.value)) < 1000


def test_lines_of_json(tmp_path, caplog):
    """A row of data is named and dropped; a line of the log is named and left out; others are left out."""
    run = write_run(tmp_path / "run", 0, steps=1, groups=1, size=2)
    good = json.dumps({"problem": "1+1", "answer": "2"})
    for content in JSON.values():
        line = (content if isinstance(content, bytes) else content.encode()).replace(b"\n", b" ")
        data = write(
            tmp_path / "rows.jsonl", b"\n".join([good.encode(), line, good.replace("1+1", "2+0").encode(), b""])
        )
        problems, report = load_problems(data)
        assert len(problems) == 2 and len(report.bad) == 1
        for name in ("metrics.jsonl", "events.jsonl"):
            with open(run / name, "ab") as out:
                out.write(line + b"\n")
        assert read_metrics(run) and isinstance(read_events(run), list)
        log = write(tmp_path / "log" / "trajectories" / "step_00000001.jsonl", line + b"\n")
        assert list(read_trace(tmp_path / "log")) == [] and "line 1: cannot be read and is left out" in caplog.text
        (block,) = Runs([str(tmp_path / "log")]).blocks(0, [("step", 1)])
        assert json.loads(block)["unreadable"] == [1]
        log.unlink()


SHAPE = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 256,
    "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu", "max_position_embeddings": 512,
}  # fmt: skip
ABSURD = [
    ("num_hidden_layers", 10**9), ("vocab_size", 10**12), ("hidden_size", 10**30), ("intermediate_size", 1 << 27),
    ("num_attention_heads", 0), ("num_attention_heads", -4), ("num_key_value_heads", 10**9), ("head_dim", 10**9),
    ("hidden_size", "64"), ("num_hidden_layers", 2.5), ("num_hidden_layers", [2]), ("vocab_size", {"a": 1}),
    ("rope_scaling", "x"), ("rope_scaling", [1]), ("rope_parameters", 3), ("architectures", 7), ("layer_types", 5),
    ("rms_norm_eps", "small"), ("hidden_act", ["silu"]), ("vision_config", {"a": 1}), ("text_config", [1]),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), ABSURD)
def test_an_absurd_shape(tmp_path, key, value):
    write(tmp_path / "config.json", json.dumps(SHAPE | {key: value}))
    try:
        config = read_config(read_published(tmp_path))
    except ValueError as error:
        assert "Traceback" not in str(error)
    else:
        assert key in ("text_config", "layer_types", "rope_parameters", "vision_config", "hidden_act"), config


def test_shapes_beyond_every_machine_are_refused():
    assert read_config(SHAPE).layers == 2
    with pytest.raises(ValueError, match=r"come to .*e\+1\d parameters; must be at most 1e\+14"):
        ModelConfig(layers=10_000, d_model=1 << 20, d_ff=1 << 20)
    for word in ("--model.layers=1000000000", "--model.vocab_size=1000000000000", "--model.d_ff=1073741824"):
        with pytest.raises(ConfigError, match="must be at most"):
            g.read_config("toy.yaml", word)


def test_a_batch_of_a_replay(tmp_path):
    for name, about in (("deep", DEEP), ("list", "[]"), ("empty", "{}")):
        np.savez(tmp_path / f"{name}.npz", about=np.array(about))
        with pytest.raises(ConfigError, match=r"npz is no batch of a run, or is damaged; name a file batches/step_N"):
            read_batch(tmp_path / f"{name}.npz")
    for content in ("PK\3\4", "junk", ""):
        with pytest.raises(ConfigError, match="is no batch of a run"):
            read_batch(write(tmp_path / "no.npz", content))


def test_files_that_are_none(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is not a regular file"):
        files.read_text(tmp_path / "pipe")
    with open(tmp_path / "long", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match="must be at most"):
        files.read_json(tmp_path / "long")


def test_depth_by_hand():
    assert not files.depth_over([[1]], 2) and files.depth_over([[1]], 1)
    assert not files.depth_over("x", 1) and files.depth_over({"a": {"b": {}}}, 2) and not files.depth_over({}, 1)
    assert files.parse_json("[" * 100 + "]" * 100, "x") and not files.depth_over([{"a": 1}, 2], 2)
