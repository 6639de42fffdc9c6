"""Groups, selections and advantages can be recomputed from the files alone."""

import json
import os
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_roc_jax.method.compose import resample_group, subset, train_rows
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.record import trace
from tests.helpers.disks import small_disk
from tests.helpers.method_groups import method
from tests.helpers.same import assert_same
from tests.helpers.samples import make_group


def run_step(seed: int, sections, groups):
    """Selection, rows and records of one step, as the training loop makes them."""
    rng = np.random.default_rng(seed)
    selections = [resample_group(group, sections, rng) for group in groups]
    trained = [subset(group, s) for group, s in zip(groups, selections, strict=True) if s.kept]
    rows = train_rows(trained, sections, AlgoState())
    return selections, rows, trace.step_records(5, groups, selections, trained=trained, rows=rows)


def test_selection_and_advantages_are_recomputed_from_the_file(tmp_path):
    sections = method(8, resample={"kind": "roc", "positive_select": "inverse"})
    groups = [make_group(seed, 16) for seed in range(5)]
    again = tuple(map(replace, groups[0].trajectories))  # equal rollouts of a problem that comes twice
    groups.append(replace(groups[0], trajectories=again, verdicts=groups[0].verdicts[::-1]))
    selections, rows, records = run_step(9, sections, groups)
    assert trace.TraceWriter(tmp_path).write(5, records)
    read = list(trace.read_trace(tmp_path, 5))
    rebuilt = trace.groups_of(read)
    assert_same(rebuilt, groups)
    again, rows_again, _ = run_step(9, sections, rebuilt)
    assert_same(again, selections)
    assert_same(rows_again, rows)
    kept_records = [record for record in read if record.kept]
    assert len(kept_records) == len(rows) > 0
    for record, row in zip(kept_records, rows, strict=True):
        mask = record.trajectory.policy_mask
        assert np.array_equal(record.advantages[mask], row.advantages[mask])
        assert record.penalties["total"] == record.penalties["error"] + record.penalties["format"]
    assert {record.why for record in read} >= {"kept", "quota", "penalty"}
    assert all(record.advantages is None for record in read if not record.kept)


def read_back(record, **options):
    return trace.from_json(json.loads(trace.to_line(record, **options)))


def test_advantages_that_differ_by_token_and_missing_parts_are_restored():
    base = trace.eval_records(2, [make_group(1, 4)])
    mask = base[0].trajectory.policy_mask
    varied = np.where(mask, np.linspace(-1, 1, len(mask)), 0).astype(np.float32)
    lost = replace(base[1], verdict=None, why="removed: infrastructure")
    for record in (replace(base[0], advantages=varied, kept=True), lost, replace(base[2], context=("a", "b"))):
        assert_same(read_back(record), record)
    older = json.loads(trace.to_line(lost))
    assert older.pop("temperature") == lost.trajectory.temperature == 0.9
    assert trace.from_json(older).trajectory.temperature is None
    line = json.loads(trace.to_line(replace(base[0], advantages=varied)))
    assert line["advantage"] == pytest.approx(float(varied[mask].mean()))


def test_records_of_removed_and_of_buffered_trajectories():
    groups = [make_group(1, 8), make_group(2, 8)]
    sections = method(4)
    selections = [resample_group(g, sections, np.random.default_rng(0)) for g in groups]
    lost = make_group(7, 1)
    waiting = make_group(8, 2)
    trained = [waiting, subset(groups[0], selections[0])]
    rows = train_rows(trained, sections, AlgoState())
    records = trace.step_records(
        3, groups, selections, removed=[(lost.problem, lost.trajectories[0])], trained=trained, rows=rows
    )
    assert len(records) == 16 + 2 + 1
    by_why = {why: [r for r in records if r.why == why] for why in {r.why for r in records}}
    assert [r.problem.uid for r in by_why["buffered"]] == [waiting.problem.uid] * 2
    assert all(r.advantages is not None for r in by_why["buffered"])
    assert by_why["removed: answer"][0].verdict is None
    assert [r.advantages is not None for r in records if r.group == 1 and r.kept] == [False] * 4  # still in the buffer
    assert [g.problem.uid for g in trace.groups_of(records)] == [g.problem.uid for g in groups]
    with pytest.raises(ValueError, match="5 rows for 6 trained trajectories"):
        trace.step_records(3, groups, selections, trained=trained, rows=rows[:5])


def changed_rows(change):
    """The records of a step that trains on a group whose rows were changed."""
    group, sections = make_group(1, 4), method(4)
    selection = resample_group(group, sections, np.random.default_rng(0))
    rows = change(group, train_rows([group], sections, AlgoState()))
    return trace.step_records(3, [group], [selection], trained=[group], rows=rows)


def test_trained_trajectories_are_matched_by_value_and_an_older_one_of_the_same_problem_is_another():
    group = make_group(1, 4)
    selection = resample_group(group, method(4), np.random.default_rng(0))
    for older, whys in ((0, set()), (1, {"buffered"})):
        again = tuple(replace(t, versions=t.versions - older) for t in group.trajectories)
        trained = replace(group, trajectories=again)
        rows = train_rows([trained], method(4), AlgoState())
        records = trace.step_records(3, [group], [selection], trained=[trained], rows=rows)
        assert {r.why for r in records if r.group < 0} == whys
        assert all((r.advantages is None) == bool(whys) for r in records[:4])


@pytest.mark.parametrize("longer", [3, -1])
def test_advantages_of_a_row_under_another_prompt_are_those_of_its_response(longer):
    expected = []

    def moved(group, rows):
        expected.extend(np.where(r.policy_mask, np.arange(r.length) + 1, 0).astype(np.float32) for r in rows)
        shifted = [np.append(np.zeros(longer, np.float32), a) if longer > 0 else a[-longer:] for a in expected]
        return [SimpleNamespace(advantages=a, scored=(a, a)) for a in shifted]

    for record, advantages in zip(changed_rows(moved), expected, strict=True):
        np.testing.assert_array_equal(record.advantages, advantages)
        np.testing.assert_array_equal(record.scored[1], advantages.astype(np.float16))


def test_ratios_and_entropies_of_a_scoring_pass_are_restored():
    def scored(group, rows):
        ratios = [t.logprobs + np.log(np.float32(1.5)) for t in group.trajectories]
        return [
            replace(row, scored=(logprobs, np.full(row.length, 0.25, np.float32)))
            for row, logprobs in zip(rows, ratios, strict=True)
        ]

    record = changed_rows(scored)[0]
    mask = record.trajectory.policy_mask
    np.testing.assert_allclose(np.exp(record.scored[0, mask].astype(np.float32)), 1.5, rtol=1e-3)
    assert (record.scored[1] == np.where(mask, 0.25, 0)).all() and not record.scored[0, ~mask].any()
    for values in (record.scored, None):  # older logs have none
        assert_same(read_back(replace(record, scored=values)).scored, values)


def test_context_holds_what_the_policy_did_not_write():
    record = trace.eval_records(1, [make_group(3, 1)])[0]
    read = read_back(record, decode=lambda ids: " ".join(map(str, ids)))
    trajectory = record.trajectory
    runs = [run for run in trace.runs_of(trajectory.policy_mask) if not run[2]]
    expected = tuple(" ".join(map(str, trajectory.tokens[a:b].tolist())) for a, b, _ in runs)
    assert read.context == expected and len(expected) == 3
    for mask in ([], [0], [1], [0, 0, 1, 1, 0], [1, 0, 1]):
        runs = trace.runs_of(np.array(mask, bool))
        assert [v for a, b, v in runs for _ in range(b - a)] == mask
        assert all(left[2] != right[2] for left, right in pairwise(runs))


def test_only_due_steps_are_kept_and_a_resumed_run_replaces_later_ones(tmp_path):
    records = trace.eval_records(1, [make_group(3, 2)])
    writer = trace.TraceWriter(tmp_path, 2)
    assert [writer.write(step, records) for step in range(1, 7)] == [False, True] * 3
    writer.write(4, records, kind="eval")

    def files():
        return [(kind, step) for _, kind, step in trace.trace_files(tmp_path)]

    earlier = [("step", 2), ("eval", 4), ("step", 4)]
    assert files() == [*earlier, ("step", 6)]
    assert len(list(trace.read_trace(tmp_path))) == 6 and len(list(trace.read_trace(tmp_path, 4, "eval"))) == 2
    resumed = trace.TraceWriter(tmp_path)
    assert resumed.write(5, records) and resumed.write(5, records[:1])
    assert files() == [*earlier, ("step", 5)] and len(list(trace.read_trace(tmp_path, 5))) == 1
    assert not trace.TraceWriter(tmp_path, 0).due(0)
    assert trace.trace_files(tmp_path / "nothing") == []


def test_a_full_disk_costs_traces_and_not_the_run(tmp_path, caplog):
    records = trace.eval_records(1, [make_group(3, 40)])
    with small_disk(tmp_path / "disk", "64k") as disk:
        writer = trace.TraceWriter(disk)
        assert writer.write(1, records[:2]) and not writer.write(2, records) and writer.write(3, records[:2])
        assert writer.failures == 1 and "No space left" in caplog.text
        assert sorted(os.listdir(disk / "trajectories")) == ["step_00000001.jsonl", "step_00000003.jsonl"]
