"""The package `tinker` against the server; skipped without it (`.ci/adapters tinker`)."""

import asyncio
import pickle

import numpy as np
import pytest

tinker = pytest.importorskip("tinker")

from tests.helpers.tinker_server import served  # noqa: E402

IDS = [3, 1, 4, 1, 5, 9, 2, 6]
TEXT = tinker.ModelInput.from_ints(IDS)
ADAM = tinker.AdamParams(learning_rate=0.01)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with served(tmp_path_factory.mktemp("store")) as client:
        yield tinker.ServiceClient(base_url=f"http://127.0.0.1:{client.port}", api_key="tml-x")


def datum(ids):
    text = tinker.ModelInput.from_ints(ids[:-1])
    inputs = {"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)}
    return tinker.Datum(model_input=text, loss_fn_inputs=inputs)


def logprobs_of(output):
    return [np.asarray(row["logprobs"].data) for row in output.loss_fn_outputs]


def test_the_quickstart_trains_samples_scores_saves_and_loads(service):
    model, losses = service.create_lora_training_client(base_model="small", rank=4, seed=1).result(), []
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


def test_every_other_call_of_the_client_works(service):
    rest = service.create_rest_client()
    model = service.create_lora_training_client(base_model="small", rank=4, user_metadata={"a": "b"}).result()
    model.forward_backward([datum(IDS)], "cross_entropy").result()
    model.optim_step(ADAM).result()
    state = model.save_state("s", ttl_seconds=7200).result().path
    weights = model.save_weights_for_sampler("w").result().path
    run = model.get_info().model_id
    session = run.partition(":")[0]
    assert rest.get_training_run(run).result().last_checkpoint.tinker_path == state
    assert rest.get_training_run_by_tinker_path(state).result().user_metadata == {"a": "b"}
    assert rest.get_weights_info_by_tinker_path(state).result().lora_rank == 4
    assert session in rest.list_sessions().result().sessions
    assert [entry.model_name for entry in rest.get_server_capabilities().result().supported_models] == ["small"]
    rest.set_checkpoint_ttl_from_tinker_path(state, 86400).result()
    model.load_state_with_optimizer(state).result()
    assert service.create_training_client_from_state(state).result().get_info().lora_rank == 4
    sampler = model.create_sampling_client(weights).result()
    assert rest.get_sampler(rest.get_session(session).result().sampler_ids[0]).result().base_model == "small"
    copy, params = pickle.loads(pickle.dumps(sampler)), tinker.SamplingParams(max_tokens=2, stop=[])
    assert len(copy.sample(TEXT, 1, params).result().sequences[0].tokens) == 2
    rest.delete_checkpoint_from_tinker_path(weights).result()
    rest.delete_checkpoint(run, "weights/s").result()
    assert rest.list_checkpoints(run).result().checkpoints == []
    with pytest.raises(Exception, match="importance_sampling"):
        model.forward_backward([datum(IDS)], "stable_reinforce").result()
    with pytest.raises(Exception, match="no checkpoint"):
        service.create_training_client_from_state(state).result()
