"""Rows that leave their tokens in the cache: a prompt that begins with one is not written again; samples are equal."""

from dataclasses import replace

import numpy as np
import pytest

from grpo_roc_jax.engine.config import SamplingConfig
from grpo_roc_jax.engine.records import RunOptions, SingleTurn
from tests.helpers.rollout_fakes import ROLLOUT, changed, engine_for, make_requests, one_rollout, sharp_params

BLOCKS = replace(ROLLOUT, block=16, kv_tokens=ROLLOUT.max_row_tokens)


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


def later(row, place, budget=20):
    """A row whose context is an earlier one."""
    rest = row.tokens[40:].tolist()
    return one_rollout(place, row.tokens[:40], len(rest) + budget, prefix=tuple(rest), step=2)


def sampled(engine, sampler, request, keep, stops=()):
    seats = Seats(stops)
    engine.submit(sampler, [request], seats, RunOptions(purpose="chat", keep_cache=keep))
    ((_, row),) = engine.advance()
    assert seats.tokens == row.tokens[row.policy_mask].tolist()
    return row, seats.cached


@pytest.mark.parametrize("pipeline", ["off", "on"])
@pytest.mark.parametrize("stops", [(), range(60, 90)], ids=["to the end", "cut by a stop"])
def test_what_a_row_has_written_is_found_and_changes_nothing(pipeline, stops):
    params = sharp_params()
    shared = engine_for(BLOCKS, SamplingConfig(), None)
    engine, fresh = changed(shared, pipeline=pipeline), changed(shared, pipeline=pipeline)
    sampler = engine.publish(params, 5)
    request, rows = make_requests(1, 1, budget=30)[0], []
    for place in range(3):
        row, cached = sampled(engine, sampler, request, True, stops)
        known = len(rows[-1].tokens) - 1 if rows else 0
        assert cached == [known // 16 * 16]
        wanted, none = sampled(fresh, sampler, request, False, stops)
        fresh.release()
        assert none == [0]
        np.testing.assert_array_equal(row.tokens, wanted.tokens)
        np.testing.assert_allclose(row.logprobs, wanted.logprobs, atol=1e-5)
        rows.append(row)
        request = later(row, 7 + place)
    stats = engine.release()
    assert stats.cached_tokens > 0 and stats.prefilled_tokens < sum(len(row.tokens) for row in rows)


def test_without_it_only_prompts_are_found_and_new_weights_find_nothing():
    params, engine = sharp_params(), changed(engine_for(BLOCKS, SamplingConfig(), None))
    sampler = engine.publish(params, 5)
    first, _ = sampled(engine, sampler, make_requests(1, 1, budget=30)[0], False)
    _, cached = sampled(engine, sampler, later(first, 8), False)
    assert cached == [(first.prompt_length - 1) // 16 * 16]
    kept, _ = sampled(engine, sampler, later(first, 9), True)
    _, cached = sampled(engine, engine.publish(params, 6), later(kept, 10, 2), True)
    assert cached == [0]
