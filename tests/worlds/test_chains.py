"""Chains: answers equal the programs' and known ones, each kind of demonstration does what it says, guesses are right
as often as the dial says."""

from collections import Counter

import numpy as np
import pytest

from grpo_roc_jax.config import Config
from grpo_roc_jax.settings.cli import load_config
from grpo_roc_jax.worlds.chains import FAVORED, FIRST, LAST, NEXT, chain_steps
from grpo_roc_jax.worlds.demonstrations import run_program
from grpo_roc_jax.worlds.worlds import world_problem
from tests.helpers.demonstrations import answer_of, toy_chat, traces

FAMILY = "chain-lucky40"


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
    for trace in traces("clean", FAMILY, 20, level):
        assert len(results(trace)) == level + 1 and answer_of(trace) == trace.problem.answer == results(trace)[-1]
    for trace in traces("repair", FAMILY, 20, level):
        failed = [text.startswith("[") for text in results(trace)]
        assert len(failed) == level + 2 and sum(failed) == 1 and not failed[-1]
        assert answer_of(trace) == trace.problem.answer
        fixes = [turn.startswith("fix it") for turn in trace.turns[1:-1]]
        assert fixes == failed[:-1], "the turn after a failing call says so"
    for trace in traces("wrong", FAMILY, 20, level):
        assert not any(text.startswith("[") for text in results(trace)) and len(results(trace)) == level + 1
    guesses = traces("guess", FAMILY, 60, level)
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
        for trace in traces("repair", FAMILY, 30, level):
            tokens, prompt = len(chat.trace_row(trace)[0]), len(chat.prompt_ids(trace.problem))
            assert prompt <= config.rollout.max_prompt_tokens
            assert tokens - prompt <= config.rollout.max_response_tokens
            assert len(trace.turns) <= config.rollout.max_turns
