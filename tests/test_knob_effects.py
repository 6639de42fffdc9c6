"""No setting without effect: each is changed, in a context where it should matter, and something must come out
differently from the code of its stage. The table of all cases is made from the types of settings and from `SEEN` in
`knobs_*.py`, which says what sees them."""

import ast
import dataclasses
import math
import typing
from collections import Counter
from pathlib import Path

import pytest

from grpo_roc_jax.config import Config, read_config
from grpo_roc_jax.reward.config import Reward
from grpo_roc_jax.settings.cli import ConfigError, flatten
from grpo_roc_jax.settings.layers import known_keys
from grpo_roc_jax.settings.options import Axis, adapter
from tests.helpers import knobs_device, knobs_host, knobs_step, knobs_tools
from tests.helpers.knobs import Case, made, observation, related, table

KEYS = [key for key in known_keys(Config) if not key.endswith(".kind")]
SEEN = (*knobs_step.SEEN, *knobs_host.SEEN, *knobs_device.SEEN, *knobs_tools.SEEN)
METHOD = ("plan.", "plan", "resample", "shaping", "advantage", "weights", "surrogate")
"""Settings of the kinds of a method: `tests/method/test_kind_settings.py` changes each. Files of the user's are in
`tests/method/test_compose.py`."""
ADAPTERS = {
    "tools.executor": "url retries timeout_s concurrency batch actors cpus",
    "rollout.samplers": "count address cpus gpus tpus tensor timeout_s",
    "environment": "url action taskset harness runtime settings observation tasks container command_s processes",
}
BY_CONTRIB = {"plan.warmup_steps", "tools.executor", "rollout.samplers"}
BY_CONTRIB |= {f"{section}.{name}" for section, names in ADAPTERS.items() for name in names.split()}
"""Settings that only adapters and further methods read: `tests/contrib/test_knob_effects.py`."""


def contrib_rewards() -> set[str]:
    """Settings of the reward functions that further methods bring."""
    kinds = [f"reward.functions.{kind}." for kind, cls in Reward.kinds.items() if ".contrib." in cls.__module__]
    return {key for key in known_keys(Config) if key.startswith(tuple(kinds)) and not key.endswith(".kind")}


ELSEWHERE = """
checkpoint.fail_on_error environment.on_failure environment.retries environment.timeout_s model.experts.replay
optim.offload sampling.min_p sampling.top_k sampling.top_p sharding.data sharding.fsdp sharding.sequence sharding.tensor
text.template.history
"""
"""Settings whose effect a test of their own part sees: `record/test_checkpoint.py`, `environments`,
`engine/test_model_families.py`, `engine/test_sampling.py`, `learner/test_offload.py`, `model/test_sharding.py`,
`text/test_templates.py`."""


def left_out(key: str) -> bool:
    """Whether other tests show a setting."""
    others = BY_CONTRIB | contrib_rewards() | {"method.files", *ELSEWHERE.split()}
    return key.startswith(METHOD) or key in others


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


PACKAGE = Path(__file__).resolve().parent.parent / "grpo_roc_jax"
NOT_SECTIONS = ("Config", "RunConfig", "MethodConfig")
"""The whole, and two views of it."""


def test_every_setting_has_a_help_line():
    """Else it would be a bare name in `--help`."""
    section = ast.parse('class C:\n    a: int = 0\n    """Said."""\n    b: int = 0\n    c: int = 0\n    """Said."""\n')
    assert undocumented(section.body[0]) == ["b"]
    missing = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name.endswith("Config") and node.name not in NOT_SECTIONS:
                missing += [f"{node.name}.{name}" for name in undocumented(node)]
    assert not missing


def undocumented(node: ast.ClassDef) -> list[str]:
    pairs = zip(node.body, [*node.body[1:], None], strict=True)
    return [
        here.target.id
        for here, after in pairs
        if isinstance(here, ast.AnnAssign)
        and isinstance(here.target, ast.Name)
        and not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant))
    ]


def sections(section: type = Config) -> set[type]:
    """A section and all sections and kinds that its settings may be."""
    known: set[type] = set()
    waiting: list = [section]
    while waiting:
        kind = waiting.pop()
        waiting += typing.get_args(kind)
        if not dataclasses.is_dataclass(kind) and not (isinstance(kind, type) and issubclass(kind, Axis)):
            continue
        if kind not in known:
            known.add(kind)
            waiting += getattr(kind, "kinds", {}).values() if not getattr(kind, "kind", "") else ()
            waiting += (
                typing.get_type_hints(kind, include_extras=True).values() if dataclasses.is_dataclass(kind) else ()
            )
    return {kind for kind in known if dataclasses.is_dataclass(kind)}


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


@pytest.mark.parametrize("word", ["inf", "-Infinity", "nan", ".inf", "1e999"])
def test_the_message_says_that_a_number_must_be_finite(tmp_path, word):
    (tmp_path / "run.yaml").write_text(f"optim: {{lr: {word}}}\n")
    with pytest.raises(ConfigError, match=r"optim\.lr = .*run.yaml.*must be a (finite )?number"):
        read_config(str(tmp_path / "run.yaml"))
