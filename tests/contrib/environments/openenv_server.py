"""Two environments of OpenEnv: `python openenv_server.py tools PORT` and `python openenv_server.py text PORT`."""

import os
import sys

import uvicorn
from fastmcp import FastMCP
from fastmcp.exceptions import ToolError
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Counter(MCPEnvironment):
    """Pays 1 for a total of 5, and ends there or above."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def __init__(self):
        server, self.total = FastMCP("counter"), 0
        for tool in (self.add, self.die, self.odd):
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

    def odd(self, how: str) -> str:
        """Is answered by what no client can read."""
        return how

    def reset(self, seed=None, episode_id=None, start=0, **row):
        self.total = start
        return Observation()

    def _step_impl(self, action, timeout_s=None, **row):
        raise NotImplementedError

    async def step_async(self, action, timeout_s=None, **row):
        seen = await super().step_async(action, timeout_s=timeout_s, **row)
        seen.reward, seen.done = float(self.total == 5), self.total >= 5
        how = getattr(action, "arguments", {}).get("how")
        return ODD.get(how, seen)


FIELDS = {
    "error is text": {"result": None, "error": "boom"},
    "error is empty": {"result": None, "error": {"x": 1}},
    "reward is text": {"result": "fine", "reward": "much"},
    "reward is a list": {"result": "fine", "reward": [1]},
}
ODD = {how: CallToolObservation.model_construct(tool_name="odd", metadata={}, **some) for how, some in FIELDS.items()}
ODD["no result"] = Observation()


class Guess(Action):
    number: int


class Hint(Observation):
    hint: str
    tries: int = 0


class Guessing(Environment):
    """Guess the seed's last digit."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def reset(self, seed=None, episode_id=None):
        self.secret, self.tries = seed % 10, 0
        return Hint(hint="a digit")

    def step(self, action, timeout_s=None):
        if action.number > 100:
            raise OverflowError("too large")
        if action.number == 55:
            return Hint.model_construct(hint="?", reward="much", done=False, metadata={})
        if action.number == 66:
            return Observation()
        self.tries += 1
        right = action.number == self.secret
        return Hint(hint="yes" if right else "no", tries=self.tries, reward=float(right), done=right)


if __name__ == "__main__":
    kinds = {"tools": (Counter, CallToolAction, CallToolObservation), "text": (Guessing, Guess, Hint)}
    app = create_fastapi_app(*kinds[sys.argv[1]], max_concurrent_envs=8)
    uvicorn.run(app, port=int(sys.argv[2]), log_level="error")
