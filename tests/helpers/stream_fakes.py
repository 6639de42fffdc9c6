"""A stream of rollouts on an engine that computes nothing, in threads that stand for processes."""

import functools
import itertools
import pickle
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np

import grpo_roc_jax as g
from grpo_roc_jax.engine.protocol import RolloutStats
from grpo_roc_jax.pod.preemption import Preempted, Preemption
from grpo_roc_jax.pod.processes import Processes
from grpo_roc_jax.run.run_state import RunState
from grpo_roc_jax.run.sample import GroupSampler
from grpo_roc_jax.stream.rollout_stream import RolloutStream, age_metrics
from tests.helpers.samples import make_group, make_trajectory

PROBLEMS, SAMPLES = 3, 2


@functools.cache
def known(*words):
    """A configuration, read once."""
    return g.read_config(f"group.problems={PROBLEMS}", *words)


def limit(lag, late="wait"):
    """Words of a configuration."""
    return f"rollout.step_limit.lag={lag}", f"rollout.step_limit.late={late}"


class FakeEngine:
    """Rows end in a random order; a token is drawn in every call, with the version of that moment."""

    take_stats = RolloutStats

    def __init__(self, seed):
        self.rng, self.version, self.rows = np.random.default_rng(seed), 0, {}
        self.tickets, self.released = itertools.count(), 0
        self.ended, self.finished, self.submitted = [], [], []

    def submit(self, sampler, requests):
        assert sampler == self.version
        rows = [replace(request, count=1, first_sample=s) for request in requests for s in request.samples]
        tickets = [next(self.tickets) for _ in rows]
        for ticket, row in zip(tickets, rows, strict=True):
            past = [] if row.resume is None else row.resume.versions[row.resume.policy_mask].tolist()
            self.rows[ticket] = [row, [*past, self.version]]
        self.submitted += rows
        return tickets

    def ends(self):
        return [ticket for ticket in self.rows if self.rng.random() < 0.2]

    def leave(self, tickets):
        """(ticket, trajectory) of rows that end, after those that were cancelled."""
        out = self.ended + [(ticket, self.trajectory(ticket, "answer")) for ticket in tickets]
        self.ended, self.rows = [], {t: row for t, row in self.rows.items() if t not in tickets}
        return out

    def evaluate(self):
        """Some rows end during a batch; the next call of `advance` returns them alone."""
        ended, self.ended = self.ended, []
        self.finished += self.leave(self.ends())
        self.ended = ended

    def advance(self, timeout_s=np.inf):
        if self.finished:
            out, self.finished = self.finished, []
            return out
        for _, versions in self.rows.values():
            versions.append(self.version)
        ends = self.ends()
        return self.leave([min(self.rows)] if not ends and timeout_s and self.rows else ends)

    def trajectory(self, ticket, stop):
        row, versions = self.rows[ticket]
        made = make_trajectory(np.random.default_rng(ticket), row.first_sample, turns=1, width=2)
        zeros, versions = np.zeros(2 + len(versions), np.int32), np.array([-1, -1, *versions], np.int32)
        arrays = {"tokens": zeros, "policy_mask": versions >= 0, "logprobs": zeros * np.float32(0)}
        return replace(made, **arrays, versions=versions, prompt_length=2, turns=(), stop=stop)

    def cut(self, ticket):
        return dict(self.finished).get(ticket) or self.trajectory(ticket, "cancelled")

    def cancel(self, ticket):
        if ticket in self.rows:
            self.ended.append((ticket, self.trajectory(ticket, "cancelled")))
            del self.rows[ticket]

    def release(self):
        assert not self.rows
        self.released += 1


class Problems:
    """An endless stream of problems that can be counted."""

    def __init__(self, count):
        self.count, self.drawn = count, 0

    def __next__(self):
        self.drawn += self.count
        return [g.Problem(f"p{i}", "?", "1", "t") for i in range(self.drawn - self.count, self.drawn)]

    def get_state(self):
        return {"drawn": self.drawn}

    def set_state(self, state):
        self.drawn = state["drawn"]


def score_all(problems, rollouts):
    """The same verdict for all that ended."""
    verdict = make_group(0, 1).verdicts[0]
    ended = [tuple(t for t in rows if t.stop != "cancelled") for rows in rollouts]
    groups = (g.Group(problem, rows, (verdict,) * len(rows)) for problem, rows in zip(problems, ended, strict=True))
    return SimpleNamespace(groups=tuple(groups), counts={"correct": sum(map(len, ended))}, faults=())


def open_wave(config, chat, wave):
    """Requests without text: under one prompt, or each under its own."""
    parts = [[SAMPLES], [1] * SAMPLES]
    return [g.RolloutRequest(p, i, count) for i, p in enumerate(wave.problems) for count in parts[i % 2]]


def sampling_on(engine, config, processes=None):
    """The group sampler of a configuration on an engine that computes nothing, without prompts and tools."""
    sampler, scorer = g.Sampler.of(engine, None, None), SimpleNamespace(score_all=score_all)
    sampler.submission = lambda requests, options: (
        [replace(request, step=options.step) if request.step is None else request for request in requests],
    )
    return GroupSampler(sampler, scorer, processes or Processes(), config.resample, config.group.size)


def fresh_run(config):
    return RunState("state", (), Problems(config.group.problems), g.initial_state(config))


def opened(config, seed, processes=None):
    """(stream, run, engine) of a configuration on an engine that computes nothing."""
    engine = FakeEngine(seed)
    parts = sampling_on(engine, config, processes), SimpleNamespace(size=1)
    return RolloutStream(config, *parts, open_wave=open_wave), fresh_run(config), engine


def play(stream, run, engine, steps, rng, *, again=0.0, evaluates=False):
    """Steps with work in their updates, some with a second round: (step and samples of each round, rows dropped).
    `evaluates`: each step begins with an evaluation."""
    rounds, dropped = [], 0
    for _ in range(steps):
        engine.version = run.step
        if evaluates:
            engine.evaluate()
        for _ in range(1 + int(rng.random() < again)):
            rounds.append((run.step, stream.next_round(run, run.step)))
        for _ in range(rng.integers(4)):
            if stream.meanwhile is not None:
                stream.meanwhile()
        dropped += stream.after_update(run, rounds[-1][1].groups, {})[0]["rollout/dropped_stale"]
        run.step += 1
    return rounds, dropped


def check_taken(rounds, lag, late="wait"):
    """Steps take so many groups each: none twice, none too old, and whole ones unless late rows are dropped. Returns
    the numbers of their problems."""
    for trained, samples in rounds:
        assert len(samples.groups) == PROBLEMS and age_metrics(samples.groups, trained)["rollout/lag_max"] <= lag
        for group in samples.groups:
            assert late == "drop" or sorted(t.sample for t in group.trajectories) == list(range(SAMPLES))
    numbers = [int(group.problem.uid[1:]) for _, samples in rounds for group in samples.groups]
    assert len(numbers) == len(set(numbers))
    return numbers


def check_keys(engines):
    """No two rows that any of these engines was given have the same random key. Returns all of their requests."""
    requests = [request for engine in engines for request in engine.submitted]
    assert len({(r.step, r.place, r.first_sample) for r in requests}) == len(requests)
    return requests


def contents(batches):
    """Problems, samples and versions of what was taken, a list a step."""
    steps = [[(group.problem.uid, group.trajectories) for group in samples.groups] for _, samples in batches]
    return [[(uid, [(t.sample, t.versions.tolist()) for t in rows]) for uid, rows in groups] for groups in steps]


class Thread(Processes):
    """A thread as a process; in its hall the threads of a test meet."""

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


def in_threads(count, worker):
    """What `worker(processes)` returns in each of so many processes."""
    if count == 1:
        return [worker(Processes())]
    hall = SimpleNamespace(values=[b""] * count, texts={}, barrier=threading.Barrier(count, timeout=120))
    hall.again = threading.Barrier(count, hall.texts.clear)

    def alone(process):
        try:
            return worker(process)
        except BaseException as error:
            if not isinstance(error, Preempted):
                hall.barrier.abort()  # the others end too
            raise

    with ThreadPoolExecutor(count) as pool:
        running = [pool.submit(alone, Thread(index, hall)) for index in range(count)]
        return [each.result() for each in running]
