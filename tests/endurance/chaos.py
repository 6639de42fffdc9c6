"""Does a run that is killed at any instant continue as if nothing had happened?

A small run is killed again and again, at random instants and inside chosen phases (through `settings.points`), its
executor and workers too, and continued until its end. Then its metrics, trajectories and parameters are compared with
those of a run that nothing stopped. Every kill is a JSON line of `--out`; a second call goes on where the first one was
stopped.

    python tests/endurance/chaos.py --kills 250 --folder /tmp/chaos --out benchmarks/results/chaos.jsonl
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
from grpo_roc_jax.model.transformer import init_params
from grpo_roc_jax.record.checkpoint import restore_params
from grpo_roc_jax.record.metrics import read_metrics
from grpo_roc_jax.record.trace import read_trace, trace_files
from grpo_roc_jax.run.components import resolve_model
from grpo_roc_jax.settings.points import VARIABLE
from grpo_roc_jax.text.tokenizer import load_tokenizer

HERE = Path(__file__).resolve()
STEPS = 6
SETTINGS = f"""
--steps={STEPS} --group.problems=2 --group.size=4 --data.eval_problems=4 --eval.every=2 --model.d_model=16
--model.layers=1 --model.heads=2 --model.kv_heads=1 --model.head_dim=8 --model.d_ff=16 --rollout.slots=8
--rollout.max_prompt_tokens=24 --rollout.max_response_tokens=16 --rollout.append_lengths 16 --batch.row_length=40
--batch.rows=2 --sft.steps=3 --sft.traces=2 --optim.schedule=constant --optim.lr=0.01
--optim.warmup_steps=0 --tools.workers=2 --tools.preload=[] --log.console=off --reward.truncated=score
--checkpoint.every=1 --resume=auto --reward.functions {HERE}:even
""".split()
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
ORDER = ("random", "save", "random", "restore", "random", "sft", "random", "evaluation", "random", "compile")
ORDER += ("random",) * 8 + ("executor", "worker") + ("random",) * 20
CLOCK = ("time/", "compile/", "tools/", "rollout/tokens_per_s", "rollout/compilations", "rollout/slot_use")
KILLS_A_RUN = 4


def even(problem: Any, trajectories: Any) -> list[float]:
    """Pays for an even first token, which a random policy meets about half of the time."""
    return [float(t.tokens[t.prompt_length] % 2 == 0) for t in trajectories]


def launch(run_dir: Path, fault: str = "") -> subprocess.Popen:
    traces = run_dir.parent / "talk.jsonl"
    talk = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    traces.write_text(json.dumps({"messages": talk}) + "\n")
    words = [*SETTINGS, f"--run_dir={run_dir}", f"--data.trace_sources={traces}"]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent.parent.parent), VARIABLE: fault}
    command = [sys.executable, "-m", "grpo_roc_jax.train", *words]
    with open(run_dir.with_suffix(".log"), "ab") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def children(pid: int) -> list[int]:
    """All descendants of a process that live."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state not in "ZX":
            parents.setdefault(int(parent), []).append(int(path.parent.name))
    found, waiting = [], [pid]
    while waiting:
        more = parents.get(waiting.pop(), [])
        found += more
        waiting += more
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def kill(run_dir: Path, aim: str, rng: random.Random, usual_s: float) -> dict[str, Any]:
    """One kill of a run that goes on; what happened."""
    begun = time.monotonic()
    point = rng.choice(AIMS[aim]) if aim in AIMS else ""
    fault = f"{point}=kill@{rng.randint(1, MOST.get(aim, 3))}" if point else ""
    process = launch(run_dir, fault)
    found: dict[str, Any] = {"aim": aim, "fault": fault}
    family: list[int] = []
    try:
        if point:
            while process.poll() is None:
                family = children(process.pid) or family
                time.sleep(0.05)
        else:
            wait_s = rng.uniform(0.0, 0.6 * usual_s)  # a run that goes on is shorter
            try:
                process.wait(wait_s)
            except subprocess.TimeoutExpired:
                family = children(process.pid)
                tools = sorted(family)
                victim = {"random": process.pid, "executor": tools[:1], "worker": tools[-1:]}[aim]
                for pid in [victim] if isinstance(victim, int) else victim:
                    os.kill(pid, signal.SIGKILL)
            if aim != "random":
                process.wait(600)
        process.wait(600)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    deadline = time.monotonic() + 20
    while any(map(alive, family)) and time.monotonic() < deadline:
        time.sleep(0.1)
    found |= {"status": process.returncode, "seconds": round(time.monotonic() - begun, 2)}
    return found | {"survivors": sum(map(alive, family))}


def state_of(run_dir: Path) -> dict[str, Any]:
    """What must be equal: metrics without clocks, trajectories, a digest of the parameters."""
    rows = [
        {name: repr(value) for name, value in row.items() if not name.startswith(CLOCK)}
        for row in read_metrics(run_dir)
    ]
    traces = {}
    for _, step, found in trace_files(run_dir / "trajectories"):
        for record in read_trace(run_dir, step, found):
            trajectory = record.trajectory
            values = (trajectory.tokens.tolist(), trajectory.logprobs.tobytes().hex(), record.kept, record.why)
            traces.setdefault(f"{found}/{step}", []).append(
                (*values, record.verdict.reward if record.verdict else None)
            )
    config = read_config("toy.yaml", *SETTINGS)
    model = resolve_model(config.model, load_tokenizer(config.text))
    like = jax.eval_shape(lambda: init_params(jax.random.key(0), model))
    step, params = restore_params(run_dir / "checkpoints", like)
    return {
        "metrics": rows,
        "traces": traces,
        "step": step,
        "parameters": [np.asarray(leaf).tobytes().hex() for leaf in jax.tree.leaves(params)],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=250)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/chaos"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(asked.folder / "programs"))
    reference = asked.folder / "reference"
    if not (reference / "summary.json").exists():
        shutil.rmtree(reference, ignore_errors=True)
        if launch(reference).wait():
            raise SystemExit(f"the reference fails; see {reference}.log")
    begun = time.monotonic()
    shutil.rmtree(asked.folder / "usual", ignore_errors=True)
    launch(asked.folder / "usual").wait()
    usual_s = time.monotonic() - begun
    expected = state_of(reference)
    lines = asked.out.read_text().splitlines() if asked.out.exists() else []
    done = [json.loads(line) for line in lines]
    number, wrong = len(done), sum(not line.get("equal", True) for line in done)
    while number < asked.kills:
        run = number // KILLS_A_RUN
        run_dir = asked.folder / f"run_{run:04d}"
        if number % KILLS_A_RUN == 0:
            shutil.rmtree(run_dir, ignore_errors=True)
        aim = ORDER[number % len(ORDER)]
        if aim in ("sft", "compile") and number % KILLS_A_RUN:
            shutil.rmtree(run_dir, ignore_errors=True)  # phases of a run that begins
        line = {"kill": number, "run": run} | kill(run_dir, aim, random.Random(f"{asked.seed} {number}"), usual_s)
        number += 1
        if number % KILLS_A_RUN == 0 or number == asked.kills:
            line["end"] = launch(run_dir).wait()
            found = state_of(run_dir)
            line["differs"] = [name for name in expected if found[name] != expected[name]]
            line["equal"] = not line["differs"] and line["end"] == 0
            wrong += not line["equal"]
            if line["equal"]:
                shutil.rmtree(run_dir)
        with open(asked.out, "a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)
    print(json.dumps({"kills": number, "runs that differ": wrong, "steps": STEPS}))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
