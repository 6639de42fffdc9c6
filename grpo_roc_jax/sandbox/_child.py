"""Runs in the child, in the same process as the program: parses, executes, and reports what happened.

The program may break anything in this process, so once it has begun, nothing here relies on shared state: this module
is loaded with a private copy of `builtins` and uses only C functions bound beforehand. The worker treats the report as
untrusted data. Standard library only.
"""

import _ast
import _json
import _socket
import _thread
import atexit
import linecache
import mmap
import posix
import sys
import threading

EPERM, EACCES, EROFS, ENOSYS = 1, 13, 30, 38
PARSE_ONLY = 0x400
"""`ast.PyCF_ONLY_AST`."""
FUTURE_FLAGS = 0x1FF0000 | 0x2000
"""Bits of `co_flags` that `from __future__` sets. Later cells of a session inherit them."""
RESULT_FD = 3
NONCE_BYTES = 32
MESSAGE_CHARS = 500
TRACE_FRAMES = 20
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
_exit = posix._exit
_write = posix.write
_pwrite = posix.pwrite
_pread = posix.pread
_expression = _ast.Expression
_expression_statement = _ast.Expr
_sys = sys.__dict__
_known_lines = linecache.cache
_threads = _thread._count
_wait_for_threads = threading._shutdown
_run_exit_functions = atexit._run_exitfuncs
_exit_function_count = atexit._ncallbacks
_streams = (sys.stdout, sys.stderr)
_copies = []
_recvmsg = _socket.socket.recvmsg
_send = _socket.socket.send


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
        self.settings, self.sources, self.flags = settings, {}, 0
        self.module = type(sys)("__main__")
        self.names = self.module.__dict__
        self.names["__builtins__"] = sys.modules["builtins"]
        self.names["__file__"] = "main.py"
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

    def compile(self, source, name):
        """Code of the statements, and of the last one if it is an expression."""
        tree = compile(source, name, "exec", PARSE_ONLY | self.flags, True)
        lines = self.sources[name] = source.splitlines()
        # For tracebacks that the program prints itself, and for `inspect`.
        _known_lines[name] = (len(source), None, [line + "\n" for line in lines], name)
        last = None
        if tree.body and type(tree.body[-1]) is _expression_statement:
            last = _expression(tree.body.pop().value)
        body = compile(tree, name, "exec", self.flags, True) if tree.body else None
        if body is not None:
            self.flags |= body.co_flags & FUTURE_FLAGS
        return body, None if last is None else compile(last, name, "eval", self.flags, True)

    def echo(self, report, value):
        """Note the repr of the last expression, cut in the middle if it is long."""
        text, most = repr(value), self.settings.output_bytes
        if len(text) > self.settings.kill_bytes:
            report.kind = "output_limit"
        if len(text) > min(most, self.settings.kill_bytes):
            report.truncated = True
        if len(text) > most:
            half = most // 2
            text = text[:half] + "\n" + CUT_NOTE % (len(text) - 2 * half) + "\n" + text[-half:]
        report.echo = text

    def describe_parse(self, report, error, source):
        """Note why a source could not be parsed.

        Nested text may exhaust the parser's stack or memory: a syntax error in a source of usual size.
        """
        kind = type(error)
        report.kind = "memory_limit" if issubclass(kind, MemoryError) and len(source) > 1 << 20 else "syntax_error"
        report.error_type = _type_name(kind)
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
            code = _exit_code(error)
            if code is None or (type(code) in (int, bool) and code & 0xFF == 0):
                report.exit_code = 0
                return
            report.exit_code = code & 0xFF if type(code) in (int, bool) else 1
        report.kind = "exception"
        if issubclass(kind, MemoryError):
            report.kind = "memory_limit"
            if self.settings.reserve is not None:
                self.settings.reserve.close()
        report.error_type = _type_name(kind)
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
        report.error_message = _clip(error)

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
            lines.append('  File "%s", line %d, in %s' % (name, line, function))  # noqa: UP031
            source = self.sources[name]
            if 0 < line <= len(source):
                lines.append("    " + source[line - 1].strip()[:160])
        return "\n".join(lines)


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


def seed_generators(seed):
    """Seed random generators, so that equal seeds give equal draws; children would share numpy's state otherwise."""
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
            program.execute(report, source, "<program>")
        except BaseException as error:
            # Another thread may raise an exception in this one at any point, even between the lines of `execute`.
            report = ProgramReport()
            program.describe(report, error, "<program>")
    except BaseException:
        report = ProgramReport()
        report.kind = "exception"
    for _ in range(100):
        try:
            if not closing[0]:
                closing[0] = True
                _close(program, report)
            data = report.pack()
            try:
                _pwrite(RESULT_FD, data, NONCE_BYTES)
            finally:
                _exit(0)
        except BaseException:
            continue
    _exit(1)


def _close(program, report):
    """Do what an interpreter does at exit: wait for threads, run exit functions, let objects flush what they hold."""
    _flush()
    try:
        if _threads():
            _wait_for_threads()
        if _exit_function_count():
            _run_exit_functions()
        if not _threads() and report.kind == "ok":
            program.names.clear()
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
        pid = posix.fork()
    except BaseException:
        pid = -1
    if pid == 0:
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
