"""Samplers in other processes: groups of a lost one begin again, no row is lost, all processes take the same."""

import pickle
import re
import threading
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

import grpo_roc_jax as g
from grpo_roc_jax.engine.publish import NonFiniteWeightsError
from grpo_roc_jax.pod.processes import ProcessFailed
from grpo_roc_jax.stream import samplers as stream_samplers
from grpo_roc_jax.stream.open_groups import SamplerFailed
from grpo_roc_jax.stream.rollout_stream import RolloutStream
from grpo_roc_jax.stream.samplers import FAILED_STARTS, RESENT, HostedGroups, Orders, SamplerPool, Weights, digest
from tests.helpers import stream_fakes as fakes
from tests.helpers.stream_fakes import PROBLEMS, SAMPLES, check_keys, check_taken, contents, in_threads, limit

STEPS = 6


class LocalSampler:
    """The sampler's side: so many versions of the weights arrive damaged; numbers of the groups that it was given."""

    lost = silent = stopped = False
    garbled = 0

    def __init__(self, name, groups):
        self.name, self.groups, self.inbox, self.given = name, groups, [], []


class LocalTransport:
    """Orders and reports as bytes, as between processes. `make(number)` makes the `HostedGroups` of a sampler."""

    lost = (EOFError,)

    def __init__(self, make):
        self.make, self.samplers, self.puts = make, [], 0

    @property
    def alive(self):
        return [sampler for sampler in self.samplers if not (sampler.lost or sampler.stopped)]

    def start(self):
        number = len(self.samplers)
        self.samplers.append(LocalSampler(number, self.make(number)))
        return self.samplers[-1]

    def put(self, weights):
        self.puts += 1
        return weights

    def deliver(self, sampler, orders, weights=None):
        sampler.given += [task.number for task in orders.tasks]
        sampler.inbox.append(pickle.dumps((orders, weights)))

    def poll(self, sampler):
        return sampler

    def wait(self, calls, timeout_s):
        return [sampler for sampler in calls if not sampler.silent]

    def result(self, sampler):
        if sampler.lost:
            raise EOFError("its process was killed")
        for orders, weights in map(pickle.loads, sampler.inbox):
            if weights is not None and sampler.garbled:
                sampler.garbled -= 1
                weights = replace(weights, params={"x": weights.params["x"] + 1})
            sampler.groups.take(orders, weights)
        sampler.inbox = []
        sampler.groups.advance(0.0)
        return pickle.loads(pickle.dumps(replace(sampler.groups.report(), host=f"place of {sampler.name}")))

    def stop(self, sampler):
        sampler.stopped = True


def one_number():
    """A policy whose only parameter is a number."""
    given = dict.fromkeys(("full", "placed"), lambda params: params)
    return SimpleNamespace(**given, portable=lambda p, *, here=True: {"x": np.array([p], np.float32)} if here else None)


class VersionedEngine(fakes.FakeEngine):
    """Takes weights, and refuses to end rows that it does not have."""

    def publish(self, params, version):
        assert float(params["x"][0]) == version / 2
        self.version = version
        return version


config_of = partial(fakes.known, "rollout.samplers=ray", f"steps={STEPS}")


class Played:
    """A stream on samplers in this process, and what its steps took; of `processes`, the first has the samplers."""

    def __init__(self, seed, *words, count=2, processes=None, **clock):
        self.config, self.policy, self.engines = config_of(*words), one_number(), []

        def make(number):
            self.engines.append(VersionedEngine(100 * seed + number))
            sampling = fakes.sampling_on(self.engines[-1], self.config)
            return HostedGroups(one_number(), sampling, warm_up=False)

        engine, self.run = fakes.FakeEngine(seed), fakes.fresh_run(self.config)
        engine.config, self.sampling = self.config.rollout, fakes.sampling_on(engine, self.config, processes)
        self.sampling.sampler.chat = SimpleNamespace(prompt_ids=lambda problem, suffix: [1, 2])
        self.transport = LocalTransport(make)
        if processes is None or processes.first:
            self.pool = SamplerPool(self.transport, self.sampling, count, 60.0, **clock)
        else:
            self.pool = stream_samplers.FollowedSamplers(processes)
        parts = self.config, self.sampling, SimpleNamespace(size=8), self.pool
        self.stream = RolloutStream(*parts, open_wave=fakes.open_wave)
        self.taken, self.metrics, self.notes = [], [], []

    def step(self, meanwhile=2):
        self.run.train = SimpleNamespace(params=self.run.step / 2)
        weights = self.stream.publish(self.policy, self.run)
        self.taken.append((self.run.step, self.stream.next_round(self.run, weights)))
        for _ in range(meanwhile):
            (self.stream.meanwhile or list)()
        self.metrics.append(self.stream.after_update(self.run, self.taken[-1][1].groups, {})[0])
        self.notes += self.stream.take_notes()
        self.run.step += 1

    def finish(self):
        while self.run.step < STEPS:
            self.step()

    def total(self, name):
        return sum(metrics[f"samplers/{name}"] for metrics in self.metrics)


def check(played, lag, late="wait"):
    """Every problem is trained once. Where late groups are dropped, others take their place."""
    numbers = check_taken(played.taken, lag, late)
    assert len(numbers) == STEPS * PROBLEMS
    assert set(numbers) == set(range(STEPS * PROBLEMS)) or late == "drop"


def check_kills(played):
    """Another sampler takes the place of each that was killed; no row is lost or counted twice."""
    samplers, since = played.transport.samplers, played.pool.metrics()  # since the last step
    kills = sum(sampler.lost for sampler in samplers)
    assert kills and played.total("lost") + since["samplers/lost"] <= kills
    assert len(played.transport.alive) == 2 and played.total("joined") >= 2
    given = [number for sampler in samplers for number in sampler.given]
    assert len(given) == len(set(given)) + played.total("groups_again") + since["samplers/groups_again"]
    dropped = sum(metrics["rollout/dropped_stale"] for metrics in played.metrics)
    trained = sum(group.size for _, samples in played.taken for group in samples.groups)
    still_open = sum(len(rows) for group in played.stream.open_groups for rows in group.rows)
    assert trained + still_open + dropped == played.run.stream.drawn * SAMPLES


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("late", ["wait", "drop"])
def test_samplers_that_are_killed_lose_their_rows_and_nothing_else(lag, late):
    """Whatever the number of processes of the trainer, all of which take the same groups."""

    def worker(processes, seed):
        played = Played(seed, *limit(lag, late), processes=processes)
        for step in range(STEPS):
            rng = np.random.default_rng([seed, step])
            kill, meanwhile = rng.random() < 0.6, int(rng.integers(4))
            if kill and processes.first:
                rng.choice(played.transport.alive).lost = True
            played.step(meanwhile)
        return played

    for seed, count in (*((seed, 1) for seed in range(4, 9)), (0, 2), (1, 2), (2, 3)):
        first, *others = in_threads(count, partial(worker, seed=seed))
        check(first, lag, late)
        check_kills(first)
        for other in others:
            assert not other.engines and contents(other.taken) == contents(first.taken)
            assert other.metrics == first.metrics
            assert other.notes == first.notes and any("is lost with" in note for note in other.notes)
            left, known = ([(p.problem.uid, p.step, p.place, p.born) for p in e.run.partial] for e in (other, first))
            assert left == known


def test_a_sampler_that_does_not_answer_is_replaced_and_its_late_report_is_not_taken():
    waits = []
    played = Played(2, *limit(0), clock=lambda: 20.0 * len(waits))
    played.step()
    silent, wait = played.transport.samplers[0], played.transport.wait
    silent.silent = True
    played.transport.wait = lambda calls, timeout_s: waits.append(timeout_s) or wait(calls, timeout_s)
    played.finish()
    check(played, 0)
    assert silent.stopped and played.total("lost") == 1
    assert any("no answer for 60 s" in note for note in played.notes)


def test_weights_with_another_hash_are_not_used():
    played = Played(3, *limit(0))
    played.step()
    played.transport.samplers[0].garbled = RESENT
    played.finish()
    check(played, 0)
    assert played.total("weights_refused") == RESENT
    assert all(metrics["samplers/versions_behind"] <= 1 for metrics in played.metrics)
    bad = Played(3, *limit(0))
    bad.transport.samplers[1].garbled = 100
    with pytest.raises(SamplerFailed, match=r"sampler 2 .* another hash 4 times in a row"):
        bad.finish()


def test_a_refusal_is_reported_once_and_is_not_lost():
    """Weights that arrive damaged are sent again once for each refusal that is reported."""
    arrived = {version: threading.Event() for version in (4, 5)}

    class Arriving(Weights):
        whole = property(lambda self: arrived[self.version].set() or Weights.whole.fget(self))

    engine = SimpleNamespace(publish=lambda params, version: version, warmup=id)
    parts, good = (one_number(), fakes.sampling_on(engine, config_of())), {"x": np.zeros(1, np.float32)}
    sampler = stream_samplers.RemoteSampler(config_of(), open_parts=lambda *_, **__: nullcontext(parts))
    for weights in (Arriving(4, good, "another hash"), Arriving(5, good, digest(good))):
        sampler.deliver(Orders(), weights)
        assert arrived[weights.version].wait(60)  # nobody polls until then
    reports = [sampler.poll(0.01)]
    while reports[-1].version < 5 and not reports[-1].failure:
        reports.append(sampler.poll(0.01))
    sampler.close()
    assert [report.refused for report in reports if report.refused >= 0] == [4]


def outcome(play):
    """The exception of `play()`, which it must raise."""
    with pytest.raises(Exception) as raised:
        play()
    return raised.value


@pytest.mark.parametrize(("lag", "begun", "going"), [(0, 1, 1), (2, 1, 1), (2, 2, 1), (2, 2, 3)])
def test_a_checkpoint_of_any_process_goes_on_in_any_number_of_them(lag, begun, going):
    """Groups that were not complete begin again."""

    def begin(processes):
        played = Played(6, *limit(lag), processes=processes)
        for step in range(2):
            if step and processes.first:
                played.transport.alive[0].lost = True
            played.step(meanwhile=1)
        return played, played.run.bundle()

    parts = in_threads(begun, begin)
    follower, bundle = parts[-1]
    assert bundle.host == parts[0][1].host, "a process without samplers knows all rows too"

    def go_on(processes):
        played = Played(7, *limit(lag), processes=processes)
        played.run.load(replace(bundle, train={"state": None, "reference": ()}))
        played.taken = list(follower.taken)
        played.finish()
        return played

    first, *others = in_threads(going, go_on)
    check(first, lag)
    assert all(contents(each.taken) == contents(first.taken) for each in others)
    assert any(request.resume is not None for request in check_keys(first.engines)) is bool(lag)


@pytest.mark.parametrize("raises", [True, False])
def test_a_sampler_that_raises_or_cannot_start_ends_all_processes_with_the_reason(raises):
    def worker(processes):
        played = Played(4, *limit(1), processes=processes)
        if processes.first:
            answer = played.transport.result

            def result(call):
                if raises:
                    return replace(answer(call), failure="Traceback: ValueError: no such tool")
                raise EOFError("out of memory")

            played.transport.result = result
        return outcome(played.step)

    errors = in_threads(2, worker)
    reason = r"sampler 1 \(place of 0\): .* no such tool" if raises else f"{FAILED_STARTS} samplers in a row .* memory"
    assert isinstance(errors[0].__cause__, SamplerFailed) and re.search(reason, str(errors[0].__cause__))
    for error in errors:
        assert isinstance(error, ProcessFailed) and str(errors[0].__cause__) in str(error)


def test_weights_that_are_not_finite_are_not_sent_and_end_all_processes():
    def worker(processes):
        played = Played(5, *limit(0), processes=processes)
        error = outcome(lambda: played.pool.publish(played.policy, np.nan, 0))
        assert not (processes.first and played.transport.puts)
        return type(error)

    assert in_threads(2, worker) == [NonFiniteWeightsError] * 2


def nowhere(*arguments):
    raise ValueError("no cluster answers there")


def test_a_cluster_that_does_not_answer_is_refused_in_all_processes():
    def worker(processes):
        played = Played(5, *limit(1), processes=processes)
        played.sampling.sampler.executor = SimpleNamespace(registry=None)
        played.policy.model, played.policy.lora = g.ModelConfig(vocab_size=64), SimpleNamespace(rank=0)
        transports = {"ray": f"{__name__}:nowhere"}
        parts = stream_samplers.remote_samplers(config_of(), played.policy, played.sampling, transports)
        return outcome(parts.__enter__)

    for error in in_threads(2, worker):
        assert isinstance(error, g.ConfigError) and "no cluster answers there" in str(error)


@pytest.mark.parametrize("count", [1, 2])
def test_a_failure_during_an_update_ends_the_step_after_it_in_all_processes(count):
    """The update has donated its state, so that nothing may fail before it is complete."""

    def worker(processes):
        played = Played(4, *limit(1), processes=processes)
        played.step()
        if processes.first:
            played.transport.wait = lambda calls, timeout_s: 1 / 0
            played.stream.meanwhile()
            played.stream.meanwhile()
        return outcome(played.step)

    errors = in_threads(count, worker)
    assert [type(error) for error in errors] == ([ProcessFailed] * 2 if count > 1 else [ZeroDivisionError])
    if count > 1:
        assert "process 0 failed while it sampled: Traceback" in str(errors[1]) and "1 / 0" in str(errors[1])
