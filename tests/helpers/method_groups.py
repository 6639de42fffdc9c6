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
from grpo_roc_jax.types import Condition, Group, Problem, ToolCall, Trajectory, Turn, Verdict


def make_trajectory(length=3, sample=0, prompt=2, observation=0, stop="answer", logprobs=-1, condition="", tokens=None):
    """`prompt` tokens, `length` policy tokens, then `observation` tokens of a tool."""
    ids = np.arange(prompt + length + observation, dtype=np.int32)
    mask, values = (ids >= prompt) & (ids < prompt + length), np.zeros(len(ids), np.float32)
    values[mask] = logprobs
    if tokens is not None:
        ids[mask] = tokens
    turns, versions = (Turn(prompt, prompt + length, "text"),), np.where(mask, 0, -1).astype(np.int32)
    return Trajectory(ids, mask, values, versions, prompt, turns, stop, sample, condition=Condition.parse(condition))


def make_verdict(reward, *, calls=1, errors=0, answers=1, turns=2, channels=None, **more):
    given = {"status": "correct" if reward > 0 else "wrong", "answer": "1", "well_formed": True} | more
    counts = {"tool_calls": calls, "tool_errors": errors, "answers": answers, "turns": turns}
    return Verdict(float(reward), channels=channels or {}, **counts, **given)


def make_group(rewards, *, uid="p", problem=None, channels=None, **rows):
    """A group with these arrays, an entry a trajectory: lengths, and what `make_verdict` or `make_trajectory` takes."""
    trajectories, verdicts, of_verdicts = [], [], {"calls", "errors", "answers", "turns", "status", "answer"}
    for i, reward in enumerate(rewards):
        row = {name: values[i] for name, values in rows.items()}
        judged = {name: row.pop(name) for name in of_verdicts & {*row}}
        judged["channels"] = {name: values[i] for name, values in (channels or {}).items()}
        trajectories.append(make_trajectory(row.pop("lengths", 3), sample=i, **row))
        verdicts.append(make_verdict(reward, **judged))
    return Group(problem or Problem(uid, "?", "1", "test"), tuple(trajectories), tuple(verdicts))


def other(group, *, verdicts=(), **columns):
    """The group with other fields of its trajectories and of its verdicts, one entry each."""

    def changed(items, columns):
        each = [{name: values[i] for name, values in dict(columns).items()} for i in range(len(items))]
        return tuple(replace(item, **fields) for item, fields in zip(items, each, strict=True))

    return Group(group.problem, changed(group.trajectories, columns), changed(group.verdicts, verdicts))


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


def shaped(group, *steps, state=None, **settings):
    """Rewards of a group, or of each group of a list, after these steps; `settings` are those of a single one."""
    groups = group if isinstance(group, list) else [group]
    chain = [{"kind": step, **settings} if settings else step for step in steps]
    rewards = shape_rewards([features(each) for each in groups], method(shaping=chain).shaping, state or AlgoState())
    return rewards if isinstance(group, list) else rewards[0]


def batch_of(groups, *, state=None, rng=None, masks=(), **more):
    """What the parts of a method see of these groups; rewards as they were scored."""
    arrays = [features(group) for group in groups]
    return MethodBatch(groups, arrays, [f.rewards for f in arrays], masks, state or AlgoState(), rng, **more)


def call(name="python"):
    return ToolCall(name, {}, "{}")


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
    pairs = zip(group.trajectories, texts, strict=True)
    return other(group, turns=[(replace(t.turns[0], text=text),) for t, text in pairs])


def trajectories(groups):
    return [t for group in groups for t in group.trajectories]
