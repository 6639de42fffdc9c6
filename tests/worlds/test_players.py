"""Worlds that are played: each is won by a good player, lost by bad ones, and shown as the rollout would show it."""

import numpy as np
import pytest

from grpo_roc_jax.data.config import DataConfig, DemonstrationConfig
from grpo_roc_jax.data.pipeline import eval_problems, make_trace_stream
from grpo_roc_jax.worlds.demonstrations import demonstrate, with_hints
from grpo_roc_jax.worlds.players import PLAYED, demonstrate_played
from grpo_roc_jax.worlds.worlds import world_problem
from tests.helpers.demonstrations import toy_chat


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
