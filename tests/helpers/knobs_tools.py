"""Settings of the tool executor: what programs may do in one that really runs, what its processes decide from the
limits they were sent, and what a server of MCP is asked for."""

import asyncio
import contextlib
import functools
import os
import re
import sys
import time
from collections import deque
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

from grpo_roc_jax.config import Config
from grpo_roc_jax.environments import hosts
from grpo_roc_jax.environments.config import HostThreads, adapter
from grpo_roc_jax.run.components import find_environments, make_agents
from grpo_roc_jax.sandbox import _meter, _pool, _probing, _session, _session_table, _supervisor, cgroup, isolation
from grpo_roc_jax.sandbox.program import ExecutorFailed
from grpo_roc_jax.serving.agent_runs import AgentRuns
from grpo_roc_jax.tools.executor import make_executor, settings_of
from grpo_roc_jax.tools.interface import CodeCall
from grpo_roc_jax.types import ToolResult
from tests.helpers.knobs import Case, Observer, Seen, files, made, only, seen

TOOL, CELL = "python_code_with_standard_io", "jupyter_code"


def program(name: str, code: str, session: str | None = None) -> CodeCall:
    return CodeCall(name, CELL if session else TOOL, {"code": code}, session)


# ---- an executor that runs -----------------------------------------------------------------------------------------

AFTERWARDS = "import time\ntime.sleep(0.1)"
PROBES: dict[str, tuple[Any, str]] = {
    "memory_mb": (64, "import mmap\nmmap.mmap(-1, 200 << 20).close()"),
    "file_mb": (1, "f = open('f', 'wb')\nf.seek(20 << 20)\nf.write(b'x')\nf.close()"),
    "scratch_mb": (1, f"for i in range(3): open(f's{{i}}', 'wb').write(bytes(1 << 20))\n{AFTERWARDS}"),
    "scratch_files": (20, f"for i in range(60): open(f'n{{i}}', 'w').close()\n{AFTERWARDS}"),
    "descriptors": (32, "held = [open('/dev/null') for _ in range(40)]"),
    "threads": (
        4,
        "import threading\nfor _ in range(8): threading.Thread(target=threading.Event().wait, args=(0.1,)).start()",
    ),
    "processes": (4, "import os\npid = os.fork()\nif pid == 0: os._exit(0)\nos.waitpid(pid, 0)"),
    "output_kb": (1, "print('x' * 3000)"),
    "output_kill_mb": (1, "print('x' * (3 << 20))"),
    "cpus": (str(min(os.sched_getaffinity(0))), "import os\nprint(len(os.sched_getaffinity(0)))"),
    "preload": (("colorsys",), "import sys\nif 0: import numpy\nprint('colorsys' in sys.modules)"),
    "interpreter": ("{files}/python", "import sys\nprint(sys.executable)"),
    "read_paths": (("{files}/held_out.jsonl",), f"print(open({str(files() / 'held_out.jsonl')!r}).read())"),
    "uid_base": (66000, "import os\nprint(os.getuid() > 65000)"),
    "bare_root": (True, ""),
    "share_results": (True, ""),
    "scratch_dir": ("{files}/scratch", ""),
    "workers": (2, ""),
    "sessions": (1, ""),
}
"""Setting -> another value, and a program that reaches the limit, or shows what the setting did to its process."""
LATE = {"wall_s": (0.25, "import time\ntime.sleep(0.5)"), "cpu_s": (0.02, "n = 0\nwhile n < 4e6: n += 1")}
"""Those whose programs take time."""
ONE = {f"tools.{name}": value for name, value in {"workers": 1, "roots": 1, "preload": (), "bare_root": False}.items()}
ONE |= {"tools.min_level": "L0", "tools.cpu_s": 5.0}


@functools.cache
def ran(config: Config, late: bool) -> dict[str, Any]:
    """The outcome of each program in an executor of this configuration."""
    folder = files() / "scratch"
    folder.mkdir(exist_ok=True)
    calls = [program(name, text) for name, (_, text) in (LATE if late else PROBES).items()]
    with make_executor(config.tools) as executor:
        results = executor.run(calls)
        numbers = executor.stats()
        outcomes = {call.id: summary(result) for call, result in zip(calls, results, strict=True)}
        outcomes["bare_root"] = "tools/bare/workers_alive" in numbers
        executor.run([program(name, "print(4)") for name in ("first", "second")])
        outcomes["share_results"] = executor.stats().get("tools/shared", 0) > 0
        outcomes["scratch_dir"] = any(folder.iterdir())
        outcomes["level"] = executor.capabilities.level
        outcomes["workers"] = executor.capabilities.workers
        if not late:
            cells = [program("a", "x = 1", "s"), program("b", "y = 1", "t"), program("c", "print(x)", "s")]
            outcomes["sessions"] = [summary(executor.run([cell])[0]) for cell in cells]
    return outcomes


def summary(result: ToolResult) -> tuple:
    return result.kind, result.error_type, result.limit_hit, len(result.stdout), result.stdout[:40]


def probed(programs: dict[str, tuple[Any, str]]) -> dict[str, Case]:
    """One case per setting. By default all settings are changed together, since each program reaches one limit only,
    and an executor takes seconds to start."""
    together = {f"tools.{name}": value for name, (value, _) in programs.items()}

    def observer(name: str) -> Observer:
        return lambda config: ran(config, programs is LATE)[name]

    return {
        f"tools.{name}": Case(observer(name), value, ONE, together, partial(unfit, name))
        for name, (value, _) in programs.items()
    }


def unfit(name: str) -> str:
    """Why a setting of isolation has no effect on this host; empty if it has one."""
    level = ran(made(ONE), False)["level"]
    if (name == "uid_base" and level != "L4") or (name == "read_paths" and level < "L2"):
        return f"isolation level {level}"
    return "one core" if name == "cpus" and len(os.sched_getaffinity(0)) == 1 else ""


EXECUTOR = probed(PROBES) | probed(LATE)


def started(config: Config) -> str:
    """Whether the executor is ready in time."""
    with contextlib.closing(make_executor(config.tools)) as executor:
        try:
            executor.start()
        except ExecutorFailed as error:
            return f"failed: {error}"
    return "ready"


# ---- what its processes decide -------------------------------------------------------------------------------------


def planned(config: Config) -> Any:
    """The isolation on a host with all layers and on one without user namespaces; refusals as their text."""
    settings = settings_of(config.tools)
    plans = []
    for layers in (5, 3):
        probed = [_probing.ProbedLayer(name, i < layers, "") for i, name in enumerate(isolation.LAYERS)]
        probe = _probing.Probe(tuple(probed))
        try:
            level = _probing.choose(probe, settings.level, settings.min_level)
            plan = isolation.make_plan(settings, level, [layer.name for layer in probed if layer.ok], "/base")
            plans.append({name: getattr(plan, name) for name in ("level", "seccomp", "namespaces", "own_uid")})
        except LookupError as error:
            plans.append(str(error).splitlines()[0])
    return plans


def shared(config: Config) -> Any:
    """The number of roots, and of workers per root."""
    fitted = _probing.fit_to_host(settings_of(config.tools))
    pool = _pool.WorkerPool(None, "full", None, fitted.pool_size, fitted.root_count)
    return pool.root_target, pool.share


def housekept(config: Config) -> Any:
    """What the executor process ends in its housekeeping: a call that waits, an idle session."""
    keeper = _supervisor.Supervisor.__new__(_supervisor.Supervisor)
    keeper.startup, answered, evicted = SimpleNamespace(settings=settings_of(config.tools)), [], []
    now = time.monotonic()
    waiting = SimpleNamespace(arrived=now - 100)
    pool = SimpleNamespace(pending=deque([waiting]), grow=lambda: None, roots=())
    state = SimpleNamespace(worker=True, running=None, used=now - 1000)
    keeper.pools, keeper.sessions = {"full": pool}, _session_table.SessionTable(keeper)
    keeper.sessions.states = {"s": state}
    keeper.answer = lambda call, outcome: answered.append(outcome.kind)
    keeper.sessions.evict, keeper.loop = evicted.append, SimpleNamespace(later=lambda *_: None)
    with mock.patch.object(_supervisor._worker, "reap_except"):
        keeper.housekeeping()
    return answered, evicted


def starving(config: Config) -> bool:
    """Whether a program that got only 31 ms of CPU because of the load is given more time."""
    meter = _meter.Meter.__new__(_meter.Meter)
    meter.limits, meter.checked, meter.extended, meter.number = settings_of(config.tools).limits, (0.0, 0.0), False, 1
    meter.worker = SimpleNamespace(send=lambda message: None)
    return meter.starved(0.031, 0.03)


def copied(config: Config) -> list[str]:
    """Whether the state of a session is copied after a cell of 20 ms."""
    made: list[str] = []
    session = _session.LiveSession.__new__(_session.LiveSession)
    session.worker = SimpleNamespace(limits=settings_of(config.tools).limits)
    session.log, session.debt_s, session.exact, session.can_copy, session.cell = [], 0.0, False, True, 1
    session.make_copy = lambda: made.append("copy")
    session.remember(-1, 0, 0.02)
    return made


# ---- elsewhere -----------------------------------------------------------------------------------------------------


def bounded(config: Config) -> Any:
    """Where the cgroup around the executor is made, and its limits."""
    for name in ("own", "parent"):
        (files() / name).mkdir(exist_ok=True)
        for file in ("cgroup.controllers", "cgroup.subtree_control"):
            (files() / name / file).write_text("memory pids")
    directory = cgroup.make_cgroup(config.tools.executor).directory
    return directory.parent.name, {file.name: file.read_text() for file in directory.iterdir()}


# ---- environments --------------------------------------------------------------------------------------------------


class Trial:
    """An environment that pays."""

    def get_reward(self) -> float:
        return 1.0


class Trial2(Trial):
    """Another class."""


def environments_of(config: Config) -> Any:
    """The classes of the environments, or what the hosts that hold them are started with."""
    classes = find_environments(config)
    if not classes or isinstance(config.environment.host, HostThreads):
        return [kind.__name__ for kind in classes]
    host = hosts.make_host(config.environment.host, None, process=Replaced, actor=Replaced)
    return [worker.given for worker in host.workers]


class Replaced:
    """Instead of a process or an actor."""

    def __init__(self, *given: Any):
        self.given = given


def asked_of_mcp(config: Config) -> Any:
    """What the package of MCP is asked for, with a stand-in for it."""
    package, choice = mock.MagicMock(), config.environment

    async def enter(manager: Any) -> None:
        async with manager:
            pass

    names = ("mcp", "mcp.client", "mcp.client.stdio", "mcp.client.streamable_http")
    with mock.patch.dict(sys.modules, dict.fromkeys(names, package)):
        sys.modules.pop("grpo_roc_jax.environments.mcp_tools", None)
        module = adapter("environments.mcp_tools", "mcp")
        with module.opened_log(choice) as errors:
            asyncio.run(enter(module.client_of(choice, None, errors)))
        calls = re.sub(r"id='\d+'|, <_io.TextIOWrapper [^>]*>", "", str(package.mock_calls))
        return calls, isinstance(errors.name, str)


OWN = {
    "environment": {"kind": "class", "path": "tests.helpers.knobs_tools:Trial"},
    "reward.functions": ("environment",),
}


def agents_of(config: Config) -> Any:
    """How the program of an agent is run."""
    given = []
    with mock.patch.object(AgentRuns, "__init__", lambda self, choice, *_: given.append(choice)):
        make_agents(config, None, None)
    return given


# ---- cases ---------------------------------------------------------------------------------------------------------


def environment(kind: str, **fields: Any) -> dict[str, Any]:
    return {"environment": {"kind": kind, **fields}}


HERE = "tests.helpers.knobs_tools:"
AGENT = OWN | environment("agent", command="a b")
FUNCTION = AGENT | environment("agent", function="tests.serving.agent_functions:late")
BY_ROW = OWN | environment("by_row", classes=[f"a={HERE}Trial"])
CGROUP = {"tools.executor": {"kind": "cgroup", "parent": "{files}/own"}}
SEEN = (
    only(started, "tools", ONE, start_timeout_s=1e-3),
    seen(planned, "tools.level", {"tools.min_level": "L0"}),
    seen(planned, "tools.min_level"),
    only(shared, "tools", {"tools.workers": 4}, roots=3),
    only(housekept, "tools", queue_timeout_s=50.0, session_idle_s=500.0),
    only(starving, "tools", cpu_floor_s=0.01),
    only(copied, "tools", session_replay_ms=10.0),
    seen(bounded, "tools.executor", CGROUP, parent="{files}/parent"),
    seen(agents_of, "environment.port environment.warm environment.at_once", AGENT),
    only(agents_of, "environment", AGENT, trained=("planner",), address="localhost"),
    only(agents_of, "environment", FUNCTION, function="tests.serving.agent_functions:quiet"),
    Seen(environments_of, (), {}, {"environment": f"{HERE}Trial"}),
    only(environments_of, "environment", OWN, path=f"{HERE}Trial2", host="processes"),
    seen(environments_of, "environment.host.workers", OWN | {"environment.host": "processes"}),
    seen(environments_of, "environment.host.cpus", OWN | {"environment.host": "ray"}),
    only(environments_of, "environment", BY_ROW, classes=(f"a={HERE}Trial2",)),
    only(asked_of_mcp, "environment", environment("mcp", command=("a",)), command=("b",), log=os.devnull),
    only(asked_of_mcp, "environment", environment("mcp", url="http://a"), token_variable="HOME"),
)
