"""The examples for environments of other projects, played with the packages of those."""

import pytest
from test_environment_examples import call, played


def test_mcp_server(monkeypatch):
    pytest.importorskip("mcp", reason="needs the extra mcp; .ci/adapters runs this")
    turns = [call("power", base=3, exponent=4, modulus=50), "31"]
    tools, said, _ = played("mcp_server", monkeypatch, turns)
    assert tools == ["power"] and "\n31\n" in said[0] and said[1] == "eos"


def test_openenv_server(monkeypatch):
    pytest.importorskip("openenv", reason="needs the extra openenv; .ci/adapters runs this")
    tools, said, paid = played("openenv_server", monkeypatch, ["hello"])
    assert not tools and said == ["answer"] and paid == 1.0
