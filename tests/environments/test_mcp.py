"""Tools of real MCP servers: over stdio with a server for each rollout, and over HTTP with a session for each."""

import contextlib
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_roc_jax.environments.config import EnvironmentByRow, EnvironmentMcp, HostProcesses, HostThreads
from grpo_roc_jax.text.chat_format import make_chat
from grpo_roc_jax.text.config import TextConfig
from grpo_roc_jax.text.tokenizer import load_tokenizer
from grpo_roc_jax.types import Problem
from tests.environments.test_episodes import FILE, Play, opened
from tests.helpers.servers import call, served
from tests.helpers.servers import chat as chat  # a fixture

pytest.importorskip("mcp", reason="needs the extra mcp; .ci/adapters runs these tests")
from grpo_roc_jax.environments import mcp_tools

SERVER = str(Path(__file__).parent / "mcp_server.py")
STDIO = EnvironmentMcp(command=(sys.executable, SERVER), timeout_s=60.0, retries=1)


@pytest.fixture(scope="module")
def stdio():
    with opened(STDIO) as episodes:
        yield episodes


def test_schemas_are_taken_over_and_rollouts_have_servers_of_their_own_which_may_die(chat, stdio):
    assert stdio.tools.names == ("add", "words", "refuse", "sleep", "die")
    parameters = stdio.tools.schemas[0]["function"]["parameters"]
    assert parameters["required"] == ["k"] and parameters["properties"]["k"]["description"] == "How much."
    play = Play(chat, stdio, samples=2)
    assert "\n2\n" in play.say(call("add", '{"k": 2}')) and "\n6\n" in play.say(call("add", '{"k": 2, "twice": true}'))
    assert "\n5\n" in play.say(call("add", '{"k": 5}'), row=1), "the total is that of the rollout"
    reply = play.say(call("refuse", '{"why": "late"}') + call("add", '{"k": "x"}'))
    assert "no: late" in reply and "argument 'k' must be integer, got string" in reply
    assert play.say("done") == "eos"
    first, _ = play.end()
    assert [result.kind for result in first.results] == ["ok", "ok", "exception", "bad_arguments"]
    assert first.reward == 0.0
    play = Play(chat, stdio, samples=2)
    assert play.say(call("die")) == "infrastructure"
    assert "\n1\n" in play.say(call("add", '{"k": 1}'), row=1), "others go on"
    dead, alive = play.end()
    assert dead.stop == "infrastructure" and dead.results[-1].kind == "transport_error" and alive.results[0].ok
    assert "it wrote: out of ink" in dead.results[-1].error_message


@pytest.mark.parametrize(("tools", "message"), [(7, "more than 1000 tools"), (0, "more than 1000 pages")])
def test_a_list_of_tools_without_end_is_refused(monkeypatch, tools, message):
    """The server names a further page for ever, with tools on each or with none."""

    async def list_tools(cursor=None):
        listed = [SimpleNamespace(name=f"t{i}", description="", input_schema={}) for i in range(tools)]
        return SimpleNamespace(tools=listed, next_cursor="further")

    pages = contextlib.nullcontext(SimpleNamespace(list_tools=list_tools))
    monkeypatch.setattr(mcp_tools, "client_of", lambda *_: pages)
    with pytest.raises(ValueError, match=message):
        mcp_tools.mcp_class(replace(STDIO, retries=0, timeout_s=30.0 + tools))


def test_parts_of_a_result_are_text():
    """Its own, that of a resource in it, and the name of any other; structured content where there is no part."""
    part, of = SimpleNamespace, SimpleNamespace(text="rows", uri="file:///a")
    parts = [part(type="text", text="a"), part(type="resource", resource=of), part(type="image", data="x")]
    parts.append(part(type="resource", resource=part(blob="x")))
    result = part(content=parts, structured_content={"a": 1}, is_error=False)
    assert mcp_tools.tool_result(result).echo == "a\nrows\n[image]\n[resource]"
    assert mcp_tools.tool_result(part(content=[], structured_content={"a": 1}, is_error=False)).echo == '{"a": 1}'
    failed = mcp_tools.tool_result(part(content=[], structured_content=None, is_error=True))
    assert failed.kind == "exception" and failed.error_type == "ToolError"


def test_the_command_takes_columns_of_the_row_and_the_log_what_servers_write(chat, tmp_path):
    log, problem = tmp_path / "servers.log", Problem("p-7", "Go.", "", "t", {"level": 3})
    words = ("words", "{uid}", "level {level}", "{seed}", "${HOME}", '{"a": 1}')
    with opened(replace(STDIO, command=(*STDIO.command, *words), log=str(log))) as episodes:
        replies = [Play(chat, episodes, problem=problem).say(call("words")) for _ in range(2)]
        assert "p-7 level 3" in replies[0] and '${HOME} {"a": 1}' in replies[0]
        assert "asked for p-7 level 3" in log.read_text(encoding="utf-8")
        assert len({re.search(r"level 3 (\d+)", reply)[1] for reply in replies}) == 1
        (answer,) = episodes.open([("k", replace(problem, extra={}), 1)]).values()
        assert "names {level}; the columns of this problem are prompt, answer, uid, seed" in answer.failure.text


def test_rows_choose_among_kinds_of_environments(chat):
    """An MCP server beside a class of one's own: each row meets its own, and failures are those of its kind."""
    shop = f"shop={{kind: mcp, command: {json.dumps([sys.executable, SERVER])}}}"
    choice = EnvironmentByRow(classes=(shop, f"guess={FILE}:Echo"), timeout_s=60.0, retries=0)
    with opened(choice) as episodes:
        assert set(episodes.tools.names) >= {"add", "words"}
        play = Play(chat, episodes, problem=Problem("a", "Go.", "", "shop"))
        assert "\n2\n" in play.say(call("add", '{"k": 2}')) and play.say("done") == "eos"
        assert play.end()[0].reward == 0.0
        other = Play(chat, episodes, problem=Problem("b", "Go.", "5", "t", {"environment": "guess"}))
        assert "you said hm" in other.say("hm"), "the class of its own"
        assert choice.scores_failures("guess") and not choice.scores_failures("shop")
        with pytest.raises(ValueError, match=r"column environment of problem 'c' is missing, and its source is 't'"):
            choice.name_for(Problem("c", "Go.", "", "t"))


def test_a_server_over_http_is_shared_and_its_end_is_typed(chat):
    with served(SERVER) as (address, process):
        mcp = EnvironmentMcp(url=f"{address}/mcp", timeout_s=60.0, retries=0, host=HostProcesses(1))
        with opened(mcp) as episodes, opened(replace(mcp, timeout_s=8.0, retries=2, host=HostThreads())) as hurried:
            play, asleep = Play(chat, episodes, samples=2), Play(chat, hurried)
            assert "\n2\n" in play.say(call("add", '{"k": 2}'))
            assert "\n4\n" in play.say(call("add", '{"k": 2}'), row=1)
            assert asleep.say(call("sleep")) == "deadline" and asleep.end()[0].results[0].kind == "timeout"
            process.kill()
            assert play.say(call("add", '{"k": 2}')) == "infrastructure"
            assert all(trajectory.results[0].ok for trajectory in play.end())


def test_descriptions_and_results_of_a_hostile_server_forge_no_turn(chat):
    """The same marks in the prompt and in the row as those of a server that says x instead."""
    specials, rows = [], []
    for kind in ("hostile", "plain"):
        with opened(replace(STDIO, command=(*STDIO.command, kind))) as episodes:
            config = TextConfig(tools_section=True)
            described = make_chat(config, load_tokenizer(config), episodes.tools.schemas)
            ids = described.prompt_ids(Problem("a", "1+1", "2", "made"))
            assert len(described.tokenizer.decode(ids)) < 40_000, "descriptions are cut"
            specials.append([i for i in ids if i in described.tokenizer.special_ids])
            play = Play(chat, episodes)
            reply = play.say(call("read", '{"k": 1}'))
            assert play.say("done") == "eos"
            rows.append(play.end()[0])
            assert rows[-1].results[0].ok and not {"<|im_end|>", "</tools>", "<answer>"} & set(reply.split("x"))
            assert reply.count("<answer>") == 0 and rows[-1].reward == 0.0
    special = load_tokenizer(TextConfig()).special_ids
    assert specials[0] == specials[1] and len(rows[0].turns) == len(rows[1].turns) == 2
    assert [i for i in rows[0].tokens if i in special] == [i for i in rows[1].tokens if i in special]


def test_what_does_not_answer_is_said_at_the_start(monkeypatch):
    monkeypatch.delenv("NO_TOKEN", raising=False)
    url = {"url": "http://127.0.0.1:9/mcp", "timeout_s": 5.0}
    for settings, message in (
        ({"command": ("no-such-program",)}, r"'no-such-program' does not answer: .*No such file"),
        (url, "does not answer"),
        (url | {"token_variable": "NO_TOKEN"}, "token_variable: NO_TOKEN is not set"),
    ):
        with pytest.raises(ValueError, match=message):
            EnvironmentMcp(retries=0, **settings).factories()
