"""Tokens of an answer -> its form.

What a text means follows from its structure, and two forms are equal by rules (`reward.notation`); algebra only decides
about expressions. What has no form of its own is an expression.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise, product

from grpo_roc_jax.reward import words as vocabulary
from grpo_roc_jax.reward.forms import (
    Approximation,
    Cases,
    Choice,
    Clock,
    Date,
    Equation,
    Form,
    Interval,
    Items,
    Joined,
    Matrix,
    Proportion,
    Quantity,
    Region,
    Relation,
)
from grpo_roc_jax.reward.latex import ENVIRONMENT, Token, depths, enclosed, render, split, tokenize
from grpo_roc_jax.reward.magnitude import value as decimal_value
from grpo_roc_jax.reward.numbers import read_number
from grpo_roc_jax.reward.quantities import is_noun, is_phrase, merged_numbers, phrase, quantity

MAX_NESTING = 12
"""Brackets inside one another that are read as forms; deeper ones are expressions."""


def read(tokens: Sequence[Token], *, nesting: int = 0) -> Form:
    """The form of some tokens."""
    tokens = _trimmed(tokens)
    if not tokens or nesting > MAX_NESTING:
        return Quantity(tuple(tokens), tuple(tokens))
    inner = nesting + 1

    def again(part: Sequence[Token]) -> Form:
        return read(part, nesting=inner)

    tokens = merged_numbers(tokens) if not nesting else tokens
    for reader in (
        _choice,
        _clock,
        _date,
        _joined,
        _several_units,
        _in_words,
        _outward,
        _out_of,
        _several,
        _relation,
        _union,
        _bracketed,
        _environment,
        _point,
        _ratio,
    ):
        if (form := reader(tokens, again)) is not None:
            return form
    if is_phrase(tokens):
        return phrase(tokens)
    return quantity(tokens)


_Again = Callable[[Sequence[Token]], Form]


def _trimmed(tokens: Sequence[Token]) -> list[Token]:
    """The tokens without punctuation at the end, emphasis, and words such as `The answer is:`."""
    tokens = list(tokens)
    start, end = 0, len(tokens)
    while end > start and tokens[end - 1].text in (".", ",", ";", ":") and tokens[end - 2].text != ".":
        end -= 1
    while end - start > 2 and tokens[start].text == tokens[end - 1].text and tokens[start].text in ("*", "_", "'"):
        start, end = start + 1, end - 1
    while end > start and tokens[end - 1].text in (".", ",", ";", ":") and tokens[end - 2].text != ".":
        end -= 1
    if end - start == 2 and _lower(tokens[-1 + end]) == "only" and _STATEMENT.fullmatch(tokens[start].text):
        end -= 1  # I only
    head = start
    while head < end and tokens[head].is_name and tokens[head].text.lower() in vocabulary.HEDGES:
        if len(tokens[head].text) == 1 and not (head + 1 < end and is_noun(tokens[head + 1])):
            break  # a variable, or a letter of a choice
        head += 1
    if head > start and head < end and tokens[head].text in (":", "="):
        head += 1
    if start < head < end and tokens[head].text not in ("^", "_", "/", "+", ")"):
        start = head
    while start < end and tokens[start].text in (r"\approx", r"\sim", r"\cong", "="):
        start += 1
    return tokens[start:end]


_STATEMENT = re.compile(r"[IVX]{1,4}|[A-J]")


def _lower(token: Token) -> str:
    return token.text.lower()


def _at_top(tokens: Sequence[Token], marks: set[str]) -> list[int]:
    """Where signs or words stand outside all brackets."""
    level = depths(tokens)
    return [
        i
        for i, token in enumerate(tokens)
        if not level[i] and (token.text in marks or (token.is_name and len(token.text) > 1 and _lower(token) in marks))
    ]


# ---- choices, times, dates -----------------------------------------------------------------------------------------

_LETTERS = set("ABCDEFGHIJ")
_OPTION = {"option", "choice", "answer"}


def _choice(tokens: Sequence[Token], again: _Again) -> Form | None:
    texts = [token.text for token in tokens[:4]]
    named = bool(texts) and _lower(tokens[0]) in _OPTION and len(tokens) > 1
    texts, start = (texts[1:], 1) if named else (texts, 0)
    bracket = texts[:1] == ["("] and texts[2:3] == [")"]
    letter = texts[1:2] if bracket else texts[:1]
    if not letter or not (letter[0] in _LETTERS or (letter[0].upper() in _LETTERS and bracket)):
        return None
    after = start + (3 if bracket else 1)
    if not bracket and after < len(tokens) and tokens[after].text in (".", ")", ":"):
        if (
            tokens[after].text == ":"
            and not tokens[start].roman
            and after + 1 < len(tokens)
            and not tokens[after + 1].gap
        ):
            return None  # a ratio, A:B
        after += 1
    elif not bracket and after < len(tokens) and not named:
        return None
    rest = tokens[after:]
    if bracket and rest and rest[0].text in ("^", "_", "+", "-", "=", "/", ",", "(", r"\cup", r"\cdot", "!"):
        return None
    if rest and rest[0].text in ("-", ":", "."):
        rest = rest[1:]
    marked = bracket or after > start + 1 or named
    return Choice(tuple(tokens), letter[0].upper(), again(rest) if rest else None, marked)


_TIME = re.compile(r"[0-2]?[0-9]:[0-5][0-9](?::[0-5][0-9])?")
_HALVES = {
    "am": {"am", "a m", "a . m", "in the morning", "midnight"},
    "pm": {"pm", "p m", "p . m", "in the afternoon", "in the evening", "at night", "noon"},
}


def _clock(tokens: Sequence[Token], again: _Again) -> Form | None:
    """3:30, 3:30 pm, 3 pm, 15:30, 3 o'clock."""
    if len(tokens) > 12:
        return None
    if tokens[0].is_name and (hour := vocabulary.spelled_number([_lower(tokens[0])])) and hour.denominator == 1:
        tokens = [tokens[0]._replace(text=str(hour), roman=False), *tokens[1:]]
    if not tokens[0].is_number:
        return None
    numbers, index = [tokens[0].text], 1
    while index + 1 < len(tokens) and tokens[index].text == ":" and tokens[index + 1].is_number:
        numbers.append(tokens[index + 1].text)
        index += 2
    rest = " ".join(_lower(token) for token in tokens[index:])
    rest = rest.removeprefix("o ' clock ")
    half = next((half for half, texts in _HALVES.items() if rest in texts), None)
    if rest in ("noon", "midnight") and numbers not in (["12"], ["12", "00"]):
        return None
    if half and index == 1 and re.fullmatch(r"[0-9]{1,2}\.[0-5][0-9]", numbers[0]):
        numbers = numbers[0].split(".")  # 7.45 pm
    bare = rest in ("", "o ' clock", "hours", "h")
    if (half is None and not bare) or len(numbers) > 3 or (len(numbers) == 1 and half is None and rest != "o ' clock"):
        return None
    if len(numbers) > 1 and not _TIME.fullmatch(":".join(numbers)):
        return None
    if not all(number.isdecimal() and len(number) < 3 for number in numbers):
        return None
    hour, minute, second = (*map(int, numbers), 0, 0)[:3]
    if hour > (12 if half else 24):
        return None
    hour = hour % 12 + 12 * (half == "pm") if half else hour
    half = half or ("pm" if 12 < hour < 24 else "")
    return Clock(tuple(tokens), hour % 24 * 3600 + minute * 60 + second, half)


def _date(tokens: Sequence[Token], again: _Again) -> Form | None:
    """May 1, 2024; 1 May 2024; May 1st. Dates in digits are joined numbers, of which the ISO form is a date."""
    if len(tokens) > 10:
        return None
    month = 0
    numbers: list[int] = []
    for token in tokens:
        text = _lower(token).rstrip(".")
        if token.is_number and text.isdecimal() and len(text) < 5:
            numbers.append(int(text))
        elif token.is_name and text in vocabulary.MONTHS and not month:
            month = vocabulary.MONTHS[text]
        elif text not in (",", "", "of", "the", "st", "nd", "rd", "th", "^", "{", "}", *_WEEKDAYS):
            return None
    if not month or not 1 <= len(numbers) <= 2 or not 1 <= numbers[0] <= 31 or (len(numbers) > 1 and numbers[1] < 32):
        return None
    return Date(tuple(tokens), numbers[1] if len(numbers) > 1 else 0, month, numbers[0])


_WEEKDAYS = tuple(["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"])


def _joined(tokens: Sequence[Token], again: _Again) -> Form | None:
    """Digits joined by hyphens, slashes or dots: 2024-05-01, 3-1, 555-1234, 5/1/2024, 1.2.3."""
    if len(tokens) == 1 and re.fullmatch(r"[0-9]+(?:\.[0-9]+){2,}", tokens[0].text):
        parts = tuple(tokens[0].text.split("."))
        return _iso(tokens, parts, ".") or Joined(tuple(tokens), parts, ".")
    marks = {token.text for token in tokens[1::2]}
    texts = [token.text for token in tokens[::2]]
    if len(tokens) < 3 or len(tokens) % 2 == 0 or len(marks) != 1 or not marks <= {"-", "/"}:
        return None
    if not all(text.isdecimal() and text.isascii() for text in texts):
        return None
    mark = marks.pop()
    if mark == "/" and len(texts) < 3:
        return None
    spaced = any(token.gap for token in tokens[1:])
    if spaced and len(texts) > 2:
        return None
    return _iso(tokens, tuple(texts), mark) or Joined(tuple(tokens), tuple(texts), mark, spaced)


def _iso(tokens: Sequence[Token], parts: tuple[str, ...], mark: str) -> Date | None:
    """2024-05-01, 5/13/2024 and 13-05-2024; 5/1/2024 is a day in January or in May, so it stays digits."""
    if len(parts) == 3 and len(parts[2]) == 4 and max(map(len, parts[:2])) <= 2:
        first, second = map(int, parts[:2])
        if 1 <= min(first, second) <= 12 and (12 < max(first, second) <= 31 or first == second):
            return Date(tuple(tokens), int(parts[2]), min(first, second), max(first, second))
    if len(parts) == 3 and len(parts[0]) == 4 and len(parts[1]) <= 2 and len(parts[2]) <= 2:
        year, month, day = map(int, parts)
        if 1 <= month <= 12 and 1 <= day <= 31:
            return Date(tuple(tokens), year, month, day)
    return None


# ---- several units -------------------------------------------------------------------------------------------------

_FEET = ["'", "'"]
_DEGREES = ["°", "'", "'"]


def _several_units(tokens: Sequence[Token], again: _Again) -> Form | None:
    """5 ft 6 in, 2 hours and 30 minutes, 5'6'', 30°15': a quantity in units of one dimension, each smaller than the
    one before and counted up to it. Its value is in the first unit."""
    if len(tokens) > 40 or not any(token.is_number for token in tokens[2:]):
        return None
    numbers, marks = [token for token in tokens if token.is_number], [t.text for t in tokens if not t.is_number]
    alternate = all(token.is_number for token in tokens[: 2 * len(numbers) : 2])
    if alternate and (marks in (_DEGREES[:2], _DEGREES[:2] + _DEGREES[1:] + ["'"]) or marks in (["'"], ["'"] * 3)):
        degrees = marks[0] == "°"
        if all(number.text.isdecimal() for number in numbers) and all(int(n.text[:9]) < 60 for n in numbers[1:]):
            step = 60 if degrees else 12
            if len(numbers) <= (3 if degrees else 2) and (degrees or int(numbers[1].text[:9]) < 12):
                value = sum(Fraction(int(n.text[:9]), step**index) for index, n in enumerate(numbers))
                return _measured(tokens, value, "°" if degrees else "ft")
    level = depths(tokens)
    starts = [0]
    for i in range(2, len(tokens)):
        before = tokens[i - 1]
        follows = vocabulary.unit_symbol(before.text) is not None or _lower(before) in ("and", ",")
        if tokens[i].is_number and not level[i] and before.text != "^" and (before.is_name or before.text == ","):
            starts += [i] if follows else []
    if not 2 <= len(starts) <= 4:
        return None
    total, smaller = Fraction(0), None
    first = None
    names = {vocabulary.unit_symbol(token.text) for token in tokens if token.is_name}
    for index, (start, end) in enumerate(pairwise([*starts, len(tokens)])):
        part = list(tokens[start:end])
        while index + 1 < len(starts) and part and _lower(part[-1]) in ("and", ","):
            part.pop()
        if len(part) == 2 and part[1].is_name:
            part[1] = part[1]._replace(gap=True)  # 2h 15m: after a number and before another one, a letter is a unit
        form = quantity(part) if part else None
        if isinstance(form, Quantity) and form.unit == "m" and {"h", "s"} & names:
            form = replace(form, unit="min")  # 2h 15m
        if not isinstance(form, Quantity) or not isinstance(form.value, Fraction) or form.words or form.changed:
            return None
        size = vocabulary.measure(form.unit) if form.unit else None
        if size is None or form.value < 0 or (index + 1 < len(starts) and form.value.denominator != 1):
            return None
        first = first or (form.unit, size)
        if size[1] != first[1][1] or (
            smaller is not None and not (size[0] < smaller and form.value * size[0] < smaller)
        ):
            return None
        total, smaller = total + form.value * size[0], size[0]
    return _measured(tokens, total / first[1][0], first[0])


def _measured(tokens: Sequence[Token], value: Fraction, unit: str) -> Quantity:
    text = rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
    return Quantity(tuple(tokens), tuple(tokenize(text)), value, unit, several=True)


# ---- several -------------------------------------------------------------------------------------------------------

_RELATIONS = {"=", "<", ">", r"\le", r"\ge", r"\ne", r"\in", r"\equiv"}
_OR, _AND = {"or", r"\lor"}, {"and", r"\land", "&"}


def _several(tokens: Sequence[Token], again: _Again) -> Form | None:
    """Parts between commas, semicolons, `or`, `and`: values, equations, or inequalities."""
    marks = _at_top(tokens, {",", ";", r"\\", *_OR, *_AND})
    if not marks:
        return _plus_minus(tokens, again)
    if is_phrase(tokens) and not {tokens[i].text for i in marks} & {",", ";"}:
        spelled = phrase(tokens)
        if isinstance(spelled, Quantity) and not spelled.words:
            return spelled
    parts = [part for part in (_trimmed(part) for part in split(tokens, marks)) if part]
    signs = {_lower(tokens[i]) for i in marks}
    if len(parts) < 2:
        return again(parts[0]) if parts else None
    mixed = _mixed(parts) if signs <= _AND else None
    if mixed:
        return again(mixed)
    related = [bool(_at_top(part, _RELATIONS)) for part in parts]
    if related[0] and not any(related[1:]):
        # k = 5, 6 and x = 5 or 6: the name belongs to all
        at = _at_top(parts[0], _RELATIONS)
        if len(at) == 1 and parts[0][at[0]].text in ("=", r"\in"):
            parts[0] = parts[0][at[0] + 1 :]
            related[0] = False
    forms = [again(part) for part in parts]
    if all(isinstance(form, Region) for form in forms) and any(related):
        regions = [form for form in forms if isinstance(form, Region)]
        joined = _combined(tokens, regions, alternatives=bool(signs & _OR), both=bool(signs & _AND))
        if joined is not None:
            return joined
    named = {
        form.name if isinstance(form, Equation) else form.variable
        for form in forms
        if isinstance(form, Equation | Region)
    }
    if signs & _OR and len(named - {""}) > 1:
        return Relation(tuple(tokens))  # x = 1 or y = 2 is not x = 1 and y = 2
    if signs & {r"\land", r"\lor"} and all(len(part) == 1 and part[0].is_name for part in parts):
        return Relation(tuple(tokens))  # p and q as statements
    items: list[Form] = []
    for form in forms:
        items += form.items if isinstance(form, Items) and form.kind == "list" else [form]
    return Items(tuple(tokens), "list", tuple(items))


def _mixed(parts: list[list[Token]]) -> list[Token] | None:
    """3 and 1/2 as 3 1/2."""
    if len(parts) != 2 or len(parts[0]) != 1 or not parts[0][0].text.isdecimal():
        return None
    second = parts[1]
    words = [_lower(token) for token in second if token.is_name]
    if len(words) == len(second) and (number := vocabulary.spelled_number(words)) is not None and 0 < number < 1:
        second = [Token(str(number.numerator), True), Token("/"), Token(str(number.denominator))]
    text = render(second)
    number = read_number(text)
    if isinstance(number, Fraction) and 0 < number < 1 and ("/" in text or "frac" in text):
        return [*parts[0], second[0]._replace(gap=True), *second[1:]]
    return None


def _plus_minus(tokens: Sequence[Token], again: _Again) -> Form | None:
    r"""a \pm b as a + b and a - b. Several `\pm` have any signs (`\pm 1\pm 2` are four numbers, `(\pm 1,\pm 1)`
    four points), but the same ones beside an `\mp`, which has the opposite sign, on both sides of an equation, and in
    `(1\pm a, 2\pm b)`."""
    signs = [token.text for token in tokens if token.text in (r"\pm", r"\mp")]
    if not signs or _at_top(tokens, {"<", ">", r"\le", r"\ge"}):
        return None
    equality = _at_top(tokens, {"="})
    both_sides = bool(equality) and any(token.text == r"\pm" for token in tokens[: equality[-1]])
    added = any(token.text == r"\pm" and before.text not in "({=," for before, token in pairwise(tokens))
    related = both_sides or r"\mp" in signs or (added and any(token.text == "," for token in tokens))
    free = not related and len(signs) <= _FREE_SIGNS
    forms = []
    for chosen in product("+-", repeat=len(signs)) if free else [[sign] * len(signs) for sign in "+-"]:
        given = iter(chosen)
        changed = [token._replace(text=_signed(token.text, given)) for token in tokens]
        leading = [
            token
            for index, token in enumerate(changed)
            if not (token.text == "+" and (index == 0 or changed[index - 1].text in ("=", "(", "{", ",")))
        ]
        forms.append(_as_difference(again(leading)))
    if len(forms) == 2 and all(isinstance(form, Equation) and not form.sides for form in forms):
        first, second = forms
        return Equation(
            tuple(tokens), first.name, Items(tuple(tokens), "list", (first.value, second.value)), first.simple
        )
    return Items(tuple(tokens), "list", tuple(forms))


_FREE_SIGNS = 3


def _signed(text: str, signs: Iterator[str]) -> str:
    if text not in (r"\pm", r"\mp"):
        return text
    sign = next(signs)
    return sign if text == r"\pm" else "-" if sign == "+" else "+"


def _as_difference(form: Form) -> Form:
    r"""3-1 of 3 \pm 1, which is no score."""
    if isinstance(form, Equation):
        return replace(form, value=_as_difference(form.value))
    return quantity(form.tokens) if isinstance(form, Joined) else form


# ---- relations -----------------------------------------------------------------------------------------------------

_SIMPLE_NAME = re.compile(
    r"(?!e\^)(?:\\?[A-Za-z]+|\\text\{[^{}]*\})(?:_\{[^{}]*\}|'|\([^()]*\)|\^\{\(?(?:-1|[a-z]\)?)\})*(?:[+-](?:[0-9]*\\?[A-Za-z]+)(?:_\{[^{}]*\})?)*"
)
_NAME_ALONE = re.compile(r"(?:\\?[A-Za-z]+|\\text\{[^{}]*\})(?:_\{[^{}]*\})?")
_FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le", r"\ne": r"\ne", "=": "="}
_INFINITIES = {r"\infty": 1, r"+\infty": 1, r"-\infty": -1}


_COMPARED = {
    "greater than or equal to": r"\ge", "less than or equal to": r"\le", "more than or equal to": r"\ge",
    "at least": r"\ge", "at most": r"\le", "no less than": r"\ge", "no more than": r"\le", "not equal to": r"\ne",
    "greater than": ">", "more than": ">", "larger than": ">", "less than": "<", "smaller than": "<",
}  # fmt: skip


def _in_words(tokens: Sequence[Token], again: _Again) -> Form | None:
    """x is at least 2, as x >= 2."""
    if len(tokens) < 4 or len(tokens[0].text) > 1 or not tokens[0].is_name:
        return None
    start = 2 if _lower(tokens[1]) in ("is", "must") else 1
    end = start
    while end < len(tokens) and end < start + 6 and tokens[end].is_name and len(tokens[end].text) > 1:
        end += 1
    sign = _COMPARED.get(" ".join(map(_lower, tokens[start:end])))
    return again([tokens[0], Token(sign), *tokens[end:]]) if sign and end < len(tokens) else None


def _relation(tokens: Sequence[Token], again: _Again) -> Form | None:
    implied = _at_top(tokens, {r"\Rightarrow", r"\implies", r"\Longrightarrow", r"\therefore"})
    if implied and implied[-1] + 1 < len(tokens):
        # A step of a solution, such as 2x = 4 => x = 2, and no statement of logic, such as p => q.
        steps = split(tokens, implied)[:-1]
        derived = all(not step or _at_top(step, _RELATIONS) for step in steps)
        return again(tokens[implied[-1] + 1 :]) if derived else Relation(tuple(tokens))
    near = _at_top(tokens, {r"\approx", r"\sim"})
    if not near and (alike := _at_top(tokens, {r"\cong"})) and decimal_value(tokens[alike[-1] + 1 :]) is not None:
        near = alike  # figures are congruent, numbers are near
    if near:
        parts = split(tokens, near)
        if _changes(parts[0]):
            return Relation(tuple(tokens))
        if all(parts) and len(parts) == 2:
            if _NAME_ALONE.fullmatch(render(parts[1])) and decimal_value(parts[1]) is None:
                parts = parts[::-1]  # 2.7 \approx x
            return Approximation(tuple(tokens), tuple(again(part) for part in parts))
        return Relation(tuple(tokens))
    at = _at_top(tokens, _RELATIONS)
    if not at:
        return None
    signs = [tokens[i].text for i in at]
    parts = split(tokens, at)
    if _changes(parts[0]):
        return Relation(tuple(tokens))
    if not all(parts):
        return again([*parts[0], *parts[1]]) if signs == ["="] else Relation(tuple(tokens))
    if set(signs) <= {"=", r"\equiv"}:
        values = [decimal_value(part) for part in parts[-2:]]
        if None not in values and not _same_number(*parts[-2:]):
            return Relation(tuple(tokens))  # 5 = 7
        if len(parts) == 2 and values[0] is not None and values[1] is None and _NAME_ALONE.fullmatch(render(parts[1])):
            parts = parts[::-1]  # 5 = x
        name = render(parts[0])
        simple = (
            _SIMPLE_NAME.fullmatch(name) is not None or decimal_value(parts[0]) is not None or _tuple_of_names(name)
        )
        value = again(parts[-1])
        between = [again(part) for part in parts[1:-1] if not _same_number(part, parts[-1])]
        sides = (again(parts[0]), *between, value) if between else ()
        return Equation(tuple(tokens), name, value, simple, sides)
    if signs == [r"\in"]:
        form = again(parts[1])
        name = render(parts[0])
        if isinstance(form, Region):
            return replace(form, tokens=tuple(tokens), variable=name)
        return Equation(tuple(tokens), name, form, _SIMPLE_NAME.fullmatch(name) is not None)
    return _inequality(tokens, parts, signs, again) or Relation(tuple(tokens))


def _changes(name: Sequence[Token]) -> bool:
    """Whether the words before a sign deny or bound what stands after it."""
    words = [_lower(token) for token in name if token.is_name]
    return bool(name) and name[-1].is_name and vocabulary.changes(words)


_SLACK = Decimal("1e-9")


def _same_number(first: Sequence[Token], second: Sequence[Token]) -> bool:
    values = decimal_value(first), decimal_value(second)
    return None not in values and abs(values[0] - values[1]) <= max(abs(values[0]), 1) * _SLACK


def _tuple_of_names(name: str) -> bool:
    return re.fullmatch(r"\([a-z](?:,[a-z])+\)", name) is not None


def _inequality(tokens: Sequence[Token], parts: list[list[Token]], signs: list[str], again: _Again) -> Region | None:
    """x < 2, 2 < x, 1 < x <= 2, x != 3, as the numbers for which it holds."""
    names = [render(part) for part in parts]
    # the side that is a variable
    variables = [
        i
        for i, name in enumerate(names)
        if re.fullmatch(r"\\?[A-Za-z]+(?:_\{[^{}]*\})?|f\(x\)", name)
        and name not in _INFINITIES
        and decimal_value(parts[i]) is None
    ]
    if len(parts) == 2:
        if not variables:
            return _absolute(tokens, parts, signs[0])
        index = 0 if 0 in variables else 1
        sign = signs[0] if index == 0 else _FLIPPED.get(signs[0], "")
        bound, limit = again(parts[1 - index]), names[1 - index]
        if not isinstance(bound, Quantity) or bound.changed:
            return None
        if names[index] in (token.text for token in parts[1 - index]):
            return None
        low, high = (None, bound) if sign in ("<", r"\le") else (bound, None)
        is_open = sign in ("<", ">")
        if sign == r"\ne":
            intervals = (Interval(None, bound, True, True), Interval(bound, None, True, True))
        elif limit in _INFINITIES:
            intervals = (Interval(None, None, True, True),)
        elif sign in _FLIPPED and sign != "=":
            intervals = (Interval(low, high, low is None or is_open, high is None or is_open),)
        else:
            return None
        return Region(tuple(tokens), intervals, (), names[index])
    if len(parts) != 3 or 1 not in variables or not ({*signs} <= {"<", r"\le"} or {*signs} <= {">", r"\ge"}):
        return None
    ends = [(names[0], again(parts[0]), signs[0] in "<>"), (names[2], again(parts[2]), signs[1] in "<>")]
    (low_text, low, open_low), (high_text, high, open_high) = ends if signs[0] in ("<", r"\le") else ends[::-1]
    if not isinstance(low, Quantity) or not isinstance(high, Quantity):
        return None
    interval = _interval(low_text, low, high_text, high, open_low, open_high)
    return Region(tuple(tokens), (interval,), (), names[1])


def _absolute(tokens: Sequence[Token], parts: list[list[Token]], sign: str) -> Region | None:
    """|x - a| < b as the numbers between a - b and a + b, with > as those outside."""
    if parts[1][0].text == "|":
        parts, sign = parts[::-1], _FLIPPED.get(sign, "")
    inside, radius = parts[0][1:-1], tuple(parts[1])
    if (
        len(inside) == 0
        or parts[0][0].text != "|"
        or parts[0][-1].text != "|"
        or sign not in ("<", ">", r"\le", r"\ge")
    ):
        return None
    shift = tuple(inside[1:])
    if (
        not re.fullmatch("[a-z]", inside[0].text)
        or (shift and shift[0].text not in "+-")
        or decimal_value(radius) is None
    ):
        return None
    if shift and decimal_value(shift) is None:
        return None
    centre = (Token("-"), Token("("), *shift, Token(")")) if shift else ()
    low = Quantity(ends := (*centre, Token("-"), Token("("), *radius, Token(")")), ends)
    high = Quantity(ends := (*centre, Token("+"), Token("("), *radius, Token(")")) if shift else radius, ends)
    low, high = (quantity(end.tokens) if not shift and len(radius) == 1 and end is high else end for end in (low, high))
    is_open = sign in ("<", ">")
    intervals = (Interval(low, high, is_open, is_open),)
    if sign in (">", r"\ge"):
        intervals = (Interval(None, low, True, is_open), Interval(high, None, is_open, True))
    return Region(tuple(tokens), intervals, (), inside[0].text)


def _interval(low_text: str, low: Form, high_text: str, high: Form, open_low: bool, open_high: bool) -> Interval:
    below, above = _INFINITIES.get(low_text) == -1, _INFINITIES.get(high_text) == 1
    return Interval(None if below else low, None if above else high, open_low, open_high)


def _combined(tokens: Sequence[Token], regions: Sequence[Region], *, alternatives: bool, both: bool) -> Region | None:
    """The union of inequalities joined by `or`, the intersection of two joined by `and` or a comma."""
    names = {region.variable for region in regions if region.variable}
    intervals = tuple(interval for region in regions for interval in region.intervals)
    points = tuple(point for region in regions for point in region.points)
    variable = names.pop() if len(names) == 1 else ""
    if names:
        return None
    if alternatives:
        return Region(tuple(tokens), intervals, points, variable)
    if len(intervals) != 2 or points:
        return None
    first, second = intervals
    if first.low is None and second.high is None:
        first, second = second, first
    if first.low is None or first.high is not None or second.low is not None or second.high is None:
        return None
    low, high = (decimal_value(end.tokens) for end in (first.low, second.high))
    if low is not None and high is not None and low >= high:
        return None if both else Region(tuple(tokens), intervals, (), variable)
    return Region(tuple(tokens), (Interval(first.low, second.high, first.open_low, second.open_high),), (), variable)


# ---- brackets ------------------------------------------------------------------------------------------------------


def as_region(form: Form) -> Region | None:
    """A region: itself, the open interval of a pair, or the points of a set."""
    if isinstance(form, Region):
        return form
    if isinstance(form, Items) and form.kind == "tuple" and len(form.items) == 2 and not form.name:
        low, high = form.items
        return Region(form.tokens, (_interval(low.text, low, high.text, high, True, True),))
    if isinstance(form, Items) and form.kind == "set":
        return Region(form.tokens, (), form.items)
    return None


def _union(tokens: Sequence[Token], again: _Again) -> Form | None:
    without = _at_top(tokens, {r"\setminus", "except"})
    if not without and [token.text for token in tokens[:3]] == [r"\mathbb{R}", "-", r"\{"]:
        without = [1]
    if len(without) == 1 and 0 < without[0] < len(tokens) - 1:
        base, removed = again(tokens[: without[0]]), again(tokens[without[0] + 1 :])
        if tokens[without[0]].is_name:
            removed = removed.value if isinstance(removed, Equation) else removed
            removed = removed if isinstance(removed, Items) else Items(removed.tokens, "set", (removed,))
        values = [(decimal_value(item.tokens), item) for item in removed.items] if isinstance(removed, Items) else []
        everything = isinstance(base, Region) and base.intervals == (Interval(None, None, True, True),)
        if not everything or not values or any(value is None for value, _ in values):
            return None
        ends = [None, *(item for _, item in sorted(values, key=lambda pair: pair[0])), None]
        intervals = tuple(Interval(low, high, True, True) for low, high in pairwise(ends))
        return Region(tuple(tokens), intervals, (), base.variable)
    at = _at_top(tokens, {r"\cup", "U"} if any(token.text in ("[", "(") for token in tokens) else {r"\cup"})
    if not at:
        return None
    regions = [as_region(again(part)) if part else None for part in split(tokens, at)]
    if any(region is None for region in regions):
        return None
    intervals = tuple(interval for region in regions for interval in region.intervals)
    return Region(tuple(tokens), intervals, tuple(point for region in regions for point in region.points))


def _out_of(tokens: Sequence[Token], again: _Again) -> Form | None:
    """5 out of 6, as 5/6."""
    if [_lower(token) for token in tokens[1:3]] != ["out", "of"] or len(tokens) != 4:
        return None
    if not (tokens[0].text.isdecimal() and tokens[3].text.isdecimal()):
        return None
    return again([tokens[0], Token("/"), tokens[3]])


def _outward(tokens: Sequence[Token], again: _Again) -> Form | None:
    """]1,2[ and the like: a bracket that looks outward leaves its end out."""
    first, last = tokens[0].text, tokens[-1].text
    if len(tokens) < 5 or not (first == "]" or last == "[") or first not in "[](" or last not in "[])":
        return None
    inside = list(tokens[1:-1])
    marks = _at_top(inside, {",", ";"})
    if len(marks) != 1 or any(token.text in "[]" for token in inside):
        return None
    low, high = (again(part) for part in split(inside, marks))
    interval = _interval(low.text, low, high.text, high, first in "](", last in "[)")
    return Region(tuple(tokens), (interval,))


def _bracketed(tokens: Sequence[Token], again: _Again) -> Form | None:
    if len(tokens) == 1 and tokens[0].text == r"\emptyset":
        return Items(tuple(tokens), "set", ())
    if len(tokens) == 1 and tokens[0].text == r"\mathbb{R}":
        return Region(tuple(tokens), (Interval(None, None, True, True),))
    first, last = tokens[0].text, tokens[-1].text
    if not enclosed(tokens):
        return None
    inside = list(tokens[1:-1])
    level = depths(inside)
    marks = [i for i, token in enumerate(inside) if token.text in (",", ";") and not level[i]]
    if any(inside[i].text == ";" for i in marks) and first != r"\{":
        marks = [i for i in marks if inside[i].text == ";"]  # (1,5; 2): commas are decimal
    if first == r"\{":
        bars = [i for i, token in enumerate(inside) if token.text in ("|", ":", r"\mid") and not level[i]]
        if bars and 0 < bars[0] < len(inside) - 1:
            condition = again(inside[bars[0] + 1 :])
            return _solutions(tokens, inside[: bars[0]], condition)
    items = [again(part) for part in split(inside, marks)] if inside else []
    if first == r"\{" and last == r"\}":
        flat = [
            item
            for form in items
            for item in (form.items if isinstance(form, Items) and form.kind == "list" else [form])
        ]
        return Items(tuple(tokens), "set", tuple(flat))
    if not marks:
        if not inside or first in (r"\lfloor", r"\lceil", "{", r"\langle"):
            return None
        if first == "(" and last == ")" and not is_phrase(inside):
            return items[0] if not isinstance(items[0], Quantity) or items[0].words or items[0].unit else None
        return None
    if first == r"\langle":
        return Items(tuple(tokens), "vector", tuple(items))
    if (first, last) == ("(", ")"):
        pair = len(items) == 2 and (items[0].text in _INFINITIES or items[1].text in _INFINITIES)
        items_read = Items(tuple(tokens), "tuple", tuple(items))
        return as_region(items_read) if pair else items_read
    if {first, last} <= {"(", ")", "[", "]"}:
        if len(items) == 2 and not (first == "[" and any(isinstance(item, Items | Region) for item in items)):
            (low, high), opens = items, (first == "(", last == ")")
            return Region(tuple(tokens), (_interval(low.text, low, high.text, high, *opens),))
        if first == "[" and last == "]":
            rows = [_row(item) for item in items]
            if all(row is not None for row in rows) and len({len(row) for row in rows}) == 1:
                return Matrix(tuple(tokens), tuple(rows))
            return Items(tuple(tokens), "array", tuple(items))
    return None


def _solutions(tokens: Sequence[Token], head: Sequence[Token], condition: Form) -> Form:
    """The set of numbers for which a condition holds, if the head is their bare name, real where it says what it is."""
    at = _at_top(head, {r"\in"})
    name, domain = render(head[: at[0]] if at else head), render(head[at[0] + 1 :]) if at else ""
    if not _SIMPLE_NAME.fullmatch(name) or domain not in ("", r"\mathbb{R}"):
        return Relation(tuple(tokens))
    if isinstance(condition, Region):
        return condition if condition.variable in ("", name) else Relation(tuple(tokens))
    parts = condition.items if isinstance(condition, Items) and condition.kind == "list" else (condition,)
    equations = [part for part in parts if isinstance(part, Equation)]
    if len(equations) == len(parts) and {part.name for part in equations} == {name}:
        return Items(tuple(tokens), "set", tuple(part.value for part in equations))
    return Relation(tuple(tokens))


def _row(form: Form) -> tuple[Form, ...] | None:
    """The entries of [1,2] or [1,2,3] inside of a matrix."""
    if isinstance(form, Items) and form.kind == "array":
        return form.items
    if isinstance(form, Region) and len(form.intervals) == 1 and not form.points:
        only = form.intervals[0]
        if only.low is not None and only.high is not None and not (only.open_low or only.open_high):
            return only.low, only.high
    return None


def _environment(tokens: Sequence[Token], again: _Again) -> Form | None:
    texts = [token.text for token in tokens]
    transposed = texts[-4:-1] in (["^", "{", "T"], ["^", "{", r"\top"]) and texts[-1] == "}"
    if transposed:
        tokens, texts = tokens[:-4], texts[:-4]
        form = again(tokens)
        if isinstance(form, Items) and form.kind in ("vector", "tuple", "array"):
            return replace(form, kind="vector", name="column")
        region = form if isinstance(form, Region) else None
        row = _row(region) if region else None
        return Items(tuple(tokens), "vector", row, "column") if row else None
    if texts and texts[0] in "([" and texts[-1] in ")]" and texts[1:2] and texts[1].startswith(r"\begin{"):
        tokens, texts = tokens[1:-1], texts[1:-1]
    start = ENVIRONMENT.fullmatch(texts[0]) if texts else None
    if start is None or texts[-1] != rf"\end{{{start.group(1)}}}" or not texts[0].startswith(r"\begin"):
        return None
    name, inside = start.group(1), list(tokens[1:-1])
    level = depths(inside)
    if any(token.text.startswith(r"\begin{") for token in inside) or name == "vmatrix":
        return None
    lines = split(inside, [i for i, token in enumerate(inside) if token.text == r"\\" and not level[i]])
    rows = [
        [_trimmed(cell) for cell in split(line, [i for i, t in enumerate(line) if t.text == "&"])]
        for line in lines
        if line
    ]
    if name == "cases":
        cells = [tuple(again(_condition(cell)) for cell in row if cell) for row in rows]
        if all(len(row) == 1 for row in cells):
            return Items(tuple(tokens), "list", tuple(row[0] for row in cells))
        return Cases(tuple(tokens), tuple(cells))
    forms = tuple(tuple(again(cell) for cell in row) for row in rows)
    if not forms or len({len(row) for row in forms}) != 1:
        return None
    if len(forms) == 1 or len(forms[0]) == 1:
        items = forms[0] if len(forms) == 1 else tuple(row[0] for row in forms)
        return Items(tuple(tokens), "vector", items, "row" if len(forms) == 1 else "column")
    return Matrix(tuple(tokens), forms)


def _condition(cell: list[Token]) -> list[Token]:
    """A cell of a definition by cases without `if`."""
    return cell[1:] if cell and _lower(cell[0]) in ("if", "for", "when", "where") else cell


def _point(tokens: Sequence[Token], again: _Again) -> Form | None:
    """P(1,2)."""
    if len(tokens) > 4 and len(tokens[0].text) == 1 and tokens[0].text.isupper() and enclosed(tokens[1:]):
        form = again(tokens[1:])
        if isinstance(form, Items) and form.kind == "tuple":
            return replace(form, tokens=tuple(tokens), name=tokens[0].text)
    return None


_AXES = {"i": 0, "j": 1, "k": 2}
_ARROWS = {r"\hat", r"\vec", r"\widehat", r"\overrightarrow"}


def components(tokens: Sequence[Token], size: int) -> list[Form] | None:
    r"""The components of a sum of unit vectors, such as `-\mathbf{i}+2\hat{k}`; None for anything else.

    Markup is gone, so a lone `3i` is a complex number; sums of it need another axis or a mark.
    """
    level = depths(tokens)
    starts = [i for i, token in enumerate(tokens) if i and not level[i] and token.text in ("+", "-")]
    by_axis: dict[int, Form] = {}
    marked = False
    for start, end in pairwise([0, *starts, len(tokens)]):
        term = list(tokens[start:end])
        hat = len(term) > 3 and term[-4].text in _ARROWS and term[-1].text == "}"
        axis = _AXES.get(term[-2 if hat else -1].text, size) if term else size
        if axis >= size or axis in by_axis:
            return None
        factor = term[: -4 if hat else -1]
        factor = factor[1:] if factor and factor[0].text == "+" else factor
        if factor and factor[-1].text in (r"\cdot", r"\times", "*"):
            factor = factor[:-1]
        if not factor or [token.text for token in factor] == ["-"]:
            factor = [*factor, Token("1")]
        marked = marked or hat or axis > 0
        by_axis[axis] = read(factor)
    return [by_axis.get(axis, read([Token("0")])) for axis in range(size)] if marked else None


def _ratio(tokens: Sequence[Token], again: _Again) -> Form | None:
    at = _at_top(tokens, {":"}) or [i for i in _at_top(tokens, {"to"}) if tokens[i].is_name]
    parts = split(tokens, at)
    if not at or not all(parts):
        return None
    return Proportion(tuple(tokens), tuple(again(part) for part in parts))
