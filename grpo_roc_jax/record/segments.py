"""A trajectory for readers: its tokens by origin, its contradictions, and a line that sums it up."""

from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

import numpy as np

from grpo_roc_jax.record.trace import TraceRecord, advantage_of, runs_of
from grpo_roc_jax.types import ToolCall, ToolResult

SegmentKind = Literal["prompt", "policy", "observation"]


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one origin."""

    kind: SegmentKind
    start: int
    end: int
    text: str
    logprob: float | None = None
    """Mean log-probability of its tokens; None off the policy mask."""
    versions: tuple[int, ...] = ()
    """Training steps of the parameters that sampled them."""

    @property
    def origin(self) -> str:
        """How the policy's tokens were sampled, to follow the name of the segment; empty off the policy mask."""
        if self.logprob is None:
            return ""
        return f", mean log-prob {self.logprob:.3f}, parameters of step {', '.join(map(str, self.versions))}"


def segments(record: TraceRecord) -> list[Segment]:
    """The tokens of a trajectory by origin, with their text.

    If the log holds no context (there was no tokenizer), the problem and the tools' observations are shown instead.
    """
    trajectory = record.trajectory
    parts: list[Segment] = []
    context = list(record.context)
    observed = ["".join(r.shown or r.observation for r in turn.results) for turn in trajectory.turns if turn.results]
    given = context or [record.problem.prompt + trajectory.opening, *observed]
    text_index = 0
    for start, end, policy in runs_of(trajectory.policy_mask):
        if policy:
            text = "".join(turn.text for turn in trajectory.turns if start <= turn.start and turn.end <= end)
            logprob = float(trajectory.logprobs[start:end].mean())
            versions = tuple(np.unique(trajectory.versions[start:end]).tolist())
            parts.append(Segment("policy", start, end, text, logprob, versions))
            continue
        kind: SegmentKind = "prompt" if start < trajectory.prompt_length else "observation"
        parts.append(Segment(kind, start, end, given[text_index] if text_index < len(given) else ""))
        text_index += 1
    return parts


def calls(record: TraceRecord) -> list[tuple[int, ToolCall, ToolResult | None]]:
    """(number of the turn from 1, call, its result or None if it was not run) of every call."""
    return [
        (number, call, result)
        for number, turn in enumerate(record.trajectory.turns, start=1)
        for call, result in zip_longest(turn.calls, turn.results[: len(turn.calls)])
    ]


def penalties(record: TraceRecord) -> str:
    """The penalties that selection ranked a success by, as text; empty for failures, which are not ranked."""
    if record.verdict is None or record.verdict.status != "correct":
        return ""
    values = ", ".join(f"{name} {value:.3g}" for name, value in record.penalties.items())
    return f"penalties: {values}" if values else ""


def faults(record: TraceRecord) -> list[str]:
    """Contradictions within a record; empty for a consistent one."""
    trajectory = record.trajectory
    spans = np.zeros(trajectory.length, bool)
    for turn in trajectory.turns:
        spans[turn.start : turn.end] = True
    contradictions = []
    if not np.array_equal(spans, trajectory.policy_mask):
        wrong = int((spans != trajectory.policy_mask).sum())
        contradictions.append(f"turns and policy mask disagree on {wrong} tokens")
    if trajectory.policy_mask[: trajectory.prompt_length].any():
        contradictions.append("the policy mask covers tokens of the prompt")
    if trajectory.logprobs[~trajectory.policy_mask].any():
        contradictions.append("log-probabilities off the policy mask")
    return contradictions


def headline(record: TraceRecord) -> str:
    """One line: which trajectory it is, its reward, and whether it was kept."""
    verdict, trajectory = record.verdict, record.trajectory
    words = [f"step {record.step}", record.problem.uid, f"sample {trajectory.sample}"]
    if trajectory.condition:
        words.append(f"condition {trajectory.condition}")
    if verdict is not None:
        words += [f"reward {verdict.reward:g}", verdict.status]
        words.append(f"{verdict.tool_errors}/{verdict.tool_calls} calls failed")
    words += [f"{len(trajectory.turns)} turns", f"{trajectory.length - trajectory.prompt_length} tokens"]
    state = "kept" if record.kept else "not kept"
    words += [f"stop {trajectory.stop}", state if record.why == state else f"{state} ({record.why})"]
    advantage = advantage_of(record)
    if advantage is not None:
        words.append(f"advantage {advantage:+.3f}")
    return " · ".join(words)
