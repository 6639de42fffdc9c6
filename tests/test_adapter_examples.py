"""The examples for environments of other projects, played with the packages of those."""

import pytest

from grpo_roc_jax.environments.environment import row_of
from grpo_roc_jax.serving.agent_ends import AgentCall
from grpo_roc_jax.serving.agent_functions import FunctionAgent
from tests.helpers.serving import scripted
from tests.test_environment_examples import FOLDER, asked_for, call, played


def test_mcp_server(monkeypatch):
    pytest.importorskip("mcp", reason="needs the extra mcp; .ci/adapters runs this")
    turns = [call("power", base=3, exponent=4, modulus=50), "31"]
    tools, answers, _ = played("mcp_server", monkeypatch, turns)
    assert tools == ["power"] and "\n31\n" in answers[0] and answers[1] == "eos"


def test_openenv_server(monkeypatch):
    pytest.importorskip("grpo_roc_jax.contrib.environments")
    pytest.importorskip("openenv", reason="needs the extra openenv; .ci/adapters runs this")
    tools, answers, paid = played("openenv_server", monkeypatch, ["hello"])
    assert not tools and answers == ["answer"] and paid == 1.0


def test_verifiers_taskset(monkeypatch):
    pytest.importorskip("grpo_roc_jax.contrib.environments")
    pytest.importorskip("verifiers.v1", reason="needs the extra verifiers; .ci/adapters runs this")
    monkeypatch.syspath_prepend(FOLDER)
    from grpo_roc_jax.contrib.environments.verifiers_tasks import taskset_problems

    task = next(taskset_problems("vf_taskset"))
    config, _ = asked_for("vf_taskset", monkeypatch)
    agent = FunctionAgent(config.environment)
    with scripted("<answer>20</answer>", token="key") as server:
        call = AgentCall(row_of(task), task.prompt, f"http://127.0.0.1:{server.port}/v1", "key")
        end = agent.play("one", call)
    agent.close()
    assert task.prompt == "10" and (end.status, end.pay.reward) == (0, 1.0), end
