"""Clients of others against the server: `openai`, `anthropic`, and agents that use them, where they are installed."""

import asyncio
from dataclasses import replace
from functools import partial

import pytest

from grpo_roc_jax.serving.recorded_calls import conversations_of
from grpo_roc_jax.text.config import TextConfig
from tests.helpers.serving import ROLLOUT, WEATHER, scripted, served

openai = pytest.importorskip("openai", reason="needs the openai client: pip install openai")
ASK = [{"role": "user", "content": "What is two and three?"}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
FLAT = {"type": "function", "strict": False, **WEATHER["function"]}
LOGPROBS = ["message.output_text.logprobs"]


@pytest.fixture(scope="module")
def client():
    with served(token="secret") as server:
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/s/one/v1", api_key="secret", max_retries=0)


def test_a_conversation(client):
    ask = partial(client.chat.completions.create, model="policy", max_tokens=9, extra_body={"return_token_ids": True})
    first = ask(messages=ASK, logprobs=True)
    (choice,) = first.choices
    assert choice.finish_reason in ("length", "stop") and len(choice.logprobs.content) == first.usage.completion_tokens
    assert first.usage.prompt_tokens == len(first.prompt_token_ids)
    more = [*ASK, choice.message.model_dump(exclude_none=True), {"role": "user", "content": "Sure?"}]
    second = ask(messages=more)
    before = first.prompt_token_ids + choice.token_ids
    assert second.prompt_token_ids[: len(before)] == before
    assert second.usage.prompt_tokens_details.cached_tokens >= len(before) // 16 * 16 - 16


def test_streams_and_completions(client):
    fields = {"model": "policy", "messages": ASK, "max_tokens": 12, "seed": 4}
    full = client.chat.completions.create(**fields).choices[0].message.content
    with client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == full
    assert chunks[-1].usage.completion_tokens > 0
    text = client.completions.create(model="policy", prompt=[5, 6, 7], max_tokens=4, n=2, logprobs=1)
    assert [len(choice.logprobs.tokens) for choice in text.choices] == [4, 4]
    assert client.models.list().data[0].id == "policy"


@pytest.mark.parametrize(
    "text", ["I look.</reason>" + CALL + CALL.replace("Rome", "Oslo"), "So.</reason>Rain.", "So.</reason>"]
)
def test_answers_and_events_have_all_fields_of_the_clients_types(text):
    """The client itself checks nothing; programs that do find nothing missing. A stream ends with the whole answer."""
    pydantic = pytest.importorskip("pydantic")
    from openai.types.chat import ChatCompletion, ChatCompletionChunk
    from openai.types.responses import Response, ResponseStreamEvent

    event = pydantic.TypeAdapter(ResponseStreamEvent)
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


def test_errors_are_those_that_the_client_knows(client):
    with pytest.raises(openai.BadRequestError, match="leaves no room"):
        client.chat.completions.create(model="policy", messages=ASK, tools=[WEATHER])
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.NotFoundError, match="no response 'resp_1' is remembered"):
        client.responses.create(model="policy", input="x", previous_response_id="resp_1")


@pytest.mark.parametrize("form", ["chat", "responses"])
def test_openai_agents_as_it_is(form):
    """A call, its result, an answer, then a further question: one conversation, streamed or not, in either form."""
    agents = pytest.importorskip("agents", reason="needs openai-agents: pip install openai-agents")
    agents.set_tracing_disabled(True)
    cities = []

    @agents.function_tool
    def weather(city: str) -> str:
        """Says the weather."""
        cities.append(city)
        return f"rain in {city}"

    async def answer(agent, messages, streams):
        if not streams:
            return await agents.Runner.run(agent, messages)
        result = agents.Runner.run_streamed(agent, messages)
        async for _ in result.stream_events():
            pass
        return result

    async def converse(url, streams):
        make = agents.OpenAIChatCompletionsModel if form == "chat" else agents.OpenAIResponsesModel
        model = make("policy", openai.AsyncOpenAI(base_url=url, api_key="none"))
        agent = agents.Agent(name="forecaster", instructions="Use the tool.", tools=[weather], model=model)
        first = await answer(agent, "What is the weather in Rome?", streams)
        more = [*first.to_input_list(), {"role": "user", "content": "Sure?"}]
        return first.final_output, (await answer(agent, more, streams)).final_output

    with scripted(*[CALL, "It rains.", "Yes."] * 2) as server:
        for streams in (False, True):
            session = server.session()
            url = f"http://127.0.0.1:{server.port}/s/one/v1"
            assert asyncio.run(converse(url, streams)) == ("It rains.", "Yes.")
            (row,) = conversations_of(session.calls)
            assert len(session.calls) == 3 and sum(row.mask) == sum(len(call.ids) for call in session.calls)
    assert cities == ["Rome", "Rome"]


def test_an_agent_framework_is_one_conversation():
    """smolagents as it is: it forces tool calls, sends parts of content, writes its errors as messages of a user."""
    smolagents = pytest.importorskip("smolagents", reason="needs smolagents: pip install 'smolagents[openai]'")
    rollout = replace(ROLLOUT, slots=2, block=64, max_prompt_tokens=8192, max_response_tokens=1024)
    with served(rollout) as server:
        session, url = server.session(), f"http://127.0.0.1:{server.port}/s/one/v1"
        model = smolagents.OpenAIServerModel("policy", url, "none", max_tokens=12, temperature=0.3)
        agent = smolagents.ToolCallingAgent(tools=[], model=model, max_steps=2, verbosity_level=0)
        agent.run("What is 2 + 3?")
    assert len(session.calls) >= 2
    rows = conversations_of(session.calls[:2])
    assert len(rows) == 1 and sum(rows[0].mask) == sum(len(call.ids) for call in session.calls[:2])


def test_the_client_reads_responses():
    with scripted(CALL, "It rains.") as server:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
        first = client.responses.create(model="policy", input=ASK, tools=[FLAT])
        (call,) = [item for item in first.output if item.type == "function_call"]
        given = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
        more = {"input": given, "tools": [FLAT], "previous_response_id": first.id}
        with client.responses.stream(model="policy", **more) as stream:
            kinds = [event.type for event in stream]
            last = stream.get_final_response()
    assert last.output_text == "It rains." and "response.output_text.delta" in kinds
    assert last.usage.output_tokens > 0 and last.previous_response_id == first.id


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
