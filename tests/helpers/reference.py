"""Slow references in NumPy, float64, one token at a time where that is clearest, and random rows to feed both sides."""

from functools import partial

import jax
import numpy as np

from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.transformer import init_params
from grpo_roc_jax.types import TrainRow


def random_params(config: ModelConfig, seed: int = 0, spread: float = 0.0) -> dict:
    """Parameters of the size of fresh ones, drawn without compiling anything; `spread` is noise on all."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        name = path[-1].key
        if name.endswith("norm"):
            value = np.zeros(leaf.shape) if config.norm_offset and name != "delta_norm" else np.ones(leaf.shape)
        elif name in ("bq", "bk", "bv"):
            value = np.zeros(leaf.shape)
        elif name in ("a_log", "dt_bias"):
            value = rng.uniform(0, 1, leaf.shape)
        else:
            scale = leaf.shape[-1] if name == "conv" else config.d_model
            scale *= 2 * config.layers if name in ("wo", "w_down", "w_out") else 1
            value = scale**-0.5 * rng.normal(size=leaf.shape)
        return (value + spread * rng.normal(size=leaf.shape)).astype(leaf.dtype)

    like = jax.eval_shape(partial(init_params, config=config), jax.random.key(0))
    return jax.tree_util.tree_map_with_path(draw, like)


def rms_norm(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


def rotate(x: np.ndarray, position: int, theta: float) -> np.ndarray:
    """[H] -> [H]: the pair (i, i + H/2) as a complex number, turned by position * theta^(-2i/H)."""
    half = len(x) // 2
    angle = position * theta ** (-2.0 * np.arange(half) / len(x))
    turned = (x[:half] + 1j * x[half:]) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag])


def logits(params: dict, tokens: np.ndarray, config: ModelConfig) -> np.ndarray:
    """[T] -> [T,V] for one trajectory; `params` as the package has them, here in float64."""
    f64 = lambda leaf: np.asarray(leaf, np.float64)  # noqa: E731
    x = f64(params["embed"])[tokens]
    per_group = config.heads // config.kv_heads
    for index in range(config.layers):
        layer = {name: f64(leaf)[index] for name, leaf in params["layers"].items()}
        h = rms_norm(x, layer["attn_norm"], config.norm_eps)
        q, k, v = (np.einsum("td,dnh->tnh", h, layer[f"w{x}"]) + layer.get(f"b{x}", 0) for x in "qkv")
        if config.qk_norm:
            q, k = rms_norm(q, layer["q_norm"], config.norm_eps), rms_norm(k, layer["k_norm"], config.norm_eps)
        for t in range(len(tokens)):
            q[t] = [rotate(head, t, config.rope_theta) for head in q[t]]
            k[t] = [rotate(head, t, config.rope_theta) for head in k[t]]
        context = attention(q, k, v, np.ones(len(tokens), int), per_group)
        x = x + np.einsum("tnh,nhd->td", context, layer["wo"])
        h = rms_norm(x, layer["mlp_norm"], config.norm_eps)
        gate = h @ layer["w_gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ layer["w_up"])) @ layer["w_down"]
    hidden = rms_norm(x, f64(params["final_norm"]), config.norm_eps)
    return hidden @ (f64(params["unembed"]) if "unembed" in params else f64(params["embed"]).T)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, segment_ids: np.ndarray, per_group: int, cap=0.0):
    """[T,N,H], [T,K,H], [T,K,H] -> [T,N,H], one query and one head at a time."""
    out = np.zeros_like(q)
    for t in range(q.shape[0]):
        allowed = [s for s in range(t + 1) if segment_ids[s] == segment_ids[t]]
        for n in range(q.shape[1]):
            scores = np.array([q[t, n] @ k[s, n // per_group] for s in allowed]) / np.sqrt(q.shape[2])
            scores = cap * np.tanh(scores / cap) if cap else scores
            weights = np.exp(scores - scores.max())
            out[t, n] = sum(w * v[s, n // per_group] for w, s in zip(weights / weights.sum(), allowed, strict=True))
    return out


def token_logprobs(all_logits: np.ndarray, tokens: np.ndarray, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """(log p(tokens[t] | before), entropy) of one trajectory; 0 at its first token."""
    logprobs, entropy = np.zeros(len(tokens)), np.zeros(len(tokens))
    for t in range(1, len(tokens)):
        z = all_logits[t - 1] / temperature
        log_p = z - z.max() - np.log(np.exp(z - z.max()).sum())
        logprobs[t], entropy[t] = log_p[tokens[t]], -(np.exp(log_p) * log_p).sum()
    return logprobs, entropy


def random_rows(lengths: list[int], vocab: int, seed: int = 0) -> list[TrainRow]:
    """Trajectories with a prompt, policy tokens and observations; weights normalised over all policy tokens."""
    rng = np.random.default_rng(seed)
    masks = [(rng.random(n) < 0.7) & (np.arange(n) > 1) for n in lengths]
    total = max(sum(mask.sum() for mask in masks), 1)
    return [
        TrainRow(
            tokens=rng.integers(0, vocab, n).astype(np.int32),
            policy_mask=mask,
            # Near log(1/V), so that some ratios clip and some do not under a fresh model.
            logprobs_old=(-np.log(vocab) + 0.3 * rng.normal(size=n)).astype(np.float32),
            advantages=np.full(n, rng.normal(), np.float32),
            weights=np.full(n, 1 / total, np.float32),
            ratio_segments=np.arange(n, dtype=np.int32),
            logprobs_ref=(-np.log(vocab) + 0.1 * rng.normal(size=n)).astype(np.float32),
        )
        for n, mask in zip(lengths, masks, strict=True)
    ]
