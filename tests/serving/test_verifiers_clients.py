"""The clients of verifiers against the server: the one for evaluation, and the token route of the one for training."""

import asyncio
from types import SimpleNamespace

import pytest

from tests.helpers.serving import WEATHER, scripted, small_policy

vf = pytest.importorskip("verifiers.v1", reason="needs the extra verifiers; .ci/adapters runs this")
ASK = [{"role": "user", "content": "Rain in Rome?"}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'


def test_its_client_for_evaluation_reads_calls_usage_and_streams(monkeypatch):
    from verifiers.v1.dialects.chat import ChatDialect

    monkeypatch.setenv("NO_KEY", "none")

    async def ask(url):
        client = vf.resolve_client(vf.EvalClientConfig(base_url=url, api_key_var="NO_KEY"))
        body = {"model": "policy", "messages": ASK, "tools": [WEATHER], "return_token_ids": True}
        first = await client.get_response(ChatDialect(), body, vf.SamplingConfig(), session_id="one")
        message = first.raw["choices"][0]["message"]
        more = [*ASK, message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "yes"}]
        second = await client.get_response(ChatDialect(), body | {"messages": more}, vf.SamplingConfig(), "one")
        reply = await client.relay(ChatDialect(), body | {"stream": True}, "one")
        events = b"".join([chunk async for chunk in reply.chunks])
        await reply.close()
        return first, second, events

    with scripted(CALL, "It rains.", "Yes.") as server:
        first, second, events = asyncio.run(ask(f"http://127.0.0.1:{server.port}/v1"))
    (called,) = first.message.tool_calls
    assert (called.name, called.arguments, first.finish_reason) == ("weather", '{"city": "Rome"}', "tool_calls")
    before = first.raw["prompt_token_ids"] + first.raw["choices"][0]["token_ids"]
    assert second.message.content == "It rains." and second.raw["prompt_token_ids"][: len(before)] == before
    assert second.usage.prompt_tokens == len(second.raw["prompt_token_ids"])
    assert b'"Yes."' in events and events.endswith(b"data: [DONE]\n\n")


def test_the_token_route_as_its_client_for_training_asks():
    from openai import AsyncOpenAI
    from renderers.client import generate

    chat = small_policy()[0]
    parsed = SimpleNamespace(content="", reasoning_content=None, tool_calls=[], reasoning_complete=True)
    renderer = SimpleNamespace(get_stop_token_ids=lambda: sorted(chat.stop_ids), parse_response=lambda *a, **k: parsed)

    async def ask(url):
        client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
        sampling = {"temperature": 1.0, "max_tokens": 30, "routed_experts_prompt_start": 0}
        fields = {"prompt_ids": [5, 6, 7], "sampling_params": sampling, "extra_headers": {"X-Session-ID": "one"}}
        return await generate(client=client, renderer=renderer, messages=ASK, model="policy", **fields)

    with scripted("It rains.") as server:
        result = asyncio.run(ask(f"http://127.0.0.1:{server.port}/v1"))
    assert result["completion_ids"] == chat.turn_ids("It rains.") and result["finish_reason"] == "stop"
    assert result["completion_logprobs"] == [-0.5 * token for token in result["completion_ids"]]
