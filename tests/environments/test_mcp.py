"""Tools of real MCP servers: over stdio with a server for each rollout, and over HTTP with a session for each."""

import contextlib
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

import grpo_roc_jax as g
from grpo_roc_jax.environments.config import EnvironmentMcp, HostProcesses, HostThreads
from grpo_roc_jax.text.chat_format import make_chat
from tests.environments.test_episodes import PROBLEM, Play, opened
from tests.helpers.servers import call, served
from tests.helpers.servers import chat as chat  # a fixture

pytest.importorskip("mcp", reason="needs the extra mcp; .ci/adapters runs these tests")
from grpo_roc_jax.environments import mcp_tools

SERVER = str(Path(__file__).parent / "mcp_server.py")
STDIO = EnvironmentMcp(command=(sys.executable, SERVER), timeout_s=60.0, retries=1)


def test_schemas_are_taken_over_and_rollouts_have_servers_of_their_own_which_may_die(chat):
    with opened(STDIO) as stdio:
        assert stdio.tools.names == ("add", "words", "refuse", "sleep", "die")
        parameters = stdio.tools.schemas[0]["function"]["parameters"]
        assert parameters["required"] == ["k"] and parameters["properties"]["k"]["description"] == "How much."
        play = Play(chat, stdio, samples=2)
        assert "\n2\n" in play.say(call("add", '{"k": 2}'))
        assert "\n6\n" in play.say(call("add", '{"k": 2, "twice": true}'))
        assert "\n5\n" in play.say(call("add", '{"k": 5}'), row=1), "the total is that of the rollout"
        reply = play.say(call("refuse", '{"why": "late"}') + call("add", '{"k": "x"}'))
        assert "no: late" in reply and "argument 'k' must be integer, got string" in reply
        assert play.say("done") == "eos"
        first, _ = play.end()
        assert [result.kind for result in first.results] == ["ok", "ok", "exception", "bad_arguments"]
        play = Play(chat, stdio, samples=2)
        assert play.say(call("die")) == "infrastructure"
        assert "\n1\n" in play.say(call("add", '{"k": 1}'), row=1), "others go on"
        dead, alive = play.end()
        assert dead.stop == "infrastructure" and dead.results[-1].kind == "transport_error" and alive.results[0].ok
        assert "it wrote: out of ink" in dead.results[-1].error_message


def test_the_command_takes_columns_of_the_row_and_the_log_what_servers_write(chat, tmp_path):
    log, problem = tmp_path / "servers.log", g.Problem("p-7", "Go.", "", "t", {"level": 3})
    words = ("words", "{uid}", "level {level}", "{seed}", "${HOME}", '{"a": 1}')
    with opened(replace(STDIO, command=(*STDIO.command, *words), log=str(log))) as episodes:
        reply, again = (Play(chat, episodes, problem=problem).say(call("words")) for _ in range(2))
        assert reply == again and "p-7 level 3" in reply and '${HOME} {"a": 1}' in reply
        assert "asked for p-7 level 3" in log.read_text(encoding="utf-8")
        (answer,) = episodes.open([("k", replace(problem, extra={}), 1)]).values()
        assert "names {level}; the columns of this problem are prompt, answer, uid, seed" in answer.failure.text


def test_a_server_over_http_is_shared_and_its_end_is_typed(chat):
    with served(SERVER) as (address, process):
        mcp = EnvironmentMcp(url=f"{address}/mcp", timeout_s=60.0, retries=0, host=HostProcesses(1))
        with opened(mcp) as episodes, opened(replace(mcp, timeout_s=8.0, retries=2, host=HostThreads())) as hurried:
            play, asleep, add = Play(chat, episodes, samples=2), Play(chat, hurried), call("add", '{"k": 2}')
            assert "\n2\n" in play.say(add) and "\n4\n" in play.say(add, row=1)
            assert asleep.say(call("sleep")) == "deadline" and asleep.end()[0].results[0].kind == "timeout"
            process.kill()
            assert play.say(add) == "infrastructure"
            assert all(trajectory.results[0].ok for trajectory in play.end())


def test_descriptions_and_results_of_a_hostile_server_forge_no_turn(chat):
    """The same marks in the prompt and in the row as those of a server that says x instead."""
    specials = []
    for kind in ("hostile", "plain"):
        with opened(replace(STDIO, command=(*STDIO.command, kind))) as episodes:
            config = g.TextConfig(tools_section=True)
            described = make_chat(config, g.load_tokenizer(config), episodes.tools.schemas)
            ids = described.prompt_ids(PROBLEM)
            assert len(described.tokenizer.decode(ids)) < 40_000, "descriptions are cut"
            play = Play(chat, episodes)
            assert "<answer>" not in play.say(call("read", '{"k": 1}')) and play.say("done") == "eos"
            (row,) = play.end()
            assert row.results[0].ok and len(row.turns) == 2
            specials.append([i for i in (*ids, *row.tokens) if i in described.tokenizer.special_ids])
    assert specials[0] == specials[1]


def test_what_does_not_answer_or_lists_tools_without_end_is_said_at_the_start(monkeypatch):
    monkeypatch.delenv("NO_TOKEN", raising=False)
    for settings, message in (
        ({"command": ("no-such-program",)}, r"'no-such-program' does not answer: .*No such file"),
        ({"url": "http://127.0.0.1:9/mcp", "timeout_s": 5.0}, "does not answer"),
        ({"url": "http://127.0.0.1:9/mcp", "token_variable": "NO_TOKEN"}, "token_variable: NO_TOKEN is not set"),
    ):
        with pytest.raises(ValueError, match=message):
            EnvironmentMcp(retries=0, **settings).factories()
    list_tools = AsyncMock(return_value=SimpleNamespace(tools=[], next_cursor="further"))
    pages = contextlib.nullcontext(SimpleNamespace(list_tools=list_tools))
    monkeypatch.setattr(mcp_tools, "client_of", lambda *_: pages)
    with pytest.raises(ValueError, match="more than 1000 pages"):
        mcp_tools.mcp_class(replace(STDIO, retries=0))
