"""The accounts of a step: what comes in is what is used and what left, by reason. A difference ends the run."""

from collections.abc import Sequence

import numpy as np

from grpo_roc_jax.run.rounds import StepSamples
from grpo_roc_jax.types import Group


class AccountsOpen(RuntimeError):
    """Problems, rollouts, groups or tokens got lost, or came twice."""


def check_accounts(
    samples: StepSamples,
    taken: Sequence[Group],
    batches: Sequence,
    before: tuple[int, int, int],
    after: tuple[int, int, int],
) -> None:
    """Closes the accounts of a step.

    Args:
        samples: Of the step.
        taken: Groups that came from the buffer.
        batches: `learner.learner.UpdateBatch`es of them, those of the first epoch first.
        before: `RolloutBuffer.counts` before the step.
        after: The same after it.

    Raises:
        AccountsOpen: With each account that does not close.
    """
    added, out, waiting = np.subtract(after, before).tolist()
    pairs = {
        "rollouts of the waves = scored + removed + partial": _rollouts(samples),
        "trajectories of the groups = kept + dropped with a reason": (
            sum(group.size for group in samples.groups),
            sum(len(selection.reasons) for selection in samples.selections),
        ),
        "groups with kept trajectories = added to the buffer": (
            sum(bool(selection.kept) for selection in samples.selections),
            added,
        ),
        "groups added = taken + those that wait now and did not before": (added, out + waiting),
        **_rows(taken, batches),
    }
    wrong = [f"{name}: {there} and {here}" for name, (there, here) in pairs.items() if there != here]
    if wrong:
        raise AccountsOpen("; ".join(["accounts of the step do not close", *wrong]))


def _rollouts(samples: StepSamples) -> tuple[int, int]:
    """Rows that the engine ended, and what became of them; an earlier part of a partial group counts there again."""
    ended = sum(wave.stats.rollouts for wave in samples.waves)
    scored = sum(sum(wave.counts.values()) for wave in samples.waves)
    found = sum(group.size for wave in samples.waves for group in (*wave.groups, *wave.completed))
    removed = sum(len(wave.removed) for wave in samples.waves)
    if any(wave.partial or wave.completed for wave in samples.waves):  # a rollout may be here in part
        return scored, found + removed
    return ended, found + removed


def _rows(taken: Sequence[Group], batches: Sequence) -> dict[str, tuple[int, int]]:
    """Trajectories and tokens of the groups against those of the packed rows, of the first pass over them."""
    rows = sum(group.size for group in taken)
    seen = tokens = packed = 0
    for batch in batches:
        if seen >= rows:
            break
        seen += len(batch.rows)
        tokens += sum(row.length for row in batch.rows)
        packed += int(np.sum(batch.placement.length[: len(batch.rows)]))
    if not taken or not batches:
        return {}
    return {"trajectories taken = rows": (rows, seen), "tokens of the rows = packed": (tokens, packed)}
