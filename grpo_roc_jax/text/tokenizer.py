"""Converts between ids and text: SentencePiece models, `tokenizer.json` files and bytes, under one small protocol.

`encode` takes plain text and never returns a special id, whatever the text says. Only `text.chat_format` writes special
ids, one by one, through `special`. Sampled ids are never re-encoded; `decode` serves parsing and display.
"""

import json
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

import sentencepiece
import tokenizers

from grpo_roc_jax.checks import expect
from grpo_roc_jax.gguf_files.folder import is_gguf, open_gguf
from grpo_roc_jax.settings.files import read_json_object, read_text
from grpo_roc_jax.text.config import CHATML_TAGS, PROTOCOL_TAGS, REWARD_TOKENS, TextConfig, TokenizerSource

log = logging.getLogger(__name__)

PAD_PIECE = "<|pad|>"
OWN_SPECIALS = (PAD_PIECE, CHATML_TAGS[1], CHATML_TAGS[0], *PROTOCOL_TAGS, *REWARD_TOKENS)
"""Special tokens of the built-in tokenizers: padding, end of turn (which is also the end of text), the others."""

KNOWN_EOS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<eos>", "[SEP]")
KNOWN_PAD = ("<|endoftext|>", "<|finetune_right_pad_id|>", "<pad>", "<|pad|>", "[PAD]", "<unk>")

KNOWN_MARKS = (*CHATML_TAGS, *PROTOCOL_TAGS, "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]")
"""Role and call tokens that a SentencePiece model may define as user-defined symbols."""

PLAIN_SPECIAL = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
"""How an added special token is matched, as `tokenizer.json` writes it: exactly, at any position."""

MORE_TEMPLATES = "additional_chat_templates"
"""Folder of a model directory with the templates that have a name, such as `tool_use.jinja`, as transformers 5 writes
them."""
MOST_TEMPLATE_BYTES = 4 << 20
"""Largest template in bytes; published ones have some thousands."""

_HTML = (
    "a b blockquote body br caption code div em footer h1 h2 h3 h4 h5 h6 hr html i iframe img li ol p pre span strong "
    "sub sup table tbody td tfoot th thead tr u ul"
)
_WORDS = re.compile(rf"[\w \u2581]+|</?(?:{'|'.join(_HTML.split())})>")
"""Texts of added tokens that are ordinary unless a dialogue uses them: words, and elements of HTML, which Gemma has."""

WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
"""White space in Unicode, which is what added tokens take in; `str.strip` would take four control characters too."""

UNKNOWN = "\ufffd".encode()
"""Text of an id beyond the vocabulary, which can be sampled when the embedding is padded."""


@dataclass(frozen=True)
class Strips:
    """Special ids that take in white space, as `lstrip` and `rstrip` of an added token say: the text beside them loses
    it. Phi-3's role tokens do so with the line break after them."""

    before: frozenset[int] = frozenset()
    """Ids that take in the white space before them."""
    after: frozenset[int] = frozenset()
    """Ids that take in the white space after them."""

    @classmethod
    def of(cls, tokens: Mapping[int, Mapping[str, Any]]) -> "Strips":
        """Of added tokens by their ids, as `tokenizer.json` and `tokenizer_config.json` describe them."""
        return cls(
            frozenset(i for i, token in tokens.items() if token.get("lstrip")),
            frozenset(i for i, token in tokens.items() if token.get("rstrip")),
        )

    def apply(self, text: str, before: int | None, after: int | None) -> str:
        """What is left of a text between two ids."""
        text = text.lstrip(WHITE_SPACE) if before in self.after else text
        return text.rstrip(WHITE_SPACE) if after in self.before else text


class Tokenizer(Protocol):
    """What the stages need of a tokenizer."""

    vocab_size: int
    """One more than the largest id."""
    eos_id: int
    """Id that ends a turn when no other token does."""
    pad_id: int
    """Id that fills rows; may equal `eos_id`, since masks come from lengths."""
    special_ids: frozenset[int]
    """Ids that plain text never produces."""
    strips: Strips
    """Special ids that take in the white space beside them."""
    left_out: frozenset[str]
    """Marks that the files have as tokens and the model has no embedding for; they are plain text."""

    def encode(self, text: str) -> list[int]:
        """Ids of plain text: none of `special_ids`, and no start or end token is added."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, special ids included; ids beyond the vocabulary do not raise."""
        ...

    def special(self, text: str) -> int | None:
        """The special id with this text; None if it is ordinary text."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes that an id adds to a text, possibly part of a character. They include a space that `decode` drops
        at the start of a text."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0-255, then the special tokens; lone surrogates are encoded as `?`."""

    strips = Strips()
    left_out: frozenset[str] = frozenset()

    def __init__(self, specials: Sequence[str] = OWN_SPECIALS):
        self._specials = {text: 256 + i for i, text in enumerate(specials)}
        self._texts = {token: text.encode() for text, token in self._specials.items()}
        self.vocab_size = 256 + len(self._specials)
        self.pad_id = self._specials[PAD_PIECE]
        self.eos_id = self._specials[CHATML_TAGS[1]]
        self.special_ids = frozenset(self._texts)

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, ids: Iterable[int]) -> str:
        parts = (bytes((i,)) if i < 256 else self._texts.get(i, UNKNOWN) for i in map(int, ids))
        return b"".join(parts).decode(errors="replace")

    def special(self, text: str) -> int | None:
        return self._specials.get(text)

    def token_bytes(self, token: int) -> bytes:
        return bytes((token,)) if token < 256 else self._texts.get(token, UNKNOWN)


class SentencePieceTokenizer:
    """A SentencePiece `.model`. Its control symbols are special, and so are the tokens that a model directory adds.

    Role tokens are often user-defined symbols, which the library matches inside any text. They are special too: the
    copy of the model that encodes has them as unused pieces, so plain text is encoded to their characters.
    """

    def __init__(
        self,
        proto: bytes,
        *,
        added: Mapping[str, int] | None = None,
        strips: Strips = Strips(),
        left_out: Iterable[str] = (),
        eos_token: str = "",
        pad_token: str = "",
        origin: str = "tokenizer",
    ):
        self.strips, self.left_out = strips, frozenset(left_out)
        self._model = model = sentencepiece.SentencePieceProcessor(model_proto=proto)
        self._pieces = model.vocab_size()
        pieces = {model.id_to_piece(i): i for i in range(self._pieces)}
        added = {text: i for text, i in (added or {}).items() if i != model.unk_id()}
        wrong = sorted(
            text for text, i in added.items() if pieces.get(text, i) != i or (text not in pieces and i < self._pieces)
        )
        if wrong:
            raise ValueError(
                f"{origin}: the added tokens {wrong} have other ids in the SentencePiece model; use files of one model"
            )
        self._specials = {text: i for text, i in pieces.items() if model.is_control(i)}
        marks = {text: pieces[text] for text in (*KNOWN_MARKS, *added) if text in pieces.keys() - self._specials}
        self._specials |= marks | added
        self._encoder = model
        if marks:
            self._encoder = sentencepiece.SentencePieceProcessor(model_proto=without_pieces(proto, set(marks)))
        self._texts = {token: text for text, token in self._specials.items()}
        self.special_ids = frozenset(self._texts)
        self.vocab_size = max(self._pieces, 1 + max(added.values(), default=0))
        self.eos_id = self._named(eos_token, "text.tokenizer.eos_token", origin) if eos_token else model.eos_id()
        if self.eos_id < 0:
            raise ValueError(
                f"{origin}: this SentencePiece model has no end-of-sentence id; train it with eos_id set, or name an "
                "end token in text.tokenizer.eos_token"
            )
        self.pad_id = model.pad_id() if model.pad_id() >= 0 else self.eos_id
        if pad_token:
            self.pad_id = self._named(pad_token, "text.tokenizer.pad_token", origin)

    def _named(self, text: str, field: str, origin: str) -> int:
        token = self._specials.get(text, self._model.piece_to_id(text))
        if token == self._model.unk_id() and text != self._model.id_to_piece(token):
            raise ValueError(f"{origin}: {text!r} is not a token of this vocabulary; set {field} to one that is")
        return token

    def encode(self, text: str) -> list[int]:
        return self._encoder.encode(text.encode("utf-8", errors="replace").decode())

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; runs of ordinary pieces are decoded together, so that byte pieces join to characters."""
        parts, run = [], []
        for i in map(int, ids):
            if i in self._texts or i >= self._pieces:
                parts.append(self._model.decode(run))
                parts.append(self._texts.get(i, "\ufffd"))
                run = []
            else:
                run.append(i)
        parts.append(self._model.decode(run))
        return "".join(parts)

    def special(self, text: str) -> int | None:
        return self._specials.get(text)

    def token_bytes(self, token: int) -> bytes:
        if token in self._texts or token >= self._pieces:
            return self._texts.get(token, "\ufffd").encode()
        piece = self._model.id_to_piece(token)
        if self._model.is_byte(token):
            return bytes((int(piece[3:5], 16),))
        return self._model.decode([token]).encode() if self._model.is_unknown(token) else _spaced(piece)


def _spaced(piece: str) -> bytes:
    """The bytes of a piece in which `\u2581` stands for a space."""
    return piece.replace("\u2581", " ").encode()


def without_pieces(proto: bytes, texts: set[str]) -> bytes:
    """A SentencePiece model with these pieces marked unused: ids stay, and no text is encoded to them."""
    # Imported here: it needs a protobuf runtime as new as its generator, and few models hold such tokens.
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto.FromString(proto)
    for piece in model.pieces:
        if piece.piece in texts:
            piece.type = sentencepiece_model_pb2.ModelProto.SentencePiece.UNUSED
    return model.SerializeToString()


class JsonTokenizer:
    """A Hugging Face `tokenizer.json`; those of its added tokens are special that `may_be_mark`.

    The library matches added tokens inside the text it encodes. A second copy without the special ones does the
    encoding here, so a tool that prints `<|im_end|>` yields the characters.

    Args:
        spec: Content of the file.
        eos_token: Text of the end token; empty to look it up.
        pad_token: The same of the padding token.
        dialogue: Texts of which the dialogue is made, such as chat templates; added tokens in them are special.
        left_out: Texts of added tokens that the model has no embedding for; they are plain text.
        origin: Where the file is, for messages.
    """

    def __init__(
        self,
        spec: dict[str, Any],
        *,
        eos_token: str = "",
        pad_token: str = "",
        dialogue: str = "",
        left_out: Collection[str] = (),
        origin: str = "tokenizer",
    ):
        self._byte_level = '"ByteLevel"' in json.dumps(spec.get("decoder"))
        tokens = spec.get("added_tokens") or ()
        dialogue = "\n".join((dialogue, eos_token, pad_token))
        special = {token["content"] for token in tokens if may_be_mark(token, dialogue)}
        self.left_out = frozenset(special.intersection(left_out))
        special -= self.left_out
        tokens = [token for token in tokens if token["content"] not in left_out]
        spec = _without_tokens(spec, left_out) if left_out else spec
        added = {token["content"]: token["id"] for token in tokens if token["content"] in special}
        self.strips = Strips.of({token["id"]: token for token in tokens if token["content"] in special})
        ordinary = [token for token in tokens if token["content"] not in special and self._restores(token["content"])]
        self._specials = added
        after = _after_specials(spec.get("pre_tokenizer"))
        decoder = spec.get("decoder") if after == spec.get("pre_tokenizer") else _without_strip(spec.get("decoder"))
        self._full = tokenizers.Tokenizer.from_str(json.dumps(spec | {"decoder": decoder}))
        plain = spec | {"added_tokens": ordinary, "pre_tokenizer": after}
        self._plain = tokenizers.Tokenizer.from_str(json.dumps(plain))
        # Ids of added tokens follow their position in the list, so the remaining ones get other ids in the copy.
        self._renumbered = {self._plain.token_to_id(token["content"]): token["id"] for token in ordinary}
        self._ordinary = frozenset(self._renumbered.values())
        for tokenizer in (self._full, self._plain):
            tokenizer.no_truncation()
            tokenizer.no_padding()
        self._inside = re.compile("|".join(f"(?<={re.escape(t[0])})(?={re.escape(t[1:])})" for t in added if t[1:]))
        self.vocab_size = 1 + max(self._full.get_vocab(with_added_tokens=True).values())
        self.eos_id = self._token_id(eos_token, KNOWN_EOS, "text.tokenizer.eos_token", origin)
        self.pad_id = (
            self._token_id(pad_token, (), "text.tokenizer.pad_token", origin)
            if pad_token
            else next((added[text] for text in KNOWN_PAD if text in added), self.eos_id)
        )
        self.special_ids = frozenset(added.values())
        if not self._byte_level:  # else every character is known; an unknown one is plain text
            unknown = {spec["model"].get("unk_id"), self._full.token_to_id(spec["model"].get("unk_token") or "")}
            self.special_ids -= unknown - {self.eos_id}

    def _restores(self, text: str) -> bool:
        """Whether an added token of this text decodes to it. In byte-level vocabularies a character such as \u00f5
        stands for a byte."""
        return not self._byte_level or text.isascii() or any(character not in BYTE_OF for character in text)

    def _token_id(self, text: str, known: Sequence[str], field: str, origin: str) -> int:
        candidates = (text,) if text else known
        for candidate in candidates:
            if (token := self._full.token_to_id(candidate)) is not None:
                return token
        raise ValueError(
            f"{origin}: none of {', '.join(map(repr, candidates))} is a token of this vocabulary; "
            f"set {field} to the text of a token that is"
        )

    def encode(self, text: str) -> list[int]:
        text = text.encode("utf-8", errors="replace").decode()
        ids = self._plain_ids(text)
        if not self.special_ids.isdisjoint(ids):
            # A vocabulary may also hold the special text as an ordinary piece: split the text inside each occurrence.
            ids = [i for part in self._inside.split(text) for i in self._plain_ids(part)]
        if not self.special_ids.isdisjoint(ids):
            special = sorted(self.special_ids.intersection(ids))
            raise ValueError(
                f"plain text was encoded to the special ids {special}; use a tokenizer that separates them"
            )
        return ids

    def _plain_ids(self, text: str) -> list[int]:
        ids = self._plain.encode(text, add_special_tokens=False).ids
        return [self._renumbered.get(i, i) for i in ids] if self._renumbered else ids

    def decode(self, ids: Iterable[int]) -> str:
        return self._full.decode([int(i) for i in ids], skip_special_tokens=False)

    def special(self, text: str) -> int | None:
        return self._specials.get(text)

    def token_bytes(self, token: int) -> bytes:
        piece = self._full.id_to_token(token)
        if piece is None:
            return b""
        if token in self.special_ids or (token in self._ordinary and self._byte_level):
            return piece.encode()
        if token in self._ordinary:
            return _spaced(piece)
        if self._byte_level and all(character in BYTE_OF for character in piece):
            return bytes(BYTE_OF[character] for character in piece)
        if BYTE_PIECE.fullmatch(piece):
            return bytes((int(piece[3:5], 16),))
        return _spaced(piece) if "\u2581" in piece else self.decode([token]).encode()


def may_be_mark(token: Mapping[str, Any], dialogue: str) -> bool:
    """Whether an added token of a `tokenizer.json` may be a mark of a dialogue, so that no plain text is encoded to it.

    It may if the file calls it special, and unless it is white space, a single character, or a word or an element of
    HTML that the dialogue does not use. Many files do not call marks such as `<tool_call>` special.
    """
    text = token["content"]
    if not text.replace("\u2581", "").strip():
        return False
    if token.get("special", True):
        return True
    return len(text) > 1 and (_WORDS.fullmatch(text) is None or text in dialogue)


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte in byte-level vocabularies: printable bytes stand for themselves, others follow from 256 on."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("\xa1"), ord("\xac") + 1), *range(ord("\xae"), ord("\xff") + 1)]
    others = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()
BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def _after_specials(pre_tokenizer: dict[str, Any] | None) -> dict[str, Any] | None:
    """A pre-tokenizer that adds no space at the start of a text, if it would only add one at the start of a dialogue.
    Plain text here comes after special tokens."""
    if not pre_tokenizer:
        return pre_tokenizer
    changed = dict(pre_tokenizer)
    if changed.get("prepend_scheme") == "first":
        changed["prepend_scheme"] = "never"
    if "pretokenizers" in changed:
        changed["pretokenizers"] = [_after_specials(part) for part in changed["pretokenizers"]]
    return changed


def _without_strip(decoder: dict[str, Any] | None) -> dict[str, Any] | None:
    """A decoder that keeps the first space of a text, for vocabularies whose encoding adds none."""
    if not decoder:
        return decoder
    changed = dict(decoder)
    if "prepend_scheme" in changed:
        changed["prepend_scheme"] = "never"
    if "decoders" in changed:
        changed["decoders"] = [_without_strip(part) for part in changed["decoders"] if part["type"] != "Strip"]
    return changed


def _without_tokens(spec: dict[str, Any], texts: Collection[str]) -> dict[str, Any]:
    """A `tokenizer.json` without these added tokens."""
    tokens = [token for token in spec["added_tokens"] if token["content"] not in texts]
    vocabulary = spec["model"]["vocab"]
    model = spec["model"]
    if isinstance(vocabulary, dict):
        model = model | {"vocab": {piece: i for piece, i in vocabulary.items() if piece not in texts}}
    else:
        model = model | {"vocab": [entry for entry in vocabulary if entry[0] not in texts]}
    if merges := model.get("merges"):
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
        made = [merge for merge, pair in zip(merges, pairs, strict=True) if "".join(pair) not in texts]
        model = model | {"merges": made}
    return spec | {"added_tokens": tokens, "model": model}


def load_tokenizer(config: TextConfig, rows: int = 0) -> Tokenizer:
    """The tokenizer that `text.tokenizer` names.

    Args:
        config: Names it.
        rows: Rows of the embedding of a published model. Added tokens with ids beyond them are left out, with a note.
            0 for a model that is made for the tokenizer.

    Raises:
        ValueError: The path is not a tokenizer, the tokenizer names no end token, or the embedding lacks the row of a
            token that is needed.
    """
    expect(config, TextConfig, "config", "a TextConfig, such as config.text")
    source = config.tokenizer
    if source.kind == "bytes":
        tokenizer: Tokenizer = ByteTokenizer()
    elif source.kind == "toy":
        tokenizer = SentencePieceTokenizer(resources.files("grpo_roc_jax.text").joinpath("toy.model").read_bytes())
    else:
        tokenizer = _load_file(source, config, rows)
    if rows and tokenizer.vocab_size > rows:
        raise ValueError(
            f"text.tokenizer {source.path or source.kind} has {tokenizer.vocab_size} ids, but the embedding of the "
            f"model has {rows} rows; take the tokenizer that was published with the model"
        )
    return tokenizer


def _load_file(source: TokenizerSource, config: TextConfig, rows: int) -> Tokenizer:
    """The tokenizer of a file or folder; see `load_tokenizer`."""
    if not source.path:
        raise ValueError("text.tokenizer = model stands for the tokenizer at model.path, which is not resolved here")
    path = tokenizer_path(source)
    if path.is_dir():
        files = [path / name for name in ("tokenizer.json", "tokenizer.model") if (path / name).is_file()]
        if not files:
            raise ValueError(
                f"text.tokenizer: {path} holds neither tokenizer.json nor tokenizer.model; name a folder with one"
            )
        path = files[0]
    if not path.is_file():
        raise ValueError(
            f"text.tokenizer = {source.path!r} is not a file or folder; must be 'toy', 'bytes', a SentencePiece "
            ".model, a tokenizer.json, a folder with one of them, or a GGUF file"
        )
    published = path.suffix == ".json" or path.name == "tokenizer.model"  # with the other files of a model directory
    named = named_tokens(path.parent) if published else {}
    names = {name: getattr(source, name) or named.get(name, "") for name in ("eos_token", "pad_token")}
    if path.suffix not in (".model", ".json"):
        raise ValueError(f"text.tokenizer = {source.path!r}: {path.suffix!r} is neither .model nor .json")
    with damaged(path):
        if path.suffix == ".model":
            proto = path.read_bytes()
            tokens = _added_tokens(path.parent) if published else {}
            added = _added_ids(path.parent, tokens) if published else {}
            added |= _numbered(source.added_tokens, _pieces(proto) | added)
            beyond = _beyond(added, rows, source, names, path)
            added = {text: i for text, i in added.items() if text not in beyond}
            strips = Strips.of({i: token for i, token in tokens.items() if token["content"] in added})
            more = {"added": added, "strips": strips, "left_out": beyond, **names}
            return SentencePieceTokenizer(proto, **more, origin=str(path))
        spec = with_added_tokens(read_json(path), source.added_tokens)
        texts = [*source.added_tokens, *named.values(), *_ends_of(source, spec), *_template_texts(path.parent, config)]
        added = {token["content"]: token["id"] for token in spec.get("added_tokens") or ()}
        beyond = _beyond(added, rows, source, names, path)
        return JsonTokenizer(spec, **names, dialogue="\n".join(texts), left_out=beyond, origin=str(path))


def _beyond(
    ids: Mapping[str, int], rows: int, source: TokenizerSource, names: Mapping[str, str], origin: Path
) -> list[str]:
    """Texts of the added tokens that a published embedding has no row for.

    Raises:
        ValueError: One of them is the end or the padding token, or comes from the settings.
    """
    beyond = [text for text, i in ids.items() if rows and i >= rows]
    for text in beyond:
        problem = f"{text!r} has the id {ids[text]}, but the embedding of the model has {rows} rows"
        if text in source.added_tokens:
            raise ValueError(f"text.tokenizer.added_tokens: {problem}; name fewer of them")
        for name in (name for name, other in names.items() if other == text):
            raise ValueError(f"{origin}: {name} {problem}; set text.tokenizer.{name} to the text of another token")
    if beyond:
        _note(f"{origin}: tokens beyond the {rows} rows of the embedding are plain text: {', '.join(beyond):.300}")
    return beyond


@cache
def _note(text: str) -> None:
    """Logs a text once; a tokenizer is loaded several times in a run."""
    log.warning(text)


def _ends_of(source: TokenizerSource, spec: Mapping[str, Any]) -> list[str]:
    """Texts of the added tokens that end a text."""
    ends = published_ends(source)
    return [token["content"] for token in spec.get("added_tokens") or () if token["id"] in ends]


def _template_texts(folder: Path, config: TextConfig) -> list[str]:
    """All chat templates of a tokenizer's folder, and the one that the settings name."""
    named = getattr(config.template, "file", "")
    files = [folder / "chat_template.jinja", *sorted((folder / MORE_TEMPLATES).glob("*.jinja"))]
    files += [Path(named).expanduser()] if named else []
    values = [read_json(folder / name).get("chat_template") for name in ("chat_template.json", "tokenizer_config.json")]
    texts = [read_text(file, MOST_TEMPLATE_BYTES) for file in files if file.is_file()]
    return [*texts, *(json.dumps(value, ensure_ascii=False) for value in values)]


@contextmanager
def damaged(path: Path) -> Iterator[None]:
    """Turns errors that a library raises for an unreadable tokenizer within the block into a ValueError that names the
    path."""
    try:
        yield
    except (ValueError, OSError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # raised by a library in Rust
            raise
        problem = f"{type(error).__name__}: {error!s:.300}"
        raise ValueError(f"{path} is not a readable tokenizer: {problem}") from error


def tokenizer_path(source: TokenizerSource) -> Path:
    """The file or folder of a tokenizer; for a GGUF file the folder of its model.

    Raises:
        ValueError: The GGUF file cannot be used.
    """
    return open_gguf(source.path) if is_gguf(source.path) else Path(source.path).expanduser()


def published_folder(source: TokenizerSource) -> Path:
    """The folder of a tokenizer that was published with a model."""
    path = tokenizer_path(source)
    return path if path.is_dir() else path.parent


def published_ends(source: TokenizerSource) -> frozenset[int]:
    """Ids that end a text according to the `generation_config.json` next to the tokenizer, or without that file to the
    `config.json`, as transformers reads them; there may be several."""
    if not source.path:
        return frozenset()
    folder = published_folder(source)
    file = folder / "generation_config.json"
    config = read_json(file if file.is_file() else folder / "config.json")
    text = config.get("text_config")  # of a model that reads more than text
    end_ids = next(
        (ids for part in (config, text) if isinstance(part, Mapping) and (ids := part.get("eos_token_id")) is not None),
        (),
    )
    return frozenset(end_ids if isinstance(end_ids, list | tuple) else (end_ids,))


def with_added_tokens(spec: dict[str, Any], texts: Sequence[str]) -> dict[str, Any]:
    """A `tokenizer.json` with special tokens of these texts: ordinary pieces become special, new tokens get the ids
    after the largest one."""
    added = {token["content"] for token in spec.get("added_tokens") or ()}
    missing = [text for text in texts if text not in added]
    if not missing:
        return spec
    ids = _numbered(missing, tokenizers.Tokenizer.from_str(json.dumps(spec)).get_vocab(with_added_tokens=True))
    entries = [{"id": ids[text], "content": text} | PLAIN_SPECIAL for text in missing]
    return spec | {"added_tokens": [*(spec.get("added_tokens") or ()), *entries]}


def _numbered(texts: Sequence[str], vocabulary: Mapping[str, int]) -> dict[str, int]:
    """Text -> its id in the vocabulary, or the next free id after it."""
    first = 1 + max(vocabulary.values(), default=-1)
    new = [text for text in texts if text not in vocabulary]
    return {text: vocabulary[text] if text in vocabulary else first + new.index(text) for text in texts}


def _pieces(proto: bytes) -> dict[str, int]:
    model = sentencepiece.SentencePieceProcessor(model_proto=proto)
    return {model.id_to_piece(i): i for i in range(model.vocab_size())}


def _added_tokens(folder: Path) -> dict[int, dict[str, Any]]:
    """Id -> description of the special tokens that a directory adds to its SentencePiece model."""
    decoder = read_json(folder / "tokenizer_config.json").get("added_tokens_decoder") or {}
    return {int(i): entry for i, entry in decoder.items() if entry.get("special") and entry["content"].strip()}


def _added_ids(folder: Path, tokens: Mapping[int, Mapping[str, Any]]) -> dict[str, int]:
    """Text -> id of these tokens and of those in an `added_tokens.json`."""
    return read_json(folder / "added_tokens.json") | {entry["content"]: i for i, entry in tokens.items()}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty without the file. Raises ValueError if it holds something else."""
    return read_json_object(path) if path.is_file() else {}


def named_tokens(folder: Path) -> dict[str, str]:
    """`bos_token`, `eos_token` and the like of a model directory -> text.

    As in transformers, `tokenizer_config.json` says them, and before its `added_tokens_decoder` came up,
    `special_tokens_map.json` did. A value is a text, or an object with `content`.
    """
    config = read_json(folder / "tokenizer_config.json")
    older = {} if "added_tokens_decoder" in config else read_json(folder / "special_tokens_map.json")
    named = {}
    for key, value in (config | older).items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if key.endswith("_token") and isinstance(text, str):
            named[key] = text
    return named
