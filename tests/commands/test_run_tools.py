"""The command lines, run as a user runs them."""

import json
import re
import subprocess
import sys
import urllib.request
from types import ModuleType

import pytest

from grpo_roc_jax.commands import probe, serve_tools
from grpo_roc_jax.commands import run_tools as run

LINES = [
    {"id": "one", "code": "print(1)"},
    {"id": "in", "code": "print(input()[::-1])", "stdin": "abc"},
    {"id": "c1", "code": "x = 20", "session": "s"},
    {"id": "c2", "code": "x + 1", "session": "s"},
    {"id": "div", "code": "1/0"},
    {"id": "nul", "code": "print(1)\0"},
    {"id": "loop", "code": "while True: pass"},
    {"id": "none"},
    {"id": 9, "code": 5},
    {"id": "both", "code": "1", "stdin": "x", "session": "s"},
    {"id": "seed", "code": "1", "seed": "7"},
    {"code": "1", "seed": 1.5},
    {"id": "list", "code": "1", "session": ["s"]},
    {"id": "nulls", "code": "1", "stdin": None, "session": None, "seed": None},
]
FAULTS = {
    10: "line 10 has stdin and session; cells of a session have no standard input",
    11: 'line 11 has seed "7"; must be a whole number',
    12: "line 12 has seed 1.5; must be a whole number",
    13: 'line 13 has session ["s"]; must be a text or a whole number',
    16: "line 16 is not JSON: Expecting value: line 1 column 1 (char 0)",
    17: "line 17 is not an object",
}
"""Number of a line -> why it is no call."""


def module(name: str, *arguments: str, text: str | None = None) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "grpo_roc_jax", name, *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=120)


def test_run_gives_one_result_per_line(tmp_path) -> None:
    path = tmp_path / "programs.jsonl"
    path.write_text("\n".join(map(json.dumps, LINES)) + "\n\nnot json\n[1]\n")
    done = module("run-tools", str(path), "--workers", "2", "--wall-s", "1", "--memory-mb", "256", "--preload", "")
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("tool executor at isolation level L")
    results = [json.loads(line) for line in done.stdout.splitlines()]
    by_id = {result["id"]: result for result in results}
    expected = {"id", "kind", "ok", "counts_as_error", "infra", "stdout", "stderr", "wall_ms", "isolation"}
    assert all(expected <= set(result) for result in results)
    assert {r["line"]: r["error_message"] for r in results if r["kind"] == "malformed_call"} == FAULTS
    assert sorted(r["line"] for r in results) == [*range(1, 15), 16, 17], "a blank line is counted"
    assert {r["line"]: r["id"] for r in results if r["line"] in (1, 9, 10, 12, 17)} == {
        1: "one", 9: 9, 10: "both", 12: 11, 17: 16,
    }  # fmt: skip
    kinds = {name: by_id[name]["kind"] for name in ("one", "in", "c2", "div", "nul", "loop", "none", 9, "nulls")}
    assert kinds == {
        "one": "ok", "in": "ok", "c2": "ok", "div": "exception", "nul": "syntax_error", "loop": "timeout",
        "none": "bad_arguments", 9: "bad_arguments", "nulls": "ok",
    }  # fmt: skip
    assert (by_id["in"]["stdout"], by_id["c2"]["echo"]) == ("cba\n", "21")
    assert len(results) == len(LINES) + 2


def test_lines_are_read_one_by_one_as_bytes(tmp_path) -> None:
    path = tmp_path / "programs.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"id": "a", "code": "1"}\n{"id": "b", "code": "\xff"}\n{"id": "c", "code": "2"}\n')
    calls = {number: call for number, _, call in run.read_calls(path.read_bytes().splitlines())}
    assert calls[1].arguments == {"code": "1"} and calls[3].arguments == {"code": "2"}
    assert calls[2].kind == "malformed_call" and "not JSON" in calls[2].error_message


def test_run_reads_standard_input_at_a_given_level() -> None:
    done = module("run-tools", "-", "--workers", "1", "--level", "L0", "--preload", "", text='{"code": "print(2)"}\n')
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["stdout"], result["isolation"], result["line"], result["id"]) == ("2\n", "L0", 1, 0)


def test_files_that_cannot_be_read_or_written_are_errors_of_the_arguments(tmp_path, capsys) -> None:
    (tmp_path / "programs.jsonl").write_text("")
    absent, below = str(tmp_path / "absent" / "file.jsonl"), str(tmp_path / "programs.jsonl" / "out.jsonl")
    for files in ([absent], [str(tmp_path / "programs.jsonl"), "--out", below]):
        assert run.main([*files, "--preload", "", "--workers", "1"]) == 2
        assert re.search("error: .*(No such file or directory|File exists)", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workers", "-1"], "error: workers = -1: must be at least 0\n"),
        (["--memory-mb", "0"], "error: memory_mb = 0: must be at least 1\n"),
        (["--wall-s", "nan"], "error: wall_s = .nan: must be a finite number; "),
    ],
)
@pytest.mark.parametrize("command", [run.main, serve_tools.main])
def test_a_limit_that_cannot_be_is_named_with_its_constraint(command, words, message, capsys) -> None:
    assert command([*(["-"] if command is run.main else []), *words]) in (2, 5)
    assert capsys.readouterr().err.startswith(message)


def test_probe_prints_the_table() -> None:
    done = module("probe")
    assert done.returncode in (0, 5)
    assert "levels:" in done.stdout and "landlock" in done.stdout and "\ncgroup around the executor: " in done.stdout
    again = module("probe", "--json")
    assert again.returncode == done.returncode
    report = json.loads(again.stdout)
    assert [layer["name"] for layer in report["layers"]] == ["limits", "seccomp", "landlock", "namespaces", "own uid"]
    assert report["cgroup"]["detail"] in done.stdout


def test_serve_answers_and_ends() -> None:
    words = ["serve-tools", "--port", "0", "--workers", "1", "--wall-s", "1"]
    command = [sys.executable, "-m", "grpo_roc_jax", *words]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        address = server.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:")
        body = json.dumps({"code": "print(3)", "language": "python"}).encode()
        request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=20) as answer:
            assert json.load(answer)["run_result"]["stdout"] == "3\n"
    finally:
        server.terminate()
        server.wait(10)
        server.stdout.close()


@pytest.mark.parametrize("command", [probe, run, serve_tools])
def test_help(command: ModuleType, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["--help"])
    assert not ended.value.code and "isolation" in capsys.readouterr().out
