"""What a stream of steps asks of the engine: batches beside it, cuts that go on elsewhere, one copy of the weights."""

from dataclasses import replace

import numpy as np
import pytest

from grpo_roc_jax.engine.config import SamplingConfig
from grpo_roc_jax.engine.publish import NonFiniteWeightsError
from grpo_roc_jax.engine.records import RunOptions
from grpo_roc_jax.engine.table import from_prompt
from grpo_roc_jax.tools.interface import CodeCall
from tests.engine.test_stream import assert_same_tokens, drain, engine_of
from tests.engine.test_stream import expected as expected  # fixtures
from tests.engine.test_stream import params as params
from tests.helpers.fake_executor import FakeExecutor
from tests.helpers.rollout_fakes import ROLLOUT, FakeTools, changed, engine_for


def test_a_batch_shares_the_pool_of_rollouts_in_flight(params, expected):
    """An evaluation between two steps: each gets its own rows, in one cache of 8 blocks."""
    requests, wanted = expected
    engine = engine_of()
    sampler = engine.publish(params, 5)
    first, second = requests[:10], requests[10:]
    engine.submit(sampler, first, FakeTools(first))
    found = dict(engine.advance())
    batch, stats = engine.run(sampler, second, FakeTools(second), RunOptions(2, "evaluate"))
    assert stats.rollouts == 10 and len(found) < 10
    found |= drain(engine, 10 - len(found))
    assert_same_tokens([found[ticket] for ticket in range(10)], wanted[:10])
    assert_same_tokens(batch, wanted[10:])  # their requests name the step of their keys
    counted = engine.take_stats()
    assert counted.rollouts == 10 and counted.sampled_tokens + stats.sampled_tokens == sum(
        int(row.policy_mask.sum()) for row in wanted
    )
    assert engine.take_stats().sampled_tokens == 0


@pytest.mark.parametrize("pipeline", ["off", "on"])
def test_the_weights_before_are_gone_when_the_next_are_made(params, expected, pipeline, monkeypatch):
    requests, _ = expected
    engine = engine_of(pipeline=pipeline)
    engine.submit(engine.publish(params, 5), requests, FakeTools(requests))
    engine.advance()
    publish, held, device = engine.publisher.publish, [], engine.scheduler.device

    def seen(*given):
        held.append((device.sampler, device.flight))
        return publish(*given)

    monkeypatch.setattr(engine.publisher, "publish", seen)
    engine.publish(params, 6)
    assert held == [(None, None)]
    assert device.sampler.version == 6


@pytest.mark.parametrize("held", [True, False])
def test_weights_that_are_not_published_change_nothing_for_a_caller_that_holds_the_old_ones(params, expected, held):
    """A server that follows a run skips a damaged checkpoint. A training run ends."""
    requests, wanted = expected
    engine = engine_of()
    sampler = engine.publish(params, 5)
    engine.submit(sampler, requests, FakeTools(requests))
    found = dict(engine.advance())
    if not held:
        del sampler
    with pytest.raises(NonFiniteWeightsError):
        engine.publish(params | {"embed": params["embed"] * np.nan}, 6)
    if not held:
        assert engine.scheduler.device.sampler is None
        return
    found |= drain(engine, 20 - len(found))
    assert_same_tokens([found[ticket] for ticket in range(20)], wanted)


def test_a_cut_row_goes_on_in_another_engine_as_it_would_have_here(params, expected):
    requests, wanted = expected
    engine = engine_of()
    engine.submit(engine.publish(params, 5), requests, FakeTools(requests))
    found = dict(engine.advance())
    cuts = {ticket: engine.cut(ticket) for ticket in range(20) if ticket not in found}
    begun = [cut for cut in cuts.values() if cut.policy_mask.any()]
    assert begun and len(begun) < len(cuts) and {cut.stop for cut in cuts.values()} == {"cancelled"}
    started = from_prompt(begun[0])
    assert started.length == started.prompt_length and not started.turns and not started.policy_mask.any()
    found |= drain(engine, len(cuts))
    assert_same_tokens([found[ticket] for ticket in range(20)], wanted)  # a cut takes nothing away
    again = [replace(requests[ticket], resume=cut) for ticket, cut in cuts.items() if not cut.turns]
    other = changed(engine_for(ROLLOUT, SamplingConfig(), None))
    rows, _ = other.run(other.publish(params, 7), again, FakeTools(again))
    assert_same_tokens(rows, [wanted[ticket] for ticket, cut in cuts.items() if not cut.turns])
    for row, request in zip(rows, again, strict=True):
        edge, mask = request.resume.length, row.policy_mask
        assert set(row.versions[:edge][mask[:edge]]) <= {5} and set(row.versions[edge:][mask[edge:]]) <= {7}


def test_callers_that_share_an_executor_get_their_own_results():
    with FakeExecutor() as shared:
        for name in ("a", "b", "c"):
            shared.submit(CodeCall(name, "python", {"code": "1"}, None))
        assert [name for name, _ in shared.poll(0.0, {"b"})] == ["b"]
        assert shared.poll(0.01, {"b"}) == []
        assert [name for name, _ in shared.poll(0.0, {"a", "x"})] == ["a"]
        assert [name for name, _ in shared.poll()] == ["c"]
