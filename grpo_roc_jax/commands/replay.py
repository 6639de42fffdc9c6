"""Runs one update of a run again, alone: `grpo-roc replay FILE [--checkpoint STEP] [--section.field value]`.

A run saves the rows of its first few updates that were not finite or raised an alarm in `batches/step_N.npz`. The
command names the rows that are not finite or have the largest gradients, on any machine (see `run.replay`).
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_roc_jax.run.replay import PROG, replay
from grpo_roc_jax.settings.cli import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    checkpoint = None
    if "--checkpoint" in words[:-1]:
        at = words.index("--checkpoint")
        if not words[at + 1].isdecimal():
            print(f"replay: --checkpoint {words[at + 1]}; must be the number of a step", file=sys.stderr)
            return 2
        checkpoint = int(words[at + 1])
        del words[at : at + 2]
    if not words or words[0].startswith("-"):
        print(f"usage: {PROG} FILE [--checkpoint STEP] [--section.field value ...]\n\n{__doc__}")
        return 0 if {"--help", "-h"} & {*words} else 2
    try:
        print("\n".join(replay(Path(words[0]), words[1:], checkpoint)))
    except ConfigError as error:
        print(f"replay: {error}", file=sys.stderr)
        return 2
    return 0
