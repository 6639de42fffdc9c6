"""Settings that differ from their default and that nothing will read, said at the start of a run.

A contradiction is refused where the settings are made. These are milder: a ladder of overrides, or one line of a sweep,
may leave `loss.clip_low` behind when `loss.kind` changes. Refusing that would forbid plain ablations; keeping quiet
would let a researcher tune a number without effect. So it is said.
"""

from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any

Condition = Callable[[Any], Any]
"""Of a `Config`, which stands above this module."""

_RANKED = "positive_select negative_select min_positive min_negative no_tool_penalty error_penalty format_penalty"
_RATIO = "clip_low clip_high clip_dual clip_delta"
_INSTEAD = "baseline scale ddof eps virtual_reward pass_k"
_SCORES = "score_tau score_eta score_lambda score_kl_delta score_kl_beta max_length"
_SFT = "traces lr warmup_steps reward_tokens log_every"
_HINTED = ("level", "scaffold", "guide", "retry")
_SHOWN = (*_HINTED, "write")


def _step(name: str) -> Condition:
    return lambda c: name in c.shaping.steps


def _plan_hints(*names: str) -> Condition:
    return lambda c: c.plan.hints in names


READERS: tuple[tuple[str, str, str, Condition], ...] = (
    ("resample", "oversample", "every resample.method but none", lambda c: c.resample.method != "none"),
    ("resample", f"{_RANKED} penalty_source conditions", "resample.method roc", lambda c: c.resample.method == "roc"),
    (
        "resample",
        "inverse_epsilon",
        "resample.positive_select inverse",
        lambda c: c.resample.positive_select == "inverse",
    ),
    ("resample", "no_tool_penalty", "resample.error_penalty", lambda c: c.resample.error_penalty),
    ("shaping", "overlong_limit overlong_buffer", "shaping.steps overlong", _step("overlong")),
    ("shaping", "tool_error_coef", "shaping.steps tool_errors", _step("tool_errors")),
    ("shaping", "unlikeliness_beta", "shaping.steps unlikeliness", _step("unlikeliness")),
    ("shaping", "dynamic_fraction dynamic_alpha", "shaping.steps dynamic_length", _step("dynamic_length")),
    ("shaping", "soft_tau soft_above soft_below", "shaping.steps soft", _step("soft")),
    ("shaping", "outcome_negative", "shaping.steps outcome", _step("outcome")),
    ("shaping", "budget_weights", "shaping.steps budget", _step("budget")),
    (
        "shaping",
        "budget_start budget_decay budget_every",
        "shaping.steps budget or plan.tell_budget",
        lambda c: "budget" in c.shaping.steps or c.plan.tell_budget,
    ),
    ("shaping", "surrogate_length", "shaping.steps surrogate", _step("surrogate")),
    ("shaping", "quality_weight", "shaping.steps quality", _step("quality")),
    (
        "shaping",
        "quality_channel",
        "shaping.steps quality or posterior",
        lambda c: {"quality", "posterior"} & set(c.shaping.steps),
    ),
    (
        "shaping",
        "format_channel",
        "shaping.steps posterior, surrogate or staged",
        lambda c: {"posterior", "surrogate", "staged"} & set(c.shaping.steps),
    ),
    ("shaping", "staged_weights", "shaping.steps staged", _step("staged")),
    ("shaping", "judge", "shaping.steps win_rate", _step("win_rate")),
    ("advantage", _INSTEAD, "advantage.score none", lambda c: c.advantage.score == "none"),
    ("advantage", "baseline", "every advantage.scale but pass_at_k", lambda c: c.advantage.scale != "pass_at_k"),
    ("advantage", "baseline scale eps ddof", "advantage without custom", lambda c: not c.advantage.custom),
    ("advantage", "pass_k", "advantage.scale pass_at_k", lambda c: c.advantage.scale == "pass_at_k"),
    (
        "advantage",
        "virtual_reward",
        "advantage.baseline virtual_max or scale virtual_std",
        lambda c: c.advantage.baseline == "virtual_max" or c.advantage.scale == "virtual_std",
    ),
    ("advantage", "channel_weights", "advantage.channels each or each_batch", lambda c: c.advantage.channels != "sum"),
    ("advantage", "strata_cap strata_blend", "advantage.strata", lambda c: c.advantage.strata != "none"),
    ("advantage", "novelty_cap", "advantage.novelty", lambda c: c.advantage.novelty),
    ("advantage", "dual_lr dual_max", "advantage.constraints", lambda c: c.advantage.constraints),
    ("advantage", _SCORES, "advantage.score", lambda c: c.advantage.score != "none"),
    ("loss", "clip_low clip_high", "loss.kind clip or geometric", lambda c: c.loss.kind in ("clip", "geometric")),
    ("loss", "cispo_low cispo_high", "loss.kind cispo", lambda c: c.loss.kind == "cispo"),
    ("loss", "sapo_positive sapo_negative", "loss.kind sapo", lambda c: c.loss.kind == "sapo"),
    ("loss", "vespo_positive vespo_negative", "loss.kind vespo", lambda c: c.loss.kind == "vespo"),
    ("loss", "kl_kind", "loss.kl_coef", lambda c: c.loss.kl_coef),
    ("loss", "constant_length", "loss.normalizer constant", lambda c: c.loss.normalizer == "constant"),
    ("loss", "length_strength length_lr", "loss.length_weight learned", lambda c: c.loss.length_weight == "learned"),
    ("loss", "mismatch_level mismatch_cap", "loss.mismatch", lambda c: c.loss.mismatch != "none"),
    ("plan", "pool", "every plan.sampler but uniform", lambda c: c.plan.sampler != "uniform"),
    ("plan", "pair_group", "plan.sampler pairs", lambda c: c.plan.sampler == "pairs"),
    ("plan", "pilot interval_alpha interval_bonus", "plan.budget half_width", lambda c: c.plan.budget == "half_width"),
    ("plan", "least_rollouts", "plan.budget knapsack", lambda c: c.plan.budget == "knapsack"),
    ("plan", "most_rollouts", "plan.budget knapsack or half_width", lambda c: c.plan.budget != "uniform"),
    ("plan", "high_share separation", "plan.reward_tokens", lambda c: c.plan.reward_tokens != "none"),
    (
        "plan",
        "reward_form",
        "plan.reward_tokens or sft.reward_tokens",
        lambda c: c.plan.reward_tokens != "none" or c.sft.reward_tokens,
    ),
    ("plan", "hint_column", "plan.hints level, scaffold, guide or retry", _plan_hints(*_HINTED)),
    ("plan", "hint_levels", "plan.hints level, scaffold, guide, retry or write", _plan_hints(*_SHOWN)),
    ("plan", "replace", "plan.hints scaffold, guide or explain", _plan_hints("scaffold", "guide", "explain")),
    ("plan", "writer_intro solution_column", "plan.hints write", _plan_hints("write")),
    ("plan", "examples", "plan.hints examples", _plan_hints("examples")),
    ("plan", "answer_intro explain_weight explain_steps", "plan.hints explain", _plan_hints("explain")),
    ("plan", "serial_cuts serial_from serial_stop", "plan.second serial", lambda c: c.plan.second == "serial"),
    ("plan", "draft_intro", "plan.second draft", lambda c: c.plan.second == "draft"),
    ("plan", "diversity_target", "plan.temperatures", lambda c: c.plan.temperatures),
    ("model", "rope_factor", "model.rope_scaling", lambda c: c.model.rope_scaling != "none"),
    (
        "model",
        "rope_low_freq rope_high_freq rope_original_length",
        "model.rope_scaling llama3",
        lambda c: c.model.rope_scaling == "llama3",
    ),
    ("model", "norm_expert_weights", "model.experts", lambda c: c.model.experts),
    ("lora", "alpha targets", "lora.rank", lambda c: c.lora.rank),
    (
        "reward",
        "verify_workers verify_timeout_s verify_memory_mb max_answer_chars",
        "reward.functions answer",
        lambda c: "answer" in c.reward.functions,
    ),
    ("reward", "truncated_reward", "reward.score_truncated off", lambda c: not c.reward.score_truncated),
    (
        "reward",
        "function_timeout_s",
        "a reward function of your own",
        lambda c: any(":" in f for f in c.reward.functions),
    ),
    (
        "optim",
        "total_steps final_lr_ratio",
        "every optim.schedule but constant",
        lambda c: c.optim.schedule != "constant",
    ),
    ("sft", _SFT, "sft.steps", lambda c: c.sft.steps),
    ("data", "demonstrations", "sft.steps", lambda c: c.sft.steps),
    ("eval", "every samples temperature", "data.eval_problems or eval_sources", lambda c: c.data.eval_problems),
)
"""(section, its settings, what reads them, whether that is so here). A setting in several rows wants all of them."""


def unread(config: Any) -> list[str]:
    """One line for each setting that differs from its default and that nothing reads under the other settings."""
    lines = []
    for section, names, reader, reads in READERS:
        if reads(config):
            continue
        part = getattr(config, section)
        for name in names.split():
            if getattr(part, name) != default(part, name):
                lines.append(f"{section}.{name} = {getattr(part, name)!r} has no effect here: it is read by {reader}")
    return list(dict.fromkeys(lines))


def default(section: Any, name: str) -> Any:
    """A field's default."""
    field = next(field for field in fields(section) if field.name == name)
    return field.default if field.default is not MISSING else field.default_factory()
