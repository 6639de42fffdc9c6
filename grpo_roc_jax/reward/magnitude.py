r"""How large an expression is, from its form: what the symbolic library would need minutes for is refused before it.

A tower of powers, the factorial of a large number, a sum over a billion terms, a power of a power of a sum and brackets
a hundred deep cost the one who writes them a few characters. The reader below walks the tokens once, with decimals of
28 digits whose exponents cannot overflow, and stops at the first part that is too large. Expressions in variables have
no value; the largest number in them counts instead, and the terms that they have when they are multiplied out.
"""

import math
from collections.abc import Sequence
from decimal import Context, Decimal, DecimalException, localcontext
from typing import NamedTuple

from grpo_roc_jax.reward.latex import Token

MAX_DIGITS = 4000
"""Digits of the largest number that an expression may contain or amount to; `2^{10000}` has 3,011."""
MAX_TERMS = 10_000
"""Terms of a sum or product over an index, and the largest power of an expression in variables."""
MAX_EXPANDED = 500
"""Terms of an expression that is multiplied out; the library needs about a second for so many."""
MAX_EXPANDED_FUNCTIONS = 25
"""The same where functions such as the sine are multiplied, and of sums in exponents, of arguments of functions and of
what is summed over an index without known bounds: these take the library longer."""
MAX_FACTORS = 50
"""Factors of a binomial coefficient in variables."""
MAX_SUMMED = 20_000
"""Terms of a sum over an index, times the expanded terms of what is summed."""
MAX_DEPTH = 12
"""Brackets, fractions, roots and powers inside one another; the library's parser takes seconds for 20."""
MAX_DEPTH_FUNCTIONS = 6
"""Functions such as the sine inside one another."""
MAX_OF_GAMMA = 1500
"""Largest number in an argument of the functions gamma and zeta."""
MAX_OF_GCD = Decimal("1e300")
"""Largest number of which a divisor or multiple is computed."""
MAX_DETERMINANT = 5
"""Rows of a determinant in variables."""

_CONTEXT = Context(prec=28, Emax=10**17, Emin=-(10**17), traps=[])
_PI, _E = Decimal("3.141592653589793238462643383"), Decimal("2.718281828459045235360287471")
_FUNCTIONS = {
    "sin": math.sin, "cos": math.cos, "tan": math.tan, "arcsin": math.asin, "arccos": math.acos, "arctan": math.atan,
    "sinh": math.sinh, "cosh": math.cosh, "tanh": math.tanh, "cot": lambda x: 1 / math.tan(x),
    "sec": lambda x: 1 / math.cos(x), "csc": lambda x: 1 / math.sin(x),
}  # fmt: skip
_SIGNS = {
    "+", "-", "*", "/", "=", ",", ";", "&", ":", "<", ">", r"\times", r"\cdot", r"\div", r"\pm", r"\mp", r"\le",
    r"\ge", r"\ne", r"\\", r"\to", r"\in", r"\cup", r"\cap", r"\approx", r"\equiv", r"\sim", r"\Rightarrow",
}  # fmt: skip


_SLOW = {*_FUNCTIONS, "ln", "log", "exp"}


class TooLarge(Exception):
    """The expression is not to be computed; the text says why."""


def too_large(tokens: Sequence[Token]) -> str | None:
    """Why an expression is refused; None if nothing in it is large."""
    try:
        with localcontext(_CONTEXT):
            _Reader(tokens).everything()
    except TooLarge as error:
        return str(error)
    return None


def value(tokens: Sequence[Token]) -> Decimal | None:
    """The value of an expression of numbers to about 28 digits (15 with functions); None for any other text."""
    reader = _Reader(tokens)
    try:
        with localcontext(_CONTEXT):
            result, *_ = reader.sum()
    except TooLarge:
        return None
    return result if reader.at == len(reader.texts) and result is not None and result.is_finite() else None


class _Expansion(NamedTuple):
    """An expression when it is multiplied out, from above: a polynomial in its names, which are variables, roots and
    functions."""

    terms: int = 1
    degree: int = 0
    names: frozenset[str] = frozenset()

    def plus(self, other: "_Expansion") -> "_Expansion":
        return _checked(self.terms + other.terms, max(self.degree, other.degree), self.names | other.names)

    def times(self, other: "_Expansion", *, divides: bool = False) -> "_Expansion":
        terms, degree, names = self.terms * other.terms, self.degree + other.degree, self.names | other.names
        if divides:  # nothing is collected over a denominator
            names |= {f"/{len(names)}"} if other.terms > 1 else set()
            return _Expansion(_few(terms, names), degree, names)
        return _checked(terms, degree, names)

    def power(self, exponent: int) -> "_Expansion":
        terms = math.comb(exponent + self.terms - 1, self.terms - 1) if exponent <= MAX_TERMS else MAX_TERMS
        return _checked(terms if self.terms > 1 else 1, self.degree * exponent, self.names)


def _checked(terms: int, degree: int, names: frozenset[str]) -> _Expansion:
    """Equal monomials are collected: of k names there are d + k over k up to the degree d."""
    return _Expansion(_few(min(terms, math.comb(degree + len(names), len(names))), names), degree, names)


def _few(terms: int, names: frozenset[str]) -> int:
    if terms > (limit := MAX_EXPANDED_FUNCTIONS if names & _SLOW else MAX_EXPANDED):
        raise TooLarge(f"an expression of more than {limit} terms when it is multiplied out")
    return terms


def _short(expansion: _Expansion, what: str) -> None:
    limit = MAX_EXPANDED_FUNCTIONS // (5 if expansion.names & _SLOW else 1)
    if expansion.terms > limit:
        raise TooLarge(f"{what} of more than {limit} terms when it is multiplied out")


_Size = tuple[Decimal | None, Decimal, _Expansion]
"""(the value or None, the largest number in the expression, its terms)."""
_Pair = tuple[Decimal | None, Decimal]
"""The first two of a size."""
_NUMBER = _Expansion()
_BARS = ("|", r"\|")


class _Reader:
    """Reads sums of products of powers, by recursive descent over the texts of tokens."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self.texts = [token.text for token in tokens]
        self.at = 0
        self.depth = 0
        self.bars = 0
        """Absolute values that are open."""
        self.functions = 0
        """Functions that are open."""

    def peek(self) -> str:
        return self.texts[self.at] if self.at < len(self.texts) else ""

    def everything(self) -> None:
        """All parts of a text, whatever stands between them."""
        while self.at < len(self.texts):
            before = self.at
            self.sum()
            self.at += self.at == before

    def sum(self) -> _Size:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise TooLarge(f"more than {MAX_DEPTH} brackets inside one another")
        total, largest, terms = self.product()
        while (sign := self.peek()) in ("+", "-"):
            self.at += 1
            term, size, more = self.product()
            largest, terms = max(largest, size), terms.plus(more)
            total = None if total is None or term is None else total + (term if sign == "+" else -term)
        self.depth -= 1
        return total, largest, terms

    def product(self) -> _Size:
        negative = False
        while self.peek() in ("+", "-"):
            negative ^= self.peek() == "-"
            self.at += 1
        total, largest, terms = self.power()
        while True:
            text = self.peek()
            divides = text in ("/", r"\div")
            if divides or text in ("*", r"\times", r"\cdot"):
                self.at += 1
                if self.peek() == "-":
                    negative, self.at = not negative, self.at + 1
            elif text in _BARS:
                if self.bars or not self.is_closed():
                    break
            elif text in _SIGNS or text in ("", ")", "]", "}", r"\}", "^", "_", "!") or text[:5] == r"\end{":
                break
            factor, size, more = self.power()
            largest, terms = max(largest, size), terms.times(more, divides=divides)
            if total is not None and factor is not None:
                total = _bounded(total / factor if divides else total * factor) if factor or not divides else None
            else:
                total = None
        return (-total if negative and total is not None else total), largest, terms

    def power(self) -> _Size:
        """A number, variable, bracket or function with its powers, factorials and subscripts."""
        base, largest, terms = self.atom()
        while (text := self.peek()) in ("^", "_", "!", "°", "%", "'"):
            self.at += 1
            if text == "!":
                base, largest = _factorial(base, largest)
            elif text == "^":
                exponents = [self.argument()]
                while self.peek() == "^":  # 9^9^9 is read from the right, as the larger of its two meanings
                    self.at += 1
                    exponents.append(self.argument())
                for _, _, exponent_terms in exponents:
                    _short(exponent_terms, "an exponent")
                exponent, size, _ = exponents.pop()
                while exponents:
                    inner, inner_size, _ = exponents.pop()
                    exponent, size = _power(inner, inner_size, exponent, size)
                base, largest = _power(base, largest, exponent, size)
                if exponent is not None and terms.names and abs(exponent) <= MAX_TERMS:
                    terms = terms.power(max(1, math.ceil(abs(exponent))))
            elif text == "_":
                base, start = None, self.at
                self.argument()
                index = "".join(self.texts[start : self.at])
                terms = terms._replace(names=frozenset(f"{name}_{index}" for name in terms.names))
            elif base is not None and text != "'":
                base *= _PI / 180 if text == "°" else Decimal("0.01")
        return base, largest, terms

    def is_closed(self) -> bool:
        """Whether the bar here has another one before the brackets around it end."""
        depth = 0
        for text in self.texts[self.at + 1 :]:
            depth += text in ("(", "[", "{", r"\{")
            depth -= text in (")", "]", "}", r"\}")
            if depth < 0:
                return False
            if text in _BARS and not depth:
                return True
        return False

    def argument(self) -> _Size:
        """A group in braces, or the next part alone."""
        if self.peek() != "{":
            return self.atom()
        return self.bracket("}")

    def bracket(self, end: str) -> _Size:
        self.at += 1
        total, largest, terms = self.sum()
        single = self.peek() == end
        while self.peek() not in (end, ""):  # a list or a relation
            before = self.at
            _, size, more = self.sum()
            largest, terms = max(largest, size), terms.plus(more)
            self.at += self.at == before
        self.at += 1
        return (total if single else None), largest, terms

    def atom(self) -> _Size:
        text = self.peek()
        self.at += 1
        if text and text[-1].isdecimal() and text.isascii():
            if len(text) > MAX_DIGITS:
                raise TooLarge(f"a number of more than {MAX_DIGITS} digits")
            number = Decimal(text) if text.count(".") < 2 else Decimal(1)
            return number, abs(number), _NUMBER
        if text in ("(", "[", "{", r"\{", r"\lfloor", r"\lceil"):
            self.at -= 1
            ends = {"(": ")", "[": "]", "{": "}", r"\{": r"\}", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil"}
            number, largest, terms = self.bracket(ends[text])
            if text in (r"\lfloor", r"\lceil") and number is not None:
                number = number.to_integral_value("ROUND_FLOOR" if text == r"\lfloor" else "ROUND_CEILING")
            return number, largest, terms
        if text in _BARS and self.at <= len(self.texts):
            self.at -= 1
            if not self.is_closed():
                self.at += 1
                return None, Decimal(1), _NUMBER
            self.bars += 1
            _, largest, terms = self.bracket(text)
            self.bars -= 1
            return None, largest, terms._replace(names=terms.names | {"|"})
        if text[:7] == r"\begin{":
            before = self.texts[max(0, self.at - 3) : self.at - 1]
            return self.rows(determinant=text == r"\begin{vmatrix}" or r"\det" in before or before[-1:] == ["|"])
        if text in (r"\Gamma", r"\gcd", r"\lcm", r"\zeta") and self.peek() == "(":
            number, largest, terms = self.bracket(")")
            if largest > (MAX_OF_GAMMA if text in (r"\Gamma", r"\zeta") else MAX_OF_GCD):
                raise TooLarge(f"{text} of a large number")
            return None, largest, terms._replace(names=terms.names | {text})
        if text in (r"\frac", r"\binom"):
            (over, first, above), (under, second, below) = self.argument(), self.argument()
            if text == r"\binom":
                if over is None and under is not None and abs(under) > MAX_FACTORS:
                    raise TooLarge(f"a binomial coefficient of more than {MAX_FACTORS} factors in variables")
                degree = int(abs(under)) if over is None and under is not None else 1
                return *_binomial(over, under, max(first, second)), above.power(max(1, degree)).times(below)
            ratio = over / under if over is not None and under else None
            terms = above.times(below, divides=True)
            return ratio, max(first, second, Decimal(0) if ratio is None else abs(ratio)), terms
        if text == r"\sqrt":
            root = self.bracket("]")[0] if self.peek() == "[" else Decimal(2)
            number, largest, terms = self.argument()
            exact = number is not None and number >= 0 and root is not None and root > 0
            root_of = terms._replace(degree=max(1, terms.degree), names=terms.names | {f"root {number}"})
            return (_raised(number, 1 / root) if exact else None), largest, root_of
        if text in (r"\sum", r"\prod"):
            return self.series()
        if text == r"\pi":
            return _PI, _PI, _Expansion(1, 1, frozenset([text]))
        if text == "e":
            return _E, _E, _Expansion(1, 1, frozenset([text]))
        if text == r"\operatorname" or text[:1] != "\\" or text[1:] not in _SLOW:
            return None, Decimal(1), _Expansion(1, 1, frozenset([text]))
        return self.function(text[1:])

    def function(self, name: str) -> _Size:
        base = power = None
        while self.peek() in ("^", "_"):
            mark, self.at = self.peek(), self.at + 1
            number, *_ = self.argument()
            base, power = (number, power) if mark == "_" else (base, number if number is not None else Decimal(1))
        self.functions += 1
        if self.functions > MAX_DEPTH_FUNCTIONS:
            raise TooLarge(f"more than {MAX_DEPTH_FUNCTIONS} functions inside one another")
        number, largest, inside = self.bracket(")") if self.peek() == "(" else self.power()
        self.functions -= 1
        _short(inside, "an argument of a function")
        terms = _Expansion(1, 1, frozenset([name, *inside.names]))
        if power is not None and abs(power) <= MAX_TERMS:
            terms = terms.power(max(1, math.ceil(abs(power))))
        if power not in (None, 1) or number is None or abs(number) > 1000:
            return None, largest, terms
        try:
            if name in ("ln", "log"):
                result = number.ln() / (base.ln() if base is not None else Decimal(10 if name == "log" else _E).ln())
            else:
                result = Decimal(_FUNCTIONS[name](float(number)))
        except (ArithmeticError, ValueError, KeyError, DecimalException):
            return None, largest, terms
        return (result if result.is_finite() else None), largest, terms

    def series(self) -> _Size:
        bounds: dict[str, Decimal | None] = {}
        largest, index = Decimal(1), ""
        multiplies = self.texts[self.at - 1] == r"\prod"
        while self.peek() in ("_", "^"):
            mark = self.peek()
            start = self.at + 1
            self.at = start
            number, size, _ = self.argument()
            if mark == "_":  # i=1: the number after the sign counts
                part = _Reader([])
                part.texts = self.texts[start : self.at]
                sign = part.texts.index("=") if "=" in part.texts else -1
                index = part.texts[sign - 1] if sign > 0 else ""
                part.texts = part.texts[sign + 1 : -1 if part.texts[-1:] == ["}"] else None]
                part.depth = self.depth
                number, size, _ = part.sum() if part.texts else (None, Decimal(1), _NUMBER)
            bounds[mark] = number
            largest = max(largest, size)
        first, last = bounds.get("_"), bounds.get("^")
        if largest > MAX_TERMS or (first is not None and last is not None and last - first > MAX_TERMS):
            raise TooLarge(f"a sum or product of more than {MAX_TERMS} terms")
        _, size, terms = self.product()
        names = terms.names - {index}
        terms = _Expansion(terms.terms, terms.degree, names)
        count = int(abs(last - first)) + 1 if first is not None and last is not None else None
        if count is None:
            _short(terms, "a sum or product over an index")
            if multiplies and (terms.terms > 2 or names & _SLOW):
                raise TooLarge("a product of sums of more than 2 terms over an index without known bounds")
        elif multiplies and names:
            terms = _checked(terms.terms**count, terms.degree * count, names)
        elif terms.terms > 1 and terms.terms * count > MAX_SUMMED:
            raise TooLarge(f"a sum of more than {MAX_SUMMED} terms when it is multiplied out")
        return None, max(largest, size), terms._replace(names=names | {"index"}, degree=max(1, terms.degree))

    def rows(self, *, determinant: bool) -> _Size:
        """A matrix: its power has sums of products of its entries, its determinant of one of each row."""
        largest, terms = Decimal(1), _NUMBER
        rows = 1
        while self.peek() and self.peek()[:5] != r"\end{":
            before = self.at
            rows += self.peek() == r"\\"
            _, size, more = self.sum()
            largest, terms = max(largest, size), terms.plus(more)
            self.at += self.at == before
        self.at += 1
        if determinant and terms.names and rows > MAX_DETERMINANT:
            raise TooLarge(f"a determinant in variables of more than {MAX_DETERMINANT} rows")
        return None, largest, terms


def _bounded(number: Decimal) -> Decimal:
    if not number.is_finite() or abs(number.adjusted()) > MAX_DIGITS:
        raise TooLarge(f"a number of more than {MAX_DIGITS} digits")
    return number


def _raised(base: Decimal, exponent: Decimal) -> Decimal | None:
    result = base**exponent
    return result if result.is_finite() else None


def _power(base: Decimal | None, largest: Decimal, exponent: Decimal | None, size: Decimal) -> _Pair:
    """The power, refused if it has too many digits; of an expression in variables, if its exponent is large."""
    biggest = max(size, abs(exponent)) if exponent is not None else size
    known = base is not None and exponent is not None
    if known and base in (0, 1, -1) and abs(exponent) <= 10**9:
        return (Decimal(1) if base == 1 or exponent == 0 else None), largest
    is_integer = known and base == base.to_integral_value()
    digits = abs(exponent if known else biggest) * max(largest, abs(base) if is_integer else Decimal(10)).log10()
    if digits > MAX_DIGITS or (not known and biggest > MAX_TERMS):
        raise TooLarge(f"a power of more than {MAX_DIGITS} digits")
    if not known:
        return None, max(largest, size)
    result = _raised(base, exponent) if base > 0 or exponent == exponent.to_integral_value() else None
    return result, max(largest, size, abs(result) if result is not None else Decimal(0))


def _factorial(base: Decimal | None, largest: Decimal) -> _Pair:
    number = largest if base is None else abs(base)
    if number > 1500:
        raise TooLarge(f"a factorial of more than {MAX_DIGITS} digits")
    if base is None or base < 0 or base != base.to_integral_value():
        return None, max(largest, Decimal(math.factorial(int(number))) if number > 3 else largest)
    result = Decimal(math.factorial(int(base)))
    return result, max(largest, result)


def _binomial(over: Decimal | None, under: Decimal | None, largest: Decimal) -> _Pair:
    if over is None or under is None:
        if largest > MAX_TERMS:
            raise TooLarge(f"a binomial coefficient of more than {MAX_TERMS} factors")
        return None, largest
    chosen = min(abs(under), abs(over - under))
    if chosen * max(abs(over), Decimal(10)).log10() > MAX_DIGITS:
        raise TooLarge(f"a binomial coefficient of more than {MAX_DIGITS} digits")
    are_integers = over >= 0 and under >= 0 and over == over.to_integral_value() and under == under.to_integral_value()
    if not are_integers and abs(under) > MAX_FACTORS:
        raise TooLarge(f"a binomial coefficient of more than {MAX_FACTORS} factors that are not whole")
    result = Decimal(math.comb(int(over), int(under))) if are_integers else None
    return result, max(largest, result if result is not None else largest)
