"""The file that a command writes its results to: checked before the work whose results they are, written after it."""

from collections.abc import Iterable
from pathlib import Path

from grpo_roc_jax.settings.files import local_path


def output_file(option: str, name: str | Path, inputs: Iterable[str | Path] = ()) -> Path:
    """The file that an option names for results, checked before the work whose results they are. What it holds stays;
    its folder is created.

    Args:
        option: Option that names the file, for messages.
        name: The file.
        inputs: What the command reads; names that are no regular files are passed over.

    Raises:
        ValueError: It cannot be written, or is one of `inputs`, also by a link; the message names the option.
    """
    path = local_path(name)
    for read in map(local_path, inputs):
        if read.is_file() and path.exists() and path.samefile(read):
            raise ValueError(f"{option} {path} would overwrite {read}, which is read; name another file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        exists = path.exists()
        path.open("ab").close()
        if not exists:
            path.unlink()
    except OSError as error:
        raise ValueError(
            f"{option} {path}: {error.strerror or error}; must be a file that can be written, in a folder that exists "
            "or can be created"
        ) from error
    return path


def write_output(option: str, path: Path, text: str) -> None:
    """Writes the results of a command.

    Raises:
        ValueError: They cannot be written, as on a full disk; the message names the option.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{option} {path} could not be written: {error.strerror or error}") from error
