"""Moments in host memory: all of them are moved, the source is deleted, and training is bit-equal."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from grpo_roc_jax import BatchConfig, Learner, ModelConfig, OptimConfig, read_config
from grpo_roc_jax.learner.group_learner import GroupLearner
from grpo_roc_jax.learner.learner import UpdateBatch
from grpo_roc_jax.learner.offload import HOST, check_host_memory, held_bytes, is_on_host, to_device, to_host
from grpo_roc_jax.learner.pack import pack
from grpo_roc_jax.learner.update import TrainState, make_optimizer
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh, row_shards, shard_batch
from grpo_roc_jax.planner import plan as planning
from grpo_roc_jax.planner.topology import parse_topology
from grpo_roc_jax.record.checkpoint import Bundle, CheckpointConfig, Checkpointer
from grpo_roc_jax.record.metrics import CompilationCounter
from grpo_roc_jax.run.policy import at_rest, memory_lines
from tests.helpers import reference

MODEL = ModelConfig(d_model=8, layers=1, heads=2, kv_heads=2, head_dim=4, d_ff=8, vocab_size=16)
OPTIM = OptimConfig(lr=1e-2, warmup_steps=0)


def mesh_of(*axes):
    return make_mesh(ShardingConfig(*axes), jax.devices()[: int(np.prod(axes))])


def kinds(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.ndim}


def test_arrays_move_slice_by_slice_and_the_source_is_deleted():
    mesh = mesh_of(1, 2, 2)
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
    check_host_memory(mesh_of(1, 1, 1))
    memories = [SimpleNamespace(kind="device"), SimpleNamespace(kind="unpinned_host")]
    device = SimpleNamespace(addressable_memories=lambda: memories, device_kind="Abacus", platform="beads")
    with pytest.raises(ValueError, match=r"pinned_host, but Abacus \(beads\) has device, unpinned_host; turn it off"):
        check_host_memory(SimpleNamespace(local_devices=[device]))


def small_step(mesh):
    """A matrix and a vector with their moments, in parts on every device; the optimizer with an easy gradient."""
    params = {"wq": np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32), "norm": np.ones(4, np.float32)}
    state = TrainState(np.int32(0), params, make_optimizer(OPTIM).init(params))
    split = {dims: NamedSharding(mesh, P("fsdp") if dims == 2 else P()) for dims in range(3)}

    @partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        grads = jax.tree.map(lambda leaf: jnp.sin(leaf * batch.advantages.sum()), state.params)
        updates, opt_state = make_optimizer(OPTIM).update(grads, state.opt_state, state.params)
        return TrainState(state.step + 1, optax.apply_updates(state.params, updates), opt_state), {"loss/value": 0.0}

    return jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf), split[np.ndim(leaf)]), state), step


def trained(fresh, step, offload):
    """(state, metrics of the last step, what the program was called with) after 3 steps, of two updates the first."""
    seen = []

    def update(state, batch):
        seen.append(state.opt_state)
        assert kinds(state.opt_state) == {"device"}
        return step(state, batch)

    config = SimpleNamespace(optim=replace(OPTIM, offload=offload))
    mesh = fresh.step.sharding.mesh
    run = SimpleNamespace(train=at_rest(config, jax.tree.map(jnp.copy, fresh)))
    learner = GroupLearner(config, Learner(MODEL, mesh=mesh), None)
    learner.learner.update_step = update

    def batch(seed):
        rows = reference.random_rows([5, 9, 7], 16, seed)
        packed, placement = pack(rows, BatchConfig(row_length=16, rows=2), 2, row_shards(mesh))
        return UpdateBatch(rows, shard_batch(packed, mesh), placement, 1.0)

    for seeds in ((0, 1), (2,), (3,)):
        before = run.train.opt_state
        run.train, _, metrics = learner.update(run, [batch(seed) for seed in seeds])
        assert kinds(run.train.opt_state) == ({HOST} if offload else {"device"})
        assert kinds(run.train.params) == {"device"}
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before) if leaf.ndim)
    assert learner.update(run, []) == (run.train, [], {"update/skipped": 1.0, "time/update_s": 0.0})
    return run.train, metrics, seen


def test_training_is_the_same_to_the_bit():
    fresh, step = small_step(mesh_of(1, 2, 1))
    plain, metrics, _ = trained(fresh, step, False)
    assert not any("offload" in name for name in metrics)
    with CompilationCounter() as compilations:
        moved, metrics, seen = trained(fresh, step, True)
    assert compilations.count == 0, "where the moments come from must not make another program"
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(moved), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    size = held_bytes(plain.opt_state)
    assert metrics["offload/to_device_bytes"] == metrics["offload/to_host_bytes"] == size > 0
    assert metrics["time/offload_to_device_s"] > 0 and metrics["time/offload_to_host_s"] > 0
    assert len(seen) == 4 and all(leaf.is_deleted() for state in seen for leaf in jax.tree.leaves(state) if leaf.ndim)


def test_checkpoints_are_those_of_moments_on_devices(tmp_path):
    made, _ = small_step(mesh_of(1, 2, 1))

    def fresh():
        return jax.tree.map(jnp.copy, made)

    state = fresh().replace(opt_state=jax.tree.map(lambda leaf: leaf + 2, made.opt_state))
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


# ---- what a plan makes of it ---------------------------------------------------------------------------------------


def planned(*words):
    config = read_config("rstar2_qwen3_14b", *words)
    deployment = planning.deployment_of(config, parse_topology("v5p:4x4x4"), "", True, 0.0)
    return planning.describe(deployment, planning.needs_of(deployment, (), print), ())


def test_plans_leave_the_moments_out_of_sampling_and_suggest_it():
    plain, away = planned(), planned("--optim.offload", "True")
    mesh = plain["mesh"]
    moments = 8 * plain["parameters"] / (mesh["fsdp"] * mesh["tensor"])
    for program, other in zip(plain["programs"], away["programs"], strict=True):
        saved = 0.0 if program["name"] == "update" else moments
        # The scales of norms are whole on each device.
        assert program["total"] - other["total"] == pytest.approx(saved, rel=2e-4), program["name"]
    # Slots whose cache is too large by less than the moments, and then by more.
    decode = next(needs for needs in plain["programs"] if needs["name"] == "decode")
    slots = read_config("rstar2_qwen3_14b").rollout.slots
    room = 0.9 * plain["chip"]["memory_bytes"] - decode["total"]
    for extra, suggested in ((room + moments / 2, True), (room + 2 * moments, False)):
        wanted = int(slots * (1 + extra / (decode["aliased"] + decode["temporaries"])))
        report = planned("--rollout.slots", str(wanted))
        assert not report["fits"] and report["lines"][-1].startswith("together"), report["lines"]
        assert ("--optim.offload True" in report["lines"][-1]) is suggested, report["lines"]
        away = planned("--rollout.slots", str(wanted), "--optim.offload", "True")
        assert away["fits"] is suggested and "optim.offload" not in "".join(away["lines"])

    def dry_run(*words):
        config = read_config("toy", *words)
        line = memory_lines(config, replace(MODEL, d_model=64, vocab_size=512), mesh_of(1, 1, 1))[-1]
        return line, float(line.split("together ")[1].split(" of")[0])

    plain, away = dry_run(), dry_run("--optim.offload", "True")
    assert "with the host while sampling" in away[0] and "host" not in plain[0]
    moments = float(plain[0].split("moments ")[1].split(",")[0])
    assert plain[1] - away[1] == pytest.approx(moments, abs=0.11)
