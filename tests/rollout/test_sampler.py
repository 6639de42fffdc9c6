"""What a sampler refuses before it starts anything: parts that do not fit each other, and other types."""

from dataclasses import replace

import jax
import pytest

from grpo_roc_jax.engine.config import RolloutConfig, SamplingConfig
from grpo_roc_jax.engine.engine import make_engine
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.transformer import init_params
from grpo_roc_jax.rollout.sampler import Sampler
from grpo_roc_jax.text.config import TextConfig
from grpo_roc_jax.text.tokenizer import load_tokenizer
from grpo_roc_jax.tools.config import ToolsConfig

TOKENIZER = load_tokenizer(TextConfig())
MODEL = ModelConfig(d_model=8, layers=1, heads=2, kv_heads=2, head_dim=4, d_ff=8, vocab_size=TOKENIZER.vocab_size)
ROLLOUT = RolloutConfig(slots=2, max_prompt_tokens=16, max_response_tokens=8, append_lengths=(16,))


def sampler(tools=None, params=None, **changes):
    params = init_params(jax.random.key(0), MODEL) if params is None else params
    limits = ToolsConfig(workers=1, preload=())
    return Sampler(replace(MODEL, **changes), params, TOKENIZER, tools, rollout=ROLLOUT, limits=limits)


def engine(vocab_size, stops=()):
    return make_engine(replace(MODEL, vocab_size=16), ROLLOUT, SamplingConfig(), stops, vocab_size=vocab_size)


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda: sampler(vocab_size=8), rf"vocab_size = {TOKENIZER.vocab_size}; must be from 1 to 8"),
        (lambda: sampler(vocab_size=0), "must be from 1 to 0"),
        (lambda: sampler(layers=2), r"layers/\w+ is \(1, .*\) in params and \(2, .*\) in the model"),
        (lambda: sampler(heads=1, kv_heads=1, head_dim=8), r"layers/w\w is \(1, 8, 2, 4\) in params"),
        (lambda: sampler(params=()), "params is of type tuple; must be the parameters of the model"),
        (lambda: sampler(tools=[print]), r"tools is of type list; must be a Registry: registry = Registry\(\)"),
        (lambda: engine(17), "vocab_size = 17; must be from 1 to 16"),
        (lambda: engine(0), "vocab_size = 0; must be from 1 to 16"),
        (lambda: engine(12, [12]), r"stop ids \[12\] lie outside the vocabulary of 12"),
    ],
)
def test_parts_that_do_not_fit_are_refused(refused, message):
    with pytest.raises((ValueError, TypeError), match=message):
        refused()


def test_an_embedding_with_more_rows_than_the_tokenizer_has_ids_fits():
    padded = replace(MODEL, vocab_size=TOKENIZER.vocab_size + 8)
    with sampler(vocab_size=padded.vocab_size, params=init_params(jax.random.key(0), padded)) as made:
        assert made.weights.version == 0
