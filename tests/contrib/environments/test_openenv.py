"""Real servers of OpenEnv: one whose tools are called, one whose actions are texts."""

from pathlib import Path

import pytest

from grpo_roc_jax.environments.config import EnvironmentOpenEnv
from tests.environments.test_episodes import Play, opened
from tests.helpers.servers import call, served
from tests.helpers.servers import chat as chat  # a fixture

pytest.importorskip("openenv", reason="needs the extra openenv; .ci/adapters runs these tests")
ODD = ("no result", "error is text", "error is empty", "reward is text", "reward is a list")
SERVER = str(Path(__file__).parent / "openenv_server.py")


def test_tools_of_a_server_pay_by_turn_its_death_is_typed_and_odd_answers_are_no_fault_of_the_policy(chat):
    with (
        served(SERVER, "tools") as (url, _),
        opened(EnvironmentOpenEnv(url=url, timeout_s=9.0, retries=0)) as once,
        opened(EnvironmentOpenEnv(url=url, timeout_s=9.0, retries=1)) as episodes,
    ):
        play = Play(chat, once, samples=len(ODD))
        for row, how in enumerate(ODD):
            assert play.say(call("odd", f'{{"how": "{how}"}}'), row=row) == "infrastructure", how
        for how, trajectory in zip(ODD, play.end(), strict=True):
            assert "malformed answer" in trajectory.results[0].error_message, how
        assert episodes.tools.names == ("add", "die", "odd")
        play = Play(chat, episodes, samples=4, extra={"start": 1})
        assert "\n3\n" in play.say(call("add", '{"k": 2}'))
        reply = play.say(call("add", '{"k": -1}') + call("add", '{"k": "x"}'))
        assert "only upwards" in reply and "argument 'k' must be integer, got string" in reply
        assert play.say(call("add", '{"k": 2}')) == "answer", "the server ended it"
        assert "\n2\n" in play.say(call("add", '{"k": 1}'), row=1), "a session for each rollout"
        assert play.say("I give up", row=1) == "eos"
        assert play.say(call("die"), row=2) == "infrastructure"
        assert play.say(call("add", '{"k": 1}'), row=3) == "infrastructure", "its session died with the server"
        first, second, third, _ = play.end()
        assert [turn.reward for turn in first.turns] == [0.0, 0.0, 1.0] and first.reward == 1.0
        assert second.reward == 0.0 and third.results[0].kind == "transport_error"


def test_turns_are_actions_where_a_field_is_named(chat):
    with served(SERVER, "text") as (url, _):
        choice = EnvironmentOpenEnv(url=url, timeout_s=9.0, action="number", observation="hint")
        with opened(choice) as episodes:
            play = Play(chat, episodes, samples=4, extra={"seed": 13})
            assert play.requests[0].problem.prompt.endswith("a digit"), "what its reset says is part of the prompt"
            assert "no" in play.say("4") and "cannot read this action" in play.say("four")
            assert play.say("<answer>3</answer>") == "answer"
            odd = [play.say(text, row=row) for row, text in ((1, "101"), (2, "55"), (3, "66"))]
            assert odd == ["infrastructure"] * 3, "the server's environment raised, or gave what no client can read"
            assert play.end()[0].reward == 1.0
        with pytest.raises(ValueError, match=r"name the field of the text in environment\.action"):
            EnvironmentOpenEnv(url=url, retries=0).factories()
        with opened(EnvironmentOpenEnv(url=url, action="number")) as episodes:
            assert Play(chat, episodes).requests[0].problem.prompt.endswith('{"hint": "a digit", "tries": 0}')


def test_a_server_that_does_not_answer_is_said_at_the_start(monkeypatch):
    monkeypatch.delenv("NO_TOKEN", raising=False)
    for settings, message in (({}, "Failed to connect"), ({"token_variable": "NO_TOKEN"}, "NO_TOKEN is not set")):
        with pytest.raises(ValueError, match=message):
            EnvironmentOpenEnv(url="http://127.0.0.1:9", timeout_s=5.0, retries=0, **settings).factories()
