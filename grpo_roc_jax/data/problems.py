"""Converts JSONL and Parquet files to problems. Columns are detected by common names; bad rows are named and counted.

Formats that load without settings: TRL (`prompt`, `answer` or `solution` or `ground_truth`), verl and SkyRL (`prompt`
as messages, `reward_model.ground_truth` or `reward_spec.ground_truth`, `data_source`), verifiers (`question`,
`answer`), GSM8K (`question`, `answer` ending in `#### x`), MATH and AIME (`problem`, `answer` or a boxed `solution`),
Alpaca (`instruction`, `input`, `output`).
"""

import datetime
import hashlib
import itertools
import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

import numpy as np
import pyarrow
import pyarrow.parquet

from grpo_roc_jax.settings.files import DEEPEST, depth_over, parse_json, read_text
from grpo_roc_jax.types import Problem

PROMPT_COLUMNS = ("prompt", "question", "problem", "input", "query", "instruction")
ANSWER_COLUMNS = (
    "reward_model.ground_truth",
    "reward_spec.ground_truth",
    "ground_truth",
    "final_answer",
    "expected_answer",
    "answer",
    "output",
    "solution",
    "target",
    "label",
)
TASK_COLUMNS = ("instruction", "input")
"""Make up one question together where a file has both, as Alpaca."""
SOURCE_COLUMN = "data_source"
SYSTEM_ROLES = ("system", "developer")
INTEGER = re.compile(r"[+-]?(?:\d+|\d{1,3}(?:,\d{3})+)", re.ASCII)
"""Commas only before groups of three digits: `1,234`, but not `1,2`, which may be a pair."""
LOOKED_AT = 100
"""Number of first rows from which the columns are detected."""
MAX_ROW_BYTES = 16 << 20
"""Longer lines are bad rows; they are skipped without being held in memory."""
MOST_ARRAY_BYTES = 1 << 30
"""Largest file with one JSON array, which is read at once; a larger one has an object a line."""
NO_EQUAL = "which no answer will equal"
"""In the note on references that are texts."""
LONG_ANSWER = 200
"""Number of characters above which a marked answer is searched in a reference answer."""
MEDIA_COLUMNS = ("images", "image", "videos", "video", "audios", "audio")
CONTEXT_COLUMNS = ("choices", "options", "context", "passage", "article", "body")
"""Often hold what the question needs: MMLU, RACE, HotpotQA, SVAMP."""
NO_ANSWERS = ("proof", "notfound")
"""Stand for a missing answer in NuminaMath."""
OWN_FORM = re.compile(
    r"\b(?:answer|output|put|write|give|return|enclose|place|wrap|end|finish)\b[^.?!\n]{0,80}"
    r"(?:####|\\boxed|\\fbox|\bboxed\b|<answer>|answer tags|[\"'`“‘](?:the |final |my ){0,3}answers?(?: is)?\s?:)"
    r"|\b(?:of|in) the form(?:at)?:? [\"'`“‘$*]{0,3}(?:the |final |my ){0,3}answers?(?: is)?\s?:",
    re.IGNORECASE,
)
"""Matches a question that says how the answer must be marked, as verl's prompts do."""
MEDIA_MARK = re.compile(
    r"<(?:image|img|picture|video|audio)[ _-]?[0-9]{0,4}\s?/?>|<\|(?:image|video|audio|vision)_?[a-z0-9_]{0,20}\|>"
    r"|<img\s[^>]{0,400}src=|!\[[^\]\n]{0,200}\]\((?:https?:|data:|[\w./-]{1,200}\.(?:png|jpe?g|gif|webp|svg|mp[34]|wav)\b)",
    re.IGNORECASE,
)
"""What stands in a text for a picture, a video or sound."""
SHOWN = 20
"""Number of bad rows, and of prompts that are too long, printed per file; all are counted."""


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used."""

    file: str
    row: int
    """Line of a JSONL file, or row of a Parquet file or of a JSON array, from 1."""
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.row}: {self.reason}"


@dataclass(frozen=True)
class LoadReport:
    """Counts and notes of loading a file."""

    file: str
    rows: int
    """Rows of the file without blank lines; each is a problem, a duplicate or a bad row."""
    problems: int
    prompt_column: str
    answer_column: str
    bad: tuple[BadRow, ...] = ()
    duplicates: int = 0
    """Number of rows that repeat an earlier question and answer; these are dropped."""
    own_system: int = 0
    """Number of rows whose messages have a system text; `text.system` is used instead."""
    own_tools: int = 0
    """Rows of `messages` with their own `tools`."""
    unread: Mapping[str, int] = field(default_factory=dict)
    """Key of messages that is not read -> number of rows that have it."""
    own_form: tuple[int, ...] = ()
    """Rows whose question asks for its own form of the answer."""
    long_answers: tuple[int, ...] = ()
    """Rows whose reference is a text, long or of sentences, without a marked answer."""
    beside_prompt: Mapping[str, int] = field(default_factory=dict)
    """Column of `CONTEXT_COLUMNS` -> number of rows that hold something in it which their prompt lacks."""

    def __str__(self) -> str:
        dropped = f"{self.duplicates} duplicate{'' if self.duplicates == 1 else 's'} dropped"
        lines = [
            f"{self.file}: {self.problems} problems of {self.rows} rows; question from {self.prompt_column!r}, "
            f"answer from {self.answer_column!r}; {len(self.bad)} bad, {dropped}"
        ]
        if self.own_system:
            lines.append(f"  {self.own_system} rows have their own system text; text.system is used instead")
        if self.own_tools:
            lines.append(f"  {self.own_tools} rows have their own tools; text.tools_section lists them in each prompt")
        if self.unread:
            keys = ", ".join(f"{key!r} ({count} rows)" for key, count in sorted(self.unread.items()))
            lines.append(f"  keys of messages that are not read: {keys}")
        if self.own_form:
            lines.append(
                f"  {len(self.own_form)} rows ask for a form of the answer of their own, such as after #### or in "
                f"\\boxed ({_listed(self.own_form)}); with text.instruction a prompt asks for two: empty that setting, "
                "or remove the sentence from the file"
            )
        if self.long_answers:
            lines.append(
                f"  {len(self.long_answers)} rows have a reference of more than {LONG_ANSWER} characters, or a text, "
                f"without \\boxed{{}} or a last line #### x ({_listed(self.long_answers)}), {NO_EQUAL}; for a reward "
                "function or a judge of your own, or name another column in data.answer_column"
            )
        if self.beside_prompt:
            names = ", ".join(f"{name!r} ({count} rows)" for name, count in self.beside_prompt.items())
            lines.append(
                f"  columns that are not part of the prompt: {names}; if a question cannot be answered without them, "
                "write them into the column of the question"
            )
        lines += [f"  {bad}" for bad in self.bad[:SHOWN]]
        if len(self.bad) > SHOWN:
            lines.append(f"  ... and {len(self.bad) - SHOWN} more")
        return "\n".join(lines)

    def check(self, bad_rows: Literal["drop", "fail"]) -> None:
        """Raises ValueError if no row can be used, or if there are bad rows and `bad_rows` is `fail`."""
        if self.bad and bad_rows == "fail":
            raise ValueError(f"{self}\nrepair these rows, or set data.bad_rows to drop")
        if not self.problems:
            raise ValueError(f"{self}\nno row of the file can be used")


def _listed(rows: Sequence[int]) -> str:
    """`row 3`, or `rows 1, 2, 3, ...`."""
    shown = ", ".join(map(str, rows[:5])) + (", ..." if len(rows) > 5 else "")
    return f"row{'s' * (len(rows) > 1)} {shown}"


Row = tuple[int, Any]
"""(row number, decoded row or, as a str, the reason why it could not be decoded)."""


class UnusableRow(Exception):
    """A row that cannot become a problem or a trace; the message is the reason."""


def load_problems(
    path: str | Path,
    *,
    prompt_column: str = "",
    answer_column: str = "",
    bad_rows: Literal["drop", "fail"] = "drop",
) -> tuple[list[Problem], LoadReport]:
    """Problems of a file in file order, and a report of the file.

    The uid of a problem is the name of the file and a hash of question and answer, so reordering does not change it.
    Columns without another use are kept in `extra`.

    Args:
        path: A `.jsonl` file (or `.json`, with one object per line or one array of objects) or a `.parquet` file.
        prompt_column: Overrides detection; dots reach into nested objects.
        answer_column: Overrides detection.
        bad_rows: `drop` counts and names them; `fail` raises at the end of the file with the list.

    Raises:
        ValueError: The file is missing, unreadable or of another kind, no column fits, no row can be used, or there
            are bad rows and `bad_rows` is `fail`.
    """
    path = Path(path).expanduser()
    columns = {"prompt_column": prompt_column, "answer_column": answer_column}
    return problems_of(read_rows(path), str(path), path.stem, bad_rows=bad_rows, **columns)


def problems_of(
    stream: Iterator["Row"],
    path: str,
    stem: str,
    *,
    prompt_column: str = "",
    answer_column: str = "",
    bad_rows: Literal["drop", "fail"] = "drop",
) -> tuple[list[Problem], LoadReport]:
    """Like `load_problems`, for rows from any origin. `path` names the origin in messages, `stem` in uids."""
    first_rows = list(itertools.islice(stream, LOOKED_AT))
    usable = [row for _, row in first_rows if isinstance(row, Mapping)]
    if not usable:
        shown = "".join(f"\n  {BadRow(path, n, row)}" for n, row in first_rows[:SHOWN])
        raise ValueError(f"{path}: no usable row among the first {len(first_rows)}{shown}")
    prompt_columns = (prompt_column,) if prompt_column else _detect_prompt(usable, path)
    answer_column = answer_column or _detect(usable, ANSWER_COLUMNS, path, "data.answer_column")
    problems: list[Problem] = []
    beside_prompt: Counter[str] = Counter()
    seen: dict[str, tuple[int, str]] = {}
    bad: list[BadRow] = []
    own_form: list[int] = []
    long_answers: list[int] = []
    rows = duplicates = own_system = 0
    for number, row in itertools.chain(first_rows, stream):
        rows += 1
        try:
            problem, has_system = _problem(row, prompt_columns, answer_column, stem)
        except UnusableRow as reason:
            bad.append(BadRow(path, number, str(reason)))
            continue
        first = seen.setdefault(problem.prompt, (number, problem.answer))
        if first[0] != number:
            if first[1] == problem.answer:
                duplicates += 1
            else:
                bad.append(BadRow(path, number, f"asks what row {first[0]} asks, with another answer"))
            continue
        own_system += has_system
        own_form += [number] if OWN_FORM.search(problem.prompt) else []
        long_answers += [number] if _is_text(problem.answer, answer_column) else []
        beside_prompt.update(_beside_prompt(problem))
        problems.append(problem)
    report = LoadReport(
        path,
        rows,
        len(problems),
        " + ".join(prompt_columns),
        answer_column,
        tuple(bad),
        duplicates,
        own_system,
        own_form=tuple(own_form),
        long_answers=tuple(long_answers),
        beside_prompt=beside_prompt,
    )
    report.check(bad_rows)
    return problems, report


def read_rows(path: Path) -> Iterator[Row]:
    """Rows of a JSONL, JSON or Parquet file; a row that cannot be decoded is replaced by the reason.

    Raises:
        ValueError: The file is missing, unreadable or of another kind.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a directory; name a .jsonl, .json or .parquet file")
    if not path.is_file():
        other = f"; `grpo-roc train CONFIG.yaml --data.sources {path} --dry-run` shows other sources"
        hub = "; a data set of the hub is hub:OWNER/NAME@REVISION"
        raise ValueError(f"{path}: no such file{other if ':' in str(path) else '' if path.suffix else hub}")
    if path.suffix == ".json" and (rows := _array_rows(path)) is not None:
        yield from rows
    elif path.suffix in (".jsonl", ".json"):
        yield from _jsonl_rows(path)
    elif path.suffix == ".parquet":
        yield from _parquet_rows(path)
    else:
        raise ValueError(f"{path}: cannot read {path.suffix!r} files; must be .jsonl, .json or .parquet")


def _jsonl_rows(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_ROW_BYTES):
            number += 1
            if len(line) == MAX_ROW_BYTES and not line.endswith(b"\n"):
                while (rest := file.readline(MAX_ROW_BYTES)) and not rest.endswith(b"\n"):
                    pass
                yield number, f"the line is longer than {MAX_ROW_BYTES >> 20} MiB"
                continue
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield number, _decode_json(line)


def _array_rows(path: Path) -> Iterator[Row] | None:
    """The rows of a file that holds one JSON array; None for any other file, such as one with an object a line.

    Raises:
        ValueError: It begins as an array and is none, or is too large to be read at once.
    """
    with path.open("rb") as file:
        begin = file.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip()
    if not begin.startswith(b"["):
        return None
    rows = parse_json(read_text(path, MOST_ARRAY_BYTES).removeprefix("\ufeff"), str(path))
    return ((number, _row_of(row)) for number, row in enumerate(rows, 1))


def _decode_json(line: bytes) -> Any:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return f"not UTF-8 at byte {error.start + 1}"
    except RecursionError:
        return "invalid JSON: nested too deep"
    except ValueError as error:
        return f"invalid JSON: {error}"
    return _row_of(row)


def _row_of(row: Any) -> Any:
    """A decoded row, or the reason why it is none."""
    if depth_over(row, DEEPEST):
        return "invalid JSON: nested too deep"
    return row if isinstance(row, dict) else f"must be a JSON object, not {type(row).__name__}"


def with_short_floats(batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
    """A batch whose columns of float32 and float16 are float64 with the shortest digits: 1.1, not 1.100000023841858."""
    for index, column in enumerate(batch.schema):
        if pyarrow.types.is_float32(column.type) or pyarrow.types.is_float16(column.type):
            kind = np.float32 if pyarrow.types.is_float32(column.type) else np.float16
            values = [None if value is None else float(str(kind(value))) for value in batch.column(index).to_pylist()]
            batch = batch.set_column(index, column.name, pyarrow.array(values, pyarrow.float64()))
    return batch


def _parquet_rows(path: Path) -> Iterator[Row]:
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in with_short_floats(batch).to_pylist():
                    number += 1
                    yield number, row
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path}: not a readable Parquet file after row {number} ({reason})") from error


def _detect_prompt(rows: list[Mapping[str, Any]], path: str) -> tuple[str, ...]:
    """The column of the question, or both of `TASK_COLUMNS` if it is one of them and the file has both."""
    name = _detect(rows, PROMPT_COLUMNS, path, "data.prompt_column")
    keys = {str(key).lower(): str(key) for row in rows for key in row}
    together = name.lower() in TASK_COLUMNS and all(part in keys for part in TASK_COLUMNS)
    return tuple(keys[part] for part in TASK_COLUMNS) if together else (name,)


def _detect(rows: list[Mapping[str, Any]], candidates: tuple[str, ...], path: str, field: str) -> str:
    """The first candidate column that most of the rows fill, else the first that any row fills, else has.

    Names that differ from a candidate in capitals only come after all candidates.
    """
    keys = {str(key): None for row in rows for key in row}
    names = [*candidates, *(key for name in candidates for key in keys if key != name and key.lower() == name)]
    filled = {name: sum(_is_filled(_column(row, name)) for row in rows) for name in names}
    for enough in (len(rows) // 2 + 1, 1):
        for name in names:
            if filled[name] >= enough:
                return name
    if empty := [name for name in names if any(_column(row, name) is not None for row in rows)]:
        return empty[0]
    columns = ", ".join(sorted(keys))
    raise ValueError(f"{path}: none of its columns ({columns}) is one of {', '.join(candidates)}; set {field}")


def _column(row: Mapping[str, Any], name: str) -> Any:
    """Value of a column, with dots for nested objects; None if it is missing."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        value = _written(value, dict)
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def _is_filled(value: Any) -> bool:
    """Whether a column holds anything: a text other than spaces, a list or an object with entries, any other value."""
    if isinstance(value, str):
        return bool(value.strip())
    return bool(value) if isinstance(value, list | tuple | Mapping) else value is not None


def without_column(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The row without a column. Of a nested one only the innermost value is left out, and objects that become empty."""
    first, _, rest = name.partition(".")
    if name in row or not rest:
        return {key: value for key, value in row.items() if key != name}
    inner = _written(row.get(first), dict)
    if not isinstance(inner, Mapping):
        return dict(row)
    left = without_column(inner, rest)
    if not left:
        return {key: value for key, value in row.items() if key != first}
    return {**row, first: json.dumps(left) if isinstance(row[first], str) else left} if left != inner else dict(row)


def problem_row(problem: Problem, prompt_column: str = "", answer_column: str = "") -> dict[str, Any]:
    """A row of a file that is read as the same problem by settings that name these columns, and by none: its prompt and
    answer are in the named columns too, and no other column is taken for the answer."""
    row = dict(problem.extra)
    for name in ANSWER_COLUMNS[: ANSWER_COLUMNS.index("answer")]:
        row = without_column(row, name)
    row[SOURCE_COLUMN] = problem.source
    for column, text in (
        *((prompt_column, problem.prompt), (answer_column, problem.answer)),
        *(("prompt", problem.prompt), ("answer", problem.answer)),
    ):
        _put_at(row, column, text)
    return row


def _put_at(row: dict[str, Any], column: str, text: str) -> None:
    """Sets a column, whose dots reach into nested objects; nothing for an empty name."""
    *above, last = column.split(".")
    for name in above:
        inner = _written(row.get(name), dict)
        row[name] = row = dict(inner) if isinstance(inner, Mapping) else {}
    if last:
        row[last] = text


def _written(value: Any, kind: type) -> Any:
    """An object or a list that a column holds as JSON text, as in tables without nesting; any other value as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith("{" if kind is dict else "["):
        return value
    try:
        read = json.loads(value)
    except (RecursionError, ValueError):
        return value
    return read if isinstance(read, kind) and not depth_over(read, DEEPEST) else value


def _problem(row: Any, prompt_columns: tuple[str, ...], answer_column: str, stem: str) -> tuple[Problem, bool]:
    """(problem, whether the row has its own system text)."""
    if isinstance(row, str):
        raise UnusableRow(row)
    refuse_media(row, *prompt_columns, answer_column)
    filled = [name for name in prompt_columns if _is_filled(_column(row, name))] or prompt_columns[:1]
    texts = [_prompt_text(_required(row, name), name) for name in filled]
    prompt, has_system = "\n\n".join(text for text, _ in texts), any(system for _, system in texts)
    answer = answer_text(_required(row, answer_column), answer_column)
    if mark := MEDIA_MARK.search(prompt):
        column = " + ".join(prompt_columns)
        raise UnusableRow(f"column {column!r} has {mark.group()[:40]!r}, which stands for media; problems are text")
    name = row.get(SOURCE_COLUMN)
    source = name if isinstance(name, str) and name else stem
    digest = hashlib.blake2b(f"{prompt}\0{answer}".encode(errors="replace"), digest_size=8).hexdigest()
    for used in (*prompt_columns, answer_column, SOURCE_COLUMN):
        row = without_column(row, used)
    extra = {str(key): _storable(value) for key, value in row.items()}
    return Problem(uid=f"{stem}:{digest}", prompt=prompt, answer=answer, source=source, extra=extra), has_system


def _storable(value: Any) -> Any:
    """A column in values that a trace and a checkpoint can hold: dates, times, decimals and ids of Parquet files and of
    the hub as text, any other object as the name of its type."""
    if isinstance(value, Mapping):
        return {key: _storable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_storable, value))
    if value is None or isinstance(value, str | int | float | bytes | np.generic | np.ndarray):
        return value
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return str(value) if isinstance(value, Decimal | datetime.timedelta | UUID) else f"<{type(value).__name__}>"


def refuse_media(row: Mapping[str, Any], *used: str) -> None:
    """Raises UnusableRow for a row with images, sound or video in a column other than those used. A problem is text,
    and without its media it would be a different one."""
    for name in MEDIA_COLUMNS:
        if name not in used and _is_filled(row.get(name)):
            raise UnusableRow(f"column {name!r} is filled; problems are text: leave such rows out, or drop the column")


def _beside_prompt(problem: Problem) -> list[str]:
    """Columns of `CONTEXT_COLUMNS` that hold a text which the prompt lacks."""
    texts = {key: list(_texts_in(value)) for key, value in problem.extra.items() if key.lower() in CONTEXT_COLUMNS}
    return [key for key, parts in texts.items() if any(part.strip() not in problem.prompt for part in parts)]


def _texts_in(value: Any) -> Iterator[str]:
    """The texts and numbers of a column, however nested."""
    if isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts_in(item)
    elif value is not None:
        yield str(value)


def _required(row: Mapping[str, Any], name: str) -> Any:
    value = _column(row, name)
    if value is None:
        raise UnusableRow(f"column {name!r} is {'null' if name in row else 'missing'}")
    return value


def _prompt_text(value: Any, name: str) -> tuple[str, bool]:
    """(question, whether there is a system text): from a string, or from the user messages of a conversation without
    an assistant message."""
    has_system, written = False, _written(value, list)
    if written is not value and written and all(isinstance(part, Mapping) and "role" in part for part in written):
        value = written  # any other list in brackets is a question
    if isinstance(value, list):
        texts = [message_text(m.get("content")) if isinstance(m, Mapping) else None for m in value]
        if None in texts:
            raise UnusableRow(f"column {name!r} is a list that holds something other than messages with text")
        roles = [m.get("role") for m in value]
        if not all(role in (*SYSTEM_ROLES, "user") for role in roles) or "user" not in roles:
            raise UnusableRow(f"column {name!r} has messages of the roles {roles}; must be user messages")
        has_system = not set(SYSTEM_ROLES).isdisjoint(roles)
        value = "\n\n".join(text for text, role in zip(texts, roles, strict=True) if role == "user")
    if not isinstance(value, str):
        raise UnusableRow(f"column {name!r} is {type(value).__name__}; must be text or messages")
    if not value.strip():
        raise UnusableRow(f"column {name!r} is empty")
    return value.strip(), has_system


def message_text(content: Any) -> str | None:
    """The text of a message, given as a string or as a list of text parts; None if it has other parts."""
    if isinstance(content, list) and content:
        parts = [
            part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content
        ]
        return "".join(parts) if all(isinstance(part, str) for part in parts) else None
    return content if isinstance(content, str) else None


def answer_text(value: Any, name: str) -> str:
    """The reference answer as text: x for a last line `#### x` and for boxed solutions, 27 for 27.0. Any other text is
    left as it is; after `####`, a number loses its commas."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        raise UnusableRow(f"column {name!r} is {type(value).__name__}; must be text or a number")
    if isinstance(value, float | Decimal):
        if not math.isfinite(value):
            raise UnusableRow(f"column {name!r} is {value}")
        value = int(value) if value == int(value) else value if isinstance(value, float) else f"{value.normalize():f}"
    text = str(value).strip()
    if marked := _MARKED.match(text.rpartition("\n")[2]):
        text = last_boxed(marked[1]).strip()
        text = text.replace(",", "") if INTEGER.fullmatch(text) else text
    elif (_last_part(name) == "solution" or len(text) > LONG_ANSWER) and _BOX.search(text) and not _is_json(text):
        text = boxed_answer(text)
        if text is None:
            raise UnusableRow(f"column {name!r} has a \\boxed that cannot be read: it is not closed, or empty")
        text = text.strip()
    if not text:
        raise UnusableRow(f"column {name!r} is empty")
    if text in NO_ANSWERS:
        raise UnusableRow(f"column {name!r} is {text!r}, which stands for a missing answer in NuminaMath")
    return text


def _last_part(column: str) -> str:
    """`solution` of `Row.Solution`."""
    return column.rsplit(".", 1)[-1].lower()


def _is_json(text: str) -> bool:
    """Whether a text is a JSON object or list, such as the tests of a program."""
    return any(_written(text, kind) is not text for kind in (dict, list))


def _is_text(answer: str, column: str) -> bool:
    """Whether a reference is a text and not an answer: long, of more words than an answer in words has, or with `####`
    elsewhere than in its last line."""
    words = len(_WORD.findall(answer))
    many = words > (6 if _last_part(column) in _TEXT_COLUMNS else 15)
    return len(answer) > LONG_ANSWER or many or "####" in answer


_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}+")
_TEXT_COLUMNS = ("solution", "output", "response", "completion")
"""Columns that hold a whole solution in many files."""
_MARKED = re.compile(r"\s*####(?:[ \t]+(?=[^\s#])|(?=[^\s#.]))(.+)")
"""Matches a line `#### x`, but not a heading `##### x`, nor a row of a grid."""
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_TOKEN = re.compile(
    r"[+-]?\d+(?:[.,/]\d+)*|\\[dt]?frac(?:\s*(?:\{[^{}]*\}|[^\s{}\\])){2}|\\sqrt\s*[^\s{}\[\\]"
    r"|\\[A-Za-z]+(?:\s*\{[^{}]*\})*|\S"
)


def last_boxed(text: str) -> str:
    r"""Content of the last `\boxed{...}`, with balanced braces; the whole text if there is no readable one."""
    answer = boxed_answer(text)
    return text if answer is None else answer


def boxed_answer(text: str) -> str | None:
    r"""Content of the last `\boxed{...}` or `\fbox{...}`, with balanced braces; None if there is no readable one.

    Without braces, as in `$\boxed 2$`, the box holds what follows up to the end of the formula, or else one number,
    command or character.
    """
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    start, body = boxes[-1].start(), text[boxes[-1].end() :].lstrip()
    if body.startswith("{"):
        depth = 0
        for match in re.finditer(r"\\.|[{}]", body, re.DOTALL):  # escaped braces are text
            depth += (match.group() == "{") - (match.group() == "}")
            if depth == 0:
                return body[1 : match.start()]
        return None
    line, before = body.partition("\n")[0], text[:start].replace("\\$", "")
    displayed = before.count("$$") % 2 == 1
    before = before.replace("$$", "")
    closing = "$" if before.count("$") % 2 else "\\)" if before.rfind("\\(") > before.rfind("\\)") else ""
    closing = closing or ("\\]" if before.rfind("\\[") > before.rfind("\\]") else "$$" if displayed else "")
    if closing and closing in line:
        inside = line.partition(closing)[0]
    else:
        token = _TOKEN.match(body)
        inside = token.group() if token else ""
    return inside.strip().rstrip(".,;:").strip() or None


def drop_long(
    problems: list[Problem], length: Callable[[Problem], int], max_tokens: int
) -> tuple[list[Problem], list[str]]:
    """Problems whose prompt fits, and notes on the lengths and the first dropped ones; prompts are never cut.

    Args:
        problems: The candidates.
        length: Returns the number of tokens of a problem's prompt, such as `lambda p: len(chat.prompt_ids(p))`.
        max_tokens: Largest number of tokens of a prompt that is kept.
    """
    lengths = [length(problem) for problem in problems]
    fitting = [problem for problem, tokens in zip(problems, lengths, strict=True) if tokens <= max_tokens]
    if not problems:
        return fitting, []
    notes = [f"{describe_lengths('prompts', lengths)}; rollout.max_prompt_tokens = {max_tokens}"]
    if dropped := len(problems) - len(fitting):
        notes[0] += (
            f": {dropped} over-long prompts dropped, {len(fitting)} problems left; "
            f"raise it to {max(lengths)} to keep all"
        )
        long = [(p.uid, n) for p, n in zip(problems, lengths, strict=True) if n > max_tokens][:SHOWN]
        notes += [f"{uid}: prompt of {n} tokens, at most {max_tokens} fit; dropped" for uid, n in long]
    return fitting, notes


def describe_lengths(what: str, lengths: Sequence[int]) -> str:
    """`prompts of 8 to 90 tokens (median 20)`."""
    return f"{what} of {min(lengths)} to {max(lengths)} tokens (median {statistics.median_low(lengths)})"
