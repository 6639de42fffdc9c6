"""Clients of remote services against servers on loopback: `sandbox.server`, and a substitute for code-judge."""

import contextlib
import http.client
import json
import socket
import socketserver
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from grpo_roc_jax.contrib.executors.remote import ServiceRun, TimedConnection, result_of, take_trailer, wrap
from grpo_roc_jax.sandbox.server import make_server
from grpo_roc_jax.tools import CodeCall, ToolsConfig, make_executor
from grpo_roc_jax.tools.config import CodeJudge, SandboxFusion
from grpo_roc_jax.tools.executor import settings_of
from grpo_roc_jax.types import ToolResult
from tests.helpers.labelled import LABELLED

TOOL = "python_code_with_standard_io"
LIMITS = {"wall_s": 2.0, "cpu_s": 2.0, "workers": 3, "roots": 1, "bare_root": False}


@contextlib.contextmanager
def served(server):
    """The address of a server, which answers from a thread."""
    with server:
        threading.Thread(target=server.serve_forever, args=(0.05,)).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


@pytest.fixture(scope="module")
def address():
    with served(make_server(settings_of(ToolsConfig(**LIMITS)), port=0)[0]) as url:
        yield url


def post(address: str, body: object, **headers: str) -> tuple[int, dict]:
    """(status, answer) of a request."""
    with contextlib.closing(http.client.HTTPConnection(address.removeprefix("http://"), timeout=20)) as connection:
        connection.request("POST", "/run_code", json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, json.load(answer)


def run_by(service, *programs: str, session: str | None = None, text: str = "") -> list[ToolResult]:
    """The results of programs at a service; those of a session one after another."""
    arguments = [{"code": code} | ({"input": text} if text else {}) for code in programs]
    tool = "jupyter_code" if session else TOOL
    calls = [CodeCall(str(i), tool, some, session, seed=i) for i, some in enumerate(arguments)]
    with make_executor(ToolsConfig(executor=service, wall_s=2.0)) as executor:
        return [executor.run([call])[0] for call in calls] if session else executor.run(calls)


def test_served_answers_have_the_services_form(address: str) -> None:
    status, answer = post(address, {"code": "print(input())", "language": "python", "stdin": "hi"})
    assert (status, answer["status"], answer["run_result"]["status"]) == (200, "Success", "Finished")
    assert (answer["run_result"]["return_code"], answer["run_result"]["stdout"]) == (0, "hi\n")
    failed = post(address, {"code": "import sys\nsys.exit(3)"})[1]
    assert (failed["status"], failed["run_result"]["return_code"]) == ("Failed", 3)
    for code, status, words in (
        ("1/0", 1, "ZeroDivisionError: division by zero\n"),
        ("raise ValueError", 1, "    raise ValueError\nValueError\n"),
        ("import sys\nsys.exit('no')", 1, "no\n"),
        ("import sys\nsys.exit(-1)", 255, ""),
        ("x = 1\nx = = 1", 1, '  File "<program>", line 2\nSyntaxError: invalid syntax\n'),
    ):
        ended = post(address, {"code": code})[1]["run_result"]
        assert (ended["return_code"], ended["stderr"][-len(words) :] if words else ended["stderr"]) == (status, words)
    # The limit of the request is below the time that the program takes, which is below the executor's own limit.
    late = post(address, {"code": "import time; time.sleep(1.5)", "run_timeout": 0.5})[1]
    assert late["run_result"]["status"] == "TimeLimitExceeded"


def test_served_requests_that_are_refused_also_without_the_token(address: str, monkeypatch) -> None:
    times = [{"run_timeout": wrong} for wrong in ("3", -1, 0, True, float("nan"))]
    wrong = [{"language": "bash"}, {"files": {"a": "b"}}, *times]
    for body in ([], *({"code": "x"} | more for more in wrong)):
        assert post(address, body)[0] == 400, body
    for length, status in (("\u00b2", 400), ("-1", 400), ("9" * 5000, 413)):
        assert post(address, {"code": "1"}, **{"Content-Length": length})[0] == status
    settings = settings_of(ToolsConfig(**LIMITS, preload=()))
    with pytest.raises(ValueError, match="GRPO_TOOLS_TOKEN"):
        make_server(settings, host="0.0.0.0", port=0)
    monkeypatch.setenv("GRPO_TOOLS_TOKEN", "secret")
    with served(make_server(settings, port=0, token="secret")[0]) as guarded:
        assert post(guarded, {"code": "1"})[0] == 401 and run_by(SandboxFusion(guarded), "print(5)")[0].stdout == "5\n"


def test_sandbox_fusion_client_gives_the_right_kinds(address: str) -> None:
    """All labelled programs except those whose kind the service cannot report."""
    known = [(kind, code) for kind, code in LABELLED if kind not in ("output_limit", "crash") and "\0" not in code]
    known = [(kind, code) for kind, code in known if kind != "timeout" or "sleep" in code]
    results = run_by(SandboxFusion(address), *(code for _, code in known))
    pairs = zip(known, results, strict=True)
    assert [(code, kind, r.kind, r.error_message) for (kind, code), r in pairs if r.kind != kind] == []


def test_sandbox_fusion_client_details(address: str) -> None:
    programs = ["import os; os.abort()", "x = 1\n\nx.y", "6 * 7", "print(input())"]
    crash, error, echo, text = run_by(SandboxFusion(address), *programs, text="given")
    assert (crash.kind, crash.signal) == ("crash", 6)
    assert (error.error_type, error.error_line) == ("AttributeError", 3)
    assert (echo.echo, text.stdout) == ("42", "given\n")
    cells = ["a = 1", "print('loud'); a += 1", "1/0", "a"]
    shown = run_by(SandboxFusion(address), *cells, session="s")
    assert [result.kind for result in shown] == ["ok", "ok", "exception", "ok"]
    assert (shown[3].echo, shown[3].stdout) == ("2", "")
    assert all(result.session_id == "s" and "[session]" not in result.observation for result in shown)
    long = run_by(SandboxFusion(address), "'x' * 70000", "'é' * 40000", "list(range(15000))")
    assert [result.kind for result in long] == ["ok"] * 3
    assert all("characters omitted" in result.echo and len(result.echo) < 32_000 for result in long)
    assert all(result.truncated for result in long) and not echo.truncated


UNITTEST = "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.fail()\nunittest.main()"
PICKLE = "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A, __file__)"
STATUS = "import enum, sys\nclass Status(enum.IntEnum): OK = 0\nsys.exit(Status.OK)"
GROUP = "e = ExceptionGroup('g', [ValueError('a'), ExceptionGroup('h', [KeyError()])])\ne.add_note('b')\nraise e"
IN_HARNESS = [
    ([f"print({'+'.join(['1'] * 1500)})"], {"stdout": "1500\n"}),
    (["+".join(["1"] * 1200)], {"echo": "1200"}),
    ([UNITTEST], {"kind": "exception", "error_type": "SystemExit"}),
    ([PICKLE], {"stdout": "True main.py\n"}),
    (["import inspect\nclass A:\n    x = 1\ninspect.getsource(A)"], {"echo": repr("class A:\n    x = 1\n")}),
    ([STATUS], {"kind": "ok"}),
    (["import sys\nsys.exit(256)"], {"kind": "ok"}),
    (["import sys\nsys.exit(0.0)"], {"kind": "exception"}),
    ([GROUP], {"error_message": "g (2 sub-exceptions): ValueError: a; KeyError\nb", "error_line": 3}),
    (["class E(Exception):\n    def __str__(self): 1/0\nraise E"], {"kind": "exception", "error_type": "E"}),
    (["def f():\n    1/0", "\n\n\nf()"], {"error_line": 4}),
    (["'x' * 10**6", "1"], {"echo": "1", "truncated": False}),
    (["import random; random.seed(1)", "random.random()"], {"echo": "0.13436424411240122"}),
    (["print('x' * 10**6)"], {"truncated": True}),
]


def test_programs_in_the_harness() -> None:
    """Of the last of some cells, run by a plain interpreter as a service would."""
    for codes, fields in IN_HARNESS:
        command = [sys.executable, "-c", wrap([(code, i) for i, code in enumerate(codes)], "1111", 65536)]
        done = subprocess.run(command, capture_output=True, text=True)
        run = ServiceRun(done.stdout, done.stderr, timed_out=False, failed=done.returncode != 0, seconds=0.1)
        result = result_of(run, "1111", ToolsConfig(executor=SandboxFusion()))
        assert {name: getattr(result, name) for name in fields} == fields, result


def test_a_session_keeps_what_its_cells_have_drawn_and_nothing_after_its_end(address: str) -> None:
    """It is run again for later cells, under the seed of the first one."""
    codes = ["import random, numpy\nx = random.random(), numpy.random.random()\nx", "x", "x"]
    first, second, third = (result.echo for result in run_by(SandboxFusion(address), *codes, session="s"))
    assert first == second == third != ""
    with make_executor(ToolsConfig(executor=SandboxFusion(address), wall_s=2.0)) as executor:
        executor.submit(CodeCall("late", "jupyter_code", {"code": "x = 1"}, "s"))
        executor.close_session("s")
        assert executor.poll(20.0)[0][1].ok
        (result,) = executor.run([CodeCall("next", "jupyter_code", {"code": "x"}, "s")])
    assert result.error_type == "NameError", "a cell that ends after its session leaves nothing behind"


LOST = ["import os; os._exit(3)", "import os; os.abort()", "import time; time.sleep(9)"]
"""Cells that end the interpreter: of which a session keeps nothing."""


@pytest.mark.parametrize("kind", [SandboxFusion, CodeJudge])
def test_every_result_of_a_session_names_it_and_says_what_it_lost(address: str, kind: type) -> None:
    """So a rollout that used one is not resumed without its variables, whatever became of its calls."""
    with served(judge := judge_server()) as judged:
        service = kind(address if kind is SandboxFusion else judged)
        results = run_by(service, "x = 1", *LOST, "x=", "x", session="s")
        judge.broken_for = 10
        failed = run_by(CodeJudge(judged), "x", session="s")
    assert {result.session_id for result in results + failed} == {"s"} and failed[0].infra
    told = ["rolled back to the state before" in result.observation for result in results]
    assert told == [False, True, True, True, False, False] and results[-1].echo == "1"


def test_time_in_the_queue_of_a_server_is_not_that_of_the_program() -> None:
    settings = settings_of(ToolsConfig(**LIMITS | {"workers": 1, "wall_s": 5.0, "cpu_s": 5.0}))
    with served(make_server(settings, port=0)[0]) as url, ThreadPoolExecutor(2) as threads:
        busy = threads.submit(post, url, {"code": "import time; time.sleep(1.5)"})
        time.sleep(0.3)
        status, answer = threads.submit(post, url, {"code": "print(1)", "run_timeout": 0.6}).result()
        assert (status, answer["run_result"]["stdout"]) == (200, "1\n") and busy.result()[0] == 200


OK = b"HTTP/1.1 200 ok\r\n"
NEVER_ENDING = {
    "a byte of the body": (OK + b"Content-Length: 100000\r\n\r\n", b"x"),
    "a chunk of the body": (OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
    "a byte of the head": (OK + b"X: ", b"y"),
    "a byte of the status": (OK[:-2], b"k"),
    "a head that says to wait": (b"", b"HTTP/1.1 100 wait\r\n\r\n"),
    "nothing": (b"", b""),
}
"""What a service sends first, and then again and again; it answers GET at once."""


@pytest.mark.parametrize("kind", [SandboxFusion, CodeJudge])
@pytest.mark.parametrize("way", NEVER_ENDING)
def test_a_service_that_never_ends_its_answer_holds_no_call(way: str, kind: type) -> None:
    first, piece = NEVER_ENDING[way]
    ended = threading.Event()

    class Dripping(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            if self.request.recv(4096).startswith(b"GET"):
                self.request.sendall(b"HTTP/1.1 404 no\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                return
            with contextlib.suppress(OSError):
                self.request.sendall(first)
                while not ended.wait(0.1):
                    self.request.sendall(piece)

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Dripping)
    with served(server) as address, contextlib.ExitStack() as stack:
        stack.callback(ended.set)
        executor = make_executor(ToolsConfig(executor=kind(address, timeout_s=0.6), wall_s=2.0))
        started = time.monotonic()
        stack.enter_context(executor).submit(CodeCall("slow", TOOL, {"code": "x" * 100_000}, None))
        [(_, result)] = executor.poll(8.0)
        assert (result.kind, result.infra) == ("transport_error", True)
        assert time.monotonic() - started < 2.0


def test_neither_names_nor_handshakes_take_longer_than_a_call(monkeypatch) -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    waits = threading.Event()
    for host, port, secure in (("127.0.0.1", silent.getsockname()[1], True), ("name.invalid", 80, False)):
        connection = TimedConnection(host, port, secure=secure)
        if not secure:
            monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: waits.wait(20))
        started = time.monotonic()
        connection.deadline = started + 0.3
        with pytest.raises(TimeoutError):
            connection.request("GET", "/")
        assert time.monotonic() - started < 2.0
    waits.set()
    silent.close()


class Judge(BaseHTTPRequestHandler):
    """Answers batches as the service does: with an interpreter per submission; can be made to fail."""

    def answer(self, submission: dict) -> dict:
        empty = {"success": False, "run_success": False, "cost": 0.1, "stdout": "", "stderr": "", "reason": ""}
        if self.server.busy_for:
            self.server.busy_for -= 1
            return empty | {"reason": "queue_timeout"}
        command = [sys.executable, "-I", "-c", submission["solution"]]
        try:
            done = subprocess.run(command, input=submission["input"], capture_output=True, text=True, timeout=1)
        except subprocess.TimeoutExpired:
            return empty | {"reason": "worker_timeout", "stderr": "Suicide from timeout."}
        good = done.returncode == 0
        return empty | {"success": good, "run_success": good, "stdout": done.stdout, "stderr": done.stderr}

    def do_GET(self) -> None:
        self.send_error(404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.sizes.append(len(body["submissions"]))
        if self.server.broken_for:
            self.server.broken_for -= 1
            data = b"not json"
        else:
            data = json.dumps({"results": [self.answer(submission) for submission in body["submissions"]]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def judge_server() -> ThreadingHTTPServer:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    server.sizes, server.busy_for, server.broken_for = [], 0, 0
    return server


def test_code_judge_client_batches_and_tells_kinds() -> None:
    programs = ["print(1)", "1/0", "x=", "while True: pass", "raise Exception('x')", "print('error: none')"]
    with served(judge := judge_server()) as address:
        results = run_by(CodeJudge(address), *programs)
    assert [r.kind for r in results] == ["ok", "exception", "syntax_error", "timeout", "exception", "ok"]
    assert sum(judge.sizes) == len(programs) and max(judge.sizes) > 1


def test_code_judge_client_retries_its_queue_and_broken_answers() -> None:
    with served(judge := judge_server()) as address:
        judge.busy_for = judge.broken_for = 1
        assert run_by(CodeJudge(address), "print(5)")[0].stdout == "5\n"
        judge.broken_for = 10
        (result,) = run_by(CodeJudge(address), "print(5)")
    assert (result.kind, result.infra) == ("transport_error", True)


def test_only_the_trailer_of_this_run_is_believed_its_texts_are_cut_and_deep_ones_are_not_read() -> None:
    fake = '\n0000{"kind":"ok"}\n'
    assert take_trailer("text" + fake, "1111", 9) == ("text" + fake, None)
    assert take_trailer('x\n1111{"kind":"sandbox_error"}\n', "1111", 9) == ("x", None)
    texts = dict.fromkeys(("error_type", "error_message", "traceback", "echo"), "x" * 100_000)
    _, report = take_trailer("\n1111" + json.dumps({"kind": "ok"} | texts), "1111", 1000)
    assert max(len(getattr(report, name)) for name in texts) == 8000
    assert take_trailer("\n1111" + "[" * 1_000_000, "1111", 1000) == ("", None)
