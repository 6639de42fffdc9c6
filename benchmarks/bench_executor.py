"""How much faster and safer is the executor than a fresh interpreter per call, and what does isolation cost?

The ceiling is the fork of a warm interpreter: about 0.4 ms bare and 1.5 ms with numpy and sympy on this class of
machine. Everything is a ratio against two references measured in turns with it, so that a loaded machine slows all of
them alike: `fresh` is `python -I -c`, `judge` is code-judge's way, a fresh interpreter that sets limits in a preamble,
decodes the program from a template, splits off the last expression and prints a trailer with its duration. Targets are
those of the measured design (two cores, full isolation). Run it on a quiet machine:

    python benchmarks/bench_executor.py [--quick]
"""

import argparse
import base64
import itertools
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from grpo_roc_jax.sandbox import _probing
from grpo_roc_jax.sandbox.base import percentile
from grpo_roc_jax.tools import CodeCall, ToolsConfig, make_executor
from grpo_roc_jax.tools.executor import BaseExecutor

TOOL = "python_code_with_standard_io"
IN_FLIGHT = 2
ROWS = 32
"""Calls in flight in a rollout: one for each row that waits for its tool."""
PROGRAMS = {
    "light": "print(sum(range(1000)))",
    "import": "import numpy as np\nimport sympy as sp\nprint(np.arange(10).sum(), sp.Integer(3) + 4)",
    "solve": (
        "import sympy as sp\nx = sp.symbols('x')\nprint(sp.solve(x**2 - 5*x + 6, x), sp.integrate(x*sp.exp(x), x))"
    ),
}
CELLS = (
    "import numpy as np",
    "import sympy as sp\nx = sp.symbols('x')",
    "equation = x**2 - 5*x + 6\nequation",
    "sp.solve(equation, x)",
    "values = np.linspace(0, 1, 11)\nvalues.mean()",
    "sp.factor(x**4 - 1)",
    "table = [n * n for n in range(100)]\nsum(table)",
    "sp.diff(sp.sin(x) * x, x)",
    "def check(n):\n    return all(n % d for d in range(2, int(n**0.5) + 1))\n[n for n in range(2, 50) if check(n)]",
    "float(values.sum()), sp.Rational(1, 3) + sp.binomial(10, 4)",
)
TARGETS = {
    "calls light": (">=", 3.2), "calls import": (">=", 45.0), "calls solve": (">=", 11.0),
    "p99 light": ("<=", 0.5), "p99 import": ("<=", 0.04), "isolation cost": ("<=", 0.25),
    "session": (">=", 80.0), "good p99 ms": ("<=", 100.0), "good lost": ("<=", 0.0), "trainer ms": ("<=", 0.15),
}  # fmt: skip

JUDGE = """
import base64, contextlib, io, os, resource, signal, sys, time, ast, traceback
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, -1)); resource.setrlimit(resource.RLIMIT_CPU, (10, -1))
signal.signal(signal.SIGALRM, lambda *_: os._exit(124)); signal.alarm(10)
begin = time.time()
names = {{"__name__": "__main__"}}
def execute(text, silent):
    tree = ast.parse(text)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO() if silent else sys.stdout):
        exec(compile(tree, "<string>", "exec"), names)
        value = eval(compile(ast.Expression(last.value), "<string>", "eval"), names) if last else None
        if value is not None: print(repr(value))
for text in {history!r}: execute(base64.b64decode(text).decode(), True)
execute(base64.b64decode({code!r}).decode(), False)
sys.stdout.write("\\n--end--" + str(time.time() - begin))
"""


def encode(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def run_fresh(code: str, history: tuple[str, ...] = ()) -> None:
    subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, check=True)


def run_judge(code: str, history: tuple[str, ...] = ()) -> None:
    """A fresh interpreter with the program in a template, input and output through pipes."""
    text = JUDGE.format(code=encode(code), history=[encode(cell) for cell in history])
    process = subprocess.Popen(
        [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    out, err = process.communicate(b"", timeout=30)
    if process.returncode or b"--end--" not in out:
        raise RuntimeError(f"the reference failed: {err[-500:]!r}")


def threads(run: Callable[[str], None], code: str, count: int) -> list[float]:
    """Latencies of `count` calls, `IN_FLIGHT` at a time."""
    numbers, seconds = iter(range(count)), []
    lock = threading.Lock()

    def body() -> None:
        while True:
            with lock:
                if next(numbers, None) is None:
                    return
            started = time.perf_counter()
            run(code)
            seconds.append(time.perf_counter() - started)

    workers = [threading.Thread(target=body) for _ in range(IN_FLIGHT)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return seconds


_numbers = itertools.count()


def pooled(executor: BaseExecutor, code: str, count: int, in_flight: int = IN_FLIGHT) -> list[float]:
    """The same through the executor's non-blocking interface."""
    began: dict[str, float] = {}
    seconds: list[float] = []
    left = count

    def begin() -> None:
        nonlocal left
        left -= 1
        call = CodeCall(f"b{next(_numbers)}", TOOL, {"code": code}, None)
        began[call.id] = time.perf_counter()
        executor.submit(call)

    for _ in range(min(in_flight, count)):
        begin()
    while len(seconds) < count:
        for name, result in executor.poll(5.0):
            if not result.ok:
                raise RuntimeError(f"a call failed: {result}")
            seconds.append(time.perf_counter() - began.pop(name))
            if left:
                begin()
    return seconds


def block(run: Callable[[], list[float]]) -> tuple[float, list[float]]:
    """Wall seconds per call and latencies of one block."""
    started = time.perf_counter()
    seconds = run()
    return (time.perf_counter() - started) / len(seconds), seconds


def executor_at(level: str, **settings: object) -> BaseExecutor:
    defaults = {"level": level, "min_level": level, "workers": 2, "roots": 1}
    executor = make_executor(ToolsConfig(**{**defaults, **settings}))
    executor.start()
    for code in PROGRAMS.values():
        pooled(executor, code, 10)
    return executor


def throughput(best: str, rounds: int, scale: float) -> dict[str, dict[str, dict[str, float]]]:
    """Per program and method: calls per second, p50 and p99 in ms; methods take turns in every round."""
    weak, strong = executor_at("L0"), executor_at(best)
    sizes = {"light": (60, 400), "import": (6, 300), "solve": (6, 80)}
    table: dict[str, dict[str, dict[str, float]]] = {}
    for name, code in PROGRAMS.items():
        few, many = (max(4, int(size * scale)) for size in sizes[name])
        methods = {
            "fresh": lambda code=code, few=few: threads(run_fresh, code, few),
            "judge": lambda code=code, few=few: threads(run_judge, code, few),
            "L0": lambda code=code, many=many: pooled(weak, code, many),
            best: lambda code=code, many=many: pooled(strong, code, many),
        }
        blocks: dict[str, list[tuple[float, list[float]]]] = {method: [] for method in methods}
        for _ in range(rounds):
            for method, run in methods.items():
                blocks[method].append(block(run))
        table[name] = {}
        for method, measured in blocks.items():
            latencies = sorted(s for _, seconds in measured for s in seconds)
            rates = [1 / per_call for per_call, _ in measured]
            table[name][method] = {
                "calls_per_s": statistics.median(rates), "spread": max(rates) / min(rates),
                "p50_ms": 1000 * percentile(latencies, 50), "p99_ms": 1000 * percentile(latencies, 99),
            }  # fmt: skip
            print(
                f"{name:<7} {method:<6} " + "  ".join(f"{k} {v:8.2f}" for k, v in table[name][method].items()),
                flush=True,
            )
    weak.close()
    strong.close()
    return table


def trainer_cpu(best: str, count: int, in_flight: int) -> float:
    """Milliseconds of CPU time, user and system, per call in the trainer and all its threads.

    The more calls are in flight, the more results it reads at once. A rollout has one in flight for each waiting row.
    """
    executor = executor_at(best)
    before = time.process_time()
    pooled(executor, PROGRAMS["light"], count, in_flight)
    used = time.process_time() - before
    executor.close()
    return 1000 * used / count


def sessions(best: str, rounds: int) -> tuple[float, float]:
    """Milliseconds of ten cells: in live sessions (median), and replayed by fresh interpreters."""
    executor = executor_at(best)
    live = []
    for _ in range(rounds):
        session = f"s{next(_numbers)}"
        started = time.perf_counter()
        for cell in CELLS:
            [result] = executor.run([CodeCall(f"c{next(_numbers)}", "jupyter_code", {"code": cell}, session)])
            if not result.ok:
                raise RuntimeError(f"a cell failed: {result}")
        live.append(time.perf_counter() - started)
        executor.close_session(session)
        time.sleep(0.2)
    executor.close()
    started = time.perf_counter()
    for turn, cell in enumerate(CELLS):
        run_judge(cell, CELLS[:turn])
    return 1000 * statistics.median(live), 1000 * (time.perf_counter() - started)


def head_of_line(best: str, seconds: float) -> dict[str, float]:
    """Latency of good calls when 83 calls a second arrive, 6 % of which loop forever, with a limit of 2 s."""
    executor = executor_at(best, workers=32, roots=8, wall_s=2.0, cpu_s=2.0)
    limit = time.monotonic() + 60
    burn_in(executor, limit)
    began: dict[str, float] = {}
    latencies: list[float] = []
    lost = sent = 0
    start = time.perf_counter()
    while True:
        now = time.perf_counter() - start
        while sent < now * 83 and now < seconds:
            loop = sent % 50 in (7, 23, 41)
            name = f"{'loop' if loop else 'good'}{next(_numbers)}"
            code = "while True: pass" if loop else PROGRAMS["light"]
            began[name] = time.perf_counter()
            executor.submit(CodeCall(name, TOOL, {"code": code}, None))
            sent += 1
        for name, result in executor.poll(0.002):
            latency = time.perf_counter() - began.pop(name)
            if name.startswith("good"):
                latencies.append(latency)
                lost += not result.ok
        if now >= seconds and not began:
            break
    executor.close()
    latencies.sort()
    return {"p50_ms": 1000 * percentile(latencies, 50), "p99_ms": 1000 * percentile(latencies, 99), "lost": float(lost)}


def burn_in(executor: BaseExecutor, limit: float) -> None:
    """Run calls until the pool has grown to its full size."""
    while executor.stats()["tools/bare/workers_alive"] < 32 and time.monotonic() < limit:
        calls = [
            CodeCall(f"w{next(_numbers)}", TOOL, {"code": "import time; time.sleep(0.05)"}, None) for _ in range(64)
        ]
        executor.run(calls)


def cpu_per_call(level: str, code: str, count: int) -> float:
    """Milliseconds of CPU time per call in the executor, roots, workers and children; does not depend on other load."""

    def spent(calls: int) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        executor = executor_at(level)
        if calls:
            pooled(executor, code, calls)
        executor.close()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return 1000 * (spent(count) - spent(0)) / count


def first_result(best: str) -> float:
    """Seconds from the start of an executor to its first answer."""
    started = time.perf_counter()
    with make_executor(ToolsConfig(level=best, min_level=best, workers=2, roots=1)) as executor:
        executor.run([CodeCall("first", TOOL, {"code": PROGRAMS["import"]}, None)])
        return time.perf_counter() - started


def commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer calls and rounds")
    options = parser.parse_args()
    best = _probing.probe_host().available[-1]
    rounds, scale = (2, 0.3) if options.quick else (5, 1.0)
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, isolation {best}", flush=True)
    table = throughput(best, rounds, scale)
    ratios = {f"calls {name}": row[best]["calls_per_s"] / row["judge"]["calls_per_s"] for name, row in table.items()}
    for name in ("light", "import"):
        ratios[f"p99 {name}"] = table[name][best]["p99_ms"] / table[name]["judge"]["p99_ms"]
    costs = [row["L0"]["calls_per_s"] / row[best]["calls_per_s"] - 1 for row in table.values()]
    ratios["isolation cost"] = max(costs)
    live, replayed = sessions(best, rounds)
    print(f"ten cells: live {live:.1f} ms, replayed {replayed:.0f} ms", flush=True)
    ratios["session"] = replayed / live
    line = head_of_line(best, 6.0 if options.quick else 15.0)
    print("6 % endless loops: " + "  ".join(f"{name} {value:.1f}" for name, value in line.items()), flush=True)
    ratios |= {
        "good p99 ms": line["p99_ms"],
        "good lost": line["lost"],
        "trainer ms": trainer_cpu(best, int(1000 * scale), ROWS),
    }
    alone = trainer_cpu(best, int(1000 * scale), IN_FLIGHT)
    print(
        f"trainer ms with {ROWS} calls in flight {ratios['trainer ms']:.3f}, with {IN_FLIGHT} {alone:.3f}", flush=True
    )
    cpu = {level: cpu_per_call(level, PROGRAMS["light"], int(400 * scale)) for level in ("L0", best)}
    print("CPU ms per light call: " + "  ".join(f"{level} {value:.2f}" for level, value in cpu.items()), flush=True)
    first = first_result(best)
    print(f"first result after {first:.2f} s")
    for name, value in ratios.items():
        sign, target = TARGETS[name]
        good = value >= target if sign == ">=" else value <= target
        print(f"{name:<16} {value:9.3f}  target {sign} {target:<6} {'met' if good else 'MISSED'}")
    summary = {
        "bench": "executor", "isolation": best, "ratios": ratios, "table": table, "session_ms": live,
        "replay_ms": replayed, "head_of_line": line, "trainer_ms_at_two": alone, "cpu_ms": cpu, "first_s": first,
        "load": os.getloadavg()[0],
        "cores": os.cpu_count(), "machine": platform.machine(), "kernel": platform.release(),
        "python": platform.python_version(), "commit": commit(), "quick": options.quick,
    }  # fmt: skip
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
