"""Packing drops nothing, keeps trajectories apart, and has one shape."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_roc_jax.learner.pack import (
    BatchConfig,
    OneUpdate,
    SeveralUpdates,
    first_fit_decreasing,
    halved,
    pack,
    rows_per_micro_batch,
    unpack,
    worst_case_micro_batches,
)
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
    assert placement.row.tolist() == [1, 0, 0, 1] and placement.offset.tolist() == [11, 0, 12, 0]
    np.testing.assert_array_equal(batch.ratio_segments[0, 1], np.arange(16))


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


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 16), min_size=1, max_size=40))
def test_same_rows_as_the_textbook(lengths):
    row, offset, used = first_fit_decreasing(np.array(lengths), 16)
    expected = reference.first_fit_decreasing(lengths, 16)
    assert used == len(expected)
    for number, members in enumerate(expected):
        assert [i for i in np.argsort(offset) if row[i] == number] == members


def test_tight_worst_case():
    """Items just over half a row fit one to a row: the bound is attained, so it cannot be lowered."""
    _, batch, placement = pack_lengths([9] * 7)
    assert placement.rows_used == 7 and batch.tokens.shape[0] == batch.count == 4


def test_a_micro_batch_has_4096_tokens_by_default():
    config = BatchConfig()
    assert (config.row_length, rows_per_micro_batch(config, 1)) == (512, 8)


def test_worst_case_by_hand():
    """Rows of 16 hold three trajectories of up to 5 tokens; 2 rows make a micro-batch, and there is at least one."""
    assert [worst_case_micro_batches(n, 5, CONFIG) for n in (0, 1, 6, 7, 13)] == [1, 1, 1, 2, 3]
    assert worst_case_micro_batches(3, 16, BatchConfig(row_length=16, rows=1)) == 3
    assert worst_case_micro_batches(3, 16, BatchConfig(row_length=16, rows=1), 2) == 2


def test_halved_micro_batches_hold_the_same_rows():
    rows = reference.random_rows([16, 15, 14], 50)
    batch, _ = pack(rows, CONFIG, 2, temperature=1.0)
    more = halved(batch)
    assert more.tokens.shape == (4, 1, 16) and more.count == 4 and more.count.dtype == batch.count.dtype
    np.testing.assert_array_equal(more.tokens[:3, 0, :14], [row.tokens[:14] for row in rows])
    for name, leaf in vars(more).items():
        if name != "count" and leaf is not None:
            np.testing.assert_array_equal(leaf.reshape(2, 2, 16), getattr(batch, name))


def test_fill_on_lognormal_lengths():
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(110), 0.6, 128), 8, 512).astype(int)
    _, _, used = first_fit_decreasing(lengths, 512)
    assert lengths.sum() / (used * 512) >= 0.88


def test_ratio_segments_stay_apart():
    """Turn numbers that start at 0 in every trajectory name different segments of a row."""
    rows = [dataclasses.replace(row, ratio_segments=np.zeros(8, np.int32)) for row in reference.random_rows([8, 8], 50)]
    batch, _ = pack(rows, CONFIG, 1)
    np.testing.assert_array_equal(batch.ratio_segments[0, 0], [0] * 8 + [8] * 8)


def test_fields_that_only_some_rows_have():
    """Tokens of other rows and padding keep a value without effect; fields that no row has are absent."""
    plain, full = reference.random_rows([3, 4], 50)
    routes = np.arange(24).reshape(4, 3, 2)
    full = dataclasses.replace(full, marked=np.ones(4, bool), entropy_coefficient=0.5, routes=routes)
    batch, _ = pack([plain, full], BatchConfig(row_length=8, rows=1), 1)
    np.testing.assert_array_equal(batch.marked[0, 0], [True] * 4 + [False] * 4)
    np.testing.assert_array_equal(batch.entropy_coefficients[0, 0], [0.5] * 4 + [0.0] * 4)
    np.testing.assert_array_equal(batch.routes[0, 0], [*routes, *np.full((4, 3, 2), -1)])
    assert batch.marked.dtype == bool and batch.routes.dtype == np.int16 and batch.temperatures is None
    batch, _ = pack([plain], CONFIG, 1)
    assert batch.marked is None and batch.entropy_coefficients is None and batch.routes is None


def test_temperatures_of_rows():
    """A row's own temperature, else the one of the run; padding has 1."""
    plain, cool = reference.random_rows([3, 4], 50)
    batch, _ = pack([plain, dataclasses.replace(cool, temperature=0.5)], BatchConfig(row_length=8, rows=1), 1, 1, 0.75)
    np.testing.assert_array_equal(batch.temperatures[0, 0], [0.5] * 4 + [0.75] * 3 + [1.0])


def test_parts_of_a_row_are_segments_of_their_own():
    """Positions restart with each part, and the next trajectory of the row comes after the last part."""
    whole, parted = reference.random_rows([2, 5], 50)
    batch, _ = pack([whole, dataclasses.replace(parted, parts=(3, 2))], BatchConfig(row_length=8, rows=1), 1)
    np.testing.assert_array_equal(batch.segment_ids[0, 0], [1, 1, 1, 2, 2, 3, 3, 0])
    np.testing.assert_array_equal(batch.positions[0, 0], [0, 1, 2, 0, 1, 0, 1, 0])


def test_rows_round_up_to_the_mesh():
    assert rows_per_micro_batch(BatchConfig(rows=5), 4) == 8


def test_a_plain_number_of_updates_is_that_many_parts():
    for number in (1, "1"):
        assert BatchConfig(updates=number).updates == OneUpdate()
    assert BatchConfig(updates=3).updates == SeveralUpdates(parts=3)
    assert BatchConfig(updates={"kind": "several", "parts": 2, "epochs": 3}).updates.total == 6
    assert BatchConfig().updates.total == OneUpdate().total == 1


def test_no_trajectories_make_an_empty_batch():
    batch, placement = pack([], CONFIG, 1)
    assert batch.count == 0 and not batch.weights.any() and unpack(batch.tokens, placement) == []
    assert placement.fill == 0.0


def test_one_token_fills_a_row_of_one():
    assert pack_lengths([1], BatchConfig(row_length=1, rows=1))[2].fill == 1.0


def test_refusals_name_the_numbers():
    with pytest.raises(ValueError, match=r"17 tokens but batch.row_length = 16"):
        pack(reference.random_rows([3, 17], 50), CONFIG, 1)
    with pytest.raises(ValueError, match=r"2 micro-batches of 2, but 1 are allocated"):
        pack(reference.random_rows([16] * 3, 50), CONFIG, 1)
    with pytest.raises(ValueError, match=r"may have 20 tokens but batch.row_length = 16"):
        worst_case_micro_batches(4, 20, CONFIG)
    with pytest.raises(ValueError, match=r"rows\n.*greater than or equal to 0"):
        BatchConfig(rows=-1)
    row = reference.random_rows([4], 50)[0]
    with pytest.raises(ValueError, match="arrays of one length"):
        dataclasses.replace(row, weights=row.weights[:3])
    with pytest.raises(ValueError, match=r"span 0\.\.4"):
        dataclasses.replace(row, ratio_segments=np.array([0, 1, 2, 4], np.int32))
    with pytest.raises(ValueError, match="no tokens"):
        TrainRow(*[np.zeros(0)] * 7)
