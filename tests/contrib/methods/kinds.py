"""What the kinds of further methods need to show their settings, beside what the kinds of the core need."""

import numpy as np

from tests.helpers.kind_cases import CONTEXT, VALUES, KindCases

OTHER_VALUES = {
    ("shaping", "judge"): "earlier",
    ("advantage.adjust", "channels"): ["quality"],
    ("advantage.adjust", "targets"): [0.1],
    ("shaping", "format_channel"): "quality",
    ("shaping", "quality_channel"): "format",
    ("shaping", "fraction"): 1.0,
    ("advantage.adjust", "cap"): 1,
    ("advantage.adjust", "novelty", "cap"): 0.1,
    ("plan.problems", "group"): 2,
    ("plan.problems", "solved"): 0.1,
    ("plan.budget", "least"): 7,
    ("plan.budget", "alpha"): 0.9,
    ("plan.temperature", "diversity_target"): 1.0,
    ("plan.condition", "column"): "more_hints",
    ("plan.second", "refine", "column"): "hints",
    ("plan.second", "below"): 2.0,
    ("plan.second", "teacher"): "says",
    ("plan.condition", "library"): ["z"],
    ("plan.condition", "scorer"): "says",
    ("plan.condition", "cache"): 1,
    ("plan.second", "value", "most"): 1,
    ("plan.condition", "templates"): ["Say: {prompt}"],
    ("shaping", "similarity"): "alike",
    ("shaping", "entropy"): "",
    ("advantage", "expert"): "expert",
    ("plan.second", "levels"): 1,
    ("plan.second", "examples", "remembered"): 0,
    ("plan.budget", "predictor"): "rising",
    ("plan.budget", "remembered"): 1,
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
