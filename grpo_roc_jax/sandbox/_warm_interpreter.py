"""A root: a single-threaded warm interpreter from which workers are forked. Standard library and `preload` only.

It never sees a program. Every child starts with its memory: imported modules, the caches of a short warm-up, a heap on
huge pages, all of it frozen for the garbage collector.
"""

import _imp
import atexit
import builtins
import contextlib
import gc
import importlib
import logging
import os
import select
import signal
import socket
import sys
import time
import types

from . import _kernel, _messages, _session, _spaces, _wire, _worker
from ._messages import IsolationPlan

COMMON = (
    "abc argparse array ast base64 binascii bisect calendar cmath collections collections.abc contextlib copy csv "
    "dataclasses datetime decimal difflib enum fractions functools hashlib heapq html inspect io itertools json "
    "keyword locale logging math numbers operator pprint queue random re secrets shlex statistics string struct sys "
    "tempfile textwrap threading time timeit token tokenize traceback types typing unicodedata uuid warnings weakref "
    "zlib"
)
"""Standard modules that programs use; bare roots have only these."""

address_of = id
"""In CPython the identity of an object is its address."""
ARENA_BITS = 20
"""Size of the arenas in which the interpreter allocates small objects, as a power of two."""
PLUG_LIMIT = 100_000
"""Most objects per size with which holes in the heap are filled."""
PLUGS: list = []
CODE_NAME = "<sandbox>"
"""In place of the names of these files; `tools.observation` leaves their frames out."""

WARM_UP = {
    "numpy": """
import numpy as np
a = np.arange(6.0).reshape(2, 3)
np.linalg.solve(a @ a.T, np.ones(2)); np.linalg.eigvals(a @ a.T); np.random.default_rng(0).normal(size=3); repr(a)
np.sort(a).mean(); np.roots([1, -3, 2]); np.array([1, 2]).sum(); np.polyfit([0, 1, 2], [0, 1, 4], 2)
""",
    "sympy": """
import sympy as sp
x, y = sp.symbols("x y")
sp.solve(x**2 - 5 * x + 6, x); sp.solve([x + y - 3, x - y - 1], [x, y]); sp.integrate(x * sp.exp(x), x)
sp.simplify(sp.sin(x) ** 2 + sp.cos(x) ** 2); sp.factor(x**3 - 1); sp.expand((x + 1) ** 3); sp.diff(sp.log(x), x)
str(sp.Rational(1, 3) + sp.sqrt(2)); sp.Matrix([[1, 2], [3, 4]]).det(); sp.factorint(84); sp.limit(sp.sin(x) / x, x, 0)
sp.nsimplify("0.5"); sp.N(sp.pi, 20); sp.integrate(sp.cos(x), (x, 0, 1)); sp.series(sp.exp(x), x, 0, 3)
sp.solve(x**3 - x - 1, x); repr(sp.binomial(5, 2)); sp.apart(1 / (x**2 - 1)); sp.solveset(x**2 - 1, x)
""",
}
"""Programs that trigger the lazy imports and fill the caches of these modules, which every fork then has: a sympy call
takes less than half the time."""


def main(arguments: list[str]) -> None:
    """Entry of the process; its arguments are the descriptor of the connection, and `full` or `bare`."""
    control = socket.socket(fileno=int(arguments[0]))
    _kernel.prctl("prctl(PR_SET_CHILD_SUBREAPER)", _kernel.PR_SET_CHILD_SUBREAPER, 1)
    plan, _ = _messages.receive(control, _messages.TO_ROOT)
    if plan is None:
        return
    try:
        report = warm(() if arguments[1] == "bare" else plan.preload)
    except Exception as error:
        _messages.send(control, failure_of(error))
        return
    _messages.send(control, report)
    serve(control, plan, load_harness())


def failure_of(error: BaseException) -> _messages.Failed:
    return _messages.Failed(f"{type(error).__name__}: {error}"[:2000])


def warm(preload: tuple[str, ...]) -> _messages.RootReady:
    """Import modules, warm them up, and compact the heap."""
    for name in COMMON.split():
        importlib.import_module(name)
    versions = {name: str(getattr(importlib.import_module(name), "__version__", "")) for name in preload}
    for name in preload:
        if name in WARM_UP:
            exec(compile(WARM_UP[name], "<warm-up>", "exec"), {})
    # Parsing and compiling import modules lazily as well.
    eval(compile("1 + 1", "<warm-up>", "eval"))
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"{threads} threads after importing {list(preload)}; a root must have one to fork")
    atexit._clear()
    atexit.register(logging.shutdown)
    sys.stdout.reconfigure(line_buffering=True)
    # Programs may import modules that they write to their directory.
    sys.path.insert(0, "")
    gc.collect()
    hide_files()
    PLUGS.append(fill_holes())
    gc.freeze()
    with contextlib.suppress(OSError, ValueError):
        _kernel.collapse_heap()
    return _messages.RootReady(versions)


def hide_files() -> None:
    """Give the code of these modules one name: programs can print the frames that they run in, and what they print
    should not differ between hosts."""
    folder = os.path.dirname(__file__) + os.sep
    modules = [module for name, module in sys.modules.items() if name.startswith(__package__)]
    things = [thing for module in modules for thing in vars(module).values()]
    things += [part for thing in things if isinstance(thing, type) for part in vars(thing).values()]
    for thing in things:
        if isinstance(thing, types.FunctionType) and thing.__code__.co_filename.startswith(folder):
            _imp._fix_co_filename(thing.__code__, CODE_NAME)


def fill_holes() -> list:
    """Fill the holes between the objects of the heap, so that later objects lie together; returns what must be kept.

    Otherwise workers and children would write to pages all over the heap. The first write to a page that is shared with
    the root copies it, and the first write to a huge page splits it.
    """
    arenas = {address_of(thing) >> ARENA_BITS for thing in gc.get_objects()}
    arenas |= {address_of(thing) >> ARENA_BITS for thing in sys.modules}
    plugs: list = []
    for size in range(16, 513, 16):
        for _ in range(PLUG_LIMIT):
            plug = object() if size == 16 else float(size) * 1.5 if size == 32 else bytes(size - 33)
            plugs.append(plug)
            if address_of(plug) >> ARENA_BITS not in arenas:
                break
    return plugs


def load_harness() -> types.ModuleType:
    """The module that runs in the same process as programs, with its own copy of `builtins`."""
    path = os.path.join(os.path.dirname(__file__), "_child.py")
    harness = types.ModuleType("_harness")
    harness.__dict__["__builtins__"] = dict(builtins.__dict__)
    with open(path, encoding="utf-8") as file:
        exec(compile(file.read(), CODE_NAME, "exec"), harness.__dict__)
    return harness


def serve(control: socket.socket, plan: IsolationPlan, harness: types.ModuleType) -> None:
    """Fork workers on demand and reap them, until the executor process ends."""
    life_read, life_write = os.pipe()
    wake_read, wake_write = os.pipe()
    for fd in (wake_read, wake_write):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write)
    poller = select.poll()
    poller.register(control, select.POLLIN)
    poller.register(wake_read, select.POLLIN)
    known: set[int] = set()
    while True:
        ready = dict(poller.poll())
        if wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake_read, 4096)
            reap(known, strays=not plan.namespaces)
        if control.fileno() not in ready:
            continue
        message, fds = _messages.receive(control, _messages.TO_ROOT)
        if message is None:
            await_workers()
            return
        pid = os.fork() if isinstance(message, _messages.SpawnWorker) else -1
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _wire.close_all((control.detach(), life_write, wake_read, wake_write))
            become_worker(plan, message.slot, socket.socket(fileno=fds[0]), life_read, harness)
        _wire.close_all(fds)
        if pid > 0:
            known.add(pid)


def await_workers() -> None:
    """Wait for workers, which notice the end of the executor process too and clean up after their programs."""
    deadline = time.monotonic() + 2
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.005)


def reap(known: set[int], *, strays: bool) -> None:
    """Reap ended children, among them `known` workers, and kill `strays` of dead workers, which are children now.

    A stray may leave others in turn: a session leaves its copy, which is stopped and does not notice.
    """
    died = False
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            break
        died = True
        known.discard(pid)
    if died and strays:
        for pid in set(_worker.children_of(os.getpid())) - known:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def become_worker(plan: IsolationPlan, slot: int, control: socket.socket, life: int, harness: types.ModuleType) -> None:
    """Run the first process of a worker; with namespaces it forks process 1 and exits. Never returns."""
    status = 1
    try:
        if plan.namespaces:
            _spaces.enter(user_namespace=not plan.own_uid, outer_uid=plan.outer_uid)
            pid = os.fork()
            if pid:
                _messages.send(control, _messages.WorkerBorn(pid))
                os._exit(0)
        else:
            _messages.send(control, _messages.WorkerBorn(os.getpid()))
            _kernel.prctl("prctl(PR_SET_CHILD_SUBREAPER)", _kernel.PR_SET_CHILD_SUBREAPER, 1)
        worker = _worker.Worker(plan, slot, control, life, harness)
        worker.set_up()
        _messages.send(control, _messages.WorkerUp(plan.level, plan.landlock))
        first_cell = worker.serve()
        if first_cell:
            _session.LiveSession(worker).serve(*first_cell)
        status = 0
    except _worker.Killed:
        pass
    except BaseException as error:
        with contextlib.suppress(BaseException):
            _messages.send(control, failure_of(error))
    finally:
        os._exit(status)
