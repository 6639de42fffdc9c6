"""Sampling fields of a request: honoured beside requests with other values, or refused with a reason."""

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.helpers.serving import served, small_policy
from tests.serving.test_endpoint import direct

PROMPT = [5, 6, 7, 300, 9]
CHAT = {"messages": [{"role": "user", "content": "Two and three?"}], "max_tokens": 12}


@pytest.fixture(scope="module")
def server():
    with served() as found:
        yield found


def drawn(server, **fields):
    body = {"prompt": PROMPT, "max_tokens": 24, "seed": 1, "return_token_ids": True, "logprobs": 1} | fields
    status, answer = server.ask("/v1/completions", body)
    assert status == 200, answer
    return answer["choices"]


def test_requests_of_one_batch_have_their_own_values(server):
    """What one asks changes nothing of what another one draws."""
    greedy = direct(PROMPT, 24, temperature=0.0).tokens[5:].tolist()
    plain = direct(PROMPT, 24, place=1).tokens[5:].tolist()
    asked = [
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
        found = list(pool.map(lambda fields: drawn(server, **fields)[0]["token_ids"], asked * 2))
    for first, again in zip(found[:8], found[8:], strict=True):
        assert first == again
    assert found[0] == found[6] == plain
    assert all(found[i] == greedy for i in (1, 2, 3, 4, 7))
    assert found[5] == [17] * 24


def test_penalties_are_those_of_drawn_tokens(server):
    """Greedy with a penalty of 2 for each time that a token was drawn, beside a loop over the logits of the model."""
    biased = {"logit_bias": {"17": 60, "21": 59}, "temperature": 0}
    assert [one["token_ids"][:6] for one in drawn(server, **biased)] == [[17] * 6]
    (found,) = drawn(server, **biased, frequency_penalty=2)
    counts = Counter(found["token_ids"])
    assert set(counts) == {17, 21} and abs(counts[17] - counts[21]) <= 4
    (found,) = drawn(server, **biased, presence_penalty=2)
    assert len(set(found["token_ids"][:2])) == 2 or found["token_ids"][0] == 17
    (found,) = drawn(server, **biased, repetition_penalty=50)
    assert {17, 21} <= set(found["token_ids"]) and len(set(found["token_ids"][:2])) == 2


def test_log_probabilities_are_those_of_the_policy_whatever_was_asked(server):
    wanted = direct(PROMPT, 24, temperature=0.0)
    (found,) = drawn(server, top_k=1, temperature=1)
    np.testing.assert_allclose(found["logprobs"]["token_logprobs"], wanted.logprobs[5:], atol=1e-5)


def test_choices_of_one_request_are_steered_each_and_a_seed_repeats_them(server):
    first, again = (drawn(server, n=3, top_k=20, presence_penalty=1.5, seed=7) for _ in range(2))
    for one, other in zip(first, again, strict=True):  # log-probabilities depend on the width of the batch by rounding
        scores = [choice.pop("logprobs")["token_logprobs"] for choice in (one, other)]
        assert one == other and scores[0] == pytest.approx(scores[1], abs=1e-4)
    assert len({tuple(one["token_ids"]) for one in first}) == 3
    stream = server.ask("/v1/completions", {
        "prompt": PROMPT, "max_tokens": 24, "seed": 7, "n": 3, "top_k": 20, "presence_penalty": 1.5, "stream": True,
    })[1]  # fmt: skip
    texts = Counter()
    for piece in map(json.loads, stream[:-1]):
        texts[piece["choices"][0]["index"]] = texts.get(piece["choices"][0]["index"], "") + piece["choices"][0]["text"]
    assert [texts[i] for i in range(3)] == [one["text"] for one in first]


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
    body, place = PATHS[path]
    for name, values in REFUSED.items():
        for value in values:
            status, answer = server.ask(path, body | place({name: value}))
            error = answer["error"]
            assert status == 400 and error["param"] == name and name in error["message"], (name, value, error)
    for fields in ({"prompt_logprobs": 1}, {"echo": True}, {"best_of": 2}, {"use_beam_search": True}):
        status, answer = server.ask(path, body | place(fields))
        if path != "/v1/responses":  # which has none of these
            assert status == 400 and "not supported" in answer["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
def test_right_values_are_taken_everywhere(server, path):
    body, place = PATHS[path]
    fields = {"top_p": 0.9, "top_k": 50, "min_p": 0.01, "temperature": 0.7, "seed": 3, "logit_bias": {"5": -2}}
    fields |= {"min_tokens": 2, "ignore_eos": True, "bad_words": ["xyz"], "stop_token_ids": [17]}
    status, answer = server.ask(path, body | place(fields | {"presence_penalty": 0.5, "frequency_penalty": -0.5}))
    assert status == 200, answer


END = small_policy()[0].end_id


def test_a_minimum_of_tokens_holds_for_ends_and_stop_ids_and_not_longer(server):
    """The end is what every draw would be."""
    for ends in ({"logit_bias": {str(END): 100}}, {"logit_bias": {"17": 100}, "stop_token_ids": [17]}):
        for least in (0, 1, 5, 6, 24):
            (found,) = drawn(server, **ends, min_tokens=least)
            assert len(found["token_ids"]) == min(least + 1, 24)
            assert found["finish_reason"] == ("length" if least == 24 else "stop")
    both = [{"logit_bias": {str(END): 100}, "min_tokens": least} for least in (3, 9)] * 2 + [{}]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda fields: drawn(server, **fields)[0]["token_ids"], both))
    assert list(map(len, found[:4])) == [4, 10, 4, 10] and found[4] == drawn(server)[0]["token_ids"]


def test_an_end_that_is_ignored_is_a_token_like_others(server):
    (found,) = drawn(server, logit_bias={str(END): 100}, ignore_eos=True)
    assert found["token_ids"] == [END] * 24 and found["finish_reason"] == "length"
    (found,) = drawn(server, logit_bias={str(END): 100}, ignore_eos=True, stop_token_ids=[END])
    assert found["token_ids"] == [END], "what the request names ends it"
    status, answer = server.ask("/v1/chat/completions", CHAT | {"logit_bias": {str(END): 100}, "ignore_eos": True})
    assert status == 200 and answer["usage"]["completion_tokens"] == CHAT["max_tokens"]


def test_bad_words_do_not_come_and_their_beginnings_do(server):
    tokenizer = small_policy()[0].tokenizer
    (ids,) = (tokenizer.encode(text) for text in ("ab",))
    assert len(ids) == 2
    want = {"logit_bias": {str(ids[0]): 60, str(ids[1]): 59}, "frequency_penalty": 2, "repetition_penalty": 1.5}
    (found,) = drawn(server, **want)
    assert "ab" in found["text"]
    (found,) = drawn(server, **want, bad_words=["ab"])
    assert "ab" not in found["text"] and set(ids) <= set(found["token_ids"])
    (found,) = drawn(server, **want, bad_words=["a"])
    assert ids[0] not in found["token_ids"]


def test_the_most_likely_tokens_are_those_of_the_policy_at_each_position(server):
    """In a stream too, beside rows that do not ask; a greedy row draws the first of them."""
    for temperature in (0, 1):
        (found,) = drawn(server, logprobs=5, temperature=temperature)
        tops = found["logprobs"]["top_logprobs"]
        assert len(tops) == 24
        for top, value in zip(tops, found["logprobs"]["token_logprobs"], strict=True):
            assert 1 <= len(top) <= 6 and (temperature or max(top.values()) == pytest.approx(value, abs=1e-5))
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 24, "seed": 1, "logprobs": 20}}
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(drawn, server)
        content = server.ask("/inference/v1/generate", body)[1]["choices"][0]["logprobs"]["content"]
        assert [one["token_id"] for one in content] == other.result()[0]["token_ids"]
    for one in content:
        values = [top["logprob"] for top in one["top_logprobs"]]
        assert values == sorted(values, reverse=True) and len(values) == 20 and sum(map(np.exp, values)) <= 1.0001
        same = [top["logprob"] for top in one["top_logprobs"] if top["token_id"] == one["token_id"]]
        assert not same or same[0] == pytest.approx(one["logprob"], abs=1e-5)
    chat = CHAT | {"logprobs": True, "top_logprobs": 3, "seed": 4}
    whole = server.ask("/v1/chat/completions", chat)[1]["choices"][0]["logprobs"]["content"]
    pieces = map(json.loads, server.ask("/v1/chat/completions", chat | {"stream": True})[1][:-1])
    found = [piece["choices"][0].get("logprobs") for piece in pieces]
    assert [token for one in found if one for token in one["content"]] == whole
    assert all(len(token["top_logprobs"]) == 3 and token["top_logprobs"][0]["bytes"] for token in whole)
    asked = {"input": "Two?", "max_output_tokens": 4, "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    (item,) = server.ask("/v1/responses", asked)[1]["output"]
    assert [len(token["top_logprobs"]) for token in item["content"][0]["logprobs"]] == [2] * 4


@pytest.mark.parametrize("path", [*PATHS, "/v1/messages"])
def test_fields_that_nothing_reads_are_named_in_a_header(server, path):
    body, place = PATHS.get(path, (CHAT, lambda fields: fields))
    idle = {"user": "me", "metadata": {"a": "b"}, "reasoning_effort": None, "skip_special_tokens": True}
    assert server.header("X-Not-Applied", path, body | place(idle)) is None
    odd = {
        "include_stop_str_in_output": True,
        "chat_template_kwargs": {"thinking": False},
        "a\r\nX-B: c": 1,
        "\u00e9": 1,
    }
    assert server.header("X-Not-Applied", path, body | place(odd)) == "include_stop_str_in_output, chat_template_kwargs"
    many = {f"field{i}": 1 for i in range(5000)}
    assert server.header("X-Not-Applied", path, body | place(many)).count(",") == 31


def test_a_biased_end_ends_the_turn(server):
    end = str(END)
    status, answer = server.ask("/v1/chat/completions", CHAT | {"logit_bias": {end: 100}})
    assert status == 200 and answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 1


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
