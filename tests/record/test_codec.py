"""Host values as JSON and back."""

import json

import numpy as np
import pytest

from grpo_roc_jax.record.codec import finite, from_json, to_json
from tests.helpers.same import assert_same

VALUES = {
    "plain": [1, 2.5, "a", True, None, {"b": [1, {"c": "d"}]}],
    "tuple": (1, ("a", [2.5]), ()),
    "bytes": b"\x00\xff",
    "keys that are not text": {1: "a", (2, "b"): b"c"},
    "keys that are tags": {"__tuple__": [1], "__bytes__": "AA=="},
    "array": np.arange(6, dtype=">i4").reshape(2, 3),
    "empty array": np.zeros((0, 3), np.float32),
    "scalar": np.float32(0.1),
    "complex": np.complex64(1 + 2j),
    "flags": np.array([True, False]),
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
def test_values_return_as_they_were(value):
    assert_same(from_json(json.loads(json.dumps(to_json(value)))), value)


@pytest.mark.parametrize(
    "value", [{1, 2}, object(), np.array(["a"]), np.array([None])], ids=["set", "object", "text", "none"]
)
def test_a_value_without_an_exact_form_is_refused(value):
    with pytest.raises(TypeError, match=f"cannot store a {type(value).__name__}"):
        to_json({"a": [value]})


def test_numbers_that_json_does_not_have_become_null():
    nan, inf = float("nan"), float("inf")
    assert finite({"a": [1, nan, (2.5, -inf)], "b": {"c": inf, "d": "text"}, "e": None}) == {
        "a": [1, None, [2.5, None]],
        "b": {"c": None, "d": "text"},
        "e": None,
    }
    assert finite(1.5) == 1.5 and finite((1, 2)) == [1, 2]
