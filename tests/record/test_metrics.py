"""The record is complete and without duplicates; a failing display or service does not affect the run. Groups,
selections and advantages can be recomputed from the files alone."""

import contextlib
import importlib.util
import json
import math
import os
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from grpo_roc_jax import train as training
from grpo_roc_jax.config import Config
from grpo_roc_jax.method.compose import resample_group, subset, train_rows
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.planner.measured import chip_of, measured_lines, rates_of
from grpo_roc_jax.planner.topology import CHIPS
from grpo_roc_jax.record import loggers, metrics, trace
from grpo_roc_jax.record.metrics import JsonlWriter, LogConfig, Trackio, WandbOffline, Writer, make_writer, read_metrics
from grpo_roc_jax.record.tables import COLUMNS, tables
from grpo_roc_jax.run.components import check_components, make_registry
from grpo_roc_jax.settings.cli import load_config
from tests.helpers.disks import filled, small_disk
from tests.helpers.method_groups import method
from tests.helpers.same import assert_same
from tests.helpers.samples import make_group
from tests.test_train import TINY


def config_of(**log):
    return replace(Config(), name="run", steps=5, log=LogConfig(console="off", **log))


def steps_in(path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_rows_are_restored_with_non_finite_as_nan(tmp_path):
    with make_writer(tmp_path, config_of()) as writer:
        writer.write(1, {"loss/a": np.float32(0.5), "b/c": math.nan})
        writer.write(1, {"eval/gsm8k/avg@1": 1})
        writer.write(2, {"loss/a": math.inf})
    first, second = read_metrics(tmp_path)
    assert first["loss/a"] == 0.5 and math.isnan(first["b/c"]) and first["eval/gsm8k/avg@1"] == 1.0
    assert math.isnan(second["loss/a"])
    assert [values.tolist() for values in metrics.series([first, second], "eval/gsm8k/avg@1")] == [[1], [1]]


@pytest.mark.parametrize("tail", [b"", b'{"step": 4}\n{"st'])
def test_resuming_cuts_later_and_torn_rows(tmp_path, tail):
    """The first row of a process discards its step and later ones, unless they were cut before."""
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2, 3):
        JsonlWriter(path).write(step, {"a": step})
    rows = path.read_bytes() + b'{"step": 2}\n'  # as a second process might leave it: the order counts, not the steps
    for cut in (True, False):
        path.write_bytes(rows + tail)
        resumed = JsonlWriter(path)
        if cut:
            resumed.cut(2)
        resumed.write(3, {"a": 30})
        assert steps_in(path) == [1, 2, 3] and read_metrics(path)[-1]["a"] == 30
    resumed = JsonlWriter(path)
    resumed.cut(2)
    resumed.write(2, {"eval/a": 1.0})
    assert steps_in(path) == [1, 2, 2] and read_metrics(path)[1] == {"step": 2, "a": 2, "eval/a": 1.0}


def test_a_damaged_row_costs_no_other_row(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 1.0}\n{"step": 2, "a": \n[3]\n{"step": 3, "a": [1]}\n{"step": 4, "a": 4.0}\n')
    assert [(row["step"], row["a"]) for row in read_metrics(path)] == [(1, 1.0), (4, 4.0)]
    with contextlib.closing(JsonlWriter(path)) as writer:
        writer.cut(4)
        writer.write(5, {"a": 5.0})
    assert [row["step"] for row in read_metrics(path)] == [1, 4, 5]


def test_a_full_disk_delays_rows_and_loses_none(tmp_path):
    with small_disk(tmp_path / "disk", "64k") as disk:
        writer = Writer([JsonlWriter(disk / "metrics.jsonl")])
        writer.write(0, {"a": 0.0})
        filler = filled(disk)
        for step in range(1, 200):
            writer.write(step, {f"long/name_{i}": step for i in range(10)})
        assert writer.failures[0] > 0
        filler.unlink()
        writer.write(200, {})
        assert steps_in(disk / "metrics.jsonl") == list(range(201))


def test_a_vanished_directory_does_not_end_the_run(tmp_path, caplog):
    writer = make_writer(tmp_path / "gone", config_of())
    writer.write(1, {"a": 1.0})
    writer.close()
    assert "JsonlWriter failed to write" in caplog.text


def test_a_writer_that_raises_is_counted_and_the_others_continue(tmp_path, caplog):
    raising = mock.Mock(**{f"{name}.side_effect": RuntimeError("no network") for name in ("write", "say", "close")})
    writer = Writer([raising, JsonlWriter(tmp_path / "m.jsonl")])
    for step in range(30):
        writer.write(step, {"a": step})
    writer.say("hello")
    writer.close()
    assert writer.failures == [32, 0] and len(steps_in(tmp_path / "m.jsonl")) == 30
    assert 1 <= caplog.text.count("no network") <= 3


def test_a_service_that_hangs_blocks_neither_rows_nor_the_end(caplog):
    hanging = SimpleNamespace(write=lambda step, metrics: time.sleep(60), close=lambda: None)
    background = loggers.Background(lambda: hanging, "slow", capacity=10, close_s=0.2)
    begun = time.monotonic()
    for step in range(100):
        background.write(step, {"a": 1.0})
    background.close()
    assert time.monotonic() - begun < 2
    assert background.dropped >= 89 and "too slow" in caplog.text


def fake_service(calls, fail_on=(), fail_init=False):
    """A module like wandb's or trackio's, which notes the calls that it gets."""

    def log(row, step=None):
        if row.get("step", step) in fail_on:
            raise ConnectionError("step refused")
        calls.append(("log", {"step": step} | row))

    def init(**kwargs):
        calls.append(("init", kwargs))
        if fail_init:
            raise ConnectionError("no network")
        return SimpleNamespace(define_metric=mock.Mock(), log=log, finish=lambda: calls.append(("finish", None)))

    return SimpleNamespace(init=init, Table=lambda columns, data: ("table", columns, data), __spec__=True)


@pytest.mark.parametrize("fail_init", [False, True])
def test_wandb_gets_rows_from_its_thread_and_its_failures_stay_there(tmp_path, monkeypatch, caplog, fail_init):
    calls = []
    monkeypatch.setitem(sys.modules, "wandb", fake_service(calls, fail_on=(2,), fail_init=fail_init))
    config = config_of(wandb=WandbOffline(project="p"))
    for _ in range(2):  # the second is the resumed run
        with make_writer(tmp_path, config) as writer:
            for step in (1, 2, 3):
                writer.write(step, {"loss/a": step})
    inits = [given for name, given in calls if name == "init"]
    assert inits[0]["id"] == inits[1]["id"] and inits[0]["resume"] == "allow" and inits[0]["mode"] == "offline"
    assert inits[0]["config"]["log"]["wandb"]["project"] == "p"
    rows = [given for name, given in calls if name == "log"]
    assert rows == ([] if fail_init else [{"step": 1, "loss/a": 1.0}, {"step": 3, "loss/a": 3.0}] * 2)
    assert ("no network" if fail_init else "step refused") in caplog.text
    assert steps_in(tmp_path / "metrics.jsonl") == [1, 2, 3]


def test_a_missing_extra_is_named_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for options, extra in (({"tensorboard": True}, "tensorboard"), ({"wandb": Trackio()}, "trackio")):
        with pytest.raises(ModuleNotFoundError, match=rf"(?i)pip install '?{extra}"):
            make_writer(tmp_path, config_of(**options))


def test_tensorboard_files_hold_the_scalars_and_resume_purges(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto import event_pb2

    with make_writer(tmp_path, config_of(tensorboard=True)) as writer:
        writer.cut(1)
        writer.write(2, {"loss/a": 0.75})
    scalars, (path,) = [], (tmp_path / "tensorboard").iterdir()
    content = path.read_bytes()
    while content:
        length = 12 + int.from_bytes(content[:8], "little")
        event, content = event_pb2.Event.FromString(content[12:length]), content[length + 4 :]
        scalars += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
        scalars += [(event.step, "purge", 0.0)] * bool(event.session_log.status)
    assert scalars == [(2, "purge", 0.0), (2, "loss/a", 0.75)]


@pytest.mark.parametrize("kind", [WandbOffline, Trackio])
def test_services_get_rows_and_tables(tmp_path, monkeypatch, kind):
    calls, made = [], run_step(0, method(4), [make_group(seed, 8) for seed in range(2)])[2]
    monkeypatch.setitem(sys.modules, kind.package, fake_service(calls))
    with make_writer(tmp_path, config_of(wandb=kind(project="p"))) as writer:
        writer.sample(5, made[0], made)
        writer.write(5, {"rollout/reward": 0.5})
    shown = {name: ("table", list(rows.columns), rows.rows) for name, rows in tables(made).items()}
    for row, record in zip(shown["rollouts"][2], made, strict=True):
        named = dict(zip(COLUMNS, row, strict=True))
        assert (named["problem"], named["sample"]) == (record.problem.uid, record.trajectory.sample)
        assert (named["kept"], named["why"], named["reward"]) == (record.kept, record.why, record.verdict.reward)
        assert named["penalty"] == pytest.approx(named["error_penalty"] + named["format_penalty"])
    assert calls[1:] == [("log", {"step": 5} | shown), ("log", {"step": 5, "rollout/reward": 0.5}), ("finish", None)]


@pytest.mark.slow
def test_steps_of_a_run_are_traced(tmp_path, capsys):
    words = [*TINY, "--steps=3", "--log.console=plain", "--run_dir", str(tmp_path / "run"), "--profile", "2:3"]
    assert training.main(words) == 0
    (profile,) = (tmp_path / "run" / "profile").rglob("*.xplane.pb")
    assert profile.stat().st_size > 10_000, "it holds events"
    assert "steps 2 to 3" in capsys.readouterr().out
    assert training.main(["toy.yaml", "--dry-run", "--profile=5:3"]) == 2, "no span of steps"


def test_rates_are_those_of_the_work_that_was_done():
    config = load_config(Config, ["toy.yaml"], prog="test")
    _, _, model, mesh, _ = check_components(config, make_registry(config))
    rates = rates_of(config, model, mesh, CHIPS["h100"])
    assert rates_of(config, model, mesh, chip_of("cpu")) is None and chip_of("NVIDIA H100 80GB HBM3") == CHIPS["h100"]
    row = {"update/micro_batches": 2.0, "time/update_s": 4.0, "time/decode_s": 2.0}
    row |= {"rollout/sampled_tokens": 1024.0, "rollout/slot_use": 0.5}
    measured = rates.metrics(row)
    assert measured["update/mfu"] == pytest.approx(2 * rates.model_flops / CHIPS["h100"].flops / 4)
    steps = 1024 / (0.5 * config.rollout.slots)
    weights = min(rates.decode.fixed_traffic, rates.decode.traffic) / rates.steps
    cached = (rates.decode.traffic / rates.steps - weights) * 0.5 * rates.read
    assert measured["rollout/decode_bytes_per_s"] == pytest.approx(steps * (weights + cached) / 2)
    (line,) = measured_lines([row | measured])
    assert "decode" in line and "update" in line and "of the peak" in line
    assert measured_lines([row]) == [] and rates.metrics({"time/update_s": 1.0}) == {}


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


def test_advantages_that_differ_by_token_and_missing_parts_are_restored():
    base = trace.eval_records(2, [make_group(1, 4)])
    mask = base[0].trajectory.policy_mask
    varied = np.where(mask, np.linspace(-1, 1, len(mask)), 0).astype(np.float32)
    lost = replace(base[1], verdict=None, why="removed: infrastructure")
    for record in (replace(base[0], advantages=varied, kept=True), lost, replace(base[2], context=("a", "b"))):
        assert_same(trace.from_json(json.loads(trace.to_line(record))), record)
    tokens, runs = base[3].trajectory.tokens, trace.runs_of(base[3].trajectory.policy_mask)
    expected = tuple(" ".join(map(str, tokens[a:b].tolist())) for a, b, of_policy in runs if not of_policy)
    line = trace.to_line(base[3], decode=lambda ids: " ".join(map(str, ids)))
    assert trace.from_json(json.loads(line)).context == expected


def test_records_of_removed_and_of_buffered_trajectories():
    groups = [make_group(1, 8), make_group(2, 8)]
    sections = method(4)
    selections = [resample_group(g, sections, np.random.default_rng(0)) for g in groups]
    lost, waiting = make_group(7, 1), make_group(8, 2)
    trained = [waiting, subset(groups[0], selections[0])]
    given = {"trained": trained, "rows": train_rows(trained, sections, AlgoState())}
    records = trace.step_records(3, groups, selections, removed=[(lost.problem, lost.trajectories[0])], **given)
    assert len(records) == 16 + 2 + 1
    by_why = {why: [r for r in records if r.why == why] for why in {r.why for r in records}}
    assert [r.problem.uid for r in by_why["buffered"]] == [waiting.problem.uid] * 2
    assert all(r.advantages is not None for r in by_why["buffered"])
    assert by_why["removed: answer"][0].verdict is None
    assert [r.advantages is not None for r in records if r.group == 1 and r.kept] == [False] * 4  # still in the buffer
    assert [g.problem.uid for g in trace.groups_of(records)] == [g.problem.uid for g in groups]


@pytest.mark.parametrize("longer", [3, -1])
def test_advantages_and_ratios_of_a_row_under_another_prompt_are_those_of_its_response(longer):
    group, sections = make_group(1, 4), method(4)
    selection = resample_group(group, sections, np.random.default_rng(0))
    rows = train_rows([group], sections, AlgoState())
    expected = [np.where(r.policy_mask, np.arange(r.length) + 1, 0).astype(np.float32) for r in rows]
    shifted = [np.append(np.zeros(longer, np.float32), a) if longer > 0 else a[-longer:] for a in expected]
    rows = [SimpleNamespace(advantages=a, scored=(a, a)) for a in shifted]
    records = trace.step_records(3, [group], [selection], trained=[group], rows=rows)
    for record, advantages in zip(records, expected, strict=True):
        np.testing.assert_array_equal(record.advantages, advantages)
        np.testing.assert_array_equal(record.scored[1], advantages.astype(np.float16))
        for values in (record.scored, None):  # older logs have none
            assert_same(trace.from_json(json.loads(trace.to_line(replace(record, scored=values)))).scored, values)


def test_only_due_steps_are_kept_and_a_resumed_run_replaces_later_ones(tmp_path):
    records = trace.eval_records(1, [make_group(3, 2)])
    writer = trace.TraceWriter(tmp_path, 2)
    assert [writer.write(step, records) for step in range(1, 7)] == [False, True] * 3
    writer.write(4, records, kind="eval")
    earlier = ["step 2", "eval 4", "step 4"]
    assert [f"{kind} {step}" for _, kind, step in trace.trace_files(tmp_path)] == [*earlier, "step 6"]
    assert len(list(trace.read_trace(tmp_path))) == 6 and len(list(trace.read_trace(tmp_path, 4, "eval"))) == 2
    resumed = trace.TraceWriter(tmp_path)
    assert resumed.write(5, records) and resumed.write(5, records[:1])
    assert [f"{kind} {step}" for _, kind, step in trace.trace_files(tmp_path)] == [*earlier, "step 5"]
    assert len(list(trace.read_trace(tmp_path, 5))) == 1


def test_a_full_disk_costs_traces_and_not_the_run(tmp_path, caplog):
    records = trace.eval_records(1, [make_group(3, 40)])
    with small_disk(tmp_path / "disk", "64k") as disk:
        writer = trace.TraceWriter(disk)
        assert writer.write(1, records[:2]) and not writer.write(2, records) and writer.write(3, records[:2])
        assert writer.failures == 1 and "No space left" in caplog.text
        assert sorted(os.listdir(disk / "trajectories")) == ["step_00000001.jsonl", "step_00000003.jsonl"]
