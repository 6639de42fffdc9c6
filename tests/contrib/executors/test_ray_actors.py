"""A real Ray run with two actor processes."""

import contextlib
import os
import signal
import time

import pytest

from grpo_roc_jax.tools import CodeCall, ToolsConfig, make_executor
from grpo_roc_jax.tools.config import RayActors

pytestmark = pytest.mark.slow
ray = pytest.importorskip("ray", reason="the ray extra is not installed")
TOOL = "python_code_with_standard_io"


@pytest.fixture(scope="module")
def executor():
    ray.init(num_cpus=2, _node_ip_address="127.0.0.1", include_dashboard=False, log_to_driver=False)
    made = make_executor(ToolsConfig(executor=RayActors(2), workers=2, roots=1, preload=(), wall_s=2.0))
    made.start()
    yield made
    made.close()
    ray.shutdown()


def test_calls_spread_over_two_processes(executor) -> None:
    assert executor.capabilities.level in ("L2", "L3", "L4")
    calls = [CodeCall(f"c{i}", TOOL, {"code": f"print({i})", "input": ""}, None) for i in range(100)]
    results = executor.run(calls)
    assert [result.stdout for result in results] == [f"{i}\n" for i in range(100)]
    kinds = ["1/0", "while True: pass", "x =", "import os; os.abort()"]
    wrong = executor.run([CodeCall(f"k{i}", TOOL, {"code": code}, None) for i, code in enumerate(kinds)])
    assert [result.kind for result in wrong] == ["exception", "timeout", "syntax_error", "crash"]
    assert executor.stats()["tools/workers_alive"] >= 4


def test_sessions_stay_with_their_actor(executor) -> None:
    for name in ("s1", "s2", "s3"):
        executor.run([CodeCall(f"{name}a", "jupyter_code", {"code": f"x = {name!r}"}, name)])
    shown = [executor.run([CodeCall(f"{n}b", "jupyter_code", {"code": "x"}, n)])[0].echo for n in ("s1", "s2", "s3")]
    assert shown == ["'s1'", "'s2'", "'s3'"]
    executor.close_session("s1")


def test_a_loop_delays_nobody_and_can_be_cancelled(executor) -> None:
    """The quick call is the first to end, whatever the clock says; the cancelled loop never does."""
    for name, code in (("loop", "while True: pass"), ("quick", "print(1)")):
        executor.submit(CodeCall(name, TOOL, {"code": code}, None))
    ended = next(results for _ in range(60) if (results := executor.poll(1.0)))
    assert [(name, result.kind) for name, result in ended] == [("quick", "ok")]
    executor.cancel(["loop"])
    assert executor.poll(2.5) == []


def test_a_killed_actor_comes_back(executor) -> None:
    pids = ray.get([actor.__ray_call__.remote(lambda self: os.getpid()) for actor in executor.actors])
    for i in range(20):
        executor.submit(CodeCall(f"d{i}", TOOL, {"code": f"import time; time.sleep(0.1)\nprint({i})"}, None))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pids[0], signal.SIGKILL)
    results: dict = {}
    deadline = time.monotonic() + 60
    while len(results) < 20 and time.monotonic() < deadline:
        results.update(executor.poll(1.0))
    assert {name: result.stdout for name, result in results.items()} == {f"d{i}": f"{i}\n" for i in range(20)}
