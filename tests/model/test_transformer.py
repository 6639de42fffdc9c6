"""The forward pass against a float64 loop, for every option that changes it; experts; shared keys; recurrent layers."""

import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import NamedSharding, P

from grpo_roc_jax.engine.decode import SamplerModel, append
from grpo_roc_jax.engine.publish import unstack
from grpo_roc_jax.learner.loss import UpdateConfig, make_remat
from grpo_roc_jax.learner.pack import BatchConfig
from grpo_roc_jax.model.config import GatedDelta, Mixture, ModelConfig, SlidingWindows, SomeExtras
from grpo_roc_jax.model.convert import load_params, resolve_config, save_params
from grpo_roc_jax.model.delta import Memory, Signals, empty_memory, invert, recur_cached, recur_packed, token_flops
from grpo_roc_jax.model.experts import GROUPED_FLAG, check_grouped, mix_experts, route
from grpo_roc_jax.model.pool import IN_PLACE, PAGED, PoolSize, allocate, copy_blocks, enlarge
from grpo_roc_jax.model.published import infer_family, write_config
from grpo_roc_jax.model.rope_scaling import ProportionalRopeScaling
from grpo_roc_jax.model.sharding import ROWS, ShardingConfig, constrain, make_mesh, param_shardings
from grpo_roc_jax.model.transformer import Execution, Splits, forward, init_params, unembed
from grpo_roc_jax.planner import plan as planning
from grpo_roc_jax.run.policy import cache_bytes
from tests.helpers.reference import logits, random_params, random_rows
from tests.learner import test_update


@partial(jax.jit, static_argnums=4)
def packed_logits(params, *inputs):
    return unembed(params, forward(params, *inputs), inputs[-1])


BASE = {"d_model": 24, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 6, "d_ff": 40, "vocab_size": 31}
OPTIONS = [{}, {"qkv_bias": True}, {"qk_norm": True}, {"tie_embeddings": False}, {"kv_heads": 4}, {"rope_theta": 100.0}]


def model(**options):
    config = ModelConfig(**BASE | options)
    # Larger than at the start of training, biases and norms included, so that every term shows.
    return config, random_params(config, seed=1, spread=0.2)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_packed_forward_equals_loops(options):
    config, params = model(**options)
    lengths = [5, 9, 3]
    tokens = [np.random.default_rng(n).integers(0, 31, n) for n in lengths]
    row = np.concatenate([*tokens, np.zeros(3, int)])[None].astype(np.int32)
    segment_ids = np.repeat([1, 2, 3, 0], [*lengths, 3])[None].astype(np.int32)
    positions = np.concatenate([np.arange(n) for n in [*lengths, 3]])[None].astype(np.int32)
    got = np.asarray(packed_logits(params, row, positions, segment_ids, config))[0]
    start = 0
    for ids in tokens:
        wanted = logits(params, ids, config)
        np.testing.assert_allclose(got[start : start + len(ids)], wanted, atol=2e-5 * np.abs(wanted).max())
        start += len(ids)


def test_bfloat16_gradient_of_a_frequent_token_adds_up_in_float32():
    """A frequent token gets the sum of the gradients of its rows, which a bfloat16 sum would round away."""
    config, params = model(compute_dtype="bfloat16")
    tokens = np.zeros((1, 600), np.int32)
    positions, segment_ids = np.arange(600, dtype=np.int32)[None], np.ones((1, 600), np.int32)

    @jax.jit
    @jax.grad
    def slope(rows, tokens, params, positions, segment_ids):
        x = forward({**params, "embed": rows}, tokens, positions, segment_ids, config)
        return x.astype(jnp.float32).sum()

    rest = params, positions, segment_ids
    grad = np.asarray(slope(params["embed"], tokens, *rest))
    # Six hundred rows of their own, one per position: the same gradients, added up here in float64.
    spread = np.tile(params["embed"][:1], (600, 1))
    apart = np.asarray(slope(spread, positions, *rest), np.float64).sum(0)
    np.testing.assert_allclose(grad[0], apart, rtol=1e-4, atol=1e-4 * np.abs(apart).max())


PERIODIC = {
    "recurrent layers": {"windows": GatedDelta(key_heads=2, value_heads=4, key_dim=8, value_dim=10, every=2)},
    "experts in every second layer": {"experts": Mixture(5, 2, every=2, dense_ff=44)},
}


@pytest.mark.parametrize("remat", [None, make_remat("attention")], ids=["none", "attention"])
@pytest.mark.parametrize("kind", PERIODIC)
def test_the_backward_pass_keeps_no_copy_of_the_weights_of_periods(kind, remat):
    config = ModelConfig(**BASE | {"layers": 4} | PERIODIC[kind])
    params, tokens = random_params(config), jnp.ones((3, 7), jnp.int32)
    run = partial(forward, config=config, execution=Execution(remat=remat))

    def residuals(params):
        return jax.tree.leaves(jax.vjp(lambda params: run(params, tokens, tokens, tokens), params)[1])

    saved, seen = jax.eval_shape(residuals, params), set()
    for name, leaf in params["layers"].items():
        if leaf.ndim > 2:
            same = [other for other in saved if other.shape[1 - leaf.ndim :] == leaf.shape[1:]]
            assert all(other.size == leaf.size for other in same), name
            seen |= {name} if same else set()
    assert {"wq", "wo", "w_up", "w_down"} <= seen


MIXED = ModelConfig(**BASE | {"d_model": 16, "d_ff": 12, "vocab_size": 64, "head_dim": 8, "experts": Mixture(4, 2)})


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
            numbers = gate / (1 + np.exp(-gate)) * (x @ layer["w_up"][expert])
            out[index] += weight * (numbers @ layer["w_down"][expert])
    return out


def layer_and_inputs(config, *shape):
    layer = {name: leaf[0] for name, leaf in random_params(config)["layers"].items()}
    return layer, jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("per_token", [1, 2, 4])
@pytest.mark.parametrize("normed", [True, False])
def test_grouped_products_equal_the_loop(per_token, normed):
    config = replace(MIXED, experts=Mixture(4, per_token, normed))
    layer, h = layer_and_inputs(config, 2, 9, 16)
    wanted = loop(layer, h, config)
    assert np.abs(wanted).max() > 0.1
    got = jax.jit(mix_experts, static_argnums=2)(layer, h, config)
    np.testing.assert_allclose(got, wanted, atol=1e-5 * np.abs(wanted).max())


def test_gpus_need_a_decision_how_experts_are_multiplied():
    with pytest.raises(ValueError, match=r"4 experts on a GPU.* 2 times the work.*XLA_FLAGS=--xla_gpu_\w+=true"):
        check_grouped(MIXED, "gpu", "--xla_gpu_enable_latency_hiding_scheduler=true")
    for platform, flags in (("tpu", ""), ("cpu", ""), ("gpu", f"--{GROUPED_FLAG}=false")):
        check_grouped(MIXED, platform, flags)
    check_grouped(replace(MIXED, experts=ModelConfig().experts), "gpu", "")
    tpu, gpu = (planning.parse_topology(name, {}) for name in ("v5e:2x2", "h200:8"))
    assert planning.expert_lines(MIXED, tpu) == [] and "a run is refused" in planning.expert_lines(MIXED, gpu)[0]


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
    experts = partial(mix_experts, mesh=mesh)
    execution = Execution(splits=splits, experts=experts)
    numbers = forward(params, tokens, positions, jnp.ones_like(tokens), MIXED, execution, routes)
    return jnp.mean(jax.nn.log_softmax(unembed(params, numbers, MIXED))[..., 3])


def test_gradients_of_replayed_choices_are_the_same_on_a_mesh():
    """`test_update.py` compares those of own choices on other meshes."""
    mesh = make_mesh(ShardingConfig(2, 1, 2, 2))
    routes = np.random.default_rng(2).integers(-1, 4, (8, 12, 2, 2)).astype(np.int32)
    params = random_params(MIXED)
    tokens = np.random.default_rng(1).integers(0, 64, (8, 12)).astype(np.int32)
    value, grads = jax.jit(jax.value_and_grad(loss))(params, tokens, routes)
    shardings = param_shardings(MIXED, mesh)
    assert shardings["layers"]["w_up"].spec[1] == "tensor"
    placed = jax.device_put(params, shardings)
    rows = jax.device_put(tokens, NamedSharding(mesh, P(ROWS, None)))
    step = jax.jit(partial(jax.value_and_grad(loss), mesh=mesh), out_shardings=(None, shardings))
    got, sharded = step(placed, rows, routes)
    np.testing.assert_allclose(got, value, rtol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, atol=2e-6), sharded, grads)
    # Each device sorts the tokens of its own rows: nothing of the size of all rows is gathered.
    program = jax.jit(partial(loss, mesh=mesh)).lower(placed, rows, routes).compile().as_text()
    copies = tokens.size * MIXED.experts.per_token
    assert f"f32[{copies}," not in program and f"s32[{copies}]" not in program


def test_the_backward_pass_gathers_experts_again_instead_of_keeping_them():
    mesh = make_mesh(ShardingConfig(1, 2, 1, 2), jax.devices()[:4])
    shardings = param_shardings(MIXED, mesh)["layers"]
    places = {name: NamedSharding(mesh, P(*sharding.spec[1:])) for name, sharding in shardings.items()}
    layer, h = jax.device_put(layer_and_inputs(MIXED, 4, 6, 16), (places, NamedSharding(mesh, P(ROWS))))
    _, pull = jax.vjp(lambda layer, h: mix_experts(layer, h, MIXED, mesh), layer, h)
    weights = [layer[name] for name in ("w_gate", "w_up", "w_down")]
    residuals = [leaf for leaf in jax.tree.leaves(pull) if leaf.shape[1:] in {weight.shape[1:] for weight in weights}]
    assert len(residuals) == len(weights)
    on_device = {weight.sharding.shard_shape(weight.shape) for weight in weights}
    for leaf in residuals:
        assert leaf.shape[0] == MIXED.experts.count and leaf.sharding.shard_shape(leaf.shape) in on_device


WINDOWS = SlidingWindows((5, 0), 100.0, full_head_dim=6, full_kv_heads=4, shared_layers=4, shared_ff=48)
SMALL = {"d_model": 16, "layers": 8, "heads": 4, "kv_heads": 4, "head_dim": 4, "d_ff": 24, "vocab_size": 40}
NORMS = {"norm_eps": 1e-3, "qk_norm": True, "post_norms": True, "rope_scaling": ProportionalRopeScaling(share=0.5)}
EXTRAS = SomeExtras(scale_embed=True, query_scale=1.0, value_norm=True, layer_factors=True, layer_embed=6)
SHARING = ModelConfig(**SMALL, **NORMS, activation="gelu_tanh", extras=EXTRAS, windows=WINDOWS)
SMOOTH = replace(SHARING, extras=replace(SHARING.extras, query_scale=16.0))
"""With scores so small that attention does not enlarge the rounding."""
SHORT = replace(SMOOTH, layers=4, windows=replace(WINDOWS, shared_layers=2))


def test_layers_that_cannot_share_are_refused():
    for change, message in (
        ({"windows": replace(WINDOWS, shared_layers=8)}, "shared_layers = 8"),
        ({"windows": replace(WINDOWS, shared_layers=7)}, "shared_layers = 7"),
        ({"qkv_bias": True, "windows": replace(WINDOWS, full_head_dim=0, full_kv_heads=0)}, "qkv_bias"),
        ({"experts": Mixture(4, 2)}, "shared_ff and experts"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(SHARING, **change)
    with pytest.raises(ValueError, match=r"shared_ff = 48 with model\.windows\.shared_layers = 0"):
        replace(WINDOWS, shared_layers=0)


@pytest.mark.parametrize("orders", [IN_PLACE, PAGED], ids="-".join)
def test_the_cache_has_arrays_for_layers_with_keys_only(orders):
    size = PoolSize(4, 8, 2)
    pool = allocate(SHARING, size, jnp.float32, orders)
    assert [bool(layer) for layer in pool.layers] == [True] * 4 + [False] * 4
    # Two layers with heads of 4 and two with heads of 6, four heads each, keys and values in float32.
    assert pool.nbytes == 4 * 8 * cache_bytes(SHARING, 4)[0] == 4 * 8 * 2 * (4 + 6) * 4 * 2 * 4
    larger = enlarge(pool, PoolSize(8, 8, 2).arenas(orders))
    assert larger.nbytes == 2 * pool.nbytes and larger.layers[4:] == ((),) * 4
    ones = pool.map(lambda leaf, order: leaf.at[0].set(1.0) if leaf.shape[0] > 1 else leaf)
    copied = copy_blocks(ones, jnp.array([[0], [1]]), jnp.zeros((2, 1), jnp.int32) + 9)
    assert all((leaf[1] == leaf[0]).all() for layer in copied.layers[:4] for leaf in layer[0])


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
    rows = random_rows(test_update.LENGTHS, 40)
    wanted = test_update.gradients(rows, model=model)
    assert all(np.abs(wanted[1][name]).max() > 0 for name in ("layer_embed", "layer_proj", "layer_proj_norm"))
    test_update.assert_close(test_update.gradients(rows, axes, model=model), wanted, 5e-5)


def test_a_prompt_is_written_without_the_layers_that_share():
    """The FLOPs of an append are those of a model that ends before them."""
    windows, extras = replace(WINDOWS, shared_layers=2), replace(SHARING.extras, layer_embed=0)
    longer = replace(SHARING, layers=4, windows=windows, extras=extras)
    shorter = replace(longer, layers=2, windows=replace(windows, shared_layers=0, shared_ff=0))

    def flops(model):
        params = unstack(random_params(model), model)
        pool = allocate(model, PoolSize(2, 8, 1), jnp.float32, IN_PLACE)
        arrays = jnp.zeros((1, 8), jnp.int32), jnp.zeros((1, 2), jnp.int32), jnp.array([[0], [0], [8]])
        program = jax.jit(partial(append, model=SamplerModel(model))).lower(params, pool, *arrays).compile()
        return program.cost_analysis()["flops"]

    assert flops(longer) == flops(shorter) > 0


def test_directories_with_keys_that_nothing_reads(tmp_path, caplog):
    """As published: layers that share keys have tensors for them too."""
    extra = replace(SHARING, windows=replace(WINDOWS, shared_layers=0, shared_ff=0))
    values = jax.device_put(random_params(extra, seed=3))
    save_params(values, extra, infer_family(SHARING), tmp_path, dtype=np.float32)
    (tmp_path / "config.json").write_text(json.dumps(write_config(SHARING)))
    with pytest.raises(ValueError, match=r"of another shape: .*model\.layers\.4\.mlp"):
        load_params(tmp_path, SHARING)
    narrow = replace(SHARING, windows=replace(WINDOWS, shared_ff=0))
    (tmp_path / "config.json").write_text(json.dumps(write_config(narrow)))
    loaded = load_params(tmp_path, resolve_config(ModelConfig(path=str(tmp_path))))
    assert "12 tensors of keys and values that are shared are left out" in caplog.text
    assert loaded["layers"]["wk"].shape[0] == 2


DELTA = GatedDelta(key_heads=2, value_heads=6, key_dim=4, value_dim=5, conv=3)
B, T = 2, 150


def signals_of(seed=0, rows=B, length=T):
    rng = np.random.default_rng(seed)
    qkv = rng.normal(size=(rows, length, 2, 2 * 4 + 3 * 5))
    decay = -np.exp(rng.normal(size=(rows, length, 6)) * 1.5 - 2)
    rate = rng.uniform(size=(rows, length, 6))
    return Signals(*(jnp.asarray(x, jnp.float32) for x in (qkv, decay, rate)))


CONV = jnp.asarray(np.random.default_rng(9).normal(size=(2, 23, 3)), jnp.float32)


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

    def pulled(run):
        def both(signals, conv):
            out, pull = jax.vjp(run, signals, conv)
            return out, *jax.tree.leaves(pull(jnp.asarray(weight, out.dtype)))

        return both

    got = jax.jit(pulled(partial(recur_packed, DELTA, jnp.asarray(segments))))(signals_of(), CONV)
    expected = in_float64(pulled(partial(by_token, segments)), signals_of(), CONV)
    np.testing.assert_allclose(got[0], expected[0], atol=2e-6)
    for leaf, other in zip(got[1:], expected[1:], strict=True):
        np.testing.assert_allclose(leaf, other, atol=3e-5 * float(np.abs(other).max()))


def test_a_cached_row_in_padded_pieces_equals_the_whole_row():
    """Pieces of any length, one of none, padding of random numbers; a new row in the place of the old one."""
    signals = signals_of(1)
    expected = in_float64(partial(by_token, np.ones((B, T))), signals, CONV)
    step = jax.jit(recur_cached)
    memory = Memory(*(leaf + 7.0 for leaf in empty_memory(DELTA, B, jnp.float32)))  # what another row left
    at = np.zeros(B, int)
    for piece in ([1, 9], [0, 0], [16, 2], [3, 16], [1, 1], [16, 0]):
        length, padded = np.array(piece), [np.array(x) for x in jax.tree.leaves(signals_of(2, length=16))]
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


PAIR = {"d_model": 16, "heads": 2, "head_dim": 8, "d_ff": 24, "vocab_size": 64, "extras": SomeExtras(rotary_share=0.5)}
HYBRID = ModelConfig(**BASE | PAIR)
SPLIT = GatedDelta(key_heads=2, value_heads=4, key_dim=4, value_dim=6, every=2)


@pytest.mark.slow
def test_gradients_on_a_mesh_are_those_of_one_device(monkeypatch):
    """Heads over `tensor`, rows of two chunks over `data` and `fsdp`, under rematerialization. In float64: the gradient
    of a decay is a small sum of large terms, which float32 rounds by up to 1e-4 of it."""
    rows, model = random_rows(test_update.LENGTHS, 64), replace(HYBRID, windows=SPLIT, layers=4)
    options = {"config": BatchConfig(96, 1), "model": model, "update": UpdateConfig(remat="full")}
    monkeypatch.setattr(jnp, "float32", jnp.float64)
    with jax.enable_x64(True):
        params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), test_update.params_of(model))
        got, expected = (
            test_update.gradients(rows, axes, params=params, **options) for axes in ((2, 2, 2), test_update.ONE)
        )
    test_update.assert_close(got, expected, 1e-11)


def test_what_the_layers_cannot_be_is_refused():
    def placed(**axes):
        model = replace(HYBRID, windows=SPLIT, heads=4, kv_heads=4)
        return param_shardings(model, make_mesh(ShardingConfig(**axes)))

    extras = SomeExtras(rotary_share=0.25)
    for build, message in (
        (partial(placed, sequence=2), r"sharding\.sequence = 2 with model\.windows gated_delta.*set sharding\.seq"),
        (partial(placed, tensor=4), r"model\.windows\.key_heads = 2 is not divisible by sharding\.tensor = 4"),
        (lambda: replace(SPLIT, value_heads=3), r"value_heads = 3 is not a multiple of model\.windows\.key_heads = 2"),
        (lambda: replace(HYBRID, windows=replace(SPLIT, every=4)), r"every = 4; must be at most model\.layers = 2"),
        (lambda: replace(HYBRID, head_dim=12, extras=extras), r"rotary_share = 0\.25 of .* = 12 rotates 3 columns"),
    ):
        with pytest.raises(ValueError, match=message):
            build()


def test_fresh_states_forget_slowly_and_their_norm_has_no_offset():
    model = replace(HYBRID, windows=SPLIT, norm_offset=True)
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
