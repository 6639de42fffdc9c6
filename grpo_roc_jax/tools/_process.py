"""The executor process as the trainer holds it: started by exec, one connection, ended by hanging up."""

import socket
import subprocess
import time
from typing import Any

from grpo_roc_jax.tools import _boot, _wire
from grpo_roc_jax.tools.executor import Capabilities, ExecutorFailed, IsolationUnavailable

END_S = 10.0
"""Time the process has to end its programs and clean up."""


class ExecutorProcess:
    """A running executor process whose first workers are up.

    Args:
        settings: Fields of `ToolsConfig`, automatic choices made.

    Raises:
        IsolationUnavailable: the wanted level cannot be reached.
        ExecutorFailed: the process did not become ready.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.link, theirs = socket.socketpair()
        # Results that end between two polls of the trainer wait here; the kernel caps it as it must.
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        self.process = _boot.start("_supervisor", str(theirs.fileno()), fd=theirs.fileno(), isolated=False)
        theirs.close()
        self.reader = _wire.FrameReader()
        try:
            self.link.sendall(_wire.pack_frame({"op": "start", "config": settings}))
            answer = self._first_answer(settings["start_timeout_s"])
        except (OSError, EOFError, _wire.BadFrame) as error:
            answer = {"op": "failed", "message": f"the executor process ended while it started: {error}"}
        if answer["op"] != "ready":
            self.link.close()
            self.process.wait()
            failure = IsolationUnavailable if answer["op"] == "unavailable" else ExecutorFailed
            raise failure(answer["message"])
        self.link.setblocking(False)
        self.capabilities = Capabilities(
            answer["level"], tuple(answer["missing"]), tuple(answer["layers"]), answer["versions"], answer["workers"]
        )

    def _first_answer(self, limit_s: float) -> dict:
        deadline = time.monotonic() + limit_s
        while True:
            self.link.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                for header, _ in self.reader.read(self.link):
                    return header
            except TimeoutError:
                message = f"no worker was ready within {limit_s:g} s; raise tools.start_timeout_s or preload less"
                return {"op": "failed", "message": message}

    def kill(self) -> None:
        """What is left of a process that ended by a fault."""
        self.link.close()
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Hang up, which ends it with everything it runs, and wait for that."""
        self.link.close()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()
