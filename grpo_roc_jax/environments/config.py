"""Settings of environments: what answers the policy's turns, and where it runs."""

import importlib
import inspect
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import field
from types import ModuleType
from typing import Any, Literal

from pydantic import ValidationError

from grpo_roc_jax.process.installing import install_command
from grpo_roc_jax.settings.callables import resolve
from grpo_roc_jax.settings.files import parse_yaml
from grpo_roc_jax.settings.options import AtLeast1, Axis, Count, Positive, fields_of, kind, settings
from grpo_roc_jax.types import Problem

Factories = Mapping[str, Callable[[], Any]]
"""Classes or functions that make environments, by the name in the column `environment` of a problem; under an empty
name, the one for all problems."""


def adapter(module: str, extra: str) -> ModuleType:
    """A module of the package that needs an extra, by its name without the package.

    Raises:
        ValueError: The extra is not installed.
    """
    try:
        return importlib.import_module(f"grpo_roc_jax.{module}")
    except ImportError as error:
        message = f"environment.kind = {extra} needs the extra {extra} ({error}); "
        raise ValueError(f"{message}{install_command(extra)}") from error


def bearer(variable: str) -> dict[str, str] | None:
    """The header with the token that an environment variable holds; None without a variable.

    Raises:
        ValueError: It is not set.
    """
    if variable and not os.environ.get(variable):
        raise ValueError(f"environment.token_variable: {variable} is not set")
    return {"Authorization": f"Bearer {os.environ[variable]}"} if variable else None


class Host(Axis, axis="environment.host"):
    """Where environments run."""


@kind("threads")
class HostThreads(Host):
    """In this process: coroutines on one event loop, other methods on threads. What blocks the loop holds up all."""


@kind("processes")
class HostProcesses(Host):
    """In processes of their own, with threads in each. One that crashes or hangs is replaced; the rollouts that it held
    are infrastructure failures."""

    workers: AtLeast1 = 4
    """Number of processes or actors."""


@kind("ray")
class HostActors(HostProcesses):
    """In Ray actors on any host of the cluster; needs the extra `ray`."""

    cpus: Positive = 1.0
    """Cores that Ray reserves for an actor."""


class EnvironmentKind(Axis, axis="environment"):
    """What answers the policy's turns."""

    other = "class"

    @property
    def agents(self) -> "Mapping[str, AgentKind]":
        """Agents that ask the policy over HTTP, by the name that `name_for` gives; empty without."""
        return {}

    def factories(self) -> Factories:
        """What makes environments; empty where tools alone answer the policy.

        Raises:
            ValueError: It cannot be found, or its server does not answer.
        """
        return {}

    def name_for(self, problem: Problem) -> str:
        """The name among `factories` of what answers the rollouts of a problem.

        Raises:
            ValueError: The problem does not name one that exists.
        """
        return ""


@kind("tools")
class ToolsAlone(EnvironmentKind):
    """The tools of `tools.enabled`; a turn without a call ends the rollout."""


@settings
class Hosted(EnvironmentKind):
    """An environment for each rollout."""

    host: Host = field(default_factory=HostThreads)
    """Where environments run."""
    timeout_s: Positive = 30.0
    """Seconds for a reset, a call of a tool, a step, and the reward. A late call of a tool ends the rollout with stop
    `deadline`, anything else that is late is an infrastructure failure."""
    retries: Count = 2
    """Further attempts after an infrastructure failure: at a reset with a new environment whatever it raised, later
    only after `ToolUnavailable` or `ConnectionError`."""

    @property
    def paths(self) -> Mapping[str, str]:
        """Paths of the user's classes, by name as in `factories`."""
        return {}

    def factories(self) -> Factories:
        try:
            return {name: resolve("environment.path", path) for name, path in self.paths.items()}
        except ValueError as error:
            if all(":" in path for path in self.paths.values()):
                raise
            raise ValueError(f"{error}; or choose one of the kinds {EnvironmentKind.names()}") from error

    def scores_failures(self, name: str) -> bool:
        """Whether a rollout of the environment of that name scores 0 if it fails on what the policy said."""
        return False


OnFailure = Literal["zero", "drop"]
"""What becomes of a rollout that failed on what the policy said: it scores 0, or leaves its group."""


@settings
class OwnEnvironments(Hosted):
    """Environments of the user's."""

    on_failure: OnFailure = "zero"
    """What becomes of a rollout whose `step` raises what reading a text raises, as `int(turn.text)` does: ValueError,
    LookupError, TypeError, AttributeError, ArithmeticError, AssertionError, SyntaxError, RecursionError, and the errors
    of `re`, `csv` and `struct`. `zero`: it ends with stop `failed` and scores 0, so the policy unlearns it. `drop`: it
    leaves its group as an infrastructure failure. Any other exception, and an attribute that the environment itself
    lacks, drops it."""

    def scores_failures(self, name: str) -> bool:
        return self.on_failure == "zero" and name in self.paths


@kind("class")
class EnvironmentClass(OwnEnvironments):
    """An environment of the user's; its path alone is enough."""

    path: str = field(kw_only=True)
    """`package.module:Class` or `file.py:Class`; a function that makes an environment will do."""

    @property
    def paths(self) -> Mapping[str, str]:
        return {"": self.path}


@kind("by_row")
class EnvironmentByRow(OwnEnvironments):
    """Several environments, among which the column `environment` of a problem chooses by name; without the column, its
    source."""

    classes: tuple[str, ...] = field(kw_only=True)
    """`name=path` of each, with a path as of kind `class`, or `name={kind: mcp, ...}` with another kind and its
    settings; host, deadline and retries are those of `by_row`, but an agent has its own. The policy is offered the
    tools of all classes; agents offer their own. `data.weights` says how often each source is drawn."""

    def __post_init__(self) -> None:
        if not all(name and path for name, _, path in self._parts) or not 0 < len(self.classes) == len(self._names):
            raise ValueError(f"environment.classes = {self.classes!r}; must be name=path for each class, names once")
        listens = {(agent.address, agent.port) for agent in self.agents.values()}  # what they hold is checked at once
        if len(listens) > 1:
            raise ValueError(
                f"environment.classes: agents with {len(listens)} addresses ({sorted(listens)}); they share one "
                "endpoint, so give all the same address and port"
            )

    @property
    def _parts(self) -> list[tuple[str, str, str]]:
        return [text.partition("=") for text in self.classes]

    @property
    def _names(self) -> list[str]:
        return list(dict.fromkeys(name for name, _, _ in self._parts))

    @property
    def paths(self) -> Mapping[str, str]:
        return {name: path for name, _, path in self._parts if not path.startswith("{")}

    @property
    def _others(self) -> "dict[str, Hosted | AgentKind]":
        """The environments of other kinds, by name."""
        return {name: self._read(name, text) for name, _, text in self._parts if text.startswith("{")}

    @property
    def agents(self) -> "Mapping[str, AgentKind]":
        return {name: other for name, other in self._others.items() if isinstance(other, AgentKind)}

    def _read(self, name: str, text: str) -> "Hosted | AgentKind":
        where = f"environment.classes {name}"
        given = parse_yaml(text, where)
        chosen = EnvironmentKind.kinds.get(str(given.get("kind")), Hosted)
        shared = (
            {setting: getattr(self, setting) for setting in fields_of(Hosted)} if issubclass(chosen, Hosted) else {}
        )
        if both := sorted(given.keys() & shared.keys()):
            raise ValueError(f"{where} sets {both[0]}, which is that of by_row; set it there")
        if not issubclass(chosen, Hosted | AgentKind) or issubclass(chosen, OwnEnvironments):
            raise ValueError(
                f"{where} is kind {chosen.kind}; must be agent, mcp, openenv, verifiers or harbor, or the path of a "
                "class"
            )
        try:
            return EnvironmentKind.read({**given, **shared})
        except ValueError as error:
            first = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
            raise ValueError(f"{where} = {text}: {first}") from None

    def factories(self) -> Factories:
        hosted = {name: choice for name, choice in self._others.items() if isinstance(choice, Hosted)}
        made = super().factories() | {name: choice.factories()[""] for name, choice in hosted.items()}
        return {name: made[name] for name in self._names if name in made}

    def name_for(self, problem: Problem) -> str:
        name = problem.column("environment", problem.source)
        if name not in self._names:
            shown = repr(name) if problem.column("environment") is not None else f"missing, and its source is {name!r}"
            known = ", ".join(self._names)
            raise ValueError(f"column environment of problem {problem.uid!r} is {shown}; must be one of {known}")
        return name


@kind("mcp")
class EnvironmentMcp(Hosted):
    """The tools of an MCP server, with a session for each rollout; needs the extra `mcp`. Without turns of its own or
    pay: a turn without a call ends the rollout."""

    command: tuple[str, ...] = ()
    """Words of the command that starts a server for each rollout, which speaks over its standard input and output.
    `{NAME}` stands for a column of the problem, `{uid}`, or `{seed}`, which is equal for the rollouts of a problem. The
    server that is asked for its tools at the start gets 0 for the seed and nothing for the others."""
    log: str = ""
    """File that servers of `command` append their error output to. Empty: it is thrown away, but for its end, which a
    failure shows."""
    url: str = ""
    """Address of a server that runs already, such as `http://127.0.0.1:8000/mcp`; instead of `command`."""
    token_variable: str = ""
    """Environment variable with the bearer token of `url`."""

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ValueError("environment.command and environment.url: one of them must be set for kind mcp")

    def factories(self) -> Factories:
        return {"": adapter("environments.mcp_tools", self.kind).mcp_class(self)}


@kind("openenv")
class EnvironmentOpenEnv(Hosted):
    """A server of OpenEnv, with a session for each rollout; needs the extra `openenv`."""

    url: str = field(kw_only=True)
    """Address of the server, such as `http://127.0.0.1:8000`."""
    action: str = ""
    """Field of the action that takes the text of a turn, such as `message`. Empty: the policy calls the server's tools,
    and a turn without a call ends the rollout."""
    observation: str = ""
    """Field of the observation that the policy reads; empty shows all fields as JSON."""
    token_variable: str = ""
    """Environment variable with the bearer token."""

    def factories(self) -> Factories:
        return {"": adapter("contrib.environments.openenv_server", self.kind).openenv_class(self)}


@settings
class AgentKind(EnvironmentKind):
    """An agent for each rollout that asks the policy over HTTP, as it would ask OpenAI's API; needs the extra
    `serve`."""

    host: Host = field(default_factory=HostThreads)
    """Where functions run."""
    timeout_s: Positive = 300.0
    """Seconds for a rollout; one that takes longer is ended with stop `deadline`."""
    trained: tuple[str, ...] = ()
    """Which of several agents train: names that their requests give as `model`, or in the header `X-Agent`. What the
    others sampled is context. Empty: all."""
    at_once: AtLeast1 = 64
    """Rollouts that run at a time."""
    on_failure: OnFailure = "zero"
    """What becomes of a rollout whose agent got answers and then failed, as one does that cannot read an answer.
    `zero`: it ends with stop `failed` and scores 0. `drop`: it leaves its group as an infrastructure failure, as every
    agent does that asked nothing, was killed by someone else, or got a fault of the server as its answer."""
    address: str = "127.0.0.1"
    """Address that the endpoint listens on, which agents are given. Another one than loopback lets agents of other
    machines in, with the token of the variable `GRPO_SERVE_TOKEN`; `0.0.0.0` listens on all addresses, and agents are
    given the name of the machine."""
    port: Count = 0
    """Port of the endpoint; 0 takes a free one."""

    @property
    def agents(self) -> "Mapping[str, AgentKind]":
        return {"": self}

    def rollout(self) -> "AgentFunction | None":
        """The function of a rollout; None if it is a program.

        Raises:
            ValueError: There is none, or it cannot be used.
        """
        return None


AgentFunction = Callable[[Mapping[str, Any], str, str], Awaitable[Any]]
"""(columns of the problem, base URL, API key) -> its numbers, as a program writes them, or None for none."""


@kind("agent")
class AgentCommand(AgentKind):
    """A program or a function for each rollout.

    A program finds the policy in `OPENAI_BASE_URL` and `OPENAI_API_KEY`, or `ANTHROPIC_BASE_URL` and
    `ANTHROPIC_API_KEY`, and the columns of the problem as JSON on its standard input. Its reward is what it writes to
    the file descriptor that `GRPO_REWARD_FD` names: a number, or an object with `reward`, `calls` (rewards of single
    calls) and further numbers by name. What it prints is not read, since the policy may have written it.
    """

    command: str = ""
    """Words of the program; `{prompt}` stands for that of the problem, `{base_url}` and `{api_key}` for what the
    variables hold."""
    function: str = ""
    """In place of a program: `async def rollout(row, base_url, api_key)` as `package.module:rollout` or
    `file.py:rollout`, called for each rollout with the columns of the problem. It returns its reward as a program
    writes it. What it imports is imported once for each thread, process or actor of `host`, so a rollout costs what its
    calls cost; whatever takes long must be awaited."""
    warm: bool = True
    """Whether a Python program (`python file.py ...` or `python -m module ...`) is forked, for each rollout, from a
    process of its interpreter that has imported the installed packages which it uses. A program that needs a process of
    its own from the start sets it to false."""

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.function):
            both = "both command and function" if self.command else "neither command nor function"
            raise ValueError(f"environment agent has {both}; name one: a program, or an `async def` of one's own")
        if self.command and not isinstance(self.host, HostThreads):
            raise ValueError(f"environment.host {self.host.kind} with a command, which is a process; leave host out")

    def rollout(self) -> AgentFunction | None:
        function = resolve("environment.function", self.function)
        if function is not None and not inspect.iscoroutinefunction(function):
            raise ValueError(
                f"environment.function = {self.function!r} is no coroutine; must be `async def rollout(row, base_url, "
                "api_key)`"
            )
        try:
            if function is not None:
                inspect.signature(function).bind({}, "", "")
        except TypeError as error:
            raise ValueError(
                f"environment.function = {self.function!r}: {error}; it is called with (row, base_url, api_key)"
            ) from None
        return function


@kind("verifiers")
class EnvironmentVerifiers(AgentKind):
    """A taskset of verifiers, whose harness asks the policy over HTTP; needs the extras `verifiers` and `serve`.
    `data.sources verifiers:TASKSET` has its problems."""

    taskset: str = field(kw_only=True)
    """Id of the taskset: an importable module, or one of those that come with verifiers. `ID?NAME=VALUE&NAME=VALUE` has
    settings of its own, as in `data.sources`."""
    harness: str = "null"
    """Id of the harness, which plays the episode and asks the policy for turns."""
    runtime: str = "subprocess"
    """Where the harness runs programs: `subprocess` on this host, `docker`, or another one that verifiers has."""
    settings: tuple[str, ...] = ()
    """Further settings of its environment, `NAME=VALUE` with dots in NAME, such as `agent.harness.max_turns=4`."""
    on_failure: OnFailure = "drop"
    """As of kind agent; an episode with errors is dropped unless `zero` says that it scores 0."""

    def rollout(self) -> AgentFunction:
        return adapter("contrib.environments.verifiers_tasks", self.kind).rollout_function(self)


@kind("harbor")
class EnvironmentHarbor(Hosted):
    """Task directories of Harbor: the policy has the tool `bash`, and the tests of the task pay at the end.
    `data.sources harbor:DIR` has their problems."""

    tasks: str = field(kw_only=True)
    """A directory with task directories below it, or one of them: `instruction.md`, `task.toml`, `tests/test.sh` and
    `environment/`."""
    container: Literal["sandbox", "docker"] = "sandbox"
    """Where commands and tests run: in the sandbox of this project, from level L3 on, with the programs of this machine
    and without network; or in a container of the task's own image, without network, by the command `docker`."""
    command_s: Positive = 30.0
    """Seconds for one command. `timeout_sec` of a task bounds all of them together, and its tests."""
    processes: AtLeast1 = 64
    """Processes of a rollout in the sandbox."""
    timeout_s: Positive = 900.0
    """Seconds for a reset, a command, and the tests, which a task may give less. A late one of these is as for the
    other kinds."""

    def __post_init__(self) -> None:
        if self.command_s > self.timeout_s:
            raise ValueError(f"environment.command_s = {self.command_s:g}; must be at most timeout_s")

    def factories(self) -> Factories:
        return {"": adapter("contrib.environments.harbor_tasks", self.kind).harbor_class(self)}
