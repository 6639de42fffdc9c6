"""Checkpoints in and out: bit-identical round trips, refusals, sharded reading, bounded memory, packed weights."""

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

from grpo_roc_jax.commands.export import export_model
from grpo_roc_jax.model import rope_scaling as scaling
from grpo_roc_jax.model.config import GatedDelta, Mixture, ModelConfig, NoWindows, SlidingWindows, SomeExtras
from grpo_roc_jax.model.convert import find_model, load_params, resolve_config, save_params
from grpo_roc_jax.model.families import FAMILIES, UnsupportedModelError
from grpo_roc_jax.model.low_precision import NF4_LEVELS, plain_layer
from grpo_roc_jax.model.mxfp4 import unpack
from grpo_roc_jax.model.published import infer_family, read_config, same_model, write_config
from grpo_roc_jax.model.safetensors_io import CheckpointError, Planned, plan_shards, read_directory, write_shards
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh, param_shardings
from grpo_roc_jax.model.transformer import stays_exact
from tests.helpers.published_models import need_transformers, save_model
from tests.helpers.reference import random_params
from tests.helpers.whole_rows import layers_apart

SHAPE = {"d_model": 16, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 8, "d_ff": 24, "vocab_size": 96}
GEMMA = {"norm_offset": True, "post_norms": True, "activation": "gelu_tanh"}
GEMMA3 = SomeExtras(scale_embed=True, query_scale=24.0)
GEMMA2 = SomeExtras(scale_embed=True, query_scale=24.0, attention_cap=50.0, logit_cap=30.0)
GEMMA4 = SomeExtras(scale_embed=True, query_scale=1.0, value_norm=True, layer_factors=True, layer_embed=6)
YARN = scaling.YarnRopeScaling(factor=8.0, original_length=64)
OLMO = {"qk_norm": "whole", "post_norms": "only", "rope_scaling": YARN}
OSS = {"qkv_bias": True, "activation": "clamped_swiglu", "extras": SomeExtras(sinks=True, output_bias=True)}
NEWER = {"norm_offset": False, "qk_norm": True, "rope_scaling": scaling.ProportionalRopeScaling(share=0.5)}
SHARED = SlidingWindows((8, 0), 1e4, full_head_dim=12, full_kv_heads=2, shared_layers=4, shared_ff=48)
LONG = scaling.LongRopeScaling((1.0, 2.0, 3.0), (2.0, 3.0, 4.0), 64, attention_factor=1.2)
DELTA = GatedDelta(key_heads=2, value_heads=6, key_dim=8, value_dim=4, every=2)
MAMBA = replace(DELTA, value_heads=8, form="mamba2", attention=(0,))
GRANITE = SomeExtras(query_scale=22.6757369615, embed_factor=3.5, residual_factor=0.7, logit_divisor=1.25)
LATENT = SomeExtras(query_scale=8.0, latent=10, latent_query=9, latent_key=6, latent_value=7, rotary_pairs=True)
SIGMOID = Mixture(8, 2, shared=48, scores="sigmoid", groups=4, top_groups=2, scale=1.5, dense_layers=1, dense_ff=20)
HALF = SomeExtras(rotary_share=0.5)
model_of = partial(ModelConfig, **SHAPE)
HYBRID = model_of(qk_norm=True, norm_offset=True, windows=DELTA, extras=HALF)
MODELS = {
    "qwen2": model_of(qkv_bias=True),
    "qwen3": model_of(qk_norm=True, tie_embeddings=False),
    "llama": model_of(tie_embeddings=False, rope_scaling=scaling.Llama3RopeScaling(factor=8.0)),
    "mistral": model_of(tie_embeddings=False, windows=SlidingWindows((8,))),
    "gemma3_text": model_of(**GEMMA, qk_norm=True, windows=SlidingWindows((8, 0), local_theta=1e3), extras=GEMMA3),
    "gemma2": model_of(**GEMMA, windows=SlidingWindows((8, 0)), extras=GEMMA2),
    "olmo3": model_of(**OLMO, tie_embeddings=False, windows=SlidingWindows((8, 8, 0), local_theta=1e4)),
    "smollm3": model_of(extras=SomeExtras(rotary_layers=(True, False)), rope_scaling=YARN),
    "phi3": model_of(extras=SomeExtras(rotary_share=0.75), rope_scaling=LONG),
    "qwen3_moe": model_of(qk_norm=True, experts=Mixture(4, 2)),
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": replace(HYBRID, experts=Mixture(4, 2, shared=12, shared_gate=True)),
    "granite": model_of(extras=GRANITE),
    "granitemoehybrid": model_of(extras=GRANITE, windows=MAMBA),
    "glm4": model_of(qkv_bias=True, post_norms=True, extras=replace(HALF, rotary_pairs=True)),
    "glm4_moe": model_of(qkv_bias=True, qk_norm=True, extras=HALF, experts=SIGMOID),
    "deepseek_v3": model_of(kv_heads=1, head_dim=14, extras=LATENT, rope_scaling=YARN, experts=SIGMOID),
    "gpt_oss": model_of(**OSS, windows=SlidingWindows((8, 0)), rope_scaling=YARN, experts=Mixture(4, 2, biases=True)),
    "gemma4_text": model_of(**GEMMA | NEWER, layers=6, extras=GEMMA4, windows=SHARED),
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
    low = load_params(tmp_path / "in", config, stacked=False, dtype=jnp.bfloat16)["layers"]
    assert len(low) == config.layers
    for key, leaf in layers_apart(params, config)["layers"][-1].items():
        assert low[-1][key].dtype == (jnp.float32 if stays_exact(key) else jnp.bfloat16)
        np.testing.assert_array_equal(low[-1][key], leaf.astype(low[-1][key].dtype))


def rewrite(folder: Path, change) -> None:
    """Writes what `change` makes of the tensors of a directory back as one file."""
    values = change(read_all(folder))
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    write_file(folder, values)


def write_file(folder: Path, values: dict[str, np.ndarray]) -> None:
    write_shards(folder, [[Planned(name, value.dtype, value.shape) for name, value in values.items()]], values.values())


def test_tensors_that_do_not_fit_are_all_named(tmp_path):
    make_directory(tmp_path, MODELS["qwen2"])

    def change(values):
        del values["model.layers.2.self_attn.k_proj.bias"]
        shapes = {"0.mlp.up_proj.weight": (3, 16), "0.self_attn.rotary_emb.inv_freq": 4, "7.input_layernorm.weight": 16}
        return values | {f"model.layers.{name}": np.zeros(shape, np.float32) for name, shape in shapes.items()}

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
    rewrite(tmp_path, lambda values: values | {"lm_head.weight": values["model.embed_tokens.weight"]})
    config = resolve_config(ModelConfig(path=str(tmp_path)))
    assert "unembed" not in load_params(tmp_path, config)
    rewrite(tmp_path, lambda values: values | {"lm_head.weight": values["lm_head.weight"] + 1})
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings.*lm_head\.weight differs"):
        load_params(tmp_path, config)


def test_damaged_files_are_refused_by_name(tmp_path):
    make_directory(tmp_path, MODELS["qwen3"], max_shard_bytes=6000)
    config = resolve_config(ModelConfig(path=str(tmp_path)))
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    for damaged in (content[:-1], b"\xff" * 100):
        shard.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=f"{shard.name} is not a complete safetensors file"):
            load_params(tmp_path, config)
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"names the shard {shard.name}, which is missing"):
        load_params(tmp_path, config)
    with pytest.raises(CheckpointError, match=r"holds neither model\.safetensors nor"):
        read_directory(tmp_path.parent)
    # Saving a model into its folder again, as one file, leaves the index; the file counts.
    header = json.dumps({"w": {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    with pytest.raises(CheckpointError, match="w has dtype F8_E4M3; must be one of F64, F32, F16, BF16"):
        read_directory(tmp_path)


def test_values_that_are_not_finite_are_not_exported(tmp_path):
    model = MODELS["qwen3"]
    params = random_params(model)
    params["final_norm"][0] = 1e6
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight .* in float16"):
        save_params(jax.device_put(params), model, infer_family(model), tmp_path, dtype=jnp.float16)
    params["layers"]["wo"][1, 0, 0, 0] = np.nan
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.self_attn\.o_proj\.weight holds values that are not"):
        save_params(jax.device_put(params), model, infer_family(model), tmp_path, dtype=jnp.float32)
    for name, change in (("qwen2", {"qk_norm": True}), ("gemma3_text", {"post_norms": False})):
        with pytest.raises(UnsupportedModelError, match="no published family"):
            infer_family(replace(MODELS[name], **change))


def test_the_library_reads_what_is_written_and_the_reverse(tmp_path):
    kinds = {"a.weight": ((5, 7), np.float32), "b": (3, ml_dtypes.bfloat16), "c": ((2, 2, 2), np.float16)}
    values = {name: np.random.default_rng(0).normal(size=size).astype(dtype) for name, (size, dtype) in kinds.items()}
    safetensors.numpy.save_file(values, tmp_path / "model.safetensors")
    read = read_all(tmp_path)
    (tmp_path / "out").mkdir()
    write_file(tmp_path / "out", values)
    written = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    for name, value in values.items():
        assert read[name].tobytes() == written[name].tobytes() == value.tobytes()
        assert read[name].dtype == written[name].dtype == value.dtype
    sizes = [Planned(str(i), np.dtype(np.float32), (size,)) for i, size in enumerate((10, 10, 100, 5, 5))]
    assert [[t.name for t in shard] for shard in plan_shards(sizes, 80)] == [["0", "1"], ["2"], ["3", "4"]]


def test_a_slice_is_read_in_pieces(tmp_path, monkeypatch):
    """Pieces of a few rows, with the rows split into heads and the columns cut."""
    values = np.arange(24 * 10, dtype=np.float32).reshape(24, 10)
    write_file(tmp_path, {"w": values})
    tensor = read_directory(tmp_path)["w"]
    monkeypatch.setattr("grpo_roc_jax.model.safetensors_io._CHUNK_BYTES", 4 * 10 * 9)
    out = np.empty((4, 4, 3), ml_dtypes.bfloat16)
    tensor.read((slice(4, 20), slice(2, 5)), out)
    np.testing.assert_array_equal(out.reshape(16, 3), values[4:20, 2:5].astype(ml_dtypes.bfloat16))


PUBLISHED = {name: write_config(model) for name, model in MODELS.items()}
QWEN3 = PUBLISHED["qwen3"]
WINDOWED = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
STATED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


MOE = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8}


WHOLE = {"architectures": ["QwenVL"], "model_type": "qwen3_vl", "vision_config": {}}


def rope(kind, **rest):
    return {"rope_scaling": {"rope_type": kind} | rest}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qwen3", {"architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM' is not supported; known are Qwen2"),
        ("qwen3", {"attention_bias": True}, "attention_bias = True is not supported, must be False"),
        ("qwen3", {"hidden_act": "relu"}, "hidden_act = 'relu' is not supported"),
        ("qwen3", {"quantization_config": {"bits": 4}}, r"not supported: quantization_config = {.*model.ignore_keys"),
        ("qwen3", {"some_new_trick": 2}, "some_new_trick = 2"),
        ("qwen3", WHOLE | {"text_config": QWEN3 | {"model_type": "mamba"}}, "the text part 'mamba' is not supported"),
        (
            "qwen3",
            WHOLE | {"text_config": QWEN3, "quantization_config": {"bits": 4}},
            "not supported: quantization_config",
        ),
        ("qwen3", {"un_sloth": 1}, "un_sloth = 1"),
        ("qwen3", {"pruned_heads": {"0": [1]}}, "not supported: pruned_heads = {"),
        ("qwen3", rope("dynamic", factor=4.0), "rescaling 'dynamic' is not supported; known"),
        ("qwen3", {"rope_scaling": STATED | {"attn_factor": 0.5}}, r"attn_factor = 0\.5 is .* as rope_scaling\.at"),
        ("qwen3", rope("default", factor=2.0), r"'default' with factor = 2\.0 is not"),
        ("qwen3", rope("yarn", factor=4.0), "'yarn' lacks original_max_position"),
        ("qwen3", rope("yarn", mscale=1.0, mscale_all_dim=1.0), "'yarn' lacks factor"),
        ("qwen3", rope("llama3", factor=4.0), "'llama3' lacks high_freq_factor"),
        ("qwen3", rope("linear", factor=2.0) | {"rope_parameters": {"rope_theta": 1e4}}, "they differ"),
        ("qwen3", {"partial_rotary_factor": 0.5}, r"not supported: partial_rotary_factor = 0\.5"),
        ("qwen3", {"rope_theta": None}, "has no rope_theta"),
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
        ("gemma4_text", {"enable_moe_block": True} | MOE, "use_double_wide_mlp with enable_moe_block"),
        ("qwen3_5_text", {"layer_types": [LINEAR] * 3}, "layer_types = .* must be full_attention after"),
        ("qwen3_5_text", {"layer_types": [FULL, LINEAR, FULL]}, "layer_types = .* must be full_attention after"),
    ],
)
def test_unknown_values_are_refused_by_name(name, change, message):
    with pytest.raises(UnsupportedModelError, match=message):
        read_config(PUBLISHED[name] | change)


NEUTRAL = {"finetuned": True, "attn_factor": 1.0, "beta_fast": None, "new": None}
NINE_LAYERS = (True, True, True, False) * 2 + (True,)
THETA = STATED | {"rope_theta": 1e4}


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("qwen3", WINDOWED | {"sliding_window": 4}, {"layer_windows": (0, 0, 4)}),
        ("qwen3", WINDOWED | {"use_sliding_window": False}, {"layer_windows": ()}),
        ("mistral", WINDOWED, {"layer_windows": (8,) * 3}),
        ("qwen3_moe", WINDOWED, {"layer_windows": (8,) * 3}),
        ("gemma3_text", {"layer_types": None, "sliding_window_pattern": 2}, {"layer_windows": (8, 0, 8)}),
        ("qwen3", {"rope_scaling": STATED | NEUTRAL}, {"rope_scaling": scaling.YarnRopeScaling(4.0, 64)}),
        ("qwen3", {"rope_scaling": {"type": "default", "factor": 1.0}}, {"rope_scaling": scaling.NoRopeScaling()}),
        ("qwen3", {"rope_parameters": THETA | {"finetuned": True}, "rope_scaling": STATED}, {"rope_theta": 1e4}),
        ("smollm3", {"num_hidden_layers": 9, "no_rope_layers": None}, {"layer_rotary": NINE_LAYERS}),
    ],
)
def test_what_a_key_or_its_absence_means(name, change, expected):
    """None takes a key out."""
    values = PUBLISHED[name] | change
    model = read_config({key: value for key, value in values.items() if key not in change or value is not None})
    assert {name: getattr(model, name) for name in expected} == expected


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_a_parameter_of_a_rescaling_is_ignored_by_name(place):
    published = QWEN3 | {place: THETA | {"attn_factor": 0.5}}
    for name in ("rope_scaling", "rope_parameters"):  # the two names of one section
        both = {"rope_scaling": STATED, "rope_parameters": STATED} | published
        for stated in (published, both):
            assert read_config(stated, [f"{name}.attn_factor"]).rope_scaling == scaling.YarnRopeScaling(4.0, 64)
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
    unscaled = replace(MODELS["gpt_oss"], rope_scaling=scaling.NoRopeScaling())
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
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    for path, message in (
        ("nobody/none", r"model.path = 'nobody/none' is not a directory here, .*not known An error"),
        (tmp_path / "nothing", r"not a directory; must be one with config\.json, or a hub id"),
        (str(tmp_path / "nothing"), r"not a directory; must be one with config\.json, or a hub id"),
        *((path, rf"'{path}' is not a directory") for path in ("runs/toy", "mine/model")),
    ):
        with pytest.raises(ValueError, match=message):
            find_model(path)
    assert len(requests) == 1, "only one is looked up as a hub id"
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        resolve_config(ModelConfig(path=str(tmp_path)))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match="hub ids need the package huggingface_hub"):
        find_model("some-org/some-model")


HALVES = """
import sys, jax
from pathlib import Path
import numpy as np
jax.config.update("jax_num_cpu_devices", 1)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
address, process, small, large, out = sys.argv[1], int(sys.argv[2]), *map(Path, sys.argv[3:6])
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
export_model(params, config, out, dtype=sys.argv[6])
print("MEASURED", peak, held)
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_processes_read_their_halves_and_write_the_whole(tmp_path, dtype):
    """Each has a peak of its half and 1.2 times the largest tensor; together they export what was imported."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("the peak of resident memory cannot be reset here")
    small = ModelConfig(d_model=64, layers=4, heads=4, kv_heads=4, head_dim=16, d_ff=256, vocab_size=512)
    large = replace(small, d_model=512, head_dim=128, d_ff=4096, vocab_size=48_000)
    for name, model in (("small", small), ("large", large)):
        model = replace(model, tie_embeddings=False)
        make_directory(tmp_path / name, model, jnp.dtype(dtype), max_shard_bytes=100_000_000)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    rest = [*(str(tmp_path / name) for name in ("small", "large", "out")), dtype]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    commands = [[sys.executable, "-c", HALVES, address, str(i), *rest] for i in range(2)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for command in commands]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0]
    before, after = read_all(tmp_path / "large"), read_all(tmp_path / "out")
    largest, total = 48_000 * 512 * 4, 4 * sum(value.size for value in before.values())
    for text in outputs:
        peak, nbytes = map(int, text.split("MEASURED")[1].split()[:2])
        assert nbytes == pytest.approx(total / 2, rel=0.01) and peak - nbytes <= 1.2 * largest
    assert {key: value.tobytes() for key, value in before.items()} == {key: v.tobytes() for key, v in after.items()}


LEVELS = np.asarray(NF4_LEVELS, np.float32)
WIDE = replace(MODELS["llama"], d_model=128, heads=4, kv_heads=2, head_dim=32, d_ff=192, layers=2)


def nf4(matrix: np.ndarray, *, nested: bool) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """(the tensors that stand for a matrix, its numbers), in blocks of 64, in the layout of bitsandbytes."""
    blocks = matrix.reshape(-1, 64)
    absmax = np.abs(blocks).max(1)
    codes = np.abs(blocks[..., None] / absmax[:, None, None] - LEVELS).argmin(-1).astype(np.uint8).reshape(-1, 2)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(matrix.shape)}
    tensors = {"": (codes[:, :1] << 4 | codes[:, 1:]), ".quant_map": LEVELS, ".absmax": absmax}
    if nested:
        offset, table = absmax.mean(), np.linspace(-1, 1, 256).astype(np.float32)
        groups = np.array_split(absmax - offset, range(256, len(absmax), 256))
        scales = np.array([np.abs(group).max() for group in groups], np.float32)
        small = np.concatenate([group / scale for group, scale in zip(groups, scales, strict=True)])
        index = np.abs(small[:, None] - table).argmin(1).astype(np.uint8)
        absmax = table[index] * np.repeat(scales, [len(group) for group in groups]) + np.float32(offset)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(offset)}
        tensors |= {".absmax": index, ".nested_absmax": scales, ".nested_quant_map": table}
    tensors[".quant_state.bitsandbytes__nf4"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return tensors, (LEVELS[codes.reshape(-1, 64)] * absmax[:, None]).reshape(matrix.shape).astype(np.float32)


def make_pair(folder, model=WIDE, *, nested=False):
    """(a directory in NF4, a directory with the numbers that it stands for)."""
    tensors, stored, numbers = make_directory(folder / "full", model), {}, {}
    for name, value in tensors.items():
        if "_proj" in name and value.ndim == 2:
            parts, numbers[name] = nf4(value, nested=nested)
            stored |= {f"{name}{part}": np.ascontiguousarray(array) for part, array in parts.items()}
        else:
            stored[name] = numbers[name] = value
    config = json.loads((folder / "full" / "config.json").read_text())
    (folder / "packed").mkdir()
    quantized = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    (folder / "packed" / "config.json").write_text(json.dumps(config | {"quantization_config": quantized}))
    safetensors.numpy.save_file(stored, folder / "packed" / "model.safetensors")
    safetensors.numpy.save_file(numbers, folder / "full" / "model.safetensors")
    return folder / "packed", folder / "full"


def loaded(folder):
    config = resolve_config(ModelConfig(path=str(folder)))
    return config, load_params(folder, config, stacked=False)


@pytest.mark.parametrize("nested", [False, True])
def test_frozen_weights_keep_the_codes_and_compute_with_the_numbers(tmp_path, nested):
    """An export has plain numbers; with the old setting, transformers would take them for packed ones."""
    packed, full = make_pair(tmp_path, nested=nested)
    (config, params), (_, expected) = loaded(packed), loaded(full)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    export_model(load_params(packed, config), config, tmp_path / "out", dtype="float32")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    jax.tree.map(np.testing.assert_array_equal, loaded(tmp_path / "out")[1], expected)
    mesh = make_mesh(ShardingConfig(data=2, fsdp=2, tensor=2))
    for shardings in (None, param_shardings(config, mesh)):
        base = load_params(packed, config, shardings, stacked=False, bits=4)
        assert {base["layers"][1][name].kind for name in ("wq", "wo", "w_down")} == {"nf4"}
        assert base["layers"][0]["w_up"].scales.dtype == jnp.float32
        plain = base | {"layers": tuple(plain_layer(layer, jnp.float32) for layer in base["layers"])}
        jax.tree.map(np.testing.assert_array_equal, plain, expected)


def test_incomplete_matrices_are_refused_by_name(tmp_path):
    packed, _ = make_pair(tmp_path)
    file, name = packed / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    tensors, state = safetensors.numpy.load_file(file), ".quant_state.bitsandbytes__nf4"
    for part, value, message in (
        (state, None, "dtype U8 without the parts of a matrix in NF4"),
        (state, np.frombuffer(b"[" * 9, np.uint8), "no complete matrix of bitsandbytes"),
        (".absmax", None, "no complete matrix of bitsandbytes"),
        (".absmax", np.ones(3, np.float32), "does not fit"),
        (".quant_map", np.linspace(-1, 1, 16).astype(np.float32), "is not NF4"),
    ):
        others = {key: tensor for key, tensor in tensors.items() if key != name + part}
        safetensors.numpy.save_file(others | ({} if value is None else {name + part: value}), file)
        with pytest.raises(CheckpointError, match=rf"model\.layers\.0\.mlp\.up_proj\.weight.*{message}"):
            loaded(packed)


def test_bytes_by_hand_and_as_transformers_has_them():
    """A byte holds two numbers, the low half first."""
    blocks = np.zeros((1, 2, 16), np.uint8)
    blocks[0, 0, :4], blocks[0, 1, 0] = (0x21, 0x7F, 0x80, 0x6D), 0xA3
    got = unpack(blocks, np.array([[127, 129]], np.uint8))
    assert got.shape == (1, 64) and got[0, :8].tolist() == [0.5, 1.0, -6.0, 6.0, 0.0, 0.0, -3.0, 4.0]
    assert got[0, 32:34].tolist() == [6.0, -4.0] and not got[0, 34:].any()
    need_transformers()
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (2, 6, 3, 16), dtype=np.uint8)
    scales = rng.integers(110, 140, (2, 6, 3), dtype=np.uint8)
    wanted = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32).numpy()
    got = [unpack(*expert).T for expert in zip(blocks, scales, strict=True)]
    np.testing.assert_array_equal(got, wanted)


def test_a_directory_in_this_format_is_read(tmp_path):
    """As gpt-oss is published: the matrices of the experts packed, their biases and all others not."""
    save_model("gpt-oss-packed", tmp_path)
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    rng, wanted = np.random.default_rng(1), {}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, rows, columns = tensors.pop(name).shape
        blocks = rng.integers(0, 256, (experts, columns, rows // 32, 16), dtype=np.uint8)
        scales = rng.integers(118, 126, (experts, columns, rows // 32), dtype=np.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        wanted[name] = np.stack([unpack(*pair).T for pair in zip(blocks, scales, strict=True)])
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    packed = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": packed}))
    params = load_params(tmp_path, resolve_config(ModelConfig(path=str(tmp_path))))["layers"]
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts."
        np.testing.assert_array_equal(params["w_gate"][layer], wanted[prefix + "gate_up_proj"][..., ::2])
        np.testing.assert_array_equal(params["w_up"][layer], wanted[prefix + "gate_up_proj"][..., 1::2])
        np.testing.assert_array_equal(params["w_down"][layer], wanted[prefix + "down_proj"])
    with pytest.raises(UnsupportedModelError, match="quantization_config"):
        read_config(config | {"quantization_config": {"quant_method": "fp8"}})
