"""The trajectories of a step as tables for services: a row for each rollout, and the text of some of them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from grpo_roc_jax.record.live import inert, pieces
from grpo_roc_jax.record.trace import TraceRecord, advantage_of

TEXTS = 4
"""Number of rollouts whose text is shown."""
COLUMNS = (
    "step", "group", "problem", "source", "prompt", "reference", "sample", "verdict", "reward", "answer", "kept", "why",
    "penalty", "error_penalty", "format_penalty", "advantage", "calls", "failed_calls", "turns", "tokens",
)  # fmt: skip


class Rows(NamedTuple):
    """The columns and rows of a table."""

    columns: tuple[str, ...]
    rows: list[list[Any]]


def tables(records: Sequence[TraceRecord]) -> dict[str, Rows]:
    """`rollouts`, and `trajectories`: kept and dropped rollouts of the first group with both."""
    scored = [record for record in records if record.verdict is not None]
    groups: dict[int, list[TraceRecord]] = {}
    for record in scored:
        groups.setdefault(record.group, []).append(record)
    first = next((members for number, members in groups.items() if number >= 0 and _both(members)), scored)
    chosen = sorted(first, key=lambda record: not record.kept)
    chosen = chosen[: TEXTS // 2] + chosen[TEXTS // 2 :][-TEXTS // 2 :]
    text = [[*_row(record)[:12], _text(record)] for record in chosen]
    return {"rollouts": Rows(COLUMNS, list(map(_row, scored))), "trajectories": Rows((*COLUMNS[:12], "text"), text)}


def _both(group: Sequence[TraceRecord]) -> bool:
    return len({record.kept for record in group}) > 1


def _text(record: TraceRecord) -> str:
    return inert("".join(words for _, words in pieces(record)))


def _row(record: TraceRecord) -> list[Any]:
    problem, trajectory, verdict = record.problem, record.trajectory, record.verdict
    fields = [problem.uid, problem.source, problem.prompt, problem.answer, trajectory.sample]
    outcome = [verdict.status, verdict.reward, verdict.answer or "", record.kept, record.why]
    penalties = [record.penalties.get(name) for name in ("total", "error", "format")]
    counts = [verdict.tool_calls, verdict.tool_errors, verdict.turns, trajectory.length - trajectory.prompt_length]
    values = [record.step, record.group, *fields, *outcome, *penalties, advantage_of(record), *counts]
    return [inert(value) if isinstance(value, str) else value for value in values]
