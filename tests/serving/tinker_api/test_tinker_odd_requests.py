"""The Tinker API as scripts get it wrong: each request is refused with what to change, and the server goes on."""

import random
import socket
import time

import numpy as np
import pytest

from tests.helpers.tinker_server import batch, fill, served
from tests.serving.test_hostile_clients import spoiled
from tests.serving.tinker_api.test_tinker_endpoint import ROW, sampler_of, tokens_of

PROTOBUF = "application/x-protobuf"
HUGE = 10**400


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with served(tmp_path_factory.mktemp("store")) as found:
        yield found


@pytest.fixture(scope="module")
def trained(client):
    """(model, sampling session) of a client."""
    name = client.model(client.session())
    return name, sampler_of(client, name, 1, 0)


def prompt(*ids):
    return {"chunks": [{"tokens": list(ids), "type": "encoded_text"}]}


ODD = [
    ("create_model", {"session_id": "none"}, "no session"),
    ("create_model", {"model_seq_id": HUGE}, "model_seq_id"),
    ("create_model", {"model_seq_id": -1}, "model_seq_id"),
    ("create_model", {"model_seq_id": "1"}, "model_seq_id is str"),
    ("create_model", {"lora_config": [4]}, "lora_config is list"),
    ("create_model", {"lora_config": {"rank": 10**9}}, "must be 1 to"),
    ("create_model", {"lora_config": {"train_attn": False, "train_mlp": False}}, "trains nothing"),
    ("optim_step", {"model_id": "none", "seq_id": 1}, "no model"),
    ("optim_step", {"seq_id": 0}, "seq_id"),
    ("optim_step", {"seq_id": HUGE}, "seq_id"),
    ("optim_step", {"seq_id": "2"}, "seq_id is str"),
    ("optim_step", {"seq_id": 2, "adam_params": {"learning_rate": "fast"}}, "learning_rate is str"),
    ("optim_step", {"seq_id": 3, "adam_params": {"learning_rate": float("nan")}}, "learning_rate = nan"),
    ("optim_step", {"seq_id": 4, "adam_params": {"beta1": 1}}, "betas below 1"),
    ("optim_step", {"seq_id": 5, "adam_params": {"learning_rate": HUGE}}, "learning_rate"),
    ("save_weights", {"seq_id": 6, "path": "a/../../b"}, "must be letters"),
    ("save_weights", {"seq_id": 7, "path": "x" * 500}, "at most 200"),
    ("save_weights", {"seq_id": 8, "path": "x", "ttl_seconds": 1e300}, "ttl_seconds"),
    ("save_weights", {"seq_id": 9, "path": "x", "ttl_seconds": HUGE}, "ttl_seconds"),
    ("save_weights", {"seq_id": 10, "path": "x", "ttl_seconds": -1}, "ttl_seconds"),
    ("load_weights", {"seq_id": 11, "path": ["x"]}, "path is list"),
    ("load_weights", {"seq_id": 12, "path": "tinker://none/weights/none"}, "no checkpoint"),
    ("save_weights_for_sampler", {"seq_id": 13, "sampling_session_seq_id": HUGE}, "sampling_session_seq_id"),
    ("create_sampling_session", {"sampling_session_seq_id": 9, "base_model": "other"}, "no model"),
    ("create_sampling_session", {"base_model": "small"}, "count sampling_session_seq_id up"),
    ("create_sampling_session", {"sampling_session_seq_id": HUGE, "base_model": "small"}, "sampling_session_seq_id"),
    ("create_sampling_session", {"sampling_session_seq_id": 9, "model_path": "tinker://a/weights/x"}, "no checkpoint"),
    ("asample", {"sampling_session_id": "none", "prompt": prompt(1)}, "no sampling session"),
    ("asample", {"prompt": {"chunks": [{"tokens": "abc"}]}}, "tokens is str"),
    ("asample", {"prompt": {"chunks": 5}}, "chunks is int"),
    ("asample", {"prompt": prompt(-1)}, "vocabulary"),
    ("asample", {"prompt": prompt(*[1] * 100_000)}, "leaves no room"),
    ("asample", {"prompt": prompt(1), "num_samples": 0}, "num_samples"),
    ("asample", {"prompt": prompt(1), "num_samples": 10**9}, "num_samples"),
    ("asample", {"prompt": prompt(1), "seq_id": HUGE}, "seq_id"),
    ("asample", {"prompt": prompt(1), "sampling_params": {"temperature": HUGE}}, "temperature"),
    ("asample", {"prompt": prompt(1), "sampling_params": {"temperature": float("inf")}}, "temperature"),
    ("asample", {"prompt": prompt(1), "sampling_params": {"top_p": HUGE}}, "top_p"),
    ("asample", {"prompt": prompt(1), "sampling_params": {"stop": ["x"] * 1000}}, "stop has"),
    ("asample", {"prompt": prompt(1), "sampling_params": {"stop": [None]}}, "stop"),
    ("asample", {"prompt": prompt(1, 2), "topk_prompt_logprobs": 10**6}, "topk_prompt_logprobs"),
    ("asample", {"prompt": prompt(1, 2), "target_prompt_logprobs": {"data": [1], "shape": [10**12, 1]}}, "target"),
    ("asample", {"prompt": prompt(1, 2), "target_prompt_logprobs": {"data": ["x"], "shape": [1, 1]}}, "target"),
    ("get_info", {"model_id": "../.."}, "no model"),
    ("get_info", {"model_id": 5}, "model_id is int"),
    ("weights_info", {"tinker_path": "tinker://a/journal/1"}, "must be tinker://"),
    ("retrieve_future", {"request_id": "x@../.."}, "no request"),
    ("retrieve_future", {"request_id": [1]}, "request_id is list"),
    ("session_heartbeat", {"session_id": "none"}, "no such session"),
    ("copy_weights", {}, "is not served"),
    ("nothing", {}, "is not served"),
]


@pytest.mark.parametrize(("path", "body", "remedy"), ODD, ids=[f"{i}-{case[0]}" for i, case in enumerate(ODD)])
def test_an_odd_request_is_refused_at_once(client, trained, path, body, remedy):
    model, sampler = trained
    known = {"session_id": model.partition(":")[0], "model_id": model, "sampling_session_id": sampler}
    known |= {"base_model": "small"} if path == "create_model" else {}
    known |= {"model_seq_id": 9} if path == "create_model" else {}
    begun = time.perf_counter()
    status, answer = client.ask(path, known | body)
    assert 400 <= status < 500 and status not in (408, 409, 429), answer  # those are asked again silently
    assert remedy in answer["detail"]
    assert time.perf_counter() - begun < 2


def test_what_was_refused_holds_up_no_call_of_its_model(client):
    """The refused numbers are skipped, also those that never came to be read."""
    name = client.model(client.session())
    for seq, adam in ((1, {"beta1": 2}), (2, {"learning_rate": None}), (3, {"eps": -1})):
        client.ask("optim_step", {"model_id": name, "seq_id": seq, "adam_params": adam})
    client.send(batch(name, 4, [ROW]))
    assert client.result(client.step(name, 5))["metrics"]["update_skipped:sum"] == 0


def sparse(shape, crow, col, values, dtype=1):
    request = fill("Request", model_id="none", seq_id=1, loss_fn="cross_entropy")
    datum = request.data.add()
    datum.model_input.add().text.tokens = np.array([3, 1], "<i4").tobytes()
    tensor = datum.loss_fn_inputs["weights"]
    tensor.dtype = dtype
    tensor.shape.extend(shape)
    tensor.sparse.values = np.array(values, "<f4").tobytes()
    tensor.sparse.crow, tensor.sparse.col = (np.array(part, "<i8").tobytes() for part in (crow, col))
    return request.SerializeToString()


@pytest.mark.parametrize(
    ("shape", "crow", "col"),
    [
        ([10**6, 10**6], [0, 1], [0]),
        ([1, 10**12], [0, 1], [0]),
        ([-1, 4], [0, 1], [0]),
        ([1, 4], [0, 10**15], [0]),
        ([2, 4], [0, 2, 1], [0]),
        ([1, 4], [0, 1], [4]),
        ([1, 4], [0, 1], [-1]),
        ([1], [0, 1], [0]),
        ([], [0], [0]),
        ([1, 4], [], []),
    ],
)
def test_a_sparse_array_that_does_not_fit_itself_is_refused(client, shape, crow, col):
    status, answer = client.ask("forward_backward", sparse(shape, crow, col, [1.0]), kind=PROTOBUF)
    assert status == 400 and "weights" in answer["detail"]


def test_ids_of_half_a_number_are_refused(client):
    request = fill("Request", model_id="none", seq_id=1, loss_fn="cross_entropy")
    request.data.add().model_input.add().text.tokens = b"123"
    status, answer = client.ask("forward_backward", request.SerializeToString(), kind=PROTOBUF)
    assert status == 400 and "int32" in answer["detail"]


JSON_BODIES = [
    ("create_session", {"tags": [], "user_metadata": {}, "sdk_version": "x"}),
    ("create_model", {"model_seq_id": 77, "base_model": "small", "lora_config": {"rank": 4, "seed": 1}}),
    ("optim_step", {"seq_id": 90, "adam_params": {"learning_rate": 0.1, "grad_clip_norm": 1}}),
    ("save_weights", {"seq_id": 91, "path": "a", "ttl_seconds": 5, "overwrite": True}),
    ("load_weights", {"seq_id": 92, "path": "tinker://none/weights/a", "optimizer": True}),
    ("save_weights_for_sampler", {"seq_id": 93, "sampling_session_seq_id": 5, "kind": "snapshot"}),
    ("create_sampling_session", {"sampling_session_seq_id": 50, "base_model": "small"}),
    ("asample", {"seq_id": 3, "num_samples": 1, "prompt": prompt(1, 2), "topk_prompt_logprobs": 1,
                 "sampling_params": {"max_tokens": 1, "stop": ["a", 3], "temperature": 1, "top_k": 3, "top_p": 0.5}}),
    ("asample", {"seq_id": 4, "prompt": prompt(1, 2), "prompt_logprobs": True, "sampling_params": {"max_tokens": 1},
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
    name = client.model(client.session())
    sampler, results = sampler_of(client, name, 1, 0), []
    for number in range(times * len(JSON_BODIES)):
        path, body = JSON_BODIES[number % len(JSON_BODIES)]
        body = body | {"session_id": name.partition(":")[0], "model_id": name} | {"sampling_session_id": sampler}
        body = body if path not in ("get_info", "session_heartbeat") else JSON_BODIES[number % len(JSON_BODIES)][1]
        for _ in range(rng.choice([1, 1, 2, 3])):
            body = spoiled(body, rng)
        status, answer = client.ask(path, body)
        statuses.add(status)
        assert status in (200, 400, 404, 410), (path, body, answer)
        if status == 200 and path == "asample":
            results.append((body, answer))
    assert statuses >= {200, 400, 404, 410}
    for body, answer in results:
        found = client.result(answer)
        assert isinstance(found, bytes) or found["category"] == "user", (body, found)
    whole = batch(name, 2, [ROW])
    for _ in range(times * 10):
        broken = bytearray(whole)
        for _ in range(rng.choice([1, 1, 3])):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        status, answer = client.ask(
            "forward_backward", bytes(broken[: rng.randrange(1, len(broken) + 1)]), kind=PROTOBUF
        )
        assert status in (200, 400, 404), answer
    assert client.ask("healthz", method="GET")[0] == 200
    fresh = client.model(client.session())
    client.send(batch(fresh, 1, [ROW]))
    assert client.result(client.step(fresh, 2))["metrics"]["update_skipped:sum"] == 0, "others train on"


def test_lists_are_paged_by_numbers_only(client):
    for query in ("limit=x", "limit=-1", "offset=%C2%B2", "offset=" + "9" * 30):
        status, answer = client.ask(f"training_runs?{query}", method="GET")
        assert status == 400 and "must be a number" in answer["detail"]
    assert client.ask("checkpoints?limit=5&offset=100", method="GET")[1]["checkpoints"] == []
    for path in ("training_runs/none", "training_runs/none/checkpoints", "training_runs/none/checkpoints/weights/a"):
        status, answer = client.ask(path, method="GET")
        assert status == 404 and answer["detail"], path
    assert client.ask("healthz", method="HEAD", kind="text/plain")[0] == 200


def test_one_number_of_a_sampler_is_one_sampler(client, trained):
    session = client.session()
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "small"}
    first = client.post("create_sampling_session", **body)
    assert client.post("create_sampling_session", **body) == first
    saved = client.result(client.post("save_weights_for_sampler", model_id=client.model(session), seq_id=1, path="x"))
    other = {"session_id": session, "sampling_session_seq_id": 0, "model_path": saved["path"]}
    status, answer = client.ask("create_sampling_session", other)
    assert status == 400 and "count sampling_session_seq_id up" in answer["detail"]
    name = saved["path"].removeprefix("tinker://").partition("/")[0]
    again = {"model_id": name, "seq_id": 2, "sampling_session_seq_id": 0}
    assert client.ask("save_weights_for_sampler", again)[0] == 400


@pytest.mark.slow
def test_a_future_is_there_for_all_who_ask_however_often(client, trained):
    """Twice in a row, by two at a time, and after one that asked went away."""
    body = {"sampling_session_id": trained[1], "num_samples": 2, "seq_id": 900, "prompt": prompt(3, 1)}
    body["sampling_params"] = {"max_tokens": 40, "seed": 3, "temperature": 1.0, "stop": []}
    request = client.post("asample", **body)["request_id"]
    text = b'{"request_id": "%b"}' % request.encode()
    head = b"POST /api/v1/retrieve_future HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(text)
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", client.port)) as link:
            link.sendall(head + text)
    found = [client.result(request) for _ in range(3)]
    assert isinstance(found[0], bytes) and found[0] == found[1] == found[2]


def test_a_model_that_ends_while_it_is_sampled_from_answers_or_says_so(client):
    """Its session is finished between a request and its result: what was accepted comes, what is new is refused."""
    session = client.session()
    name = client.model(session)
    sampler = sampler_of(client, name, 1, 0)
    body = {"sampling_session_id": sampler, "num_samples": 2, "prompt": prompt(3, 1)}
    body["sampling_params"] = {"max_tokens": 50, "seed": 3, "temperature": 1.0, "stop": []}
    answers = [client.post("asample", seq_id=seq, **body) for seq in range(3)]
    step = client.send(batch(name, 2, [ROW]))
    client.post(f"sessions/{session}/finish", reason={"type": "success"}, detail=None)
    assert all(isinstance(client.result(answer), bytes) for answer in answers)
    assert isinstance(client.result(step), bytes)
    status, answer = client.ask("asample", body | {"seq_id": 9})
    assert status == 404 and "no sampling session" in answer["detail"]
    assert client.ask("optim_step", {"model_id": name, "seq_id": 3})[0] == 404
    assert client.ask("session_heartbeat", {"session_id": session})[0] == 410


def test_a_checkpoint_that_is_deleted_while_samplers_use_it_is_missed_by_new_ones_only(client):
    session = client.session()
    name = client.model(session)
    saved = client.result(client.post("save_weights_for_sampler", model_id=name, seq_id=1, path="gone"))["path"]
    body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": saved}
    sampler = client.post("create_sampling_session", **body)["sampling_session_id"]
    before = tokens_of(client.sample(sampler, 0, [3, 1]))
    route = f"training_runs/{name}/checkpoints/sampler_weights/gone"
    assert client.ask(route, method="DELETE")[0] == 200
    assert client.ask(route, method="DELETE")[0] == 404
    assert tokens_of(client.sample(sampler, 1, [3, 1])) == before
    status, answer = client.ask("create_sampling_session", body | {"sampling_session_seq_id": 1})
    assert status == 404 and "no checkpoint" in answer["detail"]
