"""What was sampled is what trains, what was written is on the disk before a checkpoint counts on it, and parts of
an evaluation are not sampled again."""

import os
import pickle
import resource
import shutil
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import grpo_roc_jax as g
from grpo_roc_jax.pod.processes import Processes
from grpo_roc_jax.process.progress import narrated
from grpo_roc_jax.record.checkpoint import Bundle, CheckpointConfig, Checkpointer
from grpo_roc_jax.record.codec import groups_from_tree, groups_to_tree
from grpo_roc_jax.record.events import read_events
from grpo_roc_jax.record.metrics import read_metrics
from grpo_roc_jax.record.missing import measure_logs, missing_rows, spans
from grpo_roc_jax.record.trace import TraceWriter, eval_records, read_trace
from grpo_roc_jax.run.evaluate import Parts, count_solved, read_counts, sample_parts
from grpo_roc_jax.run.sample import ScoredRollouts
from grpo_roc_jax.settings.cli import ConfigError
from grpo_roc_jax.train import evaluate, train
from grpo_roc_jax.types import ARRAYS, Group
from tests.helpers import method_groups
from tests.helpers.demo import write_run
from tests.helpers.disks import synced as synced  # a fixture
from tests.helpers.knobs import write_lines
from tests.helpers.samples import make_group
from tests.test_train import config_in
from tests.test_train import shared_programs as shared_programs  # a fixture


def from_the_log(group, folder):
    TraceWriter(folder).write(1, eval_records(1, [group]), kind="eval")
    return [record.trajectory for record in read_trace(folder, kind="eval")]


WAYS = {
    "made": lambda group, folder: group.trajectories,
    "from another process": lambda group, folder: pickle.loads(pickle.dumps(group)).trajectories,
    "from a checkpoint": lambda group, folder: groups_from_tree(groups_to_tree([group]))[0].trajectories,
    "from the log": from_the_log,
    "as rows": lambda group, folder: g.scoring_rows([group]),
}


@pytest.mark.parametrize("way", WAYS)
def test_arrays_of_a_trajectory_are_read_only(way, tmp_path):
    for trajectory in WAYS[way](make_group(0, 2), tmp_path):
        names = ARRAYS if way != "as rows" else ("tokens", "policy_mask")
        arrays = {name: getattr(trajectory, name) for name in names if getattr(trajectory, name) is not None}
        for array in arrays.values():
            with pytest.raises(ValueError, match="read-only"):
                array[:] = 0
        if way == "made":  # the arrays that it was made of stay those of the caller
            own = {name: np.array(array) for name, array in arrays.items()}
            type(trajectory)(**(vars(trajectory) | own))
            for array in own.values():
                array[:] = 0


@pytest.mark.usefixtures("one_device")
def test_a_reward_function_that_writes_into_a_trajectory_trains_nothing_else(tmp_path):
    def padding(problem, trajectories):
        for trajectory in trajectories:
            trajectory.tokens[:] = 0
        return [1.0] * len(trajectories)

    config = config_in(tmp_path, "--steps=1", "--data.eval_problems=0", "--reward.functions=padding")
    train(config, functions={"padding": padding})
    (event,) = read_events(tmp_path)
    assert event["event"] == "not_scored" and "padding raised ValueError: assignment destination is" in event["text"]


@pytest.mark.usefixtures("one_device")
def test_logs_are_on_the_disk_before_a_checkpoint_is_committed(synced, tmp_path):
    run = tmp_path / "run"
    train(config_in(run, "--steps=3", "--checkpoint.every=2"))
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
        config=config_in(tmp_path),
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


@pytest.mark.usefixtures("one_device")
def test_a_resumed_run_names_the_rows_that_a_power_cut_took(tmp_path):
    """Zeros in the middle of the metrics, as a file system leaves them, an event and a trajectory file that are gone,
    and one that is cut."""
    run, words = tmp_path / "run", ("--resume=auto", "--data.eval_problems=0")
    train(config_in(run, *words, "--steps=2"))
    assert not read_events(run)
    (run / "events.jsonl").write_text('{"step": 1, "event": "batch", "text": "an event"}\n')
    train(config_in(run, *words, "--steps=4"))
    assert missing_rows(run, 4, 1) == [] and len(read_events(run)) == 1
    (run / "events.jsonl").unlink()
    lines = (run / "metrics.jsonl").read_bytes().splitlines(True)
    steps = [b'"step": 2' in line or b'"step": 3' in line for line in lines]
    torn = [b"\0" * (len(line) - 1) + b"\n" if lost else line for line, lost in zip(lines, steps, strict=True)]
    (run / "metrics.jsonl").write_bytes(b"".join(torn))
    (run / "trajectories" / "step_00000003.jsonl").unlink()
    os.truncate(run / "trajectories" / "step_00000002.jsonl", 999)
    train(config_in(run, *words, "--steps=5"))
    texts = [event["text"] for event in read_events(run) if event["event"] == "missing_rows"]
    assert texts[0].startswith("metrics.jsonl lacks steps 2-3")
    assert texts[1].startswith("events.jsonl lacks 1 of 1 rows")
    assert texts[2].startswith("trajectories/ lacks step 3")
    assert texts[3:] == ["trajectories/ lacks a part of step 2, which had not reached the disk"]
    assert [row["step"] for row in read_metrics(run) if "time/step_s" in row] == [1, 4, 5]


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
    assert [spans(s) for s in ([3], [3, 4, 5, 9], [1, 3])] == ["step 3", "steps 3-5, 9", "steps 1, 3"]
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


GROUPS = [
    method_groups.make_group(pay, uid=uid) for uid, pay in {"a": [1, 0], "b": [1, 1], "c": [0, 0], "d": [1, 0]}.items()
]
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
        removed = ((PROBLEMS[1], method_groups.make_trajectory(sample=1)),)
        groups = [GROUPS[request.place] for request in requests]
        if GROUPS[1] not in groups:
            return ScoredRollouts(tuple(groups))
        return ScoredRollouts(
            tuple(g if g is not GROUPS[1] else method_groups.make_group([1], uid="b") for g in groups), removed
        )


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
