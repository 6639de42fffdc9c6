"""What do shortcuts around the slowest rollouts change in what is trained on?

Early exit (`rollout.early_exit`) is replayed on the rollouts that finished runs recorded in full: the trajectories of a
group end in some order, the rest is cut when the number of each kind to keep is decided, and the same selection chooses
once from all and once from those that ended. Paired by group, so the difference is the bias, with its standard error.
Partial rows (`rollout.step_limit: partial`), continued after a deadline, are counted in the records of a run that had
them.

    python -m grpo_roc_jax.train --run_dir runs/toy
    python -m grpo_roc_jax.train --run_dir runs/carried --rollout.step_limit partial --rollout.step_limit.seconds 1.5
    python benchmarks/bench_long_tail.py runs/toy --carried runs/carried
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from grpo_roc_jax.config import Config
from grpo_roc_jax.method.edit import take_trajectories
from grpo_roc_jax.method.roc import Selector, select_group
from grpo_roc_jax.record.trace import groups_of, read_trace, recorded_steps
from grpo_roc_jax.settings.cli import load_config
from grpo_roc_jax.types import Group

DRAWS = 16
"""Selections of each kind a group, since those of failures are drawn."""
STATISTICS = ("tokens", "tokens of successes", "tokens of failures", "successes", "failing calls in successes")
KEPT = ("accuracy_after", "reward_last_10", "steps", "versions", "commit")
"""Of the summary of a run with partial rows."""
ORDERS = {
    "length": lambda trajectory: (trajectory.length, trajectory.sample),
    "clock": lambda trajectory: (trajectory.seconds, trajectory.sample),
}
"""Rows that begin together and wait for nothing end by length; the clock has tools, queues and refilled slots in it."""


def steps_of(run: Path) -> Iterator[list[Group]]:
    for step in recorded_steps(run):
        yield groups_of(read_trace(run, step))


def ended_early(group: Group, order: str, keep: int, selector: Selector) -> Group:
    """The group as early exit leaves it: those that had ended when the rest could change no number of places."""
    key = ORDERS[order]
    ranked = sorted(range(group.size), key=lambda i: key(group.trajectories[i]))
    ended = [0, 0]
    for count, index in enumerate(ranked, 1):
        ended[int(group.verdicts[index].status == "correct")] += 1
        if selector.quota_decided(*ended, group.size - count, keep):
            return take_trajectories(group, sorted(ranked[:count]))
    return group


def mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else np.nan


def statistics(group: Group, keep: int, selector: Selector, seed: int) -> np.ndarray | None:
    """`STATISTICS` of what selection keeps, mean over its draws, NaN where there is none; None for a dropped group."""
    rng, rows = np.random.default_rng(seed), []
    lengths = np.array([int(trajectory.policy_mask.sum()) for trajectory in group.trajectories])
    correct = np.array([verdict.status == "correct" for verdict in group.verdicts])
    calls, errors = (np.array([getattr(v, name) for v in group.verdicts]) for name in ("tool_calls", "tool_errors"))
    for _ in range(DRAWS):
        selection = select_group(group, keep, selector, rng)
        if not selection.kept:
            return None
        indices = selection.indices
        won, lost = indices[correct[indices]], indices[~correct[indices]]
        share = errors[won].sum() / calls[won].sum() if calls[won].sum() else np.nan
        rows.append((mean(lengths[indices]), mean(lengths[won]), mean(lengths[lost]), mean(correct[indices]), share))
    return np.mean(rows, axis=0)


def early_exit(groups: Sequence[Group], order: str, keep: int, selector: Selector) -> dict:
    """Statistics of what is kept of whole and of cut groups, and their paired difference."""
    pairs, saved, dropped = [], [], 0
    for seed, group in enumerate(groups):
        full = statistics(group, keep, selector, seed)
        if full is None:
            continue
        cut = ended_early(group, order, keep, selector)
        left = statistics(cut, keep, selector, seed)
        drawn = [sum(int(t.policy_mask.sum()) for t in variant.trajectories) for variant in (group, cut)]
        saved.append(1 - drawn[1] / drawn[0])
        if left is None:
            dropped += 1
        else:
            pairs.append((full, left))
    values = np.array(pairs)
    result = {"groups": len(saved), "dropped_by_it": dropped, "tokens_not_drawn": float(np.mean(saved))}
    for i, name in enumerate(STATISTICS):
        both = values[~np.isnan(values[:, :, i]).any(axis=1)][:, :, i]
        difference = both[:, 1] - both[:, 0]
        error = difference.std(ddof=1) / len(both) ** 0.5
        result[name] = {"whole": both[:, 0].mean(), "cut": both[:, 1].mean(), "bias": difference.mean(), "error": error}
    return result


def partial_rows(run: Path) -> dict:
    """How much of what a run with partial rows trained on is older than its step, and how long it is."""
    fresh, old, tokens, older = [], [], 0, 0
    for step in recorded_steps(run):
        for record in read_trace(run, step):
            if record.advantages is None:
                continue
            versions = record.trajectory.versions[record.trajectory.policy_mask]
            stale = int((versions < step - 1).sum())
            (old if stale else fresh).append(len(versions))
            tokens, older = tokens + len(versions), older + stale
    return {
        "trained": len(fresh) + len(old), "with_older_tokens": len(old), "older_tokens": older / max(tokens, 1),
        "mean_tokens": float(np.mean(fresh + old)), "mean_tokens_fresh": float(np.mean(fresh)) if fresh else None,
        "mean_tokens_with_older": float(np.mean(old)) if old else None,
        **{name: value for name, value in json.loads((run / "summary.json").read_text()).items() if name in KEPT},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run directories recorded without early exit")
    parser.add_argument("--carried", type=Path, help="run directory of a run with rollout.step_limit partial")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    options = parser.parse_args()
    configs = [load_config(Config, [str(run / "config.yaml")], prog="bench_long_tail") for run in options.runs]
    if len({(config.group.size, config.resample) for config in configs}) > 1:
        parser.error("the runs differ in group.size or resample; name runs that select alike")
    config, keep = configs[0], configs[0].group.size
    sampled = config.resample.sampled(keep)
    groups = [group for run in options.runs for step in steps_of(run) for group in step if group.size == sampled]
    results = {}
    for method in ("roc", "uniform"):
        for order in ORDERS:
            other = Selector.read({"kind": method, "drop": config.resample.drop})
            selector = config.resample if config.resample.kind == method else other
            results[f"{method}, {order}"] = result = early_exit(groups, order, keep, selector)
            print(
                f"{method}, rows end by {order}: {result['groups']} groups, {result['tokens_not_drawn']:.1%} of their "
                f"tokens not drawn, {result['dropped_by_it']} groups lost"
            )
            for name in STATISTICS:
                figures = result[name]
                print(
                    f"  {name:28}{figures['whole']:9.3f} whole{figures['cut']:9.3f} cut"
                    f"{figures['bias']:+9.3f} +- {figures['error']:.3f}"
                )
    summary = {"benchmark": "long_tail", "groups": len(groups), "keep": keep, "early_exit": results}
    if options.carried:
        summary["carried"] = partial_rows(options.carried)
    if options.out:
        options.out.write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
