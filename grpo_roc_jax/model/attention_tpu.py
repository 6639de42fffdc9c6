"""Splash attention over packed rows: the Pallas kernels for TPUs that ship with JAX.

The library's own masks are static, so it would visit every block of keys before a query. The kernels take the blocks to
visit as an argument, however. Here that argument is computed from the segment ids, as in `attention.attend_blocked`, so
the work grows with the sum of squared segment lengths.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

from grpo_roc_jax.model.attention_mask import SAVED, first_key_blocks
from grpo_roc_jax.shapes import Array, Bool, Int

LANES = 128
"""Block sizes are multiples of it."""
BLOCK = 512
"""Tokens in a block: enough to fill the matrix units, few enough for the scores of a block to stay on the chip."""
BLOCKS = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
"""Names of the kernels' block sizes, all set to the same value here."""


def make_splash(
    length: int,
    platform: str,
    *,
    parts: int = 1,
    windows: Sequence[int] = (),
    cap: float = 0.0,
    largest: int = BLOCK,
    interpret: bool = False,
) -> Callable[..., Array]:
    """`attend` with the signature of `attention.attend_reference`, computed by these kernels.

    Args:
        length: Tokens of a row.
        platform: Platform of the devices.
        parts: See `attention.make_attention`.
        windows: Windows of the model's layers. One kernel is built for each; the layer's window selects it at run time.
        cap: Soft cap of the scores, 0 for none.
        largest: Most tokens in a block.
        interpret: Run in Pallas interpret mode, without a TPU; for tests.

    Raises:
        ValueError: the platform or the row length does not fit.
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
            f"update.attention = 'splash' with batch.row_length = {length}: must be a multiple of {unit}{what}, such "
            f"as {-(-length // unit) * unit}; or take update.attention blocked"
        )
    block = max(size for size in range(LANES, largest + 1, LANES) if runs % size == 0)
    kinds = sorted(set(windows)) or [0]
    kernels = [partial(_attend, _Kernel(block, kind, cap, interpret)) for kind in kinds]

    def attend(
        q: Array, k: Array, v: Array, segment_ids: Array, window: Array | None = None, columns: Array | None = None
    ) -> Array:
        columns = jnp.arange(length, dtype=jnp.int32) if columns is None else columns.astype(jnp.int32)
        if len(kernels) == 1:
            return kernels[0](q, k, v, segment_ids, columns)
        return jax.lax.switch(jnp.searchsorted(jnp.asarray(kinds), window), kernels, q, k, v, segment_ids, columns)

    return attend


@dataclass(frozen=True)
class _Kernel:
    """Static settings of a kernel; hashable, so that equal kernels are traced once."""

    block: int
    window: int
    cap: float
    interpret: bool

    def __call__(self, queries: Array, keys: Array) -> Bool[Array, "..."]:
        """Whether a key is in reach, by the columns of both. The kernels call it and compare segments themselves."""
        seen = queries >= keys
        return seen & (queries - keys < self.window) if self.window else seen


def _attend(kernel: _Kernel, q: Array, k: Array, v: Array, segment_ids: Array, columns: Array) -> Array:
    """Context [B,T,N,H] by one kernel. The queries are divided by sqrt(H), since the kernel does not scale scores."""
    forward, backward = _blocks_in_reach(kernel, segment_ids, columns)
    attend = splash.SplashAttentionKernel(
        forward,
        forward,
        backward,
        block_sizes=splash.BlockSizes(**dict.fromkeys(BLOCKS, kernel.block)),
        is_mqa=False,
        save_residuals=False,
        mask_value=splash.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=kernel.cap or None,
        residual_checkpoint_name=SAVED,
        mask_function=kernel,
        interpret=kernel.interpret,
    )
    scaled = (q.astype(jnp.float32) * q.shape[-1] ** -0.5).astype(q.dtype)
    by_heads = [jnp.swapaxes(x, 1, 2) for x in (scaled, k, v)]
    segments = splash.SegmentIds(q=jnp.take(segment_ids, columns, axis=1), kv=segment_ids)
    return jnp.swapaxes(jax.vmap(attend)(*by_heads, segments), 1, 2)


def _blocks_in_reach(kernel: _Kernel, segment_ids: Int[Array, "B S"], columns: Int[Array, " T"]) -> tuple:
    """The block masks of the kernels, for the passes over queries and over keys.

    For query block i and key block j they say whether any pair may be in reach, and which block (of keys, or of
    queries) to hold at that point of the loop. Out of reach that is the nearest block in reach, which saves a load.
    """
    block = kernel.block
    diagonal = columns[::block] // block
    window = jnp.asarray(kernel.window, jnp.int32) if kernel.window else None
    first = first_key_blocks(segment_ids, block, window)[diagonal]
    i, j = jnp.arange(len(diagonal))[:, None], jnp.arange(segment_ids.shape[1] // block)[None]
    reached = (first[:, None] <= j) & (j <= diagonal[:, None])
    # Both ends grow with i, so the query blocks that reach a key block are consecutive.
    low, high = jnp.argmax(reached, axis=0), len(diagonal) - 1 - jnp.argmax(reached[::-1], axis=0)

    def info(nearest: Array) -> MaskInfo:
        return MaskInfo(
            data_next=nearest[None].astype(jnp.int32),
            mask_next=None,
            block_mask=reached[None].astype(jnp.int32),
            partial_mask_blocks=None,
            q_sequence=columns,
        )

    keys = jnp.clip(j, min=first[:, None], max=diagonal[:, None])
    queries = jnp.clip(i, min=low[None], max=high[None])
    return info(keys), info(queries)
