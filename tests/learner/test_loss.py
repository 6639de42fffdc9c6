"""Packing drops nothing and has one shape; log-probabilities in chunks against full ones; the loss by hand."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import NamedSharding, P

from grpo_roc_jax import BatchConfig, Clip, ConfigError, ModelConfig, read_config
from grpo_roc_jax.learner import loss as losses
from grpo_roc_jax.learner import pack as layouts
from grpo_roc_jax.learner.loss import MAX_LOGRATIO, Head, UpdateConfig, batch_loss, policy_logprobs, token_logprobs
from grpo_roc_jax.learner.pack import pack, rows_per_micro_batch, unpack, worst_case_micro_batches
from grpo_roc_jax.method.divergence import K1, K2, K3
from grpo_roc_jax.method.surrogate import CappedClip, Ratio, Surrogate
from grpo_roc_jax.model.sharding import ROWS, ShardingConfig, make_mesh
from grpo_roc_jax.planner.hlo import parse_hlo
from grpo_roc_jax.planner.hlo_cost import largest_gather
from grpo_roc_jax.types import TRAIN_ROW_FIELDS
from tests.helpers import reference
from tests.helpers.loss_batch import loss_batch, micro_batches

V, D = 53, 12


def head_inputs(tied: bool, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    name, shape = ("embed", (V, D)) if tied else ("unembed", (D, V))
    params = {"embed": jnp.zeros((V, D), dtype), name: jnp.asarray(rng.normal(size=shape), dtype)}
    hidden = jnp.asarray(rng.normal(size=(2, 9, D)), dtype)
    tokens = jnp.asarray(rng.integers(0, V, (2, 9)), jnp.int32)
    segment_ids = jnp.asarray([[1, 1, 1, 1, 2, 2, 2, 0, 0], [1] * 9], jnp.int32)
    return params, hidden, tokens, segment_ids


def full_logprobs(params, hidden, tokens, segment_ids, temperature, cap=0.0):
    """The same from logits [B,T,V] by autodiff, as the reference for the chunks."""
    matrix = params["unembed"].T if "unembed" in params else params["embed"]
    logits = jnp.einsum("btd,vd->btv", hidden, matrix)
    heat = jnp.broadcast_to(temperature, tokens.shape)[..., None]
    log_p = jax.nn.log_softmax((cap * jnp.tanh(logits / cap) if cap else logits) / heat)
    chosen = jnp.take_along_axis(log_p[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)[:, :-1]
    real = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)
    return tuple(jnp.pad(jnp.where(real, x, 0.0), ((0, 0), (1, 0))) for x in (chosen, entropy))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", [Head(7, cap=2.5), Head(4096)], ids=str)
def test_chunks_equal_full_logits_forward_and_backward(tied, head):
    params, hidden, tokens, segment_ids = head_inputs(tied)
    d_out = tuple(np.random.default_rng(n).normal(size=(2, 9)).astype(np.float32) for n in (1, 2))

    @partial(jax.jit, static_argnums=0)
    def run(function, params, hidden):
        out, pull = jax.vjp(function, params, hidden)
        return jax.tree.leaves((out, pull(d_out)))

    for heat in (0.6, jnp.linspace(0.6, 1.3, tokens.size).reshape(tokens.shape)):
        full = partial(full_logprobs, tokens=tokens, segment_ids=segment_ids, temperature=heat, cap=head.cap)
        chunks = partial(token_logprobs, tokens=tokens, segment_ids=segment_ids, temperature=heat, head=head)
        for a, b in zip(run(chunks, params, hidden), run(full, params, hidden), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5 * max(float(np.abs(b).max()), 1.0))


def test_extreme_and_bfloat16_logits():
    """bfloat16 inputs, float32 sums: as close to float64 as the rounding of the inputs allows, which is none here."""
    params, hidden, *rest = head_inputs(tied=True)
    total = jax.value_and_grad(lambda h: sum(x.sum() for x in token_logprobs(params, 1e4 * h, *rest, head=Head(8))))
    assert all(np.isfinite(x).all() for x in jax.jit(total)(hidden))
    params, hidden, tokens, segment_ids = head_inputs(tied=True, dtype=jnp.bfloat16)
    logprobs, _ = jax.jit(partial(token_logprobs, head=Head(8)))(params, hidden, tokens, segment_ids)
    logits = np.asarray(hidden, np.float64) @ np.asarray(params["embed"], np.float64).T
    assert logprobs.dtype == jnp.float32
    np.testing.assert_allclose(logprobs[1], reference.token_logprobs(logits[1], tokens[1], 1.0)[0], atol=1e-5)


def test_logits_of_the_batch_never_exist():
    """Temporary bytes of forward and backward at V = 32768 are at most a tenth of the full version's. Without
    constraints XLA gathers the whole unembedding in every chunk, in both passes, and slices it after."""
    mesh, (B, T, V, D) = make_mesh(ShardingConfig(fsdp=8)), (8, 128, 32768, 64)
    shapes = ((V, D), jnp.float32, P("fsdp")), ((B, T, D), jnp.float32, P(ROWS)), *[((B, T), jnp.int32, P(ROWS))] * 2

    def compiled(mesh, function):
        places = [None if mesh is None else NamedSharding(mesh, spec) for *_, spec in shapes]
        like = [jax.ShapeDtypeStruct(*of[:2], sharding=place) for of, place in zip(shapes, places, strict=True)]
        grad = jax.grad(lambda w, *of: function({"embed": w}, *of)[0].sum(), argnums=(0, 1))
        return jax.jit(grad).lower(*like).compile()

    chunked = compiled(None, lambda *of: token_logprobs(*of, head=Head(1024))).memory_analysis()
    full = compiled(None, lambda *of: full_logprobs(*of, 1.0)).memory_analysis()
    assert chunked.temp_size_in_bytes <= 0.1 * full.temp_size_in_bytes
    split = compiled(mesh, lambda *of: token_logprobs(*of, head=Head(1024), mesh=mesh))
    assert largest_gather(parse_hlo(split.as_text())).bytes == 4 * 1024 * D


# Fixture F of the method notes: two rows of three tokens.
F_MASK = np.array([[1, 1, 1], [1, 1, 0]], bool)
F_OLD = np.array([[-1, -2, -1], [-1, -1, 0]], np.float32)
F_NEW = np.array([[-0.7, -2.1, -1], [-1.2, -0.5, 0]], np.float32)
F_REF = np.array([[-1, -2, -1.1], [-1, -0.8, 0]], np.float32)
TOKEN_MEAN = np.full((2, 3), 1 / 5, np.float32)


def fixture(**changes):
    """Its losses by hand are in `method/test_compose.py`."""
    fields = {"logprobs_old": F_OLD, "logprobs_ref": F_REF, "advantages": np.repeat(np.float32([[1], [-1]]), 3, axis=1)}
    return loss_batch(F_MASK, weights=TOKEN_MEAN, **fields | changes)


@partial(jax.jit, static_argnums=0)
def loss_at(surrogate, batch, logprobs=F_NEW):
    return batch_loss(jnp.asarray(logprobs), jnp.ones((2, 3)), batch, surrogate)


@partial(jax.jit, static_argnums=0)
def slope_at(surrogate, batch, logprobs=F_NEW):
    """((loss, sums), gradient with respect to the log-probabilities)."""
    return jax.value_and_grad(lambda x: loss_at(surrogate, batch, x), has_aux=True)(jnp.asarray(logprobs))


def test_against_the_update_itself_the_ratio_is_one():
    """Minus weight times advantage, however far the sampler's numbers are off; the gap is still measured."""
    shift = np.float32([[0.5, -0.5, -0.1], [-0.5, 0.5, 0.1]])
    batch = fixture(logprobs_old=F_NEW + shift)
    (value, sums), slope = slope_at(Clip(old_logprobs="current"), batch)
    np.testing.assert_allclose(value, -1 / 5, rtol=1e-6)
    np.testing.assert_allclose(slope, np.where(F_MASK, -batch.advantages / 5, 0), rtol=1e-6)
    assert sums["ratio_max"] == 1 and sums["clip_low"] == sums["clip_high"] == 0
    np.testing.assert_allclose(sums["gap_max"], np.abs(shift).max(), rtol=1e-6)
    # It allows one step on the newest policy.
    assert read_config("--surrogate.old_logprobs=current").surrogate.own_ratio
    with pytest.raises(ConfigError, match=r"= current with batch\.updates several"):
        read_config("--surrogate.old_logprobs=current", "--batch.updates=several", "--batch.updates.epochs=2")


def test_sums_by_hand():
    _, sums = loss_at(CappedClip(clip_high=0.28, dual=1.5), fixture())
    twice = losses.merge_sums(sums, sums)
    assert twice["tokens"] == 10 and twice["gap_max"] == sums["gap_max"]
    metrics = {name.removeprefix("loss/"): float(number) for name, number in losses.loss_metrics(sums).items()}
    ratio = np.exp((F_NEW - F_OLD)[F_MASK].astype(np.float64))
    # 1.349859 > 1.28 with A > 0; no ratio below 0.8 with A < 0; 1.648721 > 1.5 with A < 0.
    expected = {"clip_fraction_high": 0.2, "clip_fraction_low": 0.0, "clip_fraction_dual": 0.2, "ratio_max": 1.648721}
    expected |= {"logprob_gap_max": 0.5, "logprob_gap_mean": (0.3 + 0.1 + 0 + 0.2 + 0.5) / 5, "entropy": 1.0}
    expected |= {"kl_old_k1": -(0.3 - 0.1 + 0 - 0.2 + 0.5) / 5, "nll": -F_NEW[F_MASK].mean(), "weight": 1.0}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert metrics["policy_tokens"] == 5
    assert metrics["kl_old_k3"] == pytest.approx((ratio - 1 - np.log(ratio)).mean(), rel=1e-4)
    assert metrics["effective_sample_size"] == pytest.approx(ratio.sum() ** 2 / (5 * (ratio**2).sum()), rel=1e-5)
    _, sums = loss_at(Clip(), fixture(), logprobs=F_OLD - np.float32(0.5))
    assert sums["clip_low"] == 2 and sums["clip_high"] == 0
    # Ratios 1, at a bound of 1, and e, with negative advantages; a third one is masked out.
    none, mask = jnp.zeros((1, 3), bool), jnp.array([[True, True, False]])
    bounds = SimpleNamespace(clip_bounds=(0.2, 0.2, 1.0), clipped=lambda *_: (none, none))
    sums = losses.ratio_sums(jnp.array([[0.0, 1.0, 1.0]]), jnp.full((1, 3), -1.0), jnp.zeros((1, 3)), mask, bounds)
    assert sums["clip_dual"] == 1


@pytest.mark.parametrize("kind", ["clip", "cispo", "sapo", "ratio", "logp"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_masked_out_nan_changes_nothing(kind, level):
    """In any field, nor in the log-probabilities of the update."""
    surrogate = Surrogate.read({"kind": kind, "kl": K3(coef=0.1)} | ({} if kind == "logp" else {"level": level}))
    batch, fields = fixture(), ("logprobs_old", "advantages", "weights", "logprobs_ref")
    nan, ((value, _), slope) = np.float32("nan"), slope_at(surrogate, batch)
    poisoned = replace(batch, **{name: np.where(F_MASK, getattr(batch, name), nan) for name in fields})
    (got_value, _), got_slope = slope_at(surrogate, poisoned, np.where(F_MASK, F_NEW, nan))
    np.testing.assert_array_equal(got_value, value)
    np.testing.assert_array_equal(got_slope, slope)
    assert not slope[~F_MASK].any() and slope[F_MASK].any()


def test_the_ratio_of_a_collapsed_token_is_clamped_and_counted():
    old = np.where(F_MASK, F_OLD, 0)
    old[0, 0] = -500.0
    value, sums = loss_at(Ratio(), fixture(logprobs_old=old))
    assert np.isfinite(value) and sums["clamped"] == 1
    assert float(sums["ratio_max"]) == pytest.approx(np.exp(MAX_LOGRATIO), rel=1e-5)
    new, old[0, 0] = F_NEW.copy(), -MAX_LOGRATIO
    new[0, 0] = 0.0
    assert loss_at(Ratio(), fixture(logprobs_old=old), new)[1]["clamped"] == 0, "the bound itself is left as it is"


def test_a_token_far_from_the_reference_is_clamped_and_counted():
    """verl's bounds: at log p_ref - log p = 3 the k3 estimate would be 16.1; at 100 it would be infinite."""

    def apart(surrogate, gap):
        reference = np.where(F_MASK, F_NEW, 0)
        reference[0, 0] += gap
        return slope_at(surrogate, fixture(logprobs_ref=reference))

    (near, _), plain = slope_at(Clip(), fixture())
    for gap in (3.0, 100.0, -15.0):
        (value, sums), slope = apart(Clip(kl=K3(coef=1.0)), gap)
        assert float(value) == pytest.approx(float(near) + 10 * TOKEN_MEAN[0, 0], rel=1e-5)
        np.testing.assert_allclose(slope, plain, atol=1e-6)
        assert losses.loss_metrics(sums)["loss/kl_clamped_fraction"] == pytest.approx(1 / 5)
    for kl in (K1(coef=1.0), K2(coef=1.0), K3(coef=1.0)):
        assert apart(Clip(kl=kl), 2.6)[0][1]["kl_clamped"] == 0


def test_what_the_backward_pass_recomputes():
    """Every layer's body, and within a scan without a barrier against merging equal expressions."""
    assert losses.make_remat("none") is None and losses.token_axes(None, 12) == ("sequence",)
    full, alone = losses.make_remat("full").keywords, losses.make_remat("full", scanned=False).keywords
    assert full == {"policy": jax.checkpoint_policies.nothing_saveable, "prevent_cse": False}
    assert alone == full | {"prevent_cse": True}
    assert losses.make_remat("attention").keywords["policy"] is not jax.checkpoint_policies.nothing_saveable
    # Tokens are split over `tensor` where they divide.
    mesh = SimpleNamespace(shape={"sequence": 2, "tensor": 3})
    assert [losses.token_axes(mesh, n) for n in (12, 8)] == [("sequence", "tensor"), ("sequence",)]


def test_padding_tokens_do_not_matter():
    """Every log-probability is bit-equal for any id in the padding. The temperature is 1 unless given."""
    model = ModelConfig(d_model=24, layers=2, heads=4, kv_heads=2, head_dim=6, d_ff=40, vocab_size=V)
    params, rows = reference.random_params(model), reference.random_rows([5, 11, 2, 16, 9, 1, 13], V)
    batch, placement = pack(rows, BatchConfig(row_length=64, rows=1), 1)
    (micro,) = micro_batches(batch)
    other = replace(micro, tokens=np.where(micro.segment_ids > 0, micro.tokens, V - 1))
    run = jax.jit(policy_logprobs, static_argnums=(2, 3))
    outputs = [run(params, part, model, UpdateConfig()) for part in (micro, other)]
    jax.tree.map(np.testing.assert_array_equal, *outputs)
    for row, *got in zip(rows, *(unpack(np.asarray(x)[None], placement) for x in outputs[0]), strict=True):
        expected = reference.token_logprobs(reference.logits(params, row.tokens, model), row.tokens, 1.0)
        np.testing.assert_allclose(got, expected, atol=1e-5)


CONFIG = BatchConfig(row_length=16, rows=2)


def pack_lengths(lengths, config=CONFIG, **kwargs):
    rows = reference.random_rows(lengths, vocab=50)
    return rows, *pack(rows, config, worst_case_micro_batches(len(rows), max(lengths, default=1), config), **kwargs)


def test_layout_by_hand():
    """Lengths 5, 12, 4, 11 in rows of 16: 12 + 4, then 11 + 5; ids, positions and offsets follow."""
    rows, batch, placement = pack_lengths([5, 12, 4, 11])
    assert placement.rows_used == 2 and batch.count == 1 and placement.fill == 1.0
    np.testing.assert_array_equal(batch.segment_ids[0], [[1] * 12 + [2] * 4, [1] * 11 + [2] * 5])
    np.testing.assert_array_equal(batch.positions[0, 0], [*range(12), *range(4)])
    np.testing.assert_array_equal(batch.tokens[0, 1], np.concatenate([rows[3].tokens, rows[0].tokens]))
    assert pack_lengths([1], BatchConfig(row_length=1, rows=1))[2].fill == 1.0
    assert placement.row.tolist() == [1, 0, 0, 1] and placement.offset.tolist() == [11, 0, 12, 0]
    np.testing.assert_array_equal(batch.ratio_segments[0, 1], np.arange(16))
    # Rows of 16 hold three trajectories of up to 5 tokens; 2 rows make a micro-batch, and there is at least one.
    assert [worst_case_micro_batches(n, 5, CONFIG) for n in (0, 1, 6, 7, 13)] == [1, 1, 1, 2, 3]
    narrow = BatchConfig(row_length=16, rows=1)
    assert [worst_case_micro_batches(3, 16, narrow, *shards) for shards in ((), (1,), (2,))] == [3, 3, 2]
    _, batch, placement = pack_lengths([9] * 7)  # just over half a row: one each, so the bound is attained
    assert placement.rows_used == 7 and batch.tokens.shape[0] == batch.count == 4
    assert rows_per_micro_batch(BatchConfig(rows=5), 4) == 8
    assert (BatchConfig().row_length, rows_per_micro_batch(BatchConfig(), 1)) == (512, 8), "4096 tokens by default"
    rows = reference.random_rows([16, 15, 14], 50)
    batch, _ = pack(rows, CONFIG, 2, temperature=1.0)
    more = layouts.halved(batch)
    assert more.tokens.shape == (4, 1, 16) and more.count == 4 and more.count.dtype == batch.count.dtype
    np.testing.assert_array_equal(more.tokens[:3, 0, :14], [row.tokens[:14] for row in rows])
    for name, leaf in vars(more).items():
        if name != "count" and leaf is not None:
            np.testing.assert_array_equal(leaf.reshape(2, 2, 16), getattr(batch, name))
    # Tokens of other rows and padding keep a value without effect; fields that no row has are absent. Parts of a row
    # are segments of their own, and equal numbers of ratio segments in two trajectories name different ones.
    plain, full = reference.random_rows([3, 4], 50)
    routes = np.arange(24).reshape(4, 3, 2)
    full = replace(full, marked=np.ones(4, bool), entropy_coefficient=0.5, routes=routes)
    full = replace(full, temperature=0.5, parts=(3, 1), ratio_segments=[0] * 4, weights=[0] * 4)
    batch, _ = pack([plain, full], BatchConfig(row_length=8, rows=1), 1, 1, temperature=0.75)
    for name, expected in {
        "marked": [True] * 4 + [False] * 4,
        "entropy_coefficients": [0.5] * 4 + [0.0] * 4,
        "routes": [*routes, *np.full((4, 3, 2), -1)],
        "temperatures": [0.5] * 4 + [0.75] * 3 + [1.0],
        "segment_ids": [1, 1, 1, 2, 3, 3, 3, 0],
        "positions": [0, 1, 2, 0, 0, 1, 2, 0],
        "ratio_segments": [0, 0, 0, 0, 4, 5, 6, 0],
    }.items():
        np.testing.assert_array_equal(getattr(batch, name)[0, 0], expected, name)
    assert batch.marked.dtype == bool and batch.routes.dtype == np.int16
    bare, _ = pack([plain], CONFIG, 1)
    assert all(leaf is None for leaf in (bare.marked, bare.entropy_coefficients, bare.routes, bare.temperatures))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 16), max_size=40), st.integers(1, 5), st.integers(1, 8))
def test_every_trajectory_comes_back_and_the_bound_holds(lengths, rows_per_batch, multiple):
    config = BatchConfig(row_length=16, rows=rows_per_batch)
    rows = reference.random_rows(lengths, vocab=50)
    bound = worst_case_micro_batches(len(rows), max(lengths, default=1), config, multiple)
    batch, placement = pack(rows, config, bound, multiple)
    for name in TRAIN_ROW_FIELDS:
        if name != "ratio_segments":
            for got, row in zip(unpack(getattr(batch, name), placement), rows, strict=True):
                np.testing.assert_array_equal(got, getattr(row, name))
    assert batch.tokens.shape[1] % multiple == 0 and (batch.segment_ids > 0).sum() == sum(lengths)
    padding = batch.segment_ids == 0
    assert not batch.policy_mask[padding].any() and not batch.weights[padding].any()
    assert not (batch.segment_ids[int(batch.count) :] > 0).any()
    assert placement.fill == sum(lengths) / (16 * max(placement.rows_used, 1)), "0 without trajectories"


def test_refusals_name_the_numbers():
    row = reference.random_rows([4], 50)[0]
    for refused, message in [
        (lambda: pack(reference.random_rows([3, 17], 50), CONFIG, 1), r"17 tokens but batch.row_length = 16"),
        (lambda: pack(reference.random_rows([16] * 3, 50), CONFIG, 1), r"2 micro-batches of 2, but 1 are allocated"),
        (lambda: worst_case_micro_batches(4, 20, CONFIG), r"may have 20 tokens but batch.row_length = 16"),
        (lambda: replace(row, ratio_segments=np.array([0, 1, 2, 4], np.int32)), r"spans 0\.\.4"),
    ]:
        with pytest.raises(ValueError, match=message):
            refused()
    for number in (1, "1"):
        assert BatchConfig(updates=number).updates == layouts.OneUpdate()
    assert BatchConfig(updates=3).updates == layouts.SeveralUpdates(parts=3)
    assert BatchConfig(updates={"kind": "several", "parts": 2, "epochs": 3}).updates.total == 6
    assert BatchConfig().updates.total == layouts.OneUpdate().total == 1
