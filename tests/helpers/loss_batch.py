"""A micro-batch for the loss, from the fields that a test is about."""

import jax
import jax.numpy as jnp
import numpy as np

from grpo_roc_jax.learner.pack import TrainBatch


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
