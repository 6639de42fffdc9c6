"""Different prompts that begin alike share the blocks of their beginning, also where they are written at once."""

import jax
import numpy as np
import pytest

from grpo_roc_jax.model.transformer import init_params
from tests.engine.test_stream import assert_same_tokens, engine_of
from tests.helpers.rollout_fakes import MODEL, FakeTools, one_rollout


@pytest.mark.parametrize("lengths", [(40, 36, 35), (36, 40, 34), (34, 20, 40)])
def test_prompts_of_one_round_read_nothing_that_is_not_written(lengths):
    """Blocks and appends of 16 tokens: the first prompt takes three appends, and the others begin with its second
    block, which is not written before the second append."""
    drawn = np.random.default_rng(3).integers(8, 97, size=(4, 40)).astype(np.int32)
    prompts = [np.concatenate([drawn[0][:32], drawn[i]])[:n] for i, n in enumerate(lengths, 1)]
    requests = [
        one_rollout(place, prompt, 12, sample, step=2) for place, prompt in enumerate(prompts) for sample in range(2)
    ]  # with siblings: a block of a single row is not shared on this backend
    engine, other = engine_of(kv_tokens=0), engine_of(kv_tokens=0)  # two pools
    sampler = engine.publish(init_params(jax.random.key(1), MODEL), 5)  # weights that look at all tokens
    together, stats = engine.run(sampler, requests, FakeTools(requests))
    alone = [other.run(sampler, [request], FakeTools([request]))[0][0] for request in requests]
    assert stats.cached_tokens >= 32
    assert_same_tokens(together, alone)
