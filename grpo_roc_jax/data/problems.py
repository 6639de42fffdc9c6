"""Converts JSONL and Parquet files to problems. Columns are detected by common names; bad rows are named and counted.

Formats that load without settings: TRL (`prompt`, `answer` or `solution` or `ground_truth`), verl and SkyRL (`prompt`
as messages, `reward_model.ground_truth` or `reward_spec.ground_truth`, `data_source`), verifiers (`question`,
`answer`), GSM8K (`question`, `answer` ending in `#### x`), MATH and AIME (`problem`, `answer` or a boxed `solution`).
"""

import datetime
import hashlib
import itertools
import json
import math
import re
import statistics
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
    "target",
    "label",
    "output",
    "solution",
)
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
                f"without \\boxed{{}} or #### ({_listed(self.long_answers)}), {NO_EQUAL}; for a reward "
                "function or a judge of your own, or name another column in data.answer_column"
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
    prompt_column = prompt_column or _detect(usable, PROMPT_COLUMNS, path, "data.prompt_column")
    answer_column = answer_column or _detect(usable, ANSWER_COLUMNS, path, "data.answer_column")
    problems: list[Problem] = []
    seen: dict[str, tuple[int, str]] = {}
    bad: list[BadRow] = []
    own_form: list[int] = []
    long_answers: list[int] = []
    rows = duplicates = own_system = 0
    for number, row in itertools.chain(first_rows, stream):
        rows += 1
        try:
            problem, has_system = _problem(row, prompt_column, answer_column, stem)
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
        problems.append(problem)
    report = LoadReport(
        path,
        rows,
        len(problems),
        prompt_column,
        answer_column,
        tuple(bad),
        duplicates,
        own_system,
        own_form=tuple(own_form),
        long_answers=tuple(long_answers),
    )
    report.check(bad_rows)
    return problems, report


def read_rows(path: Path) -> Iterator[Row]:
    """Rows of a JSONL or Parquet file; a row that cannot be decoded is replaced by the reason.

    Raises:
        ValueError: The file is missing, unreadable or of another kind.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a directory; name a .jsonl or .parquet file")
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
        raise ValueError(f"{path}: cannot read {path.suffix!r} files; must be .jsonl or .parquet")


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


def _detect(rows: list[Mapping[str, Any]], candidates: tuple[str, ...], path: str, field: str) -> str:
    """The first candidate column that most of the rows have, else the first that any row has."""
    filled = {name: sum(_column(row, name) is not None for row in rows) for name in candidates}
    for enough in (len(rows) // 2 + 1, 1):
        for name in candidates:
            if filled[name] >= enough:
                return name
    columns = ", ".join(sorted({str(key) for row in rows for key in row}))
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


def _written(value: Any, kind: type) -> Any:
    """An object or a list that a column holds as JSON text, as in tables without nesting; any other value as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith("{" if kind is dict else "["):
        return value
    try:
        read = json.loads(value)
    except (RecursionError, ValueError):
        return value
    return read if isinstance(read, kind) and not depth_over(read, DEEPEST) else value


def _problem(row: Any, prompt_column: str, answer_column: str, stem: str) -> tuple[Problem, bool]:
    """(problem, whether the row has its own system text)."""
    if isinstance(row, str):
        raise UnusableRow(row)
    refuse_media(row, prompt_column, answer_column)
    prompt, has_system = _prompt_text(_required(row, prompt_column), prompt_column)
    answer = answer_text(_required(row, answer_column), answer_column)
    if mark := MEDIA_MARK.search(prompt):
        raise UnusableRow(
            f"column {prompt_column!r} has {mark.group()[:40]!r}, which stands for media; problems are text"
        )
    name = row.get(SOURCE_COLUMN)
    source = name if isinstance(name, str) and name else stem
    digest = hashlib.blake2b(f"{prompt}\0{answer}".encode(errors="replace"), digest_size=8).hexdigest()
    used = {prompt_column.split(".")[0], answer_column.split(".")[0], SOURCE_COLUMN}
    extra = {str(key): _storable(value) for key, value in row.items() if key not in used}
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
        value = row.get(name)
        filled = bool(value) if isinstance(value, str | list | tuple | Mapping) else value is not None
        if filled and name not in used:
            raise UnusableRow(f"column {name!r} is filled; problems are text: leave such rows out, or drop the column")


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
    """The reference answer as text: x for `#### x` and boxed solutions, 1234 for `1,234`, 27 for 27.0."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        raise UnusableRow(f"column {name!r} is {type(value).__name__}; must be text or a number")
    if isinstance(value, float | Decimal):
        if not math.isfinite(value):
            raise UnusableRow(f"column {name!r} is {value}")
        value = int(value) if value == int(value) else value if isinstance(value, float) else f"{value.normalize():f}"
    text = str(value)
    if "####" in text:
        text = last_boxed(text.rsplit("####", 1)[1])
    elif (name.rsplit(".", 1)[-1] == "solution" or len(text) > LONG_ANSWER) and _BOX.search(text):
        text = boxed_answer(text)
        if text is None:
            raise UnusableRow(f"column {name!r} has a \\boxed that cannot be read: it is not closed, or empty")
    text = text.strip()
    if len(text) < 1000 and INTEGER.fullmatch(text):
        text = str(int(text.replace(",", "")))
    if not text:
        raise UnusableRow(f"column {name!r} is empty")
    return text


def _is_text(answer: str, column: str) -> bool:
    """Whether a reference is a text and not an answer: long, or of more words than an answer in words has."""
    words = len(_WORD.findall(answer))
    return len(answer) > LONG_ANSWER or words > (6 if column.rsplit(".", 1)[-1] in _TEXT_COLUMNS else 15)


_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}+")
_TEXT_COLUMNS = ("solution", "output", "response", "completion")
"""Columns that hold a whole solution in many files."""
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
