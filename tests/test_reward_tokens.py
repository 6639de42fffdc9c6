"""RC-GRPO around its training loop: labelled traces, evaluation under a token, the check that the tokens work."""

from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from grpo_roc_jax.config import Config
from grpo_roc_jax.data.config import DemonstrationConfig
from grpo_roc_jax.data.pipeline import eval_problems
from grpo_roc_jax.learner.pack import BatchConfig, pack
from grpo_roc_jax.method import planning as rc_grpo
from grpo_roc_jax.method.planning import PlainPrompts, RewardTokens, reward_goal
from grpo_roc_jax.run import evaluate
from grpo_roc_jax.run.supervised import succeeded, trace_rows
from grpo_roc_jax.settings.cli import ConfigError, load_config
from grpo_roc_jax.text.chat_format import Trace, make_chat
from grpo_roc_jax.text.config import TextConfig, TokenizerFile
from grpo_roc_jax.text.tokenizer import load_tokenizer
from grpo_roc_jax.types import Problem
from grpo_roc_jax.worlds.demonstrations import demonstrate
from grpo_roc_jax.worlds.worlds import world_problem
from tests.text.test_templates import make_directory

TOKENIZER = load_tokenizer(TextConfig())
CHAT = make_chat(TextConfig(), TOKENIZER)
HIGH, LOW = TOKENIZER.special("<|high_reward|>"), TOKENIZER.special("<|low_reward|>")


def demonstration(kind):
    shares = {name: float(name == kind) for name in ("guess", "repair", "clean", "wrong")}
    return demonstrate(world_problem("products", 1, 0, 0), DemonstrationConfig(**shares), 0)


def rc(*words):
    return load_config(Config, ["methods/rc_grpo.yaml", *words], prog="test")


@pytest.mark.parametrize(("kind", "token"), [("repair", HIGH), ("wrong", LOW)])
def test_traces_carry_the_token_of_their_outcome_in_the_prompt(kind, token):
    trace = demonstration(kind)
    (plain,), (row,) = trace_rows([trace], CHAT), trace_rows([trace], CHAT, RewardTokens())
    prompt = CHAT.prompt_ids(trace.problem, reward_goal(rc_grpo.HIGH if token == HIGH else rc_grpo.LOW))
    assert row.tokens[: len(prompt)].tolist() == prompt
    assert [i for i in row.tokens.tolist() if i in (HIGH, LOW)] == [token]
    assert not row.policy_mask[: len(prompt)].any()
    assert row.tokens[row.policy_mask].tolist() == plain.tokens[plain.policy_mask].tolist()
    np.testing.assert_array_equal(row.weights[row.policy_mask], plain.weights[plain.policy_mask])


def test_outcomes_without_a_label_come_from_the_answer():
    def answer(text):
        return Trace(Problem("p", "?", "42", "t"), (f"x</reason><answer>{text}</answer>",))

    unlabelled = Trace(Problem("p", "?", "", "t"), ("x",))
    traces = (answer("\\boxed{42}"), answer("\\boxed{41}"), unlabelled)
    assert [succeeded(trace) for trace in traces] == [True, False, None]
    with pytest.raises(ValueError, match=r"'p' has neither an outcome nor a reference answer.*sft.reward_tokens none"):
        trace_rows([unlabelled], CHAT, RewardTokens())
    assert len(trace_rows([unlabelled], CHAT, PlainPrompts())) == 1


@pytest.mark.parametrize(("low", "refused"), [(0.2, False), (0.88, True)])
def test_separation_is_measured_before_the_first_step(low, refused):
    """The fake sampler pays by condition."""

    def sampled(weights, requests, options):
        ((condition, suffix),) = {(request.condition, request.suffix) for request in requests}
        assert options.purpose == "evaluate" and suffix == reward_goal(condition) and len(requests) == 50
        wins = {rc_grpo.HIGH: 0.9, rc_grpo.LOW: low}[condition] * 50
        return SimpleNamespace(groups=[SimpleNamespace(size=50, correct=np.arange(50) < wins)])

    sampling = SimpleNamespace(sampler=mock.Mock(), sample_requests=sampled)

    def checked(config):
        return evaluate.check_before_training(config, mock.Mock(), sampling, eval_problems(config.data), {})

    config = rc("--data.eval_problems=50")
    if refused:
        with pytest.raises(ConfigError, match=r"success is 0\.900 under the high reward token and 0\.880"):
            checked(config)
    else:
        assert "0.900 under the high" in checked(config)[0]
    assert checked(rc("--plan.condition.separation=0")) == []
    assert evaluate.prompt_end(config, 0) == (rc_grpo.HIGH, "\n[Reward Goal: <|high_reward|>]")
    assert evaluate.prompt_end(rc("--plan.condition.evaluate=low"), 0)[0] == rc_grpo.LOW


def test_the_end_of_a_turn_is_trained_on_and_padding_with_the_same_token_is_not(tmp_path):
    folder = make_directory(tmp_path, "thinking", added=["<|im_end|>", "<|im_start|>"])
    config = TextConfig(tokenizer=TokenizerFile(path=str(folder), pad_token="<|im_end|>"))
    chat = make_chat(config, load_tokenizer(config))
    assert chat.tokenizer.pad_id == chat.tokenizer.eos_id == chat.end_id
    said = ("yes", "no", "perhaps not")
    traces = [Trace(Problem(str(i), "?", "", "s"), (f"</reason>{text}",)) for i, text in enumerate(said)]
    batch = pack(trace_rows(traces, chat), BatchConfig(row_length=64, rows=2), 4)[0]
    assert ((batch.tokens == chat.end_id) & (batch.weights > 0)).sum() == len(said)
    padding = batch.segment_ids == 0
    assert padding.any() and not batch.weights[padding].any() and not batch.policy_mask[padding].any()
