"""When an idle loop begins a chunk, and what is said and counted where the cache holds no earlier turns."""

import re
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_roc_jax.engine.protocol import RolloutStats
from grpo_roc_jax.engine.scheduler import Admission
from grpo_roc_jax.serving.sampling_loop import SampleJob, SamplingLoop
from grpo_roc_jax.types import Problem, RolloutRequest
from tests.helpers.serving import scripted


class Chunks:
    """An engine that notes how many jobs it holds when each chunk begins."""

    def __init__(self):
        self.config, self.stats, self.held, self.begun = SimpleNamespace(max_prompt_tokens=9), RolloutStats(), 0, []

    def submit(self, sampler, requests, rows, options):
        self.held += 1
        return range(self.held, self.held + 1)

    def advance(self, timeout_s):
        self.begun.append(self.held)
        return []


@pytest.mark.parametrize(("chunk_s", "gather_s", "first"), [(4.0, 0.3, 4), (5.0, 0.0, 4), (0.0, 3.0, 1), (0.1, 0.0, 1)])
def test_jobs_that_come_together_begin_together(chunk_s, gather_s, first):
    """As long as a chunk takes, which is what those that came too late would wait; an unknown time is 0."""
    loop = SamplingLoop(Chunks(), None, lambda report: None, gather_s=gather_s)
    loop.chunk_s = chunk_s
    jobs = [SampleJob(np.arange(3, dtype=np.int32), 5, print) for _ in range(5)]
    loop.submit(jobs[0])
    # Where nothing is waited for, the others come a second later: a busy machine does not bring them in time.
    later = threading.Timer(0.05 if first > 1 else 1.0, lambda: [loop.submit(job) for job in jobs[1:4]])
    later.start()
    loop.turn(1.0)
    later.join()
    loop.submit(jobs[4])
    loop.turn(0.0)  # rows are in flight: nothing is waited for
    assert loop.engine.begun == [first, 5]


def test_a_request_that_left_before_it_was_seated_does_not_hold_up_the_next():
    admission = Admission(2)
    rows = [RolloutRequest(Problem("p", "", "", "t"), 0, budget=4)] * 5
    admission.extend(range(5), rows, [0, 0, 1, 1, 2], longest_first=False)
    assert all(admission.withdraw(ticket) for ticket in range(4))
    assert admission.waiting == 1 and admission.take(0, lambda ticket: True) == 4
    assert admission.waiting == 0 and admission.take(1, lambda ticket: True) is None


def test_why_earlier_turns_may_be_missing_is_said():
    def reason(delta, shards):
        programs = SimpleNamespace(model=SimpleNamespace(delta=delta), shards=shards)
        return SamplingLoop(SimpleNamespace(programs=programs), None, print).forgets

    assert "recurrent layers" in reason(object(), 1) and "one of the" not in reason(object(), 4)
    assert "another of the 4 row shards" in reason(None, 4) and not reason(None, 1)


def test_tokens_of_earlier_turns_that_are_written_again_are_counted():
    messages = [{"role": "user", "content": "two and three?"}]
    with scripted("five", "yes") as server:
        first = server.chat(messages, return_token_ids=True)
        assert "missed_tokens_total 0" in server.ask("/metrics")[1]
        answer = first["choices"][0]["message"]["content"]
        server.chat([*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": "sure?"}])
        known = len(first["prompt_token_ids"]) + len(first["choices"][0]["token_ids"])
        assert re.search(r"missed_tokens_total (\d+)", server.ask("/metrics")[1])[1] == str(known)
