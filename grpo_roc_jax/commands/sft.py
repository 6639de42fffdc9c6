"""The supervised stage alone: `grpo-roc sft [CONFIG.yaml] [--section.field value]`.

Leaves a checkpoint at step 0 with its evaluation, from which `python -m grpo_roc_jax.train CONFIG.yaml --run_dir DIR
--resume auto` continues with reinforcement learning.
"""

import sys
from collections.abc import Sequence

from grpo_roc_jax import train


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    at = next(
        (i for i, word in enumerate(words) if word in ("--help", "-h")), len(words)
    )  # words after it are sections
    return train.main([*words[:at], "--steps=0", *words[at:]])
