"""An evaluation in parts, each of which is on disk once it is scored, so that one that is stopped can go on.

A rollout depends on the place of its problem and not on its part, so the parts change no result.
"""

import json
import shutil
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from grpo_roc_jax.record.trace import TraceWriter, eval_records, read_trace
from grpo_roc_jax.rollout.publish import SamplerParams
from grpo_roc_jax.rollout.records import RunOptions
from grpo_roc_jax.run.components import Components
from grpo_roc_jax.run.sample import ScoredRollouts, sample_requests
from grpo_roc_jax.run.solved import part_size
from grpo_roc_jax.settings.cli import ConfigError
from grpo_roc_jax.settings.progress import phase
from grpo_roc_jax.types import Group, Problem, RolloutRequest, Trajectory, Verdict

PARTS = "parts"
"""Folder of the parts; removed when all are scored."""
ASKED_FILE = "asked.json"
"""What the evaluation of a folder depends on."""


class Parts:
    """The scored parts of an evaluation in a folder.

    Args:
        folder: Of the evaluation.
        asked: What the results depend on; those of a stopped evaluation are used if it asked for the same.

    Raises:
        ConfigError: The folder holds parts of another evaluation.
    """

    def __init__(self, folder: Path, asked: Any) -> None:
        self.whole, self.folder = folder, folder / PARTS
        text, path = json.dumps(asked, default=str), folder / ASKED_FILE
        self._known = path.is_file()
        if self._known and path.read_text(encoding="utf-8") != text:
            raise ConfigError(
                f"{folder} holds an evaluation of another policy or with other settings; use those, or another --keep"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        self._writer = TraceWriter(self.folder)

    def finished(self, step: int, problems: Sequence[Problem], samples: int) -> ScoredRollouts | None:
        """The rollouts of an evaluation that has ended in this folder; None if it has not."""
        return self.read(step, problems, samples, self.whole) if self._known else None

    def read(
        self, number: int, problems: Sequence[Problem], samples: int, folder: Path | None = None
    ) -> ScoredRollouts | None:
        """The rollouts of a part; None if they are not there."""
        records = list(read_trace(folder or self.folder, number, kind="eval"))
        if len(records) != samples * len(problems):
            return None
        each: list[list[tuple[Trajectory, Verdict]]] = [[] for _ in problems]
        for record in records:
            if record.group >= 0:
                each[record.group].append((record.trajectory, record.verdict))
        pairs = (tuple(zip(*found, strict=True)) or ((), ()) for found in each)
        groups = tuple(Group(problem, *pair) for problem, pair in zip(problems, pairs, strict=True))
        return ScoredRollouts(groups, tuple((r.problem, r.trajectory) for r in records if r.group < 0))

    def write(self, number: int, found: ScoredRollouts) -> None:
        """Keeps the rollouts of a part."""
        self._writer.write(number, eval_records(number, found.groups, found.removed), kind="eval")

    def remove(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self.folder)


def sample_parts(
    components: Components,
    sampler: SamplerParams,
    problems: Sequence[Problem],
    samples: int,
    options: RunOptions,
    parts: Parts,
    **extras: Any,
) -> ScoredRollouts:
    """`sample_groups`, part after part; those that `parts` holds are read."""
    size, each = part_size(components, samples), []
    with phase("evaluation", steps=len(problems), unit="problem") as evaluation:
        for number, first in enumerate(range(0, len(problems), size)):
            some = problems[first : first + size]
            found = parts.read(number, some, samples)
            if found is None:
                requests = [RolloutRequest(problem, first + i, samples, **extras) for i, problem in enumerate(some)]
                found = sample_requests(components, sampler, requests, options)
                parts.write(number, found)
            each.append(found)
            evaluation.step(first + len(some))
    groups, removed = (tuple(chain(*(getattr(found, name) for found in each))) for name in ("groups", "removed"))
    return ScoredRollouts(groups, removed)
