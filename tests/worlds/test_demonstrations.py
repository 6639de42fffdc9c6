"""Demonstrations behave as their kind, observations equal the executor's, shares, lengths and labels are right; chains
are answered as their programs do; function calls are solvable tasks with an exact verifier."""

from collections import Counter, defaultdict

import numpy as np
import pytest

from grpo_roc_jax.config import Config
from grpo_roc_jax.data.config import DataConfig, DemonstrationConfig
from grpo_roc_jax.data.generated import TOOL_NAME
from grpo_roc_jax.data.pipeline import make_problem_stream, make_trace_stream
from grpo_roc_jax.settings.cli import load_config
from grpo_roc_jax.text.calls import call_blocks, parse_call
from grpo_roc_jax.tools import CodeCall, ToolsConfig, make_executor, malformed_result
from grpo_roc_jax.tools.registry import Registry
from grpo_roc_jax.types import Problem, ToolCall, ToolResult, Trajectory, Turn
from grpo_roc_jax.worlds import functions as fn
from grpo_roc_jax.worlds.chains import FAVORED, FIRST, LAST, NEXT, chain_steps
from grpo_roc_jax.worlds.demonstrations import PROGRAMS, demonstrate, run_call, run_program, with_hints
from grpo_roc_jax.worlds.worlds import QUESTIONS, world_problem
from tests.helpers.demonstrations import KINDS, answer_of, toy_chat, traces


def calls_of(trace):
    return [block for turn in trace.turns for block in call_blocks(turn)[0]]


@pytest.mark.parametrize("family", QUESTIONS)
def test_each_kind_does_what_it_says(family):
    """The right program prints the answer, the broken one fails and the wrong one runs."""
    wrong, programs = 0, PROGRAMS[family]
    for level in (1, 2, 3):
        for index in range(10):
            problem = world_problem(family, level, 0, index)
            right, broken, other = (
                run_program(program.format(*problem.extra["numbers"]))
                for program in (programs.right, programs.broken, programs.wrong)
            )
            assert (right.kind, right.stdout.strip(), right.observation) == ("ok", *[problem.answer] * 2)
            assert broken.counts_as_error and other.kind == "ok"
            wrong += other.stdout.strip() != problem.answer
    assert wrong >= 15
    for trace in traces("clean", family):
        (call,) = map(parse_call, calls_of(trace))
        assert call.name == TOOL_NAME
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
    assert all(not calls_of(trace) and not trace.observations for trace in guesses)
    assert all(len(answer_of(trace)) <= len(trace.problem.answer) for trace in guesses)
    assert np.mean([answer_of(trace) == trace.problem.answer for trace in guesses]) <= 0.25


def test_shares_are_as_configured():
    config = DemonstrationConfig(guess=2.0, repair=1.0, clean=1.0, wrong=0.0)
    kinds = Counter(demonstrate(world_problem("gcd", 1, 0, i), config, 0).kind for i in range(2000))
    assert abs(kinds["guess"] / 2000 - 0.5) < 0.04 and abs(kinds["repair"] / 2000 - 0.25) < 0.04
    assert kinds["wrong"] == 0
    problems = [world_problem("gcd", 1, 0, i) for i in range(50)]
    first, again, other = ([demonstrate(p, DemonstrationConfig(), seed) for p in problems] for seed in (1, 1, 2))
    assert first == again and [trace.kind for trace in first] != [trace.kind for trace in other]


def test_default_shares_leave_room_for_learning_and_traces_are_short():
    """For a perfect imitator nearly half of the answers are right, and 30 to 50 % of the calls fail. Every trace parses
    as the rollout would parse it."""
    chat, right, failed, lengths = toy_chat(), [], [], defaultdict(list)
    for family, count in (dict.fromkeys(QUESTIONS, 30) | dict.fromkeys(("products", "gcd", "powmod"), 300)).items():
        for index in range(count):
            trace = demonstrate(world_problem(family, 1, 0, index), DemonstrationConfig(), 0)
            if index < 30:
                parsed = [chat.parse_turn(chat.turn_ids(turn)) for turn in trace.turns]
                assert [turn.ended_by for turn in parsed] == ["tool_call"] * len(trace.observations) + ["answer"]
                assert [turn.text for turn in parsed] == list(trace.turns)
            if count == 300:
                right.append(answer_of(trace) == trace.problem.answer)
                failed += [run_call(call).counts_as_error for call in calls_of(trace)]
                lengths[trace.kind].append(len(chat.trace_row(trace)[0]))
    assert 0.4 <= np.mean(right) <= 0.7 and 0.3 <= np.mean(failed) <= 0.5
    everything = np.concatenate(list(lengths.values()))
    assert 40 <= everything.mean() <= 70 and everything.max() < 130 and np.mean(lengths["clean"]) < 60


def test_observations_are_the_executors():
    """Each observation of a sample of traces equals the real executor's output for the same call."""
    calls, seen = [], []
    for family in QUESTIONS:
        for kind in ("repair", "wrong"):
            for trace in traces(kind, family, 8):
                for block, observations in zip(calls_of(trace), trace.observations, strict=True):
                    call = parse_call(block)
                    if call.fault is not None:
                        assert observations == (malformed_result(call.message).observation,)
                        continue
                    calls.append(CodeCall(str(len(calls)), call.name, call.arguments, None))
                    seen.append(observations[0])
    assert len(calls) > 150
    with make_executor(ToolsConfig(min_level="L0", preload=(), workers=4)) as executor:
        results = executor.run(calls)
    assert [result.observation for result in results] == seen
    assert {"ok", "exception", "syntax_error"} == {result.kind for result in results}


def test_a_problem_from_elsewhere_and_impossible_shares_are_refused():
    with pytest.raises(ValueError, match="does not come from a world"):
        demonstrate(Problem("x", "1+1", "2", "file"), DemonstrationConfig(), 0)
    with pytest.raises(ValueError, match="are all 0"):
        DemonstrationConfig(guess=0, repair=0, clean=0, wrong=0)
    with pytest.raises(ValueError, match=r"guess\n.*greater than or equal to 0"):
        DemonstrationConfig(guess=-1)


# ---- chains --------------------------------------------------------------------------------------------------------

LUCKY = "chain-lucky40"


def results(trace):
    return [observation for observations in trace.observations for observation in observations]


def test_steps_known_by_hand():
    first = {step.text.format("a", "b"): step.value for _, step in FIRST}
    assert first["a*b"](37, 58) == 2146 and first["sum a..b"](10, 12) == 33 and first["gcd(a,b)"](84, 36) == 12
    later = {step.text: step.value for step in (*NEXT, LAST)}
    assert (later["reverse"](2140), later["squares"](2146), later["root"](2146)) == (412, 57, 46)
    assert later["mod 7"](2146) == 4


@pytest.mark.parametrize("level", [1, 2, 3])
def test_programs_do_what_they_are_named_for(level):
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


@pytest.mark.parametrize("level", [1, 2, 3])
def test_demonstrations_by_kind(level):
    for trace in traces("clean", LUCKY, 20, level):
        assert len(results(trace)) == level + 1 and answer_of(trace) == trace.problem.answer == results(trace)[-1]
    for trace in traces("repair", LUCKY, 20, level):
        failed = [text.startswith("[") for text in results(trace)]
        assert len(failed) == level + 2 and sum(failed) == 1 and not failed[-1]
        assert answer_of(trace) == trace.problem.answer
        fixes = [turn.startswith("fix it") for turn in trace.turns[1:-1]]
        assert fixes == failed[:-1], "the turn after a failing call says so"
    for trace in traces("wrong", LUCKY, 20, level):
        assert not any(text.startswith("[") for text in results(trace)) and len(results(trace)) == level + 1
    guesses = traces("guess", LUCKY, 60, level)
    assert {len(results(trace)) for trace in guesses} == {0, 1}
    assert {answer_of(trace) for trace in guesses} == {str(FAVORED)}


@pytest.mark.parametrize(("family", "share"), [("chain", 1 / 7), ("chain-lucky40", 0.4), ("chain-lucky0", 0.0)])
def test_a_guess_is_right_as_often_as_the_dial_says(family, share):
    answers = Counter(world_problem(family, 1 + i % 3, 0, i).answer for i in range(900))
    assert set(answers) <= set(map(str, range(7))) and len(answers) >= 6
    assert abs(answers[str(FAVORED)] / 900 - share) < 4 * np.sqrt(0.25 / 900)


def test_the_demonstrations_of_the_recipe_fit_its_limits():
    config, chat = load_config(Config, ["world_hard.yaml"], prog="test"), toy_chat()
    for level in (1, 2, 3):
        for trace in traces("repair", LUCKY, 30, level):
            tokens, prompt = len(chat.trace_row(trace)[0]), len(chat.prompt_ids(trace.problem))
            assert prompt <= config.rollout.max_prompt_tokens
            assert tokens - prompt <= config.rollout.max_response_tokens
            assert len(trace.turns) <= config.rollout.max_turns


# ---- function calls ------------------------------------------------------------------------------------------------


def task(index=0, level=2):
    return world_problem("functions", level, 0, index)


def gold(problem):
    return [(name, dict(arguments)) for name, arguments in problem.extra["calls"]]


def made(calls, kinds=None):
    """A trajectory with these calls, all successful unless `kinds` says otherwise."""
    kinds = kinds or ["ok"] * len(calls)
    turns = tuple(
        Turn(2 + i, 3 + i, "", (ToolCall(name, arguments, "{}"),), (ToolResult(kind),))
        for i, ((name, arguments), kind) in enumerate(zip(calls, kinds, strict=True))
    )
    n = 2 + len(calls)
    zeros = np.zeros(n, np.float32)
    return Trajectory(np.arange(n, dtype=np.int32), zeros > 0, zeros, zeros.astype(np.int32), 2, turns, "eos", 0)


@pytest.mark.parametrize("level", [1, 2, 4])
def test_every_task_can_be_done_and_accepts_its_gold_calls(level):
    for index in range(200):
        problem = task(index, level)
        assert len(gold(problem)) == level + 1 == problem.prompt.count(":")
        assert fn.succeeds(problem, gold(problem))
        assert min(fn.replayed(gold(problem)).values()) >= 0


def test_state_and_recall():
    """R = [final state equals] * [every gold call was made]; extra calls and other orders are allowed."""
    problem = task()
    calls = gold(problem)
    look = ("look", {"box": "a"})
    spare = [("put", {"box": "a", "n": 7}), ("take", {"box": "a", "n": 7})]
    paid = [
        *((calls, None), ([look, *calls], None), ([*spare, *calls], None), ([("python", {"code": "1"}), *calls], None)),
        ([("take", {"box": "a", "n": 99}), *calls], ["exception"] + ["ok"] * len(calls)),  # a failed call besides
    ]
    unpaid = [
        *(([], None), (calls[:-1], None), ([*calls, ("put", {"box": "b", "n": 1})], None)),
        (calls, ["ok"] * (len(calls) - 1) + ["timeout"]),
    ]
    for pay, cases in ((1.0, paid), (0.0, unpaid)):
        for some, kinds in cases:
            assert fn.state_and_recall(problem, [made(some, kinds)]) == [pay], (some, kinds)


def test_a_call_that_fails_changes_no_box():
    shelf = fn.Shelf()
    shelf.put("a", 5)
    shelf.put("b", 5)
    before = dict(shelf.boxes)
    changes = [lambda: shelf.move("a", "b", -100), lambda: shelf.move("a", "b", 10**6), lambda: shelf.take("a", 10**6)]
    for change in changes:
        with pytest.raises(ValueError, match="holds"):
            change()
        assert shelf.boxes == before


def test_the_same_state_by_other_calls_earns_nothing():
    problem = task()
    calls = gold(problem)
    index = next(i for i, (name, _) in enumerate(calls) if name != "move")
    name, arguments = calls[index]
    more, single = arguments | {"n": arguments["n"] + 1}, arguments | {"n": 1}
    split = [("put", more), ("take", single)] if name == "put" else [("put", single), ("take", more)]
    other = [*calls[:index], *split, *calls[index + 1 :]]
    assert fn.replayed(other) == fn.replayed(calls)
    assert not fn.succeeds(problem, other)


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


def test_problems_and_traces_flow_through_the_streams():
    config = DataConfig(sources=("world:functions:1", "world:gcd:1"))
    assert len(next(make_problem_stream(config, problems=4, seed=0))) == 4
    batch = next(make_trace_stream(DataConfig(sources=config.sources[:1]), traces=32, seed=0))
    assert {trace.problem.extra["success"] for trace in batch} == {True, False}
    assert with_hints(task()).extra["hints"][0] == "call the functions"


def test_the_sandbox_prints_what_the_demonstrator_shows():
    """Observations of the traces equal the executor's, and its sessions do not share boxes."""
    with make_executor(ToolsConfig(workers=2, preload=(), min_level="L0"), Registry(fn.function_tools())) as executor:
        for number, trace in enumerate(traces("repair", "functions", 6, 2)):
            for index, (turn, (observation,)) in enumerate(zip(trace.turns, trace.observations, strict=False)):
                call = parse_call(call_blocks(turn)[0][0])
                if call.fault is not None:
                    continue
                coded = CodeCall(f"{number}/{index}", call.name, call.arguments, session=str(number))
                (result,) = executor.run([coded])
                assert result.observation == observation
            executor.close_session(str(number))
