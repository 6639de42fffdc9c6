"""The engine with the options of the newer families: rows of several turns equal the training forward."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from grpo_roc_jax.engine.config import SamplingConfig
from grpo_roc_jax.engine.engine import make_engine
from grpo_roc_jax.model.config import GatedDelta, Mixture, ModelConfig, SlidingWindows, SomeExtras
from grpo_roc_jax.model.rope_scaling import ProportionalRopeScaling, YarnRopeScaling
from grpo_roc_jax.model.transformer import init_params
from tests.helpers.engine_checks import reference_gap
from tests.helpers.rollout_fakes import ROLLOUT, STOPS, FakeTools, make_requests

SHAPE = {"d_model": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "d_ff": 24, "vocab_size": 97}
DELTA = GatedDelta(key_heads=2, value_heads=4, key_dim=6, value_dim=10, every=2)
SIGMOID = Mixture(8, 2, shared=12, scores="sigmoid", groups=4, top_groups=2, dense_layers=1, dense_ff=40, replay=True)
YARN = YarnRopeScaling(factor=8.0, original_length=16)
LATENT = SomeExtras(latent=12, latent_query=20, latent_key=6, latent_value=10, rotary_pairs=True)
MODELS = {
    "gpt_oss": ModelConfig(
        **SHAPE,
        qkv_bias=True,
        activation="clamped_swiglu",
        extras=SomeExtras(sinks=True, output_bias=True),
        windows=SlidingWindows((16, 0)),
        rope_scaling=YARN,
        experts=Mixture(4, 2, biases=True),
    ),
    "deepseek_v3": ModelConfig(
        **SHAPE | {"kv_heads": 1, "head_dim": 16}, extras=LATENT, rope_scaling=YARN, experts=SIGMOID
    ),
    "qwen3_5_moe_text": ModelConfig(
        **SHAPE,
        qk_norm=True,
        norm_offset=True,
        norm_eps=1e-4,
        windows=DELTA,
        extras=SomeExtras(rotary_share=0.5),
        experts=Mixture(4, 2, shared=12, shared_gate=True),
    ),
    "granite4_h": ModelConfig(
        **SHAPE,
        norm_eps=1e-4,
        windows=replace(DELTA, form="mamba2", attention=(0,)),
        extras=SomeExtras(query_scale=4.0, embed_factor=0.5, residual_factor=0.4, rotary_layers=(False,)),
    ),
    "glm4_moe": ModelConfig(**SHAPE, qkv_bias=True, extras=SomeExtras(rotary_share=0.5), experts=SIGMOID),
    "glm4, granite": ModelConfig(
        **SHAPE,
        qkv_bias=True,
        post_norms=True,
        extras=SomeExtras(
            rotary_share=0.5,
            rotary_pairs=True,
            query_scale=4.0,
            residual_factor=0.4,
            embed_factor=3.0,
            logit_divisor=1.5,
        ),
    ),
    "ministral3": ModelConfig(**SHAPE, extras=SomeExtras(query_growth=0.3, query_length=9), rope_scaling=YARN),
    "gemma4": ModelConfig(
        **SHAPE,
        qk_norm=True,
        post_norms=True,
        norm_eps=1e-3,
        extras=SomeExtras(scale_embed=True, query_scale=1.0, value_norm=True, layer_factors=True, logit_cap=3.0),
        windows=SlidingWindows((16, 0), 1e4, full_head_dim=12, full_kv_heads=1, full_keys_as_values=True),
        rope_scaling=ProportionalRopeScaling(share=0.5),
    ),
    "gemma4_small": ModelConfig(
        **SHAPE | {"layers": 4},
        qk_norm=True,
        post_norms=True,
        norm_eps=1e-3,
        extras=SomeExtras(
            scale_embed=True, query_scale=1.0, value_norm=True, layer_factors=True, logit_cap=3.0, layer_embed=10
        ),
        windows=SlidingWindows((16, 0), 1e4, full_head_dim=12, full_kv_heads=1, shared_layers=2, shared_ff=40),
    ),
    "llama4": ModelConfig(
        **SHAPE,
        windows=SlidingWindows((16, 0), chunked=True),
        extras=SomeExtras(
            rotary_pairs=True,
            rotary_layers=(True, False),
            rotated_norm=True,
            query_growth=0.3,
            query_length=9,
            query_unrotated=True,
        ),
        experts=Mixture(4, 2, norm_weights=False, scores="sigmoid_input", shared=12, every=2, dense_ff=40, replay=True),
    ),
}
QUICK = ("deepseek_v3", "gpt_oss")
"""Latent keys, windows and experts. Appends hold tokens of several rows, as everywhere on a CPU."""


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_rows_of_several_turns_equal_the_training_forward(name):
    model = MODELS[name]
    drawn = jax.jit(partial(init_params, config=model))(jax.random.key(1))
    leaves, tree = jax.tree.flatten(drawn)
    keys = jax.random.split(jax.random.key(2), len(leaves))  # biases and sinks begin as zeros
    leaves = [leaf + 0.05 * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
    params = jax.tree.unflatten(tree, leaves)
    params |= {"embed": 6.0 * params["embed"]}
    engine = make_engine(model, replace(ROLLOUT, narrow=(), slots=6), SamplingConfig(), STOPS, seed=11)
    requests = make_requests(3, 3)
    rollouts, _ = engine.run(engine.publish(params, 5), requests, FakeTools(requests))
    assert sum(len(rollout.turns) for rollout in rollouts) > len(rollouts)

    assert reference_gap(params, rollouts, model) < 2e-5
    if model.experts.replay:
        for rollout in rollouts:
            dense, known = rollout.routes[:, 0], rollout.routes[np.flatnonzero(rollout.policy_mask) - 1, 1]
            assert (dense == -1).all() and (known >= 0).all() and (known < model.experts.count).all()
