"""`Environment`, the class that users derive, and what the library reads off such a class: its tools.

A class need not derive from it. One with `reset(**row)`, public typed methods and `get_reward()`, the form that TRL's
`environment_factory` takes, is used as it stands.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MethodType
from typing import Any, ClassVar, Literal

from grpo_roc_jax.tools.foreign import foreign_tool
from grpo_roc_jax.tools.registry import Job, Registry, Tool
from grpo_roc_jax.types import Problem, ToolResult, Turn


@dataclass(frozen=True)
class Observation:
    """What an environment answers to a turn."""

    text: str = ""
    """What the policy reads next, instead of the results of its calls if there are any."""
    role: Literal["user", "raw"] = "user"
    """`user` writes the text as a message of the user, with tags escaped. `raw` appends it as it is: nothing is put
    around it, and its tags become special tokens, so text from outside must be escaped first."""
    results: tuple[ToolResult, ...] = ()
    """Results of the calls that `answers_calls` left to the environment, in order."""
    reward: float = 0.0
    """Paid for the turn."""
    done: bool = False
    """Ends the episode."""


class Environment:
    """One episode: made for a rollout, `reset` with its problem, asked by `step` after each turn, closed at its end.

    Each method may be a coroutine function. Public methods besides those below are tools: their type hints and
    docstrings become schemas, and an exception that one raises is an error of the policy. `ToolUnavailable` and
    `ConnectionError` say that the infrastructure failed: the call is tried again, then the rollout leaves its group.
    """

    uses: ClassVar[tuple[str, ...]] = ()
    """Built-in tools that the episode offers besides its methods, such as `python_code_with_standard_io`."""
    schemas: ClassVar[Sequence[Mapping[str, Any]]] = ()
    """Tools besides its methods, as JSON schemas of another origin; `call_tool` runs their calls."""
    answers_calls: ClassVar[bool] = False
    """Calls are not run before `step`, which finds None in place of their results and returns these."""
    seed: int = 0
    """Seed for everything random; it is set before `reset`, and equal for all rollouts of a problem."""

    def reset(self, problem: Problem) -> str | None:
        """Begins the episode. Text that it returns is appended to the prompt."""

    def step(self, turn: Turn) -> Observation | str | None:
        """Answers a turn, whose calls have their results. A text alone is the next message of the user. None lets the
        episode go on with the results of the calls, and ends it where there are none."""

    async def call_tool(self, name: str, /, **arguments: Any) -> Any:
        """The result of a tool of `schemas`; fails as the methods that are tools do."""
        raise NotImplementedError

    def get_reward(self) -> float | Mapping[str, float | None] | None:
        """What is paid at the end, besides the rewards of turns; None leaves the rollout out of its group. A mapping
        has it as `reward`, and further numbers that `reward.functions` may pay by name."""
        return 0.0

    def close(self) -> None:
        """Releases what the episode holds; called once, whatever happened, unless the process that runs it is killed. A
        rollout that was interrupted is closed without being asked for its reward."""


OWN_METHODS = ("reset", "step", "get_reward", "close", "call_tool")


def said_in(turn: Turn) -> str:
    """What a turn says: its last line without what it thinks and without the marks around an answer."""
    text = re.sub(r"</?answer>", "", re.split(r"</reason>|</think>", turn.text)[-1]).strip()
    return text.splitlines()[-1].strip() if text else ""


def row_of(problem: Problem) -> dict[str, Any]:
    """The columns of a problem, as `reset(**row)` takes them."""
    return {**problem.extra, "prompt": problem.prompt, "answer": problem.answer}


def accepted(function: Callable[..., Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a row that a function has parameters for."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(row)
    return {parameter.name: row[parameter.name] for parameter in parameters if parameter.name in row}


@lru_cache
def method_tools(environment: type) -> Registry:
    """The tools of a class: its public functions, static ones included, but not those of the episode itself.

    Raises:
        ValueError: A method has no docstring, or a parameter without a usable type hint.
    """
    reserved = OWN_METHODS if issubclass(environment, Environment) else ("reset", "get_reward")
    methods = inspect.getmembers(environment, inspect.isfunction)
    tools = [_tool(environment, name) for name, _ in methods if name not in reserved and not name.startswith("_")]
    try:
        for tool in tools:
            tool.schema  # noqa: B018 (made here, so that what is wrong with it is said at the start)
    except ValueError as error:
        raise ValueError(f"environment {environment.__name__}: {error}; names of other methods begin with _") from error
    return merged_tools(
        [*tools, *(foreign_tool(schema, environment.call_tool) for schema in getattr(environment, "schemas", ()))]
    )


def merged_tools(tools: Iterable[Tool]) -> Registry:
    """The tools by name. Raises ValueError if two of one name have different schemas."""
    tools_by_name: dict[str, Tool] = {}
    for tool in tools:
        if tools_by_name.setdefault(tool.name, tool).schema != tool.schema:
            raise ValueError(f"environment: two tools are named {tool.name!r} and differ; rename one")
    return Registry(tools_by_name.values())


def environment_tools(classes: Iterable[type]) -> Registry:
    """The tools of all classes. Raises ValueError as `method_tools` and `merged_tools` do."""
    return merged_tools(tool for cls in classes for tool in method_tools(cls))


def classes_of(factories: Mapping[str, Callable[[], Any]]) -> tuple[type, ...]:
    """The classes of the environments that classes or functions make. Raises ValueError if a function raises."""
    try:
        return tuple(made if isinstance(made, type) else type(made()) for made in factories.values())
    except Exception as error:
        raise ValueError(f"environment: cannot be made: {type(error).__name__}: {error}") from error


def _tool(environment: type, name: str) -> Tool:
    function = getattr(environment, name)
    if not isinstance(inspect.getattr_static(environment, name), staticmethod):
        function = MethodType(function, environment)  # its first parameter is no argument of the call
    return Tool(function, lambda arguments, session: Job("", arguments=arguments))
