"""Trains the SentencePiece model that ships as `toy.model`: `python -m examples.train_toy_tokenizer [OUT]`.

The corpus is generated: demonstrations of every world at every level. Choices and their reasons:
- Protocol tags are control symbols, so plain text cannot produce them.
- Each digit is a token, so that a small model can copy numbers.
- Pieces may span spaces and punctuation, so that the text that every call repeats is one token.
- The frame of a call, the role headers and the executor's most frequent messages are fixed pieces: byte-pair merges
  would use up the vocabulary on their prefixes, and no learned piece holds a newline.
- Rare characters are encoded as bytes, so that every text can be encoded and decoded exactly.
Byte-pair training counts integers over a fixed corpus, so one release of SentencePiece always gives the same bytes.
"""

import io
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import sentencepiece

import grpo_roc_jax.text
from grpo_roc_jax.text.config import CHATML_TAGS
from grpo_roc_jax.text.tokenizer import OWN_SPECIALS, PAD_PIECE

VOCAB_SIZE = 400
"""Includes 256 bytes. Small, since the unembedding is a large part of a toy policy's computation."""
TRACES = 300
"""Demonstrations per world and level in the corpus."""
LEVELS = (1, 2, 3)
FIXED_PIECES = (
    '{"name": "python_code_with_standard_io", "arguments": {"code": "',
    '"}}',
    "user\n",
    "assistant\n",
    "\n",
    "\\boxed{",
    "run code",
    "fix it",
    "by heart",
    "done",
    "print(",
    "prnt(",
    "import math\\nprint(math.",
    "import math\\nprnt(math.",
    " for n in range(",
    " for d in range(",
    "[exception] NameError: name '",
    "' is not defined (line ",
    "[exception] TypeError: ",
    "[syntax_error] SyntaxError: invalid syntax (line ",
    "[syntax_error] SyntaxError: '(' was never closed (line ",
    "[malformed_call] MalformedCall: invalid JSON: Expecting ',' delimiter at character ",
)


def corpus() -> Iterator[str]:
    """The texts of toy dialogues, one sentence each, without tags."""
    from grpo_roc_jax.data.config import DemonstrationConfig
    from grpo_roc_jax.worlds.demonstrations import demonstrate
    from grpo_roc_jax.worlds.worlds import FAMILIES, world_problem

    shares = DemonstrationConfig()
    for family in FAMILIES:
        for level in LEVELS:
            for index in range(TRACES // level):
                trace = demonstrate(world_problem(family, level, 0, index), shares, 0)
                yield trace.problem.prompt
                for text in (*trace.turns, *(text for texts in trace.observations for text in texts)):
                    for fixed in (*OWN_SPECIALS, *FIXED_PIECES):
                        text = text.replace(fixed, "\n")
                    yield from filter(None, text.split("\n"))


def train(texts: Iterable[str] | None = None, vocab_size: int = VOCAB_SIZE, *, phrases: bool = True) -> bytes:
    """The serialized model of some texts, or of the corpus; without `phrases` no learned piece holds a space."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=corpus() if texts is None else iter(texts),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        character_coverage=0.98,
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        split_by_whitespace=not phrases,
        split_by_unicode_script=False,
        split_by_number=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        max_sentencepiece_length=48,
        pad_id=0,
        unk_id=1,
        eos_id=2,
        bos_id=-1,
        pad_piece=PAD_PIECE,
        eos_piece=CHATML_TAGS[1],
        control_symbols=[tag for tag in OWN_SPECIALS if tag not in (PAD_PIECE, CHATML_TAGS[1])],
        user_defined_symbols=[piece.replace(" ", "▁") for piece in FIXED_PIECES],
        num_threads=1,
        input_sentence_size=0,
        minloglevel=2,
    )
    return model.getvalue()


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(grpo_roc_jax.text.__file__).with_name("toy.model")
    proto = train()
    out.write_bytes(proto)
    pieces = sentencepiece.SentencePieceProcessor(model_proto=proto)
    learned = [i for i in range(pieces.vocab_size()) if not (pieces.is_byte(i) or pieces.is_control(i))]
    print(f"{out}: {pieces.vocab_size()} pieces, of which {len(learned)} are neither bytes nor tags:")
    print(" ".join(repr(pieces.id_to_piece(i).replace("▁", " ")) for i in learned))


if __name__ == "__main__":
    main()
