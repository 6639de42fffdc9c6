"""Hand-made groups for the method tests."""

from dataclasses import field, replace

import numpy as np

from grpo_roc_jax.config import GroupConfig
from grpo_roc_jax.method.advantage import Advantage, GroupRelative
from grpo_roc_jax.method.compose import train_rows
from grpo_roc_jax.method.config import MethodConfig
from grpo_roc_jax.method.features import features
from grpo_roc_jax.method.part import MethodBatch
from grpo_roc_jax.method.planning import PlanConfig, Wave
from grpo_roc_jax.method.roc import ResampleOnCorrect, Selector
from grpo_roc_jax.method.shaping import Shaping, shape_rewards
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.method.surrogate import Clip, Surrogate
from grpo_roc_jax.method.weights import WeightsConfig
from grpo_roc_jax.settings.cli import build
from grpo_roc_jax.settings.layers import Layer
from grpo_roc_jax.settings.options import settings
from grpo_roc_jax.types import Condition, Group, Problem, ToolCall, ToolResult, Trajectory, Turn, Verdict


def make_trajectory(
    length=3, *, sample=0, prompt=2, observation=0, stop="answer", logprobs=None, condition="", tokens=None
):
    """`prompt` tokens, `length` policy tokens, then `observation` tokens of a tool."""
    total = prompt + length + observation
    mask = np.zeros(total, bool)
    mask[prompt : prompt + length] = True
    values = np.zeros(total, np.float32)
    values[mask] = -1.0 if logprobs is None else logprobs
    ids = np.arange(total, dtype=np.int32)
    if tokens is not None:
        ids[mask] = tokens
    turns = (Turn(prompt, prompt + length, "text"),)
    return Trajectory(
        ids,
        mask,
        values,
        np.where(mask, 0, -1).astype(np.int32),
        prompt,
        turns,
        stop,
        sample,
        condition=Condition.parse(condition),
    )


def make_verdict(reward, *, calls=1, errors=0, answers=1, well_formed=True, turns=2, channels=None):
    return Verdict(
        float(reward),
        "correct" if reward > 0 else "wrong",
        "1",
        calls,
        errors,
        answers,
        well_formed,
        turns,
        channels or {},
    )


def make_group(rewards, *, uid="p", lengths=None, calls=None, errors=None, answers=None, turns=None, **rows):
    """A group with the given arrays; further keywords go to `make_trajectory`, one entry a trajectory."""
    n = len(rewards)

    def pick(values, i, default):
        return default if values is None else values[i]

    channels = rows.pop("channels", None)
    trajectories = tuple(
        make_trajectory(pick(lengths, i, 3), sample=i, **{name: values[i] for name, values in rows.items()})
        for i in range(n)
    )
    verdicts = tuple(
        make_verdict(
            rewards[i],
            calls=pick(calls, i, 1),
            errors=pick(errors, i, 0),
            answers=pick(answers, i, 1),
            turns=pick(turns, i, 2),
            channels=None if channels is None else {name: values[i] for name, values in channels.items()},
        )
        for i in range(n)
    )
    return Group(Problem(uid, "?", "1", "test"), trajectories, verdicts)


@settings
class Sections:
    """The sections of a method."""

    group: GroupConfig = field(default_factory=GroupConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    resample: Selector = field(default_factory=ResampleOnCorrect)
    shaping: tuple[Shaping, ...] = ()
    advantage: Advantage = field(default_factory=GroupRelative)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    surrogate: Surrogate = field(default_factory=Clip)
    method: MethodConfig = field(default_factory=MethodConfig)


def method(size=4, **sections):
    """A method from what a YAML file would say of its sections; the rest is as in a run."""
    return build(Sections, [Layer("test", {"group": {"size": size}} | sections)])


def shaped(group, kind, state=None, **settings):
    """Rewards of one group after one step."""
    steps = method(shaping=[{"kind": kind, **settings}]).shaping
    return shape_rewards([features(group)], steps, state or AlgoState())[0]


def batch_of(groups, *, state=None, rng=None, masks=(), **more):
    """What the parts of a method see of these groups; rewards as they were scored."""
    arrays = [features(group) for group in groups]
    return MethodBatch(groups, arrays, [f.rewards for f in arrays], masks, state or AlgoState(), rng, **more)


def call(name="python"):
    return ToolCall(name, {}, "{}")


def result(kind="ok", observation=""):
    return ToolResult(kind, observation=observation)


def close(actual, expected, atol=1e-5):
    np.testing.assert_allclose(actual, expected, atol=atol)


def advantages(groups, state=None, size=4, **sections):
    """The advantage of each trajectory, from its last token."""
    rows = train_rows(groups, method(size, **sections), state or AlgoState(), rng=np.random.default_rng(0))
    return [float(row.advantages[-1]) for row in rows]


def waved(groups, number, plan, **more):
    """A wave over ready groups."""
    problems = [group.problem for group in groups]
    return Wave(problems, 4, AlgoState(), np.random.default_rng(0), number, groups, **more)


def saying(group, *texts):
    """The group with these texts as the last turns of its trajectories."""
    turned = [
        replace(t, turns=(replace(t.turns[0], text=text),)) for t, text in zip(group.trajectories, texts, strict=True)
    ]
    return replace(group, trajectories=tuple(turned))


def trajectories(groups):
    return [t for group in groups for t in group.trajectories]
