"""Frozen weights in 8 and 4 bits under an adapter: numbers, gradients, memory of programs, layouts."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax.learner.loss import UpdateConfig
from grpo_roc_jax.learner.update import OptimConfig, bind_base, init_train_state, make_update_step, state_like
from grpo_roc_jax.method.surrogate import NegativeLogLikelihood
from grpo_roc_jax.model.config import Mixture, SomeExtras
from grpo_roc_jax.model.lora import attach, merge
from grpo_roc_jax.model.low_precision import (
    BLOCK,
    MATRICES,
    NF4_LEVELS,
    QuantizedWeight,
    pack,
    plain_layer,
    product,
    quantize,
    quantized_layer,
)
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh, shard_batch
from grpo_roc_jax.planner.arguments import batch_of
from grpo_roc_jax.run.policy import frozen_like, sum_bytes
from tests.helpers.published_models import random_tokens
from tests.helpers.reference import random_params
from tests.helpers.whole_rows import row_logits
from tests.model.test_lora import HYBRID, LORA, MODEL, SLOW, layers_apart, random_adapter, supervised_batch

EXPERTS = replace(MODEL, experts=Mixture(4, 2, shared=24))
LATENT = replace(
    MODEL, kv_heads=1, head_dim=12, extras=SomeExtras(latent=8, latent_query=10, latent_key=6, latent_value=6)
)
OF_ATTENTION = replace(LORA, targets=("q_proj", "o_proj"))


def in_bits(base, bits):
    return base | {"layers": tuple(quantized_layer(layer, bits) for layer in base["layers"])}


def in_full(base):
    return base | {"layers": tuple(plain_layer(layer, jnp.float32) for layer in base["layers"])}


@pytest.mark.parametrize(
    ("shape", "axes"), [((160, 3, 5), (0,)), ((3, 80, 7), (0, 1)), ((2, 96, 5), (1,)), ((6, 4), (0,))]
)
def test_every_number_takes_the_nearest_level_of_its_block(shape, axes):
    """Two numbers are in a byte, and the level 1 is the largest number of a block."""
    weight = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    stored = quantize(jnp.asarray(weight), axes, 4)
    assert stored.codes.dtype == jnp.uint8 and 2 * stored.codes.size == weight.size and stored.shape == shape
    axis, width = axes[-1], shape[axes[-1]]
    block = width // stored.scales.shape[axis]
    assert width % block == 0 and block <= BLOCK and block * 2 > min(BLOCK, width) // 2
    largest = np.abs(weight).reshape(*shape[:axis], -1, block, *shape[axis + 1 :]).max(axis + 1)
    np.testing.assert_allclose(stored.scales.astype(jnp.float32), largest, rtol=2**-8)
    scales = np.repeat(np.asarray(stored.scales, np.float32), block, axis)
    levels = np.asarray(NF4_LEVELS, np.float32)
    nearest = levels[np.abs(weight[..., None] / scales[..., None] - levels).argmin(-1)] * scales
    np.testing.assert_allclose(stored.plain(jnp.float32), nearest, rtol=1e-6)


def test_an_odd_axis_is_refused_in_four_bits():
    assert quantize(jnp.ones((3, 2)), (0,), 8).shape == (3, 2)
    with pytest.raises(ValueError, match=r"3 inputs in 4 bits; must be an even number; set lora\.base_bits 8"):
        quantize(jnp.ones((3, 2)), (0,), 4)


@pytest.mark.parametrize("kind", ["int8", "int4", "uint4", "nf4"])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("inputs", [1, 2])
def test_a_product_and_its_gradient_are_those_of_the_plain_matrix(kind, flat, inputs):
    rng = np.random.default_rng(1)
    codes = rng.integers(-127 if kind == "int8" else 0, 128 if kind == "int8" else 16, (4, 6, 3))
    scales = rng.uniform(0.5, 1.0, (2, 1, 3) if inputs == 2 else (2, 6, 3)).astype(np.float32)
    offsets = jnp.asarray(rng.normal(size=scales.shape), jnp.float32) if kind == "uint4" else None
    codes = codes.astype(np.int8) if kind == "int8" else pack(codes.astype(np.uint8), inputs - 1)
    weight = QuantizedWeight(jnp.asarray(codes), jnp.asarray(scales), offsets, kind=kind, axis=inputs - 1)
    x = jnp.asarray(
        rng.normal(size=(5, 24 if inputs == 2 else 4) if flat else (5, *weight.shape[:inputs])), jnp.float32
    )

    def plain(x):
        matrix = weight.plain(jnp.float32)
        matrix = matrix.reshape(x.shape[1], -1) if flat else matrix
        return jnp.tensordot(x, matrix, 1 if flat else inputs)

    def of(function):
        return jax.jit(lambda x: (*jax.vjp(function, x)[1](jnp.sin(function(x))), function(x)))(x)

    for got, expected in zip(of(lambda x: product(x, weight, inputs, None, flat)), of(plain), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5 * float(jnp.abs(expected).max()))


@pytest.mark.parametrize(
    ("model", "bits"),
    [
        (MODEL, 8),
        *(pytest.param(model, 4, marks=SLOW) for model in (MODEL, HYBRID, EXPERTS, LATENT)),
    ],
    ids=["dense-8", "dense-4", "recurrent-4", "experts-4", "latent-4"],
)
def test_logits_gradients_and_merged_weights_are_those_of_the_dequantized_base(model, bits):
    lora = OF_ATTENTION if model.experts.count or model.extras.latent else LORA
    base = in_bits(layers_apart(random_params(model), model), bits)
    adapter, tokens = random_adapter(lora, model), random_tokens(2, 12) % model.vocab_size
    weight = np.random.default_rng(5).normal(size=(2, 12, model.vocab_size)).astype(np.float32)

    @jax.jit
    def both(base, adapter):
        def value(adapter):
            logits = row_logits(attach(base, adapter, lora), tokens, model)
            return jnp.sum(weight * logits), logits

        return jax.value_and_grad(value, has_aux=True)(adapter)

    (_, got), grads = both(base, adapter)
    (_, expected), expected_grads = both(in_full(base), adapter)
    np.testing.assert_allclose(got, expected, rtol=2e-4, atol=2e-4)
    jax.tree.map(
        lambda got, expected: np.testing.assert_allclose(got, expected, atol=3e-4 * float(jnp.abs(expected).max())),
        grads,
        expected_grads,
    )
    merged = jax.jit(partial(merge, lora=lora))(base, adapter)
    assert {leaf.dtype for leaf in jax.tree.leaves(merged)} == {jnp.dtype(jnp.float32)}
    np.testing.assert_allclose(row_logits(merged, tokens, model), got, rtol=1e-3, atol=1e-3)


@SLOW
@pytest.mark.parametrize(
    ("mesh", "bits", "model"),
    [
        ({"fsdp": 2, "tensor": 2}, 4, MODEL),
        ({"fsdp": 2, "tensor": 2}, 8, MODEL),
        ({"data": 2, "fsdp": 2, "tensor": 2}, 16, MODEL),
        ({"data": 2}, 4, MODEL),
        ({"fsdp": 2, "tensor": 2}, 4, EXPERTS),
    ],
    ids=lambda value: str(value) if isinstance(value, dict | int) else "experts" if value is EXPERTS else "dense",
)
def test_updates_on_a_mesh_are_those_of_one_device(mesh, bits, model):
    lora, optim = OF_ATTENTION if model.experts.count else LORA, OptimConfig(lr=1e-2)

    def updated(mesh):
        base = layers_apart(random_params(model), model)
        base = in_bits(base, bits) if bits < 16 else base
        base = jax.device_put(base, jax.tree.map(lambda leaf: leaf.sharding, frozen_like(model, mesh, bits)))
        step = make_update_step(model, NegativeLogLikelihood(), optim, UpdateConfig(remat="full"), mesh, lora=lora)
        state = init_train_state(jax.random.key(2), model, optim, mesh, lora)
        before = jax.device_get(base)
        state, metrics = bind_base(step, base)(state, shard_batch(supervised_batch(mesh), mesh))
        jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(base))
        return jax.device_get((state.params, metrics["loss/value"]))

    single = updated(make_mesh(ShardingConfig(data=1), jax.devices()[:1]))
    devices = int(np.prod(list(mesh.values())))
    many = updated(make_mesh(ShardingConfig(**{"data": 1} | mesh), jax.devices()[:devices]))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5), many, single)


DEEP = replace(MODEL, layers=8, d_model=128, heads=4, kv_heads=4, head_dim=32, d_ff=512, vocab_size=32)


def compiled_update(bits, remat, layers=8):
    """(program of an update of few tokens, bytes of the matrices of all layers in float32)."""
    model, mesh = replace(DEEP, layers=layers), make_mesh(ShardingConfig(data=1), jax.devices()[:1])
    step = make_update_step(
        model, NegativeLogLikelihood(), OptimConfig(), UpdateConfig(remat=remat, attention="reference"), mesh, lora=LORA
    )
    plain = frozen_like(model, mesh)["layers"]
    matrices = sum(4 * leaf.size for layer in plain for name, leaf in layer.items() if name in MATRICES)
    batch = batch_of((1, 1, 8), mesh)
    base = frozen_like(model, mesh, bits)
    return step.lower(state_like(model, OptimConfig(), mesh, LORA), batch, base).compile(), matrices


@SLOW
@pytest.mark.parametrize(("bits", "remat"), [(4, "none"), (8, "full"), (4, "full")])
def test_an_update_never_has_all_layers_dequantized(bits, remat):
    """Counted in the compiled program: arguments in fewer bits, and temporaries that do not grow with the depth by
    more than activations do."""
    program, matrices = compiled_update(bits, remat)
    shallow, fewer = compiled_update(bits, remat, layers=4)
    exact, _ = compiled_update(16, remat)
    memory, shallow, exact = (of.memory_analysis() for of in (program, shallow, exact))
    saved = exact.argument_size_in_bytes - memory.argument_size_in_bytes
    mesh = make_mesh(ShardingConfig(data=1), jax.devices()[:1])
    assert saved == sum_bytes(frozen_like(DEEP, mesh)) - sum_bytes(frozen_like(DEEP, mesh, bits))
    share = {8: 1 / 4, 4: 4.25 / 32}[bits]
    assert saved == pytest.approx(matrices * (1 - share), rel=0.01)
    grown = memory.temp_size_in_bytes - shallow.temp_size_in_bytes
    assert grown < (matrices - fewer) / 4
    assert memory.temp_size_in_bytes < matrices / 2
