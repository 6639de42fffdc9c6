"""A taskset of verifiers, the one of the examples, played by its own package over the endpoint."""

import contextlib
import sys

import pytest

from grpo_roc_jax.data.config import DataConfig
from grpo_roc_jax.data.pipeline import make_problem_stream
from grpo_roc_jax.environments.config import EnvironmentVerifiers
from grpo_roc_jax.environments.environment import row_of
from grpo_roc_jax.serving.agent_ends import AgentCall
from grpo_roc_jax.serving.agent_functions import FunctionAgent
from grpo_roc_jax.serving.agent_runs import AgentSession
from grpo_roc_jax.types import RolloutRequest
from tests.helpers.serving import scripted
from tests.test_environment_examples import FOLDER

pytest.importorskip("verifiers.v1", reason="needs the extra verifiers; .ci/adapters runs these tests")
sys.path.insert(0, str(FOLDER))
CHOICE = EnvironmentVerifiers(taskset="vf_taskset", harness="vf_taskset", timeout_s=60.0)


def play(agent, problem, *turns):
    """(how an episode ended, its session), whose calls are recorded as they were sampled."""
    session = AgentSession(RolloutRequest(problem, 0, temperature=1.0), 1, 9, CHOICE)
    with scripted(*turns, token="key") as server:
        server.endpoint.sessions = {"one": session}
        url = f"http://127.0.0.1:{server.port}/s/one/v1"
        end = agent.play("one", AgentCall(row_of(problem), problem.prompt, url, "key"))
        assert [recorded.ids.tolist() for recorded in session.calls] == [*map(server.endpoint.chat.turn_ids, turns)]
    return end, session


def test_its_task_pays_and_an_episode_with_errors_is_no_reward():
    stream = make_problem_stream(DataConfig(sources=("verifiers:vf_taskset",), shuffle=False), problems=2, seed=0)
    problem, _ = next(stream)
    assert stream.notes == ("verifiers:vf_taskset: 90 tasks",) and problem.prompt == "10"
    with contextlib.closing(FunctionAgent(CHOICE)) as agent:
        end, session = play(agent, problem, "<answer>20</answer>")
        assert (end.status, end.pay.reward, dict(end.pay.parts)) == (0, 1.0, {"exact": 1.0})
        assert session.outcome(end, frozenset([""])) == ("eos", None)
        wrong, _ = play(agent, problem, "<answer>7</answer>")
        assert (wrong.status, wrong.pay.reward) == (0, 0.0)
        end, session = play(agent, problem)
        assert end.status == 1 and end.pay.reward is None and "Error" in end.errors
        stop, failure = session.outcome(end, frozenset([""]))
        assert stop == "infrastructure" and not failure.by_policy
    with pytest.raises(ValueError, match=r"taskset 'no_such_taskset' cannot be used: .*no_such_taskset"):
        FunctionAgent(EnvironmentVerifiers(taskset="no_such_taskset"))
