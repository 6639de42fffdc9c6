"""Real servers of OpenEnv: one whose tools are called, one whose actions are texts."""

from pathlib import Path

import pytest

from grpo_roc_jax.environments.config import EnvironmentOpenEnv
from grpo_roc_jax.environments.episodes import Episodes
from grpo_roc_jax.tools import ToolsConfig
from tests.environments.test_episodes import Play
from tests.helpers.servers import call, served, two_call_chat

pytest.importorskip("openenv", reason="needs the extra openenv; .ci/adapters runs these tests")
ODD = ("no result", "error is text", "error is empty", "reward is text", "reward is a list")
SERVER = str(Path(__file__).parent / "openenv_server.py")


@pytest.fixture(scope="module")
def chat():
    return two_call_chat()


def test_tools_of_a_server_pay_by_turn_and_its_death_is_typed(chat):
    with served(SERVER, "tools") as (url, _):
        episodes = Episodes(EnvironmentOpenEnv(url=url, timeout_s=9.0, retries=1), ToolsConfig())
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
        episodes.close()


def test_answers_that_no_client_can_read_are_no_fault_of_the_policy(chat):
    with served(SERVER, "tools") as (url, _):
        episodes = Episodes(EnvironmentOpenEnv(url=url, timeout_s=9.0, retries=0), ToolsConfig())
        play = Play(chat, episodes, samples=len(ODD))
        for row, how in enumerate(ODD):
            assert play.say(call("odd", f'{{"how": "{how}"}}'), row=row) == "infrastructure", how
        for how, trajectory in zip(ODD, play.end(), strict=True):
            assert "malformed answer" in trajectory.results[0].error_message, how
        episodes.close()
    with served(SERVER, "text") as (url, _):
        choice = EnvironmentOpenEnv(url=url, timeout_s=9.0, retries=0, action="number", observation="hint")
        episodes = Episodes(choice, ToolsConfig())
        play = Play(chat, episodes, samples=2, extra={"seed": 13})
        assert [play.say(text, row=row) for row, text in enumerate(("55", "66"))] == ["infrastructure"] * 2
        play.end()
        episodes.close()


def test_turns_are_actions_where_a_field_is_named(chat):
    with served(SERVER, "text") as (url, _):
        choice = EnvironmentOpenEnv(url=url, timeout_s=9.0, action="number", observation="hint")
        episodes = Episodes(choice, ToolsConfig())
        play = Play(chat, episodes, samples=2, extra={"seed": 13})
        assert play.requests[0].problem.prompt.endswith("a digit"), "what its reset says is part of the prompt"
        assert "no" in play.say("4") and "cannot read this action" in play.say("four")
        assert play.say("<answer>3</answer>") == "answer"
        assert play.say("101", row=1) == "infrastructure", "the server's environment raised"
        assert play.end()[0].reward == 1.0
        episodes.close()
        with pytest.raises(ValueError, match=r"name the field of the text in environment\.action"):
            EnvironmentOpenEnv(url=url, retries=0).factories()
        all_fields = Episodes(EnvironmentOpenEnv(url=url, action="number"), ToolsConfig())
        assert Play(chat, all_fields).requests[0].problem.prompt.endswith('{"hint": "a digit", "tries": 0}')
        all_fields.close()


def test_a_server_that_does_not_answer_is_said_at_the_start(monkeypatch):
    monkeypatch.delenv("NO_TOKEN", raising=False)
    for settings, message in (({}, "Failed to connect"), ({"token_variable": "NO_TOKEN"}, "NO_TOKEN is not set")):
        with pytest.raises(ValueError, match=message):
            EnvironmentOpenEnv(url="http://127.0.0.1:9", timeout_s=5.0, retries=0, **settings).factories()
