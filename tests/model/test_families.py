"""Every family computes what transformers computes: whole rows, packed rows, and token by token from the cache."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax.commands.export import export_model
from grpo_roc_jax.engine.decode import run_layers
from grpo_roc_jax.model.attention import AttentionBlocks, attend_blocked
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.convert import load_params, resolve_config, save_params
from grpo_roc_jax.model.families import find_family
from grpo_roc_jax.model.pool import IN_PLACE, PoolSize, PoolWriter, allocate, readers_of, token_places
from grpo_roc_jax.model.transformer import Execution, Params, final_hidden, forward, unembed
from grpo_roc_jax.run.components import fit_length
from tests.helpers import published_models as models
from tests.helpers.whole_rows import layers_apart, row_logits
from tests.model.test_convert import read_all

TOLERANCE = 1e-4
GRADIENT = 5e-5
"""Largest difference of a gradient, of the largest number of its tensor."""
IN_FLOAT64 = 1e-6
"""The same where both sides compute in float64, and gradients are rounded to float32 to be compared."""
LENGTH = 40


def cases(*quick: str) -> pytest.MarkDecorator:
    """All cases; the default run takes the fast ones."""
    marked = [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in models.CASES]
    return pytest.mark.parametrize("pair", marked, indirect=True)


@pytest.fixture(scope="module")
def pair(request, tmp_path_factory):
    """(model of transformers, our configuration, our parameters, tokens, their logits)."""
    folder = tmp_path_factory.mktemp(request.param)
    model = models.save_model(request.param, folder, max_shard_size="20KB")
    config = fit_length(resolve_config(ModelConfig(path=str(folder))), LENGTH)
    tokens = models.random_tokens(2, LENGTH)
    return model, config, load_params(folder, config), tokens, models.logits_of(model, tokens)


@cases(*models.ONE_PER_FAMILY)
def test_transformers_reloads_the_same_model(pair, tmp_path):
    """After an import and an export, both in several files."""
    model, config, params, tokens, wanted = pair
    export_model(params, config, tmp_path / "out", max_shard_bytes=20_000)
    loader = models.need_transformers().AutoModelForCausalLM
    again, report = loader.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert type(again) is type(model)
    np.testing.assert_array_equal(models.logits_of(again, tokens), wanted)


GRADIENTS = ("gpt-oss", "deepseek", "gemma4-small")
"""Families whose layers differentiate something of their own: sinks and choices of experts, latent heads and sigmoid
scores, factors of layers, shared keys and embeddings by layer."""
SLOW_GRADIENTS = ("glm4-moe", "granite", "glm4", "ministral3", "llama4", "llama4-odd", "deepseek-v32", "glm5")
SLOW_GRADIENTS += ("gpt-oss-odd", "gemma4", "gemma4-odd", "gemma4-moe")
EXACT = ("qwen35", "qwen35-moe", "qwen35-moe-odd", "granite4-h", "granite4-h-odd", "gemma4-small-odd")


@pytest.mark.parametrize(
    "pair", [*GRADIENTS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_GRADIENTS)], indirect=True
)
def test_gradients_of_every_tensor_equal_those_of_torch(pair, tmp_path):
    model, config, params, tokens, _ = pair
    compare_gradients(model, config, params, tokens, tmp_path, GRADIENT)


@pytest.mark.slow
@pytest.mark.parametrize("pair", EXACT, indirect=True)
def test_gradients_equal_those_of_torch_in_float64(pair, tmp_path, monkeypatch):
    """Of float32 the gradient of a recurrent decay, a small sum of large terms, keeps 4e-4; scores that are not divided
    enlarge the rounding to 6e-5. Both sides take float64 here wherever they name float32. Rows have several chunks."""
    import torch

    model, config, params, *_ = pair
    monkeypatch.setattr(jnp, "float32", jnp.float64)
    for name in ("float32", "float"):
        monkeypatch.setattr(torch, name, torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    exact = type(model)(model.config).double().eval()  # anew, since rotary frequencies are computed when it is made
    exact.load_state_dict(model.state_dict())
    exact.set_experts_implementation("eager")  # the grouped product of torch has no float64
    with jax.enable_x64(True):
        params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
        compare_gradients(exact, config, params, models.random_tokens(1, 130), tmp_path, IN_FLOAT64)


def compare_gradients(model, config: ModelConfig, params: Params, tokens, folder, limit: float) -> None:
    """Those of torch under the published names: as the weights of a copy of the model, which transformers saves."""
    import torch

    dtype = jax.tree.leaves(params)[0].dtype
    weight = np.random.default_rng(3).normal(size=(*tokens.shape, config.vocab_size)).astype(dtype) / 30
    model.set_attn_implementation("eager")
    model.zero_grad()
    (model(torch.tensor(tokens)).logits * torch.tensor(weight)).sum().backward()
    copy = type(model)(model.config)
    with torch.no_grad():
        for slope, leaf in zip(copy.parameters(), model.parameters(), strict=True):
            slope.copy_(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
    copy.save_pretrained(folder / "theirs")

    got = jax.jit(jax.grad(lambda params: jnp.sum(weight * row_logits(params, tokens, config))))(params)
    assert {leaf.dtype for leaf in jax.tree.leaves(got)} == {dtype}
    (folder / "ours").mkdir()
    family = find_family(json.loads((folder / "theirs" / "config.json").read_text()))
    save_params(got, config, family, folder / "ours", dtype=np.float32)
    ours, theirs = (read_all(folder / name) for name in ("ours", "theirs"))
    for name in [name for name in theirs if ".indexer." in name]:  # is not trained, and no parameter here
        assert not theirs.pop(name).any()
    assert set(ours) == set(theirs)
    for name, wanted in theirs.items():
        if name.endswith(("e_score_correction_bias", "layer_scalar")):  # are not trained
            assert not ours[name].any()
            continue
        scale = np.abs(wanted).max()
        assert scale > 1e-4 or ".experts." in name, name  # no token may have chosen an expert
        np.testing.assert_allclose(ours[name], wanted, atol=limit * scale, rtol=0, err_msg=name)


@cases(*models.ONE_PER_FAMILY)
def test_logits_of_whole_rows(pair):
    _, config, params, tokens, wanted = pair
    assert wanted.std() > 0.3  # the bound below means something
    assert np.abs(row_logits(params, tokens, config) - wanted).max() <= TOLERANCE


@cases("qwen2", "gemma2", "phi3-longrope", "qwen35", "glm4-moe", "gpt-oss", "deepseek")
def test_logits_of_packed_rows_by_the_blocked_path(pair):
    _, config, params, tokens, wanted = pair
    attend = partial(attend_blocked, AttentionBlocks(16, config.extras.attention_cap))

    @jax.jit
    def run(params, *rows):
        return unembed(params, forward(params, *rows, config, Execution(attend=attend)), config)

    got = run(params, tokens.reshape(1, -1), np.tile(np.arange(LENGTH), 2)[None], np.repeat([1, 2], LENGTH)[None])
    assert np.abs(got.reshape(wanted.shape) - wanted).max() <= TOLERANCE


def table_of(pool, rows):
    """The blocks of the rows, in turn."""
    return jnp.arange(sum(arena.blocks for arena in pool.arenas)).reshape(-1, rows).T


@partial(jax.jit, static_argnames="config")
def decode_step(params: Params, pool, token, position, config: ModelConfig):
    writer, active, table = PoolWriter(pool, config), jnp.ones(token.shape, bool), table_of(pool, len(token))
    places = token_places(pool, position, active, table, readers_of(pool, table, active))
    attends = [writer.attend_token(i, places) for i in range(config.layers)]
    x = run_layers(params, token[:, None], position[:, None], attends, config)
    return unembed(params, final_hidden(params, x, config), config)[:, 0], writer.pool()


@partial(jax.jit, static_argnames="config")
def append_rows(params: Params, pool, tokens, config: ModelConfig, start: int):
    B, T = tokens.shape
    writer = PoolWriter(pool, config)
    rows, start, length = jnp.arange(B), jnp.full(B, start), jnp.full(B, T)
    attends = [writer.attend_span(i, table_of(pool, B), rows, start, length) for i in range(config.layers)]
    run_layers(params, tokens, start[:, None] + jnp.arange(T)[None], attends, config)
    return writer.pool()


@pytest.mark.parametrize("orders", [IN_PLACE, pytest.param(("skh", "skh"), marks=pytest.mark.slow)], ids="-".join)
@cases("gemma2", "qwen35", "gpt-oss", "deepseek", "gemma4-small")
def test_logits_from_the_cache(pair, orders):
    """A prompt in two pieces, then token by token up to the last position."""
    _, config, params, tokens, wanted = pair
    params, tokens = layers_apart(params, config), jnp.asarray(tokens)
    cache = allocate(config, PoolSize(8, 16, 2), jnp.float32, orders)
    for start in (0, 15):
        cache = append_rows(params, cache, tokens[:, start : start + 15], config, start)
    for t in range(30, LENGTH):
        logits, cache = decode_step(params, cache, tokens[:, t], jnp.full(2, t), config)
        assert np.abs(np.asarray(logits) - wanted[:, t]).max() <= TOLERANCE
