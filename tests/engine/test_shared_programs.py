"""Programs over several processes: the others make the leader's calls, each with its own pool and slots."""

import pickle
from dataclasses import replace

import jax
import numpy as np
import pytest

from grpo_roc_jax.engine.config import RolloutConfig, SamplingConfig
from grpo_roc_jax.engine.engine import make_engine
from grpo_roc_jax.engine.programs import SamplerPrograms, SharedPrograms
from grpo_roc_jax.engine.steering import DrawSettings, RowSteering, steering_arrays
from grpo_roc_jax.learner.update import OptimConfig, state_like
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh
from grpo_roc_jax.planner.hlo import parse_hlo
from grpo_roc_jax.planner.hlo_cost import largest_gather
from grpo_roc_jax.planner.topology import parse_topology, topology_devices
from tests.helpers.rollout_fakes import MODEL, ROLLOUT, STOPS


def values(argument):
    """Arrays as NumPy with their sharding; the rest unchanged."""
    if not isinstance(argument, jax.Array):
        return argument
    return argument.sharding.spec, argument.sharding.device_set, np.asarray(argument).tolist()


def test_the_others_make_the_leaders_calls_on_the_same_devices():
    """Instead of running, a program returns what it was called with, so that its results say how they came about."""
    mesh, made, sent = make_mesh(ShardingConfig(data=1, tensor=2), jax.devices()[:2]), {}, []

    class Echo(SamplerPrograms):
        def run(self, call):
            result = (call.key, *map(values, call.arguments))
            made.setdefault(self, []).append(result)
            return (result, call.key, "report") if call.key[0] in ("decode", "steered") else result

    class SharedEcho(SharedPrograms, Echo):
        pass

    leader, follower = (SharedEcho(MODEL, ROLLOUT, SamplingConfig(), STOPS, None, mesh) for _ in range(2))

    def send(call):
        assert len(sent) == len(made.get(leader, ())), "sent before it runs"
        sent.append(pickle.dumps(call))

    leader.send = send
    rows = {2: RowSteering(DrawSettings(top_k=1)), 3: RowSteering(DrawSettings(bias={50: 100.0}, frequency=1.0))}
    steering = steering_arrays(rows, ROLLOUT.slots, MODEL.vocab_size, SamplingConfig(), 4)
    for _ in range(2):  # the second pool replaces the first
        pool, slots = leader.new_pool(), leader.new_slots()
        for seed in range(2):
            tokens, table, where, pairs, patch = np.random.default_rng(seed).integers(0, 9, (5, 3, 6), np.int32)
            axes = leader.row_axes
            pool = leader.append("weights", pool, leader.place(tokens, axes), leader.place(table, axes), where)
            pool = leader.copy(pool, leader.place(pairs[:2], None, axes), pairs[:2])
            pool, slots, _ = leader.decode("weights", pool, slots, leader.place(patch, None, axes), table, 6)
            pool, slots, _ = leader.decode_steered("weights", pool, slots, patch, table, *steering, width=6)
    follower.repeat("weights", map(pickle.loads, sent))
    np.testing.assert_equal(made[follower], made[leader])
    assert len(made[leader]) == 2 * (2 + 2 * 4)


@pytest.mark.slow
def test_a_step_on_two_hosts_of_tpus_gathers_logits_and_no_weights():
    pytest.importorskip("libtpu", reason="libtpu, the compiler for TPUs, is not installed (the extra `tpu`)")
    mesh = make_mesh(ShardingConfig(tensor=8), topology_devices(parse_topology("v5p:2x2x2")))
    model = replace(MODEL, d_model=1024, layers=1, heads=16, kv_heads=4, head_dim=128, d_ff=1024, vocab_size=151_936)
    model = replace(model, compute_dtype="bfloat16")
    rollout = RolloutConfig(slots=32, max_prompt_tokens=256, max_response_tokens=1700, narrow=())
    engine = make_engine(model, rollout, SamplingConfig(), [0], mesh)
    assert isinstance(engine.programs, SharedPrograms) and engine.programs.model.kv_heads == 8
    params = state_like(model, OptimConfig(), mesh).params
    (lowered,) = (program for name, program in engine.lower(params) if name.startswith("decode"))
    assert largest_gather(parse_hlo(lowered.compile().as_text())).bytes == 4 * 32 * 151_936
