"""Equality down to types, dtypes and the order of keys."""

import dataclasses

import numpy as np


def assert_same(found, expected):
    assert type(found) is type(expected), (found, expected)
    if isinstance(expected, np.ndarray | np.generic):
        assert found.dtype == expected.dtype and np.array_equal(found, expected)
    elif dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            assert_same(getattr(found, field.name), getattr(expected, field.name))
    elif isinstance(expected, tuple | list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        assert_same([*found.values()], [*expected.values()])
    else:
        assert found == expected
