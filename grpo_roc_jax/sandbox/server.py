"""The executor over HTTP, with the interface of SandboxFusion's `/run_code` (`grpo-roc serve-tools`).

For other trainers. Listens on loopback by default, since anyone who can reach the port can run programs, within the
limits of the sandbox. The environment variable `GRPO_TOOLS_TOKEN` holds the bearer token that requests must carry; any
other address needs one. Connections are not encrypted.
"""

import asyncio
import itertools
import json
import logging
from typing import Any

from grpo_roc_jax.sandbox._messages import ExecutorSettings
from grpo_roc_jax.sandbox.executor import Executor
from grpo_roc_jax.sandbox.http_guard import GuardedHandler, GuardedServer, is_loopback, refusal
from grpo_roc_jax.sandbox.program import ExecutorFailed, Program
from grpo_roc_jax.sandbox.result import ToolResult

log = logging.getLogger(__name__)
TOKEN_VARIABLE = "GRPO_TOOLS_TOKEN"
"""Environment variable that holds the bearer token of the service."""
MAX_BODY = 16 << 20
MAX_PROGRAM = 8 << 20
"""Longest program or input, in bytes; frames to the executor process are limited to 16 MiB."""
MAX_CONNECTIONS = 512
"""Most connections at a time, each with a thread; a further one replaces one that waits."""


def answer_of(result: ToolResult) -> dict[str, Any]:
    """A result in the format of the service."""
    rest: dict[str, Any] = {"compile_result": None, "executor_pod_name": None, "files": {}}
    if result.infra:
        message = result.error_message or result.kind
        return {"status": "SandboxError", "message": message, "run_result": None} | rest
    late = result.kind == "timeout"
    stderr = result.stderr
    if words := last_words(result):
        gap = "\n" if stderr and not stderr.endswith("\n") else ""
        stderr += f"{gap}{words}\n"
    run = {
        "status": "TimeLimitExceeded" if late else "Finished", "execution_time": result.wall_ms / 1000,
        "return_code": None if late else exit_status(result), "stdout": result.stdout, "stderr": stderr,
    }  # fmt: skip
    status = "Success" if run["return_code"] == 0 else "Failed"
    return {"status": status, "message": "", "run_result": run} | rest


def last_words(result: ToolResult) -> str:
    """What an interpreter prints at the end of a program that raised; empty for one that exits, unless it gives a text
    as its status."""
    kind, message = result.error_type, result.error_message
    if kind == "SystemExit":
        try:
            return "" if message in ("True", "False") or int(message) & 0xFF == result.exit_code else message
        except ValueError:
            return message
    if kind in ("", "EarlyExit"):
        return ""
    frames = f"Traceback (most recent call last):\n{result.traceback}\n" if result.traceback else ""
    if result.kind == "syntax_error" and result.error_line is not None:
        frames = f'  File "<program>", line {result.error_line}\n'
    return frames + (f"{kind}: {message}" if message else kind)


def exit_status(result: ToolResult) -> int:
    """The exit status of an interpreter that runs the program alone."""
    if result.signal is not None:
        return -result.signal
    return result.exit_code or (0 if result.ok or result.error_type == "EarlyExit" else 1)


def read_request(body: bytes, limit_s: float) -> tuple[Any, Any, float | None]:
    """Code and standard input of a request, not checked yet, and its time limit if that is below `limit_s`.

    Raises ValueError if it asks for something that is not offered here.
    """
    request = json.loads(body)
    if not isinstance(request, dict):
        raise ValueError("the body must be an object")
    if request.get("language", "python") != "python":
        raise ValueError(f"language {request.get('language')!r} is not offered; only python is")
    if request.get("files") or request.get("fetch_files"):
        raise ValueError("files and fetch_files are not offered; programs start in an empty directory")
    timeout_s, stdin = request.get("run_timeout"), request.get("stdin")
    number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if timeout_s is not None and not (number and timeout_s > 0):
        raise ValueError(f"run_timeout is {timeout_s!r:.80}; must be a number of seconds above 0")
    shorter = timeout_s is not None and timeout_s < limit_s
    return request.get("code"), "" if stdin is None else stdin, timeout_s if shorter else None


def fault_of(code: Any, stdin: Any) -> str:
    """What is wrong with a program and its input; empty if they can run."""
    for name, text in (("code", code), ("stdin", stdin)):
        if not isinstance(text, str):
            return f"{name} is {type(text).__name__}; must be a string"
        if len(text) > MAX_PROGRAM // 4 and (size := len(text.encode("utf-8", "surrogatepass"))) > MAX_PROGRAM:
            return f"{name} has {size} bytes; at most {MAX_PROGRAM} are accepted"
    return ""


class Service:
    """One executor for all requests, which must carry the token unless it is empty."""

    def __init__(self, executor: Executor, limit_s: float, token: str) -> None:
        self.executor, self.limit_s, self.token, self.numbers = executor, limit_s, token, itertools.count()

    def run(self, code: Any, stdin: Any, timeout_s: float | None) -> ToolResult:
        """Run a program and wait for its result.

        One that runs longer than `timeout_s` is late; the time that it waits for a worker does not count.
        """
        fault = fault_of(code, stdin)
        if fault:
            return ToolResult("bad_arguments", error_type="BadArguments", error_message=fault)
        program = Program(f"http/{next(self.numbers)}", code, stdin)
        result = asyncio.run(self.executor.arun(program))
        if timeout_s is not None and result.wall_ms > 1000 * timeout_s and not result.infra:
            return ToolResult("timeout", limit_hit="wall", wall_ms=1000 * timeout_s)
        return result


def make_handler(service: Service) -> type[GuardedHandler]:
    class Handler(GuardedHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.let_in():
                self.answer(200, "pong") if self.path == "/v1/ping" else self.answer(404, {"detail": "not found"})

        def do_POST(self) -> None:
            size = self.headers.get("Content-Length", "")
            if not self.let_in():
                return
            if not (size.isascii() and size.isdigit()):
                return self.turn_down(400, f"Content-Length is {size!r:.80}; must be a number")
            if len(size) > 12 or int(size) > MAX_BODY:
                return self.turn_down(413, f"Content-Length is {size:.80}; must be at most {MAX_BODY}")
            body = self.rfile.read(int(size))
            if len(body) < int(size):  # the client has closed the connection
                self.close_connection = True
            elif self.path != "/run_code":
                self.answer(404, {"detail": "not found"})
            else:
                self.answer(*run_request(service, body))

        def let_in(self) -> bool:
            """Whether the request may be answered; if not, a refusal has been sent."""
            refused = refusal(self.head(), service.token, TOKEN_VARIABLE)
            if refused is None:
                self.admitted()
            else:
                self.turn_down(*refused)
            return refused is None

        def turn_down(self, status: int, reason: str) -> None:
            self.refuse(status, json.dumps({"detail": reason}).encode())

        def answer(self, status: int, content: Any) -> None:
            self.reply(status, json.dumps(content).encode())

    return Handler


def run_request(service: Service, body: bytes) -> tuple[int, Any]:
    """Status and content of the answer to a body of `/run_code`."""
    try:
        return 200, answer_of(service.run(*read_request(body, service.limit_s)))
    except (ValueError, RecursionError) as error:
        return 400, {"detail": str(error)}
    except ExecutorFailed as error:
        return 503, {"detail": str(error)}


def make_server(
    settings: ExecutorSettings,
    host: str = "127.0.0.1",
    port: int = 8080,
    token: str = "",
    *,
    connections: int = MAX_CONNECTIONS,
) -> tuple[GuardedServer, Service]:
    """A server that is bound but does not serve yet, with its started executor.

    Args:
        settings: Limits of a program, isolation and size of the pool.
        host: Address to listen on.
        port: Port; 0 takes a free one.
        token: What requests must name; empty on loopback only.
        connections: Most connections at a time.

    Raises:
        ValueError: the address is not loopback and there is no token.
    """
    if not is_loopback(host):
        if not token:
            raise ValueError(f"--host {host} can be reached from elsewhere; set {TOKEN_VARIABLE} to a secret token")
        log.warning("%s can be reached from elsewhere: whoever has the token can run programs", host)
    executor = Executor(settings)
    executor.start()
    service = Service(executor, settings.limits.wall_s, token)

    class Server(GuardedServer):
        most_connections = connections

        def server_close(self) -> None:
            super().server_close()
            executor.close()

    try:
        return Server((host, port), make_handler(service)), service
    except OSError:
        executor.close()
        raise
