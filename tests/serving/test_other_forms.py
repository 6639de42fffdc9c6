"""`/v1/responses` and `/v1/messages` are chat completions in other words: the same tokens, dialogue store and rows."""

import json

import pytest

from grpo_roc_jax.serving.recorded_calls import conversations_of, trajectory_of
from tests.helpers.serving import WEATHER, scripted
from tests.helpers.serving import server as server  # a fixture

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
PLAN = "I look.</reason>" + CALL
FLAT = {"type": "function", "strict": False} | WEATHER["function"]
OWN = {"name": "weather", "description": "Says the weather.", "input_schema": WEATHER["function"]["parameters"]}
ASK = "What is the weather in Rome?"
ASKED = [{"role": "user", "content": ASK}]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_the_same_tokens_as_a_chat_completion(server, path):
    messages = [{"role": "user", "content": "2+3?"}]
    fields = {"temperature": 1.0, "seed": 5, "return_token_ids": True}
    chat = server.chat([{"role": "system", "content": "Be brief."}, *messages], **fields)
    body = {
        RESPONSES: {"instructions": "Be brief.", "input": "2+3?", "max_output_tokens": 24},
        MESSAGES: {"system": "Be brief.", "messages": messages, "max_tokens": 24},
    }[path] | {"model": "policy", **fields}
    status, answer = server.ask(path, body)
    assert status == 200 and answer["token_ids"] == chat["choices"][0]["token_ids"], answer
    usage, tokens = answer["usage"], chat["usage"]
    prompt_tokens = usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
    assert (prompt_tokens, usage["output_tokens"]) == (tokens["prompt_tokens"], tokens["completion_tokens"])
    streamed = server.events(path, body)
    if path == RESPONSES:
        assert [event["sequence_number"] for event in streamed] == list(range(len(streamed)))
    else:
        assert server.ask("/v1/messages/count_tokens", body)[1] == {"input_tokens": prompt_tokens}
        assert streamed[-2]["delta"]["stop_reason"] == answer["stop_reason"]


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_stream_that_ends_before_its_first_token_has_its_opening(server, path):
    asked = {"input": ASK} if path == RESPONSES else {"messages": ASKED}
    reply = server.endpoint.form(path, asked | {"model": "policy", "stream": True, "max_tokens": 4}, "")
    reply.begin()
    (choice,) = reply.choices
    choice.stop = "length"
    first, *_ = reply.ended(choice)
    assert first.get("type", first.get("object")) in ("response.created", "message_start", "chat.completion.chunk")
    assert "choices" not in first or first["choices"][0]["delta"]["role"] == "assistant"


def blocks_of(streamed):
    """The content that the events of `/v1/messages` build up."""
    blocks = []
    for event in streamed:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]) | {"json": ""})
        elif event["type"] == "content_block_delta":
            kind = event["delta"]["type"].removesuffix("_delta").removeprefix("input_")
            blocks[-1][kind] += event["delta"]["partial_json" if kind == "json" else kind]
    return [block | ({"input": json.loads(block["json"])} if block["json"] else {}) for block in blocks]


@pytest.mark.parametrize("streams", [False, True])
def test_a_conversation_of_responses_is_one_row(streams):
    def ask(items, before=None):
        body = {"model": "policy", "tools": [FLAT], "input": items, "previous_response_id": before}
        if not streams:
            return server.ask("/s/one/v1/responses", body)[1]
        return server.events("/s/one/v1/responses", body)[-1]["response"]

    with scripted(PLAN, "Rain.</reason>It rains.", "Rome.", "Yes.") as server:
        session = server.session()
        first = ask(ASK)
        thought, call = first["output"]
        assert thought["content"][0]["text"] == "I look." and json.loads(call["arguments"]) == {"city": "Rome"}
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
        second = ask([*ASKED, *first["output"], result])
        assert second["output"][-1]["content"][0]["text"] == "It rains." and second["status"] == "completed"
        begun = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "In "}]
        ask("Sure?", ask(begun, second["id"])["id"])
        (row,) = conversations_of(session.calls)
        assert len(session.calls) == 4 and sum(row.mask) == sum(len(entry.ids) for entry in session.calls)


@pytest.mark.parametrize("streams", [False, True])
def test_a_conversation_of_messages_is_one_row(streams):
    def ask(messages):
        body = {"model": "policy", "max_tokens": 99, "tools": [OWN], "messages": messages}
        if not streams:
            answer = server.ask("/s/one/v1/messages", body)[1]
            return answer["content"], answer["stop_reason"]
        streamed = server.events("/s/one/v1/messages", body)
        return blocks_of(streamed), streamed[-2]["delta"]["stop_reason"]

    with scripted(PLAN, "Rain.</reason>It rains.") as server:
        session = server.session()
        content, reason = ask(ASKED)
        assert content[0]["thinking"] == "I look." and content[1]["input"] == {"city": "Rome"} and reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": content[1]["id"], "content": "rain", "is_error": True}
        said = {"role": "assistant", "content": content}
        content, reason = ask([*ASKED, said, {"role": "user", "content": [result]}])
        assert content[-1]["text"] == "It rains." and reason == "end_turn"
        assert "\nError: rain\n" in server.endpoint.chat.tokenizer.decode(session.calls[1].prompt.tolist())
        (row,) = conversations_of(session.calls)
        assert len(session.calls) == 2 and sum(row.mask) == sum(len(entry.ids) for entry in session.calls)


FORCED = [(CHAT, {"type": "function", "function": {"name": "weather"}}, False), (CHAT, "required", True)]
FORCED += [(RESPONSES, {"type": "function", "name": "weather"}, True), (MESSAGES, {"type": "any"}, False)]
FORCED += [(MESSAGES, {"type": "tool", "name": "weather"}, True)]


@pytest.mark.parametrize(("path", "choice", "streams"), FORCED)
def test_a_forced_call_is_begun_for_the_policy(path, choice, streams):
    """The opening of the call is context, which is not trained; the call counts as one."""
    with scripted('"city": "Rome"}}\n</tool_call>') as server:
        session = server.session()
        tool = {CHAT: WEATHER, RESPONSES: FLAT, MESSAGES: OWN}[path]
        body = {"tools": [tool], "tool_choice": choice, "max_tokens": 99, "stream": streams}
        body |= {"input": ASK} if path == RESPONSES else {"messages": ASKED}
        assert '"weather"' in str(server.ask(f"/s/one{path}", body)[1]).replace("'", '"').replace('\\"', '"')
        (call,) = session.calls
        prompt = server.endpoint.chat.tokenizer.decode(call.prompt.tolist())
        assert prompt.endswith('</reason>\n<tool_call>\n{"name": "weather", "arguments": {')
        rows = conversations_of(session.calls)
        trajectory, _ = trajectory_of(rows, server.endpoint.chat, session.request, "eos", 4096)
        (turn,) = trajectory.turns
        assert [(item.name, item.arguments, item.fault) for item in turn.calls] == [("weather", {"city": "Rome"}, None)]
        assert trajectory.policy_mask.sum() == len(call.ids)
