"""The loss functions of the Tinker API, summed over tokens. Thresholds are arguments: one program serves all.

l are log-probabilities of the targets, q `logprobs`, A `advantages`, w `weights`, r = e^(l-q). The formulas are those
of `method` wherever it has them.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from grpo_roc_jax.method.divergence import MAX_LOGRATIO
from grpo_roc_jax.method.surrogate import (
    LogProbability,
    Ratio,
    clipped_surrogate,
    detached_ratio_loss,
    segment_logratio,
)
from grpo_roc_jax.serving.refusal import RequestRefused
from grpo_roc_jax.shapes import Array, Bool, Float, Int

CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
CONFIGS: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": CLIP,
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "dro": {"beta": 0.05},
    "gspo": CLIP,
}
"""Loss -> its settings with their defaults. That of `dro.beta` is not published; 0.05 is this server's."""
INPUTS = {name: ("target_tokens", "weights" if name == "cross_entropy" else "advantages") for name in CONFIGS}
"""Loss -> arrays that a datum must have; all but cross_entropy need `logprobs` too, gspo `sequence_ratio_mask`."""
REFUSED = {
    "stable_reinforce": "its formula is not published; pass loss_fn=importance_sampling (or ppo, cispo)",
}


def settings_of(loss_fn: str, given: Mapping[str, float | str]) -> dict[str, float]:
    """The settings of a loss, by default where they are not given.

    Raises:
        RequestRefused: No such loss, or it has no such setting.
    """
    if loss_fn not in CONFIGS:
        why = REFUSED.get(loss_fn, "take one of those, or forward_backward_custom with a loss of your own")
        raise RequestRefused(f"loss_fn = {loss_fn!r:.80}; must be one of {', '.join(CONFIGS)}: {why}")
    known = CONFIGS[loss_fn]
    for name, value in given.items():
        if name not in known or isinstance(value, str):
            names = ", ".join(known) or "none"
            raise RequestRefused(f"loss_fn_config {name} = {value!r:.80}; {loss_fn} has these numbers: {names}")
    settings = known | {name: float(value) for name, value in given.items()}
    low, high = settings.get("clip_low_threshold", 0.0), settings.get("clip_high_threshold", 1.0)
    if not 0 <= low <= high:
        raise RequestRefused(f"thresholds {low} and {high} of {loss_fn}; must be 0 <= low <= high: bounds of the ratio")
    return settings


def token_losses(
    loss_fn: str,
    logprobs: Float[Array, "R T"],
    old: Float[Array, "R T"],
    advantages: Float[Array, "R T"],
    config: Mapping[str, Array],
    ratio_mask: Bool[Array, "R T"],
    segments: Int[Array, "R T"],
) -> Float[Array, "R T"]:
    """Loss of each token, before its weight.

    Args:
        loss_fn: A key of `CONFIGS`; static.
        logprobs: l; equal to `old` on padding.
        old: q.
        advantages: A, or w for cross_entropy.
        config: Scalars of `settings_of`.
        ratio_mask: For gspo: tokens whose mean log-ratio is that of their sequence.
        segments: Number of the sequence of each token in its row, in 0..T-1.
    """
    if loss_fn == "cross_entropy":
        return LogProbability().loss(logprobs, advantages, logprobs)
    if loss_fn == "dro":  # not clamped: the squared term holds the ratio back
        return -(logprobs * advantages - 0.5 * config["beta"] * jnp.square(logprobs - old))
    logratio = jnp.clip(logprobs - old, -MAX_LOGRATIO, MAX_LOGRATIO)
    if loss_fn == "importance_sampling":
        return Ratio().loss(logratio, advantages, logprobs)
    low, high = config["clip_low_threshold"], config["clip_high_threshold"]
    if loss_fn == "cispo":
        return detached_ratio_loss(logratio, advantages, logprobs, low, high)
    if loss_fn == "gspo":
        logratio = segment_logratio(logratio, ratio_mask, segments)
    return clipped_surrogate(logratio, advantages, clip_low=1.0 - low, clip_high=high - 1.0)


def scalars(config: Mapping[str, float]) -> dict[str, Array]:
    """The settings as arguments of a program."""
    return {name: jax.device_put(jnp.float32(value)) for name, value in sorted(config.items())}
