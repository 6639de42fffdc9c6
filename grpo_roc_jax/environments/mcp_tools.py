"""The tools of an MCP server as an environment: a session for each rollout, over HTTP or with a server of its own.

Source: modelcontextprotocol.io, tools; the client is that of the package `mcp`, version 2.
"""

import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import lru_cache, partial
from typing import IO, Any, ClassVar

import mcp
from mcp.client.stdio import stdio_client

from grpo_roc_jax.environments.config import EnvironmentMcp, bearer
from grpo_roc_jax.environments.connection import Connection, outcome
from grpo_roc_jax.environments.environment import Environment, row_of
from grpo_roc_jax.tools.registry import MAX_TOOLS, ToolUnavailable
from grpo_roc_jax.types import Problem, ToolResult

INVALID_PARAMS = -32602
"""Code of JSON-RPC for arguments that a server refuses."""


class McpEnvironment(Environment):
    """A session with a server; the policy calls its tools."""

    choice: ClassVar[EnvironmentMcp]

    async def reset(self, problem: Problem) -> None:
        self._errors = opened_log(self.choice)
        columns = row_of(problem) | {"uid": problem.uid, "seed": self.seed}
        self._connection = Connection(client_of(self.choice, columns, self._errors))
        try:
            self._client = await self._connection.enter()
        except ConnectionError as error:
            raise ConnectionError(f"MCP server: {error}{_ending(self._errors)}") from error

    async def call_tool(self, name: str, /, **arguments: Any) -> ToolResult:
        try:
            return tool_result(await self._client.call_tool(name, arguments))
        except mcp.MCPError as error:
            if error.code == INVALID_PARAMS:
                return ToolResult("exception", error_type="ToolError", error_message=error.message[:500])
            raise ToolUnavailable(f"MCP server: {error.message} ({error.code}){_ending(self._errors)}") from error
        except Exception as error:  # the transport fails with the exceptions of several libraries
            raise ToolUnavailable(f"MCP server: {type(error).__name__}: {error}{_ending(self._errors)}") from error

    async def close(self) -> None:
        if hasattr(self, "_connection"):
            await self._connection.leave()
        if hasattr(self, "_errors"):
            self._errors.close()


COLUMN = re.compile(r"(?<!\$)\{(\w+)\}")
MOST_SAID = 400
"""Characters shown of what a server wrote last."""


def filled(words: Sequence[str], columns: Mapping[str, Any] | None) -> list[str]:
    """The words of a command with columns of a row in place of `{NAME}`; without a row, nothing, and 0 for the seed.

    Raises:
        ValueError: The row has no such column.
    """

    def column(match: re.Match[str]) -> str:
        name = match[1]
        if columns is None:
            return "0" if name == "seed" else ""
        if name not in columns:
            known = ", ".join(columns)
            raise ValueError(f"environment.command names {match[0]}; the columns of this problem are {known}")
        return str(columns[name])

    return [COLUMN.sub(column, word) for word in words]


def opened_log(choice: EnvironmentMcp) -> IO[str]:
    """What gets the error output of a server."""
    if choice.log:
        return open(choice.log, "a+", encoding="utf-8", errors="replace")
    return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")


def _ending(log: IO[str]) -> str:
    """What a server wrote last, as the end of a message."""
    size = os.fstat(log.fileno()).st_size
    text = os.pread(log.fileno(), 4 * MOST_SAID, max(0, size - 4 * MOST_SAID)).decode(errors="replace")
    return f"; it wrote: {text.strip()[-MOST_SAID:]}" if text.strip() else ""


def _text_of(part: Any) -> str:
    """The text of a part: its own, or that of a resource which comes with it."""
    holder = part if part.type == "text" else getattr(part, "resource", None)
    text = getattr(holder, "text", None)
    return text if isinstance(text, str) else f"[{part.type}]"


def tool_result(result: Any) -> ToolResult:
    """What a server answered; parts other than text are named, since observations are text."""
    parts = [_text_of(part) for part in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content)]
    text = "\n".join(parts)
    if result.is_error:
        return ToolResult("exception", error_type="ToolError", error_message=text[:500])
    return ToolResult("ok", echo=text)


@lru_cache
def mcp_class(choice: EnvironmentMcp) -> type[McpEnvironment]:
    """The environment of a server, which is asked for its tools.

    Raises:
        ValueError: It does not answer, or has no tool.
    """
    server = choice.url or " ".join(choice.command)
    with opened_log(choice) as errors:
        try:
            schemas = outcome(partial(_schemas, choice, errors), choice.timeout_s, choice.retries)
        except ConnectionError as error:
            text = f"{error}{_ending(errors)}"
            raise ValueError(f"environment: the MCP server {server!r} does not answer: {text}") from error
    if not schemas:
        raise ValueError(f"environment: the MCP server {server!r} has no tools")
    if len(schemas) > MAX_TOOLS:
        raise ValueError(
            f"environment: the MCP server {server!r} has more than {MAX_TOOLS} tools, which no prompt can list; "
            "offer fewer"
        )
    return type("McpEnvironment", (McpEnvironment,), {"choice": choice, "schemas": schemas})


async def _schemas(choice: EnvironmentMcp, errors: IO[str]) -> tuple[dict[str, Any], ...]:
    schemas, cursor = [], None
    async with client_of(choice, None, errors) as client:
        for _ in range(MAX_TOOLS):  # a server may name a further page for ever
            page = await client.list_tools(cursor=cursor)
            for tool in page.tools:
                schemas.append({"name": tool.name, "description": tool.description, "input_schema": tool.input_schema})
            if len(schemas) > MAX_TOOLS or not (cursor := page.next_cursor):
                return tuple(schemas)
    raise ValueError(f"it lists its tools in more than {MAX_TOOLS} pages")


def client_of(
    choice: EnvironmentMcp, columns: Mapping[str, Any] | None, errors: IO[str]
) -> AbstractAsyncContextManager[mcp.Client]:
    """A client that is connected when it is entered.

    Args:
        choice: The server.
        columns: Of the problem, for the words of the command; None for no problem.
        errors: Gets the error output of a server that is started.
    """
    if choice.command:
        program, *words = filled(choice.command, columns)
        return mcp.Client(stdio_client(mcp.StdioServerParameters(command=program, args=words), errors))
    if not choice.token_variable:
        return mcp.Client(choice.url)
    return _client_with_token(choice)


@asynccontextmanager
async def _client_with_token(choice: EnvironmentMcp):
    from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

    async with (
        create_mcp_http_client(headers=bearer(choice.token_variable)) as http,
        mcp.Client(streamable_http_client(choice.url, http_client=http)) as client,
    ):
        yield client
