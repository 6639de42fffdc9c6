"""Threads are used again; a function that never returns keeps its own."""

import threading
from queue import SimpleQueue

from grpo_roc_jax.environments.threads import IdleThreads


def test_functions_one_after_another_share_a_thread_and_a_hanging_one_keeps_its_own():
    threads, said, release = IdleThreads(), SimpleQueue(), threading.Event()

    def number() -> int:
        threads.run(lambda: said.put(threading.get_ident()))
        found = said.get(timeout=10)
        while not threads._idle:  # the thread is idle a moment after its function
            pass
        return found

    first = number()
    assert {number() for _ in range(20)} == {first}
    threads.run(lambda: release.wait(10))
    assert number() != first
    release.set()
