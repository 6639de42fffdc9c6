"""The device side of the engine: `append` and `decode_chunk`, pure functions of the weights, the cache and the slots.

A slot's cache holds the tokens [0, position) of its row; the token at `position`, drawn or appended last, is pending:
it is the next decode input and not in the cache. So a prompt or observation is written without a language-model head,
and every sampled token's log-probability comes from one place. Rolling a row back is setting its position.

Nothing here depends on turns, on budgets left or on how many rows are live: idle rows compute and write garbage at
their position, which is replaced when they are used again.
"""

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.experts import mix_experts
from grpo_roc_jax.model.kv_cache import PAGED, CacheWriter, KVCache
from grpo_roc_jax.model.rotary import layer_ropes
from grpo_roc_jax.model.transformer import Params, block, embed, final_hidden, sums_of, unembed
from grpo_roc_jax.rollout.config import SamplingConfig
from grpo_roc_jax.rollout.sampling import sample, trajectory_keys, uniforms
from grpo_roc_jax.shapes import Array, Int

PATCH_FIELDS = ("touched", "position", "token", "active", "limit", "seed", "step", "problem", "sample", "temperature")
"""Rows of a patch, int32[10,B]; `temperature` holds the bits of a float32."""


@flax.struct.dataclass
class Slots:
    """State of the rows on the device, every leaf leading with B."""

    position: Array
    """int32: tokens in the cache."""
    token: Array
    """int32: the pending token."""
    active: Array
    """bool: decodes in the next step."""
    limit: Array
    """int32: total length at which the row stops."""
    key: Array
    """uint32[B,2]: the trajectory's random key."""
    temperature: Array
    """float32."""


@flax.struct.dataclass
class Report:
    """What the host reads after a chunk of K steps; column b speaks of slot b."""

    tokens: Array
    """int32[K,B]."""
    logprobs: Array
    """float32[K,B]."""
    mass: Array
    """float32[K,B], surviving mass under truncated sampling; [0,B] without."""
    count: Array
    """int32[B]: tokens drawn, the first `count` entries of the column."""
    steps: Array
    """int32[shards]: decode steps run; fewer than K when no row is left active."""


def init_slots(slots: int) -> Slots:
    """All rows idle."""
    zeros = jnp.zeros(slots, jnp.int32)
    return Slots(
        position=zeros,
        token=zeros,
        active=jnp.zeros(slots, bool),
        limit=zeros,
        key=jnp.zeros((slots, 2), jnp.uint32),
        temperature=jnp.ones(slots, jnp.float32),
    )


def empty_patch(slots: int) -> np.ndarray:
    """A patch that changes nothing."""
    return np.zeros((len(PATCH_FIELDS), slots), np.int32)


def apply_patch(slots: Slots, patch: Int[Array, "10 B"]) -> Slots:
    """The slots with the host's changes: touched rows take every field of the patch."""
    row = dict(zip(PATCH_FIELDS, patch, strict=True))
    touched = row["touched"] > 0
    path = jnp.stack([row["step"], row["problem"], row["sample"]])
    keys = jax.lax.cond(
        jnp.any(touched),
        lambda: jnp.where(touched[:, None], trajectory_keys(row["seed"], path), slots.key),
        lambda: slots.key,
    )
    take = lambda new, old: jnp.where(touched, new, old)  # noqa: E731
    return Slots(
        position=take(row["position"], slots.position),
        token=take(row["token"], slots.token),
        active=take(row["active"] > 0, slots.active),
        limit=take(row["limit"], slots.limit),
        key=keys,
        temperature=take(jax.lax.bitcast_convert_type(row["temperature"], jnp.float32), slots.temperature),
    )


def append(
    params: Params,
    cache: KVCache,
    tokens: Int[Array, "n T"],
    where: Int[Array, "3 n"],
    config: ModelConfig,
    *,
    fresh: bool,
    scatter: bool,
    experts: Callable[..., Array] = mix_experts,
    mesh: Mesh | None = None,
) -> KVCache:
    """The cache with tokens of n rows written behind what the rows hold; no head, nothing drawn.

    Args:
        params: As published for sampling: one dict per layer.
        cache: Donated by the caller.
        tokens: Right-padded.
        where: Slot, first column and number of real tokens of each row; a slot beyond the last is dropped.
        config: Static.
        fresh: All rows start at column 0.
        scatter: See `CacheWriter.attend_span`.
        experts: See `transformer.forward`.
        mesh: See `CacheWriter`.
    """
    rows, start, length = where
    positions = start[:, None] + jnp.arange(tokens.shape[1])[None]
    writer = CacheWriter(cache, config.layer_windows, mesh, sums=sums_of(config))
    attends = [writer.attend_span(i, rows, start, length, fresh=fresh, scatter=scatter) for i in range(config.layers)]
    run_layers(params, tokens, positions, attends, config, experts)
    return writer.cache()


def run_layers(
    params: Params,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    attends: list[Callable],
    config: ModelConfig,
    experts: Callable[..., Array] = mix_experts,
) -> Array:
    """The residual stream behind the last layer; layers unrolled, since scanning over a cache copies it."""
    ropes = layer_ropes(positions, config)
    x = embed(params, tokens, config)
    for layer, rope, attend in zip(params["layers"], ropes, attends, strict=True):
        x = block(layer, x, rope, attend, config, experts)
    return x


def decode_chunk(
    params: Params,
    cache: KVCache,
    slots: Slots,
    patch: Int[Array, "10 B"],
    config: ModelConfig,
    sampling: SamplingConfig,
    *,
    stop_ids: tuple[int, ...],
    chunk: int,
    rows: int,
    vocab_size: int | None,
    experts: Callable[..., Array] = mix_experts,
    mesh: Mesh | None = None,
) -> tuple[KVCache, Slots, Report]:
    """Applies the host's changes, then draws up to `chunk` tokens per active row.

    A row stops being active with a stop id or at its limit; the loop ends early when no row is active. With fewer
    `rows` than slots the active ones are gathered first and put back at the end, one copy of each for `chunk` steps
    that cost what they need; their cache stays in its place where the kernel reads it by pages.

    Args:
        params: As published for sampling.
        cache: Donated by the caller.
        slots: Donated by the caller.
        patch: See `PATCH_FIELDS`.
        config: Static.
        sampling: Static.
        stop_ids: Ids that end a turn; static.
        chunk: Steps at most; static.
        rows: Rows to compute, at least as many as are active; static.
        vocab_size: Ids from here on are never drawn; static.
        experts: See `transformer.forward`.
        mesh: See `CacheWriter`.
    """
    slots = apply_patch(slots, patch)
    static = {"stop_ids": stop_ids, "chunk": chunk, "vocab_size": vocab_size, "experts": experts, "mesh": mesh}
    B = slots.token.shape[0]
    if rows >= B:
        return _draw_chunk(params, cache, slots, config, sampling, **static)
    at = jnp.nonzero(slots.active, size=rows, fill_value=B)[0]
    at = at + jnp.where(at < B, 0, jnp.arange(rows))  # all different, those that are none beyond the last
    take = lambda leaf: jnp.take(leaf, at, axis=0, mode="clip")  # noqa: E731
    part = jax.tree.map(take, slots)
    part = part.replace(active=part.active & (at < B))  # the others are copies of the last row and draw nothing
    put = lambda leaf, new: leaf.at[at].set(new, mode="drop")  # noqa: E731
    if cache.orders == PAGED:
        cache, part, drawn = _draw_chunk(params, cache, part, config, sampling, **static, at=at)
    else:
        few, part, drawn = _draw_chunk(params, jax.tree.map(take, cache), part, config, sampling, **static)
        cache = jax.tree.map(put, cache, few)
    spread = lambda new: jnp.zeros((*new.shape[:-1], B), new.dtype).at[..., at].set(new, mode="drop")  # noqa: E731
    report = Report(*map(spread, (drawn.tokens, drawn.logprobs, drawn.mass, drawn.count)), steps=drawn.steps)
    return cache, jax.tree.map(put, slots, part), report


def _draw_chunk(
    params: Params,
    cache: KVCache,
    slots: Slots,
    config: ModelConfig,
    sampling: SamplingConfig,
    *,
    stop_ids: tuple[int, ...],
    chunk: int,
    vocab_size: int | None,
    experts: Callable[..., Array],
    mesh: Mesh | None,
    at: Int[Array, " B"] | None = None,
) -> tuple[KVCache, Slots, Report]:
    """The loop of `decode_chunk` over these slots; their rows of the cache are `at`, by default all in order."""
    B = slots.token.shape[0]
    kept, sums = chunk if sampling.truncated else 0, sums_of(config)
    report = Report(
        tokens=jnp.zeros((chunk, B), jnp.int32),
        logprobs=jnp.zeros((chunk, B), jnp.float32),
        mass=jnp.zeros((kept, B), jnp.float32),
        count=jnp.zeros(B, jnp.int32),
        steps=jnp.zeros(1, jnp.int32),
    )

    def unfinished(state: tuple[KVCache, Slots, Report]) -> Array:
        _, slots, report = state
        return (report.steps[0] < chunk) & jnp.any(slots.active)

    def step(state: tuple[KVCache, Slots, Report]) -> tuple[KVCache, Slots, Report]:
        cache, slots, report = state
        writer = CacheWriter(cache, config.layer_windows, mesh, sums=sums)
        seen = jnp.where(slots.active, slots.position + 1, 1)
        attends = [writer.attend_token(i, slots.position, seen, at) for i in range(config.layers)]
        x = run_layers(params, slots.token[:, None], slots.position[:, None], attends, config, experts)
        logits = unembed(params, final_hidden(params, x, config), sums)[:, 0]
        drawn_at = slots.position + 1
        draw = sample(logits, uniforms(slots.key, drawn_at), slots.temperature, sampling, vocab_size, sums)
        stopped = (drawn_at + 1 >= slots.limit) | _is_any(draw.token, stop_ids)
        now = report.steps[0]
        put = lambda leaf, row: jax.lax.dynamic_update_slice(leaf, row[None], (now, 0))  # noqa: E731
        report = report.replace(
            tokens=put(report.tokens, draw.token),
            logprobs=put(report.logprobs, draw.logprob),
            mass=put(report.mass, draw.mass) if kept else report.mass,
            count=report.count + slots.active,
            steps=report.steps + 1,
        )
        slots = slots.replace(
            position=jnp.where(slots.active, drawn_at, slots.position),
            token=jnp.where(slots.active, draw.token, slots.token),
            active=slots.active & ~stopped,
        )
        return writer.cache(), slots, report

    return jax.lax.while_loop(unfinished, step, (cache, slots, report))


def _is_any(token: Int[Array, " B"], ids: tuple[int, ...]) -> Array:
    found = jnp.zeros(token.shape, bool)
    for stop in ids:
        found |= token == stop
    return found
