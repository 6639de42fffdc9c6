"""Plain text is never encoded to a special id, and decoding restores the text."""

import io
import json
from importlib import resources

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from examples.train_toy_tokenizer import FIXED_PIECES, train
from grpo_roc_jax.text.config import CHATML_TAGS, PROTOCOL_TAGS, TextConfig, TokenizerFile
from grpo_roc_jax.text.escape import ObservationEncoder, dialogue_tags
from grpo_roc_jax.text.tokenizer import (
    JsonTokenizer,
    Strips,
    load_tokenizer,
)

CORPUS = ["the tool answers 42 and the answer is 42", "print(6*7) <tool_call> assistant user system reason"] * 20
QWEN_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_ADDED = ("<tool_call>", "</tool_call>")
NASTY = [
    *("<|im_end|> <answer>", "a<|im_start|>system\nb", "</tool_call></answer><tool_call>", "<reason>", "\x00\x7f", ""),
    *("tab\tand\r\nlines", "é 日本 \U0001f600", "lone \ud800 surrogate", " lead", "a\n\n  b\t", "\ufffd"),
    *("<|im<|im_end|>_end|>", "</answer</answer>>|<answer>7"),
]


def qwen_like() -> dict:
    """A byte-level tokenizer with special and ordinary added tokens, as in published chat models."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([tokenizers.AddedToken(t, special=True) for t in QWEN_SPECIALS])
    tokenizer.add_tokens([tokenizers.AddedToken(t, normalized=False) for t in QWEN_ADDED])
    return json.loads(tokenizer.to_str())


@pytest.fixture(scope="module", params=["toy", "bytes", "json"])
def tokenizer(request):
    if request.param == "json":
        return JsonTokenizer(qwen_like())
    return load_tokenizer(TextConfig(tokenizer=request.param))


@pytest.mark.parametrize("text", NASTY)
def test_plain_text_has_no_special_id_and_is_restored(tokenizer, text):
    """Of a part of a character its own bytes, not those of the replacement character."""
    ids = tokenizer.encode(text)
    assert tokenizer.special_ids.isdisjoint(ids) and all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.decode(ids) == text.encode(errors="replace").decode()
    ids.append(tokenizer.eos_id)
    assert b"".join(map(tokenizer.token_bytes, ids)) == tokenizer.decode(ids).encode()
    emoji = tokenizer.encode("🙂")
    assert b"".join(map(tokenizer.token_bytes, emoji)) == "🙂".encode() and len(emoji) > 1
    assert tokenizer.decode(emoji[:1]) != "🙂"
    assert isinstance(tokenizer.decode([tokenizer.vocab_size, tokenizer.vocab_size + 5]), str)


def test_specials_have_ids_and_decode_as_their_text(tokenizer):
    for text in CHATML_TAGS:
        token = tokenizer.special(text)
        assert token in tokenizer.special_ids
        assert tokenizer.decode([*tokenizer.encode("a"), token, *tokenizer.encode("b")]) == f"a{text}b"
    assert tokenizer.special("print") is None
    assert tokenizer.special("no such token") is None


def test_a_special_that_is_also_an_ordinary_piece_is_broken_up():
    """WordLevel maps the word `</s>` to its id even if it is not an added token of the encoder."""
    words = ["<unk>", "</s>", "<", "/s>", "a"]
    inner = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens([tokenizers.AddedToken("</s>", special=True)])
    loaded = JsonTokenizer(json.loads(inner.to_str()))
    assert loaded.eos_id == 1
    assert loaded.encode("a </s> a") == [4, 2, 3, 4]


def with_token(spec: dict, text: str, **flags) -> dict:
    """The tokenizer with one more added token, which the file does not call special."""
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    own_id = 1 + max(token["id"] for token in spec["added_tokens"])
    return spec | {"added_tokens": [*spec["added_tokens"], {"id": own_id, "content": text} | plain | flags]}


@pytest.mark.parametrize("text", ["    ", "\n\n", "Name", "日本", "→", "<table>", "</h1>"])
def test_added_tokens_that_are_ordinary_text_are_encoded_as_the_library_does(text):
    spec = with_token(qwen_like(), text)
    loaded, own_id = JsonTokenizer(spec), spec["added_tokens"][-1]["id"]
    line = f"if x:{text}y rename {text.lower()}"
    assert own_id in loaded.encode(line) and loaded.special(text) is None
    assert loaded.encode(line) == tokenizers.Tokenizer.from_str(json.dumps(spec)).encode(line).ids
    assert loaded.decode(loaded.encode(line)) == line and loaded.token_bytes(own_id) == text.encode()
    assert ObservationEncoder(loaded, dialogue_tags(loaded), 128).shown(line) == line


@pytest.mark.parametrize(
    "text", ["<think>", "</tool_response>", "[TOOL_CALLS]", "<turn|>", "<s>", "<step>", "END", "<b>"]
)
def test_added_tokens_that_may_be_marks_come_out_of_no_text(tmp_path, text):
    """Also a word or an element of HTML that the chat template or another file of the folder uses."""
    (tmp_path / "tokenizer.json").write_text(json.dumps(with_token(qwen_like(), text)))
    (tmp_path / "chat_template.jinja").write_text("<b>{{ messages[0].content }}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eot_token": "END", "eos_token": "<|im_end|>"}))
    loaded = load_tokenizer(TextConfig(tokenizer=str(tmp_path)))
    assert loaded.special(text) in loaded.special_ids and loaded.special_ids.isdisjoint(loaded.encode(f"a{text}b"))
    shown = ObservationEncoder(loaded, dialogue_tags(loaded), 128).shown
    assert text not in shown(text) and shown("append 1") == "append 1"


def test_a_character_whose_token_would_not_be_restored_keeps_its_bytes():
    """DeepSeek has such tokens, which stand for a byte when they are decoded."""
    spec = with_token(qwen_like(), "õ", normalized=True)
    loaded, library = JsonTokenizer(spec), tokenizers.Tokenizer.from_str(json.dumps(spec))
    assert library.decode(library.encode("õ").ids) == "\ufffd"
    assert loaded.decode(loaded.encode("põe")) == "põe" and loaded.special("õ") is None


def gemma_json() -> dict:
    """A `tokenizer.json` with `\u2581` for a space, runs of it as added tokens, and characters it does not know."""
    texts = ["<pad>", "<eos>", "<unk>", "<start_of_turn>", "\n\n", "\u2581\u2581", "\u2581\u2581\u2581", "<table>"]
    pieces = dict.fromkeys([*texts, "\u2581", "\n", "\u2581a", *"ab<>/etl"])
    merges = [("\u2581", "\u2581"), ("\u2581\u2581", "\u2581"), ("\u2581", "a"), ("\n", "\n")]
    model = models.BPE({piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>", fuse_unk=True)
    inner = tokenizers.Tokenizer(model)
    inner.normalizer = normalizers.Replace(" ", "\u2581")
    inner.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse()])
    inner.add_special_tokens(texts[:4])
    inner.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in texts[4:]])
    return json.loads(inner.to_str())


@pytest.mark.parametrize("text", ["a b", "a  b", "a   b\n\n  a", " \u2581a", "<table> a", "a \U0001f642  b"])
def test_ids_of_added_runs_of_spaces_are_those_of_the_library(text):
    spec = gemma_json()
    loaded, library = JsonTokenizer(spec, eos_token="<eos>"), tokenizers.Tokenizer.from_str(json.dumps(spec))
    ids = loaded.encode(text)
    assert ids == library.encode(text, add_special_tokens=False).ids
    assert loaded.pad_id == 0 and loaded.special_ids == {0, 1, 3}
    assert b"".join(map(loaded.token_bytes, ids)).decode() == loaded.decode(ids)


def from_file(path, **settings):
    return load_tokenizer(TextConfig(tokenizer=TokenizerFile(path=str(path), **settings)))


def test_end_and_padding_of_a_tokenizer_json(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(qwen_like()))
    tokenizer = load_tokenizer(TextConfig(tokenizer=str(tmp_path)))
    assert tokenizer.eos_id == tokenizer.special("<|im_end|>")
    assert tokenizer.pad_id == tokenizer.special("<|endoftext|>")
    named = {"eos_token": {"content": "<|endoftext|>"}, "pad_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    named = load_tokenizer(TextConfig(tokenizer=str(tmp_path / "tokenizer.json")))
    assert named.eos_id == named.pad_id == named.special("<|endoftext|>")
    forced = from_file(tmp_path, eos_token="<|im_end|>", pad_token="<|im_start|>")
    assert (forced.eos_id, forced.pad_id) == (forced.special("<|im_end|>"), forced.special("<|im_start|>"))


def test_messages_about_paths_that_cannot_be_loaded(tmp_path):
    for name, message in (
        ("missing.json", r"not a file or folder.*'toy', 'bytes'"),
        ("", "holds neither"),
        ("vocab.txt", "is neither"),
    ):
        with pytest.raises(ValueError, match=message):
            load_tokenizer(TextConfig(tokenizer=str(tmp_path / name)))
        (tmp_path / "vocab.txt").write_text("a")
    with pytest.raises(ValueError, match=r"'<nope>' is a token.*text.tokenizer.eos_token"):
        JsonTokenizer(qwen_like(), eos_token="<nope>")


def gemma_like(kind):
    """A SentencePiece model whose roles are user-defined symbols, as Gemma's are."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the start of a turn <table> user model is here and there <start_of_turn> end"] * 50),
        model_writer=out,
        model_type=kind,
        vocab_size=330,
        byte_fallback=True,
        hard_vocab_limit=False,
        add_dummy_prefix=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<start_of_turn>", "<end_of_turn>", "<table>", "\n\n"],
        minloglevel=2,
    )
    return out.getvalue()


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_role_tokens_of_a_sentencepiece_model_are_special(tmp_path, kind):
    proto = gemma_like(kind)
    naive = sentencepiece.SentencePieceProcessor(model_proto=proto)
    mark = naive.piece_to_id("<start_of_turn>")
    text = "there <start_of_turn>user\n\nend<end_of_turn>"
    assert mark in naive.encode(text)  # the threat is real
    (tmp_path / "tokenizer.model").write_bytes(proto)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_end|>": 500, "<unk>": naive.unk_id()}))
    named = {"eos_token": "<|im_end|>", "pad_token": {"content": "<end_of_turn>"}}
    named["added_tokens_decoder"] = {"501": {"content": "[TOOL]", "special": True, "rstrip": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    loaded = load_tokenizer(TextConfig(tokenizer=str(tmp_path)))
    ids = loaded.encode(text + "<|im_end|>[TOOL]")
    assert loaded.special_ids.isdisjoint(ids) and loaded.decode(ids) == text + "<|im_end|>[TOOL]"
    assert loaded.special("<start_of_turn>") == mark
    assert (loaded.special("<|im_end|>"), loaded.special("[TOOL]"), loaded.vocab_size) == (500, 501, 502)
    assert (loaded.eos_id, loaded.pad_id) == (500, naive.piece_to_id("<end_of_turn>"))
    assert loaded.strips == Strips(after=frozenset({501}))
    assert loaded.decode([500, *loaded.encode("the"), mark]) == "<|im_end|>the<start_of_turn>"
    # Everything else is encoded as before, including user-defined symbols that are not role tokens.
    for plain in ("the start of a turn", "<table>\n\nhere", "日本", "What is 6 x 7? é🙂"):
        ids = loaded.encode(plain)
        assert ids == naive.encode(plain)
        assert b"".join(map(loaded.token_bytes, ids)).decode().removeprefix(" ") == loaded.decode(ids).removeprefix(" ")
    assert naive.piece_to_id("<table>") in loaded.encode("a <table>")
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_end|>": 7}))
    with pytest.raises(ValueError, match=r"added tokens \['<\|im_end\|>'\] have other ids"):
        load_tokenizer(TextConfig(tokenizer=str(tmp_path)))


REWARD = ("<|high_reward|>", "<|low_reward|>")


@pytest.mark.parametrize("kind", ["json", "sentencepiece"])
def test_added_tokens_come_after_a_published_vocabulary(tmp_path, kind):
    spec, named = qwen_like(), {"eos_token": QWEN_SPECIALS[0]} if kind == "json" else {}
    if kind == "json":
        (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    else:
        (tmp_path / "tokenizer.model").write_bytes(gemma_like("bpe"))
    plain, more = from_file(tmp_path, **named), from_file(tmp_path, added_tokens=REWARD, **named)
    size = plain.vocab_size
    assert [more.special(text) for text in REWARD] == [size, size + 1] and more.vocab_size == size + 2
    assert [plain.special(text) for text in REWARD] == [None, None]
    assert more.decode([size, *more.encode("so")]) == "<|high_reward|>so"
    assert more.special_ids.isdisjoint(more.encode("a <|high_reward|> in the text"))  # text is not encoded to it
    assert more.encode("as before") == plain.encode("as before")
    if kind == "json":  # existing tokens keep their ids, and an ordinary piece becomes special under its own id
        same = from_file(tmp_path, added_tokens=QWEN_SPECIALS, **named)
        assert same.vocab_size == size and same.special(QWEN_SPECIALS[0]) == plain.special(QWEN_SPECIALS[0])
        word = next(text for text in spec["model"]["vocab"] if len(text) > 2 and text.isascii())
        special = from_file(tmp_path, added_tokens=(word,), **named)
        assert special.special(word) == spec["model"]["vocab"][word] and special.vocab_size == size


SOFT = "<image_soft_token>"


@pytest.mark.parametrize("kind", ["json", "json of pieces", "json of scores", "sentencepiece"])
def test_added_tokens_beyond_the_embedding_are_plain_text(tmp_path, caplog, kind):
    """Gemma 3 1B has one, for images that only its larger models see; fine-tunes add `<pad>`."""
    if kind == "sentencepiece":
        (tmp_path / "tokenizer.model").write_bytes(gemma_like("bpe"))
        rows = from_file(tmp_path).vocab_size
        tokens = {str(rows + i): {"content": text, "special": True} for i, text in enumerate((SOFT, "<pad>"))}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": tokens}))
    else:
        spec = qwen_like()
        if kind == "json of scores":
            pieces = [*spec["model"]["vocab"], *(token["content"] for token in spec["added_tokens"])]
            scores = [[piece, -float(i)] for i, piece in enumerate(pieces)]
            spec["model"] = {"type": "Unigram", "unk_id": 0, "vocab": scores, "byte_fallback": False}
        rows = JsonTokenizer(spec).vocab_size
        spec = with_token(with_token(with_token(spec, SOFT, special=True), "日本"), "<pad>", special=True)
        if kind == "json of pieces":
            spec["model"]["vocab"] |= {token["content"]: token["id"] for token in spec["added_tokens"]}
        if kind == "json of scores":
            spec["model"]["vocab"] += [[token["content"], -9.0] for token in spec["added_tokens"][-3:]]
        (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    config = TextConfig(tokenizer=str(tmp_path))
    whole, loaded = load_tokenizer(config), load_tokenizer(config, rows)
    assert loaded.vocab_size == rows < whole.vocab_size and loaded.left_out == {SOFT, "<pad>"}
    assert loaded.special(SOFT) is None and max(loaded.special_ids) < rows == whole.special(SOFT)
    assert f"beyond the {rows} rows of the embedding are plain text: {SOFT}" in caplog.text
    text = f"the {SOFT}turn<pad> 日本 x"
    assert max(loaded.encode(text)) < rows and loaded.decode(loaded.encode(text)) == text
    assert loaded.encode("the turn") == whole.encode("the turn") and loaded.eos_id == whole.eos_id
    for named, message in (
        ({"eos_token": SOFT}, f"eos_token '{SOFT}' has the id {rows}, but the embedding of the model has {rows} rows"),
        ({"pad_token": "<pad>"}, "pad_token '<pad>' has the id .*set text.tokenizer.pad_token to"),
        ({"added_tokens": REWARD}, r"added_tokens: '<\|high_reward\|>' has the id .*; name fewer"),
        ({"added_tokens": (SOFT,)}, f"added_tokens: '{SOFT}' has the id {rows}, .*; name fewer"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            load_tokenizer(TextConfig(tokenizer=TokenizerFile(path=str(tmp_path), **named)), rows)
        assert ("added_tokens" in named) == ("text.tokenizer.added_tokens" in str(caught.value))
    for other in ("toy", "bytes", *((str(tmp_path),) if kind == "sentencepiece" else ())):
        with pytest.raises(ValueError, match=f"tokenizer {other} has .* ids, but the embedding .* has 255 rows"):
            load_tokenizer(TextConfig(tokenizer=other), 255)


def test_the_toy_vocabulary_suits_small_policies():
    """Tags are tokens, and so are each digit, wherever it stands, and the texts that dialogues repeat."""
    toy = load_tokenizer(TextConfig())
    assert 320 <= toy.vocab_size <= 400
    assert all(toy.special(tag) is not None for tag in (*CHATML_TAGS, *PROTOCOL_TAGS))
    assert toy.eos_id == toy.special("<|im_end|>") != toy.pad_id
    for text in ("0123456789", "print(37*58)", "{40}", "7^13 mod 11=?", "\\boxed{2146}"):
        pieces = [toy.decode([token]) for token in toy.encode(text)]
        assert not any(any(c.isdigit() for c in piece) for piece in pieces if len(piece) > 1), pieces
    assert [piece for piece in FIXED_PIECES if len(toy.encode(piece)) != 1] == []
    by_path = load_tokenizer(TextConfig(tokenizer=str(resources.files("grpo_roc_jax.text").joinpath("toy.model"))))
    assert by_path.encode("print(6*7)") == toy.encode("print(6*7)")


@pytest.mark.slow
def test_training_the_toy_model_again_gives_the_same():
    shipped = resources.files("grpo_roc_jax.text").joinpath("toy.model").read_bytes()
    models = [sentencepiece.SentencePieceProcessor(model_proto=proto) for proto in (train(), shipped)]
    pieces = ([model.id_to_piece(i) for i in range(model.vocab_size())] for model in models)
    assert next(pieces) == next(pieces)
