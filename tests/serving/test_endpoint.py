"""The policy behind HTTP: requests and answers, sampling fields, the cache between turns, clients that leave."""

import json
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import yaml

import grpo_roc_jax as g
from grpo_roc_jax.commands import serve
from grpo_roc_jax.engine.steering import DrawSettings
from grpo_roc_jax.process.points import injected
from grpo_roc_jax.run.components import serving_parts
from grpo_roc_jax.run.load import serving_settings
from grpo_roc_jax.serving.responses import LOGPROBS
from grpo_roc_jax.serving.server import ServerLimits
from grpo_roc_jax.settings.cli import dump_yaml
from tests.helpers.serving import ROLLOUT, Served, direct, served, small_policy, wait_for
from tests.helpers.serving import server as server  # a fixture
from tests.test_readme import TINY

HELLO = [{"role": "user", "content": "What is 2 + 3, and why is it so? Say it in a few words."}]


def test_a_chat_completion_has_the_ids_and_log_probabilities_of_the_engine(server):
    answer = server.chat(HELLO, logprobs=True, return_token_ids=True, return_weight_versions=True, seed=5)
    (choice,) = answer["choices"]
    wanted = direct(answer["prompt_token_ids"], 24, place=5)
    assert answer["prompt_token_ids"] == small_policy()[0].prompt_ids(g.Problem("", HELLO[0]["content"], "", ""))
    assert choice["token_ids"] == wanted.tokens[wanted.prompt_length :].tolist()
    logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
    np.testing.assert_allclose(logprobs, wanted.logprobs[wanted.prompt_length :], atol=1e-5)
    assert choice["weight_versions"] == [{"version": 7, "start": 0, "end": len(choice["token_ids"])}]
    assert answer["usage"]["completion_tokens"] == len(logprobs) and answer["policy_version"] == 7


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_adds_up_to_the_whole_answer(server, path):
    body = {"messages": HELLO} if "chat" in path else {"prompt": "two and three"}
    body |= {"max_tokens": 20, "seed": 3, "logprobs": 1, "return_token_ids": True, "n": 2}
    full = server.ask(path, body)[1]
    *pieces, usage = server.events(path, body | {"stream_options": {"include_usage": True}})
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == full["usage"]["completion_tokens"]
    for wanted in full["choices"]:
        choices = [piece["choices"][0] for piece in pieces if piece["choices"][0]["index"] == wanted["index"]]
        texts = [choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices]
        assert "".join(texts) == (wanted["message"]["content"] if "message" in wanted else wanted["text"])
        assert [i for choice in choices for i in choice.get("token_ids", [])] == wanted["token_ids"]
        assert choices[-1]["finish_reason"] == wanted["finish_reason"]
        assert all(choice["finish_reason"] is None for choice in choices[:-1])


@pytest.mark.parametrize("length", [ROLLOUT.max_prompt_tokens // 2, ROLLOUT.max_prompt_tokens + 36])
def test_a_stop_text_ends_the_answer_and_does_not_begin_in_the_prompt(server, length):
    """The first one is what the prompt ends with and the first token of the answer."""
    tokenizer = small_policy()[0].tokenizer
    prompt = (tokenizer.encode("we see that") * length)[:length]
    body = {"prompt": prompt, "max_tokens": 6, "seed": 3, "return_token_ids": True}
    (whole,) = server.ask("/v1/completions", body)[1]["choices"]
    body["stop"] = tokenizer.decode([*prompt[-2:], whole["token_ids"][0]])
    assert server.ask("/v1/completions", body)[1]["choices"][0]["token_ids"] == whole["token_ids"]
    body |= {"prompt": "one", "seed": 8, "max_tokens": 24, "stop": []}  # one that comes ends the answer before it
    text = server.ask("/v1/completions", body)[1]["choices"][0]["text"]
    body["stop"] = next(part for part in (text[i : i + 2] for i in range(4, len(text))) if "\ufffd" not in part)
    (choice,) = server.ask("/v1/completions", body)[1]["choices"]
    assert choice["text"] == text.partition(body["stop"])[0] and choice["finish_reason"] == "stop"
    assert "".join(piece["choices"][0]["text"] for piece in server.events("/v1/completions", body)) == choice["text"]


def test_a_second_turn_writes_its_new_tokens_alone_and_samples_the_same(server):
    """Turn by turn the ids grow, although the client sends texts; what was found in the cache changes no token."""
    messages: list = [{"role": "user", "content": "Count the legs of nine spiders and tell me what you did."}]
    ids, counted, stats = [], [], server.endpoint.loop.stats
    for turn in range(3):
        before = stats.prefilled_tokens
        answer = server.chat(messages, return_token_ids=True, seed=40 + turn, max_tokens=30)
        prompt, (choice,) = answer["prompt_token_ids"], answer["choices"]
        counted.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert counted[turn] + stats.prefilled_tokens - before == len(prompt) - 1 and prompt[: len(ids)] == ids
        ids = prompt + choice["token_ids"]
        if len(prompt) < 64:
            wanted = direct(prompt, 30, 40 + turn)
            assert choice["token_ids"] == wanted.tokens[wanted.prompt_length :].tolist()
        messages.append({"role": "assistant", "content": f"\n {choice['message']['content']} "})
        messages.append({"role": "user", "content": [{"type": "text", "text": "So?"}]})
    assert counted[0] == 0 and counted[1] >= 32 and counted[2] >= counted[1] + 32
    assert 'waited_seconds{quantile="0.99"}' in server.ask("/metrics")[1]


def test_new_weights_empty_the_cache_and_an_answer_names_those_that_drew_it():
    """Also where the request came first: they are published after its job was taken, before its first chunk."""
    with served() as server:
        body = {"prompt": list(range(5, 50)), "max_tokens": 2, "temperature": 0, "return_weight_versions": True}
        usage = [server.ask("/v1/completions", body)[1]["usage"]["prompt_tokens_details"] for _ in range(2)]
        assert [entry["cached_tokens"] for entry in usage] == [0, 32]
        loop, newer = server.endpoint.loop, [small_policy()[2]]
        loop.duty = lambda: loop.engine.publish(newer.pop(), 8) if loop.jobs and newer else None
        answer = server.ask("/v1/completions", body)[1]
        assert answer["policy_version"] == 8 and answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert [entry["version"] for entry in answer["choices"][0]["weight_versions"]] == [8]


def test_a_token_is_needed_and_names_a_session():
    with served(token="a/b", limits=ServerLimits(body_mb=1, per_minute=5)) as server:
        body = {"prompt": "x", "max_tokens": 1}
        assert server.ask("/v1/completions", body)[1]["error"]["code"] == "invalid_api_key"
        assert server.ask("/v1/completions", body, Authorization="Bearer a")[0] == 401
        with socket.create_connection(("127.0.0.1", server.port)) as link:  # refused by its head, unread
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer a/b\r\n"
            link.sendall(f"{head}Content-Length: {2 << 20}\r\n\r\n".encode())
            assert link.recv(99).startswith(b"HTTP/1.1 413 ")
        assert server.ask("/v1/completions", body, Authorization="Bearer a/b/one")[0] == 200
        body = {"max_tokens": 1, "messages": HELLO}
        assert server.ask("/v1/messages", body, X_Api_Key="a/b")[0] == 200, "as the clients of Anthropic send it"
        assert server.ask("/v1/messages", body, X_Api_Key="wrong")[1]["error"]["type"] == "authentication_error"
        assert [server.ask("/v1/models", Authorization="Bearer a/b")[0] for _ in range(6)].count(429) >= 1
    with served(limits=ServerLimits(waiting=1)) as server:
        body = {"prompt": ["a", "b"], "max_tokens": 1}
        assert server.ask("/v1/completions", body)[1]["error"]["code"] == "overloaded"


def opened(server, fields, buffer=1 << 16):
    """A connection on which a request was sent."""
    body, link = json.dumps({"prompt": "x", "max_tokens": 180, **fields}).encode(), socket.socket()
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    link.connect(("127.0.0.1", server.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    link.sendall(head.encode() + body)
    return link


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request_alone(server, stream):
    engine = server.endpoint.loop.engine
    before = engine.stats.stops["cancelled"]
    with ThreadPoolExecutor(1) as thread:
        with opened(server, {"n": 4, "temperature": 1.0, "stream": stream}) as link:
            wait_for(lambda: server.endpoint.running)
            while stream and b"data: " not in link.recv(1 << 12):
                pass
            other = thread.submit(server.ask, "/v1/completions", {"prompt": "y", "max_tokens": 12, "stream": True})
        wait_for(lambda: engine.stats.stops["cancelled"] > before)
        assert other.result()[1][-1] == "[DONE]"
    wait_for(lambda: not server.endpoint.running and not server.endpoint.loop.jobs)
    assert server.chat(HELLO)["choices"]


def test_a_client_that_reads_nothing_does_not_keep_its_place(server, monkeypatch):
    monkeypatch.setattr(server.endpoint, "limits", replace(server.endpoint.limits, stalled_s=0.2))
    for listening in server.sockets:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
    with opened(server, {"n": 8, "stream": True, "logprobs": 1, "return_token_ids": True}, buffer=1 << 12):
        wait_for(lambda: server.endpoint.running)
        wait_for(lambda: not server.endpoint.running)
        assert server.endpoint.counts.requests[499] >= 1
    assert server.chat(HELLO)["choices"]


def test_a_fault_of_the_engine_is_an_error_of_its_requests_alone(server, monkeypatch):
    for operation in ("advance", "submit"):  # `submit` allocates the pool
        monkeypatch.setattr(server.endpoint.loop.engine, operation, lambda *arguments: 1 / 0)
        status, answer = server.ask("/v1/chat/completions", {"messages": HELLO})
        assert status == 500 and "division" in answer["error"]["message"]
        monkeypatch.undo()
        assert server.chat(HELLO)["choices"]
    with injected("rollout.turn=raise"):  # a row that the engine cut is no whole answer
        status, answer = server.ask("/v1/chat/completions", {"messages": HELLO, "max_tokens": 2})
    assert status == 500 and "sampling ended early: infrastructure" in answer["error"]["message"]


def test_the_command_refuses_what_it_cannot_serve(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("GRPO_SERVE_TOKEN", raising=False)
    assert serve.main([str(tmp_path / "nothing")]) == 2
    assert "nothing: no such directory; must be a run," in capsys.readouterr().err
    assert serve.main([str(tmp_path), "--host", "0.0.0.0"]) == 2
    assert "set GRPO_SERVE_TOKEN" in capsys.readouterr().err


def test_serving_reads_only_what_serving_needs(tmp_path, monkeypatch):
    """A run of settings that an environment and a reward would be refused for, at its second stage."""
    config = g.read_config("toy.yaml", *TINY, "--sampling.top_p=0.9", "--rollout.slots=16")
    content = yaml.safe_load(dump_yaml(config))
    content |= {"environment": {"kind": "class", "path": "nowhere.at_all:Env"}, "method": {"files": ["gone.py"]}}
    content |= {"reward": {"functions": [{"kind": "function", "path": "gone.py:pay"}]}}
    rollout = {"max_turns": 3, "step_limit": {"kind": "partial", "seconds": 5.0}}
    content["stages"] = [{"name": "a", "steps": 1}, {"name": "b", "steps": 1, "set": {"rollout": rollout, "optim": {}}}]
    monkeypatch.setattr("grpo_roc_jax.run.load.stage_of", lambda run, step: 1)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    (tmp_path / "checkpoints").mkdir()
    words = ["--rollout.max_prompt_tokens", "2048", "--optim.lr=1e9", "--limits.empty_steps=-1"]
    settings = serving_settings(str(tmp_path), words, "x")
    assert settings.rollout.max_prompt_tokens == 2048 and settings.batch.row_length >= settings.rollout.max_row_tokens
    assert (settings.sampling.top_p, settings.rollout.slots, settings.model) == (0.9, 16, config.model)
    assert settings.environment == g.Config().environment and settings.reward == g.Config().reward
    assert (settings.rollout.max_turns, settings.rollout.step_limit.kind) == (3, "none")
    with serving_parts(settings) as (_, sampler):
        assert sampler.executor is sampler.agents is sampler.episodes is None
        assert sampler.engine.config.max_prompt_tokens == 2048


@pytest.mark.slow
def test_the_command_serves_a_run_and_follows_it(tmp_path):
    """Another process serves the checkpoint of step 1, then that of step 2 as soon as it is written."""
    short = [{"role": "user", "content": "1+1"}]
    words = [*TINY, f"--run_dir={tmp_path}", "--checkpoint.every=1", "--resume=auto"]
    g.train_policy(g.read_config("toy.yaml", *words, "--steps=1"))
    command = [sys.executable, "-m", "grpo_roc_jax", "serve", str(tmp_path), "--port=0", "--follow-s=0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        try:
            url = program.stdout.readline().strip()
            served = Served(None, int(re.fullmatch(r"http://127.0.0.1:(\d+)/v1", url)[1]))
            assert served.chat(short, max_tokens=4)["policy_version"] == 1
            g.train_policy(g.read_config("toy.yaml", *words, "--steps=2"))
            wait_for(lambda: served.ask("/v1/models")[1]["data"][0]["policy_version"] == 2)
            assert served.chat(short, max_tokens=4)["policy_version"] == 2
        finally:
            program.terminate()
        assert program.wait(20) == 0


PROMPT = [5, 6, 7, 300, 9]


def drawn(server, **fields):
    body = {"prompt": PROMPT, "max_tokens": 24, "seed": 1, "return_token_ids": True, "logprobs": 1} | fields
    status, answer = server.ask("/v1/completions", body)
    assert status == 200, answer
    return answer["choices"]


def test_requests_of_one_batch_have_their_own_values(server):
    wanted, plain = direct(PROMPT, 24, temperature=0.0), direct(PROMPT, 24, place=1).tokens[5:].tolist()
    greedy = wanted.tokens[5:].tolist()
    idle = {"top_k": -1, "top_p": 1, "min_p": 0, "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}}
    requests = [{}, {"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 0, "repetition_penalty": 1.0}]
    requests += [{"logit_bias": {"17": 100, "40": 5.5}}, idle]
    with ThreadPoolExecutor(16) as pool:
        choices = [choice for (choice,) in pool.map(lambda fields: drawn(server, **fields), requests * 2)]
    assert [choice["token_ids"] for choice in choices] == [plain, greedy, greedy, greedy, greedy, [17] * 24, plain] * 2
    scores = choices[1]["logprobs"]["token_logprobs"]  # of `top_k` 1: those of the policy, whatever was asked
    np.testing.assert_allclose(scores, wanted.logprobs[5:], atol=1e-5)


PATHS = {
    "/v1/chat/completions": ({"messages": HELLO, "max_tokens": 12}, lambda fields: fields),
    "/v1/completions": ({"prompt": PROMPT, "max_tokens": 4}, lambda fields: fields),
    "/v1/responses": ({"input": "Two?", "max_output_tokens": 4}, lambda fields: fields),
    "/inference/v1/generate": ({"token_ids": PROMPT}, lambda fields: {"sampling_params": {"max_tokens": 4, **fields}}),
}
REFUSED = {"top_p": (0, 1.5, "1", float("nan"), True), "top_k": (-2, 1.5), "min_p": (-1, 2), "seed": ("x",)}
REFUSED |= {"temperature": (-1, float("inf")), "presence_penalty": (3, -3), "frequency_penalty": (2.5, "1")}
REFUSED |= {"repetition_penalty": (0, 0.009), "min_tokens": (-1, 10**30), "ignore_eos": (1,)}
REFUSED |= {"logit_bias": ({"x": 1}, {"-1": 1}, {"400": 1}, {"5": 101}, {"5": None}, [5])}
REFUSED |= {"bad_words": ("x", [1], [""], ["x" * 65], ["x"] * 1025), "top_logprobs": (-1, 21, True)}


@pytest.mark.parametrize("path", PATHS)
def test_wrong_values_are_refused_by_name(server, path):
    body, wrap = PATHS[path]
    for name, value in ((name, value) for name, values in REFUSED.items() for value in values):
        status, answer = server.ask(path, body | wrap({name: value}))
        error = answer["error"]
        assert status == 400 and error["param"] == name and name in error["message"], (name, value, error)
    if path != "/v1/responses":  # which has no such field
        assert "not supported" in server.ask(path, body | wrap({"echo": True}))[1]["error"]["message"]


FIELDS = {"top_p": 0.9, "top_k": 50, "min_p": 0.01, "temperature": 0.7, "seed": 3, "logit_bias": {"5": -2}}
FIELDS |= {"min_tokens": 2, "ignore_eos": True, "bad_words": ["xyz"], "stop_token_ids": [17], "repetition_penalty": 1.2}
FIELDS |= {"presence_penalty": 0.5, "frequency_penalty": -0.5}


@pytest.mark.parametrize("path", PATHS)
def test_right_values_are_taken_everywhere(server, path):
    body, wrap = PATHS[path]
    fields = server.endpoint.form(path, body | wrap(FIELDS), "").fields
    settings = {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "bias": {5: -2.0}, "presence": 0.5, "frequency": -0.5}
    assert fields.draw.banned[0] == tuple(small_policy()[0].tokenizer.encode("xyz"))
    settings |= {"repetition": 1.2, "min_tokens": 2, "ends": frozenset([17]), "banned": fields.draw.banned}
    assert fields.draw == DrawSettings(**settings)
    assert (fields.temperature, fields.seed, fields.ignore_eos, fields.stop_ids) == (0.7, 3, True, {17})
    assert server.ask(path, body | wrap(FIELDS))[0] == 200


def test_the_most_likely_tokens_are_those_of_the_policy_at_each_position(server):
    tokenizer = small_policy()[0].tokenizer
    (result,) = drawn(server, logprobs=5, temperature=0)
    (by_id,) = drawn(server, logprobs=5, temperature=0, return_tokens_as_token_ids=True)
    tops, ids = (choice["logprobs"]["top_logprobs"] for choice in (result, by_id))
    for top, others, value in zip(tops, ids, result["logprobs"]["token_logprobs"], strict=True):
        assert len(others) == 5 and max(top.values()) == pytest.approx(value, abs=1e-5)
        texts = {tokenizer.token_bytes(int(name.removeprefix("token_id:"))) for name in others}
        assert len(top) == len(texts), "parts of characters have names of their own"
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 24, "seed": 1, "logprobs": 20}}
    content = server.ask("/inference/v1/generate", body)[1]["choices"][0]["logprobs"]["content"]
    assert [entry["token_id"] for entry in content] == drawn(server)[0]["token_ids"]
    for entry in content:
        values = {top["token_id"]: top["logprob"] for top in entry["top_logprobs"]}
        ordered = [*values.values()]
        assert ordered == sorted(ordered, reverse=True) and len(values) == 20 and sum(map(np.exp, ordered)) <= 1.0001
        assert values.get(entry["token_id"], entry["logprob"]) == pytest.approx(entry["logprob"], abs=1e-5)
    request = {"input": "Two?", "max_output_tokens": 4, "top_logprobs": 2, "seed": 5, "include": [LOGPROBS]}
    (item,) = server.ask("/v1/responses", request)[1]["output"]
    assert [len(token["top_logprobs"]) for token in item["content"][0]["logprobs"]] == [2] * 4
