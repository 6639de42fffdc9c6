"""Clients and agents that misbehave: streams that are dropped or not read, bodies of nonsense, floods of output."""

import json
import random
import shlex
import socket
import sys
from dataclasses import replace

import pytest

from grpo_roc_jax.engine.records import RunOptions
from grpo_roc_jax.environments.config import AgentCommand
from grpo_roc_jax.serving.agent_runs import AgentRuns
from grpo_roc_jax.types import Problem, RolloutRequest
from tests.helpers.serving import served, small_policy
from tests.serving.test_agents import collected
from tests.serving.test_endpoint import HELLO, wait_for


@pytest.fixture(scope="module")
def server():
    with served() as found:
        yield found


def opened(server, fields, buffer=1 << 16):
    """A connection on which a request was sent."""
    body, link = json.dumps(fields).encode(), socket.socket()
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    link.connect(("127.0.0.1", server.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    link.sendall(head.encode() + body)
    return link


def cancelled(server):
    return server.endpoint.loop.engine.stats.stops["cancelled"]


def test_a_client_that_leaves_while_it_streams_ends_its_request_alone(server):
    before = cancelled(server)
    with opened(server, {"prompt": "x", "max_tokens": 180, "n": 4, "stream": True}) as link:
        while b"data: " not in link.recv(1 << 12):
            pass
        other = server.ask("/v1/completions", {"prompt": "y", "max_tokens": 12, "stream": True})
    wait_for(lambda: cancelled(server) > before and not server.endpoint.running)
    assert other[1][-1] == "[DONE]"


def test_a_client_that_reads_nothing_does_not_keep_its_place(server, monkeypatch):
    monkeypatch.setattr(server.endpoint, "limits", replace(server.endpoint.limits, stalled_s=0.2))
    for listening in server.sockets:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
    fields = {"prompt": "x", "max_tokens": 180, "n": 8, "stream": True, "logprobs": 1, "return_token_ids": True}
    with opened(server, fields, buffer=1 << 12):
        wait_for(lambda: server.endpoint.running)
        wait_for(lambda: not server.endpoint.running)
        assert server.endpoint.counts.requests[499] >= 1
    assert server.chat(HELLO)["choices"]


NONSENSE = (
    None,
    True,
    -1,
    0,
    1e400,
    float("nan"),
    10**30,
    "",
    "\ud800",
    "\udc00x\0",
    [],
    [[]],
    {},
    {"a": {}},
    "{",
    [None],
)
SEEDS = (
    ("/v1/chat/completions", {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f"}}]}),
    ("/v1/chat/completions", {"messages": [*HELLO, {"role": "assistant", "content": "a", "tool_calls": []}, *HELLO]}),
    ("/v1/completions", {"prompt": "x", "stop": ["a"], "stream_options": {}}),
    ("/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": {"temperature": 1, "stop_token_ids": [3]}}),
)


def spoiled(value, rng):
    """A copy of a value in which one part is nonsense."""
    if isinstance(value, dict | list) and value and rng.random() < 0.8:
        found = dict(value) if isinstance(value, dict) else list(value)
        key = rng.choice([*found]) if isinstance(value, dict) else rng.randrange(len(found))
        found[key] = spoiled(found[key], rng)
        return found
    return rng.choice(NONSENSE)


def test_nonsense_is_refused_and_never_a_fault_of_the_server(server):
    rng = random.Random(0)
    statuses = set()
    for _ in range(150):
        path, body = rng.choice(SEEDS)
        extra = rng.choice(
            ["seed", "n", "logprobs", "stop", "model", "max_tokens", "temperature", "tool_choice", "user"]
        )
        body = spoiled(body if rng.random() < 0.7 else {**body, extra: rng.choice(NONSENSE)}, rng)
        if isinstance(body, dict):
            body = {"max_tokens": 1, **body}
        status, answer = server.ask(path, json.dumps(body).encode())
        statuses.add(status)
        assert status in (200, 400), (path, body, answer)
    assert statuses == {200, 400}
    deep = b"[" * 5000 + b"]" * 5000
    for body in (b"\xff", deep, b'{"messages": ' + deep + b"}", b'{"seed": ' + b"9" * 5000 + b"}"):
        assert server.ask("/v1/chat/completions", body)[0] == 400


def test_an_agent_that_floods_its_output_is_read_to_its_end(tmp_path):
    write = "os.write(int(os.environ['GRPO_REWARD_FD']), b'0.5')"
    flood = f"import os, sys; [sys.stdout.write('x' * 100_000 + '\\n') for i in range(300)]; {write}"
    chat, shared, params = small_policy()
    engine = shared.sibling()
    request = RolloutRequest(Problem("p", "2+3=\0", "5", "t"), 0)
    agent = tmp_path / "agent.py"
    agent.write_text(flood)

    def collected_by(*words):
        runs = AgentRuns(AgentCommand(command=shlex.join(words)), chat, engine, 99)
        try:
            ((one,), stats) = runs.collect(engine.publish(params, 1), [request], RunOptions())
        finally:
            runs.close()
        return one, stats

    for words in ((sys.executable, "-c", flood), (sys.executable, str(agent))):
        one, _ = collected_by(*words)
        assert (one.stop, one.reward) == ("infrastructure", 0.5), "it asked nothing"
    for words in (("true", "{prompt}"), (sys.executable, str(agent), "{prompt}")):
        one, stats = collected_by(*words)
        assert one.stop == "infrastructure" and stats.environment_faults == 1, "no argument holds a zero byte"


def test_an_agent_that_leaves_its_stream_goes_on_with_further_calls():
    """The answer that it left is a call if it was whole by then."""
    ((one,), stats) = collected("leave")
    assert one.stop in ("eos", "length") and len(one.turns) in (2, 3) and stats.environment_faults == 0
