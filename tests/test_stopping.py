"""A tokenizer whose padding is its end token: the end of a turn is trained on, padding is not, and turns end."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from grpo_roc_jax.learner.pack import BatchConfig, pack
from grpo_roc_jax.learner.update import OptimConfig, UpdateConfig, init_train_state, make_update_step
from grpo_roc_jax.method.surrogate import NegativeLogLikelihood
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh, shard_batch
from grpo_roc_jax.model.transformer import forward, unembed
from grpo_roc_jax.run.supervised import trace_rows
from grpo_roc_jax.text.chat_format import Trace, make_chat
from grpo_roc_jax.text.config import TextConfig
from grpo_roc_jax.text.tokenizer import load_tokenizer
from grpo_roc_jax.types import Problem

SAID = ("yes", "no", "perhaps not")
BATCH = BatchConfig(row_length=64, rows=2)


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}))
    config = TextConfig(tokenizer=str(folder))
    return make_chat(config, load_tokenizer(config))


def packed(chat):
    traces = [Trace(Problem(str(i), "?", "", "s"), (f"</reason>{text}",)) for i, text in enumerate(SAID)]
    return pack(trace_rows(traces, chat), BATCH, 4)[0]


def test_the_end_of_a_turn_is_trained_on_and_padding_is_not(chat):
    assert chat.tokenizer.pad_id == chat.tokenizer.eos_id == chat.end_id
    batch = packed(chat)
    ends = (batch.tokens == chat.end_id) & (batch.weights > 0)
    assert ends.sum() == len(SAID)
    assert (batch.segment_ids == 0).sum() > 0
    assert (batch.weights[batch.segment_ids == 0] == 0).all()
    assert not batch.policy_mask[batch.segment_ids == 0].any()


@pytest.mark.slow
def test_turns_end_after_training(chat):
    model = ModelConfig(
        d_model=32, layers=1, heads=2, kv_heads=1, head_dim=16, d_ff=64, vocab_size=chat.tokenizer.vocab_size
    )
    mesh = make_mesh(ShardingConfig(data=1), jax.devices()[:1])
    optim = OptimConfig(lr=1e-2, warmup_steps=0)
    state = init_train_state(jax.random.key(0), model, optim, mesh)
    step = make_update_step(model, NegativeLogLikelihood(), optim, UpdateConfig(vocab_chunk=64), mesh)
    tokens = chat.trace_row(Trace(Problem("p", "?", "", "s"), (f"</reason>{SAID[2]}",)))[0][None]

    def ending(params):
        """Probability of the end token at each position after which a turn might end."""
        positions = jnp.arange(tokens.shape[1])[None]
        hidden = forward(params, jnp.asarray(tokens), positions, jnp.ones_like(positions), model)
        logits = unembed(params, hidden, model)
        return np.asarray(jax.nn.softmax(logits)[0, :, chat.end_id])

    assert ending(state.params)[-2] < 0.1
    batch = shard_batch(packed(chat), mesh)
    for _ in range(60):
        state, _ = step(state, batch)
    after = ending(state.params)
    assert after[-2] > 0.9  # where the turn ends
    assert after[-len(SAID[2]) : -2].max() < 0.1  # and not inside it
