"""Rollouts that run on from step to step, in one process and in several: groups whole, oldest first, not too old, each
row in one process and none lost; lag 0 changes nothing."""

import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from types import SimpleNamespace
from unittest import mock

import jax
import numpy as np
import pytest

import grpo_roc_jax as g
from grpo_roc_jax.data.pipeline import make_problem_stream
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh
from grpo_roc_jax.pod.preemption import Preempted, Preemption
from grpo_roc_jax.pod.processes import Processes
from grpo_roc_jax.run import components
from grpo_roc_jax.run.policy import initial_state
from grpo_roc_jax.run.run_state import RunState
from grpo_roc_jax.stream.rollout_stream import ESS, RolloutStream, age_metrics, late_groups, may_take, oldest_whole
from grpo_roc_jax.stream.samplers import remote_samplers
from grpo_roc_jax.train import sample_step
from tests.helpers import stream_fakes as fakes
from tests.helpers.samples import make_group, make_trajectory
from tests.helpers.stream_fakes import PROBLEMS, SAMPLES, check_keys, check_taken, contents, in_threads, limit, play
from tests.test_train import config_in

STEPS = 6


def made(seed, *words, processes=None):
    config = fakes.known(f"steps={STEPS}", "rollout.step_limit=stream", *words)
    return fakes.opened(config, seed + (processes.index if processes else 0), processes)


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("late", ["wait", "drop"])
def test_groups_are_whole_oldest_first_and_none_too_old(lag, late):
    """Random ends, random rounds: every row that began in a process is taken once or dropped, all processes take the
    same groups, and keys are never used twice."""

    def worker(processes, seed):
        stream, run, engine = made(seed, *limit(lag, late), "group.dynamic_sampling_rounds=3", processes=processes)
        evaluates = processes.count == 1 and seed % 2 == 1
        batches, dropped = play(stream, run, engine, STEPS, np.random.default_rng(seed), again=0.3, evaluates=evaluates)
        return batches, dropped, engine, [part.trajectories for part in run.partial]

    for seed, count in (*((seed, 1) for seed in range(8)), (10, 2), (20, 2), (30, 4)):
        results = in_threads(count, partial(worker, seed=seed))
        batches, dropped, _, left = results[0]
        numbers, waiting = check_taken(batches, lag, late), sum(map(len, left))
        assert (np.diff(np.reshape(numbers, (-1, PROBLEMS))) > 0).all()
        kept = sum(group.size for _, samples in batches for group in samples.groups)
        began = len(check_keys([engine for _, _, engine, _ in results]))
        assert began == kept + dropped + waiting or (late == "drop" and count > 1)
        assert all(t.tokens.size for part in left for t in part)
        for each, lost, engine, partial_rows in results:
            assert contents(each) == contents(batches) and lost == dropped and len(partial_rows) == len(left)
            assert lag or engine.released == len(batches)
        assert lag or (numbers == list(range(len(numbers))) and waiting == dropped == 0)


def test_the_last_steps_begin_nothing_that_no_step_would_take():
    stream, run, engine = made(0, *limit(2))
    play(stream, run, engine, STEPS, np.random.default_rng(0))
    assert len(engine.submitted) == STEPS * PROBLEMS * SAMPLES and engine.released == 1


def slow_at_first(engine, problems):
    """Rows of the first problems end only when they are waited for."""

    def advance(timeout_s=np.inf):
        quick = [ticket for ticket, (row, _) in engine.rows.items() if int(row.problem.uid[1:]) >= problems]
        return engine.leave(quick or sorted(engine.rows)[: int(timeout_s > 0)])

    engine.advance = advance


def test_no_more_old_groups_are_left_over_than_later_steps_can_take():
    """Four groups end only when they are waited for. Were all of them waited for at last, one step could not take them,
    and the fourth would become too old."""
    stream, run, engine = made(0, *limit(2))
    slow_at_first(engine, 4)
    batches, dropped = play(stream, run, engine, STEPS, np.random.default_rng(0))
    uids = [[int(group.problem.uid[1:]) for group in samples.groups] for _, samples in batches]
    assert uids[0] == [4, 5, 6] and uids[1] == [0, 7, 8] and not dropped
    assert sorted(chain.from_iterable(uids)) == list(range(STEPS * PROBLEMS))


@pytest.mark.parametrize("lag", [2, 3, 4])
def test_keys_are_never_used_twice_after_many_groups_were_dropped_at_once(lag):
    stream, run, engine = made(0, *limit(lag, "drop"), "steps=12")
    slow_at_first(engine, lag * PROBLEMS)
    _, dropped = play(stream, run, engine, 12, np.random.default_rng(0))
    assert dropped and check_keys([engine])


def test_groups_that_wait_in_the_buffer_are_dropped_when_they_are_too_old():
    stream, run, engine = made(0, *limit(1))
    run.step, engine.version = 5, 5
    run.buffer.add([make_group(0, 2, step=3), make_group(1, 2, step=4)])
    stream.next_round(run, 5)
    assert len(run.buffer) == 1 and run.buffer.added == run.buffer.removed + 1
    assert stream.after_update(run, [], {})[0]["rollout/dropped_stale"] == 2.0


def test_the_host_works_until_the_device_is_ready():
    calls = []
    leaf = SimpleNamespace(is_ready=lambda: len(calls) >= 3)
    g.Learner.fetched(SimpleNamespace(meanwhile=lambda: calls.append(1)), {"x": leaf})
    assert len(calls) == 3


def test_age_metrics_by_hand():
    row = make_trajectory(np.random.default_rng(0), 0, turns=1, width=9)
    num_tokens = int(row.policy_mask.sum())
    versions = np.where(row.policy_mask, 7, -1)
    mixed = versions.copy()
    mixed[np.flatnonzero(row.policy_mask)[0]] = 5
    rows = (replace(row, versions=versions), replace(row, versions=mixed))
    metrics = age_metrics([g.Group(g.Problem("p", "?", "1", "t"), rows, make_group(0, 2).verdicts)], 8)
    assert metrics["rollout/lag_max"] == 3.0 and metrics["rollout/partial_share"] == (0.5 if num_tokens > 1 else 0.0)
    assert metrics["rollout/lag_mean"] == pytest.approx(1 + 2 / (2 * num_tokens))
    assert age_metrics([], 3)["rollout/lag_max"] == 0.0


def test_a_low_effective_sample_size_is_said_once():
    stream, run, _ = made(0, *limit(1), "rollout.step_limit.min_effective=0.4")
    messages = [stream.after_update(run, [], {ESS: value})[1] for value in (0.9, 0.3, 0.2, 0.5, 0.39)]
    assert [bool(text) for text in messages] == [False, True, False, False, True]
    assert "0.30 of the tokens, below rollout.step_limit.min_effective = 0.4" in messages[1]


def test_importance_weights_come_with_a_lag_and_cannot_be_left_out():
    config = g.read_config("--rollout.step_limit=stream")
    assert [part.kind for part in config.weights.factors] == ["truncated_is"] and config.surrogate.scored_ratio
    masked = g.read_config("--rollout.step_limit=stream", "--weights.factors=masked_is")
    assert [part.kind for part in masked.weights.factors] == ["masked_is"]
    plain = g.read_config("--rollout.step_limit={kind: stream, lag: 0}")
    assert plain.weights.factors == () and plain.surrogate.old_logprobs == "recorded"
    for words, message in (
        (["--weights.factors=[]"], "lag = 1 trains on tokens of earlier policies"),
        (["--surrogate.old_logprobs=recorded"], "old_logprobs scored"),
        (["--rollout.early_exit=true"], "use one of the two"),
        (["--environment=class", "--environment.path=x:Y"], "whose state is lost"),
    ):
        with pytest.raises(g.ConfigError, match=message):
            g.read_config("--rollout.step_limit=stream", *words)


def test_groups_that_become_whole_during_an_update_are_known_to_a_process_without_rows():
    """The first process decides at once in the second round; the other one has nothing left to roll out."""
    config = g.read_config("steps=2", "group.problems=1", "rollout.step_limit=stream", "rollout.step_limit.lag=1")

    def worker(processes):
        stream, run, engine = fakes.opened(config, processes.index, processes)
        advance = engine.advance
        if processes.first:
            engine.advance = lambda timeout_s=np.inf: time.sleep(0.01) or []
        uids = [stream.next_round(run, 0).groups[0].problem.uid]
        engine.advance = advance
        while processes.first and engine.rows:
            stream.meanwhile()
        stream.after_update(run, (), {})
        run.step = engine.version = 1
        return [*uids, stream.next_round(run, 1).groups[0].problem.uid]

    assert in_threads(2, worker) == [["p1", "p0"]] * 2


@pytest.mark.parametrize(("begun", "going", "stop"), [(1, 1, 1), (1, 1, 3), (2, 1, 2), (2, 3, 2)])
def test_a_checkpoint_goes_on_with_every_row_in_any_number_of_processes(begun, going, stop):
    """Cut rows keep their tokens and versions; the same problems are trained on, and no key is used for another."""

    def begin(processes):
        stream, run, engine = made(0, *limit(2), processes=processes)
        before, _ = play(stream, run, engine, stop, np.random.default_rng(1))
        return before, run.bundle(), len(engine.rows)

    def go_on(processes):
        stream, run, engine = made(7, *limit(2), processes=processes)
        run.load(replace(bundle, train={"state": "state", "reference": ()}))
        after, _ = play(stream, run, engine, STEPS - stop, np.random.default_rng(2))
        return after, engine, {int(part.problem.uid[1:]) for part in run.partial}

    parts = in_threads(begun, begin)
    before, bundle, _ = parts[0]
    assert all(each.host == bundle.host for _, each, _ in parts)
    results = in_threads(going, go_on)
    resumed = [request.resume for request in check_keys([each[1] for each in results]) if request.resume is not None]
    assert len(resumed) == sum(rows for *_, rows in parts) > 0 and all(cut.policy_mask.any() for cut in resumed)
    after, _, still_open = results[0]
    numbers = check_taken([*before, *after], 2)
    assert len(numbers) == STEPS * PROBLEMS
    assert {*range(max(numbers))} - {*numbers} <= still_open, "what was begun and not trained on is still open"


def test_a_signal_to_one_process_ends_the_step_in_all():
    def worker(processes):
        stream, run, engine = made(0, *limit(1), processes=processes)
        if processes.index:
            processes.preemption.asked = True
        else:
            engine.advance = lambda timeout_s: setattr(processes, "others_stopping", True) or []
        with pytest.raises(Preempted):
            stream.next_round(run, 0)
        return processes.gather(1, uninterrupted=True)

    assert in_threads(2, worker) == [[1, 1], [1, 1]]


def test_what_a_process_posts_is_read_until_the_next_gather():
    store = {}

    class Posting(Processes):
        service = SimpleNamespace(
            key_value_set=lambda key, value, allow_overwrite: store.update({key: value}),
            key_value_dir_get=lambda folder: [pair for pair in store.items() if pair[0].startswith(folder)],
            key_value_delete=lambda key: store.pop(key),
        )

        def __init__(self, index):
            self.index, self.count, self.preemption = index, 2, Preemption()

        def exchange(self, value):
            return [value]

    pair = [Posting(0), Posting(1)]
    assert pair[0].post("1") == ["1"] and pair[1].post("5") == ["1", "5"]
    assert pair[0].post("1,2") == ["1,2", "5"]
    for process in pair:
        process.gather(None)
    assert pair[1].post("") == [""] and pair[0].post("3") == ["", "3"]
    assert len(store) == 2, "nothing is left of the time before"
    assert Processes().post("7") == ["7"]


def rolled_out(config, steps, change=lambda params, step: params, before=lambda step, pool: None):
    """The groups of some steps without updates, in the order in which they are trained on; their metrics, and the
    compilations after the first."""
    batches, metrics, compiled = [], [], 0
    mesh = make_mesh(ShardingConfig(), jax.devices()[:1])
    with (
        mock.patch.object(components, "make_mesh", lambda _: mesh),
        g.make_parts(config) as (policy, sampling),
        remote_samplers(config, policy, sampling) as pool,
    ):
        params = initial_state(config, policy.model, policy.mesh).params
        stream = make_problem_stream(config.data, problems=config.group.problems, seed=config.seed)
        run = RunState(SimpleNamespace(params=params), (), stream, g.initial_state(config))
        streams = config.rollout.step_limit.streams
        rollouts = RolloutStream(config, sampling, policy.mesh, pool) if streams else None
        for step in range(steps):
            run.train.params = change(params, step)
            before(step, pool)
            samples = sample_step(config, policy, sampling, run, rollouts)
            compiled += samples.metrics()["rollout/compilations"] if step else 0
            batches.append(samples.groups)
            if rollouts is not None:
                for _ in range(3):
                    (rollouts.meanwhile or (lambda: None))()
                metrics.append(rollouts.after_update(run, samples.groups, {})[0])
            run.step += 1
        assert sampling.sampler.engine.take_stats().rollouts == 0 or rollouts is None
    return batches, metrics, compiled


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
    limited = g.read_config("--rollout.step_limit=stream", f"--rollout.step_limit.lag={lag}")
    rollout = replace(config.rollout, step_limit=limited.rollout.step_limit)
    changes = {"weights": limited.weights, "surrogate": limited.surrogate} if lag else {}
    batches, _, compiled = rolled_out(replace(config, rollout=rollout, steps=3, **changes), 3)
    assert compiled == 0
    if not lag:
        order, expected = ([[g.problem.uid for g in groups] for groups in steps] for steps in (batches, wanted))
        assert order == expected
    for (uid, row, verdict), (other_uid, other, other_verdict) in zip(
        sorted_rows(batches), sorted_rows(wanted), strict=True
    ):
        assert (uid, row.sample, row.stop, verdict) == (other_uid, other.sample, other.stop, other_verdict)
        np.testing.assert_array_equal(row.tokens, other.tokens)
        np.testing.assert_allclose(row.logprobs, other.logprobs, rtol=0, atol=1e-5 if lag else 0)
        if not lag:
            np.testing.assert_array_equal(row.versions, other.versions)
    assert max(age_metrics(groups, step)["rollout/lag_max"] for step, groups in enumerate(batches)) == lag


@dataclass(eq=False)
class Open:
    born: int
    complete: bool = True


@pytest.mark.parametrize(
    ("born", "running", "taken", "trained", "lag", "drops", "late", "expected"),
    [
        ((3, 3, 3), (0,), 2, 3, 1, False, 0, True),
        ((3, 3, 3), (0,), 3, 3, 1, False, 0, False),  # as many whole groups as a step takes
        # A group that would become too old is waited for; what is cancelled has not ended yet.
        ((2, 3, 3), (0,), 2, 3, 1, False, 1, False),
        ((2, 3, 3), (0,), 2, 3, 1, True, 1, False),
        ((2, 3, 3), (0,), 2, 3, 2, False, 0, True),
        # Two a step, lag 2: three of version 1 are due at step 3, and step 2 would leave all of them.
        ((1, 1, 1, 2, 2, 2), (0, 1, 2), 2, 2, 2, False, 0, False),
        ((1, 1, 1, 2, 2, 2), (0, 1, 2), 2, 2, 2, True, 0, True),
        ((1, 1, 1, 2, 2, 2), (1, 2), 2, 2, 2, False, 0, True),  # it takes one of them, and leaves two
        # After a resume with fewer groups a step more are due than can be taken, and waiting would not help.
        ((1, 1, 1, 1, 1, 1), (5,), 2, 2, 2, False, 0, True),
    ],
)
def test_the_rule_by_hand(born, running, taken, trained, lag, drops, late, expected):
    groups = [Open(age, index not in running) for index, age in enumerate(born)]
    assert late_groups(groups, trained, lag) == groups[:late]
    assert may_take(groups, taken, trained, lag, drops=drops) is expected
    assert oldest_whole(groups, taken) == [group for group in groups if group.complete][:taken]
