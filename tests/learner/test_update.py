"""An optimizer step: equal on every mesh, compiled once, skipped if not finite; the same with moments on the host."""

import itertools
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import NamedSharding, P

from grpo_roc_jax import BatchConfig, Clip, Learner, ModelConfig, OptimConfig, init_params
from grpo_roc_jax.checks import check_params
from grpo_roc_jax.engine.publish import unstack
from grpo_roc_jax.learner import update as steps
from grpo_roc_jax.learner.group_learner import GroupLearner
from grpo_roc_jax.learner.learner import UpdateBatch
from grpo_roc_jax.learner.loss import UpdateConfig, batch_loss, policy_logprobs
from grpo_roc_jax.learner.offload import HOST, check_host_memory, held_bytes, is_on_host, to_device, to_host
from grpo_roc_jax.learner.pack import pack, unpack, worst_case_micro_batches
from grpo_roc_jax.learner.update_parts import make_update_parts
from grpo_roc_jax.method.divergence import K3
from grpo_roc_jax.model.config import Mixture, SomeExtras
from grpo_roc_jax.model.lora import LowRank, attach, init_adapter
from grpo_roc_jax.model.low_precision import quantized_layer
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh, param_shardings, row_shards, shard_batch
from grpo_roc_jax.planner.hlo import arrays, device_groups, parse_hlo
from grpo_roc_jax.record.checkpoint import Bundle, CheckpointConfig, Checkpointer
from grpo_roc_jax.record.metrics import CompilationCounter
from grpo_roc_jax.run.policy import at_rest
from tests.helpers import reference

MODEL = ModelConfig(d_model=16, layers=2, heads=8, kv_heads=8, head_dim=4, d_ff=24, vocab_size=40)
OPTIM = OptimConfig(lr=1e-2, warmup_steps=2, max_grad_norm=0.01, weight_decay=0.1)
BATCH = BatchConfig(row_length=32, rows=2)
LOSS = Clip(kl=K3(coef=0.1))
LENGTHS = [5, 11, 2, 16, 9, 1, 13, 7, 7, 3, 15, 8, 6]  # thirteen: a prime, divisible by no mesh
EXTRAS = SomeExtras(attention_cap=1.5, logit_cap=2.0, rotary_share=0.5, rotary_layers=(False, True))
UNUSUAL = {"qk_norm": "whole", "post_norms": "only", "kv_heads": 4, "extras": EXTRAS}
EXPERTS = {"experts": Mixture(8, 2)}
ONE = (1, 1, 1)
# Devices along data, fsdp, tensor and, where it is not 1, sequence.
MESHES = [(8, 1, 1), (1, 8, 1), (1, 1, 4), (1, 1, 1, 8), (2, 2, 2), (2, 1, 1, 4), (1, 2, 2, 2)]
EVERYWHERE = [*itertools.product(MESHES, (13, 1), [{}]), ((1, 1, 8), 13, UNUSUAL), ((2, 2, 2), 13, EXPERTS)]


@cache
def mesh_of(axes=ONE):
    return make_mesh(ShardingConfig(*axes), jax.devices()[: int(np.prod(axes))])


@cache
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
HEAT = 0.7  # of every program here, so that tests share them


@cache
def gradient_of(axes, model, update):
    mesh = mesh_of(axes)

    def loss_of(params, rows):
        return batch_loss(*policy_logprobs(params, rows, model, update, HEAT, mesh), rows, LOSS)

    gradient = jax.value_and_grad(loss_of, has_aux=True)
    return jax.jit(lambda p, b: steps.accumulate(gradient, p, b, param_shardings(model, mesh), mesh))


def gradients(rows, axes=ONE, config=BATCH, model=MODEL, update=UPDATE, params=None):
    """(loss, gradients) of the batch under fixed parameters, by the path of the update."""
    params = jax.device_put(params or params_of(model), param_shardings(model, mesh_of(axes)))
    value, _, grads = gradient_of(axes, model, update)(params, batch_on(axes, rows, config)[0])
    return float(value), jax.device_get(grads)


def assert_close(got, wanted, tolerance=1e-5):
    # The loss is a sum of terms of size 1 that may nearly cancel, so that it is held to their rounding as well.
    assert got[0] == pytest.approx(wanted[0], rel=tolerance, abs=1e-6)
    for a, b in zip(*map(jax.tree.leaves, (got[1], wanted[1])), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


@pytest.fixture(scope="module")
def rows():
    return reference.random_rows(LENGTHS, 40)


@pytest.fixture(scope="module")
def wanted(rows):
    """The result of one device, packed rows and two rows per micro-batch."""
    return gradients(rows)


@pytest.mark.parametrize("size", [(16, 1), pytest.param((128, 5), marks=pytest.mark.slow)], ids=str)
def test_gradients_do_not_depend_on_packing_or_micro_batches(rows, wanted, size):
    assert_close(gradients(rows, config=BatchConfig(*size)), wanted)


def test_nan_under_the_mask_reaches_no_device_of_a_row(rows, wanted):
    """On a mesh of all axes."""
    nan, fields = np.float32("nan"), ("logprobs_old", "advantages", "weights", "logprobs_ref")
    poison = [{k: np.where(row.policy_mask, getattr(row, k), nan) for k in fields} for row in rows]
    rows = [replace(row, **given) for row, given in zip(rows, poison, strict=True)]
    assert_close(gradients(rows, (1, 2, 2, 2)), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("axes, count, options", EVERYWHERE, ids=str)
def test_gradients_equal_on_every_mesh(axes, count, options):
    rows, model = reference.random_rows(LENGTHS[:count], 40), replace(MODEL, **options)
    assert_close(gradients(rows, axes, model=model), gradients(rows, model=model))


def test_gradients_do_not_depend_on_how_memory_is_used(rows, wanted):
    """Attention by blocks; all logits kept."""
    for more, tolerance in (({"attention": "blocked"}, 1e-5), ({"vocab_chunk": 40}, 1e-6)):
        assert_close(gradients(rows, update=UpdateConfig(remat="none", **more)), wanted, tolerance)


def test_loss_equals_loops(rows):
    params, expected = params_of(), 0.0
    for row in rows:
        now, _ = reference.token_logprobs(reference.logits(params, row.tokens, MODEL), row.tokens, HEAT)
        apart = np.where(row.policy_mask, row.logprobs_ref - now, 0)
        expected += LOSS.kl.coef * (row.weights * np.minimum(np.exp(apart) - apart - 1, K3.ceiling)).sum()
        for t in np.flatnonzero(row.policy_mask):
            ratio, A = np.exp(now[t] - row.logprobs_old[t]), row.advantages[t]
            expected -= row.weights[t] * min(ratio * A, min(max(ratio, 0.8), 1.28) * A)
    assert gradients(rows)[0] == pytest.approx(expected, rel=1e-4)


def test_observations_and_prompts_receive_no_gradient(rows):
    """A row without policy tokens adds nothing, whatever its advantages."""
    silent = replace(rows[3], policy_mask=np.zeros(16, bool), weights=np.full(16, 9.0, np.float32))
    assert_close(gradients([*rows, silent]), gradients(rows), tolerance=1e-6)


@cache
def step_of(axes=ONE, optim=OPTIM):
    return steps.make_update_step(MODEL, LOSS, optim, UPDATE, mesh_of(axes), temperature=HEAT)


def copy(tree):
    return jax.tree.map(np.array, jax.device_get(tree))


def test_second_step_compiles_and_transfers_nothing(rows):
    """The state is donated and stays in place."""
    axes = (2, 2, 2)
    state, step = state_on(axes), step_of(axes)
    one, other = (batch_on(axes, rows[:n])[0] for n in (13, 1))
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
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), metrics, wanted)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), again.params, state.params)
    assert int(again.step) == int(state.step) == 1


def test_initial_state_is_equal_on_every_mesh():
    """Also to the parameters drawn without a mesh. Moments lie like their parameters."""
    state = steps.init_train_state(jax.random.key(3), MODEL, OPTIM, mesh_of((2, 2, 2)))
    drawn = jax.jit(partial(init_params, config=MODEL))(jax.random.key(3))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), copy(state.params), copy(drawn))
    for moments in (optax.tree.get(state.opt_state, name) for name in ("mu", "nu")):
        jax.tree.map(lambda p, m: np.testing.assert_equal(m.sharding, p.sharding), state.params, moments)
        assert moments["layers"]["wq"].addressable_shards[0].data.size == state.params["layers"]["wq"].size // 4


def test_parameters_fit_their_model_in_every_layout_and_those_of_another_are_refused():
    """Layers stacked or a tuple, with pairs beside their matrices, matrices in fewer bits."""
    stacked, lora = params_of(MODEL), LowRank(rank=2, targets=("q_proj", "o_proj"))
    split, pairs = unstack(stacked, MODEL), init_adapter(jax.random.key(0), lora, MODEL)
    fewer = [split | {"layers": tuple(quantized_layer(layer, bits) for layer in split["layers"])} for bits in (8, 4)]
    for params in (stacked, split, *fewer):
        check_params(params, stacked)
        check_params(attach(params, pairs, lora), stacked)
    with pytest.raises(ValueError, match=r"is \(1, .*\) in params and \(2, "):
        check_params(split | {"layers": split["layers"][:1]}, stacked)
    with pytest.raises(ValueError, match=r"embed is \(40, 16\) in params and \(48, 16\) in the model"):
        Learner(replace(MODEL, vocab_size=48), mesh=mesh_of(), params=stacked)
    with pytest.raises(TypeError, match=r"surrogate is 'clip' \(str\); must be a Surrogate, such as Clip\(\)"):
        Learner(MODEL, "clip")
    with pytest.raises(TypeError, match="rows is of type TrainRow; must be a list"):
        Learner(MODEL, mesh=mesh_of(), params=stacked).update(reference.random_rows([3], 40)[0])


@pytest.mark.parametrize("field", ["weights", ""])
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


def test_step_equals_optax_by_hand(rows):
    """One step of clipping and AdamW on gradients taken outside the step, from a copy of the given parameters."""
    state, step = state_on(), step_of()
    params = copy(state.params)
    value, grads = gradients(rows)
    state, metrics = step(state, batch_on(ONE, rows)[0])
    norm = np.sqrt(sum((leaf.astype(np.float64) ** 2).sum() for leaf in jax.tree.leaves(grads)))
    assert float(metrics["update/grad_norm"]) == pytest.approx(norm, rel=1e-5) and norm > 0.01
    assert float(metrics["loss/value"]) == pytest.approx(value, rel=1e-5)
    assert float(metrics["update/lr"]) == pytest.approx(0.005)
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
    """Three steps of `optax.clip_by_global_norm` and `optax.adamw`; one that is not applied changes no moment."""
    config = OptimConfig(lr=0.01, warmup_steps=0, max_grad_norm=largest, weight_decay=0.1, moment_dtype=moments)
    rng = np.random.default_rng(0)
    params = {"wq": jnp.asarray(rng.normal(size=(4, 3)), jnp.float32), "norm": jnp.ones(3)}
    adamw = optax.adamw(steps.make_schedule(config), config.beta1, config.beta2, mu_dtype=moments, weight_decay=0.1,
                        mask=lambda tree: {"wq": True, "norm": False})  # fmt: skip
    other = optax.chain(optax.clip_by_global_norm(largest), adamw) if largest else adamw
    ours = steps.make_optimizer(config)
    states, trees = [ours.init(params), other.init(params)], [params, params]
    for _ in range(3):
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
    linear = {"kind": "linear", "total_steps": 11, "final_ratio": 0.2}
    for warmup, schedule, at, rates in (
        (4, "constant", (0, 1, 3, 4, 100), [0.25, 0.5, 1.0, 1.0, 1.0]),
        (0, "constant", (0,), [1.0]),
        (2, {"kind": "cosine", "total_steps": 12}, (2, 7, 12, 50), [1.0, 0.55, 0.1, 0.1]),
        (1, linear, (0, 6), [1.0, 0.6]),
    ):
        schedule = steps.make_schedule(OptimConfig(lr=1.0, warmup_steps=warmup, schedule=schedule))
        assert [float(schedule(step)) for step in at] == pytest.approx(rates)
    config = OptimConfig()
    assert (config.beta1, config.beta2, config.eps, config.weight_decay) == (0.9, 0.999, 1e-8, 0.01)
    with pytest.raises(ValueError, match=r"beta2\n.*less than 1"):
        OptimConfig(beta2=1.0)
    with pytest.raises(ValueError, match=r"optim.schedule.total_steps = 0"):
        OptimConfig(schedule="cosine", warmup_steps=0)


@pytest.mark.parametrize(("axes", "by_row"), [((2, 2, 2), False), ((1, 2, 2, 2), True)], ids=str)
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


@pytest.mark.parametrize("axes", [pytest.param((4, 1, 1), marks=pytest.mark.slow), (2, 2, 2)], ids=str)
def test_gradients_are_added_over_data_once_a_step_in_float32(rows, axes):
    """Left to XLA, every micro-batch adds them, in the compute dtype."""
    model, mesh = replace(MODEL, compute_dtype="bfloat16"), mesh_of(axes)
    params = jax.device_put(params_of(model), param_shardings(model, mesh))
    compiled = gradient_of(axes, model, UPDATE).lower(params, batch_on(axes, rows)[0]).compile()
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


PLAIN = OptimConfig(lr=1e-2, warmup_steps=0)


def kinds(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.ndim}


def test_arrays_move_slice_by_slice_and_the_source_is_deleted():
    mesh = mesh_of((1, 2, 2))
    split, replicated = NamedSharding(mesh, P("fsdp", "tensor")), NamedSharding(mesh, P())
    values = np.arange(48, dtype=np.float32).reshape(8, 6)
    tree = {"split": (values, split), "whole": (values.astype(jnp.bfloat16), replicated)}
    tree = {name: jax.device_put(*given) for name, given in (tree | {"count": (np.int32(7), replicated)}).items()}
    with jax.transfer_guard("disallow"):
        away = to_host(tree)
    assert tree["split"].is_deleted() and tree["whole"].is_deleted() and away["count"] is tree["count"]
    assert kinds(away) == {HOST} and away["split"].sharding.spec == split.spec
    shards = [shard.data for shard in away["split"].addressable_shards]
    assert {(shard.sharding.memory_kind, shard.shape) for shard in shards} == {(HOST, (4, 3))}
    assert held_bytes(away) == 4 * 48 + 4 * 2 * 48  # one copy in quarters, and four copies of two bytes
    assert to_host(away)["split"] is away["split"], "what is there already stays"
    back = to_device(away)
    assert away["split"].is_deleted() and kinds(back) == {"device"}
    assert back["split"].sharding == split and back["whole"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(back["split"], values)
    np.testing.assert_array_equal(np.asarray(back["whole"], np.float32), values)
    check_host_memory(mesh_of())


def small_state(mesh):
    """A matrix and a vector with their moments, in parts on every device."""
    params = {"wq": np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32), "norm": np.ones(4, np.float32)}
    state = steps.TrainState(np.int32(0), params, steps.make_optimizer(PLAIN).init(params))
    split = {dims: NamedSharding(mesh, P("fsdp") if dims == 2 else P()) for dims in range(3)}
    return jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf), split[np.ndim(leaf)]), state)


@partial(jax.jit, donate_argnums=0)
def small_step(state, batch):
    """The optimizer with an easy gradient."""
    grads = jax.tree.map(lambda leaf: jnp.sin(leaf * batch.advantages.sum()), state.params)
    updates, opt_state = steps.make_optimizer(PLAIN).update(grads, state.opt_state, state.params)
    return steps.TrainState(state.step + 1, optax.apply_updates(state.params, updates), opt_state), {"loss/value": 0.0}


def trained(mesh, offload):
    """(state, metrics of the last step, what the program was called with) after 2 steps, of two updates the first."""
    seen = []

    def update(state, batch):
        seen.append(state.opt_state)
        assert kinds(state.opt_state) == {"device"}
        return small_step(state, batch)

    def batch(seed):
        rows = reference.random_rows([5, 9, 7], 16, seed)
        packed, placement = pack(rows, BatchConfig(row_length=16, rows=2), 2, row_shards(mesh))
        return UpdateBatch(rows, shard_batch(packed, mesh), placement, 1.0)

    config = SimpleNamespace(optim=replace(PLAIN, offload=offload))
    run = SimpleNamespace(train=at_rest(config, small_state(mesh)))
    learner = GroupLearner(config, Learner(MODEL, mesh=mesh), None)
    learner.learner.update_step = update
    for seeds in ((0, 1), (2,)):
        before = run.train.opt_state
        run.train, _, metrics = learner.update(run, [batch(seed) for seed in seeds])
        assert kinds(run.train.opt_state) == ({HOST} if offload else {"device"})
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before) if leaf.ndim)
    return run.train, metrics, seen


def test_training_is_the_same_to_the_bit():
    plain, metrics, _ = trained(mesh_of((1, 2, 1)), False)
    assert not any("offload" in name for name in metrics)
    with CompilationCounter() as compilations:
        moved, metrics, seen = trained(mesh_of((1, 2, 1)), True)
    assert compilations.count == 0, "where the moments come from must not make another program"
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(moved), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    size = held_bytes(plain.opt_state)
    assert metrics["offload/to_device_bytes"] == metrics["offload/to_host_bytes"] == size > 0
    assert metrics["time/offload_to_device_s"] > 0 and metrics["time/offload_to_host_s"] > 0
    assert len(seen) == 3 and all(leaf.is_deleted() for state in seen for leaf in jax.tree.leaves(state) if leaf.ndim)


def test_checkpoints_are_those_of_moments_on_devices(tmp_path):
    fresh = partial(small_state, mesh_of((1, 2, 1)))
    state = fresh().replace(opt_state=jax.tree.map(lambda leaf: leaf + 2, fresh().opt_state))
    wanted = jax.tree.map(np.asarray, state)
    away = state.replace(opt_state=to_host(state.opt_state))
    with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
        assert checkpointer.save(1, Bundle({"state": away}))
        back = to_device(away.opt_state)  # at once, as the next update would
        jax.tree.map(lambda leaf: leaf.delete(), back)
        for like in (fresh(), fresh().replace(opt_state=to_host(fresh().opt_state))):
            restored = checkpointer.restore_latest({"state": like}).train["state"]
            assert kinds(restored.opt_state) == kinds(like.opt_state) and kinds(restored.params) == {"device"}
            jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, restored), wanted)
        spoilt = to_host(jax.tree.map(lambda leaf: leaf * jnp.nan if leaf.ndim else leaf, fresh().opt_state))
        assert not checkpointer.save(2, Bundle({"state": fresh().replace(opt_state=spoilt)}))
        assert "NaN" in checkpointer.failures[-1]
        assert all(map(is_on_host, (leaf for leaf in jax.tree.leaves(spoilt) if leaf.ndim))), "looked at, not moved"
