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
    assert first == again and len({tuple(one["token_ids"]) for one in first}) == 3
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
    "repetition_penalty": (0, -1),
    "logit_bias": ({"x": 1}, {"-1": 1}, {"400": 1}, {"5": 101}, {"5": None}, [5]),
}


@pytest.mark.parametrize("path", PATHS)
def test_wrong_values_are_refused_by_name(server, path):
    body, place = PATHS[path]
    for name, values in REFUSED.items():
        for value in values:
            status, answer = server.ask(path, body | place({name: value}))
            error = answer["error"]
            assert status == 400 and error["param"] == name and name in error["message"], (name, value, error)
    for fields in ({"prompt_logprobs": 1}, {"min_tokens": 3}, {"ignore_eos": True}, {"bad_words": ["x"]}):
        status, answer = server.ask(path, body | place(fields))
        if path != "/v1/responses":  # which has none of these
            assert status == 400 and "not supported" in answer["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
def test_right_values_are_taken_everywhere(server, path):
    body, place = PATHS[path]
    fields = {"top_p": 0.9, "top_k": 50, "min_p": 0.01, "temperature": 0.7, "seed": 3, "logit_bias": {"5": -2}}
    status, answer = server.ask(path, body | place(fields | {"presence_penalty": 0.5, "frequency_penalty": -0.5}))
    assert status == 200, answer


def test_a_biased_end_ends_the_turn(server):
    end = str(small_policy()[0].end_id)
    status, answer = server.ask("/v1/chat/completions", CHAT | {"logit_bias": {end: 100}})
    assert status == 200 and answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 1
