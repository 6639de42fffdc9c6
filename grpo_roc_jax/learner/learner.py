"""The learner alone: rows with advantages and weights in, an updated policy out. It depends on no method and no run.

    learner = Learner(model, surrogate, optim, mesh, params)
    metrics = learner.update(rows)                        # one optimizer step
    logprobs, entropies = learner.score(rows)             # of the policy as it is now
    params = learner.params                               # for the sampler

`update` and `score` work on the state inside the learner. A caller that keeps the state itself, as a run does, calls
`optimizer_step`, `score_rows` and `on_mesh` instead, which are functions of their arguments.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from grpo_roc_jax import checks
from grpo_roc_jax.learner.loss import UpdateConfig
from grpo_roc_jax.learner.offload import held_bytes
from grpo_roc_jax.learner.pack import (
    BatchConfig,
    Placement,
    TrainBatch,
    halved,
    pack,
    unpack,
    worst_case_micro_batches,
)
from grpo_roc_jax.learner.update import (
    FULL,
    OptimConfig,
    TrainState,
    UpdateStep,
    bind_base,
    make_score,
    make_update_step,
    start_train_state,
)
from grpo_roc_jax.learner.update_parts import UpdateParts, make_update_parts
from grpo_roc_jax.method.surrogate import Clip, Surrogate
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.lora import Lora, attach
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh, row_shards, shard_batch
from grpo_roc_jax.model.transformer import Params
from grpo_roc_jax.process.points import reach, spoiled
from grpo_roc_jax.types import Group, Metrics, TrainRow

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class UpdateBatch:
    """The rows of one optimizer step, and the same rows packed on the mesh."""

    rows: list[TrainRow]
    """One per trajectory; supervised rows of the same step are packed after them."""
    packed: TrainBatch
    placement: Placement
    temperature: float
    """Temperature of rows without one of their own."""
    signal: float = 0.0
    """Share of the rows with a nonzero advantage; at 0 the step learns nothing from rewards."""
    measured: Metrics = field(default_factory=dict)
    """Metrics of the rows: seconds spent on advantages and weights, divergences from other policies."""
    groups: Sequence[Group] = ()
    """Set where the rows depend on the current scores; they are then rebuilt before their optimizer step."""


class Learner:
    """A policy, its optimizer, and the jitted programs that train and score it; these compile at their first call."""

    def __init__(
        self,
        model: ModelConfig,
        surrogate: Surrogate | None = None,
        optim: OptimConfig | None = None,
        mesh: Mesh | None = None,
        params: Params | None = None,
        *,
        batch: BatchConfig | None = None,
        update: UpdateConfig | None = None,
        base: Params | None = None,
        lora: Lora = FULL,
        temperature: float = 1.0,
        several_temperatures: bool = False,
        rows: int = 64,
        longest: int | None = None,
        in_parts: bool = False,
    ):
        """
        Args:
            model: The shape of the policy, with `vocab_size` set.
            surrogate: The loss of a token, given its log-ratio and advantage; PPO's clipped ratio by default.
            optim: Settings of AdamW.
            mesh: The devices that the policy, its moments and the rows are divided over; by default the first device.
            params: Initial parameters: published weights, or those of a supervised stage. They are copied. None if the
                caller keeps the training state.
            batch: Tokens of a packed row, and rows of a micro-batch.
            update: How forward and backward use memory.
            base: The frozen weights of an adapter; with them only the adapter is trained.
            lora: Settings of that adapter.
            temperature: Divides the logits of rows without a temperature of their own.
            several_temperatures: Whether every batch holds the temperatures of its rows. Without it only those do whose
                rows have other temperatures than the learner, and the programs compile twice.
            rows: The most rows that one optimizer step can have. All batches have the shape that these may need, so
                that the update compiles once.
            longest: The most tokens of a row; `batch.row_length` by default.
            in_parts: Makes each micro-batch a program of its own, so that rollouts can continue between them.

        Raises:
            ValueError: A row can be longer than `batch.row_length`, or `params` are those of another model.
            TypeError: `model` or `surrogate` is of another type, such as a name or a class.
        """
        checks.expect(model, ModelConfig, "model", "a ModelConfig, the shape of the policy")
        checks.expect(surrogate, Surrogate | None, "surrogate", "a Surrogate, such as Clip()")
        self.model, self.surrogate, self.optim = model, surrogate or Clip(), optim or OptimConfig()
        self.mesh = make_mesh(ShardingConfig(), jax.devices()[:1]) if mesh is None else mesh
        self.batch, self.update_config = batch or BatchConfig(), update or UpdateConfig()
        self.base, self.lora, self.temperature = base, lora, temperature or 1.0  # greedy: recorded at 1
        self.several_temperatures, self.in_parts = several_temperatures, in_parts
        self.longest = self.batch.row_length if longest is None else longest
        self.micro_batches = worst_case_micro_batches(rows, self.longest, self.batch, row_shards(self.mesh))
        """Micro-batches of one optimizer step in the worst case; all batches have this shape."""
        self.meanwhile: Callable[[], None] | None = None
        """Called repeatedly while the device computes."""
        self.halvings = Halvings(self.mesh)
        """Number of times that micro-batches were halved because memory ran out."""
        self.state: TrainState | None = None
        """What `update` trains: parameters, moments and the number of the step; None if the caller keeps the state."""
        if params is not None:
            self.state = self.start(params)

    # Methods that use the state of the learner.

    @property
    def params(self) -> Params:
        """The current parameters of the policy, in the form that a sampler takes. The next `update` deletes their
        arrays; what shall stay is copied before: `jax.tree.map(jnp.copy, learner.params)`.

        Raises:
            ValueError: The learner was made without parameters.
        """
        if self.state is None:
            raise ValueError("the learner was made without params; pass those that training begins with")
        return self.full(self.state.params)

    def update(self, rows: Sequence[TrainRow]) -> Metrics:
        """Takes one optimizer step on these rows and returns its metrics. It deletes the arrays of `params` before it.

        Args:
            rows: From `train_rows`. Pass all rows of one optimizer step, since their weights contain its normalizer.

        Raises:
            ValueError: The learner was made without parameters.
        """
        _ = self.params
        batch = self.on_mesh(rows, self.temperature)
        self.state, metrics = self.optimizer_step(self.state, batch.packed)
        return {name: float(value) for name, value in self.fetched(metrics).items()}

    def score(self, rows: Sequence[TrainRow]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """(log-probabilities, entropies) of the tokens of each row under the current policy: float32[T], in nats.

        Raises:
            ValueError: The learner was made without parameters.
        """
        return self.score_rows(self.params, rows, self.temperature)

    # Methods that are functions of their arguments.

    def start(self, params: Params, *, donate: bool = False) -> TrainState:
        """The state at step 0 with these trained parameters: those of the policy, or of the adapter of `base`."""
        return start_train_state(params, self.model, self.optim, self.mesh, self.lora, donate=donate)

    def full(self, trained: Params) -> Params:
        """The parameters of the policy, from the trained ones."""
        return full_params(self.base, trained, self.lora)

    @cached_property
    def update_program(self) -> Any:
        """The jitted optimizer step. The base of an adapter is its last argument."""
        return self._made(make_update_step)

    @cached_property
    def update_step(self) -> UpdateStep:
        """(state, packed batch) -> (state, metrics); the state is donated."""
        return bind_base(self.update_program, self.base)

    @cached_property
    def parts(self) -> UpdateParts | None:
        """Replaces `update_step` where rollouts continue during the update: each micro-batch is a program of its own,
        so that chunks of decoding need not wait for the last micro-batch."""
        return self._made(make_update_parts) if self.in_parts else None

    @cached_property
    def score_batch(self) -> Callable[[Any, TrainBatch], tuple[Any, Any]]:
        """(parameters of the policy, packed batch) -> (log-probabilities, entropies)."""
        return make_score(self.model, self.update_config, self.mesh, temperature=self.temperature)

    def on_mesh(self, rows: Sequence[TrainRow], temperature: float, extra: Sequence[TrainRow] = ()) -> UpdateBatch:
        """The rows, followed by the supervised rows `extra`, packed and on the devices.

        `temperature` applies to rows without one of their own. Unless all are that of the learner, the batch holds one
        for every token, and the programs compile for such batches at the first one.
        """
        rows = checks.listed(rows, TrainRow, "rows", "a list of TrainRows, such as [row]")
        both = [*rows, *extra]
        for index, row in enumerate(both):
            if row.length and not 0 <= row.tokens.min() <= row.tokens.max() < (self.model.vocab_size or math.inf):
                raise ValueError(
                    f"row {index} has ids from {row.tokens.min()} to {row.tokens.max()}, but the model has "
                    f"{self.model.vocab_size} tokens; use the tokenizer that the model was made for"
                )
        used = {temperature if row.temperature is None else row.temperature for row in both}
        several = self.several_temperatures or not all(math.isclose(each or 1.0, self.temperature) for each in used)
        row_temperature = temperature if several else None
        packed, placement = pack(both, self.batch, self.micro_batches, row_shards(self.mesh), row_temperature)
        signal = sum(bool(row.advantages.any()) for row in both) / max(len(both), 1)
        packed = packed.replace(weights=spoiled("update.weights", packed.weights))
        return UpdateBatch(rows, shard_batch(packed, self.mesh), placement, temperature, signal)

    def score_rows(
        self, params: Any, rows: Sequence[TrainRow], temperature: float, score_batch: Callable | None = None
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """(log-probabilities, entropies) of each row, by the forward pass of training.

        Args:
            params: Parameters of the policy; see `full`.
            rows: At most as many as an optimizer step can have.
            temperature: Temperature of rows without one of their own.
            score_batch: Scoring pass of another policy, if `params` belong to another one.
        """
        batch = self.on_mesh(rows, temperature)
        shape = batch.packed.tokens.shape
        program = partial(score_batch or self.score_batch, params)
        scored = self.fetched(self.halvings.run("score", program, batch.packed))
        logprobs, entropies = (unpack(values.reshape(shape), batch.placement) for values in scored)
        return logprobs, entropies

    def optimizer_step(self, train: TrainState, packed: TrainBatch) -> tuple[TrainState, Any]:
        """One optimizer step, with smaller micro-batches if memory runs out. The buffers of `train` are donated."""
        step = self.update_step if self.parts is None else self._step_in_parts
        return self.halvings.run("update", lambda rows: step(train, rows), packed, donated=train)

    def _step_in_parts(self, train: TrainState, packed: TrainBatch) -> tuple[TrainState, Any]:
        between = self.meanwhile or (lambda: None)
        return bind_base(partial(self.parts, between=between), self.base)(train, packed)

    def fetched(self, results: Any) -> Any:
        """Copies results of the device to the host; calls `meanwhile` until they are there."""
        while self.meanwhile is not None and not all(leaf.is_ready() for leaf in jax.tree.leaves(results)):
            self.meanwhile()
        return jax.device_get(results)

    def _made(self, make: Callable[..., Any]) -> Any:
        return make(
            self.model,
            self.surrogate,
            self.optim,
            self.update_config,
            self.mesh,
            temperature=self.temperature,
            lora=self.lora,
        )


def full_params(base: Params | None, trained: Params, lora: Lora) -> Params:
    """The parameters of the policy: the trained ones, merged with the base weights of an adapter."""
    return trained if base is None else attach(base, trained, lora)


def move_moments(train: TrainState, move: Callable[[Any], Any], name: str) -> tuple[TrainState, Metrics]:
    """Moves the optimizer's moments to another memory. Returns the state, and the bytes on this process's devices and
    seconds as metrics."""
    begun = time.perf_counter()
    with jax.transfer_guard("disallow"):
        train = train.replace(opt_state=move(train.opt_state))
    device_bytes = float(held_bytes(train.opt_state))
    return train, {f"offload/{name}_bytes": device_bytes, f"time/offload_{name}_s": time.perf_counter() - begun}


@dataclass
class Halvings:
    """Runs device programs over packed rows again in micro-batches of half the rows when memory runs out. The sums stay
    the same; later calls start with the halved size."""

    mesh: Mesh
    counts: dict[str, int] = field(default_factory=dict)
    """Number of halvings, by name of the program."""

    def run(self, name: str, program: Callable[[TrainBatch], T], packed: TrainBatch, donated: Any = ()) -> T:
        """Calls `program(packed)`, with more and smaller micro-batches if memory runs out.

        Args:
            name: Name of the program: `update`, `score`, `sft`.
            program: Fails with RESOURCE_EXHAUSTED if its arguments are too large.
            packed: Batch on the mesh.
            donated: Arrays that the program takes over; once they are deleted it cannot be tried again.
        """
        for _ in range(self.counts.get(name, 0)):
            packed = self._halve(packed)
        while True:
            try:
                reach(f"{name}.memory")
                with jax.transfer_guard("disallow"):
                    return program(packed)
            except jax.errors.JaxRuntimeError as error:
                gone = any(leaf.is_deleted() for leaf in jax.tree.leaves(donated))
                rows = packed.tokens.shape[1] // row_shards(self.mesh)
                if "RESOURCE_EXHAUSTED" not in str(error) or gone or rows % 2 or self.mesh.is_multi_process:
                    raise
                log.warning("memory ran out in %s; micro-batches have %d rows a device from now on", name, rows // 2)
            self.counts[name] = self.counts.get(name, 0) + 1
            packed = self._halve(packed)

    def _halve(self, packed: TrainBatch) -> TrainBatch:
        return shard_batch(halved(jax.device_get(packed)), self.mesh)
