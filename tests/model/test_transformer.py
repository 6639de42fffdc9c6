"""The forward pass against a float64 loop, for every option that changes it; experts; shared keys; recurrent layers."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import NamedSharding, P

from grpo_roc_jax.model.config import GatedDelta, Mixture, ModelConfig
from grpo_roc_jax.model.delta import Memory, Signals, empty_memory, invert, recur_cached, recur_packed, token_flops
from grpo_roc_jax.model.experts import GROUPED_FLAG, check_grouped, mix_experts, route
from grpo_roc_jax.model.sharding import ROWS, ShardingConfig, constrain, make_mesh, param_shardings
from grpo_roc_jax.model.transformer import Execution, Splits, forward, unembed
from tests.helpers.reference import logits, random_params
from tests.helpers.whole_rows import row_logits

BASE = {"d_model": 24, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 6, "d_ff": 40, "vocab_size": 31}
OPTIONS = {"qkv_bias": True}, {"qk_norm": True, "kv_heads": 4}, {"tie_embeddings": False, "rope_theta": 100.0}


@pytest.mark.parametrize("options", OPTIONS)
def test_forward_equals_loops(options):
    config = ModelConfig(**BASE | options)
    # Larger than at the start of training, biases and norms included, so that every term shows.
    params, tokens = random_params(config, seed=1, spread=0.2), np.random.default_rng(0).integers(0, 31, (1, 9))
    wanted = logits(params, tokens[0], config)
    np.testing.assert_allclose(row_logits(params, tokens, config)[0], wanted, atol=2e-5 * np.abs(wanted).max())


def test_bfloat16_gradient_of_a_frequent_token_adds_up_in_float32():
    """A frequent token gets the sum of the gradients of its rows, which a bfloat16 sum would round away."""
    config = ModelConfig(**BASE, compute_dtype="bfloat16")
    params = jax.device_put(random_params(config, seed=1, spread=0.2))
    positions, segment_ids = jnp.arange(600)[None], jnp.ones((1, 600), int)

    @jax.jit
    @jax.grad
    def slope(rows, tokens):
        return forward({**params, "embed": rows}, tokens, positions, segment_ids, config).astype(jnp.float32).sum()

    grad = np.asarray(slope(params["embed"], 0 * positions))
    # Six hundred rows of their own, one per position: the same gradients, added up here in float64.
    apart = np.asarray(slope(jnp.tile(params["embed"][:1], (600, 1)), positions), np.float64).sum(0)
    np.testing.assert_allclose(grad[0], apart, rtol=1e-4, atol=1e-4 * np.abs(apart).max())


MIXED = ModelConfig(**BASE | {"d_model": 16, "d_ff": 12, "vocab_size": 64, "head_dim": 8, "experts": Mixture(4, 2)})


@pytest.mark.parametrize(("per_token", "normed"), [(1, False), (2, True)])
def test_grouped_products_equal_the_loop(per_token, normed):
    """One token and one expert at a time, float64."""
    config = replace(MIXED, experts=Mixture(4, per_token, normed))
    layer = {name: leaf[0] for name, leaf in random_params(config)["layers"].items()}
    h = np.random.default_rng(1).normal(size=(2, 9, 16)).astype(np.float32)
    wanted = np.zeros(h.shape)
    for index in np.ndindex(h.shape[:2]):
        x = np.asarray(h[index], np.float64)
        scores = np.exp(x @ layer["router"])
        chosen = np.argsort(-scores)[:per_token]
        for expert in chosen:
            gate, up, down = x @ layer["w_gate"][expert], x @ layer["w_up"][expert], layer["w_down"][expert]
            weight = scores[expert] / (scores[chosen].sum() if normed else scores.sum())
            wanted[index] += weight * (gate / (1 + np.exp(-gate)) * up) @ down
    got = jax.jit(mix_experts, static_argnums=2)(layer, h, config)
    np.testing.assert_allclose(got, wanted, atol=1e-5 * np.abs(wanted).max())


def test_gpus_need_a_decision_how_experts_are_multiplied():
    with pytest.raises(ValueError, match=r"4 experts on a GPU.* 2 times the work.*XLA_FLAGS=--xla_gpu_\w+=true"):
        check_grouped(MIXED, "gpu", "--xla_gpu_enable_latency_hiding_scheduler=true")
    for platform, flags in (("tpu", ""), ("cpu", ""), ("gpu", f"--{GROUPED_FLAG}=false")):
        check_grouped(MIXED, platform, flags)
    check_grouped(replace(MIXED, experts=ModelConfig().experts), "gpu", "")


def test_replayed_experts_have_the_weights_of_the_current_scores():
    """Scores 2, 1, 0.5, 0: by hand softmax(2, 1) for the own choice and softmax(1, 0.5) for experts 1 and 2."""
    scores, router = np.float32([[2.0, 1.0, 0.5, 0.0]] * 2), np.eye(4, dtype=np.float32)
    replayed = jnp.asarray([[-1, -1], [1, 2]])
    experts, weights = jax.jit(route, static_argnums=2)(scores, router, MIXED, replayed)
    np.testing.assert_array_equal(experts, [[0, 1], [1, 2]])
    np.testing.assert_allclose(weights, [[0.731059, 0.268941], [0.622459, 0.377541]], atol=1e-6)
    slope = jax.jit(jax.grad(lambda scores: route(scores, jnp.asarray(router), MIXED, replayed)[1][1, 0]))(scores)
    np.testing.assert_allclose(slope, [[0] * 4, [0, 0.235004, -0.235004, 0]], atol=1e-6)


def loss(params, tokens, routes, mesh=None):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    splits = Splits(residual=lambda x: constrain(x, mesh, ROWS, None, None)) if mesh else Splits()
    execution = Execution(splits=splits, experts=partial(mix_experts, mesh=mesh))
    numbers = forward(params, tokens, positions, jnp.ones_like(tokens), MIXED, execution, routes)
    return jnp.mean(jax.nn.log_softmax(unembed(params, numbers, MIXED))[..., 3])


def test_gradients_of_replayed_choices_are_the_same_on_a_mesh():
    """`test_update.py` compares those of own choices on other meshes."""
    mesh = make_mesh(ShardingConfig(2, 1, 2, 2))
    params, routes = random_params(MIXED), np.random.default_rng(2).integers(-1, 4, (8, 12, 2, 2)).astype(np.int32)
    tokens = np.random.default_rng(1).integers(0, 64, (8, 12)).astype(np.int32)
    value, grads = jax.jit(jax.value_and_grad(loss))(params, tokens, routes)
    shardings = param_shardings(MIXED, mesh)
    assert shardings["layers"]["w_up"].spec[1] == "tensor"
    placed, rows = jax.device_put((params, tokens), (shardings, NamedSharding(mesh, P(ROWS, None))))
    step = jax.jit(partial(jax.value_and_grad(loss), mesh=mesh), out_shardings=(None, shardings))
    got, sharded = step(placed, rows, routes)
    np.testing.assert_allclose(got, value, rtol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, atol=2e-6), sharded, grads)


DELTA = GatedDelta(key_heads=2, value_heads=6, key_dim=4, value_dim=5, conv=3)
CONV = jnp.asarray(np.random.default_rng(9).normal(size=(2, 23, 3)), jnp.float32)
B, T = 2, 150


def signals_of(seed=0, length=T):
    rng = np.random.default_rng(seed)
    qkv = rng.normal(size=(B, length, 2, 2 * 4 + 3 * 5))
    decay, rate = -np.exp(rng.normal(size=(B, length, 6)) * 1.5 - 2), rng.uniform(size=(B, length, 6))
    return Signals(*(jnp.asarray(x, jnp.float32) for x in (qkv, decay, rate)))


def by_token(segments, signals, conv):
    """The rule as a scan over tokens, with a new state and no past inputs in each segment."""
    position = jnp.arange(T)[None]
    first = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    since = position - jax.lax.cummax(jnp.where(first, position, 0), axis=1)
    past = [jnp.pad(signals.qkv, ((0, 0), (j, 0), (0, 0), (0, 0)))[:, :T] for j in range(3)]
    weights = [conv[None, None, :, :, 2 - j] for j in range(3)]
    x = jax.nn.silu(sum(jnp.where((since >= j)[..., None, None], past[j], 0.0) * weights[j] for j in range(3)))
    unit = [y / jnp.sqrt(jnp.sum(y * y, -1, keepdims=True) + 1e-6) for y in (x[..., :4], x[..., 4:8])]
    q, k = (jnp.repeat(y, 3, axis=2) for y in unit)

    def step(state, token):
        q, k, v, decay, rate, first = token
        state = jnp.where(first[:, None, None, None], 0.0, jnp.exp(decay)[..., None, None] * state)
        error = rate[..., None] * (v - jnp.einsum("bnpu,bnp->bnu", state, k))
        state += k[..., None] * error[:, :, None]
        return state, jnp.einsum("bnpu,bnp->bnu", state, q / 2)

    tokens = q, k, x[..., 8:].reshape(-1, T, 6, 5), signals.decay, signals.rate, first
    tokens = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 1, 0), tokens)
    return jnp.moveaxis(jax.lax.scan(step, jnp.zeros((len(x), 6, 4, 5), x.dtype), tokens)[1], 0, 1)


def in_float64(run, *inputs):
    with jax.enable_x64(True):
        return jax.device_get(jax.jit(run)(*jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), inputs)))


def test_packed_rows_and_their_gradients_equal_the_rule_token_by_token():
    """Segments begin within chunks, at their borders, and span several; padding comes last."""
    segments = np.stack([np.repeat([1, 2, 3, 0], [1, 63, 80, 6]), np.repeat([1, 2, 0], [130, 2, 18])]).astype(np.int32)
    weight = np.random.default_rng(2).normal(size=(B, T, 6, 5))

    def pulled(run, signals, conv):
        out, pull = jax.vjp(run, signals, conv)
        return out, *jax.tree.leaves(pull(jnp.asarray(weight, out.dtype)))

    got = jax.jit(partial(pulled, partial(recur_packed, DELTA, jnp.asarray(segments))))(signals_of(), CONV)
    expected = in_float64(partial(pulled, partial(by_token, segments)), signals_of(), CONV)
    np.testing.assert_allclose(got[0], expected[0], atol=2e-6)
    for leaf, other in zip(got[1:], expected[1:], strict=True):
        np.testing.assert_allclose(leaf, other, atol=3e-5 * float(np.abs(other).max()))


def test_a_cached_row_in_padded_pieces_equals_the_whole_row():
    """Pieces of any length, one of none, padding of random numbers; a new row in the place of the old one."""
    signals = signals_of(1)
    expected = in_float64(partial(by_token, np.ones((B, T))), signals, CONV)
    memory = Memory(*(leaf + 7.0 for leaf in empty_memory(DELTA, B, jnp.float32)))  # what another row left
    step, at = jax.jit(recur_cached), np.zeros(B, int)
    for piece in ([1, 9], [0, 0], [16, 2], [3, 16], [1, 1], [16, 0]):
        length, padded = np.array(piece), [np.array(x) for x in jax.tree.leaves(signals_of(2, length=16))]
        for b in range(B):
            for x, new in zip(padded, signals, strict=True):
                x[b, : length[b]] = new[b, at[b] : at[b] + length[b]]
        padded = Signals(*map(jnp.asarray, padded))
        out, memory = step(memory, jnp.asarray(at == 0), jnp.asarray(length), padded, CONV)
        for b in range(B):
            np.testing.assert_allclose(out[b, : length[b]], expected[b, at[b] : at[b] + length[b]], atol=2e-6)
        at += length


def test_the_inverse_is_exact_where_powers_would_overflow():
    """All keys equal and all rates 1: powers of the matrix reach 10^17 and would cancel."""
    lower = np.tril(np.ones((64, 64), np.float32), -1)
    np.testing.assert_allclose(jax.jit(invert)(lower[None])[0], np.eye(64) - np.eye(64, k=-1), atol=1e-5)


def test_flops_of_a_token_by_hand():
    """Two key heads of 8 and four value heads of 16; spans of 1 and chunks of 64, whose inverse has six levels."""
    rule = GatedDelta(key_heads=2, value_heads=4, key_dim=8, value_dim=16)
    assert token_flops(rule, 1) == 4 * 2 * 8 + 4 * (2 * 40 + 6 * 128)
    assert token_flops(rule, 64) == token_flops(rule, 640) == 4 * 2 * 64 * 8 + 4 * (4 * 6 * 64**2 + 128 * 40 + 6 * 128)


def test_the_backward_pass_gathers_experts_again_instead_of_keeping_them():
    mesh = make_mesh(ShardingConfig(1, 2, 1, 2), jax.devices()[:4])
    shardings = param_shardings(MIXED, mesh)["layers"]
    places = {name: NamedSharding(mesh, P(*sharding.spec[1:])) for name, sharding in shardings.items()}
    layer = {name: jax.device_put(leaf[0], places[name]) for name, leaf in random_params(MIXED)["layers"].items()}
    h = jax.device_put(np.ones((4, 6, 16), np.float32), NamedSharding(mesh, P(ROWS)))
    _, pull = jax.vjp(lambda layer, h: mix_experts(layer, h, MIXED, mesh), layer, h)
    weights = [layer[name] for name in ("w_gate", "w_up", "w_down")]
    residuals = [leaf for leaf in jax.tree.leaves(pull) if leaf.shape[1:] in {weight.shape[1:] for weight in weights}]
    assert len(residuals) == len(weights)
    on_device = {weight.sharding.shard_shape(weight.shape) for weight in weights}
    for leaf in residuals:
        assert leaf.shape[0] == MIXED.experts.count and leaf.sharding.shard_shape(leaf.shape) in on_device
