"""Adapters, also on frozen weights in 8 and 4 bits: gradients, merging, updates; the base exists once and stays."""

import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import NamedSharding, P

from grpo_roc_jax.learner.loss import UpdateConfig
from grpo_roc_jax.learner.pack import BatchConfig, pack
from grpo_roc_jax.learner.update import OptimConfig, bind_base, init_train_state, make_update_step
from grpo_roc_jax.method.surrogate import NegativeLogLikelihood
from grpo_roc_jax.model import low_precision
from grpo_roc_jax.model.config import GatedDelta, ModelConfig, SomeExtras
from grpo_roc_jax.model.convert import load_params, read_published, resolve_config
from grpo_roc_jax.model.families import find_family
from grpo_roc_jax.model.lora import TARGETS, LowRank, attach, init_adapter, load_adapter, merge, read_lora, save_adapter
from grpo_roc_jax.model.safetensors_io import CheckpointError, read_header
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh, shard_batch
from tests.helpers.published_models import logits_of, need_reference, random_tokens, save_model
from tests.helpers.reference import random_params, random_rows
from tests.helpers.whole_rows import layers_apart, row_logits

MODEL = ModelConfig(d_model=16, layers=2, heads=4, kv_heads=2, head_dim=8, d_ff=24, vocab_size=64, qk_norm=True)
DELTA = GatedDelta(key_heads=1, value_heads=2, key_dim=4, value_dim=6, every=2)
HYBRID = replace(MODEL, windows=DELTA, extras=SomeExtras(rotary_share=0.5))
LORA = LowRank(rank=3, alpha=12.0)
SLOW = pytest.mark.slow


def random_adapter(lora=LORA, model=MODEL):
    like = jax.eval_shape(partial(init_adapter, lora=lora, model=model), jax.random.key(1))
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda leaf: 0.2 * rng.normal(size=leaf.shape).astype(leaf.dtype), like)


def logits_and_slopes(join, adapter, model):
    """(logits, gradients of the pairs) with the parameters that `join` makes of the pairs."""
    weight = np.random.default_rng(5).normal(size=(2, 12, model.vocab_size)).astype(np.float32)

    def value(pairs):
        logits = row_logits(join(pairs), random_tokens(2, 12) % model.vocab_size, model)
        return jnp.sum(weight * logits), logits

    (_, logits), slopes = jax.jit(jax.value_and_grad(value, has_aux=True))(adapter)
    return logits, jax.tree.leaves(slopes)


@pytest.mark.parametrize(("model", "targets"), [(MODEL, LORA.targets), (HYBRID, tuple(TARGETS))])
def test_merged_and_unmerged_weights_have_the_same_logits_and_gradients(model, targets):
    """By the chain rule, gradients of the pairs are those of the merged weights, projected."""
    lora = LowRank(rank=3, alpha=12.0, targets=targets)
    base, adapter = random_params(model), random_adapter(lora, model)
    inputs = {name: leaf.ndim - 2 for name, leaf in adapter["layers"].items() if name.endswith("_a")}
    assert inputs == {name: 1 + (name in ("wo_lora_a", "w_out_lora_a")) for name in inputs}, "heads and their width"
    apart, merged = layers_apart(base, model), partial(merge, lora=lora)
    wanted, full = logits_and_slopes(partial(merged, base), adapter, model)
    plain, _ = logits_and_slopes(lambda pairs: base, adapter, model)
    fresh, _ = logits_and_slopes(partial(attach, base, lora=lora), init_adapter(jax.random.key(1), lora, model), model)
    np.testing.assert_allclose(fresh, plain, atol=1e-5, err_msg="a fresh adapter changes nothing")
    effect = np.abs(wanted - plain).max()
    assert effect > 1 and all(np.abs(slope).max() > 1e-2 for slope in full)
    for given in [base, apart] if model is MODEL else [base]:
        got, slopes = logits_and_slopes(lambda pairs, given=given: attach(given, pairs, lora), adapter, model)
        np.testing.assert_allclose(got, wanted, atol=1e-5 * effect)  # processors differ in what float32 rounds
        for slope, other in zip(slopes, full, strict=True):
            atol = 2e-4 if model is MODEL else 2e-4 * float(np.abs(other).max())  # recurrent sums cancel
            np.testing.assert_allclose(slope, other, rtol=2e-4, atol=atol)
    one_by_one = layers_apart(jax.jit(merged)(base, adapter), model)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), jax.jit(merged)(apart, adapter), one_by_one)


def test_training_moves_the_adapter_and_nothing_else():
    """On a mesh; slow tests compare updates with those of one device."""
    mesh = make_mesh(ShardingConfig(data=2, fsdp=2, tensor=2))
    base = layers_apart(random_params(MODEL), MODEL)
    optim = OptimConfig(lr=1e-2, warmup_steps=0)
    state = init_train_state(jax.random.key(1), MODEL, optim, mesh, LORA)
    placed = jax.device_put(base, NamedSharding(mesh, P()))
    step = make_update_step(MODEL, NegativeLogLikelihood(), optim, UpdateConfig(vocab_chunk=32), mesh, lora=LORA)
    step = bind_base(step, placed)
    rows = [replace(row, advantages=np.ones(16, np.float32)) for row in random_rows([16] * 4, MODEL.vocab_size)]
    batch, losses = shard_batch(pack(rows, BatchConfig(row_length=16, rows=4), 1)[0], mesh), []
    for _ in range(8):
        with jax.transfer_guard("disallow"):
            state, metrics = step(state, batch)
        losses.append(float(metrics["loss/value"]))
    assert losses[-1] < losses[0] - 0.1
    jax.tree.map(np.testing.assert_array_equal, layers_apart(random_params(MODEL), MODEL), placed)


@pytest.mark.parametrize("name", ["qwen3-tied", *(pytest.param(name, marks=SLOW) for name in ("gemma3", "qwen35"))])
def test_peft_loads_a_saved_adapter_and_the_reverse(tmp_path, name):
    lora = LowRank(rank=3, alpha=12.0, targets=tuple(TARGETS)) if name == "qwen35" else LORA
    peft = need_reference("peft")
    model, config = save_model(name, tmp_path / "base"), resolve_config(ModelConfig(path=str(tmp_path / "base")))
    family, base = find_family(read_published(tmp_path / "base")), load_params(tmp_path / "base", config)
    adapter, tokens = random_adapter(lora, config), random_tokens(2, 20)
    (tmp_path / "adapter").mkdir()
    save_adapter(adapter, lora, config, family, tmp_path / "adapter", str(tmp_path / "base"))
    adapted = peft.PeftModel.from_pretrained(model, tmp_path / "adapter")
    adapted.save_pretrained(tmp_path / "by_peft")
    wanted = logits_of(adapted.merge_and_unload(), tokens)
    assert np.abs(wanted - row_logits(base, tokens, config)).max() > 1e-2
    np.testing.assert_allclose(row_logits(attach(base, adapter, lora), tokens, config), wanted, atol=1e-4)
    read = read_lora(tmp_path / "by_peft")
    assert set(read.targets) == set(lora.targets) and (read.rank, read.alpha) == (3, 12.0)
    jax.tree.map(np.testing.assert_array_equal, load_adapter(tmp_path / "by_peft", lora, config, family), adapter)


def test_adapters_that_do_not_fit_or_compute_something_else_are_refused(tmp_path):
    family = find_family({"architectures": ["Qwen3ForCausalLM"]})
    phi, model = find_family({"architectures": ["Phi3ForCausalLM"]}), replace(MODEL, qk_norm=False)
    with pytest.raises(CheckpointError, match=r"gate_up_proj.*qkv_proj.*export the merged weights"):
        save_adapter(random_adapter(LORA, model), LORA, model, phi, tmp_path, "base")
    save_adapter(random_adapter(), LORA, MODEL, family, tmp_path, "base")
    with pytest.raises(CheckpointError, match=r"unexpected: base_model\.model\.model\.layers\.1"):
        load_adapter(tmp_path, LORA, replace(MODEL, layers=1), family)
    file = tmp_path / "adapter_config.json"
    published = json.loads(file.read_text()) | {"peft_version": "1", "corda_config": None, "loftq_config": {}}
    file.write_text(json.dumps(published | {"init_lora_weights": "gaussian", "exclude_modules": ["lm_head"]}))
    assert read_lora(tmp_path).rank == LORA.rank, "these change nothing"
    for key, value, message in (
        *(("use_dora", True, "use_dora"), ("an_option_of_next_year", True, "next_year")),
        *(("r", 0, "must have r and lora_alpha above 0"), ("target_modules", ["lm_head"], "lm_head")),
    ):
        file.write_text(json.dumps(published | {key: value}))
        with pytest.raises(CheckpointError, match=message):
            read_lora(tmp_path)


@pytest.mark.parametrize(("kind", "within"), [("gemma3", "language_model."), ("qwen3_5", "")])
def test_names_of_an_adapter_are_those_of_the_model_that_transformers_loads(tmp_path, kind, within):
    """From a directory of Qwen3.5 `AutoModelForCausalLM` makes the text model, from one of Gemma 3 the whole one."""
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": {}, "model_type": kind}))
    model, family = replace(MODEL, path=str(tmp_path)), find_family({"architectures": ["Qwen3ForCausalLM"]})
    save_adapter(random_adapter(), LORA, model, family, tmp_path, "base")
    names = read_header(tmp_path / "adapter_model.safetensors")
    assert all(name.startswith(f"base_model.model.model.{within}layers.") for name in names)
    jax.tree.map(np.testing.assert_array_equal, load_adapter(tmp_path, LORA, model, family), random_adapter())


@pytest.mark.parametrize("shape, axes", [((160, 3, 5), (0,)), ((3, 80, 7), (0, 1))])
def test_every_number_takes_the_nearest_level_of_its_block(shape, axes):
    """Two numbers are in a byte, and the level 1 is the largest number of a block."""
    weight = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    stored = low_precision.quantize(jnp.asarray(weight), axes, 4)
    assert stored.codes.dtype == jnp.uint8 and 2 * stored.codes.size == weight.size and stored.shape == shape
    axis, width = axes[-1], shape[axes[-1]]
    block = width // stored.scales.shape[axis]
    most = low_precision.BLOCK
    assert width % block == 0 and block <= most and block * 2 > min(most, width) // 2
    largest = np.abs(weight).reshape(*shape[:axis], -1, block, *shape[axis + 1 :]).max(axis + 1)
    np.testing.assert_allclose(stored.scales.astype(jnp.float32), largest, rtol=2**-8)
    scales = np.repeat(np.asarray(stored.scales, np.float32), block, axis)
    levels = np.asarray(low_precision.NF4_LEVELS, np.float32)
    nearest = levels[np.abs(weight[..., None] / scales[..., None] - levels).argmin(-1)] * scales
    np.testing.assert_allclose(stored.plain(jnp.float32), nearest, rtol=1e-6)
    with pytest.raises(ValueError, match=r"3 inputs in 4 bits; must be an even number; set lora\.base_bits 8"):
        low_precision.quantize(jnp.ones((3, 2)), (0,), 4)


@pytest.mark.parametrize("kind", ["int8", "int4", "uint4", "nf4"])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("inputs", [1, 2])
def test_a_product_and_its_gradient_are_those_of_the_plain_matrix(kind, flat, inputs):
    rng = np.random.default_rng(1)
    codes = rng.integers(-127 if kind == "int8" else 0, 128 if kind == "int8" else 16, (4, 6, 3))
    scales = rng.uniform(0.5, 1.0, (2, 1, 3) if inputs == 2 else (2, 6, 3)).astype(np.float32)
    offsets = jnp.asarray(rng.normal(size=scales.shape), jnp.float32) if kind == "uint4" else None
    codes = codes.astype(np.int8) if kind == "int8" else low_precision.pack(codes.astype(np.uint8), inputs - 1)
    weight = low_precision.QuantizedWeight(jnp.asarray(codes), jnp.asarray(scales), offsets, kind=kind, axis=inputs - 1)
    width = weight.shape[:inputs]
    x = jnp.asarray(rng.normal(size=(5, int(np.prod(width))) if flat else (5, *width)), jnp.float32)

    def plain(x):
        matrix = weight.plain(jnp.float32).reshape((x.shape[1], -1) if flat else weight.shape)
        return jnp.tensordot(x, matrix, 1 if flat else inputs)

    def of(function):
        return jax.jit(lambda x: (*jax.vjp(function, x)[1](jnp.sin(function(x))), function(x)))(x)

    results = of(lambda x: low_precision.product(x, weight, inputs, None, flat)), of(plain)
    for got, expected in zip(*results, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5 * float(jnp.abs(expected).max()))


@pytest.mark.parametrize("model, bits", [(MODEL, 8), pytest.param(HYBRID, 4, marks=SLOW)], ids=["dense", "recurrent"])
def test_logits_gradients_and_merged_weights_are_those_of_the_dequantized_base(model, bits, lora=LORA):
    base = layers_apart(random_params(model), model)
    base |= {"layers": tuple(low_precision.quantized_layer(layer, bits) for layer in base["layers"])}
    plain = base | {"layers": tuple(low_precision.plain_layer(layer, jnp.float32) for layer in base["layers"])}
    adapter, join = random_adapter(lora, model), partial(attach, lora=lora)
    (got, slopes), (expected, others) = (logits_and_slopes(partial(join, of), adapter, model) for of in (base, plain))
    np.testing.assert_allclose(got, expected, rtol=2e-4, atol=2e-4)
    for slope, other in zip(slopes, others, strict=True):
        np.testing.assert_allclose(slope, other, atol=3e-4 * float(jnp.abs(other).max()))
    merged = jax.jit(partial(merge, lora=lora))(base, adapter)
    assert {leaf.dtype for leaf in jax.tree.leaves(merged)} == {jnp.dtype(jnp.float32)}
    tokens = random_tokens(2, 12) % model.vocab_size
    np.testing.assert_allclose(row_logits(merged, tokens, model), got, rtol=1e-3, atol=1e-3)
