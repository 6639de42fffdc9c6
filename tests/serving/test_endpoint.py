"""The policy behind HTTP: forms of requests and answers, the cache between turns, refusals, clients that leave."""

import json
import re
import socket
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import yaml

import grpo_roc_jax as g
from grpo_roc_jax.commands.serve import main
from grpo_roc_jax.config import Config
from grpo_roc_jax.process.points import injected
from grpo_roc_jax.run.components import serving_parts
from grpo_roc_jax.run.load import serving_settings
from grpo_roc_jax.serving.replies import SampledChoice
from grpo_roc_jax.serving.server import ServerLimits
from grpo_roc_jax.settings.cli import dump_yaml, load_config
from grpo_roc_jax.types import Problem
from tests.helpers.serving import ROLLOUT, Served, direct, scripted, served, small_policy, wait_for
from tests.helpers.serving import server as server  # a fixture
from tests.test_readme import TINY

HELLO = [{"role": "user", "content": "What is 2 + 3, and why is it so? Say it in a few words."}]


def test_a_chat_completion_has_the_ids_and_log_probabilities_of_the_engine(server):
    answer = server.chat(HELLO, logprobs=True, return_token_ids=True, return_weight_versions=True, seed=5)
    (choice,) = answer["choices"]
    wanted = direct(answer["prompt_token_ids"], 24, place=5)
    assert answer["prompt_token_ids"] == small_policy()[0].prompt_ids(Problem("", HELLO[0]["content"], "", ""))
    assert choice["token_ids"] == wanted.tokens[wanted.prompt_length :].tolist()
    logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
    np.testing.assert_allclose(logprobs, wanted.logprobs[wanted.prompt_length :], atol=1e-5)
    assert choice["weight_versions"] == [{"version": 7, "start": 0, "end": len(choice["token_ids"])}]
    assert answer["usage"]["completion_tokens"] == len(logprobs) and choice["finish_reason"] in ("length", "stop")
    assert answer["policy_version"] == 7 and answer["object"] == "chat.completion"


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
        for name in ("tokens", "text_offset") if "text" in wanted else ():
            values = [value for choice in choices if choice["logprobs"] for value in choice["logprobs"][name]]
            assert values == wanted["logprobs"][name]


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"return_tokens_as_token_ids": True}])
def test_tokens_have_their_names_and_places_in_the_text(fields):
    """Those of a part of a character are named by their bytes, and lie where the character does."""
    path, text = "/v1/completions", "na\u00efve \u2192 \U0001f600."
    with scripted(text) as server:
        body = {"prompt": "x", "logprobs": 1} | fields
        answers = server.events(path, body) if "stream" in fields else [server.ask(path, body)[1]]
    scores = [part for answer in answers if (part := answer["choices"][0]["logprobs"])]
    tokens, places = ([value for part in scores for value in part[name]] for name in ("tokens", "text_offset"))
    written = text.encode()
    assert places == [len(written[:i].decode(errors="ignore")) for i in range(len(written) + 1)]
    plain = [chr(byte) if byte < 128 else f"bytes:\\x{byte:02x}" for byte in written]
    ids = [f"token_id:{token}" for token in server.endpoint.chat.turn_ids(text)]
    assert tokens == ids if "return_tokens_as_token_ids" in fields else tokens[:-1] == plain


def test_token_ids_in_and_out(server):
    prompt = [5, 6, 7, 300, 9]
    sampling = {"max_tokens": 9, "logprobs": 1, "temperature": 0, "stop_token_ids": [2]}
    sampling["routed_experts_prompt_start"] = 3
    answer = server.ask("/inference/v1/generate", {"model": "x", "token_ids": prompt, "sampling_params": sampling})[1]
    (choice,) = answer["choices"]
    wanted = direct(prompt, 9, temperature=0.0).tokens[5:].tolist()
    assert choice["token_ids"] == wanted
    assert [token["token"] for token in choice["logprobs"]["content"]] == [f"token_id:{i}" for i in wanted]
    assert answer["request_id"] and choice["weight_versions"][0]["version"] == answer["policy_version"] == 7
    stop = wanted[3]
    sampling["stop_token_ids"] = [stop]
    (choice,) = server.ask("/inference/v1/generate", {"token_ids": prompt, "sampling_params": sampling})[1]["choices"]
    assert choice["token_ids"] == wanted[: wanted.index(stop) + 1] and choice["finish_reason"] == "stop"


@pytest.mark.parametrize("length", [ROLLOUT.max_prompt_tokens // 2, ROLLOUT.max_prompt_tokens + 36])
def test_a_stop_text_does_not_begin_in_the_prompt(server, length):
    """The engine counts the end of a long prompt to the turn; the stop text here is what the prompt ends with and the
    first token of the answer."""
    tokenizer = small_policy()[0].tokenizer
    prompt = (tokenizer.encode("we see that") * length)[:length]
    body = {"prompt": prompt, "max_tokens": 6, "seed": 3, "return_token_ids": True}
    ids = server.ask("/v1/completions", body)[1]["choices"][0]["token_ids"]
    stop = tokenizer.decode([*prompt[-2:], ids[0]])
    status, answer = server.ask("/v1/completions", body | {"stop": stop})
    assert status == 200 and answer["choices"][0]["token_ids"] == ids


def test_a_stop_text_ends_the_answer_before_it(server):
    full = server.ask("/v1/completions", {"prompt": "one", "max_tokens": 24, "seed": 8})[1]["choices"][0]["text"]
    stop = next(text for text in (full[i : i + 2] for i in range(4, len(full))) if "\ufffd" not in text)
    body = {"prompt": "one", "max_tokens": 24, "seed": 8, "stop": stop}
    (choice,) = server.ask("/v1/completions", body)[1]["choices"]
    assert choice["text"] == full.partition(stop)[0] and choice["finish_reason"] == "stop"
    pieces = server.events("/v1/completions", body)
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == choice["text"]


def test_a_second_turn_writes_its_new_tokens_alone_and_samples_the_same(server):
    """Turn by turn the ids grow, although the client sends texts; what was found in the cache changes no token."""
    messages: list = [{"role": "user", "content": "Count the legs of nine spiders and tell me what you did."}]
    ids, written, counted = [], [], []
    for turn in range(3):
        before = server.endpoint.loop.stats.prefilled_tokens
        answer = server.chat(messages, return_token_ids=True, seed=40 + turn, max_tokens=30)
        written.append(server.endpoint.loop.stats.prefilled_tokens - before)
        counted.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert answer["prompt_token_ids"][: len(ids)] == ids
        (choice,) = answer["choices"]
        ids = answer["prompt_token_ids"] + choice["token_ids"]
        assert counted[turn] + written[turn] == len(answer["prompt_token_ids"]) - 1
        if len(answer["prompt_token_ids"]) < 64:
            wanted = direct(answer["prompt_token_ids"], 30, 40 + turn)
            assert choice["token_ids"] == wanted.tokens[wanted.prompt_length :].tolist()
        messages.append({"role": "assistant", "content": f"\n {choice['message']['content']} "})
        messages.append({"role": "user", "content": [{"type": "text", "text": "So?"}]})
    assert counted[0] == 0 and counted[1] >= 32 and counted[2] >= counted[1] + 32
    metrics = server.ask("/metrics")[1]
    assert metrics.count("cached_tokens_total") == 1 and 'waited_seconds{quantile="0.99"}' in metrics


def test_new_weights_empty_the_cache_and_an_answer_names_those_that_drew_it():
    """Also where the request came first: they are published after its job was taken, before its first chunk."""
    with served() as server:
        body = {"prompt": list(range(5, 50)), "max_tokens": 2, "temperature": 0, "return_weight_versions": True}
        usage = [server.ask("/v1/completions", body)[1]["usage"]["prompt_tokens_details"] for _ in range(2)]
        assert [entry["cached_tokens"] for entry in usage] == [0, 32]
        loop, newer = server.endpoint.loop, small_policy()[2]

        def publish_when_asked():
            if not loop.jobs:
                return None
            loop.duty = lambda: None
            return loop.engine.publish(newer, 8)

        loop.duty = publish_when_asked
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
        status, answer = server.ask("/v1/messages", body, X_Api_Key="wrong")
        assert status == 401 and answer["error"]["type"] == "authentication_error"
        assert [server.ask("/v1/models", Authorization="Bearer a/b")[0] for _ in range(6)].count(429) >= 1


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
    stops = server.endpoint.loop.engine.stats.stops
    before = stops["cancelled"]
    with opened(server, {"n": 8, "temperature": 1.0, "stream": stream}) as link:
        wait_for(lambda: server.endpoint.running)
        while stream and b"data: " not in link.recv(1 << 12):
            pass
        other = server.ask("/v1/completions", {"prompt": "y", "max_tokens": 12, "stream": True})
    wait_for(lambda: stops["cancelled"] > before and not server.endpoint.running and not server.endpoint.loop.jobs)
    assert other[1][-1] == "[DONE]" and server.chat(HELLO)["choices"]


def test_a_client_that_reads_nothing_does_not_keep_its_place(server, monkeypatch):
    monkeypatch.setattr(server.endpoint, "limits", replace(server.endpoint.limits, stalled_s=0.2))
    for listening in server.sockets:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
    with opened(server, {"n": 8, "stream": True, "logprobs": 1, "return_token_ids": True}, buffer=1 << 12):
        wait_for(lambda: server.endpoint.running)
        wait_for(lambda: not server.endpoint.running)
        assert server.endpoint.counts.requests[499] >= 1
    assert server.chat(HELLO)["choices"]


@pytest.mark.parametrize("operation", ["advance", "submit"])  # `submit` allocates the pool
def test_a_fault_of_the_engine_is_an_error_of_its_requests_alone(server, monkeypatch, operation):
    engine = server.endpoint.loop.engine
    monkeypatch.setattr(engine, operation, lambda *arguments: 1 / 0)
    status, answer = server.ask("/v1/chat/completions", {"messages": HELLO})
    assert status == 500 and "division" in answer["error"]["message"]
    monkeypatch.undo()
    assert server.chat(HELLO)["choices"]


def test_a_row_that_the_engine_cut_is_no_whole_answer(server):
    with injected("rollout.turn=raise"):
        status, answer = server.ask("/v1/chat/completions", {"messages": HELLO, "max_tokens": 2})
    assert status == 500 and "sampling ended early: infrastructure" in answer["error"]["message"]
    for stop, reason in (("", None), ("eos", "stop"), ("length", "length"), ("deadline", "length")):
        assert SampledChoice(0, np.zeros(0), stop=stop).finish_reason == reason


def test_a_server_with_a_limit_says_that_it_is_busy():
    with served(limits=ServerLimits(waiting=1)) as server:
        answer = server.ask("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 1})[1]
        assert answer["error"]["code"] == "overloaded"


def test_the_command_refuses_what_it_cannot_serve(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("GRPO_SERVE_TOKEN", raising=False)
    assert main([str(tmp_path / "nothing")]) == 2
    assert "nothing: no such directory; must be a run," in capsys.readouterr().err
    assert main([str(tmp_path), "--host", "0.0.0.0"]) == 2
    assert "set GRPO_SERVE_TOKEN" in capsys.readouterr().err


@pytest.mark.parametrize("stage", [None, 1])
def test_serving_reads_only_what_serving_needs(tmp_path, monkeypatch, stage):
    """A run of settings that a learner, an environment and a reward would be refused for."""
    config = load_config(Config, ["toy.yaml", *TINY, "--sampling.top_p=0.9", "--rollout.slots=16"], prog="x")
    content = yaml.safe_load(dump_yaml(config))
    content["environment"] = {"kind": "class", "path": "nowhere.at_all:Env"}
    content["reward"] = {"functions": [{"kind": "function", "path": "gone.py:pay"}]}
    content["method"] = {"files": ["gone.py"]}
    content["batch"]["row_length"] = 100
    if stage:
        rollout = {"max_turns": 3, "step_limit": {"kind": "partial", "seconds": 5.0}}
        second = {"name": "b", "steps": 1, "set": {"rollout": rollout, "optim": {}}}
        content["stages"] = [{"name": "a", "steps": 1}, second]
        monkeypatch.setattr("grpo_roc_jax.run.load.stage_of", lambda run, step: stage)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    (tmp_path / "checkpoints").mkdir()
    words = ["--rollout.max_prompt_tokens", "2048", "--optim.lr=1e9", "--limits.empty_steps=-1"]
    settings = serving_settings(str(tmp_path), words, "x")
    assert settings.rollout.max_prompt_tokens == 2048 and settings.batch.row_length >= settings.rollout.max_row_tokens
    assert (settings.sampling.top_p, settings.rollout.slots, settings.model) == (0.9, 16, config.model)
    assert settings.environment == Config().environment and settings.reward == Config().reward
    turns = 3 if stage else config.rollout.max_turns
    assert (settings.rollout.max_turns, settings.rollout.step_limit.kind) == (turns, "none")
    with serving_parts(settings) as (_, sampler):
        assert sampler.executor is sampler.agents is sampler.episodes is None
        assert sampler.engine.config.max_prompt_tokens == 2048
    with pytest.raises(g.ConfigError, match=r"unknown key 'rolout\.slots'"):
        serving_settings(str(tmp_path), ["--rolout.slots=3"], "x")
    with pytest.raises(g.ConfigError, match=r"rollout\.slots = -1"):
        serving_settings(str(tmp_path), ["--rollout.slots=-1"], "x")


@pytest.mark.slow
def test_the_command_serves_a_run_and_follows_it(tmp_path):
    """Another process serves the checkpoint of step 1, then that of step 2 as soon as it is written."""
    words = [*TINY, f"--run_dir={tmp_path}", "--checkpoint.every=1", "--resume=auto"]
    g.train_policy(g.read_config("toy.yaml", *words, "--steps=1"))
    command = [sys.executable, "-m", "grpo_roc_jax", "serve", str(tmp_path), "--port=0", "--follow-s=0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        try:
            url = program.stdout.readline().strip()
            served = Served(None, int(re.fullmatch(r"http://127.0.0.1:(\d+)/v1", url)[1]))
            first = served.chat([{"role": "user", "content": "1+1"}], max_tokens=4)
            assert first["policy_version"] == 1 and first["usage"]["completion_tokens"] >= 1
            g.train_policy(g.read_config("toy.yaml", *words, "--steps=2"))
            wait_for(lambda: served.ask("/v1/models")[1]["data"][0]["policy_version"] == 2)
            assert served.chat([{"role": "user", "content": "1+1"}], max_tokens=4)["policy_version"] == 2
        finally:
            program.terminate()
        assert program.wait(20) == 0
