"""Packing drops nothing, keeps trajectories apart, and has one shape."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_roc_jax.learner import pack as layouts
from grpo_roc_jax.learner.pack import BatchConfig, pack, rows_per_micro_batch, unpack, worst_case_micro_batches
from grpo_roc_jax.types import TRAIN_ROW_FIELDS, TrainRow
from tests.helpers import reference

CONFIG = BatchConfig(row_length=16, rows=2)


def pack_lengths(lengths, config=CONFIG, **kwargs):
    rows = reference.random_rows(lengths, vocab=50)
    return rows, *pack(rows, config, worst_case_micro_batches(len(rows), max(lengths, default=1), config), **kwargs)


def test_layout_by_hand():
    """Lengths 5, 12, 4, 11 in rows of 16: 12 + 4, then 11 + 5; ids, positions and offsets follow."""
    rows, batch, placement = pack_lengths([5, 12, 4, 11])
    assert placement.rows_used == 2 and batch.count == 1 and placement.fill == 1.0
    np.testing.assert_array_equal(batch.segment_ids[0], [[1] * 12 + [2] * 4, [1] * 11 + [2] * 5])
    np.testing.assert_array_equal(batch.positions[0, 0], [*range(12), *range(4)])
    np.testing.assert_array_equal(batch.tokens[0, 1], np.concatenate([rows[3].tokens, rows[0].tokens]))
    assert pack_lengths([1], BatchConfig(row_length=1, rows=1))[2].fill == 1.0
    assert placement.row.tolist() == [1, 0, 0, 1] and placement.offset.tolist() == [11, 0, 12, 0]
    np.testing.assert_array_equal(batch.ratio_segments[0, 1], np.arange(16))
    # Rows of 16 hold three trajectories of up to 5 tokens; 2 rows make a micro-batch, and there is at least one.
    assert [worst_case_micro_batches(n, 5, CONFIG) for n in (0, 1, 6, 7, 13)] == [1, 1, 1, 2, 3]
    narrow = BatchConfig(row_length=16, rows=1)
    assert [worst_case_micro_batches(3, 16, narrow, *shards) for shards in ((), (1,), (2,))] == [3, 3, 2]
    _, batch, placement = pack_lengths([9] * 7)  # just over half a row: one each, so the bound is attained
    assert placement.rows_used == 7 and batch.tokens.shape[0] == batch.count == 4
    assert rows_per_micro_batch(BatchConfig(rows=5), 4) == 8
    assert (BatchConfig().row_length, rows_per_micro_batch(BatchConfig(), 1)) == (512, 8), "4096 tokens by default"
    rows = reference.random_rows([16, 15, 14], 50)
    batch, _ = pack(rows, CONFIG, 2, temperature=1.0)
    more = layouts.halved(batch)
    assert more.tokens.shape == (4, 1, 16) and more.count == 4 and more.count.dtype == batch.count.dtype
    np.testing.assert_array_equal(more.tokens[:3, 0, :14], [row.tokens[:14] for row in rows])
    for name, leaf in vars(more).items():
        if name != "count" and leaf is not None:
            np.testing.assert_array_equal(leaf.reshape(2, 2, 16), getattr(batch, name))
    # Tokens of other rows and padding keep a value without effect; fields that no row has are absent. Parts of a row
    # are segments of their own, and equal numbers of ratio segments in two trajectories name different ones.
    plain, full = reference.random_rows([3, 4], 50)
    routes = np.arange(24).reshape(4, 3, 2)
    full = dataclasses.replace(full, marked=np.ones(4, bool), entropy_coefficient=0.5, routes=routes)
    full = dataclasses.replace(full, temperature=0.5, parts=(3, 1), ratio_segments=[0] * 4, weights=[0] * 4)
    batch, _ = pack([plain, full], BatchConfig(row_length=8, rows=1), 1, 1, temperature=0.75)
    for name, expected in {
        "marked": [True] * 4 + [False] * 4,
        "entropy_coefficients": [0.5] * 4 + [0.0] * 4,
        "routes": [*routes, *np.full((4, 3, 2), -1)],
        "temperatures": [0.5] * 4 + [0.75] * 3 + [1.0],
        "segment_ids": [1, 1, 1, 2, 3, 3, 3, 0],
        "positions": [0, 1, 2, 0, 0, 1, 2, 0],
        "ratio_segments": [0, 0, 0, 0, 4, 5, 6, 0],
    }.items():
        np.testing.assert_array_equal(getattr(batch, name)[0, 0], expected, name)
    assert batch.marked.dtype == bool and batch.routes.dtype == np.int16
    bare, _ = pack([plain], CONFIG, 1)
    assert all(leaf is None for leaf in (bare.marked, bare.entropy_coefficients, bare.routes, bare.temperatures))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 16), max_size=40), st.integers(1, 5), st.integers(1, 8))
def test_every_trajectory_comes_back_and_the_bound_holds(lengths, rows_per_batch, multiple):
    config = BatchConfig(row_length=16, rows=rows_per_batch)
    rows = reference.random_rows(lengths, vocab=50)
    bound = worst_case_micro_batches(len(rows), max(lengths, default=1), config, multiple)
    batch, placement = pack(rows, config, bound, multiple)
    for name in TRAIN_ROW_FIELDS:
        if name != "ratio_segments":
            for got, row in zip(unpack(getattr(batch, name), placement), rows, strict=True):
                np.testing.assert_array_equal(got, getattr(row, name))
    assert batch.tokens.shape[1] % multiple == 0 and (batch.segment_ids > 0).sum() == sum(lengths)
    padding = batch.segment_ids == 0
    assert not batch.policy_mask[padding].any() and not batch.weights[padding].any()
    assert not (batch.segment_ids[int(batch.count) :] > 0).any()
    assert placement.fill == sum(lengths) / (16 * max(placement.rows_used, 1)), "0 without trajectories"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 16), min_size=1, max_size=40))
def test_same_rows_as_the_textbook(lengths):
    row, offset, used = layouts.first_fit_decreasing(np.array(lengths), 16)
    expected = reference.first_fit_decreasing(lengths, 16)
    assert used == len(expected)
    for number, members in enumerate(expected):
        assert [i for i in np.argsort(offset) if row[i] == number] == members


def test_refusals_name_the_numbers():
    row = reference.random_rows([4], 50)[0]
    for refused, message in [
        (lambda: pack(reference.random_rows([3, 17], 50), CONFIG, 1), r"17 tokens but batch.row_length = 16"),
        (lambda: pack(reference.random_rows([16] * 3, 50), CONFIG, 1), r"2 micro-batches of 2, but 1 are allocated"),
        (lambda: worst_case_micro_batches(4, 20, CONFIG), r"may have 20 tokens but batch.row_length = 16"),
        (lambda: worst_case_micro_batches(4, 0, CONFIG), "longest = 0; must be a whole number of at least 1"),
        (lambda: BatchConfig(rows=-1), r"rows\n.*greater than or equal to 0"),
        (lambda: dataclasses.replace(row, weights=row.weights[:3]), "arrays of one length"),
        (lambda: dataclasses.replace(row, ratio_segments=np.array([0, 1, 2, 4], np.int32)), r"spans 0\.\.4"),
        (lambda: TrainRow(*[np.zeros(0)] * 7), "no tokens"),
    ]:
        with pytest.raises(ValueError, match=message):
            refused()
    for number in (1, "1"):
        assert BatchConfig(updates=number).updates == layouts.OneUpdate()
    assert BatchConfig(updates=3).updates == layouts.SeveralUpdates(parts=3)
    assert BatchConfig(updates={"kind": "several", "parts": 2, "epochs": 3}).updates.total == 6
    assert BatchConfig().updates.total == layouts.OneUpdate().total == 1
