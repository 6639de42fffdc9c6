"""A real Ray run with two actor processes."""

import contextlib
import os
import signal

import pytest

from grpo_roc_jax.tools.config import RayActors
from tests.helpers.arena import drain, notebook_at

pytestmark = pytest.mark.slow
ray = pytest.importorskip("ray", reason="the ray extra is not installed")


@pytest.fixture(scope="module")
def actors():
    ray.init(num_cpus=2, _node_ip_address="127.0.0.1", include_dashboard=False, log_to_driver=False)
    yield from notebook_at("best", executor=RayActors(2), workers=2, preload=(), wall_s=2.0)
    ray.shutdown()


def test_calls_spread_over_two_processes_and_sessions_stay_with_their_actor(actors) -> None:
    executor = actors.executor
    assert executor.capabilities.level in ("L2", "L3", "L4")
    results = executor.run([actors.call(None, f"print({i})") for i in range(100)])
    assert [result.stdout for result in results] == [f"{i}\n" for i in range(100)]
    kinds = ["1/0", "while True: pass", "x =", "import os; os.abort()"]
    wrong = executor.run([actors.call(None, code) for code in kinds])
    assert [result.kind for result in wrong] == ["exception", "timeout", "syntax_error", "crash"]
    for name in ("s1", "s2", "s3"):
        actors.cell(name, f"x = {name!r}")
    assert [actors.cells(name, "x")[0].echo for name in ("s1", "s2", "s3")] == ["'s1'", "'s2'", "'s3'"]


def test_a_killed_actor_comes_back(actors) -> None:
    pids = ray.get([actor.__ray_call__.remote(lambda self: os.getpid()) for actor in actors.executor.actors])
    calls = [actors.call(None, f"import time; time.sleep(0.1)\nprint({i})") for i in range(20)]
    for call in calls:
        actors.executor.submit(call)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pids[0], signal.SIGKILL)
    results = drain(actors.executor, 20)
    assert [results[call.id].stdout for call in calls] == [f"{i}\n" for i in range(20)]
