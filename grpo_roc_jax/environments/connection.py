"""Connections that environments hold to servers: entered and left by one task, as libraries on anyio require.

Each method of an environment runs in a task of its own, so an `async with` cannot span two of them.
"""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar

from grpo_roc_jax.tools.registry import TooLate, await_for

T = TypeVar("T")


class Connection(Generic[T]):
    """A context manager that is held from `enter` to `leave`, which any task may call."""

    def __init__(self, manager: AbstractAsyncContextManager[T]):
        self._manager, self._leave = manager, asyncio.Event()
        self.entered: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        """What the context manager gives; a ConnectionError says that it failed."""
        self._task = asyncio.create_task(self._hold())

    async def enter(self) -> T:
        """What the context manager gives. Raises ConnectionError if it fails."""
        try:
            return await asyncio.shield(self.entered)
        except asyncio.CancelledError:
            self._task.cancel()
            raise

    async def leave(self) -> None:
        """Leaves the context, or gives up entering it; errors on the way out are of no use to anybody."""
        self._leave.set()
        if not self.entered.done():
            self._task.cancel()
        await asyncio.wait([self._task])

    async def _hold(self) -> None:
        try:
            async with self._manager as value:
                self.entered.set_result(value)
                await self._leave.wait()
        except BaseException as error:
            if not self.entered.done():
                self.entered.set_exception(ConnectionError(reason_of(error)))


def reason_of(error: BaseException) -> str:
    """The first single exception in words; connections raise groups of them."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def outcome(ask: Callable[[], Coroutine[Any, Any, T]], limit_s: float, retries: int = 0) -> T:
    """What a coroutine function returns, also where an event loop runs already, as in notebooks.

    Args:
        ask: Called for each attempt.
        limit_s: Seconds for an attempt.
        retries: Further attempts, a second after one that failed.

    Raises:
        ConnectionError: The last attempt failed or took too long.
    """

    async def attempts() -> T:
        for left in reversed(range(1 + retries)):
            try:
                return await await_for(ask(), limit_s)
            except TooLate as error:
                failure = ConnectionError(f"no answer within {limit_s:g} s")
                failure.__cause__ = error
            except Exception as error:
                failure = ConnectionError(reason_of(error))
                failure.__cause__ = error
            if left:
                await asyncio.sleep(1.0)
        raise failure

    with ThreadPoolExecutor(1, thread_name_prefix="connection") as pool:
        return pool.submit(asyncio.run, attempts()).result()
