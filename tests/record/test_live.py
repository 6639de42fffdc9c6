"""What a terminal shows of a run: its figures, at any width; text of the policy that acts nowhere; a terminal that goes
away or changes its size."""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from grpo_roc_jax.commands.chat import show as show_event
from grpo_roc_jax.commands.view import render
from grpo_roc_jax.record import live
from grpo_roc_jax.record.live import Board, after
from grpo_roc_jax.record.loggers import ConsoleWriter
from grpo_roc_jax.record.trace import TraceRecord
from grpo_roc_jax.types import Problem, ToolCall, ToolResult, Trajectory, Turn, Verdict

ROOT = Path(__file__).resolve().parents[2]
CODES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
EVIL = (
    "\x1b[2J\x1b]0;title\x07\x1b]8;;http://x\x1b\\a\x9b31m\r\x08\x7f\x00\u202eexe\u2066\u200b\ufeff\u2028\ud800[red]:x:"
)
STEP = {"rollout/reward": 0.5, "rollout/tool_error_in_correct": 0.25, "rollout/tokens_per_s": 1234.5, "roc/kept": 4.0}
STEP |= {"roc/dropped": 6.0, "roc/dropped_quota": 1.0, "roc/dropped_equal_rewards": 5.0}
STEP |= {"time/step_s": 10.0, "time/rollout_s": 6.0, "time/update_s": 3.0}


def drawn(draw, **terminal):
    """What `draw(console)` writes."""
    out = io.StringIO()
    draw(Console(file=out, **{"width": 200, "_environ": {}} | terminal))
    return out.getvalue()


def test_the_table_has_the_figures_of_the_newest_step():
    board = after(Board(30), 0, {"eval/all/avg@4": 0.25, "eval/world/avg@4": 0.9})
    for step, seconds in ((1, 100.0), (2, 10.0), (3, 12.0)):
        board = after(board, step, STEP | {"time/step_s": seconds, "rollout/reward": step / 4})
    board = after(board, 3, {"eval/all/avg@4": 0.75})
    assert dict(live.rows(board)) == {
        "step": "3/30  12.0 s a step, 5 min left",  # 27 steps of 12 s, the median: the first one compiled
        "reward": "0.750",
        "failing calls": "0.250 in correct rollouts",
        "held out": "0.250 (step 0) -> 0.750 (step 3)",
        "rollouts": "4 kept, 6 dropped: equal rewards 5, quota 1",
        "speed": "1,234 tokens/s sampled",
        "time": "rollout 50%  update 25%  rest 25%",
    }
    for width in (1, 7, 30, 80, 200):
        text = drawn(lambda console: console.print(live.table(board)), width=width, force_terminal=True)
        assert max(map(len, CODES.sub("", text).splitlines())) <= width
    text = drawn(lambda console: console.print(live.table(board, ascii_only=True)), width=80)
    assert text.isascii() and "failing calls" in text


def test_small_curves_and_durations():
    assert live.sparkline([0, 1, 2, 7]) == "▁▂▃█" and live.sparkline([2, 2]) == "▁▁"
    assert live.sparkline([np.nan, 0.0, np.inf, 1.0]) == " ▁ █" and live.sparkline([np.nan]) == " "
    assert [live.duration(s) for s in (45, 600, 12_000, np.inf, np.nan)] == ["45 s", "10 min", "3 h 20 min", "?", "?"]


def evil_record():
    failed = ToolResult("exception", stdout=EVIL, observation=EVIL, error_type=EVIL, error_message=EVIL)
    call = ToolCall(EVIL, {"code": EVIL}, raw=f"call{EVIL}")
    turns = (Turn(1, 2, f"I say {EVIL}{call.raw}end", (call,), (failed,)), Turn(3, 4, EVIL))
    nothing = np.zeros(4, np.int32)
    mask = np.array([False, True, False, True])
    trajectory = Trajectory(nothing, mask, nothing * np.float32(0), nothing, 1, turns, "answer", 0)
    verdict, context = Verdict(0.0, "wrong", EVIL, 1, 1, 1, True, 2), (f"asked {EVIL}", f"seen {EVIL}")
    return TraceRecord(3, 0, Problem(EVIL, EVIL, EVIL, EVIL), trajectory, verdict, True, EVIL, context=context)


def test_a_sample_is_colored_by_origin():
    text = live.colored(evil_record())
    styles = {str(span.style): text.plain[span.start : span.end] for span in text.spans if span.style}
    starts = {style: words.split()[0] for style, words in styles.items()}
    assert (starts["dim"], starts["red"]) == ("asked", "seen") and starts["cyan"].startswith("call")
    assert styles["bold red"] == "-- a trajectory of step 3: wrong, 1/1 calls failed\n"
    places = [text.plain.index(words) for words in ("asked", "I say", f"call{live.inert(EVIL)}end", "seen")]
    assert places == sorted(places)


def test_no_text_of_a_run_acts_in_a_terminal():
    record = evil_record()

    def writer(console):
        console_writer = ConsoleWriter(3, console=console)
        console_writer.say(EVIL, event=True)
        console_writer.sample(3, record, [record])
        console_writer.write(1, STEP)
        console_writer.close()

    def dialogue(console):
        show_event(console, record.trajectory.turns[0])
        show_event(console, record.trajectory.turns[0].results[0])

    for draw in (writer, dialogue, lambda console: console.print(render(record))):
        text = CODES.sub("", drawn(draw, force_terminal=True))  # what rich writes itself
        assert not [c for c in text if c != "\n" and c != "\r" and not c.isprintable()]
        assert "]0;title" in text and "␛" in text and "U+202E" in text and "[red]:x:" in text
        assert "\r" not in text.replace("\r\n", "") or draw is writer  # the bars return to the start of a line
    assert live.inert("plain\ttext\n") == "plain\ttext\n" and live.inert("日本 é ✓") == "日本 é ✓"


@pytest.mark.parametrize(
    ("environ", "moves", "colors"),
    [
        ({"TERM": "xterm"}, True, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, False, False),
    ],
)
def test_a_terminal_gets_what_it_can_show(environ, moves, colors):
    """Its bar starts where the run resumes."""

    def draw(console):
        writer = ConsoleWriter(10, console=console)
        writer.cut(4)
        writer.sample(5, evil_record(), [])
        writer.write(5, STEP)
        writer.close()

    written = drawn(draw, force_terminal=True, width=100, _environ=environ)
    assert ("\x1b[2K" in written) is moves and ("\x1b[36m" in written) is colors
    text = CODES.sub("", written)
    assert "step    5  reward 0.500" in text and ("4/10" in text and "5/10" in text) is moves


PROGRAM = """
import contextlib, sys, time
from grpo_roc_jax.record.loggers import ConsoleWriter
writer = ConsoleWriter(60)
for step in range(1, 61):
    with contextlib.suppress(OSError):  # what `metrics.Writer` counts
        writer.write(step, {"rollout/reward": 0.5, "time/step_s": 1.0})
    time.sleep(0.02)
with contextlib.suppress(OSError):
    writer.close()
open(sys.argv[1], "w").write("reached")
"""


@pytest.mark.parametrize("closed", [False, True])
def test_a_real_terminal_may_shrink_or_close_while_a_run_goes_on(tmp_path, closed):
    leader, follower = pty.openpty()

    def size(rows, columns):
        fcntl.ioctl(leader, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    size(40, 120)
    environ = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    environ |= {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "end")]
    process = subprocess.Popen(command, stdout=follower, stderr=subprocess.DEVNULL, env=environ, start_new_session=True)
    os.close(follower)
    guard = threading.Timer(60, process.kill)
    guard.start()
    seen = bytearray()

    def read(until):
        while until not in seen:
            try:
                seen.extend(os.read(leader, 65536))
            except OSError:  # the program has ended
                return

    read(b"step   20")
    if not closed:
        size(6, 25)
        read(b"more than it writes")
        text = CODES.sub("", seen.decode(errors="replace"))
        assert "step   60" in text and re.search(r"\d/60", text) and "failing calls" in text
    os.close(leader)
    assert process.wait(60) == 0 and (tmp_path / "end").read_text() == "reached"
    guard.cancel()


def test_a_notebook_and_a_file_get_plain_lines(monkeypatch, capsys):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    writer = ConsoleWriter(5)
    writer.write(1, STEP)
    writer.close()
    assert writer.bars is None
    assert capsys.readouterr().out.startswith("step    1  reward 0.500  tool errors in correct 0.250")
