"""Rollouts that run on in several processes: each row in one of them, the same groups in all."""

import functools
import pickle
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_roc_jax.config import read_config
from grpo_roc_jax.engine.config import RolloutConfig, StreamedRows
from grpo_roc_jax.pod.preemption import Preempted, Preemption
from grpo_roc_jax.pod.processes import Processes
from grpo_roc_jax.run import sample
from tests.helpers.stream_fakes import PROBLEMS, check_keys, check_taken, known, limit, opened, play

STEPS = 5


class Hall:
    """Where the threads of a test meet as processes."""

    def __init__(self, count):
        self.values, self.texts = [b""] * count, {}
        self.barrier, self.again = threading.Barrier(count, timeout=120), threading.Barrier(count, self.texts.clear)


class Thread(Processes):
    """A thread as a process."""

    def __init__(self, index, hall):
        self.index, self.count, self.hall = index, len(hall.values), hall
        self.preemption, self.posts, self.round = Preemption(), Counter(), 0

    def exchange(self, value):
        self.round += 1
        self.hall.values[self.index] = pickle.dumps(value)
        self.hall.barrier.wait()
        values = [pickle.loads(data) for data in self.hall.values]
        self.hall.again.wait()
        return values

    def post(self, text):
        self.posts[self.round] += 1
        assert self.posts[self.round] < 1000, "it waits for groups that nobody rolls out any more"
        self.hall.texts[self.index] = text
        return [*self.hall.texts.values()]


def opened_in(processes, seed, lag, late="wait"):
    words = f"steps={STEPS}", "rollout.step_limit=stream", *limit(lag, late)
    return opened(known(*words), seed + processes.index, processes)


def in_threads(count, worker):
    """What `worker(processes)` returns in each of so many processes."""
    if count == 1:
        return [worker(Processes())]
    hall = Hall(count)

    def alone(process):
        try:
            return worker(process)
        except Preempted:
            raise
        except BaseException:
            hall.barrier.abort()  # the others end too
            raise

    with ThreadPoolExecutor(count) as pool:
        running = [pool.submit(alone, Thread(index, hall)) for index in range(count)]
        return [each.result() for each in running]


def contents(batches):
    return [
        [(g.problem.uid, [(t.sample, t.versions.tolist()) for t in g.trajectories]) for g in samples.groups]
        for _, samples in batches
    ]


@pytest.mark.parametrize(("lag", "late"), [(0, "wait"), (1, "wait"), (2, "drop")])
def test_each_row_is_rolled_out_once_and_all_processes_take_the_same_groups(lag, late):
    def worker(processes, seed):
        stream, run, engine = opened_in(processes, 10 * seed, lag, late)
        batches, dropped = play(stream, run, engine, STEPS, np.random.default_rng(seed), again=0.3)
        return batches, dropped, engine, [part.trajectories for part in run.partial]

    for seed, count in ((0, 2), (1, 2), (2, 4)):
        results = in_threads(count, functools.partial(worker, seed=seed))
        batches, dropped, _, left = results[0]
        assert all(contents(each[0]) == contents(batches) for each in results)
        assert {each[1] for each in results} == {dropped}
        assert len({len(each[3]) for each in results}) == 1 and all(t.tokens.size for part in left for t in part)
        numbers, waiting = check_taken(batches, lag, late), sum(map(len, left))
        kept = sum(group.size for _, samples in batches for group in samples.groups)
        assert len(check_keys([each[2] for each in results])) == kept + dropped + waiting or late == "drop"
        assert lag or (numbers == list(range(len(numbers))) and not waiting)


def test_groups_that_become_whole_during_an_update_are_known_to_a_process_without_rows():
    """The first process decides at once in the second round; the other one has nothing left to roll out."""
    config = read_config("steps=2", "group.problems=1", "rollout.step_limit=stream", "rollout.step_limit.lag=1")

    def worker(processes):
        stream, run, engine = opened(config, processes.index, processes)
        advance = engine.advance
        if processes.first:
            engine.advance = lambda timeout_s=np.inf: time.sleep(0.01) or []
        uids = [stream.next_round(run, 0).groups[0].problem.uid]
        engine.advance = advance
        while processes.first and engine.rows:
            stream.meanwhile()
        stream.after_update(run, (), {})
        run.step = engine.version = 1
        return [*uids, stream.next_round(run, 1).groups[0].problem.uid]

    assert in_threads(2, worker) == [["p1", "p0"]] * 2


@pytest.mark.parametrize(("begun", "going", "stop"), [(1, 1, 1), (1, 1, 3), (2, 1, 2), (2, 3, 2)])
def test_a_checkpoint_goes_on_with_every_row_in_any_number_of_processes(begun, going, stop):
    """Cut rows keep their tokens and versions; the same problems are trained on, and no key is used for another."""

    def begin(processes):
        stream, run, engine = opened_in(processes, 0, 2)
        before, _ = play(stream, run, engine, stop, np.random.default_rng(1))
        return before, run.bundle(), len(engine.rows)

    def go_on(processes):
        stream, run, engine = opened_in(processes, 7, 2)
        run.load(replace(bundle, train={"state": "state", "reference": ()}))
        after, _ = play(stream, run, engine, STEPS - stop, np.random.default_rng(2))
        return after, engine, {int(part.problem.uid[1:]) for part in run.partial}

    parts = in_threads(begun, begin)
    before, bundle, _ = parts[0]
    assert all(each.host == bundle.host for _, each, _ in parts)
    results = in_threads(going, go_on)
    resumed = [request.resume for request in check_keys([each[1] for each in results]) if request.resume is not None]
    assert len(resumed) == sum(rows for *_, rows in parts) > 0 and all(cut.policy_mask.any() for cut in resumed)
    after, _, still_open = results[0]
    numbers = check_taken([*before, *after], 2)
    assert len(numbers) == STEPS * PROBLEMS
    assert {*range(max(numbers))} - {*numbers} <= still_open, "what was begun and not trained on is still open"


def test_a_signal_to_one_process_ends_the_step_in_all():
    def worker(processes):
        stream, run, engine = opened_in(processes, 0, 1)
        if processes.index:
            processes.preemption.asked = True
        else:
            engine.advance = lambda timeout_s: setattr(processes, "others_stopping", True) or []
        with pytest.raises(Preempted):
            stream.next_round(run, 0)
        return processes.gather(1, uninterrupted=True)

    assert in_threads(2, worker) == [[1, 1], [1, 1]]


def test_what_a_process_posts_is_read_until_the_next_gather():
    store = {}

    class Posting(Processes):
        service = SimpleNamespace(
            key_value_set=lambda key, value, allow_overwrite: store.update({key: value}),
            key_value_dir_get=lambda folder: [pair for pair in store.items() if pair[0].startswith(folder)],
            key_value_delete=lambda key: store.pop(key),
        )

        def __init__(self, index):
            self.index, self.count, self.preemption = index, 2, Preemption()

        def exchange(self, value):
            return [value]

    pair = [Posting(0), Posting(1)]
    assert pair[0].post("1") == ["1"] and pair[1].post("5") == ["1", "5"]
    assert pair[0].post("1,2") == ["1,2", "5"]
    for process in pair:
        process.gather(None)
    assert pair[1].post("") == [""] and pair[0].post("3") == ["", "3"]
    assert len(store) == 2, "nothing is left of the time before"
    assert Processes().post("7") == ["7"]


def test_an_evaluation_beside_the_stream_is_divided_beforehand():
    """A queue that all processes share frees the engine at its end, with the rows that run on."""
    rollout = RolloutConfig(slots=1, step_limit=StreamedRows())
    sampler = SimpleNamespace(agents=None, episodes=None)
    shared = SimpleNamespace(sampler=sampler, processes=SimpleNamespace(samplers=2))
    shared.rollout = replace(rollout, step_limit=RolloutConfig().step_limit)
    requests = [SimpleNamespace(count=2)] * 4
    assert sample.divided_before(shared, requests) < 4
    shared.rollout = rollout
    assert sample.divided_before(shared, requests) == 4
