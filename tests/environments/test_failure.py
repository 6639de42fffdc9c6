"""Failures of a user's environment in words: where, why, once with a traceback; and which of them the policy caused."""

import ast
import asyncio
import json
import logging
import re
import struct
from xml.etree import ElementTree

import pytest

from grpo_roc_jax.environments import connection
from grpo_roc_jax.environments.config import HostProcesses, HostThreads
from grpo_roc_jax.environments.failure import failure_of, may_blame_policy
from grpo_roc_jax.reward.config import EnvironmentReward, FormatReward, RewardConfig, TruncatedScored
from grpo_roc_jax.reward.score import make_scorer
from grpo_roc_jax.tools import ToolUnavailable
from grpo_roc_jax.types import Problem
from tests.environments.test_episodes import FILE, Play, opened
from tests.helpers.servers import two_call_chat


@pytest.fixture(scope="module")
def chat():
    return two_call_chat()


def outcome(chat, text, **choice):
    """(stop, trajectory, counts) of a rollout with this turn."""
    with opened("Reader", retries=0, **choice) as episodes:
        play = Play(chat, episodes)
        stop = play.say(text)
        return stop, play.end(stop if stop in ("failed", "infrastructure") else "eos")[0], episodes.counts


@pytest.mark.parametrize(
    ("text", "stop", "words"),
    [
        ("forty two", "failed", "step: ValueError: invalid literal for int() with base 10: 'forty two' (sample_en"),
        ("own", "infrastructure", "step: AttributeError: 'Reader' object has no attribute 'absent' (sample_env"),
        ("module", "infrastructure", "step: AttributeError: module 'os' has no attribute 'absent' (sample_env"),
        ("wrong type", "infrastructure", "step: BadAnswer: step returned dict; must be an Observation, text or None"),
        ("generator", "infrastructure", "step: BadAnswer: step returned generator; must be an Observation, text or"),
        ("endless", "infrastructure", "step: BadAnswer: Observation.reward is int; must be a number or None"),
        ("exhausted", "failed", "step: NoItem: StopIteration (sample_environments.py, line "),
        ("mute", "failed", "step: Mute: (its message cannot be read: RuntimeError) (sample_env"),
        ("offline", "infrastructure", "step: OSError: no route to host (sample_environments.py, line "),
        ("unprepared", "infrastructure", "step: RuntimeError: no session (sample_environments.py, line "),
    ],
)
def test_a_rollout_that_fails_says_why_and_scores_0_if_the_policy_caused_it(chat, text, stop, words):
    reason, trajectory, counts = outcome(chat, text)
    first, _, traceback = trajectory.fault.partition("\n")
    assert reason == trajectory.stop == stop and first.startswith(words)
    bare = "BadAnswer" in words
    assert traceback == "" if bare else traceback.startswith("Traceback") and FILE in traceback
    assert "episode.py" not in traceback, "frames of the library say nothing about the environment"
    assert (counts["faults"], trajectory.reward) == ((0, 0.0) if stop == "failed" else (1, None))


def test_on_failure_drop_takes_it_out_of_its_group(chat):
    reason, trajectory, counts = outcome(chat, "forty two", on_failure="drop")
    assert reason == trajectory.stop == "infrastructure" and counts["faults"] == 1 and trajectory.reward is None
    assert "ValueError" in trajectory.fault
    assert outcome(chat, "42", on_failure="drop")[1].stop == "eos"


def test_a_failed_rollout_scores_0_whatever_it_earned_and_stays_in_its_group(chat):
    failed = outcome(chat, "<answer>5</answer>")[1]
    problem = Problem("p", "2+3=?", "5", "t")
    for functions in ((EnvironmentReward(success=0.0),), (EnvironmentReward(), FormatReward(weight=0.25))):
        scorer = make_scorer(RewardConfig(functions=functions, truncated=TruncatedScored()))
        group = scorer(problem, [failed])
        (verdict,) = group.verdicts
        assert failed.stop == "failed" and group.size == 1
        assert (verdict.reward, verdict.status) == (0.0, "no_answer") and not any(verdict.channels.values())
    with_answer = make_scorer(RewardConfig())
    assert with_answer(problem, [failed]).verdicts[0].reward == 0.0, "although the answer is right"
    with_answer.close()


@pytest.mark.parametrize("host", [HostThreads(), HostProcesses(1)], ids=["threads", "processes"])
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


def raised(function):
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError


class Holder:
    pass


@pytest.mark.parametrize(
    ("function", "blamed"),
    [
        (lambda: int("x"), True),
        (lambda: json.loads("{"), True),
        (lambda: [][0], True),
        (lambda: {}["north"], True),
        (lambda: None.group(1), True),
        (lambda: "a" + 1, True),
        (lambda: 1 / 0, True),
        (lambda: b"\xff".decode(), True),
        (lambda: ast.literal_eval("f(1,"), True),
        (lambda: compile("if", "<answer>", "exec"), True),
        (lambda: ElementTree.fromstring("<a"), True),
        (lambda: json.loads("[" * 100_000), True),
        (lambda: re.compile("("), True),
        (lambda: struct.unpack("I", b"1"), True),
        (lambda: compile("if", __file__, "exec"), False),
        (lambda: Holder().absent, False),
        (lambda: Holder.absent, False),
        (lambda: json.absent, False),
        (lambda: absent, False),  # noqa: F821
        (lambda: open("/nowhere"), False),  # noqa: SIM115
        (lambda: __import__("absent_module"), False),
        (lambda: (_ for _ in ()).throw(ToolUnavailable("x")), False),
        (lambda: (_ for _ in ()).throw(ConnectionError("x")), False),
        (lambda: (_ for _ in ()).throw(MemoryError()), False),
        (lambda: (_ for _ in ()).throw(TimeoutError()), False),
        (lambda: (_ for _ in ()).throw(NotImplementedError()), False),
    ],
)
def test_what_reading_a_text_raises(function, blamed):
    assert may_blame_policy(raised(function), Holder()) is blamed


def test_words_of_a_failure_are_bounded_and_on_one_line():
    failure = failure_of("step", raised(lambda: int("x" * 5 + "\n" * 3 + "y" * 100_000)))
    assert "\n" not in failure.text and len(failure.text) < 700 and len(failure.whole) < 9000
    assert failure.kind.startswith("step: ValueError (test_failure.py, line ") and failure.text.startswith("step: Val")
    chain = failure_of("reset", raised(lambda: (_ for _ in ()).throw(RuntimeError("outer")).x))
    assert chain.traceback.endswith("RuntimeError: outer")


@pytest.mark.parametrize("name", ["reset", "get_reward"])
def test_an_exhausted_iterator_is_no_late_call(chat, name):
    """An asyncio future refuses StopIteration, so the call seemed never to end."""
    with opened("Flaky", retries=0, timeout_s=20) as episodes:
        play = Play(chat, episodes, how=f"{name} exhausted")
        play.say("42")
        assert play.end("eos")[0].fault.startswith(f"{name}: NoItem: StopIteration")


async def raises_time_out() -> None:
    raise TimeoutError("of the server")


async def never_answers() -> None:
    await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("ask", "message"), [(raises_time_out, "TimeoutError: of the server"), (never_answers, "no answer within 0.05 s")]
)
def test_only_a_late_connection_is_called_late(ask, message):
    with pytest.raises(ConnectionError, match=message):
        connection.outcome(ask, 0.05)
