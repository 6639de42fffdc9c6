"""A taskset of verifiers, played by its own package with a harness of the test's."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_roc_jax.data.config import DataConfig
from grpo_roc_jax.data.pipeline import make_problem_stream
from grpo_roc_jax.environments.config import EnvironmentVerifiers
from grpo_roc_jax.environments.episodes import Episodes
from grpo_roc_jax.tools import ToolsConfig
from tests.environments.test_episodes import Play
from tests.helpers.servers import call, two_call_chat

pytest.importorskip("verifiers.v1", reason="needs the extra verifiers; .ci/adapters runs these tests")
from grpo_roc_jax.contrib.environments.verifiers_tasks import environment_of

sys.path.insert(0, str(Path(__file__).parent))
ADD = call("add", '{"a": 2, "b": 3}')


@pytest.fixture(scope="module")
def chat():
    return two_call_chat()


@pytest.fixture(scope="module")
def tasks():
    stream = make_problem_stream(DataConfig(sources=("verifiers:toy_taskset",), shuffle=False), problems=2, seed=0)
    assert stream.notes == ("verifiers:toy_taskset: 2 tasks",)
    return next(stream)


@pytest.fixture(scope="module")
def episodes():
    choice = EnvironmentVerifiers(taskset="toy_taskset", harness="toy_taskset", timeout_s=60.0, retries=0)
    made = Episodes(choice, ToolsConfig())
    yield made
    made.close()


def play(chat, episodes, problem, **others):
    return Play(chat, episodes, problem=problem, **others)


def test_its_harness_runs_calls_speaks_as_user_and_its_task_pays(chat, episodes, tasks):
    assert [(task.prompt, task.answer) for task in tasks] == [("2+3?", "5"), ("1+8?", "9")]
    assert episodes.tools.names == ("add",)
    rows = play(chat, episodes, tasks[0], samples=2)
    assert rows.requests[0].problem.prompt == "2+3?\n\nBe brief."
    said = rows.say(f"<reason>hm</reason>{ADD}" + call("add", '{"a": "x"}'))
    assert [part.split("\n")[1] for part in said.split("<tool_response>")[1:2]] == ["5"]
    assert "argument 'a' must be integer, got string" in said, "which the harness has not seen"
    assert "unknown_tool" in rows.say(call("subtract")), "a turn that it need not hear of"
    assert "Sure?" in rows.say("<answer>5</answer>") and rows.say("yes, 5") == "answer"
    assert "Sure?" in rows.say("7", row=1) and rows.say("7", row=1) == "answer"
    right, wrong = rows.end()
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert right.rewards == {"exact": 1.0, "brief": 1 / 6, "characters": 6.0}, "every reward and metric by its name"
    assert [result.kind for result in right.results] == ["ok", "bad_arguments", "unknown_tool"]


def test_what_cannot_be_followed_or_fails_is_an_infrastructure_failure(chat, episodes, tasks):
    rows = play(chat, episodes, tasks[1], samples=4)
    assert rows.say("forget it") == "infrastructure", "the harness altered its messages"
    assert rows.say("fail", row=1) == "answer"
    assert rows.say("half a", "length", row=2) == "length"
    ends = rows.end()
    assert ends[1].stop == "infrastructure", "the episode has a fault, so its reward of 0 is none"
    assert ends[2].reward == 0.0 and not any(row for row in ends if row.reward), "a rollout that was cut earns nothing"


def test_settings_of_the_taskset_and_its_environment_pass_through(tasks):
    source = "toy_taskset?more=20"
    stream = make_problem_stream(DataConfig(sources=(f"verifiers:{source}",), shuffle=False), problems=2, seed=0)
    assert [task.prompt for task in next(stream)] == ["2+23?", "1+28?"]
    choice = EnvironmentVerifiers(taskset=source, harness="toy_taskset", settings=("agent.max_turns=3",))
    environment = environment_of(choice)
    assert environment.config.agent.max_turns == 3 and environment.taskset.config.more == 20
    for words, said in ((("agent",), "must be NAME=VALUE"), (("agent.absent=1",), "absent")):
        with pytest.raises(ValueError, match=said):
            environment_of(replace(choice, settings=words))


def test_another_task_than_was_read_is_refused(chat, episodes, tasks):
    moved = replace(tasks[0], extra=tasks[0].extra | {"task": 1})
    assert play(chat, episodes, moved).say("5") == "infrastructure"
    with pytest.raises(ValueError, match=r"taskset 'no_such_taskset' cannot be used: .*no_such_taskset"):
        EnvironmentVerifiers(taskset="no_such_taskset", retries=0).factories()
