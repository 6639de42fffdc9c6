"""Settings of environments: what answers the policy's turns, and where it runs."""

from dataclasses import field

from grpo_roc_jax.settings.options import AtLeast1, Axis, Count, Positive, kind


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


@kind("tools")
class ToolsAlone(EnvironmentKind):
    """The tools of `tools.enabled`; a turn without a call ends the rollout."""


@kind("class")
class EnvironmentClass(EnvironmentKind):
    """An environment of the user's for each rollout; its path alone is enough."""

    path: str = field()
    """`package.module:Class` or `file.py:Class`; a function that makes an environment will do."""
    host: Host = field(default_factory=HostThreads)
    """Where environments run."""
    timeout_s: Positive = 30.0
    """Seconds for a reset, a call of a tool, a step, and the reward. A late call of a tool ends the rollout with stop
    `deadline`, anything else that is late is an infrastructure failure."""
    retries: Count = 2
    """Further attempts after an infrastructure failure: at a reset with a new environment whatever it raised, later
    only after `ToolUnavailable` or `ConnectionError`."""
