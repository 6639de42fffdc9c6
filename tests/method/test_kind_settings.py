"""No setting without effect: each setting of each kind is changed, and something that the method makes must differ.

What a method makes is observed on fixed groups over two steps: requests of every wave, selections, training rows, the
state, the loss and its gradient. A setting that is read elsewhere is named in `ELSEWHERE` with the test that sees it.
"""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax.method.compose import (
    Scores,
    initial_state,
    next_state,
    reference_sync,
    resample_group,
    subset,
    teacher_of,
    train_rows,
)
from grpo_roc_jax.method.part import Part
from grpo_roc_jax.method.planning import Wave, choose_problems, first_wave, next_wave
from grpo_roc_jax.method.shaping import prompt_suffix
from grpo_roc_jax.method.weights import WeightsConfig
from grpo_roc_jax.settings.callables import given
from grpo_roc_jax.settings.options import default_of, fields_of, type_of
from grpo_roc_jax.types import Condition
from tests.endurance.golden import golden_group
from tests.helpers.knobs import digest
from tests.helpers.method_groups import make_group, method

LISTS = ("shaping", "advantage.adjust", "weights.masks", "weights.factors")
"""Axes of which a method has a list."""


def axes(cls=Part):
    return [found for below in cls.__subclasses__() for found in (below, *axes(below)) if "axis" in vars(found)]


AXES = {axis.axis: axis for axis in axes()}
SETTINGS = [
    (name, kind, setting)
    for name, axis in AXES.items()
    for kind, cls in axis.kinds.items()
    for setting in fields_of(cls)
]

ELSEWHERE = {
    ("plan.problems", "pairs", "pool"): "run.rounds draws the pool: tests/run/test_rounds.py",
    ("plan.problems", "uncertainty", "pool"): "run.rounds draws the pool: tests/run/test_rounds.py",
    ("plan.problems", "no_positive_resampling", "pool"): "run.rounds draws the pool: tests/run/test_rounds.py",
    **{
        ("plan.budget", "predicted", name): "the fixed groups have one wording: tests/method/test_budgets.py"
        for name in ("half_life", "sharpness", "prior")
    },
    ("plan.condition", "reward_tokens", "separation"): "evaluate.check_before_training: tests/test_reward_tokens.py",
    ("plan.condition", "reward_tokens", "evaluate"): "evaluate.prompt_end: tests/test_reward_tokens.py",
}
VALUES = {
    ("resample", "penalty_source"): "text_compat",
    ("resample", "drop"): "equal",
    ("resample", "positive_select"): "uniform",
    ("resample", "inverse_epsilon"): 1e3,
    ("resample", "min_positive"): 0,
    ("resample", "min_negative"): 0,
    ("advantage", "standardize"): False,
    ("advantage", "eps"): 0.5,
    ("advantage", "weights"): [1.0, 3.0],
    ("advantage", "of"): {"scale": "none"},
    ("advantage", "adjust"): [{"kind": "sign_weights", "positive": 2.0}],
    ("advantage", "none", "adjust"): ["teacher"],
    ("advantage.adjust", "column"): "solution",
    ("advantage.adjust", "weights"): "policy",
    ("advantage.adjust", "channels"): ["quality"],
    ("advantage.adjust", "targets"): [0.1],
    ("shaping", "format_channel"): "quality",
    ("shaping", "quality_channel"): "format",
    ("shaping", "limit"): 30,
    ("shaping", "buffer"): 35,
    ("shaping", "fraction"): 1.0,
    ("advantage.adjust", "cap"): 1,
    ("advantage.adjust", "novelty", "cap"): 0.1,
    ("advantage.adjust", "probability"): 1.0,
    ("plan.problems", "group"): 2,
    ("plan.problems", "solved"): 0.1,
    ("plan.budget", "least"): 7,
    ("plan.budget", "alpha"): 0.9,
    ("plan.second", "replace"): 3,
    ("plan.temperature", "diversity_target"): 1.0,
    ("shaping", "weights"): [0.2, 0.3, 0.5],
    ("plan.condition", "column"): "more_hints",
    ("plan.second", "refine", "column"): "hints",
    ("plan.second", "below"): 2.0,
    ("plan.second", "teacher"): "says",
    ("plan.condition", "library"): ["z"],
    ("plan.condition", "scorer"): "says",
    ("plan.condition", "cache"): 1,
    ("plan.condition", "least"): 0.1,
    ("advantage", "items"): 2,
    ("plan.second", "value", "most"): 1,
    ("plan.condition", "templates"): ["Say: {prompt}"],
    ("shaping", "similarity"): "alike",
    ("shaping", "entropy"): "",
    ("advantage", "expert"): "expert",
    ("plan.second", "column"): "more_hints",
    ("plan.second", "solution_column"): "explained",
    ("plan.second", "levels"): 1,
    ("plan.second", "examples", "count"): 1,
    ("plan.second", "examples", "remembered"): 0,
    ("plan.temperature", "temperatures"): [0.7, 1.3],
    ("plan.budget", "most"): 9,
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
    ("surrogate", "level"): "sequence",
    ("advantage.adjust", "state"): "turn",
    ("surrogate", "kl"): "k2",
    ("surrogate", "clip_low"): 0.01,
    ("surrogate", "clip_high"): 0.01,
    ("surrogate", "dual"): 1.01,
    ("surrogate", "delta"): 1.01,
    ("surrogate", "low"): 0.9,
    ("surrogate", "high"): 1.01,
    ("surrogate", "share"): 0.5,
    ("surrogate", "dppo", "low"): 0.01,
    ("surrogate", "dppo", "high"): 0.01,
}
"""Other values by axis and setting, where the one made from the type would be refused or change nothing."""
CONTEXT = {
    ("advantage", "custom"): {"function": "halved"},
    ("shaping", "custom"): {"function": "halved"},
    ("shaping", "overlong"): {"limit": 40, "buffer": 20},
    ("shaping", "surrogate"): {"length": 30},
    ("shaping", "budget"): {"start": 20, "every": 1},
    ("advantage.adjust", "constraints"): {"channels": ["format"], "targets": [0.9], "lr": 5.0, "max": 0.3},
    ("advantage", "drpo"): {"max_length": 40},
    ("advantage", "positions"): {"items": 1},
    ("plan.condition", "skills"): {"library": ["a", "b", "c"], "scorer": "ranked", "least": 0.6, "explore": 0.5},
    ("advantage", "channels"): {"standardize": True},
    **{("resample", kind): {"drop": "none"} for kind in ("none", "max_variance", "uniform")},
    ("resample", "roc"): {"drop": "none", "positive_select": "inverse"},
    ("resample", "rc_roc"): {"drop": "none", "positive_select": "inverse"},
    ("shaping", "stability"): {"entropy": "size"},
    ("plan.budget", "knapsack"): {"least": 1, "most": 16},
    ("plan.budget", "predicted"): {"least": 1, "most": 16},
    ("plan.budget", "half_width"): {"pilot": 2, "bonus": 0.1, "most": 12},
    ("surrogate", "vespo"): {"level": "turn"},
    ("surrogate", "geometric"): {"level": "turn"},
    ("weights.factors", "rejection"): {"high": 1.1},
    ("weights.factors", "repetition"): {"n": 1},
    ("advantage.adjust", "entropy_bonus"): {"target": 2.0, "start": 4e-3},
    **{("surrogate.kl", kind): {"coef": 0.1, "sync_every": 5} for kind in ("k1", "k2", "k3", "corrected")},
    **{(axis, "kl"): {"sync_every": 5} for axis in ("shaping", "advantage.adjust")},
    ("advantage.adjust", "self_teacher"): {"weights": "reference", "sync_every": 5},
}
"""Settings of a kind that hold throughout, so that the others can matter."""


def halved(rewards, features, state):
    return rewards / 2 + 0.1 * np.arange(len(rewards))


def doubled(rewards, features, state):
    return 2 * rewards


def alike(first, second):
    return float(len(first) == len(second))


def ranked(problem, skills):
    return -0.7 * np.arange(len(skills))


def says(problem, given):
    return [-9.0 * bool(i) for i in range(len(given))] if isinstance(given, list) else f"look: {len(given)}"


def rising(problems, record):
    return np.linspace(0.1, 0.9, len(problems))


def expert(problem, turn):
    return len(turn.calls) / 3


def earlier(found):
    return np.triu(np.ones((found.size, found.size)), 1)


def changed(axis, kind, setting):
    """Another value for a setting: its own, or one by its type."""
    for key in ((axis, kind, setting), (axis, setting)):
        if key in VALUES:
            return VALUES[key]
    cls = AXES[axis].kinds[kind]
    if setting in ("function", "judge"):
        return "doubled" if setting == "function" else "earlier"
    default, found = default_of(fields_of(cls)[setting]), type_of(cls, setting)
    if typing.get_origin(found) is typing.Literal:
        return next(choice for choice in typing.get_args(found) if choice != default)
    if isinstance(default, bool):
        return not default
    if isinstance(default, int):
        return default + 1
    if isinstance(default, float):
        return default / 2 if default else 0.5
    if isinstance(default, tuple) and default:
        return [item / 2 for item in default]
    if isinstance(default, Part):
        return next(name for name in sorted(type(default).kinds) if name not in (default.kind, "tracker", "none"))
    return f"another {default}"


def made(axis, kind, **more):
    """A method with this kind; groups of four, which are sampled eight at a time where the kind allows it."""
    value = {"kind": kind, **CONTEXT.get((axis, kind), {}), **more}
    if axis in LISTS:
        value = [value]
    for name in reversed(axis.split(".")):
        value = {name: value}
    plain = {"scale": "none", "baseline": "none"} if axis == "shaping" else "group"
    return method(4, **({"resample": {"kind": "none", "drop": "none"}, "advantage": plain} | value))


@functools.cache
def some_group(seed):
    """A group with everything in it that a kind may read."""
    group = golden_group(seed, 8, ("format", "quality"))
    extra = {"hints": ["a", "b", "c"], "more_hints": ["d", "e"], "solution": "s", "explained": "t"}
    problem = dataclasses.replace(group.problem, extra=extra)
    kinds = ["skill:1", "", "", "", "feedback", "paraphrase:1", "demonstration", "low_reward"]
    trajectories = [
        dataclasses.replace(t, tokens=t.tokens % 5, condition=Condition.parse(kind))
        for t, kind in zip(group.trajectories, kinds, strict=True)
    ]
    trajectories[0] = dataclasses.replace(trajectories[0], stop="length")
    spliced = trajectories[4].versions.copy()
    spliced[np.flatnonzero(trajectories[4].policy_mask)[:2]] = -1
    trajectories[4] = dataclasses.replace(trajectories[4], versions=spliced)
    verdicts = [dataclasses.replace(v, turns=i % 3 + 1) for i, v in enumerate(group.verdicts)]
    verdicts[0] = dataclasses.replace(verdicts[0], status="correct", reward=1.0)
    return dataclasses.replace(group, problem=problem, trajectories=tuple(trajectories), verdicts=tuple(verdicts))


def failures(group):
    return dataclasses.replace(
        group, verdicts=tuple(dataclasses.replace(v, status="wrong", reward=0.0) for v in group.verdicts)
    )


def with_a_hint(group):
    """The group with a rollout that wrote a hint."""
    first, *rest = group.trajectories
    return dataclasses.replace(
        group, trajectories=(dataclasses.replace(first, condition=Condition("hint_writer", 1)), *rest)
    )


def observed(config):
    """Everything that a method makes of fixed groups in two steps."""
    rng, state, seen = np.random.default_rng(11), initial_state(config), []
    uids = [some_group(i).problem.uid for i in range(4)]
    columns = {"successes": [1, 7, 4, 2], "visits": [8] * 4, "level": [1, 2, 3, 0]}
    table = state.table.put(uids, {name: np.array(column, np.float64) for name, column in columns.items()})
    state = dataclasses.replace(state, table=table)
    own = (halved, doubled, earlier, alike, ranked, says, expert, rising)
    with given({function.__name__: function for function in own} | {"size": len}):
        for _ in range(2):
            seen += one_step(config, state, rng, [some_group(i) for i in range(4)])
            groups, kept = seen.pop()
            sampled, drift = [*groups[:2], failures(groups[2]), groups[3]], dict.fromkeys(uids, 0.01)
            state = next_state(sampled, kept, config, state, drift)
            seen.append(state.to_tree())
    return digest(seen, gradient(config.surrogate))


def one_step(config, state, rng, groups):
    plan, problems = config.plan, [group.problem for group in groups]
    seen = [choose_problems(problems, 2, plan, state, rng), prompt_suffix(config.shaping, state.step)]
    seen += [plan.temperature.all, plan.second.supervised_weight(state.step), plan.second.extra_rows]
    seen += [
        teacher_inputs(config, groups),
        reference_sync(config),
        plan.budget.largest(8, 4),
        config.resample.sampled(4),
        config.resample.quota_decided(3, 3, 2, 4),
    ]
    wave = Wave(problems, 8, state, rng)
    seen.append(first_wave(wave, plan))
    lost = [failures(with_a_hint(group)) if i % 2 else group for i, group in enumerate(groups)]
    for number in range(1, 7):
        wave = dataclasses.replace(wave, number=number, groups=lost, notes={1: "x", 3: "y"}, thought=lambda t: 30)
        requests = next_wave(wave, plan)
        seen.append(requests)
        merged = plan.second.merge(lost, requests, [groups[r.place] for r in requests])
        seen.append([[t.sample for t in group.trajectories] + list(group.rewards) for group in merged])
    short = dataclasses.replace(groups[0], trajectories=groups[0].trajectories[:3], verdicts=groups[0].verdicts[:3])
    flat = [failures(groups[0]), make_group([1] * 8), make_group([1] + [0] * 7), make_group([0] + [1] * 7), short]
    selections = [resample_group(group, config, rng) for group in (*groups, *flat)]
    seen += [(s.indices, s.reasons, s.penalties) for s in selections]
    kept = [subset(g, s) for g, s in zip(groups, selections, strict=False) if s.kept]
    trajectories, noise = [t for group in kept for t in group.trajectories], np.random.default_rng(13)
    scores = Scores(
        [(t.logprobs - 0.2 + noise.normal(0, 0.3, t.length)).astype(np.float32) for t in trajectories],
        [noise.random(t.length).astype(np.float32) for t in trajectories],
        [(t.logprobs + noise.normal(0, 0.1, t.length)).astype(np.float32) for t in trajectories],
        [(t.logprobs + noise.normal(0, 0.1, t.length)).astype(np.float32) for t in trajectories],
    )
    rows = train_rows(kept, config, state, rng=rng, scores=scores)
    seen += [[getattr(row, f.name) for f in dataclasses.fields(row)] for row in rows]
    return [*seen, (groups, kept)]


def teacher_inputs(config, groups):
    """What a teacher is shown of each trajectory, or where it comes from."""
    part = teacher_of(config)
    if part is None or not hasattr(part, "suffix"):
        return getattr(part, "path", None)
    return part.needs_reference, [[part.suffix(group, i) for i in range(group.size)] for group in groups]


@functools.cache
def gradient(surrogate):
    """Loss and gradient on fixed arrays, with the divergence; most settings leave the surrogate as it is."""
    rng = np.random.default_rng(5)
    ratio, advantages = (jnp.asarray(rng.normal(0, s, (3, 16)), jnp.float32) for s in (0.4, 1))
    logprobs = jnp.asarray(-rng.exponential(size=(3, 16)), jnp.float32)
    segments = {"token": np.arange(16), "turn": np.arange(16) // 4, "sequence": np.zeros(16)}[surrogate.shared_level]
    segments = jnp.tile(jnp.asarray(segments, jnp.int32), (3, 1))

    def total(d):
        shared = surrogate.shared(d, advantages, jnp.ones((3, 16), bool), segments)
        each = surrogate.loss(shared, advantages, logprobs + d)
        value = each.sum() + surrogate.marked_loss(each[0], shared[0]).sum()
        term, far = surrogate.kl, logprobs.at[:, 0].add(4.0)  # the policy has dropped the first tokens
        return value + (term.coef * term.estimate(logprobs + d, far, d).sum() if term.coef else 0.0)

    value, slope = jax.jit(jax.value_and_grad(total))(ratio)
    return [np.asarray(value), np.asarray(slope), surrogate.clip_bounds, surrogate.scored_ratio]


@functools.cache
def base(axis, kind):
    return observed(made(axis, kind))


@pytest.mark.parametrize(("axis", "kind", "setting"), [s for s in SETTINGS if s not in ELSEWHERE])
def test_setting_changes_something(axis, kind, setting):
    value = changed(axis, kind, setting)
    assert observed(made(axis, kind, **{setting: value})) != base(axis, kind)


def test_the_observer_is_deterministic():
    assert observed(made("resample", "roc")) == base("resample", "roc")


def test_what_is_seen_elsewhere_exists():
    assert set(ELSEWHERE) <= set(SETTINGS)
    assert {"normalizer", "masks", "factors"} == set(fields_of(WeightsConfig)), "each is an axis here"
