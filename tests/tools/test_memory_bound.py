"""What is said about the memory of all programs together."""

import pytest

from grpo_roc_jax.tools import ToolsConfig, memory_bound
from grpo_roc_jax.tools.config import PoolInCgroup, RayActors, SandboxFusion

SMALL = {"workers": 4, "sessions": 8, "memory_mb": 400, "scratch_mb": 88, "output_kill_mb": 8}


@pytest.mark.parametrize(
    ("executor", "settings", "host_gib", "words"),
    [
        # 400 + 88 + 3 x 8 MiB is half a GiB.
        ({}, {}, 16, "4 calls at a time may take 2.0 GiB of memory, and 8 sessions 4.0 GiB; this host has 16.0 GiB"),
        ({}, {}, 5, "8 sessions 4.0 GiB; this host has 5.0 GiB; tools.executor cgroup would limit the sum"),
        ({}, {"processes": 2}, 64, "4 calls at a time may take 4.0 GiB of memory, and 8 sessions 8.0 GiB"),
        ({"executor": PoolInCgroup(memory_mb=3072)}, {}, 2, "programs share 3.0 GiB of memory"),
        ({"executor": RayActors()}, {}, 16, "may take 2.0 GiB of memory in each actor"),
    ],
)
def test_the_sum_is_said_with_what_limits_it(executor: dict, settings: dict, host_gib: int, words: str) -> None:
    assert words in memory_bound.describe_memory(ToolsConfig(**executor, **SMALL | settings), host_gib << 30)


def test_nothing_is_said_of_a_service() -> None:
    assert memory_bound.describe_memory(ToolsConfig(executor=SandboxFusion())) == ""
    assert memory_bound.describe_call(ToolsConfig(executor=SandboxFusion())) == ""


def test_a_run_names_the_limit_of_a_call_and_no_sum() -> None:
    """`doctor` compares the sum with the host; the default recipe exceeds small hosts and does not complain of it."""
    assert memory_bound.describe_call(ToolsConfig(**SMALL)) == "a call may take 0.5 GiB of memory, 4 run at a time"
    shared = ToolsConfig(executor=PoolInCgroup(memory_mb=3072), **SMALL)
    assert memory_bound.describe_call(shared) == memory_bound.describe_memory(shared)
