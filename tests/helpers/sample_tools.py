"""A tool of the kind that users register, for several test files."""

from typing import Literal


def area(width: float, height: float = 1.0, unit: Literal["cm", "m"] = "cm") -> str:
    """Area of a rectangle.

    Args:
        width: Of the rectangle,
            in the unit.
        unit: Of all lengths.
    """
    return f"{width * height} {unit}"
