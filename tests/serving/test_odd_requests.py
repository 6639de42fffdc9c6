"""Requests as users of each dialect get them wrong: every one is answered at once, by what is wrong or by an answer."""

import http.client
import json
import random
import time

import pytest

from tests.helpers.serving import WEATHER, served
from tests.serving.test_endpoint import wait_for
from tests.serving.test_hostile_clients import spoiled

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HI = [{"role": "user", "content": "Hi"}]
USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}}
TOOL = {"name": "weather", "input_schema": WEATHER["function"]["parameters"]}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
CALLED = [*HI, {"role": "assistant", "tool_calls": [CALL]}]
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "rain"}


def deep(levels, leaf=1):
    for _ in range(levels):
        leaf = {"a": leaf} if levels % 2 else [leaf]
    return leaf


ODD = [
    (CHAT, {"messages": {"role": "user"}}, 400),
    (CHAT, {"messages": [HI]}, 400),
    (CHAT, {"messages": [{"role": ["user"], "content": "x"}]}, 400),
    (CHAT, {"messages": [{"role": "user", "content": {"text": "x"}}]}, 400),
    (CHAT, {"messages": [{"role": "user", "content": [["x"]]}]}, 400),
    (CHAT, {"messages": [*HI, {"role": "assistant", "content": None}]}, 200),
    (CHAT, {"messages": [*HI, {"role": "assistant", "tool_calls": {"id": 1}}]}, 400),
    (CHAT, {"messages": [*CALLED, RESULT, RESULT]}, 400),
    (CHAT, {"messages": [*CALLED, RESULT | {"tool_call_id": "c2"}]}, 400),
    (CHAT, {"messages": [*CALLED, RESULT | {"tool_call_id": 7}]}, 400),
    (CHAT, {"messages": [RESULT]}, 400),
    (CHAT, {"messages": HI, "tools": WEATHER}, 400),
    (CHAT, {"messages": HI, "tools": [WEATHER] * 20}, 400),
    (CHAT, {"messages": HI, "tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}, 400),
    (CHAT, {"messages": HI, "tools": [WEATHER], "tool_choice": {"function": {"name": ["weather"]}}}, 400),
    (CHAT, {"messages": HI, "tool_choice": "required"}, 400),
    (CHAT, {"messages": HI, "response_format": {"type": "json_schema", "json_schema": deep(110)}}, 400),
    (CHAT, {"messages": HI, "metadata": deep(200)}, 400),
    (CHAT, {"messages": HI, "metadata": deep(900)}, 400),
    (CHAT, {"messages": HI, "stop": ["a"] * 17}, 400),
    (CHAT, {"messages": HI, "stop": {"a": 1}}, 400),
    (CHAT, {"messages": HI, "n": 10**12}, 400),
    (CHAT, {"messages": HI, "seed": 10**400}, 200),
    (CHAT, {"messages": HI, "max_tokens": 10**400}, 200),
    (CHAT, {"messages": HI, "temperature": 10**400}, 400),
    (CHAT, {"messages": HI, "stream": "yes"}, 400),
    (CHAT, {"messages": HI, "stream_options": [True]}, 400),
    (CHAT, {"messages": HI, "model": "no-such-model"}, 200),
    (CHAT, {"messages": HI, "logit_bias": {str(i): 1 for i in range(5000)}}, 400),
    ("/v1/completions", {"prompt": {"a": 1}}, 400),
    ("/v1/completions", {"prompt": ["x"] * 100}, 400),
    ("/v1/completions", {"prompt": ["x"] * 100, "stream": True}, 400),
    ("/v1/completions", {"prompt": [[]]}, 400),
    ("/v1/completions", {"prompt": [[-1]]}, 400),
    ("/v1/completions", {"prompt": [5] * 100_000}, 400),
    ("/inference/v1/generate", {"token_ids": "5"}, 400),
    ("/inference/v1/generate", {"token_ids": [5], "sampling_params": []}, 400),
    ("/inference/v1/generate", {"token_ids": [5], "stream": True}, 400),
    (RESPONSES, {}, 400),
    (RESPONSES, {"input": []}, 400),
    (RESPONSES, {"input": [{"type": ["message"]}]}, 400),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, 400),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, 400),
    (RESPONSES, {"input": [{"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{"}]}, 400),
    (RESPONSES, {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, 400),
    (RESPONSES, {"input": "x", "previous_response_id": "resp_none"}, 404),
    (RESPONSES, {"input": "x", "previous_response_id": ["resp_none"]}, 400),
    (RESPONSES, {"input": "x", "text": {"format": {"type": "json_schema"}}}, 400),
    (RESPONSES, {"input": "x", "tools": [{"type": "web_search"}]}, 400),
    (RESPONSES, {"input": "x", "include": "all"}, 400),
    (RESPONSES, {"input": "x", "max_output_tokens": 0}, 400),
    (MESSAGES, {"messages": HI}, 200),
    (MESSAGES, {"messages": HI, "system": [{"type": "image"}]}, 400),
    (MESSAGES, {"messages": HI, "tools": [{"type": "bash_20250124", "name": "bash"}]}, 400),
    (MESSAGES, {"messages": HI, "tools": [TOOL], "tool_choice": "auto"}, 400),
    (MESSAGES, {"messages": HI, "tools": [TOOL | {"input_schema": 5}]}, 400),
    (MESSAGES, {"messages": HI, "stop_sequences": [1]}, 400),
    (MESSAGES, {"messages": HI, "max_tokens": "10"}, 400),
    (MESSAGES, {"messages": [*HI, {"role": "assistant", "content": [USE | {"name": 5}]}]}, 400),
    (MESSAGES, {"messages": [*HI, {"role": "assistant", "content": [USE]}]}, 400),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1"}]}]}, 400),
    ("/v1/messages/count_tokens", {"messages": HI, "tools": [TOOL]}, 200),
    ("/v1/messages/count_tokens", {"messages": 5}, 400),
]


@pytest.fixture(scope="module")
def server():
    with served() as found:
        yield found


@pytest.mark.parametrize(("path", "body", "status"), ODD, ids=[f"{i}-{case[0]}" for i, case in enumerate(ODD)])
def test_an_odd_request_is_answered_by_what_is_wrong(server, path, body, status):
    body = {"max_tokens": 2, "max_output_tokens": 2} | body if status == 200 else body
    begun = time.perf_counter()
    found, answer = server.ask(path, body)
    assert found == status, answer
    if status != 200:
        error = answer["error"]
        assert len(error["message"]) > 10 and ("param" in error or path.startswith(MESSAGES)), answer
        assert time.perf_counter() - begun < 5 and not server.endpoint.running


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (CHAT, {"messages": HI, "tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "offer those alone"),
        (RESPONSES, {"input": "x", "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "offer those alone"),
        (RESPONSES, {"input": "x", "max_output_tokens": -1}, "max_output_tokens = -1"),
    ],
)
def test_a_refusal_names_what_the_request_says(server, path, body, message):
    tools = {"tools": [{"type": "function", **WEATHER["function"]}]} if path == RESPONSES else {}
    status, answer = server.ask(path, tools | body)
    assert status == 400 and message in answer["error"]["message"]


def test_a_tool_result_that_is_an_error_says_so_to_the_policy(server):
    def prompt(text, **fields):
        result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": text}], **fields}
        turns = [*HI, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [result]}]
        form = server.endpoint.form(MESSAGES, {"messages": turns, "tools": [TOOL]}, "")
        return server.endpoint.chat.tokenizer.decode(form.prompts[0].tolist())

    assert prompt("no such city", is_error=True) == prompt("Error: no such city")
    assert prompt("Error: gone", is_error=True) == prompt("Error: gone") != prompt("gone", is_error=False)


def test_heads_and_other_methods_leave_the_connection_usable(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    cases = [("HEAD", "/health", 200), ("HEAD", "/v1/models", 200), ("HEAD", "/v1/models/none", 404)]
    cases += [("OPTIONS", CHAT, 405), ("GET", CHAT, 405), ("DELETE", "/v1/models/policy", 405), ("HEAD", CHAT, 405)]
    for method, path, status in cases:
        for verb, where, wanted in ((method, path, status), ("GET", "/health", 200)):
            connection.request(verb, where)
            answer = connection.getresponse()
            content = answer.read()
            assert answer.status == wanted and bool(content) == (verb != "HEAD"), (verb, where)
            if wanted == 405:
                assert answer.headers["Allow"] == ("POST" if where == CHAT else "GET, HEAD")
    connection.close()


BODIES = [
    (RESPONSES, {"input": "x", "instructions": "y", "text": {"format": {"type": "text"}}, "store": False}),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}], "include": ["a"]}),
    (RESPONSES, {"input": [*HI, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                           {"type": "function_call_output", "call_id": "c", "output": "x"}]}),
    (RESPONSES, {"input": "x", "tools": [{"type": "function", **WEATHER["function"], "strict": True}]}),
    (RESPONSES, {"input": "x", "stream": True, "reasoning": {"effort": "low"}, "top_logprobs": 1}),
    (MESSAGES, {"messages": HI, "system": [{"type": "text", "text": "s"}], "stop_sequences": ["a"]}),
    (MESSAGES, {"messages": HI, "tools": [TOOL | {"strict": True}], "tool_choice": {"type": "auto"}}),
    (MESSAGES, {"messages": [*HI, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "x"}]}]}], "stream": True}),
    (MESSAGES, {"messages": HI, "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}}),
    ("/v1/messages/count_tokens", {"messages": HI, "tools": [TOOL]}),
    (CHAT, {"messages": HI, "tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather"}}}),
    (CHAT, {"messages": [*CALLED, RESULT], "tools": [WEATHER | {"function": WEATHER["function"] | {"strict": True}}]}),
    (CHAT, {"messages": HI, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}}),
    (CHAT, {"messages": HI, "bad_words": ["a"], "min_tokens": 1, "ignore_eos": False, "logprobs": True}),
    ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"structured_outputs": {"regex": "a+"}}}),
    ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"logprobs": 2, "bad_words": ["a"]}}),
]  # fmt: skip


@pytest.mark.parametrize("times", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_bodies_of_every_form_that_are_spoiled_are_refused_and_never_a_fault(server, times):
    """Some part of a good body is replaced by nonsense, often several times."""
    rng, statuses = random.Random(times), set()
    for number in range(times * len(BODIES)):
        path, body = BODIES[number % len(BODIES)]
        for _ in range(rng.choice([1, 1, 2, 3])):
            body = spoiled(body, rng)
        if isinstance(body, dict):
            body = {"max_tokens": 1, "max_output_tokens": 1, **body}
        status, answer = server.ask(path, json.dumps(body).encode())
        statuses.add(status)
        assert status in (200, 400, 404), (path, body, answer)
        if isinstance(answer, list):  # a stream says of a fault in its last piece
            assert not any('"server_error"' in piece or '"api_error"' in piece for piece in answer), (path, body)
    assert statuses >= {200, 400}
    wait_for(lambda: not server.endpoint.running)


NAMES = ["", " ", "a b", '"', "</tool_call>", "<tool_call>", "\n", "{}", "é" * 300, "Qname7Q", "a" * 10_000, "\0"]


@pytest.mark.parametrize("strict", [False, True])
def test_tools_of_any_name_are_offered_or_refused(server, strict):
    for name in NAMES:
        tool = {"type": "function", "function": WEATHER["function"] | {"name": name, "strict": strict}}
        for choice in ("auto", "required"):
            body = {"messages": HI, "tools": [tool], "tool_choice": choice, "max_tokens": 2}
            status, answer = server.ask(CHAT, body)
            assert status in (200, 400), (name, choice, answer)


@pytest.mark.parametrize(
    "form",
    [
        pytest.param({"guided_regex": "((a{0,999}){0,999}){0,999}"}, marks=pytest.mark.slow),
        {"guided_regex": "(a|aa)*" * 500},
        {"guided_choice": [f"text {i}" for i in range(5000)]},
        {"guided_json": deep(100, {"type": "string"})},
        {"guided_json": {"type": "array", "maxItems": 10**9, "items": {"type": "array", "maxItems": 10**9}}},
        {"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}},
        {"guided_json": {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(2000)}}},
        {"guided_json": {"type": "string", "minLength": 10**6}},
    ],
    ids=lambda form: str(form)[:30],
)
def test_a_form_that_is_hard_to_compile_holds_up_nobody(server, form):
    pytest.importorskip("llguidance", reason="llguidance (the extra `serve`) is not installed")
    begun = time.perf_counter()
    status, answer = server.ask(CHAT, {"messages": HI, "max_tokens": 3, **form})
    assert status in (200, 400), answer
    assert time.perf_counter() - begun < 10
