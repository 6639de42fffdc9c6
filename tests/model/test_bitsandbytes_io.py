"""Matrices in NF4 as bitsandbytes stores them: read as numbers, and as frozen weights that keep their codes."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from grpo_roc_jax.commands.export import export_model
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.convert import load_params, resolve_config
from grpo_roc_jax.model.low_precision import NF4_LEVELS, plain_layer
from grpo_roc_jax.model.safetensors_io import CheckpointError
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh, param_shardings
from tests.model.test_convert import MODELS, make_directory

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


def resolved(folder):
    return resolve_config(ModelConfig(path=str(folder)))


def assert_same(params, others):
    jax.tree.map(np.testing.assert_array_equal, params, others)


@pytest.mark.parametrize("nested", [False, True])
def test_frozen_weights_keep_the_codes_and_compute_with_the_numbers(tmp_path, nested):
    """An export has plain numbers; with the old setting, transformers would take them for packed ones."""
    packed, full = make_pair(tmp_path, nested=nested)
    config, expected = resolved(packed), load_params(full, resolved(full), stacked=False)
    assert_same(load_params(packed, config, stacked=False), expected)
    export_model(load_params(packed, config), config, tmp_path / "out", dtype="float32")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert_same(load_params(tmp_path / "out", resolved(tmp_path / "out"), stacked=False), expected)
    mesh = make_mesh(ShardingConfig(data=2, fsdp=2, tensor=2))
    for shardings in (None, param_shardings(config, mesh)):
        base = load_params(packed, config, shardings, stacked=False, bits=4)
        assert {base["layers"][1][name].kind for name in ("wq", "wo", "w_down")} == {"nf4"}
        assert base["layers"][0]["w_up"].scales.dtype == jnp.float32
        assert_same(base | {"layers": tuple(plain_layer(layer, jnp.float32) for layer in base["layers"])}, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({".quant_state.bitsandbytes__nf4": None}, "dtype U8 without the parts of a matrix in NF4"),
        ({".absmax": None}, "no complete matrix of bitsandbytes"),
        ({".absmax": np.ones(3, np.float32)}, "does not fit"),
        ({".quant_map": np.linspace(-1, 1, 16).astype(np.float32)}, "is not NF4"),
        ({".quant_state.bitsandbytes__nf4": np.frombuffer(b"[" * 9, np.uint8)}, "no complete matrix of bitsandbytes"),
    ],
    ids=["no state", "no scales", "few scales", "other levels", "damaged"],
)
def test_incomplete_matrices_are_refused_by_name(tmp_path, change, message):
    packed, _ = make_pair(tmp_path)
    file, name = packed / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    tensors = safetensors.numpy.load_file(file)
    for part, value in change.items():
        tensors.pop(name + part)
        tensors |= {} if value is None else {name + part: value}
    safetensors.numpy.save_file(tensors, file)
    with pytest.raises(CheckpointError, match=rf"model\.layers\.0\.mlp\.up_proj\.weight.*{message}"):
        load_params(packed, resolved(packed))
