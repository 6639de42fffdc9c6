"""Exports a policy for transformers, vLLM and SGLang: `grpo-roc export RUN TARGET`.

RUN is the directory of a run, for its newest checkpoint, or one of its checkpoints; or a PEFT adapter directory, which
is merged into the model that it belongs to. The target contains safetensors shards, `config.json`,
`generation_config.json`, the tokenizer's files and the chat template. It is written under another name and renamed when
it is complete. Values that are not finite are an error.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import tyro
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.convert import MAX_SHARD_BYTES, find_model, index_tensors, read_published, save_params
from grpo_roc_jax.model.families import find_family
from grpo_roc_jax.model.lora import LowRank, merge, save_adapter
from grpo_roc_jax.model.published import infer_family, write_config
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh
from grpo_roc_jax.model.transformer import Params
from grpo_roc_jax.process.points import reach
from grpo_roc_jax.process.progress import show_log
from grpo_roc_jax.run.components import read_text_and_shape
from grpo_roc_jax.run.load import is_run, load_pairs, settings_for
from grpo_roc_jax.run.policy import frozen_weights, load_trained, split_checkpoint
from grpo_roc_jax.settings.cli import ConfigError
from grpo_roc_jax.settings.files import parse_json, read_json_object
from grpo_roc_jax.text.chat_format import make_chat
from grpo_roc_jax.text.config import PublishedTemplate, TextConfig
from grpo_roc_jax.text.exported import exported_template
from grpo_roc_jax.text.templates import MORE_TEMPLATES
from grpo_roc_jax.text.tokenizer import PLAIN_SPECIAL, Tokenizer, tokenizer_path, with_added_tokens
from grpo_roc_jax.tools.registry import default_registry

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
"""Tokenizer files of a published directory; those that exist are copied."""

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class ExportConfig:
    """Writes the policy of a run as a directory that other software loads."""

    checkpoint: tyro.conf.Positional[str]
    """Directory of the run, for its newest checkpoint, one of its checkpoints (`RUN/checkpoints/step_00000012`), or a
    PEFT adapter directory."""
    target: tyro.conf.Positional[str]
    """Directory to write; must not exist yet, or be empty."""
    dtype: Dtype = "auto"
    """Dtype of the files; `auto` takes that of the model the run started from, bfloat16 where it was random."""
    max_shard_gb: float = 5.0
    """Largest file, in 10^9 bytes."""
    adapter: bool = False
    """For a run with `lora: low_rank`: write a PEFT adapter directory instead of merged weights."""

    def __post_init__(self) -> None:
        if self.max_shard_gb <= 0:
            raise ValueError(f"max_shard_gb = {self.max_shard_gb}; must be above 0")


@dataclass(frozen=True)
class TextFiles:
    """The tokenizer files and special ids of an exported directory."""

    files: Mapping[str, bytes]
    """Name -> content: tokenizer and chat template."""
    eos_ids: tuple[int, ...] = ()
    """Ids that end a turn."""
    pad_id: int | None = None


def published_text(folder: Path) -> dict[str, bytes]:
    """The tokenizer files of a published directory, with its named chat templates."""
    more = sorted(path.relative_to(folder).as_posix() for path in (folder / MORE_TEMPLATES).glob("*.jinja"))
    return {name: (folder / name).read_bytes() for name in (*TOKENIZER_FILES, *more) if (folder / name).is_file()}


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
        params: Parameters of the model, with low-rank pairs merged.
        model: If it has a `path` (a published model), its `config.json` is copied.
        target: Must not exist, or be empty.
        dtype: See `ExportConfig`.
        text: Tokenizer, template and special ids; None copies those of `model.path`.
        max_shard_bytes: Largest size of one file.

    Raises:
        FileExistsError: `target` is not empty.
        CheckpointError: A value is not finite in that dtype; nothing is left on disk.
        UnsupportedModelError: No published family computes this model.
    """
    source = find_model(model.path) if model.path else None
    published = dict(read_published(source)) if source else write_config(model)
    family = find_family(published) if source else infer_family(model)
    chosen = _choose_dtype(dtype, published)
    for key in ("dtype", "quantization_config"):  # of the files that were read; those written hold plain numbers
        published.pop(key, None)
    published |= {"torch_dtype": chosen}
    text = text or TextFiles(published_text(source) if source else {})
    _add_special_ids(published, text)
    generation = _generation_config(source, published)

    def write(folder: Path) -> list[str]:
        carried = index_tensors(source, model) if source else {}
        options = {"dtype": jnp.dtype(chosen), "max_shard_bytes": max_shard_bytes, "carried": carried}
        names = save_params(params, model, family, folder, **options)
        if jax.process_index():
            return []
        _write_json(folder / "config.json", published)
        _write_json(folder / "generation_config.json", generation)
        for name, content in text.files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
        return [*names, "config.json", "generation_config.json", *text.files]

    return atomically(target, write)


def export_adapter(adapter: Params, lora: LowRank, model: ModelConfig, target: Path) -> list[str]:
    """Writes a PEFT adapter directory for the model at `model.path`; arguments and errors as in `export_model`."""
    if not model.path:
        raise ConfigError("an adapter belongs to a published model; set model.path, or export the merged weights")
    family = find_family(read_published(find_model(model.path)))
    return atomically(target, lambda folder: save_adapter(adapter, lora, model, family, folder, model.path))


def atomically(target: Path, write: Callable[[Path], list[str]]) -> list[str]:
    """Calls `write(folder)` on a temporary folder next to the target and renames it; after a failure nothing is left.

    Raises:
        FileExistsError: The target exists and is not an empty directory.
    """
    target = unused_target(target)
    if jax.process_index():
        names = write(target)
        multihost_utils.sync_global_devices("exported")
        return names
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        names = write(folder)
        reach("export.write")
        folder.chmod(0o755)
        os.replace(folder, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("exported")
    return names


def unused_target(target: str | Path) -> Path:
    """The absolute path of a target.

    Raises:
        FileExistsError: It exists and is not an empty directory.
    """
    path = Path(target).expanduser().absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{path} exists already; name a new directory, since nothing is overwritten")
    return path


def checked_target(target: str) -> Path:
    """`unused_target`, checked before the work whose result it is to hold. The folder that it lies in is created.

    Raises:
        ConfigError: Nothing can be written there.
        FileExistsError: See `unused_target`.
    """
    path = unused_target(target)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent)).rmdir()
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror or error}; must be a directory that can be created, in a folder that exists or "
            "can be created"
        ) from error
    return path


def _choose_dtype(dtype: Dtype, published: Mapping[str, Any]) -> str:
    if dtype != "auto":
        return dtype
    stated = str(published.get("dtype") or published.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return stated if stated in ("float32", "bfloat16", "float16") else "bfloat16"


def _add_special_ids(published: dict[str, Any], text: TextFiles) -> None:
    """Adds the ids that end a turn to those of the model, so that servers stop where training did."""
    if text.eos_ids:
        stated = published.get("eos_token_id")
        before = [stated] if isinstance(stated, int) else list(stated or ())
        ids = list(dict.fromkeys([*text.eos_ids, *before]))
        published["eos_token_id"] = ids[0] if len(ids) == 1 else ids
    if text.pad_id is not None and published.get("pad_token_id") is None:
        published["pad_token_id"] = text.pad_id


def _generation_config(source: Path | None, published: Mapping[str, Any]) -> dict[str, Any]:
    file = source / "generation_config.json" if source else None
    generation = read_json_object(file) if file and file.is_file() else {}
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


# ---- the command line ----------------------------------------------------------------------------------------------


def export_run(options: ExportConfig) -> list[str]:
    """Exports a checkpoint of a run and returns the names of the files.

    Raises:
        ConfigError: There is no run or no checkpoint, the run has no adapter to export, or the target cannot be
            written.
        FileExistsError: The target is not empty.
    """
    trains, prog = is_run(options.checkpoint), "grpo-roc export"
    config = settings_for(options.checkpoint, [], prog, dialogue=False)
    if not trains and not config.lora.rank:
        raise ConfigError(f"{options.checkpoint} is a published model already; name a run or an adapter")
    if options.adapter and not (trains and config.lora.rank):
        raise ConfigError(f"{options.checkpoint} trained no adapter; leave --adapter out")
    target = checked_target(options.target)
    text, tokenizer, model = read_text_and_shape(config)
    mesh = export_mesh(model)
    if trains:
        run, step = split_checkpoint(options.checkpoint)
        trained = load_trained(run / "checkpoints", model, mesh, config.lora, step)[1]
    else:
        trained = load_pairs(options.checkpoint, config.lora, model, mesh)
    if options.adapter:
        return export_adapter(trained, config.lora, model, target)
    if config.lora.rank:
        trained = merge(frozen_weights(config, model, mesh), trained, config.lora)
    shard_bytes = int(options.max_shard_gb * 1e9)
    text = text_files(text, tokenizer, default_registry(config.tools.enabled).schemas)
    return export_model(trained, model, target, dtype=options.dtype, text=text, max_shard_bytes=shard_bytes)


def export_mesh(model: ModelConfig) -> Mesh:
    """A mesh of as many devices as the shape of the parameters can be divided among."""
    devices = jax.devices()
    for parts in range(len(devices), 1, -1):
        if model.d_model % parts == 0 and model.vocab_size % parts == 0:
            return make_mesh(ShardingConfig(data=1, fsdp=parts), devices[:parts])
    return make_mesh(ShardingConfig(data=1), devices[:1])


def text_files(config: TextConfig, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] = ()) -> TextFiles:
    """The tokenizer of a run in published form, its chat template, and the ids that end a turn."""
    chat = make_chat(config, tokenizer, tools)
    files = with_added_files(tokenizer_files(config, tokenizer), config.tokenizer.added_tokens, tokenizer)
    template = None
    if not isinstance(config.template, PublishedTemplate):
        template = exported_template(chat).encode() if files else None
    elif config.template.file:
        template = Path(config.template.file).expanduser().read_bytes()
    if template is not None:  # without the named templates, which transformers prefers for a dialogue with tools
        files = {name: content for name, content in files.items() if not name.startswith(f"{MORE_TEMPLATES}/")}
        files["chat_template.jinja"] = template
    ids = tuple(dict.fromkeys([chat.end_id, tokenizer.eos_id]))
    return TextFiles(files, ids, tokenizer.pad_id)


def tokenizer_files(config: TextConfig, tokenizer: Tokenizer) -> dict[str, bytes]:
    """Tokenizer files to export with the weights; none for `bytes`, which other software cannot load."""
    source = config.tokenizer
    if source.kind == "bytes":
        return {}
    path = tokenizer_path(source)
    if source.path and path.is_dir():
        return published_text(path)
    special = {"eos_token": tokenizer.decode([tokenizer.eos_id]), "pad_token": tokenizer.decode([tokenizer.pad_id])}
    if path.suffix == ".json":
        described = {"tokenizer_class": "PreTrainedTokenizerFast"} | special
        return {"tokenizer.json": path.read_bytes(), "tokenizer_config.json": json.dumps(described).encode()}
    toy = resources.files("grpo_roc_jax.text").joinpath("toy.model")
    content = toy.read_bytes() if source.kind == "toy" else path.read_bytes()
    # A plain SentencePiece model: nothing is added before or after the text.
    plain = {"add_bos_token": False, "add_eos_token": False, "add_prefix_space": False, "legacy": False}
    described = {"tokenizer_class": "LlamaTokenizer", "bos_token": None} | special | plain
    return {"tokenizer.model": content, "tokenizer_config.json": json.dumps(described).encode()}


def with_added_files(files: Mapping[str, bytes], texts: Sequence[str], tokenizer: Tokenizer) -> dict[str, bytes]:
    """The tokenizer files including `text.tokenizer.added_tokens`, under the ids that the run used."""
    if not texts or not files:
        return dict(files)
    changed = dict(files)
    if "tokenizer.json" in files:
        changed["tokenizer.json"] = json.dumps(
            with_added_tokens(parse_json(files["tokenizer.json"], "tokenizer.json"), texts)
        ).encode()
    described = parse_json(files.get("tokenizer_config.json", b"{}"), "tokenizer_config.json")
    if "tokenizer.json" in files and "added_tokens_decoder" not in described:
        return changed  # a list of these alone would be read as the complete list
    decoder = {str(tokenizer.special(text)): PLAIN_SPECIAL | {"content": text} for text in texts}
    described["added_tokens_decoder"] = (described.get("added_tokens_decoder") or {}) | decoder
    return changed | {"tokenizer_config.json": json.dumps(described).encode()}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    show_log()
    try:
        options = tyro.cli(ExportConfig, args=argv, prog="grpo-roc export")
        names = export_run(options)
    except (ValueError, OSError) as error:  # ConfigError and CheckpointError are ValueErrors
        print(f"export: {error}", file=sys.stderr)
        return 2
    total = sum((Path(options.target).expanduser() / name).stat().st_size for name in names)
    print(f"{options.target}: {', '.join(names)} ({total / 1e6:.1f} MB)")
    return 0
