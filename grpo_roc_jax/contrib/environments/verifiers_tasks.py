"""Tasksets of verifiers as agents: the package plays the episode of a task, and asks the policy over its endpoint.

Source: the package `verifiers`, version 0.4, its interface `verifiers.v1`.
"""

import asyncio
import math
import os
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.utils.loaders import resolve_env_config

from grpo_roc_jax.environments.config import AgentFunction, EnvironmentVerifiers
from grpo_roc_jax.environments.connection import Connection, reason_of
from grpo_roc_jax.settings.files import parse_yaml
from grpo_roc_jax.types import Problem

MOST_TASKS = 10_000
"""Most tasks that are read of a taskset, which may be endless."""
MODEL = "policy"
KEY_VARIABLE = "GRPO_VERIFIERS_KEY"
"""Environment variable that the package reads the key of the endpoint from."""
MOST_NUMBERS = 31
"""Named numbers of an episode that are kept, besides its reward; rewards come first."""


def read_taskset(text: str) -> dict[str, Any]:
    """The settings of a taskset that is written `ID` or `ID?NAME=VALUE&NAME=VALUE`; dots in a name are nested ones."""
    name, _, words = text.partition("?")
    return nested({"id": name}, [word for word in words.split("&") if word])


def nested(settings: dict[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """The settings with those of `NAME=VALUE` words: values are read as YAML, dots in a name lead into mappings.

    Raises:
        ValueError: A word has no `=`, or leads into a value that is no mapping.
    """
    for word in words:
        name, equals, value = word.partition("=")
        *path, last = name.split(".")
        inner: Any = settings
        for part in path:
            inner = inner.setdefault(part, {}) if isinstance(inner, dict) else None
        if not equals or not last or not isinstance(inner, dict):
            raise ValueError(
                f"setting {word!r} of verifiers: must be NAME=VALUE, with dots in NAME for nested settings"
            )
        inner[last] = parse_yaml(value, f"setting {name} of verifiers")
    return settings


def taskset_problems(taskset: str) -> Iterator[Problem]:
    """A problem for each task of a taskset; its column `task` says which one it is."""
    loaded, name = (
        vf.load_taskset(resolve_env_config({"taskset": read_taskset(taskset)}).taskset),
        taskset.split("?")[0],
    )
    for number, task in enumerate(islice(loaded, MOST_TASKS)):
        extra = {"task": number, "key": task.key}
        yield Problem(
            f"{taskset}:{task.key}", task.data.prompt_text, str(getattr(task.data, "answer", "")), name, extra
        )


@dataclass(frozen=True)
class Opened:
    """What the episodes of an event loop share."""

    environment: Any
    tasks: Sequence[Any]


def environment_of(choice: EnvironmentVerifiers) -> Any:
    """The environment of verifiers that the settings describe."""
    agent = {"harness": {"id": choice.harness}, "runtime": {"type": choice.runtime}}
    settings = nested({"taskset": read_taskset(choice.taskset), "agent": agent}, choice.settings)
    return vf.load_environment(resolve_env_config(settings))


@asynccontextmanager
async def opened(choice: EnvironmentVerifiers) -> AsyncIterator[Opened]:
    """The environment while it serves."""
    environment = environment_of(choice)
    tasks = list(islice(environment.taskset, MOST_TASKS))
    async with environment.serving():
        yield Opened(environment, tasks)


_OPENED: dict[tuple[asyncio.AbstractEventLoop, EnvironmentVerifiers], Connection[Opened]] = {}


async def shared(choice: EnvironmentVerifiers) -> Opened:
    """The environment of the running event loop, which is opened once."""
    key = (asyncio.get_running_loop(), choice)
    if key not in _OPENED:
        _OPENED[key] = Connection(opened(choice))
    try:
        return await asyncio.shield(_OPENED[key].entered)
    except ConnectionError:
        _OPENED.pop(key, None)
        raise


class EpisodeFailed(RuntimeError):
    """The package has reported errors of an episode."""


def rollout_function(choice: EnvironmentVerifiers) -> AgentFunction:
    """Plays the task of a row.

    Raises:
        ValueError: The taskset cannot be loaded.
    """
    try:
        environment_of(choice)
    except Exception as error:
        raise ValueError(f"environment: taskset {choice.taskset!r} cannot be used: {reason_of(error)}") from error

    async def rollout(row: Mapping[str, Any], base_url: str, api_key: str) -> dict[str, float]:
        environment = await shared(choice)
        number = row.get("task", -1)
        if not 0 <= number < len(environment.tasks) or environment.tasks[number].key != row.get("key"):
            raise ValueError(f"task {number} of taskset {choice.taskset!r} is another one than when it was read")
        os.environ[KEY_VARIABLE] = api_key
        client = vf.EvalClientConfig(base_url=base_url, api_key_var=KEY_VARIABLE)
        context = vf.ModelContext(model=MODEL, client=client)
        episode = await environment.environment.run_episode(environment.tasks[number], context)
        if not episode.ok:
            raise EpisodeFailed(faults_of(episode))
        return numbers_of(episode.traces)

    return rollout


def numbers_of(traces: Sequence[Any]) -> dict[str, float]:
    """The numbers of the traces of an episode: `reward`, the mean over those of trained agents, and every reward
    before its weight and every metric by its name. Where several agents have traces, the agent's name comes first.

    Raises:
        EpisodeFailed: There is no trace, and so no reward.
    """
    if not traces:
        raise EpisodeFailed("the episode has no trace, and so no reward")
    trained = [trace for trace in traces if trace.agent is None or trace.agent.trainable] or traces
    numbers = {}
    for kind in ("rewards", "metrics"):
        for trace in traces:
            prefix = f"{trace.agent.name}." if len(traces) > 1 and trace.agent is not None else ""
            for name, value in getattr(trace, kind).items():
                score = getattr(value, "score", value)
                if score is not None and math.isfinite(score):
                    numbers[re.sub(r"[^\w.-]|^(?=[\d.-])", "_", f"{prefix}{name}")[:64]] = float(score)
    numbers.pop("reward", None)
    numbers.pop("calls", None)
    logged = dict(list(numbers.items())[:MOST_NUMBERS])
    return {**logged, "reward": sum(float(trace.reward) for trace in trained) / len(trained)}


def faults_of(episode: Any) -> str:
    """What went wrong in an episode, in the words of the package."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    texts = [f"{error.type}: {error.message}" for error in errors]
    shown = [error.traceback for error in errors if error.traceback]
    return "\n".join([*shown[:1], "; ".join(texts)[:400] or "verifiers gives no reason"])
