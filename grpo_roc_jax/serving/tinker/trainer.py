"""Adapters that are trained side by side on one frozen base: sums of gradients, and AdamW with settings of each step.

An `AdapterState` is a value: each verb takes one and returns the next. Gradients are summed in it over any number of
calls until `optimizer_step` applies and clears them. Programs depend on the rank, the matrices, the loss and the padded
length of rows; thresholds, learning rate, betas, eps, decay and clip are arguments.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from grpo_roc_jax.learner.loss import USUAL_CHUNK, UpdateConfig, head_of, policy_hidden, token_logprobs
from grpo_roc_jax.learner.pack import BatchConfig, TrainBatch, first_fit_decreasing, pack
from grpo_roc_jax.learner.update import ConstantRate, make_optimizer, micro_batch, trained_shardings
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.lora import LowRank, attach, init_adapter
from grpo_roc_jax.model.sharding import place_shapes, replicate_key, row_shards, shard_batch
from grpo_roc_jax.model.transformer import Params, unembed
from grpo_roc_jax.serving.refusal import RequestRefused
from grpo_roc_jax.serving.tinker.losses import INPUTS, scalars, settings_of, token_losses
from grpo_roc_jax.serving.tinker.wire import Datum, ForwardBackward
from grpo_roc_jax.shapes import Array
from grpo_roc_jax.types import TrainRow

SHORTEST = 64
"""Tokens of the shortest padded row; longer ones are powers of two, so that few programs are compiled."""
ROW_TOKENS = 4096
"""Tokens of a micro-batch, or one row of it if that is longer."""
MOST_TARGETS = 64
"""Target ids of a position at most; each costs the products with the unembedding once more."""
LARGEST = float(np.finfo(np.float32).max)
READ_BLOCK = 128
"""Positions whose logits are in memory at a time."""


@dataclass(frozen=True, eq=False)
class Adam:
    """What an optimizer step brings with it; the names are those of the API."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """The summed gradient is scaled down to this norm; 0 leaves it unchanged."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value <= LARGEST or (name in ("beta1", "beta2") and value >= 1):
                text = f"adam_params {name} = {str(value)[:40]}; must be 0 to {LARGEST:.3g}, and betas below 1"
                raise RequestRefused(text, name)


@dataclass(frozen=True, eq=False)
class AdapterState:
    """All that training changes of one model, on the device."""

    lora: LowRank
    params: Params
    moments: Any
    """`optax.ScaleByAdamState`s and what else the optimizer keeps."""
    gradient: Params | None = None
    """Summed since the last step; None before the first call."""
    steps: int = 0
    """Optimizer steps so far."""


@dataclass(frozen=True, eq=False)
class Wanted:
    """What `Trainer.read` computes after each of N tokens."""

    targets: np.ndarray | None = None
    """int32[N,K]: ids to score, at temperature 1."""
    top: int = 0
    """How many of the most likely ids, at `temperature`."""
    draws: int = 0
    """How many ids to draw, at `temperature`."""
    temperature: float = 1.0
    """0 stands for 1."""
    seed: int = 0
    """Seed of the draws."""


class Readings(NamedTuple):
    """The results of `Trainer.read`."""

    scored: np.ndarray
    """float32[N,K]: log-probabilities of the targets."""
    top: tuple[np.ndarray, np.ndarray]
    """(ids, log-probabilities), [N,top], the most likely first."""
    drawn: tuple[np.ndarray, np.ndarray]
    """The same of the ids that were drawn, [N,draws]."""


def bucket(length: int, longest: int) -> int:
    """The padded length of rows for datums of at most this length."""
    padded = SHORTEST
    while padded < length:
        padded *= 2
    return min(padded, max(longest, length))


@dataclass(frozen=True, eq=False)
class Trainer:
    """The programs for adapters of one base."""

    base: Params
    """Frozen, a tuple of layers in the compute dtype."""
    model: ModelConfig
    update: UpdateConfig
    mesh: Mesh
    longest: int
    """Tokens of the longest datum."""

    def start(self, lora: LowRank, seed: int) -> AdapterState:
        """A new adapter, which has no effect yet."""
        key = replicate_key(jax.random.key(seed), self.mesh)
        init = partial(init_adapter, lora=lora, model=self.model)
        params = jax.jit(init, out_shardings=self.places(lora))(key)
        return AdapterState(lora, params, optimizer_of(Adam()).init(params))

    def like(self, lora: LowRank) -> Params:
        """Shapes, dtypes and places of an adapter."""
        shapes = jax.eval_shape(partial(init_adapter, lora=lora, model=self.model), jax.random.key(0))
        return place_shapes(shapes, self.places(lora))

    def places(self, lora: LowRank) -> Params:
        """A sharding for every leaf of an adapter."""
        return trained_shardings(self.model, self.mesh, lora)

    def forward_backward(
        self, state: AdapterState, request: ForwardBackward
    ) -> tuple[AdapterState, list[np.ndarray], dict[str, float]]:
        """(state with the gradient added, log-probabilities of the targets of each datum, metrics).

        Raises:
            RequestRefused: No such loss, or a datum that does not fit it.
        """
        config, rows = self.checked(request)
        arguments, outputs, total = scalars(config), [np.zeros(0)] * len(rows), 0.0
        gradient, wide = state.gradient, request.loss_fn == "cross_entropy"
        run = _program(self.model, self.update, self.mesh, state.lora, request.loss_fn, request.forward_only)
        for batch, targets, weights, places in self._micro_batches(rows):
            value, logprobs, added = run(state.params, self.base, batch, targets, weights, arguments)
            total += float(value)
            if added is not None:
                gradient = added if gradient is None else _add(gradient, added)
            values = np.asarray(jax.device_get(logprobs))
            for index, row, start, length in places:
                array = values[row, start : start + length]
                outputs[index] = array[:, : rows[index].targets.shape[1]] if wide and rows[index].flat else array[:, 0]
        if not np.isfinite(total):
            raise RequestRefused("the loss is not finite; look at logprobs, advantages and weights of the data")
        return replace(state, gradient=gradient), outputs, {"loss:sum": total}

    def checked(self, request: ForwardBackward) -> tuple[dict[str, float], list["_Row"]]:
        """(settings of the loss, rows); nothing is computed.

        Raises:
            RequestRefused: No such loss, or a datum that does not fit it.
        """
        config = settings_of(request.loss_fn, request.config)
        if not request.data:
            raise RequestRefused("forward_backward without data; send at least one datum")
        return config, [self._row(i, datum, request.loss_fn) for i, datum in enumerate(request.data)]

    def optimizer_step(self, state: AdapterState, adam: Adam) -> tuple[AdapterState, dict[str, float]]:
        """(state with the summed gradient applied and cleared, metrics). A gradient that is not finite, or that would
        make a parameter so, is dropped, with `update_skipped`.

        Raises:
            RequestRefused: There is no gradient.
        """
        if state.gradient is None:
            raise RequestRefused("optim_step without a gradient; call forward_backward before it")
        numbers = {name: jnp.float32(value) for name, value in sorted(vars(adam).items())}
        params, moments, norm, applied = adam_step(state.params, state.moments, state.gradient, numbers)
        done = bool(applied)
        metrics = {"grad_norm:mean": float(norm), "update_skipped:sum": float(not done)}
        return replace(state, params=params, moments=moments, gradient=None, steps=state.steps + done), metrics

    def read(self, lora: LowRank | None, params: Params | None, tokens: np.ndarray, wanted: Wanted) -> Readings:
        """What the model expects after each of N tokens, given those up to it.

        Args:
            lora: Of the adapter; None for the base alone.
            params: The adapter; None for the base alone.
            tokens: int32[N].
            wanted: What to compute.
        """
        N = len(tokens)
        targets = np.zeros((N, 0), np.int32) if wanted.targets is None else wanted.targets
        K = -(-targets.shape[1] // 8) * 8 if targets.shape[1] > 1 else targets.shape[1]
        rows = [_Row(tokens, tokens[:, None], np.zeros((N, 1), np.float32), None)]
        run = _reading_program(self.model, self.update, self.mesh, lora, wanted.top, wanted.draws)
        batch, _, _, ((_, row, start, length),) = next(self._micro_batches(rows))
        span = slice(start, start + length)
        padded = np.zeros((*batch.tokens.shape, K), np.int32)
        padded[row, span, : targets.shape[1]] = targets
        key, heat = jax.random.key(wanted.seed), jnp.float32(wanted.temperature or 1.0)
        readings = jax.device_get(run(params, self.base, batch, jnp.asarray(padded), heat, key))
        scored, *pairs = jax.tree.map(lambda leaf: np.asarray(leaf)[row, span], readings)
        return Readings(scored[:, : targets.shape[1]], *pairs)

    def _row(self, index: int, datum: Datum, loss_fn: str) -> "_Row":
        N, inputs = len(datum.tokens), dict(datum.inputs)
        if not 1 <= N <= self.longest:
            raise RequestRefused(
                f"datum {index} has {N} tokens; must be 1 to {self.longest}, the context of the server: shorten it, or "
                "raise --context"
            )
        needed = [*INPUTS[loss_fn]]
        needed += [] if loss_fn == "cross_entropy" else ["logprobs"]
        needed += ["sequence_ratio_mask"] if loss_fn == "gspo" else []
        if lacking := [name for name in needed if name not in inputs]:
            raise RequestRefused(f"datum {index} has no {', '.join(lacking)}; {loss_fn} needs {', '.join(needed)}")
        inputs = {name: values for name, values in inputs.items() if name in (*needed, "weights")}
        targets = inputs["target_tokens"]
        flat = loss_fn == "cross_entropy" and targets.ndim == 2
        for name in {*needed, *(("weights",) if "weights" in inputs else ())}:
            shape = inputs[name].shape
            if shape != (targets.shape if flat else (N,)) or shape[0] != N:
                raise RequestRefused(f"datum {index}: {name} has shape {list(shape)}; must fit its {N} input tokens")
        targets = targets.reshape(N, -1)
        if not 1 <= targets.shape[1] <= MOST_TARGETS:
            raise RequestRefused(f"datum {index} has {targets.shape[1]} targets a token; must be 1 to {MOST_TARGETS}")
        for name, ids in (("tokens", datum.tokens), ("target_tokens", targets)):
            if ids.min() < 0 or ids.max() >= self.model.vocab_size:
                raise RequestRefused(
                    f"datum {index}: {name} from {ids.min()} to {ids.max()}, but the model has {self.model.vocab_size} "
                    "tokens; use its own tokenizer (get_tokenizer)"
                )
        if not np.isfinite(np.asarray(inputs.get("advantages", 0.0), np.float32)).all():
            raise RequestRefused(f"datum {index}: advantages are not all finite numbers")
        weights = np.asarray(inputs.get("weights", np.ones(N)), np.float32).reshape(N, -1)
        return _Row(datum.tokens, targets.astype(np.int32), weights, inputs, flat=flat)

    def _micro_batches(self, rows: Sequence["_Row"]) -> Iterator[tuple[TrainBatch, Array, Array, list[tuple]]]:
        """(batch [R,T], target ids [R,T,K], their weights, (datum, row, first position, length) of each datum)."""
        T = bucket(max(len(row.tokens) for row in rows), self.longest)
        per = row_shards(self.mesh)
        used = first_fit_decreasing(np.array([len(row.tokens) for row in rows]), T)[2]
        # Powers of two, so that few programs are compiled.
        R = max(1, min(ROW_TOKENS // T, 1 << (used - 1).bit_length()))
        R, K = -(-R // per) * per, max(row.targets.shape[1] for row in rows)
        batch, placement = pack(
            [row.trained for row in rows], BatchConfig(row_length=T, rows=R), max(1, -(-used // R)), per
        )
        for micro in range(placement.count):
            targets, weights = np.zeros((R, T, K), np.int32), np.zeros((R, T, K), np.float32)
            places = [
                (i, int(placement.row[i]), int(placement.offset[i]), len(rows[i].tokens))
                for i in np.flatnonzero(placement.micro == micro)
            ]
            for i, row, start, length in places:
                width = rows[i].targets.shape[1]
                targets[row, start : start + length, :width] = rows[i].targets
                weights[row, start : start + length, :width] = rows[i].weights
            placed = micro_batch(shard_batch(_part(batch, micro), self.mesh), 0, None)
            yield placed, jnp.asarray(targets), jnp.asarray(weights), places


def _part(batch: TrainBatch, micro: int) -> TrainBatch:
    """The host batch of one micro-batch, [1,R,T]."""
    return jax.tree.map(lambda leaf: leaf[micro : micro + 1] if leaf.ndim >= 3 else leaf, batch)


@dataclass(frozen=True, eq=False)
class _Row:
    """A datum that was checked."""

    tokens: np.ndarray
    targets: np.ndarray
    """int32[N,K]."""
    weights: np.ndarray
    """float32[N,K]."""
    inputs: Mapping[str, np.ndarray] | None
    flat: bool = False
    """Whether targets came as [N,K], so that log-probabilities are answered in that form."""

    @property
    def trained(self) -> TrainRow:
        """As rows are packed: A as advantages, q as old log-probabilities, gspo's mask as the policy mask."""
        N, inputs = len(self.tokens), self.inputs or {}

        def of(name: str) -> np.ndarray:
            return np.asarray(inputs[name], np.float32) if name in inputs else np.zeros(N, np.float32)

        mask = np.asarray(inputs["sequence_ratio_mask"]) > 0 if "sequence_ratio_mask" in inputs else np.ones(N, bool)
        zero = np.zeros(N, np.float32)
        return TrainRow(self.tokens, mask, of("logprobs"), of("advantages"), zero, np.zeros(N, np.int32), zero.copy())


@cache
def _program(
    model: ModelConfig, update: UpdateConfig, mesh: Mesh, lora: LowRank | None, loss_fn: str, forward_only: bool
) -> Any:
    """(adapter, base, batch, targets, weights, settings) -> (loss, log-probabilities [R,T,K], gradient or None)."""

    def loss(params: Params | None, base: Params, batch: TrainBatch, targets: Array, weights: Array, config: dict):
        full = base if lora is None else attach(base, params, lora)
        hidden = policy_hidden(full, batch, model, update, mesh)
        # Logits that are kept for the backward pass would be kept for each target.
        head = head_of(update if targets.shape[2] == 1 else replace(update, vocab_chunk=USUAL_CHUNK), model)
        score = partial(
            token_logprobs, full, hidden, batch.tokens, batch.segment_ids,
            head=head, mesh=mesh,
        )  # fmt: skip
        columns = [score(targets=targets[..., k])[0] for k in range(targets.shape[2])]
        logprobs = jnp.stack(columns, axis=-1)
        there = batch.segment_ids > 0
        if loss_fn == "cross_entropy":
            total = sum(
                jnp.sum(token_losses(loss_fn, column, column, weights[..., k], config, there, batch.segment_ids))
                for k, column in enumerate(columns)
            )
            return total, logprobs
        single = columns[0]
        old = jnp.where(there, batch.logprobs_old, jax.lax.stop_gradient(single))
        each = token_losses(
            loss_fn, single, old, batch.advantages, config, batch.policy_mask & there, batch.ratio_segments
        )
        return jnp.sum(jnp.where(there, weights[..., 0] * each, 0.0)), logprobs

    def run(*arguments: Any) -> tuple:
        if forward_only:
            value, logprobs = loss(*arguments)
            return value, logprobs, None
        (value, logprobs), gradient = jax.value_and_grad(loss, has_aux=True)(*arguments)
        return value, logprobs, gradient

    return jax.jit(run)


@cache
def _reading_program(
    model: ModelConfig, update: UpdateConfig, mesh: Mesh, lora: LowRank | None, top: int, draws: int
) -> Any:
    """(adapter, base, batch [R,T], targets [R,T,K], temperature, key) -> the fields of `Readings`, each [R,T,...]."""

    def run(params: Params | None, base: Params, batch: TrainBatch, targets: Array, heat: Array, key: Array) -> tuple:
        full = base if lora is None else attach(base, params, lora)
        hidden = policy_hidden(full, batch, model, update, mesh)
        R, T = batch.tokens.shape
        block = math.gcd(T, READ_BLOCK)

        def of_block(number: Array, hidden: Array, ids: Array) -> tuple:
            logits = unembed(full, hidden, model).astype(jnp.float32)
            exact, heated = (jax.nn.log_softmax(values, axis=-1) for values in (logits, logits / heat))
            values, most = jax.lax.top_k(heated, top)
            keys = jax.random.split(jax.random.fold_in(key, number), draws)
            drawn = [jax.random.categorical(draw, heated) for draw in keys]
            drawn = jnp.stack(drawn, -1) if drawn else jnp.zeros((*ids.shape[:-1], 0), jnp.int32)
            return (
                jnp.take_along_axis(exact, ids, -1),
                (most, values),
                (drawn, jnp.take_along_axis(heated, drawn, -1)),
            )

        def blocks(leaf: Array) -> Array:
            return leaf.reshape(R * T // block, block, leaf.shape[-1])

        numbers = jnp.arange(R * T // block)
        read = jax.lax.map(lambda of: of_block(*of), (numbers, blocks(hidden), blocks(targets)))
        scored, *pairs = jax.tree.map(lambda leaf: leaf.reshape(R, T, leaf.shape[-1]), read)
        return scored, *pairs

    return jax.jit(run)


@jax.jit
def _add(left: Params, right: Params) -> Params:
    return jax.tree.map(jnp.add, left, right)


def optimizer_of(adam: Adam | Mapping[str, Array]) -> optax.GradientTransformationExtraArgs:
    """The optimizer of training with the settings of one step, which may be traced. It clips nothing: `adam_step`
    does."""
    numbers = vars(adam) if isinstance(adam, Adam) else adam
    settings: Any = SimpleNamespace(
        lr=numbers["learning_rate"],
        warmup_steps=0,
        schedule=ConstantRate(),
        beta1=numbers["beta1"],
        beta2=numbers["beta2"],
        eps=numbers["eps"],
        weight_decay=numbers["weight_decay"],
        max_grad_norm=0.0,
        moment_dtype="float32",
    )
    return make_optimizer(settings)


@jax.jit
def adam_step(params: Params, moments: Any, gradient: Params, adam: Mapping[str, Array]) -> tuple:
    """(parameters, moments, norm of the gradient, whether it was applied)."""
    norm = optax.tree.norm(gradient)
    applied = jnp.isfinite(norm)
    largest = jnp.where(adam["grad_clip_norm"] > 0, adam["grad_clip_norm"], jnp.inf)
    factor = jnp.where(norm < largest, 1.0, largest / norm)
    clipped = jax.tree.map(lambda leaf: leaf * factor, gradient)
    updates, moved = optimizer_of(adam).update(clipped, moments, params, applied=applied)
    new = jax.tree.map(jnp.add, params, updates)
    finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves((new, moved))]
    applied &= jnp.stack(finite).all()  # an eps of 0 divides by the root of a zero moment

    def either(new: Any, old: Any) -> Any:
        return jax.tree.map(lambda new, old: jnp.where(applied, new, old), new, old)

    return either(new, params), either(moved, moments), norm, applied
