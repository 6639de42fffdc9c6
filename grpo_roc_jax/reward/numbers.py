r"""The number that a text writes, exactly: integers, decimals, powers of ten, ratios, repeating decimals, other bases.

Every pattern takes linear time, and no number is expanded beyond `MAX_EXACT_DIGITS`.
"""

import re
from fractions import Fraction

from grpo_roc_jax.reward.words import BASES

MAX_EXACT_DIGITS = 4000
"""Longest number converted to an exact fraction; Python refuses to parse integers of more than 4,300 digits."""

DECIMAL = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_NUMBER = re.compile(
    rf"([+-]?)(?:({DECIMAL})|(?:({DECIMAL})(?:\\times|\\cdot|\*|x))?10\^(?:\{{([+-]?[0-9]+)\}}|([+-]?[0-9]+)))"
)
_RATIO = re.compile(
    rf"([+-]?)(?:([0-9]+)(?:(?=\\frac)| (?=[0-9]+/)))?"
    rf"(?:\\frac\{{([+-]?{DECIMAL})\}}\{{([+-]?{DECIMAL})\}}|({DECIMAL})/({DECIMAL}))"
)


def read_number(text: str) -> Fraction | str | None:
    r"""The exact value of an integer, decimal, power of ten or ratio in normal form; None for anything else.

    Ratios are a/b, `\frac{a}{b}` and mixed numbers such as 1 1/2; decimals may repeat (`0.\overline{3}`, 0.(3),
    0.33...). A number of more than `MAX_EXACT_DIGITS` digits is its significant digits and exponent as text, which
    equals that of the same number and no other.
    """
    if match := _NUMBER.fullmatch(text):
        sign, plain, mantissa, braced, bare = match.groups()
        exponent = braced or bare or "0"
        return _exact(sign, plain or mantissa or "1", int(exponent)) if len(exponent) <= 18 else None
    if len(text) > MAX_EXACT_DIGITS:
        return None
    if match := _REPEATING.fullmatch(_BARS.sub(_joined_bars, text)):
        return _repeating(match)
    match = _RATIO.fullmatch(text)
    if not match:
        return None
    sign, integer, *parts = match.groups()
    numerator, denominator = (Fraction(part) for part in parts if part)
    if denominator == 0:
        return None
    return (Fraction(integer or 0) + numerator / denominator) * (-1 if sign == "-" else 1)


def _exact(sign: str, decimal: str, exponent: int) -> Fraction | str:
    integer, _, part = decimal.partition(".")
    digits = (integer + part).lstrip("0")
    significant = digits.rstrip("0")
    exponent += len(digits) - len(significant) - len(part)
    if not significant:
        return Fraction(0)
    minus = "-" if sign == "-" else ""
    if len(significant) + abs(exponent) > MAX_EXACT_DIGITS:
        return f"{minus}{significant}e{exponent}"
    return Fraction(int(minus + significant)) * Fraction(10) ** exponent


# ---- repeating decimals --------------------------------------------------------------------------------------------

_LINE = r"\\(?:overline|bar|widehat|underline)\{([0-9]{1,200})\}"
_DOTTED = r"\\dot\{([0-9])\}(?:([0-9]{0,200})\\dot\{([0-9])\})?"
_END = r"(?:\.\.\.|\\ldots)"
_DIGITS = r"([+-]?)([0-9]{0,500}+)\.([0-9]{0,500}+)"
_REPEATING = re.compile(rf"{_DIGITS}(?:(?:{_LINE}|{_DOTTED}|\(([0-9]{{1,200}})\)){_END}?|({_END}))")
REPEATING_IN_TEXT = re.compile(rf"(?<![0-9.]){_REPEATING.pattern.removeprefix('([+-]?)')}")
"""A repeating decimal inside an expression, without its sign."""


_BARS = re.compile(r"(?:\\(?:overline|bar)\{[0-9]\}){2,100}")


def _joined_bars(match: re.Match) -> str:
    r"""`\bar{4}\bar{5}` as `\bar{45}`."""
    return rf"\bar{{{re.sub('[^0-9]', '', match.group())}}}"


def _repeating(match: re.Match) -> Fraction | None:
    sign, integer, fixed, lined, first, middle, last, bracket, dots = match.groups()
    if dots:
        parts = _period(fixed)
        if parts is None:
            return None
        fixed, block = parts
    else:
        block = lined or bracket or (first + (middle or "") + last if last else first)
    if not integer and not fixed and not block:
        return None
    value = Fraction(int(integer or "0"))
    value += Fraction(int(fixed or "0"), 10 ** len(fixed)) if fixed else 0
    value += Fraction(int(block), (10 ** len(block) - 1) * 10 ** len(fixed))
    return -value if sign == "-" else value


def _period(digits: str) -> tuple[str, str] | None:
    """(digits before, the block) of a decimal that goes on: the shortest block that is written at least twice."""
    for size in range(1, len(digits) // 2 + 1):
        block = digits[-size:]
        start = len(digits) - size
        while start >= size and digits[start - size : start] == block:
            start -= size
        if len(digits) - start < 2 * size:
            continue
        while start > 0 and digits[start - 1] == block[-1]:  # 0.1222 3 3: the block may start earlier
            start, block = start - 1, block[-1] + block[:-1]
        return digits[:start], block
    return None


def repeating_value(match: re.Match) -> Fraction | None:
    """The value of a match of `REPEATING_IN_TEXT`."""
    return _repeating(_REPEATING.fullmatch(match.group()))


# ---- other bases ---------------------------------------------------------------------------------------------------

_BASED = re.compile(
    r"\(?(?:\\text\{(?=[0-9A-Za-z]+\}_))?([0-9A-F]{1,64}|[0-9a-f]{1,64})\}?\)?_(?:\{\(?(?:\\text\{base\}|base)?([0-9]{1,2}|[a-z]+|\\text\{[A-Za-z]+\})\)?\}|([0-9]{1,2}))"
)
_PREFIXED = re.compile(r"0(?:[xX]([0-9A-Fa-f]{1,64})|[bB]([01]{1,200})|[oO]([0-7]{1,64}))")
_NAMED = re.compile(
    r"([0-9A-F]{1,64})(?:\\text\{in\}|in)?\(?(?:(?:\\text\{base\}|base)-?([0-9]{1,2}|\\text\{[a-z]+\}|[a-z]+)"
    r"|(\\text\{(?:binary|octal|hexadecimal|hex)\}|binary|octal|hexadecimal|hex))\)?"
)


def based_number(text: str) -> tuple[str, int, int] | None:
    r"""(digits, base, value) of 204_5, `2516_{\text{eight}}`, (101)_2, 0xFF, `204 base 5`; None for anything else."""
    if match := _PREFIXED.fullmatch(text):
        digits, base = next((d, b) for d, b in zip(match.groups(), (16, 2, 8), strict=True) if d)
    else:
        match = _BASED.fullmatch(text) or _NAMED.fullmatch(text)
        if not match:
            return None
        digits, *names = match.groups()
        name = next(part for part in names if part)
        name = name.removeprefix(r"\text{").removesuffix("}")
        base = int(name) if name.isdecimal() else BASES.get(name.lower(), 0)
        if not any(digit.isdecimal() for digit in digits) and (base != 16 or len(digits) < 2):
            return None
    if not 2 <= base <= 36 or any(int(digit, 36) >= base for digit in digits):
        return None
    return digits.upper().lstrip("0") or "0", base, int(digits, base)


BASED_IN_TEXT = re.compile(r"(?<![0-9A-Za-z.\\])([0-9]{1,64})_\{([0-9]{1,2})\}")
"""A number in a base inside of an expression."""
