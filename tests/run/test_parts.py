"""Scored parts of an evaluation on disk, and the counts of solved problems."""

import resource
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_roc_jax.pod.processes import Processes
from grpo_roc_jax.process.progress import narrated
from grpo_roc_jax.run.evaluate import Parts, count_solved, read_counts, sample_parts
from grpo_roc_jax.run.sample import ScoredRollouts
from grpo_roc_jax.settings.cli import ConfigError
from tests.helpers.method_groups import make_group, make_trajectory

GROUPS = [make_group(pay, uid=uid) for uid, pay in {"a": [1, 0], "b": [1, 1], "c": [0, 0], "d": [1, 0]}.items()]
PROBLEMS = [group.problem for group in GROUPS]


class Sampling:
    """Gives the groups of the requested places, and fails after so many calls."""

    rollout, processes = SimpleNamespace(slots=1), Processes()

    def __init__(self, calls):
        self.calls, self.places = calls, []

    def sample_requests(self, weights, requests, options):
        if not self.calls:
            raise KeyboardInterrupt
        self.calls -= 1
        self.places.append([request.place for request in requests])
        removed = ((PROBLEMS[1], make_trajectory(sample=1)),)
        groups = [GROUPS[request.place] for request in requests]
        if GROUPS[1] not in groups:
            return ScoredRollouts(tuple(groups))
        return ScoredRollouts(tuple(g if g is not GROUPS[1] else make_group([1], uid="b") for g in groups), removed)


def rewards(scored):
    return [(group.problem.uid, group.rewards.tolist()) for group in scored.groups], [p.uid for p, _ in scored.removed]


def sampled(folder, sampling, fills=4, said=None):
    """By default parts of two problems, whose two rollouts fill one slot four times."""
    parts = Parts(folder, ["policy"], fills=fills)
    with narrated([].append if said is None else said.append):
        return sample_parts(sampling, None, PROBLEMS, 2, None, parts)


def test_parts_that_are_there_are_not_sampled_again(tmp_path):
    full = sampled(tmp_path / "whole", Sampling(9))
    assert rewards(full) == ([("a", [1, 0]), ("b", [1]), ("c", [0, 0]), ("d", [1, 0])], ["b"])
    with pytest.raises(KeyboardInterrupt):
        sampled(tmp_path, Sampling(1))
    resumed = sampled(tmp_path, rest := Sampling(9), said=(said := []))
    assert any("problem 2 of 2" in line for line in said), "what is left is counted, for its rate and the time left"
    assert rest.places == [[2, 3]] and rewards(resumed) == rewards(full)
    assert resumed.groups[0].problem is PROBLEMS[0]
    np.testing.assert_array_equal(resumed.groups[0].trajectories[1].tokens, GROUPS[0].trajectories[1].tokens)
    assert rewards(sampled(tmp_path, rest, fills=2)) == rewards(full), "parts of another size are sampled"
    assert rest.places[1:] == [[0], [1], [2], [3]]
    with pytest.raises(ConfigError, match="another policy"):
        Parts(tmp_path, ["other"])


def test_a_start_on_a_full_disk_leaves_nothing_that_refuses_the_next(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            Parts(tmp_path, ["policy"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert rewards(sampled(tmp_path, Sampling(9)))[1] == ["b"]


def test_counts_go_on_after_a_row_that_was_cut(tmp_path):
    path, rest = tmp_path / "counts.jsonl", Sampling(9)

    def count(sampling):
        return count_solved(path, sampling, lambda: None, PROBLEMS, 2, 0, fills=2)

    with pytest.raises(KeyboardInterrupt):
        count(Sampling(2))
    path.write_bytes(path.read_bytes() + b'{"step": 2, "uid": "c"')
    counts = count(rest)
    assert rest.places == [[2], [3]] and counts == {"a": (1, 2), "b": (1, 1), "c": (0, 2), "d": (1, 2)}
    assert read_counts(path) == counts and count(rest) == counts
    for samples, step in ((3, 0), (2, 5)):  # counts of other numbers of rollouts, or of another policy
        sampling = Sampling(9)
        count_solved(path, sampling, lambda: None, PROBLEMS, samples, step, fills=9)
        assert list(chain(*sampling.places)) == [0, 1, 2, 3]
