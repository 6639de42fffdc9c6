"""Hand-made groups for the method tests."""

from types import SimpleNamespace

import numpy as np

from grpo_roc_jax.method.config import AdvantageConfig, LossConfig, ResampleConfig, ShapingConfig
from grpo_roc_jax.method.plan_config import PlanConfig
from grpo_roc_jax.types import Group, Problem, ToolCall, ToolResult, Trajectory, Turn, Verdict


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
        ids, mask, values, np.where(mask, 0, -1).astype(np.int32), prompt, turns, stop, sample, condition=condition
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
    pick = lambda values, i, default: default if values is None else values[i]  # noqa: E731
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


def method(size=4, *, shaping=None, resample=None, advantage=None, loss=None, plan=None):
    """The sections of a method, each from a dict of changes."""
    return SimpleNamespace(
        group=SimpleNamespace(size=size),
        shaping=ShapingConfig(**(shaping or {})),
        resample=ResampleConfig(**(resample or {})),
        advantage=AdvantageConfig(**(advantage or {})),
        loss=LossConfig(**(loss or {})),
        plan=PlanConfig(**(plan or {})),
    )


def call(name="python"):
    return ToolCall(name, {}, "{}")


def result(kind="ok", observation=""):
    return ToolResult(kind, observation=observation)
