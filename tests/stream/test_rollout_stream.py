"""Rollouts that run on from step to step: groups whole, oldest first, not too old, and no row lost."""

from dataclasses import replace
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
from grpo_roc_jax.pod.preemption import Preempted
from grpo_roc_jax.pod.processes import Processes
from grpo_roc_jax.run import components
from grpo_roc_jax.run.policy import initial_state
from grpo_roc_jax.run.run_state import RunState
from grpo_roc_jax.stream.rollout_stream import RolloutStream, age_metrics
from grpo_roc_jax.stream.samplers import remote_samplers
from grpo_roc_jax.train import sample_step
from tests.helpers import stream_fakes as fakes
from tests.helpers.stream_fakes import PROBLEMS, check_keys, check_taken, contents, in_threads, limit, play
from tests.test_train import config_in

STEPS = 6


def made(seed, *words, processes=None):
    config = fakes.known(f"steps={STEPS}", "rollout.step_limit=stream", *words)
    return fakes.opened(config, seed + (processes.index if processes else 0), processes)


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("late", ["wait", "drop"])
def test_groups_are_whole_oldest_first_and_none_too_old(lag, late):
    """All processes take the same groups, every row is taken once or dropped, and keys are never used twice."""

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


def test_no_more_old_groups_are_left_over_than_later_steps_can_take():
    """Four groups end only when they are waited for; one step could not take all, and the fourth would get too old."""
    stream, run, engine = made(0, *limit(2))

    def advance(timeout_s=np.inf):
        quick = [ticket for ticket, (row, _) in engine.rows.items() if int(row.problem.uid[1:]) >= 4]
        return engine.leave(quick or sorted(engine.rows)[: int(timeout_s > 0)])

    engine.advance = advance
    batches, dropped = play(stream, run, engine, STEPS, np.random.default_rng(0))
    uids = [[int(group.problem.uid[1:]) for group in samples.groups] for _, samples in batches]
    assert uids[0] == [4, 5, 6] and uids[1] == [0, 7, 8] and not dropped
    assert sorted(chain.from_iterable(uids)) == list(range(STEPS * PROBLEMS))


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
    service = SimpleNamespace(
        key_value_set=lambda key, value, allow_overwrite: store.update({key: value}),
        key_value_dir_get=lambda folder: [pair for pair in store.items() if pair[0].startswith(folder)],
        key_value_delete=store.pop,
    )
    posting = type("Posting", (Processes,), {"service": service, "exchange": lambda self, value: [value]})
    pair = [posting(), posting()]
    for index, process in enumerate(pair):
        process.index, process.count = index, 2
    assert pair[0].post("1") == ["1"] and pair[1].post("5") == ["1", "5"]
    for process in pair:
        process.gather(None)
    assert pair[1].post("") == [""] and pair[0].post("3") == ["", "3"]
    assert len(store) == 2, "nothing is left of the time before"


def rolled_out(config, steps, change=lambda params, step: params, before=lambda step, pool: None):
    """The groups of some steps without updates, their metrics, and the compilations after the first."""
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
    changes = {"weights": limited.weights, "surrogate": limited.surrogate} if lag else {}
    changes["rollout"] = replace(config.rollout, step_limit=limited.rollout.step_limit)
    batches, _, compiled = rolled_out(replace(config, steps=3, **changes), 3)
    assert compiled == 0
    if not lag:
        order, expected = ([[g.problem.uid for g in groups] for groups in steps] for steps in (batches, wanted))
        assert order == expected
    for (uid, row, verdict), other in zip(sorted_rows(batches), sorted_rows(wanted), strict=True):
        assert (uid, verdict) == other[::2] and (row.sample, row.stop) == (other[1].sample, other[1].stop)
        np.testing.assert_allclose(row.logprobs, other[1].logprobs, rtol=0, atol=1e-5 if lag else 0)
        for name in ("tokens",) if lag else ("tokens", "versions"):
            np.testing.assert_array_equal(getattr(row, name), getattr(other[1], name))
    assert max(age_metrics(groups, step)["rollout/lag_max"] for step, groups in enumerate(batches)) == lag
