"""Tries reward functions before training: on made-up trajectories (`check_reward`), on recorded ones (`score_again`),
and at the start of a run (`made_up`)."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace

import numpy as np

from grpo_roc_jax.reward.config import EnvironmentReward, FunctionReward, Reward, RewardConfig
from grpo_roc_jax.reward.score import Scorer, make_scorer
from grpo_roc_jax.types import Group, Problem, StopReason, ToolCall, ToolResult, Trajectory, Turn

FROM_ENVIRONMENT = (
    "these rewards are those of an environment, which these trajectories had none of; --trajectories RUN reads "
    "recorded ones"
)
PROBLEM = Problem("check", "What is 6 * 7?", "42", "check")


def sample_trajectories(problem: Problem = PROBLEM) -> dict[str, Trajectory]:
    """Description -> trajectory; five trajectories of one problem."""
    other = "41" if problem.answer != "41" else "42"
    right, wrong = (rf"<answer>\boxed{{{value}}}</answer>" for value in (problem.answer, other))
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
    """Two made-up trajectories of a problem, to try reward functions on: a call with its output and the reference
    answer, and a turn that a limit cut.

    Args:
        problem: A problem of the run.
        prompt: Ids of its prompt.
        encode: Text -> ids.
        tag: Name of the tag around the final answer.
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
        turn_ids, start = list(encode(text)), len(tokens)
        seen = [token for result in results for token in encode(result.observation)]
        spans.append(Turn(start, start + len(turn_ids), text, calls, results))
        tokens += turn_ids + seen
        sampled += [True] * len(turn_ids) + [False] * len(seen)
    mask = np.array(sampled, bool)
    logprobs, versions = np.where(mask, -1.0, 0.0).astype(np.float32), np.where(mask, 0, -1).astype(np.int32)
    ids = np.array(tokens, np.int32)
    return Trajectory(ids, mask, logprobs, versions, len(prompt), tuple(spans), stop, sample, temperature=1.0)


def check_reward(path: str, problem: Problem = PROBLEM) -> list[str]:
    """The outcome of each trajectory, one line each.

    Args:
        path: A built-in name or `package.module:function`, which gets 10 seconds.
        problem: What the made-up trajectories answer.

    Raises:
        RewardError: The function cannot be found, or returns something invalid.
    """
    rows = sample_trajectories(problem)
    with closing(_scorer(path)) as scorer:
        scored = scorer.score_all([problem], [list(rows.values())])
    verdicts = {t.sample: v for t, v in zip(scored.groups[0].trajectories, scored.groups[0].verdicts, strict=True)}
    lines = []
    for name, trajectory in rows.items():
        verdict = verdicts.get(trajectory.sample)
        outcome = f"reward {verdict.reward:g} ({verdict.status})" if verdict else "not scored: leaves the group"
        lines.append(f"{name:18} {outcome}")
    finished = {verdict.reward for verdict in verdicts.values() if verdict.status != "truncated"}
    if len(verdicts) == len(rows) and len(finished) == 1:
        lines.append("all that were not cut get the same reward: a group of such rollouts teaches nothing")
    if not verdicts and not scored.faults:
        none = "every value is None: such a problem is left out of training"
        lines.append(FROM_ENVIRONMENT if path == EnvironmentReward.kind else none)
    return lines + [f"fault: {fault}" for fault in scored.faults]


def score_again(path: str, groups: Sequence[Group]) -> list[str]:
    """What a function returns for recorded trajectories, compared with their recorded rewards: by status, by group, and
    where the two differ most.

    Args:
        path: As in `check_reward`.
        groups: Groups of a step, as `record.trace.groups_of` reads them.

    Raises:
        RewardError: The function cannot be found, or returns something invalid.
    """
    with closing(_scorer(path)) as scorer:
        scored = scorer.score_all([group.problem for group in groups], [group.trajectories for group in groups])
    before = {(g, t.sample): v for g, group in enumerate(groups) for t, v in group.pairs}
    after = {(g, t.sample): v for g, group in enumerate(scored.groups) for t, v in group.pairs}
    lines = [f"{len(after)} of {len(before)} recorded trajectories of {len(groups)} problems are scored"]
    if len(after) < len(before):
        lines.append(f"{len(before) - len(after)} are not scored and leave their groups")
    for status in dict.fromkeys(v.status for v in before.values()):
        both = [(before[key].reward, after[key].reward) for key in after if before[key].status == status]
        if both:
            mean = np.mean(both, axis=0)
            lines.append(f"{status:18} {len(both):5}  recorded {mean[0]:.3f}  now {mean[1]:.3f}")
    spread = [sum(len(set(group.rewards.tolist())) > 1 for group in some) for some in (groups, scored.groups)]
    lines.append(f"groups whose rewards differ: {spread[0]} recorded, {spread[1]} now, of {len(groups)}")
    if len(groups) and not spread[1]:
        lines.append("no group has rewards that differ, so nothing would be learned from this step")
    for g, sample in sorted(after, key=lambda key: -abs(after[key].reward - before[key].reward))[:3]:
        old, new, uid = before[g, sample], after[g, sample], groups[g].problem.uid
        if old.reward != new.reward:
            lines.append(f"{uid} rollout {sample}: {old.reward:g} ({old.status}) -> {new.reward:g}")
    return lines + [f"fault: {fault}" for fault in scored.faults]


def _scorer(path: str) -> Scorer:
    part = Reward.read(path)
    part = replace(part, timeout_s=10.0) if isinstance(part, FunctionReward) else part
    return make_scorer(RewardConfig(functions=(part,)))


def _trajectory(sample: int, texts: list[str], stop: StopReason, result: str = "") -> Trajectory:
    call = ToolCall("python", {"code": "1/0"}, "{}")
    turns = [Turn(1 + 4 * i, 5 + 4 * i, text) for i, text in enumerate(texts)]
    if result:
        turns[0] = Turn(1, 5, texts[0], (call,), (ToolResult(result, error_type="ZeroDivisionError"),))
    n = 1 + 4 * len(turns)  # one of them is the prompt
    mask = np.arange(n) > 0
    return Trajectory(np.arange(n), mask, -1.0 * mask, mask - 1, 1, tuple(turns), stop, sample)
