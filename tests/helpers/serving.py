"""A small policy behind HTTP on a thread of its own, and plain requests to it."""

import http.client
import json
from contextlib import contextmanager
from functools import lru_cache, partial
from types import SimpleNamespace

import jax
import numpy as np

from grpo_roc_jax.engine.config import RolloutConfig, SamplingConfig
from grpo_roc_jax.engine.engine import make_engine
from grpo_roc_jax.engine.records import RolloutStats
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.transformer import init_params
from grpo_roc_jax.serving.sampling_loop import SamplingLoop
from grpo_roc_jax.serving.server import Endpoint, ServerLimits, ServerThread
from grpo_roc_jax.text.chat_format import make_chat
from grpo_roc_jax.text.config import TextConfig
from grpo_roc_jax.text.tokenizer import load_tokenizer

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
        whole = np.concatenate([job.prompt, ids])
        mask = np.arange(len(whole)) >= len(job.prompt)
        ended = SimpleNamespace(stop="eos", policy_mask=mask, versions=np.full(len(whole), 7))
        events = [("seated", (0, 0.0)), *(("drawn", (part, part * -0.5)) for part in np.array_split(ids, 3))]
        for event, value in [*events, ("ended", ended)]:
            self.deliver(job.report, event, 0, value)


class Served:
    """A running server."""

    def __init__(self, endpoint, port, sockets=()):
        self.endpoint, self.port, self.sockets = endpoint, port, sockets

    def ask(self, path, body=None, *, method="POST", **headers):
        """(status, answer) of one request; an event stream as a list of its data."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("GET" if body is None and method == "POST" else method, path, data, headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        if answer.headers["Content-Type"].startswith("text/event-stream"):
            return answer.status, [line[6:] for line in text.splitlines() if line]
        json_like = answer.headers["Content-Type"].startswith("application/json")
        return answer.status, json.loads(text) if json_like else text

    def header(self, name, path, body):
        """A header of an answer, which must be one; None if it has none."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        connection.request("POST", path, json.dumps(body).encode())
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        connection.close()
        return answer.headers[name]

    def chat(self, messages, **fields):
        """The answer to messages, which must be one."""
        status, answer = self.ask("/v1/chat/completions", {"messages": messages, "max_tokens": 24} | fields)
        assert status == 200, answer
        return answer


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
