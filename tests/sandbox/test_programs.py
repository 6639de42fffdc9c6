"""Programs end as in a plain interpreter, and what it does not show is in the result."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from grpo_roc_jax.tools import CodeCall, ToolsConfig, make_executor
from grpo_roc_jax.tools.executor import BaseExecutor
from grpo_roc_jax.types import ToolResult

SUM = "+".join(["1"] * 1500)
ELIF = "x = 1199\nif x == 0: print(0)\n" + "".join(f"elif x == {i}: print({i})\n" for i in range(1, 1200))
FREED = """
class A:
    def __init__(self, name): self.name = name
    def __del__(self): print("freed", self.name, LAST)
def left():
    try: yield 1
    finally: print("left", LAST)
a, b = A("a"), A("b"); print(next(steps := left())); LAST = 3
"""
STATUS = "import enum, sys\nclass Status(enum.IntEnum): OK, BAD = 0, 2\n"
KEPT = """
import logging, logging.handlers, sys
logging.getLogger().addHandler(logging.handlers.MemoryHandler(9, target=logging.StreamHandler(sys.stdout)))
logging.warning("kept")
"""
HOOK = "import sys\nsys.excepthook = lambda kind, error, trace: print(kind, error, trace.tb_lineno)\n"
INTERRUPT = "try:\n    {}\n    for _ in range(10**6): pass\nexcept KeyboardInterrupt: print('interrupted')"

AS_PLAIN = {
    "deep expression": f"print({SUM})",
    "deep statement": ELIF,
    "chain of calls": "print('a'" + ".replace('a', 'b')" * 600 + ")",
    "freed at the end": FREED + "b.itself = b",
    "freed after an exception": FREED + "1/0",
    "freed after an exit": FREED + "import sys\nsys.exit(1)",
    "freed though a handler keeps the names": FREED + "import signal; signal.signal(14, lambda *_: 0)",
    "exit by an enum": STATUS + "sys.exit(Status.OK)",
    "exit by an enum of failure": STATUS + "sys.exit(Status.BAD)",
    "exit by a number that is too large": "import sys\nsys.exit(2**64)",
    "exit by a float": "import sys\nsys.exit(0.0)",
    "flushed logs": KEPT,
    "finalizer": "import weakref\nclass A: pass\na = A(); weakref.finalize(a, print, 'final')\n",
    "interrupt_main": INTERRUPT.format("import _thread; _thread.interrupt_main()"),
    "raise_signal": INTERRUPT.format("import signal; signal.raise_signal(signal.SIGINT)"),
    "source of a function": "import inspect\nx = '\x0c\u2028'\n\x0c\ndef f():\n    x\nprint(inspect.getsource(f))",
    "source of a class": "import inspect\nclass A:\n    x = 1\nprint(inspect.getsource(A))",
    "hook": HOOK + "raise ValueError('x')",
    "hook that fails": HOOK.replace("print", "missing") + "raise ValueError('x')",
}
FIELDS = {
    f"y = 1; {SUM}  # end": {"echo": "1500"},
    f"(\n{SUM.replace('+', '+ # é' + chr(10))}\n)": {"echo": "1500"},
    f"{ELIF}x": {"echo": "1199", "stdout": "1199\n"},
    f"x = 'é'; ({SUM}\n+ zz)": {"error_line": 2, "error_message": "name 'zz' is not defined"},
    "x = 'a\u2028b'\n\x0c\n1/0": {"traceback": '  File "<program>", line 3, in <module>\n    1/0'},
    "raise ExceptionGroup('g', [ValueError('a'), ExceptionGroup('h', [KeyError(), OSError('b'), OSError('c')])])": {
        "error_message": "g (2 sub-exceptions): ValueError: a; KeyError; OSError: b"
    },
    "error = ValueError('a'); error.add_note('b'); error.add_note('c')\nraise error": {"error_message": "a\nb\nc"},
    "import traceback\ntraceback.print_stack()": {
        "observation": '[stderr]\n  File "<program>", line 2, in <module>\n    traceback.print_stack()'
    },
    "import warnings\nwarnings.warn('w', stacklevel=2)": {"observation": "[stderr]\nsys:1: UserWarning: w"},
    "'\U0001f600' * 100_000": {"echo": repr("\U0001f600" * 100_000), "truncated": False},
    "'a' * 1_500_000": {"echo": repr("a" * 1_500_000), "truncated": False},
    "import os\nfor fd in 1, 2: os.write(fd, bytes([255]) * (3 << 20))\n'\U0001f600' * 2_000_000": {
        "kind": "ok", "truncated": True, "stdout_bytes": 3 << 20,
    },
    f"class {'A' * 300_000}(Exception): pass\nraise {'A' * 300_000}": {"kind": "exception", "error_type": "A" * 200},
}  # fmt: skip
NUMPY = "import numpy\nnumpy.random.random()"


@pytest.fixture(scope="module")
def executor() -> Iterator[BaseExecutor]:
    with make_executor(ToolsConfig(workers=4, roots=1, preload=(), wall_s=30.0, cpu_s=10.0, output_kb=2048)) as made:
        yield made


def run(executor: BaseExecutor, *codes: str, seed: int = 0) -> list[ToolResult]:
    return executor.run(
        [CodeCall(str(i), "python_code_with_standard_io", {"code": code}, None, seed) for i, code in enumerate(codes)]
    )


def interruptible() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_output_and_status_are_those_of_a_plain_interpreter(executor: BaseExecutor, tmp_path: Path) -> None:
    def plain(name: str) -> tuple[str, bool]:
        file = tmp_path / f"{name}.py"
        file.write_text(AS_PLAIN[name], encoding="utf-8")
        # A test run in the background may ignore SIGINT, and would pass that on.
        done = subprocess.run([sys.executable, file], capture_output=True, encoding="utf-8", preexec_fn=interruptible)
        return done.stdout, done.returncode == 0

    with ThreadPoolExecutor(2) as threads:
        expected = dict(zip(AS_PLAIN, threads.map(plain, AS_PLAIN), strict=True))
    results = run(executor, *AS_PLAIN.values())
    assert {name: (r.stdout, r.kind == "ok") for name, r in zip(AS_PLAIN, results, strict=True)} == expected
    assert [result.stderr for result in results if result.kind == "ok" and result.stderr] == []


def test_what_a_plain_interpreter_does_not_show(executor: BaseExecutor) -> None:
    results = run(executor, *FIELDS)
    seen = [{name: getattr(r, name) for name in some} for some, r in zip(FIELDS.values(), results, strict=True)]
    assert seen == list(FIELDS.values())


def test_numpy_is_seeded_when_it_is_imported(executor: BaseExecutor) -> None:
    first, again = run(executor, NUMPY, NUMPY, seed=1)
    [other] = run(executor, NUMPY, seed=2)
    assert first.echo == again.echo != other.echo
