"""Reward maps against the vectors of the family's specification, and the chain of the config."""

import sys
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest

from grpo_roc_jax.method.advantage import z_score
from grpo_roc_jax.method.shaping import check_steps, prompt_suffix
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.cli import ConfigError
from tests.helpers.method_groups import make_group, method
from tests.method.test_shaping import close, one, shaped


def test_dynamic_length():
    lengths = [100, 200, 300, 400]
    close(one([1] * 4, "dynamic_length", lengths=lengths), [0.875656, 0.765986, 0.634014, 0.524344])
    groups = [make_group([1, 0, 0, 0], lengths=lengths), make_group([1, 1, 0, 1], lengths=lengths)]
    mixed = shaped(groups, {"kind": "dynamic_length", "fraction": 0.5})
    close(mixed[0], [1, 0, 0, 0])  # the worse-solved group keeps its rewards
    assert mixed[1][2] == 0
    assert 1 > mixed[1][0] > mixed[1][1] > mixed[1][3] > 0
    close(one([1, 0], "dynamic_length", lengths=[5, 9]), [0.7, 0])


def test_serial_exits():
    rewards = one([0, 1, 1, 0, 1], "serial")
    close(rewards, [0, 1, 0.5, 0, 0.25])
    close(z_score(rewards), [-0.836658, 1.553793, 0.358568, -0.836658, -0.239045])


def test_unlikeliness():
    rewards = one([1, 1, 1, 0], "unlikeliness", logprobs=[-0.5, -1, -2, -0.3])
    close(rewards, [0.875, 0.9375, 1, 0])
    close(z_score(rewards), [0.364512, 0.497062, 0.629612, -1.491186])


def test_posterior():
    channels = {"format": [1, 1, 1], "quality": [0.2, 0.9, 0.9]}
    close(one([1, 1, 0], "posterior", channels=channels), [2.2, 2.9, 1])


def test_quality_blend():
    outcomes = [1, 1, 0, 1]
    close(one(outcomes, "quality", channels={"quality": [0.8, 0.4, 0.8, 0]}), [1, 0.85, 0, 0.7])
    close(one(outcomes, "quality", channels={"quality": [0] * 4}), [0.7, 0.7, 0, 0.7])


def test_soft_map():
    close(one([0, 0.2, 0.5, 0.8, 1], "soft"), [0.086764, 0.321546, 0.596390, 0.8, 0.801823])


def test_staged():
    close(one([1, 0, 1], "staged", errors=[1, 0, 0], answers=[1, 1, 2]), [0, 0.3, 0.1])


def test_outcome():
    close(one([1, 0], "outcome", settings={"negative": 2.0}), [1, -2])


CHANNELS = {"format": [1, 1, 0, 0], "quality": [0.8, 0.4, 0.2, 0.1]}


@pytest.mark.parametrize(
    ("step", "settings", "expected"),
    [
        ("overlong", {"limit": 10, "buffer": 10}, [1 - 0.3, 1 - 0.6, 0 - 0.3, 0 - 0.3]),
        ("tool_errors", {}, [1, 0.75, -0.5, 0]),
        ("unlikeliness", {}, [0.9375, 1, 0, 0]),
        ("serial", {}, [1, 0.5, 0, 0]),
        ("soft", {}, [0.801823, 0.801823, 0.086764, 0.086764]),
        ("outcome", {"negative": 2.0}, [1, 1, -2, -2]),
        ("budget", {"start": 3}, [1.0, 0.7, 0.4, 0.4]),
        ("surrogate", {"length": 6}, [2, 0, 1, 1]),
        ("posterior", {}, [2.8, 2.4, 0, 0]),
        ("quality", {}, [1, 0.85, 0, 0]),
        ("staged", {}, [1.0, 0.0, 0.0, 0.3]),
        ("win_rate", {}, [1.0, 2 / 3, 0.0, 1 / 3]),
    ],
)
def test_each_step(step, settings, expected):
    group = make_group(
        [1, 1, 0, 0],
        lengths=[3, 6, 3, 3],
        calls=[1, 2, 1, 0],
        errors=[0, 1, 1, 0],
        logprobs=[-0.5, -1, -0.1, -0.2],
        channels=CHANNELS,
    )
    close(shaped([group], {"kind": step, **settings})[0], expected)


def test_dynamic_length_step_spans_the_batch():
    groups = [make_group([1, 1], uid="a", lengths=[2, 4]), make_group([1, 0], uid="b")]
    result = shaped(groups, {"kind": "dynamic_length", "fraction": 0.5})
    assert result[0][0] > result[0][1]
    close(result[1], [1, 0])


def test_steps_run_in_order():
    group = make_group([1, 0], calls=[1, 1], errors=[1, 0])
    close(shaped([group], "outcome", "tool_errors")[0], [0.5, -1])
    soft = {"kind": "soft", "tau": 0.5, "above": 2.0}
    close(shaped([group], "tool_errors", soft)[0], [0.5, 0.5 - np.expm1(0.5) / np.expm1(1.0)])
    close(shaped([group], soft, "tool_errors")[0][0], 0.5 + 2.0 * np.log(1.5) - 0.5)


@pytest.mark.parametrize("kind", ["serial", "outcome", "budget", "surrogate", "posterior", "staged", "win_rate"])
def test_a_step_that_would_undo_those_before_it_is_refused(kind):
    check_steps(method(shaping=[kind, "overlong"]).shaping)
    with pytest.raises(ValueError, match=f"list {kind} first"):
        check_steps(method(shaping=["overlong", kind]).shaping)


def test_judge_by_dotted_path(monkeypatch):
    """Any matrix in which a pair shares one point; Pref-GRPO's own vector through the chain."""
    wins = np.array([[0, 0.5, 1, 1], [0.5, 0, 0.5, 1], [0, 0.5, 0, 0.5], [0, 0, 0.5, 0]])
    module = ModuleType("my_judges")
    module.preferred, module.broken = (lambda features: wins), (lambda features: np.ones((4, 4)))
    monkeypatch.setitem(sys.modules, "my_judges", module)
    group = make_group([0, 0, 0, 1])
    preferred = shaped([group], {"kind": "win_rate", "judge": "my_judges:preferred"})
    close(preferred[0], [0.833333, 0.666667, 0.333333, 0.166667])
    with pytest.raises(ValueError, match=r"shaping\.judge returned shape \(4, 4\)"):
        shaped([group], {"kind": "win_rate", "judge": "my_judges:broken"})


def test_pay_beside_the_answer_makes_nobody_correct():
    """Wrong but tidy: the reward is above 0 for its format, the outcome stays 0."""
    group = make_group([1.25, 0.25], channels={"answer": [1, 0], "format": [1, 1], "quality": [0.5, 0.5]})
    wrong = replace(group.verdicts[1], status="wrong")
    group = replace(group, verdicts=(group.verdicts[0], wrong))
    close(shaped([group], "posterior")[0], [2.5, 1])
    close(shaped([group], "outcome")[0], [1, -1])


def test_missing_channel_is_named():
    with pytest.raises(ValueError, match=r"'quality'.*none"):
        shaped([make_group([1, 0])], "quality")


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "overlong", "buffer": 0},
        {"kind": "overlong", "limit": 4095},
        {"kind": "dynamic_length", "fraction": 0.0},
        {"kind": "budget", "decay": 1.5},
        {"kind": "budget", "every": 0},
        {"kind": "budget", "start": 0},
    ],
)
def test_impossible_settings(settings):
    with pytest.raises(ConfigError, match=r"shaping"):
        method(shaping=[settings])


def test_surrogate_length():
    """Without an answer the length term counts where it is below 0."""
    lengths, channels = [0, 25, 50, 75, 100, 50, 100], {"format": [0, 0, 0.5, 0, 0, 0, 0]}
    answers = [1] * 5 + [0] * 2
    paid = one([0] * 7, "surrogate", settings={"length": 100}, lengths=lengths, channels=channels, answers=answers)
    close(paid, [0, 0.75, 1.5, 0.5, -1, 0, -1])


def test_budget():
    step = method(shaping=["budget"]).shaping[0]
    assert [int(step.tokens(s)) for s in (0, 49, 50, 100, 400)] == [256, 256, 217, 184, 69]
    assert step.tokens(10**6) == 1.0
    near = {"start": 200, "weights": [0, 1, 0]}
    close(one([0] * 6, "budget", settings=near, lengths=[0, 100, 200, 300, 400, 500]), [0, 0.5, 1, 0.5, 0, 0])


def test_budget_step_reads_the_training_step():
    group = make_group([1, 0], lengths=[4, 4])
    budget = {"kind": "budget", "start": 4, "decay": 0.5, "every": 1}
    early, late = (shaped([group], budget, state=AlgoState(step=step))[0] for step in (0, 1))
    close(early, [1.0, 0.4])
    close(late, [0.7, 0.1])


def test_the_prompt_names_the_budget():
    """Train Long, Think Short: the prompt names the budget that the reward is about to use."""
    steps = method(shaping=["overlong", {"kind": "budget", "tell": "{budget} tokens"}]).shaping
    assert [prompt_suffix(steps, step) for step in (0, 50)] == ["\n256 tokens", "\n217 tokens"]
    assert prompt_suffix(method(shaping=["budget"]).shaping, 0) == ""
