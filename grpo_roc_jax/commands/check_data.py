"""Shows how a file of problems or conversations is read: `grpo-roc check-data FILE [CONFIG.yaml] [--section.field
value]`.

Prints its columns and which of them are used, three rendered prompts, the lengths, and the limits to set.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from grpo_roc_jax.config import DEFAULT_CONFIG, Config
from grpo_roc_jax.data.conversations import load_traces
from grpo_roc_jax.data.problems import LOOKED_AT, SOURCE_COLUMN, describe_lengths, load_problems, read_rows
from grpo_roc_jax.data.problems import SHOWN as MOST_NAMED
from grpo_roc_jax.run.components import make_registry, resolve_text, tool_schemas
from grpo_roc_jax.settings.cli import config_errors, load_config
from grpo_roc_jax.text.chat_format import ChatFormat, Trace, UnfitTrace, make_chat
from grpo_roc_jax.text.tokenizer import load_tokenizer

SHOWN = 3
"""Number of rendered examples."""


def column_lines(path: Path) -> Iterator[str]:
    """One line for each column of the first rows: its types, and the number of rows that have it."""
    rows = [row for _, row in islice(read_rows(path), LOOKED_AT) if isinstance(row, Mapping)]
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if row.get(name) is not None]
        kinds = ", ".join(sorted({type(value).__name__ for value in values})) or "empty"
        below = sorted({f"{name}.{key}" for value in values if isinstance(value, Mapping) for key in value})
        yield f"  {name}: {kinds}, in {len(values)} of {len(rows)} rows" + (f"; {', '.join(below)}" if below else "")


def limits(prompts: Sequence[int], responses: Sequence[int], config: Config) -> str:
    """The settings under which everything fits; those of `config` if they are larger.

    Args:
        prompts: Tokens of each prompt.
        responses: Tokens after each prompt, if the file has responses.
        config: The present settings.
    """
    prompt = max(*prompts, config.rollout.max_prompt_tokens)
    response = max(*responses, config.rollout.max_response_tokens) if responses else config.rollout.max_response_tokens
    row = max(prompt + response, config.batch.row_length)
    names = ("rollout.max_prompt_tokens", "rollout.max_response_tokens", "batch.row_length")
    words = [f"--{name} {value}" for name, value in zip(names, (prompt, response, row), strict=True)]
    return f"limits under which all of it fits: {' '.join(words)}"


def too_long(uids: Sequence[str], lengths: Sequence[int], limit: str, most: int, unit: str = "tokens") -> Iterator[str]:
    """Names of what a run with the present settings would leave out; empty if everything fits."""
    long = [(uid, length) for uid, length in zip(uids, lengths, strict=True) if length > most]
    if long:
        yield f"{limit} = {most}: {len(long)} of {len(uids)} do not fit (data.bad_rows)"
    yield from (f"  {uid}: {length} {unit}" for uid, length in long[:MOST_NAMED])
    if len(long) > MOST_NAMED:
        yield f"  ... and {len(long) - MOST_NAMED} more"


@config_errors()
def check_data(path: Path, config: Config) -> list[str]:
    """The lines that the command prints.

    Raises:
        ConfigError: The file cannot be read, or none of its rows can be used.
    """
    text, tools = resolve_text(config), tool_schemas(config, make_registry(config))
    tokenizer, columns = load_tokenizer(text), list(column_lines(path))
    if not any(line.startswith("  messages:") for line in columns):
        lines = problem_lines(path, config, make_chat(text, tokenizer, tools))
    else:
        traces, report = load_traces(path)
        calls = max(text.max_calls_per_turn, *(trace.most_calls for trace in traces))
        # Under the limit that fits all calls; others are measured too.
        chat = make_chat(replace(text, max_calls_per_turn=calls), tokenizer, tools)
        lines = [str(report), *conversation_lines(traces, config, chat)]
    return [f"columns of the first {LOOKED_AT} rows:", *columns, *lines]


def problem_lines(path: Path, config: Config, chat: ChatFormat) -> list[str]:
    """Lines on the problems that `data.sources` would take from a file."""
    data = config.data
    problems, report = load_problems(path, prompt_column=data.prompt_column, answer_column=data.answer_column)
    encoded = [chat.prompt_ids(problem) for problem in problems]
    lines = [str(report), f"source of a problem: column {SOURCE_COLUMN!r}, or else the name of the file"]
    for problem, ids in islice(zip(problems, encoded, strict=True), SHOWN):
        lines += [f"---- {problem.uid}, answer {problem.answer!r}", chat.tokenizer.decode(ids)]
    lengths = [len(ids) for ids in encoded]
    uids, most = [problem.uid for problem in problems], config.rollout.max_prompt_tokens
    lines += ["----", describe_lengths("prompts", lengths), *too_long(uids, lengths, "rollout.max_prompt_tokens", most)]
    return [*lines, limits(lengths, (), config)]


def conversation_lines(traces: Sequence[Trace], config: Config, chat: ChatFormat) -> list[str]:
    """Lines on demonstrations. The format `chat` may have another limit of calls in a turn than `config`."""
    lines, fitting, prompts, rows, unfit = [], [], [], [], []
    for trace in traces:
        try:
            tokens, mask = chat.trace_row(trace)
        except UnfitTrace as error:
            unfit.append(f"  {error}")
            continue
        fitting.append(trace)
        prompts.append(int(mask.argmax()))
        rows.append(len(tokens))
        if len(rows) <= SHOWN:
            lines += [f"---- {trace.problem.uid}", chat.tokenizer.decode(tokens.tolist())]
    lines.append("----")
    if unfit:
        lines += [f"{len(unfit)} of {len(traces)} do not fit (data.bad_rows)", *unfit[:MOST_NAMED]]
    if not fitting:
        return lines
    lines += [describe_lengths("prompts", prompts), describe_lengths("conversations", rows)]
    uids, calls = [trace.problem.uid for trace in fitting], [trace.most_calls for trace in fitting]
    lines.append(f"most calls in a turn: {max(calls)}")
    most = config.text.max_calls_per_turn
    lines += too_long(uids, calls, "text.max_calls_per_turn", most, "calls in a turn")
    lines += too_long(uids, rows, "batch.row_length", config.batch.row_length)
    further = f" --text.max_calls_per_turn {max(calls)}" if max(calls) > most else ""
    responses = [row - prompt for row, prompt in zip(rows, prompts, strict=True)]
    return [*lines, limits(prompts, responses, config) + further]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    words: list[Any] = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0].startswith("-"):
        print(__doc__)
        return 0 if words and words[0] in ("--help", "-h") else 2
    try:
        config = load_config(Config, words[1:], prog="grpo-roc check-data", default_file=DEFAULT_CONFIG)
        lines = check_data(Path(words[0]).expanduser(), config)
    except ValueError as error:  # ConfigError is one
        print(f"check-data: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0
