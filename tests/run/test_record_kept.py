"""What was sampled is what trains, and what was written is on the disk before a checkpoint counts on it."""

import os
import pickle
import shutil
from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax.config import Config
from grpo_roc_jax.method.compose import scoring_rows
from grpo_roc_jax.record.checkpoint import Bundle, CheckpointConfig, Checkpointer
from grpo_roc_jax.record.codec import groups_from_tree, groups_to_tree
from grpo_roc_jax.record.events import read_events
from grpo_roc_jax.record.metrics import read_metrics
from grpo_roc_jax.record.missing import measure_logs, missing_rows, spans
from grpo_roc_jax.record.trace import TraceWriter, eval_records, read_trace
from grpo_roc_jax.run.sample import ScoredRollouts
from grpo_roc_jax.settings.cli import load_config
from grpo_roc_jax.train import evaluate, train
from grpo_roc_jax.types import ARRAYS, Group
from tests.helpers.demo import write_run
from tests.helpers.disks import synced as synced  # a fixture
from tests.helpers.knobs import write_lines
from tests.helpers.samples import make_group
from tests.test_train import TINY
from tests.test_train import shared_programs as shared_programs  # a fixture

# ---- arrays --------------------------------------------------------------------------------------------------------


def from_the_log(group, folder):
    TraceWriter(folder).write(1, eval_records(1, [group]), kind="eval")
    return [record.trajectory for record in read_trace(folder, kind="eval")]


WAYS = {
    "made": lambda group, folder: group.trajectories,
    "from another process": lambda group, folder: pickle.loads(pickle.dumps(group)).trajectories,
    "from a checkpoint": lambda group, folder: groups_from_tree(groups_to_tree([group]))[0].trajectories,
    "from the log": from_the_log,
    "as rows": lambda group, folder: scoring_rows([group]),
}


@pytest.mark.parametrize("way", WAYS)
def test_arrays_of_a_trajectory_are_read_only(way, tmp_path):
    for trajectory in WAYS[way](make_group(0, 2), tmp_path):
        names = ARRAYS if way != "as rows" else ("tokens", "policy_mask")
        for name in names:
            array = getattr(trajectory, name)
            if array is not None:
                with pytest.raises(ValueError, match="read-only"):
                    array[:] = 0


def test_the_arrays_that_it_was_made_of_stay_those_of_the_caller():
    trajectory = make_group(0, 1).trajectories[0]
    arrays = {name: np.array(getattr(trajectory, name)) for name in ARRAYS if getattr(trajectory, name) is not None}
    type(trajectory)(**(vars(trajectory) | arrays))
    for array in arrays.values():
        array[:] = 0


@pytest.mark.usefixtures("one_device")
def test_a_reward_function_that_writes_into_a_trajectory_trains_nothing_else(tmp_path):
    def padding(problem, trajectories):
        for trajectory in trajectories:
            trajectory.tokens[:] = 0
        return [1.0] * len(trajectories)

    words = [*TINY, f"--run_dir={tmp_path}", "--steps=1", "--data.eval_problems=0", "--reward.functions=padding"]
    train(load_config(Config, words, prog="test"), functions={"padding": padding})
    (event,) = read_events(tmp_path)
    assert event["event"] == "not_scored" and "padding raised ValueError: assignment destination is" in event["text"]


# ---- logs ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_device")
def test_logs_are_on_the_disk_before_a_checkpoint_is_committed(synced, tmp_path):
    run = tmp_path / "run"
    train(load_config(Config, [*TINY, f"--run_dir={run}", "--steps=3", "--checkpoint.every=2"], prog="test"))
    commits = [i for i, path in enumerate(synced) if path.parent.name == "checkpoints" and path.name.startswith("step")]
    assert [synced[i].name for i in commits] == [f"step_{step:08d}" for step in (0, 2, 3)]
    before = [set(), *(set(synced[low:high]) for low, high in zip([0, *commits], commits, strict=False))][1:]
    for step, paths in zip((0, 2, 3), before, strict=True):
        assert {run / "metrics.jsonl", run / "trajectories", run} <= paths
        assert run / "trajectories" / f"{'step' if step else 'eval'}_{step:08d}.jsonl" in paths
    assert run / "trajectories" / "step_00000001.jsonl" in before[0] | before[1]  # it may be written before the first


def test_an_evaluation_keeps_the_rollouts_that_could_not_be_scored(tmp_path):
    """As a step does: the log is where one looks for what failed."""
    group, lost = make_group(1, 3), make_group(2, 1)
    removed = tuple((lost.problem, replace(row, stop="infrastructure")) for row in lost.trajectories)
    scored = ScoredRollouts((group, Group(lost.problem, (), ())), removed)
    sampler = SimpleNamespace(engine=SimpleNamespace(publish=lambda params, step: "weights"), weights=None)
    session = SimpleNamespace(
        config=load_config(Config, TINY, prog="t"),
        sampling=SimpleNamespace(sampler=sampler, sample_requests=lambda *given: scored),
        held_out=[group.problem, lost.problem],
        policy=SimpleNamespace(full=lambda params: params),
        traces=TraceWriter(tmp_path),
    )
    evaluate(session, SimpleNamespace(step=4, train=SimpleNamespace(params=None)))
    assert [record.why for record in read_trace(tmp_path, 4, kind="eval")][3:] == ["removed: infrastructure"]


def test_a_log_that_cannot_be_synced_costs_no_checkpoint(monkeypatch, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    fsync = os.fsync

    def broken(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("metrics.jsonl"):
            raise OSError(5, "Input/output error")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", broken)
    with Checkpointer(tmp_path / "checkpoints", CheckpointConfig(), logs=tmp_path) as checkpointer:
        checkpointer.save(1, Bundle({"x": jnp.ones(2)}))
        checkpointer.wait()
        assert checkpointer.saved == [1]


def test_spans():
    assert [spans(s) for s in ([3], [3, 4, 5, 9], [1, 3])] == ["step 3", "steps 3-5, 9", "steps 1, 3"]


@pytest.mark.usefixtures("one_device")
def test_a_resumed_run_names_the_rows_that_a_power_cut_took(tmp_path):
    """Zeros in the middle of the metrics, as a file system leaves them, an event and a trajectory file that are gone,
    and one that is cut."""
    run = tmp_path / "run"
    words = [*TINY, f"--run_dir={run}", "--steps=4", "--resume=auto", "--data.eval_problems=0"]
    train(load_config(Config, [*words, "--steps=2"], prog="test"))
    assert not read_events(run)
    (run / "events.jsonl").write_text('{"step": 1, "event": "batch", "text": "an event"}\n')
    train(load_config(Config, words, prog="test"))
    assert missing_rows(run, 4, 1) == [] and len(read_events(run)) == 1
    (run / "events.jsonl").unlink()
    lines = (run / "metrics.jsonl").read_bytes().splitlines(True)
    steps = [b'"step": 2' in line or b'"step": 3' in line for line in lines]
    torn = [b"\0" * (len(line) - 1) + b"\n" if lost else line for line, lost in zip(lines, steps, strict=True)]
    (run / "metrics.jsonl").write_bytes(b"".join(torn))
    (run / "trajectories" / "step_00000003.jsonl").unlink()
    os.truncate(run / "trajectories" / "step_00000002.jsonl", 999)
    shutil.copytree(run, tmp_path / "other")
    for more, traced in (("--log.traces=1", True), ("--log.traces=0", False)):
        where = run if traced else tmp_path / "other"
        train(load_config(Config, [*words, more, f"--run_dir={where}", "--steps=5"], prog="test"))
        texts = [event["text"] for event in read_events(where) if event["event"] == "missing_rows"]
        assert texts[0].startswith("metrics.jsonl lacks steps 2-3")
        assert texts.pop(1).startswith("events.jsonl lacks 1 of 1 rows")
        cut = "trajectories/ lacks a part of step 2, which had not reached the disk"
        assert [text[:26] for text in texts[1:-1]] == ["trajectories/ lacks step 3"] * traced and texts[-1] == cut
        assert [row["step"] for row in read_metrics(where) if "time/step_s" in row] == [1, 4, 5]


def test_whatever_a_power_cut_leaves_of_a_log_is_named(tmp_path):
    """Each log below the checkpoint, cut at lengths from nothing to all but one byte and at the end of a line, and with
    zeros at its end; with the index of its trajectories and without."""
    run = write_run(tmp_path / "run", 0, steps=2, groups=2, size=2)
    write_lines(run / "metrics.jsonl", [{"step": step, "rollout/reward": 0.5, "time/step_s": 1.0} for step in (1, 2)])
    write_lines(run / "sft.jsonl", [{"step": step, "sft/loss": 1.0} for step in (1, 2, 5)])
    write_lines(run / "events.jsonl", [{"step": step, "event": "stalled", "text": "still"} for step in (1, 1, 2)])
    saved = measure_logs(run, 2)
    assert missing_rows(run, 2, 1, 5) == [] == missing_rows(run, 2, 1, 5, saved)
    logs = sorted([*run.glob("*.jsonl"), *(run / "trajectories").glob("*.jsonl")])
    assert [path.stem for path in logs[3:]] == ["eval_00000000", "step_00000001", "step_00000002"]
    for indexed in (True, False):
        if not indexed:
            shutil.rmtree(run / "trajectories_index")
        for path in logs:
            content = path.read_bytes()
            ends = content.index(b"\n") + 1
            for length in {0, 1, len(content) // 3, len(content) // 2, len(content) - 2, ends}:
                for rest in (b"", b"\0" * (len(content) - length)):
                    path.write_bytes(content[:length] + rest)
                    lines = missing_rows(run, 2, 1, 5, saved)
                    where = path.name if path.parent == run else "trajectories/ lacks a part of"
                    damage = (path.name, length, rest[:1], lines)
                    assert [line.startswith(where) for line in lines] == [True], damage
            path.unlink()
            assert len(missing_rows(run, 2, 1, 5, saved)) == 1, path.name
            path.write_bytes(content)
        assert missing_rows(run, 2, 1, 5, saved) == []


@pytest.mark.parametrize("was, now", [(2, 1), (10, 1), (3, 2), (0, 1), (1, 2), (1, 0), (2, 2)])
def test_trajectories_that_were_never_kept_are_not_missing(tmp_path, was, now):
    """`log.traces` may change when a run resumes; also for a checkpoint that does not say how long the logs were."""
    run = write_run(tmp_path / "run", 0, steps=12, groups=1, size=1)
    write_lines(run / "metrics.jsonl", [{"step": step, "time/step_s": 1.0} for step in range(1, 13)])
    files = {step: run / "trajectories" / f"step_{step:08d}.jsonl" for step in range(1, 13)}
    for step, path in files.items():
        if not was or step % was:
            path.unlink()
    saved = measure_logs(run, 12)
    assert missing_rows(run, 12, now) == [] == missing_rows(run, 12, now, saved=saved)
    if was and now:
        files[12 if was == 10 else 6].unlink(missing_ok=True)
        files[10].unlink(missing_ok=True)
        assert len(missing_rows(run, 12, now, saved=saved)) == 1
