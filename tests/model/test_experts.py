"""Experts: grouped products against a loop over tokens, replayed choices, and the same numbers on any mesh."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from grpo_roc_jax.engine.config import RolloutConfig, SamplingConfig
from grpo_roc_jax.engine.engine import make_engine
from grpo_roc_jax.engine.protocol import SingleTurn
from grpo_roc_jax.model.config import Mixture, ModelConfig
from grpo_roc_jax.model.experts import GROUPED_FLAG, check_grouped, mix_experts, route
from grpo_roc_jax.model.sharding import ROWS, ShardingConfig, constrain, make_mesh, param_shardings
from grpo_roc_jax.model.transformer import Execution, Splits, forward, unembed
from grpo_roc_jax.planner import plan as planning
from grpo_roc_jax.types import Problem, RolloutRequest
from tests.helpers.reference import random_params

MODEL = ModelConfig(
    d_model=16, layers=2, heads=4, kv_heads=2, head_dim=8, d_ff=12, vocab_size=64, experts=Mixture(4, 2)
)


def loop(layer, h, config):
    """One token and one expert at a time, float64."""
    layer = {name: np.asarray(leaf, np.float64) for name, leaf in layer.items()}
    out = np.zeros(h.shape)
    for index in np.ndindex(h.shape[:2]):
        x = np.asarray(h[index], np.float64)
        scores = np.exp(x @ layer["router"] - (x @ layer["router"]).max())
        scores /= scores.sum()
        chosen = np.argsort(-scores, kind="stable")[: config.experts.per_token]
        weights = scores[chosen] / (scores[chosen].sum() if config.experts.norm_weights else 1.0)
        for expert, weight in zip(chosen, weights, strict=True):
            gate = x @ layer["w_gate"][expert]
            hidden = gate / (1 + np.exp(-gate)) * (x @ layer["w_up"][expert])
            out[index] += weight * (hidden @ layer["w_down"][expert])
    return out


def one_layer(config):
    return {name: leaf[0] for name, leaf in random_params(config)["layers"].items()}


def hidden(*shape):
    return jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.float32)


mix = jax.jit(mix_experts, static_argnums=2)
routed = jax.jit(route, static_argnums=2)


@pytest.mark.parametrize("per_token", [1, 2, 4])
@pytest.mark.parametrize("normed", [True, False])
def test_grouped_products_equal_the_loop(per_token, normed):
    config = ModelConfig(**(vars(MODEL) | {"experts": Mixture(4, per_token, normed)}))
    layer, h = one_layer(config), hidden(2, 9, 16)
    wanted = loop(layer, h, config)
    assert np.abs(wanted).max() > 0.1
    np.testing.assert_allclose(mix(layer, h, config), wanted, atol=1e-5 * np.abs(wanted).max())


def test_gpus_need_a_decision_how_experts_are_multiplied():
    with pytest.raises(ValueError, match=r"4 experts on a GPU.* 2 times the work.*XLA_FLAGS=--xla_gpu_\w+=true"):
        check_grouped(MODEL, "gpu", "--xla_gpu_enable_latency_hiding_scheduler=true")
    for model, platform, flags in (
        (MODEL, "tpu", ""),
        (MODEL, "cpu", ""),
        (replace(MODEL, experts=ModelConfig().experts), "gpu", ""),
        (MODEL, "gpu", f"--{GROUPED_FLAG}=false"),
    ):
        check_grouped(model, platform, flags)
    tpu, gpu = (planning.parse_topology(name, {}) for name in ("v5e:2x2", "h200:8"))
    assert planning.expert_lines(MODEL, tpu) == [] and "a run is refused" in planning.expert_lines(MODEL, gpu)[0]


def test_replayed_experts_have_the_weights_of_the_current_scores():
    """Scores 2, 1, 0.5, 0: by hand softmax(2, 1) for the own choice and softmax(1, 0.5) for experts 1 and 2."""
    scores, router = np.float32([[2.0, 1.0, 0.5, 0.0]] * 2), np.eye(4, dtype=np.float32)
    replayed = jnp.asarray([[-1, -1], [1, 2]])
    experts, weights = routed(scores, router, MODEL, replayed)
    np.testing.assert_array_equal(experts, [[0, 1], [1, 2]])
    np.testing.assert_allclose(weights, [[0.731059, 0.268941], [0.622459, 0.377541]], atol=1e-6)
    slope = jax.jit(jax.grad(lambda scores: route(scores, jnp.asarray(router), MODEL, replayed)[1][1, 0]))(scores)
    np.testing.assert_allclose(slope, [[0] * 4, [0, 0.235004, -0.235004, 0]], atol=1e-6)


def loss(params, tokens, routes, mesh=None):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    splits = Splits(residual=lambda x: constrain(x, mesh, ROWS, None, None)) if mesh else Splits()
    experts = partial(mix_experts, mesh=mesh)
    execution = Execution(splits=splits, experts=experts)
    hidden = forward(params, tokens, positions, jnp.ones_like(tokens), MODEL, execution, routes)
    return jnp.mean(jax.nn.log_softmax(unembed(params, hidden, MODEL))[..., 3])


def test_gradients_of_replayed_choices_are_the_same_on_a_mesh():
    """`test_update.py` compares those of own choices on other meshes."""
    mesh = make_mesh(ShardingConfig(2, 1, 2, 2))
    routes = np.random.default_rng(2).integers(-1, 4, (8, 12, 2, 2)).astype(np.int32)
    params = random_params(MODEL)
    tokens = np.random.default_rng(1).integers(0, 64, (8, 12)).astype(np.int32)
    value, grads = jax.jit(jax.value_and_grad(loss))(params, tokens, routes)
    shardings = param_shardings(MODEL, mesh)
    assert shardings["layers"]["w_up"].spec[1] == "tensor"
    placed = jax.device_put(params, shardings)
    rows = jax.device_put(tokens, NamedSharding(mesh, P(ROWS, None)))
    step = jax.jit(partial(jax.value_and_grad(loss), mesh=mesh), out_shardings=(None, shardings))
    got, sharded = step(placed, rows, routes)
    np.testing.assert_allclose(got, value, rtol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, atol=2e-6), sharded, grads)
    # Each device sorts the tokens of its own rows: nothing of the size of all rows is gathered.
    program = jax.jit(partial(loss, mesh=mesh)).lower(placed, rows, routes).compile().as_text()
    copies = tokens.size * MODEL.experts.per_token
    assert f"f32[{copies}," not in program and f"s32[{copies}]" not in program


def test_the_backward_pass_gathers_experts_again_instead_of_keeping_them():
    mesh = make_mesh(ShardingConfig(1, 2, 1, 2), jax.devices()[:4])
    shardings = param_shardings(MODEL, mesh)["layers"]
    places = {name: NamedSharding(mesh, P(*sharding.spec[1:])) for name, sharding in shardings.items()}
    layer = jax.device_put(one_layer(MODEL), places)
    h = jax.device_put(hidden(4, 6, 16), NamedSharding(mesh, P(ROWS)))
    _, pull = jax.vjp(lambda layer, h: mix_experts(layer, h, MODEL, mesh), layer, h)
    weights = [layer[name] for name in ("w_gate", "w_up", "w_down")]
    residuals = [leaf for leaf in jax.tree.leaves(pull) if leaf.shape[1:] in {weight.shape[1:] for weight in weights}]
    assert len(residuals) == len(weights)
    on_device = {weight.sharding.shard_shape(weight.shape) for weight in weights}
    for leaf in residuals:
        assert leaf.shape[0] == MODEL.experts.count and leaf.sharding.shard_shape(leaf.shape) in on_device


@pytest.mark.slow
def test_the_engine_samples_the_same_where_devices_share_the_experts():
    model = replace(MODEL, layers=1, experts=Mixture(4, 2, replay=True))
    rollout = RolloutConfig(slots=8, max_prompt_tokens=8, max_response_tokens=12, append_lengths=(8,))
    params = random_params(model)
    requests = [
        RolloutRequest(Problem("p", "?", "1", "test"), i, prompt=np.arange(1, 5 + i % 3, dtype=np.int32))
        for i in range(8)
    ]
    rollouts = []
    for mesh in (None, make_mesh(ShardingConfig(2, 2, 2))):
        engine = make_engine(model, rollout, SamplingConfig(), [3], mesh)
        sampler = engine.publish(params if mesh is None else jax.device_put(params, param_shardings(model, mesh)), 0)
        rollouts.append(engine.run(sampler, requests, SingleTurn())[0])
    assert sampler.params["layers"][0]["w_up"].sharding.spec[0] == "tensor"
    for alone, shared in zip(*rollouts, strict=True):
        np.testing.assert_array_equal(alone.tokens, shared.tokens)
        np.testing.assert_array_equal(alone.routes, shared.routes)
        np.testing.assert_allclose(alone.logprobs, shared.logprobs, atol=1e-5)
