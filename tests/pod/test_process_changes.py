"""A run goes on after one of four processes died, stood still or was slow, and with another number of them."""

import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from grpo_roc_jax.record import checkpoint_files as files
from grpo_roc_jax.record.metrics import read_metrics
from grpo_roc_jax.record.trace import read_trace
from tests.pod.test_processes import LIMIT_S, assert_same_params, ended, said, start, whole_text

STEPS = 6
DIVIDED = ("--group.problems=4", "--sft.steps=0")
"""As many rollouts as slots of four processes: none waits for the process that has a free one first."""


def stopped(process, others):
    """Waits until a process stands still; False if it or another one ends before."""
    while process.poll() is None and all(other.poll() is None for other in others):
        state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "T":
            return True
        time.sleep(0.1)
    return False


def assert_same_trajectories(folder, other, steps, atol):
    for step in range(1, steps + 1):
        pairs = zip(read_trace(folder / "run", step), read_trace(other / "run", step), strict=True)
        for ours, theirs in pairs:
            assert ours.trajectory.tokens.tolist() == theirs.trajectory.tokens.tolist()
            assert (ours.kept, ours.why, ours.verdict.reward) == (theirs.kept, theirs.why, theirs.verdict.reward)
            np.testing.assert_allclose(ours.trajectory.logprobs, theirs.trajectory.logprobs, atol=atol)
    assert_same_params(folder, other, atol)


@pytest.mark.slow
def test_one_of_four_is_killed_frozen_or_slow(tmp_path):
    """No process waits for ever, all say why they end, and the run goes on each time as if nothing had happened."""
    reference, folder = tmp_path / "whole", tmp_path / "faulty"
    assert ended(start(reference, 4, 1, f"--steps={STEPS}", *DIVIDED)) == [0] * 4, said(reference)
    words, done = (f"--steps={STEPS}", *DIVIDED, "--resume=auto", "--distributed.heartbeat_s=30"), []
    for victim, fault in ((0, "stop"), (0, "kill"), (2, "kill"), (2, "stop")):
        processes = start(folder, 4, 1, *words, faults={victim: f"sample={fault}@2"})
        dead = processes.pop(victim)
        if fault == "kill":
            assert dead.wait(LIMIT_S) == -signal.SIGKILL, said(folder)
        else:
            assert stopped(dead, processes), said(folder)
        since = time.monotonic()
        statuses = ended(processes)
        print(victim, fault, statuses, f"{time.monotonic() - since:.0f} s")
        assert 0 not in statuses and -signal.SIGKILL not in statuses, said(folder)
        for index in {0, 1, 2, 3} - {victim}:
            words_said = (folder / f"said_{index}.txt").read_text()
            assert re.search(r"is gone|stopped sending heartbeats|[Cc]oordination|distributed service", words_said)
        if fault == "stop":
            dead.send_signal(signal.SIGCONT)
            assert ended([dead]) not in ([0], [-signal.SIGKILL]), said(folder)
        done.append(max(row["step"] for row in read_metrics(folder / "run")))
    begun = time.monotonic()
    assert ended(start(folder, 4, 1, *words, faults={1: "rollout.chunk=sleep:0.2"})) == [0] * 4, said(folder)
    print(f"slow: {time.monotonic() - begun:.0f} s")
    assert done == sorted(done) and done[-1] >= 1 and "resumed after step" in whole_text(folder)
    assert_same_trajectories(folder, reference, STEPS, 0)
    hosts = [files.read_host(folder / f"run/checkpoints/step_{STEPS:08d}", index) for index in range(4)]
    for host, arrays in hosts[1:]:
        assert host == hosts[0][0], "another number of processes reads the state of the first"
        assert all(np.array_equal(arrays[name], array) for name, array in hosts[0][1].items())


@pytest.mark.slow
def test_a_run_goes_on_with_other_processes_and_another_mesh(tmp_path):
    alone, folder = tmp_path / "alone", tmp_path / "changed"
    assert ended(start(alone, 1, 4, "--steps=3")) == [0], said(alone)
    parts = [(1, 4, ()), (2, 2, ("--sharding.fsdp=4",)), (1, 2, ("--sharding.tensor=2",))]
    for steps, (count, devices, mesh) in enumerate(parts, 1):
        processes = start(folder, count, devices, f"--steps={steps}", "--resume=auto", *mesh)
        assert ended(processes) == [0] * count, said(folder)
    assert_same_trajectories(folder, alone, 3, 1e-5)


@pytest.mark.slow
def test_rows_that_a_deadline_cut_go_on_in_other_processes(tmp_path):
    """A step cuts its rows after a chunk or two of four; the processes change on the way."""
    folder = tmp_path / "cut"
    limit = ("--rollout.step_limit.kind=partial", "--rollout.step_limit.seconds=1", "--rollout.chunk=4")
    words = (*limit, "--group.problems=2", "--sft.steps=0", "--rollout.slots=64", "--resume=auto")
    words += ("--limits.empty_steps=99", "--limits.infrastructure_steps=99")
    changes = [(1, 2), (2, 4), (3, 6), (1, 8)]
    for count, steps in changes:
        slow = dict.fromkeys(range(count), "rollout.chunk=sleep:0.6")
        processes = start(folder, count, 1, *words, f"--steps={steps}", faults=slow)
        assert ended(processes) == [0] * count, said(folder)
        hosts = [files.read_host(folder / f"run/checkpoints/step_{steps:08d}", index)[0] for index in range(count)]
        assert hosts[0]["carried"] and all(host == hosts[0] for host in hosts)
    records = [record for step in range(1, 9) for record in read_trace(folder / "run", step)]
    drawn = [record.trajectory.versions[record.trajectory.policy_mask] for record in records]
    for _, change in changes[:-1]:
        assert any(versions.size and versions.min() < change <= versions.max() for versions in drawn), change
    sampled = [(record.problem.uid, record.trajectory.sample, record.trajectory.tokens.tobytes()) for record in records]
    assert len(sampled) == len(set(sampled))
