"""`environment agent` with a function: rollouts of one coroutine each, on one event loop beside the sampling thread.

What a function imports is imported once, so a rollout costs what its calls cost.
"""

import asyncio
import concurrent.futures
import inspect
import json
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from grpo_roc_jax.serving.agent_ends import Pay, ProgramEnd, read_pay
from grpo_roc_jax.settings.callables import resolve

AgentFunction = Callable[[Mapping[str, Any], str, str], Awaitable[Any]]
"""(columns of the problem, base URL, API key) -> its numbers, as `agent_ends.read_pay` reads them, or None for none."""


class FunctionHost:
    """Runs the rollouts of a function."""

    def __init__(self, name: str):
        """
        Args:
            name: `package.module:function`, `file.py:function`, or the name of a function that was passed to `train`.

        Raises:
            ValueError: There is no such function, or it is no `async def`.
        """
        function = resolve("environment.function", name)
        assert function is not None
        if not inspect.iscoroutinefunction(function):
            raise ValueError(
                f"environment.function = {name!r} is no coroutine; must be `async def rollout(row, base_url, api_key)`"
            )
        self._function: AgentFunction = function
        self.live = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="agent-functions")
        self._thread.start()

    def play(self, row: Mapping[str, Any], base_url: str, api_key: str, timeout_s: float) -> ProgramEnd:
        """One rollout to its end; waits for it. Thread-safe.

        An exception of the function is the end of a program with status 1. One that takes too long is cancelled.
        """
        started = time.perf_counter()
        running = asyncio.run_coroutine_threadsafe(self._call(row, base_url, api_key), self._loop)
        self.live += 1
        status: int | None = 0
        value, errors = None, ""
        try:
            value = running.result(timeout_s)
        except (Exception, SystemExit, concurrent.futures.CancelledError):
            late = not running.done() or running.cancelled()
            status, errors = (None, "") if late else (1, traceback.format_exc())
            running.cancel()
        finally:
            self.live -= 1
        pay, unread = (Pay(), "") if value is None else read_pay(_as_json(value))
        return ProgramEnd(status, pay, errors, unread, "", time.perf_counter() - started)

    async def _call(self, row: Mapping[str, Any], base_url: str, api_key: str) -> Any:
        return await self._function(row, base_url, api_key)

    def cancel(self) -> None:
        """Cancels what runs."""

        def cancel_all() -> None:
            for task in asyncio.all_tasks(self._loop):
                task.cancel()

        self._loop.call_soon_threadsafe(cancel_all)

    def close(self) -> None:
        """Ends the loop. A function that holds it without awaiting keeps its thread, but not the process."""
        self.cancel()
        self._loop.call_soon_threadsafe(self._loop.call_later, 0.1, self._loop.stop)
        self._thread.join(1.0)


def _as_json(value: Any) -> bytes:
    try:
        return json.dumps(value, default=float).encode()
    except (TypeError, ValueError, RecursionError):
        return repr(value).encode()
