"""Runs in the child, in the same process as the program: parses, executes, and reports what happened.

The program may break anything in this process, so once it has begun, nothing here relies on shared state: this module
is loaded with a private copy of `builtins` and uses only C functions bound beforehand. The worker treats the report as
untrusted data. Standard library only.
"""

import _ast
import _json
import _random
import _socket
import _thread
import atexit
import gc
import linecache
import logging
import mmap
import posix
import random
import sys
import threading
import weakref
from importlib.machinery import PathFinder

EPERM, EACCES, EROFS, ENOSYS = 1, 13, 30, 38
PARSE_ONLY = 0x400
"""`ast.PyCF_ONLY_AST`."""
FUTURE_FLAGS = 0x1FF0000 | 0x2000
"""Bits of `co_flags` that `from __future__` sets. Later cells of a session inherit them."""
RESULT_FD = 3
NONCE_BYTES = 32
MESSAGE_CHARS = 500
NAME_CHARS = 200
TRACE_FRAMES = 20
PROGRAM, FILE = "<program>", "main.py"
"""Name of the code of a program, and its `__file__`."""
SHOWN_OF_GROUP = 3
"""Exceptions of a group that are named."""
SHOWN_NOTES = 10
QUOTED_BYTES = 12
"""Most bytes of a character in the record."""
RECORD_ROOM = 1 << 17
"""Bytes of a record without its echo, at most."""
MOST_RECORD = 3584 << 10
"""Longest record; with two streams of 2 MiB it fits into a frame."""
CUT_NOTE = "[... %d characters omitted ...]"

_quote = _json.encode_basestring_ascii
_type_name = type.__dict__["__name__"].__get__
_error_trace = BaseException.__dict__["__traceback__"].__get__
_error_cause = BaseException.__dict__["__cause__"].__get__
_error_context = BaseException.__dict__["__context__"].__get__
_exit_code = SystemExit.__dict__["code"].__get__
_syntax_line = SyntaxError.__dict__["lineno"].__get__
_syntax_text = SyntaxError.__dict__["msg"].__get__
_errno = OSError.__dict__["errno"].__get__
_members = BaseExceptionGroup.__dict__["exceptions"].__get__
_whole = int.__dict__["__int__"]
_exit = posix._exit
_write = posix.write
_pwrite = posix.pwrite
_pread = posix.pread
_expression = _ast.Expression
_expression_statement = _ast.Expr
_sys = sys.__dict__
_usual_hook = sys.excepthook
_WITHOUT_END = frozenset((type(sys), type(None), bool, int, float, str, bytes))
"""Kinds of global values that do nothing when they are freed."""
_NEEDED_LAST = (type(sys), type(linecache.getline), type, int, float, str, bytes, list, tuple, dict, set)
"""Kinds of global values that others may need when they are freed."""
_known_lines = linecache.cache
_threads = _thread._count
_wait_for_threads = threading._shutdown
_run_exit_functions = atexit._run_exitfuncs
_exit_function_count = atexit._ncallbacks
_log_handlers = logging._handlerList
_own_exit_functions, _own_log_handlers = _exit_function_count(), len(_log_handlers)
"""Those of the warm interpreter, which have nothing to do for a program that has none itself."""
_collect = gc.collect
_collector_stats = gc.get_stats
_referrers = gc.get_referrers
_reference = weakref.ref
_find_by_path = PathFinder.find_spec
_generator = random._inst
_get_state, _set_state = _random.Random.getstate, _random.Random.setstate
_streams = (sys.stdout, sys.stderr)
_copies = []
_recvmsg = _socket.socket.recvmsg
_send = _socket.socket.send


class _Mark:
    """Shows whether the names of a program are still there."""


class ProgramReport:
    """How the program ended; filled in step by step."""

    def __init__(self):
        self.kind = "ok"
        self.error_type = self.error_message = self.traceback = self.echo = ""
        self.error_line = self.exit_code = None
        self.denied = self.truncated = False

    def pack(self):
        """The record: nonce, length, and one line of JSON, made by C functions and formatting only."""
        text = '{"kind":%s,"error_type":%s,"error_message":%s,"traceback":%s,"echo":%s,"error_line":%s,"exit_code":%s,"denied":%d,"truncated":%d}' % (  # noqa: E501, UP031
            _quote(self.kind), _quote(self.error_type), _quote(self.error_message), _quote(self.traceback),
            _quote(self.echo), _number(self.error_line), _number(self.exit_code), self.denied, self.truncated,
        )  # fmt: skip
        data = text.encode()
        return b"%s%08d%s" % (_pread(RESULT_FD, NONCE_BYTES, 0), len(data), data)


def _number(value):
    return "null" if value is None else "%d" % value  # noqa: UP031


class ProgramSettings:
    """Limits of the output, error numbers by which the sandbox refuses something, and memory to release at need."""

    def __init__(self, output_bytes, kill_bytes, denied):
        self.output_bytes, self.kill_bytes, self.denied, self.reserve = output_bytes, kill_bytes, denied, None


class ProgramNamespace:
    """The namespace in which code runs, and the sources so far."""

    def __init__(self, settings):
        self.settings, self.sources, self.flags, self.seeded = settings, {}, 0, False
        self.collections = _old_collections()
        self.module = type(sys)("__main__")
        self.names = self.module.__dict__
        self.names["__builtins__"] = sys.modules["builtins"]
        self.names["__file__"] = FILE
        sys.modules["__main__"] = self.module

    def execute(self, report, source, name):
        """Run one program or cell, and note in the report how it ended."""
        try:
            body, last = self.compile(source, name)
        except BaseException as error:
            self.describe_parse(report, error, source)
            return
        value = None
        try:
            if body is not None:
                exec(body, self.names)
            if last is not None:
                value = eval(last, self.names)
            if value is not None:
                self.echo(report, value)
        except BaseException as error:
            self.describe(report, error, name)
            self.call_hook(error)

    def compile(self, source, name):
        """Code of the statements, and of the last one if it is an expression."""
        tree = compile(source, name, "exec", PARSE_ONLY | self.flags, True)
        lines = self.sources[name] = lines_of(source)
        # For tracebacks that the program prints itself, and for `inspect`, which looks for classes by `__file__`.
        _known_lines[name] = (len(source), None, [line + "\n" for line in lines], name)
        if name == PROGRAM:
            _known_lines[FILE] = _known_lines[name]
        last = tree.body.pop() if tree.body and type(tree.body[-1]) is _expression_statement else None
        try:
            return self.code_of(tree if tree.body else None, None if last is None else _expression(last.value), name)
        except RecursionError:
            # The interpreter accepts text that is nested deeper than its syntax trees may be.
            return self.code_of(*_split(lines, last), name)

    def code_of(self, statements, expression, name):
        """Code of statements and of the expression after them, each a tree, a text or None."""
        body = None if statements is None else compile(statements, name, "exec", self.flags, True)
        if body is not None:
            self.flags |= body.co_flags & FUTURE_FLAGS
        return body, None if expression is None else compile(expression, name, "eval", self.flags, True)

    def call_hook(self, error):
        """Call what the program has put in place of `sys.excepthook`, as an interpreter does."""
        try:
            if _sys["excepthook"] is _usual_hook or issubclass(type(error), SystemExit):
                return
            trace = _error_trace(error)
            while trace is not None and trace.tb_frame.f_code.co_filename not in self.sources:
                trace = trace.tb_next
            _sys["excepthook"](type(error), error, trace)
        except BaseException:
            return

    def release(self):
        """Let go of what the program has made, so that its objects can still act: files write what they hold,
        `__del__` is called, generators leave their `try`.

        As at the end of an interpreter, all global names stay until nothing can use them. Only if something outside of
        the program has one of its functions, which keeps them, are they taken away one by one.
        """
        for value in self.names.values():
            if type(value) not in _WITHOUT_END:
                break
        else:
            return
        mark = _Mark()
        alive = _reference(mark)
        self.names["__doc__"] = mark
        _sys["modules"].pop("__main__", None)
        self.module = self.names = mark = value = None
        # A collection of the oldest objects also empties free lists, whose pages are shared with the warm interpreter.
        _collect(1 if self.collections == _old_collections() else 2)
        for names in () if alive() is None else _referrers(alive()):
            if type(names) is dict:
                for name in [*names]:
                    if not issubclass(type(names.get(name)), _NEEDED_LAST):
                        names.pop(name, None)
                _collect()
                names.clear()

    def echo(self, report, value):
        """Note the repr of the last expression, cut in the middle if it or its record would be too long."""
        text, kill_bytes = repr(value), self.settings.kill_bytes
        if len(text) > kill_bytes:
            report.kind = "output_limit"
        room = min(kill_bytes, MOST_RECORD) - RECORD_ROOM
        report.echo = _cut(text, self.settings.output_bytes)
        if len(report.echo) * QUOTED_BYTES > room and len(_quote(report.echo)) > room:
            report.echo = _cut(text, max(0, room // QUOTED_BYTES))
        report.truncated = report.echo is not text

    def describe_parse(self, report, error, source):
        """Note why a source could not be parsed.

        Nested text may exhaust the parser's stack or memory: a syntax error in a source of usual size.
        """
        kind = type(error)
        report.kind = "memory_limit" if issubclass(kind, MemoryError) and len(source) > 1 << 20 else "syntax_error"
        report.error_type = _type_name(kind)[:NAME_CHARS]
        if issubclass(kind, SyntaxError):
            line = _syntax_line(error)
            report.error_line = line if type(line) is int else None
            report.error_message = _clip(_syntax_text(error))
        else:
            report.error_message = _clip(error)

    def describe(self, report, error, name):
        """Note type, message, line and frames of the exception that ended the program."""
        kind = type(error)
        if issubclass(kind, SystemExit):
            report.exit_code = _exit_status(_exit_code(error))
            if report.exit_code == 0:
                return
        report.kind = "exception"
        if issubclass(kind, MemoryError):
            report.kind = "memory_limit"
            if self.settings.reserve is not None:
                self.settings.reserve.close()
        report.error_type = _type_name(kind)[:NAME_CHARS]
        report.denied = self.was_denied(error)
        frames, step = [], _error_trace(error)
        while step is not None:
            code = step.tb_frame.f_code
            if code.co_filename in self.sources:
                frames.append((code.co_filename, step.tb_lineno, code.co_name))
                if code.co_filename == name:
                    report.error_line = step.tb_lineno
            step = step.tb_next
        report.traceback = self.show(frames)
        report.error_message = _message(error)

    def was_denied(self, error):
        """Whether an exception in the chain of causes has an errno by which the sandbox refuses something."""
        for _ in range(8):
            if error is None:
                return False
            if issubclass(type(error), OSError) and _errno(error) in self.settings.denied:
                return True
            error = _error_cause(error) or _error_context(error)
        return False

    def show(self, frames):
        """The program's own frames as text, oldest first."""
        if len(frames) > TRACE_FRAMES:
            half = TRACE_FRAMES // 2
            frames = [*frames[:half], None, *frames[-half:]]
        lines = []
        for frame in frames:
            if frame is None:
                lines.append("  ...")
                continue
            name, line, function = frame
            lines.append('  File "%s", line %d, in %s' % (name, line, function[:NAME_CHARS]))  # noqa: UP031
            source = self.sources[name]
            if 0 < line <= len(source):
                lines.append("    " + source[line - 1].strip()[:160])
        return "\n".join(lines)


def lines_of(source):
    """The lines of a program as the interpreter counts them; `splitlines` splits at other characters too."""
    lines = source.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return lines if lines[-1] else lines[:-1]


def _split(lines, statement):
    """The text before the last statement, and that of the statement on its line; all of it and None without one."""
    if statement is None:
        return "\n".join(lines), None
    first, end = statement.lineno - 1, statement.end_lineno
    before = [*lines[:first], _piece(lines[first], 0, statement.col_offset)]
    inner = lines[first:end]
    inner[-1] = _piece(inner[-1], 0, statement.end_col_offset)
    inner[0] = _piece(inner[0], statement.col_offset, None)
    return "\n".join(before), "\n" * first + "(" + "\n".join(inner) + "\n)"  # which a bare star needs


def _piece(line, start, end):
    """A part of a line between offsets in bytes."""
    return line.encode()[start:end].decode()


def _cut(text, most):
    """Text without its middle if it has more than `most` characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return text[:half] + "\n" + CUT_NOTE % (len(text) - 2 * half) + "\n" + text[len(text) - half :]


def _exit_status(code):
    """The status with which an interpreter exits by `sys.exit(code)`."""
    if code is None:
        return 0
    if not issubclass(type(code), int):
        return 1
    number = _whole(code)
    return number & 0xFF if -(1 << 63) <= number < 1 << 63 else 0xFF


def _message(error):
    """The text of an exception, with the exceptions in a group, then its notes."""
    text = _clip(error)
    try:
        members = ["%s: %s" % (_type_name(type(leaf)), _clip(leaf)) for leaf in _leaves(error)]  # noqa: UP031
        if members:
            text += ": " + "; ".join([member.removesuffix(": ") for member in members])
        notes = getattr(error, "__notes__", None)
        if type(notes) is list:
            text = "\n".join([text, *[note for note in notes[:SHOWN_NOTES] if type(note) is str]])
    except BaseException:
        pass
    return text[:MESSAGE_CHARS]


def _leaves(error):
    """The first exceptions in a group that are no groups themselves."""
    leaves, rest = [], [error] if issubclass(type(error), BaseExceptionGroup) else []
    while rest and len(leaves) < SHOWN_OF_GROUP:
        nested = rest.pop()
        if issubclass(type(nested), BaseExceptionGroup):
            rest += _members(nested)[SHOWN_OF_GROUP - 1 :: -1]
        else:
            leaves.append(nested)
    return leaves


def _old_collections():
    """Numbers of collections that have made objects the oldest."""
    _, middle, oldest = _collector_stats()
    return middle["collections"], oldest["collections"]


def _clip(error):
    """The start of an exception's text. The exception's own methods may fail in any way."""
    try:
        text = str(error)
        return text[:MESSAGE_CHARS] + "" if type(text) is str else ""
    except BaseException:
        return "<no text: str() of the exception failed>"


def _flush():
    """Flush standard streams. A context manager would be one more thing that the program can break."""
    for stream in ("stdout", "stderr", *_streams):
        try:
            (_sys[stream] if type(stream) is str else stream).flush()
        except BaseException:
            continue


class NumpySeeder:
    """Finds `numpy.random`, and seeds it when a program imports it."""

    seed = 0

    def find_spec(self, name, path=None, target=None):
        if name != "numpy.random":
            return None
        spec = _find_by_path(name, path, target)
        load = getattr(spec and spec.loader, "exec_module", None)
        if load is not None:

            def load_and_seed(module):
                load(module)
                module.seed(self.seed)

            spec.loader.exec_module = load_and_seed
        return spec


_numpy_seeder = NumpySeeder()
if "numpy.random" not in sys.modules:
    sys.meta_path.insert(0, _numpy_seeder)


def seed_generators(seed):
    """Seed random generators, so that equal seeds give equal draws; children would share numpy's state otherwise."""
    _numpy_seeder.seed = seed & 0xFFFFFFFF
    for name, bits in (("random", 64), ("numpy.random", 32)):
        try:
            if name in sys.modules:
                sys.modules[name].seed(seed & ((1 << bits) - 1))
        except Exception:
            continue


def run_program(source, settings, seed):
    """Run a stateless program and end the process."""
    settings.reserve = mmap.mmap(-1, 4 << 20)
    seed_generators(seed)
    program, report, closing = ProgramNamespace(settings), ProgramReport(), [False]
    try:
        try:
            program.execute(report, source, PROGRAM)
        except BaseException as error:
            # Another thread may raise an exception in this one at any point, even between the lines of `execute`.
            report = ProgramReport()
            program.describe(report, error, PROGRAM)
    except BaseException:
        report = ProgramReport()
        report.kind = "exception"
    for _ in range(100):
        try:
            if not closing[0]:
                closing[0] = True
                _close(program)
            data = report.pack()
            try:
                _pwrite(RESULT_FD, data, NONCE_BYTES)
            finally:
                _exit(0)
        except BaseException:
            continue
    _exit(1)


def _close(program):
    """Do what an interpreter does at exit: wait for threads, run exit functions, let objects flush what they hold."""
    _flush()
    try:
        if _threads():
            _wait_for_threads()
        if _exit_function_count() > _own_exit_functions or len(_log_handlers) > _own_log_handlers:
            _run_exit_functions()
        if not _threads():
            program.release()
    except BaseException:
        pass
    _flush()


def run_session(control, settings):
    """Run cells in one namespace until the worker closes the connection, a `_socket.socket`.

    `C` brings a cell (descriptors: code, stdin, stdout, stderr, result). `S` asks for a copy of this process, which
    waits on the connection that comes with it and takes over if needed.
    """
    program, idle = ProgramNamespace(settings), posix.dup(RESULT_FD)
    while True:
        data, ancillary, _, _ = _recvmsg(control, 256, 128)
        if not data:
            _exit(0)
        fds = _descriptors(ancillary)
        if data[:1] == b"S":
            control = _copy_state(control, fds[0])
        else:
            _run_cell(program, settings, control, fds, data, idle)


def _descriptors(ancillary):
    packed = ancillary[0][2] if ancillary else b""
    return [int.from_bytes(packed[start : start + 4], sys.byteorder) for start in range(0, len(packed), 4)]


def _reap_copies():
    """Reap copies that were killed, which count as processes until then."""
    for pid in list(_copies):
        try:
            alive = posix.waitpid(pid, posix.WNOHANG)[0] == 0
        except BaseException:
            alive = False
        if not alive:
            _copies.remove(pid)


def _copy_state(control, descriptor):
    """Fork. The copy waits on its own connection, the original on the old one."""
    try:
        _reap_copies()
        state, next_gauss = _get_state(_generator), _generator.gauss_next
        pid = posix.fork()
    except BaseException:
        pid = -1
    if pid == 0:
        # `random` seeds itself anew in a fork.
        _set_state(_generator, state)
        _generator.gauss_next = next_gauss
        _copies.clear()
        control.close()
        control = _socket.socket(fileno=descriptor)
        _send(control, b"R")
        return control
    posix.close(descriptor)
    if pid < 0:
        _send(control, b"N")
    else:
        _copies.append(pid)
    return control


def _run_cell(program, settings, control, fds, data, idle):
    """Run one cell with new standard streams, and report it to the worker.

    Between cells the streams are `idle`, which takes all that threads write: the files of a cell end with its report.
    """
    number, seed = int.from_bytes(data[1:5], "little"), int.from_bytes(data[5:13], "little")
    for descriptor, target in zip(fds[1:5], (0, 1, 2, RESULT_FD), strict=True):
        posix.dup2(descriptor, target)
        posix.close(descriptor)
    source = read_all(fds[0])
    posix.close(fds[0])
    report = ProgramReport()
    try:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
        if not program.seeded:
            # Later cells draw on, from where a copy or a second run of these cells would draw on too.
            program.seeded = True
            seed_generators(seed)
        program.execute(report, source, "<cell %d>" % number)  # noqa: UP031
    except BaseException as error:
        report = ProgramReport()
        program.describe(report, error, "")
    # `exit()` ends the cell but not the session; an exit code would mean that the process has ended.
    report.exit_code = None
    _flush()
    _pwrite(RESULT_FD, report.pack(), NONCE_BYTES)
    for target in (0, 1, 2, RESULT_FD):
        try:
            posix.dup2(idle, target)
        except BaseException:
            continue
    _send(control, b"D")


def read_all(descriptor):
    pieces, offset = [], 0
    while piece := _pread(descriptor, 1 << 20, offset):
        pieces.append(piece)
        offset += len(piece)
    return b"".join(pieces).decode("utf-8", "surrogatepass").removeprefix("\ufeff")
