"""`fastest`: order of the calls, the shortest time counts, candidates that do not run lose."""

import math
import time

import jax
import pytest

from grpo_roc_jax.model import choose
from grpo_roc_jax.model.choose import describe_choice, fastest


def test_the_quicker_one_wins_and_both_times_come_back():
    calls = []

    def taking(name: str, seconds: float):
        def call():
            calls.append(name)
            # The first call stands for compiling: it is long for the quick one and must not count.
            time.sleep(0.05 if calls.count(name) == 1 and name == "quick" else seconds)

        return call

    name, seconds = fastest({"slow": taking("slow", 0.02), "quick": taking("quick", 0.001)})
    assert name == "quick"
    assert calls == ["slow", "quick"] * (1 + choose.REPEATS)
    assert 0.001 <= seconds["quick"] < 0.02 <= seconds["slow"]


@pytest.mark.parametrize(
    "error",
    [
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room\nand more"),
        NotImplementedError(),
        ValueError("no such shape"),
    ],
)
def test_what_does_not_run_loses_unless_nothing_runs(error):
    def refused():
        raise error

    name, seconds = fastest({"kernel": refused, "reference": lambda: None})
    assert name == "reference"
    assert math.isinf(seconds["kernel"]) and math.isfinite(seconds["reference"])
    with pytest.raises(type(error)) as raised:
        fastest({"kernel": refused})
    assert raised.value is error
    with pytest.raises(ZeroDivisionError):  # no refusal of the device, but a fault of ours
        fastest({"broken": lambda: 1 // 0, "reference": lambda: None})


def test_a_choice_is_described_with_its_times_if_it_was_measured():
    assert describe_choice(("xla", {}), "ms", 1e3, 1) == "xla"
    assert describe_choice(("b", {"a": 0.25, "b": 0.125}), "ms a call", 1e3, 1) == "b (ms a call: a 250.0, b 125.0)"
