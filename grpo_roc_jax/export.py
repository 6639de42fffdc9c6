"""Trained models out: `python -m grpo_roc_jax.export RUN DIR` writes what transformers, vLLM and SGLang load.

The directory holds safetensors shards, `config.json`, `generation_config.json`, the tokenizer's files and the chat
template. It is written under another name and renamed when it is whole; a value that is not finite stops it.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils

from grpo_roc_jax.cli import ConfigError
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.convert import MAX_SHARD_BYTES, find_model, read_published, save_params
from grpo_roc_jax.model.families import find_family
from grpo_roc_jax.model.lora import LoraConfig, save_adapter
from grpo_roc_jax.model.published import infer_family, write_config
from grpo_roc_jax.model.transformer import Params

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""What a published directory says about its tokenizer; copied where it exists."""

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class ExportConfig:
    """Settings of an export."""

    dtype: Dtype = "auto"
    """Dtype of the files; `auto` takes that of the model the run started from, bfloat16 where it was random."""
    max_shard_gb: float = 5.0
    """Largest file, in 10^9 bytes."""
    adapter: bool = False
    """Of a run with `lora.rank`: write a PEFT adapter directory instead of merged weights."""

    def __post_init__(self) -> None:
        if self.max_shard_gb <= 0:
            raise ValueError(f"max_shard_gb = {self.max_shard_gb}; a positive number is wanted")


@dataclass(frozen=True)
class TextFiles:
    """What an exported directory says about text."""

    files: Mapping[str, bytes]
    """Name -> content: tokenizer and chat template."""
    eos_ids: tuple[int, ...] = ()
    """Ids that end a turn."""
    pad_id: int | None = None


def published_text(folder: Path) -> dict[str, bytes]:
    """The tokenizer files of a published directory."""
    return {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()}


def export_model(
    params: Params,
    model: ModelConfig,
    target: Path,
    *,
    dtype: Dtype = "auto",
    text: TextFiles | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[str]:
    """Writes a model directory and returns the names of its files; every process calls it, the first one writes.

    Args:
        params: Of the model, low-rank pairs merged.
        model: With `path` where the model was published; its `config.json` is then carried over.
        target: Must not exist, or be empty.
        dtype: See `ExportConfig`.
        text: Tokenizer, template and special ids; None copies those of `model.path`.
        max_shard_bytes: Of one file.

    Raises:
        FileExistsError: `target` holds something.
        CheckpointError: a value that is not finite in that dtype; nothing is left behind.
        UnsupportedModelError: no published family computes this model.
    """
    source = find_model(model.path) if model.path else None
    published = dict(read_published(source)) if source else write_config(model)
    family = find_family(published) if source else infer_family(model)
    chosen = _choose_dtype(dtype, published)
    published.pop("dtype", None)
    published |= {"torch_dtype": chosen}
    text = text or TextFiles(published_text(source) if source else {})
    _add_special_ids(published, text)
    generation = _generation_config(source, published)

    def write(folder: Path) -> list[str]:
        names = save_params(params, model, family, folder, dtype=jnp.dtype(chosen), max_shard_bytes=max_shard_bytes)
        if jax.process_index():
            return []
        _write_json(folder / "config.json", published)
        _write_json(folder / "generation_config.json", generation)
        for name, content in text.files.items():
            (folder / name).write_bytes(content)
        return [*names, "config.json", "generation_config.json", *text.files]

    return atomically(target, write)


def export_adapter(adapter: Params, lora: LoraConfig, model: ModelConfig, target: Path) -> list[str]:
    """Writes a PEFT adapter directory for the model at `model.path`; the arguments and faults are as above."""
    if not model.path:
        raise ConfigError("an adapter belongs to a published model; set model.path, or export the merged weights")
    family = find_family(read_published(find_model(model.path)))
    return atomically(target, lambda folder: save_adapter(adapter, lora, model, family, folder, model.path))


def atomically(target: Path, write: Callable[[Path], list[str]]) -> list[str]:
    """`write(folder)` beside the target, then the target by renaming; on any failure nothing is left.

    Raises:
        FileExistsError: the target exists and is no empty directory.
    """
    target = target.expanduser().absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} exists already; name a new directory, as nothing is overwritten")
    if jax.process_index():
        names = write(target)
        multihost_utils.sync_global_devices("exported")
        return names
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        names = write(folder)
        folder.chmod(0o755)
        os.replace(folder, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("exported")
    return names


def _choose_dtype(dtype: Dtype, published: Mapping[str, Any]) -> str:
    if dtype != "auto":
        return dtype
    stated = str(published.get("dtype") or published.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return stated if stated in ("float32", "bfloat16", "float16") else "bfloat16"


def _add_special_ids(published: dict[str, Any], text: TextFiles) -> None:
    """The ids that end a turn join those that the model had, so that every server stops where training did."""
    if text.eos_ids:
        stated = published.get("eos_token_id")
        before = [stated] if isinstance(stated, int) else list(stated or ())
        ids = list(dict.fromkeys([*text.eos_ids, *before]))
        published["eos_token_id"] = ids[0] if len(ids) == 1 else ids
    if text.pad_id is not None and published.get("pad_token_id") is None:
        published["pad_token_id"] = text.pad_id


def _generation_config(source: Path | None, published: Mapping[str, Any]) -> dict[str, Any]:
    file = source / "generation_config.json" if source else None
    generation = json.loads(file.read_text(encoding="utf-8")) if file and file.is_file() else {}
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if published.get(key) is None:
            continue
        ids = [published[key], generation.get(key, [])]
        both = [i for part in ids for i in (part if isinstance(part, list) else [part]) if i is not None]
        both = list(dict.fromkeys(both)) if key == "eos_token_id" else both[:1]
        generation[key] = both[0] if len(both) == 1 else both
    return generation


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
