"""Agents that are functions: each rollout is a coroutine in a host of `environments.hosts`, which imports once what the
function imports.

The processes of hosts import this module, so it imports no JAX.
"""

import asyncio
import concurrent.futures
import json
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_roc_jax.environments.config import AgentFunction, AgentKind
from grpo_roc_jax.environments.hosts import make_host
from grpo_roc_jax.serving.agent_ends import AgentCall, Pay, ProgramEnd, read_pay
from grpo_roc_jax.settings.callables import given, passed

GRACE_S = 5.0
"""Added to the deadline of a rollout before its host counts as lost: a function that blocks does not see its own."""


@dataclass(frozen=True)
class FunctionSettings:
    """What the rollouts of a function are made from."""

    choice: AgentKind
    passed: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    repeats: bool = False
    """The policy was asked already."""

    def prepare(self) -> tuple[Callable[[], "FunctionRollout"], bool]:
        """See `environments.hosts.HeldSettings`."""
        with given(self.passed):
            function = self.choice.rollout()
        assert function is not None
        return lambda: FunctionRollout(function), False


class FunctionRollout:
    """The rollout of a function: its operation `open` is all of it."""

    def __init__(self, function: AgentFunction):
        self._function = function
        self._task: asyncio.Task[ProgramEnd] | None = None

    def never_waits(self, operation: str, arguments: Sequence[Any]) -> bool:
        """What has ended needs no loop."""
        return operation == "end"

    async def open(self, call: AgentCall, timeout_s: float) -> ProgramEnd:
        """The rollout to its end. An exception is that of a program with status 1, a late one is cancelled."""
        self._task = asyncio.ensure_future(self._play(call))
        done, _ = await asyncio.wait([self._task], timeout=timeout_s)
        if not done:
            self._task.cancel()
            return ProgramEnd(None)
        return self._task.result()

    async def _play(self, call: AgentCall) -> ProgramEnd:
        try:
            value = await self._function(call.row, call.base_url, call.api_key)
        except BaseException:  # an exit would end the event loop, and a function may cancel itself
            return ProgramEnd(1, errors=traceback.format_exc())
        pay, unread = (Pay(), "") if value is None else read_pay(_as_json(value))
        return ProgramEnd(0, pay, unread=unread)

    async def end(self) -> None:
        """Nothing is left."""

    def release(self) -> None:
        """Cancels what still runs."""
        if self._task is not None:
            self._task.cancel()


class FunctionAgent:
    """Runs the rollouts of a function in the host that the configuration names. Thread-safe."""

    def __init__(self, choice: AgentKind, path: str = ""):
        """
        Args:
            choice: Has a function.
            path: Of the function, where it has one; a function may have been passed to `train` under that name.

        Raises:
            ValueError: There is no such function, it is no `async def`, or it cannot be sent to another process.
        """
        choice.rollout()  # a fault is raised here, and not in a process
        function = passed(path) if path else None
        self._host = make_host(choice.host, FunctionSettings(choice, {} if function is None else {path: function}))
        self._timeout_s = choice.timeout_s
        self._live: set[str] = set()

    @property
    def live(self) -> int:
        """Number of rollouts that run."""
        return len(self._live)

    def play(self, name: str, call: AgentCall) -> ProgramEnd:
        """One rollout to its end; waits for it."""
        started = time.perf_counter()
        self._live.add(name)
        running = self._host.call(name, "open", call, self._timeout_s)
        try:
            end = running.result(self._timeout_s + GRACE_S)
        except concurrent.futures.TimeoutError:
            self._host.abandon(name)
            end = ProgramEnd(None)
        except Exception as error:  # its process or actor is gone
            end = ProgramEnd(-signal.SIGKILL, errors=f"{type(error).__name__}: {error}")
        else:
            self._host.call(name, "end")
        finally:
            self._live.discard(name)
        if not isinstance(end, ProgramEnd):  # what could not be sent
            end = ProgramEnd(1, errors=str(end.failure))
        return end.after(time.perf_counter() - started)

    def kill(self) -> None:
        """Ends what runs."""
        for name in list(self._live):
            self._host.abandon(name)

    def close(self) -> None:
        """Ends the host. A function that holds a thread without awaiting keeps it, but not the process."""
        self.kill()
        self._host.close()


def _as_json(value: Any) -> bytes:
    """What a program would have written; a reward that is true or false counts as 1 or 0, as NumPy's do."""
    if isinstance(value, bool):
        value = float(value)
    elif isinstance(value, Mapping):
        value = {name: float(item) if isinstance(item, bool) else item for name, item in value.items()}
    try:
        return json.dumps(value, default=_plain).encode()
    except Exception as error:  # of the user's class
        return f"{type(value).__name__} ({type(error).__name__}: {error})"[:200].encode()


def _plain(value: Any) -> Any:
    """What JSON holds in place of a value of another class."""
    if isinstance(value, Mapping):
        return dict(value)
    listed = getattr(value, "tolist", None)  # arrays and numbers of NumPy, tensors
    plain = float(value) if listed is None else listed()
    return float(plain) if isinstance(plain, bool) else plain
