"""A stream of rollouts on an engine that computes nothing: rows end at random, a call draws a token."""

import functools
import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from grpo_roc_jax.config import read_config
from grpo_roc_jax.engine.protocol import RolloutStats
from grpo_roc_jax.method.compose import initial_state
from grpo_roc_jax.pod.processes import Processes
from grpo_roc_jax.rollout.sampler import Sampler
from grpo_roc_jax.run.run_state import RunState
from grpo_roc_jax.run.sample import GroupSampler
from grpo_roc_jax.stream.rollout_stream import RolloutStream, age_metrics
from grpo_roc_jax.types import Group, Problem, RolloutRequest
from tests.helpers.samples import make_group, make_trajectory

PROBLEMS, SAMPLES = 3, 2


@functools.cache
def known(*words):
    """A configuration, read once."""
    return read_config(f"group.problems={PROBLEMS}", *words)


def limit(lag, late="wait"):
    """Words of a configuration."""
    return f"rollout.step_limit.lag={lag}", f"rollout.step_limit.late={late}"


class FakeEngine:
    """Rows end in a random order; a token is drawn in every call, with the version of that moment."""

    def __init__(self, seed):
        self.rng, self.version = np.random.default_rng(seed), 0
        self.rows: dict[int, list] = {}
        self.tickets, self.ended, self.released = itertools.count(), [], 0
        self.finished = []
        self.submitted: list[RolloutRequest] = []

    def submit(self, sampler, requests):
        assert sampler == self.version
        rows = [replace(request, count=1, first_sample=s) for request in requests for s in request.samples]
        tickets = [next(self.tickets) for _ in rows]
        for ticket, row in zip(tickets, rows, strict=True):
            past = [] if row.resume is None else row.resume.versions[row.resume.policy_mask].tolist()
            self.rows[ticket] = [row, [*past, self.version]]
        self.submitted += rows
        return tickets

    def evaluate(self):
        """Some rows end during a batch; the next call of `advance` returns them alone."""
        ends = [ticket for ticket in self.rows if self.rng.random() < 0.2]
        self.finished += [(ticket, self.trajectory(ticket, "answer")) for ticket in ends]
        self.rows = {ticket: row for ticket, row in self.rows.items() if ticket not in ends}

    def advance(self, timeout_s=np.inf):
        if self.finished:
            out, self.finished = self.finished, []
            return out
        for _, versions in self.rows.values():
            versions.append(self.version)
        ends = [ticket for ticket in self.rows if self.rng.random() < 0.2]
        if not ends and timeout_s and self.rows:
            ends = [min(self.rows)]
        out = self.ended + [(ticket, self.trajectory(ticket, "answer")) for ticket in ends]
        self.ended, self.rows = [], {t: row for t, row in self.rows.items() if t not in ends}
        return out

    def trajectory(self, ticket, stop):
        row, versions = self.rows[ticket]
        made = make_trajectory(np.random.default_rng(ticket), row.first_sample, turns=1, width=2)
        return replace(
            made,
            tokens=np.zeros(2 + len(versions), np.int32),
            policy_mask=np.arange(2 + len(versions)) >= 2,
            versions=np.array([-1, -1, *versions], np.int32),
            logprobs=np.zeros(2 + len(versions), np.float32),
            prompt_length=2,
            turns=(),
            stop=stop,
        )

    def cut(self, ticket):
        return dict(self.finished).get(ticket) or self.trajectory(ticket, "cancelled")

    def cancel(self, ticket):
        if ticket in self.rows:
            self.ended.append((ticket, self.trajectory(ticket, "cancelled")))
            del self.rows[ticket]

    def take_stats(self):
        return RolloutStats()

    def release(self):
        assert not self.rows
        self.released += 1


class Problems:
    """An endless stream of problems that can be counted."""

    def __init__(self, count):
        self.count, self.drawn = count, 0

    def __next__(self):
        self.drawn += self.count
        return [Problem(f"p{i}", "?", "1", "t") for i in range(self.drawn - self.count, self.drawn)]

    def get_state(self):
        return {"drawn": self.drawn}

    def set_state(self, state):
        self.drawn = state["drawn"]


class FakeScorer:
    """The same verdict for all that ended."""

    def score_all(self, problems, rollouts):
        verdict = make_group(0, 1).verdicts[0]
        ended = [tuple(t for t in rows if t.stop != "cancelled") for rows in rollouts]
        groups = (Group(problem, rows, (verdict,) * len(rows)) for problem, rows in zip(problems, ended, strict=True))
        return SimpleNamespace(groups=tuple(groups), counts={"correct": sum(map(len, ended))}, faults=())


def stepped(requests, options):
    """The requests with the step that they begin in, without prompts and tools."""
    return ([request if request.step is not None else replace(request, step=options.step) for request in requests],)


def open_wave(config, chat, wave):
    """Requests without text: under one prompt, or each under its own."""
    parts = [[SAMPLES], [1] * SAMPLES]
    return [RolloutRequest(p, i, count) for i, p in enumerate(wave.problems) for count in parts[i % 2]]


def sampling_on(engine, config, processes=None):
    """The group sampler of a configuration on an engine that computes nothing."""
    sampler = Sampler.of(engine, None, None)
    sampler.submission = stepped
    return GroupSampler(sampler, FakeScorer(), processes or Processes(), config.resample, config.group.size)


def fresh_run(config):
    return RunState("state", (), Problems(config.group.problems), initial_state(config))


def opened(config, seed, processes=None):
    """(stream, run, engine) of a configuration on an engine that computes nothing."""
    engine = FakeEngine(seed)
    mesh = SimpleNamespace(size=1)
    stream = RolloutStream(config, sampling_on(engine, config, processes), mesh, open_wave=open_wave)
    return stream, fresh_run(config), engine


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
        assert len(samples.groups) == PROBLEMS
        assert age_metrics(samples.groups, trained)["rollout/lag_max"] <= lag
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


def rows_of(rounds, stream):
    """(rows of groups that were trained on, rows of groups that are open)."""
    trained = sum(group.size for _, samples in rounds for group in samples.groups)
    return trained, sum(len(rows) for group in stream.open_groups for rows in group.rows)
