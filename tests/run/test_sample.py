"""Sampling for a step: which rollouts of a group are no longer needed."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_roc_jax.engine.config import PartialRows, RolloutConfig
from grpo_roc_jax.engine.protocol import RolloutStats, RunOptions
from grpo_roc_jax.method.roc import Selector
from grpo_roc_jax.pod.processes import Processes
from grpo_roc_jax.run import sample
from grpo_roc_jax.run.sample import EarlyExit
from grpo_roc_jax.types import Problem, RolloutRequest
from tests.helpers.group_sampling import Scoring, sampling_of
from tests.helpers.samples import make_trajectory

PROBLEMS = [Problem(f"p{i}", "?", "1", "test") for i in range(3)]


def early_exit(*sizes, keep=4, resample="roc"):
    """Groups of these sizes; a trajectory is True, False, or None where it cannot be judged."""

    def scorer(problem, some):
        return SimpleNamespace(correct=np.array([t for t in some if t is not None], bool))

    requests = [RolloutRequest(p, i, n) for i, (p, n) in enumerate(zip(PROBLEMS, sizes, strict=False))]
    return EarlyExit(scorer, Selector.read(resample), keep, requests)


def test_a_group_is_cut_when_its_quota_is_decided_and_others_go_on():
    exit_ = early_exit(8, 8)
    outcomes = [True, False, True, False]  # of four kept, two failures and two successes whatever the others are
    assert [list(exit_(8 + i, outcome)) for i, outcome in enumerate(outcomes)] == [[], [], [], [12, 13, 14, 15]]
    assert list(exit_(0, True)) == [], "the first group has only begun"
    assert list(exit_(14, None)) == [], "what was cut ends too"


def test_trajectories_that_cannot_be_judged_fill_no_place():
    exit_ = early_exit(8)
    assert not any(list(exit_(i, None)) for i in range(8))


@pytest.mark.parametrize(("size", "resample"), [(6, "roc"), (4, "none"), (8, "max_variance")])
def test_groups_without_a_quota_run_to_their_end(size, resample):
    exit_ = early_exit(size, resample=resample)
    assert not any(list(exit_(i, bool(i % 2))) for i in range(size))


def scripted(limits, run, scorer=None, progress=None):
    """A sampler of groups whose engine returns what `run` makes of the requests and options."""
    engine = SimpleNamespace(config=limits, run=lambda weights, *submission: run(*submission))
    sampling = sampling_of(engine, scorer, progress=progress)
    sampling.sampler.submission = lambda requests, options: (requests, options)
    return sampling


@pytest.mark.parametrize(
    ("early", "purpose", "cancels"), [(True, "train", True), (True, "evaluate", False), (False, "train", False)]
)
def test_rollouts_get_the_display_of_the_run_and_early_exit_where_they_train(early, purpose, cancels):
    given = []

    def collect(*arguments):
        given.append(arguments[-1])
        return [make_trajectory(np.random.default_rng(0), i) for i in range(2)], RolloutStats()

    sampling = scripted(RolloutConfig(early_exit=early), collect, progress="display")
    requests = [RolloutRequest(PROBLEMS[0], 0, 2)]
    sampling.sample_requests(None, requests, RunOptions(3, purpose))
    assert given[-1].progress == "display"
    assert isinstance(given[-1].cancel_policy, EarlyExit) is cancels
    sampling.sample_requests(None, requests, RunOptions(3, purpose, progress="own"))
    assert given[-1].progress == "own"


def test_every_rollout_of_the_engine_reaches_the_scorer_under_its_problem():
    rng, scorer, counts = np.random.default_rng(0), Scoring(), (2, 3, 1)
    rows = [make_trajectory(rng, i) for count in counts for i in range(count)]
    sampling = scripted(RolloutConfig(), lambda requests, options: (rows, RolloutStats()), scorer)
    requests = [RolloutRequest(p, i, n) for i, (p, n) in enumerate(zip(PROBLEMS, counts, strict=True))]
    scored = sampling.sample_requests(None, requests, RunOptions(3))
    expected = [(PROBLEMS[0], rows[:2]), (PROBLEMS[1], rows[2:5]), (PROBLEMS[2], rows[5:])]
    assert scorer.judged == expected
    assert [(group.problem, list(group.trajectories)) for group in scored.groups] == expected


def test_groups_with_cut_rows_are_kept_unscored_and_come_back_whole():
    rng, scorer, submitted = np.random.default_rng(0), Scoring(), []
    rows = [make_trajectory(rng, i % 2, turns=2) for i in range(4)]
    first = [replace(row, stop=stop) for row, stop in zip(rows, ("answer", "cancelled", "answer", "eos"), strict=True)]

    def collect(requests, options):
        submitted.append(requests)
        return given.pop(0), RolloutStats()

    sampling = scripted(RolloutConfig(step_limit=PartialRows(9.0)), collect, scorer)
    requests = [RolloutRequest(p, i, 2, temperature=0.5) for i, p in enumerate(PROBLEMS[:2])]
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


def test_the_oldest_groups_go_on_first_so_that_every_rollout_ends():
    """Each step begins two groups of two rollouts, and has the time for two rollouts."""
    rng = np.random.default_rng(0)

    def collect(requests, options):
        rows = [make_trajectory(rng, i) for request in requests for i in request.samples]
        return [replace(row, stop="answer" if i < 2 else "cancelled") for i, row in enumerate(rows)], RolloutStats()

    ended, partial = [], ()
    sampling = scripted(RolloutConfig(step_limit=PartialRows(9.0)), collect)
    for step in range(6):
        problems = [Problem(f"{step}.{index}", "?", "1", "test") for index in range(2)]
        requests = [RolloutRequest(problem, index, 2) for index, problem in enumerate(problems)]
        samples = sampling.sample_requests(None, requests, RunOptions(step), partial)
        ended += [group.problem.uid for group in (*samples.groups, *samples.completed) if group.size]
        partial = samples.partial
    assert ended == ["0.0", "0.1", "1.0", "1.1", "2.0", "2.1"]


def test_partial_groups_are_shared_out_and_are_the_same_in_all_processes():
    rng = np.random.default_rng(0)
    rows = [replace(make_trajectory(rng, i), stop="cancelled") for i in range(3)]
    before = [replace(problem, uid=f"old {problem.uid}") for problem in PROBLEMS]
    old = [sample.PartialGroup(p, (row,), 2, i, None) for i, (p, row) in enumerate(zip(before, rows, strict=True))]
    requests = [RolloutRequest(p, i, 1) for i, p in enumerate(PROBLEMS)]
    uids = []

    def collect(submitted, options):
        resumed = [request for request in submitted if request.resume is not None]
        uids.append([request.problem.uid for request in resumed])
        stops = ["answer", *["cancelled"] * len(resumed)][: len(resumed)]  # the first of them ends
        ended = [replace(row, stop="answer") for row in rows[: len(submitted) - len(resumed)]]
        return [*(replace(r.resume, stop=s) for r, s in zip(resumed, stops, strict=True)), *ended], RolloutStats()

    limits, nothing = RolloutConfig(step_limit=PartialRows(seconds=1.0)), Scoring(lambda *_: True)
    parts = []
    for index in (0, 1, 0):  # each process's share, then everything again with both
        processes = Processes()
        processes.index, processes.count = index, 2
        processes.gather = lambda part: parts.append(part) or parts[:2]
        sampling = replace(scripted(limits, collect, nothing), processes=processes)
        samples = sampling.sample_requests(None, requests, RunOptions(3), old)
    assert uids[:2] == [["old p0", "old p2"], ["old p1"]]
    assert [group.problem.uid for group in samples.completed] == ["old p0", "old p1"]
    assert [problem.uid for problem, _ in samples.removed] == ["p0", "p1", "p2", "old p0", "old p1"]
    assert [group.problem.uid for group in samples.partial] == ["old p2"]
    assert [group.problem for group in samples.groups] == PROBLEMS


def test_what_a_session_held_is_not_kept():
    row = replace(make_trajectory(np.random.default_rng(0), 0), stop="cancelled")
    assert sample.resumable(row)
    assert not sample.resumable(replace(row, stop="infrastructure"))
    turn = row.turns[0]
    in_session = replace(turn, results=(replace(turn.results[0], session_id="s"),))
    assert not sample.resumable(replace(row, turns=(in_session, *row.turns[1:])))
