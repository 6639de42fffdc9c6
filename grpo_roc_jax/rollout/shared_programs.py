"""The sampling programs over the devices of several processes, one of which leads.

Every call of a program passes `_run`, with its arrays still on the host. The leader sends the call to the others first,
and each of these makes it with its own part of the weights, the pool and the slots. Reports are replicated, so the
leader reads its own copy.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from jax.sharding import NamedSharding

from grpo_roc_jax.model.sharding import place_host
from grpo_roc_jax.model.transformer import Params
from grpo_roc_jax.rollout.programs import ProgramCall, SamplerPrograms


class SharedPrograms(SamplerPrograms):
    """Programs on a mesh of several processes."""

    send: Callable[[tuple], None] | None = None
    """Takes (key, host arrays) of each call while this process leads; None while all make the same calls by themselves,
    as for `warmup`."""

    def place(self, value: np.ndarray, *spec: Any) -> np.ndarray:
        """The array itself: `_run` places it when it has been sent."""
        return value

    def _run(self, call: ProgramCall) -> Any:
        if self.send is not None:
            self.send((call.key, [value for value in call.arguments if isinstance(value, np.ndarray)]))
        pairs = zip(call.arguments, call.specs, strict=True)
        placed = (
            place_host(value, NamedSharding(self.mesh, spec)) if isinstance(value, np.ndarray) else value
            for value, spec in pairs
        )
        return super()._run(replace(call, arguments=tuple(placed)))

    def repeat(self, params: Params, calls: Iterable[tuple[tuple, list[np.ndarray]]]) -> None:
        """Makes the calls that the leader sent."""
        pool = slots = None
        for (name, *sizes), arrays in calls:
            if name == "allocate":
                pool = None  # the pool before is freed first
                pool = self.new_pool()
            elif name == "slots":
                slots = self.new_slots()
            elif name == "grow":
                pool = self.grow(pool)
            elif name == "append":
                pool = (self.append if len(sizes) == 2 else self.append_packed)(params, pool, *arrays)
            elif name == "copy":
                pool = self.copy(pool, *arrays)
            else:
                pool, slots, _ = self.decode(params, pool, slots, *arrays, width=sizes[0])
