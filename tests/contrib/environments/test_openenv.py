"""A real server of OpenEnv whose tools are called."""

from pathlib import Path

import pytest

from grpo_roc_jax.environments.config import EnvironmentOpenEnv
from tests.environments.test_episodes import Play, opened
from tests.helpers.servers import call, served
from tests.helpers.servers import chat as chat  # a fixture

pytest.importorskip("openenv", reason="needs the extra openenv; .ci/adapters runs these tests")
SERVER = str(Path(__file__).parent / "openenv_server.py")


def test_tools_of_a_server_pay_by_turn_and_its_death_is_typed(chat):
    with served(SERVER) as (url, _), opened(EnvironmentOpenEnv(url=url, timeout_s=9.0, retries=1)) as episodes:
        assert episodes.tools.names == ("add", "die")
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
    with pytest.raises(ValueError, match="Failed to connect"):
        EnvironmentOpenEnv(url="http://127.0.0.1:9", timeout_s=5.0, retries=0).factories()
