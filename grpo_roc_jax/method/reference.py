"""The loss of GRPO-RoC on one page, from rewards to a number: the reference that the composed parts are tested against.

Training computes the same from parts that other methods exchange: `method.roc` (selection), `method.advantage`,
`method.weights` (what a token counts), `method.surrogate` (the clipped loss) and `learner.loss` (log-probabilities of
packed rows). `tests/method/test_compose.py` holds the two together.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from grpo_roc_jax import checks
from grpo_roc_jax.shapes import Array


def grpo_roc_loss(
    logprobs: Array,
    logprobs_old: Array,
    policy_mask: np.ndarray,
    rollouts: list[dict[str, np.ndarray]],
    rng: np.random.Generator,
    *,
    keep: int,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> Any:
    """The loss of P problems with N sampled rollouts each; lower is better.

    Source: arXiv:2508.20722, eq. 4 and 5 and sec. 2.2.3 (selection), arXiv:2402.03300 (advantage), arXiv:2503.14476
    (clip and mean over tokens).

    Args:
        logprobs: float[P,N,T], in nats, under the policy that is trained; differentiable.
        logprobs_old: float[P,N,T], in nats, under the policy that sampled.
        policy_mask: bool[P,N,T], true on sampled tokens; prompts and tool outputs are not trained.
        rollouts: For each problem arrays [N]: `rewards`, `correct`, and what makes a success clean or not: `calls`,
            `errors` (failed calls), `answers` (answer blocks), `turns`.
        rng: Draws the failures that are kept.
        keep: G, rollouts of a problem that train.
    """
    logprobs, logprobs_old, policy_mask = jnp.asarray(logprobs), jnp.asarray(logprobs_old), np.asarray(policy_mask)
    shape = logprobs.shape
    checks.check_shapes(shape, logprobs_old=logprobs_old, policy_mask=policy_mask)
    checks.check_shapes(shape[:1], rollouts=rollouts)
    checks.expect_generator(rng)
    checks.check_count("keep", keep, 1, shape[1])
    total, tokens = jnp.zeros(()), 0
    for p, rollout in enumerate(rollouts):
        checks.check_shapes(shape[1:2], **rollout)
        rollout = {name: np.asarray(values) for name, values in rollout.items()}
        rewards, correct, calls, answers = (rollout[name] for name in ("rewards", "correct", "calls", "answers"))
        rewards = rewards.astype(np.float64)
        if np.ptp(rewards) == 0:
            continue  # equal rewards carry no signal
        # Selection: failures at random, successes by how clean they are.
        penalty = np.where(calls > 0, rollout["errors"] / np.maximum(calls, 1), 0.5)
        penalty = penalty + np.where(answers < 1, 1.0, np.minimum((answers - 1) / rollout["turns"], 1.0))
        right, wrong = np.flatnonzero(correct), np.flatnonzero(np.logical_not(correct))
        least, most = min(2, len(wrong), keep // 2), keep - min(2, len(right), keep // 2)
        failures = min(max(round(len(wrong) * keep / len(rewards)), least), most)
        cleanest = right[np.argsort(penalty[right], kind="stable")][: keep - failures]
        selected = np.sort(np.concatenate([cleanest, wrong[rng.permutation(len(wrong))][:failures]]))
        # Advantages within the kept group, then the clipped loss of each token.
        centered = rewards[selected] - rewards[selected].mean()
        advantages = centered / (np.sqrt(centered @ centered / max(len(centered) - 1, 1)) + 1e-6)
        mask, a = policy_mask[p, selected], advantages[:, None]
        ratio = jnp.exp(jnp.where(mask, logprobs[p, selected] - logprobs_old[p, selected], 0.0))
        clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
        total = total - jnp.sum(jnp.where(mask, jnp.minimum(ratio * a, clipped * a), 0.0))
        tokens += int(mask.sum())
    return total / max(tokens, 1)
