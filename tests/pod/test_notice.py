"""A notice of preemption from a loopback server is a signal to stop; other answers and failures are not."""

import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from grpo_roc_jax.pod.notice import noticed
from grpo_roc_jax.pod.preemption import Preempted, Preemption


def test_a_notice_is_a_signal_to_stop(caplog):
    answers, seen = ["", "FALSE", "NONE", "error", "garbage", "TRUE"], []

    class Metadata(BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append(self.headers["Metadata-Flavor"])
            text = answers[len(seen) - 1]
            if text != "garbage":
                self.send_response(503 if text == "error" else 200)
                self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    preemption = Preemption()
    try:
        with (
            pytest.raises(Preempted),
            preemption.installed(),
            noticed(f"http://127.0.0.1:{server.server_port}/preempted", 0.02),
        ):
            time.sleep(20)
    finally:
        server.shutdown()
        server.server_close()
    assert seen == ["Google"] * 6 and preemption.asked
    assert caplog.text.count("does not answer") == 1


def test_nobody_is_asked_without_an_address():
    before = threading.active_count()
    with noticed(""):
        assert threading.active_count() == before
