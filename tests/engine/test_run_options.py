"""Deadlines, early exit, carry-over, stop texts, refusals: whatever ends or alters a row besides its own tokens."""

import io
import itertools
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from grpo_roc_jax.engine.config import DroppedRows, PartialRows, RolloutConfig, SamplingConfig
from grpo_roc_jax.engine.engine import make_engine
from grpo_roc_jax.engine.protocol import RolloutProgress, RunOptions, SingleTurn, rollout_display
from grpo_roc_jax.engine.table import awaits_observation
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh
from grpo_roc_jax.record.loggers import ConsoleWriter
from tests.helpers.engine_checks import assert_same
from tests.helpers.rollout_fakes import MODEL, ROLLOUT, STOPS, FakeTools, StopPairs, make_requests, one_rollout, variant


def configured(params, requests, environment, **changes):
    """A run on the programs of ROLLOUT with other options, so that nothing is compiled for them."""
    engine = variant(**changes)
    return lambda **options: engine.run(engine.publish(params, 5), requests, environment, RunOptions(**options))


class HangingTools(FakeTools):
    """Calls of the rows in `hanging` never answer. The clock goes on only while the engine waits for nothing else."""

    def __init__(self, requests, hanging, proven=None):
        super().__init__(requests)
        self.hanging, self.proven, self.seconds = set(hanging), proven, 0.0

    def clock(self):
        return self.seconds

    def poll(self, timeout_s):
        if all(index in self.hanging for _, index, _ in self.pending):
            self.seconds += min(timeout_s, 0.02)
        return [(index, answer) for index, answer in super().poll(timeout_s) if index not in self.hanging]


@pytest.mark.parametrize("proven", [True, False])
def test_a_hanging_call_ends_its_row_only(params, twelve, proven):
    """As the policy's own missed deadline, or as an infrastructure failure if the call may never have run."""
    requests, expected = twelve
    tools = HangingTools(requests, (i for i, row in enumerate(expected) if len(row.turns) > 1 and i % 2), proven)
    assert tools.hanging
    rollouts, stats = configured(params, requests, tools, clock=tools.clock, turn_timeout_s=0.2)()
    stop = "deadline" if proven else "infrastructure"
    assert stats.stops[stop] == len(tools.hanging)
    for i in tools.hanging:
        row = rollouts[i]
        assert row.stop == stop and i in tools.cancels
        assert row.turns == expected[i].turns[:1] and len(row.tokens) == row.turns[0].end
    others = set(range(12)) - tools.hanging
    assert_same([rollouts[i] for i in others], [expected[i] for i in others])
    assert tools.seconds <= len(tools.hanging) * 0.21, "no row waits longer than its limit"


def test_a_fault_in_one_row_costs_that_row(params, twelve, caplog):
    class Faulty(FakeTools):
        def turn_ended(self, index, turn):
            if index in (1, 4):
                raise RecursionError("a parser of the user's")
            return super().turn_ended(index, turn)

    requests, expected = twelve
    rollouts, stats = configured(params, requests, Faulty(requests))()
    assert stats.stops["infrastructure"] == 2 and caplog.text.count("a turn could not be taken") == 1
    assert [i for i, row in enumerate(rollouts) if row.stop == "infrastructure"] == [1, 4]
    others = set(range(12)) - {1, 4}
    assert_same([rollouts[i] for i in others], [expected[i] for i in others])


@pytest.mark.parametrize("how", ["a batch", "a batch beside others", "the pool"])
def test_rows_that_are_given_up_are_cancelled_and_the_others_go_on(params, twelve, how):
    requests, expected = twelve
    engine = variant()
    sampler, rows, ended = engine.publish(params, 5), {}, {}

    class Noting(FakeTools):
        def completed(self, index, trajectory):
            ended[index] = trajectory.stop
            return trajectory

    def interrupt():
        if len(tools.ended) > 4:
            raise KeyboardInterrupt

    tools, options = Noting(requests[6:]), RunOptions(2, before_chunk=interrupt)
    if how == "a batch beside others":
        engine.submit(sampler, requests[:6], FakeTools(requests[:6]))
        rows |= engine.advance()
    with pytest.raises(KeyboardInterrupt):
        if how == "the pool":
            engine.submit(sampler, requests[6:], tools, options)
            while True:
                engine.advance()
        engine.run(sampler, requests[6:], tools, options)
    if how == "the pool":
        engine.release()
    assert tools.cancels == [index for index in range(6) if ended[index] == "cancelled"] and tools.cancels
    while ended := engine.advance():
        rows |= ended
    again, _ = engine.run(sampler, requests[6:], FakeTools(requests[6:]))
    assert_same([*map(rows.get, sorted(rows)), *again], expected[0 if rows else 6 :])


def test_trajectory_and_step_deadlines(params):
    requests = make_requests(2, 4)
    tools = HangingTools(requests, range(8))
    _, stats = configured(params, requests, tools, clock=tools.clock, trajectory_timeout_s=0.1)()
    assert stats.stops["deadline"] + stats.stops["eos"] + stats.stops["length"] == 8 and stats.stops["deadline"] > 0
    tools = HangingTools(requests, range(8))
    rollouts, stats = configured(params, requests, tools, clock=tools.clock, step_limit=DroppedRows(0.3))()
    assert tools.seconds <= 0.31
    assert stats.stops["deadline"] == sum(map(awaits_observation, rollouts)) > 0
    assert sum(stats.stops.values()) == 8


def test_early_exit_cancels_what_a_decided_group_no_longer_needs(params):
    requests = make_requests(3, 6)
    expected, _ = configured(params, requests, FakeTools(requests))()
    ended = Counter()

    def cancel_policy(index, rollout):
        place = requests[index].place
        ended[place] += rollout.stop != "cancelled"
        return [i for i, request in enumerate(requests) if request.place == place and ended[place] >= 2]

    rollouts, stats = configured(params, requests, FakeTools(requests), early_exit=True)(cancel_policy=cancel_policy)
    finished = [request.place for request, row in zip(requests, rollouts, strict=True) if row.stop != "cancelled"]
    assert finished == [0, 0, 1, 1, 2, 2] and stats.stops["cancelled"] == 12
    for a, b in zip(rollouts, expected, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens[: len(a.tokens)])
    seen, note = [], SimpleNamespace(update=lambda **figures: seen.append(figures))
    _, stats = configured(params, requests, FakeTools(requests))(cancel_policy=cancel_policy, progress=note)
    assert stats.stops["cancelled"] == 0, "off by default"
    assert seen[-1] | {"tokens": 0} == {"live": 0, "waiting": 0, "done": 18, "total": 18, "tokens": 0}
    assert any(figures["waiting"] for figures in seen)
    assert all(figures["live"] + figures["waiting"] <= ROLLOUT.slots for figures in seen)


def test_partial_rows_continue_exactly_where_they_stopped(params, twelve):
    requests, expected = twelve

    class Uneven(FakeTools):
        def turn_ended(self, index, turn):
            self.latency_polls = 1 + 4 * (index % 2)
            return super().turn_ended(index, turn)

    tools = Uneven(requests)
    # The clock jumps over the deadline at the third poll, while some rows wait and some decode.
    late = {"clock": lambda: 1e6 if tools.now >= 3 else 0.0, "step_limit": PartialRows(60.0)}
    first, _ = configured(params, requests, tools, **late)()
    cut = [i for i, rollout in enumerate(first) if rollout.stop == "cancelled"]
    kinds = {(awaits_observation(first[i]), len(first[i].turns) > 0) for i in cut}
    assert kinds == {(True, True), (False, True), (False, False)}, "waiting, in a turn, never admitted"
    resumed = [replace(requests[i], resume=first[i]) for i in cut]
    tools = FakeTools(resumed)
    # A turn that reaches the end of the tokens is open or unanswered: the environment has yet to see its end.
    tools.turns = {row: sum(turn.end < len(first[i].tokens) for turn in first[i].turns) for row, i in enumerate(cut)}
    engine = variant()
    second, _ = engine.run(engine.publish(params, 6), resumed, tools)
    assert_same(second, [expected[i] for i in cut], atol=5e-6, versions=False)
    for i, rollout in zip(cut, second, strict=True):
        edge, mask = len(first[i].tokens), rollout.policy_mask
        np.testing.assert_array_equal(rollout.versions[mask], np.where(np.arange(rollout.length) < edge, 5, 6)[mask])


def test_a_stop_text_rolls_the_row_back(params, twelve):
    """Two ids, which may be drawn in two chunks; the row continues from their end as if nothing had followed."""
    requests, _ = twelve
    stepwise = variant(replace(ROLLOUT, chunk=1))
    exact, stats = stepwise.run(stepwise.publish(params, 5), requests, StopPairs(requests))
    assert stats.dropped_tokens == 0
    results = []
    for pipeline in ("off", "on"):
        tools = StopPairs(requests)
        rollouts, stats = configured(params, requests, tools, pipeline=pipeline)()
        assert stats.dropped_tokens >= tools.cut >= 10
        assert stats.sampled_tokens == sum(int(r.policy_mask.sum()) for r in rollouts)
        assert not any(((turn.tokens[1:-1] + turn.tokens[:-2]) % 5 == 0).any() for turn in tools.ended)
        results.append(rollouts)
    assert_same(*results, atol=0)
    assert_same(results[0], exact)


@pytest.mark.parametrize(("limit", "pipeline"), [(PartialRows(60.0), "on"), (DroppedRows(60.0), "off")])
def test_a_step_that_is_too_late_draws_one_chunk_and_an_evaluation_is_not_cut(params, twelve, limit, pipeline):
    """Rows go on in the next step, so they end however short the steps are."""
    requests, expected = twelve
    late = {"clock": partial(next, itertools.count(0.0, 100.0)), "step_limit": limit, "pipeline": pipeline}
    evaluated, _ = configured(params, requests, FakeTools(requests), **late)(purpose="evaluate")
    assert_same(evaluated, expected)
    trained, _ = configured(params, requests, FakeTools(requests), **late)()
    assert {trajectory.stop for trajectory in trained} & {"cancelled", "deadline", "infrastructure"}
    assert max(trajectory.length - trajectory.prompt_length for trajectory in trained) == ROLLOUT.chunk
    for row, other in zip(trained, expected, strict=True):
        np.testing.assert_array_equal(row.tokens, other.tokens[: row.length])


MODES = [("auto", True, True), ("live", True, True), ("live", False, False), ("auto", False, False)]


@pytest.mark.parametrize(("mode", "terminal", "drawn"), [*MODES, ("plain", True, False)])
def test_progress_is_drawn_on_a_terminal_that_is_asked_for_it_and_never_in_a_file(mode, terminal, drawn):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120, _environ={})
    with rollout_display(mode, console) as progress:
        assert isinstance(progress, RolloutProgress) is drawn
        progress.update(live=4, waiting=2, done=3, total=9, tokens=40)
        progress.update(live=0, waiting=0, done=9, total=9, tokens=80)
        progress.update(live=7, waiting=1, done=1, total=8, tokens=10)
    assert ("4 live · 2 on tools" in out.getvalue() and "7 live · 1 on tools" in out.getvalue()) is drawn
    assert drawn or not out.getvalue()
    # Beside the bar of the training it is a line.
    writer = ConsoleWriter(5, console=Console(file=out, force_terminal=True, width=120, _environ={}))
    progress = RolloutProgress(writer.bars)
    progress.update(live=5, waiting=3, done=3, total=9, tokens=40)
    assert [task.description for task in writer.bars.tasks] == ["training", "rollouts"]
    progress.update(live=0, waiting=0, done=9, total=9, tokens=80)
    assert [task.description for task in writer.bars.tasks] == ["training"]
    writer.close()
    assert "3 on tools" in out.getvalue() and ConsoleWriter(5, "live", Console(file=io.StringIO())).bars is None


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([], "group is empty"),
        ([one_rollout(0, np.arange(41), 5)], "prompt of 41 tokens, must be 1 to 40"),
        ([one_rollout(0, np.arange(0), 5)], "prompt of 0 tokens"),
        ([one_rollout(0, np.arange(4), 81)], "budget of 81 tokens, must be 1 to 80"),
        ([one_rollout(0, np.array([97]), 8)], "prompt ids from 97 to 97"),
        ([one_rollout(0, None, 8)], "has no prompt ids"),
        ([one_rollout(0, np.arange(4), 3, prefix=(5, 6, 7))], "begins with 3 response tokens"),
        (make_requests(2, 3, step=None)[::2] * 2, "requests 0 and 3 both ask for step 0, place 0, sample 0"),
        (make_requests(1, 1), "find_stop kept 0"),
    ],
)
def test_refused_requests(params, requests, message):
    environment = SingleTurn()
    environment.find_stop = lambda index, new_tokens, before: 0
    with pytest.raises(ValueError, match=message):
        configured(params, requests, environment)()


def build(stops=STOPS, mesh=None, vocab_size=None, **rollout):
    return make_engine(MODEL, replace(ROLLOUT, **rollout), SamplingConfig(), stops, mesh, vocab_size=vocab_size)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (partial(build, (97,)), r"stop ids \[97\] lie outside .* 97"),
        (partial(build, (96,), vocab_size=96), r"stop ids \[96\]"),
        (lambda: build(mesh=make_mesh(ShardingConfig())), "rollout.slots = 6 does not divide over the 8"),
        (lambda: build(mesh=make_mesh(ShardingConfig()), slots=8, kv_tokens=500), "leaves 62 tokens each"),
        (lambda: RolloutConfig(kv_tokens=100), "cannot hold one row"),
        (lambda: RolloutConfig(append_lengths=(32, 16)), "rising lengths"),
        (lambda: PartialRows(seconds=0), r"seconds\n.*greater than 0"),
        (lambda: replace(ROLLOUT, kv_start=999), "rollout.kv_start = 999; must be at most the 720 tokens"),
        (lambda: SamplingConfig(top_p=0.0), r"top_p\n.*greater than 0"),
    ],
)
def test_refused_settings(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("pipeline", ["off", "on"])
def test_a_row_goes_on_after_a_stop_id_that_its_environment_holds_back(params, twelve, pipeline):
    """As if the device had never stopped at it: the same tokens as without these stop ids."""
    requests, expected = twelve
    drawn = [int(t) for r in expected for turn in r.turns for t in r.tokens[turn.start : turn.end - 1]]
    held_ids = sorted(set(drawn), key=drawn.count)[-3:]

    class Holding(FakeTools):
        asked = 0

        def goes_on(self, index, tokens):
            self.asked += 1
            return int(tokens[-1]) in held_ids

    tools, stops = Holding(requests), sorted({*STOPS, *held_ids})
    engine = make_engine(MODEL, replace(ROLLOUT, pipeline=pipeline), SamplingConfig(), stops, seed=11)
    rollouts, _ = engine.run(engine.publish(params, 5), requests, tools)
    assert tools.asked >= sum(map(drawn.count, held_ids)) > 3
    assert_same(rollouts, expected, atol=1e-4)
