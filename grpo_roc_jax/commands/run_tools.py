"""`grpo-roc run-tools FILE.jsonl`: run programs from a file, one JSON result per line.

Each line holds `code`, and may hold `id`, `stdin` or `session`, and `seed`; `-` reads from standard input. Lines with a
session are cells of that session and run in the order of the file. Results are written in the order in which the calls
end, with the number of their `line`, from 1, and its `id`, by default the number of lines before it. A line that is not
such an object gives a `malformed_call`.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TextIO

from grpo_roc_jax.process.outputs import output_file
from grpo_roc_jax.process.progress import show_log
from grpo_roc_jax.sandbox.program import ExecutorFailed, IsolationUnavailable
from grpo_roc_jax.settings.cli import describe_error
from grpo_roc_jax.tools.config import LEVELS, ToolsConfig
from grpo_roc_jax.tools.executor import make_executor
from grpo_roc_jax.tools.interface import CodeCall, ToolExecutor, malformed_result
from grpo_roc_jax.types import ToolResult

WINDOW = 1024
"""Most calls in flight."""
POLL_S = 0.5


def read_calls(lines: Iterable[str | bytes]) -> Iterator[tuple[int, Any, CodeCall | ToolResult]]:
    """The number and the id of each line, with its call or with the result that says what is wrong with the line."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry, fault = json.loads(line), "not an object"
        except (ValueError, RecursionError) as error:
            entry, fault = None, f"not JSON: {error}"
        if not isinstance(entry, dict):
            yield number, number - 1, malformed_result(f"line {number} is {fault}")
        elif fault := fault_of(entry):
            yield number, entry.get("id", number - 1), malformed_result(f"line {number} has {fault}")
        else:
            session = entry.get("session")
            arguments = {"code": entry["code"]} if "code" in entry else {}
            if entry.get("stdin") is not None:
                arguments["input"] = entry["stdin"]
            tool = "python_code_with_standard_io" if session is None else "jupyter_code"
            name = None if session is None else str(session)
            call = CodeCall(str(number), tool, arguments, name, entry.get("seed") or 0)
            yield number, entry.get("id", number - 1), call


def fault_of(entry: Mapping[str, Any]) -> str:
    """What no call can be made of in a line; empty if there is nothing. Missing and null are the same."""
    session, seed = entry.get("session"), entry.get("seed")
    if session is not None and entry.get("stdin") is not None:
        return "stdin and session; cells of a session have no standard input"
    if session is not None and (isinstance(session, bool) or not isinstance(session, str | int) or session == ""):
        return f"session {json.dumps(session):.80}; must be a text or a whole number"
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        return f"seed {json.dumps(seed):.80}; must be a whole number"
    return ""


def run_all(executor: ToolExecutor, lines: Iterable[str | bytes], out: TextIO) -> int:
    """Run every line, write every result, and return the number of infrastructure failures."""
    waiting: dict[str, tuple[int, Any]] = {}
    failures = 0

    def write(number: int, own_id: Any, result: ToolResult) -> None:
        nonlocal failures
        failures += result.infra
        verdicts = {"line": number, "id": own_id, "kind": result.kind}
        verdicts |= {"ok": result.ok, "counts_as_error": result.counts_as_error}
        print(json.dumps(verdicts | {"infra": result.infra} | asdict(result)), file=out, flush=True)

    def collect(most: int) -> None:
        while len(waiting) > most:
            for call_id, result in executor.poll(POLL_S):
                write(*waiting.pop(call_id), result)

    for number, own_id, call in read_calls(lines):
        if isinstance(call, ToolResult):
            write(number, own_id, call)
        else:
            waiting[call.id] = number, own_id
            executor.submit(call)
            collect(WINDOW)
    collect(0)
    return failures


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `run` and `serve` share."""
    parser.add_argument("--workers", type=int, default=0, help="programs at a time; 0 chooses by the number of cores")
    level_help = "isolation level; a level below L2 must be named"
    parser.add_argument("--level", default="best", choices=("best", *LEVELS), help=level_help)
    parser.add_argument("--wall-s", type=float, default=ToolsConfig.wall_s, help="wall-clock seconds per program")
    parser.add_argument("--memory-mb", type=int, default=ToolsConfig.memory_mb, help="MiB above the interpreter's own")


def config_of(options: argparse.Namespace, **others: Any) -> ToolsConfig:
    """The configuration of the arguments of `add_limits`, with further settings.

    Raises:
        ValueError: A value is not allowed; the message names it.
    """
    lowest = "L2" if options.level == "best" else min(options.level, "L2")
    given = {"workers": options.workers, "level": options.level, "min_level": lowest, "memory_mb": options.memory_mb}
    try:
        return ToolsConfig(**given | {"wall_s": options.wall_s, "cpu_s": options.wall_s} | others)
    except ValueError as error:
        raise ValueError(describe_error(error)) from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the programs of a file.

    Returns:
        Exit status: 0 if every program got a verdict, 1 after infrastructure failures, 2 for bad input, 5 if the
        executor could not start.
    """
    parser = argparse.ArgumentParser(prog="grpo-roc run-tools", description=__doc__)
    parser.add_argument("file", help="JSON lines with code, id, stdin, session, seed; - for standard input")
    parser.add_argument("--out", default="-", help="file for the results; - for standard output")
    add_limits(parser)
    parser.add_argument("--cpu-s", type=float, default=None, help="CPU seconds per program; the wall limit by default")
    preload = ",".join(ToolsConfig.preload)
    parser.add_argument("--preload", default=preload, help="modules to import once, comma-separated")
    options = parser.parse_args(arguments)
    show_log("%(message)s", info=("grpo_roc_jax",))
    try:
        cpu_s = options.wall_s if options.cpu_s is None else options.cpu_s
        config = config_of(options, cpu_s=cpu_s, preload=tuple(name for name in options.preload.split(",") if name))
        out_path = None
        if options.out != "-":
            out_path = output_file("--out", options.out, ["/dev/stdin" if options.file == "-" else options.file])
        # As bytes: a line that is no UTF-8 is one bad call, and a mark of the byte order is none.
        source = getattr(sys.stdin, "buffer", sys.stdin) if options.file == "-" else open(options.file, "rb")  # noqa: SIM115
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    executor = make_executor(config)
    try:
        executor.start()
        out = out_path.open("w", encoding="utf-8") if out_path else sys.stdout
        with source, out:
            return 1 if run_all(executor, source, out) else 0
    except (IsolationUnavailable, ExecutorFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 5
    except BrokenPipeError:
        return 1
    except OSError as error:  # of the file for the results
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        executor.close()
