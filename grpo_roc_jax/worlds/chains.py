"""A world of dependent calls: `world:chain:LEVEL` asks for two to four computations, each on the result before.

`37*58, reverse, mod 7?` takes three calls, since a demonstrated program does one step. Level 1 has two steps, level 2
three, and levels from 3 on have four. The faults are those of careless code: a missing import, a range that ends one
too early, a string used as a number.

Every answer is one of seven, so that a guess can be right. `world:chain-luckyN:LEVEL` sets how often: the answer is
`FAVORED` in N of 100 problems, which is the answer of demonstrated guesses. Without it a guess is right in one of seven
problems.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

CHAIN = "chain"
"""Name of the family."""
FAVORED = 3
"""The answer of demonstrated guesses."""
MODULUS = 7
MOST_LUCKY = 95
_NAME = re.compile(rf"{CHAIN}(?:-lucky(\d+))?")


@dataclass(frozen=True)
class ChainStep:
    """One computation, with the programs that demonstrations run for it; format strings over its numbers."""

    text: str
    value: Callable[..., int]
    right: str
    """Program that prints the value."""
    broken: str
    """Program that fails."""
    wrong: str
    """Program that runs and prints something else (occasionally the value, by chance)."""


def _two(rng: np.random.Generator) -> tuple[int, int]:
    return int(rng.integers(10, 100)), int(rng.integers(10, 100))


def _range(rng: np.random.Generator) -> tuple[int, int]:
    return int(rng.integers(10, 50)), int(rng.integers(50, 100))


def _common(rng: np.random.Generator) -> tuple[int, int]:
    common = int(rng.integers(6, 41))
    return common * int(rng.integers(2, 10)), common * int(rng.integers(2, 10))


FIRST = (
    (_two, ChainStep("{0}*{1}", lambda a, b: a * b, "print({0}*{1})", "print(mul({0},{1}))", "print({0}+{1})")),
    (
        _range,
        ChainStep(
            "sum {0}..{1}",
            lambda a, b: sum(range(a, b + 1)),
            "print(sum(range({0},{1}+1)))",
            "print(sum({0}..{1}))",
            "print(sum(range({0},{1})))",
        ),
    ),
    (
        _common,
        ChainStep(
            "gcd({0},{1})",
            math.gcd,
            "import math\nprint(math.gcd({0},{1}))",
            "print(math.gcd({0},{1}))",
            "print({0}%{1})",
        ),
    ),
)
"""How the numbers of a first step are drawn, and the step."""
NEXT = (
    ChainStep(
        "reverse",
        lambda x: int(str(x)[::-1]),
        "print(int(str({0})[::-1]))",
        "print(str({0}).reverse())",
        "print(str({0})[-1])",
    ),
    ChainStep(
        "squares",
        lambda x: sum(int(c) ** 2 for c in str(x)),
        "print(sum(int(c)**2 for c in str({0})))",
        "print(sum(c**2 for c in str({0})))",
        "print(sum(int(c)*2 for c in str({0})))",
    ),
    ChainStep("root", math.isqrt, "import math\nprint(math.isqrt({0}))", "print(math.isqrt({0}))", "print({0}//2)"),
)
"""Steps between the first and the last; `squares` adds the squares of the digits."""
LAST = ChainStep(
    f"mod {MODULUS}",
    lambda x: x % MODULUS,
    f"print({{0}}%{MODULUS})",
    f"print('{{0}}'%{MODULUS})",
    f"print({{0}}//{MODULUS})",
)


def is_chain(family: str) -> bool:
    """Whether the family is this one, with or without `-luckyN`.

    Raises:
        ValueError: N is out of range.
    """
    match = _NAME.fullmatch(family)
    if match and int(match[1] or 0) > MOST_LUCKY:
        raise ValueError(f"world family {family!r}: lucky{match[1]}; must be at most {MOST_LUCKY} of 100")
    return match is not None


def draw_chain(family: str) -> Callable[[np.random.Generator, int], tuple[str, str, dict[str, Any]]]:
    """(rng, level) -> prompt, answer, extra columns of a problem; `chain_steps` returns its steps."""
    lucky = _NAME.fullmatch(family)[1]
    return partial(_draw, None if lucky is None else int(lucky) / 100)


def _draw(lucky: float | None, rng: np.random.Generator, level: int) -> tuple[str, str, dict[str, Any]]:
    favored = None if lucky is None else rng.random() < lucky
    while True:
        first = int(rng.integers(len(FIRST)))
        numbers = FIRST[first][0](rng)
        between = rng.choice(len(NEXT), min(level, 3) - 1, replace=False).tolist()
        extra = {"family": CHAIN, "first": first, "numbers": numbers, "between": between}
        steps = chain_steps(extra)
        value = steps[0].value(*numbers)
        for step in steps[1:]:
            value = step.value(value)
        if favored is None or favored == (value == FAVORED):
            return f"{', '.join(step.text for step in steps).format(*numbers)}?", str(value), extra


def chain_steps(extra: dict[str, Any]) -> list[ChainStep]:
    """The steps of a problem from its extra columns."""
    return [FIRST[extra["first"]][1], *(NEXT[i] for i in extra["between"]), LAST]
