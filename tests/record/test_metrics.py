"""The record is complete and without duplicates; a failing display or service does not affect the run."""

import importlib.util
import io
import json
import math
import sys
import time
import types
from contextlib import closing
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from grpo_roc_jax.record import loggers
from grpo_roc_jax.record.metrics import (
    CompilationCounter,
    JsonlWriter,
    LogConfig,
    Trackio,
    WandbOffline,
    WandbOnline,
    Writer,
    make_writer,
    read_metrics,
    series,
)
from tests.helpers.disks import filled, small_disk


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
    x, y = series([first, second], "eval/gsm8k/avg@1")
    assert x.tolist() == [1] and y.tolist() == [1]
    assert series([first], "missing")[0].shape == (0,)


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
    with closing(JsonlWriter(path)) as writer:
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


class Raising:
    def __getattr__(self, name):
        def fail(*_):
            raise RuntimeError("no network")

        return fail


def test_a_writer_that_raises_is_counted_and_the_others_continue(tmp_path, caplog):
    writer = Writer([Raising(), JsonlWriter(tmp_path / "m.jsonl")])
    for step in range(30):
        writer.write(step, {"a": step})
    writer.say("hello")
    writer.close()
    assert writer.failures == [32, 0] and len(steps_in(tmp_path / "m.jsonl")) == 30
    assert 1 <= caplog.text.count("no network") <= 3


def test_a_service_that_hangs_blocks_neither_rows_nor_the_end(caplog):
    class Hanging:
        def write(self, step, metrics):
            time.sleep(60)

        def close(self): ...

    background = loggers.Background(Hanging, "slow", capacity=10, close_s=0.2)
    begun = time.monotonic()
    for step in range(100):
        background.write(step, {"a": 1.0})
    background.close()
    assert time.monotonic() - begun < 2
    assert background.dropped >= 89 and "too slow" in caplog.text


def fake_service(calls, fail_on=(), fail_init=False):
    """A module like wandb's or trackio's, which notes the calls that it gets."""

    class Run:
        def define_metric(self, *args, **kwargs):
            pass

        def log(self, row, step=None):
            if row.get("step", step) in fail_on:
                raise ConnectionError("step refused")
            calls.append(("log", {"step": step} | row))

        def finish(self):
            calls.append(("finish", None))

    def init(**kwargs):
        calls.append(("init", kwargs))
        if fail_init:
            raise ConnectionError("no network")
        return Run()

    def table(columns, data):
        return "table", columns, data

    return types.SimpleNamespace(init=init, Table=table, __spec__=True)


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
    services = [({"wandb": kind()}, kind.package) for kind in (WandbOnline, Trackio)]
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
    assert "other" not in line
    evaluated = loggers.format_row(1, {"eval/all/avg@1": 0.25, "eval/all/turns": 3.0})
    assert "all/avg@1 0.250" in evaluated and "turns" not in evaluated
    out = io.StringIO()
    plain = loggers.ConsoleWriter(3, "auto", Console(file=out, width=40))
    plain.write(1, row)
    plain.say("[not markup] " + "x" * 60)
    plain.close()
    assert out.getvalue().splitlines() == [loggers.format_row(1, row), "[not markup] " + "x" * 60]


def test_compilations_are_counted_and_cached_programs_are_not():
    function = jax.jit(lambda x: x * 3 + 1)
    with CompilationCounter() as counter:
        function(jnp.ones(11)).block_until_ready()
        first = counter.count
        function(jnp.ones(11)).block_until_ready()
        assert counter.count == first >= 1 and counter.seconds > 0
        function(jnp.ones(12)).block_until_ready()
        second = counter.count
        assert second > first
    function(jnp.ones(13)).block_until_ready()
    assert counter.count == second
