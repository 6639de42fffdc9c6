"""The record is complete and without duplicates; a failing display or service does not affect the run."""

import contextlib
import importlib.util
import io
import json
import math
import sys
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from rich.console import Console

from grpo_roc_jax import train as training
from grpo_roc_jax.config import Config
from grpo_roc_jax.planner.measured import chip_of, measured_lines, rates_of
from grpo_roc_jax.planner.topology import CHIPS
from grpo_roc_jax.record import loggers, metrics
from grpo_roc_jax.record.metrics import JsonlWriter, LogConfig, Trackio, WandbOffline, Writer, make_writer, read_metrics
from grpo_roc_jax.record.profiling import Profile
from grpo_roc_jax.record.tables import COLUMNS, tables
from grpo_roc_jax.run.components import check_components, make_registry
from grpo_roc_jax.settings.cli import ConfigError, load_config
from tests.helpers.disks import filled, small_disk
from tests.helpers.method_groups import method
from tests.helpers.samples import make_group
from tests.record.test_trace import run_step


@dataclass(frozen=True)
class RunLike:
    name: str = "run"
    steps: int = 5
    log: LogConfig = field(default_factory=lambda: LogConfig(console="off"))


def steps_in(path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_rows_are_restored_with_non_finite_as_nan(tmp_path):
    with make_writer(tmp_path, RunLike()) as writer:
        writer.write(1, {"loss/a": np.float32(0.5), "b/c": math.nan})
        writer.write(1, {"eval/gsm8k/avg@1": 1})
        writer.write(2, {"loss/a": math.inf})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    first, second = read_metrics(tmp_path)
    assert first["loss/a"] == 0.5 and math.isnan(first["b/c"]) and first["eval/gsm8k/avg@1"] == 1.0
    assert math.isnan(second["loss/a"])
    x, y = metrics.series([first, second], "eval/gsm8k/avg@1")
    assert x.tolist() == [1] and y.tolist() == [1]
    assert metrics.series([first], "missing")[0].shape == (0,)


@pytest.mark.parametrize("tail", [b"", b'{"step": 4, "a', b'{"step": 4}\n{"st'])
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
            assert steps_in(path) == [1, 2]
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


def test_the_supervised_stage_has_a_file_of_its_own(tmp_path, capsys):
    config = RunLike(log=LogConfig(console="plain"))
    for _ in range(2):
        with make_writer(tmp_path, config) as writer:
            writer.write_sft(1, {"loss/nll": 2.5})
            writer.write_sft(50, {"loss/nll": 0.5, "loss/other": 1.0})
            writer.write(0, {"eval/all/avg@1": 0.25})
    assert steps_in(tmp_path / "sft.jsonl") == [1, 50] and steps_in(tmp_path / "metrics.jsonl") == [0]
    assert "sft   50  nll 0.5\n" in capsys.readouterr().out


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
        assert read_metrics(disk)[150]["long/name_9"] == 150


def test_a_vanished_directory_does_not_end_the_run(tmp_path, caplog):
    writer = make_writer(tmp_path / "gone", RunLike())
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
    config = RunLike(log=LogConfig(console="off", wandb=WandbOffline(project="p")))
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
    services = [({"wandb": kind()}, kind.package) for kind in (metrics.WandbOnline, Trackio)]
    for options, extra in (({"tensorboard": True}, "tensorboard"), *services):
        with pytest.raises(ModuleNotFoundError, match=rf"(?i)pip install '?{extra}"):
            make_writer(tmp_path, RunLike(log=LogConfig(console="off", **options)))


def test_tensorboard_files_hold_the_scalars_and_resume_purges(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto import event_pb2

    config = RunLike(log=LogConfig(console="off", tensorboard=True))
    with make_writer(tmp_path, config) as writer:
        writer.write(1, {"loss/a": 0.25})
        writer.write(2, {"loss/a": 0.5})
    time.sleep(1.1)  # event files are named by the second
    with make_writer(tmp_path, config) as writer:
        writer.cut(1)
        writer.write(2, {"loss/a": 0.75})
    scalars = []
    for path in sorted((tmp_path / "tensorboard").iterdir()):
        content, offset = path.read_bytes(), 0
        while offset < len(content):
            length = int.from_bytes(content[offset : offset + 8], "little")
            event = event_pb2.Event.FromString(content[offset + 12 : offset + 12 + length])
            scalars += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
            if event.session_log.status:
                scalars.append((event.step, "purge", 0.0))
            offset += 16 + length
    assert (1, "loss/a", 0.25) in scalars and (2, "loss/a", 0.75) in scalars
    assert (2, "purge", 0.0) in scalars


def test_console_lines_carry_the_key_numbers():
    row = {"rollout/reward": 0.53125, "rollout/tool_error_in_correct": 0.1, "time/step_s": 2.0, "other/x": 3.0}
    line = loggers.format_row(7, row)
    assert "step    7" in line and "reward 0.531" in line and "tool errors in correct 0.100" in line
    evaluated = loggers.format_row(1, {"eval/all/avg@1": 0.25, "eval/all/turns": 3.0})
    assert "all/avg@1 0.250" in evaluated and "turns" not in evaluated and "other" not in line
    out, said = io.StringIO(), "[not markup] " + "x" * 60
    with contextlib.closing(loggers.ConsoleWriter(3, "auto", Console(file=out, width=40))) as plain:
        plain.write(7, row)
        plain.say(said)
    assert out.getvalue().splitlines() == [line, said]


def records():
    return run_step(0, method(4), [make_group(seed, 8) for seed in range(2)])[2]


def write_tables(folder, kind, made, step):
    """A row and the tables of a step go to a service."""
    with make_writer(folder, RunLike(log=LogConfig(console="off", wandb=kind(project="p")))) as writer:
        writer.sample(step, made[0], made)
        writer.write(step, {"rollout/reward": 0.5})


def test_the_tables_hold_every_rollout_and_the_text_of_kept_and_dropped_ones():
    made = records()
    by_name = tables(made)
    assert by_name["rollouts"].columns == COLUMNS and len(by_name["rollouts"].rows) == len(made) == 16
    for row, record in zip(by_name["rollouts"].rows, made, strict=True):
        named = dict(zip(COLUMNS, row, strict=True))
        assert (named["problem"], named["sample"]) == (record.problem.uid, record.trajectory.sample)
        assert (named["verdict"], named["reward"]) == (record.verdict.status, record.verdict.reward)
        assert (named["kept"], named["why"]) == (record.kept, record.why)
        assert named["penalty"] == pytest.approx(named["error_penalty"] + named["format_penalty"])
        assert (named["advantage"] is not None) is (record.advantages is not None)
    shown = [dict(zip(by_name["trajectories"].columns, row, strict=True)) for row in by_name["trajectories"].rows]
    assert [entry["kept"] for entry in shown] == [True, True, False, False] and all(entry["text"] for entry in shown)
    assert tables([]) == {"rollouts": (COLUMNS, []), "trajectories": ((*COLUMNS[:12], "text"), [])}


@pytest.mark.parametrize("kind", [WandbOffline, Trackio])
def test_services_get_rows_and_tables(tmp_path, monkeypatch, kind):
    calls, made = [], records()
    monkeypatch.setitem(sys.modules, kind.package, fake_service(calls))
    write_tables(tmp_path, kind, made, 5)
    shown = {name: ("table", list(rows.columns), rows.rows) for name, rows in tables(made).items()}
    assert calls[1:] == [("log", {"step": 5} | shown), ("log", {"step": 5, "rollout/reward": 0.5}), ("finish", None)]


def test_a_service_without_tables_gets_none_made():
    unread = mock.MagicMock(**{"__iter__.side_effect": AssertionError("tables are made")})
    with pytest.raises(AssertionError, match="are made"):
        tables(unread)
    with contextlib.closing(loggers.Background(loggers.MetricsWriter, "plain")) as background:
        background.sample(1, None, unread)


@pytest.mark.parametrize("kind", [WandbOffline, Trackio])
def test_installed_services_keep_rows_and_tables_on_this_machine(tmp_path, monkeypatch, kind):
    pytest.importorskip(kind.package, reason=f"{kind.package} is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)  # it reads its directory when it is imported
    for step in (1, 2) if kind is Trackio else (1,):  # the second is a resumed run
        write_tables(tmp_path, kind, records(), step)
    if kind is Trackio:
        assert len(list(sys.modules["trackio"].Api().runs("p"))) == 1
    else:
        (run,) = (tmp_path / "wandb").glob("offline-run-*")
        assert any("rollouts" in path.name for path in run.rglob("*.table.json"))


WORDS = """
toy.yaml --steps=3 --group.problems=2 --group.size=2 --eval.every=0 --sft.steps=1 --data.eval_problems=2
--rollout.slots=8 --rollout.max_response_tokens=64
""".split()  # noqa: SIM905 (a command line reads better as one)


@pytest.mark.slow
def test_steps_of_a_run_are_traced(tmp_path, capsys):
    assert training.main([*WORDS, "--run_dir", str(tmp_path / "run"), "--profile", "2:3"]) == 0
    (trace,) = (tmp_path / "run" / "profile").rglob("*.xplane.pb")
    assert trace.stat().st_size > 10_000, "it holds events"
    assert "steps 2 to 3" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "time/step_s" in row] == [1, 2, 3]


@pytest.mark.parametrize("words", ["", "0:3", "5:3", "3:", "a:b", "3-5"])
def test_what_is_no_span_of_steps_is_refused(words):
    assert Profile.parse("4") == Profile(4, 4)
    with pytest.raises(ConfigError, match=r"must be the first and the last step"):
        Profile.parse(words)
    assert training.main(["toy.yaml", "--dry-run", f"--profile={words}"]) == 2


def test_devices_have_the_figures_of_their_kind():
    kinds = {"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e", "NVIDIA H100 80GB HBM3": "h100"}
    kinds |= {"NVIDIA A100-SXM4-80GB": "a100", "Tesla T4": "t4", "NVIDIA L4": "l4", "TPU7x": "v7x"}
    assert {kind: chip_of(kind) for kind in kinds} == {kind: CHIPS[name] for kind, name in kinds.items()}
    assert chip_of("cpu") is None and chip_of("NVIDIA L40S") is None and chip_of("NVIDIA A100X") is None


def test_rates_are_those_of_the_work_that_was_done():
    config = load_config(Config, ["toy.yaml"], prog="test")
    _, _, model, mesh, _ = check_components(config, make_registry(config))
    rates = rates_of(config, model, mesh, CHIPS["h100"])
    assert rates_of(config, model, mesh, None) is None
    row = {"update/micro_batches": 2.0, "time/update_s": 4.0, "time/decode_s": 2.0}
    row |= {"rollout/sampled_tokens": 1024.0, "rollout/slot_use": 0.5}
    measured = rates.metrics(row)
    assert measured["update/mfu"] == pytest.approx(2 * rates.model_flops / CHIPS["h100"].flops / 4)
    steps = 1024 / (0.5 * config.rollout.slots)
    weights = min(rates.decode.fixed_traffic, rates.decode.traffic) / rates.steps
    cached = (rates.decode.traffic / rates.steps - weights) * 0.5 * rates.read
    assert measured["rollout/decode_bytes_per_s"] == pytest.approx(steps * (weights + cached) / 2)
    twice = rates.metrics(row | {"update/micro_batches": 4.0, "rollout/sampled_tokens": 2048.0})
    assert all(twice[name] == pytest.approx(2 * measured[name]) for name in measured)
    (line,) = measured_lines([row | measured])
    assert "decode" in line and "update" in line and "of the peak" in line
    assert measured_lines([row]) == [] and rates.metrics({"time/update_s": 1.0}) == {}
