"""Samplers in other processes, of a trainer of one process and of several, of which the first has the samplers: groups
of a lost one begin again; no row is lost or counted twice; all processes take the same groups."""

import itertools
import pickle
import re
import threading
import weakref
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

import grpo_roc_jax as g
from grpo_roc_jax.config import derived, read_config
from grpo_roc_jax.engine.publish import NonFiniteWeightsError
from grpo_roc_jax.pod.processes import ProcessFailed
from grpo_roc_jax.run import components
from grpo_roc_jax.stream import samplers as stream_samplers
from grpo_roc_jax.stream.open_groups import SamplerFailed
from grpo_roc_jax.stream.rollout_stream import RolloutStream
from grpo_roc_jax.stream.samplers import FAILED_STARTS, RESENT, HostedGroups, Orders, SamplerPool, Weights, digest
from tests.helpers import stream_fakes as fakes
from tests.helpers.stream_fakes import PROBLEMS, SAMPLES, check_keys, check_taken, contents, in_threads, limit

STEPS = 6


class Killed(Exception):
    """The process of a sampler is gone."""


class LocalSampler:
    """The sampler's side, without a thread: it works when it is waited for."""

    def __init__(self, name, groups: HostedGroups):
        self.name, self.groups = name, groups
        self.inbox: list[bytes] = []
        self.lost = self.silent = self.stopped = False
        self.garbled = 0
        """Number of versions of the weights that arrive with another content."""
        self.given: list[int] = []
        """Numbers of the groups that it was given."""

    def work(self):
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
    """Orders and reports as bytes, as between processes. `make(number)` makes the `HostedGroups` of a sampler."""

    lost = (Killed,)

    def __init__(self, make):
        self.make, self.samplers, self.puts = make, [], 0

    @property
    def alive(self) -> list[LocalSampler]:
        return [sampler for sampler in self.samplers if not (sampler.lost or sampler.stopped)]

    def start(self):
        number = len(self.samplers)
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
        return [call for call in calls if not call[0].silent]

    def result(self, call):
        if call[0].lost:
            raise Killed("its process was killed")
        return call[0].work()

    def stop(self, sampler):
        sampler.stopped = True


class OneNumber:
    """A policy whose only parameter is a number."""

    def portable(self, trained, *, here=True):
        return {"x": np.array([trained], np.float32)} if here else None

    def placed(self, portable):
        return portable

    def full(self, trained):
        return trained


class VersionedEngine(fakes.FakeEngine):
    """Takes weights, and refuses to end rows that it does not have."""

    def publish(self, params, version):
        assert float(params["x"][0]) == version / 2
        self.version = version
        return version


def config_of(*words):
    return fakes.known("rollout.samplers=ray", f"steps={STEPS}", *words)


def hosted_on(engine, config=None):
    config = config or config_of()
    return HostedGroups(OneNumber(), fakes.sampling_on(engine, config), warm_up=False)


class Played:
    """A stream on samplers in this process, and what its steps took; of `processes`, the first has the samplers."""

    def __init__(self, seed, *words, count=2, processes=None, **clock):
        self.config, self.policy, self.engines = config_of(*words), OneNumber(), []

        def make(number):
            self.engines.append(VersionedEngine(100 * seed + number))
            return hosted_on(self.engines[-1], self.config)

        engine, self.run = fakes.FakeEngine(seed), fakes.fresh_run(self.config)
        engine.config, self.sampling = self.config.rollout, fakes.sampling_on(engine, self.config, processes)
        self.sampling.sampler.chat = SimpleNamespace(prompt_ids=lambda problem, suffix: [1, 2])
        self.transport = LocalTransport(make)
        if processes is None or processes.first:
            self.pool = SamplerPool(self.transport, self.sampling, count, 60.0, **clock)
        else:
            self.pool = stream_samplers.FollowedSamplers(processes)
        mesh = SimpleNamespace(size=8)
        self.stream = RolloutStream(self.config, self.sampling, mesh, self.pool, open_wave=fakes.open_wave)
        self.taken, self.metrics, self.notes = [], [], []

    def step(self, meanwhile=2, rounds=1):
        self.run.train = SimpleNamespace(params=self.run.step / 2)
        weights = self.stream.publish(self.policy, self.run)
        for _ in range(rounds):
            self.taken.append((self.run.step, self.stream.next_round(self.run, weights)))
        for _ in range(meanwhile):
            if self.stream.meanwhile:
                self.stream.meanwhile()
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
    """Another sampler takes the place of each that was killed; groups begin again, and no row is lost or counted
    twice."""
    samplers, since = played.transport.samplers, played.pool.metrics()  # since the last step
    kills = sum(sampler.lost for sampler in samplers)
    assert kills and played.total("lost") + since["samplers/lost"] <= kills
    assert len(played.transport.alive) == 2 and played.total("joined") >= 2
    given = [number for sampler in samplers for number in sampler.given]
    assert len(given) == len(set(given)) + played.total("groups_again") + since["samplers/groups_again"]
    dropped = sum(metrics["rollout/dropped_stale"] for metrics in played.metrics)
    assert sum(fakes.rows_of(played.taken, played.stream)) + dropped == played.run.stream.drawn * SAMPLES


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
            assert [(p.problem.uid, p.step, p.place, p.born) for p in other.run.partial] == [
                (p.problem.uid, p.step, p.place, p.born) for p in first.run.partial
            ]


def test_work_is_divided_and_goes_on_while_one_sampler_starts():
    played = Played(0, *limit(0), count=3)
    slow = played.transport.samplers[2]
    slow.silent = True
    played.step()
    first, second = (len(sampler.given) for sampler in played.transport.samplers[:2])
    assert abs(first - second) <= 1 and first + second == PROBLEMS and not slow.given
    assert played.metrics[-1]["samplers/alive"] == 2
    slow.silent = False
    played.step()
    played.step()
    assert slow.given and played.metrics[-1]["samplers/alive"] == 3


def test_a_full_sampler_gets_no_more_and_the_rest_waits():
    played = Played(1, *limit(2), "rollout.slots=4", "rollout.narrow=[]", count=1)
    played.step(meanwhile=0)
    assert played.metrics[-1]["samplers/queued_groups"] > 0
    assert max(member.rows for member in played.pool.members) <= 4 + SAMPLES
    played.finish()
    check(played, 2)


def test_a_sampler_that_does_not_answer_is_replaced_and_its_late_report_is_not_taken():
    clock = itertools.count(0.0, 20.0)
    now = [next(clock)]
    played = Played(2, *limit(0), clock=lambda: now[0])
    played.step()
    silent = played.transport.samplers[0]
    silent.silent = True
    wait = played.transport.wait

    def later(calls, timeout_s):
        now[0] = next(clock)
        return wait(calls, timeout_s)

    played.transport.wait = later
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
    again = Played(3, *limit(0))  # a refusal now and then is not one in a row
    again.step()
    for _ in range(2 * RESENT):
        again.transport.samplers[0].garbled = 1
        again.step()
    assert again.total("weights_refused") == 2 * RESENT
    bad = Played(3, *limit(0))
    bad.transport.samplers[1].garbled = 100
    with pytest.raises(SamplerFailed, match=r"sampler 2 .* another hash 4 times in a row"):
        bad.finish()


def test_a_refusal_is_reported_once_and_is_not_lost():
    """Weights that arrive damaged are sent again once for each refusal that is reported."""
    garbled = Weights(4, {"x": np.ones(1, np.float32)}, "another hash")
    hosted = hosted_on(VersionedEngine(1))
    hosted.take(Orders(), garbled)
    assert [hosted.report().refused for _ in range(3)] == [4, -1, -1]
    arrived = {version: threading.Event() for version in (4, 5)}

    class Arriving(Weights):
        @property
        def whole(self):
            arrived[self.version].set()
            return super().whole

    engine = SimpleNamespace(publish=lambda params, version: version, warmup=id)
    parts = OneNumber(), fakes.sampling_on(engine, config_of())
    sampler = stream_samplers.RemoteSampler(config_of(), open_parts=lambda *_, **__: nullcontext(parts))
    good = {"x": np.zeros(1, np.float32)}
    for weights in (Arriving(4, garbled.params, garbled.digest), Arriving(5, good, digest(good))):
        sampler.deliver(Orders(), weights)
        assert arrived[weights.version].wait(60)  # nobody polls until then
    reports = [sampler.poll(0.01)]
    while reports[-1].version < 5 and not reports[-1].failure:
        reports.append(sampler.poll(0.01))
    sampler.close()
    assert [report.refused for report in reports if report.refused >= 0] == [4]


def test_the_weights_before_are_gone_when_the_next_ones_are_made():
    """Two copies would take memory."""
    made, held = [], []

    def publish(params, version):
        held.append(any(copy() is not None for copy in made))
        made.append(weakref.ref(copy := type("Copy", (), {})()))
        return copy

    hosted, params = hosted_on(SimpleNamespace(publish=publish)), {"x": np.zeros(1, np.float32)}
    for version in range(3):
        hosted.take(Orders(), Weights(version, params, digest(params)))
    assert held == [False] * 3 and made[-1]() is not None


def test_a_digest_is_of_names_shapes_types_and_content():
    params = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": {"c": np.ones(2, np.float32)}}
    same = {"b": {"c": np.ones(2, np.float32)}, "a": np.asfortranarray(params["a"])}
    changed = (params["a"].reshape(3, 2), params["a"].view(np.int32), params["a"] + np.float32(1e-6))
    others = [{"x": params["a"], "b": params["b"]}, *({"a": a, "b": params["b"]} for a in changed)]
    assert digest(same) == digest(params) and Weights(1, same, digest(params)).whole
    assert len({digest(params), *map(digest, others)}) == 5


def test_a_group_that_begins_again_is_as_young_as_its_weights():
    """Otherwise a lag would make the step wait for it, or drop its rows."""
    played = Played(8, *limit(1))
    played.step(meanwhile=0)
    lost = max(played.transport.alive, key=lambda sampler: len(sampler.groups.open_groups))
    waiting = set(lost.groups.open_groups)
    assert waiting
    lost.lost = True
    played.run.train = SimpleNamespace(params=played.run.step / 2)
    played.stream.publish(played.policy, played.run)
    played.pool.advance(0.0)
    born = {group.number: group.born for group in played.stream.open_groups}
    assert all(born[number] == 1 for number in waiting)


def test_samplers_need_a_stream_and_a_dry_run_says_where_they_are():
    config = read_config("--rollout.samplers=ray")
    assert config.rollout.step_limit.kind == "stream" and config.rollout.remote.count == 2
    assert [part.kind for part in config.weights.factors] == ["truncated_is"]
    assert read_config("--rollout.samplers=none").rollout.remote is None
    for words, message in (
        (["--rollout.samplers.count=3"], r"count .*: is a setting of kind ray; set rollout\.samplers to a kind"),
        (["--rollout.samplers=ray", "--tools.executor=ray"], "the programs of its rows on its own host"),
        (["--rollout.samplers=ray", "--rollout.step_limit=none"], r"set rollout\.step_limit stream"),
    ):
        with pytest.raises(g.ConfigError, match=message):
            read_config(*words)
    assert "samplers: 2 ray actors on this machine, 64 rows at a time each" in "\n".join(derived(config_of()))
    joined = config_of("rollout.samplers.address=auto", "rollout.slots=32", "lora=low_rank")
    text = next(line for line in derived(joined) if line.startswith("samplers"))
    assert "2 ray actors in the cluster auto, 32 rows" in text and "sends them the adapter" in text


def test_samplers_need_their_package_and_let_processes_sample_as_one(monkeypatch):
    """Which excludes a stream where the processes sample themselves (`pod/test_teams.py`)."""
    monkeypatch.setattr(components, "processes_together", lambda mesh: 2)
    kind = type(config_of().rollout.samplers)
    monkeypatch.setattr(kind, "package", "grpo_roc_jax")  # one that is there without an extra
    components.check_together(config_of(), SimpleNamespace())
    monkeypatch.setattr(kind, "package", "a_package_that_nobody_has")
    with pytest.raises(ValueError, match=r"samplers ray needs the package: pip install"):
        components.check_together(config_of(), SimpleNamespace())


# ---- a trainer of several processes --------------------------------------------------------------------------------


def outcome(play):
    """The exception of `play()`, which it must raise."""
    try:
        play()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


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


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("raises", "text"),
    [
        (True, r"sampler 1 \(place of 0\): .* no such tool"),
        (False, f"{FAILED_STARTS} samplers in a row .* out of memory"),
    ],
)
def test_a_sampler_that_raises_or_cannot_start_ends_all_processes_with_the_reason(raises, text, count):
    def worker(processes):
        played = Played(4, *limit(1), processes=processes)
        if processes.first:
            answer = played.transport.result

            def result(call):
                if raises:
                    return replace(answer(call), failure="Traceback: ValueError: no such tool")
                raise Killed("out of memory")

            played.transport.result = result
        return outcome(played.step)

    errors = in_threads(count, worker)
    cause = errors[0].__cause__ if count > 1 else errors[0]
    assert isinstance(cause, SamplerFailed) and re.search(text, str(cause))
    for error in errors if count > 1 else ():
        assert isinstance(error, ProcessFailed)
        assert f"process 0 failed while it sampled: {cause}" in str(error)


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


@pytest.mark.parametrize("count", [1, 2])
def test_weights_that_are_not_finite_are_not_sent_and_end_all_processes(count):
    def worker(processes):
        played = Played(5, *limit(0), processes=processes)
        error = outcome(lambda: played.pool.publish(played.policy, np.nan, 0))
        assert not (processes.first and played.transport.puts)
        return type(error)

    assert in_threads(count, worker) == [NonFiniteWeightsError] * count


def nowhere(*arguments):
    """A transport that reaches nobody."""
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
