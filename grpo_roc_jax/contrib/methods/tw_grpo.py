"""TW-GRPO's token weights: positions at which a group's predictions differ count more. Source: arXiv:2505.24718.

Use it by `method.edit_rows grpo_roc_jax.contrib.methods.tw_grpo:weighted`; the recipe next to this file combines it
with the reward for several answers. Log-probabilities over the whole vocabulary exist for one chunk of positions at a
time.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial

import jax
import numpy as np

from grpo_roc_jax.method.divergence import k3
from grpo_roc_jax.method.features import flat
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.transformer import forward, unembed

CHUNK = 64


def weighted(rows: Sequence, groups: Sequence, policy, predict: Callable | None = None) -> list:
    """The rows with the weights of each group's positions, counted from the end of the prompt. `predict` takes the
    place of `log_vectors`."""
    out = []
    for group in groups:
        members, starts = rows[len(out) : len(out) + group.size], [t.prompt_length for t in group.trajectories]
        factors = token_weights((predict or log_vectors)(members, starts, policy))
        for row, start in zip(members, starts, strict=True):
            scaled = row.weights.copy()
            scaled[start:] *= factors[: len(row.weights) - start]
            out.append(dataclasses.replace(row, weights=scaled))
    return out


def log_vectors(rows: Sequence, starts: Sequence[int], policy) -> Iterator[np.ndarray]:
    """Log-probabilities [G,C,V] of consecutive response positions; uniform after the end of a response."""
    if not rows:
        return
    params, lengths = policy.learner.full(policy.trained), np.array([row.length for row in rows])
    G, T = len(rows), policy.learner.longest
    places = np.tile(np.arange(T, dtype=np.int32), (G, 1))
    real = (places < lengths[:, None]).astype(np.int32)
    tokens = np.stack([np.resize(row.tokens, T) for row in rows])
    hidden = hidden_states(policy.learner.model)(params, tokens, places, real)
    longest = int((lengths - starts).max())
    for first in range(0, longest, CHUNK):
        places = np.asarray(starts)[:, None] + np.arange(first, first + CHUNK)  # one shape for all chunks
        states = hidden[np.arange(G)[:, None], np.minimum(places, T) - 1]  # position t is predicted from t - 1
        logprobs = np.asarray(jax.nn.log_softmax(unembed(params, states, policy.learner.model)))
        known = np.where((places >= lengths[:, None])[..., None], -np.log(logprobs.shape[-1]), logprobs)
        yield known[:, : longest - first]


@cache
def hidden_states(model: ModelConfig) -> Callable[..., jax.Array]:
    """The forward pass, compiled once per group size."""
    return jax.jit(partial(forward, config=model))


def divergence(logprobs: np.ndarray) -> np.ndarray:
    """[C]: mean over the group of sum_v (e^u - u - 1), u = clip(mu - log p, -11, 11), mu the group's mean log p."""
    u = np.clip(logprobs.mean(axis=0, keepdims=True) - logprobs, -11.0, 11.0)
    return k3(u).sum(axis=-1).mean(axis=0)


def token_weights(chunks: Iterable[np.ndarray], alpha: float = 1.4) -> np.ndarray:
    """float64[T]: 1 + (alpha - 1) times the divergence, scaled to 0..1 over the positions; 1 where all are alike."""
    values = np.concatenate([np.zeros(0), *(divergence(chunk) for chunk in chunks)])
    if flat(values):
        return np.ones(len(values))
    return 1 + (alpha - 1) * (values - values.min()) / np.ptp(values)
