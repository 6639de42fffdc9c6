"""A tool of your own: a function with type hints and a docstring, which become the schema that the policy reads.

python examples/environments/own_tool.py
"""

import sys

import grpo_roc_jax as g


async def convert(amount: float, unit: str = "km") -> str:
    """Converts a length to miles.

    Args:
        amount: The length.
        unit: Its unit, `km` or `m`.
    """
    scale = {"km": 1.0, "m": 1e-3}  # an unknown unit raises KeyError, which the policy sees
    return f"{amount * scale[unit] * 0.621371:.3f} miles"


def main(words: list[str]) -> dict:
    """Trains with it, in place of the built-in tools."""
    tools = g.Registry()
    tools.add(convert, where="trainer")  # `sandbox` would run its source text in the Python executor
    return g.train_policy(g.read_config("toy.yaml", *words), tools=tools)


if __name__ == "__main__":
    main(sys.argv[1:])
