"""Metrics of the groups of a step: one function for all that was sampled, one for the result of selection."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from grpo_roc_jax.method.features import flat
from grpo_roc_jax.method.roc import Selection
from grpo_roc_jax.record.accuracy import tool_error_share
from grpo_roc_jax.types import Group, Metrics, Trajectory, traits_of


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def _known_mean(values: Sequence[float]) -> float:
    """Mean of the values; NaN, which is written to files as null, if there are none."""
    return float(np.mean(values)) if len(values) else math.nan


def rollout_metrics(groups: Sequence[Group], counts: Mapping[str, int]) -> Metrics:
    """Metrics over everything that was sampled, before selection.

    Args:
        groups: Scored groups, one for each problem.
        counts: Number of trajectories by verdict status, including removed ones; logged as shares of all.
    """
    pairs = [pair for group in groups for pair in group.pairs if traits_of(pair[0].condition.kind).attempt]
    verdicts = [verdict for _, verdict in pairs]
    correct = [verdict for verdict in verdicts if verdict.status == "correct"]
    rewards = [group.rewards for group in groups if group.size]
    total = sum(counts.values())
    metrics = {
        "rollout/reward": _known_mean([verdict.reward for verdict in verdicts]),
        "rollout/reward_std": _known_mean([float(r.std()) for r in rewards]),
        "rollout/tool_error_rate": tool_error_share(verdicts),
        "rollout/tool_error_in_correct": tool_error_share(correct),
        "rollout/tool_error_in_wrong": tool_error_share([v for v in verdicts if v.status != "correct"]),
        "rollout/tool_calls": _mean([verdict.tool_calls for verdict in verdicts]),
        "rollout/tool_free_correct": _known_mean([verdict.tool_calls == 0 for verdict in correct]),
        "rollout/repeated_calls": _mean([_repeats_a_call(trajectory) for trajectory, _ in pairs]),
        "rollout/answers": _mean([verdict.answers for verdict in verdicts]),
        "rollout/turns": _mean([verdict.turns for verdict in verdicts]),
        "rollout/length": _mean([t.length - t.prompt_length for t, _ in pairs]),
        "rollout/policy_tokens": _mean([float(t.policy_mask.sum()) for t, _ in pairs]),
        "rollout/truncated": _mean([t.truncated for t, _ in pairs]),
        "rollout/sampled": float(total),
    }
    for name in sorted({name for trajectory, _ in pairs for name in trajectory.rewards}):
        metrics[f"environment/{name}"] = _mean([t.rewards[name] for t, _ in pairs if name in t.rewards])
    return metrics | {f"verdict/{status}": count / max(total, 1) for status, count in sorted(counts.items())}


def describe_unscored(counts: Mapping[str, int], unscored: Mapping[str, int], faults: Sequence[str]) -> str:
    """Why a step has no score, and the functions that caused it; empty if a trajectory has a score.

    Args:
        counts: Number of trajectories by verdict status, including removed ones.
        unscored: Number of trajectories that a reward function left without a score, by name of the function.
        faults: Messages of functions that failed.
    """
    lost = {name: counts.get(name, 0) for name in ("not_scored", "infrastructure", "cancelled")}
    if not unscored or sum(lost.values()) < sum(counts.values()):
        return ""
    names = ", ".join(f"{name} ({count})" for name, count in unscored.items())
    others = "".join(f", {count} {name}" for name, count in lost.items() if count and name != "not_scored")
    why = f": {faults[0]}" if faults else ", which gave None for all of them"
    return f"no trajectory has a score; {lost['not_scored']} not scored by {names}{why}{others}"


ALL_BUT_ROUNDING = 0.9999
"""Share of rollouts, summed over statuses, above which it is all of them."""


def why_nothing_kept(metrics: Metrics) -> str:
    """Why selection kept no trajectory of a step, from its metrics; empty if it kept some."""
    if metrics.get("roc/kept", 1.0):
        return ""
    groups = int(metrics["roc/groups"])
    right, wrong = (int(metrics.get(f"roc/all_{status}", 0.0)) for status in ("correct", "wrong"))
    if not groups:
        return "kept nothing: no group was sampled to its end"
    lost = sum(metrics.get(f"verdict/{status}", 0.0) for status in ("infrastructure", "not_scored", "cancelled"))
    others = "dropped for other reasons"
    if lost > ALL_BUT_ROUNDING:
        others = "without a rollout that has a score, since all failed outside of the policy: an event says why"
    elif metrics.get("roc/dropped_short_group"):
        others = "with too few rollouts left (resample.short_groups)"
    elif metrics.get("roc/dropped_equal_rewards"):
        others = "with equal rewards for right and wrong answers"
    counts = {"all correct": right, "all wrong": wrong, others: groups - right - wrong}
    parts = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    advice = ""
    if wrong > right:
        advice = "; the policy solves none of these problems: a longer supervised stage or easier problems help"
    elif right:
        advice = "; the policy solves all of these problems: harder ones help"
    return f"kept nothing: of {groups} group{'s' * (groups > 1)} {parts}{advice}"


def _repeats_a_call(trajectory: Trajectory) -> bool:
    """Whether a tool call is repeated verbatim: an early sign of tool-use collapse (rStar issue 52)."""
    calls = [call.raw for turn in trajectory.turns for call in turn.calls]
    return len(set(calls)) < len(calls)


def selection_metrics(groups: Sequence[Group], selections: Sequence[Selection]) -> Metrics:
    """Metrics of what selection kept and dropped, and of the tool errors of the kept successes."""
    kept_verdicts = [
        group.verdicts[i] for group, selection in zip(groups, selections, strict=True) for i in selection.indices
    ]
    equal = [group for group in groups if group.size and flat(group.rewards)]
    sampled = sum(group.size for group in groups)
    why = Counter(reason for selection in selections for reason in selection.reasons if reason != "kept")
    return {
        "roc/kept": float(len(kept_verdicts)),
        "roc/dropped": float(sampled - len(kept_verdicts)),
        "roc/groups_kept": float(sum(selection.kept for selection in selections)),
        "roc/groups": float(len(groups)),
        "roc/all_correct": float(sum(group.correct.all() for group in equal)),
        "roc/solved_by_all": float(sum(group.size > 0 and bool(group.correct.all()) for group in groups)),
        "roc/all_wrong": float(sum(not group.correct.any() for group in equal)),
        "roc/tool_error_in_correct_kept": tool_error_share([v for v in kept_verdicts if v.status == "correct"]),
        "roc/reward_kept": _known_mean([verdict.reward for verdict in kept_verdicts]),
        **{f"roc/dropped_{reason}": float(count) for reason, count in sorted(why.items())},
    }
