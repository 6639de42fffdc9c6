"""A run on a published model and one of an adapter: trained, saved, exported. What a run chooses by itself."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import grpo_roc_jax as g
from grpo_roc_jax.commands.export import export_model, main
from grpo_roc_jax.learner.loss import USUAL_CHUNK
from grpo_roc_jax.model import convert, sharding
from grpo_roc_jax.model.config import GatedDelta, ModelConfig, SlidingWindows, SomeExtras
from grpo_roc_jax.pod.processes import Processes
from grpo_roc_jax.run import choices, components, policy
from grpo_roc_jax.run import session as run_session
from grpo_roc_jax.run.policy import PolicyModel, frozen_like, frozen_weights, load_trained, memory_parts
from grpo_roc_jax.settings.cli import load_config
from tests.helpers import knobs_host, reference
from tests.test_train import TINY
from tests.test_train import shared_programs as shared_programs  # a fixture

SHAPE = g.ModelConfig(d_model=16, layers=2, heads=2, kv_heads=1, head_dim=8, d_ff=16, qk_norm=True, max_positions=64)
ONE = sharding.make_mesh(sharding.ShardingConfig(data=1), jax.devices()[:1])


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A directory as it would be downloaded: Qwen3's shape with the toy tokenizer."""
    folder = tmp_path_factory.mktemp("published") / "model"
    model = components.resolve_model(SHAPE, g.load_tokenizer(g.TextConfig()))
    export_model(jax.device_put(reference.random_params(model, seed=7)), model, folder, dtype="float32")
    return folder


def run_config(run_dir: Path, published: Path, *more: str) -> g.Config:
    words = [word for word in TINY if not word.startswith("--model.")]
    words += [f"--run_dir={run_dir}", f"--model.path={published}", "--steps=2", *more]
    return load_config(g.Config, words, prog="")


def model_of(config: g.Config) -> g.ModelConfig:
    return components.resolve_model(convert.resolve_config(config.model), g.load_tokenizer(config.text))


def stored(folder: Path) -> dict:
    return convert.load_params(folder, convert.resolve_config(g.ModelConfig(path=str(folder))))


def largest_change(before: dict, after: dict) -> dict[str, float]:
    return jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max()), before, after)


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
    words = ("--lora=low_rank", "--lora.rank=2", "--surrogate.kl=k3", "--surrogate.kl.coef=0.01")
    g.train_policy(config := run_config(tmp_path / "run", published, *words))
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


def test_frozen_weights_are_the_same_codes_on_every_mesh(published):
    """With the dtypes that a plan counts: norms stay float32, as in every program."""
    words = ("--lora.base_bits=8", "--lora=low_rank", "--model.compute_dtype=bfloat16")
    model = model_of(config := run_config(Path("unused"), published, *words))
    made = {}
    for devices, sizes in ((1, {}), (4, {"fsdp": 2, "sequence": 2})):
        mesh = sharding.make_mesh(sharding.ShardingConfig(data=1, **sizes), jax.devices()[:devices])
        made[devices] = frozen_weights(config, model, mesh)
        like = frozen_like(model, mesh, config.lora.base_bits)
        for leaf, shape in zip(jax.tree.leaves(made[devices]), jax.tree.leaves(like), strict=True):
            assert (leaf.shape, leaf.dtype, leaf.sharding) == (shape.shape, shape.dtype, shape.sharding)
    jax.tree.map(np.testing.assert_array_equal, *made.values())
    assert {leaf.dtype for leaf in jax.tree.leaves(made[1])} >= {np.dtype(np.float32), jnp.dtype(jnp.bfloat16)}
    assert memory_parts(config, model, ONE)["frozen weights"] == policy.sum_bytes(made[1])


def test_only_a_template_that_asks_for_the_date_gets_one(tmp_path):
    for template, date in (("chatml_tools", ""), ("llama3", "2019-05-06")):
        words = (f"text.tokenizer={knobs_host.tokenizer_folder(template)}", "text.template=model")
        words += (f"text.template.date={date}",) * bool(date)
        assert components.run_date(g.read_config(*words), tmp_path) == date


def settings(*given):
    config = g.read_config("toy", *given)
    return config, replace(config.model, vocab_size=40_000, d_model=512)


def test_more_room_is_never_used_to_compute_more_and_what_is_chosen_fits():
    config, model = settings()
    order = [(remat, chunk) for remat in ("none", "attention", "full") for chunk in (40_000, USUAL_CHUNK)]
    seen, bytes_with = [], lambda update: choices.update_bytes(replace(config, update=update), model, ONE)
    for room in (x * 1e6 for x in range(2000, 0, -10)):
        chosen = choices.named_update(config, model, ONE, room)
        index = order.index((chosen.remat, chosen.vocab_chunk))
        assert bytes_with(chosen) <= room or index == len(order) - 1
        for remat, chunk in order[:index]:
            assert bytes_with(replace(config.update, remat=remat, vocab_chunk=chunk)) > room
        seen.append(index)
    assert seen == sorted(seen) and seen[0] == 0 and seen[-1] == len(order) - 1 and len(set(seen)) > 3
    config, model = settings("--update.remat=full", "--update.vocab_chunk=7", "--update.attention=reference")
    assert choices.named_update(config, model, ONE, 1.0) == config.update, "what is set is never chosen"


def test_rows_are_chosen_for_the_rows_of_a_step():
    # 4 rows in one call of 4: 1.0; in calls of 1: 4 x 0.3; in a call of 16, of which 12 are padding: 3.0.
    seconds = {1: 0.3, 4: 1.0, 16: 3.0}
    assert choices.best_rows(seconds, 4) == 4
    assert choices.best_rows(seconds, 1) == 1  # a call of 4 would take as long as with four rows
    assert choices.best_rows(seconds, 64) == 16
    config, model = settings("--batch.rows=0", "--batch.row_length=384")
    tokens = 64 * config.rollout.max_row_tokens / 2
    assert choices.rows_of_a_step(config, 64) == -(-tokens // (0.9 * 384))
    assert choices.row_counts(config, model, ONE, 1e12, 5) == (1, 4)  # 16 rows are more than 4,096 tokens
    assert choices.row_counts(config, model, ONE, 1.0, 5) == (1,)  # nothing fits: the fewest


def test_a_run_that_goes_on_takes_what_it_took_before(tmp_path):
    config, model = settings()
    config = choices.with_choices(config, {"update.attention": "blocked"})
    policy, path = PolicyModel(model, ONE), tmp_path / choices.FILE

    def chosen(config, room=1.0):  # other programs took the memory
        return run_session.choose_open(config, policy, Processes(), tmp_path, free=lambda mesh: room)

    first, lines = chosen(config, 1e12)
    assert (first.update.remat, first.update.vocab_chunk, first.update.attention) == ("none", 40_000, "blocked")
    assert any("remat none, logits kept" in line for line in lines) and not choices.left_open(first)
    assert json.loads(path.read_text())[choices.about(config, ONE)]["update.remat"] == "none"
    assert chosen(config) == (first, [])
    # Rows of another length, as in the next stage of a run, are another question; both answers stay.
    longer = choices.with_choices(config, {"batch.row_length": 512})
    assert chosen(longer)[0].update.remat == "full"
    assert set(json.loads(path.read_text())) == {choices.about(config, ONE), choices.about(longer, ONE)}


KINDS = {"windows": {"extras": SomeExtras(rotary_layers=(True, False)), "windows": SlidingWindows((8, 8, 0))}}
KINDS["recurrent"] = {"windows": GatedDelta(key_heads=2, value_heads=4, key_dim=4, value_dim=8, every=2)}


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_the_timed_layers_exist_for_every_kind_of_model(options):
    """The programs are traced and not run; that they were asked for in ascending order is what `best_rows` needs."""
    names = []

    def traced(candidates):
        for name, call in candidates.items():
            names.append(name)
            grads = jax.eval_shape(call.func, *call.args)
            assert all(leaf.shape[0] for leaf in jax.tree.leaves(grads))
        return "8", dict.fromkeys(candidates, 1.0)

    config, _ = settings("--batch.rows=0")
    model = ModelConfig(d_model=32, layers=12, heads=4, kv_heads=2, head_dim=8, d_ff=48, vocab_size=64, **options)
    seconds = choices.timed_rows((8, 32), config, model, lambda rows: config.update, ONE, measure=traced)
    assert seconds == {8: 1.0, 32: 1.0} and names == ["8", "32"]


MIDDLE = """{
data: {sources: ["world:gcd:1"], eval_problems: 0}, group: {problems: 2, size: 2}, resample: {kind: none, drop: none},
model: {d_model: 512, layers: 8, heads: 8, kv_heads: 4, head_dim: 64, d_ff: 1536, vocab_size: 16384}, steps: 1,
rollout: {slots: 8, max_prompt_tokens: 96, max_response_tokens: 64, append_lengths: [32]}, sft: {steps: 0},
batch: {row_length: 160, rows: 4}, tools: {workers: 1, preload: []}, checkpoint: {keep: 1}
}"""
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
    (tmp_path / "middle.yaml").write_text(MIDDLE)
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}

    def output_of(*words: str) -> str:
        command = [sys.executable, "-c", RUN, f"{tmp_path}/middle.yaml", f"--run_dir={tmp_path}/run", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout

    dry, peak = output_of("--dry-run"), float(output_of("--log.console=off").split("PEAK ")[1])
    estimate = 1e6 * float(re.search(r"memory of this process at most, MB: .*; together (\d+)", dry)[1])
    assert 0.75 < estimate / peak < 1.25
    assert "GB: masters 0.13, moments 0.27, gradients 0.13, sampler 0.13, " in dry, "float32 is what a CPU computes in"
