"""Programs, each with its right kind. Many failures do not print the word error, and some good programs do."""

BY_KIND = [
    ("ok", ["import sys; print('error: ignored', file=sys.stderr)", "class MyError(Exception): pass\nprint(MyError)"]),
    ("ok", ["import logging; logging.error('logged only')", "print('Traceback (most recent call last):')", "exit()"]),
    ("ok", ["import numpy as np; np.array([1.0]) / 0", "print('mean squared error: 0.0')", "print('<timeout>')", ""]),
    ("exception", ["import numpy as np; np.linalg.inv(np.zeros((2, 2)))", "import sys; print('done'); sys.exit(2)"]),
    ("exception", ["class Stop(Exception): pass\nraise Stop('enough')", "import sys; sys.exit('not solvable')", "1/0"]),
    ("exception", ["class Found(BaseException): pass\nraise Found(3)", "import os; print(42); os._exit(0)", "quit(5)"]),
    ("exception", ["raise ExceptionGroup('both', [StopIteration()])", "import nonexistent_module_xyz", "input()"]),
    ("exception", ["def f(): return f()\nf()", "raise KeyboardInterrupt", "raise StopIteration", "assert 1 == 2"]),
    ("crash", ["import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "import ctypes; ctypes.string_at(0)"]),
    ("crash", ["import os, signal; os.kill(os.getpid(), signal.SIGTERM)", "import os; os.abort()"]),
    ("syntax_error", ["  x = 1\n y = 2", "print(1)\0", "print((1", "return 1", "x = = 1"]),
    ("timeout", ["while True:\n    try:\n        while True: pass\n    except BaseException: pass"]),
    ("timeout", ["import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: pass"]),
    ("timeout", ["import threading\nlock = threading.Lock(); lock.acquire(); lock.acquire()"]),
    ("memory_limit", ["import numpy as np; np.ones((10**6, 10**6))", "x = bytearray(1 << 40)", "[0] * 10**11"]),
    ("output_limit", ["import os\nwhile True: os.write(2, b'y' * 65536)", "while True: print('x' * 1000)"]),
]
LABELLED: list[tuple[str, str]] = [(kind, code) for kind, codes in BY_KIND for code in codes]
