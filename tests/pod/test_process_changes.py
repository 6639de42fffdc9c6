"""A run goes on after one of four processes died, stood still or was slow, with another number of them, and with
rollouts that run on."""

import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from grpo_roc_jax.record import checkpoint_files as files
from grpo_roc_jax.record import metrics, trace
from tests.pod.test_processes import LIMIT_S, assert_same_params, assert_same_run, ended, said, start, wait_for_step

STEPS = 6
DIVIDED = ("--group.problems=4", "--sft.steps=0")
"""As many rollouts as slots of four processes: none waits for the process that has a free one first."""


def assert_same_trajectories(folder, other, steps, atol):
    assert_same_run(folder, other, steps, atol, metrics=False)
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
            while Path(f"/proc/{dead.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
                assert all(process.poll() is None for process in processes), said(folder)
                time.sleep(0.1)
        assert not {0, -signal.SIGKILL} & {*ended(processes)}, said(folder)
        for index in {0, 1, 2, 3} - {victim}:
            words_said = (folder / f"said_{index}.txt").read_text()
            assert re.search(r"is gone|stopped sending heartbeats|[Cc]oordination|distributed service", words_said)
        if fault == "stop":
            dead.send_signal(signal.SIGCONT)
            assert ended([dead]) not in ([0], [-signal.SIGKILL]), said(folder)
        done.append(max(row["step"] for row in metrics.read_metrics(folder / "run")))
    assert ended(start(folder, 4, 1, *words, faults={1: "rollout.chunk=sleep:0.2"})) == [0] * 4, said(folder)
    assert done == sorted(done) and done[-1] >= 1 and "resumed after step" in said(folder)
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
    records = [record for step in range(1, 9) for record in trace.read_trace(folder / "run", step)]
    drawn = [record.trajectory.versions[record.trajectory.policy_mask] for record in records]
    for _, change in changes[:-1]:
        assert any(versions.size and versions.min() < change <= versions.max() for versions in drawn), change
    sampled = [(record.problem.uid, record.trajectory.sample, record.trajectory.tokens.tobytes()) for record in records]
    assert len(sampled) == len(set(sampled))


@pytest.mark.slow
def test_without_a_lag_the_tokens_are_those_of_one_process(tmp_path):
    runs = {"alone": (1, 2, "none"), "several": (2, 1, "{kind: stream, lag: 0}")}
    for name, (count, devices, limit) in runs.items():
        words = "--steps=2", "--group.dynamic_sampling_rounds=1", f"--rollout.step_limit={limit}"
        assert ended(start(tmp_path / name, count, devices, *words)) == [0] * count, said(tmp_path / name)
    assert len(assert_same_run(tmp_path / "several", tmp_path / "alone", 2)) >= 2 * 40


@pytest.mark.slow
def test_two_processes_with_a_lag_are_stopped_and_one_goes_on(tmp_path):
    words = "--rollout.step_limit=stream", "--eval.every=2", "--checkpoint.every=0"
    two = start(tmp_path, 2, 1, "--steps=500", *words)
    wait_for_step(tmp_path, 3, two)
    two[1].send_signal(signal.SIGTERM)
    assert ended(two, 120) == [143, 143], said(tmp_path)
    steps = int(max(row["step"] for row in metrics.read_metrics(tmp_path / "run"))) + 2
    assert ended(start(tmp_path, 1, 2, f"--steps={steps}", *words, "--resume=auto")) == [0], said(tmp_path)
    rows = [row for row in metrics.read_metrics(tmp_path / "run") if "rollout/lag_max" in row]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert max(row["rollout/lag_max"] for row in rows) == 1.0
    uids = []
    for step in range(1, steps + 1):
        records = list(trace.read_trace(tmp_path / "run", step))
        assert len(records) == 40, "groups are whole"
        uids += sorted({record.problem.uid for record in records})
        for record in records:
            versions = record.trajectory.versions[record.trajectory.policy_mask]
            assert (np.diff(versions) >= 0).all() and step - 1 - versions.min() <= 1
    assert len(uids) == len(set(uids)) == 5 * steps
