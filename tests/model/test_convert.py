"""Checkpoints in and out: bit-identical round trips, refusals, sharded reading, bounded memory, packed weights."""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from grpo_roc_jax.commands.export import export_model
from grpo_roc_jax.model import low_precision, mxfp4, transformer
from grpo_roc_jax.model import rope_scaling as scaling
from grpo_roc_jax.model.config import GatedDelta, Mixture, ModelConfig, NoWindows, SlidingWindows, SomeExtras
from grpo_roc_jax.model.convert import find_model, load_params, resolve_config, save_params
from grpo_roc_jax.model.families import UnsupportedModelError, find_family
from grpo_roc_jax.model.published import infer_family, read_config, same_model, write_config
from grpo_roc_jax.model.safetensors_io import CheckpointError, read_directory
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh, param_shardings
from grpo_roc_jax.run.components import fit_length
from tests.helpers.published_models import save_model
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
INDEXED = replace(MODELS["deepseek_v3"], extras=replace(LATENT, indexed_keys=64))


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
    config, params = loaded(tmp_path / "in")
    assert same_model(config, model)
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
        assert low[-1][key].dtype == (jnp.float32 if transformer.stays_exact(key) else jnp.bfloat16)
        np.testing.assert_array_equal(low[-1][key], leaf.astype(low[-1][key].dtype))


def rewrite(folder: Path, change) -> None:
    """Writes what `change` makes of the tensors of a directory of one file back."""
    safetensors.numpy.save_file(change(read_all(folder)), folder / "model.safetensors")


def test_tensors_that_do_not_fit_are_all_named(tmp_path):
    make_directory(tmp_path, MODELS["qwen2"])

    def change(values):
        del values["model.layers.2.self_attn.k_proj.bias"]
        shapes = {"0.mlp.up_proj.weight": (3, 16), "0.self_attn.rotary_emb.inv_freq": 4, "7.input_layernorm.weight": 16}
        return values | {f"model.layers.{name}": np.zeros(shape, np.float32) for name, shape in shapes.items()}

    rewrite(tmp_path, change)
    with pytest.raises(CheckpointError) as refusal:
        loaded(tmp_path)
    message = str(refusal.value)
    assert "missing: model.layers.2.self_attn.k_proj.bias;" in message
    assert "unexpected: model.layers.7.input_layernorm.weight;" in message
    assert "of another shape: model.layers.0.mlp.up_proj.weight [3, 16] instead of [24, 16]" in message
    assert "inv_freq" not in message
    make_directory(tmp_path, MODELS["qwen2"])
    rewrite(tmp_path, lambda values: values | {"lm_head.weight": values["model.embed_tokens.weight"] + 1})
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings.*lm_head\.weight differs"):
        loaded(tmp_path)


def test_damaged_files_are_refused_by_name(tmp_path):
    make_directory(tmp_path, MODELS["qwen3"], max_shard_bytes=6000)
    config = resolve_config(ModelConfig(path=str(tmp_path)))
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=f"{shard.name} is not a complete safetensors file"):
        load_params(tmp_path, config)
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"names the shard {shard.name}, which is missing"):
        load_params(tmp_path, config)


def test_values_that_are_not_finite_are_not_exported(tmp_path):
    model = MODELS["qwen3"]
    params = random_params(model)
    params["final_norm"][0] = 1e6
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight .* in float16"):
        save_params(jax.device_put(params), model, infer_family(model), tmp_path, dtype=jnp.float16)
    params["layers"]["wo"][1, 0, 0, 0] = np.nan
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.self_attn\.o_proj\.weight holds values that are not"):
        save_params(jax.device_put(params), model, infer_family(model), tmp_path, dtype=jnp.float32)
    for other, message in ((replace(MODELS["qwen2"], qk_norm=True), "no published family"), (INDEXED, "not exported")):
        with pytest.raises(UnsupportedModelError, match=message):
            infer_family(other)


PUBLISHED = {name: write_config(model) for name, model in MODELS.items()}
QWEN3 = PUBLISHED["qwen3"]
WINDOWED = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}
FULL, LINEAR = "full_attention", "linear_attention"
STATED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
PART = {"architectures": ["QwenVL"], "model_type": "qwen3_vl", "vision_config": {}, "text_config": QWEN3}
NEUTRAL = {"finetuned": True, "attn_factor": 1.0, "beta_fast": None, "new": None}
NINE_LAYERS = (True, True, True, False) * 2 + (True,)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qwen3", {"architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM' is not supported; known are Qwen2"),
        ("qwen3", {"quantization_config": {"bits": 4}}, r"not supported: quantization_config = {.*model.ignore_keys"),
        ("qwen3", PART | {"text_config": QWEN3 | {"model_type": "mamba"}}, "the text part 'mamba' is not supported"),
        ("qwen3", PART | {"quantization_config": {"bits": 4}}, "not supported: quantization_con"),
        ("qwen3", {"rope_scaling": STATED | {"rope_type": "dynamic"}}, "rescaling 'dynamic' is not supported; known"),
        ("qwen3", {"layer_types": [FULL, "chunked_attention", FULL]}, "layer_types = .*chunked"),
        ("qwen3_5_text", {"layer_types": [FULL, LINEAR, FULL]}, "layer_types = .* must be full_attention after"),
        ("qwen3", {"is_causal": False}, "is_causal = False; .* in both directions"),
    ],
)
def test_unknown_values_are_refused_by_name(name, change, message):
    with pytest.raises(UnsupportedModelError, match=message):
        read_config(PUBLISHED[name] | change)
    assert read_config(QWEN3 | {"some_new_trick": 2}, ("some_new_trick",)) == read_config(QWEN3)


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("qwen3", WINDOWED | {"sliding_window": 4}, {"layer_windows": (0, 0, 4)}),
        ("qwen3", WINDOWED | {"use_sliding_window": False}, {"layer_windows": ()}),
        ("gemma3_text", {"num_key_value_heads": None, "head_dim": None}, {"kv_heads": 4, "head_dim": 256}),
        ("mistral", WINDOWED, {"layer_windows": (8,) * 3}),
        ("gemma3_text", {"layer_types": None, "sliding_window_pattern": 2}, {"layer_windows": (8, 0, 8)}),
        ("qwen3", {"rope_scaling": STATED | NEUTRAL}, {"rope_scaling": scaling.YarnRopeScaling(4.0, 64)}),
        ("smollm3", {"num_hidden_layers": 9, "no_rope_layers": None}, {"layer_rotary": NINE_LAYERS}),
    ],
)
def test_what_a_key_or_its_absence_means(name, change, expected):
    """None takes a key out."""
    values = PUBLISHED[name] | change
    model = read_config({key: value for key, value in values.items() if key not in change or value is not None})
    assert {name: getattr(model, name) for name in expected} == expected
    plain = replace(MODELS["olmo3"], windows=NoWindows(), rope_theta=2e5)
    rope = write_config(plain, find_family({"architectures": ["Olmo3ForCausalLM"]}))["rope_parameters"]
    assert rope["sliding_attention"]["rope_theta"] == 2e5, "both kinds of layers have one theta"


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
    assert fit_length(INDEXED, 64) == INDEXED, "up to `index_topk` tokens it chooses all keys"
    with pytest.raises(ValueError, match=r"= 65, but in .* an indexer chooses 64 keys \(index_topk\)"):
        fit_length(INDEXED, 65)


def test_names_of_the_text_part_as_the_hub_has_them(tmp_path):
    """Other tensors are left out, and the export is a plain directory of the text model."""
    text = make_directory(tmp_path / "in", MODELS["qwen3_5_text"])
    values = {name.replace("model.", "model.language_model.", 1): value for name, value in text.items()}
    values |= dict.fromkeys(("model.visual.patch_embed.weight", "mtp.fc.weight"), np.ones((4, 4), np.float32))
    rewrite(tmp_path / "in", lambda _: values)
    inner = json.loads((tmp_path / "in" / "config.json").read_text())
    outer = {"architectures": inner.pop("architectures"), "model_type": "qwen3_5", "vision_config": {}}
    outer |= {"tie_word_embeddings": inner.pop("tie_word_embeddings"), "image_token_id": 5}
    outer["text_config"] = inner | {"mtp_num_hidden_layers": 1, "tie_word_embeddings": False}
    (tmp_path / "in" / "config.json").write_text(json.dumps(outer))
    config, params = loaded(tmp_path / "in")
    assert same_model(config, MODELS["qwen3_5_text"])
    export_model(params, config, tmp_path / "out", dtype="float32")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert not {"text_config", "vision_config", "mtp_num_hidden_layers"} & set(written)
    assert same_model(read_config(written), MODELS["qwen3_5_text"])
    after = read_all(tmp_path / "out")
    assert {key: value.tobytes() for key, value in after.items()} == {key: v.tobytes() for key, v in text.items()}


def test_paths_that_are_no_models(tmp_path, monkeypatch):
    refused = Mock(side_effect=OSError("[Errno -2] Name or service not known\nAn error happened"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=refused))
    with pytest.raises(ValueError, match=r"model.path = 'nobody/none' is not a directory here, .*not known An error"):
        find_model("nobody/none")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # from here on nothing is looked up
    with pytest.raises(ValueError, match="hub ids need the package huggingface_hub"):
        find_model("some-org/some-model")
    with pytest.raises(ValueError, match=r"not a directory; must be one with config\.json, or a hub id"):
        find_model(str(tmp_path / "nothing"))


LEVELS = np.asarray(low_precision.NF4_LEVELS, np.float32)
WIDE = replace(MODELS["llama"], d_model=128, heads=4, kv_heads=2, head_dim=32, d_ff=192, layers=2)


def nf4(shape: tuple[int, ...], *, nested: bool) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """(the tensors that stand for a random matrix, its numbers), in blocks of 64, in the layout of bitsandbytes."""
    rng, blocks = np.random.default_rng(0), np.prod(shape) // 64
    codes, absmax = rng.integers(0, 16, (blocks, 64), np.uint8), rng.uniform(0.5, 1, blocks).astype(np.float32)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": shape}
    tensors = {"": (codes[:, ::2] << 4 | codes[:, 1::2]).reshape(-1, 1), ".quant_map": LEVELS, ".absmax": absmax}
    if nested:
        scales, table = rng.uniform(0.5, 1, -(-blocks // 256)).astype(np.float32), rng.normal(size=256)
        index, table = rng.integers(0, 256, blocks, np.uint8), table.astype(np.float32)
        absmax = table[index] * np.repeat(scales, 256)[:blocks] + np.float32(0.7)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.7}
        tensors |= {".absmax": index, ".nested_absmax": scales, ".nested_quant_map": table}
    tensors[".quant_state.bitsandbytes__nf4"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return tensors, (LEVELS[codes] * absmax[:, None]).reshape(shape).astype(np.float32)


def loaded(folder, **options):
    config = resolve_config(ModelConfig(path=str(folder)))
    return config, load_params(folder, config, **options)


@pytest.mark.parametrize("nested", [False, True])
def test_frozen_weights_keep_the_codes_and_compute_with_the_numbers(tmp_path, nested):
    """A directory in NF4 beside one with the numbers that it stands for. An export has plain numbers; with the old
    setting, transformers would take them for packed ones."""
    packed, full, out = (tmp_path / name for name in ("packed", "full", "out"))
    tensors, stored = make_directory(full, WIDE), {}
    for name, value in tensors.items():
        parts = {"": value}
        if "_proj" in name:
            parts, tensors[name] = nf4(value.shape, nested=nested)
        stored |= {f"{name}{part}": np.ascontiguousarray(array) for part, array in parts.items()}
    packed.mkdir()
    quantized = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    config = json.loads((full / "config.json").read_text()) | {"quantization_config": quantized}
    (packed / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(stored, packed / "model.safetensors")
    safetensors.numpy.save_file(tensors, full / "model.safetensors")
    (config, params), (_, expected) = loaded(packed, stacked=False), loaded(full, stacked=False)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    export_model(load_params(packed, config), config, out, dtype="float32")
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    jax.tree.map(np.testing.assert_array_equal, loaded(out, stacked=False)[1], expected)
    mesh = make_mesh(ShardingConfig(data=2, fsdp=2, tensor=2))
    for shardings in (None, param_shardings(config, mesh)):
        base = load_params(packed, config, shardings, stacked=False, bits=4)
        assert {base["layers"][1][name].kind for name in ("wq", "wo", "w_down")} == {"nf4"}
        assert base["layers"][0]["w_up"].scales.dtype == jnp.float32
        plain = base | {"layers": tuple(low_precision.plain_layer(layer, jnp.float32) for layer in base["layers"])}
        jax.tree.map(np.testing.assert_array_equal, plain, expected)
    del stored["model.layers.0.mlp.up_proj.weight.absmax"]
    safetensors.numpy.save_file(stored, packed / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj\.weight.*no complete matrix of bitsandbytes"):
        loaded(packed)


def test_a_directory_in_this_format_is_read(tmp_path):
    """As gpt-oss is published: the matrices of the experts packed, their biases and all others not. A byte holds two
    numbers, the low half first."""
    by_hand = np.zeros((1, 1, 16), np.uint8)
    by_hand[0, 0, :3] = 0x21, 0x7F, 0xD6
    assert mxfp4.unpack(by_hand, np.array([[128]], np.uint8))[0, :6].tolist() == [1.0, 2.0, -12.0, 12.0, 8.0, -6.0]
    save_model("gpt-oss-packed", tmp_path)
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    rng, wanted = np.random.default_rng(1), {}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, rows, columns = tensors.pop(name).shape
        blocks = rng.integers(0, 256, (experts, columns, rows // 32, 16), dtype=np.uint8)
        scales = rng.integers(118, 126, (experts, columns, rows // 32), dtype=np.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        wanted[name] = convert_moe_packed_tensors(*map(torch.tensor, (blocks, scales)), dtype=torch.float32).numpy()
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    packed = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": packed}))
    params = loaded(tmp_path)[1]["layers"]
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts."
        np.testing.assert_array_equal(params["w_gate"][layer], wanted[prefix + "gate_up_proj"][..., ::2])
        np.testing.assert_array_equal(params["w_up"][layer], wanted[prefix + "gate_up_proj"][..., 1::2])
        np.testing.assert_array_equal(params["w_down"][layer], wanted[prefix + "down_proj"])
