"""A process that has imported what a Python program imports, and forks for each run of it.

    PYTHON .../_fork_server.py FD        # of the program's interpreter, whose standard library is all that it needs

The other end of the Unix socket FD sends for each run a JSON line with `number`, `words` (those after `python`),
`environment`, and the descriptors of standard input, output, error, and the reward. Answers are JSON lines:
`{"number", "pid"}` right before the run begins, `{"number", "status"}` when it has ended, `{"number", "refused"}` if an
import has started a thread, which no fork would have. A run leads a session of its own.

Only installed packages are imported before; each run imports files of the user's itself. Which packages those are, the
file of the program says, and the runs themselves, which report at their end what they have imported.
"""

import ast
import atexit
import contextlib
import gc
import importlib
import importlib.util
import io
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
import sysconfig
import tempfile
import threading
import traceback
import types

MOST_BYTES = 1 << 22
REPORTS = 8
"""Runs after which nothing more is learned, if the last one has imported nothing new."""
INSTALLED = tuple(
    os.path.realpath(folder) + os.sep
    for name in ("purelib", "platlib", "stdlib", "platstdlib")
    if (folder := sysconfig.get_path(name))
)


def is_installed(origin):
    """Whether a file belongs to a package that is installed, or to the standard library."""
    if not origin or origin in ("built-in", "frozen"):
        return False
    path = os.path.realpath(origin)
    return path.startswith(INSTALLED) or f"{os.sep}site-packages{os.sep}" in path or "dist-packages" in path


def top_imports(path):
    """Names that a Python file imports outside of functions and classes, and outside of `if __name__ == ...`."""
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return []
    names, nodes = [], list(tree.body)
    while nodes:
        node = nodes.pop(0)
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [node.module]
            names += [f"{node.module}.{alias.name}" for alias in node.names if alias.name != "*"]
        elif isinstance(node, ast.Try):
            nodes = node.body + nodes
    return names


class Preloads:
    """Modules that are imported before the next fork."""

    def __init__(self):
        self.tried = set()
        self.noted = []
        """What runs have imported, to be imported once none is running: an import holds up what watches them."""
        self.runs = 0
        self.silent = 0

    @property
    def learns(self):
        """Whether a further run would report what it has imported."""
        return self.runs < REPORTS or self.silent == 0

    def load(self, names):
        """Imports those that are installed; what fails to import is left to the runs."""
        new = [name for name in names if name not in self.tried and name not in sys.modules]
        self.tried.update(new)
        for name in new:
            try:
                spec = importlib.util.find_spec(name.partition(".")[0])
                folders = spec and spec.submodule_search_locations  # a package over several folders has no file
                if spec and all(map(is_installed, [spec.origin] if spec.origin else folders or [""])):
                    importlib.import_module(name)
            except BaseException:  # of code that is not ours; the run meets it again
                continue

    def load_for(self, program):
        """Imports what a program will: a path of a file, or `-m`, whose module is not read before."""
        # as the program has it, so that a file of the user's is not taken for a package of the same name
        sys.path[0] = os.getcwd() if program == "-m" else os.path.dirname(os.path.realpath(program))
        self.load([] if program == "-m" else top_imports(program))

    def note(self, names):
        """Notes what a run has imported."""
        self.runs += 1
        self.silent = 0 if any(name not in self.tried and name not in sys.modules for name in names) else 1
        self.noted += names

    def load_noted(self):
        """Imports what runs have imported."""
        self.load(self.noted)
        self.noted.clear()


class Run:
    """A run that was forked: its words, and where it reports its imports."""

    def __init__(self, number, pid, report):
        self.number, self.pid, self.report = number, pid, report

    def imported(self):
        """What the run has imported; nothing if it was killed."""
        if self.report is None:
            return []
        self.report.seek(0)
        return self.report.read().decode(errors="replace").split()


def report_imports(file, before):
    """At the end of a run: what it has imported from installed packages, in order."""

    def write():
        names = [
            name
            for name, module in list(sys.modules.items())
            if name not in before and is_installed(getattr(module, "__file__", None))
        ]
        file.seek(0)
        file.write("\n".join(names).encode())
        file.flush()

    atexit.register(write)


def become(request, descriptors, report):
    """In the fork: the process as the program finds it. Returns its words."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    standard_in, standard_out, standard_error, pay = descriptors
    os.dup2(standard_in, 0)
    os.dup2(standard_out, 1)
    os.dup2(standard_error, 2)
    environment = dict(request["environment"])
    for descriptor in (standard_in, standard_out, standard_error):
        os.close(descriptor)
    os.set_inheritable(pay, True)
    environment[request["pay"]] = str(pay)
    os.environ.clear()
    os.environ.update(environment)
    raw = io.TextIOWrapper(os.fdopen(1, "wb", 0), write_through=True) if request["unbuffered"] else None
    sys.stdin, sys.stdout = os.fdopen(0), raw or os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace")
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    random.seed()
    if "numpy" in sys.modules and "numpy.random" in sys.modules:
        sys.modules["numpy"].random.seed()
    if report is not None:
        report_imports(report, frozenset(sys.modules))
    return request["words"]


def play(words):
    """Runs a program as `python WORDS` does; its exception ends the process as there."""
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            leave(0)
        path = words[0]
        sys.argv = words
        main = types.ModuleType("__main__")
        main.__file__, main.__builtins__ = path, __builtins__
        sys.modules["__main__"] = main
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        exec(code, main.__dict__)
    except SystemExit as error:
        leave(error.code)
    except BaseException as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, runpy.__file__):
            frames = frames.tb_next
        traceback.print_exception(type(error), error, frames)
        leave(1, signal.SIGINT if isinstance(error, KeyboardInterrupt) else None)
    leave(0)


def leave(code, number=None):
    """Ends a run as an interpreter ends, but for taking apart what was imported: that would copy the memory which the
    run shares with its parent. As in `multiprocessing`, where a fork ends. With a number, it ends by that signal."""
    threading._shutdown()
    atexit._run_exitfuncs()
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if number is not None:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit((code or 0) & 0xFF)


def reap(runs, preloads):
    """(number, exit status) of each run that has ended since the last call; it leaves `runs`."""
    for pid, run in list(runs.items()):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            del runs[pid]
            yield run.number, os.waitstatus_to_exitcode(status)
            preloads.note(run.imported())


def serve(link):
    """Forks for each request until the other end closes, which ends all runs. Returns the words of the program in a
    fork."""
    preloads, runs = Preloads(), {}
    waking, woken = os.pipe()
    for descriptor in (waking, woken):
        os.set_blocking(descriptor, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken)

    def tell(**fields):
        with contextlib.suppress(OSError):  # the other end is closed, which the next round sees
            link.sendall(json.dumps(fields).encode() + b"\n")

    received, descriptors = b"", []
    while True:
        ready, _, _ = select.select([link, waking], [], [])
        if waking in ready:
            os.read(waking, 4096)
            for number, status in reap(runs, preloads):
                tell(number=number, status=status)
            if not runs:
                preloads.load_noted()
        if link not in ready:
            continue
        data, new, _, _ = socket.recv_fds(link, 1 << 16, 64)
        if not data:
            for pid in runs:
                for kill in (os.killpg, os.kill):  # one that has just begun has no group yet
                    with contextlib.suppress(OSError):
                        kill(pid, signal.SIGKILL)
            os._exit(0)
        received += data
        descriptors += new
        while b"\n" in received:
            line, _, received = received.partition(b"\n")
            request = json.loads(line)
            mine, descriptors = descriptors[:4], descriptors[4:]
            preloads.load_for(request["words"][0])
            if threading.active_count() > 1:
                for descriptor in mine:
                    os.close(descriptor)
                tell(number=request["number"], refused="a package starts a thread when it is imported")
                continue
            report = tempfile.TemporaryFile() if preloads.learns else None  # noqa: SIM115 - closed with its run
            gc.freeze()  # no collection of a run touches, and so copies, what is here
            begin, told = os.pipe()
            pid = os.fork()
            if not pid:
                os.close(told)
                if not os.read(begin, 1):  # it would be taken for one that never began, and started again
                    os._exit(1)
                for descriptor in (begin, link.fileno(), waking, woken, *descriptors):
                    os.close(descriptor)
                link.detach()
                runs.clear()
                return become(request, mine, report)
            for descriptor in (begin, *mine):
                os.close(descriptor)
            runs[pid] = Run(request["number"], pid, report)
            tell(number=request["number"], pid=pid)
            with contextlib.suppress(OSError):  # it was killed
                os.write(told, b"1")
            os.close(told)


if __name__ == "__main__":
    play(serve(socket.socket(fileno=int(sys.argv[1]))))
