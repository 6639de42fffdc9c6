"""Whatever ends or alters a row besides its own tokens, and an engine whose rows queue, come, leave and go on."""

import itertools
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from grpo_roc_jax.engine.config import DroppedRows, PartialRows, SamplingConfig
from grpo_roc_jax.engine.engine import make_engine
from grpo_roc_jax.engine.protocol import RunOptions, SingleTurn
from grpo_roc_jax.engine.scheduler import Scheduler, expand
from grpo_roc_jax.engine.table import SlotTable, awaits_observation, from_prompt
from tests.helpers.engine_checks import assert_same, assert_versions
from tests.helpers.reference import random_params
from tests.helpers.rollout_fakes import MODEL, ROLLOUT, STOPS, FakeTools, StopPairs, make_requests, one_rollout, variant


def configured(params, requests, environment, **changes):
    """A run on the programs of ROLLOUT with other options, so that nothing is compiled for them."""
    engine = variant(**changes)
    return lambda **options: engine.run(engine.publish(params, 5), requests, environment, RunOptions(**options))


class HangingTools(FakeTools):
    """Calls of the rows in `hanging` never answer. The clock goes on only while the engine waits for nothing else."""

    def __init__(self, requests, hanging, proven=None):
        super().__init__(requests)
        self.hanging, self.proven, self.seconds = set(hanging), proven, 0.0
        self.clock = lambda: self.seconds

    def poll(self, timeout_s):
        if all(index in self.hanging for _, index, _ in self.pending):
            self.seconds += min(timeout_s, 0.02)
        return [(index, answer) for index, answer in super().poll(timeout_s) if index not in self.hanging]


@pytest.mark.parametrize("proven", [True, False])
def test_a_hanging_call_ends_its_row_only(params, twelve, proven):
    """As the policy's own missed deadline, or as an infrastructure failure if the call may never have run."""
    requests, expected = twelve
    tools = HangingTools(requests, (i for i, row in enumerate(expected) if len(row.turns) > 1 and i % 2), proven)
    assert tools.hanging
    rollouts, stats = configured(params, requests, tools, clock=tools.clock, turn_timeout_s=0.2)()
    stop = "deadline" if proven else "infrastructure"
    assert stats.stops[stop] == len(tools.hanging)
    for i in tools.hanging:
        row = rollouts[i]
        assert row.stop == stop and i in tools.cancels
        assert row.turns == expected[i].turns[:1] and len(row.tokens) == row.turns[0].end
    others = set(range(12)) - tools.hanging
    assert_same([rollouts[i] for i in others], [expected[i] for i in others])
    assert tools.seconds <= len(tools.hanging) * 0.21, "no row waits longer than its limit"


def test_a_fault_in_one_row_costs_that_row(params, twelve, caplog):
    class Faulty(FakeTools):
        def turn_ended(self, index, turn):
            if index in (1, 4):
                raise RecursionError("a parser of the user's")
            return super().turn_ended(index, turn)

    requests, expected = twelve
    rollouts, stats = configured(params, requests, Faulty(requests))()
    assert stats.stops["infrastructure"] == 2 and caplog.text.count("a turn could not be taken") == 1
    assert [i for i, row in enumerate(rollouts) if row.stop == "infrastructure"] == [1, 4]
    others = set(range(12)) - {1, 4}
    assert_same([rollouts[i] for i in others], [expected[i] for i in others])


def test_trajectory_and_step_deadlines(params):
    requests = make_requests(2, 4)
    tools = HangingTools(requests, range(8))
    _, stats = configured(params, requests, tools, clock=tools.clock, trajectory_timeout_s=0.1)()
    assert stats.stops["deadline"] + stats.stops["eos"] + stats.stops["length"] == 8 and stats.stops["deadline"] > 0
    tools = HangingTools(requests, range(8))
    rollouts, stats = configured(params, requests, tools, clock=tools.clock, step_limit=DroppedRows(0.3))()
    assert stats.stops["deadline"] == sum(map(awaits_observation, rollouts)) > 0
    assert tools.seconds <= 0.31 and sum(stats.stops.values()) == 8


def test_early_exit_cancels_what_a_decided_group_no_longer_needs(params):
    requests = make_requests(3, 6)
    expected, _ = configured(params, requests, FakeTools(requests))()
    ended = Counter()

    def cancel_policy(index, rollout):
        place = requests[index].place
        ended[place] += rollout.stop != "cancelled"
        return [i for i, request in enumerate(requests) if request.place == place and ended[place] >= 2]

    rollouts, stats = configured(params, requests, FakeTools(requests), early_exit=True)(cancel_policy=cancel_policy)
    finished = [request.place for request, row in zip(requests, rollouts, strict=True) if row.stop != "cancelled"]
    assert finished == [0, 0, 1, 1, 2, 2] and stats.stops["cancelled"] == 12
    for a, b in zip(rollouts, expected, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens[: len(a.tokens)])


def test_partial_rows_continue_exactly_where_they_stopped(params, twelve):
    requests, expected = twelve

    class Uneven(FakeTools):
        def turn_ended(self, index, turn):
            self.latency_polls = 1 + 4 * (index % 2)
            return super().turn_ended(index, turn)

    tools = Uneven(requests)
    # The clock jumps over the deadline at the third poll, while some rows wait and some decode.
    late = {"clock": lambda: 1e6 if tools.now >= 3 else 0.0, "step_limit": PartialRows(60.0)}
    first, _ = configured(params, requests, tools, **late)()
    cut = [i for i, rollout in enumerate(first) if rollout.stop == "cancelled"]
    kinds = {(awaits_observation(first[i]), len(first[i].turns) > 0) for i in cut}
    assert kinds == {(True, True), (False, True), (False, False)}, "waiting, in a turn, never admitted"
    resumed = [replace(requests[i], resume=first[i]) for i in cut]
    tools = FakeTools(resumed)
    # A turn that reaches the end of the tokens is open or unanswered: the environment has yet to see its end.
    tools.turns = {row: sum(turn.end < len(first[i].tokens) for turn in first[i].turns) for row, i in enumerate(cut)}
    engine = variant()
    second, _ = engine.run(engine.publish(params, 6), resumed, tools)
    assert_same(second, [expected[i] for i in cut], atol=5e-6, versions=False)
    assert_versions(second, [first[i] for i in cut], 5, 6)


def test_a_stop_text_rolls_the_row_back(params, twelve):
    """Two ids, which may be drawn in two chunks; the row continues from their end as if nothing had followed."""
    requests, _ = twelve
    stepwise = variant(replace(ROLLOUT, chunk=1))
    exact, stats = stepwise.run(stepwise.publish(params, 5), requests, StopPairs(requests))
    assert stats.dropped_tokens == 0
    results = []
    for pipeline in ("off", "on"):
        tools = StopPairs(requests)
        rollouts, stats = configured(params, requests, tools, pipeline=pipeline)()
        assert stats.dropped_tokens >= tools.cut >= 10
        assert stats.sampled_tokens == sum(int(r.policy_mask.sum()) for r in rollouts)
        results.append(rollouts)
    assert_same(*results, atol=0)
    assert_same(results[0], exact)


@pytest.mark.parametrize(("limit", "pipeline"), [(PartialRows(60.0), "on"), (DroppedRows(60.0), "off")])
def test_a_step_that_is_too_late_draws_one_chunk_and_an_evaluation_is_not_cut(params, twelve, limit, pipeline):
    """Rows go on in the next step, so they end however short the steps are."""
    requests, expected = twelve
    late = {"clock": partial(next, itertools.count(0.0, 100.0)), "step_limit": limit, "pipeline": pipeline}
    evaluated, _ = configured(params, requests, FakeTools(requests), **late)(purpose="evaluate")
    assert_same(evaluated, expected)
    trained, _ = configured(params, requests, FakeTools(requests), **late)()
    assert {trajectory.stop for trajectory in trained} & {"cancelled", "deadline", "infrastructure"}
    assert max(trajectory.length - trajectory.prompt_length for trajectory in trained) == ROLLOUT.chunk
    for row, other in zip(trained, expected, strict=True):
        np.testing.assert_array_equal(row.tokens, other.tokens[: row.length])


def test_refused_requests_and_settings(params):
    environment = SingleTurn()
    environment.find_stop = lambda index, new_tokens, before: 0
    for requests, message in (
        ([one_rollout(0, np.arange(41), 5)], "prompt of 41 tokens, must be 1 to 40"),
        ([one_rollout(0, np.arange(4), 81)], "budget of 81 tokens, must be 1 to 80"),
        ([one_rollout(0, np.array([97]), 8)], "prompt ids from 97 to 97"),
        (make_requests(2, 3, step=None)[::2] * 2, "requests 0 and 3 both ask for step 0, place 0, sample 0"),
        (make_requests(1, 1), "find_stop kept 0"),
    ):
        with pytest.raises(ValueError, match=message):
            configured(params, requests, environment)()
    for changes, message in (
        ({"attention": "paged"}, r"rollout.attention = 'paged' on cpu.*set rollout.attention xla"),
        ({"kv_tokens": 100}, "cannot hold one row"),
        ({"kv_start": 999}, "rollout.kv_start = 999; must be at most the 720 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            make_engine(MODEL, replace(ROLLOUT, **changes), SamplingConfig(), STOPS)


TIGHT = replace(ROLLOUT, block=16, kv_tokens=ROLLOUT.max_row_tokens)
same_rows = partial(assert_same, atol=1e-5)


def started(params, requests, **changes):
    """(an engine that runs those requests, its weights, the rows that have ended)."""
    engine = variant(TIGHT, **changes)
    sampler = engine.publish(params, 5)
    engine.submit(sampler, requests, FakeTools(requests))
    return engine, sampler, dict(engine.advance())


@pytest.mark.parametrize(("pipeline", "latency"), [("off", 2), ("on", 6)])
def test_rows_that_give_up_their_blocks_end_as_if_they_had_not(params, baseline, pipeline, latency):
    """20 rows, 8 blocks: rows are parked while they decode and while they wait, and share prompts."""
    requests, wanted, *_ = baseline
    engine = variant(TIGHT, pipeline=pipeline)
    rows, stats = engine.run(engine.publish(params, 5), requests, FakeTools(requests, latency_polls=latency))
    same_rows(rows, wanted)
    assert stats.evictions > 3 and stats.recomputed_tokens > 0 and stats.forks > 0


def drain(engine, count):
    """All rows by ticket; every call returns as soon as one has ended."""
    rows = {}
    while ended := engine.advance(60.0):
        rows |= dict(ended)
    assert len(rows) == count
    return rows


def test_rows_come_while_others_run_and_leave_as_they_finish(params, baseline):
    requests, wanted, *_ = baseline
    engine = variant(TIGHT)
    sampler = engine.publish(params, 5)
    first, second = requests[:10], requests[10:]
    assert engine.advance() == []
    assert engine.submit(sampler, first, FakeTools(first)) == range(10)
    rows = dict(engine.advance())
    assert 1 <= len(rows) < 10
    assert engine.submit(sampler, second, FakeTools(second), RunOptions()) == range(10, 20)
    engine.cancel(19)
    engine.cancel(next(iter(rows)))  # it has ended
    rows |= drain(engine, 20 - len(rows))
    assert rows[19].stop == "cancelled" and rows[19].length == len(requests[19].prompt)
    same_rows([rows[ticket] for ticket in range(19)], wanted[:19])
    stats = engine.release()
    assert stats.rollouts == 20 and stats.stops["cancelled"] == 1 and engine.release().rollouts == 0


@pytest.mark.parametrize("pipeline", ["off", "on"])
def test_weights_change_between_chunks_and_each_token_has_its_version(params, baseline, pipeline):
    """The same weights under a new version change no token; other weights change those drawn with them alone."""
    requests, wanted, *_ = baseline
    for other in (params, jax.tree.map(lambda leaf: leaf * 1.1, params)):
        engine, _, rows = started(params, requests, pipeline=pipeline)
        engine.publish(other, 6)
        rows |= drain(engine, 20 - len(rows))
        engine.release()
        for ticket, row in rows.items():
            drawn = row.versions[row.policy_mask]
            assert set(drawn) <= {5, 6} and (np.diff(drawn) >= 0).all()
            same = row.length if other is params else int(np.argmax(np.append(row.versions, 6) == 6))
            np.testing.assert_array_equal(row.tokens[:same], wanted[ticket].tokens[:same])
        assert any({5, 6} <= {*row.versions} for row in rows.values())


def test_a_batch_shares_the_pool_of_rollouts_in_flight(params, baseline):
    """An evaluation between two steps: each gets its own rows, in one cache of 8 blocks, and each has its counts."""
    requests, wanted, *_ = baseline
    second, third = requests[10:15], requests[15:]
    engine, sampler, rows = started(params, requests[:10], pipeline="on")
    batch, stats = engine.run(sampler, second, FakeTools(second), RunOptions(2, "evaluate"))
    ended = [ticket for ticket in range(10) if ticket not in rows and engine.cut(ticket).stop != "cancelled"]
    assert ended
    same_rows([engine.cut(ticket) for ticket in ended], [wanted[ticket] for ticket in ended])
    engine.submit(sampler, third, FakeTools(third))
    rows |= drain(engine, 15 - len(rows))
    of_stream = [*wanted[:10], *wanted[15:]]
    same_rows([rows[ticket] for ticket in sorted(rows)], of_stream)
    same_rows(batch, wanted[10:15])  # their requests name the step of their keys
    for counted, own in ((stats, wanted[10:15]), (engine.take_stats(), of_stream)):
        sampled = sum(int(row.policy_mask.sum()) for row in own)
        observed = sum(row.length - row.prompt_length for row in own) - sampled
        assert (counted.rollouts, counted.sampled_tokens, counted.observation_tokens) == (len(own), sampled, observed)


def test_a_cut_row_goes_on_in_another_engine_as_it_would_have_here(params, baseline):
    requests, wanted, *_ = baseline
    engine, _, ended = started(params, requests)
    cuts = {ticket: engine.cut(ticket) for ticket in range(20) if ticket not in ended}
    begun = [cut for cut in cuts.values() if cut.policy_mask.any()]
    assert begun and len(begun) < len(cuts) and {cut.stop for cut in cuts.values()} == {"cancelled"}
    assert from_prompt(begun[0]).length == begun[0].prompt_length
    ended |= drain(engine, len(cuts))
    same_rows([ended[ticket] for ticket in range(20)], wanted)  # a cut takes nothing away
    again = [replace(requests[ticket], resume=cut) for ticket, cut in cuts.items() if not cut.turns]
    other = variant()
    rows, _ = other.run(other.publish(params, 7), again, FakeTools(again))
    same_rows(rows, [wanted[ticket] for ticket, cut in cuts.items() if not cut.turns], versions=False)
    assert_versions(rows, [request.resume for request in again], 5, 7)


def test_a_deadline_has_passed_only_after_its_time():
    ended, table, scheduler = [], SlotTable(6, 16), object.__new__(Scheduler)
    for slot in (0, 1):
        table.admit(slot, slot, one_rollout(slot, np.array([5, 6, 7], np.int32), 4, temperature=1.0, step=2), 0, 0.0)
        table.go(slot, 0)
    scheduler.table, scheduler.submissions, scheduler.clock = table, [], lambda: 10.0
    scheduler.config = SimpleNamespace(turn_timeout_s=2.0, trajectory_timeout_s=5.0)
    scheduler.end_early = lambda *ends: ended.append(ends)
    table.admitted_s[:2] = 5.0
    table.waiting[0], table.waiting_since_s[0] = True, 8.0
    scheduler.check_deadlines()
    assert ended == []
    table.waiting_since_s[0], table.admitted_s[1] = 7.5, 4.5
    scheduler.check_deadlines()
    assert ended == [(0, "deadline"), (1, "deadline")]


def test_a_request_becomes_a_row_for_each_sample_and_equal_prompts_of_a_problem_are_shared():
    prompt = np.arange(4, dtype=np.int32)
    requests = [replace(one_rollout(0, prompt, None, 3), count=2), one_rollout(0, prompt.copy(), 5, 5, prefix=(7, 8))]
    requests += [one_rollout(1, prompt, 5, temperature=0.0), one_rollout(0, prompt, 5, step=1)]
    rows, prompts = expand(requests, 2, 9, 0.7)
    wanted = [(3, 2, 9, 0.7), (4, 2, 9, 0.7), (5, 2, 5, 0.7), (0, 2, 5, 0.0), (0, 1, 5, 0.7)]
    assert [(r.first_sample, r.step, r.budget, r.temperature) for r in rows] == wanted
    assert prompts == [0, 0, 0, 1, 2] and {r.count for r in rows} == {1}


def test_rows_are_those_of_a_cache_allocated_at_once():
    """All rows are admitted in the end and none is evicted; the second run begins with the size of the first."""
    requests, model = make_requests(4, 3), replace(MODEL, layers=1)  # every size is compiled
    params = jax.device_put(random_params(model, seed=4))
    settings = replace(ROLLOUT, block=8), replace(ROLLOUT, block=8, kv_start=32)
    full_engine, engine = (make_engine(model, each, SamplingConfig(), STOPS, seed=11) for each in settings)
    wanted, _ = full_engine.run(full_engine.publish(params, 5), requests, FakeTools(requests))
    sampler = engine.publish(params, 5)
    assert engine.programs.size.blocks < engine.programs.largest_size.blocks
    for again in (False, True):
        before = engine.programs.size.blocks
        rollouts, stats = engine.run(sampler, requests, FakeTools(requests))
        assert_same(wanted, rollouts)
        assert stats.evictions == 0 and (engine.programs.size.blocks > before) is not again
    names = [cost.name for cost in engine.programs.costs]
    assert names.count("grow") >= 2 and names.count("decode/6") == 2, "it grew at admission and while rows decoded"
