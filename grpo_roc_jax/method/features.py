"""Converts a group to arrays, so that every part of a method is a function of arrays."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from grpo_roc_jax.types import Group, ToolResult, Trajectory, traits_of

EQUAL_TOLERANCE = 1e-6
"""Values whose spread is at most this share of the largest are equal. Float32 sums of the same terms in another order
differ by less, and such noise must not become a signal. The tolerance is relative, so that it does not depend on the
unit of the values."""
LEAST_SPREAD = 1e-15
"""Values with a smaller spread are equal whatever their size: such spreads remain where float64 terms cancel."""


def flat(values: np.ndarray) -> bool:
    """Whether all values are equal up to rounding, relative to their size."""
    if len(values) == 0:
        return True
    low, high = float(np.min(values)), float(np.max(values))
    return high - low <= EQUAL_TOLERANCE * max(abs(low), abs(high)) + LEAST_SPREAD


@dataclass(frozen=True, eq=False)
class Features:
    """What the parts of a method may read about the G trajectories of a problem; arrays [G] unless stated otherwise."""

    uid: str
    rewards: np.ndarray
    """float64, as scored."""
    correct: np.ndarray
    """bool: whether the goal was reached. Selection and shaping use this, since a reward can be above 0
    for its format."""
    channels: dict[str, np.ndarray]
    """Reward channels by name, float64; NaN where a trajectory has none. Empty with a single reward."""
    lengths: np.ndarray
    """Number of policy tokens."""
    response_lengths: np.ndarray
    """Number of tokens after the prompt, including observations; the budget counts these."""
    truncated: np.ndarray
    failed: np.ndarray
    """bool: truncated by a limit, and judged as a failure for that (`reward.truncated`)."""
    turns: np.ndarray
    tool_calls: np.ndarray
    tool_errors: np.ndarray
    answers: np.ndarray
    well_formed: np.ndarray
    mean_logprobs: np.ndarray
    """Mean recorded log-probability of the policy tokens, in nats; 0 without policy tokens."""
    conditions: tuple[str, ...]
    """Kind of the condition of each trajectory; an empty string for the plain prompt."""
    levels: np.ndarray
    """Level of the condition, such as the number of a wording."""
    replies: np.ndarray
    """Texts of the final answers, as objects; without an answer the text of the last turn."""
    texts: np.ndarray
    """The policy's own texts by turn, as objects."""
    gaps: dict[str, tuple[np.ndarray, ...]] = field(default_factory=dict)
    """float64[n] for each trajectory, by the name of another policy (`reference`): log p - log p_other of its policy
    tokens, with p the policy that the ratio is taken against. Empty without a scoring pass under that policy."""

    @property
    def size(self) -> int:
        return len(self.rewards)

    def attempts(self) -> "Features":
        """The features of those trajectories that are the policy's attempts at the problem."""
        rows = [i for i, kind in enumerate(self.conditions) if traits_of(kind).attempt]
        return self if len(rows) == self.size else self.take(rows)

    def take(self, indices: Sequence[int] | np.ndarray) -> "Features":
        """The features of a subset, in the order of `indices`."""
        rows = np.asarray(indices, np.int64)
        arrays = {name: value[rows] for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        channels = {name: values[rows] for name, values in self.channels.items()}
        gaps = {name: tuple(values[i] for i in rows) for name, values in self.gaps.items()}
        conditions = tuple(self.conditions[i] for i in rows)
        return dataclasses.replace(self, **arrays, channels=channels, conditions=conditions, gaps=gaps)

    def gap(self, name: str, reader: str) -> tuple[np.ndarray, ...]:
        """The gaps to the policy `name`.

        Raises:
            ValueError: There was no scoring pass under it; the message names the reader.
        """
        if name not in self.gaps:
            raise ValueError(f"{reader} reads log-probabilities under the {name}, which no scoring pass has given here")
        return self.gaps[name]


def features(group: Group) -> Features:
    """The arrays of a group, one entry a trajectory in rollout order."""
    verdicts, trajectories = group.verdicts, group.trajectories
    names = dict.fromkeys(name for verdict in verdicts for name in verdict.channels)
    counts = ("turns", "tool_calls", "tool_errors", "answers")
    return Features(
        uid=group.problem.uid,
        rewards=group.rewards,
        correct=group.correct,
        channels={name: np.array([v.channels.get(name) for v in verdicts], np.float64) for name in names},
        lengths=np.array([np.count_nonzero(t.policy_mask) for t in trajectories], np.int64),
        response_lengths=np.array([t.length - t.prompt_length for t in trajectories], np.int64),
        truncated=np.array([t.truncated for t in trajectories], bool),
        failed=np.array([verdict.status == "truncated" for verdict in verdicts], bool),
        **{name: np.array([getattr(verdict, name) for verdict in verdicts], np.int64) for name in counts},
        well_formed=np.array([verdict.well_formed for verdict in verdicts], bool),
        mean_logprobs=np.array([_mean_logprob(t) for t in trajectories], np.float64),
        conditions=tuple(t.condition.kind for t in trajectories),
        levels=np.array([t.condition.level for t in trajectories], np.int64),
        replies=np.array([v.answer or last_text(t) for t, v in group.pairs], object),
        texts=np.fromiter((tuple(turn.text for turn in t.turns) for t in trajectories), object, group.size),
    )


def text_compat(group: Group, structured: Features) -> Features:
    """The same features as the released scorer sees them, for parity studies.

    It reads the text of the response alone (microsoft/rStar, `down_sample/roc.py`). A call failed when its response
    contains "error" in any case. Answer tags count in the whole text: those that a tool printed, and those that stay
    open across turns. A turn counts from its header to its end mark; the header of the first one is in the prompt.
    """
    texts = [_released_text(trajectory) for trajectory in group.trajectories]
    responses = [_enclosed(text, "<tool_response>", "</tool_response>") for text in texts]
    answers = [len(_enclosed(text, "<answer>", "</answer>")) for text in texts]
    return dataclasses.replace(
        structured,
        tool_calls=np.array([len(row) for row in responses], np.int64),
        tool_errors=np.array([sum("error" in r.lower() for r in row) for row in responses], np.int64),
        answers=np.array(answers, np.int64),
        well_formed=np.array(
            [text.count("<answer>") == text.count("</answer>") == n for text, n in zip(texts, answers, strict=True)]
        ),
        turns=np.array([len(_enclosed(text, "<|im_start|>assistant", "<|im_end|>")) for text in texts], np.int64),
    )


def _released_text(trajectory: Trajectory) -> str:
    """The response as the released environment would write it, in ChatML.

    A turn is closed unless a token limit cut it: results that no token follows did not fit any more. The released code
    also closes a turn whose end token is the last one of the budget; a trajectory does not say so, and here it is open.
    """
    parts = []
    for number, turn in enumerate(trajectory.turns, start=1):
        continues = turn.end < trajectory.length or number < len(trajectory.turns)
        closed = continues or trajectory.stop != "length" or turn.results
        parts.append(turn.text + ("<|im_end|>" if closed else ""))
        if continues:
            blocks = "\n".join(f"<tool_response>\n{_unescaped(r)}\n</tool_response>" for r in turn.results)
            parts.append(f"<|im_start|>user\n{blocks}<|im_end|>\n<|im_start|>assistant\n<reason>")
    return "".join(parts)


def _unescaped(result: ToolResult) -> str:
    """The observation, cut as the policy saw it. The released environment escapes nothing."""
    if not result.shown:
        return result.observation
    shown, complete = (t.replace("&lt;", "<").replace("\u200b", "") for t in (result.shown, result.observation))
    return result.observation if shown == complete else shown


def _enclosed(text: str, opening: str, closing: str) -> list[str]:
    """All matches of the pattern `opening(.*?)closing`, in linear time."""
    matches, at = [], 0
    while (start := text.find(opening, at)) >= 0 and (end := text.find(closing, start + len(opening))) >= 0:
        matches.append(text[start + len(opening) : end])
        at = end + len(closing)
    return matches


def last_text(trajectory: Trajectory) -> str:
    """What the policy wrote in its last turn."""
    return trajectory.turns[-1].text if trajectory.turns else ""


def _mean_logprob(trajectory: Trajectory) -> float:
    # Recorded log-probabilities are 0 off the mask, so the plain sum is the masked one and much faster.
    return float(trajectory.logprobs.sum(dtype=np.float64)) / max(np.count_nonzero(trajectory.policy_mask), 1)
