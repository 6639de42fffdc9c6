"""Alarms are raised by the step that they should be, once, and end a run only if asked to."""

import pytest

from grpo_roc_jax.config import WatchConfig, read_config
from grpo_roc_jax.record.events import Events, read_events
from grpo_roc_jax.run.watch import RULES, Alarms, GapCheck, Stopped
from grpo_roc_jax.settings.cli import ConfigError, dump_yaml, flatten

FINE = {
    "time/step_s": 1.0,
    "rollout/reward_std": 0.4,
    "rollout/tool_calls": 1.0,
    "loss/entropy": 1.0,
    "rollout/truncated": 0.1,
    "update/grad_norm": 0.5,
    "loss/logprob_gap_mean": 1e-6,
    "loss/effective_sample_size": 1.0,
    "rollout/answers": 1.0,
}
BAD = {
    "reward_spread": 0.0,
    "tool_calls": 3.1,
    "entropy_low": 0.001,
    "entropy_high": 6.0,
    "truncated": 0.6,
    "grad_norm": 5.1,
    "logprob_gap": 0.02,
    "sample_size": 0.2,
    "answers": 2.5,
}


@pytest.mark.parametrize(("name", "metric", "side"), RULES)
def test_each_alarm_is_raised_once_by_its_metric(tmp_path, name, metric, side):
    alarms = Alarms(WatchConfig(steps=2), Events(tmp_path))
    bad = FINE | {metric: BAD[name]}
    raised = [alarms.look(step, row) for step, row in enumerate([FINE] * 5 + [bad] * 3 + [FINE] + [bad] * 2)]
    first, again = (5, 9) if side == "times" else (6, 10)
    assert [step for step, names in enumerate(raised) if names] == [first, again]
    assert {alarm for names in raised for alarm in names} == {name}
    events = read_events(tmp_path)
    assert [(e["step"], e["event"], e["metric"], e["action"]) for e in events] == [
        (step, name, metric, "note") for step in (first, again)
    ]
    assert events[0]["value"] == BAD[name] and events[0]["threshold"] == pytest.approx(
        getattr(WatchConfig(), name) * (FINE[metric] if side == "times" else 1)
    )


def test_an_alarm_ends_the_run_only_where_it_is_listed_and_counts_survive_a_resume():
    rows = [FINE] * 5 + [FINE | {"rollout/truncated": 0.9}] * 2
    alarms = Alarms(WatchConfig(stop=("truncated",)))
    alarms.recall([{"step": 0, "eval/all/avg@1": 0.5}, *rows])
    with pytest.raises(Stopped, match=r"alarm truncated: rollout/truncated 0\.9 is above 0\.5") as stop:
        alarms.look(8, rows[-1])
    assert stop.value.status == 4


def test_the_section_is_there_once_one_of_its_settings_is(tmp_path):
    assert read_config().watch is None and "watch" not in dump_yaml(read_config())
    config = read_config("--watch.grad_norm=4", "--watch.stop", "stalled,answers")
    assert (config.watch.grad_norm, config.watch.stop, config.watch.steps) == (4.0, ("stalled", "answers"), 3)
    (tmp_path / "again.yaml").write_text(dump_yaml(config))
    assert read_config(str(tmp_path / "again.yaml")) == config
    assert len(list(flatten(config))) == len(list(flatten(read_config()))) + 15
    with pytest.raises(ConfigError, match=r"watch\.grad_norm = 0"):
        read_config("--watch.grad_norm=0")
    with pytest.raises(ConfigError, match=r"watch\.notice_url must begin with http"):
        read_config("--watch.notice_url=169.254.169.254/preempted")
    (tmp_path / "without.yaml").write_text("base: again.yaml\nwatch: null\nrollout: {low_precision: null}\n")
    assert read_config(str(tmp_path / "without.yaml")) == read_config(str(tmp_path / "again.yaml"), "--watch", "null")
    assert read_config(str(tmp_path / "without.yaml")).watch is None
    (tmp_path / "blank.yaml").write_text("base: again.yaml\nwatch:\n")
    with pytest.raises(ConfigError, match=r"watch = null .*: is a section; set one of its fields"):
        read_config(str(tmp_path / "blank.yaml"))


def test_a_jump_is_seen_with_a_short_history():
    alarms = Alarms(WatchConfig(history=2))
    rows = [FINE | {"update/grad_norm": norm} for norm in (1.0, 1.0, 99.0)]
    assert [alarms.look(step, row) for step, row in enumerate(rows)] == [[], [], ["grad_norm"]]


def test_a_resumed_run_discards_later_events_and_a_full_disk_ends_nothing(tmp_path):
    messages = []
    events = Events(tmp_path, messages.append)
    for step in (1, 2, 3):
        events.note(step, "batch", "kept")
    Events(tmp_path).cut(2)
    assert [event["step"] for event in read_events(tmp_path)] == [1, 2] and len(messages) == 3
    Events(tmp_path / "gone").note(1, "batch", "kept")
    assert read_events(tmp_path / "gone") == []


def test_a_gap_that_rounding_does_not_explain_is_an_event_in_every_run(tmp_path):
    check = GapCheck(Events(tmp_path), exact=True)
    gaps = [1e-6, 5.8, 6.0, 0.9, float("nan"), 1.1]
    assert [check.look(i, {"loss/logprob_gap_max": gap}) for i, gap in enumerate(gaps)] == [0, 1, 0, 0, 0, 1]
    assert not check.look(9, {}), "a step without an update"
    events = read_events(tmp_path)
    assert [(e["step"], e["event"]) for e in events] == [(1, "logprob_gap_max"), (5, "logprob_gap_max")]
    assert "5.8 nats in float32" in events[0]["text"]
    assert not GapCheck(Events(tmp_path), exact=False).look(1, {"loss/logprob_gap_max": 9.0}), "fewer bits"
