"""The text part of a vision-language directory loads as the family that computes the same."""

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
from grpo_roc_jax.model.published import read_config, same_model
from grpo_roc_jax.model.safetensors_io import read_header
from grpo_roc_jax.run.policy import parameter_count
from tests.helpers.published_models import TEXT, VOCAB, logits_of, need_reference, need_transformers, random_tokens
from tests.helpers.whole_rows import row_logits
from tests.model.test_convert import MODELS, make_directory, read_all, rewrite
from tests.model.test_lora import MODEL, random_adapter

ADAPTED = LowRank(rank=2, alpha=8.0, targets=("q_proj", "v_proj"))

ONE_VISION_LAYER = {"hidden_size": 16, "num_heads": 2, "depth": 1, "intermediate_size": 16, "out_hidden_size": 32}
SIGLIP = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
SIGLIP |= {"image_size": 28, "patch_size": 14}
PIXTRAL = SIGLIP | {"model_type": "pixtral", "head_dim": 8}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
WHOLE = {
    "Qwen2_5_VL": (ONE_VISION_LAYER | {"fullatt_block_indexes": [0]}, {"rope_parameters": SECTIONS}),
    "Qwen3VL": (
        ONE_VISION_LAYER | {"deepstack_visual_indexes": [0]},
        {"rope_parameters": SECTIONS | {"mrope_interleaved": True}, "head_dim": 8},
    ),
    "Gemma3": (SIGLIP, {"head_dim": 16, "sliding_window": 8, "num_hidden_layers": 7}),
    "Gemma4": (
        SIGLIP | {"num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 16},
        {"head_dim": 16, "global_head_dim": 24, "sliding_window": 8, "num_hidden_layers": 6, "pad_token_id": 0}
        | {"layer_types": ["sliding_attention", "full_attention"] * 3, "num_kv_shared_layers": 4}
        | {"hidden_size_per_layer_input": 10, "vocab_size_per_layer_input": VOCAB, "use_double_wide_mlp": True},
    ),
    "Mistral3": (PIXTRAL, {"model_type": "mistral", "sliding_window": 8}),
}


def save_whole(name, folder):
    """Saves a vision-language model and returns it; norms and biases are random too."""
    transformers = need_transformers()
    import torch

    vision, text = WHOLE[name]
    config = getattr(transformers, f"{name}Config")(text_config=TEXT | text, vision_config=vision)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.3 * torch.randn_like(value) if value.ndim == 1 else 0.0)
    model.save_pretrained(folder)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_text_alone_gives_the_logits_of_the_whole_model(tmp_path, name, caplog):
    """With text alone the three rotary sections of the Qwen models see one position, so plain rotation is exact. The
    export is a directory of the text model alone, bit for bit the same."""
    tokens = random_tokens(2, 40)
    wanted = logits_of(save_whole(name, tmp_path / "in"), tokens)
    ours = resolve_config(ModelConfig(path=str(tmp_path / "in")))
    params = load_params(tmp_path / "in", ours)
    assert any("only the text part is used" in record.message for record in caplog.records)
    assert wanted.std() > 0.3
    np.testing.assert_allclose(row_logits(params, tokens, ours), wanted, atol=1e-4)

    export_model(params, ours, tmp_path / "out")
    again = need_transformers().AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert "vision_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    np.testing.assert_allclose(logits_of(again, tokens), wanted, atol=1e-5)

    def contents(values):
        dropped = ("vision", "visual", "projector", "lm_head")
        return sorted(value.tobytes() for key, value in values.items() if not any(part in key for part in dropped))

    assert contents(read_all(tmp_path / "in")) == contents(read_all(tmp_path / "out"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Gemma3", "Qwen2_5_VL"])
def test_peft_loads_an_adapter_into_the_whole_model_and_the_reverse(tmp_path, name):
    peft, model, tokens = need_reference("peft"), save_whole(name, tmp_path / "base"), random_tokens(2, 12)
    ours = resolve_config(ModelConfig(path=str(tmp_path / "base")))
    adapter = random_adapter(ADAPTED, ours)
    export_adapter(adapter, ADAPTED, ours, tmp_path / "adapter")
    wrapped = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    assert {name for name, _ in wrapped.named_parameters() if "lora_" in name and "language_model" not in name} == set()
    params = attach(load_params(tmp_path / "base", ours), adapter, ADAPTED)
    np.testing.assert_allclose(row_logits(params, tokens, ours), logits_of(wrapped, tokens), atol=1e-4)
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

    def change(values):
        values.clear()
        values.update({prefix(name): value for name, value in text.items()})
        for left_out in ("visual.patch_embed.weight", "model.visual.patch_embed.weight", "mtp.fc.weight"):
            values[left_out] = np.ones((4, 4), np.float32)

    rewrite(folder, change)
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
    return text, outer


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
    text, _ = whole_of(tmp_path / "in", name, prefix, kind)
    config = resolve_config(ModelConfig(path=str(tmp_path / "in")))
    assert same_model(config, MODELS[name])
    params = load_params(tmp_path / "in", config)
    export_model(params, config, tmp_path / "out", dtype="float32")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert not {"text_config", "vision_config", "mtp_num_hidden_layers"} & set(written)
    assert same_model(read_config(written), MODELS[name])
    after = read_all(tmp_path / "out")
    assert after.keys() == text.keys()
    for name, value in text.items():
        assert after[name].tobytes() == value.tobytes(), name


def test_gemma_3_leaves_out_what_transformers_fills_in():
    """As the text part of the 4B model states itself."""
    text = {"hidden_size": 2560, "intermediate_size": 10_240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    model = read_config({"model_type": "gemma3", "vision_config": {}, "text_config": text})
    assert (model.heads, model.kv_heads, model.head_dim, model.vocab_size) == (8, 4, 256, 262_208)
    assert parameter_count(model) / 1e9 == pytest.approx(3.88, abs=0.01)


def test_an_unknown_text_part_is_refused_by_name(tmp_path):
    _, outer = whole_of(tmp_path, "qwen3", lambda name: f"language_model.{name}")
    for change, message in (
        ({"text_config": outer["text_config"] | {"model_type": "mamba"}}, "the text part 'mamba' is not supported"),
        ({"quantization_config": {"bits": 4}}, "not supported: quantization_config"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(outer | change))
        with pytest.raises(UnsupportedModelError, match=message):
            resolve_config(ModelConfig(path=str(tmp_path)))
