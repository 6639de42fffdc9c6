"""The mean over problems of the mean over a problem's tokens. Source: ScaleRL, arXiv:2510.13786."""

import numpy as np

from grpo_roc_jax.method.weights import Normalizer
from grpo_roc_jax.settings.options import kind


@kind("prompt_mean")
class PromptMean(Normalizer):
    """1 / (P sum n over the group), P groups with a trained token: problems count equally, and so do the tokens of a
    problem (ScaleRL, arXiv:2510.13786). The mean over the tokens of the whole batch is `token_mean`."""

    def grouped(self, counts: np.ndarray, groups: np.ndarray) -> np.ndarray:
        tokens = np.bincount(groups, counts)
        return 1.0 / (max(np.count_nonzero(tokens), 1) * np.maximum(tokens, 1.0))[groups]
