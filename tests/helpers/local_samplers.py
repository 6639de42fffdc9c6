"""Samplers in this process behind the transport of `stream.samplers`: they work when they are waited for. They can be
lost, can hang, or receive other weights than those that were sent."""

import itertools
import pickle
from dataclasses import replace

import numpy as np

from grpo_roc_jax.stream.samplers import HostedGroups, Orders, Report, Weights


class Killed(Exception):
    """The process of a sampler is gone."""


class LocalSampler:
    """The sampler's side, without a thread."""

    def __init__(self, name, groups: HostedGroups):
        self.name, self.groups = name, groups
        self.inbox: list[bytes] = []
        self.lost = self.hangs = self.stopped = self.starting = False
        self.garbled = 0
        """Number of versions of the weights that arrive with another content."""
        self.given: list[int] = []
        """Numbers of the groups that it was given."""

    def work(self) -> Report:
        for sent in self.inbox:
            orders, weights = pickle.loads(sent)
            if weights is not None and self.garbled:
                self.garbled -= 1
                weights = replace(weights, params={"x": weights.params["x"] + 1})
            self.groups.take(orders, weights)
        self.inbox = []
        self.groups.advance(0.0)
        return pickle.loads(pickle.dumps(replace(self.groups.report(), host=f"place of {self.name}")))


class LocalTransport:
    """Orders and reports as bytes, as between processes."""

    lost = (Killed,)

    def __init__(self, make):
        """`make(number)` makes the `HostedGroups` of a sampler."""
        self.make, self.samplers, self.numbers = make, [], itertools.count()
        self.puts = 0

    @property
    def alive(self) -> list[LocalSampler]:
        return [sampler for sampler in self.samplers if not (sampler.lost or sampler.stopped)]

    def start(self):
        number = next(self.numbers)
        self.samplers.append(LocalSampler(number, self.make(number)))
        return self.samplers[-1]

    def put(self, weights: Weights):
        self.puts += 1
        return weights

    def deliver(self, sampler, orders: Orders, weights=None):
        sampler.given += [task.number for task in orders.tasks]
        sampler.inbox.append(pickle.dumps((orders, weights)))

    def poll(self, sampler):
        return [sampler]

    def wait(self, calls, timeout_s):
        return [call for call in calls if not call[0].hangs and not call[0].starting]

    def result(self, call):
        if call[0].lost:
            raise Killed("its process was killed")
        return call[0].work()

    def stop(self, sampler):
        sampler.stopped = True

    def close(self):
        for sampler in self.samplers:
            sampler.stopped = True


class OneNumber:
    """A policy whose only parameter is a number."""

    def portable(self, trained, *, here=True):
        return {"x": np.array([trained], np.float32)} if here else None

    def placed(self, portable):
        return portable

    def full(self, trained):
        return trained
