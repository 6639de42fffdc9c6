"""Losses of the Tinker API against recorded vectors and the update of training."""

import queue
from contextlib import closing
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import grpo_roc_jax as g
from grpo_roc_jax.engine.publish import NonFiniteWeightsError, unstack
from grpo_roc_jax.learner.loss import UpdateConfig
from grpo_roc_jax.learner.pack import pack
from grpo_roc_jax.learner.update import make_update_step, start_train_state
from grpo_roc_jax.method.surrogate import Ratio
from grpo_roc_jax.model.lora import LowRank
from grpo_roc_jax.model.sharding import shard_batch
from grpo_roc_jax.model.transformer import forward, unembed
from grpo_roc_jax.serving.refusal import RequestRefused
from grpo_roc_jax.serving.sampling_loop import SampleJob
from grpo_roc_jax.serving.tinker import losses, snapshots, wire
from grpo_roc_jax.serving.tinker.trainer import Adam, Trainer, Wanted, adam_step, optimizer_of
from grpo_roc_jax.serving.tinker.wire import Datum, ForwardBackward, read_forward_backward
from tests.helpers.tinker_server import MODEL, small_engine, small_trainer

REQUEST = "0a016d10011a2a0a0c0a0a0a080500000006000000121a0a0777656967687473120f0a08000000000000803f180122010222"
REQUEST += "0d63726f73735f656e74726f7079"
OUTPUT = "0a0b41727261795265636f7264122e122a0a086c6f6770726f6273121e0a08000000bf000000c012100000000000000000"
OUTPUT += "0800000000000000180118011a130a086c6f73733a73756d110000000000000440"


def test_recorded_bytes_are_read_and_written():
    request = read_forward_backward(bytes.fromhex(REQUEST))
    assert (request.model_id, request.seq_id, request.loss_fn, request.forward_only) == ("m", 1, "cross_entropy", False)
    assert (request.data[0].tokens.tolist(), request.data[0].inputs["weights"].tolist()) == ([5, 6], [0, 1])
    assert wire.write_output([np.array([-0.5, -2.0])], {"loss:sum": 2.5}).hex() == OUTPUT
    sampled = wire.write_samples([wire.SampledSequence(np.array([7, 2]), np.array([-0.5, -1.0]), stopped=True)])
    assert sampled.hex() == "0a14120807000000020000001a08000000bf000080bf"


def test_sparse_tensors_and_chunks_are_joined():
    request = wire.classes()["Request"](model_id="m", seq_id=1, loss_fn="cross_entropy")
    datum = request.data.add()
    for ids in ([1, 2], [3]):
        datum.model_input.add().text.tokens = np.array(ids, "<i4").tobytes()
    tensor = datum.loss_fn_inputs["weights"]
    tensor.sparse.values = np.array([0.5, 2.0], "<f4").tobytes()
    tensor.sparse.crow, tensor.sparse.col = (np.array(ids, "<i8").tobytes() for ids in ([0, 1, 1, 2], [1, 0]))
    tensor.dtype = 1
    tensor.shape.extend([3, 2])
    parsed = read_forward_backward(request.SerializeToString()).data[0]
    assert parsed.tokens.tolist() == [1, 2, 3] and parsed.inputs["weights"].tolist() == [[0, 0.5], [0, 0], [2, 0]]


L, Q, A, W = ([-0.5, -2, -1, -0.1], [-1, -1.5, -1, -2], [1, 1, -0.5, -2], [0, 1, 0.5, 2])
CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
NARROW = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
VECTORS = [("cross_entropy", {}, 2.7, [0, -1, -0.5, -2]), ("cispo", {}, 0.737422, [-1.648721, -0.606531, 0.5, 8])]
VECTORS += [("importance_sampling", {}, 11.616537, [-1.648721, -0.606531, 0.5, 13.371789])]
VECTORS += [("ppo", *config, [0, -0.606531, 0.5, 13.371789]) for config in (({}, 12.065258), (NARROW, 12.165258))]
VECTORS += [("cispo", CLIPS, 1.46, [-1.2, -0.8, 0.5, 2.4]), ("gspo", CLIPS, 1.586674, [0, 0, 0.797335, 3.189340])]
VECTORS += [("dro", {"beta": 0.05}, 1.90275, [-0.975, -1.025, 0.5, 2.095])]


@pytest.mark.parametrize(("name", "config", "value", "gradient"), VECTORS)
def test_losses_equal_the_recorded_vectors(name, config, value, gradient):
    row = partial(jnp.asarray, dtype=jnp.float32)
    given = {key: jnp.float32(number) for key, number in losses.settings_of(name, config).items()}
    weights = row([W if name == "cross_entropy" else A])
    mask, segments = jnp.array([[False, True, True, True]]), jnp.zeros((1, 4), jnp.int32)

    def total(logprobs):
        return jnp.sum(losses.token_losses(name, logprobs, row([Q]), weights, given, mask, segments))

    loss_and_grad = jax.value_and_grad(total)(row([L]))
    np.testing.assert_allclose(loss_and_grad[0], value, rtol=2e-6)
    np.testing.assert_allclose(loss_and_grad[1][0], gradient, rtol=2e-6, atol=1e-6)


def test_adam_equals_the_recorded_vectors():
    params = {"w": jnp.array([1.0, -1.0])}
    moments = optimizer_of(Adam()).init(params)

    def step(params, moments, gradient, **settings):
        given = {name: jnp.float32(value) for name, value in sorted(vars(Adam(**settings)).items())}
        return adam_step(params, moments, {"w": jnp.asarray(gradient)}, given)

    summed = jnp.array([0.3, -0.4]) + jnp.array([0.1, 0.2])
    params, moments, _, _ = step(params, moments, summed, learning_rate=0.01, weight_decay=0.1)
    np.testing.assert_allclose(params["w"], [0.989, -0.989], rtol=1e-6)
    params, moments, _, applied = step(params, moments, [0.3, -0.4], learning_rate=0.02, grad_clip_norm=0.25)
    np.testing.assert_allclose(params["w"], [0.97105406, -0.969], rtol=1e-6)
    assert applied
    after, moved, _, applied = step(params, moments, [jnp.nan, 0.0], learning_rate=0.02)
    assert not applied
    jax.tree.map(np.testing.assert_array_equal, (after, moved), (params, moments))


def test_unknown_losses_and_settings_are_refused_with_what_to_change():
    for name, config in (("no_such", {}), ("ppo", {"beta": 1.0}), ("ppo", {"clip_low_threshold": 2.0})):
        with pytest.raises(RequestRefused, match=r"must be|has these|pass loss_fn"):
            losses.settings_of(name, config)


def make_row(rng, n):
    """(datum for importance losses, the same as a row of training) of tokens that follow each other."""
    tokens = rng.integers(0, 500, n + 1).astype(np.int32)
    old, advantages = (rng.normal(size=n).astype(np.float32) for _ in range(2))
    old -= 6
    inputs = {"target_tokens": tokens[1:].astype(np.int64), "logprobs": old, "advantages": advantages}
    lead = partial(np.pad, pad_width=(1, 0))
    masked = (lead(np.ones(n, bool)), lead(old), lead(advantages), lead(np.ones(n, np.float32)))
    row = g.TrainRow(tokens, *masked, np.arange(n + 1, dtype=np.int32), np.zeros(n + 1, np.float32))
    return Datum(tokens[:-1], inputs), row


def test_calls_in_any_cut_and_a_step_equal_the_update_of_training():
    """Three ways to the same weights: one call, several calls, and `make_update_step` on the same rows."""
    trainer, lora, rng = small_trainer(), LowRank(rank=4), np.random.default_rng(0)
    data, rows = zip(*(make_row(rng, n) for n in (20, 5, 33, 64, 11)), strict=True)
    state = trainer.start(lora, 0)
    # B starts at zero, which would leave A without a gradient.
    params = jax.tree.map(lambda leaf: leaf + 0.02 * jax.random.normal(jax.random.key(5), leaf.shape), state.params)
    # eps is far above the rounding of gradients: AdamW divides those near 0 by themselves.
    adam = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-3, "weight_decay": 0.1}

    def trained(parts):
        now = type(state)(lora, params, state.moments)
        for part in parts:
            now, *_ = trainer.forward_backward(now, ForwardBackward("m", 1, part, "importance_sampling"))
        return trainer.optimizer_step(now, Adam(learning_rate=1e-3, grad_clip_norm=1.0, **adam))[0].params

    optim = g.OptimConfig(lr=1e-3, warmup_steps=0, max_grad_norm=1.0, **adam)
    step = make_update_step(MODEL, Ratio(), optim, trainer.update, trainer.mesh, lora=lora)
    packed, _ = pack(rows, g.BatchConfig(row_length=128, rows=2), 4)
    before = start_train_state(params, MODEL, optim, trainer.mesh, lora)
    after, _ = step(before, shard_batch(packed, trainer.mesh), trainer.base)
    for parts in ([data], [data[:2], data[2:4], data[4:]]):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=0, atol=1e-6), trained(parts), after.params)


def test_log_probabilities_are_exact_over_a_large_vocabulary():
    """In one column at a time the sum over 49,152 ids was off by 1e-4 for every token."""
    model = replace(MODEL, vocab_size=49152)
    base = jax.jit(lambda key: unstack(g.init_params(key, model), model))(jax.random.key(0))
    trainer = Trainer(base, model, UpdateConfig(), small_trainer().mesh, 128)
    tokens = np.arange(10, 74, dtype=np.int32)
    inputs = {"target_tokens": (targets := tokens[1:].astype(np.int64)), "weights": np.ones(63, np.float32)}
    request = ForwardBackward("m", 1, (Datum(tokens[:-1], inputs),), "cross_entropy", forward_only=True)
    _, (logprobs,), _ = trainer.forward_backward(trainer.start(LowRank(rank=4), 0), request)
    params = g.init_params(jax.random.key(0), model)
    hidden = forward(params, jnp.asarray(tokens[None, :-1]), jnp.arange(63)[None], jnp.ones((1, 63), jnp.int32), model)
    logits = np.asarray(unembed(params, hidden, model), np.float64)[0]
    exact = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(logprobs, exact[np.arange(63), targets], atol=5e-6)
    read = trainer.read(None, None, tokens[:-1], Wanted(targets[:, None].astype(np.int32)))
    np.testing.assert_allclose(read.scored[:, 0], exact[np.arange(63), targets], atol=5e-6)


def test_weights_that_are_no_numbers_cost_their_job_alone():
    events, trainer, lora = queue.SimpleQueue(), small_trainer(), LowRank(rank=4)
    good = snapshots.Snapshot(trainer.base, lora, trainer.start(lora, 9).params, "x")
    bad = replace(good, params=jax.tree.map(lambda leaf: leaf * np.nan, good.params))
    prompt, outcomes = np.arange(3, 40, dtype=np.int32), []
    made = snapshots.Snapshots(lambda form: small_engine(form).sibling(), lambda work: work())
    with closing(made):
        made.start()
        for snapshot in (good, bad, good):
            made.submit(snapshot, SampleJob(prompt, 3, lambda *event: events.put(event)))
            while (event := events.get(timeout=120))[0] not in ("ended", "failed"):
                pass
            outcomes.append(event[2])
    assert isinstance(outcomes[1], NonFiniteWeightsError)
    np.testing.assert_array_equal(outcomes[0].tokens, outcomes[2].tokens)
