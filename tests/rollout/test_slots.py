"""What the engine keeps about a slot while chunks, observations and rows given up overtake each other."""

from types import SimpleNamespace

import numpy as np
import pytest
from rollout_fakes import ROLLOUT, one_rollout
from test_collect import CALL, Instant, environment, turn

from grpo_roc_jax.rollout.decode import ChunkReport
from grpo_roc_jax.rollout.device_rows import DeviceRows, Flight, Write
from grpo_roc_jax.rollout.prompts import Prompts
from grpo_roc_jax.rollout.records import Finish, RolloutStats
from grpo_roc_jax.rollout.scheduler import Scheduler
from grpo_roc_jax.rollout.table import SlotTable
from grpo_roc_jax.text.chat_format import make_chat
from grpo_roc_jax.text.config import TextConfig
from grpo_roc_jax.text.tokenizer import load_tokenizer

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
    programs = SimpleNamespace(
        **dict.fromkeys(("shared_blocks", "row_axes")),
        shards=1,
        size=SimpleNamespace(blocks=8, columns=16),
        new_pool=lambda: None,
        new_slots=lambda: None,
        place=lambda *_: None,
    )
    device = DeviceRows(programs, ROLLOUT, SimpleNamespace(version=7), table, RolloutStats())
    device.appended = []
    device._append_all = lambda writes, *, shared: device.appended.extend(writes)
    return device


def in_flight(table, counts):
    """A chunk that drew `counts` tokens of the first two slots."""
    count = np.zeros(6, np.int32)
    count[:2] = counts
    tokens = np.full((4, 6), 9, np.int32)
    report = ChunkReport(tokens, tokens * 0.0, tokens[:0], count, np.array([4]))
    return Flight(report, table.generation.copy(), 6, 7)


def test_a_run_without_rollouts_has_counted_nothing():
    counts = vars(RolloutStats())
    assert not any(counts.pop("stops").values()) and not any(counts.values())


def test_what_is_queued_for_a_row_that_is_given_up_is_not_written_for_the_next_one(device):
    observation, other = Write(0, np.array([8, 8]), 3), Write(1, np.array([9]), 3)
    device.write(observation), device.write(other)
    device.take_back(0)
    assert not device.is_written(1) and device.is_written(0)
    again = Write(0, np.array([5, 6, 7]), 0)
    device.write(again)
    device.flush()
    assert device.appended == [other, again]


def test_a_chunk_in_flight_needs_room_of_its_own(device, table):
    assert device.ahead == ROLLOUT.chunk
    device.flight = in_flight(table, (4, 4))
    assert device.ahead == 2 * ROLLOUT.chunk


@pytest.mark.parametrize("act", ["roll_back", "park", "free"])
def test_tokens_in_flight_for_a_row_that_changed_do_not_count(device, table, act):
    device.flight = in_flight(table, (4, 3))
    getattr(table, act)(0, *((1,) if act == "roll_back" else ()))
    table.live[0] = True  # the slot is seated again before the chunk is read
    _, count, version = device.read()
    assert (count[:2].tolist(), version, device.stats.dropped_tokens) == ([0, 3], 7, 4)


@pytest.mark.parametrize(("budget", "reason", "stop"), [(4, "length", "length"), (5, "stop", "eos")])
def test_a_stop_id_exactly_at_the_budget_ends_the_row_by_length(table, budget, reason, stop):
    seen, ended = [], []
    table.total[0] = 3 + budget
    table.tokens[0, 3:7] = (9, 9, 9, STOP)
    table.length[0] = 7
    policy = SimpleNamespace(turn_ended=lambda index, turn: seen.append(turn.reason) or Finish("eos"))
    scheduler = object.__new__(Scheduler)
    scheduler.table, scheduler.stats, scheduler.is_stop = table, RolloutStats(), np.arange(16) == STOP
    scheduler.rows = {0: SimpleNamespace(index=0, submission=SimpleNamespace(environment=policy))}
    scheduler._finish = lambda slot, why: ended.append(why)
    scheduler._end_turn(0, found=False)
    assert (seen, ended) == ([reason], [stop])


def test_every_call_of_a_rollout_has_a_seed_of_its_own():
    executor = Instant()
    env = environment(make_chat(TextConfig(max_calls_per_turn=2), load_tokenizer(TextConfig())), executor)
    chat = env._chat
    for _ in range(2):
        env.turn_ended(0, turn(chat, CALL + CALL))
        env.poll(0.0)
    seeds = [call.seed for call in executor.submitted]
    assert len(seeds) == 4 == len(set(seeds))


def test_a_prompt_that_ends_in_a_block_of_another_row_is_not_kept(table, device):
    """Two rows of one prompt drew the same tokens, so that they share the block in which the prompt ends. What is cut
    from it for the next row would be a copy that nobody makes."""
    prompts = Prompts(device, table, SimpleNamespace(siblings=lambda _: 1), RolloutStats())
    tokens = np.arange(41, dtype=np.int32)
    prompts.provide(0, 9, tokens[:21], 20, again=False)
    device.grow(0, 40)
    device.flush()
    prompts.park(0, 9, tokens[:32])
    assert [prompts.provide(slot, 9, tokens, 20, again=True) for slot in (1, 0)] == [32, 32]
    prompts.leave(0, 9, 20)
    assert not prompts.kept(0, 9)
    device.flush()
    assert prompts.provide(0, 9, tokens[:21], 20, again=False) == 16
    assert [(write.slot, write.start, len(write.ids)) for write in device._prompts] == [(0, 16, 4)]
