"""The update as one writes it by hand for one shape: what the composed one is held against.

Layers one after the other, rows and tokens as one axis of every product, all logits kept, query, key and value in one
matrix and gate and up in one, `optax.adamw` with clipping of the gradient norm. It knows rows of one length without
padding, one loss, and models like Llama's; it has no metrics, no mesh and no guard against numbers that are not finite.

    python benchmarks/plain_step.py     # one step of a small model here and there: loss, gradient norm, parameters
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from grpo_roc_jax.learner.update import OptimConfig
from grpo_roc_jax.method.surrogate import Clip
from grpo_roc_jax.model.config import ModelConfig

Weights = dict[str, Any]
Rows = dict[str, jax.Array]
"""`tokens`, `old`, `advantages`, `weights` [B,T]; a weight of 0 masks a token."""


def fused(params: Weights) -> Weights:
    """The weights of the plain step from those of `transformer.init_params`."""
    layers, count = params["layers"], len(params["layers"]["wq"])

    def flat(name: str, i: int) -> jax.Array:
        return layers[name][i].reshape(layers[name].shape[1], -1)

    def layer(i: int) -> Weights:
        return {
            "attn_norm": layers["attn_norm"][i],
            "mlp_norm": layers["mlp_norm"][i],
            "qkv": jnp.concatenate([flat(name, i) for name in ("wq", "wk", "wv")], 1),
            "out": layers["wo"][i].reshape(-1, layers["wo"].shape[-1]),
            "gate_up": jnp.concatenate([flat(name, i) for name in ("w_gate", "w_up")], 1),
            "down": layers["w_down"][i],
        }

    outer = {name: jnp.copy(params[name]) for name in ("embed", "final_norm")}  # the step donates its state
    return outer | {"layers": [layer(i) for i in range(count)]}


@jax.custom_vjp
def token_logprobs(hidden: jax.Array, table: jax.Array, targets: jax.Array) -> jax.Array:
    """log softmax(hidden table^T)[target], [N] from [N,D], [V,D], [N]."""
    return _token_logprobs_fwd(hidden, table, targets)[0]


def _token_logprobs_fwd(hidden: jax.Array, table: jax.Array, targets: jax.Array) -> tuple:
    z = hidden @ table.T
    top = z.max(-1, keepdims=True)
    total = jnp.exp(z - top).sum(-1, keepdims=True)
    logprobs = (jnp.take_along_axis(z, targets[:, None], 1) - top - jnp.log(total))[:, 0]
    return logprobs, (hidden, table, targets, z, top, total)


def _token_logprobs_bwd(saved: tuple, g: jax.Array) -> tuple:
    hidden, table, targets, z, top, total = saved
    dz = (-jnp.exp(z - top) * (g[:, None] / total)).at[jnp.arange(len(targets)), targets].add(g)
    return dz @ table, dz.T @ hidden, None


token_logprobs.defvjp(_token_logprobs_fwd, _token_logprobs_bwd)


def make_loss(model: ModelConfig, shape: tuple[int, int], clip: Clip) -> Callable[[Weights, Rows], jax.Array]:
    """The loss of rows of that shape [B,T]."""
    B, T = shape
    N, K, H = model.heads, model.kv_heads, model.head_dim
    angles = np.arange(T)[:, None] * model.rope_theta ** (-np.arange(0, H, 2) / H)
    cos, sin = (jnp.asarray(f(angles), jnp.float32)[None, :, None] for f in (np.cos, np.sin))
    mask = jnp.tril(jnp.ones((T, T), bool))

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + model.norm_eps) * scale

    def rotated(x: jax.Array) -> jax.Array:
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def block(x: jax.Array, p: Weights) -> jax.Array:
        heads = (norm(x, p["attn_norm"]) @ p["qkv"]).reshape(B, T, N + 2 * K, H)
        q, k, v = jnp.split(heads, [N, N + K], 2)
        q, k = rotated(q).reshape(B, T, K, N // K, H), rotated(k)
        scores = jnp.where(mask, jnp.einsum("btkgh,bskh->bkgts", q, k) * H**-0.5, -1e30)
        context = jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(scores, -1), v).reshape(B * T, N * H)
        x = x + context @ p["out"]
        gate, up = jnp.split(norm(x, p["mlp_norm"]) @ p["gate_up"], 2, -1)
        return x + (jax.nn.silu(gate) * up) @ p["down"]

    def loss(params: Weights, rows: Rows) -> jax.Array:
        x = params["embed"][rows["tokens"]].reshape(B * T, -1)
        for layer in params["layers"]:
            x = block(x, layer)
        targets = jnp.roll(rows["tokens"], -1, 1).reshape(-1)
        logprobs = token_logprobs(norm(x, params["final_norm"]), params["embed"], targets).reshape(B, T)
        ratio = jnp.exp(jnp.roll(logprobs, 1, 1) - rows["old"])  # the first of a row is masked
        clipped = jnp.clip(ratio, 1 - clip.clip_low, 1 + clip.clip_high)
        return -jnp.sum(rows["weights"] * jnp.minimum(ratio * rows["advantages"], clipped * rows["advantages"]))

    return loss


def make_plain_step(
    model: ModelConfig, shape: tuple[int, int], optim: OptimConfig, clip: Clip
) -> tuple[Callable[[Weights], tuple], Callable]:
    """(weights -> state, jitted (state, rows) -> (state, (loss, gradient norm)) with the state donated)."""
    decayed = ("qkv", "out", "gate_up", "down", "embed")
    adamw = optax.adamw(
        optim.lr,
        optim.beta1,
        optim.beta2,
        optim.eps,
        weight_decay=optim.weight_decay,
        mask=lambda params: jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in decayed, params),
    )
    optimizer = optax.chain(optax.clip_by_global_norm(optim.max_grad_norm), adamw)
    loss = make_loss(model, shape, clip)

    def step(state: tuple, rows: Rows) -> tuple:
        params, moments = state
        value, grads = jax.value_and_grad(loss)(params, rows)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), (value, optax.tree.norm(grads))

    return lambda params: (params, jax.jit(optimizer.init)(params)), jax.jit(step, donate_argnums=0)


def check() -> None:
    """Two steps of a small model by both; raises AssertionError where they differ by more than rounding."""
    from bench_update import rows_of

    from grpo_roc_jax.learner.loss import UpdateConfig
    from grpo_roc_jax.learner.pack import BatchConfig, pack
    from grpo_roc_jax.learner.update import init_train_state, make_update_step
    from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh, shard_batch

    model = ModelConfig(d_model=64, layers=3, heads=6, kv_heads=2, head_dim=16, d_ff=96, vocab_size=512)
    length, count, mesh = 40, 4, make_mesh(ShardingConfig(), jax.devices()[:1])
    optim, clip, rows = OptimConfig(lr=1e-3, warmup_steps=0, eps=1e-4), Clip(), rows_of(np.full(count, length), 512)
    batch = shard_batch(pack(rows, BatchConfig(row_length=length, rows=count), 1)[0], mesh)
    state = init_train_state(jax.random.key(0), model, optim, mesh)
    start, step = make_plain_step(model, (count, length), optim, clip)
    plain = start(fused(state.params))
    composed = make_update_step(model, clip, optim, UpdateConfig(), mesh)
    for _ in range(2):
        state, metrics = composed(state, batch)
        plain, (value, norm) = step(plain, plain_rows(rows))
        np.testing.assert_allclose(metrics["loss/value"], value, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(metrics["update/grad_norm"], norm, rtol=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), fused(state.params), plain[0])
    print(f"loss {float(value):.6f}, gradient norm {float(norm):.6f}; parameters equal to rounding after two steps")


def plain_rows(rows: list) -> Rows:
    """Rows of the update, all of one length, as the plain step takes them."""
    arrays = {
        "tokens": [row.tokens for row in rows],
        "old": [row.logprobs_old for row in rows],
        "advantages": [row.advantages for row in rows],
        "weights": [np.where(row.policy_mask, row.weights, 0.0).astype(np.float32) for row in rows],
    }
    return {name: jnp.asarray(np.stack(parts)) for name, parts in arrays.items()}


if __name__ == "__main__":
    check()
