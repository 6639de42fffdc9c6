"""The pool of comparison workers: right verdicts, replacement of killed workers, no false timeouts."""

import os
import resource
import signal
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from grpo_roc_jax.reward import _verify_worker, verify
from grpo_roc_jax.reward.config import AnswerReward
from grpo_roc_jax.reward.verify import MAX_CHARS, Verifier, look_in_turns

HANGING = (r"\int_0^1 e^{x^2}\sin(x^3)\,dx", r"\sum_{i=1}^{9999} \sin(i)", r"\int_0^1 x^x \ln(x+\sin x)\,dx")
LARGE = (
    "9^9^9", "9**9**9", r"2^{2^{2^{2^{2}}}}", r"\frac{1}{3}^{99999999}", "(x+1)^{100000}", r"10^{-999999999}x",
    "x+1e999999999", r"((10!)!)!", r"(10^6)!\cdot x", r"\binom{10^9}{5\cdot 10^8}", r"\sum_{i=1}^{10^9} i",
    r"\prod_{i=1}^{10^9} i", "(" * 90 + "x" + ")" * 90, r"\sqrt{" * 60 + "x" + "}" * 60, r"9^{\sqrt{10^{18}}}",
    r"\left(1+\frac{1}{10^9}\right)^{10^9}", r"9^{\lfloor 10^9 \rfloor}", r"\{1, 9^{9^8}\}", r"(2^{10000},2^{9^{9}})",
    r"x = 9^{9^8}", r"9^{9^8} \text{ cm}", "(x+y+z)^{400}", r"\prod_{i=1}^{9999} (x+i)", r"\left|x-1\right|^{1000}",
    "((x+y+z)^{20})^{20}", "(x+y)^{99}(x+z)^{99}", r"\sqrt{x+1}^{2000}", r"\sin(" * 9 + "x" + ")" * 9,
    r"\binom{x}{1000}", r"\prod_{i=1}^{n}(x+y+i)", r"\Gamma(10^7)", r"\gcd(2^{10000}-1,2^{9999}-1)",
    r"\det\begin{pmatrix}" + r"\\".join("&".join(f"x_{i * j}" for j in range(7)) for i in range(7)) + r"\end{pmatrix}",
    r"e^{(x+y+z)^{10}}", r"\begin{pmatrix}x&y\\z&w\end{pmatrix}^{60}", r"(2+\sqrt{3}i)^{3000}", "(x+1)^{-999}",
    r"\frac{(x+1)^{90}}{(x-1)^{90}}", r"\sum_{i=1}^{n}(x+i)^{60}", r"\prod_{i=1}^{100}\prod_{j=1}^{100}(x+i+j)",
    r"\|x-1\|^{900}", r"\binom{e^{7}}{2024}", "(a+b)(c+d)(e+f)(g+h)(k+l)(m+n)(p+q)(r+s)(t+u)(v+w)",
)  # fmt: skip
HONEST = ("2^{1000}", r"\binom{100}{50}", "100!", "x^{2024}", r"3^{2^{10}}", "5!!", "(1+x+x^2)^{20}", "(a+b+c)^{9}")
GOLDEN = [
    *((rf"{answer}+x", rf"x+{answer}", "correct") for answer in HONEST),
    *((r"x^2+1", r"1+x^2", "correct"), (r"\sqrt{8}", r"2\sqrt{2}", "correct"), (r"(1,2)", r"(2,1)", "wrong")),
    *((r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}", "correct"), (r"2x", "x", "wrong"), ("5, 7", "7", "wrong")),
    *((r"\pi", "3", "wrong"), (r"\{1,2\}", r"\{2,1\}", "correct"), (r"0.5\pi", r"\frac{\pi}{2}", "correct")),
]


@pytest.fixture(scope="module")
def verifier():
    with closing(Verifier(workers=1, timeout_s=5.0)) as pool:
        yield pool


def test_without_a_sandbox_the_address_space_of_a_worker_is_limited(monkeypatch):
    limits = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limit: limits.append((kind, limit)))
    assert _verify_worker.lock_down(3, "darwin") == ()
    assert limits == [(resource.RLIMIT_AS, (3 * 2**20, 3 * 2**20))]


def test_numbers_and_long_answers_start_no_process():
    pool, reward = Verifier(), AnswerReward()
    for name in ("workers", "timeout_s", "memory_mb", "strict"):
        assert getattr(pool, name) == getattr(reward, name), "the defaults are those of the reward"
    assert pool.compare([("42", "42"), ("41", "42"), ("0.5", "1/2")]) == ["correct", "wrong", "correct"]
    assert pool.check_gold(["42", r"\frac{1}{3}", "1,000"]) == [True] * 3
    assert pool.compare([("0.333", "1/3"), ("x" * 501, "42")]) == ["wrong", "unparseable"]
    assert pool.started == 0
    pool.close()


def test_verdicts(verifier):
    assert verifier.compare([(answer, gold) for answer, gold, _ in GOLDEN]) == [verdict for *_, verdict in GOLDEN]
    golds = [gold for _, gold, _ in GOLDEN]
    assert verifier.check_gold(golds) == [True] * len(golds), "a gold is its own answer"
    assert verifier.compare([("", "42"), ("%%", "x+1")])[1] == "unparseable"
    assert verifier.check_gold(["%%", "42"]) == [False, True]
    as_text = [(r"\text{%% a_{1}}", "%% a_1"), ("%% a_2", "%% a_1")]
    assert verifier.compare(as_text) == ["correct", "wrong"], "what cannot be parsed"
    before = verifier.asked
    pairs = [("x+9", "9+x"), ("x + 9", "9+x"), (r"\dfrac{x}{2}", "0.5x"), (r"\frac{x}{2}", "0.5 x")]
    assert verifier.compare(pairs) == ["correct"] * 4 and verifier.asked == before + 2, "equal pairs are asked once"
    long = "+".join(["x"] * MAX_CHARS)
    assert verifier.compare([(f"{long}+y+y", f"y+{long}+y")]) == ["correct"], "an answer as long as the reference"


@pytest.mark.parametrize("needs", [0.4, 2.0, 4.9])
def test_an_honest_answer_beside_slow_ones_is_graded(needs):
    """Wherever it stands among 256 slow answers of some shapes."""
    slow, honest = [("same", "+".join("x" * (2 + i % 3)) + f"^{{{i}}}", "x") for i in range(256)], ("same", "x/y", "y")
    for goals, workers in (([honest, *slow], 1), ([*slow, honest], 4)):
        used = dict.fromkeys(goals, 0.0)

        def ask(looks, used=used):
            for goal, limit in looks:
                used[goal] += min(limit, needs if goal == honest else limit)
            return ["correct" if goal == honest and needs <= limit else "timeout" for goal, limit in looks]

        known = look_in_turns(goals, ask, timeout_s=5.0, workers=workers)
        assert known.pop(honest) == "correct" and set(known.values()) == {"timeout"}
        assert used[honest] <= 5.0 + needs
        assert sum(used.values()) < 110.0  # of 248 where each has half a second and 24 have 5 more


def test_hanging_expressions_time_out():
    with closing(Verifier(workers=1, first_look_s=0.001)) as pool:
        pair = (r"\frac{\sqrt{3}}{3}+x", r"x+\frac{1}{\sqrt{3}}")
        assert pool.compare([pair]) == ["correct"], "a second look is long enough"
    pairs = [(f"x^2+{i}", f"{i}+x^2") for i in range(len(HANGING))]
    queries = [pair for hanging, simple in zip(HANGING, pairs, strict=True) for pair in (simple, (hanging, "x+y"))]
    with closing(Verifier(workers=1, timeout_s=0.5)) as pool:
        assert pool.compare([*queries, ("x+7", "7+x")]) == ["correct", "timeout"] * len(HANGING) + ["correct"]


@pytest.mark.parametrize("answer", LARGE)
def test_what_is_too_large_is_refused_by_its_form(answer):
    """In no time and without a process, beside a reference that leaves everything to algebra."""
    pool = Verifier(workers=1)
    start = time.process_time()
    verdicts = pool.compare([(answer, gold) for gold in ("x+y", r"\{1,x+y\}", "(x+y,2)")])
    assert set(verdicts) <= {"unparseable", "wrong"} and pool.started == 0
    assert time.process_time() - start < 0.2


def test_workers_are_locked_down(monkeypatch, tmp_path):
    """A worker has neither the trainer's environment nor network, files or processes; shown from inside of it."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:1")
    report = """
import os, socket, subprocess
from _verify_worker_itself import *
import _verify_worker_itself as worker
ATTEMPTS = {
    "socket": socket.socket, "fork": os.fork, "exec": lambda: subprocess.run(["/bin/true"]),
    "host file": lambda: open("/etc/hostname").read(), "kill": lambda: os.kill(os.getppid(), 0),
    "trainer environment": lambda: open(f"/proc/{os.getppid()}/environ").read(),
    "write": lambda: open("/tmp/written-by-a-verification-worker", "w"),
}
def succeeds(action):
    try:
        action()
        return True
    except BaseException:
        return False
def judge(request):
    return "escaped: " + ", ".join(name for name, action in ATTEMPTS.items() if succeeds(action))
lock = worker.lock_down
def locked(memory_mb):
    layers = lock(memory_mb)
    worker.judge = lambda request: "correct"
    worker.start_clock = lambda limit: setattr(worker, "judge", judge)
    return layers
worker.lock_down = locked
main = worker.main
"""
    source = Path(verify.__file__).with_name("_verify_worker.py").read_text(encoding="utf-8")
    (tmp_path / "_verify_worker_itself.py").write_text(source, encoding="utf-8")
    (tmp_path / "_verify_worker.py").write_text(report, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    before = set(worker_pids())
    pool = Verifier(workers=1, folder=str(tmp_path))
    assert pool.compare([("x+1", "1+x")]) == ["escaped: "]
    (pid,) = set(worker_pids()) - before
    environ = Path(f"/proc/{pid}/environ").read_bytes()
    pool.close()
    assert b"secret" not in environ and b"proxy" not in environ
    assert pool.layers == ("limits", "seccomp", "landlock")


def worker_pids() -> list[int]:
    """Children of this process; read from /proc, so that no helper process is among them."""
    children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    pids = [int(pid) for file in children for pid in file.read_text().split()]
    return [pid for pid in pids if b"_verify_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_killed_worker_is_replaced():
    """SIGXCPU, of the CPU limit, is a timeout; what a worker compared that is killed from outside is tried again."""
    before = set(worker_pids())
    # One look, so that the signal cannot come between two.
    pool = Verifier(workers=1, timeout_s=30.0, first_look_s=30.0)
    assert pool.compare([("x+1", "1+x")]) == ["correct"]
    (pid,) = set(worker_pids()) - before
    threading.Timer(0.5, os.kill, (pid, signal.SIGXCPU)).start()
    assert pool.compare([(HANGING[1], "2"), ("x+1", "1+x")]) == ["timeout", "correct"]
    assert pool.started == 2 and pid not in worker_pids()
    (pid,) = set(worker_pids()) - before
    os.kill(pid, signal.SIGKILL)
    assert pool.compare([("x+2", "2+x")]) == ["correct"] and pool.started == 3
    pool.close()
    assert set(worker_pids()) == before
    with pytest.raises(RuntimeError, match="closed"):
        pool.compare([("x+1", "x")])


def test_burst_has_no_false_timeouts(verifier):
    """With a thousand comparisons at once on one worker, the time in the queue does not count."""
    pairs = [(f"x+{i % 7}", f"{i % 7}+x") for i in range(1000)]
    assert set(verifier.compare(pairs)) == {"correct"}
    assert verifier.started <= 1 + 1
