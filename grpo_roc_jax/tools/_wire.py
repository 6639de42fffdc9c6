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
PREFIX = struct.Struct("<II")


class BadFrame(Exception):
    """The peer does not keep the protocol; its connection is worthless now."""


def pack_frame(header: dict, *parts: bytes) -> bytes:
    """One frame as bytes."""
    text = json.dumps(header, separators=(",", ":")).encode()
    total = 4 + len(text) + sum(map(len, parts))
    if total > MAX_FRAME:
        raise BadFrame(f"a frame of {total} bytes, at most {MAX_FRAME} are allowed")
    return b"".join((PREFIX.pack(total, len(text)), text, *parts))


class FrameReader:
    """Frames out of a byte stream that arrives in pieces."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[dict, bytes]]:
        """Header and raw bytes of every frame that is complete now.

        Raises:
            BadFrame: too long, inconsistent, or not JSON.
        """
        buffer = self._buffer
        buffer += data
        frames, start = [], 0
        while len(buffer) - start >= 8:
            total, header_size = PREFIX.unpack_from(buffer, start)
            if total > MAX_FRAME or header_size + 4 > total:
                raise BadFrame(f"frame lengths {total} and {header_size} are not possible")
            end = start + 4 + total
            if len(buffer) < end:
                break
            middle = start + 8 + header_size
            try:
                header = json.loads(buffer[start + 8 : middle])
            except ValueError as error:
                raise BadFrame(f"frame header is not JSON: {error}") from error
            if not isinstance(header, dict):
                raise BadFrame("frame header is not an object")
            frames.append((header, bytes(buffer[middle:end])))
            start = end
        del buffer[:start]
        return frames


def pair() -> tuple[socket.socket, socket.socket]:
    """A connected pair that keeps message boundaries."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(sock: socket.socket, message: dict, fds: tuple[int, ...] = ()) -> None:
    """One datagram with descriptors."""
    data = json.dumps(message, separators=(",", ":")).encode()
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
