"""One episode: an environment's methods called with deadlines, its answers checked, its failures typed."""

import asyncio
import copy
import inspect
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import Any

from grpo_roc_jax.environments.config import Factories, Hosted
from grpo_roc_jax.environments.environment import Environment, Observation, accepted, method_tools, row_of
from grpo_roc_jax.environments.failure import Failure, failure_of, may_blame_policy, plain_failure
from grpo_roc_jax.environments.threads import IdleThreads, LeasedThread
from grpo_roc_jax.sandbox.base import cut
from grpo_roc_jax.settings.callables import given
from grpo_roc_jax.tools.config import ToolsConfig
from grpo_roc_jax.tools.foreign import ForeignTool
from grpo_roc_jax.tools.observation import observe
from grpo_roc_jax.tools.registry import (
    Job,
    Registry,
    TooLate,
    ToolUnavailable,
    await_for,
    failed_result,
    returned_result,
)
from grpo_roc_jax.types import Problem, ToolResult, Turn


@dataclass(frozen=True)
class EpisodeSettings:
    """What an episode is made from; sent to the processes that hold episodes."""

    choice: Hosted
    passed: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    """Classes and functions passed by the caller, by their paths."""
    tools: ToolsConfig = field(default_factory=ToolsConfig)
    """Settings of the wording of results."""
    repeats: bool = True

    def find(self) -> Factories:
        """What makes environments. Raises ValueError as `EnvironmentKind.factories` does."""
        with given(self.passed):
            return self.choice.factories()

    def prepare(self) -> "tuple[Callable[[], Episode], bool]":
        """(what makes an episode, whether it opens without any code of the user's)."""
        factories = self.find()
        return lambda: Episode(self, factories), opens_at_once(factories)


@dataclass(frozen=True)
class Answer:
    """What an operation of an episode came to."""

    value: Any = None
    """The text of a reset, (results, `Observation` or None) of a turn, at the end (the reward, further numbers by
    name)."""
    failure: Failure | None = None
    """The failure that ended the episode, if one did."""
    late: bool = False
    """A call took too long, which ends the episode."""
    lost: bool = False
    """What held the episode is gone."""
    retries: int = 0


MOST_TEXT = 1 << 22
"""Characters of a text from an environment; the middle of a longer one is left out before it is encoded."""


INHERITED = (Environment.reset, Environment.step, Environment.get_reward, Environment.close)
"""Methods that do nothing; they need no thread."""
THREADS = IdleThreads()
SOON_S = 2.0
"""Seconds that an operation has to end once its rollout was given up; then the environment is closed all the same."""


def inherits(kind: Any, *names: str) -> bool:
    """Whether a class has these methods from `Environment`, where they do nothing."""
    return isinstance(kind, type) and all(getattr(kind, name, None) is getattr(Environment, name) for name in names)


def opens_at_once(factories: Factories) -> bool:
    """Whether environments are made and reset without any code of the user's."""
    return all(inherits(factory, "__new__", "__init__", "reset") for factory in factories.values())


class NoItem(LookupError):
    """A function raised StopIteration, as `next` does without an item; a future cannot hold that exception."""


class BadAnswer(TypeError):
    """An environment returned something of another type than it may."""


class Episode:
    """An environment and its operations, which are awaited one after another. None of them raises."""

    def __init__(self, settings: EpisodeSettings, factories: Factories):
        self._settings, self._factories = settings, factories
        self._environment: Any = None
        self._name = ""
        """Name of the environment among the factories."""
        self._registry = Registry()
        self._retries = 0
        self._in_use = asyncio.Lock()
        self._thread: LeasedThread | None = None
        """Runs the functions of the environment; what one of them has opened may belong to its thread."""
        self._given_up = False
        """Whether nothing but `close` may be called any more."""

    def never_waits(self, operation: str, arguments: Sequence[Any]) -> bool:
        """Whether a turn or the end runs no code of the user's: then its coroutine ends without a loop that runs it."""
        if operation == "play" and None in arguments[1]:
            return False
        names = {"play": ("step",), "end": ("get_reward", "close")}[operation]
        attributes = getattr(self._environment, "__dict__", {})
        return inherits(type(self._environment), *names) and not attributes.keys() & set(names)

    async def open(self, problem: Problem, seed: int) -> Answer:
        """Makes the environment and resets it; another one is made if that fails."""

        async def begin() -> str:
            # The rollouts of a group share the columns of their row.
            row = problem.copied()
            self._name = self._settings.choice.name_for(problem)
            factory = self._factories[self._name]
            self._environment = environment = await self._made(factory)
            self._registry = method_tools(type(environment))
            if isinstance(environment, Environment):
                environment.seed = seed
                text = await self._call(environment.reset, row)
            else:
                text = await self._call(environment.reset, **accepted(environment.reset, row_of(row)))
            return checked_text(text, "reset")

        async with self._in_use:
            return await self._answer(begin, Exception, "reset")

    async def play(self, turn: Turn, given: Sequence[ToolResult | None]) -> Answer:
        """Runs the calls of a turn that have no result yet, then asks the environment.

        Coroutine functions run at the same time. Other methods of an environment share its state without locks, so
        they run one after another.
        """
        async with self._in_use:
            return await self._play(turn, given)

    async def _play(self, turn: Turn, given: Sequence[ToolResult | None]) -> Answer:
        waiting = {i: call for i, call in enumerate(turn.calls) if given[i] is None}
        results_by_position = dict(enumerate(given))
        jobs = {i: self._registry.prepare(call.name, call.arguments, None) for i, call in waiting.items()}
        if getattr(self._environment, "answers_calls", False):
            jobs = {i: job for i, job in jobs.items() if isinstance(job, ToolResult)}

        async def run(places: Sequence[int]) -> None:
            late = None
            for i in places:  # what a late call does to the state is not known, so none follows it
                results_by_position[i] = late or await self._result(turn.calls[i].name, jobs[i])
                late = results_by_position[i] if results_by_position[i].kind == "timeout" else late

        alone = [i for i in jobs if asyncio.iscoroutinefunction(self._tool(turn.calls[i].name))]
        if jobs:
            await asyncio.gather(run([i for i in jobs if i not in alone]), *(run([i]) for i in alone))
        results = tuple(results_by_position[i] for i in range(len(turn.calls)))
        known = tuple(takewhile(lambda result: result is not None, results))  # by order, see `Turn.results`
        if broken := [result for result in results if result is not None and result.infra]:
            message = f"{broken[0].error_type}: {broken[0].error_message}"
            return self._done(failure=plain_failure("a call", message), value=(known, None))
        if any(results[i].kind == "timeout" for i in jobs):
            return self._done(late=True, value=(known, None))
        if not isinstance(self._environment, Environment):
            return self._done(value=(results, None))

        async def step() -> tuple[tuple[ToolResult, ...], Observation | None]:
            observation = checked_observation(await self._call(self._environment.step, replace(turn, results=results)))
            return self._filled(results, observation), observation

        answer = await self._answer(step, (ToolUnavailable, ConnectionError), "step")
        return answer if answer.failure is None else replace(answer, value=(known, None))

    def _filled(self, results: Sequence[ToolResult | None], observation: Observation | None) -> tuple[ToolResult, ...]:
        """The results with those that the environment gave.

        Raises:
            BadAnswer: They are not as many as its calls.
        """
        given = list(observation.results if observation else ())
        if len(given) != sum(result is None for result in results):
            raise BadAnswer(f"Observation.results has {len(given)} results for {results.count(None)} open calls")
        return tuple(self._worded(given.pop(0)) if result is None else result for result in results)

    async def end(self) -> Answer:
        """The reward at the end; the environment is closed."""

        async def paid() -> tuple[float | None, Mapping[str, float]]:
            if not hasattr(self._environment, "get_reward"):
                return 0.0, {}
            return checked_pay(await self._call(self._environment.get_reward))

        async with self._in_use:
            answer = await self._answer(paid, (ToolUnavailable, ConnectionError), "get_reward")
            await self._close()
        return answer

    async def _made(self, factory: Callable[[], Any]) -> Any:
        """The environment. One that is there too late is closed at once, on the thread that has made it."""
        if inherits(factory, "__new__", "__init__") or asyncio.iscoroutinefunction(factory):
            return await self._call(factory)
        made: list[Any] = []
        late = threading.Event()

        def make() -> Any:
            made.append(environment := factory())
            if late.is_set():
                with suppress(IndexError):  # whoever takes it closes it
                    _close_here(made.pop())
            return environment

        try:
            return await self._call(make)
        except TooLate:
            late.set()
            with suppress(IndexError):
                self._environment = made.pop()
            raise

    async def release(self) -> None:
        """Closes the environment without asking for its reward, after an operation that ends within `SOON_S`, or once
        it has been made."""
        self._given_up = True
        async with AsyncExitStack() as stack:
            try:
                await asyncio.wait_for(stack.enter_async_context(self._in_use), SOON_S)
            except TimeoutError:
                if self._environment is None:
                    await stack.enter_async_context(self._in_use)
                else:
                    self._release_thread()  # it runs the operation, so `close` gets another one
            await self._close()

    def _release_thread(self) -> None:
        """Gives the thread of the episode back once what it runs has ended."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.release()

    def _tool(self, name: str) -> Callable[..., Any] | None:
        """What runs the calls of a tool, with their arguments by name."""
        if isinstance(self._registry.get(name), ForeignTool):
            return partial(self._environment.call_tool, name)
        return getattr(self._environment, name, None)

    async def _result(self, name: str, job: Job | ToolResult) -> ToolResult:
        limit_s = self._settings.choice.timeout_s
        result = self._worded(job) if isinstance(job, ToolResult) else None
        while result is None:
            try:
                arguments = copy.deepcopy(dict(job.arguments))  # those of the job are recorded
                result = self._worded(returned_result(await self._call(self._tool(name), **arguments)))
            except Exception as error:  # also of a result that holds something else than it may
                result = self._worded(failed_result(error, limit_s))
            if result.infra and self._retries < self._settings.choice.retries:
                self._retries, result = self._retries + 1, None
        return result

    def _worded(self, result: ToolResult) -> ToolResult:
        """The result with its observation."""
        config = self._settings.tools
        echo = cut(result.echo, config.output_kb << 10)
        result = replace(result, echo=echo, truncated=result.truncated or echo != result.echo)
        return replace(result, observation=observe(result, "", config))

    async def _answer(self, operation: Callable[[], Any], again: Any, name: str) -> Answer:
        """The value of an operation, attempted again after exceptions of the kinds `again`."""
        while True:
            try:
                return self._done(value=await operation())
            except Exception as error:
                last = self._retries >= self._settings.choice.retries or not isinstance(error, again)
                failure = self._failure(name, error) if last else None
                if name == "reset":
                    await self._close()
                if failure is not None:
                    return self._done(failure=failure)
                self._retries += 1

    def _failure(self, name: str, error: Exception) -> Failure:
        """What an exception of an operation is."""
        choice = self._settings.choice
        if isinstance(error, TooLate):
            return plain_failure(name, f"took longer than {choice.timeout_s:g} s")
        zero = name == "step" and choice.scores_failures(self._name)
        blamed = zero and not isinstance(error, BadAnswer) and may_blame_policy(error, self._environment)
        return failure_of(name, error, by_policy=blamed)

    def _done(self, **fields: Any) -> Answer:
        retries, self._retries = self._retries, 0
        return Answer(**fields, retries=retries)

    async def _close(self) -> None:
        """Closes the environment, if there is one, and gives its thread back."""
        environment, self._environment = self._environment, None
        if isinstance(environment, Environment):
            with suppress(Exception):  # it is over either way
                await self._value(environment.close)
        self._release_thread()

    async def _call(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
        """The value of a function of the environment; see `_value`."""
        if self._given_up:
            raise RuntimeError("its rollout was given up")
        return await self._value(function, *arguments, **named)

    async def _value(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
        """The value of a coroutine function, or of another one, which runs on the thread of the episode. One that is
        late is abandoned with its thread."""
        limit_s = self._settings.choice.timeout_s
        if getattr(function, "__func__", None) in INHERITED or inherits(function, "__new__", "__init__"):
            return function(*arguments)
        if asyncio.iscoroutinefunction(function):
            return await await_for(function(*arguments, **named), limit_s)
        loop, future = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        def deliver(value: Any, error: BaseException | None) -> None:
            if not future.done():
                future.set_result(value) if error is None else future.set_exception(error)

        def body() -> None:
            value, error = None, None
            try:
                value = function(*arguments, **named)
            except StopIteration as raised:
                error = NoItem("StopIteration").with_traceback(raised.__traceback__)
            except Exception as raised:
                error = raised
            except BaseException as raised:  # an exit ends the thread alone
                error = RuntimeError(repr(raised))
            try:
                loop.call_soon_threadsafe(deliver, value, error)
            except RuntimeError:  # the loop is closed
                return

        self._thread = self._thread or THREADS.lease()
        self._thread.run(body)
        try:
            value = await await_for(future, limit_s)
        except TooLate:
            self._release_thread()
            raise
        return await await_for(value, limit_s) if inspect.isawaitable(value) else value


def _close_here(environment: Any) -> None:
    """Closes an environment on this thread."""
    if isinstance(environment, Environment):
        with suppress(Exception):  # it is over either way
            closing = environment.close()
            if inspect.iscoroutine(closing):
                asyncio.run(closing)


def checked_text(text: Any, name: str) -> str:
    """The text that a method returned; empty for None. Raises BadAnswer for anything else."""
    if text is None or isinstance(text, str):
        return cut(text or "", MOST_TEXT)
    raise BadAnswer(f"{name} returned {type(text).__name__}; must be text or None")


def checked_observation(answer: Any) -> Observation | None:
    """What `step` returned. Raises BadAnswer if it is something else than it may be."""
    if answer is None:
        return None
    answer = Observation(answer) if isinstance(answer, str) else answer
    if not isinstance(answer, Observation) or answer.role not in ("user", "raw"):
        raise BadAnswer(f"step returned {type(answer).__name__}; must be an Observation, text or None")
    if not isinstance(answer.results, tuple | list) or not all(
        isinstance(result, ToolResult) for result in answer.results
    ):
        raise BadAnswer("Observation.results holds something else than ToolResult")
    reward = checked_reward(answer.reward, "Observation.reward")
    try:
        done = bool(answer.done)
    except Exception as error:
        raise BadAnswer(f"Observation.done is {type(answer.done).__name__}; must be true or false") from error
    return replace(answer, text=checked_text(answer.text, "Observation.text"), reward=reward or 0.0, done=done)


def checked_pay(value: Any) -> tuple[float | None, Mapping[str, float]]:
    """(the reward, further numbers by name) that `get_reward` returned. Raises BadAnswer for anything else."""
    if not isinstance(value, Mapping):
        return checked_reward(value, "get_reward"), {}
    named = {str(name): checked_reward(number, f"get_reward()[{name!r:.80}]") for name, number in value.items()}
    reward = named.pop("reward", None)
    return reward, {name: number for name, number in named.items() if number is not None}


def checked_reward(value: Any, name: str) -> float | None:
    """A finite number, or None. Raises BadAnswer for anything else."""
    if value is None:
        return None
    try:
        number = float(None if isinstance(value, str | bytes) else value)
    except Exception:  # of an integer beyond the range of floats, or of a class of the user's own
        raise BadAnswer(f"{name} is {type(value).__name__}; must be a number or None") from None
    if not math.isfinite(number):
        raise BadAnswer(f"{name} is {number}; must be finite")
    return number
