"""Adds a demonstration to the rollouts of a problem, for plans that ask for one (`plan.second demonstrate`)."""

import numpy as np

from grpo_roc_jax.data.config import DemonstrationConfig
from grpo_roc_jax.method.edit import joined
from grpo_roc_jax.method.planning import DEMONSTRATION
from grpo_roc_jax.reward.score import Scorer
from grpo_roc_jax.text.chat_format import ChatFormat, Trace
from grpo_roc_jax.types import Condition, Group, Problem, Trajectory, Turn
from grpo_roc_jax.worlds.demonstrations import PROGRAMS, answer_text, demonstrate

CLEAN = DemonstrationConfig(guess=0.0, wrong=0.0, repair=0.0, clean=1.0)


def with_demonstration(scorer: Scorer, chat: ChatFormat, longest: int, group: Group) -> Group:
    """The group with a scored demonstration after its rollouts; unchanged if there is no demonstration that fits.

    Worlds demonstrate their own problems. Other data needs a column `solution`; the answer is appended to it.
    """
    trace = reference_trace(group.problem)
    if trace is None or not group.size:
        return group
    shown = demonstration(trace, chat)
    if shown.length - shown.prompt_length > longest:
        return group
    return joined(group, scorer(group.problem, [shown]))


def reference_trace(problem: Problem) -> Trace | None:
    """A correct solution of the problem as a trace; None where the data has none."""
    if problem.extra.get("family") in PROGRAMS:
        return demonstrate(problem, CLEAN, 0)
    solution = problem.extra.get("solution")
    return Trace(problem, (f"{solution}{answer_text(problem.answer)}",)) if solution else None


def demonstration(trace: Trace, chat: ChatFormat) -> Trajectory:
    """The trace as a trajectory. It was not sampled, so its log-probabilities are 0."""
    tokens, mask = chat.trace_row(trace)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    spans = zip(edges[::2].tolist(), edges[1::2].tolist(), trace.turns, strict=True)
    turns = tuple(Turn(low, high, text) for low, high, text in spans)
    start, versions = len(chat.prompt_ids(trace.problem)), np.where(mask, 0, -1).astype(np.int32)
    zeros = np.zeros(len(tokens), np.float32)
    condition = Condition(DEMONSTRATION)
    return Trajectory(tokens.astype(np.int32), mask, zeros, versions, start, turns, "answer", 0, condition=condition)
