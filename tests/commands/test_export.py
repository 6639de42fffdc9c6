"""Exported directories: transformers computes the same from them, and no partial directory is left."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest

from grpo_roc_jax.commands.export import TextFiles, atomically, export_model, main, text_files
from grpo_roc_jax.model.config import ModelConfig, SlidingWindows, SomeExtras
from grpo_roc_jax.model.convert import resolve_config
from grpo_roc_jax.model.rope_scaling import LongRopeScaling, YarnRopeScaling
from grpo_roc_jax.model.safetensors_io import CheckpointError
from grpo_roc_jax.model.transformer import forward, unembed
from grpo_roc_jax.text.chat_format import make_chat
from grpo_roc_jax.text.config import TextConfig, TokenizerFile
from grpo_roc_jax.text.tokenizer import load_tokenizer
from grpo_roc_jax.types import Problem
from tests.helpers.published_models import logits_of, need_transformers, random_tokens
from tests.helpers.reference import random_params
from tests.text.test_templates import make_directory

SMALL = ModelConfig(
    d_model=16, layers=2, heads=4, kv_heads=2, head_dim=8, d_ff=24, vocab_size=96, qk_norm=True, max_positions=64
)


def our_logits(params, config, tokens):
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)

    @jax.jit
    def run(params, *rows):
        return unembed(params, forward(params, *rows, config), config)

    return np.asarray(run(params, tokens, positions, np.ones_like(tokens)))


GEMMA2 = {"norm_offset": True, "post_norms": True, "activation": "gelu_tanh", "qk_norm": False}
GEMMA2 |= {"extras": SomeExtras(scale_embed=True, query_scale=5.0, attention_cap=2.0, logit_cap=3.0)}
GEMMA2 |= {"windows": SlidingWindows((7, 0))}
OLMO3 = {"qk_norm": "whole", "post_norms": "only", "windows": SlidingWindows((7, 0), local_theta=1e4)}
OLMO3 |= {"rope_scaling": YarnRopeScaling(factor=4.0, original_length=16)}
SMOLLM3 = {"qk_norm": False, "extras": SomeExtras(rotary_layers=(False, True)), "norm_eps": 1e-5}
PHI4 = {"qk_norm": False, "d_model": 32, "extras": SomeExtras(rotary_share=0.5), "tie_embeddings": False}
PHI4 |= {"rope_scaling": LongRopeScaling((1.0, 1.5), (2.0, 3.0), 32, attention_factor=1.3)}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="qwen3"),
        pytest.param(GEMMA2, id="gemma2"),
        pytest.param({"qk_norm": False, "qkv_bias": True}, id="qwen2", marks=pytest.mark.slow),
        pytest.param(OLMO3, id="olmo3", marks=pytest.mark.slow),
        pytest.param(SMOLLM3, id="smollm3", marks=pytest.mark.slow),
        pytest.param(PHI4, id="phi3", marks=pytest.mark.slow),
    ],
)
def test_models_that_were_never_published_load_too(tmp_path, options):
    """A model trained from scratch is exported as the architecture that computes the same."""
    transformers = need_transformers()
    config = ModelConfig(**(vars(SMALL) | options))
    params = jax.device_put(random_params(config))
    export_model(params, config, tmp_path / "out", dtype="float32", text=TextFiles({}, (5,), 0))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = random_tokens(2, 30) % config.vocab_size
    np.testing.assert_allclose(logits_of(model, tokens), our_logits(params, config, tokens), atol=1e-5)
    assert model.generation_config.eos_token_id == 5


def test_stop_ids_join_those_of_the_source(tmp_path):
    params = jax.device_put(random_params(SMALL))
    export_model(params, SMALL, tmp_path / "in", text=TextFiles({"tokenizer.json": b"{}"}, (7,), 3))
    file = tmp_path / "in" / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"temperature": 0.6}))
    config = resolve_config(ModelConfig(path=str(tmp_path / "in")))
    names = export_model(params, config, tmp_path / "out", text=TextFiles({}, (9, 7), 3))
    assert names == ["model.safetensors", "config.json", "generation_config.json"]
    published, generation = (json.loads((tmp_path / "out" / name).read_text()) for name in names[1:])
    assert published["eos_token_id"] == generation["eos_token_id"] == [9, 7]
    assert (generation["temperature"], generation["pad_token_id"]) == (0.6, 3)
    assert published["torch_dtype"] == "bfloat16"
    # Without text files of its own, the export copies the tokenizer of the source.
    export_model(params, config, tmp_path / "copy", dtype="float32")
    assert (tmp_path / "copy" / "tokenizer.json").read_bytes() == b"{}"


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
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text("seed: 0")
    for target, why in (("config.yaml/model", "must be a directory that can be created"), ("", "exists already")):
        assert main([str(run), str(run / target)]) == 2
        assert why in capsys.readouterr().err
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "config.yaml"]


def exported_text(folder, config):
    """(tokenizer, the one that transformers reads) of a model that was exported with this text."""
    transformers = need_transformers()
    tokenizer = load_tokenizer(config)
    model = replace(SMALL, vocab_size=-(-tokenizer.vocab_size // 16) * 16)
    export_model(jax.device_put(random_params(model)), model, folder, text=text_files(config, tokenizer))
    return tokenizer, transformers.AutoTokenizer.from_pretrained(folder)


def test_tokenizers_load_elsewhere_with_tokens_that_were_added(tmp_path):
    config = TextConfig()
    tokenizer, exported = exported_text(tmp_path / "out", config)
    for sample in ("What is 12 x 34?\nprint(5)", "  two  spaces \n\n", "é ü 語"):
        assert exported(sample, add_special_tokens=False).input_ids == tokenizer.encode(sample)
    assert (exported.eos_token_id, exported.pad_token_id) == (tokenizer.eos_id, tokenizer.pad_id)
    problem = Problem(uid="p", prompt="What is 6 x 7?", answer="42", source="s")
    messages = [{"role": "user", "content": problem.prompt}]
    ids = exported.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert list(ids) == make_chat(config, tokenizer).prompt_ids(problem)
    folder, reward = make_directory(tmp_path, "chatml_tools"), ("<|high_reward|>", "<|low_reward|>")
    file = TokenizerFile(path=str(folder), added_tokens=reward)
    tokenizer, exported = exported_text(tmp_path / "added", TextConfig(tokenizer=file, template="model"))
    again = load_tokenizer(TextConfig(tokenizer=str(tmp_path / "added")))
    for text in reward:
        assert exported(text, add_special_tokens=False).input_ids == [tokenizer.special(text)] == [again.special(text)]
    assert exported("print(6)", add_special_tokens=False).input_ids == tokenizer.encode("print(6)")
