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
    helps = [i for i, word in enumerate(words) if word in ("--help", "-h")]
    end = helps[0] if helps else len(words)  # words after --help are sections
    return train.main([*words[:end], "--steps=0", *words[end:]])
