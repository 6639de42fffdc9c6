"""A trainer of several processes with samplers elsewhere: the first process has them, and all take the same groups."""

import re
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
from tests.helpers.stream_fakes import check_keys, check_taken, limit
from tests.stream.test_samplers import STEPS, Played, check, check_kills, config_of
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
    def worker(processes, seed):
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
        first, *others = in_threads(count, lambda processes, seed=seed: worker(processes, seed))
        check(first, lag, late)
        check_kills(first)
        for other in others:
            assert not other.engines and contents(other.taken) == contents(first.taken)
            assert other.metrics == first.metrics
            assert other.notes == first.notes and any("is lost with" in note for note in other.notes)
            assert [(p.problem.uid, p.step, p.place, p.born) for p in other.run.partial] == [
                (p.problem.uid, p.step, p.place, p.born) for p in first.run.partial
            ]


def test_a_second_round_takes_the_same_groups_in_all_processes():
    def worker(processes):
        played = Played(9, *limit(1), processes=processes)
        for step in range(STEPS):
            played.step(meanwhile=1, rounds=1 + step % 2, kills=processes.first)
        return played

    first, second = in_threads(2, worker)
    assert contents(first.taken) == contents(second.taken)
    check_taken(first.taken, 1)
    assert sum(s.lost for s in first.transport.samplers) >= STEPS


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
        while played.run.step < STEPS:
            played.step()
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


def test_a_failure_during_an_update_ends_all_processes():
    def worker(processes):
        played = Played(4, *limit(1), processes=processes)
        played.step()
        if processes.first:
            played.transport.wait = lambda calls, timeout_s: 1 / 0
            played.stream.meanwhile()
        return outcome(played.step)

    first, second = in_threads(2, worker)
    assert isinstance(first, ProcessFailed) and isinstance(second, ProcessFailed)
    assert "process 0 failed while it sampled: Traceback" in str(second) and "1 / 0" in str(second)


@pytest.mark.parametrize("count", [1, 2])
def test_weights_that_are_not_finite_are_not_sent_and_end_all_processes(count):
    def worker(processes):
        played = Played(5, *limit(0), processes=processes)
        error = outcome(lambda: played.pool.publish(played.policy, np.nan, 0))
        assert not (processes.first and played.transport.puts)
        return type(error)

    assert in_threads(count, worker) == [NonFiniteWeightsError] * count


def test_a_signal_to_a_process_without_samplers_ends_the_step_in_all():
    def worker(processes):
        played = Played(5, *limit(1), processes=processes)
        if processes.first:
            played.pool.advance = lambda timeout_s: setattr(processes, "others_stopping", True)
        else:
            processes.preemption.asked = True
        return outcome(played.step)

    assert [type(error) for error in in_threads(2, worker)] == [Preempted] * 2


class Nowhere:
    """A transport that reaches nobody."""

    def __init__(self, *arguments):
        raise ValueError("no cluster answers there")


def test_a_cluster_that_does_not_answer_is_refused_in_all_processes():
    def worker(processes):
        played = Played(5, *limit(1), processes=processes)
        played.sampling.sampler.executor = SimpleNamespace(registry=None)
        played.policy.model, played.policy.lora = ModelConfig(vocab_size=64), SimpleNamespace(rank=0)

        def enter():
            with remote_samplers(config_of(), played.policy, played.sampling, {"ray": f"{__name__}:Nowhere"}):
                raise AssertionError("it has begun")

        return outcome(enter)

    for error in in_threads(2, worker):
        assert isinstance(error, ConfigError) and "no cluster answers there" in str(error)
