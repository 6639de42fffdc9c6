"""A small server of the Tinker API on a thread, and plain HTTP requests in the recorded shapes."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cache
from itertools import pairwise

import jax
import numpy as np
import pytest

import grpo_roc_jax as g
from grpo_roc_jax.engine.publish import unstack
from grpo_roc_jax.learner.loss import UpdateConfig
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh
from grpo_roc_jax.serving.server import ServerThread
from grpo_roc_jax.serving.tinker import endpoint, journal, snapshots, store, trainer
from grpo_roc_jax.serving.tinker.wire import classes
from tests.helpers import serving

ROLLOUT = replace(serving.ROLLOUT, slots=4, max_response_tokens=64)
MODEL = g.ModelConfig(d_model=32, layers=2, heads=2, kv_heads=1, head_dim=16, d_ff=32, vocab_size=512)


@cache
def small_trainer():
    mesh = make_mesh(ShardingConfig(), jax.devices()[:1])
    base = jax.jit(lambda key: unstack(g.init_params(key, MODEL), MODEL))(jax.random.key(0))
    return trainer.Trainer(base, MODEL, UpdateConfig(), mesh, ROLLOUT.max_row_tokens)


@cache
def small_engine(form):
    return g.make_engine(MODEL, ROLLOUT, g.SamplingConfig(), (), small_trainer().mesh, seed=3, vocab_size=500)


@contextmanager
def served(folder, kept=(), **settings):
    """A running server whose checkpoints are in a folder."""

    def make(deliver):
        samplers = snapshots.Snapshots(lambda form: small_engine(form).sibling(), deliver)
        fields = g.load_tokenizer(g.TextConfig()), frozenset([7]), None, small_trainer(), samplers
        base = endpoint.Base("small", "DIR", *fields, ThreadPoolExecutor(1), ROLLOUT.max_prompt_tokens)
        files = store.Store(folder)
        calls = journal.Journal(files, **dict(kept))
        return endpoint.TinkerEndpoint([base], files, deliver, journal=calls, **settings)

    server = ServerThread(make)
    base = server.endpoint.bases["small"]
    with base.worker, closing(base.snapshots), closing(server):
        base.snapshots.start()
        yield Client(server.port)


def batch(model_id, seq, data, loss_fn="cross_entropy", forward_only=False, **config):
    """A forward_backward body; each datum is (input ids, arrays by name)."""
    request = classes()["Request"](model_id=model_id, seq_id=seq, loss_fn=loss_fn, forward_only=forward_only)
    for ids, inputs in data:
        datum = request.data.add()
        datum.model_input.add().text.tokens = np.asarray(ids, "<i4").tobytes()
        for name, value in inputs.items():
            integral = np.asarray(value).dtype.kind == "i"
            array = np.asarray(value, "<i8" if integral else "<f4")
            tensor = datum.loss_fn_inputs[name]
            tensor.dense, tensor.dtype = array.tobytes(), 2 if integral else 1
            tensor.shape.extend(array.shape)
    for name, value in config.items():
        request.loss_fn_config_v2[name].number = value
    return request.SerializeToString()


def datum(*ids):
    """Text of these ids: each is predicted from those before it."""
    return (ids[:-1], {"target_tokens": np.array(ids[1:]), "weights": np.ones(len(ids) - 1, np.float32)})


ROW, OTHER = datum(3, 1, 4, 1, 5, 9, 2, 6), datum(2, 7, 1, 8, 2, 8)


def encoded(*ids):
    return {"chunks": [{"tokens": list(ids), "type": "encoded_text"}]}


def tokens_of(response):
    return [np.frombuffer(sequence.tokens, "<i4").tolist() for sequence in response.sequences]


def logprobs_of(output):
    """Log-probabilities of each datum, read as the client does."""
    parts = []
    for record in output.outputs:
        tensor = record.fields["logprobs"]
        flat, ends = np.frombuffer(tensor.data, "<f4"), np.frombuffer(tensor.offsets, "<i8") // 4
        parts += [flat[a:b].reshape(-1, *tensor.trailing_shape) for a, b in pairwise(ends)]
        assert record.num_datums == len(ends) - 1
    return parts


class Client:
    def __init__(self, port):
        self.port = port

    def ask(self, path, body=None, *, method="POST", **headers):
        """(status, answer): JSON as such, anything else as bytes. Bytes are sent as protobuf."""
        headers["Content_Type"] = "application/x-protobuf" if isinstance(body, bytes) else "application/json"
        status, received, content = serving.exchange(self.port, method, f"/api/v1/{path}", body, **headers)
        return status, json.loads(content) if content and "json" in received["Content-Type"] else content

    def get(self, path, method="GET"):
        return self.ask(path, method=method)

    def refused(self, status, path, body=None, **request):
        """What is wrong with a request, which is answered with this status."""
        received, answer = self.ask(path, body, **request)
        assert received == status, answer
        return answer["detail"]

    def post(self, path, message=None, /, **body):
        status, answer = self.ask(path, message or body)
        assert status == 200, answer
        return answer

    def send(self, body):
        return self.post("forward_backward", body)["request_id"]

    def result(self, request):
        """The result behind an id, or behind an answer that has one."""
        name, status = request if isinstance(request, str) else request["request_id"], 408
        while status == 408:  # as the client asks again
            status, answer = self.ask("retrieve_future", {"request_id": name})
        assert status == 200, answer
        return answer

    def session(self):
        return self.post("create_session", tags=[], user_metadata={}, sdk_version="0.38.0")["session_id"]

    def model(self, session, number=0, rank=4, seed=1):
        lora = {"rank": rank, "seed": seed} | dict.fromkeys(("train_unembed", "train_mlp", "train_attn"), True)
        body = {"session_id": session, "model_seq_id": number, "base_model": "small", "lora_config": lora}
        return self.result(self.post("create_model", **body))["model_id"]

    def new(self):
        """A model in a session of its own."""
        return self.model(self.session())

    def step(self, model_id, seq, **adam):
        return self.post("optim_step", model_id=model_id, seq_id=seq, adam_params={"learning_rate": 0.01} | adam)

    def train(self, model_id, seq, *data, **adam):
        """The metrics of a step after data, which are the calls of two numbers."""
        self.send(batch(model_id, seq, data))
        return self.result(self.step(model_id, seq + 1, **adam))["metrics"]

    def score(self, model_id, seq, *data):
        """Log-probabilities of each datum, without a gradient."""
        return self.output(self.send(batch(model_id, seq, data, forward_only=True)))[0]

    def save(self, model_id, seq, path, kind="save_weights", **fields):
        return self.result(self.post(kind, model_id=model_id, seq_id=seq, path=path, **fields))["path"]

    def sampler(self, model_id, seq, number=0):
        body = {"model_id": model_id, "seq_id": seq, "sampling_session_seq_id": number}
        return self.result(self.post("save_weights_for_sampler", **body))["sampling_session_id"]

    def sampler_of(self, session, number=0, **weights):
        body = {"session_id": session, "sampling_session_seq_id": number} | weights
        return self.post("create_sampling_session", **body)["sampling_session_id"]

    def output(self, request):
        """(log-probabilities of each datum, metrics)."""
        output = classes()["Output"].FromString(self.result(request))
        return logprobs_of(output), dict(output.metrics)

    def sample(self, session, seq, prompt, *, count=2, seed=5, **fields):
        params = {"max_tokens": 6, "seed": seed, "temperature": 1.0, "top_k": -1, "top_p": 1.0, "stop": []}
        body = {"num_samples": count, "sampling_params": params | fields.pop("params", {}), "seq_id": seq}
        body |= {"prompt": encoded(*prompt), "type": "sample"}
        answer = self.post("asample", sampling_session_id=session, **body, **fields)
        assert len(answer["sample_sequence_ids"]) == count
        return classes()["SampleResponse"].FromString(self.result(answer))

    def tokens(self, *arguments, **fields):
        return tokens_of(self.sample(*arguments, **fields))


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with served(tmp_path_factory.mktemp("store")) as connected:
        yield connected
