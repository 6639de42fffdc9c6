"""Clients of remote services against servers on loopback: `sandbox.server`, and a substitute for code-judge."""

import http.client
import json
import select
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from grpo_roc_jax.contrib.executors.remote import TimedConnection, take_trailer
from grpo_roc_jax.sandbox.server import make_server
from grpo_roc_jax.tools import CodeCall, ExecutorFailed, ToolsConfig, make_executor
from grpo_roc_jax.tools.config import CodeJudge, SandboxFusion
from grpo_roc_jax.tools.executor import settings_of
from grpo_roc_jax.types import ToolResult
from tests.helpers.labelled import LABELLED

TOOL = "python_code_with_standard_io"
LIMITS = {"wall_s": 2.0, "cpu_s": 2.0, "workers": 3, "roots": 1, "bare_root": False}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server, _ = make_server(settings_of(ToolsConfig(**LIMITS)), port=0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def post(address: str, body: object, path: str = "/run_code") -> dict:
    request = urllib.request.Request(address + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer)


def test_served_answers_have_the_services_form(address: str) -> None:
    answer = post(address, {"code": "print(input())", "language": "python", "stdin": "hi"})
    assert answer["status"] == "Success"
    assert answer["run_result"]["status"] == "Finished"
    assert (answer["run_result"]["return_code"], answer["run_result"]["stdout"]) == (0, "hi\n")
    failed = post(address, {"code": "import sys\nsys.exit(3)"})
    assert (failed["status"], failed["run_result"]["return_code"]) == ("Failed", 3)
    raised = post(address, {"code": "1/0"})["run_result"]
    assert raised["return_code"] == 1
    assert raised["stderr"].endswith("ZeroDivisionError: division by zero\n")


def test_served_time_limit_of_the_request(address: str) -> None:
    """It is below the time that the program takes, which is below the executor's own limit."""
    answer = post(address, {"code": "import time; time.sleep(1.5)", "run_timeout": 0.5})
    assert answer["run_result"]["status"] == "TimeLimitExceeded"


@pytest.mark.parametrize("body", [[], {"code": "x", "language": "bash"}, {"code": "x", "files": {"a": "b"}}])
def test_served_requests_that_are_refused(address: str, body: object) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(address, body)
    assert caught.value.code == 400


def status_of(address: str, **headers: str) -> int:
    """Status of a small request with further headers."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=20)
    try:
        connection.request("POST", "/run_code", b'{"code": "1"}', headers)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("Content-Length", "\u00b2", 400), ("Content-Length", "-1", 400), ("Content-Length", "9" * 5000, 413),
        ("Host", "example.org", 403), ("Host", "example.org:80", 403), ("Host", "", 403), ("Host", "[::1", 403),
        ("Host", "[::1]", 200), ("Host", "[::1]:80", 200), ("Host", "127.0.0.1:80", 200), ("Host", "localhost", 200),
    ],
)  # fmt: skip
def test_served_requests_with_strange_headers(address: str, name: str, value: str, status: int) -> None:
    assert status_of(address, **{name: value}) == status


def test_served_with_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="GRPO_TOOLS_TOKEN"):
        make_server(settings_of(ToolsConfig(**LIMITS)), host="0.0.0.0", port=0)
    settings = settings_of(ToolsConfig(**LIMITS, preload=()))
    server, _ = make_server(settings, port=0, token="secret", connections=8)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        wrong = [{}, {"Authorization": "Bearer other"}, {"Authorization": "Bearer \u00e9"}]
        assert [status_of(address, **headers) for headers in wrong] == [401] * 3
        monkeypatch.setenv("GRPO_TOOLS_TOKEN", "secret")
        with make_executor(ToolsConfig(executor=SandboxFusion(address), wall_s=2.0)) as executor:
            assert executor.run([CodeCall("a", TOOL, {"code": "print(5)"}, None)])[0].stdout == "5\n"
        # Connections that say nothing take all places; the others are closed at once.
        idle = [socket.create_connection(server.server_address) for _ in range(12)]
        assert [one.recv(1) for one in select.select(idle, [], [], 20)[0]][:1] == [b""]
        for one in idle:
            one.close()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_sandbox_fusion_client_gives_the_right_kinds(address: str) -> None:
    """All labelled programs except those whose kind the service cannot report."""
    known = [(kind, code) for kind, code in LABELLED if kind not in ("output_limit", "crash") and "\0" not in code]
    known = [(kind, code) for kind, code in known if kind != "timeout" or "sleep" in code]
    with make_executor(ToolsConfig(executor=SandboxFusion(address), wall_s=2.0)) as executor:
        calls = [CodeCall(str(i), TOOL, {"code": code}, None) for i, (_, code) in enumerate(known)]
        results = executor.run(calls)
    wrong = [
        (code, kind, r.kind, r.error_message) for (kind, code), r in zip(known, results, strict=True) if r.kind != kind
    ]
    assert wrong == []


def test_sandbox_fusion_client_details(address: str) -> None:
    with make_executor(ToolsConfig(executor=SandboxFusion(address), wall_s=2.0)) as executor:
        crash, error, echo, text = executor.run(
            [
                CodeCall("a", TOOL, {"code": "import os; os.abort()"}, None),
                CodeCall("b", TOOL, {"code": "x = 1\n\nx.y"}, None),
                CodeCall("c", TOOL, {"code": "6 * 7"}, None),
                CodeCall("d", TOOL, {"code": "print(input())", "input": "given"}, None),
            ]
        )
        assert (crash.kind, crash.signal) == ("crash", 6)
        assert (error.error_type, error.error_line) == ("AttributeError", 3)
        assert (echo.echo, text.stdout) == ("42", "given\n")
        cells = ["a = 1", "print('loud'); a += 1", "1/0", "a"]
        shown = [executor.run([CodeCall(f"s{i}", "jupyter_code", {"code": c}, "s")])[0] for i, c in enumerate(cells)]
        assert [result.kind for result in shown] == ["ok", "ok", "exception", "ok"]
        assert (shown[3].echo, shown[3].stdout) == ("2", "")


def test_no_service_is_said_at_once() -> None:
    with pytest.raises(ExecutorFailed, match="no service answers"):
        make_executor(ToolsConfig(executor=SandboxFusion("http://127.0.0.1:9"))).start()


class SlowService:
    """Answers GET at once, and other requests in one of the ways in which a service never comes to an end."""

    def __init__(self, way: str) -> None:
        self.way, self.ended = way, threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=0)
        self.address = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.waiting: list[socket.socket] = []
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self) -> None:
        while not self.ended.is_set():
            try:
                sock = self.listener.accept()[0]
            except OSError:
                return
            if sock.recv(4096).startswith(b"GET"):
                sock.sendall(b"HTTP/1.1 404 no\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                sock.close()
                if self.way == "no connection":
                    while not self.ended.is_set():  # the queue of connections is full
                        self.waiting.append(socket.socket())
                        self.waiting[-1].setblocking(False)
                        self.waiting[-1].connect_ex(self.listener.getsockname())
                        self.ended.wait(0.05)
            else:
                threading.Thread(target=self.drip, args=(sock,), daemon=True).start()

    def drip(self, sock: socket.socket) -> None:
        head = b"HTTP/1.1 200 ok\r\n"
        before, piece = {
            "a byte of the body": (head + b"Content-Length: 100000\r\n\r\n", b"x"),
            "a chunk of the body": (head + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
            "a byte of the head": (head + b"X: ", b"y"),
            "a byte of the status": (b"HTTP/1.1 200 o", b"k"),
            "a head that says to wait": (b"", b"HTTP/1.1 100 wait\r\n\r\n"),
            "nothing": (b"", b""),
        }[self.way]
        try:
            sock.sendall(before)
            while not self.ended.wait(0.1):
                sock.sendall(piece)
        except OSError:
            pass
        sock.close()

    def close(self) -> None:
        self.ended.set()
        self.listener.close()
        for sock in self.waiting:
            sock.close()


@pytest.mark.parametrize("kind", [SandboxFusion, CodeJudge])
@pytest.mark.parametrize(
    "way",
    [
        "a byte of the body", "a chunk of the body", "a byte of the head", "a byte of the status",
        "a head that says to wait", "nothing", "no connection",
    ],
)  # fmt: skip
def test_a_service_that_never_ends_its_answer_holds_no_call(way: str, kind: type) -> None:
    service = SlowService(way)
    config = ToolsConfig(executor=kind(service.address, timeout_s=0.6), wall_s=2.0)
    try:
        with make_executor(config) as executor:
            started = time.monotonic()
            executor.submit(CodeCall("slow", TOOL, {"code": "x" * 100_000}, None))
            [(_, result)] = executor.poll(8.0)
            assert (result.kind, result.infra) == ("transport_error", True)
            assert time.monotonic() - started < 2.0
    finally:
        service.close()


def test_neither_names_nor_handshakes_take_longer_than_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    waits = threading.Event()
    for connection in (
        TimedConnection("127.0.0.1", silent.getsockname()[1], secure=True),
        TimedConnection("name.invalid", 80, secure=False),
    ):
        if connection.host == "name.invalid":
            monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: waits.wait(20))
        started = time.monotonic()
        connection.deadline = started + 0.3
        with pytest.raises(TimeoutError):
            connection.request("GET", "/")
        assert time.monotonic() - started < 2.0
    waits.set()
    silent.close()


class Judge:
    """Answers batches as the service does: with an interpreter per submission; can be made to fail."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.busy_for = self.broken_for = 0
        judge = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(404)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                judge.sizes.append(len(body["submissions"]))
                if judge.broken_for:
                    judge.broken_for -= 1
                    data = b"not json"
                else:
                    data = json.dumps({"results": [judge.answer(one) for one in body["submissions"]]}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    def answer(self, submission: dict) -> dict:
        empty = {"success": False, "run_success": False, "cost": 0.1, "stdout": "", "stderr": ""}
        if self.busy_for:
            self.busy_for -= 1
            return empty | {"reason": "queue_timeout"}
        command = [sys.executable, "-I", "-c", submission["solution"]]
        try:
            done = subprocess.run(command, input=submission["input"], capture_output=True, text=True, timeout=1)
        except subprocess.TimeoutExpired:
            return empty | {"reason": "worker_timeout", "stderr": "Suicide from timeout."}
        good = done.returncode == 0
        return {
            "success": good,
            "run_success": good,
            "cost": 0.1,
            "reason": "",
            "stdout": done.stdout,
            "stderr": done.stderr,
        }


@pytest.fixture
def judge() -> Iterator[Judge]:
    judge = Judge()
    yield judge
    judge.server.shutdown()
    judge.thread.join()
    judge.server.server_close()


def judge_config(judge: Judge) -> ToolsConfig:
    return ToolsConfig(executor=CodeJudge(f"http://127.0.0.1:{judge.server.server_address[1]}"), wall_s=2.0)


def test_code_judge_client_batches_and_tells_kinds(judge: Judge) -> None:
    programs = ["print(1)", "1/0", "x=", "while True: pass", "raise Exception('x')", "print('error: none')"]
    with make_executor(judge_config(judge)) as executor:
        results = executor.run([CodeCall(str(i), TOOL, {"code": code}, None) for i, code in enumerate(programs)])
    assert [r.kind for r in results] == ["ok", "exception", "syntax_error", "timeout", "exception", "ok"]
    assert sum(judge.sizes) == len(programs) and max(judge.sizes) > 1


def test_code_judge_client_retries_its_queue_and_broken_answers(judge: Judge) -> None:
    judge.busy_for = judge.broken_for = 1
    with make_executor(judge_config(judge)) as executor:
        assert executor.run([CodeCall("a", TOOL, {"code": "print(5)"}, None)])[0].stdout == "5\n"
        judge.broken_for = 10
        result = executor.run([CodeCall("b", TOOL, {"code": "print(5)"}, None)])[0]
        assert (result.kind, result.infra) == ("transport_error", True)


def test_printed_trailer_of_another_run_is_not_believed() -> None:
    fake = '\n0000{"kind":"ok"}\n'
    assert take_trailer("text" + fake, "1111", 9) == ("text" + fake, None)
    assert take_trailer('x\n1111{"kind":"sandbox_error"}\n', "1111", 9) == ("x", None)
    assert isinstance(ToolResult("ok"), ToolResult)


def test_texts_of_a_trailer_are_cut_and_deep_ones_are_not_read() -> None:
    texts = dict.fromkeys(("error_type", "error_message", "traceback", "echo"), "x" * 100_000)
    _, report = take_trailer("\n1111" + json.dumps({"kind": "ok"} | texts), "1111", 1000)
    assert max(len(getattr(report, name)) for name in texts) == 8000
    assert take_trailer("\n1111" + "[" * 1_000_000, "1111", 1000) == ("", None)
