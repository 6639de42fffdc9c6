"""Log-probabilities of tokens without [B,T,V], and the loss of a micro-batch with its sums.

The loss is sum(weights * phi(log-ratio, advantages)), phi from `method.surrogate`, with every normaliser inside the
weights: it adds up over micro-batches and devices. What lies behind the mask, NaN included, reaches neither the loss
nor its gradient.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from grpo_roc_jax.method.config import LossConfig
from grpo_roc_jax.method.surrogate import kl_estimate, make_surrogate, shared_logratio
from grpo_roc_jax.model.attention import SAVED
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.experts import mix_experts
from grpo_roc_jax.model.sums import NARROW, Sums
from grpo_roc_jax.model.transformer import FREE, Params, Splits, as_it_is, forward, sums_of
from grpo_roc_jax.pack import TrainBatch
from grpo_roc_jax.parallel import attention_for, restore, sequence_parts, spread
from grpo_roc_jax.shapes import Array, Float, Int, checked
from grpo_roc_jax.sharding import ROWS, constrain

MAX_LOGRATIO = 20.0
"""Log-ratios are clamped to +-20 before exp, as verl does (`core_algos.py`); clamped tokens are counted."""


@dataclass(frozen=True)
class UpdateConfig:
    """How forward and backward of training use memory; none of it changes a number beyond rounding."""

    attention: Literal["auto", "reference", "blocked", "cudnn", "splash"] = "auto"
    """`reference` materialises the scores [T,T] of every head; `blocked` keeps those of one block of queries; `cudnn`
    is cuDNN's fused kernel (NVIDIA GPU, bfloat16); `splash` are the Pallas kernels for TPUs. `auto` takes `blocked` for
    rows of 256 tokens (CPU) or 1024 (elsewhere) and more; where an accelerator has several paths for such rows, a run
    times them at its start and takes the fastest."""
    remat: Literal["none", "full", "attention"] = "attention"
    """What the backward pass recomputes: nothing (fastest where it fits), each layer from its input, or each layer but
    its attention, whose output is kept."""
    vocab_chunk: int = 8192
    """Columns of the unembedding whose logits exist at a time: rows x row_length x vocab_chunk x 4 bytes."""

    def __post_init__(self) -> None:
        if self.vocab_chunk < 1:
            raise ValueError(f"update.vocab_chunk = {self.vocab_chunk}; at least 1 is wanted")


# ---- log-probabilities in vocabulary chunks ------------------------------------------------------------------------


@checked
def token_logprobs(
    params: Params,
    hidden: Float[Array, "B T D"],
    tokens: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    *,
    temperature: float = 1.0,
    vocab_chunk: int = 8192,
    mesh: Mesh | None = None,
    sums: Sums = NARROW,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """log p(tokens[t] | the tokens before it) and the entropy of that distribution, both float32, in nats.

    p = softmax(logits / temperature). The shift by one happens here and nowhere else: index t of the result speaks of
    `tokens[t]`. The first token of a segment follows nothing and gets 0, as does padding.

    Args:
        params: Masters or published parameters; the unembedding is cast to the dtype of `hidden`.
        hidden: From `transformer.forward`; where the mesh has a sequence axis, in the order of `parallel.spread`.
        tokens: Ids below V.
        segment_ids: As in `TrainBatch`.
        temperature: That of sampling, so that ratios compare equal distributions.
        vocab_chunk: Logits that exist at a time are [B,T,vocab_chunk], forward and backward.
        mesh: Of the parameters; each device then walks through its own share of the vocabulary.
        sums: Those of the model (`transformer.sums_of`).
    """
    parts = sequence_parts(mesh)
    following = spread(jnp.roll(tokens, -1, axis=1), parts)
    weights, vocab_axis = (params["unembed"], 1) if "unembed" in params else (params["embed"], 0)
    head = _Head(vocab_axis, vocab_chunk, 1.0 / temperature, mesh, sums)
    logprobs, entropy = _chunked_logprobs(head, hidden, weights.astype(hidden.dtype), following)
    has_past = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)
    ordered = lambda x: constrain(restore(x, parts), mesh, ROWS, "sequence")  # noqa: E731
    shift = lambda x: jnp.pad(jnp.where(has_past, ordered(x)[:, :-1], 0.0), ((0, 0), (1, 0)))  # noqa: E731
    return shift(logprobs), shift(entropy)


@dataclass(frozen=True)
class _Head:
    """Static facts of the chunked unembedding."""

    vocab_axis: int
    vocab_chunk: int
    scale: float
    mesh: Mesh | None
    sums: Sums

    @property
    def shards(self) -> tuple[int, int]:
        """The vocabulary is split over tensor, then fsdp and sequence (`sharding.LOGICAL_TO_MESH`)."""
        if self.mesh is None:
            return 1, 1
        return self.mesh.shape["tensor"], self.mesh.shape["fsdp"] * self.mesh.shape["sequence"]

    def split(self, weights: Array) -> Array:
        """[V,D] or [D,V] -> [S,F,V/SF,D] with S, F the shards, so that a chunk is a slice of every device's share."""
        S, F = self.shards
        V, D = weights.shape if self.vocab_axis == 0 else weights.shape[::-1]
        parts = (S, F, V // (S * F))
        return weights.reshape(*parts, D) if self.vocab_axis == 0 else jnp.moveaxis(weights.reshape(D, *parts), 0, -1)

    def join(self, parts: Array) -> Array:
        """The inverse of `split`."""
        S, F, C, D = parts.shape
        joined = parts if self.vocab_axis == 0 else jnp.moveaxis(parts, -1, 0)
        return joined.reshape((S * F * C, D) if self.vocab_axis == 0 else (D, S * F * C))

    def spans(self, width: int) -> tuple[int, int, int]:
        """(chunk width, number of full chunks, width of the rest) for a share of `width` columns."""
        chunk = max(min(self.vocab_chunk // (self.shards[0] * self.shards[1]), width), 1)
        return chunk, width // chunk, width % chunk

    def columns(self, parts: Array, start: Array | int, width: int) -> Array:
        """Columns start..start+width of every share, gathered over fsdp and sequence as a layer's weights are."""
        # Cut where it lies, then gathered: left to itself XLA gathers all shares in every chunk and cuts afterwards.
        chunk = jax.lax.dynamic_slice_in_dim(parts, start, width, axis=2)
        chunk = constrain(chunk, self.mesh, "tensor", ("fsdp", "sequence"), None, None)
        return constrain(chunk, self.mesh, "tensor", None, None, None)

    def logits(self, hidden: Array, chunk: Array) -> Array:
        """Float32 [B,T,S,F,C], divided by the temperature."""
        logits = self.sums.einsum("btd,sfcd->btsfc", hidden, chunk, jnp.float32) * self.scale
        return constrain(logits, self.mesh, ROWS, "sequence", "tensor", None, None)

    def hits(self, targets: Array, start: Array | int, width: int, share: int) -> Array:
        """True [B,T,S,F,C] where a column is the target."""
        S, F = self.shards
        ids = jnp.arange(S * F).reshape(S, F, 1) * share + start + jnp.arange(width).reshape(1, 1, width)
        return targets[:, :, None, None, None] == ids[None, None]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked_logprobs(head: _Head, hidden: Array, weights: Array, targets: Array) -> tuple[Array, Array]:
    """(log-probability of the target, entropy) of each position, [B,T] float32."""
    return _chunked_logprobs_fwd(head, hidden, weights, targets)[0]


def _chunked_logprobs_fwd(head: _Head, hidden: Array, weights: Array, targets: Array) -> tuple:
    """One pass over the chunks: running maximum m, s = sum exp(z - m), e = sum exp(z - m) z, and the target's z.

    log p = (z_target - m) - log s and H = lse - e/s with lse = m + log s; lse and H are all that the backward keeps.
    Not z_target - lse, which rounds to the precision of a large lse, and differently than sampling does.
    """
    parts = head.split(weights)
    share = parts.shape[2]
    chunk, full, rest = head.spans(share)
    axes = (2, 3, 4)

    def visit(start: Array | int, carry: tuple[Array, ...], width: int) -> tuple[Array, ...]:
        m, s, e, target = carry
        z = head.logits(hidden, head.columns(parts, start, width))
        m_new = jnp.maximum(m, z.max(axes))
        p = jnp.exp(z - m_new[:, :, None, None, None])
        old = jnp.exp(m - m_new)
        target = target + jnp.where(head.hits(targets, start, width, share), z, 0.0).sum(axes)
        return m_new, s * old + head.sums.total(p, axes), e * old + (p * z).sum(axes), target

    # A finite start: exp(start - m) is 0 at the first chunk, where -inf would give NaN for a row of -inf.
    zeros = jnp.zeros(targets.shape, jnp.float32)
    carry = (zeros - 1e30, zeros, zeros, zeros)
    carry = jax.lax.fori_loop(0, full, lambda i, carry: visit(i * chunk, carry, chunk), carry)
    m, s, e, target = visit(full * chunk, carry, rest) if rest else carry
    lse = m + jnp.log(s)
    entropy = lse - e / s
    return (target - m - jnp.log(s), entropy), (hidden, weights, targets, lse, entropy)


def _chunked_logprobs_bwd(head: _Head, kept: tuple[Array, ...], cotangents: tuple[Array, Array]) -> tuple:
    """dz = g (onehot - p) - h p (log p + H), p rebuilt chunk by chunk from lse; g, h the cotangents of log p and H."""
    hidden, weights, targets, lse, entropy = kept
    wide = lambda x: x[:, :, None, None, None]  # noqa: E731
    g, h = map(wide, cotangents)
    parts = head.split(weights)
    share = parts.shape[2]
    chunk, full, rest = head.spans(share)

    def visit(start: Array | int, carry: tuple[Array, Array], width: int) -> tuple[Array, Array]:
        d_hidden, d_parts = carry
        columns = head.columns(parts, start, width)
        log_p = head.logits(hidden, columns) - wide(lse)
        hit = head.hits(targets, start, width, share)
        dz = jnp.where(hit, g, 0.0) - jnp.exp(log_p) * (g + h * (log_p + wide(entropy)))
        dz = (dz * head.scale).astype(hidden.dtype)
        d_hidden += jnp.einsum("btsfc,sfcd->btd", dz, columns, preferred_element_type=jnp.float32)
        d_columns = jnp.einsum("btsfc,btd->sfcd", dz, hidden, preferred_element_type=jnp.float32)
        d_columns = constrain(d_columns.astype(weights.dtype), head.mesh, "tensor", ("fsdp", "sequence"), None, None)
        # Written once and never read back, so that the loop updates the buffer in place.
        return d_hidden, jax.lax.dynamic_update_slice_in_dim(d_parts, d_columns, start, axis=2)

    carry = (jnp.zeros(hidden.shape, jnp.float32), jnp.zeros(parts.shape, weights.dtype))
    carry = jax.lax.fori_loop(0, full, lambda i, carry: visit(i * chunk, carry, chunk), carry)
    d_hidden, d_parts = visit(full * chunk, carry, rest) if rest else carry
    return d_hidden.astype(hidden.dtype), head.join(d_parts), None


_chunked_logprobs.defvjp(_chunked_logprobs_fwd, _chunked_logprobs_bwd)


# ---- the loss of a micro-batch -------------------------------------------------------------------------------------

Sums = dict[str, Array]
"""Statistics of policy tokens that add up over micro-batches; names ending in `_max` take the maximum instead."""


def policy_logprobs(
    params: Params,
    batch: TrainBatch,
    model: ModelConfig,
    update: UpdateConfig,
    temperature: float = 1.0,
    mesh: Mesh | None = None,
) -> tuple[Float[Array, "R T"], Float[Array, "R T"]]:
    """(log-probabilities, entropy) of one micro-batch, leaves [R,T]: the one forward of training and scoring."""
    length, parts = batch.tokens.shape[1], sequence_parts(mesh)
    hidden = forward(
        params,
        *(spread(leaf, parts) for leaf in (batch.tokens, batch.positions, batch.segment_ids)),
        model,
        attend=attention_for(update.attention, model, length, mesh),
        experts=partial(mix_experts, mesh=mesh),
        remat=make_remat(update.remat, scanned=not isinstance(params["layers"], tuple)),
        splits=splits_on(mesh, length),
    )
    # Whole again, once: the walk through the vocabulary reads it in every chunk.
    hidden = constrain(hidden, mesh, ROWS, "sequence", None)
    return token_logprobs(
        params,
        hidden,
        batch.tokens,
        batch.segment_ids,
        temperature=temperature,
        vocab_chunk=update.vocab_chunk,
        mesh=mesh,
        sums=sums_of(model),
    )


def splits_on(mesh: Mesh | None, length: int) -> Splits:
    """How a mesh shares the layers of the update, for rows of that length; said wherever XLA was seen to choose worse
    (docs/plan.md)."""
    if mesh is None:
        return FREE
    at = lambda *axes: lambda x: constrain(x, mesh, ROWS, *axes)  # noqa: E731
    return Splits(
        residual=at(token_axes(mesh, length), None),
        # Gathered once before the products, whose results lie by heads and hidden width; left to itself XLA gathers the
        # weights over `tensor` instead, and keys and values in every turn of the attention's loops.
        entering=at("sequence", None),
        # Or the backward pass multiplies a part of the tokens by the weights of all of `tensor`, gathered for it.
        between=at("sequence", "tensor"),
        # Where a row is shared, XLA would gather tokens and weights for these products and compute them on all devices.
        leaving=at("sequence", None) if sequence_parts(mesh) > 1 else as_it_is,
    )


def token_axes(mesh: Mesh | None, length: int) -> tuple[str, ...]:
    """The mesh axes that split the tokens of the residual stream between blocks: what is kept for the backward pass
    would otherwise lie on every device of `tensor` in full (arXiv:2205.05198)."""
    both = ("sequence", "tensor")
    return both if mesh is not None and length % math.prod(mesh.shape[axis] for axis in both) == 0 else both[:1]


def make_remat(name: str, *, scanned: bool = True) -> Callable[[Callable], Callable] | None:
    """What wraps the body of a layer under that policy; None keeps every intermediate."""
    if name == "none":
        return None
    policies = jax.checkpoint_policies
    policy = policies.nothing_saveable
    if name == "attention":
        policy = policies.save_from_both_policies(policies.save_only_these_names(SAVED), _is_fused_attention)
    # Inside a scan the loop itself keeps XLA from merging the recomputation with the forward pass.
    return partial(jax.checkpoint, policy=policy, prevent_cse=not scanned)


def _is_fused_attention(primitive: Any, *_: Any, **__: Any) -> bool:
    """cuDNN's forward kernel, whose logsumexp has no name: saved by its own, or the backward pass runs it again."""
    return primitive.name.startswith("dot_product_attention_fwd")


def make_loss(
    model: ModelConfig, loss: LossConfig, update: UpdateConfig, *, temperature: float = 1.0, mesh: Mesh | None = None
) -> Callable[[Params, TrainBatch], tuple[Array, Sums]]:
    """`loss(params, micro_batch) -> (scalar, sums)` for a micro-batch with leaves [R,T]."""
    surrogate = make_surrogate(loss)

    def loss_of(params: Params, batch: TrainBatch) -> tuple[Array, Sums]:
        logprobs, entropy = policy_logprobs(params, batch, model, update, temperature, mesh)
        return batch_loss(logprobs, entropy, batch, loss, surrogate)

    return loss_of


def batch_loss(
    logprobs: Float[Array, "R T"],
    entropy: Float[Array, "R T"],
    batch: TrainBatch,
    config: LossConfig,
    surrogate: Callable[[Array, Array, Array], Array],
) -> tuple[Array, Sums]:
    """sum over the mask of weights * (phi + kl_coef * KL to the reference), and the sums behind the metrics.

    The log-ratio is logprobs - logprobs_old, clamped to +-20, then shared over ratio segments as `config.level` says.
    """
    mask = batch.policy_mask
    on = lambda x: jnp.where(mask, x, 0.0)  # noqa: E731
    logprobs, entropy, old = on(logprobs), on(entropy), on(batch.logprobs_old)
    gap = logprobs - old
    advantages, weights = on(batch.advantages), on(batch.weights)
    d = jnp.clip(gap, -MAX_LOGRATIO, MAX_LOGRATIO)
    d = on(shared_logratio(d, advantages, mask, batch.ratio_segments, config))
    per_token = on(surrogate(d, advantages, logprobs))
    kl = on(kl_estimate(config.kl_kind, logprobs, on(batch.logprobs_ref))) if config.kl_coef else jnp.zeros_like(d)
    value = jnp.sum(weights * (per_token + config.kl_coef * kl))
    return value, jax.lax.stop_gradient(_sums(mask, gap, d, advantages, weights, entropy, logprobs, kl, config))


def _sums(mask, gap, d, advantages, weights, entropy, logprobs, kl, config: LossConfig) -> Sums:
    count = lambda condition: jnp.sum(mask & condition, dtype=jnp.float32)  # noqa: E731
    ratio = jnp.where(mask, jnp.exp(d), 0.0)
    return {
        "tokens": jnp.sum(mask, dtype=jnp.float32),
        "weight": jnp.sum(weights),
        "entropy": jnp.sum(entropy),
        "nll": -jnp.sum(logprobs),
        "kl_ref": jnp.sum(kl),
        "gap": jnp.sum(jnp.abs(gap)),
        "gap_max": jnp.max(jnp.abs(gap)),
        "kl_k1": -jnp.sum(gap),
        "kl_k3": jnp.sum(jnp.where(mask, jnp.exp(d) - 1.0 - d, 0.0)),
        "clamped": count(jnp.abs(gap) > MAX_LOGRATIO),
        "clip_low": count((ratio < 1.0 - config.clip_low) & (advantages < 0)),
        "clip_high": count((ratio > 1.0 + config.clip_high) & (advantages > 0)),
        "clip_dual": count((ratio > config.clip_dual) & (advantages < 0)) if config.clip_dual else jnp.zeros(()),
        "ratio": jnp.sum(ratio),
        "ratio_squares": jnp.sum(ratio * ratio),
        "ratio_max": jnp.max(ratio),
    }


def merge_sums(left: Sums, right: Sums) -> Sums:
    """The sums of both parts of a batch."""
    return {name: (jnp.maximum if name.endswith("_max") else jnp.add)(left[name], right[name]) for name in left}


def loss_metrics(sums: Sums) -> dict[str, Array]:
    """Means over the policy tokens of a batch, under the names of the log; zeros when there are none."""
    tokens = jnp.maximum(sums["tokens"], 1.0)
    mean = {
        name: sums[key] / tokens
        for name, key in (
            ("entropy", "entropy"),
            ("nll", "nll"),
            ("kl_ref", "kl_ref"),
            ("logprob_gap_mean", "gap"),
            ("kl_old_k1", "kl_k1"),
            ("kl_old_k3", "kl_k3"),
            ("clamped_fraction", "clamped"),
            ("clip_fraction_low", "clip_low"),
            ("clip_fraction_high", "clip_high"),
            ("clip_fraction_dual", "clip_dual"),
        )
    }
    # (sum r)^2 / (n sum r^2): the share of tokens that an equally weighted sample of equal variance would have.
    effective = sums["ratio"] ** 2 / (tokens * jnp.maximum(sums["ratio_squares"], 1e-30))
    extremes = {"logprob_gap_max": sums["gap_max"], "ratio_max": sums["ratio_max"], "effective_sample_size": effective}
    totals = {"policy_tokens": sums["tokens"], "weight": sums["weight"]}
    return {f"loss/{name}": value for name, value in (mean | extremes | totals).items()}
