"""Environments of the user's: how their answers reach the policy, what they pay, and every way in which they fail: in
words, where and why; which failures the policy caused; in a thread or a process of their own while others go on."""

import asyncio
import json
import re
import struct
import time
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock

import numpy as np
import pytest

import grpo_roc_jax as g
from grpo_roc_jax.engine.protocol import Finish, Wait
from grpo_roc_jax.environments import connection, environment, episode
from grpo_roc_jax.environments.config import EnvironmentClass, HostProcesses, HostThreads
from grpo_roc_jax.environments.episodes import Episodes
from grpo_roc_jax.environments.failure import failure_of, may_blame_policy
from grpo_roc_jax.environments.hosts import make_host
from grpo_roc_jax.method.edit import as_opened
from grpo_roc_jax.reward.config import EnvironmentReward, FormatReward, TruncatedScored
from grpo_roc_jax.rollout.sampler import EpisodeEnvironment, EpisodeSource, collect_episodes, render
from grpo_roc_jax.settings.callables import given, import_file
from grpo_roc_jax.types import ToolResult
from tests.helpers.arena import wait_until
from tests.helpers.servers import call
from tests.helpers.servers import chat as chat  # a fixture
from tests.rollout.test_collect import CALL, PROBLEM, Instant, turn

FILE = str(Path(__file__).parent / "sample_environments.py")
MADE = import_file(FILE)
ADD, LOOK, MEET = call("add", '{"k": 2}'), call("look"), call("meet")
FAULTS = ("exits", "cancels itself", "cannot be sent", "writes to every connection", "forks and dies")
HOSTS = {"threads": HostThreads(), "processes": HostProcesses(2)}
both_hosts = pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS)


@contextmanager
def opened(choice, **settings):
    """Episodes of a choice, or of a class of the file."""
    if isinstance(choice, str):
        choice = EnvironmentClass(path=f"{FILE}:{choice}", **settings)
    with closing(Episodes(choice, g.ToolsConfig(), ("python",))) as episodes:
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

    def __init__(self, chat, episodes, *, samples=1, max_turns=4, executor=None, position=4, problem=None, **columns):
        problem = problem or replace(PROBLEM, extra=columns.pop("extra", {}) | columns)
        self.chat, requests = chat, [g.RolloutRequest(problem, position, samples)]
        source = EpisodeSource(executor or Instant(), episodes)
        self.rows = EpisodeEnvironment(chat, source, requests, step=2, seed=0, max_turns=max_turns)
        self.requests = self.rows.open(requests, 200)

    def say(self, text, reason="stop", row=0):
        """The answer to a turn: its stop reason, or its ids as text."""
        decided = self.rows.turn_ended(row, turn(self.chat, text, reason))
        if decided == Wait():
            ((index, decided),) = wait_until(lambda: self.rows.poll(1.0))
            assert index == row
        return decided.stop if isinstance(decided, Finish) else self.chat.tokenizer.decode(decided.ids)

    def end(self, stop="eos"):
        """The trajectories of the rows, as the engine has them, with what was paid."""
        count, zeros = sum(request.count for request in self.requests), np.zeros(2, np.int32)
        bare = g.Trajectory(zeros, zeros > 0, zeros * np.float32(0), zeros, 1, (), stop, 0)
        return self.rows.paid([self.rows.completed(i, bare) for i in range(count)])


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
    scored = g.make_scorer(g.RewardConfig(functions=functions, truncated=TruncatedScored()))
    verdict, *_ = scored(PROBLEM, [first]).verdicts
    assert (verdict.reward, verdict.turn_rewards, verdict.status) == (8.0, (0.5, 1.0, 6.5), "correct")
    assert scored(PROBLEM, [replace(first, reward=None)]).size == 0, "what could not be judged leaves the group"
    assert scored(PROBLEM, [replace(first, reward=15.0)]).verdicts[0].status == "wrong"


def test_rollouts_of_a_group_share_no_column_and_records_keep_their_arguments(chat, worlds):
    play = Play(chat, worlds("Sharing"), samples=2, extra={"board": [], "function": "f"})
    text = call("note", '{"numbers": [3, 1], "function": "sum"}')
    assert all("sum: [1]" in play.say(text, row=row) for row in range(2))
    for (only,) in (trajectory.turns for trajectory in play.end()):
        assert only.calls[0].arguments == {"numbers": [3, 1], "function": "sum"} and only.results[0].ok
    assert play.requests[0].problem.extra == {"board": [], "function": "f"}


@both_hosts
@pytest.mark.parametrize(
    ("how", "held"),
    [("interrupted", 0), ("reset fails", 0), ("too long", 0), ("opened again", 3), ("hangs", 3), ("terminated", 0)],
)
def test_an_environment_is_closed_once_however_its_rollout_ends(chat, tmp_path, host, how, held):
    """Nobody asks it for a reward then. What is open, also in a turn that hangs, is closed with its host."""
    choice = EnvironmentClass(path=f"{FILE}:Held", host=host, timeout_s=20.0, retries=1)
    holder = make_host(host, episode.EpisodeSettings(choice))
    episodes = Episodes(choice, g.ToolsConfig(), host=holder)
    problem = replace(PROBLEM, extra={"how": how, "folder": str(tmp_path)})
    if how == "interrupted":
        config = SimpleNamespace(max_turns=4, max_prompt_tokens=200)
        engine = SimpleNamespace(config=config, seed=0, run=lambda *given: MADE.fails(KeyboardInterrupt()))
        requests = [g.RolloutRequest(problem, 4, 3)]
        with pytest.raises(KeyboardInterrupt):
            collect_episodes(engine, None, chat, EpisodeSource(Instant(), episodes), requests, g.RunOptions(2))
    for _ in range({"interrupted": 0, "opened again": 2}.get(how, 1)):
        play = Play(chat, episodes, samples=3, problem=problem)
    if how == "hangs":
        play.rows.turn_ended(0, turn(chat, "hm"))
    if how == "terminated" and isinstance(host, HostProcesses):
        for worker in holder.workers:
            worker.process.terminate()
    elif how == "terminated":
        holder.close()
    assert wait_until(lambda: len(list(tmp_path.iterdir())) == held)
    episodes.close()
    assert not list(tmp_path.iterdir())


def test_calls_of_the_executor_and_of_the_environment_share_a_turn_in_order(chat, worlds):
    executor = Instant()
    play = Play(chat, worlds("Counter"), executor=executor)
    reply = play.say(ADD + CALL)
    assert [part.split("\n")[1] for part in reply.split("<tool_response>")[1:]] == ["2", "7"]
    assert [program.tool for program in executor.submitted] == ["python"]
    play.end()
    assert not executor.closed, "the row has not ended"
    lost = Play(chat, worlds("Counter"), executor=Instant(ToolResult("sandbox_error")))
    assert lost.say(ADD + CALL) == "infrastructure" and not lost.end()[0].results, "it is not that of the first call"
    assert Play(chat, worlds("Counter")).say(MEET + MEET).count("\nmet\n") == 2, "coroutines of a turn run at once"
    assert Play(chat, worlds("Reader")).say("raw") == "\n> <answer>"
    assert chat.raw_ids("<answer>") == [chat.tokenizer.special("<answer>")]


def test_the_last_turn_is_played_a_cut_one_is_not_and_a_prompt_that_is_too_long_is_no_fault_of_the_policy(chat, worlds):
    play = Play(chat, worlds("Counter"), max_turns=1, extra={"start": 3})
    assert play.say(ADD) == "turns" and play.end()[0].reward == 1.0
    assert environment.accepted(lambda start, board=(): 0, {"prompt": "p", "start": 3}) == {"start": 3}
    for reason in ("length", "turn_length"):
        play = Play(chat, worlds("Echo"))
        assert play.say("half a", reason) == "length" and play.end("length")[0].reward == 10.0
    play = Play(chat, worlds("Counter"), extra={"start": int("9" * 900)})  # its reset makes the prompt too long
    assert play.requests[0].problem.prompt == PROBLEM.prompt and play.say("hm") == "infrastructure"
    (trajectory,) = play.end()
    assert trajectory.stop == "infrastructure" and not trajectory.opening, "no fault of the policy"


def test_every_fault_is_typed_and_retried_where_it_may_pass(chat, worlds):
    for how, text, stop, attempts in (
        ("reset once", "hm", "eos", {"reset": 2}),
        ("reset", "hm", "infrastructure", {"reset": 2}),
        ("look once", LOOK, None, {"look": 2}),
        ("look", LOOK, "infrastructure", {"look": 2}),
        ("look error", LOOK, None, {"look": 1}),
        ("step", "hm", "infrastructure", {}),
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
        assert how != "step hangs" or trajectory.fault == "step: took longer than 0.3 s"
        assert how.startswith("reset") or MADE.ATTEMPTS.count("close") == 1, "it is closed whatever happened"


def test_tools_of_another_origin_are_called_by_name_and_an_environment_may_answer_calls_itself(chat, worlds):
    reply = Play(chat, worlds("Elsewhere")).say(call("add", '{"name": 2}') + call("add", '{"name": "x"}'))
    assert "\nadd {'name': 2}\n" in reply and "argument 'name' must be integer or null, got string" in reply
    play, add = Play(chat, worlds("Answering"), samples=3), call("add", '{"name": 2}')
    reply = play.say("<tool_call>{</tool_call>" + add + add)
    assert reply.count("\nmine\n") == 2 and reply.index("malformed") < reply.index("mine")
    for row, what in ((1, "too few"), (2, "wrong type")):
        assert play.say(f"{what} {add}", row=row) == "infrastructure"
    first, second, _ = play.end()
    assert [result.kind for result in first.results] == ["malformed_call", "ok", "ok"] and not second.results


def test_what_is_refused_at_the_start():
    untyped = type("Untyped", (g.Environment,), {"fails": lambda self, where: None})
    with pytest.raises(ValueError, match=r"tool '<lambda>' has no docstring.*begin with _"):
        environment.method_tools(untyped)
    local = type("Local", (g.Environment,), {})
    with given({"mine": local}), pytest.raises(ValueError, match="name it by its path"):
        Episodes(EnvironmentClass(path="mine", host=HostProcesses(1)), g.ToolsConfig())
    with pytest.raises(ValueError, match="environment: cannot be made: OSError: no display"):
        environment.classes_of({"": partial(MADE.fails, OSError("no display"))})


def test_get_reward_gives_several_numbers_or_none(chat, worlds):
    play = Play(chat, worlds("Flaky"), how="several")
    assert play.say("so") == "answer"
    (trajectory,) = play.end()
    assert (trajectory.stop, trajectory.reward, trajectory.rewards) == ("eos", None, {"speed": 3.0})
    assert episode.checked_pay({"reward": 1, "speed": 0.5, "absent": None}) == (1.0, {"speed": 0.5})
    for pay, words in (({"speed": "x"}, r"\['speed'\] is str; must be a number"), (float("nan"), "must be finite")):
        with pytest.raises(episode.BadAnswer, match=words):
            episode.checked_pay(pay)


def outcome(chat, text):
    """(stop, trajectory, counts) of a rollout with this turn."""
    with opened("Reader", retries=0) as episodes:
        play = Play(chat, episodes)
        stop = play.say(text)
        return stop, play.end(stop if stop in ("failed", "infrastructure") else "eos")[0], episodes.counts


def test_a_rollout_that_fails_says_why_and_scores_0_if_the_policy_caused_it(chat):
    for text, stop, words in (
        ("forty two", "failed", "step: ValueError: invalid literal for int() with base 10: 'forty two' (sample_en"),
        ("wrong type", "infrastructure", "step: BadAnswer: step returned dict; must be an Observation, text or None"),
        ("endless", "infrastructure", "step: BadAnswer: Observation.reward is int; must be a number or None"),
        ("exhausted", "failed", "step: NoItem: StopIteration (sample_environments.py, line "),
        ("offline", "infrastructure", "step: OSError: no route to host (sample_environments.py, line "),
    ):
        reason, trajectory, counts = outcome(chat, text)
        first, _, traceback = trajectory.fault.partition("\n")
        assert reason == trajectory.stop == stop and first.startswith(words)
        assert traceback == "" if "BadAnswer" in words else traceback.startswith("Traceback") and FILE in traceback
        assert "episode.py" not in traceback, "frames of the library say nothing about the environment"
        assert (counts["faults"], trajectory.reward) == ((0, 0.0) if stop == "failed" else (1, None))
    failed, problem = outcome(chat, "<answer>5</answer>")[1], g.Problem("p", "2+3=?", "5", "t")
    functions = (EnvironmentReward(success=0.0), FormatReward(weight=0.25))
    scored = g.make_scorer(g.RewardConfig(functions=functions, truncated=TruncatedScored()))
    (verdict,) = scored(problem, [failed]).verdicts
    assert failed.stop == "failed" and (verdict.reward, verdict.status) == (0.0, "no_answer")
    assert not any(verdict.channels.values()), "it stays in its group, whatever it earned"
    with closing(g.make_scorer(g.RewardConfig())) as scorer:
        assert scorer(problem, [failed]).verdicts[0].reward == 0.0, "although the answer is right"


@both_hosts
def test_the_first_failure_of_each_kind_is_logged_with_its_traceback(chat, caplog, host):
    with opened("Reader", retries=0, host=host) as episodes:
        play = Play(chat, episodes, samples=5)
        for row, text in enumerate(["own", "own", "x", "y", "7"]):
            play.say(text, row=row)
        trajectories = play.end()
        assert [record.message.splitlines()[0].split(" (")[0] for record in caplog.records] == [
            "environment: step: AttributeError: 'Reader' object has no attribute 'absent'",
            "environment: step: ValueError: invalid literal for int() with base 10: 'x'",
        ]
        assert all(f'File "{FILE}", line ' in record.message for record in caplog.records)
        first, second = (record.message for record in caplog.records)
        assert "its rollout is lost; later ones" in first and "it scores 0; later ones" in second
        assert ["\n" in trajectory.fault for trajectory in trajectories] == [True, False, True, False, False]
        assert "'y'" in trajectories[3].fault and trajectories[4].fault == ""


def raised(function, *arguments):
    with pytest.raises(Exception) as caught:
        function(*arguments)
    return caught.value


def test_what_reading_a_text_raises_and_words_of_a_failure_that_are_bounded_and_on_one_line():
    holder = SimpleNamespace()
    for steps in (
        *((int, "x"), (json.loads, "{"), (json.loads, "[" * 100_000), (re.compile, "("), (struct.unpack, "I", b"1")),
        *((compile, "if", "<answer>", "exec"), ({}.__getitem__, "north"), (getattr, None, "group"), (divmod, 1, 0)),
    ):
        assert may_blame_policy(raised(*steps), holder), steps
    for steps in (
        *((compile, "if", __file__, "exec"), (getattr, holder, "x"), (getattr, json, "x"), (open, "/nowhere")),
        *((MADE.fails, g.ToolUnavailable("x")), (MADE.fails, NameError("x")), (MADE.fails, TimeoutError())),
    ):
        assert not may_blame_policy(raised(*steps), holder), steps
    failure = failure_of("step", raised(int, "x" * 5 + "\n" * 3 + "y" * 100_000))
    assert "\n" not in failure.text and len(failure.text) < 700 and len(failure.whole) < 9000

    gives_up, late = AsyncMock(side_effect=TimeoutError("of the server")), partial(asyncio.sleep, 60)
    for ask, message in ((gives_up, "TimeoutError: of the server"), (late, "no answer within 0.05 s")):
        with pytest.raises(ConnectionError, match=message):
            connection.outcome(ask, 0.05)


@both_hosts
def test_all_functions_of_an_episode_run_on_one_thread(chat, host):
    """A connection of sqlite3 that `reset` opens serves `step`, tools, reward and `close`, beside other episodes."""
    MADE.ATTEMPTS.clear()
    with opened("Ledger", host=host) as episodes:
        play = Play(chat, episodes, samples=4)
        for row in range(4):
            assert "go on" in play.say("hm", row=row) and "\n1\n" in play.say(call("count"), row=row)
        assert [trajectory.reward for trajectory in play.end()] == [2.0] * 4 and episodes.counts["faults"] == 0
        assert isinstance(host, HostProcesses) or MADE.ATTEMPTS == ["closed"] * 4


@both_hosts
def test_each_fault_ends_its_own_rollout_at_once_or_is_an_error_that_the_policy_reads_and_a_flood_is_cut(chat, host):
    cut = "characters omitted"
    with opened("Hostile", timeout_s=9.0, host=host) as episodes:
        for how in FAULTS if isinstance(host, HostProcesses) else FAULTS[:2]:
            started, bad, good = time.monotonic(), Play(chat, episodes, how=how), Play(chat, episodes, position=5)
            assert bad.say("hm") == "infrastructure", how
            bad.end("infrastructure")
            assert good.say("hm") == "eos" and good.end()[0].stop == "eos", how
            assert time.monotonic() - started < 60, f"{how}: noticed by its deadline alone"
        for how, said, text in (
            *(("exits", LOOK, "SystemExit"), ("cannot be sent", LOOK, "TypeError"), ("fine", LOOK, cut)),
            *(("floods", "hm", cut), ("floods", "hm", "&lt;answer>" * 3)),
        ):
            play = Play(chat, episodes, how=how)
            assert text in (reply := play.say(said)) and "<answer>" not in reply
            play.end()
        assert Play(chat, episodes, how="reset floods").say("hm") == "infrastructure"
    for flood in ("x" * 50_000_000, g.Observation("x" * 50_000_000)):
        assert len(episode.checked_observation(flood).text) < episode.MOST_TEXT + 100, "it is cut before it is encoded"


@pytest.mark.parametrize("timeout_s", [20.0, 0.2], ids=["given up", "late"])
def test_an_environment_that_is_made_slowly_is_closed(timeout_s):
    MADE.ATTEMPTS.clear()
    choice = EnvironmentClass(path=f"{FILE}:SlowToMake", timeout_s=timeout_s, retries=0)
    host = make_host(HostThreads(), episode.EpisodeSettings(choice))
    answer = host.call("key", "open", PROBLEM, 0)
    if timeout_s > 1:
        host.call("key", "drop")
    else:
        assert "took longer than 0.2 s" in answer.result(5).failure.text
        wait_until(lambda: "closed" in MADE.ATTEMPTS)
    host.close()
    assert MADE.ATTEMPTS == ["made", "closed"]
