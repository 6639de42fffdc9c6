"""Demonstrations: programs behave as their kind, observations equal the executor's, shares and lengths are right."""

from collections import Counter, defaultdict

import numpy as np
import pytest

from grpo_roc_jax.data.config import DemonstrationConfig
from grpo_roc_jax.data.generated import TOOL_NAME
from grpo_roc_jax.text.calls import call_blocks, parse_call
from grpo_roc_jax.text.chat_format import make_chat
from grpo_roc_jax.text.config import TextConfig
from grpo_roc_jax.text.tokenizer import load_tokenizer
from grpo_roc_jax.tools import CodeCall, ToolsConfig, make_executor, malformed_result
from grpo_roc_jax.types import Problem
from grpo_roc_jax.worlds.demonstrations import PROGRAMS, demonstrate, run_call, run_program
from grpo_roc_jax.worlds.worlds import QUESTIONS, world_problem

ONE_KIND = {kind: DemonstrationConfig(**{k: float(k == kind) for k in ("guess", "repair", "clean", "wrong")})
            for kind in ("guess", "repair", "clean", "wrong")}  # fmt: skip


def traces(kind, family, count=40, level=1):
    return [demonstrate(world_problem(family, level, 0, i), ONE_KIND[kind], 0) for i in range(count)]


def calls_of(trace):
    return [block for turn in trace.turns for block in call_blocks(turn)[0]]


def answer_of(trace):
    return trace.turns[-1].split("\\boxed{")[1].split("}")[0]


def test_every_family_has_programs():
    assert set(PROGRAMS) == set(QUESTIONS)


@pytest.mark.parametrize("family", QUESTIONS)
def test_the_right_program_prints_the_answer(family):
    for level in (1, 2, 3):
        for index in range(10):
            problem = world_problem(family, level, 0, index)
            result = run_program(PROGRAMS[family].right.format(*problem.extra["numbers"]))
            assert (result.kind, result.stdout.strip()) == ("ok", problem.answer)
            assert result.observation == problem.answer


@pytest.mark.parametrize("family", QUESTIONS)
def test_the_broken_program_fails_and_the_wrong_one_runs(family):
    wrong = 0
    for index in range(20):
        problem = world_problem(family, 1, 0, index)
        numbers = problem.extra["numbers"]
        assert run_program(PROGRAMS[family].broken.format(*numbers)).counts_as_error
        result = run_program(PROGRAMS[family].wrong.format(*numbers))
        assert result.kind == "ok"
        wrong += result.stdout.strip() != problem.answer
    assert wrong >= 10


@pytest.mark.parametrize("family", QUESTIONS)
def test_clean_traces_are_right(family):
    for trace in traces("clean", family):
        (call,) = map(parse_call, calls_of(trace))
        assert call.name == TOOL_NAME
        assert answer_of(trace) == trace.problem.answer == trace.observations[0][0]


@pytest.mark.parametrize("family", QUESTIONS)
def test_repairs_fail_once_then_succeed(family):
    kinds = Counter()
    for trace in traces("repair", family):
        first, second = map(run_call, calls_of(trace))
        assert first.counts_as_error
        assert second.ok
        assert trace.observations == ((first.observation,), (second.observation,))
        assert answer_of(trace) == trace.problem.answer
        kinds[first.kind] += 1
    assert {"exception", "syntax_error", "malformed_call"} <= set(kinds), "must have faults of several kinds"


@pytest.mark.parametrize("family", QUESTIONS)
def test_guesses_call_nothing_and_are_mostly_wrong(family):
    guesses = traces("guess", family, 100)
    assert all(not calls_of(trace) and not trace.observations for trace in guesses)
    assert all(len(answer_of(trace)) <= len(trace.problem.answer) for trace in guesses)
    assert np.mean([answer_of(trace) == trace.problem.answer for trace in guesses]) <= 0.25


def test_wrong_traces_answer_what_they_computed():
    for trace in traces("wrong", "products"):
        assert answer_of(trace) == trace.observations[0][0] != trace.problem.answer


def test_shares_are_as_configured():
    config = DemonstrationConfig(guess=2.0, repair=1.0, clean=1.0, wrong=0.0)
    kinds = Counter(demonstrate(world_problem("gcd", 1, 0, i), config, 0).kind for i in range(2000))
    assert abs(kinds["guess"] / 2000 - 0.5) < 0.04
    assert abs(kinds["repair"] / 2000 - 0.25) < 0.04
    assert kinds["wrong"] == 0


def test_default_shares_leave_room_for_learning():
    """For a perfect imitator nearly half of the answers are right, and 30 to 50 % of the calls fail."""
    right, failed = [], []
    for family in ("products", "gcd", "powmod"):
        for index in range(300):
            trace = demonstrate(world_problem(family, 1, 0, index), DemonstrationConfig(), 0)
            right.append(answer_of(trace) == trace.problem.answer)
            failed += [run_call(call).counts_as_error for call in calls_of(trace)]
    assert 0.4 <= np.mean(right) <= 0.7
    assert 0.3 <= np.mean(failed) <= 0.5


def test_pure_in_problem_and_seed():
    problems = [world_problem("gcd", 1, 0, i) for i in range(50)]
    config = DemonstrationConfig()
    assert [demonstrate(p, config, 1) for p in problems] == [demonstrate(p, config, 1) for p in problems]
    assert [demonstrate(p, config, 1).kind for p in problems] != [demonstrate(p, config, 2).kind for p in problems]


def test_lengths_under_the_toy_vocabulary():
    chat = make_chat(TextConfig(), load_tokenizer(TextConfig()))
    by_kind = defaultdict(list)
    for family in ("products", "gcd", "powmod"):
        for index in range(200):
            trace = demonstrate(world_problem(family, 1, 0, index), DemonstrationConfig(), 0)
            by_kind[trace.kind].append(len(chat.trace_row(trace)[0]))
    everything = np.concatenate(list(by_kind.values()))
    assert 40 <= everything.mean() <= 70
    assert np.mean(by_kind["clean"]) < 60
    assert everything.max() < 130


def test_every_trace_parses_as_the_rollout_would_parse_it():
    chat = make_chat(TextConfig(), load_tokenizer(TextConfig()))
    for family in QUESTIONS:
        for index in range(30):
            trace = demonstrate(world_problem(family, 1, 0, index), DemonstrationConfig(), 0)
            parsed = [chat.parse_turn(chat.turn_ids(turn)) for turn in trace.turns]
            assert [turn.ended_by for turn in parsed] == ["tool_call"] * len(trace.observations) + ["answer"]
            assert [turn.text for turn in parsed] == list(trace.turns)


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


def test_a_problem_from_elsewhere_is_refused():
    with pytest.raises(ValueError, match="does not come from a world"):
        demonstrate(Problem("x", "1+1", "2", "file"), DemonstrationConfig(), 0)


def test_impossible_shares_are_refused():
    with pytest.raises(ValueError, match="are all 0"):
        DemonstrationConfig(guess=0, repair=0, clean=0, wrong=0)
    with pytest.raises(ValueError, match=r"guess\n.*greater than or equal to 0"):
        DemonstrationConfig(guess=-1)
