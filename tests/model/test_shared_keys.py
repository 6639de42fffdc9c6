"""Layers that read the keys of earlier ones, and embeddings by layer (Gemma 4 E2B and E4B): meshes, cache, adapters.

`test_families.py` compares both with transformers.
"""

import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax.engine.config import LowPrecision, SamplingConfig
from grpo_roc_jax.engine.decode import SamplerModel, append
from grpo_roc_jax.engine.engine import make_engine
from grpo_roc_jax.engine.publish import unstack
from grpo_roc_jax.model.config import Mixture, ModelConfig, SlidingWindows, SomeExtras
from grpo_roc_jax.model.convert import load_params, resolve_config, save_params
from grpo_roc_jax.model.lora import LowRank, attach, init_adapter, merge
from grpo_roc_jax.model.low_precision import plain_layer, quantized_layer
from grpo_roc_jax.model.parallel import look_up_on, look_up_wide_on
from grpo_roc_jax.model.pool import IN_PLACE, PAGED, PoolSize, allocate, copy_blocks, enlarge
from grpo_roc_jax.model.published import infer_family, write_config
from grpo_roc_jax.model.rope_scaling import ProportionalRopeScaling
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh, param_shardings
from grpo_roc_jax.planner.hlo import parse_hlo
from grpo_roc_jax.planner.hlo_cost import largest_gather
from grpo_roc_jax.run.policy import cache_bytes, frozen_like, sum_bytes
from tests.helpers import reference
from tests.helpers.rollout_fakes import ROLLOUT, STOPS, FakeTools, make_requests
from tests.helpers.whole_rows import row_logits
from tests.learner import test_update

WINDOWS = SlidingWindows((5, 0), 100.0, full_head_dim=6, full_kv_heads=4, shared_layers=4, shared_ff=48)
MODEL = ModelConfig(
    d_model=16,
    layers=8,
    heads=4,
    kv_heads=4,
    head_dim=4,
    d_ff=24,
    vocab_size=40,
    norm_eps=1e-3,
    activation="gelu_tanh",
    qk_norm=True,
    post_norms=True,
    extras=SomeExtras(scale_embed=True, query_scale=1.0, value_norm=True, layer_factors=True, layer_embed=6),
    windows=WINDOWS,
    rope_scaling=ProportionalRopeScaling(share=0.5),
)
SMOOTH = replace(MODEL, extras=replace(MODEL.extras, query_scale=16.0))
"""With scores so small that attention does not enlarge the rounding."""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"windows": replace(WINDOWS, shared_layers=8)}, "shared_layers = 8"),
        ({"windows": replace(WINDOWS, shared_layers=7)}, "shared_layers = 7"),
        ({"qkv_bias": True, "windows": replace(WINDOWS, full_head_dim=0, full_kv_heads=0)}, "qkv_bias"),
        ({"experts": Mixture(4, 2)}, "shared_ff and experts"),
    ],
)
def test_layers_that_cannot_share_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(MODEL, **change)
    with pytest.raises(ValueError, match=r"shared_ff = 48 with model\.windows\.shared_layers = 0"):
        replace(WINDOWS, shared_layers=0)


@pytest.mark.parametrize("orders", [IN_PLACE, PAGED], ids="-".join)
def test_the_cache_has_arrays_for_layers_with_keys_only(orders):
    size = PoolSize(4, 8, 2)
    pool = allocate(MODEL, size, jnp.float32, orders)
    assert [bool(layer) for layer in pool.layers] == [True] * 4 + [False] * 4
    # Two layers with heads of 4 and two with heads of 6, four heads each, keys and values in float32.
    assert pool.nbytes == 4 * 8 * cache_bytes(MODEL, 4)[0] == 4 * 8 * 2 * (4 + 6) * 4 * 2 * 4
    larger = enlarge(pool, PoolSize(8, 8, 2).arenas(orders))
    assert larger.nbytes == 2 * pool.nbytes and larger.layers[4:] == ((),) * 4
    ones = pool.map(lambda leaf, order: leaf.at[0].set(1.0) if leaf.shape[0] > 1 else leaf)
    copied = copy_blocks(ones, jnp.array([[0], [1]]), jnp.zeros((2, 1), jnp.int32) + 9)
    for layer in copied.layers[:4]:
        for leaf in layer[0]:
            np.testing.assert_array_equal(leaf[1], leaf[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "axes"),
    [
        *((SMOOTH, axes) for axes in [(1, 2, 2), (1, 2, 1), (1, 1, 2), (2, 1, 2), (1, 2, 1, 2)]),
        (replace(SMOOTH, kv_heads=1, windows=replace(WINDOWS, full_kv_heads=1)), (1, 1, 4)),
    ],
    ids=lambda value: str(value) if isinstance(value, tuple) else f"{value.kv_heads} key heads",
)
def test_loss_and_gradients_are_those_of_one_device(model, axes):
    rows = reference.random_rows(test_update.LENGTHS, 40)
    wanted = test_update.gradients(rows, model=model)
    assert all(np.abs(wanted[1][name]).max() > 0 for name in ("layer_embed", "layer_proj", "layer_proj_norm"))
    test_update.assert_close(test_update.gradients(rows, axes, model=model), wanted, 5e-5)


def test_wide_rows_are_exchanged_and_not_the_table():
    """The same rows and gradients as by the table; the largest array that is gathered is smaller than its share."""
    mesh = make_mesh(ShardingConfig(fsdp=2, tensor=2), jax.devices()[:4])
    sharding = param_shardings(replace(MODEL, vocab_size=4096), mesh)["layer_embed"]
    table = jax.device_put(np.random.default_rng(0).normal(size=(4096, 8, 6)).astype(np.float32), sharding)
    ids = jnp.asarray(np.random.default_rng(1).integers(0, 4096, (4, 10)))
    weight = jnp.asarray(np.random.default_rng(2).normal(size=(4, 10, 48)).astype(np.float32))

    def compiled(look_up):
        def value(table, ids):
            rows = look_up(table.reshape(4096, 48), ids)
            return jnp.sum(rows * weight), rows

        function = jax.value_and_grad(value, has_aux=True)
        return jax.jit(function, out_shardings=((None, None), sharding)).lower(table, ids).compile()

    exact = jax.value_and_grad(lambda t: jnp.sum(t.reshape(4096, 48)[ids] * weight))(np.asarray(table))
    for look_up, gathers_table in ((look_up_wide_on, False), (look_up_on, True)):
        program = compiled(look_up(mesh, ()))
        (_, rows), slope = program(table, ids)
        np.testing.assert_array_equal(rows, np.asarray(table).reshape(4096, 48)[np.asarray(ids)])
        np.testing.assert_allclose(slope, exact[1], atol=1e-6)
        assert (largest_gather(parse_hlo(program.as_text())).bytes >= table.nbytes / 2) == gathers_table


def test_a_prompt_is_written_without_the_layers_that_share():
    """The FLOPs of an append are those of a model that ends before them."""
    windows, extras = replace(WINDOWS, shared_layers=2), replace(MODEL.extras, layer_embed=0)
    longer = replace(MODEL, layers=4, windows=windows, extras=extras)
    shorter = replace(longer, layers=2, windows=replace(windows, shared_layers=0, shared_ff=0))

    def flops(model):
        params = unstack(reference.random_params(model), model)
        pool = allocate(model, PoolSize(2, 8, 1), jnp.float32, IN_PLACE)
        arrays = jnp.zeros((1, 8), jnp.int32), jnp.zeros((1, 2), jnp.int32), jnp.array([[0], [0], [8]])
        program = jax.jit(partial(append, model=SamplerModel(model))).lower(params, pool, *arrays).compile()
        return program.cost_analysis()["flops"]

    assert flops(longer) == flops(shorter) > 0


# ---- sampling ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("case", ["tensor", "heads", "int8"])
def test_samplers_on_meshes_and_in_int8_draw_what_the_trainer_computes(case):
    """Their log-probabilities are those of the weight check; on a mesh the tokens are those of one device."""
    windows = replace(WINDOWS, shared_layers=2)
    model = replace(MODEL, layers=4, vocab_size=98, windows=windows)
    if case == "heads":
        model = replace(model, kv_heads=1, windows=replace(windows, full_kv_heads=1))
    rollout = replace(ROLLOUT, narrow=())
    if case == "int8":
        rollout = replace(rollout, low_precision=LowPrecision("int8", "int8"))
    params, tokens, requests = reference.random_params(model, seed=1), [], make_requests(3, 3)
    for mesh in (None, make_mesh(ShardingConfig(data=1, tensor=2), jax.devices()[:2])):
        placed = params if mesh is None else jax.device_put(params, param_shardings(model, mesh))
        engine = make_engine(model, rollout, SamplingConfig(), STOPS, mesh, seed=11)
        sampler = engine.publish(jax.device_put(placed) if mesh is None else placed, 5)
        assert sampler.check_gap < 2e-5
        rollouts, _ = engine.run(sampler, requests, FakeTools(requests))
        tokens.append([row.tokens.tolist() for row in rollouts])
    assert tokens[0] == tokens[1]


# ---- adapters ------------------------------------------------------------------------------------------------------

LORA = LowRank(rank=2, alpha=4.0)
SHORT = replace(SMOOTH, layers=4, windows=replace(WINDOWS, shared_layers=2))


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
def test_adapters_on_frozen_weights_in_few_bits(bits):
    """Every target of every layer has a pair, the wide feed-forwards too; a quantized base computes what its numbers in
    float32 compute, and merging adds the pairs."""
    base, tokens = unstack(reference.random_params(SHORT, seed=1), SHORT), np.arange(9)[None]
    adapter = init_adapter(jax.random.key(0), LORA, SHORT)
    rng = np.random.default_rng(5)
    adapter = jax.tree.map(lambda leaf: 0.2 * rng.normal(size=leaf.shape).astype(np.float32), adapter)
    assert adapter["layers"]["d_down_lora_a"].shape == (2, 48, 2) and "wk_lora_a" in adapter["layers"]
    stored = base | {"layers": tuple(quantized_layer(layer, bits) for layer in base["layers"])}
    plain = base | {"layers": tuple(plain_layer(layer, jnp.float32) for layer in stored["layers"])}
    run = partial(row_logits, tokens=tokens, model=SHORT)
    wanted = run(attach(plain, adapter, LORA))
    np.testing.assert_allclose(run(attach(stored, adapter, LORA)), wanted, atol=1e-4)
    np.testing.assert_allclose(run(merge(plain, adapter, LORA)), wanted, atol=1e-4)
    assert np.abs(wanted - run(plain)).max() > 1e-2
    sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves(params["layers"])) for params in (plain, stored)]
    mesh = make_mesh(ShardingConfig(data=1), jax.devices()[:1])
    assert sizes == [sum_bytes(frozen_like(SHORT, mesh, stored)["layers"]) for stored in (16, bits)]


# ---- directories ---------------------------------------------------------------------------------------------------


def test_directories_with_keys_that_nothing_reads(tmp_path, caplog):
    """As published: layers that share keys have tensors for them too."""
    params, family = reference.random_params(MODEL, seed=2), infer_family(MODEL)
    extra = replace(MODEL, windows=replace(WINDOWS, shared_layers=0, shared_ff=0))
    for name, model in (("own", MODEL), ("all", extra)):
        (tmp_path / name).mkdir()
        values = params if model is MODEL else reference.random_params(model, seed=3)
        save_params(jax.device_put(values), model, family, tmp_path / name, dtype=np.float32)
    with pytest.raises(ValueError, match=r"of another shape: .*model\.layers\.4\.mlp"):
        (tmp_path / "all" / "config.json").write_text(json.dumps(write_config(MODEL)))
        load_params(tmp_path / "all", MODEL)
    narrow = replace(MODEL, windows=replace(WINDOWS, shared_ff=0))
    (tmp_path / "all" / "config.json").write_text(json.dumps(write_config(narrow)))
    loaded = load_params(tmp_path / "all", resolve_config(ModelConfig(path=str(tmp_path / "all"))))
    assert "12 tensors of keys and values that are shared are left out" in caplog.text
    assert loaded["layers"]["wk"].shape[0] == 2
    (tmp_path / "own" / "config.json").write_text(json.dumps(write_config(MODEL)))
    again = load_params(tmp_path / "own", MODEL)
    jax.tree.map(np.testing.assert_array_equal, again, params)
