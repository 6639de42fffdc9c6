"""Faults injected at the named points of a run: which one was hit, and that the run ends or goes on as promised.

`docs/faults.md` lists all faults with their tests; `test_docs.py` keeps that page true.
"""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

import grpo_roc_jax as g
from grpo_roc_jax.pod.preemption import Preempted, Preemption
from grpo_roc_jax.process.points import VALUES, InjectedFault, injected, listening, reach, spoiled
from grpo_roc_jax.record import checkpoint_files, metrics
from grpo_roc_jax.record.run_dir import locked
from grpo_roc_jax.run.session import check_alike
from grpo_roc_jax.train import main
from tests.test_train import TINY, numbers, params_hash
from tests.test_train import shared_programs as shared_programs  # a fixture

WORDS = [*TINY, "--steps=3", "--eval.every=2", "--resume=auto", "--checkpoint.keep=9"]
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def full_run(tmp_path_factory):
    """A run without faults."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    assert main([*WORDS, f"--run_dir={run_dir}"]) == 0
    return run_dir


def run_with(faults, run_dir, *more):
    """(exit status, how often each fault happened)."""
    with injected(faults) as happened:
        return main([*WORDS, f"--run_dir={run_dir}", *more]), dict(happened)


def test_a_fault_happens_when_it_is_asked_for_and_nothing_does_otherwise():
    reach("update")
    assert spoiled("update.weights", 3.0) == 3.0
    with injected("update=eio@2,update.weights=nan@2+,select=raise@p0.5,seed=1") as happened:
        reach("update")
        assert spoiled("update.weights", 3.0) == 3.0 and np.isnan(spoiled("update.weights", 3.0))
        with pytest.raises(OSError, match="injected at update"):
            reach("update")
        reach("update")
        drawn = 0
        for _ in range(40):
            try:
                reach("select")
            except InjectedFault:
                drawn += 1
    assert happened == {"update=eio": 1, "update.weights=nan": 1, "select=raise": drawn} and 10 < drawn < 30
    reach("update")
    given = {"reward.values": [1.0, 2.0], "selected": ["a", "b"], "update.weights": np.ones(2)}
    for point, action in [(point, action) for point, actions in VALUES.items() for action in actions]:
        with injected(f"{point}={action}") as happened:
            value = spoiled(point, given[point])
        assert happened.total() == 1 and repr(value) != repr(given[point])


def test_a_fault_that_cannot_be_is_refused():
    for text, message in (
        ("updat=eio", "did you mean 'update'"),
        ("update=eio@p1.2.3", "must be POINT="),
        ("update=nan", "no action 'nan' at update;"),
        ("reward.values=raise", "at reward.values; must be one of nan, drop, none$"),
        ("update=sleep@2", "sleep, and nothing else, has seconds"),
        ("update=raise@0", "the count must be at least 1"),
        ("update=raise@p2", "the probability must be above 0 and at most 1"),
    ):
        with pytest.raises(g.ConfigError, match=message), injected(f"update=eio,{text}"):
            pass


@SLOW
@pytest.mark.parametrize("point", ["update", "compile", "sample", "reward", "evaluate", "checkpoint.commit"])
def test_a_signal_in_any_phase_saves_once_and_the_run_goes_on(full_run, tmp_path, point):
    """Two of them, the second while the first is served."""
    when = 1 if point == "compile" else 2
    status, happened = run_with(f"{point}=term@{when},{point}=term@{when}", tmp_path)
    assert status == 143 and happened[f"{point}=term"]
    assert main([*WORDS, f"--run_dir={tmp_path}"]) == 0
    assert numbers(tmp_path) == numbers(full_run) and params_hash(tmp_path) == params_hash(full_run)


@SLOW
def test_a_full_disk_in_a_directory_with_spaces_costs_no_row(full_run, tmp_path):
    run_dir = tmp_path / "läuft hier"
    faults = "checkpoint.write=enospc@2,traces.write=enospc@2,metrics.write=enospc@3,summary=enospc"
    status, happened = run_with(faults, run_dir)
    assert status == 0 and sum(happened.values()) == 4
    assert numbers(run_dir) == numbers(full_run) and params_hash(run_dir) == params_hash(full_run)
    names = [{path.name for path in (run / "checkpoints").iterdir()} for run in (full_run, run_dir)]
    assert names[0] - names[1] == {"step_00000001"}


@SLOW
def test_an_update_that_is_not_finite_leaves_the_state_and_several_end_the_run(full_run, tmp_path, capsys):
    """The first batch is that of the warm-up."""
    status, happened = run_with("update.weights=nan@3+", tmp_path, "--limits.skipped_updates=2")
    assert (status, happened) == (4, {"update.weights=nan": 2})
    assert "diverged: 2 updates in a row were not finite" in capsys.readouterr().err
    rows = {row["step"]: row for row in metrics.read_metrics(tmp_path)}
    assert [rows[step]["update/skipped"] for step in (1, 2, 3)] == [0, 1, 1]
    assert params_hash(tmp_path, 1) == params_hash(tmp_path) == params_hash(full_run, 1)


@SLOW
def test_rollouts_that_fail_leave_their_groups_and_too_many_end_the_run(tmp_path, capsys):
    status, happened = run_with("rollout.turn=raise@p0.2", tmp_path / "some", "--limits.infrastructure_share=1")
    assert status == 0 and happened["rollout.turn=raise"] > 3
    rows = [row for row in metrics.read_metrics(tmp_path / "some") if row["step"]]
    shares = [(row["rollout/stop_infrastructure"], row.get("verdict/infrastructure", 0.0)) for row in rows]
    assert all(stopped == pytest.approx(lost) for stopped, lost in shares) and 0 < sum(dict(shares)) < 3
    status, _ = run_with("rollout.turn=raise", tmp_path / "all", "--limits.infrastructure_steps=2")
    assert status == 5 and "infrastructure: more than 25%" in capsys.readouterr().err


@SLOW
def test_a_reward_function_that_fails_once_costs_its_group(tmp_path, caplog):
    words = ("--data.eval_problems=0", "--watch.notice_url=http://127.0.0.1:9/soon")
    status, happened = run_with("reward.function=raise@2,reward.values=none@4", tmp_path, *words)
    assert (status, len(happened)) == (0, 2)
    assert "reward tests.test_train:even raised InjectedFault" in caplog.text
    assert "watch.notice_url http://127.0.0.1:9/soon does not answer" in caplog.text
    lost = [row.get("verdict/not_scored", 0.0) for row in metrics.read_metrics(tmp_path) if row["step"]]
    assert sum(lost) == 1.0, "one of two groups in two steps"


@SLOW
def test_a_clock_that_jumps_changes_nothing(full_run, tmp_path, monkeypatch):
    """By an hour, back and forth; Orbax measures its own deadlines by that clock, so a save may be lost."""
    shift_s, clock = [0.0], time.time
    monkeypatch.setattr(time, "time", lambda: clock() + shift_s[0])
    hours = {"sample": 3600.0, "reward": -3600.0}
    with listening(lambda point: shift_s.append(shift_s.pop() + hours.get(point, 0.0))):
        assert main([*WORDS, f"--run_dir={tmp_path}"]) == 0
    assert numbers(tmp_path) == numbers(full_run)


def test_pointers_beside_checkpoints_are_not_read(tmp_path):
    (tmp_path / "latest").symlink_to("step_00000099")
    (tmp_path / "step_00000007").write_text("")
    (tmp_path / "step_00000003").mkdir()
    assert [entry.step for entry in checkpoint_files.entries(tmp_path)] == [3]


def test_a_second_run_in_a_directory_is_refused_and_a_stale_lock_is_not(tmp_path):
    (tmp_path / "lock").write_text("4194304")
    with locked(tmp_path), pytest.raises(g.ConfigError, match=r"another run \(process 4194304\)"), locked(tmp_path):
        pass


def test_a_directory_that_cannot_be_made_is_refused_before_the_first_step(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main([*WORDS, f"--run_dir={tmp_path}/file/run"]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_second_interrupt_is_immediate():
    preemption = Preemption()
    with preemption.installed(), pytest.raises(KeyboardInterrupt):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        except Preempted:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)


def test_processes_that_differ_are_refused(tmp_path):
    config, processes = g.read_config("--optim.lr=0.25"), SimpleNamespace(count=3)
    processes.gather = lambda settings: [settings, settings | {"optim.lr": "0.5", "jax": "0.1"}, settings]
    with pytest.raises(g.ConfigError, match=r"lr: 0\.25 in process 0, 0\.5 in process 1\n  jax: .* 0\.1 in process 1"):
        check_alike(processes, config, tmp_path, seen_s=0)
    processes.gather = lambda settings: [settings | {"sees the run directory": "True"}, settings]
    with pytest.raises(g.ConfigError, match="shared disk:\n  sees the run directory: True in process 0, False in proc"):
        check_alike(processes, config, tmp_path, seen_s=0)
    processes.gather = lambda settings: [settings, settings]
    check_alike(processes, config, tmp_path, seen_s=0)


@SLOW
def test_the_supervised_stage_survives_a_lack_of_memory(tmp_path):
    talk = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    stage = ["--sft.steps=2", "--sft.traces=4", f"--data.trace_sources={tmp_path}/talk.jsonl"]
    words = ["--steps=0", "--sharding.fsdp=8", "--batch.rows=16", "--data.eval_problems=0", *stage]
    rows = []
    for name, faults in (("whole", ""), ("halved", "sft.memory=oom@2")):
        assert run_with(faults, tmp_path / name, *words)[0] == 0
        rows.append([json.loads(line)["loss/nll"] for line in (tmp_path / name / "sft.jsonl").read_text().splitlines()])
    assert len(rows[0]) == 2 and rows[1] == pytest.approx(rows[0], rel=1e-5)


@SLOW
@pytest.mark.parametrize("damage", ["corrupt", "a file"])
def test_a_program_cache_that_cannot_be_used_is_passed_over(tmp_path, damage):
    cache = tmp_path / "cache"
    script = "import jax; print(float(jax.jit(lambda x: x * 3 + 1)(2.0)))"
    environment = {name: value for name, value in os.environ.items() if name != "HOME"}
    environment |= {"JAX_COMPILATION_CACHE_DIR": str(cache)}
    if damage == "a file":
        cache.write_text("")
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, "7.0\n")
        entries = [path for path in cache.rglob("*") if path.is_file()]
        assert bool(entries) == (damage == "corrupt")
        for path in entries:
            path.write_bytes(b"no program")
