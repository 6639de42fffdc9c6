"""Processes that sample as one: equal numbers, one leader, and what happens when one of them ends."""

import json
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from queue import Queue
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_roc_jax.config import Config
from grpo_roc_jax.engine.config import RolloutConfig, StreamedRows
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh, processes_together
from grpo_roc_jax.planner import plan as planning
from grpo_roc_jax.planner.topology import parse_topology
from grpo_roc_jax.pod.preemption import Preempted
from grpo_roc_jax.pod.processes import ProcessLost
from grpo_roc_jax.pod.team import Team
from grpo_roc_jax.record.metrics import read_metrics
from grpo_roc_jax.run.components import check_together
from tests.pod.test_processes import assert_same_run, ended, said, start, wait_for_step

CALLS = [(("append", 1, 16), [np.arange(6).reshape(2, 3)]), (("decode", 4), [np.zeros((10, 4), np.int32)])]


class Service:
    """The key-value store of the coordination service; strangers connect first."""

    def __init__(self, pool):
        self.values, self.pool, self.refused = Queue(), pool, None
        self.blocking_key_value_get = lambda key, timeout_ms: self.values.get(timeout=30)
        self.key_value_delete = lambda key: None

    def key_value_set(self, key, value):
        _, port, _ = json.loads(value)
        socket.create_connection(("127.0.0.1", port)).close()
        self.refused = self.pool.submit(Client, ("127.0.0.1", port), authkey=b"guessed")
        self.values.put(value)
        self.values.put(value)


@pytest.fixture
def team():
    """Processes 3 to 5 of a run."""
    with ThreadPoolExecutor(4) as pool:
        service = Service(pool)
        shared = {"together": 3, "service": service, "service_address": "127.0.0.1:9"}
        gone = "process 4 of 6 is gone"
        views = [SimpleNamespace(index=index, missing=lambda: gone, **shared) for index in (3, 4, 5)]
        members = [made.result(30) for made in [pool.submit(Team, view) for view in views]]
        assert isinstance(service.refused.exception(30), AuthenticationError | OSError | EOFError)
        yield members
        for member in members:
            member.close()


def test_calls_reach_all_in_order_until_the_leader_has_sampled_or_learns_that_one_is_gone(team):
    leader, *others = team
    assert [member.leads for member in team] == [True, False, False]
    for _ in range(2):
        with leader.leading() as send:
            for call in CALLS:
                send(call)
        for other in others:
            received = list(other.calls())
            assert [key for key, _ in received] == [key for key, _ in CALLS]
            np.testing.assert_equal([arrays for _, arrays in received], [arrays for _, arrays in CALLS])
    leader, other, _ = team
    other.close()
    with pytest.raises(ProcessLost, match="process 4 of 6 is gone"), leader.leading() as send:
        for _ in range(100):  # the first is lost in the kernel's buffer
            send(CALLS[0])
            time.sleep(0.01)


def test_a_leader_that_stops_fails_or_dies_ends_the_others(team):
    leader, *others = team
    with pytest.raises(Preempted), leader.leading() as send:
        send(CALLS[0])
        raise Preempted
    assert [len(list(other.calls())) for other in others] == [1, 1]
    with pytest.raises(KeyError), leader.leading():
        raise KeyError("row 7")
    for message in (r"process 3 failed while it sampled: 'row 7'", r"process 4 of 6 is gone \(EOFError"):
        for other in others:
            with pytest.raises(ProcessLost, match=message):
                list(other.calls())
        leader.close()


def devices(processes, each):
    return [SimpleNamespace(process_index=i // each, id=i, platform="cpu") for i in range(processes * each)]


def mesh(tensor, processes, each):
    size = processes * each
    return SimpleNamespace(shape={"tensor": tensor}, size=size, devices=np.array(devices(processes, each)))


def test_who_samples_together_and_what_a_team_cannot_do():
    together = {(1, 2, 2): 1, (2, 2, 2): 1, (4, 2, 2): 2, (4, 4, 2): 2, (8, 2, 4): 2}
    assert {sizes: processes_together(mesh(*sizes)) for sizes in together} == together
    with pytest.raises(ValueError, match="tensor = 4 does not divide the 6 devices of a process and is not a multiple"):
        make_mesh(ShardingConfig(tensor=4), devices(2, 6))
    topology = parse_topology("v5p:4x4x8")
    for tensor, members in ((4, 1), (8, 2), (32, 8)):
        config = Config(sharding=ShardingConfig(fsdp=4, tensor=tensor))
        planned = planning.planned_mesh(config, topology, arithmetic=True)
        assert processes_together(planned, planning.processes_of(planned, topology)) == members
        assert planning.work_of(config, planned, topology, 0.0).samplers * members == 32
    rollout, sharding = RolloutConfig(step_limit=StreamedRows()), ShardingConfig(tensor=2)
    config = SimpleNamespace(rollout=rollout, environment=None, sharding=sharding)
    with pytest.raises(ValueError, match=r"lets 2 processes sample as one, which excludes rollout.step_limit"):
        check_together(config, mesh(2, 2, 1))
    check_together(config, mesh(1, 2, 1))


WIDE = ("--sft.steps=8", "--batch.rows=8", "--model.heads=4", "--sharding.fsdp=1", "--sharding.tensor=4")
PAIRS = ("--sharding.fsdp=1", "--sharding.tensor=2")


@pytest.mark.slow
@pytest.mark.parametrize(("count", "devices", "words"), [(2, 2, WIDE), (4, 1, PAIRS)], ids=["one team", "two teams"])
def test_processes_that_sample_as_one_give_the_numbers_of_one_process(tmp_path, count, devices, words):
    """The second process follows: it would be killed where it ended a turn or called a tool."""
    words, faults = ("--steps=2", *words), {1: "rollout.turn=kill,tool.submit=kill"}
    assert ended(start(tmp_path / "alone", 1, count * devices, *words)) == [0], said(tmp_path / "alone")
    team = start(tmp_path / "team", count, devices, *words, faults=faults)
    assert ended(team) == [0] * count, said(tmp_path / "team")
    # float32 sums in another order; what they round depends on the kind of processor too
    pairs = assert_same_run(tmp_path / "team", tmp_path / "alone", 2, atol=3e-5)
    assert len(pairs) == 2 * 40 and any(record.trajectory.results for record, _ in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 0])
def test_a_signal_ends_both_with_the_state_saved_and_a_death_ends_the_other(tmp_path, victim):
    processes = start(tmp_path, 2, 1, "--steps=500", "--checkpoint.every=0", *PAIRS)
    wait_for_step(tmp_path, 2, processes)
    processes[victim].send_signal(signal.SIGTERM)
    assert ended(processes, 120) == [143, 143], said(tmp_path)
    done = max(row["step"] for row in read_metrics(tmp_path / "run"))
    processes = start(tmp_path, 2, 1, "--steps=500", "--resume=auto", *PAIRS)
    wait_for_step(tmp_path, int(done) + 1, processes)
    processes[victim].kill()
    killed = time.monotonic()
    statuses = ended(processes, 60)
    assert time.monotonic() - killed < 60
    assert statuses[victim] == -signal.SIGKILL and statuses[1 - victim] not in (0, None)
    text = said(tmp_path)
    if victim:
        assert f"process 1 ({socket.gethostname()}, pid {processes[1].pid}) of 2 is gone" in text or "unhealthy" in text
