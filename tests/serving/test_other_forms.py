"""`/v1/responses` and `/v1/messages` are chat completions in other words: the same tokens, dialogue store and rows."""

import json
import re
from itertools import groupby

import pytest

import grpo_roc_jax as g
from grpo_roc_jax.serving.dialogues import HELD_BACK, WHERE
from grpo_roc_jax.serving.recorded_calls import conversations_of, trajectory_of
from grpo_roc_jax.serving.responses import LOGPROBS, messages_of
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
    kinds = [event["type"] for event in streamed]
    if path == RESPONSES:
        assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")
        assert [event["sequence_number"] for event in streamed] == list(range(len(streamed)))
        items, last = answer["output"], streamed[-1]["response"]["output"]
    else:
        sampled = server.endpoint.loop.stats.sampled_tokens
        assert server.ask("/v1/messages/count_tokens", body)[1] == {"input_tokens": prompt_tokens}
        assert server.endpoint.loop.stats.sampled_tokens == sampled
        assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
        assert streamed[-2]["delta"]["stop_reason"] == answer["stop_reason"]
        items, last = answer["content"], blocks_of(streamed)
    assert [(item["type"], item.get("role")) for item in last] == [(item["type"], item.get("role")) for item in items]
    assert text_of(last) == text_of(items) == (chat["choices"][0]["message"]["content"] or "")


CONTINUOUS = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
BODIES = {CHAT: {"messages": ASKED}, "/v1/completions": {"prompt": "2+3?"}, RESPONSES: {"input": "2+3?"}}
BODIES |= {MESSAGES: {"messages": ASKED, "max_tokens": 4}}


NAMED = [
    (MESSAGES, {"output_config": {"effort": "low"}, "tool_choice": {"type": "auto"}}, "output_config.effort"),
    (RESPONSES, {"text": {"verbosity": "low", "format": {"type": "text"}}}, "text.verbosity"),
    (RESPONSES, {"include": [LOGPROBS, "reasoning.encrypted_content"]}, "include.reasoning.encrypted_content"),
    (RESPONSES, {"background": False, "stream_options": {"include_obfuscation": False}}, ""),
    (RESPONSES, {"reasoning": {"effort": None, "summary": None}}, ""),
    (CHAT, CONTINUOUS, "stream_options.continuous_usage_stats"),
    ("/v1/completions", CONTINUOUS, "stream_options.continuous_usage_stats"),
    (CHAT, {"function_call": "none", "stream_options": {"continuous_usage_stats": False}}, ""),
]


def test_fields_within_fields_that_change_nothing_are_named(server):
    for path, more, named in NAMED:
        reply = server.endpoint.form(path, BODIES[path] | more | {"model": "policy"}, "")
        assert ", ".join(reply.not_applied) == named


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_stream_that_ends_before_its_first_token_has_its_opening(server, path):
    reply = server.endpoint.form(path, BODIES[path] | {"model": "policy", "stream": True}, "")
    reply.begin()
    (choice,) = reply.choices
    choice.stop = "length"
    first, *_ = reply.ended(choice)
    assert first.get("type", first.get("object")) in ("response.created", "message_start", "chat.completion.chunk")
    assert "choices" not in first or first["choices"][0]["delta"]["role"] == "assistant"


TOOLS = {CHAT: WEATHER, RESPONSES: FLAT, MESSAGES: OWN}
SAID = "It rains in all of these towns. " * 9 + "Yes."


@pytest.mark.parametrize("thought", ["I look at the map. " * 9 + "So.", "So."])
@pytest.mark.parametrize("call", ["", CALL])
def test_a_stream_has_the_parts_of_the_whole_answer_in_their_order(thought, call):
    def in_order(pairs):
        runs = groupby(((kind, text) for kind, text in pairs if text), key=lambda pair: pair[0])
        return ["".join(text for _, text in run) for _, run in runs]

    assert len(SAID) > 6 * HELD_BACK
    bodies = {path: BODIES[path] | {"tools": [tool]} for path, tool in TOOLS.items()}
    with scripted(*[f"{thought}</reason>{SAID}{call}"] * 6) as server:
        chat, responses, messages = (server.ask(path, body)[1] for path, body in bodies.items())
        pieces, events, blocks = (server.events(path, body) for path, body in bodies.items())
    message = chat["choices"][0]["message"]
    items = [item["content"][0]["text"] for item in responses["output"] if "content" in item]
    parts = [block.get("thinking") or block["text"] for block in messages["content"] if block["type"] != "tool_use"]
    assert [message["reasoning_content"], message["content"]] == items == parts == [thought, SAID]
    deltas = [piece["choices"][0]["delta"] for piece in pieces]
    names = ("reasoning_content", "content")
    assert in_order((name, delta.get(name)) for delta in deltas for name in names) == items
    assert in_order((event["type"], event["delta"]) for event in events if "_text.delta" in event["type"]) == items
    deltas = [event["delta"] for event in blocks if event["type"] == "content_block_delta"]
    assert in_order((delta["type"], delta.get("thinking") or delta.get("text")) for delta in deltas) == items


def text_of(items):
    return "".join(
        item.get("text") or "".join(part["text"] for part in item.get("content", ()) if part["type"] == "output_text")
        for item in items
    )


def blocks_of(streamed):
    """The content that the events of `/v1/messages` build up."""
    blocks = []
    for event in streamed:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]) | {"json": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                blocks[-1]["json"] += delta["partial_json"]
            else:
                kind = delta["type"].removesuffix("_delta")
                blocks[-1][kind] += delta[kind]
    return [block | ({"input": json.loads(block["json"])} if block["json"] else {}) for block in blocks]


def test_a_stream_of_responses_has_the_log_probability_of_each_token(server):
    """Text is held back as long as it may become a mark; the log-probabilities of its tokens come with it."""
    body = {"input": "2+3?", "max_output_tokens": 40, "seed": 5, "include": [LOGPROBS]}

    def scores(entries):
        return [(entry["token"], round(entry["logprob"], 4)) for entry in entries]

    def of_message(response):
        (message,) = (item for item in response["output"] if item["type"] == "message")
        return scores(message["content"][0]["logprobs"])

    wanted = of_message(server.ask(RESPONSES, body)[1])
    streamed = server.events(RESPONSES, body)
    deltas = [event["logprobs"] for event in streamed if event["type"] == "response.output_text.delta"]
    (done,) = (event["logprobs"] for event in streamed if event["type"] == "response.output_text.done")
    assert len(wanted) == 40 and of_message(streamed[-1]["response"]) == scores(done) == wanted
    assert scores(entry for entries in deltas for entry in entries) == wanted


def as_sampled(session, count):
    """Its calls are one row, in which each sampled token is once."""
    (row,) = conversations_of(session.calls)
    assert len(session.calls) == count and sum(row.mask) == sum(len(entry.ids) for entry in session.calls)


@pytest.mark.parametrize("streams", [False, True])
def test_a_conversation_of_responses_is_one_row(streams):
    def ask(items, before=None):
        body = {"model": "policy", "tools": [FLAT], "input": items, "previous_response_id": before}
        if not streams:
            return server.ask("/s/one/v1/responses", body)[1]
        return server.events("/s/one/v1/responses", body)[-1]["response"]

    with scripted(PLAN, "Rain.</reason>It rains.", "Yes.", "Rome.", "Yes.") as server:
        session = server.session()
        first = ask(ASK)
        assert [item["type"] for item in first["output"]] == ["reasoning", "function_call"]
        thought, call = first["output"]
        assert thought["content"][0]["text"] == "I look." and json.loads(call["arguments"]) == {"city": "Rome"}
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
        second = ask([*ASKED, *first["output"], result])
        assert second["output"][-1]["content"][0]["text"] == "It rains." and second["status"] == "completed"
        third = ask("Sure?", second["id"])
        assert third["output"][-1]["content"][0]["text"] == "Yes."
        begun = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "In "}]
        ask("Sure?", ask(begun, third["id"])["id"])
        as_sampled(session, 5)


def item(kind, text):
    """An item of `/v1/responses`."""
    return {
        "thought": {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]},
        "call": {"type": "function_call", "call_id": text, "name": "weather", "arguments": "{}"},
    }.get(kind) or {"type": "message", "role": kind, "content": text}


def turn(content, *ids, thought=""):
    calls = [{"id": own_id, "type": "function", "function": {"name": "weather", "arguments": "{}"}} for own_id in ids]
    fields = {"content": content, "reasoning_content": thought, "tool_calls": calls}
    return {"role": "assistant"} | {name: value for name, value in fields.items() if value or name == "content"}


TURNS = {
    "thought:a thought:b assistant:x": [turn("x", thought="a\nb")],
    "thought:a call:1 thought:b call:2": [turn("", "1", "2", thought="a\nb")],
    "thought:a assistant:x thought:b call:1": [turn("x", "1", thought="a\nb")],
    "call:1 assistant:x": [turn("x", "1")],
    "assistant:x thought:b assistant:y": [turn("x"), turn("y", thought="b")],
    "thought:a user:y": [turn("", thought="a"), {"role": "user", "content": "y"}],
}


@pytest.mark.parametrize("items", TURNS)
def test_the_items_of_a_turn_are_one_message(items):
    messages = messages_of([item(*word.split(":")) for word in items.split()])
    assert [{name: value for name, value in message.items() if name != WHERE} for message in messages] == TURNS[items]


def test_a_response_names_the_sampling_that_it_was_drawn_with():
    with scripted(*["Yes."] * 3) as server:
        server.endpoint.loop.engine.programs.settings.sampling = g.SamplingConfig(temperature=0.6, top_p=0.9)
        body, own = {"input": "2+3?"}, {"temperature": 0, "top_p": 0.5}
        answers = [server.ask(RESPONSES, body | fields)[1] for fields in ({}, own)]
        server.session()
        answers.append(server.ask("/s/one/v1/responses", body | own)[1])
    assert [(answer["temperature"], answer["top_p"]) for answer in answers] == [(0.6, 0.9), (0, 0.5), (0.6, 0.9)]


@pytest.mark.parametrize("streams", [False, True])
def test_a_conversation_of_messages_is_one_row(streams):
    def ask(messages):
        body = {"model": "policy", "max_tokens": 99, "tools": [OWN], "messages": messages}
        if not streams:
            answer = server.ask("/s/one/v1/messages", body)[1]
            return answer["content"], answer["stop_reason"]
        streamed = server.events("/s/one/v1/messages", body)
        return blocks_of(streamed), streamed[-2]["delta"]["stop_reason"]

    with scripted(PLAN, "Rain.</reason>It rains.", "Yes.") as server:
        session = server.session()
        content, reason = ask(ASKED)
        assert [block["type"] for block in content] == ["thinking", "tool_use"] and reason == "tool_use"
        assert content[0]["thinking"] == "I look." and content[1]["input"] == {"city": "Rome"}
        result = {"type": "tool_result", "tool_use_id": content[1]["id"], "content": [{"type": "text", "text": "rain"}]}
        messages = [*ASKED, {"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
        content, reason = ask(messages)
        assert content[-1]["text"] == "It rains." and reason == "end_turn"
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "Sure?"}]
        assert ask(messages)[0][-1]["text"] == "Yes."
        as_sampled(session, 3)


@pytest.mark.parametrize(
    ("path", "choice"),
    [
        (CHAT, {"type": "function", "function": {"name": "weather"}}),
        (CHAT, "required"),
        (RESPONSES, {"type": "function", "name": "weather"}),
        (MESSAGES, {"type": "tool", "name": "weather"}),
        (MESSAGES, {"type": "any"}),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
def test_a_forced_call_is_begun_for_the_policy(path, choice, streams):
    """The opening of the call is context, which is not trained; the call counts as one, and the dialogue goes on."""
    with scripted('"city": "Rome"}}\n</tool_call>', "Rain.</reason>It rains.") as server:
        session = server.session()
        body = {"tools": [TOOLS[path]], "tool_choice": choice, "max_tokens": 99, "stream": streams}
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
        given = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
        messages = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [given]}]
        messages.append({"role": "tool", "tool_call_id": "c", "content": "rain"})
        server.ask("/s/one/v1/chat/completions", {"messages": messages, "tools": [WEATHER]})
        as_sampled(session, 2)


MANY = "".join(CALL.replace("Rome", str(number)) for number in range(12))


@pytest.mark.parametrize("stream", [False, True])
def test_several_calls_have_ids_that_sort_as_they_stand(stream):
    """A client may send them back sorted by id. Of a stream, some clients read only the first call of a piece."""
    with scripted(*[MANY] * 3, config=g.TextConfig(max_calls_per_turn=20)) as server:
        for path, tool in TOOLS.items():
            body = BODIES[path] | {"tools": [tool]}
            answer = server.events(path, body) if stream else server.ask(path, body)[1]
            ids = list(dict.fromkeys(re.findall(r"(?:call|toolu)_[0-9a-f]{24}", json.dumps(answer))))
            assert len(ids) == 12 and ids == sorted(ids), path
            if stream and "chat" in path:
                parts = [piece["choices"][0]["delta"].get("tool_calls", []) for piece in answer]
                calls = [call for part in parts for call in part]
                cities = [json.loads(call["function"]["arguments"])["city"] for call in calls]
                assert max(map(len, parts)) == 1 and cities == [str(number) for number in range(12)]
                assert [call["index"] for call in calls] == list(range(12))
