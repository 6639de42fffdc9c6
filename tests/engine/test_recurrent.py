"""The engine with recurrent layers: their memory belongs to one position, so every way to a row must end there."""

import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax.engine.config import NoStepLimit, PartialRows, SamplingConfig
from grpo_roc_jax.engine.engine import make_engine
from grpo_roc_jax.engine.records import RunOptions
from grpo_roc_jax.engine.table import awaits_observation
from grpo_roc_jax.model.config import GatedDelta, ModelConfig, SomeExtras
from grpo_roc_jax.model.convert import save_params
from grpo_roc_jax.model.published import infer_family, write_config
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh
from grpo_roc_jax.model.transformer import forward, init_params, unembed
from tests.helpers.published_models import need_transformers
from tests.helpers.rollout_fakes import ROLLOUT, STOPS, FakeTools, changed, make_requests, one_rollout

DELTA = GatedDelta(key_heads=2, value_heads=4, key_dim=6, value_dim=10, every=2)
MODEL = ModelConfig(
    d_model=32, layers=2, heads=4, kv_heads=2, head_dim=8, d_ff=64, vocab_size=97, qk_norm=True, windows=DELTA
)
MODEL = replace(MODEL, norm_offset=True, norm_eps=1e-4, extras=SomeExtras(rotary_share=0.5))
SETTINGS = replace(ROLLOUT, narrow=(), slots=6)
WIDTH = 128


@pytest.fixture(scope="module")
def params():
    drawn = jax.jit(partial(init_params, config=MODEL))(jax.random.key(1))
    return drawn | {"embed": 6.0 * drawn["embed"]}


@pytest.fixture(scope="module")
def engine():
    return make_engine(MODEL, SETTINGS, SamplingConfig(), STOPS, seed=11)


def run(engine, params, requests, tools=None, **changes):
    sampler = engine.publish(params, 5)
    return changed(engine, **changes).run(sampler, requests, tools or FakeTools(requests), RunOptions())


@jax.jit
def reference(params, tokens):
    T = tokens.shape[1]
    hidden = forward(params, tokens, jnp.arange(T)[None], jnp.ones_like(tokens), MODEL)
    return jax.nn.log_softmax(unembed(params, hidden, MODEL), axis=-1)


def gap(params, rollouts):
    """Largest difference from the training forward pass over the sampled tokens."""
    largest = 0.0
    for one in rollouts:
        padded = np.zeros((1, WIDTH), np.int32)
        padded[0, : len(one.tokens)] = one.tokens
        table = np.asarray(reference(params, padded))[0]
        at = np.flatnonzero(one.policy_mask)
        largest = max(largest, np.abs(table[at - 1, one.tokens[at]] - one.logprobs[at]).max(initial=0.0))
    return largest


class StopText(FakeTools):
    """Turns also end after every pair of tokens whose sum is divisible by 5, wherever it lies in a chunk."""

    def __init__(self, requests, **options):
        super().__init__(requests, max_turns=9, **options)
        self.cut = 0

    def find_stop(self, index, new_tokens, before):
        joined = np.concatenate([before[-1:], new_tokens])
        hits = np.flatnonzero((joined[1:] + joined[:-1]) % 5 == 0) + (2 if len(before) == 0 else 1)
        if not len(hits):
            return None
        self.cut += len(new_tokens) - int(hits[0])
        return int(hits[0])


def test_rows_that_wait_share_prompts_and_take_observations_equal_the_training_forward(engine, params):
    """20 rows in 6 slots: prompts are copied within a round and written again later; rows wait for tools while others
    decode; observations of many lengths are padded."""
    requests = make_requests()
    rollouts, stats = run(engine, params, requests)
    assert sum(len(one.turns) for one in rollouts) > 1.5 * len(rollouts)
    assert stats.forks > 0 and stats.reused == 0 and stats.prompts > 4
    assert gap(params, rollouts) < 2e-5
    again, _ = run(engine, params, requests, pipeline="on")
    assert gap(params, again) < 2e-5
    for one, other in zip(rollouts, again, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)


@pytest.mark.parametrize("pipeline", ["off", "on"])
def test_a_row_cut_within_a_chunk_forgets_what_was_cut(engine, params, pipeline):
    requests = make_requests(3, 3)
    tools = StopText(requests)
    rollouts, _ = run(engine, params, requests, tools, pipeline=pipeline)
    assert tools.cut >= 10 and max(len(one.turns) for one in rollouts) >= 3
    assert gap(params, rollouts) < 2e-5


def test_prompts_of_one_token_begin_empty_in_a_used_slot(engine, params):
    requests = [
        one_rollout(place, np.array([9 + place], np.int32), 40, s, step=2) for place in range(2) for s in range(9)
    ]
    rollouts, _ = run(engine, params, requests)
    assert gap(params, rollouts) < 2e-5


def test_partial_rows_continue_exactly_where_they_stopped(engine, params):
    requests = make_requests(3, 4)
    tools = FakeTools(requests, latency_polls=3)

    late = {"clock": lambda: 1e6 if tools.now >= 4 else 0.0, "step_limit": PartialRows(60.0)}
    first, _ = run(engine, params, requests, tools, **late)
    cut = [i for i, one in enumerate(first) if one.stop == "cancelled"]
    assert {awaits_observation(first[i]) for i in cut} == {True, False}
    resumed = [replace(requests[i], resume=first[i]) for i in cut]
    tools = FakeTools(resumed)
    tools.turns = {new: len(first[i].turns) - awaits_observation(first[i]) for new, i in enumerate(cut)}
    rollouts, _ = run(engine, params, resumed, tools, step_limit=NoStepLimit())
    assert all(len(one.tokens) > len(first[i].tokens) for one, i in zip(rollouts, cut, strict=True))
    assert gap(params, rollouts) < 2e-5


@pytest.mark.slow
def test_greedy_rows_over_several_turns_are_those_of_transformers(engine, params, tmp_path):
    """Of the exported model, which transformers loads."""
    transformers = need_transformers()
    import torch

    save_params(params, MODEL, infer_family(MODEL), tmp_path, dtype=jnp.float32)
    (tmp_path / "config.json").write_text(json.dumps(write_config(MODEL)))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert type(model).__name__ == "Qwen3_5ForCausalLM"
    requests = make_requests(2, 2, temperature=0.0)
    rollouts, _ = run(engine, params, requests, StopText(requests))
    assert max(len(one.turns) for one in rollouts) >= 3
    for one in rollouts:
        with torch.no_grad():
            best = model(torch.tensor(one.tokens[None].astype(np.int64))).logits[0].argmax(-1).numpy()
        mask = one.policy_mask[1:]
        np.testing.assert_array_equal(one.tokens[1:][mask], best[:-1][mask])


@pytest.mark.slow
def test_rows_on_a_mesh_and_in_narrow_programs_equal_the_training_forward(params):
    requests = make_requests(3, 4)
    for mesh in (None, make_mesh(ShardingConfig(data=2, fsdp=2, tensor=2))):
        settings = replace(SETTINGS, slots=16, narrow=(2, 4), append_rows=3)
        engine = make_engine(MODEL, settings, SamplingConfig(), STOPS, mesh, seed=11)
        sampler = engine.publish(params, 5)
        engine.warmup(sampler)
        tools = StopText(requests)
        rollouts, stats = engine.run(sampler, requests, tools)
        assert stats.compilations == 0 and tools.cut > 10
        assert gap(params, rollouts) < 2e-5
