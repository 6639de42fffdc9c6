"""An engine that runs on, in a cache with room for one longest row: rows come, leave, are parked and go on; weights
change between chunks."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from grpo_roc_jax.engine.config import SamplingConfig
from grpo_roc_jax.engine.records import RunOptions, SingleTurn
from tests.helpers.rollout_fakes import ROLLOUT, FakeTools, changed, engine_for, make_requests, run, sharp_params

TIGHT = replace(ROLLOUT, block=16, kv_tokens=ROLLOUT.max_row_tokens)


@pytest.fixture(scope="module")
def params():
    return sharp_params()


@pytest.fixture(scope="module")
def expected(params):
    requests = make_requests()
    return requests, run(params, requests)[0]


def engine_of(**changes):
    return changed(engine_for(TIGHT, SamplingConfig(), None), **changes)


def assert_same_tokens(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
        assert (one.stop, one.turns) == (other.stop, other.turns)


@pytest.mark.parametrize(("pipeline", "latency"), [("off", 2), ("on", 6)])
def test_rows_that_give_up_their_blocks_end_as_if_they_had_not(params, expected, pipeline, latency):
    """20 rows, 8 blocks: rows are parked while they decode and while they wait, and share prompts."""
    requests, wanted = expected
    engine = engine_of(pipeline=pipeline)
    tools = FakeTools(requests, latency_polls=latency)
    found, stats = engine.run(engine.publish(params, 5), requests, tools)
    assert_same_tokens(found, wanted)
    assert stats.evictions > 3 and stats.recomputed_tokens > 0 and stats.forks > 0
    assert stats.cache_tokens <= 128 and 0.5 < stats.cache_room < 2.0
    sampled = sum(int(one.policy_mask.sum()) for one in found)
    assert stats.sampled_tokens == sampled and stats.metrics()["rollout/evictions"] == stats.evictions


def drain(engine, count):
    """All rows by ticket; every call returns as soon as one has ended."""
    found = {}
    while len(found) < count:
        ended = engine.advance(60.0)
        assert ended
        found |= dict(ended)
    assert engine.advance() == []
    return found


def test_rows_come_while_others_run_and_leave_as_they_finish(params, expected):
    requests, wanted = expected
    engine = engine_of()
    sampler = engine.publish(params, 5)
    first, second = requests[:10], requests[10:]
    assert engine.advance() == []
    assert engine.submit(sampler, first, FakeTools(first)) == range(10)
    found = dict(engine.advance())
    assert 1 <= len(found) < 10
    assert engine.submit(sampler, second, FakeTools(second), RunOptions()) == range(10, 20)
    engine.cancel(19)
    engine.cancel(next(iter(found)))  # it has ended
    found |= drain(engine, 20 - len(found))
    assert found[19].stop == "cancelled" and found[19].length == len(requests[19].prompt)
    assert_same_tokens([found[ticket] for ticket in range(19)], wanted[:19])
    stats = engine.release()
    assert stats.rollouts == 20 and stats.stops["cancelled"] == 1 and engine.release().rollouts == 0


@pytest.mark.parametrize("pipeline", ["off", "on"])
def test_weights_change_between_chunks_and_each_token_has_its_version(params, expected, pipeline):
    """The same weights under a new version change no token, since rows keep what was written. Other weights change
    those drawn with them, and none before."""
    requests, wanted = expected
    for other in (params, jax.tree.map(lambda leaf: leaf * 1.1, params)):
        engine = engine_of(pipeline=pipeline)
        engine.submit(engine.publish(params, 5), requests, FakeTools(requests))
        found = dict(engine.advance())
        engine.publish(other, 6)
        found |= drain(engine, 20 - len(found))
        engine.release()
        mixed = 0
        for ticket, row in found.items():
            versions, mask = row.versions, row.policy_mask
            assert set(versions[mask]) <= {5, 6} and (np.diff(versions[mask]) >= 0).all()
            mixed += len(set(versions[mask])) == 2
            same = row.length if other is params else int(np.argmax(np.append(versions, 6) == 6))
            np.testing.assert_array_equal(row.tokens[:same], wanted[ticket].tokens[:same])
        assert mixed > 0


def test_a_time_limit_returns_without_rows(params):
    engine = engine_of()
    requests = make_requests(1, 2)
    engine.submit(engine.publish(params, 5), requests, SingleTurn())
    assert engine.advance(-1.0) == []
    assert sorted(drain(engine, 2)) == [0, 1]


def test_a_prompt_that_nobody_needs_any_more_gives_way(params, expected):
    """One block in all. It is kept for siblings that are then cancelled, and the next row has another prompt."""
    requests, wanted = expected
    engine = changed(engine_for(replace(ROLLOUT, slots=1, block=128), SamplingConfig(), None), early_exit=True)

    def cancel_policy(index, trajectory):
        return [] if trajectory.stop == "cancelled" else range(index + 1, index - index % 5 + 5)

    options = RunOptions(cancel_policy=cancel_policy)
    found, stats = engine.run(engine.publish(params, 5), requests, FakeTools(requests), options)
    assert_same_tokens(found[::5], wanted[::5])
    assert stats.stops["cancelled"] == 16 and stats.prompts == 4
