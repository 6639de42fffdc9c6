"""Log-probabilities of tokens without an array [B,T,V], and the loss of a micro-batch with its statistics.

The loss is sum(weights * phi(log-ratio, advantages)) with phi from `method.surrogate`. All normalizers are inside the
weights, so losses and gradients add up over micro-batches and devices. Masked-out values, NaN included, reach neither
the loss nor its gradient.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from grpo_roc_jax.learner.pack import TrainBatch
from grpo_roc_jax.method.divergence import MAX_LOGRATIO, k3
from grpo_roc_jax.method.surrogate import Surrogate
from grpo_roc_jax.model.attention_mask import SAVED, soft_cap
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.experts import mix_experts
from grpo_roc_jax.model.fusion import unfused
from grpo_roc_jax.model.parallel import (
    attention_for,
    from_zigzag,
    look_up_on,
    look_up_wide_on,
    output_product_on,
    recur_on,
    sequence_parts,
    to_zigzag,
)
from grpo_roc_jax.model.sharding import ROWS, constrain, platform_of
from grpo_roc_jax.model.transformer import Execution, Params, Splits, forward, identity, layer_weights
from grpo_roc_jax.settings.options import Count, settings
from grpo_roc_jax.shapes import Array, Float, Int, checked

T = TypeVar("T")


@settings
class UpdateConfig:
    """How forward and backward of training use memory. Results differ only by rounding."""

    attention: Literal["auto", "reference", "blocked", "cudnn", "splash"] = "auto"
    """`reference` materializes the scores [T,T] of every head; `blocked` keeps those of one block of queries; `cudnn`
    is cuDNN's fused kernel (NVIDIA GPU, bfloat16); `splash` are the Pallas kernels for TPUs. `auto` takes `blocked` for
    rows of 256 tokens (CPU) or 1024 (elsewhere) and more; where an accelerator has several paths for such rows, a run
    times them at its start and takes the fastest."""
    remat: Literal["auto", "none", "attention", "full"] = "auto"
    """What the backward pass recomputes: nothing (fastest where it fits), each layer but its attention, whose output is
    kept, or each layer from its input. `auto`: a run on a CPU takes the first of these that fits its memory (for
    models narrower than 256 not the first), and says so; elsewhere `attention`, or `full` where that does not fit."""
    vocab_chunk: Count = 0
    """Columns of the unembedding whose logits exist at a time: rows x row_length x vocab_chunk x 4 bytes. With at least
    the vocabulary all logits are kept for the backward pass; with fewer they are computed in both passes. 0: a run on a
    CPU keeps them where its memory has room; else 8192."""


# ---- log-probabilities in vocabulary chunks ------------------------------------------------------------------------


@dataclass(frozen=True)
class Head:
    """How logits are computed."""

    vocab_chunk: int = 8192
    """Logits are computed in chunks of [B,T,vocab_chunk], forward and backward."""
    cap: float = 0.0
    """Soft cap of the logits, applied before the temperature (`model.extras.logit_cap`)."""
    stores_logits: bool = False
    """Whether all logits are computed once and stored for the backward pass, whatever `vocab_chunk` is."""


@checked
def token_logprobs(
    params: Params,
    hidden: Float[Array, "B T D"],
    tokens: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    *,
    temperature: float | Float[Array, "B T"] = 1.0,
    head: Head = Head(),
    mesh: Mesh | None = None,
    targets: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """log p(tokens[t] | the tokens before it) and the entropy of that distribution, both float32, in nats.

    p = softmax(logits / temperature). The shift by one happens here and nowhere else: index t of the result is about
    `tokens[t]`. The first token of a segment has no context and gets 0, as does padding.

    Args:
        params: Masters or published parameters; the unembedding is cast to the dtype of `hidden`.
        hidden: From `transformer.forward`; with `sharding.sequence` above 1 in the order of `parallel.to_zigzag`.
        tokens: Ids below V.
        segment_ids: As in `TrainBatch`.
        temperature: The sampling temperature, so that ratios compare the same kind of distribution; that of all rows,
            or of each token's trajectory.
        head: How the logits are computed.
        mesh: Mesh of the parameters; each device then loops over its own share of the vocabulary.
        targets: Ids to score in place of the tokens themselves: index t of the result is then about `targets[t]`, given
            the tokens up to and including `tokens[t]`; nothing is shifted.
    """
    parts = sequence_parts(mesh)
    following = to_zigzag(jnp.roll(tokens, -1, axis=1) if targets is None else targets, parts)
    weights, vocab_axis = (params["unembed"], 1) if "unembed" in params else (params["embed"], 0)
    shared = jnp.ndim(temperature) == 0
    flat = parts == 1  # otherwise the mesh splits tokens separately from rows
    head = _Head(**vars(head), vocab_axis=vocab_axis, scale=1.0 / temperature if shared else 1.0, mesh=mesh, flat=flat)
    scale = None if shared else to_zigzag(1.0 / temperature, parts)
    if flat:
        hidden, following, scale = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (hidden, following, scale))
    flat_results = _chunked_logprobs(head, hidden, weights.astype(hidden.dtype), following, scale)
    logprobs, entropy = (x.reshape(tokens.shape) for x in flat_results)
    if targets is not None:
        return tuple(
            jnp.where(segment_ids > 0, constrain(from_zigzag(x, parts), mesh, ROWS, "sequence"), 0.0)
            for x in (logprobs, entropy)
        )
    has_past = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)

    def shift(x: Array) -> Array:
        ordered = constrain(from_zigzag(x, parts), mesh, ROWS, "sequence")
        return jnp.pad(jnp.where(has_past, ordered[:, :-1], 0.0), ((0, 0), (1, 0)))

    return shift(logprobs), shift(entropy)


@dataclass(frozen=True, kw_only=True)
class _Head(Head):
    """Static settings of the chunked unembedding. In comments and shapes `*` stands for the axes of positions, [B,T] or
    [B*T], and `#` for those of columns: [C], or [S,F,C] where a mesh splits the vocabulary."""

    vocab_axis: int
    scale: float
    mesh: Mesh | None
    flat: bool
    """Whether rows and tokens are merged into one axis of positions."""

    @property
    def positions(self) -> tuple:
        """Mesh axes for the axes of positions, as `constrain` takes them."""
        return (ROWS,) if self.flat else (ROWS, "sequence")

    @property
    def shards(self) -> tuple[int, int]:
        """Number of parts of the vocabulary over `tensor`, then over `fsdp` and `sequence`
        (`sharding.LOGICAL_TO_MESH`)."""
        if self.mesh is None:
            return 1, 1
        return self.mesh.shape["tensor"], self.mesh.shape["fsdp"] * self.mesh.shape["sequence"]

    @property
    def order(self) -> str:
        """Axes of `split`. Where nothing is split they are those of the unembedding; with more axes XLA would write
        transposed copies of it and of the gradient of the logits."""
        if self.shards != (1, 1):
            return "sfcd"
        return "cd" if self.vocab_axis == 0 else "dc"

    @property
    def axes(self) -> tuple[int, ...]:
        """Axes of the logits that hold columns."""
        return tuple(range(1 - len(self.order), 0))

    def split(self, weights: Array) -> Array:
        """[V,D] or [D,V] -> [S,F,V/SF,D] with S, F = `shards`, so that a chunk is a slice of every device's share;
        unchanged where nothing is split."""
        S, F = self.shards
        if S * F == 1:
            return weights
        V, D = weights.shape if self.vocab_axis == 0 else weights.shape[::-1]
        parts = (S, F, V // (S * F))
        return weights.reshape(*parts, D) if self.vocab_axis == 0 else jnp.moveaxis(weights.reshape(D, *parts), 0, -1)

    def join(self, parts: Array) -> Array:
        """The inverse of `split`."""
        if self.shards == (1, 1):
            return parts
        S, F, C, D = parts.shape
        joined = parts if self.vocab_axis == 0 else jnp.moveaxis(parts, -1, 0)
        return joined.reshape((S * F * C, D) if self.vocab_axis == 0 else (D, S * F * C))

    def share(self, parts: Array) -> int:
        """Number of columns on a device."""
        return parts.shape[self.order.index("c")]

    def over_chunks(self, visit: Callable[..., T], carry: T, share: int) -> T:
        """The carry after `visit(start, carry, chunk width)` of all chunks of `share` columns."""
        chunk = share if self.stores_logits else max(min(self.vocab_chunk // math.prod(self.shards), share), 1)
        full, rest = divmod(share, chunk)
        if full == 1:
            carry = visit(0, carry, chunk)
        else:
            carry = jax.lax.fori_loop(0, full, lambda i, carry: visit(i * chunk, carry, chunk), carry)
        return visit(full * chunk, carry, rest) if rest else carry

    def columns(self, parts: Array, start: Array | int, width: int) -> Array:
        """Columns start..start+width of every share, gathered over fsdp and sequence like the weights of a layer."""
        # Sliced in place, then gathered: without constraints XLA gathers all shares for every chunk and slices after.
        chunk = parts
        if width < self.share(parts):
            chunk = jax.lax.dynamic_slice_in_dim(parts, start, width, axis=self.order.index("c"))
        if self.order != "sfcd":
            return chunk
        chunk = constrain(chunk, self.mesh, "tensor", ("fsdp", "sequence"), None, None)
        return constrain(chunk, self.mesh, "tensor", None, None, None)

    def over_columns(self, x: Array) -> Array:
        """Shape [*], extended by axes of size 1 for the columns of a chunk."""
        return x.reshape(*x.shape, *(1 for _ in self.axes))

    def scaled(self, x: Array, inverse_temperatures: Array | None) -> Array:
        """Divides [*,#] by the temperature: that of all tokens, or the one of each token, given as 1/temperature."""
        return x * (self.scale if inverse_temperatures is None else self.over_columns(inverse_temperatures))

    def on_mesh(self, logits: Array) -> Array:
        if self.order != "sfcd":
            return constrain(logits, self.mesh, *self.positions, None)
        return constrain(logits, self.mesh, *self.positions, "tensor", None, None)

    def logits(self, hidden: Array, chunk: Array, inverse_temperatures: Array | None) -> Array:
        """Float32 [*,#], capped and divided by the temperature."""
        product = f"...d,{self.order}->...{self.order.replace('d', '')}"
        logits = jnp.einsum(product, hidden, chunk, preferred_element_type=jnp.float32)
        return self.on_mesh(self.scaled(soft_cap(logits, self.cap), inverse_temperatures))

    def gradient(self, dz: Array, z: Array, inverse_temperatures: Array | None, dtype: jnp.dtype) -> Array:
        """Gradient of the matrix product, from the gradient of what `logits` returned."""
        dz = self.scaled(dz, inverse_temperatures)
        if self.cap:
            capped = z / self.scaled(jnp.ones_like(z), inverse_temperatures)
            dz *= 1.0 - jnp.square(capped / self.cap)
        return unfused(dz.astype(dtype))

    def at_targets(self, z: Array, targets: Array, start: Array | int, share: int) -> Array:
        """[*]: the logit of the target where it is among the columns of [*,#], else 0. Padding may have any id; all
        that is promised for it is a finite number."""
        width = z.shape[-1]
        if self.order != "sfcd" and width == share:  # of all columns the gather writes no array of their size
            return jnp.take_along_axis(z, targets[..., None], axis=-1, mode="clip")[..., 0]
        return jnp.where(self.hits(targets, start, width, share), z, 0.0).sum(self.axes)

    def hits(self, targets: Array, start: Array | int, width: int, share: int) -> Array:
        """True [*,#] where a column is the target."""
        S, F = self.shards
        ids = jnp.arange(S * F).reshape(S, F, 1) * share + start + jnp.arange(width).reshape(1, 1, width)
        ids = ids.reshape(*(1 for _ in targets.shape), *ids.shape[-len(self.axes) :])
        return self.over_columns(targets) == ids


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked_logprobs(
    head: _Head, hidden: Array, weights: Array, targets: Array, scale: Array | None
) -> tuple[Array, Array]:
    """(log-probability of the target, entropy) of each position, [*] float32."""
    return _chunked_logprobs_fwd(head, hidden, weights, targets, scale)[0]


def _chunked_logprobs_fwd(head: _Head, hidden: Array, weights: Array, targets: Array, scale: Array | None) -> tuple:
    """One pass over the chunks: running maximum m, s = sum exp(z - m), e = sum exp(z - m) z, and the target's z.

    log p = (z_target - m) - log s and H = lse - e/s with lse = m + log s; the backward pass needs lse and H only.
    z_target - lse would be rounded to the precision of a large lse, and differently than in sampling.
    """
    parts = head.split(weights)
    share = head.share(parts)

    def visit(start: Array | int, carry: tuple, width: int) -> tuple:
        m, s, e, target, _ = carry
        z = head.logits(hidden, head.columns(parts, start, width), scale)
        m_new = jnp.maximum(m, z.max(head.axes))
        p = jnp.exp(z - head.over_columns(m_new))
        old = jnp.exp(m - m_new)
        target = target + head.at_targets(z, targets, start, share)
        return (
            m_new,
            s * old + p.sum(head.axes),
            e * old + (p * z).sum(head.axes),
            target,
            z if head.stores_logits else None,
        )

    # The initial maximum is finite, so exp(start - m) is 0 at the first chunk; -inf would give NaN for a row of -inf.
    zeros = jnp.zeros(targets.shape, jnp.float32)
    m, s, e, target, z = head.over_chunks(visit, (zeros - 1e30, zeros, zeros, zeros, None), share)
    lse = m + jnp.log(s)
    entropy = lse - e / s
    return (target - m - jnp.log(s), entropy), (hidden, weights, targets, scale, lse, entropy, z)


def _chunked_logprobs_bwd(head: _Head, saved: tuple, cotangents: tuple[Array, Array]) -> tuple:
    """dz = g (onehot - p) - h p (log p + H) with p recomputed from lse; g and h are the cotangents of log p and H."""
    hidden, weights, targets, scale, lse, entropy, known = saved
    g, h = map(head.over_columns, cotangents)
    parts = head.split(weights)
    share, product = head.share(parts), partial(jnp.einsum, preferred_element_type=jnp.float32)
    rows, order = "m" if head.flat else "bt", head.order
    logits = rows + order.replace("d", "")

    def visit(start: Array | int, carry: tuple[Array, Array], width: int) -> tuple[Array, Array]:
        d_hidden, d_parts = carry
        columns = head.columns(parts, start, width)
        z = known if head.stores_logits else head.logits(hidden, columns, scale)
        log_p = z - head.over_columns(lse)
        hit = head.hits(targets, start, width, share)
        dz = jnp.where(hit, g, 0.0) - jnp.exp(log_p) * (g + h * (log_p + head.over_columns(entropy)))
        dz = head.gradient(dz, z, scale, hidden.dtype)
        d_hidden += product(f"{logits},{order}->{rows}d", dz, columns)
        d_columns = product(f"{logits},{rows}d->{order}", dz, hidden).astype(weights.dtype)
        if order == "sfcd":
            d_columns = constrain(d_columns, head.mesh, "tensor", ("fsdp", "sequence"), None, None)
        if width == share:
            return d_hidden, d_columns
        # The buffer is written and never read back, so the loop updates it in place.
        return d_hidden, jax.lax.dynamic_update_slice_in_dim(d_parts, d_columns, start, axis=order.index("c"))

    carry = (jnp.zeros(hidden.shape, jnp.float32), jnp.zeros(parts.shape, weights.dtype))
    d_hidden, d_parts = head.over_chunks(visit, carry, share)
    return d_hidden.astype(hidden.dtype), head.join(d_parts), None, None


_chunked_logprobs.defvjp(_chunked_logprobs_fwd, _chunked_logprobs_bwd)


# ---- the loss of a micro-batch -------------------------------------------------------------------------------------

LossSums = dict[str, Array]
"""Sums over policy tokens, which add up over micro-batches; names ending in `_max` take the maximum instead."""


def policy_logprobs(
    params: Params,
    batch: TrainBatch,
    model: ModelConfig,
    update: UpdateConfig,
    temperature: float = 1.0,
    mesh: Mesh | None = None,
) -> tuple[Float[Array, "R T"], Float[Array, "R T"]]:
    """(log-probabilities, entropy) of one micro-batch with leaves [R,T]: the forward pass of training and scoring."""
    hidden = policy_hidden(params, batch, model, update, mesh)
    return token_logprobs(
        params,
        hidden,
        batch.tokens,
        batch.segment_ids,
        temperature=temperature if batch.temperatures is None else batch.temperatures,
        head=head_of(update, model),
        mesh=mesh,
    )


def policy_hidden(
    params: Params, batch: TrainBatch, model: ModelConfig, update: UpdateConfig, mesh: Mesh | None = None
) -> Float[Array, "R T D"]:
    """The hidden states before the unembedding, of one micro-batch with leaves [R,T]; input of `token_logprobs`."""
    length, parts = batch.tokens.shape[1], sequence_parts(mesh)
    splits = splits_on(mesh, length)
    execution = Execution(
        attend=attention_for(update.attention, model, length, mesh),
        look_up=look_up_on(mesh, token_axes(mesh, length)),
        look_up_wide=look_up_wide_on(mesh, token_axes(mesh, length)),
        recur=recur_on(mesh),
        experts=partial(mix_experts, mesh=mesh),
        remat=make_remat(update.remat, scanned=not isinstance(params["layers"], tuple)),
        splits=splits,
        unroll=splits.flat and update.remat == "none" and layer_weights(model) >= UNROLLED_WEIGHTS,
    )
    rows = (to_zigzag(leaf, parts) for leaf in (batch.tokens, batch.positions, batch.segment_ids))
    routes = None if batch.routes is None else to_zigzag(batch.routes, parts)
    hidden = forward(params, *rows, model, execution, routes)
    # Gathered once, since the loop over the vocabulary reads it in every chunk.
    return constrain(hidden, mesh, ROWS, "sequence", None)


UNROLLED_WEIGHTS = 2 << 20
"""Weights of a layer that a token is multiplied with, from which layers that save everything are unrolled on a CPU.
With 30 layers of 3.5 million (SmolLM2-135M) a step takes a twentieth less, and its compilation 4 s more."""
USUAL_CHUNK = 8192
"""Columns of a chunk where `vocab_chunk` is 0 and the run has not chosen a value."""


def head_of(update: UpdateConfig, model: ModelConfig) -> Head:
    """How the logits of an update are computed."""
    chunk = update.vocab_chunk or USUAL_CHUNK
    return Head(chunk, model.extras.logit_cap, chunk >= model.vocab_size)


def splits_on(mesh: Mesh | None, length: int) -> Splits:
    """Sharding constraints of the layers in the update, for rows of `length` tokens. Each constraint is where XLA was
    seen to choose a worse sharding by itself (docs/compilers.md)."""
    on_cpu = platform_of(mesh) == "cpu"
    if mesh is None:
        return Splits(flat=on_cpu)

    def at(*axes: str | tuple[str, ...] | None) -> Callable[[Array], Array]:
        return lambda x: constrain(x, mesh, ROWS, *axes)

    return Splits(
        residual=at(token_axes(mesh, length), None),
        # Gathered once before the products, whose results are split by heads and hidden width. Otherwise XLA gathers
        # the weights over `tensor`, and keys and values in every iteration of the attention's loops.
        block_input=at("sequence", None),
        # Otherwise the backward pass gathers the weights over `tensor` and multiplies a part of the tokens by them.
        ffn_hidden=at("sequence", "tensor"),
        # With shared rows XLA would gather tokens and weights for these products and compute them on all devices.
        block_output=at("sequence", None) if sequence_parts(mesh) > 1 else identity,
        output_product=output_product_on(mesh, token_axes(mesh, length)),
        flat=on_cpu and mesh.shape["sequence"] * mesh.shape["tensor"] == 1,
    )


def token_axes(mesh: Mesh | None, length: int) -> tuple[str, ...]:
    """The mesh axes that split the tokens of the residual stream between blocks. Unless `tensor` is among them, every
    device of `tensor` holds all that is saved for the backward pass (arXiv:2205.05198)."""
    both = ("sequence", "tensor")
    return both if mesh is not None and length % math.prod(mesh.shape[axis] for axis in both) == 0 else both[:1]


def make_remat(name: str, *, scanned: bool = True) -> Callable[[Callable], Callable] | None:
    """The wrapper of a layer's body under that policy; None saves every intermediate. `auto` means `attention` unless
    the run has chosen another."""
    if name == "none":
        return None
    policies = jax.checkpoint_policies
    policy = policies.nothing_saveable
    if name in ("attention", "auto"):
        policy = policies.save_from_both_policies(policies.save_only_these_names(SAVED), _is_fused_attention)
    # Inside a scan XLA cannot merge the recomputation with the forward pass, so CSE need not be prevented.
    return partial(jax.checkpoint, policy=policy, prevent_cse=not scanned)


def _is_fused_attention(primitive: Any, *_: Any, **__: Any) -> bool:
    """Whether it is cuDNN's forward kernel. Its logsumexp has no checkpoint name; unless it is saved, the backward pass
    recomputes it."""
    return primitive.name.startswith("dot_product_attention_fwd")


def batch_loss(
    logprobs: Float[Array, "R T"],
    entropy: Float[Array, "R T"],
    batch: TrainBatch,
    surrogate: Surrogate,
) -> tuple[Array, LossSums]:
    """The sum over the mask of weights * (phi + kl.coef * KL to the reference - bonus * entropy), and the sums for the
    metrics.

    The log-ratio is logprobs - logprobs_old, clamped to +-20, then shared over ratio segments by the surrogate. With
    `Surrogate.own_ratio` its value is 0; the gap of the metrics remains that to logprobs_old.
    """
    mask = batch.policy_mask

    def on(x: Array) -> Array:
        return jnp.where(mask, x, 0.0)

    logprobs, entropy, old = on(logprobs), on(entropy), on(batch.logprobs_old)
    gap = logprobs - old
    advantages, weights = on(batch.advantages), on(batch.weights)
    zero_ratio = logprobs - jax.lax.stop_gradient(logprobs)
    d = zero_ratio if surrogate.own_ratio else jnp.clip(gap, -MAX_LOGRATIO, MAX_LOGRATIO)
    term = surrogate.kl
    kl = on(term.estimate(logprobs, on(batch.logprobs_ref), d)) if term.coef else jnp.zeros_like(d)
    d = on(surrogate.shared(d, advantages, mask, batch.ratio_segments))
    per_token = on(surrogate.loss(d, advantages, logprobs))
    if batch.marked is not None:
        per_token = jnp.where(batch.marked, on(surrogate.marked_loss(per_token, d)), per_token)
    value = jnp.sum(weights * (per_token + term.coef * kl))
    if batch.entropy_coefficients is not None:
        value -= jnp.sum(weights * on(batch.entropy_coefficients) * entropy)
    sums = {
        "tokens": jnp.sum(mask, dtype=jnp.float32),
        "weight": jnp.sum(weights),
        "entropy": jnp.sum(entropy),
        "nll": -jnp.sum(logprobs),
        "kl_ref": jnp.sum(kl),
        "kl_clamped": jnp.sum(kl >= term.ceiling, dtype=jnp.float32),
        "gap": jnp.sum(jnp.abs(gap)),
        "gap_max": jnp.max(jnp.abs(gap)),
        "kl_k1": -jnp.sum(gap),
        "clamped": jnp.sum(mask & (jnp.abs(gap) > MAX_LOGRATIO), dtype=jnp.float32),
    }
    if batch.marked is not None:
        sums["marked"] = jnp.sum(batch.marked, dtype=jnp.float32)
    return value, jax.lax.stop_gradient(sums | ratio_sums(d, advantages, logprobs, mask, surrogate))


def ratio_sums(logratio: Array, advantages: Array, logprobs: Array, mask: Array, surrogate: Surrogate) -> LossSums:
    """Sums over the importance ratios, and the numbers of ratios outside the bounds of the surrogate."""
    low, high = surrogate.clipped(logratio, advantages, logprobs)
    clip_dual = surrogate.clip_bounds[2]

    def count(condition: Array) -> Array:
        return jnp.sum(mask & condition, dtype=jnp.float32)

    ratio = jnp.where(mask, jnp.exp(logratio), 0.0)
    return {
        "kl_k3": jnp.sum(jnp.where(mask, k3(logratio, jnp), 0.0)),
        "clip_low": count(low),
        "clip_high": count(high),
        "clip_dual": count((ratio > clip_dual) & (advantages < 0)) if clip_dual else jnp.zeros(()),
        "ratio": jnp.sum(ratio),
        "ratio_squares": jnp.sum(ratio * ratio),
        "ratio_max": jnp.max(ratio),
    }


def merge_sums(left: LossSums, right: LossSums) -> LossSums:
    """Merges the sums of two parts of a batch."""
    return {name: (jnp.maximum if name.endswith("_max") else jnp.add)(left[name], right[name]) for name in left}


def loss_metrics(sums: LossSums) -> dict[str, Array]:
    """Metrics of a batch by their logged names: means over its policy tokens, or 0 if it has none."""
    tokens = jnp.maximum(sums["tokens"], 1.0)
    mean = {
        name: sums[key] / tokens
        for name, key in (
            ("entropy", "entropy"),
            ("nll", "nll"),
            ("kl_ref", "kl_ref"),
            ("kl_clamped_fraction", "kl_clamped"),
            ("logprob_gap_mean", "gap"),
            ("kl_old_k1", "kl_k1"),
            ("kl_old_k3", "kl_k3"),
            ("clamped_fraction", "clamped"),
            ("clip_fraction_low", "clip_low"),
            ("clip_fraction_high", "clip_high"),
            ("clip_fraction_dual", "clip_dual"),
            ("marked_fraction", "marked"),
        )
        if key in sums
    }
    # (sum r)^2 / (n sum r^2): the effective sample size of the ratios over the number of tokens.
    effective = sums["ratio"] ** 2 / (tokens * jnp.maximum(sums["ratio_squares"], 1e-30))
    extremes = {"logprob_gap_max": sums["gap_max"], "ratio_max": sums["ratio_max"], "effective_sample_size": effective}
    totals = {"policy_tokens": sums["tokens"], "weight": sums["weight"]}
    return {f"loss/{name}": value for name, value in (mean | extremes | totals).items()}
