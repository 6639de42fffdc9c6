"""Starts the executor process and its roots by exec, with a clean environment and without importing this package.

They import their modules under another package name, so neither `grpo_roc_jax` nor anything it imports is loaded, and
nothing in this directory shadows a module that programs import. Standard library only.
"""

import os
import subprocess
import sys

PACKAGE = "grpo_tools_box"
BOOT = (
    "import os, sys, types, importlib\n"
    f"box = types.ModuleType({PACKAGE!r})\n"
    "box.__path__ = sys.argv[1].split(os.pathsep)\n"
    f"sys.modules[{PACKAGE!r}] = box\n"
    f"importlib.import_module({PACKAGE!r} + '.' + sys.argv[2]).main(sys.argv[3:])\n"
)
THREAD_VARIABLES = ("OPENBLAS", "OMP", "MKL", "NUMEXPR", "BLIS", "VECLIB_MAXIMUM")


def environment() -> dict[str, str]:
    """The environment of programs; the trainer's is not inherited."""
    fixed = {
        "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "TZ": "UTC", "HOME": "/nonexistent",
        "USER": "user", "PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "PYTHONDONTWRITEBYTECODE": "1", "MPLBACKEND": "Agg",
        "MALLOC_ARENA_MAX": "2",
    }  # fmt: skip
    # Some interpreters do not find their own shared library without it.
    passed = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return fixed | passed | {f"{name}_NUM_THREADS": "1" for name in THREAD_VARIABLES}


def command(module: str, *arguments: str, folder: str = "", interpreter: str = "") -> list[str]:
    """The command that executes a module of this directory, or of `folder`, in a new interpreter."""
    folders = os.pathsep.join(filter(None, (os.path.dirname(__file__), folder)))
    return [interpreter or sys.executable, "-B", "-s", "-P", "-c", BOOT, folders, module, *arguments]


def start(module: str, fd: int, *arguments: str, interpreter: str = "") -> subprocess.Popen:
    """Execute a module of this directory in a new interpreter and session. It gets `fd` only, as its first argument."""
    null = subprocess.DEVNULL
    errors = None if os.environ.get("GRPO_TOOLS_DEBUG") else null
    return subprocess.Popen(
        command(module, str(fd), *arguments, interpreter=interpreter), env=environment(), cwd="/", stdin=null,
        stdout=null, stderr=errors, pass_fds=[fd], start_new_session=True,
    )  # fmt: skip
