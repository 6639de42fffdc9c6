"""Problem sets of the Hugging Face hub, read by `datasets` at a fixed revision."""

import re
from typing import Any

from grpo_roc_jax.data.problems import LoadReport, problems_of
from grpo_roc_jax.process.installing import install_command
from grpo_roc_jax.types import Problem

HUB_PREFIX = "hub:"
SOURCE = re.compile(r"hub:(?P<name>[^@:]+)@(?P<revision>[^:]+)(:(?P<config>[^:]*))?(:(?P<split>[^:]+))?")
COMMIT = re.compile(r"[0-9a-f]{40}")


def load_hub(source: str, **columns: Any) -> tuple[list[Problem], LoadReport]:
    """Problems of a data set and a report that names the commit.

    Args:
        source: `hub:OWNER/NAME@REVISION`, then `:CONFIG` and `:SPLIT`; the split is `train` if it is left out. A branch
            or tag is looked up once, and the rows are those of its commit. OWNER/NAME may be a folder.
        **columns: As in `load_problems`.

    Raises:
        ValueError: The source has another form, `datasets` is not installed, there is no such data set, or as in
            `load_problems`.
    """
    parts = SOURCE.fullmatch(source)
    if parts is None:
        raise ValueError(f"data source {source!r}; must be hub:OWNER/NAME@REVISION, then :CONFIG and :SPLIT if needed")
    try:
        import datasets
        from huggingface_hub import HfApi
    except ImportError as error:
        raise ValueError(
            f"data source {source!r} needs the package datasets ({error}); {install_command('datasets')}"
        ) from error
    name, revision = parts["name"], parts["revision"]
    try:
        commit = revision if COMMIT.fullmatch(revision) else HfApi().dataset_info(name, revision=revision).sha
        split = parts["split"] or "train"
        rows = datasets.load_dataset(name, parts["config"] or None, revision=commit, split=split)
    except Exception as error:  # the hub, the network and builders of data sets raise exceptions of many kinds
        raise ValueError(f"data source {source!r}: {type(error).__name__}: {error}") from error
    path = f"{HUB_PREFIX}{name}@{commit}:{parts['config'] or ''}:{split}"
    return problems_of(enumerate(rows, 1), path, name.rstrip("/").rsplit("/", 1)[-1], **columns)
