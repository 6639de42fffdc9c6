"""Samplers of fixed weights side by side. Every snapshot has rows and a cache of its own, so none adopts another's
weights; snapshots of one rank share their compiled programs, and the chunks of all take turns on one thread.
"""

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from grpo_roc_jax.model.lora import LowRank, attach
from grpo_roc_jax.model.transformer import Params
from grpo_roc_jax.rollout.engine import Engine
from grpo_roc_jax.rollout.publish import SamplerParams
from grpo_roc_jax.serving.sampling_loop import SampleJob, SamplingLoop

log = logging.getLogger(__name__)
WAIT_S = 0.2


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Weights that are sampled from: an adapter of the base, or the base alone."""

    base: Params
    lora: LowRank | None = None
    params: Params | None = None

    @property
    def weights(self) -> Params:
        return self.base if self.lora is None else attach(self.base, self.params, self.lora)


@dataclass(eq=False)
class _Live:
    loop: SamplingLoop
    used: int = 0


@dataclass(eq=False)
class Snapshots:
    """One thread that samples from any number of snapshots."""

    make_engine: Callable[[], Engine]
    """An engine without stop ids; called once for each rank."""
    deliver: Callable[[Callable[[], None]], None]
    """Runs a function on the thread of those who submit."""
    most: int = 4
    """Snapshots that keep their cache; of further ones that nobody samples from, the cache is freed."""
    _inbox: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)
    _engines: dict[Any, Engine] = field(default_factory=dict)
    _live: dict[Snapshot, _Live] = field(default_factory=dict)
    _clock: Any = field(default_factory=count)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True, name="tinker-sampling")
        self._thread.start()

    def submit(self, snapshot: Snapshot, job: SampleJob) -> None:
        """Queues a job; thread-safe."""
        self._inbox.put((snapshot, job))

    def call(self, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        """Computes something between two chunks, and hands over (result, error); thread-safe."""
        self._inbox.put((work, done))

    def close(self) -> None:
        self._inbox.put(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                item = self._inbox.get(timeout=WAIT_S) if not self._busy() else self._inbox.get_nowait()
                while True:
                    if item is None:
                        for live in self._live.values():
                            live.loop.release()
                        return
                    self._take(*item)
                    item = self._inbox.get_nowait()
            except queue.Empty:
                pass
            for live in self._busy():
                try:
                    live.loop.turn(0.0)
                except Exception as error:  # its jobs learn of it
                    live.loop.fail(error)

    def _busy(self) -> list[_Live]:
        return [live for live in self._live.values() if not live.loop.idle]

    def _take(self, first: Any, second: Any) -> None:
        if not isinstance(first, Snapshot):
            try:
                result, error = first(), None
            except Exception as failure:
                result, error = None, failure
            self.deliver(lambda: second(result, error))
            return
        try:
            live = self._live.get(first) or self._open(first)
        except Exception as error:
            log.exception("a snapshot cannot be sampled from")
            self.deliver(lambda error=error: second.report("failed", 0, error))
            return
        live.used = next(self._clock)
        live.loop.submit(second)

    def _open(self, snapshot: Snapshot) -> _Live:
        idle = sorted((key for key, live in self._live.items() if live.loop.idle), key=lambda key: self._live[key].used)
        for key in idle[: max(0, len(self._live) - self.most + 1)]:
            self._live.pop(key).loop.release()
        # Programs are compiled for parameters of one form.
        form = None if snapshot.lora is None else (snapshot.lora.rank, snapshot.lora.targets)
        if form not in self._engines:
            self._engines[form] = self.make_engine()
        engine = self._engines[form].sibling()
        sampler: SamplerParams = engine.publish(snapshot.weights, 0)
        live = self._live[snapshot] = _Live(SamplingLoop(engine, sampler, self.deliver))
        return live
