"""The tools of an MCP server as an environment: a session for each rollout, over HTTP or with a server of its own.

Source: modelcontextprotocol.io, tools; the client is that of the package `mcp`, version 2.
"""

import json
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import lru_cache, partial
from typing import Any, ClassVar

import mcp

from grpo_roc_jax.environments.config import EnvironmentMcp, bearer
from grpo_roc_jax.environments.connection import Connection, outcome
from grpo_roc_jax.environments.environment import Environment
from grpo_roc_jax.tools.registry import ToolUnavailable
from grpo_roc_jax.types import Problem, ToolResult

INVALID_PARAMS = -32602
"""Code of JSON-RPC for arguments that a server refuses."""


class McpEnvironment(Environment):
    """A session with a server; the policy calls its tools."""

    choice: ClassVar[EnvironmentMcp]

    async def reset(self, problem: Problem) -> None:
        self._connection = Connection(client_of(self.choice))
        self._client = await self._connection.enter()

    async def call_tool(self, name: str, /, **arguments: Any) -> ToolResult:
        try:
            return tool_result(await self._client.call_tool(name, arguments))
        except mcp.MCPError as error:
            if error.code == INVALID_PARAMS:
                return ToolResult("exception", error_type="ToolError", error_message=error.message[:500])
            raise ToolUnavailable(f"MCP server: {error.message} ({error.code})") from error
        except Exception as error:  # the transport fails with the exceptions of several libraries
            raise ToolUnavailable(f"MCP server: {type(error).__name__}: {error}") from error

    async def close(self) -> None:
        if hasattr(self, "_connection"):
            await self._connection.leave()


def tool_result(result: Any) -> ToolResult:
    """What a server answered; parts other than text are named, since observations are text."""
    parts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
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
    try:
        schemas = outcome(partial(_schemas, choice), choice.timeout_s, choice.retries)
    except ConnectionError as error:
        raise ValueError(f"environment: the MCP server {server!r} does not answer: {error}") from error
    if not schemas:
        raise ValueError(f"environment: the MCP server {server!r} has no tools")
    return type("McpEnvironment", (McpEnvironment,), {"choice": choice, "schemas": schemas})


async def _schemas(choice: EnvironmentMcp) -> tuple[dict[str, Any], ...]:
    found, cursor = [], None
    async with client_of(choice) as client:
        while True:
            page = await client.list_tools(cursor=cursor)
            for tool in page.tools:
                found.append({"name": tool.name, "description": tool.description, "input_schema": tool.input_schema})
            if not (cursor := page.next_cursor):
                return tuple(found)


def client_of(choice: EnvironmentMcp) -> AbstractAsyncContextManager[mcp.Client]:
    """A client that is connected when it is entered."""
    if choice.command:
        return mcp.Client(mcp.StdioServerParameters(command=choice.command[0], args=list(choice.command[1:])))
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
