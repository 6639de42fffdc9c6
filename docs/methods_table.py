"""The methods by name, as their recipes describe them, and the table of the documentation.

Recipes of the core are in `configs/methods/`, all others beside their method in `contrib/methods/`. A recipe is a
header of comments (title and source, axes, formula, state), then a few settings over a base recipe.
`python docs/methods_table.py` prints the table. With `docs/methods.md` as its argument it writes the table there and
keeps its last column, which `benchmarks/first_step.py` measures.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from grpo_roc_jax.settings.cli import CONFIG_DIR, CONTRIB_METHODS

FOLDERS = {CONFIG_DIR / "methods": "configs/methods", CONTRIB_METHODS: "grpo_roc_jax/contrib/methods"}
"""Folder of recipes -> its name in a checkout."""

SKETCH = " (sketch)"
"""End of the title of a recipe that replaces a part of its paper by something simpler."""
TABLE_START, TABLE_END = "<!-- generated table -->", "<!-- end of generated table -->"
SKETCH_MARKS = "<!-- generated sketches -->", "<!-- end of generated sketches -->"
AXES = {
    "a": "condition or hint before the rollout",
    "b": "rollout budget and waves",
    "c": "reward",
    "d": "selection",
    "e": "advantage",
    "f": "ratio and surrogate",
    "g": "token weights",
    "h": "controller across steps",
}


@dataclass(frozen=True)
class MethodFile:
    """One method as the header of its recipe describes it."""

    path: Path
    title: str
    paper: str
    """arXiv number, with a section where it matters; empty for a preset of several libraries."""
    axes: str
    """Letters of `AXES`, separated by spaces."""
    formula: str
    state: str
    """What it remembers between steps; empty if nothing."""
    as_in_paper: str = ""
    """For a sketch, what follows the paper."""
    stand_in: str = ""
    """For a sketch, what replaces a part of the paper or is left out; empty for other methods."""


def load_methods() -> dict[str, MethodFile]:
    """Name -> method for every recipe, sorted by name."""
    paths = (path for folder in FOLDERS for path in folder.glob("*.yaml"))
    return {path.stem: read_method(path) for path in sorted(paths, key=lambda path: path.name)}


def read_method(path: Path) -> MethodFile:
    """The method that a file describes in its leading comments.

    Raises:
        ValueError: The header lacks a line, or names an unknown axis.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    header = [line[1:].strip() for line in takewhile(lambda line: line.startswith("#"), lines)]
    title, _, paper = header[0].partition(", arXiv:") if header else ("", "", "")
    fields = dict(line.split(": ", 1) for line in header[1:] if ": " in line)
    missing = [name for name in ("axes", "formula", "state") if name not in fields]
    if not title or missing:
        raise ValueError(
            f"{path}: the header lacks {', '.join(missing) or 'a title'}; begin with '# Title, arXiv:NUMBER', "
            "'# axes: ...', '# formula: ...', '# state: ...'"
        )
    unknown = set(fields["axes"].split()) - set(AXES)
    if unknown:
        raise ValueError(f"{path}: unknown axes {sorted(unknown)}; the axes are {AXES}")
    state = fields["state"].removeprefix("none")
    paper = f"arXiv:{paper}" if paper else ""
    sketch = fields.get("as in the paper", ""), fields.get("stand-in", "")
    if len({*map(bool, sketch), title.endswith(SKETCH)}) > 1:
        raise ValueError(
            f"{path}: a recipe that stands in for a part of its paper has '# Title{SKETCH}', '# as in the paper: ...' "
            "and '# stand-in: ...'; write all three, or none"
        )
    return MethodFile(path, title, paper, fields["axes"], fields["formula"], state, *sketch)


def method_table(differences: Mapping[str, str] | None = None) -> str:
    """A Markdown table: method with a link to its file, axes, formula, source, state, and by name how its first step
    differs from plain GRPO's."""
    head = "| method | axes | formula | source | state | differs from plain GRPO in the first step |"
    rows = [head, "| --- | --- | --- | --- | --- | --- |"]
    for name, m in load_methods().items():
        link, formula = f"[{m.title}](../{FOLDERS[m.path.parent]}/{m.path.name})", m.formula.replace("|", "∣")
        difference = (differences or {}).get(name, "?")
        rows.append(f"| {link} | {m.axes} | `{formula}` | {m.paper or 'preset'} | {m.state or '-'} | {difference} |")
    return "\n".join(rows) + "\n"


def sketch_table() -> str:
    """A Markdown table of the sketches: what is as in the paper, and what is not."""
    head = "| recipe | as in the paper | stand-in |\n| --- | --- | --- |\n"
    sketches = {name: method for name, method in load_methods().items() if method.stand_in}
    return head + "".join(f"| `{name}` | {m.as_in_paper} | {m.stand_in} |\n" for name, m in sketches.items())


def table_differences(document: str) -> dict[str, str]:
    """The last column of the table in a document, by method."""
    links = re.compile(rf"\]\(\.\./(?:{'|'.join(FOLDERS.values())})/(\w+)\.yaml\)")
    named = [(links.search(line), line) for line in document.splitlines() if line.startswith("| [")]
    return {link[1]: row.split(" | ")[-1].removesuffix(" |") for link, row in named if link}


def with_table(document: str, table: str, start_mark: str = TABLE_START, end_mark: str = TABLE_END) -> str:
    """The document with everything between the two marks replaced by the table.

    Raises:
        ValueError: The marks are missing.
    """
    before, start, rest = document.partition(start_mark)
    _, end, after = rest.partition(end_mark)
    if not (start and end):
        raise ValueError(f"the document lacks the lines {start_mark!r} and {end_mark!r}; put them round the table")
    return f"{before}{start_mark}\n{table}{end_mark}{after}"


def main(argv: Sequence[str]) -> None:
    """Prints the table, or writes it into the document given as an argument."""
    if not argv:
        sys.stdout.write(method_table())
        return
    path = Path(argv[0])
    text = path.read_text(encoding="utf-8")
    text = with_table(text, method_table(table_differences(text)))
    path.write_text(with_table(text, sketch_table(), *SKETCH_MARKS), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
