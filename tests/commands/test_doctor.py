"""`grpo-roc doctor`: what it finds here, and what it says to do about machines that lack something."""

import json
import re
import shlex
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from grpo_roc_jax.__main__ import main
from grpo_roc_jax.commands import doctor
from grpo_roc_jax.process.installing import install_command

ROOT = Path(__file__).resolve().parents[2]
FINE = {
    "devices": {"count": 1, "platform": "cpu", "kind": "cpu"},
    "attached": [],
    "memory_gib": 16.0,
    "free_disk_gib": 50.0,
    "isolation": {"levels": ["L0"], "enough": True},
    "extras": dict.fromkeys(doctor.EXTRAS, False),
}


def test_the_report_of_this_machine(capsys):
    assert main(["doctor", "--json"]) in (0, 5)
    report = json.loads(capsys.readouterr().out)
    assert report["devices"]["platform"] == "cpu" and report["devices"]["count"] == 8
    assert report["extras"]["serve"] and set(report["extras"]) == set(doctor.EXTRAS)
    assert report["cores"] >= 1 and report["packages"]["jax"]
    text = "\n".join(doctor.lines(report))
    assert "pip install 'jax[cuda12]'" in text or report["extras"]["gpu"]
    assert "calls at a time may take" in text and f"this host has {report['memory_gib']} GiB" in text
    assert all(len(line) < 400 for line in text.splitlines())


@pytest.mark.parametrize(
    ("lacks", "advice"),
    [
        ({}, None),
        ({"attached": ["gpu"]}, "pip install 'jax[cuda12]'"),
        ({"attached": ["tpu"], "extras": {**FINE["extras"], "tpu": True}}, "unset JAX_PLATFORMS"),
        ({"attached": ["gpu"], "devices": {"count": 1, "platform": "gpu", "kind": "H100"}}, None),
        ({"devices": {"count": 0, "fault": "no backend"}}, "no backend"),
        ({"isolation": {"levels": [], "enough": False}}, "grpo-roc probe"),
        ({"memory_gib": 1.0}, "memory"),
        ({"free_disk_gib": 0.5}, "run_dir"),
    ],
)
def test_what_a_machine_lacks_is_named_with_what_to_do(lacks, advice):
    messages = list(doctor.to_do({**FINE, **lacks}))
    assert (advice is None and messages == []) or (len(messages) == 1 and advice in messages[0])


def test_the_command_for_an_extra_names_the_packages_of_the_project_file():
    """No public address is needed: pip gets the packages themselves. Those that the project lists and no others."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    assert set(doctor.EXTRAS) == set(extras) - {"dev", "reference", "docs"}
    installed = metadata.metadata("grpo-roc-jax").get_all("Provides-Extra")  # maybe before it had one of them
    for extra in set(doctor.EXTRAS) & set(installed):
        words = shlex.split(install_command(extra))
        names = [sorted(re.split(r"[<>=!;]", name)[0].lower() for name in some) for some in (words[2:], extras[extra])]
        assert words[:2] == ["pip", "install"] and names[0] == names[1]


class Listed(dict):
    """Metadata of a package."""

    def get_all(self, name):
        return self.get(name)


@pytest.mark.parametrize("urls", [["Source, https://host/x"], ["Docs, https://host/y", "Source, https://host/x"]])
def test_an_extra_that_is_not_listed_is_named_with_the_address_of_the_project(monkeypatch, urls):
    monkeypatch.setattr(metadata, "metadata", lambda name: Listed({"Project-URL": urls}))
    assert install_command("absent") == "pip install 'grpo-roc-jax[absent] @ git+https://host/x'"


def test_without_metadata_a_message_names_the_checkout(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "metadata", missing)
    monkeypatch.setattr(metadata, "requires", missing)
    assert install_command("gpu") == "pip install '.[gpu]'"


def test_one_address_stands_for_the_project_where_it_is_named():
    """README and messages say what pyproject.toml says; no other page has an address of its own."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (address,) = project["urls"].values()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert address in readme
    pages = [
        path for path in (ROOT / "docs").glob("*.md") if re.search(r"\.invalid\b", path.read_text(encoding="utf-8"))
    ]
    assert not pages
