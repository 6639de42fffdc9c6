"""MXFP4: random bytes against transformers, and a model directory in this format."""

import json

import numpy as np
import pytest
import safetensors.numpy

from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.convert import load_params, resolve_config
from grpo_roc_jax.model.families import UnsupportedModelError
from grpo_roc_jax.model.mxfp4 import unpack
from grpo_roc_jax.model.published import read_config
from tests.helpers.published_models import need_reference, need_transformers, save_model


def test_a_byte_holds_two_numbers_the_low_half_first():
    blocks = np.zeros((1, 2, 16), np.uint8)
    blocks[0, 0, :4] = 0x21, 0x7F, 0x80, 0x6D
    scales = np.array([[127, 129]], np.uint8)
    blocks[0, 1, 0] = 0xA3
    got = unpack(blocks, scales)
    assert got.shape == (1, 64)
    assert got[0, :8].tolist() == [0.5, 1.0, -6.0, 6.0, 0.0, 0.0, -3.0, 4.0]
    assert got[0, 32:34].tolist() == [6.0, -4.0] and not got[0, 34:].any()


def test_random_bytes_equal_those_of_transformers():
    need_transformers()
    torch = need_reference("torch")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (2, 6, 3, 16), dtype=np.uint8)
    scales = rng.integers(110, 140, (2, 6, 3), dtype=np.uint8)
    wanted = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32).numpy()
    for expert in range(2):
        np.testing.assert_array_equal(unpack(blocks[expert], scales[expert]).T, wanted[expert])


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
