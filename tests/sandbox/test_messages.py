"""Messages between the processes of the executor: what is sent, and that the other end reads the same."""

import os
import re
import subprocess
import sys
from dataclasses import fields

import pytest

from grpo_roc_jax.sandbox import Executor, _start, _wire, isolation
from grpo_roc_jax.sandbox import _messages as m
from grpo_roc_jax.sandbox._calls import ProgramOutcome
from grpo_roc_jax.tools import ToolsConfig
from grpo_roc_jax.tools.executor import settings_of
from grpo_roc_jax.types import ToolResult

SETTINGS = settings_of(ToolsConfig(cpus="0-1", preload=("numpy",)))


@pytest.mark.parametrize(
    ("message", "kinds"),
    [
        (m.CancelCalls(["a"]), m.TO_EXECUTOR),
        (m.CloseSession("s"), m.TO_EXECUTOR),
        (m.RequestStats(3), m.TO_EXECUTOR),
        (m.ExecutorStats(3, {"x": 1.0}), m.TO_TRAINER),
        (m.CallResult("a", 4, {"kind": "ok"}), m.TO_TRAINER),
        (m.Failed("why"), m.FROM_ROOT),
        (m.RunCode(7, 1), m.TO_WORKER),
        (m.RunCode(7, 1, cell=True, exact=True), m.TO_WORKER),
        (m.CallDone(7, 9, "wall", "", 100, 1.5, 0.5), m.FROM_WORKER),
    ],
)
def test_messages_encode_and_decode(message: m.Message, kinds: m.Kinds) -> None:
    """A header has the values that are not those by default, by their names."""
    values = {field.name: getattr(message, field.name) for field in fields(message)}
    given = {field.name: values[field.name] for field in fields(message) if values[field.name] != field.default}
    assert m.encode(message) == {"op": type(message).__name__} | given
    assert m.decode(m.encode(message), kinds) == message


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: m.ProgramLimits(wall_s="2"), "ProgramLimits.wall_s = '2'; must be a number above 0"),
        (lambda: m.ProgramLimits(wall_s=0), "wall_s = 0; must be a number above 0"),
        (lambda: m.ProgramLimits(cpu_s=float("nan")), "cpu_s = nan; must be"),
        (lambda: m.ProgramLimits(cpu_s=float("inf")), "cpu_s = inf; must be"),
        (lambda: m.ProgramLimits(memory_mb=-5), "memory_mb = -5; must be a whole number of at least 1"),
        (lambda: m.ProgramLimits(memory_mb=256.0), "memory_mb = 256.0; must be a whole number of at least 1"),
        (lambda: m.ProgramLimits(threads=True), "threads = True; must be a whole number"),
        (lambda: m.ProgramLimits(descriptors=8), "descriptors = 8; must be a whole number of at least 16"),
        (
            lambda: m.ProgramLimits(output_kb=4096),
            "output_kb = 4096; must be a whole number of at least 0 and at most 2048",
        ),
        (lambda: m.ExecutorSettings(preload="json"), "ExecutorSettings.preload = 'json'; must be a tuple of texts"),
        (lambda: m.ExecutorSettings(cpu_list=("1",)), "cpu_list = ('1',); must be a tuple of whole numbers"),
        (lambda: m.ExecutorSettings(level="L9"), "level = 'L9'; must be one of best, L0"),
        (lambda: m.ExecutorSettings(min_level="best"), "min_level = 'best'; must be one of L0"),
        (lambda: m.ExecutorSettings(limits={"wall_s": 2.0}), "must be of type ProgramLimits"),
        (lambda: m.ExecutorSettings(bare_root=1), "bare_root = 1; must be of type bool"),
    ],
)
def test_settings_that_no_process_could_use_are_refused_where_they_are_made(make, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        make()


def test_an_executor_takes_settings_not_limits():
    with pytest.raises(TypeError, match=r"Executor got ProgramLimits; must be ExecutorSettings, such as"):
        Executor(m.ProgramLimits(wall_s=1.0))
    assert Executor(m.ExecutorSettings(preload=["json"])).settings.preload == ["json"]


PLAN = isolation.make_plan(SETTINGS, "L1", [], "/base")


@pytest.mark.parametrize(
    ("message", "kinds"),
    [(SETTINGS, m.TO_EXECUTOR), (PLAN, m.TO_ROOT), (m.Capabilities("L2", ("x",), workers=3), m.TO_TRAINER)],
)
def test_settings_and_plans_arrive_whole(message: m.Message, kinds: m.Kinds) -> None:
    sender, receiver = _wire.pair()
    with sender, receiver:
        m.send(sender, message)
        received, fds = m.receive(receiver, kinds)
    assert (received, fds) == (message, [])


@pytest.mark.parametrize(
    "header",
    [{}, {"op": "CallDone"}, {"op": "nothing"}, {"op": ["CallDone"]}, {"op": "WorkerBorn", "pid": 1, "more": 2}],
)
def test_headers_that_are_no_message_of_a_worker(header: dict) -> None:
    with pytest.raises(_wire.BadFrame):
        m.decode(header, m.FROM_WORKER)


def test_outcomes_leave_out_what_the_trainer_fills_in() -> None:
    defaults = {field.name: field.default for field in fields(ToolResult)}
    sent = {field.name: field.default for field in fields(ProgramOutcome) if field.name not in ("kind", "suspicious")}
    assert sent.items() <= defaults.items()
    outcome = ProgramOutcome("ok", stdout="out", stdout_bytes=3, exit_code=0, wall_ms=1.23456, suspicious=True)
    assert outcome.changed_fields() == {"kind": "ok", "stdout_bytes": 3, "exit_code": 0, "wall_ms": 1.235}


@pytest.mark.parametrize("module", ["_supervisor", "_warm_interpreter"])
def test_processes_of_the_executor_import_the_standard_library_alone(module: str) -> None:
    """An interpreter without site packages finds nothing else."""
    folder = os.path.dirname(_start.__file__)
    box = f"import importlib, sys, types\nbox = types.ModuleType('box')\nbox.__path__ = [{folder!r}]\n"
    code = f"{box}sys.modules['box'] = box\nimportlib.import_module('box.{module}')"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)
