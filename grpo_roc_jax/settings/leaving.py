"""The end of a command: a thread that hangs, such as one of a judge that was given up, keeps no process alive."""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

POLL_S = 0.2
GRACE_S = 5.0
"""Seconds that the threads of a user's functions have to end by themselves after the command."""


def end_with(main: Callable[[], int]) -> NoReturn:
    """Runs a command and ends the process with its status.

    Python waits at its end for threads, also for one that never ends: a pool of threads inside a reward function is
    enough, whose threads it joins even if they are daemons. After `GRACE_S` the process leaves without them; all of the
    run is closed by then.
    """
    status = 1
    try:
        status = main()
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        raise
    finally:
        bound_exit(status)
    sys.exit(status)


def bound_exit(status: int, grace_s: float = GRACE_S) -> None:
    """Lets the end of the process wait for threads no longer than `grace_s`."""
    threading.Thread(target=_leave, args=(status, grace_s), name="leaving", daemon=True).start()


def _waits_for_threads() -> bool:
    """Whether the main thread has ended its program. No event says so: pools of threads are joined before the main
    thread counts as stopped."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame is None or (frame.f_code.co_name == "_shutdown" and frame.f_code.co_filename == threading.__file__)


def _leave(status: int, grace_s: float) -> None:
    while not _waits_for_threads():
        time.sleep(POLL_S)
    time.sleep(grace_s)
    own = (threading.main_thread(), threading.current_thread())
    names = ", ".join(thread.name for thread in threading.enumerate() if thread not in own)
    with suppress(Exception):  # nobody may read any more
        print(f"left without threads that do not end: {names}", file=sys.stderr)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)
