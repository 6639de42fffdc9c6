"""Answers to the page's questions about runs, as values that JSON can hold. Reads only the directories of the runs.

The page does the filtering itself: it has the index of every step (`blocks`), and asks for single trajectories.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from grpo_roc_jax.record import codec, index
from grpo_roc_jax.record.accuracy import ALL, bootstrap, interval
from grpo_roc_jax.record.events import EVENTS_FILE, read_events
from grpo_roc_jax.record.metrics import FILE, read_metrics
from grpo_roc_jax.record.segments import faults, segments
from grpo_roc_jax.record.trace import TraceRecord, record_of, trace_files
from grpo_roc_jax.view.curves import RunData, by_label, load_runs

EVENT_ROWS = 10_000
"""Largest number of newest events that are shown."""
Block = tuple[str, int]
"""Kind and step of a file of the log."""


class Runs:
    """The runs that a page shows, in the order in which they were named.

    Raises:
        FileNotFoundError: One of them has neither metrics nor trajectories.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = [Path(path) for path in paths]
        loaded = []
        for path in self.paths:
            if not (path / FILE).exists() and not trace_files(path):
                raise FileNotFoundError(f"{path} has neither {FILE} nor trajectories; name the directory of a run")
            loaded += load_runs([str(path)]) if (path / FILE).exists() else [RunData(path, [], {})]
        self.labels = {str(run.path): label for label, members in by_label(loaded).items() for run in members}
        self._accuracy = lru_cache(maxsize=4096)(self._measured)

    def state(self) -> list[dict[str, Any]]:
        """Names of the runs, and a stamp of every file that changes with its content."""
        return [
            {
                "name": str(path),
                "label": self.labels[str(path)],
                "metrics": [_stamp(path / FILE), _stamp(path / EVENTS_FILE)],
                "blocks": {f"{kind}.{step}": _stamp(log) for log, kind, step in trace_files(path)},
            }
            for path in self.paths
        ]

    def metrics(self, run: int) -> dict[str, Any]:
        """Steps, every metric as a column with null where it is missing, and events."""
        path = self.paths[run]
        rows = read_metrics(path) if (path / FILE).exists() else []
        names = sorted({name for row in rows for name in row} - {"step"})
        columns = {name: [_number(row.get(name)) for row in rows] for name in names}
        return {"steps": [row["step"] for row in rows], "columns": columns, "events": events(path, columns, rows)}

    def blocks(self, run: int, wanted: Iterable[Block]) -> Iterator[bytes]:
        """The index of each file of the log; files that no longer exist are left out."""
        logs = self._logs(run)
        return (index.load(logs[block], *block) for block in wanted if block in logs)

    def trajectory(self, run: int, block: Block, row: int) -> dict[str, Any] | None:
        """All details of one trajectory; None if it does not exist or cannot be read."""
        return self.trajectories(run, block, [row]).get(row)

    def trajectories(self, run: int, block: Block, rows: Iterable[int]) -> dict[int, dict[str, Any]]:
        """Row -> trajectory of a file of the log, without rows that the file does not have or that cannot be read."""
        log = self._logs(run).get(block)
        if log is None:
            return {}
        pieces = self._pieces(run)
        return {row: details(record, pieces) for row, record in records_of(log, block, rows)}

    def search(self, run: int, text: str, wanted: Iterable[Block]) -> dict[str, list[int]]:
        """Block -> indices of the trajectories whose text contains `text`, ignoring the case of ASCII letters."""
        sought = _folded(text)
        matches: dict[str, list[int]] = {}
        logs = self._logs(run)
        for block in wanted:
            for row, _, line in lines(logs[block], block) if block in logs else ():
                if sought in line[: line.rfind(b', "tokens": "')].lower() and _holds(line, sought):
                    matches.setdefault(f"{block[0]}.{block[1]}", []).append(row)
        return matches

    def evaluations(self) -> dict[str, Any]:
        """Accuracy with 95% intervals of every evaluation by source, and paired differences between some of them."""
        rows, evaluated = [], []
        for run, path in enumerate(self.paths):
            logs = [(log, step) for log, kind, step in trace_files(path) if kind == "eval"]
            for log, step in logs:
                accuracies, row = self._accuracy(log, _stamp(log), step)
                rows += [{"run": run, "step": step, **entry} for entry in row]
                evaluated.append((run, step, accuracies))
        pairs = [(last, first) for first, last in _ends(evaluated)]
        newest = [last for _, last in _ends(evaluated)]
        pairs += [(other, newest[0]) for other in newest[1:]]
        return {"rows": rows, "differences": [difference(*pair) for pair in pairs if pair[0] is not pair[1]]}

    def _measured(self, log: Path, stamp: str, step: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """(accuracy by problem, a row by source). `stamp` only serves as a key of the cache."""
        by_source: dict[str, dict[str, list[bool]]] = {}
        for row in index.rows(index.load(log, "eval", step)):
            if row["status"] != "unscored":
                uid, source = row["problem"][:2]
                by_source.setdefault(source, {}).setdefault(uid, []).append(row["status"] == "correct")
        means = {s: {uid: float(np.mean(c)) for uid, c in problems.items()} for s, problems in by_source.items()}
        every = {uid: value for by_problem in means.values() for uid, value in by_problem.items()}
        rows = []
        scored = {source: list(by_problem.items()) for source, by_problem in means.items()}
        if len(means) > 1:
            scored[ALL] = [item for items in scored.values() for item in items]
        for source, items in scored.items():
            values = np.array([value for _, value in items])
            low, high = interval(values, uids=[uid for uid, _ in items])
            rows.append(
                {"source": source, "problems": len(items), "mean": float(values.mean()), "low": low, "high": high}
            )
        return every, rows

    def _logs(self, run: int) -> dict[Block, Path]:
        return {(kind, step): log for log, kind, step in trace_files(self.paths[run])}

    def _pieces(self, run: int) -> dict[int, str]:
        logs = trace_files(self.paths[run])
        folder = index.folder_of(logs[0][0])
        return _read_pieces(folder, _stamp(folder / "pieces.jsonl"))


@lru_cache(maxsize=8)
def _read_pieces(folder: Path, stamp: str) -> dict[int, str]:
    return index.read_pieces(folder)


def lines(log: Path, block: Block, rows: Iterable[int] | None = None) -> Iterator[tuple[int, int, bytes]]:
    """(row of the index, number of its line from 1, the line) of a file of the log: all rows, or these."""
    content = json.loads(index.load(log, *block))
    offsets, unreadable = content["columns"]["offset"], {*content.get("unreadable", ())}
    numbers = [number for number in range(1, len(offsets) + len(unreadable) + 1) if number not in unreadable]
    with open(log, "rb") as file:
        for row in range(len(offsets)) if rows is None else rows:
            if 0 <= row < len(offsets):
                file.seek(offsets[row])
                yield row, numbers[row], file.readline()


def records_of(log: Path, block: Block, rows: Iterable[int]) -> Iterator[tuple[int, TraceRecord]]:
    """(row of the index, record) of these rows. Those that cannot be read are left out, with a warning."""
    for row, number, line in lines(log, block, rows):
        if (record := record_of(line)) is None:
            index.warn_of_lines(log, [number])
        else:
            yield row, record


def _holds(line: bytes, sought: bytes) -> bool:
    """Whether a text of a line contains `sought`."""
    try:
        return any(sought in _folded(text) for text in texts(index.parsed(line)))
    except Exception:  # whatever a damaged line leads to
        return False


def details(record: TraceRecord, pieces: Mapping[int, str]) -> dict[str, Any]:
    """A trajectory as the page shows it: turns, text by origin, what the scorer saw, and arrays by token."""
    trajectory = record.trajectory
    long = {"tokens": trajectory.tokens, "version": trajectory.versions, "logprob": trajectory.logprobs}
    if record.advantages is not None:
        long["advantage"] = record.advantages
    if record.scored is not None:
        log_ratio, entropy = record.scored.astype(np.float32)
        with np.errstate(over="ignore"):
            long |= {"ratio": np.exp(log_ratio), "entropy": entropy}
    problem = record.problem
    extra = {str(name): v if isinstance(v, str) else json.dumps(v, default=str) for name, v in problem.extra.items()}
    return {
        "step": record.step,
        "group": record.group,
        "problem": {"uid": problem.uid, "prompt": problem.prompt, "answer": problem.answer, "extra": extra},
        "sample": trajectory.sample,
        "condition": str(trajectory.condition),
        "temperature": trajectory.temperature,
        "seconds": trajectory.seconds,
        "stop": trajectory.stop,
        "fault": trajectory.fault,
        "prompt_length": trajectory.prompt_length,
        "kept": record.kept,
        "why": record.why,
        "penalties": dict(record.penalties),
        "faults": faults(record),
        "segments": [
            {"kind": s.kind, "start": s.start, "end": s.end, "text": s.text, "logprob": s.logprob}
            for s in segments(record)
        ],
        "turns": [codec.pack_turn(turn) for turn in trajectory.turns],
        "verdict": None if record.verdict is None else _plain(asdict(record.verdict)),
        "paid": trajectory.reward,
        "arrays": {name: codec.encode_array(array) for name, array in long.items()},
        "pieces": {i: pieces[i] for i in np.unique(trajectory.tokens).tolist() if i in pieces},
    }


def texts(line: Mapping[str, Any]) -> Iterator[str]:
    """All texts of a parsed line that can be searched: prompts, turns, calls, outputs, answers."""
    yield line["problem"]["prompt"]
    yield from line["context"]
    yield (line["verdict"] or {}).get("answer") or ""
    yield line.get("fault", "")
    for turn in line["turns"]:
        yield turn["text"]
        for result in turn.get("results", ()):
            yield from (result.get(n, "") for n in ("observation", "stdout", "stderr", "error_type", "error_message"))


def events(path: Path, columns: Mapping[str, Sequence[float | None]], rows: Sequence[Mapping[str, float]]) -> list[Any]:
    """Alarms: {step, name, text} from `events.jsonl` and from metrics named `alarm/...` that are not 0."""
    alarms = [
        {"step": row["step"], "name": name.removeprefix("alarm/"), "text": f"{value:g}"}
        for name in columns
        if name.startswith("alarm/")
        for row, value in zip(rows, columns[name], strict=True)
        if value
    ]
    noted = read_events(path)[-EVENT_ROWS:]
    alarms += [{"step": event["step"], "name": event["event"], "text": event["text"]} for event in noted]
    return sorted(alarms, key=lambda event: event["step"])


def difference(first: tuple[int, int, dict], second: tuple[int, int, dict]) -> dict[str, Any]:
    """Accuracy of one evaluation minus that of another on their common problems, and the number of problems on which
    they agree."""
    (run, step, first_scores), (run_two, step_two, second_scores) = first, second
    shared = sorted(first_scores.keys() & second_scores.keys())
    a, b = (np.array([scores[uid] for uid in shared], np.float64) for scores in (first_scores, second_scores))
    low, high = bootstrap(a - b)
    won, lost = a >= 0.5, b >= 0.5
    counts = {"both": won & lost, "first": won & ~lost, "second": ~won & lost, "neither": ~won & ~lost}
    return {
        "run": run, "step": step, "against_run": run_two, "against_step": step_two, "problems": len(shared),
        "mean": _number(float((a - b).mean()) if shared else math.nan), "low": _number(low), "high": _number(high),
        **{name: int(value.sum()) for name, value in counts.items()},
    }  # fmt: skip


def _ends(evaluated: Sequence[tuple[int, int, dict]]) -> list[tuple[Any, Any]]:
    """(first, last) evaluation of each run."""
    by_run: dict[int, list[Any]] = {}
    for entry in evaluated:
        by_run.setdefault(entry[0], []).append(entry)
    return [(of_run[0], of_run[-1]) for of_run in by_run.values()]


def block_of(name: str) -> Block:
    """`step.12` -> ("step", 12).

    Raises:
        ValueError: The name has another form.
    """
    match = re.fullmatch(r"(step|eval)\.(\d{1,12})", name)
    if not match:
        raise ValueError(f"no block is named {name!r}; must be like step.12")
    return match[1], int(match[2])


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _plain(value: Any) -> Any:
    """Mappings and sequences as JSON holds them."""
    return json.loads(json.dumps(value, default=str))


def _folded(text: str) -> bytes:
    return json.dumps(text)[1:-1].encode("ascii").lower()


def _stamp(path: Path) -> str:
    try:
        status = path.stat()
    except OSError:
        return ""
    return f"{status.st_size}-{status.st_mtime_ns}"
