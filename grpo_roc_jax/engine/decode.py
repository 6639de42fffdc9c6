"""The device side of the engine: pure functions of the weights, the pool and the slots.

The blocks of a slot hold the tokens [0, position) of its row. The token at `position`, drawn or appended last, is
pending: it is the next decode input and not yet in the cache. A prompt or observation is therefore written without the
unembedding, and the log-probabilities of all sampled tokens come from one place. To roll a row back, set its position;
the memory of recurrent layers cannot be rolled back, so such a row is written again from its first token.

Nothing here depends on turns, remaining budgets or the number of live rows. Idle rows compute too, but write nothing.

`sample` takes logits to a token, its log-probability and the mass that could be drawn, with random numbers addressed by
trajectory and position. One pass of exponentials serves the draw, the log-sum-exp and all truncation: greedy, top-k,
top-p and min-p are each a threshold on exp(logit - max), and so they are where each row has its own
(`engine.steering`). The draw inverts the CDF in two levels: a block of the
vocabulary, then a token in it. Nothing is sorted, and no Gumbel noise is drawn over the vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from grpo_roc_jax.engine.config import SamplingConfig
from grpo_roc_jax.engine.steering import Steering, steer
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.experts import mix_experts, recorded
from grpo_roc_jax.model.pool import (
    BlockPool,
    PoolWriter,
    Spans,
    Tiles,
    readers_of,
    tile_places,
    token_places,
)
from grpo_roc_jax.model.rotary import layer_ropes
from grpo_roc_jax.model.transformer import (
    Params,
    block,
    embed,
    final_hidden,
    layer_inputs,
    layers_with,
    unembed,
)
from grpo_roc_jax.shapes import Array, Float, Int, checked

BLOCK = 128
"""Tokens in a block of the inverse CDF; the resolution within a block is that of float32 for any vocabulary size."""

_TOP_BITS = 0x3F800000
"""Bit pattern of 1.0f. Non-negative floats sort like their bits, so bisection over the bits is exact in 30 steps."""


class Draw(NamedTuple):
    """One token per row."""

    token: Array
    """int32[B]."""
    logprob: Array
    """float32[B]: under the full softmax at the row's temperature (at 1 for greedy rows)."""
    mass: Array
    """float32[B]: total probability of the tokens that could be drawn; 1 without truncation."""


def trajectory_keys(seed: Int[Array, " B"], path: Int[Array, "3 B"]) -> Array:
    """uint32[B,2]: one key per trajectory from the seed and (step, problem, sample).

    The key does not depend on slot, batch, admission order or device, so neither does the trajectory.
    """

    def derive(seed: Array, step: Array, problem: Array, sample: Array) -> Array:
        key = jax.random.key(0, impl="threefry2x32")
        for part in (seed, step, problem, sample):
            key = jax.random.fold_in(key, part)
        return jax.random.key_data(key)

    return jax.vmap(derive)(seed, path[0], path[1], path[2])


def uniforms(keys: Array, positions: Int[Array, " B"]) -> Float[Array, "B 2"]:
    """Two uniforms in [0, 1) of 24 bits for the token at each position of its trajectory."""

    def draw(key: Array, position: Array) -> Array:
        folded = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), position)
        return jax.random.bits(folded, (2,), jnp.uint32)

    return (jax.vmap(draw)(keys, positions) >> 8).astype(jnp.float32) * 2.0**-24


@checked
def sample(
    logits: Float[Array, "B V"],
    uniform: Float[Array, "B 2"],
    temperature: Float[Array, " B"],
    config: SamplingConfig,
    vocab_size: int | None = None,
    steering: Steering | None = None,
) -> Draw:
    """Draws one token per row.

    With e = exp(logit / temperature - max) the log-probability is log(e / sum e) over the whole vocabulary. Tokens
    whose e is at least the row's threshold are drawn with weight e.

    Args:
        logits: Float32.
        uniform: Two numbers in [0, 1) per row: the block, then the token within it.
        temperature: The temperature of each row; 0 is greedy, with ties to the lowest id.
        config: Truncation; static.
        vocab_size: Ids from here on pad the embedding and are never drawn; None draws all.
        steering: What each row asks for, in place of `config`. The log-probability is that of the logits as given.
    """
    V = logits.shape[1]
    greedy = temperature <= 0
    heat = jnp.where(greedy, 1.0, temperature)[:, None]
    scaled = logits / heat
    e, top = _exponentials(scaled)
    total = jnp.sum(e, axis=(1, 2))
    shift, normalizer = top, jnp.log(total)
    if steering is not None:
        e, _ = _exponentials(steer(logits, steering) / heat)
        total = jnp.sum(e, axis=(1, 2))
    drawable = e
    if vocab_size is not None and vocab_size < V:
        drawable = jnp.where(jnp.arange(e.shape[1] * BLOCK).reshape(1, -1, BLOCK) < vocab_size, e, 0.0)
    if steering is not None:
        threshold = _row_threshold(drawable, steering.limits)
    else:
        threshold = _threshold(drawable, config) if config.truncated else jnp.zeros_like(total)
    highest = jnp.max(drawable, axis=(1, 2)) if drawable is not e else jnp.ones_like(total)
    threshold = jnp.where(greedy, highest, threshold)
    weight = jnp.where(drawable >= threshold[:, None, None], drawable, 0.0)
    uniform = jnp.where(greedy[:, None], 0.0, uniform)
    block_weight = jnp.sum(weight, axis=2)
    block = _inverse_cdf(block_weight, uniform[:, 0])
    inside = jnp.take_along_axis(weight, block[:, None, None], axis=1)[:, 0]
    token = block * BLOCK + _inverse_cdf(inside, uniform[:, 1])
    chosen = jnp.take_along_axis(scaled, token[:, None], axis=1)[:, 0]
    mass = jnp.where(greedy, 1.0, jnp.sum(block_weight, axis=1) / total)
    return Draw(token.astype(jnp.int32), chosen - shift - normalizer, mass)


def _exponentials(scaled: Float[Array, "B V"]) -> tuple[Float[Array, "B V/128 128"], Float[Array, " B"]]:
    """(exp(logit - max) in blocks, 0 after the end of the vocabulary; the maximum)."""
    B, V = scaled.shape
    top = jnp.max(scaled, axis=1)
    padded = jnp.pad(scaled, ((0, 0), (0, -V % BLOCK)), constant_values=-jnp.inf)
    return jnp.exp(padded - top[:, None]).reshape(B, -1, BLOCK), top


def _inverse_cdf(weight: Float[Array, "B X"], uniform: Float[Array, " B"]) -> Int[Array, " B"]:
    """The first index whose cumulative weight exceeds uniform times the total; never one of weight 0."""
    cumulative = jnp.cumsum(weight, axis=1)
    index = jnp.sum(cumulative <= (uniform * cumulative[:, -1])[:, None], axis=1)
    # Rounding can make the target equal the total; take the last token of positive weight then.
    last = weight.shape[1] - 1 - jnp.argmax(weight[:, ::-1] > 0, axis=1)
    return jnp.minimum(index, last)


def _threshold(e: Float[Array, "B X Y"], config: SamplingConfig) -> Float[Array, " B"]:
    """The largest threshold on e that keeps at least top-k tokens and, of those, the top-p mass; at least min-p."""
    B = e.shape[0]
    threshold = jnp.zeros(B, jnp.float32)
    if config.top_k:
        target = jnp.full(B, float(config.top_k))
        threshold = largest_threshold(lambda t: jnp.sum(e >= t[:, None, None], axis=(1, 2), dtype=jnp.float32), target)
    if config.top_p < 1.0:
        likely = jnp.where(e >= threshold[:, None, None], e, 0.0)
        target = config.top_p * jnp.sum(likely, axis=(1, 2))
        by_mass = largest_threshold(
            lambda t: jnp.sum(jnp.where(likely >= t[:, None, None], likely, 0.0), axis=(1, 2)), target
        )
        threshold = jnp.maximum(threshold, by_mass)
    if config.min_p > 0.0:
        threshold = jnp.maximum(threshold, config.min_p * jnp.max(e, axis=(1, 2)))
    return threshold


def _row_threshold(e: Float[Array, "B X Y"], limits: Float[Array, "B 3"]) -> Float[Array, " B"]:
    """`_threshold` with top-k, top-p and min-p of each row; what no row asks for is not computed."""
    top_k, top_p, min_p = limits.T
    zeros = jnp.zeros(e.shape[0], jnp.float32)

    def by_count() -> Array:
        count = largest_threshold(lambda t: jnp.sum(e >= t[:, None, None], axis=(1, 2), dtype=jnp.float32), top_k)
        return jnp.where(top_k > 0, count, 0.0)

    def by_mass(threshold: Array) -> Array:
        likely = jnp.where(e >= threshold[:, None, None], e, 0.0)
        target = top_p * jnp.sum(likely, axis=(1, 2))
        mass = largest_threshold(
            lambda t: jnp.sum(jnp.where(likely >= t[:, None, None], likely, 0.0), axis=(1, 2)), target
        )
        return jnp.where(top_p < 1, jnp.maximum(threshold, mass), threshold)

    threshold = jax.lax.cond(jnp.any(top_k > 0), by_count, lambda: zeros)
    threshold = jax.lax.cond(jnp.any(top_p < 1), by_mass, lambda threshold: threshold, threshold)
    return jnp.maximum(threshold, min_p * jnp.max(e, axis=(1, 2)))


def largest_threshold(measure: Callable[[Array], Array], target: Float[Array, " B"]) -> Float[Array, " B"]:
    """The largest t in [0, 1] with measure(t) >= target; `measure` decreases with t and suffices at t = 0."""

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low + 1) // 2
        enough = measure(jax.lax.bitcast_convert_type(middle, jnp.float32)) >= target
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

    start = (jnp.zeros(target.shape, jnp.int32), jnp.full(target.shape, _TOP_BITS, jnp.int32))
    low, _ = jax.lax.fori_loop(0, 31, halve, start)
    return jax.lax.bitcast_convert_type(low, jnp.float32)


ID_BITS = 20
ID_MASK = (1 << ID_BITS) - 1
"""With several adapters in one batch the ids of a row carry the number of its adapter above these bits, 0 for none. So
the cache never takes tokens of one adapter for those of another."""
MOST_ADAPTERS = (1 << (31 - ID_BITS)) - 1


def split_adapters(params: Params, tokens: Int[Array, "B T"]) -> tuple[Array, Params]:
    """(ids without the numbers of adapters, what every layer gets in addition).

    `params["adapters"]` is int32[n R]: which of n adapters each column of the low-rank pairs belongs to, R in a row.
    Adapter i has the numbers i + 1, i + 1 + n, i + 1 + 2 n and so on. Without that leaf nothing is split.
    """
    if "adapters" not in params:
        return tokens, {}
    columns, number = params["adapters"], tokens >> ID_BITS
    index = jnp.where(number > 0, (number - 1) % (columns[-1] + 1), -1)
    return tokens & ID_MASK, {"lora_mask": index[..., None] == columns[None, None]}


PATCH_FIELDS = ("touched", "position", "token", "active", "limit", "seed", "step", "problem", "sample", "temperature")
"""Rows of a patch, int32[10,B], with the host's changes to the slots; `temperature` holds the bits of a float32."""


@flax.struct.dataclass
class Slots:
    """State of the slots on the device; B is the leading axis of every leaf."""

    position: Array
    """int32: number of tokens in the cache."""
    token: Array
    """int32: the pending token."""
    active: Array
    """bool: whether the row decodes in the next step."""
    limit: Array
    """int32: total length at which the row stops."""
    key: Array
    """uint32[B,2]: the trajectory's random key."""
    temperature: Array
    """float32."""


@flax.struct.dataclass
class ChunkReport:
    """What the host reads after a chunk of K steps; column b belongs to slot b."""

    tokens: Array
    """int32[K,B]."""
    logprobs: Array
    """float32[K,B]."""
    mass: Array
    """float32[K,B]: surviving mass with truncated sampling; [0,B] without."""
    count: Array
    """int32[B]: number of tokens drawn, which are the first entries of the column."""
    steps: Array
    """int32[shards]: decode steps run; fewer than K if no active row was left."""
    routes: Array | None = None
    """int16[K,L,X,B]: experts of the token before each drawn one, with `model.experts.replay`."""
    top: tuple[Array, Array] | None = None
    """(int32[K,N,B], float32[K,N,B]): the N most likely tokens at each drawn one and their log-probabilities, where
    `Steering.places` asks for them."""


@dataclass(frozen=True)
class SamplerModel:
    """The model as the sampler runs it; static."""

    config: ModelConfig
    experts: Callable[..., Array] = mix_experts
    """See `transformer.Execution`."""
    mesh: Mesh | None = None
    """See `PoolWriter`."""
    outputs_first: bool = False
    """See `transformer.unembed`."""


@dataclass(frozen=True)
class ChunkSettings:
    """What a decode chunk draws; static."""

    sampling: SamplingConfig
    chunk: int
    """Most steps of a chunk."""
    stop_ids: tuple[int, ...] = ()
    """Ids that end a turn."""
    vocab_size: int | None = None
    """Ids from here on are never drawn; None draws all."""
    rows: int = 0
    """Rows to compute, at least as many as are active; 0 for all."""


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
    """The slots after the host's changes: touched rows take every field of the patch."""
    row = dict(zip(PATCH_FIELDS, patch, strict=True))
    touched = row["touched"] > 0
    path = jnp.stack([row["step"], row["problem"], row["sample"]])
    keys = jax.lax.cond(
        jnp.any(touched),
        lambda: jnp.where(touched[:, None], trajectory_keys(row["seed"], path), slots.key),
        lambda: slots.key,
    )

    def take(new: Array, old: Array) -> Array:
        return jnp.where(touched, new, old)

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
    pool: BlockPool,
    tokens: Int[Array, "n T"],
    table: Int[Array, "n W"],
    where: Int[Array, "3 n"],
    model: SamplerModel,
) -> BlockPool:
    """The pool with tokens appended to n rows; no logits are computed and nothing is drawn.

    Args:
        params: As published for sampling: one dict per layer.
        pool: Donated by the caller.
        tokens: Right-padded.
        table: Blocks of each row.
        where: Slot, first column and number of tokens (without padding) of each row; slots beyond the last are dropped.
        model: Static.
    """
    return _append(params, pool, *spans_of(pool, tokens, table, where), model)


def append_packed(
    params: Params,
    pool: BlockPool,
    tokens: Int[Array, "3 N"],
    table: Int[Array, "J W"],
    tiles: Int[Array, "2 J"],
    model: SamplerModel,
) -> BlockPool:
    """The pool with tokens of several rows appended, which lie side by side without padding between them. Rows are
    cut into tiles (`pool.Tiles`), so that only attention computes padding. For models without recurrent layers.

    Args:
        params: As published for sampling.
        pool: Donated by the caller.
        tokens: Id, column in its row, and place of each token; places beyond the last of the tiles are padding.
        table: Blocks of the row of each tile.
        tiles: The first token of each tile, and how many it has.
        model: Static.
    """
    return _append(params, pool, *tiles_of(pool, tokens, table, tiles), model)


def spans_of(
    pool: BlockPool, tokens: Int[Array, "n T"], table: Int[Array, "n W"], where: Int[Array, "3 n"]
) -> tuple[Array, Array, Spans]:
    """(ids, positions, where they go) of the arguments of `append`."""
    rows, start, length = where
    return tokens, start[:, None] + jnp.arange(tokens.shape[1])[None], Spans(table, rows, start, length)


def tiles_of(
    pool: BlockPool, tokens: Int[Array, "3 N"], table: Int[Array, "J W"], tiles: Int[Array, "2 J"]
) -> tuple[Array, Array, Tiles]:
    """(ids, positions, where they go) of the arguments of `append_packed`."""
    ids, columns, places = tokens
    return ids[None], columns[None], tile_places(pool, columns, places, table, tiles)


def _append(
    params: Params, pool: BlockPool, ids: Array, positions: Array, at: Spans | Tiles, model: SamplerModel
) -> BlockPool:
    writer = PoolWriter(pool, model.config, model.mesh)
    attends = [writer.attend(i, at) for i in range(model.config.layers)]
    run_layers(params, ids, positions, attends, model.config, model.experts)
    return writer.pool()


def run_layers(
    params: Params,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    attends: list[Callable],
    config: ModelConfig,
    experts: Callable[..., Array] = mix_experts,
) -> Array:
    """The residual stream after the last layer. The layers are unrolled, since a scan over a cache copies it."""
    ropes = layer_ropes(positions, config)
    ids, beside = split_adapters(params, tokens)
    x = embed(params, ids, config)
    given = given_to_layers(params, ids, x, config)
    for layer, rope, attend, inputs in zip(params["layers"], ropes, attends, given, strict=True):
        x = block(layer | beside | inputs, x, rope, attend, config, experts)
    return x


def given_to_layers(params: Params, ids: Int[Array, "B T"], x: Array, config: ModelConfig) -> tuple[Params, ...]:
    """What each layer gets of the second embedding, see `transformer.layer_inputs`; nothing where there is none."""
    given = layer_inputs(params, ids, x, config)
    return tuple({} if given is None else {"input": given[i]} for i in range(config.layers))


def decode_chunk(
    params: Params,
    pool: BlockPool,
    slots: Slots,
    patch: Int[Array, "10 B"],
    table: Int[Array, "B W"],
    model: SamplerModel,
    settings: ChunkSettings,
    steering: Steering | None = None,
) -> tuple[BlockPool, Slots, ChunkReport]:
    """Applies the host's changes, then draws up to `settings.chunk` tokens per active row.

    A row becomes inactive with a stop id or at its limit; the loop ends early if no row is active. With fewer
    `settings.rows` than slots the steps compute the active rows only; the pool stays in place.

    Args:
        params: As published for sampling.
        pool: Donated by the caller.
        slots: Donated by the caller.
        patch: See `PATCH_FIELDS`.
        table: Blocks of each row, with room for the tokens of the chunk.
        model: Static.
        settings: Static.
        steering: What rows ask for, if any does.
    """
    slots = apply_patch(slots, patch)
    if not 0 < settings.rows < slots.token.shape[0]:
        return draw_chunk(params, pool, slots, table, model, settings, steering)
    at, part, few_table = narrow(slots, table, settings.rows)
    few = pool.map_memory(partial(take_rows, at))
    steering = narrow_steering(steering, at)
    few, part, report = draw_chunk(params, few, part, few_table, model, settings, steering)
    pool = few.map_memory(lambda new, leaf: leaf.at[at].set(new, mode="drop"), pool)
    return pool, *widen(slots, part, report, at)


def take_rows(at: Int[Array, " n"], leaf: Array) -> Array:
    """The rows of an array with these numbers; the last row for numbers beyond it."""
    return jnp.take(leaf, at, axis=0, mode="clip")


def narrow(slots: Slots, table: Int[Array, "B W"], rows: int) -> tuple[Int[Array, " n"], Slots, Int[Array, "n W"]]:
    """(numbers, state, blocks) of so many slots, the active ones among them. Numbers of unused rows lie beyond the
    last slot, all different; these rows are copies of the last slot and draw nothing."""
    B = slots.token.shape[0]
    at = jnp.nonzero(slots.active, size=rows, fill_value=B)[0]
    at = at + jnp.where(at < B, 0, jnp.arange(rows))
    part = jax.tree.map(partial(take_rows, at), slots)
    return at, part.replace(active=part.active & (at < B)), take_rows(at, table)


def narrow_steering(steering: Steering | None, at: Int[Array, " n"]) -> Steering | None:
    """What the rows that `narrow` took ask for."""
    if steering is None:
        return None
    return Steering(*(take_rows(at, leaf) for leaf in steering.per_row), steps=steering.steps)


def decode_steered(
    params: Params,
    pool: BlockPool,
    slots: Slots,
    patch: Int[Array, "10 B"],
    table: Int[Array, "B W"],
    *steering: Array,
    model: SamplerModel,
    settings: ChunkSettings,
) -> tuple[BlockPool, Slots, ChunkReport]:
    """`decode_chunk` with the fields of `Steering`."""
    return decode_chunk(params, pool, slots, patch, table, model, settings, Steering(*steering))


def widen(slots: Slots, part: Slots, report: ChunkReport, at: Int[Array, " n"]) -> tuple[Slots, ChunkReport]:
    """The slots with the state of those that `narrow` took, and their report with the other columns empty."""
    B = slots.token.shape[0]

    def put_columns(new: Array) -> Array:
        return jnp.zeros((*new.shape[:-1], B), new.dtype).at[..., at].set(new, mode="drop")

    columns = (report.tokens, report.logprobs, report.mass, report.count)
    routes, top = jax.tree.map(put_columns, (report.routes, report.top))
    slots = jax.tree.map(lambda leaf, new: leaf.at[at].set(new, mode="drop"), slots, part)
    return slots, ChunkReport(*map(put_columns, columns), steps=report.steps, routes=routes, top=top)


def empty_report(
    rows: int, config: ModelConfig, settings: ChunkSettings, steering: Steering | None = None
) -> ChunkReport:
    """The report before the first step."""
    chunk, mass_rows = settings.chunk, settings.chunk if settings.sampling.truncated else 0
    experts = config.experts
    K = 0 if steering is None else steering.places.shape[1]
    return ChunkReport(
        tokens=jnp.zeros((chunk, rows), jnp.int32),
        logprobs=jnp.zeros((chunk, rows), jnp.float32),
        mass=jnp.zeros((mass_rows, rows), jnp.float32),
        count=jnp.zeros(rows, jnp.int32),
        steps=jnp.zeros(1, jnp.int32),
        routes=jnp.zeros((chunk, config.layers, experts.per_token, rows), jnp.int16) if experts.replay else None,
        top=(jnp.zeros((chunk, K, rows), jnp.int32), jnp.zeros((chunk, K, rows), jnp.float32)) if K else None,
    )


def unfinished(slots: Slots, report: ChunkReport, settings: ChunkSettings, steering: Steering | None = None) -> Array:
    """Whether a chunk has a further step."""
    most = settings.chunk if steering is None else jnp.minimum(steering.steps, settings.chunk)
    return (report.steps[0] < most) & jnp.any(slots.active)


def _by_layer(chosen: list[Array], config: ModelConfig) -> Int[Array, "L X B"]:
    """The recorded experts [B,1,X] of each layer; -1 for those without."""
    dense, ids = jnp.full_like(chosen[0], -1), iter(chosen)
    sparse = layers_with("router", config)
    return jnp.stack([next(ids) if i in sparse else dense for i in range(config.layers)])[:, :, 0].transpose(0, 2, 1)


def draw_tokens(
    params: Params,
    x: Array,
    slots: Slots,
    report: ChunkReport,
    chosen: list[Array],
    model: SamplerModel,
    settings: ChunkSettings,
    steering: Steering | None = None,
) -> tuple[Slots, ChunkReport]:
    """(slots, report) after a step whose layers returned `x`, and chose these experts where they are recorded."""
    config = model.config
    logits = unembed(params, final_hidden(params, x, config), config, outputs_first=model.outputs_first)
    logits = gathered(logits[:, 0], model.mesh)
    drawn_at = slots.position + 1
    uniform = uniforms(slots.key, drawn_at)
    draw = sample(logits, uniform, slots.temperature, settings.sampling, settings.vocab_size, steering)
    stopped = (drawn_at + 1 >= slots.limit) | _is_any(draw.token, settings.stop_ids)
    token = draw.token | (slots.token & ~ID_MASK) if "adapters" in params else draw.token
    now = report.steps[0]

    def put(leaf: Array, row: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(leaf, row[None], now, axis=0)

    report = report.replace(
        tokens=put(report.tokens, token),
        logprobs=put(report.logprobs, draw.logprob),
        mass=put(report.mass, draw.mass) if settings.sampling.truncated else report.mass,
        count=report.count + slots.active,
        steps=report.steps + 1,
        routes=put(report.routes, _by_layer(chosen, config)) if chosen else None,
        top=report.top and jax.tree.map(put, report.top, _most_likely(logits, slots, steering, settings)),
    )
    slots = slots.replace(
        position=jnp.where(slots.active, drawn_at, slots.position),
        token=jnp.where(slots.active, token, slots.token),
        active=slots.active & ~stopped,
    )
    return slots, report


def _most_likely(
    logits: Float[Array, "B V"], slots: Slots, steering: Steering, settings: ChunkSettings
) -> tuple[Array, Array]:
    """(ids, log-probabilities) [K,B] of the most likely tokens, as `Steering.places` asks."""
    heat = jnp.where(slots.temperature <= 0, 1.0, slots.temperature)[:, None]
    logprobs = jax.nn.log_softmax(logits / heat, axis=-1)
    if settings.vocab_size is not None:
        logprobs = jnp.where(jnp.arange(logits.shape[1]) < settings.vocab_size, logprobs, -jnp.inf)
    values, ids = jax.lax.top_k(logprobs, steering.places.shape[1])
    return ids.T.astype(jnp.int32), values.T


def draw_chunk(
    params: Params,
    pool: BlockPool,
    slots: Slots,
    table: Int[Array, "B W"],
    model: SamplerModel,
    settings: ChunkSettings,
    steering: Steering | None = None,
) -> tuple[BlockPool, Slots, ChunkReport]:
    """The loop of `decode_chunk` over these slots."""
    config = model.config
    report = empty_report(slots.token.shape[0], config, settings, steering)
    readers = readers_of(pool, table, slots.active)

    def step(state: tuple[BlockPool, Slots, ChunkReport]) -> tuple[BlockPool, Slots, ChunkReport]:
        pool, slots, report = state
        writer = PoolWriter(pool, config, model.mesh)
        places = token_places(pool, slots.position, slots.active, table, readers)
        attends = [writer.attend(i, places) for i in range(config.layers)]
        chosen: list[Array] = []
        experts = recorded(model.experts, chosen) if config.experts.replay else model.experts
        x = run_layers(params, slots.token[:, None], slots.position[:, None], attends, config, experts)
        return writer.pool(), *draw_tokens(params, x, slots, report, chosen, model, settings, steering)

    return jax.lax.while_loop(lambda state: unfinished(*state[1:], settings, steering), step, (pool, slots, report))


def gathered(logits: Array, mesh: Mesh | None) -> Array:
    """The logits on every device of a shard.

    Padding and reversing a vocabulary that is split over devices becomes collective permutes. All devices take part in
    one, so it hangs in a loop that each shard leaves by itself; a gather takes place within the shard.
    """
    if mesh is None:
        return logits
    inside = jax.sharding.get_abstract_mesh()  # within `shard_map`, whose axes are no longer those of `mesh`
    mesh, tensor = mesh if inside.empty else inside, mesh.shape.get("tensor", 1)
    if tensor > 1 and logits.shape[-1] % tensor == 0:
        # Without this XLA for TPUs gathers the unembedding in each step, and every device computes all logits.
        logits = jax.lax.with_sharding_constraint(logits, NamedSharding(mesh, PartitionSpec(None, "tensor")))
    return jax.lax.with_sharding_constraint(logits, NamedSharding(mesh, PartitionSpec()))


def _is_any(token: Int[Array, " B"], ids: tuple[int, ...]) -> Array:
    matches = jnp.zeros(token.shape, bool)
    for stop in ids:
        matches |= token == stop
    return matches
