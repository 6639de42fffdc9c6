"""One optimizer step as several programs, so that the device can run others in between: those of the sampler, while
rollouts continue."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from grpo_roc_jax.learner.loss import UpdateConfig
from grpo_roc_jax.learner.pack import TrainBatch
from grpo_roc_jax.learner.update import (
    FULL,
    Metrics,
    OptimConfig,
    TrainState,
    make_finish,
    make_gradient,
    state_shardings,
    summing,
)
from grpo_roc_jax.method.surrogate import Surrogate
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.lora import Lora
from grpo_roc_jax.model.sharding import place_shapes, replicated
from grpo_roc_jax.model.transformer import Params


@dataclass(frozen=True, eq=False)
class UpdateParts:
    """The programs of an optimizer step; made by `make_update_parts`."""

    begin: jax.stages.Wrapped
    """(parameters, batch[, base]) -> sums of no micro-batch."""
    add: jax.stages.Wrapped
    """(sums, parameters, batch[, base]) -> sums with the next micro-batch."""
    finish: jax.stages.Wrapped
    """(state, batch, sums) -> (state, metrics)."""
    placed: tuple
    """Shardings of the sums."""

    def lowered(
        self, state: TrainState, batch: TrainBatch, *frozen: Params
    ) -> Iterator[tuple[str, jax.stages.Lowered]]:
        """(name, lowered program) of each program; not compiled."""
        begin = self.begin.lower(state.params, batch, *frozen)
        sums = place_shapes(begin.out_info, jax.tree.broadcast(self.placed, begin.out_info))
        yield "update/begin", begin
        yield "update/add", self.add.lower(sums, state.params, batch, *frozen)
        yield "update/finish", self.finish.lower(state, batch, sums)

    def __call__(
        self, state: TrainState, batch: TrainBatch, *frozen: Params, between: Callable[[], None]
    ) -> tuple[TrainState, Metrics]:
        """Returns what the step of `make_update_step` returns. Calls `between` after each micro-batch is enqueued."""
        sums = self.begin(state.params, batch, *frozen)
        for _ in range(max(1, int(jax.device_get(batch.count)))):  # a padding micro-batch compiles the program
            sums = self.add(sums, state.params, batch, *frozen)
            with jax.transfer_guard("allow"):
                between()
        return self.finish(state, batch, sums)


def make_update_parts(
    model: ModelConfig,
    surrogate: Surrogate,
    optim: OptimConfig,
    update: UpdateConfig,
    mesh: Mesh,
    *,
    temperature: float = 1.0,
    lora: Lora = FULL,
) -> UpdateParts:
    """Like `make_update_step`, with a program for each micro-batch, so that programs of a sampler can run in between.

    Args:
        mesh: Its `data` axis must have size 1.
    """
    shardings, last = state_shardings(model, optim, mesh, lora), make_finish(optim)
    gradient = make_gradient(model, surrogate, update, mesh, temperature, lora)

    def begin(params: Params, batch: TrainBatch, *frozen: Params) -> tuple:
        return jnp.zeros((), jnp.int32), *summing(gradient, params, batch, shardings.params, mesh, *frozen).none()

    def add(sums: tuple, params: Params, batch: TrainBatch, *frozen: Params) -> tuple:
        added = summing(gradient, params, batch, shardings.params, mesh, *frozen).add(sums[0], sums[1:])
        return sums[0] + 1, *added

    def finish(state: TrainState, batch: TrainBatch, sums: tuple) -> tuple[TrainState, Metrics]:
        return last(state, batch, sums[1:])

    everywhere = replicated(mesh)
    placed = (everywhere, everywhere, everywhere, shardings.params)
    return UpdateParts(
        jax.jit(begin, out_shardings=placed),
        jax.jit(add, donate_argnums=0, out_shardings=placed),
        jax.jit(finish, donate_argnums=0, out_shardings=(shardings, everywhere)),
        placed,
    )
