"""`config.json` is read as transformers reads it, including missing keys."""

import json

import numpy as np
import pytest

from grpo_roc_jax.model.families import UnsupportedModelError
from grpo_roc_jax.model.published import infer_family, read_config, same_model, without_effect
from grpo_roc_jax.model.rotary import rotary_frequencies
from grpo_roc_jax.run.components import fit_length
from tests.helpers.published_models import ONE_PER_FAMILY, make_config, need_transformers


def saved(config, folder) -> dict:
    config.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("name", [*ONE_PER_FAMILY, "qwen2-sliding"])
def test_a_missing_key_means_what_it_means_to_transformers_or_is_refused(tmp_path, name):
    transformers = need_transformers()
    full = saved(make_config(name), tmp_path)
    read = refused = 0
    for key in sorted(set(full) - {"architectures", "model_type"}):
        (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in full.items() if k != key}))
        less = json.loads((tmp_path / "config.json").read_text())
        try:
            filled = saved(transformers.AutoConfig.from_pretrained(tmp_path), tmp_path)
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


FIRST = {"original_max_position_embeddings": 64}
RESCALINGS = {"linear": {"factor": 4.0}, "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}}
RESCALINGS |= {"yarn": {"factor": 8.0}, "longrope": {}}


@pytest.mark.parametrize("kind", RESCALINGS)
@pytest.mark.parametrize("name", ["llama", "qwen3-tied", "mistral", "gemma2", "smollm3", "granite", "glm4", "gpt-oss"])
def test_every_rescaling_is_that_of_transformers(tmp_path, name, kind):
    """Frequencies and the factor of queries and keys, also where a file states the first length apart."""
    transformers = need_transformers()
    full = saved(make_config(name), tmp_path) | {"rope_parameters": {"rope_theta": 5e4}}
    factors = read_config(full).rotary_dim // 2
    lists = {f"{part}_factor": [n + i / 8 for i in range(factors)] for n, part in ((1, "short"), (2, "long"))}
    scaling = {"type": kind} | RESCALINGS[kind] | (lists if kind == "longrope" else {})
    older = full | {"rope_parameters": None, "rope_theta": 5e4}
    for more in ({"rope_scaling": scaling | (FIRST if kind != "linear" else {})}, FIRST | {"rope_scaling": scaling}):
        if kind == "linear" and "original_max_position_embeddings" in more:
            continue
        (tmp_path / "config.json").write_text(json.dumps(older | more))
        config = transformers.AutoConfig.from_pretrained(tmp_path)
        wanted = getattr(transformers, config.architectures[0])(config).model.rotary_emb
        model = read_config(older | more)
        np.testing.assert_allclose(rotary_frequencies(model, "plain"), wanted.inv_freq, rtol=1e-5)
        assert model.rope_scaling.magnitude == pytest.approx(wanted.attention_scaling)


OTHERS = {
    int: lambda value: value + 1,
    float: lambda value: value * 2 + 0.5,
    bool: lambda value: not value,
    str: lambda value: f"{value}x",
}
GENERATION = {"_model_name_or_path": "a model", "_commit_hash": "f00", "use_flash_attention_2": True}
GENERATION |= {"torchscript": True, "tf_legacy_loss": True, "unsloth_version": "1", "finetuning_task": "a"}
GENERATION |= {"is_llama_config": True}


def changed(value):
    """Another value of the same type; of a list or mapping, and of None, one that says something."""
    kind = type(value)
    return OTHERS[kind](value) if kind in OTHERS else ["x"] if isinstance(value, list) else {"x": 1} if value else 7


def outcome(published: dict):
    try:
        return read_config(published)
    except (UnsupportedModelError, ValueError):
        return "refused"
    except (TypeError, AttributeError, KeyError):  # a value of another kind, which no file has
        return "broken"


@pytest.mark.parametrize("name", ONE_PER_FAMILY)
def test_a_key_changes_the_model_or_is_refused_unless_it_can_change_nothing(tmp_path, name):
    """Every key that transformers writes, and those of generation, with another value: what passes unchanged is in
    the one table of keys without effect, or is read together with another key."""
    transformers = need_transformers()
    full = saved(make_config(name), tmp_path)
    general = {key: None for key in transformers.GenerationConfig().to_dict()} | GENERATION
    model, passed = read_config(full), 0
    for key, value in (general | make_config(name).to_dict() | full).items():
        other = full | {key: changed(value)}
        result = outcome(other)
        if isinstance(result, str) or not same_model(result, model) or result.max_positions != model.max_positions:
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


@pytest.mark.parametrize("name", ["llama", "qwen3-tied", "gemma3"])
def test_keys_without_effect_change_no_logit_of_transformers(name):
    transformers = need_transformers()
    import torch

    config = make_config(name)
    tokens = torch.arange(20)[None]

    def logits(config):
        torch.manual_seed(0)
        model = getattr(transformers, config.architectures[0])(config).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        with torch.no_grad():
            return model(tokens).logits

    wanted, names = logits(config), []
    for key, value in (config.to_dict() | GENERATION).items():
        skipped = ("dtype", "return_dict", "output_attentions", "output_hidden_states", "_attn_implementation")
        if without_effect(key) and key not in skipped and not key.endswith("_token_id"):
            setattr(config, key, 0.5 if "dropout" in key else changed(value))
            names.append(key)
    assert len(names) > 10 and "use_cache" in names and "attention_dropout" in names
    assert torch.equal(logits(config), wanted)


def test_rows_longer_than_an_indexer_chooses_from_are_refused(tmp_path):
    """DeepSeek-V3.2: up to `index_topk` tokens it chooses all keys. Without a directory there are no tensors of the
    indexer, so such a model is not exported."""
    published = saved(make_config("deepseek-v32"), tmp_path)
    model = read_config(published)
    assert model.extras.indexed_keys == 64 and fit_length(model, 64) == model
    with pytest.raises(ValueError, match=r"= 65, but in .* an indexer chooses 64 keys \(index_topk\)"):
        fit_length(model, 65)
    with pytest.raises(UnsupportedModelError, match="not exported"):
        infer_family(model)
