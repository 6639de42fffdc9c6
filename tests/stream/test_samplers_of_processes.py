"""A trainer of several processes with samplers elsewhere: the first process has them, and all take the same groups."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_roc_jax.engine.publish import NonFiniteWeightsError
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.pod.preemption import Preempted
from grpo_roc_jax.pod.processes import ProcessFailed
from grpo_roc_jax.settings.cli import ConfigError
from grpo_roc_jax.stream.open_groups import SamplerFailed
from grpo_roc_jax.stream.samplers import FAILED_STARTS, remote_samplers
from tests.helpers.local_samplers import Killed
from tests.helpers.stream_fakes import SAMPLES
from tests.stream.test_samplers import STEPS, Played, check, known, limit
from tests.stream.test_stream_processes import contents, in_threads


def outcome(play):
    """The exception of `play()`, which it must raise."""
    try:
        play()
    except (Exception, Preempted) as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(("lag", "late"), [(0, "wait"), (1, "wait"), (2, "wait"), (2, "drop")])
def test_all_processes_take_the_same_groups_though_samplers_are_killed(lag, late):
    def one(processes, seed):
        played = Played(seed, *limit(lag, late), processes=processes)
        rng = np.random.default_rng(seed)
        for _ in range(STEPS):
            kill, meanwhile = rng.random() < 0.6, int(rng.integers(4))
            if kill and processes.first:
                rng.choice(played.transport.alive).lost = True
            played.step(meanwhile)
            rng = np.random.default_rng([seed, played.run.step])
        return played

    for seed, count in ((0, 2), (1, 2), (2, 3)):
        first, *others = in_threads(count, lambda processes, seed=seed: one(processes, seed))
        check(first, lag, late)
        kills = sum(sampler.lost for sampler in first.transport.samplers)
        assert kills and len(first.transport.alive) == 2
        given = [number for sampler in first.transport.samplers for number in sampler.given]
        since = first.pool.metrics()  # the last step
        assert len(given) == len(set(given)) + first.total("groups_again") + since["samplers/groups_again"]
        for other in others:
            assert not other.engines and contents(other.taken) == contents(first.taken)
            assert other.metrics == first.metrics
            assert other.notes == first.notes and any("is lost with" in note for note in other.notes)
            assert [(p.problem.uid, p.step, p.place, p.born) for p in other.run.partial] == [
                (p.problem.uid, p.step, p.place, p.born) for p in first.run.partial
            ]
        kept = sum(group.size for _, samples in first.taken for group in samples.groups)
        dropped = sum(metrics["rollout/dropped_stale"] for metrics in first.metrics)
        waiting = sum(len(rows) for group in first.stream.open_groups for rows in group.rows)
        assert kept + dropped + waiting == first.run.stream.drawn * SAMPLES


def test_a_second_round_takes_the_same_groups_in_all_processes():
    def one(processes):
        played = Played(9, *limit(1), processes=processes)
        for step in range(STEPS):
            played.run.train = SimpleNamespace(params=step / 2)
            played.stream.publish(played.policy, played.run)
            for _ in range(1 + step % 2):
                played.taken.append((step, played.stream.next_round(played.run, None)))
                if processes.first:
                    played.transport.alive[0].lost = True
            if played.stream.meanwhile:
                played.stream.meanwhile()
            played.stream.after_update(played.run, (), {})
            played.run.step += 1
        return played

    first, second = in_threads(2, one)
    assert contents(first.taken) == contents(second.taken)
    assert len(first.uids) == len(set(first.uids)) and sum(s.lost for s in first.transport.samplers) >= STEPS


@pytest.mark.parametrize("count", [1, 3])
def test_a_checkpoint_of_any_process_goes_on_in_another_number_of_them(count):
    def begin(processes):
        played = Played(6, *limit(2), processes=processes)
        for step in range(2):
            if step and processes.first:
                played.transport.alive[0].lost = True
            played.step(meanwhile=1)
        return played, played.run.bundle()

    (_, bundle), (follower, other) = in_threads(2, begin)
    assert bundle.host == other.host, "a process without samplers knows all rows too"

    def go_on(processes):
        played = Played(7, *limit(2), processes=processes)
        played.run.load(replace(other, train={"state": None, "reference": ()}))
        played.taken = list(follower.taken)
        while played.run.step < STEPS:
            played.step()
        return played

    first, *others = in_threads(count, go_on)
    check(first, 2, "wait")
    assert all(contents(each.taken) == contents(first.taken) for each in others)


def test_a_sampler_that_raises_or_cannot_start_ends_all_processes_with_the_reason():
    def one(processes, cause):
        played = Played(4, *limit(1), processes=processes)
        played.step()
        if processes.first:
            result = played.transport.result
            if cause == "raises":
                played.transport.result = lambda call: replace(result(call), failure="ValueError: no such tool")
            else:
                for sampler in played.transport.alive:
                    sampler.lost = True
                make = played.transport.make

                def lost_at_once(number):
                    played.transport.result = lambda call: (_ for _ in ()).throw(Killed("out of memory"))
                    return make(number)

                played.transport.make = lost_at_once
        return outcome(lambda: [played.step(meanwhile=0) for _ in range(3)])

    for cause, text in (("raises", "no such tool"), ("lost", f"{FAILED_STARTS} samplers in a row .* out of memory")):
        first, second = in_threads(2, lambda processes, cause=cause: one(processes, cause))
        assert isinstance(first.__cause__, SamplerFailed) and str(first) == str(second)
        for error in (first, second):
            with pytest.raises(ProcessFailed, match=f"process 0 failed while it sampled: .*{text}"):
                raise error


def test_a_failure_during_an_update_ends_all_processes():
    def one(processes):
        played = Played(4, *limit(1), processes=processes)
        played.step()
        if processes.first:
            played.transport.wait = lambda calls, timeout_s: 1 / 0
            played.stream.meanwhile()
        return outcome(played.step)

    first, second = in_threads(2, one)
    assert isinstance(first, ProcessFailed) and isinstance(second, ProcessFailed)
    assert "process 0 failed while it sampled: Traceback" in str(second) and "1 / 0" in str(second)


def test_weights_that_are_not_finite_end_all_processes():
    def one(processes):
        played = Played(5, *limit(0), processes=processes)
        return outcome(lambda: played.pool.publish(played.policy, np.nan, 0))

    assert [type(error) for error in in_threads(2, one)] == [NonFiniteWeightsError] * 2


def test_a_signal_to_a_process_without_samplers_ends_the_step_in_all():
    def one(processes):
        played = Played(5, *limit(1), processes=processes)
        if processes.first:
            played.pool.advance = lambda timeout_s: setattr(processes, "others_stopping", True)
        else:
            processes.preemption.asked = True
        return outcome(played.step)

    assert [type(error) for error in in_threads(2, one)] == [Preempted] * 2


class Nowhere:
    """A transport that reaches nobody."""

    def __init__(self, *arguments):
        raise ValueError("no cluster answers there")


def test_a_cluster_that_does_not_answer_is_refused_in_all_processes():
    def one(processes):
        played = Played(5, *limit(1), processes=processes)
        played.sampling.sampler.executor = SimpleNamespace(registry=None)
        played.policy.model, played.policy.lora = ModelConfig(vocab_size=64), SimpleNamespace(rank=0)

        def enter():
            with remote_samplers(known(), played.policy, played.sampling, {"ray": f"{__name__}:Nowhere"}):
                raise AssertionError("it has begun")

        return outcome(enter)

    for error in in_threads(2, one):
        assert isinstance(error, ConfigError) and "no cluster answers there" in str(error)
