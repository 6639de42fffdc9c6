"""Environments that misbehave in a thread or a process of their own: a typed outcome, and others go on."""

import time

import pytest

from grpo_roc_jax.environments.config import HostProcesses, HostThreads
from grpo_roc_jax.environments.environment import Observation, classes_of
from grpo_roc_jax.environments.episode import MOST_TEXT, checked_observation
from tests.environments.test_episodes import LOOK, Play, opened
from tests.helpers.servers import two_call_chat

FAULTS = ("exits", "cancels itself", "cannot be sent", "writes to every connection", "forks and dies")


@pytest.fixture(scope="module", params=[HostThreads(), HostProcesses(2)], ids=["threads", "processes"])
def host(request):
    return request.param


@pytest.fixture(scope="module")
def episodes(host):
    with opened("Hostile", timeout_s=9.0, host=host) as made:
        yield made


@pytest.fixture(scope="module")
def chat():
    return two_call_chat()


def test_each_fault_ends_its_own_rollout_at_once(chat, host, episodes):
    for how in FAULTS if isinstance(host, HostProcesses) else FAULTS[:2]:
        started, bad, good = time.monotonic(), Play(chat, episodes, how=how), Play(chat, episodes, position=5)
        assert bad.say("hm") == "infrastructure", how
        bad.end("infrastructure")
        assert good.say("hm") == "eos" and good.end()[0].stop == "eos", how
        assert time.monotonic() - started < 60, f"{how}: noticed by its deadline alone"


def test_a_tool_that_misbehaves_is_an_error_that_the_policy_reads(chat, episodes):
    for how, text in (("exits", "SystemExit"), ("cannot be sent", "TypeError"), ("fine", "characters omitted")):
        play = Play(chat, episodes, how=how)
        assert text in play.say(LOOK)
        play.end()


def test_a_flood_of_text_is_cut_before_it_is_encoded(chat, episodes):
    play = Play(chat, episodes, how="floods")
    reply = play.say("hm")
    assert "characters omitted" in reply and reply.count("&lt;answer>") > 3 and "<answer>" not in reply
    play.end()
    assert Play(chat, episodes, how="reset floods").say("hm") == "infrastructure"
    for flood in ("x" * 50_000_000, Observation("x" * 50_000_000)):
        assert len(checked_observation(flood).text) < MOST_TEXT + 100


def test_a_function_that_cannot_make_an_environment_is_said_at_the_start():
    def doomed():
        raise OSError("no display")

    with pytest.raises(ValueError, match="environment: cannot be made: OSError: no display"):
        classes_of({"": doomed})
