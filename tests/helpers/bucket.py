"""A bucket of object storage on loopback: the part of the JSON API of Google Cloud Storage that TensorStore uses."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from urllib.parse import parse_qsl, unquote, urlsplit


class Bucket:
    """Objects by name. `refuse` counts requests that are still to be answered with `status`."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.refuse, self.status, self.generations, self.lock = 0, 503, count(1), threading.Lock()
        self.environ = {"GOOGLE_AUTH_TOKEN_FOR_TESTING": "token"}

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, bytes, int]:
        """(status, content, generation) of a request."""
        split = urlsplit(path)
        words = dict(parse_qsl(split.query))
        name = words["name"] if method == "POST" else unquote(split.path.partition("/o/")[2])
        with self.lock:
            if self.refuse:
                self.refuse -= 1
                return self.status, b"", 0
            if method == "POST":
                self.objects[name] = body, next(self.generations)
                return 200, json.dumps(self.about(name)).encode(), self.objects[name][1]
            if not name:
                items = [self.about(key) for key in sorted(self.objects) if key.startswith(words.get("prefix", ""))]
                return 200, json.dumps({"kind": "storage#objects", "items": items}).encode(), 0
            if name not in self.objects:
                return 404, b"", 0
            if method == "DELETE":
                del self.objects[name]
                return 204, b"", 0
            return 200, *self.objects[name]

    def about(self, name: str) -> dict[str, str]:
        content, generation = self.objects[name]
        return {"name": name, "size": str(len(content)), "generation": str(generation), "metageneration": "1"}


@contextmanager
def served():
    """A bucket that answers within the block."""
    bucket = Bucket()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def respond(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, content, generation = bucket.answer(self.command, self.path, body)
            self.send_response_only(status)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("x-goog-generation", str(generation))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_DELETE = respond

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        bucket.environ["TENSORSTORE_GCS_HTTP_URL"] = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield bucket
        finally:
            server.shutdown()
