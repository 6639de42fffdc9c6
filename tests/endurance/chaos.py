"""Does a run that is killed at any instant continue as if nothing had happened?

A small run whose policy calls the Python tool in nearly every rollout is killed again and again: the trainer at random
instants, inside chosen phases (through `process.points`) and while calls are in flight; its executor and workers while
calls are in flight. It is continued until its end, and then its metrics, trajectories and parameters are compared with
those of a run that nothing stopped. Modes: `tools`; `environment`, an episode of the user's with that tool; `stream`,
whose rollouts run on (`lag 0`); `lag`, the same with `lag 1`, where the clock decides which version draws a token, so
that only its accounts are checked; `plain`, a policy that never calls.

Every start that was to be killed is a JSON line of `--out`. `dead` counts the processes that the signal ended, so a run
that was over before is no kill; `in_flight` has the programs that ran at that moment. The last line of a run has the
comparison: `bytes`, `rounding` (the same tokens, rewards and selections; numbers within `CLOSE`), `accounts` or
`differs`. A second call goes on where the first one was stopped.

    python tests/endurance/chaos.py --mode tools --kills 60 --out benchmarks/results/chaos_calls.jsonl
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from grpo_roc_jax.config import read_config
from grpo_roc_jax.environments.environment import Environment, Observation
from grpo_roc_jax.model.transformer import init_params
from grpo_roc_jax.process.points import VARIABLE
from grpo_roc_jax.record.checkpoint import restore_params
from grpo_roc_jax.record.metrics import read_metrics
from grpo_roc_jax.record.trace import read_trace, trace_files
from grpo_roc_jax.run.components import resolve_model
from grpo_roc_jax.text.tokenizer import load_tokenizer

HERE = Path(__file__).resolve()
STEPS, PROBLEMS, SAMPLED = 6, 2, 8
SETTINGS = f"""
--steps={STEPS} --group.problems={PROBLEMS} --group.size=4 --data.eval_problems=4 --eval.every=2 --model.layers=1
--model.heads=2 --model.kv_heads=1 --rollout.slots=8 --rollout.max_prompt_tokens=24 --rollout.append_lengths 16
--optim.schedule=constant --optim.warmup_steps=0 --tools.workers=2 --tools.preload=[] --log.console=off
--log.traces=1 --reward.truncated=score --checkpoint.every=1 --resume=auto
""".split()
CALLING = """
--model.d_model=32 --model.head_dim=16 --model.d_ff=64 --rollout.max_response_tokens=120 --batch.row_length=192
--batch.rows=4 --sft.steps=150 --sft.lr=0.01 --sft.traces=16 --optim.lr=0.001
""".split()  # noqa: SIM905 (a command line reads better as one)
SILENT = f"""
--model.d_model=16 --model.head_dim=8 --model.d_ff=16 --rollout.max_response_tokens=16 --batch.row_length=40
--batch.rows=2 --sft.steps=3 --sft.traces=2 --optim.lr=0.01 --reward.functions {HERE}:even
""".split()
MODES = {
    "plain": SILENT,
    "tools": [*CALLING, "--reward.functions", f"{HERE}:paid"],
    "environment": [*CALLING, f"--environment={HERE}:Room", "--reward.functions=environment"],
    "stream": [*CALLING, "--reward.functions", f"{HERE}:paid", "--rollout.step_limit={kind: stream, lag: 0}"],
    "lag": [*CALLING, "--reward.functions", f"{HERE}:paid", "--rollout.step_limit={kind: stream, lag: 1}"],
}
AIMS = {
    "save": ["checkpoint.write", "checkpoint.commit", "checkpoint.promote", "checkpoint.discard", "record"],
    "restore": ["checkpoint.read"],
    "sft": ["sft"],
    "evaluation": ["evaluate"],
    "compile": ["compile"],
}
"""Phase -> the points at which it is killed."""
MOST = {"restore": 2, "compile": 1}
"""How often a point is surely reached in one start, where it is not 3 times."""
FIRST = ("calls", "sft", "random", "compile")
THEN = ("calls", "save", "random", "restore", "evaluation")
LAST = ("executor", "worker")
"""What the first, second and third start of a run are killed by, in turn. The third one goes on to its end."""
VICTIMS_A_START = 4
"""Executors or workers killed in one start, at most."""
PAUSE_S = (5.0, 8.0)
"""Between two of them: a call is run again once, and one that dies with both attempts costs its rollout."""
DEPTH = {"executor": 1, "worker": 2, "program": 4}
"""Generations below the trainer."""
CLOCK = ("time/", "compile/", "tools/", "rollout/tokens_per_s", "rollout/compilations", "rollout/slot_use")
CLOCK += ("rollout/cache_",)
"""Metrics that depend on the clock. How long calls take decides how many rows hold a part of the cache at a time."""
CLOSE = 1e-4
"""Largest difference that counts as rounding, relative and absolute."""


def even(problem: Any, trajectories: Any) -> list[float]:
    """Pays for an even first token, which a random policy meets about half of the time."""
    return [float(t.tokens[t.prompt_length] % 2 == 0) for t in trajectories]


def paid(problem: Any, trajectories: Any) -> list[float]:
    """Pays for an even number that a call printed, about half of the time."""
    return [_payment([result.stdout for result in t.results]) for t in trajectories]


def _payment(printed: list[str]) -> float:
    return float(any(text.strip()[-1:] in tuple("02468") for text in printed))


class Room(Environment):
    """An episode with the Python tool, which pays for an even number that a call printed."""

    uses = ("python_code_with_standard_io",)

    def reset(self, problem):
        self.printed = []

    def step(self, turn):
        self.printed += [result.stdout for result in turn.results]
        return None if turn.calls else Observation(done=True)

    def get_reward(self):
        return _payment(self.printed)


def write_traces(path: Path, mode: str) -> None:
    """Demonstrations: a call that takes 0.2 s and prints a digit, or for `plain` a text."""
    rng = random.Random(0)
    rows = [[{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]]
    if mode != "plain":
        rows.clear()
    for _ in range(64 if mode != "plain" else 0):
        question, digit = f"{rng.randint(2, 99)}*{rng.randint(2, 99)}", str(rng.randint(0, 9))
        arguments = {"code": f"import time;time.sleep(.2);print({digit})", "input": ""}
        called = {"name": "python_code_with_standard_io", "arguments": arguments}
        asked, answer = {"role": "user", "content": question}, {"role": "assistant", "content": f"\\boxed{{{digit}}}"}
        calling = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "a", "type": "function", "function": called}],
        }
        rows.append([asked, calling, {"role": "tool", "tool_call_id": "a", "content": digit}, answer])
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))


def launch(run_dir: Path, mode: str, fault: str = "") -> subprocess.Popen:
    traces = run_dir.parent / "talk.jsonl"
    words = [*SETTINGS, *MODES[mode], f"--run_dir={run_dir}", f"--data.trace_sources={traces}"]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent.parent.parent), VARIABLE: fault}
    command = [sys.executable, "-m", "grpo_roc_jax.train", *words]
    with open(run_dir.with_suffix(".log"), "ab") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def descendants(pid: int) -> dict[int, int]:
    """Those of a process that live -> generations below it."""
    parents: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        state, parent = state_and_parent(name)
        if state not in "ZX":
            parents.setdefault(parent, []).append(int(name))
    depths, waiting = {}, [(pid, 0)]
    while waiting:
        parent, depth = waiting.pop()
        more = parents.get(parent, [])
        depths |= dict.fromkeys(more, depth + 1)
        waiting += [(child, depth + 1) for child in more]
    return depths


def state_and_parent(pid: int | str) -> tuple[str, int]:
    """Letter of the state of a process and its parent; of one that is gone as of one that has ended."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return "X", 0
    return state, int(parent)


def alive(pid: int) -> bool:
    return state_and_parent(pid)[0] not in "ZX"


def ends(pids: list[int], seconds: float) -> bool:
    """Whether all of these processes end in time."""
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, pids))


def children(pid: int) -> list[int]:
    """All descendants of a process that live."""
    return list(descendants(pid))


def strike(process: subprocess.Popen, who: str, pause_s: float) -> tuple[int, int] | None:
    """Kills a process of a run while calls are in flight, after a pause.

    Returns how many died of it and how many programs ran; None if the run ended before."""
    time.sleep(pause_s)
    while process.poll() is None:
        depths = descendants(process.pid)
        programs = sum(depth >= DEPTH["program"] for depth in depths.values())
        busy = [pid for pid, depth in depths.items() if who == "calls" or depth == DEPTH[who]]
        if who == "worker":
            busy = [pid for pid in busy if max(descendants(pid).values(), default=0) >= DEPTH["program"] - 2]
        if programs and busy:
            victim = process.pid if who == "calls" else busy[0]
            if process.poll() is not None or not alive(victim):
                return None
            os.kill(victim, signal.SIGKILL)
            died = process.wait() == -signal.SIGKILL if who == "calls" else ends([victim], 5)
            return int(died), programs
        time.sleep(0.02)
    return None


def kill(run_dir: Path, mode: str, aim: str, rng: random.Random, usual_s: float) -> dict[str, Any]:
    """One start of a run that goes on, and its kills; what happened."""
    begun, begun_at = time.monotonic(), time.time()
    point = rng.choice(AIMS[aim]) if aim in AIMS else ""
    fault = f"{point}=kill@{rng.randint(1, MOST.get(aim, 3))}" if point else ""
    process = launch(run_dir, mode, fault)
    settings = run_dir / "config.yaml"  # written after the preparations, in which the executor runs its own program
    dead, in_flight, family = 0, [], set()
    try:
        if point:
            while process.poll() is None:
                family |= set(children(process.pid))
                time.sleep(0.05)
            dead = int(process.returncode == -signal.SIGKILL)
        elif aim == "random":
            try:
                process.wait(rng.uniform(0.0, 0.7 * usual_s))
            except subprocess.TimeoutExpired:
                family = set(children(process.pid))
                process.kill()
            dead = int(process.wait() == -signal.SIGKILL)
        else:
            while process.poll() is None and not (settings.exists() and settings.stat().st_mtime >= begun_at):
                time.sleep(0.02)
            for number in range(1 if aim == "calls" else VICTIMS_A_START):
                family |= set(children(process.pid))
                struck = strike(process, aim, rng.uniform(*PAUSE_S) if number else rng.uniform(0.0, 1.0))
                if struck is None:
                    break
                dead += struck[0]
                in_flight.append(struck[1])
        process.wait(600)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    ends(sorted(family), 20)
    happened = {"aim": aim, "fault": fault, "dead": dead, "in_flight": in_flight, "status": process.returncode}
    seconds = round(time.monotonic() - begun, 2)
    return happened | {"seconds": seconds, "survivors": sum(map(alive, family))}


def state_of(run_dir: Path, mode: str) -> dict[str, Any]:
    """What must be equal: metrics without clocks, trajectories, parameters; and the share of rollouts with a call."""
    rows = read_metrics(run_dir)
    metrics = [{name: value for name, value in row.items() if not name.startswith(CLOCK)} for row in rows]
    traces: dict[str, list] = {}
    logprobs: dict[str, list] = {}
    calls, versions = [], []
    for _, phase, step in trace_files(run_dir):
        for record in read_trace(run_dir, step, phase):
            trajectory = record.trajectory
            name, reward = f"{phase}/{step}", record.verdict.reward if record.verdict else None
            values = (record.problem.uid, trajectory.tokens.tolist(), record.kept, record.why, reward)
            traces.setdefault(name, []).append(values)
            logprobs.setdefault(name, []).append(trajectory.logprobs)
            calls.append(bool(trajectory.results))
            if phase == "step":
                versions.append((step, record.problem.uid, trajectory.versions[trajectory.policy_mask]))
    config = read_config("toy.yaml", *SETTINGS, *MODES[mode])
    model = resolve_model(config.model, load_tokenizer(config.text))
    step, params = restore_params(
        run_dir / "checkpoints", jax.eval_shape(lambda: init_params(jax.random.key(0), model))
    )
    parameters = [np.asarray(leaf) for leaf in jax.tree.leaves(params)]
    numbers = {"metrics": metrics, "logprobs": logprobs, "parameters": parameters}
    return {"step": step, "traces": traces, "calls": float(np.mean(calls)), "versions": versions, **numbers}


def same(a: Any, b: Any, close: float) -> bool:
    """Whether nested values are equal; numbers within `close`, relative and absolute, where 0 is to the byte."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[name], b[name], close) for name in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y, close) for x, y in zip(a, b, strict=True))
    if isinstance(a, np.ndarray | float):
        x, y = np.asarray(a), np.asarray(b)
        if not close or x.shape != y.shape:
            return x.shape == y.shape and x.dtype == y.dtype and x.tobytes() == y.tobytes()
        return np.allclose(x, y, rtol=close, atol=close, equal_nan=True)
    return a == b


def comparison(expected: dict[str, Any], reached: dict[str, Any], mode: str) -> dict[str, Any]:
    """How equal a run is to the one that nothing stopped, and what differs to the byte."""
    if mode == "lag":
        wrong = broken_accounts(reached)
        return {"equal": "differs" if wrong else "accounts", "differs": wrong}
    names = ("step", "traces", "logprobs", "metrics", "parameters")
    differs = [name for name in names if not same(expected[name], reached[name], 0.0)]
    rounding = all(same(expected[name], reached[name], CLOSE) for name in differs)
    return {"equal": "bytes" if not differs else "rounding" if rounding else "differs", "differs": differs}


def broken_accounts(reached: dict[str, Any]) -> list[str]:
    """What is wrong with a run whose rollouts run on: missing steps, groups that are not whole or come twice, tokens
    that are older than the lag."""
    wrong = [] if reached["step"] == STEPS else [f"ends after step {reached['step']}"]
    rows = [row for row in reached["metrics"] if "rollout/lag_max" in row]
    wrong += [f"rows of steps {[row['step'] for row in rows]}"] if len(rows) != STEPS else []
    groups: dict[tuple[int, str], int] = {}
    for step, uid, versions in reached["versions"]:
        groups[step, uid] = groups.get((step, uid), 0) + 1
        if len(versions) and not (step - 2 <= versions.min() <= versions.max() <= step - 1):
            wrong.append(f"step {step}: versions {versions.min()} to {versions.max()}")
    wrong += [f"{key}: {count} rollouts" for key, count in groups.items() if count != SAMPLED]
    if len({uid for _, uid in groups}) != len(groups) or len(groups) != STEPS * PROBLEMS:
        wrong.append(f"{len(groups)} groups of {len({uid for _, uid in groups})} problems")
    return wrong


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
    write_traces(folder / "talk.jsonl", mode)
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
    run = 1 + max((line["run"] for line in mine), default=-1)
    kills, wrong = sum(line["dead"] for line in mine), sum(line.get("equal") == "differs" for line in mine)
    for run in range(run, run + options.runs):  # noqa: B020 (goes on where the last call ended)
        if kills >= options.kills:
            break
        run_dir = folder / f"run_{run:04d}"
        shutil.rmtree(run_dir, ignore_errors=True)
        aims = [turn[run % len(turn)] for turn in (FIRST, THEN, ("random",) if mode == "plain" else LAST)]
        aims = [aim.replace("calls", "random") if mode == "plain" else aim for aim in aims]
        for number, aim in enumerate(aims):
            rng = random.Random(f"{options.seed} {mode} {run} {number}")
            line = {"mode": mode, "run": run} | kill(run_dir, mode, aim, rng, usual_s)
            kills += line["dead"]
            if line["status"] >= 0 or number == len(aims) - 1:
                line["end"] = line["status"] and launch(run_dir, mode).wait()
                if line["end"]:
                    line |= {"equal": "differs", "differs": [f"status {line['end']}"]}
                else:
                    reached = state_of(run_dir, mode)
                    line |= {"calls": round(reached["calls"], 3)} | comparison(expected, reached, mode)
                wrong += line["equal"] == "differs"
                if line["equal"] != "differs":
                    shutil.rmtree(run_dir)
            with open(options.out, "a") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)
            if "end" in line:
                break
    print(json.dumps({"mode": mode, "kills": kills, "runs that differ": wrong, "steps": STEPS}))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
