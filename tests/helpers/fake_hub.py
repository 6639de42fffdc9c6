"""A hub of data sets on loopback: what `datasets` and `huggingface_hub` ask for one small data set."""

import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def fake_hub(name, files):
    """(address, paths that were asked for) of a hub with one data set, whose branch `main` is at `COMMIT`.

    Args:
        name: `OWNER/NAME`.
        files: Path -> bytes.
    """
    requests = []

    def entry(path):
        return {
            "type": "file",
            "path": path,
            "rfilename": path,
            "size": len(files[path]),
            "oid": hashlib.sha1(files[path]).hexdigest(),
        }

    about = {"id": name, "sha": COMMIT, "private": False, "gated": False, "disabled": False, "tags": []}
    about |= {"downloads": 0, "likes": 0, "siblings": [entry(path) for path in files]}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self.path.partition("?")[0]
            requests.append(path)
            kind, _, rest = path.removeprefix(f"/api/datasets/{name}").strip("/").partition("/")
            file = path.removeprefix(f"/datasets/{name}/resolve/").partition("/")[2]
            if path.startswith(f"/datasets/{name}/resolve/") and file in files:
                headers = {"ETag": f'"{entry(file)["oid"]}"', "X-Repo-Commit": COMMIT}
                return self.send(200, files[file], **headers)
            if not path.startswith(f"/api/datasets/{name}"):
                return self.send(404, b"", **{"X-Error-Code": "EntryNotFound" if file else "RepoNotFound"})
            if kind in ("", "revision"):
                return self.send(200, about)
            under = rest.partition("/")[2]
            wanted = json.loads(body)["paths"] if kind == "paths-info" else [p for p in files if p.startswith(under)]
            return self.send(200, [entry(path) for path in wanted if path in files])

        do_GET = do_HEAD = do_POST = answer

        def send(self, status, content, **headers):
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for header, value in {"Content-Length": len(data), "Content-Type": "application/json", **headers}.items():
                self.send_header(header, str(value))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def log_message(self, *words):
            """Nothing is printed."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()
