"""How messages travel between the trainer, the executor process, its roots and their workers; standard library only.

The trainer and the executor process exchange frames on a stream: `u32 total | u32 header length | JSON header | raw
bytes`. The executor process, roots and workers exchange JSON datagrams on SOCK_SEQPACKET pairs, which carry descriptors
as well. `_messages` defines the JSON objects.
"""

import array
import contextlib
import fcntl
import json
import os
import socket
import struct
from collections.abc import Iterable

MAX_FRAME = 16 << 20
"""Longest frame, in bytes; checked before memory is allocated for it."""
MAX_DATAGRAM = 1 << 16
MAX_FDS = 8
LARGEST_PAGE = 2 << 20
"""Bytes of the pages of memory files on hosts that give them huge pages."""
ROOM = 1 << 18
"""Number of bytes that are read at once."""
PREFIX = struct.Struct("<II")
_quote = json.encoder.encode_basestring_ascii
encode_json = json.JSONEncoder(separators=(",", ":")).encode
_decode = json.JSONDecoder().raw_decode


class BadFrame(ValueError):
    """The peer does not follow the protocol, so its connection cannot be used any more."""


def pack_frame(header: dict, *parts: bytes) -> bytes:
    return _frame(encode_json(header).encode(), b"".join(parts))


def pack_call(name: str, session: str | None, seed: int, attempt: int, code: bytes, stdin: bytes) -> bytes:
    """The frame of the call `name`, formatted without the JSON encoder, which takes longer to start than to run."""
    text = '{"op":"SubmitCall","id":%s,"session":%s,"seed":%d,"code":%d,"attempt":%d}' % (  # noqa: UP031
        _quote(name), "null" if session is None else _quote(session), seed, len(code), attempt
    )  # fmt: skip
    return _frame(text.encode(), code + stdin)


def _frame(header: bytes, rest: bytes) -> bytes:
    total = 4 + len(header) + len(rest)
    if total > MAX_FRAME:
        raise BadFrame(f"a frame of {total} bytes; must be at most {MAX_FRAME}")
    return PREFIX.pack(total, len(header)) + header + rest


class FrameReader:
    """Reads frames from a stream socket into one buffer, which is reused so that its pages stay in memory."""

    def __init__(self) -> None:
        self._view = memoryview(bytearray(ROOM))
        self._filled = 0
        self.more = False
        """Whether the last read filled the buffer, so that the socket may hold more."""

    def read(self, sock: socket.socket) -> list[tuple[dict, bytes]]:
        """Header and raw bytes of every frame that one more read completes.

        Raises:
            EOFError: the peer hung up.
            BlockingIOError: no data has arrived, on a non-blocking socket.
            BadFrame: a frame is too long, inconsistent, or not JSON.
        """
        view, start, filled = self._view, 0, self._filled
        got = sock.recv_into(view[filled:] if filled else view)
        if not got:
            raise EOFError
        end = filled + got
        self.more = end == len(view)
        frames = []
        while end - start >= 8:
            total, size = PREFIX.unpack_from(view, start)
            stop, middle = start + 4 + total, start + 8 + size
            if total > MAX_FRAME or middle > stop:
                raise BadFrame(f"a frame of {total} bytes with a header of {size}; must be at most {MAX_FRAME} in all")
            if stop > end:
                break
            frames.append((_header(view[start + 8 : middle]), bytes(view[middle:stop])))
            start = stop
        if start != end or filled:
            self._keep(start, end)
        return frames

    def _keep(self, start: int, end: int) -> None:
        """Move the beginning of a frame to the front of a buffer that is large enough for the whole frame."""
        rest = self._filled = end - start
        needed = max(ROOM, 4 + PREFIX.unpack_from(self._view, start)[0]) if rest >= 8 else ROOM
        old = self._view
        if needed != len(old):
            self._view = memoryview(bytearray(needed))
        if rest:
            self._view[:rest] = old[start:end]


def _header(data: memoryview) -> dict:
    try:
        header, end = _decode(str(data, "ascii"))
    except ValueError as error:
        raise BadFrame(f"frame header is not JSON: {error}") from error
    if type(header) is not dict or end != len(data):
        raise BadFrame("frame header is not an object")
    return header


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def receive_datagram(sock: socket.socket) -> tuple[dict | None, list[int]]:
    """Receive one datagram and its descriptors; None at the end of the connection."""
    space = socket.CMSG_SPACE(4 * MAX_FDS)
    data, ancillary, _, _ = sock.recvmsg(MAX_DATAGRAM, space, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return (json.loads(data) if data else None), list(fds)


def rights(*fds: int) -> list[tuple[int, int, array.array]]:
    """Ancillary data of a message that carries descriptors."""
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def make_memory_file(content: bytes = b"", *, sealed: bool = False) -> int:
    """A file in memory that is passed to a program; `sealed`: nobody can change its content or add to it.

    Raises OSError, and leaves nothing open, if the host has no room.
    """
    fd = os.memfd_create("box", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
        if sealed:
            os.lseek(fd, 0, os.SEEK_SET)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
    except OSError:
        os.close(fd)
        raise
    return fd


def discard(fds: Iterable[int]) -> None:
    """Close memory files that are not needed any more, and free what they hold, whoever else has them open.

    A session may keep copies of the descriptors that it got for a cell. Sealed against growth before they are emptied,
    such files stay empty: `fallocate` cannot add to them either. At L0 a program may have sealed them against this.
    """
    for fd in fds:
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
            os.ftruncate(fd, 0)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        os.close(fd)


def file_size(fd: int) -> int:
    """Bytes that a memory file takes: its length, or its space if more is reserved than its last page."""
    info = os.fstat(fd)
    space = 512 * info.st_blocks
    return space if space > info.st_size + LARGEST_PAGE else info.st_size
