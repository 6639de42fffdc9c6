"""Servers that tests of environments start, and the words of a call."""

import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

import grpo_roc_jax as g
from grpo_roc_jax.text.chat_format import make_chat


@pytest.fixture(scope="session")
def chat():
    return make_chat(g.TextConfig(max_calls_per_turn=4), g.load_tokenizer(g.TextConfig()))


def call(name, arguments="{}"):
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


@contextmanager
def served(*words):
    """(address, process) of a program whose last argument is its port, once it accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, *words, str(port)], stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()
