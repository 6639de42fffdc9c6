"""Planning in the loop: which rows fit, which trajectories a round leaves out, what the update compiles for."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from grpo_roc_jax.learner.group_learner import GroupLearner
from grpo_roc_jax.learner.pack import BatchConfig, pack
from grpo_roc_jax.method.compose import Scores, initial_state, next_state
from grpo_roc_jax.run.learning import most_rows
from grpo_roc_jax.run.sample import ScoredRollouts, draw_problems
from grpo_roc_jax.types import Condition
from tests.helpers import method_groups
from tests.helpers.samples import make_group
from tests.method.test_surrogate import group
from tests.planner.test_plan import test_a_planned_batch_has_the_leaves_that_the_method_packs as packs
from tests.run import test_rounds as core
from tests.run.test_rounds import a_run, method, placed
from tests.test_carry_over import refused_with_partial


def updated(train, packed):
    """An update that moves the policy."""
    return SimpleNamespace(params=train.params + 0.2), {"loss/value": np.float32(0)}


def test_masks_and_metrics_of_several_updates():
    """What has drifted leaves in the second update; ratio and advantages stay those of the first."""
    config = method("drift_mask", "--batch.updates=2", "--group.problems=2", "--weights.masks.drift.threshold=0.1")
    learner, run = placed(config, updated), a_run()
    given = learner.batches([make_group(seed, 4) for seed in (1, 2)], (), run)
    _, trained, _ = learner.update(run, given)
    assert all(row.policy_mask.any() for batch in given for row in batch.rows)
    lost = [not row.policy_mask.any() for row in trained[1].rows]
    assert lost == [before.advantages.max() < 0 for before in given[1].rows] and 0 < sum(lost) < len(lost)
    for row, before in zip(trained[1].rows, given[1].rows, strict=True):
        np.testing.assert_array_equal(row.logprobs_old, before.logprobs_old)
        np.testing.assert_array_equal(row.advantages, before.advantages)
    # With scores 0.1 below the recorded ones: of the first pass, though later updates move the policy.
    learner = placed(method("seq_mask_tis", "--batch.updates=2", "--group.problems=2"), updated)
    run = replace(a_run(), train=SimpleNamespace(params=0.1))
    metrics = learner.update(run, learner.batches([make_group(seed, 4) for seed in (1, 2)], (), run))[2]
    assert metrics["mismatch/geometric_ratio"] == pytest.approx(np.exp(-0.1), abs=1e-5)


def test_explanations_alone_have_the_leaves_of_every_batch():
    """Else a step in which nothing but explanations trains would compile a program of its own (ExPO)."""

    class ScoredAsSampled(GroupLearner):
        def score(self, params, groups, temperature):
            recorded = [t.logprobs for t in method_groups.trajectories(groups)]
            return Scores(recorded, recorded)

    config = method("expo", "--advantage.adjust=entropy_bonus", "--surrogate=kl_cov")
    learner = ScoredAsSampled(config, None, lambda problem: [1, 2])
    usual, _ = learner.rows([group()], a_run())
    alone = learner.explanation_rows([method_groups.make_group([1], condition=["explanation"])], a_run())
    leaves = [jax.tree.structure(pack(rows, BatchConfig(row_length=16, rows=1), 1)[0]) for rows in (usual, alone)]
    assert leaves[0] == leaves[1]
    assert not any(row.entropy_coefficient or np.any(row.marked) for row in alone if row.marked is not None)


def test_the_drift_of_a_tracker_is_that_of_its_remembered_samples():
    """Mean |change| of the log-probabilities of a problem's last sample, under the parameters before the update."""
    config, ran = method("spo"), []
    learner, run = placed(config), replace(a_run(), train=SimpleNamespace(params=0.02))
    learner.learner.score_batch = lambda policy, batch: ran.append(batch)
    first, other = (method_groups.make_group([1], uid=uid) for uid in "ab")
    run.method = initial_state(config)
    assert learner.drift([first], run) == {} and ran == [[]], "compiled in the first step, on nothing"
    run.method = next_state([first], [first], config, run.method)
    assert learner.drift([first, other], run) == {"a": pytest.approx(0.02, abs=1e-6)}


@pytest.mark.parametrize("second", ["none", "value"])
def test_rollouts_that_a_budget_adds_join_their_group_whatever_follows(second):
    """A pilot of four, of which one problem failed all; then the rest of 16, and what the second wave makes of it."""
    config = method("vspo", "--plan.budget=half_width", f"--plan.second={second}", "--group.size=8")
    problems, waves = [replace(core.PROBLEM, uid=uid, extra={"hints": ["h"]}) for uid in "ab"], []

    def sample_requests(weights, requests, options, partial):
        won = [[(r.problem.uid == "b") * (i % 2) for i in r.samples] for r in requests]
        waves.append([method_groups.make_group(w, problem=r.problem) for r, w in zip(requests, won, strict=True)])
        return ScoredRollouts(tuple(waves[-1]))

    groups = core.round_of(config, sample_requests, problems, step=0).rolled
    assert [[group.size for group in wave] for wave in waves[:2]] == [[4, 4], [1, 7]]
    pilot, rest, kept = map(method_groups.trajectories, (*waves[:2], groups))
    lost = set(waves[0][0].trajectories + waves[1][0].trajectories) if second == "value" else set()
    assert {*pilot, *rest} - {*kept} == lost, "a group without signal gives way as a whole"


def test_most_rows_bounds_every_plan():
    assert most_rows(method("knapsack", "--group.problems=8", "--group.size=4")) == 32
    one_of_two = method("knapsack", "--group.problems=8", "--group.size=4", "--batch.updates=8")
    assert most_rows(one_of_two) == 32 - 7 * 2, "seven problems keep two rollouts each"
    assert most_rows(method("expo", "--group.problems=8", "--group.size=4", "--plan.second.count=2")) == 32 + 16
    (batches, state), rng = core.batches_of_problems(), np.random.default_rng(0)
    config = method("spo", "--group.problems=4", "--plan.problems.pool=3", "--batch.updates=1")
    assert len({p.uid for p in draw_problems(config, batches, state, rng)}) == 4 and len(list(batches)) == 6


def test_what_the_core_promises_of_its_recipes_and_conditions(capsys, tmp_path):
    """Several updates where the ratio matters; a first wave that does not fit goes plain; leaves of planned batches."""
    core.test_a_dry_run_says_when_no_ratio_can_differ_from_1("guide_grpo", [], False, capsys)
    refused_with_partial(tmp_path, "--plan.budget=knapsack")
    names = ("vespo", "drift_mask", "luspo", "seq_mask_tis", "scalerl")
    core.test_recipes_in_which_the_ratio_matters_have_several_updates(names)
    for condition in (Condition("hint", 1), Condition("paraphrase", 1)):
        core.test_what_does_not_fit_is_left_out_and_a_first_wave_goes_plain(condition)
    packs("microcoder")


class Scoring(core.Placed):
    """As the compiled pass, which tells entropies too."""

    def score(self, params, groups, temperature):
        scores = super().score(params, groups, temperature)
        return replace(scores, entropies=[np.zeros_like(each) for each in scores.logprobs])


def test_factors_leave_out_no_token_because_training_moved_it():
    """They compare the sampler with the policy before the first update, whatever the ratio is taken against."""
    config = method("disco", "--weights.factors=[{kind: rejection}]", "--batch.updates=2", "--group.problems=2")
    learner, run = placed(config, kind=Scoring), a_run()
    groups = [make_group(seed, 4) for seed in (1, 2)]
    first = learner.rows(groups, run)[0]
    moved = learner.rows(groups, replace(run, train=SimpleNamespace(params=3.0)), before=first)[0]
    assert sum(row.policy_mask.sum() for row in first) > 0
    assert [row.policy_mask.tolist() for row in moved] == [row.policy_mask.tolist() for row in first]
