"""The calls of a program as a trajectory: joined to conversations by their token ids.

A call whose prompt begins with a whole conversation goes on with it. Any other one begins a further row, in which all
of its prompt is context: a branch of a conversation, or a sub-agent. So each sampled token counts in one row, with the
id, log-probability and version that it was sampled with.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grpo_roc_jax.text.chat_format import ChatFormat
from grpo_roc_jax.types import RolloutRequest, StopReason, Trajectory, Turn


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """What was asked, and what was sampled for it."""

    prompt: np.ndarray
    """int32."""
    ids: np.ndarray
    """int32."""
    logprobs: np.ndarray
    versions: np.ndarray
    begun: int = 0
    """Last ids of the prompt that the turn begins with: the request wrote them, the policy went on."""
    answer: str = ""
    """Id of the answer; choices of one request share it."""
    agent: str = ""
    """Name of the agent that asked."""
    trains: bool = True
    """Whether what was sampled trains; else it is context, where a conversation goes on after it."""
    reward: float = 0.0
    """Reward of this call alone."""


class Conversation:
    """A row that grows by calls."""

    def __init__(self) -> None:
        self.tokens, self.mask = np.zeros(0, np.int32), np.zeros(0, bool)
        self.logprobs, self.versions = np.zeros(0, np.float32), np.zeros(0, np.int32)
        self.spans: list[tuple[int, int]] = []
        self.calls: list[RecordedCall] = []

    def continued_by(self, call: RecordedCall) -> bool:
        """Whether the prompt of a call begins with all of this row."""
        n = len(self.tokens)
        return n <= len(call.prompt) and bool(np.array_equal(call.prompt[:n], self.tokens))

    def add(self, call: RecordedCall) -> None:
        """Appends what the call adds: the rest of its prompt as context, then what was sampled."""
        gap, n = len(call.prompt) - len(self.tokens), len(call.ids)
        logprobs, versions = (call.logprobs, call.versions) if call.trains else (np.zeros(n), np.full(n, -1))
        self.tokens = np.concatenate([call.prompt, call.ids]).astype(np.int32)
        self.mask = np.concatenate([self.mask, np.zeros(gap, bool), np.full(n, call.trains)])
        self.logprobs = np.concatenate([self.logprobs, np.zeros(gap, np.float32), logprobs]).astype(np.float32)
        self.versions = np.concatenate([self.versions, np.full(gap, -1), versions]).astype(np.int32)
        self.spans.append((len(self.tokens) - n, len(self.tokens)))
        self.calls.append(call)


def conversations_of(calls: Sequence[RecordedCall]) -> list[Conversation]:
    """The conversations that calls, in the order of their answers, belong to."""
    conversations: list[Conversation] = []
    for call in calls:
        open_rows = [row for row in conversations if row.continued_by(call)]
        row = max(open_rows, key=lambda row: len(row.tokens), default=None)
        if row is None:
            conversations.append(row := Conversation())
        row.add(call)
    return conversations


def trajectory_of(
    rows: Sequence[Conversation], chat: ChatFormat, request: RolloutRequest, stop: StopReason, longest: int
) -> tuple[Trajectory, int]:
    """(the trajectory of conversations, the number of those left out since all would be longer than `longest`)."""
    conversations: list[Conversation] = []
    for row in rows:
        if sum(len(conversation.tokens) for conversation in conversations) + len(row.tokens) <= longest:
            conversations.append(row)
    starts = np.cumsum([0, *(len(row.tokens) for row in conversations)]).tolist()
    turns = []
    for row, start in zip(conversations, starts, strict=False):
        for (low, high), call in zip(row.spans, row.calls, strict=True):
            if low == high or not call.trains:
                continue
            parsed = chat.parse_turn(row.tokens[low - call.begun : high])
            turns.append(Turn(start + low, start + high, parsed.text, parsed.calls, reward=call.reward))

    def whole(name: str) -> np.ndarray:
        return np.concatenate([getattr(row, name) for row in conversations])

    trajectory = Trajectory(
        tokens=whole("tokens"),
        policy_mask=whole("mask"),
        logprobs=whole("logprobs"),
        versions=whole("versions"),
        prompt_length=conversations[0].spans[0][0],
        turns=tuple(turns),
        stop=stop,
        sample=request.first_sample,
        condition=request.condition,
        temperature=request.temperature,
        parts=tuple(len(row.tokens) for row in conversations) if len(conversations) > 1 else (),
    )
    return trajectory, len(rows) - len(conversations)
