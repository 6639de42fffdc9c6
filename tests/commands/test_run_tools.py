"""Tools from the command line, run as a user runs them, and what a machine can do."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from unittest import mock

from grpo_roc_jax.__main__ import main
from grpo_roc_jax.commands import doctor, probe
from grpo_roc_jax.process.installing import install_command

LINES = [
    ("ok", {"id": "one", "code": "print(1)"}),
    ("ok", {"id": "in", "code": "print(input()[::-1])", "stdin": "abc"}),
    ("ok", {"id": "c1", "code": "x = 20", "session": "s"}),
    ("ok", {"id": "c2", "code": "x + 1", "session": "s"}),
    ("exception", {"id": "div", "code": "1/0"}),
    ("timeout", {"id": "loop", "code": "while True: pass"}),
    ("bad_arguments", {"id": 9, "code": 5}),
    ("malformed_call", {"id": "both", "code": "1", "stdin": "x", "session": "s"}),
    ("malformed_call", {"code": "1", "seed": 1.5}),
    ("ok", {"id": "nulls", "code": "1", "stdin": None, "session": None, "seed": None}),
]
"""(kind of the result, the line)."""
MODULE = [sys.executable, "-m", "grpo_roc_jax"]


def test_run_gives_one_result_per_line_also_of_standard_input() -> None:
    lines = "\n".join(json.dumps(line) for _, line in LINES).encode() + b"\n\nnot json \xff\n[1]\n"
    words = ["-", "--workers=2", "--wall-s=1", "--memory-mb=256", "--level=L0", "--preload="]
    done = subprocess.run(
        [*MODULE, "run-tools", *words], input=b"\xef\xbb\xbf" + lines, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(b"tool executor at isolation level L0")
    results = sorted(map(json.loads, done.stdout.splitlines()), key=lambda result: result["line"])
    faults = {r["line"]: r["error_message"] for r in results if r["kind"] == "malformed_call"}
    assert faults.keys() == {8, 9, 12, 13} and faults[13] == "line 13 is not an object" and "is not JSON" in faults[12]
    assert faults[8] == "line 8 has stdin and session; cells of a session have no standard input"
    assert [r["line"] for r in results] == [*range(1, 11), 12, 13], "a blank line is counted"
    assert [r["kind"] for r in results] == [*(kind for kind, _ in LINES), "malformed_call", "malformed_call"]
    names = [line.get("id", i - 1) for i, (_, line) in enumerate(LINES, 1)]
    assert [r["id"] for r in results][:10] == names and results[-1]["id"] == 12
    assert (results[1]["stdout"], results[3]["echo"]) == ("cba\n", "21")


def test_arguments_that_cannot_be_are_named(tmp_path, capsys) -> None:
    for words in ("run-tools -", "serve-tools"):
        assert main([*words.split(), "--workers", "-1"]) in (2, 5)
        assert capsys.readouterr().err.startswith("error: workers = -1: must be at least 0\n")
    assert main(["run-tools", f"{tmp_path}/absent.jsonl", "--preload", "", "--workers", "1"]) == 2
    assert re.search("error: .*No such file or directory", capsys.readouterr().err)


def test_probe_prints_the_table(capsys) -> None:
    assert probe.main([]) in (0, 5)
    printed = capsys.readouterr().out
    assert "levels:" in printed and "landlock" in printed and "\ncgroup around the executor: " in printed
    alone = subprocess.run([*MODULE, "probe", "--json"], stdout=subprocess.DEVNULL).returncode
    assert alone == probe.main(["--json"]), "also in a process with many open files"
    report = json.loads(capsys.readouterr().out)
    assert [layer["name"] for layer in report["layers"]] == ["limits", "seccomp", "landlock", "namespaces", "own uid"]


FINE = {"devices": {"count": 1, "platform": "cpu", "kind": "cpu"}, "attached": [], "memory_gib": 16.0}
FINE |= {"free_disk_gib": 50.0, "isolation": {"levels": ["L0"], "enough": True}, "extras": dict.fromkeys(doctor.EXTRAS)}


def test_what_this_machine_has_what_others_lack_and_what_to_install(capsys, monkeypatch):
    """pip gets the packages themselves: those that the project lists and no others. Without metadata, the checkout."""
    assert main(["doctor", "--json"]) in (0, 5)
    report = json.loads(capsys.readouterr().out)
    assert report["devices"]["platform"] == "cpu" and report["devices"]["count"] == 8
    assert report["extras"]["serve"] and report["cores"] >= 1 and report["packages"]["jax"]
    text = "\n".join(doctor.lines(report))
    assert "calls at a time may take" in text and f"this host has {report['memory_gib']} GiB" in text
    for lacks, advice in (
        ({"attached": ["gpu"]}, "pip install 'jax[cuda12]'"),
        ({"attached": ["tpu"], "extras": {**FINE["extras"], "tpu": True}}, "unset JAX_PLATFORMS"),
        ({"devices": {"count": 0, "fault": "no backend"}}, "no backend"),
        ({"isolation": {"levels": [], "enough": False}}, "grpo-roc probe"),
        ({"free_disk_gib": 0.5}, "run_dir"),
    ):
        (message,) = doctor.to_do({**FINE, **lacks})
        assert advice in message
    assert not [*doctor.to_do(FINE)]
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    assert set(doctor.EXTRAS) == set(extras) - {"dev", "reference", "docs"}
    words = shlex.split(install_command("serve"))
    names = [sorted(re.split(r"[<>=!;]", name)[0].lower() for name in some) for some in (words[2:], extras["serve"])]
    assert words[:2] == ["pip", "install"] and names[0] == names[1]
    for name in ("metadata", "requires"):
        monkeypatch.setattr(metadata, name, mock.Mock(side_effect=metadata.PackageNotFoundError))
    assert install_command("gpu") == "pip install '.[gpu]'"
