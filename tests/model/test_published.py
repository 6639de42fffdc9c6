"""config.json is read as transformers reads it; the text part of a vision-language directory."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest

from grpo_roc_jax.commands.export import export_adapter, export_model
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.convert import load_params, read_published, resolve_config
from grpo_roc_jax.model.families import UnsupportedModelError, find_family
from grpo_roc_jax.model.lora import LowRank, attach, load_adapter, read_lora, save_adapter
from grpo_roc_jax.model.published import infer_family, read_config, same_model, without_effect
from grpo_roc_jax.model.rotary import rotary_frequencies
from grpo_roc_jax.model.safetensors_io import read_header
from grpo_roc_jax.run.components import fit_length
from tests.helpers import published_models as models
from tests.helpers.whole_rows import row_logits
from tests.model.test_convert import MODELS, make_directory, read_all, rewrite
from tests.model.test_lora import MODEL, random_adapter


def saved(config, folder) -> dict:
    config.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("name", [*models.ONE_PER_FAMILY, "qwen2-sliding"])
def test_a_missing_key_means_what_it_means_to_transformers_or_is_refused(tmp_path, name):
    transformers = models.need_transformers()
    full = saved(models.make_config(name), tmp_path)
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
    transformers = models.need_transformers()
    full = saved(models.make_config(name), tmp_path) | {"rope_parameters": {"rope_theta": 5e4}}
    factors = read_config(full).rotary_dim // 2
    lists = {f"{part}_factor": [n + i / 8 for i in range(factors)] for n, part in ((1, "short"), (2, "long"))}
    scaling = {"type": kind} | RESCALINGS[kind] | (lists if kind == "longrope" else {})
    older = full | {"rope_parameters": None, "rope_theta": 5e4}
    apart = [FIRST | {"rope_scaling": scaling}] if kind != "linear" else []
    for more in [{"rope_scaling": scaling | (FIRST if apart else {})}, *apart]:
        (tmp_path / "config.json").write_text(json.dumps(older | more))
        config = transformers.AutoConfig.from_pretrained(tmp_path)
        wanted = getattr(transformers, config.architectures[0])(config).model.rotary_emb
        model = read_config(older | more)
        np.testing.assert_allclose(rotary_frequencies(model, "plain"), wanted.inv_freq, rtol=1e-5)
        assert model.rope_scaling.magnitude == pytest.approx(wanted.attention_scaling)


OTHERS = {int: lambda value: value + 1, float: lambda value: value * 2 + 0.5}
OTHERS |= {bool: lambda value: not value, str: lambda value: f"{value}x"}
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


@pytest.mark.parametrize("name", models.ONE_PER_FAMILY)
def test_a_key_changes_the_model_or_is_refused_unless_it_can_change_nothing(tmp_path, name):
    """Every key that transformers writes, with another value; what is read with another key passes unchanged too."""
    full = saved(models.make_config(name), tmp_path)
    general = dict.fromkeys(models.need_transformers().GenerationConfig().to_dict()) | GENERATION
    model, passed = read_config(full), 0
    for key, value in (general | models.make_config(name).to_dict() | full).items():
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
    config, tokens = models.make_config(name), models.random_tokens(1, 20)

    model, names = models.drawn(config.architectures[0], config), []
    wanted = models.logits_of(model, tokens)
    for key, value in (config.to_dict() | GENERATION).items():
        skipped = ("dtype", "return_dict", "output_attentions", "output_hidden_states", "_attn_implementation")
        if without_effect(key) and key not in skipped and not key.endswith("_token_id"):
            setattr(config, key, 0.5 if "dropout" in key else changed(value))
            names.append(key)
    assert len(names) > 10 and "use_cache" in names and "attention_dropout" in names
    other = models.drawn(config.architectures[0], config)
    other.load_state_dict(model.state_dict())
    assert (models.logits_of(other, tokens) == wanted).all()


def test_rows_longer_than_an_indexer_chooses_from_are_refused(tmp_path):
    """DeepSeek-V3.2: up to `index_topk` tokens it chooses all keys. Without a directory there are no tensors of the
    indexer, so such a model is not exported."""
    published = saved(models.make_config("deepseek-v32"), tmp_path)
    model = read_config(published)
    assert model.extras.indexed_keys == 64 and fit_length(model, 64) == model
    with pytest.raises(ValueError, match=r"= 65, but in .* an indexer chooses 64 keys \(index_topk\)"):
        fit_length(model, 65)
    with pytest.raises(UnsupportedModelError, match="not exported"):
        infer_family(model)


ADAPTED = LowRank(rank=2, alpha=8.0, targets=("q_proj", "v_proj"))

ONE_VISION_LAYER = {"hidden_size": 16, "num_heads": 2, "depth": 1, "intermediate_size": 16, "out_hidden_size": 32}
SIGLIP = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
SIGLIP |= {"image_size": 28, "patch_size": 14}
PIXTRAL = SIGLIP | {"model_type": "pixtral", "head_dim": 8}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
INTERLEAVED = SECTIONS | {"mrope_interleaved": True}
WHOLE = {
    "Qwen2_5_VL": (ONE_VISION_LAYER | {"fullatt_block_indexes": [0]}, {"rope_parameters": SECTIONS}),
    "Qwen3VL": (ONE_VISION_LAYER | {"deepstack_visual_indexes": [0]}, {"rope_parameters": INTERLEAVED, "head_dim": 8}),
    "Gemma3": (SIGLIP, {"head_dim": 16, "sliding_window": 8, "num_hidden_layers": 7}),
    "Gemma4": (
        SIGLIP | {"num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 16},
        {"head_dim": 16, "global_head_dim": 24, "sliding_window": 8, "num_hidden_layers": 6, "pad_token_id": 0}
        | {"layer_types": ["sliding_attention", "full_attention"] * 3, "num_kv_shared_layers": 4}
        | {"hidden_size_per_layer_input": 10, "vocab_size_per_layer_input": models.VOCAB, "use_double_wide_mlp": True},
    ),
    "Mistral3": (PIXTRAL, {"model_type": "mistral", "sliding_window": 8}),
}


def save_whole(name, folder):
    """Saves a vision-language model and returns it; norms and biases are random too."""
    vision, text = WHOLE[name]
    config = getattr(models.need_transformers(), f"{name}Config")(text_config=models.TEXT | text, vision_config=vision)
    model = models.drawn(f"{name}ForConditionalGeneration", config)
    model.save_pretrained(folder)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_text_alone_gives_the_logits_of_the_whole_model(tmp_path, name, caplog):
    """With text alone the three rotary sections of the Qwen models see one position, so plain rotation is exact."""
    tokens = models.random_tokens(2, 40)
    wanted = models.logits_of(save_whole(name, tmp_path / "in"), tokens)
    ours = resolve_config(ModelConfig(path=str(tmp_path / "in")))
    params = load_params(tmp_path / "in", ours)
    assert any("only the text part is used" in record.message for record in caplog.records)
    assert wanted.std() > 0.3
    np.testing.assert_allclose(row_logits(params, tokens, ours), wanted, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Gemma3", "Qwen2_5_VL"])
def test_peft_loads_an_adapter_into_the_whole_model_and_the_reverse(tmp_path, name):
    model, tokens = save_whole(name, tmp_path / "base"), models.random_tokens(2, 12)
    ours = resolve_config(ModelConfig(path=str(tmp_path / "base")))
    adapter = random_adapter(ADAPTED, ours)
    export_adapter(adapter, ADAPTED, ours, tmp_path / "adapter")
    wrapped = models.need_reference("peft").PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    assert {name for name, _ in wrapped.named_parameters() if "lora_" in name and "language_model" not in name} == set()
    params = attach(load_params(tmp_path / "base", ours), adapter, ADAPTED)
    np.testing.assert_allclose(row_logits(params, tokens, ours), models.logits_of(wrapped, tokens), atol=1e-4)
    wrapped.save_pretrained(tmp_path / "by_peft")
    family = find_family(read_published(tmp_path / "base"))
    again = load_adapter(tmp_path / "by_peft", read_lora(tmp_path / "by_peft"), ours, family)
    jax.tree.map(np.testing.assert_array_equal, again, adapter)


@pytest.mark.parametrize(("kind", "within"), [("gemma3", True), ("qwen3_5", False), (None, False)])
def test_names_of_an_adapter_are_those_of_the_model_that_transformers_loads(tmp_path, kind, within):
    """From a directory of Qwen3.5 `AutoModelForCausalLM` makes the text model, from one of Gemma 3 the whole one."""
    config = {"vision_config": {}, "model_type": kind} if kind else {"model_type": "qwen3"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model, family = replace(MODEL, path=str(tmp_path)), find_family({"architectures": ["Qwen3ForCausalLM"]})
    (tmp_path / "adapter").mkdir()
    adapter = random_adapter(ADAPTED, model)
    save_adapter(adapter, ADAPTED, model, family, tmp_path / "adapter", "base")
    names = read_header(tmp_path / "adapter" / "adapter_model.safetensors")
    start = "base_model.model.model.language_model.layers." if within else "base_model.model.model.layers."
    assert all(name.startswith(start) for name in names) and len(names) == 8
    jax.tree.map(np.testing.assert_array_equal, load_adapter(tmp_path / "adapter", ADAPTED, model, family), adapter)


def whole_of(folder, name, prefix, kind="qwen3_vl"):
    """A directory of a text model, rewritten as that of a vision-language model; the first ones had no nested part."""
    text = make_directory(folder, MODELS[name])
    left_out = "visual.patch_embed.weight", "model.visual.patch_embed.weight", "mtp.fc.weight"
    renamed = {prefix(name): value for name, value in text.items()}
    rewrite(folder, lambda _: renamed | dict.fromkeys(left_out, np.ones((4, 4), np.float32)))
    config = json.loads((folder / "config.json").read_text())
    outer = {"architectures": ["QwenVL"], "model_type": kind, "vision_config": {}, "image_token_id": 5}
    if kind == "qwen2_5_vl":
        outer |= {key: config[key] for key in config.keys() - {"architectures", "model_type"}}
        outer |= {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    else:
        config.pop("architectures")
        outer |= {"torch_dtype": "float32", "tie_word_embeddings": config["tie_word_embeddings"]}
        nested = {"model_type": f"{kind}_text", "mtp_num_hidden_layers": 1, "tie_word_embeddings": False}
        outer["text_config"] = config | nested
    (folder / "config.json").write_text(json.dumps(outer))
    return text


@pytest.mark.parametrize(
    ("name", "prefix", "kind"),
    [
        ("qwen3", lambda name: name.replace("model.", "model.language_model.", 1), "qwen3_vl"),
        ("qwen3", lambda name: f"language_model.{name}", "qwen3_vl"),
        ("qwen3_5_text", lambda name: name.replace("model.", "model.language_model.", 1), "qwen3_5"),
        ("qwen2", lambda name: name, "qwen2_5_vl"),
    ],
    ids=["inside", "around", "tied outside", "flat"],
)
def test_names_of_the_text_part_as_the_hub_has_them(tmp_path, name, prefix, kind):
    """Other tensors are left out, and the export is a plain directory of the text model."""
    text = whole_of(tmp_path / "in", name, prefix, kind)
    config = resolve_config(ModelConfig(path=str(tmp_path / "in")))
    assert same_model(config, MODELS[name])
    params = load_params(tmp_path / "in", config)
    export_model(params, config, tmp_path / "out", dtype="float32")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert not {"text_config", "vision_config", "mtp_num_hidden_layers"} & set(written)
    assert same_model(read_config(written), MODELS[name])
    after = read_all(tmp_path / "out")
    assert {key: value.tobytes() for key, value in after.items()} == {key: v.tobytes() for key, v in text.items()}


def test_gemma_3_leaves_out_what_transformers_fills_in():
    """As the text part of the 4B model states itself."""
    text = {"hidden_size": 2560, "intermediate_size": 10_240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    model = read_config({"model_type": "gemma3", "vision_config": {}, "text_config": text})
    assert (model.heads, model.kv_heads, model.head_dim, model.vocab_size) == (8, 4, 256, 262_208)
