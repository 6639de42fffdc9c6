"""Deadlines, early exit, carry-over, stop texts, refusals: whatever ends or alters a row besides its own tokens."""

import io
import time
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from grpo_roc_jax.engine.config import DroppedRows, PartialRows, RolloutConfig, SamplingConfig
from grpo_roc_jax.engine.engine import make_engine
from grpo_roc_jax.engine.records import Finish, RolloutProgress, RunOptions, SingleTurn, Wait, rollout_display
from grpo_roc_jax.engine.table import awaits_observation
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh
from grpo_roc_jax.record.loggers import ConsoleWriter
from tests.helpers.rollout_fakes import (
    EOS,
    MODEL,
    ROLLOUT,
    STOPS,
    FakeTools,
    changed,
    engine_for,
    make_requests,
    one_rollout,
    run,
    sharp_params,
)


@pytest.fixture(scope="module")
def params():
    return sharp_params()


def configured(params, requests, environment, **changes):
    """A run on the programs of ROLLOUT with other options, so that nothing is compiled for them."""
    shared = engine_for(ROLLOUT, SamplingConfig(), None)
    engine = changed(shared, **changes)
    return lambda **options: engine.run(shared.publish(params, 5), requests, environment, RunOptions(**options))


class HangingTools(FakeTools):
    """Calls of the rows in `hanging` never answer. `naps` counts the polls that waited 0.02 s for nothing."""

    hanging = frozenset()
    naps = 0

    def poll(self, timeout_s):
        if not any(item[1] not in self.hanging for item in self.pending) and timeout_s >= 0.02:
            time.sleep(0.02)
            self.naps += 1
        return [(index, answer) for index, answer in super().poll(timeout_s) if index not in self.hanging]


@pytest.mark.parametrize("proven", [True, False])
def test_a_hanging_call_ends_its_row_only(params, proven):
    """As the policy's own missed deadline, or as an infrastructure failure if the call may never have run."""
    requests = make_requests(3, 4)
    expected, _, _ = run(params, requests)
    tools = HangingTools(requests)
    tools.hanging = {i for i, rollout in enumerate(expected) if len(rollout.turns) > 1 and i % 2}
    assert tools.hanging
    tools.proven, stop = proven, "deadline" if proven else "infrastructure"
    rollouts, stats = configured(params, requests, tools, turn_timeout_s=0.2)()
    for i, (a, b) in enumerate(zip(rollouts, expected, strict=True)):
        if i in tools.hanging:
            assert a.stop == stop and i in tools.cancels
            assert a.turns == b.turns[:1] and len(a.tokens) == a.turns[0].end
        else:
            np.testing.assert_array_equal(a.tokens, b.tokens)
    assert stats.stops[stop] == len(tools.hanging)
    assert tools.naps <= len(tools.hanging) * 0.2 / 0.02, "no row waits longer than its limit"


def test_a_fault_in_one_row_costs_that_row(params, caplog):
    class Faulty(FakeTools):
        def turn_ended(self, index, turn):
            if index in (1, 4):
                raise RecursionError("a parser of the user's")
            return super().turn_ended(index, turn)

    requests = make_requests(3, 4)
    expected, _, _ = run(params, requests)
    rollouts, stats = configured(params, requests, Faulty(requests))()
    assert stats.stops["infrastructure"] == 2 and caplog.text.count("a turn could not be taken") == 1
    for i, (a, b) in enumerate(zip(rollouts, expected, strict=True)):
        if i in (1, 4):
            assert a.stop == "infrastructure"
        else:
            np.testing.assert_array_equal(a.tokens, b.tokens)


def test_trajectory_and_step_deadlines(params):
    requests = make_requests(2, 4)
    tools = HangingTools(requests)
    tools.hanging = set(range(8))
    _, stats = configured(params, requests, tools, trajectory_timeout_s=0.1)()
    assert stats.stops["deadline"] + stats.stops["eos"] + stats.stops["length"] == 8
    assert stats.stops["deadline"] > 0

    tools = HangingTools(requests)
    tools.hanging = set(range(8))
    rollouts, stats = configured(params, requests, tools, step_limit=DroppedRows(0.3))()
    assert tools.naps <= 0.3 / 0.02
    assert stats.stops["deadline"] == sum(map(awaits_observation, rollouts)) > 0
    assert sum(stats.stops.values()) == 8


def test_early_exit_cancels_what_a_decided_group_no_longer_needs(params):
    requests = make_requests(3, 6)
    expected, _, _ = run(params, requests)
    ended: dict[int, list[int]] = {}

    def cancel_policy(index, rollout):
        if rollout.stop == "cancelled":
            return []
        members = ended.setdefault(requests[index].place, [])
        members.append(index)
        if len(members) < 2:
            return []
        return [i for i, request in enumerate(requests) if request.place == requests[index].place]

    tools = FakeTools(requests)
    rollouts, stats = configured(params, requests, tools, early_exit=True)(cancel_policy=cancel_policy)
    whole = [i for i, rollout in enumerate(rollouts) if rollout.stop != "cancelled"]
    assert stats.stops["cancelled"] == 18 - len(whole)
    assert [requests[i].place for i in whole] == [0, 0, 1, 1, 2, 2]
    for a, b in zip(rollouts, expected, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens[: len(a.tokens)])
    _, stats = configured(params, requests, FakeTools(requests))(cancel_policy=cancel_policy)
    assert stats.stops["cancelled"] == 0, "off by default"


def test_partial_rows_continue_exactly_where_they_stopped(params):
    requests = make_requests(3, 4)
    expected, _, _ = run(params, requests)

    class Uneven(FakeTools):
        def turn_ended(self, index, turn):
            self.latency_polls = 1 + 4 * (index % 2)
            return super().turn_ended(index, turn)

    def clock():
        """Jumps over the deadline at the third poll, while some rows wait and some decode."""
        return 1e6 if tools.now >= 3 else 0.0

    tools = Uneven(requests)
    first, _ = configured(params, requests, tools, clock=clock, step_limit=PartialRows(60.0))()
    partial = [i for i, rollout in enumerate(first) if rollout.stop == "cancelled"]
    kinds = {(awaits_observation(first[i]), len(first[i].turns) > 0) for i in partial}
    assert kinds == {(True, True), (False, True), (False, False)}, "waiting, in a turn, never admitted"
    resumed = [replace(requests[i], resume=first[i]) for i in partial]

    tools = FakeTools(resumed)
    # A turn that reaches the end of the tokens is open or unanswered: the environment has yet to see its end.
    tools.turns = {
        place: sum(turn.end < len(first[i].tokens) for turn in first[i].turns) for place, i in enumerate(partial)
    }
    engine = engine_for(ROLLOUT, SamplingConfig(), None)
    second, _ = engine.run(engine.publish(params, 6), resumed, tools)
    for i, rollout in zip(partial, second, strict=True):
        np.testing.assert_array_equal(rollout.tokens, expected[i].tokens)
        np.testing.assert_allclose(rollout.logprobs, expected[i].logprobs, atol=5e-6)
        assert (rollout.turns, rollout.stop) == (expected[i].turns, expected[i].stop)
        cut = len(first[i].tokens)
        assert set(rollout.versions[:cut][rollout.policy_mask[:cut]]) <= {5}
        assert set(rollout.versions[cut:][rollout.policy_mask[cut:]]) <= {6}


def test_a_step_that_is_shorter_than_a_chunk_draws_one(params):
    """Rows whose prompt is written have one more chunk after each step, so they end."""
    requests = make_requests(2, 2)
    expected, _, _ = run(params, requests)
    engine = changed(engine_for(ROLLOUT, SamplingConfig(), None), step_limit=PartialRows(1e-9), pipeline="on")
    going, found = dict(enumerate(requests)), {}
    for _ in range(200):
        rollouts, _ = engine.run(engine.publish(params, 5), list(going.values()), FakeTools(list(going.values())))
        for (i, request), rollout in zip(list(going.items()), rollouts, strict=True):
            if rollout.stop == "cancelled" and not awaits_observation(rollout):
                going[i] = replace(request, resume=rollout)
            else:
                found[i] = rollout
                del going[i]
        if not going:
            break
    assert not going
    for i, rollout in found.items():
        np.testing.assert_array_equal(rollout.tokens, expected[i].tokens[: len(rollout.tokens)])


def test_a_stop_text_rolls_the_row_back(params):
    """A pair of ids that is no single stop token; the row continues from its end as if nothing had followed."""
    requests = make_requests(3, 4)

    class Texts(FakeTools):
        def find_stop(self, index, new_tokens, before):
            hits = np.flatnonzero(new_tokens % 7 == 3)
            return int(hits[0]) + 1 if len(hits) else None

    results = []
    for pipeline in ("off", "on"):
        tools = Texts(requests)
        rollouts, stats = configured(params, requests, tools, pipeline=pipeline)()
        results.append(rollouts)
        assert stats.dropped_tokens > 0
        assert stats.sampled_tokens == sum(int(r.policy_mask.sum()) for r in rollouts)
        for turn in tools.ended:
            assert not (turn.tokens[:-1] % 7 == 3).any()
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.logprobs, b.logprobs)
    stepwise = engine_for(replace(ROLLOUT, chunk=1), SamplingConfig(), None)
    exact, stats = stepwise.run(stepwise.publish(params, 5), requests, Texts(requests))
    assert stats.dropped_tokens == 0
    for a, b in zip(exact, results[0], strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)


def test_stop_text_out_of_range_is_refused(params):
    class Wrong(SingleTurn):
        def find_stop(self, index, new_tokens, before):
            return 0

    with pytest.raises(ValueError, match="find_stop kept 0"):
        configured(params, make_requests(1, 1), Wrong())()


def test_length_ends_a_row_whatever_the_environment_says(params):
    class Eager(SingleTurn):
        def turn_ended(self, index, turn):
            return Wait() if turn.reason == "length" else Finish("eos")

    requests = make_requests(2, 3, budget=3)
    _, stats = configured(params, requests, Eager())()
    assert stats.stops["length"] + stats.stops["eos"] == 6 and stats.stops["length"] > 0


def test_progress_counts(params):
    seen = []

    class Recorder:
        def update(self, **figures):
            seen.append(figures)

    requests = make_requests(2, 5)
    configured(params, requests, FakeTools(requests))(progress=Recorder())
    assert seen[-1] | {"tokens": 0} == {"live": 0, "waiting": 0, "done": 10, "total": 10, "tokens": 0}
    assert any(figures["waiting"] for figures in seen)
    assert all(figures["live"] + figures["waiting"] <= ROLLOUT.slots for figures in seen)


@pytest.mark.parametrize(
    ("mode", "terminal", "drawn"),
    [
        ("auto", True, True),
        ("live", True, True),
        ("live", False, False),
        ("auto", False, False),
        ("plain", True, False),
    ],
)
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


def test_progress_is_a_line_beside_the_training_bar():
    out = io.StringIO()
    writer = ConsoleWriter(5, console=Console(file=out, force_terminal=True, width=120, _environ={}))
    progress = RolloutProgress(writer.bars)
    progress.update(live=4, waiting=2, done=3, total=9, tokens=40)
    assert [task.description for task in writer.bars.tasks] == ["training", "rollouts"]
    progress.update(live=0, waiting=0, done=9, total=9, tokens=80)
    assert [task.description for task in writer.bars.tasks] == ["training"]
    writer.close()
    assert "2 on tools" in out.getvalue()
    assert ConsoleWriter(5, "live", Console(file=io.StringIO())).bars is None


def test_slot_use_on_unequal_lengths(params):
    """Refilled slots stay busy: a static batch of the same lengths would use a third of its slots."""

    class Cut(SingleTurn):
        """Ends rows at lognormal lengths through the stop text, so that the workload is the same everywhere."""

        def __init__(self, lengths):
            self.left = lengths

        def find_stop(self, index, new_tokens, before):
            before, self.left[index] = self.left[index], self.left[index] - len(new_tokens)
            return int(before) if self.left[index] <= 0 else None

    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(2.7, 0.8, 96)), 1, 78).astype(int)
    shared = engine_for(ROLLOUT, SamplingConfig(), None)
    requests = make_requests(12, 8)
    silent = make_engine(MODEL, replace(ROLLOUT, max_turn_tokens=0), SamplingConfig(), ())
    _, stats = silent.run(shared.publish(params, 0), requests, Cut(lengths.copy()))
    assert stats.sampled_tokens == lengths.sum()
    batches = lengths.reshape(-1, ROLLOUT.slots)
    static = lengths.sum() / (batches.max(axis=1).sum() * ROLLOUT.slots)
    assert static < 0.5
    assert stats.slot_use > 0.72, stats


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
    ],
)
def test_refused_requests(params, requests, message):
    with pytest.raises(ValueError, match=message):
        configured(params, requests, SingleTurn())()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: make_engine(MODEL, ROLLOUT, SamplingConfig(), (97,)), r"stop ids \[97\] lie outside .* 97"),
        (lambda: make_engine(MODEL, ROLLOUT, SamplingConfig(), (96,), vocab_size=96), r"stop ids \[96\]"),
        (lambda: RolloutConfig(kv_tokens=100), "cannot hold one row"),
        (
            lambda: make_engine(MODEL, ROLLOUT, SamplingConfig(), STOPS, make_mesh(ShardingConfig())),
            "rollout.slots = 6 does not divide over the 8",
        ),
        (
            lambda: make_engine(
                MODEL, replace(ROLLOUT, slots=8, kv_tokens=500), SamplingConfig(), (EOS,), make_mesh(ShardingConfig())
            ),
            "leaves 62 tokens each",
        ),
        (lambda: RolloutConfig(append_lengths=(32, 16)), "rising lengths"),
        (lambda: PartialRows(seconds=0), r"seconds\n.*greater than 0"),
        (lambda: SamplingConfig(top_p=0.0), r"top_p\n.*greater than 0"),
    ],
)
def test_refused_settings(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("pipeline", ["off", "on"])
def test_a_row_goes_on_after_a_stop_id_that_its_environment_holds_back(params, pipeline):
    """As if the device had never stopped at it: the same tokens as without these stop ids."""
    requests = make_requests(3, 4)
    expected, _, _ = run(params, requests)
    drawn = [int(t) for r in expected for turn in r.turns for t in r.tokens[turn.start : turn.end - 1]]
    held = sorted(set(drawn), key=drawn.count)[-3:]

    class Holding(FakeTools):
        asked = 0

        def goes_on(self, index, tokens):
            self.asked += 1
            return int(tokens[-1]) in held

    tools = Holding(requests)
    engine = make_engine(MODEL, replace(ROLLOUT, pipeline=pipeline), SamplingConfig(), sorted({*STOPS, *held}), seed=11)
    rollouts, _ = engine.run(engine.publish(params, 5), requests, tools, RunOptions())
    assert tools.asked >= sum(map(drawn.count, held)) > 3
    for row, other in zip(rollouts, expected, strict=True):
        np.testing.assert_array_equal(row.tokens, other.tokens)
        np.testing.assert_allclose(row.logprobs, other.logprobs, atol=1e-4)
        assert [(turn.start, turn.end) for turn in row.turns] == [(turn.start, turn.end) for turn in other.turns]
