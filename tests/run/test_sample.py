"""Sampling for a step: which rollouts are no longer needed, which process takes which, and that none gets lost."""

import contextlib
import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import grpo_roc_jax as g
from grpo_roc_jax.engine.config import PartialRows, RolloutConfig, StreamedRows
from grpo_roc_jax.engine.protocol import RolloutStats, RunOptions
from grpo_roc_jax.method.roc import Selector
from grpo_roc_jax.pod.processes import Processes
from grpo_roc_jax.process.points import injected
from grpo_roc_jax.run import sample
from grpo_roc_jax.run.buffer import RolloutBuffer
from grpo_roc_jax.run.sample import AccountsOpen, EarlyExit, ScoredRollouts, StepSamples, check_accounts
from grpo_roc_jax.train import main
from tests.helpers.samples import make_group, make_trajectory, make_verdict
from tests.test_train import TINY
from tests.test_train import shared_programs as shared_programs  # a fixture

PROBLEMS = [g.Problem(f"p{i}", "?", "1", "test") for i in range(3)]


class Scoring:
    """Makes a group of the rollouts of each problem; `fails` says of (uid, sample) whether it cannot be scored."""

    def __init__(self, fails=lambda uid, sample: False):
        self.fails, self.judged = fails, []

    def score_all(self, problems, rollouts):
        rng, groups = np.random.default_rng(0), []
        for problem, some in zip(problems, rollouts, strict=True):
            self.judged.append((problem, list(some)))
            rows = tuple(t for t in some if not self.fails(problem.uid, t.sample))
            groups.append(g.Group(problem, rows, tuple(make_verdict(rng, t) for t in rows)))
        return SimpleNamespace(groups=tuple(groups), counts={"correct": len(groups)}, faults=())


def sampling_of(engine, scorer=None, processes=None):
    """A sampler of groups around a scripted engine, which gets requests and options."""
    config, sampler = g.Config(), g.Sampler.of(engine, None, None)
    sampler.weights = "version 0"  # stands for what `publish` returned
    sampler.submission = lambda requests, options: (requests, options)
    parts = sampler, scorer or Scoring(), processes or Processes()
    return sample.GroupSampler(*parts, config.resample, config.group.size, None)


def scripted(limits, run, scorer=None):
    """A sampler of groups whose engine returns what `run` makes of the requests and options."""
    engine = SimpleNamespace(config=limits, run=lambda weights, *submission: (run(*submission), RolloutStats()))
    return sampling_of(engine, scorer)


def rows_of(*counts, **options):
    rng = np.random.default_rng(0)
    return [make_trajectory(rng, i, **options) for count in counts for i in range(count)]


@pytest.mark.parametrize(
    ("size", "resample", "outcomes", "cut"),
    [
        # Of four kept, two failures and two successes whatever the others are.
        (8, "roc", [True, False, True, False], [12, 13, 14, 15]),
        (8, "roc", [None] * 8, []),  # what cannot be judged fills no place
        (6, "roc", [False, True] * 3, []),
        (8, "max_variance", [False, True] * 4, []),
    ],
)
def test_a_group_is_cut_when_its_quota_is_decided_and_others_go_on(size, resample, outcomes, cut):
    """Groups without a quota run to their end. A trajectory is True, False, or None where it cannot be judged."""

    def scorer(problem, some):
        return SimpleNamespace(correct=np.array([t for t in some if t is not None], bool))

    requests = [g.RolloutRequest(problem, i, size) for i, problem in enumerate(PROBLEMS[:2])]
    exit_ = EarlyExit(scorer, Selector.read(resample), 4, requests)
    ends = [list(exit_(size + i, outcome)) for i, outcome in enumerate(outcomes)]
    assert ends == [[]] * (len(outcomes) - 1) + [cut]
    assert list(exit_(0, True)) == [], "the first group has only begun"
    assert not cut or list(exit_(14, None)) == [], "what was cut ends too"


@pytest.mark.parametrize(("purpose", "cancels"), [("train", True), ("evaluate", False)])
def test_rollouts_get_early_exit_where_they_train(purpose, cancels):
    given = []
    sampling = scripted(RolloutConfig(early_exit=True), lambda requests, options: given.append(options) or rows_of(2))
    sampling.sample_requests(None, [g.RolloutRequest(PROBLEMS[0], 0, 2)], RunOptions(3, purpose))
    assert isinstance(given[0].cancel_policy, EarlyExit) is cancels


def test_every_rollout_of_the_engine_reaches_the_scorer_under_its_problem():
    scorer, counts = Scoring(), (2, 3, 1)
    rows = rows_of(*counts)
    sampling = scripted(RolloutConfig(), lambda requests, options: rows, scorer)
    requests = [g.RolloutRequest(p, i, n) for i, (p, n) in enumerate(zip(PROBLEMS, counts, strict=True))]
    scored = sampling.sample_requests(None, requests, RunOptions(3))
    expected = [(PROBLEMS[0], rows[:2]), (PROBLEMS[1], rows[2:5]), (PROBLEMS[2], rows[5:])]
    assert scorer.judged == expected
    assert [(group.problem, list(group.trajectories)) for group in scored.groups] == expected


def test_groups_with_cut_rows_are_kept_unscored_and_come_back_whole():
    scorer, submitted, rows = Scoring(), [], rows_of(2, 2, turns=2)
    first = [replace(row, stop=stop) for row, stop in zip(rows, ("answer", "cancelled", "answer", "eos"), strict=True)]

    def collect(requests, options):
        submitted.append(requests)
        return given.pop(0)

    sampling = scripted(RolloutConfig(step_limit=PartialRows(9.0)), collect, scorer)
    requests = [g.RolloutRequest(p, i, 2, temperature=0.5) for i, p in enumerate(PROBLEMS[:2])]
    given = [first, [rows[3], rows[1], rows[2]]]
    cut = sampling.sample_requests(None, requests, RunOptions(3))
    assert [len(some) for _, some in scorer.judged] == [0, 2]
    assert [group.trajectories for group in cut.groups] == [(), tuple(first[2:])]
    (partial,) = cut.partial
    (request,) = partial.requests()
    assert (request.place, request.first_sample, request.step, request.temperature) == (0, 1, 3, 0.5)
    assert request.resume is first[1]
    samples = sampling.sample_requests(None, requests[1:], RunOptions(4), cut.partial)
    assert [r.resume is not None for r in submitted[-1] for _ in r.samples] == [True, False, False]
    assert samples.partial == () and len(samples.groups) == 1
    (late,) = samples.completed
    assert late.problem is PROBLEMS[0] and late.trajectories == (first[0], rows[3])


def test_what_a_session_held_is_not_kept():
    row = replace(rows_of(1)[0], stop="cancelled")
    assert sample.resumable(row)
    assert not sample.resumable(replace(row, stop="infrastructure"))
    turn = row.turns[0]
    in_session = replace(turn, results=(replace(turn.results[0], session_id="s"),))
    assert not sample.resumable(replace(row, turns=(in_session, *row.turns[1:])))


# ---- Requests that do not fit the slots of all processes go to the process that has a free slot first --------------

SLOTS, COUNTS = 3, (2, 2, 2, 2, 0, 3, 1)
REQUESTS = [g.RolloutRequest(g.Problem(f"p{i}", "?", "1", "test"), i, count) for i, count in enumerate(COUNTS)]


class Engine:
    """Rows that end one by one, in a random order."""

    def __init__(self):
        self.rng, self.rows, self.released = np.random.default_rng(0), {}, 0
        self.config, self.tickets = RolloutConfig(slots=SLOTS), itertools.count()

    def submit(self, sampler, requests, options):
        assert len(self.rows) < SLOTS, "a slot is free"
        rollouts = [(request.place, sample) for request in requests for sample in request.samples]
        tickets = [next(self.tickets) for _ in rollouts]
        self.rows |= zip(tickets, rollouts, strict=True)
        return tickets

    def advance(self):
        ticket = int(self.rng.choice([*self.rows]))
        index, sample_ = self.rows.pop(ticket)
        return [(ticket, replace(make_trajectory(np.random.default_rng(index), sample_), stop="answer"))]

    def take_stats(self):
        return RolloutStats(sampled_tokens=1)

    def release(self):
        self.rows, self.released = {}, self.released + 1


class OneOfTwo(Processes):
    """A process that shares counters with another one."""

    check_stop = service = None

    def __init__(self, index, counters):
        self.index, self.count, self.gathered = index, 2, []
        self.service = SimpleNamespace(
            key_value_increment=lambda key, by: next(counters.setdefault(key, itertools.count(1))),
            key_value_delete=lambda key: None,
        )

    def gather(self, value):
        self.gathered.append(value)
        return [value, ([], ScoredRollouts())]


def one_process(index, counters):
    """(taken, sampled) of a process that shares counters with another one, which returns nothing. One rollout cannot
    be scored."""
    engine, group = Engine(), OneOfTwo(index, counters)
    sampling = sampling_of(engine, Scoring(lambda *rollout: rollout == ("p5", 2)), group)
    with contextlib.suppress(KeyError):  # the other process has the rest
        sampling.sample_requests(None, REQUESTS, RunOptions(3))
    assert engine.released == 1
    return group.gathered[0]


def test_each_request_is_rolled_out_once_whoever_takes_it():
    counters = {}
    indices, sampled = one_process(0, counters)
    assert indices == [0, 2, 4 - 1, 4, 5, 6], "its share of the first three, and the others one by one"
    other, rest = one_process(1, counters)
    assert other == [1]
    assert [len(group.trajectories) for group in (*sampled.groups, *rest.groups)] == [2, 2, 2, 0, 2, 1, 2]
    assert [t.sample for t in sampled.groups[0].trajectories] == [0, 1], "in the order of samples"
    assert [(problem.uid, t.sample) for problem, t in sampled.removed] == [("p5", 2)]


def test_what_is_divided_before():
    """A queue that all processes share frees the engine at its end, with the rows of a stream that run on."""
    for settings, count, fixed in (({}, 2, 3), ({}, 1, 7), ({"step_limit": StreamedRows()}, 2, 7)):
        engine = SimpleNamespace(config=RolloutConfig(slots=3, **settings))
        sampling = sampling_of(engine, processes=SimpleNamespace(samplers=count))
        assert sample.divided_before(sampling, REQUESTS) == fixed


# ---- The buffer, and the accounts of a step ------------------------------------------------------------------------


def test_the_buffer_gives_the_oldest_first_and_its_state_is_a_copy():
    def uids(some):
        return [group.problem.uid[-1] for group in some]

    buffer, other, (a, b, c, d) = RolloutBuffer(), RolloutBuffer(), (make_group(seed, 2) for seed in range(4))
    buffer.add([a, b, c])
    assert len(buffer) == 3 and uids(buffer.take(1)) == ["0"]
    other.add([d])
    other.load(buffer.state())
    buffer.add([d])
    assert uids(buffer.take(9)) == ["1", "2", "3"] and buffer.take(1) == [] and buffer.counts == (4, 4, 0)
    assert uids(other.take(5)) == ["1", "2"] and (other.added, other.removed) == (3, 3)


def step():
    """Two groups of three, of which one is kept; one rollout was removed."""
    groups = (make_group(1, 3), make_group(2, 3))
    removed = ((groups[0].problem, groups[0].trajectories[0]),)
    wave = ScoredRollouts(groups, removed, {"correct": 6, "infrastructure": 1}, stats=RolloutStats(rollouts=7))
    selections = tuple(SimpleNamespace(reasons=("",) * 3, kept=kept) for kept in (True, False))
    rows = [SimpleNamespace(length=t.length) for t in groups[0].trajectories]
    placement = SimpleNamespace(length=[row.length for row in rows])
    batches = [SimpleNamespace(rows=rows, placement=placement)] * 2  # two passes
    return StepSamples(groups, selections, (wave,)), groups[:1], batches, (4, 4, 0), (5, 5, 0)


def lost_tokens(samples, trained, batches, *counts):
    short = SimpleNamespace(rows=batches[0].rows, placement=SimpleNamespace(length=[1, 1, 1]))
    return samples, trained, [short], *counts


LOSSES = {
    "rollouts .*: 7 and 6": lambda s, *rest: (replace(s, waves=(replace(s.waves[0], removed=()),)), *rest),
    "trajectories of the groups .*: 3 and 6": lambda s, *rest: (replace(s, groups=s.groups[:1]), *rest),
    "added to the buffer: 1 and 2": lambda *all: (*all[:4], (6, 6, 0)),
    "those that wait now .*: 1 and 0": lambda *all: (*all[:4], (5, 4, 0)),
    "trajectories taken = rows: 6 and 3": lambda s, g, b, *counts: (s, [*g, *g], b[:1], *counts),
    "tokens of the rows = packed: .* and 3": lost_tokens,
}


@pytest.mark.parametrize("message", LOSSES)
def test_what_is_lost_is_noticed(message):
    check_accounts(*step())
    with pytest.raises(AccountsOpen, match=message):
        check_accounts(*LOSSES[message](*step()))


@pytest.mark.slow
def test_a_group_that_gets_lost_ends_the_run_with_the_state_saved(tmp_path):
    with injected("selected=drop@2"), pytest.raises(AccountsOpen, match="added to the buffer: 2 and 1") as seen:
        main([*TINY, "--resume=auto", "--data.eval_problems=0", f"--run_dir={tmp_path}"])
    assert "the state after step 1 is saved" in seen.value.__notes__[0]
