"""The client that most agents use, `openai`, against the server. It is not among the requirements of the tests."""

import pytest
from serving import WEATHER, served

openai = pytest.importorskip("openai", reason="needs the openai client: pip install openai")
ASK = [{"role": "user", "content": "What is two and three?"}]


@pytest.fixture(scope="module")
def client():
    with served(token="secret") as server:
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/s/one/v1", api_key="secret", max_retries=0)


def test_a_conversation(client):
    first = client.chat.completions.create(
        model="policy", messages=ASK, max_tokens=9, logprobs=True, extra_body={"return_token_ids": True}
    )
    (choice,) = first.choices
    assert choice.finish_reason in ("length", "stop") and len(choice.logprobs.content) == first.usage.completion_tokens
    assert first.usage.prompt_tokens == len(first.prompt_token_ids)
    more = [*ASK, choice.message.model_dump(exclude_none=True), {"role": "user", "content": "Sure?"}]
    second = client.chat.completions.create(
        model="policy", messages=more, max_tokens=9, extra_body={"return_token_ids": True}
    )
    before = first.prompt_token_ids + choice.token_ids
    assert second.prompt_token_ids[: len(before)] == before
    assert second.usage.prompt_tokens_details.cached_tokens >= len(before) // 16 * 16 - 16


def test_streams_and_completions(client):
    fields = {"model": "policy", "messages": ASK, "max_tokens": 12, "seed": 4}
    whole = client.chat.completions.create(**fields).choices[0].message.content
    with client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    assert chunks[-1].usage.completion_tokens > 0
    text = client.completions.create(model="policy", prompt=[5, 6, 7], max_tokens=4, n=2, logprobs=1)
    assert [len(choice.logprobs.tokens) for choice in text.choices] == [4, 4]
    assert client.models.list().data[0].id == "policy"


def test_errors_are_those_that_the_client_knows(client):
    with pytest.raises(openai.BadRequestError, match="leaves no room"):
        client.chat.completions.create(model="policy", messages=ASK, tools=[WEATHER])
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.InternalServerError, match="Responses API"):
        client.responses.create(model="policy", input="x")
