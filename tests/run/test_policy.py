"""A run on a published model and a run of an adapter: trained, checkpointed, exported, loaded by others. The memory of
the host: its heap, and what a dry run says that a run will take."""

import ctypes
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import grpo_roc_jax as g
from grpo_roc_jax.commands.export import export_model, main
from grpo_roc_jax.model.convert import load_params, resolve_config
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh
from grpo_roc_jax.model.transformer import forward, unembed
from grpo_roc_jax.run import policy
from grpo_roc_jax.run.components import resolve_model
from grpo_roc_jax.run.policy import frozen_like, frozen_weights, full_params, load_trained, memory_parts
from grpo_roc_jax.settings.cli import load_config
from tests.helpers.reference import random_params
from tests.test_train import TINY
from tests.test_train import shared_programs as shared_programs  # a fixture

SHAPE = g.ModelConfig(d_model=16, layers=2, heads=2, kv_heads=1, head_dim=8, d_ff=16, qk_norm=True, max_positions=64)

ONE = make_mesh(ShardingConfig(data=1), jax.devices()[:1])


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A directory as it would be downloaded: Qwen3's shape with the toy tokenizer."""
    folder = tmp_path_factory.mktemp("published") / "model"
    model = resolve_model(SHAPE, g.load_tokenizer(g.TextConfig()))
    export_model(jax.device_put(random_params(model, seed=7)), model, folder, dtype="float32")
    return folder


def run_config(run_dir: Path, published: Path, *more: str) -> g.Config:
    words = [word for word in TINY if not word.startswith("--model.")]
    words += [f"--run_dir={run_dir}", f"--model.path={published}", "--steps=2", *more]
    return load_config(g.Config, words, prog="")


def model_of(config: g.Config) -> g.ModelConfig:
    return resolve_model(resolve_config(config.model), g.load_tokenizer(config.text))


def stored(folder: Path) -> dict:
    return load_params(folder, resolve_config(g.ModelConfig(path=str(folder))))


def largest_change(before: dict, after: dict) -> dict[str, float]:
    change = lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max())  # noqa: E731
    return jax.tree.map(change, before, after)


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_training_starts_from_the_published_weights_and_comes_out_again(published, tmp_path):
    g.train_policy(run_config(tmp_path / "run", published, "--checkpoint.keep=5"))
    before = stored(published)
    assert main([str(tmp_path / "run" / "checkpoints" / "step_00000000"), str(tmp_path / "first")]) == 0
    jax.tree.map(np.testing.assert_array_equal, before, stored(tmp_path / "first"))
    assert main([str(tmp_path / "run"), str(tmp_path / "last"), "--max_shard_gb", "0.00001"]) == 0
    change = largest_change(before, stored(tmp_path / "last"))
    assert 0 < max(jax.tree.leaves(change)) < 1.0
    assert (tmp_path / "last" / "model.safetensors.index.json").is_file()
    config = json.loads((tmp_path / "last" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"] and config["torch_dtype"] == "float32"
    assert main([str(tmp_path / "run"), str(tmp_path / "last")]) == 2  # nothing is overwritten


@pytest.mark.slow
def test_an_adapter_is_trained_saved_alone_and_exported_both_ways(published, tmp_path):
    config = run_config(
        tmp_path / "run", published, "--lora=low_rank", "--lora.rank=2", "--surrogate.kl=k3", "--surrogate.kl.coef=0.01"
    )
    g.train_policy(config)
    before = stored(published)
    model = model_of(config)
    step, adapter = load_trained(tmp_path / "run" / "checkpoints", model, ONE, config.lora)
    assert step == 2 and set(adapter) == {"layers"}
    assert max(np.abs(leaf).max() for name, leaf in adapter["layers"].items() if name.endswith("_b")) > 0
    assert main([str(tmp_path / "run"), str(tmp_path / "merged")]) == 0
    change = largest_change(before, stored(tmp_path / "merged"))
    assert change["embed"] == 0 and change["layers"]["mlp_norm"] == 0 and change["layers"]["w_up"] > 0
    assert main([str(tmp_path / "run"), str(tmp_path / "adapter"), "--adapter"]) == 0
    files = {file.name for file in (tmp_path / "adapter").iterdir()}
    assert files == {"adapter_model.safetensors", "adapter_config.json"}
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == 2


@pytest.mark.slow
def test_a_run_on_frozen_weights_in_few_bits_goes_on_equally_and_exports_merged_weights(published, tmp_path):
    """The checkpoint holds the adapter; the frozen weights are rounded again to the same codes."""
    words = [published, "--lora=low_rank", "--lora.rank=2", "--lora.base_bits=4", "--checkpoint.every=1"]
    words += ["--rollout.slots=16"]  # an engine of its own: that of `shared_programs` was compiled for other leaves
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    g.train_policy(config := run_config(straight, *words))
    g.train_policy(run_config(stopped, *words, "--steps=1"))
    g.train_policy(run_config(stopped, *words, "--resume=auto"))
    model = model_of(config)
    runs = [load_trained(run / "checkpoints", model, ONE, config.lora) for run in (straight, stopped)]
    assert [step for step, _ in runs] == [2, 2]
    jax.tree.map(np.testing.assert_array_equal, runs[0][1], runs[1][1])
    base = frozen_weights(config, model, ONE)
    assert {layer["wq"].kind for layer in base["layers"]} == {"nf4"}
    assert main([str(straight), str(tmp_path / "merged"), "--dtype=float32"]) == 0
    merged, tokens = stored(tmp_path / "merged"), jnp.arange(12)[None]
    by_export, by_adapter = (
        unembed(params, forward(params, tokens, tokens, jnp.ones_like(tokens), model), model)
        for params in (merged, full_params(base, runs[0][1], config.lora))
    )
    np.testing.assert_allclose(by_export, by_adapter, atol=1e-4)


@pytest.mark.parametrize("bits", [8, pytest.param(4, marks=pytest.mark.slow)])
def test_frozen_weights_are_the_same_codes_on_every_mesh(published, bits):
    """As their shapes say, from published weights, and in 4 bits from random ones."""
    path = published if bits == 8 else ""
    config = run_config(
        Path("unused"), path, f"--lora.base_bits={bits}", "--lora=low_rank", "--model.compute_dtype=float32"
    )
    model = model_of(config)
    made = {}
    for devices, sizes in ((1, {}), (4, {"fsdp": 2, "sequence": 2})):
        mesh = make_mesh(ShardingConfig(data=1, **sizes), jax.devices()[:devices])
        made[devices] = frozen_weights(config, model, mesh)
        like = frozen_like(model, mesh, config.lora.base_bits)
        for leaf, shape in zip(jax.tree.leaves(made[devices]["layers"]), jax.tree.leaves(like["layers"]), strict=True):
            assert (leaf.shape, leaf.dtype, leaf.sharding) == (shape.shape, shape.dtype, shape.sharding)
    jax.tree.map(np.testing.assert_array_equal, *made.values())
    assert memory_parts(config, model, ONE)["frozen weights"] == policy.sum_bytes(made[1])


@pytest.mark.parametrize("bits", [16, 8])
def test_frozen_weights_have_the_dtypes_that_a_plan_counts(published, bits):
    """Also where the norms of a published model are in the compute dtype: they stay float32, as in every program."""
    words = (f"--lora.base_bits={bits}", "--lora=low_rank", "--model.compute_dtype=bfloat16")
    model = model_of(config := run_config(Path("unused"), published, *words))
    made, like = (jax.tree.leaves(f) for f in (frozen_weights(config, model, ONE), frozen_like(model, ONE, bits)))
    assert [(leaf.shape, leaf.dtype) for leaf in made] == [(leaf.shape, leaf.dtype) for leaf in like]
    assert {leaf.dtype for leaf in made} >= {np.dtype(np.float32), jnp.dtype(jnp.bfloat16)}
    assert memory_parts(config, model, ONE)["frozen weights"] == policy.sum_bytes(made)


def test_a_run_may_be_named_by_a_number(tmp_path):
    run = tmp_path / "roc" / "0"
    checkpoint = run / "checkpoints" / "step_00000003"
    checkpoint.mkdir(parents=True)
    (run / "config.yaml").write_text("steps: 3\n")
    for named, step in ((run, None), (checkpoint.parent, None), (checkpoint, 3)):
        assert policy.split_checkpoint(str(named)) == (run, step)


def test_rows_longer_than_the_model_was_made_for_are_refused(published, tmp_path):
    config = run_config(tmp_path / "run", published, "--rollout.max_response_tokens=60", "--batch.row_length=96")
    with pytest.raises(ValueError, match=r"= 84, but .* was made for texts of 64 tokens"):
        g.train_policy(config)


def test_threads_share_arenas_unless_the_environment_says_how_many(monkeypatch):
    calls = []
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=lambda *words: calls.append(words)))
    monkeypatch.setenv("MALLOC_ARENA_MAX", "8")
    policy.few_arenas()
    assert calls == []
    monkeypatch.delenv("MALLOC_ARENA_MAX")
    policy.few_arenas()
    assert calls == [(-8, 2)]
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace())  # another C library
    policy.few_arenas()


MIDDLE = """
data: {sources: ["world:gcd:1"], eval_problems: 0}
model: {d_model: 512, layers: 8, heads: 8, kv_heads: 4, head_dim: 64, d_ff: 1536, vocab_size: 16384}
rollout: {slots: 8, max_prompt_tokens: 96, max_response_tokens: 64, append_lengths: [32]}
group: {problems: 2, size: 2}
resample: {kind: none, drop: none}
batch: {row_length: 160, rows: 4}
tools: {workers: 1, preload: []}
steps: 1
sft: {steps: 0}
checkpoint: {keep: 1}
"""
RUN = """
import sys
from grpo_roc_jax.train import main
status = main(sys.argv[1:])
from grpo_roc_jax.run.policy import resident_bytes
print("PEAK", resident_bytes("VmHWM"))
sys.exit(status)
"""


@pytest.mark.slow
def test_the_dry_run_counts_what_a_run_on_this_machine_takes(tmp_path):
    """Within a quarter of the measured peak, in processes of their own, without the flags of these tests."""
    (tmp_path / "middle.yaml").write_text(MIDDLE + f"run_dir: {tmp_path / 'run'}\n")
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}

    def output_of(*words: str) -> str:
        command = [sys.executable, "-c", RUN, str(tmp_path / "middle.yaml"), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout

    dry, peak = output_of("--dry-run"), float(output_of("--log.console=off").split("PEAK ")[1])
    estimate = 1e6 * float(re.search(r"memory of this process at most, MB: .*; together (\d+)", dry)[1])
    print(dry.splitlines()[-3:], f"estimated {estimate / 1e6:.0f} MB, measured {peak / 1e6:.0f} MB")
    assert 0.75 < estimate / peak < 1.25
    assert "GB: masters 0.13, moments 0.27, gradients 0.13, sampler 0.13, " in dry, "float32 is what a CPU computes in"
