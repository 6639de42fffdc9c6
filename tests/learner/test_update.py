"""One optimizer step: equal on every layout and mesh, compiled once, skipped if something is not finite."""

import functools
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_roc_jax import BatchConfig, Clip, Learner, ModelConfig, OptimConfig, init_params
from grpo_roc_jax.checks import check_params
from grpo_roc_jax.engine.publish import unstack
from grpo_roc_jax.learner import update as steps
from grpo_roc_jax.learner.loss import UpdateConfig, batch_loss, policy_logprobs
from grpo_roc_jax.learner.pack import pack, unpack, worst_case_micro_batches
from grpo_roc_jax.learner.update_parts import make_update_parts
from grpo_roc_jax.method.divergence import K3
from grpo_roc_jax.method.surrogate import Surrogate
from grpo_roc_jax.model.config import Mixture, SomeExtras
from grpo_roc_jax.model.lora import LowRank, attach, init_adapter
from grpo_roc_jax.model.low_precision import quantized_layer
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh, param_shardings, row_shards, shard_batch
from grpo_roc_jax.planner.hlo import arrays, device_groups, parse_hlo
from grpo_roc_jax.record.metrics import CompilationCounter
from tests.helpers import reference

MODEL = ModelConfig(d_model=16, layers=2, heads=8, kv_heads=8, head_dim=4, d_ff=24, vocab_size=40)
OPTIM = OptimConfig(lr=1e-2, warmup_steps=2, max_grad_norm=0.01, weight_decay=0.1)
BATCH = BatchConfig(row_length=32, rows=2)
LOSS = Clip(kl=K3(coef=0.1))
LENGTHS = [5, 11, 2, 16, 9, 1, 13, 7, 7, 3, 15, 8, 6]
"""Thirteen: a prime, divisible by no mesh."""

EXTRAS = SomeExtras(attention_cap=1.5, logit_cap=2.0, rotary_share=0.5, rotary_layers=(False, True))
UNUSUAL = {"qk_norm": "whole", "post_norms": "only", "kv_heads": 4, "extras": EXTRAS}
EXPERTS = {"experts": Mixture(8, 2)}
ONE = (1, 1, 1)
MESHES = [(2, 1, 1), (4, 1, 1), (8, 1, 1), (1, 2, 1), (1, 4, 1), (1, 8, 1), (1, 1, 2), (1, 1, 4), (1, 1, 8)]
MESHES += [(1, 1, 1, 2), (1, 1, 1, 4), (1, 1, 1, 8)]
MIXED = [(2, 2, 2), (1, 4, 2), (4, 1, 2), (2, 1, 4), (2, 4, 1), (2, 1, 1, 4), (1, 2, 2, 2), (1, 1, 4, 2), (1, 4, 1, 2)]
"""Devices along data, fsdp, tensor and, where it is not 1, sequence."""


@functools.cache
def mesh_of(axes=ONE):
    return make_mesh(ShardingConfig(*axes), jax.devices()[: int(np.prod(axes))])


@functools.cache
def params_of(model=MODEL):
    return jax.device_put(reference.random_params(model, seed=3))


def state_on(axes=ONE, optim=OPTIM):
    return steps.start_train_state(params_of(), MODEL, optim, mesh_of(axes))


def batch_on(axes, rows, config=BATCH, **given):
    """A batch whose shape does not depend on the rows, so that compiled programs are reused."""
    mesh = mesh_of(axes)
    bound = worst_case_micro_batches(len(LENGTHS) + 1, 16, config, row_shards(mesh))
    batch, placement = pack(rows, config, bound, row_shards(mesh), **given)
    return shard_batch(batch, mesh), placement


UPDATE = UpdateConfig(vocab_chunk=16)
HEAT = 0.7
"""The temperature of every program here, so that tests share them."""


@functools.cache
def gradient_of(axes, model, loss, update):
    mesh = mesh_of(axes)

    def loss_of(params, rows):
        return batch_loss(*policy_logprobs(params, rows, model, update, HEAT, mesh), rows, loss)

    gradient = jax.value_and_grad(loss_of, has_aux=True)
    return jax.jit(lambda p, b: steps.accumulate(gradient, p, b, param_shardings(model, mesh), mesh))


def gradients(rows, axes=ONE, config=BATCH, model=MODEL, loss=LOSS, update=UPDATE, **given):
    """(loss, gradients) of the batch under fixed parameters, by the path of the update."""
    params = jax.device_put(given.pop("params", params_of(model)), param_shardings(model, mesh_of(axes)))
    batch, _ = batch_on(axes, rows, config, **given)
    value, _, grads = gradient_of(axes, model, loss, update)(params, batch)
    return float(value), jax.device_get(grads)


def assert_close(got, wanted, tolerance=1e-5):
    # The loss is a sum of terms of size 1 that may nearly cancel, so that it is held to their rounding as well.
    assert got[0] == pytest.approx(wanted[0], rel=tolerance, abs=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max()), *(got[1], wanted[1])
    )


@pytest.fixture(scope="module")
def rows():
    return reference.random_rows(LENGTHS, 40)


@pytest.fixture(scope="module")
def wanted(rows):
    """For each model the result of one device, packed rows and two rows per micro-batch."""
    return gradients(rows)


@pytest.mark.parametrize(
    "config",
    [
        BatchConfig(16, 1),
        *(pytest.param(BatchConfig(*size), marks=pytest.mark.slow) for size in ((128, 5), (16, 13), (16, 3), (32, 1))),
    ],
    ids=lambda config: f"T{config.row_length}R{config.rows}",
)
def test_gradients_do_not_depend_on_packing_or_micro_batches(rows, wanted, config):
    assert_close(gradients(rows, config=config), wanted)


@pytest.mark.parametrize("axes", [pytest.param((4, 1, 1), marks=pytest.mark.slow), (2, 2, 2)], ids=str)
def test_gradients_are_added_over_data_once_a_step_in_float32(rows, axes):
    """Left to XLA, every micro-batch adds them, in the compute dtype."""
    model, mesh = replace(MODEL, compute_dtype="bfloat16"), mesh_of(axes)
    params = jax.device_put(params_of(model), param_shardings(model, mesh))
    compiled = gradient_of(axes, model, LOSS, UPDATE).lower(params, batch_on(axes, rows)[0]).compile()
    program = parse_hlo(compiled.as_text())
    copies = np.arange(mesh.size).reshape(mesh.devices.shape)  # of one device, along `data`

    def over_data(line):
        return any(len({int(np.argwhere(copies == i)[0, 0]) for i in group}) > 1 for group in device_groups(line.rest))

    sums = {name: [line for line in lines.values() if over_data(line)] for name, lines in program.computations.items()}
    assert {name for name, lines in sums.items() if lines} == {program.entry}
    summed = [array for line in sums[program.entry] for array in arrays(line.shape)]
    shard_size = sum(np.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(params))
    assert {dtype for dtype, _, _ in summed} == {"f32"}
    assert shard_size <= sum(np.prod(dims) for _, dims, _ in summed) < shard_size + 50


def test_nan_under_the_mask_reaches_no_device_of_a_row(rows, wanted):
    """On a mesh of all axes."""

    def poison(row, name):
        return np.where(row.policy_mask, getattr(row, name), np.nan).astype(np.float32)

    fields = ("logprobs_old", "advantages", "weights", "logprobs_ref")
    poisoned = [replace(row, **{name: poison(row, name) for name in fields}) for row in rows]
    assert_close(gradients(poisoned, (1, 2, 2, 2)), wanted)


OTHERS = [{"kv_heads": 4}, {"tie_embeddings": False}, {"qkv_bias": True, "qk_norm": True}, UNUSUAL, EXPERTS]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "count", "options"),
    [
        *itertools.product(MESHES + MIXED, (13, 7, 1), [{}]),
        *itertools.product([(2, 2, 2), (1, 2, 4), (8, 1, 1)], [13], OTHERS),
    ],
    ids=str,
)
def test_gradients_equal_on_every_mesh(axes, count, options):
    rows, model = reference.random_rows(LENGTHS[:count], 40), replace(MODEL, **options)
    assert_close(gradients(rows, axes, model=model), gradients(rows, model=model))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "level"),
    [*itertools.product(["cispo", "sapo", "ratio", "logp"], ["token", "sequence"]), ("geometric", "sequence")],
)
def test_gradients_equal_for_other_losses(rows, kind, level):
    if level == "sequence":
        rows = [replace(row, ratio_segments=np.zeros(row.length, np.int32)) for row in rows]
    loss = Surrogate.read({"kind": kind} | ({} if kind == "logp" else {"level": level}))
    base = gradients(rows, loss=loss, config=BatchConfig(16, 1))
    for axes, config in (((2, 2, 2), BATCH), (ONE, BatchConfig(64, 3))):
        assert_close(gradients(rows, axes, config, loss=loss), base)


@pytest.mark.parametrize(
    "update",
    [
        UpdateConfig(attention="blocked", remat="none"),
        UpdateConfig(remat="none", vocab_chunk=40),  # all logits kept
        *(
            pytest.param(UpdateConfig(vocab_chunk=16, **more), marks=pytest.mark.slow)
            for more in ({"remat": "none"}, {"remat": "full"}, {"attention": "blocked"})
        ),
    ],
    ids=str,
)
def test_gradients_do_not_depend_on_how_memory_is_used(rows, wanted, update):
    assert_close(gradients(rows, update=update), wanted, 1e-6 if update.attention == "auto" else 1e-5)


def test_loss_equals_loops(rows):
    params = params_of()
    logits = [reference.logits(params, row.tokens, MODEL) for row in rows]
    current = [reference.token_logprobs(x, row.tokens, HEAT)[0] for x, row in zip(logits, rows, strict=True)]
    apart = [np.where(row.policy_mask, row.logprobs_ref - now, 0) for row, now in zip(rows, current, strict=True)]
    estimates = [np.minimum(np.exp(d) - d - 1, K3.ceiling) for d in apart]
    divergence = sum((row.weights * estimate).sum() for row, estimate in zip(rows, estimates, strict=True))
    expected = reference.clipped_loss(current, rows, 0.2, 0.28) + LOSS.kl.coef * divergence
    assert gradients(rows)[0] == pytest.approx(expected, rel=1e-4)


def test_observations_and_prompts_receive_no_gradient(rows):
    """A row without policy tokens adds nothing, whatever its advantages."""
    silent = replace(rows[3], policy_mask=np.zeros(16, bool), weights=np.full(16, 9.0, np.float32))
    assert_close(gradients([*rows, silent]), gradients(rows), tolerance=1e-6)


# ---- the step ------------------------------------------------------------------------------------------------------


@functools.cache
def step_of(axes=ONE, loss=LOSS, optim=OPTIM):
    return steps.make_update_step(MODEL, loss, optim, UPDATE, mesh_of(axes), temperature=HEAT)


def copy(tree):
    return jax.tree.map(np.array, jax.device_get(tree))


@pytest.mark.parametrize("axes", [pytest.param(ONE, marks=pytest.mark.slow), (2, 2, 2)], ids=str)
def test_second_step_compiles_and_transfers_nothing(rows, axes):
    """Also with another number of micro-batches in use. The state is donated and stays in place."""
    state, step = state_on(axes), step_of(axes)
    (one, placed), (other, placed_alone) = (batch_on(axes, rows[:n]) for n in (13, 1))
    assert placed.count > placed_alone.count or axes != ONE
    donated = state.params
    with jax.transfer_guard("disallow"):
        state, first = step(state, one)
        with CompilationCounter() as compilations:
            state, second = step(state, other)
    assert compilations.count == 0 and all(leaf.is_deleted() for leaf in jax.tree.leaves(donated))
    assert float(first["update/skipped"]) == float(second["update/skipped"]) == 0 and int(state.step) == 2
    shardings = param_shardings(MODEL, mesh_of(axes))
    for leaf, sharding in zip(*map(jax.tree.leaves, (state.params, shardings)), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def test_other_programs_run_between_the_micro_batches_of_an_update_in_parts(rows):
    """By a trace of what is enqueued. The numbers are those of the whole update, and nothing compiles later."""
    state, again, step = state_on(ONE), state_on(ONE), step_of()
    parts = make_update_parts(MODEL, LOSS, OPTIM, UPDATE, mesh_of(ONE), temperature=HEAT)
    batch, _ = batch_on(ONE, rows)
    empty, _ = batch_on(ONE, [])
    trace = []
    logged = replace(parts, add=lambda *given: trace.append("micro-batch") or parts.add(*given))
    with jax.transfer_guard("disallow"):
        again, skipped = logged(again, empty, between=lambda: None)
        trace.clear()
        with CompilationCounter() as compilations:
            again, metrics = logged(again, batch, between=lambda: trace.append("chunk"))
    assert compilations.count == 0 and float(skipped["update/skipped"]) == 1
    assert int(batch.count) > 1 and trace == ["micro-batch", "chunk"] * int(batch.count)
    state, wanted = step(state, batch)
    for name in wanted:
        assert float(metrics[name]) == pytest.approx(float(wanted[name]), rel=1e-5, abs=1e-6), name
    for leaf, other in zip(jax.tree.leaves(again.params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_allclose(leaf, other, atol=1e-6)
    assert int(again.step) == int(state.step) == 1


def test_initial_state_is_equal_on_every_mesh():
    """Also to the parameters drawn without a mesh. Moments lie like their parameters."""
    state = steps.init_train_state(jax.random.key(3), MODEL, OPTIM, mesh_of((2, 2, 2)))
    drawn = jax.jit(functools.partial(init_params, config=MODEL))(jax.random.key(3))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), copy(state.params), copy(drawn))
    moments = [optax.tree.get(state.opt_state, name) for name in ("mu", "nu")]
    for tree in moments:
        jax.tree.map(lambda p, m: np.testing.assert_equal(m.sharding, p.sharding), state.params, tree)
    wq = moments[0]["layers"]["wq"]
    assert wq.addressable_shards[0].data.size == wq.size // 4


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda: learner_of(vocab_size=48), r"embed is \(40, 16\) in params and \(48, 16\) in the model"),
        (lambda: learner_of(layers=3), r"layers/attn_norm is \(2, 16\) in params and \(3, 16\) in the model"),
        (lambda: learner_of(heads=4, kv_heads=4, head_dim=8), r"layers/w\w is \(2, 16, 8, 4\) in params and"),
        (lambda: learner_of(tie_embeddings=not MODEL.tie_embeddings), "unembed is .*absent"),
        (lambda: Learner(MODEL, params=params_of(), base=params_of(), lora=LORA), "lora_a is absent in params"),
        (lambda: steps.start_train_state(None, MODEL, OPTIM, mesh_of()), "params is None .*; must be the parameters"),
        (lambda: Learner(MODEL, "clip"), r"surrogate is 'clip' \(str\); must be a Surrogate, such as Clip\(\)"),
        (lambda: Learner(params_of(), MODEL), "model is of type dict; must be a ModelConfig"),
        (lambda: learner_of().update(reference.random_rows([3], 40)[0]), "rows is of type TrainRow; must be a list"),
    ],
)
def test_what_belongs_to_another_model_is_refused_and_so_are_other_types(refused, message):
    with pytest.raises((ValueError, TypeError), match=message):
        refused()


LORA = LowRank(rank=2)


def learner_of(**changes):
    return Learner(replace(MODEL, **changes), mesh=mesh_of(), params=params_of())


@pytest.mark.parametrize("model", [MODEL, replace(MODEL, **UNUSUAL), replace(MODEL, **EXPERTS)])
def test_parameters_fit_their_model_in_every_layout(model):
    """Layers stacked or a tuple, with pairs beside their matrices, matrices in fewer bits."""
    stacked, lora = params_of(model), LowRank(rank=2, targets=("q_proj", "o_proj"))
    split, pairs = unstack(stacked, model), init_adapter(jax.random.key(0), lora, model)
    fewer = [split | {"layers": tuple(quantized_layer(layer, bits) for layer in split["layers"])} for bits in (8, 4)]
    for params in (stacked, split, *fewer):
        check_params(params, stacked)
        check_params(attach(params, pairs, lora), stacked)
    with pytest.raises(ValueError, match=r"is \(1, .*\) in params and \(2, "):
        check_params(split | {"layers": split["layers"][:1]}, stacked)


@pytest.mark.parametrize("field", ["logprobs_old", "advantages", "weights", ""])
def test_a_nan_leaves_the_state_bit_identical_and_the_run_goes_on(rows, field):
    """So does a batch without trajectories: with a zero gradient AdamW would still apply moments and decay."""
    state, step = state_on(), step_of()
    state, _ = step(state, batch_on(ONE, rows)[0])
    before = copy(state)
    batch, _ = batch_on(ONE, rows if field else [])
    if field:
        first = tuple(np.argwhere(np.asarray(batch.policy_mask))[0])
        batch = batch.replace(**{field: getattr(batch, field).at[first].set(np.nan)})
    state, metrics = step(state, batch)
    assert float(metrics["update/skipped"]) == 1
    assert np.isfinite(metrics["loss/value"]) == np.isfinite([*metrics.values()]).all() == (not field)
    jax.tree.map(np.testing.assert_array_equal, before, copy(state))
    state, metrics = step(state, batch_on(ONE, rows)[0])
    assert float(metrics["update/skipped"]) == 0 and int(state.step) == 2
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(copy(state.params)))


def test_step_equals_optax_by_hand(rows):
    """One step of clipping and AdamW on gradients taken outside the step, from a copy of the given parameters."""
    state, step = state_on(), step_of()
    optimizer = steps.make_optimizer(OPTIM)
    params = copy(state.params)
    opt_state = jax.jit(optimizer.init)(params)
    value, grads = gradients(rows)
    state, metrics = step(state, batch_on(ONE, rows)[0])
    norm = np.sqrt(sum((leaf.astype(np.float64) ** 2).sum() for leaf in jax.tree.leaves(grads)))
    assert float(metrics["update/grad_norm"]) == pytest.approx(norm, rel=1e-5) and norm > 0.01
    assert float(metrics["loss/value"]) == pytest.approx(value, rel=1e-5)
    assert float(metrics["update/lr"]) == pytest.approx(0.005)
    updates, _ = jax.jit(optimizer.update)(grads, opt_state, params)
    expected = optax.apply_updates(params, updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), copy(state.params), expected)
    jax.tree.map(np.testing.assert_array_equal, params, copy(params_of()))
    # The first AdamW step moves every entry by lr against the sign of its gradient, plus the decay of matrices.
    w, g = params["layers"]["wq"], grads["layers"]["wq"] * 0.01 / norm
    by_hand = w - 0.005 * (g / (np.abs(g) + 1e-8) + 0.1 * w)
    np.testing.assert_allclose(copy(state.params)["layers"]["wq"], by_hand, atol=1e-5)
    model = replace(MODEL, qkv_bias=True, qk_norm=True, extras=SomeExtras(layer_factors=True))
    params = reference.random_params(model)
    optimizer = steps.make_optimizer(OptimConfig(lr=1.0, warmup_steps=0, weight_decay=0.5))
    updates, _ = jax.jit(lambda p: optimizer.update(jax.tree.map(jnp.zeros_like, p), optimizer.init(p), p))(params)
    decayed = {path[-1].key for path, leaf in jax.tree_util.tree_leaves_with_path(updates) if leaf.any()}
    assert decayed == {"embed", "wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down"}


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
@pytest.mark.parametrize("largest", [0.5, 0.0])
def test_the_optimizer_is_that_of_optax(moments, largest):
    """Five steps of `optax.clip_by_global_norm` and `optax.adamw`; one that is not applied changes no moment."""
    config = OptimConfig(lr=0.01, warmup_steps=0, max_grad_norm=largest, weight_decay=0.1, moment_dtype=moments)
    rng = np.random.default_rng(0)
    params = {"wq": jnp.asarray(rng.normal(size=(4, 3)), jnp.float32), "norm": jnp.ones(3)}
    adamw = optax.adamw(steps.make_schedule(config), config.beta1, config.beta2, mu_dtype=moments, weight_decay=0.1,
                        mask=lambda tree: {"wq": True, "norm": False})  # fmt: skip
    other = optax.chain(optax.clip_by_global_norm(largest), adamw) if largest else adamw
    ours = steps.make_optimizer(config)
    states, trees = [ours.init(params), other.init(params)], [params, params]
    for _ in range(5):
        grads = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), params)
        state = ours.update(grads, states[0], trees[0], applied=False)[1]
        moved = [leaf for leaf in zip(jax.tree.leaves(state), jax.tree.leaves(states[0]), strict=True) if leaf[0].ndim]
        assert all(np.array_equal(after, before) for after, before in moved)
        for k, optimizer in enumerate((ours, other)):
            updates, states[k] = optimizer.update(grads, states[k], trees[k])
            trees[k] = optax.apply_updates(trees[k], updates)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7), *trees)


def test_schedules_by_hand():
    """The other defaults are those of AdamW in PyTorch."""
    for options, at, rates in (
        ({"warmup_steps": 4}, (0, 1, 3, 4, 100), [0.25, 0.5, 1.0, 1.0, 1.0]),
        ({"warmup_steps": 0}, (0,), [1.0]),
        ({"warmup_steps": 2, "schedule": {"kind": "cosine", "total_steps": 12}}, (2, 7, 12, 50), [1.0, 0.55, 0.1, 0.1]),
        (
            {"warmup_steps": 1, "schedule": {"kind": "linear", "total_steps": 11, "final_ratio": 0.0}},
            (0, 1, 6, 11),
            [1.0, 1.0, 0.5, 0.0],
        ),
    ):
        schedule = steps.make_schedule(OptimConfig(lr=1.0, **options))
        assert [float(schedule(step)) for step in at] == pytest.approx(rates)
    config = OptimConfig()
    assert (config.beta1, config.beta2, config.eps, config.weight_decay) == (0.9, 0.999, 1e-8, 0.01)
    for options, message in (
        ({"lr": 0.0}, r"lr\n.*greater than 0"),
        ({"beta2": 1.0}, r"beta2\n.*less than 1"),
        ({"weight_decay": -1.0}, r"weight_decay\n.*greater than or equal to 0"),
        ({"schedule": "cosine", "warmup_steps": 0}, "optim.schedule.total_steps = 0"),
    ):
        with pytest.raises(ValueError, match=message):
            OptimConfig(**options)


# ---- the same entry point for other uses ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "by_row"),
    [
        ((2, 2, 2), False),
        ((1, 2, 2, 2), True),
        *(pytest.param(axes, False, marks=pytest.mark.slow) for axes in (ONE, (1, 1, 2, 4))),
        *(pytest.param(axes, True, marks=pytest.mark.slow) for axes in (ONE, (2, 2, 2), (1, 1, 1, 4))),
    ],
    ids=str,
)
def test_scores_equal_loops_and_put_the_ratio_at_one(rows, axes, by_row):
    """At the temperature of the program, or of each row where rows have their own and the first that of the run."""
    params, given, heat = params_of(), {}, HEAT
    if by_row:
        given, heat, each = {"temperature": HEAT}, 9.0, [None, *[1.0, 1.3, HEAT] * 4]
        rows = [replace(row, temperature=value) for row, value in zip(rows, each, strict=True)]
    batch, placement = batch_on(axes, rows, **given)
    placed = jax.device_put(params, param_shardings(MODEL, mesh_of(axes)))
    score = steps.make_score(MODEL, UPDATE, mesh_of(axes), temperature=heat)
    with jax.transfer_guard("disallow"):
        scores = score(placed, batch)
    logprobs, entropy = (unpack(x, placement) for x in jax.device_get(scores))
    for row, got, got_entropy in zip(rows, logprobs, entropy, strict=True):
        logits = reference.logits(params, row.tokens, MODEL)
        expected, expected_entropy = reference.token_logprobs(logits, row.tokens, row.temperature or HEAT)
        np.testing.assert_allclose(got, expected, atol=1e-5)
        np.testing.assert_allclose(got_entropy, expected_entropy, atol=1e-5)
    if not by_row:
        rescored = [replace(row, logprobs_old=old) for row, old in zip(rows, logprobs, strict=True)]
        _, metrics = step_of(axes)(state_on(axes), batch_on(axes, rescored)[0])
        assert float(metrics["loss/logprob_gap_max"]) < 1e-6
        assert float(metrics["loss/effective_sample_size"]) == pytest.approx(1.0, abs=1e-5)


def test_gradients_of_several_temperatures_add_up(rows):
    """Dividing the final norm divides the logits as a temperature does, so the program of `HEAT` gives both parts."""
    mixed = [replace(row, temperature=1.3 if i % 2 else HEAT) for i, row in enumerate(rows)]
    together, ratio = gradients(mixed, temperature=1.0)[1], HEAT / 1.3
    cooled = params_of() | {"final_norm": params_of()["final_norm"] * ratio}
    part = gradients(rows[1::2], params=cooled)[1]
    part["final_norm"] = part["final_norm"] * ratio
    for total, *two in zip(*map(jax.tree.leaves, (together, gradients(rows[::2])[1], part)), strict=True):
        np.testing.assert_allclose(total, sum(two), atol=1e-5 * float(np.abs(total).max()))
