"""Trainers of one and two processes with Ray actors as samplers: the tokens of one process, though one is killed."""

import json
import os
import re
import signal
import time

import numpy as np
import pytest

from grpo_roc_jax.record.metrics import read_metrics
from grpo_roc_jax.record.trace import read_trace
from tests.pod.test_processes import SMALL, assert_same_run, ended, said, start, wait_for_step
from tests.test_train import even

pytestmark = pytest.mark.slow
ray = pytest.importorskip("ray", reason="the ray extra is not installed")

ROWS, PROBLEMS = 40, 5
SLOW = "--reward.functions=tests.contrib.samplers.test_samplers_of_trainer_processes:slow_even"
REMOTE = (SLOW, "--rollout.samplers=ray", "--rollout.samplers.count=2", "--rollout.samplers.timeout_s=300")
assert "--group.problems=5" in SMALL


def slow_even(problem, trajectories):
    """`even`, for as long as it takes to kill a sampler that has this group."""
    time.sleep(0.5)
    return even(problem, trajectories)


def joined(folder):
    """The numbers of the processes of samplers that have joined, as the events of the run name them."""
    text = (folder / "said_0.txt").read_text()
    return [int(number) for number in re.findall(r"sampler \d+ has joined: \S+, process (\d+)", text)]


def kill_a_sampler(folder, step, processes):
    """Kills a sampler that has joined, once the step is recorded."""
    wait_for_step(folder, step, processes)
    os.kill(joined(folder)[-1], signal.SIGKILL)


def total(folder, name):
    return sum(row.get(f"samplers/{name}", 0.0) for row in read_metrics(folder / "run"))


def trained_uids(folder, steps, lag):
    """The problems of each step, in whole groups with tokens that are not too old."""
    uids = []
    for step in range(1, steps + 1):
        records = list(read_trace(folder / "run", step))
        assert len(records) == ROWS, f"{len(records)} rows in step {step}"
        uids += sorted({record.problem.uid for record in records})
        for record in records:
            versions = record.trajectory.versions[record.trajectory.policy_mask]
            assert (np.diff(versions) >= 0).all() and 0 <= step - 1 - versions.min() <= lag
    return uids


LORA = "--lora={kind: low_rank, rank: 2}"
TRAINERS = [(1, "--sharding.fsdp=2"), (2, "--sharding.fsdp=2"), (2, "--sharding.tensor=2"), (2, LORA)]


@pytest.mark.parametrize(("count", "mesh"), TRAINERS)
def test_tokens_are_those_of_one_process_though_a_sampler_is_killed(tmp_path, count, mesh):
    """Weights that no process has alone are gathered for the samplers; with `tensor` both processes sample as one, but
    only in evaluations. What is sent of an adapter is the adapter."""
    alone, several = tmp_path / "alone", tmp_path / "several"
    assert ended(start(alone, 1, 2, "--steps=4", *[mesh] * (mesh == LORA))) == [0], said(alone)
    processes = start(several, count, 2 // count, "--steps=4", mesh, *REMOTE, "--rollout.step_limit.lag=0")
    kill_a_sampler(several, 1, processes)
    assert ended(processes) == [0] * count, said(several)
    assert len(trained_uids(several, 4, lag=0)) == 4 * PROBLEMS
    assert_same_run(several, alone, 4)
    assert json.loads((several / "run" / "summary.json").read_text())["compilations_after_first_step"] == 0
    assert total(several, "lost") == 1 and total(several, "joined") >= 2 and total(several, "groups_again") >= 1


@pytest.mark.parametrize(("number", "victim", "then"), [(signal.SIGTERM, 1, 1), (signal.SIGKILL, 0, 2)])
def test_a_trainer_that_is_ended_goes_on_with_other_samplers(tmp_path, number, victim, then):
    """Each problem is trained on once, before and after: with a lag of 1 its rows are in flight when a process dies.
    A sampler that was killed before has been replaced by then."""
    words = (*REMOTE, "--sharding.fsdp=2", "--rollout.step_limit.lag=1")
    processes = start(tmp_path, 2, 1, "--steps=500", *words)
    kill_a_sampler(tmp_path, 1, processes)
    for step in range(2, 100):
        wait_for_step(tmp_path, step, processes)
        if len(joined(tmp_path)) == 3:
            break
    before = joined(tmp_path)
    assert len(before) == 3, said(tmp_path)
    processes[victim].send_signal(number)
    statuses = ended(processes, 120)
    if number == signal.SIGTERM:
        assert statuses == [143, 143], said(tmp_path)
    else:
        assert statuses[victim] == -signal.SIGKILL and statuses[1 - victim] not in (0, None), said(tmp_path)
    done = int(max(row["step"] for row in read_metrics(tmp_path / "run")))
    again = start(tmp_path, then, 2 // then, f"--steps={done + 2}", *words, "--resume=auto")
    assert ended(again) == [0] * then, said(tmp_path)
    assert "resumed after step" in said(tmp_path)
    uids = trained_uids(tmp_path, done + 2, lag=1)
    assert len(uids) == len(set(uids)) == PROBLEMS * (done + 2)
    assert total(tmp_path, "lost") == 1 and not set(before) & set(joined(tmp_path)), "samplers of the run before"
    deadline = time.monotonic() + 30
    while alive := [pid for pid in before if os.path.exists(f"/proc/{pid}")]:
        assert time.monotonic() < deadline, f"samplers {alive} outlive their trainer"
        time.sleep(0.5)


def test_a_node_that_joins_samples_for_all_processes_and_one_that_is_lost_costs_its_rows(tmp_path, cluster):
    """The second sampler is pending until there is a node for it."""
    remote = (*REMOTE, f"--rollout.samplers.address={cluster.address}", "--rollout.step_limit.lag=1")
    processes = start(tmp_path, 2, 1, "--steps=500", *remote, "--checkpoint.every=0")

    def wait_until(reached):
        """The last step, once it is so."""
        for step in range(1, 500):
            wait_for_step(tmp_path, step, processes)
            if reached():
                return step
        raise AssertionError(said(tmp_path))

    wait_for_step(tmp_path, 2, processes)
    assert len(joined(tmp_path)) == 1
    node = cluster.add_node(num_cpus=1)
    wait_until(lambda: len(joined(tmp_path)) == 2)
    cluster.remove_node(node, allow_graceful=False)
    last = wait_until(lambda: total(tmp_path, "lost") == 1)
    wait_for_step(tmp_path, last + 1, processes)
    processes[1].send_signal(signal.SIGTERM)
    assert ended(processes, 120) == [143, 143], said(tmp_path)
    done = int(max(row["step"] for row in read_metrics(tmp_path / "run")))
    uids = trained_uids(tmp_path, done, lag=1)
    assert len(uids) == len(set(uids)) == PROBLEMS * done
    alive = [row["samplers/alive"] for row in read_metrics(tmp_path / "run") if "samplers/alive" in row]
    assert (alive[0], max(alive), alive[-1]) == (1, 2, 1)
