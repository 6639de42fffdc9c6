"""Whether this checkout has the folder of adapters and further methods, which the core works without."""

from pathlib import Path

import pytest

HAS_CONTRIB = (Path(__file__).resolve().parents[2] / "grpo_roc_jax" / "contrib").is_dir()
with_contrib = pytest.mark.skipif(not HAS_CONTRIB, reason="speaks of contrib/, which is not here")
