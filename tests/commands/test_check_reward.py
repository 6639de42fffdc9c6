"""The command that tries a reward function before training."""

import sys
import types

import pytest

from grpo_roc_jax.commands.check_reward import check_reward, main


@pytest.fixture
def mine(monkeypatch):
    module = types.ModuleType("mine")
    module.lengths = lambda problem, trajectories: [float(t.length) for t in trajectories]
    module.partial = lambda problem, trajectories: [None, 1, 1, 1, 1]
    module.short = lambda problem, trajectories: [1.0]
    monkeypatch.setitem(sys.modules, "mine", module)


def test_builtin(capsys):
    assert main(["answer"]) == 0
    assert check_reward("answer") == [
        "right answer       reward 1 (correct)",
        "wrong answer       reward 0 (wrong)",
        "no answer          reward 0 (no_answer)",
        "failing tool call  reward 1 (correct)",
        "truncated          reward 0 (truncated)",
    ]


def test_custom(mine, capsys):
    assert check_reward("mine:lengths")[3] == "failing tool call  reward 8 (correct)"
    assert main(["mine:lengths"]) == 0
    assert main(["mine:partial"]) == 2
    assert "not scored" in capsys.readouterr().out
    assert main(["mine:short"]) == 2
    assert "returned 1 values for 5" in capsys.readouterr().out
    assert main(["mine:absent"]) == 2
    assert main([]) == 2
