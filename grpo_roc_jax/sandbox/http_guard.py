"""What every HTTP server of the package checks before it reads a request: who sends it, for how long, how many.

Programs on this machine may send requests, and so may whoever holds the token; a page in a browser may not, under
whatever name it reaches the server. The head and the body of a request share one deadline. When all connections are in
use, a new one replaces the connection that has waited longest without a request. Standard library only.
"""

import hmac
import io
import ipaddress
import logging
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Generic, TypeVar

log = logging.getLogger(__name__)
REQUEST_S = 30.0
"""Seconds from the first byte of a request, or from the connection, to the end of its body."""
IDLE_S = 120.0
"""Seconds that a connection may wait for its next request."""
SEND_S = 60.0
"""Seconds that a client may take to receive an answer."""
LINGER_S = 2.0
"""Seconds for which data from a refused client is discarded, so that it reads the answer before the connection ends."""
LINGER_BYTES = 64 << 20
JSON_TYPES = ("application/json", "text/json")
SAME_SITE = ("none", "same-origin")
"""Values of `Sec-Fetch-Site` for requests that no other site has caused: typed addresses, and the page's
own requests."""
PORTS = {"http": ":80", "https": ":443"}

Link = TypeVar("Link", bound=Hashable)


@dataclass(frozen=True)
class RequestHead:
    """The headers that identify the sender; empty if a header is absent. A header that occurs twice has both values."""

    method: str
    host: str = ""
    origin: str = ""
    site: str = ""
    """`Sec-Fetch-Site`."""
    content_type: str = ""
    authorization: str = ""

    @classmethod
    def read(cls, method: str, values: Callable[[str], Any]) -> "RequestHead":
        """The head of a request; `values` returns all values of a header."""
        names = ("Host", "Origin", "Sec-Fetch-Site", "Content-Type", "Authorization")
        return cls(method, *(",".join(values(name) or ()) for name in names))


def refusal(head: RequestHead, token: str, variable: str, port: int | None = None) -> tuple[int, str] | None:
    """Status and reason if a request is refused; None if it may be answered.

    Args:
        head: Head of the request.
        token: Token that requests must carry; if it is empty, the request must name this machine as its host.
        variable: Name of the environment variable with the token, for the message.
        port: Port that `Host` must name; None for any.
    """
    if head.site and head.site not in SAME_SITE:
        return 403, f"another site asked (Sec-Fetch-Site is {head.site!r:.80}); ask from a program, or from this page"
    if head.origin and not _is_origin_of(head.origin, head.host):
        return 403, f"another site asked (Origin is {head.origin!r:.80}, Host {head.host!r:.80}); ask from a program"
    if token:
        good = hmac.compare_digest(head.authorization.encode(), f"Bearer {token}".encode())
        return None if good else (401, f"the request must carry the bearer token of {variable}")
    # A page in a browser can reach loopback under a host name of its own.
    if not is_loopback(head.host):
        return 403, f"Host is {head.host!r:.80}; must be localhost or its address"
    if port is not None and not head.host.endswith(f":{port}"):
        return 403, f"Host is {head.host!r:.80}; its port must be {port}"
    media = head.content_type.partition(";")[0].strip().lower()
    if head.method not in ("GET", "HEAD") and media and media not in JSON_TYPES and not media.endswith("+json"):
        return 415, f"Content-Type is {media!r:.80}; must be application/json"
    return None


def _is_origin_of(origin: str, host: str) -> bool:
    """Whether a page of this origin was served under this host."""
    scheme, separator, name = origin.lower().partition("://")
    default = PORTS.get(scheme)
    return bool(separator and default and name) and name.removesuffix(default) == host.lower().removesuffix(default)


def is_loopback(host: str) -> bool:
    """Whether a name or address, possibly with a port, means only this host."""
    try:
        name = urllib.parse.urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class Connections(Generic[Link]):
    """The open connections of a server, up to a maximum number; thread-safe."""

    def __init__(self, most: int):
        self.most = most
        self._mutex = threading.Lock()
        self._busy: set[Link] = set()
        self._new: dict[Link, None] = {}
        """Connections without an accepted request so far, the oldest first."""
        self._idle: dict[Link, None] = {}
        """Connections between two requests, the longest idle first."""

    def __len__(self) -> int:
        return len(self._busy) + len(self._new) + len(self._idle)

    def open(self, link: Link) -> Link | None:
        """Counts a new connection. Returns the connection to close in exchange: one that waits, or the new one if none
        does."""
        with self._mutex:
            if len(self) < self.most:
                self._new[link] = None
                return None
            waiting = self._new or self._idle
            if not waiting:
                return link
            oldest = next(iter(waiting))
            del waiting[oldest]
            self._new[link] = None
            return oldest

    def begin(self, link: Link) -> None:
        """Marks a request of this connection as accepted."""
        with self._mutex:
            if self._new.pop(link, self) is None or self._idle.pop(link, self) is None:
                self._busy.add(link)

    def is_new(self, link: Link) -> bool:
        """Whether no request of this connection has been accepted so far."""
        return link in self._new

    def end(self, link: Link) -> None:
        """Marks its request as answered."""
        with self._mutex:
            if link in self._busy:
                self._busy.remove(link)
                self._idle[link] = None

    def close(self, link: Link) -> None:
        """Marks the connection as closed."""
        with self._mutex:
            self._busy.discard(link)
            self._new.pop(link, None)
            self._idle.pop(link, None)


class GuardedServer(ThreadingHTTPServer):
    """A server with a thread for each connection, up to a maximum number of connections."""

    daemon_threads = True
    request_queue_size = 256
    most_connections = 512
    request_s = REQUEST_S
    """Seconds from the first byte of a request, or from the connection, to the end of its body."""

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]):
        self.connections: Connections[socket.socket] = Connections(self.most_connections)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        late = self.connections.open(request)
        if late is not None:
            with suppress(OSError):  # its thread notices, and closes it
                late.shutdown(socket.SHUT_RDWR)
        if late is request:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.connections.close(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a connection of %s ended early", client_address, exc_info=True)


class DeadlineReader(io.RawIOBase):
    """Reads from a connection until a deadline, however slowly the data arrives."""

    def __init__(self, link: socket.socket):
        self._link, self.until_s = link, 0.0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Raises TimeoutError after `until_s` of the monotonic clock."""
        left = self.until_s - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request was not there in time")
        self._link.settimeout(left)
        return self._link.recv_into(buffer)


class GuardedHandler(BaseHTTPRequestHandler):
    """Requests of one connection, each with one deadline for its head and body."""

    server: GuardedServer
    server_version = "grpo-roc"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        self._reader = DeadlineReader(self.connection)
        self.rfile = io.BufferedReader(self._reader)
        self._answered = False
        self.unread = 0
        """Number of bytes of a request that were left unread; the connection is closed after it."""

    def handle_one_request(self) -> None:
        now = time.monotonic
        try:
            if self._answered:
                self._reader.until_s = now() + IDLE_S
                self.rfile.peek(1)
            self._reader.until_s = now() + self.server.request_s
            super().handle_one_request()
        except OSError:  # the client is late, or has closed the connection
            self.close_connection = True
        self._answered = True
        self.server.connections.end(self.connection)

    def head(self) -> RequestHead:
        """The head of the request, which decides whether it is accepted."""
        return RequestHead.read(self.command, self.headers.get_all)

    def admitted(self) -> None:
        """Accepts the request; its connection is not closed in favor of others."""
        self.server.connections.begin(self.connection)

    def reply(self, status: int, content: bytes, kind: str = "application/json", **headers: str) -> None:
        """Sends an answer; names of headers have `_` for `-`."""
        self.connection.settimeout(SEND_S)
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def refuse(self, status: int, content: bytes, kind: str = "application/json", **headers: str) -> None:
        """Sends an answer before the body of the request was read, which ends the connection."""
        self.unread = LINGER_BYTES
        self.reply(status, content, kind, Connection="close", **headers)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        self.unread = LINGER_BYTES
        super().send_error(code, message, explain)

    def finish(self) -> None:
        super().finish()
        if not self.unread:
            return
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self._reader.until_s = time.monotonic() + LINGER_S
            buffer = bytearray(1 << 16)
            while self.unread > 0 and (count := self._reader.readinto(buffer)):
                self.unread -= count

    def log_message(self, form: str, *values: Any) -> None:
        log.debug(form, *values)
