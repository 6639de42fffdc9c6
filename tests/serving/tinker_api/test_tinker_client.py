"""The package `tinker` against the server; skipped without it (`.ci/adapters tinker`)."""

import asyncio
import pickle

import numpy as np
import pytest

tinker = pytest.importorskip("tinker")

from grpo_roc_jax.serving.tinker.endpoint import TinkerEndpoint  # noqa: E402
from tests.helpers.tinker_server import served  # noqa: E402

IDS = [3, 1, 4, 1, 5, 9, 2, 6]
TEXT = tinker.ModelInput.from_ints(IDS)
ADAM = tinker.AdamParams(learning_rate=0.01)


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with served(tmp_path_factory.mktemp("store")) as client:
        yield f"http://127.0.0.1:{client.port}"


@pytest.fixture(scope="module")
def service(url):
    return tinker.ServiceClient(base_url=url, api_key="tml-x")


def datum(ids):
    text = tinker.ModelInput.from_ints(ids[:-1])
    inputs = {"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)}
    return tinker.Datum(model_input=text, loss_fn_inputs=inputs)


def model_of(service, seed=1):
    return service.create_lora_training_client(base_model="small", rank=4, seed=seed).result()


def logprobs_of(output):
    return [np.asarray(row["logprobs"].data) for row in output.loss_fn_outputs]


def test_the_quickstart_trains_samples_scores_saves_and_loads(service):
    model, losses = model_of(service), []
    for _ in range(4):
        call = model.forward_backward([datum(IDS), datum(IDS[::-1])], "cross_entropy")
        step = model.optim_step(ADAM)
        losses.append(call.result().metrics["loss:sum"])
        step.result()
    assert losses[-1] < losses[0]
    trained = logprobs_of(model.forward([datum(IDS)], "cross_entropy").result())[0]
    sampler = model.save_weights_and_get_sampling_client(name="one")
    params = tinker.SamplingParams(max_tokens=5, seed=2, stop=[])
    reply = sampler.sample(tinker.ModelInput.from_ints(IDS[:3]), num_samples=2, sampling_params=params).result()
    assert [len(seq.tokens) for seq in reply.sequences] == [5, 5] == [len(seq.logprobs) for seq in reply.sequences]
    scored = sampler.compute_logprobs(TEXT).result()
    assert scored[0] is None
    np.testing.assert_allclose(scored[1:], trained, atol=1e-5)
    path = model.save_state("state").result().path

    async def go_on():
        again = await service.create_training_client_from_state_with_optimizer_async(path)
        return await (await again.forward_async([datum(IDS)], "cross_entropy"))

    np.testing.assert_array_equal(logprobs_of(asyncio.run(go_on()))[0], trained)


def test_losses_of_the_client_have_the_gradients_of_those_of_the_server(service):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    old, advantages = rng.normal(-6, 0.3, len(IDS) - 1), rng.normal(size=len(IDS) - 1)

    def norm_of(rows, call, *loss):
        model = model_of(service)
        getattr(model, call)(rows, *loss).result()
        return model.optim_step(ADAM).result().metrics["grad_norm:mean"]

    def ppo(data, logprobs):
        ratio = torch.exp(logprobs[0] - torch.tensor(old, dtype=torch.float32))
        weights = torch.tensor(advantages, dtype=torch.float32)
        loss = -torch.minimum(ratio * weights, torch.clamp(ratio, 0.8, 1.2) * weights).sum()
        return loss, {"own": float(loss)}

    def likelihood(logprobs, weights):
        loss = -(logprobs * weights).sum()
        return loss, {"custom/nll:sum": loss}

    inputs = {"target_tokens": IDS[1:]}
    bare, row = (
        tinker.Datum(model_input=tinker.ModelInput.from_ints(IDS[:-1]), loss_fn_inputs=inputs | more)
        for more in ({}, {"logprobs": old.tolist(), "advantages": advantages.tolist()})
    )
    handle = service.create_custom_loss(likelihood, {"logprobs": 1, "weights": 1}).result()
    for custom, loss, own, theirs in ((ppo, "ppo", bare, row), (handle, "cross_entropy", datum(IDS), datum(IDS))):
        norm = norm_of([own], "forward_backward_custom", custom)
        np.testing.assert_allclose(norm, norm_of([theirs], "forward_backward", loss), rtol=1e-5)


def test_calls_that_the_client_cuts_have_the_result_of_one(url, monkeypatch):
    """Five data in chunks of two, as one call; two calls and a step, as one call and a step."""
    data = [datum(IDS[i:] + IDS[:i]) for i in range(5)]
    norms, after = [], []
    for chunk, parts in ((2, [data]), (1024, [data]), (1024, [data[:2], data[2:]])):
        monkeypatch.setattr(TinkerEndpoint, "client_config", lambda *_, most=chunk: {"fwdbwd_max_chunk_len": most})
        model = model_of(tinker.ServiceClient(base_url=url, api_key="tml-x"), seed=3)
        calls = [model.forward_backward(part, "cross_entropy") for part in parts]
        step = model.optim_step(tinker.AdamParams(learning_rate=0.01, eps=1e-3))
        assert [len(call.result().loss_fn_outputs) for call in calls] == [len(part) for part in parts]
        norms.append(step.result().metrics["grad_norm:mean"])
        after.append(np.concatenate(logprobs_of(model.forward(data, "cross_entropy").result())))
    for norm, values in zip(norms[1:], after[1:], strict=True):
        np.testing.assert_allclose(norm, norms[0], rtol=1e-6)
        np.testing.assert_allclose(values, after[0], atol=1e-6)


def test_all_that_a_sample_can_tell_of_its_prompt(service):
    sampler, P = service.create_sampling_client(base_model="small").result(), len(IDS)
    params = tinker.SamplingParams(max_tokens=4, seed=1, stop=[], temperature=0.7)
    dense = tinker.TensorData.from_numpy(np.array([[i, -1] for i in IDS[1:]]))
    fields = {"topk_prompt_logprobs": 3, "topk_sample_logprobs": 2, "prompt_alt_tokens_k": 5}
    full = sampler.sample(TEXT, 1, params, True, target_prompt_logprobs=dense, **fields).result()
    np.testing.assert_allclose(full.target_prompt_logprobs.to_numpy()[:, 0], full.prompt_logprobs[1:], atol=1e-6)
    assert not full.topk_prompt_logprobs[0] and [len(likely) for likely in full.topk_prompt_logprobs[1:]] == [3] * (
        P - 1
    )
    assert [len(likely) for likely in full.sequences[0].topk_logprobs] == [2] * 4
    assert full.prompt_alt_tokens.tokens.shape == [P - 1, 5] == full.prompt_alt_tokens.logprobs.shape
    sparse = tinker.TensorData([IDS[6], 77], "int64", [P - 1, 600], [0] * 6 + [2, 2], [0, 9])
    named = sampler.sample(TEXT, 1, params, True, target_prompt_logprobs=sparse).result().target_prompt_logprobs
    assert named.shape == [P - 1, 600] and named.sparse_col_indices == [0, 9]
    np.testing.assert_allclose(named.data[0], full.prompt_logprobs[6], atol=1e-6)


def test_every_other_call_of_the_client_works(service):
    rest = service.create_rest_client()
    model = service.create_lora_training_client(base_model="small", rank=4, user_metadata={"a": "b"}).result()
    model.forward_backward([datum(IDS)], "cross_entropy").result()
    model.optim_step(ADAM).result()
    info = model.get_info()
    state = model.save_state("s", ttl_seconds=7200).result().path
    assert (info.is_lora, info.lora_rank, info.model_data.model_name) == (True, 4, "small")
    weights = model.save_weights_for_sampler("w").result().path
    run = info.model_id
    session = run.partition(":")[0]
    assert rest.get_training_run(run).result().last_checkpoint.tinker_path == state
    assert rest.get_training_run_by_tinker_path(state).result().user_metadata == {"a": "b"}
    assert run in [entry.training_run_id for entry in rest.list_training_runs(limit=5).result().training_runs]
    assert [entry.tinker_path for entry in rest.list_checkpoints(run).result().checkpoints] == [state, weights]
    page = rest.list_user_checkpoints(limit=1, offset=1).result()
    assert len(page.checkpoints) == 1 and page.cursor.total_count >= 2
    assert rest.get_weights_info_by_tinker_path(state).result().lora_rank == 4
    assert session in rest.list_sessions().result().sessions
    assert run in rest.get_session(session).result().training_run_ids
    assert [entry.model_name for entry in rest.get_server_capabilities().result().supported_models] == ["small"]
    rest.set_checkpoint_ttl_from_tinker_path(state, 86400).result()
    rest.set_checkpoint_ttl_from_tinker_path(state, None).result()
    model.load_state(state).result()
    model.load_state_with_optimizer(state).result()
    assert service.create_training_client_from_state(state).result().get_info().lora_rank == 4
    sampler = model.create_sampling_client(weights).result()
    assert sampler.get_base_model() == "small"
    assert rest.get_sampler(rest.get_session(session).result().sampler_ids[0]).result().base_model == "small"
    params = tinker.SamplingParams(max_tokens=2, stop=[])
    by_handle = type(sampler).from_sampler_handle(sampler.get_sampler_handle(), api_key="tml-x")
    for copy in (sampler, pickle.loads(pickle.dumps(sampler)), by_handle):
        assert len(copy.sample(TEXT, 1, params).result().sequences[0].tokens) == 2
    image = tinker.ModelInput(chunks=[tinker.types.ImageChunk(data=b"x", format="png", expected_tokens=1)])
    rest.delete_checkpoint_from_tinker_path(weights).result()
    rest.delete_checkpoint(run, "weights/s").result()
    assert rest.list_checkpoints(run).result().checkpoints == []
    for refused, why in (
        (lambda: sampler.sample(image, 1, params).result(), "image"),
        (lambda: model.forward_backward([datum(IDS)], "stable_reinforce").result(), "importance_sampling"),
        (lambda: model.optim_step(ADAM).result(), "gradients were dropped"),
        (lambda: rest.publish_checkpoint_from_tinker_path(state).result(), "copy the folder"),
        (lambda: rest.assign_session_project(session, "p").result(), "no projects"),
        (lambda: model.save_weights_external("e").result(), "no published form"),
        (lambda: service.create_sampling_client(base_model="other").result(), "served here: small"),
        (lambda: service.create_sampling_client(model_path="tinker://no/weights/x").result(), "no checkpoint"),
        (lambda: service.create_training_client_from_state(state).result(), "no checkpoint"),
    ):
        with pytest.raises(Exception, match=why):
            refused()
