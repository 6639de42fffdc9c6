"""Clients of existing execution services: SandboxFusion's `/run_code` and code-judge's `/run/long-batch`.

The services hold no state, so each cell of a session is sent with the earlier cells, except those that had to be
ended. `_trailer` wraps programs and reads their outcomes.
"""

import http.client
import json
import random
import secrets
import threading
import time
import urllib.parse
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from grpo_roc_jax.tools._trailer import ServiceRun, result_of, wrap
from grpo_roc_jax.tools.base import BaseExecutor, Ticket
from grpo_roc_jax.tools.config import ToolsConfig
from grpo_roc_jax.tools.interface import Capabilities, ExecutorFailed
from grpo_roc_jax.tools.registry import Registry
from grpo_roc_jax.types import ToolResult

MAX_ANSWER = 64 << 20
"""Longest answer that is accepted, in bytes."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
BATCH_WAIT_S = 0.01
"""How long the first call of a batch waits for others."""


class TransportError(Exception):
    """The service could not be reached, or its answer is not valid."""


class Busy(Exception):
    """The call timed out in the service's own queue."""


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
        self._threads = ThreadPoolExecutor(self._service.concurrency, thread_name_prefix="remote-tool")
        self._local = threading.local()
        self._histories: dict[str, list[str]] = {}
        self._turns: dict[str, deque[Ticket]] = {}
        self._guard = threading.Lock()

    def _open(self) -> Capabilities:
        try:
            self._exchange("GET", self.probe_path, None, 5.0, any_status=True)
        except TransportError as error:
            raise ExecutorFailed(f"no service answers at tools.executor.url {self._service.url}: {error}") from error
        return Capabilities(level="remote", missing=("isolation is the service's own",))

    def _shut(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def close_session(self, session: str) -> None:
        with self._guard:
            self._histories.pop(session, None)

    def _launch(self, ticket: Ticket) -> None:
        session = ticket.job.session
        if session is None:
            self._threads.submit(self._work, ticket)
            return
        with self._guard:
            turns = self._turns.setdefault(session, deque())
            turns.append(ticket)
            if len(turns) == 1:
                self._threads.submit(self._work, ticket)

    def _work(self, ticket: Ticket) -> None:
        try:
            result = self._result(ticket)
        except Exception as error:
            result = ToolResult("transport_error", error_type=type(error).__name__, error_message=str(error)[:500])
        self._finish(ticket.call.id, result)
        session = ticket.job.session
        if session is None:
            return
        with self._guard:
            if result.kind in ("ok", "exception") and result.error_type != "EarlyExit":
                self._histories.setdefault(session, []).append(ticket.job.code)
            turns = self._turns[session]
            turns.popleft()
            if turns:
                self._threads.submit(self._work, turns[0])
            else:
                del self._turns[session]

    def _cells(self, ticket: Ticket) -> list[str]:
        with self._guard:
            return [*self._histories.get(ticket.job.session or "", ()), ticket.job.code]

    def _result(self, ticket: Ticket) -> ToolResult:
        """One call. Only transport errors and queue time-outs of the service are retried."""
        deadline = time.monotonic() + self._service.timeout_s
        pause, fault = FIRST_PAUSE_S, ToolResult("transport_error", error_message="no time for an attempt")
        for attempt in range(1, self._service.retries + 1):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            try:
                return self._ask(ticket, left)
            except TransportError as error:
                fault = ToolResult("transport_error", error_message=str(error)[:500], attempt=attempt)
            except Busy as error:
                fault = ToolResult("queue_timeout", error_message=str(error)[:500], attempt=attempt)
            if attempt < self._service.retries:
                time.sleep(min(pause * random.uniform(0.5, 1.5), max(0.0, deadline - time.monotonic())))
                pause = min(2 * pause, LONGEST_PAUSE_S)
        return fault

    def _ask(self, ticket: Ticket, timeout_s: float) -> ToolResult:
        raise NotImplementedError

    def _exchange(
        self, method: str, path: str, body: dict | None, timeout_s: float, *, any_status: bool = False
    ) -> Any:
        """One request and its JSON answer. Each thread keeps a connection for its next request."""
        payload = None if body is None else json.dumps(body).encode()
        connection = self._connection(timeout_s)
        try:
            target = self._parts.path.rstrip("/") + path
            connection.request(method, target, payload, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            data = answer.read(MAX_ANSWER + 1)
            if any_status:
                return None
            if answer.status != 200:
                raise TransportError(f"{path} answered with status {answer.status}: {data[:200]!r}")
            if len(data) > MAX_ANSWER:
                raise TransportError(f"{path} answered with more than {MAX_ANSWER} bytes")
            return json.loads(data)
        except (OSError, http.client.HTTPException, ValueError) as error:
            connection.close()
            self._local.connection = None
            raise TransportError(f"{type(error).__name__}: {error}") from error

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            secure = self._parts.scheme == "https"
            kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
            connection = self._local.connection = kind(self._parts.hostname, self._parts.port, timeout=timeout_s)
        connection.timeout = timeout_s
        if connection.sock is not None:
            connection.sock.settimeout(timeout_s)
        return connection


class SandboxFusionExecutor(HttpExecutor):
    """Client of `/run_code`, one request per call; the service is `tools.serve` or SandboxFusion."""

    path = "/run_code"
    probe_path = "/v1/ping"

    def _ask(self, ticket: Ticket, timeout_s: float) -> ToolResult:
        nonce = secrets.token_hex(16)
        body = {
            "code": wrap(self._cells(ticket), nonce, ticket.call.seed, self.config.output_kb << 10),
            "language": "python", "stdin": ticket.job.stdin, "compile_timeout": self.config.wall_s,
            "run_timeout": self.config.wall_s, "memory_limit_MB": self.config.memory_mb, "files": {}, "fetch_files": [],
        }  # fmt: skip
        answer = self._exchange("POST", self.path, body, timeout_s)
        run = answer.get("run_result") if isinstance(answer, dict) else None
        if not isinstance(run, dict) or answer.get("status") == "SandboxError" or run.get("status") == "Error":
            message = str(answer.get("message", "") if isinstance(answer, dict) else answer)[:500]
            return ToolResult("sandbox_error", error_message=message or "no run_result in the answer")
        code = run.get("return_code")
        said = ServiceRun(
            stdout=str(run.get("stdout") or ""),
            stderr=str(run.get("stderr") or ""),
            timed_out=run.get("status") == "TimeLimitExceeded",
            failed=code != 0,
            seconds=float(run.get("execution_time") or 0.0),
            exit_code=code if isinstance(code, int) else None,
        )
        return result_of(said, nonce, self.config)


class Submission:
    """A program on its way to code-judge; `answer` is set when its batch has been answered."""

    def __init__(self, code: str, stdin: str) -> None:
        self.body = {"type": "python", "solution": code, "input": stdin}
        self.answer: Future[Any] = Future()


class CodeJudgeExecutor(HttpExecutor):
    """Client of `/run/long-batch`, for comparison runs. Calls that arrive together share a request."""

    path = "/run/long-batch"

    def __init__(self, config: ToolsConfig, registry: Registry | None = None) -> None:
        super().__init__(config, registry)
        self._batch: list[Submission] = []
        self._batch_full = threading.Condition()

    def _ask(self, ticket: Ticket, timeout_s: float) -> ToolResult:
        nonce = secrets.token_hex(16)
        code = wrap(self._cells(ticket), nonce, ticket.call.seed, self.config.output_kb << 10)
        answer = self._answer_to(Submission(code, ticket.job.stdin), timeout_s)
        if not isinstance(answer, dict):
            raise TransportError(f"{self.path} answered with {type(answer).__name__} for a submission")
        reason = answer.get("reason") or ""
        if reason == "queue_timeout":
            raise Busy("the service's queue was full")
        if reason in ("internal_error", "invalid_input"):
            return ToolResult("sandbox_error", error_message=f"the service says {reason}")
        run = ServiceRun(
            stdout=str(answer.get("stdout") or ""),
            stderr=str(answer.get("stderr") or ""),
            timed_out=reason == "worker_timeout",
            failed=not (answer.get("success") and answer.get("run_success")),
            seconds=float(answer.get("cost") or 0.0),
        )
        result = result_of(run, nonce, self.config)
        # The service cuts long output, and the trailer with it; then only its own verdict is left.
        if not run.timed_out and not run.failed and nonce not in run.stderr and len(run.stderr) > 500:
            return ToolResult("ok", stdout=result.stdout, stderr=result.stderr, wall_ms=result.wall_ms)
        return result

    def _answer_to(self, submission: Submission, timeout_s: float) -> Any:
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

    def _send_batch(self, batch: list[Submission], timeout_s: float) -> None:
        """Set the answer of every submission, or the same error for all."""
        try:
            body = {"type": "batch", "submissions": [one.body for one in batch]}
            answers = self._exchange("POST", self.path, body, timeout_s).get("results")
            if not isinstance(answers, list) or len(answers) != len(batch):
                raise TransportError(f"{self.path} did not answer each of {len(batch)} submissions")
        except Exception as error:
            fault = error if isinstance(error, TransportError) else TransportError(f"{type(error).__name__}: {error}")
            for one in batch:
                one.answer.set_exception(fault)
            return
        for one, answer in zip(batch, answers, strict=True):
            one.answer.set_result(answer)
