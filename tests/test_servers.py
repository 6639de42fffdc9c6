"""The three servers against what a browser and a stranger may send: who is let in, for how long, and how it ends."""

import contextlib
import http.client
import json
import socket
import threading
import time

import pytest

from grpo_roc_jax.sandbox._messages import ExecutorSettings
from grpo_roc_jax.sandbox.http_guard import RequestHead, is_loopback, refusal
from grpo_roc_jax.sandbox.server import make_server
from grpo_roc_jax.serving.server import ServerLimits
from grpo_roc_jax.view.answers import Runs
from grpo_roc_jax.view.page_server import PageServer
from tests.helpers.demo import write_run
from tests.helpers.serving import scripted

PROGRAM = {"code": "print(1)"}
COMPLETION = {"prompt": "x", "max_tokens": 4}
POSTS = {"serve-tools": ("/run_code", PROGRAM), "serve": ("/v1/completions", COMPLETION)}
"""What a page elsewhere would like to send."""
MOST = 24
"""Connections at a time."""


@contextlib.contextmanager
def running(name, folder, token="", request_s=30.0):
    """The port of one of the servers."""
    if name == "serve":
        limits = ServerLimits(connections=MOST, request_s=request_s)
        with scripted(*["<answer>1</answer>"] * 99, token=token, limits=limits) as served:
            yield served.port
        return
    if name == "view":
        few = type("FewConnections", (PageServer,), {"most_connections": MOST})
        server = few(Runs([str(write_run(folder / "run", 0, steps=1, groups=1, size=2))]))
    else:
        settings = ExecutorSettings(pool_size=1, root_count=1, bare_root=False, preload=())
        server, _ = make_server(settings, port=0, token=token, connections=MOST)
    server.request_s = request_s
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(params=["view", "serve-tools", "serve"])
def name(request):
    return request.param


@pytest.fixture
def port(name, tmp_path):
    with running(name, tmp_path) as number:
        yield number


def ask(port, path, body=None, method=None, link=None, **headers):
    """(status, content, headers) of one request; on `link` if one is given."""
    line = link or http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    data = None if body is None else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    line.request(method or ("GET" if data is None else "POST"), path, data, named)
    answer = line.getresponse()
    content = answer.read()
    if link is None:
        line.close()
    return answer.status, content, answer.headers


GET = {"view": "/api/state", "serve-tools": "/v1/ping", "serve": "/v1/models"}


def test_another_site_and_a_form_reach_no_server(name, port):
    """Which pages and bodies are refused, `test_the_check_by_hand` says; here each server asks it before it answers."""
    evil = {"Origin": "https://evil.example"}
    other_port = {"Origin": f"http://127.0.0.1:{port + 1}", "Sec_Fetch_Site": "same-site"}
    rebound = {"Host": f"rebound.example:{port}", "Origin": f"http://rebound.example:{port}"}
    for headers, status in ((evil, 403), (other_port, 403), (rebound, 403), ({}, 200)):
        assert ask(port, GET[name], **headers)[0] == status, headers
    if name not in POSTS:
        assert ask(port, "/", {}, method="POST")[0] == 501
        return
    for media in ("text/plain", "application/json"):
        status, content, _ = ask(port, *POSTS[name], Content_Type=media, **evil)
        assert status == 403 and b"run_result" not in content, media
    status, content, _ = ask(port, *POSTS[name], Content_Type="multipart/form-data; boundary=x")
    assert status == 415 and b"must be application/json" in content
    assert ask(port, *POSTS[name], Content_Type="Application/JSON; charset=utf-8")[0] == 200


def half_open(port, number, text=b"POST /run_code HTTP/1.1\r\nHost: localhost\r\nX-Drip: "):
    links = [socket.create_connection(("127.0.0.1", port)) for _ in range(number)]
    for link in links:
        link.sendall(text)
    return links


def test_half_open_connections_do_not_lock_others_out(name, port):
    """As many as there may be, without a right to ask, and then as many again: each honest request is answered."""
    links = []
    for _ in range(3):
        links += half_open(port, MOST)
        begun = time.monotonic()
        assert ask(port, GET[name])[0] == 200 and time.monotonic() - begun < 5
    for link in links:
        link.close()


@pytest.mark.parametrize("text", [b"", b"POST /run_code HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n"])
def test_a_request_that_drips_ends_at_one_deadline(name, tmp_path, text):
    if name not in POSTS and b"Length" in text:
        return  # it takes none
    with running(name, tmp_path, request_s=1.0) as port:
        (link,) = half_open(port, 1, text.replace(b"/run_code", POSTS.get(name, ("/run_code",))[0].encode()))
        begun = time.monotonic()
        link.settimeout(0.05)
        content = b"?"
        with contextlib.suppress(ConnectionError):
            while content and time.monotonic() - begun < 10:
                link.sendall(b"a" if text else b"")  # a byte each twentieth of a second
                with contextlib.suppress(TimeoutError):
                    content = link.recv(1 << 12)
        assert 0.5 < time.monotonic() - begun < 4


@pytest.mark.parametrize("server", ["serve-tools", "serve"])
def test_a_refusal_before_the_body_ends_the_connection_and_is_read(server, tmp_path):
    """A client that keeps its connection: the refusal says that it ends, and the next request is answered."""
    path, body = POSTS[server]
    with running(server, tmp_path, token="secret") as port:
        link = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        right = {"Authorization": "Bearer secret", "Content_Type": "application/json"}
        for i in range(10):
            large = body | {"padding": "x" * (0 if i % 2 else 3 << 20)}  # more than the buffers of the sockets hold
            status, content, headers = ask(port, path, large, link=link)
            assert status == 401 and b"bearer token" in content and headers["Connection"] == "close"
            assert ask(port, path, body, link=link, **right)[0] == 200
            assert ask(port, "/elsewhere", body, link=link, **right)[0] == 404
        assert ask(port, path, body, Host="proxy.example", Origin="https://evil.example", **right)[0] == 403
        status, content, headers = ask(port, path, {}, link=link, **right, Content_Length=str(1 << 30))
        assert (status, headers["Connection"]) == (413, "close") and b"must be at most" in content


@pytest.mark.parametrize(
    ("head", "token", "port", "status"),
    [
        ({"host": "LOCALHOST:80", "origin": "http://localhost"}, "", None, None),
        ({"host": "[::1]:9", "origin": "http://[::1]:9"}, "", 9, None),
        ({"host": "localhost:9"}, "", 8, 403),
        ({"host": "127.0.0.1:9", "origin": "http://localhost:9"}, "", 9, 403),
        ({"host": "rebound.example:9", "origin": "http://rebound.example:9", "site": "same-origin"}, "", 9, 403),
        ({"host": "localhost", "site": "none,cross-site"}, "", None, 403),
        ({"host": "a.example", "origin": "https://a.example", "authorization": "Bearer t"}, "t", None, None),
        ({"host": "a.example", "authorization": "Bearer té"}, "t", None, 401),
        ({"host": "a.example", "origin": "https://evil.example", "authorization": "Bearer t"}, "t", None, 403),
        ({"host": "localhost", "content_type": "application/json,text/plain"}, "", None, 415),
    ],
)
def test_the_check_by_hand(head, token, port, status):
    answer = refusal(RequestHead(**{"method": "POST"} | head), token, "VARIABLE", port)
    assert (answer and answer[0]) == status
    assert all(map(is_loopback, ["localhost", "127.0.0.1", "127.9.9.9:1", "[::1]:80"]))
    assert not any(map(is_loopback, ["", "0.0.0.0", "example.org", "[::1", "127.0.0.1.evil", "localhost.evil:80"]))
