"""For execution services that distinguish few outcomes: a harness around the program, and the trailer that it prints.

The harness runs the program and then prints one structured line to stderr, the trailer, which begins with a nonce.
Kinds come from the trailer, the status of the service and the exit code, never from words in the output.
"""

import base64
import contextlib
import json
from dataclasses import dataclass
from typing import Any

from grpo_roc_jax.tools._outcome import REPORTED_KINDS, ProgramOutcome
from grpo_roc_jax.tools.config import ToolsConfig
from grpo_roc_jax.types import ToolResult

HARNESS = """
import ast, base64, contextlib, io, json, os, random, sys
def _go():
    nonce, seed, cells, keep = json.loads(base64.b64decode({packed!r}))
    names = {{"__name__": "__main__", "__builtins__": __builtins__}}
    said = {{"kind": "ok", "error_type": "", "error_message": "", "echo": "", "error_line": None}}
    def run(text, report):
        try:
            tree = ast.parse(text, "<program>")
            last = tree.body.pop().value if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            code = compile(tree, "<program>", "exec")
            tail = None if last is None else compile(ast.Expression(last), "<program>", "eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            report.update(kind="syntax_error", error_type=type(error).__name__, error_message=str(error)[:500])
            report["error_line"] = getattr(error, "lineno", None)
            return
        try:
            exec(code, names)
            value = None if tail is None else eval(tail, names)
            report["echo"] = "" if value is None else repr(value)[:keep]
        except SystemExit as error:
            if error.code not in (None, 0):
                report.update(kind="exception", error_type="SystemExit", error_message=str(error)[:500])
        except BaseException as error:
            kind = "memory_limit" if isinstance(error, MemoryError) else "exception"
            report.update(kind=kind, error_type=type(error).__name__, error_message=str(error)[:500])
            step = error.__traceback__
            while step is not None:
                if step.tb_frame.f_code.co_filename == "<program>":
                    report["error_line"] = step.tb_lineno
                step = step.tb_next
    for earlier in cells[:-1]:
        random.seed(seed)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            run(earlier, {{}})
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    run(cells[-1], said)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os.write(2, ("\\n" + nonce + json.dumps(said) + "\\n").encode())
    sys.exit(0 if said["kind"] == "ok" else 1)
_go()
"""


@dataclass(frozen=True)
class ServiceRun:
    """What a service says about a run of the harness."""

    stdout: str
    stderr: str
    timed_out: bool
    failed: bool
    """The exit code was not 0."""
    seconds: float
    exit_code: int | None = None
    """None if the service does not report it."""


def wrap(cells: list[str], nonce: str, seed: int, keep: int) -> str:
    """The program for the service: runs the earlier cells without output, then the last one, and prints the trailer."""
    packed = base64.b64encode(json.dumps([nonce, seed, cells, keep]).encode()).decode()
    return HARNESS.format(packed=packed)


def take_trailer(stderr: str, nonce: str) -> tuple[str, ProgramOutcome | None]:
    """stderr without the trailer, and what the trailer reports."""
    head, found, rest = stderr.rpartition("\n" + nonce)
    if not found:
        return stderr, None
    with contextlib.suppress(ValueError):
        report = json.loads(rest.split("\n", 1)[0])
        if isinstance(report, dict) and report.get("kind") in REPORTED_KINDS:
            texts = {name: str(report.get(name, "")) for name in ("error_type", "error_message", "echo")}
            line = report.get("error_line")
            return head, ProgramOutcome(report["kind"], error_line=line if isinstance(line, int) else None, **texts)
    return head, None


def result_of(run: ServiceRun, nonce: str, config: ToolsConfig) -> ToolResult:
    stderr, report = take_trailer(run.stderr, nonce)
    code = run.exit_code
    fields: dict[str, Any] = {
        "stdout": cut(run.stdout, config), "stderr": cut(stderr, config), "wall_ms": 1000 * run.seconds,
        "stdout_bytes": len(run.stdout.encode(errors="replace")), "stderr_bytes": len(stderr.encode(errors="replace")),
        "exit_code": code, "isolation": "remote",
    }  # fmt: skip
    if run.timed_out:
        return ToolResult("timeout", limit_hit="wall", **fields)
    if report is not None and (report.kind == "ok") == (not run.failed):
        fields |= {name: getattr(report, name) for name in ("echo", "error_type", "error_message", "error_line")}
        return ToolResult(report.kind, **fields)
    signal = -code if code is not None and code < 0 else code - 128 if code is not None and code > 128 else None
    if signal is not None:
        return ToolResult("crash", signal=signal, **fields)
    message = "the process ended by itself" + ("" if code is None else f" with exit code {code}")
    return ToolResult("exception", error_type="EarlyExit", error_message=message, **fields)


def cut(text: str, config: ToolsConfig) -> str:
    """Head and tail of a stream."""
    keep = config.output_kb << 10
    if len(text) <= keep:
        return text
    return f"{text[: keep // 2]}\n[... {len(text) - keep} characters omitted ...]\n{text[-keep // 2 :]}"
