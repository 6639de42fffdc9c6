"""The tokenizer of a GGUF file as the files of a model directory.

The rules of each kind of tokenizer are those of transformers, which reads the same files (`integrations/gguf`).
"""

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from grpo_roc_jax.gguf_files.header import GgufError, Header

log = logging.getLogger(__name__)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Types of tokens."""

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    _LLAMA3: "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano dbrx smaug-bpe",
    _TEKKEN: "tekken",
    _QWEN2: "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez",
    _QWEN35: "qwen35",
    _GPT4O: "gpt-4o llama4 kanana2 talkie minimax-m2",
}
PRE_TOKENIZERS = {name: split for split, names in _SPLITS.items() for name in names.split()}
"""`tokenizer.ggml.pre` -> the expression that splits a text; every other name splits as GPT-2 does."""
_AS_GPT2 = ("", "default", "gpt-2", "smollm")


def tokenizer_files(header: Header) -> dict[str, str]:
    """Name -> content of the tokenizer's files; those of the template alone for a file without a vocabulary.

    Raises:
        GgufError: a kind of tokenizer that is not supported, or a value of another type.
    """
    fields = _Fields(header)
    files = {"chat_template.jinja": fields.template} if isinstance(fields.template, str) else {}
    if not fields.tokens:
        return files
    if fields.model not in _BUILDERS:
        raise GgufError(
            f"{header.file}: the tokenizer {fields.model!r} is not supported; known are {', '.join(_BUILDERS)}"
        )
    spec = _BUILDERS[fields.model](fields)
    spec["added_tokens"] = list(_added(fields, spec))
    named = {name: fields.named(key) for name, key in _NAMED.items()}
    spec["post_processor"] = _start_token(named, fields)
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    described |= {name: text for name, text in named.items() if text is not None}
    described |= {"add_bos_token": fields.add_bos, "add_eos_token": bool(fields.get("add_eos_token"))}
    if isinstance(fields.template, list):
        described["chat_template"] = fields.template
    ids = {"bos_token_id": fields.get("bos_token_id"), "pad_token_id": fields.get("padding_token_id")}
    ends = [fields.get(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id")]
    ends = list(dict.fromkeys(end for end in ends if end is not None))
    ids |= {"eos_token_id": ends[0] if len(ends) == 1 else ends} if ends else {}
    generation = {name: value for name, value in ids.items() if value is not None}
    spec = {"version": "1.0", "truncation": None, "padding": None, "normalizer": None} | spec
    return files | {
        "tokenizer.json": json.dumps(spec, ensure_ascii=False),
        "tokenizer_config.json": json.dumps(described, ensure_ascii=False, indent=2),
        "generation_config.json": json.dumps(generation, indent=2),
    }


_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def _each(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(type(item) in kinds for item in value)


_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    r"ggml\.(model|pre)|chat_template(\..+)?": ("a text", lambda value: isinstance(value, str)),
    r"ggml\.(tokens|merges)|chat_templates": ("a list of texts", _each(str)),
    r"ggml\.token_type": ("a list of whole numbers", _each(int)),
    r"ggml\.scores": ("a list of numbers", _each(int, float)),
    r"ggml\..+_token_id": ("a whole number", lambda value: type(value) is int),
    r"ggml\.add_.+": ("true or false", lambda value: isinstance(value, int)),
}
"""Pattern of the keys below `tokenizer` that are read here -> what their value must be, and whether it is."""


def _check_types(header: Header) -> None:
    """Refuses metadata of a tokenizer that have another type.

    Raises:
        GgufError: The message names the key and its value.
    """
    for key, value in header.metadata.items():
        for pattern, (kind, fits) in _TYPES.items():
            if re.fullmatch(rf"tokenizer\.({pattern})", key) and not fits(value):
                raise GgufError(f"{header.file}: {key} = {value!r:.100}; must be {kind}")


class _Fields:
    """What the metadata say of a tokenizer."""

    def __init__(self, header: Header):
        _check_types(header)
        self._metadata = header.metadata
        self.file = header.file
        self.architecture: str = header.metadata.get("general.architecture", "")
        self.model: str = self.get("model", "")
        self.tokens: list[str] = self.get("tokens") or []
        self.types: list[int] = self.get("token_type") or [NORMAL] * len(self.tokens)
        self.scores: list[float] = self.get("scores") or [0.0] * len(self.tokens)
        self.add_bos: bool = bool(self.get("add_bos_token", self.model == "llama"))
        """Old SentencePiece files do not say; llama.cpp then begins a text with it."""
        self.template = _templates(header.metadata)
        if len({len(self.tokens), len(self.types), len(self.scores)}) > 1:
            raise GgufError(
                f"{header.file} lists {len(self.tokens)} tokens, {len(self.types)} types and {len(self.scores)} "
                "scores; must be as many of each"
            )

    def get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def named(self, key: str) -> str | None:
        """The text of the token whose id is under this key."""
        token = self.get(key)
        if token is None:
            return None
        if not 0 <= token < len(self.tokens):
            raise GgufError(f"{self.file}: tokenizer.ggml.{key} = {token}, but there are {len(self.tokens)} tokens")
        return self.tokens[token]


def _templates(metadata: Mapping[str, Any]) -> str | list[dict[str, str]] | None:
    """The chat template, or several with their names as `tokenizer_config.json` lists them."""
    first = metadata.get("tokenizer.chat_template")
    names = metadata.get("tokenizer.chat_templates") or []
    if not names:
        return first
    others = {name: metadata.get(f"tokenizer.chat_template.{name}") for name in names}
    named = ({"default": first} if first else {}) | {name: text for name, text in others.items() if text}
    return [{"name": name, "template": text} for name, text in named.items()]


# ---- kinds of tokenizer --------------------------------------------------------------------------------------------


def byte_spelling() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies: printable ones for themselves, the others by
    those from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in set(printable) else chr(next(others)) for byte in range(256)]


def _byte_level(fields: _Fields) -> dict[str, Any]:
    """BPE over bytes. Added tokens keep their text; ordinary ones in another alphabet are spelled in that of bytes."""
    spelling = byte_spelling()
    alphabet = set(spelling)
    vocabulary = {}
    for i, token in enumerate(fields.tokens):
        plain = fields.types[i] in (CONTROL, USER_DEFINED) and token.strip()
        spelled = token if plain or set(token) <= alphabet else "".join(spelling[byte] for byte in token.encode())
        vocabulary[spelled] = i
    name = fields.get("pre", "")
    split = PRE_TOKENIZERS.get(name)
    if not split and name not in _AS_GPT2:
        log.warning("%s: the pre-tokenizer %r is not known; text is split as GPT-2 does", fields.file, name)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": not split}
    pattern = {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
    model = {"type": "BPE", "vocab": vocabulary, "merges": _merges(fields, vocabulary)}
    model |= {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    pre = {"type": "Sequence", "pretokenizers": [pattern, level]} if split else level
    return {"pre_tokenizer": pre, "decoder": level | {"use_regex": True}, "model": model}


def _sentencepiece(fields: _Fields) -> dict[str, Any]:
    """BPE of SentencePiece with bytes for unknown characters; Gemma's adds no space and has other marks of spaces."""
    gemma = fields.architecture.startswith("gemma")
    prefix = not gemma and fields.get("add_space_prefix", True)
    vocabulary = {(_marks(token) if gemma else token): i for i, token in enumerate(fields.tokens)}
    scores = {token: float(-i) for token, i in vocabulary.items()} if gemma else None
    model = {"type": "BPE", "vocab": vocabulary, "merges": _merges(fields, vocabulary, scores)}
    model |= {"fuse_unk": True, "byte_fallback": True, "unk_token": fields.named("unknown_token_id")}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    spec: dict[str, Any] = {"model": model, "decoder": {"type": "Sequence", "decoders": decoders}}
    if gemma:
        split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
        marked = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        return spec | {"normalizer": marked, "pre_tokenizer": split}
    scheme = "first" if prefix else "never"
    return spec | {"pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}}


def _unigram(fields: _Fields) -> dict[str, Any]:
    """SentencePiece's unigram model: the most probable pieces of each word."""
    space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    unknown = fields.get("unknown_token_id", 2)
    vocabulary = [[token, score] for token, score in zip(fields.tokens, fields.scores, strict=True)]
    return {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, space]},
        "decoder": space,
        "model": {"type": "Unigram", "unk_id": unknown, "vocab": vocabulary, "byte_fallback": False},
    }


_BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece, "t5": _unigram}
"""`tokenizer.ggml.model` -> what makes the `tokenizer.json` of it."""


def _marks(token: str) -> str:
    """A run of spaces as SentencePiece writes it; other tokens as they are."""
    return "▁" * len(token) if " " in token and not token.strip() else token


def _merges(
    fields: _Fields, vocabulary: Mapping[str, int], scores: Mapping[str, float] | None = None
) -> list[list[str]]:
    """The merges of the file, or those that its scores imply: the best piece first, of its halves the longest."""
    listed: Sequence[str] | None = fields.get("merges")
    if listed is not None:
        return [merge.split(" ") for merge in listed]
    if scores is None:
        scores = dict(zip(fields.tokens, fields.scores, strict=True))
    implied = []
    for piece, score in scores.items():
        halves = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        halves = [pair for pair in halves if pair[0] in vocabulary and pair[1] in vocabulary]
        halves.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        implied += [((score, len(left), len(right)), [left, right]) for left, right in halves]
    implied.sort(key=lambda entry: entry[0], reverse=True)
    return [pair for _, pair in implied]


def _added(fields: _Fields, spec: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """Tokens that are matched before a text is split: control tokens, and those that users defined."""
    vocabulary = spec["model"]["vocab"]
    known = vocabulary if isinstance(vocabulary, dict) else dict.fromkeys(fields.tokens)
    for i, (token, kind) in enumerate(zip(fields.tokens, fields.types, strict=True)):
        if kind in (CONTROL, USER_DEFINED) and token in known:
            yield {
                "id": i,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind == CONTROL,
            }


def _start_token(named: Mapping[str, str | None], fields: _Fields) -> dict[str, Any] | None:
    """What adds the first token to a text, for software that encodes text with it; nothing here does."""
    start = named["bos_token"]
    if not fields.add_bos or start is None:
        return None
    token = {"SpecialToken": {"id": start, "type_id": 0}}
    single, second = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [token, single],
        "pair": [token, single, {"SpecialToken": {"id": start, "type_id": 1}}, second],
        "special_tokens": {start: {"id": start, "ids": [fields.get("bos_token_id")], "tokens": [start]}},
    }
