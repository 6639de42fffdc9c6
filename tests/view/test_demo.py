"""The runs that the tests of the page show obey the method: selection, penalties and advantages are its own."""

import numpy as np
import pytest

from grpo_roc_jax.method.roc import quota
from grpo_roc_jax.record import trace
from grpo_roc_jax.record.metrics import read_metrics
from tests.helpers.demo import write_run


@pytest.mark.parametrize("resample", ["roc", "none"])
def test_every_record_obeys_the_selection(tmp_path, resample):
    """By the rules of the paper, computed here anew from the records alone."""
    size = 16
    keep = size // 2 if resample == "roc" else size
    run = write_run(tmp_path / "run", steps=4, groups=6, size=size, settings={"resample": resample})
    reasons = set()
    for step in range(1, 5):
        groups = {}
        for record in trace.read_trace(run, step):
            groups.setdefault(record.group, []).append(record)
        for records in groups.values():
            right = [r for r in records if r.verdict.status == "correct"]
            wrong = [r for r in records if r.verdict.status != "correct"]
            kept = [r for r in records if r.kept]
            reasons |= {r.why for r in records}
            if not right or not wrong:
                assert {(r.kept, r.why, r.advantages is None) for r in records} == {(False, "equal_rewards", True)}
                continue
            failures, successes = quota(len(wrong), len(right), keep, 2, 2)
            assert (sum(r.kept for r in wrong), sum(r.kept for r in right)) == (failures, successes)
            assert {r.why for r in wrong} <= {"kept", "quota"} and {r.why for r in right} <= {"kept", "penalty"}
            assert all((r.why == "kept") == r.kept == (r.advantages is not None) for r in records)
            best = max([r.penalties["total"] for r in right if r.kept], default=0)
            assert all(r.penalties["total"] >= best for r in right if not r.kept)
            paid = np.array([r.verdict.reward for r in kept])
            for r, reward in zip(kept, paid, strict=True):
                mask = r.trajectory.policy_mask
                assert np.allclose(r.advantages[mask], (reward - paid.mean()) / paid.std(ddof=1), rtol=1e-3)
                assert not r.advantages[~mask].any()
    rows = {row["step"]: row for row in read_metrics(run)}
    for step in range(1, 5):
        records = list(trace.read_trace(run, step))
        assert rows[step]["roc/kept"] == sum(r.kept for r in records)
        assert rows[step]["rollout/reward"] == pytest.approx(np.mean([r.verdict.reward for r in records]))
    expected = {"kept", "penalty", "quota"} if resample == "roc" else {"kept"}
    assert reasons - {"equal_rewards"} == expected
