"""The learner's steps when memory runs out."""

from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from grpo_roc_jax.config import read_config
from grpo_roc_jax.learner.group_learner import GroupLearner
from grpo_roc_jax.learner.learner import Learner
from grpo_roc_jax.learner.pack import BatchConfig
from grpo_roc_jax.learner.update import OptimConfig, make_score
from grpo_roc_jax.method.compose import Scores
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.process.points import injected
from grpo_roc_jax.run.learning import takes_turns
from tests.helpers.samples import make_group
from tests.learner.test_update import MODEL, ONE, UPDATE, batch_on, mesh_of, state_on, step_of
from tests.learner.test_update import rows as rows  # a fixture

OPTIM = OptimConfig(lr=1e-2, warmup_steps=0, eps=1e-2)
"""With the usual `eps` Adam's first step moves a parameter by the learning rate even if its gradient is rounding."""


def learner_of(axes, fails):
    """A learner whose update runs out of memory where `fails` says so of the shape of a micro-batch."""
    step = step_of(axes, optim=OPTIM)

    def update(state, batch):
        if fails(batch.tokens.shape[1]):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes")
        return step(state, batch)

    learner = Learner(MODEL, mesh=mesh_of(axes))
    learner.update_step = update
    return learner


@pytest.mark.parametrize("axes", [(1, 1, 1), pytest.param((2, 1, 1), marks=pytest.mark.slow)])
def test_memory_that_runs_out_halves_micro_batches_and_changes_no_gradient(rows, axes, caplog):
    """The trained parameters stay those of the whole micro-batches, and later steps begin with the halves."""
    batch, _ = batch_on(axes, rows, BatchConfig(row_length=32, rows=2 * axes[0]))
    count = batch.tokens.shape[1]
    tight = learner_of(axes, lambda rows: rows == count)
    expected, measured = learner_of(axes, lambda rows: False).optimizer_step(state_on(axes, OPTIM), batch)
    for _ in range(2):
        state, numbers = tight.optimizer_step(state_on(axes, OPTIM), batch)
        for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)
        assert float(numbers["update/grad_norm"]) == pytest.approx(float(measured["update/grad_norm"]), rel=1e-6)
        assert numbers["update/micro_batches"] == 2 * measured["update/micro_batches"]
    assert tight.halvings.counts == {"update": 1} and caplog.text.count("memory ran out") == 1


def test_rollouts_go_on_between_the_parts_of_an_update():
    calls = []

    def parts(state, rows, *, between):
        for part in rows:
            calls.append(part)
            between()
        return state, {}

    learner = Learner(MODEL)
    learner.parts = parts
    assert learner.optimizer_step("state", "ab") == ("state", {}) and calls == ["a", "b"], "nothing goes on yet"
    learner.meanwhile = lambda: calls.append("chunk")
    learner.optimizer_step("state", "cd")
    assert calls[2:] == ["c", "chunk", "d", "chunk"]


@pytest.mark.parametrize(
    ("words", "axes", "expected"),
    [((), ONE, False), (("lag=0",), ONE, False), (("lag=1",), (1, 2, 1), True), (("lag=1",), (2, 1, 1), False)],
)
def test_an_update_comes_in_parts_with_a_lag_and_undivided_rows_only(words, axes, expected):
    config = read_config(*(f"rollout.step_limit={{kind: stream, {word.replace('=', ': ')}}}" for word in words))
    assert takes_turns(config, mesh_of(axes)) is expected


def test_memory_that_is_never_enough_and_other_faults_are_raised(rows):
    batch, _ = batch_on((1, 1, 1), rows)
    other = learner_of((1, 1, 1), lambda rows: False)
    other.update_step = lambda *_: (_ for _ in ()).throw(jax.errors.JaxRuntimeError("INTERNAL: x"))
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        other.optimizer_step(state_on(optim=OPTIM), batch)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        learner_of((1, 1, 1), lambda rows: True).optimizer_step(state_on(optim=OPTIM), batch)


def test_a_scoring_pass_that_runs_out_of_memory_gives_the_same_scores(rows):
    """Injected twice: micro-batches of four rows become those of one."""
    batch, _ = batch_on((1, 1, 1), rows, BatchConfig(row_length=32, rows=4))
    learner, score = learner_of((1, 1, 1), lambda rows: False), make_score(MODEL, UPDATE, mesh_of((1, 1, 1)))
    params = state_on().params
    expected = jax.device_get(score(params, batch))[0]
    with injected("score.memory=oom@1,score.memory=oom@2") as happened:
        logprobs = learner.halvings.run("score", partial(score, params), batch)[0]
    assert learner.halvings.counts == {"score": 2} and happened.total() == 2
    np.testing.assert_allclose(np.asarray(logprobs).reshape(expected.shape), expected, atol=1e-5)


@pytest.mark.parametrize(("words", "scored"), [([], False), (["--surrogate.old_logprobs=scored"], True)])
def test_rows_carry_the_scores_of_a_pass_that_the_method_takes(words, scored):
    config, group = read_config(*words), make_group(1, 4)
    logprobs = [np.full(t.length, -0.5, np.float32) for t in group.trajectories]

    class Scored(GroupLearner):
        def score(self, *_):
            return Scores(logprobs, [-2 * values for values in logprobs])

    run = SimpleNamespace(train=SimpleNamespace(params=None), method=AlgoState(), step=0)
    made, measured = Scored(config, Learner(MODEL), None).rows([group], run)
    for row, values in zip(made, logprobs, strict=True):
        assert (row.scored is not None) is scored
        if scored:
            assert row.scored[0] is values and (row.scored[1] == 1.0).all()
    gaps = [np.abs(t.logprobs + 0.5)[t.policy_mask] for t in group.trajectories]  # the loss compares with the pass
    mean, largest = np.concatenate(gaps).mean(), max(map(np.max, gaps))
    expected = {"loss/logprob_gap_mean": mean, "loss/logprob_gap_max": largest} if scored else {}
    assert {k: v for k, v in measured.items() if "gap" in k} == pytest.approx(expected, rel=1e-5)
