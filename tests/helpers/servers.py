"""Servers that tests of environments start, and the words of a call."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from grpo_roc_jax.text.chat_format import ChatFormat, make_chat
from grpo_roc_jax.text.config import TextConfig
from grpo_roc_jax.text.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def chat() -> ChatFormat:
    """A chat whose turns have several calls."""
    return make_chat(TextConfig(max_calls_per_turn=4), load_tokenizer(TextConfig()))


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


@contextmanager
def served(*words: str) -> Iterator[tuple[str, subprocess.Popen]]:
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
