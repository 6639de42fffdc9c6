"""Several processes as one run: equal numbers, a common stop, and the name of a process that died."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_roc_jax.config import read_config
from grpo_roc_jax.engine.protocol import RolloutStats
from grpo_roc_jax.pod import processes as pod
from grpo_roc_jax.pod.notice import noticed
from grpo_roc_jax.pod.preemption import Preempted, Preemption
from grpo_roc_jax.process.points import VARIABLE
from grpo_roc_jax.record.metrics import read_metrics
from grpo_roc_jax.record.trace import read_trace
from grpo_roc_jax.run.sample import merge_stats
from grpo_roc_jax.settings.layers import ConfigError
from tests.test_train import params_of

ROOT = Path(__file__).resolve().parents[2]
SMALL = """
--group.problems=5 --group.size=4 --data.eval_problems=3 --model.d_model=16 --model.layers=1 --model.heads=2
--model.kv_heads=2 --model.head_dim=8 --model.d_ff=16 --rollout.slots=8 --rollout.max_prompt_tokens=24
--rollout.max_response_tokens=16 --rollout.append_lengths 16 --batch.row_length=160
--sft.steps=2 --sft.traces=7 --optim.schedule=constant --batch.rows=4 --tools.workers=1 --log.console=plain
--reward.functions tests.test_train:even --reward.truncated=score --optim.lr=0.01 --optim.warmup_steps=0
--checkpoint.every=1 --sharding.data=-1 --distributed.heartbeat_s=20 --optim.eps=1e-4
""".split()  # noqa: SIM905 (a command line reads better as one)
"""A large `optim.eps`: with the usual one Adam moves a parameter whose gradient is rounding alone by a whole step."""
LIMIT_S, WINDOW_S = 400, 5
MESHES = [(2, ""), (2, "--sharding.fsdp=4 --optim.offload=True"), (4, ""), (2, "--sharding.fsdp=2 --sharding.tensor=2")]
MESHES += [(2, "--sharding.sequence=2"), (2, "--sharding.sequence=4")]
"""Processes, and further settings."""


def start(folder: Path, count: int, devices: int, *more: str, faults: Mapping[int, str] = {}) -> list[subprocess.Popen]:
    """`count` processes of one run with `devices` virtual devices each; their output goes to files. `faults`: what is
    injected into a process, by its number. A first word `-c` begins other arguments of the interpreter."""
    training = ("-m", "grpo_roc_jax.train", *SMALL, f"--run_dir={folder / 'run'}")
    words = more if more[0] == "-c" else training + more
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder.mkdir(exist_ok=True)
    together = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(count)} if count > 1 else {}
    started = []
    for index in range(count):
        environ = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices)} | together
        environ |= {"JAX_PROCESS_ID": str(index)} if together else {}
        environ |= {VARIABLE: faults[index]} if index in faults else {}
        with open(folder / f"said_{index}.txt", "wb") as log:
            started.append(subprocess.Popen([sys.executable, *words], cwd=ROOT, env=environ, stdout=log, stderr=log))
    return started


def said(folder: Path) -> str:
    return "\n".join(f"== {path.name}\n{path.read_text()}" for path in sorted(folder.glob("said_*.txt")))


def ended(processes: list[subprocess.Popen], limit_s: float = LIMIT_S) -> list[int]:
    """Exit statuses; processes that all stand still for as long as the limit are killed. One that computes does not,
    however long a machine under load makes it wait."""
    used, since = 0.0, time.monotonic()
    try:
        while any(process.poll() is None for process in processes) and time.monotonic() - since < limit_s:
            begun, before = time.monotonic(), used
            while any(process.poll() is None for process in processes) and time.monotonic() - begun < WINDOW_S:
                time.sleep(0.1)
            used = sum(map(processor_s, processes))
            if used - before > WINDOW_S / 10:  # looking for signals and beating takes less
                since = time.monotonic()
    finally:
        for process in processes:
            process.kill()
    return [process.wait() for process in processes]


def processor_s(process: subprocess.Popen) -> float:
    """Processor time of a process, 0 after its end."""
    try:
        times = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    except OSError:
        return 0.0
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


def wait_for_step(folder: Path, step: int, processes: list[subprocess.Popen]) -> None:
    deadline = time.monotonic() + 3 * LIMIT_S
    metrics = folder / "run" / "metrics.jsonl"
    while not (metrics.exists() and any(row["step"] >= step for row in read_metrics(metrics))):
        assert all(process.poll() is None for process in processes), said(folder)
        assert time.monotonic() < deadline, said(folder)
        time.sleep(0.2)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Two steps by one process with four devices."""
    folder = tmp_path_factory.mktemp("alone")
    assert ended(start(folder, 1, 4, "--steps=2")) == [0], said(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("count", "mesh"), MESHES)
def test_processes_give_the_numbers_of_one(alone, tmp_path, count, mesh):
    folder = tmp_path / "several"
    assert ended(start(folder, count, 4 // count, "--steps=2", *mesh.split())) == [0] * count, said(folder)
    assert len(assert_same_run(folder, alone, 2, atol=1e-5)) == 2 * 40
    assert_same_params(folder, alone, 1e-5)


def assert_same_run(folder, other_folder, steps, atol=None, metrics=True):
    """Tokens, verdicts and selection of two runs are equal, and metrics up to rounding; with `atol` log-probabilities
    too. Returns pairs of records."""
    pairs = []
    for step in range(1, steps + 1):
        traces = (read_trace(path / "run", step) for path in (folder, other_folder))
        pairs += zip(*map(list, traces), strict=True)
    for record, other in pairs:
        for name in ("tokens", "versions"):
            assert getattr(record.trajectory, name).tolist() == getattr(other.trajectory, name).tolist()
        assert (record.kept, record.why, record.verdict.reward) == (other.kept, other.why, other.verdict.reward)
        if atol is not None:
            np.testing.assert_allclose(record.trajectory.logprobs, other.trajectory.logprobs, atol=atol)
    rows = zip(*(read_metrics(path / "run") for path in (folder, other_folder)), strict=True) if metrics else ()
    for ours, theirs in rows:
        for name in theirs:
            if name.startswith(("loss/", "roc/", "verdict/", "eval/", "rollout/stop", "rollout/reward")):
                assert ours[name] == pytest.approx(theirs[name], abs=1e-5, nan_ok=True), name
    return pairs


def assert_same_params(folder, other_folder, atol):
    runs = (folder / "run", other_folder / "run")
    for ours, theirs in zip(*(params_of(run, read_config(f"{run}/config.yaml"))[1] for run in runs), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=atol)


@pytest.mark.slow
def test_a_killed_process_ends_the_others_is_named_and_the_run_resumes(tmp_path):
    folder = tmp_path / "killed"
    processes = start(folder, 2, 1, "--steps=500")
    wait_for_step(folder, 2, processes)
    processes[1].kill()
    killed = time.monotonic()
    first, second = ended(processes, 60)
    assert time.monotonic() - killed < 60 and first != 0 and second == -signal.SIGKILL
    # By our roll call, or by the coordination service where that was quicker.
    ours = f"process 1 ({socket.gethostname()}, pid {processes[1].pid}) of 2 is gone"
    assert ours in said(folder) or re.search(r"unhealthy \(stopped sending heartbeats\):\s*\n1\b", said(folder))
    done = max(row["step"] for row in read_metrics(folder / "run"))
    again = start(folder, 2, 1, f"--steps={int(done) + 2}", "--resume=auto")
    assert ended(again) == [0, 0] and "resumed after step" in said(folder), said(folder)


@pytest.mark.slow
def test_a_signal_reaches_all_processes_in_the_middle_of_rollouts(tmp_path):
    """The rollouts of this step take minutes, and the process that is not signalled learns of it within a chunk."""
    folder = tmp_path / "cut"
    processes = start(folder, 2, 1, "--steps=500", "--group.problems=4000", "--batch.row_length=16384")
    wait_for_step(folder, 0, processes)
    time.sleep(15)  # the programs of training compile, then the rollouts of the first step begin
    processes[1].send_signal(signal.SIGTERM)
    signalled = time.monotonic()
    assert ended(processes, 120) == [143, 143], said(folder)
    assert time.monotonic() - signalled < 30
    assert list((folder / "run" / "checkpoints").glob("step_*"))
    assert max(row["step"] for row in read_metrics(folder / "run")) == 0


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 0])
def test_a_process_that_stands_still_does_not_end_the_run(tmp_path, victim):
    folder = tmp_path / "frozen"
    usual = pod.FoundProcesses().heartbeat_s
    processes = start(folder, 2, 1, "--steps=500", f"--distributed.heartbeat_s={usual}")
    wait_for_step(folder, 1, processes)
    processes[victim].send_signal(signal.SIGSTOP)
    time.sleep(50)  # after 60 gRPC may close the connection to the coordinator, whatever heartbeat_s says
    assert [process.poll() for process in processes] == [None, None], said(folder)
    done = max(row["step"] for row in read_metrics(folder / "run"))
    processes[victim].send_signal(signal.SIGCONT)
    wait_for_step(folder, int(done) + 2, processes)
    processes[0].send_signal(signal.SIGTERM)
    assert ended(processes, 120) == [143, 143], said(folder)


def test_incomplete_addresses_are_a_mistake_of_the_configuration():
    given, whole = {"coordinator": "a:1"}, {f"JAX_{name}": "2" for name in ("NUM_PROCESSES", "PROCESS_ID")}
    for settings, environ, message in ((given, {}, "processes missing, process missing"), (given, whole, "process 2")):
        with pytest.raises(ConfigError, match=message), pod.joined(pod.AddressedProcesses(**settings), environ):
            pass


def test_shares_and_statistics_cover_everything_once_and_one_process_is_no_special_case():
    items = list("abcdefg")
    for count, together in ((1, 1), (2, 1), (3, 1), (8, 1), (6, 2), (4, 4)):
        views = [SimpleNamespace(index=i, together=together, samplers=count // together) for i in range(count)]
        shares = [pod.Processes.share(view, items) for view in views]
        assert sorted(pair for share in shares for pair in share) == list(enumerate(items))
    with pod.joined(pod.FoundProcesses(), {}) as processes:
        assert processes.gather(3) == [3] and processes.once(lambda: 4) == 4
    first = RolloutStats(rollouts=3, sampled_tokens=10, seconds=2.0, decode_s=1.0, cache_tokens=64, shard_tokens=(4, 6))
    second = RolloutStats(rollouts=2, sampled_tokens=5, seconds=1.0, decode_s=0.5, cache_tokens=128, shard_tokens=(5,))
    first.stops["eos"], second.stops["eos"] = 3, 2
    merged = merge_stats([first, second])
    assert (merged.rollouts, merged.sampled_tokens, merged.seconds, merged.cache_tokens) == (5, 15, 2.0, 128)
    assert (merged.stops["eos"], merged.shard_tokens, merged.tokens_per_s) == (5, (4, 6, 5), 7.5)


def test_a_failed_program_is_explained_by_the_process_that_is_gone(monkeypatch):
    processes = pod.Processes()
    processes.count = 4
    gone = "process 2 (host, pid 7) of 4 is gone"
    monkeypatch.setattr(processes, "missing", lambda: gone)
    error = ValueError("UNKNOWN: Gloo AllGather failed")
    assert str(processes.lost(error)) == f"{gone} ({error})"
    assert processes.lost(RuntimeError("of its own")) is None


class Sends(pod.Processes):
    """A thread as a process, with the exchange of the others in memory."""

    piece_bytes = 32

    def __init__(self, index, count, hall):
        self.index, self.count, self.hall, self.runs = index, count, hall, Counter()
        self._together, self._summed = "together", "summed"

    def _run(self, program, piece):
        self.runs[program] += 1
        self.hall.pieces[self.index] = piece
        self.hall.barrier.wait()
        pieces = np.stack(self.hall.pieces)
        self.hall.barrier.wait()
        return pieces if program == "together" else pieces.sum(0, dtype=np.uint32)


@pytest.mark.parametrize("count", [2, 3])
def test_values_of_any_sizes_arrive_whole(count):
    """A long value of one process is added up with nothing of the others; equal ones are sent side by side."""
    rng = np.random.default_rng(count)
    for case in range(30):
        sizes = rng.integers(0, 400, count) if case % 2 else np.where(np.arange(count) == case % count, 600, 0)
        values = [rng.bytes(int(size)) for size in sizes]
        hall = SimpleNamespace(pieces=[None] * count, barrier=threading.Barrier(count, timeout=60))
        every = [Sends(index, count, hall) for index in range(count)]
        with ThreadPoolExecutor(count) as pool:
            received = [*pool.map(lambda process, values=values: process.exchange(values[process.index]), every)]
        assert received == [values] * count
        assert all(process.runs == every[0].runs for process in every)
        one_has_all = count > 2 and not case % 2
        assert (every[0].runs["summed"] > 0) == one_has_all or case % 2
        assert not one_has_all or every[0].runs["together"] == 1


def test_a_notice_is_a_signal_to_stop(caplog):
    """Of a cloud; other answers and failures are none."""
    answers, seen = ["", "FALSE", "NONE", "error", "garbage", "TRUE"], []

    class Metadata(BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append(self.headers["Metadata-Flavor"])
            text = answers[len(seen) - 1]
            if text != "garbage":
                self.send_response(503 if text == "error" else 200)
                self.end_headers()
            self.wfile.write(text.encode())

    preemption = Preemption()
    with HTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/preempted"
        with pytest.raises(Preempted), preemption.installed(), noticed(address, 0.02):
            time.sleep(20)
        server.shutdown()
    assert seen == ["Google"] * 6 and preemption.asked and caplog.text.count("does not answer") == 1
