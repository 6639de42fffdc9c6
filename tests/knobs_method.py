"""The cases of the planner, the method and the batch: settings that `knobs_step` sees."""

from typing import Any

from grpo_roc_jax.method.config import ShapingConfig
from tests.knobs import Case, cases
from tests.knobs_step import cuts, evaluated, method, separated, step

PART = "tests.knobs_step:"
ALL = {"resample.drop": "none"}
"""No group leaves, so that there is something to weigh in each."""


SERIAL = (("plan.second", "serial"), ("plan.serial_cuts", 3), ("resample.method", "none"))


def shaped(name: str) -> dict[str, Any]:
    return ALL | {"shaping.steps": (name,)}


PLAN = (
    cases(step, {"group.problems": 3, "group.size": 2, "group.refills": 1, "seed": 1})
    | cases(step, {"batch.row_length": 700, "batch.rows": 2, "batch.updates": 2})
    | cases(step, {"plan.sampler": "uncertainty"}, {"plan.pool": 2})
    | cases(step, {"plan.pool": 3}, {"plan.pool": 2, "plan.sampler": "uncertainty"})
    | cases(step, {"plan.budget": "knapsack"}, {"resample.method": "none", "plan.most_rollouts": 6})
    | cases(
        step,
        {"plan.pilot": 2, "plan.interval_alpha": 0.9, "plan.interval_bonus": 2.0, "plan.warmup_steps": 1},
        {"plan.budget": "half_width", "group.size": 8, "resample.method": "none", "group.problems": 6},
    )
    | cases(
        step,
        {"plan.least_rollouts": 8, "plan.most_rollouts": 9},
        {"plan.budget": "knapsack", "group.size": 8, "resample.method": "none", "group.problems": 6},
    )
    | cases(step, {"plan.reward_tokens": "iid"}, {"plan.separation": 0.0})
    | cases(step, {"plan.high_share": 0.8, "plan.reward_form": "text"}, {"plan.reward_tokens": "fixed"})
    | cases(separated, {"plan.separation": 2.0}, {"plan.reward_tokens": "fixed"})
    | cases(step, {"plan.hints": "scaffold"})
    | cases(
        step,
        {
            "plan.hint_column": "more_hints",
            "plan.hint_levels": 1,
            "plan.hint_intro": "Look: ",
            "plan.replace": 3,
        },
        {"plan.hints": "scaffold", "group.problems": 6},
    )
    | cases(
        step,
        {"plan.writer_intro": "Help from {level}/{levels}: ", "plan.solution_column": "explained"},
        {"plan.hints": "write"},
    )
    | cases(step, {"plan.examples": 1}, {"plan.hints": "examples", "group.problems": 6})
    | cases(
        step,
        {"plan.answer_intro": "Why is it ", "plan.explain_weight": 0.3, "plan.explain_steps": 2},
        {"plan.hints": "explain", "group.problems": 9},
    )
    | cases(step, {"plan.second": "draft"})
    | cases(
        step,
        {"plan.pair_group": 2},
        {"plan.sampler": "pairs", "plan.pool": 4, "group.problems": 6, "batch.row_length": 600},
    )
    | {"plan.serial_cuts": Case(cuts, 4, SERIAL, along=(("group.size", 5),))}
    | cases(step, {"plan.draft_intro": "Before:\n"}, {"plan.second": "draft"})
    | cases(
        step,
        {"plan.serial_from": "turn", "plan.serial_stop": "enough</reason><answer>"},
        dict(SERIAL),
    )
    | cases(step, {"plan.temperatures": (0.7, 0.9), "plan.tell_budget": "Use {budget} tokens."})
    | cases(step, {"plan.diversity_target": 0.0}, {"plan.temperatures": (0.7, 0.9), "plan.diversity_target": 1.0})
    | cases(step, {"plan.edit": f"{PART}demonstrated"}, {"advantage.anchor": 1.2})
    | cases(step, {"resample.method": "uniform", "resample.oversample": 3.0, "resample.drop": "none"})
)

METHOD = (
    cases(method, {"resample.positive_select": "uniform", "resample.negative_select": "first"})
    | cases(method, {"resample.min_positive": 3, "resample.min_negative": 3}, {"group.size": 6})
    | cases(
        method, {"resample.positive_select.epsilon": 1e6}, {"resample.positive_select": "inverse", "group.problems": 9}
    )
    | cases(
        method, {"resample.no_tool_penalty": 0.0, "resample.error_penalty": False, "resample.format_penalty": False}
    )
    | cases(method, {"resample.penalty_source": "text_compat"})
    | cases(
        method,
        {"resample.conditions": "low_last"},
        {"plan.reward_tokens": "fixed", "plan.separation": 0.0, "resample.drop": "none"},
    )
    | cases(method, {"resample.short_groups": "drop"}, ALL | {"plan.edit": f"{PART}shortened"})
    | cases(method, {"shaping.steps": ("tool_errors",), "shaping.custom": f"{PART}halved"}, ALL)
    | cases(
        method,
        {"shaping.overlong_limit": 120, "shaping.overlong_buffer": 100},
        shaped("overlong") | {"shaping.overlong_limit": 160, "shaping.overlong_buffer": 60},
    )
    | cases(method, {"shaping.tool_error_coef": 0.9}, shaped("tool_errors"))
    | cases(method, {"shaping.unlikeliness_beta": 0.5}, shaped("unlikeliness"))
    | cases(method, {"shaping.dynamic_fraction": 1.0, "shaping.dynamic_alpha": 0.2}, shaped("dynamic_length"))
    | cases(
        method,
        {"shaping.soft_tau": 0.3, "shaping.soft_above": 0.5, "shaping.soft_below": 3.0},
        shaped("soft") | {"advantage.scale": "none"},
    )
    | cases(method, {"shaping.outcome_negative": 0.2}, shaped("outcome") | {"advantage.scale": "none"})
    | cases(
        method,
        {"shaping.budget_start": 64, "shaping.budget_decay": 0.5, "shaping.budget_every": 2}
        | {"shaping.budget_weights": (0.6, *(2 * w for w in ShapingConfig().budget_weights[1:]))},
        shaped("budget") | {"shaping.budget_every": 1},
    )
    | cases(method, {"shaping.surrogate_length": 300}, shaped("surrogate"))
    | cases(method, {"shaping.format_channel": "clean_tools"}, shaped("surrogate"))
    | cases(
        method,
        {"shaping.quality_weight": 0.9, "shaping.quality_channel": "clean_tools"},
        shaped("quality") | {"shaping.quality_channel": "format"},
    )
    | cases(method, {"shaping.judge": f"{PART}earlier"}, shaped("win_rate"))
    | cases(method, {"shaping.staged_weights": (0.5, 0.2, 0.3)}, shaped("staged"))
    | cases(
        method,
        {
            "advantage.baseline": "leave_one_out",
            "advantage.scale": "none",
            "advantage.ddof": 0,
            "advantage.eps": 0.5,
            "advantage.channels": "each",
            "advantage.strata": "tool_calls",
            "advantage.whiten": "row",
            "advantage.positive_weight": 2.0,
            "advantage.negative_weight": 2.0,
            "advantage.focal": 1.0,
            "advantage.novelty": 1.0,
            "advantage.tree_td": True,
            "advantage.score": "disco",
            "advantage.custom": f"{PART}halved",
        },
        ALL,
    )
    | cases(method, {"advantage.virtual_reward": 2.0}, ALL | {"advantage.baseline": "virtual_max"})
    | cases(method, {"advantage.pass_k": 3}, ALL | {"advantage.scale": "pass_at_k"})
    | cases(method, {"advantage.channel_weights": (1.0, 2.0, 3.0)}, ALL | {"advantage.channels": "each"})
    | cases(
        method, {"advantage.strata_cap": 1, "advantage.strata_blend": 0.9}, ALL | {"advantage.strata": "tool_calls"}
    )
    | cases(method, {"advantage.rescale_nonzero": True}, ALL | {"advantage.baseline": "median", "group.size": 5})
    | cases(method, {"advantage.drop_pivot": True}, ALL | {"advantage.baseline": "median", "group.size": 5})
    | cases(method, {"advantage.novelty_cap": 0.1}, ALL | {"advantage.novelty": 3.0})
    | cases(method, {"advantage.truncation_mask": 0.9}, ALL | {"reward.truncated": "score"})
    | cases(
        method,
        {"advantage.anchor": 1.2},
        {"plan.edit": f"{PART}demonstrated", "resample.method": "none"},
    )
    | cases(
        method,
        {"advantage.constraints": ("clean_tools",), "advantage.constraint_targets": (0.99,)}
        | {"advantage.dual_lr": 0.5, "advantage.dual_max": 0.001},
        ALL | {"advantage.constraints": ("format",), "advantage.constraint_targets": (0.9,)},
    )
    | cases(
        method,
        {"advantage.score_tau": 1.0, "advantage.score_kl_delta": 10.0, "advantage.score_kl_beta": 5.0},
        ALL | {"advantage.score": "disco"},
    )
    | cases(method, {"advantage.score_eta": 2.0}, ALL | {"advantage.score": "rebel"})
    | cases(method, {"advantage.score_lambda": 1.0, "advantage.max_length": 300}, ALL | {"advantage.score": "drpo"})
    | cases(method, {"advantage.tracker_decay": 0.5}, ALL | {"advantage.baseline": "tracker"})
    | cases(
        method,
        {
            "loss.level": "sequence",
            "loss.normalizer": "sequence_mean",
            "loss.length_weight": "learned",
            "loss.old_logprobs": "scored",
            "loss.mask_truncated": True,
            "loss.mask_void_turns": True,
            "loss.mask_drift": 0.05,
            "loss.top_entropy": 0.5,
            "loss.custom": f"{PART}doubled",
        },
    )
    | cases(method, {"loss.constant_length": 100}, {"loss.normalizer": "constant"})
    | cases(method, {"loss.length_strength": 0.5, "loss.length_lr": 1.0}, {"loss.length_weight": "learned"})
    | cases(method, {"loss.mismatch": "truncate"}, {"loss.old_logprobs": "scored"})
    | cases(
        method,
        {"loss.mismatch_level": "sequence", "loss.mismatch_cap": 1.2},
        {"loss.old_logprobs": "scored", "loss.mismatch": "truncate"},
    )
    | cases(step, {"rollout.admission": "longest"}, dict(SERIAL))
    | cases(step, {"rollout.max_turns": 2, "rollout.early_exit": True})
    | cases(step, {"tools.enabled": ("jupyter_code",), "tools.observation": "rstar2", "tools.hide_addresses": False})
    | cases(evaluated, {"eval.samples": 2, "eval.temperature": 0.5})
)

CASES = PLAN | METHOD
