r"""Compares two answers: by their form where that is enough, or by a goal for the symbolic library where it is not.

All of this runs in the trainer on text that a policy wrote. So everything takes linear time, no number is expanded
beyond `MAX_EXACT_DIGITS`, and expressions that are too large to compute are refused by their form (`reward.magnitude`).
`reward.latex` makes tokens of a text, `reward.forms` reads their form, `reward.verify` asks the library.
"""

import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from grpo_roc_jax.reward import words as vocabulary
from grpo_roc_jax.reward.algebra import (
    CROSSED,
    distinct_names,
    for_library,
    without_arrows,
    without_constant,
    without_cross_products,
    without_inverses,
)
from grpo_roc_jax.reward.forms import (
    Approximation,
    Based,
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
    Words,
)
from grpo_roc_jax.reward.latex import Token, render, split, tokenize
from grpo_roc_jax.reward.magnitude import too_large
from grpo_roc_jax.reward.magnitude import value as decimal_value
from grpo_roc_jax.reward.numbers import (
    BASED_IN_TEXT,
    MAX_EXACT_DIGITS,
    read_number,
)
from grpo_roc_jax.reward.quantities import merged_numbers, quantity
from grpo_roc_jax.reward.reading import as_region, components, read

__all__ = [
    "MAX_EXACT_DIGITS",
    "Goal",
    "compare",
    "decide",
    "expressions",
    "for_algebra",
    "leaves",
    "normalize",
    "read_number",
    "refused",
    "split_unit",
]

MAX_FORM_CHARS = 3000
"""Longer texts are compared as texts and numbers only."""
MAX_MATCHED = 30
"""Largest set whose elements are compared in any order by algebra; of larger ones, only equal elements in order."""

Goal = bool | tuple
r"""Whether two answers are equal: decided, or `("same", answer, gold)` for the library, or `("all", goals)`,
`("any", goals)`, or `("match", rows)`: the rows of answers can be assigned to the columns of references."""

# ---- goals ---------------------------------------------------------------------------------------------------------


def _every(goals: Sequence[Goal]) -> Goal:
    if any(goal is False for goal in goals):
        return False
    left = tuple(goal for goal in goals if goal is not True)
    return True if not left else left[0] if len(left) == 1 else ("all", left)


def _some(goals: Sequence[Goal]) -> Goal:
    if any(goal is True for goal in goals):
        return True
    left = tuple(dict.fromkeys(goal for goal in goals if goal is not False))
    return False if not left else left[0] if len(left) == 1 else ("any", left)


def _matched(rows: list[list[Goal]]) -> Goal:
    """Whether each row has a column that no other row has. Equality carries over, so decided pairs may leave first."""
    columns = list(range(len(rows[0]))) if rows else []
    left = []
    for row in rows:
        sure = next((column for column in columns if row[column] is True), None)
        if sure is None:
            left.append(row)
        else:
            columns.remove(sure)
    rest = [[row[column] for column in columns] for row in left]
    if any(all(goal is False for goal in row) for row in rest):
        return False
    if any(all(row[i] is False for row in rest) for i in range(len(columns))):
        return False
    if not rest:
        return True
    if len(rest) == 1:
        return rest[0][0]
    return ("match", tuple(map(tuple, rest)))


def leaves(goal: Goal) -> list[tuple[str, str]]:
    """The (answer, gold) expressions of a goal."""
    if isinstance(goal, bool):
        return []
    kind, *parts = goal
    if kind == "same":
        return [(parts[0], parts[1])]
    rows = parts[0] if kind == "match" else (parts[0],)
    return [leaf for row in rows for part in row for leaf in leaves(part)]


# ---- the comparison ------------------------------------------------------------------------------------------------


def compare(answer: str, gold: str, *, strict: bool = False) -> Goal:
    """Whether two answers are equal, or what the library must find to decide it.

    Args:
        strict: Units and words count, and a percent sign divides by 100. Otherwise units and harmless words are
            ignored where one side has none, and 50% is 50 and 0.5. Two units may be converted either way.
    """
    if len(answer) > MAX_FORM_CHARS or len(gold) > MAX_FORM_CHARS:
        return _long(answer, gold)
    tokens, reference = tokenize(answer), tokenize(gold)
    if render(tokens) == render(reference) and (tokens or answer.strip() == gold.strip()):
        return True
    if not tokens or not reference:
        return False
    vectors = any(CROSSED.search(text) for text in (answer, gold))
    rules, target = _Rules(strict, vectors=vectors), read(reference)
    goals = [rules.equal(read(tokens), target)]
    if _has_decimal_comma(tokens, target):
        goals.append(rules.equal(read(merged_numbers(tokens, decimal_comma=True)), target))
    if not strict and (thousands := _abbreviated(tokens)) is not None:
        goals.append(rules.equal(thousands, target))
    return _some(goals)


def _abbreviated(tokens: Sequence[Token]) -> Quantity | None:
    """2.5K and 5M as numbers; None for anything else, such as a unit after a space."""
    if len(tokens) != 2 or tokens[1].gap or tokens[1].text not in ("k", "K", "M", "B"):
        return None
    value = read_number(tokens[0].text)
    scale = vocabulary.ABBREVIATIONS[tokens[1].text]
    return Quantity(tuple(tokens), tuple(tokens), value * scale) if isinstance(value, Fraction) else None


def _has_decimal_comma(tokens: Sequence[Token], target: Form) -> bool:
    """Whether `0,5` may be a decimal: the reference is one number that is not whole."""
    fraction = isinstance(target, Quantity) and isinstance(target.value, Fraction) and target.value.denominator > 1
    return fraction and merged_numbers(tokens, decimal_comma=True) != merged_numbers(tokens)


def _long(answer: str, gold: str) -> bool:
    texts = [re.sub(r"\s+|\$", "", text).rstrip(".") for text in (answer, gold)]
    if texts[0] == texts[1]:
        return True
    numbers = [read_number(text.replace(",", "")) for text in map(_powers_of_ten, texts)]
    return numbers[0] is not None and numbers[0] == numbers[1]


def _powers_of_ten(text: str) -> str:
    return re.sub(r"^([+-]?[0-9.]++)[eE]([+-]?[0-9]{1,19})$", r"\1\\times10^{\2}", text)


def decide(answer: str, gold: str, *, strict: bool = False) -> bool | None:
    """Whether two answers are equal by their forms; None if algebra is needed to decide."""
    goal = compare(answer, gold, strict=strict)
    return goal if isinstance(goal, bool) else None


def for_algebra(answer: str, gold: str, *, strict: bool = False) -> Goal:
    """The goal of two answers that `decide` left open."""
    return compare(answer, gold, strict=strict)


def normalize(answer: str) -> str:
    r"""The answer in LaTeX without layout.

    No dollar signs, spacing commands, markup, thousands separators or final period; `\dfrac` is `\frac`, `_1` is
    `_{1}`; 1e-5 is `1\times10^{-5}`, and Python's `np.arcsin(x)`, `x**2`, `pi` are written in LaTeX.
    """
    tokens = merged_numbers(tokenize(answer)) if len(answer) <= MAX_FORM_CHARS else tokenize(answer)
    while len(tokens) > 1 and tokens[-1].text == "." and tokens[-2].text != ".":
        tokens.pop()
    return render([token for token in tokens if token.text != r"\$"])


def split_unit(answer: str) -> tuple[str, str]:
    r"""(what is before the unit, the unit), for a common unit, a percent sign or degrees; the unit is "" without one.

    `3 m/s`, `3\text{ m}/\text{s}` and `3 meters per second` have the same unit.
    """
    form = quantity(tokenize(answer)) if answer.strip() else None
    if isinstance(form, Quantity) and form.unit and form.expression:
        return form.text, form.unit
    return answer, ""


# ---- rules by form -------------------------------------------------------------------------------------------------


class _Rules:
    """Equality of forms under one setting."""

    def __init__(self, strict: bool, *, vectors: bool = False) -> None:
        self.strict, self.vectors = strict, vectors

    def equal(self, form: Form, gold: Form) -> Goal:
        """Whether an answer's form equals that of the reference."""
        if form.tokens and render(form.tokens) == render(gold.tokens) and type(form) is type(gold):
            return True
        for rule in (self._choices, self._approximations, self._equations, self._regions, self._items, self._fixed):
            goal = rule(form, gold)
            if goal is not None:
                return goal
        if isinstance(form, Quantity) and isinstance(gold, Quantity):
            return self._quantities(form, gold)
        if isinstance(form, Words) or isinstance(gold, Words):
            return self._phrases(form, gold)
        if (
            isinstance(form, Relation) != isinstance(gold, Relation)
            and not isinstance(form, Equation)
            and not isinstance(gold, Equation)
        ):
            return False
        if (isinstance(form, Relation) or isinstance(gold, Relation)) and (_of_numbers(form) or _of_numbers(gold)):
            return False  # 5! = 120 and 5 < 7 are both true to the library
        return self._expressions(form, gold)

    # -- letters

    def _choices(self, form: Form, gold: Form) -> Goal | None:
        if isinstance(form, Choice) and isinstance(gold, Choice):
            if form.letter != gold.letter:
                return False
            return self.equal(form.rest, gold.rest) if form.rest and gold.rest else True
        for choice, other in ((form, gold), (gold, form)):
            if isinstance(choice, Choice):
                letters = _letters(other)
                if letters is not None and not choice.rest:
                    return letters == {choice.letter}
                if choice.rest:
                    return self.equal(choice.rest, gold) if choice is form else self.equal(form, choice.rest)
                if choice.marked:
                    return other.text.strip("()").upper() == choice.letter and not self.strict
                plain = Quantity(choice.tokens, choice.tokens)
                if isinstance(other, Choice):
                    return False
                return self.equal(plain, gold) if choice is form else self.equal(form, plain)
        if (
            not self.strict
            and (letters := _letters(form))
            and (others := _letters(gold))
            and max(len(letters), len(others)) > 1
        ):
            return letters == others
        return None

    # -- 4\pi \approx 12.57

    def _approximations(self, form: Form, gold: Form) -> Goal | None:
        if isinstance(form, Approximation):
            return _some([self.equal(part, gold) for part in form.parts]) if _close(form) else False
        if isinstance(gold, Approximation):
            return _some([self.equal(form, part) for part in gold.parts])
        return None

    # -- x = 5

    def _equations(self, form: Form, gold: Form) -> Goal | None:
        chains = [side for side in (form, gold) if isinstance(side, Equation) and side.sides]
        if len(chains) == 2:
            if all(any(side.text == r"\ldots" for side in chain.sides) for chain in chains):
                return _every([self.equal(form.sides[at], gold.sides[at]) for at in (0, -1)])  # a_1 = ... = a_n
            return self._any_order(form.sides, gold.sides, self.equal)
        linked = bool(chains) and _says_more(chains[0])
        if isinstance(form, Equation) and isinstance(gold, Equation):
            if linked:
                return self._systems(form, gold) or False
            if form.name == gold.name:
                return self.equal(form.value, gold.value)
            values = [value.value if isinstance(value, Quantity) else None for value in (form.value, gold.value)]
            if None not in values and form.simple and gold.simple:
                return False
            return self._expressions(form, gold)
        system = self._systems(form, gold)
        if system is not None:
            return system
        if linked and (_is_open_name(chains[0].value) or not (chains[0].simple or _has_value(chains[0].value))):
            return False
        if isinstance(form, Equation) and not isinstance(gold, Relation):
            solved = _UNSOLVED.fullmatch(form.name) is None or not _has_value(form.value)
            plain = form.simple or (solved and not self.strict)
            return self.equal(form.value, gold) if plain else False
        if isinstance(gold, Equation) and not isinstance(form, Relation):
            return self.equal(form, gold.value) if gold.simple or not self.strict else False
        return None

    def _systems(self, form: Form, gold: Form) -> Goal | None:
        """x=1, y=2 as a set of equations, and as the pair (1,2); x_1=1, x_2=2 as the solutions 2,1 too."""
        named, reference = _assignments(form), _assignments(gold)
        if named is None and reference is None:
            return None
        if named is not None and reference is not None:
            if named.keys() == reference.keys():
                return _every([self.equal(named[name], reference[name]) for name in named])
            return False
        values = named if named is not None else reference
        ordered = [values[name] for name in sorted(values)]
        other = gold if named is not None else form
        if (
            not isinstance(other, Items)
            or other.kind not in ("tuple", "vector", "list")
            or len(other.items) != len(ordered)
            or len(ordered) < 2
        ):
            return None
        if other.kind == "list" and any(isinstance(item, Equation) for item in other.items):
            return None
        numbered = [_NUMBERED.fullmatch(name) for name in values]
        if other is gold and other.kind == "list" and all(numbered) and len({match[1] for match in numbered}) == 1:
            return self._any_order(ordered, other.items, self.equal)
        pairs = zip(ordered, other.items, strict=True)
        return _every([self.equal(a, b) if named is not None else self.equal(b, a) for a, b in pairs])

    # -- intervals

    def _regions(self, form: Form, gold: Form) -> Goal | None:
        if not isinstance(form, Region) and not isinstance(gold, Region):
            return None
        mine, reference = as_region(form), as_region(gold)
        if mine is None or reference is None:
            for region, other in ((form, gold), (gold, form)):
                if isinstance(region, Region) and isinstance(other, Items) and not self.strict:
                    row = _closed_pair(region)
                    if row and other.kind == "vector" and len(other.items) == 2 and not region.variable:
                        return _every([self.equal(a, b) for a, b in zip(row, other.items, strict=True)])
            open_questions = isinstance(form if mine is None else gold, Relation | Quantity)
            return (
                self._expressions(form, gold)
                if open_questions and not _is_number(form) and not _is_number(gold)
                else False
            )
        if mine.variable and reference.variable and mine.variable != reference.variable:
            return False
        if isinstance(form, Items) and form.kind == "tuple" and len(reference.intervals) != 1:
            return False
        pieces, targets = _pieces(mine), _pieces(reference)
        if len(pieces) != len(targets):
            return False
        return self._any_order(pieces, targets, self._pieces_equal)

    def _pieces_equal(self, piece: Interval | Form, target: Interval | Form) -> Goal:
        if not isinstance(piece, Interval) or not isinstance(target, Interval):
            return (
                self.equal(piece, target)
                if not isinstance(piece, Interval) and not isinstance(target, Interval)
                else False
            )
        if (piece.open_low, piece.open_high) != (target.open_low, target.open_high):
            return False
        goals = []
        for end, bound in ((piece.low, target.low), (piece.high, target.high)):
            if (end is None) != (bound is None):
                return False
            goals.append(True if end is None else self.equal(end, bound))
        return _every(goals)

    # -- tuples, sets, lists, matrices

    def _items(self, form: Form, gold: Form) -> Goal | None:
        if isinstance(form, Matrix) and isinstance(gold, Matrix):
            if len(form.rows) != len(gold.rows):
                return False
            pairs = zip(form.rows, gold.rows, strict=True)
            return _every([self._in_order(row, target) for row, target in pairs])
        if isinstance(form, Cases) and isinstance(gold, Cases):
            return self._any_order(form.rows, gold.rows, self._case)
        if isinstance(form, Items) and isinstance(gold, Items):
            return self._collections(form, gold)
        for items, other in ((form, gold), (gold, form)):
            if isinstance(items, Items):
                if items.kind == "set" and len(items.items) == 1 and isinstance(other, Quantity) and not self.strict:
                    return self.equal(items.items[0], gold) if items is form else self.equal(form, items.items[0])
                if items.kind == "list" and (known := _without_domain(items)) is not None and not self.strict:
                    return self.equal(known, gold) if items is form else self.equal(form, known)
                if (row := self._vector(items, other)) is not None:
                    return self._in_order(items.items, row) if items is form else self._in_order(row, items.items)
                if isinstance(other, Relation) or (
                    isinstance(other, Quantity) and not _is_number(other) and items.kind != "list"
                ):
                    return self._expressions(form, gold)
                return False
        if isinstance(form, Matrix | Cases) or isinstance(gold, Matrix | Cases):
            other = gold if isinstance(form, Matrix | Cases) else form
            return self._expressions(form, gold) if isinstance(other, Quantity) and not _is_number(other) else False
        return None

    def _vector(self, items: Items, other: Form) -> list[Form] | None:
        r"""The components of a sum of unit vectors that is compared with a tuple, such as `2\hat{i}+\hat{j}`."""
        sum_of_units = isinstance(other, Quantity) and not other.words and not other.changed
        if (
            self.strict
            or not sum_of_units
            or items.kind == "list"
            or items.kind == "set"
            or len(items.items) not in (2, 3)
        ):
            return None
        return components(other.expression, len(items.items))

    def _collections(self, form: Items, gold: Items) -> Goal:
        kinds = {form.kind, gold.kind}
        if kinds <= {"list", "set"}:
            items, targets = form.items, gold.items
            if kinds == {"list"} and self.strict and all(isinstance(item, Words) for item in (*items, *targets)):
                return self._in_order(items, targets)
            if "set" in kinds:
                items, targets = _distinct(items), _distinct(targets)
            if len(items) != len(targets):
                return False
            return self._any_order(items, targets, self.equal)
        if form.name and gold.name and form.name != gold.name:
            return False
        if self.strict and (form.kind != gold.kind or form.name != gold.name):
            return False
        if "set" in kinds:
            return False
        return self._in_order(form.items, gold.items)

    def _case(self, row: Sequence[Form], target: Sequence[Form]) -> Goal:
        """Whether two rows of a definition by cases are equal; by default `otherwise` is any condition."""
        rest = any(isinstance(side[-1], Words) and side[-1].phrase in ("otherwise", "else") for side in (row, target))
        if rest and len(row) == len(target) == 2 and not self.strict:
            return self.equal(row[0], target[0])
        return self._in_order(row, target)

    def _in_order(self, items: Sequence[Form], targets: Sequence[Form]) -> Goal:
        if len(items) != len(targets):
            return False
        return _every([self.equal(item, target) for item, target in zip(items, targets, strict=True)])

    def _any_order(self, items: Sequence, targets: Sequence, same: Callable[..., Goal]) -> Goal:
        if len(items) != len(targets):
            return False
        if len(items) > MAX_MATCHED:
            return _every([same(item, target) for item, target in zip(items, targets, strict=True)])
        return _matched([[same(item, target) for target in targets] for item in items])

    # -- forms that equal their own kind only

    def _fixed(self, form: Form, gold: Form) -> Goal | None:
        if isinstance(form, Based) or isinstance(gold, Based):
            return self._bases(form, gold)
        if (
            not self.strict
            and isinstance(form, Joined) != isinstance(gold, Joined)
            and (score := _score(form))
            and score == _score(gold)
        ):
            return True
        if isinstance(form, Clock) or isinstance(gold, Clock):
            return self._clocks(form, gold)
        if isinstance(form, Proportion) or isinstance(gold, Proportion):
            return self._ratios(form, gold)
        if isinstance(form, Date) and isinstance(gold, Date):
            same = (form.month, form.day) == (gold.month, gold.day)
            years = {form.year, gold.year}
            return same and (len(years) == 1 or (0 in years and not self.strict))
        if isinstance(gold, Joined | Date) or isinstance(form, Date):
            if isinstance(form, Joined) and isinstance(gold, Joined):
                numbers = [
                    [int(part) if len(part) < 19 else part for part in parts] for parts in (form.parts, gold.parts)
                ]
                return form.parts == gold.parts or (numbers[0] == numbers[1] and not self.strict)
            return False
        if isinstance(form, Joined):
            return self._difference(form, gold)
        return None

    def _difference(self, form: Joined, gold: Form) -> Goal:
        """Digits joined by a hyphen are a difference if the hyphen has spaces around it or the reference is an
        expression, and by default if they can be nothing else: no score (3-1), month (2024-12), range or number."""
        plain = (
            len(form.parts) == 2 and form.mark == "-" and not any(part != "0" and part[0] == "0" for part in form.parts)
        )
        if not plain or not isinstance(gold, Quantity) or max(map(len, form.parts)) > 18:
            return False
        if not form.spaced:
            first, second = map(int, form.parts)
            score = max(map(len, form.parts)) < 4
            month = 1000 <= first < 3000 and 10 <= second <= 12
            if first <= second or (gold.value is not None and (self.strict or score or month)):
                return False
        value = Fraction(int(form.parts[0]) - int(form.parts[1]))
        return self.equal(Quantity(form.tokens, form.tokens, value), gold)

    def _bases(self, form: Form, gold: Form) -> Goal:
        if isinstance(form, Based) and isinstance(gold, Based):
            return form.value == gold.value
        based, other = (form, gold) if isinstance(form, Based) else (gold, form)
        digits = based.digits
        if isinstance(other, Quantity) and BASED_IN_TEXT.search(other.text):
            return self._expressions(form, gold)
        plain = isinstance(other, Quantity) and not other.unit and not other.words and other.text.lstrip("0") == digits
        # A reference may say the base that the question asks for; digits of a reference without one are decimal.
        return plain and not self.strict and (based is gold or based.base == 10)

    def _clocks(self, form: Form, gold: Form) -> Goal:
        if isinstance(form, Clock) and isinstance(gold, Clock):
            # 15:45 is 3:45 pm; 3:45 may be that too, but not where the other one counts 24 hours
            named = [any(token.is_name for token in clock.tokens) for clock in (form, gold)]
            if named[0] == named[1] or (form.half and gold.half):
                return form.seconds == gold.seconds
            return form.seconds % 43200 == gold.seconds % 43200 and not self.strict
        clock, other = (form, gold) if isinstance(form, Clock) else (gold, form)
        bare = not any(token.is_name for token in clock.tokens)
        if isinstance(other, Proportion | Quantity) and bare and any(token.text == ":" for token in clock.tokens):
            parts = tuple(quantity([token]) for token in clock.tokens if token.is_number)
            ratio = Proportion(clock.tokens, parts)
            return self._ratios(ratio, gold) if clock is form else self._ratios(form, ratio)
        return False

    def _ratios(self, form: Form, gold: Form) -> Goal:
        if isinstance(form, Proportion) and isinstance(gold, Proportion):
            if len(form.parts) != len(gold.parts):
                return False
            values = [
                [part.value if isinstance(part, Quantity) else None for part in ratio.parts] for ratio in (form, gold)
            ]
            if all(isinstance(value, Fraction) and value for row in values for value in row):
                scale = values[0][0] / values[1][0]
                return all(a == scale * b for a, b in zip(*values, strict=True))
            return self._in_order(form.parts, gold.parts)
        ratio, other = (form, gold) if isinstance(form, Proportion) else (gold, form)
        values = [part.value if isinstance(part, Quantity) else None for part in ratio.parts]
        if self.strict or len(values) != 2 or not isinstance(other, Quantity):
            return False
        if all(isinstance(value, Fraction) for value in values) and values[1]:
            return other.value == values[0] / values[1]
        tokens = (*_grouped(ratio.parts[0].tokens), Token("/"), *_grouped(ratio.parts[1].tokens))
        quotient = Quantity(tokens, tokens)
        return self.equal(quotient, gold) if ratio is form else self.equal(form, quotient)

    # -- words

    def _phrases(self, form: Form, gold: Form) -> Goal:
        if isinstance(form, Words) and isinstance(gold, Words):
            if form.phrase == gold.phrase:
                return True
            return (
                not self.strict
                and vocabulary.stems(form.phrase.split()) == vocabulary.stems(gold.phrase.split()) != frozenset()
            )
        words, other = (form, gold) if isinstance(form, Words) else (gold, form)
        single = len(words.tokens) == 1 and not words.tokens[0].roman
        if (
            single
            and isinstance(other, Quantity)
            and not other.words
            and other.value is None
            and not _is_one_name(other)
        ):
            return self._expressions(form, gold)  # a product of variables that reads like a word
        return False

    # -- quantities

    def _quantities(self, form: Quantity, gold: Quantity) -> Goal:
        if self.strict:
            if form.words != gold.words or form.changed or gold.changed:
                same = form.words == gold.words and not _heavy(form) and not _heavy(gold)
                if same and (sizes := _sizes(form, gold)) is not None:
                    return self._converted(form, gold, sizes)
                return self._values(form, gold) if same and form.unit == gold.unit else False
            missing = (not form.unit and gold.sign) or (not gold.unit and form.sign)
            if (sizes := _sizes(form, gold)) is not None:
                return self._converted(form, gold, sizes)
            if _radians(form, gold):
                return self._turned(form, gold)
            if form.unit != gold.unit and not missing and {form.unit, gold.unit} != {"%", ""}:
                return False
            return self._values(form, gold)
        if form.changed or gold.changed:
            same = (
                vocabulary.stems(form.words) == vocabulary.stems(gold.words) and not _heavy(form) and not _heavy(gold)
            )
            if same and (sizes := _sizes(form, gold)) is not None and 0 not in sizes:
                return _some([self._values(form, gold), self._converted(form, gold, sizes)])
            return self._values(form, gold) if same else False
        mine, reference = vocabulary.stems(form.words), vocabulary.stems(gold.words)
        if mine and reference and not (mine <= reference or reference <= mine):
            return False
        sizes = _sizes(form, gold)
        if sizes is not None and (form.several or gold.several):
            return self._converted(form, gold, sizes)
        goals = [self._values(form, gold)]
        if sizes is not None:
            goals.append(self._converted(form, gold, sizes))
        if _radians(form, gold):
            goals.append(self._turned(form, gold))
        return _some(goals)

    def _turned(self, form: Quantity, gold: Quantity) -> Goal:
        """An angle in degrees and one in radians."""
        texts = [for_library(side.expression, strict=self.strict) for side in (form, gold)]
        units = form.unit, gold.unit
        return self._same(
            *(rf"\frac{{\pi}}{{180}}({text})" if unit == "°" else text for text, unit in zip(texts, units, strict=True))
        )

    def _converted(self, form: Quantity, gold: Quantity, sizes: tuple[Fraction, Fraction]) -> Goal:
        """Quantities in different units, by what these are in common ones; sizes of 0 have nothing in common."""
        if 0 in sizes:
            return False
        if isinstance(form.value, Fraction) and isinstance(gold.value, Fraction):
            return form.value * sizes[0] == gold.value * sizes[1]
        if not form.expression or not gold.expression:
            return False
        ratio = sizes[0] / sizes[1]
        texts = [for_library(side.expression, strict=self.strict) for side in (form, gold)]
        return self._same(rf"\frac{{{ratio.numerator}}}{{{ratio.denominator}}}({texts[0]})", texts[1])

    def _values(self, form: Quantity, gold: Quantity) -> Goal:
        numbers = form.value, gold.value
        units = form.unit, gold.unit
        if "%" in units and "" not in units and units[0] != units[1]:
            return False
        if None not in numbers:
            if self.strict:
                scaled = [
                    value / 100 if unit == "%" and isinstance(value, Fraction) else value
                    for value, unit in zip(numbers, units, strict=True)
                ]
                return scaled[0] == scaled[1]
            if numbers[0] == numbers[1]:
                return True
            if units[0] == units[1] or "%" not in units or str in map(type, numbers):
                return False
            percent, plain = numbers if units[0] == "%" else numbers[::-1]
            return percent == 100 * plain
        if not form.expression or not gold.expression:
            return False
        texts = [for_library(side.expression, strict=self.strict) for side in (form, gold)]
        if texts[0] == texts[1] and units[0] == units[1]:
            return True
        if self.strict:
            return self._same(
                *(rf"\frac{{{text}}}{{100}}" if unit == "%" else text for text, unit in zip(texts, units, strict=True))
            )
        goals = [self._same(*texts)]
        if units[0] != units[1] and "%" in units:
            goals.append(
                self._same(
                    *(
                        rf"\frac{{{text}}}{{100}}" if unit == "%" else text
                        for text, unit in zip(texts, units, strict=True)
                    )
                )
            )
        return _some(goals)

    def _expressions(self, form: Form, gold: Form) -> Goal:
        """Two texts for the library, whatever their forms."""
        return self._same(for_library(form.tokens, strict=self.strict), for_library(gold.tokens, strict=self.strict))

    def _same(self, answer: str, gold: str) -> Goal:
        if answer == gold:
            return True
        if not self.strict:
            answer, gold = without_constant(answer, gold)
            answer, gold = without_arrows(answer, gold)
            if answer == gold:
                return True
        if not self.strict:
            answer, gold = (_DIGITS_GO_ON.sub(r"\1", text) for text in (answer, gold))
        if _DOTS.search(answer + gold) or _SUBSCRIPTED.search(f"{answer} {gold}"):
            return False  # the library adds up the terms that are written, and drops the subscript of a number
        if r"\ln" in answer + gold:
            answer, gold = (re.sub(r"\\log(?![a-z_])", r"\\ln", text) for text in (answer, gold))
        if sorted(_COMPARING.findall(answer)) != sorted(_COMPARING.findall(gold)):
            return False  # the library reads over these
        crossed = without_cross_products(answer, gold, vectors=self.vectors)
        if crossed is None:
            return False
        answer, gold = distinct_names(*without_inverses(*crossed))
        return True if answer == gold else ("same", answer, gold)


_DOTS = re.compile(r"\\[lc]?dots(?![A-Za-z])|\.\.\.")
_SUBSCRIPTED = re.compile(r"(?<![A-Za-z0-9}_])[0-9]+_\{")
_DIGITS_GO_ON = re.compile(r"^([+-]?[0-9]+\.[0-9]+)\\[lc]?dots$")
_COMPARING = re.compile(
    r"\\(lesssim|gtrsim|lessapprox|gtrapprox|lessgtr|gtrless|ll|gg|prec|preceq|succ|succeq|propto|nless|ngtr|nleq|ngeq"
    r"|not|nmid|ncong|nsim)(?![a-zA-Z])"
)
"""Comparisons other than those of intervals and equations."""

# ---- helpers -------------------------------------------------------------------------------------------------------


def _sizes(form: Quantity, gold: Quantity) -> tuple[Fraction, Fraction] | None:
    """The sizes of two different units of one dimension, or zeros where the dimensions differ; None where a unit is
    missing, unknown or the same."""
    if not form.unit or not gold.unit or form.unit == gold.unit:
        return None
    mine, reference = vocabulary.measure(form.unit), vocabulary.measure(gold.unit)
    if mine is None or reference is None:
        return None
    return (mine[0], reference[0]) if mine[1] == reference[1] else (Fraction(0), Fraction(0))


def _radians(form: Quantity, gold: Quantity) -> bool:
    r"""Whether one is an angle in degrees and the other one in radians, which says so or contains \pi."""
    degrees, other = (form, gold) if form.unit == "°" else (gold, form)
    if degrees.unit != "°" or not degrees.expression or not other.expression or other.unit not in ("", "rad"):
        return False
    multiple = any(token.text == r"\pi" for token in other.expression)
    return (other.unit == "rad" or multiple) and not any(token.text == r"\pi" for token in degrees.expression)


def _letters(form: Form) -> set[str] | None:
    """The letters of A, C or of AC, each a choice; None for anything else."""
    if (
        isinstance(form, Items)
        and form.kind in ("list", "set")
        and form.items
        and all(isinstance(item, Choice) and not item.rest for item in form.items)
    ):
        return {item.letter for item in form.items if isinstance(item, Choice)}
    if isinstance(form, Choice) and not form.rest:
        return {form.letter}
    text = form.text
    letters = re.fullmatch(r"(?:\\text\{)?([A-J]{2,6})\}?", text)
    if letters and list(letters.group(1)) == sorted(set(letters.group(1))):
        return set(letters.group(1))
    return None


def _close(form: Approximation) -> bool:
    """Whether the two sides agree to the last digit that the rounded one has; two guesses do not."""
    values = [
        decimal_value(
            part.value.tokens
            if isinstance(part, Equation)
            else part.expression
            if isinstance(part, Quantity)
            else part.tokens
        )
        for part in form.parts
    ]
    if values[0] is None and values[1] is not None:
        return True  # x \approx 2.7
    if None in values:
        return False
    last = form.parts[1].text
    places = len(last.partition(".")[2]) if re.fullmatch(r"-?[0-9]*\.[0-9]+", last) else 0
    size = (
        10.0**-places
        if places or abs(values[1]) < 10
        else 10.0 ** (len(last) - len(last.rstrip("0")) if last.isdecimal() else 0)
    )
    size = max(size, float(abs(values[1])) * 0.005) if "times" in last else size
    return float(abs(values[0] - values[1])) < size


_UNKNOWN = r"(?:[A-Za-z]|\\(?!pi)[a-z]+)(?:_\{[^{}]*\})?"
_RATIONAL = r"(?:[0-9.]{1,500}|\\frac\{[0-9]{1,500}\}\{[0-9]{1,500}\})"
_UNSOLVED = re.compile(
    rf"-?(?:{_RATIONAL}(?:\\cdot ?)?)?{_UNKNOWN}(?:[+-]{_RATIONAL})?|{_RATIONAL}[+-]{_RATIONAL}?{_UNKNOWN}"
    rf"|-?(?:\\frac\{{(?:{_RATIONAL}?{_UNKNOWN}\}}\{{{_RATIONAL}|{_RATIONAL}\}}\{{{_UNKNOWN})\}}|{_RATIONAL}/{_UNKNOWN})"
    rf"|e\^\{{{_UNKNOWN}\}}"
)
r"""The left side of an equation that is still to be solved, such as 2x = 4 or 3 - x = 4; `x^2+\frac{1}{x^2} = 7` and
`\sin x = 1` may be what was asked for."""

_NUMBERED = re.compile(r"(\\[a-z]+|[A-Za-z])_\{[0-9]{1,3}\}")
_OPEN_NAME = re.compile(
    r"(?:m?\\angle ?)?(?:\\[A-Za-z]+|(?:[A-Za-z]|[A-Z]{2,4}|\\text\{[^{}]*\})(?:\([^()]*\))?)"
    r"(?:_\{[^{}]*\}(?:\([^()]*\))?|')*"
)


def _is_open_name(form: Form) -> bool:
    """Whether a side of an equation is a variable, a value of a function, or the name of a figure, and no number."""
    return _OPEN_NAME.fullmatch(render(form.tokens)) is not None and decimal_value(form.tokens) is None


def _says_more(chain: Equation) -> bool:
    """Whether a = b = c says something of b, and is no computation of a in steps."""
    formulas = not chain.simple and not _has_value(chain.value)
    return formulas or any(map(_is_open_name, chain.sides[1:-1]))


def _of_numbers(form: Form) -> bool:
    """Whether a statement has numbers on all sides."""
    signs = [at for at, token in enumerate(form.tokens) if token.text in ("=", "<", ">", r"\le", r"\ge", r"\ne")]
    return all(decimal_value(part) is not None for part in split(form.tokens, signs))


def _named(equation: Equation) -> dict[str, Form] | None:
    """{x: 2, y: 2} of x = y = 2, {x: 2} of x = 1 + a = 2; None for a formula on its left."""
    names = [equation.name, *(side.text for side in equation.sides[1:-1] if _is_open_name(side))]
    return dict.fromkeys(names, equation.value) if equation.simple else None


def _assignments(form: Form) -> dict[str, Form] | None:
    """{x: 1, y: 2} of x=1, y=2 and of (x,y)=(1,2), {x: 2, y: 2} of x=y=2; None for anything else."""
    if isinstance(form, Equation):
        if form.sides:
            return named if (named := _named(form)) and len(named) > 1 else None
        names = re.fullmatch(r"\(([a-zA-Z](?:,[a-zA-Z])+)\)", form.name)
        if names and isinstance(form.value, Items) and form.value.kind in ("tuple", "list"):
            keys = names.group(1).split(",")
            return dict(zip(keys, form.value.items, strict=False)) if len(keys) == len(form.value.items) else None
        return None
    if not isinstance(form, Items) or form.kind not in ("list", "set") or len(form.items) < 2:
        return None
    parts = [_named(item) if isinstance(item, Equation) else None for item in form.items]
    if None in parts:
        return None
    named = {name: value for part in parts for name, value in part.items()}
    return named if len(named) == sum(map(len, parts)) else None


def _closed_pair(region: Region) -> tuple[Form, Form] | None:
    only = region.intervals[0] if len(region.intervals) == 1 and not region.points else None
    if only is None or only.low is None or only.high is None or only.open_low or only.open_high:
        return None
    return only.low, only.high


def _pieces(region: Region) -> list[Interval | Form]:
    return [*region.intervals, *_distinct(region.points)]


def _distinct(items: Sequence[Form]) -> list[Form]:
    """The elements of a set without those that are written twice."""
    return list(
        {
            item.value if isinstance(item, Quantity) and item.value is not None else item.text: item for item in items
        }.values()
    )


def _is_number(form: Form) -> bool:
    return isinstance(form, Quantity) and form.value is not None


def _has_value(form: Form) -> bool:
    return _is_number(form) or decimal_value(form.tokens) is not None


def _is_one_name(form: Quantity) -> bool:
    return len(form.expression) == 1 and form.expression[0].is_name


def _heavy(form: Quantity) -> bool:
    """Whether more than units and words follows the number."""
    return form.changed and not vocabulary.blocked(form.words, form.unit)


def _without_domain(items: Items) -> Form | None:
    r"""The first part of `2k\pi, k \in \mathbb{Z}`; None without such a second part."""
    if len(items.items) == 2 and re.search(r"\\in\\mathbb\{[ZNQR]\}|\\text\{integer\}", render(items.items[1].tokens)):
        return items.items[0]
    return None


def _score(form: Form) -> tuple[str, ...] | None:
    """The two numbers of 2-1, 2:1 and `2 to 1`; None for anything else."""
    texts = [token.text for token in form.tokens]
    joined = isinstance(form, Joined | Proportion) or (isinstance(form, Clock) and not form.half)
    plain = (
        joined and len(texts) == 3 and texts[1] in ("-", ":", "to") and texts[0].isdecimal() and texts[2].isdecimal()
    )
    return (texts[0], texts[2]) if plain else None


def _grouped(tokens: Sequence[Token]) -> tuple[Token, ...]:
    return (Token("("), *tokens, Token(")"))


def refused(goal: Goal) -> str | None:
    """Why the library is not asked about a goal: an expression of the answer is too large to compute."""
    for text in dict.fromkeys(text for pair in leaves(goal) for text in pair):
        if reason := too_large(tokenize(text)):
            return reason
    return None


def expressions(gold: str, *, strict: bool = False) -> list[str]:
    """The expressions of a reference that the library must be able to parse: none of a number, a word or a date."""
    if len(gold) > MAX_FORM_CHARS:
        return []
    form = read(tokenize(gold))
    return [for_library(part, strict=strict) for part in _expressions_of(form)]


def _expressions_of(form: Form | None) -> list[Sequence[Token]]:
    if isinstance(form, Quantity):
        return [form.expression] if form.value is None else []
    if isinstance(form, Relation):
        return [form.tokens]
    parts: list[Form | None] = []
    if isinstance(form, Equation):
        parts = [form.value]
    elif isinstance(form, Items):
        parts = list(form.items)
    elif isinstance(form, Approximation | Proportion):
        parts = list(form.parts)
    elif isinstance(form, Matrix | Cases):
        parts = [cell for row in form.rows for cell in row]
    elif isinstance(form, Region):
        parts = [end for interval in form.intervals for end in (interval.low, interval.high)] + list(form.points)
    elif isinstance(form, Choice):
        parts = [form.rest]
    return [tokens for part in parts if part is not None for tokens in _expressions_of(part)]
