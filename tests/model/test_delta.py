"""The gated delta rule in chunks against a loop over tokens in float64, and its gradients against torch."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax.learner.loss import UpdateConfig
from grpo_roc_jax.learner.pack import TrainBatch
from grpo_roc_jax.learner.update import OptimConfig, init_train_state, make_update_step
from grpo_roc_jax.method.surrogate import NegativeLogLikelihood
from grpo_roc_jax.model.config import GatedDelta, ModelConfig, SomeExtras
from grpo_roc_jax.model.convert import load_params, resolve_config, save_params
from grpo_roc_jax.model.delta import Memory, Signals, empty_memory, invert, recur_cached, recur_packed, token_flops
from grpo_roc_jax.model.families import find_family
from grpo_roc_jax.model.safetensors_io import read_directory
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh, param_shardings, shard_batch
from grpo_roc_jax.model.transformer import forward, init_params, take_layer, unembed
from tests.helpers.published_models import random_tokens, save_model

DELTA = GatedDelta(key_heads=2, value_heads=6, key_dim=4, value_dim=5, conv=3)
B, T = 2, 150


def signals_of(seed=0, rows=B, length=T):
    rng = np.random.default_rng(seed)
    qkv = rng.normal(size=(rows, length, 2, 2 * 4 + 3 * 5))
    decay = -np.exp(rng.normal(size=(rows, length, 6)) * 1.5 - 2)
    rate = rng.uniform(size=(rows, length, 6))
    return Signals(*(jnp.asarray(x, jnp.float32) for x in (qkv, decay, rate)))


CONV = jnp.asarray(np.random.default_rng(9).normal(size=(2, 23, 3)), jnp.float32)


def recur_slowly(signals, conv, segments):
    """Token by token in float64, with a new state and no past inputs in each segment."""
    qkv, decay, rate, conv = (np.asarray(x, np.float64) for x in (*signals, conv))
    rows, length = qkv.shape[:2]
    out = np.zeros((rows, length, 6, 5))
    for b in range(rows):
        for t in range(length):
            if t == 0 or segments[b, t] != segments[b, t - 1]:
                state, first = np.zeros((6, 4, 5)), t
            x = sum(conv[:, :, 2 - j] * qkv[b, t - j] for j in range(3) if t - j >= first)
            x = x / (1 + np.exp(-x))
            for n in range(6):
                k_head = n // 3
                q, k = x[k_head, :4], x[k_head, 4:8]
                v = x[k_head, 8:].reshape(3, 5)[n % 3]
                q, k = (y / np.sqrt(y @ y + 1e-6) for y in (q, k))
                state[n] *= np.exp(decay[b, t, n])
                state[n] += np.outer(k, rate[b, t, n] * (v - state[n].T @ k))
                out[b, t, n] = state[n].T @ q / 2
    return out


def test_packed_rows_equal_the_loop_over_tokens():
    """Segments begin within chunks, at their borders, and span several; padding comes last."""
    segments = np.stack([np.repeat([1, 2, 3, 0], [1, 63, 80, 6]), np.repeat([1, 2, 0], [130, 2, 18])]).astype(np.int32)
    signals = signals_of()
    got = jax.jit(partial(recur_packed, DELTA))(jnp.asarray(segments), signals, CONV)
    np.testing.assert_allclose(got, recur_slowly(signals, CONV, segments), atol=2e-6)


def test_a_cached_row_in_padded_pieces_equals_the_whole_row():
    """Pieces of any length, one of none, padding of random numbers; a new row in the place of the old one."""
    signals = signals_of(1)
    expected = recur_slowly(signals, CONV, np.ones((B, T)))
    step = jax.jit(recur_cached)
    memory = Memory(*(leaf + 7.0 for leaf in empty_memory(DELTA, B, jnp.float32)))  # what another row left
    at = np.zeros(B, int)
    for piece in ([1, 9], [0, 0], [16, 2], [3, 16], [1, 1], [16, 0]):
        length, (noise_qkv, noise_decay, noise_rate) = np.array(piece), signals_of(2, length=16)
        padded = [np.array(x) for x in (noise_qkv, noise_decay, noise_rate)]
        for b in range(B):
            for x, new in zip(padded, signals, strict=True):
                x[b, : length[b]] = new[b, at[b] : at[b] + length[b]]
        before = memory
        padded = Signals(*map(jnp.asarray, padded))
        out, memory = step(memory, jnp.asarray(at == 0), jnp.asarray(length), padded, CONV)
        for b in range(B):
            np.testing.assert_allclose(out[b, : length[b]], expected[b, at[b] : at[b] + length[b]], atol=2e-6)
            if length[b] == 0:
                jax.tree.map(lambda new, old, b=b: np.testing.assert_array_equal(new[b], old[b]), memory, before)
        at += length


def test_the_inverse_is_exact_where_powers_would_overflow():
    """All keys equal and all rates 1: powers of the matrix reach 10^17 and would cancel."""
    lower = np.tril(np.ones((64, 64), np.float32), -1)
    wanted = np.eye(64) - np.eye(64, k=-1)
    np.testing.assert_allclose(jax.jit(invert)(lower[None])[0], wanted, atol=1e-5)
    drawn, weight = np.random.default_rng(0).normal(size=(2, 8, 8)).astype(np.float32)
    drawn = 0.3 * np.tril(drawn, -1)
    got = jax.jit(jax.grad(lambda lower: jnp.sum(weight * invert(jnp.tril(lower, -1)))))(drawn)
    inverse = np.linalg.inv(np.eye(8) + drawn)  # d sum(W * X^-1) = -X^-T W X^-T
    np.testing.assert_allclose(got, np.tril(-inverse.T @ weight @ inverse.T, -1), atol=1e-5)


def test_gradients_equal_those_of_the_rule_token_by_token():
    """Of two segments in one row of three chunks, by all inputs; the rule as a scan over tokens with resets."""
    segments = jnp.asarray(np.repeat([1, 2], [70, 80])[None])
    signals, weight = signals_of(4, rows=1), np.random.default_rng(2).normal(size=(1, T, 6, 5)).astype(np.float32)

    def by_token(signals, conv):
        first = jnp.arange(T) == 70
        past = [jnp.pad(signals.qkv[0], ((j, 0), (0, 0), (0, 0)))[:T] for j in range(3)]
        same = [jnp.arange(T) - jnp.where(jnp.arange(T) < 70, 0, 70) >= j for j in range(3)]
        x = jax.nn.silu(
            sum(
                jnp.where(ok[:, None, None], p, 0.0) * conv[None, :, :, 2 - j]
                for j, (p, ok) in enumerate(zip(past, same, strict=True))
            )
        )
        unit = [y / jnp.sqrt(jnp.sum(y * y, -1, keepdims=True) + 1e-6) for y in (x[..., :4], x[..., 4:8])]
        q, k = (jnp.repeat(y, 3, axis=1) for y in unit)
        inputs = (q / 2, k, x[..., 8:].reshape(T, 6, 5), signals.decay[0], signals.rate[0], first)

        def step(state, token):
            q, k, v, decay, rate, first = token
            state = jnp.where(first, 0.0, jnp.exp(decay)[:, None, None] * state)
            error = rate[:, None] * (v - jnp.einsum("npu,np->nu", state, k))
            state += k[:, :, None] * error[:, None, :]
            return state, jnp.einsum("npu,np->nu", state, q)

        return jnp.sum(weight[0] * jax.lax.scan(step, jnp.zeros((6, 4, 5)), inputs)[1])

    def in_chunks(signals, conv):
        return jnp.sum(weight * recur_packed(DELTA, segments, signals, conv))

    got, wanted = (jax.jit(jax.grad(run, argnums=(0, 1)))(signals, CONV) for run in (in_chunks, by_token))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, atol=3e-5 * float(np.abs(other).max()))


@pytest.mark.slow
def test_gradients_of_every_tensor_equal_those_of_torch(tmp_path):
    """Of a row of three chunks, and of the same tokens packed after another segment."""
    model = save_model("qwen35", tmp_path)
    import torch

    config = resolve_config(ModelConfig(path=str(tmp_path)))
    params, tokens = load_params(tmp_path, config), random_tokens(1, 130)
    weight = np.random.default_rng(3).normal(size=(1, 130, config.vocab_size)).astype(np.float32) / 50
    (model(torch.tensor(tokens)).logits * torch.tensor(weight)).sum().backward()

    @jax.jit
    def gradient(params, tokens, positions, segments, weight):
        def value(params):
            return jnp.sum(weight * unembed(params, forward(params, tokens, positions, segments, config), config))

        return jax.grad(value)(params)

    before = random_tokens(2, 13)[1:]
    row = np.concatenate([before, tokens], axis=1)
    positions = np.concatenate([np.arange(13), np.arange(130)])[None]
    segments = np.repeat([1, 2], [13, 130])[None]
    got = gradient(params, row, positions, segments, np.pad(weight, ((0, 0), (13, 0), (0, 0))))
    (tmp_path / "gradient").mkdir()
    save_params(got, config, find_family({"model_type": "qwen3_5_text"}), tmp_path / "gradient", dtype=jnp.float32)
    wanted = {name: leaf.grad.numpy() for name, leaf in model.named_parameters()}
    found = read_directory(tmp_path / "gradient")
    assert set(found) == set(wanted)
    for name, tensor in found.items():
        value = np.empty(tensor.shape, np.float32)
        tensor.read((slice(None),) * len(tensor.shape), value)
        scale = np.abs(wanted[name]).max()
        assert scale > 1e-4, name
        np.testing.assert_allclose(value, wanted[name], atol=2e-4 * scale + 1e-5, err_msg=name)


@pytest.mark.slow
def test_an_update_over_a_mesh_equals_that_of_one_device():
    """Heads over `tensor`, rows over `data` and `fsdp`, under rematerialization."""
    model = ModelConfig(**(vars(MODEL) | {"windows": SPLIT, "layers": 4}))
    tokens = np.random.default_rng(0).integers(0, 64, (1, 4, 80)).astype(np.int32)
    ones, segments = np.ones(tokens.shape, np.float32), np.broadcast_to(np.repeat([1, 2], [30, 50]), tokens.shape)
    positions = np.concatenate([np.arange(30), np.arange(50)])
    batch = TrainBatch(
        tokens=tokens,
        segment_ids=segments.astype(np.int32),
        positions=np.broadcast_to(positions, tokens.shape).astype(np.int32),
        policy_mask=np.broadcast_to(positions > 0, tokens.shape).copy(),
        logprobs_old=0 * ones,
        advantages=ones,
        weights=ones / tokens.size,
        ratio_segments=np.zeros_like(tokens),
        logprobs_ref=0 * ones,
        count=np.int32(1),
    )
    norms = []
    for sharding, devices in ((ShardingConfig(data=1), 1), (ShardingConfig(data=2, fsdp=2, tensor=2), 8)):
        mesh = make_mesh(sharding, jax.devices()[:devices])
        optim = OptimConfig(warmup_steps=0, max_grad_norm=0.0)
        state = init_train_state(jax.random.key(1), model, optim, mesh)
        step = make_update_step(model, NegativeLogLikelihood(), optim, UpdateConfig(remat="full"), mesh)
        state, metrics = step(state, shard_batch(batch, mesh))
        norms.append((float(metrics["update/grad_norm"]), float(metrics["loss/value"])))
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


MODEL = ModelConfig(
    d_model=16, layers=2, heads=2, kv_heads=2, head_dim=8, d_ff=24, vocab_size=64, extras=SomeExtras(rotary_share=0.5)
)
SPLIT = GatedDelta(key_heads=2, value_heads=4, key_dim=4, value_dim=6, every=2)


def test_what_the_layers_cannot_be_is_refused():
    hybrid = ModelConfig(**(vars(MODEL) | {"windows": SPLIT}))
    with pytest.raises(ValueError, match=r"sharding\.sequence = 2 with model\.windows gated_delta.*set sharding\.seq"):
        param_shardings(hybrid, make_mesh(ShardingConfig(data=4, sequence=2)))
    with pytest.raises(ValueError, match=r"model\.windows\.key_heads = 2 is not divisible by sharding\.tensor = 4"):
        wide = ModelConfig(**(vars(hybrid) | {"heads": 4, "kv_heads": 4}))
        param_shardings(wide, make_mesh(ShardingConfig(data=2, tensor=4)))
    with pytest.raises(ValueError, match=r"value_heads = 3 is not a multiple of model\.windows\.key_heads = 2"):
        GatedDelta(key_heads=2, value_heads=3, key_dim=4, value_dim=4)
    with pytest.raises(ValueError, match=r"model\.windows\.every = 4; must be at most model\.layers = 2"):
        ModelConfig(layers=2, windows=GatedDelta(key_heads=2, value_heads=2, key_dim=4, value_dim=4))
    with pytest.raises(ValueError, match=r"rotary_share = 0\.25 of model\.head_dim = 12 rotates 3 columns"):
        ModelConfig(head_dim=12, extras=SomeExtras(rotary_share=0.25))


def test_the_scan_gives_every_layer_its_own_options():
    """A scan over two periods equals one layer after the other; the pattern of rotations is longer than a period."""
    extras = SomeExtras(rotary_share=0.5, rotary_layers=(True, True, True, False))
    model = replace(MODEL, layers=8, windows=SPLIT, extras=extras)
    params = jax.jit(init_params, static_argnums=1)(jax.random.key(3), model)
    params = jax.tree.map(lambda leaf: leaf + 0.2 * jax.random.normal(jax.random.key(leaf.size), leaf.shape), params)
    tokens, positions = jnp.asarray(random_tokens(2, 24) % model.vocab_size), jnp.broadcast_to(jnp.arange(24), (2, 24))

    @partial(jax.jit, static_argnums=1)
    def hidden(params, model):
        return forward(params, tokens, positions, jnp.ones_like(tokens), model)

    layers = tuple(take_layer(params["layers"], i, model) for i in range(model.layers))
    scanned, unrolled = hidden(params, model), hidden(params | {"layers": layers}, model)
    np.testing.assert_allclose(scanned, unrolled, rtol=0, atol=2e-5)
    other = replace(model, extras=replace(extras, rotary_layers=(True, True, False, True)))
    assert np.abs(scanned - hidden(params, other)).max() > 1e-2


def test_fresh_states_forget_slowly_and_their_norm_has_no_offset():
    model = ModelConfig(**(vars(MODEL) | {"windows": SPLIT, "norm_offset": True}))
    layers = jax.device_get(jax.jit(init_params, static_argnums=1)(jax.random.key(0), model)["layers"])
    assert layers["wq"].shape[0] == layers["w_qkv"].shape[0] == 1 and layers["w_down"].shape[0] == 2
    assert (layers["delta_norm"] == 1).all() and not layers["attn_norm"].any()
    decay = np.exp(-np.exp(layers["a_log"]) * np.logaddexp(0, layers["dt_bias"]))
    assert (decay > 0.19).all() and (decay < 1).all()


def test_flops_of_a_token_by_hand():
    """Two key heads of 8 and four value heads of 16; spans of 1 and chunks of 64, whose inverse has six levels."""
    rule = GatedDelta(key_heads=2, value_heads=4, key_dim=8, value_dim=16)
    assert token_flops(rule, 1) == 4 * 2 * 8 + 4 * (2 * 40 + 6 * 128)
    assert token_flops(rule, 64) == token_flops(rule, 640) == 4 * 2 * 64 * 8 + 4 * (4 * 6 * 64**2 + 128 * 40 + 6 * 128)
