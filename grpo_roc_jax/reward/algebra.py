"""Expressions as the symbolic library gets them: without what it would misread."""

import re
from collections.abc import Sequence
from fractions import Fraction

from grpo_roc_jax.reward import words as vocabulary
from grpo_roc_jax.reward.latex import Token, render
from grpo_roc_jax.reward.numbers import BASED_IN_TEXT, REPEATING_IN_TEXT, repeating_value


def for_library(tokens: Sequence[Token], *, strict: bool) -> str:
    """An expression as the library gets it: repeating decimals, bases and degrees of angles as numbers."""
    text = render([token for token in _as_names(tokens) if token.text not in vocabulary.CURRENCIES])
    text = _OVER_FUNCTION.sub(r"(\1)/", text)
    text = text.replace("^{T}", "^{(T)}")  # alone the library takes it for a transpose and drops it
    text = REPEATING_IN_TEXT.sub(lambda match: _as_fraction(repeating_value(match), match.group()), text)
    text = _FACTOR.sub(r"\\cdot(", text)
    text = BASED_IN_TEXT.sub(_in_decimal, text)
    text = re.sub(r"([0-9]++(?:\.[0-9]++)?)°", r"\\frac{\1\\pi}{180}", text)
    text = text.replace("°", r"\frac{\pi}{180}")
    if strict:
        text = _DECIMAL_IN_TEXT.sub(_as_ratio, text)
    return text


_OVER_FUNCTION = re.compile(
    r"(\\(?:ln|log(?:_\{[0-9a-z]{1,9}\})?|sin|cos|tan)\s?(?:[0-9]{1,20}|[a-z]))/(?=\\(?:ln|log|sin|cos|tan)(?![a-z]))"
)
r"""`\ln 3/\ln 2` is a quotient of logarithms, and not the logarithm of one."""


_FACTOR = re.compile(
    r"(?<=[0-9)])\((?=(?:[0-9]{1,500}+(?:\.[0-9]{1,500}+)?|\\frac\{[0-9]{1,500}+\}\{[0-9]{1,500}+\})\))"
)
"""A number in parentheses after a number is a factor; the library adds it, as in 3 1/2."""


def _as_names(tokens: Sequence[Token]) -> list[Token]:
    r"""Letters after `\angle` and the like, and three capitals alone, as one name: angle ABC is not angle BAC."""
    named = []
    for index, token in enumerate(tokens):
        figure = index and tokens[index - 1].text in (r"\angle", r"\triangle", r"\square")
        capitals = token.is_name and token.text.isupper() and len(token.text) > 2
        named.append(token._replace(roman=True) if capitals and (figure or len(tokens) == 1) else token)
    return named


_DECIMAL_IN_TEXT = re.compile(r"(?<![0-9.])([0-9]{0,500}+)\.([0-9]{1,500}+)(?![0-9.])")


def _as_fraction(value: Fraction | None, text: str) -> str:
    return text if value is None else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _in_decimal(match: re.Match) -> str:
    digits, base = match.group(1), int(match.group(2))
    if not 2 <= base <= 36 or any(int(digit) >= base for digit in digits):
        return match.group()
    return str(int(digits, base))


def _as_ratio(match: re.Match) -> str:
    digits, part = match.groups()
    return rf"\frac{{{int(digits + part)}}}{{{10 ** len(part)}}}"


_CONSTANT = re.compile(r"\+(?:C|\\text\{(?:constant|const|C)\}|C_\{[0-9]\})$")
_ANY_CONSTANT = re.compile(r"\+(?:[CcKk]|\\text\{(?:constant|const|C|c)\})$")


def without_constant(answer: str, gold: str) -> tuple[str, str]:
    """An antiderivative with and without + C; capital letters beside C make it no constant of integration."""
    both = [_ANY_CONSTANT.search(text) for text in (answer, gold)]
    if all(both) and both[0].group() != both[1].group():
        if {both[0].group().upper(), both[1].group().upper()} == {"+C"}:
            return _ANY_CONSTANT.sub("", answer), _ANY_CONSTANT.sub("", gold)
        return answer, gold
    constants = [_CONSTANT.search(text) for text in (answer, gold)]
    if all(constants) or not any(constants):
        return answer, gold
    stripped = [_CONSTANT.sub("", text) for text in (answer, gold)]
    plain = [re.sub(r"\\[A-Za-z]+", "", text) for text in stripped]
    if any(re.search("[A-Z]", text) for text in plain) or not all(re.search(r"[a-z]", text) for text in plain):
        return answer, gold
    return stripped[0], stripped[1]


_ARROW = re.compile(r"\\(?:vec|overrightarrow|(?:wide)?hat(?=\{[ijk]\}))\{([a-z])\}")


def without_arrows(answer: str, gold: str) -> tuple[str, str]:
    """Vectors with and without their arrows, if one side has none."""
    if bool(_ARROW.search(answer)) == bool(_ARROW.search(gold)):
        return answer, gold
    return _ARROW.sub(r"\1", answer), _ARROW.sub(r"\1", gold)


_OPERAND = r"(?:\\(?:vec|overrightarrow|hat|widehat)\{[^{}]*\}|\\[A-Za-z]+|[A-Za-z])(?:_\{[^{}]*\}|')*"
_CROSS = re.compile(rf"(^-|)(?:\(({_OPERAND})\\times ?({_OPERAND})\)|({_OPERAND})\\times ?({_OPERAND}))")
_CROSS_OF_MORE = re.compile(r"(?<![0-9])(?<![0-9]\})\\times ?(?![0-9]|\\frac)")
_CAPITALS = re.compile(r"(?<![A-Za-z\\])[A-Z](?:_\{[^{}]*\})?\\times ?[A-Z](?![A-Za-z])")
_VECTOR = r"\\(?:vec|overrightarrow|mathbf|boldsymbol|bm|pmb)(?:\s?[A-Za-z]|\s?\{\s?\\?[A-Za-z]{1,8}\s?\})"
CROSSED = re.compile(
    rf"(?:{_VECTOR}(?:_\w|_\{{[^{{}}]{{0,20}}\}}|')?|\\nabla)\s?(?:\\times(?![A-Za-z])|×)"
    rf"|(?:\\times|×)\s?(?:{_VECTOR}|\\nabla)(?![A-Za-z])"
)
r"""A cross product of vectors in LaTeX, whose `\times` is no multiplication of numbers."""


def without_cross_products(answer: str, gold: str, *, vectors: bool) -> tuple[str, str] | None:
    r"""The texts with one letter for each cross product, negative in the other order; None if a larger one is left.

    The library takes them for products of numbers. Capitals around `\times` in both texts are vectors or sets too.
    """
    if not vectors and not (_CAPITALS.search(answer) and _CAPITALS.search(gold)):
        return answer, gold
    spare, letters = _spare_letters(answer + gold), dict[tuple[str, str], str]()

    def replace(match: re.Match) -> str:
        sign, *names = match.groups()
        first, second = filter(None, names)
        if (letter := letters.get((second, first))) is not None:
            return letter if sign else f"(-{letter})"
        if (first, second) not in letters and spare:
            letters[first, second] = spare.pop(0)
        return sign + letters[first, second] if (first, second) in letters else match.group()

    answer, gold = (_CROSS.sub(replace, text) for text in (answer, gold))
    plain = re.sub(r"_\{[^{}]*\}", "", f"{answer} {gold}")
    return None if _CROSS_OF_MORE.search(plain) else (answer, gold)


_INVERSE = re.compile(r"(?<![A-Za-z\\])([f-hF-H])\^\{-1\}(?=\()")


def without_inverses(answer: str, gold: str) -> tuple[str, str]:
    r"""The texts with one letter for each `f^{-1}(x)`, which the library takes for 1/f(x)."""
    names = dict.fromkeys(_INVERSE.findall(answer + gold))
    letters = dict(zip(names, _spare_letters(answer + gold), strict=False))
    return tuple(_INVERSE.sub(lambda match: letters.get(match[1], match[0]), text) for text in (answer, gold))


_NAME = re.compile(r"\\text\{[^{}]*\}|\\(?:begin|end|operatorname|mathbb)\{[^{}]*\}|\\([A-Za-z]+)|([A-Za-z])('*)")
_SPARE = "qvwzkrupsjtybcmnax"


def _spare_letters(text: str) -> list[str]:
    """Letters that occur nowhere in a text."""
    used = set(text.lower())
    return [letter for letter in _SPARE if letter not in used]


def distinct_names(answer: str, gold: str) -> tuple[str, str]:
    """The library takes M for m and y' for y: where both occur, one gets a letter that occurs in neither text."""
    texts = answer, gold
    names: dict[str, None] = {}
    for text in texts:
        for match in _NAME.finditer(text):
            command, letter, primes = match.groups()
            if letter:
                names[letter + primes] = None
            elif (command and command[0].isupper()) or command:
                names["\\" + command] = None
    used = {name.lower()[0] for name in names if name[0] != "\\"}
    spare = [letter for letter in _SPARE if letter not in used]
    renamed: dict[str, str] = {}
    for name in names:
        primed = name.endswith("'")
        clash = name.lower() != name and name.lower() in names
        if (primed or clash) and spare:
            renamed[name] = spare.pop(0)
    if not renamed:
        return answer, gold

    def rename(match: re.Match) -> str:
        command, letter, primes = match.groups()
        name = "\\" + command if command else (letter or "") + (primes or "")
        new = renamed.get(name)
        if new is None:
            return match.group()
        return new

    return _NAME.sub(rename, answer), _NAME.sub(rename, gold)
