"""Text games with Gymnasium's interface as environments, and one such game. Needs the extra `gymnasium`."""

import string
from typing import Any, ClassVar

import gymnasium
from gymnasium import spaces

from grpo_roc_jax.environments.environment import Environment, Observation, said_in
from grpo_roc_jax.types import Problem, Turn


class GymnasiumGame(Environment):
    """A game whose actions and observations are texts. Its observations are messages of a user, its rewards are given
    turn by turn. Derive a class that names the game."""

    game: ClassVar[str] = ""
    """Id under which the game is registered."""
    options: ClassVar[dict[str, Any]] = {}
    """Arguments of the game."""

    def reset(self, problem: Problem) -> str:
        self._game = gymnasium.make(self.game, **self.options)
        text, _ = self._game.reset(seed=whole_number(problem, "seed", self.seed % (1 << 32)))
        return text

    def step(self, turn: Turn) -> Observation:
        text, reward, terminated, truncated, _ = self._game.step(said_in(turn))
        return Observation(text, reward=float(reward), done=terminated or truncated)

    def close(self) -> None:
        if hasattr(self, "_game"):
            self._game.close()


def whole_number(problem: Problem, column: str, default: int) -> int:
    """A column of a problem that holds a whole number from 0 on, which files may hold as text or as a float.

    Raises:
        ValueError: It holds something else.
    """
    value = problem.column(column, default)
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        number = -1
    if number < 0 or (number != value and not isinstance(value, str)):
        raise ValueError(f"problem {problem.uid!r}: column {column} = {value!r}; must be a whole number of at least 0")
    return number


class CorridorGame(gymnasium.Env):
    """Rooms in a row; a lamp stands in one of them. Walk `east` or `west`, and `take` it for a reward of 1."""

    def __init__(self, rooms: int = 5):
        self.rooms = rooms
        self.action_space = spaces.Text(16, charset=string.printable)
        self.observation_space = spaces.Text(32, charset=string.printable)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict]:
        super().reset(seed=seed)
        self.room, self.lamp = (int(i) for i in self.np_random.choice(self.rooms, 2, replace=False))
        return self._seen(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        if action == "take" and self.room == self.lamp:
            return "taken", 1.0, True, False, {}
        move = {"east": 1, "west": -1}.get(action, 0)
        self.room = min(max(self.room + move, 0), self.rooms - 1)
        return self._seen(), 0.0, False, False, {}

    def _seen(self) -> str:
        if self.room == self.lamp:
            return "lamp here"
        return "lamp " + ("east" if self.lamp > self.room else "west")


gymnasium.register("grpo-roc/Corridor-v0", entry_point=CorridorGame, max_episode_steps=6)


class TextCorridor(GymnasiumGame):
    """`CorridorGame` as an environment."""

    game = "grpo-roc/Corridor-v0"
