"""Only the tokens where the policy is least certain train. Source: arXiv:2506.01939."""

import numpy as np

from grpo_roc_jax.method.part import MethodBatch
from grpo_roc_jax.method.weights import Mask
from grpo_roc_jax.settings.options import PositiveShare, kind


@kind("top_entropy")
class TopEntropy(Mask):
    """Keeps the tokens of the batch with the highest entropy (arXiv:2506.01939)."""

    needs_scores = True

    share: PositiveShare = 0.2
    """Share of the batch's tokens that train."""

    def tokens(self, masks: list[np.ndarray], advantages: list[np.ndarray], batch: MethodBatch) -> list[np.ndarray]:
        seen = np.concatenate([entropy[mask] for entropy, mask in zip(batch.entropies, masks, strict=True)])
        least = np.quantile(seen, 1 - self.share) if len(seen) else 0.0
        return [mask & (entropy >= least) for entropy, mask in zip(batch.entropies, masks, strict=True)]
