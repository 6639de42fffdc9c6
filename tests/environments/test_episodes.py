"""Environments of the user's: how their answers reach the policy, what they pay, and every way in which they fail: in
words, where and why; which failures the policy caused; in a thread or a process of their own while others go on."""

import ast
import asyncio
import itertools
import json
import logging
import operator
import re
import struct
import threading
import time
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest

from grpo_roc_jax.engine.protocol import Finish, RolloutStats, RunOptions, Wait
from grpo_roc_jax.environments import connection
from grpo_roc_jax.environments.config import EnvironmentClass, HostProcesses, HostThreads
from grpo_roc_jax.environments.environment import Environment, Observation, accepted, classes_of, method_tools
from grpo_roc_jax.environments.episode import (
    MOST_TEXT,
    THREADS,
    Answer,
    BadAnswer,
    EpisodeSettings,
    checked_observation,
    checked_pay,
)
from grpo_roc_jax.environments.episodes import Episodes
from grpo_roc_jax.environments.failure import failure_of, may_blame_policy
from grpo_roc_jax.environments.hosts import make_host
from grpo_roc_jax.environments.threads import IdleThreads
from grpo_roc_jax.method.edit import as_opened
from grpo_roc_jax.reward.config import EnvironmentReward, FormatReward, RewardConfig, TruncatedScored
from grpo_roc_jax.reward.score import make_scorer
from grpo_roc_jax.rollout.sampler import BOTH_S, EpisodeEnvironment, EpisodeSource, collect_episodes, render
from grpo_roc_jax.settings.callables import given, import_file
from grpo_roc_jax.tools import ToolsConfig, ToolUnavailable
from grpo_roc_jax.types import Problem, RolloutRequest, ToolCall, ToolResult, Trajectory, Turn
from tests.helpers.arena import wait_until
from tests.helpers.servers import call
from tests.helpers.servers import chat as chat  # a fixture
from tests.rollout.test_collect import CALL, PROBLEM, Instant, turn

FILE = str(Path(__file__).parent / "sample_environments.py")
MADE = import_file(FILE)
ADD, LIMIT, LOOK, MEET = call("add", '{"k": 2}'), call("limit"), call("look"), call("meet")
MALFORMED = "<tool_call>{</tool_call>"
FAULTS = ("exits", "cancels itself", "cannot be sent", "writes to every connection", "forks and dies")
HOSTS = {"threads": HostThreads(), "processes": HostProcesses(2)}
both_hosts = pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS, scope="module")


@contextmanager
def opened(choice, **settings):
    """Episodes of a choice, or of a class of the file."""
    if isinstance(choice, str):
        choice = EnvironmentClass(path=f"{FILE}:{choice}", **settings)
    with closing(Episodes(choice, ToolsConfig(), ("python",))) as episodes:
        yield episodes


@pytest.fixture(scope="module")
def worlds():
    """Episodes by class, made once."""
    with ExitStack() as stack:
        made = cache(lambda name, **settings: stack.enter_context(opened(name, **settings)))

        def find(name, **settings):
            MADE.ATTEMPTS.clear()
            return made(name, **{"timeout_s": 5.0, "retries": 1} | settings)

        yield find


class Play:
    """Rows of one problem, opened; their turns are given as text."""

    def __init__(
        self, chat, episodes, *, samples=1, max_turns=4, executor=None, how=None, extra=None, position=4, problem=None
    ):
        problem = problem or replace(PROBLEM, extra=(extra or {}) | ({"how": how} if how else {}))
        self.chat, self.executor = chat, executor or Instant()
        requests = [RolloutRequest(problem, position, samples)]
        source = EpisodeSource(self.executor, episodes)
        self.rows = EpisodeEnvironment(chat, source, requests, step=2, seed=0, max_turns=max_turns)
        self.requests = self.rows.open(requests, 200)

    def say(self, text, reason="stop", row=0):
        """The answer to a turn: its stop reason, or its ids as text."""
        decided = self.rows.turn_ended(row, turn(self.chat, text, reason))
        if decided == Wait():
            answers = []
            while not answers:
                answers = self.rows.poll(1.0)
            ((index, decided),) = answers
            assert index == row
        return decided.stop if isinstance(decided, Finish) else self.chat.tokenizer.decode(decided.ids)

    def end(self, stop="eos"):
        """The trajectories of the rows, as the engine has them, with what was paid."""
        count = sum(request.count for request in self.requests)
        return self.rows.paid([self.rows.completed(i, bare(stop)) for i in range(count)])


def bare(stop):
    """A trajectory as the engine gives it."""
    zeros = np.zeros(2, np.int32)
    return Trajectory(zeros, zeros > 0, zeros * np.float32(0), zeros, 1, (), stop, 0)


def engine_of(run):
    return SimpleNamespace(config=SimpleNamespace(max_turns=4, max_prompt_tokens=200), seed=0, run=run)


def test_a_turn_without_a_call_is_answered_as_a_user_and_pay_by_turn_and_at_the_end_reaches_the_verdict(chat, worlds):
    play = Play(chat, worlds("Echo"), samples=2)
    prompt = chat.tokenizer.decode(render(play.requests, chat)[0].prompt)
    assert PROBLEM.prompt + " seed " in prompt and [request.count for request in play.requests] == [2]
    assert play.say("so what") == chat.tokenizer.decode(chat.question_ids("you said so what", closed=True))
    assert "&lt;answer>7" in play.say("<answer>7</answer>"), "no user writes a tag of the dialogue"
    assert play.say("bye") == "answer"
    assert play.say("hm", row=1).endswith(chat.tokenizer.decode(chat.prompt_ids(PROBLEM)[-4:]))
    first, second = play.end()
    assert prompt == chat.tokenizer.decode(chat.prompt_ids(as_opened(PROBLEM, first.opening)))
    assert [t.reward for t in first.turns] == [1.0, 2.0, 3.0] and first.reward == 16.0
    assert [t.reply for t in second.turns] == ["you said hm"] and second.reward == 11.0
    functions = (EnvironmentReward(weight=0.5, success=16.0),)
    scored = make_scorer(RewardConfig(functions=functions, truncated=TruncatedScored()))
    verdict, *_ = scored(PROBLEM, [first]).verdicts
    assert (verdict.reward, verdict.turn_rewards, verdict.status) == (8.0, (0.5, 1.0, 6.5), "correct")
    assert scored(PROBLEM, [replace(first, reward=None)]).size == 0, "what could not be judged leaves the group"
    assert scored(PROBLEM, [replace(first, reward=15.0)]).verdicts[0].status == "wrong"


def test_rollouts_of_a_group_share_no_column_and_records_keep_their_arguments(chat, worlds):
    play = Play(chat, worlds("Sharing"), samples=2, extra={"board": [], "function": "f"})
    text = call("note", '{"numbers": [3, 1], "function": "sum"}')
    for row in range(2):
        assert "sum: [1]" in play.say(text, row=row)
    for trajectory in play.end():
        assert trajectory.turns[0].calls[0].arguments == {"numbers": [3, 1], "function": "sum"}
        assert not trajectory.turns[0].results[0].counts_as_error
    assert play.requests[0].problem.extra == {"board": [], "function": "f"}
    lock = threading.Lock()  # cannot be copied
    assert "sum: [1]" in Play(chat, worlds("Sharing"), extra={"board": [], "lock": lock}).say(text)


@pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS)
@pytest.mark.parametrize(
    ("how", "held"),
    [("interrupted", 0), ("reset fails", 0), ("too long", 0), ("opened again", 3), ("hangs", 3), ("terminated", 0)],
)
def test_an_environment_is_closed_once_however_its_rollout_ends(chat, tmp_path, host, how, held):
    """Nobody asks it for a reward then. What is open, also in a turn that hangs, is closed with its host."""
    choice = EnvironmentClass(path=f"{FILE}:Held", host=host, timeout_s=20.0, retries=1)
    holder = make_host(host, EpisodeSettings(choice))
    episodes = Episodes(choice, ToolsConfig(), host=holder)
    problem = replace(PROBLEM, extra={"how": how, "folder": str(tmp_path)})

    def interrupted(*given):
        raise KeyboardInterrupt

    if how == "interrupted":
        engine, source = engine_of(interrupted), EpisodeSource(Instant(), episodes)
        with pytest.raises(KeyboardInterrupt):
            collect_episodes(engine, None, chat, source, [RolloutRequest(problem, 4, 3)], RunOptions(2))
    for _ in range({"interrupted": 0, "opened again": 2}.get(how, 1)):
        play = Play(chat, episodes, samples=3, problem=problem)
    if how == "hangs":
        play.rows.turn_ended(0, turn(chat, "hm"))
    if how == "terminated":
        ends = [holder.close] if isinstance(host, HostThreads) else [one.process.terminate for one in holder.workers]
        for end in ends:
            end()
    assert wait_until(lambda: len(list(tmp_path.iterdir())) == held)
    episodes.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("timeout_s", [20.0, 0.2], ids=["given up", "late"])
def test_an_environment_that_is_made_slowly_is_closed(timeout_s):
    MADE.ATTEMPTS.clear()
    choice = EnvironmentClass(path=f"{FILE}:SlowToMake", timeout_s=timeout_s, retries=0)
    host = make_host(HostThreads(), EpisodeSettings(choice))
    answer = host.call("key", "open", PROBLEM, 0)
    if timeout_s > 1:
        host.call("key", "drop")
    else:
        assert "took longer than 0.2 s" in answer.result(5).failure.text
        wait_until(lambda: "closed" in MADE.ATTEMPTS)
    host.close()
    assert MADE.ATTEMPTS == ["made", "closed"]


def test_an_episode_whose_reward_is_not_waited_for_is_closed_where_it_is(tmp_path):
    """In each of the processes."""
    host = make_host(HostProcesses(2), EpisodeSettings(EnvironmentClass(path=f"{FILE}:Held", timeout_s=50.0)))
    problem = replace(PROBLEM, extra={"how": "pays late", "folder": str(tmp_path)})
    for operation, *arguments in (("open", problem, 0), ("end",), ("drop",)):
        answers = [host.call(key, operation, *arguments) for key in "ab"]
        if operation == "open":
            assert not any(answer.result(60).failure for answer in answers) and len(list(tmp_path.iterdir())) == 2
    assert wait_until(lambda: not list(tmp_path.iterdir()))
    host.close()


def test_an_episode_that_was_dropped_no_longer_counts_for_its_process():
    calls = []

    def worker(settings):
        made = SimpleNamespace(lost=False)
        made.call = lambda *call: calls.append((host.workers.index(made), *call[:2])) or Future()
        return made

    host = make_host(HostProcesses(2), None, process=worker)
    for operation, keys in (("open", "abc"), ("drop", "ac"), ("open", "de"), ("open", "b")):
        for key in keys:
            host.call(key, operation)
    opened = [(worker, key) for worker, key, operation in calls if operation == "open"]
    assert opened == [(0, "a"), (1, "b"), (0, "c"), (0, "d"), (0, "e"), (1, "b")]


def test_the_executor_is_not_waited_for_while_an_environment_may_answer(chat, worlds):
    silent, waits = Instant(), []
    silent.poll = lambda timeout_s=0.0, ids=None: waits.append(timeout_s) or []
    play = Play(chat, worlds("Flaky"), samples=2, executor=silent, how="step hangs")
    play.rows.turn_ended(0, turn(chat, CALL + CALL))
    play.rows.poll(1.0)
    play.rows.turn_ended(1, turn(chat, "hm"))
    play.rows.poll(1.0)
    assert waits == [1.0, BOTH_S]


def test_an_environment_that_inherits_all_is_answered_at_once_and_its_end_waits_for_the_turn_before(chat, worlds):
    play = Play(chat, worlds("Tools"), samples=2)
    assert play.rows.turn_ended(0, turn(chat, "hm", "stop")) == Finish("eos")
    assert play.rows.turn_ended(1, turn(chat, CALL, "stop")) == Wait()
    (answered,) = play.rows.poll(0.0)
    tools = Play(chat, worlds("Echo"))  # whose step has a say
    assert answered[0] == 1 and tools.rows.turn_ended(0, turn(chat, "hm", "stop")) == Wait()
    play.rows.turn_ended(1, turn(chat, "7", "stop"))
    assert [t.reward for t in play.end()] == [0.0, 0.0]
    episodes = worlds("Napping")
    nap = Turn(0, 0, "", (ToolCall("nap", {}, ""),))
    for _ in range(2):
        assert episodes.open([("a", PROBLEM, 0)]) == {"a": Answer(value="")}
        assert episodes.play("a", nap, [None]) is None and episodes.end("a") is None
        answers = []
        while episodes.awaits("a"):
            answers += episodes.poll(1.0)
        assert answers == [("a", Answer(value=(0.0, {})))], "of the end, which comes last"
    assert episodes.open([("a", PROBLEM, 0)]) and episodes.end("a") == Answer(value=(0.0, {}))


@pytest.mark.parametrize("name", ["Counter", "make_counter"])
def test_the_class_of_trl_works_unchanged(chat, worlds, name):
    episodes = worlds(name)
    assert set(episodes.tools.names) == {"add", "meet", "limit"}
    assert episodes.tools.schemas[0]["function"]["parameters"] == {
        "type": "object",
        "properties": {"k": {"type": "integer", "description": "How much."}},
        "required": ["k"],
    }
    play = Play(chat, episodes, extra={"start": 1})
    assert play.requests[0].problem.prompt == "37*58=? Start: 1."
    reply = play.say(ADD + ADD + LIMIT + call("add", '{"k": "x"}'))
    outputs = [part.split("\n</tool_response>")[0].strip() for part in reply.split("<tool_response>")[1:]]
    assert outputs[:3] == ["3", "5", "100"] and "argument 'k' must be integer, got string" in outputs[3]
    assert "unknown_tool" in play.say(call("_hidden"))
    assert play.say("done") == "eos"
    (trajectory,) = play.end()
    assert trajectory.reward == 1.0 and not any(t.reward for t in trajectory.turns)
    assert [result.kind for result in trajectory.results] == ["ok"] * 3 + ["bad_arguments", "unknown_tool"]


def test_calls_of_the_executor_and_of_the_environment_share_a_turn_in_order(chat, worlds):
    executor = Instant()
    play = Play(chat, worlds("Counter"), executor=executor)
    reply = play.say(ADD + CALL)
    assert [part.split("\n")[1] for part in reply.split("<tool_response>")[1:]] == ["2", "7"]
    assert [program.tool for program in executor.submitted] == ["python"]
    play.end()
    assert not executor.closed, "the row has not ended"
    lost = Play(chat, worlds("Counter"), executor=Instant(ToolResult("sandbox_error")))
    assert lost.say(ADD + CALL) == "infrastructure"
    assert not lost.end()[0].results, "it is not the result of the first call"
    assert Play(chat, worlds("Counter")).say(MEET + MEET).count("\nmet\n") == 2, "coroutines of a turn run at once"
    assert Play(chat, worlds("Reader")).say("raw") == "\n> <answer>"
    assert chat.raw_ids("<answer>") == [chat.tokenizer.special("<answer>")]


def test_the_last_turn_is_played_a_cut_one_is_not_and_a_prompt_that_is_too_long_is_no_fault_of_the_policy(chat, worlds):
    play = Play(chat, worlds("Counter"), max_turns=1, extra={"start": 3})
    assert accepted(lambda start, board=(): 0, {"prompt": "p", "start": 3}) == {"start": 3}
    assert play.say(ADD) == "turns"
    assert play.end()[0].reward == 1.0
    for reason in ("length", "turn_length"):
        play = Play(chat, worlds("Echo"))
        assert play.say("half a", reason) == "length"
        assert play.end("length")[0].reward == 10.0
    play = Play(chat, worlds("Counter"), extra={"start": int("9" * 900)})  # its reset makes the prompt too long
    assert play.requests[0].problem.prompt == PROBLEM.prompt and play.say("hm") == "infrastructure"
    (trajectory,) = play.end()
    assert trajectory.stop == "infrastructure" and not trajectory.opening, "no fault of the policy"


def test_every_fault_is_typed_and_retried_where_it_may_pass(chat, worlds):
    for how, text, stop, attempts in (
        ("reset once", "hm", "eos", {"reset": 2}),
        ("reset", "hm", "infrastructure", {"reset": 2}),
        ("reset type", "hm", "infrastructure", {"reset": 2}),
        ("look once", LOOK, None, {"look": 2}),
        ("look", LOOK, "infrastructure", {"look": 2}),
        ("look error", LOOK, None, {"look": 1}),
        ("step", "hm", "infrastructure", {}),
        ("step exits", "hm", "infrastructure", {}),
        ("step hangs", "hm", "infrastructure", {}),
        ("look hangs", LOOK, "deadline", {"look": 1}),
    ):
        episodes = worlds("Flaky", timeout_s=0.3 if "hangs" in how else 5.0, on_failure="drop")
        before = episodes.counts.copy()
        play = Play(chat, episodes, how=how)
        reply = play.say(text)
        assert reply == stop if stop else "tool_response" in reply
        assert {name: MADE.ATTEMPTS.count(name) for name in attempts} == attempts
        counts = episodes.counts - before
        assert bool(counts["faults"]) == (stop == "infrastructure")
        assert counts["retries"] == sum(attempts.values()) - len(attempts)
        (trajectory,) = play.end(stop or "eos")
        assert trajectory.stop == (stop or "eos")
        assert how != "step hangs" or trajectory.fault == "step: took longer than 0.3 s"
        if how not in ("reset", "reset type"):
            assert MADE.ATTEMPTS.count("close") == attempts.get("reset", 1), (
                "an environment is closed whatever happened"
            )


def test_a_rollout_whose_reward_fails_is_counted_by_how_it_then_ends(chat, worlds):
    """Once by its stop, and the fault as one of the environment, whatever earlier runs had."""
    source = EpisodeSource(Instant(), worlds("Flaky"))
    source.episodes.counts += {"faults": 5, "retries": 5}

    def run(sampler, requests, rows, options):
        decided, stats = rows.turn_ended(0, turn(chat, "hm")), RolloutStats()
        while decided == Wait():
            decided = dict(rows.poll(1.0)).get(0, decided)
        assert sampler == "weights" and decided == Finish("eos")
        stats.stops["eos"] = 3
        return [rows.completed(0, bare("eos"))], stats

    engine = engine_of(run)
    requests = [RolloutRequest(replace(PROBLEM, extra={"how": "reward"}), 0, 1)]
    (trajectory,), stats = collect_episodes(engine, "weights", chat, source, requests, RunOptions())
    assert trajectory.stop == "infrastructure"
    assert (stats.stops["eos"], stats.stops["infrastructure"]) == (2, 1)
    assert (stats.environment_faults, stats.environment_retries) == (1, 0)


def test_a_row_that_the_engine_ends_is_closed_and_its_late_answer_dropped(chat, worlds):
    play = Play(chat, worlds("Flaky", timeout_s=0.3), how="step hangs")
    assert play.rows.turn_ended(0, turn(chat, "hm")) == Wait()
    play.rows.cancelled(0)
    assert play.rows.poll(1.0) == []
    (trajectory,) = play.end("deadline")
    assert (trajectory.stop, trajectory.reward) == ("deadline", 1.0) and "close" in MADE.ATTEMPTS
    ended = Play(chat, worlds("Echo"), max_turns=1)
    assert ended.say("a") == "turns"
    ended.say("b")  # a turn of a row that had ended, which the engine never has: its end is not waited for
    assert ended.end()[0].stop in ("eos", "infrastructure")


def test_tools_of_another_origin_are_called_by_name_and_an_environment_may_answer_calls_itself(chat, worlds):
    reply = Play(chat, worlds("Elsewhere")).say(call("add", '{"name": 2}') + call("add", '{"name": "x"}'))
    assert "\nadd {'name': 2}\n" in reply and "argument 'name' must be integer or null, got string" in reply
    play, add = Play(chat, worlds("Answering"), samples=3), call("add", '{"name": 2}')
    reply = play.say(MALFORMED + add + add)
    assert reply.count("\nmine\n") == 2 and reply.index("malformed") < reply.index("mine")
    assert play.say(f"too few {add + MALFORMED}", row=1) == "infrastructure"
    assert play.say(f"wrong type {add}", row=2) == "infrastructure"
    first, second, _ = play.end()
    assert [result.kind for result in first.results] == ["malformed_call", "ok", "ok"] and not second.results


def test_what_is_refused_at_the_start():
    """A tool without a schema, a class that no process can import, a function that cannot make an environment."""

    def look(self, where):
        """Looks."""

    with pytest.raises(ValueError, match=r"tool 'look': parameter 'where' needs a type hint.*begin with _"):
        method_tools(type("Untyped", (Environment,), {"look": look}))
    local = type("Local", (Environment,), {})
    with given({"mine": local}), pytest.raises(ValueError, match="name it by its path"):
        Episodes(EnvironmentClass(path="mine", host=HostProcesses(1)), ToolsConfig())
    with pytest.raises(ValueError, match="environment: cannot be made: OSError: no display"):
        classes_of({"": partial(MADE.fails, OSError("no display"))})


def test_an_operation_has_time_for_all_of_its_calls_and_for_the_last_one():
    """Calls of a turn run one after another, each up to its own deadline; the end waits for the turn."""
    clock, silent = [0.0], SimpleNamespace(call=lambda *words: Future(), abandon=print)
    choice = EnvironmentClass(path=f"{FILE}:Echo", timeout_s=10.0, retries=0)
    episodes = Episodes(choice, ToolsConfig(), clock=lambda: clock[0], host=silent)

    def lost_at(seconds):
        clock[0] = seconds
        return [answer.lost for _, answer in episodes.poll(0.0)]

    episodes.play("a", None, [None] * 6)
    assert lost_at(60.0) == []
    episodes.end("a")
    assert lost_at(90.0) == [] and lost_at(101.0) == [True]


def test_get_reward_gives_several_numbers_or_none(chat, worlds):
    for how, stop, reward, rewards in (("several", "answer", None, {"speed": 3.0}), ("no reward", "eos", None, {})):
        play = Play(chat, worlds("Flaky"), how=how)
        assert play.say("so") == stop
        (trajectory,) = play.end()
        assert (trajectory.stop, trajectory.reward, trajectory.rewards) == ("eos", reward, rewards)
        assert not trajectory.fault
    assert checked_pay({"reward": 1, "speed": 0.5, "absent": None}) == (1.0, {"speed": 0.5})
    assert checked_pay(2) == (2.0, {}) and checked_pay(None) == (None, {})
    with pytest.raises(BadAnswer, match=r"get_reward\(\)\['speed'\] is str; must be a number or None"):
        checked_pay({"speed": "x"})
    with pytest.raises(BadAnswer, match="get_reward is nan; must be finite"):
        checked_pay(float("nan"))


def outcome(chat, text):
    """(stop, trajectory, counts) of a rollout with this turn."""
    with opened("Reader", retries=0) as episodes:
        play = Play(chat, episodes)
        stop = play.say(text)
        return stop, play.end(stop if stop in ("failed", "infrastructure") else "eos")[0], episodes.counts


def test_a_rollout_that_fails_says_why_and_scores_0_if_the_policy_caused_it(chat):
    for text, stop, words in (
        ("forty two", "failed", "step: ValueError: invalid literal for int() with base 10: 'forty two' (sample_en"),
        ("own", "infrastructure", "step: AttributeError: 'Reader' object has no attribute 'absent' (sample_env"),
        ("module", "infrastructure", "step: AttributeError: module 'os' has no attribute 'absent' (sample_env"),
        ("wrong type", "infrastructure", "step: BadAnswer: step returned dict; must be an Observation, text or None"),
        ("endless", "infrastructure", "step: BadAnswer: Observation.reward is int; must be a number or None"),
        ("exhausted", "failed", "step: NoItem: StopIteration (sample_environments.py, line "),
        ("mute", "failed", "step: Mute: (its message cannot be read: RuntimeError) (sample_env"),
        ("offline", "infrastructure", "step: OSError: no route to host (sample_environments.py, line "),
        ("unprepared", "infrastructure", "step: RuntimeError: no session (sample_environments.py, line "),
    ):
        reason, trajectory, counts = outcome(chat, text)
        first, _, traceback = trajectory.fault.partition("\n")
        assert reason == trajectory.stop == stop and first.startswith(words)
        bare = "BadAnswer" in words
        assert traceback == "" if bare else traceback.startswith("Traceback") and FILE in traceback
        assert "episode.py" not in traceback, "frames of the library say nothing about the environment"
        assert (counts["faults"], trajectory.reward) == ((0, 0.0) if stop == "failed" else (1, None))


def test_a_failed_rollout_scores_0_whatever_it_earned_and_stays_in_its_group(chat):
    failed = outcome(chat, "<answer>5</answer>")[1]
    problem = Problem("p", "2+3=?", "5", "t")
    for functions in ((EnvironmentReward(success=0.0),), (EnvironmentReward(), FormatReward(weight=0.25))):
        scorer = make_scorer(RewardConfig(functions=functions, truncated=TruncatedScored()))
        group = scorer(problem, [failed])
        (verdict,) = group.verdicts
        assert failed.stop == "failed" and group.size == 1
        assert (verdict.reward, verdict.status) == (0.0, "no_answer") and not any(verdict.channels.values())
    with closing(make_scorer(RewardConfig())) as scorer:
        assert scorer(problem, [failed]).verdicts[0].reward == 0.0, "although the answer is right"


@both_hosts
def test_the_first_failure_of_each_kind_is_logged_with_its_traceback(chat, caplog, host):
    with opened("Reader", retries=0, host=host) as episodes:
        with caplog.at_level(logging.WARNING):
            play = Play(chat, episodes, samples=5)
            for row, text in enumerate(["own", "own", "x", "y", "7"]):
                play.say(text, row=row)
        trajectories = play.end()
        assert [record.message.splitlines()[0].split(" (")[0] for record in caplog.records] == [
            "environment: step: AttributeError: 'Reader' object has no attribute 'absent'",
            "environment: step: ValueError: invalid literal for int() with base 10: 'x'",
        ]
        assert all(f'File "{FILE}", line ' in record.message for record in caplog.records)
        assert "its rollout is lost; later ones" in caplog.records[0].message
        assert "it scores 0; later ones" in caplog.records[1].message
        assert ["\n" in trajectory.fault for trajectory in trajectories] == [True, False, True, False, False]
        assert "'y'" in trajectories[3].fault and trajectories[4].fault == ""


def raised(function, *arguments):
    with pytest.raises(Exception) as caught:
        function(*arguments)
    return caught.value


Holder = type("Holder", (), {})
BLAMED = [
    [(int, "x"), (json.loads, "{"), (json.loads, "[" * 100_000), (re.compile, "("), (struct.unpack, "I", b"1")],
    [(ast.literal_eval, "f(1,"), (compile, "if", "<answer>", "exec"), (ElementTree.fromstring, "<a")],
    [([].__getitem__, 0), ({}.__getitem__, "north"), (getattr, None, "group"), (operator.add, "a", 1), (divmod, 1, 0)],
]
NOT_BLAMED = [
    [(compile, "if", __file__, "exec"), (getattr, Holder(), "x"), (getattr, Holder, "x"), (getattr, json, "x")],
    [(lambda: absent,), (open, "/nowhere"), (__import__, "absent_module")],  # noqa: F821
    [(MADE.fails, error) for error in (ToolUnavailable("x"), ConnectionError("x"), MemoryError(), TimeoutError())],
    [(MADE.fails, NotImplementedError())],
]


def test_what_reading_a_text_raises():
    for blamed, groups in ((True, BLAMED), (False, NOT_BLAMED)):
        for steps in itertools.chain(*groups):
            assert may_blame_policy(raised(*steps), Holder()) is blamed, steps


def test_words_of_a_failure_are_bounded_and_on_one_line():
    failure = failure_of("step", raised(lambda: int("x" * 5 + "\n" * 3 + "y" * 100_000)))
    assert "\n" not in failure.text and len(failure.text) < 700 and len(failure.whole) < 9000
    assert failure.kind.startswith("step: ValueError (test_episodes.py, line ") and failure.text.startswith("step: Val")
    chain = failure_of("reset", raised(MADE.fails, RuntimeError("outer")))
    assert chain.traceback.endswith("RuntimeError: outer")

    async def gives_up():
        raise TimeoutError("of the server")

    late = "no answer within 0.05 s"  # what only a late connection is called
    for ask, message in ((gives_up, "TimeoutError: of the server"), (lambda: asyncio.sleep(60), late)):
        with pytest.raises(ConnectionError, match=message):
            connection.outcome(ask, 0.05)


def test_a_released_thread_is_leased_again_a_hanging_one_is_not_and_resets_that_fail_keep_none():
    threads, idents, release = IdleThreads(), SimpleQueue(), threading.Event()

    def number(lease) -> int:
        lease.run(lambda: idents.put(threading.get_ident()))
        return idents.get(timeout=10)

    def reused() -> int:
        lease = threads.lease()
        ident = number(lease)
        assert number(lease) == ident, "an owner has one thread"
        lease.release()
        assert wait_until(lambda: threads.idle), "a moment after its last function"
        return ident

    first = reused()
    assert {reused() for _ in range(20)} == {first}
    hanging = threads.lease()
    hanging.run(lambda: release.wait(10))
    hanging.release()
    assert reused() != first, "not before its function has returned"
    leased, other = threads.lease(), threads.lease()
    assert number(leased) != number(other)
    release.set()

    def in_use() -> int:
        return sum(thread.name == "environment" for thread in threading.enumerate()) - THREADS.idle

    before = in_use()
    with opened("Flaky", retries=0) as episodes:
        for step in range(3):
            answers = episodes.open([(f"{step}/{i}", PROBLEM, 0) for i in range(8)])
            assert all(answer.failure for answer in answers.values()), "its reset fails"
            assert wait_until(lambda: in_use() <= before)


@both_hosts
def test_all_functions_of_an_episode_run_on_one_thread(chat, host):
    """A connection of sqlite3 that `reset` opens serves `step`, tools, reward and `close`, beside other episodes."""
    MADE.ATTEMPTS.clear()
    with opened("Ledger", host=host) as episodes:
        play = Play(chat, episodes, samples=4, max_turns=9)
        for turn in range(3):
            for row in range(4):
                assert "go on" in play.say("hm", row=row)
                assert f"\n{2 * turn + 1}\n" in play.say(call("count"), row=row)
        assert [trajectory.reward for trajectory in play.end()] == [6.0] * 4
        assert episodes.counts["faults"] == 0
        assert isinstance(host, HostProcesses) or MADE.ATTEMPTS == ["closed"] * 4


@pytest.fixture(scope="module")
def episodes(host):
    with opened("Hostile", timeout_s=9.0, host=host) as made:
        yield made


@both_hosts
def test_each_fault_ends_its_own_rollout_at_once(chat, host, episodes):
    for how in FAULTS if isinstance(host, HostProcesses) else FAULTS[:2]:
        started, bad, good = time.monotonic(), Play(chat, episodes, how=how), Play(chat, episodes, position=5)
        assert bad.say("hm") == "infrastructure", how
        bad.end("infrastructure")
        assert good.say("hm") == "eos" and good.end()[0].stop == "eos", how
        assert time.monotonic() - started < 60, f"{how}: noticed by its deadline alone"


@both_hosts
def test_a_tool_that_misbehaves_is_an_error_that_the_policy_reads_and_a_flood_of_text_is_cut(chat, episodes):
    for how, text in (("exits", "SystemExit"), ("cannot be sent", "TypeError"), ("fine", "characters omitted")):
        play = Play(chat, episodes, how=how)
        assert text in play.say(LOOK)
        play.end()
    play = Play(chat, episodes, how="floods")
    reply = play.say("hm")
    assert "characters omitted" in reply and reply.count("&lt;answer>") > 3 and "<answer>" not in reply
    play.end()
    assert Play(chat, episodes, how="reset floods").say("hm") == "infrastructure"
    for flood in ("x" * 50_000_000, Observation("x" * 50_000_000)):
        assert len(checked_observation(flood).text) < MOST_TEXT + 100, "it is cut before it is encoded"
