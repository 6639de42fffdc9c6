"""The heap of the host."""

import ctypes
from types import SimpleNamespace

from grpo_roc_jax.run.memory import few_arenas


def test_threads_share_arenas_unless_the_environment_says_how_many(monkeypatch):
    asked = []
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=lambda *words: asked.append(words)))
    monkeypatch.setenv("MALLOC_ARENA_MAX", "8")
    few_arenas()
    assert asked == []
    monkeypatch.delenv("MALLOC_ARENA_MAX")
    few_arenas()
    assert asked == [(-8, 2)]
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace())  # another C library
    few_arenas()
