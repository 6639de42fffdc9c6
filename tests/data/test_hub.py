"""Problem sets by hub id: a folder in the form of the hub stands for one, or a hub on loopback."""

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from grpo_roc_jax.data.config import DataConfig
from grpo_roc_jax.data.hub import load_hub
from grpo_roc_jax.data.pipeline import make_problem_stream

if not importlib.util.find_spec("datasets"):  # which takes a second to import
    pytest.skip("datasets is not installed", allow_module_level=True)


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "sums").mkdir()
    for split, rows in (("train", [("2+3", "5"), ("1+1", "2")]), ("test", [("4+4", "8")])):
        lines = [json.dumps({"question": question, "answer": answer}) for question, answer in rows]
        (tmp_path / "sums" / f"{split}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return tmp_path / "sums"


def test_rows_of_a_commit_become_problems(folder):
    problems, report = load_hub(f"hub:{folder}@{COMMIT}")
    assert [(p.prompt, p.answer, p.source) for p in problems] == [("2+3", "5", "sums"), ("1+1", "2", "sums")]
    assert f"@{COMMIT}::train: 2 problems of 2 rows" in str(report)
    assert [p.prompt for p in load_hub(f"hub:{folder}@{COMMIT}::test")[0]] == ["4+4"]


def test_a_branch_is_looked_up_once_and_its_commit_recorded(folder, monkeypatch):
    revisions = []

    def info(self, name, revision):
        revisions.append(revision)
        return SimpleNamespace(sha=COMMIT)

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", info)
    stream = make_problem_stream(DataConfig(sources=(f"hub:{folder}@main",)), problems=2, seed=0)
    assert {problem.answer for problem in next(stream)} == {"5", "2"} and revisions == ["main"]
    assert f"@{COMMIT}" in stream.notes[0]


@contextmanager
def fake_hub(name, files):
    """(address, paths that were asked for) of a hub on loopback with one data set, `OWNER/NAME` with these files (by
    path), whose branch `main` is at `COMMIT`: what `datasets` and `huggingface_hub` ask for one small data set."""
    requests = []

    def entry(path):
        oid = hashlib.sha1(files[path]).hexdigest()
        return {"type": "file", "path": path, "rfilename": path, "size": len(files[path]), "oid": oid}

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


LOAD = """
import sys
from grpo_roc_jax.data.hub import load_hub
problems, report = load_hub(sys.argv[1])
print([(p.prompt, p.answer, p.source) for p in problems], report)
"""


def test_a_data_set_of_a_hub_is_read_at_its_commit_and_afterwards_without_a_network(folder, tmp_path):
    """In processes of their own, since the hub's address is read when its package is imported."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}

    def load(source, **variables):
        # Only what is said here: other tests and the machine set variables of the hub, HF_HUB_OFFLINE among them.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        environment = {**inherited, "HF_HOME": str(tmp_path / "home"), "NO_PROXY": "*", **variables}
        done = subprocess.run([sys.executable, "-c", LOAD, source], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    with fake_hub("owner/sums", files) as (address, paths):
        online = load("hub:owner/sums@main", HF_ENDPOINT=address)
    rows = "[('2+3', '5', 'sums'), ('1+1', '2', 'sums')]"
    assert online.startswith(rows) and f"hub:owner/sums@{COMMIT}::train: 2 problems of 2 rows" in online
    fetched = [path for path in paths if "/resolve/" in path]
    assert fetched and all(f"/resolve/{COMMIT}/" in path for path in fetched), "files of no branch"
    assert load(f"hub:owner/sums@{COMMIT}", HF_ENDPOINT=address, HF_HUB_OFFLINE="1") == online


@pytest.mark.parametrize(
    ("source", "message"),
    [("hub:owner/name", "must be hub:OWNER/NAME@REVISION"), (f"hub:/no/such/folder@{COMMIT}", "no/such/folder")],
)
def test_what_cannot_be_loaded_is_said(source, message, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=message):
        load_hub(source)
