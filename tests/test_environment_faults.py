"""Environments that fail in every way during training: each rollout has a typed end, none is lost, the steps go on."""

import json
import threading
from collections import Counter
from typing import ClassVar

import pytest
from test_readme import TINY

import grpo_roc_jax as g
from grpo_roc_jax.record.trace import read_trace

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
