"""Environments of the user's: how their answers reach the policy, what they pay, and every way in which they fail."""

import threading
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_roc_jax.engine.protocol import Finish, RolloutStats, RunOptions, Wait
from grpo_roc_jax.environments.config import EnvironmentClass, HostProcesses, HostThreads
from grpo_roc_jax.environments.environment import method_tools
from grpo_roc_jax.environments.episode import Answer, BadAnswer, EpisodeSettings, checked_pay
from grpo_roc_jax.environments.episodes import Episodes
from grpo_roc_jax.environments.hosts import make_host
from grpo_roc_jax.method.edit import as_opened
from grpo_roc_jax.reward.config import EnvironmentReward, RewardConfig, TruncatedScored
from grpo_roc_jax.reward.score import make_scorer
from grpo_roc_jax.rollout.sampler import (
    BOTH_S,
    EpisodeEnvironment,
    EpisodeSource,
    Sampler,
    collect_episodes,
    render,
)
from grpo_roc_jax.settings.callables import given, import_file
from grpo_roc_jax.text.chat_format import make_chat
from grpo_roc_jax.text.config import TextConfig
from grpo_roc_jax.text.tokenizer import load_tokenizer
from grpo_roc_jax.tools import ToolsConfig
from grpo_roc_jax.types import RolloutRequest, ToolCall, ToolResult, Trajectory, Turn
from tests.helpers.arena import wait_until
from tests.helpers.servers import call
from tests.rollout.test_collect import CALL, PROBLEM, Instant, turn

FILE = str(Path(__file__).parent / "sample_environments.py")
MADE = import_file(FILE)
ADD, LIMIT, LOOK, MEET = call("add", '{"k": 2}'), call("limit"), call("look"), call("meet")
MALFORMED = "<tool_call>{</tool_call>"


@pytest.fixture(scope="module")
def chat():
    return make_chat(TextConfig(max_calls_per_turn=4), load_tokenizer(TextConfig()))


@pytest.fixture(scope="module")
def worlds():
    """Episodes by class, made once."""
    made = {}

    def find(name, **settings):
        key = (name, *settings.items())
        if key not in made:
            limits = {"timeout_s": 5.0, "retries": 1} | settings
            made[key] = Episodes(EnvironmentClass(path=f"{FILE}:{name}", **limits), ToolsConfig(), ("python",))
        MADE.ATTEMPTS.clear()
        return made[key]

    yield find
    for episodes in made.values():
        episodes.close()


@contextmanager
def opened(name, **settings):
    """Episodes of a class of the file."""
    episodes = Episodes(EnvironmentClass(path=f"{FILE}:{name}", **settings), ToolsConfig())
    try:
        yield episodes
    finally:
        episodes.close()


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
        zeros = np.zeros(2, np.int32)
        bare = Trajectory(zeros, zeros > 0, zeros * np.float32(0), zeros, 1, (), stop, 0)
        return self.rows.paid([self.rows.completed(i, bare) for i in range(count)])


def test_a_turn_without_a_call_is_answered_as_a_user_until_the_environment_ends_it(chat, worlds):
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
    own = Play(chat, worlds("Sharing"), extra={"board": [], "function": "f", "lock": lock})
    assert "sum: [1]" in own.say(text)


def test_an_environment_whose_reset_fails_is_closed(chat):
    with opened("Closing", retries=1) as episodes:
        Play(chat, episodes, samples=2)
        assert MADE.Closing.open == 0


@pytest.mark.parametrize("host", [HostThreads(), HostProcesses(1)], ids=["threads", "processes"])
@pytest.mark.parametrize(
    ("how", "held"),
    [("interrupted", 0), ("reset fails", 0), ("too long", 0), ("opened again", 3), ("hangs", 3), ("terminated", 0)],
)
def test_an_environment_is_closed_once_however_its_rollout_ends(chat, tmp_path, host, how, held):
    """Nobody asks it for a reward then. What is open, also in a turn that hangs, is closed with its host."""
    choice = EnvironmentClass(path=f"{FILE}:Held", host=host, timeout_s=20.0, retries=1)
    holder = make_host(host, EpisodeSettings(choice))
    episodes = Episodes(choice, ToolsConfig(), host=holder)
    request = RolloutRequest(replace(PROBLEM, extra={"how": how, "folder": str(tmp_path)}), 4, 3)

    def interrupted(*given):
        raise KeyboardInterrupt

    if how == "interrupted":
        engine = SimpleNamespace(config=SimpleNamespace(max_turns=4, max_prompt_tokens=200), seed=0, run=interrupted)
        with pytest.raises(KeyboardInterrupt):
            collect_episodes(engine, None, chat, EpisodeSource(Instant(), episodes), [request], RunOptions(2))
    else:
        play = Play(chat, episodes, samples=3, problem=request.problem)
    if how == "opened again":
        play = Play(chat, episodes, samples=3, problem=request.problem)
    if how == "hangs":
        play.rows.turn_ended(0, turn(chat, "hm"))
    if how == "terminated":
        holder.workers[0].process.terminate() if isinstance(host, HostProcesses) else holder.close()
    wait_until(lambda: len(list(tmp_path.iterdir())) == held)
    assert len(list(tmp_path.iterdir())) == held
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
        host.close()
    else:
        assert "took longer than 0.2 s" in answer.result(5).failure.text
        wait_until(lambda: "closed" in MADE.ATTEMPTS)
        host.close()
    assert MADE.ATTEMPTS == ["made", "closed"]


def test_an_episode_whose_reward_is_not_waited_for_is_closed_where_it_is(tmp_path):
    """In each of the processes."""
    choice = EnvironmentClass(path=f"{FILE}:Rewarding", timeout_s=50.0)
    host, problem = (
        make_host(HostProcesses(2), EpisodeSettings(choice)),
        replace(PROBLEM, extra={"folder": str(tmp_path)}),
    )
    for operation, *arguments in (("open", problem, 0), ("end",), ("drop",)):
        answers = [host.call(key, operation, *arguments) for key in "ab"]
        if operation == "open":
            assert not any(answer.result(60).failure for answer in answers) and len(list(tmp_path.iterdir())) == 2
    wait_until(lambda: not list(tmp_path.iterdir()))
    assert not list(tmp_path.iterdir())
    host.close()


def test_an_episode_that_was_dropped_no_longer_counts_for_its_process():
    class Worker:
        lost, calls = False, []

        def call(self, key, operation, arguments):
            self.calls.append((host.workers.index(self), key, operation))
            return Future()

    host = make_host(HostProcesses(2), None, process=lambda settings: Worker())
    for operation, keys in (("open", "abc"), ("drop", "ac"), ("open", "de"), ("open", "b")):
        for key in keys:
            host.call(key, operation)
    opened = [(worker, key) for worker, key, operation in Worker.calls if operation == "open"]
    assert opened == [(0, "a"), (1, "b"), (0, "c"), (0, "d"), (0, "e"), (1, "b")]


def test_the_executor_is_not_waited_for_while_an_environment_may_answer(chat, worlds):
    class Silent(Instant):
        def poll(self, timeout_s=0.0, ids=None):
            waits.append(timeout_s)
            return []

    waits = []
    play = Play(chat, worlds("Flaky"), samples=2, executor=Silent(), how="step hangs")
    play.rows.turn_ended(0, turn(chat, CALL + CALL))
    play.rows.poll(1.0)
    play.rows.turn_ended(1, turn(chat, "hm"))
    play.rows.poll(1.0)
    assert waits == [1.0, BOTH_S]


def test_pay_by_turn_and_at_the_end_reaches_the_verdict(chat, worlds):
    play = Play(chat, worlds("Echo"))
    for text in ("a", "b", "c"):
        play.say(text)
    (trajectory,) = play.end()
    functions = (EnvironmentReward(weight=0.5, success=16.0),)
    with_scorer = make_scorer(RewardConfig(functions=functions, truncated=TruncatedScored()))
    verdict, *_ = with_scorer(PROBLEM, [trajectory]).verdicts
    assert (verdict.reward, verdict.turn_rewards, verdict.status) == (8.0, (0.5, 1.0, 6.5), "correct")
    unpaid = with_scorer(PROBLEM, [replace(trajectory, reward=None)])
    assert unpaid.size == 0, "what could not be judged leaves the group"
    assert with_scorer(PROBLEM, [replace(trajectory, reward=15.0)]).verdicts[0].status == "wrong"


def test_an_environment_that_inherits_all_is_answered_at_once(chat, worlds):
    play = Play(chat, worlds("Tools"), samples=2)
    assert play.rows.turn_ended(0, turn(chat, "hm", "stop")) == Finish("eos")
    assert play.rows.turn_ended(1, turn(chat, CALL, "stop")) == Wait()
    (answered,) = play.rows.poll(0.0)
    tools = Play(chat, worlds("Echo"))  # whose step has a say
    assert answered[0] == 1 and tools.rows.turn_ended(0, turn(chat, "hm", "stop")) == Wait()
    play.rows.turn_ended(1, turn(chat, "7", "stop"))
    assert [t.reward for t in play.end()] == [0.0, 0.0]


def test_an_end_that_does_nothing_waits_for_the_turn_before(worlds):
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


def test_raw_text_has_nothing_around_it(chat, worlds):
    play = Play(chat, worlds("Writer"))
    assert play.say("look") == "\n> <answer>"
    assert chat.raw_ids("<answer>") == [chat.tokenizer.special("<answer>")]


@pytest.mark.parametrize("name", ["Counter", "make_counter"])
def test_the_class_of_trl_works_unchanged(chat, worlds, name):
    episodes = worlds(name)
    assert set(episodes.tools.names) == {"add", "double", "limit"}
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


def test_coroutines_of_a_turn_run_at_once(chat, worlds):
    assert Play(chat, worlds("Together")).say(MEET + MEET).count("\nmet\n") == 2


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


def test_the_last_turn_is_played_and_a_cut_one_is_not(chat, worlds):
    play = Play(chat, worlds("Counter"), max_turns=1, extra={"start": 3})
    assert play.say(ADD) == "turns"
    assert play.end()[0].reward == 1.0
    for reason in ("length", "turn_length"):
        play = Play(chat, worlds("Echo"))
        assert play.say("half a", reason) == "length"
        assert play.end("length")[0].reward == 10.0


@pytest.mark.parametrize(
    ("how", "text", "stop", "attempts"),
    [
        ("reset once", "hm", "eos", {"reset": 2}),
        ("reset", "hm", "infrastructure", {"reset": 2}),
        ("reset type", "hm", "infrastructure", {"reset": 2}),
        ("look once", LOOK, None, {"look": 2}),
        ("look", LOOK, "infrastructure", {"look": 2}),
        ("look error", LOOK, None, {"look": 1}),
        ("step", "hm", "infrastructure", {}),
        ("step type", "hm", "infrastructure", {}),
        ("nan", "hm", "infrastructure", {}),
        ("exit", "hm", "infrastructure", {}),
        ("step hangs", "hm", "infrastructure", {}),
        ("look hangs", LOOK, "deadline", {"look": 1}),
    ],
)
def test_every_fault_is_typed_and_retried_where_it_may_pass(chat, worlds, how, text, stop, attempts):
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
        assert MADE.ATTEMPTS.count("close") == attempts.get("reset", 1), "an environment is closed whatever happened"


def test_two_requests_for_one_rollout_are_refused_before_an_environment_is_made(chat):
    with opened("Closing") as episodes:
        sampler = Sampler.of(SimpleNamespace(), chat, Instant(), episodes)
        same = [RolloutRequest(PROBLEM, 0, 3), RolloutRequest(PROBLEM, 1, 3), RolloutRequest(PROBLEM, 0, 2, 2)]
        with pytest.raises(ValueError, match="requests 0 and 2 both ask for step 7, place 0, sample 2; give each"):
            sampler.roll_out(same, RunOptions(7), "weights")


def test_a_reward_of_none_is_no_fault(chat, worlds):
    play = Play(chat, worlds("Flaky"), how="no reward")
    assert play.say("hm") == "eos"
    (trajectory,) = play.end()
    assert (trajectory.stop, trajectory.reward) == ("eos", None)


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
        zeros = np.zeros(2, np.int32)
        bare = Trajectory(zeros, zeros > 0, zeros * np.float32(0), zeros, 1, (), "eos", 0)
        return [rows.completed(0, bare)], stats

    engine = SimpleNamespace(config=SimpleNamespace(max_turns=4, max_prompt_tokens=200), seed=0, run=run)
    requests = [RolloutRequest(replace(PROBLEM, extra={"how": "reward"}), 0, 1)]
    (trajectory,), stats = collect_episodes(engine, "weights", chat, source, requests, RunOptions())
    assert trajectory.stop == "infrastructure"
    assert (stats.stops["eos"], stats.stops["infrastructure"]) == (2, 1)
    assert (stats.environment_faults, stats.environment_retries) == (1, 0)


def test_a_prompt_that_the_reset_makes_too_long_is_no_fault_of_the_policy(chat, worlds):
    play = Play(chat, worlds("Counter"), extra={"start": int("9" * 900)})
    assert play.requests[0].problem.prompt == PROBLEM.prompt
    assert play.say("hm") == "infrastructure"
    (trajectory,) = play.end()
    assert trajectory.stop == "infrastructure" and not trajectory.opening


def test_a_row_that_the_engine_ends_is_closed_and_its_late_answer_dropped(chat, worlds):
    play = Play(chat, worlds("Flaky", timeout_s=0.3), how="step hangs")
    assert play.rows.turn_ended(0, turn(chat, "hm")) == Wait()
    play.rows.cancelled(0)
    assert play.rows.poll(1.0) == []
    (trajectory,) = play.end("deadline")
    assert (trajectory.stop, trajectory.reward) == ("deadline", 1.0) and "close" in MADE.ATTEMPTS


def test_an_end_that_is_never_answered_is_not_waited_for(chat, worlds):
    """As after a turn of a row that had ended, which the engine never has."""
    play = Play(chat, worlds("Echo"), max_turns=1)
    assert play.say("a") == "turns"
    play.say("b")
    assert play.end()[0].stop in ("eos", "infrastructure")


def test_tools_of_another_origin_are_called_by_name(chat, worlds):
    reply = Play(chat, worlds("Elsewhere")).say(call("add", '{"name": 2}') + call("add", '{"name": "x"}'))
    assert "\nadd {'name': 2}\n" in reply and "argument 'name' must be integer or null, got string" in reply


def test_an_environment_may_answer_calls_itself(chat, worlds):
    play, add = Play(chat, worlds("Answering"), samples=3), call("add", '{"name": 2}')
    reply = play.say(MALFORMED + add + add)
    assert reply.count("\nmine\n") == 2 and reply.index("malformed") < reply.index("mine")
    assert play.say(f"too few {add + MALFORMED}", row=1) == "infrastructure"
    assert play.say(f"wrong type {add}", row=2) == "infrastructure"
    first, second, _ = play.end()
    assert [result.kind for result in first.results] == ["malformed_call", "ok", "ok"] and not second.results


def test_a_tool_without_a_schema_is_refused_at_the_start():
    with pytest.raises(ValueError, match=r"Untyped: tool 'look': parameter 'where' needs a type hint.*begin with _"):
        method_tools(MADE.Untyped)


def test_processes_are_replaced_when_they_crash_and_others_go_on(chat):
    with opened("Flaky", host=HostProcesses(2), timeout_s=20.0, retries=1) as episodes:
        crash = Play(chat, episodes, how="crash")
        fine = Play(chat, episodes, how="fine", position=5)  # in the other process
        assert fine.say(LOOK).count("a door") == 1
        assert crash.say("hm") == "infrastructure"
        assert fine.say("hm") == "eos" and fine.end()[0].reward == 1.0
        assert crash.end("infrastructure")[0].stop == "infrastructure"
        after = Play(chat, episodes, samples=2, how="fine")
        assert [after.say(LOOK, row=row).count("a door") for row in (0, 1)] == [1, 1]
        assert episodes.counts["faults"] >= 1
        after.end()


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


def test_a_class_that_no_process_can_import_is_refused():
    class Local:
        def reset(self, **row):
            return None

    with given({"mine": Local}), pytest.raises(ValueError, match="name it by its path"):
        Episodes(EnvironmentClass(path="mine", host=HostProcesses(1)), ToolsConfig())


def test_get_reward_gives_several_numbers(chat, worlds):
    play = Play(chat, worlds("Several"))
    assert play.say("so") == "answer"
    (trajectory,) = play.end()
    assert (trajectory.reward, trajectory.rewards) == (None, {"speed": 3.0}) and not trajectory.fault
    assert checked_pay({"reward": 1, "speed": 0.5, "absent": None}) == (1.0, {"speed": 0.5})
    assert checked_pay(2) == (2.0, {}) and checked_pay(None) == (None, {})
    with pytest.raises(BadAnswer, match=r"get_reward\(\)\['speed'\] is str; must be a number or None"):
        checked_pay({"speed": "x"})
