"""Serves the page on loopback: only GET, two kinds of addresses (the page, and questions with numbers), no file names.

Text of the policy cannot act in the page: it is inserted as text, and the content security policy of the page allows
only its own script and style, by their hashes, and requests to itself. A request whose `Host` is not loopback is
refused, so no other name that resolves to this machine reaches the traces.
"""

import contextlib
import json
import urllib.parse
from typing import Any

from grpo_roc_jax.record.codec import finite
from grpo_roc_jax.sandbox.http_guard import GuardedHandler, GuardedServer, refusal
from grpo_roc_jax.view.answers import Block, Runs, block_of
from grpo_roc_jax.view.pages import page, policy

ADDRESS = "127.0.0.1"


class PageServer(GuardedServer):
    """Serves the page of some runs; port 0 takes a free one."""

    most_connections = 128

    def __init__(self, runs: Runs, port: int = 0) -> None:
        self.runs = runs
        self.page = page(None).encode("utf-8")
        super().__init__((ADDRESS, port), PageHandler)

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/"


class PageHandler(GuardedHandler):
    """One request."""

    server: PageServer

    def do_GET(self) -> None:
        """Answers a request for the page or a question."""
        if reply := refusal(self.head(), "", "", self.server.server_port):
            return self._refuse(*reply)
        self.admitted()
        path, _, query = self.path.partition("?")
        if path == "/":
            return self._send(200, self.server.page, "text/html; charset=utf-8")
        try:
            reply = answer(self.server.runs, path.removeprefix("/api/"), dict(urllib.parse.parse_qsl(query)))
        except (KeyError, ValueError, IndexError) as error:
            return self._refuse(404, f"no such thing: {error}")
        except OSError as error:  # a run may be removed or continued while it is read
            return self._refuse(503, f"the run cannot be read: {error}")
        except Exception as error:  # a damaged line affects only its own answer
            return self._refuse(500, f"the log cannot be read: {type(error).__name__}: {error!s:.300}")
        self._send(200, reply, "application/json")

    def _refuse(self, status: int, why: str) -> None:
        self._send(status, why.encode("utf-8", "replace"), "text/plain; charset=utf-8")

    def _send(self, status: int, content: bytes, kind: str) -> None:
        headers = {
            "Content-Security-Policy": policy(served=True),
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-store",
        }
        with contextlib.suppress(ConnectionError):
            self.reply(status, content, kind, **headers)


def answer(runs: Runs, name: str, query: dict[str, str]) -> bytes:
    """The answer to a question, as JSON.

    Raises:
        KeyError, ValueError, IndexError: There is no such question, run or trajectory.
    """
    if name == "state":
        return dumps(runs.state())
    if name == "evaluations":
        return dumps(runs.evaluations())
    run = int(query["run"])
    if not 0 <= run < len(runs.paths):
        raise IndexError(f"run {run} of {len(runs.paths)}")
    if name == "metrics":
        return dumps(runs.metrics(run))
    if name == "blocks":
        return b"[" + b",".join(runs.blocks(run, _blocks(query))) + b"]"
    if name == "search":
        return dumps(runs.search(run, query["text"], _blocks(query)))
    if name == "trajectory":
        trajectory = runs.trajectory(run, block_of(query["block"]), int(query["row"]))
        if trajectory is None:
            raise KeyError(f"trajectory {query['block']}.{query['row']} that can be read")
        return dumps(trajectory)
    raise KeyError(name)


def dumps(value: Any) -> bytes:
    return json.dumps(finite(value)).encode("ascii")


def _blocks(query: dict[str, str]) -> list[Block]:
    return [block_of(name) for name in query["blocks"].split(",") if name]
