"""Worlds: exact answers, random access, a split by index and by text, growing difficulty."""

import math

import numpy as np
import pytest

from grpo_roc_jax.worlds.worlds import (
    FAMILIES,
    HELD_OUT_START,
    JUDGED,
    MAX_LEVEL,
    is_held_out,
    parse_world,
    world_problem,
)

SLOW_ANSWERS = {
    "products": lambda a, b: sum(b for _ in range(a)),
    "gcd": lambda a, b: max(d for d in range(1, min(a, b) + 1) if a % d == 0 and b % d == 0),
    "powmod": lambda a, e, m: a**e % m,
    "digit_sum": lambda a, e: sum(int(c) for c in str(a**e)),
    "count": lambda n, p, q: sum(1 for k in range(1, n + 1) if k % p == 0 or k % q == 0),
    "square_sum": lambda a, b: sum(n**2 for n in range(a, b + 1)),
    "factorial": lambda n, m: math.prod(range(1, n + 1)) % m,
    "base": lambda digits, b: sum(int(c) * b**i for i, c in enumerate(reversed(str(digits)))),
    "primes": lambda a, b: sum(1 for n in range(a, b + 1) if n > 1 and all(n % d for d in range(2, n))),
    "divisors": lambda n: sum({e for d in range(1, n + 1) if n % d == 0 for e in (d, n // d)}),
}
KNOWN = {
    "products": ((37, 58), 2146),
    "gcd": ((84, 36), 12),
    "powmod": ((7, 13, 11), 2),
    "digit_sum": ((2, 15), 26),
    "count": ((30, 3, 5), 14),
    "square_sum": ((3, 5), 50),
    "factorial": ((5, 7), 1),
    "base": ((1011, 2), 11),
    "primes": ((10, 30), 6),
    "divisors": ((12,), 28),
}


def test_there_are_at_least_eight_families_and_each_is_checked():
    assert len(FAMILIES) >= 8
    assert set(FAMILIES) == set(SLOW_ANSWERS) == set(KNOWN)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_known_by_hand(family):
    numbers, answer = KNOWN[family]
    assert FAMILIES[family].solve(*numbers) == answer


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_equal_a_slow_reference(family):
    for level in (1, 2):
        for index in range(40 if level == 1 else 8):
            problem = world_problem(family, level, 3, index)
            assert int(problem.answer) == SLOW_ANSWERS[family](*problem.extra["numbers"]), problem


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("level", range(1, MAX_LEVEL + 1))
def test_every_level_is_reached_and_names_all_its_numbers(family, level):
    for index in (0, 1, HELD_OUT_START):
        problem = world_problem(family, level, 0, index)
        assert problem.answer == str(int(problem.answer))
        assert problem.source == f"world:{family}:{level}"
        for number in problem.extra["numbers"]:
            assert str(number) in problem.prompt


def test_pure_and_random_access():
    forward = [world_problem("gcd", 1, 5, i) for i in range(50)]
    backward = [world_problem("gcd", 1, 5, i) for i in reversed(range(50))]
    assert forward == backward[::-1]
    assert len({problem.uid for problem in forward}) == 50
    assert len({problem.prompt for problem in forward}) > 45
    assert forward[0].prompt != world_problem("gcd", 1, 6, 0).prompt


def test_values_are_pinned():
    """A change of these values would silently change the data of every recipe and of resumed runs."""
    pinned = {family: world_problem(family, 1, 0, 0).prompt for family in FAMILIES}
    assert pinned == PINNED


@pytest.mark.parametrize("family", FAMILIES)
def test_training_and_held_out_share_no_text(family):
    train = {world_problem(family, 1, seed, i).prompt for seed in (0, 1) for i in range(300)}
    held_out = {world_problem(family, 1, seed, HELD_OUT_START + i).prompt for seed in (0, 1) for i in range(60)}
    assert train.isdisjoint(held_out)
    assert not any(map(is_held_out, train))
    assert all(map(is_held_out, held_out))


def test_the_held_out_share_is_as_stated():
    share = np.mean([is_held_out(f"{a}*{b}=?") for a in range(10, 100) for b in range(10, 100)])
    assert abs(share - 1 / 8) < 0.02


@pytest.mark.parametrize("family", FAMILIES)
def test_numbers_grow_with_the_level(family):
    sizes = [
        np.median([sum(map(math.log, world_problem(family, level, 0, i).extra["numbers"])) for i in range(100)])
        for level in (1, 3, MAX_LEVEL)
    ]
    assert sizes[0] < sizes[1] < sizes[2]


@pytest.mark.parametrize("family", ["products", "gcd", "powmod"])
def test_numbers_of_the_toy_have_a_fixed_number_of_digits(family):
    shapes = {tuple(len(str(n)) for n in world_problem(family, 1, 0, i).extra["numbers"]) for i in range(300)}
    assert len(shapes) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_results_of_the_first_level_are_short_enough_to_copy(family):
    """Small policies confuse the last digits of longer results, and rewards do not teach them to copy."""
    assert max(len(world_problem(family, 1, 0, i).answer) for i in range(300)) <= 4


def test_answers_are_spread():
    """No constant guess is often right."""
    for family in FAMILIES:
        answers = [world_problem(family, 1, 0, i).answer for i in range(400)]
        assert max(map(answers.count, set(answers))) < 0.25 * len(answers), family


@pytest.mark.parametrize(
    ("family", "numbers", "answer"),
    [
        ("relevance", (36, 61, 37, 18, 63), "1,1,0,2"),
        ("screening", (3, 7, 4, 3, 9, 6), "SELECTED 75"),
        ("screening", (3, 7, 4, 7, 3, 1), "REJECTED 62"),
    ],
)
def test_judgements_known_by_hand(family, numbers, answer):
    assert JUDGED[family].solve(*numbers) == answer


@pytest.mark.parametrize("family", JUDGED)
def test_judgements(family):
    for level in (1, MAX_LEVEL):
        answers = [world_problem(family, level, 0, i).answer for i in range(200)]
        assert max(map(answers.count, set(answers))) < 0.45 * len(answers)
    held_out = world_problem(family, 1, 0, HELD_OUT_START)
    assert is_held_out(held_out.prompt) and all(str(n) in held_out.prompt for n in held_out.extra["numbers"])
    assert family != "screening" or held_out.extra["years"] == held_out.extra["numbers"][-1]


def test_names_of_sources():
    assert parse_world("world:gcd:2") == ("gcd", 2)
    for source, message in [
        ("world:gcd", "FAMILY:LEVEL"),
        ("world:gcd:x", "FAMILY:LEVEL"),
        ("world:cubes:1", "unknown world family 'cubes'; choose from products"),
        ("world:gcd:0", "1 to 6"),
        ("world:gcd:7", "1 to 6"),
    ]:
        with pytest.raises(ValueError, match=message):
            parse_world(source)
    with pytest.raises(ValueError, match="must be at least 0"):
        world_problem("gcd", 1, 0, -1)


PINNED = {
    "products": "43*7=?",
    "gcd": "gcd(720,432)=?",
    "powmod": "77^27 mod 71=?",
    "digit_sum": "digit sum of 23^10?",
    "count": "how many n from 1 to 497 are divisible by 4 or 8?",
    "square_sum": "sum of n^2 for n=4..11?",
    "factorial": "27! mod 79=?",
    "base": "606 in base 7 is what in base 10?",
    "primes": "how many primes from 31 to 87?",
    "divisors": "sum of the divisors of 614?",
}
