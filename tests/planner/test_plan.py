"""Plans: formulas, the HLO parser on programs with known collectives, pods by name, exit statuses; the simulator
against steps worked out by hand; what a plan advises."""

import json
import math
import re
from dataclasses import fields, make_dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import grpo_roc_jax as g
from benchmarks.first_step import groups_of
from docs.methods_table import load_methods
from grpo_roc_jax.commands import plan as plan_command
from grpo_roc_jax.learner.pack import pack
from grpo_roc_jax.model.published import read_config, same_model
from grpo_roc_jax.model.sharding import AXES, ShardingConfig, check_processes, make_mesh
from grpo_roc_jax.planner import hlo_cost, hlo_loops, links, suggest
from grpo_roc_jax.planner import plan as planning
from grpo_roc_jax.planner.estimate import abstract_mesh, estimate
from grpo_roc_jax.planner.hlo import group_size, parse_hlo
from grpo_roc_jax.planner.known_shapes import KNOWN_SHAPES
from grpo_roc_jax.planner.roofline import Needs, Work, step_times
from grpo_roc_jax.planner.schedules import SCHEDULES, STEPS
from grpo_roc_jax.planner.simulate import Costs, Machine, RowLife, RowTurn, StepSchedule, simulate
from grpo_roc_jax.planner.topology import CHIPS, GIB, TopologyError, parse_topology, topology_devices
from grpo_roc_jax.run import components, policy
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
    once, thrice = hlo_cost.read_cost(program), hlo_cost.read_cost(program, [3.0])
    assert once.flops == LAYERS * 2 * (ROWS // 8) * WIDTH * WIDTH and thrice.flops == 3 * once.flops
    kinds, matrix, runs = thrice.by_kind(), 4 * WIDTH * WIDTH, 3 * LAYERS
    assert set(kinds) == {"all-gather", "all-reduce"}
    assert kinds["all-gather"] == {"runs": runs, "bytes": runs * matrix, "moved": runs * matrix * 7 / 8}
    assert kinds["all-reduce"] == {"runs": 1.0, "bytes": 4.0, "moved": 2 * 4 * 7 / 8}
    # Every layer reads its share of the stack (1/8 of a matrix) and the gathered matrix a few times; reading the whole
    # stack in every layer would be 25 matrices and more.
    assert LAYERS * 2 * matrix < once.traffic < LAYERS * 8 * matrix
    assert hlo_cost.largest_gather(program).bytes == matrix


def loop_compiled(condition, exchange):
    """A loop that every pair of four devices runs on rows of its own, as in the engine."""
    grid = jax.make_mesh((2, 2), ("rows", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def loop(x, weights):
        return jax.lax.while_loop(condition, lambda at: (exchange(jnp.tanh(at[0] @ weights)), at[1] + 1), (x, 0))

    specs = {"in_specs": (P("rows"), P()), "out_specs": (P("rows"), P())}
    mapped = jax.shard_map(loop, mesh=grid, axis_names={"rows"}, check_vma=False, **specs)
    given = ((4, 8), P("rows")), ((8, 8), P(None, "tensor"))
    arguments = [jax.ShapeDtypeStruct(n, jnp.float32, sharding=NamedSharding(grid, spec)) for n, spec in given]
    return jax.jit(mapped).lower(*arguments).compile()


def split_over_tensor(x, *spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(jax.sharding.get_abstract_mesh(), P(*spec)))


def own_rows_left(state):
    return (state[1] < 10) & jnp.any(state[0] > 0)


@pytest.mark.parametrize(
    ("condition", "exchange", "kind"),
    [
        # Whole within a pair of devices, which leaves its loop together.
        (own_rows_left, lambda x: split_over_tensor(x, None, None), ""),
        (own_rows_left, lambda x: jax.lax.psum(x, "rows"), "all-reduce"),
        (own_rows_left, lambda x: jnp.roll(split_over_tensor(x, None, "tensor"), 1, axis=1), "collective-permute"),
        (lambda at: jax.lax.pmax(own_rows_left(at).astype(int), "rows") > 0, lambda x: jax.lax.psum(x, "rows"), ""),
        (lambda state: state[1] < 3, lambda x: jax.lax.psum(x, "rows"), ""),
    ],
    ids=["within a pair", "over rows", "permute", "common end", "fixed"],
)
def test_a_collective_in_a_loop_that_its_devices_leave_apart_is_refused(condition, exchange, kind):
    compiled = loop_compiled(condition, exchange)
    program, shardings = parse_hlo(compiled.as_text()), jax.tree.leaves(compiled.input_shardings)
    assert program.devices == 4 and hlo_cost.read_cost(program).collectives
    assert [line.split()[0] for line in hlo_loops.hanging(program, shardings)] == ([kind] if kind else [])
    if kind:
        with pytest.raises(ValueError, match=rf"{kind} %\S+ in %\S+ .*make its condition equal"):
            hlo_loops.check_loops(program, shardings)
    elif condition is own_rows_left:
        (line,) = hlo_loops.hanging(program, [])
        assert line.startswith("all-gather"), "arguments that are not known may differ"


def hlo(text, **computations):
    """A program by the instructions of its entry and of what this calls; `%p` is a parameter everywhere."""
    parts = {**computations, "ENTRY %m": text}
    return parse_hlo("\n".join(f"{name} (p: f32[]) -> f32[] {{\n{inside}\n}}\n" for name, inside in parts.items()))


def test_kernels_and_convolutions():
    """The compiler describes a kernel over several lines, one of which looks like the end of a computation. A batched
    product that it writes as a convolution counts what it computes."""
    program = hlo("""
  %a = bf16[8,16,32]{2,1,0:T(8,128)(2,1)S(1)} parameter(0)
  %b = bf16[8,32,64]{2,1,0} parameter(1)
  %k = f32[8,8]{1,0} custom-call(%a), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 512}"
}}, metadata={op_name="jit(f)/kernel"}
  ROOT %c = bf16[8,16,64]{2,1,0} convolution(%a, %b), window={size=8 stride=7 lhs_dilate=8}, dim_labels=0bf_0io->0bf""")
    cost = hlo_cost.read_cost(program)
    assert cost.kernels == {"tpu_custom_call": 1.0} and cost.flops == 2 * 8 * 16 * 32 * 64


def test_what_a_collective_moves():
    """A started gather counts once, and so does one that a TPU runs during several fusions: its compiler repeats the
    instruction in each of the chain; other gathers over the same channel count. A sum that is cut in its fusion is a
    reduce-scatter."""
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
    for text, size in (
        ("replica_groups=[4,16]<=[16,4]T(1,0), dimensions={0}", 16),
        ("replica_groups=mesh['a'=8,'b'=1,'c'=2], device_ids=([2,8]T(1,0)) {'c'}, x={0}", 2),
        ("source_target_pairs={{0,1},{1,0}}", 2),
    ):
        program = hlo(f"  %p = f32[4] parameter(0)\n  ROOT %r = f32[4] all-reduce(%p), {text}")
        assert group_size(program.computations["m"]["r"]) == size, text
    for program, kind, size, moved in ((started, "all-gather", 256, 224), (scattered, "reduce-scatter", 2048, 1536)):
        (collective,) = hlo_cost.read_cost(program).collectives
        assert (collective.kind, collective.bytes, collective.moved) == (kind, size, moved)
    given, chain = "  %p = bf16[2,8]{1,0} parameter(0)\n", 'frontend_attributes={chain_id="5"}'
    gather = "  ROOT %r = bf16[16,8]{{1,0}} all-gather(%p), channel_id={}, replica_groups=[1,8]<=[8], {}"
    gathers = [(10, chain), (10, chain), (11, chain), *[(10, "use_global_device_ids=true")] * 2]
    calls = [f"  %c{i} = bf16[16,8]{{1,0}} fusion(%p), kind=kCustom, calls=%f{i}\n" for i in range(len(gathers))]
    program = hlo(given + "".join(calls), **{f"%f{i}": given + gather.format(*of) for i, of in enumerate(gathers)})
    assert [collective.bytes for collective in hlo_cost.read_cost(program).collectives] == [256.0] * 4


def test_known_shapes_are_the_published_ones():
    """Names with and without points and hyphens, and without what says how a model was tuned."""
    plain = {re.sub(r"\W|_", "", name): name for name in CONFIGS}
    named = {name: re.sub(r"\W|_|base$|instruct$|it$", "", name.partition("/")[2].lower()) for name in KNOWN_SHAPES}
    for name, short in named.items():
        assert short not in plain or same_model(KNOWN_SHAPES[name], read_config(CONFIGS[plain[short]][0])), name
    assert plain.keys() <= set(named.values())
    billions = {"google/gemma-2-2b-it": 2.614, "openai/gpt-oss-20b": 20.915, "zai-org/GLM-4.5-Air": 106.852}
    sizes = {name: policy.parameter_count(KNOWN_SHAPES[name]) / 1e9 for name in billions}
    assert sizes == pytest.approx(billions, abs=0.005)


WORK = Work(
    problems=8, sampled=64, kept=32, prompt=10, response=90, samplers=2, slots=16, chunk=4, append_rows=8,
    micro_rows=4, row_length=100, fill=0.8, updates=1,
)  # fmt: skip


def test_a_time_is_the_longest_of_its_three_bounds_and_a_step_adds_its_programs_up():
    v5e = CHIPS["v5e"]
    chip = replace(v5e, flops=100.0, memory_rate=10.0, link_rate=1.0)
    moved = {"all-gather": {"runs": 1.0, "bytes": 8.0, "moved": 7.0}}
    assert Needs("a", flops=500.0, traffic=20.0).seconds(chip) == 5.0
    assert Needs("a", flops=500.0, traffic=60.0).seconds(chip) == 6.0
    assert Needs("a", flops=500.0, traffic=60.0, collectives=moved).seconds(chip) == 7.0
    needs = Needs("a", arguments=10e9, results=8e9, aliased=8e9, temporaries=2e9, resident=2e9)
    assert needs.total == 14e9 and needs.fits(v5e), "memory is what lies there at once"
    assert not replace(needs, resident=2.5e9).fits(v5e), "a tenth of 16 GB stays free"
    assert WORK.decode_steps == 64 / 2 * 90 / 16 and replace(WORK, slots=64).decode_steps == 90
    assert WORK.micro_batches == math.ceil(32 * 100 / (4 * 100 * 0.8))
    chip, names = replace(v5e, flops=1.0), ("weight_sync", "append/160/8/32/True", "decode/160")
    programs = [Needs(name, flops=flops) for flops, name in enumerate(names, 1)]
    assert step_times(programs, WORK, chip) is None
    times = step_times([Needs("append/160/8/32/False", flops=99.0), *programs, Needs("update", flops=4.0)], WORK, chip)
    assert (times.weight_sync, times.prompts, times.decode, times.update) == (1.0, 2.0, 3.0 * 180 / 4, 4.0)
    assert times.total == 142.0 and times.copies == 0


@pytest.mark.parametrize("recipe", ["clip_cov", "grpo"])
def test_a_planned_batch_has_the_leaves_that_the_method_packs(recipe):
    config = load_config(g.Config, [str(load_methods()[recipe].path)], prog="test")
    groups = groups_of(config)
    logprobs = [t.logprobs for group in groups for t in group.trajectories]
    scores = g.Scores(logprobs, [np.abs(row) for row in logprobs], logprobs)
    made = g.train_rows(groups, config, g.initial_state(config), rng=np.random.default_rng(0), scores=scores)
    several = config.sampling.temperature if config.plan.temperature.all else None
    packed, _ = pack(made, replace(config.batch, row_length=128), len(made), 1, several)
    planned = planning.batch_like(config, make_mesh(ShardingConfig(data=1), jax.devices()[:1]))
    for leaf in fields(planned):
        real, shape = getattr(packed, leaf.name), getattr(planned, leaf.name)
        assert (real is None) == (shape is None), leaf.name
        assert real is None or real.dtype == shape.dtype


def test_a_reference_a_teacher_and_what_runs_on_are_counted():
    """Rollouts that run on keep the cache and the weights during the update."""
    teacher, words = "Qwen/Qwen3-0.6B", ["--surrogate.kl=k3", "--surrogate.kl.coef=0.1"]
    words.append(f"--advantage.adjust=[{{kind: teacher, path: {teacher}}}]")
    runs = [deployment("toy.yaml", *more, topology="h200:1") for more in ([], words, ["--rollout.step_limit=stream"])]
    bare, more, on = ([needs.resident for needs in estimate(run)] for run in runs)
    norms, parts = 28 * 2 * (1024 + 128) + 1024, runs[0].memory_parts()  # float32
    size = 4 * policy.parameter_count(runs[0].model) + 2 * (policy.parameter_count(KNOWN_SHAPES[teacher]) + norms)
    assert [new - old for new, old in zip(more, bare, strict=True)] == [size] * 4
    running = [new - old for new, old in zip(on, bare, strict=True)]
    assert running == [parts["cache"], 0.0, 0.0, parts["cache"] + parts["sampler"]]


@pytest.mark.parametrize("processes", [3, 4, 8])
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


@pytest.mark.usefixtures("platform_kept")
def test_simulated_steps_are_added(capsys):
    words = [*TINY, "--topology", "v5e:1", "--arithmetic", "--simulate", "--group.problems", "2", "--json"]
    plan_command.main(words)
    report = json.loads(capsys.readouterr().out)
    schedules = [name for name, (_, schedule) in SCHEDULES.items() if not schedule.stealing]
    assert list(report["simulated"]) == schedules, "one process has none to steal from"
    for of in report["simulated"].values():
        assert of["sampled"] and 0 < of["busy"] <= 1 and of["live"] <= of["slots"]
        assert sum(of["seconds"]) / STEPS >= report["step_s"]["total"]


@pytest.mark.usefixtures("platform_kept")
def test_arithmetic_says_what_fits_and_what_to_change(capsys, tmp_path):
    out, words = tmp_path / "plan.json", ["rstar2_qwen3_14b", "--topology", "h200:64", "--arithmetic"]
    assert plan_command.main([*words, "--stage", "8k", "--out", str(out)]) == plan_command.FITS
    report = json.loads(out.read_text())
    assert report["fits"] and report["parameters"] == pytest.approx(14.768e9, rel=1e-3)
    assert {needs["name"] for needs in report["programs"]} == {"weight_sync", "append", "decode", "update"}
    assert plan_command.main([*words, "--stage", "8k", "--rollout.slots", "4096"]) == plan_command.DOES_NOT_FIT
    assert "rollout.slots" in capsys.readouterr().out
    assert plan_command.main([*words, "--json"]) == plan_command.FITS
    stages = json.loads(capsys.readouterr().out)["stages"]
    assert [stage["plan"] for stage in stages] == ["rstar2, 8k", "rstar2, 12k", "rstar2, hard"]
    words = [*TINY, "--topology", "v5e:1x1", "--arithmetic", "--rollout.slots", str(1 << 22)]
    assert plan_command.main([*words, "--programs", "update"]) == plan_command.FITS
    assert "fits (update alone)" in capsys.readouterr().out


@pytest.mark.usefixtures("platform_kept")
def test_what_cannot_be_planned_is_refused_with_status_2(capsys):
    for words, message in (
        ("h200:8 --sharding.fsdp 3", "does not make 8 devices"),
        ("v5e:8 --arithmetic --rollout.attention paged", "a multiple of 128"),
        ("h200:8 --model.path no/model", "--model_shape"),
        ("v5e:2x2 --programs update,decod", "there is no 'decod'; must be of weight"),
    ):
        assert plan_command.main(["toy.yaml", "--topology", *words.split()]) == plan_command.BAD_CONFIG
        assert message in capsys.readouterr().err


MACHINE = Machine(1, slots=2, chunk=4, blocks=64, block=4, longest=64, append_lengths=(8,), append_rows=8)
COSTS = Costs(step=1.0, row=0.0, column=0.0, append=10.0, token=0.0, update=5.0)
DECODING = replace(COSTS, append=0.0)


def plain(*sampled):
    """A problem with rows of one turn each."""
    return tuple(RowLife(8, (RowTurn(n),)) for n in sampled)


def seconds(groups, costs=COSTS, schedule=None, steps=1, skipped=0, kept=1.0, **machine):
    given = lambda _: groups, replace(MACHINE, **machine), costs, schedule or StepSchedule(), steps
    return simulate(*given, skipped=skipped, kept=kept).seconds


WAITING = RowLife(8, (RowTurn(4, 8, 3.0), RowTurn(4)))
PACKED = {"slots": 6, "blocks": 256, "costs": replace(COSTS, token=0.5)}
ENGINES = {"engines": 2, "slots": 1, "costs": DECODING}
FOUR = [plain(8), plain(8), plain(4), plain(4)]
TAIL, EVEN = [plain(4), plain(20)], [plain(4), plain(4)]
LAG, APART = StepSchedule(lag=1), StepSchedule(lag=1, apart=True)
SLOW, QUICK = replace(DECODING, update=20.0), replace(DECODING, update=1.0)
IN_BLOCKS = [(RowLife(6, (RowTurn(6),)), RowLife(6, (RowTurn(10),)))]
COPYING, READING = replace(DECODING, copy=7.0), replace(DECODING, step=0.0, column=1.0)
EACH = Costs(1.0, 0.1, 0.01, 10.0, 0.5, round=3.0, publish=2.0, update=5.0, trained_token=0.25)
CHUNK = 3 + 4 * (1 + 0.1 + 0.01 * (8 + 2))
"""Of 4 steps of the program of 1 row that reads 8 + 2 columns on average."""
BY_HAND = [
    # A prompt is written once and its rows decode together; a third row waits for a slot.
    ([plain(6, 3)], {}, (10 + 4 + 2 + 5,)),
    ([plain(6, 5, 3)], {}, (10 + 4 + 2 + 3 + 5,)),
    # Packed appends: a call of up to 32 tokens has two tiles, so two rows, and six prompts of 8 are three calls.
    ([plain(4)] * 6, PACKED | {"append_lengths": (16, 32), "append_rows": 0}, (2 * 26 + (10 + 8) + 4 + 5,)),
    # Each cost: an append of 8 tokens, a chunk, 12 tokens of which half train; every slot is computed.
    ([plain(4)], {"costs": EACH, "kept": 0.5, "widths": (1, 2)}, (10 + 4 + CHUNK + 2 + 5 + 0.25 * 0.5 * 12,)),
    # A row waits for its tool and others go on: four of the other row meanwhile.
    ([(WAITING,), plain(8)], {}, (10 + 8 + 10 + 4 + 5,)),
    # Engines share problems, or take the next.
    (FOUR, ENGINES, (16 + 5,)),
    (FOUR, ENGINES | {"schedule": StepSchedule(stealing=True)}, (12 + 5,)),
    # Two slots. Step 1 trains on the short rows of the first two rounds, at 8; both long ones began with the same
    # weights, and are due. The second of them begins at 13, after the update, and ends at 33. Step 3 must have the long
    # row that began with step 2: it gets a slot at 29, four tokens of it are there at 33, and it ends at 38 + 16.
    (TAIL, {"costs": DECODING, "steps": 3}, (25, 25, 25)),
    (TAIL, {"costs": DECODING, "schedule": LAG, "steps": 3}, (8 + 5, 33 + 5 - 13, 54 + 5 - 38)),
    # With devices of its own for updates a step takes as long as the slower of the two; without a lag their sum.
    (EVEN, {"costs": SLOW, "schedule": LAG, "steps": 2, "skipped": 2}, (24, 24)),
    (EVEN, {"costs": SLOW, "schedule": APART, "steps": 4}, (4 + 20, 20, 20, 20)),
    (EVEN, {"costs": QUICK, "schedule": APART, "steps": 1, "skipped": 3}, (4,)),
    # Prompts of 6 in blocks of 4: a further row of the group copies two blocks, or one where whole ones are shared.
    (IN_BLOCKS, {"costs": COPYING, "copies": 1, "shares": False}, (7 * 2 + 10 + 5,)),
    # Arenas are read whole. The first row has blocks 0 to 2, its sibling 3 to 6, in the second arena: chunks of 4, 4
    # and 2 steps, both rows twice, then the second one.
    (IN_BLOCKS, {"costs": READING, "arenas": (3, 61)}, (4 * (64 + 64) * 4 + 8 * 61 + 5,)),
]


@pytest.mark.parametrize(("groups", "given", "expected"), BY_HAND)
def test_steps_by_hand(groups, given, expected):
    assert seconds(groups, **given) == pytest.approx(expected)


QWEN3, LORA_7B = "configs/qwen3_0_6b_gsm8k.yaml", "configs/qwen2_5_7b_lora.yaml"
TIGHT = [((LORA_7B, "--batch.rows", "6"), "l4:1"), ((QWEN3, "--rollout.slots", "4096"), "v5e:1x1"), ((QWEN3,), "t4:1")]


@pytest.mark.parametrize(("words", "topology"), TIGHT)
def test_what_is_advised_fits(words, topology):
    """The last line is a command line: with these words the plan fits. None of these needs another policy."""
    run = deployment(*words, topology=topology)
    *before, last = suggest.advice(run, estimate(run))
    assert not {"--lora.kind", "--rollout.low_precision.cache"} & set(last.split())
    assert before and last.startswith("together, by arithmetic, it fits: ")
    advised = last.removeprefix("together, by arithmetic, it fits: ").split()
    environ = dict(word.split("=") for word in advised if word.startswith("XLA"))
    advised = [word for word in advised if not word.startswith("XLA")]
    again = deployment(*words, *advised, topology=topology, environ=environ)
    assert all(needs.fits(again.topology.chip) for needs in estimate(again))


@pytest.mark.usefixtures("platform_kept")
def test_suggestions_are_yaml_over_the_recipe(tmp_path, capsys):
    words = ["configs/rstar2_qwen3_14b.yaml", "--stage", "8k", "--topology", "h200:8", "--arithmetic", "--suggest"]
    words += ["--sharding.sequence", "2"]
    assert plan_command.main(words) == plan_command.FITS  # whatever the mesh of the recipe
    _, first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("1. step of at least") and "bound by" in first
    yaml = [line[2:] for line in rest[: next(i for i, line in enumerate(rest) if line.startswith("2."))]]
    (tmp_path / "over.yaml").write_text("\n".join(yaml) + "\n")
    config = load_config(g.Config, [QWEN3, str(tmp_path / "over.yaml"), "--sharding.sequence", "2"], prog="test")
    assert config.sharding.shape(8) and config.rollout.slots


def test_a_run_says_what_does_not_fit_the_device():
    config = load_config(g.Config, ["toy.yaml", "--rollout.slots", "64"], prog="test")
    _, _, model, mesh, _ = components.check_components(config, components.make_registry(config))
    assert suggest.room_lines(config, model, mesh, 0.0) == [] == suggest.room_lines(config, model, mesh, 1e12)
    topology = parse_topology(f"v5e:{mesh.size}")
    run = planning.Deployment(config, model, mesh, topology, planning.work_of(config, mesh, topology, 0.0))
    by_name = {needs.name: needs for needs in estimate(run)}
    first, second, *_, last = suggest.room_lines(config, model, mesh, 0.9 * by_name["decode"].total)
    assert first.startswith("this device has too little memory") and second.split(":")[0] in by_name
    assert "fits" in last or "still too much" in last


def test_pods_have_machines_slices_and_links():
    for name, rate, chips, processes, bounds in (
        ("v5p:2x2x1", 200e9, 4, 1, (2, 2, 1)),  # a neighbor along two sides: 2 of 6 links of 100 GB/s
        ("v5p:4x4x4:2", 600e9, 128, 32, (2, 2, 1)),  # three rings
        ("v5e:1x1", 200e9, 1, 1, (1, 1, 1)),  # nothing to send to
        ("v5e:2x4/8", 125e9, 8, 1, (2, 4, 1)),  # 1 + (1 + 2 + 2 + 1) / 4 of them
        ("v6e:8x8", 350e9, 64, 16, (2, 2, 1)),  # lines of eight: 2 (2 * 7 / 8) of 4 links of 100 GB/s
        ("B200:16", 900e9, 16, 2, None),
    ):
        pod = parse_topology(name)
        assert (pod.name, pod.chips, pod.processes) == (name.lower(), chips, processes)
        assert pod.chip.link_rate == pytest.approx(rate) and (bounds is None or pod.host_bounds() == bounds)


def test_pods_that_cannot_be_are_refused_memory_of_gpus_and_links_of_scattered_chips():
    for name in ("v5e:2x4/3", "h200:8:2", "v9:2x2", "v5e:0x2", "h200:eight", "v5e:2x2x2"):
        with pytest.raises(TopologyError, match=r"must be|slices are those of TPUs|at most 2 sides|a number of GPUs"):
            parse_topology(name)
    chip = parse_topology("h200:8", {}).chip
    assert chip.usable_bytes == 0.75 * 141e9 and parse_topology("v5e:2x2", {}).chip.usable_bytes == 16e9
    needs = Needs("update", arguments=110e9)
    assert not needs.fits(chip)
    assert needs.fits(parse_topology("h200:8", {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"}).chip)
    with pytest.raises(TopologyError, match=r"XLA_CLIENT_MEM_FRACTION=90%; must be a number above 0"):
        parse_topology("h100:8", {"XLA_CLIENT_MEM_FRACTION": "90%"})
    torus = links.Torus(tuple((x, 0, 0) for x in range(4)), (0, 0, 0, 0), ring_side=4)
    assert torus.share([0, 1, 2, 3]) == 1.0
    assert torus.share([0, 2]) == pytest.approx(0.5), "each step takes two links of the ring"


def test_gpus_are_described_to_their_compiler(monkeypatch):
    name, request, devices = "jax.experimental.topologies.get_topology_desc", {}, [object()] * 16
    monkeypatch.setattr(name, lambda **given: request.update(given) or SimpleNamespace(devices=devices))
    assert topology_devices(parse_topology("h200:16")) == devices
    assert (request["platform"], request["topology"]) == ("cuda", "1x2x8"), "two machines of eight"
    fields = dict(re.findall(r"(\w+): (\d+)", request["target_config"]))
    assert (fields["major"], fields["core_count"], fields["memory_bandwidth"]) == ("9", "132", str(4800 * 10**9))


def test_a_collective_uses_the_links_along_the_sides_of_its_devices():
    for name, axes, expected in (
        # A host of 2 x 2 chips has one link of a chip along each of two sides, of six in the slice; the hosts lie 1.25
        # links apart, and use all three sides.
        ("v5p:4x4x4", {"fsdp": 16, "tensor": 4}, {"": 1 / 1.25, "tensor": 2 / 6}),
        ("v5e:2x2", {"fsdp": 2, "tensor": 2}, {"": 0.5, "tensor": 0.5}),
    ):
        words = [f"--sharding.{axis}={axes.get(axis, 1)}" for axis in AXES]
        mesh = abstract_mesh(load_config(g.Config, ["toy.yaml", *words], prog="test"), parse_topology(name))
        shares = links.axis_shares(mesh, parse_topology(name))
        assert {axis: shares[axis] for axis in expected} == pytest.approx(expected)


def test_slices_are_blocks_along_data_between_which_only_sums_of_gradients_cross():
    words = ["configs/qwen3_0_6b_gsm8k.yaml", "--sharding.fsdp", "4"]
    one_slice, two_slices = deployment(*words, topology="v5e:2x4"), deployment(*words, topology="v5e:2x2:2")
    assert dict(one_slice.mesh.shape) == dict(two_slices.mesh.shape) and isinstance(two_slices.mesh, AbstractMesh)
    single, double = (estimate(run)[-1] for run in (one_slice, two_slices))
    assert single.between == 0.0 and double.moved == single.moved
    gradients = double.collectives["all-reduce over data"]
    # Two slices with one part of `data` each: all of it crosses, in both directions of the ring.
    assert double.between == gradients["moved"] == gradients["bytes"]
    assert double.times(two_slices.topology.chip)["network"] == pytest.approx(double.between / 3.125e9)
    names = "id process_index slice_index platform device_kind coords"
    chip = make_dataclass("Chip", names.split(), frozen=True)
    chips = [chip(i, i // 4, i // 4, "tpu", "elsewhere", (i % 2, i // 2 % 2, 0)) for i in range(8)]
    split = deployment("toy.yaml", "--sharding.fsdp=4", topology="v5e:2x2:2")
    ordered = make_mesh(split.config.sharding, chips).devices
    assert [{d.slice_index for d in block.flat} for block in ordered] == [{0}, {1}]


def test_the_page_states_the_figures_of_the_devices():
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", Path("docs/plan.md").read_text(encoding="utf-8"), re.M)
    stated = {name: [cell.strip() for cell in cells.split("|")] for name, cells in rows if name in CHIPS}
    assert set(stated) == set(CHIPS)
    for name, chip in CHIPS.items():
        memory = chip.memory_bytes / GIB
        size = f"{memory:.0f} GiB" if memory == round(memory) else f"{chip.memory_bytes / 1e9:g} GB"
        network = f"{chip.network_rate / 1e9:g}" if chip.tpu else "-"
        figures = [size, f"{chip.flops / 1e12:g}", f"{chip.memory_rate / 1e9:g}", f"{chip.link_rate / 1e9:g}", network]
        assert stated[name][:-1] == [*figures, chip.source], name
