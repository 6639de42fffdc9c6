"""The end of a command: a thread that hangs, for example one in a judge that timed out, must not keep the process
alive."""

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
"""Seconds that threads of the user's functions have to end after the command."""


def end_with(main: Callable[[], int]) -> NoReturn:
    """Runs a command and ends the process with its status.

    At exit Python waits for threads, even for one that never ends: a thread pool inside a reward function is enough,
    whose threads are joined even if they are daemons. After `GRACE_S` the process exits without them; the run is closed
    by then.
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
    """Limits the time that the process waits for threads at its end to `grace_s` seconds."""
    threading.Thread(target=_leave, args=(status, grace_s), name="leaving", daemon=True).start()


def _waits_for_threads() -> bool:
    """Whether the main thread has ended its program. There is no event for this: thread pools are joined before the
    main thread counts as stopped."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame is None or (frame.f_code.co_name == "_shutdown" and frame.f_code.co_filename == threading.__file__)


def _leave(status: int, grace_s: float) -> None:
    while not _waits_for_threads():
        time.sleep(POLL_S)
    time.sleep(grace_s)
    expected = (threading.main_thread(), threading.current_thread())
    names = ", ".join(thread.name for thread in threading.enumerate() if thread not in expected)
    with suppress(Exception):  # nobody may be reading the output any more
        print(f"left without threads that do not end: {names}", file=sys.stderr)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)
