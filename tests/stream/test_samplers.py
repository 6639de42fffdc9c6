"""Samplers in other processes: groups of a lost one begin again; no row is lost or counted twice."""

import threading
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_roc_jax.config import derived, read_config
from grpo_roc_jax.run import components
from grpo_roc_jax.run.components import check_together
from grpo_roc_jax.settings.cli import ConfigError
from grpo_roc_jax.stream.open_groups import SamplerFailed
from grpo_roc_jax.stream.rollout_stream import RolloutStream
from grpo_roc_jax.stream.samplers import (
    RESENT,
    FollowedSamplers,
    HostedGroups,
    Orders,
    RemoteSampler,
    SamplerPool,
    Weights,
    digest,
)
from tests.helpers.local_samplers import LocalTransport, OneNumber
from tests.helpers.stream_fakes import (
    PROBLEMS,
    SAMPLES,
    FakeEngine,
    check_taken,
    fresh_run,
    known,
    limit,
    open_wave,
    rows_of,
    sampling_on,
)

STEPS = 6


class VersionedEngine(FakeEngine):
    """Takes weights, and refuses to end rows that it does not have."""

    def publish(self, params, version):
        assert float(params["x"][0]) == version / 2
        self.version = version
        return version


def config_of(*words):
    return known("rollout.samplers=ray", f"steps={STEPS}", *words)


class Played:
    """A stream on samplers in this process, and what its steps took; of `processes`, the first has the samplers."""

    def __init__(self, seed, *words, count=2, clock=None, processes=None):
        self.config, self.policy = config_of(*words), OneNumber()
        self.engines = []

        def make(number):
            self.engines.append(VersionedEngine(100 * seed + number))
            return HostedGroups(self.policy, sampling_on(self.engines[-1], self.config), warm_up=False)

        engine, self.run = FakeEngine(seed), fresh_run(self.config)
        engine.config, self.sampling = self.config.rollout, sampling_on(engine, self.config, processes)
        self.sampling.sampler.chat = SimpleNamespace(prompt_ids=lambda problem, suffix: [1, 2])
        self.transport = LocalTransport(make)
        time = {} if clock is None else {"clock": clock}
        if processes is None or processes.first:
            self.pool = SamplerPool(self.transport, self.sampling, count, 60.0, **time)
        else:
            self.pool = FollowedSamplers(processes)
        self.stream = RolloutStream(self.config, self.sampling, SimpleNamespace(size=8), self.pool, open_wave=open_wave)
        self.taken, self.metrics, self.notes = [], [], []

    def step(self, meanwhile=2, rounds=1, kills=False):
        """With `kills` a sampler is lost after each round."""
        self.run.train = SimpleNamespace(params=self.run.step / 2)
        weights = self.stream.publish(self.policy, self.run)
        for _ in range(rounds):
            self.taken.append((self.run.step, self.stream.next_round(self.run, weights)))
            if kills:
                self.transport.alive[0].lost = True
        for _ in range(meanwhile):
            if self.stream.meanwhile:
                self.stream.meanwhile()
        self.metrics.append(self.stream.after_update(self.run, self.taken[-1][1].groups, {})[0])
        self.notes += self.stream.take_notes()
        self.run.step += 1

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
    assert sum(rows_of(played.taken, played.stream)) + dropped == played.run.stream.drawn * SAMPLES


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("late", ["wait", "drop"])
def test_samplers_that_are_killed_lose_their_rows_and_nothing_else(lag, late):
    for seed in range(5):
        played, rng = Played(seed, *limit(lag, late)), np.random.default_rng(seed)
        for _ in range(STEPS):
            if rng.random() < 0.5:
                rng.choice(played.transport.alive).lost = True
            played.step(int(rng.integers(4)))
        check(played, lag, late)
        check_kills(played)


def test_work_is_divided_and_goes_on_while_one_sampler_starts():
    played = Played(0, *limit(0), count=3)
    slow = played.transport.samplers[2]
    slow.starting = True
    played.step()
    first, second = (len(sampler.given) for sampler in played.transport.samplers[:2])
    assert abs(first - second) <= 1 and first + second == PROBLEMS and not slow.given
    assert played.metrics[-1]["samplers/alive"] == 2
    slow.starting = False
    played.step()
    played.step()
    assert slow.given and played.metrics[-1]["samplers/alive"] == 3


def test_a_full_sampler_gets_no_more_and_the_rest_waits():
    played = Played(1, *limit(2), "rollout.slots=4", "rollout.narrow=[]", count=1)
    played.step(meanwhile=0)
    assert played.metrics[-1]["samplers/queued_groups"] > 0
    assert max(member.rows for member in played.pool.members) <= 4 + SAMPLES
    while played.run.step < STEPS:
        played.step()
    check(played, 2)


def test_a_sampler_that_does_not_answer_is_replaced_and_its_late_report_is_not_taken():
    now = [0.0]
    played = Played(2, *limit(0), clock=lambda: now[0])
    played.step()
    silent = played.transport.samplers[0]
    silent.hangs = True
    wait = played.transport.wait

    def later(calls, timeout_s):
        now[0] += 20.0
        return wait(calls, timeout_s)

    played.transport.wait = later
    for _ in range(STEPS - 1):
        played.step()
    check(played, 0)
    assert silent.stopped and played.total("lost") == 1
    assert any("no answer for 60 s" in note for note in played.notes)


def test_weights_with_another_hash_are_not_used():
    played = Played(3, *limit(0))
    played.step()
    played.transport.samplers[0].garbled = RESENT
    while played.run.step < STEPS:
        played.step()
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
        while bad.run.step < STEPS:
            bad.step()


def test_a_refusal_is_reported_once_and_is_not_lost():
    """Weights that arrive damaged are sent again once for each refusal that is reported."""
    garbled = Weights(4, {"x": np.ones(1, np.float32)}, "another hash")
    hosted = HostedGroups(OneNumber(), sampling_on(VersionedEngine(1), config_of()), warm_up=False)
    hosted.take(Orders(), garbled)
    assert [hosted.report().refused for _ in range(3)] == [4, -1, -1]
    arrived = {version: threading.Event() for version in (4, 5)}

    class Arriving(Weights):
        @property
        def whole(self):
            arrived[self.version].set()
            return super().whole

    parts = OneNumber(), sampling_on(SimpleNamespace(publish=lambda params, version: version, warmup=id), config_of())
    sampler = RemoteSampler(config_of(), open_parts=lambda *_, **__: nullcontext(parts))
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

    class Copy:
        pass

    made, held = [], []

    def publish(params, version):
        held.append(any(copy() is not None for copy in made))
        made.append(weakref.ref(copy := Copy()))
        return copy

    hosted = HostedGroups(OneNumber(), sampling_on(SimpleNamespace(publish=publish), config_of()), warm_up=False)
    params = {"x": np.zeros(1, np.float32)}
    for version in range(3):
        hosted.take(Orders(), Weights(version, params, digest(params)))
    assert held == [False] * 3 and made[-1]() is not None


def test_a_digest_is_of_names_shapes_types_and_content():
    params = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": {"c": np.ones(2, np.float32)}}
    same = {"b": {"c": np.ones(2, np.float32)}, "a": np.asfortranarray(params["a"])}
    others = [
        {"a": params["a"].reshape(3, 2), "b": params["b"]},
        {"x": params["a"], "b": params["b"]},
        {"a": params["a"].view(np.int32), "b": params["b"]},
        {"a": params["a"] + np.float32(1e-6), "b": params["b"]},
    ]
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


def test_samplers_need_a_stream():
    config = read_config("--rollout.samplers=ray")
    assert config.rollout.step_limit.kind == "stream" and config.rollout.remote.count == 2
    assert [part.kind for part in config.weights.factors] == ["truncated_is"]
    assert read_config("--rollout.samplers=none").rollout.remote is None
    with pytest.raises(ConfigError, match=r"count .*: is a setting of kind ray; set rollout\.samplers to a kind"):
        read_config("--rollout.samplers.count=3")
    with pytest.raises(ConfigError, match="each sampler runs the programs of its rows on its own host"):
        read_config("--rollout.samplers=ray", "--tools.executor=ray")
    with pytest.raises(ConfigError, match=r"ray with rollout\.step_limit none: .* set rollout\.step_limit stream"):
        read_config("--rollout.samplers=ray", "--rollout.step_limit=none")


def test_samplers_need_their_package_and_let_processes_sample_as_one(monkeypatch):
    """Which excludes a stream where the processes sample themselves (`pod/test_teams.py`)."""
    monkeypatch.setattr(components, "processes_together", lambda mesh: 2)
    kind = type(config_of().rollout.samplers)
    monkeypatch.setattr(kind, "package", "grpo_roc_jax")  # one that is there without an extra
    check_together(config_of(), SimpleNamespace())
    monkeypatch.setattr(kind, "package", "a_package_that_nobody_has")
    with pytest.raises(ValueError, match=r"samplers ray needs the package: pip install"):
        check_together(config_of(), SimpleNamespace())


def test_a_dry_run_says_where_rollouts_are_sampled():
    assert "samplers: 2 ray actors on this machine, 64 rows at a time each" in "\n".join(derived(config_of()))
    joined = config_of("rollout.samplers.address=auto", "rollout.slots=32", "lora=low_rank")
    text = next(line for line in derived(joined) if line.startswith("samplers"))
    assert "2 ray actors in the cluster auto, 32 rows" in text and "sends them the adapter" in text
