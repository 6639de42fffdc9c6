"""Small vocabularies of each kind for GGUF files, trained on the documentation, and texts to encode."""

import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import tokenizers

from tests.helpers.gguf_models import Vocabulary

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
DOCS = Path(__file__).resolve().parents[2] / "docs"
MORE = (
    "日本語 テキスト 한국어 é à ñ ½ 123 4567 don't I'll WE'VE aaaa bbbb   \n\n\t\t  if x:\n        return 12345.678\n"
    * 20
)
CHAT = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@cache
def corpus() -> str:
    """Pages, without the tags in them: transformers reads these as special tokens, which this library never does."""
    pages = "\n".join((DOCS / name).read_text(encoding="utf-8") for name in ("models.md", "data.md", "method.md"))
    return pages.replace("<|", "<") + MORE


def texts() -> list[str]:
    """Prose, code, digits, runs of spaces, other scripts, and random mixtures of all of them."""
    fixed = ["", " ", "   ", "\n\n", " a", "a ", "  42   7", "12345.678 + 9,999", "\r\n\r\n x \r", "ß \u0130 ﬁ ½ ²"]
    fixed += ["x = 3\n    y = 12\n\n\n\tif a:\n\t\treturn 0x1F", "don't I'll WE'VE you'RE", "日本語 テキスト한국어"]
    fixed += ["emoji 👩‍👩‍👧 é e\u0301 ñ", "a\u00a0b\u2003c\u200b"]
    rng = np.random.default_rng(0)
    parts = [*" \n\t09abAZ.,'()_é語👍\u0301", "  ", "\n\n", "the ", " 12", "'ll", "def f(x):\n    ", "    "]
    mixed = ["".join(rng.choice(parts, rng.integers(1, 40))) for _ in range(200)]
    return [*fixed, *mixed, *corpus().split("\n\n")[:60]]


@cache
def byte_level(
    pre: str = "gpt-2", added: tuple[str, ...] = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
) -> Vocabulary:
    """BPE over bytes, with three control tokens, a token that a user defined, and one of another alphabet."""
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(corpus().splitlines(keepends=True), trainer)
    model = json.loads(trained.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].get)
    merges = [" ".join(pair) for pair in model["merges"]]
    tokens = [*added, *pieces, "<|thought|>", "<｜pause｜>", "[PAD9]"]
    types = [CONTROL] * len(added) + [NORMAL] * len(pieces) + [USER_DEFINED, CONTROL, UNUSED]
    more = {"ggml.pre": pre, "ggml.bos_token_id": 0, "ggml.eos_token_id": 1, "ggml.padding_token_id": 2}
    return Vocabulary("gpt2", tokens, types, merges=merges, more=more | {"chat_template": CHAT})


@cache
def sentencepiece_model() -> bytes:
    """A BPE model of SentencePiece that changes no text."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus().splitlines()),
        model_writer=out,
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
        character_coverage=0.99,
    )
    return out.getvalue()


@cache
def bpe_of_scores(gemma: bool = False, **more: Any) -> Vocabulary:
    """The SentencePiece model as llama.cpp stores it; Gemma's has runs of spaces and line breaks as added tokens."""
    model = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model())
    ids = range(model.vocab_size())
    tokens, scores = [model.id_to_piece(i) for i in ids], [model.get_score(i) for i in ids]
    types = [
        UNKNOWN if model.is_unknown(i) else CONTROL if model.is_control(i) else BYTE if model.is_byte(i) else NORMAL
        for i in ids
    ]
    if gemma:  # added tokens in front, as in Gemma's files, whose scores do not follow the merges
        kinds = dict(zip(tokens, types, strict=True))
        rest = [token for token in tokens if kinds[token] in (NORMAL, BYTE) and set(token) != {"▁"}]
        rest.sort(key=lambda token: -scores[tokens.index(token)])
        head = ["<pad>", "<eos>", "<bos>", "\n\n", "\n\n\n", "  ", "    ", "<unk>"]
        types = [CONTROL] * 3 + [USER_DEFINED] * 4 + [UNKNOWN] + [kinds[token] for token in rest] + [NORMAL]
        more = {"ggml.bos_token_id": 2, "ggml.eos_token_id": 1, "ggml.unknown_token_id": 7, "ggml.padding_token_id": 0}
        more |= {"ggml.add_bos_token": True, "ggml.add_space_prefix": False}
        return Vocabulary("llama", [*head, *rest, "▁"], types, [-1000.0] * len(types), more=more)
    more = {"ggml.unknown_token_id": 0, "ggml.bos_token_id": 1, "ggml.eos_token_id": 2, "chat_template": CHAT} | more
    return Vocabulary("llama", tokens, types, scores, more=more)
