"""Settings of the tool executor: what programs may do in one that really runs, and what its processes decide from the
limits they were sent."""

import asyncio
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
from grpo_roc_jax.sandbox import _meter, _pool, _probing, _session, _session_table, _supervisor, isolation
from grpo_roc_jax.tools.executor import make_executor, settings_of
from grpo_roc_jax.tools.interface import CodeCall
from grpo_roc_jax.types import ToolResult
from tests.helpers.knobs import Case, files, made, only, seen


def program(name: str, code: str) -> CodeCall:
    return CodeCall(name, "python_code_with_standard_io", {"code": code}, None)


PROBES: dict[str, tuple[Any, str]] = {
    "memory_mb": (64, "import mmap\nmmap.mmap(-1, 200 << 20).close()"),
    "file_mb": (1, "f = open('f', 'wb')\nf.seek(20 << 20)\nf.write(b'x')\nf.close()"),
    "scratch_mb": (1, "for i in range(3): open(f's{i}', 'wb').write(bytes(1 << 20))\nimport time\ntime.sleep(0.1)"),
    "scratch_files": (20, "for i in range(60): open(f'n{i}', 'w').close()\nimport time\ntime.sleep(0.1)"),
    "descriptors": (32, "held = [open('/dev/null') for _ in range(40)]"),
    "threads": (4, "from threading import *\nfor _ in range(8): Thread(target=Event().wait, args=(0.1,)).start()"),
    "processes": (4, "import os\npid = os.fork()\nif pid == 0: os._exit(0)\nos.waitpid(pid, 0)"),
    "output_kb": (1, "print('x' * 3000)"),
    "output_kill_mb": (1, "print('x' * (3 << 20))"),
    "cpus": (str(min(os.sched_getaffinity(0))), "import os\nprint(len(os.sched_getaffinity(0)))"),
    "preload": (("colorsys",), "import sys\nif 0: import numpy\nprint('colorsys' in sys.modules)"),
    "interpreter": ("{files}/python", "import sys\nprint(sys.executable)"),
    "read_paths": (("{files}/held_out.jsonl",), f"print(open({str(files() / 'held_out.jsonl')!r}).read())"),
    "uid_base": (66000, "import os\nprint(os.getuid() > 65000)"),
}
"""Setting -> another value, and a program that reaches the limit, or shows what the setting did to its process."""
LATE = {"wall_s": (0.25, "import time\ntime.sleep(0.5)"), "cpu_s": (0.02, "n = 0\nwhile n < 4e6: n += 1")}
"""Those whose programs take time."""
ONE = {f"tools.{name}": value for name, value in {"workers": 1, "roots": 1, "preload": (), "bare_root": False}.items()}
ONE |= {"tools.min_level": "L0", "tools.cpu_s": 5.0}


@functools.cache
def ran(config: Config, late: bool) -> dict[str, Any]:
    """The outcome of each program in an executor of this configuration."""
    calls = [program(name, text) for name, (_, text) in (LATE if late else PROBES).items()]
    with make_executor(config.tools) as executor:
        results = executor.run(calls)
        outcomes = {call.id: summary(result) for call, result in zip(calls, results, strict=True)}
        outcomes["level"] = executor.capabilities.level
    return outcomes


def summary(result: ToolResult) -> tuple:
    return result.kind, result.error_type, result.limit_hit, len(result.stdout), result.stdout[:40]


def probed(programs: dict[str, tuple[Any, str]]) -> dict[str, Case]:
    """One case per setting. All settings are changed together, since each program reaches one limit only, and an
    executor takes seconds to start."""
    together = {f"tools.{name}": value for name, (value, _) in programs.items()}

    def case(name: str, value: Any) -> Case:
        return Case(lambda config: ran(config, programs is LATE)[name], value, ONE, together, partial(unfit, name))

    return {f"tools.{name}": case(name, value) for name, (value, _) in programs.items()}


def unfit(name: str) -> str:
    """Why a setting of isolation has no effect on this host; empty if it has one."""
    level = ran(made(ONE), False)["level"]
    if (name == "uid_base" and level != "L4") or (name == "read_paths" and level < "L2"):
        return f"isolation level {level}"
    return "one core" if name == "cpus" and len(os.sched_getaffinity(0)) == 1 else ""


EXECUTOR = probed(PROBES) | probed(LATE)


def decided(config: Config) -> Any:
    """On a host without user namespaces the isolation, or why it is refused; and the number of roots of the workers."""
    settings = settings_of(config.tools)
    probed = [_probing.ProbedLayer(name, i < 3, "") for i, name in enumerate(isolation.LAYERS)]
    fitted = _probing.fit_to_host(settings)
    roots = _pool.WorkerPool(None, "full", None, fitted.pool_size, fitted.root_count).root_target
    try:
        level = _probing.choose(_probing.Probe(tuple(probed)), settings.level, settings.min_level)
    except LookupError as error:
        return str(error), roots
    plan = isolation.make_plan(settings, level, [layer.name for layer in probed if layer.ok], "/base")
    return plan.level, plan.seccomp, plan.namespaces, plan.own_uid, roots


def housekept(config: Config) -> Any:
    """What the executor process ends in its housekeeping: a call that waits, an idle session; whether a program that
    got only 31 ms of CPU because of the load is given more time; whether a session is copied after a cell of 20 ms."""
    keeper = _supervisor.Supervisor.__new__(_supervisor.Supervisor)
    settings, answered, evicted, now = settings_of(config.tools), [], [], time.monotonic()
    pending = deque([SimpleNamespace(arrived=now - 100)])
    keeper.startup, keeper.sessions = SimpleNamespace(settings=settings), _session_table.SessionTable(keeper)
    keeper.pools = {"full": SimpleNamespace(pending=pending, grow=lambda: None, roots=())}
    keeper.sessions.states = {"s": SimpleNamespace(worker=True, running=None, used=now - 1000)}
    keeper.answer = lambda call, outcome: answered.append(outcome.kind)
    keeper.sessions.evict, keeper.loop = evicted.append, SimpleNamespace(later=lambda *_: None)
    with mock.patch.object(_supervisor._worker, "reap_except"):
        keeper.housekeeping()
    meter = _meter.Meter.__new__(_meter.Meter)
    meter.limits, meter.checked, meter.extended, meter.number = settings.limits, (0.0, 0.0), False, 1
    meter.worker = SimpleNamespace(send=lambda message: None)
    session, copies = _session.LiveSession.__new__(_session.LiveSession), []
    session.worker, session.make_copy = SimpleNamespace(limits=settings.limits), lambda: copies.append("copy")
    session.log, session.debt_s, session.exact, session.can_copy, session.cell = [], 0.0, False, True, 1
    session.remember(-1, 0, 0.02)
    return answered, evicted, meter.starved(0.031, 0.03), copies


class Trial:
    """An environment that pays."""

    def get_reward(self) -> float:
        return 1.0


def hosted(config: Config) -> list:
    """What the processes or actors that hold environments are started with; nothing where these live in threads."""
    host = config.environment.host
    if isinstance(host, HostThreads):
        return []

    def replaced(*given: Any) -> Any:
        return SimpleNamespace(given=given)

    return [worker.given for worker in hosts.make_host(host, None, process=replaced, actor=replaced).workers]


def asked_of_mcp(config: Config) -> str:
    """What the package of MCP is asked for, with a stand-in for it."""
    package, choice = mock.MagicMock(), config.environment

    async def enter() -> None:
        async with module.client_of(choice, None, errors):
            pass

    names = ("mcp", "mcp.client", "mcp.client.stdio", "mcp.client.streamable_http")
    with mock.patch.dict(sys.modules, dict.fromkeys(names, package)):
        sys.modules.pop("grpo_roc_jax.environments.mcp_tools", None)
        module = adapter("environments.mcp_tools", "mcp")
        with module.opened_log(choice) as errors:
            asyncio.run(enter())
    return re.sub(r"id='\d+'|(, <_io.TextIOWrapper) name=\d+ [^>]*>", r"\1", str(package.mock_calls))


OWN = {"environment": "tests.helpers.knobs_tools:Trial", "reward.functions": ("environment",)}
MCP = {"environment.kind": "mcp"}
SEEN = (
    seen(decided, "tools.level", {"tools.min_level": "L0"}),
    seen(decided, "tools.min_level"),
    only(decided, "tools", {"tools.workers": 4}, roots=3),
    only(housekept, "tools", queue_timeout_s=50.0, session_idle_s=500.0, cpu_floor_s=0.01, session_replay_ms=10.0),
    only(hosted, "environment", OWN, host="processes"),
    seen(hosted, "environment.host.workers", OWN | {"environment.host": "processes"}),
    seen(hosted, "environment.host.cpus", OWN | {"environment.host": "ray"}),
    only(asked_of_mcp, "environment", MCP | {"environment.command": ("a",)}, command=("b",), log=os.devnull),
    only(asked_of_mcp, "environment", MCP | {"environment.url": "http://a"}, token_variable="HOME"),
)
