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
from grpo_roc_jax.model.low_precision import plain_layer, quantized_layer
from grpo_roc_jax.model.published import note, same_model
from grpo_roc_jax.model.rope_scaling import LinearRopeScaling, Llama3RopeScaling, NoRopeScaling, YarnRopeScaling
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
MESH = ShardingConfig(data=2, fsdp=2, tensor=2)
WIDE = replace(PLAIN_LLAMA, d_model=256, head_dim=64, d_ff=256, layers=1, tie_embeddings=True)
READ = [QUANT.F16, QUANT.BF16, QUANT.Q8_0, QUANT.Q4_0, QUANT.Q4_1, QUANT.Q5_0, QUANT.Q4_K, QUANT.Q6_K, QUANT.Q2_K]


def make_pair(tmp_path, model, kind=QUANT.F32, **options):
    """(a GGUF file, a directory of safetensors with the numbers that it stands for)."""
    file, folder = tmp_path / "model.gguf", tmp_path / "published"
    numbers = write_gguf(file, folder, make_directory(folder, model), kinds=kind, **options)
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
    file, folder = make_pair(tmp_path, LAYOUTS[name])
    config, expected = resolved(file), loaded(folder)
    assert same_model(config, LAYOUTS[name]) and config.max_positions == resolved(folder).max_positions
    assert_same(loaded(file), expected)
    shardings = param_shardings(config, make_mesh(MESH))
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
    model, file, out = replace(WIDE, layers=2), tmp_path / "model.gguf", tmp_path / "out"
    tensors = make_directory(tmp_path / "published", model)
    rounded = {name: value.astype(jnp.dtype(dtype)).astype(np.float32) for name, value in tensors.items()}
    for stored, norms in {dtype: rounded, "float32": tensors}.items():
        mixed = {name: norms[name] if value.ndim == 1 else value for name, value in tensors.items()}
        numbers = write_gguf(file, tmp_path / "published", mixed, kinds=kind)
        params = loaded(file)
        export_model(params, resolved(file), out / stored)
        exported = read_all(out / stored)
        assert json.loads((out / stored / "config.json").read_text())["torch_dtype"] == stored
        assert {value.dtype for value in exported.values()} == {jnp.dtype(stored)}
        assert_same({name: value.astype(np.float32) for name, value in exported.items()}, numbers)
        assert_same(loaded(out / stored), params)


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
    expected, places = loaded(folder, stacked=False), param_shardings(resolved(file), make_mesh(MESH))
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
    return resolved(make_pair(tmp_path, model, **options)[0])


@pytest.mark.parametrize(
    ("name", "more", "expected"),
    [
        ("llama", {"scaling.factor": 4.0}, LinearRopeScaling(4.0)),
        ("llama", {"scale_linear": 2.0}, LinearRopeScaling(2.0)),
        ("llama", {"scaling.type": "none", "scaling.finetuned": True, "scaling.factor": 4.0}, NoRopeScaling()),
        (
            "qwen3",
            {"scaling.type": "yarn", "scaling.factor": 8.0}
            | {"scaling.original_context_length": 64, "scaling.attn_factor": 1.0},
            YarnRopeScaling(8.0, 64),
        ),
        ("gemma3", {"scaling.type": "linear", "scaling.factor": 8.0, "freq_base_swa": 2e4}, LinearRopeScaling(8.0)),
    ],
)
def test_rotary_rescaling(tmp_path, name, more, expected):
    config = with_metadata(tmp_path, LAYOUTS[name], more={f"{name}.rope.{key}": value for key, value in more.items()})
    assert config.rope_scaling == expected
    assert name != "gemma3" or config.windows.local_theta == more["freq_base_swa"]


ROTARY = replace(PLAIN_LLAMA, head_dim=16, rope_theta=5e5)


def rotary_factors(scaling):
    """What the file holds: what each frequency is divided by."""
    frequencies = 5e5 ** (-jnp.arange(8) / 8)
    factors = np.asarray(frequencies / scaling.rescaled(frequencies, 5e5), np.float32)
    assert factors.min() == 1 and factors.max() == scaling.factor
    return factors


def test_the_rotary_factors_of_llama_3_are_its_rescaling(tmp_path):
    for scaling in (Llama3RopeScaling(factor=8.0), Llama3RopeScaling(factor=32.0)):
        config = with_metadata(tmp_path, ROTARY, extra={"rope_freqs.weight": rotary_factors(scaling)})
        assert config.rope_scaling == scaling
    plain = with_metadata(tmp_path, ROTARY, extra={"rope_freqs.weight": np.ones(8, np.float32)})
    assert plain.rope_scaling == NoRopeScaling()


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


FACTORS, LAYERS = rotary_factors(Llama3RopeScaling(factor=8.0)), "must be a whole number from 0 to 10000"
TWICE = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
REFUSED = [
    (PLAIN_LLAMA, {"general.type": "adapter"}, "holds a 'adapter', not a model"),
    (PLAIN_LLAMA, {"llama.attention.causal": False}, r"llama\.attention\.causal = False; .*both directions"),
    (PLAIN_LLAMA, {"split.count": "3"}, "one of 3 parts; join them"),
    (PLAIN_LLAMA, {"llama.block_count": None}, r"lacks llama\.block_count"),
    (PLAIN_LLAMA, {"llama.attention.head_count": [4, 4, 2]}, r"head_count = \[4, 4, 2\]; must be one number"),
    (PLAIN_LLAMA, {"llama.embedding_length": "16"}, r"embedding_length = '16'; must be one number"),
    (PLAIN_LLAMA, {"llama.rope.scaling.factor": [2.0]}, r"rope\.scaling\.factor = \[2\.0\]; must be one number"),
    (PLAIN_LLAMA, {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 8.0}, "longrope"),
    (PLAIN_LLAMA, {"llama.attention.temperature": 3.0}, r"llama\.attention\.temperature = 3\.0"),
    (PLAIN_LLAMA, {"llama.rope.dimension_count": 4, "llama.attention.key_length": 8}, r"rope\.dimension_count = 4"),
    (PLAIN_LLAMA, {"llama.expert_count": 8}, r"llama\.expert_count = 8"),
    (
        PLAIN_LLAMA,
        {"llama.attention.head_count": 0, "llama.rope.dimension_count": None},
        "heads = 0: must be at least 1",
    ),
    (PLAIN_LLAMA, {"llama.attention.sliding_window": 8}, r"llama\.attention\.sliding_window = 8"),
    (LAYOUTS["gemma3"], {"gemma3.final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
    (LAYOUTS["gemma3"], {"gemma3.attention.sliding_window_pattern": "2"}, "sliding_window_pattern = '2'"),
    *((LAYOUTS["gemma3"], {"gemma3.block_count": n}, f"hidden_layers = {n}; {LAYERS}") for n in (3.0, 2**32 - 1)),
    (ROTARY, TWICE | {"rope": FACTORS}, "rescales the rotary frequencies twice: 'linear', and rope_freqs"),
    *((ROTARY, {"rope": wrong}, "other factors than those of Llama 3") for wrong in (FACTORS[::-1], FACTORS[:4])),
]


def test_what_cannot_be_computed_is_refused_by_name(tmp_path):
    for model, more, message in REFUSED:
        extra = {"rope_freqs.weight": more["rope"]} if "rope" in more else {}
        more = {key: value for key, value in more.items() if key != "rope"}
        with pytest.raises(ValueError, match=message):
            with_metadata(tmp_path, model, more=more, extra=extra)
    file, _ = make_pair(tmp_path, PLAIN_LLAMA, more={"llama.attention.temperature": 3.0, "llama.expert_count": 0})
    ignored = ModelConfig(path=str(file), ignore_keys=("llama.attention.temperature",))
    assert same_model(resolve_config(ignored), PLAIN_LLAMA)
    file, _ = make_pair(tmp_path, PLAIN_LLAMA, extra={"blk.0.attn_sinks.weight": np.zeros(4, np.float32)})
    with pytest.raises(CheckpointError, match=r"unexpected: blk\.0\.attn_sinks\.weight"):
        loaded(file)


def test_damaged_files_and_other_formats_are_refused(tmp_path, monkeypatch):
    original, _ = make_pair(tmp_path, replace(PLAIN_LLAMA, layers=1))
    data, file = original.read_bytes(), tmp_path / "broken.gguf"
    kind = data.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 2 * 8  # the number format of this tensor
    unread = r"quantizations that gguf \S+ does not unpack: {} \(1 tensors, such as token_embd\.weight\)"
    unnamed = data.replace(b"general.architecture", b"general.architectura")
    other = data.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x06\0\0\0\0\0\0\0falcon", 1)
    for content, message in (
        (data[:-40], r"is cut short: .* ends at byte \d+ of \d+; download it again"),
        (data[:200], "is not a complete GGUF file .*it ends at byte 200, within its header"),
        (b"GGML" + data[4:], "is not a GGUF file: it begins with b'GGML'"),
        (data[:4] + struct.pack("<I", 1) + data[8:], "has version 1; read are versions 2 and 3"),
        (data[:4] + struct.pack(">I", 3) + data[8:], "byte order of another machine"),
        (data[:8] + b"\xff" * 16 + data[24:], "is not a complete GGUF file"),
        *(
            (data[:kind] + struct.pack("<I", number) + data[kind + 4 :], unread.format(name))
            for number, name in ((QUANT.Q8_K, "Q8_K"), (QUANT.F64, "F64"), (977, "type 977"))
        ),
        (unnamed, "the architecture '' is not supported"),
        (other, "the architecture 'falcon' is not supported; known are llama, qwen2"),
        *(
            (data[:size], "not a GGUF file|not a complete GGUF file|cut short")
            for size in [*range(0, 400, 7), *range(400, len(data), 997)]
        ),
    ):
        file.write_bytes(content)
        with pytest.raises(GgufError, match=message):
            find_model(str(file))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(GgufError, match=r"need the package gguf .*pip install '?gguf"):
        find_model(str(original))


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
    for model in (small, large):
        (tmp_path / str(model.d_model)).mkdir()
        files.append(make_pair(tmp_path / str(model.d_model), model, QUANT.Q8_0)[0])
    command = [sys.executable, "-c", MEASURE, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, nbytes = map(int, done.stdout.split())
    assert nbytes == 4 * parameter_count(large)
    assert peak - nbytes <= 1.2 * 64_000 * 512 * 4 + files[1].stat().st_size
