"""Plans: formulas, the HLO parser on programs with known collectives, topologies, exit statuses."""

import json
import math
import re
from dataclasses import fields, replace
from functools import partial
from itertools import product
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.first_step import groups_of
from docs.methods_table import load_methods
from grpo_roc_jax.commands import plan as plan_command
from grpo_roc_jax.config import Config
from grpo_roc_jax.engine.config import RolloutConfig, SamplingConfig
from grpo_roc_jax.engine.engine import make_engine
from grpo_roc_jax.learner.loss import make_remat
from grpo_roc_jax.learner.pack import pack
from grpo_roc_jax.learner.update import OptimConfig, state_like
from grpo_roc_jax.method.compose import Scores, initial_state, train_rows
from grpo_roc_jax.model.attention import attend_cudnn
from grpo_roc_jax.model.config import Mixture, ModelConfig
from grpo_roc_jax.model.delta import token_flops
from grpo_roc_jax.model.published import read_config, same_model, write_config
from grpo_roc_jax.model.sharding import ShardingConfig, check_processes, make_mesh, process_mesh
from grpo_roc_jax.planner import plan as planning
from grpo_roc_jax.planner.estimate import (
    abstract_mesh,
    active_parameters,
    append_reads,
    decode_reads,
    estimate,
    products,
    update_flops,
)
from grpo_roc_jax.planner.hlo import arrays, bytes_of, group_size, parse_hlo
from grpo_roc_jax.planner.hlo_cost import largest_gather, read_cost
from grpo_roc_jax.planner.hlo_loops import check_loops, hanging, placed
from grpo_roc_jax.planner.known_shapes import KNOWN_SHAPES
from grpo_roc_jax.planner.roofline import Needs, Work, step_times
from grpo_roc_jax.planner.schedules import APART, SCHEDULES, STEPS
from grpo_roc_jax.planner.topology import CHIPS, TopologyError, has_compiler, parse_topology, topology_devices
from grpo_roc_jax.run.policy import cache_bytes, parameter_count, sampled_like
from grpo_roc_jax.settings.cli import load_config
from tests.helpers.planning import deployment
from tests.helpers.planning import platform_kept as platform_kept  # a fixture
from tests.helpers.published_configs import CONFIGS

LAYERS, WIDTH, ROWS = 5, 64, 16


def test_loops_multiply_products_and_collectives_and_traffic_counts_a_slice():
    """A scan that gathers the matrix of each layer before use, inside a loop with unknown trip count."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))

    def named(*spec):
        return NamedSharding(mesh, P(*spec))

    def run(weights, x, count):
        def layer(x, w):
            return jnp.tanh(x @ jax.lax.with_sharding_constraint(w, named())), None

        x = jax.lax.fori_loop(0, count, lambda _, x: jax.lax.scan(layer, x, weights)[0], x)
        return x.sum()

    like = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    stack, rows = like((LAYERS, WIDTH, WIDTH), sharding=named(None, "x")), like((ROWS, WIDTH), sharding=named("x"))
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=named())
    program = parse_hlo(jax.jit(run).lower(stack, rows, count).compile().as_text())
    once, thrice = read_cost(program), read_cost(program, [3.0])
    assert once.flops == LAYERS * 2 * (ROWS // 8) * WIDTH * WIDTH and thrice.flops == 3 * once.flops
    kinds = thrice.by_kind()
    assert set(kinds) == {"all-gather", "all-reduce"}
    matrix = 4 * WIDTH * WIDTH
    runs = 3 * LAYERS
    assert kinds["all-gather"] == {"runs": runs, "bytes": runs * matrix, "moved": runs * matrix * 7 / 8}
    assert kinds["all-reduce"] == {"runs": 1.0, "bytes": 4.0, "moved": 2 * 4 * 7 / 8}
    assert thrice.moved == sum(entry["moved"] for entry in kinds.values())
    # Every layer reads its share of the stack (1/8 of a matrix) and the gathered matrix a few times; reading the whole
    # stack in every layer would be 25 matrices and more.
    assert LAYERS * 2 * matrix < once.traffic < LAYERS * 8 * matrix
    assert largest_gather(program).bytes == matrix
    gathered = jax.jit(lambda w: w * 1.0, out_shardings=named()).lower(stack).compile()
    largest = largest_gather(parse_hlo(gathered.as_text()))
    assert largest.bytes == LAYERS * matrix and largest.group == 8 and largest.loops == 0


def loop_compiled(condition, exchange):
    """HLO text of a loop that every pair of four devices runs on rows of its own, as in the engine."""
    grid = jax.make_mesh((2, 2), ("rows", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def loop(x, weights):
        def step(state):
            x, turns = state
            return exchange(jnp.tanh(x @ weights)), turns + 1

        return jax.lax.while_loop(condition, step, (x, 0))

    mapped = jax.shard_map(
        loop, mesh=grid, in_specs=(P("rows"), P()), out_specs=(P("rows"), P()), axis_names={"rows"}, check_vma=False
    )
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(grid, spec))
        for shape, spec in (((4, 8), P("rows")), ((8, 8), P(None, "tensor")))
    ]
    return jax.jit(mapped).lower(*arguments).compile()


def split_over_tensor(x, *spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(jax.sharding.get_abstract_mesh(), P(*spec)))


def own_rows_left(state):
    return (state[1] < 10) & jnp.any(state[0] > 0)


def any_rows_left(state):
    return (state[1] < 10) & (jax.lax.pmax(jnp.any(state[0] > 0).astype(jnp.int32), "rows") > 0)


@pytest.mark.parametrize(
    ("condition", "exchange", "kind"),
    [
        # Whole within a pair of devices, which leaves its loop together.
        (own_rows_left, lambda x: split_over_tensor(x, None, None), ""),
        (own_rows_left, lambda x: jax.lax.psum(x, "rows"), "all-reduce"),
        (own_rows_left, lambda x: jnp.roll(split_over_tensor(x, None, "tensor"), 1, axis=1), "collective-permute"),
        (any_rows_left, lambda x: jax.lax.psum(x, "rows"), ""),
        (any_rows_left, lambda x: jnp.roll(split_over_tensor(x, None, "tensor"), 1, axis=1), ""),
        (lambda state: state[1] < 3, lambda x: jax.lax.psum(x, "rows"), ""),
    ],
    ids=["within a pair", "over rows", "permute", "common end", "permute, common end", "fixed"],
)
def test_a_collective_in_a_loop_that_its_devices_leave_apart_is_refused(condition, exchange, kind):
    compiled = loop_compiled(condition, exchange)
    program, shardings = parse_hlo(compiled.as_text()), jax.tree.leaves(compiled.input_shardings)
    assert program.devices == 4 and read_cost(program).collectives
    assert [line.split()[0] for line in hanging(program, shardings)] == ([kind] if kind else [])
    if kind:
        with pytest.raises(ValueError, match=rf"{kind} %\S+ in %\S+ .*make its condition equal"):
            check_loops(program, shardings)


@pytest.mark.parametrize(
    ("spec", "classes"),
    [
        (P(), (0,) * 8),
        (P(("d", "f")), (0, 0, 2, 2, 4, 4, 6, 6)),
        (P(None, "t"), (0, 1) * 4),
        (P("f", ("t", "d")), tuple(range(8))),
        (P("f"), (0, 0, 2, 2, 0, 0, 2, 2)),
    ],
)
def test_arguments_are_equal_where_their_sharding_puts_the_same_part(spec, classes):
    grid = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("d", "f", "t"))
    assert placed(NamedSharding(grid, spec), 8) == classes
    assert placed(NamedSharding(grid, spec), 16) == (tuple(range(16)) if any(spec) else (0,) * 16)


def test_a_program_whose_arguments_are_not_known_is_refused_if_they_may_differ():
    compiled = loop_compiled(own_rows_left, lambda x: split_over_tensor(x, None, None))
    (line,) = hanging(parse_hlo(compiled.as_text()), [])
    assert line.startswith("all-gather")


CONVOLUTION = """
ENTRY %main (a: bf16[8,16,32], b: bf16[8,32,64]) -> bf16[8,16,64] {
  %a = bf16[8,16,32]{2,1,0:T(8,128)(2,1)S(1)} parameter(0)
  %b = bf16[8,32,64]{2,1,0} parameter(1)
  ROOT %c = bf16[8,16,64]{2,1,0} convolution(%a, %b), window={size=8 stride=7 lhs_dilate=8}, dim_labels=0bf_0io->0bf
}
"""


def test_a_batched_product_written_as_a_convolution_counts_what_it_computes():
    cost = read_cost(parse_hlo(CONVOLUTION))
    assert cost.flops == 2 * 8 * 16 * 32 * 64
    assert cost.traffic == 2 * (8 * 32 * 64 + 8 * 16 * 64)  # the first operand stays on the chip


KERNEL = """
ENTRY %main (a: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0)
  %k = f32[8,8]{1,0} custom-call(%a), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 512}"
}}, metadata={op_name="jit(f)/kernel"}
  ROOT %r = f32[8,8]{1,0} all-reduce(%k), replica_groups={{0,1}}, to_apply=%add
}
"""


def test_what_follows_a_kernel_is_read():
    """The compiler describes a kernel over several lines, one of which looks like the end of a computation."""
    cost = read_cost(parse_hlo(KERNEL))
    assert cost.kernels == {"tpu_custom_call": 1.0}
    assert cost.by_kind()["all-reduce"]["bytes"] == 4 * 8 * 8


LOOP = """
%body (s: (s32[], f32[8])) -> (s32[], f32[8]) {
  %s = (s32[]{:T(128)}, f32[8]{0}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%s), index=1
  %r = f32[8]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
  ROOT %t = (s32[], f32[8]{0}) tuple(%x, %r)
}

%condition (s: (s32[], f32[8])) -> pred[] {
  %s = (s32[], f32[8]{0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%s), index=0
  %n = s32[]{:T(128)} constant(28)
  ROOT %lt = pred[]{:T(512)} compare(%i, %n), direction=LT, metadata={op_name="jit(f)/while/cond/lt"}
}

ENTRY %main (a: (s32[], f32[8])) -> (s32[], f32[8]) {
  %a = (s32[], f32[8]{0}) parameter(0)
  ROOT %w = (s32[], f32[8]{0}) while(%a), condition=%condition, body=%body
}
"""


def test_turns_are_read_from_the_condition_where_it_has_a_constant():
    (collective,) = read_cost(parse_hlo(LOOP), [5.0]).collectives
    assert (collective.times, collective.loops) == (28.0, 1)
    computed = LOOP.replace("constant(28)", "get-tuple-element(%s), index=0")
    assert read_cost(parse_hlo(computed), [5.0]).collectives[0].times == 5.0
    assert read_cost(parse_hlo(computed)).collectives[0].times == 1.0


def test_counters_that_rise_by_several_turn_less_often():
    """A product whose parts circulate over the devices handles two per iteration; counting one overstates FLOPs."""
    counter = """  %i = s32[]{:T(128)} get-tuple-element(%s), index=0
  %one = s32[] constant(1)
  %two = s32[] constant(2)
  %j = s32[]{:T(128)} add(%i, %one)
  %k = s32[]{:T(128)} add(%two, %j)
  ROOT %t = (s32[], f32[8]{0}) tuple(%k, %r)"""
    rising = LOOP.replace("  ROOT %t = (s32[], f32[8]{0}) tuple(%x, %r)", counter)

    def times(text):
        return read_cost(parse_hlo(text), [5.0]).collectives[0].times

    assert times(rising) == 10.0  # 28 by threes
    assert times(rising.replace("add(%two, %j)", "add(%i, %two)")) == 14.0
    assert times(rising.replace("add(%two, %j)", "add(%i, %j)")) == 28.0  # no constant step: taken as one
    assert times(rising.replace("add(%two, %j)", "copy(%j)")) == 28.0


NESTED = """
%same (p: f32[8,4]) -> f32[8,4] {
  %p = f32[8,4]{1,0} parameter(0)
  ROOT %b = f32[8,4]{1,0} bitcast(%p)
}

%one (p: f32[8,4], i: s32[]) -> f32[1,4] {
  %p = f32[8,4]{1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %s = f32[1,4]{1,0} dynamic-slice(%p, %i, %i), dynamic_slice_sizes={1,4}
}

%both (p: f32[8,4], i: s32[]) -> f32[1,4] {
  %p = f32[8,4]{1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %f = f32[1,4]{1,0} fusion(%p, %i), kind=kLoop, calls=%one
}

%whole (p: f32[8,4]) -> f32[8,4] {
  %p = f32[8,4]{1,0} parameter(0)
  %f = f32[8,4]{1,0} fusion(%p), kind=kLoop, calls=%same
  ROOT %n = f32[8,4]{1,0} negate(%f)
}

ENTRY %main (a: f32[8,4], i: s32[]) -> (f32[1,4], f32[8,4]) {
  %a = f32[8,4]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %x = f32[1,4]{1,0} fusion(%a, %i), kind=kLoop, calls=%both
  %y = f32[8,4]{1,0} fusion(%a), kind=kLoop, calls=%whole
  ROOT %t = (f32[1,4]{1,0}, f32[8,4]{1,0}) tuple(%x, %y)
}
"""


def test_traffic_follows_slices_into_fusions_within_fusions():
    row, matrix, index = 16, 128, 4
    assert read_cost(parse_hlo(NESTED)).traffic == (row + index) + row + 2 * matrix


def test_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="ENTRY"):
        parse_hlo("HloModule nothing")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("replica_groups={{0,1,2},{3,4,5}}", 3),
        ("replica_groups=[16,4]<=[64]", 4),
        ("replica_groups=[4,16]<=[16,4]T(1,0), dimensions={0}", 16),
        ("replica_groups=mesh['a'=2,'b'=8] {'b'}", 8),
        (
            "replica_groups=mesh['axis_0'=8,'axis_1'=1,'axis_2'=2], device_ids=([2,8]T(1,0)) {'axis_2'}, x={0}",
            2,
        ),
        ("source_target_pairs={{0,1},{1,0}}", 2),
    ],
)
def test_group_sizes(text, size):
    program = (
        f"ENTRY %m (p: f32[4]) -> f32[4] {{\n  %p = f32[4] parameter(0)\n  ROOT %r = f32[4] all-reduce(%p), {text}\n}}"
    )
    assert group_size(parse_hlo(program).computations["m"]["r"]) == size


def test_started_collectives_count_their_result_once():
    text = """
ENTRY %m (p: bf16[2,8]) -> bf16[16,8] {
  %p = bf16[2,8]{1,0} parameter(0)
  %s = (bf16[2,8]{1,0}, bf16[16,8]{1,0}) all-gather-start(%p), replica_groups=[1,8]<=[8], dimensions={0}
  ROOT %d = bf16[16,8]{1,0} all-gather-done(%s)
}"""
    (collective,) = read_cost(parse_hlo(text)).collectives
    assert (collective.kind, collective.bytes, collective.moved) == ("all-gather", 256.0, 224.0)


def test_a_gather_that_runs_during_several_fusions_counts_once():
    """The TPU compiler repeats its instruction in each fusion of a chain; other gathers over the same channel count."""
    gather = "all-gather(%p), channel_id={channel}, replica_groups=[1,8]<=[8], dimensions={{0}}, {chain}"
    chain = 'frontend_attributes={chain_id="5"}'
    programs = [gather.format(channel=channel, chain=chain) for channel in (10, 10, 11)]
    programs += [gather.format(channel=10, chain="use_global_device_ids=true")] * 2
    fusions = [
        f"%f{i} (p: bf16[2,8]) -> bf16[16,8] {{\n  %p = bf16[2,8]{{1,0}} parameter(0)\n"
        f"  ROOT %r = bf16[16,8]{{1,0}} {of}\n}}"
        for i, of in enumerate(programs)
    ]
    calls = [f"  %c{i} = bf16[16,8]{{1,0}} fusion(%p), kind=kCustom, calls=%f{i}" for i in range(len(fusions))]
    entry = ["ENTRY %m (p: bf16[2,8]) -> bf16[2,8] {", "  ROOT %p = bf16[2,8]{1,0} parameter(0)", *calls, "}"]
    cost = read_cost(parse_hlo("\n".join([*fusions, *entry])))
    assert [collective.bytes for collective in cost.collectives] == [256.0] * 4


PLACED = """
%place (z: bf16[64,8], p: bf16[1,8], i: u32[]) -> bf16[64,8] {
  %z = bf16[64,8]{1,0} parameter(0)
  %p = bf16[1,8]{1,0} parameter(1)
  %i = u32[] parameter(2)
  %o = u32[] constant(0)
  ROOT %w = bf16[64,8]{1,0} dynamic-update-slice(%z, %p, %i, %o)
}

ENTRY %m (p: bf16[1,8], q: bf16[64,8], i: u32[]) -> bf16[64,8] {
  %p = bf16[1,8]{1,0} parameter(0)
  %q = bf16[64,8]{1,0} parameter(1)
  %i = u32[] parameter(2)
  %o = u32[] constant(0)
  %zero = bf16[] constant(0)
  %zeros = bf16[64,8]{1,0} broadcast(%zero), dimensions={}
  %w = bf16[64,8]{1,0} fusion(%zeros, %p, %i), kind=kLoop, calls=%place
  %c = bf16[64,8]{1,0} copy(%w)
  ROOT %r = bf16[64,8]{1,0} all-reduce(%c), replica_groups=[1,64]<=[64], to_apply=%add
}
"""


def test_a_sum_of_parts_in_zeros_is_a_gather():
    """XLA writes a gather over 64 chips like this; by its opcode alone it would escape the limit on gathers."""

    def largest(text):
        return largest_gather(parse_hlo(text))

    gather = largest(PLACED)
    assert (gather.kind, gather.bytes, gather.moved) == ("all-reduce", 1024.0, 2 * 1024 * 63 / 64)
    fused, update = "fusion(%zeros, %p, %i), kind=kLoop, calls=%place", "dynamic-update-slice(%zeros, %p, %i, %o)"
    bare = PLACED.replace(fused, update)
    assert largest(bare).bytes == 1024.0
    assert largest(PLACED.replace("fusion(%zeros", "fusion(%q")) is None  # a sum of values that mean something
    assert largest(bare.replace("slice(%zeros", "slice(%q")) is None
    assert largest(PLACED.replace("all-reduce(%c)", "all-reduce(%q)")) is None


def test_a_sum_that_is_cut_in_its_fusion_is_a_reduce_scatter():
    text = """
%all-reduce-scatter.1 (p: f32[64,8]) -> f32[16,8] {
  %p = f32[64,8]{1,0} parameter(0)
  %r = f32[64,8]{1,0} all-reduce(%p), replica_groups={{0,1,2,3}}, to_apply=%add
  %o = u32[] constant(0)
  ROOT %s = f32[16,8]{1,0} dynamic-slice(%r, %o, %o), dynamic_slice_sizes={16,8}
}

ENTRY %m (p: f32[64,8]) -> f32[16,8] {
  %p = f32[64,8]{1,0} parameter(0)
  ROOT %f = f32[16,8]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1
}"""
    (collective,) = read_cost(parse_hlo(text)).collectives
    assert (collective.kind, collective.bytes, collective.moved) == ("reduce-scatter", 2048.0, 2048 * 3 / 4)


def test_shapes_and_bytes():
    assert arrays("(f32[2,3]{1,0}, pred[], s4[8])") == [("f32", (2, 3), "{1,0}"), ("pred", (), ""), ("s4", (8,), "")]
    assert bytes_of("(f32[2,3]{1,0}, pred[], s4[8])") == 24 + 1 + 4
    assert bytes_of("f8e4m3fn[10]") == 10
    assert bytes_of("bf16[4]{0:T(256)S(1)}", main_memory=True) == 0


# ---- topologies and shapes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("v5p:4x4x4", 600e9),  # three rings
        ("v5p:2x2x1", 200e9),  # a neighbor along two sides: 2 of 6 links of 100 GB/s
        ("v5p:4x4x8", 600e9),
        ("v5e:2x2", 100e9),  # 2 of 4 links of 50 GB/s
        ("v5e:2x4/8", 125e9),  # 1 + (1 + 2 + 2 + 1) / 4 of them
        ("v6e:8x8", 350e9),  # lines of eight: 2 (2 * 7 / 8) of 4 links of 100 GB/s
        ("v5e:16x16", 200e9),
        ("v5p:4x4x4:2", 600e9),
        ("v5e:1x1", 200e9),  # nothing to send to
        ("h200:8", 450e9),
    ],
)
def test_a_plan_counts_the_links_that_a_slice_has(name, rate):
    assert parse_topology(name).chip.link_rate == pytest.approx(rate)


def test_a_gpu_has_the_memory_that_jax_takes():
    chip = parse_topology("h200:8", {}).chip
    assert chip.usable_bytes == 0.75 * 141e9 and parse_topology("v5e:2x2", {}).chip.usable_bytes == 16e9
    needs = Needs("update", arguments=110e9)
    assert not needs.fits(chip)
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        assert needs.fits(parse_topology("h200:8", {name: "0.9"}).chip)
    for given in ("90", "90%", "0"):
        with pytest.raises(TopologyError, match=rf"XLA_CLIENT_MEM_FRACTION={given}; must be a number above 0"):
            parse_topology("h100:8", {"XLA_CLIENT_MEM_FRACTION": given})


def test_gpus_are_described_to_their_compiler(monkeypatch):
    request = {}
    devices = [object()] * 16

    def described(**given):
        request.update(given)
        return SimpleNamespace(devices=devices)

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", described)
    assert topology_devices(parse_topology("h200:16")) == devices
    assert (request["platform"], request["topology"]) == ("cuda", "1x2x8"), "two machines of eight"
    fields = dict(re.findall(r"(\w+): (\d+)", request["target_config"]))
    described = (fields["major"], fields["core_count"], fields["memory_bandwidth"])
    assert described == ("9", "132", str(4800 * 10**9))


def test_where_the_compiler_is_missing_gpus_are_planned_by_arithmetic_and_tpus_refused(monkeypatch):
    def missing(**given):
        raise RuntimeError(f"unknown platform {given['platform']}")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert has_compiler(parse_topology("v5e:2x2")) and not has_compiler(parse_topology("h200:8"))
    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", missing)
    for name, extra in (("h200:8", r"jax\[cuda"), ("v5e:2x2", r"jax\[tpu")):
        with pytest.raises(TopologyError, match=rf"unknown platform .*pip install '{extra}.*--arithmetic"):
            topology_devices(parse_topology(name))


@pytest.mark.skipif(
    not has_compiler(parse_topology("h200:1")), reason="the compiler for NVIDIA GPUs is not installed (extra gpu)"
)
def test_fused_attention_compiles_for_a_gpu_that_is_not_here():
    """cuDNN's kernels under the mask of packed rows in a program of an H200: forward once, though layers are
    recomputed, and backward."""
    (device,) = topology_devices(parse_topology("h200:1"))
    sharding = jax.sharding.SingleDeviceSharding(device)

    def shape(*sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=sharding)

    segments = jax.ShapeDtypeStruct((2, 1024), jnp.int32, sharding=sharding)
    remat = make_remat("attention", scanned=False)

    def total(q, k, v, s):
        return jnp.sin(remat(attend_cudnn)(jnp.cos(q), k, v, s).astype(jnp.float32)).sum()

    q, kv = shape(2, 1024, 8, 64), shape(2, 1024, 2, 64)
    text = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(q, kv, kv, segments).compile().as_text()
    targets = re.findall(r'custom_call_target="(__cudnn\$fmha\w+)"', text)
    assert [name.endswith("Backward") for name in targets] == [False, True]
    assert text.count('"mask_type": "CAUSAL"') == 2, "the half above the diagonal is left out"


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("Qwen/Qwen3-0.6B", "qwen3_0_6b"),
        ("Qwen/Qwen3-14B-Base", "qwen3_14b"),
        ("Qwen/Qwen3-30B-A3B", "qwen3_30b_a3b"),
        ("Qwen/Qwen3-235B-A22B", "qwen3_235b_a22b"),
        ("Qwen/Qwen2.5-0.5B-Instruct", "qwen2_5_0_5b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2_5_7b"),
        ("meta-llama/Llama-3.2-1B-Instruct", "llama3_2_1b"),
        ("google/gemma-3-1b-it", "gemma3_1b"),
        ("google/gemma-4-E2B-it", "gemma4_e2b"),
        ("google/gemma-4-E4B-it", "gemma4_e4b"),
        ("Qwen/Qwen3.5-4B", "qwen3_5_4b"),
        ("Qwen/Qwen3.5-27B", "qwen3_5_27b"),
        ("Qwen/Qwen3.5-35B-A3B", "qwen3_5_35b_a3b"),
        ("openai/gpt-oss-20b", "gpt_oss_20b"),
        ("zai-org/GLM-4.5-Air", "glm_4_5_air"),
    ],
)
def test_known_shapes_are_the_published_ones(name, published):
    assert same_model(KNOWN_SHAPES[name], read_config(CONFIGS[published][0]))


def test_recurrent_layers_have_a_state_instead_of_keys():
    """Qwen3.5-4B: 8 of 32 layers hold keys and values, 24 a state of 32 x 128 x 128 float32 and 3 inputs of 8192."""
    model = KNOWN_SHAPES["Qwen/Qwen3.5-4B"]
    assert cache_bytes(model, 2) == (8 * 2 * 4 * 256 * 2, 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2))
    assert planning.gather_limit(model) == 4 * 248_320 * 2560
    not_again = model.layers * model.d_model * model.d_ff  # the last products of the layers
    assert update_flops(Config(), model, 1, 1000) > 8 * parameter_count(model) - 2 * not_again
    # A token alone: read by key and by query, written once, for each of 32 heads; scores are of one pair.
    assert token_flops(model.delta, 1) == 32 * (6 * 128 * 128 + 2 * 3 * 128) + 4 * 16 * 128


def test_layers_that_share_keys_have_no_cache():
    """Gemma 4 E2B: 12 layers with a window and 3 without hold keys and values of one head, 256 or 512 wide; 20 layers
    hold none."""
    model = KNOWN_SHAPES["google/gemma-4-E2B-it"]
    assert cache_bytes(model, 2) == (2 * 2 * (12 * 256 + 3 * 512), 0)
    assert model.key_reads == (28 * 256 + 7 * 512) / (12 * 256 + 3 * 512)
    table = 262_144 * 35 * 256
    assert active_parameters(model) == parameter_count(model) - table
    base = replace(model, windows=replace(model.windows, shared_layers=0, shared_ff=0))
    one_device = abstract_mesh(Config(), parse_topology("h100:1"))
    sampled, full = (sampled_like(Config(), shape, one_device)[0] for shape in (model, base))
    appended = products(append_reads(sampled, model), model)
    assert appended < 0.45 * products(decode_reads(sampled), model) and cache_bytes(base, 2)[0] > 2 * 9216
    assert products(append_reads(full, base), base) == 2 * (active_parameters(base) - base.vocab_size * base.d_model)


def test_other_known_shapes_have_the_published_size():
    billions = {"Qwen/Qwen3-1.7B": 1.72, "Qwen/Qwen3-8B": 8.19, "HuggingFaceTB/SmolLM3-3B": 3.075}
    billions["google/gemma-2-2b-it"] = 2.614
    sizes = {name: parameter_count(KNOWN_SHAPES[name]) / 1e9 for name in billions}
    assert sizes == pytest.approx(billions, abs=0.005)


# ---- arithmetic ----------------------------------------------------------------------------------------------------

WORK = Work(
    problems=8, sampled=64, kept=32, prompt=10, response=90, samplers=2, slots=16, chunk=4, append_rows=8,
    micro_rows=4, row_length=100, fill=0.8, updates=1,
)  # fmt: skip


def test_a_time_is_the_longest_of_its_three_bounds():
    chip = replace(CHIPS["v5e"], flops=100.0, memory_rate=10.0, link_rate=1.0)
    moved = {"all-gather": {"runs": 1.0, "bytes": 8.0, "moved": 7.0}}
    assert Needs("a", flops=500.0, traffic=20.0).seconds(chip) == 5.0
    assert Needs("a", flops=500.0, traffic=60.0).seconds(chip) == 6.0
    assert Needs("a", flops=500.0, traffic=60.0, collectives=moved).seconds(chip) == 7.0
    moved["all-gather"]["links"] = 1 / 3  # of those of the chip
    assert Needs("a", collectives=moved).times(chip)["links"] == pytest.approx(3 * 7.0)


def test_memory_is_what_lies_there_at_once():
    needs = Needs("a", arguments=10e9, results=8e9, aliased=8e9, temporaries=2e9, resident=2e9)
    assert needs.total == 14e9 and needs.fits(CHIPS["v5e"])
    assert not replace(needs, resident=2.5e9).fits(CHIPS["v5e"]), "a tenth of 16 GB stays free"
    assert not Needs("a", refused="no room").fits(CHIPS["v5e"])


def test_a_step_adds_its_programs_up():
    assert WORK.decode_steps == 64 / 2 * 90 / 16 and replace(WORK, slots=64).decode_steps == 90
    assert WORK.micro_batches == math.ceil(32 * 100 / (4 * 100 * 0.8))
    chip = replace(CHIPS["v5e"], flops=1.0)
    names = ("weight_sync", "append/160/8/32/True", "decode/160")
    programs = [Needs(name, flops=flops) for flops, name in enumerate(names, 1)]
    assert step_times(programs, WORK, chip) is None
    times = step_times([Needs("append/160/8/32/False", flops=99.0), *programs, Needs("update", flops=4.0)], WORK, chip)
    assert (times.weight_sync, times.prompts, times.decode, times.update) == (1.0, 2.0, 3.0 * 180 / 4, 4.0)
    assert times.total == 142.0 and times.copies == 0
    parts = [Needs("weight_sync/1", flops=2.0), Needs("weight_sync/40", flops=1.0)]  # of 40 layers
    assert step_times([*parts, *programs[1:], Needs("update")], WORK, chip).weight_sync == 42.0


@pytest.mark.parametrize("seed", range(20))
def test_a_step_by_hand_is_never_shorter_than_its_bound(seed):
    """A process that runs rows of random lengths in a machine of one byte a second that reads rows in whole blocks:
    programs are paid as compiled, and the bound knows the means only."""
    rng = np.random.default_rng(seed)
    weights, lengths, block, columns, copies = 50.0, (8, 16, 32), 16, 160, 4
    prompts, slots, group = rng.integers(1, 33, 6), int(rng.integers(2, 9)), 4
    left = [[int(p), int(p + rng.integers(1, 96))] for p in prompts for _ in range(group)]  # (written, at its end)
    mean = sum(end - start for start, end in left) / len(left)
    work = replace(WORK, problems=6, sampled=24, prompt=float(prompts.mean()), response=mean, samplers=1, slots=slots)
    work = replace(work, append_rows=1, chunk=1, append_length=32, columns=columns, copies=copies)
    cache = 3.0  # bytes of a column of a row
    programs = [
        Needs("weight_sync"),
        Needs("append", flops=32.0, traffic=weights, fixed_traffic=weights),
        Needs("copy", traffic=2 * cache * copies * block),
        Needs("decode", traffic=weights + cache * slots * columns, fixed_traffic=weights),
        Needs("update"),
    ]
    bound = step_times(programs, work, replace(CHIPS["v5e"], flops=1.0, memory_rate=1.0, link_rate=1.0))
    spent = {"prompts": 0.0, "copies": 0.0, "decode": 0.0}
    running, known = [], set()
    while left or running:
        forks = 0
        while left and len(running) < slots:
            row = left.pop(0)
            index = (len(prompts) * group - len(left) - 1) // group
            if index in known:
                forks += 1
            else:
                spent["prompts"] += max(min(n for n in lengths if n >= row[0]), weights)
            known.add(index)
            running.append(row)
        spent["copies"] += -(-forks // copies) * 2 * cache * copies * block
        spent["decode"] += weights + cache * sum(-(-at // block) * block for at, _ in running)
        running = [[at + 1, end] for at, end in running if at + 1 < end]
    for name, seconds in spent.items():
        assert getattr(bound, name) <= seconds + 1e-9, name
    assert bound.total > sum(spent.values()) / 5


@pytest.mark.parametrize("recipe", ["clip_cov", "grpo", "entropy_target"])
def test_a_planned_batch_has_the_leaves_that_the_method_packs(recipe):
    config = load_config(Config, [str(load_methods()[recipe].path)], prog="test")
    groups = groups_of(config)
    rows = [t for group in groups for t in group.trajectories]
    scores = Scores([t.logprobs for t in rows], [np.abs(t.logprobs) for t in rows], [t.logprobs for t in rows])
    made = train_rows(groups, config, initial_state(config), rng=np.random.default_rng(0), scores=scores)
    several = config.sampling.temperature if config.plan.temperature.all else None
    packed, _ = pack(made, replace(config.batch, row_length=128), len(made), 1, several)
    planned = planning.batch_like(config, make_mesh(ShardingConfig(data=1), jax.devices()[:1]))
    for leaf in fields(planned):
        real, shape = getattr(packed, leaf.name), getattr(planned, leaf.name)
        assert (real is None) == (shape is None), leaf.name
        assert real is None or real.dtype == shape.dtype


def test_reference_and_teacher_are_counted():
    def resident(*words):
        run = deployment("toy.yaml", *words, topology="h200:1")
        return parameter_count(run.model), [needs.resident for needs in estimate(run)]

    (count, bare), (_, referred) = resident(), resident("--surrogate.kl=k3", "--surrogate.kl.coef=0.1")
    assert [new - old for new, old in zip(referred, bare, strict=True)] == [4 * count] * 4
    teacher = "Qwen/Qwen3-0.6B"
    _, distilled = resident(f"--advantage.adjust=[{{kind: teacher, path: {teacher}}}]")
    norms = 28 * 2 * (1024 + 128) + 1024  # float32
    size = 2 * (parameter_count(KNOWN_SHAPES[teacher]) + norms)
    assert [new - old for new, old in zip(distilled, bare, strict=True)] == [size] * 4


def test_the_cache_and_the_weights_of_rollouts_that_run_on_are_counted_in_the_update():
    plain, stream = (
        deployment("toy.yaml", *more, topology="h200:1") for more in ((), ("--rollout.step_limit=stream",))
    )
    parts = plain.memory_parts()
    more = [new.resident - old.resident for new, old in zip(estimate(stream), estimate(plain), strict=True)]
    assert more == [parts["cache"], 0.0, 0.0, parts["cache"] + parts["sampler"]]
    like = state_like(plain.model, plain.config.optim, plain.mesh)
    given = (like, like.params, (1e6, 1e6), 0.0, 1e9)
    before, after = (planning.resident_bytes(deployed.config, *given) for deployed in (plain, stream))
    assert after["update"] - before["update"] == 1e9 + 1e6 and after["decode"] == before["decode"]
    assert {name: after[name] - before[name] for name in after if name.startswith("weight")} == dict.fromkeys(
        ("weight_sync", "weight_check_trainer", "weight_check_sampler"), 1e9
    )


EXPERTS_IN_INT8 = ["--model.experts=mixture", "--model.experts.count=4", "--model.experts.per_token=2"]
EXPERTS_IN_INT8 += ["--rollout.low_precision.weights=int8"]
REFUSED = [
    (["--lora=low_rank", "--sharding.tensor=8", "--model.kv_heads=4"], "h100:8", "with model.kv_heads = 4 and lora"),
    (["--sharding.fsdp=8", "--rollout.slots=12"], "h100:8", "does not divide over the 8 data shards"),
    (["--sharding.fsdp=4", "--rollout.kv_tokens=400"], "h100:4", "too few for one row"),
    (["--sharding.tensor=3"], "h100:24", "does not divide the 8 devices of a process"),
    (["--sharding.fsdp=12"], "h100:24", "form no block of the mesh 2 x 12 x 1 x 1"),
    (["--update.attention=splash"], "h100:1", "splash"),
    (["--update.attention=cudnn", "--model.extras=some", "--model.extras.attention_cap=50.0"], "h100:1", "caps no"),
    (EXPERTS_IN_INT8, "h100:1", "int8 with experts"),
]


@pytest.mark.parametrize(("words", "topology", "reason"), REFUSED)
def test_a_plan_by_arithmetic_refuses_what_training_refuses(words, topology, reason):
    heads = [] if any("kv_heads" in word for word in words) else ["--model.kv_heads=8"]
    given = ["toy.yaml", "--model.heads=8", "--model.d_model=384", *heads, "--model.vocab_size=3072"]
    with pytest.raises(ValueError, match=re.escape(reason)):
        deployment(*given, "--sharding.data=-1", *words, topology=topology)


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 6, 8, 12, 24])
def test_the_devices_of_a_process_form_a_block_where_a_mesh_is_accepted(processes):
    """24 devices in all meshes of four axes, compared with blocks that are sought device by device."""
    total, each = 24, 24 // processes
    for shape in product(range(1, total + 1), repeat=4):
        if math.prod(shape) != total or (each % shape[-1] and shape[-1] % each):
            continue
        numbers = np.arange(total).reshape(shape) // max(each, shape[-1])
        blocks = []
        for number in range(numbers.max() + 1):
            places = np.argwhere(numbers == number)
            blocks.append(math.prod(places.max(0) - places.min(0) + 1) == len(places))
        try:
            check_processes(shape, processes)
        except ValueError:
            assert not all(blocks), shape
        else:
            assert all(blocks), shape


# ---- the command ---------------------------------------------------------------------------------------------------

TINY = ["configs/toy.yaml", "--model.layers", "1", "--model.vocab_size", "1024", "--rollout.slots", "8"]


LONG_ROWS = ["qwen3_0_6b_gsm8k", "--rollout.max_response_tokens", "50000", "--batch.row_length", "65536"]


@pytest.mark.usefixtures("platform_kept")
def test_simulated_steps_are_added(capsys):
    words = [*TINY, "--topology", "v5e:1", "--arithmetic", "--simulate", "--json", "--group.problems", "2"]
    assert plan_command.main(words) == plan_command.FITS
    report = json.loads(capsys.readouterr().out)
    alone = [name for name, (_, schedule) in SCHEDULES.items() if not schedule.stealing]
    assert list(report["simulated"]) == alone, "one process has nobody to steal from"
    for simulated in report["simulated"].values():
        assert sum(simulated["seconds"]) / STEPS >= report["step_s"]["total"], "no less than the bound"
        assert simulated["sampled"] and 0 < simulated["busy"] <= 1 and simulated["live"] <= simulated["slots"]
    assert report["lines"][-len(alone) - 2].startswith("simulated")


@pytest.mark.slow
@pytest.mark.usefixtures("platform_kept")
def test_simulated_steps_with_a_trainer_apart(capsys):
    """From four processes on. The samplers go on during updates, and no step is shorter than its update."""
    words = [*TINY, "--topology", "h100:32", "--arithmetic", "--simulate", "--json", "--group.problems", "4"]
    plan_command.main(words)
    report = json.loads(capsys.readouterr().out)
    simulated = report["simulated"]
    assert [name for name in simulated if name not in SCHEDULES] == list(APART)
    assert report["lines"][-1].startswith("trains apart")
    for name in APART:
        assert simulated[name]["sampled"] and 0 < simulated[name]["busy"] <= 1
        assert min(simulated[name]["seconds"]) >= report["step_s"]["update"]


@pytest.mark.usefixtures("platform_kept")
def test_arithmetic_says_what_fits_and_what_to_change(capsys, tmp_path):
    out = tmp_path / "plan.json"
    words = ["rstar2_qwen3_14b", "--stage", "8k", "--topology", "h200:64", "--arithmetic", "--out", str(out)]
    assert plan_command.main(words) == plan_command.FITS
    report = json.loads(out.read_text())
    assert report["fits"] and report["parameters"] == pytest.approx(14.768e9, rel=1e-3)
    assert {needs["name"] for needs in report["programs"]} == {"weight_sync", "append", "decode", "update"}
    capsys.readouterr()
    assert plan_command.main([*words[:-2], "--rollout.slots", "4096", "--json"]) == plan_command.DOES_NOT_FIT
    report = json.loads(capsys.readouterr().out)
    assert any("rollout.slots" in line for line in report["lines"])
    assert plan_command.main(["rstar2_qwen3_14b", "--topology", "h200:64", "--arithmetic", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert [stage["plan"] for stage in report["stages"]] == ["rstar2, 8k", "rstar2, 12k", "rstar2, hard"]
    assert report["fits"] and [stage["work"]["response"] for stage in report["stages"]] == [4096, 6144, 6144]
    assert plan_command.main(["rstar2_qwen3_14b", "--stage", "9k", "--topology", "h200:64"]) == plan_command.BAD_CONFIG
    assert "--stage 9k: must be one of 8k, 12k, hard" in capsys.readouterr().err


@pytest.mark.parametrize(("card", "memory_gb"), [("t4", 16), ("L4", 24), ("a10", 24), ("4090", 24)])
def test_single_cards_are_known(card, memory_gb):
    topology = parse_topology(f"{card}:1")
    chip = topology.chip
    assert topology.name == f"{card.lower()}:1" and chip.memory_bytes == memory_gb * 1e9
    # Arithmetic intensity of a card: between tens and hundreds of FLOPs a byte.
    assert 20 < chip.flops / chip.memory_rate < 500
    assert chip.gpu.threads in (1024, 1536)


@pytest.mark.usefixtures("platform_kept")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["toy.yaml", "--topology", "v7:2x2"], "one of v5e"),
        (["toy.yaml", "--topology", "h200:8", "--sharding.fsdp", "3"], "does not make 8 devices"),
        (["toy.yaml", "--topology", "h200:8", "--rollout.slot", "3"], "did you mean"),
        (["toy.yaml", "--topology", "h200:8", "--rollout.attention", "paged"], "on gpu: the kernel is for TPUs"),
        (["toy.yaml", "--topology", "v5e:8", "--arithmetic", "--rollout.attention", "paged"], "a multiple of 128"),
        (["toy.yaml", "--topology", "h200:8", "--model.path", "no/model"], "--model_shape"),
        (["toy.yaml", "--topology", "h200:8", "--stage", "hard"], "toy has no stages"),
        (["toy.yaml", "--topology", "v5e:2x2", "--programs", "update,decod"], "there is no 'decod'; must be of weight"),
        (["toy.yaml", "--topology", "v5e:2x2", "--arithmetic", "--programs", "copy"], "no 'copy'; by arithmetic they"),
        (["toy.yaml", "--topology", "h200:8", "--mean_response", "121"], "rollout.max_response_tokens = 120"),
        (["toy.yaml", "--topology", "h200:8", "--mean_response", "-1"], "--mean_response -1; must be"),
        (["toy.yaml", "--topology", "h200:8", "--out", f"{__file__}/plan.json"], "must be a file that can be written"),
        ([*LONG_ROWS, "--topology", "h200:8"], "but the model was made for texts of 40960 tokens"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_status_2(capsys, words, message):
    assert plan_command.main(words) == plan_command.BAD_CONFIG
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("platform_kept")
def test_only_the_named_programs_are_judged(capsys):
    words = [*TINY, "--topology", "v5e:1x1", "--arithmetic", "--rollout.slots", str(1 << 22)]
    assert plan_command.main(words) == plan_command.DOES_NOT_FIT
    assert plan_command.main([*words, "--programs", "update"]) == plan_command.FITS
    assert "fits (update alone)" in capsys.readouterr().out


def test_a_named_shape_keeps_what_the_run_chooses(tmp_path):
    """Experts that are replayed, and keys that are known to change nothing."""
    shape = tmp_path / "config.json"
    shape.write_text(json.dumps(write_config(KNOWN_SHAPES["Qwen/Qwen3-30B-A3B"]) | {"a_new_key": 1}))
    words = ["qwen3_30b_a3b", "--model.ignore_keys=[a_new_key]", "--model.experts=mixture", "--model.experts.count=128"]
    config = load_config(Config, [*words, "--model.experts.per_token=8", "--model.experts.replay=true"], prog="test")
    assert all(planning.model_of(config, name).experts.replay for name in ("", str(shape)))


@pytest.mark.slow
@pytest.mark.usefixtures("platform_kept")
def test_every_program_is_compiled_and_read(monkeypatch, capsys):
    monkeypatch.setattr(planning, "topology_devices", lambda topology: jax.devices()[: topology.chips])
    words = [*TINY, "--topology", "v5e:2x2", "--sharding.fsdp", "2", "--sharding.tensor", "2", "--json"]
    assert plan_command.main(words) == plan_command.FITS
    report = json.loads(capsys.readouterr().out)
    names = [needs["name"].split("/")[0] for needs in report["programs"]]
    checks = ["weight_check_trainer", "weight_check_sampler"]
    assert names == ["weight_sync", *checks, "decode", "append", "copy", "update"]
    update = report["programs"][-1]
    assert update["flops"] > 0 and update["aliased"] > 0 and "all-gather" in update["collectives"]
    assert max(needs["largest_gather"] for needs in report["programs"]) <= report["gather_limit_bytes"]


# ---- with the compiler for TPUs ------------------------------------------------------------------------------------


def tpu_devices(name):
    """The devices of a slice to compile for, or a skip with the reason."""
    pytest.importorskip("libtpu", reason="libtpu, the compiler for TPUs, is not installed (the extra `tpu`)")
    return topology_devices(parse_topology(name))


@pytest.mark.slow
def test_a_pod_gives_every_process_a_block_of_the_mesh():
    for name, fsdp, tensor in (("v5p:4x4x4", 16, 4), ("v6e:8x8", 16, 4), ("v5p:4x4x4", 64, 1), ("v6e:8x8", 8, 2)):
        mesh = make_mesh(ShardingConfig(fsdp=fsdp, tensor=tensor), tpu_devices(name))
        for process in range(16):
            block = process_mesh(mesh, process)
            assert block.size == 4 and block.shape["tensor"] == tensor
    mesh = make_mesh(ShardingConfig(fsdp=8, tensor=8), tpu_devices("v5p:4x4x4"))
    for process in range(16):
        together = {device.process_index for device in process_mesh(mesh, process).devices.flat}
        assert together == {process - process % 2, process - process % 2 + 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experts", "attention"),
    [({}, "xla"), ({"experts": Mixture(16, 2)}, "xla"), ({}, "paged")],
    ids=["dense", "experts", "paged"],
)
def test_a_tpu_decodes_in_place_and_gathers_no_weights(experts, attention):
    """A cache whose axes are not in the order that the loop needs is copied twice in every chunk."""
    model = ModelConfig(
        d_model=256, layers=1, heads=8, kv_heads=4, head_dim=128, d_ff=256, vocab_size=1024, compute_dtype="bfloat16"
    )
    model = replace(model, **experts)
    rollout = RolloutConfig(slots=32, max_prompt_tokens=256, max_response_tokens=1700)
    rollout = replace(rollout, attention=attention)
    mesh = make_mesh(ShardingConfig(tensor=4), tpu_devices("v5p:2x2x1"))
    engine = make_engine(model, rollout, SamplingConfig(), [0], mesh)
    params = state_like(model, OptimConfig(), mesh).params
    needs = next(
        planning.read_needs(name, lowered, 0.0, [8.0], lambda line: None)
        for name, lowered in engine.lower(params)
        if name.startswith("decode")
    )
    cache = 2 * rollout.shard_blocks(1) * rollout.block * 1 * 128 * 2
    assert needs.aliased >= cache and needs.temporaries < cache / 4
    assert needs.largest_gather <= 4 * 32 * 1024  # the logits of all rows
    assert experts or bool(needs.kernels) is (attention == "paged")


@pytest.mark.slow
@pytest.mark.usefixtures("platform_kept")
def test_a_small_model_is_planned_for_a_real_slice(capsys):
    tpu_devices("v5e:2x2")
    words = [*TINY, "--topology", "v5e:2x2", "--sharding.fsdp", "2", "--sharding.tensor", "2", "--json"]
    assert plan_command.main(words) == plan_command.FITS
    report = json.loads(capsys.readouterr().out)
    assert report["how"] == "as compiled" and all(needs["total"] > 0 for needs in report["programs"])


@pytest.mark.slow
@pytest.mark.usefixtures("platform_kept")
@pytest.mark.parametrize("axes", [("--sharding.tensor=2",), ("--sharding.sequence=2", "--sharding.tensor=2")], ids=str)
def test_kernels_of_attention_are_compiled_for_a_slice_and_shown_beside_plain_xla(capsys, axes):
    tpu_devices("v5e:2x2")
    words = [*TINY, *axes, "--topology", "v5e:2x2", "--batch.row_length", "1024", "--programs", "update", "--json"]
    assert plan_command.main([*words, "--update.attention", "splash"]) == plan_command.FITS
    splash, blocked = json.loads(capsys.readouterr().out)["programs"]
    assert (splash["name"], blocked["name"]) == ("update", f"{planning.COMPARED}update by blocked")
    micro_batches = splash["kernels"]["tpu_custom_call"] / (3 * 2)  # forward, gradients of queries and of keys
    assert micro_batches >= 1 and micro_batches == int(micro_batches) and not blocked["kernels"]
    assert splash["temporaries"] > 0 and blocked["temporaries"] > 0
    words += ["--update.attention", "splash", "--batch.row_length", "1000"]
    assert plan_command.main(words) == plan_command.BAD_CONFIG


def test_the_limit_of_gathers_is_a_layer_or_the_embedding():
    model = ModelConfig(d_model=8, layers=3, heads=2, kv_heads=2, head_dim=4, d_ff=16, vocab_size=10)
    layer = 2 * 8 + 4 * 8 * 8 + 3 * 8 * 16
    assert planning.gather_limit(model) == 4 * layer
    assert planning.gather_limit(replace(model, vocab_size=1000)) == 4 * 8000
