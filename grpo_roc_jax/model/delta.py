"""Gated DeltaNet: the recurrence of layers that read a state instead of keys.

A value head has a state S [P,U] of float32. For every token, with the decay g <= 0 and the rate b in (0, 1)
(arXiv:2412.06464, eq. 10):

    S <- exp(g) S;    S <- S + k (b (v - S^T k))^T;    out = S^T q / sqrt(P)

Queries, keys and values first pass a causal convolution over the last few tokens of their channel, and SiLU; queries
and keys are then divided by their norms. `recur` computes this for rows of any length in chunks. Within a chunk the
updates are the solution of a triangular system (the WY representation, arXiv:2406.06484, sec. 3), so all but one small
product a chunk is done for all chunks at once. A single token is a chunk of length 1. Everything here is float32.

Letters besides those of `shapes`: K key heads, R value heads of each, P width of a key, U of a value, E = 2 P + R U,
C tokens of a chunk, n chunks.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_roc_jax.model.config import GatedDelta, ModelConfig
from grpo_roc_jax.shapes import Array, Float, Int, Key

CHUNK = 64
"""Tokens of a chunk; a power of two."""
ORDERS = ("tne", "npu")
"""Axes of a `Memory` after the row: tokens, key heads, channels; value heads, width of keys, width of values."""

_product = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class Memory(NamedTuple):
    """The recurrent memory of a row in one layer."""

    inputs: Array
    """[B,W-1,K,E]: the last inputs of the convolution, in the compute dtype."""
    state: Array
    """float32[B,N,P,U]."""


class Signals(NamedTuple):
    """What a layer computes from its input for each token."""

    qkv: Float[Array, "B T K E"]
    """A query, a key, and the values of a key head, side by side."""
    decay: Float[Array, "B T N"]
    """g, float32."""
    rate: Float[Array, "B T N"]
    """b, float32."""


def channels(delta: GatedDelta) -> tuple[int, int, int]:
    """Widths of query, key and values in the channels of a key head."""
    return delta.key_dim, delta.key_dim, delta.value_heads // delta.key_heads * delta.value_dim


def delta_shapes(config: ModelConfig) -> dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]]:
    """Name -> (shape, logical axes) of the leaves of one recurrent layer that layers of attention do not have."""
    delta, D = config.windows, config.d_model
    K, N, U, E = delta.key_heads, delta.value_heads, delta.value_dim, sum(channels(delta))
    shapes: dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]] = {
        "w_qkv": ((D, K, E), ("embed", "delta_heads", None)),
        "conv": ((K, E, delta.conv), ("delta_heads", None, None)),
        "w_z": ((D, N, U), ("embed", "delta_heads", None)),
        "w_beta": ((D, N), ("embed", "delta_heads")),
        "w_decay": ((D, N), ("embed", "delta_heads")),
        "a_log": ((N,), ("delta_heads",)),
        "dt_bias": ((N,), ("delta_heads",)),
        "delta_norm": ((U,), (None,)),
        "w_out": ((N, U, D), ("delta_heads", None, "embed")),
    }
    if delta.form == "mamba2":
        del shapes["w_beta"]
        shapes |= {
            "conv_bias": ((K, E), ("delta_heads", None)),
            "skip": ((N,), ("delta_heads",)),
            "delta_norm": ((N, U), ("delta_heads", None)),
        }
    return shapes


Space = tuple[Float[Array, "K E"], Float[Array, " N"]]
"""What only a layer of Mamba 2 has: the biases of the convolution, and the factor of the values in its output."""


def token_flops(delta: GatedDelta, length: int) -> float:
    """FLOPs a token of the rule in one layer, for rows of that length or spans of a decode step (1)."""
    C, K, N = min(CHUNK, length), delta.key_heads, delta.value_heads
    P, U, levels = delta.key_dim, delta.value_dim, max(0, C.bit_length() - 1)
    if delta.form == "mamba2":  # no system to solve, and only queries read the state
        return 2.0 * K * C * P + N * (2.0 * C * U + 4.0 * P * U)
    return 4.0 * K * C * P + N * (4.0 * levels * C * C + 2.0 * C * (P + 2 * U) + 6.0 * P * U)


def row_bytes(delta: GatedDelta, item: int) -> int:
    """Bytes of a row's `Memory` in one layer, for a compute dtype of `item` bytes."""
    inputs = (delta.conv - 1) * delta.key_heads * sum(channels(delta))
    return item * inputs + 4 * delta.value_heads * delta.key_dim * delta.value_dim


def kept_bytes(delta: GatedDelta) -> int:
    """Bytes per token and layer that `_within_chunks` saves for the backward pass."""
    return 4 * delta.value_heads * (4 * CHUNK + 4 * delta.key_dim + 2 * delta.value_dim)


def init_decay(key: Key[Array, ""], name: str, shape: tuple[int, ...]) -> Array:
    """Initial `a_log` and `dt_bias`: exp(a_log) is uniform in 1 to 16, softplus(dt_bias) log-uniform in 0.001 to 0.1,
    as for Mamba 2 (arXiv:2405.21060)."""
    if name == "a_log":
        return jnp.log(jax.random.uniform(key, shape, jnp.float32, 1.0, 16.0))
    step = jnp.exp(jax.random.uniform(key, shape, jnp.float32, math.log(1e-3), math.log(0.1)))
    return step + jnp.log(-jnp.expm1(-step))


def empty_memory(delta: GatedDelta, rows: int, dtype: jnp.dtype) -> Memory:
    """The memory before the first token."""
    inputs = jnp.zeros((rows, delta.conv - 1, delta.key_heads, sum(channels(delta))), dtype)
    return Memory(inputs, jnp.zeros((rows, delta.value_heads, delta.key_dim, delta.value_dim), jnp.float32))


def recur_packed(
    delta: GatedDelta,
    segment_ids: Int[Array, "B T"],
    signals: Signals,
    conv: Float[Array, "K E W"],
    space: Space | None = None,
) -> Float[Array, "B T N U"]:
    """The output for packed rows: convolution and state start empty in every segment."""
    memory = empty_memory(delta, segment_ids.shape[0], signals.qkv.dtype)
    before = jnp.full_like(segment_ids[:, :1], -1)
    return recur(signals, conv, memory, jnp.concatenate([before, segment_ids], axis=1), space)[0]


def recur_cached(
    memory: Memory,
    fresh: Int[Array, " B"],
    length: Int[Array, " B"],
    signals: Signals,
    conv: Float[Array, "K E W"],
    space: Space | None = None,
) -> tuple[Float[Array, "B T N U"], Memory]:
    """(output, memory) after the first `length` tokens of each row; the others are padding and change nothing.

    Rows that are `fresh` (bool) begin with an empty memory.
    """
    T = signals.qkv.shape[1]
    live = (jnp.arange(T)[None] < length[:, None])[..., None]
    signals = signals._replace(decay=jnp.where(live, signals.decay, 0.0), rate=jnp.where(live, signals.rate, 0.0))
    fresh = fresh & (length > 0)
    memory = memory._replace(inputs=jnp.where(fresh[:, None, None, None], 0, memory.inputs))
    # A state that belongs to another segment is not read, so nothing has to be written to clear it.
    segments = jnp.concatenate([-fresh.astype(jnp.int32)[:, None], jnp.zeros((len(length), T), jnp.int32)], axis=1)
    out, new = recur(signals, conv, memory, segments, space)
    seen = jnp.concatenate([memory.inputs, signals.qkv.astype(memory.inputs.dtype)], axis=1)
    last = jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, conv.shape[-1] - 1))(seen, length)
    return out, Memory(last, new)


def recur(
    signals: Signals,
    conv: Float[Array, "K E W"],
    memory: Memory,
    segments: Int[Array, "B T+1"],
    space: Space | None = None,
) -> tuple[Float[Array, "B T N U"], Float[Array, "B N P U"]]:
    """(output, state after the last token).

    Args:
        signals: Input of the layer for each token.
        conv: Weights of the convolution; that of the token itself comes last.
        memory: Memory before the first token.
        segments: Segment of `memory.state`, then of each token. Segments are contiguous.
        space: For Mamba 2. Then S <- exp(g) S + k (b v)^T; out = S^T q + d v with the skip d, and queries and keys stay
            as the convolution leaves them (arXiv:2405.21060, eq. 2).
    """
    B, T, K, _ = signals.qkv.shape
    _, N, P, U = memory.state.shape
    x = _convolve(signals.qkv, conv, memory.inputs, segments)
    x = jax.nn.silu(x if space is None else x + space[0][None, None].astype(jnp.float32))
    q, k, v = jnp.split(x, (P, 2 * P), axis=-1)
    if space is None:
        q, k = _unit(q) * P**-0.5, _unit(k)
    C = min(CHUNK, 1 << (T - 1).bit_length())

    def chunked(x: Array, *heads: int) -> Array:
        """[B,T,...] -> [n,B,*heads,C,...], padded with zeros, which change nothing."""
        x = jnp.pad(x, ((0, 0), (0, -T % C)) + ((0, 0),) * (x.ndim - 2))
        x = x.reshape(B, -1, C, *heads, *x.shape[-1:] * (x.ndim > 3))
        return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 2, 2 + len(heads))

    tokens = chunked(q, K), chunked(k, K), chunked(v.reshape(B, T, N, U), K, N // K)
    inside = jnp.pad(segments[:, 1:], ((0, 0), (0, -T % C)), mode="edge").reshape(B, -1, C).swapaxes(0, 1)
    ends = jnp.concatenate([segments[None, :, 0], inside[:, :, -1]])
    by_head = (chunked(of, K, N // K) for of in (signals.decay, signals.rate))
    parts = _within_chunks(*tokens, *by_head, (inside, ends), space is None)

    def visit(state: Array, part: tuple[Array, ...]) -> tuple[Array, Array]:
        reads, values, scores, writes, keep = part
        seen = _product("bkrcp,bkrpu->bkrcu", reads, state)
        new = values - seen[..., :C, :] if space is None else values
        out = seen[..., -C:, :] + _product("bkrcd,bkrdu->bkrcu", scores, new)
        return keep[..., None, None] * state + _product("bkrcp,bkrcu->bkrpu", writes, new), out

    state, out = jax.lax.scan(visit, memory.state.reshape(B, K, N // K, P, U), parts)
    out = out.transpose(1, 0, 4, 2, 3, 5).reshape(B, -1, N, U)[:, :T]
    if space is not None:
        out = out + space[1][None, None, :, None] * v.reshape(B, T, N, U)
    return out, state.reshape(B, N, P, U)


def _within_chunks(
    q: Float[Array, "n B K C P"],
    k: Float[Array, "n B K C P"],
    v: Float[Array, "n B K R C U"],
    decay: Float[Array, "n B K R C"],
    rate: Float[Array, "n B K R C"],
    segments: tuple[Int[Array, "n B C"], Int[Array, "n+1 B"]],
    corrects: bool,
) -> tuple[Array, ...]:
    """Everything that does not depend on the state, for every chunk: what reads the state (keys, then queries), the
    values without the part that the state predicts, the scores between tokens of the chunk, what writes the state,
    and the factor by which the state decays. Unless it `corrects`, only queries read the state, and values stay whole.
    """
    inside, ends = segments[0][:, :, None, None], segments[1][:, :, None, None, None]
    C, total = q.shape[-2], jnp.cumsum(decay, axis=-1)
    distance = (jnp.arange(C)[:, None] - jnp.arange(C)[None]).reshape(1, 1, 1, 1, C, C)
    near = (inside[..., :, None] == inside[..., None, :]) & (distance >= 0)
    fall = jnp.where(near, jnp.exp(jnp.where(near, total[..., :, None] - total[..., None, :], 0.0)), 0.0)
    read = jnp.where(inside == ends[:-1], jnp.exp(total), 0.0)
    write = jnp.where(inside == ends[1:], jnp.exp(total[..., -1:] - total), 0.0)
    scores = _product("nbkcp,nbkdp->nbkcd", q, k)[:, :, :, None] * fall
    if not corrects:
        writes = k[:, :, :, None] * write[..., None]
        return q[:, :, :, None] * read[..., None], v * rate[..., None], scores, writes, read[..., -1]
    interaction = _product("nbkcp,nbkdp->nbkcd", k, k)[:, :, :, None] * fall * rate[..., None]
    q, k = q[:, :, :, None], k[:, :, :, None]
    solved = _product(
        "nbkrcd,nbkrdx->nbkrcx",
        invert(jnp.where(distance > 0, interaction, 0.0)),
        jnp.concatenate([v, k * read[..., None]], axis=-1) * rate[..., None],
    )
    values, keys = jnp.split(solved, (v.shape[-1],), axis=-1)
    reads = jnp.concatenate([keys, q * read[..., None]], axis=-2)
    return reads, values, scores, k * write[..., None], read[..., -1]


@jax.custom_vjp
def invert(lower: Float[Array, "*B C C"]) -> Float[Array, "*B C C"]:
    """The inverse of I + `lower`, which is strictly lower triangular; C is a power of two.

    If D inverts the blocks on the diagonal and L are the blocks below them that pair them, then D - D L D inverts the
    blocks of twice the size. This is forward substitution by products of matrices, of which accelerators do many at
    once.
    """
    at, size = jnp.arange(lower.shape[-1]), 1
    inverse = jnp.broadcast_to(jnp.eye(len(at)), lower.shape)
    while size < len(at):
        block, pair = at // size, at // (2 * size)
        paired = (pair[:, None] == pair[None]) & (block[:, None] != block[None])
        below = jnp.where(jnp.broadcast_to(paired, lower.shape), lower, 0.0)
        inverse -= _product("...ij,...jk,...kl->...il", inverse, below, inverse)
        size *= 2
    return inverse


def _invert_fwd(lower: Array) -> tuple[Array, Array]:
    inverse = invert(lower)
    return inverse, inverse


def _invert_bwd(inverse: Array, d_inverse: Array) -> tuple[Array]:
    """d(A^-1) = -A^-1 dA A^-1."""
    return (-_product("...ji,...jk,...lk->...il", inverse, d_inverse, inverse),)


invert.defvjp(_invert_fwd, _invert_bwd)


def _convolve(
    qkv: Float[Array, "B T K E"],
    conv: Float[Array, "K E W"],
    inputs: Float[Array, "B W-1 K E"],
    segments: Int[Array, "B T+1"],
) -> Float[Array, "B T K E"]:
    """Each channel's weighted sum over its last W inputs of the same segment. `inputs` are those before the first
    token."""
    T, W = qkv.shape[1], conv.shape[-1]
    x = jnp.concatenate([inputs.astype(qkv.dtype), qkv], axis=1).astype(jnp.float32)
    ids = jnp.concatenate([jnp.repeat(segments[:, :1], W - 1, axis=1), segments[:, 1:]], axis=1)
    terms = (
        jnp.where((ids[:, j : j + T] == segments[:, 1:])[..., None, None], x[:, j : j + T], 0.0)
        * conv[None, None, :, :, j].astype(jnp.float32)
        for j in range(W)
    )
    return sum(terms, jnp.zeros(qkv.shape, jnp.float32))


def _unit(x: Float[Array, "*B P"]) -> Float[Array, "*B P"]:
    """x divided by its norm, with the constant of the published models."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
