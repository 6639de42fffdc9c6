"""Equality down to types, dtypes and the order of keys."""

import dataclasses

import numpy as np


def assert_same(actual, expected):
    assert type(actual) is type(expected), (actual, expected)
    if isinstance(expected, np.ndarray | np.generic):
        assert actual.dtype == expected.dtype and np.array_equal(actual, expected)
    elif dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            assert_same(getattr(actual, field.name), getattr(expected, field.name))
    elif isinstance(expected, tuple | list):
        for item, other in zip(actual, expected, strict=True):
            assert_same(item, other)
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        assert_same([*actual.values()], [*expected.values()])
    else:
        assert actual == expected
