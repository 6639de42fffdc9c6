"""Messages between the trainer, the executor process, its roots and their workers; standard library only.

Trainer and executor exchange frames on a stream: `u32 total | u32 header length | JSON header | raw bytes`. Executor,
roots and workers exchange JSON datagrams on SOCK_SEQPACKET pairs, with descriptors beside them.
"""

import array
import json
import socket
import struct

MAX_FRAME = 16 << 20
"""Longest frame, in bytes; checked before anything is allocated for it."""
MAX_DATAGRAM = 1 << 16
ROOM = 1 << 18
"""Bytes read at once."""
PREFIX = struct.Struct("<II")
_quote = json.encoder.encode_basestring_ascii
_encode = json.JSONEncoder(separators=(",", ":")).encode
_decode = json.JSONDecoder().raw_decode


class BadFrame(Exception):
    """The peer does not keep the protocol; its connection is worthless now."""


def pack_frame(header: dict, *parts: bytes) -> bytes:
    """One frame as bytes."""
    return _frame(_encode(header).encode(), b"".join(parts))


def pack_call(name: str, session: str | None, seed: int, attempt: int, code: bytes, stdin: bytes) -> bytes:
    """The frame of a call; the one header that is written without the encoder, whose start takes longer than its work.

    Args:
        name: Its id.
    """
    text = '{"op":"call","id":%s,"session":%s,"seed":%d,"code":%d,"attempt":%d}' % (  # noqa: UP031
        _quote(name), "null" if session is None else _quote(session), seed, len(code), attempt
    )  # fmt: skip
    return _frame(text.encode(), code + stdin)


def _frame(header: bytes, rest: bytes) -> bytes:
    total = 4 + len(header) + len(rest)
    if total > MAX_FRAME:
        raise BadFrame(f"a frame of {total} bytes, at most {MAX_FRAME} are allowed")
    return PREFIX.pack(total, len(header)) + header + rest


class FrameReader:
    """Frames out of a stream socket; what is read lands in one buffer, whose pages are not asked for anew each time."""

    def __init__(self) -> None:
        self._view = memoryview(bytearray(ROOM))
        self._filled = 0
        self.more = False
        """Whether the last read filled the buffer, so that the socket may hold more."""

    def read(self, sock: socket.socket) -> list[tuple[dict, bytes]]:
        """Header and raw bytes of every frame that is complete after one more read.

        Raises:
            EOFError: the peer hung up.
            BlockingIOError: nothing is there, on a socket that does not wait.
            BadFrame: too long, inconsistent, or not JSON.
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
                raise BadFrame(f"frame lengths {total} and {size} are not possible")
            if stop > end:
                break
            frames.append((read_header(view[start + 8 : middle]), bytes(view[middle:stop])))
            start = stop
        if start != end or filled:
            self._keep(start, end)
        return frames

    def _keep(self, start: int, end: int) -> None:
        """Move the beginning of a frame to the front of a buffer that has room for all of it."""
        rest = self._filled = end - start
        wanted = max(ROOM, 4 + PREFIX.unpack_from(self._view, start)[0]) if rest >= 8 else ROOM
        old = self._view
        if wanted != len(old):
            self._view = memoryview(bytearray(wanted))
        if rest:
            self._view[:rest] = old[start:end]


def read_header(data: memoryview) -> dict:
    """The JSON object of a frame.

    Raises:
        BadFrame: it is something else.
    """
    try:
        header, end = _decode(str(data, "ascii"))
    except ValueError as error:
        raise BadFrame(f"frame header is not JSON: {error}") from error
    if type(header) is not dict or end != len(data):
        raise BadFrame("frame header is not an object")
    return header


def pair() -> tuple[socket.socket, socket.socket]:
    """A connected pair that keeps message boundaries."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(sock: socket.socket, message: dict, fds: tuple[int, ...] = ()) -> None:
    """One datagram with descriptors."""
    data = _encode(message).encode()
    if fds:
        sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
    else:
        sock.send(data)


def receive(sock: socket.socket, max_fds: int = 8, flags: int = 0) -> tuple[dict | None, list[int]]:
    """One datagram and its descriptors; None at the end of the connection.

    Raises:
        BlockingIOError: nothing is there, on a socket that does not wait.
    """
    space = socket.CMSG_SPACE(max_fds * 4)
    data, ancillary, _, _ = sock.recvmsg(MAX_DATAGRAM, space, flags | socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return (json.loads(data) if data else None), list(fds)
