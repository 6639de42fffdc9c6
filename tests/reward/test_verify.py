"""The pool of comparison workers: right verdicts, replacement of killed workers, no false timeouts."""

import os
import random
import resource
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from grpo_roc_jax.reward import _verify_worker, verify
from grpo_roc_jax.reward.config import AnswerReward
from grpo_roc_jax.reward.verify import FIRST_LOOK_S, LATER_LOOKS, MAX_CHARS, Verifier, look_in_turns

HANGING = (r"\int_0^1 e^{x^2}\sin(x^3)\,dx", r"\sum_{i=1}^{9999} \sin(i)", r"\int_0^1 x^x \ln(x+\sin x)\,dx")
LARGE = (
    r"9^{9^{8}}", "9^9^9", "9**9**9", r"2^{2^{2^{2^{2}}}}", r"\frac{1}{3}^{99999999}", "(x+1)^{100000}", r"x^{10^{12}}",
    r"1.000001^{999999999}", r"10^{-999999999}x", "x+1e999999999", r"10^{10}!", r"((10!)!)!", r"(10^6)!\cdot x",
    r"\binom{10^9}{5\cdot 10^8}", r"\binom{n}{10^9}", r"\sum_{i=1}^{100000000} \sin(i)", r"\sum_{i=1}^{10^9} i",
    r"\prod_{i=1}^{10^9} i", "(" * 90 + "x" + ")" * 90, r"\sqrt{" * 60 + "x" + "}" * 60,
    r"\left(1+\frac{1}{10^9}\right)^{10^9}", r"9^{\lfloor 10^9 \rfloor}", r"9^{\sqrt{10^{18}}}", r"\{1, 9^{9^8}\}",
    r"(9^{9^8}, 2)", r"x = 9^{9^8}", r"9^{9^8} \text{ cm}", r"9^{9^{8}x}", "(x+y+z)^{400}", "(a+b+c+d)^{60}",
    r"\left(x-y+z\right)^{999}", "a*(b+c+d+e+f)^{25}", r"\prod_{i=1}^{9999} (x+i)", r"\left|x-1\right|^{1000}",
    "((x+y+z)^{20})^{20}", "((x+1)^{100})^{90}", "(x+y)^{99}(x+z)^{99}", r"\sqrt{x+1}^{2000}",
    r"(\sqrt{x}+\sqrt{y})^{900}", "(" * 20 + "x" + ")" * 20, r"\sin(" * 9 + "x" + ")" * 9, "x_{" * 15 + "2" + "}" * 15,
    r"\Gamma(10^7)", r"\gcd(2^{10000}-1,2^{9999}-1)",
    r"\det\begin{pmatrix}" + r"\\".join("&".join(f"x_{i * j}" for j in range(7)) for i in range(7)) + r"\end{pmatrix}",
    r"\binom{x}{1000}", r"\binom{e^{7}}{2024}", r"\binom{\frac{7}{\pi+1}}{100}",
    r"e^{(x+y+z)^{10}}", r"2^{(x+y)^{50}}", r"\begin{pmatrix}x&y\\z&w\end{pmatrix}^{60}",
    r"(1+\sqrt{2}+\sqrt{3})^{200}", r"(2+\sqrt{3}i)^{3000}", r"(\sin x+\cos x)^{300}", r"\sin((x+y)^{60})",
    r"\frac{(x+1)^{90}}{(x-1)^{90}}", r"\left(\frac{x+1}{x-1}\right)^{400}", r"\sum_{i=1}^{n}(x+i)^{60}",
    r"\prod_{i=1}^{100}\prod_{j=1}^{100}(x+i+j)", "(x_1+x_2+x_3+x_4)^{30}", r"\|x-1\|^{900}", "(x+1)^{-999}",
    "(a+b)(c+d)(e+f)(g+h)(k+l)(m+n)(p+q)(r+s)(t+u)(v+w)", "(x+y+1)" * 40, r"\frac{1}{(x+y)^{600}}",
)  # fmt: skip
"""Too large to compute, in every form."""


@pytest.fixture(scope="module")
def verifier():
    pool = Verifier(workers=1, timeout_s=5.0)
    yield pool
    pool.close()


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


HONEST = (
    *("2^{1000}", "7^{2023}", r"\binom{100}{50}", "100!", "x^{2024}"),
    *(r"3^{2^{10}}", "5!!", "(1+x+x^2)^{20}", "(a+b+c)^{9}"),
)
"""Large, and small enough to compute."""
GOLDEN = [
    *((rf"{answer}+x", rf"x+{answer}", "correct") for answer in HONEST),
    *((r"x^2+1", r"1+x^2", "correct"), (r"\sqrt{8}", r"2\sqrt{2}", "correct")),
    *((r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}", "correct"), (r"(1,2)", r"(2,1)", "wrong")),
    *((r"\pi", "3", "wrong"), (r"\{1,2\}", r"\{2,1\}", "correct"), (r"2x", "x", "wrong")),
    *((r"0.5\pi", r"\frac{\pi}{2}", "correct"), ("5, 7", "7", "wrong"), (r"5 \text{ or } 7", "7", "wrong")),
]


def test_verdicts(verifier):
    assert verifier.compare([(answer, gold) for answer, gold, _ in GOLDEN]) == [verdict for *_, verdict in GOLDEN]
    golds = [gold for _, gold, _ in GOLDEN]
    assert verifier.check_gold(golds) == [True] * len(golds), "a gold is its own answer"
    assert verifier.compare([("", "42"), ("%%", "x+1")])[1] == "unparseable"
    assert verifier.check_gold(["%%", "42"]) == [False, True]
    as_text = [(r"\text{%% a_{1}}", "%% a_1"), ("%% a_2", "%% a_1")]
    assert verifier.compare(as_text) == ["correct", "wrong"], "what cannot be parsed"
    long = "+".join(["x"] * MAX_CHARS)
    assert verifier.compare([(f"{long}+y+y", f"y+{long}+y")]) == ["correct"], "an answer as long as the reference"


def test_hanging_expressions_time_out():
    pool = Verifier(workers=1, timeout_s=0.5)
    pairs = [(f"x^2+{i}", f"{i}+x^2") for i in range(len(HANGING))]
    queries = [pair for hanging, simple in zip(HANGING, pairs, strict=True) for pair in (simple, (hanging, "x+y"))]
    assert pool.compare([*queries, ("x+7", "7+x")]) == ["correct", "timeout"] * len(HANGING) + ["correct"]
    pool.close()


def test_equal_pairs_are_asked_once(verifier):
    before = verifier.asked
    pairs = [("x+1", "1+x"), ("x + 1", "1+x"), (r"\dfrac{x}{2}", "0.5x"), ("x+1", "1+x"), (r"\frac{x}{2}", "0.5 x")]
    assert verifier.compare(pairs) == ["correct"] * 5
    assert verifier.asked == before + 2


@pytest.mark.parametrize("answer", LARGE)
def test_what_is_too_large_is_refused_by_its_form(answer):
    """In no time and without a process, beside a reference that leaves everything to algebra."""
    pool = Verifier(workers=1)
    start = time.process_time()
    verdicts = pool.compare([(answer, gold) for gold in ("x+y", r"\{1,x+y\}", "(x+y,2)")])
    assert set(verdicts) <= {"unparseable", "wrong"} and pool.started == 0
    assert time.process_time() - start < 0.2


def expression(rng, depth=0):
    """An expression such as a policy could write, with parts that multiply out to many terms."""
    if depth > 3 or rng.random() < 0.15:
        return rng.choice(["x", "y", "z", "n", "2", "7", "13", r"\pi", "i"])
    a, b, c = (expression(rng, depth + 1) for _ in range(3))
    power = rng.choice([2, 3, 5, 8, 20, 60, 100, 300, 1000, 2024])
    forms = [
        f"({a}+{b}-{rng.randint(1, 99)})", rf"{a}\cdot {b}", f"({a}+{b})^{{{power}}}", rf"\frac{{{a}}}{{{b}+1}}",
        rf"\sqrt{{{a}+{b}}}^{{{power}}}", rf"\left|{a}-{b}\right|^{{{power}}}", f"|{a}|", rf"\binom{{{a}}}{{{power}}}",
        f"e^{{{a}}}", rf"\{rng.choice(['sin', 'cos', 'ln', 'tan', 'arctan'])}({a})",
        rf"\begin{{pmatrix}}{a}&{b}\\{c}&1\end{{pmatrix}}^{{{power}}}",
        rf"\{rng.choice(['sum', 'prod'])}_{{k=1}}^{{{rng.choice([power, 'n'])}}}(k+{a})",
    ]  # fmt: skip
    return rng.choice([*forms, *forms[:3]])


@pytest.mark.parametrize("seeds", [range(30), pytest.param(range(30, 330), marks=pytest.mark.slow)])
def test_what_is_not_refused_by_its_form_is_decided_in_time(verifier, seeds):
    """Generated expressions beside a reference that differs a little; nearly all of them used to end as `timeout`."""
    answers = [text for text in (expression(random.Random(seed)) for seed in seeds) if len(text) < MAX_CHARS]
    verdicts = verifier.compare([(answer, f"{answer}+x-{number}") for number, answer in enumerate(answers)])
    counts = Counter(verdicts)
    assert not counts["timeout"] + counts["crash"], dict(zip(answers, verdicts, strict=True))
    assert counts["wrong"] >= len(answers) / 8


def scripted(seconds):
    """An `ask` whose comparisons take so many seconds, with the seconds that each goal used."""
    used: dict[object, float] = {}

    def ask(looks):
        for goal, limit in looks:
            used[goal] = used.get(goal, 0.0) + min(limit, seconds(goal))
        return ["correct" if seconds(goal) <= limit else "timeout" for goal, limit in looks]

    return ask, used


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("needs", [0.4, 0.9, 2.0, 4.9])
@pytest.mark.parametrize("shapes", [1, 3])
def test_an_honest_answer_beside_slow_ones_is_graded(workers, needs, shapes):
    """Wherever it stands among 256 slow answers, of one shape or of some."""
    slow = [("same", "+".join("x" * (2 + i % shapes)) + f"^{{{i}}}", "x") for i in range(256)]
    for at in (0, 128, 256):
        honest = ("same", r"\frac{x}{y}", "y")
        ask, used = scripted(lambda goal, honest=honest: needs if goal == honest else 1e9)
        known = look_in_turns([*slow[:at], honest, *slow[at:]], ask, timeout_s=5.0, workers=workers)
        assert known.pop(honest) == "correct" and set(known.values()) == {"timeout"}
        assert used[honest] <= 5.0 + needs
        assert sum(used.values()) < 110.0  # of 248 where each has half a second and 24 have 5 more


def test_slow_answers_of_many_shapes_share_what_there_is():
    """Each of 64 shapes gets the same, and all of them together no more than the budget."""
    goals = [("same", "+".join("x" * (2 + i)), "x") for i in range(64)]
    ask, used = scripted(lambda goal: 1.2)
    known = look_in_turns(goals, ask, timeout_s=5.0, workers=2)
    assert set(known.values()) == {"correct"}
    ask, used = scripted(lambda goal: 1e9)
    assert set(look_in_turns(goals, ask, timeout_s=5.0, workers=2).values()) == {"timeout"}
    assert sum(used.values()) <= 64 * FIRST_LOOK_S + (LATER_LOOKS + 2) * 5.0
    assert max(used.values()) <= 4 * min(used.values())
    limits = set()
    look_in_turns(goals[:1], lambda looks: limits.update(looks) or ask(looks), timeout_s=0.5, workers=1)
    assert {limit for _, limit in limits} == {0.5}, "no look is longer than the limit"


def test_a_second_look_is_long_enough():
    """A comparison that the first look cut off is right after the second."""
    pool = Verifier(workers=1, first_look_s=0.001)
    assert pool.compare([(r"\frac{\sqrt{3}}{3}+x", r"x+\frac{1}{\sqrt{3}}")]) == ["correct"]
    pool.close()


HOSTILE = """
import os, socket, subprocess
def attempt(name, action):
    try:
        action()
    except BaseException:
        return
    escaped.append(name)
escaped = []
attempt("socket", socket.socket)
attempt("fork", os.fork)
attempt("exec", lambda: subprocess.run(["/bin/true"]))
attempt("host file", lambda: open("/etc/hostname").read())
attempt("trainer environment", lambda: open(f"/proc/{os.getppid()}/environ").read())
attempt("write", lambda: open("/tmp/written-by-a-verification-worker", "w"))
attempt("kill", lambda: os.kill(os.getppid(), 0))
"""


def test_workers_are_locked_down(monkeypatch, tmp_path):
    """A worker has neither the trainer's environment nor network, files or processes; shown from inside of it."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:1")
    report = (
        "from _verify_worker_itself import *\n"
        "import _verify_worker_itself as worker\n"
        f"def judge(request):\n    exec({HOSTILE!r}, globals())\n    return 'escaped: ' + ', '.join(escaped)\n"
        "lock = worker.lock_down\n"
        "def locked(memory_mb):\n"
        "    layers = lock(memory_mb)\n"
        "    worker.judge = lambda request: 'correct'\n"
        "    worker.start_clock = lambda limit: setattr(worker, 'judge', judge)\n"
        "    return layers\n"
        "worker.lock_down = locked\n"
        "main = worker.main\n"
    )
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
    """If the worker's own timer cannot interrupt a comparison, the CPU limit ends it with SIGXCPU, which is a timeout.
    If a worker is killed from outside, its comparison is tried again."""
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
