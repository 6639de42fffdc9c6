r"""How large an expression is, from its form: what the symbolic library would need minutes for is refused before it.

A tower of powers, the factorial of a large number, a sum over a billion terms and brackets a hundred deep cost the one
who writes them a few characters. The reader below walks the tokens once, with decimals of 28 digits whose exponents
cannot overflow, and stops at the first part that is too large. Expressions in variables have no value; the largest
number in them counts instead.
"""

import math
from collections.abc import Sequence
from decimal import Context, Decimal, DecimalException, localcontext

from grpo_roc_jax.reward.latex import Token

MAX_DIGITS = 4000
"""Digits of the largest number that an expression may contain or amount to; `2^{10000}` has 3,011."""
MAX_TERMS = 10_000
"""Terms of a sum or product or of a power of a sum, and the largest power of an expression in variables."""
MAX_DEPTH = 40
"""Brackets, fractions, roots and powers inside one another."""

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
            result, _ = reader.sum()
    except TooLarge:
        return None
    return result if reader.at == len(reader.texts) and result is not None and result.is_finite() else None


_Size = tuple[Decimal | None, Decimal]
"""(the value or None, the largest number in the expression)."""


class _Reader:
    """Reads sums of products of powers, by recursive descent over the texts of tokens."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self.texts = [token.text for token in tokens]
        self.at = 0
        self.depth = 0

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
        total, largest = self.product()
        while (sign := self.peek()) in ("+", "-"):
            self.at += 1
            term, size = self.product()
            largest = max(largest, size)
            total = None if total is None or term is None else total + (term if sign == "+" else -term)
        self.depth -= 1
        return total, largest

    def product(self) -> _Size:
        negative = False
        while self.peek() in ("+", "-"):
            negative ^= self.peek() == "-"
            self.at += 1
        total, largest = self.power()
        while True:
            text = self.peek()
            divides = text in ("/", r"\div")
            if divides or text in ("*", r"\times", r"\cdot"):
                self.at += 1
                if self.peek() == "-":
                    negative, self.at = not negative, self.at + 1
            elif text in _SIGNS or text in ("", ")", "]", "}", r"\}", "|", "^", "_", "!") or text[:5] == r"\end{":
                break
            factor, size = self.power()
            largest = max(largest, size)
            if total is not None and factor is not None:
                total = _bounded(total / factor if divides else total * factor) if factor or not divides else None
            else:
                total = None
        return (-total if negative and total is not None else total), largest

    def power(self) -> _Size:
        """A number, variable, bracket or function with its powers, factorials and subscripts."""
        first = self.at
        base, largest = self.atom()
        terms = _terms(self.texts[first : self.at]) if base is None else 1
        while (text := self.peek()) in ("^", "_", "!", "°", "%", "'"):
            self.at += 1
            if text == "!":
                base, largest = _factorial(base, largest)
            elif text == "^":
                exponents = [self.argument()]
                while self.peek() == "^":  # 9^9^9 is read from the right, as the larger of its two meanings
                    self.at += 1
                    exponents.append(self.argument())
                exponent, size = exponents.pop()
                while exponents:
                    exponent, size = _power(*exponents.pop(), exponent, size)
                _refuse_expansion(terms, exponent)
                base, largest = _power(base, largest, exponent, size)
            elif text == "_":
                base = None
                self.argument()
            elif base is not None and text != "'":
                base *= _PI / 180 if text == "°" else Decimal("0.01")
        return base, largest

    def argument(self) -> _Size:
        """A group in braces, or the next part alone."""
        if self.peek() != "{":
            return self.atom()
        return self.bracket("}")

    def bracket(self, end: str) -> _Size:
        self.at += 1
        result = self.sum()
        single = self.peek() == end
        largest = result[1]
        while self.peek() not in (end, ""):  # a list or a relation
            before = self.at
            largest = max(largest, self.sum()[1])
            self.at += self.at == before
        self.at += 1
        return (result[0] if single else None), largest

    def atom(self) -> _Size:
        text = self.peek()
        self.at += 1
        if text and text[-1].isdecimal() and text.isascii():
            if len(text) > MAX_DIGITS:
                raise TooLarge(f"a number of more than {MAX_DIGITS} digits")
            number = Decimal(text) if text.count(".") < 2 else Decimal(1)
            return number, abs(number)
        if text in ("(", "[", "{", r"\{", r"\lfloor", r"\lceil"):
            self.at -= 1
            ends = {"(": ")", "[": "]", "{": "}", r"\{": r"\}", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil"}
            number, largest = self.bracket(ends[text])
            if text in (r"\lfloor", r"\lceil") and number is not None:
                number = number.to_integral_value("ROUND_FLOOR" if text == r"\lfloor" else "ROUND_CEILING")
            return number, largest
        if text in (r"\frac", r"\binom"):
            (over, first), (under, second) = self.argument(), self.argument()
            if text == r"\binom":
                return _binomial(over, under, max(first, second))
            ratio = over / under if over is not None and under else None
            return ratio, max(first, second, Decimal(0) if ratio is None else abs(ratio))
        if text == r"\sqrt":
            root = self.bracket("]")[0] if self.peek() == "[" else Decimal(2)
            number, largest = self.argument()
            exact = number is not None and number >= 0 and root is not None and root > 0
            return (_raised(number, 1 / root) if exact else None), largest
        if text in (r"\sum", r"\prod"):
            return self.series()
        if text == r"\pi":
            return _PI, _PI
        if text == "e":
            return _E, _E
        if text == r"\operatorname" or text[:1] != "\\" or text[1:] not in {*_FUNCTIONS, "ln", "log", "exp"}:
            return None, Decimal(1)
        return self.function(text[1:])

    def function(self, name: str) -> _Size:
        base = power = None
        while self.peek() in ("^", "_"):
            mark, self.at = self.peek(), self.at + 1
            number, _ = self.argument()
            base, power = (number, power) if mark == "_" else (base, number if number is not None else Decimal(1))
        number, largest = self.bracket(")") if self.peek() == "(" else self.power()
        if power not in (None, 1) or number is None or abs(number) > 1000:
            return None, largest
        try:
            if name in ("ln", "log"):
                result = number.ln() / (base.ln() if base is not None else Decimal(10 if name == "log" else _E).ln())
            else:
                result = Decimal(_FUNCTIONS[name](float(number)))
        except (ArithmeticError, ValueError, KeyError, DecimalException):
            return None, largest
        return (result if result.is_finite() else None), largest

    def series(self) -> _Size:
        bounds: dict[str, Decimal | None] = {}
        largest = Decimal(1)
        while self.peek() in ("_", "^"):
            mark = self.peek()
            start = self.at + 1
            self.at = start
            number, size = self.argument()
            if mark == "_":  # i=1: the number after the sign counts
                part = _Reader([])
                part.texts = self.texts[start : self.at]
                sign = part.texts.index("=") if "=" in part.texts else -1
                part.texts = part.texts[sign + 1 : -1 if part.texts[-1:] == ["}"] else None]
                part.depth = self.depth
                number, size = part.sum() if part.texts else (None, Decimal(1))
            bounds[mark] = number
            largest = max(largest, size)
        first, last = bounds.get("_"), bounds.get("^")
        if largest > MAX_TERMS or (first is not None and last is not None and last - first > MAX_TERMS):
            raise TooLarge(f"a sum or product of more than {MAX_TERMS} terms")
        _, size = self.product()
        return None, max(largest, size)


def _terms(texts: Sequence[str]) -> int:
    """Terms that multiply out when a bracket is raised to a power: those of the sum in it, but one more than its
    variables at most, since `1 + x + x^2` gives powers of x alone."""
    variables = {text for text in texts if len(text) == 1 and text.isalpha()}
    return min(1 + sum(text in ("+", "-") for text in texts), 1 + len(variables))


def _refuse_expansion(terms: int, exponent: Decimal | None) -> None:
    """Raises TooLarge for a power whose expansion has more than `MAX_TERMS` terms: n + k - 1 over k - 1 of k terms."""
    if terms > 2 and exponent is not None and 2 <= exponent <= MAX_TERMS and exponent == int(exponent):
        count = math.comb(int(exponent) + terms - 1, terms - 1)
        if count > MAX_TERMS:
            raise TooLarge(f"a power of a sum with {count} terms; at most {MAX_TERMS} are expanded")


def _bounded(number: Decimal) -> Decimal:
    if not number.is_finite() or abs(number.adjusted()) > MAX_DIGITS:
        raise TooLarge(f"a number of more than {MAX_DIGITS} digits")
    return number


def _raised(base: Decimal, exponent: Decimal) -> Decimal | None:
    result = base**exponent
    return result if result.is_finite() else None


def _power(base: Decimal | None, largest: Decimal, exponent: Decimal | None, size: Decimal) -> _Size:
    """The power, refused if it has too many digits; of an expression in variables, if its exponent is large."""
    biggest = max(size, abs(exponent)) if exponent is not None else size
    known = base is not None and exponent is not None
    if known and base in (0, 1, -1) and abs(exponent) <= 10**9:
        return (Decimal(1) if base == 1 or exponent == 0 else None), largest
    whole = known and base == base.to_integral_value()
    digits = abs(exponent if known else biggest) * max(largest, abs(base) if whole else Decimal(10)).log10()
    if digits > MAX_DIGITS or (not known and biggest > MAX_TERMS):
        raise TooLarge(f"a power of more than {MAX_DIGITS} digits")
    if not known:
        return None, max(largest, size)
    result = _raised(base, exponent) if base > 0 or exponent == exponent.to_integral_value() else None
    return result, max(largest, size, abs(result) if result is not None else Decimal(0))


def _factorial(base: Decimal | None, largest: Decimal) -> _Size:
    number = largest if base is None else abs(base)
    if number > 1500:
        raise TooLarge(f"a factorial of more than {MAX_DIGITS} digits")
    if base is None or base < 0 or base != base.to_integral_value():
        return None, max(largest, Decimal(math.factorial(int(number))) if number > 3 else largest)
    result = Decimal(math.factorial(int(base)))
    return result, max(largest, result)


def _binomial(over: Decimal | None, under: Decimal | None, largest: Decimal) -> _Size:
    if over is None or under is None:
        if largest > MAX_TERMS:
            raise TooLarge(f"a binomial coefficient of more than {MAX_TERMS} factors")
        return None, largest
    chosen = min(abs(under), abs(over - under))
    if chosen * max(abs(over), Decimal(10)).log10() > MAX_DIGITS:
        raise TooLarge(f"a binomial coefficient of more than {MAX_DIGITS} digits")
    whole = over >= 0 and under >= 0 and over == over.to_integral_value() and under == under.to_integral_value()
    result = Decimal(math.comb(int(over), int(under))) if whole else None
    return result, max(largest, result if result is not None else largest)
