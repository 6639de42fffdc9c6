"""Limits and alarms act on the step that they should, once; a run that stands still says where, a slow one does not."""

import re
import signal
import time

import pytest

from grpo_roc_jax.config import LimitsConfig, WatchConfig, read_config
from grpo_roc_jax.engine.protocol import FailureCount, RolloutStats
from grpo_roc_jax.process.points import injected, reach
from grpo_roc_jax.record.events import Events, read_events
from grpo_roc_jax.run.sample import merge_failures
from grpo_roc_jax.run.watch import INFRASTRUCTURE_STATUS, RULES, Alarms, GapCheck, Stopped, Watch, Watchdog
from grpo_roc_jax.settings.cli import ConfigError, dump_yaml
from grpo_roc_jax.train import main
from tests.helpers.arena import wait_until
from tests.test_train import TINY

FINE = dict.fromkeys(("time/step_s", "rollout/tool_calls", "loss/entropy", "rollout/answers"), 1.0)
FINE |= {"rollout/reward_std": 0.4, "rollout/truncated": 0.1, "update/grad_norm": 0.5, "loss/logprob_gap_mean": 1e-6}
FINE |= {"loss/effective_sample_size": 1.0}
BAD = {"reward_spread": 0.0, "tool_calls": 3.1, "entropy_low": 0.001, "entropy_high": 6.0, "truncated": 0.6}
BAD |= {"grad_norm": 5.1, "logprob_gap": 0.02, "sample_size": 0.2, "answers": 2.5}


@pytest.mark.parametrize(("name", "metric", "side"), RULES)
def test_each_alarm_is_raised_once_by_its_metric(tmp_path, name, metric, side):
    alarms = Alarms(WatchConfig(steps=2), Events(tmp_path))
    bad = FINE | {metric: BAD[name]}
    raised = [alarms.look(step, row) for step, row in enumerate([FINE] * 5 + [bad] * 3 + [FINE] + [bad] * 2)]
    first, again = (5, 9) if side == "times" else (6, 10)
    assert {step: names for step, names in enumerate(raised) if names} == {first: [name], again: [name]}
    events = read_events(tmp_path)
    assert [(e["step"], e["event"], e["metric"], e["action"]) for e in events] == [
        (step, name, metric, "note") for step in (first, again)
    ]
    assert events[0]["value"] == BAD[name] and events[0]["threshold"] == pytest.approx(
        getattr(WatchConfig(), name) * (FINE[metric] if side == "times" else 1)
    )
    Events(tmp_path).cut(first)  # as a resumed run does
    assert [event["step"] for event in read_events(tmp_path)] == [first]
    Events(tmp_path / "gone").note(1, "batch", "a disk that cannot be written ends nothing")


def test_an_alarm_ends_the_run_only_where_it_is_listed_and_counts_survive_a_resume():
    rows = [FINE] * 5 + [FINE | {"rollout/truncated": 0.9}] * 2
    alarms = Alarms(WatchConfig(stop=("truncated",)))
    alarms.recall([{"step": 0, "eval/all/avg@1": 0.5}, *rows])
    with pytest.raises(Stopped, match=r"alarm truncated: rollout/truncated 0\.9 is above 0\.5") as stop:
        alarms.look(8, rows[-1])
    assert stop.value.status == 4
    alarms = Alarms(WatchConfig(history=2))  # a short one
    rows = [FINE | {"update/grad_norm": norm} for norm in (1.0, 1.0, 99.0)]
    assert [alarms.look(step, row) for step, row in enumerate(rows)] == [[], [], ["grad_norm"]]


def test_the_section_is_there_once_one_of_its_settings_is(tmp_path):
    assert read_config().watch is None and "watch" not in dump_yaml(read_config())
    (tmp_path / "with.yaml").write_text("watch: {grad_norm: 4}\n")
    (tmp_path / "without.yaml").write_text("base: with.yaml\nwatch: null\nrollout: {low_precision: null}\n")
    assert read_config(str(tmp_path / "without.yaml")) == read_config(str(tmp_path / "with.yaml"), "--watch", "null")
    (tmp_path / "blank.yaml").write_text("base: with.yaml\nwatch:\n")
    with pytest.raises(ConfigError, match=r"watch = null .*: is a section; set one of its fields"):
        read_config(str(tmp_path / "blank.yaml"))
    with pytest.raises(ConfigError, match=r"watch\.notice_url must begin with http"):
        read_config("--watch.notice_url=169.254.169.254/preempted")


def test_a_gap_that_rounding_does_not_explain_is_an_event_in_every_run(tmp_path):
    check = GapCheck(Events(tmp_path), exact=True)
    gaps = [1e-6, 5.8, 6.0, 0.9, float("nan"), 1.1]
    assert [check.look(i, {"loss/logprob_gap_max": gap}) for i, gap in enumerate(gaps)] == [0, 1, 0, 0, 0, 1]
    assert not check.look(9, {}), "a step without an update"
    events = read_events(tmp_path)
    assert [(e["step"], e["event"]) for e in events] == [(1, "logprob_gap_max"), (5, "logprob_gap_max")]
    assert "5.8 nats in float32" in events[0]["text"]
    assert not GapCheck(Events(tmp_path), exact=False).look(1, {"loss/logprob_gap_max": 9.0}), "fewer bits"


BUG, READ = "step: KeyError: 'x' (mine.py, line 3)", "step: ValueError: not a number: 'hm' (mine.py, line 9)"


def failures(count, text=BUG, **more):
    return {text: FailureCount(text, count, **more)}


BY_POLICY = failures(8, READ, by_policy=True)


@pytest.mark.parametrize(
    ("counts", "rollouts", "ends", "before"),
    [
        (failures(8), 8, True, []),
        (failures(7), 8, False, []),
        (failures(4) | failures(4, "reset: OSError"), 8, False, []),
        (BY_POLICY, 8, True, []),
        (failures(8, READ, by_policy=True, same=False), 8, False, []),
        ({}, 0, False, []),
        # What the policy caused ends no run that has gone better.
        (BY_POLICY, 8, False, [{"rollout/stop_failed": 0.5}]),
        (failures(8), 8, True, [{"rollout/stop_failed": 0.5}]),
        # An evaluation is no such rollout: a run that ended in its first step ends there again if nothing has changed.
        (BY_POLICY, 8, True, [{"step": 0, "eval/all/avg@1": 0.5}, {"step": 1, "rollout/stop_failed": 1.0}]),
    ],
)
def test_all_rollouts_of_a_step_failed_alike(counts, rollouts, ends, before):
    watch = Watch(LimitsConfig())
    watch.recall(before)
    if not ends:
        watch.look_at_failures(counts, rollouts)
        if sum(failure.count for failure in counts.values()) < rollouts:  # some rollout ended well
            watch.look_at_failures(BY_POLICY, 8)
        return
    with pytest.raises(Stopped, match=r"all 8 rollouts of a step ended alike: step: .* \(mine\.py, line") as caught:
        watch.look_at_failures(counts, rollouts)
    assert caught.value.status == INFRASTRUCTURE_STATUS


@pytest.mark.parametrize(("share", "lost"), [(0.25, 0.6), (1.0, 1.0)])
def test_the_commonest_failure_is_named_in_the_last_line(share, lost):
    watch = Watch(LimitsConfig(infrastructure_share=share, infrastructure_steps=1))
    watch.look_at_failures(failures(3) | failures(2, "reset: OSError"), 8)
    with pytest.raises(Stopped, match=r"; 3 of 8 rollouts of the last such step: step: KeyError: 'x'"):
        watch.look({"verdict/infrastructure": lost})
    assert watch.new_failures(failures(3)) == [BUG] and watch.new_failures(failures(9)) == []


def test_counts_of_several_processes_add_up():
    stats = RolloutStats()
    for _ in range(2):
        stats.count_failure("k", READ, by_policy=True)
    assert stats.failures == {"k": FailureCount(READ, 2, True, True)}
    merged = merge_failures([stats.failures, {"k": FailureCount("another", 1, True)}, failures(4)])
    assert merged == {"k": FailureCount(READ, 3, True, False), BUG: FailureCount(BUG, 4)}


@pytest.mark.slow
def test_a_phase_without_progress_is_described_and_ends_the_run(tmp_path, capsys, monkeypatch):
    """The selection of the second step sleeps for much longer than it may."""
    monkeypatch.setattr(Watchdog, "limit_s", lambda _, point: 3.0 if point == "reward" else 1000.0)
    words = [*TINY, "--resume=auto", "--steps=2", f"--run_dir={tmp_path}", "--data.eval_problems=0"]
    with injected("select=sleep:100@2"):
        begun = time.monotonic()
        assert main([*words, "--watch.stall_floor_s=2", "--watch.stop=stalled"]) == 5
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
    dog = Watchdog(tmp_path, WatchConfig(stall_factor=1.0, stall_floor_s=0.4), lambda: ["call a"])
    with dog.watching():
        for _ in range(8):
            reach("sample")
            time.sleep(0.05)
        assert not list(tmp_path.iterdir())
        time.sleep(1.2)
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
