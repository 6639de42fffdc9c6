"""Shapes and places of what the programs of a run are given, with nothing loaded. Plans by compiler and by formulas
count the same ones.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from grpo_roc_jax.config import Config
from grpo_roc_jax.learner.pack import OPTIONAL, TrainBatch, rows_per_micro_batch, worst_case_micro_batches
from grpo_roc_jax.method.compose import optional_fields
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.low_precision import is_quantized
from grpo_roc_jax.model.sharding import batch_shardings, device_bytes, place_shapes, row_shards
from grpo_roc_jax.run.learning import most_rows
from grpo_roc_jax.types import TRAIN_ROW_FIELDS


def batch_like(config: Config, mesh: Mesh | AbstractMesh, model: ModelConfig | None = None) -> TrainBatch:
    """Shapes and shardings of the largest batch of one optimizer step, sized as in `run.learning.make_learner`."""
    shards = row_shards(mesh)
    longest = config.longest_trajectory
    micro = worst_case_micro_batches(most_rows(config), longest, config.batch, shards)
    shape = (micro, rows_per_micro_batch(config.batch, shards), config.batch.row_length)
    return batch_of(shape, mesh, optional_leaves(config, model))


def optional_leaves(config: Config, model: ModelConfig | None = None) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Leaf -> (dtype, sizes of further axes) of what a batch has in some runs only; see `pack.OPTIONAL`."""
    filled = optional_fields(config)
    shape_of: dict[str, tuple[int, ...]] = {name: () for name, (field, *_) in OPTIONAL.items() if field in filled}
    if model and model.experts.replay:
        shape_of["routes"] = (model.layers, model.experts.per_token)
    leaves = {name: (OPTIONAL[name][1], sizes) for name, sizes in shape_of.items()}
    return leaves | ({"temperatures": (np.float32, ())} if config.plan.temperature.all else {})


def batch_of(
    shape: tuple[int, int, int], mesh: Mesh, optional: Mapping[str, tuple[Any, tuple[int, ...]]] = MappingProxyType({})
) -> TrainBatch:
    """Shapes and shardings of a batch of shape (micro-batches, rows, tokens), with the `optional_leaves` of a run."""
    dtypes = TRAIN_ROW_FIELDS | {"segment_ids": np.int32, "positions": np.int32}
    leaves = {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in dtypes.items()}
    leaves |= {name: jax.ShapeDtypeStruct((*shape, *sizes), dtype) for name, (dtype, sizes) in optional.items()}
    batch = TrainBatch(**leaves, count=jax.ShapeDtypeStruct((), np.int32))
    return place_shapes(batch, batch_shardings(mesh, batch))


def numbers_held(tree: Any) -> float:
    """Numbers of all matrices on one device, those of quantized ones included."""

    def count(leaf: Any) -> float:
        if not is_quantized(leaf):
            return device_bytes(leaf) / leaf.dtype.itemsize
        return device_bytes(leaf.codes) * leaf.shape[leaf.axis] / leaf.codes.shape[leaf.axis]

    return sum(map(count, jax.tree.leaves(tree, is_leaf=is_quantized)))
