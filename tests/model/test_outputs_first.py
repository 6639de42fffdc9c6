"""Matrices with their outputs first, as a sampler on a CPU has them: the same numbers as the trainer's."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from grpo_roc_jax.engine.config import RolloutConfig, SamplingConfig
from grpo_roc_jax.engine.engine import make_engine
from grpo_roc_jax.engine.protocol import SingleTurn
from grpo_roc_jax.engine.publish import Publisher
from grpo_roc_jax.model.config import GatedDelta, Mixture, ModelConfig, SomeExtras
from grpo_roc_jax.model.low_precision import MATRICES
from grpo_roc_jax.model.outputs_first import FEW_ROWS, OutputsFirst, multiply, turned
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh
from tests.helpers.reference import random_params
from tests.helpers.rollout_fakes import one_rollout

MODEL = ModelConfig(d_model=16, layers=2, heads=4, kv_heads=2, head_dim=8, d_ff=24, vocab_size=64, qk_norm=True)
DELTA = GatedDelta(key_heads=1, value_heads=2, key_dim=4, value_dim=6, every=2)
LATENT = SomeExtras(latent=12, latent_query=8, latent_key=4, latent_value=8)
MODELS = {
    "dense": MODEL,
    "untied": replace(MODEL, tie_embeddings=False),
    "recurrent": replace(MODEL, windows=DELTA, extras=SomeExtras(rotary_share=0.5)),
    "experts": replace(MODEL, experts=Mixture(4, 2, shared=8, dense_layers=1, dense_ff=8)),
    "latent": replace(MODEL, kv_heads=1, head_dim=16, qk_norm=False, extras=LATENT),
}
WIDE = replace(MODEL, d_model=512, head_dim=64, d_ff=1152, tie_embeddings=False, compute_dtype="float32")
"""Layers of 2.2 million weights, which an engine on a CPU has with their outputs first."""


@pytest.mark.parametrize(("rows", "inputs"), [(3, 1), (3, 2), (FEW_ROWS, 1)])
def test_the_product_is_that_of_the_matrix(rows, inputs):
    rng = np.random.default_rng(0)
    x, matrix = (rng.normal(size=size).astype(np.float32) for size in ((rows, 4, 5), (5, 4, 6)))
    matrix = matrix.swapaxes(0, 1) if inputs == 2 else matrix
    there = turned(matrix, inputs)
    assert there.shape == matrix.shape and there.dtype == matrix.dtype
    np.testing.assert_allclose(multiply(x, there, None), np.tensordot(x, matrix, inputs), atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_the_sampler_computes_what_the_trainer_does(name):
    """The check of the weights compares their log-probabilities; all matrices but those of experts are turned."""
    model, mesh = MODELS[name], make_mesh(ShardingConfig(), jax.devices()[:1])
    publisher = Publisher(model, mesh, 1e-4, outputs_first=True)
    published = publisher.publish(random_params(model), 1)
    assert published.check_gap < 1e-4
    for layer in published.params["layers"]:
        experts = {"w_gate", "w_up", "w_down"} if "router" in layer else set()
        names = {name for name, leaf in layer.items() if isinstance(leaf, OutputsFirst)}
        assert names == (set(MATRICES) & set(layer)) - experts and len(names) > 2
    like = publisher.published_like(random_params(model))
    assert jax.tree.map(np.shape, like) == jax.tree.map(np.shape, published.params)


def test_rollouts_are_those_of_a_small_engine():
    """Two engines on one device and on the first two, of which only the first one has large layers on one CPU."""
    rollout = RolloutConfig(slots=4, max_prompt_tokens=16, max_response_tokens=16, append_lengths=(16,))
    requests = [one_rollout(i, np.arange(5, 9 + i, dtype=np.int32), 12, 0, step=0) for i in range(4)]
    rollouts = []
    for devices in (1, 2):
        mesh = make_mesh(ShardingConfig(data=devices), jax.devices()[:devices])
        engine = make_engine(WIDE, rollout, SamplingConfig(), (3,), mesh)
        weights = engine.publish(random_params(WIDE), 0)
        assert isinstance(weights.params["layers"][0]["wq"], OutputsFirst) == (devices == 1)
        rollouts.append(engine.run(weights, requests, SingleTurn())[0])
    for row, other in zip(*rollouts, strict=True):
        np.testing.assert_array_equal(row.tokens, other.tokens)
        np.testing.assert_allclose(row.logprobs, other.logprobs, atol=1e-4)
