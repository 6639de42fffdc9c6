"""Settings that adapters of other projects and further methods read: each changes something."""

import asyncio
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import pytest

from grpo_roc_jax.config import Config
from grpo_roc_jax.contrib.executors import remote
from grpo_roc_jax.contrib.samplers.ray_samplers import RayTransport
from grpo_roc_jax.environments.config import adapter
from grpo_roc_jax.stream.samplers import SamplerPool, own_config
from grpo_roc_jax.tools.executor import make_executor
from grpo_roc_jax.tools.interface import Capabilities
from grpo_roc_jax.types import Problem, ToolResult, Turn
from tests.helpers.knobs import only, seen, table
from tests.helpers.knobs_host import judged
from tests.helpers.knobs_step import step
from tests.helpers.knobs_tools import program
from tests.test_knob_effects import BY_CONTRIB, accepted_by, changes_something, contrib_rewards, sections


class Connection:
    """Replaces HTTP connections: records requests and answers as the services would."""

    log: ClassVar[list[tuple]] = []
    open_now = peak = 0
    lock = threading.Lock()
    together: threading.Event

    def __init__(self, host: str, port: int, *, secure: bool):
        self.where, self.deadline, self.sock = (host, port), 0.0, None

    def request(self, method: str, target: str, payload: bytes | None, headers: dict) -> None:
        self.target, self.body = target, json.loads(payload or b"null")

    def close(self) -> None: ...

    def getresponse(self) -> Any:
        kind = type(self)
        count = len(self.body["submissions"]) if self.body and "submissions" in self.body else 1
        with self.lock:
            kind.log.append((self.where, self.target, round(self.deadline - time.monotonic()), count))
            kind.open_now += 1
            kind.peak = max(kind.peak, kind.open_now)
            if kind.peak >= 3:
                kind.together.set()
        if self.body and not kind.together.wait(1.0):
            kind.together.set()  # there is no third at a time; the next ones need not wait for it
        with self.lock:
            kind.open_now -= 1
        answers = [{"success": True, "run_success": True, "stdout": "", "stderr": "", "cost": 0.0}] * count
        return SimpleNamespace(
            status=500 if self.body else 200, read=lambda most: json.dumps({"results": answers}).encode()
        )


def requests_of(config: Config) -> Any:
    """Requests that reach a service which fails: where to, how often, how many at a time and together."""
    Connection.log, Connection.peak, Connection.open_now, Connection.together = [], 0, 0, threading.Event()
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: None)
    patched = (
        mock.patch.object(remote, "TimedConnection", Connection),
        mock.patch.multiple(
            remote, time=clock, BATCH_WAIT_S=5.0 if config.tools.executor.kind == "code_judge" else 0.0
        ),
    )
    with patched[0], patched[1], make_executor(config.tools) as executor:
        executor.run([program(str(i), "1") for i in range(4)])
    return sorted(Connection.log), min(Connection.peak, 3)


def actors(config: Config) -> Any:
    """The options of the actors that replace those of Ray and answer at once, and their workers."""

    def actor(settings: Any, start_timeout_s: float) -> Any:
        done: list[tuple[str, ToolResult]] = []
        calls: dict[str, Callable] = {
            "submit": lambda batch: done.extend((call.id, ToolResult("ok")) for call in batch),
            "poll": lambda: [done.pop() for _ in range(len(done))],
            "do": lambda method: {},
            "capabilities": lambda: (Capabilities("L2", workers=settings.pool_size), ""),
        }
        return SimpleNamespace(**{name: SimpleNamespace(remote=call) for name, call in calls.items()})

    ray = mock.MagicMock(get=lambda value, timeout: value)
    ray.exceptions.RayError, options = RuntimeError, ray.remote.return_value.options
    options.return_value.remote.side_effect = actor
    with mock.patch.dict(sys.modules, {"ray": ray}), make_executor(config.tools) as executor:
        executor.run([program(str(i), "1") for i in range(8)])
        return [call.kwargs for call in options.call_args_list], executor.capabilities.workers


def sampler_actors(config: Config) -> Any:
    """How Ray is started and actors are made, how many, on which mesh they sample, and when a silent one is lost."""
    if config.rollout.remote is None:
        return None
    ray, now = mock.MagicMock(), [0.0]
    ray.is_initialized.return_value, ray.exceptions.RayError = False, RuntimeError
    ray.wait.return_value = ([], [])
    samplers, sampling = config.rollout.remote, SimpleNamespace(rollout=config.rollout)
    with mock.patch.dict(sys.modules, {"ray": ray}), mock.patch.dict(os.environ):
        transport = RayTransport(samplers, print, (), 0)
        pool = SamplerPool(transport, sampling, samplers.count, samplers.timeout_s, clock=lambda: now[0])
    for member in pool.members:
        member.ready = True
    lost = []
    for now[0] in (0.0, 100.0, 200.0):
        pool.advance(0.0)
        lost.append(len(pool.take_notes()))
    options = ray.remote.return_value.return_value.options
    started = ray.init.call_args.kwargs, options.call_args.kwargs, options.return_value.remote.call_count
    return started, own_config(config).sharding, lost


def asked_of_package(config: Config) -> Any:
    """What the packages behind an adapter are asked for, with a stand-in for each."""
    asked, choice = [], config.environment

    class Client:
        def __init__(self, **given: Any):
            asked.append(given)

        async def close(self) -> None: ...

        async def step(self, *action: Any, **row: Any) -> Any:
            asked.append(action)
            observation = {"a": "1", "b": "2", "tools": [{"name": "add", "input_schema": {}}]}
            return SimpleNamespace(observation=observation, reward=0.0, done=False)

        connect = reset = step

    package = mock.MagicMock(GenericEnvClient=Client)
    names = "openenv openenv.core openenv.core.generic_client verifiers verifiers.v1 verifiers.v1.utils"
    names = [*names.split(), "verifiers.v1.utils.loaders"]
    with mock.patch.dict(sys.modules, dict.fromkeys(names, package)):
        for name in ("openenv_server", "verifiers_tasks"):
            sys.modules.pop(f"grpo_roc_jax.contrib.environments.{name}", None)
        if choice.kind == "verifiers":
            adapter("contrib.environments.verifiers_tasks", "verifiers").environment_of(choice)
            return str(package.mock_calls[0])
        made = adapter("contrib.environments.openenv_server", "openenv").openenv_class(choice)()
        shown = asyncio.run(made.reset(Problem("p", "?", "1", "knobs")))
        asyncio.run(made.step(Turn(0, 1, "go")))
        return shown, asked, len(made.schemas)


def labels(problem: Problem) -> list[float]:
    return [0.0, 1.0, 0.5]


def halfway(problem: Problem, score: int) -> float:
    return 0.5


def harbor_of(config: Config) -> Any:
    """Which tasks an environment of Harbor has, and where and with which limits they run."""
    with mock.patch("shutil.which", lambda name: name):
        made = adapter("contrib.environments.harbor_tasks", "harbor").harbor_class(config.environment)
    return len(made.tasks), type(made.new_workspace()).__name__, made.executor.limits


TASKS = str(Path(__file__).parents[2] / "examples" / "environments" / "harbor")
STREAM = {"rollout.step_limit": {"kind": "stream"}}
FUSION = {"tools.executor": "sandbox_fusion", "tools.executor.concurrency": 4, "tools.executor.retries": 2}
JUDGE = {"tools.executor": "code_judge", "tools.executor.batch": 4}
RANKING, SCREENING = {"reward.functions": ("ranking",)}, {"reward.functions": ("screening",)}


def environment(kind: str, **fields: Any) -> dict[str, Any]:
    return {"environment": {"kind": kind, **fields}}


OPENENV = environment("openenv", url="http://a")
ACTED = environment("openenv", url="http://a", action="c")
OBSERVED = environment("openenv", url="http://a", observation="a")
TASKSET = environment("verifiers", taskset="a")
SEEN = (
    only(lambda config: type(make_executor(config.tools)).__name__, "tools", executor="sandbox_fusion"),
    seen(requests_of, "tools.executor", FUSION, url="http://127.0.0.2:81/x", concurrency=1),
    only(requests_of, "tools.executor", JUDGE, batch=1),
    seen(actors, "tools.executor.actors tools.executor.cpus", {"tools.executor": "ray"}),
    only(sampler_actors, "rollout", STREAM, samplers="ray"),
    seen(sampler_actors, "rollout.samplers", STREAM | {"rollout.samplers": "ray"}, address="auto", tensor=2, tpus=4),
    only(step, "plan", {"plan.second": "draft"}, warmup_steps=1),
    seen(judged, "reward.functions.ranking", RANKING, top=1, judge=f"{__name__}:labels"),
    seen(judged, "reward.functions.screening", SCREENING, column="months", judge=f"{__name__}:halfway"),
    only(asked_of_package, "environment", OPENENV, url="http://b"),
    only(asked_of_package, "environment", OBSERVED, action="c"),
    only(asked_of_package, "environment", ACTED, observation="b"),
    only(asked_of_package, "environment", TASKSET, taskset="b", harness="b", runtime="docker"),
    only(asked_of_package, "environment", TASKSET, settings=("agent.max_turns=3",)),
    seen(harbor_of, "environment.command_s environment.processes", environment("harbor", tasks=TASKS)),
    only(harbor_of, "environment", environment("harbor", tasks=TASKS), tasks=f"{TASKS}/total"),
    only(harbor_of, "environment", environment("harbor", tasks=f"{TASKS}/total"), container="docker"),
)
CASES = table(SEEN, sorted(BY_CONTRIB | contrib_rewards()))


@pytest.mark.parametrize("key", CASES)
def test_setting_changes_something(key):
    assert changes_something(key, CASES[key])


def test_every_setting_that_the_core_leaves_to_contrib_has_a_case():
    assert set(CASES) == BY_CONTRIB | contrib_rewards()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_no_setting_is_infinite_or_not_a_number(value):
    """But for one limit of a soft maximum, which is a mean there (DisCO-b), as its line says."""
    kinds = [kind for kind in sections() if ".contrib." in kind.__module__]
    assert accepted_by(kinds, value) == (["Disco.tau = inf"] if value == math.inf else [])
