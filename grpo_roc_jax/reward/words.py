"""What the words around a number mean: units, currencies, number words, and words that change what the number says."""

import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import pairwise


def names(text: str) -> list[str]:
    """The names in a text."""
    return text.split()


# ---- units ---------------------------------------------------------------------------------------------------------

_LONG = {
    "meter": "m", "metre": "m", "gram": "g", "gramme": "g", "second": "s", "sec": "s", "minute": "min", "hour": "h",
    "hr": "h", "liter": "L", "litre": "L", "newton": "N", "joule": "J", "watt": "W", "volt": "V", "ampere": "A",
    "amp": "A", "kelvin": "K", "pascal": "Pa", "hertz": "Hz", "ohm": "Ω", "inche": "in", "inch": "in", "feet": "ft",
    "foot": "ft", "mile": "mi", "pound": "lb", "year": "yr", "radian": "rad", "dollar": "dollar", "cent": "cent",
    "unit": "unit", "day": "day", "week": "week", "month": "month", "yard": "yd", "ounce": "oz", "gallon": "gal",
    "acre": "acre", "hectare": "ha", "tonne": "t", "ton": "ton", "quart": "qt", "pint": "pt", "cup": "cup",
    "calorie": "cal", "mole": "mol", "coulomb": "C", "tesla": "T", "farad": "F", "weber": "Wb", "bit": "bit",
    "byte": "byte", "decibel": "dB", "steradian": "sr", "knot": "knot", "atmosphere": "atm", "electronvolt": "eV",
    "parsec": "pc", "point": "point", "digit": "digit", "degree": "°", "euro": "EUR", "rupee": "INR", "yen": "JPY",
    "yuan": "CNY", "peso": "peso", "buck": "dollar", "penny": "cent", "pennie": "cent", "pence": "penny",
    "pfennig": "pfennig", "percent": "%", "percentage": "%", "pct": "%", "millimeter": "mm", "lightyear": "ly",
    "century": "century", "decade": "decade",
}  # fmt: skip
_PREFIX = {"kilo": "k", "centi": "c", "milli": "m", "micro": "μ", "nano": "n", "mega": "M", "giga": "G", "deci": "d"}
_SYMBOLS = names(
    """
    mol min erg dyne dyn bar cal rad mph kph kmh kmph eV Pa Hz Wb pc yr yrs in ft mi lb lbs oz yd gal qt pt ha hrs mins
    secs sqm sqft atm dB ly ml cc rpm kWh Wh ppm m g s h A K N J W C V F T H L l Ω Å sr sec hr km cm mm kg mg dm USD EUR
    GBP INR CNY JPY RMB CAD AUD CHF Rs
    """
)
_SAME = {
    "mph": "mi/h", "kph": "km/h", "kmh": "km/h", "kmph": "km/h", "yrs": "yr", "lbs": "lb", "hrs": "h", "mins": "min",
    "secs": "s", "sec": "s", "hr": "h", "l": "L", "dyne": "dyn", "USD": "dollar", "Rs": "INR", "RMB": "CNY",
    "cc": "cm^3", "sqm": "m^2", "sqft": "ft^2", "ml": "mL", "kWh": "kW·h", "Wh": "W·h",
}  # fmt: skip
_LONG_NAME = re.compile(rf"({'|'.join(_PREFIX)})?({'|'.join(sorted(_LONG, key=len, reverse=True))})s?", re.IGNORECASE)
_SYMBOL = re.compile(rf"([TGMkcmμnpd]?)({'|'.join(sorted(_SYMBOLS, key=len, reverse=True))})")
CURRENCIES = {
    "$": "dollar", r"\$": "dollar", "£": "GBP", "€": "EUR", "₹": "INR", "¥": "JPY", "₩": "KRW", "₽": "RUB",
    "₺": "TRY", "₫": "VND", "₱": "PHP", "฿": "THB", "₦": "NGN", "₪": "ILS", "₴": "UAH", "¢": "cent",
}  # fmt: skip
"""Signs of currencies; `\\$` too."""
CURRENCY_NAMES = {"USD", "EUR", "GBP", "INR", "CNY", "JPY", "RMB", "CAD", "AUD", "CHF", "Rs", "rs", "RS", "Re"}
POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
"""Words for the power of the unit after them, or before them if they end in d."""


def unit_symbol(name: str) -> str | None:
    """The symbol of a unit; None for a word that is no common unit."""
    if match := _LONG_NAME.fullmatch(name):
        prefix, unit = match.groups()
        return _PREFIX.get((prefix or "").lower(), "") + _LONG[unit.lower()]
    if match := _SYMBOL.fullmatch(name):
        return match.group(1) + _SAME.get(match.group(2), match.group(2)) if name not in _SAME else _SAME[name]
    return None


def unit_text(powers: Iterable[tuple[str, int]]) -> str:
    """The normal form of a product of units: `m·s^-2` for m/s^2 and for m s^-2."""
    total: dict[str, int] = {}
    for symbol, power in powers:
        for part in symbol.split("·"):
            over, _, under = part.partition("/")
            for name, sign in ((over, 1), (under, -1)):
                base, _, exponent = name.partition("^")
                if base:
                    total[base] = total.get(base, 0) + sign * power * int(exponent or 1)
    return "·".join(name + (f"^{power}" if power != 1 else "") for name, power in sorted(total.items()) if power)


_STEPS = {"k": 3, "M": 6, "G": 9, "T": 12, "c": -2, "d": -1, "m": -3, "μ": -6, "n": -9, "p": -12}
_BASES = {
    "m": ("1", "m"), "g": ("1/1000", "kg"), "s": ("1", "s"), "min": ("60", "s"), "h": ("3600", "s"),
    "day": ("86400", "s"), "week": ("604800", "s"), "month": ("1", "month"), "yr": ("12", "month"),
    "in": ("0.0254", "m"), "ft": ("0.3048", "m"), "yd": ("0.9144", "m"), "mi": ("1609.344", "m"),
    "lb": ("0.45359237", "kg"), "oz": ("0.028349523125", "kg"), "L": ("1/1000", "m^3"), "t": ("1000", "kg"),
    "ha": ("10000", "m^2"), "Hz": ("1", "s^-1"), "N": ("1", "kg m s^-2"), "J": ("1", "kg m^2 s^-2"),
    "W": ("1", "kg m^2 s^-3"), "Pa": ("1", "kg m^-1 s^-2"), "cal": ("4.184", "kg m^2 s^-2"), "V": ("1", "V"),
    "A": ("1", "A"), "Ω": ("1", "V A^-1"), "mol": ("1", "mol"), "bit": ("1", "bit"), "byte": ("8", "bit"),
    "dollar": ("1", "dollar"), "cent": ("1/100", "dollar"), "decade": ("120", "month"), "century": ("1200", "month"),
    "EUR": ("1", "EUR"), "GBP": ("1", "GBP"), "INR": ("1", "INR"), "CNY": ("1", "CNY"), "JPY": ("1", "JPY"),
    "°C": ("1", "°C"), "°F": ("1", "°F"), "K": ("1", "K"), "gal": ("0.003785411784", "m^3"),
    "qt": ("0.000946352946", "m^3"), "pt": ("0.000473176473", "m^3"), "acre": ("4046.8564224", "m^2"),
    "atm": ("101325", "kg m^-1 s^-2"), "bar": ("100000", "kg m^-1 s^-2"), "rpm": ("1/60", "s^-1"),
    "eV": ("1.602176634e-19", "kg m^2 s^-2"), "erg": ("1e-7", "kg m^2 s^-2"), "dyn": ("1e-5", "kg m s^-2"),
    "C": ("1", "A s"), "F": ("1", "A s V^-1"), "Wb": ("1", "V s"), "T": ("1", "V s m^-2"), "H": ("1", "V s A^-1"),
}  # fmt: skip
"""Unit -> (its size, in which others). Temperatures are not converted, since their zeros differ."""
_PREFIXED = names("m g s L Hz N J W Pa cal V A Ω mol eV bar C F Wb T H")


def measure(unit: str) -> tuple[Fraction, tuple[tuple[str, int], ...]] | None:
    """(size, dimension) of a unit from `unit_text`: equal dimensions can be converted; None for an unknown unit.

    measure("km")  # (1000, (("m", 1),))
    """
    size, powers = Fraction(1), dict[str, int]()
    for part in unit.split("·"):
        name, _, exponent = part.partition("^")
        power, step = int(exponent or 1), 0
        if name not in _BASES and name[1:] in _PREFIXED and name[0] in _STEPS:
            name, step = name[1:], _STEPS[name[0]]
        if name not in _BASES or abs(power) > 9:
            return None
        factor, bases = _BASES[name]
        size *= (Fraction(factor) * Fraction(10) ** step) ** power
        for base in bases.split():
            base, _, exponent = base.partition("^")
            powers[base] = powers.get(base, 0) + power * int(exponent or 1)
    return size, tuple(sorted((base, power) for base, power in powers.items() if power))


# ---- numbers in words ----------------------------------------------------------------------------------------------

_SMALL = {
    name: number
    for number, name in enumerate(
        names(
            """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen
    """
        )
    )
}
_TENS = {
    name: 10 * number
    for number, name in enumerate(
        names(
            """
    twenty thirty forty fifty sixty seventy eighty ninety
    """
        ),
        start=2,
    )
}
SCALES = {
    "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12,
    "lakh": 10**5, "crore": 10**7, "quadrillion": 10**15,
}  # fmt: skip
COUNTS = {"score": 20, "gross": 144, "tens": 10}
"""Scales after a number only: alone these words mean other things."""
ABBREVIATIONS = {
    "k": 10**3, "K": 10**3, "M": 10**6, "mil": 10**6, "mn": 10**6, "B": 10**9, "bn": 10**9, "T": 10**12,
}  # fmt: skip
"""Letters after a sum of money that scale it."""
_PARTS = {
    "half": 2, "halve": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8,
    "ninth": 9, "tenth": 10, "hundredth": 100,
}  # fmt: skip
_FIRST = names(
    """
    first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth
    """
)
_CARDINALS = dict(zip(_FIRST, list(_SMALL)[1:], strict=False))
_CARDINALS |= {f"{name}th": name for name in list(_SMALL)[13:]}
_CARDINALS |= {f"{name.removesuffix('y')}ieth": name for name in _TENS}
ORDINALS = {name: {**_SMALL, **_TENS}[cardinal] for name, cardinal in _CARDINALS.items()}
BASES = {**_SMALL, "binary": 2, "octal": 8, "decimal": 10, "hexadecimal": 16, "hex": 16}


def scale(word: str, *, after_number: bool = False) -> int | None:
    """What `million` or `dozens` multiplies a number by; `score` too where it follows one."""
    scales = SCALES | COUNTS if after_number else SCALES
    return scales.get(word, scales.get(word.removesuffix("s")))


def spelled_ordinal(words: list[str]) -> int | None:
    """The place that words spell out, such as twenty third or one hundred fifth; None for fractions and other words."""
    if len(words) == 1:
        return ORDINALS.get(words[0])
    cardinals = [*words[:-1], _CARDINALS.get(words[-1], "")]
    joined = words[-2] in _TENS or words[-2] in ("hundred", "thousand", "and")
    number = spelled_number(cardinals) if joined and cardinals[-1] else None
    return int(number) if number is not None else None


_MOST_WORDS = 12


def spelled_number(words: list[str]) -> Fraction | None:
    """The number that words spell out, such as twenty one, or two thirds; None for other words."""
    if "and" in words[1:-1] and len(words) <= _MOST_WORDS:  # one and a half
        at = len(words) - 1 - words[::-1].index("and")
        whole, part = spelled_number(words[:at]), spelled_number(words[at + 1 :])
        if whole is not None and part is not None and whole.denominator == 1 and 0 < part < 1:
            return whole + part
    words = [word for word in words if word != "and"]
    if not words:
        return None
    if words == ["half"]:
        return Fraction(1, 2)
    part = _PARTS.get(words[-1].removesuffix("s") if words[-1] != "halves" else "half")
    if part and len(words) > 1:
        count = Fraction(1) if words[:-1] in (["a"], ["one"]) else spelled_number(words[:-1])
        return None if count is None or count.denominator != 1 else count / part
    total = group = 0
    last = 0
    for index, word in enumerate(words):
        if word in _SMALL and last in (0, 20, 100) and not (last == 20 and not 0 < _SMALL[word] < 10):
            group, last = group + _SMALL[word], 1
        elif word in _TENS and last in (0, 100):
            group, last = group + _TENS[word], 20
        elif word in SCALES and (last in (1, 20, 100) or not index):
            group, last = max(group, 1) * SCALES[word], 100
            if SCALES[word] >= 1000:
                total, group = total + group, 0
        else:
            return None
    return Fraction(total + group)


# ---- words that matter ---------------------------------------------------------------------------------------------

HEDGES = set(names(
    """
    about approximately approx roughly around circa exactly precisely just only simply the a an is are was equals equal
    to total of answer final result therefore thus hence so it its solution value get we have be
    """
))  # fmt: skip
"""Words before a number that change nothing."""
DIRECTIONS = set(
    names(
        """
    north south east west northeast northwest southeast southwest northern southern eastern western up down upward
    upwards downward downwards inward outward forward forwards backward backwards clockwise counterclockwise
    anticlockwise past till until am pm bc ad bce ce profit loss gain
    increase increased decrease decreased reduced rise fall higher lower
    deeper taller shorter before after ago later earlier early late ahead behind credit debit debt overdrawn
    surplus deficit increasing
    decreasing positive negative receding approaching win lose wins losses
    """
    )
)
_NEGATIONS = set(names(
    """
    not no never none neither nor without wrong incorrect false untrue isnt except excluding cannot impossible un non
    extraneous inadmissible disproved disproven contradiction reject hardly
    """
))  # fmt: skip
_BEFORE_NOT = {f"{word}n" for word in names("is are was were do does did has have had could should would must need")}
_BEFORE_NOT |= {"can", "won"}
"""What stands before 't of a negation."""
_COMPARISONS = set(
    names(
        """
    more less fewer least most greater larger smaller bigger over under above below exceeding exceeds exceed almost
    nearly between than too beyond besides onward onwards infinitely within minimum maximum max upto up bound bounded
    twice thrice double triple half
    """
    )
) - {"max"}
_CONJUNCTIONS = set(
    names(
        """
    or and but if unless otherwise plus minus versus vs while although though then except
    """
    )
)
_OPERATIONS = set(
    names(
        """
    squared cubed doubled tripled quadrupled halved reversed inverted negated factorial root roots
    power powers reciprocal inverse opposite divided multiplied score gross modulo
    logarithm sine cosine tangent divisible
    """
    )
)
_OPERATIONS_OF = set(names(
    """
    square cube multiple multiples divisor opposite complement product factor order circle sphere disk disc polynomial
    """
))  # fmt: skip
"""Words that make something else of the number after them and `of`."""
_ENDS = set(names("starts start starting begins begin beginning ends end ending"))
_REJECTED = set(names("rejected excluded discarded invalid fails"))
COPULAS = {"is", "are", "was", "were", "equals"}
"""Words after which a value is no part of its name."""


def operates(words: Sequence[str]) -> bool:
    """Whether the last of the words before a number makes something else of it: `the square of`, `starts with`."""
    word, before = words[-1], tuple(words[-12:-1])
    if word == "of":
        return not _OPERATIONS_OF.isdisjoint(before[-1:]) and before[-3:] != ("by", "a", "factor")
    if word in ("first", "last"):
        return not {"sum", "product"}.isdisjoint(before)
    return word in ("in", "with", "at") and not _ENDS.isdisjoint(before[-1:])


BLOCKING = (
    _OPERATIONS
    | DIRECTIONS
    | _NEGATIONS
    | _COMPARISONS
    | _CONJUNCTIONS
    | set(SCALES)
    | set(_SMALL)
    | set(_TENS)
    | set(_PARTS)
)
"""A number with one of these words is not the number alone."""
_ABOUT_NAMES = HEDGES | BLOCKING | {"at", "does", "do", "did", "can", "must", "should", "be", "t"}
_BOUNDS = set(names("than over under above below exceeding exceeds exceed almost nearly between beyond minus negative"))


def changes(words: Sequence[str]) -> bool:
    """Whether the name before a value denies or bounds it: `not = 5`, `x is over = 5`, `the answer is not: 5`.

    `Number of apples not eaten`, `Least value` and `Profit` are names of values.
    """
    pairs = set(pairwise(words))
    if not words or words[-1] in _BOUNDS | _NEGATIONS or words[-2:] in (["at", "least"], ["at", "most"]):
        return bool(words)
    denied = any(word in _BEFORE_NOT and after == "t" for word, after in pairs)
    about = all(word in _ABOUT_NAMES or word in _BEFORE_NOT for word in words)
    return about and (denied or not _NEGATIONS.isdisjoint(words) or "than" in words)


_PLACES = set(
    names(
        """
    unit step place block degree space square position point floor lane m cm km mm ft in mi yd
    """
    )
)


def blocked(words: tuple[str, ...], unit: str) -> bool:
    """Whether words around a number change what it says."""
    if words and words[-1] in ("short", "shy", "off"):
        return True
    if words and words[-1] in _REJECTED and HEDGES.issuperset(words[:-1]):
        return True
    for index, word in enumerate(words):
        if word in _BEFORE_NOT and words[index + 1 : index + 2] == ("t",):
            return True
        if word in ("left", "right"):
            # `5 apples left` are those that remain; `5 units left` is a direction, and so is `5 left`
            noun = words[index - 1] if index else unit
            if (
                word == "right"
                or not noun
                or noun.removesuffix("s") in _PLACES
                or unit_symbol(noun) not in (None, "dollar")
            ):
                return True
        elif (
            word in BLOCKING
            or word.removesuffix("s") in SCALES
            or word.removesuffix("s") in _PARTS
            or word.endswith("n't")
        ):
            return True
    return False


def stems(words: Iterable[str]) -> frozenset[str]:
    """The words without articles and plurals."""
    plural = r"(?<=[a-z]{2})(?:ies|y)$|(?<=[sxh])es$|(?<=[a-rt-z])s$"
    return frozenset(re.sub(plural, "", word) for word in words) - {"the", "a", "an", "of", "in", "total"}


COMPASS = {"N": "north", "S": "south", "E": "east", "W": "west"}
"""Letters after degrees of latitude and longitude."""
NO_SOLUTION = re.compile(
    r"(?:there (?:is|are|exists?) )?(?:no|zero) (?:real |such |valid )?(?:solutions?|roots?|values?)"
    r"(?: exists?)?(?: for x)?"
)
_SAYINGS = {
    "emptyset": "none, empty set, null set, empty",
    "does not exist": """dne, doesn't exist, do not exist, undefined, not defined, is undefined, limit does not exist,
        the limit does not exist""",
    "infinitely many": """infinitely many solutions, infinite solutions, infinite number of solutions,
        there are infinitely many solutions""",
    "reals": """all real numbers, all reals, real numbers, all real number, set of all real numbers, any real number,
        set of real numbers, every real number""",
    "noon": "midday",
}
SYNONYMS = {" ".join(phrase.split()): meaning for meaning, text in _SAYINGS.items() for phrase in text.split(",")}
"""Answers in words that say the same."""
MONTHS = {name: number for number, name in enumerate(names(
    """
    january february march april may june july august september october november december
    """
), start=1)}  # fmt: skip
MONTHS |= {name[:3]: number for name, number in MONTHS.items()} | {"sept": 9}
