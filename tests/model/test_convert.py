"""Checkpoints in and out: bit-identical round trips, exact refusals, sharded reading, bounded memory."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from grpo_roc_jax.model.config import GatedDelta, Mixture, ModelConfig, NoWindows, SlidingWindows, SomeExtras
from grpo_roc_jax.model.convert import find_model, load_params, resolve_config, save_params
from grpo_roc_jax.model.families import FAMILIES, UnsupportedModelError
from grpo_roc_jax.model.published import infer_family, read_config, same_model, write_config
from grpo_roc_jax.model.rope_scaling import (
    Llama3RopeScaling,
    LongRopeScaling,
    NoRopeScaling,
    ProportionalRopeScaling,
    YarnRopeScaling,
)
from grpo_roc_jax.model.safetensors_io import (
    CheckpointError,
    Planned,
    Tensor,
    plan_shards,
    read_directory,
    read_header,
    write_shards,
)
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh, param_shardings
from grpo_roc_jax.model.transformer import stays_exact
from tests.helpers.reference import random_params

SHAPE = {"d_model": 16, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 8, "d_ff": 24, "vocab_size": 96}
GEMMA = {"norm_offset": True, "post_norms": True, "activation": "gelu_tanh"}
GEMMA2 = SomeExtras(scale_embed=True, query_scale=24.0, attention_cap=50.0, logit_cap=30.0)
GEMMA4 = SomeExtras(scale_embed=True, query_scale=1.0, value_norm=True, layer_factors=True, layer_embed=6)
YARN = YarnRopeScaling(factor=8.0, original_length=64)
LONG = LongRopeScaling((1.0, 2.0, 3.0), (2.0, 3.0, 4.0), 64, attention_factor=1.2)
DELTA = GatedDelta(key_heads=2, value_heads=6, key_dim=8, value_dim=4, every=2)
MAMBA = replace(DELTA, value_heads=8, form="mamba2", attention=(0,))
GRANITE = SomeExtras(query_scale=22.6757369615, embed_factor=3.5, residual_factor=0.7, logit_divisor=1.25)
LATENT = {"latent": 10, "latent_query": 9, "latent_key": 6, "latent_value": 7, "rotary_pairs": True}
SIGMOID = Mixture(8, 2, shared=48, scores="sigmoid", groups=4, top_groups=2, scale=1.5, dense_layers=1, dense_ff=20)
HALF = SomeExtras(rotary_share=0.5)
model_of = partial(ModelConfig, **SHAPE)
HYBRID = model_of(qk_norm=True, norm_offset=True, windows=DELTA, extras=HALF)
MODELS = {
    "qwen2": model_of(qkv_bias=True),
    "qwen3": model_of(qk_norm=True, tie_embeddings=False),
    "llama": model_of(tie_embeddings=False, rope_scaling=Llama3RopeScaling(factor=8.0)),
    "mistral": model_of(tie_embeddings=False, windows=SlidingWindows((8,))),
    "gemma3_text": model_of(
        **GEMMA,
        qk_norm=True,
        windows=SlidingWindows((8, 0), local_theta=1e3),
        extras=SomeExtras(scale_embed=True, query_scale=24.0),
    ),
    "gemma2": model_of(**GEMMA, windows=SlidingWindows((8, 0)), extras=GEMMA2),
    "olmo3": model_of(
        qk_norm="whole",
        post_norms="only",
        windows=SlidingWindows((8, 8, 0), local_theta=1e4),
        rope_scaling=YARN,
        tie_embeddings=False,
    ),
    "smollm3": model_of(extras=SomeExtras(rotary_layers=(True, False)), rope_scaling=YARN),
    "phi3": model_of(extras=SomeExtras(rotary_share=0.75), rope_scaling=LONG),
    "qwen3_moe": model_of(qk_norm=True, experts=Mixture(4, 2)),
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": replace(HYBRID, experts=Mixture(4, 2, shared=12, shared_gate=True)),
    "granite": model_of(extras=GRANITE),
    "granitemoehybrid": model_of(extras=GRANITE, windows=MAMBA),
    "glm4": model_of(qkv_bias=True, post_norms=True, extras=replace(HALF, rotary_pairs=True)),
    "glm4_moe": model_of(qkv_bias=True, qk_norm=True, extras=HALF, experts=SIGMOID),
    "deepseek_v3": model_of(
        kv_heads=1, head_dim=14, extras=SomeExtras(**LATENT, query_scale=8.0), rope_scaling=YARN, experts=SIGMOID
    ),
    "gpt_oss": model_of(
        qkv_bias=True,
        activation="clamped_swiglu",
        extras=SomeExtras(sinks=True, output_bias=True),
        windows=SlidingWindows((8, 0)),
        rope_scaling=YARN,
        experts=Mixture(4, 2, biases=True),
    ),
    "gemma4_text": model_of(
        layers=6,
        post_norms=True,
        activation="gelu_tanh",
        qk_norm=True,
        extras=GEMMA4,
        windows=SlidingWindows((8, 0), 1e4, full_head_dim=12, full_kv_heads=2, shared_layers=4, shared_ff=48),
        rope_scaling=ProportionalRopeScaling(share=0.5),
    ),
    "ministral3": model_of(extras=SomeExtras(query_growth=0.1, query_length=64), rope_scaling=YARN),
}


def make_directory(folder: Path, model: ModelConfig, dtype=jnp.float32, **options) -> dict[str, np.ndarray]:
    """A checkpoint of random numbers in every tensor; returns them by their published names."""
    family = infer_family(model)
    params = jax.device_put(random_params(model, spread=0.1))
    folder.mkdir(exist_ok=True)
    save_params(params, model, family, folder, dtype=dtype, **options)
    (folder / "config.json").write_text(json.dumps(write_config(model)))
    return read_all(folder)


def read_all(folder: Path) -> dict[str, np.ndarray]:
    values = {}
    for name, tensor in read_directory(folder).items():
        values[name] = np.empty(tensor.shape, tensor.dtype)
        tensor.read((slice(None),) * len(tensor.shape), values[name])
    return values


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_import_then_export_changes_no_bit(tmp_path, name, dtype):
    """Nor does reading onto a mesh, where every parameter is in its place."""
    model = MODELS[name]
    assert infer_family(model).model_type == name
    before = make_directory(tmp_path / "in", model, jnp.dtype(dtype), max_shard_bytes=4000)
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 3
    config = resolve_config(ModelConfig(path=str(tmp_path / "in")))
    assert same_model(config, model)
    params = load_params(tmp_path / "in", config)
    (tmp_path / "out").mkdir()
    save_params(params, config, infer_family(config), tmp_path / "out", dtype=jnp.dtype(dtype))
    after = read_all(tmp_path / "out")
    assert list(after) == list(before)
    for key, value in before.items():
        assert value.dtype == after[key].dtype == np.dtype(dtype)
        assert value.tobytes() == after[key].tobytes(), key
    shardings = param_shardings(config, make_mesh(ShardingConfig(data=2, fsdp=2, tensor=2)))
    sharded = load_params(tmp_path / "in", config, shardings)
    assert jax.tree.map(lambda leaf: leaf.sharding, sharded) == shardings
    jax.tree.map(np.testing.assert_array_equal, sharded, params)


def test_layers_as_a_tuple_hold_the_same_values(tmp_path):
    make_directory(tmp_path, MODELS["qwen3_moe"])
    config = resolve_config(ModelConfig(path=str(tmp_path)))
    stacked = load_params(tmp_path, config)
    layers = load_params(tmp_path, config, stacked=False, dtype=jnp.bfloat16)["layers"]
    assert len(layers) == config.layers
    for i, layer in enumerate(layers):
        for name, leaf in layer.items():
            assert leaf.dtype == (jnp.float32 if stays_exact(name) else jnp.bfloat16)
            np.testing.assert_array_equal(leaf, stacked["layers"][name][i].astype(leaf.dtype))


def rewrite(folder: Path, change) -> None:
    """Applies `change` to the tensors of a directory and writes them back as one file."""
    values = read_all(folder)
    change(values)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    planned = [Planned(name, value.dtype, value.shape) for name, value in values.items()]
    write_shards(folder, [planned], values.values())


def test_tensors_that_do_not_fit_are_all_named(tmp_path):
    make_directory(tmp_path, MODELS["qwen2"])

    def change(values):
        del values["model.layers.2.self_attn.k_proj.bias"]
        values["model.layers.0.mlp.up_proj.weight"] = np.zeros((3, 16), np.float32)
        values["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
        values["model.layers.7.input_layernorm.weight"] = np.zeros(16, np.float32)

    rewrite(tmp_path, change)
    with pytest.raises(CheckpointError) as refusal:
        load_params(tmp_path, resolve_config(ModelConfig(path=str(tmp_path))))
    message = str(refusal.value)
    assert "missing: model.layers.2.self_attn.k_proj.bias;" in message
    assert "unexpected: model.layers.7.input_layernorm.weight;" in message
    assert "of another shape: model.layers.0.mlp.up_proj.weight [3, 16] instead of [24, 16]" in message
    assert "inv_freq" not in message


def test_a_tied_unembedding_in_the_file_must_equal_the_embedding(tmp_path):
    make_directory(tmp_path, MODELS["qwen2"])
    rewrite(tmp_path, lambda values: values.update({"lm_head.weight": values["model.embed_tokens.weight"]}))
    config = resolve_config(ModelConfig(path=str(tmp_path)))
    assert "unembed" not in load_params(tmp_path, config)
    rewrite(tmp_path, lambda values: values.update({"lm_head.weight": values["lm_head.weight"] + 1}))
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings.*lm_head\.weight differs"):
        load_params(tmp_path, config)


def test_a_single_file_goes_before_the_index_of_earlier_shards(tmp_path):
    """Saving a model into its folder again, as one file, leaves the index; transformers reads the file."""
    make_directory(tmp_path, MODELS["qwen3"], max_shard_bytes=6000)
    for shard in tmp_path.glob("model-*.safetensors"):
        shard.unlink()
    values = {"model.norm.weight": np.arange(3, dtype=np.float32)}
    write_shards(tmp_path, [[Planned("model.norm.weight", np.dtype(np.float32), (3,))]], values.values())
    assert (tmp_path / "model.safetensors.index.json").is_file()
    np.testing.assert_array_equal(read_all(tmp_path)["model.norm.weight"], values["model.norm.weight"])


def test_damaged_files_are_refused_by_name(tmp_path):
    make_directory(tmp_path, MODELS["qwen3"], max_shard_bytes=6000)
    config = resolve_config(ModelConfig(path=str(tmp_path)))
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=f"{shard.name} is not a complete safetensors file"):
        load_params(tmp_path, config)
    shard.write_bytes(b"\xff" * 100)
    with pytest.raises(CheckpointError, match=f"{shard.name} is not a complete safetensors file"):
        load_params(tmp_path, config)
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"names the shard {shard.name}, which is missing"):
        load_params(tmp_path, config)
    with pytest.raises(CheckpointError, match=r"holds neither model\.safetensors nor"):
        read_directory(tmp_path.parent)


def test_quantised_tensors_are_refused(tmp_path):
    header = json.dumps({"w": {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    with pytest.raises(CheckpointError, match="w has dtype F8_E4M3; must be one of F64, F32, F16, BF16"):
        read_directory(tmp_path)


def test_values_that_are_not_finite_are_not_exported(tmp_path):
    model = MODELS["qwen3"]
    params = random_params(model)
    params["layers"]["wo"][1, 0, 0, 0] = np.nan
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.self_attn\.o_proj\.weight holds values that are not"):
        save_params(jax.device_put(params), model, infer_family(model), tmp_path, dtype=jnp.float32)
    params = random_params(model)
    params["final_norm"][0] = 1e6
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight .* in float16"):
        save_params(jax.device_put(params), model, infer_family(model), tmp_path, dtype=jnp.float16)


def test_shards_are_cut_by_size_in_order():
    tensors = [Planned(str(i), np.dtype(np.float32), (size,)) for i, size in enumerate((10, 10, 100, 5, 5))]
    assert [[t.name for t in shard] for shard in plan_shards(tensors, 80)] == [["0", "1"], ["2"], ["3", "4"]]


def test_the_library_reads_what_is_written_and_the_reverse(tmp_path):
    rng = np.random.default_rng(0)
    values = {
        "a.weight": rng.normal(size=(5, 7)).astype(np.float32),
        "b": rng.normal(size=(3,)).astype(ml_dtypes.bfloat16),
        "c": rng.normal(size=(2, 2, 2)).astype(np.float16),
    }
    safetensors.numpy.save_file(values, tmp_path / "model.safetensors")
    read = read_all(tmp_path)
    planned = [Planned(name, value.dtype, value.shape) for name, value in values.items()]
    (tmp_path / "out").mkdir()
    write_shards(tmp_path / "out", [planned], values.values())
    written = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    for name, value in values.items():
        assert read[name].tobytes() == written[name].tobytes() == value.tobytes()
        assert read[name].dtype == written[name].dtype == value.dtype


def test_a_slice_is_read_in_pieces(tmp_path, monkeypatch):
    """Pieces of a few rows, with the rows split into heads and the columns cut."""
    values = np.arange(24 * 10, dtype=np.float32).reshape(24, 10)
    write_shards(tmp_path, [[Planned("w", values.dtype, values.shape)]], [values])
    tensor: Tensor = read_header(tmp_path / "model.safetensors")["w"]
    monkeypatch.setattr("grpo_roc_jax.model.safetensors_io._CHUNK_BYTES", 4 * 10 * 9)
    out = np.empty((4, 4, 3), ml_dtypes.bfloat16)
    tensor.read((slice(4, 20), slice(2, 5)), out)
    np.testing.assert_array_equal(out.reshape(16, 3), values[4:20, 2:5].astype(ml_dtypes.bfloat16))


# ---- config.json ---------------------------------------------------------------------------------------------------


PUBLISHED = {name: write_config(model) for name, model in MODELS.items()}
QWEN3 = PUBLISHED["qwen3"]
WINDOWED = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
STATED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qwen3", {"architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM' is not supported; known are Qwen2"),
        ("qwen3", {"attention_bias": True}, "attention_bias = True is not supported, must be False"),
        ("qwen3", {"hidden_act": "relu"}, "hidden_act = 'relu' is not supported"),
        ("qwen3", {"quantization_config": {"bits": 4}}, r"not supported: quantization_config = {.*model.ignore_keys"),
        ("qwen3", {"some_new_trick": 2}, "some_new_trick = 2"),
        ("qwen3", {"un_sloth": 1}, "un_sloth = 1"),
        ("qwen3", {"pruned_heads": {"0": [1]}}, "not supported: pruned_heads = {"),
        (
            "qwen3",
            {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
            "rescaling 'dynamic' is not supported; known",
        ),
        (
            "qwen3",
            {"rope_scaling": STATED | {"attn_factor": 0.5}},
            r"'yarn' with attn_factor = 0\.5 is .* as rope_scaling\.at",
        ),
        ("qwen3", {"rope_scaling": {"rope_type": "default", "factor": 2.0}}, r"'default' with factor = 2\.0 is not"),
        ("qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn' lacks original_max_position"),
        (
            "qwen3",
            {"rope_scaling": {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0}},
            "'yarn' lacks factor",
        ),
        ("qwen3", {"partial_rotary_factor": 0.5}, r"not supported: partial_rotary_factor = 0\.5"),
        ("qwen3", {"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "'llama3' lacks high_freq_factor"),
        ("qwen3", {"rope_theta": None}, "has no rope_theta"),
        (
            "qwen3",
            {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "they differ",
        ),
        ("qwen3", {"head_dim": 7}, "head_dim = 7: must be a multiple of 2"),
        ("qwen3", {"layer_types": [FULL, "chunked_attention", FULL]}, "layer_types = .*chunked"),
        ("qwen3", {"num_hidden_layers": None}, "lacks num_hidden_layers"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\]"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, r"final_logit_softcapping = 30\.0"),
        ("llama", {"sliding_window": 8}, "sliding_window = 8"),
        ("llama", {"layer_types": [SLIDING] * 3}, "layer_types"),
        ("mistral", WINDOWED | {"layer_types": [FULL, SLIDING, SLIDING]}, "all layers of this family have"),
        ("qwen3_moe", WINDOWED | {"layer_types": [FULL, SLIDING, SLIDING]}, "all layers of this family have"),
        ("gemma2", {"hidden_activation": None}, "Gemma2ForCausalLM lacks hidden_activation"),
        ("gemma4_text", {"hidden_activation": ""}, "hidden_activation = '' is not supported"),
        ("gpt_oss", {"rope_parameters": None, "rope_scaling": None}, "no rope_parameters, for which transformers"),
        ("gemma4_text", {"vocab_size_per_layer_input": 39}, "= 39 is not supported, must be vocab_size = 96"),
        (
            "gemma4_text",
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8},
            "use_double_wide_mlp with enable_moe_block",
        ),
        ("qwen3_5_text", {"layer_types": [LINEAR] * 3}, "layer_types = .* must be full_attention after"),
        ("qwen3_5_text", {"layer_types": [FULL, LINEAR, FULL]}, "layer_types = .* must be full_attention after"),
    ],
)
def test_unknown_values_are_refused_by_name(name, change, message):
    with pytest.raises(UnsupportedModelError, match=message):
        read_config(PUBLISHED[name] | change)


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("qwen3", WINDOWED | {"sliding_window": 4}, {"layer_windows": (0, 0, 4)}),
        ("qwen3", WINDOWED | {"use_sliding_window": False}, {"layer_windows": ()}),
        ("mistral", WINDOWED, {"layer_windows": (8,) * 3}),
        ("qwen3_moe", WINDOWED, {"layer_windows": (8,) * 3}),
        ("gemma3_text", {"layer_types": None, "sliding_window_pattern": 2}, {"layer_windows": (8, 0, 8)}),
        (
            "qwen3",
            {"rope_scaling": STATED | {"finetuned": True, "attn_factor": 1.0, "beta_fast": None, "new": None}},
            {"rope_scaling": YarnRopeScaling(4.0, 64)},
        ),
        ("qwen3", {"rope_scaling": {"type": "default", "factor": 1.0}}, {"rope_scaling": NoRopeScaling()}),
        (
            "qwen3",
            {"rope_parameters": STATED | {"rope_theta": 1e4, "finetuned": True}, "rope_scaling": STATED},
            {"rope_theta": 1e4},
        ),
        (
            "smollm3",
            {"num_hidden_layers": 9, "no_rope_layers": None},
            {"layer_rotary": (True, True, True, False) * 2 + (True,)},
        ),
    ],
)
def test_what_a_key_or_its_absence_means(name, change, expected):
    """None takes a key out."""
    values = PUBLISHED[name] | change
    model = read_config({key: value for key, value in values.items() if key not in change or value is not None})
    assert {name: getattr(model, name) for name in expected} == expected


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_a_parameter_of_a_rescaling_is_ignored_by_name(place):
    published = QWEN3 | {place: STATED | {"rope_theta": 1e4, "attn_factor": 0.5}}
    for name in ("rope_scaling", "rope_parameters"):  # the two names of one section
        both = {"rope_scaling": STATED, "rope_parameters": STATED} | published
        for stated in (published, both):
            assert read_config(stated, [f"{name}.attn_factor"]).rope_scaling == YarnRopeScaling(4.0, 64)
    with pytest.raises(UnsupportedModelError, match=f"as {place}.attn_factor"):
        read_config(published, [f"{place}.factor", place])


@pytest.mark.parametrize("key", ["is_causal", "causal"])
def test_a_model_that_is_not_causal_is_refused_in_every_family(key):
    """False is not neutral here: the default is true."""
    for published in PUBLISHED.values():
        assert read_config(published | {key: True}) == read_config(published)
        whole = {"vision_config": {"x": 1}, "text_config": published | {key: False}}
        for other in (whole, published | {key: False}, published | {key: None}):
            with pytest.raises(UnsupportedModelError, match=f"{key} = (False|None); .* in both directions"):
                read_config(other)


def test_rotary_positions_are_written_for_both_kinds_of_layers_and_read_from_older_and_newer_keys():
    plain = replace(MODELS["olmo3"], windows=NoWindows(), rope_theta=2e5)
    (olmo,) = (family for family in FAMILIES if family.model_type == "olmo3")
    rope = write_config(plain, olmo)["rope_parameters"]
    assert rope["sliding_attention"]["rope_theta"] == rope["full_attention"]["rope_theta"] == 2e5
    gemma = dict(PUBLISHED["gemma3_text"])
    thetas = {FULL: gemma.pop("rope_theta"), SLIDING: gemma.pop("rope_local_base_freq")}
    newer = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()}
    assert read_config(gemma | {"rope_parameters": newer}) == read_config(PUBLISHED["gemma3_text"])
    unscaled = replace(MODELS["gpt_oss"], rope_scaling=NoRopeScaling())
    assert same_model(read_config(write_config(unscaled)), unscaled)


def test_keys_that_change_nothing_are_ignored_and_the_unusual_ones_noted_once(caplog):
    known = {"unsloth_fixed": True, "unsloth_version": "2025.1", "auto_map": {"AutoModel": "x.y"}, "temperature": 0.6}
    assert read_config(QWEN3 | known | {"some_new_trick": None}) == read_config(QWEN3)
    assert read_config(QWEN3 | {"some_new_trick": 2}, ("some_new_trick",)) == read_config(QWEN3)
    llama = PUBLISHED["llama"]
    for _ in range(2):
        assert read_config(llama | {"is_llama_config": True, "layer_types": [FULL] * 3}) == read_config(llama)
    notes = [record.message for record in caplog.records]
    assert notes[-1].endswith("ignored, without effect: is_llama_config, layer_types") and len(notes) == 2


def test_combinations_that_no_family_has_are_not_exported():
    for name, change in (("qwen2", {"qk_norm": True}), ("gemma3_text", {"post_norms": False})):
        with pytest.raises(UnsupportedModelError, match="no published family"):
            infer_family(replace(MODELS[name], **change))


def test_a_run_may_choose_what_its_checkpoint_leaves_open(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["qwen3_moe"]))
    given = ModelConfig(path=str(tmp_path), layers=3, compute_dtype="bfloat16", experts=Mixture(4, 2, replay=True))
    model = resolve_config(given)
    assert (model.layers, model.compute_dtype, model.experts.replay) == (3, "bfloat16", True)
    assert same_model(model, MODELS["qwen3_moe"])
    with pytest.raises(ValueError, match=r"model\.layers = 5, but .* says 3; leave model\.layers out"):
        resolve_config(replace(given, layers=5))
    with pytest.raises(ValueError, match=r"model\.experts = .*count.* 5"):
        resolve_config(replace(given, experts=Mixture(5, 2, replay=True)))


def test_paths_that_are_no_models(tmp_path, monkeypatch):
    requests = []

    def refused(*_, **__):
        requests.append(True)
        raise OSError("[Errno -2] Name or service not known\nAn error happened")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=refused))
    with pytest.raises(ValueError, match=r"model.path = 'nobody/none' is not a directory here, .*not known An error"):
        find_model("nobody/none")
    for path in (tmp_path / "nothing", str(tmp_path / "nothing")):
        with pytest.raises(ValueError, match=r"not a directory; must be one with config\.json, or a hub id"):
            find_model(path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    for path in ("runs/toy", "mine/model"):  # neither is looked up as a hub id
        with pytest.raises(ValueError, match=rf"'{path}' is not a directory"):
            find_model(path)
    assert len(requests) == 1
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        resolve_config(ModelConfig(path=str(tmp_path)))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match="hub ids need the package huggingface_hub"):
        find_model("some-org/some-model")


# ---- memory --------------------------------------------------------------------------------------------------------

MEASURE = """
import sys, jax, jax.numpy as jnp
from pathlib import Path
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.convert import load_params, resolve_config
def status(key):
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith(key))
small, large = map(Path, sys.argv[1:3])
for folder in (small, large):  # the first one compiles and fills the allocator's pools
    before = status("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")
    params = jax.block_until_ready(load_params(folder, resolve_config(ModelConfig(path=str(folder)))))
print(status("VmHWM") - before, sum(leaf.nbytes for leaf in jax.tree.leaves(params)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reading_needs_little_more_than_the_parameters(tmp_path, dtype):
    """Peak of resident memory over what the arrays hold: at most 1.2 times the largest tensor."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("the peak of resident memory cannot be reset here")
    small = ModelConfig(d_model=64, layers=8, heads=4, kv_heads=4, head_dim=16, d_ff=256, vocab_size=512)
    large = replace(small, d_model=512, head_dim=128, d_ff=4096, vocab_size=96_000, tie_embeddings=False)
    for name, model in (("small", replace(small, tie_embeddings=False)), ("large", large)):
        make_directory(tmp_path / name, model, jnp.dtype(dtype), max_shard_bytes=100_000_000)
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "small"), str(tmp_path / "large")]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    peak, nbytes = map(int, done.stdout.split())
    largest = 96_000 * 512 * 4
    print(f"peak {peak / 1e6:.0f} MB, arrays {nbytes / 1e6:.0f} MB, largest tensor {largest / 1e6:.0f} MB")
    assert nbytes > 3 * largest
    assert peak - nbytes <= 1.2 * largest


HALVES = """
import sys, jax
from pathlib import Path
import numpy as np
jax.config.update("jax_num_cpu_devices", 1)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
address, process, small, large, out = sys.argv[1], int(sys.argv[2]), *map(Path, sys.argv[3:])
jax.distributed.initialize(address, 2, process)
from grpo_roc_jax.commands.export import export_model
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.convert import load_params, resolve_config
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh, param_shardings
def status(key):
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith(key))
mesh = make_mesh(ShardingConfig(data=1, fsdp=2))
for folder in (small, large):
    config = resolve_config(ModelConfig(path=str(folder)))
    before = status("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")
    params = jax.block_until_ready(load_params(folder, config, param_shardings(config, mesh)))
peak = status("VmHWM") - before
held = sum(shard.data.nbytes for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards)
export_model(params, config, out, dtype="float32")
print("MEASURED", peak, held)
"""


@pytest.mark.slow
def test_two_processes_read_their_halves_and_write_the_whole(tmp_path):
    """Each needs room for its half and 1.2 times the largest tensor; together they export what was imported."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("the peak of resident memory cannot be reset here")
    small = ModelConfig(d_model=64, layers=4, heads=4, kv_heads=4, head_dim=16, d_ff=256, vocab_size=512)
    large = replace(small, d_model=512, head_dim=128, d_ff=4096, vocab_size=48_000)
    for name, model in (("small", small), ("large", large)):
        make_directory(tmp_path / name, replace(model, tie_embeddings=False), max_shard_bytes=100_000_000)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    folders = [str(tmp_path / name) for name in ("small", "large", "out")]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    commands = [[sys.executable, "-c", HALVES, address, str(i), *folders] for i in range(2)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for command in commands]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0]
    largest, total = 48_000 * 512 * 4, sum(value.nbytes for value in read_all(tmp_path / "large").values())
    for text in outputs:
        peak, nbytes = map(int, text.split("MEASURED")[1].split()[:2])
        print(
            f"peak {peak / 1e6:.0f} MB, own arrays {nbytes / 1e6:.0f} of {total / 1e6:.0f} MB, "
            f"largest tensor {largest / 1e6:.0f}"
        )
        assert nbytes == pytest.approx(total / 2, rel=0.01)
        assert peak - nbytes <= 1.2 * largest
    before, after = read_all(tmp_path / "large"), read_all(tmp_path / "out")
    assert set(before) == set(after)
    for name, value in before.items():
        assert value.tobytes() == after[name].tobytes(), name
