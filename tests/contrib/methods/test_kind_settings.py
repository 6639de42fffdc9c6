"""Settings of further methods have effects and bounds; impossible and contradicting ones are refused."""

import numpy as np
import pytest

from grpo_roc_jax.config import Config, read_config
from grpo_roc_jax.settings.cli import ConfigError, build
from grpo_roc_jax.settings.layers import Layer
from tests.helpers.kind_cases import CONTEXT, VALUES, KindCases, kinds_of, settings_of
from tests.method import test_kind_settings as core

OTHER_VALUES = {
    ("shaping", "judge"): "earlier",
    ("advantage.adjust", "channels"): ["quality"],
    ("advantage.adjust", "targets"): [0.1],
    ("shaping", "format_channel"): "quality",
    ("shaping", "quality_channel"): "format",
    ("shaping", "fraction"): 1.0,
    ("advantage.adjust", "novelty", "cap"): 0.1,
    ("plan.problems", "group"): 2,
    ("plan.problems", "solved"): 0.1,
    ("plan.budget", "least"): 7,
    ("plan.budget", "alpha"): 0.9,
    ("plan.temperature", "diversity_target"): 1.0,
    ("plan.condition", "column"): "more_hints",
    ("plan.second", "refine", "column"): "hints",
    ("plan.second", "below"): 2.0,
    ("plan.condition", "library"): ["z"],
    **dict.fromkeys([("plan.second", "teacher"), ("plan.condition", "scorer")], "says"),
    **dict.fromkeys([("advantage.adjust", "cap"), ("plan.condition", "cache"), ("plan.second", "value", "most")], 1),
    **dict.fromkeys([("plan.second", "levels"), ("plan.budget", "remembered")], 1),
    ("plan.second", "examples", "remembered"): 0,
    ("plan.condition", "templates"): ["Say: {prompt}"],
    ("shaping", "similarity"): "alike",
    ("shaping", "entropy"): "",
    ("advantage", "expert"): "expert",
    ("plan.budget", "predictor"): "rising",
    ("weights.masks", "threshold"): 0.25,
    ("weights.factors", "bound"): 1e-9,
    ("weights.factors", "limit"): 0.7,
    ("weights.factors", "rejection", "low"): 0.9,
    ("weights.factors", "rejection", "measure"): "error",
    ("weights.factors", "veto", "low"): 0.6,
    ("advantage", "floor"): 50.0,
    ("advantage.scale", "low"): -1.0,
    ("advantage.scale", "high"): 2.0,
}
"""Other values by axis and setting, where the one made from the type would be refused or change nothing."""
FURTHER_CONTEXT = {
    ("shaping", "surrogate"): {"length": 30},
    ("shaping", "budget"): {"start": 20, "every": 1},
    ("advantage.adjust", "constraints"): {"channels": ["format"], "targets": [0.9], "lr": 5.0, "max": 0.3},
    ("advantage", "drpo"): {"max_length": 40},
    ("advantage", "positions"): {"items": 1},
    ("plan.condition", "skills"): {"library": ["a", "b", "c"], "scorer": "ranked", "least": 0.6, "explore": 0.5},
    ("resample", "rc_roc"): {"drop": "none", "positive_select": "inverse"},
    ("shaping", "stability"): {"entropy": "size"},
    ("plan.budget", "knapsack"): {"least": 1, "most": 16},
    ("plan.budget", "predicted"): {"least": 1, "most": 16},
    ("plan.budget", "half_width"): {"pilot": 2, "bonus": 0.1, "most": 12},
    ("surrogate", "vespo"): {"level": "turn"},
    ("weights.factors", "rejection"): {"high": 1.1},
    ("weights.factors", "repetition"): {"n": 1},
}
"""Settings of a kind that hold throughout, so that the others can matter."""


def alike(first, second):
    return float(len(first) == len(second))


def ranked(problem, skills):
    return -0.7 * np.arange(len(skills))


def says(problem, shown):
    return [-9.0 * bool(i) for i in range(len(shown))] if isinstance(shown, list) else f"look: {len(shown)}"


def rising(problems, record):
    return np.linspace(0.1, 0.9, len(problems))


def expert(problem, turn):
    return len(turn.calls) / 3


def earlier(entries):
    return np.triu(np.ones((entries.size, entries.size)), 1)


CASES = KindCases(
    VALUES | OTHER_VALUES,
    CONTEXT | FURTHER_CONTEXT,
    {function.__name__: function for function in (alike, ranked, says, rising, expert, earlier)},
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
BY_VERDICT = {
    "plan.problems": {"pairs", "uncertainty", "no_positive_resampling"},
    "plan.budget": {"knapsack", "predicted"},
    "plan.condition": {"hint_level"},
    "plan.second": {"retry", "scaffold", "guide", "explain", "draft", "examples", "feedback", "value", "refine"}
    | {"write", "rival_hints", "predict"},
    "resample": {"rc_roc"},
    "shaping": {"dynamic_length", "outcome", "posterior", "quality", "serial", "skill_bonus", "staged", "budget"}
    | {"unlikeliness", "win_rate"},
    "advantage": {"disco", "drpo", "m_grpo"},
    "advantage.baseline": {"tracker", "shrunk"},
    "advantage.adjust": {"focal", "novelty", "truncation_mask"},
    "weights.factors": {"repetition"},
}
"""Kinds that tell successes from failures. The others know rewards only."""
IN_CHANGED_GROUPS = {"beta": {"low": -1.0, "high": 2.0}, "no_positive_resampling": {"solved": 0.8}}
"""Settings under which verdicts can matter."""
assert set(SETTINGS) >= ELSEWHERE
assert {(axis, kind) for axis, kinds in BY_VERDICT.items() for kind in kinds} <= set(kinds_of("contrib"))


@pytest.mark.parametrize(("axis", "kind", "setting"), [s for s in SETTINGS if s not in ELSEWHERE])
def test_setting_changes_something(axis, kind, setting):
    assert CASES.changes(axis, kind, setting)


@pytest.mark.parametrize("setting", [s for s, default in SETTINGS.items() if type(default) in (int, float)], ids=str)
def test_numbers_are_bounded(setting):
    core.test_numbers_are_bounded(setting, SETTINGS, CASES, UNBOUNDED, FROM_ZERO)


@pytest.mark.parametrize(("axis", "kind"), kinds_of("contrib"))
def test_a_success_is_what_the_verdict_says(axis, kind):
    reads = CASES.reads(axis, kind, **IN_CHANGED_GROUPS.get(kind, {}))
    assert reads == (kind in BY_VERDICT.get(axis, ()), False)


@pytest.mark.parametrize(
    ("axis", "kind", "message"),
    [
        ("plan.problems", {"kind": "uncertainty", "pool": 0}, "must be at least 2"),
        ("plan.budget", {"kind": "knapsack", "least": 9, "most": 8}, "least = 9"),
        ("plan.budget", {"kind": "half_width", "pilot": 1}, "must be at least 2"),
        ("plan.budget", {"kind": "half_width", "alpha": 1.0}, "must be below 1"),
        ("plan.budget", {"kind": "half_width", "pilot": 32}, "leaves nothing to allocate"),
        ("plan.second", {"kind": "serial", "cuts": 3}, r"4 trajectories per problem but 32 .* set group\.size 4"),
        ("plan.temperature", {"kind": "rising", "temperatures": [1.0, 0.9]}, "must rise"),
        ("plan.temperature", {"kind": "rising", "temperatures": [0.0, 0.9]}, "must be above 0"),
        ("plan.temperature", {"kind": "rising", "temperatures": []}, "at least one"),
        ("resample", {"kind": "rc_roc"}, "nothing to tell apart"),
        ("shaping", [{"kind": "overlong", "limit": 4095}], "limit = 4095"),
        ("shaping", [{"kind": "dynamic_length", "fraction": 0.0}], "must be above 0"),
        ("shaping", ["overlong", "dynamic_length"], "list dynamic_length first"),
        ("plan.condition", {"kind": "skills", "library": []}, "library is empty; must have at least one skill"),
        ("shaping", [{"kind": "budget", "decay": 1.5}], "must be at most 1"),
        ("advantage.scale", {"kind": "beta", "low": 1.0}, r"low = 1\.0; must be below"),
        ("weights.masks", [{"kind": "top_entropy", "share": 0.0}], "must be above 0"),
        ("weights.masks", [{"kind": "top_entropy", "share": 1.1}], "must be at most 1"),
        ("weights.factors", [{"kind": "truncated_is", "high": 0.5}], "low = 0, high = 0.5; must be bounds around 1"),
        ("weights.factors", [{"kind": "masked_is", "low": 1.5}], "low = 1.5, high = 2; must be bounds around 1"),
        ("weights.factors", [{"kind": "rejection", "measure": "k2"}], "low = 0.5, high = 2; must be bounds around 0"),
        ("weights.factors", [{"kind": "truncated_is", "level": "sequence"}], "must be 'token', 'product' or"),
        ("weights.factors", [{"kind": "veto", "low": 0.0}], r"low = 0\.0: must be above 0"),
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
        ("--plan.budget=knapsack --plan.second=serial", "cuts of one"),
        ("--plan.condition=reward_tokens --data.eval_problems=0", r"plan\.condition\.separation 0"),
        ("--plan.condition=reward_tokens --sft.reward_tokens=text", "set both alike"),
        ("--plan.second=draft --rollout.step_limit=partial --rollout.step_limit.seconds=9", "use one of the two"),
        ("--plan.budget=knapsack --rollout.step_limit=stream", "use one of the two"),
        ("--shaping=kl --weights.factors=learned_length", r"use advantage\.adjust kl"),
        ("--shaping=kl --plan.condition=skills", r"use advantage\.adjust kl"),
        ("--shaping=overlong --advantage=pass_at_k", "pass_at_k does not read the reward, so shaping overlong"),
        *(
            (f"--environment.kind=agent --environment.command=a --plan.second={kind}", "are its own")
            for kind in ("guide", "refine", "explain", "rival_hints")
        ),
        ("--shaping=overlong --advantage=m_grpo", "m_grpo does not read the reward"),
        ("--shaping=overlong --advantage=disco", "disco does not read the reward"),
        ("--shaping=overlong --advantage=drpo", "drpo does not read the reward"),
        ("methods/tempsamp_r1.yaml --surrogate.old_logprobs=recorded", "set surrogate.old_logprobs scored, or"),
        ("methods/think_tuning.yaml --surrogate.old_logprobs=recorded", "feedback trains tokens that were not sampled"),
    ],
)
def test_settings_that_contradict_each_other(words, message):
    with pytest.raises(ConfigError, match=message):
        read_config(*words.split())
    read_config("--shaping=overlong", "--advantage=pass_at_k", "--advantage.adjust=turns")  # which reads rewards
