"""Rows that were submitted together, with their environment and options."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from grpo_roc_jax.rollout.config import NoStepLimit, RolloutConfig
from grpo_roc_jax.rollout.records import RowEnvironment, RunOptions
from grpo_roc_jax.rollout.table import FREE, SlotTable
from grpo_roc_jax.types import RolloutRequest, Trajectory


class RowSubmission:
    """What the rows of one `submit` have in common. Its environment numbers them from 0."""

    def __init__(
        self, environment: RowEnvironment, options: RunOptions, config: RolloutConfig, tickets: range, now_s: float
    ):
        self.environment, self.progress, self.tickets = environment, options.progress, tickets
        self.find_stop: Callable[[int, np.ndarray, np.ndarray], int | None] | None
        self.find_stop = getattr(environment, "find_stop", None)
        self.goes_on: Callable[[int, np.ndarray], bool] | None = getattr(environment, "goes_on", None)
        self.completed: Callable[[int, Trajectory], Trajectory] | None = getattr(environment, "completed", None)
        self.seated: Callable[[int, int], None] | None = getattr(environment, "seated", None)
        self.drawn: Callable[[int, np.ndarray, np.ndarray], None] | None = getattr(environment, "drawn", None)
        self.keep_cache = options.keep_cache
        self.cancel_policy = options.cancel_policy if config.early_exit else None
        self.before_chunk = options.before_chunk or (lambda: None)
        self.step_limit = config.step_limit if options.purpose == "train" else NoStepLimit()
        self.started_s, self.rounds, self.left = now_s, 0, len(tickets)

    def show(self, table: SlotTable, tokens: int) -> None:
        """Updates the progress display."""
        if self.progress is not None:
            own = (table.row >= self.tickets.start) & (table.row < self.tickets.stop)
            self.progress.update(
                live=int((own & table.live).sum()),
                waiting=int((own & table.waiting).sum()),
                done=len(self.tickets) - self.left,
                total=len(self.tickets),
                tokens=tokens,
            )


@dataclass(eq=False)
class Row:
    """An unfinished rollout."""

    request: RolloutRequest
    prompt: int
    """Number of its prompt."""
    submission: RowSubmission
    index: int
    """In the submission."""
    slot: int = FREE
