"""Notices of a cloud that this machine is about to be taken away, polled at an address that is set."""

import logging
import os
import signal
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

POLL_S = 5.0
"""Google gives 30 s from the notice to the end (cloud.google.com/compute/docs/instances/preemptible)."""
ANSWER_S = 5.0
"""How long an answer may take. It is not the time between questions: a slow machine asks again, and loses nothing."""
QUIET = ("", "FALSE", "NONE")
"""Answers of `instance/preempted` and `instance/maintenance-event` while nothing is announced."""


@contextmanager
def noticed(url: str, poll_s: float = POLL_S) -> Iterator[None]:
    """Sends this process SIGTERM once `url` announces its end, within the block; an empty one is not asked."""
    ended = threading.Event()

    def poll() -> None:
        failed = False
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while not ended.wait(poll_s):
            try:
                request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
                with direct.open(request, timeout=ANSWER_S) as answer:
                    text = answer.read(100).decode("ascii", "replace").strip().upper()
            except Exception as error:  # whatever an answer is, the next one may be a notice
                if not failed:
                    log.warning("watch.notice_url %s does not answer: %s", url, error)
                failed = True
                continue
            if text not in QUIET:
                log.warning("%s says %s: the run saves its state and ends", url, text)
                os.kill(os.getpid(), signal.SIGTERM)
                return

    thread = threading.Thread(target=poll, name="notice", daemon=True)
    if url:
        thread.start()
    try:
        yield
    finally:
        ended.set()
