r"""Reads an answer: its normal form, the number that it writes, its unit; and the comparisons that need no algebra.

All of this runs in the trainer on text that a policy wrote. So every pattern takes linear time, and no number is
expanded beyond `MAX_EXACT_DIGITS`. Comparisons of anything but numbers and equal texts go to `reward.verify`.
"""

import re
from fractions import Fraction

MAX_EXACT_DIGITS = 4000
"""Longest number converted to an exact fraction; Python refuses to parse integers of more than 4,300 digits."""
MAX_UNIT_CHARS = 80
"""Length of the end of an answer that is searched for a unit."""

# ---- normal form ---------------------------------------------------------------------------------------------------

_CHARACTERS = str.maketrans(
    {"−": "-", "–": "-", "π": r"\pi ", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∞": r"\infty ", "≤": r"\le ",
     "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "°": r"^\circ ", "√": "sqrt", "µ": "μ", "$": "", "~": " "}
)  # fmt: skip
_OPENED = {
    **{name: rf"\{name}(" for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh", "ln", "log")},
    **{short: rf"\{name}(" for name in ("arcsin", "arccos", "arctan") for short in (name, "a" + name[3:])},
    "sqrt": r"\sqrt{", "exp": "e^{", "log10": r"\log_{10}(", "log2": r"\log_{2}(",
}  # fmt: skip
"""Python's functions -> what they open in LaTeX."""
_MODULE = r"(?:np|numpy|math|sympy|sp)\."
_CALL = re.compile(rf"(?<![A-Za-z\\])({_MODULE})?({'|'.join(sorted(_OPENED, key=len, reverse=True))})\(|[()]")
_PI = re.compile(rf"(?<![A-Za-z\\])(?:{_MODULE})?pi(?![A-Za-z])")
_ROOT = re.compile(r"(?<![A-Za-z\\])sqrt([0-9]++)")
_EXPONENT = re.compile(r"(?<![\w.\\])(?<!\^\{)([0-9]++(?:\.[0-9]*+)?|\.[0-9]++)[eE]([+-]?[0-9]++)(?![\w.^])")
_POWER = re.compile(r"\*\*\s*+([+-]?[0-9]++(?:\.[0-9]++)?+)")
_GAP = r"(?:\s|(?<!\\)\\[,;:! ])"
_DIGIT_GAP = re.compile(rf"(?<=[0-9]){_GAP}++(?=[0-9])")
_LAYOUT = re.compile(
    r"(?<!\\)\\[,;:! ]|\\left(?![a-z])|\\right(?![a-z])|\\displaystyle|\\q?quad(?![a-z])|(?<![0-9])\s++|\s++(?![0-9])"
)
_FRAC = re.compile(r"\\[dtc]frac(?![a-z])")
_FRAC_DIGITS = re.compile(r"\\frac([0-9])([0-9])")
_SUBSCRIPT = re.compile(r"_([A-Za-z0-9])(?![A-Za-z0-9])")
_THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(?:([, ])[0-9]{3})(?:\1[0-9]{3})*+(?:\.[0-9]+)?")
_WORDS = re.compile(r"\\(?:text(?:rm|bf|it|normal)?|math(?:rm|bf|it|sf)|mbox|operatorname)\{([^{}]*+)\}")
_ONE = re.compile(r"(?<=[\^_])\{(-?[A-Za-z0-9])\}(?![A-Za-z0-9])")
_SAME = {r"\leq": r"\le", r"\geq": r"\ge", r"\neq": r"\ne", r"\lbrace": r"\{", r"\rbrace": r"\}", r"\%": "%"}
_SAME |= {r"\rightarrow": r"\to", r"\varnothing": r"\emptyset", r"^\circ": "°", r"^{\circ}": "°", r"\degree": "°"}
_SYNONYM = re.compile("|".join(re.escape(text) + ("(?![a-z])" if text[-1].isalpha() else "") for text in _SAME))


def normalize(answer: str) -> str:
    r"""The answer in LaTeX without layout.

    No dollar signs, spacing commands, thousands separators or final period; `\dfrac` is `\frac`, `_1` is `_{1}`;
    1e-5 is `1\times10^{-5}`, and Python's `np.arcsin(x)`, `x**2`, `pi` are written in LaTeX.
    """
    text = answer.replace("\\$", "").translate(_CHARACTERS).strip().replace("{,}", ",")
    text = _ROOT.sub(r"\\sqrt{\1}", _PI.sub(r"\\pi ", _POWER.sub(r"^{\1}", _from_python(text))))
    text = _SUBSCRIPT.sub(r"_{\1}", _EXPONENT.sub(r"\1\\times10^{\2}", text))
    text = _LAYOUT.sub("", _DIGIT_GAP.sub(" ", text))
    text = _FRAC_DIGITS.sub(r"\\frac{\1}{\2}", _FRAC.sub(r"\\frac", text))
    text = text.rstrip(".") if not text.endswith("..") else text
    return text.replace(",", "").replace(" ", "") if _THOUSANDS.fullmatch(text) else text


def _from_python(text: str) -> str:
    """The text with calls of Python's functions written in LaTeX; unchanged if parentheses do not match."""
    parts, closing, last = [], [], 0
    for match in _CALL.finditer(text):
        token, name = match.group(), match.group(2)
        if token == ")":
            if not closing:
                return text
            new = closing.pop()
        else:
            new = _OPENED[name] if name else "("
            if name == "log" and match.group(1):
                new = r"\ln("
            closing.append("}" if new[-1] == "{" else ")")
        parts += [text[last : match.start()], new]
        last = match.end()
    return text if closing else "".join([*parts, text[last:]])


def _same_text(text: str) -> str:
    r"""A normal form's key: equal for texts that differ in `\text{}`, braces around one sign, or synonyms only."""
    plain = _ONE.sub(r"\1", _SYNONYM.sub(lambda match: _SAME[match.group()], text))
    words = _WORDS.sub(r"\1", plain).strip()
    return words.casefold() if len(words) > 1 and words.isalpha() else words


# ---- numbers -------------------------------------------------------------------------------------------------------

_DECIMAL = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_NUMBER = re.compile(
    rf"([+-]?)(?:({_DECIMAL})|(?:({_DECIMAL})(?:\\times|\\cdot|\*|x))?10\^(?:\{{([+-]?[0-9]+)\}}|([+-]?[0-9]+)))"
)
_DECIMAL_IN_TEXT = re.compile(r"(?<![0-9.])([0-9]{0,500}+)\.([0-9]{1,500}+)(?![0-9.])")
_RATIO = re.compile(
    rf"([+-]?)(?:([0-9]+)(?:(?=\\frac)| (?=[0-9]+/)))?"
    rf"(?:\\frac\{{([+-]?{_DECIMAL})\}}\{{([+-]?{_DECIMAL})\}}|({_DECIMAL})/({_DECIMAL}))"
)


def read_number(text: str) -> Fraction | str | None:
    r"""The exact value of an integer, decimal, power of ten or ratio in normal form; None for anything else.

    Ratios are a/b, `\frac{a}{b}` and mixed numbers such as 1 1/2. A number of more than `MAX_EXACT_DIGITS` digits is
    its significant digits and exponent as text, which equals that of the same number and no other.
    """
    if match := _NUMBER.fullmatch(text):
        sign, plain, mantissa, braced, bare = match.groups()
        exponent = braced or bare or "0"
        return _exact(sign, plain or mantissa or "1", int(exponent)) if len(exponent) <= 18 else None
    match = _RATIO.fullmatch(text) if len(text) <= MAX_EXACT_DIGITS else None
    if not match:
        return None
    sign, whole, *parts = match.groups()
    numerator, denominator = (Fraction(part) for part in parts if part)
    if denominator == 0:
        return None
    return (Fraction(whole or 0) + numerator / denominator) * (-1 if sign == "-" else 1)


def _exact(sign: str, decimal: str, exponent: int) -> Fraction | str:
    whole, _, part = decimal.partition(".")
    digits = (whole + part).lstrip("0")
    significant = digits.rstrip("0")
    exponent += len(digits) - len(significant) - len(part)
    if not significant:
        return Fraction(0)
    minus = "-" if sign == "-" else ""
    if len(significant) + abs(exponent) > MAX_EXACT_DIGITS:
        return f"{minus}{significant}e{exponent}"
    return Fraction(int(minus + significant)) * Fraction(10) ** exponent


# ---- units ---------------------------------------------------------------------------------------------------------

_LONG = {
    "meter": "m", "metre": "m", "gram": "g", "second": "s", "sec": "s", "minute": "min", "hour": "h", "hr": "h",
    "liter": "L", "litre": "L", "newton": "N", "joule": "J", "watt": "W", "volt": "V", "kelvin": "K", "pascal": "Pa",
    "hertz": "Hz", "ohm": "Ω", "inche": "in", "inch": "in", "feet": "ft", "foot": "ft", "mile": "mi", "pound": "lb",
    "year": "yr", "radian": "rad", "dollar": "dollar", "cent": "cent", "unit": "unit", "day": "day",
}  # fmt: skip
_PREFIX = {"kilo": "k", "centi": "c", "milli": "m", "micro": "μ", "nano": "n", "mega": "M", "giga": "G"}
_SYMBOLS = "mol|min|erg|dyne|dyn|bar|cal|rad|mph|eV|Pa|Hz|Wb|pc|yr|in|ft|mi|lb|sr|m|g|s|h|A|K|N|J|W|C|V|F|T|H|L|Ω|Å"
_LONG_NAME = re.compile(rf"({'|'.join(_PREFIX)})?({'|'.join(_LONG)})s?(?![a-z])")
_UNIT_NAME = rf"(?>(?:{_LONG_NAME.pattern}|[TGMkcmμnpd]?(?:{_SYMBOLS}))(?![a-zA-Z])(?:\^(?:\{{-?[0-9]\}}|-?[0-9]))?)"
_UNIT_JOIN = r"(?:\s*+(?:/|\*|\\cdot(?![a-z])|\\times(?![a-z])|per(?=\s))\s*+|\s++)"
_UNIT = re.compile(rf"(?:\s++|(?<=[0-9])(?=[a-zμ][a-zA-Z]))({_UNIT_NAME}(?:{_UNIT_JOIN}{_UNIT_NAME})*+)\s*\.?$")
_PERCENT = re.compile(r"\s*+(?:\\?%|percent)\s*\.?$")
_DEGREES = re.compile(r"\s*+(?:\^\\circ|\^\{\\circ\s*\}|\\degree|degrees?)\s*\.?$")


def split_unit(answer: str) -> tuple[str, str]:
    r"""(what is before the unit, the unit), for a common unit, a percent sign or degrees; the unit is "" without one.

    `3 m/s`, `3\text{ m}/\text{s}` and `3 meters per second` have the same unit, m/s.
    """
    text = answer.translate(_CHARACTERS).rstrip()
    start = max(0, len(text) - MAX_UNIT_CHARS)
    tail = _WORDS.sub(r" \1", text[start:].replace(r"\mu ", "μ").replace(r"\Omega", "Ω")).rstrip()
    for pattern, unit in ((_PERCENT, "%"), (_DEGREES, "°"), (_UNIT, "")):
        if (match := pattern.search(tail)) and (value := text[:start] + tail[: match.start()]).strip():
            return value, unit or _unit_symbol(match.group(1))
    return answer, ""


def _unit_symbol(unit: str) -> str:
    short = _LONG_NAME.sub(lambda match: _PREFIX.get(match.group(1), "") + _LONG[match.group(2)], unit)
    return re.sub(_UNIT_JOIN, lambda join: "/" if join.group().strip() in ("/", "per") else "·", _ONE.sub(r"\1", short))


# ---- comparison ----------------------------------------------------------------------------------------------------


def decide(answer: str, gold: str, *, strict: bool = False) -> bool | None:
    """Whether two answers are equal as text or as numbers; None if algebra is needed to decide.

    Args:
        strict: Units count, and a percent sign divides by 100. Otherwise units are ignored, and 50% is 50 and 0.5.
    """
    if _same_text(normalize(answer)) == _same_text(normalize(gold)):
        return True
    (value, unit), (reference, gold_unit) = split_unit(answer), split_unit(gold)
    if strict and {unit, gold_unit} != {"%", ""} and unit != gold_unit:
        return False
    numbers = tuple(read_number(_WORDS.sub(r"\1", normalize(text))) for text in (value, reference))
    if None in numbers:
        return None
    if numbers[0] == numbers[1] and not (strict and unit != gold_unit):
        return True
    if unit == gold_unit or "%" not in (unit, gold_unit) or str in map(type, numbers):
        return False
    percent, plain = numbers if unit == "%" else numbers[::-1]
    return percent == 100 * plain


def for_algebra(answer: str, gold: str, *, strict: bool = False) -> tuple[str, str]:
    r"""The two texts as the symbolic library gets them, after `decide` returned None.

    Args:
        strict: Decimals become fractions, which equal exact values only, and a percent sign divides by 100.
    """
    texts = normalize(answer), normalize(gold)
    split = split_unit(answer), split_unit(gold)
    units = {unit for _, unit in split}
    if strict:
        values = (_DECIMAL_IN_TEXT.sub(_as_ratio, normalize(value)) for value, _ in split)
        return tuple(rf"\frac{{{v}}}{{100}}" if unit == "%" else v for v, (_, unit) in zip(values, split, strict=True))
    # The library ignores most units by itself; others only where the two have the same or one has none.
    if units != {""} and (len(units) == 1 or "" in units) and not units & {"%", "°"}:
        return tuple(normalize(value) for value, _ in split)
    return texts


def _as_ratio(match: re.Match) -> str:
    whole, part = match.groups()
    return rf"\frac{{{int(whole + part)}}}{{{10 ** len(part)}}}"
