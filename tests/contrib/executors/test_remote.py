"""Clients of remote services against servers on loopback: `sandbox.server`, and a substitute for code-judge."""

import contextlib
import http.client
import json
import socketserver
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from grpo_roc_jax.contrib.executors.remote import ServiceRun, result_of, take_trailer, wrap
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


def test_served_answers_have_the_services_form(address: str, monkeypatch) -> None:
    status, answer = post(address, {"code": "print(input())", "language": "python", "stdin": "hi"})
    assert (status, answer["status"], answer["run_result"]["status"]) == (200, "Success", "Finished")
    assert (answer["run_result"]["return_code"], answer["run_result"]["stdout"]) == (0, "hi\n")
    for code, status, words in (
        ("1/0", 1, "ZeroDivisionError: division by zero\n"),
        ("raise ValueError", 1, "    raise ValueError\nValueError\n"),
        ("import sys\nsys.exit('no')", 1, "no\n"),
        ("x = 1\nx = = 1", 1, '  File "<program>", line 2\nSyntaxError: invalid syntax\n'),
    ):
        ended = post(address, {"code": code})[1]["run_result"]
        assert ended["return_code"] == status and ended["stderr"].endswith(words)
    late = post(address, {"code": "import time; time.sleep(1.5)", "run_timeout": 0.5})[1]
    assert late["run_result"]["status"] == "TimeLimitExceeded"
    # What is refused, also without the token.
    for more in ({"language": "bash"}, {"files": {"a": "b"}}, {"run_timeout": "3"}, {"run_timeout": -1}):
        assert post(address, {"code": "x"} | more)[0] == 400, more
    assert post(address, [])[0] == 400
    for length, status in (("-1", 400), ("9" * 5000, 413)):
        assert post(address, {"code": "1"}, **{"Content-Length": length})[0] == status
    settings = settings_of(ToolsConfig(**LIMITS, preload=()))
    with pytest.raises(ValueError, match="GRPO_TOOLS_TOKEN"):
        make_server(settings, host="0.0.0.0", port=0)
    monkeypatch.setenv("GRPO_TOOLS_TOKEN", "secret")
    with served(make_server(settings, port=0, token="secret")[0]) as guarded:
        assert post(guarded, {"code": "1"})[0] == 401 and run_by(SandboxFusion(guarded), "print(5)")[0].stdout == "5\n"


def test_sandbox_fusion_client(address: str) -> None:
    """All labelled programs except those whose kind the service cannot report."""
    known = [(kind, code) for kind, code in LABELLED if kind not in ("output_limit", "crash") and "\0" not in code]
    known = [(kind, code) for kind, code in known if kind != "timeout" or "sleep" in code]
    results = run_by(SandboxFusion(address), *(code for _, code in known))
    pairs = zip(known, results, strict=True)
    assert [(code, kind, r.kind, r.error_message) for (kind, code), r in pairs if r.kind != kind] == []
    programs = ["import os; os.abort()", "x = 1\n\nx.y", "print(input())", "'é' * 40000"]
    crash, error, text, long = run_by(SandboxFusion(address), *programs, text="given")
    assert (crash.kind, crash.signal, text.stdout) == ("crash", 6, "given\n")
    assert (error.error_type, error.error_line, text.truncated) == ("AttributeError", 3, False)
    assert "characters omitted" in long.echo and len(long.echo) < 32_000 and long.truncated
    shown = run_by(SandboxFusion(address), "a = 1", "print('loud'); a += 1", "1/0", "a", session="s")
    assert [(result.kind, result.echo) for result in shown] == [("ok", ""), ("ok", ""), ("exception", ""), ("ok", "2")]
    assert shown[3].stdout == "" and all("[session]" not in result.observation for result in shown)


PICKLE = "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A, __file__)"
GROUP = "e = ExceptionGroup('g', [ValueError('a'), ExceptionGroup('h', [KeyError()])])\ne.add_note('b')\nraise e"
IN_HARNESS = [
    (["+".join(["1"] * 1200)], {"echo": "1200"}),
    ([PICKLE], {"stdout": "True main.py\n"}),
    (["import inspect\nclass A:\n    x = 1\ninspect.getsource(A)"], {"echo": repr("class A:\n    x = 1\n")}),
    ([GROUP], {"error_message": "g (2 sub-exceptions): ValueError: a; KeyError\nb", "error_line": 3}),
    (["def f():\n    1/0", "\n\n\nf()"], {"error_line": 4}),
    (["import random; random.seed(1)", "random.random()"], {"echo": "0.13436424411240122"}),
]


def test_programs_in_the_harness() -> None:
    """Of the last of some cells, run by a plain interpreter as a service would."""
    for codes, fields in IN_HARNESS:
        command = [sys.executable, "-c", wrap([(code, i) for i, code in enumerate(codes)], "1111", 65536)]
        done = subprocess.run(command, capture_output=True, text=True)
        run = ServiceRun(done.stdout, done.stderr, timed_out=False, failed=done.returncode != 0, seconds=0.1)
        result = result_of(run, "1111", ToolsConfig(executor=SandboxFusion()))
        assert {name: getattr(result, name) for name in fields} == fields, result
    # Only the trailer of this run is believed; its texts are cut, and deep ones are not read.
    fake = '\n0000{"kind":"ok"}\n'
    assert take_trailer("text" + fake, "1111", 9) == ("text" + fake, None)
    assert take_trailer('x\n1111{"kind":"sandbox_error"}\n', "1111", 9) == ("x", None)
    texts = dict.fromkeys(("error_type", "error_message", "traceback", "echo"), "x" * 100_000)
    _, report = take_trailer("\n1111" + json.dumps({"kind": "ok"} | texts), "1111", 1000)
    assert max(len(getattr(report, name)) for name in texts) == 8000
    assert take_trailer("\n1111" + "[" * 1_000_000, "1111", 1000) == ("", None)


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


@pytest.mark.parametrize("kind", [SandboxFusion, CodeJudge])
def test_every_result_of_a_session_names_it_and_says_what_it_lost(address: str, kind: type) -> None:
    """So a rollout that used one is not resumed without its variables, whatever became of its calls."""
    with served(judge := judge_server()) as judged:
        service = kind(address if kind is SandboxFusion else judged)
        lost = ["import os; os._exit(3)", "import time; time.sleep(9)"]  # which end the interpreter
        results = run_by(service, "x = 1", *lost, "x=", "x", session="s")
        judge.broken_for = 10
        failed = run_by(CodeJudge(judged), "x", session="s")
    assert {result.session_id for result in results + failed} == {"s"} and failed[0].infra
    told = ["rolled back to the state before" in result.observation for result in results]
    assert told == [False, True, True, False, False] and results[-1].echo == "1"


NEVER_ENDING = [
    (b"HTTP/1.1 200 ok\r\nContent-Length: 100000\r\n\r\n", b"x", SandboxFusion),
    (b"", b"HTTP/1.1 100 wait\r\n\r\n", CodeJudge),
]
"""What a service sends first, and then again and again; it answers GET at once."""


@pytest.mark.parametrize(("head", "piece", "kind"), NEVER_ENDING, ids=["body", "wait"])
def test_a_service_that_never_ends_its_answer_holds_no_call(head: bytes, piece: bytes, kind: type) -> None:
    ended = threading.Event()

    class Dripping(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            if self.request.recv(4096).startswith(b"GET"):
                self.request.sendall(b"HTTP/1.1 404 no\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                return
            with contextlib.suppress(OSError):
                self.request.sendall(head)
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
        submissions = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["submissions"]
        self.server.sizes.append(len(submissions))
        data = json.dumps({"results": [self.answer(submission) for submission in submissions]}).encode()
        if self.server.broken_for:
            self.server.broken_for, data = self.server.broken_for - 1, b"not json"
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def judge_server() -> ThreadingHTTPServer:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    server.sizes, server.busy_for, server.broken_for = [], 0, 0
    return server


def test_code_judge_client_retries_its_queue_and_broken_answers() -> None:
    """And tells kinds; programs go in batches."""
    programs = ["print(1)", "1/0", "x=", "while True: pass", "print('error: none')"]
    with served(judge := judge_server()) as address:
        results = run_by(CodeJudge(address), *programs)
        assert sum(judge.sizes) == len(programs) and max(judge.sizes) > 1
        judge.busy_for = judge.broken_for = 1
        assert run_by(CodeJudge(address), "print(5)")[0].stdout == "5\n"
        judge.broken_for = 10
        results += run_by(CodeJudge(address), "print(5)")
    kinds = ["ok", "exception", "syntax_error", "timeout", "ok", "transport_error"]
    assert [result.kind for result in results] == kinds and results[-1].infra
