"""The package `tinker` against the server; skipped without it (`.ci/adapters tinker`)."""

import asyncio

import numpy as np
import pytest

tinker = pytest.importorskip("tinker")

from tests.helpers.tinker_server import served  # noqa: E402

IDS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with served(tmp_path_factory.mktemp("store")) as client:
        yield tinker.ServiceClient(base_url=f"http://127.0.0.1:{client.port}", api_key="tml-x")


def datum(ids):
    text = tinker.ModelInput.from_ints(ids[:-1])
    inputs = {"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)}
    return tinker.Datum(model_input=text, loss_fn_inputs=inputs)


def logprobs_of(output):
    return [np.asarray(one["logprobs"].data) for one in output.loss_fn_outputs]


def test_the_quickstart_trains_samples_scores_saves_and_loads(service):
    model = service.create_lora_training_client(base_model="small", rank=4, seed=1)
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
    found = sampler.sample(tinker.ModelInput.from_ints(IDS[:3]), num_samples=2, sampling_params=params).result()
    assert [len(one.tokens) for one in found.sequences] == [5, 5] == [len(one.logprobs) for one in found.sequences]
    scored = sampler.compute_logprobs(tinker.ModelInput.from_ints(IDS)).result()
    assert scored[0] is None
    np.testing.assert_allclose(scored[1:], trained, atol=1e-5)
    path = model.save_state("state").result().path

    async def go_on():
        again = await service.create_training_client_from_state_with_optimizer_async(path)
        call = await again.forward_async([datum(IDS)], "cross_entropy")
        return logprobs_of(await call)[0]

    np.testing.assert_array_equal(asyncio.run(go_on()), trained)


def test_a_loss_of_the_client_has_the_gradient_of_ppo(service):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    old, advantages = rng.normal(-6, 0.3, len(IDS) - 1), rng.normal(size=len(IDS) - 1)

    def ppo(data, logprobs):
        ratio = torch.exp(logprobs[0] - torch.tensor(old, dtype=torch.float32))
        weights = torch.tensor(advantages, dtype=torch.float32)
        loss = -torch.minimum(ratio * weights, torch.clamp(ratio, 0.8, 1.2) * weights).sum()
        return loss, {"own": float(loss)}

    norms = []
    for custom in (True, False):
        model = service.create_lora_training_client(base_model="small", rank=4, seed=1)
        if custom:
            row = datum(IDS)
            row = tinker.Datum(model_input=row.model_input, loss_fn_inputs={"target_tokens": IDS[1:]})
            model.forward_backward_custom([row], ppo).result()
        else:
            inputs = {"target_tokens": IDS[1:], "logprobs": old.tolist(), "advantages": advantages.tolist()}
            row = tinker.Datum(model_input=tinker.ModelInput.from_ints(IDS[:-1]), loss_fn_inputs=inputs)
            model.forward_backward([row], "ppo").result()
        norms.append(model.optim_step(tinker.AdamParams(learning_rate=0.01)).result().metrics["grad_norm:mean"])
    np.testing.assert_allclose(*norms, rtol=1e-5)


def test_what_is_refused_says_what_to_change(service):
    with pytest.raises(Exception, match="served here: small"):
        service.create_lora_training_client(base_model="other", rank=4)
    model = service.create_lora_training_client(base_model="small", rank=4)
    with pytest.raises(Exception, match="importance_sampling"):
        model.forward_backward([datum(IDS)], "stable_reinforce").result()
