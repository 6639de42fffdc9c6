"""A hook of mkdocs: links from pages to files outside docs/ lead to copies of these files in the site."""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = re.compile(r"\]\(\.\./([\w./-]+)")


def on_files(files, config):
    """Adds every file of the checkout that a page links to, below `source/`."""
    linked = {name for page in sorted((ROOT / "docs").glob("*.md")) for name in OUTSIDE.findall(page.read_text())}
    for name in sorted(linked):
        path = ROOT / name
        if path.is_file():
            kept = name.removesuffix(".md") + ".txt" if path.suffix == ".md" else name
            files.append(File.generated(config, f"source/{kept}", content=path.read_bytes()))
    return files


def on_page_markdown(markdown, **_):
    """`../configs/x.yaml` becomes `source/configs/x.yaml`; a page of the checkout is shown as text."""
    markdown = re.sub(r"\]\(\.\./([\w./-]+?)\.md(#[\w-]*)?\)", r"](source/\1.txt)", markdown)
    return OUTSIDE.sub(r"](source/\1", markdown).replace("```python run\n", "```python\n")
