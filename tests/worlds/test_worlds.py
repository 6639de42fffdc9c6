"""Worlds: exact answers, random access, a split by index and by text, growing difficulty; those that are played are won
by a good player, lost by bad ones, and shown as the rollout would show them."""

import math

import numpy as np
import pytest

from grpo_roc_jax.data.config import DataConfig, DemonstrationConfig
from grpo_roc_jax.data.pipeline import eval_problems, make_trace_stream
from grpo_roc_jax.worlds import worlds
from grpo_roc_jax.worlds.demonstrations import demonstrate, with_hints
from grpo_roc_jax.worlds.functions import FUNCTIONS
from grpo_roc_jax.worlds.players import PLAYED, demonstrate_played
from grpo_roc_jax.worlds.worlds import FAMILIES, HELD_OUT_START, JUDGED, QUESTIONS, is_held_out, world_problem
from tests.helpers.demonstrations import toy_chat

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
PINNED = [
    *(("products", 1, 0, "43*7=?", "301"), ("gcd", 1, 0, "gcd(720,432)=?", "144")),
    *(("powmod", 1, 0, "77^27 mod 71=?", "16"), ("digit_sum", 1, 0, "digit sum of 23^10?", "49")),
    ("count", 1, 0, "how many n from 1 to 497 are divisible by 4 or 8?", "124"),
    *(("square_sum", 1, 0, "sum of n^2 for n=4..11?", "492"), ("factorial", 1, 0, "27! mod 79=?", "28")),
    ("base", 1, 0, "606 in base 7 is what in base 10?", "300"),
    ("primes", 1, 0, "how many primes from 31 to 87?", "13"),
    *(("divisors", 1, 0, "sum of the divisors of 614?", "924"), ("chain", 1, 0, "73*66, mod 7?", "2")),
    *(("chain", 3, 7, "95*67, root, squares, mod 7?", "4"), ("chain-lucky30", 2, 1, "sum 42..98, root, mod 7?", "0")),
    ("chain-lucky70", 2, HELD_OUT_START, "gcd(75,125), reverse, mod 7?", "3"),
]


def test_values_are_pinned():
    """A change of these values would silently change the data of every recipe and of resumed runs."""
    assert {family for family, *_ in PINNED} >= set(FAMILIES)
    for family, level, index, prompt, answer in PINNED:
        problem = world_problem(family, level, 0, index)
        assert (problem.prompt, problem.answer) == (prompt, answer)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_equal_a_slow_reference_and_numbers_grow_with_the_level(family):
    """The first level suits small policies: they confuse the last digits of longer results, and rewards do not teach
    them to copy; questions of the toy have a fixed number of digits."""
    solve = SLOW_ANSWERS[family]
    for level in range(1, worlds.MAX_LEVEL + 1):
        for index in (0, 1, HELD_OUT_START, *range(2, {1: 40, 2: 8}.get(level, 0))):
            problem = world_problem(family, level, 3, index)
            numbers = problem.extra["numbers"]
            assert problem.source == f"world:{family}:{level}" and all(str(n) in problem.prompt for n in numbers)
            assert problem.answer == str(solve(*numbers) if level < 3 else int(problem.answer)), problem
    sizes = [
        np.median([sum(map(math.log, world_problem(family, level, 0, i).extra["numbers"])) for i in range(100)])
        for level in (1, 3, worlds.MAX_LEVEL)
    ]
    assert sizes[0] < sizes[1] < sizes[2]
    problems = [world_problem(family, 1, 0, i) for i in range(300)]
    assert max(len(problem.answer) for problem in problems) <= 4
    shapes = {tuple(len(str(n)) for n in problem.extra["numbers"]) for problem in problems}
    assert len(shapes) == 1 or family not in ("products", "gcd", "powmod")


def test_pure_and_random_access():
    forward = [world_problem("gcd", 1, 5, i) for i in range(50)]
    assert forward == [world_problem("gcd", 1, 5, i) for i in reversed(range(50))][::-1]
    assert len({problem.uid for problem in forward}) == 50
    assert len({problem.prompt for problem in forward}) > 45
    assert forward[0].prompt != world_problem("gcd", 1, 6, 0).prompt
    share = np.mean([is_held_out(f"{a}*{b}=?") for a in range(10, 100) for b in range(10, 100)])
    assert abs(share - 1 / 8) < 0.02, "held out"


@pytest.mark.parametrize("family", [*QUESTIONS, "chain-lucky40", FUNCTIONS])
def test_training_and_held_out_share_no_text(family):
    train = {world_problem(family, 1, seed, i).prompt for seed in (0, 1) for i in range(300)}
    held_out = {world_problem(family, 1, seed, HELD_OUT_START + i).prompt for seed in (0, 1) for i in range(60)}
    assert not any(map(is_held_out, train)) and all(map(is_held_out, held_out))
    sample = eval_problems(DataConfig(sources=(f"world:{family}:1",), eval_problems=4))
    assert {p.source for p in sample} == {f"world:{family}:1"} and sample[0].uid.endswith(str(HELD_OUT_START))


@pytest.mark.parametrize("family", QUESTIONS)
def test_no_constant_guess_is_often_right(family):
    for level in (1, worlds.MAX_LEVEL) if family in JUDGED else (1,):
        answers = [world_problem(family, level, 0, i).answer for i in range(400)]
        assert max(map(answers.count, set(answers))) < (0.45 if family in JUDGED else 0.25) * len(answers)


def test_judgements_known_by_hand():
    assert JUDGED["relevance"].solve(36, 61, 37, 18, 63) == "1,1,0,2"
    assert JUDGED["screening"].solve(3, 7, 4, 3, 9, 6) == "SELECTED 75"
    assert JUDGED["screening"].solve(3, 7, 4, 7, 3, 1) == "REJECTED 62"
    for family in JUDGED:
        problem = world_problem(family, 1, 0, HELD_OUT_START)
        numbers = problem.extra["numbers"]
        assert all(str(n) in problem.prompt for n in numbers)
        assert family != "screening" or problem.extra["years"] == numbers[-1]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        *(("world:gcd", "FAMILY:LEVEL"), ("world:gcd:x", "FAMILY:LEVEL")),
        ("world:cubes:1", "unknown world family 'cubes'; choose from products.*functions"),
        *(("world:chain-lucky96:1", "world family"), ("world:chain-luck:1", "world family")),
        *(("world:chains:1", "world family"), ("world:gcd:0", "1 to 6"), ("world:gcd:7", "1 to 6")),
    ],
)
def test_a_source_that_names_no_world_is_refused(source, message):
    assert worlds.parse_world("world:gcd:2") == ("gcd", 2)
    with pytest.raises(ValueError, match=message):
        worlds.parse_world(source)
    with pytest.raises(ValueError, match="must be at least 0"):
        world_problem("gcd", 1, 0, -1)


# ---- worlds that are played ----------------------------------------------------------------------------------------


@pytest.fixture(params=PLAYED)
def family(request):
    if request.param == "corridor":
        pytest.importorskip("grpo_roc_jax.contrib.environments")
        pytest.importorskip("gymnasium")
    return request.param


def played(family, kind, count=60, level=1):
    problems = [world_problem(family, level, 0, index) for index in range(count)]
    return [demonstrate_played(p, family, kind, np.random.default_rng(i)) for i, p in enumerate(problems)]


def test_a_good_player_wins_and_a_bad_one_often_loses(family):
    won = {kind: np.mean([t.problem.extra["success"] for t in played(family, kind)]) for kind in ("clean", "guess")}
    assert won["clean"] == 1.0 and won["guess"] < 0.95
    assert np.mean([t.problem.extra["success"] for t in played(family, "clean", 20, level=2)]) > 0.9


def test_worlds_that_are_played_are_sources_of_data(family):
    source = f"world:{family}:1"
    config = DataConfig(sources=(source,), eval_problems=4)
    assert {p.source for p in eval_problems(config)} == {source}
    problem = world_problem(family, 1, 0, 3)
    assert problem == world_problem(family, 1, 0, 3) != world_problem(family, 1, 0, 4)
    assert with_hints(problem) == problem and problem.extra["family"] == family
    (trace,) = next(make_trace_stream(config, traces=1, seed=0))
    assert trace.turns and demonstrate(trace.problem, DemonstrationConfig(), 0).turns


def test_a_trace_has_the_ids_of_a_rollout(family):
    """What is between turns is written as the environment's answers are: a user's message, or outputs of tools."""
    chat = toy_chat()
    trace = next(t for t in played(family, "clean") if len(t.turns) > 1)
    tokens, mask = chat.trace_row(trace)
    prompt = chat.prompt_ids(trace.problem)
    text = chat.tokenizer.decode(tokens[len(prompt) :])
    assert text.count("<tool_response>\n") == (0 if any(trace.replies) else len(trace.turns) - 1)
    for turn in trace.turns:
        assert turn in text
    edges = np.flatnonzero(np.diff(mask.astype(int)) == 1) + 1
    assert len(edges) == len(trace.turns) and edges[0] == len(prompt)
    first = chat.turn_ids(trace.turns[0])
    assert tokens[len(prompt) : len(prompt) + len(first)].tolist() == first


def test_words_of_the_games():
    problem = world_problem("guess", 1, 0, 0)
    assert 1 <= int(problem.answer) <= 9 and problem.prompt.endswith(": 1-9")
    problem = world_problem("correct", 1, 0, 0)
    text = problem.extra["asked"]
    assert sum(a != b for a, b in zip(text, problem.answer, strict=True)) == 1 and text in problem.prompt
    problem = world_problem("bank", 1, 0, 0)
    (a, b, n), _ = problem.extra["orders"]
    assert problem.prompt.startswith(f"{a} to {b}, ") and n == problem.extra["balances"][a] < 10


def test_players_of_the_bank_differ_in_how_they_learn_what_an_account_holds():
    def calls(kind):
        traces = played("bank", kind, 9)
        return [[turn.split('"')[3] if '"' in turn else turn for turn in trace.turns] for trace in traces]

    assert calls("clean") == calls("wrong") == [["look", "pay"] * 2] * 9
    assert calls("repair") == [["pay", "pay", "look", "pay"]] * 9
    assert {turns[-1] for turns in calls("guess")} <= {"pay", "done"} and "look" not in str(calls("guess"))
    assert all(t.problem.extra["success"] for t in played("bank", "repair", 9))
    assert not any(t.problem.extra["success"] for t in played("bank", "wrong", 9))
