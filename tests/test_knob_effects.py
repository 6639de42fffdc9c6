"""No setting without effect: each is changed, in a context where it should matter, and something must come out
differently from the code of its stage. The table of all cases is made from the types of settings and from `SEEN` in
`knobs_*.py`, which says what sees them."""

import dataclasses
import math
import typing
from collections import Counter
from pathlib import Path

import pytest

from grpo_roc_jax.config import Config, read_config
from grpo_roc_jax.reward.config import Reward
from grpo_roc_jax.settings import cli, layers
from grpo_roc_jax.settings.options import Axis, adapter, described, fields_of
from tests.helpers import knobs_device, knobs_host, knobs_step, knobs_tools
from tests.helpers.knobs import Case, made, observation, table

KEYS = [key for key in layers.known_keys(Config) if not key.endswith(".kind")]
SEEN = (*knobs_step.SEEN, *knobs_host.SEEN, *knobs_device.SEEN, *knobs_tools.SEEN)
METHOD = ("plan.", "plan", "resample", "shaping", "advantage", "weights", "surrogate")
"""Settings of the kinds of a method: `tests/method/test_kind_settings.py` changes each."""
ADAPTERS = {
    "tools.executor": "url retries timeout_s concurrency batch actors cpus",
    "rollout.samplers": "count address cpus gpus tpus tensor timeout_s",
    "environment": "url action taskset harness runtime settings observation tasks container command_s processes",
}
BY_CONTRIB = {"plan.warmup_steps", "tools.executor", "rollout.samplers"}
BY_CONTRIB |= {f"{section}.{name}" for section, names in ADAPTERS.items() for name in names.split()}
"""Settings that only adapters and further methods read: `tests/contrib/test_knob_effects.py`."""
BY_FOLDER = {
    "": """environment environment.classes environment.path limits.empty_steps limits.infrastructure_share
        limits.infrastructure_steps limits.skipped_updates log.traces watch.notice_url""",
    "engine": """model.experts.replay rollout.attention rollout.low_precision.cache rollout.low_precision.weights
        sampling.min_p sampling.top_k sampling.top_p""",
    "environments": "environment.on_failure environment.retries environment.timeout_s log.samples",
    "learner": """optim.lr optim.warmup_steps optim.beta1 optim.beta2 optim.eps optim.weight_decay optim.max_grad_norm
        optim.moment_dtype optim.schedule optim.schedule.total_steps optim.schedule.final_ratio optim.offload""",
    "model": "sharding.data sharding.fsdp sharding.sequence sharding.tensor",
    "record": """checkpoint.every checkpoint.fail_on_error checkpoint.keep log.console log.tensorboard log.wandb
        log.wandb.project""",
    "run": "eval.every name resume run_dir stages steps watch.stall_factor watch.stall_floor_s",
    "sandbox": """tools.bare_root tools.executor.memory_mb tools.executor.parent tools.executor.processes
        tools.scratch_dir tools.sessions tools.start_timeout_s tools.workers""",
    "serving": """environment.address environment.at_once environment.function environment.port environment.trained
        environment.warm""",
    "text": "text.template.history",
    "tools": "tools.share_results",
}
"""Folder of tests -> settings that these use, and whose effect they see."""
ELSEWHERE = " ".join(BY_FOLDER.values())


def contrib_rewards() -> set[str]:
    """Settings of the reward functions that further methods bring."""
    kinds = [f"reward.functions.{kind}." for kind, cls in Reward.kinds.items() if ".contrib." in cls.__module__]
    return {key for key in layers.known_keys(Config) if key.startswith(tuple(kinds)) and not key.endswith(".kind")}


OTHERS = BY_CONTRIB | contrib_rewards() | {"method.files", *ELSEWHERE.split()}
SHOWN = [key for key in KEYS if not key.startswith(METHOD) and key not in OTHERS]
CASES: dict[str, Case] = table(SEEN, SHOWN) | knobs_tools.EXECUTOR


def changes_something(key: str, case: Case) -> bool:
    if reason := case.unless():
        pytest.skip(reason)
    before = observation(case.observe, case.without())
    assert observation(case.observe, case.without(), 1) == before, "the observer is not deterministic"
    return any(observation(case.observe, changed) != before for changed in case.changed(key))


@pytest.mark.parametrize("key", CASES)
def test_setting_changes_something(key):
    assert changes_something(key, CASES[key])


def test_every_setting_has_a_case():
    assert set(CASES) == set(SHOWN)
    assert max(Counter(key for line in SEEN for key in line.values).values()) == 1, "two values for one setting"
    assert max(Counter(name for line in SEEN for name in line.names).values()) == 1, "two contexts for one name"
    assert not changes_something("seed", Case(lambda config: config.data.eval_seed * 0))


@pytest.mark.parametrize("folder", BY_FOLDER)
def test_settings_of_other_tests_are_used_there(folder):
    paths = [path for path in (Path(__file__).parent / folder).glob("test_*.py") if path != Path(__file__)]
    text = "".join(path.read_text(encoding="utf-8") for path in paths)
    unseen = [key for key in BY_FOLDER[folder].split() if key.rsplit(".", 1)[-1] not in text]
    assert not unseen, "no test there names them any more: let an observer of `helpers/knobs_*.py` see them"


def test_what_would_not_be_read_is_refused():
    """Combinations in which one of two settings that were asked for could not matter."""
    with pytest.raises(ValueError, match="as they come"):
        made({"advantage": "channels", "shaping": ["overlong"]})
    with pytest.raises(ValueError, match="history"):
        made({"text.history": "refuse"})


def test_every_setting_has_a_help_line():
    """Else it would be a bare name in `--help`."""
    kinds = sections() - {Config}
    assert not [f"{kind.__name__}.{name}" for kind in kinds for name in fields_of(kind) if name not in described(kind)]


def sections(section: type = Config) -> set[type]:
    """A section and all sections and kinds that its settings may be."""
    known: set[type] = set()
    waiting: list = [section]
    while waiting:
        kind = waiting.pop()
        waiting += typing.get_args(kind)
        holds = isinstance(kind, type) and (dataclasses.is_dataclass(kind) or issubclass(kind, Axis))
        if not holds or kind in known:
            continue
        known.add(kind)
        waiting += getattr(kind, "kinds", {}).values() if not getattr(kind, "kind", "") else ()
        waiting += typing.get_type_hints(kind, include_extras=True).values() if dataclasses.is_dataclass(kind) else ()
    return set(filter(dataclasses.is_dataclass, known))


def floats(kind: type) -> list[str]:
    """The settings of a section that may be a float, alone or in a list or mapping."""

    def may_be(hint):
        return hint is float or any(map(may_be, typing.get_args(hint)))

    hints = typing.get_type_hints(kind)
    return [field.name for field in dataclasses.fields(kind) if field.init and may_be(hints[field.name])]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_no_setting_is_infinite_or_not_a_number(value):
    """In every section and kind of the core, for numbers alone, in lists and in mappings."""
    kinds = [kind for kind in sections() if ".contrib." not in kind.__module__]
    assert sum(len(floats(kind)) for kind in kinds) > 60
    assert accepted_by(kinds, value) == []
    with pytest.raises(cli.ConfigError, match=r"optim\.lr = .*must be a (finite )?number"):
        read_config(f"--optim.lr={value}")


def accepted_by(kinds: list[type], value: float) -> list[str]:
    """The settings of these kinds that take the value, alone, in a list or in a mapping."""
    accepted = []
    for kind, name in [(each, name) for each in kinds for name in floats(each)]:
        for tried in (value, [value], {"a": value}):
            try:
                made = adapter(kind).validate_python({name: tried})
            except Exception:
                continue
            accepted.append(f"{kind.__name__}.{name} = {getattr(made, name)}")
    return accepted
