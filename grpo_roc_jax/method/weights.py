"""Token weights and the normaliser: the C of loss = sum C[b,t] phi(d, A).

Masks take tokens out of the loss and of every count; factors scale what is left without touching the count. The
normaliser is computed over the whole optimiser batch, so micro-batches, packing and devices cannot change the loss.
"""

from collections.abc import Sequence

import numpy as np

from grpo_roc_jax.method.config import LossConfig
from grpo_roc_jax.types import Trajectory, Verdict


def normalisers(counts: np.ndarray, config: LossConfig) -> np.ndarray:
    """float64[B]: what a token of each trajectory is multiplied with; 0 where a trajectory trains no token.

    With n_i trained tokens in trajectory i and B trajectories that have any: token_mean 1 / sum n, sequence_mean
    1 / (B n_i), sequence_sum 1 / B, constant 1 / (B L).

    Args:
        counts: n_i over the optimiser batch, all devices and micro-batches.
        config: `normalizer` and `constant_length` (L).
    """
    counts = np.asarray(counts, np.float64)
    rows, tokens = max(np.count_nonzero(counts), 1), max(counts.sum(), 1.0)
    if config.normalizer == "token_mean":
        value = np.full(len(counts), 1.0 / tokens)
    elif config.normalizer == "sequence_mean":
        value = 1.0 / (rows * np.maximum(counts, 1.0))
    elif config.normalizer == "sequence_sum":
        value = np.full(len(counts), 1.0 / rows)
    else:
        value = np.full(len(counts), 1.0 / (rows * config.constant_length))
    return np.where(counts > 0, value, 0.0)


def trained(trajectory: Trajectory, verdict: Verdict, config: LossConfig) -> bool:
    """Whether a trajectory's tokens are in the loss, under the masks of the config."""
    if config.mask_truncated and trajectory.truncated:
        return False
    return not (config.mask_void_turns and has_void_turn(trajectory, verdict))


def has_void_turn(trajectory: Trajectory, verdict: Verdict) -> bool:
    """Whether some turn holds neither a tool call nor the answer (SimpleTIR, arXiv:2509.02479)."""
    silent = [not turn.calls for turn in trajectory.turns]
    return any(silent[:-1]) or (bool(silent) and silent[-1] and verdict.answer is None)


def mismatch_weights(recorded: np.ndarray, scored: np.ndarray, mask: np.ndarray, config: LossConfig) -> np.ndarray:
    """float64[T]: correction for a sampler whose probabilities differ from the trainer's; 1 off the mask.

    w = exp(scored - recorded), a token's or the geometric mean of the trajectory's. `truncate`: min(w, cap) (TIS).
    `mask`: w within [1 / cap, cap], else 0 (MIS).
    """
    gap = np.where(mask, scored.astype(np.float64) - recorded, 0.0)
    if config.mismatch_level == "sequence":
        gap = np.where(mask, gap.sum() / max(mask.sum(), 1), 0.0)
    ratio = np.exp(np.clip(gap, -20.0, 20.0))
    if config.mismatch == "truncate":
        return np.minimum(ratio, config.mismatch_cap)
    return np.where((ratio <= config.mismatch_cap) & (ratio >= 1 / config.mismatch_cap), ratio, 0.0)


def kept_tokens(
    trajectories: Sequence[Trajectory],
    masks: Sequence[np.ndarray],
    advantages: Sequence[np.ndarray],
    scores: Sequence[np.ndarray],
    entropies: Sequence[np.ndarray] | None,
    config: LossConfig,
) -> list[np.ndarray]:
    """The masks without what the scoring pass speaks against: failures left behind, tokens that are certain.

    `mask_drift` d drops a trajectory with negative advantage whose mean of recorded - scored exceeds d
    (arXiv:2512.02556). `top_entropy` s then keeps the tokens in the top share s of the batch by entropy
    (arXiv:2506.01939).
    """
    kept = []
    for trajectory, mask, advantage, now in zip(trajectories, masks, advantages, scores, strict=True):
        drift = np.mean(trajectory.logprobs - now, where=mask) if mask.any() else 0.0
        left = config.mask_drift and drift > config.mask_drift and advantage[mask].sum() < 0
        kept.append(np.zeros_like(mask) if left else mask)
    if config.top_entropy >= 1:
        return kept
    seen = np.concatenate([entropy[mask] for entropy, mask in zip(entropies, kept, strict=True)])
    least = np.quantile(seen, 1 - config.top_entropy) if len(seen) else 0.0
    return [mask & (entropy >= least) for entropy, mask in zip(entropies, kept, strict=True)]


def length_preference(lengths: np.ndarray, exponent: float, strength: float = 1 / 9) -> np.ndarray:
    """float64[G]: f_i = G softmax(h^exponent)_i with h_i = max(1 + strength (n_i - mean) / std, 1e-6); sums to G.

    Exponent 0 weights all alike, below 0 favours short trajectories, above long ones.
    Source: lambda-GRPO, arXiv:2510.06870.
    """
    powers = _length_bases(lengths, strength) ** exponent
    shares = np.exp(powers - powers.max())
    return len(lengths) * shares / shares.sum()


def length_preference_slope(lengths: np.ndarray, exponent: float, strength: float = 1 / 9) -> np.ndarray:
    """float64[G]: df_i / d exponent."""
    bases = _length_bases(lengths, strength)
    change = bases**exponent * np.log(bases)
    weights = length_preference(lengths, exponent, strength)
    return weights * (change - weights @ change / len(lengths))


def _length_bases(lengths: np.ndarray, strength: float) -> np.ndarray:
    spread = float(np.std(lengths))
    if spread == 0:
        return np.ones(len(lengths))
    return np.maximum(1 + strength * (np.asarray(lengths, np.float64) - np.mean(lengths)) / spread, 1e-6)


def exponent_gradient(
    lengths: Sequence[np.ndarray], advantages: Sequence[np.ndarray], exponent: float, strength: float = 1 / 9
) -> float:
    """dJ / d exponent = sum_i (df_i / d exponent) A_i n_i / sum n over the batch, at ratio 1.

    Args:
        lengths: Policy tokens, one array a group.
        advantages: One number a trajectory.
        exponent: The current one.
        strength: As in `length_preference`.
    """
    total = sum(float(n.sum()) for n in lengths)
    slopes = [
        length_preference_slope(n, exponent, strength) @ (a * n) for n, a in zip(lengths, advantages, strict=True)
    ]
    return float(sum(slopes)) / max(total, 1.0)


def ratio_segments(trajectory: Trajectory, level: str) -> np.ndarray:
    """int32[T]: which tokens share an importance ratio: none, those of a turn, or all."""
    if level == "token":
        return np.arange(trajectory.length, dtype=np.int32)
    segments = np.zeros(trajectory.length, np.int32)
    if level == "turn":
        for index, turn in enumerate(trajectory.turns):
            segments[turn.start : turn.end] = index
    return segments
