"""Clients of others against the server: `openai`, `anthropic`, and agents that use them, where they are installed."""

import pytest

from grpo_roc_jax.text.config import TextConfig
from tests.helpers.serving import WEATHER, scripted, served

openai = pytest.importorskip("openai", reason="needs the openai client: pip install openai")
from openai.types.chat import ChatCompletion, ChatCompletionChunk  # noqa: E402
from openai.types.responses import Response, ResponseStreamEvent  # noqa: E402

ASK = [{"role": "user", "content": "What is two and three?"}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
FLAT = {"type": "function", "strict": False, **WEATHER["function"]}
LOGPROBS = ["message.output_text.logprobs"]


def test_a_conversation():
    with served(token="secret") as server:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/s/one/v1", api_key="secret", max_retries=0)
        fields = {"model": "policy", "max_tokens": 9, "extra_body": {"return_token_ids": True}}
        first = client.chat.completions.create(messages=ASK, logprobs=True, **fields)
        (choice,) = first.choices
        more = [*ASK, choice.message.model_dump(exclude_none=True), {"role": "user", "content": "Sure?"}]
        second = client.chat.completions.create(messages=more, **fields)
    assert choice.finish_reason in ("length", "stop") and len(choice.logprobs.content) == first.usage.completion_tokens
    before = first.prompt_token_ids + choice.token_ids
    assert second.prompt_token_ids[: len(before)] == before


@pytest.mark.parametrize("text", ["I look.</reason>" + CALL + CALL.replace("Rome", "Oslo"), "So.</reason>Rain."])
def test_answers_and_events_have_all_fields_of_the_clients_types(text):
    """The client itself checks nothing; programs that do find nothing missing. A stream ends with the whole answer."""
    event = pytest.importorskip("pydantic").TypeAdapter(ResponseStreamEvent)
    with scripted(*[text] * 4, config=TextConfig(max_calls_per_turn=2)) as server:
        body = {"input": "x", "model": "policy", "tools": [FLAT], "top_logprobs": 1, "include": LOGPROBS}
        answer = server.ask("/v1/responses", body)[1]
        Response.model_validate(answer)
        events = server.events("/v1/responses", body)
        for payload in events:
            event.validate_python(payload)
        items = [payload["item"] for payload in events if payload["type"] == "response.output_item.done"]
        assert items == events[-1]["response"]["output"]
        assert [item["type"] for item in items] == [item["type"] for item in answer["output"]]
        body = {"messages": ASK, "model": "policy", "tools": [WEATHER], "logprobs": True}
        ChatCompletion.model_validate(server.ask("/v1/chat/completions", body)[1])
        for chunk in server.events("/v1/chat/completions", body | {"stream_options": {"include_usage": True}}):
            ChatCompletionChunk.model_validate(chunk)


def test_the_anthropic_client_reads_messages():
    anthropic = pytest.importorskip("anthropic", reason="needs the anthropic client: pip install anthropic")
    with scripted(*["I look.</reason>" + CALL] * 2, "Rain.</reason>It rains.") as server:
        client = anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.port}", api_key="none", max_retries=0)
        tool = {"name": "weather", "input_schema": WEATHER["function"]["parameters"]}
        fields = {"model": "policy", "max_tokens": 99, "tools": [tool]}
        message = client.messages.create(messages=ASK, **fields)
        with client.messages.stream(messages=ASK, **fields) as stream:
            streamed = stream.get_final_message()
        assert [block.type for block in message.content] == [block.type for block in streamed.content]
        call = streamed.content[-1]
        assert streamed.stop_reason == "tool_use" and call.input == {"city": "Rome"}
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
        messages = [*ASK, {"role": "assistant", "content": streamed.content}, {"role": "user", "content": [result]}]
        last = client.messages.create(messages=messages, **fields)
        assert last.content[-1].text == "It rains." and last.usage.output_tokens > 0
        assert client.messages.count_tokens(model="policy", messages=ASK).input_tokens > 0
