"""Runs for tests of the viewer: three turns of Python about greatest common divisors, in the bytes of their text."""

import json
import math
from functools import cache

import numpy as np

import grpo_roc_jax as g
from grpo_roc_jax.method import compose
from grpo_roc_jax.record import trace
from grpo_roc_jax.text.tokenizer import ByteTokenizer
from grpo_roc_jax.types import ToolCall, ToolResult
from tests.helpers.knobs import write_lines

TOKENIZER = ByteTokenizer()
CODE = "import math\n# the numbers of the problem\na, b = {a}, {b}\nprint(math.gcd(a, b))"
TRACE = '  File "<program>", line 3, in <module>\n    print(maths.gcd(a, b))'
WRONG = "name 'maths' is not defined"
ERROR = {"error_type": "NameError", "error_message": WRONG, "traceback": TRACE, "error_line": 3}
FAILED = ToolResult("exception", wall_ms=24.0, observation=f"[exception] NameError: {WRONG}", **ERROR)


def trajectory(rng, problem, sample, skill, step):
    """Failed calls until one succeeds or patience ends, then an answer; better with more skill."""
    a, b = problem.extra["numbers"]
    value = math.gcd(a, b)
    ids = list(TOKENIZER.encode(f"<|user|>{problem.prompt}<|assistant|>"))
    prompt, mask, turns = len(ids), [False] * len(ids), []

    def say(text, calls=(), results=()):
        shown = f"\n<tool_response>{results[0].observation}</tool_response>\n" if results else ""
        sampled, given = TOKENIZER.encode(text), TOKENIZER.encode(shown)
        turns.append(g.Turn(len(ids), len(ids) + len(sampled), text, calls, results))
        ids.extend([*sampled, *given])
        mask.extend([True] * len(sampled) + [False] * len(given))

    failed = True
    while failed and len(turns) < 3:
        failed = rng.random() > skill
        code = CODE.format(a=a, b=b).replace("math.gcd", "maths.gcd" if failed else "math.gcd")
        raw = json.dumps({"name": "python", "arguments": {"code": code}})
        begin = "I compute it with the tool." if not turns else "The module has another name; I try again."
        fine = ToolResult("ok", stdout=f"{value}\n", wall_ms=31.0, observation=str(value))
        call = ToolCall("python", {"code": code}, raw=raw)
        say(f"{begin}<tool_call>{raw}</tool_call>", (call,), (FAILED if failed else fine,))
    right = rng.random() < 0.35 + 0.6 * skill
    answer = value if right else value + int(rng.integers(1, 5))
    short = rng.random() < 0.06
    say("So the greatest common divisor" if short else f"Both divide by it. <answer>\\boxed{{{answer}}}</answer>")
    policy = np.array(mask)
    logprobs = np.where(policy, -rng.exponential(0.3, len(ids)), 0).astype(np.float32)
    versions = np.where(policy, step - 1, -1).astype(np.int32)
    stop, seconds = "length" if short else "answer", float(rng.uniform(0.5, 3))
    arrays = (np.array(ids, np.int32), policy, logprobs, versions)
    rollout = g.Trajectory(*arrays, prompt, tuple(turns), stop, sample, seconds=seconds)
    status = "truncated" if short else "correct" if right else "wrong"
    counts = len(rollout.results), sum(r.counts_as_error for r in rollout.results), int(not short), True, len(turns)
    return rollout, g.Verdict(float(status == "correct"), status, None if short else str(answer), *counts)


method = cache(lambda size: g.read_config("toy.yaml", "--resample=roc", f"--group.size={max(2, size // 2)}"))
"""The toy's method, which trains half of the rollouts."""


def records(rng, step, skill, *, groups=8, size=16, kind="step"):
    """Groups of a step, selected and given advantages by the method itself; of an evaluation, all of them."""
    sampled = []
    for index in range(groups):
        number = 7 * (index + 1 + (groups * step if kind == "step" and index else 0))  # the first problem comes again
        numbers = (number * 6, number * 10 + 4)
        prompt = f"What is the greatest common divisor of {numbers[0]} and {numbers[1]}?"
        source = ("world:gcd", "world:divisors")[index % 2]
        problem = g.Problem(f"{source}/{number}", prompt, str(math.gcd(*numbers)), source, {"numbers": numbers})
        members = [trajectory(rng, problem, sample, skill, step) for sample in range(size)]
        sampled.append(g.Group(problem, *(tuple(part) for part in zip(*members, strict=True))))
    if kind == "eval":
        return trace.eval_records(step, sampled)
    config, draws = method(size), np.random.default_rng(step)
    selections = [compose.resample_group(group, config, draws) for group in sampled]
    selected = [compose.subset(group, chosen) for group, chosen in zip(sampled, selections, strict=True) if chosen.kept]
    rows = compose.train_rows(selected, config, compose.initial_state(config)) if selected else []
    return trace.step_records(step, sampled, selections, trained=selected, rows=rows)


def write_run(folder, seed=0, *, steps=12, groups=8, size=16):
    """A run with trajectories, evaluations, metrics, an alarm and an event; returns its directory."""
    rng = np.random.default_rng(seed + 1)
    folder.mkdir(parents=True, exist_ok=True)
    writer = trace.TraceWriter(folder, decode=TOKENIZER.decode)
    rows = []
    for step in range(steps + 1):
        skill, metrics = 0.25 + 0.7 * step / max(1, steps), {"step": step}
        if step % 6 == 0:
            judged = records(rng, step, skill, groups=24, size=2, kind="eval")
            writer.write(step, judged, kind="eval")
            metrics["eval/all/avg@2"] = float(np.mean([record.verdict.reward for record in judged]))
        if step:
            sampled = records(rng, step, skill, groups=groups, size=size)
            writer.write(step, sampled)
            kept = float(sum(record.kept for record in sampled))
            metrics["rollout/reward"] = float(np.mean([record.verdict.reward for record in sampled]))
            metrics |= {"roc/kept": kept, "roc/dropped": len(sampled) - kept, "alarm/entropy_band": float(step == 7)}
            metrics |= {"rollout/sampled_tokens": 40_000.0, "time/rollout_s": 3.0, "time/step_s": 5.0 - skill}
        rows.append(metrics)
    write_lines(folder / "metrics.jsonl", rows)
    event = {"step": min(4, steps), "event": "reward_spread", "text": "below 0.05 for three steps"}
    write_lines(folder / "events.jsonl", [event])
    (folder / "config.yaml").write_text(f"name: demo\nseed: {seed}\nresample: roc\n")
    return folder
