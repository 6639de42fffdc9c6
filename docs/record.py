"""Runs the commands that a page shows and writes what they print below them: `python docs/record.py [PAGE.md ...]`.

A page shows a session in a block marked `console`: a line that begins with `$ ` is a command (with the lines of its
here-document), what follows is its output. The commands of a page run in one empty folder, one after the other. A
command that ends in `# refused` must fail, all others must succeed. Where a page shows a part of an output, recording
replaces each shown line by the line of this run that differs from it in numbers only, and keeps the line `...`. Of a
training run that a page does not show yet, the lines in `TELLING` are taken.

`tests/test_pages_run.py` runs the pages by the same functions.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parent
BLOCK = re.compile(r"^```console\n(.*?)^```", re.DOTALL | re.MULTILINE)
DOCUMENT = re.compile(r"<<'(\w+)'")
GAP = "..."
INSIDE = "│"
"""Begins the lines of a box, between the one with `╭` and the one with `╰`."""
PROGRESS = re.compile(r"^[\w ,/]+: .*(so far|done after .*|\d (?:s|min|h) left)$|^(?:compiled|compiling) .*")
"""Lines on how far a phase is, of which a slow machine prints more."""
TRAINS = re.compile(r"grpo-roc (?:train|sft) (?!.*--(?:dry-run|help|preflight))", re.DOTALL)
TELLING = re.compile(
    r"plan: |\d+ problems x |sft +(?:1|\d*00)  nll|step +[1-9]\d*  reward|accuracy on|failing tool|files: "
)
"""What a page shows of a training run: the plan, one step, losses, rewards, and how it ended."""
DURATION = re.compile(r"(?<![\w.])(\d[\d.]*) (?:s|min|h)\b")
"""`about 90 s` on one machine is `about 2 min` on another."""
STEP = re.compile(r"(?:(?:sft|step) +\d+)?")
"""The step of a line of a training run."""
NUMBER = re.compile(r"(?<![A-Za-z_])[-+]?\d[\d.,]*(?:e-?\d+)?|\b[0-9a-f]{16}\b")


@dataclass(frozen=True)
class Entry:
    """A command of a page and the lines that the page shows below it."""

    command: str
    shown: tuple[str, ...]

    @property
    def refused(self) -> bool:
        return self.command.endswith("# refused")


def entries(block: str) -> list[Entry]:
    """The commands of a block, each with its output.

    Raises:
        ValueError: The block does not begin with a command.
    """
    found: list[tuple[list[str], list[str]]] = []
    end = ""
    for line in block.splitlines():
        if end:
            found[-1][0].append(line)
            end = "" if line == end else end
        elif line.startswith("$ "):
            found.append(([line[2:]], []))
            opened = DOCUMENT.search(line)
            end = opened[1] if opened else ""
        elif not found:
            raise ValueError(f"a console block begins with {line!r}; must begin with a command, `$ COMMAND`")
        elif found[-1][0][-1].endswith("\\") and not found[-1][1]:
            found[-1][0].append(line)
        else:
            found[-1][1].append(line)
    return [Entry("\n".join(command), tuple(shown)) for command, shown in found]


def environment() -> dict[str, str]:
    """Variables of a session: the commands of this interpreter first, CPUs, and no colors."""
    folder = str(Path(sys.executable).parent)
    path = os.pathsep.join([folder, os.environ.get("PATH", "")])
    return {**os.environ, "PATH": path, "JAX_PLATFORMS": "cpu", "COLUMNS": "120", "NO_COLOR": "1"}


def run(entry: Entry, folder: Path, timeout_s: float = 900) -> list[str]:
    """What a command prints in `folder`, as lines; of those on how far a phase is, the ones that the page shows.

    Raises:
        RuntimeError: It failed and must not, or the other way round.
    """
    done = subprocess.run(
        ["bash", "-c", entry.command],
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    if (done.returncode != 0) is not entry.refused:
        raise RuntimeError(f"`{entry.command}` ended with status {done.returncode}:\n{done.stdout}")
    text = done.stdout.replace(f"{folder}/", "").replace(str(Path.home()), "~")
    shown = {form(line) for line in entry.shown}
    return [line.rstrip() for line in text.splitlines() if not PROGRESS.search(line) or form(line) in shown]


def form(line: str) -> str:
    """A line without its numbers and the width of its columns and rules: what two runs have in common."""
    return " ".join(NUMBER.sub("#", DURATION.sub(r"\1 s", re.sub("─+", "─", line))).split())


def missing(shown: Sequence[str], printed: Sequence[str]) -> list[str]:
    """Shown lines that the output does not have, in this order and but for numbers and what is inside of a box.

    A box holds a rollout, and what a policy says after training differs from one version of XLA to the next.
    """
    rest, absent = iter([form(line) for line in printed]), []
    for line in shown:
        if line != GAP and not line.startswith(INSIDE) and form(line) not in rest:
            absent.append(line)
            rest = iter([])
    return absent


def telling(printed: Sequence[str]) -> list[str]:
    """The lines of a training run that a page shows, with gaps for the others."""
    lines: list[str] = []
    for line in printed:
        if TELLING.match(line):
            lines.append(line)
        elif lines[-1:] != [GAP]:
            lines.append(GAP)
    return lines


def renewed(shown: Sequence[str], printed: Sequence[str]) -> list[str]:
    """The shown lines with the numbers of this output; all of it where the page shows nothing yet."""
    if not shown or missing(shown, printed):
        return list(printed)
    after, kept = 0, list[str]()
    for line in shown:
        if line == GAP:
            kept.append(line)
        elif not line.startswith(INSIDE):
            alike = [i for i in range(after, len(printed)) if form(printed[i]) == form(line)]
            at = next((i for i in alike if STEP.match(printed[i])[0] == STEP.match(line)[0]), alike[0])
            box = at
            while box > after and printed[box - 1].startswith(INSIDE):
                box -= 1
            kept += printed[box : at + 1]
            after = at + 1
    return kept


def recorded(page: str, folder: Path) -> str:
    """The text of a page with the outputs of a run in `folder`."""

    def block(match: re.Match[str]) -> str:
        parts = []
        for entry in entries(match[1]):
            printed = run(entry, folder)
            if not entry.shown and TRAINS.search(entry.command):
                printed = telling(printed)
            parts.append("\n".join([f"$ {entry.command}", *renewed(entry.shown, printed)]))
        return "```console\n" + "\n".join(parts) + "\n```"

    return BLOCK.sub(block, page)


def pages() -> list[Path]:
    """The pages that show sessions."""
    return [path for path in sorted(DOCS.rglob("*.md")) if BLOCK.search(path.read_text(encoding="utf-8"))]


if __name__ == "__main__":
    for path in [Path(word).resolve() for word in sys.argv[1:]] or pages():
        with tempfile.TemporaryDirectory() as folder:
            path.write_text(recorded(path.read_text(encoding="utf-8"), Path(folder).resolve()), encoding="utf-8")
        print(path.name, flush=True)
