"""The examples of environments: what each asks of `train_policy` is played, and a game is trained on a tiny scale."""

from contextlib import closing
from pathlib import Path

import pytest

import grpo_roc_jax as g
from grpo_roc_jax import train
from grpo_roc_jax.environments.config import AgentCommand, EnvironmentByRow
from grpo_roc_jax.record import events, metrics, trace
from grpo_roc_jax.run.components import make_episodes, make_registry, tool_schemas
from grpo_roc_jax.settings.callables import given, import_file
from grpo_roc_jax.text.chat_format import make_chat
from grpo_roc_jax.tools import CodeCall
from grpo_roc_jax.worlds.players import PLAYED
from tests.environments.test_episodes import Play
from tests.test_readme import TINY
from tests.test_train import shared_programs as shared_programs  # a fixture

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "environments"
EXAMPLES = {path.stem: path for path in FOLDER.glob("*.py")}


def asked_for(name, monkeypatch):
    """(configuration, further arguments) that an example trains with."""
    monkeypatch.setattr(g, "train_policy", lambda config, **others: (config, others))
    return import_file(str(EXAMPLES[name])).main(["--steps=5"])


def call(name, **arguments):
    words = ", ".join(f'"{key}": {value}' for key, value in arguments.items())
    return f'<tool_call>{{"name": "{name}", "arguments": {{{words}}}}}</tool_call>'


def played(name, monkeypatch, turns, problem=None, **extra):
    """The names of the tools, the answers to the turns, and what was paid; `extra` are columns of a problem."""
    config, others = asked_for(name, monkeypatch)
    assert config.steps == 5
    config, functions = train.with_environment(config, others.get("environment"), None)
    with given(functions):
        registry = make_registry(config)
        schemas = tool_schemas(config, registry)
        episodes = make_episodes(config, registry)
    with closing(episodes):
        chat = make_chat(g.TextConfig(), g.load_tokenizer(g.TextConfig()))
        play = Play(chat, episodes, max_turns=9, extra=extra, problem=problem)
        return [tool["function"]["name"] for tool in schemas], [play.say(turn) for turn in turns], play.end()[0].reward


def test_every_example_is_short_and_has_a_test_below():
    names = {"own_tool", "own_environment", "trl_class", "trl_classes"}
    assert set(EXAMPLES) == names | {"mcp_server", "openenv_server", "vf_taskset", "agent"}
    assert all(len(path.read_text(encoding="utf-8").splitlines()) <= 40 for path in EXAMPLES.values())


def test_own_tool(monkeypatch):
    config, others = asked_for("own_tool", monkeypatch)
    with g.make_executor(config.tools, others["tools"]) as executor:
        result, wrong = executor.run([CodeCall(str(i), "convert", {"amount": i}, None) for i in (2.0, "two")])
    assert result.observation == "1.243 miles" and wrong.kind == "bad_arguments"


def test_own_environment_and_trl_class(monkeypatch):
    tools, answers, paid = played("own_environment", monkeypatch, [call("hint"), "it is 3", "4", "2", "1"])
    assert tools == ["hint"] and "\n3\n" in answers[0] and "go on" in answers[1] and "no" in answers[2]
    assert answers[4] == "answer" and paid == pytest.approx(1.0)
    tools, answers, paid = played("trl_class", monkeypatch, [call("add", k=2), call("add", k=3), "done"])
    assert tools == ["add"] and "\n5\n" in answers[1] and answers[2] == "eos" and paid == 1.0


def test_trl_classes_and_agent(monkeypatch):
    turns = [call("add", k=5), call("halve")]
    tools, answers, paid = played("trl_classes", monkeypatch, turns, environment="counter")
    assert tools == ["add", "halve"] and "\n5\n" in answers[0] and paid == 1.0
    assert "unknown_tool" in answers[1], "a tool of the other class"
    _, answers, paid = played("trl_classes", monkeypatch, turns, environment="halver")
    assert "\n2\n" in answers[1] and paid == 0.0
    assert played("trl_classes", monkeypatch, ["hm"], environment="else")[1] == ["infrastructure"]
    config, _ = asked_for("agent", monkeypatch)
    assert isinstance(config.environment, AgentCommand) and config.environment.command.endswith("agent.py agent")


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("world", [pytest.param(n, marks=[pytest.mark.slow] * (n != "guess")) for n in PLAYED])
def test_a_game_trains_without_compiling_again(tmp_path, world):
    """Each has the shapes of the README's loop, so that its programs are compiled once for all."""
    if world == "corridor":
        pytest.importorskip("grpo_roc_jax.contrib.environments")
        pytest.importorskip("gymnasium")
    game = [f"--environment=grpo_roc_jax.{PLAYED[world].environment}", "--reward.functions=environment"]
    words = [f"--data.sources=world:{world}:1", "--sft.steps=0", f"--run_dir={tmp_path}", "--log.traces=1"]
    summary = g.train_policy(g.read_config("toy.yaml", *TINY, *game, *words))
    assert summary["compilations_after_first_step"] == 0
    records = list(trace.read_trace(tmp_path, 2))
    assert len(records) == 8 and all(record.trajectory.reward == 0.0 for record in records)
    assert {record.trajectory.stop for record in records} <= {"length", "eos", "turns"}


def test_rewards_of_an_environment_are_used_or_refused():
    words = ["--environment", f"{FOLDER / 'trl_class.py'}:Counter"]
    for given_words, message in (
        (words, r"Counter has get_reward, but reward.functions = answer; add environment"),
        (["--reward.functions", "environment"], r"reward.functions environment without an environment that pays"),
    ):
        config = g.read_config("toy.yaml", *given_words)
        with pytest.raises(g.ConfigError, match=message):
            tool_schemas(config, make_registry(config))
    with pytest.raises(ValueError, match="is kind class; must be agent, mcp, openenv, verifiers or harbor, or"):
        EnvironmentByRow(classes=("a={kind: class, path: b}", "own=a.py:Own"))
    with pytest.raises(g.ConfigError, match="lost"):
        g.read_config("toy.yaml", *words, "--rollout.step_limit={kind: partial, seconds: 9}")


class Mistaken(g.Environment):
    def step(self, turn):
        return self.absent.get(turn.text)


class Numbers(g.Environment):
    def step(self, turn):
        return g.Observation(reward=float(int(turn.text.strip()) == 4), done=True)


def words(tmp_path, kind, *more):
    """Of a policy of random weights, which ends a turn at one of some hundred tokens."""
    return [
        "toy.yaml", *TINY, "--environment", f"{__file__}:{kind}", f"--run_dir={tmp_path}", "--log.traces=1",
        "--sft.steps=0", "--reward.functions=environment", "--reward.truncated=score",
        "--rollout.max_response_tokens=600", "--batch.row_length=640", *more,
    ]  # fmt: skip


def test_a_mistake_that_every_rollout_meets_ends_the_run_after_one_step_and_is_named(tmp_path, capfd):
    assert train.main(words(tmp_path, "Mistaken")) == 5
    lines = capfd.readouterr().err.strip().splitlines()
    line = "step: AttributeError: 'Mistaken' object has no attribute 'absent' (test_environment_examples.py, line "
    assert lines[-1].startswith(f"stopped: infrastructure: all 8 rollouts of a step ended alike: {line}")
    assert max(row["step"] for row in metrics.read_metrics(tmp_path)) == 1
    sampled = [record.trajectory for record in trace.read_trace(tmp_path, 1)]
    assert len(sampled) == 8 and all(t.stop == "infrastructure" and t.fault.startswith(line) for t in sampled)
    assert sum("return self.absent.get(turn.text)" in t.fault for t in sampled) == 1, "the traceback of the first"
    (event,) = events.read_events(tmp_path)
    assert (event["step"], event["event"]) == (1, "environment") and event["text"].startswith(line)


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["zero", "drop"])
def test_what_the_policy_said_and_nobody_can_read_scores_0_unless_it_is_dropped(tmp_path, choice):
    status = train.main(words(tmp_path, "Numbers", f"--environment.on_failure={choice}"))
    records = list(trace.read_trace(tmp_path, 1))
    failed = [record for record in records if "ValueError: invalid literal for int()" in record.trajectory.fault]
    assert len(records) == 8 and len(failed) >= 6, "a policy of random weights says no number"
    if choice == "zero":
        assert status == 0 and all(record.trajectory.stop == "failed" for record in failed)
        assert all(record.verdict.reward == 0.0 and record.group >= 0 for record in failed), "they stay in their group"
    else:
        assert all(record.trajectory.stop == "infrastructure" and record.verdict is None for record in failed)
        assert status == (5 if len(failed) == 8 else 0)
