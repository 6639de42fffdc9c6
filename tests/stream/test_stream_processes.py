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
from grpo_roc_jax.stream.rollout_stream import age_metrics
from tests.helpers.stream_fakes import SAMPLES, opened, play

PROBLEMS, STEPS = 3, 5


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
        found = [pickle.loads(one) for one in self.hall.values]
        self.hall.again.wait()
        return found

    def post(self, text):
        self.posts[self.round] += 1
        assert self.posts[self.round] < 1000, "it waits for groups that nobody rolls out any more"
        self.hall.texts[self.index] = text
        return [*self.hall.texts.values()]


@functools.cache
def known(lag, late):
    limit = f"rollout.step_limit.lag={lag}", f"rollout.step_limit.late={late}"
    return read_config(f"steps={STEPS}", f"group.problems={PROBLEMS}", "rollout.step_limit=stream", *limit)


def in_threads(count, one):
    """What `one(processes)` returns in each of so many processes."""
    hall = Hall(count)

    def alone(process):
        try:
            return one(process)
        except Preempted:
            raise
        except BaseException:
            hall.barrier.abort()  # the others end too
            raise

    with ThreadPoolExecutor(count) as pool:
        running = [pool.submit(alone, Thread(index, hall)) for index in range(count)]
        return [each.result() for each in running]


def contents(taken):
    return [
        [(g.problem.uid, [(t.sample, t.versions.tolist()) for t in g.trajectories]) for g in samples.groups]
        for _, samples in taken
    ]


@pytest.mark.parametrize(("lag", "late"), [(0, "wait"), (1, "wait"), (2, "drop")])
def test_each_row_is_rolled_out_once_and_all_processes_take_the_same_groups(lag, late):
    def one(processes, seed):
        stream, run, engine = opened(known(lag, late), 10 * seed + processes.index, processes)
        taken, dropped = play(stream, run, engine, STEPS, np.random.default_rng(seed), again=0.3)
        return taken, dropped, engine, [part.trajectories for part in run.partial]

    for seed, count in ((0, 2), (1, 2), (2, 4)):
        found = in_threads(count, functools.partial(one, seed=seed))
        taken, dropped, _, left = found[0]
        assert all(contents(each[0]) == contents(taken) for each in found)
        assert {each[1] for each in found} == {dropped}
        assert len({len(each[3]) for each in found}) == 1 and all(t.tokens.size for part in left for t in part)
        keys = Counter((r.step, r.place, r.first_sample) for each in found for r in each[2].submitted)
        assert set(keys.values()) == {1}
        for trained, samples in taken:
            assert age_metrics(samples.groups, trained)["rollout/lag_max"] <= lag
            assert len(samples.groups) == PROBLEMS
            assert late == "drop" or all(group.size == SAMPLES for group in samples.groups)
        waiting = sum(map(len, left))
        kept = sum(group.size for _, samples in taken for group in samples.groups)
        assert len(keys) == kept + dropped + waiting or late == "drop"
        if not lag:
            order = [int(group.problem.uid[1:]) for _, samples in taken for group in samples.groups]
            assert order == list(range(len(order))) and not waiting


def test_groups_that_become_whole_during_an_update_are_known_to_a_process_without_rows():
    """The first process decides at once in the second round; the other one has nothing left to roll out."""
    config = read_config("steps=2", "group.problems=1", "rollout.step_limit=stream", "rollout.step_limit.lag=1")

    def one(processes):
        stream, run, engine = opened(config, processes.index, processes)
        advance = engine.advance
        if processes.first:
            engine.advance = lambda timeout_s=np.inf: time.sleep(0.01) or []
        taken = [stream.next_round(run, 0).groups[0].problem.uid]
        engine.advance = advance
        while processes.first and engine.rows:
            stream.meanwhile()
        stream.after_update(run, (), {})
        run.step = engine.version = 1
        return [*taken, stream.next_round(run, 1).groups[0].problem.uid]

    assert in_threads(2, one) == [["p1", "p0"]] * 2


@pytest.mark.parametrize("count", [1, 3])
def test_a_checkpoint_goes_on_in_another_number_of_processes(count):
    def begin(processes):
        stream, run, engine = opened(known(2, "wait"), processes.index, processes)
        before, _ = play(stream, run, engine, 2, np.random.default_rng(1))
        return before, run.bundle(), len(engine.rows)

    def go_on(processes):
        stream, run, engine = opened(known(2, "wait"), 7 + processes.index, processes)
        run.load(replace(bundle, train={"state": "state", "reference": ()}))
        after, _ = play(stream, run, engine, STEPS - 2, np.random.default_rng(2))
        return after, [request.resume for request in engine.submitted], {p.problem.uid for p in run.partial}

    (before, bundle, first), (_, other, second) = in_threads(2, begin)
    assert bundle.host == other.host and first + second
    found = in_threads(count, go_on)
    assert sum(resume is not None for _, resumed, _ in found for resume in resumed) == first + second
    uids = [group.problem.uid for _, samples in (*before, *found[0][0]) for group in samples.groups]
    assert len(uids) == len(set(uids)) == STEPS * PROBLEMS, "each is trained on once"
    drawn = {f"p{i}" for i in range(1 + max(int(uid[1:]) for uid in uids))}
    assert drawn - set(uids) <= found[0][2], "what was begun and not trained on is still open"


def test_a_signal_to_one_process_ends_the_step_in_all():
    def one(processes):
        stream, run, engine = opened(known(1, "wait"), processes.index, processes)
        if processes.index:
            processes.preemption.asked = True
        else:
            engine.advance = lambda timeout_s: setattr(processes, "others_stopping", True) or []
        with pytest.raises(Preempted):
            stream.next_round(run, 0)
        return processes.gather(1, uninterrupted=True)

    assert in_threads(2, one) == [[1, 1], [1, 1]]


def test_what_a_process_posts_is_read_until_the_next_gather():
    kept = {}

    class Posting(Processes):
        service = SimpleNamespace(
            key_value_set=lambda key, value, allow_overwrite: kept.update({key: value}),
            key_value_dir_get=lambda folder: [pair for pair in kept.items() if pair[0].startswith(folder)],
            key_value_delete=lambda key: kept.pop(key),
        )

        def __init__(self, index):
            self.index, self.count, self.preemption = index, 2, Preemption()

        def exchange(self, value):
            return [value]

    pair = [Posting(0), Posting(1)]
    assert pair[0].post("1") == ["1"] and pair[1].post("5") == ["1", "5"]
    assert pair[0].post("1,2") == ["1,2", "5"]
    for one in pair:
        one.gather(None)
    assert pair[1].post("") == [""] and pair[0].post("3") == ["", "3"]
    assert len(kept) == 2, "nothing is left of the time before"
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
