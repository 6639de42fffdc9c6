"""Text that is sent while its ids are drawn."""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from grpo_roc_jax.serving.replies import GrowingText
from grpo_roc_jax.text.tokenizer import JsonTokenizer


def bytes_as_last_resort():
    """A vocabulary of few pieces, as of Gemma: its decoder replaces all bytes in a row until they are whole."""
    pieces = ["<unk>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "b", "\u2581"]
    made = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(pieces)}, [], byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return made


def bytes_as_characters():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(["<eos>", *alphabet])}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


def loaded(made):
    made.add_special_tokens(["<eos>"])
    return JsonTokenizer(json.loads(made.to_str()), eos_token="<eos>")


TOKENIZERS = {make.__name__: loaded(make()) for make in (bytes_as_last_resort, bytes_as_characters)}
PARTS = ["a", "b", "é", "你", "😀", "ab" * 15, "世" * 20, "😀" * 15]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(texts=st.lists(st.sampled_from(PARTS), max_size=12), together=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_it_grows_to_the_whole_text_and_nothing_is_taken_back(name, texts, together):
    tokenizer, text = TOKENIZERS[name], "".join(texts)
    ids, growing = tokenizer.encode(text), GrowingText()
    for start in range(0, len(ids), together):
        before = growing.text
        growing.add(ids[start : start + together], tokenizer)
        assert growing.text.startswith(before) and text.startswith(growing.text)
    assert growing.text == text and not growing.unfinished


@pytest.mark.parametrize("name", TOKENIZERS)
def test_bytes_that_are_no_character_are_sent_when_the_next_one_is_known(name):
    tokenizer, growing = TOKENIZERS[name], GrowingText()
    part = tokenizer.encode("你")[0]
    ids = [*tokenizer.encode("a"), part, *tokenizer.encode("b")]
    for token in ids:
        growing.add([token], tokenizer)
    assert growing.text == tokenizer.decode(ids) == "a\ufffdb"
