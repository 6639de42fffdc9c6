"""The order of the devices of a TPU slice in a mesh: neighbors in the mesh are neighbors in the torus.

The devices of a process stay together, in a ring of single links. The processes follow a closed path through the grid
of their blocks. Each step of the path, also the one from the last process back to the first, crosses only as many links
as the block is wide.
"""

import math
from collections.abc import Sequence
from typing import Any

Point = tuple[int, ...]


def torus_order(devices: Sequence[Any]) -> list[Any] | None:
    """The devices in that order; None if they have no coordinates, or if their processes are not blocks of one shape.

    Args:
        devices: With `process_index` and, on TPUs, `coords`.
    """
    blocks: dict[int, dict[Point, Any]] = {}
    for device in devices:
        coords = getattr(device, "coords", None)
        if coords is None or tuple(coords) in blocks.setdefault(device.process_index, {}):
            return None  # no torus, or several cores with the coordinates of one chip
        blocks[device.process_index][tuple(coords)] = device
    corners = {process: tuple(map(min, zip(*block, strict=True))) for process, block in blocks.items()}
    shapes = {
        tuple(high - low + 1 for low, high in zip(corners[p], map(max, zip(*block, strict=True)), strict=True))
        for p, block in blocks.items()
    }
    if len(shapes) != 1 or any(len(block) != math.prod(*shapes) for block in blocks.values()):
        return None
    (shape,) = shapes
    origin = tuple(map(min, zip(*corners.values(), strict=True)))
    at = {
        tuple((c - o) // s for c, o, s in zip(corner, origin, shape, strict=True)): p for p, corner in corners.items()
    }
    grid = tuple(1 + max(side) for side in zip(*at, strict=True))
    if len(at) != math.prod(grid):
        return None
    # Blocks are thinnest along their shortest sides: the path runs along these first.
    sides = sorted(range(len(grid)), key=lambda side: shape[side])
    inside = closed_path(shape)
    ordered = []
    for point in closed_path(tuple(grid[side] for side in sides)):
        block = [0] * len(grid)
        for side, value in zip(sides, point, strict=True):
            block[side] = value
        process = at[tuple(block)]
        ordered += [
            blocks[process][tuple(c + d for c, d in zip(corners[process], step, strict=True))] for step in inside
        ]
    return ordered


def closed_path(grid: Sequence[int]) -> list[Point]:
    """The points of a grid in an order in which each is next to the previous one, and the last next to the first where
    the grid allows it. The path runs along the first axis as much as it can."""
    if len(grid) == 1:
        return [(i,) for i in range(grid[0])]
    first, rest = grid[0], closed_path(grid[1:])
    if first > 1 and len(rest) % 2 and first % 2 == 0 and len(rest) > 1:
        # The other axes make an open path: go through all but the first of it, and return along that one.
        lanes = [[(i, *point) for point in (rest[1:] if i % 2 == 0 else rest[:0:-1])] for i in range(first)]
        return [point for lane in lanes for point in lane] + [(i, *rest[0]) for i in reversed(range(first))]
    if first > 1 and len(rest) % 2 == 0 and distance(rest[0], rest[-1]) > 1:
        # Likewise, if the others end far from where they began: lanes along the first axis that leave one side free.
        lanes = [
            [(i, *point) for i in (range(1, first) if n % 2 == 0 else range(first - 1, 0, -1))]
            for n, point in enumerate(rest)
        ]
        return [point for lane in lanes for point in lane] + [(0, *point) for point in reversed(rest)]
    lanes = [
        [(i, *point) for i in (range(first) if n % 2 == 0 else reversed(range(first)))] for n, point in enumerate(rest)
    ]
    return [point for lane in lanes for point in lane]


def distance(a: Sequence[int], b: Sequence[int], wrapped: Sequence[int] | None = None) -> int:
    """Number of links between two points of a grid. `wrapped` has the length of each axis that is a ring,
    0 for others."""
    lengths = wrapped or [0] * len(a)
    steps = ((abs(x - y), length) for x, y, length in zip(a, b, lengths, strict=True))
    return sum(min(step, length - step) if length else step for step, length in steps)


def mean_hops(rows: Sequence[Sequence[Any]], wrapped: Sequence[int] | None = None) -> float:
    """Mean number of links between neighbors on an axis of a mesh, the last and the first of each ring included.

    Args:
        rows: Devices along the axis, one row for each place on the other axes.
        wrapped: As in `distance`.
    """
    hops = [distance(a.coords, b.coords, wrapped) for row in rows for a, b in zip(row, [*row[1:], row[0]], strict=True)]
    return sum(hops) / len(hops)
