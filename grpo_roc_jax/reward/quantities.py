"""Reads an expression with its unit and the words around it, and answers in words."""

import re
from collections.abc import Sequence
from fractions import Fraction

from grpo_roc_jax.reward import words as vocabulary
from grpo_roc_jax.reward.forms import Based, Clock, Form, Interval, Items, Quantity, Region, Words
from grpo_roc_jax.reward.latex import Token, depths, render
from grpo_roc_jax.reward.numbers import based_number, read_number

# ---- digits in groups ----------------------------------------------------------------------------------------------


def merged_numbers(tokens: Sequence[Token], *, decimal_comma: bool = False) -> list[Token]:
    """Digits in groups as one number: 1,234, 12 345, 12,34,567, 1.234.567,89, 1'234.

    Args:
        decimal_comma: 0,5 is 0.5 as well.
    """
    merged: list[Token] = []
    level = depths(tokens)
    index = 0
    while index < len(tokens):
        token = tokens[index]
        if not token.is_number or level[index]:
            merged.append(token)
            index += 1
            continue
        digits, marks = [token.text], []
        after = index + 1
        while after < len(tokens):
            mark = tokens[after].text
            if mark in (",", "'") and after + 1 < len(tokens) and not tokens[after].gap and not tokens[after + 1].gap:
                number, step = tokens[after + 1], 2
            else:
                number, mark, step = tokens[after], " ", 1
                if not number.gap:
                    break
            if not number.is_number or number.text.startswith("."):
                break
            digits.append(number.text)
            marks.append(mark)
            after += step
        text = _grouped(digits, marks, decimal_comma=decimal_comma)
        follows = tokens[after].text if after < len(tokens) else ""
        if text is None or (marks and marks[-1] == " " and follows == "/"):
            merged += tokens[index:after]
        else:
            merged.append(token._replace(text=text))
        index = after
    return merged


def _grouped(digits: list[str], marks: list[str], *, decimal_comma: bool) -> str | None:
    """The number that groups of digits write; None for several numbers."""
    first, rest, kinds = digits[0], digits[1:], set(marks)
    if not marks:
        if first.count(".") > 1 and re.fullmatch(r"[1-9][0-9]{0,2}(?:\.[0-9]{3}){2,}", first):
            return first.replace(".", "")
        return first
    undivided = "." not in first and all("." not in part for part in rest[:-1])
    if len(kinds) == 1 and undivided and re.fullmatch(r"[0-9]{1,3}", first):
        ends = re.fullmatch(r"[0-9]{3}(?:\.[0-9]+)?", rest[-1])
        if ends and all(len(part) == 3 for part in rest[:-1]) and (first != "0" or len(rest) > 1):
            return first + "".join(rest)
        if kinds == {","} and ends and len(rest) > 1 and len(first) < 3 and all(len(part) == 2 for part in rest[:-1]):
            return first + "".join(rest)
    if (
        marks == [","]
        and re.fullmatch(r"[1-9][0-9]{0,2}(?:\.[0-9]{3})+", first)
        and rest[0].isdecimal()
        and len(rest[0]) < 3
    ):
        return first.replace(".", "") + "." + rest[0]
    if decimal_comma and marks == [","] and first.isdecimal() and rest[0].isdecimal():
        return f"{first}.{rest[0]}"
    return None


# ---- words ---------------------------------------------------------------------------------------------------------

_ALPHABET = "abcdefghijklmnopqrstuvwxyz"
_KNOWN = (
    vocabulary.HEDGES
    | vocabulary.BLOCKING
    | set(vocabulary.POWERS)
    | {"to", "for", "where", "with", "all", "any", "percent", "dne", "base", "by", "in", "per"}
)


def is_word(token: Token) -> bool:
    """Whether letters are a word of a language, and not a product of variables or the name of an angle."""
    text = token.text
    if not token.is_name or len(text) < 2:
        return False
    if token.roman or text.lower() in _KNOWN or not text.isascii():
        return True
    if len(text) < 3 or text.isupper() or not (text.islower() or text[1:].islower()):
        return False
    return bool(set(text.lower()) & set("aeiouy")) and text.lower() not in _ALPHABET


def is_noun(token: Token) -> bool:
    """Whether `a` before it is an article."""
    return is_word(token) and token.text.lower() not in {"or", "and", "is", "are"}


def is_phrase(tokens: Sequence[Token]) -> bool:
    """Whether a text has words and punctuation only."""
    some = False
    for token in tokens:
        if is_word(token):
            some = True
        elif not (
            token.text in ("-", ".", ",", "'", "(", ")", "/", "?", "!", "&")
            or (token.is_name and (token.roman or token.text in "aAI"))
        ):
            return False
    return some


def phrase(tokens: Sequence[Token]) -> Form:
    """The form of words alone: a saying such as `no solution`, a number that is spelled out, or the words."""
    tokens = tuple(tokens)
    text = " ".join(token.text.lower() for token in tokens if token.is_name)
    text = re.sub(r"\b(does|do|is)n? t\b", r"\1 not", text)
    text = re.sub(r"^(?:the|a|an) (?=.)", "", text)
    meaning = "emptyset" if vocabulary.NO_SOLUTION.fullmatch(text) else vocabulary.SYNONYMS.get(text, text)
    ordinal = vocabulary.spelled_ordinal(meaning.removesuffix(" place").split())
    if ordinal is not None:
        return Quantity(tokens, tokens, Fraction(ordinal), words=("th",))
    if meaning == "emptyset":
        return Items(tokens, "set", ())
    if meaning == "reals":
        return Region(tokens, (Interval(None, None, True, True),))
    if meaning in ("noon", "midnight"):
        return Clock(tokens, 43200, "pm") if meaning == "noon" else Clock(tokens, 0, "am")
    parts = meaning.split()
    sign = -1 if parts[0] in ("minus", "negative") else 1
    parts = parts[sign < 0 :]
    for size in range(min(len(parts), 12), 0, -1):
        number = vocabulary.spelled_number(parts[:size])
        if number is not None and (size == len(parts) or parts[size - 1] != "and"):
            rest = tuple(word for word in parts[size:] if word not in vocabulary.HEDGES)
            unit = (vocabulary.unit_symbol(rest[0]) if len(rest) == 1 else None) or ""
            rest = () if unit else rest
            return Quantity(tokens, tokens, sign * number, unit, False, rest, changed=vocabulary.blocked(rest, ""))
    return Words(tokens, meaning)


# ---- quantities ----------------------------------------------------------------------------------------------------

_NO_UNITS = {"e", "i", "d"}
_MICRO = set("mgsFCAVLWHNJ")


def quantity(tokens: Sequence[Token]) -> Form:
    """An expression, its unit, and the words around it; or a number in another base."""
    if based := based_number(render(tokens)):
        return Based(tuple(tokens), *based)
    body, before = _words_before(_units_as_names(tokens))
    if not before and (based := based_number(render(body))):
        return Based(tuple(tokens), *based)
    body, modulus = _modulus(body)
    body, currency, is_sign = _currency(body)
    scale = Fraction(1)
    if is_sign and len(body) > 1 and body[-2].is_number and body[-1].text in vocabulary.ABBREVIATIONS:
        body, scale = body[:-1], Fraction(vocabulary.ABBREVIATIONS[body[-1].text])
    end = _tail_start(body)
    expression, tail = _operated(body[:end], body[end:])
    while tail and tail[0].is_name and (factor := vocabulary.scale(tail[0].text.lower(), after_number=True)):
        scale, tail = scale * factor, tail[1:]
    tail = _Tail(tail)
    number = read_number(render(expression))
    changed = tail.more
    if scale != 1:
        number = number * scale if isinstance(number, Fraction) else None
        expression = _as_tokens(number) if number is not None else expression
        changed = changed or number is None
    words = tuple(tail.words)
    if words and number is not None and vocabulary.spelled_number(tail.words) == number:
        words = ()  # 100 (one hundred)
    if {"repeating", "recurring"} & set(words) and "." in (digits := render(expression)):
        repeated = read_number(re.sub(r"([0-9])$", r"\\overline{\1}", digits))
        if isinstance(repeated, Fraction):
            number, words, expression = repeated, (), _as_tokens(repeated)
    words = (*before, *words, *modulus)
    unit = tail.unit or currency
    return Quantity(
        tuple(tokens),
        tuple(expression),
        number,
        unit,
        tail.is_sign if tail.unit else is_sign,
        words,
        changed=changed or vocabulary.blocked(words, unit),
    )


def _operated(expression: list[Token], tail: list[Token]) -> tuple[list[Token], list[Token]]:
    """(expression, tail) with `5 factorial` and `5 squared` as 5! and 5^2; of longer expressions the words stay."""
    sign = {"factorial": "!", "squared": "^{2}", "cubed": "^{3}"}.get(tail[0].text.lower()) if tail else None
    if sign and len(expression) == 1 and expression[0].is_number:
        return [*expression, *map(Token, sign)], tail[1:]
    return expression, tail


def _as_tokens(number: Fraction) -> list[Token]:
    sign = [Token("-")] if number < 0 else []
    if number.denominator == 1:
        return [*sign, Token(str(abs(number.numerator)))]
    ratio = (r"\frac", "{", str(abs(number.numerator)), "}", "{", str(number.denominator), "}")
    return [*sign, *map(Token, ratio)]


def _words_before(tokens: list[Token]) -> tuple[list[Token], list[str]]:
    """(the tokens from the expression on, the words before it); a sign in words is part of the expression."""
    before: list[str] = []
    words: list[str] = []
    start = 0
    while start + 1 < len(tokens):
        token, following = tokens[start], tokens[start + 1]
        if not (is_word(token) or (token.text in ("a", "A") and is_noun(following))):
            break
        word = token.text.lower()
        start += 1
        if word in ("minus", "negative"):
            return [Token("-"), *tokens[start:]], before
        words.append(word)
        if word in vocabulary.COPULAS:
            before = [word for word in before if word != "inverse"]  # the square of the distance is 5
        elif vocabulary.operates(words):
            before.append("inverse")  # the square of 5 is not 5
        if word not in vocabulary.HEDGES and word != "plus":
            before.append(word)
        if following.text in (":", "-", ",") and start + 1 < len(tokens):
            start += 1
    if words[-1:] == ["from"]:
        before.append("inverse")  # any integer from 5
    return tokens[start:], before


def _units_as_names(tokens: Sequence[Token]) -> list[Token]:
    r"""`\mu m` and `k\Omega` as names of units, `^{\text{th}}` as an ordinal, degrees Celsius as one unit."""
    out: list[Token] = []
    index = 0
    while index < len(tokens):
        token = tokens[index]
        following = tokens[index + 1] if index + 1 < len(tokens) else Token(" ")
        if (
            token.text == r"\mu"
            and following.text[0] in _MICRO
            and out
            and (following.roman or len(following.text) == 1)
            and (token.gap or out[-1].is_number)
        ):
            out.append(Token("μ" + following.text, True, True))
            index += 1
        elif token.text == r"\Omega" and out and (out[-1].is_number or out[-1].text in ("k", "M")):
            prefix = out.pop().text if out[-1].text in ("k", "M") else ""
            out.append(Token(prefix + "Ω", True, True))
        elif token.text == r"\frac" and out and (quotient := _quotient_of_units(tokens[index : index + 24])):
            out += quotient[0]
            index += quotient[1] - 1
        elif token.text == "°" and following.text in ("C", "F") and out:
            out.append(Token("°" + following.text))
            index += 1
        elif (
            token.text == "^"
            and following.text == "{"
            and [t.text for t in tokens[index + 3 : index + 4]] == ["}"]
            and tokens[index + 2].text in ("th", "st", "nd", "rd")
        ):
            out.append(Token("th", False, True))
            index += 3
        elif token.text in ("st", "nd", "rd", "th") and out and out[-1].is_number and not token.gap:
            out.append(Token("th", False, True))
        elif token.text == "-" and following.text == "th" and out and out[-1].is_number:
            out.append(Token("th", False, True))
            index += 1
        else:
            out.append(token)
        index += 1
    return out


def _quotient_of_units(tokens: Sequence[Token]) -> tuple[list[Token], int] | None:
    r"""(m / s, the number of tokens) of `\frac{\text{m}}{\text{s}}`; None for a fraction of anything but units."""
    level = depths(tokens)
    ends = [i for i, token in enumerate(tokens) if token.text == "}" and not level[i]][:2]
    if len(ends) < 2 or not (tokens[2].roman and tokens[2].is_name):
        return None
    over, under = tokens[2 : ends[0]], tokens[ends[0] + 2 : ends[1]]
    if not all(
        token.text in "^{}-" or token.is_number or vocabulary.unit_symbol(token.text) for token in (*over, *under)
    ):
        return None
    divided = [part for token in under for part in ((Token("/"), token) if token.is_name else (token,))]
    return [*over, *divided], ends[1] + 1


def _currency(body: list[Token]) -> tuple[list[Token], str, bool]:
    """(the rest, the currency before a number, whether it is a sign)."""
    at = 1 if body and body[0].text in ("-", "+") else 0
    rest = body[at:]
    if rest and rest[0].text in ("US", "A", "C", "CA", "AU") and rest[1:2] and rest[1].text in ("$", r"\$"):
        rest = rest[1:]
    if len(rest) > 1 and rest[0].text in vocabulary.CURRENCIES:
        return [*body[:at], *rest[1:]], vocabulary.CURRENCIES[rest[0].text], True
    if len(rest) > 1 and rest[0].text in vocabulary.CURRENCY_NAMES:
        unit = vocabulary.unit_symbol(rest[0].text) or "INR"
        rest = rest[2:] if len(rest) > 2 and rest[1].text == "." else rest[1:]
        return [*body[:at], *rest], unit, False
    return body, "", False


_VARIABLES = re.compile(r"\\(?!pi$)[a-zA-Z]+")
_COMMANDS = set(
    vocabulary.names("frac sqrt cdot times div binom pm sin cos tan cot sec csc ln log exp overline bar dot")
)
_ANGLES = {r"\sin", r"\cos", r"\tan", r"\cot", r"\sec", r"\csc"}


def _is_variable(token: Token) -> bool:
    if token.is_name:
        return token.text not in ("e", "i")
    return _VARIABLES.fullmatch(token.text) is not None and token.text[1:] not in _COMMANDS


def _tail_start(body: Sequence[Token]) -> int:
    """Where the unit or the words after an expression start; the length of the body without them."""
    level = depths(body)
    variables = angle = False
    for index, token in enumerate(body):
        text = token.text
        angle = angle or text in _ANGLES
        if index and not level[index]:
            if text == "(" and index + 1 < len(body) and is_word(body[index + 1]):
                return index  # 100 (one hundred)
            if text in ("°C", "°F", "%") or text in vocabulary.CURRENCIES or (text == "°" and not angle):
                return index
            if token.is_name and _starts_tail(body, index, variables=variables):
                return index
        variables = variables or _is_variable(token)
    return len(body)


def _starts_tail(body: Sequence[Token], index: int, *, variables: bool) -> bool:
    """Whether a name is a unit or a word, and not a factor: `5 m` and `5cm`, but `5m` and `mgh` are products."""
    token, before = body[index], body[index - 1]
    number_before = before.is_number or before.text in (")", "}", "]", r"\pi", "°", "!", "|", r"\}")
    is_unit = vocabulary.unit_symbol(token.text) is not None
    if token.roman:
        return len(token.text) > 1 or (token.text not in _NO_UNITS and is_unit and (number_before or token.gap))
    if len(token.text) > 1:
        if is_unit and (token.gap or before.is_number) and (number_before or not variables):
            return True
        return token.gap and is_word(token)
    if not (is_unit and token.gap and number_before and not variables):
        return False
    tail = _Tail(body[index:])
    return not tail.words and not tail.more


class _Tail:
    """What follows an expression: a product of units, then words."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self.powers: list[tuple[str, int]] = []
        self.words: list[str] = []
        self.more = False
        """There is more than units and words."""
        self.is_sign = False
        """The unit is the sign of a currency."""
        rest, power, divided = self._units(tokens)
        if divided and rest:
            self.words.append("per")
        if power != 1:
            self.words.append("square" if power == 2 else "cubic")
        compass = vocabulary.COMPASS if any(symbol == "°" for symbol, _ in self.powers) else {}
        for token in rest:
            if token.is_name:
                self.words.append(compass.get(token.text, token.text.lower()))
            elif token.text not in (".", "-", ",", "'", "(", ")", "/", "!", ":"):
                self.more = True
        self.is_sign = self.is_sign and len(self.powers) == 1

    @property
    def unit(self) -> str:
        """The unit in normal form."""
        return vocabulary.unit_text(self.powers)

    def _units(self, tokens: Sequence[Token]) -> tuple[Sequence[Token], int, bool]:
        """(the tokens after the units, the power announced by `square`, whether a division is open)."""
        index, power, divided, grouped = 0, 1, False, False
        while index < len(tokens):
            token, text = tokens[index], tokens[index].text
            word = text.lower()
            following = tokens[index + 1].text if index + 1 < len(tokens) else ""
            if text in vocabulary.CURRENCIES or text in ("°", "°C", "°F", "%"):
                self.is_sign = text in vocabulary.CURRENCIES
                self._add(vocabulary.CURRENCIES.get(text, text), power, divided)
            elif word in vocabulary.POWERS and not word.endswith("d"):
                power = vocabulary.POWERS[word]
            elif word in vocabulary.POWERS and self.powers:
                self._raise(vocabulary.POWERS[word])
            elif text in vocabulary.COMPASS and index and tokens[index - 1].text == "°":
                break
            elif word == "per" and following.lower() == "cent":
                self._add("%", power, divided)
                index += 1
            elif word == "per" or text == "/":
                divided = True
            elif divided and not grouped and text == "(" and vocabulary.unit_symbol(following) is not None:
                grouped = True  # J/(mol K)
            elif grouped and text == ")":
                divided = grouped = False
            elif token.is_name and (word != "in" or following in ("", "^")) and (unit := vocabulary.unit_symbol(text)):
                self._add(unit, power, divided)
                power, divided = 1, grouped
            elif text == "^" and self.powers and (exponent := _exponent(tokens[index : index + 5])):
                self._raise(exponent)
                index += 4 if exponent < 0 else 3
            elif not (text in (r"\cdot", r"\times", "*", "-") and self.powers) and not (text == "." and power != 1):
                break
            index += 1
        return tokens[index:], power, divided

    def _add(self, unit: str, power: int, divided: bool) -> None:
        self.powers.append((unit, -power if divided else power))

    def _raise(self, exponent: int) -> None:
        unit, power = self.powers.pop()
        self.powers.append((unit, power * exponent))


def _exponent(tokens: Sequence[Token]) -> int | None:
    """n of ^{n}, one digit with its sign."""
    match = re.match(r"\^\{(-?[1-9])\}", "".join(token.text for token in tokens))
    return int(match.group(1)) if match else None


_MODULUS = {r"\pmod", r"\bmod", r"\mod", "mod"}


def _modulus(tokens: list[Token]) -> tuple[list[Token], tuple[str, ...]]:
    r"""(the expression, `mod n` as a word) of an expression with `\pmod{n}` after it."""
    for index in range(1, len(tokens)):
        following = tokens[index + 1].text if index + 1 < len(tokens) else ""
        if tokens[index].text in _MODULUS or (tokens[index].text == "(" and following in _MODULUS):
            modulus = "".join(token.text for token in tokens[index:] if token.text not in {*"(){}", *_MODULUS})
            return tokens[:index], (f"mod {modulus}",)
    return tokens, ()
