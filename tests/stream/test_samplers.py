"""Samplers in other processes: groups of a lost one begin again; no row is lost or counted twice."""

import functools
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_roc_jax.config import derived, read_config
from grpo_roc_jax.engine.publish import NonFiniteWeightsError
from grpo_roc_jax.run import components
from grpo_roc_jax.run.components import check_together
from grpo_roc_jax.settings.cli import ConfigError
from grpo_roc_jax.stream.open_groups import SamplerFailed
from grpo_roc_jax.stream.rollout_stream import RolloutStream, age_metrics
from grpo_roc_jax.stream.samplers import (
    FAILED_STARTS,
    RESENT,
    FollowedSamplers,
    HostedGroups,
    SamplerPool,
    Weights,
    digest,
)
from tests.helpers.local_samplers import Killed, LocalTransport, OneNumber
from tests.helpers.stream_fakes import SAMPLES, FakeEngine, fresh_run, open_wave, sampling_on

PROBLEMS, STEPS = 3, 6


class VersionedEngine(FakeEngine):
    """Takes weights, and refuses to end rows that it does not have."""

    def publish(self, params, version):
        assert float(params["x"][0]) == version / 2
        self.version = version
        return version


@functools.cache
def known(*words):
    return read_config("rollout.samplers=ray", f"steps={STEPS}", f"group.problems={PROBLEMS}", *words)


class Played:
    """A stream on samplers in this process, and what its steps took; of `processes`, the first has the samplers."""

    def __init__(self, seed, *words, count=2, clock=None, processes=None):
        self.config, self.policy = known(*words), OneNumber()
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

    def step(self, meanwhile=2):
        self.run.train = SimpleNamespace(params=self.run.step / 2)
        weights = self.stream.publish(self.policy, self.run)
        samples = self.stream.next_round(self.run, weights)
        for _ in range(meanwhile):
            if self.stream.meanwhile:
                self.stream.meanwhile()
        self.metrics.append(self.stream.after_update(self.run, samples.groups, {})[0])
        self.notes += self.stream.take_notes()
        self.taken.append((self.run.step, samples))
        self.run.step += 1
        return samples

    @property
    def uids(self):
        return [int(group.problem.uid[1:]) for _, samples in self.taken for group in samples.groups]

    def total(self, name):
        return sum(metrics[f"samplers/{name}"] for metrics in self.metrics)


def limit(lag, late="wait"):
    return f"rollout.step_limit.lag={lag}", f"rollout.step_limit.late={late}"


def check(played, lag, late):
    """Every problem is trained once, in whole groups, with tokens that are not too old. Where late groups are dropped,
    others take their place."""
    assert len(played.uids) == len(set(played.uids)) == STEPS * PROBLEMS
    assert set(played.uids) == set(range(STEPS * PROBLEMS)) or late == "drop"
    for trained, samples in played.taken:
        assert len(samples.groups) == PROBLEMS
        assert age_metrics(samples.groups, trained)["rollout/lag_max"] <= lag
        for group in samples.groups:
            assert sorted(t.sample for t in group.trajectories) == list(range(SAMPLES)) or late == "drop"


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
        kills = sum(sampler.lost for sampler in played.transport.samplers)
        since = played.pool.metrics()  # the last step
        assert kills and played.total("lost") + since["samplers/lost"] <= kills
        assert len(played.transport.alive) == 2 and played.total("joined") >= 2
        given = [number for sampler in played.transport.samplers for number in sampler.given]
        assert len(given) == len(set(given)) + played.total("groups_again") + since["samplers/groups_again"]
        kept = sum(group.size for _, samples in played.taken for group in samples.groups)
        dropped = sum(metrics["rollout/dropped_stale"] for metrics in played.metrics)
        waiting = sum(len(rows) for group in played.stream.open_groups for rows in group.rows)
        assert kept + dropped + waiting == played.run.stream.drawn * SAMPLES


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
    check(played, 2, "wait")


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
    check(played, 0, "wait")
    assert silent.stopped and played.total("lost") == 1
    assert any("no answer for 60 s" in note for note in played.notes)


def test_weights_with_another_hash_are_not_used():
    played = Played(3, *limit(0))
    played.step()
    played.transport.samplers[0].garbled = RESENT
    while played.run.step < STEPS:
        played.step()
    check(played, 0, "wait")
    assert played.total("weights_refused") == RESENT
    assert all(metrics["samplers/versions_behind"] <= 1 for metrics in played.metrics)
    bad = Played(3, *limit(0))
    bad.transport.samplers[1].garbled = 100
    with pytest.raises(SamplerFailed, match=r"sampler 2 .* another hash 4 times in a row"):
        while bad.run.step < STEPS:
            bad.step()


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


def test_a_failure_of_a_sampler_ends_the_run_and_so_do_samplers_that_cannot_start():
    played = Played(4, *limit(0))
    result = played.transport.result
    played.transport.result = lambda call: replace(result(call), failure="Traceback: ValueError: no such tool")
    with pytest.raises(SamplerFailed, match=r"sampler 1 \(place of 0\): .* no such tool"):
        played.step()
    never = Played(4, *limit(0))

    def gone(call):
        raise Killed("out of memory")

    never.transport.result = gone
    with pytest.raises(SamplerFailed, match=f"{FAILED_STARTS} samplers in a row .* out of memory"):
        never.step()


def test_weights_that_are_not_finite_are_not_sent():
    played = Played(5, *limit(0))
    with pytest.raises(NonFiniteWeightsError):
        played.pool.publish(played.policy, np.nan, 0)
    assert not played.transport.puts


@pytest.mark.parametrize("lag", [0, 2])
def test_a_restored_run_begins_unfinished_groups_again(lag):
    played = Played(6, *limit(lag))
    for _ in range(2):
        played.step(meanwhile=1)
    bundle = played.run.bundle()
    again = Played(7, *limit(lag))
    again.run.load(replace(bundle, train={"state": None, "reference": ()}))
    again.taken = list(played.taken)
    while again.run.step < STEPS:
        again.step()
    check(again, lag, "wait")
    requests = [r for engine in again.engines for r in engine.submitted if r.resume is not None]
    assert bool(requests) == bool(lag)
    keys = Counter((r.step, r.place, r.first_sample) for engine in again.engines for r in engine.submitted)
    assert set(keys.values()) == {1}


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


def test_processes_that_sample_as_one_may_have_samplers_elsewhere(monkeypatch):
    monkeypatch.setattr(components, "processes_together", lambda mesh: 2)
    monkeypatch.setattr(type(known().rollout.samplers), "package", "grpo_roc_jax")  # one that is there without an extra
    check_together(known(), SimpleNamespace())
    with pytest.raises(ValueError, match=r"lets 2 processes sample as one, which excludes rollout\.step_limit stream"):
        check_together(known("rollout.samplers=none"), SimpleNamespace())


def test_samplers_without_their_package_are_refused_at_the_start(monkeypatch):
    monkeypatch.setattr(type(known().rollout.samplers), "package", "a_package_that_nobody_has")
    with pytest.raises(ValueError, match=r"samplers ray needs the package: pip install"):
        check_together(known(), SimpleNamespace())


def test_a_dry_run_says_where_rollouts_are_sampled():
    assert "samplers: 2 ray actors on this machine, 64 rows at a time each" in "\n".join(derived(known()))
    joined = known("rollout.samplers.address=auto", "rollout.slots=32", "lora=low_rank")
    said = next(line for line in derived(joined) if line.startswith("samplers"))
    assert "2 ray actors in the cluster auto, 32 rows" in said and "sends them the adapter" in said
