"""What an answer can be: a quantity, a tuple, a set, intervals, a time of day, a letter of a choice, and so on."""

from dataclasses import dataclass
from fractions import Fraction

from grpo_roc_jax.reward.latex import Token, render


@dataclass(frozen=True)
class Form:
    """An answer as read; `tokens` are all of it."""

    tokens: tuple[Token, ...]

    @property
    def text(self) -> str:
        """The form in LaTeX."""
        return render(self.tokens)


@dataclass(frozen=True)
class Quantity(Form):
    """An expression with its unit and the words around it."""

    expression: tuple[Token, ...] = ()
    value: Fraction | str | None = None
    unit: str = ""
    sign: bool = False
    """The unit is the sign of a currency."""
    words: tuple[str, ...] = ()
    several: bool = False
    """It was written in several units, such as 5 ft 6 in."""
    changed: bool = False
    """Words or numbers around the expression change what it says."""

    @property
    def text(self) -> str:
        return render(self.expression)


@dataclass(frozen=True)
class Words(Form):
    """Words without a formula, in small letters."""

    phrase: str = ""


@dataclass(frozen=True)
class Items(Form):
    """Several forms. `kind` is list (no brackets), set, tuple, array ([] of more than two) or vector."""

    kind: str = "list"
    items: tuple[Form, ...] = ()
    name: str = ""
    """Of a point, such as P(1,2)."""


@dataclass(frozen=True)
class Matrix(Form):
    """Rows of forms; several rows and columns."""

    rows: tuple[tuple[Form, ...], ...] = ()


@dataclass(frozen=True)
class Interval:
    """Bounds, None for infinity, and whether they are left out."""

    low: Form | None
    high: Form | None
    open_low: bool
    open_high: bool


@dataclass(frozen=True)
class Region(Form):
    """A union of intervals and single points of a line."""

    intervals: tuple[Interval, ...] = ()
    points: tuple[Form, ...] = ()
    variable: str = ""


@dataclass(frozen=True)
class Equation(Form):
    """name = value; the name may be an expression."""

    name: str = ""
    value: Form = Form(())
    simple: bool = True
    """The name is a variable, a function of one, or a sum of variables."""
    sides: tuple[Form, ...] = ()
    """All sides of a chain a = b = c, without numbers between that equal the last one; empty for two sides."""


@dataclass(frozen=True)
class Relation(Form):
    """An equation or inequality that is no interval."""


@dataclass(frozen=True)
class Approximation(Form):
    """An exact expression and its rounded value."""

    parts: tuple[Form, ...] = ()


@dataclass(frozen=True)
class Choice(Form):
    """A letter of a multiple choice, and what follows it."""

    letter: str = ""
    rest: Form | None = None
    marked: bool = False
    """It is written as a choice, (B) or B., and not as a variable."""


@dataclass(frozen=True)
class Based(Form):
    """Digits in a base."""

    digits: str = ""
    base: int = 10
    value: int = 0


@dataclass(frozen=True)
class Clock(Form):
    """A time of day: seconds since midnight, and whether half a day is named."""

    seconds: int = 0
    half: str = ""


@dataclass(frozen=True)
class Date(Form):
    """A day, with its year or 0."""

    year: int = 0
    month: int = 0
    day: int = 0


@dataclass(frozen=True)
class Joined(Form):
    """Whole numbers joined by hyphens, slashes or dots: a date, a score, a telephone number."""

    parts: tuple[str, ...] = ()
    mark: str = "-"
    spaced: bool = False


@dataclass(frozen=True)
class Proportion(Form):
    """a:b:c."""

    parts: tuple[Form, ...] = ()


@dataclass(frozen=True)
class Cases(Form):
    """Rows of a definition by cases."""

    rows: tuple[tuple[Form, ...], ...] = ()
