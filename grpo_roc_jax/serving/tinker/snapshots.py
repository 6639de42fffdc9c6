"""Samplers of fixed weights side by side: every row is drawn with the weights that it was submitted with.

An adapter that is sampled from alone has an engine of its form to itself. As soon as several are sampled from at a
time, new jobs go to an engine that holds the pairs of several adapters side by side (`AdapterBank`), so that one batch
mixes their rows; adapters of different ranks share it up to a bound (`bucket`). The cache knows whose tokens it holds,
so a conversation finds its earlier turns and no other's. Engines take turns on one thread.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import count
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_roc_jax.engine.decode import MOST_ADAPTERS
from grpo_roc_jax.engine.engine import Engine
from grpo_roc_jax.engine.publish import SamplerParams
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.lora import LowRank, Target, attach, pair_shapes
from grpo_roc_jax.model.transformer import Params, layers_with
from grpo_roc_jax.serving.sampling_loop import SampleJob, SamplingLoop
from grpo_roc_jax.shapes import Array

log = logging.getLogger(__name__)
WAIT_S = 0.2
RECENT_S = 20.0
"""Adapters that take turns within this time count as sampled from at the same time."""
SMALLEST = 8
"""Rank of the smallest bank."""
ENGINES = 12
"""Compiled engines that are kept."""
POOLS = 3
"""Engines that keep their cache while nobody samples with them."""


class EngineForm(NamedTuple):
    """What an engine is compiled for."""

    rank: int
    """Rank of the pairs; 0 for the base alone."""
    targets: tuple[Target, ...]
    adapters: int
    """Adapters of a bank; 1 for a single adapter, and for the base alone."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Weights that are sampled from: an adapter of the base, or the base alone."""

    base: Params
    lora: LowRank | None = None
    params: Params | None = None
    owner: str = ""
    """The model whose weights these are; the next snapshot of one owner takes the place of the one before."""

    @property
    def weights(self) -> Params:
        return self.base if self.lora is None else attach(self.base, self.params, self.lora)


def bucket(rank: int) -> int:
    """Rank of the bank that adapters of a rank are in: a power of two."""
    return max(SMALLEST, 1 << (rank - 1).bit_length())


@dataclass(eq=False)
class Seat:
    """An adapter in an engine."""

    snapshot: Snapshot | None = None
    number: int = 0
    """See `decode.split_adapters`; 0 outside of a bank."""
    jobs: set[SampleJob] = field(default_factory=set)
    used: int = 0


@dataclass(eq=False)
class SeatedEngine:
    """An engine with the adapters that it samples with now."""

    loop: SamplingLoop
    form: EngineForm
    bank: "AdapterBank | None"
    seats: list[Seat]
    waiting: deque[tuple[Snapshot, SampleJob]] = field(default_factory=deque)
    """Jobs whose adapter has no seat yet."""
    used: int = 0

    @property
    def idle(self) -> bool:
        return self.loop.idle and not self.waiting

    def seat_of(self, snapshot: Snapshot) -> Seat | None:
        """The seat of this adapter, or one that it may take; None if all are busy."""
        if (seat := next((seat for seat in self.seats if seat.snapshot is snapshot), None)) is not None:
            return seat
        return min((seat for seat in self.seats if not seat.jobs), key=lambda seat: seat.used, default=None)


@dataclass(frozen=True, eq=False)
class AdapterBank:
    """Pairs of several adapters side by side: A as [in, n R], B as [n R, out]; a row uses the columns of its own."""

    model: ModelConfig
    form: EngineForm

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name of a leaf -> shape for one layer."""
        wide = LowRank(rank=self.form.rank * self.form.adapters, targets=self.form.targets)
        return {name: shape for name, (shape, _) in pair_shapes(wide, self.model).items()}

    def empty(self, base: Params) -> Params:
        """The base with pairs of zeros."""
        layers = [dict(layer) for layer in base["layers"]]
        for name, shape in self.shapes.items():
            for i in layers_with(name, self.model):
                layers[i][name] = jnp.zeros(shape, jnp.float32)
        return base | {"layers": tuple(layers)}

    def columns(self) -> np.ndarray:
        """See `decode.split_adapters`."""
        return np.repeat(np.arange(self.form.adapters, dtype=np.int32), self.form.rank)

    def put(self, params: Params, snapshot: Snapshot, index: int) -> Params:
        """The parameters of the engine with an adapter at this place."""
        attached = attach({"layers": tuple({n: () for n in layer if "_lora_" not in n} for layer in params["layers"])},
                          snapshot.params, snapshot.lora)["layers"]  # fmt: skip
        pairs = tuple({name: layer[name] for name in layer if name in self.shapes} for layer in params["layers"])
        added = tuple({name: layer[name] for name in layer if name in self.shapes} for layer in attached)
        places = jax.tree.map(lambda leaf: leaf.sharding, pairs)
        changed = jax.device_put(self._put(pairs, added, jnp.int32(index)), places)
        layers = (layer | new for layer, new in zip(params["layers"], changed, strict=True))
        return params | {"layers": tuple(layers)}

    @cached_property
    def _put(self) -> Callable[..., tuple[Params, ...]]:
        """(pairs of each layer, the new ones, place) -> the pairs with those of a place replaced."""
        return jax.jit(partial(_replaced, rank=self.form.rank))


def _replaced(pairs: Sequence[Params], added: Sequence[Params], index: Array, *, rank: int) -> tuple[Params, ...]:
    def leaf(name: str, old: Array, new: Array | None) -> Array:
        axis = old.ndim - 1 if name.endswith("_a") else 0
        wanted = (*old.shape[:axis], rank, *old.shape[axis + 1 :])
        part = jnp.zeros(wanted, old.dtype)
        if new is not None:
            part = jax.lax.dynamic_update_slice(part, new.astype(old.dtype), (0,) * old.ndim)
        return jax.lax.dynamic_update_slice_in_dim(old, part, index * rank, axis)

    return tuple(
        {name: leaf(name, old, new.get(name)) for name, old in layer.items()}
        for layer, new in zip(pairs, added, strict=True)
    )


@dataclass(eq=False)
class Snapshots:
    """One thread that samples from any number of snapshots."""

    make_engine: Callable[[EngineForm], Engine]
    """An engine without stop ids that cuts as the form says; called once for each form."""
    deliver: Callable[[Callable[[], None]], None]
    """Runs a function on the thread of those who submit."""
    most: int = 8
    """Adapters in a bank; jobs of further ones wait until one has no job left."""
    targets: tuple[Target, ...] = LowRank().targets
    """Matrices that adapters of this model may have."""
    _inbox: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)
    _engines: dict[EngineForm, Engine] = field(default_factory=dict)
    _groups: dict[EngineForm, SeatedEngine] = field(default_factory=dict)
    _recent: dict[str, tuple[float, Snapshot]] = field(default_factory=dict)
    """Owner -> when it was sampled from last, and the snapshot."""
    _clock: Any = field(default_factory=count)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True, name="tinker-sampling")
        self._thread.start()

    def submit(self, snapshot: Snapshot, job: SampleJob) -> None:
        """Queues a job; thread-safe. Its `report` may be called with `paused` too: no seat is free for its adapter."""
        self._inbox.put((snapshot, job))

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
                        for group in self._groups.values():
                            group.loop.release()
                        return
                    self._take(*item)
                    item = self._inbox.get_nowait()
            except queue.Empty:
                pass
            for group in self._busy():
                try:
                    group.loop.turn(0.0)
                except Exception as error:  # its jobs learn of it
                    group.loop.fail(error)
                self._after_turn(group)

    def _busy(self) -> list[SeatedEngine]:
        return [group for group in self._groups.values() if not group.idle]

    def _take(self, snapshot: Snapshot, job: SampleJob) -> None:
        try:
            form = self._form(snapshot)
            group = self._groups.get(form) or self._open(form, snapshot)
            group.used = next(self._clock)
            if not self._seat(group, snapshot, job):
                group.waiting.append((snapshot, job))
                self.deliver(lambda: job.report("paused", 0, None))
        except Exception as failure:
            log.exception("a snapshot cannot be sampled from")
            error = failure
            self.deliver(lambda: job.report("failed", 0, error))

    def _form(self, snapshot: Snapshot) -> EngineForm:
        """The engine that a job goes to."""
        if snapshot.lora is None:
            return EngineForm(0, (), 1)
        alone = EngineForm(snapshot.lora.rank, snapshot.lora.targets, 1)
        shared = EngineForm(bucket(snapshot.lora.rank), self.targets, self.most)
        now = time.monotonic()
        before, _ = self._recent.get(snapshot.owner, (now, None))
        others = any(  # those that took turns with this owner
            before < when and now - when < RECENT_S and bucket(other.lora.rank) == shared.rank
            for when, other in self._recent.values()
        )
        live = [
            seat
            for form, group in self._groups.items()
            if form.rank and bucket(form.rank) == shared.rank
            for seat in group.seats
            if seat.jobs and seat.snapshot is not snapshot
        ]
        self._recent = {owner: of for owner, of in self._recent.items() if now - of[0] < RECENT_S}
        self._recent[snapshot.owner] = now, snapshot
        return shared if (others or live) and self.most > 1 else alone

    def _open(self, form: EngineForm, snapshot: Snapshot) -> SeatedEngine:
        idle = sorted((group for group in self._groups.values() if group.idle), key=lambda group: group.used)
        for group in idle[: max(0, len(self._groups) - POOLS + 1)]:
            self._groups.pop(group.form).loop.release()
        engine = self._engines.pop(form, None) or self.make_engine(form)
        self._engines[form] = engine  # the last used last
        while len(self._engines) > ENGINES:
            del self._engines[next(iter(self._engines))]
        engine = engine.sibling()
        bank, seats = None, [Seat()]
        if form.adapters > 1:
            bank, seats = AdapterBank(engine.programs.model, form), [Seat(number=i + 1) for i in range(form.adapters)]
            sampler = engine.publish(bank.empty(snapshot.base), 0)
            columns = engine.programs.place(bank.columns())
            sampler = replace(sampler, params=sampler.params | {"adapters": columns})
        else:
            sampler, seats[0].snapshot = engine.publish(snapshot.weights, 0), snapshot
        group = self._groups[form] = SeatedEngine(SamplingLoop(engine, sampler, self.deliver), form, bank, seats)
        return group

    def _seat(self, group: SeatedEngine, snapshot: Snapshot, job: SampleJob) -> bool:
        """Hands a job to its engine; False if its adapter gets no seat."""
        seat = group.seat_of(snapshot)
        if seat is None:
            return False
        if seat.snapshot is not snapshot:
            self._exchange(group, seat, snapshot)
        seat.used, job.adapter = next(self._clock), seat.number
        seat.jobs.add(job)
        group.loop.submit(job)
        return True

    def _exchange(self, group: SeatedEngine, seat: Seat, snapshot: Snapshot) -> None:
        """Puts an adapter in the seat of one that no job uses."""
        loop, engine = group.loop, group.loop.engine
        before, seat.snapshot = seat.snapshot, None
        if group.bank is None:
            loop.sampler = None  # a second copy would take memory
            try:
                loop.sampler = engine.publish(snapshot.weights, 0)
            except Exception as error:
                loop.fail(error)  # the engine begins again, with the next weights
                raise
        else:
            index, n = group.seats.index(seat), group.form.adapters
            params = group.bank.put(loop.sampler.params, snapshot, index)
            sampler: SamplerParams = replace(loop.sampler, params=params)
            if before is not None:
                seat.number += n  # what is cached under the number before is no longer found
            if seat.number <= MOST_ADAPTERS:
                engine.exchange(sampler)
            else:
                seat.number = index + 1  # the next submission forgets the cache with all numbers
            loop.sampler = sampler
        seat.snapshot = snapshot

    def _after_turn(self, group: SeatedEngine) -> None:
        """Seats that became free go to those who wait."""
        jobs = group.loop.jobs
        for seat in group.seats:
            seat.jobs &= jobs
        for _ in range(len(group.waiting)):
            snapshot, job = group.waiting.popleft()
            try:
                if not self._seat(group, snapshot, job):
                    group.waiting.append((snapshot, job))
            except Exception as failure:
                error = failure
                self.deliver(lambda job=job, error=error: job.report("failed", 0, error))
