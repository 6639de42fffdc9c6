"""`python -m grpo_roc_jax.reward.check package.module:function`: tries a reward function before training.

It runs on five small made-up trajectories: a right answer, a wrong answer, no answer, a failing tool call, and a
truncated one. Each line shows the reward and the status that training would use.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from grpo_roc_jax.reward.config import FunctionReward, Reward, RewardConfig
from grpo_roc_jax.reward.score import RewardError, make_scorer
from grpo_roc_jax.settings.leaving import end_with
from grpo_roc_jax.types import Problem, StopReason, ToolCall, ToolResult, Trajectory, Turn

PROBLEM = Problem("check", "What is 6 * 7?", "42", "check")


def sample_trajectories() -> dict[str, Trajectory]:
    """Description -> trajectory; five trajectories of one problem."""
    right, wrong = (rf"<answer>\boxed{{{value}}}</answer>" for value in (42, 41))
    return {
        "right answer": _trajectory(0, [right], "answer"),
        "wrong answer": _trajectory(1, [wrong], "answer"),
        "no answer": _trajectory(2, ["I do not know."], "eos"),
        "failing tool call": _trajectory(3, ["<tool_call>", right], "answer", "exception"),
        "truncated": _trajectory(4, ["and then"], "length"),
    }


def made_up(
    problem: Problem, prompt: Sequence[int], encode: Callable[[str], Sequence[int]], tag: str = "answer"
) -> list[Trajectory]:
    """Two trajectories of a problem that nobody sampled, to try reward functions on: a call, its output and the
    reference answer; and a turn that a limit cut.

    Args:
        problem: Of the run.
        prompt: Ids of its prompt.
        encode: Text -> ids.
        tag: Around the final answer.
    """
    call = ToolCall("python", {"code": "print(1)"}, '{"name": "python", "arguments": {"code": "print(1)"}}')
    result = ToolResult("ok", stdout="1\n", observation="1\n")
    answer = rf"I see.</reason><{tag}>\boxed{{{problem.answer}}}</{tag}>"
    first = [(f"Let me see.</reason><tool_call>{call.raw}</tool_call>", (call,), (result,)), (answer, (), ())]
    return [
        _spoken(0, prompt, first, encode, "answer"),
        _spoken(1, prompt, [("Let me think about it,", (), ())], encode, "length"),
    ]


def _spoken(
    sample: int,
    prompt: Sequence[int],
    turns: Sequence[tuple[str, tuple[ToolCall, ...], tuple[ToolResult, ...]]],
    encode: Callable[[str], Sequence[int]],
    stop: StopReason,
) -> Trajectory:
    tokens, sampled, spans = list(prompt), [False] * len(prompt), []
    for text, calls, results in turns:
        own, start = list(encode(text)), len(tokens)
        seen = [token for result in results for token in encode(result.observation)]
        spans.append(Turn(start, start + len(own), text, calls, results))
        tokens += own + seen
        sampled += [True] * len(own) + [False] * len(seen)
    mask = np.array(sampled, bool)
    logprobs, versions = np.where(mask, -1.0, 0.0).astype(np.float32), np.where(mask, 0, -1).astype(np.int32)
    ids = np.array(tokens, np.int32)
    return Trajectory(ids, mask, logprobs, versions, len(prompt), tuple(spans), stop, sample, temperature=1.0)


def check_reward(path: str) -> list[str]:
    """The outcome of each trajectory, one line each.

    Args:
        path: A built-in name or `package.module:function`, which gets 10 seconds.

    Raises:
        RewardError: The function cannot be found, or returns something invalid.
    """
    rows = sample_trajectories()
    part = Reward.read(path)
    part = replace(part, timeout_s=10.0) if isinstance(part, FunctionReward) else part
    scorer = make_scorer(RewardConfig(functions=(part,)))
    scored = scorer.score_all([PROBLEM], [list(rows.values())])
    scorer.close()
    verdicts = {t.sample: v for t, v in zip(scored.groups[0].trajectories, scored.groups[0].verdicts, strict=True)}
    lines = []
    for name, trajectory in rows.items():
        verdict = verdicts.get(trajectory.sample)
        outcome = f"reward {verdict.reward:g} ({verdict.status})" if verdict else "not scored: leaves the group"
        lines.append(f"{name:18} {outcome}")
    return lines + [f"fault: {fault}" for fault in scored.faults]


def _trajectory(sample: int, texts: list[str], stop: StopReason, result: str = "") -> Trajectory:
    call = ToolCall("python", {"code": "1/0"}, "{}")
    turns = [Turn(4 * i, 4 * i + 4, text) for i, text in enumerate(texts)]
    if result:
        turns[0] = Turn(0, 4, texts[0], (call,), (ToolResult(result, error_type="ZeroDivisionError"),))
    n = 4 * len(turns)
    tokens, mask, logprobs = np.arange(n, dtype=np.int32), np.ones(n, bool), np.full(n, -1.0, np.float32)
    return Trajectory(tokens, mask, logprobs, np.zeros(n, np.int32), 0, tuple(turns), stop, sample)


def main(argv: list[str]) -> int:
    """Exit status 0 if every trajectory was scored; 2 if the function failed or left trajectories unscored."""
    if len(argv) != 1:
        print(
            f"usage: python -m grpo_roc_jax.reward.check FUNCTION, one of {', '.join(sorted(Reward.kinds))} or a path"
        )
        return 2
    try:
        lines = check_reward(argv[0])
    except (RewardError, ValueError) as error:
        print(error)
        return 2
    print("\n".join(lines))
    return 2 if any("not scored" in line for line in lines) else 0


if __name__ == "__main__":
    end_with(lambda: main(sys.argv[1:]))
