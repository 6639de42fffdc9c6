"""Grain pipelines: sources are mixed by weight, shuffled by seed and batched. Their position can be saved and restored.

Every host draws whole batches, so the order of problems does not depend on the number of hosts, and a run can be
resumed on another number of them. The state is one index and a fingerprint.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import grain
import numpy as np

from grpo_roc_jax.data.config import DataConfig, split_name
from grpo_roc_jax.data.conversations import load_traces
from grpo_roc_jax.data.generated import HELD_OUT_START, TRACE_START, Generator, generator_of
from grpo_roc_jax.data.hub import HUB_PREFIX, load_hub
from grpo_roc_jax.data.near import describe_near, near_duplicates
from grpo_roc_jax.data.problems import SHOWN, LoadReport, describe_lengths, drop_long, load_problems
from grpo_roc_jax.environments.config import adapter
from grpo_roc_jax.text.chat_format import Trace, UnfitTrace
from grpo_roc_jax.types import Problem

T = TypeVar("T")

DRAWS_A_PROBLEM = 50
"""Draws from a world for each held-out problem; so many are needed only if the world is nearly exhausted."""
TASKSET_PREFIX = "verifiers:"
"""Prefix of the id of a taskset of the library verifiers."""
HARBOR_PREFIX = "harbor:"
"""Prefix of a directory with task directories of Harbor."""


class Notes(list[str]):
    """Notes on loading sources, and the number of rows that are too long."""

    left_out = 0


class Stream(Generic[T]):
    """An endless iterator of batches whose position is a small JSON object."""

    def __init__(self, batches: grain.MapDataset, fingerprint: str, notes: Notes, longest: int = 0):
        self._iterator = iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))
        self._fingerprint = fingerprint
        self._notes = notes
        self.notes = tuple(notes)
        """Notes on loading the sources, to show at the start of a run."""
        self.longest = longest
        """Largest number of tokens of a trace; 0 if they were not counted."""

    @property
    def left_out(self) -> int:
        """Number of rows of files that do not fit, and of such demonstrations of worlds drawn so far."""
        return self._notes.left_out

    def __iter__(self) -> Iterator[list[T]]:
        return self

    def __next__(self) -> list[T]:
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """Position in the stream, and the fingerprint of the stream."""
        return {**self._iterator.get_state(), "fingerprint": self._fingerprint}

    def owns(self, state: Mapping[str, Any]) -> bool:
        """Whether a position was saved by an equal stream."""
        return state.get("fingerprint") == self._fingerprint

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores a position. The next batch is the one that followed `get_state`.

        Raises:
            ValueError: The state belongs to a stream with other data, another seed or another batch size.
        """
        if not self.owns(state):
            raise ValueError(
                f"the saved position belongs to other data ({state.get('fingerprint')}, here {self._fingerprint}): "
                "sources, their contents, weights, seed, data.shuffle and batch size must equal those of the saved run "
                "(earlier versions shuffled all sources but the first in another order); --force starts the data anew"
            )
        self._iterator.set_state({key: value for key, value in state.items() if key != "fingerprint"})


@dataclass(frozen=True)
class _Addressed:
    """A random-access source of `length` elements; element i is `element(i)`."""

    element: Callable[[int], Any]
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if index >= self.length:
            raise IndexError(index)
        return self.element(int(index))


def make_problem_stream(
    config: DataConfig,
    *,
    problems: int,
    seed: int,
    prompt_length: Callable[[Problem], int] | None = None,
    max_prompt_tokens: int = 0,
    left_out: Collection[str] = (),
) -> Stream[Problem]:
    """Endless batches of training problems.

    Rows of a file, and of a world with `world_problems`, come in a new order each epoch; an endless world never
    repeats an index. Rows of training files that are also held out are dropped and counted; a world draws another
    problem in place of one that a held-out file holds.

    Args:
        config: Sources and weights.
        problems: Problems per batch.
        seed: Seed of the shuffles and the worlds.
        prompt_length: Returns the number of tokens of a problem's prompt. With it, rows of files beyond
            `max_prompt_tokens` are left out and listed in `notes`, or refused (`config.bad_rows`); none is cut.
        max_prompt_tokens: Used with `prompt_length`.
        left_out: Uids of problems that do not train. A source without any other has no share in the batches.

    Raises:
        ValueError: A source cannot be used (see `load_problems`, `check_world`), or holds what is too long.
    """
    notes = Notes()
    sources = training_problems(config, seed, notes, prompt_length, max_prompt_tokens)
    datasets = []
    contents = []
    used = []
    for index, (source, rows) in enumerate(sources):
        if len(rows) == TRACE_START:
            datasets.append(grain.MapDataset.source(rows))
            contents.append(source)
            used.append(index)
            continue
        trainable = [problem for problem in rows if problem.uid not in left_out] if left_out else rows
        if not rows or not (trainable or used or sources[index + 1 :]):
            raise ValueError(f"{source}: no problem is left to train on\n" + "\n".join(notes))
        if not trainable:
            continue
        files_before = sum(len(others) != TRACE_START for _, others in sources[:index])
        datasets.append(_epochs(trainable, config.shuffle, seed, files_before))
        named = isinstance(trainable, _Addressed)
        content = f"{source}:{len(trainable)}" if named else _digest(problem.uid for problem in trainable)
        contents.append(content + _order(config.shuffle, files_before))
        used.append(index)
    weights = [config.weights[index] for index in used] if config.weights else ()
    return _stream(datasets, contents, weights, problems, seed, notes)


def training_problems(
    config: DataConfig,
    seed: int,
    notes: Notes,
    prompt_length: Callable[[Problem], int] | None = None,
    max_prompt_tokens: int = 0,
) -> list[tuple[str, Sequence[Problem]]]:
    """(source, its training problems) for each source; see `make_problem_stream`. An endless world has `TRACE_START` of
    them. Notes on loading are appended to `notes`."""
    held_out = _held_out_prompts(config)
    by_source: list[tuple[str, Sequence[Problem]]] = []
    for source in config.sources:
        if generator := generator_of(source):
            element = partial(_hinted_problem, generator, source, seed, held_out)
            first = element(0)  # refuses a world of which nothing is left
            if prompt_length is not None:
                prompt_length(first)  # refuses problems that no rollout could begin with
            by_source.append((source, _Addressed(element, config.world_problems or TRACE_START)))
            continue
        rows = _load(source, config, notes)
        usable = _not_held_out(source, rows, lambda problem: problem.prompt, held_out, notes)
        if prompt_length is not None:
            usable = fitting_problems(usable, prompt_length, max_prompt_tokens, config, notes, f"{source}: ")
        by_source.append((source, usable))
    return by_source


def _held_out_prompts(config: DataConfig) -> frozenset[str]:
    """The prompts of all rows of the held-out files. Worlds keep held-out texts apart themselves."""
    files = [source for _, source in map(split_name, config.eval_sources) if generator_of(source) is None]
    return frozenset(problem.prompt for source in files for problem in _load(source, config, []))


def _not_held_out(
    source: str, rows: Sequence[T], prompt_of: Callable[[T], str], held_out: Collection[str], notes: list[str]
) -> list[T]:
    """The rows of a file whose prompts are not held out. Notes that count the others, and name near-duplicates of
    held-out prompts, are appended to `notes`."""
    usable = [row for row in rows if prompt_of(row) not in held_out]
    if len(usable) < len(rows):
        notes.append(f"{source}: {len(rows) - len(usable)} rows are also held out; dropped from training")
    if held_out:
        notes += describe_near(source, near_duplicates(map(prompt_of, usable), sorted(held_out)))
    return usable


def fitting_problems(
    problems: Sequence[Problem],
    prompt_length: Callable[[Problem], int],
    max_prompt_tokens: int,
    config: DataConfig,
    notes: Notes,
    prefix: str = "",
) -> list[Problem]:
    """The problems whose prompts fit. Notes on the lengths and the first problems left out are appended to `notes`,
    each after `prefix`.

    Raises:
        ValueError: A prompt does not fit, and `config.bad_rows` is `fail`.
    """
    fitting, lengths = drop_long(list(problems), prompt_length, max_prompt_tokens)
    lengths = [f"{prefix}{note}" for note in lengths]
    if len(fitting) < len(problems) and config.bad_rows == "fail":
        raise ValueError("\n".join([*lengths, f"raise rollout.max_prompt_tokens, or {_DROP}"]))
    notes += lengths
    notes.left_out += len(problems) - len(fitting)
    return fitting


_DROP = "set data.bad_rows to drop, which leaves them out"


def make_trace_stream(
    config: DataConfig,
    *,
    traces: int,
    seed: int,
    row_length: Callable[[Trace], int] | None = None,
    max_row_tokens: int = 0,
) -> Stream[Trace]:
    """Endless batches of traces for supervised fine-tuning, from worlds (demonstrated) and `messages` files.

    Traces with the prompt of a row of a held-out file are dropped or drawn anew, as in `make_problem_stream`.

    Args:
        config: `trace_sources` with `trace_weights`; if there are none, `sources` with `weights`.
        traces: Traces per batch.
        seed: Seed of the shuffles, the worlds and the demonstrators' mistakes.
        row_length: Returns the number of tokens of a trace, or raises UnfitTrace. With it, a trace that is unfit, or
            beyond `max_row_tokens`, is left out, or refused (`config.bad_rows`), since nothing is cut. For worlds
            another trace replaces it.
        max_row_tokens: Used with `row_length`.

    Raises:
        ValueError: As in `make_problem_stream`; or `sources` is used instead of `trace_sources` and holds no traces.
    """
    sources = config.trace_sources or config.sources
    weights = config.trace_weights or (config.weights if sources == config.sources else ())
    notes, longest = Notes(), 0
    held_out = _held_out_prompts(config)
    datasets = []
    contents = []
    for index, source in enumerate(sources):
        if generator := generator_of(source):
            element = partial(_generated_trace, generator, source, seed, config, held_out)
            element(0)  # refuses a world of which nothing is left
            if row_length is not None:
                element = partial(_fitting_trace, element, row_length, max_row_tokens, source, config.bad_rows, notes)
                longest = max(longest, max_row_tokens)
            datasets.append(grain.MapDataset.source(_Addressed(element, TRACE_START)))
            contents.append(source + str(config.demonstrations))
            continue
        rows, report = _load_traces(source, config)
        notes.append(str(report))
        rows = _not_held_out(source, rows, lambda trace: trace.problem.prompt, held_out, notes)
        if not rows:
            raise ValueError(f"{source}: no demonstration is left to train on\n" + "\n".join(notes))
        if row_length is not None:
            rows, lengths = _writable_traces(rows, row_length, source, config.bad_rows, notes)
            rows = _fitting_traces(rows, lengths, max_row_tokens, source, config.bad_rows, notes)
            longest = max(longest, *(tokens for tokens in lengths if tokens <= max_row_tokens))
        files_before = sum(generator_of(other) is None for other in sources[:index])
        datasets.append(_epochs(rows, config.shuffle, seed, files_before))
        content = _digest(f"{trace.problem.prompt}\0{trace.turns}" for trace in rows)
        contents.append(content + _order(config.shuffle, files_before))
    return _stream(datasets, contents, weights, traces, seed, notes, longest)


def first_problems(config: DataConfig, seed: int, count: int) -> list[tuple[str, list[Problem]]]:
    """(source, its first `count` training problems) for each generated source, not compared with held-out files."""
    return [
        (source, [_hinted_problem(generator, source, seed, (), index) for index in range(count)])
        for source in config.sources
        if (generator := generator_of(source))
    ]


def first_demonstrations(config: DataConfig, seed: int, count: int) -> list[tuple[str, list[Trace]]]:
    """(source, demonstrations) for each source of the supervised stage: the first `count` of a generated one, all of a
    file. They are not compared with held-out files."""
    return [
        (
            source,
            [_generated_trace(generator, source, seed, config, (), index) for index in range(count)]
            if (generator := generator_of(source))
            else _load_traces(source, config)[0],
        )
        for source in config.trace_sources or config.sources
    ]


OTHER_PROBLEMS = 1 << 28
"""Added to the index of a problem of a world that is held out, to get the index of its replacement. All replacements of
a demonstration, also those of `OTHER_TRACES`, stay below `HELD_OUT_START`."""
MOST_HELD_OUT = 1000
"""Draws of a world that may be held out one after the other; so many are only if nearly all of its texts are."""


def _training_problem(generator: Generator, source: str, seed: int, held_out: Collection[str], index: int) -> Problem:
    """Problem number `index` of a generated source, or the first one after it, in steps of `OTHER_PROBLEMS`, whose
    prompt is not held out.

    Raises:
        ValueError: `MOST_HELD_OUT` of them are held out.
    """
    for tried in range(MOST_HELD_OUT):
        problem = generator.problem(source, seed, index + tried * OTHER_PROBLEMS)
        if problem.prompt not in held_out:
            return problem
    raise ValueError(
        f"{source}: {MOST_HELD_OUT} problems drawn one after the other are all in the files of data.eval_sources, so "
        "(almost) none is left to train on; hold out fewer, or train on another source or level"
    )


def _hinted_problem(generator: Generator, source: str, seed: int, held_out: Collection[str], index: int) -> Problem:
    return generator.with_hints(_training_problem(generator, source, seed, held_out, index))


def _generated_trace(
    generator: Generator, source: str, seed: int, config: DataConfig, held_out: Collection[str], index: int
) -> Trace:
    """Demonstration number `index` of a generated source."""
    problem = _training_problem(generator, source, seed, held_out, TRACE_START + index)
    return generator.trace(problem, config.demonstrations, seed)


def eval_problems(config: DataConfig, notes: list[str] | None = None) -> list[Problem]:
    """The held-out problems, evenly from each source, the same for every seed of a run. Notes on loading are appended
    to `notes`.

    Raises:
        ValueError: `eval_problems` is positive, but every training source is a file and `eval_sources` is empty.
    """
    sources = config.eval_sources or tuple(source for source in config.sources if generator_of(source))
    if not sources and config.eval_problems:
        raise ValueError(
            f"data.eval_problems = {config.eval_problems} but nothing is held out: the training sources are files; "
            "name a source in data.eval_sources or set data.eval_problems to 0"
        )
    chosen: list[Problem] = []
    for i, (name, source) in enumerate(map(split_name, sources)):
        count = config.eval_problems * (i + 1) // len(sources) - config.eval_problems * i // len(sources)
        if generator := generator_of(source):
            held_out = distinct_problems(generator, source, config.eval_seed, count)
            if len(held_out) < count and notes is not None:
                notes.append(
                    f"{source}: {len(held_out)} distinct held-out problems of {count} requested; no more appeared"
                )
        else:
            rows = _load(source, config, [] if notes is None else notes)
            rng = np.random.default_rng([config.eval_seed, i])
            held_out = [rows[k] for k in sorted(rng.permutation(len(rows))[:count])]
        chosen += [replace(problem, source=name) for problem in held_out] if name else held_out
    return chosen


def distinct_problems(generator: Generator, source: str, seed: int, count: int) -> list[Problem]:
    """The first `count` distinct held-out problems of a generated source, or fewer if it is too small. Repeated
    problems would count twice in an accuracy, whose confidence interval assumes independent problems."""
    by_prompt: dict[str, Problem] = {}
    for index in range(count * DRAWS_A_PROBLEM):
        if len(by_prompt) == count:
            break
        problem = generator.problem(source, seed, HELD_OUT_START + index)
        by_prompt.setdefault(problem.prompt, problem)
    return list(by_prompt.values())


def _load(source: str, config: DataConfig, notes: list[str]) -> list[Problem]:
    if source.startswith(TASKSET_PREFIX):
        tasks = list(
            adapter("contrib.environments.verifiers_tasks", "verifiers").taskset_problems(
                source.removeprefix(TASKSET_PREFIX)
            )
        )
        notes.append(f"{source}: {len(tasks)} tasks")
        return tasks
    if source.startswith(HARBOR_PREFIX):
        module = adapter("contrib.environments.harbor_tasks", "harbor")
        tasks = list(module.harbor_problems(source.removeprefix(HARBOR_PREFIX)))
        notes.append(f"{source}: {len(tasks)} tasks")
        return tasks
    load = load_hub if source.startswith(HUB_PREFIX) else load_problems
    rows, report = load(
        source, prompt_column=config.prompt_column, answer_column=config.answer_column, bad_rows=config.bad_rows
    )
    notes.append(str(report))
    return rows


def _load_traces(source: str, config: DataConfig) -> tuple[list[Trace], LoadReport]:
    try:
        return load_traces(source, bad_rows=config.bad_rows)
    except ValueError as error:
        if config.trace_sources:
            raise
        raise ValueError(
            "the supervised stage learns from data.sources, since data.trace_sources is empty, and this file cannot be "
            "read as demonstrations. Set sft.steps 0 to train without that stage, or name demonstrations in "
            f"data.trace_sources\n{error}"
        ) from error


def _writable_traces(
    traces: Sequence[Trace], row_length: Callable[[Trace], int], source: str, bad_rows: str, notes: Notes
) -> tuple[list[Trace], list[int]]:
    """The traces of a file that the chat format can write, and their lengths.

    Raises:
        ValueError: It can write none, or not all and `bad_rows` is `fail`.
    """
    fitting, lengths, unfit = [], [], []
    for trace in traces:
        try:
            lengths.append(row_length(trace))
            fitting.append(trace)
        except UnfitTrace as error:
            unfit.append(error)
    if not unfit:
        return fitting, lengths
    text = f"{source}: {len(unfit)} of {len(traces)} conversations do not fit"
    named = [f"{source}: {error}" for error in unfit[:SHOWN]]
    calls = [error.calls for error in unfit if error.calls]
    remedy = [f"text.max_calls_per_turn {max(calls)} keeps {len(calls)} of these"] if calls else []
    if not fitting or bad_rows == "fail":
        raise ValueError("\n".join(["; ".join([text, *remedy, *([_DROP] if fitting else [])]), *named]))
    notes += ["; ".join([f"{text} and are left out, {len(fitting)} are left", *remedy]), *named]
    notes.left_out += len(unfit)
    return fitting, lengths


def _fitting_traces(
    traces: Sequence[Trace], lengths: Sequence[int], most: int, source: str, bad_rows: str, notes: Notes
) -> list[Trace]:
    """The traces of a file that fit into a row.

    Raises:
        ValueError: None fits, or one does not fit and `bad_rows` is `fail`.
    """
    text = f"{source}: {describe_lengths('conversations', lengths)}; batch.row_length = {most}"
    long = [(trace.problem.uid, n) for trace, n in zip(traces, lengths, strict=True) if n > most]
    named = [f"{source}: {uid}: conversation of {n} tokens, at most {most} fit" for uid, n in long[:SHOWN]]
    if not long:
        notes.append(text)
        return list(traces)
    text += f": {len(long)} of {len(traces)} do not fit"
    if len(long) == len(traces) or bad_rows == "fail":
        other = f", or {_DROP}" if len(long) < len(traces) else ""
        raise ValueError("\n".join([f"{text}; raise it{other}, as nothing is cut", *named]))
    notes += [f"{text} and are left out, {len(traces) - len(long)} are left", *named]
    notes.left_out += len(long)
    return [trace for trace, n in zip(traces, lengths, strict=True) if n <= most]


OTHER_TRACES = 1 << 32
"""Added to the index of a demonstration of a world that does not fit, to get the index of its replacement."""
TRIES = 50


def _fitting_trace(
    element: Callable[[int], Trace],
    row_length: Callable[[Trace], int],
    most: int,
    source: str,
    bad_rows: str,
    notes: Notes,
    index: int,
) -> Trace:
    """Demonstration number `index` of a world, or the first one after it, in steps of `OTHER_TRACES`, that fits into a
    row.

    Raises:
        ValueError: It does not fit and `bad_rows` is `fail`, or `TRIES` of them do not fit.
    """
    for tried in range(TRIES):
        trace = element(index + tried * OTHER_TRACES)
        try:
            tokens = row_length(trace)
        except UnfitTrace as error:
            problem = str(error)
        else:
            if tokens <= most:
                return trace
            problem = f"{trace.problem.uid}: demonstration of {tokens} tokens, batch.row_length = {most}; raise it"
        if bad_rows == "fail":
            raise ValueError(f"{source}: {problem}, or {_DROP}")
        notes.left_out += 1
    raise ValueError(f"{source}: {TRIES} demonstrations do not fit, the last one: {problem}")


def _epochs(rows: Sequence[Any], shuffle: bool, seed: int, files_before: int) -> grain.MapDataset:
    """The rows of a file, again and again; `files_before` counts those before it among the sources. Each file has an
    order of its own, so that rows of parallel files do not meet in a batch."""
    dataset = grain.MapDataset.source(rows)
    own_seed = int(np.random.SeedSequence([seed, files_before]).generate_state(1)[0]) if files_before else seed
    return (dataset.seed(own_seed).shuffle() if shuffle else dataset).repeat()


def _order(shuffle: bool, files_before: int) -> str:
    """The part of a fingerprint for the order of the rows of a file; empty for the first one by default, as in
    positions of earlier versions."""
    if not shuffle:
        return ":in order"
    return f":shuffle {files_before}" if files_before else ""


def _stream(
    datasets: list[grain.MapDataset],
    contents: Sequence[str],
    weights: Sequence[float],
    size: int,
    seed: int,
    notes: Notes,
    longest: int = 0,
) -> Stream:
    """Batches of `size` elements of the mixture. `contents` are part of the fingerprint."""
    mixed = datasets[0]
    if len(datasets) > 1:
        mixed = grain.MapDataset.mix(datasets, list(weights) or [1] * len(datasets))

    def batch(index: int) -> list[Any]:
        return [mixed[i] for i in range(index * size, (index + 1) * size)]

    batches = grain.MapDataset.source(_Addressed(batch, len(mixed) // size))
    return Stream(batches, _digest([*contents, *map(str, weights), str(seed), str(size)]), notes, longest)


def _digest(texts: Any) -> str:
    return hashlib.blake2b(json.dumps(list(texts)).encode(), digest_size=8).hexdigest()
