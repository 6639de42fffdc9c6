"""Reward maps against the vectors of the family's specification, and the chain of the config."""

from dataclasses import replace

import numpy as np
import pytest

from grpo_roc_jax.method.shaping import check_steps, prompt_suffix
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.callables import given
from tests.helpers.method_groups import make_group, method
from tests.method.test_shaping import close, shaped

CHANNELS = {"format": [1, 1, 0, 0], "quality": [0.8, 0.4, 0.2, 0.1]}
FAILING = {"calls": [1, 2, 1, 0], "errors": [0, 1, 1, 0]}
LENGTHS = {
    "lengths": [0, 25, 50, 75, 100, 50, 100],
    "answers": [1] * 5 + [0] * 2,
    "channels": {"format": [0, 0, 0.5, 0, 0, 0, 0]},
}


@pytest.mark.parametrize(
    ("step", "rewards", "group", "expected"),
    [
        ("dynamic_length", [1] * 4, {"lengths": [100, 200, 300, 400]}, [0.875656, 0.765986, 0.634014, 0.524344]),
        ("dynamic_length", [1, 0], {"lengths": [5, 9]}, [0.7, 0]),
        ("serial", [0, 1, 1, 0, 1], {}, [0, 1, 0.5, 0, 0.25]),
        ("unlikeliness", [1, 1, 1, 0], {"logprobs": [-0.5, -1, -2, -0.3]}, [0.875, 0.9375, 1, 0]),
        ("posterior", [1, 1, 0, 0], {"channels": CHANNELS}, [2.8, 2.4, 0, 0]),
        ("posterior", [1, 0, 0], {"channels": {"format": [1] * 3, "quality": [0.2, 0.9, 0.9]}}, [2.2, 1, 1]),
        ("quality", [1, 1, 0, 1], {"channels": {"quality": [0.8, 0.4, 0.8, 0]}}, [1, 0.85, 0, 0.7]),
        ("quality", [1, 1, 0, 1], {"channels": {"quality": [0] * 4}}, [0.7, 0.7, 0, 0.7]),
        ("soft", [0, 0.2, 0.5, 0.8, 1], {}, [0.086764, 0.321546, 0.596390, 0.8, 0.801823]),
        ("staged", [1, 0, 1, 1], {"errors": [1, 0, 0, 0], "answers": [1, 1, 2, 1]}, [0, 0.3, 0.1, 1]),
        ("tool_errors", [1, 1, 0, 0], FAILING, [1, 0.75, -0.5, 0]),
        ("win_rate", [1, 1, 0, 0], FAILING, [1.0, 2 / 3, 0.0, 1 / 3]),
        ({"kind": "outcome", "negative": 2.0}, [1, 0], {}, [1, -2]),
        ({"kind": "surrogate", "length": 100}, [0] * 7, LENGTHS, [0, 0.75, 1.5, 0.5, -1, 0, -1]),
        (
            {"kind": "budget", "start": 200, "weights": [0, 1, 0]},
            [0] * 6,
            {"lengths": [0, 100, 200, 300, 400, 500]},
            [0, 0.5, 1, 0.5, 0, 0],
        ),
        (
            {"kind": "budget", "start": 3},
            [1, 1, 0, 0],
            {"lengths": [3, 6, 3, 3], "channels": CHANNELS},
            [1.0, 0.7, 0.4, 0.4],
        ),
    ],
)
def test_vectors(step, rewards, group, expected):
    close(shaped([make_group(rewards, **group)], step)[0], expected)


def test_dynamic_length_step_spans_the_batch():
    """The better-solved half of the groups pays by length, the other keeps its rewards."""
    lengths = [100, 200, 300, 400]
    groups = [make_group([1, 0, 0, 0], lengths=lengths), make_group([1, 1, 0, 1], lengths=lengths)]
    hard, easy = shaped(groups, {"kind": "dynamic_length", "fraction": 0.5})
    close(hard, [1, 0, 0, 0])
    assert easy[2] == 0 and 1 > easy[0] > easy[1] > easy[3] > 0


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


def test_a_judge_of_the_users():
    """Any matrix in which a pair shares one point; Pref-GRPO's own vector through the chain."""
    wins = np.array([[0, 0.5, 1, 1], [0.5, 0, 0.5, 1], [0, 0.5, 0, 0.5], [0, 0, 0.5, 0]])
    group, step = make_group([0, 0, 0, 1]), {"kind": "win_rate", "judge": "mine"}
    with given({"mine": lambda features: wins}):
        close(shaped([group], step)[0], [0.833333, 0.666667, 0.333333, 0.166667])
    refused = pytest.raises(ValueError, match=r"shaping\.judge returned shape \(4, 4\)")
    with given({"mine": lambda features: np.ones((4, 4))}), refused:
        shaped([group], step)


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


def test_the_budget_falls_with_the_step_and_is_named_in_the_prompt():
    """Train Long, Think Short: the prompt names the budget that the reward is about to use."""
    step = method(shaping=["budget"]).shaping[0]
    assert [int(step.tokens(s)) for s in (0, 49, 50, 100, 400)] == [256, 256, 217, 184, 69]
    assert step.tokens(10**6) == 1.0 and prompt_suffix([step], 0) == ""
    steps = method(shaping=["overlong", {"kind": "budget", "tell": "{budget} tokens"}]).shaping
    assert [prompt_suffix(steps, step) for step in (0, 50)] == ["\n256 tokens", "\n217 tokens"]
    group = make_group([1, 0], lengths=[4, 4])
    budget = {"kind": "budget", "start": 4, "decay": 0.5, "every": 1}
    paid = [shaped([group], budget, state=AlgoState(step=step))[0] for step in (0, 1)]
    close(paid, [[1.0, 0.4], [0.7, 0.1]])
