"""Does a run that is killed at any instant continue as if nothing had happened?

A small run whose policy calls the Python tool in nearly every rollout is killed again and again: the trainer at random
instants, inside chosen phases (through `process.points`) and while calls are in flight; its executor and workers while
calls are in flight. It is continued until its end, and then its metrics, trajectories and parameters are compared with
those of a run that nothing stopped. Modes: `tools`; `environment`, an episode of the user's with that tool; `stream`,
whose rollouts run on (`lag 0`); `lag`, the same with `lag 1`, where the clock decides which version draws a token, so
that only its accounts are checked.

Every start that was to be killed is a JSON line of `--out`. `dead` counts the processes that the signal ended, so a run
that was over before is no kill; `in_flight` has the programs that ran at that moment. The last line of a run has the
comparison: `bytes`, `rounding` (the same tokens, rewards and selections; numbers within `CLOSE`), `accounts` or
`differs`. A second call goes on where the first one was stopped.

    python tests/endurance/chaos.py --mode tools --kills 60 --out benchmarks/results/chaos_calls.jsonl
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import grpo_roc_jax as g
from grpo_roc_jax.process.points import VARIABLE
from grpo_roc_jax.record.metrics import read_metrics
from grpo_roc_jax.record.trace import read_trace, trace_files

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parent.parent.parent))
from tests.helpers.arena import alive, descendants, stat_of, wait_until  # noqa: E402 (found from there)
from tests.test_train import params_of  # noqa: E402

STEPS, PROBLEMS, SAMPLED = 6, 2, 8
SETTINGS = f"""
--steps={STEPS} --group.problems={PROBLEMS} --group.size=4 --data.eval_problems=4 --eval.every=2 --model.layers=1
--model.heads=2 --model.kv_heads=1 --rollout.slots=8 --rollout.max_prompt_tokens=24 --rollout.append_lengths 16
--optim.schedule=constant --optim.warmup_steps=0 --tools.workers=2 --tools.preload=[] --log.console=off
--log.traces=1 --reward.truncated=score --checkpoint.every=1 --resume=auto --model.d_model=32 --model.head_dim=16
--model.d_ff=64 --rollout.max_response_tokens=120 --batch.row_length=192 --batch.rows=4 --sft.steps=150 --sft.lr=0.01
--sft.traces=16 --optim.lr=0.001
""".split()
PAID = ["--reward.functions", f"{HERE}:paid"]
MODES = {"tools": PAID, "environment": [f"--environment={HERE}:Room", "--reward.functions=environment"]}
MODES |= {name: [*PAID, f"--rollout.step_limit={{kind: stream, lag: {i}}}"] for i, name in enumerate(("stream", "lag"))}
SAVING = [f"checkpoint.{point}" for point in ("write", "commit", "promote", "discard")]
AIMS = {"save": [*SAVING, "record"], "restore": ["checkpoint.read"], "evaluation": ["evaluate"]}
AIMS |= {point: [point] for point in ("sft", "compile")}
"""Phase -> the points at which it is killed."""
MOST = {"restore": 2, "compile": 1}
"""How often a point is surely reached in one start, where it is not 3 times."""
LAST = ("executor", "worker")
TURNS = (("calls", "sft", "random", "compile"), ("calls", "save", "random", "restore", "evaluation"), LAST)
"""What the first, second and third start of a run are killed by, in turn. The third one goes on to its end."""
VICTIMS, PAUSE_S = 4, (5.0, 8.0)
"""Executors or workers killed in one start, at most, and the time between two of them: a call is run again once, and
one that dies with both attempts costs its rollout."""
DEPTH = {"executor": 1, "worker": 2, "program": 4}
"""Generations below the trainer."""
CLOCK = ("time/", "compile/", "tools/", "rollout/tokens_per_s", "rollout/compilations", "rollout/slot_use")
CLOCK += ("rollout/cache_",)
"""Metrics that depend on the clock. How long calls take decides how many rows hold a part of the cache at a time."""
CLOSE = 1e-4
"""Largest difference that counts as rounding, relative and absolute."""


def paid(problem: Any, trajectories: Any) -> list[float]:
    """Pays for an even number that a call printed, about half of the time."""
    return [even_number(t.results) for t in trajectories]


def even_number(results: Any) -> float:
    return float(any(result.stdout.strip()[-1:] in tuple("02468") for result in results))


class Room(g.Environment):
    """An episode with the Python tool, which pays for an even number that a call printed."""

    uses = ("python_code_with_standard_io",)

    def reset(self, problem):
        self.results = []

    def step(self, turn):
        self.results += turn.results
        return None if turn.calls else g.Observation(done=True)

    def get_reward(self):
        return even_number(self.results)


def write_traces(path: Path) -> None:
    """Demonstrations: a call that takes 0.2 s and prints a digit."""
    rng, rows = random.Random(0), []
    for _ in range(64):
        question, digit = f"{rng.randint(2, 99)}*{rng.randint(2, 99)}", str(rng.randint(0, 9))
        arguments = {"code": f"import time;time.sleep(.2);print({digit})", "input": ""}
        called = {"name": "python_code_with_standard_io", "arguments": arguments}
        calling = {"content": "", "tool_calls": [{"id": "a", "type": "function", "function": called}]}
        asked, answer = {"role": "user", "content": question}, {"role": "assistant", "content": f"\\boxed{{{digit}}}"}
        told = {"role": "tool", "tool_call_id": "a", "content": digit}
        rows.append({"messages": [asked, {"role": "assistant", **calling}, told, answer]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def launch(run_dir: Path, mode: str, fault: str = "") -> subprocess.Popen:
    traces = run_dir.parent / "talk.jsonl"
    words = [*SETTINGS, *MODES[mode], f"--run_dir={run_dir}", f"--data.trace_sources={traces}"]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent.parent.parent), VARIABLE: fault}
    command = [sys.executable, "-m", "grpo_roc_jax.train", *words]
    with open(run_dir.with_suffix(".log"), "ab") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def depth_of(pid: int, ancestor: int) -> int:
    """Generations between two processes; 0 of one that has ended."""
    depth = 0
    while pid != ancestor and alive(pid):
        pid, depth = int(stat_of(pid)[1]), depth + 1
    return depth if pid == ancestor else 0


def gone(*pids: int) -> bool:
    return not any(map(alive, pids))


def strike(process: subprocess.Popen, who: str, pause_s: float) -> tuple[int, int] | None:
    """Kills a process of a run while calls are in flight, after a pause: how many died of it and how many programs ran;
    None if the run ended before."""
    time.sleep(pause_s)
    while process.poll() is None:
        depths = {pid: depth_of(pid, process.pid) for pid in descendants(process.pid)}
        programs = sum(depth >= DEPTH["program"] for depth in depths.values())
        busy = [pid for pid, depth in depths.items() if depth == DEPTH[who]] if who in DEPTH else [process.pid]
        if who == "worker":
            busy = [pid for pid in busy if any(depth_of(child, pid) >= 2 for child in descendants(pid))]
        if programs and busy:
            victim, *_ = busy
            if process.poll() is not None or not alive(victim):
                return None
            os.kill(victim, signal.SIGKILL)
            died = process.wait() == -signal.SIGKILL if who == "calls" else wait_until(partial(gone, victim), 5)
            return int(died), programs
        time.sleep(0.02)
    return None


def kill(run_dir: Path, mode: str, aim: str, rng: random.Random, usual_s: float) -> dict[str, Any]:
    """One start of a run that goes on, and its kills; what happened."""
    begun = time.time()
    point = rng.choice(AIMS[aim]) if aim in AIMS else ""
    fault = f"{point}=kill@{rng.randint(1, MOST.get(aim, 3))}" if point else ""
    process = launch(run_dir, mode, fault)
    settings = run_dir / "config.yaml"  # written after the preparations, in which the executor runs its own program
    struck, family = [], set()
    try:
        if point:
            while process.poll() is None:
                family |= descendants(process.pid)
                time.sleep(0.05)
        elif aim == "random":
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(rng.uniform(0.0, 0.7 * usual_s))
            family = descendants(process.pid)
            process.kill()
        else:
            while process.poll() is None and not (settings.exists() and settings.stat().st_mtime >= begun):
                time.sleep(0.02)
            for number in range(1 if aim == "calls" else VICTIMS):
                family |= descendants(process.pid)
                struck.append(strike(process, aim, rng.uniform(*PAUSE_S) if number else rng.uniform(0.0, 1.0)))
                if struck[-1] is None:
                    break
        process.wait(600)
    finally:
        process.kill()
        process.wait()
    wait_until(partial(gone, *family), 20)
    hits = [hit for hit in struck if hit is not None]
    dead = sum(died for died, _ in hits) if aim in LAST else int(process.returncode == -signal.SIGKILL)
    happened = {"aim": aim, "fault": fault, "dead": dead, "in_flight": [programs for _, programs in hits]}
    ending = {"status": process.returncode, "seconds": round(time.time() - begun, 2)}
    return happened | ending | {"survivors": sum(map(alive, family))}


def state_of(run_dir: Path, mode: str) -> dict[str, Any]:
    """What must be equal: metrics without clocks, trajectories, parameters; and the share of rollouts with a call."""
    rows = read_metrics(run_dir)
    metrics = [{name: value for name, value in row.items() if not name.startswith(CLOCK)} for row in rows]
    seen = {"traces": [], "logprobs": [], "calls": [], "versions": []}
    for _, phase, step in trace_files(run_dir):
        for record in read_trace(run_dir, step, phase):
            row, uid, reward = record.trajectory, record.problem.uid, record.verdict and record.verdict.reward
            seen["traces"].append((phase, step, uid, row.tokens, record.kept, record.why, reward))
            seen["logprobs"].append(row.logprobs)
            seen["calls"].append(bool(row.results))
            seen["versions"] += [(step, uid, row.versions[row.policy_mask])] if phase == "step" else []
    step, parameters = params_of(run_dir, g.read_config("toy.yaml", *SETTINGS, *MODES[mode]))
    return seen | {"step": step, "metrics": metrics, "parameters": parameters}


def same(a: Any, b: Any, close: float) -> bool:
    """Whether nested values are equal; numbers within `close`, relative and absolute, where 0 is to the byte."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name], close) for name in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y, close) for x, y in zip(a, b, strict=True))
    if not isinstance(a, np.ndarray | float):
        return a == b
    x, y = np.asarray(a), np.asarray(b)
    if close and x.shape == y.shape:
        return np.allclose(x, y, rtol=close, atol=close, equal_nan=True)
    return x.shape == y.shape and x.dtype == y.dtype and x.tobytes() == y.tobytes()


def comparison(expected: dict[str, Any], reached: dict[str, Any], mode: str) -> dict[str, Any]:
    """How equal a run is to the one that nothing stopped, and what differs to the byte."""
    if mode == "lag":
        wrong = broken_accounts(reached)
        return {"equal": "differs" if wrong else "accounts", "differs": wrong}
    names = ("step", "traces", "logprobs", "metrics", "parameters")
    differs = [name for name in names if not same(expected[name], reached[name], 0.0)]
    rounding = "rounding" if all(same(expected[name], reached[name], CLOSE) for name in differs) else "differs"
    return {"equal": rounding if differs else "bytes", "differs": differs}


def broken_accounts(reached: dict[str, Any]) -> list[str]:
    """What is wrong with a run whose rollouts run on: missing steps, groups that are not whole or come twice, tokens
    that are older than the lag."""
    wrong = [] if reached["step"] == STEPS else [f"ends after step {reached['step']}"]
    rows = [row["step"] for row in reached["metrics"] if "rollout/lag_max" in row]
    wrong += [f"rows of steps {rows}"] if len(rows) != STEPS else []
    for step, _, versions in reached["versions"]:
        if len(versions) and not (step - 2 <= versions.min() <= versions.max() <= step - 1):
            wrong.append(f"step {step}: versions {versions.min()} to {versions.max()}")
    groups = Counter((step, uid) for step, uid, _ in reached["versions"])
    wrong += [f"{key}: {count} rollouts" for key, count in groups.items() if count != SAMPLED]
    problems = {uid for _, uid in groups}
    return wrong + [f"{len(groups)} groups"] * (not len(problems) == len(groups) == STEPS * PROBLEMS)


def ended(run_dir: Path, mode: str, status: int, expected: dict[str, Any]) -> dict[str, Any]:
    """Continues a run to its end, and compares it; one that does not differ is removed."""
    if end := status and launch(run_dir, mode).wait():
        return {"end": end, "equal": "differs", "differs": [f"status {end}"]}
    reached = state_of(run_dir, mode)
    compared = comparison(expected, reached, mode)
    if compared["equal"] != "differs":
        shutil.rmtree(run_dir)
    return {"end": end, "calls": round(float(np.mean(reached["calls"])), 3)} | compared


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=sorted(MODES), default="tools")
    parser.add_argument("--kills", type=int, default=60, help="of a mode, those in --out included")
    parser.add_argument("--runs", type=int, default=1000, help="most runs of this call")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/chaos"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    mode, folder = options.mode, options.folder / options.mode
    folder.mkdir(parents=True, exist_ok=True)
    write_traces(folder / "talk.jsonl")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(options.folder / "programs"))
    reference, clock = folder / "reference", folder / "seconds"
    if not clock.exists():
        for _ in range(2):  # the second time with compiled programs
            shutil.rmtree(reference, ignore_errors=True)
            begun = time.monotonic()
            if launch(reference, mode).wait():
                raise SystemExit(f"the reference fails; see {reference}.log")
        clock.write_text(str(time.monotonic() - begun))
    usual_s, expected = float(clock.read_text()), state_of(reference, mode)
    lines = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    mine = [line for line in lines if line["mode"] == mode]
    first = 1 + max((line["run"] for line in mine), default=-1)
    for run in range(first, first + options.runs):
        if sum(line["dead"] for line in mine) >= options.kills:
            break
        run_dir = folder / f"run_{run:04d}"
        shutil.rmtree(run_dir, ignore_errors=True)
        aims = [turn[run % len(turn)] for turn in TURNS]
        for number, aim in enumerate(aims):
            rng = random.Random(f"{options.seed} {mode} {run} {number}")
            line = {"mode": mode, "run": run} | kill(run_dir, mode, aim, rng, usual_s)
            over = line["status"] >= 0 or number == len(aims) - 1
            if over:
                line |= ended(run_dir, mode, line["status"], expected)
            mine.append(line)
            with open(options.out, "a") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)
            if over:
                break
    kills, wrong = sum(line["dead"] for line in mine), sum(line.get("equal") == "differs" for line in mine)
    print(json.dumps({"mode": mode, "kills": kills, "runs that differ": wrong, "steps": STEPS}))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
