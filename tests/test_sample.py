"""Sampling for a step: which rollouts of a group are no longer needed."""

from types import SimpleNamespace

import numpy as np
import pytest

from grpo_roc_jax import sample
from grpo_roc_jax.config import Config
from grpo_roc_jax.method.config import ResampleConfig
from grpo_roc_jax.rollout.collect import EVALUATION_STEP, Ask
from grpo_roc_jax.rollout.config import RolloutConfig
from grpo_roc_jax.rollout.records import RolloutStats
from grpo_roc_jax.sample import EarlyExit
from grpo_roc_jax.types import Problem

PROBLEMS = [Problem(f"p{i}", "?", "1", "test") for i in range(3)]


def early_exit(*sizes, keep=4, **resample):
    """Groups of these sizes; a trajectory is True, False, or None where it cannot be judged."""
    scorer = lambda problem, some: SimpleNamespace(correct=np.array([t for t in some if t is not None], bool))  # noqa: E731
    config = SimpleNamespace(resample=ResampleConfig(**resample), group=SimpleNamespace(size=keep))
    grouped = [(p, [Ask(p, i, s) for s in range(n)]) for i, (p, n) in enumerate(zip(PROBLEMS, sizes, strict=False))]
    return EarlyExit(SimpleNamespace(scorer=scorer, config=config), grouped)


def test_a_group_is_cut_when_its_places_are_settled_and_others_go_on():
    exit_ = early_exit(8, 8)
    outcomes = [True, False, True, False]  # of four kept, two failures and two successes whatever the others are
    assert [list(exit_(8 + i, outcome)) for i, outcome in enumerate(outcomes)] == [[], [], [], [12, 13, 14, 15]]
    assert list(exit_(0, True)) == [], "the first group has only begun"
    assert list(exit_(14, None)) == [], "what was cut ends too"


def test_trajectories_that_cannot_be_judged_fill_no_place():
    exit_ = early_exit(8)
    assert not any(list(exit_(i, None)) for i in range(8))


@pytest.mark.parametrize(("size", "settings"), [(6, {}), (4, {"method": "none"}), (8, {"method": "max_variance"})])
def test_groups_without_settled_places_run_to_their_end(size, settings):
    exit_ = early_exit(size, **settings)
    assert not any(list(exit_(i, bool(i % 2))) for i in range(size))


@pytest.mark.parametrize(
    ("early", "step", "wanted"), [(True, 3, True), (True, EVALUATION_STEP + 3, False), (False, 3, False)]
)
def test_rollouts_get_the_display_of_the_run_and_early_exit_where_they_train(monkeypatch, early, step, wanted):
    given = {}

    def collect(*_, **settings):
        given.update(settings)
        return ["a", "b"], RolloutStats()

    monkeypatch.setattr(sample, "collect", collect)
    scored = SimpleNamespace(groups=(), counts={}, faults=())
    stages = SimpleNamespace(
        **dict.fromkeys(("engine", "chat", "executor")),
        config=Config(rollout=RolloutConfig(early_exit=early)),
        scorer=SimpleNamespace(score_all=lambda *_: scored),
        progress="display",
    )
    asks = [Ask(PROBLEMS[0], 0, i) for i in range(2)]
    sample.roll_out_asks(stages, None, [(PROBLEMS[0], asks)], step=step)
    assert given["progress"] == "display"
    assert isinstance(given["surplus"], EarlyExit) is wanted
    sample.roll_out_asks(stages, None, [(PROBLEMS[0], asks)], step=step, progress="own")
    assert given["progress"] == "own"
