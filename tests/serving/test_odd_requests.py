"""Requests as users of each dialect get them wrong: every one is answered at once, by what is wrong or by an answer."""

import http.client
import json
import random
import re
import time
from itertools import product

import pytest

from tests.helpers.serving import WEATHER, spoiled, wait_for
from tests.helpers.serving import server as server  # a fixture

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
HI = [{"role": "user", "content": "Hi"}]
WHOLE = {CHAT: {"messages": HI}, MESSAGES: {"messages": HI}, RESPONSES: {"input": "x"}, COUNT: {"messages": HI}}
"""What requests have of which the tables name the odd part alone."""
USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}}
TOOL = {"name": "weather", "input_schema": WEATHER["function"]["parameters"]}
FLAT = {"type": "function", **WEATHER["function"]}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
CALLED = [*HI, {"role": "assistant", "tool_calls": [CALL]}]
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "rain"}
GIVEN = {"type": "function_call_output", "call_id": "c", "output": "x"}
DEEP = b"[" * 5000 + b"]" * 5000


def deep(levels, leaf=1):
    for _ in range(levels):
        leaf = {"a": leaf} if levels % 2 else [leaf]
    return leaf


def by_user(content):
    return {"messages": [{"role": "user", "content": content}]}


REFUSED = [
    (CHAT, b"{", "the body is no JSON", None),
    (CHAT, b"[1]", "the body is list; must be an object", None),
    (CHAT, DEEP, "", None),
    (CHAT, b'{"seed": ' + b"9" * 5000 + b"}", "", None),
    (CHAT, {"metadata": deep(200)}, "nested more than 128 times", None),
    (CHAT, {"messages": {"role": "user"}}, "", "messages"),
    (CHAT, {"messages": []}, "at least one message", "messages"),
    (CHAT, {"messages": ["x"]}, r"messages\[0\] is str", "messages"),
    (CHAT, {"messages": [{"role": "judge", "content": "x"}]}, "must be system, user, assistant or tool", "messages"),
    (CHAT, by_user({"text": "x"}), "", ...),
    (CHAT, by_user([{"type": "image_url"}]), "images are not supported", None),
    (CHAT, by_user("word " * 400), "leaves no room in a context of 256", None),
    (CHAT, {"messages": [*HI, {"role": "assistant", "tool_calls": {"id": 1}}]}, "", ...),
    (CHAT, {"messages": CALLED}, "their results must follow it", "messages"),
    (CHAT, {"messages": [*HI, RESULT]}, "must follow the call", "messages"),
    (CHAT, {"tools": WEATHER}, "", "tools"),
    (CHAT, {"tools": [{"type": "retrieval"}]}, "must be of type function", "tools"),
    (CHAT, {"tools": [WEATHER], "tool_choice": {"function": {"name": "x"}}}, "the tools are weather", ...),
    (CHAT, {"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "offer those alone", ...),
    (CHAT, {"tool_choice": "always"}, "must be auto, none or required", "tool_choice"),
    (CHAT, {"tool_choice": "required"}, "without tools", ...),
    (CHAT, {"tools": [WEATHER], "tool_choice": "required", "messages": [*HI, {"role": "assistant", "content": "I"}]},
     "has begun the turn", ...),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": deep(110)}}, "", ...),
    (CHAT, {"response_format": {"type": "xml"}}, "must be text, json_object or", "response_format"),
    (CHAT, {"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos", "ignore_eos"),
    (CHAT, {"stop": ["a"] * 17}, "stop must be up to 16 texts", "stop"),
    (CHAT, {"stop": [""]}, "stop must be up to 16 texts", "stop"),
    (CHAT, {"stop": "a", "min_tokens": 2}, "leave out stop", "min_tokens"),
    (CHAT, {"n": 65}, "n = 65; must be 1 to 64", "n"),
    (CHAT, {"max_tokens": 0}, "must be at least 1", "max_tokens"),
    (CHAT, {"top_logprobs": 5}, "top_logprobs without logprobs", "top_logprobs"),
    (CHAT, {"logit_bias": {str(i): 1 for i in range(5000)}}, "", "logit_bias"),
    (CHAT, {"stream": "yes"}, "", "stream"),
    (CHAT, {"model": 3}, "model is int", "model"),
    (COMPLETIONS, {"prompt": ""}, "", ...),
    (COMPLETIONS, {"prompt": ["x"] * 100, "stream": True}, "", ...),
    (COMPLETIONS, {"prompt": [[5]] * 100_000}, "100000 choices; must be at most 64", "n"),
    (COMPLETIONS, {"prompt": [[]]}, "", ...),
    (COMPLETIONS, {"prompt": [1, "x"]}, "", ...),
    (COMPLETIONS, {"prompt": [[-1]]}, "", ...),
    (COMPLETIONS, {"prompt": [10**9]}, "", ...),
    (COMPLETIONS, {"prompt": [5] * 100_000}, "leaves no room", ...),
    (GENERATE, {"token_ids": []}, "", ...),
    (GENERATE, {"token_ids": [1 << 20]}, "outside the vocabulary", ...),
    (GENERATE, {"token_ids": [5], "sampling_params": []}, "", ...),
    (GENERATE, {"token_ids": [5], "stream": True}, "stream is not supported here", ...),
    (RESPONSES, {"input": []}, "at least one item", ...),
    (RESPONSES, {"input": ["x"]}, r"input\[0\] is str", ...),
    (RESPONSES, {"input": [{"type": "computer_call"}]}, "'computer_call'; must be message", ...),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "'input_image'", ...),
    (RESPONSES, {"input": [{"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{"}]}, "", ...),
    (RESPONSES, {"input": [GIVEN]}, "follow", ...),
    (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "holds no schema", ...),
    (RESPONSES, {"tools": [{"type": "web_search"}]}, "'web_search'; must be function", ...),
    (RESPONSES, {"tools": [FLAT], "tool_choice": {"type": "allowed_tools"}}, "offer those alone", ...),
    (RESPONSES, {"background": True}, "background is not supported", ...),
    (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens = 0", "max_output_tokens"),
    (CHAT, {"messages": [*HI, {"role": "user", "content": [{"type": "image_url"}]}]}, r"^messages\[1\]", ...),
    (MESSAGES, {"system": "s", "messages": [*HI, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "other"}]}]}, r"^messages\[2\]: ", ...),
    (RESPONSES, {"instructions": "s", "input": [{"role": "user", "content": "x"}, GIVEN]}, r"^input\[1\]: ", ...),
    (MESSAGES, {"messages": ["x"]}, "role is 'str'", ...),
    (MESSAGES, {"messages": [{"role": "tool", "content": "x"}]}, "must be user or assistant", ...),
    (MESSAGES, by_user([{"type": "image"}]), "type 'image'", ...),
    (MESSAGES, by_user([{"type": "tool_result", "tool_use_id": "t1"}]), "", ...),
    (MESSAGES, {"messages": [*HI, {"role": "assistant", "content": [USE]}]}, "", ...),
    (MESSAGES, {"messages": [*HI, {"role": "assistant", "content": [USE | {"name": 5}]}]}, "", ...),
    (MESSAGES, {"tools": [{"type": "bash_1", "name": "bash"}]}, "'bash_1'", ...),
    (MESSAGES, {"tools": [TOOL | {"input_schema": 5}]}, "", ...),
    (MESSAGES, {"tool_choice": {"type": "x"}}, "auto, any", ...),
    (MESSAGES, {"max_tokens": "10"}, "max_tokens is str", ...),
]  # fmt: skip
"""Path, odd part, what the answer says, and the field that it names (... for any or none)."""


@pytest.mark.parametrize(
    ("path", "body", "message", "param"), REFUSED, ids=[f"{i}-{row[0]}" for i, row in enumerate(REFUSED)]
)
def test_an_odd_request_is_refused_by_what_is_wrong(server, path, body, message, param):
    begun = time.perf_counter()
    status, answer = server.ask(path, body if isinstance(body, bytes) else WHOLE.get(path, {}) | body)
    assert status == 400, answer
    error = answer["error"]
    assert error["type"] == "invalid_request_error", answer
    assert len(error["message"]) > 10 and re.search(message, error["message"]), answer
    if path in (MESSAGES, COUNT):
        assert answer["type"] == "error"
    else:
        assert param is ... or error["param"] == param, answer
    assert time.perf_counter() - begun < 5 and not server.endpoint.running


ANSWERED = [
    (CHAT, {"messages": [*HI, {"role": "assistant", "content": None}]}),
    (CHAT, {"seed": 10**400}),
    (CHAT, {"max_tokens": 10**400}),
    (CHAT, {"model": "no-such-model"}),
    (COUNT, {"tools": [TOOL]}),
    (COUNT, {"tools": [TOOL | {"type": None}]}),
    (CHAT, {"messages": [*HI, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, *HI]}),
]


def test_an_odd_request_that_has_a_meaning_is_answered(server):
    for path, body in ANSWERED:
        assert server.ask(path, {"max_tokens": 2} | WHOLE[path] | body)[0] == 200, body


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
    cases += [("GET", "/", 404), ("PURGE", "/health", 405)]
    cases += [("OPTIONS", CHAT, 405), ("GET", CHAT, 405), ("DELETE", "/v1/models/policy", 405), ("HEAD", CHAT, 405)]
    for method, path, status in cases:
        for verb, where, expected in ((method, path, status), ("GET", "/health", 200)):
            connection.request(verb, where)
            answer = connection.getresponse()
            content = answer.read()
            assert answer.status == expected and bool(content) == (verb != "HEAD"), (verb, where)
            if expected == 405:
                assert answer.headers["Allow"] == ("POST" if where == CHAT else "GET, HEAD")
    connection.close()
    known = server.ask("/v1/models")[1]["data"][0]
    assert server.ask("/v1/models/policy")[1] == server.ask("/s/one/v1/models/policy")[1] == known
    assert server.ask("/v1/models/gpt-5")[1]["error"]["code"] == "model_not_found"
    for path in ("/", "/v2/models", "/v1/models/", "/metrics/policy", "/s/one/v1/files", f"{CHAT}/x"):
        assert server.ask(path)[0] == 404, path
    for path in (f"{RESPONSES}/resp_1", "/v1/embeddings"):
        assert server.ask(path, {"input": "x"})[0] == 404, path
    status, answer = server.ask(RESPONSES, {"input": "x", "previous_response_id": "resp_none"})
    assert status == 404 and "no response 'resp_none' is remembered" in answer["error"]["message"]


BODIES = [
    (RESPONSES, {"input": "x", "instructions": "y", "text": {"format": {"type": "text"}}, "store": False}),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}], "include": ["a"]}),
    (RESPONSES, {"input": [*HI, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}, GIVEN]}),
    (RESPONSES, {"input": "x", "tools": [FLAT | {"strict": True}]}),
    (RESPONSES, {"input": "x", "stream": True, "reasoning": {"effort": "low"}, "top_logprobs": 1}),
    (MESSAGES, {"messages": HI, "system": [{"type": "text", "text": "s"}], "stop_sequences": ["a"]}),
    (MESSAGES, {"messages": HI, "tools": [TOOL | {"strict": True}], "tool_choice": {"type": "auto"}}),
    (MESSAGES, {"messages": [*HI, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "x"}]}]}], "stream": True}),
    (MESSAGES, {"messages": HI, "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}}),
    (COUNT, {"messages": HI, "tools": [TOOL]}),
    (CHAT, {"messages": HI, "tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather"}}}),
    (CHAT, {"messages": [*CALLED, RESULT], "tools": [WEATHER | {"function": WEATHER["function"] | {"strict": True}}]}),
    (CHAT, {"messages": HI, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}}),
    (CHAT, {"messages": HI, "bad_words": ["a"], "min_tokens": 1, "ignore_eos": False, "logprobs": True}),
    (CHAT, {"messages": HI, "seed": 1, "n": 2, "stop": "a", "model": "m", "temperature": 1.0, "user": "me"}),
    (COMPLETIONS, {"prompt": "x", "stop": ["a"], "stream_options": {}}),
    (GENERATE, {"token_ids": [5], "sampling_params": {"structured_outputs": {"regex": "a+"}}}),
    (GENERATE, {"token_ids": [5], "sampling_params": {"logprobs": 2, "bad_words": ["a"]}}),
    (GENERATE, {"token_ids": [5, 6], "sampling_params": {"temperature": 1, "stop_token_ids": [3]}}),
]  # fmt: skip


@pytest.mark.parametrize("times", [6, pytest.param(60, marks=pytest.mark.slow)])
def test_bodies_of_every_form_that_are_spoiled_are_refused_and_never_a_fault(server, times):
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


def test_tools_of_any_name_are_offered_or_refused(server):
    for name, strict, choice in product(NAMES, (False, True), ("auto", "required")):
        tool = {"type": "function", "function": WEATHER["function"] | {"name": name, "strict": strict}}
        body = {"messages": HI, "tools": [tool], "tool_choice": choice, "max_tokens": 2}
        assert server.ask(CHAT, body)[0] in (200, 400), (name, strict, choice)


HARD = [
    {"guided_regex": "(a|aa)*" * 500},
    {"guided_choice": [f"text {i}" for i in range(5000)]},
    {"guided_json": deep(100, {"type": "string"})},
    {"guided_json": {"type": "array", "maxItems": 10**9, "items": {"type": "array", "maxItems": 10**9}}},
    {"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}},
    {"guided_json": {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(2000)}}},
    {"guided_json": {"type": "string", "minLength": 10**6}},
]
SLOW = pytest.param([{"guided_regex": "((a{0,999}){0,999}){0,999}"}], marks=pytest.mark.slow, id="slow")


@pytest.mark.parametrize("forms", [pytest.param(HARD, id="fast"), SLOW])
def test_a_form_that_is_hard_to_compile_holds_up_nobody(server, forms):
    pytest.importorskip("llguidance", reason="llguidance (the extra `serve`) is not installed")
    for form in forms:
        begun = time.perf_counter()
        status, answer = server.ask(CHAT, {"messages": HI, "max_tokens": 3, **form})
        assert status in (200, 400) and time.perf_counter() - begun < 10, answer
