"""Splash attention, the Pallas kernels for TPUs that come with JAX, over packed rows.

The library's own masks are static, so it would visit every block of keys before a query. Which blocks a block of
queries meets is an argument of the kernels, though: here it is made from the segment ids, as in
`attention.attend_blocked`, and the work follows the sum of squared segment lengths.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

from grpo_roc_jax.model.attention import SAVED, first_key_blocks
from grpo_roc_jax.shapes import Array, Bool, Float, Int

LANES = 128
"""Tokens of a block come in multiples of it."""
BLOCK = 512
"""Tokens of a block: large enough for the matrix units, few enough for scores of a block to stay on the chip."""
BLOCKS = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
"""Sizes that the kernels take, of queries and of keys; one size serves all passes here."""


def make_splash(
    length: int,
    platform: str,
    *,
    parts: int = 1,
    windows: Sequence[int] = (),
    largest: int = BLOCK,
    interpret: bool = False,
) -> Callable[..., Array]:
    """`attend(q, k, v, segment_ids, window=None, columns=None)` by these kernels.

    Args:
        length: Tokens of a row.
        platform: Of the devices.
        parts: See `attention.make_attention`.
        windows: Those of the model's layers; a kernel is made for each, and the layer's own chosen while it runs.
        largest: Tokens of a block at most.
        interpret: Without a TPU, step by step, for tests.

    Raises:
        ValueError: It cannot run there.
    """
    if platform != "tpu" and not interpret:
        raise ValueError(
            f"update.attention = 'splash' on {platform}: its kernels are for TPUs; take auto, blocked or reference"
        )
    runs = length if parts == 1 else length // (2 * parts)
    if runs % LANES:
        unit = LANES if parts == 1 else 2 * parts * LANES
        what = "" if parts == 1 else f" of 2 x sharding.sequence = {2 * parts} runs of 128 tokens"
        raise ValueError(
            f"update.attention = 'splash' with batch.row_length = {length}: a multiple of {unit}{what} is wanted, such "
            f"as {-(-length // unit) * unit}; or take update.attention blocked"
        )
    block = max(size for size in range(LANES, largest + 1, LANES) if runs % size == 0)
    kinds = sorted(set(windows)) or [0]
    kernels = [partial(_attend, _Kernel(block, kind, interpret)) for kind in kinds]

    def attend(
        q: Float[Array, "B T N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K H"],
        segment_ids: Int[Array, "B S"],
        window: Int[Array, ""] | None = None,
        columns: Int[Array, " T"] | None = None,
    ) -> Float[Array, "B T N H"]:
        columns = jnp.arange(length, dtype=jnp.int32) if columns is None else columns.astype(jnp.int32)
        if len(kernels) == 1:
            return kernels[0](q, k, v, segment_ids, columns)
        return jax.lax.switch(jnp.searchsorted(jnp.asarray(kinds), window), kernels, q, k, v, segment_ids, columns)

    return attend


@dataclass(frozen=True)
class _Kernel:
    """Static facts of a kernel, equal and hashable so that it is traced once."""

    block: int
    window: int
    interpret: bool

    def __call__(self, queries: Array, keys: Array) -> Bool[Array, "..."]:
        """Whether a key is in reach, by the columns of both; called inside the kernels, segments are compared there."""
        seen = queries >= keys
        return seen & (queries - keys < self.window) if self.window else seen


def _attend(kernel: _Kernel, q: Array, k: Array, v: Array, segment_ids: Array, columns: Array) -> Array:
    """Context [B,T,N,H] by one kernel; scores are divided by sqrt(H) through the queries."""
    forward, backward = _blocks_in_reach(kernel, segment_ids, columns)
    attend = splash.SplashAttentionKernel(
        forward,
        forward,
        backward,
        block_sizes=splash.BlockSizes(**dict.fromkeys(BLOCKS, kernel.block)),
        is_mqa=False,
        save_residuals=False,
        mask_value=splash.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=None,
        residual_checkpoint_name=SAVED,
        mask_function=kernel,
        interpret=kernel.interpret,
    )
    scaled = (q.astype(jnp.float32) * q.shape[-1] ** -0.5).astype(q.dtype)
    by_heads = lambda x: jnp.swapaxes(x, 1, 2)  # noqa: E731
    segments = splash.SegmentIds(q=jnp.take(segment_ids, columns, axis=1), kv=segment_ids)
    return by_heads(jax.vmap(attend)(by_heads(scaled), by_heads(k), by_heads(v), segments))


def _blocks_in_reach(kernel: _Kernel, segment_ids: Int[Array, "B S"], columns: Int[Array, " T"]) -> tuple:
    """What the kernels are told of blocks, for the passes over queries and over keys.

    Of query block i and key block j: whether any pair may be in reach, and which block to hold while the loop is there,
    that of keys or of queries. Outside reach that is the nearest one inside, so that nothing is loaded in vain.
    """
    block = kernel.block
    diagonal = columns[::block] // block
    window = jnp.asarray(kernel.window, jnp.int32) if kernel.window else None
    first = first_key_blocks(segment_ids, block, window)[diagonal]
    i, j = jnp.arange(len(diagonal))[:, None], jnp.arange(segment_ids.shape[1] // block)[None]
    reached = (first[:, None] <= j) & (j <= diagonal[:, None])
    # Both ends grow with i, so the queries that reach a key block follow each other.
    low, high = jnp.argmax(reached, axis=0), len(diagonal) - 1 - jnp.argmax(reached[::-1], axis=0)

    def info(held: Array) -> MaskInfo:
        return MaskInfo(
            data_next=held[None].astype(jnp.int32),
            mask_next=None,
            block_mask=reached[None].astype(jnp.int32),
            partial_mask_blocks=None,
            q_sequence=columns,
        )

    keys = jnp.clip(j, min=first[:, None], max=diagonal[:, None])
    queries = jnp.clip(i, min=low[None], max=high[None])
    return info(keys), info(queries)
