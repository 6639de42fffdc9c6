"""Requests as users of each dialect get them wrong: every one is answered at once, by what is wrong or by an answer."""

import http.client
import json
import random
import re

import pytest

from tests.helpers.serving import WEATHER, spoiled, wait_for
from tests.helpers.serving import server as server  # a fixture

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
HI = [{"role": "user", "content": "Hi"}]
WHOLE = {CHAT: {"messages": HI}, MESSAGES: {"messages": HI}, RESPONSES: {"input": "x"}, COUNT: {"messages": HI}}
USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
CALLED = [*HI, {"role": "assistant", "tool_calls": [CALL]}]
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "rain"}
GIVEN = {"type": "function_call_output", "call_id": "c", "output": "x"}


def by_user(content):
    return {"messages": [{"role": "user", "content": content}]}


REFUSED = [
    (CHAT, b"{", "the body is no JSON", None),
    (CHAT, {"metadata": json.loads("[" * 200 + "]" * 200)}, "nested more than 128 times", None),
    (CHAT, {"messages": ["x"]}, r"messages\[0\] is str", "messages"),
    (CHAT, {"messages": [{"role": "judge", "content": "x"}]}, "must be system, user, assistant or tool", "messages"),
    (CHAT, by_user([{"type": "image_url"}]), "images are not supported", None),
    (CHAT, by_user("word " * 400), "leaves no room in a context of 256", None),
    (CHAT, {"messages": CALLED}, "their results must follow it", "messages"),
    (CHAT, {"messages": [*HI, RESULT]}, "must follow the call", "messages"),
    (CHAT, {"tools": [{"type": "retrieval"}]}, "must be of type function", "tools"),
    (CHAT, {"tools": [WEATHER], "tool_choice": {"function": {"name": "x"}}}, "the tools are weather", ...),
    (CHAT, {"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "offer those alone", ...),
    (CHAT, {"tool_choice": "always"}, "must be auto, none or required", "tool_choice"),
    (CHAT, {"tool_choice": "required"}, "without tools", ...),
    (CHAT, {"tools": [WEATHER], "tool_choice": "required", "messages": [*HI, {"role": "assistant", "content": "I"}]},
     "has begun the turn", ...),
    (CHAT, {"response_format": {"type": "xml"}}, "must be text, json_object or", "response_format"),
    (CHAT, {"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos", "ignore_eos"),
    (CHAT, {"stop": ["a"] * 17}, "stop must be up to 16 texts", "stop"),
    (CHAT, {"stop": "a", "min_tokens": 2}, "leave out stop", "min_tokens"),
    (CHAT, {"n": 65}, "n = 65; must be 1 to 64", "n"),
    (COMPLETIONS, {"prompt": [[5]] * 100_000}, "100000 choices; must be at most 64", "n"),
    (COMPLETIONS, {"prompt": [10**9]}, "", ...),
    (GENERATE, {"token_ids": []}, "", ...),
    (GENERATE, {"token_ids": [5], "stream": True}, "stream is not supported here", ...),
    (RESPONSES, {"input": [{"type": "computer_call"}]}, "'computer_call'; must be message", ...),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "'input_image'", ...),
    (RESPONSES, {"input": [{"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{"}]}, "", ...),
    (RESPONSES, {"tools": [{"type": "web_search"}]}, "'web_search'; must be function", ...),
    (RESPONSES, {"background": True}, "background is not supported", ...),
    (MESSAGES, {"system": "s", "messages": [*HI, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "other"}]}]}, r"^messages\[2\]: ", ...),
    (RESPONSES, {"instructions": "s", "input": [{"role": "user", "content": "x"}, GIVEN]}, r"^input\[1\]: ", ...),
    (MESSAGES, {"messages": [{"role": "tool", "content": "x"}]}, "must be user or assistant", ...),
    (MESSAGES, by_user([{"type": "image"}]), "type 'image'", ...),
    (MESSAGES, {"tools": [{"type": "bash_1", "name": "bash"}]}, "'bash_1'", ...),
]  # fmt: skip
"""Path, odd part, what the answer says, and the field that it names (... for any or none)."""


@pytest.mark.parametrize(("path", "body", "message", "param"), REFUSED)
def test_an_odd_request_is_refused_by_what_is_wrong(server, path, body, message, param):
    status, answer = server.ask(path, body if isinstance(body, bytes) else WHOLE.get(path, {}) | body)
    error = answer["error"]
    assert (status, error["type"]) == (400, "invalid_request_error"), answer
    assert len(error["message"]) > 10 and re.search(message, error["message"]), answer
    if path in (MESSAGES, COUNT):
        assert answer["type"] == "error"
    else:
        assert param is ... or error["param"] == param, answer
    assert not server.endpoint.running


def test_heads_and_other_methods_leave_the_connection_usable(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    cases = [("HEAD", "/v1/models", 200), ("HEAD", "/v1/models/none", 404), ("GET", "/", 404), ("GET", CHAT, 405)]
    for verb, where, expected in [*cases, ("HEAD", CHAT, 405), ("PURGE", "/health", 405), ("GET", "/health", 200)]:
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
    assert server.ask("/s/one/v1/files")[0] == server.ask("/v1/embeddings", {"input": "x"})[0] == 404
    status, answer = server.ask(RESPONSES, {"input": "x", "previous_response_id": "resp_none"})
    assert status == 404 and "no response 'resp_none' is remembered" in answer["error"]["message"]


BODIES = [
    (RESPONSES, {"input": "x", "instructions": "y", "text": {"format": {"type": "text"}}, "store": False}),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}], "include": ["a"]}),
    (RESPONSES, {"input": [*HI, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}, GIVEN]}),
    (RESPONSES, {"input": "x", "stream": True, "reasoning": {"effort": "low"}, "top_logprobs": 1}),
    (MESSAGES, {"messages": [*HI, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "x"}]}]}], "stream": True}),
    (MESSAGES, {"messages": HI, "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}}),
    (CHAT, {"messages": HI, "tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather"}}}),
    (CHAT, {"messages": [*CALLED, RESULT], "tools": [WEATHER | {"function": WEATHER["function"] | {"strict": True}}]}),
    (CHAT, {"messages": HI, "seed": 1, "n": 2, "stop": "a", "model": "m", "temperature": 1.0, "user": "me"}),
]  # fmt: skip


def test_bodies_of_every_form_that_are_spoiled_are_refused_and_never_a_fault(server):
    rng, statuses = random.Random(6), set()
    for path, body in BODIES * 8:
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
