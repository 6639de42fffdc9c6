"""A small policy behind HTTP on a thread of its own, and plain requests to it."""

import http.client
import json
import time
from contextlib import contextmanager
from functools import lru_cache, partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from grpo_roc_jax.engine.config import RolloutConfig, SamplingConfig
from grpo_roc_jax.engine.engine import make_engine
from grpo_roc_jax.engine.protocol import RolloutStats, RunOptions, SingleTurn
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.transformer import init_params
from grpo_roc_jax.serving.agent_runs import AgentSession
from grpo_roc_jax.serving.sampling_loop import SamplingLoop
from grpo_roc_jax.serving.server import Endpoint, ServerLimits, ServerThread
from grpo_roc_jax.text.chat_format import make_chat
from grpo_roc_jax.text.config import TextConfig
from grpo_roc_jax.text.tokenizer import load_tokenizer
from grpo_roc_jax.types import Problem, RolloutRequest

ROLLOUT = RolloutConfig(
    slots=8, chunk=4, block=16, max_prompt_tokens=64, max_response_tokens=192, append_lengths=(32,), narrow=()
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def small_policy(rollout=ROLLOUT):
    """(chat format, engine, parameters) of random weights; compiled once for all tests."""
    return _policy(rollout)


@lru_cache
def _policy(rollout):
    tokenizer = load_tokenizer(TextConfig())
    chat = make_chat(TextConfig(), tokenizer)
    model = ModelConfig(
        d_model=32, layers=1, heads=2, kv_heads=1, head_dim=16, d_ff=32, vocab_size=tokenizer.vocab_size
    )
    engine = make_engine(model, rollout, SamplingConfig(), sorted(chat.stop_ids), seed=3)
    return chat, engine, jax.jit(partial(init_params, config=model))(jax.random.key(0))


class ScriptedLoop:
    """In place of a sampling loop: answers each job with the next text, so that agents meet calls and answers."""

    room, sampler, stats = 1 << 14, SimpleNamespace(version=7), RolloutStats()

    def __init__(self, chat, texts, deliver):
        self.chat, self.texts, self.deliver = chat, iter(texts), deliver
        settings = SimpleNamespace(sampling=SamplingConfig())
        model = SimpleNamespace(vocab_size=chat.tokenizer.vocab_size)
        self.engine = SimpleNamespace(programs=SimpleNamespace(settings=settings, model=model))

    def budget(self, length):
        return self.room - length

    def cancel(self, job):
        """What was asked is answered already."""

    def submit(self, job):
        ids = np.asarray(self.chat.turn_ids(next(self.texts)), np.int32)
        tokens = np.concatenate([job.prompt, ids])
        mask = np.arange(len(tokens)) >= len(job.prompt)
        ended = SimpleNamespace(stop="eos", policy_mask=mask, versions=np.full(len(tokens), 7))
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
    """A running server."""

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
        """The objects of a stream, in order."""
        status, lines = self.ask(path, body | {"stream": True})
        assert status == 200 and (lines[-1] == "[DONE]") == path.endswith("completions"), lines
        return [json.loads(line.partition("data: ")[2] or line) for line in lines if "{" in line]

    def not_applied(self, path, body, **headers):
        """The fields that an answer, which must be one, says were not applied; None if it says nothing."""
        status, reply_headers, content = exchange(self.port, "POST", path, body, **headers)
        assert status == 200, content
        return reply_headers["X-Not-Applied"]

    def chat(self, messages, **fields):
        """The answer to messages, which must be one."""
        status, answer = self.ask("/v1/chat/completions", {"messages": messages, "max_tokens": 24} | fields)
        assert status == 200, answer
        return answer

    def session(self, name="one"):
        """A conversation of an agent, which asks below `/s/NAME`."""
        session = AgentSession(RolloutRequest(Problem("p", "", "", "t"), 0), 1, 9)
        self.endpoint.sessions = (self.endpoint.sessions or {}) | {name: session}
        return session


@contextmanager
def scripted(*texts, config=None, **settings):
    """A server that answers requests with these texts, one after another."""
    chat = small_policy()[0] if config is None else make_chat(config, load_tokenizer(config))
    server = ServerThread(lambda deliver: Endpoint(chat, ScriptedLoop(chat, texts, deliver), **settings))
    try:
        yield Served(server.endpoint, server.port)
    finally:
        server.close()


@contextmanager
def served(*, rollout=ROLLOUT, token="", limits=None, engine=None, **settings):
    """A server of the small policy, or of another engine."""
    chat, shared, params = small_policy(rollout)
    engine = engine or shared.sibling()
    sampler = engine.publish(params, 7)

    def make(deliver):
        loop = SamplingLoop(engine, sampler, deliver)
        return Endpoint(chat, loop, token=token, limits=limits or ServerLimits(), **settings)

    server = ServerThread(make)
    server.endpoint.loop.start()
    try:
        yield Served(server.endpoint, server.port, server.sockets)
    finally:
        server.endpoint.loop.close()
        server.close()


@pytest.fixture(scope="module")
def server():
    with served() as running:
        yield running


def direct(prompt, budget, place=0, temperature=None):
    """What the engine samples when it is called directly."""
    _, engine, params = small_policy()
    prompt = np.asarray(prompt, np.int32)
    request = RolloutRequest(
        Problem("p", "", "", "t"), place, step=0, temperature=temperature, budget=budget, prompt=prompt
    )
    return engine.run(engine.publish(params, 7), [request], SingleTurn(), RunOptions())[0][0]


def wait_for(done, seconds=20.0):
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until
        time.sleep(0.002)


NONSENSE = (
    *(None, True, -1, 0, 1e400, float("nan"), 10**30),
    *("", "\ud800", "\udc00x\0", "{", [], [[]], [None], {}, {"a": {}}),
)


def spoiled(value, rng):
    """A copy of a value in which one part is nonsense."""
    if isinstance(value, dict | list) and value and rng.random() < 0.8:
        copied = dict(value) if isinstance(value, dict) else list(value)
        key = rng.choice([*copied]) if isinstance(value, dict) else rng.randrange(len(copied))
        copied[key] = spoiled(copied[key], rng)
        return copied
    return rng.choice(NONSENSE)
