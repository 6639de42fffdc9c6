"""Clients of existing execution services: SandboxFusion's `/run_code` and code-judge's `/run/long-batch`.

The services hold no state, so each cell of a session is sent with the earlier cells, except those that had to be
ended. They distinguish few outcomes, so a program is sent inside a harness that runs it and then prints one structured
line to stderr, the trailer, which begins with a nonce. Kinds come from the trailer, the status of the service and the
exit code, never from words in the output.
"""

import base64
import contextlib
import http.client
import io
import json
import os
import random
import secrets
import socket
import ssl
import threading
import time
import urllib.parse
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from grpo_roc_jax.sandbox._calls import ProgramOutcome, reported
from grpo_roc_jax.sandbox.base import cut
from grpo_roc_jax.sandbox.program import ExecutorFailed, Ticket
from grpo_roc_jax.sandbox.server import TOKEN_VARIABLE
from grpo_roc_jax.settings.secrets import hidden
from grpo_roc_jax.tools.config import ToolsConfig
from grpo_roc_jax.tools.executor import BaseExecutor
from grpo_roc_jax.tools.interface import Capabilities
from grpo_roc_jax.tools.registry import Registry
from grpo_roc_jax.types import ToolResult

MAX_ANSWER = 64 << 20
"""Longest answer that is accepted, in bytes."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
BATCH_WAIT_S = 0.01
"""Seconds that the first call of a batch waits for others."""


HARNESS = """
import ast, base64, builtins, contextlib, importlib.machinery, io, json, linecache, os, random, sys, types
def _go():
    nonce, cells, keep = json.loads(base64.b64decode({packed!r}))
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    names = module.__dict__
    names.update(__builtins__=__builtins__, __file__="main.py")
    said = {{"kind": "ok", "error_line": None, "error_type": "", "error_message": "", "traceback": "", "echo": ""}}
    group = getattr(builtins, "BaseExceptionGroup", ())
    def short(text, report):
        room = keep // 2 - 4096  # of the stream, whose middle the service leaves out
        if len(json.dumps(text)) <= room:
            return text
        report["truncated"] = True
        half = max(room, 0) // 24  # a character may take twelve in the trailer
        return text[:half] + "\\n[... %d characters omitted ...]\\n" % (len(text) - 2 * half) + text[len(text) - half :]
    def seeded(seed):
        random.seed(seed)
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed(seed % 2**32)
            return
        class Finder:  # seeds numpy.random when it is imported
            def find_spec(name, path=None, target=None):
                if name != "numpy.random":
                    return None
                spec = importlib.machinery.PathFinder.find_spec(name, path, target)
                load = getattr(spec and spec.loader, "exec_module", None)
                if load:
                    spec.loader.exec_module = lambda module: (load(module), module.seed(seed % 2**32))
                return spec
        sys.meta_path.insert(0, Finder)
    def status(code):
        if code is None:
            return 0
        return int(code) & 255 if isinstance(code, int) and -(2**63) <= code < 2**63 else 1
    def text_of(error):
        text, leaves, rest = str(error), [], [error] if isinstance(error, group) else []
        while rest and len(leaves) < 3:
            one = rest.pop()
            if isinstance(one, group):
                rest += one.exceptions[2::-1]
            else:
                leaves.append(type(one).__name__ + (": " if str(one) else "") + str(one))
        text += (": " if leaves else "") + "; ".join(leaves)
        return "\\n".join([text, *map(str, getattr(error, "__notes__", [])[:10])])[:500]
    def failed(report, kind, error):
        report.update(kind=kind, error_type=type(error).__name__)
        try:
            report["error_message"] = text_of(error)
        except BaseException:
            report["error_message"] = "<no text: str() of the exception failed>"
    def run(name, text, report):
        try:
            tree = ast.parse(text, name)
            last = tree.body.pop().value if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            limit = sys.getrecursionlimit()
            sys.setrecursionlimit(max(limit, 3200))  # the interpreter accepts text that is nested deeper than trees
            try:
                code = compile(tree, name, "exec")
                tail = None if last is None else compile(ast.Expression(last), name, "eval")
            except RecursionError:
                code, tail = compile(text, name, "exec"), None
            finally:
                sys.setrecursionlimit(limit)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            message = getattr(error, "msg", None) or str(error)
            report.update(kind="syntax_error", error_type=type(error).__name__, error_message=message[:500])
            report["error_line"] = getattr(error, "lineno", None)
            return
        lines = [line + "\\n" for line in text.replace("\\r\\n", "\\n").replace("\\r", "\\n").split("\\n")]
        linecache.cache[name] = linecache.cache["main.py"] = (len(text), None, lines, name)
        try:
            exec(code, names)
            value = None if tail is None else eval(tail, names)
            report["echo"] = "" if value is None else short(repr(value), report)
        except BaseException as error:
            if isinstance(error, SystemExit) and status(error.code) == 0:
                return
            failed(report, "memory_limit" if isinstance(error, MemoryError) else "exception", error)
            step = error.__traceback__
            while step is not None:
                if step.tb_frame.f_code.co_filename == name:
                    report["error_line"] = step.tb_lineno
                step = step.tb_next
    seeded(cells[0][1])
    for number, (earlier, _) in enumerate(cells[:-1]):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            run("<cell %d>" % (number + 1), earlier, {{}})
    run("<program>" if len(cells) == 1 else "<cell %d>" % len(cells), cells[-1][0], said)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os.write(2, ("\\n" + nonce + json.dumps(said) + "\\n").encode())
    sys.exit(0 if said["kind"] == "ok" else 1)
_go()
"""


@dataclass(frozen=True)
class ServiceRun:
    """What a service reports about a run of the harness."""

    stdout: str
    stderr: str
    timed_out: bool
    failed: bool
    """Whether the exit code was not 0."""
    seconds: float
    exit_code: int | None = None
    """Exit code; None if the service does not report it."""


def wrap(cells: list[tuple[str, int]], nonce: str, keep: int) -> str:
    """The program for the service: runs the earlier cells without output, then the last one, and prints the trailer.
    Cells are (code, seed)."""
    packed = base64.b64encode(json.dumps([nonce, cells, keep]).encode()).decode()
    return HARNESS.format(packed=packed)


def take_trailer(stderr: str, nonce: str, keep: int) -> tuple[str, ProgramOutcome | None]:
    """stderr without the trailer, and what the trailer reports."""
    head, separator, rest = stderr.rpartition("\n" + nonce)
    if not separator:
        return stderr, None
    try:
        trailer = json.loads(rest.split("\n", 1)[0])
    except ValueError:
        # The service cut it. A program that failed has another exit code.
        return head, ProgramOutcome("ok", truncated=True)
    except RecursionError:
        return head, None
    with contextlib.suppress(ValueError):
        return head, reported(trailer, keep)
    return head, None


def result_of(run: ServiceRun, nonce: str, config: ToolsConfig) -> ToolResult:
    keep = config.output_kb << 10
    stderr, report = take_trailer(run.stderr, nonce, keep)
    code = run.exit_code
    fields: dict[str, Any] = {
        "stdout": cut(run.stdout, keep), "stderr": cut(stderr, keep), "wall_ms": 1000 * run.seconds,
        "stdout_bytes": len(run.stdout.encode(errors="replace")), "stderr_bytes": len(stderr.encode(errors="replace")),
        "truncated": max(len(run.stdout), len(stderr)) > keep, "exit_code": code, "isolation": "remote",
    }  # fmt: skip
    if run.timed_out:
        return ToolResult("timeout", limit_hit="wall", **fields)
    if report is not None and (report.kind == "ok") == (not run.failed):
        fields |= {name: getattr(report, name) for name in ("echo", "error_type", "error_message", "error_line")}
        fields["truncated"] = fields["truncated"] or report.truncated
        return ToolResult(report.kind, **fields)
    signal = -code if code is not None and code < 0 else code - 128 if code is not None and code > 128 else None
    if signal is not None:
        return ToolResult("crash", signal=signal, **fields)
    message = "the process ended by itself" + ("" if code is None else f" with exit code {code}")
    return ToolResult("exception", error_type="EarlyExit", error_message=message, **fields)


def is_replayed(result: ToolResult) -> bool:
    """Whether later cells of a session run this cell again: it came to its end, whatever it raised."""
    return result.kind in ("ok", "exception") and result.error_type != "EarlyExit"


def of_session(result: ToolResult, session: str) -> ToolResult:
    """The result of a cell, which says by an exit code or a signal that the session lost what the cell did."""
    result = replace(result, session_id=session)
    if is_replayed(result) or result.kind == "syntax_error" or result.infra:
        return replace(result, exit_code=None, signal=None)
    ended = result.exit_code is not None or result.signal is not None
    return replace(result, exit_code=result.exit_code if ended else 1, rolled_back=True)


class TransportError(Exception):
    """The service could not be reached, or its answer is not valid."""


class Busy(Exception):
    """The call timed out in the service's own queue."""


class TimedConnection(http.client.HTTPConnection):
    """A connection to a service whose waits all end at one `deadline`, however slowly the service answers.

    The time-out of a socket applies to each read alone, so a service that sends single bytes could delay a call for
    ever. Here it is set again before each wait: for the address, the connection, the request, the head, the body.
    """

    def __init__(self, host: str, port: int | None, *, secure: bool) -> None:
        super().__init__(host, port or (443 if secure else 80))
        self.context = ssl.create_default_context() if secure else None
        self.deadline = 0.0

    def left(self) -> float:
        """Seconds until the deadline. Raises TimeoutError after it."""
        seconds = self.deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("no complete answer within the time of the call")
        return seconds

    def connect(self) -> None:
        """Connect to the first address that accepts."""
        fault: OSError = OSError(f"{self.host} has no address")
        for family, kind, protocol, _, address in addresses_of(self.host, self.port, self.left()):
            sock = socket.socket(family, kind, protocol)
            try:
                sock.settimeout(self.left())
                sock.connect(address)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self.context:
                    sock.settimeout(self.left())
                    sock = self.context.wrap_socket(sock, server_hostname=self.host)
            except OSError as error:
                sock.close()
                fault = error
                continue
            self.sock = sock
            return
        raise fault

    def send(self, data: bytes) -> None:
        """Send bytes, connected first if necessary."""
        if self.sock is None:
            self.connect()
        self.sock.settimeout(self.left())
        super().send(data)

    def response_class(self, sock: socket.socket, *arguments: Any, **options: Any) -> http.client.HTTPResponse:
        return http.client.HTTPResponse(TimedReads(sock, self.left), *arguments, **options)


class TimedReads(io.RawIOBase):
    """What `http.client` reads an answer from: a socket with a new time-out for each read."""

    def __init__(self, sock: socket.socket, left: Callable[[], float]) -> None:
        self._sock, self._left, self._raw = sock, left, sock.makefile("rb", buffering=0)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(self._left())
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


def addresses_of(host: str, port: int, seconds: float) -> list[tuple]:
    """What `socket.getaddrinfo` gives, which has no time-out of its own. Raises OSError if it fails or is late."""
    answer: Future[list[tuple]] = Future()

    def look_up() -> None:
        try:
            answer.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=look_up, daemon=True, name="look-up").start()
    return answer.result(seconds)


class HttpExecutor(BaseExecutor):
    """Sends calls to a service, with retries and jitter within a wall-clock budget per call."""

    path = ""
    probe_path = "/"

    def __init__(self, config: ToolsConfig, registry: Registry | None = None) -> None:
        super().__init__(config, registry)
        self._service = config.executor
        parts = urllib.parse.urlsplit(self._service.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"tools.executor.url = {self._service.url!r}; must be an address such as http://127.0.0.1:8080"
            )
        self._parts = parts
        token = os.environ.get(TOKEN_VARIABLE, "")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._threads = ThreadPoolExecutor(self._service.concurrency, thread_name_prefix="remote-tool")
        self._local = threading.local()
        self._histories: dict[str, list[tuple[str, int]]] = {}
        self._turns: dict[str, deque[Ticket]] = {}
        self._guard = threading.Lock()

    def _open(self) -> Capabilities:
        try:
            self._exchange("GET", self.probe_path, None, 5.0, any_status=True)
        except TransportError as error:
            raise ExecutorFailed(
                hidden(f"no service answers at tools.executor.url {self._service.url}: {error}")
            ) from error
        return Capabilities(level="remote", missing=("isolation is the service's own",))

    def _shut(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def close_session(self, session: str) -> None:
        with self._guard:
            self._histories.pop(session, None)

    def _launch(self, ticket: Ticket) -> None:
        session = ticket.program.session
        with self._guard:
            turns = deque()
            if session is not None:
                turns = self._turns.setdefault(session, turns)
                self._histories.setdefault(session, [])
            turns.append(ticket)
            if len(turns) == 1:
                self._threads.submit(self._work, ticket)

    def _work(self, ticket: Ticket) -> None:
        session = ticket.program.session
        with self._guard:
            history = self._histories.get(session or "", [])  # once the session is closed, it is nobody's
        try:
            result = self._result(ticket)
        except Exception as error:
            result = ToolResult("transport_error", error_type=type(error).__name__, error_message=str(error)[:500])
        if session is None:
            self._finish(ticket.program.id, result)
            return
        self._finish(ticket.program.id, of_session(result, session))
        with self._guard:
            if is_replayed(result):
                history.append((ticket.program.code, ticket.program.seed))
            turns = self._turns[session]
            turns.popleft()
            if turns:
                self._threads.submit(self._work, turns[0])
            else:
                del self._turns[session]

    def _result(self, ticket: Ticket) -> ToolResult:
        """One call. Only transport errors and queue time-outs of the service are retried."""
        deadline = time.monotonic() + self._service.timeout_s
        pause, fault = FIRST_PAUSE_S, ToolResult("transport_error", error_message="no time for an attempt")
        for attempt in range(1, self._service.retries + 1):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            try:
                return self._attempt(ticket, left)
            except TransportError as error:
                fault = ToolResult("transport_error", error_message=str(error)[:500], attempt=attempt)
            except Busy as error:
                fault = ToolResult("queue_timeout", error_message=str(error)[:500], attempt=attempt)
            if attempt < self._service.retries:
                time.sleep(min(pause * random.uniform(0.5, 1.5), max(0.0, deadline - time.monotonic())))
                pause = min(2 * pause, LONGEST_PAUSE_S)
        return fault

    def _attempt(self, ticket: Ticket, timeout_s: float) -> ToolResult:
        raise NotImplementedError

    def _wrapped(self, ticket: Ticket, nonce: str) -> str:
        """The program of a call, with the earlier cells of its session."""
        with self._guard:
            earlier = self._histories.get(ticket.program.session or "", ())
        return wrap([*earlier, (ticket.program.code, ticket.program.seed)], nonce, self.config.output_kb << 10)

    def _exchange(
        self, method: str, path: str, body: dict | None, timeout_s: float, *, any_status: bool = False
    ) -> Any:
        """One request and its JSON answer. Each thread keeps a connection for its next request."""
        payload, target = None if body is None else json.dumps(body).encode(), self._parts.path.rstrip("/") + path
        connection = self._connection(timeout_s)
        try:
            connection.request(method, target, payload, self._headers)
            answer = connection.getresponse()
            data = answer.read(MAX_ANSWER + 1)
            if any_status:
                return None
            if answer.status != 200:
                raise TransportError(f"{path} answered with status {answer.status}: {data[:200]!r}")
            if len(data) > MAX_ANSWER:
                raise TransportError(f"{path} answered with more than {MAX_ANSWER} bytes")
            return json.loads(data)
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
            connection.close()
            self._local.connection = None
            raise TransportError(f"{type(error).__name__}: {error}") from error

    def _connection(self, timeout_s: float) -> TimedConnection:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            secure = self._parts.scheme == "https"
            connection = TimedConnection(self._parts.hostname, self._parts.port, secure=secure)
            self._local.connection = connection
        connection.deadline = time.monotonic() + timeout_s
        return connection


class SandboxFusionExecutor(HttpExecutor):
    """Client of `/run_code`, one request per call; the service is `sandbox.server` or SandboxFusion."""

    path = "/run_code"
    probe_path = "/v1/ping"

    def _attempt(self, ticket: Ticket, timeout_s: float) -> ToolResult:
        nonce = secrets.token_hex(16)
        body = {
            "code": self._wrapped(ticket, nonce), "language": "python", "stdin": ticket.program.stdin,
            "compile_timeout": self.config.wall_s, "run_timeout": self.config.wall_s,
            "memory_limit_MB": self.config.memory_mb, "files": {}, "fetch_files": [],
        }  # fmt: skip
        answer = self._exchange("POST", self.path, body, timeout_s)
        run = answer.get("run_result") if isinstance(answer, dict) else None
        if not isinstance(run, dict) or answer.get("status") == "SandboxError" or run.get("status") == "Error":
            message = str(answer.get("message", "") if isinstance(answer, dict) else answer)[:500]
            return ToolResult("sandbox_error", error_message=message or "no run_result in the answer")
        code = run.get("return_code")
        outcome = ServiceRun(
            stdout=str(run.get("stdout") or ""), stderr=str(run.get("stderr") or ""), failed=code != 0,
            timed_out=run.get("status") == "TimeLimitExceeded", seconds=float(run.get("execution_time") or 0.0),
            exit_code=code if isinstance(code, int) else None,
        )  # fmt: skip
        return result_of(outcome, nonce, self.config)


class JudgeRequest:
    """A program on its way to code-judge; `answer` is set when its batch has been answered."""

    def __init__(self, code: str, stdin: str) -> None:
        self.body = {"type": "python", "solution": code, "input": stdin}
        self.answer: Future[Any] = Future()


class CodeJudgeExecutor(HttpExecutor):
    """Client of `/run/long-batch`, for comparison runs. Calls that arrive together share a request."""

    path = "/run/long-batch"

    def __init__(self, config: ToolsConfig, registry: Registry | None = None) -> None:
        super().__init__(config, registry)
        self._batch: list[JudgeRequest] = []
        self._batch_full = threading.Condition()

    def _attempt(self, ticket: Ticket, timeout_s: float) -> ToolResult:
        nonce = secrets.token_hex(16)
        answer = self._answer_to(JudgeRequest(self._wrapped(ticket, nonce), ticket.program.stdin), timeout_s)
        if not isinstance(answer, dict):
            raise TransportError(f"{self.path} answered with {type(answer).__name__} for a submission")
        reason = answer.get("reason") or ""
        if reason == "queue_timeout":
            raise Busy("the service's queue was full")
        if reason in ("internal_error", "invalid_input"):
            return ToolResult("sandbox_error", error_message=f"the service says {reason}")
        run = ServiceRun(
            stdout=str(answer.get("stdout") or ""), stderr=str(answer.get("stderr") or ""),
            timed_out=reason == "worker_timeout", seconds=float(answer.get("cost") or 0.0),
            failed=not (answer.get("success") and answer.get("run_success")),
        )  # fmt: skip
        result = result_of(run, nonce, self.config)
        # The service cuts long output, and the trailer with it; then only its own verdict is left.
        if not run.timed_out and not run.failed and nonce not in run.stderr and len(run.stderr) > 500:
            texts = {"stdout": result.stdout, "stderr": result.stderr}
            return ToolResult("ok", **texts, truncated=True, wall_ms=result.wall_ms)
        return result

    def _answer_to(self, submission: JudgeRequest, timeout_s: float) -> Any:
        """The service's answer. The first submission of a batch sends it, after a moment in which others may join."""
        with self._batch_full:
            self._batch.append(submission)
            batch = self._batch
            leads = len(batch) == 1
            if leads:
                self._batch_full.wait_for(lambda: len(batch) >= self._service.batch, BATCH_WAIT_S)
                self._batch = []
            else:
                self._batch_full.notify_all()
        if leads:
            self._send_batch(batch, timeout_s)
        try:
            return submission.answer.result(timeout_s)
        except TimeoutError as error:
            raise TransportError("no answer to the batch within the call's time") from error

    def _send_batch(self, batch: list[JudgeRequest], timeout_s: float) -> None:
        """Set the answer of every submission, or the same error for all."""
        try:
            body = {"type": "batch", "submissions": [submission.body for submission in batch]}
            answers = self._exchange("POST", self.path, body, timeout_s).get("results")
            if not isinstance(answers, list) or len(answers) != len(batch):
                raise TransportError(f"{self.path} did not answer each of {len(batch)} submissions")
        except Exception as error:
            fault = error if isinstance(error, TransportError) else TransportError(f"{type(error).__name__}: {error}")
            for submission in batch:
                submission.answer.set_exception(fault)
            return
        for submission, answer in zip(batch, answers, strict=True):
            submission.answer.set_result(answer)
