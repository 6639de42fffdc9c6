"""Limits and alarms act on the step that they should, once; a run that stands still says where, and no phase is silent.
How long a run takes, and its closing figures."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from grpo_roc_jax.__main__ import COMMANDS
from grpo_roc_jax.config import Config, LimitsConfig, WatchConfig, read_config
from grpo_roc_jax.engine.protocol import FailureCount
from grpo_roc_jax.process import points, progress
from grpo_roc_jax.record import loggers, run_dir
from grpo_roc_jax.record.events import Events, read_events
from grpo_roc_jax.run import durations, session
from grpo_roc_jax.run.statistics import rollout_metrics, why_nothing_kept
from grpo_roc_jax.run.summary import next_lines, summarize_rows, summary_lines, write_summary
from grpo_roc_jax.run.watch import INFRASTRUCTURE_STATUS, RULES, Alarms, GapCheck, Stopped, Watch, Watchdog
from grpo_roc_jax.train import main
from grpo_roc_jax.view.curves import last_third
from tests.helpers.arena import wait_until
from tests.helpers.method_groups import make_group
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
    named = [(e["step"], e["event"], e["metric"], e["action"]) for e in events]
    assert named == [(step, name, metric, "note") for step in (first, again)]
    threshold = getattr(WatchConfig(), name) * (FINE[metric] if side == "times" else 1)
    assert events[0]["value"] == BAD[name] and events[0]["threshold"] == pytest.approx(threshold)
    Events(tmp_path).cut(first)  # as a resumed run does
    assert [event["step"] for event in read_events(tmp_path)] == [first]


def test_an_alarm_ends_the_run_only_where_it_is_listed_and_counts_survive_a_resume():
    rows = [FINE] * 5 + [FINE | {"rollout/truncated": 0.9}] * 2
    alarms = Alarms(WatchConfig(stop=("truncated",)))
    alarms.recall([{"step": 0, "eval/all/avg@1": 0.5}, *rows])
    with pytest.raises(Stopped, match=r"alarm truncated: rollout/truncated 0\.9 is above 0\.5") as stop:
        alarms.look(8, rows[-1])
    assert stop.value.status == 4


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


def test_all_rollouts_of_a_step_failed_alike():
    """What the policy caused ends no run that has gone better. An evaluation is no such rollout: a run that ended in
    its first step ends there again if nothing has changed."""
    failed_before = [{"step": 0, "eval/all/avg@1": 0.5}, {"step": 1, "rollout/stop_failed": 1.0}]
    for counts, before in ((failures(8), []), (BY_POLICY, []), (BY_POLICY, failed_before)):
        (watch := Watch(LimitsConfig())).recall(before)
        with pytest.raises(Stopped, match=r"all 8 rollouts of a step ended alike: step: .* \(mine\.py, line") as caught:
            watch.look_at_failures(counts, 8)
        assert caught.value.status == INFRASTRUCTURE_STATUS
    others = failures(8, READ, by_policy=True, same=False)
    for counts, before in ((failures(7), []), (others, []), (BY_POLICY, [{"rollout/stop_failed": 0.5}])):
        (watch := Watch(LimitsConfig())).recall(before)
        watch.look_at_failures(counts, 8)


@pytest.mark.parametrize(("share", "lost"), [(0.25, 0.6), (1.0, 1.0)])
def test_the_commonest_failure_is_named_in_the_last_line(share, lost):
    watch = Watch(LimitsConfig(infrastructure_share=share, infrastructure_steps=1))
    watch.look_at_failures(failures(3) | failures(2, "reset: OSError"), 8)
    with pytest.raises(Stopped, match=r"; 3 of 8 rollouts of the last such step: step: KeyError: 'x'"):
        watch.look({"verdict/infrastructure": lost})
    assert watch.new_failures(failures(3)) == [BUG] and watch.new_failures(failures(9)) == []


@pytest.mark.slow
def test_a_phase_without_progress_is_described_and_ends_the_run(tmp_path, capsys, monkeypatch):
    """The selection of the second step sleeps for much longer than it may."""
    monkeypatch.setattr(Watchdog, "limit_s", lambda _, point: 3.0 if point == "reward" else 1000.0)
    words = [*TINY, "--resume=auto", "--steps=2", f"--run_dir={tmp_path}", "--data.eval_problems=0"]
    with points.injected("select=sleep:100@2"):
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
            points.reach(name)
            now[0] += seconds
        points.reach("record")
    assert [dog.limit_s(name) for name in ("sample", "update", "never")] == [120.0, 60.0, 60.0]


def test_a_run_that_does_not_end_by_itself_is_ended(tmp_path):
    statuses, config = [], WatchConfig(stall_floor_s=0.1, stop=("stalled",))
    before = signal.signal(signal.SIGTERM, lambda *_: statuses.append("SIGTERM"))
    try:
        with Watchdog(tmp_path, config, grace_s=0.2, end_process=statuses.append).watching():
            assert wait_until(lambda: len(statuses) == 2)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert statuses == ["SIGTERM", 5]


ERRORS, GAP = "rollout/tool_error_in_correct", "loss/logprob_gap_max"


def test_means_and_extremes():
    """A gap that was not finite is not passed over."""
    rewards, gaps = [0.5, None, 0.7], [1e-6, 3e-6, 2e-6]
    rows = [{"step": i, "rollout/reward": r, GAP: gap} for i, (r, gap) in enumerate(zip(rewards, gaps, strict=True), 1)]
    summary = summarize_rows([{"step": 0, "eval/accuracy": 0.1}, *rows])
    assert summary["reward_last_10"] == pytest.approx(0.6) and summary["max_logprob_gap"] == 3e-6
    assert summarize_rows([*rows, {"step": 4, GAP: None}])["max_logprob_gap"] is None


def test_a_step_without_a_right_rollout_is_in_no_mean_of_failing_calls():
    """It has no share of failing calls. As 0 it would look like a policy that never fails."""
    right, wrong = (rollout_metrics([make_group(rewards, errors=[1, 0])], {}) for rewards in ([1, 0], [0, 0]))
    rows = [{"step": i + 1, "time/step_s": 1.0} | row for i, row in enumerate([right] * 5 + [wrong])]
    assert summarize_rows(rows)["tool_error_in_correct"] == last_third(rows, ERRORS) == right[ERRORS] == 1.0
    assert "tool errors in correct -" in loggers.format_row(6, wrong)


def test_nothing_that_the_end_of_a_run_meets_fails_it(tmp_path, caplog):
    """No step, an accuracy without a scored rollout, no metrics, and a disk that is full."""
    (tmp_path / "metrics.jsonl").write_text("")
    measured = {"accuracy_before": math.nan, "accuracy_after": math.inf, "seconds": 1.0, "device": "none"}
    summary = write_summary(tmp_path, Config(), **measured)
    written = json.loads((tmp_path / "summary.json").read_text())
    for name in ("accuracy_before", "accuracy_after", "reward_last_10"):
        assert summary[name] is None and written[name] is None
    assert "accuracy on held-out problems: - -> -" in summary_lines(tmp_path, summary)
    (tmp_path / "metrics.jsonl").unlink()
    with points.injected("summary=enospc"):
        summary = write_summary(tmp_path, Config(), **measured)
    assert "No space left" in caplog.text and summary_lines(tmp_path, summary)


def test_the_end_of_a_run_names_three_things_to_do_next(tmp_path):
    (tmp_path / "batches").mkdir()
    (tmp_path / "batches/step_00000004.npz").touch()
    summary = {"steps": 3, "accuracy_after": 0.5}
    head, *lines = next_lines(tmp_path, summary)
    offered = [line.split()[3] for line in lines]
    assert head == "next:" and offered == ["view", "chat", "evaluate"] and set(offered) <= set(COMMANDS)
    assert "replay" in next_lines(tmp_path, None, 4)[3] and "step_00000004.npz" in next_lines(tmp_path, None, 4)[3]
    assert "--run_dir gs://bucket/run --resume auto" in next_lines(tmp_path, None, named="gs://bucket/run")[1]


def toy(*words):
    return read_config("toy.yaml", "--model.vocab_size=64", *words)


def test_a_run_leaves_its_seconds_for_the_next_one_with_the_same_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lines = []
    for config in (toy(), toy("--seed=3", "--steps=5", "--sft.steps=7", "--run_dir=other")):
        with progress.narrated(lines.append) as narrator, durations.remembered(config, narrator):
            usual = dict(narrator.usual)
            with progress.phase("training", steps=3) as training:
                training.step(3)
    assert usual.keys() == {"training"} and usual["training"] > 0
    assert durations.read_timings(durations.timings_file(toy("--group.size=4"))) == {}
    config = toy()
    seconds, source = durations.expected(config, config.model, 12, {"training": 2.0, "evaluation on 12 problems": 90.0})
    assert seconds == {"training": 2.0, "evaluation": 90.0} and "earlier run" in source
    assert session.plan_line(config, run_dir.Start("fresh"), config.steps, 12, Path("runs/a"), seconds) == (
        "plan: supervised stage, 400 steps; then evaluation on 12 problems, about 90 s; then 30 steps of 256 "
        "rollouts, about 60 s; then evaluation at the end; written to runs/a"
    )


class Hand:
    """A clock that a test moves."""

    now = 100.0

    def __call__(self):
        return self.now


def said_of(steps, first_s, each_s):
    clock, told = Hand(), []
    stage = progress.Phase("stage", steps, say=told.append, clock=clock)
    by_step = {}
    for step in range(1, steps + 1):
        clock.now += first_s if step == 1 else each_s
        before = len(told)
        stage.step(step)
        by_step |= dict.fromkeys([step] * (len(told) - before), told[-1] if told else "")
    return by_step


def test_quick_steps_say_their_first_ones_and_then_one_line_in_half_a_minute():
    told = said_of(200, first_s=20.0, each_s=1.0)
    assert list(told) == [1, 2, 5, 10, 40, 70, 100, 130, 160, 190, 200]
    assert told[1] == "stage: step 1 of 200 after 20.0 s, compilation included"
    assert told[10] == "stage: step 10 of 200, 1.00 s a step, 3 min left"
    assert told[200] == "stage: step 200 of 200, 1.00 s a step"
    assert list(said_of(13, first_s=60.0, each_s=45.0)) == list(range(1, 14)), "slow ones say something each time"


def told_by(seconds, look_every=0.25, **settings):
    """(seconds, line) of a narrator while a phase is open for so many seconds."""
    clock, told = Hand(), []
    narrator = progress.Narrator(lambda line: told.append((clock.now - 100.0, line)), clock)
    opened = progress.Phase(**settings, say=narrator.tell, clock=clock)
    narrator.begin(opened)
    while clock.now < 100.0 + seconds:
        narrator.look()
        clock.now += look_every
    narrator.end(opened, failed=False)
    return told


@pytest.mark.parametrize("settings", [{}, {"steps": 9, "routine": True}])
def test_no_phase_is_silent_for_ten_seconds(settings):
    told = told_by(100.0, name="compiling decode/8", **settings)
    times = [0.0, *(when for when, _ in told), 100.0]
    assert max(later - sooner for sooner, later in pairwise(times)) <= 10.0
    assert all(line.startswith("compiling decode/8") for _, line in told)


def test_a_phase_says_that_it_has_begun_and_its_seconds_unless_it_is_short_or_routine():
    assert told_by(5.0, name="compiling") == [(progress.BEGUN_S, "compiling ..."), (5.0, "compiling: 5.0 s")]
    assert told_by(1.5, name="compiling") == told_by(progress.QUIET_S / 2, name="update", routine=True) == []


def test_a_phase_says_what_is_left_by_an_earlier_run_until_it_knows_better():
    told, clock = [], Hand()
    with progress.narrated(told.append, clock, poll_s=1e6) as narrator:
        narrator.usual = {"compiling decode/8": 30.0, "training": 5.0}
        with progress.phase("compiling decode/8"):
            for _ in range(16):
                clock.now += 2.5
                narrator.look()
        with progress.phase("training", steps=9) as training:
            for step, seconds in enumerate((20.0, 3.0, 3.0), 1):
                clock.now += seconds
                training.step(step)
    assert told[:2] == ["compiling decode/8 ... about 28 s left", "compiling decode/8: 12 s so far, about 18 s left"]
    assert told[-1] == "training: step 2 of 9, 3.00 s a step, 21 s left"
    assert narrator.measured == {"compiling decode/8": 40.0, "training": 3.0}


def test_a_step_that_keeps_nothing_says_why():
    for groups, metrics, words in (
        (4, {"roc/all_wrong": 3.0, "roc/all_correct": 1.0}, "1 all correct, 3 all wrong; the policy solves none"),
        (2, {"verdict/infrastructure": 0.75, "verdict/not_scored": 0.25}, "2 without a rollout that has a score"),
        (2, {"roc/all_wrong": 1.0, "roc/dropped_equal_rewards": 8.0}, "1 all wrong, 1 with equal rewards for right"),
        (0, {}, "no group was sampled to its end"),
    ):
        assert words in why_nothing_kept({"roc/kept": 0.0, "roc/groups": float(groups)} | metrics)
    assert why_nothing_kept({"roc/kept": 8.0, "roc/groups": 2.0}) == why_nothing_kept({}) == ""


RUN = """--run_dir=run --steps=2 --sft.steps=4 --group.problems=2 --group.size=2 --data.eval_problems=4
--log.console=plain --rollout.slots=4 --model.d_model=16 --model.layers=1 --model.heads=2 --model.kv_heads=1
--model.head_dim=8 --model.d_ff=16""".split()  # noqa: SIM905 (a command line reads better as one)


def test_a_run_in_a_pipe_says_its_plan_and_the_steps_of_each_phase(tmp_path):
    environ = os.environ | {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [sys.executable, "-m", "grpo_roc_jax", "train", *RUN]
    text = subprocess.run(command, cwd=tmp_path, env=environ, check=True, **pipes).stdout.splitlines()
    (plan,) = [line for line in text if line.startswith("plan: ")]
    about = r", about [\d.]+ (s|min|h)"
    assert re.fullmatch(
        f"plan: supervised stage, 4 steps{about}; then evaluation on 4 problems{about}; then 2 steps of 8 "
        f"rollouts{about}; then evaluation at the end; written to run",
        plan,
    )
    assert text[text.index(plan) + 1].startswith("minutes of the plan: a rough estimate ")
    for name, steps in (("supervised stage", 4), ("training", 2)):
        (first,) = [line for line in text if line.startswith(f"{name}: step 1 of {steps} after ")]
        (second,) = [line for line in text if line.startswith(f"{name}: step 2 of {steps}, ")]
        assert "compilation included" in first and " s a step" in second
        assert text.index(plan) < text.index(first) < text.index(second)
    assert not [line for line in text if "WARNING" in line or "warning" in line]
