"""A step whose rollouts all failed alike ends the run; the commonest failure is named when a run ends otherwise."""

import pytest

from grpo_roc_jax.config import LimitsConfig
from grpo_roc_jax.engine.protocol import FailureCount, RolloutStats
from grpo_roc_jax.run.sample import merge_failures
from grpo_roc_jax.run.watch import INFRASTRUCTURE_STATUS, Stopped, Watch

BUG, READ = "step: KeyError: 'x' (mine.py, line 3)", "step: ValueError: not a number: 'hm' (mine.py, line 9)"


def failures(count, text=BUG, **more):
    return {text: FailureCount(text, count, **more)}


@pytest.mark.parametrize(
    ("counts", "rollouts", "ends"),
    [
        (failures(8), 8, True),
        (failures(7), 8, False),
        (failures(4) | failures(4, "reset: OSError"), 8, False),
        (failures(8, READ, by_policy=True), 8, True),
        (failures(8, READ, by_policy=True, same=False), 8, False),
        ({}, 0, False),
    ],
)
def test_all_rollouts_of_the_first_step_failed_alike(counts, rollouts, ends):
    watch = Watch(LimitsConfig())
    if not ends:
        return watch.look_at_failures(counts, rollouts)
    with pytest.raises(Stopped, match=r"all 8 rollouts of a step ended alike: step: .* \(mine\.py, line") as caught:
        watch.look_at_failures(counts, rollouts)
    assert caught.value.status == INFRASTRUCTURE_STATUS


def test_what_the_policy_caused_ends_no_run_that_has_gone_better():
    watch = Watch(LimitsConfig())
    watch.look_at_failures(failures(7, READ, by_policy=True), 8)
    watch.look_at_failures(failures(8, READ, by_policy=True), 8)
    with pytest.raises(Stopped):
        watch.look_at_failures(failures(8), 8)
    resumed = Watch(LimitsConfig())
    resumed.recall([{"rollout/stop_failed": 0.5}])
    resumed.look_at_failures(failures(8, READ, by_policy=True), 8)
    # An evaluation is no such rollout: a run that ended in its first step ends there again if nothing has changed.
    again = Watch(LimitsConfig())
    again.recall([{"step": 0, "eval/all/avg@1": 0.5}, {"step": 1, "rollout/stop_failed": 1.0}])
    with pytest.raises(Stopped, match="all 8 rollouts of a step ended alike"):
        again.look_at_failures(failures(8, READ, by_policy=True), 8)


@pytest.mark.parametrize(("share", "lost"), [(0.25, 0.6), (1.0, 1.0)])
def test_the_commonest_failure_is_named_in_the_last_line(share, lost):
    watch = Watch(LimitsConfig(infrastructure_share=share, infrastructure_steps=1))
    watch.look_at_failures(failures(3) | failures(2, "reset: OSError"), 8)
    with pytest.raises(Stopped, match=r"; 3 of 8 rollouts of the last such step: step: KeyError: 'x'"):
        watch.look({"verdict/infrastructure": lost})
    assert watch.new_failures(failures(3)) == [BUG] and watch.new_failures(failures(9)) == []


def test_counts_of_several_processes_add_up():
    stats = RolloutStats()
    stats.count_failure("k", READ, by_policy=True)
    stats.count_failure("k", READ, by_policy=True)
    assert stats.failures == {"k": FailureCount(READ, 2, True, True)}
    merged = merge_failures([stats.failures, {"k": FailureCount("another", 1, True)}, failures(4)])
    assert merged == {"k": FailureCount(READ, 3, True, False), BUG: FailureCount(BUG, 4)}
