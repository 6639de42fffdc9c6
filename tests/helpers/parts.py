"""What CI runs in turns."""

import os
import zlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def part_of(rows: Sequence[T], part: str = os.environ.get("TESTS_PART", "0/1")) -> Sequence[T]:
    """Those that CI takes with one commit; `2/4` is every fourth one from the third on."""
    first, _, step = part.partition("/")
    return rows[int(first) :: int(step)]


def in_slice(name: str, part: str) -> bool:
    """Whether a test is of slice `3/32`, by its name alone."""
    first, _, step = part.partition("/")
    return zlib.crc32(name.encode()) % int(step) == int(first)
