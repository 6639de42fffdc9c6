"""How rows queue for slots, what the engine keeps about a slot, and how tokens of several rows share appends."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_roc_jax.engine.decode import ChunkReport
from grpo_roc_jax.engine.device_rows import DeviceRows, Flight, PackTaker, Prompts, Write
from grpo_roc_jax.engine.programs import CALL_TOKENS, first_calls
from grpo_roc_jax.engine.protocol import Finish, RolloutStats
from grpo_roc_jax.engine.scheduler import REMEMBERED, Admission, Lengths, Scheduler, expand
from grpo_roc_jax.engine.table import SlotTable, starting_point
from grpo_roc_jax.model.pool import tile_count
from tests.helpers.engine_checks import assert_same
from tests.helpers.rollout_fakes import ROLLOUT, make_requests, one_rollout, run

STOP = 3


@pytest.fixture
def table():
    """Six slots; the first two hold rows of three prompt tokens and are live."""
    table = SlotTable(6, 16)
    for slot in (0, 1):
        table.admit(slot, slot, one_rollout(slot, np.array([5, 6, 7], np.int32), 4, temperature=1.0, step=2), 0, 0.0)
        table.go(slot, 0)
    return table


@pytest.fixture
def device(table):
    size = SimpleNamespace(blocks=8, columns=16)
    fields = dict.fromkeys(("shared_blocks", "row_axes")) | dict.fromkeys(("size", "largest_size"), size)
    fields |= dict.fromkeys(("new_pool", "new_slots", "place"), lambda *_: None)
    programs = SimpleNamespace(**fields, shards=1, packs=False, append_rows=(1,))
    return DeviceRows(programs, ROLLOUT, SimpleNamespace(version=7), table, RolloutStats())


class Steps(Scheduler):
    """A scheduler for a single step of a round, with the parts that the test gives it."""

    def __init__(self, table, **given):
        self.table, self.stats, self.submissions = table, RolloutStats(), []
        vars(self).update(given)


def in_flight(table, counts):
    """A chunk that drew `counts` tokens of the first two slots."""
    count = np.zeros(6, np.int32)
    count[:2] = counts
    tokens = np.full((4, 6), 9, np.int32)
    report = ChunkReport(tokens, tokens * 0.0, tokens[:0], count, np.array([4]))
    return Flight(report, table.generation.copy(), 6, 7)


def test_what_is_queued_for_a_row_that_is_given_up_is_not_written_for_the_next_one(device):
    appended, observation, other = [], Write(0, np.array([8, 8]), 3), Write(1, np.array([9]), 3)
    device.append_all = lambda writes, shared: appended.extend(writes)
    device.write(observation), device.write(other)
    device.take_back(0)
    assert not device.is_written(1) and device.is_written(0)
    again = Write(0, np.array([5, 6, 7]), 0)
    device.write(again)
    device.flush()
    assert appended == [other, again]


def test_no_row_of_an_append_is_padded_beyond_its_table(device, table):
    """A row near its end shares a call with rows that take long pieces; the calls have one length in all shards. Each
    token is written once, and in the order of its row."""
    programs, config = device.programs, replace(ROLLOUT, block=16, append_lengths=(4, 16, 64))
    programs.append_rows, programs.shards = (1, 2), 2
    device = DeviceRows(programs, config, device.sampler, table, RolloutStats())
    room, rng = config.table_width * 16, np.random.default_rng(0)
    for _ in range(50):
        calls, written = [], {}

        def append(pieces):
            assert all(count for batch in pieces for _, count, _ in batch), "it has been appended whole"
            calls.append(pieces)  # noqa: B023

        device.append = append
        starts = rng.integers(0, config.max_row_tokens, 6).tolist()
        room_left = [rng.integers(1, config.max_row_tokens - at + 1) for at in starts]
        writes = [Write(i, np.arange(n), at) for i, (n, at) in enumerate(zip(room_left, starts, strict=True))]
        device.append_all(writes, shared=False)
        for pieces in calls:
            longest = max(padded for batch in pieces for _, _, padded in batch)
            assert max(map(len, pieces)) <= 2
            for write, count, _ in (piece for batch in pieces for piece in batch):
                assert write.start + longest <= room
                written.setdefault(write.slot, []).extend(range(write.start, write.start + count))
        assert written == {w.slot: [*range(w.start, w.start + len(w.ids))] for w in writes}


@pytest.mark.parametrize("act", ["roll_back", "park", "free"])
def test_tokens_in_flight_need_room_and_do_not_count_for_a_row_that_changed(device, table, act):
    assert device.ahead == ROLLOUT.chunk
    device.flight = in_flight(table, (4, 3))
    assert device.ahead == 2 * ROLLOUT.chunk
    getattr(table, act)(0, *((1,) if act == "roll_back" else ()))
    table.live[0] = True  # the slot is seated again before the chunk is read
    _, count, version = device.read()
    assert (count[:2].tolist(), version, device.stats.dropped_tokens) == ([0, 3], 7, 4)


def test_room_is_made_for_a_whole_chunk_and_no_column_after_the_limit(table):
    """Five tokens are four columns written and one pending; a chunk of four needs eight, the limit caps it."""
    table.length[:2], table.limit[:2] = (5, 6), (20, 7)
    calls = []
    for room in ([8, 6], [7, 6], [8, 5]):
        device = SimpleNamespace(ahead=4, room=lambda room=room: np.array([*room, 0, 0, 0, 0]))
        Steps(table, device=device, ensure_room=lambda *slot_and_columns: calls.append(slot_and_columns)).make_room()
    assert calls == [(0, 8), (1, 6)]


def test_a_deadline_has_passed_only_after_its_time(table):
    ended, config = [], SimpleNamespace(turn_timeout_s=2.0, trajectory_timeout_s=5.0)
    scheduler = Steps(table, clock=lambda: 10.0, config=config, end_early=lambda *ends: ended.append(ends))
    table.admitted_s[:2] = 5.0
    table.waiting[0], table.waiting_since_s[0] = True, 8.0
    scheduler.check_deadlines()
    assert ended == []
    table.waiting_since_s[0], table.admitted_s[1] = 7.5, 4.5
    scheduler.check_deadlines()
    assert ended == [(0, "deadline"), (1, "deadline")]


@pytest.mark.parametrize(("admissible", "longest"), [(0, 0.5), (1, 0.0)])
def test_answers_are_waited_for_only_if_no_row_can_be_admitted(table, admissible, longest):
    waits = []
    table.live[:], table.parked[:], table.waiting[0] = False, False, True
    given = {"device": SimpleNamespace(flight=None), "admission": SimpleNamespace(waiting=admissible)}
    environment = SimpleNamespace(poll=lambda seconds: waits.append(seconds) or [])
    given |= {"may_admit": True, "submissions": [SimpleNamespace(environment=environment)]}
    Steps(table, clock=lambda: 0.0, seconds_to_deadline=lambda: 0.5, **given).take_answers(float("inf"))
    assert waits == [longest]


@pytest.mark.parametrize(("keep", "cached"), [(True, [5, 6, 7, 8]), (False, None)])
def test_the_cache_keeps_the_tokens_of_a_row_but_the_pending_one(table, keep, cached):
    table.tokens[0, 3:5], table.length[0] = (8, 9), 5
    left, prompt = [], np.array([5, 6, 7], np.int32)
    request = one_rollout(0, prompt, 4, temperature=1.0, step=2)
    row = SimpleNamespace(request=request, submission=SimpleNamespace(keep_cache=keep), prompt=prompt, slot=0)
    prompts = SimpleNamespace(leave=lambda *given: left.append(given))
    steps = Steps(table, clock=lambda: 0.0, record=lambda *_: None, rows={0: row}, prompts=prompts, lengths=Lengths())
    steps.finish(0, "eos")
    ((slot, _, written, tokens),) = left
    assert (slot, written, tokens if tokens is None else tokens.tolist()) == (0, 2, cached)


@pytest.mark.parametrize(("budget", "reason", "stop"), [(4, "length", "length"), (5, "stop", "eos")])
def test_a_stop_id_exactly_at_the_budget_ends_the_row_by_length(table, budget, reason, stop):
    seen, ended = [], []
    table.total[0] = 3 + budget
    table.tokens[0, 3:7] = (9, 9, 9, STOP)
    table.length[0] = 7
    policy = SimpleNamespace(turn_ended=lambda index, turn: seen.append(turn.reason) or Finish("eos"))
    rows = {0: SimpleNamespace(index=0, submission=SimpleNamespace(environment=policy))}
    given = {"rows": rows, "is_stop": np.arange(16) == STOP, "finish": lambda slot, stop: ended.append(stop)}
    Steps(table, clock=lambda: 0.0, **given).end_turns({0: False})
    assert (seen, ended) == ([reason], [stop])


def test_a_prompt_that_ends_in_a_block_of_another_row_is_not_kept(table, device):
    """Two rows drew the same tokens, so that they share that block; cut for the next row, nobody would copy it."""
    device.append_all = lambda writes, shared: None
    prompts = Prompts(device, table, lambda _: 1, RolloutStats())
    tokens = np.arange(41, dtype=np.int32)
    prompts.provide(0, 9, tokens[:21], 20, again=False)
    device.grow(0, 40)
    device.flush()
    prompts.park(0, 9, tokens[:32])
    assert [prompts.provide(slot, 9, tokens, 20, again=True) for slot in (1, 0)] == [32, 32]
    prompts.leave(0, 9, 20)
    assert not prompts.reserved(0, 9)
    device.flush()
    assert prompts.provide(0, 9, tokens[:21], 20, again=False) == 16
    assert [(write.slot, write.start, len(write.ids)) for write in device.queued_prompts] == [(0, 16, 4)]


@pytest.mark.parametrize("lengths", [(16, 32, 64, 128, 256), (16, 256), (7,), (1, 200)])
def test_the_calls_take_least_time_of_all(lengths):
    """Against all combinations of up to a few calls."""
    firsts, counts = first_calls(lengths), [1, 6, 16, 17, 40, 63, 88, 100]
    for tokens in (n for n in counts if n < len(firsts)):
        left, time = tokens, 0
        while left > 0:
            length = firsts[min(left, len(firsts) - 1)]
            left, time = left - length, time + length + CALL_TOKENS
        most = -(-tokens // lengths[0]) if len(lengths) == 1 else 5
        sets = (s for k in range(1, most + 1) for s in itertools.combinations_with_replacement(lengths, k))
        assert time <= min(sum(s) + CALL_TOKENS * len(s) for s in sets if sum(s) >= tokens), tokens


def test_a_pack_is_full_by_tokens_or_by_tiles():
    N = 128
    take = PackTaker(N)
    packed = [take(Write(0, np.zeros(n, np.int32), 0)) for n in (100, 20, 20, 5)]
    assert packed == [(100, 100), (20, 20), (8, 8), None]
    take = PackTaker(N)
    assert [take(Write(0, np.zeros(1, np.int32), 0)) for _ in range(tile_count(N) + 1)][-2:] == [(1, 1), None]


def test_prompts_and_observations_of_several_rows_share_calls(params):
    """The same trajectories as with one row a call, in fewer calls, and each token is written once."""
    settings = replace(ROLLOUT, slots=16, append_lengths=(16, 64))
    requests = make_requests(8, 2)
    packed, stats, _ = run(params, requests, rollout=settings)
    alone, before, _ = run(params, requests, rollout=replace(settings, append_rows=1))
    assert_same(packed, alone)
    assert stats.prefilled_tokens == before.prefilled_tokens
    assert stats.appends < 0.6 * before.appends and stats.padded_tokens < before.padded_tokens


def make(groups, *, shards=1, longest_first=False):
    """groups: list of (members, prompt length, budget)."""
    given = enumerate(groups)
    requests = [one_rollout(g, np.arange(n), budget, s) for g, (members, n, budget) in given for s in range(members)]
    rows, prompts = expand(requests, 0, 0, 1.0)
    queue = Admission(shards)
    queue.extend(range(len(rows)), rows, prompts, longest_first=longest_first)
    return queue


def drain(queue, fits=lambda ticket: True):
    return list(iter(lambda: queue.take(0, fits), None))


def test_arrival_and_longest_first_keep_siblings_together():
    groups = [(2, 5, 10), (2, 5, 90), (2, 5, 50)]
    assert drain(make(groups)) == [0, 1, 2, 3, 4, 5]
    assert drain(make(groups, longest_first=True)) == [2, 3, 4, 5, 0, 1]
    queue = make([(1, 10, 10), (1, 50, 10), (1, 2, 10)])
    assert drain(queue, lambda ticket: ticket != 1) == [0] and queue.waiting == 2, "what does not fit is not overtaken"
    assert drain(queue) == [1, 2] and queue.waiting == 0


def test_rows_come_and_are_withdrawn_at_any_time():
    queue = make([(2, 5, 10), (2, 5, 10)])
    assert queue.take(0, lambda ticket: True) == 0 and queue.siblings(0) == 1
    assert queue.withdraw(3) and queue.withdraw(1) and not queue.withdraw(0) and not queue.withdraw(3)
    assert queue.left() == [2] and queue.siblings(0) == 0
    row = one_rollout(0, np.arange(3), 5)
    queue.extend([7, 8], [row, row], [1, 1], longest_first=False)
    assert drain(queue) == [2, 7, 8] and queue.siblings(0) == queue.siblings(1) == 0


def test_rollouts_that_a_step_cut_are_the_first_ones():
    """Less is left of them than of new ones, but if they came last, new ones could keep them waiting forever."""
    requests = [one_rollout(g, np.arange(5), budget) for g, budget in enumerate((90, 10, 50))]
    cuts = [replace(starting_point(request), stop="cancelled") for request in requests[1:]]
    requests += [replace(one_rollout(3 + i, np.arange(5), 40), resume=cut) for i, cut in enumerate(cuts)]
    rows, prompts = expand(requests, 0, 0, 1.0)
    queue = Admission(1)
    queue.extend(range(5), rows, prompts, longest_first=True)
    assert drain(queue) == [3, 4, 0, 2, 1]


def test_each_shard_opens_its_own_group_and_helps_at_the_end():
    queue = make([(3, 5, 10), (3, 5, 10)], shards=2)
    taken = [queue.take(shard, lambda ticket: True) for shard in (0, 1, 0, 1, 0, 0, 1)]
    assert taken == [0, 3, 1, 4, 2, 5, None]


def test_a_share_of_the_expected_length_is_reserved():
    lengths = Lengths()
    assert lengths.reserved(np.array([10]), np.array([110])).tolist() == [10 + 35], "all that is left, so far"
    for length in (20, 40, 60):
        lengths.add(length)
    got = lengths.reserved(np.array([10, 30, 60, 50]), np.array([110, 110, 80, 52]))
    # Means of those that are longer: 40, 50, none (so its end), 60 (more than its end).
    assert got.tolist() == [10 + 11, 30 + 7, 60 + 7, 50 + 1]
    for _ in range(REMEMBERED):
        lengths.add(15)
    assert lengths.reserved(np.array([10]), np.array([110])).tolist() == [12], "old lengths are forgotten"


def test_a_request_becomes_a_row_for_each_sample_and_equal_prompts_of_a_problem_are_shared():
    prompt = np.arange(4, dtype=np.int32)
    requests = [replace(one_rollout(0, prompt, None, 3), count=2), one_rollout(0, prompt.copy(), 5, 5, prefix=(7, 8))]
    requests += [one_rollout(1, prompt, 5, temperature=0.0), one_rollout(0, prompt, 5, step=1)]
    rows, prompts = expand(requests, 2, 9, 0.7)
    wanted = [(3, 2, 9, 0.7), (4, 2, 9, 0.7), (5, 2, 5, 0.7), (0, 2, 5, 0.0), (0, 1, 5, 0.7)]
    assert [(r.first_sample, r.step, r.budget, r.temperature) for r in rows] == wanted
    assert prompts == [0, 0, 0, 1, 2] and {r.count for r in rows} == {1}
