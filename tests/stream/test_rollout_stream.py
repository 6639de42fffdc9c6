"""Rollouts that run on from step to step: groups whole, oldest first, not too old, none lost; lag 0 changes nothing."""

from dataclasses import dataclass, replace
from itertools import chain
from types import SimpleNamespace
from unittest import mock

import jax
import numpy as np
import pytest

from grpo_roc_jax.config import Config, read_config
from grpo_roc_jax.data.pipeline import make_problem_stream
from grpo_roc_jax.learner.learner import Learner
from grpo_roc_jax.method.compose import initial_state
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh
from grpo_roc_jax.model.transformer import init_params
from grpo_roc_jax.run import components as components_module
from grpo_roc_jax.run.components import make_parts
from grpo_roc_jax.run.run_state import RunState
from grpo_roc_jax.settings.cli import ConfigError
from grpo_roc_jax.stream.rollout_stream import ESS, RolloutStream, age_metrics, late_groups, may_take, oldest_whole
from grpo_roc_jax.train import sample_step
from grpo_roc_jax.types import Group, Problem
from tests.helpers.samples import make_group, make_trajectory
from tests.helpers.stream_fakes import PROBLEMS, SAMPLES, check_keys, check_taken, known, limit, opened, play, rows_of
from tests.test_train import config_in


def made(seed, *words):
    return opened(known("steps=6", "rollout.step_limit=stream", *words), seed)


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("late", ["wait", "drop"])
def test_groups_are_whole_oldest_first_and_none_too_old(lag, late):
    """Random ends, random rounds: every row that began is taken once or dropped, and keys are never used twice."""
    for seed in range(8):
        stream, run, engine = made(seed, *limit(lag, late), "group.dynamic_sampling_rounds=3")
        rng = np.random.default_rng(seed)
        batches, dropped = play(stream, run, engine, 6, rng, again=0.3, evaluates=seed % 2 == 1)
        numbers = np.reshape(check_taken(batches, lag, late), (-1, PROBLEMS))
        assert (np.diff(numbers) > 0).all()
        kept, waiting = rows_of(batches, stream)
        assert len(check_keys([engine])) == kept + dropped + waiting
        if not lag:
            assert waiting == dropped == 0 and engine.released == len(batches)


def test_the_last_steps_begin_nothing_that_no_step_would_take():
    stream, run, engine = made(0, *limit(2))
    play(stream, run, engine, 6, np.random.default_rng(0))
    assert len(engine.submitted) == 6 * PROBLEMS * SAMPLES and engine.released == 1


def slow_at_first(engine, problems):
    """Rows of the first problems end only when they are waited for."""

    def advance(timeout_s=np.inf):
        quick = [ticket for ticket, (row, _) in engine.rows.items() if int(row.problem.uid[1:]) >= problems]
        ends = quick or sorted(engine.rows)[: int(timeout_s > 0)]
        finished = engine.ended + [(ticket, engine.trajectory(ticket, "answer")) for ticket in ends]
        engine.ended, engine.rows = [], {t: row for t, row in engine.rows.items() if t not in ends}
        return finished

    engine.advance = advance


def test_no_more_old_groups_are_left_over_than_later_steps_can_take():
    """Four groups end only when they are waited for. Were all of them waited for at last, one step could not take them,
    and the fourth would become too old."""
    stream, run, engine = made(0, *limit(2))
    slow_at_first(engine, 4)
    batches, dropped = play(stream, run, engine, 6, np.random.default_rng(0))
    uids = [[int(group.problem.uid[1:]) for group in samples.groups] for _, samples in batches]
    assert uids[0] == [4, 5, 6] and uids[1] == [0, 7, 8] and not dropped
    assert sorted(chain.from_iterable(uids)) == list(range(6 * PROBLEMS))


@pytest.mark.parametrize("lag", [2, 3, 4])
def test_keys_are_never_used_twice_after_many_groups_were_dropped_at_once(lag):
    stream, run, engine = made(0, *limit(lag, "drop"), "steps=12")
    slow_at_first(engine, lag * PROBLEMS)
    _, dropped = play(stream, run, engine, 12, np.random.default_rng(0))
    assert dropped and check_keys([engine])


def test_groups_that_wait_in_the_buffer_are_dropped_when_they_are_too_old():
    stream, run, engine = made(0, *limit(1))
    rows = make_group(0, 2, step=3)
    run.step, engine.version = 5, 5
    run.buffer.add([rows, make_group(1, 2, step=4)])
    stream.next_round(run, 5)
    assert len(run.buffer) == 1 and run.buffer.added == run.buffer.removed + 1
    assert stream.after_update(run, [], {})[0]["rollout/dropped_stale"] == 2.0


def test_a_failure_during_an_update_ends_the_step_after_it():
    """The update has donated its state, so that nothing may fail before it is complete."""
    stream, run, engine = made(0, *limit(1))
    stream.next_round(run, 0)

    def fail(timeout_s):
        raise OSError("the executor is gone")

    engine.advance = fail
    stream.meanwhile()
    stream.meanwhile()
    stream.after_update(run, [], {})
    with pytest.raises(OSError, match="is gone"):
        stream.next_round(run, 0)


def test_the_host_works_until_the_device_is_ready():
    calls = []
    leaf = SimpleNamespace(is_ready=lambda: len(calls) >= 3)
    learner = SimpleNamespace(meanwhile=lambda: calls.append(1))
    Learner.fetched(learner, {"x": leaf})
    assert len(calls) == 3


def test_age_metrics_by_hand():
    rng = np.random.default_rng(0)
    row = make_trajectory(rng, 0, turns=1, width=9)
    num_tokens = int(row.policy_mask.sum())
    versions = np.where(row.policy_mask, 7, -1)
    mixed = versions.copy()
    mixed[np.flatnonzero(row.policy_mask)[0]] = 5
    rows = (replace(row, versions=versions), replace(row, versions=mixed))
    metrics = age_metrics([Group(Problem("p", "?", "1", "t"), rows, make_group(0, 2).verdicts)], 8)
    assert metrics["rollout/lag_max"] == 3.0 and metrics["rollout/partial_share"] == (0.5 if num_tokens > 1 else 0.0)
    assert metrics["rollout/lag_mean"] == pytest.approx(1 + 2 / (2 * num_tokens))
    assert age_metrics([], 3)["rollout/lag_max"] == 0.0


def test_a_low_effective_sample_size_is_said_once():
    stream, run, _ = made(0, *limit(1), "rollout.step_limit.min_effective=0.4")
    messages = [stream.after_update(run, [], {ESS: value})[1] for value in (0.9, 0.3, 0.2, 0.5, 0.39)]
    assert [bool(text) for text in messages] == [False, True, False, False, True]
    assert "0.30 of the tokens, below rollout.step_limit.min_effective = 0.4" in messages[1]


def test_importance_weights_come_with_a_lag_and_cannot_be_left_out():
    config = read_config("--rollout.step_limit=stream")
    assert [part.kind for part in config.weights.factors] == ["truncated_is"] and config.surrogate.scored_ratio
    masked = read_config("--rollout.step_limit=stream", "--weights.factors=masked_is")
    assert [part.kind for part in masked.weights.factors] == ["masked_is"]
    plain = read_config("--rollout.step_limit={kind: stream, lag: 0}")
    assert plain.weights.factors == () and plain.surrogate.old_logprobs == "recorded"
    with pytest.raises(ConfigError, match="lag = 1 trains on tokens of earlier policies"):
        read_config("--rollout.step_limit=stream", "--weights.factors=[]")
    with pytest.raises(ConfigError, match="old_logprobs scored"):
        read_config("--rollout.step_limit=stream", "--surrogate.old_logprobs=recorded")
    for words, message in (
        (["--rollout.early_exit=true"], "use one of the two"),
        (["--environment=class", "--environment.path=x:Y"], "whose state is lost"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_config("--rollout.step_limit=stream", *words)


def rolled_out(config: Config, steps: int, change=lambda params, step: params):
    """The groups of some steps without updates, in the order in which they are trained on; compilations after the
    first."""
    batches, compiled = [], 0
    mesh = make_mesh(ShardingConfig(), jax.devices()[:1])
    with mock.patch.object(components_module, "make_mesh", lambda _: mesh), make_parts(config) as (policy, sampling):
        params = init_params(jax.random.key(3), policy.model)
        stream = make_problem_stream(config.data, problems=config.group.problems, seed=config.seed)
        run = RunState(SimpleNamespace(params=params), (), stream, initial_state(config))
        rollouts = RolloutStream(config, sampling, policy.mesh) if config.rollout.step_limit.streams else None
        for step in range(steps):
            run.train.params = change(params, step)
            samples = sample_step(config, policy, sampling, run, rollouts)
            compiled += samples.metrics()["rollout/compilations"] if step else 0
            batches.append(samples.groups)
            if rollouts is not None:
                for _ in range(3):
                    (rollouts.meanwhile or (lambda: None))()
                rollouts.after_update(run, samples.groups, {})
            run.step += 1
        assert sampling.sampler.engine.take_stats().rollouts == 0 or rollouts is None
    return batches, compiled


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    config = config_in(tmp_path_factory.mktemp("x") / "run", "--sharding.data=1")
    return config, rolled_out(config, 3)[0]


def sorted_rows(steps):
    rows = [(group.problem.uid, t, v) for groups in steps for group in groups for t, v in group.pairs]
    return sorted(rows, key=lambda row: (row[0], row[1].sample))


@pytest.mark.parametrize("lag", [0, 1])
def test_rollouts_of_the_same_weights_are_those_of_plain_steps(plain, lag):
    """With lag 0 to the byte and in order; with a lag the same rows, of steps to come when they begin."""
    config, wanted = plain
    limit = read_config("--rollout.step_limit=stream", f"--rollout.step_limit.lag={lag}")
    rollout = replace(config.rollout, step_limit=limit.rollout.step_limit)
    changes = {"weights": limit.weights, "surrogate": limit.surrogate} if lag else {}
    batches, compiled = rolled_out(replace(config, rollout=rollout, steps=3, **changes), 3)
    assert compiled == 0
    if not lag:
        order = [[group.problem.uid for group in groups] for groups in batches]
        assert order == [[group.problem.uid for group in groups] for groups in wanted]
    for (uid, row, verdict), (other_uid, other, other_verdict) in zip(
        sorted_rows(batches), sorted_rows(wanted), strict=True
    ):
        assert (uid, row.sample, row.stop, verdict) == (other_uid, other.sample, other.stop, other_verdict)
        np.testing.assert_array_equal(row.tokens, other.tokens)
        same = np.testing.assert_array_equal if not lag else (lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5))
        same(row.logprobs, other.logprobs)
        if not lag:
            np.testing.assert_array_equal(row.versions, other.versions)
    assert max(age_metrics(groups, step)["rollout/lag_max"] for step, groups in enumerate(batches)) == lag


# The rule of which groups a step takes, worked out by hand.


@dataclass(eq=False)
class Open:
    born: int
    complete: bool = True


def groups(*born, running=()):
    return [Open(age, index not in running) for index, age in enumerate(born)]


def test_a_step_needs_as_many_whole_groups_as_it_takes():
    open_groups = groups(3, 3, 3, running=(0,))
    assert oldest_whole(open_groups, 2) == open_groups[1:] and may_take(open_groups, 2, 3, 1)
    assert not may_take(open_groups, 3, 3, 1)


def test_a_group_that_would_become_too_old_is_waited_for():
    open_groups = groups(2, 3, 3, running=(0,))
    assert late_groups(open_groups, 3, 1) == open_groups[:1] and not may_take(open_groups, 2, 3, 1)
    assert not late_groups(open_groups, 3, 2) and may_take(open_groups, 2, 3, 2)
    assert not may_take(open_groups, 2, 3, 1, drops=True), "what is cancelled has not ended yet"


def test_no_more_old_groups_are_left_than_the_next_step_takes():
    """Two a step, lag 2: three of version 1 are due at step 3, and step 2 would leave all of them."""
    open_groups = groups(1, 1, 1, 2, 2, 2, running=(0, 1, 2))
    assert not may_take(open_groups, 2, 2, 2) and may_take(open_groups, 2, 2, 2, drops=True)
    open_groups[0].complete = True
    assert may_take(open_groups, 2, 2, 2), "it takes one of them, and leaves two"


def test_a_step_of_old_groups_alone_goes_on():
    """As after a resume with fewer groups a step: more are due than can be taken, and waiting would not help."""
    assert may_take(groups(1, 1, 1, 1, 1, 1, running=(5,)), 2, 2, 2)
