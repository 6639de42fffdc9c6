"""No setting without effect: each is changed, in a context where it should matter, and something must come out
differently from the code of its stage. The table of all cases is made from the types of settings and from `SEEN` in
`knobs_*.py`, which says what sees them."""

from collections import Counter

import pytest

from grpo_roc_jax.config import Config
from grpo_roc_jax.reward.config import Reward
from grpo_roc_jax.settings.cli import flatten
from grpo_roc_jax.settings.layers import known_keys
from tests.helpers import knobs_device, knobs_host, knobs_step, knobs_tools
from tests.helpers.knobs import Case, made, observation, related, table

KEYS = [key for key in known_keys(Config) if not key.endswith(".kind")]
SEEN = (*knobs_step.SEEN, *knobs_host.SEEN, *knobs_device.SEEN, *knobs_tools.SEEN)
METHOD = ("plan.", "plan", "resample", "shaping", "advantage", "weights", "surrogate")
"""Settings of the kinds of a method: `tests/method/test_kind_settings.py` changes each. Files of the user's are in
`tests/method/test_plugins.py`."""
BY_CONTRIB = {"plan.warmup_steps", "tools.executor"} | {
    f"tools.executor.{name}" for name in ["url", "retries", "timeout_s", "concurrency", "batch", "actors", "cpus"]
}
BY_CONTRIB |= {"rollout.samplers"} | {
    f"rollout.samplers.{name}" for name in ["count", "address", "cpus", "gpus", "tpus", "tensor", "timeout_s"]
}
ADAPTERS = ("url", "action", "taskset", "harness", "runtime", "settings", "observation")
HARBOR = ("tasks", "container", "command_s", "processes")
BY_CONTRIB |= {f"environment.{name}" for name in (*ADAPTERS, *HARBOR)}
"""Settings that only adapters and further methods read: `tests/contrib/test_knob_effects.py`."""


def contrib_rewards() -> set[str]:
    """Settings of the reward functions that further methods bring."""
    kinds = [f"reward.functions.{kind}." for kind, cls in Reward.kinds.items() if ".contrib." in cls.__module__]
    return {key for key in known_keys(Config) if key.startswith(tuple(kinds)) and not key.endswith(".kind")}


def left_out(key: str) -> bool:
    """Whether other tests show a setting."""
    return key.startswith(METHOD) or key == "method.files" or key in BY_CONTRIB or key in contrib_rewards()


CASES: dict[str, Case] = table(SEEN, (key for key in KEYS if not left_out(key))) | knobs_tools.EXECUTOR
TOGETHER = [key for key, case in CASES.items() if case.along.keys() > {key}]
"""Settings of the executor that are changed all at once, so that few processes have to start."""


def changes_something(key: str, case: Case, *, alone: bool = False) -> bool:
    if reason := case.unless():
        pytest.skip(reason)
    before = observation(case.observe, case.without())
    assert observation(case.observe, case.without(), 1) == before, "the observer is not deterministic"
    return any(observation(case.observe, changed) != before for changed in case.changed(key, alone=alone))


@pytest.mark.parametrize("key", CASES)
def test_setting_changes_something(key):
    assert changes_something(key, CASES[key])


@pytest.mark.slow
@pytest.mark.parametrize("key", TOGETHER)
def test_setting_changes_something_by_itself(key):
    assert changes_something(key, CASES[key], alone=True)


def test_every_setting_has_a_case():
    assert set(CASES) == {key for key in KEYS if not left_out(key)}
    assert max(Counter(key for line in SEEN for key in line.values).values()) == 1, "two values for one setting"
    assert max(Counter(name for line in SEEN for name in line.names).values()) == 1, "two contexts for one name"


def test_a_case_changes_its_setting_and_no_other():
    for key, case in CASES.items():
        without = dict(flatten(case.without()))
        for config in case.changed(key):
            changed, named = dict(flatten(config)), (key, *case.along)
            differs = {name for name in without | changed if without.get(name) != changed.get(name)}
            assert all(any(related(name, setting) for setting in named) for name in differs), key
            assert all(any(related(name, setting) for name in differs) for setting in named), key


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"advantage": "channels", "shaping": ["overlong"]}, "as they come"),
        ({"text.eos_token": "</s>"}, "eos_token"),
        ({"text.history": "refuse"}, "history"),
    ],
)
def test_what_would_not_be_read_is_refused(settings, message):
    """Combinations in which one of two settings that were asked for could not matter."""
    with pytest.raises(ValueError, match=message):
        made(settings)


def test_an_observer_that_sees_nothing_would_be_found():
    assert not changes_something("seed", Case(lambda config: config.data.eval_seed * 0))
