"""The index next to the trajectory log: what lists and filters show of each trajectory, and where its line begins.

`trajectories_index/step_00000012.json` belongs to `trajectories/step_00000012.jsonl`; the writer of the log writes it
with the log. It is rebuilt from the log if it is missing or belongs to other content, so it may be deleted at any time.
`pieces.jsonl` next to it holds the text of single tokens, one object of id -> text per line.

An index is one JSON object: size and checksum of the log, kind, step, `outcomes` (kinds of tool results, to which the
letters in `calls` refer), `names` (texts to which numbers in `TEXTS` refer), `problems` (uid, source, prompt, answer),
and `columns`, each with one value per trajectory. Lines of the log that cannot be read, such as a cut one, are left
out; `unreadable` has their numbers, from 1.
"""

import json
import logging
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, get_args

import numpy as np

from grpo_roc_jax.record.codec import finite
from grpo_roc_jax.sandbox.result import ToolKind
from grpo_roc_jax.settings.files import parse_json

logger = logging.getLogger(__name__)

FORMAT = 3
OUTCOMES: tuple[str, ...] = (*get_args(ToolKind), "not_run")
LETTERS = {kind: chr(97 + index) for index, kind in enumerate(OUTCOMES)}
TEXTS = ("condition", "status", "stop", "why", "answer")
"""Columns of texts that repeat."""
COLUMNS = (
    "offset", "group", "problem", "sample", "condition", "reward", "status", "calls", "tool_calls", "tool_errors",
    "turns", "tokens", "sampled", "stop", "seconds", "kept", "why", "penalties", "advantage",
    "answer",
)  # fmt: skip
PENALTIES = ("total", "error", "format")
"""Order of the values in the column of penalties."""
SHORT = 40
"""Most characters of a given answer in the index."""
HEAD = 160
"""Most characters of a prompt in the index."""
SHOWN_LINES = 10
"""Most numbers of unreadable lines in a warning."""
TAIL = 4096
"""Number of last bytes of a log whose checksum identifies its content."""
STAMP = re.compile(rb'\{"format": (\d+), "size": (\d+), "tail": (\d+),(?: "unreadable": \[([\d, ]+))?')


def folder_of(log: Path) -> Path:
    """Folder of the index of a log file."""
    return log.parent.with_name(f"{log.parent.name}_index")


def index_file(log: Path) -> Path:
    return folder_of(log) / f"{log.stem}.json"


def row(line: Mapping[str, Any]) -> dict[str, Any]:
    """What the index stores of a line of the log, without its offset."""
    verdict, runs, penalties = line["verdict"] or {}, line["versions"], line["penalties"]
    problem = line["problem"]
    total = sum(length for _, length in runs)
    return {
        "group": line["group"],
        "problem": [problem["uid"], problem["source"], problem["prompt"][:HEAD], problem["answer"][:HEAD]],
        "sample": line["sample"],
        "condition": line["condition"],
        "reward": finite(verdict.get("reward")),
        "status": verdict.get("status", "unscored"),
        "calls": " ".join(map(_letters, line["turns"])).rstrip(),
        "tool_calls": verdict.get("tool_calls", 0),
        "tool_errors": verdict.get("tool_errors", 0),
        "turns": len(line["turns"]),
        "tokens": total - line["prompt_length"],
        "sampled": sum(length for version, length in runs if version >= 0),
        "stop": line["stop"],
        "seconds": round(line["seconds"], 3),
        "kept": int(line["kept"]),
        "why": line["why"],
        "penalties": [round(penalties.get(name, 0.0), 4) for name in ("total", "error", "format")]
        if penalties
        else None,
        "advantage": finite(line.get("advantage")),
        "answer": (verdict.get("answer") or "")[:SHORT],
    }


def _letters(turn: Mapping[str, Any]) -> str:
    """One letter per call: `a` shifted by the position of its outcome in `OUTCOMES`."""
    calls = len(turn.get("calls", ()))
    kinds = [LETTERS[result["kind"]] for result in turn.get("results", ())[:calls]]
    return "".join(kinds).ljust(calls, LETTERS["not_run"])


def encode(
    kind: str, step: int, rows: Sequence[Mapping[str, Any] | None], lengths: Sequence[int], tail: bytes
) -> bytes:
    """The index of a log file.

    Args:
        kind: step or eval.
        step: Step of the file.
        rows: `row` of every line; None for a line that cannot be read.
        lengths: Bytes of every line, including its line end.
        tail: The last bytes of the file, at least `TAIL` if it has as many.
    """
    names: dict[str, int] = {}
    problems: dict[tuple[str, str], tuple[int, list[str]]] = {}
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    offset, unreadable = 0, []
    for line_number, (entry, length) in enumerate(zip(rows, lengths, strict=True), 1):
        if entry is None:
            unreadable.append(line_number)
            offset += length
            continue
        uid, source, *_ = entry["problem"]
        number, _ = problems.setdefault((uid, source), (len(problems), entry["problem"]))
        name_numbers = {name: names.setdefault(entry[name], len(names)) for name in TEXTS}
        for name, value in ({**entry, **name_numbers, "problem": number, "offset": offset}).items():
            columns[name].append(value)
        offset += length
    content: dict[str, Any] = {"format": FORMAT, "size": offset, "tail": zlib.crc32(tail[-TAIL:])}
    content |= {"unreadable": unreadable} if unreadable else {}
    content |= {"kind": kind, "step": step, "count": len(columns["offset"]), "outcomes": OUTCOMES, "names": list(names)}
    content |= {"problems": [shown for _, shown in problems.values()], "columns": columns}
    return json.dumps(content).encode("ascii")


def parsed(line: bytes) -> dict[str, Any]:
    """A line of the log without its tokens, masks and log-probabilities, which the writer puts last.

    Raises:
        ValueError: The line is cut, or is not JSON.
    """
    if not line.endswith((b"}\n", b"}", b"}\r\n")):
        raise ValueError("a line of the trajectory log is cut")
    end = line.rfind(b', "tokens": "')
    return parse_json(line[:end] + b"}" if end > 0 else line, "a line of the trajectory log")


def read_tail(file: BinaryIO, length: int) -> tuple[int, bytes]:
    """(size of a file, its last `length` bytes)."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - length))
    return size, file.read()


def load(log: Path, kind: str, step: int) -> bytes:
    """The index of a log file. It is rebuilt and saved if it is missing or belongs to other content. Lines that cannot
    be read are left out, with a warning that names them."""
    with open(log, "rb") as file:
        size, tail = read_tail(file, TAIL)
        with suppress(OSError):
            content = index_file(log).read_bytes()
            stamp = STAMP.match(content)
            if stamp and tuple(map(int, stamp.groups()[:3])) == (FORMAT, size, zlib.crc32(tail)):
                warn_of_lines(log, [int(number) for number in (stamp[4] or b"").split(b",") if number])
                return content
        file.seek(0)
        lines = file.readlines()
    rows = [_row_or_none(line) for line in lines]
    content = encode(kind, step, rows, [len(line) for line in lines], tail)
    warn_of_lines(log, [number for number, entry in enumerate(rows, 1) if entry is None])
    save(log, content)
    return content


def _row_or_none(line: bytes) -> dict[str, Any] | None:
    try:
        return row(parsed(line))
    except Exception:  # whatever a damaged line leads to
        return None


def warn_of_lines(log: Path, numbers: Sequence[int]) -> None:
    """Names the lines of a log that are left out, once in a process."""
    if numbers:
        _warn_once(log, tuple(numbers))


@lru_cache(maxsize=1024)
def _warn_once(log: Path, numbers: tuple[int, ...]) -> None:
    shown = ", ".join(map(str, numbers[:SHOWN_LINES])) + ", ..." * (len(numbers) > SHOWN_LINES)
    form = "%s, lines %s: cannot be read and are left out"
    logger.warning(form if len(numbers) > 1 else "%s, line %s: cannot be read and is left out", log, shown)


def intact(log: Path) -> bool:
    """Whether a log file is as it was when its index was written; without an index, whether it ends with a line."""
    with open(log, "rb") as file:
        size, tail = read_tail(file, TAIL)
    head = b""
    with suppress(OSError), open(index_file(log), "rb") as file:
        head = file.read(200)
    stamp = STAMP.match(head)
    if stamp and int(stamp[1]) == FORMAT:
        return (int(stamp[2]), int(stamp[3])) == (size, zlib.crc32(tail)) and b'"unreadable"' not in head
    return tail.endswith(b"}\n") and b"\0" not in tail


def save(log: Path, content: bytes) -> None:
    """Writes an index. If it cannot be written, readers rebuild it."""
    path = index_file(log)
    draft = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(content)
        os.replace(draft, path)
    except OSError:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def rows(content: bytes) -> Iterator[dict[str, Any]]:
    """The trajectories of an index in the order of the log, with their texts; `problem` is [uid, source, ...]."""
    index = json.loads(content)
    names, problems, columns = index["names"], index["problems"], index["columns"]
    for values in zip(*columns.values(), strict=True):
        entry = dict(zip(columns, values, strict=True))
        entry |= {name: names[entry[name]] for name in TEXTS}
        yield entry | {"problem": problems[entry["problem"]]}


class Pieces:
    """Writes the text of each token once.

    Args:
        folder: Folder of the index.
        decode: Ids -> text.
    """

    def __init__(self, folder: Path, decode: Callable[[Sequence[int]], str]) -> None:
        self._path = folder / "pieces.jsonl"
        self._decode = decode
        self._known: set[int] = set()

    def add(self, tokens: Iterable[np.ndarray]) -> None:
        """Appends the tokens that are not yet in the file of this process."""
        used = [np.unique(array) for array in tokens]
        new = set(np.unique(np.concatenate(used)).tolist()) - self._known if used else set()
        if not new:
            return
        # A token decoded alone may lose its leading space; the second of two does not.
        texts = {i: self._decode([i, i])[len(self._decode([i])) :] for i in sorted(new)}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(texts).encode("ascii") + b"\n"
        with open(self._path, "ab") as file:
            file.write(line if ends_with_line(self._path) else b"\n" + line)
        self._known |= new


def ends_with_line(path: Path) -> bool:
    """Whether a file is empty or its last line is complete; one that a kill or a full disk cut is not."""
    with open(path, "rb") as file:
        return read_tail(file, 1)[1] in (b"", b"\n")


def read_pieces(folder: Path) -> dict[int, str]:
    """Id -> text of the tokens of a log; empty if there is no file."""
    texts: dict[int, str] = {}
    with suppress(OSError), open(folder / "pieces.jsonl", encoding="ascii") as file:
        for line in file:
            with suppress(ValueError, AttributeError, RecursionError):  # the last line may be incomplete
                texts.update((int(i), text) for i, text in json.loads(line).items())
    return texts
