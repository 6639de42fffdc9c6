"""Threads are used again; a function that never returns keeps its own; all calls of an episode share one."""

import threading
from queue import SimpleQueue

import pytest

from grpo_roc_jax.environments.config import HostProcesses, HostThreads
from grpo_roc_jax.environments.episode import THREADS
from grpo_roc_jax.environments.threads import IdleThreads
from tests.environments.test_episodes import MADE, PROBLEM, Play, opened
from tests.helpers.arena import wait_until
from tests.helpers.servers import two_call_chat

COUNT = '<tool_call>{"name": "count", "arguments": {}}</tool_call>'


def test_a_released_thread_is_leased_again_and_a_hanging_one_is_not():
    threads, idents, release = IdleThreads(), SimpleQueue(), threading.Event()

    def number(lease) -> int:
        lease.run(lambda: idents.put(threading.get_ident()))
        return idents.get(timeout=10)

    def reused() -> int:
        lease, done = threads.lease(), threading.Event()
        ident = number(lease)
        assert number(lease) == ident, "an owner has one thread"
        lease.release()
        while not threads.idle:  # a moment after its last function
            done.wait(0.001)
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


def test_resets_that_fail_keep_no_thread():
    def in_use() -> int:
        return sum(thread.name == "environment" for thread in threading.enumerate()) - THREADS.idle

    before = in_use()
    with opened("Closing", retries=0) as episodes:
        for step in range(3):
            answers = episodes.open([(f"{step}/{i}", PROBLEM, 0) for i in range(8)])
            assert all(answer.failure for answer in answers.values())
            wait_until(lambda: in_use() <= before)
            assert in_use() <= before


@pytest.mark.parametrize("host", [HostThreads(), HostProcesses(2)], ids=["threads", "processes"])
def test_all_functions_of_an_episode_run_on_one_thread(host):
    """A connection of sqlite3 that `reset` opens serves `step`, tools, reward and `close`, beside other episodes."""
    chat = two_call_chat()
    MADE.ATTEMPTS.clear()
    with opened("Ledger", host=host) as episodes:
        play = Play(chat, episodes, samples=4, max_turns=9)
        for turn in range(3):
            for row in range(4):
                assert "go on" in play.say("hm", row=row)
                assert f"\n{2 * turn + 1}\n" in play.say(COUNT, row=row)
        assert [trajectory.reward for trajectory in play.end()] == [106.0] * 4
        assert episodes.counts["faults"] == 0
        assert isinstance(host, HostProcesses) or MADE.ATTEMPTS == ["closed"] * 4
