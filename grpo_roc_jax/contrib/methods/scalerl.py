"""Problems that are nearly always solved are not drawn again. Source: ScaleRL, arXiv:2510.13786."""

from collections.abc import Sequence

import numpy as np

from grpo_roc_jax.method.planning import ProblemSampler
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.method.weights import Normalizer
from grpo_roc_jax.settings.options import AtLeast2, PositiveShare, kind
from grpo_roc_jax.types import Problem


@kind("no_positive_resampling")
class NoPositiveResampling(ProblemSampler):
    """Problems in the order of the stream without those that were nearly always solved at their last visit (ScaleRL,
    arXiv:2510.13786); these fill the places that stay empty."""

    pool: AtLeast2 = 2
    """Candidates drawn from the stream for each problem trained on; the others wait for the next epoch."""
    solved: PositiveShare = 0.9
    """Share of solved rollouts from which a problem is left out."""

    def choose(self, pool: Sequence[Problem], count: int, state: AlgoState, rng: np.random.Generator) -> list[int]:
        rows = state.table.get([p.uid for p in pool])
        mastered = (rows["visits"] > 0) & (rows["accuracy"] >= self.solved)
        return sorted(int(i) for i in np.argsort(mastered, kind="stable")[:count])


# ---- each problem counts equally ------------------------------------------------------------------------------------
# The mean over problems of the mean over a problem's tokens. Source: ScaleRL, arXiv:2510.13786.


@kind("prompt_mean")
class PromptMean(Normalizer):
    """1 / (P sum n over the group), P groups with a trained token: problems count equally, and so do the tokens of a
    problem (ScaleRL, arXiv:2510.13786). The mean over the tokens of the whole batch is `token_mean`."""

    def grouped(self, counts: np.ndarray, groups: np.ndarray) -> np.ndarray:
        tokens = np.bincount(groups, counts)
        return 1.0 / (max(np.count_nonzero(tokens), 1) * np.maximum(tokens, 1.0))[groups]
