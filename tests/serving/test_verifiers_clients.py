"""The client of verifiers for evaluation against the server."""

import asyncio

import pytest

from tests.helpers.serving import WEATHER, scripted

vf = pytest.importorskip("verifiers.v1", reason="needs the extra verifiers; .ci/adapters runs this")
ASK = [{"role": "user", "content": "Rain in Rome?"}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'


def test_its_client_for_evaluation_reads_calls_and_usage(monkeypatch):
    from verifiers.v1.dialects.chat import ChatDialect

    monkeypatch.setenv("NO_KEY", "none")

    async def ask(url):
        client = vf.resolve_client(vf.EvalClientConfig(base_url=url, api_key_var="NO_KEY"))
        body = {"model": "policy", "messages": ASK, "tools": [WEATHER], "return_token_ids": True}
        first = await client.get_response(ChatDialect(), body, vf.SamplingConfig(), session_id="one")
        message = first.raw["choices"][0]["message"]
        more = [*ASK, message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "yes"}]
        return first, await client.get_response(ChatDialect(), body | {"messages": more}, vf.SamplingConfig(), "one")

    with scripted(CALL, "It rains.") as server:
        first, second = asyncio.run(ask(f"http://127.0.0.1:{server.port}/v1"))
    (called,) = first.message.tool_calls
    assert (called.name, called.arguments, first.finish_reason) == ("weather", '{"city": "Rome"}', "tool_calls")
    before = first.raw["prompt_token_ids"] + first.raw["choices"][0]["token_ids"]
    assert second.message.content == "It rains." and second.raw["prompt_token_ids"][: len(before)] == before
    assert second.usage.prompt_tokens == len(second.raw["prompt_token_ids"])
