"""Tensors out of GGUF files: every layout and number format, exactly; what cannot be computed is refused by name."""

import json
import os
import struct
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from grpo_roc_jax.commands.export import export_model
from grpo_roc_jax.gguf_files.header import GgufError
from grpo_roc_jax.model.config import ModelConfig, SlidingWindows, SomeExtras
from grpo_roc_jax.model.convert import find_model, load_params, resolve_config
from grpo_roc_jax.model.families import UnsupportedModelError
from grpo_roc_jax.model.low_precision import plain_layer, quantized_layer
from grpo_roc_jax.model.published import note, same_model
from grpo_roc_jax.model.rope_scaling import (
    LinearRopeScaling,
    Llama3RopeScaling,
    NoRopeScaling,
    YarnRopeScaling,
)
from grpo_roc_jax.model.safetensors_io import CheckpointError
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh, param_shardings
from grpo_roc_jax.run.policy import parameter_count, sum_bytes
from tests.helpers.gguf_models import QUANT, write_gguf
from tests.model.test_convert import GEMMA, GEMMA2, MODELS, SHAPE, make_directory, read_all

PLAIN_LLAMA = replace(MODELS["llama"], rope_scaling=NoRopeScaling(), rope_theta=5e4)
GEMMA3 = {"windows": SlidingWindows((8, 8, 8, 8, 8, 0), local_theta=1e4), "rope_theta": 1e6}
LAYOUTS = {
    "llama": PLAIN_LLAMA,
    "llama-tied": replace(PLAIN_LLAMA, tie_embeddings=True, heads=6),
    "qwen2": MODELS["qwen2"],
    "qwen2-untied": replace(MODELS["qwen2"], tie_embeddings=False),
    "qwen3": MODELS["qwen3"],
    "qwen3moe": replace(MODELS["qwen3_moe"], experts=replace(MODELS["qwen3_moe"].experts, norm_weights=True)),
    "gemma2": replace(MODELS["gemma2"], extras=replace(GEMMA2, query_scale=256.0)),
    "gemma3": ModelConfig(
        **SHAPE | {"layers": 7}, **GEMMA, qk_norm=True, **GEMMA3, extras=SomeExtras(scale_embed=True, query_scale=256.0)
    ),
}
WIDE = replace(PLAIN_LLAMA, d_model=256, head_dim=64, d_ff=256, layers=1, tie_embeddings=True)
READ = [QUANT.F16, QUANT.BF16, QUANT.Q8_0, QUANT.Q4_0, QUANT.Q4_1, QUANT.Q5_0, QUANT.Q4_K, QUANT.Q6_K, QUANT.Q2_K]


def make_pair(tmp_path, model, kind=QUANT.F32, **options):
    """(a GGUF file, a directory of safetensors with the numbers that it stands for)."""
    file, folder = tmp_path / "model.gguf", tmp_path / "published"
    tensors = make_directory(folder, model)
    numbers = write_gguf(file, json.loads((folder / "config.json").read_text()), tensors, kinds=kind, **options)
    numbers = {name: np.ascontiguousarray(value) for name, value in numbers.items()}
    safetensors.numpy.save_file(numbers, folder / "model.safetensors")
    return file, folder


def resolved(path) -> ModelConfig:
    return resolve_config(ModelConfig(path=str(path)))


def loaded(path, **options):
    return load_params(find_model(str(path)), resolved(path), **options)


def assert_same(params, others):
    jax.tree.map(np.testing.assert_array_equal, params, others)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_file_is_the_model_that_was_converted(tmp_path, name):
    """On one device and on a mesh."""
    file, folder = make_pair(tmp_path, LAYOUTS[name])
    config, expected = resolved(file), loaded(folder)
    assert same_model(config, LAYOUTS[name]) and config.max_positions == resolved(folder).max_positions
    assert_same(loaded(file), expected)
    shardings = param_shardings(config, make_mesh(ShardingConfig(data=2, fsdp=2, tensor=2)))
    sharded = loaded(file, shardings=shardings)
    assert jax.tree.map(lambda leaf: leaf.sharding, sharded) == shardings
    assert_same(sharded, expected)


@pytest.mark.parametrize("kind", READ, ids=lambda kind: kind.name)
def test_every_number_format_of_the_library_is_read(tmp_path, kind):
    file, folder = make_pair(tmp_path, WIDE, kind)
    ours = loaded(file)
    assert_same(ours, loaded(folder))
    assert len(np.unique(np.asarray(ours["embed"]))) > 10


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(QUANT.F32, "float32"), (QUANT.Q8_0, "float32"), (QUANT.F16, "float16"), (QUANT.BF16, "bfloat16")],
)
def test_an_export_holds_every_number_of_the_file(tmp_path, kind, dtype):
    """In the narrowest dtype that does; norms that it does not hold make that float32."""
    model = replace(WIDE, layers=2)
    tensors = make_directory(tmp_path / "published", model)
    config = json.loads((tmp_path / "published" / "config.json").read_text())
    rounded = {name: value.astype(jnp.dtype(dtype)).astype(np.float32) for name, value in tensors.items()}
    for norms, stored in ((rounded, dtype), (tensors, "float32")):
        mixed = {name: norms[name] if value.ndim == 1 else value for name, value in tensors.items()}
        file = tmp_path / f"{stored}.gguf"
        numbers = write_gguf(file, config, mixed, kinds=kind)
        params = loaded(file)
        export_model(params, resolved(file), tmp_path / file.stem)
        exported = read_all(tmp_path / file.stem)
        assert json.loads((tmp_path / file.stem / "config.json").read_text())["torch_dtype"] == stored
        assert set(exported) == set(numbers)
        for name, value in exported.items():
            assert value.dtype == jnp.dtype(stored)
            np.testing.assert_array_equal(value.astype(np.float32), numbers[name])
        assert_same(loaded(tmp_path / file.stem), params)
        if stored == "float32":
            break


BLOCKS = {QUANT.Q8_0: (8, "int8"), QUANT.Q4_0: (4, "int4"), QUANT.Q4_1: (4, "uint4")}
MANY = replace(WIDE, layers=2, heads=4, kv_heads=2, head_dim=16, d_model=64, d_ff=96, vocab_size=64)


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(MANY, id="wide", marks=pytest.mark.slow),
        pytest.param(replace(MANY, heads=8, head_dim=8), id="narrow"),
        pytest.param(LAYOUTS["qwen3moe"], id="experts", marks=pytest.mark.slow),
    ],
)
def test_blocks_of_as_many_bits_stay_as_they_are(tmp_path, kind, model):
    """Frozen weights compute with every number of the file, on one device and on a mesh, in the bytes of its blocks."""
    model = replace(model, d_model=64, d_ff=96) if model.experts.count else model
    file, folder = make_pair(tmp_path, model, kind)
    bits, name = BLOCKS[kind]
    expected = loaded(folder, stacked=False)
    places = param_shardings(resolved(file), make_mesh(ShardingConfig(data=2, fsdp=2, tensor=2)))
    for shardings in (None, places):
        base = loaded(file, shardings=shardings, stacked=False, bits=bits)
        layer = base["layers"][1]
        assert {layer[leaf].kind for leaf in ("wq", "wo", "w_down")} == {name}
        assert_same(base | {"layers": tuple(plain_layer(layer, jnp.float32) for layer in base["layers"])}, expected)
    assert tuple(layer["w_up"].codes.sharding.spec) == tuple(places["layers"]["w_up"].spec[1:])
    w_down = layer["w_down"]
    offsets = 16 if kind == QUANT.Q4_1 else 0
    assert sum_bytes(w_down) * 8 == w_down.codes.size * 8 + w_down.scales.size * (16 + offsets)
    assert 8 * w_down.codes.size == bits * np.prod(w_down.shape)


def test_other_formats_are_rounded_again_with_a_note(tmp_path, caplog):
    file, folder = make_pair(tmp_path, MANY, QUANT.Q8_0)
    note.cache_clear()
    layer = loaded(file, stacked=False, bits=4)["layers"][0]
    assert layer["wq"].kind == "nf4"
    assert "matrices are stored in int8; lora.base_bits = 4 rounds their numbers again" in caplog.text
    assert_same(layer, quantized_layer(loaded(folder, stacked=False)["layers"][0], 4))


# ---- settings ------------------------------------------------------------------------------------------------------


def with_metadata(tmp_path, model, **options) -> ModelConfig:
    file, _ = make_pair(tmp_path, model, **options)
    return resolved(file)


@pytest.mark.parametrize(
    ("name", "more", "expected"),
    [
        ("llama", {"scaling.type": "linear", "scaling.factor": 4.0}, LinearRopeScaling(4.0)),
        ("llama", {"scaling.factor": 4.0}, LinearRopeScaling(4.0)),
        ("llama", {"scale_linear": 2.0}, LinearRopeScaling(2.0)),
        ("llama", {"scaling.type": "none", "scaling.finetuned": True, "scaling.factor": 4.0}, NoRopeScaling()),
        (
            "qwen3",
            {"scaling.type": "yarn", "scaling.factor": 8.0}
            | {"scaling.original_context_length": 64, "scaling.attn_factor": 1.0},
            YarnRopeScaling(8.0, 64),
        ),
        ("llama", {"scaling.type": "longrope", "scaling.factor": 8.0}, None),
        ("gemma3", {"scaling.type": "linear", "scaling.factor": 8.0, "freq_base_swa": 2e4}, LinearRopeScaling(8.0)),
    ],
)
def test_rotary_rescaling(tmp_path, name, more, expected):
    file, _ = make_pair(tmp_path, LAYOUTS[name], more={f"{name}.rope.{key}": value for key, value in more.items()})
    if expected is None:
        with pytest.raises(UnsupportedModelError, match=more["scaling.type"]):
            resolved(file)
        return
    assert resolved(file).rope_scaling == expected
    assert name != "gemma3" or resolved(file).windows.local_theta == more["freq_base_swa"]


def test_the_rotary_factors_of_llama_3_are_its_rescaling(tmp_path):
    """The file holds what each frequency is divided by; ours follow from four numbers."""
    model = replace(PLAIN_LLAMA, head_dim=16, rope_theta=5e5)
    for scaling in (Llama3RopeScaling(factor=8.0), Llama3RopeScaling(factor=32.0)):
        frequencies = 5e5 ** (-jnp.arange(8) / 8)
        factors = np.asarray(frequencies / scaling.rescaled(frequencies, 5e5), np.float32)
        assert factors.min() == 1 and factors.max() == scaling.factor
        config = with_metadata(tmp_path, model, extra={"rope_freqs.weight": factors})
        assert config.rope_scaling == scaling
    twice = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    with pytest.raises(GgufError, match="rescales the rotary frequencies twice: 'linear', and rope_freqs"):
        with_metadata(tmp_path, model, more=twice, extra={"rope_freqs.weight": factors})
    plain = with_metadata(tmp_path, model, extra={"rope_freqs.weight": np.ones(8, np.float32)})
    assert plain.rope_scaling == NoRopeScaling()
    for wrong in (factors[::-1], factors[:4]):
        with pytest.raises(GgufError, match=r"rope_freqs\.weight holds other factors than those of Llama 3"):
            with_metadata(tmp_path, model, extra={"rope_freqs.weight": wrong})


def test_what_gemmas_files_leave_out(tmp_path):
    key = "gemma3.attention.sliding_window_pattern"
    for pattern, windows in (
        ([True, False, True, True, True, False, True], (8, 0, 8, 8, 8, 0, 8)),
        (3, (8, 8, 0, 8, 8, 0, 8)),
        (0, (8,) * 7),
    ):
        assert with_metadata(tmp_path, LAYOUTS["gemma3"], more={key: pattern}).layer_windows == windows
    whole = with_metadata(tmp_path, LAYOUTS["gemma3"], more={"gemma3.attention.sliding_window": None})
    assert not any(whole.layer_windows)  # llama.cpp's converter says no width of a model without windows
    largest = replace(LAYOUTS["gemma3"], layers=62, d_model=24)
    assert with_metadata(tmp_path, largest).extras.query_scale == 6  # d_model / heads
    for key, value in (("final_logit_softcapping", 30.0), ("attention.sliding_window_pattern", "2")):
        with pytest.raises(UnsupportedModelError, match=f"{key} = '?{value}"):
            with_metadata(tmp_path, LAYOUTS["gemma3"], more={f"gemma3.{key}": value})
    for layers in (3.0, 2**32 - 1):
        with pytest.raises(ValueError, match=f"num_hidden_layers = {layers}; must be a whole number from 0 to 10000"):
            with_metadata(tmp_path, LAYOUTS["gemma3"], more={"gemma3.block_count": layers})


def test_a_setting_that_is_not_known_is_refused_by_name(tmp_path):
    file, _ = make_pair(tmp_path, PLAIN_LLAMA, more={"llama.attention.temperature": 3.0, "llama.expert_count": 0})
    with pytest.raises(UnsupportedModelError, match=r"not supported: llama\.attention\.temperature = 3\.0"):
        resolved(file)
    ignored = ModelConfig(path=str(file), ignore_keys=("llama.attention.temperature",))
    assert same_model(resolve_config(ignored), PLAIN_LLAMA)
    for more, message in (
        ({"llama.rope.dimension_count": 4, "llama.attention.key_length": 8}, r"llama\.rope\.dimension_count = 4"),
        ({"llama.expert_count": 8}, r"llama\.expert_count = 8"),
        ({"llama.attention.head_count": 0, "llama.rope.dimension_count": None}, "heads = 0: must be at least 1"),
        ({"llama.attention.sliding_window": 8}, r"llama\.attention\.sliding_window = 8"),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            with_metadata(tmp_path, PLAIN_LLAMA, more=more)


# ---- refusals ------------------------------------------------------------------------------------------------------


def with_type(data: bytes, type_id: int) -> bytes:
    """With another number format of `token_embd.weight`."""
    offset = data.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 2 * 8
    return data[:offset] + struct.pack("<I", type_id) + data[offset + 4 :]


def test_damaged_files_and_other_number_formats_are_refused(tmp_path):
    original, _ = make_pair(tmp_path, replace(PLAIN_LLAMA, layers=1))
    data, file = original.read_bytes(), tmp_path / "broken.gguf"
    unread = r"quantizations that gguf \S+ does not unpack: {} \(1 tensors, such as token_embd\.weight\)"
    for content, message in (
        (data[:-40], r"is cut short: .* ends at byte \d+ of \d+; download it again"),
        (data[:200], "is not a complete GGUF file .*it ends at byte 200, within its header"),
        (b"GGML" + data[4:], "is not a GGUF file: it begins with b'GGML'"),
        (data[:4] + struct.pack("<I", 1) + data[8:], "has version 1; read are versions 2 and 3"),
        (data[:4] + struct.pack(">I", 3) + data[8:], "byte order of another machine"),
        (data[:8] + b"\xff" * 16 + data[24:], "is not a complete GGUF file"),
        (with_type(data, int(QUANT.Q8_K)), unread.format("Q8_K")),
        (with_type(data, int(QUANT.F64)), unread.format("F64")),
        (with_type(data, 977), unread.format("type 977")),
        *(
            (data[:size], "not a GGUF file|not a complete GGUF file|cut short")
            for size in [*range(0, 400, 7), *range(400, len(data), 997)]
        ),
    ):
        file.write_bytes(content)
        with pytest.raises(GgufError, match=message):
            find_model(str(file))


def test_other_architectures_and_kinds_of_file_are_refused_by_name(tmp_path):
    for more, message in (
        ({"general.type": "adapter"}, "holds a 'adapter', not a model"),
        ({"llama.attention.causal": False}, r"llama\.attention\.causal = False; .*both directions"),
        ({"split.count": 3}, "one of 3 parts; join them"),
        ({"llama.block_count": None}, r"lacks llama\.block_count"),
        ({"split.count": "3"}, "one of 3 parts; join them"),
        ({"llama.attention.head_count": [4, 4, 2]}, r"head_count = \[4, 4, 2\]; must be one number"),
        ({"llama.embedding_length": "16"}, r"embedding_length = '16'; must be one number"),
        ({"llama.rope.scaling.factor": [2.0]}, r"rope\.scaling\.factor = \[2\.0\]; must be one number"),
    ):
        file, _ = make_pair(tmp_path, PLAIN_LLAMA, more=more)
        with pytest.raises(GgufError, match=message):
            find_model(str(file))
    for more, message in (
        ({"general.type": "imatrix"}, "holds a 'imatrix', not a model"),
        ({}, "the architecture '' is not supported"),
    ):  # such files need not name an architecture
        file, _ = make_pair(tmp_path, PLAIN_LLAMA, more=more)
        file.write_bytes(file.read_bytes().replace(b"general.architecture", b"general.architectura"))
        with pytest.raises(GgufError, match=message):
            find_model(str(file))
    file, _ = make_pair(tmp_path, PLAIN_LLAMA)
    file.write_bytes(file.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x06\0\0\0\0\0\0\0falcon", 1))
    with pytest.raises(GgufError, match="the architecture 'falcon' is not supported; known are llama, qwen2"):
        find_model(str(file))


def test_tensors_that_do_not_belong_are_refused_by_name(tmp_path):
    file, _ = make_pair(tmp_path, PLAIN_LLAMA, extra={"blk.0.attn_sinks.weight": np.zeros(4, np.float32)})
    with pytest.raises(CheckpointError, match=r"unexpected: blk\.0\.attn_sinks\.weight"):
        loaded(file)
    tensors = make_directory(tmp_path / "published", PLAIN_LLAMA)
    del tensors["model.layers.2.mlp.up_proj.weight"]
    write_gguf(file, json.loads((tmp_path / "published" / "config.json").read_text()), tensors)
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.2\.mlp\.up_proj\.weight"):
        loaded(file)


def test_without_the_library_the_extra_is_named(tmp_path, monkeypatch):
    file, _ = make_pair(tmp_path, PLAIN_LLAMA)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(GgufError, match=r"need the package gguf .*pip install '?gguf"):
        find_model(str(file))


# ---- memory --------------------------------------------------------------------------------------------------------

MEASURE = """
import sys, jax
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.convert import find_model, load_params, resolve_config
def status(key):
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith(key))
for file in sys.argv[1:3]:  # the first one compiles and fills the allocator's pools
    before = status("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")
    params = jax.block_until_ready(load_params(find_model(file), resolve_config(ModelConfig(path=file))))
print(status("VmHWM") - before, sum(leaf.nbytes for leaf in jax.tree.leaves(params)))
"""


@pytest.mark.slow
def test_reading_needs_little_more_than_the_parameters(tmp_path):
    """Peak of resident memory over what the arrays hold: at most the file and the largest tensor once more."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("the peak of resident memory cannot be reset here")
    small = replace(WIDE, layers=8, tie_embeddings=False)
    large = replace(small, d_model=512, head_dim=128, d_ff=4096, vocab_size=64_000)
    files = []
    for name, model in (("small", small), ("large", large)):
        (tmp_path / name).mkdir()
        files.append(make_pair(tmp_path / name, model, QUANT.Q8_0)[0])
    command = [sys.executable, "-c", MEASURE, *map(str, files)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    peak, nbytes = map(int, done.stdout.split())
    largest = 64_000 * 512 * 4
    print(f"peak {peak / 1e6:.0f} MB, arrays {nbytes / 1e6:.0f} MB, file {files[1].stat().st_size / 1e6:.0f} MB")
    assert nbytes == 4 * parameter_count(large)
    assert peak - nbytes <= 1.2 * largest + files[1].stat().st_size
