"""The trajectory log: one JSON line per trajectory, from which selection and advantages can be recomputed.

Each step has a file `trajectories/step_00000012.jsonl` (evaluations: `eval_...`), written under another name and then
renamed. Text and numbers are plain JSON. Per-token arrays are base64 of their raw little-endian bytes: `tokens` int32,
`logprobs` float32, `policy_mask` packed bits; `versions` are run lengths. `log_ratio` and `entropy` are float16 of the
policy tokens alone, where a method scores its trajectories before the update. `read_trace` restores the exact values.

Fields of a line: step, group (index of the problem in the step), problem, sample, condition, temperature,
prompt_length, opening (what an environment appended to the problem, if anything), stop, fault (what failed outside the
policy, if anything did), seconds, turns (text, calls, results), tokens, policy_mask, logprobs, versions, context (texts
that the policy did not write: prompt, observations), verdict, penalties, kept, why, advantage (of the policy tokens;
`advantages` if they differ). `record.index` writes an index beside the log, which lists and filters read.
"""

import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from grpo_roc_jax.process.points import reach
from grpo_roc_jax.record import codec, index
from grpo_roc_jax.settings.files import local_path, parse_json
from grpo_roc_jax.types import Condition, Group, Problem, TrainRow, Trajectory, Verdict

log = logging.getLogger(__name__)

FOLDER = "trajectories"
NAME = re.compile(r"(step|eval)_(\d{8,})\.jsonl")
SCORED = ("log_ratio", "entropy")
"""The rows of `TraceRecord.scored`."""
Kind = Literal["step", "eval"]
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, eq=False)
class TraceRecord:
    """One trajectory and its outcome in the step."""

    step: int
    group: int
    """Index of its problem in the step, which restores the groups together with the order of the file; -1 for
    trajectories in no group."""
    problem: Problem
    trajectory: Trajectory
    verdict: Verdict | None
    """None for a trajectory that was removed without a score (an infrastructure failure, or cancelled)."""
    kept: bool
    """Whether selection kept it."""
    why: str
    """Reason of the selection, or of the removal."""
    penalties: Mapping[str, float] = field(default_factory=dict)
    """Penalties that selection ranked successes by: total, error, format."""
    advantages: np.ndarray | None = None
    """float32[T] as trained on in this step, 0 off the policy mask; None if it was not trained on (dropped, or
    still in the buffer)."""
    context: tuple[str, ...] = ()
    """Text of each run of tokens outside the policy mask, in order; empty without a tokenizer."""
    scored: np.ndarray | None = None
    """float16[2,T], in nats, 0 off the policy mask: log of the ratio between the probability under the parameters
    before the update and that of sampling, and entropy of the former. None if no scoring pass read the trajectory."""


class SelectionLike(Protocol):
    """The part of `method.roc.Selection` that the log reads."""

    indices: np.ndarray
    reasons: tuple[str, ...]
    penalties: np.ndarray
    error_penalties: np.ndarray
    format_penalties: np.ndarray


def step_records(
    step: int,
    groups: Sequence[Group],
    selections: Sequence[SelectionLike],
    *,
    removed: Iterable[tuple[Problem, Trajectory]] = (),
    trained: Sequence[Group] = (),
    rows: Sequence[TrainRow] = (),
    outside: Sequence[Group] = (),
) -> list[TraceRecord]:
    """Records of a step, group by group; then those trained on from the buffer, and those removed.

    Args:
        step: Training steps done, including the one that these belong to.
        groups: As scored, before selection.
        selections: One per group.
        removed: Trajectories removed from their group before selection.
        trained: Groups of this step's update. Their trajectories are those of `groups`, or copies, which are matched by
            value: problem, sample, condition, policy version and tokens.
        rows: Their training rows, one per trajectory, in order. A row may have another prompt than the one that the
            trajectory was sampled under; the response is the same.
        outside: Scored trajectories that belong to no group: replaced ones, drafts, written hints, explanations.
    """
    members = [(group.problem, trajectory) for group in trained for trajectory in group.trajectories]
    if rows and len(rows) != len(members):
        raise ValueError(f"got {len(rows)} rows for {len(members)} trained trajectories; pass one row per trajectory")
    trained_as = {
        trajectory: (_aligned(row.advantages, trajectory), _scored(row, trajectory))
        for (_, trajectory), row in zip(members, rows, strict=False)
    }
    here = {trajectory for group in groups for trajectory in group.trajectories}  # trajectories compare by identity
    # Only copies are matched by value: a step may have equal rollouts of a problem that it has twice.
    copies = {_identity(problem, t): trained_as.get(t) for problem, t in members if t not in here}
    records, sampled = [], set()
    for group_index, (group, selection) in enumerate(zip(groups, selections, strict=True)):
        kept_indices = set(selection.indices.tolist())
        for i, (trajectory, verdict) in enumerate(group.pairs):
            parts = (selection.penalties[i], selection.error_penalties[i], selection.format_penalties[i])
            penalties = dict(zip(("total", "error", "format"), map(float, parts), strict=True))
            identity = _identity(group.problem, trajectory)
            sampled.add(identity)
            advantages, scored = trained_as.get(trajectory) or copies.get(identity) or (None, None)
            outcome = (i in kept_indices, selection.reasons[i], penalties, advantages)
            records.append(TraceRecord(step, group_index, group.problem, trajectory, verdict, *outcome, scored=scored))
    for group in outside:
        for trajectory, verdict in group.pairs:
            records.append(TraceRecord(step, -1, group.problem, trajectory, verdict, False, "left by a wave"))
    for group in trained:
        for trajectory, verdict in group.pairs:
            if _identity(group.problem, trajectory) not in sampled:
                advantages, scored = trained_as.get(trajectory, (None, None))
                outcome = (True, "buffered", {}, advantages)
                records.append(TraceRecord(step, -1, group.problem, trajectory, verdict, *outcome, scored=scored))
    return records + removed_records(step, removed)


def _identity(problem: Problem, trajectory: Trajectory) -> tuple[str, int, Condition, int, bytes]:
    """What identifies a trajectory within a run: problem, sample, condition, newest policy version and tokens."""
    newest = int(trajectory.versions.max(initial=-1))
    return problem.uid, trajectory.sample, trajectory.condition, newest, trajectory.tokens.tobytes()


def _aligned(values: np.ndarray, trajectory: Trajectory) -> np.ndarray:
    """Values of a row, aligned with the sampled trajectory, which may have another prompt."""
    if len(values) == trajectory.length:
        return values
    response = trajectory.length - trajectory.prompt_length
    return np.concatenate([np.zeros(trajectory.prompt_length, np.float32), values[len(values) - response :]])


def _scored(row: TrainRow, trajectory: Trajectory) -> np.ndarray | None:
    if row.scored is None:
        return None
    logprobs, entropies = (_aligned(values, trajectory) for values in row.scored)
    ratio_and_entropy = np.stack([logprobs - trajectory.logprobs, entropies])
    with np.errstate(over="ignore"):  # a ratio beyond e^65504 becomes infinite
        return np.where(trajectory.policy_mask, ratio_and_entropy, 0).astype(np.float16)


def eval_records(
    step: int, groups: Sequence[Group], removed: Iterable[tuple[Problem, Trajectory]] = ()
) -> list[TraceRecord]:
    """Records of an evaluation, where nothing is selected; then those of trajectories that could not be scored."""
    return [
        *(
            TraceRecord(step, group_index, group.problem, trajectory, verdict, False, "evaluation")
            for group_index, group in enumerate(groups)
            for trajectory, verdict in group.pairs
        ),
        *removed_records(step, removed),
    ]


def removed_records(step: int, removed: Iterable[tuple[Problem, Trajectory]]) -> list[TraceRecord]:
    return [TraceRecord(step, -1, problem, t, None, False, f"removed: {t.stop}") for problem, t in removed]


def groups_of(records: Iterable[TraceRecord]) -> list[Group]:
    """The scored groups before selection, in order, without removed trajectories."""
    members: dict[int, list[TraceRecord]] = {}
    for record in records:
        if record.group >= 0 and record.verdict is not None:
            members.setdefault(record.group, []).append(record)
    return [
        Group(
            members_of_group[0].problem,
            tuple(r.trajectory for r in members_of_group),
            tuple(r.verdict for r in members_of_group),
        )
        for _, members_of_group in sorted(members.items())
    ]


def to_line(record: TraceRecord, decode: Decode | None = None) -> str:
    """The JSON line of a record, without line end. With `decode`, `context` is computed."""
    return _joined(*_fields(record, decode))


def _fields(record: TraceRecord, decode: Decode | None) -> tuple[dict[str, Any], dict[str, str]]:
    """The fields of a line, and its long arrays in base64."""
    trajectory = record.trajectory
    arrays = codec.token_arrays(trajectory)
    line: dict[str, Any] = {
        "step": int(record.step),
        "group": int(record.group),
        "problem": codec.pack(record.problem),
        **codec.trajectory_to_json(trajectory),
        "versions": _run_lengths(arrays["versions"]),
        "context": list(context_of(trajectory, decode) if decode else record.context),
        "verdict": None if record.verdict is None else codec.pack(record.verdict),
        "penalties": dict(record.penalties),
        "kept": bool(record.kept),
        "why": record.why,
    }
    long = {
        "tokens": codec.encode_array(arrays["tokens"]),
        "policy_mask": codec.encode_array(np.packbits(arrays["policy_mask"])),
        "logprobs": codec.encode_array(arrays["logprobs"]),
    }
    if record.advantages is not None:
        line["advantage"], array = _packed_advantages(record.advantages, arrays["policy_mask"])
        if array:
            long["advantages"] = array
    if record.scored is not None:
        inside = record.scored[:, arrays["policy_mask"]]
        long |= {name: codec.encode_array(values) for name, values in zip(SCORED, inside, strict=True)}
    return line, long


def _joined(line: Mapping[str, Any], long: Mapping[str, str]) -> str:
    # Base64 needs no escaping, and the JSON encoder would scan every letter of it.
    return json.dumps(line)[:-1] + "".join([f', "{name}": "{text}"' for name, text in long.items()]) + "}"


def from_json(fields: Mapping[str, Any]) -> TraceRecord:
    """The record of a parsed line; separate from parsing, since a viewer parses thousands and unpacks a few."""
    tokens = codec.decode_array(fields["tokens"], np.int32)
    bits = codec.decode_array(fields["policy_mask"], np.uint8)
    mask = np.unpackbits(bits, count=len(tokens)).astype(bool) if len(tokens) else np.zeros(0, bool)
    values, lengths = np.array(fields["versions"], np.int32).reshape(-1, 2).T
    arrays = {
        "tokens": tokens,
        "policy_mask": mask,
        "logprobs": codec.decode_array(fields["logprobs"], np.float32),
        "versions": np.repeat(values, lengths),
    }
    return TraceRecord(
        step=fields["step"],
        group=fields["group"],
        problem=codec.unpack(Problem, fields["problem"]),
        trajectory=codec.trajectory_from_json(fields, arrays),
        verdict=None if fields["verdict"] is None else codec.unpack(Verdict, fields["verdict"]),
        kept=fields["kept"],
        why=fields["why"],
        penalties=fields["penalties"],
        advantages=_unpacked_advantages(fields, mask),
        context=tuple(fields["context"]),
        scored=_unpacked_scores(fields, mask),
    )


class TraceWriter:
    """Writes the files of steps under `trajectories/` of a run; a full disk loses traces but never ends the run.

    Args:
        run_dir: Directory of the run.
        every: Steps between traces, as `log.traces`; 0 writes none.
        decode: Ids -> text, for the prompts and observations of the context.
    """

    def __init__(self, run_dir: str | Path, every: int = 1, decode: Decode | None = None) -> None:
        self.folder = Path(run_dir) / FOLDER
        self.failures = 0
        """Number of steps whose trajectories could not be written."""
        self.decode = decode
        self._pieces = index.Pieces(index.folder_of(self.folder / "log"), decode) if decode else None
        self._every = every
        self._fresh = True

    def due(self, step: int) -> bool:
        """Whether trajectories of this step are saved."""
        return self._every > 0 and step % self._every == 0

    def write(self, step: int, records: Iterable[TraceRecord], kind: Kind = "step") -> bool:
        """Writes the records of a step if traces of it are saved; True when they are on disk.

        Writing a step again replaces its file. The first step of a process removes the files of later steps, which a
        killed run left and this one will write again.
        """
        if not self.due(step):
            return False
        if self._fresh:
            self.cut(step - 1)
        path = self.folder / f"{kind}_{step:08d}.jsonl"
        draft = path.with_suffix(".part")
        try:
            records = list(records)
            fields = [_fields(record, self.decode) for record in records]
            lines = [(_joined(*line_parts) + "\n").encode("ascii") for line_parts in fields]
            content = b"".join(lines)
            reach("traces.write")
            self.folder.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(content)
            os.replace(draft, path)
        except Exception as error:  # a failure of the log must not end the run
            self._failed(step, error, draft)
            return False
        with suppress(Exception):  # readers rebuild the index, and show ids for tokens without text
            rows = [index.row(line) for line, _ in fields]
            index.save(path, index.encode(kind, step, rows, list(map(len, lines)), content[-index.TAIL :]))
            if self._pieces:
                self._pieces.add(record.trajectory.tokens for record in records)
        return True

    def cut(self, step: int) -> None:
        """Removes files of steps after `step`."""
        self._fresh = False
        for path, _, file_step in trace_files(self.folder):
            if file_step > step:
                with suppress(OSError):  # the repeated step will replace it
                    path.unlink(missing_ok=True)
                    index.index_file(path).unlink(missing_ok=True)

    def _failed(self, step: int, error: Exception, draft: Path) -> None:
        if self.failures % 20 == 0:
            log.warning("trajectories of step %d are not kept: %r (the run continues)", step, error)
        self.failures += 1
        try:
            draft.unlink(missing_ok=True)
        except OSError:
            log.debug("%s could not be removed", draft)


def trace_files(folder: str | Path) -> list[tuple[Path, Kind, int]]:
    """(path, kind, step) of the files of a run, oldest first. `folder`: the run directory or `trajectories/`."""
    folder = local_path(folder)
    folder = folder / FOLDER if (folder / FOLDER).is_dir() else folder
    if not folder.is_dir():
        return []
    matches = [(path, NAME.fullmatch(path.name)) for path in folder.iterdir()]
    files = [(path, match[1], int(match[2])) for path, match in matches if match]
    return sorted(files, key=lambda entry: (entry[2], entry[1]))


def recorded_steps(run_dir: str | Path, step: int | None = None) -> list[int]:
    """The training steps of a run that have trajectories, in order; at least one, and `step` among them if it is given.

    Raises:
        ValueError: There is no such directory, or it has no trajectories of steps, or none of `step`.
    """
    if not local_path(run_dir).is_dir():
        raise ValueError(f"{run_dir}: no such directory; name that of a run")
    steps = sorted({number for _, kind, number in trace_files(run_dir) if kind == "step"})
    if not steps:
        raise ValueError(f"{run_dir} has no trajectories of steps; name the directory of a run with log.traces above 0")
    if step is not None and step not in steps:
        raise ValueError(f"{run_dir} has no trajectories of step {step}; it has steps {steps[0]} to {steps[-1]}")
    return steps


def read_trace(run_dir: str | Path, step: int | None = None, kind: Kind = "step") -> Iterator[TraceRecord]:
    """Records of a run or of one of its steps, in the order they were written. Lines that cannot be read are left out,
    with a warning that names file and lines."""
    for path, found_kind, found_step in trace_files(run_dir):
        if found_kind == kind and (step is None or found_step == step):
            unreadable = []
            with open(path, "rb") as file:
                for number, line in enumerate(file, 1):
                    if (record := record_of(line)) is None:
                        unreadable.append(number)
                    else:
                        yield record
            index.warn_of_lines(path, unreadable)


def record_of(line: bytes) -> TraceRecord | None:
    """The record in a line of a log; None if the line is damaged."""
    try:
        return from_json(parse_json(line, "a line of the trajectory log"))
    except Exception:  # whatever a damaged line leads to
        return None


def runs_of(mask: np.ndarray) -> list[tuple[int, int, bool]]:
    """(start, end, value) of each run of equal values."""
    return [(start, end, bool(mask[start])) for start, end in _spans(mask)]


def _spans(values: np.ndarray) -> list[tuple[int, int]]:
    """(start, end) of each run of equal values."""
    if not len(values):
        return []
    edges = (np.flatnonzero(values[1:] != values[:-1]) + 1).tolist()
    return list(pairwise([0, *edges, len(values)]))


def context_of(trajectory: Trajectory, decode: Decode) -> tuple[str, ...]:
    """Text of each run of tokens outside the policy mask."""
    tokens = trajectory.tokens.tolist()
    return tuple(decode(tokens[start:end]) for start, end, policy in runs_of(trajectory.policy_mask) if not policy)


def _run_lengths(values: np.ndarray) -> list[list[int]]:
    """[[value, length], ...]."""
    return [[int(values[start]), end - start] for start, end in _spans(values)]


def _packed_advantages(advantages: np.ndarray, mask: np.ndarray) -> tuple[float, str]:
    """(mean over the policy tokens, the encoded array if they differ)."""
    inside = np.asarray(advantages, np.float32)[mask]
    if not len(inside) or (inside == inside[0]).all():
        return (float(inside[0]) if len(inside) else 0.0), ""
    return float(inside.mean()), codec.encode_array(np.where(mask, advantages, 0).astype(np.float32))


def _unpacked_advantages(fields: Mapping[str, Any], mask: np.ndarray) -> np.ndarray | None:
    if "advantages" in fields:
        return codec.decode_array(fields["advantages"], np.float32)
    if "advantage" not in fields:
        return None
    return np.where(mask, np.float32(fields["advantage"]), np.float32(0))


def _unpacked_scores(fields: Mapping[str, Any], mask: np.ndarray) -> np.ndarray | None:
    if SCORED[0] not in fields:
        return None
    scored = np.zeros((len(SCORED), len(mask)), np.float16)
    scored[:, mask] = [codec.decode_array(fields[name], np.float16) for name in SCORED]
    return scored


def advantage_of(record: TraceRecord) -> float | None:
    """Mean advantage of the policy tokens; None if the trajectory was not trained on."""
    if record.advantages is None:
        return None
    inside = record.advantages[record.trajectory.policy_mask]
    return float(inside.mean()) if len(inside) else 0.0
