"""One optimizer step as one program: gradients summed over micro-batches, clipping, AdamW, a guard against NaN.
`update_parts` splits it into several programs, so that the device can run others in between.

The step maps a `TrainState` to the next one and donates its buffers. Its arrays are already on the mesh
(`sharding.shard_batch`), so it runs under `jax.transfer_guard("disallow")`.
"""

from collections.abc import Callable
from dataclasses import field
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import optax
from annotated_types import Ge, Lt
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from grpo_roc_jax import checks
from grpo_roc_jax.learner.loss import UpdateConfig, batch_loss, loss_metrics, merge_sums, policy_logprobs
from grpo_roc_jax.learner.pack import TrainBatch
from grpo_roc_jax.method.surrogate import Surrogate
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.fusion import unfused
from grpo_roc_jax.model.lora import AllWeights, Lora, adapter_axes, attach, init_adapter
from grpo_roc_jax.model.sharding import (
    ROWS,
    axes_shardings,
    constrain,
    param_shardings,
    place_shapes,
    replicate_key,
    replicated,
)
from grpo_roc_jax.model.transformer import BIASES, EXACT, Params, init_params
from grpo_roc_jax.settings.options import Axis, Count, NotNegative, Positive, kind, settings
from grpo_roc_jax.shapes import Array, Float, Int, Key

Momentum = Annotated[float, Ge(0), Lt(1)]


class Schedule(Axis, axis="optim.schedule"):
    """The learning rate after the warm-up."""

    total_steps: ClassVar[int | None] = None
    """Optimizer step at which a decay is complete; None without a decay."""

    def after_warmup(self, lr: float, warmup_steps: int) -> optax.Schedule:
        """Learning rate at each step after the warm-up; its peak is `lr`."""
        raise NotImplementedError


@kind("constant")
class ConstantRate(Schedule):
    """The learning rate stays at its peak."""

    def after_warmup(self, lr: float, warmup_steps: int) -> optax.Schedule:
        return optax.constant_schedule(lr)


@settings
class Decay(Schedule):
    """The learning rate falls to a share of its peak."""

    total_steps: Count = 0
    """Optimizer step at which the decay is complete, warm-up included; must be given."""
    final_ratio: NotNegative = 0.1
    """Learning rate at the end of the decay, as a share of the peak."""


@kind("cosine")
class CosineDecay(Decay):
    """The learning rate falls along half a cosine."""

    def after_warmup(self, lr: float, warmup_steps: int) -> optax.Schedule:
        return optax.cosine_decay_schedule(lr, self.total_steps - warmup_steps, self.final_ratio)


@kind("linear")
class LinearDecay(Decay):
    """The learning rate falls linearly."""

    def after_warmup(self, lr: float, warmup_steps: int) -> optax.Schedule:
        return optax.linear_schedule(lr, lr * self.final_ratio, self.total_steps - warmup_steps)


@settings
class OptimConfig:
    """AdamW with warm-up and clipping of the gradient norm."""

    lr: Positive = 1e-6
    """Peak learning rate. 1e-6 is the recipe of GRPO-RoC for a 14B model (arXiv:2508.20722); small models trained from
    scratch take a thousand times more."""
    warmup_steps: Count = 20
    """Optimizer steps of linear warm-up from 0, as in that recipe."""
    schedule: Schedule = field(default_factory=ConstantRate)
    """The learning rate after the warm-up."""
    beta1: Momentum = 0.9
    """Decay of the first moment."""
    beta2: Momentum = 0.999
    """Decay of the second moment."""
    eps: Positive = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NotNegative = 0.01
    """Decoupled decay of matrices per step, times the learning rate; norm scales, biases and what makes the decay of a
    recurrent state are left alone."""
    max_grad_norm: NotNegative = 1.0
    """The gradient is scaled down to this global norm; 0 leaves it unchanged."""
    moment_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the first moment; bfloat16 saves 2 bytes a parameter. The second moment stays float32."""
    offload: bool = False
    """Keep the moments in the host's pinned memory except during the update. The cache then has room for as many more
    bytes (6 to 8 per parameter over `sharding.fsdp` x `sharding.tensor`), at the price of two transfers per training
    step. Changes no number. Refused if the devices cannot reach such memory. For GPUs XLA sets aside at most 64 GB of
    it per process, unless XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB says more."""

    def __post_init__(self) -> None:
        total = self.schedule.total_steps
        if total is not None and total <= self.warmup_steps:
            raise ValueError(
                f"optim.schedule {self.schedule.kind} decays from step {self.warmup_steps} to "
                f"optim.schedule.total_steps = {total}; set optim.schedule.total_steps to the optimizer steps of the "
                "run"
            )


def make_schedule(config: OptimConfig) -> optax.Schedule:
    """Optimizer step -> learning rate. Step s of the warm-up has lr (s + 1) / warmup_steps, so no step has rate 0."""
    after = config.schedule.after_warmup(config.lr, config.warmup_steps)
    if not config.warmup_steps:
        return after
    warmup = optax.linear_schedule(config.lr / config.warmup_steps, config.lr, config.warmup_steps - 1)
    return optax.join_schedules([warmup, after], [config.warmup_steps])


def make_optimizer(config: OptimConfig) -> optax.GradientTransformationExtraArgs:
    """Clipping by global norm, then AdamW (arXiv:1711.05101): the numbers and the state of `optax.adamw`.

    `update` takes `applied`; if it is False, the moments stay as they are.
    """
    adamw = optax.chain(
        _scale_by_adam(config),
        optax.add_decayed_weights(config.weight_decay, _is_decayed),
        optax.scale_by_learning_rate(make_schedule(config)),
    )
    # Without clipping the state has the same names, so that a resumed run can use another `max_grad_norm`.
    return optax.chain(_clip(config.max_grad_norm) if config.max_grad_norm else optax.identity(), adamw)


def _clip(largest: float) -> optax.GradientTransformation:
    """`optax.clip_by_global_norm` with one factor for all leaves. With a division for each element XLA would keep a
    scaled copy of the gradient."""

    def update(grads: Params, state: optax.EmptyState, params: Params | None = None) -> tuple:
        norm = optax.tree.norm(grads)
        factor = jnp.where(norm < largest, 1.0, largest / norm)
        return jax.tree.map(lambda leaf: leaf * factor, grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _scale_by_adam(config: OptimConfig) -> optax.GradientTransformationExtraArgs:
    """`optax.scale_by_adam` with the choice between new and old moments inside the loop that writes them.

    The code after it reads the written moments, so that none is computed twice, and none is copied because it is still
    read.
    """
    b1, b2, dtype = config.beta1, config.beta2, jnp.dtype(config.moment_dtype)

    def init(params: Params) -> optax.ScaleByAdamState:
        return optax.scale_by_adam(b1, b2, mu_dtype=dtype).init(params)

    def update(
        grads: Params,
        state: optax.ScaleByAdamState,
        params: Params | None = None,
        *,
        applied: Array | bool = True,
        **_: Any,
    ) -> tuple:
        count = optax.safe_increment(state.count)
        mean = jax.tree.map(lambda g, m: (1 - b1) * g + b1 * m, grads, state.mu)
        square = jax.tree.map(lambda g, n: (1 - b2) * (g * g) + b2 * n, grads, state.nu)
        new_state = optax.ScaleByAdamState(
            jnp.where(applied, count, state.count),
            *unfused((_either(applied, mean, state.mu), _either(applied, square, state.nu))),
        )
        # The update reads the first moment before it is rounded to a smaller dtype.
        mean = new_state.mu if dtype == jnp.float32 else mean
        unbiased = (1 - b1 ** count.astype(jnp.float32), 1 - b2 ** count.astype(jnp.float32))
        updates = jax.tree.map(
            lambda m, n: (m / unbiased[0]) / (jnp.sqrt(n / unbiased[1]) + config.eps), mean, new_state.nu
        )
        return updates, new_state

    return optax.GradientTransformationExtraArgs(init, update)


def _either(applied: Array | bool, new: Any, old: Any) -> Any:
    """The new leaves, in the dtypes of the old ones, if `applied`, else the old ones."""
    return jax.tree.map(lambda new, old: jnp.where(applied, new.astype(old.dtype), old), new, old)


def _is_decayed(params: Params) -> Any:
    """True for matrices. Decided by name, since the layer axis gives vectors a second dimension."""
    plain = (*BIASES, *EXACT)
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not path[-1].key.endswith("norm") and path[-1].key not in plain, params
    )


@flax.struct.dataclass
class TrainState:
    """Everything that an optimizer step changes."""

    step: Int[Array, ""]
    """Updates applied so far; a skipped update does not count."""
    params: Params
    """Float32 master parameters; under `lora: low_rank` those of the adapter only."""
    opt_state: optax.OptState


FULL = AllWeights()


def init_trained(key: Key[Array, ""], model: ModelConfig, lora: Lora) -> Params:
    """Initial trained parameters: those of the model, or an adapter that has no effect yet."""
    return init_adapter(key, lora, model) if lora.rank else init_params(key, model)


def trained_shardings(model: ModelConfig, mesh: Mesh, lora: Lora) -> Params:
    """A `NamedSharding` for every trained leaf."""
    return axes_shardings(adapter_axes(lora, model), mesh) if lora.rank else param_shardings(model, mesh)


def state_shardings(model: ModelConfig, optim: OptimConfig, mesh: Mesh, lora: Lora = FULL) -> TrainState:
    """A sharding for every leaf: moments like their parameters, scalars replicated."""
    shardings = trained_shardings(model, mesh, lora)
    optimizer = make_optimizer(optim)
    params = jax.eval_shape(lambda: init_trained(jax.random.key(0), model, lora))
    opt_state = optax.tree.map_params(
        optimizer,
        lambda _, sharding: sharding,
        jax.eval_shape(optimizer.init, params),
        shardings,
        transform_non_params=lambda _: replicated(mesh),
    )
    return TrainState(step=replicated(mesh), params=shardings, opt_state=opt_state)


def state_like(model: ModelConfig, optim: OptimConfig, mesh: Mesh, lora: Lora = FULL) -> TrainState:
    """Shape, dtype and sharding of every leaf, for compiling; allocates nothing."""
    shardings = state_shardings(model, optim, mesh, lora)
    params = jax.eval_shape(lambda: init_trained(jax.random.key(0), model, lora))
    opt_state = jax.eval_shape(make_optimizer(optim).init, params)
    shapes = TrainState(jax.ShapeDtypeStruct((), jnp.int32), params, opt_state)
    return place_shapes(shapes, shardings)


def init_train_state(
    key: Key[Array, ""], model: ModelConfig, optim: OptimConfig, mesh: Mesh, lora: Lora = FULL
) -> TrainState:
    """New parameters and optimizer state. Each device computes its own part, and the values are equal on every mesh."""
    optimizer = make_optimizer(optim)

    def init(key: Key[Array, ""]) -> TrainState:
        params = init_trained(key, model, lora)
        return TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=optimizer.init(params))

    return jax.jit(init, out_shardings=state_shardings(model, optim, mesh, lora))(replicate_key(key, mesh))


def start_train_state(
    params: Params,
    model: ModelConfig,
    optim: OptimConfig,
    mesh: Mesh,
    lora: Lora = FULL,
    *,
    donate: bool = False,
) -> TrainState:
    """The state at step 0 with given parameters (a published checkpoint, or SFT before RL). Copies them, unless
    `donate` is true. Refuses those of another model."""
    checks.check_params(params, jax.eval_shape(lambda: init_trained(jax.random.key(0), model, lora)))
    optimizer = make_optimizer(optim)
    shardings = state_shardings(model, optim, mesh, lora)

    def start(params: Params) -> TrainState:
        masters = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
        return TrainState(step=jnp.zeros((), jnp.int32), params=masters, opt_state=optimizer.init(masters))

    placed = jax.device_put(params, shardings.params)
    return jax.jit(start, out_shardings=shardings, donate_argnums=(0,) if donate else ())(placed)


Metrics = dict[str, Float[Array, ""]]
UpdateStep = Callable[[TrainState, TrainBatch], tuple[TrainState, Metrics]]


def make_update_step(
    model: ModelConfig,
    surrogate: Surrogate,
    optim: OptimConfig,
    update: UpdateConfig,
    mesh: Mesh,
    *,
    temperature: float = 1.0,
    lora: Lora = FULL,
) -> Callable[..., tuple[TrainState, Metrics]]:
    """`update_step(state, batch[, base]) -> (state, metrics)`: jitted, the state donated, one program for any
    `batch.count`.

    The gradient is the sum over micro-batches, accumulated in float32; clipping and AdamW follow once. If the loss or
    the gradient norm is not finite, or no micro-batch is in use, the state stays unchanged and `update/skipped` is 1.

    Args:
        mesh: Mesh of the state and the batch.
        temperature: The sampling temperature, which divides the logits; not read where the batch has its own.
        lora: With `low_rank`, `state.params` is an adapter of `base` (stacked or a tuple of layers), which gets no
            gradient and stays unchanged; see `bind_base`.
    """
    shardings, finish = state_shardings(model, optim, mesh, lora), make_finish(optim)
    gradient = make_gradient(model, surrogate, update, mesh, temperature, lora)

    def update_step(state: TrainState, batch: TrainBatch, *frozen: Params) -> tuple[TrainState, Metrics]:
        return finish(state, batch, accumulate(gradient, state.params, batch, shardings.params, mesh, *frozen))

    return jax.jit(update_step, donate_argnums=0, out_shardings=(shardings, replicated(mesh)))


def make_gradient(
    model: ModelConfig, surrogate: Surrogate, update: UpdateConfig, mesh: Mesh, temperature: float, lora: Lora
) -> Callable:
    """(parameters, micro-batch[, base]) -> ((loss, sums), gradient)."""

    def trained_loss(params: Params, rows: TrainBatch, *frozen: Params) -> tuple:
        if len(frozen) != bool(lora.rank):
            raise ValueError(f"{len(frozen)} base weights with lora.rank = {lora.rank}; an adapter needs its base")
        weights = attach(*frozen, params, lora) if frozen else params
        logprobs, entropy = policy_logprobs(weights, rows, model, update, temperature, mesh)
        return batch_loss(logprobs, entropy, rows, surrogate)

    return jax.value_and_grad(trained_loss, has_aux=True)


def make_finish(optim: OptimConfig) -> Callable[[TrainState, TrainBatch, tuple], tuple[TrainState, Metrics]]:
    """(state, batch, what `accumulate` returns) -> (next state, metrics)."""
    optimizer, schedule = make_optimizer(optim), make_schedule(optim)

    def finish(state: TrainState, batch: TrainBatch, summed: tuple) -> tuple[TrainState, Metrics]:
        value, sums, grads = summed
        norm = optax.tree.norm(grads)
        applied = jnp.isfinite(value) & jnp.isfinite(norm) & (batch.count > 0)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params, applied=applied)
        # Each array is chosen where it is written: a choice afterwards would read and write all of the state again.
        params = _either(applied, jax.tree.map(jnp.add, state.params, updates), state.params)
        counts = jax.tree.map(
            lambda new, old: new if new.ndim else jnp.where(applied, new, old), opt_state, state.opt_state
        )
        state = TrainState(state.step + applied, params, counts)
        metrics = loss_metrics(sums) | {
            "loss/value": value,
            "update/grad_norm": norm,
            "update/lr": schedule(state.step - applied),
            "update/skipped": 1.0 - applied,
            "update/micro_batches": batch.count.astype(jnp.float32),
        }
        return state, {name: jnp.asarray(value, jnp.float32) for name, value in metrics.items()}

    return finish


def bind_base(step: Callable[..., tuple[TrainState, Metrics]], base: Params | None) -> UpdateStep:
    """Binds the frozen weights of an adapter to the step of `make_update_step`; returns the step unchanged if there are
    none."""
    if base is None:
        return step
    return lambda state, batch: step(state, batch, base)


def accumulate(
    gradient: Callable, params: Params, batch: TrainBatch, shardings: Params, mesh: Mesh, *frozen: Params
) -> tuple:
    """(loss, sums, float32 gradients) over the micro-batches in use. The loop bound is dynamic, so one program serves
    any number of them, and padding micro-batches cost nothing.

    Each part of `data` adds up its own rows, and the parts are added once after the loop, in float32. XLA by itself
    would add them in every micro-batch, in the compute dtype.
    """
    if mesh.shape["data"] == 1:
        return _accumulate(gradient, params, batch, shardings, mesh, *frozen)

    def own_rows(params: Params, batch: TrainBatch, *frozen: Params) -> tuple:
        value, sums, grads = _accumulate(gradient, params, batch, shardings, mesh, *frozen)
        extremes = {name: jax.lax.pmax(sums.pop(name), "data") for name in [*sums] if name.endswith("_max")}
        value, sums, grads = jax.lax.psum((value, sums, grads), "data")
        return value, sums | extremes, grads

    rows = jax.tree.map(lambda leaf: P(None, "data") if leaf.ndim >= 3 else P(), batch)
    return jax.shard_map(
        own_rows,
        mesh=mesh,
        in_specs=(P(), rows, *(P() for _ in frozen)),
        out_specs=P(),
        axis_names={"data"},
        check_vma=False,
    )(params, batch, *frozen)


def _accumulate(
    gradient: Callable, params: Params, batch: TrainBatch, shardings: Params, mesh: Mesh, *frozen: Params
) -> tuple:
    """`accumulate` for the rows of this part of `data`."""
    sums = summing(gradient, params, batch, shardings, mesh, *frozen)
    if batch.tokens.shape[0] == 1:  # a padding micro-batch has gradient 0, which is not applied
        return sums.first()
    return jax.lax.fori_loop(0, batch.count, sums.add, sums.none())


class Summing(NamedTuple):
    """How (loss, sums, float32 gradients) add up over micro-batches."""

    none: Callable[[], tuple]
    """Returns the sums of no micro-batch."""
    first: Callable[[], tuple]
    """Returns the sums of the first micro-batch."""
    add: Callable[[Array, tuple], tuple]
    """(index, sums before) -> sums with that micro-batch added."""


def summing(
    gradient: Callable, params: Params, batch: TrainBatch, shardings: Params, mesh: Mesh, *frozen: Params
) -> Summing:
    """The functions that sum over the micro-batches of `batch` under these parameters."""

    def on_shards(grads: Params) -> Params:
        return jax.tree.map(lambda leaf, sharding: constrain(leaf, mesh, *sharding.spec), grads, shardings)

    def of(index: Array | int) -> tuple:
        (value, sums), grads = gradient(params, micro_batch(batch, index, mesh), *frozen)
        return value, sums, on_shards(grads)

    def add(index: Array, before: tuple) -> tuple:
        total, sums, grads = before
        value, more, new = of(index)
        return total + value, merge_sums(sums, more), jax.tree.map(jnp.add, grads, new)

    def none() -> tuple:
        (_, sums), _ = jax.eval_shape(gradient, params, micro_batch(batch, 0, None), *frozen)
        return (
            jnp.zeros((), jnp.float32),
            jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), sums),
            on_shards(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)),
        )

    return Summing(none, partial(of, 0), add)


def micro_batch(batch: TrainBatch, index: Array | int, mesh: Mesh | None) -> TrainBatch:
    """Leaves [R,T] of one micro-batch."""

    def take(leaf: Array) -> Array:
        if leaf.ndim < 3:
            return leaf
        return constrain(jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), mesh, ROWS, "sequence")

    return jax.tree.map(take, batch)


def make_score(
    model: ModelConfig, update: UpdateConfig, mesh: Mesh, *, temperature: float = 1.0
) -> Callable[[Params, TrainBatch], tuple[Float[Array, "M R T"], Float[Array, "M R T"]]]:
    """`score(params, batch) -> (logprobs, entropy)`, jitted, by the forward pass of training; `pack.unpack` splits the
    result by trajectory. Used for recomputed old log-probabilities, the reference policy and score-based advantages."""

    def score(params: Params, batch: TrainBatch) -> tuple[Array, Array]:
        def visit(index: Array, filled: tuple[Array, Array]) -> tuple[Array, Array]:
            new = policy_logprobs(params, micro_batch(batch, index, mesh), model, update, temperature, mesh)
            return tuple(
                jax.lax.dynamic_update_index_in_dim(filled_leaf, part, index, 0)
                for filled_leaf, part in zip(filled, new, strict=True)
            )

        empty = constrain(jnp.zeros(batch.tokens.shape, jnp.float32), mesh, None, ROWS, "sequence")
        return jax.lax.fori_loop(0, batch.count, visit, (empty, empty))

    # Every process unpacks all rows, so every process needs the whole result.
    return jax.jit(score, out_shardings=replicated(mesh) if mesh.is_multi_process else None)
