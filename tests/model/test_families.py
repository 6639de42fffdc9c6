"""Every family computes what transformers computes, and its config.json is read as transformers reads it."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax.commands.export import export_model
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.convert import load_params, resolve_config, save_params
from grpo_roc_jax.model.families import UnsupportedModelError, find_family
from grpo_roc_jax.model.published import read_config, same_model, without_effect
from grpo_roc_jax.model.rotary import rotary_frequencies
from grpo_roc_jax.run.components import fit_length
from tests.helpers import published_models as models
from tests.helpers.whole_rows import row_logits
from tests.model.test_convert import read_all

LENGTH = 40
CASES = [pytest.param(name, marks=pytest.mark.slow if name in models.SLOW_CASES else ()) for name in models.CASES]


@pytest.fixture(scope="module")
def pair(request, tmp_path_factory):
    """(model of transformers, our configuration, our parameters, tokens, their logits)."""
    folder = tmp_path_factory.mktemp(request.param)
    model = models.save_model(request.param, folder, max_shard_size="20KB")
    config = fit_length(resolve_config(ModelConfig(path=str(folder))), LENGTH)
    tokens = models.random_tokens(2, LENGTH)
    return model, config, load_params(folder, config), tokens, models.logits_of(model, tokens)


@pytest.mark.parametrize("pair", CASES, indirect=True)
def test_logits_are_those_of_transformers_which_reloads_the_same_model(pair, tmp_path):
    """After an import and an export, both in several files."""
    model, config, params, tokens, wanted = pair
    assert wanted.std() > 0.3  # the bound below means something
    assert np.abs(row_logits(params, tokens, config) - wanted).max() <= 1e-4
    export_model(params, config, tmp_path / "out", max_shard_bytes=20_000)
    loader = models.need_transformers().AutoModelForCausalLM
    again, report = loader.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert type(again) is type(model)
    np.testing.assert_array_equal(models.logits_of(again, tokens), wanted)


SLOW_GRADIENTS = [pytest.param(name, marks=pytest.mark.slow) for name in ("glm4-moe", "granite", "llama4", "gemma4")]


@pytest.mark.parametrize("pair", ["gpt-oss", "deepseek", "gemma4-small", *SLOW_GRADIENTS], indirect=True)
def test_gradients_of_every_tensor_equal_those_of_torch(pair, tmp_path):
    """Of families whose layers differentiate something of their own. Fast ones have sinks and choices of experts,
    latent heads and sigmoid scores, factors of layers, shared keys and embeddings by layer."""
    import torch

    model, config, params, tokens, _ = pair
    weight = np.random.default_rng(3).normal(size=(*tokens.shape, config.vocab_size)).astype(np.float32) / 30
    model.set_attn_implementation("eager")
    model.zero_grad()
    (model(torch.tensor(tokens)).logits * torch.tensor(weight)).sum().backward()
    copy = type(model)(model.config)  # transformers saves gradients under the published names, as weights of a copy
    with torch.no_grad():
        for slope, leaf in zip(copy.parameters(), model.parameters(), strict=True):
            slope.copy_(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
    copy.save_pretrained(tmp_path / "theirs")

    got = jax.jit(jax.grad(lambda params: jnp.sum(weight * row_logits(params, tokens, config))))(params)
    (tmp_path / "ours").mkdir()
    family = find_family(json.loads((tmp_path / "theirs" / "config.json").read_text()))
    save_params(got, config, family, tmp_path / "ours", dtype=np.float32)
    ours, theirs = (read_all(tmp_path / name) for name in ("ours", "theirs"))
    for name in set(theirs) - set(ours):  # is not trained, and no parameter here
        assert ".indexer." in name and not theirs.pop(name).any()
    assert set(ours) == set(theirs)
    for name, wanted in theirs.items():
        if name.endswith(("e_score_correction_bias", "layer_scalar")):  # are not trained
            assert not ours[name].any()
            continue
        scale = np.abs(wanted).max()
        assert scale > 1e-4 or ".experts." in name, name  # no token may have chosen an expert
        np.testing.assert_allclose(ours[name], wanted, atol=5e-5 * scale, rtol=0, err_msg=name)


def saved(config, folder) -> dict:
    config.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("name", [*models.ONE_PER_FAMILY, "qwen2-sliding"])
def test_a_missing_key_means_what_it_means_to_transformers_or_is_refused(tmp_path, name):
    full = saved(models.make_config(name), tmp_path)
    read = refused = 0
    for key in sorted(set(full) - {"architectures", "model_type"}):
        less = {k: v for k, v in full.items() if k != key}
        (tmp_path / "config.json").write_text(json.dumps(less))
        try:
            filled = saved(models.need_transformers().AutoConfig.from_pretrained(tmp_path), tmp_path)
            wanted = read_config(filled | {"architectures": full["architectures"]})
            got = read_config(less)
        except UnsupportedModelError:
            refused += 1
        except Exception as error:  # a combination that transformers refuses too, by a class of its own
            assert "validat" in str(error) or "is not a multiple" in str(error) or "is odd" in str(error), key
        else:
            read += 1
            assert same_model(got, wanted), key
    assert read > 8 and refused >= 3


RESCALINGS = {"linear": {"factor": 4.0}, "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}}
RESCALINGS |= {"yarn": {"factor": 8.0}, "longrope": {}}


@pytest.mark.parametrize("kind", RESCALINGS)
@pytest.mark.parametrize("name", ["llama", "smollm3", "glm4", "gpt-oss"])
def test_every_rescaling_is_that_of_transformers(tmp_path, name, kind):
    """Frequencies and the factor of queries and keys."""
    transformers = models.need_transformers()
    full = saved(models.make_config(name), tmp_path) | {"rope_parameters": {"rope_theta": 5e4}}
    factors = read_config(full).rotary_dim // 2
    lists = {f"{part}_factor": [n + i / 8 for i in range(factors)] for n, part in ((1, "short"), (2, "long"))}
    scaling = {"type": kind} | RESCALINGS[kind] | (lists if kind == "longrope" else {})
    older = full | {"rope_parameters": None, "rope_theta": 5e4}
    older |= {"rope_scaling": scaling if kind == "linear" else scaling | {"original_max_position_embeddings": 64}}
    (tmp_path / "config.json").write_text(json.dumps(older))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    wanted = getattr(transformers, config.architectures[0])(config).model.rotary_emb
    model = read_config(older)
    np.testing.assert_allclose(rotary_frequencies(model, "plain"), wanted.inv_freq, rtol=1e-5)
    assert model.rope_scaling.magnitude == pytest.approx(wanted.attention_scaling)


GENERATION = {"_model_name_or_path": "a model", "torchscript": True, "unsloth_version": "1", "is_llama_config": True}


def changed(value):
    """Another value of the same type; of a list or mapping, and of None, one that says something."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1 if isinstance(value, int) else value * 2 + 0.5
    return f"{value}x" if isinstance(value, str) else ["x"] if isinstance(value, list) else {"x": 1} if value else 7


@pytest.mark.parametrize("name", models.ONE_PER_FAMILY)
def test_a_key_changes_the_model_or_is_refused_unless_it_can_change_nothing(tmp_path, name):
    """Every key that transformers writes, with another value; what is read with another key passes unchanged too."""
    full = saved(models.make_config(name), tmp_path)
    general = dict.fromkeys(models.need_transformers().GenerationConfig().to_dict()) | GENERATION
    model, passed = read_config(full), 0
    for key, value in (general | models.make_config(name).to_dict() | full).items():
        try:
            other = read_config(full | {key: changed(value)})
        except (UnsupportedModelError, ValueError, TypeError, AttributeError, KeyError):
            other = None
        if not other or not same_model(other, model) or other.max_positions != model.max_positions:
            assert not without_effect(key), key
        elif not without_effect(key):
            assert key in TOGETHER, key
        passed += bool(without_effect(key))
    assert passed > 40


TOGETHER = """
_sliding_window_pattern max_window_layers model_type use_sliding_window sliding_window_pattern no_rope_layer_interval
rope_theta partial_rotary_factor full_attention_interval sliding_window intermediate_size mamba_chunk_size mamba_expand
num_experts_per_tok num_nextn_predict_layers num_mtp_layers num_key_value_heads head_dim qk_head_dim
vocab_size_per_layer_input use_double_wide_mlp num_experts top_k_experts moe_intermediate_size intermediate_size_mlp
interleave_moe_layer_step
""".split()  # noqa: SIM905 (shorter than a list)
"""Keys that a more exact one overrides, or that belong to layers which the model has not."""
