"""Demonstrations: programs behave as their kind, observations equal the executor's, shares and lengths are right."""

from collections import Counter, defaultdict

import numpy as np
import pytest

from grpo_roc_jax.data.config import DemonstrationConfig
from grpo_roc_jax.data.generated import TOOL_NAME
from grpo_roc_jax.text.calls import call_blocks, parse_call
from grpo_roc_jax.tools import CodeCall, ToolsConfig, make_executor, malformed_result
from grpo_roc_jax.types import Problem
from grpo_roc_jax.worlds.demonstrations import PROGRAMS, demonstrate, run_call, run_program
from grpo_roc_jax.worlds.worlds import QUESTIONS, world_problem
from tests.helpers.demonstrations import answer_of, toy_chat, traces


def calls_of(trace):
    return [block for turn in trace.turns for block in call_blocks(turn)[0]]


@pytest.mark.parametrize("family", QUESTIONS)
def test_the_right_program_prints_the_answer_the_broken_one_fails_and_the_wrong_one_runs(family):
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


@pytest.mark.parametrize("family", QUESTIONS)
def test_each_kind_does_what_it_says(family):
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
    assert abs(kinds["guess"] / 2000 - 0.5) < 0.04
    assert abs(kinds["repair"] / 2000 - 0.25) < 0.04
    assert kinds["wrong"] == 0


def test_default_shares_leave_room_for_learning_and_traces_are_short():
    """For a perfect imitator nearly half of the answers are right, and 30 to 50 % of the calls fail."""
    chat, right, failed, lengths = toy_chat(), [], [], defaultdict(list)
    for family in ("products", "gcd", "powmod"):
        for index in range(300):
            trace = demonstrate(world_problem(family, 1, 0, index), DemonstrationConfig(), 0)
            right.append(answer_of(trace) == trace.problem.answer)
            failed += [run_call(call).counts_as_error for call in calls_of(trace)]
            lengths[trace.kind].append(len(chat.trace_row(trace)[0]))
    assert 0.4 <= np.mean(right) <= 0.7
    assert 0.3 <= np.mean(failed) <= 0.5
    everything = np.concatenate(list(lengths.values()))
    assert 40 <= everything.mean() <= 70 and everything.max() < 130
    assert np.mean(lengths["clean"]) < 60


def test_pure_in_problem_and_seed():
    problems = [world_problem("gcd", 1, 0, i) for i in range(50)]
    first, again, other = ([demonstrate(p, DemonstrationConfig(), seed) for p in problems] for seed in (1, 1, 2))
    assert first == again
    assert [trace.kind for trace in first] != [trace.kind for trace in other]


def test_every_trace_parses_as_the_rollout_would_parse_it():
    chat = toy_chat()
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


def test_a_problem_from_elsewhere_and_impossible_shares_are_refused():
    with pytest.raises(ValueError, match="does not come from a world"):
        demonstrate(Problem("x", "1+1", "2", "file"), DemonstrationConfig(), 0)
    with pytest.raises(ValueError, match="are all 0"):
        DemonstrationConfig(guess=0, repair=0, clean=0, wrong=0)
    with pytest.raises(ValueError, match=r"guess\n.*greater than or equal to 0"):
        DemonstrationConfig(guess=-1)
