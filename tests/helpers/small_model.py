"""A small model as exported: random weights, the toy tokenizer and its chat template."""

import jax

from grpo_roc_jax.commands.export import export_model, text_files
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.run.components import resolve_model
from grpo_roc_jax.text.config import TextConfig
from grpo_roc_jax.text.tokenizer import load_tokenizer
from tests.helpers.reference import random_params


def publish(folder, seed=0):
    """Writes the model to a new directory, and returns this."""
    text = TextConfig(instruction="default")
    tokenizer = load_tokenizer(text)
    shape = ModelConfig(d_model=16, layers=1, heads=2, kv_heads=1, head_dim=8, d_ff=16, max_positions=1024)
    model = resolve_model(shape, tokenizer)
    params = jax.device_put(random_params(model, seed))
    export_model(params, model, folder, dtype="float32", text=text_files(text, tokenizer))
    return folder
