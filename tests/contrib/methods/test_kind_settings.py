"""Settings of further methods have effects and bounds; impossible and contradicting ones are refused."""

import numpy as np
import pytest

from grpo_roc_jax.config import Config, read_config
from grpo_roc_jax.settings.cli import ConfigError, build
from grpo_roc_jax.settings.layers import Layer
from tests.helpers.kind_cases import CONTEXT, VALUES, KindCases, kinds_of, settings_of
from tests.method import test_kind_settings as core

OF_A_KIND = {
    ("advantage.adjust", "novelty", "cap"): 0.1,
    ("plan.second", "refine", "column"): "hints",
    ("plan.second", "value", "most"): 1,
    ("plan.second", "examples", "remembered"): 0,
    ("weights.factors", "rejection", "low"): 0.9,
    ("weights.factors", "rejection", "measure"): "error",
    ("weights.factors", "veto", "low"): 0.6,
}
OF_AN_AXIS = {
    "plan.problems": {"group": 2, "solved": 0.1},
    "plan.budget": {"least": 7, "alpha": 0.9, "remembered": 1, "predictor": "rising"},
    "plan.temperature": {"diversity_target": 1.0},
    "plan.condition": {"column": "more_hints", "library": ["z"], "scorer": "says", "cache": 1}
    | {"templates": ["{prompt}!"]},
    "plan.second": {"below": 2.0, "teacher": "says", "levels": 1},
    "shaping": {"judge": "earlier", "fraction": 1.0, "similarity": "alike", "entropy": ""}
    | {"format_channel": "quality", "quality_channel": "format"},
    "advantage": {"expert": "expert", "floor": 50.0},
    "advantage.scale": {"low": -1.0, "high": 2.0},
    "advantage.adjust": {"channels": ["quality"], "targets": [0.1], "cap": 1},
    "weights.masks": {"threshold": 0.25},
    "weights.factors": {"bound": 1e-9, "limit": 0.7},
}
"""Other values of settings, where the one made from the type would be refused or change nothing."""
FURTHER_CONTEXT = {
    "plan.budget": {name: {"least": 1, "most": 16} for name in ("knapsack", "predicted")}
    | {"half_width": {"pilot": 2, "bonus": 0.1, "most": 12}},
    "plan.condition": {"skills": {"library": ["a", "b", "c"], "scorer": "ranked", "least": 0.6, "explore": 0.5}},
    "resample": {"rc_roc": {"drop": "none", "positive_select": "inverse"}},
    "shaping": {"surrogate": {"length": 30}, "budget": {"start": 20, "every": 1}, "stability": {"entropy": "size"}},
    "advantage": {"drpo": {"max_length": 40}, "positions": {"items": 1}},
    "advantage.adjust": {"constraints": {"channels": ["format"], "targets": [0.9], "lr": 5.0, "max": 0.3}},
    "surrogate": {"vespo": {"level": "turn"}},
    "weights.factors": {"rejection": {"high": 1.1}, "repetition": {"n": 1}},
}
"""Settings of a kind that hold throughout, so that the others can matter."""
FUNCTIONS = {
    "alike": lambda first, second: float(len(first) == len(second)),
    "ranked": lambda problem, skills: -0.7 * np.arange(len(skills)),
    "says": lambda _, shown: -9.0 * np.arange(len(shown)) if isinstance(shown, list) else f"look: {len(shown)}",
    "rising": lambda problems, record: np.linspace(0.1, 0.9, len(problems)),
    "expert": lambda problem, turn: len(turn.calls) / 3,
    "earlier": lambda entries: np.triu(np.ones((entries.size, entries.size)), 1),
}


def by_axis(values):
    """A table by axis and setting, or by axis and kind, from one by axis."""
    return {(axis, name): value for axis, named in values.items() for name, value in named.items()}


CASES = KindCases(
    VALUES | by_axis(OF_AN_AXIS) | OF_A_KIND,
    CONTEXT | by_axis(FURTHER_CONTEXT),
    FUNCTIONS,
    conditions=("skill:1", "", "", "", "feedback", "paraphrase:1", "demonstration", "low_reward"),
    written="hint_writer:1",
)
SETTINGS = settings_of("contrib")
UNBOUNDED = """
skill_bonus.bonus dynamic_length.alpha outcome.negative soft.tau soft.above soft.below unlikeliness.beta beta.low
virtual_max.reward virtual_std.reward rebel.eta refine.below learned_length.strength
""".split()  # noqa: SIM905 (shorter than a list)
FROM_ZERO = ["ddof", "remembered", "min_positive", "min_negative"]
ELSEWHERE = {
    # `run.sample` draws the pool: test_rounds.py.
    *(("plan.problems", kind, "pool") for kind in ("pairs", "uncertainty", "no_positive_resampling")),
    # The fixed rates are no bounds of a group, and the fixed groups have one wording: test_planning.py.
    ("plan.problems", "pairs", "group"),
    *(("plan.budget", "predicted", name) for name in ("half_life", "sharpness", "prior")),
}
BY_VERDICT = """
pairs uncertainty no_positive_resampling knapsack predicted hint_level retry scaffold guide explain draft examples
feedback value refine write rival_hints predict rc_roc dynamic_length outcome posterior quality serial skill_bonus
staged budget unlikeliness win_rate disco drpo m_grpo tracker shrunk focal novelty truncation_mask repetition
""".split()  # noqa: SIM905
"""Kinds that tell successes from failures. The others know rewards only."""
NAMESAKES = {("plan.second", "serial"), ("weights.factors", "feedback")}
"""Kinds of another axis with a name of these, which know rewards only."""
IN_CHANGED_GROUPS = {"beta": {"low": -1.0, "high": 2.0}, "no_positive_resampling": {"solved": 0.8}}
"""Settings under which verdicts can matter."""
assert set(SETTINGS) >= ELSEWHERE and {kind for _, kind in kinds_of("contrib")} >= set(BY_VERDICT)


@pytest.mark.parametrize(("axis", "kind", "setting"), [s for s in SETTINGS if s not in ELSEWHERE])
def test_setting_changes_something(axis, kind, setting):
    assert CASES.changes(axis, kind, setting)


@pytest.mark.parametrize("setting", [s for s, default in SETTINGS.items() if type(default) in (int, float)], ids=str)
def test_numbers_are_bounded(setting):
    core.test_numbers_are_bounded(setting, SETTINGS, CASES, UNBOUNDED, FROM_ZERO)


@pytest.mark.parametrize(("axis", "kind"), kinds_of("contrib"))
def test_a_success_is_what_the_verdict_says(axis, kind):
    reads = CASES.reads(axis, kind, **IN_CHANGED_GROUPS.get(kind, {}))
    assert reads == (kind in BY_VERDICT and (axis, kind) not in NAMESAKES, False)


@pytest.mark.parametrize(
    ("axis", "kind", "message"),
    [
        ("plan.budget", {"kind": "knapsack", "least": 9, "most": 8}, "least = 9"),
        ("plan.second", {"kind": "serial", "cuts": 3}, r"4 trajectories per problem but 32 .* set group\.size 4"),
        ("resample", {"kind": "rc_roc"}, "nothing to tell apart"),
        ("shaping", ["overlong", "dynamic_length"], "list dynamic_length first"),
        ("plan.condition", {"kind": "skills", "library": []}, "library is empty; must have at least one skill"),
        ("weights.factors", [{"kind": "masked_is", "low": 1.5}], "low = 1.5, high = 2; must be bounds around 1"),
        ("surrogate", {"kind": "vespo", "level": "token"}, r"set surrogate\.level sequence or turn"),
    ],
    ids=str,
)
def test_impossible_settings(axis, kind, message):
    for name in reversed(axis.split(".")):
        kind = {name: kind}
    with pytest.raises(ConfigError, match=rf"(?s){axis.partition('.')[0]}.*{message}"):
        build(Config, [Layer("test", kind)])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--plan.condition=reward_tokens --plan.second=draft", "a rollout has one condition"),
        ("--plan.second=draft --rollout.step_limit=partial --rollout.step_limit.seconds=9", "use one of the two"),
        ("--shaping=kl --plan.condition=skills", r"use advantage\.adjust kl"),
        ("--environment.kind=agent --environment.command=a --plan.second=guide", "are its own"),
        ("methods/think_tuning.yaml --surrogate.old_logprobs=recorded", "feedback trains tokens that were not sampled"),
    ],
)
def test_settings_that_contradict_each_other(words, message):
    with pytest.raises(ConfigError, match=message):
        read_config(*words.split())
    read_config("--shaping=overlong", "--advantage=pass_at_k", "--advantage.adjust=turns")  # which reads rewards
