"""Trajectories, verdicts and groups with every field in use, for tests of what stores and shows them."""

import numpy as np

from grpo_roc_jax.types import Condition, Group, Problem, ToolCall, ToolResult, Trajectory, Turn, Verdict


def make_trajectory(rng: np.random.Generator, sample: int, *, turns: int = 3, width: int = 40, step: int = 3):
    """A prompt of 20 tokens, then turns of about `width` tokens with a call and an observation of 15 each."""
    tokens, mask, made, offset = [rng.integers(3, 500, 20)], [np.zeros(20, bool)], [], 20
    for index in range(turns):
        length = int(rng.integers(1, width))
        kind, error = ("exception", "ValueError") if rng.random() < 0.4 else ("ok", "")
        raw = '{"name": "python", "arguments": {"code": "print(1)"}}'
        call = ToolCall("python", {"code": f"print({index})"}, raw=raw)
        shown = {"stdout": f"{index}\n", "observation": f"<tool_response>{index} é</tool_response>"}
        worker = {"wall_ms": float(rng.uniform(1, 30)), "isolation": "process", "worker_id": 1}
        result = ToolResult(kind, error_type=error, **shown, **worker)
        last = index == turns - 1
        text = "<answer>\\boxed{7}</answer>" if last else f"<reason>step {index}</reason><tool_call>{raw}</tool_call>"
        answer = {"reply": "no", "reward": 0.5} if last and sample % 2 else {}  # of an environment
        made.append(Turn(offset, offset + length, text, () if last else (call,), () if last else (result,), **answer))
        observed = 0 if last else 15
        tokens.append(rng.integers(3, 500, length + observed))
        mask.append(np.arange(length + observed) < length)
        offset += length + observed
    policy = np.concatenate(mask)
    odd = {"reward": 1.5, "opening": " It rains."} if sample % 2 else {}
    return Trajectory(
        *(np.concatenate(tokens).astype(np.int32), policy),
        np.where(policy, -rng.exponential(size=offset), 0).astype(np.float32),
        np.where(policy, step, -1).astype(np.int32),
        *(20, tuple(made), "answer", sample),
        seconds=float(rng.uniform(0, 3)),
        condition=Condition("hint" if sample % 5 == 4 else ""),
        temperature=0.9 if sample % 3 else None,
        **odd,
    )


def make_verdict(rng: np.random.Generator, trajectory: Trajectory) -> Verdict:
    status = ("correct", "wrong", "no_answer", "truncated")[int(rng.choice(4, p=[0.5, 0.3, 0.1, 0.1]))]
    answer = "7" if status == "correct" else None if status == "no_answer" else str(rng.integers(5))
    counts = {"tool_calls": len(trajectory.results), "turns": len(trajectory.turns), "answers": int(rng.integers(1, 3))}
    counts["tool_errors"] = sum(result.counts_as_error for result in trajectory.results)
    channels = {"format": float(rng.random())} if trajectory.sample == 1 else {}
    return Verdict(float(status == "correct"), status, answer, **counts, well_formed=True, channels=channels)


def make_group(seed: int, size: int, *, source: str = "world:gcd", **options) -> Group:
    rng = np.random.default_rng(seed)
    trajectories = tuple(make_trajectory(rng, sample, **options) for sample in range(size))
    problem = Problem(f"{source}/{seed}", f"gcd of {seed} and 12?", "7", source, {"level": 1})
    return Group(problem, trajectories, tuple(make_verdict(rng, trajectory) for trajectory in trajectories))
