"""The package `tinker` against the server; skipped without it (`.ci/adapters tinker`)."""

import asyncio
import pickle

import numpy as np
import pytest

tinker = pytest.importorskip("tinker")

from grpo_roc_jax.serving.tinker.endpoint import TinkerEndpoint  # noqa: E402
from tests.helpers.tinker_server import served  # noqa: E402

IDS = [3, 1, 4, 1, 5, 9, 2, 6]


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


def logprobs_of(output):
    return [np.asarray(row["logprobs"].data) for row in output.loss_fn_outputs]


def test_the_quickstart_trains_samples_scores_saves_and_loads(service):
    model = service.create_lora_training_client(base_model="small", rank=4, seed=1).result()
    losses = []
    for _ in range(4):
        call = model.forward_backward([datum(IDS), datum(IDS[::-1])], "cross_entropy")
        step = model.optim_step(tinker.AdamParams(learning_rate=0.02))
        losses.append(call.result().metrics["loss:sum"])
        step.result()
    assert losses[-1] < losses[0]
    trained = logprobs_of(model.forward([datum(IDS)], "cross_entropy").result())[0]
    sampler = model.save_weights_and_get_sampling_client(name="one")
    params = tinker.SamplingParams(max_tokens=5, seed=2, stop=[])
    reply = sampler.sample(tinker.ModelInput.from_ints(IDS[:3]), num_samples=2, sampling_params=params).result()
    assert [len(seq.tokens) for seq in reply.sequences] == [5, 5] == [len(seq.logprobs) for seq in reply.sequences]
    scored = sampler.compute_logprobs(tinker.ModelInput.from_ints(IDS)).result()
    assert scored[0] is None
    np.testing.assert_allclose(scored[1:], trained, atol=1e-5)
    path = model.save_state("state").result().path

    async def go_on():
        again = await service.create_training_client_from_state_with_optimizer_async(path)
        call = await again.forward_async([datum(IDS)], "cross_entropy")
        return logprobs_of(await call)[0]

    np.testing.assert_array_equal(asyncio.run(go_on()), trained)


def norm_of(service, call):
    """The norm of the gradient of a call on a new model."""
    model = service.create_lora_training_client(base_model="small", rank=4, seed=1).result()
    call(model).result()
    return model.optim_step(tinker.AdamParams(learning_rate=0.01)).result().metrics["grad_norm:mean"]


def test_a_loss_of_the_client_has_the_gradient_of_ppo(service):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    old, advantages = rng.normal(-6, 0.3, len(IDS) - 1), rng.normal(size=len(IDS) - 1)

    def ppo(data, logprobs):
        ratio = torch.exp(logprobs[0] - torch.tensor(old, dtype=torch.float32))
        weights = torch.tensor(advantages, dtype=torch.float32)
        loss = -torch.minimum(ratio * weights, torch.clamp(ratio, 0.8, 1.2) * weights).sum()
        return loss, {"own": float(loss)}

    text, inputs = tinker.ModelInput.from_ints(IDS[:-1]), {"target_tokens": IDS[1:]}
    bare_row = tinker.Datum(model_input=text, loss_fn_inputs=inputs)
    inputs = inputs | {"logprobs": old.tolist(), "advantages": advantages.tolist()}
    row = tinker.Datum(model_input=text, loss_fn_inputs=inputs)
    norm = norm_of(service, lambda model: model.forward_backward_custom([bare_row], ppo))
    plain = norm_of(service, lambda model: model.forward_backward([row], "ppo"))
    np.testing.assert_allclose(norm, plain, rtol=1e-5)


def test_calls_that_the_client_cuts_have_the_result_of_one(url, monkeypatch):
    """Five data in chunks of two, as one call; two calls and a step, as one call and a step."""
    data = [datum(IDS[i:] + IDS[:i]) for i in range(5)]
    norms, after = [], []
    for chunk, parts in ((2, [data]), (1024, [data]), (1024, [data[:2], data[2:]])):
        monkeypatch.setattr(TinkerEndpoint, "client_config", lambda *_, most=chunk: {"fwdbwd_max_chunk_len": most})
        client = tinker.ServiceClient(base_url=url, api_key="tml-x")
        model = client.create_lora_training_client(base_model="small", rank=4, seed=3).result()
        calls = [model.forward_backward(part, "cross_entropy") for part in parts]
        step = model.optim_step(tinker.AdamParams(learning_rate=0.01, eps=1e-3))
        assert [len(call.result().loss_fn_outputs) for call in calls] == [len(part) for part in parts]
        norms.append(step.result().metrics["grad_norm:mean"])
        after.append(np.concatenate(logprobs_of(model.forward(data, "cross_entropy").result())))
    for norm, values in zip(norms[1:], after[1:], strict=True):
        np.testing.assert_allclose(norm, norms[0], rtol=1e-6)
        np.testing.assert_allclose(values, after[0], atol=1e-6)


def test_all_that_a_sample_can_tell_of_its_prompt(service):
    sampler = service.create_sampling_client(base_model="small").result()
    prompt, P = tinker.ModelInput.from_ints(IDS), len(IDS)
    ids = np.full((P - 1, 600), -1)
    ids[2, 599], ids[5, [0, 9]] = 4, (IDS[6], 77)
    crow, col = np.cumsum([0, *(ids >= 0).sum(1)]), np.nonzero(ids >= 0)[1]
    sparse = tinker.TensorData(ids[ids >= 0], "int64", list(ids.shape), crow.tolist(), col.tolist())
    dense = tinker.TensorData.from_numpy(np.array([[i, -1] for i in IDS[1:]]))
    params = tinker.SamplingParams(max_tokens=4, seed=1, stop=[], temperature=0.7)

    def ask(target, **fields):
        return sampler.sample(prompt, 1, params, True, target_prompt_logprobs=target, **fields).result()

    full = ask(dense, topk_prompt_logprobs=3, topk_sample_logprobs=2, prompt_alt_tokens_k=5)
    scored = np.array(full.prompt_logprobs[1:], np.float32)
    targets = full.target_prompt_logprobs.to_numpy()
    np.testing.assert_allclose(targets[:, 0], scored, atol=1e-6)
    assert (targets[:, 1] == 0).all()
    named = ask(sparse).target_prompt_logprobs
    assert named.shape == [P - 1, 600]
    assert named.sparse_col_indices == col.tolist()
    np.testing.assert_allclose(named.data[1], scored[5], atol=1e-6)
    assert full.topk_prompt_logprobs[0] is None or not full.topk_prompt_logprobs[0]
    for likely, value in zip(full.topk_prompt_logprobs[1:], scored, strict=True):
        assert len(likely) == 3
        assert likely[0][1] >= value - 1e-6
    answer = full.sequences[0]
    for likely, token, value in zip(answer.topk_logprobs, answer.tokens, answer.logprobs, strict=True):
        assert likely[0][1] >= value - 1e-4
        assert dict(likely).get(token, value) == pytest.approx(value, abs=1e-4)
    drawn = full.prompt_alt_tokens
    assert drawn.tokens.shape == [P - 1, 5] == drawn.logprobs.shape
    last = sampler.compute_logprobs(prompt, prompt_logprobs_last_n=2).result()
    assert last[: P - 2] == [None] * (P - 2)
    np.testing.assert_allclose(last[-2:], scored[-2:], atol=1e-6)


def test_top_k_and_top_p_cut_what_is_drawn_and_not_what_is_recorded(service):
    sampler = service.create_sampling_client(base_model="small").result()
    prompt = tinker.ModelInput.from_ints(IDS)

    def ask(**cut):
        params = tinker.SamplingParams(max_tokens=6, seed=1, stop=[], **cut)
        return sampler.sample(prompt, 8, params, topk_sample_logprobs=15).result().sequences

    greedy = ask(temperature=0.0)[0].tokens
    assert [seq.tokens for seq in ask(top_k=1)] == [greedy] * 8
    assert [seq.tokens for seq in ask(top_p=1e-6)] == [greedy] * 8
    for seq in ask(top_k=3):
        for likely, token, value in zip(seq.topk_logprobs, seq.tokens, seq.logprobs, strict=True):
            drawable = [pair for pair in likely if pair[0] < 500][:3]  # further ids only pad the vocabulary
            assert dict(drawable)[token] == pytest.approx(value, abs=1e-4)
    assert len({tuple(seq.tokens) for seq in ask(top_k=3)}) > 1


def test_a_loss_that_is_traced_runs_in_the_client(service):
    pytest.importorskip("torch")

    def likelihood(logprobs, weights):
        loss = -(logprobs * weights).sum()
        return loss, {"custom/nll:sum": loss}

    handle = service.create_custom_loss(likelihood, {"logprobs": 1, "weights": 1}).result()
    norm = norm_of(service, lambda model: model.forward_backward_custom([datum(IDS)], handle))
    plain = norm_of(service, lambda model: model.forward_backward([datum(IDS)], "cross_entropy"))
    np.testing.assert_allclose(norm, plain, rtol=1e-5)


def test_several_targets_of_a_token_may_be_sparse(service):
    torch = pytest.importorskip("torch")
    ids = torch.zeros(7, 40, dtype=torch.int64)
    weights = torch.zeros(7, 40)
    ids[:, 0], weights[:, 0] = torch.tensor(IDS[1:]), 1.0
    inputs = {"target_tokens": tinker.TensorData.from_torch_sparse(ids)}
    inputs["weights"] = tinker.TensorData.from_torch_sparse(weights)
    row = tinker.Datum(model_input=tinker.ModelInput.from_ints(IDS[:-1]), loss_fn_inputs=inputs)
    model = service.create_lora_training_client(base_model="small", rank=4).result()
    wide, flat = (model.forward_backward([example], "cross_entropy").result() for example in (row, datum(IDS)))
    assert wide.metrics["loss:sum"] == pytest.approx(flat.metrics["loss:sum"], rel=1e-5)
    np.testing.assert_allclose(logprobs_of(wide)[0].reshape(7, 40)[:, 0], logprobs_of(flat)[0], atol=1e-6)


def test_every_other_call_of_the_client_works(service):
    rest = service.create_rest_client()
    model = service.create_lora_training_client(base_model="small", rank=4, user_metadata={"a": "b"}).result()
    model.forward_backward([datum(IDS)], "cross_entropy").result()
    model.optim_step(tinker.AdamParams(learning_rate=0.01)).result()
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
    assert len(page.checkpoints) == 1
    assert page.cursor.total_count >= 2
    assert rest.get_weights_info_by_tinker_path(state).result().lora_rank == 4
    assert session in rest.list_sessions().result().sessions
    assert run in rest.get_session(session).result().training_run_ids
    assert [entry.model_name for entry in rest.get_server_capabilities().result().supported_models] == ["small"]
    rest.set_checkpoint_ttl_from_tinker_path(state, 86400).result()
    rest.set_checkpoint_ttl_from_tinker_path(state, None).result()
    model.load_state(state).result()
    model.load_state_with_optimizer(state).result()
    for make in (
        service.create_training_client_from_state,
        service.create_training_client_from_state_with_optimizer,
    ):
        assert make(state).result().get_info().lora_rank == 4
    sampler = model.create_sampling_client(weights).result()
    assert sampler.get_base_model() == "small"
    assert rest.get_sampler(rest.get_session(session).result().sampler_ids[0]).result().base_model == "small"
    params = tinker.SamplingParams(max_tokens=2, stop=[])
    copies = [
        pickle.loads(pickle.dumps(sampler)),
        type(sampler).from_sampler_handle(sampler.get_sampler_handle(), api_key="tml-x"),
    ]
    for copy in (sampler, *copies):
        assert len(copy.sample(tinker.ModelInput.from_ints(IDS), 1, params).result().sequences[0].tokens) == 2
    image = tinker.ModelInput(chunks=[tinker.types.ImageChunk(data=b"x", format="png", expected_tokens=1)])
    rest.delete_checkpoint_from_tinker_path(weights).result()
    rest.delete_checkpoint(run, "weights/s").result()
    assert rest.list_checkpoints(run).result().checkpoints == []
    for refused, why in (
        (lambda: sampler.sample(image, 1, params).result(), "image"),
        (lambda: model.forward_backward([datum(IDS)], "stable_reinforce").result(), "importance_sampling"),
        (lambda: model.optim_step(tinker.AdamParams(learning_rate=0.01)).result(), "gradients were dropped"),
        (lambda: rest.publish_checkpoint_from_tinker_path(state).result(), "copy the folder"),
        (lambda: rest.assign_session_project(session, "p").result(), "no projects"),
        (lambda: model.save_weights_external("e").result(), "no published form"),
        (lambda: service.create_sampling_client(base_model="other").result(), "served here: small"),
        (lambda: service.create_sampling_client(model_path="tinker://no/weights/x").result(), "no checkpoint"),
        (lambda: service.create_training_client_from_state(state).result(), "no checkpoint"),
    ):
        with pytest.raises(Exception, match=why):
            refused()
