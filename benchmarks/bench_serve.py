"""What does HTTP cost? The policy behind it beside the engine called directly, and what earlier turns cost again.

`load` samples the same rows directly and through 1, 8 and 64 clients that stream token ids, in turns; it reports tokens
a second, their ratio, processor time a token, and the time to the first token. Both engines keep what they have written
for later turns, as serving does. `fresh` is the engine with an empty cache before each batch, as in training: where
attention multiplies blocks in their place, which it does on CPUs, blocks that are kept are read too. `turns` lets
clients hold conversations of five turns, with tokens of earlier turns found in the cache and without, and counts what
is written to it. Clients have a process of their own. `agents` runs 64 agents of 45 calls at once.

    python benchmarks/bench_serve.py --cases load turns agents --repeats 3

Each case prints one JSON line with its target. On a machine that others use, only the ratios mean something; processor
time is that of the process with the engine and the server, without the clients.
"""

import argparse
import http.client
import json
import multiprocessing
import selectors
import socket
import statistics
import threading
import time
from dataclasses import dataclass, field

import jax
import numpy as np

from grpo_roc_jax.engine.config import RolloutConfig, SamplingConfig
from grpo_roc_jax.engine.engine import Engine, make_engine
from grpo_roc_jax.engine.protocol import RunOptions, SingleTurn
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.transformer import init_params
from grpo_roc_jax.serving.sampling_loop import SamplingLoop
from grpo_roc_jax.serving.server import Endpoint, ServerThread
from grpo_roc_jax.text.chat_format import ChatFormat, make_chat
from grpo_roc_jax.text.config import TextConfig
from grpo_roc_jax.text.tokenizer import load_tokenizer
from grpo_roc_jax.types import Problem, RolloutRequest, Trajectory

PROMPT, TURNS, TURN_TOKENS, CALLS = 48, 5, 48, 45


def make_policy(slots: int) -> tuple[ChatFormat, Engine, dict]:
    """(chat format, engine, parameters); nothing ends a turn but its budget, so every variant samples as much."""
    tokenizer = load_tokenizer(TextConfig())
    model = ModelConfig(
        d_model=256, layers=4, heads=4, kv_heads=2, head_dim=64, d_ff=1024, vocab_size=tokenizer.vocab_size
    )
    rollout = RolloutConfig(
        slots=slots,
        narrow=(),
        max_prompt_tokens=256,
        max_response_tokens=512,
        block=16,
        append_lengths=(16, 64),
    )
    engine = make_engine(model, rollout, SamplingConfig(), (), seed=1)
    return make_chat(TextConfig(), tokenizer), engine, init_params(jax.random.key(0), model)


def prompts_of(clients: int, seed: int) -> list[list[int]]:
    return np.random.default_rng(seed).integers(40, 400, (clients, PROMPT)).tolist()


@dataclass
class Asker:
    """A client of streamed completions, one request after another. What comes is read when all clients have ended, so
    that the load costs the cores which it shares with the server as little as it can."""

    port: int
    bodies: list[dict]
    received: bytearray = field(default_factory=bytearray)
    firsts_s: list[float] = field(default_factory=list)
    """Seconds to the first token of each request."""

    def ask(self) -> socket.socket | None:
        """A connection with the next request, if there is one."""
        if not self.bodies:
            return None
        data = json.dumps(self.bodies.pop(0) | {"stream": True, "return_token_ids": True}).encode()
        self._begun, self._waits = time.perf_counter(), True
        link = socket.create_connection(("127.0.0.1", self.port))
        link.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data)
        )
        return link

    def take(self, data: bytes) -> None:
        self.received += data
        if self._waits and b"data: {" in data:
            self.firsts_s.append(time.perf_counter() - self._begun)
            self._waits = False

    @property
    def tokens(self) -> int:
        """Number of all tokens of all answers."""
        pieces = [json.loads(line[6:]) for line in self.received.split(b"\n") if line.startswith(b"data: {")]
        return sum(len(piece["choices"][0].get("token_ids", ())) for piece in pieces)


def load_clients(port: int, bodies: list[list[dict]], answer) -> None:
    """Clients at once, each with its requests: (tokens, wall seconds, first-token seconds)."""
    askers, started = [Asker(port, requests) for requests in bodies], time.perf_counter()
    selector = selectors.DefaultSelector()
    for asker in askers:
        selector.register(asker.ask(), selectors.EVENT_READ, asker)
    while selector.get_map():
        for key, _ in selector.select():
            if data := key.fileobj.recv(1 << 16):
                key.data.take(data)
                continue
            selector.unregister(key.fileobj)
            key.fileobj.close()
            if (link := key.data.ask()) is not None:
                selector.register(link, selectors.EVENT_READ, key.data)
    seconds = time.perf_counter() - started
    answer.send((sum(asker.tokens for asker in askers), seconds, [s for asker in askers for s in asker.firsts_s]))


def chat_clients(port: int, clients: int, tokens: int, turns: int, answer) -> None:
    """Conversations; texts go back and forth. Sends the seconds of each, and of each call."""
    took, calls_s = [], []

    def client(number: int) -> None:
        messages = [{"role": "user", "content": f"Client {number}: " + "tell me about numbers. " * 2}]
        started = time.perf_counter()
        for turn in range(turns):
            link = http.client.HTTPConnection("127.0.0.1", port)
            body = {"messages": messages, "max_tokens": tokens, "seed": 100 * number + turn}
            sent = time.perf_counter()
            link.request("POST", "/v1/chat/completions", json.dumps(body))
            reply = json.loads(link.getresponse().read())["choices"][0]["message"]["content"]
            calls_s.append(time.perf_counter() - sent)
            link.close()
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "go"}]
        took.append(time.perf_counter() - started)

    threads = [threading.Thread(target=client, args=(i,)) for i in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answer.send((took, calls_s))


def elsewhere(function, *arguments):
    """The answer of a function in a fresh process, which shares no interpreter lock with the server."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=function, args=(*arguments, there))
    process.start()
    result = here.recv()
    process.join()
    return result


def load(policy: tuple, repeats: int, clients: int, tokens: int, requests: int) -> dict:
    """Tokens a second directly and through HTTP, in turns."""
    chat, fresh, params = policy
    direct, served = (fresh.sibling() for _ in range(2))
    sampler = fresh.publish(params, 1)
    fresh.warmup(sampler)

    def keeping(rows: list[RolloutRequest]) -> int:
        tickets = direct.submit(sampler, rows, SingleTurn(), RunOptions(purpose="chat", keep_cache=True))
        results: list[Trajectory] = []
        while len(results) < len(tickets):
            results += [trajectory for _, trajectory in direct.advance()]
        return sum(int(trajectory.policy_mask.sum()) for trajectory in results)

    def emptied(rows: list[RolloutRequest]) -> int:
        return fresh.run(sampler, rows, SingleTurn())[1].sampled_tokens

    server = ServerThread(lambda deliver: Endpoint(chat, SamplingLoop(served, sampler, deliver)))
    server.endpoint.loop.start()
    rates: dict[str, list[float]] = {"fresh": [], "direct": [], "http": []}
    work: dict[str, list[float]] = {"fresh": [], "direct": [], "http": []}
    firsts: list[float] = []
    for repeat in range(repeats + 1):
        prompts = prompts_of(clients * requests, repeat)
        rows = [
            RolloutRequest(Problem("b", "", "", "b"), i, budget=tokens, prompt=np.asarray(prompt, np.int32))
            for i, prompt in enumerate(prompts)
        ]
        for name, sample in (("fresh", emptied), ("direct", keeping)):
            started, begun = time.perf_counter(), time.process_time()
            # As many at a time as clients ask.
            sampled = sum(sample(rows[first : first + clients]) for first in range(0, len(rows), clients))
            rates[name].append(sampled / (time.perf_counter() - started))
            work[name].append((time.process_time() - begun) / sampled)
        busy = time.process_time()
        bodies = [{"prompt": prompt, "max_tokens": tokens, "seed": i} for i, prompt in enumerate(prompts)]
        count, seconds, first = elsewhere(load_clients, server.port, [bodies[i::clients] for i in range(clients)])
        work["http"].append((time.process_time() - busy) / count)
        rates["http"].append(count / seconds)
        firsts += first
    server.endpoint.loop.close()
    server.close()
    rates, work = (
        {name: values[1:] for name, values in results.items()} for results in (rates, work)
    )  # the first warm up
    middle = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "case": "load",
        "clients": clients,
        "tokens_per_s": {name: round(value, 1) for name, value in middle.items()},
        "ratio": round(statistics.median(b / a for a, b in zip(rates["direct"], rates["http"], strict=True)), 3),
        "target": 0.9 if clients == 64 else None,
        "processor_ms_per_token": {name: round(1e3 * statistics.median(values), 3) for name, values in work.items()},
        "first_token_s": {str(q): round(float(np.quantile(firsts[clients * requests :], q)), 3) for q in (0.5, 0.99)},
    }


def turns(policy: tuple, clients: int) -> dict:
    """Tokens written to the cache by conversations of five turns, with earlier turns found and without."""
    chat, engine, params = policy
    sampler = engine.publish(params, 1)
    written, cached = {}, {}
    for variant in ("on", "off"):
        fresh = engine.sibling()

        def forget(fresh: Engine = fresh, off: bool = variant == "off") -> None:
            for blocks in fresh.scheduler.device.blocks if off and fresh.scheduler else ():
                blocks.forget()

        server = ServerThread(
            lambda deliver, fresh=fresh, forget=forget: Endpoint(chat, SamplingLoop(fresh, sampler, deliver, forget))
        )
        server.endpoint.loop.start()
        elsewhere(chat_clients, server.port, clients, TURN_TOKENS, TURNS)
        written[variant], cached[variant] = fresh.stats.prefilled_tokens, fresh.stats.cached_tokens
        server.endpoint.loop.close()
        server.close()
    return {
        "case": "turns",
        "clients": clients,
        "prefilled_tokens": written,
        "cached_tokens": cached["on"],
        "ratio": round(written["off"] / written["on"], 2),
        "target": 2.0,
    }


def agents(policy: tuple, clients: int) -> dict:
    """Agents of 45 short calls each, all at once: how fast are they, is one of them starved, how long do calls take?"""
    chat, engine, params = policy
    fresh, sampler = engine.sibling(), engine.publish(params, 1)
    engine.warmup(sampler)
    server = ServerThread(lambda deliver: Endpoint(chat, SamplingLoop(fresh, sampler, deliver)))
    server.endpoint.loop.start()
    begun = time.perf_counter()
    took, calls_s = elsewhere(chat_clients, server.port, clients, 4, CALLS)
    seconds = time.perf_counter() - begun
    waited = np.quantile(server.endpoint.counts.waited_s, (0.5, 0.99))
    server.endpoint.loop.close()
    server.close()
    return {
        "case": "agents",
        "clients": clients,
        "calls": CALLS * len(took),
        "tokens_per_s": round(server.endpoint.counts.tokens["completion"] / seconds, 1),
        "prompt_tokens_per_s": round(server.endpoint.counts.tokens["prompt"] / seconds, 1),
        "call_s": {str(q): round(float(np.quantile(calls_s, q)), 3) for q in (0.5, 0.99)},
        "waited_s": {"0.5": round(float(waited[0]), 4), "0.99": round(float(waited[1]), 4)},
        "slowest_over_fastest": round(max(took) / min(took), 2),
        "target": 2.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=("load", "turns", "agents"), default=("load", "turns", "agents"))
    parser.add_argument("--clients", nargs="+", type=int, default=(1, 8, 64))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=192, help="of a request of `load`")
    parser.add_argument("--requests", type=int, default=2, help="of each client, one after another")
    options = parser.parse_args()
    policy = make_policy(max(options.clients))
    if "load" in options.cases:
        for clients in options.clients:
            print(json.dumps(load(policy, options.repeats, clients, options.tokens, options.requests)), flush=True)
    if "turns" in options.cases:
        print(json.dumps(turns(policy, max(options.clients))), flush=True)
    if "agents" in options.cases:
        print(json.dumps(agents(policy, max(options.clients))), flush=True)


if __name__ == "__main__":
    main()
