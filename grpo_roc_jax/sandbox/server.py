"""The executor over HTTP, with the interface of SandboxFusion's `/run_code` (`grpo-roc serve-tools`).

For other trainers. Listens on loopback by default, since anyone who can reach the port can run programs, within the
limits of the sandbox. The environment variable `GRPO_TOOLS_TOKEN` holds the bearer token that requests must carry; any
other address needs one. Connections are not encrypted.
"""

import asyncio
import hmac
import ipaddress
import itertools
import json
import logging
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from grpo_roc_jax.sandbox._messages import ExecutorSettings
from grpo_roc_jax.sandbox.executor import Executor
from grpo_roc_jax.sandbox.program import ExecutorFailed, Program
from grpo_roc_jax.sandbox.result import ToolResult

log = logging.getLogger(__name__)
TOKEN_VARIABLE = "GRPO_TOOLS_TOKEN"
"""Environment variable that holds the bearer token of the service."""
MAX_BODY = 16 << 20
MAX_PROGRAM = 8 << 20
"""Longest program or input, in bytes; frames to the executor process are limited to 16 MiB."""
MAX_CONNECTIONS = 512
"""Connections at a time, each of which has a thread; further ones are closed."""


def answer_of(result: ToolResult) -> dict[str, Any]:
    """A result in the format of the service."""
    rest: dict[str, Any] = {"compile_result": None, "executor_pod_name": None, "files": {}}
    if result.infra:
        message = result.error_message or result.kind
        return {"status": "SandboxError", "message": message, "run_result": None} | rest
    late = result.kind == "timeout"
    stderr = result.stderr
    # As an interpreter prints it at the end of a program that raised; it prints nothing for a program that exits.
    if result.error_type not in ("", "EarlyExit", "SystemExit"):
        frames = f"Traceback (most recent call last):\n{result.traceback}\n" if result.traceback else ""
        gap = "\n" if stderr and not stderr.endswith("\n") else ""
        stderr += f"{gap}{frames}{result.error_type}: {result.error_message}\n"
    run = {
        "status": "TimeLimitExceeded" if late else "Finished", "execution_time": result.wall_ms / 1000,
        "return_code": None if late else exit_status(result), "stdout": result.stdout, "stderr": stderr,
    }  # fmt: skip
    status = "Success" if run["return_code"] == 0 else "Failed"
    return {"status": status, "message": "", "run_result": run} | rest


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
    timeout_s = request.get("run_timeout")
    shorter = isinstance(timeout_s, int | float) and 0 < timeout_s < limit_s
    return request.get("code"), request.get("stdin") or "", timeout_s if shorter else None


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

    def refusal(self, host: str, authorization: str) -> tuple[int, str] | None:
        """Status and reason if a request with these headers is refused."""
        return refusal(self.token, TOKEN_VARIABLE, host, authorization)

    def run(self, code: Any, stdin: Any, timeout_s: float | None) -> ToolResult:
        """Run a program and wait for its result."""
        fault = fault_of(code, stdin)
        if fault:
            return ToolResult("bad_arguments", error_type="BadArguments", error_message=fault)
        program = Program(f"http/{next(self.numbers)}", code, stdin)
        try:
            return asyncio.run(asyncio.wait_for(self.executor.arun(program), timeout_s))
        except TimeoutError:
            return ToolResult("timeout", limit_hit="wall", wall_ms=1000 * timeout_s)


def refusal(token: str, variable: str, host: str, authorization: str) -> tuple[int, str] | None:
    """Status and reason if a request with these headers is refused by a server with this token, which may be empty."""
    if token:
        good = hmac.compare_digest(authorization.encode(), f"Bearer {token}".encode())
        return None if good else (401, f"the request must carry the bearer token of {variable}")
    # A page in a browser can reach loopback under a host name of its own.
    return None if is_loopback(host) else (403, f"Host is {host!r:.80}; must be localhost or its address")


def is_loopback(host: str) -> bool:
    """Whether a name or address, maybe with a port, means this host alone."""
    try:
        name = urllib.parse.urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def make_handler(service: Service) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 120

        def do_GET(self) -> None:
            self.reply(200, "pong") if self.path == "/v1/ping" else self.reply(404, {"detail": "not found"})

        def do_POST(self) -> None:
            size = self.headers.get("Content-Length", "")
            refusal = service.refusal(self.headers.get("Host", ""), self.headers.get("Authorization", ""))
            if refusal is None and not (size.isascii() and size.isdigit()):
                refusal = 400, f"Content-Length is {size!r:.80}; must be a number"
            elif refusal is None and (len(size) > 12 or int(size) > MAX_BODY):
                refusal = 413, f"Content-Length is {size:.80}; must be at most {MAX_BODY}"
            if refusal is not None:
                self.close_connection = True
                self.reply(refusal[0], {"detail": refusal[1]})
                return
            body = self.rfile.read(int(size))
            if self.path != "/run_code":
                self.reply(404, {"detail": "not found"})
                return
            try:
                self.reply(200, answer_of(service.run(*read_request(body, service.limit_s))))
            except (ValueError, RecursionError) as error:
                self.reply(400, {"detail": str(error)})
            except ExecutorFailed as error:
                self.reply(503, {"detail": str(error)})

        def reply(self, status: int, content: Any) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def make_server(
    settings: ExecutorSettings, host: str = "127.0.0.1", port: int = 8080, token: str = ""
) -> tuple[ThreadingHTTPServer, Service]:
    """A server that is bound but does not serve yet, with its started executor.

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

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 256
        places = threading.BoundedSemaphore(MAX_CONNECTIONS)

        def process_request(self, request: Any, client_address: Any) -> None:
            if self.places.acquire(blocking=False):
                super().process_request(request, client_address)
            else:
                self.shutdown_request(request)

        def process_request_thread(self, request: Any, client_address: Any) -> None:
            try:
                super().process_request_thread(request, client_address)
            finally:
                self.places.release()

        def server_close(self) -> None:
            super().server_close()
            executor.close()

    try:
        return Server((host, port), make_handler(service)), service
    except OSError:
        executor.close()
        raise
