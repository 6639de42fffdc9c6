"""Adapters: the gradient is the projected one, merging changes nothing, the base exists once and is not modified."""

import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from grpo_roc_jax.engine.publish import Publisher
from grpo_roc_jax.learner.loss import UpdateConfig
from grpo_roc_jax.learner.pack import TrainBatch
from grpo_roc_jax.learner.update import OptimConfig, bind_base, init_train_state, make_update_step
from grpo_roc_jax.method.surrogate import NegativeLogLikelihood
from grpo_roc_jax.model.config import GatedDelta, Mixture, ModelConfig, SomeExtras
from grpo_roc_jax.model.convert import load_params, read_published, resolve_config
from grpo_roc_jax.model.families import find_family
from grpo_roc_jax.model.lora import (
    TARGETS,
    LowRank,
    attach,
    init_adapter,
    load_adapter,
    merge,
    read_lora,
    save_adapter,
)
from grpo_roc_jax.model.safetensors_io import CheckpointError
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh, shard_batch
from grpo_roc_jax.model.transformer import take_layer
from tests.helpers.published_models import logits_of, need_reference, random_tokens, save_model
from tests.helpers.reference import random_params
from tests.helpers.whole_rows import row_logits

MODEL = ModelConfig(d_model=16, layers=2, heads=4, kv_heads=2, head_dim=8, d_ff=24, vocab_size=64, qk_norm=True)
DELTA = GatedDelta(key_heads=1, value_heads=2, key_dim=4, value_dim=6, every=2)
HYBRID = replace(MODEL, windows=DELTA, extras=SomeExtras(rotary_share=0.5))
LORA = LowRank(rank=3, alpha=12.0)
SLOW = pytest.mark.slow


def random_adapter(lora=LORA, model=MODEL):
    like = jax.eval_shape(partial(init_adapter, lora=lora, model=model), jax.random.key(1))
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda leaf: 0.2 * rng.normal(size=leaf.shape).astype(leaf.dtype), like)


def layers_apart(params, model=MODEL):
    layers = tuple(take_layer(params["layers"], i, model) for i in range(model.layers))
    return params | {"layers": layers}


def logits(params, model=MODEL):
    return np.asarray(row_logits(params, random_tokens(2, 12) % model.vocab_size, model))


def test_a_fresh_adapter_changes_nothing():
    base = random_params(MODEL)
    adapter = init_adapter(jax.random.key(1), LORA, MODEL)
    np.testing.assert_allclose(logits(attach(base, adapter, LORA)), logits(base), atol=1e-5)


@pytest.mark.parametrize(("model", "targets"), [(MODEL, LORA.targets), (HYBRID, tuple(TARGETS))])
def test_merged_and_unmerged_logits_are_equal(model, targets):
    lora = LowRank(rank=3, alpha=12.0, targets=targets)
    base, adapter = random_params(model), random_adapter(lora, model)
    merged = jax.jit(partial(merge, lora=lora))
    wanted = logits(merged(base, adapter), model)
    effect = np.abs(wanted - logits(base, model)).max()
    assert effect > 1
    inputs = {
        name.removesuffix("_lora_a"): leaf.shape[1:-1]
        for name, leaf in adapter["layers"].items()
        if name.endswith("_a")
    }
    assert {leaf: len(shape) for leaf, shape in inputs.items()} == {
        leaf: 2 if leaf in ("wo", "w_out") else 1 for leaf in inputs
    }, "each head has inputs of its own only where heads go in"
    atol = 1e-5 * effect  # what float32 rounds differs from processor to processor
    np.testing.assert_allclose(logits(attach(base, adapter, lora), model), wanted, atol=atol)
    apart = layers_apart(base, model)
    if model is MODEL:
        np.testing.assert_allclose(logits(attach(apart, adapter, lora), model), wanted, atol=atol)
    one_by_one = layers_apart(jax.device_get(merged(base, adapter)), model)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), merged(apart, adapter), one_by_one)


def test_the_addition_is_alpha_over_rank_times_the_product():
    """One matrix by hand: alpha / rank = 4."""
    base, adapter = random_params(MODEL), random_adapter()
    merged = jax.jit(partial(merge, lora=LORA))(base, adapter)["layers"]
    pair = {name: np.asarray(leaf[1], np.float64) for name, leaf in adapter["layers"].items()}
    wq = np.asarray(base["layers"]["wq"][1], np.float64)
    wanted = wq + 4.0 * np.einsum("dr,rnh->dnh", pair["wq_lora_a"], pair["wq_lora_b"])
    np.testing.assert_allclose(np.asarray(merged["wq"])[1], wanted, atol=1e-6)
    wo = np.asarray(base["layers"]["wo"][1], np.float64)
    wanted = wo + 4.0 * np.einsum("nhr,rd->nhd", pair["wo_lora_a"], pair["wo_lora_b"])
    np.testing.assert_allclose(np.asarray(merged["wo"])[1], wanted, atol=1e-6)


def test_the_gradient_is_the_full_one_projected():
    """With dW the gradient of the merged weight: dA = s dW B^T and dB = s A^T dW, s = alpha / rank."""
    base, adapter = random_params(MODEL), random_adapter()
    weight = np.random.default_rng(5).normal(size=(2, 12, MODEL.vocab_size)).astype(np.float32)
    tokens = random_tokens(2, 12) % MODEL.vocab_size

    def value(params):
        return jnp.sum(weight * row_logits(params, tokens, MODEL))

    @jax.jit
    def both(base, adapter):
        pairs = jax.grad(lambda pairs: value(attach(base, pairs, LORA)))(adapter)
        return pairs["layers"], jax.grad(value)(merge(base, adapter, LORA))["layers"]

    got, full = jax.device_get(both(base, adapter))
    pairs = adapter["layers"]
    for name, inputs in (TARGETS[target] for target in LORA.targets):
        a, b = pairs[f"{name}_lora_a"], pairs[f"{name}_lora_b"]
        L, r = a.shape[0], a.shape[-1]
        d_w = full[name].reshape(L, int(np.prod(a.shape[1:-1])), -1)
        flat_a, flat_b = a.reshape(L, -1, r), b.reshape(L, r, -1)
        d_a = LORA.scale * np.einsum("lio,lro->lir", d_w, flat_b)
        d_b = LORA.scale * np.einsum("lir,lio->lro", flat_a, d_w)
        assert np.abs(d_a).max() > 1e-2 and inputs == a.ndim - 2
        np.testing.assert_allclose(got[f"{name}_lora_a"].reshape(d_a.shape), d_a, rtol=2e-4, atol=2e-4)
        np.testing.assert_allclose(got[f"{name}_lora_b"].reshape(d_b.shape), d_b, rtol=2e-4, atol=2e-4)


def supervised_batch(mesh):
    tokens = (random_tokens(4, 16) % MODEL.vocab_size).astype(np.int32)[None]
    ones = np.ones(tokens.shape, np.float32)
    batch = TrainBatch(
        tokens=tokens,
        segment_ids=np.ones_like(tokens),
        positions=np.broadcast_to(np.arange(16, dtype=np.int32), tokens.shape).copy(),
        policy_mask=np.broadcast_to(np.arange(16) > 0, tokens.shape).copy(),
        logprobs_old=0 * ones,
        advantages=ones,
        weights=ones / tokens.size,
        ratio_segments=np.zeros_like(tokens),
        logprobs_ref=0 * ones,
        count=np.int32(1),
    )
    return shard_batch(batch, mesh)


def test_training_moves_the_adapter_and_nothing_else():
    """On a mesh; `test_quantized_base.py` compares updates with those of one device."""
    mesh = make_mesh(ShardingConfig(data=2, fsdp=2, tensor=2))
    base = layers_apart(random_params(MODEL))
    before = jax.tree.map(np.asarray, base)
    optim = OptimConfig(lr=1e-2, warmup_steps=0)
    state = init_train_state(jax.random.key(1), MODEL, optim, mesh, LORA)
    placed = jax.device_put(base, NamedSharding(mesh, P()))
    step = make_update_step(MODEL, NegativeLogLikelihood(), optim, UpdateConfig(vocab_chunk=32), mesh, lora=LORA)
    step = bind_base(step, placed)
    batch, losses = supervised_batch(mesh), []
    for _ in range(8):
        with jax.transfer_guard("disallow"):
            state, metrics = step(state, batch)
        losses.append(float(metrics["loss/value"]))
    assert losses[-1] < losses[0] - 0.1
    jax.tree.map(np.testing.assert_array_equal, before, placed)
    moments = sum(leaf.nbytes for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim)
    trained, full = (sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (state.params, base))
    assert moments == 8 * trained and trained < full / 2


def test_the_sampler_shares_the_weights_of_the_base():
    mesh = make_mesh(ShardingConfig(data=1), jax.devices()[:1])
    base = jax.device_put(layers_apart(random_params(MODEL)), NamedSharding(mesh, P()))
    published = Publisher(MODEL, mesh, 1e-4).publish(attach(base, random_adapter(), LORA), 3)

    def where(leaf):
        return leaf.unsafe_buffer_pointer()

    for layer, sampled in zip(base["layers"], published.params["layers"], strict=True):
        for name, leaf in layer.items():
            assert where(leaf) == where(sampled[name]), name
        assert "wq_lora_a" in sampled
    assert where(base["embed"]) == where(published.params["embed"])


def test_adapters_that_no_model_has_are_refused():
    experts, start = replace(MODEL, experts=Mixture(4, 2)), partial(init_adapter, jax.random.key(0))
    for make, message in (
        (lambda: LowRank(rank=-1), "rank"),
        (lambda: LowRank(rank=2, alpha=0.0), "alpha"),
        (lambda: LowRank(rank=2, targets=()), r"lora\.targets"),
        (lambda: start(LowRank(targets=("in_proj_z",)), MODEL), "names 'in_proj_z', a matrix of recurrent layers"),
        (lambda: start(LORA, experts), "'gate_proj', which are experts"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    assert len(start(LowRank(rank=2, targets=("q_proj", "o_proj")), experts)["layers"]) == 4


# ---- PEFT directories ----------------------------------------------------------------------------------------------


def saved_base(name, folder):
    """(the model as transformers has it, our configuration, its family, our parameters)."""
    model, config = save_model(name, folder), resolve_config(ModelConfig(path=str(folder)))
    return model, config, find_family(read_published(folder)), load_params(folder, config)


@pytest.mark.parametrize(
    "name", ["qwen3-gqa4", *(pytest.param(name, marks=SLOW) for name in ("gemma3", "qwen35", "gemma4", "gemma4-small"))]
)
def test_peft_loads_a_saved_adapter_and_the_reverse(tmp_path, name):
    lora = LowRank(rank=3, alpha=12.0, targets=tuple(TARGETS)) if name == "qwen35" else LORA
    peft = need_reference("peft")
    model, config, family, base = saved_base(name, tmp_path / "base")
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


@pytest.mark.parametrize("start", ["pissa", "olora", "gaussian"])
def test_an_adapter_of_peft_computes_the_same_or_is_refused(tmp_path, start):
    peft = need_reference("peft")
    model, config, family, base = saved_base("qwen3-gqa4", tmp_path / "base")
    options = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": start}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**options))
    for name, parameter in adapted.named_parameters():
        parameter.data += 0.1 * ("lora_" in name)
    adapted.save_pretrained(tmp_path / "adapter")
    if start != "gaussian":
        with pytest.raises(CheckpointError, match=f"init_lora_weights = '{start}'"):
            read_lora(tmp_path / "adapter")
        return
    lora, tokens = read_lora(tmp_path / "adapter"), random_tokens(2, 20)
    params = attach(base, load_adapter(tmp_path / "adapter", lora, config, family), lora)
    wanted = logits_of(adapted.merge_and_unload(), tokens)
    np.testing.assert_allclose(row_logits(params, tokens, config), wanted, atol=1e-4)


def test_targets_that_a_family_joins_have_no_peft_directory(tmp_path):
    family = find_family({"architectures": ["Phi3ForCausalLM"]})
    model, joined = replace(MODEL, qk_norm=False), LowRank(rank=2)
    with pytest.raises(CheckpointError, match=r"gate_up_proj.*qkv_proj.*export the merged weights"):
        save_adapter(random_adapter(joined, model), joined, model, family, tmp_path, "base")
    apart = LowRank(rank=2, targets=("o_proj", "down_proj"))
    save_adapter(random_adapter(apart, model), apart, model, family, tmp_path, "base")


HARMLESS = {"init_lora_weights": "gaussian", "exclude_modules": ["lm_head"], "layers_pattern": None, "loftq_config": {}}
HARMLESS |= {"peft_version": "1", "corda_config": None, "revision": "main", "runtime_config": {"offload": False}}
CHANGES_THE_RESULT = [
    {"init_lora_weights": "pissa_niter_4"},
    {"loftq_config": {"loftq_bits": 4}},
    {"alora_invocation_tokens": [3, 4]},
    {"lora_bias": True},
    {"bias": "all"},
    {"use_dora": True},
    {"use_rslora": True},
    {"rank_pattern": {"q_proj": 4}},
    {"peft_type": "IA3"},
    {"an_option_of_next_year": 1},
]


def test_adapters_that_do_not_fit_or_compute_something_else_are_refused(tmp_path):
    family = find_family({"architectures": ["Qwen3ForCausalLM"]})
    save_adapter(random_adapter(), LORA, MODEL, family, tmp_path, "base")
    with pytest.raises(CheckpointError, match=r"unexpected: base_model\.model\.model\.layers\.1"):
        load_adapter(tmp_path, LORA, replace(MODEL, layers=1), family)
    with pytest.raises(CheckpointError, match="missing or of another shape"):
        load_adapter(tmp_path, LowRank(rank=4, alpha=12.0), MODEL, family)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"holds no adapter_model\.safetensors"):
        load_adapter(tmp_path, LORA, MODEL, family)
    file = tmp_path / "adapter_config.json"
    published = json.loads(file.read_text()) | HARMLESS
    file.write_text(json.dumps(published))
    assert read_lora(tmp_path).rank == LORA.rank
    for change in ({"lora_alpha": 0}, {"lora_alpha": "inf"}, {"r": 0}, {"target_modules": []}):
        file.write_text(json.dumps(published | change))
        with pytest.raises(CheckpointError, match="must have r and lora_alpha above 0, and target_modules"):
            read_lora(tmp_path)
    file.write_text(json.dumps(published | {"target_modules": [1]}))
    with pytest.raises(CheckpointError, match="must be LORA and a list of names"):
        read_lora(tmp_path)
    for change, message in [({"target_modules": ["lm_head"]}, "lm_head"), *((new, *new) for new in CHANGES_THE_RESULT)]:
        file.write_text(json.dumps(published | change))
        with pytest.raises(CheckpointError, match=message):
            read_lora(tmp_path)
