"""What was sampled is what trains, what was written is on the disk before a checkpoint counts on it, and parts of
an evaluation are not sampled again."""

import os
import pickle
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import grpo_roc_jax as g
from grpo_roc_jax.pod.processes import Processes
from grpo_roc_jax.record import codec, events, metrics, missing, trace
from grpo_roc_jax.record.checkpoint import Bundle, CheckpointConfig, Checkpointer
from grpo_roc_jax.run import evaluate, sample
from grpo_roc_jax.types import ARRAYS
from tests.helpers import demo, method_groups, samples
from tests.helpers.knobs import write_lines
from tests.test_train import config_in
from tests.test_train import shared_programs as shared_programs  # a fixture


def from_the_log(group, folder):
    trace.TraceWriter(folder).write(1, trace.eval_records(1, [group]), kind="eval")
    return [record.trajectory for record in trace.read_trace(folder, kind="eval")]


WAYS = {
    "made": lambda group, folder: group.trajectories,
    "from another process": lambda group, folder: pickle.loads(pickle.dumps(group)).trajectories,
    "from a checkpoint": lambda group, folder: codec.groups_from_tree(codec.groups_to_tree([group]))[0].trajectories,
    "from the log": from_the_log,
    "as rows": lambda group, folder: g.scoring_rows([group]),
}


@pytest.mark.parametrize("way", WAYS)
def test_arrays_of_a_trajectory_are_read_only(way, tmp_path):
    for trajectory in WAYS[way](samples.make_group(0, 2), tmp_path):
        names = ARRAYS if way != "as rows" else ("tokens", "policy_mask")
        arrays = {name: getattr(trajectory, name) for name in names if getattr(trajectory, name) is not None}
        for array in arrays.values():
            with pytest.raises(ValueError, match="read-only"):
                array[:] = 0


@pytest.mark.usefixtures("one_device")
def test_a_reward_function_that_writes_into_a_trajectory_trains_nothing_else(tmp_path):
    def padding(problem, trajectories):
        for trajectory in trajectories:
            trajectory.tokens[:] = 0
        return [1.0] * len(trajectories)

    config = config_in(tmp_path, "--steps=1", "--data.eval_problems=0", "--reward.functions=padding")
    g.train_policy(config, functions={"padding": padding})
    (event,) = events.read_events(tmp_path)
    assert event["event"] == "not_scored" and "padding raised ValueError: assignment destination is" in event["text"]


@pytest.mark.usefixtures("one_device")
def test_a_resumed_run_names_the_rows_that_a_power_cut_took(tmp_path):
    """Zeros in the middle of the metrics, as a file system leaves them, an event and a trajectory file that are gone,
    and one that is cut."""
    run, words = tmp_path / "run", ("--resume=auto", "--data.eval_problems=0")
    g.train_policy(config_in(run, *words, "--steps=2"))
    assert not events.read_events(run)
    (run / "events.jsonl").write_text('{"step": 1, "event": "batch", "text": "an event"}\n')
    g.train_policy(config_in(run, *words, "--steps=4"))
    assert missing.missing_rows(run, 4, 1) == [] and len(events.read_events(run)) == 1
    (run / "events.jsonl").unlink()
    lines = (run / "metrics.jsonl").read_bytes().splitlines(True)
    steps = [b'"step": 2' in line or b'"step": 3' in line for line in lines]
    torn = [b"\0" * (len(line) - 1) + b"\n" if lost else line for line, lost in zip(lines, steps, strict=True)]
    (run / "metrics.jsonl").write_bytes(b"".join(torn))
    (run / "trajectories" / "step_00000003.jsonl").unlink()
    os.truncate(run / "trajectories" / "step_00000002.jsonl", 999)
    g.train_policy(config_in(run, *words, "--steps=5"))
    texts = [event["text"] for event in events.read_events(run) if event["event"] == "missing_rows"]
    assert texts[0].startswith("metrics.jsonl lacks steps 2-3")
    assert texts[1].startswith("events.jsonl lacks 1 of 1 rows")
    assert texts[2].startswith("trajectories/ lacks step 3")
    assert texts[3:] == ["trajectories/ lacks a part of step 2, which had not reached the disk"]
    assert [row["step"] for row in metrics.read_metrics(run) if "time/step_s" in row] == [1, 4, 5]


def test_whatever_a_power_cut_leaves_of_a_log_is_named(tmp_path):
    """Each log below the checkpoint, cut at lengths from nothing to all but one byte and at the end of a line, and with
    zeros at its end."""
    run = demo.write_run(tmp_path / "run", 0, steps=2, groups=2, size=2)
    write_lines(run / "metrics.jsonl", [{"step": step, "rollout/reward": 0.5, "time/step_s": 1.0} for step in (1, 2)])
    write_lines(run / "sft.jsonl", [{"step": step, "sft/loss": 1.0} for step in (1, 2, 5)])
    write_lines(run / "events.jsonl", [{"step": step, "event": "stalled", "text": "still"} for step in (1, 1, 2)])
    saved = missing.measure_logs(run, 2)
    assert missing.missing_rows(run, 2, 1, 5) == [] == missing.missing_rows(run, 2, 1, 5, saved)
    logs = sorted([*run.glob("*.jsonl"), *(run / "trajectories").glob("*.jsonl")])
    assert [path.stem for path in logs[3:]] == ["eval_00000000", "step_00000001", "step_00000002"]
    for path in logs:
        content = path.read_bytes()
        ends = content.index(b"\n") + 1
        for length in {0, 1, len(content) // 3, len(content) // 2, len(content) - 2, ends}:
            for rest in (b"", b"\0" * (len(content) - length)):
                path.write_bytes(content[:length] + rest)
                lines = missing.missing_rows(run, 2, 1, 5, saved)
                where = path.name if path.parent == run else "trajectories/ lacks a part of"
                assert [line.startswith(where) for line in lines] == [True], (path.name, length, rest[:1], lines)
        path.unlink()
        assert len(missing.missing_rows(run, 2, 1, 5, saved)) == 1, path.name
        path.write_bytes(content)


PAYS = {"a": [1, 0], "b": [1, 1], "c": [0, 0], "d": [1, 0]}
GROUPS = [method_groups.make_group(pay, uid=uid) for uid, pay in PAYS.items()]
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
        return sample.ScoredRollouts(tuple(GROUPS[request.place] for request in requests))


def rewards(scored):
    return [(group.problem.uid, group.rewards.tolist()) for group in scored.groups]


def sampled(folder, sampling):
    """In parts of two problems, whose two rollouts fill one slot four times."""
    return evaluate.sample_parts(sampling, None, PROBLEMS, 2, None, evaluate.Parts(folder, ["policy"], fills=4))


def test_parts_that_are_there_are_not_sampled_again(tmp_path):
    full = sampled(tmp_path / "whole", Sampling(9))
    assert rewards(full) == [("a", [1, 0]), ("b", [1, 1]), ("c", [0, 0]), ("d", [1, 0])]
    with pytest.raises(KeyboardInterrupt):
        sampled(tmp_path, Sampling(1))
    resumed = sampled(tmp_path, rest := Sampling(9))
    assert rest.places == [[2, 3]] and rewards(resumed) == rewards(full)
    np.testing.assert_array_equal(resumed.groups[0].trajectories[1].tokens, GROUPS[0].trajectories[1].tokens)
    with pytest.raises(g.ConfigError, match="another policy"):
        evaluate.Parts(tmp_path, ["other"])


def test_counts_go_on_after_a_row_that_was_cut(tmp_path):
    path, rest = tmp_path / "counts.jsonl", Sampling(9)

    def count(sampling):
        return evaluate.count_solved(path, sampling, lambda: None, PROBLEMS, 2, 0, fills=2)

    with pytest.raises(KeyboardInterrupt):
        count(Sampling(2))
    path.write_bytes(path.read_bytes() + b'{"step": 2, "uid": "c"')
    counts = count(rest)
    assert rest.places == [[2], [3]] and counts == {"a": (1, 2), "b": (2, 2), "c": (0, 2), "d": (1, 2)}
    assert evaluate.read_counts(path) == counts and count(rest) == counts
    evaluate.count_solved(path, again := Sampling(9), lambda: None, PROBLEMS, 2, 5, fills=9)
    assert again.places == [[0, 1, 2, 3]], "those counts are of another policy"


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
