"""Tools from the command line, run as a user runs them, and what a machine can do."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from grpo_roc_jax.__main__ import main
from grpo_roc_jax.commands import doctor, probe, serve_tools
from grpo_roc_jax.commands import run_tools as run
from grpo_roc_jax.process.installing import install_command

FAULTS = {
    10: "line 10 has stdin and session; cells of a session have no standard input",
    11: 'line 11 has seed "7"; must be a whole number',
    12: "line 12 has seed 1.5; must be a whole number",
    13: 'line 13 has session ["s"]; must be a text or a whole number',
    16: "line 16 is not JSON: Expecting value: line 1 column 1 (char 0)",
    17: "line 17 is not an object",
}
"""Number of a line -> why it is no call."""
LINES = [
    ("ok", {"id": "one", "code": "print(1)"}),
    ("ok", {"id": "in", "code": "print(input()[::-1])", "stdin": "abc"}),
    ("ok", {"id": "c1", "code": "x = 20", "session": "s"}),
    ("ok", {"id": "c2", "code": "x + 1", "session": "s"}),
    ("exception", {"id": "div", "code": "1/0"}),
    ("syntax_error", {"id": "nul", "code": "print(1)\0"}),
    ("timeout", {"id": "loop", "code": "while True: pass"}),
    ("bad_arguments", {"id": "none"}),
    ("bad_arguments", {"id": 9, "code": 5}),
    ("malformed_call", {"id": "both", "code": "1", "stdin": "x", "session": "s"}),
    ("malformed_call", {"id": "seed", "code": "1", "seed": "7"}),
    ("malformed_call", {"code": "1", "seed": 1.5}),
    ("malformed_call", {"id": "list", "code": "1", "session": ["s"]}),
    ("ok", {"id": "nulls", "code": "1", "stdin": None, "session": None, "seed": None}),
]
"""(kind of the result, the line)."""


def module(name: str, *arguments: str, text: str | None = None) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "grpo_roc_jax", name, *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=120)


def test_run_gives_one_result_per_line(tmp_path) -> None:
    path = tmp_path / "programs.jsonl"
    path.write_text("\n".join(json.dumps(line) for _, line in LINES) + "\n\nnot json\n[1]\n")
    done = module("run-tools", str(path), "--workers", "2", "--wall-s", "1", "--memory-mb", "256", "--preload", "")
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("tool executor at isolation level L")
    results = sorted(map(json.loads, done.stdout.splitlines()), key=lambda result: result["line"])
    expected = {"id", "kind", "ok", "counts_as_error", "infra", "stdout", "stderr", "wall_ms", "isolation"}
    assert all(expected <= set(result) for result in results)
    assert {r["line"]: r["error_message"] for r in results if r["kind"] == "malformed_call"} == FAULTS
    assert [r["line"] for r in results] == [*range(1, 15), 16, 17], "a blank line is counted"
    assert [r["kind"] for r in results] == [*(kind for kind, _ in LINES), "malformed_call", "malformed_call"]
    names = [line.get("id", i - 1) for i, (_, line) in enumerate(LINES, 1)]
    assert [r["id"] for r in results][:14] == names and results[-1]["id"] == 16
    assert (results[1]["stdout"], results[3]["echo"]) == ("cba\n", "21")


def test_lines_are_read_one_by_one_as_bytes_also_of_standard_input() -> None:
    text = b'\xef\xbb\xbf{"id": "a", "code": "1"}\n{"id": "b", "code": "\xff"}\n{"id": "c", "code": "2"}\n'
    calls = {number: call for number, _, call in run.read_calls(text.splitlines())}
    assert calls[1].arguments == {"code": "1"} and calls[3].arguments == {"code": "2"}
    assert calls[2].kind == "malformed_call" and "not JSON" in calls[2].error_message
    done = module("run-tools", "-", "--workers", "1", "--level", "L0", "--preload", "", text='{"code": "print(2)"}\n')
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["stdout"], result["isolation"], result["line"], result["id"]) == ("2\n", "L0", 1, 0)


@pytest.mark.parametrize("command", [run.main, serve_tools.main])
def test_arguments_that_cannot_be_are_named(command, tmp_path, capsys) -> None:
    first = ["-"] if command is run.main else []
    for words, message in (
        (["--workers", "-1"], "error: workers = -1: must be at least 0\n"),
        (["--memory-mb", "0"], "error: memory_mb = 0: must be at least 1\n"),
        (["--wall-s", "nan"], "error: wall_s = .nan: must be a finite number; "),
    ):
        assert command([*first, *words]) in (2, 5)
        assert capsys.readouterr().err.startswith(message)
    (file := tmp_path / "programs.jsonl").write_text("")
    for files in ([tmp_path / "absent" / "file.jsonl"], [file, "--out", file / "out.jsonl"]) if first else ():
        assert command([*map(str, files), "--preload", "", "--workers", "1"]) == 2
        assert re.search("error: .*(No such file or directory|File exists)", capsys.readouterr().err)


def test_probe_prints_the_table(capsys) -> None:
    done = module("probe")
    assert done.returncode in (0, 5)
    assert "levels:" in done.stdout and "landlock" in done.stdout and "\ncgroup around the executor: " in done.stdout
    assert probe.main(["--json"]) == done.returncode, "also in a process with many open files"
    report = json.loads(capsys.readouterr().out)
    assert [layer["name"] for layer in report["layers"]] == ["limits", "seccomp", "landlock", "namespaces", "own uid"]
    assert report["cgroup"]["detail"] in done.stdout


ROOT = Path(__file__).resolve().parents[2]
FINE = {
    "devices": {"count": 1, "platform": "cpu", "kind": "cpu"},
    "attached": [],
    "memory_gib": 16.0,
    "free_disk_gib": 50.0,
    "isolation": {"levels": ["L0"], "enough": True},
    "extras": dict.fromkeys(doctor.EXTRAS, False),
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_what_this_machine_has_what_others_lack_and_what_to_install(capsys, monkeypatch):
    """No public address is needed: pip gets the packages themselves. Those that the project lists and no others. README
    and messages say what pyproject.toml says; no other page has an address of its own. Without metadata, with the
    checkout."""
    assert main(["doctor", "--json"]) in (0, 5)
    report = json.loads(capsys.readouterr().out)
    assert report["devices"]["platform"] == "cpu" and report["devices"]["count"] == 8
    assert report["extras"]["serve"] and set(report["extras"]) == set(doctor.EXTRAS)
    assert report["cores"] >= 1 and report["packages"]["jax"]
    text = "\n".join(doctor.lines(report))
    assert "pip install 'jax[cuda12]'" in text or report["extras"]["gpu"]
    assert "calls at a time may take" in text and f"this host has {report['memory_gib']} GiB" in text
    assert all(len(line) < 400 for line in text.splitlines())
    for lacks, advice in (
        ({"attached": ["gpu"]}, "pip install 'jax[cuda12]'"),
        ({"attached": ["tpu"], "extras": {**FINE["extras"], "tpu": True}}, "unset JAX_PLATFORMS"),
        ({"devices": {"count": 0, "fault": "no backend"}}, "no backend"),
        ({"isolation": {"levels": [], "enough": False}}, "grpo-roc probe"),
        ({"memory_gib": 1.0}, "memory"),
        ({"free_disk_gib": 0.5}, "run_dir"),
    ):
        (message,) = doctor.to_do({**FINE, **lacks})
        assert advice in message
    for fine in ({}, {"attached": ["gpu"], "devices": {"count": 1, "platform": "gpu", "kind": "H100"}}):
        assert not [*doctor.to_do({**FINE, **fine})]
    extras = PROJECT["optional-dependencies"]
    assert set(doctor.EXTRAS) == set(extras) - {"dev", "reference", "docs"}
    installed = metadata.metadata("grpo-roc-jax").get_all("Provides-Extra")  # maybe before it had one of them
    for extra in set(doctor.EXTRAS) & set(installed):
        words = shlex.split(install_command(extra))
        names = [sorted(re.split(r"[<>=!;]", name)[0].lower() for name in some) for some in (words[2:], extras[extra])]
        assert words[:2] == ["pip", "install"] and names[0] == names[1]
    (address,) = PROJECT["urls"].values()
    assert address in (ROOT / "README.md").read_text(encoding="utf-8")
    assert not [path for path in (ROOT / "docs").glob("*.md") if re.search(r"\.invalid\b", path.read_text("utf-8"))]
    listed = {"Project-URL": ["Docs, https://host/y", "Source, https://host/x"]}
    described = type("Metadata", (dict,), {"get_all": dict.get})(listed)
    monkeypatch.setattr(metadata, "metadata", lambda name: described)
    assert install_command("absent") == "pip install 'grpo-roc-jax[absent] @ git+https://host/x'"

    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "metadata", missing)
    monkeypatch.setattr(metadata, "requires", missing)
    assert install_command("gpu") == "pip install '.[gpu]'"
