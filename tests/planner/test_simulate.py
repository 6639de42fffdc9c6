"""The simulator against steps worked out by hand, and what it must keep: rows, tokens, blocks."""

from dataclasses import replace

import numpy as np
import pytest

from grpo_roc_jax.engine.device_rows import PackTaker, Write
from grpo_roc_jax.engine.programs import first_calls
from grpo_roc_jax.planner.roofline import Needs, Work
from grpo_roc_jax.planner.schedules import compiled_costs, drawn_groups, life_of
from grpo_roc_jax.planner.simulate import Costs, DecodeTimes, Machine, RowLife, RowTurn, StepSchedule, packs, simulate
from grpo_roc_jax.planner.topology import parse_topology
from grpo_roc_jax.types import ToolCall, ToolResult, Trajectory, Turn

MACHINE = Machine(1, slots=2, chunk=4, blocks=64, block=4, longest=64, append_lengths=(8,), append_rows=8)
COSTS = Costs(step=1.0, row=0.0, column=0.0, append=10.0, token=0.0, update=5.0)
DECODING = replace(COSTS, append=0.0)


def plain(*sampled):
    """A problem with rows of one turn each."""
    return tuple(RowLife(8, (RowTurn(n),)) for n in sampled)


def seconds(groups, costs=COSTS, schedule=None, steps=1, skipped=0, kept=1.0, **machine):
    more = {"skipped": skipped, "kept": kept}
    return simulate(
        lambda _: groups, replace(MACHINE, **machine), costs, schedule or StepSchedule(), steps, **more
    ).seconds


WAITING = RowLife(8, (RowTurn(4, 8, 3.0), RowTurn(4)))
PACKED = {"slots": 6, "blocks": 256, "costs": replace(COSTS, token=0.5)}
ENGINES = {"engines": 2, "slots": 1, "costs": DECODING}
FOUR = [plain(8), plain(8), plain(4), plain(4)]
TAIL, EVEN = [plain(4), plain(20)], [plain(4), plain(4)]
LAG, APART = StepSchedule(lag=1), StepSchedule(lag=1, apart=True)
SLOW, QUICK = replace(DECODING, update=20.0), replace(DECODING, update=1.0)
IN_BLOCKS = [(RowLife(6, (RowTurn(6),)), RowLife(6, (RowTurn(10),)))]
COPYING = replace(DECODING, copy=7.0)
EACH = Costs(1.0, 0.1, 0.01, 10.0, 0.5, round=3.0, publish=2.0, update=5.0, trained_token=0.25)
CHUNK = 3 + 4 * (1 + 0.1 + 0.01 * (8 + 2))
"""Of 4 steps of the program of 1 row that reads 8 + 2 columns on average."""
BY_HAND = [
    # A prompt is written once and its rows decode together; eight rows to an append; a third row waits for a slot.
    ([plain(6)], {}, (10 + 4 + 2 + 5,)),
    ([plain(6, 3)], {}, (10 + 4 + 2 + 5,)),
    ([plain(6), plain(3)], {}, (10 + 4 + 2 + 5,)),
    ([plain(6, 5, 3)], {}, (10 + 4 + 2 + 3 + 5,)),
    # Packed appends: a call of up to 32 tokens has two tiles, so two rows, and six prompts of 8 are three calls.
    ([plain(4)] * 6, PACKED | {"append_lengths": (16, 32), "append_rows": 0}, (2 * 26 + (10 + 8) + 4 + 5,)),
    ([plain(4)] * 6, PACKED | {"append_rows": 1}, (6 * (10 + 0.5 * 8) + 4 + 5,)),
    # Each cost: an append of 8 tokens, a chunk, 12 tokens of which half train; every slot is computed.
    ([plain(4)], {"costs": EACH, "kept": 0.5, "widths": (1, 2)}, (10 + 4 + CHUNK + 2 + 5 + 0.25 * 0.5 * 12,)),
    ([plain(4)], {"costs": replace(DECODING, compute_row=2.0)}, (4 * 2 * 2 + 5,)),
    # A row waits for its tool and others go on: four of the other row meanwhile.
    ([(WAITING,)], {}, (10 + 4 + 3 + 10 + 4 + 5,)),
    ([(WAITING,), plain(8)], {}, (10 + 8 + 10 + 4 + 5,)),
    # Engines share problems, or take the next.
    (FOUR, ENGINES, (16 + 5,)),
    (FOUR, ENGINES | {"schedule": StepSchedule(stealing=True)}, (12 + 5,)),
    # Two slots. Step 1 trains on the short rows of the first two rounds, at 8; both long ones began with the same
    # weights, and are due. The second of them begins at 13, after the update, and ends at 33. Step 3 must have the long
    # row that began with step 2: it gets a slot at 29, four tokens of it are there at 33, and it ends at 38 + 16.
    (TAIL, {"costs": DECODING, "steps": 3}, (25, 25, 25)),
    (TAIL, {"costs": DECODING, "schedule": LAG, "steps": 3}, (8 + 5, 33 + 5 - 13, 54 + 5 - 38)),
    (TAIL, {"costs": DECODING, "schedule": LAG, "steps": 2, "skipped": 1}, (25, 21)),
    # With devices of its own for updates a step takes as long as the slower of the two; without a lag their sum.
    (EVEN, {"costs": SLOW, "schedule": LAG, "steps": 2, "skipped": 2}, (24, 24)),
    (EVEN, {"costs": SLOW, "schedule": APART, "steps": 4}, (4 + 20, 20, 20, 20)),
    (EVEN, {"costs": QUICK, "schedule": APART, "steps": 1}, (4 + 1,)),
    (EVEN, {"costs": QUICK, "schedule": APART, "steps": 1, "skipped": 3}, (4,)),
    (EVEN, {"costs": SLOW, "schedule": StepSchedule(apart=True), "steps": 3}, (24, 24, 24)),
    # Prompts of 6 in blocks of 4: a further row of the group copies two blocks, or one where whole ones are shared.
    (IN_BLOCKS, {"costs": COPYING, "copies": 8, "shares": False}, (7 + 10 + 5,)),
    (IN_BLOCKS, {"costs": COPYING, "copies": 1, "shares": False}, (7 * 2 + 10 + 5,)),
    (IN_BLOCKS, {"costs": COPYING, "copies": 1, "shares": True}, (7 + 10 + 5,)),
    # Arenas are read whole. The first row has blocks 0 to 2, its sibling 3 to 6, in the second arena: chunks of 4, 4
    # and 2 steps, both rows twice, then the second one.
    (
        IN_BLOCKS,
        {"costs": replace(DECODING, step=0.0, column=1.0), "arenas": (3, 61)},
        (4 * (64 + 64) * 4 + 8 * 61 + 5,),
    ),
]


@pytest.mark.parametrize(("groups", "given", "expected"), BY_HAND)
def test_steps_by_hand(groups, given, expected):
    assert seconds(groups, **given) == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(8))
def test_packs_are_the_calls_that_the_engine_makes(seed):
    """Against the class that fills a pack of the engine."""
    rng, lengths = np.random.default_rng(seed), (16, 32, 64, 128)
    written = rng.integers(1, [20, 60, 200, 400][seed % 4], size=1 + 5 * seed).tolist()
    made, queue = [], [Write(0, np.zeros(count, np.int32), 0) for count in written]
    while queue:
        made.append(first_calls(lengths)[min(sum(len(write.ids) for write in queue), 256)])
        take, left = PackTaker(made[-1]), []
        for write in queue:
            accepted, _ = take(write) or (0, 0)
            left += [write._replace(ids=write.ids[accepted:])] if accepted < len(write.ids) else []
        queue = left
    assert packs(written, lengths) == made and sum(made) >= sum(written)


def test_measured_times_take_the_place_of_linear_ones_and_an_engine_that_waits_takes_rows_of_the_next_step():
    """The smallest program that holds the rows, interpolated over what it reads. Its wait ends with the update, and not
    with the answer of the tool."""
    times = DecodeTimes(1, (10.0, 20.0), (1.0, 3.0)), DecodeTimes(4, (0.0, 100.0), (5.0, 5.0))
    costs = replace(DECODING, measured=times)
    results = [costs.decode(*read) for read in ((1, 4.0), (1, 15.0), (1, 99.0), (2, 50.0), (9, 50.0))]
    assert results == [1.0, 2.0, 3.0, 5.0, 5.0]
    assert seconds([plain(4)], costs, widths=(1, 2)) == (4 * 1.0 + 5,)
    waits = RowLife(8, (RowTurn(4, 8, 100.0), RowTurn(4)))
    steps = [[(waits,), plain(4)], [plain(4), plain(4)], [plain(4), plain(4)]]
    simulation = simulate(lambda step: steps[min(step, 2)], MACHINE, DECODING, StepSchedule(lag=2, apart=True), 1)
    assert simulation.seconds == (8 + 5,), "the first two groups that are whole"


def test_rows_are_parked_and_nothing_is_lost():
    rng = np.random.default_rng(0)
    steps = [[plain(*rng.integers(1, 56, 4).tolist()) for _ in range(6)] for _ in range(4)]
    sampled = sum(row.sampled for groups in steps for group in groups for row in group)
    parked, whole_rows = (
        simulate(lambda step: steps[step], replace(MACHINE, slots=8, blocks=40), DECODING, schedule, 4)
        for schedule in (StepSchedule(), StepSchedule(whole_rows=True))
    )
    assert parked.sampled == whole_rows.sampled == sampled
    assert parked.evictions > 0 and parked.recomputed > 0 and whole_rows.evictions == whole_rows.recomputed == 0
    assert whole_rows.live <= 40 // 16 < parked.live <= 8
    assert sum(parked.seconds) < sum(whole_rows.seconds)
    with pytest.raises(ValueError, match="16 blocks of 4 columns cannot hold a row of 64 and a chunk of 4"):
        seconds([plain(4)], blocks=16)


def test_costs_of_compiled_programs():
    chip = replace(parse_topology("v5e:2x2").chip, flops=100.0, memory_rate=10.0, link_rate=1.0)
    work = Work(2, 8, 4, 16, 32, 1, slots=8, chunk=2, append_rows=4, micro_rows=4, row_length=64, fill=0.5, updates=1)
    work = replace(work, shards=2, append_length=16, columns=64)
    programs = [
        Needs("weight_sync", traffic=30.0),
        Needs("append", flops=6400.0, fixed_traffic=50.0),
        Needs("decode", flops=1600.0, traffic=5320.0, fixed_traffic=200.0, collectives={"all-reduce": {"moved": 4.0}}),
        Needs("update", flops=12800.0),
    ]
    compiled = compiled_costs(programs, work, chip)
    assert compiled == Costs(
        step=(200 / 10 + 4) / 2,
        row=0.0,
        column=(5320 - 200) / 10 / 2 / (4 * 64) / 2,  # each of two shards reads half of the columns
        append=50 / 10,
        token=6400 / 100 / (4 * 16),
        compute_row=1600 / 100 / 2 / 8,
        publish=3.0,
        trained_token=128 / (2 * 4 * 64 * 0.5),  # 4 rows of 48 tokens take two micro-batches
    )
    assert compiled_costs(programs[:3], work, chip) is None


def test_rows_are_drawn_with_mean_and_limits_or_come_from_a_trajectory():
    work = Work(64, 64 * 16, 64 * 8, 100, 400, 1, 8, 8, 8, 4, 2048, 0.9, 1)
    rows = [row for group in drawn_groups(work, 2000, 5, 0)(3) for row in group]
    assert len(rows) == 64 * 16 and {row.prompt for row in rows} == {100}
    lengths = np.array([row.length - row.prompt for row in rows])
    assert abs(lengths.mean() / 400 - 1) < 0.15 and lengths.max() <= 2000
    assert all(1 <= len(row.turns) <= 5 and row.turns[-1].tool_s == 0 for row in rows)
    assert all(0.05 <= turn.tool_s <= 5 and turn.observed for row in rows for turn in row.turns[:-1])
    tokens = np.arange(20, dtype=np.int32)
    call = ToolCall("python", {"code": "1"}, "")
    results = (ToolResult("ok", wall_ms=1500.0, queue_ms=500.0), ToolResult("ok", wall_ms=700.0))
    turns = (Turn(5, 9, "a", (call, call), results), Turn(12, 20, "b"))
    mask = np.isin(np.arange(20), [*range(5, 9), *range(12, 20)])
    trajectory = Trajectory(tokens, mask, np.zeros(20, np.float32), np.zeros(20, np.int32), 5, turns, "eos", 0)
    life = life_of(trajectory)
    assert life == RowLife(5, (RowTurn(4, 3, 2.0), RowTurn(8)))
    assert (life.length, life.sampled) == (20, 12)
