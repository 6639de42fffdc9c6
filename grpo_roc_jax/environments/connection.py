"""Connections that environments hold to servers: entered and left by one task, as libraries on anyio require.

Each method of an environment runs in a task of its own, so an `async with` cannot span two of them.
"""

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Connection(Generic[T]):
    """A context manager that is held from `enter` to `leave`, which any task may call."""

    def __init__(self, manager: AbstractAsyncContextManager[T]):
        self._manager, self._leave = manager, asyncio.Event()
        self._entered: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold())

    async def enter(self) -> T:
        """What the context manager gives. Raises what it raises."""
        try:
            return await asyncio.shield(self._entered)
        except asyncio.CancelledError:
            self._task.cancel()
            raise

    async def leave(self) -> None:
        """Leaves the context, or gives up entering it; errors on the way out are of no use to anybody."""
        self._leave.set()
        if not self._entered.done():
            self._task.cancel()
        await asyncio.wait([self._task])

    async def _hold(self) -> None:
        try:
            async with self._manager as value:
                self._entered.set_result(value)
                await self._leave.wait()
        except BaseException as error:
            if not self._entered.done():
                self._entered.set_exception(ConnectionError(reason_of(error)))


def reason_of(error: BaseException) -> str:
    """The first single exception in words; connections raise groups of them."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def outcome(coroutine: Coroutine[Any, Any, T], limit_s: float) -> T:
    """The value of a coroutine, also where an event loop runs already, as in notebooks.

    Raises:
        ConnectionError: It failed or took longer than `limit_s`.
    """
    found: list[Any] = []

    async def limited() -> T:
        return await asyncio.wait_for(coroutine, limit_s)

    def body() -> None:
        try:
            found.append(asyncio.run(limited()))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=body, daemon=True, name="connection")
    thread.start()
    thread.join()
    if isinstance(found[0], TimeoutError):
        raise ConnectionError(f"no answer within {limit_s:g} s") from found[0]
    if isinstance(found[0], BaseException):
        raise ConnectionError(reason_of(found[0])) from found[0]
    return found[0]
