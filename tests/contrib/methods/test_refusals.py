"""Settings of further methods that are impossible, or contradict each other: refused with what to change."""

import pytest

from grpo_roc_jax.config import Config, read_config
from grpo_roc_jax.settings.cli import ConfigError, build
from grpo_roc_jax.settings.layers import Layer


@pytest.mark.parametrize(
    ("axis", "kind", "message"),
    [
        ("plan.problems", {"kind": "uncertainty", "pool": 0}, "must be at least 2"),
        ("plan.budget", {"kind": "knapsack", "least": 9, "most": 8}, "least = 9"),
        ("plan.budget", {"kind": "half_width", "pilot": 1}, "must be at least 2"),
        ("plan.budget", {"kind": "half_width", "alpha": 1.0}, "must be below 1"),
        ("plan.budget", {"kind": "half_width", "pilot": 32}, "leaves nothing to allocate"),
        ("plan.second", {"kind": "serial", "cuts": 3}, r"4 trajectories per problem but 32 .* set group\.size 4"),
        ("plan.temperature", {"kind": "rising", "temperatures": [1.0, 0.9]}, "must rise"),
        ("plan.temperature", {"kind": "rising", "temperatures": [0.0, 0.9]}, "must be above 0"),
        ("plan.temperature", {"kind": "rising", "temperatures": []}, "at least one"),
        ("resample", {"kind": "rc_roc"}, "nothing to tell apart"),
        ("shaping", [{"kind": "overlong", "buffer": 0}], "must be at least 1"),
        ("shaping", [{"kind": "overlong", "limit": 4095}], "limit = 4095"),
        ("shaping", [{"kind": "dynamic_length", "fraction": 0.0}], "must be above 0"),
        ("shaping", ["overlong", "dynamic_length"], "list dynamic_length first"),
        ("plan.condition", {"kind": "skills", "library": []}, "library is empty; must have at least one skill"),
        ("shaping", [{"kind": "budget", "decay": 1.5}], "must be at most 1"),
        ("advantage.scale", {"kind": "beta", "low": 1.0}, r"low = 1\.0; must be below"),
        ("advantage", {"adjust": ["tree", "sign_weights"]}, "sign_weights acts on whole .* but tree before it"),
        ("weights.normalizer", {"kind": "constant", "length": 0}, "must be at least 1"),
        ("weights.masks", [{"kind": "top_entropy", "share": 0.0}], "must be above 0"),
        ("weights.masks", [{"kind": "top_entropy", "share": 1.1}], "must be at most 1"),
        ("weights.factors", [{"kind": "truncated_is", "high": 0.5}], "low = 0, high = 0.5; must be bounds around 1"),
        ("weights.factors", [{"kind": "masked_is", "low": 1.5}], "low = 1.5, high = 2; must be bounds around 1"),
        ("weights.factors", [{"kind": "rejection", "measure": "k2"}], "low = 0.5, high = 2; must be bounds around 0"),
        ("weights.factors", [{"kind": "truncated_is", "level": "sequence"}], "must be 'token', 'product' or"),
        ("weights.factors", [{"kind": "veto", "low": 0.0}], r"low = 0\.0: must be above 0"),
        ("surrogate", {"kind": "vespo", "level": "token"}, r"set surrogate\.level sequence or turn"),
    ],
    ids=str,
)
def test_impossible_settings(axis, kind, message):
    for name in reversed(axis.split(".")):
        kind = {name: kind}
    with pytest.raises(ConfigError, match=rf"(?s){axis.partition('.')[0]}.*{message}"):
        build(Config, [Layer("test", kind)])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--plan.condition=reward_tokens --plan.second=draft", "a rollout has one condition"),
        ("--plan.budget=knapsack --plan.second=serial", "cuts of one"),
        ("--plan.condition=reward_tokens --data.eval_problems=0", r"plan\.condition\.separation 0"),
        ("--plan.condition=reward_tokens --sft.reward_tokens=text", "set both alike"),
        ("--plan.second=draft --rollout.step_limit=partial --rollout.step_limit.seconds=9", "use one of the two"),
        ("--plan.budget=knapsack --rollout.step_limit=stream", "use one of the two"),
        ("--shaping=kl --weights.factors=learned_length", r"use advantage\.adjust kl"),
        ("--shaping=kl --plan.condition=skills", r"use advantage\.adjust kl"),
        ("--shaping=overlong --advantage=pass_at_k", "pass_at_k does not read the reward, so shaping overlong"),
        *(
            (f"--environment.kind=agent --environment.command=a --plan.second={kind}", "are its own")
            for kind in ("guide", "refine", "explain", "rival_hints")
        ),
        ("--shaping=overlong --advantage=m_grpo", "m_grpo does not read the reward"),
        ("--shaping=overlong --advantage=disco", "disco does not read the reward"),
        ("--shaping=overlong --advantage=drpo", "drpo does not read the reward"),
        ("methods/tempsamp_r1.yaml --surrogate.old_logprobs=recorded", "set surrogate.old_logprobs scored, or"),
        ("methods/think_tuning.yaml --surrogate.old_logprobs=recorded", "feedback trains tokens that were not sampled"),
    ],
)
def test_settings_that_contradict_each_other(words, message):
    with pytest.raises(ConfigError, match=message):
        read_config(*words.split())


def test_shaping_goes_with_adjustments_that_read_rewards():
    read_config("--shaping=overlong", "--advantage=pass_at_k", "--advantage.adjust=turns")
