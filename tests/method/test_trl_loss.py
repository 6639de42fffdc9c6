"""The losses that TRL has too are TRL's: `GRPOTrainer` computes loss and gradient of the same weights and rollouts."""

import contextlib
import io
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax import ModelConfig, Scores, read_config, train_rows
from grpo_roc_jax.learner.loss import batch_loss, token_logprobs
from grpo_roc_jax.learner.pack import BatchConfig, pack
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.model.convert import load_params, resolve_config
from grpo_roc_jax.model.transformer import forward
from grpo_roc_jax.run.components import fit_length
from tests.helpers.method_groups import make_group, other, trajectories
from tests.helpers.published_models import VOCAB, need_reference, need_transformers, save_model

pytestmark = pytest.mark.slow  # 40 s of processor time, half of it imports
PROMPT, LONGEST, GROUPS, SIZE = 4, 12, 3, 4
CORRECTED = "--surrogate.kl=corrected --surrogate.kl.coef=0.04"
LOSSES = {
    "grpo": ("methods/grpo.yaml", {"beta": 0.04, "use_bias_correction_kl": False}),
    "bnpo": ("methods/grpo.yaml --weights.normalizer=token_mean --surrogate.kl=none", {"loss_type": "bnpo"}),
    "dr_grpo": ("methods/dr_grpo.yaml", {"loss_type": "dr_grpo", "max_completion_length": 128}),
    "dapo": ("methods/dapo.yaml", {"loss_type": "dapo", "epsilon_high": 0.28}),
    "gspo": ("methods/gspo.yaml", {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}),
    "cispo": ("methods/cispo.yaml", {"loss_type": "cispo", "epsilon_high": 5.0}),
    "sapo": ("methods/sapo.yaml", {"loss_type": "sapo"}),
    "delta": ("methods/delta.yaml", {"loss_type": "bnpo", "delta": 4.0, "epsilon_high": 0.28}),
    "corrected": (f"methods/grpo.yaml {CORRECTED}", {"beta": 0.04, "use_bias_correction_kl": True}),
}
"""Name -> (our recipe, TRL's settings)."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """(TRL, the directory of a model, our configuration and parameters)."""
    need_transformers()
    with contextlib.redirect_stderr(io.StringIO()):
        os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
        trl = need_reference("trl")
    folder = tmp_path_factory.mktemp("llama")
    save_model("llama", folder)
    config = fit_length(resolve_config(ModelConfig(path=str(folder))), 64)
    return trl, folder, config, load_params(folder, config)


def make_groups(config, params):
    """Groups of random tokens with observations behind them. The policy that sampled differs from the current one by
    nearly nothing, by little or by so much that every bound is passed, row by row."""
    rng, groups = np.random.default_rng(5), []
    for index in range(GROUPS):
        lengths, observed = rng.integers(1, 9, SIZE), rng.integers(0, 4, SIZE)
        rewards = np.r_[1.0, 0.0, rng.integers(0, 2, SIZE - 2)]
        group = make_group(rewards, uid=f"p{index}", lengths=lengths, observation=observed, prompt=[PROMPT] * SIZE)
        tokens, olds = [rng.integers(1, VOCAB, t.length).astype(np.int32) for t in group.trajectories], []
        for trajectory, ids in zip(group.trajectories, tokens, strict=True):
            noise = rng.normal(0, rng.choice([1e-4, 0.1, 1.2]), len(ids)).astype(np.float32)
            olds.append(np.where(trajectory.policy_mask, current(config, params, ids) + noise, 0.0).astype(np.float32))
        groups.append(other(group, tokens=tokens, logprobs=olds))
    return groups


def current(config, params, tokens):
    """Log-probabilities of a row under the current policy."""
    ones, positions = jnp.ones((1, len(tokens)), jnp.int32), jnp.arange(len(tokens))[None]
    hidden = forward(params, jnp.asarray(tokens)[None], positions, ones, config)
    return np.asarray(token_logprobs(params, hidden, jnp.asarray(tokens)[None], ones)[0])[0]


def ours(groups, references, words, config, params):
    """(loss, gradient of the embedding, the rows)."""
    recipe = read_config(*words.split(), f"--group.size={SIZE}")
    rows = train_rows(groups, recipe, AlgoState(), scores=Scores(reference=references))
    packed, _ = pack(rows, BatchConfig(row_length=32, rows=len(rows)), len(rows))
    batch = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]) if np.ndim(leaf) else leaf, packed)
    assert packed.count == 1

    def value(params):
        hidden = forward(params, batch.tokens, batch.positions, batch.segment_ids, config)
        logprobs, entropy = token_logprobs(params, hidden, batch.tokens, batch.segment_ids)
        return batch_loss(logprobs, entropy, batch, recipe.surrogate)[0]

    loss, gradient = jax.value_and_grad(value)(params)
    return float(loss), np.asarray(gradient["embed"]), rows


def theirs(rows, trl, source, settings, folder):
    """(loss, gradient of the embedding) by TRL."""
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="a", eos_token="b")
    settings = {"num_generations": 2, "per_device_train_batch_size": 2, "report_to": "none", **settings}
    arguments = trl.GRPOConfig(output_dir=str(folder), use_cpu=True, bf16=False, **settings)
    others = {"train_dataset": Dataset.from_list([{"prompt": "a"}] * 4), "processing_class": tokenizer}
    trainer = trl.GRPOTrainer(str(source), lambda completions, **_: [0.0] * len(completions), arguments, **others)

    def completions(name, dtype):
        values = [np.asarray(getattr(row, name))[PROMPT:] for row in rows]
        return torch.tensor(np.stack([np.pad(value, (0, LONGEST - len(value))) for value in values])).to(dtype)

    sampled = completions("policy_mask", torch.long)
    present = [[t < len(row.tokens) - PROMPT for t in range(LONGEST)] for row in rows]
    inputs = {
        "prompt_ids": torch.tensor(np.stack([row.tokens[:PROMPT] for row in rows])).long(),
        "prompt_mask": torch.ones(len(rows), PROMPT, dtype=torch.long),
        "completion_ids": completions("tokens", torch.long),
        "completion_mask": torch.tensor(present).long(),
        "tool_mask": sampled,
        "advantages": torch.tensor([float(row.advantages[row.policy_mask][0]) for row in rows]),
        "old_per_token_logps": completions("logprobs_old", torch.float32),
        "ref_per_token_logps": completions("logprobs_ref", torch.float32),
        "num_items_in_batch": sampled.sum(),
    }
    model = trainer.model.eval()
    loss = trainer._compute_loss(model, inputs)
    loss.backward()
    return float(loss.detach()), model.get_input_embeddings().weight.grad.numpy().copy()


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_are_those_of_trl(shared, name, tmp_path):
    trl, source, config, params = shared
    groups = make_groups(config, params)
    rng = np.random.default_rng(6)
    every = trajectories(groups)
    references = [current(config, params, t.tokens) + rng.normal(0, 0.5, t.length).astype(np.float32) for t in every]
    references = [np.where(t.policy_mask, r, 0).astype(np.float32) for t, r in zip(every, references, strict=True)]
    words, settings = LOSSES[name]
    loss, gradient, rows = ours(groups, references, words, config, params)
    expected, expected_gradient = theirs(rows, trl, source, {"loss_type": "grpo", "beta": 0.0} | settings, tmp_path)
    assert abs(loss) > 1e-3 and np.abs(gradient).max() > 1e-3
    assert loss == pytest.approx(expected, rel=0, abs=2e-6)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-4, atol=2e-6)
