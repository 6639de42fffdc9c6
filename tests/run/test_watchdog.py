"""A run that stands still says where, and ends if asked to; one that is only slow does not."""

import re
import signal
import time

import pytest

from grpo_roc_jax.config import WatchConfig
from grpo_roc_jax.process.points import injected, reach
from grpo_roc_jax.record.events import read_events
from grpo_roc_jax.run.watch import Watchdog
from grpo_roc_jax.train import main
from tests.helpers.arena import wait_until
from tests.test_train import TINY


@pytest.mark.slow
def test_a_phase_without_progress_is_described_and_ends_the_run(tmp_path, capsys, monkeypatch):
    """The selection of the second step sleeps for much longer than it may."""
    monkeypatch.setattr(Watchdog, "limit_s", lambda _, point: 3.0 if point == "reward" else 1000.0)
    words = [*TINY, "--resume=auto", "--steps=2", f"--run_dir={tmp_path}", "--data.eval_problems=0"]
    stall = ["--watch.stall_floor_s=2", "--watch.stop=stalled"]
    with injected("select=sleep:100@2"):
        begun = time.monotonic()
        assert main([*words, *stall]) == 5
        assert time.monotonic() - begun < 90
    printed = capsys.readouterr().err
    assert "s after reward, where" in printed and "the state after step 1 is saved" in printed
    [report] = tmp_path.glob("stalled_*.txt")
    text = report.read_text()
    assert re.search(r"no progress for \d+ s after reward", text) and "in flight:" in text
    assert "sample_step" in text and "points.py" in text
    assert [(event["step"], event["event"]) for event in read_events(tmp_path)] == [(1, "stalled")]
    assert main(words) == 0


def test_limits_follow_the_longest_time_so_far(tmp_path):
    now = [100.0]
    dog = Watchdog(tmp_path, WatchConfig(stall_factor=3.0, stall_floor_s=60.0), clock=lambda: now[0])
    with dog.watching():
        for name, seconds in (("sample", 40.0), ("update", 5.0), ("sample", 30.0)):
            reach(name)
            now[0] += seconds
        reach("record")
    assert [dog.limit_s(name) for name in ("sample", "update", "never")] == [120.0, 60.0, 60.0]


def test_points_that_come_keep_it_silent_and_a_report_is_written_once(tmp_path, caplog):
    dog = Watchdog(tmp_path, WatchConfig(stall_factor=1.0, stall_floor_s=0.2), lambda: ["call a"])
    with dog.watching():
        for _ in range(8):
            reach("sample")
            time.sleep(0.05)
        assert not list(tmp_path.iterdir())
        time.sleep(0.8)
    reports = list(tmp_path.iterdir())
    assert len(reports) == 1 and "  call a" in reports[0].read_text() and dog.ending == ""
    assert caplog.text.count("no progress") == 1
    (text,) = dog.take_stalls()
    assert text.startswith("no progress for") and dog.take_stalls() == []


def test_a_run_that_does_not_end_by_itself_is_ended(tmp_path):
    statuses, config = [], WatchConfig(stall_floor_s=0.1, stop=("stalled",))
    before = signal.signal(signal.SIGTERM, lambda *_: statuses.append("SIGTERM"))
    try:
        with Watchdog(tmp_path, config, grace_s=0.2, end_process=statuses.append).watching():
            assert wait_until(lambda: len(statuses) == 2)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert statuses == ["SIGTERM", 5]
