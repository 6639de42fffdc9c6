"""A micro-batch for the loss, from the fields that a test is about, and the loss of rows as the update computes it."""

import functools
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from grpo_roc_jax.learner.loss import batch_loss
from grpo_roc_jax.learner.pack import BatchConfig, TrainBatch, pack, unpack


def loss_batch(policy_mask, **given) -> TrainBatch:
    """Leaves [R,T], a trajectory a row. Fields that are not given are 0, but for weights of 1 and ratios of single
    tokens."""
    zeros, ids = np.zeros(policy_mask.shape, np.float32), np.ones(policy_mask.shape, np.int32)
    places = np.cumsum(ids, axis=1, dtype=np.int32) - 1
    fields = dict.fromkeys(("logprobs_old", "advantages", "logprobs_ref"), zeros)
    fields |= {"tokens": ids, "segment_ids": ids, "positions": places, "ratio_segments": places}
    fields |= {"policy_mask": policy_mask, "weights": zeros + 1, "count": np.int32(1)}
    return jax.tree.map(jnp.asarray, TrainBatch(**fields | given))


def micro_batches(batch: TrainBatch) -> list[TrainBatch]:
    """Each micro-batch of packed rows, those that are not in use included."""
    return [jax.tree.map(lambda leaf, m=m: leaf[m] if np.ndim(leaf) else leaf, batch) for m in range(len(batch.tokens))]


@functools.cache
def slopes_of(surrogate):
    """Loss and gradients of a micro-batch; methods that share a surrogate share the program."""
    return jax.jit(jax.value_and_grad(functools.partial(batch_loss, surrogate=surrogate), (0, 1), has_aux=True))


def packed_loss(rows, surrogate, now, *, entropy=0.0, row_length=32, per_micro=2) -> SimpleNamespace:
    """loss, sums of the first micro-batch, and the gradient of each row by its log-probabilities `now` (slopes) and by
    the entropies of its tokens (by_entropy); rows are packed, and micro-batches summed."""
    layout = BatchConfig(row_length=row_length, rows=per_micro)
    batch, placement = pack(rows, layout, len(rows))
    moved = [replace(row, logprobs_old=np.asarray(values)) for row, values in zip(rows, now, strict=True)]
    logprobs = pack(moved, layout, len(rows))[0].logprobs_old
    entropies, slopes = np.full(logprobs.shape, entropy, np.float32), np.zeros((2, *logprobs.shape), np.float32)
    parts = []
    for m, part in enumerate(micro_batches(batch)[: batch.count]):
        each, slopes[:, m] = slopes_of(surrogate)(logprobs[m], entropies[m], part)
        parts.append(each)
    by_logprobs, by_entropy = (unpack(slope, placement) for slope in slopes)
    loss = float(sum(value for value, _ in parts))
    return SimpleNamespace(loss=loss, sums=parts[0][1], slopes=by_logprobs, by_entropy=by_entropy)
