"""A run goes on after one of four processes died, stood still or was slow, and with another number of them."""

import os
import re
import signal
import time

import numpy as np
import pytest
from test_processes import ended, params_of, said, start, whole_text

from grpo_roc_jax.record import checkpoint_files as files
from grpo_roc_jax.record.metrics import read_metrics
from grpo_roc_jax.record.trace import read_trace

STEPS = 6
BOUND_S = 90
"""Heartbeats of 10 s, the roll call, and much room for a machine under load."""


def same_trajectories(folder, other, steps, exact):
    for step in range(1, steps + 1):
        pairs = zip(read_trace(folder / "run", step), read_trace(other / "run", step), strict=True)
        for one, two in pairs:
            assert one.trajectory.tokens.tolist() == two.trajectory.tokens.tolist()
            assert (one.kept, one.why, one.verdict.reward) == (two.kept, two.why, two.verdict.reward)
            np.testing.assert_allclose(one.trajectory.logprobs, two.trajectory.logprobs, atol=0 if exact else 1e-5)
    for one, two in zip(params_of(folder), params_of(other), strict=True):
        np.testing.assert_allclose(one, two, atol=0 if exact else 1e-5)


@pytest.mark.slow
def test_one_of_four_is_killed_frozen_or_slow(tmp_path):
    """No process waits for ever, all say why they end, and the run goes on each time as if nothing had happened."""
    whole, folder = tmp_path / "whole", tmp_path / "faulty"
    assert ended(start(whole, 4, 1, f"--steps={STEPS}")) == [0] * 4, said(whole)
    words, done = (f"--steps={STEPS}", "--resume=auto", "--distributed.heartbeat_s=10"), []
    for victim, fault in ((0, "stop"), (0, "kill"), (2, "kill"), (2, "stop")):
        processes = start(folder, 4, 1, *words, faults={victim: f"sample={fault}@2"})
        dead = processes.pop(victim)
        if fault == "kill":
            assert dead.wait(400) == -signal.SIGKILL, said(folder)
        else:
            assert os.waitpid(dead.pid, os.WUNTRACED)[1] == signal.SIGSTOP << 8 | 0x7F, said(folder)
        since = time.monotonic()
        statuses = ended(processes, BOUND_S)
        print(victim, fault, statuses, f"{time.monotonic() - since:.0f} s")
        assert 0 not in statuses and -signal.SIGKILL not in statuses, said(folder)
        for index in {0, 1, 2, 3} - {victim}:
            words_said = (folder / f"said_{index}.txt").read_text()
            assert re.search(r"is gone|stopped sending heartbeats|[Cc]oordination|distributed service", words_said)
        if fault == "stop":
            dead.send_signal(signal.SIGCONT)
            assert ended([dead], BOUND_S) != [0], said(folder)
        done.append(max(row["step"] for row in read_metrics(folder / "run")))
    begun = time.monotonic()
    assert ended(start(folder, 4, 1, *words, faults={1: "rollout.chunk=sleep:0.2"})) == [0] * 4, said(folder)
    print(f"slow: {time.monotonic() - begun:.0f} s")
    assert done == sorted(done) and done[-1] >= 1 and "resumed after step" in whole_text(folder)
    same_trajectories(folder, whole, STEPS, exact=True)
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
    same_trajectories(folder, alone, 3, exact=False)
