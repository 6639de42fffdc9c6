r"""Finds the final answer in the policy's own text, and decides the comparisons that need no algebra.

The input is text decoded from policy tokens only, so a tool that prints an answer block changes nothing. Comparisons
beyond integers and fractions go to `reward.verify`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_INTEGER = re.compile(r"([+-]?)([0-9]+)(?:\.0*)?")
_THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)")
_FRACTION = re.compile(r"([+-]?)(?:\\[dt]?frac\{([+-]?[0-9]+)\}\{([0-9]+)\}|([0-9]+)/([0-9]+))")
_ANSWER_PHRASE = re.compile(r"answer(?:\s+is|\s*:)\s*", re.IGNORECASE)
_LAYOUT = re.compile(r"\\[,;:! ]|\\left(?![a-z])|\\right(?![a-z])|\\displaystyle|\s+")
MAX_EXACT_DIGITS = 4000
"""Longest text converted to an exact fraction; Python refuses to parse integers of more than 4,300 digits."""


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


def normalize(answer: str) -> str:
    """The answer without layout: no dollar signs, spacing commands, thousands separators or final period."""
    text = answer.strip().strip("$").strip()
    text = _LAYOUT.sub("", text).replace("−", "-").replace("\\$", "").replace("{,}", ",")
    text = text.rstrip(".") if not text.endswith("..") else text
    return text.replace(",", "") if _THOUSANDS.fullmatch(text) else text


def as_integer(text: str) -> str | None:
    """The canonical decimal string of an integer of any length, such as 42, +042 or 42.00; None for anything else."""
    match = _INTEGER.fullmatch(text)
    if not match:
        return None
    digits = match.group(2).lstrip("0") or "0"
    return f"-{digits}" if match.group(1) == "-" and digits != "0" else digits


def as_fraction(text: str) -> Fraction | None:
    r"""The exact value of a decimal, a/b or \frac{a}{b}; None for anything else and beyond `MAX_EXACT_DIGITS`."""
    if len(text) > MAX_EXACT_DIGITS:
        return None
    if _DECIMAL.fullmatch(text):
        return Fraction(text)
    match = _FRACTION.fullmatch(text)
    if not match:
        return None
    numerator, denominator = match.group(2) or match.group(4), int(match.group(3) or match.group(5))
    if denominator == 0:
        return None
    return Fraction(int(numerator), denominator) * (-1 if match.group(1) == "-" else 1)


def decide(answer: str, gold: str) -> bool | None:
    """Whether two answers are equal as text, integers or fractions; None if algebra is needed to decide."""
    answer, gold = normalize(answer), normalize(gold)
    if answer == gold:
        return True
    integers = as_integer(answer), as_integer(gold)
    if None not in integers:
        return integers[0] == integers[1]
    fractions = as_fraction(answer), as_fraction(gold)
    if None not in fractions:
        return fractions[0] == fractions[1]
    return None
