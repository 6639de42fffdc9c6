"""Sampling fields of a request: honoured beside requests with other values, or refused with a reason."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from grpo_roc_jax.engine.steering import DrawSettings
from tests.helpers.serving import direct, small_policy
from tests.helpers.serving import server as server  # a fixture

PROMPT = [5, 6, 7, 300, 9]
END = small_policy()[0].end_id
CHAT = {"messages": [{"role": "user", "content": "Two and three?"}], "max_tokens": 12}


def drawn(server, **fields):
    body = {"prompt": PROMPT, "max_tokens": 24, "seed": 1, "return_token_ids": True, "logprobs": 1} | fields
    status, answer = server.ask("/v1/completions", body)
    assert status == 200, answer
    return answer["choices"]


def test_requests_of_one_batch_have_their_own_values(server):
    """What one asks changes nothing of what another one draws."""
    wanted = direct(PROMPT, 24, temperature=0.0)
    greedy = wanted.tokens[5:].tolist()
    plain = direct(PROMPT, 24, place=1).tokens[5:].tolist()
    requests = [
        {},
        {"top_k": 1},
        {"top_p": 1e-6},
        {"min_p": 1.0},
        {"temperature": 0},
        {"logit_bias": {"17": 100, "40": 5.5}},
        {"top_k": -1, "top_p": 1, "min_p": 0, "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}},
        {"temperature": 0, "repetition_penalty": 1.0},
    ]
    with ThreadPoolExecutor(16) as pool:
        choices = [choice for (choice,) in pool.map(lambda fields: drawn(server, **fields), requests * 2)]
    tokens = [choice["token_ids"] for choice in choices]
    for first, again in zip(tokens[:8], tokens[8:], strict=True):
        assert first == again
    assert tokens[0] == tokens[6] == plain
    assert all(tokens[i] == greedy for i in (1, 2, 3, 4, 7))
    assert tokens[5] == [17] * 24
    scores = choices[1]["logprobs"]["token_logprobs"]  # of `top_k` 1: those of the policy, whatever was asked
    np.testing.assert_allclose(scores, wanted.logprobs[5:], atol=1e-5)


def test_choices_of_one_request_are_steered_each_and_a_seed_repeats_them(server):
    fields = {"n": 3, "top_k": 20, "presence_penalty": 1.5, "seed": 7}
    first, again = (drawn(server, **fields) for _ in range(2))
    for row, other in zip(first, again, strict=True):  # log-probabilities depend on the width of the batch by rounding
        scores = [choice.pop("logprobs")["token_logprobs"] for choice in (row, other)]
        assert row == other and scores[0] == pytest.approx(scores[1], abs=1e-4)
    assert len({tuple(row["token_ids"]) for row in first}) == 3
    texts = ["", "", ""]
    for piece in server.events("/v1/completions", {"prompt": PROMPT, "max_tokens": 24} | fields):
        (choice,) = piece["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == [row["text"] for row in first]


PATHS = {
    "/v1/chat/completions": (CHAT, lambda fields: fields),
    "/v1/completions": ({"prompt": PROMPT, "max_tokens": 4}, lambda fields: fields),
    "/v1/responses": ({"input": "Two?", "max_output_tokens": 4}, lambda fields: fields),
    "/inference/v1/generate": ({"token_ids": PROMPT}, lambda fields: {"sampling_params": {"max_tokens": 4, **fields}}),
}
REFUSED = {
    "top_p": (0, -0.1, 1.5, "1", float("nan"), True),
    "top_k": (-2, 1.5, "4"),
    "min_p": (-1, 2),
    "temperature": (-1, float("inf"), "hot"),
    "seed": ("x", 1.5),
    "presence_penalty": (3, -3),
    "frequency_penalty": (2.5, "1"),
    "repetition_penalty": (0, -1, 1e-300, 0.009),
    "logit_bias": ({"x": 1}, {"-1": 1}, {"400": 1}, {"5": 101}, {"5": None}, [5]),
    "min_tokens": (-1, 1.5, 10**30, True),
    "ignore_eos": (1, "yes"),
    "bad_words": ("x", [1], [""], ["x" * 65], ["x"] * 1025),
    "top_logprobs": (-1, 21, True, "2"),
}


@pytest.mark.parametrize("path", PATHS)
def test_wrong_values_are_refused_by_name(server, path):
    body, wrap = PATHS[path]
    for name, values in REFUSED.items():
        for value in values:
            status, answer = server.ask(path, body | wrap({name: value}))
            error = answer["error"]
            assert status == 400 and error["param"] == name and name in error["message"], (name, value, error)
            assert "must" in error["message"], (name, value, error)
    absent = ({"prompt_logprobs": 1}, {"echo": True}, {"best_of": 2}, {"use_beam_search": True})
    for fields in absent if path != "/v1/responses" else ():  # which has none of these
        status, answer = server.ask(path, body | wrap(fields))
        assert status == 400 and "not supported" in answer["error"]["message"]


FIELDS = {"top_p": 0.9, "top_k": 50, "min_p": 0.01, "temperature": 0.7, "seed": 3, "logit_bias": {"5": -2}}
FIELDS |= {"min_tokens": 2, "ignore_eos": True, "bad_words": ["xyz"], "stop_token_ids": [17], "repetition_penalty": 1.2}
FIELDS |= {"presence_penalty": 0.5, "frequency_penalty": -0.5}


@pytest.mark.parametrize("path", PATHS)
def test_right_values_are_taken_everywhere(server, path):
    """What the engine makes of them is tested there (`engine/test_steering.py`)."""
    body, wrap = PATHS[path]
    fields = server.endpoint.form(path, body | wrap(FIELDS), "").fields
    cuts = {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "bias": {5: -2.0}}
    penalties = {"presence": 0.5, "frequency": -0.5, "repetition": 1.2}
    banned = tuple(small_policy()[0].tokenizer.encode("xyz"))
    assert fields.draw.banned[0] == banned
    ends = {"min_tokens": 2, "ends": frozenset([17]), "banned": fields.draw.banned}
    assert fields.draw == DrawSettings(**cuts, **penalties, **ends)
    assert (fields.temperature, fields.seed, fields.ignore_eos, fields.stop_ids) == (0.7, 3, True, {17})
    status, answer = server.ask(path, body | wrap(FIELDS))
    assert status == 200, answer


def test_a_minimum_of_tokens_holds_for_ends_and_stop_ids_and_not_longer(server):
    """The end is what every draw would be."""
    for ends in ({"logit_bias": {str(END): 100}}, {"logit_bias": {"17": 100}, "stop_token_ids": [17]}):
        for least in (0, 1, 5, 6, 24):
            (result,) = drawn(server, **ends, min_tokens=least)
            assert len(result["token_ids"]) == min(least + 1, 24)
            assert result["finish_reason"] == ("length" if least == 24 else "stop")
    both = [{"logit_bias": {str(END): 100}, "min_tokens": least} for least in (3, 9)] * 2 + [{}]
    with ThreadPoolExecutor(8) as pool:
        result = list(pool.map(lambda fields: drawn(server, **fields)[0]["token_ids"], both))
    assert list(map(len, result[:4])) == [4, 10, 4, 10] and result[4] == drawn(server)[0]["token_ids"]


def test_an_end_that_is_ignored_is_a_token_like_others(server):
    (choice,) = drawn(server, logit_bias={str(END): 100}, ignore_eos=True)
    assert choice["token_ids"] == [END] * 24 and choice["finish_reason"] == "length"
    (choice,) = drawn(server, logit_bias={str(END): 100}, ignore_eos=True, stop_token_ids=[END])
    assert choice["token_ids"] == [END], "what the request names ends it"
    for ignored, length in ((True, CHAT["max_tokens"]), (False, 1)):
        answer = server.chat(**CHAT, logit_bias={str(END): 100}, ignore_eos=ignored)
        assert answer["usage"]["completion_tokens"] == length
        assert answer["choices"][0]["finish_reason"] == ("length" if ignored else "stop")


def test_the_most_likely_tokens_are_those_of_the_policy_at_each_position(server):
    """In a stream too, beside rows that do not ask; a greedy row draws the first of them."""
    tokenizer = small_policy()[0].tokenizer
    for temperature in (0, 1):
        (result,) = drawn(server, logprobs=5, temperature=temperature)
        (by_id,) = drawn(server, logprobs=5, temperature=temperature, return_tokens_as_token_ids=True)
        tops, ids = (choice["logprobs"]["top_logprobs"] for choice in (result, by_id))
        assert len(tops) == 24
        for top, others, value in zip(tops, ids, result["logprobs"]["token_logprobs"], strict=True):
            assert 5 <= len(others) <= 6 and (temperature or max(top.values()) == pytest.approx(value, abs=1e-5))
            texts = {tokenizer.token_bytes(int(name.removeprefix("token_id:"))) for name in others}
            assert len(top) == len(texts), "parts of characters have names of their own"
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 24, "seed": 1, "logprobs": 20}}
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(drawn, server)
        content = server.ask("/inference/v1/generate", body)[1]["choices"][0]["logprobs"]["content"]
        assert [entry["token_id"] for entry in content] == other.result()[0]["token_ids"]
    for entry in content:
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True) and len(values) == 20 and sum(map(np.exp, values)) <= 1.0001
        same = [top["logprob"] for top in entry["top_logprobs"] if top["token_id"] == entry["token_id"]]
        assert not same or same[0] == pytest.approx(entry["logprob"], abs=1e-5)
    chat = CHAT | {"logprobs": True, "top_logprobs": 3, "seed": 4}
    tokens = server.ask("/v1/chat/completions", chat)[1]["choices"][0]["logprobs"]["content"]
    result = [piece["choices"][0].get("logprobs") for piece in server.events("/v1/chat/completions", chat)]
    assert [token for entry in result if entry for token in entry["content"]] == tokens
    assert all(len(token["top_logprobs"]) == 3 and token["top_logprobs"][0]["bytes"] for token in tokens)
    request = {"input": "Two?", "max_output_tokens": 4, "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    (item,) = server.ask("/v1/responses", request)[1]["output"]
    assert [len(token["top_logprobs"]) for token in item["content"][0]["logprobs"]] == [2] * 4


@pytest.mark.parametrize("path", [*PATHS, "/v1/messages"])
def test_fields_that_nothing_reads_are_named_in_a_header(server, path):
    body, wrap = PATHS.get(path, (CHAT, lambda fields: fields))
    idle = {"user": "me", "metadata": {"a": "b"}, "reasoning_effort": None, "skip_special_tokens": True}
    assert server.not_applied(path, body | wrap(idle)) is None
    odd = {"include_stop_str_in_output": True, "chat_template_kwargs": {"thinking": False}}
    odd |= {"a\r\nX-B: c": 1, "\u00e9": 1}
    assert server.not_applied(path, body | wrap(odd)) == "include_stop_str_in_output, chat_template_kwargs"
    many = {f"field{i}": 1 for i in range(5000)}
    assert server.not_applied(path, body | wrap(many)).count(",") == 31


@pytest.mark.parametrize(
    "fields",
    [
        {"stop_token_ids": [2**31 - 1], "min_tokens": 2},
        {"temperature": 1e-37, "logit_bias": {"17": 100}},
        {"temperature": 1.2e-38, "logit_bias": {"17": 100}, "top_p": 0.5},
        {"repetition_penalty": 0.01, "frequency_penalty": -2},
        {"repetition_penalty": 100, "logit_bias": {"17": 100}, "frequency_penalty": -2},
    ],
)
def test_values_at_the_bounds_end_no_batch(server, fields):
    """What a row asks for is applied on the device to all rows of a batch, so an error there fails all requests."""
    assert all(len(choice["token_ids"]) for choice in drawn(server, prompt=[8, 9, 10], n=2, **fields))
