"""The Tinker API as scripts get it wrong: each request is refused with what to change, and the server goes on."""

import json
import random
import socket
import time

import numpy as np
import pytest

from tests.helpers.serving import spoiled
from tests.helpers.tinker_server import ROW, batch, classes, encoded
from tests.helpers.tinker_server import client as client  # a fixture

HUGE = 10**400
MANY = 200_000
"""Rows; a table with as many columns fits in no memory."""


def sparse(shape, crow):
    ids = [1] * crow[-1]
    return {"data": ids, "shape": shape, "sparse_crow_indices": crow, "sparse_col_indices": ids}


@pytest.fixture(scope="module")
def trained(client):
    """(model, sampling session) of a client."""
    name = client.new()
    return name, client.sampler(name, 1)


ODD = [
    ("create_model", {"session_id": "none"}, "no session"),
    ("create_model", {"model_seq_id": -1}, "model_seq_id"),
    ("create_model", {"lora_config": [4]}, "lora_config is list"),
    ("create_model", {"lora_config": {"rank": 0}}, "must be 1 to"),
    ("create_model", {"base_model": "other"}, "served here: small"),
    ("create_model", {"optimizer_config": {"type": "dimuon"}}, "must be adamw"),
    ("create_model", {"lora_config": {"train_attn": False, "train_mlp": False}}, "trains nothing"),
    ("optim_step", {"model_id": "none", "seq_id": 1}, "no model"),
    ("optim_step", {"seq_id": 0}, "seq_id"),
    ("optim_step", {"seq_id": "2"}, "seq_id is str"),
    ("optim_step", {"seq_id": 3, "adam_params": {"learning_rate": float("nan")}}, "learning_rate = nan"),
    ("optim_step", {"seq_id": 4, "adam_params": {"beta1": 1}}, "betas below 1"),
    ("save_weights", {"seq_id": 6, "path": "a/../../b"}, "must be letters"),
    ("save_weights", {"seq_id": 7, "path": "x" * 500}, "at most 200"),
    ("save_weights", {"seq_id": 8, "path": "x", "ttl_seconds": 1e300}, "ttl_seconds"),
    ("save_weights", {"seq_id": 10, "path": "x", "ttl_seconds": -1}, "ttl_seconds"),
    ("load_weights", {"seq_id": 12, "path": "tinker://none/weights/none"}, "no checkpoint"),
    ("load_weights", {"seq_id": 14, "path": "tinker://../weights/x"}, "must be letters"),
    ("load_weights", {"model_id": None, "model_seq_id": 8, "path": "nothing"}, "must be tinker://"),
    ("save_weights_for_sampler", {"seq_id": 13, "sampling_session_seq_id": HUGE}, "sampling_session_seq_id"),
    ("create_sampling_session", {"sampling_session_seq_id": 9, "base_model": "other"}, "no model"),
    ("create_sampling_session", {"base_model": "small"}, "count sampling_session_seq_id up"),
    ("create_sampling_session", {"sampling_session_seq_id": 9, "model_path": "tinker://a/weights/x"}, "no checkpoint"),
    ("asample", {"sampling_session_id": "none", "prompt": encoded(1)}, "no sampling session"),
    ("asample", {"prompt": {"chunks": [{"tokens": "abc"}]}}, "tokens is str"),
    ("asample", {"prompt": encoded(-1)}, "vocabulary"),
    ("asample", {"prompt": encoded(*[1] * 100_000)}, "leaves no room"),
    ("asample", {"prompt": encoded(1), "num_samples": 0}, "num_samples"),
    ("asample", {"prompt": encoded(1), "sampling_params": {"temperature": float("inf")}}, "temperature"),
    ("asample", {"prompt": encoded(1), "sampling_params": {"top_p": HUGE}}, "top_p"),
    ("asample", {"prompt": encoded(1), "sampling_params": {"stop": ["x"] * 1000}}, "stop has"),
    ("asample", {"prompt": encoded(1), "sampling_params": {"stop": [None]}}, "stop"),
    ("asample", {"prompt": encoded(1, 2), "topk_prompt_logprobs": 10**6}, "topk_prompt_logprobs"),
    ("asample", {"prompt": encoded(1, 2), "target_prompt_logprobs": {"data": [1], "shape": [10**12, 1]}}, "target"),
    ("asample", {"prompt": encoded(1, 2), "target_prompt_logprobs": {"data": ["x"], "shape": [1, 1]}}, "target"),
    ("asample", {"prompt": encoded(1, 2), "target_prompt_logprobs": sparse([MANY, 9], [0] * MANY + [MANY])}, "rows"),
    ("asample", {"prompt": encoded(1, 2), "target_prompt_logprobs": sparse([1, MANY], [0, MANY])}, "at a position"),
    ("asample", {"prompt": encoded(1, 2), "target_prompt_logprobs": sparse([1, 10**30], [0, 1])}, "target"),
    ("get_info", {"model_id": "../.."}, "no model"),
    ("weights_info", {"tinker_path": "tinker://a/journal/1"}, "must be tinker://"),
    ("retrieve_future", {"request_id": "x@../.."}, "no request"),
    ("session_heartbeat", {"session_id": "none"}, "no such session"),
    ("copy_weights", {}, "is not served"),
]


@pytest.mark.parametrize(("path", "body", "remedy"), ODD, ids=[f"{i}-{case[0]}" for i, case in enumerate(ODD)])
def test_an_odd_request_is_refused_at_once(client, trained, path, body, remedy):
    model, sampler = trained
    known = {"session_id": model.partition(":")[0], "model_id": model, "sampling_session_id": sampler}
    known |= {"base_model": "small", "model_seq_id": 9} if path == "create_model" else {}
    begun = time.perf_counter()
    status, answer = client.ask(path, known | body)
    assert 400 <= status < 500 and status not in (408, 409, 429), answer  # those are asked again silently
    assert remedy in answer["detail"]
    assert time.perf_counter() - begun < 2


SPARSE = [
    ([10**6, 10**6], [0, 1], [0], 1, "weights"),
    ([1, 10**12], [0, 1], [0], 1, "weights"),
    ([-1, 4], [0, 1], [0], 1, "weights"),
    ([1, 4], [0, 10**15], [0], 1, "weights"),
    ([2, 4], [0, 2, 1], [0], 1, "weights"),
    ([1, 4], [0, 1], [4], 1, "weights"),
    ([1, 4], [0, 1], [-1], 1, "weights"),
    ([1], [0, 1], [0], 1, "weights"),
    ([], [0], [0], 1, "weights"),
    ([1, 4], [], [], 1, "weights"),
    ([1, 1 << 24], [0, 1], [0], 3, "datum 2, weights: the sparse arrays"),  # that are bounded together
]


@pytest.mark.parametrize(("shape", "crow", "col", "count", "message"), SPARSE)
def test_a_sparse_array_that_does_not_fit_itself_is_refused(client, shape, crow, col, count, message):
    request = classes()["Request"](model_id="none", seq_id=1, loss_fn="cross_entropy")
    for _ in range(count):
        datum = request.data.add()
        datum.model_input.add().text.tokens = np.array([3, 1], "<i4").tobytes()
        tensor = datum.loss_fn_inputs["weights"]
        tensor.dtype = 1
        tensor.shape.extend(shape)
        tensor.sparse.values = np.array([1.0], "<f4").tobytes()
        tensor.sparse.crow, tensor.sparse.col = (np.array(part, "<i8").tobytes() for part in (crow, col))
    assert message in client.refused(400, "forward_backward", request.SerializeToString())
    request.data[0].ClearField("loss_fn_inputs")
    request.data[0].model_input[0].text.tokens = b"123"
    assert "int32" in client.refused(400, "forward_backward", request.SerializeToString())


JSON_BODIES = [
    ("create_session", {"tags": [], "user_metadata": {}, "sdk_version": "x"}),
    ("create_model", {"model_seq_id": 77, "base_model": "small", "lora_config": {"rank": 4, "seed": 1}}),
    ("optim_step", {"seq_id": 90, "adam_params": {"learning_rate": 0.1, "grad_clip_norm": 1}}),
    ("save_weights", {"seq_id": 91, "path": "a", "ttl_seconds": 5, "overwrite": True}),
    ("load_weights", {"seq_id": 92, "path": "tinker://none/weights/a", "optimizer": True}),
    ("save_weights_for_sampler", {"seq_id": 93, "sampling_session_seq_id": 5, "kind": "snapshot"}),
    ("create_sampling_session", {"sampling_session_seq_id": 50, "base_model": "small"}),
    ("asample", {"seq_id": 3, "num_samples": 1, "prompt": encoded(1, 2), "topk_prompt_logprobs": 1,
                 "sampling_params": {"max_tokens": 1, "stop": ["a", 3], "temperature": 1, "top_k": 3, "top_p": 0.5}}),
    ("asample", {"seq_id": 4, "prompt": encoded(1, 2), "prompt_logprobs": True, "sampling_params": {"max_tokens": 1},
                 "target_prompt_logprobs": {"data": [1], "shape": [1, 1], "dtype": "int64"}}),
    ("retrieve_future", {"request_id": "none@x"}),
    ("weights_info", {"tinker_path": "tinker://none/weights/a"}),
    ("get_info", {"model_id": "a:train:0"}),
    ("session_heartbeat", {"session_id": "a"}),
]  # fmt: skip


@pytest.mark.parametrize("times", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_spoiled_bodies_are_never_a_fault_of_the_server(client, times):
    """What cannot be known at once is a failed future of category `user`."""
    rng, statuses = random.Random(times), set()
    name = client.new()
    sampler, results = client.sampler(name, 1), []
    for number in range(times * len(JSON_BODIES)):
        path, body = JSON_BODIES[number % len(JSON_BODIES)]
        if path not in ("get_info", "session_heartbeat"):
            body = body | {"session_id": name.partition(":")[0], "model_id": name, "sampling_session_id": sampler}
        for _ in range(rng.choice([1, 1, 2, 3])):
            body = spoiled(body, rng)
        status, answer = client.ask(path, body)
        statuses.add(status)
        assert status in (200, 400, 404, 410), (path, body, answer)
        if status == 200 and path == "asample":
            results.append((body, answer))
    assert statuses >= {200, 400, 404, 410}
    for body, answer in results:
        result = client.result(answer)
        assert isinstance(result, bytes) or result["category"] == "user", (body, result)
    payload = batch(name, 2, [ROW])
    for _ in range(times * 10):
        broken = bytearray(payload)
        for _ in range(rng.choice([1, 1, 3])):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        status, answer = client.ask("forward_backward", bytes(broken[: rng.randrange(1, len(broken) + 1)]))
        assert status in (200, 400, 404), answer
    assert client.get("healthz")[0] == 200
    assert client.train(client.new(), 1, ROW)["update_skipped:sum"] == 0, "others train on"


def test_lists_are_paged_by_numbers_only(client):
    for query in ("limit=x", "limit=-1", "offset=%C2%B2", "offset=" + "9" * 30):
        assert "must be a number" in client.refused(400, f"training_runs?{query}", method="GET")
    assert client.get("checkpoints?limit=5&offset=100")[1]["checkpoints"] == []
    for path in ("training_runs/none", "training_runs/none/checkpoints", "training_runs/none/checkpoints/weights/a"):
        assert client.refused(404, path, method="GET")
    assert client.ask("healthz", method="HEAD")[0] == 200


def test_a_model_that_ends_while_it_is_sampled_from_answers_or_says_so(client):
    """Its session is finished between a request and its result: what was accepted comes, what is new is refused."""
    session = client.session()
    name = client.model(session)
    body = {"sampling_session_id": client.sampler(name, 1), "num_samples": 2, "prompt": encoded(3, 1)}
    body["sampling_params"] = {"max_tokens": 50, "seed": 3, "temperature": 1.0, "stop": []}
    answers = [client.post("asample", seq_id=seq, **body) for seq in range(3)]
    text = json.dumps({"request_id": answers[0]["request_id"]}).encode()
    head = b"POST /api/v1/retrieve_future HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(text)
    with socket.create_connection(("127.0.0.1", client.port)) as link:  # one that asks goes away
        link.sendall(head + text)
    step = client.send(batch(name, 2, [ROW]))
    client.finish(session)
    assert all(isinstance(client.result(answer), bytes) for answer in answers)
    assert client.result(answers[0]) == client.result(answers[0]), "a future is there for all who ask, however often"
    assert isinstance(client.result(step), bytes)
    assert "no sampling session" in client.refused(404, "asample", body | {"seq_id": 9})
    assert client.ask("optim_step", {"model_id": name, "seq_id": 3})[0] == 404
    assert client.ask("session_heartbeat", {"session_id": session})[0] == 410
