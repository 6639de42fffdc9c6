"""An engine that runs on, with room for one longest row: rows come, leave, are parked and go on; weights change."""

from collections import Counter
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from grpo_roc_jax.engine.engine import divided
from grpo_roc_jax.engine.protocol import RolloutStats, RunOptions, SingleTurn
from grpo_roc_jax.engine.publish import NonFiniteWeightsError
from grpo_roc_jax.engine.table import from_prompt
from grpo_roc_jax.model.transformer import init_params
from tests.helpers.engine_checks import assert_same
from tests.helpers.rollout_fakes import MODEL, ROLLOUT, FakeTools, make_requests, one_rollout, variant
from tests.helpers.samples import make_trajectory

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
    tools = FakeTools(requests, latency_polls=latency)
    rows, stats = engine.run(engine.publish(params, 5), requests, tools)
    same_rows(rows, wanted)
    assert stats.evictions > 3 and stats.recomputed_tokens > 0 and stats.forks > 0
    assert stats.cache_tokens <= 128 and 0.5 < stats.cache_room < 2.0
    sampled = sum(int(row.policy_mask.sum()) for row in rows)
    assert stats.sampled_tokens == sampled and stats.metrics()["rollout/evictions"] == stats.evictions


def drain(engine, count):
    """All rows by ticket; every call returns as soon as one has ended."""
    rows = {}
    while len(rows) < count:
        ended = engine.advance(60.0)
        assert ended
        rows |= dict(ended)
    assert engine.advance() == []
    return rows


def test_rows_come_while_others_run_and_leave_as_they_finish(params, baseline):
    requests, wanted, *_ = baseline
    engine = variant(TIGHT)
    sampler = engine.publish(params, 5)
    first, second = requests[:10], requests[10:]
    assert engine.advance() == []
    assert engine.submit(sampler, first, FakeTools(first)) == range(10)
    assert engine.advance(-1.0) == [], "no time is left"
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
    """The same weights under a new version change no token, since rows keep what was written. Other weights change
    those drawn with them, and none before."""
    requests, wanted, *_ = baseline
    for other in (params, jax.tree.map(lambda leaf: leaf * 1.1, params)):
        engine, _, rows = started(params, requests, pipeline=pipeline)
        engine.publish(other, 6)
        rows |= drain(engine, 20 - len(rows))
        engine.release()
        mixed = 0
        for ticket, row in rows.items():
            versions, mask = row.versions, row.policy_mask
            assert set(versions[mask]) <= {5, 6} and (np.diff(versions[mask]) >= 0).all()
            mixed += len(set(versions[mask])) == 2
            same = row.length if other is params else int(np.argmax(np.append(versions, 6) == 6))
            np.testing.assert_array_equal(row.tokens[:same], wanted[ticket].tokens[:same])
        assert mixed > 0


def test_a_prompt_that_nobody_needs_any_more_gives_way(params, baseline):
    """One block in all. It is kept for siblings that are then cancelled, and the next row has another prompt."""
    requests, wanted, *_ = baseline
    engine = variant(replace(ROLLOUT, slots=1, block=128), early_exit=True)

    def cancel_policy(index, trajectory):
        return [] if trajectory.stop == "cancelled" else range(index + 1, index - index % 5 + 5)

    options = RunOptions(cancel_policy=cancel_policy)
    rows, stats = engine.run(engine.publish(params, 5), requests, FakeTools(requests), options)
    same_rows(rows[::5], wanted[::5])
    assert stats.stops["cancelled"] == 16 and stats.prompts == 4


def counts_of(rows):
    """(rollouts, sampled tokens, tokens of observations, stops) of rows that began with a prompt."""
    sampled = sum(int(row.policy_mask.sum()) for row in rows)
    stops = dict(Counter(row.stop for row in rows))
    return len(rows), sampled, sum(row.length - row.prompt_length for row in rows) - sampled, stops


@pytest.mark.parametrize("pipeline", ["off", "on"])
def test_a_batch_shares_the_pool_of_rollouts_in_flight(params, baseline, pipeline):
    """An evaluation between two steps: each gets its own rows, in one cache of 8 blocks, and each has its counts."""
    requests, wanted, *_ = baseline
    second, third = requests[10:15], requests[15:]
    engine, sampler, rows = started(params, requests[:10], pipeline=pipeline)
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
        stops = {name: count for name, count in counted.stops.items() if count}
        assert (counted.rollouts, counted.sampled_tokens, counted.observation_tokens, stops) == counts_of(own)
        assert counted.shard_tokens == (counted.sampled_tokens,)
        assert 0 < counted.slot_use <= 1 and counted.prefilled_tokens > 0 and counted.seconds > 0
    assert engine.take_stats().sampled_tokens == 0


@pytest.mark.parametrize("seed", range(8))
def test_what_a_batch_and_the_others_count_adds_up_on_every_shard(seed):
    """The first row of the batch began before it, and the others sampled nothing in half of the cases."""
    rng = np.random.default_rng(seed)
    rows = [make_trajectory(rng, i) for i in range(2)]
    starts = [rows[0].turns[1].start, rows[1].prompt_length]
    sampled = sum(int(row.policy_mask[start:].sum()) for row, start in zip(rows, starts, strict=True))
    total = sampled + seed % 2 * int(rng.integers(1, 200))
    shards = tuple(rng.multinomial(total, rng.dirichlet(np.ones(3))).tolist())
    counts = {"rollouts": 2, "sampled_tokens": total, "observation_tokens": 99, "slot_steps": total, "seconds": 2.0}
    both = RolloutStats(**counts, cache_tokens=64, shard_tokens=shards)
    both.stops |= {"eos": 3, "answer": 2}
    batch, others = divided(both, starts, rows)
    counts = vars(RolloutStats())
    assert not any(counts.pop("stops").values()) and not any(counts.values()), "nothing has been counted so far"
    assert batch.followed_by(others) == both and batch.cache_tokens == others.cache_tokens == 64
    assert (batch.sampled_tokens, batch.observation_tokens, batch.stops["answer"]) == (sampled, 45, 2)
    for part in (batch, others):
        assert sum(part.shard_tokens) == part.sampled_tokens == part.slot_steps and min(part.shard_tokens) >= 0


@pytest.mark.parametrize("keep", [True, False])
def test_weights_that_are_not_published_change_nothing_for_a_caller_that_holds_the_old_ones(params, baseline, keep):
    """A server skips a damaged checkpoint. A training run, where old weights are gone when new ones are made, ends."""
    requests, wanted, *_ = baseline
    engine, sampler, rows = started(params, requests, pipeline="off" if keep else "on")
    if not keep:
        del sampler
    with pytest.raises(NonFiniteWeightsError):
        engine.publish(params | {"embed": params["embed"] * np.nan}, 6)
    if not keep:
        assert engine.scheduler.device.sampler is engine.scheduler.device.flight is None
        return
    rows |= drain(engine, 20 - len(rows))
    same_rows([rows[ticket] for ticket in range(20)], wanted)


def test_a_cut_row_goes_on_in_another_engine_as_it_would_have_here(params, baseline):
    requests, wanted, *_ = baseline
    engine, _, ended = started(params, requests)
    cuts = {ticket: engine.cut(ticket) for ticket in range(20) if ticket not in ended}
    begun = [cut for cut in cuts.values() if cut.policy_mask.any()]
    assert begun and len(begun) < len(cuts) and {cut.stop for cut in cuts.values()} == {"cancelled"}
    begin = from_prompt(begun[0])
    assert begin.length == begin.prompt_length and not begin.turns and not begin.policy_mask.any()
    ended |= drain(engine, len(cuts))
    same_rows([ended[ticket] for ticket in range(20)], wanted)  # a cut takes nothing away
    again = [replace(requests[ticket], resume=cut) for ticket, cut in cuts.items() if not cut.turns]
    other = variant()
    rows, _ = other.run(other.publish(params, 7), again, FakeTools(again))
    same_rows(rows, [wanted[ticket] for ticket, cut in cuts.items() if not cut.turns], versions=False)
    for row, request in zip(rows, again, strict=True):
        edge, mask = request.resume.length, row.policy_mask
        np.testing.assert_array_equal(row.versions[mask], np.where(np.arange(row.length) < edge, 5, 7)[mask])


@pytest.mark.parametrize("lengths", [(40, 36, 35), (36, 40, 34), (34, 20, 40)])
def test_prompts_of_one_round_read_nothing_that_is_not_written(lengths):
    """Blocks and appends of 16 tokens: the first prompt takes three appends, and the others begin with its second
    block, which is not written before the second append."""
    drawn = np.random.default_rng(3).integers(8, 97, size=(4, 40)).astype(np.int32)
    prompts = [np.concatenate([drawn[0][:32], drawn[i]])[:n] for i, n in enumerate(lengths, 1)]
    # With siblings: a block of a single row is not shared on this backend.
    requests = [one_rollout(i, prompt, 12, sample, step=2) for i, prompt in enumerate(prompts) for sample in range(2)]
    engine, other = variant(TIGHT, kv_tokens=0), variant(TIGHT, kv_tokens=0)  # two pools
    sampler = engine.publish(init_params(jax.random.key(1), MODEL), 5)  # weights that look at all tokens
    together, stats = engine.run(sampler, requests, FakeTools(requests))
    alone = [other.run(sampler, [request], FakeTools([request]))[0][0] for request in requests]
    assert stats.cached_tokens >= 32
    same_rows(together, alone)


class Seats(SingleTurn):
    """Notes what was found, and what was drawn; ends a turn at any of the ids `stops`."""

    def __init__(self, stops=()):
        self.cached, self.tokens, self.stops = [], [], stops

    def seated(self, row, cached):
        self.cached.append(cached)

    def drawn(self, row, tokens, logprobs):
        assert len(tokens) == len(logprobs)
        self.tokens += tokens.tolist()

    def find_stop(self, row, new, before):
        return next((i + 1 for i, token in enumerate(new.tolist()) if token in self.stops), None)


def later(row, index, budget=20):
    """A row whose context is an earlier one."""
    rest = row.tokens[40:].tolist()
    return one_rollout(index, row.tokens[:40], len(rest) + budget, prefix=tuple(rest), step=2)


def sampled(engine, sampler, request, keep, stops=()):
    seats = Seats(stops)
    engine.submit(sampler, [request], seats, RunOptions(purpose="chat", keep_cache=keep))
    ((_, row),) = engine.advance()
    assert seats.tokens == row.tokens[row.policy_mask].tolist()
    return row, seats.cached


@pytest.mark.parametrize("pipeline", ["off", "on"])
@pytest.mark.parametrize("stops", [(), range(60, 90)], ids=["to the end", "cut by a stop"])
def test_what_a_row_has_written_is_found_and_changes_nothing(params, pipeline, stops):
    """A prompt that begins with an earlier row is not written again."""
    engine, fresh = variant(TIGHT, pipeline=pipeline), variant(TIGHT, pipeline=pipeline)
    sampler = engine.publish(params, 5)
    request, rows = make_requests(1, 1, budget=30)[0], []
    for index in range(3):
        row, cached = sampled(engine, sampler, request, True, stops)
        known = len(rows[-1].tokens) - 1 if rows else 0
        assert cached == [known // 16 * 16]
        wanted, none = sampled(fresh, sampler, request, False, stops)
        fresh.release()
        assert none == [0]
        same_rows([row], [wanted])
        rows.append(row)
        request = later(row, 7 + index)
    stats = engine.release()
    assert stats.cached_tokens > 0 and stats.prefilled_tokens < sum(len(row.tokens) for row in rows)


def test_without_it_only_prompts_are_found_and_new_weights_find_nothing(params):
    engine = variant(TIGHT)
    sampler = engine.publish(params, 5)
    first, _ = sampled(engine, sampler, make_requests(1, 1, budget=30)[0], False)
    _, cached = sampled(engine, sampler, later(first, 8), False)
    assert cached == [(first.prompt_length - 1) // 16 * 16]
    second, _ = sampled(engine, sampler, later(first, 9), True)
    _, cached = sampled(engine, engine.publish(params, 6), later(second, 10, 2), True)
    assert cached == [0]
