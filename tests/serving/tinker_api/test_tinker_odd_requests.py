"""The Tinker API as scripts get it wrong: each request is refused with what to change, and the server goes on."""

import random

import numpy as np
import pytest

from tests.helpers.tinker_server import ROW, batch, classes, encoded
from tests.helpers.tinker_server import client as client  # a fixture

MANY = 200_000
"""Rows; a table with as many columns fits in no memory."""


def sparse(shape, crow):
    ids = [1] * crow[-1]
    return {"data": ids, "shape": shape, "sparse_crow_indices": crow, "sparse_col_indices": ids}


@pytest.fixture(scope="module")
def trained(client):
    name = client.new()
    return name, client.sampler(name, 1)


ODD = [
    ("create_model", {"session_id": "none"}, "no session"),
    ("create_model", {"lora_config": {"rank": 0}}, "must be 1 to"),
    ("create_model", {"base_model": "other"}, "served here: small"),
    ("create_model", {"optimizer_config": {"type": "dimuon"}}, "must be adamw"),
    ("create_model", {"lora_config": {"train_attn": False, "train_mlp": False}}, "trains nothing"),
    ("optim_step", {"model_id": "none", "seq_id": 1}, "no model"),
    ("save_weights", {"seq_id": 6, "path": "a/../../b"}, "must be letters"),
    ("save_weights", {"seq_id": 8, "path": "x", "ttl_seconds": 1e300}, "ttl_seconds"),
    ("asample", {"prompt": encoded(-1)}, "vocabulary"),
    ("asample", {"prompt": encoded(1), "num_samples": 0}, "num_samples"),
    ("asample", {"prompt": encoded(*[1] * 100_000)}, "leaves no room"),
    ("asample", {"prompt": encoded(1), "sampling_params": {"top_p": 10**400}}, "top_p"),
    ("asample", {"prompt": encoded(1), "sampling_params": {"stop": ["x"] * 1000}}, "stop has"),
    ("asample", {"prompt": encoded(1, 2), "topk_prompt_logprobs": 10**6}, "topk_prompt_logprobs"),
    ("asample", {"prompt": encoded(1, 2), "target_prompt_logprobs": {"data": [1], "shape": [10**12, 1]}}, "target"),
    ("asample", {"prompt": encoded(1, 2), "target_prompt_logprobs": sparse([MANY, 9], [0] * MANY + [MANY])}, "rows"),
    ("asample", {"prompt": encoded(1, 2), "target_prompt_logprobs": sparse([1, MANY], [0, MANY])}, "at a position"),
    ("weights_info", {"tinker_path": "tinker://a/journal/1"}, "must be tinker://"),
    ("retrieve_future", {"request_id": "x@../.."}, "no request"),
    ("copy_weights", {}, "is not served"),
]


@pytest.mark.parametrize(("path", "body", "remedy"), ODD, ids=[f"{i}-{case[0]}" for i, case in enumerate(ODD)])
def test_an_odd_request_is_refused_at_once(client, trained, path, body, remedy):
    model, sampler = trained
    known = {"session_id": model.partition(":")[0], "model_id": model, "sampling_session_id": sampler}
    known |= {"base_model": "small", "model_seq_id": 9} if path == "create_model" else {}
    status, answer = client.ask(path, known | body)
    assert 400 <= status < 500 and status not in (408, 409, 429), answer  # those are asked again silently
    assert remedy in answer["detail"]


SPARSE = [([1, 10**12], [0, 1], [0], 1), ([2, 4], [0, 2, 1], [0], 1), ([1, 4], [0, 1], [4], 1), ([1], [0, 1], [0], 1)]
SPARSE.append(([1, 1 << 24], [0, 1], [0], 3))  # arrays that are bounded together


@pytest.mark.parametrize(("shape", "crow", "col", "count"), SPARSE)
def test_a_sparse_array_that_does_not_fit_itself_is_refused(client, shape, crow, col, count):
    request = classes()["Request"](model_id="none", seq_id=1, loss_fn="cross_entropy")
    for _ in range(count):
        datum = request.data.add()
        datum.model_input.add().text.tokens = np.array([3, 1], "<i4").tobytes()
        tensor = datum.loss_fn_inputs["weights"]
        tensor.dtype = 1
        tensor.shape.extend(shape)
        tensor.sparse.values = np.array([1.0], "<f4").tobytes()
        tensor.sparse.crow, tensor.sparse.col = (np.array(part, "<i8").tobytes() for part in (crow, col))
    message = "datum 2, weights: the sparse arrays" if count == 3 else "weights"
    assert message in client.refused(400, "forward_backward", request.SerializeToString())
    request.data[0].ClearField("loss_fn_inputs")
    request.data[0].model_input[0].text.tokens = b"123"
    assert "int32" in client.refused(400, "forward_backward", request.SerializeToString())


def test_broken_bytes_are_never_a_fault_of_the_server(client):
    rng, payload = random.Random(4), batch(client.new(), 2, [ROW])
    for _ in range(40):
        broken = bytearray(payload)
        broken[rng.randrange(len(broken))] = rng.randrange(256)
        status, answer = client.ask("forward_backward", bytes(broken[: rng.randrange(1, len(broken) + 1)]))
        assert status in (200, 400, 404), answer
    assert client.train(client.new(), 1, ROW)["update_skipped:sum"] == 0, "others train on"


def test_lists_are_paged_by_numbers_only(client):
    for query in ("limit=-1", "offset=%C2%B2"):
        assert "must be a number" in client.refused(400, f"training_runs?{query}", method="GET")
    assert client.get("checkpoints?limit=5&offset=100")[1]["checkpoints"] == []
    for path in ("training_runs/none", "training_runs/none/checkpoints", "training_runs/none/checkpoints/weights/a"):
        assert client.refused(404, path, method="GET")
