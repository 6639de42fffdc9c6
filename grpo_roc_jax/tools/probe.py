"""`python -m grpo_roc_jax.tools.probe`: which isolation levels this host offers, what is missing, what to do.

Run it in a process of its own, as here: each step is tried in a forked child.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from grpo_roc_jax.tools import sandbox
from grpo_roc_jax.tools.config import ToolsConfig


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; status 0 if the default minimum level can be reached, else 5."""
    parser = argparse.ArgumentParser(prog="python -m grpo_roc_jax.tools.probe", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument(
        "--min-level", default=ToolsConfig.min_level, choices=sandbox.LEVELS, help="level that is needed"
    )
    options = parser.parse_args(arguments)
    probe = sandbox.probe_host()
    enough = any(level >= options.min_level for level in probe.available)
    if options.json:
        layers = [asdict(layer) for layer in probe.layers]
        print(json.dumps({"layers": layers, "levels": probe.available, "enough": enough}))
    else:
        print(probe.table())
        best = probe.available[-1] if probe.available else "none"
        print(f"best: {best}; {'enough' if enough else 'NOT enough'} for tools.min_level {options.min_level}")
    return 0 if enough else 5


if __name__ == "__main__":
    sys.exit(main())
