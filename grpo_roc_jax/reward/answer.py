r"""Finds the final answer in the policy's own text.

The input is text decoded from policy tokens only, so a tool that prints an answer block changes nothing.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_ANSWER_PHRASE = re.compile(r"answer(?:\s+is|\s*:)\s*", re.IGNORECASE)


@dataclass(frozen=True)
class FoundAnswer:
    """The final answer, and the counts of the tags around it."""

    answer: str | None
    answers: int
    """Number of complete answer blocks over all turns."""
    well_formed: bool
    """Whether opening tags, closing tags and complete blocks are equal in number."""


def find_answer(turn_texts: Sequence[str], *, tag: str = "answer", lenient: bool = False) -> FoundAnswer:
    r"""The last `\boxed{}` of the last complete answer block in the last turn, with the tag counts of all turns.

    The last answer counts; the number of answers only affects rewards for format.

    Args:
        turn_texts: Text that the policy wrote, one per turn, without observations.
        tag: Name of the tag around the answer.
        lenient: Also accepts, in this order, a block without a box, a box without a block, the text after "answer is".
    """
    opens = closes = pairs = 0
    blocks: list[str] = []
    for text in turn_texts:
        blocks, o, c = _blocks(text, tag)
        opens, closes, pairs = opens + o, closes + c, pairs + len(blocks)
    found = None
    if turn_texts:
        found = last_boxed(blocks[-1]) if blocks else None
        if lenient and found is None:
            found = _lenient_answer(turn_texts[-1], blocks)
    found = found.strip() if found else None
    return FoundAnswer(found or None, pairs, opens == closes == pairs)


def _blocks(text: str, tag: str) -> tuple[list[str], int, int]:
    """(complete blocks, opening tags, closing tags); a block is an opening tag directly followed by a closing one."""
    blocks: list[str] = []
    opens = closes = 0
    start = -1
    for match in re.finditer(rf"<(/?){tag}>", text):
        if match.group(1):
            closes += 1
            if start >= 0:
                blocks.append(text[start : match.start()])
            start = -1
        else:
            opens += 1
            start = match.end()
    return blocks, opens, closes


def last_boxed(text: str) -> str | None:
    r"""Content of the last complete `\boxed{}` or `\fbox{}` with balanced braces, in linear time; None without one."""
    stack: list[int] = []  # start of the content for a box, -1 for a plain brace
    best = (-1, -1)
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == "{":
            stack.append(-1)
        elif token == "}":
            start = stack.pop() if stack else -1
            if start > best[0]:
                best = (start, match.start())
        elif token[-1] == "{" and len(token) > 2:
            stack.append(match.end())
    return text[best[0] : best[1]] if best[0] >= 0 else None


def _lenient_answer(text: str, blocks: list[str]) -> str | None:
    if blocks:
        return blocks[-1]
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    phrases = list(_ANSWER_PHRASE.finditer(text))
    if not phrases:
        return None
    tail = text[phrases[-1].end() :].split("\n", 1)[0]
    return re.split(r"\.(?:\s|$)|<", tail, maxsplit=1)[0]
