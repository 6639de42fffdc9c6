"""Plans: formulas, the HLO parser on programs with known collectives, topologies, exit statuses."""

import json
import math
import re
from dataclasses import fields, replace
from functools import partial
from itertools import product

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
from grpo_roc_jax.learner.loss import make_remat
from grpo_roc_jax.learner.pack import pack
from grpo_roc_jax.learner.update import state_like
from grpo_roc_jax.method.compose import Scores, initial_state, train_rows
from grpo_roc_jax.model.attention import attend_cudnn
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.delta import token_flops
from grpo_roc_jax.model.published import read_config, same_model, write_config
from grpo_roc_jax.model.sharding import ShardingConfig, check_processes, make_mesh
from grpo_roc_jax.planner import estimate as estimating
from grpo_roc_jax.planner import plan as planning
from grpo_roc_jax.planner.hlo import arrays, bytes_of, group_size, parse_hlo
from grpo_roc_jax.planner.hlo_cost import largest_gather, read_cost
from grpo_roc_jax.planner.hlo_loops import check_loops, hanging, placed
from grpo_roc_jax.planner.known_shapes import KNOWN_SHAPES
from grpo_roc_jax.planner.roofline import Needs, Work, step_times
from grpo_roc_jax.planner.schedules import APART, SCHEDULES, STEPS
from grpo_roc_jax.planner.topology import CHIPS, has_compiler, parse_topology, topology_devices
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

    def layer(x, w):
        return jnp.tanh(x @ jax.lax.with_sharding_constraint(w, named())), None

    def run(weights, x, count):
        return jax.lax.fori_loop(0, count, lambda _, x: jax.lax.scan(layer, x, weights)[0], x).sum()

    like = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    stack, rows = like((LAYERS, WIDTH, WIDTH), sharding=named(None, "x")), like((ROWS, WIDTH), sharding=named("x"))
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=named())
    program = parse_hlo(jax.jit(run).lower(stack, rows, count).compile().as_text())
    once, thrice = read_cost(program), read_cost(program, [3.0])
    assert once.flops == LAYERS * 2 * (ROWS // 8) * WIDTH * WIDTH and thrice.flops == 3 * once.flops
    kinds, matrix, runs = thrice.by_kind(), 4 * WIDTH * WIDTH, 3 * LAYERS
    assert set(kinds) == {"all-gather", "all-reduce"}
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
    """A loop that every pair of four devices runs on rows of its own, as in the engine."""
    grid = jax.make_mesh((2, 2), ("rows", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def loop(x, weights):
        return jax.lax.while_loop(
            condition, lambda state: (exchange(jnp.tanh(state[0] @ weights)), state[1] + 1), (x, 0)
        )

    specs = {"in_specs": (P("rows"), P()), "out_specs": (P("rows"), P())}
    mapped = jax.shard_map(loop, mesh=grid, axis_names={"rows"}, check_vma=False, **specs)
    given = ((4, 8), P("rows")), ((8, 8), P(None, "tensor"))
    arguments = [jax.ShapeDtypeStruct(n, jnp.float32, sharding=NamedSharding(grid, spec)) for n, spec in given]
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
    elif condition is own_rows_left:
        (line,) = hanging(program, [])
        assert line.startswith("all-gather"), "arguments that are not known may differ"


def test_kernels_convolutions_slices_shapes_and_groups():
    """The compiler describes a kernel over several lines, one of which looks like the end of a computation. A batched
    product that it writes as a convolution counts what it computes."""
    program = hlo("""
  %a = f32[8,8]{1,0} parameter(0)
  %k = f32[8,8]{1,0} custom-call(%a), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 512}"
}}, metadata={op_name="jit(f)/kernel"}
  ROOT %r = f32[8,8]{1,0} all-reduce(%k), replica_groups={{0,1}}, to_apply=%add""")
    assert read_cost(program).kernels == {"tpu_custom_call": 1.0}
    assert read_cost(program).by_kind()["all-reduce"]["bytes"] == 4 * 8 * 8
    product = hlo("""
  %a = bf16[8,16,32]{2,1,0:T(8,128)(2,1)S(1)} parameter(0)
  %b = bf16[8,32,64]{2,1,0} parameter(1)
  ROOT %c = bf16[8,16,64]{2,1,0} convolution(%a, %b), window={size=8 stride=7 lhs_dilate=8}, dim_labels=0bf_0io->0bf""")
    assert read_cost(product).flops == 2 * 8 * 16 * 32 * 64
    assert read_cost(product).traffic == 2 * (8 * 32 * 64 + 8 * 16 * 64)  # the first operand stays on the chip
    given = "  %p = f32[8,4]{1,0} parameter(0)\n  %i = s32[] parameter(1)\n"
    called = {
        "%same": "ROOT %b = f32[8,4]{1,0} bitcast(%p)",
        "%one": "ROOT %s = f32[1,4]{1,0} dynamic-slice(%p, %i, %i), dynamic_slice_sizes={1,4}",
        "%both": "ROOT %f = f32[1,4]{1,0} fusion(%p, %i), kind=kLoop, calls=%one",
        "%whole": "%f = f32[8,4]{1,0} fusion(%p), kind=kLoop, calls=%same\n  ROOT %n = f32[8,4]{1,0} negate(%f)",
    }
    entry = """  %x = f32[1,4]{1,0} fusion(%p, %i), kind=kLoop, calls=%both
  ROOT %y = f32[8,4]{1,0} fusion(%p), kind=kLoop, calls=%whole"""
    program = hlo(given + entry, **{name: f"{given}  {lines}" for name, lines in called.items()})
    row, matrix, index = 16, 128, 4
    assert read_cost(program).traffic == (row + index) + row + 2 * matrix
    assert arrays("(f32[2,3]{1,0}, pred[], s4[8])") == [("f32", (2, 3), "{1,0}"), ("pred", (), ""), ("s4", (8,), "")]
    assert bytes_of("(f32[2,3]{1,0}, pred[], s4[8])") == 24 + 1 + 4
    assert bytes_of("f8e4m3fn[10]") == 10
    assert bytes_of("bf16[4]{0:T(256)S(1)}", main_memory=True) == 0
    with pytest.raises(ValueError, match="ENTRY"):
        parse_hlo("HloModule nothing")
    for text, size in (
        ("replica_groups={{0,1,2},{3,4,5}}", 3),
        ("replica_groups=[16,4]<=[64]", 4),
        ("replica_groups=[4,16]<=[16,4]T(1,0), dimensions={0}", 16),
        ("replica_groups=mesh['a'=2,'b'=8] {'b'}", 8),
        ("replica_groups=mesh['a'=8,'b'=1,'c'=2], device_ids=([2,8]T(1,0)) {'c'}, x={0}", 2),
        ("source_target_pairs={{0,1},{1,0}}", 2),
    ):
        program = hlo(f"  %p = f32[4] parameter(0)\n  ROOT %r = f32[4] all-reduce(%p), {text}")
        assert group_size(program.computations["m"]["r"]) == size, text
    grid = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("d", "f", "t"))
    for spec, classes in (
        (P(), (0,) * 8),
        (P(("d", "f")), (0, 0, 2, 2, 4, 4, 6, 6)),
        (P(None, "t"), (0, 1) * 4),
        (P("f", ("t", "d")), tuple(range(8))),
        (P("f"), (0, 0, 2, 2, 0, 0, 2, 2)),
    ):
        assert placed(NamedSharding(grid, spec), 8) == classes
        assert placed(NamedSharding(grid, spec), 16) == (tuple(range(16)) if any(spec) else (0,) * 16)


def hlo(text, **computations):
    """A program by the instructions of its entry and of what this calls; `%p` is a parameter everywhere."""
    parts = {**computations, "ENTRY %m": text}
    return parse_hlo("\n".join(f"{name} (p: f32[]) -> f32[] {{\n{inside}\n}}\n" for name, inside in parts.items()))


CONDITION = """
  %s = (s32[], f32[8]{0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%s), index=0
  %n = s32[]{:T(128)} constant(28)
  ROOT %lt = pred[]{:T(512)} compare(%i, %n), direction=LT, metadata={op_name="jit(f)/while/cond/lt"}
"""
BODY = """
  %s = (s32[]{:T(128)}, f32[8]{0}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%s), index=1
  %r = f32[8]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
  %i = s32[]{:T(128)} get-tuple-element(%s), index=0
  %one = s32[] constant(1)
  %two = s32[] constant(2)
  %j = s32[]{:T(128)} add(%i, %one)
  %k = s32[]{:T(128)} COUNTER
  ROOT %t = (s32[], f32[8]{0}) tuple(%k, %r)
"""


@pytest.mark.parametrize(
    ("counter", "bound", "open_turns", "times"),
    [
        ("copy(%i)", "constant(28)", [5.0], 28.0),  # unclear: taken as one
        ("copy(%i)", "get-tuple-element(%s), index=0", [5.0], 5.0),
        ("copy(%i)", "get-tuple-element(%s), index=0", [], 1.0),
        # A product whose parts circulate over the devices handles several per iteration.
        ("add(%two, %j)", "constant(28)", [5.0], 10.0),
        ("add(%i, %two)", "constant(28)", [5.0], 14.0),
        ("add(%i, %j)", "constant(28)", [5.0], 28.0),  # no constant step
        ("copy(%j)", "constant(28)", [5.0], 28.0),
    ],
)
def test_turns_are_read_from_the_condition_where_it_has_a_constant(counter, bound, open_turns, times):
    loop = """
  %a = (s32[], f32[8]{0}) parameter(0)
  ROOT %w = (s32[], f32[8]{0}) while(%a), condition=%condition, body=%body"""
    condition, body = CONDITION.replace("constant(28)", bound), BODY.replace("COUNTER", counter)
    (collective,) = read_cost(hlo(loop, **{"%body": body, "%condition": condition}), open_turns).collectives
    assert (collective.times, collective.loops) == (times, 1)


def test_what_a_collective_moves_and_which_sum_of_parts_in_zeros_is_a_gather():
    """A started gather counts once, and so does one that a TPU runs during several fusions: its compiler repeats the
    instruction in each of the chain; other gathers over the same channel count. A sum that is cut in its fusion is a
    reduce-scatter. XLA writes a gather over 64 chips like this; by its opcode alone it would escape the limit on
    gathers."""
    started = hlo("""
  %p = bf16[2,8]{1,0} parameter(0)
  %s = (bf16[2,8]{1,0}, bf16[16,8]{1,0}) all-gather-start(%p), replica_groups=[1,8]<=[8], dimensions={0}
  ROOT %d = bf16[16,8]{1,0} all-gather-done(%s)""")
    cut = """
  %p = f32[64,8]{1,0} parameter(0)
  %r = f32[64,8]{1,0} all-reduce(%p), replica_groups={{0,1,2,3}}, to_apply=%add
  %o = u32[] constant(0)
  ROOT %s = f32[16,8]{1,0} dynamic-slice(%r, %o, %o), dynamic_slice_sizes={16,8}"""
    summed = """  %p = f32[64,8]{1,0} parameter(0)
  ROOT %f = f32[16,8]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1"""
    scattered = hlo(summed, **{"%all-reduce-scatter.1": cut})
    for program, kind, size, moved in ((started, "all-gather", 256, 224), (scattered, "reduce-scatter", 2048, 1536)):
        (collective,) = read_cost(program).collectives
        assert (collective.kind, collective.bytes, collective.moved) == (kind, size, moved)
    given, chain = "  %p = bf16[2,8]{1,0} parameter(0)\n", 'frontend_attributes={chain_id="5"}'
    gather = "  ROOT %r = bf16[16,8]{{1,0}} all-gather(%p), channel_id={}, replica_groups=[1,8]<=[8], {}"
    gathers = [(10, chain), (10, chain), (11, chain), *[(10, "use_global_device_ids=true")] * 2]
    calls = [f"  %c{i} = bf16[16,8]{{1,0}} fusion(%p), kind=kCustom, calls=%f{i}\n" for i in range(len(gathers))]
    program = hlo(given + "".join(calls), **{f"%f{i}": given + gather.format(*of) for i, of in enumerate(gathers)})
    assert [collective.bytes for collective in read_cost(program).collectives] == [256.0] * 4

    def largest(old="", new="", text=PLACED):
        return largest_gather(hlo(text.replace(old, new), **{"%place": PLACE}))

    gather = largest()
    assert (gather.kind, gather.bytes, gather.moved) == ("all-reduce", 1024.0, 2 * 1024 * 63 / 64)
    fused, update = "fusion(%zeros, %p, %i), kind=kLoop, calls=%place", "dynamic-update-slice(%zeros, %p, %i, %o)"
    assert largest(fused, update).bytes == 1024.0
    assert largest("fusion(%zeros", "fusion(%q") is None  # a sum of values that mean something
    assert largest("slice(%zeros", "slice(%q", PLACED.replace(fused, update)) is None
    assert largest("all-reduce(%c)", "all-reduce(%q)") is None


PLACED = """
  %p = bf16[1,8]{1,0} parameter(0)
  %q = bf16[64,8]{1,0} parameter(1)
  %i = u32[] parameter(2)
  %o = u32[] constant(0)
  %zero = bf16[] constant(0)
  %zeros = bf16[64,8]{1,0} broadcast(%zero), dimensions={}
  %w = bf16[64,8]{1,0} fusion(%zeros, %p, %i), kind=kLoop, calls=%place
  %c = bf16[64,8]{1,0} copy(%w)
  ROOT %r = bf16[64,8]{1,0} all-reduce(%c), replica_groups=[1,64]<=[64], to_apply=%add
"""
PLACE = """
  %z = bf16[64,8]{1,0} parameter(0)
  %p = bf16[1,8]{1,0} parameter(1)
  %i = u32[] parameter(2)
  ROOT %w = bf16[64,8]{1,0} dynamic-update-slice(%z, %p, %i, %i)
"""


def test_known_shapes_are_the_published_ones_and_keep_what_the_run_chooses(tmp_path):
    """Names with and without points and hyphens, and without what says how a model was tuned. Experts that are
    replayed, and keys that are known to change nothing."""
    plain = {re.sub(r"\W|_", "", name): name for name in CONFIGS}
    named = {name: re.sub(r"\W|_|base$|instruct$|it$", "", name.partition("/")[2].lower()) for name in KNOWN_SHAPES}
    for name, short in named.items():
        assert short not in plain or same_model(KNOWN_SHAPES[name], read_config(CONFIGS[plain[short]][0])), name
    assert plain.keys() <= set(named.values())
    billions = {"Qwen/Qwen3-1.7B": 1.72, "Qwen/Qwen3-8B": 8.19, "HuggingFaceTB/SmolLM3-3B": 3.075}
    billions |= {"google/gemma-2-2b-it": 2.614, "openai/gpt-oss-20b": 20.915, "zai-org/GLM-4.5-Air": 106.852}
    sizes = {name: parameter_count(KNOWN_SHAPES[name]) / 1e9 for name in billions}
    assert sizes == pytest.approx(billions, abs=0.005)
    shape = tmp_path / "config.json"
    shape.write_text(json.dumps(write_config(KNOWN_SHAPES["Qwen/Qwen3-30B-A3B"]) | {"a_new_key": 1}))
    words = ["qwen3_30b_a3b", "--model.ignore_keys=[a_new_key]", "--model.experts=mixture", "--model.experts.count=128"]
    config = load_config(Config, [*words, "--model.experts.per_token=8", "--model.experts.replay=true"], prog="test")
    assert all(planning.model_of(config, name).experts.replay for name in ("", str(shape)))


WORK = Work(
    problems=8, sampled=64, kept=32, prompt=10, response=90, samplers=2, slots=16, chunk=4, append_rows=8,
    micro_rows=4, row_length=100, fill=0.8, updates=1,
)  # fmt: skip
V5E = CHIPS["v5e"]


def test_recurrent_layers_have_a_state_instead_of_keys_and_those_that_share_keys_no_cache():
    """Qwen3.5-4B: 8 of 32 layers hold keys and values, 24 a state of 32 x 128 x 128 float32 and 3 inputs of 8192.
    Gemma 4 E2B: 12 layers with a window and 3 without hold keys and values of one head, 256 or 512 wide, 20 none."""
    model = KNOWN_SHAPES["Qwen/Qwen3.5-4B"]
    assert cache_bytes(model, 2) == (8 * 2 * 4 * 256 * 2, 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2))
    assert planning.gather_limit(model) == 4 * 248_320 * 2560, "the embedding, or of smaller ones a layer"
    small = ModelConfig(d_model=8, layers=3, heads=2, kv_heads=2, head_dim=4, d_ff=16, vocab_size=10)
    assert planning.gather_limit(small) == 4 * (2 * 8 + 4 * 8 * 8 + 3 * 8 * 16)
    not_again = model.layers * model.d_model * model.d_ff  # the last products of the layers
    assert estimating.update_flops(Config(), model, 1, 1000) > 8 * parameter_count(model) - 2 * not_again
    # A token alone: read by key and by query, written once, for each of 32 heads; scores are of one pair.
    assert token_flops(model.delta, 1) == 32 * (6 * 128 * 128 + 2 * 3 * 128) + 4 * 16 * 128
    model, one_device = (
        KNOWN_SHAPES["google/gemma-4-E2B-it"],
        estimating.abstract_mesh(Config(), parse_topology("h100:1")),
    )
    assert cache_bytes(model, 2) == (2 * 2 * (12 * 256 + 3 * 512), 0)
    assert model.key_reads == (28 * 256 + 7 * 512) / (12 * 256 + 3 * 512)
    assert estimating.active_parameters(model) == parameter_count(model) - 262_144 * 35 * 256
    base = replace(model, windows=replace(model.windows, shared_layers=0, shared_ff=0))

    def products(shape, reads):
        return estimating.products(reads(sampled_like(Config(), shape, one_device)[0]), shape)

    appended = products(model, lambda sampled: estimating.append_reads(sampled, model))
    assert appended < 0.45 * products(model, estimating.decode_reads) and cache_bytes(base, 2)[0] > 2 * 9216
    whole = products(base, lambda sampled: estimating.append_reads(sampled, base))
    assert whole == 2 * (estimating.active_parameters(base) - base.vocab_size * base.d_model)


def test_a_time_is_the_longest_of_its_three_bounds_and_a_step_adds_its_programs_up():
    chip = replace(V5E, flops=100.0, memory_rate=10.0, link_rate=1.0)
    moved = {"all-gather": {"runs": 1.0, "bytes": 8.0, "moved": 7.0}}
    assert Needs("a", flops=500.0, traffic=20.0).seconds(chip) == 5.0
    assert Needs("a", flops=500.0, traffic=60.0).seconds(chip) == 6.0
    assert Needs("a", flops=500.0, traffic=60.0, collectives=moved).seconds(chip) == 7.0
    moved["all-gather"]["links"] = 1 / 3  # of those of the chip
    assert Needs("a", collectives=moved).times(chip)["links"] == pytest.approx(3 * 7.0)
    needs = Needs("a", arguments=10e9, results=8e9, aliased=8e9, temporaries=2e9, resident=2e9)
    assert needs.total == 14e9 and needs.fits(V5E), "memory is what lies there at once"
    assert not replace(needs, resident=2.5e9).fits(V5E), "a tenth of 16 GB stays free"
    assert not Needs("a", refused="no room").fits(V5E)
    assert WORK.decode_steps == 64 / 2 * 90 / 16 and replace(WORK, slots=64).decode_steps == 90
    assert WORK.micro_batches == math.ceil(32 * 100 / (4 * 100 * 0.8))
    chip, names = replace(V5E, flops=1.0), ("weight_sync", "append/160/8/32/True", "decode/160")
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
    weights, lengths, block, columns, copies, group = 50.0, (8, 16, 32), 16, 160, 4, 4
    prompts, slots = rng.integers(1, 33, 6), int(rng.integers(2, 9))
    left = [[int(p), int(p + rng.integers(1, 96))] for p in prompts for _ in range(group)]  # (written, at its end)
    sizes = {"prompt": float(prompts.mean()), "response": sum(end - start for start, end in left) / len(left)}
    sizes |= {"problems": 6, "sampled": 24, "samplers": 1, "slots": slots, "append_rows": 1, "chunk": 1}
    work = replace(WORK, **sizes, append_length=32, columns=columns, copies=copies)
    cache = 3.0  # bytes of a column of a row
    programs = [
        Needs("weight_sync"),
        Needs("append", flops=32.0, traffic=weights, fixed_traffic=weights),
        Needs("copy", traffic=2 * cache * copies * block),
        Needs("decode", traffic=weights + cache * slots * columns, fixed_traffic=weights),
        Needs("update"),
    ]
    bound = step_times(programs, work, replace(V5E, flops=1.0, memory_rate=1.0, link_rate=1.0))
    spent = {"prompts": 0.0, "copies": 0.0, "decode": 0.0}
    running, known = [], set()
    while left or running:
        forks = 0
        while left and len(running) < slots:
            running.append(left.pop(0))
            index = (len(prompts) * group - len(left) - 1) // group
            if index in known:
                forks += 1
            else:
                spent["prompts"] += max(min(n for n in lengths if n >= running[-1][0]), weights)
            known.add(index)
        spent["copies"] += -(-forks // copies) * 2 * cache * copies * block
        spent["decode"] += weights + cache * sum(-(-at // block) * block for at, _ in running)
        running = [[at + 1, end] for at, end in running if at + 1 < end]
    assert all(getattr(bound, name) <= seconds + 1e-9 for name, seconds in spent.items()), spent
    assert bound.total > sum(spent.values()) / 5


@pytest.mark.parametrize("recipe", ["clip_cov", "grpo", "entropy_target"])
def test_a_planned_batch_has_the_leaves_that_the_method_packs(recipe):
    config = load_config(Config, [str(load_methods()[recipe].path)], prog="test")
    groups = groups_of(config)
    logprobs = [t.logprobs for group in groups for t in group.trajectories]
    scores = Scores(logprobs, [np.abs(row) for row in logprobs], logprobs)
    made = train_rows(groups, config, initial_state(config), rng=np.random.default_rng(0), scores=scores)
    several = config.sampling.temperature if config.plan.temperature.all else None
    packed, _ = pack(made, replace(config.batch, row_length=128), len(made), 1, several)
    planned = planning.batch_like(config, make_mesh(ShardingConfig(data=1), jax.devices()[:1]))
    for leaf in fields(planned):
        real, shape = getattr(packed, leaf.name), getattr(planned, leaf.name)
        assert (real is None) == (shape is None), leaf.name
        assert real is None or real.dtype == shape.dtype


def test_reference_teacher_and_what_runs_on_are_counted():
    """Rollouts that run on keep the cache and the weights during the update."""

    def deployed(*words):
        run = deployment("toy.yaml", *words, topology="h200:1")
        return run, [needs.resident for needs in estimating.estimate(run)]

    def more(*words):
        return [new - old for new, old in zip(deployed(*words)[1], bare, strict=True)]

    plain, bare = deployed()
    assert more("--surrogate.kl=k3", "--surrogate.kl.coef=0.1") == [4 * parameter_count(plain.model)] * 4
    teacher = "Qwen/Qwen3-0.6B"
    norms = 28 * 2 * (1024 + 128) + 1024  # float32
    size = 2 * (parameter_count(KNOWN_SHAPES[teacher]) + norms)
    assert more(f"--advantage.adjust=[{{kind: teacher, path: {teacher}}}]") == [size] * 4
    on, parts = "--rollout.step_limit=stream", plain.memory_parts()
    assert more(on) == [parts["cache"], 0.0, 0.0, parts["cache"] + parts["sampler"]]
    like = state_like(plain.model, plain.config.optim, plain.mesh)
    given = (like, like.params, (1e6, 1e6), 0.0, 1e9)
    before, after = (planning.resident_bytes(run.config, *given) for run in (plain, deployed(on)[0]))
    added = dict.fromkeys(("weight_sync", "weight_check_trainer", "weight_check_sampler"), 1e9)
    assert {name: after[name] - before[name] for name in after if after[name] != before[name]} == added | {
        "update": 1e9 + 1e6
    }


REFUSED = [
    ("--lora=low_rank --sharding.tensor=8 --model.kv_heads=4", "h100:8", "with model.kv_heads = 4 and lora"),
    ("--sharding.fsdp=8 --rollout.slots=12", "h100:8", "does not divide over the 8 data shards"),
    ("--sharding.fsdp=4 --rollout.kv_tokens=400", "h100:4", "too few for one row"),
    ("--sharding.fsdp=12", "h100:24", "form no block of the mesh 2 x 12 x 1 x 1"),
    ("--update.attention=splash", "h100:1", "splash"),
    ("--update.attention=cudnn --model.extras=some --model.extras.attention_cap=50.0", "h100:1", "caps no"),
    (
        "--model.experts=mixture --model.experts.count=4 --model.experts.per_token=2 "
        "--rollout.low_precision.weights=int8",
        "h100:1",
        "int8 with experts",
    ),
]


@pytest.mark.parametrize(("words", "topology", "reason"), REFUSED)
def test_a_plan_by_arithmetic_refuses_what_training_refuses(words, topology, reason):
    shape = "--model.heads=8 --model.d_model=384 --model.kv_heads=8 --model.vocab_size=3072 --sharding.data=-1"
    with pytest.raises(ValueError, match=re.escape(reason)):
        deployment("toy.yaml", *shape.split(), *words.split(), topology=topology)


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


def report_of(capsys, *words, status=plan_command.FITS):
    """The report that the command prints for these words."""
    capsys.readouterr()
    assert plan_command.main([*words, "--json"]) == status
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("pod", "problems"), [("v5e:1", "2"), pytest.param("h100:32", "4", marks=pytest.mark.slow)], ids=["one", "four"]
)
@pytest.mark.usefixtures("platform_kept")
def test_simulated_steps_are_added(capsys, pod, problems):
    """From four processes on with a trainer apart: samplers go on during updates, and no step is shorter than its
    update."""
    words = [*TINY, "--topology", pod, "--arithmetic", "--simulate", "--group.problems", problems, "--json"]
    plan_command.main(words)
    report = json.loads(capsys.readouterr().out)
    simulated, least, alone = report["simulated"], report["step_s"], pod == "v5e:1"
    schedules = [name for name, (_, schedule) in SCHEDULES.items() if not (alone and schedule.stealing)]
    assert list(simulated) == (schedules if alone else schedules + list(APART)), "one process has none to steal from"
    for name, of in simulated.items():
        assert of["sampled"] and 0 < of["busy"] <= 1 and of["live"] <= of["slots"]
        assert min(of["seconds"]) >= least["update"] if name in APART else sum(of["seconds"]) / STEPS >= least["total"]
    last = report["lines"][-1 if not alone else -len(schedules) - 2]
    assert last.startswith("simulated" if alone else "trains apart")


@pytest.mark.usefixtures("platform_kept")
def test_arithmetic_says_what_fits_and_what_to_change(capsys, tmp_path):
    out, words = tmp_path / "plan.json", ["rstar2_qwen3_14b", "--topology", "h200:64", "--arithmetic"]
    assert plan_command.main([*words, "--stage", "8k", "--out", str(out)]) == plan_command.FITS
    report = json.loads(out.read_text())
    assert report["fits"] and report["parameters"] == pytest.approx(14.768e9, rel=1e-3)
    assert {needs["name"] for needs in report["programs"]} == {"weight_sync", "append", "decode", "update"}
    large = [*words, "--stage", "8k", "--rollout.slots", "4096"]
    assert any("rollout.slots" in line for line in report_of(capsys, *large, status=plan_command.DOES_NOT_FIT)["lines"])
    report = report_of(capsys, *words)
    assert [stage["plan"] for stage in report["stages"]] == ["rstar2, 8k", "rstar2, 12k", "rstar2, hard"]
    assert report["fits"] and [stage["work"]["response"] for stage in report["stages"]] == [4096, 6144, 6144]
    assert plan_command.main([*words[:-1], "--stage", "9k"]) == plan_command.BAD_CONFIG
    assert "--stage 9k: must be one of 8k, 12k, hard" in capsys.readouterr().err
    words = [*TINY, "--topology", "v5e:1x1", "--arithmetic", "--rollout.slots", str(1 << 22)]
    assert plan_command.main(words) == plan_command.DOES_NOT_FIT
    assert plan_command.main([*words, "--programs", "update"]) == plan_command.FITS
    assert "fits (update alone)" in capsys.readouterr().out


@pytest.mark.usefixtures("platform_kept")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("v7:2x2", "one of v5e"),
        ("h200:8 --sharding.fsdp 3", "does not make 8 devices"),
        ("h200:8 --rollout.attention paged", "on gpu: the kernel is for TPUs"),
        ("v5e:8 --arithmetic --rollout.attention paged", "a multiple of 128"),
        ("h200:8 --model.path no/model", "--model_shape"),
        ("h200:8 --stage hard", "toy has no stages"),
        ("v5e:2x2 --programs update,decod", "there is no 'decod'; must be of weight"),
        ("v5e:2x2 --arithmetic --programs copy", "no 'copy'; by arithmetic they"),
        ("h200:8 --mean_response 121", "rollout.max_response_tokens = 120"),
        ("h200:8 --mean_response -1", "--mean_response -1; must be"),
        (f"h200:8 --out {__file__}/plan.json", "must be a file that can be written"),
        (
            "h200:8 --model.path Qwen/Qwen3-0.6B --rollout.max_response_tokens 50000 --batch.row_length 65536",
            "but the model was made for texts of 40960 tokens",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused_with_status_2(capsys, words, message):
    assert plan_command.main(["toy.yaml", "--topology", *words.split()]) == plan_command.BAD_CONFIG
    assert message in capsys.readouterr().err


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
