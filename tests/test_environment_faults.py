"""Environments that fail in every way during training: each rollout has a typed end, none is lost, the steps go on."""

import json
import threading
from collections import Counter
from typing import ClassVar

import pytest

import grpo_roc_jax as g
from grpo_roc_jax import train
from grpo_roc_jax.record.events import read_events
from grpo_roc_jax.record.trace import read_trace
from tests.test_readme import TINY

FAULTS = ("reset raises", "reset hangs", "pays text", "get_reward raises")


class Unlucky(g.Environment):
    """The first two rollouts of each problem fail, each problem in two other ways."""

    made: ClassVar[Counter] = Counter()
    failed: ClassVar[list] = []

    def reset(self, problem):
        number = self.made[problem.uid] = self.made[problem.uid] + 1
        self.how = ""
        if number <= 2:
            self.how = FAULTS[len(self.failed) % len(FAULTS)]
            self.failed.append(self.how)
        if self.how == "reset raises":
            raise OSError("no disk")
        if self.how == "reset hangs":
            threading.Event().wait(20)

    def get_reward(self):
        if self.how == "get_reward raises":
            raise KeyError("score")
        return "much" if self.how == "pays text" else float(self.made.total() % 2)


@pytest.mark.slow
def test_the_steps_go_on_and_every_rollout_has_a_typed_end(tmp_path):
    words = ["--environment.timeout_s=2", "--environment.retries=0", "--reward.functions=environment"]
    kind = ["--environment", f"{__name__}:Unlucky", f"--run_dir={tmp_path}", "--log.traces=1", "--sft.steps=0"]
    config = g.read_config("toy.yaml", *TINY, *kind, *words, "--reward.truncated=score")
    g.train_policy(config, environment=Unlucky)
    assert sorted(Unlucky.failed) == sorted(FAULTS * 2)
    for step in (1, 2):
        records = list(read_trace(tmp_path, step))
        lost = [record for record in records if record.trajectory.stop == "infrastructure"]
        assert len(records) == 8 and len(lost) == 4
        assert all(record.verdict is None and record.group == -1 for record in lost)
        assert all(record.verdict.reward == record.trajectory.reward for record in records if record not in lost)
        assert sum(record.advantages is not None for record in records) == 4, "the groups were filled from the others"
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["environment/faults"] for row in rows if "environment/faults" in row] == [4.0, 4.0]


class Mistaken(g.Environment):
    """Has a mistake that no rollout escapes."""

    def step(self, turn):
        return self.absent.get(turn.text)


class Numbers(g.Environment):
    """Reads a number from each turn, which an untrained policy does not say."""

    def step(self, turn):
        return g.Observation(reward=float(int(turn.text.strip()) == 4), done=True)


def words(tmp_path, kind, *more):
    """Of a policy of random weights, which ends a turn at one of some hundred tokens."""
    return [
        "toy.yaml", *TINY, "--environment", f"{__file__}:{kind}", f"--run_dir={tmp_path}", "--log.traces=1",
        "--sft.steps=0", "--reward.functions=environment", "--reward.truncated=score",
        "--rollout.max_response_tokens=600", "--batch.row_length=640", *more,
    ]  # fmt: skip


def test_a_mistake_that_every_rollout_meets_ends_the_run_after_one_step_and_is_named(tmp_path, capfd):
    assert train.main(words(tmp_path, "Mistaken")) == 5
    lines = capfd.readouterr().err.strip().splitlines()
    line = "step: AttributeError: 'Mistaken' object has no attribute 'absent' (test_environment_faults.py, line "
    assert lines[-1].startswith(f"stopped: infrastructure: all 8 rollouts of a step ended alike: {line}")
    rows = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert max(row["step"] for row in rows) == 1
    sampled = [record.trajectory for record in read_trace(tmp_path, 1)]
    assert len(sampled) == 8 and all(t.stop == "infrastructure" and t.fault.startswith(line) for t in sampled)
    assert sum("return self.absent.get(turn.text)" in t.fault for t in sampled) == 1, "the traceback of the first"
    (event,) = read_events(tmp_path)
    assert (event["step"], event["event"]) == (1, "environment") and event["text"].startswith(line)


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["zero", "drop"])
def test_what_the_policy_said_and_nobody_can_read_scores_0_unless_it_is_dropped(tmp_path, choice):
    status = train.main(words(tmp_path, "Numbers", f"--environment.on_failure={choice}"))
    records = list(read_trace(tmp_path, 1))
    failed = [record for record in records if "ValueError: invalid literal for int()" in record.trajectory.fault]
    assert len(records) == 8 and len(failed) >= 6, "a policy of random weights says no number"
    if choice == "zero":
        assert status == 0 and all(record.trajectory.stop == "failed" for record in failed)
        assert all(record.verdict.reward == 0.0 and record.group >= 0 for record in failed), "they stay in their group"
    else:
        assert all(record.trajectory.stop == "infrastructure" and record.verdict is None for record in failed)
        assert status == (5 if len(failed) == 8 else 0)
