"""Plain text is never encoded to a special id, and decoding restores the text."""

import io
import json

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from examples.train_toy_tokenizer import FIXED_PIECES
from grpo_roc_jax.text.config import CHATML_TAGS, PROTOCOL_TAGS, TextConfig, TokenizerFile
from grpo_roc_jax.text.escape import ObservationEncoder, dialogue_tags
from grpo_roc_jax.text.tokenizer import JsonTokenizer, Strips, load_tokenizer

CORPUS = ["the tool answers 42 and the answer is 42", "print(6*7) <tool_call> assistant user system reason"] * 20
REWARD = ("<|high_reward|>", "<|low_reward|>")
SOFT = "<image_soft_token>"
NASTY = [
    *("<|im_end|> <answer>", "a<|im_start|>system\nb", "</tool_call></answer><tool_call>", "<reason>", "\x00\x7f", ""),
    *("tab\tand\r\nlines", "é 日本 \U0001f600", "lone \ud800 surrogate", " lead", "a\n\n  b\t", "\ufffd"),
    *("<|im<|im_end|>_end|>", "</answer</answer>>|<answer>7"),
]


def qwen_like() -> dict:
    """A byte-level tokenizer with special and ordinary added tokens, as in published chat models."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    level, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.pre_tokenizer, alphabet = level, level.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([tokenizers.AddedToken(t, normalized=False) for t in ("<tool_call>", "</tool_call>")])
    return json.loads(tokenizer.to_str())


@pytest.mark.parametrize("name", ["toy", "bytes", "json"])
def test_plain_text_has_no_special_id_and_is_restored(name):
    """Of a part of a character its own bytes, not those of the replacement character."""
    tokenizer = JsonTokenizer(qwen_like()) if name == "json" else load_tokenizer(TextConfig(tokenizer=name))
    for text in NASTY:
        ids = tokenizer.encode(text)
        assert tokenizer.special_ids.isdisjoint(ids) and all(0 <= i < tokenizer.vocab_size for i in ids)
        assert tokenizer.decode(ids) == text.encode(errors="replace").decode()
        ids.append(tokenizer.eos_id)
        assert b"".join(map(tokenizer.token_bytes, ids)) == tokenizer.decode(ids).encode()
    emoji = tokenizer.encode("🙂")
    assert b"".join(map(tokenizer.token_bytes, emoji)) == "🙂".encode() and len(emoji) > 1
    for tag in CHATML_TAGS:
        assert (token := tokenizer.special(tag)) in tokenizer.special_ids
        assert tokenizer.decode([*tokenizer.encode("a"), token, *tokenizer.encode("b")]) == f"a{tag}b"
    assert tokenizer.decode(emoji[:1]) != "🙂" and tokenizer.special("print") is None
    assert isinstance(tokenizer.decode([tokenizer.vocab_size, tokenizer.vocab_size + 5]), str)


def with_token(spec: dict, text: str, **flags) -> dict:
    """The tokenizer with one more added token, which the file does not call special."""
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    own_id = 1 + max(token["id"] for token in spec["added_tokens"])
    return spec | {"added_tokens": [*spec["added_tokens"], {"id": own_id, "content": text} | plain | flags]}


@pytest.mark.parametrize("text", ["\n\n", "Name", "→", "<table>"])
def test_added_tokens_that_are_ordinary_text_are_encoded_as_the_library_does(text):
    spec = with_token(qwen_like(), text)
    loaded, own_id = JsonTokenizer(spec), spec["added_tokens"][-1]["id"]
    line = f"if x:{text}y rename {text.lower()}"
    assert own_id in loaded.encode(line) and loaded.special(text) is None
    assert loaded.encode(line) == tokenizers.Tokenizer.from_str(json.dumps(spec)).encode(line).ids
    assert loaded.decode(loaded.encode(line)) == line and loaded.token_bytes(own_id) == text.encode()
    assert ObservationEncoder(loaded, dialogue_tags(loaded), 128).shown(line) == line


@pytest.mark.parametrize("text", ["</tool_response>", "[TOOL_CALLS]", "<turn|>", "<s>", "END", "<b>"])
def test_added_tokens_that_may_be_marks_come_out_of_no_text(tmp_path, text):
    """Also a word or an element of HTML that the chat template or another file of the folder uses."""
    (tmp_path / "tokenizer.json").write_text(json.dumps(with_token(qwen_like(), text)))
    (tmp_path / "chat_template.jinja").write_text("<b>{{ messages[0].content }}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eot_token": "END", "eos_token": "<|im_end|>"}))
    loaded = load_tokenizer(TextConfig(tokenizer=str(tmp_path)))
    assert loaded.special(text) in loaded.special_ids and loaded.special_ids.isdisjoint(loaded.encode(f"a{text}b"))
    shown = ObservationEncoder(loaded, dialogue_tags(loaded), 128).shown
    assert text not in shown(text) and shown("append 1") == "append 1"


def test_ids_of_added_runs_of_spaces_are_those_of_the_library():
    """With `\u2581` for a space, runs of it as added tokens, and characters the vocabulary does not know."""
    texts = ["<pad>", "<eos>", "<unk>", "<start_of_turn>", "\n\n", "\u2581\u2581", "\u2581\u2581\u2581", "<table>"]
    pieces = dict.fromkeys([*texts, "\u2581", "\n", "\u2581a", *"ab<>/etl"])
    merges = [("\u2581", "\u2581"), ("\u2581\u2581", "\u2581"), ("\u2581", "a"), ("\n", "\n")]
    model = models.BPE({piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>", fuse_unk=True)
    inner = tokenizers.Tokenizer(model)
    inner.normalizer = normalizers.Replace(" ", "\u2581")
    inner.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse()])
    inner.add_special_tokens(texts[:4])
    inner.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in texts[4:]])
    loaded = JsonTokenizer(json.loads(inner.to_str()), eos_token="<eos>")
    assert loaded.pad_id == 0 and loaded.special_ids == {0, 1, 3}
    for text in ("a  b", "a   b\n\n  a", " \u2581a", "<table> a", "a \U0001f642  b"):
        ids = loaded.encode(text)
        assert ids == inner.encode(text, add_special_tokens=False).ids
        assert b"".join(map(loaded.token_bytes, ids)).decode() == loaded.decode(ids)


def from_file(path, rows=None, **settings):
    return load_tokenizer(TextConfig(tokenizer=TokenizerFile(path=str(path), **settings)), rows)


def test_end_and_padding_of_a_tokenizer_json(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(qwen_like()))
    tokenizer = from_file(tmp_path)
    assert [tokenizer.decode([i]) for i in (tokenizer.eos_id, tokenizer.pad_id)] == ["<|im_end|>", "<|endoftext|>"]
    config = {"eos_token": {"content": "<|endoftext|>"}, "pad_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    named = load_tokenizer(TextConfig(tokenizer=str(tmp_path / "tokenizer.json")))
    assert named.eos_id == named.pad_id == named.special("<|endoftext|>")
    forced = from_file(tmp_path, eos_token="<|im_end|>", pad_token="<|im_start|>")
    assert (forced.eos_id, forced.pad_id) == (forced.special("<|im_end|>"), forced.special("<|im_start|>"))


def test_messages_about_paths_that_cannot_be_loaded(tmp_path):
    (tmp_path / "vocab.txt").write_text("a")
    found = {"missing.json": r"not a file or folder.*'toy', 'bytes'", "": "holds neither", "vocab.txt": "is neither"}
    for name, message in found.items():
        with pytest.raises(ValueError, match=message):
            load_tokenizer(TextConfig(tokenizer=str(tmp_path / name)))
    with pytest.raises(ValueError, match=r"'<nope>' is a token.*text.tokenizer.eos_token"):
        JsonTokenizer(qwen_like(), eos_token="<nope>")


def gemma_like(kind):
    """A SentencePiece model whose roles are user-defined symbols, as Gemma's are."""
    out, text = io.BytesIO(), "the start of a turn <table> user model is here and there <start_of_turn> end"
    sentencepiece.SentencePieceTrainer.train(
        **{"sentence_iterator": iter([text] * 50), "model_writer": out, "model_type": kind, "vocab_size": 330},
        **{"byte_fallback": True, "hard_vocab_limit": False, "add_dummy_prefix": False, "minloglevel": 2},
        **{"normalization_rule_name": "identity", "remove_extra_whitespaces": False},
        user_defined_symbols=["<start_of_turn>", "<end_of_turn>", "<table>", "\n\n"],
    )
    return out.getvalue()


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_role_tokens_of_a_sentencepiece_model_are_special(tmp_path, kind):
    proto = gemma_like(kind)
    naive = sentencepiece.SentencePieceProcessor(model_proto=proto)
    mark, text = naive.piece_to_id("<start_of_turn>"), "there <start_of_turn>user\n\nend<end_of_turn>"
    assert mark in naive.encode(text)  # the threat is real
    (tmp_path / "tokenizer.model").write_bytes(proto)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_end|>": 500, "<unk>": naive.unk_id()}))
    named = {"eos_token": "<|im_end|>", "pad_token": {"content": "<end_of_turn>"}}
    named["added_tokens_decoder"] = {"501": {"content": "[TOOL]", "special": True, "rstrip": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    loaded = load_tokenizer(TextConfig(tokenizer=str(tmp_path)))
    ids = loaded.encode(text + "<|im_end|>[TOOL]")
    assert loaded.special_ids.isdisjoint(ids) and loaded.decode(ids) == text + "<|im_end|>[TOOL]"
    assert [loaded.special(text) for text in ("<start_of_turn>", "<|im_end|>", "[TOOL]")] == [mark, 500, 501]
    assert (loaded.eos_id, loaded.pad_id, loaded.vocab_size) == (500, naive.piece_to_id("<end_of_turn>"), 502)
    assert loaded.strips == Strips(after=frozenset({501}))
    more = from_file(tmp_path, added_tokens=REWARD)
    assert [more.special(text) for text in REWARD] == [502, 503] and more.encode("the") == loaded.encode("the")
    assert loaded.decode([500, *loaded.encode("the"), mark]) == "<|im_end|>the<start_of_turn>"
    # Everything else is encoded as before, including user-defined symbols that are not role tokens.
    for plain in ("the start of a turn", "a <table>\n\nhere", "日本", "What is 6 x 7? é🙂"):
        ids = loaded.encode(plain)
        assert ids == naive.encode(plain)
        assert b"".join(map(loaded.token_bytes, ids)).decode().removeprefix(" ") == loaded.decode(ids).removeprefix(" ")
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_end|>": 7}))
    with pytest.raises(ValueError, match=r"added tokens \['<\|im_end\|>'\] have other ids"):
        load_tokenizer(TextConfig(tokenizer=str(tmp_path)))


@pytest.mark.parametrize("kind", ["json", "json of pieces", "sentencepiece"])
def test_added_tokens_beyond_the_embedding_are_plain_text(tmp_path, caplog, kind):
    """Gemma 3 1B has one, for images that only its larger models see; fine-tunes add `<pad>`."""
    if kind == "sentencepiece":
        (tmp_path / "tokenizer.model").write_bytes(gemma_like("bpe"))
        rows = from_file(tmp_path).vocab_size
        tokens = {str(rows + i): {"content": text, "special": True} for i, text in enumerate((SOFT, "<pad>"))}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": tokens}))
    else:
        rows = JsonTokenizer(qwen_like()).vocab_size
        spec = with_token(with_token(with_token(qwen_like(), SOFT, special=True), "日本"), "<pad>", special=True)
        if kind == "json of pieces":
            spec["model"]["vocab"] |= {token["content"]: token["id"] for token in spec["added_tokens"]}
        (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    whole, loaded = from_file(tmp_path), from_file(tmp_path, rows)
    assert loaded.vocab_size == rows < whole.vocab_size and loaded.left_out == {SOFT, "<pad>"}
    assert loaded.special(SOFT) is None and max(loaded.special_ids) < rows == whole.special(SOFT)
    assert f"beyond the {rows} rows of the embedding are plain text: {SOFT}" in caplog.text
    text = f"the {SOFT}turn<pad> 日本 x"
    assert max(loaded.encode(text)) < rows and loaded.decode(loaded.encode(text)) == text
    with pytest.raises(ValueError, match=f"'{SOFT}' has the id {rows}, but the embedding of the model has {rows} rows"):
        from_file(tmp_path, rows, eos_token=SOFT)
    with pytest.raises(ValueError, match=r"added_tokens: '<\|high_reward\|>' has the id .*; name fewer"):
        from_file(tmp_path, rows, added_tokens=REWARD)
    with pytest.raises(ValueError, match=r"tokenizer toy has .* ids, but the embedding .* has 255 rows"):
        load_tokenizer(TextConfig(), 255)


def test_the_toy_vocabulary_suits_small_policies():
    """Tags are tokens, and so are each digit, wherever it stands, and the texts that dialogues repeat."""
    toy = load_tokenizer(TextConfig())
    assert all(toy.special(tag) is not None for tag in (*CHATML_TAGS, *PROTOCOL_TAGS))
    assert toy.eos_id == toy.special("<|im_end|>") != toy.pad_id
    for text in ("0123456789", "print(37*58)", "7^13 mod 11=?", "\\boxed{2146}"):
        pieces = [toy.decode([token]) for token in toy.encode(text)]
        assert not any(any(c.isdigit() for c in piece) for piece in pieces if len(piece) > 1), pieces
    assert [piece for piece in FIXED_PIECES if len(toy.encode(piece)) != 1] == []
