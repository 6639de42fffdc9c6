"""Adapters that are sampled from at a time: each row is drawn, and found in the cache, with its own."""

import queue
import weakref
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from grpo_roc_jax.engine.publish import NonFiniteWeightsError
from grpo_roc_jax.model.lora import LowRank
from grpo_roc_jax.serving.sampling_loop import SampleJob, SamplingLoop, sampled
from grpo_roc_jax.serving.tinker.snapshots import (
    AdapterBank,
    EngineForm,
    Seat,
    SeatedEngine,
    Snapshot,
    Snapshots,
    bucket,
)
from grpo_roc_jax.serving.tinker.trainer import Wanted
from tests.helpers.tinker_server import MODEL, small_engine, small_trainer

PROMPT = np.arange(3, 40, dtype=np.int32)
ALL = LowRank().targets
FORM = EngineForm(8, ALL, 3)


def adapter(rank, seed, targets=ALL):
    """A snapshot of an adapter that changes much."""
    trainer, lora = small_trainer(), LowRank(rank=rank, targets=targets)
    params = trainer.start(lora, seed).params
    noise = partial(jax.random.normal, jax.random.key(seed))
    params = jax.tree.map(lambda leaf: leaf + 0.3 * noise(leaf.shape), params)
    return Snapshot(trainer.base, lora, params, str(seed))


def scores(snapshot, tokens, drawn):
    """Log-probabilities of the last tokens by the trainer's programs."""
    lora, params = (snapshot.lora, snapshot.params) if snapshot else (None, None)
    result = small_trainer().read(lora, params, tokens[:-1], Wanted(tokens[1:, None]))
    return result.scored[-drawn:, 0]


class Run:
    """A loop over a bank, with what its jobs report."""

    def __init__(self, form=FORM, engine=None):
        self.engine = engine or small_engine(form).sibling()
        self.bank, base = AdapterBank(MODEL, form), small_trainer().base
        sampler = self.engine.publish(self.bank.empty(base), 0)
        columns = self.engine.programs.place(self.bank.columns())
        sampler = replace(sampler, params=sampler.params | {"adapters": columns})
        self.loop = SamplingLoop(self.engine, sampler, lambda work: work())
        self.cached, self.ended = {}, {}

    def put(self, snapshot, index):
        params = self.bank.put(self.loop.sampler.params, snapshot, index)
        self.loop.sampler = replace(self.loop.sampler, params=params)
        self.engine.exchange(self.loop.sampler)

    def submit(self, name, number, prompt=PROMPT, tokens=20, **fields):
        def report(event, sample, value):
            if event == "seated":
                self.cached[name] = value[0]
            elif event == "ended":
                self.ended[name] = value
            elif event == "failed":
                raise value

        self.loop.submit(SampleJob(prompt, tokens, report, 1, 1.0, 7, adapter=number, **fields))

    def finish(self):
        while not self.loop.idle:
            self.loop.turn(0.0)

    def check(self, name, snapshot):
        """The recorded log-probabilities are those of this adapter."""
        row = self.ended[name]
        span = sampled(row)
        drawn = span.stop - span.start
        np.testing.assert_allclose(row.logprobs[span], scores(snapshot, row.tokens, drawn), atol=2e-4)
        return row.tokens[span].tolist()


@pytest.mark.parametrize("by_layer", [False, True])
def test_a_batch_mixes_adapters_of_several_ranks_and_the_base(by_layer):
    form = FORM._replace(adapters=4) if by_layer else FORM  # programs of their own
    engine = small_engine(form).sibling()
    engine.programs.shares_layers = by_layer
    run = Run(form, engine)
    snapshots = [adapter(4, 1), adapter(8, 2), adapter(5, 3, ("q_proj", "down_proj"))]
    for index, snapshot in enumerate(snapshots):
        run.put(snapshot, index)
    for number in range(4):
        run.submit(number, number)
    run.loop.turn(0.0)
    assert len(run.loop.jobs) == 4  # all in one batch
    run.finish()
    texts = [run.check(number, snapshot) for number, snapshot in enumerate([None, *snapshots])]
    assert len({tuple(text) for text in texts}) == 4
    assert all(max(text) < 500 for text in texts)


def test_an_adapter_takes_the_place_of_another_while_rows_of_a_third_go_on():
    run, snapshots = Run(), [adapter(4, seed) for seed in (4, 5, 6)]
    run.put(snapshots[0], 0)
    run.put(snapshots[1], 1)
    run.submit("old", 1)
    run.submit("other", 2, tokens=60)
    while "old" not in run.ended:
        run.loop.turn(0.0)
    assert "other" not in run.ended
    run.put(snapshots[2], 0)
    run.submit("new", 1 + FORM.adapters)
    run.finish()
    for name, snapshot in zip(("old", "other", "new"), snapshots, strict=True):
        run.check(name, snapshot)
    assert run.cached["new"] == 0  # nothing of the adapter that was there before


def test_a_conversation_finds_its_earlier_turns_and_no_other_adapters():
    run, snapshots = Run(), [adapter(4, seed) for seed in (7, 8)]
    for index, snapshot in enumerate(snapshots):
        run.put(snapshot, index)
    run.submit("first", 1)
    run.finish()
    text = run.ended["first"].tokens
    run.submit("second", 1, np.append(text, [1, 2, 3]).astype(np.int32), tokens=5)
    run.submit("stranger", 2, np.append(text, [1, 2, 3]).astype(np.int32), tokens=5)
    run.finish()
    assert run.cached["second"] >= len(text) - 17
    assert run.cached["stranger"] == 0
    run.check("second", snapshots[0])
    run.check("stranger", snapshots[1])


def test_weights_replace_those_before_and_bad_ones_cost_their_job_alone():
    """The weights before are gone when the next ones are made: two copies would take memory."""
    made, held, events = [], [], queue.SimpleQueue()

    def watched(form):
        engine = small_engine(form).sibling()

        def publish(params, version, plain=engine.publisher.publish):
            held.append(any(weights() is not None for weights in made))
            sampler = plain(params, version)
            made.append(weakref.ref(sampler))
            return sampler

        engine.publisher = SimpleNamespace(publish=publish)
        return engine

    snapshots = Snapshots(watched, lambda work: work())
    snapshots.start()
    good = replace(adapter(4, 9), owner="x")
    bad = replace(good, params=jax.tree.map(lambda leaf: leaf * np.nan, good.params))
    outcomes = []
    for snapshot in (good, bad, good, adapter(4, 9)):
        snapshots.submit(replace(snapshot, owner="x"), SampleJob(PROMPT, 3, lambda *event: events.put(event)))
        while (event := events.get(timeout=120))[0] not in ("ended", "failed"):
            pass
        outcomes.append(event[2])
    snapshots.close()
    assert isinstance(outcomes[1], NonFiniteWeightsError) and held == [False] * 4
    for row in (outcomes[0], *outcomes[2:]):
        np.testing.assert_array_equal(row.tokens, outcomes[0].tokens)


def test_seats_go_to_the_adapter_that_waited_longest():
    a, b, c = (Snapshot({}) for _ in range(3))
    job = SampleJob(PROMPT, 1, lambda *_: None)
    seats = [Seat(a, 1, {job}, 3), Seat(b, 2, set(), 1), Seat(None, 3, set(), 2)]
    group = SeatedEngine(None, FORM, None, seats)
    assert group.seat_of(a) is seats[0]
    assert group.seat_of(b) is seats[1]
    assert group.seat_of(c) is seats[1]
    seats[1].jobs, seats[2].jobs = {job}, {job}
    assert group.seat_of(c) is None
    assert [bucket(rank) for rank in (1, 8, 9, 32, 33)] == [8, 8, 16, 32, 64]
