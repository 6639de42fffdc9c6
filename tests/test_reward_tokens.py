"""RC-GRPO around its training loop: labelled traces, evaluation under a token, the check that the tokens work."""

from dataclasses import replace
from types import SimpleNamespace

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
from grpo_roc_jax.train import main
from grpo_roc_jax.types import PLAIN, Problem
from grpo_roc_jax.worlds.demonstrations import demonstrate
from grpo_roc_jax.worlds.worlds import world_problem
from tests.test_train import TINY
from tests.text.test_templates import make_directory

TOKENIZER = load_tokenizer(TextConfig())
CHAT = make_chat(TextConfig(), TOKENIZER)
HIGH, LOW = TOKENIZER.special("<|high_reward|>"), TOKENIZER.special("<|low_reward|>")


def demonstration(kind, index=0, family="products"):
    shares = {name: float(name == kind) for name in ("guess", "repair", "clean", "wrong")}
    return demonstrate(world_problem(family, 1, 0, index), DemonstrationConfig(**shares), 0)


def rc(*words):
    return load_config(Config, ["methods/rc_grpo.yaml", *words], prog="test")


@pytest.mark.parametrize(("kind", "token"), [("clean", HIGH), ("repair", HIGH), ("wrong", LOW)])
@pytest.mark.parametrize("family", ["products", "functions"])
def test_traces_carry_the_token_of_their_outcome_in_the_prompt(kind, token, family):
    trace = demonstration(kind, family=family)
    (plain,), (row,) = trace_rows([trace], CHAT), trace_rows([trace], CHAT, RewardTokens())
    prompt = CHAT.prompt_ids(trace.problem, reward_goal(rc_grpo.HIGH if token == HIGH else rc_grpo.LOW))
    assert row.tokens[: len(prompt)].tolist() == prompt
    assert [i for i in row.tokens.tolist() if i in (HIGH, LOW)] == [token]
    assert not row.policy_mask[: len(prompt)].any()
    # What is learned, and by what weight, is the same with and without the token.
    assert row.tokens[row.policy_mask].tolist() == plain.tokens[plain.policy_mask].tolist()
    np.testing.assert_array_equal(row.weights[row.policy_mask], plain.weights[plain.policy_mask])


def test_the_token_as_text_is_read_by_every_vocabulary():
    (row,) = trace_rows([demonstration("clean")], CHAT, RewardTokens(form="text"))
    assert not {HIGH, LOW} & set(row.tokens.tolist())
    assert "[Reward Goal: high reward]" in TOKENIZER.decode(row.tokens)


def test_outcomes_without_a_label_come_from_the_answer():
    def answer(text):
        return Trace(Problem("p", "?", "42", "t"), (f"x</reason><answer>{text}</answer>",))

    assert succeeded(answer("\\boxed{42}"))
    assert succeeded(answer("\\boxed{42.0}"))
    assert not succeeded(answer("\\boxed{41}"))
    assert not succeeded(answer("42"))
    row = answer("\\boxed{42}")
    assert succeeded(replace(row, problem=replace(row.problem, extra={"success": None})))
    unlabelled = Trace(Problem("p", "?", "", "t"), ("x",))
    assert succeeded(unlabelled) is None
    with pytest.raises(ValueError, match=r"'p' has neither an outcome nor a reference answer.*sft.reward_tokens none"):
        trace_rows([unlabelled], CHAT, RewardTokens())
    assert len(trace_rows([unlabelled], CHAT, PlainPrompts())) == 1


def test_evaluation_stands_under_the_high_token():
    assert evaluate.prompt_end(rc(), 0) == (rc_grpo.HIGH, "\n[Reward Goal: <|high_reward|>]")
    assert evaluate.prompt_end(rc("--plan.condition.evaluate=low"), 0)[0] == rc_grpo.LOW
    assert evaluate.prompt_end(rc("--plan.condition.evaluate=none"), 0) == (PLAIN, "")
    assert evaluate.prompt_end(load_config(Config, [], prog="test", default_file="toy.yaml"), 0) == (PLAIN, "")
    stage_one = load_config(Config, ["toy.yaml", "--sft.reward_tokens=token"], prog="test")
    assert evaluate.prompt_end(stage_one, 0)[0] == rc_grpo.HIGH


def checked(config, sample=None):
    """The lines of the check; the fake sampler pays by condition."""
    policy, engine = SimpleNamespace(full=lambda trained: trained), SimpleNamespace(publish=lambda params, step: None)
    sampling = SimpleNamespace(sampler=SimpleNamespace(engine=engine), sample_requests=sample)
    return evaluate.check_before_training(config, policy, sampling, eval_problems(config.data), {})


@pytest.mark.parametrize(("high", "low", "refused"), [(0.9, 0.2, False), (0.52, 0.5, True), (0.2, 0.9, True)])
def test_separation_is_measured_before_the_first_step(high, low, refused):
    def sampled(weights, requests, options):
        ((condition, suffix),) = {(request.condition, request.suffix) for request in requests}
        assert options.purpose == "evaluate" and suffix == reward_goal(condition)
        assert len(requests) == 50
        wins = {rc_grpo.HIGH: high, rc_grpo.LOW: low}[condition] * 50
        return SimpleNamespace(groups=[SimpleNamespace(size=50, correct=np.arange(50) < wins)])

    config = rc("--data.eval_problems=50")
    if refused:
        with pytest.raises(ConfigError, match=f"success is {high:.3f} under the high reward token and {low:.3f}"):
            checked(config, sampled)
    else:
        (line,) = checked(config, sampled)
        assert "0.900 under the high" in line
    assert checked(rc("--plan.condition.separation=0")) == []


def nothing(problem, trajectories):
    return [0.0] * len(trajectories)


@pytest.mark.slow
def test_a_policy_that_ignores_the_token_is_refused_by_the_command(tmp_path, capsys):
    words = [word for word in TINY if not word.startswith(("--reward", "tests."))]
    words += ["--reward.functions", "tests.test_reward_tokens:nothing", "--plan.condition=reward_tokens"]
    words += ["--rollout.max_prompt_tokens=48", "--batch.row_length=64", f"--run_dir={tmp_path / 'run'}"]
    assert main(words) == 2
    assert "success is 0.000 under the high reward token and 0.000 under the low one" in capsys.readouterr().err
    assert (tmp_path / "run" / "checkpoints").is_dir()


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
