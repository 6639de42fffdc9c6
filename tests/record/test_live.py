"""What a terminal shows of a run: its figures, at any width; text of the policy that acts nowhere; a terminal that goes
away or changes its size."""

import contextlib
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
from grpo_roc_jax.record.loggers import ConsoleWriter
from grpo_roc_jax.record.trace import TraceRecord
from grpo_roc_jax.types import Problem, ToolCall, ToolResult, Trajectory, Turn, Verdict

ROOT = Path(__file__).resolve().parents[2]
CODES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
EVIL = "\x1b[2J\x1b]0;title\x07\x1b]8;;http://x\x1b\\a\x9b31m\r\x08\x7f\x00\u202eexe\u2066\u200b\u2028\ud800[red]:x:"
STEP = {"rollout/reward": 0.5, "rollout/tool_error_in_correct": 0.25, "rollout/tokens_per_s": 1234.5, "roc/kept": 4.0}
STEP |= {"roc/dropped": 6.0, "roc/dropped_quota": 1.0, "roc/dropped_equal_rewards": 5.0}
STEP |= {"time/step_s": 10.0, "time/rollout_s": 6.0, "time/update_s": 3.0}


def drawn(draw, **terminal):
    draw(Console(file=(out := io.StringIO()), **{"width": 200, "_environ": {}} | terminal))
    return out.getvalue()


def test_the_table_has_the_figures_of_the_newest_step():
    board = live.after(live.Board(30), 0, {"eval/all/avg@4": 0.25, "eval/world/avg@4": 0.9})
    for step, seconds in ((1, 100.0), (2, 10.0), (3, 12.0)):
        board = live.after(board, step, STEP | {"time/step_s": seconds, "rollout/reward": step / 4})
    board = live.after(board, 3, {"eval/all/avg@4": 0.75})
    assert dict(live.rows(board)) == {
        "step": "3/30  12.0 s a step, 5 min left",  # 27 steps of 12 s, the median: the first one compiled
        "reward": "0.750",
        "failing calls": "0.250 in correct rollouts",
        "held out": "0.250 (step 0) -> 0.750 (step 3)",
        "rollouts": "4 kept, 6 dropped: equal rewards 5, quota 1",
        "speed": "1,234 tokens/s sampled",
        "time": "rollout 50%  update 25%  rest 25%",
    }
    for width in (1, 30, 200):
        text = drawn(lambda console: console.print(live.table(board)), width=width, force_terminal=True)
        assert max(map(len, CODES.sub("", text).splitlines())) <= width
    assert drawn(lambda console: console.print(live.table(board, ascii_only=True))).isascii()
    assert live.sparkline([0, 1, 2, 7]) == "▁▂▃█" and live.sparkline([np.nan, 0.0, np.inf, 1.0]) == " ▁ █"
    assert [live.duration(s) for s in (45, 600, 12_000, np.nan)] == ["45 s", "10 min", "3 h 20 min", "?"]


def evil_record():
    failed = ToolResult("exception", stdout=EVIL, observation=EVIL, error_type=EVIL, error_message=EVIL)
    call = ToolCall(EVIL, {"code": EVIL}, raw=f"call{EVIL}")
    turns = (Turn(1, 2, f"I say {EVIL}{call.raw}end", (call,), (failed,)), Turn(3, 4, EVIL))
    nothing = np.zeros(4, np.int32)
    mask = np.array([False, True, False, True])
    trajectory = Trajectory(nothing, mask, nothing * np.float32(0), nothing, 1, turns, "answer", 0)
    verdict, context = Verdict(0.0, "wrong", EVIL, 1, 1, 1, True, 2), (f"asked {EVIL}", f"seen {EVIL}")
    return TraceRecord(3, 0, Problem(EVIL, EVIL, EVIL, EVIL), trajectory, verdict, True, EVIL, context=context)


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

    styles = {str(span.style) for span in live.colored(record).spans}
    assert styles >= {"dim", "red", "cyan", "bold red"}, "a sample is colored by origin"
    for draw in (writer, dialogue, lambda console: console.print(render(record))):
        text = CODES.sub("", drawn(draw, force_terminal=True))  # what rich writes itself
        assert not [c for c in text if c != "\n" and c != "\r" and not c.isprintable()]
        assert "]0;title" in text and "␛" in text and "U+202E" in text and "[red]:x:" in text
        assert "\r" not in text.replace("\r\n", "") or draw is writer  # the bars return to the start of a line
    assert live.inert("plain\ttext\n") == "plain\ttext\n" and live.inert("日本 é ✓") == "日本 é ✓"


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
        with contextlib.suppress(OSError):  # the program has ended
            while until not in seen:
                seen.extend(os.read(leader, 65536))

    read(b"step   20")
    if not closed:
        size(6, 25)
        read(b"more than it writes")
        text = CODES.sub("", seen.decode(errors="replace"))
        assert "step   60" in text and re.search(r"\d/60", text) and "failing calls" in text
    os.close(leader)
    assert process.wait(60) == 0 and (tmp_path / "end").read_text() == "reached"
    guard.cancel()
