"""Exported directories: transformers computes the same from them, and no partial directory is left."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from grpo_roc_jax.commands.export import TextFiles, atomically, export_model, main, text_files
from grpo_roc_jax.model.config import ModelConfig, SlidingWindows, SomeExtras
from grpo_roc_jax.model.safetensors_io import CheckpointError
from grpo_roc_jax.model.transformer import forward, unembed
from grpo_roc_jax.text.chat_format import make_chat
from grpo_roc_jax.text.config import TextConfig, TokenizerFile
from grpo_roc_jax.text.tokenizer import load_tokenizer
from grpo_roc_jax.types import Problem
from tests.helpers.published_models import logits_of, need_transformers, random_tokens
from tests.helpers.reference import random_params
from tests.text.test_templates import make_directory

SIZES = {"d_model": 16, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "d_ff": 24, "vocab_size": 96}
SMALL = ModelConfig(**SIZES, qk_norm=True, max_positions=64)


GEMMA2 = {"norm_offset": True, "post_norms": True, "activation": "gelu_tanh", "qk_norm": False}
GEMMA2 |= {"extras": SomeExtras(scale_embed=True, query_scale=5.0, attention_cap=2.0, logit_cap=3.0)}
GEMMA2 |= {"windows": SlidingWindows((7, 0))}


@pytest.mark.parametrize("options", [{}, GEMMA2], ids=["qwen3", "gemma2"])
def test_models_that_were_never_published_load_too(tmp_path, options):
    """A model trained from scratch is exported as the architecture that computes the same."""
    transformers = need_transformers()
    config = ModelConfig(**(vars(SMALL) | options))
    params = jax.device_put(random_params(config))
    export_model(params, config, tmp_path / "out", dtype="float32", text=TextFiles({}, (5,), 0))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = random_tokens(2, 30) % config.vocab_size
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    rows = map(jax.numpy.asarray, (tokens, positions, np.ones_like(tokens)))
    ours = unembed(params, forward(params, *rows, config), config)
    np.testing.assert_allclose(logits_of(model, tokens), ours, atol=1e-5)


def test_a_failed_export_leaves_nothing(tmp_path):
    params = random_params(SMALL)
    params["final_norm"][0] = np.inf
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight holds values that are not finite"):
        export_model(jax.device_put(params), SMALL, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten_and_an_empty_directory_is_filled(tmp_path, capsys):
    """A target that cannot be written is refused before weights are loaded, which this run has none of."""
    (tmp_path / "out").mkdir()
    atomically(tmp_path / "out", lambda folder: [(folder / "a").write_text("b")])
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="exists already; name a new directory"):
        atomically(tmp_path / "out", lambda folder: [])
    assert {path.name: path.read_text() for path in (tmp_path / "out").iterdir()} == {"a": "b", "notes.txt": "mine"}
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text("seed: 0")
    assert main([str(tmp_path / "run")] * 2) == 2 and "exists already" in capsys.readouterr().err
    assert len(list((tmp_path / "run").iterdir())) == 2


def test_tokenizers_load_elsewhere_with_tokens_that_were_added(tmp_path):
    transformers = need_transformers()

    def exported_text(folder, config):
        """(tokenizer, the one that transformers reads) of a model that was exported with this text."""
        tokenizer = load_tokenizer(config)
        model = replace(SMALL, vocab_size=-(-tokenizer.vocab_size // 16) * 16)
        export_model(jax.device_put(random_params(model)), model, folder, text=text_files(config, tokenizer))
        return tokenizer, transformers.AutoTokenizer.from_pretrained(folder)

    config = TextConfig()
    tokenizer, exported = exported_text(tmp_path / "out", config)
    for sample in ("What is 12 x 34?\nprint(5)", "  two  spaces \n\n", "é ü 語"):
        assert exported(sample, add_special_tokens=False).input_ids == tokenizer.encode(sample)
    assert (exported.eos_token_id, exported.pad_token_id) == (tokenizer.eos_id, tokenizer.pad_id)
    messages = [{"role": "user", "content": "What is 6 x 7?"}]
    ids = exported.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert list(ids) == make_chat(config, tokenizer).prompt_ids(Problem("p", "What is 6 x 7?", "42", "s"))
    file = TokenizerFile(path=str(make_directory(tmp_path, "chatml_tools")), added_tokens=("<|high_reward|>",))
    tokenizer, exported = exported_text(tmp_path / "added", TextConfig(tokenizer=file, template="model"))
    again, text = load_tokenizer(TextConfig(tokenizer=str(tmp_path / "added"))), file.added_tokens[0]
    assert exported(text, add_special_tokens=False).input_ids == [tokenizer.special(text)] == [again.special(text)]
