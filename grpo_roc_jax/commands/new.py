"""`grpo-roc new DIR`: a small project (configuration, data, tool, reward, test) that trains at once."""

import argparse
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_roc_jax.settings.cli import CONFIG_DIR

_INSTALLED = CONFIG_DIR.parent / "project"
TEMPLATE = _INSTALLED if _INSTALLED.is_dir() else CONFIG_DIR.parent / "examples" / "project"
"""The files of a project: inside the package when installed from a wheel, among the examples in a checkout."""


def new_project(target: Path) -> list[str]:
    """Writes a project into a new or empty directory and returns the names of its files.

    Raises:
        FileExistsError: The directory is not empty; nothing has been written.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} is not an empty directory; name a new one")
    shutil.copytree(TEMPLATE, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "data", "runs"))
    subprocess.run([sys.executable, str(target / "make_data.py")], check=True)
    shutil.rmtree(target / "__pycache__", ignore_errors=True)
    return sorted(path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file())


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="grpo-roc new", description=__doc__)
    parser.add_argument("directory", type=Path, help="a directory that does not exist yet, or is empty")
    target = parser.parse_args(argv).directory.expanduser()
    try:
        names = new_project(target)
    except OSError as error:
        print(f"new: {error}", file=sys.stderr)
        return 2
    print(f"{target}: {', '.join(names)}\nnext: cd {shlex.quote(str(target))} && grpo-roc train config.yaml")
    return 0
