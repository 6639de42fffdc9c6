"""Requests that do not fit the slots of all processes go to the process that has a free slot first."""

import contextlib
import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_roc_jax.engine.config import DroppedRows, RolloutConfig
from grpo_roc_jax.engine.protocol import RolloutStats, RunOptions
from grpo_roc_jax.pod.preemption import Preempted
from grpo_roc_jax.pod.processes import Processes
from grpo_roc_jax.run import sample
from grpo_roc_jax.types import Problem, RolloutRequest
from tests.helpers.group_sampling import Scoring, sampling_of
from tests.helpers.samples import make_trajectory

SLOTS = 3
COUNTS = (2, 2, 2, 2, 0, 3, 1)
REQUESTS = [RolloutRequest(Problem(f"p{i}", "?", "1", "test"), i, count) for i, count in enumerate(COUNTS)]
FAILS = "p5", 2
"""Problem and sample of a rollout that cannot be scored."""


class Engine:
    """Rows that end one by one, in a random order."""

    def __init__(self, stops):
        self.rng, self.rows, self.released, self.stops = np.random.default_rng(0), {}, 0, stops
        self.config, self.tickets = RolloutConfig(slots=SLOTS), itertools.count()

    def submit(self, sampler, requests, environment, options):
        assert len(self.rows) < SLOTS, "a slot is free"
        rollouts = [(request.place, sample) for request in requests for sample in request.samples]
        assert rollouts and environment == [request.place for request in requests]
        tickets = [next(self.tickets) for _ in rollouts]
        self.rows |= zip(tickets, rollouts, strict=True)
        return tickets

    def advance(self):
        ticket = int(self.rng.choice([*self.rows]))
        index, sample_ = self.rows.pop(ticket)
        if index == 6 and self.stops:
            raise Preempted
        return [(ticket, replace(make_trajectory(np.random.default_rng(index), sample_), stop="answer"))]

    def take_stats(self):
        return RolloutStats(sampled_tokens=1)

    def release(self):
        self.rows, self.released = {}, self.released + 1


class OneOfTwo(Processes):
    """A process that shares counters with another one."""

    check_stop = service = None

    def __init__(self, index, counters):
        self.index, self.count, self.gathered = index, 2, []
        self.service = SimpleNamespace(
            key_value_increment=lambda key, by: next(counters.setdefault(key, itertools.count(1))),
            key_value_delete=lambda key: None,
        )

    def gather(self, value):
        self.gathered.append(value)
        return [value, ([], sample.ScoredRollouts())]


def one_process(index, counters, *, stops=False):
    """(taken, sampled) of a process that shares counters with another one, which returns nothing."""
    engine, group = Engine(stops), OneOfTwo(index, counters)
    sampling = sampling_of(engine, Scoring(lambda *rollout: rollout == FAILS), group)
    sampling.sampler.submission = lambda requests, options: (requests, [request.place for request in requests], options)
    with contextlib.suppress(KeyError):  # the other process has the rest
        sampling.sample_requests(None, REQUESTS, RunOptions(3))
    assert engine.released == 1
    return group.gathered[0]


def test_each_request_is_rolled_out_once_whoever_takes_it():
    counters = {}
    indices, sampled = one_process(0, counters)
    assert indices == [0, 2, 4 - 1, 4, 5, 6], "its share of the first three, and the others one by one"
    other, rest = one_process(1, counters)
    assert other == [1]
    assert [len(group.trajectories) for group in (*sampled.groups, *rest.groups)] == [2, 2, 2, 0, 2, 1, 2]
    assert [t.sample for t in sampled.groups[0].trajectories] == [0, 1], "in the order of samples"
    assert [(problem.uid, t.sample) for problem, t in sampled.removed] == [("p5", 2)]


def test_a_process_that_stops_drops_what_it_has():
    indices, sampled = one_process(0, {}, stops=True)
    assert not indices and not sampled.groups


@pytest.mark.parametrize(
    ("rollout", "count", "fixed"),
    [
        ({"slots": 3}, 2, 3),
        ({"slots": 6}, 2, 7),
        ({"slots": 1}, 1, 7),
        ({"slots": 3, "step_limit": DroppedRows(seconds=9.0)}, 2, 7),
    ],
)
def test_what_is_divided_before(rollout, count, fixed):
    engine = SimpleNamespace(config=RolloutConfig(**rollout))
    sampling = sampling_of(engine, processes=SimpleNamespace(samplers=count))
    assert sample.divided_before(sampling, REQUESTS) == fixed
    assert sample.divided_before(sampling, ()) == 0
    sampling.sampler.agents = "some"
    assert sample.divided_before(sampling, REQUESTS) == len(REQUESTS)
