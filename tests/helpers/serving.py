"""A small policy behind HTTP on a thread, plain requests to it, and runs of the agents of `tests/serving` on it."""

import http.client
import json
import sys
import time
from contextlib import closing, contextmanager
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import grpo_roc_jax as g
from grpo_roc_jax.engine.protocol import RolloutStats, SingleTurn
from grpo_roc_jax.environments.config import AgentCommand
from grpo_roc_jax.serving.agent_runs import AgentRuns, AgentSession
from grpo_roc_jax.serving.sampling_loop import SamplingLoop
from grpo_roc_jax.serving.server import Endpoint, ServerThread
from grpo_roc_jax.text.chat_format import make_chat

ROLLOUT = g.RolloutConfig(
    slots=8, chunk=4, block=16, max_prompt_tokens=64, max_response_tokens=192, append_lengths=(32,), narrow=()
)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "Says the weather.", "parameters": CITY}
WEATHER = {"type": "function", "function": WEATHER}


@cache
def small_policy(rollout=ROLLOUT):
    """(chat format, engine, parameters) of random weights; compiled once for all tests."""
    tokenizer = g.load_tokenizer(g.TextConfig())
    chat = make_chat(g.TextConfig(), tokenizer)
    sizes = {"d_model": 32, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 16, "d_ff": 32}
    model = g.ModelConfig(**sizes, vocab_size=tokenizer.vocab_size)
    engine = g.make_engine(model, rollout, g.SamplingConfig(), sorted(chat.stop_ids), seed=3)
    return chat, engine, jax.jit(partial(g.init_params, config=model))(jax.random.key(0))


class ScriptedLoop:
    """In place of a sampling loop: answers each job with the next text, so that agents meet calls and answers."""

    room, sampler, stats = 1 << 14, SimpleNamespace(version=7), RolloutStats()

    def __init__(self, chat, texts, deliver):
        self.chat, self.texts, self.deliver = chat, iter(texts), deliver
        settings = SimpleNamespace(sampling=g.SamplingConfig())
        model = SimpleNamespace(vocab_size=chat.tokenizer.vocab_size)
        self.engine = SimpleNamespace(programs=SimpleNamespace(settings=settings, model=model))

        self.budget, self.cancel = lambda length: self.room - length, lambda job: None

    def submit(self, job):
        ids = np.asarray(self.chat.turn_ids(next(self.texts)), np.int32)
        mask = np.arange(len(job.prompt) + len(ids)) >= len(job.prompt)
        ended = SimpleNamespace(stop="eos", policy_mask=mask, versions=np.full(len(mask), 7))
        events = [("seated", (0, 0.0)), *(("drawn", (part, part * -0.5)) for part in np.array_split(ids, 3))]
        for event, value in [*events, ("ended", ended)]:
            self.deliver(job.report, event, 0, value)


def exchange(port, method, path, body=None, **headers):
    """(status, headers, content) of one request; names of headers have `_` for `-`."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, path, data, {name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, answer.headers, content


class Served:
    def __init__(self, endpoint, port, sockets=()):
        self.endpoint, self.port, self.sockets = endpoint, port, sockets

    def ask(self, path, body=None, **headers):
        """(status, answer) of one request; an event stream as a list of its data."""
        status, headers, content = exchange(self.port, "GET" if body is None else "POST", path, body, **headers)
        text, kind = content.decode(), headers["Content-Type"]
        if kind.startswith("text/event-stream"):
            return status, [line[6:] for line in text.splitlines() if line]
        return status, json.loads(text) if kind.startswith("application/json") else text

    def events(self, path, body):
        status, lines = self.ask(path, body | {"stream": True})
        assert status == 200 and (lines[-1] == "[DONE]") == path.endswith("completions"), lines
        return [json.loads(line.partition("data: ")[2] or line) for line in lines if "{" in line]

    def not_applied(self, path, body, **headers):
        """The fields that an answer says were not applied; None if it says nothing."""
        status, reply_headers, content = exchange(self.port, "POST", path, body, **headers)
        assert status == 200, content
        return reply_headers["X-Not-Applied"]

    def chat(self, messages, **fields):
        status, answer = self.ask("/v1/chat/completions", {"messages": messages, "max_tokens": 24} | fields)
        assert status == 200, answer
        return answer

    def session(self, name="one"):
        """A conversation of an agent, which asks below `/s/NAME`."""
        session = AgentSession(g.RolloutRequest(g.Problem("p", "", "", "t"), 0), 1, 9)
        self.endpoint.sessions = (self.endpoint.sessions or {}) | {name: session}
        return session


@contextmanager
def scripted(*texts, config=None, **settings):
    """A server that answers requests with these texts, one after another."""
    chat = small_policy()[0] if config is None else make_chat(config, g.load_tokenizer(config))

    def make(deliver):
        return Endpoint(chat, ScriptedLoop(chat, texts, deliver), **settings)

    with closing(ServerThread(make)) as server:
        yield Served(server.endpoint, server.port)


@contextmanager
def served(*rollout, **settings):
    chat, shared, params = small_policy(*rollout)
    engine = shared.sibling()
    sampler = engine.publish(params, 7)

    def make(deliver):
        return Endpoint(chat, SamplingLoop(engine, sampler, deliver), **settings)

    with closing(ServerThread(make)) as server, closing(server.endpoint.loop) as loop:
        loop.start()
        yield Served(server.endpoint, server.port, server.sockets)


@pytest.fixture(scope="module")
def server():
    with served() as running:
        yield running


def direct(prompt, budget, place=0, temperature=None):
    _, engine, params = small_policy()
    fields = {"temperature": temperature, "budget": budget, "prompt": np.asarray(prompt, np.int32)}
    request = g.RolloutRequest(g.Problem("p", "", "", "t"), place, step=0, **fields)
    return engine.run(engine.publish(params, 7), [request], SingleTurn(), g.RunOptions())[0][0]


def wait_for(done, seconds=20.0):
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until
        time.sleep(0.002)


NONSENSE = (None, True, -1, 0, 1e400, float("nan"), 10**30, "", "\ud800", "\udc00x\0", "{", [[]], [None], {"a": {}})


def spoiled(value, rng):
    """A copy of a value in which one part is nonsense."""
    if isinstance(value, dict | list) and value and rng.random() < 0.8:
        copied = value.copy()
        key = rng.choice([*copied] if isinstance(value, dict) else range(len(copied)))
        copied[key] = spoiled(copied[key], rng)
        return copied
    return rng.choice(NONSENSE)


SCRIPT = Path(__file__).parents[1] / "serving" / "agent_script.py"
FUNCTIONS = SCRIPT.with_name("agent_functions.py")


@contextmanager
def runs_of(longest=ROLLOUT.max_row_tokens, pays=("",), **choice):
    """(runs of an agent, weights to sample from)."""
    chat, shared, params = small_policy()
    engine = shared.sibling()
    with closing(AgentRuns(AgentCommand(**choice), chat, engine, longest, pays)) as runs:
        yield runs, engine.publish(params, 9)


def collected(what="", count=1, problems=(), timeout_s=60.0, **choice):
    """(trajectories, statistics) of `what` the script does, or of a command or function."""
    if not {"command", "function"} & choice.keys():
        choice["command"] = f"{sys.executable} {SCRIPT} '{what}'"
    problems = problems or [g.Problem("p", "2+3=", "5" if "function" in choice else "5 or", "t")]
    requests = [g.RolloutRequest(problem, 4 + i, count, first_sample=1) for i, problem in enumerate(problems)]
    with runs_of(timeout_s=timeout_s, **choice) as (runs, weights):
        return runs.collect(weights, requests, g.RunOptions(step=3))
