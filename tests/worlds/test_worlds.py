"""Worlds: exact answers, random access, a split by index and by text, growing difficulty; those that are played are won
by a good player, lost by bad ones, and shown as the rollout would show them. Demonstrations behave as their kind, and
observations equal the executor's; function calls are solvable tasks with an exact verifier."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest

import grpo_roc_jax as g
from grpo_roc_jax.data.config import DataConfig, DemonstrationConfig
from grpo_roc_jax.data.generated import TOOL_NAME
from grpo_roc_jax.data.pipeline import eval_problems
from grpo_roc_jax.text.calls import call_blocks, parse_call
from grpo_roc_jax.tools import CodeCall, malformed_result
from grpo_roc_jax.types import ToolCall, ToolResult
from grpo_roc_jax.worlds import functions as fn
from grpo_roc_jax.worlds import worlds
from grpo_roc_jax.worlds.chains import FAVORED, chain_steps
from grpo_roc_jax.worlds.demonstrations import PROGRAMS, demonstrate, run_call, run_program
from grpo_roc_jax.worlds.players import PLAYED, demonstrate_played
from grpo_roc_jax.worlds.worlds import FAMILIES, HELD_OUT_START, JUDGED, QUESTIONS, is_held_out, world_problem
from tests.text.test_chat_format import TOY

KINDS = ("guess", "repair", "clean", "wrong")
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
    *(("divisors", 1, 0, "sum of the divisors of 614?", "924"), ("chain", 3, 7, "95*67, root, squares, mod 7?", "4")),
    ("chain-lucky70", 2, HELD_OUT_START, "gcd(75,125), reverse, mod 7?", "3"),
]


def test_values_are_pinned_and_judgements_known_by_hand():
    """A change of these values would silently change the data of every recipe and of resumed runs."""
    assert {family for family, *_ in PINNED} >= set(FAMILIES)
    for family, level, index, prompt, answer in PINNED:
        problem = world_problem(family, level, 0, index)
        assert (problem.prompt, problem.answer) == (prompt, answer)
    forward = [world_problem("gcd", 1, 5, i) for i in range(50)]
    assert forward == [world_problem("gcd", 1, 5, i) for i in reversed(range(50))][::-1], "random access"
    assert len({problem.uid for problem in forward}) == 50 and len({problem.prompt for problem in forward}) > 45
    assert JUDGED["relevance"].solve(36, 61, 37, 18, 63) == "1,1,0,2"
    assert JUDGED["screening"].solve(3, 7, 4, 3, 9, 6) == "SELECTED 75"
    assert JUDGED["screening"].solve(3, 7, 4, 7, 3, 1) == "REJECTED 62"
    problem = world_problem("screening", 1, 0, HELD_OUT_START)
    assert all(str(n) in problem.prompt for n in problem.extra["numbers"])


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_equal_a_slow_reference_and_numbers_grow_with_the_level(family):
    solve = SLOW_ANSWERS[family]
    for level in range(1, worlds.MAX_LEVEL + 1):
        for index in (0, 1, HELD_OUT_START, *range(2, {1: 40, 2: 8}.get(level, 0))):
            problem = world_problem(family, level, 3, index)
            numbers = problem.extra["numbers"]
            assert problem.source == f"world:{family}:{level}" and all(str(n) in problem.prompt for n in numbers)
            assert problem.answer == str(solve(*numbers) if level < 3 else int(problem.answer)), problem
    for lower, higher in ((1, 3), (3, worlds.MAX_LEVEL)):
        pairs = [[world_problem(family, level, 0, i).extra["numbers"] for i in range(100)] for level in (lower, higher)]
        sizes = [np.median([sum(map(math.log, numbers)) for numbers in some]) for some in pairs]
        assert sizes[0] < sizes[1]


@pytest.mark.parametrize("family", [*QUESTIONS, "chain-lucky40", fn.FUNCTIONS])
def test_training_and_held_out_share_no_text(family):
    train = {world_problem(family, 1, seed, i).prompt for seed in (0, 1) for i in range(300)}
    held_out = {world_problem(family, 1, seed, HELD_OUT_START + i).prompt for seed in (0, 1) for i in range(60)}
    assert not any(map(is_held_out, train)) and all(map(is_held_out, held_out))
    sample = eval_problems(DataConfig(sources=(f"world:{family}:1",), eval_problems=4))
    assert {p.source for p in sample} == {f"world:{family}:1"} and sample[0].uid.endswith(str(HELD_OUT_START))


def test_a_source_that_names_no_world_is_refused():
    for source, message in [
        *(("world:gcd", "FAMILY:LEVEL"), ("world:gcd:7", "1 to 6"), ("world:chain-lucky96:1", "world family")),
        ("world:cubes:1", "unknown world family 'cubes'; choose from products.*functions"),
    ]:
        assert worlds.parse_world("world:gcd:2") == ("gcd", 2)
        with pytest.raises(ValueError, match=message):
            worlds.parse_world(source)
    with pytest.raises(ValueError, match="must be at least 0"):
        world_problem("gcd", 1, 0, -1)


def played(family, kind, count=60, level=1):
    problems = [world_problem(family, level, 0, index) for index in range(count)]
    return [demonstrate_played(p, family, kind, np.random.default_rng(i)) for i, p in enumerate(problems)]


@pytest.mark.parametrize("family", PLAYED)
def test_a_good_player_wins_a_bad_one_often_loses_and_a_trace_has_the_ids_of_a_rollout(family):
    """What is between turns is written as the environment's answers are: a user's message, or outputs of tools."""
    if family == "corridor":
        pytest.importorskip("grpo_roc_jax.contrib.environments")
        pytest.importorskip("gymnasium")
    won = {kind: np.mean([t.problem.extra["success"] for t in played(family, kind)]) for kind in ("clean", "guess")}
    assert won["clean"] == 1.0 and won["guess"] < 0.95
    assert family != "bank" or not any(t.problem.extra["success"] for t in played(family, "wrong", 9))
    assert np.mean([t.problem.extra["success"] for t in played(family, "clean", 20, level=2)]) > 0.9
    trace = next(t for t in played(family, "clean") if len(t.turns) > 1)
    (tokens, mask), prompt = TOY.trace_row(trace), TOY.prompt_ids(trace.problem)
    text = TOY.tokenizer.decode(tokens[len(prompt) :])
    assert text.count("<tool_response>\n") == (0 if any(trace.replies) else len(trace.turns) - 1)
    assert all(turn in text for turn in trace.turns)
    assert (np.diff(mask.astype(int)) == 1).sum() == len(trace.turns) and mask[len(prompt)]
    first = TOY.turn_ids(trace.turns[0])
    assert tokens[len(prompt) : len(prompt) + len(first)].tolist() == first


def traces(kind, family, count=40, level=1):
    """Demonstrations of one kind, of the first problems of a world."""
    only = DemonstrationConfig(**{name: float(name == kind) for name in KINDS})
    return [demonstrate(world_problem(family, level, 0, index), only, 0) for index in range(count)]


def answer_of(trace):
    return trace.turns[-1].split("\\boxed{")[1].split("}")[0]


def calls_of(trace):
    return [block for turn in trace.turns for block in call_blocks(turn)[0]]


@pytest.mark.parametrize("family", QUESTIONS)
def test_each_kind_does_what_it_says(family):
    """The right program prints the answer, the broken one fails and the wrong one runs."""
    wrong, programs = 0, PROGRAMS[family]
    for level, index in itertools.product((1, 2, 3), range(10)):
        problem = world_problem(family, level, 0, index)
        sources = (programs.right, programs.broken, programs.wrong)
        right, broken, other = (run_program(source.format(*problem.extra["numbers"])) for source in sources)
        assert (right.kind, right.stdout.strip(), right.observation) == ("ok", *[problem.answer] * 2)
        assert broken.counts_as_error and other.kind == "ok"
        wrong += other.stdout.strip() != problem.answer
    assert wrong >= 15
    for trace in traces("clean", family):
        assert [parse_call(call).name for call in calls_of(trace)] == [TOOL_NAME]
        assert answer_of(trace) == trace.problem.answer == trace.observations[0][0]
    faults = Counter()
    for trace in traces("repair", family):
        first, second = map(run_call, calls_of(trace))
        assert first.counts_as_error and second.ok
        assert trace.observations == ((first.observation,), (second.observation,))
        assert answer_of(trace) == trace.problem.answer
        faults[first.kind] += 1
    assert {"exception", "syntax_error", "malformed_call"} <= set(faults), "must have faults of several kinds"
    wrong = traces("wrong", family)
    assert all(answer_of(trace) == trace.observations[0][0] for trace in wrong)
    assert sum(answer_of(trace) != trace.problem.answer for trace in wrong) >= len(wrong) / 2
    guesses = traces("guess", family, 100)
    assert not any(calls_of(trace) or trace.observations for trace in guesses)
    assert np.mean([answer_of(trace) == trace.problem.answer for trace in guesses]) <= 0.25


def test_shares_are_as_configured():
    config = DemonstrationConfig(guess=2.0, repair=1.0, clean=1.0, wrong=0.0)
    kinds = Counter(demonstrate(world_problem("gcd", 1, 0, i), config, 0).kind for i in range(2000))
    assert abs(kinds["guess"] / 2000 - 0.5) < 0.04 and abs(kinds["repair"] / 2000 - 0.25) < 0.04
    assert kinds["wrong"] == 0
    with pytest.raises(ValueError, match="are all 0"):
        DemonstrationConfig(guess=0, repair=0, clean=0, wrong=0)
    with pytest.raises(ValueError, match="does not come from a world"):
        demonstrate(g.Problem("x", "1+1", "2", "file"), DemonstrationConfig(), 0)


def test_observations_are_the_executors():
    """Each observation of a sample of traces equals the real executor's output for the same call."""
    calls, seen = [], []
    for family, kind in itertools.product(QUESTIONS, ("repair", "wrong")):
        for trace in traces(kind, family, 8):
            for block, observations in zip(calls_of(trace), trace.observations, strict=True):
                call = parse_call(block)
                if call.fault is not None:
                    assert observations == (malformed_result(call.message).observation,)
                else:
                    calls.append(CodeCall(str(len(calls)), call.name, call.arguments, None))
                    seen.append(observations[0])
    with g.make_executor(g.ToolsConfig(min_level="L0", preload=(), workers=4)) as executor:
        results = executor.run(calls)
    assert [result.observation for result in results] == seen
    assert {"ok", "exception", "syntax_error"} == {result.kind for result in results}


@pytest.mark.parametrize("level", [1, 3])
def test_programs_and_demonstrations_of_chains_do_what_they_are_named_for(level):
    wrong = 0
    for index in range(40):
        problem = world_problem("chain", level, 1, index)
        steps, values = chain_steps(problem.extra), problem.extra["numbers"]
        assert len(steps) == level + 1 == problem.prompt.count(", ") + 1
        for step in steps:
            assert run_program(step.broken.format(*values)).counts_as_error
            other, result = (run_program(code.format(*values)) for code in (step.wrong, step.right))
            assert other.kind == result.kind == "ok" and result.stdout == f"{step.value(*values)}\n"
            wrong += other.stdout != result.stdout
            values = (int(result.stdout),)
        assert problem.answer == str(values[0])
    assert wrong > 20 * (level + 1)

    def results(trace):
        return list(itertools.chain(*trace.observations))

    for trace in traces("clean", "chain-lucky40", 20, level):
        assert len(results(trace)) == level + 1 and answer_of(trace) == trace.problem.answer == results(trace)[-1]
    for trace in traces("repair", "chain-lucky40", 20, level):
        failed = [text.startswith("[") for text in results(trace)]
        assert len(failed) == level + 2 and sum(failed) == 1 and not failed[-1]
        assert answer_of(trace) == trace.problem.answer
    for trace in traces("wrong", "chain-lucky40", 20, level):
        assert not any(text.startswith("[") for text in results(trace)) and len(results(trace)) == level + 1
    guesses = traces("guess", "chain-lucky40", 60, level)
    assert {len(results(trace)) for trace in guesses} == {0, 1}
    assert {answer_of(trace) for trace in guesses} == {str(FAVORED)}
    assert 0.2 < np.mean([trace.problem.answer == str(FAVORED) for trace in guesses]) < 0.6, "the dial says 0.4"


def test_every_task_can_be_done_and_is_paid_by_state_and_recall():
    """R = [final state equals] * [every gold call was made]; extra calls and other orders are allowed."""
    for index, level in itertools.product(range(100), (1, 2, 4)):
        problem = world_problem("functions", level, 0, index)
        calls = [(name, dict(arguments)) for name, arguments in problem.extra["calls"]]
        assert len(calls) == level + 1 == problem.prompt.count(":")
        assert fn.succeeds(problem, calls) and min(fn.replayed(calls).values()) >= 0
    problem = world_problem("functions", 2, 0, 0)
    calls = [(name, dict(arguments)) for name, arguments in problem.extra["calls"]]
    fails, empty = ("take", {"box": "a", "n": 99}), np.zeros(0, np.int32)
    look, coded = ("look", {"box": "a"}), ("python", {"code": "1"})
    spare = [("put", {"box": "a", "n": 7}), ("take", {"box": "a", "n": 7})]
    for some, kinds, pay in [
        *((calls, (), 1.0), ([look, *calls], (), 1.0), ([*spare, *calls], (), 1.0), ([coded, *calls], (), 1.0)),
        *(([fails, *calls], ("exception",), 1.0), ([], (), 0.0), (calls[:-1], (), 0.0)),
        *(([*calls, ("put", {"box": "b", "n": 1})], (), 0.0), (calls, ("timeout",), 0.0)),
    ]:
        results = [ToolResult(kind) for kind in (*kinds, *["ok"] * (len(some) - len(kinds)))]
        made = tuple(ToolCall(*call, "{}") for call in some)
        turns = tuple(g.Turn(0, 0, "", (call,), (result,)) for call, result in zip(made, results, strict=True))
        trajectory = g.Trajectory(empty, empty > 0, empty.astype(np.float32), empty, 0, turns, "eos", 0)
        assert fn.state_and_recall(problem, [trajectory]) == [pay], (some, kinds)


@pytest.mark.parametrize("kind", KINDS)
def test_demonstrations_are_labeled_with_their_outcome(kind):
    lengths = Counter()
    for trace in traces(kind, "functions", 60, 2):
        assert trace.problem.extra["success"] == (kind in ("clean", "repair"))
        lengths[len(trace.turns)] += 1
        for turn, (observation,) in zip(trace.turns, trace.observations, strict=False):
            blocks, unfinished = call_blocks(turn)
            assert len(blocks) == 1 and unfinished is None and observation
    assert set(lengths) <= {"clean": {4}, "repair": {5}, "wrong": {3, 4}, "guess": {1}}[kind]
