"""Events of a run, one JSON line each, in `events.jsonl` of its directory. Plots and the viewer mark them.

    {"step": 12, "event": "grad_norm", "metric": "update/grad_norm", "value": 41.0, "threshold": 9.8,
     "action": "note", "text": "update/grad_norm 41 is above 9.8"}

`event` is the name of an alarm (`run.watch`), `stale_samples` (`stream.rollout_stream`), `stalled` (nothing happened
for long during the step), `batch` (one was saved for a replay), `stage` or `chosen` (`run.stages`), `not_scored` (no
trajectory of the step has a score), `samplers` (one of another process joined or was lost), `environment` (code of the
user's failed), `logprob_gap_max` (`run.watch.GapCheck`) or `missing_rows` (`record.missing`). Only `step`, `event` and
`text` are always present. A resumed run discards the events of later steps.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_roc_jax.record.metrics import JsonlWriter, parsed_row

log = logging.getLogger(__name__)

EVENTS_FILE = "events.jsonl"


class Events:
    """Writes and shows events. A failing disk is logged.

    Args:
        run_dir: Directory of the run; None writes nothing.
        say: Shows a line.
    """

    def __init__(self, run_dir: Path | None, say: Callable[[str], None] = lambda text: None) -> None:
        self._file = JsonlWriter(run_dir / EVENTS_FILE) if run_dir else None
        self._say = say

    def note(self, step: int, event: str, text: str, **more: Any) -> None:
        """Writes and shows one event."""
        self._say(f"event at step {step}: {event}: {text}")
        self._try("write", step, {"event": event, **more, "text": text})

    def cut(self, step: int) -> None:
        """Discards the events of later steps."""
        self._try("cut", step)

    def _try(self, method: str, *arguments: Any) -> None:
        try:
            if self._file is not None:
                getattr(self._file, method)(*arguments)
        except OSError as error:
            log.warning("events are not written: %s", error)


def read_events(run_dir: str | Path) -> list[dict[str, Any]]:
    """The events of a run, oldest first; empty if there is no file."""
    try:
        lines = (Path(run_dir) / EVENTS_FILE).read_bytes().splitlines(True)
    except OSError:
        return []
    return [event for event in map(parsed_row, lines) if event and {"event", "text"} <= event.keys()]
