"""Whether records of a run obey its method: selection, reasons, penalties and advantages, from the records alone."""

import numpy as np

from grpo_roc_jax.config import Config
from grpo_roc_jax.method.roc import quota
from grpo_roc_jax.record import trace
from grpo_roc_jax.record.metrics import read_metrics


def check_selection(run, config: Config) -> set[str]:
    """The reasons that the records of a run give, each checked by the rules of the paper.

    Args:
        run: Its directory, written with `log.traces 1`.
        config: Of the run, with `resample` of kind `roc` or `none`, and advantages of the group.
    """
    roc, size = config.resample.kind == "roc", config.group.size
    least = (config.resample.min_negative, config.resample.min_positive) if roc else (0, 0)
    reasons = set()
    for row in read_metrics(run):
        step, records = row["step"], list(trace.read_trace(run, row["step"])) if row["step"] else []
        groups = {}
        for record in records:
            groups.setdefault(record.group, []).append(record)
        for group in groups.values():
            reasons |= {record.why for record in group}
            check_group(group, size if roc else len(group), config.resample, least)
        if records:
            assert row["roc/kept"] == sum(record.kept for record in records), step
            paid = [record.verdict.reward for record in records]
            assert abs(row["rollout/reward"] - np.mean(paid)) < 1e-6, step
    return reasons


def check_group(records, keep, resample, least):
    """Those of one problem, of which `keep` train; `least` failures and successes stay."""
    roc = resample.kind == "roc"
    right = [record for record in records if record.verdict.status == "correct"]
    wrong = [record for record in records if record.verdict.status != "correct"]
    kept = [record for record in records if record.kept]
    if not right or not wrong:
        if resample.drop == "equal":
            assert {(r.kept, r.why, r.advantages is None) for r in records} == {(False, "equal_rewards", True)}
        return
    if roc:
        failures, successes = quota(len(wrong), len(right), keep, *least)
        assert (sum(r.kept for r in wrong), sum(r.kept for r in right)) == (failures, successes)
        assert {r.why for r in wrong} <= {"kept", "quota"} and {r.why for r in right} <= {"kept", "penalty"}
        most = max([r.penalties["total"] for r in right if r.kept], default=0)
        assert all(r.penalties["total"] >= most for r in right if not r.kept)
    else:
        assert kept == records
    assert all((r.why == "kept") == r.kept == (r.advantages is not None) for r in records)
    paid = np.array([r.verdict.reward for r in kept])
    for record, reward in zip(kept, paid, strict=True):
        mask = record.trajectory.policy_mask
        assert np.allclose(record.advantages[mask], (reward - paid.mean()) / paid.std(ddof=1), rtol=1e-3)
        assert not record.advantages[~mask].any()
