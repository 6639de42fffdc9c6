"""Runs for tests of the viewer: three turns of Python about greatest common divisors, in the bytes of their text."""

import json
import math
from dataclasses import replace
from functools import cache

import numpy as np

from grpo_roc_jax.config import read_config
from grpo_roc_jax.method import compose
from grpo_roc_jax.record import trace
from grpo_roc_jax.text.tokenizer import ByteTokenizer
from grpo_roc_jax.types import Group, Problem, ToolCall, ToolResult, Trajectory, Turn, Verdict
from tests.helpers.knobs import write_lines

TOKENIZER = ByteTokenizer()
CODE = "import math\n# the numbers of the problem\na, b = {a}, {b}\nprint(math.gcd(a, b))"
TRACE = '  File "<program>", line 3, in <module>\n    print(maths.gcd(a, b))'


def result(failed, value):
    if not failed:
        return ToolResult("ok", stdout=f"{value}\n", wall_ms=31.0, observation=str(value))
    name = "name 'maths' is not defined"
    error = {"error_type": "NameError", "error_message": name, "traceback": TRACE, "error_line": 3}
    return ToolResult("exception", wall_ms=24.0, observation=f"[exception] NameError: {name}", **error)


def trajectory(rng, problem, sample, skill, step):
    """Failed calls until one succeeds or patience ends, then an answer; better with more skill."""
    a, b = problem.extra["numbers"]
    value = math.gcd(a, b)
    ids = list(TOKENIZER.encode(f"<|user|>{problem.prompt}<|assistant|>"))
    prompt, mask, turns = len(ids), [False] * len(ids), []

    def write(text, sampled):
        more = TOKENIZER.encode(text)
        ids.extend(more)
        mask.extend([sampled] * len(more))

    def say(text, calls=(), results=()):
        start = len(ids)
        write(text, True)
        turns.append(Turn(start, len(ids), text, calls, results))
        if results:
            write(f"\n<tool_response>{results[0].observation}</tool_response>\n", False)

    failed = True
    while failed and len(turns) < 3:
        failed = rng.random() > skill
        code = CODE.format(a=a, b=b).replace("math.gcd", "maths.gcd" if failed else "math.gcd")
        raw = json.dumps({"name": "python", "arguments": {"code": code}})
        begin = "I compute it with the tool." if not turns else "The module has another name; I try again."
        call = ToolCall("python", {"code": code}, raw=raw)
        say(f"{begin}<tool_call>{raw}</tool_call>", (call,), (result(failed, value),))
    right = rng.random() < 0.35 + 0.6 * skill
    answer = value if right else value + int(rng.integers(1, 5))
    short = rng.random() < 0.06
    say("So the greatest common divisor" if short else f"Both divide by it. <answer>\\boxed{{{answer}}}</answer>")
    policy = np.array(mask)
    rollout = Trajectory(
        np.array(ids, np.int32),
        policy,
        np.where(policy, -rng.exponential(0.3, len(ids)), 0).astype(np.float32),
        np.where(policy, step - 1, -1).astype(np.int32),
        prompt,
        tuple(turns),
        "length" if short else "answer",
        sample,
        seconds=float(rng.uniform(0.5, 3)),
    )
    status = "truncated" if short else "correct" if right else "wrong"
    counts = len(rollout.results), sum(r.counts_as_error for r in rollout.results), int(not short)
    reward = float(status == "correct")
    return rollout, Verdict(reward, status, None if short else str(answer), *counts, True, len(turns))


@cache
def method(resample, size):
    """The toy's method; `roc` trains half of the rollouts."""
    trained = max(2, size // 2 if resample == "roc" else size)
    return read_config("toy.yaml", f"--resample={resample}", f"--group.size={trained}")


def records(rng, step, skill, *, groups=8, size=16, kind="step", resample="roc"):
    """Groups of a step, selected and given advantages by the method itself; of an evaluation, all of them."""
    sampled = []
    for index in range(groups):
        number = 7 * (index + 1 + (groups * step if kind == "step" and index else 0))  # the first problem comes again
        numbers = (number * 6, number * 10 + 4)
        prompt = f"What is the greatest common divisor of {numbers[0]} and {numbers[1]}?"
        source = ("world:gcd", "world:divisors")[index % 2]
        problem = Problem(f"{source}/{number}", prompt, str(math.gcd(*numbers)), source, {"numbers": numbers})
        members = [trajectory(rng, problem, sample, skill, step) for sample in range(size)]
        sampled.append(Group(problem, *(tuple(part) for part in zip(*members, strict=True))))
    if kind == "eval":
        return trace.eval_records(step, sampled)
    config, draws = method(resample, size), np.random.default_rng(step)
    selections = [compose.resample_group(group, config, draws) for group in sampled]
    selected = [compose.subset(group, chosen) for group, chosen in zip(sampled, selections, strict=True) if chosen.kept]
    rows = compose.train_rows(selected, config, compose.initial_state(config)) if selected else []
    recorded = trace.step_records(step, sampled, selections, trained=selected, rows=rows)
    if step % 3:
        return recorded
    return [replace(r, scored=scores(r.trajectory, step + i)) if r.kept else r for i, r in enumerate(recorded)]


def scores(made, seed):
    """Log-ratios and entropies of a scoring pass."""
    drawn = np.random.default_rng(seed).normal(size=(2, made.length)) * [[0.05], [0.2]]
    return np.where(made.policy_mask, np.stack([drawn[0], -made.logprobs + abs(drawn[1])]), 0).astype(np.float16)


def row(rng, step, skill):
    """Metrics of a step."""
    phases = {"rollout": 3.0, "plan": 0.1, "select": 0.2, "rows": 0.3, "update": 2 - skill}
    phases = {name: float(value * rng.uniform(0.9, 1.1)) for name, value in phases.items()}
    return {
        "step": step,
        "rollout/reward": 0.3 + 0.6 * skill + 0.03 * rng.normal(),
        "rollout/tool_error_in_correct": 0.5 * (1 - skill) + 0.02 * rng.normal(),
        "roc/tool_error_in_correct_kept": 0.2 * (1 - skill),
        "rollout/length": 260 - 100 * skill + 5 * rng.normal(),
        "rollout/sampled_tokens": 40_000.0 + 1000 * rng.normal(),
        "loss/entropy": 1.1 - 0.7 * skill + 0.02 * rng.normal(),
        "loss/logprob_gap_max": 2e-4 * rng.uniform(0.5, 1.5),
        "roc/kept": 64.0,
        "roc/dropped": 64.0,
        **{f"time/{name}_s": value for name, value in phases.items()},
        "time/step_s": sum(phases.values()) + 0.2,
    }


def write_run(folder, seed=0, *, steps=12, groups=8, size=16, resample="roc"):
    """A run with trajectories, evaluations, metrics, an alarm and an event; returns its directory."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    writer = trace.TraceWriter(folder, decode=TOKENIZER.decode)
    rows = []
    for step in range(steps + 1):
        skill = 0.25 + 0.7 * step / max(1, steps)
        metrics = {"step": step} if not step else row(rng, step, skill)
        if step % 6 == 0:
            judged = records(rng, step, skill, groups=24, size=2, kind="eval")
            writer.write(step, judged, kind="eval")
            metrics["eval/all/avg@2"] = float(np.mean([record.verdict.reward for record in judged]))
        if step:
            sampled = records(rng, step, skill, groups=groups, size=size, resample=resample)
            writer.write(step, sampled)
            kept = float(sum(record.kept for record in sampled))
            metrics["rollout/reward"] = float(np.mean([record.verdict.reward for record in sampled]))
            metrics |= {"roc/kept": kept, "roc/dropped": len(sampled) - kept, "alarm/entropy_band": float(step == 7)}
        rows.append(metrics)
    event = {"step": min(4, steps), "event": "reward_spread", "text": "below 0.05 for three steps"}
    write_lines(folder / "metrics.jsonl", rows)
    write_lines(folder / "events.jsonl", [event])
    (folder / "config.yaml").write_text(f"name: demo\nseed: {seed}\nresample: {resample}\n")
    return folder
