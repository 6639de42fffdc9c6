"""The pool of comparison workers: right verdicts, replacement of killed workers, no false timeouts."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from grpo_roc_jax.reward.verify import Verifier

HANGING = (r"\frac{1}{3}^{99999999}", r"\sum_{i=1}^{100000000} \sin(i)", "(x+1)^{100000}")


@pytest.fixture(scope="module")
def verifier():
    pool = Verifier(workers=1, timeout_s=5.0)
    yield pool
    pool.close()


def test_numbers_start_no_process():
    pool = Verifier()
    assert pool.compare([("42", "42"), ("41", "42"), ("0.5", "1/2")]) == ["correct", "wrong", "correct"]
    assert pool.check_gold(["42", r"\frac{1}{3}", "1,000"]) == [True] * 3
    assert pool.started == 0
    assert pool.compare([("x" * 501, "42")]) == ["unparseable"]
    assert pool.started == 0
    pool.close()


GOLDEN = [
    (r"x^2+1", r"1+x^2", "correct"),
    (r"\sqrt{8}", r"2\sqrt{2}", "correct"),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}", "correct"),
    (r"(1,2)", r"(2,1)", "wrong"),
    (r"\pi", "3", "wrong"),
    (r"\{1,2\}", r"\{2,1\}", "correct"),
    (r"2x", "x", "wrong"),
    (r"0.5\pi", r"\frac{\pi}{2}", "correct"),
    ("5, 7", "7", "wrong"),
    (r"5 \text{ or } 7", "7", "wrong"),
]


@pytest.mark.parametrize(("answer", "gold", "verdict"), GOLDEN)
def test_verdicts(verifier, answer, gold, verdict):
    assert verifier.compare([(answer, gold)]) == [verdict]


def test_gold_is_its_own_answer(verifier):
    golds = [gold for _, gold, _ in GOLDEN]
    assert verifier.check_gold(golds) == [True] * len(golds)
    assert verifier.compare([(gold, gold + " ") for gold in golds]) == ["correct"] * len(golds)


def test_unparseable(verifier):
    assert verifier.compare([("", "42"), ("%%", "x+1")])[1] == "unparseable"
    assert verifier.check_gold(["%%", "42"]) == [False, True]


@pytest.mark.parametrize("hanging", HANGING)
def test_hanging_expression_times_out(hanging):
    pool = Verifier(workers=1, timeout_s=0.5)
    pairs = [(r"x^2+1", r"1+x^2"), (hanging, "x+y"), (r"x^2+1", r"1+x^2")]
    assert pool.compare(pairs) == ["correct", "timeout", "correct"]
    pool.close()


def worker_pids() -> list[int]:
    """Children of this process; read from /proc, so that no helper process is among them."""
    children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    pids = [int(pid) for file in children for pid in file.read_text().split()]
    return [pid for pid in pids if b"_verify_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_kernel_kill_is_a_timeout():
    """If the worker's own timer cannot interrupt a comparison, the CPU limit ends it with SIGXCPU."""
    before = set(worker_pids())
    pool = Verifier(workers=1, timeout_s=30.0)
    assert pool.compare([(r"x+1", "1+x")]) == ["correct"]
    (pid,) = set(worker_pids()) - before
    threading.Timer(0.5, os.kill, (pid, signal.SIGXCPU)).start()
    assert pool.compare([(HANGING[1], "2"), (r"x+1", "1+x")]) == ["timeout", "correct"]
    assert pool.started == 2
    assert pid not in worker_pids()
    pool.close()
    assert set(worker_pids()) == before


def test_killed_worker_is_replaced():
    """If a worker is killed from outside, its comparison is retried."""
    before = set(worker_pids())
    pool = Verifier(workers=1)
    assert pool.compare([(r"x+1", "1+x")]) == ["correct"]
    (pid,) = set(worker_pids()) - before
    os.kill(pid, signal.SIGKILL)
    assert pool.compare([(r"x+2", "2+x")]) == ["correct"]
    assert pool.started == 2
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.compare([("x+1", "x")])


def test_burst_has_no_false_timeouts(verifier):
    """With a thousand comparisons at once on one worker, the time in the queue does not count."""
    pairs = [(f"x+{i % 7}", f"{i % 7}+x") for i in range(1000)]
    start = time.perf_counter()
    verdicts = verifier.compare(pairs)
    assert set(verdicts) == {"correct"}
    assert verifier.started <= 1 + 1, f"{verifier.started} starts in {time.perf_counter() - start:.1f} s"
