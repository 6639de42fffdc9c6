"""Planning in the loop: which rows fit, which trajectories a round leaves out, what the update compiles for."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_roc_jax.config import read_config
from grpo_roc_jax.contrib.methods.microcoder import STAGE
from grpo_roc_jax.learner.group_learner import temperature_of
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.run.learning import most_rows
from grpo_roc_jax.run.sample import draw_problems
from grpo_roc_jax.settings.cli import ConfigError
from grpo_roc_jax.types import Condition
from tests.helpers.samples import make_group
from tests.planner.test_plan import test_a_planned_batch_has_the_leaves_that_the_method_packs as packs
from tests.run import test_rounds as core
from tests.run.test_rounds import a_run, method, placed
from tests.test_carry_over import refused_with_partial


def test_the_update_trains_at_the_temperature_of_the_rollouts():
    config = method("microcoder")

    def run(stage):
        return SimpleNamespace(method=AlgoState(memory={STAGE: np.array([float(stage)])}))

    assert [temperature_of(config, run(stage)) for stage in (0, 2)] == [0.9, 1.1]
    assert temperature_of(method("grpo"), run(0)) == 1.0


def test_the_drift_mask_sees_the_policy_of_each_update():
    """What has drifted leaves in the second update; ratio and advantages stay those of the first."""

    def update(train, packed):
        return SimpleNamespace(params=train.params + 0.2), {"loss/value": np.float32(0)}

    config = method("drift_mask", "--batch.updates=2", "--group.problems=2", "--weights.masks.drift.threshold=0.1")
    groups = [make_group(seed, 4) for seed in (1, 2)]
    learner, run = placed(config, update), a_run()
    given = learner.batches(groups, (), run)
    _, taken, _ = learner.update(run, given)
    assert all(row.policy_mask.any() for batch in given for row in batch.rows)
    later = [(row, before) for row, before in zip(taken[1].rows, given[1].rows, strict=True)]
    lost = [not row.policy_mask.any() for row, _ in later]
    assert lost == [bool(before.advantages.max() < 0) for _, before in later] and 0 < sum(lost) < len(lost)
    for row, before in later:
        np.testing.assert_array_equal(row.logprobs_old, before.logprobs_old)
        np.testing.assert_array_equal(row.advantages, before.advantages)


def test_what_a_method_measures_is_in_the_metrics_of_the_step():
    """With scores 0.1 below the recorded ones: of the first pass, though later updates move the policy."""

    def update(train, packed):
        return SimpleNamespace(params=train.params + 0.2), {"loss/value": np.float32(0)}

    config = method("seq_mask_tis", "--batch.updates=2", "--group.problems=2")
    learner, run = placed(config, update), replace(a_run(), train=SimpleNamespace(params=0.1))
    given = learner.batches([make_group(seed, 4) for seed in (1, 2)], (), run)
    assert not any(row.policy_mask.any() for batch in given for row in batch.rows), "e^-0.1 is below 0.999"
    metrics = learner.update(run, given)[2]
    assert metrics["mismatch/geometric_ratio"] == pytest.approx(np.exp(-0.1), abs=1e-5)
    assert metrics["mismatch/token_kl_k1"] == pytest.approx(0.1, abs=1e-5)
    assert metrics["mismatch/rejection_geometric_ratio_below"] == 1 and metrics["mismatch/veto_vetoed"] == 0


def test_problems_are_chosen_among_several_batches():
    (batches, state), rng = core.batches_of_problems(), np.random.default_rng(0)
    config = method("spo", "--group.problems=4", "--plan.problems.pool=3", "--batch.updates=1")
    chosen = draw_problems(config, batches, state, rng)
    assert len({p.uid for p in chosen}) == 4
    assert len(list(batches)) == 6


def test_most_rows_bounds_every_plan():
    assert most_rows(method("knapsack", "--group.problems=8", "--group.size=4")) == 32
    one_of_two = method("knapsack", "--group.problems=8", "--group.size=4", "--batch.updates=8")
    assert most_rows(one_of_two) == 32 - 7 * 2, "seven problems keep two rollouts each"
    assert most_rows(method("expo", "--group.problems=8", "--group.size=4", "--plan.second.count=2")) == 32 + 16


def test_recipes_in_which_the_ratio_matters_have_several_updates():
    names = ("vespo", "drift_mask", "luspo", "seq_mask_tis", "scalerl")
    core.test_recipes_in_which_the_ratio_matters_have_several_updates(names)


def test_a_dry_run_knows_that_a_moved_prompt_gives_a_ratio(capsys):
    core.test_a_dry_run_says_when_no_ratio_can_differ_from_1("guide_grpo", [], False, capsys)


@pytest.mark.parametrize("condition", [Condition("hint", 1), Condition("paraphrase", 1)], ids=str)
def test_a_first_wave_that_does_not_fit_goes_plain(condition):
    core.test_what_does_not_fit_is_left_out_and_a_first_wave_goes_plain(condition)


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("s_grpo", ["--group.size=4"], "set group.size 9"),
        ("xrpo", ["--plan.budget.pilot=16"], "leaves nothing to allocate"),
        ("grpo_roc", ["--resample.kind=rc_roc"], "nothing to tell apart"),
        ("spo", ["--plan.problems.pool=1"], "must be at least 2"),
        ("microcoder", ["--plan.temperature.temperatures", "1.1", "0.9"], "must rise"),
    ],
)
def test_plans_that_contradict_other_sections_are_refused(name, words, said, capsys):
    core.test_plans_that_contradict_other_sections_are_refused(name, words, said, capsys)


def test_a_budget_of_several_waves_has_no_rows_to_go_on_with(tmp_path):
    refused_with_partial(tmp_path, "--plan.budget=knapsack")
    with pytest.raises(ConfigError, match="use one of the two"):
        read_config("--rollout.step_limit=stream", "--plan.budget=knapsack")


def test_a_planned_batch_has_the_leaves_that_rows_of_several_temperatures_pack():
    packs("microcoder")
