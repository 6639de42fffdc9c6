"""An environment of OpenEnv whose tools are called: `python openenv_server.py PORT`."""

import os
import sys

import uvicorn
from fastmcp import FastMCP
from fastmcp.exceptions import ToolError
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State


class Counter(MCPEnvironment):
    """Pays 1 for a total of 5, and ends there or above."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def __init__(self):
        server, self.total = FastMCP("counter"), 0
        for tool in (self.add, self.die):
            server.tool(tool)
        super().__init__(server)

    def add(self, k: int) -> int:
        """Adds to the total."""
        if k < 0:
            raise ToolError("only upwards")
        self.total += k
        return self.total

    def die(self) -> None:
        """Ends the server."""
        os._exit(3)

    def reset(self, seed=None, episode_id=None, start=0, **row):
        self.total = start
        return Observation()

    def _step_impl(self, action, timeout_s=None, **row):
        raise NotImplementedError

    async def step_async(self, action, timeout_s=None, **row):
        seen = await super().step_async(action, timeout_s=timeout_s, **row)
        seen.reward, seen.done = float(self.total == 5), self.total >= 5
        return seen


if __name__ == "__main__":
    app = create_fastapi_app(Counter, CallToolAction, CallToolObservation, max_concurrent_envs=8)
    uvicorn.run(app, port=int(sys.argv[1]), log_level="error")
