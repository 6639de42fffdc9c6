"""Generated problems: families of small computations that are easiest to do with a program.

A world is not stored: `world_problem(family, level, seed, index)` is a pure function, so the position of a stream is
one number. Training and held-out problems differ by index and by text: the hash of a problem's text assigns it to one
side, and a draw that falls on the other side is repeated.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from grpo_roc_jax.data.generated import GENERATORS, HELD_OUT_START, Generator
from grpo_roc_jax.hints.other_names import close_to
from grpo_roc_jax.types import Problem
from grpo_roc_jax.worlds.chains import CHAIN, draw_chain, is_chain
from grpo_roc_jax.worlds.demonstrations import demonstrate, with_hints
from grpo_roc_jax.worlds.functions import FUNCTIONS, draw_task
from grpo_roc_jax.worlds.players import PLAYED

WORLD_PREFIX = "world:"
HELD_OUT_SHARE = 8
"""One text in this many is held out."""
MAX_LEVEL = 6
_MAX_DRAWS = 1000


@dataclass(frozen=True)
class WorldFamily:
    """One kind of question: how its numbers are drawn, its text, and its exact answer."""

    draw: Callable[[np.random.Generator, int], tuple[int, ...]]
    """(rng, level) -> the numbers of a question. At level 1 each has a fixed number of digits, two or three: a small
    policy first learns to copy numbers by position, which takes three quarters of the steps that mixed lengths take."""
    prompt: str
    """Format string over the numbers."""
    solve: Callable[..., int | str]
    columns: Callable[..., dict[str, Any]] = lambda *numbers: {}
    """Further columns of a problem from its numbers."""


def _draw_products(rng: np.random.Generator, level: int) -> tuple[int, ...]:
    # At most three digits at level 1: small policies confuse the last of four digits when they copy a result.
    return _digits(rng, level + 1), _digits(rng, level)


def _draw_gcd(rng: np.random.Generator, level: int) -> tuple[int, ...]:
    low, high = 10 ** (level + 1), 10 ** (level + 2)
    common = _int(rng, 2, 4 * 10**level)
    first, second = (common * _int(rng, -(-low // common), (high - 1) // common + 1) for _ in range(2))
    return first, second


def _draw_powmod(rng: np.random.Generator, level: int) -> tuple[int, ...]:
    return _digits(rng, level + 1), _digits(rng, level + 1), _digits(rng, level + 1)


def _draw_digit_sum(rng: np.random.Generator, level: int) -> tuple[int, ...]:
    return _digits(rng, level + 1), _int(rng, 10, 10 + 14 * level)


def _draw_count(rng: np.random.Generator, level: int) -> tuple[int, ...]:
    scale = 3 ** (level - 1)
    first, second = _int(rng, 2, 9 * level + 1), _int(rng, 2, 9 * level)
    return _int(rng, 100 * scale, 1000 * scale), first, second + (second >= first)


def _draw_square_sum(rng: np.random.Generator, level: int) -> tuple[int, ...]:
    scale = 3 ** (level - 1)
    return _int(rng, scale, 10 * scale), _int(rng, 10 * scale, 30 * scale)


def _draw_factorial(rng: np.random.Generator, level: int) -> tuple[int, ...]:
    n = _int(rng, 10, 10 + 20 * level)
    return n, _next_prime(_int(rng, max(n + 1, 10**level), 98 * 10 ** (level - 1)))


def _draw_base(rng: np.random.Generator, level: int) -> tuple[int, ...]:
    base = _int(rng, 2, 10)
    digits = [_int(rng, 1, base), *(_int(rng, 0, base) for _ in range(level + 1))]
    return int("".join(map(str, digits))), base


def _draw_primes(rng: np.random.Generator, level: int) -> tuple[int, ...]:
    scale = 2 ** (level - 1)
    return _int(rng, 10 * scale, 50 * scale), _int(rng, 60 * scale, 100 * scale)


def _draw_divisors(rng: np.random.Generator, level: int) -> tuple[int, ...]:
    scale = 3 ** (level - 1)
    return (_int(rng, 100 * scale, 1000 * scale),)


def _draw_relevance(rng: np.random.Generator, level: int) -> tuple[int, ...]:
    return tuple(_digits(rng, level + 1) for _ in range(5))


def _draw_screening(rng: np.random.Generator, level: int) -> tuple[int, ...]:
    skills = [rng.choice(np.arange(1, 5 + level), 2, replace=False).tolist() for _ in range(2)]
    return (*skills[0], _int(rng, 1, 9), *skills[1], _int(rng, 0, 13))


def _digits(rng: np.random.Generator, count: int) -> int:
    """A number with `count` digits."""
    return _int(rng, 10 ** (count - 1), 10**count)


def _int(rng: np.random.Generator, low: int, high: int) -> int:
    """Uniform from low to high - 1, as a Python integer, so that answers never overflow."""
    return int(rng.integers(low, high))


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def _next_prime(n: int) -> int:
    while not _is_prime(n):
        n += 1
    return n


FAMILIES: dict[str, WorldFamily] = {
    "products": WorldFamily(_draw_products, "{0}*{1}=?", lambda a, b: a * b),
    "gcd": WorldFamily(_draw_gcd, "gcd({0},{1})=?", math.gcd),
    "powmod": WorldFamily(_draw_powmod, "{0}^{1} mod {2}=?", lambda a, e, m: pow(a, e, m)),
    "digit_sum": WorldFamily(_draw_digit_sum, "digit sum of {0}^{1}?", lambda a, e: sum(map(int, str(a**e)))),
    "count": WorldFamily(
        _draw_count,
        "how many n from 1 to {0} are divisible by {1} or {2}?",
        lambda n, p, q: n // p + n // q - n // math.lcm(p, q),
    ),
    "square_sum": WorldFamily(
        _draw_square_sum, "sum of n^2 for n={0}..{1}?", lambda a, b: _squares_to(b) - _squares_to(a - 1)
    ),
    "factorial": WorldFamily(_draw_factorial, "{0}! mod {1}=?", lambda n, m: math.factorial(n) % m),
    "base": WorldFamily(_draw_base, "{0} in base {1} is what in base 10?", lambda digits, b: int(str(digits), b)),
    "primes": WorldFamily(
        _draw_primes, "how many primes from {0} to {1}?", lambda a, b: sum(map(_is_prime, range(a, b + 1)))
    ),
    "divisors": WorldFamily(
        _draw_divisors, "sum of the divisors of {0}?", lambda n: sum(d for d in range(1, n + 1) if n % d == 0)
    ),
}
"""Families of questions by name; chains are in `worlds.chains`, function calls in `worlds.functions`, games in
`worlds.players`."""


def _relevance(query: int, *documents: int) -> str:
    return ",".join(str(len({*str(query)} & {*str(document)})) for document in documents)


def _screening(a: int, b: int, needed: int, c: int, d: int, years: int) -> str:
    score = 25 * len({a, b} & {c, d}) + 50 * min(years, needed) // needed
    return f"{'SELECTED' if score >= 75 else 'REJECTED'} {score}"


JUDGED: dict[str, WorldFamily] = {
    "relevance": WorldFamily(_draw_relevance, "shared digits of {0} with {1},{2},{3},{4}?", _relevance),
    "screening": WorldFamily(
        _draw_screening,
        "job: skills {0},{1}, {2} years; cv: skills {3},{4}, {5} years?",
        _screening,
        lambda *numbers: {"years": numbers[-1]},
    ),
}
"""Families whose answers are judgements: the relevance of four documents to a query, and whether an application fits a
job, with a score of 0 to 100."""
QUESTIONS = FAMILIES | JUDGED


def _squares_to(n: int) -> int:
    return n * (n + 1) * (2 * n + 1) // 6


def is_held_out(prompt: str) -> bool:
    """Whether a world's text belongs to the held-out side of the split."""
    return hashlib.blake2b(prompt.encode(), digest_size=4).digest()[0] % HELD_OUT_SHARE == 0


def world_problem(family: str, level: int, seed: int, index: int) -> Problem:
    """Problem number `index` of a world; indices from `HELD_OUT_START` on are held out.

    A pure function: equal arguments give equal problems, in any order and process. The numbers drawn are in
    `extra["numbers"]`.

    Args:
        family: A name in `QUESTIONS` or `PLAYED`, `functions`, or a name of `worlds.chains`.
        level: Difficulty, 1 to `MAX_LEVEL`; numbers grow with it.
        seed: Seed of the world.
        index: At least 0.

    Raises:
        ValueError: Unknown family, or level or index out of range.
    """
    check_world(family, level)
    if index < 0:
        raise ValueError(f"world index {index}; must be at least 0")
    others = {FUNCTIONS: draw_task} | {name: world.draw for name, world in PLAYED.items()}
    draw = others.get(family) or (draw_chain(family) if is_chain(family) else partial(_draw_question, family))
    name = f"{WORLD_PREFIX}{family}:{level}"
    digest = hashlib.blake2b(f"{name}:{seed}".encode(), digest_size=8).digest()
    rng = np.random.Generator(np.random.Philox(key=[int.from_bytes(digest, "little"), index]))
    for _ in range(_MAX_DRAWS):
        prompt, answer, extra = draw(rng, level)
        if is_held_out(prompt) == (index >= HELD_OUT_START):
            extra = {"family": family, "level": level, **extra}
            return Problem(uid=f"{name}:{seed}:{index}", prompt=prompt, answer=answer, source=name, extra=extra)
    raise RuntimeError(f"{name}: none of {_MAX_DRAWS} draws fell on the side of the split that index {index} is on")


def _draw_question(family: str, rng: np.random.Generator, level: int) -> tuple[str, str, dict[str, Any]]:
    world = QUESTIONS[family]
    numbers = world.draw(rng, level)
    extra = {"numbers": numbers, **world.columns(*numbers)}
    return world.prompt.format(*numbers), str(world.solve(*numbers)), extra


def parse_world(source: str) -> tuple[str, int]:
    """(family, level) of `world:FAMILY:LEVEL`.

    Raises:
        ValueError: The source has another form, or the family or level does not exist.
    """
    parts = source.removeprefix(WORLD_PREFIX).split(":")
    if len(parts) != 2 or not parts[1].isdecimal():
        raise ValueError(f"source {source!r}; must be {WORLD_PREFIX}FAMILY:LEVEL, such as {WORLD_PREFIX}products:1")
    family, level = parts[0], int(parts[1])
    check_world(family, level)
    return family, level


def check_world(family: str, level: int) -> None:
    """Raises ValueError if the family or level does not exist."""
    known = (*QUESTIONS, FUNCTIONS, CHAIN, *PLAYED)
    if family not in known and not is_chain(family):
        near = close_to(family, known)
        meant = f"; did you mean {near!r}?" if near else ""
        raise ValueError(f"unknown world family {family!r}; choose from {', '.join(known)}{meant}")
    if not 1 <= level <= MAX_LEVEL:
        raise ValueError(f"world level {level} of {family!r}; must be 1 to {MAX_LEVEL}")


def problem_of(source: str, seed: int, index: int) -> Problem:
    """Problem number `index` of `world:FAMILY:LEVEL`."""
    return world_problem(*parse_world(source), seed, index)


GENERATORS[WORLD_PREFIX] = Generator(parse_world, problem_of, demonstrate, with_hints)
