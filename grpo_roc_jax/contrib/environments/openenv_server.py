"""An OpenEnv server as an environment: a session for each rollout. Either its tools are called, or turns are its
actions.

Source: the package `openenv`, version 0.10; its client communicates with any server by plain dictionaries.
"""

import json
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any, ClassVar

from openenv.core.generic_client import GenericEnvClient

from grpo_roc_jax.environments.config import EnvironmentOpenEnv, bearer
from grpo_roc_jax.environments.connection import outcome
from grpo_roc_jax.environments.environment import Environment, Observation, said_in
from grpo_roc_jax.tools.registry import ToolUnavailable
from grpo_roc_jax.types import Problem, ToolResult, Turn

REFUSED = "code: VALIDATION_ERROR"
"""How the client writes that a server cannot read an action."""
OF_THE_SERVER = ("transport_error", "timeout")
"""Errors of a call that are not the caller's fault."""


class Session(GenericEnvClient):
    """A client that connects only once: a second connection would be another episode, without a reset."""

    first: Any = None
    """The socket of the session."""

    async def _connect_async(self) -> Any:
        connected = await super()._connect_async()
        self.first = self.first or self._ws
        if self._ws is not self.first:
            raise ConnectionError("the session with the server was lost")
        return connected


class OpenEnvEnvironment(Environment):
    """A session with a server. The server's rewards are given by turn, and it decides when the rollout ends."""

    choice: ClassVar[EnvironmentOpenEnv]

    async def reset(self, problem: Problem) -> str:
        self._session = session_of(self.choice)
        self._paid, self._done = 0.0, False
        seed = problem.column("seed", self.seed % (1 << 31))
        return self._text(
            (await self._server_answer(self._session.reset(**{**problem.extra, "seed": seed}))).observation
        )

    async def call_tool(self, name: str, /, **arguments: Any) -> ToolResult:
        action = {"type": "call_tool", "tool_name": name, "arguments": arguments}
        answer = await self._server_answer(self._session.step(action))
        try:
            return call_result(self._take(answer))
        except (KeyError, TypeError, ValueError, AttributeError) as error:  # not the policy's fault
            raise ToolUnavailable(f"OpenEnv server: malformed answer: {type(error).__name__}: {error}") from error

    async def step(self, turn: Turn) -> Observation | None:
        text = ""
        if self.choice.action and not turn.calls:
            try:
                answer = await self._server_answer(self._session.step({self.choice.action: said_in(turn)}))
            except ValueError as error:
                text = str(error)
            else:
                text = self._text(self._take(answer))
        paid, self._paid = self._paid, 0.0
        return Observation(text, reward=paid, done=self._done)

    async def close(self) -> None:
        if hasattr(self, "_session"):
            await self._session.close()

    def _take(self, result: Any) -> Mapping[str, Any]:
        """The observation of a step; its reward is added at the end of the turn."""
        self._paid += float(result.reward or 0.0)
        self._done = self._done or bool(result.done)
        return result.observation

    def _text(self, observation: Mapping[str, Any]) -> str:
        if self.choice.observation:
            return str(observation[self.choice.observation])
        shown = {name: value for name, value in observation.items() if name != "metadata" and value is not None}
        return json.dumps(shown) if shown else ""

    @staticmethod
    async def _server_answer(answer: Any) -> Any:
        try:
            return await answer
        except Exception as error:  # the client passes on errors of its socket
            if REFUSED in str(error):
                raise ValueError("the server cannot read this action") from error
            raise ToolUnavailable(f"OpenEnv server: {type(error).__name__}: {error}") from error


def call_result(seen: Mapping[str, Any]) -> ToolResult:
    """The result of a call, from the observation that answers it."""
    if error := seen.get("error"):
        if error["error_type"] in OF_THE_SERVER:
            raise ToolUnavailable(f"OpenEnv server: {error['message']}")
        return ToolResult("exception", error_type="ToolError", error_message=error["message"][:500])
    outcome = seen["result"]
    return ToolResult("ok", echo=content_text(outcome) if isinstance(outcome, Mapping) else str(outcome))


def content_text(result: Mapping[str, Any]) -> str:
    """The text of a tool's result in the form of MCP."""
    parts = [part.get("text", f"[{part.get('type')}]") for part in result.get("content", ())]
    return "\n".join(parts) if parts else json.dumps(result.get("data"))


def session_of(choice: EnvironmentOpenEnv) -> Session:
    """A client, which connects with its first request."""
    headers = bearer(choice.token_variable)
    return Session(base_url=choice.url, message_timeout_s=choice.timeout_s, headers=headers)


@lru_cache
def openenv_class(choice: EnvironmentOpenEnv) -> type[OpenEnvEnvironment]:
    """The environment of a server. The server is asked for its tools unless turns are its actions.

    Raises:
        ValueError: The server does not answer, or has no tools.
    """
    try:
        schemas = outcome(partial(_schemas, choice), choice.timeout_s, choice.retries)
    except ConnectionError as error:
        raise ValueError(f"environment: the OpenEnv server {choice.url!r} cannot be used: {error}") from error
    return type("OpenEnvEnvironment", (OpenEnvEnvironment,), {"choice": choice, "schemas": schemas})


async def _schemas(choice: EnvironmentOpenEnv) -> tuple[Mapping[str, Any], ...]:
    session = session_of(choice)
    try:
        await session.connect()
        if choice.action:
            return ()
        schemas = tuple((await session.step({"type": "list_tools"})).observation.get("tools", ()))
    except RuntimeError as error:
        hint = "its actions are no calls of tools; name the field of the text in environment.action"
        raise ConnectionError(f"{error}; {hint}") from error
    finally:
        await session.close()
    if not schemas:
        raise ConnectionError("it has no tools; name the field of the text in environment.action")
    return schemas
