"""A taskset of verifiers, played by its own package with a harness of the test's, over the endpoint."""

import contextlib
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_roc_jax.data.config import DataConfig
from grpo_roc_jax.data.pipeline import make_problem_stream
from grpo_roc_jax.environments.config import EnvironmentVerifiers
from grpo_roc_jax.environments.environment import row_of
from grpo_roc_jax.serving.agent_ends import AgentCall
from grpo_roc_jax.serving.agent_functions import FunctionAgent
from grpo_roc_jax.serving.agent_runs import AgentSession
from grpo_roc_jax.serving.recorded_calls import conversations_of, trajectory_of
from grpo_roc_jax.text.config import TextConfig
from grpo_roc_jax.types import RolloutRequest
from tests.helpers.servers import call
from tests.helpers.serving import scripted

pytest.importorskip("verifiers.v1", reason="needs the extra verifiers; .ci/adapters runs these tests")
from grpo_roc_jax.contrib.environments.verifiers_tasks import EpisodeFailed, environment_of, numbers_of

sys.path.insert(0, str(Path(__file__).parent))
ADD = call("add", '{"a": 2, "b": 3}')
CHOICE = EnvironmentVerifiers(taskset="toy_taskset", harness="toy_taskset", timeout_s=60.0)


@pytest.fixture(scope="module")
def tasks():
    stream = make_problem_stream(DataConfig(sources=("verifiers:toy_taskset",), shuffle=False), problems=2, seed=0)
    assert stream.notes == ("verifiers:toy_taskset: 2 tasks",)
    return next(stream)


@pytest.fixture(scope="module")
def agent():
    with contextlib.closing(FunctionAgent(CHOICE)) as made:
        yield made


def play(agent, problem, *turns):
    """(how the episode ended, its rows, the text of its first row)."""
    session = AgentSession(RolloutRequest(problem, 0, temperature=1.0), 1, 9, CHOICE)
    with scripted(*turns, config=TextConfig(max_calls_per_turn=4), token="key") as server:
        server.endpoint.sessions = {"one": session}
        url = f"http://127.0.0.1:{server.port}/s/one/v1"
        end = agent.play("one", AgentCall(row_of(problem), problem.prompt, url, "key"))
        chat = server.endpoint.chat
        rows = conversations_of(session.calls)
        sampled = [chat.turn_ids(turn) for turn in turns]
        assert [recorded.ids.tolist() for recorded in session.calls] == sampled[: len(session.calls)]
        trajectory = trajectory_of(rows, chat, session.request, "eos", 1 << 20)[0] if rows else None
        text = chat.tokenizer.decode(rows[0].tokens.tolist()) if rows else ""
    return end, session, trajectory, text


def test_its_harness_runs_calls_speaks_as_user_and_its_task_pays(agent, tasks):
    """One row of what was sampled, with the system text where the harness puts it: at the beginning."""
    assert [(task.prompt, task.answer) for task in tasks] == [("2+3?", "5"), ("1+8?", "9")]
    end, session, row, text = play(agent, tasks[0], f"<reason>hm</reason>{ADD}", "<answer>5</answer>", "yes, 5")
    assert end.status == 0 and end.pay.reward == 1.0 and not row.parts and len(row.turns) == 3
    assert dict(end.pay.parts) == {"exact": 1.0, "brief": 1 / 6, "characters": 6.0}, "every reward and metric by name"
    assert text.index("Be brief.") < text.index("2+3?") < text.index(ADD) < text.index("Sure?")
    assert [result.name for result in row.turns[0].calls] == ["add"]
    assert session.outcome(end, frozenset([""])) == ("eos", None)
    wrong, *_ = play(agent, tasks[0], "7", "7")
    assert (wrong.status, wrong.pay.reward) == (0, 0.0)


def test_an_episode_with_errors_or_of_another_task_than_was_read_is_no_reward_and_says_its_own_words(agent, tasks):
    end, session, *_ = play(agent, tasks[1], "fail")
    assert end.status == 1 and end.pay.reward is None and "as asked" in end.errors and "Error" in end.errors
    stop, failure = session.outcome(end, frozenset([""]))
    assert stop == "infrastructure" and "as asked" in failure.whole and not failure.by_policy
    session.choice = replace(CHOICE, on_failure="zero")
    assert session.outcome(end, frozenset([""]))[0] == "failed"
    end, session, *_ = play(agent, replace(tasks[0], extra=tasks[0].extra | {"task": 1}))
    assert end.status == 1 and "is another one than when it was read" in end.errors and not session.calls
    with pytest.raises(ValueError, match=r"taskset 'no_such_taskset' cannot be used: .*no_such_taskset"):
        FunctionAgent(EnvironmentVerifiers(taskset="no_such_taskset"))


def test_settings_of_the_taskset_and_its_environment_pass_through(tasks):
    source = "toy_taskset?more=20"
    stream = make_problem_stream(DataConfig(sources=(f"verifiers:{source}",), shuffle=False), problems=2, seed=0)
    assert [task.prompt for task in next(stream)] == ["2+23?", "1+28?"]
    choice = EnvironmentVerifiers(taskset=source, harness="toy_taskset", settings=("agent.max_turns=3",))
    environment = environment_of(choice)
    assert environment.config.agent.max_turns == 3 and environment.taskset.config.more == 20
    for words, message in ((("agent",), "must be NAME=VALUE"), (("agent.absent=1",), "absent")):
        with pytest.raises(ValueError, match=message):
            environment_of(replace(choice, settings=words))


def test_numbers_of_several_agents_have_their_names():
    def trace(name, reward, trainable=True, **numbers):
        rewards = {key: None if value is None else SimpleNamespace(score=value) for key, value in numbers.items()}
        agent = SimpleNamespace(name=name, trainable=trainable)
        return SimpleNamespace(agent=agent, reward=reward, rewards=rewards, metrics={"a b": 2.0, "1st": float("nan")})

    assert numbers_of([trace("solver", 0.5, good=1.0, late=None)]) == {"good": 1.0, "a_b": 2.0, "reward": 0.5}
    both = numbers_of([trace("solver", 0.5, good=1.0), trace("judge", 9.0, trainable=False, good=3.0)])
    assert both == {"solver.good": 1.0, "judge.good": 3.0, "solver.a_b": 2.0, "judge.a_b": 2.0, "reward": 0.5}
    with pytest.raises(EpisodeFailed, match="no trace"):
        numbers_of([])
