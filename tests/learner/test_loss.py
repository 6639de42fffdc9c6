"""Chunked log-probabilities against full ones, and the loss against hand-computed numbers."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from grpo_roc_jax import BatchConfig, Clip, ConfigError, ModelConfig, read_config
from grpo_roc_jax.learner import loss as losses
from grpo_roc_jax.learner.loss import MAX_LOGRATIO, Head, UpdateConfig, batch_loss, policy_logprobs, token_logprobs
from grpo_roc_jax.learner.pack import TrainBatch, pack, unpack
from grpo_roc_jax.method.divergence import K1, K2, K3
from grpo_roc_jax.method.surrogate import CappedClip, Ratio, Surrogate
from grpo_roc_jax.model.sharding import ROWS, ShardingConfig, make_mesh
from grpo_roc_jax.planner.hlo import parse_hlo
from grpo_roc_jax.planner.hlo_cost import largest_gather
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
    log_p = jax.nn.log_softmax((cap * jnp.tanh(logits / cap) if cap else logits) / temperature)
    chosen = jnp.take_along_axis(log_p[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)[:, :-1]
    real = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)
    return tuple(jnp.pad(jnp.where(real, x, 0.0), ((0, 0), (1, 0))) for x in (chosen, entropy))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", [Head(1), Head(7, cap=2.5), Head(4096)], ids=str)
def test_chunks_equal_full_logits_forward_and_backward(tied, head):
    params, hidden, tokens, segment_ids = head_inputs(tied)
    d_out = tuple(np.random.default_rng(n).normal(size=(2, 9)).astype(np.float32) for n in (1, 2))
    temperature = 0.6

    def run(function):
        def both(params, hidden):
            out, pull = jax.vjp(function, params, hidden)
            return out, pull(d_out)

        return jax.tree.leaves(jax.jit(both)(params, hidden))

    expected = run(lambda p, h: full_logprobs(p, h, tokens, segment_ids, temperature, head.cap))
    for heat in (temperature, jnp.full(tokens.shape, temperature)):
        got = run(lambda p, h, t=heat: token_logprobs(p, h, tokens, segment_ids, temperature=t, head=head))
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5 * max(float(np.abs(b).max()), 1.0))


def test_extreme_and_bfloat16_logits():
    """bfloat16 inputs, float32 sums: as close to float64 as the rounding of the inputs allows, which is none here."""
    params, hidden, tokens, segment_ids = head_inputs(tied=True)

    def loss(h):
        return sum(x.sum() for x in token_logprobs(params, 1e4 * h, tokens, segment_ids, head=Head(8)))

    assert all(np.isfinite(x).all() for x in jax.jit(jax.value_and_grad(loss))(hidden))
    params, hidden, tokens, segment_ids = head_inputs(tied=True, dtype=jnp.bfloat16)
    logprobs, _ = jax.jit(partial(token_logprobs, head=Head(8)))(params, hidden, tokens, segment_ids)
    logits = np.asarray(hidden, np.float64) @ np.asarray(params["embed"], np.float64).T
    assert logprobs.dtype == jnp.float32
    np.testing.assert_allclose(logprobs[1], reference.token_logprobs(logits[1], tokens[1], 1.0)[0], atol=1e-5)


def test_logits_of_the_batch_never_exist():
    """Temporary bytes of forward and backward at V = 32768 are at most a tenth of the full version's."""
    params = {"embed": jax.ShapeDtypeStruct((32768, 64), jnp.float32)}
    hidden = jax.ShapeDtypeStruct((2, 512, 64), jnp.float32)
    ids = jax.ShapeDtypeStruct((2, 512), jnp.int32)

    def temp_bytes(function):
        grad = jax.grad(lambda p, h, t, s: function(p, h, t, s)[0].sum(), argnums=(0, 1))
        return jax.jit(grad).lower(params, hidden, ids, ids).compile().memory_analysis().temp_size_in_bytes

    chunked = temp_bytes(lambda *args: token_logprobs(*args, head=Head(1024)))
    assert chunked <= 0.1 * temp_bytes(lambda *args: full_logprobs(*args, 1.0))
    # Without constraints XLA gathers the whole unembedding in every chunk, in both passes, and slices it after.
    mesh = make_mesh(ShardingConfig(fsdp=8))
    B, T, D, V, chunk = 8, 16, 32, 4096, 512
    rows = NamedSharding(mesh, P(ROWS))
    params = {"embed": jax.ShapeDtypeStruct((V, D), jnp.float32, sharding=NamedSharding(mesh, P("fsdp", None)))}
    hidden = jax.ShapeDtypeStruct((B, T, D), jnp.float32, sharding=rows)
    ids = jax.ShapeDtypeStruct((B, T), jnp.int32, sharding=rows)

    def loss(p, h, t, s):
        return token_logprobs(p, h, t, s, head=Head(chunk), mesh=mesh)[0].sum()

    step = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params, hidden, ids, ids).compile()
    assert largest_gather(parse_hlo(step.as_text())).bytes == 4 * chunk * D


# ---- fixture F of the method notes: two rows of three tokens -------------------------------------------------------

F_MASK = np.array([[1, 1, 1], [1, 1, 0]], bool)
F_OLD = np.array([[-1, -2, -1], [-1, -1, 0]], np.float32)
F_NEW = np.array([[-0.7, -2.1, -1], [-1.2, -0.5, 0]], np.float32)
F_REF = np.array([[-1, -2, -1.1], [-1, -0.8, 0]], np.float32)
TOKEN_MEAN = np.full((2, 3), 1 / 5, np.float32)


def fixture(**changes) -> TrainBatch:
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


@pytest.mark.parametrize("shift", [np.float32([[0.5, -0.5, -0.1], [-0.5, 0.5, 0.1]]), np.zeros((2, 3), np.float32)])
def test_against_the_update_itself_the_ratio_is_one(shift):
    """Minus weight times advantage, however far the sampler's numbers are off; the gap is still measured."""
    batch = fixture(logprobs_old=F_NEW + shift)
    (value, sums), slope = slope_at(Clip(old_logprobs="current"), batch)
    np.testing.assert_allclose(value, -1 / 5, rtol=1e-6)
    np.testing.assert_allclose(slope, np.where(F_MASK, -batch.advantages / 5, 0), rtol=1e-6)
    assert sums["ratio_max"] == 1 and sums["clip_low"] == sums["clip_high"] == 0
    np.testing.assert_allclose(sums["gap_max"], np.abs(shift).max(), rtol=1e-6)
    recorded = slope_at(Clip(), batch)
    pairs = zip(jax.tree.leaves(recorded), jax.tree.leaves(((value, sums), slope)), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs) != shift.any(), "the same only where the sampler agrees"


def test_a_ratio_of_one_allows_one_step_on_the_newest_policy():
    assert read_config("--surrogate.old_logprobs=current").surrogate.own_ratio
    for words, message in [
        (["--batch.updates=several", "--batch.updates.epochs=2"], "old_logprobs = current with batch.updates several"),
        (["--rollout.step_limit=stream"], "recorded with scored"),
    ]:
        with pytest.raises(ConfigError, match=message):
            read_config("--surrogate.old_logprobs=current", *words)


def test_sums_by_hand():
    _, sums = loss_at(CappedClip(clip_high=0.28, dual=1.5), fixture())
    twice = losses.merge_sums(sums, sums)
    assert twice["tokens"] == 10 and twice["gap_max"] == sums["gap_max"]
    metrics = {name: float(number) for name, number in losses.loss_metrics(sums).items()}
    ratio = np.exp((F_NEW - F_OLD)[F_MASK].astype(np.float64))
    assert metrics["loss/policy_tokens"] == 5 and metrics["loss/entropy"] == pytest.approx(1.0)
    # 1.349859 > 1.28 with A > 0; no ratio below 0.8 with A < 0; 1.648721 > 1.5 with A < 0.
    assert metrics["loss/clip_fraction_high"] == pytest.approx(0.2)
    assert metrics["loss/clip_fraction_low"] == 0 and metrics["loss/clip_fraction_dual"] == pytest.approx(0.2)
    assert metrics["loss/logprob_gap_max"] == pytest.approx(0.5)
    assert metrics["loss/ratio_max"] == pytest.approx(1.648721)
    assert metrics["loss/logprob_gap_mean"] == pytest.approx((0.3 + 0.1 + 0 + 0.2 + 0.5) / 5)
    assert metrics["loss/kl_old_k1"] == pytest.approx(-(0.3 - 0.1 + 0 - 0.2 + 0.5) / 5)
    assert metrics["loss/kl_old_k3"] == pytest.approx((ratio - 1 - np.log(ratio)).mean(), rel=1e-4)
    assert metrics["loss/effective_sample_size"] == pytest.approx(ratio.sum() ** 2 / (5 * (ratio**2).sum()), rel=1e-5)
    assert metrics["loss/nll"] == pytest.approx(-F_NEW[F_MASK].mean()) and metrics["loss/weight"] == pytest.approx(1.0)
    # Every ratio is 0.61: three tokens have a positive advantage, two a negative one.
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
    shared = {} if kind == "logp" else {"level": level}
    surrogate = Surrogate.read({"kind": kind, "kl": K3(coef=0.1)} | shared)

    def poisoned(values):
        return np.where(F_MASK, values, np.nan).astype(np.float32)

    batch = fixture()
    fields = ("logprobs_old", "advantages", "weights", "logprobs_ref")
    (value, _), slope = slope_at(surrogate, batch)
    batch = replace(batch, **{name: poisoned(getattr(batch, name)) for name in fields})
    (got_value, _), got_slope = slope_at(surrogate, batch, poisoned(F_NEW))
    np.testing.assert_array_equal(got_value, value)
    np.testing.assert_array_equal(got_slope, slope)
    assert not slope[~F_MASK].any() and slope[F_MASK].any()


def test_the_ratio_of_a_collapsed_token_is_clamped_and_counted():
    old = np.where(F_MASK, F_OLD, 0)
    old[0, 0] = -500.0
    batch = fixture(logprobs_old=old)
    value, sums = loss_at(Ratio(), batch)
    assert np.isfinite(value) and sums["clamped"] == 1
    assert float(sums["ratio_max"]) == pytest.approx(np.exp(MAX_LOGRATIO), rel=1e-5)
    new, old[0, 0] = F_NEW.copy(), -MAX_LOGRATIO
    new[0, 0] = 0.0
    assert loss_at(Ratio(), fixture(logprobs_old=old), new)[1]["clamped"] == 0, "the bound itself is left as it is"


@pytest.mark.parametrize("gap", [3.0, 30.0, 100.0, -15.0, -100.0])
def test_a_token_far_from_the_reference_is_clamped_and_counted(gap):
    """verl's bounds: at log p_ref - log p = 3 the k3 estimate would be 16.1; at 100 it would be infinite."""

    def apart(surrogate, gap):
        reference = np.where(F_MASK, F_NEW, 0)
        reference[0, 0] += gap
        return slope_at(surrogate, fixture(logprobs_ref=reference))

    (value, sums), slope = apart(Clip(kl=K3(coef=1.0)), gap)
    (near, _), plain = slope_at(Clip(), fixture())
    assert float(value) == pytest.approx(float(near) + 10 * TOKEN_MEAN[0, 0], rel=1e-5)
    np.testing.assert_allclose(slope, plain, atol=1e-6)
    assert losses.loss_metrics(sums)["loss/kl_clamped_fraction"] == pytest.approx(1 / 5)
    for kl in (K1(coef=1.0), K2(coef=1.0), K3(coef=1.0)):
        assert apart(Clip(kl=kl), 2.6)[0][1]["kl_clamped"] == 0


def test_what_the_backward_pass_recomputes():
    """Every layer's body, and within a scan without a barrier against merging equal expressions."""
    assert losses.make_remat("none") is None
    full, alone = losses.make_remat("full").keywords, losses.make_remat("full", scanned=False).keywords
    assert full == {"policy": jax.checkpoint_policies.nothing_saveable, "prevent_cse": False}
    assert alone == full | {"prevent_cse": True}
    assert losses.make_remat("attention").keywords["policy"] is not jax.checkpoint_policies.nothing_saveable
    # Tokens are split over `tensor` where they divide.
    mesh = SimpleNamespace(shape={"sequence": 2, "tensor": 3})
    assert [losses.token_axes(mesh, n) for n in (12, 8)] == [("sequence", "tensor"), ("sequence",)]
    assert losses.token_axes(None, 12) == ("sequence",)


# ---- the whole forward ---------------------------------------------------------------------------------------------

MODEL = ModelConfig(d_model=24, layers=2, heads=4, kv_heads=2, head_dim=6, d_ff=40, vocab_size=V)
ROWS_GIVEN = reference.random_rows([5, 11, 2, 16, 9, 1, 13], V)


@partial(jax.jit, static_argnums=2)
def run(params, batch, update=UpdateConfig()):  # noqa: B008
    return policy_logprobs(params, batch, MODEL, update)


@pytest.mark.parametrize("attention", ["reference", "blocked"])
def test_no_leak_between_trajectories_to_the_bit(attention):
    """Changing the tokens of one trajectory leaves the log-probabilities of its neighbors bit-equal."""

    def scored(rows):
        batch, placement = pack(rows, BatchConfig(row_length=64, rows=1), 1)
        (part,) = micro_batches(batch)
        return unpack(run(reference.random_params(MODEL), part, UpdateConfig(attention=attention))[0][None], placement)

    touched = replace(ROWS_GIVEN[3], tokens=(ROWS_GIVEN[3].tokens + 1) % V)
    before, after = scored(ROWS_GIVEN), scored([*ROWS_GIVEN[:3], touched, *ROWS_GIVEN[4:]])
    assert [np.array_equal(*pair) for pair in zip(before, after, strict=True)] == [n != 3 for n in range(7)]


def test_padding_tokens_do_not_matter():
    """Every log-probability is bit-equal for any id in the padding. The temperature is 1 unless given."""
    params = reference.random_params(MODEL)
    batch, placement = pack(ROWS_GIVEN, BatchConfig(row_length=64, rows=1), 1)
    (micro,) = micro_batches(batch)
    other = replace(micro, tokens=np.where(micro.segment_ids > 0, micro.tokens, V - 1))
    outputs = [run(params, part) for part in (micro, other)]
    for a, b in zip(*outputs, strict=True):
        np.testing.assert_array_equal(a, b)
    for row, *got in zip(ROWS_GIVEN, *(unpack(np.asarray(x)[None], placement) for x in outputs[0]), strict=True):
        expected = reference.token_logprobs(reference.logits(params, row.tokens, MODEL), row.tokens, 1.0)
        np.testing.assert_allclose(got, expected, atol=1e-5)
