"""The multi-turn case of `bench_rollout.py` on this checkout and on an older commit, in alternation.

    python benchmarks/bench_older.py cf6670e --repeats 3     # the engine of 22 November 2026

The turn barrier of `bench_rollout.py` runs on the engine of its own checkout, so it becomes faster with the engine, and
their ratio can fall while both gain. This measures both engines and both barriers against each other. Each checkout has
a process of its own, which compiles first; then the four variants take turns. Prints one JSON line.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROWS, PROBLEMS, SAMPLES, BUDGET = 256, 8, 32, 944


def serve() -> None:
    """Runs a variant for each line of the input, with the modules of the working directory; answers with seconds."""
    sys.path.insert(0, os.getcwd())
    from benchmarks import bench_rollout as bench

    turns, observations, latency = bench.multi_turn_workload(ROWS, slow=True)
    texts = bench.prompts(PROBLEMS, 64)
    places = [(group, sample) for group in range(PROBLEMS) for sample in range(SAMPLES)]
    if hasattr(bench, "one_rollout"):
        requests = [bench.one_rollout(group, texts[group], BUDGET, sample) for group, sample in places]
    else:  # before requests had several samples
        named = [{"key": (0, group, sample), "prompt": texts[group], "group": group} for group, sample in places]
        requests = [bench.Request(**fields, budget=BUDGET) for fields in named]
    engine, sampler = bench.engine_for(bench.MANY, warm=True)
    variants = {
        "engine": lambda: engine.run(sampler, requests, bench.Script(turns, observations, latency)),
        "barrier": lambda: bench.barrier_reprefill(turns, observations, latency, requests, bench.MANY.slots),
    }
    for run in variants.values():
        run()
    print("ready", flush=True)
    for line in sys.stdin:
        started = time.perf_counter()
        variants[line.strip()]()
        print(time.perf_counter() - started, flush=True)


def start(checkout: Path) -> subprocess.Popen:
    """A process of a checkout that is ready to run its variants."""
    command = [sys.executable, str(Path(__file__).resolve()), "--serve"]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    process = subprocess.Popen(
        command, cwd=checkout, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    if process.stdout.readline().strip() != "ready":
        sys.exit(f"the benchmark of {checkout} ended with status {process.wait()}; its error is above")
    return process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", default="5b7a1ae", help="of the older checkout")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        return serve()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "clone", "-q", str(ROOT), folder], check=True)
        subprocess.run(["git", "checkout", "-q", arguments.commit], cwd=folder, check=True)
        processes = {"now": start(ROOT), "then": start(Path(folder))}
        seconds: dict[str, list[float]] = {}
        for _ in range(arguments.repeats):
            for name, process in processes.items():
                for variant in ("engine", "barrier"):
                    process.stdin.write(f"{variant}\n")
                    process.stdin.flush()
                    seconds.setdefault(f"{variant} {name}", []).append(float(process.stdout.readline()))
        for process in processes.values():
            process.stdin.close()
            process.wait()
    median = {name: statistics.median(values) for name, values in seconds.items()}
    report = {
        "bench": "rollout_older",
        "now": subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip(),
        "then": arguments.commit,
        "seconds": {name: [round(value, 3) for value in values] for name, values in seconds.items()},
        "slower_than_engine_now": {name: round(value / median["engine now"], 2) for name, value in median.items()},
        "barrier_then_over_engine_then": round(median["barrier then"] / median["engine then"], 2),
        "load": [round(load, 1) for load in os.getloadavg()],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
